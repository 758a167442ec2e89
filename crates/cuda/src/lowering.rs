//! From nodes of a graph to calls, before anything has an address.

use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::host_part::HostPart;
use kolo_graph::cuda::{CudaCall, CudaCalls, CudaCx, CudaTarget};
use kolo_graph::fetch::Fetch;
use kolo_graph::layout::Layout;
use kolo_graph::{Graph, NodeId, Type, ValueId};
use kolo_ops::channel_order::{self, ChannelOrders};
use kolo_ops::cuda_of;
use kolo_ops::norm_chains::NormChains;
use std::sync::Arc;

/// What is known of a graph before its nodes become calls.
#[derive(Debug)]
pub(crate) struct Lowering<'a> {
    graph: &'a Graph,
    target: &'a CudaTarget,
    orders: ChannelOrders,
    chains: NormChains,
    /// Whose libraries say what they can; without it they can everything.
    gpu: Option<&'a Arc<Gpu>>,
}

impl<'a> Lowering<'a> {
    pub fn new(graph: &'a Graph, target: &'a CudaTarget, gpu: Option<&'a Arc<Gpu>>) -> Self {
        Self { graph, target, orders: ChannelOrders::new(graph, target), chains: NormChains::default(), gpu }
    }

    /// The same where the host runs these nodes, before values have places: what it reads and makes lies as its type says.
    pub fn beside(self, host: &HostPart) -> Self {
        let elsewhere = |id: NodeId| host.has(id) || self.graph.node(id).op.is::<Fetch>();
        if !self.graph.ids().any(elsewhere) {
            return self;
        }
        Self { orders: ChannelOrders::beside(self.graph, self.target, elsewhere), ..self }
    }

    /// The same for a graph whose values have places.
    pub fn placed(self, layout: &Layout) -> Self {
        Self { chains: NormChains::new(self.graph, layout, &self.orders), ..self }
    }

    /// What the calls of a node read.
    pub fn inputs(&self, id: NodeId) -> Vec<ValueId> {
        self.chains.inputs(self.graph, id)
    }

    /// What a node does on this GPU; nothing if none of its results has an element.
    pub fn calls(&self, id: NodeId) -> Result<CudaCalls, CudaError> {
        let node = self.graph.node(id);
        let (given, made) = (self.inputs(id), &node.outputs);
        let (inputs, outputs) = (self.graph.types(&given), self.graph.types(made));
        let Some(op) = cuda_of(&*node.op) else {
            let layer = if node.scope.is_empty() { String::new() } else { format!(" in layer `{}`", node.scope) };
            return Err(CudaError::MissingKernel { op: node.op.signature(), layer });
        };
        if outputs.iter().all(|ty: &Type| ty.elements() == 0) || self.chains.is_run_by_norm(id) {
            return Ok(CudaCalls::new());
        }
        let channels_last = self.orders.runs_last(id);
        let cx = CudaCx { channels_last, ..CudaCx::new(&inputs, &outputs, self.target) };
        if let Some(calls) = self.chains.calls(self.graph, id, &cx) {
            return Ok(calls);
        }
        let [given, made] = [&given, made].map(|ids| ids.iter().map(|id| self.orders.is_last(*id)).collect::<Vec<_>>());
        let calls = channel_order::calls(op, &cx, &given, &made);
        if self.is_supported(&calls)? {
            return Ok(calls);
        }
        let target = CudaTarget { convolutions: false, ..self.target.clone() };
        Ok(channel_order::calls(op, &CudaCx::new(&inputs, &outputs, &target), &given, &made))
    }

    /// Whether the library has an algorithm for every convolution of these.
    fn is_supported(&self, calls: &CudaCalls) -> Result<bool, CudaError> {
        let Some(gpu) = self.gpu else { return Ok(true) };
        for call in &calls.calls {
            if let CudaCall::Convolution(convolution) = call
                && gpu.convolutions.algorithm(gpu, &convolution.kind, self.target.tf32)?.is_none()
            {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
