//! Layer normalisation over the last dim.
//!
//! A row of `x` has `n` elements. Forward keeps each row's mean and `1/√(variance + eps)`; backward reads them. The
//! gradients of weight and bias are summed over blocks of rows of a fixed size, so that threads cannot change them.

use crate::norm::{self, ROWS_PER_BLOCK};
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Op, Operand, Operands, Tensor, Type, op};

op! {
    /// `(x − mean)/√(variance + eps)·weight + bias` over the last dim; also each row's mean and `1/√(variance + eps)`.
    pub struct LayerNorm = "layer_norm" { eps: f32 }
}

impl Op for LayerNorm {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x"), Operand::float("weight"), Operand::float("bias")], &["y"])
            .saved(&["mean", "rstd"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let rows = norm::axes(inputs.first()?.rank().checked_sub(1)?, false);
        Some(Index::parse(&format!("{rows} n!, n, n -> {rows} n, {rows}, {rows}")))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let index = self.index(inputs).ok_or("takes x, weight and bias, and x has at least one dim")?;
        norm::infer(&index, inputs, &[Some(0), None, None])
    }
    fn flops_per_point(&self) -> u64 {
        7
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let inputs = [cx.input(0), cx.input(1), cx.output(1), cx.output(2), cx.grad()];
        let grads = cx.input(0).builder().apply_all(LayerNormGrad {}, &inputs);
        (0..3).map(|at| cx.needs(at).then_some(grads[at])).collect()
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let (x, weight, bias) = (inputs[0], inputs[1], inputs[2]);
        let n = weight.data.len();
        let [mut y, mut means, mut rstds] = [0, 1, 2].map(|at| Dense::zeros(outputs[at].shape.clone()));
        for (row, x) in x.data.chunks(n).enumerate() {
            let mean = x.iter().sum::<f64>() / n as f64;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
            let rstd = 1.0 / (variance + f64::from(self.eps)).sqrt();
            (means.data[row], rstds.data[row]) = (mean, rstd);
            for (at, x) in x.iter().enumerate() {
                y.data[row * n + at] = (x - mean) * rstd * weight.data[at] + bias.data[at];
            }
        }
        vec![y, means, rstds]
    }
}

impl Cpu for LayerNorm {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (x, weight, bias) = (cx.f32(0), cx.f32(1), cx.f32(2));
        let n = weight.len();
        let [y, mean, rstd] = [0, 1, 2].map(|at| Address(cx.out_f32(at).as_mut_ptr()));
        cx.team.chunks(cx.outputs[1].ty.elements(), norm::rows_per_task(n), |rows, _| {
            let x = &x[rows.start * n..rows.end * n];
            // SAFETY: tasks own disjoint rows.
            let y = unsafe { y.slice(rows.start * n, x.len()) };
            // SAFETY: as above.
            let [mean, rstd] = [mean, rstd].map(|address| unsafe { address.slice(rows.start, rows.len()) });
            normalize_rows(y, mean, rstd, x, weight, bias, self.eps);
        });
    }
}

vectorized! {
    /// `y`, `x`: rows × n; `mean`, `rstd`: rows; `weight`, `bias`: n.
    fn normalize_rows(
        y: &mut [f32], mean: &mut [f32], rstd: &mut [f32], x: &[f32], weight: &[f32], bias: &[f32], eps: f32,
    ) {
        let n = weight.len();
        let bias = &bias[..n];
        for (row, (mean, rstd)) in mean.iter_mut().zip(rstd).enumerate() {
            let (x, y) = (&x[row * n..][..n], &mut y[row * n..][..n]);
            let (m, r) = norm::moments(x, eps);
            (*mean, *rstd) = (m, r);
            for at in 0..n {
                y[at] = ((x[at] - m) * r).mul_add(weight[at], bias[at]);
            }
        }
    }
}

impl Cases for LayerNorm {
    fn cases() -> Vec<Case> {
        let case = |shape: &[usize]| {
            let n = shape[shape.len() - 1];
            Case::new(LayerNorm { eps: 1e-3 }, [Arg::real(shape), Arg::real([n]), Arg::real([n])])
        };
        let large = |shape: [usize; 2]| {
            let n = shape[1];
            let args = [Arg::real(shape).constant(), Arg::real([n]).constant(), Arg::real([n]).constant()];
            Case::new(LayerNorm { eps: 1e-5 }, args)
        };
        vec![
            case(&[7]),
            case(&[3, 5]),
            case(&[4, 1]),
            case(&[1, 33]),
            case(&[2, 3, 17]),
            large([90, 256]),
            large([3, 5000]),
            large([3000, 5]),
        ]
    }
}

op! {
    /// Backward of layer norm: (x, weight, mean, rstd, g) to the gradients of x, weight and bias.
    pub struct LayerNormGrad = "layer_norm_grad" {}
}

