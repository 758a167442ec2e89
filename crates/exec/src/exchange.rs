//! What the executor asks of whoever runs the collectives of a graph.

use crate::memory::Memory;

/// Why a collective failed; the text names rank and call.
pub type ExchangeError = Box<dyn std::error::Error + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeKind {
    /// The sum over ranks, everywhere.
    AllReduce,
    /// The sum over ranks, each part at its rank.
    ReduceScatter,
    /// Each rank's part, everywhere.
    AllGather,
    /// Nothing moves; all ranks are here.
    Barrier,
}

/// One collective of a compiled graph: a run of f32 in memory, in place.
#[derive(Clone, Debug)]
pub struct Exchange {
    pub kind: ExchangeKind,
    /// Shown in messages and timelines.
    pub name: String,
    pub data: *mut f32,
    pub elements: usize,
    /// (offset, count) of each rank's part; empty for an all-reduce.
    pub parts: Vec<(usize, usize)>,
}

// SAFETY: an address; the executor lends the memory between `start` and `wait`.
unsafe impl Send for Exchange {}
// SAFETY: as above.
unsafe impl Sync for Exchange {}

/// Runs collectives beside the kernels of a session. Exchanges are known by their number in the list given to `prepare`.
pub trait Collectives: Send + Sync + std::fmt::Debug {
    fn size(&self) -> usize;

    /// Zeroed memory that collectives reach directly. All ranks call it together.
    fn memory(&self, bytes: usize) -> Result<Memory, ExchangeError>;

    /// Takes the list of a session's exchanges; the first one's number.
    fn prepare(&self, exchanges: Vec<Exchange>) -> usize;

    /// The exchange's memory is ready. Returns at once; all ranks start exchanges in the same order.
    fn start(&self, number: usize);

    /// Waits until a started exchange is done.
    fn wait(&self, number: usize) -> Result<(), ExchangeError>;
}
