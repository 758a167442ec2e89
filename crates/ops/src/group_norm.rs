//! Group normalisation of `[n, c, …]`: one mean and variance per image and group of neighbouring channels.
//!
//! A group's planes lie one after the other, so its statistics are those of one long row.

use crate::device;
use crate::norm;
use crate::sums::{self, Values};
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::cuda::{Cuda, CudaArg, CudaCalls, CudaCx, CudaPlace, Launch};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::split::{Placement, Split};
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};
use std::sync::Arc;

/// `[n, c]` and the elements of a plane.
fn planes(shape: &[usize]) -> (usize, usize, usize) {
    (shape[0], shape[1], shape[2..].iter().product())
}

/// The index expression of `operands`, with `x` for `n c …`; images are independent, channels and planes stay whole.
fn images_index(inputs: &[Type], operands: &str) -> Option<Index> {
    let spatial = norm::axes(inputs.first()?.rank().checked_sub(2)?, true);
    Some(Index::parse(&operands.replace('x', &format!("n c! {spatial}"))))
}

/// The splits of the index expression, and by groups: neighbouring channels, with their weights and statistics.
fn by_images_and_groups(index: Option<Index>, inputs: &[Type], groups: usize) -> Vec<Split> {
    let Some(index) = index else { return Vec::new() };
    let placement = |axes: &Vec<String>| match axes.iter().position(|axis| axis == "c" || axis == "g") {
        Some(dim) => Placement::Shard(dim),
        None => Placement::Replicate,
    };
    let side = |operands: &[Vec<String>]| operands.iter().map(placement).collect::<Vec<_>>();
    let groups = Split::new("groups", groups, side(&index.inputs), side(&index.outputs));
    index.splits(inputs).into_iter().chain([groups]).collect()
}

op! {
    /// `(x − mean)/√(variance + eps)·weight + bias` per image and group; also mean and `1/√(variance + eps)` of each.
    pub struct GroupNorm = "group_norm" { groups: usize, eps: f32 }
}

