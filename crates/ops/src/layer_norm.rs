//! Layer normalisation over the last dim. Forward keeps each row's mean and `1/√(variance + eps)`; backward reads them.

use crate::tiles::Address;
use crate::vectorized;
use crate::{norm, row_norm};
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};

op! {
    /// `(x − mean)/√(variance + eps)·weight + bias` over the last dim; also each row's mean and `1/√(variance + eps)`.
    pub struct LayerNorm = "layer_norm" { eps: f32 }
}

impl Op for LayerNorm {
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
        row_norm::index(inputs, "r n!, n, n -> r n, r, r")
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let index = self.index(inputs).ok_or("takes x, weight and bias, and x has at least one dim")?;
        norm::infer(&index, inputs, &[Some(0), None, None])
    }
    fn flops_per_point(&self) -> u64 {
        7
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        row_norm::grad(cx, LayerNormGrad {})
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        row_norm::define(inputs, self.eps, outputs)
    }
}

impl Cpu for LayerNorm {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (weight, bias) = (cx.f32(1), cx.f32(2));
        let statistics = [1, 2].map(|at| Address(cx.out_f32(at).as_mut_ptr()));
        row_norm::for_rows(cx, weight.len(), |rows, x, y| {
            // SAFETY: tasks own disjoint rows.
            let [mean, rstd] = statistics.map(|address| unsafe { address.slice(rows.start, rows.len()) });
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

impl Cuda for LayerNorm {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        row_norm::forward_calls(cx, self.eps, true)
    }
}

impl Cases for LayerNorm {
    fn cases() -> Vec<Case> {
        row_norm::cases(|eps| LayerNorm { eps }, 2)
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
        row_norm::index(inputs, "r n!, n, r, r, r n -> r n, n, n")
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let index = self.index(inputs).ok_or("takes x, weight, mean, rstd and g, and x has at least one dim")?;
        norm::infer(&index, inputs, &[Some(0), Some(1), Some(1)])
    }
    fn flops_per_point(&self) -> u64 {
        13
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        row_norm::define_grad(inputs, outputs)
    }
}

impl Cpu for LayerNormGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let [x, weight, mean, rstd, g] = [0, 1, 2, 3, 4].map(|at| cx.f32(at));
        row_norm::for_blocks(cx, weight.len(), |row_norm::Block { rows, part, dx, sums }| {
            let (dweight, dbias) = sums.split_at_mut(weight.len());
            let (mean, rstd) = (&mean[rows.clone()], &rstd[rows]);
            differentiate_rows(dx, dweight, dbias, &x[part.clone()], weight, mean, rstd, &g[part]);
        });
    }
    fn scratch_bytes(&self, inputs: &[Type], outputs: &[Type], _: usize) -> usize {
        row_norm::scratch_bytes(inputs, outputs)
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

impl Cuda for LayerNormGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        row_norm::backward_calls(cx, true)
    }
}

impl Cases for LayerNormGrad {
    fn cases() -> Vec<Case> {
        row_norm::grad_cases(|| LayerNormGrad {}, true)
    }
}

pub const KINDS: &[OpKind] =
    &[OpKind::of::<LayerNorm>().with_cuda::<LayerNorm>(), OpKind::of::<LayerNormGrad>().with_cuda::<LayerNormGrad>()];

kolo_graph::methods! {
    /// Layer normalisation.
    LayerNormMethods {
        /// Normalises over the last dim, then scales by `weight` and shifts by `bias`, both of that dim's size.
        fn layer_norm(self, weight: Tensor<'b>, bias: Tensor<'b>, eps: f32) -> Tensor<'b> {
            self.then(LayerNorm { eps }, &[weight, bias])
        }
    }
}
