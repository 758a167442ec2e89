//! ElementType-wise reductions on raw bytes: what makes one vector of two, or of the vectors of all ranks in tree order.
//!
//! Every element is combined alone and in a fixed order, so a result does not depend on vector width, block size or
//! whether it is computed in place. Sixteen-bit floats are widened to f32, combined, and rounded to nearest even after
//! each step, so that a partial result may travel at any point of the tree. For minimum and maximum a NaN wins. Integers
//! wrap. The tree is balanced by doubling strides: `x[i] ⊕= x[i + 1]`, then `x[i] ⊕= x[i + 2]`, and so on, where the right
//! one exists.

mod number;

use crate::element::{ElementType, Reduction};
use number::{Arithmetic, F16};
pub(crate) use number::{Bf16, Number};

/// A block of each input; partial results of a block stay in the nearest cache.
const BLOCK_BYTES: usize = 4096;
/// Inputs combined in registers.
const LEAVES: usize = 4;

/// Evaluates an expression with the types that an element and a reduction stand for.
macro_rules! with_types {
    ($element:expr, $reduction:expr, $number:ident, $operation:ident => $body:expr) => {
        with_types!(@element $element, $reduction, $number, $operation, $body,
            F32 f32, F64 f64, Bf16 self::Bf16, F16 self::F16, I32 i32, I64 i64, U8 u8)
    };
    (@element $element:expr, $reduction:expr, $number:ident, $operation:ident, $body:expr, $($name:ident $type:ty),+) => {
        match $element {
            $(ElementType::$name => {
                type $number = $type;
                match $reduction {
                    Reduction::Sum | Reduction::Mean => { type $operation = Sum; $body }
                    Reduction::Min => { type $operation = Min; $body }
                    Reduction::Max => { type $operation = Max; $body }
                    Reduction::Product => { type $operation = Product; $body }
                }
            })+
        }
    };
}

/// `into = left ⊕ right`. A mean adds; [`divide`] ends it.
///
/// # Safety
/// The three places hold `count` elements each; `into` is one of the others or does not overlap them.
pub unsafe fn combine(
    element: ElementType,
    reduction: Reduction,
    left: *const u8,
    right: *const u8,
    into: *mut u8,
    count: usize,
) {
    // SAFETY: the caller's promise, passed on.
    unsafe { combine_tree(element, reduction, &[left, right], into, count) }
}

/// Combines all inputs in tree order, each read once. One input is copied.
///
/// # Safety
/// All places hold `count` elements; `into` is one of the inputs or does not overlap them.
pub unsafe fn combine_tree(
    element: ElementType,
    reduction: Reduction,
    inputs: &[*const u8],
    into: *mut u8,
    count: usize,
) {
    // SAFETY: the caller's promise, passed on.
    with_types!(element, reduction, Stored, Join => unsafe { dispatch::<Stored, Join>(inputs, into, count) })
}

/// `left ⊕ right` into two places, each input read once.
///
/// # Safety
/// All places hold `count` elements; each of `into` is one of the inputs or does not overlap them.
pub unsafe fn combine_twins(
    element: ElementType,
    reduction: Reduction,
    inputs: &[*const u8; 2],
    into: [*mut u8; 2],
    count: usize,
) {
    // Sums are what steps wait for; the rest has no kernels of its own.
    // SAFETY: the caller's promise, passed on; two results of `count` elements do not overlap unless they are one.
    unsafe {
        match (reduction, element) {
            (Reduction::Sum | Reduction::Mean, ElementType::F32) => dispatch_twins::<f32, Sum>(inputs, into, count),
            (Reduction::Sum | Reduction::Mean, ElementType::Bf16) => dispatch_twins::<Bf16, Sum>(inputs, into, count),
            _ => {
                combine_tree(element, reduction, inputs, into[0], count);
                std::ptr::copy(into[0], into[1], count * element.bytes());
            }
        }
    }
}

