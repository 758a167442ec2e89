//! Cross-entropy over classes that lie in slices, on one rank or on several: no rank ever holds all logits.
//!
//! Each slice gives four numbers per row: its largest logit, the sum of exponentials from there, the target's logit if the
//! target is one of its classes, and the sum of its logits from the largest. The numbers of all slices make the loss and the
//! log-sum-exp, joined in the order of a balanced tree over the slices, so that the bits do not depend on who made which.

use crate::cross_entropy::{END, Target, divisor, end_calls, sum_from, target};
use crate::device;
use crate::pairwise::{self, Pairwise};
use crate::real::Real;
use crate::simd;
use crate::softmax::{define_sum_exp, rows_per_task, sum_exp};
use crate::tiles::{Address, TILE};
use kolo_graph::cuda::{Cuda, CudaArg, CudaCalls, CudaCx, CudaSource, Launch};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, Op, Operand, Operands, Shape, Type, op};

/// Numbers of a row of a slice: the largest logit, the sum of exponentials, the target's logit, the sum of the logits.
const NUMBERS: usize = 4;
/// Slices of the classes, at most.
pub const SLICES_MAX: usize = 64;

op! {
    /// What one slice of the classes, those from `first` on, says of each row: `[1, …, 4]`. `smoothing`: whether the sum of the
    /// logits is wanted.
    pub struct CrossEntropyPart = "cross_entropy_part" { first: usize, smoothing: bool }
}

op! {
    /// Loss and log-sum-exp of each row, as cross_entropy gives them, from what slices of these `sizes` say of the rows.
    pub struct CrossEntropyJoin = "cross_entropy_join" { ignore: i64, smoothing: f32, mean: bool, sizes: Vec<usize> }
}

fn row_axes(targets: &Type) -> Vec<String> {
    (0..targets.rank()).map(|dim| format!("d{dim}")).collect()
}

fn around(first: &str, rows: &[String], last: &str) -> Vec<String> {
    let ends = |name: &str| Some(name.to_string()).filter(|name| !name.is_empty());
    ends(first).into_iter().chain(rows.iter().cloned()).chain(ends(last)).collect()
}

impl Op for CrossEntropyPart {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::float("logits"), Operand::i32("targets")], &["numbers"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let rows = row_axes(inputs.get(1)?);
        Some(Index {
            inputs: vec![around("", &rows, "classes"), rows.clone()],
            outputs: vec![around("_", &rows, "numbers")],
            whole: vec!["classes".into(), "numbers".into()],
            ..Index::default()
        })
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [logits, targets] = inputs else { return Err("takes two inputs, logits and targets".into()) };
        let rows = logits.shape.split_last().map(|(_, rows)| rows);
        if rows != Some(&targets.shape[..]) || logits.last() == 0 {
            return Err(format!("expects a target for each row of at least one logit, but got {logits} and {targets}"));
        }
        let shape: Vec<usize> = [1].iter().chain(&targets.shape[..]).chain(&[NUMBERS]).copied().collect();
        Ok(vec![Type::f32(shape)])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        3 * inputs[0].elements() as u64
    }
    fn widened(&self) -> Option<usize> {
        Some(0)
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let classes = inputs[0].shape[inputs[0].shape.len() - 1];
        let mut data = Vec::new();
        for (row, value) in inputs[0].data.chunks(classes).zip(&inputs[1].data) {
            let (largest, sum) = match row.iter().all(|x| *x == f64::NEG_INFINITY) {
                true => (f64::NEG_INFINITY, 0.0),
                false => define_sum_exp(row),
            };
            let hit = usize::try_from(*value as i64 - self.first as i64).ok().filter(|at| *at < classes);
            let smooths = self.smoothing && largest != f64::NEG_INFINITY;
            let all = if smooths { row.iter().map(|x| x - largest).sum() } else { 0.0 };
            data.extend([largest, sum, hit.map_or(0.0, |at| row[at]), all]);
        }
        vec![Dense::new(outputs[0].shape.clone(), data)]
    }
}

impl Cpu for CrossEntropyPart {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (logits, targets) = (cx.f32(0), cx.i32(1));
        let classes = cx.inputs[0].ty.last();
        let address = Address(cx.out_f32(0).as_mut_ptr());
        cx.team.chunks(targets.len(), rows_per_task(classes), |range, _| {
            for at in range {
                let row = &logits[at * classes..(at + 1) * classes];
                let largest = simd::max(row);
                let hit = i64::from(targets[at]) - self.first as i64;
                let hit = usize::try_from(hit).ok().filter(|hit| *hit < classes);
                // Of a slice that is masked as a whole, nothing adds to what the others have.
                let masked = largest == f32::NEG_INFINITY;
                let sum = if masked { 0.0 } else { sum_exp(row, largest) };
                let all = match self.smoothing && !masked {
                    true => Pairwise::of(row.chunks(TILE).map(|tile| sum_from(tile, largest))),
                    false => 0.0,
                };
                let numbers = [largest, sum, hit.map_or(0.0, |hit| row[hit]), all];
                // SAFETY: tasks own disjoint rows.
                unsafe { address.slice(at * NUMBERS, NUMBERS) }.copy_from_slice(&numbers);
            }
        });
    }
}

