//! Cross-entropy of logits against whole-number targets, without ever holding the softmax: forward keeps one number per
//! row (the logarithm of the sum of exponentials), backward makes the gradient of the logits from it in one pass.

use crate::cast::CastMethods;
use crate::compare::CompareMethods;
use crate::device;
use crate::pairwise::{self, Pairwise};
use crate::real::Real;
use crate::reduce::ReduceMethods;
use crate::simd;
use crate::softmax::{bring, define_sum_exp, rows_per_task, sum_exp};
use crate::tiles::{Address, TILE};
use crate::vectorized;
use kolo_graph::cuda::{Cuda, CudaArg, CudaCalls, CudaCx, CudaPlace, CudaSource, Launch};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::split::{Placement, Split};
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, DType, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};
use std::sync::Arc;

op! {
    /// Mean, or sum, over the rows whose target is not `ignore` of
    /// `lse(x) − (1 − smoothing)·x[target] − smoothing·mean(x)`; 0 if there is no such row, NaN if a target is no class. The
    /// second output is the log-sum-exp of each row.
    pub struct CrossEntropy = "cross_entropy" { ignore: i64, smoothing: f32, mean: bool }
}

op! {
    /// Backward of cross_entropy from (logits, targets, log-sum-exp, gradient of the loss). The logits may be those from class
    /// `first` on of `classes`.
    pub struct CrossEntropyGrad = "cross_entropy_grad" {
        ignore: i64, smoothing: f32, mean: bool, first: usize = 0, classes: usize = 0
    }
}

/// What PyTorch ignores by default.
pub const IGNORE: i64 = -100;

/// What a row's target means.
pub(crate) enum Target {
    Ignored,
    Class(usize),
    /// No class: reported as NaN, never read.
    Outside,
}

pub(crate) fn target(value: i64, ignore: i64, classes: usize) -> Target {
    match usize::try_from(value) {
        _ if value == ignore => Target::Ignored,
        Ok(class) if class < classes => Target::Class(class),
        _ => Target::Outside,
    }
}

/// What a sum is divided by: the number of rows that count, or one.
pub(crate) fn divisor(targets: impl Iterator<Item = i64>, ignore: i64, mean: bool) -> usize {
    if mean { targets.filter(|value| *value != ignore).count().max(1) } else { 1 }
}

/// A target numbers all classes, so they cannot be split; nor can the rows of a mean, which is over all that count.
fn index(
    logits: &Type,
    mean: bool,
    outputs: impl Fn(&[String], &[String]) -> (Vec<Vec<String>>, Vec<Vec<String>>),
) -> Index {
    let axes: Vec<String> = (0..logits.rank()).map(|dim| format!("d{dim}")).collect();
    let rows = &axes[..axes.len().saturating_sub(1)];
    let (inputs, outputs) = outputs(&axes, rows);
    let whole = if mean { axes.clone() } else { axes[rows.len()..].to_vec() };
    Index { inputs, outputs, whole, ..Index::default() }
}

fn check(logits: &Type, targets: &Type, smoothing: f32) -> Result<(), String> {
    let Some((classes, rows)) = logits.shape.split_last() else {
        return Err("the logits are a scalar; their last dim must be the classes".into());
    };
    if !logits.dtype.is_float() || targets.dtype != DType::I32 {
        return Err(format!("expects float logits and i32 targets, but got {logits} and {targets}; cast them"));
    }
    if *rows != targets.shape {
        return Err(format!("logits {logits} have {classes} classes in rows {rows:?}, but targets are {targets}"));
    }
    if *classes == 0 || !(0.0..1.0).contains(&smoothing) {
        return Err(format!("expects at least one class and 0 ≤ smoothing < 1, but got {classes} and {smoothing}"));
    }
    Ok(())
}

