//! Fusion: chains of elementwise ops become one op that passes over memory once.
//!
//! A group collects elementwise nodes of one shape and phase. A node may join its producer's group only if nobody outside
//! the group reads any of the group's values before that node: then the whole group can run where its last member stood.
//! Fusing changes no bit, since every element goes through the same operations in the same order.

use crate::cuda_map::{INLINE, Map};
use crate::reduce::Expand;
use crate::tiles::{self, Program, REGISTERS_MAX, Step};
use kolo_graph::attr::{Attr, AttrReader, AttrValue, Attrs};
use kolo_graph::cpu::TileKernel;
use kolo_graph::op::{Declared, Describe, OpKind};
use kolo_graph::rewrite::Rebuild;
use kolo_graph::split::{self, Split};
use kolo_graph::{
    Arg, Case, Cases, Cpu, CpuCx, Cuda, CudaCalls, CudaCx, DType, Dense, Graph, NodeId, Op, Operand, Operands, Phase,
    Shape, Type, ValueId, checked_types,
};
use std::sync::Arc;

/// Operands of one step; the tile interpreter keeps them in an array.
const OPERANDS_MAX: usize = 4;

/// A chain of elementwise ops. Registers `0..inputs` are the inputs, each step fills the next one.
#[derive(Clone, Debug)]
pub struct Fused {
    steps: Vec<(Arc<dyn Op>, Vec<usize>)>,
    shape: Vec<usize>,
    program: Program,
}

/// How one tile of an elementwise op is computed.
fn tile_kernel(op: &dyn Op) -> Option<TileKernel> {
    crate::cpu_of(op)?.tile_kernel()
}

impl Fused {
    fn new(inputs: usize, steps: Vec<(Arc<dyn Op>, Vec<usize>)>, outputs: Vec<usize>, shape: Vec<usize>) -> Self {
        let compiled = steps
            .iter()
            .map(|(op, operands)| Step {
                kernel: tile_kernel(&**op).expect("only ops with a tile kernel are fused"),
                inputs: operands.clone(),
            })
            .collect();
        Self { steps, shape, program: Program { inputs, steps: compiled, outputs } }
    }

    fn list(values: &[usize]) -> String {
        values.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
    }
}

impl Describe for Fused {
    fn name(&self) -> &'static str {
        Self::NAME
    }
    fn attrs(&self) -> Attrs {
        let steps: Vec<String> =
            self.steps.iter().map(|(op, inputs)| format!("{}({})", op.signature(), Self::list(inputs))).collect();
        vec![
            ("inputs", self.program.inputs.to_attr()),
            ("steps", Attr::Text(steps.join("; "))),
            ("outputs", self.program.outputs.to_attr()),
            ("shape", self.shape.to_attr()),
        ]
    }
}

impl Declared for Fused {
    const NAME: &'static str = "fused";
    const DOC: &'static str = "A chain of elementwise ops in one pass over memory. Registers `0..inputs` are the inputs, each step fills \
                               the next one, `outputs` names those that are kept.";
    const ATTRIBUTES: &'static [(&'static str, &'static str)] =
        &[("inputs", "usize"), ("steps", "String"), ("outputs", "Vec<usize>"), ("shape", "Vec<usize>")];
    fn read(attrs: &AttrReader<'_>) -> Result<Self, String> {
        attrs.expect_only(&["inputs", "steps", "outputs", "shape"])?;
        let registry = crate::registry();
        let (inputs, text): (usize, String) = (attrs.get("inputs")?, attrs.get("steps")?);
        let mut steps: Vec<(Arc<dyn Op>, Vec<usize>)> = Vec::new();
        for step in text.split("; ").filter(|step| !step.is_empty()) {
            let (op, rest) = kolo_graph::text::parse_op(step, &registry)?;
            tile_kernel(&*op).ok_or_else(|| format!("{} is not elementwise", op.name()))?;
            let operands =
                rest.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')).ok_or("a step needs operands")?;
            let operands: Result<Vec<usize>, String> = operands
                .split(',')
                .map(|number| number.parse().map_err(|_| format!("no register `{number}`")))
                .collect();
            let operands = operands?;
            let filled = inputs.saturating_add(steps.len());
            if operands.len() > OPERANDS_MAX || operands.iter().any(|register| *register >= filled) {
                return Err(format!("`{step}` reads a register that is not filled yet, or too many"));
            }
            let types = vec![Type::f32([]); operands.len()];
            // Registers have the fused op's shape already, whatever an expansion among the steps says.
            match op.is::<Expand>() {
                true => op.operands().check(&types)?,
                false => checked_types(&*op, &types).map(|_| ())?,
            }
            steps.push((op, operands));
        }
        let outputs: Vec<usize> = attrs.get("outputs")?;
        let filled = inputs.saturating_add(steps.len());
        if filled > REGISTERS_MAX || outputs.iter().any(|register| *register >= filled) {
            return Err(format!("a fused op has at most {REGISTERS_MAX} registers, and its outputs are among them"));
        }
        Ok(Self::new(inputs, steps, outputs, attrs.get("shape")?))
    }
}

