//! Root-mean-square normalisation over the last dim: layer norm without the mean and the bias.

use crate::norm::{self, ROWS_PER_BLOCK};
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Op, Operand, Operands, Tensor, Type, op};

op! {
    /// `x/√(mean of x² + eps)·weight` over the last dim; also each row's `1/√(mean of x² + eps)`.
    pub struct RmsNorm = "rms_norm" { eps: f32 }
}

impl Op for RmsNorm {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x"), Operand::float("weight")], &["y"]).saved(&["rstd"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let rows = norm::axes(inputs.first()?.rank().checked_sub(1)?, false);
        Some(Index::parse(&format!("{rows} n!, n -> {rows} n, {rows}")))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let index = self.index(inputs).ok_or("takes x and weight, and x has at least one dim")?;
        norm::infer(&index, inputs, &[Some(0), None])
    }
    fn flops_per_point(&self) -> u64 {
        4
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let inputs = [cx.input(0), cx.input(1), cx.output(1), cx.grad()];
        let grads = cx.input(0).builder().apply_all(RmsNormGrad {}, &inputs);
        (0..2).map(|at| cx.needs(at).then_some(grads[at])).collect()
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let (x, weight) = (inputs[0], inputs[1]);
        let n = weight.data.len();
        let [mut y, mut rstds] = [0, 1].map(|at| Dense::zeros(outputs[at].shape.clone()));
        for (row, x) in x.data.chunks(n).enumerate() {
            let square = x.iter().map(|x| x * x).sum::<f64>() / n as f64;
            rstds.data[row] = 1.0 / (square + f64::from(self.eps)).sqrt();
            for (at, x) in x.iter().enumerate() {
                y.data[row * n + at] = x * rstds.data[row] * weight.data[at];
            }
        }
        vec![y, rstds]
    }
}

impl Cpu for RmsNorm {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (x, weight) = (cx.f32(0), cx.f32(1));
        let n = weight.len();
        let [y, rstd] = [0, 1].map(|at| Address(cx.out_f32(at).as_mut_ptr()));
        cx.team.chunks(cx.outputs[1].ty.elements(), norm::rows_per_task(n), |rows, _| {
            let x = &x[rows.start * n..rows.end * n];
            // SAFETY: tasks own disjoint rows.
            let y = unsafe { y.slice(rows.start * n, x.len()) };
            // SAFETY: as above.
            let rstd = unsafe { rstd.slice(rows.start, rows.len()) };
            normalize_rows(y, rstd, x, weight, self.eps);
        });
    }
}

vectorized! {
    /// `y`, `x`: rows × n; `rstd`: rows; `weight`: n.
    fn normalize_rows(y: &mut [f32], rstd: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
        let n = weight.len();
        for (row, rstd) in rstd.iter_mut().enumerate() {
            let (x, y) = (&x[row * n..][..n], &mut y[row * n..][..n]);
            let [squares] = norm::sums([x], |[x], [sum]| [x.mul_add(x, sum)]);
            let r = norm::reciprocal_deviation(squares / n as f32, eps);
            *rstd = r;
            for at in 0..n {
                y[at] = x[at] * r * weight[at];
            }
        }
    }
}

