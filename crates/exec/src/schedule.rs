//! What runs when: the calls of a step in their order, the sums over grains, the exchanges and who waits for them. It is
//! derived once from a graph and its layout, and holds for every device.

use crate::program::Order;
use kolo_graph::collective::AfterGrains;
use kolo_graph::layout::Layout;
use kolo_graph::piece::Join;
use kolo_graph::sources::{GrainSum, Input, Param, State};
use kolo_graph::{Graph, Node, NodeId, Phase, ValueId};
use std::collections::{HashMap, HashSet};

/// The items of a step, phase by phase, and its exchanges.
#[derive(Debug, Default)]
pub struct Schedule {
    pub before: Vec<Item>,
    pub grain: Vec<Item>,
    pub after: Vec<Item>,
    pub exchanges: Vec<ExchangeItem>,
    /// Exchanges that the graph's outputs come from.
    pub outputs: Vec<usize>,
    /// Exchanges are of memory of the device, without the host's.
    pub on_device: bool,
}

/// One node's turn.
#[derive(Debug)]
pub struct Item {
    pub node: NodeId,
    pub act: Act,
    /// The product that this node takes as it is made, instead of having it stored.
    pub maker: Option<NodeId>,
    /// Of a grain, the segment it belongs to.
    pub segment: u32,
    /// Exchanges that must be done before.
    pub needs: Vec<usize>,
    /// Exchanges of sums that are complete on this lane when the item of its last grain has run.
    pub closes: Vec<usize>,
}

/// What an item does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Kernel,
    /// Add to the sum over grains at this element.
    Sum {
        offset: usize,
        elements: usize,
    },
    /// Start this exchange.
    Start(usize),
}

/// A collective of the graph.
#[derive(Debug)]
pub struct ExchangeItem {
    pub node: NodeId,
    pub phase: Phase,
    /// It exchanges sums over grains and nothing else: it starts when every lane has closed them, while the rest of the last
    /// grain runs. Any other starts where it stands.
    pub of_sums: bool,
    /// It exchanges gradients and nothing else.
    pub of_gradients: bool,
    /// The items of the grains after which each of its sums is complete.
    pub sum_items: Vec<usize>,
}

impl Schedule {
    /// The schedule of a worker. Alone, it has no exchanges: what is exchanged in place stays as it is, and any other
    /// collective is a kernel that copies.
    pub fn new(graph: &Graph, layout: &Layout, alone: bool) -> Self {
        let mut schedule = Self::default();
        let phases = [(Phase::Before, &layout.before), (Phase::Grain, &layout.grain), (Phase::After, &layout.after)];
        let mut numbers: HashMap<NodeId, usize> = HashMap::new();
        if !alone {
            for (phase, id) in phases.iter().flat_map(|(phase, ids)| ids.iter().map(|id| (*phase, *id))) {
                let node = graph.node(id);
                if node.op.collective().is_some() {
                    numbers.insert(id, schedule.exchanges.len());
                    schedule.exchanges.push(ExchangeItem::new(graph, id, phase));
                }
            }
        }
        let made_by = made_by(graph, &numbers);
        for (phase, ids) in phases {
            let items = items(graph, layout, ids, &numbers, &made_by);
            *schedule.items_mut(phase) = items;
        }
        schedule.after.retain(|item| !matches!(item.act, Act::Start(at) if schedule.exchanges[at].of_sums));
        schedule.close_sums(graph, layout);
        schedule.outputs = graph.outputs.iter().filter_map(|(_, id)| made_by[id.0 as usize]).collect();
        schedule
    }

    pub fn items(&self, phase: Phase) -> &[Item] {
        match phase {
            Phase::Before => &self.before,
            Phase::Grain => &self.grain,
            Phase::After => &self.after,
        }
    }

    /// How many items after the grains there are until the last that a named result follows from.
    pub fn items_before_outputs(&self, graph: &Graph) -> usize {
        let mut leads = vec![false; graph.nodes.len()];
        graph.outputs.iter().for_each(|(_, id)| leads[graph.value(*id).node.0 as usize] = true);
        for at in (0..graph.nodes.len()).rev().filter(|at| graph.nodes[*at].op.downcast::<GrainSum>().is_none()) {
            if leads[at] {
                graph.nodes[at].inputs.iter().for_each(|id| leads[graph.value(*id).node.0 as usize] = true);
            }
        }
        self.after.iter().rposition(|item| leads[item.node.0 as usize]).map_or(0, |at| at + 1)
    }

    /// The sums over grains that exchanges add up over lanes.
    pub fn exchanged_sums(&self, graph: &Graph) -> HashSet<NodeId> {
        let of_sums = self.exchanges.iter().filter(|exchange| exchange.of_sums);
        let inputs = of_sums.flat_map(|exchange| &graph.node(exchange.node).inputs);
        inputs.filter_map(|id| sum_shown_by(graph, *id)).collect()
    }

    fn items_mut(&mut self, phase: Phase) -> &mut Vec<Item> {
        match phase {
            Phase::Before => &mut self.before,
            Phase::Grain => &mut self.grain,
            Phase::After => &mut self.after,
        }
    }

