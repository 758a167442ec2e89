//! Conversion between element types.

use crate::cuda_map::{self, Map};
use crate::halves;
use kolo_graph::cpu::{Buffer, TileFunction, TileKernel};
use kolo_graph::cuda::{ChannelsLast, Cuda, CudaCalls, CudaCx, CudaPlace};
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, DType, Dense, GradCx, Op, Operand, Operands, Team, Tensor, Type, op};
use std::ops::Range;

op! {
    /// The same values in another element type. Floats become whole numbers by dropping the fraction. What a type of whole
    /// numbers cannot hold becomes its largest or smallest value, and NaN becomes zero.
    pub struct Cast = "cast" { to: DType }
}

impl Op for Cast {
    fn operands(&self) -> Operands {
        Operands::new([Operand::any("x")], &["y"])
    }
    fn index(&self, inputs: &[Type]) -> Option<kolo_graph::index::Index> {
        kolo_graph::index::Index::elementwise(inputs, 1).ok()
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        Ok(vec![Type::new(self.to, input.shape.clone())])
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        vec![self.to.is_float().then(|| cx.grad().cast(cx.input(0).dtype()))]
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        let data = inputs[0].data.iter().map(|value| self.to.round(*value)).collect();
        vec![Dense::new(inputs[0].shape.clone(), data)]
    }
}

impl Cpu for Cast {
    fn run(&self, cx: &mut CpuCx<'_>) {
        convert(&cx.inputs[0], &cx.outputs[0], cx.team);
    }
    fn takes_halves(&self) -> bool {
        true
    }
    /// Between floats, in f32: what a value becomes by being stored.
    fn tile_kernel(&self) -> Option<TileKernel> {
        let function: TileFunction = match self.to {
            DType::F32 => |inputs, out, _| out.copy_from_slice(&inputs[0][..out.len()]),
            DType::BF16 => |inputs, out, _| halves::through(DType::BF16, out, inputs[0]),
            DType::F16 => |inputs, out, _| halves::through(DType::F16, out, inputs[0]),
            _ => return None,
        };
        Some(TileKernel { function, constant: 0.0 })
    }
}

impl Cuda for Cast {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (from, to) = (cx.inputs[0].dtype, self.to);
        if from == to {
            let mut calls = CudaCalls::new();
            calls.copy(CudaPlace::input(0), CudaPlace::output(0), cx.inputs[0].bytes());
            return calls;
        }
        let value = match (from.is_float(), to) {
            (_, DType::Bool) => "x0 != 0",
            // What is too large becomes the largest, NaN becomes zero, as in Rust.
            (true, DType::I32) => "__float2int_rz(x0)",
            (true, DType::I64) => "__float2ll_rz(x0)",
            // A bool is any byte but zero.
            _ if from == DType::Bool => "x0 != 0",
            // NaN is not above zero.
            (true, DType::U8) => "x0 >= 255.0f ? 255 : x0 > 0.0f ? (unsigned char)x0 : 0",
            (false, DType::U8) => "x0 > 255 ? 255 : x0 < 0 ? 0 : (unsigned char)x0",
            (false, DType::I32) if from == DType::I64 => {
                "x0 > 2147483647ll ? 2147483647 : x0 < -2147483648ll ? (int)-2147483648ll : (int)x0"
            }
            (false, DType::F32 | DType::BF16 | DType::F16) => "(float)x0",
            _ => "x0",
        };
        let ty = if to.is_float() { "float" } else { kolo_graph::cuda::cuda_type(to) };
        Map { body: format!("const {ty} y0 = {value};\n"), ..Map::default() }.calls(cx)
    }
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        cuda_map::channels_last(cx)
    }
}

impl Cases for Cast {
    fn cases() -> Vec<Case> {
        let case = |arg: Arg, to| Case::new(Cast { to }, [arg.constant()]);
        vec![
            case(Arg::real([3, 5]), DType::BF16),
            case(Arg::real([7]), DType::F16),
            case(Arg::real([7]), DType::I32),
            case(Arg::index([7], -3, 9), DType::F32),
            case(Arg::index([7], -3, 9), DType::I64),
            case(Arg::boolean([7]), DType::F32),
            case(Arg::real([7]), DType::Bool),
            case(Arg::real([37]).within(-300.0, 600.0), DType::U8),
            case(Arg::index([37], -300, 600), DType::U8),
            case(Arg::boolean([7]), DType::U8),
            case(Arg::byte([7], 0, 3), DType::Bool),
            case(Arg::byte([37], 0, 256), DType::F32),
            case(Arg::byte([37], 0, 256), DType::I32),
            case(Arg::byte([37], 0, 256), DType::I64),
            Case::new(Cast { to: DType::F32 }, [Arg::real([5])]),
        ]
    }
}

