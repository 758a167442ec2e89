//! Matrix product and the linear layer.

use crate::cast::CastMethods;
use crate::elementwise::ElementwiseMethods;
use crate::gemm::{self, Gemm, Lines, Output, Right, Start, Taken};
use crate::halves::{is_half, widen};
use crate::reduce::ReduceMethods;
use crate::sums::{self, Values};
use crate::tiles::Address;
use kolo_graph::cuda::{Cuda, CudaCalls, CudaCx, CudaMatrix, CudaPlace, Product};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::types::broadcast;
use kolo_graph::{
    Arg, Case, Cases, Cpu, CpuCx, DType, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, Work, op,
};
use std::sync::Arc;

op! {
    /// `c[…, m, n] = Σ_k a[…, m, k] · b[…, k, n]`; `ta` and `tb` say that an operand is stored transposed. The leading
    /// dims broadcast: right-aligned, those of size one or missing stretch, and their gradient is summed. The result of halves
    /// is f32 if `wide`, else as its operands.
    pub struct MatMul = "matmul" { ta: bool, tb: bool, wide: bool = false }
}

impl MatMul {
    /// A product whose result has the type of its operands.
    pub fn new(ta: bool, tb: bool) -> Self {
        Self { ta, tb, wide: false }
    }

    /// None if the inputs are not two stacks of matrices whose leading dims broadcast.
    fn expression(&self, inputs: &[Type]) -> Option<Index> {
        let [a, b] = inputs else { return None };
        let stacks = [stack(&a.shape)?, stack(&b.shape)?];
        let batch = broadcast(stacks[0], stacks[1])?;
        let axes = |own: &[usize]| -> String {
            let skip = batch.len() - own.len();
            let axis =
                |dim: usize| if own[dim] == batch[skip + dim] { format!("b{} ", skip + dim) } else { "_ ".into() };
            (0..own.len()).map(axis).collect()
        };
        let (left, right) = (if self.ta { "k m" } else { "m k" }, if self.tb { "n k" } else { "k n" });
        let [a, b, c] = [axes(stacks[0]), axes(stacks[1]), axes(&batch)];
        Some(Index::parse(&format!("{a}{left}, {b}{right} -> {c}m n")))
    }
}

/// The leading dims of a stack of matrices.
fn stack(shape: &[usize]) -> Option<&[usize]> {
    Some(&shape[..shape.len().checked_sub(2)?])
}

/// Which matrix of a stack of shape `own` meets number `at` of the stack of shape `whole` that it stretches to.
fn matrix_at(own: &[usize], whole: &[usize], mut at: usize) -> usize {
    let (mut place, mut stride) = (0, 1);
    for dim in (0..own.len()).rev() {
        let size = whole[whole.len() - own.len() + dim];
        if own[dim] != 1 {
            place += at % size * stride;
        }
        (at, stride) = (at / size, stride * own[dim]);
    }
    place
}

/// The type of all operands of a product.
pub fn one_float_type(inputs: &[Type]) -> Result<DType, String> {
    match inputs.iter().find(|ty| !ty.dtype.is_float() || ty.dtype != inputs[0].dtype) {
        Some(ty) => Err(format!("multiplies floats of one type, not {ty}; cast it")),
        None => Ok(inputs[0].dtype),
    }
}

/// The type of a product's result.
fn result_type(inputs: &[Type], wide: bool) -> Result<DType, String> {
    one_float_type(inputs).map(|dtype| if wide { DType::F32 } else { dtype })
}

impl Op for MatMul {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("a"), Operand::float("b")], &["c"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        self.expression(inputs)
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [a, b] = inputs else { return Err("takes two inputs".into()) };
        let index = self.expression(inputs).ok_or_else(|| {
            format!("needs two matrices, or stacks of them whose leading dims are equal or broadcast, not {a} and {b}")
        })?;
        Ok(vec![Type::new(result_type(inputs, self.wide)?, index.output_shapes(inputs)?[0].clone())])
    }
    fn wide(&self) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { wide: true, ..self.clone() }))
    }
    fn flops_per_point(&self) -> u64 {
        2
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let (a, b) = (cx.input(0), cx.input(1));
        let g = cx.grad().cast(a.dtype());
        let product = |x: Tensor<'b>, y: Tensor<'b>, ta, tb| x.then(MatMul::new(ta, tb), &[y]);
        let da = || if self.ta { product(b, g, self.tb, true) } else { product(g, b, false, !self.tb) };
        let db = || if self.tb { product(g, a, true, self.ta) } else { product(a, g, !self.ta, false) };
        vec![cx.needs(0).then(|| da().sum_to(&a)), cx.needs(1).then(|| db().sum_to(&b))]
    }
    fn work(&self) -> Work {
        Work::Product
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let (a, b) = (inputs[0], inputs[1]);
        let depth = a.shape[a.shape.len() - if self.ta { 2 } else { 1 }];
        vec![Dense::from_fn(outputs[0].shape.clone(), |at| {
            let (batch, last) = at.split_at(at.len() - 2);
            let pick = |x: &Dense, row: usize, column: usize| x.get(&[batch, &[row, column]].concat());
            (0..depth)
                .map(|k| {
                    let x = if self.ta { pick(a, k, last[0]) } else { pick(a, last[0], k) };
                    let y = if self.tb { pick(b, last[1], k) } else { pick(b, k, last[1]) };
                    x * y
                })
                .sum()
        })]
    }
}