/// Divides by the number of ranks, in place; integers truncate.
///
/// # Safety
/// `data` holds `count` elements that nobody else uses.
pub unsafe fn divide(element: ElementType, data: *mut u8, ranks: usize, count: usize) {
    macro_rules! each {
        ($number:ty, $quotient:expr) => {
            for at in 0..count {
                // SAFETY: the caller's promise.
                unsafe {
                    let place = data.cast::<$number>().add(at);
                    let quotient: fn($number, usize) -> $number = $quotient;
                    place.write_unaligned(quotient(place.read_unaligned(), ranks));
                }
            }
        };
    }
    match element {
        ElementType::F32 => each!(f32, |value, ranks| value / ranks as f32),
        ElementType::F64 => each!(f64, |value, ranks| value / ranks as f64),
        ElementType::Bf16 => each!(Bf16, |value, ranks| Bf16::narrow(value.widen() / ranks as f32)),
        ElementType::F16 => each!(F16, |value, ranks| F16::narrow(value.widen() / ranks as f32)),
        ElementType::I32 => each!(i32, |value, ranks| (i64::from(value) / ranks as i64) as i32),
        ElementType::I64 => each!(i64, |value, ranks| value / ranks as i64),
        ElementType::U8 => each!(u8, |value, ranks| (usize::from(value) / ranks) as u8),
    }
}

trait Operation {
    fn apply<A: Arithmetic>(left: A, right: A) -> A;
}

macro_rules! operation {
    ($($name:ident => $method:ident),+) => {$(
        struct $name;
        impl Operation for $name {
            #[inline(always)]
            fn apply<A: Arithmetic>(left: A, right: A) -> A {
                left.$method(right)
            }
        }
    )+};
}
operation!(Sum => sum, Product => product, Min => min, Max => max);

#[inline(always)]
fn node<N: Number, O: Operation>(left: N, right: N) -> N {
    N::narrow(O::apply(left.widen(), right.widen()))
}

/// Two to [`LEAVES`] inputs, in tree order, in registers.
///
/// # Safety
/// As [`combine_tree`], and there are `LEAVES_HERE` inputs.
#[inline(always)]
unsafe fn leaves<N: Number, O: Operation, const LEAVES_HERE: usize>(
    inputs: &[*const u8],
    start: usize,
    into: *mut u8,
    twin: Option<*mut u8>,
    count: usize,
) {
    // Leaves beyond those there are stand for the first and are not used.
    let place = |leaf: usize| inputs[if leaf < LEAVES_HERE { leaf } else { 0 }].cast::<N>().wrapping_add(start);
    let places: [*const N; LEAVES] = [place(0), place(1), place(2), place(3)];
    let (into, twin) = (into.cast::<N>(), twin.map(|twin| twin.cast::<N>()));
    let lanes = size_of::<N::Chunk>() / size_of::<N>();
    let mut at = 0;
    while at + lanes <= count {
        // SAFETY: inside `count` elements; all loads come before the stores.
        unsafe {
            let load = |leaf: usize| places[leaf].add(at).cast::<N::Chunk>().read_unaligned();
            let [a, b] = [load(0), load(1)];
            let (mut out, [a, b]) = (a, [a.as_ref(), b.as_ref()]);
            let lanes = out.as_mut();
            match LEAVES_HERE {
                2 => lanes.iter_mut().enumerate().for_each(|(at, out)| *out = node::<N, O>(a[at], b[at])),
                3 => {
                    let c = load(2);
                    let c = c.as_ref();
                    let tree = |at: usize| node::<N, O>(node::<N, O>(a[at], b[at]), c[at]);
                    lanes.iter_mut().enumerate().for_each(|(at, out)| *out = tree(at));
                }
                _ => {
                    let [c, d] = [load(2), load(3)];
                    let [c, d] = [c.as_ref(), d.as_ref()];
                    let tree = |at: usize| node::<N, O>(node::<N, O>(a[at], b[at]), node::<N, O>(c[at], d[at]));
                    lanes.iter_mut().enumerate().for_each(|(at, out)| *out = tree(at));
                }
            }
            into.add(at).cast::<N::Chunk>().write_unaligned(out);
            if let Some(twin) = twin {
                twin.add(at).cast::<N::Chunk>().write_unaligned(out);
            }
        }
        at += lanes;
    }
    for at in at..count {
        // SAFETY: inside `count` elements.
        unsafe {
            let load = |leaf: usize| places[leaf].add(at).read_unaligned();
            let pair = node::<N, O>(load(0), load(1));
            let out = match LEAVES_HERE {
                2 => pair,
                3 => node::<N, O>(pair, load(2)),
                _ => node::<N, O>(pair, node::<N, O>(load(2), load(3))),
            };
            into.add(at).write_unaligned(out);
            if let Some(twin) = twin {
                twin.add(at).write_unaligned(out);
            }
        }
    }
}

