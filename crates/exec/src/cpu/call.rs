//! Kernel calls with their operands resolved.

use super::bases::Bases;
use crate::executor::CompileError;
use crate::memory::{Memory, touch};
use crate::program::Program;
use crate::schedule::{Act, Item};
use kolo_graph::cpu::{Buffer, CpuCx};
use kolo_graph::layout::align;
use kolo_graph::op::CpuSide;
use kolo_graph::{Cpu, DType, Graph, Node, NodeId, Op, Taker, Team, Tile, Type, ValueId};
use kolo_ops::{cpu_of, cpu_side};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// One kernel call with its operands resolved.
#[derive(Debug)]
pub(super) struct Call {
    pub node: NodeId,
    pub op: Arc<dyn Op>,
    /// What leads from the op to its kernel; `None` for what lanes and exchanges do.
    side: Option<CpuSide>,
    pub inputs: Vec<Buffer>,
    pub outputs: Vec<Buffer>,
    /// An input that the kernel adds up itself, from each lane's sum over grains.
    pub terms: Vec<Buffer>,
    /// The call that makes an input, which this one takes as it is made.
    pub maker: Option<Box<Call>>,
    pub kind: CallKind,
}

impl Call {
    fn cpu(&self) -> &dyn Cpu {
        self.side.and_then(|side| side(&*self.op)).expect("`check_kernel` found one")
    }
}

/// An op that the CPU cannot run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the CPU has no kernel for `{op}`{layer}; implement `Cpu` for the op and register its kind")]
pub struct MissingKernel {
    pub op: String,
    /// Where the op stands, as the message has it; empty if no layer made it.
    pub layer: String,
}

/// Whether a node has a kernel.
fn check_kernel(node: &Node) -> Result<(), MissingKernel> {
    if cpu_of(&*node.op).is_some() {
        return Ok(());
    }
    let layer = if node.scope.is_empty() { String::new() } else { format!(" in layer `{}`", node.scope) };
    Err(MissingKernel { op: node.op.signature(), layer })
}

#[derive(Debug)]
pub(super) enum CallKind {
    Kernel,
    /// Operands in half precision pass through f32 copies.
    Converted {
        inputs: Vec<Buffer>,
        outputs: Vec<Buffer>,
    },
    /// Add to the sum over grains at this element offset.
    Accumulate {
        offset: usize,
        elements: usize,
    },
}

/// Half-precision operands that the op does not handle itself.
fn needs_conversion(op: &dyn Op, types: &[Type]) -> bool {
    let halves = types.iter().any(|ty| matches!(ty.dtype, DType::BF16 | DType::F16));
    halves && !cpu_of(op).is_some_and(|op| op.takes_halves())
}

/// Bytes of scratch the kernel wants.
fn own_scratch(op: &dyn Op, inputs: &[Type], outputs: &[Type], threads: usize) -> usize {
    align(cpu_of(op).map_or(0, |op| op.scratch_bytes(inputs, outputs, threads)))
}

/// Bytes of f32 copies a converted call needs.
fn conversion_bytes(op: &dyn Op, types: &[Type]) -> usize {
    if !needs_conversion(op, types) {
        return 0;
    }
    types.iter().filter(|ty| ty.dtype.is_float()).map(|ty| align(ty.elements() * 4)).sum()
}

/// Scratch that any of these nodes wants, with its conversions.
pub(super) fn scratch_bytes(graph: &Graph, nodes: &[NodeId], threads: usize) -> usize {
    let need = |id: &NodeId| {
        let node = graph.node(*id);
        let (inputs, outputs) = (graph.types(&node.inputs), graph.types(&node.outputs));
        let all: Vec<Type> = inputs.iter().chain(&outputs).cloned().collect();
        own_scratch(&*node.op, &inputs, &outputs, threads) + conversion_bytes(&*node.op, &all)
    };
    nodes.iter().map(need).max().unwrap_or(0)
}

/// The call of each item; of an exchange none.
pub(super) fn compile(
    program: &Program,
    items: &[Item],
    bases: &Bases<'_>,
    scratch: &Memory,
    threads: usize,
) -> Result<Vec<Option<Call>>, CompileError> {
    let Program { graph, layout, .. } = program;
    let call = |id: NodeId, sum: Option<(usize, usize)>| {
        let node = graph.node(id);
        let buffers = |ids: &[ValueId]| ids.iter().map(|id| bases.buffer(graph, layout, *id)).collect::<Vec<_>>();
        let (inputs, outputs) = (buffers(&node.inputs), buffers(&node.outputs));
        let kind = match sum {
            Some((offset, elements)) => CallKind::Accumulate { offset, elements },
            None => conversion(&*node.op, &inputs, &outputs, scratch, threads),
        };
        let (op, side, terms) = (Arc::clone(&node.op), cpu_side(&*node.op), Vec::new());
        Call { node: id, op, side, inputs, outputs, terms, maker: None, kind }
    };
    let compiled = |item: &Item| match item.act {
        Act::Start(_) => None,
        Act::Sum { offset, elements } => Some(call(item.node, Some((offset, elements)))),
        Act::Kernel => {
            let maker = item.maker.map(|maker| Box::new(call(maker, None)));
            Some(Call { maker, ..call(item.node, None) })
        }
    };
    for item in items.iter().filter(|item| item.act == Act::Kernel) {
        check_kernel(graph.node(item.node))?;
    }
    Ok(items.iter().map(compiled).collect())
}

