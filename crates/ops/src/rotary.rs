//! Rotary position embedding: element pairs `(i, i + dim/2)` of a head turn by an angle that grows with the position.
//!
//! The table of cosines and sines is made once per call, in f64, by turning each pair's unit vector from position to
//! position. No library function is called, so the bits are the same on every machine.

use crate::device;
use crate::norm;
use crate::simd::LANES;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::cuda::{Cuda, CudaArg, CudaCalls, CudaCx, Launch};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::split::{Placement, Split};
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};
use std::sync::Arc;

op! {
    /// Turns the pair `(i, i + dim/2)` at position `p` of `[batch, heads, seq, dim]` by `p·base^(−2i/dim)`; the other way
    /// round if `inverse`. The first position is `first`.
    pub struct Rotary = "rotary" { base: f32, inverse: bool, first: usize = 0 }
}

/// The first position, at most: the table is made by turning from position to position.
const FIRST_MAX: usize = 1 << 24;

impl Op for Rotary {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse("b h s! d! -> b h s d"))
    }
    /// Positions, too, for parts that know their first one.
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let mut splits = self.index(inputs).map_or_else(Vec::new, |index| index.splits(inputs));
        let along = Placement::Shard(2);
        splits.extend(inputs[0].shape.get(2).map(|size| Split::new("s", *size, [along], [along]).ordered()));
        splits
    }
    fn part_at(&self, split: &Split, first: usize, _: usize) -> Option<Arc<dyn Op>> {
        (split.axis == "s").then(|| Arc::new(Self { first: self.first + first, ..self.clone() }) as Arc<dyn Op>)
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        if x.rank() != 4 || !x.dtype.is_float() {
            return Err(format!("turns floats [batch, heads, seq, dim], not {x}; reshape or cast it"));
        }
        if x.last() == 0 || x.last() % 2 != 0 {
            return Err(format!("turns pairs, but the last dim of {x} is odd or empty; pad it"));
        }
        if !self.base.is_finite() || self.base < 1.0 {
            return Err(format!("the base is a number of at least 1, not {}; 10000 is usual", self.base));
        }
        if self.first > FIRST_MAX {
            return Err(format!("the first position is at most {FIRST_MAX}, not {}", self.first));
        }
        Ok(vec![x.clone()])
    }
    fn flops_per_point(&self) -> u64 {
        3
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        vec![Some(cx.grad().then(Rotary { inverse: !self.inverse, ..self.clone() }, &[]))]
    }
    fn composite(&self) -> bool {
        true
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let half = outputs[0].last() / 2;
        let sign = if self.inverse { -1.0 } else { 1.0 };
        vec![Dense::from_fn(outputs[0].shape.clone(), |at| {
            let pair = at[3] % half;
            let angle = (self.first + at[2]) as f64 * f64::from(self.base).powf(-(pair as f64) / half as f64);
            let member = |member: usize| inputs[0].get(&[at[0], at[1], at[2], pair + member * half]);
            let (sin, cos) = (sign * angle.sin(), angle.cos());
            if at[3] < half { member(0) * cos - member(1) * sin } else { member(1) * cos + member(0) * sin }
        })]
    }
}

impl Cpu for Rotary {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let x = cx.f32(0);
        if x.is_empty() {
            return;
        }
        let y = Address(cx.out_f32(0).as_mut_ptr());
        let (positions, dim) = (cx.shape(0)[2], cx.shape(0)[3]);
        let half = dim / 2;
        let (cos, sin) = cx.scratch()[..positions * dim].split_at_mut(positions * half);
        self.fill_table(cos, sin, half);
        let rows = cx.shape(0)[..3].iter().product();
        cx.team.chunks(rows, norm::rows_per_task(dim), |range, _| {
            let x = &x[range.start * dim..range.end * dim];
            // SAFETY: tasks own disjoint rows.
            let y = unsafe { y.slice(range.start * dim, x.len()) };
            rotate_rows(y, x, cos, sin, half, range.start % positions.max(1));
        });
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], _: usize) -> usize {
        table_len(&inputs[0]) * size_of::<f32>()
    }
}