impl Op for Fused {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::f32("x").many()], &["y"])
    }
    fn splits(&self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
        split::elementwise(inputs, outputs)
    }
    fn part(&self, split: &Split, units: usize) -> Option<Arc<dyn Op>> {
        let shape = split.part_shape(split.outputs[0], &self.shape, units).to_vec();
        let steps = self.steps.iter().map(|(op, registers)| (split.part(op, 0, units), registers.clone())).collect();
        Some(Arc::new(Self::new(self.program.inputs, steps, self.program.outputs.clone(), shape)))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        if inputs.len() != self.program.inputs {
            return Err(format!("takes {} inputs, but got {}", self.program.inputs, inputs.len()));
        }
        for input in inputs {
            let stretched = kolo_graph::types::broadcast(&input.shape, &self.shape);
            if input.dtype != DType::F32 || stretched.as_ref() != Some(&self.shape) {
                return Err(format!("{input} does not stretch to f32 of {:?}", self.shape));
            }
        }
        Ok(vec![Type::f32(self.shape.clone()); self.program.outputs.len()])
    }
    fn flops(&self, _: &[Type], outputs: &[Type]) -> u64 {
        self.steps.len() as u64 * outputs[0].elements() as u64
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        let whole = |input: &&Dense| Dense::from_fn(self.shape.clone(), |at| input.get(at));
        let mut registers: Vec<Dense> = inputs.iter().map(whole).collect();
        let ty = Type::f32(self.shape.clone());
        for (op, operands) in &self.steps {
            let operands: Vec<&Dense> = operands.iter().map(|register| &registers[*register]).collect();
            let made = op.reference(&operands, std::slice::from_ref(&ty)).swap_remove(0);
            registers.push(made);
        }
        self.program.outputs.iter().map(|register| registers[*register].clone()).collect()
    }
}

impl Cpu for Fused {
    fn run(&self, cx: &mut CpuCx<'_>) {
        tiles::run(&self.program, cx);
    }
    fn scratch_bytes(&self, _: &[Type], _: &[Type], threads: usize) -> usize {
        tiles::scratch_bytes(&self.program, threads)
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        let outputs = 0..self.program.outputs.len();
        outputs.flat_map(|output| (0..self.program.inputs).map(move |input| (input, output))).collect()
    }
}

impl Cuda for Fused {
    /// One kernel. A function of each step stands in it once, and every register is a variable.
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let mut map = Map::default();
        let register = |at: usize| if at < self.program.inputs { format!("x{at}") } else { format!("r{at}") };
        let mut known: Vec<String> = Vec::new();
        for (step, (op, operands)) in self.steps.iter().enumerate() {
            let formula = op.formula().expect("an elementwise op has a formula");
            let dtypes = vec![DType::F32; operands.len()];
            let number = known.iter().position(|name| name == op.name()).unwrap_or_else(|| {
                let name = format!("step{}", known.len());
                map.functions.push_str(&formula.to_c(INLINE, &name, &dtypes));
                known.push(op.name().into());
                known.len() - 1
            });
            let operands: Vec<String> = operands.iter().map(|at| register(*at)).collect();
            let (function, result) = (format!("step{number}"), register(self.program.inputs + step));
            map.call(&formula, &function, &result, &operands, &op.formula_numbers(&[]), "float");
        }
        for (at, output) in self.program.outputs.iter().enumerate() {
            map.body.push_str(&format!("const float y{at} = {};\n", register(*output)));
        }
        map.calls(cx)
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        Cpu::in_place(self)
    }
}

