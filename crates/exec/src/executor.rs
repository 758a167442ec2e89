//! What an executor is: a kind of device that graphs can be compiled for.
//!
//! An executor brings two things: how memory is laid out and how one call runs. *What runs when* is not its matter: the
//! order of calls, the grains and their lanes, sums over grains, exchanges and their waits are in [`Schedule`], which is derived
//! once, and a [`Session`](crate::Session) drives every device through it.

use crate::device_links::{FoundLinks, LinkPreference};
use crate::exchange::ExchangeError;
use crate::exchanges::Rows;
use crate::memory::Memory;
use crate::monitor::Monitor;
use crate::offload::Offload;
use crate::options::Options;
use crate::program::Program;
use crate::schedule::Schedule;
use crate::store::Store;
use kolo_graph::cpu::Buffer;
use kolo_graph::layout::Layout;
use kolo_graph::{Graph, NodeId, Phase, ValueId};
use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// Why a graph could not be compiled.
pub type CompileError = Box<dyn std::error::Error + Send + Sync>;

/// A kind of device.
pub trait Executor: Debug + Send + Sync {
    /// As `--device` has it.
    fn name(&self) -> &'static str;

    /// What it makes of the options: a device may run fewer lanes than asked for.
    fn options(&self, asked: Options) -> Options {
        asked
    }

    /// The graph as it runs it: where the device has a memory of its own, with what is brought there while it is used.
    fn rewrite(&self, graph: Graph, _options: Options) -> Graph {
        graph
    }

    /// Where every value lies and in which order nodes run.
    fn layout(&self, graph: &Graph, options: Options) -> Layout;

    /// Bytes that a session allocates.
    fn bytes(&self, graph: &Graph, layout: &Layout, options: Options) -> SessionBytes;

    /// Whether what a session allocates is memory of the host.
    fn allocates_on_host(&self) -> bool {
        true
    }

    /// Bytes of the parameters and of the states that a session keeps in memory of the device, beside the host's; none on a device that
    /// computes in the memory of the host.
    fn stored_bytes(&self, _graph: &Graph, _layout: &Layout) -> [usize; 2] {
        [0, 0]
    }

    /// The same executor with so much in the host's memory, if the device has a memory of its own.
    fn with_offload(&self, _offload: Offload) -> Option<Arc<dyn Executor>> {
        None
    }

    /// Whether it can run the collectives of several workers.
    fn has_collectives(&self) -> bool {
        true
    }

    /// How its device exchanges with those of other ranks directly, if it has memory of its own, and whether it is to.
    fn links(&self) -> Option<(LinkPreference, FoundLinks)> {
        None
    }

    /// The same executor with this preference, if it has a choice.
    fn with_links(&self, _preference: LinkPreference) -> Option<Arc<dyn Executor>> {
        None
    }

    /// Whether all that a schedule exchanges lies in memory of the device, in types that its links can add up.
    fn can_exchange_on_device(&self, _program: &Program, _schedule: &Schedule) -> bool {
        false
    }

    /// Whoever watches the device, if it tells anything of itself.
    fn monitor(&self) -> Option<Arc<dyn Monitor>> {
        None
    }

    /// Makes ready what programs of these graphs will need, all at once where that takes less time than one after the other.
    fn prepare(&self, _graphs: &[&Graph]) {}

    /// The same executor with products of f32 in TF32, if the device has it.
    fn in_tf32(&self) -> Option<Arc<dyn Executor>> {
        None
    }

    /// Resolves every call of the schedule. `sums` is memory for the first lane's sums over grains that collectives reach, if
    /// there are collectives.
    fn compile(
        &self,
        program: &Program,
        schedule: &Arc<Schedule>,
        store: &Store,
        sums: Option<Memory>,
    ) -> Result<Box<dyn Device>, CompileError>;
}

/// Bytes of a session, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionBytes {
    /// Activations and inputs.
    pub activations: usize,
    /// Sums over grains.
    pub gradients: usize,
    /// Values computed once per step, and scratch of kernels.
    pub scratch: usize,
    /// Memory of the host through which a device with memory of its own takes and gives; no part of the total.
    pub staging: usize,
}

