//! The rounds in which the ranks of a communicator meet: publishing, waiting, and noticing that a peer is gone.
//!
//! A round is one message from each rank to all others: a rank writes its staging buffer, then the round's number, and waits for
//! the numbers of the others. Nothing but loads and stores happens in a round unless somebody sleeps.

use super::layout::{CACHE_LINE_BYTES, Control, STATUS_FAILED, STATUS_LEFT, STATUS_WELL, StagingBuffer};
use super::system::{self, ProcessHandle};
use super::yield_backoff::YieldBackoff;
use crate::call::{CallKind, FINGERPRINT_BYTES, Fingerprint};
use crate::failure_report::{self, FAILURE_BYTES_MAX};
use crate::fault::{Fault, rank_name};
use crate::watch::{Backoff, Pause, Watch};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, compiler_fence, fence};
use std::time::{Duration, Instant};

/// Times that a rank checks before it yields, when every rank has a processor.
const SPINS: u32 = 300;
/// The first of them without a pause between: whoever comes at the same time is seen at once.
const SPINS_AT_ONCE: u32 = 40;

/// How long a rank yields, if that is quick, before it sleeps: about as long as it takes to be woken.
const YIELDING: Duration = Duration::from_micros(100);

/// The wait word of a rank that does not wait.
const NOT_WAITING: u32 = 0;

/// The wait word of a rank that sleeps until `peer` did something.
fn awaits(peer: usize) -> u32 {
    peer as u32 + 1
}

/// What the ranks of a host know of each other.
#[derive(Clone)]
pub struct LocalPeers {
    /// By rank.
    pub processes: Vec<Arc<ProcessHandle>>,
    /// The rank that each had when the job connected: allocations are known by it.
    pub origins: Vec<usize>,
    /// More ranks than processors: a rank that spins keeps another from running.
    pub oversubscribed: bool,
    /// Whether sleepers make everybody's stores visible, so that others need no fence.
    pub barrier: bool,
}

pub struct Rounds {
    pub control: Control,
    pub rank: usize,
    pub size: usize,
    pub watch: Arc<Watch>,
    pub peers: LocalPeers,
    yield_backoff: YieldBackoff,
    /// The last round begun.
    round: u64,
    /// Digest of the call in progress.
    digest: u64,
}

/// One number for a fingerprint; different calls have different ones but for an accident of one in 2⁶⁴.
fn digest(words: &[u64; FINGERPRINT_BYTES / 8]) -> u64 {
    let mix = |(at, word): (usize, &u64)| {
        let key = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(2 * at as u64 + 1);
        let wide = u128::from(word ^ key) * u128::from(key | 1);
        (wide as u64) ^ (wide >> 64) as u64
    };
    words.iter().enumerate().map(mix).fold(0, u64::wrapping_add)
}

impl Rounds {
    pub fn new(control: Control, rank: usize, watch: Arc<Watch>, peers: LocalPeers) -> Self {
        let size = peers.processes.len();
        Self { control, rank, size, watch, peers, yield_backoff: YieldBackoff::default(), round: 0, digest: 0 }
    }

    /// A call begins: notes it where others look who find that it is not theirs.
    pub fn enter(&mut self, call: &Fingerprint) {
        self.enter_with_parts(call, []);
    }

    /// The same for a call whose parts must be those of all ranks.
    pub fn enter_with_parts(&mut self, call: &Fingerprint, parts: impl IntoIterator<Item = usize>) {
        let bytes = call.encode();
        let mut words = [0; FINGERPRINT_BYTES / 8];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        }
        let mix = |sum: u64, number: usize| (sum ^ number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        self.digest = digest(&words).wrapping_add(parts.into_iter().fold(0, mix));
        let record = &self.control.slot(self.rank).record[(self.round + 1) as usize % 2];
        for (slot, word) in record.0.iter().zip(words) {
            slot.store(word, Ordering::Relaxed);
        }
    }

    /// This rank's staging buffer of the next round, to be written before `publish`.
    pub fn own_staging(&self) -> &StagingBuffer {
        &self.control.slot(self.rank).staging[(self.round + 1) as usize % 2]
    }