impl Cpu for MatMul {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let out = cx.out_shape(0);
        let (m, n) = (out[out.len() - 2], out[out.len() - 1]);
        let shape = cx.shape(0);
        let k = shape[shape.len() - if self.ta { 2 } else { 1 }];
        let shape = [m, n, k];
        let whole = &out[..out.len() - 2];
        let batch: usize = whole.iter().product();
        let scratch = cx.scratch();
        let matrix = |input: usize, at: usize| {
            let shape = cx.shape(input);
            matrix_at(&shape[..shape.len() - 2], whole, at)
        };
        let left = |at: usize| {
            let (line_stride, k_stride) = if self.ta { (1, m) } else { (k, 1) };
            Lines::of(&cx.inputs[0], matrix(0, at) * m * k, m * k, line_stride, k_stride)
        };
        let right = |at: usize| {
            let (line_stride, k_stride) = if self.tb { (k, 1) } else { (1, n) };
            Lines::of(&cx.inputs[1], matrix(1, at) * n * k, n * k, line_stride, k_stride)
        };
        if let Some(taker) = cx.taker {
            let sink = Taken { taker, stride: n };
            let (a, b) = (left(0), right(0));
            return Gemm { shape, a: &a, b: Right::Fresh(&b), c: &sink, start: Start::Zero }.run_on(cx.team, scratch);
        }
        let sink = |at: usize| Output::of(&cx.outputs[0], at * m * n, n);
        if batch == 1 || batch < cx.team.threads() {
            for at in 0..batch {
                let (a, b, c) = (left(at), right(at), sink(at));
                Gemm { shape, a: &a, b: Right::Fresh(&b), c: &c, start: Start::Zero }.run_on(cx.team, scratch);
            }
            return;
        }
        let lent = Address(scratch.as_mut_ptr());
        let own = gemm::scratch_bytes_of(cx.outputs[0].ty.dtype, 0, 1) / 4;
        cx.team.run(batch, |at, thread| {
            // SAFETY: each thread has its own scratch.
            let scratch = unsafe { lent.slice(thread * own, own) };
            let (a, b, c) = (left(at), right(at), sink(at));
            Gemm { shape, a: &a, b: Right::Fresh(&b), c: &c, start: Start::Zero }.run(scratch);
        });
    }
    fn scratch_bytes(&self, _: &[Type], outputs: &[Type], threads: usize) -> usize {
        gemm::scratch_bytes_of(outputs[0].dtype, 0, threads)
    }
    fn takes_halves(&self) -> bool {
        true
    }
    fn gives_tiles(&self, inputs: &[Type]) -> bool {
        inputs.iter().all(|ty| ty.rank() == 2) && inputs[0].shape[if self.ta { 0 } else { 1 }] <= gemm::K_BLOCK
    }
}

/// A matrix whose rows lie one behind the other in memory, of which `lines` by `k` elements are multiplied.
fn cuda_matrix(place: CudaPlace, ty: &Type, row_stride: usize, transposed: bool) -> CudaMatrix {
    CudaMatrix { place, dtype: ty.dtype, row_stride, batch_stride: 0, transposed }
}