/// Lays f32 copies of half-precision operands behind the op's own scratch.
fn conversion(op: &dyn Op, inputs: &[Buffer], outputs: &[Buffer], scratch: &Memory, threads: usize) -> CallKind {
    let types = |buffers: &[Buffer]| buffers.iter().map(|buffer| buffer.ty.clone()).collect::<Vec<_>>();
    let all = [types(inputs), types(outputs)].concat();
    if !needs_conversion(op, &all) {
        return CallKind::Kernel;
    }
    let mut offset = own_scratch(op, &types(inputs), &types(outputs), threads);
    let mut copy = |buffer: &Buffer| {
        if !matches!(buffer.ty.dtype, DType::BF16 | DType::F16) {
            return buffer.clone();
        }
        let copy = Buffer { data: scratch.at(offset), ty: Type::f32(buffer.ty.shape.clone()) };
        offset += align(copy.ty.bytes());
        copy
    };
    CallKind::Converted {
        inputs: inputs.iter().map(&mut copy).collect(),
        outputs: outputs.iter().map(&mut copy).collect(),
    }
}

pub(super) fn run_call(call: &Call, team: &Team, scratch: &Memory) {
    let kernel = |inputs: &[Buffer], outputs: &[Buffer]| {
        // SAFETY: buffers were resolved by the layout; the scratch belongs to this lane or to the step.
        let mut cx = unsafe { CpuCx::new(inputs, outputs, team, (scratch.at(0), scratch.bytes())) };
        cx.terms = &call.terms;
        let Some(maker) = &call.maker else { return call.cpu().run(&mut cx) };
        call.cpu().run_taking(&mut cx, &mut |taker| run_maker(maker, team, scratch, taker));
    };
    match &call.kind {
        CallKind::Kernel => kernel(&call.inputs, &call.outputs),
        CallKind::Converted { inputs, outputs } => {
            call.inputs.iter().zip(inputs).for_each(|(from, to)| convert(from, to, team));
            kernel(inputs, outputs);
            outputs.iter().zip(&call.outputs).for_each(|(from, to)| convert(from, to, team));
        }
        CallKind::Accumulate { .. } => unreachable!("lanes add sums"),
    }
}

/// Runs a call whose output goes to `taker` and nowhere else.
pub(super) fn run_maker(call: &Call, team: &Team, scratch: &Memory, taker: &dyn Taker) {
    // SAFETY: as in `run_call`; the output has no place and is not written, and who takes it leaves the scratch to the maker.
    let mut cx = unsafe { CpuCx::new(&call.inputs, &call.outputs, team, (scratch.at(0), scratch.bytes())) };
    cx.taker = Some(taker);
    call.cpu().run(&mut cx);
}

/// Copies between half precision and f32; same type means same buffer.
fn convert(from: &Buffer, to: &Buffer, team: &Team) {
    if from.data == to.data {
        return;
    }
    kolo_ops::cast::convert(from, to, team);
}

/// Touches the memory of a call's operands.
pub(super) fn touch_call(call: &Call) {
    let maker = call.maker.iter().flat_map(|maker| &maker.inputs);
    for buffer in call.inputs.iter().chain(&call.outputs).chain(&call.terms).chain(maker) {
        touch(buffer.data, buffer.ty.bytes());
    }
}

/// Takes a result to see whether it is finite.
#[derive(Debug)]
pub(super) struct Finite(pub AtomicBool);

impl Taker for Finite {
    unsafe fn take(&self, tile: Tile<'_>) {
        let row = |at: usize| &tile.data[at * tile.width..at * tile.width + tile.columns];
        if !(0..tile.rows).all(|at| row(at).iter().all(|value| value.is_finite())) {
            self.0.store(false, Ordering::Relaxed);
        }
    }
}

pub(super) fn is_finite(buffer: &Buffer) -> bool {
    let (dtype, count) = (buffer.ty.dtype, buffer.ty.elements());
    match dtype {
        DType::F32 => {
            // SAFETY: the buffer holds that many values.
            let values: &[f32] = unsafe { std::slice::from_raw_parts(buffer.data.cast(), count) };
            values.iter().all(|value| value.is_finite())
        }
        DType::BF16 | DType::F16 => {
            // SAFETY: as above.
            let values: &[u16] = unsafe { std::slice::from_raw_parts(buffer.data.cast(), count) };
            values.iter().all(|value| kolo_ops::halves::widen_one(dtype, *value).is_finite())
        }
        _ => true,
    }
}