    /// A rank's staging buffer of the current round.
    pub fn staging(&self, rank: usize) -> &StagingBuffer {
        &self.control.slot(rank).staging[self.round as usize % 2]
    }

    /// Lets the others see its staging buffer: this rank is in the next round.
    pub fn publish(&mut self) {
        let staging = self.own_staging();
        staging.digest.store(self.digest, Ordering::Relaxed);
        staging.round.store(self.round + 1, Ordering::Release);
        self.round += 1;
        self.wake_all();
    }

    /// Waits until all others are in this round too, and made the same call.
    pub fn await_all(&self, call: &Fingerprint) -> Result<(), Fault> {
        for peer in (0..self.size).filter(|peer| *peer != self.rank) {
            let staging = self.staging(peer);
            self.until(peer, call, || staging.round.load(Ordering::Acquire) == self.round)?;
            if staging.digest.load(Ordering::Relaxed) != self.digest {
                return Err(self.mismatch(peer, self.round, call));
            }
        }
        Ok(())
    }

    /// The rank of the job that `peer` is, and its host.
    fn named(&self, peer: usize) -> (usize, String) {
        let rank = self.peers.origins[peer];
        (rank, self.watch.host(rank))
    }

    /// What `peer` called in or before this round is not what this rank called.
    #[cold]
    fn mismatch(&self, peer: usize, round: u64, call: &Fingerprint) -> Fault {
        let mut bytes = [0; FINGERPRINT_BYTES];
        let record = &self.control.slot(peer).record[round as usize % 2];
        for (word, bytes) in record.0.iter().zip(bytes.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        self.disagree(peer, call, Fingerprint::decode(&bytes))
    }

    pub fn disagree(&self, peer: usize, mine: &Fingerprint, theirs: Option<Fingerprint>) -> Fault {
        let ((rank, host), (peer, peer_host)) = (self.named(self.rank), self.named(peer));
        let Some(theirs) = theirs else {
            let why = "it is not a call that this version knows".into();
            return Fault::Rejected { from: rank_name(peer, &peer_host), why };
        };
        let mine = Fingerprint { kind: if mine.kind == CallKind::Recv { CallKind::Send } else { mine.kind }, ..*mine };
        if mine == theirs {
            let why = format!(
                "its parts in {theirs} are not those of {}\n  hint: all ranks must pass the same counts and offsets",
                rank_name(rank, &host)
            );
            return Fault::Failed { peer, host: peer_host, why };
        }
        Fault::Mismatch { rank, host, mine: Box::new(mine), peer, peer_host, theirs: Box::new(theirs) }
    }

    /// Waits until `ready`, which only `peer` can bring about.
    #[inline]
    pub fn until(&self, peer: usize, call: &Fingerprint, ready: impl Fn() -> bool) -> Result<(), Fault> {
        let looks = if self.peers.oversubscribed { 1 } else { SPINS };
        for look in 0..looks {
            if ready() {
                return Ok(());
            }
            if look >= SPINS_AT_ONCE {
                std::hint::spin_loop();
            }
        }
        self.wait_slowly(peer, call, &ready)
    }

    #[cold]
    fn wait_slowly(&self, peer: usize, call: &Fingerprint, ready: &dyn Fn() -> bool) -> Result<(), Fault> {
        let begin = Instant::now();
        while begin.elapsed() < YIELDING {
            self.watch.check()?;
            if ready() {
                return Ok(());
            }
            if !self.yield_backoff.yield_now() {
                break;
            }
        }
        let mut backoff = Backoff::new(&self.watch);
        backoff.sleep_at_once();
        while !ready() {
            let stalled = |waited_ms| {
                let (peer, host) = self.named(peer);
                Fault::Stalled { peer, host, during: call.to_string(), waited_ms }
            };
            if let Pause::Sleep(at_most) = backoff.turn(stalled)? {
                self.sleep_until(peer, at_most, ready);
                self.check_alive(peer, call, ready)?;
            }
        }
        Ok(())
    }

    /// Sleeps until `peer` rings, at most this long.
    fn sleep_until(&self, peer: usize, at_most: Duration, ready: &dyn Fn() -> bool) {
        let wait_word = &self.control.wait_words()[self.rank];
        wait_word.store(awaits(peer), Ordering::Relaxed);
        // Either the others see the wait word after what they publish, or we see what they published.
        if self.peers.barrier {
            system::barrier_everywhere();
        } else {
            fence(Ordering::SeqCst);
        }
        if !ready() {
            system::futex_wait(wait_word, awaits(peer), at_most);
        }
        wait_word.store(NOT_WAITING, Ordering::Relaxed);
    }

    /// Wakes those who wait for this rank, after something was published to all.
    #[inline]
    pub fn wake_all(&self) {
        self.order_wait_words();
        for wait_word in self.control.wait_words() {
            self.wake_waiter(wait_word);
        }
    }

    /// Wakes a rank if it waits for this one, after something was published to it.
    #[inline]
    pub fn wake(&self, rank: usize) {
        self.order_wait_words();
        self.wake_waiter(&self.control.wait_words()[rank]);
    }

    #[inline]
    fn wake_waiter(&self, wait_word: &AtomicU32) {
        let mine = awaits(self.rank);
        let listens = wait_word.load(Ordering::Relaxed) == mine;
        if listens && wait_word.compare_exchange(mine, NOT_WAITING, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            system::futex_wake(wait_word);
        }
    }

    #[inline]
    fn order_wait_words(&self) {
        if self.peers.barrier { compiler_fence(Ordering::SeqCst) } else { fence(Ordering::SeqCst) }
    }

    /// Why `peer` will not come any more, if it will not.
    fn check_alive(&self, peer: usize, call: &Fingerprint, ready: &dyn Fn() -> bool) -> Result<(), Fault> {
        // In a collective it can neither send nor receive what this rank waits for.
        let next = self.round + 1;
        let elsewhere = || self.control.slot(peer).staging[next as usize % 2].round.load(Ordering::Acquire) == next;
        if call.kind.is_message() && elsewhere() && !ready() {
            return Err(self.mismatch(peer, next, call));
        }
        let status = &self.control.slot(peer).status;
        let code = status.code.load(Ordering::Acquire);
        if code == STATUS_WELL && !self.peers.processes[peer].is_gone() {
            return Ok(());
        }
        // What it published before its end counts.
        if ready() {
            return Ok(());
        }
        let (rank, host) = self.named(peer);
        let lost = |why: &str| Fault::Lost { peer: rank, host, during: call.to_string(), why: why.into() };
        Err(match code {
            STATUS_WELL => lost("its process ended"),
            STATUS_LEFT => lost("it left the communicator"),
            _ => failure_report::decode(&self.failure(peer), rank, self.named(self.rank).0, Some(call), &self.watch)
                .unwrap_or_else(|| lost("it failed")),
        })
    }

    fn failure(&self, peer: usize) -> Vec<u8> {
        let status = &self.control.slot(peer).status;
        let length = (status.failure_bytes.load(Ordering::Relaxed) as usize).min(FAILURE_BYTES_MAX);
        // SAFETY: written before the status code that the caller has seen, and never again.
        unsafe { std::slice::from_raw_parts(status.failure.get().cast::<u8>(), length) }.to_vec()
    }

    /// Tells the others why this rank will not come any more.
    pub fn fail(&self, fault: &Fault) {
        let status = &self.control.slot(self.rank).status;
        let failure = failure_report::encode(fault);
        // SAFETY: only this rank writes its status, once, and others read it after the code.
        unsafe { std::ptr::copy_nonoverlapping(failure.as_ptr(), status.failure.get().cast::<u8>(), failure.len()) };
        status.failure_bytes.store(failure.len() as u32, Ordering::Relaxed);
        status.code.store(STATUS_FAILED, Ordering::Release);
        self.wake_all();
    }

    /// This rank lets go of the communicator.
    pub fn leave(&self) {
        let code = &self.control.slot(self.rank).status.code;
        let _ = code.compare_exchange(STATUS_WELL, STATUS_LEFT, Ordering::Release, Ordering::Relaxed);
        self.wake_all();
    }

    /// Bytes of a staging buffer that each of `size` readers has for itself, in whole cache lines.
    pub fn area_bytes(&self) -> usize {
        super::layout::STAGING_BYTES / self.size / CACHE_LINE_BYTES * CACHE_LINE_BYTES
    }
}