/// Elements of the table; none if there is nothing to turn, however many positions it has.
fn table_len(x: &Type) -> usize {
    if x.elements() == 0 { 0 } else { x.shape[2] * x.shape[3] }
}

impl Cuda for Rotary {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (ty, source) = (&cx.inputs[0], device::typed(include_str!("rotary.cu"), cx));
        let (positions, half) = (ty.shape[2], ty.shape[3] / 2);
        let mut calls = CudaCalls::new();
        let table = calls.scratch(table_len(ty) * size_of::<f32>());
        let sizes = [positions, half, self.first].map(device::long);
        let numbers = [CudaArg::F32(self.base), device::flag(self.inverse)];
        let args = [&[table.into()], &sizes[..], &numbers].concat();
        let grid = device::grid(positions * half, device::THREADS);
        calls.launch(Launch::new(source.clone(), "fill_table", grid, device::THREADS, args));
        let count = ty.elements() / 2;
        let sizes = [count, positions, half].map(device::long);
        let args = [&[device::input(0), table.into(), device::output(0)], &sizes[..]].concat();
        calls.launch(Launch::new(source, "rotate", device::grid(count, device::THREADS), device::THREADS, args));
        calls
    }
}

vectorized! {
    /// `y`, `x`: rows × 2·half, the first at `position`; `cos`, `sin`: positions × half.
    fn rotate_rows(y: &mut [f32], x: &[f32], cos: &[f32], sin: &[f32], half: usize, position: usize) {
        let mut at = position * half;
        for (y, x) in y.chunks_exact_mut(2 * half).zip(x.chunks_exact(2 * half)) {
            let (cos_row, sin_row) = (&cos[at..at + half], &sin[at..at + half]);
            let ((x_first, x_second), (y_first, y_second)) = (x.split_at(half), y.split_at_mut(half));
            for pair in 0..half {
                let (cos, sin) = (cos_row[pair], sin_row[pair]);
                y_first[pair] = x_first[pair].mul_add(cos, -(x_second[pair] * sin));
                y_second[pair] = x_second[pair].mul_add(cos, x_first[pair] * sin);
            }
            at = if at + half < cos.len() { at + half } else { 0 };
        }
    }
}

impl Rotary {
    /// Fills `cos` and `sin`, positions × half.
    fn fill_table(&self, cos: &mut [f32], sin: &mut [f32], half: usize) {
        let logarithm = ln(f64::from(self.base));
        let mut turn = [[1.0; LANES], [0.0; LANES]];
        for start in (0..half).step_by(LANES) {
            let width = LANES.min(half - start);
            for lane in 0..width {
                let angle = exp(-logarithm * (start + lane) as f64 / half as f64);
                (turn[0][lane], turn[1][lane]) = cos_sin(if self.inverse { -angle } else { angle });
            }
            turn_columns(cos, sin, half, (start, width), self.first, &turn);
        }
    }
}

vectorized! {
    /// Columns `start..start + width` of the table: a unit vector per column, turned once per position, also by those before
    /// the first, so that a position has the same bits in every table. The error grows by about 10⁻¹⁶ per turn, far below
    /// what f32 can hold.
    fn turn_columns(
        cos: &mut [f32], sin: &mut [f32], half: usize, columns: (usize, usize), first: usize, turn: &[[f64; LANES]; 2],
    ) {
        let ((start, width), [turn_cos, turn_sin]) = (columns, turn);
        let (mut c, mut s) = ([1.0f64; LANES], [0.0f64; LANES]);
        for _ in 0..first {
            for lane in 0..LANES {
                let next = c[lane] * turn_cos[lane] - s[lane] * turn_sin[lane];
                s[lane] = s[lane] * turn_cos[lane] + c[lane] * turn_sin[lane];
                c[lane] = next;
            }
        }
        for (cos, sin) in cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half)) {
            for (out, value) in cos[start..start + width].iter_mut().zip(&c) {
                *out = *value as f32;
            }
            for (out, value) in sin[start..start + width].iter_mut().zip(&s) {
                *out = *value as f32;
            }
            for lane in 0..LANES {
                let next = c[lane] * turn_cos[lane] - s[lane] * turn_sin[lane];
                s[lane] = s[lane] * turn_cos[lane] + c[lane] * turn_sin[lane];
                c[lane] = next;
            }
        }
    }
}