/// What the slices of one row say, joined as a balanced tree: the largest logit, the sum of exponentials from there, and the
/// target's logit.
fn joined(slices: &[[f32; NUMBERS]]) -> [f32; 3] {
    if let [[largest, sum, hit, _]] = slices {
        return [*largest, *sum, *hit];
    }
    let (low, high) = slices.split_at(slices.len() / 2);
    let ([a, sum_a, hit_a], [b, sum_b, hit_b]) = (joined(low), joined(high));
    let largest = if a >= b || a.is_nan() { a } else { b };
    let from_largest = |own: f32, sum: f32| if own == f32::NEG_INFINITY { 0.0 } else { sum * Real::exp(own - largest) };
    [largest, from_largest(a, sum_a) + from_largest(b, sum_b), hit_a + hit_b]
}

/// The sum of all logits from the largest one, as a balanced tree over the slices.
fn total(slices: &[[f32; NUMBERS]], sizes: &[usize], largest: f32) -> f32 {
    if let [[own, _, _, sum]] = slices {
        return *sum + sizes[0] as f32 * (*own - largest);
    }
    let half = slices.len() / 2;
    total(&slices[..half], &sizes[..half], largest) + total(&slices[half..], &sizes[half..], largest)
}

impl CrossEntropyJoin {
    fn classes(&self) -> usize {
        self.sizes.iter().sum()
    }

    /// Log-sum-exp and loss of one row.
    fn row(&self, slices: &[[f32; NUMBERS]], value: i32) -> (f32, f32) {
        let [largest, sum, hit] = joined(slices);
        let log = Real::ln(sum);
        let smooth = match self.smoothing == 0.0 {
            true => 0.0,
            false => self.smoothing / self.classes() as f32 * total(slices, &self.sizes, largest),
        };
        let loss = match target(i64::from(value), self.ignore, self.classes()) {
            Target::Ignored => 0.0,
            Target::Class(_) => log - (1.0 - self.smoothing) * (hit - largest) - smooth,
            Target::Outside => f32::NAN,
        };
        (largest + log, loss)
    }
}

impl Op for CrossEntropyJoin {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::f32("numbers"), Operand::i32("targets")], &["loss", "lse"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let rows = row_axes(inputs.get(1)?);
        let mut whole = vec!["slices".into(), "numbers".into()];
        if self.mean {
            whole.extend(rows.iter().cloned());
        }
        let inputs = vec![around("slices", &rows, "numbers"), rows.clone()];
        Some(Index { inputs, outputs: vec![vec![], rows], whole, ..Index::default() })
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [numbers, targets] = inputs else { return Err("takes two inputs, numbers and targets".into()) };
        let slices = self.sizes.len();
        let wanted: Shape =
            [slices].iter().chain(&targets.shape[..]).chain(&[NUMBERS]).copied().collect::<Vec<_>>().into();
        if numbers.shape != wanted || !(1..=SLICES_MAX).contains(&slices) || !(0.0..1.0).contains(&self.smoothing) {
            return Err(format!(
                "expects {NUMBERS} numbers of {slices} slices for each of {targets}, but got {numbers}"
            ));
        }
        if self.sizes.iter().try_fold(0usize, |all, size| all.checked_add(*size)).is_none() {
            return Err("the sizes are too large".into());
        }
        Ok(vec![Type::f32([]), Type::f32(targets.shape.clone())])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        inputs[0].elements() as u64
    }
    /// Its numbers stand for the logits of the slices.
    fn widened(&self) -> Option<usize> {
        Some(0)
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let (rows, smoothing) = (outputs[1].elements(), f64::from(self.smoothing));
        let (mut all, mut lse) = (0.0, Vec::new());
        for row in 0..rows {
            let of = |slice: usize, number: usize| inputs[0].data[(slice * rows + row) * NUMBERS + number];
            let slices = 0..self.sizes.len();
            let largest = slices.clone().map(|slice| of(slice, 0)).fold(f64::NEG_INFINITY, Real::larger);
            let from_largest = |slice: usize| match of(slice, 0) {
                f64::NEG_INFINITY => 0.0,
                own => of(slice, 1) * (own - largest).exp(),
            };
            let sum: f64 = slices.clone().map(from_largest).sum();
            let hit: f64 = slices.clone().map(|slice| of(slice, 2)).sum();
            let moved = |slice: usize| of(slice, 3) + self.sizes[slice] as f64 * (of(slice, 0) - largest);
            let smooth =
                if smoothing == 0.0 { 0.0 } else { smoothing / self.classes() as f64 * slices.map(moved).sum::<f64>() };
            lse.push(largest + sum.ln());
            all += match target(inputs[1].data[row] as i64, self.ignore, self.classes()) {
                Target::Ignored => 0.0,
                Target::Class(_) => sum.ln() - (1.0 - smoothing) * (hit - largest) - smooth,
                Target::Outside => f64::NAN,
            };
        }
        let divisor = divisor(inputs[1].data.iter().map(|value| *value as i64), self.ignore, self.mean);
        vec![Dense::new([], vec![all / divisor as f64]), Dense::new(outputs[1].shape.clone(), lse)]
    }
}