impl Cases for Fused {
    fn cases() -> Vec<Case> {
        use crate::elementwise::{Add, GeluTanh, Mul, Scale};
        let steps = || -> Vec<(Arc<dyn Op>, Vec<usize>)> {
            vec![
                (Arc::new(Add {}), vec![0, 1]),
                (Arc::new(GeluTanh {}), vec![2]),
                (Arc::new(Scale { factor: 0.5 }), vec![3]),
                (Arc::new(Mul {}), vec![4, 0]),
            ]
        };
        let case = |shape: &[usize], other: &[usize], outputs: &[usize]| {
            let op = Fused::new(2, steps(), outputs.into(), shape.into());
            Case::new(op, [Arg::real(shape).constant(), Arg::real(other).constant()])
        };
        vec![
            case(&[3, 5], &[5], &[5]),
            case(&[3, 5], &[3, 1], &[2, 5]),
            case(&[2, 3, 4], &[2, 1, 4], &[5]),
            case(&[40, 700], &[700], &[3, 5]),
            case(&[7], &[], &[5]),
        ]
    }
}

pub const KINDS: &[OpKind] = &[OpKind::of::<Fused>().with_cuda::<Fused>()];

/// A run of nodes that will become one.
#[derive(Debug)]
struct Group {
    members: Vec<NodeId>,
    inputs: Vec<ValueId>,
    phase: Phase,
    shape: Shape,
}

/// Joins chains of elementwise ops.
pub fn fuse_elementwise(graph: &Graph) -> Graph {
    let group_of = vec![None; graph.nodes.len()];
    let mut groups = Groups { graph, readers: graph.readers(), list: Vec::new(), group_of };
    let phases = graph.phases();
    graph.ids().filter(|id| fusible(graph, *id)).for_each(|id| groups.add(id, phases[id.0 as usize]));
    groups.rebuild()
}

fn fusible(graph: &Graph, id: NodeId) -> bool {
    let node = graph.node(id);
    let floats = node.inputs.iter().chain(&node.outputs).all(|value| graph.ty(*value).dtype == DType::F32);
    floats && node.inputs.len() <= OPERANDS_MAX && tile_kernel(&*node.op).is_some()
}

/// The groups so far.
struct Groups<'g> {
    graph: &'g Graph,
    readers: Vec<Vec<NodeId>>,
    list: Vec<Group>,
    /// By node.
    group_of: Vec<Option<usize>>,
}

