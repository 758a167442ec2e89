//! The reference as an executor: a session whose every value is an array of f64 and whose every call is an op's definition.
//! Slow, obvious, and driven through the same schedule as any other device.

use crate::executor::{CompileError, Device, Executor, SessionBytes};
use crate::memory::Memory;
use crate::options::Options;
use crate::program::Program;
use crate::schedule::{Act, Schedule};
use crate::store::Store;
use half::{bf16, f16};
use kolo_graph::cpu::Buffer;
use kolo_graph::layout::{self, Layout, NoAbilities};
use kolo_graph::sources::{GrainSum, Input, Param, State};
use kolo_graph::{DType, Dense, Graph, NodeId, Phase, Type, ValueId};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

/// Runs graphs in f64, op by op, by their definitions. State between steps is f64 as well; the store gets it rounded.
#[derive(Clone, Copy, Debug)]
pub struct Reference;

impl Executor for Reference {
    fn name(&self) -> &'static str {
        "reference"
    }

    fn options(&self, asked: Options) -> Options {
        Options { threads: 1, lanes: 1, ..asked }
    }

    fn layout(&self, graph: &Graph, options: Options) -> Layout {
        layout::plan(graph, options.grains, options.lanes, &NoAbilities)
    }

    fn bytes(&self, graph: &Graph, _: &Layout, _: Options) -> SessionBytes {
        let values: usize = graph.values.iter().map(|value| value.ty.elements() * size_of::<f64>()).sum();
        SessionBytes { activations: values, ..SessionBytes::default() }
    }

    fn has_collectives(&self) -> bool {
        false
    }

    fn compile(
        &self,
        program: &Program,
        schedule: &Arc<Schedule>,
        store: &Store,
        _: Option<Memory>,
    ) -> Result<Box<dyn Device>, CompileError> {
        Ok(Box::new(ReferenceDevice::new(program, schedule, store)?))
    }
}

#[derive(Debug)]
struct ReferenceDevice {
    graph: Arc<Graph>,
    schedule: Arc<Schedule>,
    phases: Vec<Phase>,
    step_inputs: Vec<(String, Buffer)>,
    grain_inputs: Vec<(String, Buffer)>,
    /// Where named results are left, in their own types.
    outputs: BTreeMap<ValueId, Buffer>,
    /// Where parameters and states are in the store.
    stored: Vec<(ValueId, Buffer)>,
    arrays: Mutex<Arrays>,
    _memories: Vec<Memory>,
    _store: [Arc<Memory>; 2],
}

#[derive(Debug)]
struct Arrays {
    /// What was computed in this step, or in this grain.
    values: Vec<Option<Dense>>,
    /// Parameters and states as the last step left them.
    states: BTreeMap<ValueId, Dense>,
}