impl Op for CrossEntropy {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("logits"), Operand::i32("targets")], &["loss"]).saved(&["lse"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let parts = |axes: &[String], rows: &[String]| (vec![axes.into(), rows.into()], vec![vec![], rows.into()]);
        Some(index(inputs.first()?, self.mean, parts))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [logits, targets] = inputs else { return Err("takes two inputs, logits and targets".into()) };
        check(logits, targets, self.smoothing)?;
        Ok(vec![Type::f32([]), Type::f32(targets.shape.clone())])
    }
    fn flops_per_point(&self) -> u64 {
        3
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let Self { ignore, smoothing, mean } = *self;
        let op = CrossEntropyGrad { ignore, smoothing, mean, first: 0, classes: 0 };
        vec![Some(cx.input(0).then(op, &[cx.input(1), cx.output(1), cx.grad()])), None]
    }
    fn composite(&self) -> bool {
        true
    }
    fn widened(&self) -> Option<usize> {
        Some(0)
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let (logits, targets) = (inputs[0], inputs[1]);
        let classes = logits.shape[logits.shape.len() - 1];
        let smoothing = f64::from(self.smoothing);
        let (mut total, mut lse) = (0.0, Vec::new());
        for (row, value) in logits.data.chunks(classes).zip(&targets.data) {
            let (largest, sum) = define_sum_exp(row);
            lse.push(largest + sum.ln());
            let mean = || row.iter().map(|x| x - largest).sum::<f64>() / classes as f64;
            let smooth = if smoothing == 0.0 { 0.0 } else { smoothing * mean() };
            let loss = match target(*value as i64, self.ignore, classes) {
                Target::Ignored => continue,
                Target::Class(class) => sum.ln() - (1.0 - smoothing) * (row[class] - largest) - smooth,
                Target::Outside => f64::NAN,
            };
            total += loss;
        }
        let loss = total / divisor(targets.data.iter().map(|value| *value as i64), self.ignore, self.mean) as f64;
        vec![Dense::new([], vec![loss]), Dense::new(outputs[1].shape.clone(), lse)]
    }
}

impl Cpu for CrossEntropy {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (logits, targets) = (cx.f32(0), cx.i32(1));
        let classes = cx.inputs[0].ty.last();
        let (lse, losses) = (Address(cx.out_f32(1).as_mut_ptr()), &mut cx.scratch()[..targets.len()]);
        let address = Address(losses.as_mut_ptr());
        cx.team.chunks(targets.len(), rows_per_task(classes), |range, _| {
            for row in range {
                let (sum, loss) = self.row(&logits[row * classes..(row + 1) * classes], targets[row]);
                // SAFETY: tasks own disjoint rows.
                unsafe {
                    lse.slice(row, 1)[0] = sum;
                    address.slice(row, 1)[0] = loss;
                }
            }
        });
        let total = pairwise::sum(losses);
        let divisor = divisor(targets.iter().copied().map(i64::from), self.ignore, self.mean);
        cx.out_f32(0)[0] = total / divisor as f32;
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], _: usize) -> usize {
        inputs[1].elements() * 4
    }
}

impl CrossEntropy {
    /// Log-sum-exp and loss of one row. The loss is taken from the largest logit, so that big logits lose no digits.
    fn row(&self, row: &[f32], value: i32) -> (f32, f32) {
        let largest = simd::max(row);
        let log = Real::ln(sum_exp(row, largest));
        let loss = match target(i64::from(value), self.ignore, row.len()) {
            Target::Ignored => 0.0,
            Target::Class(class) => log - (1.0 - self.smoothing) * (row[class] - largest) - self.smooth(row, largest),
            Target::Outside => f32::NAN,
        };
        (largest + log, loss)
    }

    /// What smoothing takes off a row's loss. Without smoothing nothing, even where a logit is infinite.
    fn smooth(&self, row: &[f32], largest: f32) -> f32 {
        if self.smoothing == 0.0 {
            return 0.0;
        }
        let total = Pairwise::of(row.chunks(TILE).map(|tile| sum_from(tile, largest)));
        self.smoothing / row.len() as f32 * total
    }
}

vectorized! {
    /// `Σ (x − shift)` in the order of `simd::sum`.
    pub(crate) fn sum_from(tile: &[f32], shift: f32) -> f32 {
        let mut space = [0.0f32; TILE];
        let moved = &mut space[..tile.len()];
        for (moved, x) in moved.iter_mut().zip(tile) {
            *moved = *x - shift;
        }
        simd::sum(moved)
    }
}

