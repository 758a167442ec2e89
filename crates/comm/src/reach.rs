//! Whether the host at the other end of a TCP stream still answers.
//!
//! A host's kernel acknowledges what it receives, whatever its processes do: a rank that is stuck or stopped is still
//! answered for. A host that a network does not reach any more is not.

use std::net::TcpStream;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// Heartbeats without an answer after which a peer counts as unreachable.
pub const UNANSWERED_HEARTBEATS: u32 = 4;
/// Looks without an answer that it also takes: after a pause of this whole machine, the first one says nothing.
const UNANSWERED_LOOKS: u32 = 8;

/// Silence after which a stream is probed, so that a lost host is seen on idle streams too: a heartbeat, within limits.
pub fn probe_pause(heartbeat: Duration) -> Duration {
    heartbeat.clamp(PROBE_PAUSE_MIN, PROBE_PAUSE_MAX)
}

/// Systems count these pauses in whole seconds.
const PROBE_PAUSE_MIN: Duration = Duration::from_secs(1);
const PROBE_PAUSE_MAX: Duration = Duration::from_secs(5);

/// What the kernel knows of a stream.
#[derive(Clone, Copy, Debug)]
pub struct Acknowledgements {
    /// Something that was sent, data or a probe, is not acknowledged yet.
    pub awaited: bool,
    /// When the last one came.
    pub ago: Duration,
}

/// `None` where the system does not say.
#[cfg(target_os = "linux")]
pub fn acknowledgements(stream: &TcpStream) -> Option<Acknowledgements> {
    use std::os::fd::AsRawFd;
    // SAFETY: a zeroed structure is a valid place for the answer, which is no longer than `length` says.
    unsafe {
        let mut info: libc::tcp_info = std::mem::zeroed();
        let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
        let place = std::ptr::from_mut(&mut info).cast();
        let answer = libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, place, &mut length);
        let awaited = info.tcpi_unacked > 0 || info.tcpi_probes > 0;
        (answer == 0).then(|| Acknowledgements { awaited, ago: Duration::from_millis(info.tcpi_last_ack_recv.into()) })
    }
}

#[cfg(not(target_os = "linux"))]
pub fn acknowledgements(_: &TcpStream) -> Option<Acknowledgements> {
    None
}

/// A stream to a rank, for as long as somebody has it, and since when it waits in vain.
#[derive(Debug)]
pub(crate) struct Path {
    pub rank: usize,
    stream: Weak<TcpStream>,
    unanswered: Unanswered,
}

impl Path {
    pub fn new(rank: usize, stream: Weak<TcpStream>) -> Self {
        Self { rank, stream, unanswered: Unanswered::default() }
    }

    pub fn is_open(&self) -> bool {
        self.stream.strong_count() > 0
    }

    /// Looks whether nothing has been answered for this long.
    pub fn is_silent(&mut self, now: Instant, limit: Duration) -> bool {
        let known = self.stream.upgrade().and_then(|stream| acknowledgements(&stream));
        known.is_some_and(|known| self.unanswered.lasts(now, known, limit))
    }
}

/// Since when an answer is awaited, and how often that was seen.
#[derive(Debug, Default)]
struct Unanswered(Option<(Instant, u32)>);

impl Unanswered {
    fn lasts(&mut self, now: Instant, known: Acknowledgements, limit: Duration) -> bool {
        // An old answer says nothing of what was sent a moment ago: the wait counts from when it was first seen.
        let (since, looks) = match self.0.filter(|(since, _)| known.ago >= now.saturating_duration_since(*since)) {
            _ if !known.awaited => {
                self.0 = None;
                return false;
            }
            None => (now, 0),
            Some((since, looks)) => (since, looks + 1),
        };
        self.0 = Some((since, looks));
        looks >= UNANSWERED_LOOKS && now.saturating_duration_since(since) >= limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::watch::Watch;
    use std::io::{ErrorKind, Write};
    use std::net::TcpListener;
    use std::sync::Arc;

    const LIMIT: Duration = Duration::from_millis(400);

    /// Its process reads nothing, but its host takes what fits, and answers whoever asks for more room.
    #[test]
    fn a_peer_that_is_stuck_is_reachable() {
        let watch = Watch::new(Vec::new(), LIMIT / UNANSWERED_HEARTBEATS);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = Arc::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (_stuck, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        watch.add_path(3, Arc::downgrade(&stream));
        let full = loop {
            if let Err(error) = (&*stream).write(&[0; 1 << 16]) {
                break error.kind();
            }
        };
        assert_eq!(full, ErrorKind::WouldBlock);
        let start = Instant::now();
        while start.elapsed() < 3 * LIMIT {
            assert_eq!(watch.unreachable(), []);
            std::thread::sleep(LIMIT / 16);
        }
    }

    #[test]
    fn only_a_long_wait_without_any_answer_counts() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let known = |awaited: bool, ago_ms: u64| Acknowledgements { awaited, ago: Duration::from_millis(ago_ms) };
        // Nothing is awaited, however long ago the last answer came.
        let mut idle = Unanswered::default();
        assert!((0..100).all(|turn| !idle.lasts(at(25 * turn), known(false, 10_000), LIMIT)));
        // It answers late, but it does.
        let mut slow = Unanswered::default();
        assert!((0..100).all(|turn| !slow.lasts(at(25 * turn), known(true, 25 * turn % 300), LIMIT)));
        // After a long silence, something is sent and never answered.
        let mut cut = Unanswered::default();
        let found = (0..100).find(|turn| cut.lasts(at(25 * turn), known(true, 10_000 + 25 * turn), LIMIT));
        assert_eq!(found, Some(16));
        assert!(!cut.lasts(at(3000), known(true, 5), LIMIT), "it is there again");
        // One look before a pause and one after it are no evidence.
        let mut paused = Unanswered::default();
        assert!(!paused.lasts(at(0), known(true, 100), LIMIT));
        assert!(!paused.lasts(at(9000), known(true, 9100), LIMIT));
    }
}
