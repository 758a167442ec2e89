//! Where the channels of a graph's images lie on a GPU.
//!
//! Types say `[n, c, h, w]` everywhere; memory may hold `[n, h, w, c]`. [`ChannelOrders`] decides for a whole graph: values that are
//! joined by ops which know both orders have one order, channels last if any of these ops gains by it. [`calls`] moves elements
//! around an op whose operands lie otherwise than it takes them.

use crate::moves::{self, Walk};
use kolo_graph::cuda::{ChannelsLast, Cuda, CudaBuffer, CudaCalls, CudaCx, CudaPlace, CudaTarget, any_order};
use kolo_graph::sources::GrainSum;
use kolo_graph::types::strides;
use kolo_graph::{Graph, Node, NodeId, Type, ValueId};

/// Which values of a graph lie with their channels last, and which nodes run so.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChannelOrders {
    values: Vec<bool>,
    nodes: Vec<bool>,
}

impl ChannelOrders {
    pub fn new(graph: &Graph, target: &CudaTarget) -> Self {
        Self::beside(graph, target, |_| false)
    }

    /// The same where some nodes run elsewhere, which know one order alone.
    pub fn beside(graph: &Graph, target: &CudaTarget, elsewhere: impl Fn(NodeId) -> bool) -> Self {
        let named: Vec<Option<ChannelsLast>> = graph.nodes.iter().map(|node| named(graph, node, target)).collect();
        let mut free = free_values(graph, &named);
        for id in graph.ids().filter(|id| elsewhere(*id)) {
            let node = graph.node(id);
            node.inputs.iter().chain(&node.outputs).for_each(|id| free[id.0 as usize] = false);
        }
        let mut groups = Groups::new(graph.values.len());
        let operands = |at: usize| operands(&graph.nodes[at], named[at].as_ref());
        for at in 0..graph.nodes.len() {
            let mut joined = operands(at).filter(|id| free[id.0 as usize]);
            if let Some(first) = joined.next() {
                joined.for_each(|id| groups.join(first, id));
            }
        }
        let mut gains = vec![false; graph.values.len()];
        for at in (0..graph.nodes.len()).filter(|at| named[*at].as_ref().is_some_and(|named| named.gains)) {
            operands(at).filter(|id| free[id.0 as usize]).for_each(|id| gains[groups.of(id)] = true);
        }
        let values: Vec<bool> =
            (0..graph.values.len()).map(|at| free[at] && gains[groups.of(ValueId(at as u32))]).collect();
        let runs_last = |at: usize| {
            let gains = named[at].as_ref().is_some_and(|named| named.gains);
            gains || operands(at).any(|id| values[id.0 as usize])
        };
        let nodes = (0..graph.nodes.len()).map(runs_last).collect();
        Self { values, nodes }
    }

    /// Whether a value's channels lie last.
    pub fn is_last(&self, id: ValueId) -> bool {
        self.values[id.0 as usize]
    }

    /// Whether a node's op takes the operands that it named with their channels last.
    pub fn runs_last(&self, id: NodeId) -> bool {
        self.nodes[id.0 as usize]
    }
}

fn named(graph: &Graph, node: &Node, target: &CudaTarget) -> Option<ChannelsLast> {
    let (inputs, outputs) = (graph.types(&node.inputs), graph.types(&node.outputs));
    let fours = inputs.iter().chain(&outputs).any(|ty| ty.rank() == 4 && ty.elements() > 0);
    let op = crate::cuda_of(&*node.op).filter(|_| fours)?;
    op.channels_last(&CudaCx::new(&inputs, &outputs, target))
}

fn operands<'a>(node: &'a Node, named: Option<&'a ChannelsLast>) -> impl Iterator<Item = ValueId> + 'a {
    let inputs = named.into_iter().flat_map(|named| named.inputs.iter().map(|at| node.inputs[*at]));
    inputs.chain(named.into_iter().flat_map(|named| named.outputs.iter().map(|at| node.outputs[*at])))
}

