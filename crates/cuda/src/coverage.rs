//! Every kernel that any case of any op asks for, compiled on any machine that has NVRTC.

use crate::device::sum_source;
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::lowering::Lowering;
use crate::nccl_group::add_launch;
use kolo_exec::selftest::graph_of;
use kolo_graph::cuda::{CudaCalls, CudaSource, CudaTarget};
use kolo_graph::{DType, OpKind, Type};

/// Compiles the sources of every case, also in half precision where the op allows it, and of the sums over grains and ranks; how many
/// there were.
pub fn compile_cases(kinds: &[OpKind], target: &CudaTarget) -> Result<usize, CudaError> {
    let mut calls: Vec<CudaCalls> = Vec::new();
    for kind in kinds.iter().filter(|kind| kind.cuda.is_some()) {
        for case in (kind.cases)() {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let mut args = case.args.clone();
                let operands = case.op.operands();
                for (at, arg) in args.iter_mut().enumerate().filter(|(_, arg)| arg.ty.dtype == DType::F32) {
                    if operands.input(at).is_some_and(|operand| operand.dtypes.contains(&dtype)) {
                        arg.ty = Type::new(dtype, arg.ty.shape.clone());
                    }
                }
                let Ok(graph) = graph_of(&case.op, &args) else { continue };
                let Some(node) = graph.ids().last() else { continue };
                calls.push(Lowering::new(&graph, target, None).calls(node)?);
            }
        }
    }
    let added = [DType::F32, DType::BF16, DType::F16, DType::I32, DType::I64].map(|dtype| add_launch(dtype).source);
    let sums = added.into_iter().chain([sum_source()]).collect::<Vec<CudaSource>>();
    Kernels::new(target.capability, 0).compile(calls.iter().flat_map(CudaCalls::sources).chain(&sums))
}
