//! Dropout whose mask is a function of (key, stream, step, sample, element) and nothing else: the same sample loses the
//! same elements in whatever grain it runs, and the backward pass draws the mask again instead of keeping it.

use crate::device;
use crate::norm;
use crate::simd::LANES;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::cuda::{Cuda, CudaArg, CudaCalls, CudaCx, Launch};
use kolo_graph::op::OpKind;
use kolo_graph::rng::{Stream, unit};
use kolo_graph::split::{Placement, Split};
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, DType, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};
use std::sync::Arc;

op! {
    /// Drops each element of x with probability `p` and scales the rest by `1/(1 − p)`. The second input is
    /// i32[4]: key (low, high), step and the number of the first sample; samples lie along dim 0. Of each
    /// sample these may be the rows from `first` on.
    pub struct Dropout = "dropout" { p: f32, stream: i64, first: usize = 0 }
}

/// Words of one Philox counter: neighbouring elements share it.
const WORDS: usize = 4;
/// Counters drawn together, one per vector lane.
const COUNTERS: usize = LANES;
/// Elements of one draw.
const DRAW: usize = WORDS * COUNTERS;
/// Elements of one sample that a task takes at least, if there are as many.
const PART: usize = 4096;

/// Where the mask comes from.
#[derive(Clone, Copy)]
struct Mask {
    stream: Stream,
    step: u64,
    first_sample: u32,
}

impl Mask {
    fn new(op: &Dropout, rng: [i32; 4]) -> Self {
        let words = rng.map(|word| word as u32);
        let key = [words[0] ^ op.stream as u32, words[1] ^ (op.stream >> 32) as u32];
        Self { stream: Stream::from_key(key), step: u64::from(words[2]), first_sample: words[3] }
    }

    /// The upper half of the counter for a sample of this grain.
    fn counter(&self, sample: usize) -> u64 {
        self.step << 32 | u64::from(self.first_sample.wrapping_add(sample as u32))
    }
}

impl Op for Dropout {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x"), Operand::i32("rng")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    /// Random numbers are counted by the place of an element in its sample: a part of its first dim is a run of them.
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let Some(size) = inputs[0].shape.get(1) else { return Vec::new() };
        let along = Placement::Shard(1);
        vec![Split::new("d1", *size, [along, Placement::Replicate], [along]).ordered()]
    }
    fn part_at(&self, _: &Split, first: usize, _: usize) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { first: self.first + first, ..self.clone() }))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [x, rng] = inputs else { return Err("takes x and rng".into()) };
        if !(0.0..1.0).contains(&self.p) {
            return Err(format!("drops with a probability from 0 to below 1, not {}", self.p));
        }
        if x.rank() == 0 || !x.dtype.is_float() {
            return Err(format!("drops elements of float samples along dim 0, not of {x}; cast or reshape it"));
        }
        if rng.dtype != DType::I32 || rng.shape != [4] {
            return Err(format!("rng is i32[4] (key, key, step, first sample), not {rng}"));
        }
        Ok(vec![x.clone()])
    }
    /// Ten rounds of Philox make four words.
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        inputs[0].elements() as u64 * 20
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        vec![cx.needs(0).then(|| cx.grad().then(self.clone(), &[cx.input(1)])), None]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let (x, rng) = (inputs[0], inputs[1]);
        let mask = Mask::new(self, std::array::from_fn(|at| rng.data[at] as i32));
        let (inner, before) = (x.shape[1..].iter().product::<usize>(), self.before(&x.shape));
        let value = |(at, x): (usize, &f64)| {
            let (sample, element) = (at / inner, at % inner + before);
            let block = mask.stream.block(mask.counter(sample), (element / WORDS) as u64);
            if unit(block[element % WORDS]) >= self.p { x / (1.0 - f64::from(self.p)) } else { 0.0 }
        };
        vec![Dense::new(outputs[0].shape.clone(), x.data.iter().enumerate().map(value).collect())]
    }
}

impl Dropout {
    /// Elements of a sample before this part of it.
    fn before(&self, shape: &[usize]) -> usize {
        self.first * shape[1..].iter().skip(1).product::<usize>()
    }
}

