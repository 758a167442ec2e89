//! The graph: nodes in topological order, values between them, and what leaves it.
//!
//! Nodes are only ever appended, and a node's inputs exist before it, so the order of the list is an order to run in.
//! A rewrite builds a new graph.

use crate::collective::{AfterGrains, Receive};
use crate::fetch::Fetch;
use crate::op::Op;
use crate::operand::checked_types;
use crate::share::EachGrain;
use crate::sources::{GrainSum, Input, Param, State};
use crate::steps;
use crate::types::Type;
use std::collections::BTreeSet;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, Eq, PartialOrd, Ord, Hash)]
#[allow(clippy::derived_hash_with_manual_eq)]
pub struct ValueId(pub u32);

#[derive(Clone, Copy, Debug, Eq, PartialOrd, Ord, Hash)]
#[allow(clippy::derived_hash_with_manual_eq)]
pub struct NodeId(pub u32);

// Written out, so that a search through a list of ids counts as the many steps it is.
impl PartialEq for ValueId {
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        steps::count(1);
        self.0 == other.0
    }
}

impl PartialEq for NodeId {
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        steps::count(1);
        self.0 == other.0
    }
}

/// Which part of a training step a node belongs to; costs are reported by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    #[default]
    Forward,
    Backward,
    Update,
}

impl Stage {
    pub const ALL: [Stage; 3] = [Stage::Forward, Stage::Backward, Stage::Update];

    pub fn name(self) -> &'static str {
        match self {
            Stage::Forward => "forward",
            Stage::Backward => "backward",
            Stage::Update => "update",
        }
    }
}

#[derive(Clone, Debug)]
pub struct Node {
    pub op: Arc<dyn Op>,
    pub inputs: Vec<ValueId>,
    pub outputs: Vec<ValueId>,
    /// The layer that made it, such as `h.3.attn`.
    pub scope: Arc<str>,
    pub stage: Stage,
    /// The segment of a grain that it belongs to, where grains run in segments that alternate with those of other grains.
    pub segment: u32,
}

#[derive(Clone, Debug)]
pub struct Value {
    pub ty: Type,
    pub node: NodeId,
    pub slot: usize,
}

/// How often a value is computed in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Once, before the grains: it depends on parameters alone.
    Before,
    /// Once per grain.
    Grain,
    /// Once, after the grains: it depends on a sum over them.
    After,
}

#[derive(Clone, Debug, Default)]
pub struct Graph {
    pub nodes: Vec<Node>,
    pub values: Vec<Value>,
    /// Named results.
    pub outputs: Vec<(String, ValueId)>,
    /// (state, its new value): what the step leaves behind.
    pub updates: Vec<(ValueId, ValueId)>,
}

/// A graph that cannot be built.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{op}{}: {message}\n  hint: {hint}", if scope.is_empty() { String::new() } else { format!(" in `{scope}`") })]
pub struct GraphError {
    pub op: String,
    pub scope: String,
    pub message: String,
    pub hint: String,
    /// The types of the op's inputs, if these do not fit it.
    pub inputs: Option<Vec<Type>>,
}

impl GraphError {
    /// Says where inputs that do not fit can be changed; another kind of error stays as it is.
    pub fn change_inputs(mut self, how: &str) -> Self {
        if let Some(inputs) = &self.inputs {
            self.hint = format!("its inputs are {}; {how}", list(inputs));
        }
        self
    }
}

impl Graph {
    pub fn value(&self, id: ValueId) -> &Value {
        steps::count(1);
        &self.values[id.0 as usize]
    }

    pub fn ty(&self, id: ValueId) -> &Type {
        &self.value(id).ty
    }

    pub fn node(&self, id: NodeId) -> &Node {
        steps::count(1);
        &self.nodes[id.0 as usize]
    }

    /// The node that makes this value.
    pub fn maker(&self, id: ValueId) -> &Node {
        self.node(self.value(id).node)
    }

    pub fn ids(&self) -> impl Iterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    pub fn types(&self, ids: &[ValueId]) -> Vec<Type> {
        ids.iter().map(|id| self.ty(*id).clone()).collect()
    }

    /// Appends a node after checking its inputs' types.
    pub fn push(
        &mut self,
        op: Arc<dyn Op>,
        inputs: Vec<ValueId>,
        scope: Arc<str>,
        stage: Stage,
    ) -> Result<NodeId, GraphError> {
        let types = self.types(&inputs);
        let outputs = checked_types(&*op, &types).map_err(|message| {
            let (op, scope, hint) = (op.signature(), scope.to_string(), String::new());
            let error = GraphError { op, scope, message, hint, inputs: Some(types) };
            error.change_inputs("change their shapes or types, or the op's attributes")
        })?;
        Ok(self.push_typed(op, inputs, outputs, scope, stage))
    }

    /// Appends a node whose output types are known already.
    pub fn push_typed(
        &mut self,
        op: Arc<dyn Op>,
        inputs: Vec<ValueId>,
        outputs: Vec<Type>,
        scope: Arc<str>,
        stage: Stage,
    ) -> NodeId {
        let node = NodeId(self.nodes.len() as u32);
        let first = self.values.len() as u32;
        let ids = (0..outputs.len() as u32).map(|slot| ValueId(first + slot)).collect();
        self.values.extend(outputs.into_iter().enumerate().map(|(slot, ty)| Value { ty, node, slot }));
        self.nodes.push(Node { op, inputs, outputs: ids, scope, stage, segment: 0 });
        node
    }

