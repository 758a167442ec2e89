//! Fusion: chains of elementwise ops become one op that passes over memory once.
//!
//! A group collects elementwise nodes of one shape and phase. A node may join its producer's group only if nobody outside
//! the group reads any of the group's values before that node: then the whole group can run where its last member stood.
//! Fusing changes no bit, since every element goes through the same operations in the same order.
//!
//! Halves cost no pass of their own: a group reads what a cast would widen where it lies, and a cast that rounds what the
//! group makes is how that output is stored.

use crate::cast::Cast;
use crate::cuda_map::{self, INLINE, Map};
use crate::halves::is_half;
use crate::reduce::Expand;
use crate::tiles::{self, Program, REGISTERS_MAX, Step};
use kolo_graph::attr::{Attr, AttrReader, AttrValue, Attrs};
use kolo_graph::cpu::TileKernel;
use kolo_graph::op::{Declared, Describe, OpKind};
use kolo_graph::rewrite::Rebuild;
use kolo_graph::split::{self, Split};
use kolo_graph::{
    Arg, Case, Cases, ChannelsLast, Cpu, CpuCx, Cuda, CudaCalls, CudaCx, DType, Dense, Graph, NodeId, Op, Operand,
    Operands, Phase, Shape, Type, ValueId, checked_types,
};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Operands of one step; the tile interpreter keeps them in an array.
const OPERANDS_MAX: usize = 4;

/// A chain of elementwise ops in f32. Registers `0..inputs` are the inputs, each step fills the next one.
#[derive(Clone, Debug)]
pub struct Fused {
    steps: Vec<(Arc<dyn Op>, Vec<usize>)>,
    shape: Vec<usize>,
    program: Program,
    /// How each output is stored.
    dtypes: Vec<DType>,
}

/// How one tile of an elementwise op is computed.
fn tile_kernel(op: &dyn Op) -> Option<TileKernel> {
    crate::cpu_of(op)?.tile_kernel()
}

impl Fused {
    fn new(inputs: usize, steps: Vec<(Arc<dyn Op>, Vec<usize>)>, outputs: Vec<usize>, shape: Vec<usize>) -> Self {
        let dtypes = vec![DType::F32; outputs.len()];
        let compiled = steps
            .iter()
            .map(|(op, operands)| Step {
                kernel: tile_kernel(&**op).expect("only ops with a tile kernel are fused"),
                inputs: operands.clone(),
            })
            .collect();
        Self { steps, shape, program: Program { inputs, steps: compiled, outputs }, dtypes }
    }

    /// The same with outputs of these types.
    fn storing(self, dtypes: Vec<DType>) -> Self {
        Self { dtypes, ..self }
    }

    /// The ops with the registers that each reads; each fills the register after those there are.
    pub fn steps(&self) -> &[(Arc<dyn Op>, Vec<usize>)] {
        &self.steps
    }

    /// The registers that are stored.
    pub fn outputs(&self) -> &[usize] {
        &self.program.outputs
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
        let mut attrs = vec![
            ("inputs", self.program.inputs.to_attr()),
            ("steps", Attr::Text(steps.join("; "))),
            ("outputs", self.program.outputs.to_attr()),
            ("shape", self.shape.to_attr()),
        ];
        if self.dtypes.iter().any(|dtype| *dtype != DType::F32) {
            let names: Vec<&str> = self.dtypes.iter().map(|dtype| dtype.name()).collect();
            attrs.push(("types", Attr::Text(names.join(","))));
        }
        attrs
    }
}

impl Declared for Fused {
    const NAME: &'static str = "fused";
    const DOC: &'static str = "A chain of elementwise ops in one pass over memory. Registers `0..inputs` are the inputs, each step fills \
                               the next one, `outputs` names those that are kept, `types` how they are stored (f32 if it is not there). \
                               Registers are f32: halves are widened as they are read, and rounded as they are written.";
    const ATTRIBUTES: &'static [(&'static str, &'static str)] = &[
        ("inputs", "usize"),
        ("steps", "String"),
        ("outputs", "Vec<usize>"),
        ("shape", "Vec<usize>"),
        ("types", "String"),
    ];
    fn read(attrs: &AttrReader<'_>) -> Result<Self, String> {
        attrs.expect_only(&["inputs", "steps", "outputs", "shape", "types"])?;
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
        let dtypes = read_types(&attrs.get_or("types", String::new())?, outputs.len())?;
        Ok(Self::new(inputs, steps, outputs, attrs.get("shape")?).storing(dtypes))
    }
}

