//! NaN and infinities through every op: wherever the definition gives NaN, +∞, −∞ or a number, the kernel gives the same.

use super::{computed, defined, for_each_case, numbers};
use kolo_graph::checked_types;
use kolo_graph::op::{Case, Dense};

/// FLOPs of a case in which every input is spoilt on its own.
const EACH_FLOPS_MAX: u64 = 10_000;
/// FLOPs of a case that gets one special number at a time; the definition of a larger one is slow.
const ONE_FLOPS_MAX: u64 = 100_000;
/// FLOPs of the largest case that is tried at all: those beyond are there for the sake of several threads.
const FLOPS_MAX: u64 = 5_000_000;
/// Elements between the special numbers of a large case: few enough results are spoilt that the rest says something.
const SPARSE: usize = 997;

const SPECIALS: [f64; 3] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

/// Ops whose kernel may give NaN where the definition gives an infinity, and why.
const NAN_FOR_INFINITY: &[(&str, &str)] = &[(
    "adam",
    "it divides by multiplications, and what is left of an infinite quotient is NaN; its doc comment says so",
)];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Class {
    NaN,
    Infinity,
    NegativeInfinity,
    Finite,
}

fn class(x: f64) -> Class {
    match x {
        x if x.is_nan() => Class::NaN,
        f64::INFINITY => Class::Infinity,
        f64::NEG_INFINITY => Class::NegativeInfinity,
        _ => Class::Finite,
    }
}

/// The inputs with `specials` in turn at every `step`th element of those that `which` picks. Only floats can be spoilt.
fn spoil(case: &Case, inputs: &[Dense], specials: &[f64], step: usize, which: impl Fn(usize) -> bool) -> Vec<Dense> {
    let spoilt = |(at, (input, arg)): (usize, (&Dense, &kolo_graph::Arg))| {
        let mut input = input.clone();
        if arg.ty.dtype.is_float() && which(at) && !input.data.is_empty() {
            // Not the first, which kernels treat like no other, unless it is the only one.
            let first = 1 % input.data.len();
            let spoilt = input.data.iter_mut().skip(first).step_by(step);
            spoilt.zip(specials.iter().cycle()).for_each(|(x, special)| *x = *special);
        }
        input
    };
    inputs.iter().zip(&case.args).enumerate().map(spoilt).collect()
}

fn compare(case: &Case, inputs: &[Dense], what: &str) {
    let want = defined(case, inputs);
    let may_be_nan = NAN_FOR_INFINITY.iter().any(|(name, _)| *name == case.op.name());
    for (slot, (got, want)) in computed(case, inputs, 1).iter().zip(&want).enumerate() {
        for (at, (got, want)) in numbers(got).iter().zip(&want.data).enumerate() {
            let left_out = case.leaves_out_zeros && want.is_nan();
            let excused = want.is_infinite() && got.is_nan() && may_be_nan;
            let same = class(*got) == class(*want) || left_out || excused;
            assert!(same, "{what}: output {slot}, element {at} is {got}, must be {want}");
        }
    }
}

#[test]
fn nan_and_infinities_come_through() {
    for_each_case(|_, case, inputs| {
        let types: Vec<_> = case.args.iter().map(|arg| arg.ty.clone()).collect();
        let outputs = checked_types(&*case.op, &types).unwrap();
        let flops = case.op.flops(&types, &outputs);
        if flops > FLOPS_MAX {
            return;
        }
        if flops > ONE_FLOPS_MAX {
            return compare(case, &spoil(case, inputs, &SPECIALS, SPARSE, |_| true), "all in all inputs");
        }
        for (special, step) in SPECIALS.into_iter().zip([5, 7, 3]) {
            compare(case, &spoil(case, inputs, &[special], step, |_| true), &format!("{special} in all inputs"));
            if flops > EACH_FLOPS_MAX {
                continue;
            }
            for at in (0..inputs.len()).filter(|at| types[*at].dtype.is_float()) {
                let one = inputs[at].data.len().max(1);
                for step in [one, 4] {
                    let spoilt = spoil(case, inputs, &[special], step, |other| other == at);
                    compare(case, &spoilt, &format!("{special} at every {step}th element of input {at}"));
                }
            }
        }
    });
}