impl Cpu for Dropout {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (x, y) = (cx.f32(0), Address(cx.out_f32(0).as_mut_ptr()));
        let mask = Mask::new(self, std::array::from_fn(|at| cx.i32(1)[at]));
        let scale = (1.0 / (1.0 - f64::from(self.p))) as f32;
        let inner: usize = cx.shape(0)[1..].iter().product();
        let (parts, before) = (inner.div_ceil(PART), self.before(cx.shape(0)));
        cx.team.chunks(cx.shape(0)[0] * parts, norm::rows_per_task(inner.min(PART)), |range, _| {
            for at in range {
                let (sample, start) = (at / parts, at % parts * PART);
                let part = sample * inner + start..sample * inner + (start + PART).min(inner);
                // SAFETY: tasks own disjoint parts.
                let y = unsafe { y.slice(part.start, part.len()) };
                let x = &x[part];
                // Up to the first counter that is all this part's.
                let head = ((WORDS - (before + start) % WORDS) % WORDS).min(y.len());
                for at in 0..head {
                    let element = before + start + at;
                    let block = mask.stream.block(mask.counter(sample), (element / WORDS) as u64);
                    y[at] = if unit(block[element % WORDS]) >= self.p { x[at] * scale } else { 0.0 };
                }
                let low = (before + start + head) / WORDS;
                drop_elements(&mut y[head..], &x[head..], mask.stream, mask.counter(sample), low as u64, self.p, scale);
            }
        });
    }
}

vectorized! {
    /// `y = x·scale` where the mask keeps, else 0. The first element is word 0 of counter (`high`, `low`).
    fn drop_elements(y: &mut [f32], x: &[f32], stream: Stream, high: u64, low: u64, p: f32, scale: f32) {
        for (draw, (y, x)) in y.chunks_mut(DRAW).zip(x.chunks(DRAW)).enumerate() {
            let first = low + (draw * COUNTERS) as u64;
            let mut factors = [0.0f32; DRAW];
            for counter in 0..COUNTERS {
                let block = stream.block(high, first + counter as u64);
                for word in 0..WORDS {
                    factors[counter * WORDS + word] = if unit(block[word]) >= p { scale } else { 0.0 };
                }
            }
            for ((y, x), factor) in y.iter_mut().zip(x).zip(&factors) {
                // A dropped element is zero even if it was NaN.
                *y = if *factor > 0.0 { x * factor } else { 0.0 };
            }
        }
    }
}

impl Cuda for Dropout {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let shape = &cx.inputs[0].shape;
        let (inner, before) = (shape[1..].iter().product::<usize>(), self.before(shape));
        // A thread to each counter, of which the first and the last may be other parts' too.
        let quads = (before + inner).div_ceil(WORDS) - before / WORDS;
        let scale = (1.0 / (1.0 - f64::from(self.p))) as f32;
        let sizes = [shape[0], inner, before, quads].map(device::long);
        let numbers = [CudaArg::I64(self.stream), CudaArg::F32(self.p), CudaArg::F32(scale)];
        let operands = [device::input(0), device::input(1), device::output(0)];
        let args = [&operands[..], &sizes, &numbers].concat();
        let grid = device::grid(shape[0] * quads, device::THREADS);
        Launch::new(device::typed(include_str!("dropout.cu"), cx), "dropout", grid, device::THREADS, args).into()
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
}

impl Cases for Dropout {
    fn cases() -> Vec<Case> {
        let case =
            |p, stream, shape: &[usize]| Case::new(Dropout { p, stream, first: 0 }, [Arg::real(shape), Arg::rng()]);
        let large = |shape: &[usize]| {
            Case::new(Dropout { p: 0.1, stream: 9, first: 0 }, [Arg::real(shape).constant(), Arg::rng()])
        };
        vec![
            case(0.5, 0, &[7]),
            case(0.25, 1, &[3, 5]),
            case(0.9, -(5 << 40), &[2, 3, 17]),
            case(0.0, 2, &[1, 70]),
            large(&[3, 6001]),
            large(&[3000, 6]),
        ]
    }
}

pub const KINDS: &[OpKind] = &[OpKind::of::<Dropout>().with_cuda::<Dropout>()];

kolo_graph::methods! {
    /// Dropout.
    DropoutMethods {
        /// Drops each element with probability `p`. `stream` tells the layers of a model apart.
        fn dropout(self, p: f32, rng: Tensor<'b>, stream: i64) -> Tensor<'b> {
            self.then(Dropout { p, stream, first: 0 }, &[rng])
        }
    }
}