impl Op for GroupNorm {
    fn operands(&self) -> Operands {
        Operands::new(
            [Operand::float("x"), Operand::float("weight").in_full(), Operand::float("bias").in_full()],
            &["y"],
        )
        .saved(&["mean", "rstd"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        images_index(inputs, "x, c, c -> x, n g!, n g")
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        by_images_and_groups(self.index(inputs), inputs, self.groups)
    }
    fn part(&self, split: &Split, units: usize) -> Option<Arc<dyn Op>> {
        (split.axis == "groups").then(|| Arc::new(GroupNorm { groups: units, eps: self.eps }) as Arc<dyn Op>)
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let index = self.index(inputs).ok_or("takes x, weight and bias, and x is [n, c, …]")?;
        let mut outputs = norm::infer(&index, inputs, &[Some(0), None, None])?;
        let channels = inputs[0].shape[1];
        if self.groups == 0 || !channels.is_multiple_of(self.groups) {
            return Err(format!("{channels} channels do not make {} equal groups; use a divisor", self.groups));
        }
        // The groups are no axis of an input, so the index expression does not know their number.
        outputs[1..].iter_mut().for_each(|statistic| statistic.shape[1] = self.groups);
        Ok(outputs)
    }
    fn flops_per_point(&self) -> u64 {
        6
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let inputs = [cx.input(0), cx.input(1), cx.output(1), cx.output(2), cx.grad()];
        let grads = cx.input(0).builder().apply_all(GroupNormGrad {}, &inputs);
        (0..3).map(|at| cx.needs(at).then_some(grads[at])).collect()
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let (x, weight, bias) = (inputs[0], inputs[1], inputs[2]);
        let (_, channels, size) = planes(&x.shape);
        let row = channels / self.groups * size;
        let [mut y, mut means, mut rstds] = [0, 1, 2].map(|at| Dense::zeros(outputs[at].shape.clone()));
        for (at, x) in x.data.chunks(row).enumerate() {
            let mean = x.iter().sum::<f64>() / row as f64;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row as f64;
            let rstd = 1.0 / (variance + f64::from(self.eps)).sqrt();
            (means.data[at], rstds.data[at]) = (mean, rstd);
            for (slot, x) in x.iter().enumerate() {
                let c = (at * row + slot) / size % channels;
                y.data[at * row + slot] = (x - mean) * (rstd * weight.data[c]) + bias.data[c];
            }
        }
        vec![y, means, rstds]
    }
}

impl Cpu for GroupNorm {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (x, weight, bias) = (cx.f32(0), cx.f32(1), cx.f32(2));
        let (images, channels, size) = planes(cx.shape(0));
        let members = channels / self.groups;
        let row = members * size;
        let [y, mean, rstd] = [0, 1, 2].map(|at| Address(cx.out_f32(at).as_mut_ptr()));
        cx.team.chunks(images * self.groups, norm::rows_per_task(row), |range, _| {
            for at in range {
                let first = at % self.groups * members;
                // SAFETY: tasks own disjoint groups.
                let y = unsafe { y.slice(at * row, row) };
                // SAFETY: as above.
                let [mean, rstd] = [mean, rstd].map(|address| unsafe { &mut address.slice(at, 1)[0] });
                let (weight, bias) = (&weight[first..first + members], &bias[first..first + members]);
                (*mean, *rstd) = normalize_group(y, &x[at * row..(at + 1) * row], weight, bias, self.eps);
            }
        });
    }
}

vectorized! {
    /// `y`, `x`: members × size; `weight`, `bias`: members. The group's mean and `1/√(variance + eps)`.
    fn normalize_group(y: &mut [f32], x: &[f32], weight: &[f32], bias: &[f32], eps: f32) -> (f32, f32) {
        let size = x.len() / weight.len();
        let (mean, rstd) = norm::moments(x, eps);
        for (member, (weight, bias)) in weight.iter().zip(bias).enumerate() {
            let part = member * size..(member + 1) * size;
            norm::affine(&mut y[part.clone()], &x[part], mean, rstd * weight, *bias);
        }
        (mean, rstd)
    }
}

const SOURCE: &str = concat!(include_str!("rows.cuh"), include_str!("group_norm.cu"));

impl Cuda for GroupNorm {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (images, channels, size) = planes(&cx.inputs[0].shape);
        let (members, rows) = (channels / self.groups, images * self.groups);
        let threads = device::row_threads(members * size);
        let (grid, block) = device::row_grid(rows, threads);
        let source = device::typed(SOURCE, cx).define("GROUP", threads).define("FORWARD", 1);
        let operands = (0..3).map(device::input).chain((0..3).map(device::output));
        let sizes = [rows, self.groups, members, size].map(device::long);
        let args = operands.chain(sizes).chain([CudaArg::F32(self.eps)]).collect::<Vec<_>>();
        Launch::new(source, "normalize_groups", grid, block, args).into()
    }
}

impl Cases for GroupNorm {
    fn cases() -> Vec<Case> {
        let args = |shape: &[usize]| [Arg::real(shape), Arg::real([shape[1]]), Arg::real([shape[1]])];
        let case = |shape: &[usize], groups| Case::new(GroupNorm { groups, eps: 1e-3 }, args(shape));
        let large =
            |shape: &[usize], groups| Case::new(GroupNorm { groups, eps: 1e-5 }, args(shape).map(Arg::constant));
        vec![
            case(&[3, 4], 2),
            case(&[2, 4, 2, 2], 2),
            case(&[2, 3, 5], 3),
            case(&[2, 3, 5], 1),
            case(&[1, 1, 17], 1),
            large(&[5, 32, 7, 7], 8),
            large(&[3, 4, 50, 50], 2),
        ]
    }
}

op! {
    /// Backward of group norm: (x, weight, mean, rstd, g) to the gradients of x, weight and bias.
    pub struct GroupNormGrad = "group_norm_grad" {}
}

