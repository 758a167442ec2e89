//! Batch norms that run together with an elementwise chain, in one pass over memory.
//!
//! Nothing changes in the graph or in the memory plan, and no bit of any result. Behind a norm: a chain that alone reads the normalised
//! images and takes over their place, so that the norm can write there what the chain would. Before the backward pass: a chain whose
//! result that pass alone reads, and whose inputs nothing overwrites until then.

use crate::batch_norm::{BatchNorm, BatchNormEval, BatchNormGrad};
use crate::batch_norm_rows::{self, Chain, GIVEN_MAX, OTHERS_MAX};
use crate::channel_order::ChannelOrders;
use crate::cuda_map::Map;
use crate::fuse::Fused;
use kolo_graph::cuda::{CudaCalls, CudaCx};
use kolo_graph::layout::{Arena, BufferPlace, Layout, Scratch};
use kolo_graph::{Graph, Node, NodeId, ValueId};
use std::collections::HashMap;
use std::ops::Range;

/// The chains of a graph that run with a norm.
#[derive(Debug, Default)]
pub struct NormChains {
    /// By the norm.
    by_norm: HashMap<NodeId, Joined>,
    /// By the chain: its norm.
    norm_of: HashMap<NodeId, NodeId>,
}

#[derive(Clone, Copy, Debug)]
struct Joined {
    chain: NodeId,
    /// Which of the chain's inputs is the norm's result.
    own: Option<usize>,
}

impl NormChains {
    pub fn new(graph: &Graph, layout: &Layout, orders: &ChannelOrders) -> Self {
        let mut position = vec![usize::MAX; graph.nodes.len()];
        layout.grain.iter().enumerate().for_each(|(at, id)| position[id.0 as usize] = at);
        let search = Search { graph, layout, orders, position, readers: graph.readers(), is_kept: graph.kept_mask() };
        let mut chains = Self::default();
        for id in &layout.grain {
            let found = search.behind_norm(*id).or_else(|| search.before_backward(*id));
            if let Some((norm, own)) = found.filter(|(norm, _)| !chains.by_norm.contains_key(norm)) {
                chains.by_norm.insert(norm, Joined { chain: *id, own });
                chains.norm_of.insert(*id, norm);
            }
        }
        chains
    }

    /// Whether a node is a chain that its norm runs.
    pub fn is_run_by_norm(&self, id: NodeId) -> bool {
        self.norm_of.contains_key(&id)
    }

    /// What a node reads: its inputs, and those of its chain.
    pub fn inputs(&self, graph: &Graph, id: NodeId) -> Vec<ValueId> {
        let mut inputs = graph.node(id).inputs.clone();
        if let Some(Joined { chain, own }) = self.by_norm.get(&id) {
            let all = graph.node(*chain).inputs.iter().enumerate();
            inputs.extend(all.filter(|(at, _)| Some(*at) != *own).map(|(_, id)| *id));
        }
        inputs
    }

    /// What a norm with a chain does; `cx` has the types of all that it reads. `None` if it has no chain.
    pub fn calls(&self, graph: &Graph, id: NodeId, cx: &CudaCx<'_>) -> Option<CudaCalls> {
        let Joined { chain, own } = *self.by_norm.get(&id)?;
        let node = graph.node(chain);
        let (map, inputs) = (map_of(graph, node)?, node.inputs.len());
        let cx = CudaCx { channels_last: true, ..*cx };
        Some(batch_norm_rows::calls(&*graph.node(id).op, &cx, Chain { map: &map, inputs, own }))
    }
}

/// How a chain, or an op of one step, computes an element.
fn map_of(graph: &Graph, node: &Node) -> Option<Map> {
    match node.op.downcast::<Fused>() {
        Some(fused) => Some(fused.map()),
        None => Map::of(&*node.op, &graph.types(&node.inputs)),
    }
}

/// What is known of a graph while its chains are looked for.
struct Search<'a> {
    graph: &'a Graph,
    layout: &'a Layout,
    orders: &'a ChannelOrders,
    /// Of each node in the order of a grain; the largest number if it is not there.
    position: Vec<usize>,
    readers: Vec<Vec<NodeId>>,
    is_kept: Vec<bool>,
}