impl Op for CrossEntropyGrad {
    fn operands(&self) -> Operands {
        Operands::without_rules(
            [Operand::float("logits"), Operand::i32("targets"), Operand::f32("lse"), Operand::f32("g")],
            &["dlogits"],
        )
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let parts =
            |axes: &[String], rows: &[String]| (vec![axes.into(), rows.into(), rows.into(), vec![]], vec![axes.into()]);
        Some(index(inputs.first()?, self.mean, parts))
    }
    /// With the log-sum-exp at hand, every class is for itself.
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let mut splits = self.index(inputs).map_or_else(Vec::new, |index| index.splits(inputs));
        let last = Placement::Shard(inputs[0].rank().saturating_sub(1));
        let placed = [last, Placement::Replicate, Placement::Replicate, Placement::Replicate];
        splits.push(Split::new("classes", inputs[0].last(), placed, [last]).ordered());
        splits
    }
    fn part_at(&self, split: &Split, first: usize, _: usize) -> Option<Arc<dyn Op>> {
        let classes = if self.classes == 0 { split.size } else { self.classes };
        let part = || Arc::new(Self { first: self.first + first, classes, ..self.clone() }) as Arc<dyn Op>;
        (split.axis == "classes").then(part)
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [logits, targets, lse, g] = inputs else {
            return Err("takes four inputs: logits, targets, log-sum-exp, gradient".into());
        };
        check(logits, targets, self.smoothing)?;
        if *lse != Type::f32(targets.shape.clone()) || *g != Type::f32([]) {
            return Err(format!("log-sum-exp must be f32 like the targets and the gradient f32[], not {lse} and {g}"));
        }
        Ok(vec![logits.clone()])
    }
    fn flops_per_point(&self) -> u64 {
        3
    }
    fn composite(&self) -> bool {
        true
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let [logits, targets, lse, g] = inputs else { unreachable!("infer checks the arity") };
        let (own, classes) = (outputs[0].last(), self.classes(outputs[0].last()));
        let smoothing = f64::from(self.smoothing);
        let divisor = divisor(targets.data.iter().map(|value| *value as i64), self.ignore, self.mean);
        let scale = g.data[0] / divisor as f64;
        let mut data = Vec::new();
        for ((row, value), lse) in logits.data.chunks(own).zip(&targets.data).zip(&lse.data) {
            let wanted = |at, class| smoothing / classes as f64 + if at == class { 1.0 - smoothing } else { 0.0 };
            data.extend(row.iter().enumerate().map(|(at, x)| match target(*value as i64, self.ignore, classes) {
                Target::Ignored => 0.0,
                Target::Class(class) => ((x - lse).exp() - wanted(at + self.first, class)) * scale,
                Target::Outside => f64::NAN,
            }));
        }
        vec![Dense::new(outputs[0].shape.clone(), data)]
    }
}

impl Cpu for CrossEntropyGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (targets, lse, g) = (cx.i32(1), cx.f32(2), cx.f32(3)[0]);
        let own = cx.outputs[0].ty.last();
        let scale = g / divisor(targets.iter().copied().map(i64::from), self.ignore, self.mean) as f32;
        let address = Address(cx.outputs[0].data.cast());
        cx.team.chunks(targets.len(), rows_per_task(own), |range, _| {
            for row in range {
                // SAFETY: tasks own disjoint rows.
                let out = unsafe { address.slice(row * own, own) };
                match target(i64::from(targets[row]), self.ignore, self.classes(own)) {
                    Target::Ignored => out.fill(0.0),
                    Target::Class(class) => self.row(cx, out, row * own, class, lse[row], scale),
                    Target::Outside => out.fill(f32::NAN),
                }
            }
        });
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
}

impl CrossEntropyGrad {
    /// All classes, of which these are some.
    fn classes(&self, own: usize) -> usize {
        if self.classes == 0 { own } else { self.classes }
    }

