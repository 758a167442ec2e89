//! Comparisons, logic on their results, and choosing by them; all with broadcasting. A bool is one byte, 0 or 1.

use crate::cuda_map;
use crate::device;
use crate::real::Compare;
use crate::reduce::ReduceMethods;
use crate::softmax::rows_per_task;
use crate::symbol::{Symbol, record};
use crate::tiles::{self, Address, DIMS_MAX, TILE, Walk};
use crate::vectorized;
use kolo_graph::cpu::Buffer;
use kolo_graph::cuda::{ChannelsLast, Cuda, CudaCalls, CudaCx, Launch};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{
    Arg, Case, Cases, Cpu, CpuCx, DType, Dense, Formula, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op,
};

/// What a selection can choose between.
const CHOSEN: &[DType] = &[DType::F32, DType::BF16, DType::F16, DType::I32];

/// The broadcast of the inputs, as bools.
fn infer(inputs: &[Type]) -> Result<Vec<Type>, String> {
    let dtype = inputs[0].dtype;
    if let Some(other) = inputs.iter().find(|ty| ty.dtype != dtype) {
        return Err(format!("mixes {} with {}; cast one", dtype.name(), other.dtype.name()));
    }
    let shapes = Index::elementwise(inputs, 1)?.output_shapes(inputs)?;
    Ok(vec![Type::new(DType::Bool, shapes[0].clone())])
}

/// Evaluates in f64 with broadcasting.
fn define(inputs: &[&Dense], output: &Type, f: impl Fn(&[f64]) -> f64) -> Vec<Dense> {
    let operands = |at: &[usize]| inputs.iter().map(|input| input.get(at)).collect::<Vec<f64>>();
    vec![Dense::from_fn(output.shape.clone(), |at| f(&operands(at)))]
}

/// Declares ops on two operands of one type with a bool for every element.
macro_rules! pairs {
    ($(
        $(#[doc = $doc:literal])*
        $op:ident = $name:literal on [$($dtype:ident $t:ty),+] ($a:ident, $b:ident) => $value:expr,
        cases $cases:expr;
    )*) => {$(
        op! {
            $(#[doc = $doc])*
            pub struct $op = $name {}
        }

        impl $op {
            #[inline(always)]
            fn value<R: Compare>($a: R, $b: R) -> R::Mask {
                $value
            }
        }

        impl Op for $op {
            fn operands(&self) -> Operands {
                let dtypes = &[$(DType::$dtype),+];
                Operands::new([Operand::of("a", dtypes).constant(), Operand::of("b", dtypes).constant()], &["y"])
            }
            fn index(&self, inputs: &[Type]) -> Option<Index> {
                Index::elementwise(inputs, 1).ok()
            }
            fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
                infer(inputs)
            }
            fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
                define(inputs, &outputs[0], |operands| f64::from(u8::from(Self::value(operands[0], operands[1]))))
            }
            fn formula(&self) -> Option<Formula> {
                Some(record([stringify!($a), stringify!($b)], [], |[$a, $b], _| [Self::value($a, $b)]))
            }
        }

        impl Cpu for $op {
            fn run(&self, cx: &mut CpuCx<'_>) {
                match cx.inputs[0].ty.dtype {
                    $(DType::$dtype => {
                        vectorized! {
                            fn kernel(a: &[$t], b: &[$t], out: &mut [u8]) {
                                for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
                                    *out = u8::from($op::value(*a, *b));
                                }
                            }
                        }
                        run_pair(cx, kernel);
                    })+
                    _ => unreachable!("infer checks the element type"),
                }
            }
        }

        impl Cuda for $op {
            fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
                cuda_map::formula_calls(self, cx)
            }
            fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
                cuda_map::channels_last(cx)
            }
        }

        impl Cases for $op {
            fn cases() -> Vec<Case> {
                $cases
            }
        }
    )*};
}

