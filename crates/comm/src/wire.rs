//! Moving bytes between two ranks: what a transport must offer to run programs.

use crate::call::Fingerprint;
use crate::fault::Fault;
use std::time::Duration;

/// Point-to-point messages among the ranks of one communicator. Nothing blocks but `wait`.
///
/// Between two ranks messages keep their order: the n-th `send` from `a` to `b` fills the n-th `recv` at `b` from `a`.
/// A message carries its call's fingerprint; a receiver whose own call differs gets [`Fault::Mismatch`], and one whose
/// buffer has another length too. A lost peer is [`Fault::Lost`], at once.
pub trait Wire: Send {
    fn rank(&self) -> usize;
    fn size(&self) -> usize;

    /// Queues a message. The number returned is for `sent`.
    ///
    /// # Safety
    /// The bytes stay as they are until `sent` says so, or until `cancel`.
    unsafe fn send(&mut self, to: usize, call: &Fingerprint, data: *const u8, bytes: usize) -> Result<u64, Fault>;

    /// Names the place for the next message. The number returned is for `received`.
    ///
    /// # Safety
    /// The place is valid and otherwise unused until `received` says so, or until `cancel`.
    unsafe fn recv(&mut self, from: usize, call: &Fingerprint, data: *mut u8, bytes: usize) -> Result<u64, Fault>;

    /// Moves whatever can be moved now, without blocking; whether anything moved.
    fn progress(&mut self) -> Result<bool, Fault>;

    /// Whether this send has left its buffer.
    fn sent(&mut self, number: u64) -> bool;

    /// Whether this receive is filled.
    fn received(&mut self, number: u64) -> bool;

    /// Blocks until something may have changed, at most this long. The default sleeps.
    fn wait(&mut self, at_most: Duration) {
        std::thread::sleep(at_most.min(Duration::from_micros(50)));
    }

    /// Turns without progress after which `wait` is better than looking again.
    fn turns(&self) -> u32 {
        u32::MAX
    }

    /// Forgets all that was queued: the call failed, for this reason, and its buffers go away.
    fn cancel(&mut self, fault: &Fault);
}

/// A wire that can be cut down to fewer ranks: what [`crate::run::Programs`] stands on.
pub trait SplitWire: Wire + Sized + 'static {
    /// Such as `tcp`.
    fn name(&self) -> &'static str;

    /// The number of each rank's host. Ranks with the same number reach each other without a network.
    fn hosts(&self) -> &[usize];

    /// A rank's number in the whole job, for messages.
    fn job_rank(&self, rank: usize) -> usize;

    /// As [`crate::Transport::split`].
    fn split(&mut self, members: &[usize], communicator: u32) -> Result<Self, Fault>;
}