impl Op for GroupNormGrad {
    fn operands(&self) -> Operands {
        Operands::without_rules(
            [
                Operand::float("x"),
                Operand::float("weight").in_full(),
                Operand::float("mean").in_full(),
                Operand::float("rstd").in_full(),
                Operand::float("g"),
            ],
            &["dx", "dweight", "dbias"],
        )
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        images_index(inputs, "x, c, n g!, n g, x -> x, c, c")
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        by_images_and_groups(self.index(inputs), inputs, inputs[2].shape[1])
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let index = self.index(inputs).ok_or("takes x, weight, mean, rstd and g, and x is [n, c, …]")?;
        let outputs = norm::infer(&index, inputs, &[Some(0), Some(1), Some(1)])?;
        let (channels, groups) = (inputs[0].shape[1], inputs[2].shape[1]);
        if groups == 0 || !channels.is_multiple_of(groups) {
            return Err(format!("{channels} channels do not make {groups} equal groups; use a divisor"));
        }
        Ok(outputs)
    }
    /// The groups are an axis of the statistics, but no factor of the work.
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        inputs[0].elements() as u64 * 9
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let [x, weight, mean, rstd, g] = [0, 1, 2, 3, 4].map(|at| &inputs[at].data);
        let (_, channels, size) = planes(&inputs[0].shape);
        let row = x.len() / mean.len();
        let [mut dx, mut dweight, mut dbias] = [0, 1, 2].map(|at| Dense::zeros(outputs[at].shape.clone()));
        for group in 0..mean.len() {
            let range = group * row..(group + 1) * row;
            let channel = |at: usize| at / size % channels;
            let distance = |at: usize| x[at] - mean[group];
            let (mut shift, mut slope) = (0.0, 0.0);
            for plane in range.clone().step_by(size) {
                let weight = weight[channel(plane)] / row as f64;
                shift += weight * g[plane..plane + size].iter().sum::<f64>();
                let product = (plane..plane + size).map(|at| g[at] * distance(at)).sum::<f64>();
                slope += weight * product;
                dweight.data[channel(plane)] += product * rstd[group];
            }
            slope *= rstd[group] * rstd[group];
            for at in range {
                dx.data[at] = rstd[group] * (g[at] * weight[channel(at)] - shift - distance(at) * slope);
                dbias.data[channel(at)] += g[at];
            }
        }
        vec![dx, dweight, dbias]
    }
}

impl Cpu for GroupNormGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let [x, weight, mean, rstd, g] = [0, 1, 2, 3, 4].map(|at| cx.f32(at));
        let (images, channels, size) = planes(cx.shape(0));
        let groups = cx.shape(2)[1];
        let members = channels / groups;
        let row = members * size;
        let (dweights, dbiases) = cx.scratch()[..2 * images * channels].split_at_mut(images * channels);
        let [dx, dweight, dbias] =
            [cx.out_f32(0).as_mut_ptr(), dweights.as_mut_ptr(), dbiases.as_mut_ptr()].map(Address);
        cx.team.chunks(images * groups, norm::rows_per_task(row), |range, _| {
            for at in range {
                let first = at % groups * members;
                // SAFETY: tasks own disjoint groups.
                let dx = unsafe { dx.slice(at * row, row) };
                // SAFETY: as above.
                let [dweight, dbias] = [dweight, dbias].map(|sums| unsafe { sums.slice(at * members, members) });
                let (x, g) = (&x[at * row..(at + 1) * row], &g[at * row..(at + 1) * row]);
                differentiate_group(dx, dweight, dbias, x, &weight[first..first + members], mean[at], rstd[at], g);
            }
        });
        norm::join_blocks(cx, dweights, channels, cx.out_f32(1));
        norm::join_blocks(cx, dbiases, channels, cx.out_f32(2));
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], _: usize) -> usize {
        2 * inputs[0].shape[0] * inputs[0].shape[1] * size_of::<f32>()
    }
}