pairs! {
    /// `a = b`.
    Equal = "equal" on [F32 f32, I32 i32] (a, b) => a.is_equal(b),
    cases comparisons(|| Equal {});

    /// `a ≠ b`; NaN differs from everything.
    NotEqual = "not_equal" on [F32 f32, I32 i32] (a, b) => !a.is_equal(b),
    cases comparisons(|| NotEqual {});

    /// `a < b`.
    Less = "less" on [F32 f32, I32 i32] (a, b) => a.is_less(b),
    cases comparisons(|| Less {});

    /// `a ≤ b`.
    LessEqual = "less_equal" on [F32 f32, I32 i32] (a, b) => a.is_at_most(b),
    cases comparisons(|| LessEqual {});

    /// Both.
    And = "and" on [Bool u8] (a, b) => a.is_true() & b.is_true(),
    cases logic(|| And {});

    /// At least one.
    Or = "or" on [Bool u8] (a, b) => a.is_true() | b.is_true(),
    cases logic(|| Or {});
}

op! {
    /// False becomes true and true false.
    pub struct Not = "not" {}
}

impl Op for Not {
    fn operands(&self) -> Operands {
        Operands::new([Operand::bool("x")], &["y"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        Index::elementwise(inputs, 1).ok()
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        infer(inputs)
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        define(inputs, &outputs[0], |operands| f64::from(u8::from(!operands[0].is_true())))
    }
    fn formula(&self) -> Option<Formula> {
        Some(record(["x"], [], |[x], _| [!x.is_true()]))
    }
}

impl Cpu for Not {
    fn run(&self, cx: &mut CpuCx<'_>) {
        vectorized! {
            fn kernel(x: &[u8], out: &mut [u8]) {
                for (out, x) in out.iter_mut().zip(x) {
                    *out = u8::from(!x.is_true());
                }
            }
        }
        let x = cx.u8(0);
        // SAFETY: tiles are disjoint.
        for_each_tile(cx, |start, len| kernel(&x[start..start + len], unsafe { part(&cx.outputs[0], start, len) }));
    }
}

impl Cuda for Not {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        cuda_map::formula_calls(self, cx)
    }
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        cuda_map::channels_last(cx)
    }
}

op! {
    /// `a` where the condition holds, `b` elsewhere.
    pub struct Select = "select" {}
}

impl Op for Select {
    fn operands(&self) -> Operands {
        Operands::new([Operand::bool("condition"), Operand::of("a", CHOSEN), Operand::of("b", CHOSEN)], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        Index::elementwise(inputs, 1).ok()
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [_, a, b] = inputs else { return Err("takes three inputs: condition, a, b".into()) };
        if a.dtype != b.dtype {
            return Err(format!("chooses between values of one type, not {a} and {b}; cast one"));
        }
        let shapes = Index::elementwise(inputs, 1)?.output_shapes(inputs)?;
        Ok(vec![Type::new(a.dtype, shapes[0].clone())])
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let (condition, g) = (cx.input(0), cx.grad());
        let zero = g.builder().full(0.0, Type::new(g.dtype(), []));
        vec![
            None,
            cx.needs(1).then(|| condition.select(g, zero).sum_to(&cx.input(1))),
            cx.needs(2).then(|| condition.select(zero, g).sum_to(&cx.input(2))),
        ]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        define(inputs, &outputs[0], |operands| f64::select(operands[0].is_true(), operands[1], operands[2]))
    }
    fn formula(&self) -> Option<Formula> {
        let value = |[condition, a, b]: [Symbol; 3], _| [Symbol::select(condition.is_true(), a, b)];
        Some(record(["condition", "a", "b"], [], value))
    }
}

impl Cpu for Select {
    /// Choosing looks at no number, so one kernel moves the bits of f32 and i32 alike.
    fn run(&self, cx: &mut CpuCx<'_>) {
        let shape = cx.out_shape(0);
        let walks: [Walk; 3] = std::array::from_fn(|at| tiles::walk(&cx.inputs[at].ty, shape));
        for_each_tile(cx, |start, len| {
            let (mut condition, mut a, mut b) = ([0u8; TILE], [0u32; TILE], [0u32; TILE]);
            // SAFETY: the element types have these sizes; tiles are disjoint, and both operands are loaded before one
            // of them is overwritten.
            let out = unsafe {
                load(&cx.inputs[0], &walks[0], shape, start, &mut condition[..len]);
                load(&cx.inputs[1], &walks[1], shape, start, &mut a[..len]);
                load(&cx.inputs[2], &walks[2], shape, start, &mut b[..len]);
                part(&cx.outputs[0], start, len)
            };
            choose(&condition[..len], &a[..len], &b[..len], out);
        });
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        vec![(1, 0), (2, 0)]
    }
}

impl Cuda for Select {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        cuda_map::formula_calls(self, cx)
    }
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        cuda_map::channels_last(cx)
    }
    fn in_place(&self) -> Vec<(usize, usize)> {
        Cpu::in_place(self)
    }
}

