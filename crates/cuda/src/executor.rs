//! NVIDIA GPUs as an executor.

use crate::abilities::CudaAbilities;
use crate::device::CudaDevice;
use crate::error::CudaError;
use crate::gpu::{Gpu, devices};
use crate::host_part::{Held, HostPart};
use crate::host_work::staging_bytes;
use crate::lowering::Lowering;
use crate::memory::exchanged;
use crate::nccl::Nccl;
use crate::nccl_group::NcclLinks;
use crate::nvml::GpuMonitor;
use crate::places::sum_levels;
use crate::stream_weights::stream_weights;
use kolo_exec::executor::CompileError;
use kolo_exec::schedule::Schedule;
use kolo_exec::{
    Device, DeviceLinks, Executor, FoundLinks, LinkPreference, Memory, Monitor, Offload, Options, Program,
    SessionBytes, Store,
};
use kolo_graph::collective::Movement;
use kolo_graph::cuda::{CudaCalls, CudaTarget, SCRATCH_ALIGNMENT};
use kolo_graph::layout::{self, Arena, Layout};
use kolo_graph::verify::debug_verify;
use kolo_graph::{DType, Graph, NodeId, ValueId};
use std::sync::Arc;

/// Runs graphs on one NVIDIA GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cuda {
    /// Which one, as the driver counts.
    pub index: usize,
    /// Whether products of f32 may round their operands to TF32.
    pub tf32: bool,
    /// Whether every step starts on memory full of NaNs, to find what is read and was never written.
    pub poison: bool,
    /// What is kept in the memory of the host.
    pub offload: Offload,
    /// Whether it exchanges with other GPUs directly.
    pub links: LinkPreference,
}

impl Cuda {
    /// Memory of this GPU for exchanges that no graph makes, which the host cannot read.
    pub fn exchanged_memory(&self, bytes: usize) -> Result<Memory, CudaError> {
        exchanged(&Gpu::open(self.index)?, bytes)
    }

    /// What calls are made for; an H200 if there is no such GPU here.
    pub(crate) fn target(&self) -> CudaTarget {
        let found = devices().ok().and_then(|devices| devices.into_iter().nth(self.index));
        CudaTarget { tf32: self.tf32, ..found.map_or_else(CudaTarget::default, |device| device.target) }
    }
}

/// Whether a node whose calls want so much scratch has it among the values of its phase.
pub(crate) fn has_own_scratch(layout: &Layout, id: NodeId, bytes: usize) -> bool {
    layout.scratch.get(&id).is_some_and(|own| bytes + SCRATCH_ALIGNMENT <= own.bytes)
}

/// Scratch that any of the nodes wants that have none of their own.
pub(crate) fn scratch_bytes(lowering: &Lowering<'_>, layout: &Layout) -> usize {
    let all = [&layout.before, &layout.grain, &layout.after].into_iter().flatten();
    let need = |id: &NodeId| {
        let bytes = lowering.calls(*id).map_or(0, |calls| calls.scratch_bytes);
        if has_own_scratch(layout, *id, bytes) { 0 } else { bytes }
    };
    all.map(need).max().unwrap_or(0)
}

