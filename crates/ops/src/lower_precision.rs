//! Mixed precision as a rewrite: what products read and make becomes bf16 or f16, the rest stays f32.
//!
//! Every value that a step computes has one type in which it is stored, and everybody reads that. Results of products, norms
//! and the like are halves; so is any other value that such an op reads. What leads to sums over grains only (gradients of
//! parameters), losses, statistics and updates are f32. Parameters, states and inputs keep their f32, and products read a
//! copy in half precision: of a parameter it depends on nothing else, so it is made once per step, before the grains.
//!
//! Kernels compute in f32 whatever they read. Casts stand where a value is made or read; [`fuse_elementwise`] makes those
//! around elementwise ops part of their pass.
//!
//! [`fuse_elementwise`]: crate::fuse::fuse_elementwise

use crate::cast::Cast;
use kolo_graph::rewrite::Rebuild;
use kolo_graph::sources::Full;
use kolo_graph::{DType, Graph, Mixed, Node, Op, Phase, Stage, Type, ValueId};
use std::collections::HashMap;
use std::sync::Arc;

/// The graph with `half`, bf16 or f16, for all that tolerates it.
pub fn lower_precision(graph: &Graph, half: DType) -> Graph {
    let demand = Demand::of(graph, half);
    let copies = vec![Copies::default(); graph.values.len()];
    let mut lowering = Lowering { rebuild: Rebuild::new(graph), half, demand, copies, widened: HashMap::new() };
    graph.nodes.iter().enumerate().for_each(|(at, node)| lowering.node(at, node));
    lowering.finish()
}

/// What the readers of each value want of it.
struct Demand {
    /// Some op takes it as a half, perhaps after others moved it about.
    half: Vec<bool>,
    /// It reaches such an op through elementwise ops at least.
    leads_to_half: Vec<bool>,
    phases: Vec<Phase>,
}

impl Demand {
    fn of(graph: &Graph, half: DType) -> Self {
        let nothing = vec![false; graph.values.len()];
        let mut demand = Self { half: nothing.clone(), leads_to_half: nothing, phases: graph.phases() };
        for (at, node) in graph.nodes.iter().enumerate().rev() {
            let (wants, leads) = match demand.mixed(at, node) {
                Mixed::Full => continue,
                Mixed::Half => (true, true),
                Mixed::Elementwise => (false, demand.leads_to_half[node.outputs[0].0 as usize]),
                Mixed::AsGiven => {
                    let follows: Vec<ValueId> = following(graph, node, half).collect();
                    let any = |mask: &[bool]| follows.iter().any(|id| mask[id.0 as usize]);
                    (any(&demand.half), any(&demand.leads_to_half))
                }
            };
            for input in halvable(graph, node) {
                demand.half[input.0 as usize] |= wants;
                demand.leads_to_half[input.0 as usize] |= leads;
            }
        }
        demand
    }

    /// An update is f32 throughout.
    fn mixed(&self, at: usize, node: &Node) -> Mixed {
        if self.phases[at] == Phase::After { Mixed::Full } else { node.op.mixed() }
    }
}

/// Inputs in f32 that the op would take as halves.
fn halvable<'g>(graph: &'g Graph, node: &'g Node) -> impl Iterator<Item = ValueId> + use<'g> {
    let operands = node.op.operands();
    let inputs = node.inputs.iter().enumerate();
    inputs.filter(move |(at, id)| may_be_half(&operands, *at, graph.ty(**id))).map(|(_, id)| *id)
}

fn may_be_half(operands: &kolo_graph::Operands, at: usize, ty: &Type) -> bool {
    ty.dtype == DType::F32 && operands.input(at).is_some_and(|operand| operand.may_be_half())
}

/// Outputs that are halves if the inputs are.
fn following<'g>(graph: &'g Graph, node: &'g Node, half: DType) -> impl Iterator<Item = ValueId> + use<'g> {
    let operands = node.op.operands();
    let mut types = graph.types(&node.inputs);
    let halved = types.iter_mut().enumerate().filter(|(at, ty)| may_be_half(&operands, *at, ty));
    halved.for_each(|(_, ty)| ty.dtype = half);
    let outputs = node.op.infer(&types).unwrap_or_default();
    node.outputs.iter().zip(outputs).filter(move |(_, ty)| ty.dtype == half).map(|(id, _)| *id)
}

/// A value of the old graph in both precisions, as far as they exist.
#[derive(Clone, Copy, Default)]
struct Copies {
    half: Option<ValueId>,
    full: Option<ValueId>,
}

struct Lowering<'g> {
    rebuild: Rebuild<'g>,
    half: DType,
    demand: Demand,
    copies: Vec<Copies>,
    /// Halves that were cast back to f32, by the value and by where its readers are.
    widened: HashMap<(u32, Location), ValueId>,
}

/// The part of the step and of the model to which a node belongs.
type Location = (Arc<str>, Stage, u32);