/// The types of as many outputs, f32 where none is named.
fn read_types(text: &str, outputs: usize) -> Result<Vec<DType>, String> {
    if text.is_empty() {
        return Ok(vec![DType::F32; outputs]);
    }
    let read = |name: &str| {
        let float = DType::parse(name).filter(|dtype| dtype.is_float());
        float.ok_or_else(|| format!("`{name}` is not a float type"))
    };
    let dtypes: Vec<DType> = text.split(',').map(read).collect::<Result<_, _>>()?;
    match dtypes.len() == outputs {
        true => Ok(dtypes),
        false => Err(format!("names {} types of {outputs} outputs", dtypes.len())),
    }
}

impl Op for Fused {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::float("x").many()], &["y"])
    }
    fn splits(&self, inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
        split::elementwise(inputs, outputs)
    }
    fn part(&self, split: &Split, units: usize) -> Option<Arc<dyn Op>> {
        let shape = split.part_shape(split.outputs[0], &self.shape, units).to_vec();
        let steps = self.steps.iter().map(|(op, registers)| (split.part(op, 0, units), registers.clone())).collect();
        let part = Self::new(self.program.inputs, steps, self.program.outputs.clone(), shape);
        Some(Arc::new(part.storing(self.dtypes.clone())))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        if inputs.len() != self.program.inputs {
            return Err(format!("takes {} inputs, but got {}", self.program.inputs, inputs.len()));
        }
        for input in inputs {
            let stretched = kolo_graph::types::broadcast(&input.shape, &self.shape);
            if stretched.as_ref() != Some(&self.shape) {
                return Err(format!("{input} does not stretch to {:?}", self.shape));
            }
        }
        Ok(self.dtypes.iter().map(|dtype| Type::new(*dtype, self.shape.clone())).collect())
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
    fn takes_halves(&self) -> bool {
        true
    }
}

impl Cuda for Fused {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        self.map().calls(cx)
    }
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        cuda_map::channels_last(cx)
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        Cpu::in_place(self)
    }
}

impl Fused {
    /// One kernel. A function of each step stands in it once, and every register is a variable.
    pub(crate) fn map(&self) -> Map {
        let mut map = Map::default();
        let register = |at: usize| if at < self.program.inputs { format!("x{at}") } else { format!("r{at}") };
        let mut known: Vec<String> = Vec::new();
        for (step, (op, operands)) in self.steps.iter().enumerate() {
            if let Some(Cast { to }) = op.downcast::<Cast>() {
                let (result, operand) = (register(self.program.inputs + step), register(operands[0]));
                let ty = kolo_graph::cuda::cuda_type(*to);
                map.body.push_str(&format!("const float {result} = to_float(from_float<{ty}>({operand}));\n"));
                continue;
            }
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
        map
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
    let mut groups = Groups::new(graph);
    let phases = graph.phases();
    graph.ids().filter(|id| is_member(graph, *id)).for_each(|id| groups.add(id, phases[id.0 as usize]));
    groups.rebuild()
}

/// Whether a node computes element by element in f32. A cast between floats does.
fn fusible(graph: &Graph, id: NodeId) -> bool {
    let node = graph.node(id);
    let mut types = node.inputs.iter().chain(&node.outputs).map(|value| graph.ty(*value).dtype);
    let floats = match node.op.is::<Cast>() {
        true => types.all(DType::is_float),
        false => types.all(|dtype| dtype == DType::F32),
    };
    floats && node.inputs.len() <= OPERANDS_MAX && tile_kernel(&*node.op).is_some()
}

/// Whether a node belongs to a group, and reads halves as they are.
fn is_member(graph: &Graph, id: NodeId) -> bool {
    fusible(graph, id) && widened(graph, id).is_none()
}

/// What a cast widens, if that is all the node does: whoever is fused reads the half itself.
fn widened(graph: &Graph, id: NodeId) -> Option<ValueId> {
    let node = graph.node(id);
    let half = node.op.is::<Cast>().then(|| node.inputs[0])?;
    (is_half(graph.ty(half).dtype) && graph.ty(node.outputs[0]).dtype == DType::F32).then_some(half)
}

/// The groups so far.
struct Groups<'g> {
    graph: &'g Graph,
    /// Who reads each value; instead of an absorbed cast, whoever reads what it widens.
    readers: Vec<Vec<NodeId>>,
    /// Casts that widen a half for members alone, by node.
    absorbed: Vec<bool>,
    list: Vec<Group>,
    /// By node.
    group_of: Vec<Option<usize>>,
}

impl<'g> Groups<'g> {
    fn new(graph: &'g Graph) -> Self {
        let (is_kept, direct) = (graph.kept_mask(), graph.readers());
        let absorbed = |id: NodeId| {
            let value = graph.node(id).outputs[0].0 as usize;
            let for_members = || direct[value].iter().all(|reader| is_member(graph, *reader));
            widened(graph, id).is_some() && !is_kept[value] && for_members()
        };
        let absorbed: Vec<bool> = graph.ids().map(absorbed).collect();
        let group_of = vec![None; graph.nodes.len()];
        let readers = vec![Vec::new(); graph.values.len()];
        let mut groups = Self { graph, readers, absorbed, list: Vec::new(), group_of };
        for id in graph.ids().filter(|id| !groups.absorbed[id.0 as usize]).collect::<Vec<_>>() {
            for value in groups.operands(id) {
                let list = &mut groups.readers[value.0 as usize];
                if list.last() != Some(&id) {
                    list.push(id);
                }
            }
        }
        groups
    }

