//! The status that a rank's collectives share with the monitor of the job.
//!
//! Collectives write what they are doing and read whether the job was ended; a monitor reads the first, sends it with its
//! heartbeats, and writes the second. Every wait of every transport goes through [`Backoff`], so that nothing waits
//! for ever and an abort is seen within a millisecond.

use crate::call::{FINGERPRINT_BYTES, Fingerprint};
use crate::fault::Fault;
use crate::reach::{Path, UNANSWERED_HEARTBEATS};
use kolo_base::lock;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// All deadlines are multiples of the heartbeat; a stall is this many.
pub const STALL_HEARTBEATS: u32 = 60;

#[derive(Debug)]
pub struct Watch {
    hosts: Vec<String>,
    stall: Duration,
    aborted: AtomicBool,
    reason: Mutex<Option<Fault>>,
    /// The workers are to regroup after the step at hand.
    yields: AtomicBool,
    /// The training step, for heartbeats.
    step: AtomicU64,
    /// Grows with every op and every call: a rank whose count stands still is stuck.
    progress: AtomicU64,
    /// Version counter of `call`, odd while it is written.
    version: AtomicU32,
    call: [AtomicU64; FINGERPRINT_BYTES / 8],
    in_call: AtomicBool,
    /// Calls of other communicators that run now.
    group_calls: AtomicU32,
    origin: Instant,
    /// Milliseconds from `origin` to when a call of this rank last looked whether it may go on.
    looked_ms: AtomicU64,
    /// Milliseconds from `origin` to when some rank of the job was last known to get on.
    moved_ms: AtomicU64,
    /// The streams to other ranks.
    paths: Mutex<Vec<Path>>,
}

/// What a rank was doing when asked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Activity {
    pub step: u64,
    pub progress: u64,
    /// The last call begun, and whether it still runs.
    pub call: Option<Fingerprint>,
    pub in_call: bool,
    /// Whether it is in any call, of this communicator or another, and looks now and then whether it may go on: it is
    /// alive, and waits for others. Of several calls at a time, one that looks speaks for all.
    pub waits: bool,
}

impl Watch {
    /// `hosts[rank]` is used in messages; it may be empty.
    pub fn new(hosts: Vec<String>, heartbeat: Duration) -> Arc<Self> {
        Arc::new(Self {
            hosts,
            stall: heartbeat * STALL_HEARTBEATS,
            aborted: AtomicBool::new(false),
            reason: Mutex::new(None),
            yields: AtomicBool::new(false),
            step: AtomicU64::new(0),
            progress: AtomicU64::new(0),
            version: AtomicU32::new(0),
            call: Default::default(),
            in_call: AtomicBool::new(false),
            group_calls: AtomicU32::new(0),
            origin: Instant::now(),
            looked_ms: AtomicU64::new(0),
            moved_ms: AtomicU64::new(0),
            paths: Mutex::default(),
        })
    }

    /// For tests and single processes: nobody aborts, and a stall is a minute.
    pub fn alone() -> Arc<Self> {
        Self::new(Vec::new(), Duration::from_secs(1))
    }

    pub fn host(&self, rank: usize) -> String {
        self.hosts.get(rank).cloned().unwrap_or_default()
    }