/// One block of all inputs. The target is written after everything was read, as it may be one of them.
///
/// # Safety
/// As [`combine_tree`]; `count` elements fit a block if there are more than [`LEAVES`] inputs.
#[inline(always)]
unsafe fn few<N: Number, O: Operation>(inputs: &[*const u8], start: usize, into: *mut u8, count: usize) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match inputs.len() {
            // As bytes: buffers may lie anywhere.
            1 => std::ptr::copy(inputs[0].add(start * size_of::<N>()), into, count * size_of::<N>()),
            2 => leaves::<N, O, 2>(inputs, start, into, None, count),
            3 => leaves::<N, O, 3>(inputs, start, into, None, count),
            _ => leaves::<N, O, 4>(inputs, start, into, None, count),
        }
    }
}

macro_rules! versions {
    ($few:ident, $twins:ident $(, #[$feature:meta])?) => {
        /// # Safety
        /// As [`combine_twins`], on a machine that has the features.
        $(#[$feature])?
        unsafe fn $twins<N: Number, O: Operation>(inputs: &[*const u8; 2], into: [*mut u8; 2], count: usize) {
            // SAFETY: the caller's promise, passed on.
            unsafe { leaves::<N, O, 2>(inputs, 0, into[0], Some(into[1]), count) }
        }

        /// # Safety
        /// As [`few`], on a machine that has the features.
        $(#[$feature])?
        unsafe fn $few<N: Number, O: Operation>(inputs: &[*const u8], start: usize, into: *mut u8, count: usize) {
            // SAFETY: the caller's promise, passed on.
            unsafe { few::<N, O>(inputs, start, into, count) }
        }
    };
}
versions!(few_plain, twins_plain);
#[cfg(target_arch = "x86_64")]
versions!(few_avx2, twins_avx2, #[target_feature(enable = "avx2")]);

/// Combines up to [`LEAVES`] inputs from an element on, so many elements.
type Kernel = unsafe fn(&[*const u8], usize, *mut u8, usize);

/// Combines any number of inputs by halves, with a kernel for few of them: code that is the same for all types.
///
/// # Safety
/// As [`few`], which `few` is; `count` elements fit a block.
unsafe fn many(few: Kernel, inputs: &[*const u8], start: usize, into: *mut u8, count: usize) {
    if inputs.len() <= LEAVES {
        // SAFETY: the caller's promise, passed on.
        return unsafe { few(inputs, start, into, count) };
    }
    let middle = inputs.len().next_power_of_two() / 2;
    let mut halves = [[0u64; BLOCK_BYTES / 8]; 2];
    let [left, right] = &mut halves;
    let (left, right) = (left.as_mut_ptr().cast::<u8>(), right.as_mut_ptr().cast::<u8>());
    // SAFETY: both halves hold a block.
    unsafe {
        many(few, &inputs[..middle], start, left, count);
        many(few, &inputs[middle..], start, right, count);
        few(&[left, right], 0, into, count);
    }
}

/// # Safety
/// As [`combine_tree`].
unsafe fn dispatch<N: Number, O: Operation>(inputs: &[*const u8], into: *mut u8, count: usize) {
    if inputs.is_empty() || count == 0 {
        return;
    }
    #[allow(unused_mut, reason = "other machines have one version")]
    let mut few: Kernel = few_plain::<N, O>;
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        few = few_avx2::<N, O>;
    }
    if inputs.len() <= LEAVES {
        // SAFETY: the caller's promise; the features were detected.
        return unsafe { few(inputs, 0, into, count) };
    }
    let block = BLOCK_BYTES / size_of::<N>();
    for start in (0..count).step_by(block) {
        let here = block.min(count - start);
        // SAFETY: as above; `here` elements fit a block.
        unsafe { many(few, inputs, start, into.cast::<N>().add(start).cast(), here) };
    }
}

/// # Safety
/// As [`combine_twins`].
unsafe fn dispatch_twins<N: Number, O: Operation>(inputs: &[*const u8; 2], into: [*mut u8; 2], count: usize) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the caller's promise; the features were detected.
        return unsafe { twins_avx2::<N, O>(inputs, into, count) };
    }
    // SAFETY: the caller's promise.
    unsafe { twins_plain::<N, O>(inputs, into, count) }
}

#[cfg(test)]
mod tests;