impl Cpu for CrossEntropyJoin {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (numbers, targets) = (cx.f32(0), cx.i32(1));
        let (rows, count) = (targets.len(), self.sizes.len());
        let (lse, losses) = (cx.out_f32(1), &mut cx.scratch()[..rows]);
        let mut space = [[0.0; NUMBERS]; SLICES_MAX];
        let slices = &mut space[..count];
        for row in 0..rows {
            for (slice, own) in slices.iter_mut().enumerate() {
                own.copy_from_slice(&numbers[(slice * rows + row) * NUMBERS..][..NUMBERS]);
            }
            (lse[row], losses[row]) = self.row(slices, targets[row]);
        }
        let divisor = divisor(targets.iter().copied().map(i64::from), self.ignore, self.mean);
        cx.out_f32(0)[0] = pairwise::sum(losses) / divisor as f32;
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], _: usize) -> usize {
        inputs[1].elements() * 4
    }
}

impl Cuda for CrossEntropyPart {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let text = concat!(include_str!("rows.cuh"), include_str!("cross_entropy.cu"));
        let (rows, classes) = (cx.inputs[1].elements(), cx.inputs[0].last());
        let (threads, pack) = (device::row_threads(classes), device::pack(classes, cx.inputs[0].dtype));
        let source = device::typed(text, cx).define("GROUP", threads).define("PACK", pack).define("PARTS", 1);
        let (grid, block) = device::row_grid(rows, threads);
        let args = [
            device::input(0),
            device::input(1),
            device::output(0),
            device::long(rows),
            device::long(classes),
            device::long(self.first),
            device::flag(self.smoothing),
        ];
        Launch::new(source, "row_numbers", grid, block, args).into()
    }
}

impl Cuda for CrossEntropyJoin {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let mut calls = CudaCalls::new();
        let rows = cx.inputs[1].elements();
        let losses = calls.scratch(rows.max(1) * size_of::<f32>());
        if rows > 0 {
            let sizes: Vec<String> = self.sizes.iter().map(ToString::to_string).collect();
            let source = CudaSource::new(END).define("SIZES", format!("{{{}}}", sizes.join(", ")));
            let args = [
                device::input(0),
                device::input(1),
                device::output(1),
                losses.into(),
                device::long(rows),
                device::long(self.classes()),
                CudaArg::I64(self.ignore),
                CudaArg::F32(self.smoothing),
            ];
            calls.launch(Launch::new(
                source,
                "join_slices",
                device::grid(rows, device::THREADS),
                device::THREADS,
                args,
            ));
        }
        end_calls(&mut calls, losses, rows, self.ignore, self.mean);
        calls
    }
}

impl Cases for CrossEntropyPart {
    fn cases() -> Vec<Case> {
        let case = |first, smoothing, logits: &[usize], classes| {
            let rows = &logits[..logits.len() - 1];
            let args = [Arg::real(logits).constant(), Arg::index(rows, -1, classes)];
            Case::new(CrossEntropyPart { first, smoothing }, args)
        };
        vec![
            case(0, true, &[5, 7], 9),
            case(3, false, &[2, 3, 4], 11),
            case(2, true, &[1], 3),
            case(1000, true, &[9, 1027], 2048),
        ]
    }
}

impl Cases for CrossEntropyJoin {
    fn cases() -> Vec<Case> {
        let case = |sizes: &[usize], rows: &[usize], smoothing, mean| {
            let shape: Vec<usize> = [sizes.len()].iter().chain(rows).chain(&[NUMBERS]).copied().collect();
            let op = CrossEntropyJoin { ignore: 1, smoothing, mean, sizes: sizes.to_vec() };
            let classes = sizes.iter().sum::<usize>() as i64;
            Case::new(op, [Arg::positive(shape).constant(), Arg::index(rows, 0, classes)])
        };
        vec![
            case(&[3, 4], &[5], 0.1, true),
            case(&[3, 4, 3, 4], &[2, 3], 0.0, false),
            case(&[2, 3, 2, 3, 2, 3, 2, 3], &[400], 0.2, false),
            case(&[9], &[], 0.0, true),
        ]
    }
}

pub const KINDS: &[OpKind] = &[
    OpKind::of::<CrossEntropyPart>().with_cuda::<CrossEntropyPart>(),
    OpKind::of::<CrossEntropyJoin>().with_cuda::<CrossEntropyJoin>(),
];
