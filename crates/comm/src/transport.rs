//! What a communicator stands on.

use crate::fault::Fault;
use crate::memory::SharedMemory;
use crate::task::CollectiveTask;
use std::sync::Arc;

/// Runs collectives for one rank of one communicator.
pub trait Transport: Send {
    /// Such as `shm`.
    fn name(&self) -> &'static str;
    fn rank(&self) -> usize;
    fn size(&self) -> usize;

    /// Runs one call to its end. Calls come in the same order on all ranks.
    ///
    /// # Safety
    /// The task's buffers are valid for its kind and sizes, and nobody else uses them meanwhile.
    unsafe fn run(&mut self, task: &CollectiveTask<'_>) -> Result<(), Fault>;

    /// The same ranks or fewer under another number. `members` are ranks of this communicator in their new order, this
    /// rank among them; all members call it together with the same `communicator` number.
    fn split(&mut self, members: &[usize], communicator: u32) -> Result<Box<dyn Transport>, Fault>;

    /// Memory that this transport's collectives can reach directly. All ranks call it together with the same size. By
    /// default it is ordinary memory.
    fn allocate(&mut self, bytes: usize) -> Result<Arc<SharedMemory>, Fault> {
        SharedMemory::private(bytes)
    }

    /// The same, but only rank 0's memory will be used, by all ranks: the others' takes none as long as nobody touches it.
    fn allocate_at_first(&mut self, bytes: usize) -> Result<Arc<SharedMemory>, Fault> {
        self.allocate(bytes)
    }
}

/// How ranks find each other before they have links: each gives some bytes and gets those of all, in rank order. The
/// cluster's coordinator offers it, and so does MPI.
pub trait Bootstrap {
    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Fault>;
}

/// Largest blob a rank may give.
pub const BOOTSTRAP_BYTES_MAX: usize = 64 << 10;