    /// Tells each item which exchanges of sums are complete after it: those whose last sum was made at or before it.
    fn close_sums(&mut self, graph: &Graph, layout: &Layout) {
        let positions: HashMap<NodeId, usize> = layout.grain.iter().enumerate().map(|(at, id)| (*id, at)).collect();
        let ran: Vec<usize> = self.grain.iter().map(|item| positions[&item.node]).collect();
        for (number, exchange) in self.exchanges.iter_mut().enumerate().filter(|(_, exchange)| exchange.of_sums) {
            let inputs = &graph.node(exchange.node).inputs;
            let made = |id: &ValueId| sum_shown_by(graph, *id).and_then(|node| positions.get(&node).copied());
            let item = |last: usize| ran.partition_point(|position| *position <= last).saturating_sub(1);
            exchange.sum_items = inputs.iter().filter_map(made).map(item).collect();
            if let Some(last) = exchange.sum_items.iter().max() {
                self.grain[*last].closes.push(number);
            }
        }
    }

    /// For each turn of an order, the items after which an exchange of sums is complete: (item, exchange).
    pub fn closes_of_turns(&self, order: &Order) -> Vec<Vec<(usize, usize)>> {
        let mut last: HashMap<u32, usize> = HashMap::new();
        last.extend(order.turns.iter().enumerate().map(|(at, turn)| (turn.segment, at)));
        let mut closes = vec![Vec::new(); order.turns.len()];
        for (number, exchange) in self.exchanges.iter().enumerate() {
            let made = |item: &usize| Some((*last.get(&self.grain[*item].segment)?, *item));
            if let Some((turn, item)) = exchange.sum_items.iter().filter_map(made).max() {
                closes[turn].push((item, number));
            }
        }
        closes
    }
}

impl ExchangeItem {
    fn new(graph: &Graph, id: NodeId, phase: Phase) -> Self {
        let inputs = &graph.node(id).inputs;
        let sum = |id: &ValueId| graph.node(sum_shown_by(graph, *id)?).op.downcast::<GrainSum>();
        // In place: what makes another tensor of a sum waits until the lanes' are added up.
        let in_place = graph.node(id).op.aliases();
        let of_sums = in_place && !inputs.is_empty() && inputs.iter().all(|id| sum(id).is_some());
        let of_gradients = of_sums && inputs.iter().all(|id| sum(id).is_some_and(|sum| !sum.of.is_empty()));
        Self { node: id, phase, of_sums, of_gradients, sum_items: Vec::new() }
    }
}

/// The sum over grains that a value is, seen through views.
fn sum_shown_by(graph: &Graph, mut id: ValueId) -> Option<NodeId> {
    loop {
        let node = graph.maker(id);
        if node.op.is::<GrainSum>() {
            return Some(graph.value(id).node);
        }
        if !node.op.view() || node.op.is::<AfterGrains>() {
            return None;
        }
        id = node.inputs[0];
    }
}

/// For each value, the exchange that makes it, seen through views.
fn made_by(graph: &Graph, numbers: &HashMap<NodeId, usize>) -> Vec<Option<usize>> {
    let mut made_by = vec![None; graph.values.len()];
    for (id, node) in graph.ids().zip(&graph.nodes) {
        let made = match numbers.get(&id) {
            Some(number) => Some(*number),
            None if node.op.view() => made_by[node.inputs[0].0 as usize],
            None => None,
        };
        node.outputs.iter().for_each(|output| made_by[output.0 as usize] = made);
    }
    made_by
}

fn items(
    graph: &Graph,
    layout: &Layout,
    ids: &[NodeId],
    numbers: &HashMap<NodeId, usize>,
    made_by: &[Option<usize>],
) -> Vec<Item> {
    let mut items: Vec<Item> = Vec::new();
    for id in ids.iter().filter(|id| runs(graph, layout, **id, numbers)) {
        let node = graph.node(*id);
        let act = match (numbers.get(id), node.op.is::<GrainSum>()) {
            (Some(number), _) => Act::Start(*number),
            (None, true) => {
                let place = layout.places[node.outputs[0].0 as usize].expect("a sum has a place");
                Act::Sum { offset: place.offset / 4, elements: graph.ty(node.outputs[0]).elements() }
            }
            (None, false) => Act::Kernel,
        };
        // A product that is taken stands right before its taker.
        let maker = layout.unstored.taken_by(*id).map(|taken| taken.product);
        if let Some(product) = maker {
            let last = items.pop().map(|item| item.node);
            assert_eq!(last, Some(product), "a product stands before its update");
        }
        let read = node.inputs.iter().chain(maker.iter().flat_map(|product| &graph.node(*product).inputs));
        let mut needs: Vec<usize> = read.filter_map(|id| made_by[id.0 as usize]).collect();
        needs.sort_unstable();
        needs.dedup();
        items.push(Item { node: *id, act, maker, segment: node.segment, needs, closes: Vec::new() });
    }
    items
}

/// Whether anything happens at this node. Sources and views are there already; a sum of one term was made in its place, and so
/// were pieces that lie side by side.
fn runs(graph: &Graph, layout: &Layout, id: NodeId, numbers: &HashMap<NodeId, usize>) -> bool {
    let node: &Node = graph.node(id);
    let op = &node.op;
    if numbers.contains_key(&id) {
        return true;
    }
    let made = (op.is::<GrainSum>() || op.is::<Join>())
        && layout.places[node.inputs[0].0 as usize] == layout.places[node.outputs[0].0 as usize];
    let shows = op.aliases() && !op.changes_input();
    !(made || shows || op.is::<Input>() || op.is::<Param>() || op.is::<State>())
}
