//! A graph with everything that is known of its run before anything is allocated.

use crate::executor::{Executor, SessionBytes};
use crate::options::Options;
use kolo_graph::layout::{Layout, overlap};
use kolo_graph::sources::Param;
use kolo_graph::{Graph, NodeId, ValueId};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A graph, who will run it, and its place in memory. The planner counts it, and a session is compiled from it: what was
/// planned is what is allocated.
#[derive(Clone, Debug)]
pub struct Program {
    pub executor: Arc<dyn Executor>,
    pub graph: Arc<Graph>,
    pub layout: Arc<Layout>,
    pub options: Options,
    /// In which order the segments of grains run, if not grain by grain.
    pub order: Option<Arc<Order>>,
}

/// The order of a step's work on grains, in segments: what a pipeline's schedule says for one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Grains on their way at the same time, at most.
    pub slots: usize,
    /// Ways that grains go: two if each half of them has segments of its own.
    pub ways: usize,
    /// Those of a grain are in the order of the graph.
    pub turns: Vec<Turn>,
}

/// A segment's turn on a grain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    pub segment: u32,
    pub grain: usize,
    /// Whose activations the grain uses, the same on all ranks.
    pub slot: usize,
    /// The number of the term that the grain adds to the segment's sums. Those of a segment come in their order, from 0.
    pub term: usize,
}

impl Order {
    /// How often a segment runs in a step.
    pub fn times(&self, segment: u32) -> usize {
        self.turns.iter().filter(|turn| turn.segment == segment).count()
    }
}

impl Program {
    pub fn new(executor: &Arc<dyn Executor>, graph: Graph, options: Options) -> Self {
        let options = executor.options(options);
        let graph = executor.rewrite(graph, options);
        let layout = executor.layout(&graph, options);
        Self { executor: Arc::clone(executor), graph: Arc::new(graph), layout: Arc::new(layout), options, order: None }
    }

    /// The same with grains in segments. The options have the order's slots.
    pub fn in_order(self, order: Option<Order>) -> Self {
        if cfg!(debug_assertions) {
            order.iter().for_each(|order| self.check_memory(order));
        }
        Self { order: order.map(Arc::new), ..self }
    }

    /// # Panics
    ///
    /// If a grain that runs segment by segment writes over what it still needs.
    fn check_memory(&self, order: &Order) {
        let mut segments: Vec<u32> = Vec::new();
        let grains: BTreeSet<usize> = order.turns.iter().map(|turn| turn.grain).collect();
        for grain in grains {
            let own: Vec<u32> =
                order.turns.iter().filter(|turn| turn.grain == grain).map(|turn| turn.segment).collect();
            if own == segments {
                continue;
            }
            let of = |segment: u32| self.layout.grain.iter().filter(move |id| self.graph.node(**id).segment == segment);
            let nodes: Vec<NodeId> = own.iter().flat_map(|segment| of(*segment)).copied().collect();
            if let Some((first, second)) = overlap(&self.graph, &self.layout, &nodes) {
                let of = |id: ValueId| self.graph.maker(id).op.signature();
                panic!(
                    "%{} of `{}` is written over by %{} of `{}`: segments run in another order than the graph",
                    first.0,
                    of(first),
                    second.0,
                    of(second)
                );
            }
            segments = own;
        }
    }

    /// For the CPU.
    pub fn cpu(graph: Graph, options: Options) -> Self {
        let executor: Arc<dyn Executor> = Arc::new(crate::cpu::Cpu);
        Self::new(&executor, graph, options)
    }

    /// Bytes that a session of it allocates.
    pub fn bytes(&self) -> SessionBytes {
        self.executor.bytes(&self.graph, &self.layout, self.options)
    }

    /// How often each node of a grain runs in a step, over all lanes, by its segment.
    pub fn times(&self, segment: u32) -> usize {
        self.order.as_ref().map_or(self.options.grains, |order| order.times(segment))
    }

    /// The product whose result a node takes as it is made; their time is measured together, as the node's.
    pub fn maker_of(&self, node: NodeId) -> Option<NodeId> {
        self.layout.unstored.taken_by(node).map(|taken| taken.product)
    }

    /// Whether the step changes every parameter where it is, and copies none at its end.
    pub fn updates_params_in_place(&self) -> bool {
        self.layout.copies.iter().all(|(_, state)| !self.graph.maker(*state).op.is::<Param>())
    }
}
