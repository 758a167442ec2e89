//! Calls of the ops that every graph is made of: constants, copies, and collectives of a lone worker.

use crate::cuda::{CudaArg, CudaCalls, CudaCx, CudaPlace, CudaSource, Launch, cuda_type};
use crate::types::{DType, Type, strides};
use std::fmt::Write;

const BLOCK: usize = 256;
const BLOCKS_MAX: usize = 4096;

/// A kernel with a body for each element `at` of the first output; its first parameter is the first input, if there is one.
fn for_each_element(cx: &CudaCx<'_>, body: &str) -> CudaCalls {
    let (count, ty) = (cx.outputs[0].elements(), cuda_type(cx.outputs[0].dtype));
    let input = cx.inputs.first().map_or(String::new(), |input| format!("const {} *from, ", cuda_type(input.dtype)));
    let text = format!(
        "extern \"C\" __global__ void each({input}{ty} *to) {{\nconst i64 stride = (i64)gridDim.x * blockDim.x;\n\
         for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < {count}; at += stride) {{\n{body}\n}}\n}}\n"
    );
    let mut args: Vec<CudaArg> = Vec::new();
    args.extend(cx.inputs.first().map(|_| CudaArg::from(CudaPlace::input(0))));
    args.push(CudaPlace::output(0).into());
    let blocks = count.div_ceil(BLOCK).min(BLOCKS_MAX);
    Launch::new(CudaSource::new(text), "each", [blocks, 1, 1], BLOCK, args).into()
}

/// Every element this number.
pub(crate) fn fill(cx: &CudaCx<'_>, value: f64) -> CudaCalls {
    let dtype = cx.outputs[0].dtype;
    if value == 0.0 && !value.is_sign_negative() {
        let mut calls = CudaCalls::new();
        calls.zero(CudaPlace::output(0), cx.outputs[0].bytes());
        return calls;
    }
    let body = match dtype {
        DType::F32 => format!("to[at] = __uint_as_float({:#x}u);", (value as f32).to_bits()),
        DType::BF16 => format!("to[at].bits = {:#x};", half::bf16::from_f64(value).to_bits()),
        DType::F16 => format!("to[at].bits = {:#x};", half::f16::from_f64(value).to_bits()),
        DType::I32 => format!("to[at] = (int){:#x}u;", value as i32),
        DType::I64 => format!("to[at] = (i64){:#x}ull;", value as i64),
        DType::Bool => format!("to[at] = {};", u8::from(value != 0.0)),
        DType::U8 => format!("to[at] = {};", value as u8),
    };
    for_each_element(cx, &body)
}

/// The first output is the first input.
pub(crate) fn copy(cx: &CudaCx<'_>) -> CudaCalls {
    let mut calls = CudaCalls::new();
    calls.copy(CudaPlace::input(0), CudaPlace::output(0), cx.outputs[0].bytes());
    calls
}

/// All inputs one after the other, each in so many bytes; what is left of them is zero.
pub(crate) fn concatenate(cx: &CudaCx<'_>, bytes_of: impl Fn(&Type) -> usize) -> CudaCalls {
    let (mut calls, mut offset) = (CudaCalls::new(), 0);
    for (at, input) in cx.inputs.iter().enumerate() {
        let (bytes, capacity) = (input.bytes(), bytes_of(input));
        calls.copy(CudaPlace::input(at), CudaPlace::output(0).further(offset), bytes);
        if capacity > bytes {
            calls.zero(CudaPlace::output(0).further(offset + bytes), capacity - bytes);
        }
        offset += capacity;
    }
    calls
}

/// Each element is so many times the input's at the same place, where the input repeats along a dim after so many elements.
pub(crate) fn mirror(cx: &CudaCx<'_>, factor: usize, repeats: Option<(usize, usize)>) -> CudaCalls {
    let (from, to) = (&cx.inputs[0], &cx.outputs[0]);
    if from.elements() == 0 {
        let mut calls = CudaCalls::new();
        calls.zero(CudaPlace::output(0), to.bytes());
        return calls;
    }
    let own = strides(&from.shape);
    let mut body = String::from("i64 rest = at, offset = 0, place = 0;\n");
    for (dim, size) in to.shape.iter().enumerate().rev() {
        let _ = writeln!(body, "place = rest % {size}; rest /= {size};");
        if let Some((_, period)) = repeats.filter(|(repeated, _)| *repeated == dim) {
            let _ = writeln!(body, "place %= {};", period.max(1));
        }
        let _ = writeln!(body, "offset += place * {};", own[dim]);
    }
    body.push_str(&match (from.dtype, factor) {
        (_, 1) | (DType::Bool, _) => "to[at] = from[offset];".to_string(),
        (dtype, factor) if dtype.is_float() => {
            format!("to[at] = from_float<{}>(to_float(from[offset]) * {factor}.0f);", cuda_type(dtype))
        }
        (_, factor) => format!("to[at] = from[offset] * {factor};"),
    });
    for_each_element(cx, &body)
}

/// A run of the input from this element on, times a factor.
pub(crate) fn scaled_run(cx: &CudaCx<'_>, start: usize, factor: usize) -> CudaCalls {
    for_each_element(cx, &format!("to[at] = from[at + {start}] * {factor}.0f;"))
}

/// Along a dim, each place has the input's at the place that is listed for it.
pub(crate) fn pick(cx: &CudaCx<'_>, dim: usize, sources: &[usize]) -> CudaCalls {
    let (from, to) = (&cx.inputs[0], &cx.outputs[0]);
    if from.elements() == 0 {
        return fill(cx, 0.0);
    }
    let inner: usize = to.shape[dim + 1..].iter().product();
    let (own, wanted) = (from.shape[dim], to.shape[dim]);
    let sources: Vec<String> = sources.iter().map(usize::to_string).collect();
    let body = format!(
        "static __device__ const int sources[] = {{{}}};\nconst i64 row = at / {inner}, place = row % {wanted};\n\
         to[at] = from[(row / {wanted} * {own} + sources[place]) * {inner} + at % {inner}];",
        sources.join(", ")
    );
    for_each_element(cx, &body)
}