impl SessionBytes {
    /// In the memory that the device computes in.
    pub fn total(&self) -> usize {
        self.activations + self.gradients + self.scratch
    }
}

/// A graph compiled for a device. A session calls it in the order of the schedule; calls are numbered as the items of their
/// phase are.
pub trait Device: Any + Debug + Send + Sync {
    /// Where the inputs of a step (`None`) or of a lane's grain are written, sorted by name.
    fn inputs(&self, lane: Option<usize>) -> &[(String, Buffer)];

    /// Where a value is, as this lane sees it.
    fn buffer(&self, id: ValueId, lane: usize) -> Buffer;

    /// Bytes of its memory that have pages now, by kind; `None` if it has memory of its own.
    fn resident_bytes(&self) -> Option<SessionBytes> {
        None
    }

    /// The step's inputs are written. Whatever holds the store in a form of its own reads it here.
    fn begin(&self) {}

    /// The inputs of this lane's next grain are written. It is not called if they are as they were.
    fn begin_grain(&self, _lane: usize) {}

    /// Whether it keeps the store's values elsewhere than in the memory of the host ([`Store::mirrored`]).
    fn mirrors_store(&self) -> bool {
        false
    }

    /// The named results are made, all or those that come before the update: from here on [`Device::wait_outputs`] waits until they are
    /// where [`Device::buffer`] says.
    fn show_outputs(&self) {}

    /// Waits until the named results that were shown can be read.
    fn wait_outputs(&self) {}

    /// Brings what an exchange reads to where [`Device::buffer`] says, and what it has written from there.
    fn publish(&self, _exchange: NodeId, _lane: usize) {}
    fn absorb(&self, _exchange: NodeId, _lane: usize) {}

    /// Where a value is in memory of the device, which exchanges reach if the schedule says so: an address that the host cannot read.
    fn device_buffer(&self, _id: ValueId, _lane: usize) -> Option<Buffer> {
        None
    }

    /// Memory of the device for tensors that do not lie as they travel.
    fn device_memory(&self, bytes: usize) -> Result<Memory, ExchangeError> {
        Err(format!("this device has no memory of its own for {bytes} bytes").into())
    }

    /// Copies rows in memory of the device, in the order of what it computes.
    fn copy_on_device(&self, _rows: &Rows) {}

    /// What went wrong since the last step, on a device whose calls only start its work.
    fn check(&self) -> Result<(), ExchangeError> {
        Ok(())
    }

    /// Runs `body` once for every lane, all at the same time if it can.
    fn run_lanes(&self, body: &(dyn Fn(usize) + Sync));

    /// Runs an item of a phase. `lane` and its `grain`, counted within the lane, mean something in the grain phase only.
    fn run(&self, phase: Phase, item: usize, lane: usize, grain: usize);

    /// Waits until the items that were run are done, so that their time can be told.
    fn wait_item(&self) {}

    /// Runs all items of a phase at once, if it can do that better than one by one; whether it has. Not asked where items start or
    /// await exchanges, or where each is timed or may be the last.
    fn run_phase(&self, _phase: Phase, _lane: usize, _grain: usize) -> bool {
        false
    }

    /// Adds the lanes' sums up into the first lane's, on this lane's threads: of these elements.
    fn join(&self, elements: Range<usize>, lane: usize);

    /// Adds up all lanes' sums that are wanted whole, if no exchange does.
    fn join_all(&self);

    /// After the last item: what the step changed is in the store.
    fn end(&self);

    /// Whether all results of an item are finite; of an item that takes a product as it is made, whether that product is.
    fn is_finite(&self, phase: Phase, item: usize) -> bool;

    /// All sums over grains with the padding between them, in the order of memory.
    fn sums_mut(&mut self) -> &mut [f32];

    /// Touches the memory of an item (`None`: scratch), so that a measurement does not pay for its pages.
    fn touch(&self, _phase: Phase, _item: Option<usize>, _lane: usize) {}
}

impl dyn Device {
    /// The device as the type it is.
    pub fn downcast<T: Device>(&self) -> Option<&T> {
        (self as &dyn Any).downcast_ref::<T>()
    }
}