    fn mark(&self, moment_ms: &AtomicU64) {
        moment_ms.store(self.origin.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    fn since(&self, moment_ms: &AtomicU64) -> Duration {
        self.origin.elapsed().saturating_sub(Duration::from_millis(moment_ms.load(Ordering::Relaxed)))
    }

    /// Some rank of the job made progress, by the coordinator's heartbeat.
    pub fn others_moved(&self) {
        self.mark(&self.moved_ms);
    }

    /// For how long no rank is known to have made progress.
    fn still(&self) -> Duration {
        self.since(&self.moved_ms)
    }

    /// Longer than a sleeper sleeps, and than a busy machine keeps it from looking.
    fn long(&self) -> Duration {
        self.stall / 8
    }

    /// How long a call may wait for a peer while nobody gets on. As long as somebody does, waiting may be meant: for a
    /// worker in a long step, or for the slowest at the end.
    pub fn stall(&self) -> Duration {
        self.stall
    }

    /// A stream leads to this rank, as long as somebody has it.
    pub fn add_path(&self, rank: usize, stream: Weak<TcpStream>) {
        let mut paths = lock(&self.paths);
        paths.retain(Path::is_open);
        paths.push(Path::new(rank, stream));
    }

    /// The ranks, in order, whose hosts have answered nothing on some stream for some heartbeats, although an answer is due.
    /// Meant to be asked several times a heartbeat.
    pub fn unreachable(&self) -> Vec<usize> {
        let (now, limit) = (Instant::now(), self.stall / STALL_HEARTBEATS * UNANSWERED_HEARTBEATS);
        let mut paths = lock(&self.paths);
        paths.retain(Path::is_open);
        // Each is looked at, also behind one that is silent.
        let mut ranks: Vec<usize> =
            paths.iter_mut().filter_map(|path| path.is_silent(now, limit).then_some(path.rank)).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// A wait that began then looks whether it may last longer: whether it is a stall. Whoever looks is alive.
    pub fn is_stalled(&self, since: Instant) -> bool {
        self.mark(&self.looked_ms);
        since.elapsed() > self.stall && self.still() > self.stall
    }

    /// Ends the job for this rank: every wait returns this fault. The first one stays.
    pub fn abort(&self, fault: Fault) {
        lock(&self.reason).get_or_insert(fault);
        self.aborted.store(true, Ordering::Release);
    }

    /// The fault that ended the job, if one did.
    pub fn check(&self) -> Result<(), Fault> {
        if !self.aborted.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(lock(&self.reason).clone().unwrap_or_else(|| Fault::Aborted("the job was ended".into())))
    }

    /// Asks this rank to regroup after its step, with all others.
    pub fn ask_to_yield(&self) {
        self.yields.store(true, Ordering::Relaxed);
    }

    /// Whether somebody waits to be taken in after this step.
    pub fn asked_to_yield(&self) -> bool {
        self.yields.load(Ordering::Relaxed)
    }

    pub fn set_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
        self.touch();
    }

    /// Compute made progress.
    pub fn touch(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// A call of the communicator of all ranks begins. One writer at a time; a torn read is retried by the reader.
    pub fn enter(&self, fingerprint: &Fingerprint) {
        // Plain stores, as there is one writer: a short call would feel locked instructions.
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        for (slot, word) in self.call.iter().zip(fingerprint.encode().chunks_exact(8)) {
            slot.store(u64::from_le_bytes(word.try_into().unwrap_or_default()), Ordering::Relaxed);
        }
        self.in_call.store(true, Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
        self.touch();
    }

    pub fn leave(&self) {
        self.in_call.store(false, Ordering::Relaxed);
        self.touch();
    }

    /// A call of a communicator of some ranks begins.
    pub fn enter_group(&self) {
        self.group_calls.fetch_add(1, Ordering::Relaxed);
        self.touch();
    }

    pub fn leave_group(&self) {
        self.group_calls.fetch_sub(1, Ordering::Relaxed);
        self.touch();
    }

    pub fn activity(&self) -> Activity {
        let mut bytes = [0; FINGERPRINT_BYTES];
        let mut tries = 0..READS;
        let call = loop {
            // A writer may be halted between its stores; signs of life do not wait for it.
            if tries.next().is_none() {
                break None;
            }
            let before = self.version.load(Ordering::Acquire);
            for (slot, word) in self.call.iter().zip(bytes.chunks_exact_mut(8)) {
                word.copy_from_slice(&slot.load(Ordering::Relaxed).to_le_bytes());
            }
            fence(Ordering::Acquire);
            let after = self.version.load(Ordering::Relaxed);
            if before == after && before.is_multiple_of(2) {
                break (before > 0).then(|| Fingerprint::decode(&bytes)).flatten();
            }
            std::thread::yield_now();
        };
        let in_call = self.in_call.load(Ordering::Relaxed);
        let called = in_call || self.group_calls.load(Ordering::Relaxed) > 0;
        Activity {
            step: self.step.load(Ordering::Relaxed),
            progress: self.progress.load(Ordering::Relaxed),
            call,
            in_call,
            waits: called && self.since(&self.looked_ms) <= self.long(),
        }
    }
}

/// A wait with backoff: first it spins, then it yields, then it lets the caller sleep. It checks for an abort and a deadline.
#[derive(Debug)]
pub struct Backoff<'w> {
    watch: &'w Watch,
    turns: u32,
    since: Option<Instant>,
    looked: Option<Instant>,
}

/// What to do before looking again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    Spin,
    Yield,
    /// Block for at most this long, on whatever the transport can block on.
    Sleep(Duration),
}

/// Turns spun before yielding. Short, as there may be more ranks than cores.
const SPINS: u32 = 200;
const YIELDS: u32 = 50;
/// Times that the call in progress is read anew because it changed meanwhile.
const READS: u32 = 1000;
/// How often a sleeper looks up.
const LOOK_UP: Duration = Duration::from_micros(500);

impl<'w> Backoff<'w> {
    pub fn new(watch: &'w Watch) -> Self {
        Self { watch, turns: 0, since: None, looked: None }
    }

    /// The caller has spun and yielded as long as it thought fit: sleep from now on.
    pub fn sleep_at_once(&mut self) {
        self.turns = self.turns.max(SPINS + YIELDS);
    }

    /// After so many turns, sleep without yielding first: for those to whom looking costs more than a spin.
    pub fn sleep_after(&mut self, turns: u32) {
        if self.turns >= turns {
            self.turns = self.turns.max(SPINS + YIELDS);
        }
    }

    /// Forget the time waited: something moved.
    pub fn reset(&mut self) {
        if self.since.is_some() {
            self.watch.mark(&self.watch.looked_ms);
        }
        (self.turns, self.since, self.looked) = (0, None, None);
    }

    pub fn waited(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// One more turn without news. An aborted job or a stall ends the wait; `stalled` names whom we wait for.
    pub fn turn(&mut self, stalled: impl FnOnce(u64) -> Fault) -> Result<Pause, Fault> {
        self.turns += 1;
        if self.turns <= SPINS {
            std::hint::spin_loop();
            return Ok(Pause::Spin);
        }
        self.watch.check()?;
        let since = self.since.get_or_insert_with(Instant::now);
        if self.turns <= SPINS + YIELDS {
            std::thread::yield_now();
            return Ok(Pause::Yield);
        }
        let now = Instant::now();
        self.watch.mark(&self.watch.looked_ms);
        // Time in which this process was stopped is no time that it waited.
        let gap = self.looked.replace(now).map_or(Duration::ZERO, |looked| now - looked);
        if gap > self.watch.long() {
            *since += gap;
        }
        let waited = now.saturating_duration_since(*since);
        if waited > self.watch.stall && self.watch.still() > self.watch.stall {
            return Err(stalled(waited.as_millis() as u64));
        }
        Ok(Pause::Sleep(LOOK_UP))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_no_longer_looks_does_not_wait() {
        let watch = Watch::new(Vec::new(), Duration::from_millis(100));
        let mut backoff = Backoff::new(&watch);
        backoff.sleep_at_once();
        let mut look = || backoff.turn(|_| unreachable!("nobody waits that long")).unwrap();
        look();
        assert!(!watch.activity().waits, "in no call");
        watch.enter_group();
        assert_eq!(look(), Pause::Sleep(LOOK_UP));
        assert!(watch.activity().waits);
        std::thread::sleep(2 * watch.long());
        assert!(!watch.activity().waits, "halted in the call");
        look();
        assert!(watch.activity().waits);
        watch.leave_group();
        assert!(!watch.activity().waits);
    }
}