vectorized! {
    fn choose(condition: &[u8], a: &[u32], b: &[u32], out: &mut [u32]) {
        for (((out, condition), a), b) in out.iter_mut().zip(condition).zip(a).zip(b) {
            *out = u32::select(condition.is_true(), *a, *b);
        }
    }
}

/// Runs a kernel of two operands tile by tile.
fn run_pair<T: Copy + Default + Sync>(cx: &CpuCx<'_>, kernel: fn(&[T], &[T], &mut [u8])) {
    let shape = cx.out_shape(0);
    let walks: [Walk; 2] = std::array::from_fn(|at| tiles::walk(&cx.inputs[at].ty, shape));
    for_each_tile(cx, |start, len| {
        let (mut a, mut b) = ([T::default(); TILE], [T::default(); TILE]);
        // SAFETY: the caller matches `T` with the element type; tiles are disjoint.
        let out = unsafe {
            load(&cx.inputs[0], &walks[0], shape, start, &mut a[..len]);
            load(&cx.inputs[1], &walks[1], shape, start, &mut b[..len]);
            part(&cx.outputs[0], start, len)
        };
        kernel(&a[..len], &b[..len], out);
    });
}

/// Runs `f(start, length)` for every tile of the output.
fn for_each_tile(cx: &CpuCx<'_>, f: impl Fn(usize, usize) + Sync) {
    tiles::for_each_task(cx.team, cx.outputs[0].ty.elements(), |range, _| {
        range.clone().step_by(TILE).for_each(|start| f(start, TILE.min(range.end - start)));
    });
}

/// A part of an output.
///
/// # Safety
/// `T` has the size of an element, the part is inside the buffer, and no other thread touches it meanwhile.
unsafe fn part<'a, T>(buffer: &Buffer, start: usize, len: usize) -> &'a mut [T] {
    // SAFETY: by the contract above.
    unsafe { std::slice::from_raw_parts_mut(buffer.data.cast::<T>().add(start), len) }
}

/// Copies the operand's elements for outputs `start..start + out.len()` into `out`.
///
/// # Safety
/// `T` has the size of an element, and `walk` was made for this operand and shape.
unsafe fn load<T: Copy>(from: &Buffer, walk: &Walk, shape: &[usize], start: usize, out: &mut [T]) {
    let data = from.data.cast::<T>().cast_const();
    // SAFETY: a walk leads to offsets inside its operand.
    let at = |offset: usize| unsafe { *data.add(offset) };
    match walk {
        // SAFETY: the operand has as many elements as the output, and a tile is apart from both.
        Walk::Same => unsafe { std::ptr::copy_nonoverlapping(data.add(start), out.as_mut_ptr(), out.len()) },
        Walk::Scalar => out.fill(at(0)),
        Walk::Cycle(period) => {
            let mut from = start % period;
            for out in out {
                *out = at(from);
                from = if from + 1 == *period { 0 } else { from + 1 };
            }
        }
        Walk::Hold(run) => {
            let mut done = 0;
            while done < out.len() {
                let row = (start + done) / run;
                let end = ((row + 1) * run - start).min(out.len());
                out[done..end].fill(at(row));
                done = end;
            }
        }
        Walk::Strided(strides) => {
            out.iter_mut().enumerate().for_each(|(slot, out)| *out = at(offset(start + slot, shape, strides)));
        }
    }
}