impl Cuda for MatMul {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let [a, b, c] = [&cx.inputs[0], &cx.inputs[1], &cx.outputs[0]];
        let out = &c.shape;
        let (m, n) = (out[out.len() - 2], out[out.len() - 1]);
        let k = a.shape[a.rank() - if self.ta { 2 } else { 1 }];
        let whole = &out[..out.len() - 2];
        let count: usize = whole.iter().product();
        let left = cuda_matrix(CudaPlace::input(0), a, if self.ta { m } else { k }, self.ta);
        let right = cuda_matrix(CudaPlace::input(1), b, if self.tb { k } else { n }, self.tb);
        let result = cuda_matrix(CudaPlace::output(0), c, n, false);
        let mut calls = CudaCalls::new();
        // Runs of the stack in which both operands step evenly: usually all of it.
        let place = |ty: &Type, at: usize| matrix_at(&ty.shape[..ty.rank() - 2], whole, at);
        let mut start = 0;
        while start < count {
            let step = |ty: &Type| match start + 1 < count {
                true => place(ty, start + 1) as i64 - place(ty, start) as i64,
                false => 0,
            };
            let steps = [step(a).max(0), step(b).max(0)];
            let even = |ty: &Type, at: usize, step: i64| {
                place(ty, at) as i64 == place(ty, start) as i64 + step * (at - start) as i64
            };
            let end = (start + 1..count).find(|at| !(even(a, *at, steps[0]) && even(b, *at, steps[1])));
            let end = end.unwrap_or(count);
            let matrix = |matrix: CudaMatrix, first: usize, step: usize, size: usize| CudaMatrix {
                place: matrix.place.further(first * size * matrix.dtype.bytes()),
                batch_stride: step * size,
                ..matrix
            };
            calls.product(Product {
                rows: m,
                columns: n,
                depth: k,
                batch: end - start,
                a: matrix(left, place(a, start), steps[0] as usize, m * k),
                b: matrix(right, place(b, start), steps[1] as usize, k * n),
                c: matrix(result, start, 1, m * n),
                alpha: 1.0,
                beta: 0.0,
                bias: None,
            });
            start = end;
        }
        calls
    }
}

impl Cases for MatMul {
    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
            for (m, n, k) in [(3, 4, 5), (1, 1, 1), (13, 2, 3), (2, 17, 2)] {
                let a = if ta { [k, m] } else { [m, k] };
                let b = if tb { [n, k] } else { [k, n] };
                cases.push(Case::new(MatMul::new(ta, tb), [Arg::real(a), Arg::real(b)]));
            }
            let a = if ta { [2, 3, 4, 2] } else { [2, 3, 2, 4] };
            let b = if tb { [2, 3, 5, 4] } else { [2, 3, 4, 5] };
            cases.push(Case::new(MatMul::new(ta, tb), [Arg::real(a), Arg::real(b)]));
        }
        let big = |a: [usize; 2], b: [usize; 2]| [Arg::real(a).constant(), Arg::real(b).constant()];
        // Every way that a product can go: operands read where they lie, packed by the kernel, exchanged, with remainders.
        for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
            for (m, n, k) in [(70, 130, 300), (30, 140, 270), (64, 131, 70)] {
                let (a, b) = (if ta { [k, m] } else { [m, k] }, if tb { [n, k] } else { [k, n] });
                cases.push(Case::new(MatMul::new(ta, tb), big(a, b)));
            }
        }
        cases.push(Case::new(MatMul::new(false, false), big([3, 0], [0, 2])));
        // Leading dims that stretch: of size one, missing, on either side, on both.
        let stacks = |ta, tb, a: &[usize], b: &[usize]| Case::new(MatMul::new(ta, tb), [Arg::real(a), Arg::real(b)]);
        cases.extend([
            stacks(false, false, &[2, 3, 4], &[4, 5]),
            stacks(false, true, &[3, 4], &[2, 5, 4]),
            stacks(true, false, &[2, 1, 4, 3], &[3, 4, 2]),
            stacks(false, false, &[2, 1, 3, 2], &[1, 3, 2, 4]),
            stacks(true, true, &[1, 4, 3], &[2, 2, 5, 4]),
            stacks(false, false, &[1, 1, 1], &[3, 1, 2]),
        ]);
        cases
    }
}

op! {
    /// `y = x·W + b` over the last dim of `x`; `W` is `[in, out]`, or `[out, in]` if `transposed`, as PyTorch keeps it. The
    /// result of halves is f32 if `wide`, else as its operands.
    pub struct Linear = "linear" { transposed: bool, wide: bool = false }
}

impl Linear {
    /// A layer whose result has the type of its operands.
    pub fn new(transposed: bool) -> Self {
        Self { transposed, wide: false }
    }

    fn expression(&self, rank: usize) -> Index {
        let rows: String = (0..rank.saturating_sub(1)).map(|dim| format!("r{dim} ")).collect();
        let weight = if self.transposed { "n k" } else { "k n" };
        Index::parse(&format!("{rows}k, {weight}, +n -> {rows}n"))
    }
}