/// Terms of a power series in numbers of at most 1 that f64 can tell apart.
const TERMS: u32 = 22;
const HALVINGS: i32 = 10;

/// Cosine and sine for `|x| ≤ 1`, by their power series.
fn cos_sin(x: f64) -> (f64, f64) {
    let (mut cos, mut sin, mut term) = (0.0, 0.0, 1.0);
    for power in 0..TERMS {
        let sign = if power % 4 < 2 { 1.0 } else { -1.0 };
        *(if power % 2 == 0 { &mut cos } else { &mut sin }) += sign * term;
        term *= x / f64::from(power + 1);
    }
    (cos, sin)
}

/// `eˣ` by the power series of `x/2¹⁰`, squared ten times.
fn exp(x: f64) -> f64 {
    let small = x / f64::from(1 << HALVINGS);
    let (mut sum, mut term) = (0.0, 1.0);
    for power in 0..TERMS {
        sum += term;
        term *= small / f64::from(power + 1);
    }
    (0..HALVINGS).fold(sum, |value, _| value * value)
}

/// Natural logarithm for `x ≥ 1`: halves until `x < 2`, then the series of `2·artanh((x − 1)/(x + 1))`.
fn ln(mut x: f64) -> f64 {
    let mut halvings = 0;
    while x >= 2.0 {
        x /= 2.0;
        halvings += 1;
    }
    let ratio = (x - 1.0) / (x + 1.0);
    let (mut sum, mut power) = (0.0, ratio);
    for odd in (1..2 * TERMS).step_by(2) {
        sum += power / f64::from(odd);
        power *= ratio * ratio;
    }
    2.0 * sum + f64::from(halvings) * std::f64::consts::LN_2
}

impl Cases for Rotary {
    fn cases() -> Vec<Case> {
        let case =
            |inverse, shape: [usize; 4]| Case::new(Rotary { base: 10000.0, inverse, first: 0 }, [Arg::real(shape)]);
        let large = |shape: [usize; 4]| {
            Case::new(Rotary { base: 500_000.0, inverse: false, first: 0 }, [Arg::real(shape).constant()])
        };
        let later = Case::new(Rotary { base: 10000.0, inverse: true, first: 37 }, [Arg::real([2, 2, 3, 6])]);
        vec![
            case(false, [1, 1, 5, 2]),
            case(false, [2, 3, 4, 6]),
            case(true, [2, 1, 2, 34]),
            large([2, 3, 70, 80]),
            large([1, 1, 5000, 4]),
            later,
        ]
    }
}

pub const KINDS: &[OpKind] = &[OpKind::of::<Rotary>().with_cuda::<Rotary>()];

kolo_graph::methods! {
    /// Rotary position embedding.
    RotaryMethods {
        /// Turns the pairs of `[batch, heads, seq, dim]` by their positions; `base` is usually 10000.
        fn rotary(self, base: f32) -> Tensor<'b> { self.then(Rotary { base, inverse: false, first: 0 }, &[]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_agree_with_the_library() {
        for at in 0..=100 {
            let x = f64::from(at) / 100.0;
            let (cos, sin) = cos_sin(-x);
            assert!((cos - x.cos()).abs() < 1e-15 && (sin + x.sin()).abs() < 1e-15, "at {x}");
            assert!((exp(-13.0 * x) / (-13.0 * x).exp() - 1.0).abs() < 1e-12, "at {x}");
            let large = 1.0 + 1e6 * x;
            assert!((ln(large) - large.ln()).abs() < 1e-14, "at {large}");
        }
    }
}
