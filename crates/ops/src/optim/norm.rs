//! Norms of whole tensors, and the gradient scale that bounds one.

use crate::device;
use crate::elementwise::ElementwiseMethods;
use crate::real::Real;
use crate::simd;
use crate::tiles::Address;
use kolo_graph::cuda::{Cuda, CudaArg, CudaCalls, CudaCx, CudaPlace, CudaSource, Launch};
use kolo_graph::index::Index;
use kolo_graph::split::{Placement, Split};
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, DType, Dense, GradCx, Op, Operand, Operands, Team, Tensor, Type, op};

op! {
    /// `Σ x²` over all elements, in an order that depends on the shape alone.
    pub struct SumSquares = "sum_squares" { }
}

op! {
    /// `Σ x²` of each run of [`RUN`] elements, the last of which may be shorter.
    pub struct RunSquares = "run_squares" { }
}
op! {
    /// The sum of all elements of all inputs, in order: of a tensor's `run_squares`, or of those of its pieces, the bits of
    /// its `sum_squares`.
    pub struct SumRuns = "sum_runs" { }
}

/// Elements summed in f32; the sums of such runs are added in order, in f64.
pub const RUN: usize = 4096;
const RUNS_PER_TASK: usize = 4;

impl Op for SumSquares {
    fn operands(&self) -> Operands {
        Operands::new([Operand::f32("x")], &["sum"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let axes = (0..inputs.first()?.rank()).map(|dim| format!("d{dim}")).collect();
        Some(Index { inputs: vec![axes], outputs: vec![Vec::new()], ..Index::default() })
    }
    fn infer(&self, _: &[Type]) -> Result<Vec<Type>, String> {
        Ok(vec![Type::f32([])])
    }
    fn flops_per_point(&self) -> u64 {
        2
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        vec![Some(cx.input(0).mul(cx.grad()).scale(2.0))]
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        vec![Dense::new([], vec![inputs[0].data.iter().map(|x| x * x).sum()])]
    }
}

impl Cpu for SumSquares {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (x, out) = (cx.f32(0), cx.out_f32(0));
        let sums = &mut cx.scratch()[..x.len().div_ceil(RUN)];
        square_runs(cx.team, x, sums);
        out[0] = add_runs(0.0, sums) as f32;
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], _: usize) -> usize {
        inputs[0].elements().div_ceil(RUN) * size_of::<f32>()
    }
}

/// The sum of squares of each run of elements.
fn square_runs(team: &Team, x: &[f32], sums: &mut [f32]) {
    let address = Address(sums.as_mut_ptr());
    team.chunks(sums.len(), RUNS_PER_TASK, |range, _| {
        // SAFETY: tasks own disjoint runs.
        let sums = unsafe { address.slice(range.start, range.len()) };
        for (sum, run) in sums.iter_mut().zip(range) {
            let run = &x[run * RUN..x.len().min((run + 1) * RUN)];
            *sum = simd::dot(run, run);
        }
    });
}

fn add_runs(total: f64, sums: &[f32]) -> f64 {
    sums.iter().fold(total, |total, sum| total + f64::from(*sum))
}

impl Op for RunSquares {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::f32("x")], &["sums"])
    }
    fn unsplittable(&self) -> Option<&'static str> {
        Some("runs are counted in the order of memory, across all dims")
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        Ok(vec![Type::f32([inputs[0].elements().div_ceil(RUN)])])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        2 * inputs[0].elements() as u64
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let runs = inputs[0].data.chunks(RUN).map(|run| run.iter().map(|x| x * x).sum());
        vec![Dense::new(outputs[0].shape.clone(), runs.collect())]
    }
}

impl Cpu for RunSquares {
    fn run(&self, cx: &mut CpuCx<'_>) {
        square_runs(cx.team, cx.f32(0), cx.out_f32(0));
    }
}

const SOURCE: &str = include_str!("norm.cu");

/// The sum of squares of each run of input `at`.
fn run_calls(calls: &mut CudaCalls, ty: &Type, to: CudaPlace) {
    let runs = ty.elements().div_ceil(RUN);
    if runs > 0 {
        let args = [device::input(0), to.into(), device::long(ty.elements())];
        let source = CudaSource::new(SOURCE).define_type("I0", ty.dtype);
        calls.launch(Launch::new(source, "square_runs", [runs, 1, 1], device::THREADS, args));
    }
}

/// The sum of `count` runs' sums: the first output.
fn total_calls(calls: &mut CudaCalls, from: CudaPlace, count: usize) {
    let source = CudaSource::new(SOURCE).define_type("I0", DType::F32);
    let args = [from.into(), device::output(0), device::long(count)];
    calls.launch(Launch::new(source, "add_runs", [1, 1, 1], 1024, args));
}

impl Cuda for SumSquares {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (mut calls, count) = (CudaCalls::new(), cx.inputs[0].elements().div_ceil(RUN));
        let sums = calls.scratch(count.max(1) * size_of::<f32>());
        run_calls(&mut calls, &cx.inputs[0], sums);
        total_calls(&mut calls, sums, count);
        calls
    }
}

impl Cuda for RunSquares {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let mut calls = CudaCalls::new();
        run_calls(&mut calls, &cx.inputs[0], CudaPlace::output(0));
        calls
    }
}