vectorized! {
    /// `dx`, `x`, `g`: members × size; `dweight`, `dbias`, `weight`: members.
    fn differentiate_group(
        dx: &mut [f32], dweight: &mut [f32], dbias: &mut [f32],
        x: &[f32], weight: &[f32], mean: f32, rstd: f32, g: &[f32],
    ) {
        let (members, count) = (weight.len(), x.len() as f32);
        let size = x.len() / members;
        let (mut shift, mut slope) = (0.0, 0.0);
        for member in 0..members {
            let (x, g) = (&x[member * size..][..size], &g[member * size..][..size]);
            let [sum, product] = norm::sums([x, g], |[x, g], [sum, product]| {
                [sum + g, g.mul_add(x - mean, product)]
            });
            shift += sum * weight[member];
            slope += product * weight[member];
            dweight[member] = product * rstd;
            dbias[member] = sum;
        }
        let (shift, slope) = (shift / count, slope / count * rstd * rstd);
        for (member, weight) in weight.iter().enumerate() {
            let part = member * size..(member + 1) * size;
            for ((dx, x), g) in dx[part.clone()].iter_mut().zip(&x[part.clone()]).zip(&g[part]) {
                *dx = rstd * (mean - x).mul_add(slope, g * weight - shift);
            }
        }
    }
}

impl Cuda for GroupNormGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (images, channels, size) = planes(&cx.inputs[0].shape);
        let groups = cx.inputs[2].shape[1];
        let (members, rows, all) = (channels / groups, images * groups, images * channels);
        let threads = device::row_threads(size);
        let source = device::typed(SOURCE, cx).define("GROUP", threads);
        let mut calls = CudaCalls::new();
        let [sums, products, numbers] = [all, all, 2 * rows].map(|count| calls.scratch(count * size_of::<f32>()));
        let [x, weight, mean, rstd, g] = [0, 1, 2, 3, 4].map(device::input);
        let (grid, block) = device::row_grid(all, threads);
        let args = [&[x, mean, g, sums.into(), products.into()], &[all, members, size].map(device::long)[..]].concat();
        calls.launch(Launch::new(source.clone(), "plane_sums", grid, block, args));
        let per_group = [rows, groups, members, size].map(device::long);
        let args = [&[weight, rstd, sums.into(), products.into(), numbers.into()], &per_group[..]].concat();
        let grid = device::grid(rows, device::THREADS);
        calls.launch(Launch::new(source.clone(), "group_numbers", grid, device::THREADS, args));
        let count = cx.inputs[0].elements();
        let operands = [x, weight, mean, rstd, g, numbers.into(), device::output(0)];
        let args = [&operands[..], &[count, groups, members, size].map(device::long)].concat();
        let grid = device::grid(count, device::THREADS);
        calls.launch(Launch::new(source, "differentiate_groups", grid, device::THREADS, args));
        for (at, place) in [(1, products), (2, sums)] {
            let to = Values::new(CudaPlace::output(at), cx.outputs[at].dtype);
            sums::columns(&mut calls, Values::f32(place), [1, images, channels], to);
        }
        calls
    }
}

impl Cases for GroupNormGrad {
    fn cases() -> Vec<Case> {
        let case = |shape: &[usize], groups: usize| {
            let (c, rows) = ([shape[1]], [shape[0], groups]);
            let args = [Arg::real(shape), Arg::real(c), Arg::real(rows), Arg::positive(rows), Arg::real(shape)];
            Case::new(GroupNormGrad {}, args.map(Arg::constant))
        };
        vec![
            case(&[3, 4], 2),
            case(&[2, 4, 2, 2], 2),
            case(&[2, 3, 5], 3),
            case(&[1, 1, 17], 1),
            case(&[5, 32, 7, 7], 8),
            case(&[3, 4, 50, 50], 2),
        ]
    }
}

pub const KINDS: &[OpKind] =
    &[OpKind::of::<GroupNorm>().with_cuda::<GroupNorm>(), OpKind::of::<GroupNormGrad>().with_cuda::<GroupNormGrad>()];

kolo_graph::methods! {
    /// Group normalisation of `[n, c, …]`.
    GroupNormMethods {
        /// Normalises each image's groups of channels, then scales and shifts each channel.
        fn group_norm(self, groups: usize, weight: Tensor<'b>, bias: Tensor<'b>, eps: f32) -> Tensor<'b> {
            self.then(GroupNorm { groups, eps }, &[weight, bias])
        }
    }
}