impl Cases for RmsNorm {
    fn cases() -> Vec<Case> {
        let case =
            |shape: &[usize]| Case::new(RmsNorm { eps: 1e-3 }, [Arg::real(shape), Arg::real([shape[shape.len() - 1]])]);
        let large = |shape: [usize; 2]| {
            Case::new(RmsNorm { eps: 1e-5 }, [Arg::real(shape).constant(), Arg::real([shape[1]]).constant()])
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
    /// Backward of rms norm: (x, weight, rstd, g) to the gradients of x and weight.
    pub struct RmsNormGrad = "rms_norm_grad" {}
}

impl Op for RmsNormGrad {
    fn operands(&self) -> Operands {
        Operands::without_rules(
            [Operand::float("x"), Operand::float("weight"), Operand::float("rstd"), Operand::float("g")],
            &["dx", "dweight"],
        )
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let rows = norm::axes(inputs.first()?.rank().checked_sub(1)?, false);
        Some(Index::parse(&format!("{rows} n!, n, {rows}, {rows} n -> {rows} n, n")))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let index = self.index(inputs).ok_or("takes x, weight, rstd and g, and x has at least one dim")?;
        norm::infer(&index, inputs, &[Some(0), Some(1)])
    }
    fn flops_per_point(&self) -> u64 {
        10
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let [x, weight, rstd, g] = [0, 1, 2, 3].map(|at| &inputs[at].data);
        let n = weight.len();
        let [mut dx, mut dweight] = [0, 1].map(|at| Dense::zeros(outputs[at].shape.clone()));
        for (row, rstd) in rstd.iter().enumerate() {
            let range = row * n..(row + 1) * n;
            let normal: Vec<f64> = x[range.clone()].iter().map(|x| x * rstd).collect();
            let g = &g[range];
            let weighted: Vec<f64> = g.iter().zip(weight).map(|(g, weight)| g * weight).collect();
            let slope = weighted.iter().zip(&normal).map(|(g, normal)| g * normal).sum::<f64>() / n as f64;
            for at in 0..n {
                dx.data[row * n + at] = rstd * (weighted[at] - normal[at] * slope);
                dweight.data[at] += g[at] * normal[at];
            }
        }
        vec![dx, dweight]
    }
}

impl Cpu for RmsNormGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let [x, weight, rstd, g] = [0, 1, 2, 3].map(|at| cx.f32(at));
        let n = weight.len();
        let blocks = rstd.len().div_ceil(ROWS_PER_BLOCK);
        let partials = &mut cx.scratch()[..blocks * n];
        let [dx, sums] = [cx.out_f32(0).as_mut_ptr(), partials.as_mut_ptr()].map(Address);
        cx.team.chunks(blocks, norm::rows_per_task(ROWS_PER_BLOCK * n), |range, _| {
            for block in range {
                let rows = block * ROWS_PER_BLOCK..((block + 1) * ROWS_PER_BLOCK).min(rstd.len());
                let part = rows.start * n..rows.end * n;
                // SAFETY: tasks own disjoint blocks.
                let dx = unsafe { dx.slice(part.start, part.len()) };
                // SAFETY: as above.
                let dweight = unsafe { sums.slice(block * n, n) };
                differentiate_rows(dx, dweight, &x[part.clone()], weight, &rstd[rows], &g[part]);
            }
        });
        norm::join_blocks(cx, partials, n, cx.out_f32(1));
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], _: usize) -> usize {
        inputs[2].elements().div_ceil(ROWS_PER_BLOCK) * inputs[1].elements() * size_of::<f32>()
    }
}

vectorized! {
    /// `dx`, `x`, `g`: rows × n; `rstd`: rows; `weight`: n; `dweight`: n, summed over these rows.
    fn differentiate_rows(
        dx: &mut [f32], dweight: &mut [f32], x: &[f32], weight: &[f32], rstd: &[f32], g: &[f32],
    ) {
        let n = weight.len();
        let dweight = &mut dweight[..n];
        dweight.fill(0.0);
        for (row, &rstd) in rstd.iter().enumerate() {
            let (x, g, dx) = (&x[row * n..][..n], &g[row * n..][..n], &mut dx[row * n..][..n]);
            let [slope] = norm::sums([x, g, weight], |[x, g, weight], [slope]| [(g * weight).mul_add(x * rstd, slope)]);
            let slope = slope / n as f32;
            for at in 0..n {
                let normal = x[at] * rstd;
                dx[at] = rstd * (-normal).mul_add(slope, g[at] * weight[at]);
                dweight[at] = g[at].mul_add(normal, dweight[at]);
            }
        }
    }
}

impl Cases for RmsNormGrad {
    fn cases() -> Vec<Case> {
        let case = |shape: &[usize]| {
            let (rows, n) = shape.split_at(shape.len() - 1);
            let args = [Arg::real(shape), Arg::real(n), Arg::positive(rows), Arg::real(shape)];
            Case::new(RmsNormGrad {}, args.map(Arg::constant))
        };
        vec![case(&[7]), case(&[4, 1]), case(&[2, 3, 17]), case(&[100, 300]), case(&[2, 5000]), case(&[3000, 5])]
    }
}

pub const KINDS: &[OpKind] = &[OpKind::of::<RmsNorm>(), OpKind::of::<RmsNormGrad>()];

kolo_graph::methods! {
    /// Root-mean-square normalisation.
    RmsNormMethods {
        /// Divides by the root mean square over the last dim, then scales by `weight`, of that dim's size.
        fn rms_norm(self, weight: Tensor<'b>, eps: f32) -> Tensor<'b> {
            self.then(RmsNorm { eps }, &[weight])
        }
    }
}