impl Op for Linear {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x"), Operand::float("weight"), Operand::float("bias")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        Some(self.expression(inputs.first()?.rank()))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [x, _, _] = inputs else { return Err("takes x, weight and bias".into()) };
        let shapes = self.expression(x.rank()).output_shapes(inputs)?;
        Ok(vec![Type::new(result_type(inputs, self.wide)?, shapes[0].clone())])
    }
    fn wide(&self) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Self { wide: true, ..self.clone() }))
    }
    fn flops_per_point(&self) -> u64 {
        2
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let (x, weight) = (cx.input(0), cx.input(1));
        let g = cx.grad().cast(x.dtype());
        let flat = |t: Tensor<'b>| {
            let shape = t.shape();
            let last = shape.last().copied().unwrap_or(1);
            t.reshape_to([shape.iter().product::<usize>() / last.max(1), last])
        };
        let (flat_x, flat_g) = (flat(x), flat(g));
        let dx = || flat_g.then(MatMul::new(false, !self.transposed), &[weight]).reshape_to(x.shape());
        let dw = || match self.transposed {
            true => flat_g.then(MatMul::new(true, false), &[flat_x]),
            false => flat_x.then(MatMul::new(true, false), &[flat_g]),
        };
        vec![cx.needs(0).then(dx), cx.needs(1).then(dw), cx.needs(2).then(|| flat_g.sum(&[0]).cast(x.dtype()))]
    }
    fn work(&self) -> Work {
        Work::Product
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let (x, weight, bias) = (inputs[0], inputs[1], inputs[2]);
        let depth = x.shape[x.shape.len() - 1];
        vec![Dense::from_fn(outputs[0].shape.clone(), |at| {
            let (row, n) = (&at[..at.len() - 1], at[at.len() - 1]);
            let entry = |k: usize| if self.transposed { weight.get(&[n, k]) } else { weight.get(&[k, n]) };
            bias.data[n] + (0..depth).map(|k| x.get(&[row, &[k]].concat()) * entry(k)).sum::<f64>()
        })]
    }
}

impl Cpu for Linear {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let k = cx.inputs[0].ty.last();
        let n = cx.outputs[0].ty.last();
        let m = cx.outputs[0].ty.elements() / n.max(1);
        let x = Lines::of(&cx.inputs[0], 0, m * k, k, 1);
        let (line_stride, k_stride) = if self.transposed { (k, 1) } else { (1, n) };
        let weight = Lines::of(&cx.inputs[1], 0, n * k, line_stride, k_stride);
        let sink = Output::of(&cx.outputs[0], 0, n);
        let (bias, scratch) = full_bias(cx);
        let gemm = Gemm { shape: [m, n, k], a: &x, b: Right::Fresh(&weight), c: &sink, start: Start::Bias(bias) };
        gemm.run_on(cx.team, scratch);
    }
    fn scratch_bytes(&self, inputs: &[Type], outputs: &[Type], threads: usize) -> usize {
        gemm::scratch_bytes_of(outputs[0].dtype, bias_scratch_len(inputs), threads)
    }
    fn takes_halves(&self) -> bool {
        true
    }
}

/// Floats that [`full_bias`] wants.
pub(crate) fn bias_scratch_len(inputs: &[Type]) -> usize {
    if is_half(inputs[2].dtype) { inputs[2].elements() } else { 0 }
}

/// A layer's bias, its third input, in f32, and the scratch of its product.
pub(crate) fn full_bias<'a>(cx: &CpuCx<'a>) -> (&'a [f32], &'a mut [f32]) {
    let (bias, scratch) = (&cx.inputs[2], cx.scratch());
    if !is_half(bias.ty.dtype) {
        return (cx.f32(2), scratch);
    }
    let (scratch, widened) = scratch.split_at_mut(scratch.len() - bias.ty.elements());
    widen(bias.ty.dtype, cx.u16(2), widened);
    (widened, scratch)
}

impl Cuda for Linear {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (k, n) = (cx.inputs[0].last(), cx.outputs[0].last());
        let mut calls = CudaCalls::new();
        // A product adds a bias of its result's type: that of halves is widened first if the result is.
        let [given, made] = [cx.inputs[2].dtype, cx.outputs[0].dtype];
        let mut bias = CudaPlace::input(2);
        if given != made {
            let widened = Values::new(calls.scratch(n * made.bytes()), made);
            sums::columns(&mut calls, Values::new(bias, given), [1, 1, n], widened);
            bias = widened.place;
        }
        calls.product(Product {
            rows: cx.outputs[0].elements() / n.max(1),
            columns: n,
            depth: k,
            batch: 1,
            a: cuda_matrix(CudaPlace::input(0), &cx.inputs[0], k, false),
            b: cuda_matrix(CudaPlace::input(1), &cx.inputs[1], if self.transposed { k } else { n }, self.transposed),
            c: cuda_matrix(CudaPlace::output(0), &cx.outputs[0], n, false),
            alpha: 1.0,
            beta: 0.0,
            bias: Some(bias),
        });
        calls
    }
}