impl Op for LayerNormGrad {
    fn operands(&self) -> Operands {
        Operands::without_rules(
            [
                Operand::float("x"),
                Operand::float("weight"),
                Operand::float("mean"),
                Operand::float("rstd"),
                Operand::float("g"),
            ],
            &["dx", "dweight", "dbias"],
        )
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let rows = norm::axes(inputs.first()?.rank().checked_sub(1)?, false);
        Some(Index::parse(&format!("{rows} n!, n, {rows}, {rows}, {rows} n -> {rows} n, n, n")))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let index = self.index(inputs).ok_or("takes x, weight, mean, rstd and g, and x has at least one dim")?;
        norm::infer(&index, inputs, &[Some(0), Some(1), Some(1)])
    }
    fn flops_per_point(&self) -> u64 {
        13
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let [x, weight, mean, rstd, g] = [0, 1, 2, 3, 4].map(|at| &inputs[at].data);
        let n = weight.len();
        let [mut dx, mut dweight, mut dbias] = [0, 1, 2].map(|at| Dense::zeros(outputs[at].shape.clone()));
        for row in 0..mean.len() {
            let range = row * n..(row + 1) * n;
            let normal: Vec<f64> = x[range.clone()].iter().map(|x| (x - mean[row]) * rstd[row]).collect();
            let g = &g[range];
            let weighted: Vec<f64> = g.iter().zip(weight).map(|(g, weight)| g * weight).collect();
            let shift = weighted.iter().sum::<f64>() / n as f64;
            let slope = weighted.iter().zip(&normal).map(|(g, normal)| g * normal).sum::<f64>() / n as f64;
            for at in 0..n {
                dx.data[row * n + at] = rstd[row] * (weighted[at] - shift - normal[at] * slope);
                dweight.data[at] += g[at] * normal[at];
                dbias.data[at] += g[at];
            }
        }
        vec![dx, dweight, dbias]
    }
}

impl Cpu for LayerNormGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let [x, weight, mean, rstd, g] = [0, 1, 2, 3, 4].map(|at| cx.f32(at));
        let n = weight.len();
        let blocks = mean.len().div_ceil(ROWS_PER_BLOCK);
        let partials = &mut cx.scratch()[..blocks * 2 * n];
        let [dx, sums] = [cx.out_f32(0).as_mut_ptr(), partials.as_mut_ptr()].map(Address);
        cx.team.chunks(blocks, norm::rows_per_task(ROWS_PER_BLOCK * n), |range, _| {
            for block in range {
                let rows = block * ROWS_PER_BLOCK..((block + 1) * ROWS_PER_BLOCK).min(mean.len());
                let part = rows.start * n..rows.end * n;
                // SAFETY: tasks own disjoint blocks.
                let dx = unsafe { dx.slice(part.start, part.len()) };
                // SAFETY: as above.
                let (dweight, dbias) = unsafe { sums.slice(block * 2 * n, 2 * n) }.split_at_mut(n);
                let (mean, rstd) = (&mean[rows.clone()], &rstd[rows]);
                differentiate_rows(dx, dweight, dbias, &x[part.clone()], weight, mean, rstd, &g[part]);
            }
        });
        norm::join_blocks(cx, partials, 2 * n, cx.out_f32(1));
        norm::join_blocks(cx, &partials[n..], 2 * n, cx.out_f32(2));
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], _: usize) -> usize {
        inputs[2].elements().div_ceil(ROWS_PER_BLOCK) * 2 * inputs[1].elements() * size_of::<f32>()
    }
}

vectorized! {
    /// `dx`, `x`, `g`: rows × n; `mean`, `rstd`: rows; `weight`: n; `dweight`, `dbias`: n, summed over these rows.
    fn differentiate_rows(
        dx: &mut [f32], dweight: &mut [f32], dbias: &mut [f32],
        x: &[f32], weight: &[f32], mean: &[f32], rstd: &[f32], g: &[f32],
    ) {
        let n = weight.len();
        let (dweight, dbias) = (&mut dweight[..n], &mut dbias[..n]);
        dweight.fill(0.0);
        dbias.fill(0.0);
        for (row, (&mean, &rstd)) in mean.iter().zip(rstd).enumerate() {
            let (x, g, dx) = (&x[row * n..][..n], &g[row * n..][..n], &mut dx[row * n..][..n]);
            let [shift, slope] = norm::sums([x, g, weight], |[x, g, weight], [shift, slope]| {
                let weighted = g * weight;
                [shift + weighted, weighted.mul_add((x - mean) * rstd, slope)]
            });
            let (shift, slope) = (shift / n as f32, slope / n as f32);
            for at in 0..n {
                let normal = (x[at] - mean) * rstd;
                dx[at] = rstd * (-normal).mul_add(slope, g[at] * weight[at] - shift);
            }
            // A loop of its own: fewer streams at once, and the row is in the first-level cache.
            for at in 0..n {
                let normal = (x[at] - mean) * rstd;
                dweight[at] = g[at].mul_add(normal, dweight[at]);
                dbias[at] += g[at];
            }
        }
    }
}

impl Cases for LayerNormGrad {
    fn cases() -> Vec<Case> {
        let case = |shape: &[usize]| {
            let (rows, n) = shape.split_at(shape.len() - 1);
            let args = [Arg::real(shape), Arg::real(n), Arg::real(rows), Arg::positive(rows), Arg::real(shape)];
            Case::new(LayerNormGrad {}, args.map(Arg::constant))
        };
        vec![case(&[7]), case(&[4, 1]), case(&[2, 3, 17]), case(&[100, 300]), case(&[2, 5000]), case(&[3000, 5])]
    }
}

pub const KINDS: &[OpKind] = &[OpKind::of::<LayerNorm>(), OpKind::of::<LayerNormGrad>()];

kolo_graph::methods! {
    /// Layer normalisation.
    LayerNormMethods {
        /// Normalises over the last dim, then scales by `weight` and shifts by `bias`, both of that dim's size.
        fn layer_norm(self, weight: Tensor<'b>, bias: Tensor<'b>, eps: f32) -> Tensor<'b> {
            self.then(LayerNorm { eps }, &[weight, bias])
        }
    }
}
