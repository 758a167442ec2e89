//! Expressions as data: [`Symbol`] is a [`Real`] that computes nothing and writes down what was asked of it.
//!
//! An elementwise op is written once over [`Real`] or [`Compare`]. With f32 it is the CPU's kernel, with f64 the definition,
//! and with symbols a [`Formula`], from which another device's kernel can be printed.

use crate::real::{Compare, Mask, Real};
use kolo_graph::formula::{Formula, Function, Term};
use std::cell::RefCell;
use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Sub};

/// A number that is only written down: a term of the formula that this thread records.
#[derive(Clone, Copy, Debug)]
pub struct Symbol(usize);

/// A truth value that is only written down.
#[derive(Clone, Copy, Debug)]
pub struct SymbolMask(usize);

thread_local! {
    /// The terms so far. A symbol carries only its number, because [`Compare::of`] makes one out of nothing.
    static TERMS: RefCell<Vec<Term>> = const { RefCell::new(Vec::new()) };
}

/// What an expression can end in.
pub trait Recorded {
    fn term(self) -> usize;
}

impl Recorded for Symbol {
    fn term(self) -> usize {
        self.0
    }
}

impl Recorded for SymbolMask {
    fn term(self) -> usize {
        self.0
    }
}

/// Writes down the expression `f` of these inputs and numbers.
pub fn record<const I: usize, const N: usize, const O: usize, T: Recorded>(
    inputs: [&'static str; I],
    numbers: [&'static str; N],
    f: impl FnOnce([Symbol; I], [Symbol; N]) -> [T; O],
) -> Formula {
    let outer = TERMS.take();
    let inputs_of = std::array::from_fn(|at| Symbol(term(Term::Input(at))));
    let numbers_of = std::array::from_fn(|at| Symbol(term(Term::Number(at))));
    let results = f(inputs_of, numbers_of).map(Recorded::term).to_vec();
    let terms = TERMS.replace(outer);
    Formula { inputs: inputs.to_vec(), numbers: numbers.to_vec(), terms, results }
}

/// The number of a term, which is written down unless it is there already.
fn term(new: Term) -> usize {
    TERMS.with_borrow_mut(|terms| {
        let same = |term: &Term| match (term, &new) {
            // Zero and minus zero are two numbers.
            (Term::Literal(a), Term::Literal(b)) => a.to_bits() == b.to_bits(),
            (term, new) => term == new,
        };
        terms.iter().position(same).unwrap_or_else(|| {
            terms.push(new);
            terms.len() - 1
        })
    })
}

fn apply<const N: usize>(function: Function, operands: [usize; N]) -> usize {
    let mut all = [0; 3];
    all[..N].copy_from_slice(&operands);
    term(Term::Apply(function, all))
}

macro_rules! operators {
    ($on:ident: $($operator:ident $method:ident $function:ident),*) => {$(
        impl $operator for $on {
            type Output = $on;
            fn $method(self, other: $on) -> $on {
                $on(apply(Function::$function, [self.0, other.0]))
            }
        }
    )*};
}

operators!(Symbol: Add add Add, Sub sub Sub, Mul mul Mul, Div div Div);
operators!(SymbolMask: BitAnd bitand And, BitOr bitor Or);

impl Neg for Symbol {
    type Output = Symbol;
    fn neg(self) -> Symbol {
        Symbol(apply(Function::Neg, [self.0]))
    }
}

impl Not for SymbolMask {
    type Output = SymbolMask;
    fn not(self) -> SymbolMask {
        SymbolMask(apply(Function::Not, [self.0]))
    }
}

impl Mask for SymbolMask {}

impl Compare for Symbol {
    type Mask = SymbolMask;
    fn of(value: f64) -> Self {
        Symbol(term(Term::Literal(value)))
    }
    fn is_equal(self, other: Self) -> SymbolMask {
        SymbolMask(apply(Function::Equal, [self.0, other.0]))
    }
    fn is_less(self, other: Self) -> SymbolMask {
        SymbolMask(apply(Function::Less, [self.0, other.0]))
    }
    fn is_at_most(self, other: Self) -> SymbolMask {
        SymbolMask(apply(Function::AtMost, [self.0, other.0]))
    }
    fn select(mask: SymbolMask, a: Self, b: Self) -> Self {
        Symbol(apply(Function::Select, [mask.0, a.0, b.0]))
    }
}

macro_rules! functions {
    ($($method:ident $function:ident),*) => {$(
        fn $method(self) -> Self {
            Symbol(apply(Function::$function, [self.0]))
        }
    )*};
}

impl Real for Symbol {
    functions!(exp Exp, exp_m1 ExpM1, ln Ln, ln_1p Ln1p, sqrt Sqrt, abs Abs, tanh Tanh, erf Erf, sin Sin, cos Cos, floor Floor);

    fn pow(self, exponent: Self) -> Self {
        Symbol(apply(Function::Pow, [self.0, exponent.0]))
    }
    fn bias_correction(self, beta: f64) -> Self {
        Symbol(apply(Function::BiasCorrection, [term(Term::Literal(beta)), self.0]))
    }
    fn mul_add(self, by: Self, plus: Self) -> Self {
        Symbol(apply(Function::MulAdd, [self.0, by.0, plus.0]))
    }
    fn over(self, by: Self) -> Self {
        Symbol(apply(Function::Over, [self.0, by.0]))
    }
}