impl Cases for Linear {
    fn cases() -> Vec<Case> {
        let case = |transposed: bool, x: &[usize], n: usize| {
            let k = x[x.len() - 1];
            let weight = if transposed { [n, k] } else { [k, n] };
            Case::new(Linear::new(transposed), [Arg::real(x), Arg::real(weight), Arg::real([n])])
        };
        vec![
            case(true, &[3, 5], 4),
            case(false, &[3, 5], 4),
            case(true, &[2, 3, 5], 17),
            case(false, &[1, 1], 1),
            case(true, &[7], 3),
            // Many samples and one output, as a head that forecasts one number has; of halves the result is f32, and the bias is not.
            Case::new(
                Linear { transposed: true, wide: true },
                [Arg::real([256, 48]).constant(), Arg::real([1, 48]).constant(), Arg::real([1]).constant()],
            ),
            Case::new(
                Linear { transposed: false, wide: true },
                [Arg::real([3, 5]).constant(), Arg::real([5, 9]).constant(), Arg::real([9]).constant()],
            ),
            Case::new(
                Linear::new(true),
                [Arg::real([64, 70]).constant(), Arg::real([131, 70]).constant(), Arg::real([131]).constant()],
            ),
        ]
    }
}

pub const KINDS: &[OpKind] =
    &[OpKind::of::<MatMul>().with_cuda::<MatMul>(), OpKind::of::<Linear>().with_cuda::<Linear>()];

kolo_graph::methods! {
    /// Products.
    MatMulMethods {
        /// `self · other`; leading dims broadcast, so `other` may be a single matrix shared by all those of `self`.
        fn matmul(self, other: Tensor<'b>) -> Tensor<'b> {
            if other.rank() != 2 || self.rank() == 2 {
                return self.then(MatMul::new(false, false), &[other]);
            }
            let mut shape = self.shape();
            let k = shape.pop().unwrap_or(1);
            let flat = self.reshape_to([shape.iter().product::<usize>(), k]);
            shape.push(other.dim(1));
            flat.then(MatMul::new(false, false), &[other]).reshape_to(shape)
        }
        /// `self · otherᵀ` for matrices or stacks of them, whose leading dims broadcast.
        fn matmul_transposed(self, other: Tensor<'b>) -> Tensor<'b> {
            self.then(MatMul::new(false, true), &[other])
        }
        /// PyTorch's linear layer: `weight` is `[out, in]`.
        fn linear(self, weight: Tensor<'b>, bias: Option<Tensor<'b>>) -> Tensor<'b> {
            apply_linear(self, weight, bias, true)
        }
        /// GPT-2's linear layer: `weight` is `[in, out]`.
        fn linear_in_out(self, weight: Tensor<'b>, bias: Option<Tensor<'b>>) -> Tensor<'b> {
            apply_linear(self, weight, bias, false)
        }
        /// A linear layer and an activation, by name: relu, gelu, gelu_tanh, sigmoid, tanh, silu or none.
        fn linear_with(self, weight: Tensor<'b>, bias: Option<Tensor<'b>>, activation: &str) -> Tensor<'b> {
            self.linear(weight, bias).activate(activation)
        }
        fn activate(self, activation: &str) -> Tensor<'b> {
            match activation {
                "none" => self,
                "relu" => self.relu(),
                "gelu" => self.gelu(),
                "gelu_tanh" => self.gelu_tanh(),
                "sigmoid" => self.sigmoid(),
                "tanh" => self.tanh(),
                "silu" => self.silu(),
                other => {
                    let message = format!("unknown activation `{other}`");
                    self.builder().fail("activate", message, "use relu, gelu, gelu_tanh, sigmoid, tanh, silu or none");
                    self
                }
            }
        }
    }
}

fn apply_linear<'b>(x: Tensor<'b>, weight: Tensor<'b>, bias: Option<Tensor<'b>>, transposed: bool) -> Tensor<'b> {
    let Some(bias) = bias else {
        let mut shape = x.shape();
        let k = shape.pop().unwrap_or(1);
        let flat = x.reshape_to([shape.iter().product::<usize>(), k]);
        shape.push(weight.dim(if transposed { 0 } else { 1 }));
        return flat.then(MatMul::new(false, transposed), &[weight]).reshape_to(shape);
    };
    x.then(Linear::new(transposed), &[weight, bias])
}