    /// The row of logits that begins at `start`, tile by tile: `out` may be the logits themselves.
    fn row(&self, cx: &CpuCx<'_>, out: &mut [f32], start: usize, class: usize, lse: f32, scale: f32) {
        let floor = self.smoothing / self.classes(out.len()) as f32;
        // None of these if the target is another rank's.
        let class = class.checked_sub(self.first);
        for (at, tile) in out.chunks_mut(TILE).enumerate() {
            bring(&cx.inputs[0], start + at * TILE, tile);
            // The target's probability must be taken before its tile is overwritten.
            let hit = class.and_then(|class| class.checked_sub(at * TILE)).filter(|hit| *hit < tile.len());
            let wanted = hit.map(|hit| (hit, Real::exp(tile[hit] - lse) - (1.0 - self.smoothing + floor)));
            gradient_tile(tile, lse, floor, scale);
            if let Some((hit, difference)) = wanted {
                tile[hit] = difference * scale;
            }
        }
    }
}

vectorized! {
    /// `x ← (e^(x − lse) − floor)·scale`.
    fn gradient_tile(tile: &mut [f32], lse: f32, floor: f32, scale: f32) {
        for x in tile {
            *x = (Real::exp(*x - lse) - floor) * scale;
        }
    }
}

/// Kernels over rows of logits, a row to so many threads.
const ROWS: &str = concat!(include_str!("rows.cuh"), include_str!("cross_entropy.cu"));
/// Kernels of one block over all rows.
pub(crate) const END: &str = include_str!("cross_entropy_end.cu");
/// Threads of that block.
const END_THREADS: usize = 1024;

/// The source over rows of so many logits, and the launch's grid and block.
fn row_source(cx: &CudaCx<'_>, rows: usize, width: usize) -> (CudaSource, [usize; 3], usize) {
    let (threads, pack) = (device::row_threads(width), device::pack(width, cx.inputs[0].dtype));
    let (grid, block) = device::row_grid(rows, threads);
    (device::typed(ROWS, cx).define("GROUP", threads).define("PACK", pack), grid, block)
}

/// The mean, or sum, of the rows' losses at `losses`: the first output. The targets are the second input.
pub(crate) fn end_calls(calls: &mut CudaCalls, losses: CudaPlace, rows: usize, ignore: i64, mean: bool) {
    let args = [
        losses.into(),
        device::input(1),
        device::output(0),
        device::long(rows),
        CudaArg::I64(ignore),
        device::flag(mean),
    ];
    calls.launch(Launch::new(CudaSource::new(END), "mean_loss", [1, 1, 1], END_THREADS, args));
}

impl Cuda for CrossEntropy {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (rows, classes) = (cx.inputs[1].elements(), cx.inputs[0].last());
        let mut calls = CudaCalls::new();
        let losses = calls.scratch(rows.max(1) * size_of::<f32>());
        if rows > 0 {
            let (source, grid, block) = row_source(cx, rows, classes);
            let args = [
                device::input(0),
                device::input(1),
                device::output(1),
                losses.into(),
                device::long(rows),
                device::long(classes),
                CudaArg::I64(self.ignore),
                CudaArg::F32(self.smoothing),
            ];
            calls.launch(Launch::new(source, "row_losses", grid, block, args));
        }
        end_calls(&mut calls, losses, rows, self.ignore, self.mean);
        calls
    }
}

impl Cuda for CrossEntropyGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (rows, own) = (cx.inputs[1].elements(), cx.inputs[0].last());
        let mut calls = CudaCalls::new();
        let scale = calls.scratch(size_of::<f32>());
        let [rows_arg, ignore] = [device::long(rows), CudaArg::I64(self.ignore)];
        let args = [device::input(1), device::input(3), scale.into(), rows_arg, ignore, device::flag(self.mean)];
        calls.launch(Launch::new(CudaSource::new(END), "gradient_scale", [1, 1, 1], END_THREADS, args));
        let (source, grid, block) = row_source(cx, rows, own);
        let args = [
            device::input(0),
            device::input(1),
            device::input(2),
            scale.into(),
            device::output(0),
            rows_arg,
            device::long(own),
            device::long(self.classes(own)),
            device::long(self.first),
            ignore,
            CudaArg::F32(self.smoothing),
        ];
        calls.launch(Launch::new(source, "row_gradients", grid, block, args));
        calls
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
}