impl Groups<'_> {
    /// Puts a node into a producer's group if it may join one, else into one of its own.
    fn add(&mut self, id: NodeId, phase: Phase) {
        let joined = self.candidates(id).into_iter().find(|at| self.may_join(*at, id, phase));
        let at = joined.unwrap_or_else(|| {
            let shape = self.graph.ty(self.graph.node(id).outputs[0]).shape.clone();
            self.list.push(Group { members: Vec::new(), inputs: Vec::new(), phase, shape });
            self.list.len() - 1
        });
        self.group_of[id.0 as usize] = Some(at);
        self.list[at].members.push(id);
        let outside = self.external_inputs(id, at);
        self.list[at].inputs.extend(outside);
    }

    /// Groups of the producers, latest first.
    fn candidates(&self, id: NodeId) -> Vec<usize> {
        let maker = |value: &ValueId| self.graph.value(*value).node;
        let mut makers: Vec<NodeId> = self.graph.node(id).inputs.iter().map(maker).collect();
        makers.sort_unstable_by(|a, b| b.cmp(a));
        let mut groups: Vec<usize> = Vec::new();
        for at in makers.iter().filter_map(|maker| self.group_of[maker.0 as usize]) {
            if !groups.contains(&at) {
                groups.push(at);
            }
        }
        groups
    }

    /// What a node reads that the group neither makes nor reads yet.
    fn external_inputs(&self, id: NodeId, group: usize) -> Vec<ValueId> {
        let (graph, known) = (self.graph, &self.list[group].inputs);
        let mut fresh = Vec::new();
        for value in &graph.node(id).inputs {
            let inside = self.group_of[graph.value(*value).node.0 as usize] == Some(group);
            if !inside && !known.contains(value) && !fresh.contains(value) {
                fresh.push(*value);
            }
        }
        fresh
    }

    fn may_join(&self, at: usize, id: NodeId, phase: Phase) -> bool {
        let (graph, group) = (self.graph, &self.list[at]);
        let shape = &graph.ty(graph.node(id).outputs[0]).shape;
        let extra = self.external_inputs(id, at).len();
        let registers = group.inputs.len() + extra + group.members.len() + 1;
        let nobody_waits = group.members.iter().all(|member| {
            let value = graph.node(*member).outputs[0];
            // Those before this node; all of them are members, of whom there are few, or the first that is none ends the search.
            let mut earlier = self.readers[value.0 as usize].iter().take_while(|reader| **reader < id);
            earlier.all(|reader| self.group_of[reader.0 as usize] == Some(at))
        });
        let same = group.members.iter().all(|member| graph.node(*member).segment == graph.node(id).segment);
        same && group.phase == phase && group.shape == *shape && registers <= REGISTERS_MAX && nobody_waits
    }

    /// The graph with each group of several nodes as one, where its last member stood.
    fn rebuild(&self) -> Graph {
        let graph = self.graph;
        let mut rebuild = Rebuild::new(graph);
        let is_kept = graph.kept_mask();
        for id in graph.ids() {
            let node = graph.node(id);
            let Some(at) = self.group_of[id.0 as usize].filter(|at| self.list[*at].members.len() > 1) else {
                rebuild.copy(node);
                continue;
            };
            let group = &self.list[at];
            if group.members.last() != Some(&id) {
                continue;
            }
            let leaves = |value: &ValueId| {
                let mut readers = self.readers[value.0 as usize].iter();
                is_kept[value.0 as usize] || readers.any(|reader| self.group_of[reader.0 as usize] != Some(at))
            };
            let members = group.members.iter().map(|member| graph.node(*member).outputs[0]);
            let outputs: Vec<ValueId> = members.filter(leaves).collect();
            let op = group.fused(graph, &outputs);
            let inputs = group.inputs.iter().map(|value| rebuild.get(*value)).collect();
            let types = vec![Type::f32(group.shape.clone()); outputs.len()];
            let fused = rebuild.new.push_typed(Arc::new(op), inputs, types, node.scope.clone(), node.stage);
            rebuild.new.set_segment(fused, node.segment);
            for (slot, old) in outputs.iter().enumerate() {
                let new = rebuild.new.node(fused).outputs[slot];
                rebuild.set(*old, new);
            }
        }
        rebuild.finish()
    }
}

impl Group {
    /// The op that all members become, with these of their values as its outputs.
    fn fused(&self, graph: &Graph, outputs: &[ValueId]) -> Fused {
        let register = |value: &ValueId| -> usize {
            let member = |member: &NodeId| graph.node(*member).outputs[0] == *value;
            match self.members.iter().position(member) {
                Some(step) => self.inputs.len() + step,
                None => self.inputs.iter().position(|input| input == value).expect("every operand is known"),
            }
        };
        let step = |member: &NodeId| {
            let node = graph.node(*member);
            (Arc::clone(&node.op), node.inputs.iter().map(register).collect::<Vec<_>>())
        };
        let (steps, registers) = (self.members.iter().map(step).collect(), outputs.iter().map(register).collect());
        Fused::new(self.inputs.len(), steps, registers, self.shape.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prelude::*;

    #[test]
    fn a_chain_becomes_one_op_and_shared_values_leave_it() {
        let builder = Builder::new();
        let x = builder.input("x", Type::f32([4, 3]));
        let bias = builder.input("bias", Type::f32([3]));
        let y = x.add(bias).relu();
        builder.output("y", y.scale(2.0));
        builder.output("z", y.sum_all());
        let graph = builder.finish().unwrap();
        let fused = fuse_elementwise(&graph);
        kolo_graph::verify::verify(&fused).unwrap();
        let ops: Vec<&str> = fused.nodes.iter().map(|node| node.op.name()).collect();
        assert_eq!(ops, ["input", "input", "fused", "sum"]);
        assert_eq!(fused.nodes[2].outputs.len(), 2);
    }

    #[test]
    fn a_reader_in_between_keeps_ops_apart() {
        let builder = Builder::new();
        let x = builder.input("x", Type::f32([4, 4]));
        let y = x.relu();
        let product = y.matmul(x);
        builder.output("z", y.add(product));
        let graph = builder.finish().unwrap();
        let fused = fuse_elementwise(&graph);
        kolo_graph::verify::verify(&fused).unwrap();
        assert!(fused.nodes.iter().all(|node| node.op.name() != "fused"));
    }
}