/// Values that may lie in either order: made by an op that knows both, and read by kernels alone.
fn free_values(graph: &Graph, named: &[Option<ChannelsLast>]) -> Vec<bool> {
    let mut free = vec![false; graph.values.len()];
    for (node, named) in graph.nodes.iter().zip(named) {
        for at in named.iter().flat_map(|named| &named.outputs) {
            let id = node.outputs[*at];
            free[id.0 as usize] = !any_order(graph.ty(id));
        }
        let by_kernel =
            !node.op.aliases() && !node.op.view() && node.op.collective().is_none() && !node.op.is::<GrainSum>();
        if !by_kernel {
            node.inputs.iter().chain(&node.outputs).for_each(|id| free[id.0 as usize] = false);
        }
    }
    let kept =
        graph.outputs.iter().map(|(_, id)| id).chain(graph.updates.iter().flat_map(|(state, value)| [state, value]));
    kept.for_each(|id| free[id.0 as usize] = false);
    free
}

/// Values that are joined, as a forest.
struct Groups(Vec<usize>);

impl Groups {
    fn new(count: usize) -> Self {
        Self((0..count).collect())
    }

    fn of(&mut self, id: ValueId) -> usize {
        let mut at = id.0 as usize;
        while self.0[at] != at {
            self.0[at] = self.0[self.0[at]];
            at = self.0[at];
        }
        at
    }

    fn join(&mut self, a: ValueId, b: ValueId) {
        let (a, b) = (self.of(a), self.of(b));
        self.0[a.max(b)] = a.min(b);
    }
}

/// What an op does on operands whose channels lie last where `inputs` and `outputs` say so. The op takes them as `cx` says; what
/// lies otherwise goes through scratch.
pub fn calls(op: &dyn Cuda, cx: &CudaCx<'_>, inputs: &[bool], outputs: &[bool]) -> CudaCalls {
    let named = if cx.channels_last { op.channels_last(cx).unwrap_or_default() } else { ChannelsLast::default() };
    let cx = &CudaCx { channels_last: named != ChannelsLast::default(), ..*cx };
    let mut calls = CudaCalls::new();
    let mut moved = |types: &[Type], lies: &[bool], takes: &[usize]| -> Vec<Option<CudaPlace>> {
        let apart = |at: usize| lies[at] != takes.contains(&at) && !any_order(&types[at]);
        (0..types.len()).map(|at| apart(at).then(|| calls.scratch(types[at].bytes()))).collect()
    };
    let from = moved(cx.inputs, inputs, &named.inputs);
    let to = moved(cx.outputs, outputs, &named.outputs);
    for (at, place) in from.iter().enumerate().filter_map(|(at, place)| Some((at, (*place)?))) {
        reorder(&mut calls, &cx.inputs[at], !inputs[at], CudaPlace::input(at), place);
    }
    calls.append(op.calls(cx), |place| {
        let instead = match place.buffer {
            CudaBuffer::Input(at) => from[at],
            CudaBuffer::Output(at) => to[at],
            CudaBuffer::Scratch => None,
        };
        instead.map_or(place, |instead| instead.further(place.offset))
    });
    for (at, place) in to.iter().enumerate().filter_map(|(at, place)| Some((at, (*place)?))) {
        reorder(&mut calls, &cx.outputs[at], outputs[at], place, CudaPlace::output(at));
    }
    calls
}

/// Moves the elements of a tensor from one order to the other.
fn reorder(calls: &mut CudaCalls, ty: &Type, to_last: bool, from: CudaPlace, to: CudaPlace) {
    let [_, channels, height, width] = ty.shape[..] else { unreachable!("only tensors of four dims have two orders") };
    let first = strides(&ty.shape);
    let last = [channels * height * width, 1, width * channels, channels];
    let walk = |dim: usize| match to_last {
        true => Walk { size: ty.shape[dim], from: first[dim], to: last[dim] },
        false => Walk { size: ty.shape[dim], from: last[dim], to: first[dim] },
    };
    // In the order of the target's memory.
    let dims = if to_last { [0, 2, 3, 1] } else { [0, 1, 2, 3] };
    moves::elements(calls, ty.dtype.bytes(), &dims.map(walk), (from, 0), (to, 0));
}