impl ReferenceDevice {
    fn new(program: &Program, schedule: &Arc<Schedule>, store: &Store) -> Result<Self, CompileError> {
        let graph = Arc::clone(&program.graph);
        let mut memories: Vec<Memory> = Vec::new();
        let mut place = |ty: &Type| -> std::io::Result<Buffer> {
            let memory = Memory::try_new(ty.bytes())?;
            let buffer = Buffer { data: memory.at(0), ty: ty.clone() };
            memories.push(memory);
            Ok(buffer)
        };
        let (mut step_inputs, mut grain_inputs, mut outputs) = (Vec::new(), Vec::new(), BTreeMap::new());
        for (id, input) in graph.inputs() {
            let inputs = if input.per_step { &mut step_inputs } else { &mut grain_inputs };
            inputs.push((input.name.clone(), place(graph.ty(id))?));
        }
        for (_, id) in &graph.outputs {
            outputs.insert(*id, place(graph.ty(*id))?);
        }
        for inputs in [&mut step_inputs, &mut grain_inputs] {
            inputs.sort_by(|one: &(String, Buffer), other| one.0.cmp(&other.0));
        }
        let names = graph.params().map(|(id, op)| (id, &op.name)).chain(graph.states().map(|(id, op)| (id, &op.name)));
        let mut stored = Vec::new();
        for (id, name) in names {
            let entry = store.entry(name).ok_or_else(|| format!("the store has no `{name}`"))?;
            stored.push((id, Buffer { data: store.address(entry), ty: entry.ty.clone() }));
        }
        let arrays = Arrays { values: vec![None; graph.values.len()], states: BTreeMap::new() };
        Ok(Self {
            phases: graph.phases(),
            graph,
            schedule: Arc::clone(schedule),
            step_inputs,
            grain_inputs,
            outputs,
            stored,
            arrays: Mutex::new(arrays),
            _memories: memories,
            _store: store.memories().map(Arc::clone),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Arrays> {
        kolo_base::lock(&self.arrays)
    }

    fn input(&self, input: &Input) -> Dense {
        let inputs = if input.per_step { &self.step_inputs } else { &self.grain_inputs };
        let (_, buffer) = inputs.iter().find(|(name, _)| *name == input.name).expect("every input has a place");
        read(buffer)
    }

    /// A value: known, or found from what its node reads. A sum that nobody had to add up is its term.
    fn value(&self, arrays: &mut Arrays, id: ValueId) -> Dense {
        if let Some(value) = &arrays.values[id.0 as usize] {
            return value.clone();
        }
        let node = graph_node(&self.graph, id);
        if self.graph.node(node).op.is::<GrainSum>() {
            return self.value(arrays, self.graph.node(node).inputs[0]);
        }
        self.evaluate(arrays, node);
        arrays.values[id.0 as usize].clone().expect("a node makes its outputs")
    }

    /// Runs a node by its definition.
    fn evaluate(&self, arrays: &mut Arrays, id: NodeId) {
        let node = self.graph.node(id);
        let made = if let Some(input) = node.op.downcast::<Input>() {
            vec![self.input(input)]
        } else if node.op.is::<Param>() || node.op.is::<State>() {
            vec![arrays.states[&node.outputs[0]].clone()]
        } else {
            let inputs: Vec<Dense> = node.inputs.iter().map(|id| self.value(arrays, *id)).collect();
            let types = self.graph.types(&node.outputs);
            let mut made = node.op.reference(&inputs.iter().collect::<Vec<_>>(), &types);
            for (value, ty) in made.iter_mut().zip(&types) {
                value.data.iter_mut().for_each(|x| *x = ty.dtype.round(*x));
            }
            made
        };
        for (output, value) in node.outputs.iter().zip(made) {
            arrays.values[output.0 as usize] = Some(value);
        }
    }

    /// Forgets what belongs to these phases.
    fn forget(&self, arrays: &mut Arrays, gone: impl Fn(Phase) -> bool) {
        for (value, known) in self.graph.values.iter().zip(&mut arrays.values) {
            let sum = self.graph.node(value.node).op.is::<GrainSum>();
            if gone(self.phases[value.node.0 as usize]) && !sum {
                *known = None;
            }
        }
    }

    fn show_outputs(&self, arrays: &mut Arrays) {
        for (id, buffer) in &self.outputs {
            write(&self.value(arrays, *id), buffer);
        }
    }
}

fn graph_node(graph: &Graph, id: ValueId) -> NodeId {
    graph.value(id).node
}

impl Device for ReferenceDevice {
    fn inputs(&self, lane: Option<usize>) -> &[(String, Buffer)] {
        if lane.is_some() { &self.grain_inputs } else { &self.step_inputs }
    }

    fn buffer(&self, id: ValueId, _: usize) -> Buffer {
        self.outputs.get(&id).cloned().expect("only named results leave the arrays")
    }

    /// Whoever changed the store since the last step is believed.
    fn begin(&self) {
        let mut arrays = self.lock();
        arrays.values.iter_mut().for_each(|value| *value = None);
        for (id, buffer) in &self.stored {
            let there = read(buffer);
            let kept = arrays.states.get(id).is_some_and(|state| {
                let rounded = state.data.iter().map(|x| rounded(*x, buffer.ty.dtype));
                rounded.zip(&there.data).all(|(kept, there)| kept.to_bits() == there.to_bits())
            });
            if !kept {
                arrays.states.insert(*id, there);
            }
        }
    }

    fn run_lanes(&self, body: &(dyn Fn(usize) + Sync)) {
        body(0);
    }

    fn run(&self, phase: Phase, item: usize, _: usize, grain: usize) {
        let mut arrays = self.lock();
        let arrays = &mut *arrays;
        if phase == Phase::Grain && item == 0 {
            self.forget(arrays, |phase| phase != Phase::Before);
        }
        let item = &self.schedule.items(phase)[item];
        let node = self.graph.node(item.node);
        if !matches!(item.act, Act::Sum { .. }) {
            return self.evaluate(arrays, item.node);
        }
        let mut sum = self.value(arrays, node.inputs[0]);
        if let Some(before) = arrays.values[node.outputs[0].0 as usize].take().filter(|_| grain > 0) {
            sum.data.iter_mut().zip(&before.data).for_each(|(sum, before)| *sum += before);
        }
        arrays.values[node.outputs[0].0 as usize] = Some(sum);
    }

    fn join(&self, _: Range<usize>, _: usize) {}

    fn join_all(&self) {
        self.show_outputs(&mut self.lock());
    }

    fn end(&self) {
        let mut arrays = self.lock();
        let arrays = &mut *arrays;
        self.show_outputs(arrays);
        let updates = self.graph.updates.iter();
        let new: Vec<(ValueId, Dense)> = updates.map(|(state, value)| (*state, self.value(arrays, *value))).collect();
        arrays.states.extend(new);
        for (id, buffer) in &self.stored {
            write(&arrays.states[id], buffer);
        }
    }

    fn is_finite(&self, phase: Phase, item: usize) -> bool {
        let item = &self.schedule.items(phase)[item];
        let mut arrays = self.lock();
        let outputs = &self.graph.node(item.maker.unwrap_or(item.node)).outputs;
        outputs.iter().all(|id| self.value(&mut arrays, *id).data.iter().all(|x| x.is_finite()))
    }

    fn sums_mut(&mut self) -> &mut [f32] {
        &mut []
    }
}

/// A number as an element of this type holds it.
fn rounded(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        _ => dtype.round(x),
    }
}

fn read(buffer: &Buffer) -> Dense {
    let (data, count) = (buffer.data, buffer.ty.elements());
    unsafe fn all<T: Copy>(data: *mut u8, count: usize, number: impl Fn(T) -> f64) -> Vec<f64> {
        // SAFETY: the place holds that many elements of its type, and nobody writes it meanwhile.
        (0..count).map(|at| number(unsafe { *data.cast::<T>().add(at) })).collect()
    }
    // SAFETY: as it says there.
    let numbers = unsafe {
        match buffer.ty.dtype {
            DType::F32 => all::<f32>(data, count, f64::from),
            DType::BF16 => all::<bf16>(data, count, f64::from),
            DType::F16 => all::<f16>(data, count, f64::from),
            DType::I32 => all::<i32>(data, count, f64::from),
            DType::I64 => all::<i64>(data, count, |x| x as f64),
            DType::Bool | DType::U8 => all::<u8>(data, count, f64::from),
        }
    };
    Dense::new(buffer.ty.shape.clone(), numbers)
}

fn write(value: &Dense, buffer: &Buffer) {
    for (at, x) in value.data.iter().copied().enumerate() {
        // SAFETY: the place holds as many elements of its type as the array.
        unsafe {
            match buffer.ty.dtype {
                DType::F32 => *buffer.data.cast::<f32>().add(at) = x as f32,
                DType::BF16 => *buffer.data.cast::<bf16>().add(at) = bf16::from_f64(x),
                DType::F16 => *buffer.data.cast::<f16>().add(at) = f16::from_f64(x),
                DType::I32 => *buffer.data.cast::<i32>().add(at) = x as i32,
                DType::I64 => *buffer.data.cast::<i64>().add(at) = x as i64,
                DType::Bool => *buffer.data.add(at) = u8::from(x != 0.0),
                DType::U8 => *buffer.data.add(at) = x as u8,
            }
        }
    }
}
