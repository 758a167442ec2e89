//! What the updates share. An update is written once, for one element, over [`Real`]: in f64 it is the definition, in f32
//! the kernel. `update!` makes an op of it. An update whose `scale` is zero changes nothing.
//!
//! An output may be the very memory of an input, and then the kernel updates it where it is. If it is not, the pass first
//! copies a block of the input there, so that the kernel knows the one case alone. Operands are addresses, never slices.

use crate::cuda_map::{INLINE, Map};
use crate::real::Real;
use crate::simd;
use crate::symbol::{Symbol, record};
use crate::tiles::{Address, add_as_tree};
use kolo_graph::cpu::BESIDE_MAX;
use kolo_graph::{Arg, Case, CpuCx, CudaCalls, CudaCx, DType, Dense, Domain, Op, Operand, Operands, Taker, Tile, Type};
use std::array::from_fn;

/// Elements of one task.
const ELEMENTS_PER_TASK: usize = 16 * 1024;
/// Elements updated at a time; the blocks of all operands stay in the first-level cache.
const BLOCK: usize = 1024;

/// An update of `T` tensors with `S` scalars, by way of `N` numbers, into `O` outputs.
pub trait Update<const T: usize, const S: usize, const N: usize, const O: usize>: Op {
    /// The first inputs, all of the shape of the first.
    const TENSORS: [&'static str; T];
    /// The inputs after them, each one number.
    const SCALARS: [&'static str; S];
    /// The input whose place each output may take.
    const OUTPUTS: [usize; O];
    const FLOPS_PER_ELEMENT: u64;

    /// What changes from step to step, but not from element to element, as [`Update::element`] wants it.
    const NUMBERS: [&'static str; N];
    fn numbers<R: Real>(&self, scalars: [R; S]) -> [R; N];

    fn element<R: Real>(&self, values: [R; T], numbers: [R; N]) -> [R; O];

    /// What an element becomes: what the rule says, or what it is if `scale` is not above zero. So a step whose gradient is not
    /// finite can be left out. In the place of the gradient, zero: there is no direction.
    #[inline(always)]
    fn updated<R: Real>(&self, values: [R; T], numbers: [R; N]) -> [R; O] {
        let updated = self.element(values, numbers);
        let (scale, grad) = const { (place_of("scale", &Self::NUMBERS), place_of("grad", &Self::TENSORS)) };
        if scale == N {
            return updated;
        }
        from_fn(|output| {
            let goes_on = numbers[scale].is_above(R::of(0.0));
            let kept = if Self::OUTPUTS[output] == grad { R::of(0.0) } else { values[Self::OUTPUTS[output]] };
            R::select(goes_on, updated[output], kept)
        })
    }
}

/// Makes an op of an [`Update`].
macro_rules! update {
    ($op:ident: $t:literal tensors, $s:literal scalars, $n:literal numbers, $o:literal outputs) => {
        impl kolo_graph::Op for $op {
            fn operands(&self) -> kolo_graph::Operands {
                $crate::optim::rule::operands(&[&Self::TENSORS[..], &Self::SCALARS[..]].concat(), &Self::OUTPUTS)
            }
            fn index(&self, inputs: &[kolo_graph::Type]) -> Option<kolo_graph::index::Index> {
                kolo_graph::index::Index::elementwise(inputs, $o).ok()
            }
            fn infer(&self, inputs: &[kolo_graph::Type]) -> Result<Vec<kolo_graph::Type>, String> {
                $crate::optim::rule::infer(&Self::TENSORS, &Self::SCALARS, $o, inputs)
            }
            fn flops_per_point(&self) -> u64 {
                Self::FLOPS_PER_ELEMENT
            }
            fn reference(&self, inputs: &[&kolo_graph::Dense], _: &[kolo_graph::Type]) -> Vec<kolo_graph::Dense> {
                $crate::optim::rule::define(self, inputs)
            }
            fn formula(&self) -> Option<kolo_graph::Formula> {
                let element = |values, numbers| self.updated(values, numbers);
                Some($crate::symbol::record(Self::TENSORS, Self::NUMBERS, element))
            }
            fn is_update_rule(&self) -> bool {
                true
            }
            fn formula_numbers(&self, scalars: &[f64]) -> Vec<f64> {
                self.numbers(std::array::from_fn(|at| scalars[at])).to_vec()
            }
        }

        impl kolo_graph::Cuda for $op {
            fn calls(&self, cx: &kolo_graph::CudaCx<'_>) -> kolo_graph::CudaCalls {
                $crate::optim::rule::cuda_calls::<$op, $t, $s, $n, $o>(self, cx)
            }
            fn in_place(&self) -> Vec<(usize, usize)> {
                kolo_graph::Cpu::in_place(self)
            }
        }

        impl kolo_graph::Cpu for $op {
            fn run(&self, cx: &mut kolo_graph::CpuCx<'_>) {
                use $crate::tiles::Address;
                $crate::vectorized! {
                    fn block(op: &$op, rows: [Address; $t], count: usize, numbers: [f32; $n]) {
                        for at in 0..count {
                            // SAFETY: `run` gives rows of at least `count` elements.
                            let values = std::array::from_fn(|row| unsafe { *rows[row].get().add(at) });
                            let updated = op.updated(values, numbers);
                            for output in 0..$o {
                                // SAFETY: as above, and the rows of outputs belong to this task.
                                unsafe { *rows[$op::OUTPUTS[output]].get().add(at) = updated[output] };
                            }
                        }
                    }
                }
                let numbers = self.numbers($crate::optim::rule::scalars::<$t, $s>(cx)).map(|number| number as f32);
                $crate::optim::rule::run(cx, self.takes_terms(), Self::OUTPUTS, |rows, count| {
                    block(self, rows, count, numbers)
                });
            }
            fn run_taking(&self, cx: &mut kolo_graph::CpuCx<'_>, make: &mut dyn FnMut(&dyn kolo_graph::Taker)) {
                use $crate::optim::rule::{PIECE, take, update_tile};
                use $crate::tiles::Address;
                $crate::vectorized! {
                    fn pieces(op: &$op, rows: [Address; $t], tile: kolo_graph::Tile<'_>, numbers: [f32; $n]) {
                        // SAFETY: `take` gives whole tensors, and the tile belongs to this thread.
                        unsafe { update_tile::<$op, PIECE, $t, $s, $n, $o>(op, rows, tile, 0, numbers) };
                    }
                }
                $crate::vectorized! {
                    fn rest(op: &$op, rows: [Address; $t], tile: kolo_graph::Tile<'_>, numbers: [f32; $n]) {
                        let start = tile.columns - tile.columns % PIECE;
                        // SAFETY: as above.
                        unsafe { update_tile::<$op, 1, $t, $s, $n, $o>(op, rows, tile, start, numbers) };
                    }
                }
                let numbers = self.numbers($crate::optim::rule::scalars::<$t, $s>(cx)).map(|number| number as f32);
                let grad = self.takes_tiles().expect("an update that takes tiles");
                take(cx, grad, Self::OUTPUTS, make, |rows, tile| {
                    pieces(self, rows, tile, numbers);
                    if tile.columns % PIECE > 0 {
                        rest(self, rows, tile, numbers);
                    }
                });
            }
            fn takes_tiles(&self) -> Option<usize> {
                self.takes_terms()
            }
            fn takes_terms(&self) -> Option<usize> {
                // If its place is not that of an output.
                Self::TENSORS.iter().position(|name| *name == "grad").filter(|grad| !Self::OUTPUTS.contains(grad))
            }
            fn in_place(&self) -> Vec<(usize, usize)> {
                Self::OUTPUTS.iter().enumerate().map(|(output, input)| (*input, output)).collect()
            }
        }
    };
}
pub(crate) use update;

/// All inputs are f32, and none has a rule; outputs are named as the inputs whose places they may take.
pub fn operands(names: &[&'static str], outputs: &[usize]) -> Operands {
    let inputs: Vec<Operand> = names.iter().map(|name| Operand::f32(name)).collect();
    let outputs: Vec<&'static str> = outputs.iter().map(|at| names[*at]).collect();
    Operands::without_rules(inputs, &outputs)
}

pub fn infer(tensors: &[&str], scalars: &[&str], outputs: usize, inputs: &[Type]) -> Result<Vec<Type>, String> {
    let names = [tensors, scalars].concat();
    let tensor = Type::f32(inputs[0].shape.clone());
    for (at, (name, input)) in names.iter().zip(inputs).enumerate() {
        let wanted = if at < tensors.len() { &tensor } else { &Type::f32([]) };
        if input != wanted {
            return Err(format!("`{name}` must be {wanted}, but is {input}; cast or reshape it"));
        }
    }
    Ok(vec![tensor; outputs])
}

/// The definition, element by element in f64.
pub fn define<U, const T: usize, const S: usize, const N: usize, const O: usize>(
    update: &U,
    inputs: &[&Dense],
) -> Vec<Dense>
where
    U: Update<T, S, N, O>,
{
    let numbers = update.numbers(from_fn(|at| inputs[T + at].data[0]));
    let mut outputs = vec![Dense::zeros(inputs[0].shape.clone()); O];
    for at in 0..inputs[0].data.len() {
        let updated = update.updated(from_fn(|input| inputs[input].data[at]), numbers);
        outputs.iter_mut().zip(updated).for_each(|(output, value)| output.data[at] = value);
    }
    outputs
}

/// One pass on a GPU. What does not change from element to element is computed there too, once in each block, in f64.
pub fn cuda_calls<U, const T: usize, const S: usize, const N: usize, const O: usize>(
    update: &U,
    cx: &CudaCx<'_>,
) -> CudaCalls
where
    U: Update<T, S, N, O>,
{
    let element = record(U::TENSORS, U::NUMBERS, |values, numbers| update.updated(values, numbers));
    let numbers = record(U::SCALARS, [], |scalars, _: [Symbol; 0]| update.numbers(scalars));
    let mut map = Map { scalars: S, ..Map::default() };
    map.functions.push_str(&numbers.to_c_numbers(INLINE, "find_numbers"));
    map.functions.push_str(&element.to_c(INLINE, "element", &[DType::F32; T]));
    let scalars: Vec<String> = (T..T + S).map(|at| format!("x{at}")).collect();
    map.setup = format!(
        "__shared__ float numbers[{N}];\nif (threadIdx.x == 0) find_numbers({}, numbers);\n__syncthreads();\n",
        scalars.join(", ")
    );
    let (values, numbers) = ((0..T).map(|at| format!("x{at}")), (0..N).map(|at| format!("numbers[{at}]")));
    let operands = values.chain(numbers).collect::<Vec<_>>().join(", ");
    map.body = match O {
        1 => format!("const float y0 = element({operands});\n"),
        _ => {
            let named: Vec<String> = (0..O).map(|at| format!("y{at} = updated[{at}]")).collect();
            format!("float updated[{O}];\nelement({operands}, updated);\nconst float {};\n", named.join(", "))
        }
    };
    map.calls(cx)
}

/// The scalars, which follow the tensors.
pub fn scalars<const T: usize, const S: usize>(cx: &CpuCx<'_>) -> [f64; S] {
    from_fn(|at| f64::from(cx.f32(T + at)[0]))
}

/// Runs `update` block by block. Its rows are the tensors; row `outputs[i]` is output `i` and holds the tensor already.
/// The terms of row `summed`, if it comes as several, are added up on the way.
pub fn run<const T: usize, const O: usize>(
    cx: &CpuCx<'_>,
    summed: Option<usize>,
    outputs: [usize; O],
    update: impl Fn([Address; T], usize) + Sync,
) {
    let from: [Address; T] = from_fn(|at| Address(cx.inputs[at].data.cast()));
    let to: [Address; O] = from_fn(|at| Address(cx.outputs[at].data.cast()));
    let summed = summed.filter(|_| !cx.terms.is_empty());
    cx.team.chunks(cx.outputs[0].ty.elements(), ELEMENTS_PER_TASK, |range, _| {
        let mut sum = [0.0; BLOCK];
        for start in range.clone().step_by(BLOCK) {
            let count = BLOCK.min(range.end - start);
            // SAFETY: every tensor and output has as many elements as the first output.
            let at = |address: Address| Address(unsafe { address.get().add(start) });
            let mut rows = from.map(at);
            for (to, row) in to.map(at).into_iter().zip(outputs) {
                if to.get() != rows[row].get() {
                    // SAFETY: two buffers of their own, and tasks own disjoint ranges of every output.
                    unsafe { std::ptr::copy_nonoverlapping(rows[row].get(), to.get(), count) };
                    rows[row] = to;
                }
            }
            if let Some(row) = summed {
                // SAFETY: terms are buffers of their own, and tasks own disjoint ranges of them.
                let term = |at: usize| unsafe { Address(cx.terms[at].data.cast()).slice(start, count) };
                add_as_tree(cx.terms.len(), term, |a, b| simd::add(&mut sum, a, b));
                rows[row] = Address(sum.as_mut_ptr());
            }
            update(rows, count);
        }
    });
}

/// Runs an update whose row `grad` is made by `make`, a tile at a time.
pub fn take<const T: usize, const O: usize>(
    cx: &CpuCx<'_>,
    grad: usize,
    outputs: [usize; O],
    make: &mut dyn FnMut(&dyn Taker),
    update: impl Fn([Address; T], Tile<'_>) + Sync,
) {
    let mut rows: [Address; T] = from_fn(|at| Address(cx.inputs[at].data.cast()));
    for (to, row) in cx.outputs.iter().zip(outputs) {
        let from = std::mem::replace(&mut rows[row], Address(to.data.cast()));
        if from.get() != rows[row].get() {
            // SAFETY: two buffers of their own, of one type.
            unsafe { std::ptr::copy_nonoverlapping(from.get(), rows[row].get(), to.ty.elements()) };
        }
    }
    let mut beside = (0..T).filter(|row| *row != grad).map(|row| rows[row]).cycle();
    let beside = from_fn(|_| beside.next().expect("an update has a parameter"));
    make(&Takes { rows, beside, update });
}

/// An update that takes its gradient tile by tile.
struct Takes<const T: usize, F> {
    rows: [Address; T],
    beside: [Address; BESIDE_MAX],
    update: F,
}

impl<const T: usize, F> std::fmt::Debug for Takes<T, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Takes {{ rows: {:?} }}", self.rows)
    }
}

impl<const T: usize, F: Fn([Address; T], Tile<'_>) + Sync> Taker for Takes<T, F> {
    unsafe fn take(&self, tile: Tile<'_>) {
        (self.update)(self.rows, tile);
    }
    fn beside(&self) -> Option<[*const f32; BESIDE_MAX]> {
        Some(self.beside.map(|row| row.get().cast_const()))
    }
}

/// Where a name stands; past the end if it does not.
const fn place_of(name: &str, names: &[&str]) -> usize {
    let mut at = 0;
    while at < names.len() && !same(names[at].as_bytes(), name.as_bytes()) {
        at += 1;
    }
    at
}

const fn same(a: &[u8], b: &[u8]) -> bool {
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

/// Elements of a row that are updated together: whole vectors on every machine.
pub const PIECE: usize = 16;

/// Updates where a tile of the gradient lies, `W` columns at a time; columns from `start` on, as far as they make whole
/// pieces.
///
/// # Safety
/// Every row but that of the gradient is a tensor of its size, of which nobody else uses the tile's part.
#[inline(always)]
pub unsafe fn update_tile<U, const W: usize, const T: usize, const S: usize, const N: usize, const O: usize>(
    update: &U,
    rows: [Address; T],
    tile: Tile<'_>,
    start: usize,
    numbers: [f32; N],
) where
    U: Update<T, S, N, O>,
{
    let grad = const { place_of("grad", &U::TENSORS) };
    for line in 0..tile.rows {
        let given = tile.data[line * tile.width..][..tile.columns].as_ptr().cast_mut();
        // SAFETY: by the caller's contract.
        let row = |row: usize| unsafe { rows[row].get().add(tile.start + line * tile.stride) };
        let lines: [*mut f32; T] = from_fn(|at| if at == grad { given } else { row(at) });
        for piece in 0..(tile.columns - start) / W {
            // SAFETY: a piece is inside the tile, whose part of every row is this call's.
            unsafe {
                let address = |row: usize| lines[row].add(start + piece * W).cast::<[f32; W]>();
                let values: [[f32; W]; T] = from_fn(|row| *address(row));
                let mut updated = [[0.0; W]; O];
                for at in 0..W {
                    let element = update.updated(from_fn(|row| values[row][at]), numbers);
                    (0..O).for_each(|output| updated[output][at] = element[output]);
                }
                (0..O).for_each(|output| *address(U::OUTPUTS[output]) = updated[output]);
            }
        }
    }
}

/// The gradient as a rule sees it: scaled, and with the weight decay of the L2 penalty. Without decay the parameter is
/// left out of it, so that one that is not finite does not reach the moments.
#[inline(always)]
pub fn decayed<R: Real>(grad: R, scale: R, param: R, weight_decay: f64) -> R {
    let grad = grad * scale;
    if weight_decay == 0.0 { grad } else { grad + param * R::of(weight_decay) }
}

/// `1 − betaⁿ` for step `n`, by repeated squaring: the library's power may differ in its last bit between machines.
pub fn bias_correction(beta: f64, step: f64) -> f64 {
    let (mut power, mut base, mut exponent) = (1.0, beta, step as u64);
    while exponent > 0 {
        if exponent & 1 == 1 {
            power *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    1.0 - power
}

/// The usual cases of each of `ops`.
pub fn cases<U, const T: usize, const S: usize, const N: usize, const O: usize>(ops: &[U]) -> Vec<Case>
where
    U: Update<T, S, N, O> + Clone,
{
    // The last is several tasks long and ends inside a block.
    let shapes: [&[usize]; 5] = [&[], &[1], &[37], &[3, 5], &[41_003]];
    ops.iter().flat_map(|op| shapes.map(|shape| Case::new(op.clone(), args(op, shape)))).collect()
}

/// Arguments in the range that training has: squares and norms are positive, steps count from one.
pub fn args<U, const T: usize, const S: usize, const N: usize, const O: usize>(_: &U, shape: &[usize]) -> Vec<Arg>
where
    U: Update<T, S, N, O>,
{
    let tensor = |name: &str| match name {
        "v" | "square" | "sum" => Arg::positive(shape),
        _ => Arg::real(shape),
    };
    let scalar = |name: &str| match name {
        "step" => Arg { domain: Domain::Index(1, 40), ..Arg::real([]) },
        _ => Arg::real([]).within(0.1, 1.0),
    };
    let tensors = U::TENSORS.iter().map(|name| tensor(name));
    tensors.chain(U::SCALARS.iter().map(|name| scalar(name))).map(Arg::constant).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bias_correction_is_one_minus_the_power() {
        for (beta, step) in [(0.9, 1), (0.9, 7), (0.999, 1), (0.999, 1000), (0.0, 1), (0.999, 10_000_000)] {
            let wanted = 1.0 - f64::powi(beta, step);
            assert!((bias_correction(beta, f64::from(step)) - wanted).abs() < 1e-12, "{beta} {step}");
        }
    }

    #[test]
    fn wrong_inputs_are_named() {
        let update = crate::optim::LambApply {};
        let error = |inputs: &[Type]| kolo_graph::checked_types(&update, inputs).unwrap_err();
        let (param, scalar) = (Type::f32([2, 3]), Type::f32([]));
        assert_eq!(
            error(std::slice::from_ref(&param)),
            "takes 5 inputs (param, direction, param_norm, direction_norm, lr), but got 1"
        );
        let scalars = [scalar.clone(), scalar.clone(), scalar.clone()];
        assert_eq!(
            error(&[&[param.clone(), Type::f32([3, 2])][..], &scalars].concat()),
            "`direction` must be f32[2,3], but is f32[3,2]; cast or reshape it"
        );
        assert_eq!(
            error(&[param.clone(), param, scalar.clone(), scalar, Type::f32([1])]),
            "`lr` must be f32[], but is f32[1]; cast or reshape it"
        );
    }
}