    /// What a node reads; if it can be fused, halves instead of what they were widened to.
    fn operands(&self, id: NodeId) -> Vec<ValueId> {
        let node = self.graph.node(id);
        if !is_member(self.graph, id) {
            return node.inputs.clone();
        }
        let source = |value: &ValueId| widened(self.graph, self.graph.value(*value).node).unwrap_or(*value);
        node.inputs.iter().map(source).collect()
    }

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
        let mut makers: Vec<NodeId> = self.operands(id).iter().map(maker).collect();
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
        for value in self.operands(id) {
            let inside = self.group_of[graph.value(value).node.0 as usize] == Some(group);
            if !inside && !known.contains(&value) && !fresh.contains(&value) {
                fresh.push(value);
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

    /// Whether a node runs as it is: it is in no group, or alone in one without anything to widen.
    fn stays(&self, id: NodeId) -> bool {
        match self.group_of[id.0 as usize].map(|at| &self.list[at].members[..]) {
            Some([alone]) => self.graph.node(*alone).inputs == self.operands(*alone),
            Some(_) => false,
            None => true,
        }
    }

    /// The graph with each group as one node, where its last member stood.
    fn rebuild(&self) -> Graph {
        let graph = self.graph;
        let mut rebuild = Rebuild::new(graph);
        let is_kept = graph.kept_mask();
        for id in graph.ids().filter(|id| !self.absorbed[id.0 as usize]) {
            let node = graph.node(id);
            let Some(at) = self.group_of[id.0 as usize].filter(|_| !self.stays(id)) else {
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
            let op = self.fused(group, &outputs);
            let inputs = group.inputs.iter().map(|value| rebuild.get(*value)).collect();
            let types = graph.types(&outputs);
            let fused = rebuild.new.push_typed(Arc::new(op), inputs, types, node.scope.clone(), node.stage);
            rebuild.new.set_segment(fused, node.segment);
            for (slot, old) in outputs.iter().enumerate() {
                let new = rebuild.new.node(fused).outputs[slot];
                rebuild.set(*old, new);
            }
        }
        rebuild.finish()
    }

    /// The op that all members become, with these of their values as its outputs.
    fn fused(&self, group: &Group, outputs: &[ValueId]) -> Fused {
        let graph = self.graph;
        let inside: HashSet<ValueId> = group.members.iter().flat_map(|member| self.operands(*member)).collect();
        let mut registers: HashMap<ValueId, usize> =
            group.inputs.iter().enumerate().map(|(at, value)| (*value, at)).collect();
        let mut steps: Vec<(Arc<dyn Op>, Vec<usize>)> = Vec::new();
        for member in &group.members {
            let node = graph.node(*member);
            let operands: Vec<usize> = self.operands(*member).iter().map(|value| registers[value]).collect();
            let output = node.outputs[0];
            // What is rounded and only leaves is rounded as it is stored.
            let register = match node.op.is::<Cast>() && !inside.contains(&output) {
                true => operands[0],
                false => {
                    steps.push((Arc::clone(&node.op), operands));
                    group.inputs.len() + steps.len() - 1
                }
            };
            registers.insert(output, register);
        }
        let stored = outputs.iter().map(|value| registers[value]).collect();
        let dtypes = outputs.iter().map(|value| graph.ty(*value).dtype).collect();
        Fused::new(group.inputs.len(), steps, stored, group.shape.to_vec()).storing(dtypes)
    }
}