impl Lowering<'_> {
    fn node(&mut self, at: usize, node: &Node) {
        let mixed = self.demand.mixed(at, node);
        let inputs = self.inputs(node, mixed);
        let op = match mixed == Mixed::Half && !self.leads_to_half(node) {
            true => node.op.wide().unwrap_or_else(|| Arc::clone(&node.op)),
            false => Arc::clone(&node.op),
        };
        let new = &mut self.rebuild.new;
        let id = match new.push(op, inputs, node.scope.clone(), node.stage) {
            Ok(id) => id,
            Err(error) => panic!("an op takes the halves that it declares: {error}"),
        };
        new.set_segment(id, node.segment);
        let outputs = new.node(id).outputs.clone();
        for (old, made) in node.outputs.iter().zip(outputs) {
            self.rebuild.set(*old, made);
            self.store(*old, made, node);
        }
    }

    fn leads_to_half(&self, node: &Node) -> bool {
        node.outputs.iter().any(|id| self.demand.leads_to_half[id.0 as usize])
    }

    /// Remembers what a value has become, and makes the copy that products read if it is not what they want.
    fn store(&mut self, old: ValueId, made: ValueId, node: &Node) {
        let dtype = self.rebuild.new.ty(made).dtype;
        let copies = &mut self.copies[old.0 as usize];
        match dtype {
            DType::F32 => copies.full = Some(made),
            _ => copies.half = Some(made),
        }
        if dtype != DType::F32 || !self.demand.half[old.0 as usize] {
            return;
        }
        let half = match node.op.downcast::<Full>() {
            Some(constant) => self.push(Full { dtype: self.half, ..constant.clone() }, Vec::new(), node),
            None => self.push(Cast { to: self.half }, vec![made], node),
        };
        let keeps_full = self.keeps_full(old);
        let copies = &mut self.copies[old.0 as usize];
        copies.half = Some(half);
        // What a grain computes is stored once: whoever wants f32 widens the half.
        copies.full = copies.full.filter(|_| keeps_full);
    }

    fn push(&mut self, op: impl Op, inputs: Vec<ValueId>, beside: &Node) -> ValueId {
        let new = &mut self.rebuild.new;
        let id = match new.push(Arc::new(op), inputs, beside.scope.clone(), beside.stage) {
            Ok(id) => id,
            Err(error) => panic!("a value can be cast: {error}"),
        };
        new.set_segment(id, beside.segment);
        new.node(id).outputs[0]
    }

    /// Whether a value is there in f32 whatever becomes of it: a source, or computed from parameters alone.
    fn keeps_full(&self, id: ValueId) -> bool {
        let made = self.rebuild.old.value(id).node;
        let is_source = self.rebuild.old.node(made).inputs.is_empty();
        is_source || self.demand.phases[made.0 as usize] == Phase::Before
    }

    fn inputs(&mut self, node: &Node, mixed: Mixed) -> Vec<ValueId> {
        let operands = node.op.operands();
        let as_halves = match mixed {
            Mixed::Full | Mixed::Elementwise => false,
            Mixed::Half => true,
            Mixed::AsGiven => self.comes_as_halves(node),
        };
        let old = self.rebuild.old;
        let each = node.inputs.iter().enumerate();
        let choose = |(at, id): (usize, &ValueId)| match old.ty(*id).dtype {
            DType::F32 if as_halves && may_be_half(&operands, at, old.ty(*id)) => {
                self.copies[id.0 as usize].half.expect("a half that is read was demanded or made so")
            }
            DType::F32 => self.full(*id, node),
            _ => self.rebuild.get(*id),
        };
        each.map(choose).collect()
    }

    /// Whether an op that takes what there is gets halves: all of its floats are, and where they are f32 too, its own result is
    /// wanted as a half.
    fn comes_as_halves(&self, node: &Node) -> bool {
        let old = self.rebuild.old;
        let wanted = following(old, node, self.half).any(|id| self.demand.half[id.0 as usize]);
        let mut floats = halvable(old, node).peekable();
        floats.peek().is_some()
            && floats.all(|id| {
                let Copies { half, full } = self.copies[id.0 as usize];
                half.is_some() && (full.is_none() || wanted || !self.keeps_full(id))
            })
    }

    /// The value in f32, for this reader. A half is cast where it is read: a pipeline then sends the half, and no layer has
    /// nodes among those of later layers.
    fn full(&mut self, id: ValueId, reader: &Node) -> ValueId {
        if let Some(full) = self.copies[id.0 as usize].full {
            return full;
        }
        let key = (id.0, (Arc::clone(&reader.scope), reader.stage, reader.segment));
        if let Some(full) = self.widened.get(&key) {
            return *full;
        }
        let half = self.copies[id.0 as usize].half.expect("a value is made before it is read");
        let full = self.push(Cast { to: DType::F32 }, vec![half], reader);
        self.widened.insert(key, full);
        full
    }

    /// Results and new states are f32 as before.
    fn finish(mut self) -> Graph {
        let old = self.rebuild.old;
        for id in old.outputs.iter().map(|(_, id)| *id).chain(old.updates.iter().map(|(_, value)| *value)) {
            if old.ty(id).dtype == DType::F32 {
                let full = self.full(id, old.maker(id));
                self.rebuild.set(id, full);
            }
        }
        self.rebuild.finish()
    }
}