impl Search<'_> {
    fn place(&self, id: ValueId) -> Option<BufferPlace> {
        self.layout.places[id.0 as usize]
    }

    fn only_reader(&self, id: ValueId) -> Option<NodeId> {
        match self.readers[id.0 as usize][..] {
            [reader] if !self.is_kept[id.0 as usize] => Some(reader),
            _ => None,
        }
    }

    /// A chain with one result, all of it images of one size with channels last.
    fn chain(&self, id: NodeId) -> Option<&Node> {
        let node = self.graph.node(id);
        let elementwise = node.op.is::<Fused>() || node.op.formula().is_some();
        let like = self.graph.ty(*node.outputs.first()?);
        let is_image = |id: &ValueId| {
            self.orders.is_last(*id)
                && batch_norm_rows::is_beside(self.graph.ty(*id), like)
                && self.place(*id).is_some()
        };
        (elementwise && node.outputs.len() == 1 && node.inputs.iter().chain(&node.outputs).all(is_image))
            .then_some(node)
    }

    /// The norm that chain `id` stands behind, and which input is its result.
    fn behind_norm(&self, id: NodeId) -> Option<(NodeId, Option<usize>)> {
        let chain = self.chain(id)?;
        if chain.inputs.len() > OTHERS_MAX + 1 {
            return None;
        }
        let made = chain.outputs[0];
        let fits = |at: usize| {
            let y = chain.inputs[at];
            let norm = self.graph.value(y).node;
            let node = self.graph.node(norm);
            let is_norm = node.op.is::<BatchNorm>() || node.op.is::<BatchNormEval>();
            let before = self.position[norm.0 as usize];
            let there = |(other, id): (usize, &ValueId)| other == at || *id != y && self.is_made_before(*id, before);
            let same = self.place(y) == self.place(made) && self.graph.ty(y) == self.graph.ty(made);
            let images = node.inputs[0] != y && self.orders.is_last(node.inputs[0]);
            is_norm
                && images
                && same
                && before < self.position[id.0 as usize]
                && self.only_reader(y) == Some(id)
                && chain.inputs.iter().enumerate().all(there)
        };
        let own = (0..chain.inputs.len()).find(|at| fits(*at))?;
        Some((self.graph.value(chain.inputs[own]).node, Some(own)))
    }

    /// Whether a value of the grain is there before this position, or one of before the grains.
    fn is_made_before(&self, id: ValueId, position: usize) -> bool {
        let made = self.position[self.graph.value(id).node.0 as usize];
        made == usize::MAX || made < position
    }

    /// The backward pass whose gradient chain `id` makes.
    fn before_backward(&self, id: NodeId) -> Option<(NodeId, Option<usize>)> {
        let chain = self.chain(id)?;
        let norm = self.only_reader(chain.outputs[0])?;
        let node = self.graph.node(norm);
        let [x, _, _, _, g] = node.inputs[..] else { return None };
        let is_pass = node.op.is::<BatchNormGrad>() && g == chain.outputs[0] && x != g;
        let (begin, end) = (self.position[id.0 as usize], self.position[norm.0 as usize]);
        if !is_pass || chain.inputs.len() > GIVEN_MAX || begin >= end || end == usize::MAX {
            return None;
        }
        let images = [x, node.outputs[0]].iter().all(|id| self.orders.is_last(*id));
        let between = self.layout.grain[begin + 1..end].iter().flat_map(|id| &self.graph.node(*id).outputs);
        let untouched =
            between.clone().chain(&node.outputs[1..]).all(|made| chain.inputs.iter().all(|id| self.apart(*id, *made)));
        let scratch = self.layout.grain[begin + 1..=end].iter().filter_map(|id| self.layout.scratch.get(id));
        let unused = scratch.into_iter().all(|own| chain.inputs.iter().all(|id| self.is_outside(*id, own)));
        // A thread reads an element before it writes it.
        let under = |id: &ValueId| self.apart(*id, node.outputs[0]) || self.same_elements(*id, node.outputs[0]);
        (images && untouched && unused && chain.inputs.iter().all(under)).then_some((norm, None))
    }

    fn range(&self, id: ValueId) -> Option<(Arena, Range<usize>)> {
        let place = self.place(id)?;
        let start = place.offset + place.within;
        Some((place.arena, start..start + self.graph.ty(id).bytes()))
    }

    /// Whether a value has no byte in what a node has for itself.
    fn is_outside(&self, id: ValueId, own: &Scratch) -> bool {
        let Scratch { place, bytes } = *own;
        self.range(id).is_none_or(|(arena, range)| {
            arena != place.arena || range.end <= place.offset || place.offset + bytes <= range.start
        })
    }

    /// Whether two values share no byte.
    fn apart(&self, a: ValueId, b: ValueId) -> bool {
        match (self.range(a), self.range(b)) {
            (Some((a, own)), Some((b, other))) => a != b || own.end <= other.start || other.end <= own.start,
            _ => true,
        }
    }

    /// Whether two values are the same bytes, element for element.
    fn same_elements(&self, a: ValueId, b: ValueId) -> bool {
        self.place(a) == self.place(b) && self.graph.ty(a) == self.graph.ty(b)
    }
}