    /// Makes a node part of a segment.
    pub fn set_segment(&mut self, id: NodeId, segment: u32) {
        self.nodes[id.0 as usize].segment = segment;
    }

    /// Every source of kind `T` with its value, in order.
    pub fn sources<T: Op>(&self) -> impl Iterator<Item = (ValueId, &T)> {
        self.nodes.iter().filter_map(|node| {
            steps::count(1);
            Some((node.outputs[0], node.op.downcast::<T>()?))
        })
    }

    pub fn params(&self) -> impl Iterator<Item = (ValueId, &Param)> {
        self.sources::<Param>()
    }

    pub fn states(&self) -> impl Iterator<Item = (ValueId, &State)> {
        self.sources::<State>()
    }

    pub fn inputs(&self) -> impl Iterator<Item = (ValueId, &Input)> {
        self.sources::<Input>()
    }

    pub fn output(&self, name: &str) -> Option<ValueId> {
        self.outputs.iter().find(|(key, _)| key == name).map(|(_, id)| *id)
    }

    pub fn parameter_count(&self) -> usize {
        self.params().map(|(id, _)| self.ty(id).elements()).sum()
    }

    /// The phase of every node, in order.
    pub fn phases(&self) -> Vec<Phase> {
        let mut phases: Vec<Phase> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let fetched = node.op.downcast::<Fetch>();
            let per_grain = node.op.is::<EachGrain>()
                || fetched.is_some_and(|fetch| !fetch.after_grains)
                || node.op.downcast::<Input>().is_some_and(|input| !input.per_step)
                || node.op.downcast::<Receive>().is_some_and(|receive| !receive.per_step);
            let own = if per_grain { Phase::Grain } else { Phase::Before };
            let latest =
                node.inputs.iter().map(|id| phases[self.value(*id).node.0 as usize]).fold(own, |a, b| a.max(b));
            let late = fetched.is_some_and(|fetch| fetch.after_grains);
            let last = late || node.op.is::<GrainSum>() || node.op.is::<AfterGrains>();
            phases.push(if last { Phase::After } else { latest });
        }
        phases
    }

    /// For each value, whether it is a named result.
    pub fn output_mask(&self) -> Vec<bool> {
        self.mask(self.outputs.iter().map(|(_, id)| *id))
    }

    /// For each value, whether the step leaves it behind: as a named result or as the new value of a state.
    pub fn kept_mask(&self) -> Vec<bool> {
        self.mask(self.outputs.iter().map(|(_, id)| *id).chain(self.updates.iter().map(|(_, value)| *value)))
    }

    fn mask(&self, ids: impl Iterator<Item = ValueId>) -> Vec<bool> {
        let mut mask = vec![false; self.values.len()];
        ids.for_each(|id| mask[id.0 as usize] = true);
        mask
    }

    /// For each value, what it becomes if it is a state that the step updates.
    pub fn updated_values(&self) -> Vec<Option<ValueId>> {
        let mut updated = vec![None; self.values.len()];
        self.updates.iter().for_each(|(state, value)| updated[state.0 as usize] = Some(*value));
        updated
    }

    /// The parameters and states that belong to the optimizer, and so to the servers: those that follow from a gradient, and those
    /// that a new parameter follows from. What is left are statistics, such as a batch norm's averages.
    pub fn optimizer_states(&self) -> BTreeSet<ValueId> {
        let mut follows = vec![false; self.values.len()];
        for node in &self.nodes {
            let is_gradient = node.op.downcast::<GrainSum>().is_some_and(|sum| !sum.of.is_empty());
            let from_gradient = node.inputs.iter().any(|id| follows[id.0 as usize]);
            node.outputs.iter().for_each(|id| follows[id.0 as usize] = is_gradient || from_gradient);
        }
        let is_param = |id: ValueId| self.maker(id).op.is::<Param>();
        let mut leads = vec![false; self.values.len()];
        for (_, value) in self.updates.iter().filter(|(state, _)| is_param(*state)) {
            leads[value.0 as usize] = true;
        }
        // What a grain computes is no part of the update.
        for node in self.nodes.iter().rev().filter(|node| !node.op.is::<GrainSum>()) {
            if node.outputs.iter().any(|id| leads[id.0 as usize]) {
                node.inputs.iter().for_each(|id| leads[id.0 as usize] = true);
            }
        }
        let own =
            |state: ValueId, value: ValueId| is_param(state) || leads[state.0 as usize] || follows[value.0 as usize];
        self.updates.iter().filter(|(state, value)| own(*state, *value)).map(|(state, _)| *state).collect()
    }

    /// For each value, the nodes that read it.
    pub fn readers(&self) -> Vec<Vec<NodeId>> {
        let mut readers = vec![Vec::new(); self.values.len()];
        for id in self.ids() {
            for input in &self.node(id).inputs {
                let list: &mut Vec<NodeId> = &mut readers[input.0 as usize];
                if list.last() != Some(&id) {
                    list.push(id);
                }
            }
        }
        readers
    }
}

fn list(types: &[Type]) -> String {
    if types.is_empty() {
        return "none".into();
    }
    types.iter().map(Type::to_string).collect::<Vec<_>>().join(", ")
}
