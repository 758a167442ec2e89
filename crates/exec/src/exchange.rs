//! What the executor asks of whoever runs the collectives of a graph.

use crate::memory::Memory;
use kolo_graph::DType;
use std::collections::BTreeMap;

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
    /// Each rank's part for each rank.
    AllToAll,
    /// From the rank this many places before in the ring of the axis, to the one as many places after.
    Shift(usize),
    /// To each rank its part of the input, from each its part of the output; both are `parts`, one list after the other.
    EachToEach,
    /// Nothing moves; all ranks are here.
    Barrier,
    /// To this rank of the axis.
    Send(usize),
    /// From this rank of the axis.
    Receive(usize),
}

/// One collective of a compiled graph: what it reads and what it writes, which may be the same. Addresses are the host's, or the
/// device's if exchanges are of its memory.
#[derive(Clone, Debug)]
pub struct Exchange {
    pub kind: ExchangeKind,
    /// Shown in messages and timelines.
    pub name: String,
    /// The axis of the mesh.
    pub axis: String,
    /// Whose grains it belongs to; `None` for what happens once per step. Lanes run beside each other, so each has a
    /// communicator of its own.
    pub lane: Option<usize>,
    pub dtype: DType,
    pub input: *mut u8,
    pub output: *mut u8,
    /// Elements of the larger of the two.
    pub elements: usize,
    /// (offset, count) of each rank's part in the larger; empty if there are no parts.
    pub parts: Vec<(usize, usize)>,
    /// It exchanges gradients and nothing else.
    pub of_gradients: bool,
}

// SAFETY: addresses; the executor lends the memory between `start` and `wait`.
unsafe impl Send for Exchange {}
// SAFETY: as above.
unsafe impl Sync for Exchange {}

/// Runs collectives beside the kernels of a session. Exchanges are known by their number in the list given to `prepare`.
pub trait Collectives: Send + Sync + std::fmt::Debug {
    /// Ranks along an axis.
    fn size(&self, axis: &str) -> usize;

    /// Whether exchanges are to be of memory of the device, if this rank can do that (`mine`): the same on all ranks, which call it
    /// together.
    fn on_device(&self, _mine: bool) -> Result<bool, ExchangeError> {
        Ok(false)
    }

    /// How devices exchange directly, if they do.
    fn device_transport(&self) -> Option<&'static str> {
        None
    }

    /// Zeroed memory that collectives reach directly. All ranks call it together.
    fn memory(&self, bytes: usize) -> Result<Memory, ExchangeError>;

    /// Takes the list of a session's exchanges, which runs this many lanes; the first one's number. All ranks call it together.
    fn prepare(&self, exchanges: Vec<Exchange>, lanes: usize) -> Result<usize, ExchangeError>;

    /// The exchange's memory is ready. Returns at once; all ranks start the exchanges of a step, and those of each lane, in the
    /// same order.
    fn start(&self, number: usize);

    /// Bytes that this rank has sent in all that were started, by axis, if they are counted.
    fn sent_bytes(&self) -> BTreeMap<String, u64> {
        BTreeMap::new()
    }

    /// Waits until a started exchange is done, or lets the device wait if it is of the device's memory.
    fn wait(&self, number: usize) -> Result<(), ExchangeError>;

    /// Waits until exchanges that the device was left to wait for are done, all that were started.
    fn settle(&self) -> Result<(), ExchangeError> {
        Ok(())
    }
}