/// Where element `at` of a tensor of this shape lies in an operand with these strides.
fn offset(at: usize, shape: &[usize], strides: &[usize; DIMS_MAX]) -> usize {
    let step =
        |(rest, offset): (usize, usize), dim: usize| (rest / shape[dim], offset + rest % shape[dim] * strides[dim]);
    (0..shape.len()).rev().fold((at, 0), step).1
}

op! {
    /// 1 at the index of a new last dim of `classes`, 0 elsewhere; an index outside makes a row of zeros.
    pub struct OneHot = "one_hot" { classes: usize }
}

impl Op for OneHot {
    fn operands(&self) -> Operands {
        Operands::new([Operand::i32("indices")], &["y"])
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let input: Vec<String> = (0..inputs.first()?.rank()).map(|dim| format!("d{dim}")).collect();
        let output = [&input[..], &["classes".to_string()]].concat();
        Some(Index { inputs: vec![input], outputs: vec![output], whole: vec!["classes".into()], ..Index::default() })
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        if input.dtype != DType::I32 {
            return Err(format!("takes i32 indices, not {}; cast it", input.dtype.name()));
        }
        Ok(vec![Type::f32([&input.shape[..], &[self.classes]].concat())])
    }
    fn flops(&self, _: &[Type], _: &[Type]) -> u64 {
        0
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let hot = |at: &[usize]| inputs[0].get(&at[..at.len() - 1]) == at[at.len() - 1] as f64;
        vec![Dense::from_fn(outputs[0].shape.clone(), |at| f64::from(u8::from(hot(at))))]
    }
}

impl Cpu for OneHot {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (indices, classes) = (cx.i32(0), self.classes);
        let address = Address(cx.out_f32(0).as_mut_ptr());
        cx.team.chunks(indices.len(), rows_per_task(classes), |range, _| {
            for row in range {
                // SAFETY: tasks own disjoint rows.
                let out = unsafe { address.slice(row * classes, classes) };
                out.fill(0.0);
                if let Some(hot) = usize::try_from(indices[row]).ok().and_then(|at| out.get_mut(at)) {
                    *hot = 1.0;
                }
            }
        });
    }
}

impl Cuda for OneHot {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let count = cx.outputs[0].elements();
        let source = device::typed(include_str!("one_hot.cu"), cx);
        let args = [device::input(0), device::output(0), device::long(count), device::long(self.classes)];
        Launch::new(source, "one_hot", device::grid(count, device::THREADS), device::THREADS, args).into()
    }
}

/// The usual broadcasts, and one that takes several tasks.
fn shapes() -> [(Vec<usize>, Vec<usize>); 7] {
    [
        (vec![2, 3], vec![2, 3]),
        (vec![4, 3], vec![3]),
        (vec![4, 3], vec![4, 1]),
        (vec![2, 1, 3], vec![2, 4, 1]),
        (vec![5], vec![]),
        (vec![1], vec![3, 1]),
        (vec![37, 521], vec![521]),
    ]
}

/// Whole numbers of a small range, so that many are equal; as floats they are distinct.
fn comparisons<T: Op>(op: fn() -> T) -> Vec<Case> {
    let whole = shapes().map(|(a, b)| Case::new(op(), [Arg::index(a, -2, 3), Arg::index(b, -2, 3)]));
    let real = shapes().map(|(a, b)| Case::new(op(), [Arg::real(a).constant(), Arg::real(b).constant()]));
    let near = |shape: [usize; 1]| Arg::real(shape).within(1.0, 1.000_000_5).constant();
    whole.into_iter().chain(real).chain([Case::new(op(), [near([40]), near([40])])]).collect()
}