impl Executor for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    /// A grain fills the GPU: they run one after the other.
    fn options(&self, asked: Options) -> Options {
        Options { lanes: 1, ..asked }
    }

    fn rewrite(&self, graph: Graph, options: Options) -> Graph {
        if self.offload != Offload::Weights {
            return graph;
        }
        let layout = self.layout(&graph, options);
        let graph = stream_weights(&graph, &layout, &HostPart::of(&graph, &layout, self.offload));
        debug_verify(&graph, "stream_weights");
        graph
    }

    fn layout(&self, graph: &Graph, options: Options) -> Layout {
        layout::plan(graph, options.grains, options.lanes, &CudaAbilities::new(graph, &self.target(), self.offload))
    }

    fn bytes(&self, graph: &Graph, layout: &Layout, options: Options) -> SessionBytes {
        let target = self.target();
        let host = HostPart::of(graph, layout, self.offload);
        let lowering = Lowering::new(graph, &target, None).beside(&host).placed(layout);
        SessionBytes {
            activations: (layout.grain_bytes + layout.grain_input_bytes) * options.places(),
            gradients: layout.sum_bytes * sum_levels(options),
            scratch: layout.step_bytes + layout.step_input_bytes + scratch_bytes(&lowering, layout),
            staging: staging_bytes(graph, layout, &host) + layout.host_bytes,
        }
    }

    fn stored_bytes(&self, graph: &Graph, layout: &Layout) -> [usize; 2] {
        Held::of(graph, layout, &HostPart::of(graph, layout, self.offload)).bytes()
    }

    fn with_offload(&self, offload: Offload) -> Option<Arc<dyn Executor>> {
        Some(Arc::new(Self { offload, ..*self }))
    }

    fn in_tf32(&self) -> Option<Arc<dyn Executor>> {
        Some(Arc::new(Self { tf32: true, ..*self }))
    }

    fn links(&self) -> Option<(LinkPreference, FoundLinks)> {
        let links = || Ok(NcclLinks::new(&Gpu::open(self.index)?, Nccl::get()?));
        let found =
            (self.links != LinkPreference::Never).then(|| links().map(|links| Arc::new(links) as Arc<dyn DeviceLinks>));
        found.map(|found| (self.links, found.map_err(|error: CudaError| error.into())))
    }

    fn with_links(&self, links: LinkPreference) -> Option<Arc<dyn Executor>> {
        Some(Arc::new(Self { links, ..*self }))
    }

    fn can_exchange_on_device(&self, program: &Program, schedule: &Schedule) -> bool {
        let graph = &program.graph;
        // What the host updates is exchanged there.
        let lies = |id: &ValueId| {
            let place = program.layout.places[id.0 as usize];
            place.is_some_and(|place| place.arena != Arena::Store || self.offload == Offload::None)
        };
        schedule.exchanges.iter().all(|item| {
            let node = graph.node(item.node);
            let movement = node.op.collective().map(|collective| collective.movement);
            let adds = matches!(
                movement,
                Some(
                    Movement::Sum
                        | Movement::SumBucket
                        | Movement::ScatterBucket { .. }
                        | Movement::Scatter { .. }
                        | Movement::Share { .. }
                )
            );
            let can_add = |id: &ValueId| !adds || !matches!(graph.ty(*id).dtype, DType::Bool | DType::U8);
            node.inputs.iter().chain(&node.outputs).all(|id| lies(id) && can_add(id))
        })
    }

    fn allocates_on_host(&self) -> bool {
        false
    }

    fn monitor(&self) -> Option<Arc<dyn Monitor>> {
        GpuMonitor::open(self.index).ok().map(|monitor| Arc::new(monitor) as Arc<dyn Monitor>)
    }

    /// Compiles all kernels at once, on all cores. What fails is told when a program is compiled that needs it.
    fn prepare(&self, graphs: &[&Graph]) {
        let Ok(gpu) = Gpu::open(self.index) else { return };
        let target = self.target();
        let calls_of = |graph: &&Graph| {
            let lowering = Lowering::new(graph, &target, Some(&gpu));
            graph.ids().filter_map(|id| lowering.calls(id).ok()).collect::<Vec<_>>()
        };
        let calls: Vec<CudaCalls> = graphs.iter().flat_map(calls_of).collect();
        let sources = calls.iter().flat_map(CudaCalls::sources);
        let _ = gpu.kernels.prepare(&gpu, sources);
    }

    fn compile(
        &self,
        program: &Program,
        schedule: &Arc<Schedule>,
        store: &Store,
        sums: Option<Memory>,
    ) -> Result<Box<dyn Device>, CompileError> {
        let gpu = Gpu::open(self.index)?;
        Ok(Box::new(CudaDevice::new(*self, &gpu, program, schedule, store, sums)?))
    }
}