impl Cuda for SumRuns {
    /// The inputs go to one place first: how runs are added up depends on their number alone, not on whose they are.
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let (mut calls, mut count) = (CudaCalls::new(), 0);
        let sums = calls.scratch(cx.inputs.iter().map(Type::bytes).sum::<usize>().max(size_of::<f32>()));
        for (at, ty) in cx.inputs.iter().enumerate() {
            calls.copy(CudaPlace::input(at), sums.further(count * size_of::<f32>()), ty.bytes());
            count += ty.elements();
        }
        total_calls(&mut calls, sums, count);
        calls
    }
}

impl Cuda for ClipScale {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let source = device::typed(SOURCE, cx);
        let args = [device::input(0), device::output(0), CudaArg::U64(self.max_norm.to_bits())];
        Launch::new(source, "clip_scale", [1, 1, 1], 1, args).into()
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
}

impl Cases for RunSquares {
    fn cases() -> Vec<Case> {
        let shapes: [&[usize]; 4] = [&[], &[37], &[4097], &[3, 13_669]];
        shapes.map(|shape| Case::new(RunSquares {}, [Arg::real(shape).constant()])).into()
    }
}

impl Op for SumRuns {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::f32("sums").many()], &["sum"])
    }
    /// Of any one input: the others' sums are terms then.
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let splittable = inputs.iter().enumerate().filter(|(_, ty)| ty.rank() > 0);
        let along = |(at, ty): (usize, &Type)| {
            let mut placements = vec![Placement::Partial; inputs.len()];
            placements[at] = Placement::Shard(0);
            Split::new(format!("runs{at}"), ty.shape[0], placements, [Placement::Partial])
        };
        splittable.map(along).collect()
    }
    fn infer(&self, _: &[Type]) -> Result<Vec<Type>, String> {
        Ok(vec![Type::f32([])])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        inputs.iter().map(|ty| ty.elements() as u64).sum()
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        vec![Dense::new([], vec![inputs.iter().flat_map(|input| &input.data).sum()])]
    }
}

impl Cpu for SumRuns {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let total = (0..cx.inputs.len()).fold(0.0, |total, at| add_runs(total, cx.f32(at)));
        cx.out_f32(0)[0] = total as f32;
    }
}

impl Cases for SumRuns {
    fn cases() -> Vec<Case> {
        let case = |sizes: &[usize]| {
            let args: Vec<Arg> = sizes.iter().map(|size| Arg::positive([*size]).constant()).collect();
            Case::new(SumRuns {}, args)
        };
        vec![case(&[5]), case(&[3, 1, 40])]
    }
}

impl Cases for SumSquares {
    fn cases() -> Vec<Case> {
        let shapes: [&[usize]; 7] = [&[], &[1], &[37], &[3, 5], &[1, 7, 1], &[4097], &[3, 13_669]];
        let case = |shape: &[usize]| match shape.iter().product::<usize>() {
            0..100 => Case::new(SumSquares {}, [Arg::real(shape)]),
            _ => Case::new(SumSquares {}, [Arg::real(shape).constant()]),
        };
        shapes.map(case).into()
    }
}

op! {
    /// From the sum of all squared gradients to their scale: `min(1, max_norm / (√total + 10⁻⁶))`.
    pub struct ClipScale = "clip_scale" { max_norm: f64 }
}

impl ClipScale {
    fn value(&self, total: f64) -> f64 {
        (self.max_norm / (total.sqrt() + 1e-6)).smaller(1.0)
    }
}

impl Op for ClipScale {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::f32("total")], &["scale"])
    }
    fn unsplittable(&self) -> Option<&'static str> {
        Some("it takes one number")
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        match inputs {
            [total] if *total == Type::f32([]) => Ok(vec![Type::f32([])]),
            [total] => Err(format!("takes a sum of squares, f32[], not {total}; add up the tensors' `sum_squares`")),
            _ => Err(format!("takes one input, but got {}", inputs.len())),
        }
    }
    fn flops_per_point(&self) -> u64 {
        4
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        vec![Dense::new([], vec![self.value(inputs[0].data[0])])]
    }
}

impl Cpu for ClipScale {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let total = f64::from(cx.f32(0)[0]);
        cx.out_f32(0)[0] = self.value(total) as f32;
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
}

impl Cases for ClipScale {
    fn cases() -> Vec<Case> {
        let case =
            |max_norm, low, high| Case::new(ClipScale { max_norm }, [Arg::real([]).within(low, high).constant()]);
        vec![case(1.0, 4.0, 9.0), case(1.0, 0.1, 0.5), case(0.5, 0.0, 0.0), case(1.0, f64::NAN, f64::NAN)]
    }
}

kolo_graph::methods! {
    /// Norms of whole tensors.
    OptimMethods {
        /// `Σ x²` over all elements.
        fn sum_squares(self) -> Tensor<'b> { self.then(SumSquares {}, &[]) }
        /// The Euclidean norm over all elements.
        fn l2_norm(self) -> Tensor<'b> { self.sum_squares().sqrt() }
        /// Of a sum of squares: the scale that brings the norm down to `max_norm`, at most one.
        fn clip_scale(self, max_norm: f64) -> Tensor<'b> { self.then(ClipScale { max_norm }, &[]) }
    }
}
