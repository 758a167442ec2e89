//! Which processes of this host compute, and how crowded the host is.
//!
//! On an overloaded machine the thread that sends a rank's heartbeats may wait long for a core, while other threads of the same
//! rank have one. Whoever started the process can see that: it uses processor time, so it is neither stopped nor hung, and its
//! silence is the machine's.

use crate::deadlines::Deadlines;
use crate::process::Process;
use std::fmt;
use std::time::{Duration, Instant};

/// The load average of a host over a minute, and its cores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostLoad {
    pub average_tenths: u32,
    pub cores: u32,
}

/// So many threads that want each core, on average, are too many to blame a rank.
const CROWDED: u32 = 2;

impl HostLoad {
    /// Of this host, as far as the system tells.
    fn here() -> Self {
        let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let average: f64 = text.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0.0);
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as u32;
        Self { average_tenths: (average * 10.0) as u32, cores }
    }

    /// Whether its threads wait for cores for so long that a rank may seem lost.
    pub fn is_crowded(self) -> bool {
        self.average_tenths > 10 * CROWDED * self.cores.max(1)
    }
}

impl fmt::Display for HostLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { average_tenths, cores } = self;
        let plural = if *cores == 1 { "" } else { "s" };
        write!(f, "a load average of {}.{} on {cores} core{plural}", average_tenths / 10, average_tenths % 10)
    }
}

/// Sees which of this host's workers compute.
#[derive(Debug)]
pub(crate) struct ComputeWatch {
    pause: Duration,
    looked: Instant,
    /// Processor time that each process had used then.
    used: Vec<Option<Duration>>,
}

impl ComputeWatch {
    pub fn new(deadlines: Deadlines) -> Self {
        Self { pause: Duration::from_millis(deadlines.beat_ms()), looked: Instant::now(), used: Vec::new() }
    }

    /// The processes that have computed since the last look, once for each heartbeat.
    pub fn look(&mut self, processes: &[Process]) -> Vec<(usize, HostLoad)> {
        if self.looked.elapsed() < self.pause {
            return Vec::new();
        }
        self.looked = Instant::now();
        let used: Vec<_> = processes.iter().map(Process::processor_time).collect();
        let before = std::mem::replace(&mut self.used, used);
        let computed =
            |at: &usize| matches!((before.get(*at), self.used[*at]), (Some(Some(then)), Some(now)) if now > *then);
        let computed: Vec<usize> = (0..self.used.len()).filter(computed).collect();
        let load = if computed.is_empty() { HostLoad::default() } else { HostLoad::here() };
        computed.into_iter().map(|at| (at, load)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn who_computes_is_seen_and_who_sleeps_is_not() {
        let start = |words: &[&str]| {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]);
            Process::spawn(command, None).unwrap()
        };
        let processes = [start(&["sh", "-c", "while :; do :; done"]), start(&["sleep", "1000"])];
        let mut watch = ComputeWatch::new(Deadlines { heartbeat_ms: 40 });
        let mut seen = [0, 0];
        let deadline = Instant::now() + Duration::from_secs(60);
        while seen[0] < 20 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
            let computed = watch.look(&processes);
            computed.iter().for_each(|(at, load)| {
                assert!(load.cores > 0);
                seen[*at] += 1;
            });
        }
        // To start takes a sleeper some time, once.
        assert!(seen[0] >= 20 && seen[1] < seen[0] / 2, "{seen:?}");
    }

    #[test]
    fn a_crowded_host_has_more_threads_than_cores() {
        let load = |average_tenths: u32, cores: u32| HostLoad { average_tenths, cores };
        assert!(load(302, 2).is_crowded() && !load(39, 2).is_crowded() && !load(300, 64).is_crowded());
        assert_eq!(load(302, 2).to_string(), "a load average of 30.2 on 2 cores");
        assert_eq!(load(15, 1).to_string(), "a load average of 1.5 on 1 core");
    }
}