pub const KINDS: &[OpKind] = &[OpKind::of::<Cast>().with_cuda::<Cast>()];

kolo_graph::methods! {
    /// Element types.
    CastMethods {
        fn cast(self, to: DType) -> Tensor<'b> { if self.dtype() == to { self } else { self.then(Cast { to }, &[]) } }
    }
}

/// Elements of one task.
const ELEMENTS_PER_TASK: usize = 16 * 1024;

/// Converts a whole buffer. Every type passes through f64, which holds them all; only the pairs that training uses often
/// have a loop of their own.
pub fn convert(from: &Buffer, to: &Buffer, team: &Team) {
    let count = from.ty.elements();
    assert_eq!(count, to.ty.elements(), "a conversion keeps the number of elements");
    team.chunks(count, ELEMENTS_PER_TASK, |range, _| match (from.ty.dtype, to.ty.dtype) {
        // SAFETY: tasks own disjoint ranges of both buffers, which hold `count` elements of their types.
        (DType::F32, half) if halves::is_half(half) => unsafe {
            halves::round(half, run(from, &range), run(to, &range));
        },
        // SAFETY: as above.
        (half, DType::F32) if halves::is_half(half) => unsafe {
            halves::widen(half, run(from, &range), run(to, &range));
        },
        (a, b) if a == b => {
            let (start, bytes) = (range.start * a.bytes(), range.len() * a.bytes());
            // SAFETY: both buffers hold that many bytes of the same type.
            unsafe { std::ptr::copy(from.data.add(start), to.data.add(start), bytes) }
        }
        _ => range.for_each(|at| write(to, at, read(from, at))),
    });
}

/// # Safety
/// The buffer holds elements as wide as `T`, those of the range among them, and nobody else uses these meanwhile.
unsafe fn run<'a, T>(buffer: &Buffer, range: &Range<usize>) -> &'a mut [T] {
    // SAFETY: by the contract above.
    unsafe { std::slice::from_raw_parts_mut(buffer.data.cast::<T>().add(range.start), range.len()) }
}

/// Element `at` of a buffer, whatever its type. An i64 beyond 2⁵³ loses its last bits.
pub fn read(buffer: &Buffer, at: usize) -> f64 {
    assert!(at < buffer.ty.elements(), "element {at} of {}", buffer.ty);
    // SAFETY: the index is inside the buffer, and the pointer has the type the buffer names.
    unsafe {
        match buffer.ty.dtype {
            DType::F32 => f64::from(*buffer.data.cast::<f32>().add(at)),
            DType::BF16 => half::bf16::from_bits(*buffer.data.cast::<u16>().add(at)).to_f64(),
            DType::F16 => half::f16::from_bits(*buffer.data.cast::<u16>().add(at)).to_f64(),
            DType::I32 => f64::from(*buffer.data.cast::<i32>().add(at)),
            DType::I64 => *buffer.data.cast::<i64>().add(at) as f64,
            DType::Bool => f64::from(*buffer.data.add(at) != 0),
            DType::U8 => f64::from(*buffer.data.add(at)),
        }
    }
}

/// Writes element `at` of a buffer, whatever its type.
pub fn write(buffer: &Buffer, at: usize, value: f64) {
    assert!(at < buffer.ty.elements(), "element {at} of {}", buffer.ty);
    // SAFETY: as for `read`.
    unsafe {
        match buffer.ty.dtype {
            DType::F32 => *buffer.data.cast::<f32>().add(at) = value as f32,
            DType::BF16 => *buffer.data.cast::<u16>().add(at) = half::bf16::from_f64(value).to_bits(),
            DType::F16 => *buffer.data.cast::<u16>().add(at) = half::f16::from_f64(value).to_bits(),
            DType::I32 => *buffer.data.cast::<i32>().add(at) = value as i32,
            DType::I64 => *buffer.data.cast::<i64>().add(at) = value as i64,
            DType::Bool => *buffer.data.add(at) = u8::from(value != 0.0),
            DType::U8 => *buffer.data.add(at) = value as u8,
        }
    }
}