/// (shape of the logits, lowest target, `ignore`, smoothing, mean); a lowest target of −1 tries targets outside the classes.
type Shape = (&'static [usize], i64, i64, f32, bool);

const SHAPES: &[Shape] = &[
    (&[5, 7], 0, IGNORE, 0.0, true),
    (&[5, 7], 0, IGNORE, 0.1, false),
    (&[4, 3], 0, 1, 0.0, true),
    (&[4, 3], 0, 1, 0.0, false),
    (&[2, 3, 17], 0, 2, 0.3, true),
    (&[9], 0, IGNORE, 0.0, true),
    (&[3, 1], 0, IGNORE, 0.2, true),
    (&[2, 1], 0, 0, 0.0, true),
    (&[2, 1], 0, 0, 0.0, false),
];

/// Long rows, and enough of them for several tasks; too many for finite differences.
const LONG_SHAPES: &[Shape] = &[
    (&[21, 1027], 0, 3, 0.1, true),
    (&[2, 2, 4099], 0, IGNORE, 0.0, false),
    (&[6, 2], -1, IGNORE, 0.0, true),
    (&[6, 2], -1, -1, 0.0, true),
];

fn arguments(shape: &[usize], lowest: i64) -> [Arg; 2] {
    let (classes, rows) = shape.split_last().expect("a shape has classes");
    [Arg::real(shape), Arg::index(rows, lowest, *classes as i64)]
}

impl Cases for CrossEntropy {
    fn cases() -> Vec<Case> {
        let case = |&(shape, lowest, ignore, smoothing, mean): &Shape| {
            Case::new(CrossEntropy { ignore, smoothing, mean }, arguments(shape, lowest))
        };
        let constant = |mut case: Case| {
            case.args[0].differentiate = false;
            case
        };
        SHAPES.iter().map(case).chain(LONG_SHAPES.iter().map(case).map(constant)).collect()
    }
}

impl Cases for CrossEntropyGrad {
    fn cases() -> Vec<Case> {
        let case = |&(shape, lowest, ignore, smoothing, mean): &Shape| {
            let [logits, targets] = arguments(shape, lowest);
            let rows = targets.ty.shape.clone();
            let lse = Arg::real(rows).within(1.0, 4.0).constant();
            let args = [logits.constant(), targets, lse, Arg::real([]).constant()];
            Case::new(CrossEntropyGrad { ignore, smoothing, mean, first: 0, classes: 0 }, args)
        };
        SHAPES.iter().chain(LONG_SHAPES).map(case).collect()
    }
}

pub const KINDS: &[OpKind] = &[
    OpKind::of::<CrossEntropy>().with_cuda::<CrossEntropy>(),
    OpKind::of::<CrossEntropyGrad>().with_cuda::<CrossEntropyGrad>(),
];

kolo_graph::methods! {
    /// Cross-entropy against whole-number targets.
    CrossEntropyMethods {
        /// The mean loss of rows of logits `[…, classes]` against i32 targets `[…]`; targets of −100 do not count.
        fn cross_entropy(self, targets: Tensor<'b>) -> Tensor<'b> { self.cross_entropy_with(targets, IGNORE, 0.0) }
        /// The same with the target to leave out and label smoothing, as PyTorch defines them.
        fn cross_entropy_with(self, targets: Tensor<'b>, ignore: i64, smoothing: f32) -> Tensor<'b> {
            self.then(CrossEntropy { ignore, smoothing, mean: true }, &[targets])
        }
        /// The sum over the rows whose target is not `ignore`, and how many they are (f32).
        fn cross_entropy_sum(self, targets: Tensor<'b>, ignore: i64, smoothing: f32) -> (Tensor<'b>, Tensor<'b>) {
            let sum = self.then(CrossEntropy { ignore, smoothing, mean: false }, &[targets]);
            let ignored = self.builder().full(ignore as f64, targets.ty());
            (sum, targets.not_equal(ignored).cast(DType::F32).sum_all())
        }
    }
}