fn logic<T: Op>(op: fn() -> T) -> Vec<Case> {
    shapes().map(|(a, b)| Case::new(op(), [Arg::boolean(a), Arg::boolean(b)])).into()
}

impl Cases for Not {
    fn cases() -> Vec<Case> {
        [vec![7], vec![], vec![3, 5], vec![37, 521]].map(|shape| Case::new(Not {}, [Arg::boolean(shape)])).into()
    }
}

impl Cases for Select {
    fn cases() -> Vec<Case> {
        let case = |condition: &[usize], a: &[usize], b: &[usize]| {
            Case::new(Select {}, [Arg::boolean(condition), Arg::real(a), Arg::real(b)])
        };
        vec![
            case(&[7], &[7], &[7]),
            case(&[4, 3], &[3], &[4, 1]),
            case(&[3], &[2, 4, 3], &[]),
            case(&[2, 1, 3], &[1], &[2, 4, 1]),
            case(&[], &[5], &[5]),
            Case::new(Select {}, [Arg::boolean([3, 5]), Arg::index([5], -9, 9), Arg::index([3, 1], -9, 9)]),
            Case::new(Select {}, [Arg::boolean([521]), Arg::real([37, 521]).constant(), Arg::real([37, 1]).constant()]),
        ]
    }
}

impl Cases for OneHot {
    fn cases() -> Vec<Case> {
        let case = |shape: &[usize], classes| Case::new(OneHot { classes }, [Arg::index(shape, -1, 6)]);
        vec![case(&[5], 4), case(&[], 3), case(&[2, 3], 1), case(&[3, 1], 17), case(&[70, 3], 129)]
    }
}

pub const KINDS: &[OpKind] = &[
    OpKind::of::<Equal>().with_cuda::<Equal>(),
    OpKind::of::<NotEqual>().with_cuda::<NotEqual>(),
    OpKind::of::<Less>().with_cuda::<Less>(),
    OpKind::of::<LessEqual>().with_cuda::<LessEqual>(),
    OpKind::of::<And>().with_cuda::<And>(),
    OpKind::of::<Or>().with_cuda::<Or>(),
    OpKind::of::<Not>().with_cuda::<Not>(),
    OpKind::of::<Select>().with_cuda::<Select>(),
    OpKind::of::<OneHot>().with_cuda::<OneHot>(),
];

kolo_graph::methods! {
    /// Comparisons and what is done with them.
    CompareMethods {
        fn equal(self, other: Tensor<'b>) -> Tensor<'b> { self.then(Equal {}, &[other]) }
        fn not_equal(self, other: Tensor<'b>) -> Tensor<'b> { self.then(NotEqual {}, &[other]) }
        fn less(self, other: Tensor<'b>) -> Tensor<'b> { self.then(Less {}, &[other]) }
        fn less_equal(self, other: Tensor<'b>) -> Tensor<'b> { self.then(LessEqual {}, &[other]) }
        fn greater(self, other: Tensor<'b>) -> Tensor<'b> { other.less(self) }
        fn greater_equal(self, other: Tensor<'b>) -> Tensor<'b> { other.less_equal(self) }
        fn and(self, other: Tensor<'b>) -> Tensor<'b> { self.then(And {}, &[other]) }
        fn or(self, other: Tensor<'b>) -> Tensor<'b> { self.then(Or {}, &[other]) }
        fn not(self) -> Tensor<'b> { self.then(Not {}, &[]) }
        /// `a` where this condition holds, `b` elsewhere.
        fn select(self, a: Tensor<'b>, b: Tensor<'b>) -> Tensor<'b> { self.then(Select {}, &[a, b]) }
        /// Rows of `classes` zeros with a one at each i32 index; all zeros for an index outside.
        fn one_hot(self, classes: usize) -> Tensor<'b> { self.then(OneHot { classes }, &[]) }
    }
}
