//! Root-mean-square normalisation over the last dim: layer norm without the mean and the bias.

use crate::tiles::Address;
use crate::vectorized;
use crate::{norm, row_norm};
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};

op! {
    /// `x/√(mean of x² + eps)·weight` over the last dim; also each row's `1/√(mean of x² + eps)`.
    pub struct RmsNorm = "rms_norm" { eps: f32 }
}

impl Op for RmsNorm {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x"), Operand::float("weight").in_full()], &["y"]).saved(&["rstd"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        row_norm::index(inputs, "r n!, n -> r n, r")
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let index = self.index(inputs).ok_or("takes x and weight, and x has at least one dim")?;
        norm::infer(&index, inputs, &[Some(0), None])
    }
    fn flops_per_point(&self) -> u64 {
        4
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        row_norm::grad(cx, RmsNormGrad {})
    }
    fn composite(&self) -> bool {
        true
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        row_norm::define(inputs, self.eps, outputs)
    }
}

impl Cpu for RmsNorm {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (weight, rstd) = (cx.f32(1), Address(cx.out_f32(1).as_mut_ptr()));
        row_norm::for_rows(cx, weight.len(), |rows, x, y| {
            // SAFETY: tasks own disjoint rows.
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

impl Cuda for RmsNorm {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        row_norm::forward_calls(cx, self.eps, false)
    }
}

impl Cases for RmsNorm {
    fn cases() -> Vec<Case> {
        row_norm::cases(|eps| RmsNorm { eps }, 1)
    }
}

op! {
    /// Backward of rms norm: (x, weight, rstd, g) to the gradients of x and weight.
    pub struct RmsNormGrad = "rms_norm_grad" {}
}

impl Op for RmsNormGrad {
    fn operands(&self) -> Operands {
        Operands::without_rules(
            [
                Operand::float("x"),
                Operand::float("weight").in_full(),
                Operand::float("rstd").in_full(),
                Operand::float("g"),
            ],
            &["dx", "dweight"],
        )
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        row_norm::index(inputs, "r n!, n, r, r n -> r n, n")
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let index = self.index(inputs).ok_or("takes x, weight, rstd and g, and x has at least one dim")?;
        norm::infer(&index, inputs, &[Some(0), Some(1)])
    }
    fn flops_per_point(&self) -> u64 {
        10
    }
    fn composite(&self) -> bool {
        true
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        row_norm::define_grad(inputs, outputs)
    }
}

impl Cpu for RmsNormGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let [x, weight, rstd, g] = [0, 1, 2, 3].map(|at| cx.f32(at));
        row_norm::for_blocks(cx, weight.len(), |row_norm::Block { rows, part, dx, sums }| {
            differentiate_rows(dx, sums, &x[part.clone()], weight, &rstd[rows], &g[part]);
        });
    }
    fn scratch_bytes(&self, inputs: &[Type], outputs: &[Type], _: usize) -> usize {
        row_norm::scratch_bytes(inputs, outputs)
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

impl Cuda for RmsNormGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        row_norm::backward_calls(cx, false)
    }
}

impl Cases for RmsNormGrad {
    fn cases() -> Vec<Case> {
        row_norm::grad_cases(|| RmsNormGrad {}, false)
    }
}

pub const KINDS: &[OpKind] =
    &[OpKind::of::<RmsNorm>().with_cuda::<RmsNorm>(), OpKind::of::<RmsNormGrad>().with_cuda::<RmsNormGrad>()];

kolo_graph::methods! {
    /// Root-mean-square normalisation.
    RmsNormMethods {
        /// Divides by the root mean square over the last dim, then scales by `weight`, of that dim's size.
        fn rms_norm(self, weight: Tensor<'b>, eps: f32) -> Tensor<'b> {
            self.then(RmsNorm { eps }, &[weight])
        }
    }
}
