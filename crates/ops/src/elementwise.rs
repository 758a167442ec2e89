//! Elementwise ops. Each is one entry: name, expression, gradient. The expression over [`Real`] is at once the
//! definition (in f64), the kernel (in f32 vectors) and a formula (of symbols); the fusion pass joins chains of them into one pass over memory.

use crate::cuda_map;
use crate::real::{Compare, Real};
use crate::reduce::ReduceMethods;
use crate::symbol::{Symbol, record};
use crate::tiles;
use crate::vectorized;
use kolo_graph::cpu::TileKernel;
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{
    Arg, Case, Cases, ChannelsLast, Cpu, CpuCx, Cuda, CudaCalls, CudaCx, DType, Dense, Formula, GradCx, Mixed, Op,
    Operand, Operands, Tensor, Type, op,
};

/// All inputs of one float type; the output is their broadcast.
fn infer(name: &str, inputs: &[Type]) -> Result<Vec<Type>, String> {
    if let Some(other) = inputs.iter().find(|ty| ty.dtype != inputs[0].dtype) {
        return Err(format!("{name} mixes {} with {}; cast one", inputs[0].dtype.name(), other.dtype.name()));
    }
    let shapes = Index::elementwise(inputs, 1)?.output_shapes(inputs)?;
    Ok(vec![Type::new(inputs[0].dtype, shapes[0].clone())])
}

/// Evaluates in f64 with broadcasting.
fn define(inputs: &[&Dense], output: &Type, f: impl Fn(&[f64]) -> f64) -> Vec<Dense> {
    let mut operands = vec![0.0; inputs.len()];
    vec![Dense::from_fn(output.shape.clone(), |at| {
        for (operand, input) in operands.iter_mut().zip(inputs) {
            *operand = input.get(at);
        }
        f(&operands)
    })]
}

/// Declares elementwise ops. `c` is the op's constant (0 if it has none).
macro_rules! elementwise {
    ($(
        $(#[doc = $doc:literal])*
        $op:ident = $name:literal ($($x:ident),+ $(; $c:ident)?) => $value:expr,
        grad |$cx:ident, $g:ident| $grad:expr,
        $(constant $($fixed:ident)+,)?
        cases $cases:expr;
    )*) => {
        $(
            op! {
                $(#[doc = $doc])*
                pub struct $op = $name { $($c: f32)? }
            }

            impl $op {
                #[inline(always)]
                #[allow(unused_variables, clippy::redundant_closure_call)]
                fn value<R: Real>($($x: R,)+ constant: R) -> R {
                    $(let $c = constant;)?
                    $value
                }
                fn constant_of(&self) -> f32 {
                    0.0 $(+ self.$c)?
                }
            }

            impl Op for $op {
                fn operands(&self) -> Operands {
                    let constants: &[&str] = &[$($(stringify!($fixed)),+)?];
                    let operand = |name| match constants.contains(&name) {
                        true => Operand::float(name).constant(),
                        false => Operand::float(name),
                    };
                    Operands::new([$(operand(stringify!($x))),+], &["y"])
                }
                fn mixed(&self) -> Mixed {
                    Mixed::Elementwise
                }
                fn index(&self, inputs: &[Type]) -> Option<Index> {
                    Index::elementwise(inputs, 1).ok()
                }
                fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
                    infer($name, inputs)
                }
                #[allow(unused_variables)]
                fn grad<'b>(&self, $cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
                    let $g = $cx.grad();
                    $(let $c = self.$c;)?
                    $grad
                }
                fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
                    let constant = f64::from(self.constant_of());
                    define(inputs, &outputs[0], |operands| {
                        let [$($x),+] = *operands else { unreachable!("infer checks the arity") };
                        Self::value($($x,)+ constant)
                    })
                }
                fn formula(&self) -> Option<Formula> {
                    let constants = [$(stringify!($c))?];
                    Some(record([$(stringify!($x)),+], constants, |[$($x),+], constants| {
                        // An op without a constant never looks at it.
                        let constant = constants.first().copied().unwrap_or_else(|| Symbol::of(0.0));
                        [Self::value($($x,)+ constant)]
                    }))
                }
                fn formula_numbers(&self, _: &[f64]) -> Vec<f64> {
                    vec![$(f64::from(self.$c))?]
                }
            }

            impl Cpu for $op {
                fn run(&self, cx: &mut CpuCx<'_>) {
                    tiles::run_one(self.tile_kernel().expect("an elementwise op"), cx);
                }
                fn in_place(&self) -> Vec<(usize, usize)> {
                    [$(stringify!($x)),+].iter().enumerate().map(|(at, _)| (at, 0)).collect()
                }
                fn tile_kernel(&self) -> Option<TileKernel> {
                    vectorized! {
                        fn kernel(inputs: &[&[f32]], out: &mut [f32], constant: f32) {
                            let count = out.len();
                            let mut operands = inputs.iter();
                            $(let $x = &operands.next().expect("infer checks the arity")[..count];)+
                            for at in 0..count {
                                out[at] = $op::value($($x[at],)+ constant);
                            }
                        }
                    }
                    Some(TileKernel { function: kernel, constant: self.constant_of() })
                }
            }

            impl Cuda for $op {
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

            impl Cases for $op {
                fn cases() -> Vec<Case> {
                    Vec::from($cases)
                }
            }
        )*

        /// Every op of this file.
        pub const KINDS: &[OpKind] = &[$(OpKind::of::<$op>().with_cuda::<$op>()),*];
    };
}

/// The usual shapes for a function of one variable.
fn unary<T: Op>(op: fn() -> T, low: f64, high: f64) -> [Case; 3] {
    [vec![7], vec![3, 5], vec![33]].map(|shape| Case::new(op(), [Arg::real(shape).within(low, high)]))
}

/// The usual broadcasts for a function of two.
fn binary<T: Op>(op: fn() -> T, arg: fn(Vec<usize>) -> Arg) -> [Case; 6] {
    [
        (vec![2, 3], vec![2, 3]),
        (vec![4, 3], vec![3]),
        (vec![4, 3], vec![4, 1]),
        (vec![2, 1, 3], vec![2, 4, 1]),
        (vec![5], vec![]),
        (vec![1], vec![3, 1]),
    ]
    .map(|(a, b)| Case::new(op(), [arg(a), arg(b)]))
}

/// A derivative op `d(x)·g`, also with broadcasting.
fn derivative<T: Op>(op: fn() -> T, low: f64, high: f64) -> [Case; 3] {
    [(vec![7], vec![7]), (vec![2, 9], vec![2, 9]), (vec![3, 1], vec![4])]
        .map(|(x, g)| Case::new(op(), [Arg::real(x).within(low, high), Arg::real(g)]))
}

/// The same where `d` is piecewise constant.
fn steps<T: Op>(op: fn() -> T, low: f64, high: f64) -> [Case; 3] {
    derivative(op, low, high).map(|mut case| {
        case.args[0].differentiate = false;
        case
    })
}

/// The rule of a derivative op `d(x)·g`, from `d` itself as an op and from its own derivative.
fn backward<'b>(
    cx: &GradCx<'b>,
    op: impl Op,
    second: impl FnOnce(Tensor<'b>) -> Tensor<'b>,
) -> Vec<Option<Tensor<'b>>> {
    let (x, g, w) = (cx.input(0), cx.input(1), cx.grad());
    vec![cx.needs(0).then(|| w.mul(g).mul(second(x)).sum_to(&x)), cx.needs(1).then(|| x.then(op, &[w]).sum_to(&g))]
}

fn at_least_half(shape: Vec<usize>) -> Arg {
    Arg::positive(shape)
}

fn any(shape: Vec<usize>) -> Arg {
    Arg::real(shape)
}

fn distinct(shape: Vec<usize>) -> Arg {
    Arg::spread(shape)
}

const SQRT_2: f64 = std::f64::consts::SQRT_2;
/// √(2/π), of the tanh form of gelu.
const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
const GELU_CUBE: f64 = 0.044_715;
/// 1/√(2π), the height of the normal density.
const NORMAL_PEAK: f64 = 0.398_942_280_401_432_7;

elementwise! {
    /// `a + b`.
    Add = "add"(a, b) => a + b,
    grad |cx, g| vec![cx.needs(0).then(|| g.sum_to(&cx.input(0))), cx.needs(1).then(|| g.sum_to(&cx.input(1)))],
    cases binary(|| Add {}, any);

    /// `a − b`.
    Sub = "sub"(a, b) => a - b,
    grad |cx, g| vec![cx.needs(0).then(|| g.sum_to(&cx.input(0))), cx.needs(1).then(|| g.neg().sum_to(&cx.input(1)))],
    cases binary(|| Sub {}, any);

    /// `a · b`.
    Mul = "mul"(a, b) => a * b,
    grad |cx, g| vec![
        cx.needs(0).then(|| g.mul(cx.input(1)).sum_to(&cx.input(0))),
        cx.needs(1).then(|| g.mul(cx.input(0)).sum_to(&cx.input(1))),
    ],
    cases binary(|| Mul {}, any);

    /// `a · b + c`, rounded once.
    MulAdd = "mul_add"(a, b, c) => a.mul_add(b, c),
    grad |cx, g| vec![
        cx.needs(0).then(|| g.mul(cx.input(1)).sum_to(&cx.input(0))),
        cx.needs(1).then(|| g.mul(cx.input(0)).sum_to(&cx.input(1))),
        cx.needs(2).then(|| g.sum_to(&cx.input(2))),
    ],
    cases [
        Case::new(MulAdd {}, [any(vec![3, 37]), any(vec![3, 37]), any(vec![3, 37])]),
        Case::new(MulAdd {}, [any(vec![2, 3, 5]), any(vec![3, 1]), any(vec![5])]),
        Case::new(MulAdd {}, [any(vec![0, 4]), any(vec![4]), any(vec![])]),
    ];

    /// `a / b`.
    Div = "div"(a, b) => a / b,
    grad |cx, g| vec![
        cx.needs(0).then(|| g.div(cx.input(1)).sum_to(&cx.input(0))),
        cx.needs(1).then(|| g.mul(cx.output(0)).div(cx.input(1)).neg().sum_to(&cx.input(1))),
    ],
    cases binary(|| Div {}, at_least_half);

    /// The larger of two; equal values send their gradient to the first.
    Maximum = "maximum"(a, b) => a.larger(b),
    grad |cx, g| {
        let first = cx.input(0).at_least(cx.input(1));
        vec![
            cx.needs(0).then(|| g.mul(first).sum_to(&cx.input(0))),
            cx.needs(1).then(|| g.mul(first.neg().shift(1.0)).sum_to(&cx.input(1))),
        ]
    },
    cases binary(|| Maximum {}, distinct);

    /// The smaller of two; equal values send their gradient to the first.
    Minimum = "minimum"(a, b) => a.smaller(b),
    grad |cx, g| {
        let first = cx.input(1).at_least(cx.input(0));
        vec![
            cx.needs(0).then(|| g.mul(first).sum_to(&cx.input(0))),
            cx.needs(1).then(|| g.mul(first.neg().shift(1.0)).sum_to(&cx.input(1))),
        ]
    },
    cases binary(|| Minimum {}, distinct);

    /// 1 where `a ≥ b`, else 0, as a number; its gradient is zero.
    AtLeast = "at_least"(a, b) => R::select(b.is_at_most(a), R::of(1.0), R::of(0.0)),
    grad |cx, g| vec![None, None],
    constant a b,
    cases [Case::new(AtLeast {}, [Arg::spread([3, 4]).constant(), Arg::spread([4]).constant()])];

    /// `aᵇ` for positive `a`.
    Pow = "pow"(a, b) => a.pow(b),
    grad |cx, g| vec![
        cx.needs(0).then(|| g.mul(cx.input(1)).mul(cx.input(0).pow(cx.input(1).shift(-1.0))).sum_to(&cx.input(0))),
        cx.needs(1).then(|| g.mul(cx.output(0)).mul(cx.input(0).ln()).sum_to(&cx.input(1))),
    ],
    cases binary(|| Pow {}, at_least_half);

    /// `c · x`.
    Scale = "scale"(x; factor) => x * factor,
    grad |cx, g| vec![Some(g.scale(factor))],
    cases unary(|| Scale { factor: -1.75 }, -2.0, 2.0);

    /// `x + c`.
    Shift = "shift"(x; by) => x + by,
    grad |cx, g| vec![Some(g)],
    cases unary(|| Shift { by: 0.3 }, -2.0, 2.0);

    /// `xᶜ` for positive `x` (any `x` if `c` is whole).
    Power = "power"(x; exponent) => x.pow(exponent),
    grad |cx, g| vec![Some(g.mul(cx.input(0).power(exponent - 1.0).scale(exponent)))],
    cases unary(|| Power { exponent: 2.5 }, 0.5, 2.0);

    /// `−x`.
    Neg = "neg"(x) => -x,
    grad |cx, g| vec![Some(g.neg())],
    cases unary(|| Neg {}, -2.0, 2.0);

    /// `eˣ`.
    Exp = "exp"(x) => x.exp(),
    grad |cx, g| vec![Some(g.mul(cx.output(0)))],
    cases unary(|| Exp {}, -2.0, 2.0);

    /// Natural logarithm.
    Ln = "ln"(x) => x.ln(),
    grad |cx, g| vec![Some(g.div(cx.input(0)))],
    cases unary(|| Ln {}, 0.5, 3.0);

    /// Square root.
    Sqrt = "sqrt"(x) => x.sqrt(),
    grad |cx, g| vec![Some(g.div(cx.output(0)).scale(0.5))],
    cases unary(|| Sqrt {}, 0.5, 3.0);

    /// `1/√x`.
    Rsqrt = "rsqrt"(x) => R::of(1.0) / x.sqrt(),
    grad |cx, g| vec![Some(g.mul(cx.output(0)).div(cx.input(0)).scale(-0.5))],
    cases unary(|| Rsqrt {}, 0.5, 3.0);

    /// `x²`.
    Square = "square"(x) => x * x,
    grad |cx, g| vec![Some(g.mul(cx.input(0)).scale(2.0))],
    cases unary(|| Square {}, -2.0, 2.0);

    /// `|x|`; the gradient at zero is zero.
    Abs = "abs"(x) => x.abs(),
    grad |cx, g| vec![Some(g.mul(cx.input(0).sign()))],
    cases [Case::new(Abs {}, [Arg::spread([9])])];

    /// −1, 0 or 1; its gradient is zero.
    Sign = "sign"(x) => R::select(x.is_above(R::of(0.0)), R::of(1.0), R::select(x.is_less(R::of(0.0)), R::of(-1.0), x)),
    grad |cx, g| vec![None],
    constant x,
    cases [Case::new(Sign {}, [Arg::spread([9]).constant()])];

    /// The largest whole number not above; its gradient is zero.
    Floor = "floor"(x) => x.floor(),
    grad |cx, g| vec![None],
    constant x,
    cases [Case::new(Floor {}, [Arg::real([9]).constant()])];

    /// The same value, through which no gradient passes.
    StopGradient = "stop_gradient"(x) => x,
    grad |cx, g| vec![None],
    constant x,
    cases [Case::new(StopGradient {}, [Arg::real([9]).constant()])];

    /// Sine.
    Sin = "sin"(x) => x.sin(),
    grad |cx, g| vec![Some(g.mul(cx.input(0).cos()))],
    cases unary(|| Sin {}, -3.0, 3.0);

    /// Cosine.
    Cos = "cos"(x) => x.cos(),
    grad |cx, g| vec![Some(g.mul(cx.input(0).sin()).neg())],
    cases unary(|| Cos {}, -3.0, 3.0);

    /// `max(x, 0)`.
    Relu = "relu"(x) => x.larger(R::of(0.0)),
    grad |cx, g| vec![Some(cx.output(0).then(ReluGrad {}, &[g]))],
    cases [Case::new(Relu {}, [Arg::spread([9])]), Case::new(Relu {}, [Arg::spread([3, 40])])];

    /// `g` where the output of relu is positive.
    ReluGrad = "relu_grad"(y, g) => R::select(y.is_above(R::of(0.0)), g, R::of(0.0)),
    grad |cx, g| vec![None, Some(cx.input(0).then(ReluGrad {}, &[g]).sum_to(&cx.input(1)))],
    constant y,
    cases steps(|| ReluGrad {}, 0.1, 2.0);

    /// `x` or `slope·x` below zero.
    LeakyRelu = "leaky_relu"(x; slope) => R::select(x.is_above(R::of(0.0)), x, slope * x),
    grad |cx, g| vec![Some(cx.input(0).then(LeakyReluGrad { slope }, &[g]))],
    cases [Case::new(LeakyRelu { slope: 0.1 }, [Arg::spread([9])])];

    /// Backward of leaky relu.
    LeakyReluGrad = "leaky_relu_grad"(x, g; slope) => R::select(x.is_above(R::of(0.0)), g, slope * g),
    grad |cx, g| vec![None, Some(cx.input(0).then(LeakyReluGrad { slope }, &[g]).sum_to(&cx.input(1)))],
    constant x,
    cases steps(|| LeakyReluGrad { slope: 0.1 }, -2.0, 2.0);

    /// `x` above zero, `α(eˣ − 1)` below.
    Elu = "elu"(x; alpha) => R::select(x.is_above(R::of(0.0)), x, alpha * x.exp_m1()),
    grad |cx, g| vec![Some(cx.input(0).then(EluGrad { alpha }, &[g]))],
    cases [Case::new(Elu { alpha: 0.7 }, [Arg::spread([9])])];

    /// Backward of elu.
    EluGrad = "elu_grad"(x, g; alpha) => R::select(x.is_above(R::of(0.0)), g, g * alpha * x.exp()),
    grad |cx, g| backward(cx, EluGrad { alpha }, |x| {
        // `α·eˣ` below zero, and nothing above.
        let one = x.builder().full(1.0, x.ty());
        x.then(EluGrad { alpha }, &[one]).sub(x.then(ReluGrad {}, &[one]))
    }),
    cases derivative(|| EluGrad { alpha: 0.7 }, -2.0, 2.0);

    /// Gelu in its exact form, `x·Φ(x)`.
    Gelu = "gelu"(x) => x * R::of(0.5) * (R::of(1.0) + (x / R::of(SQRT_2)).erf()),
    grad |cx, g| vec![Some(cx.input(0).then(GeluGrad {}, &[g]))],
    cases unary(|| Gelu {}, -4.0, 4.0);

    /// Backward of the exact gelu.
    GeluGrad = "gelu_grad"(x, g) => {
        let cumulative = R::of(0.5) * (R::of(1.0) + (x / R::of(SQRT_2)).erf());
        g * (cumulative + x * R::of(NORMAL_PEAK) * (x * x * R::of(-0.5)).exp())
    },
    grad |cx, g| backward(cx, GeluGrad {}, |x| {
        // `φ(x)·(2 − x²)`.
        let square = x.square();
        square.scale(-0.5).exp().scale(NORMAL_PEAK as f32).mul(square.neg().shift(2.0))
    }),
    cases derivative(|| GeluGrad {}, -3.0, 3.0);

    /// Gelu in the tanh form of GPT-2. `½(1 + tanh u)` is written as the logistic function of `2u`: one exponential.
    GeluTanh = "gelu_tanh"(x) => {
        let inner = x * (R::of(2.0 * GELU_SCALE) + R::of(2.0 * GELU_SCALE * GELU_CUBE) * x * x);
        x * inner.sigmoid()
    },
    grad |cx, g| vec![Some(cx.input(0).then(GeluTanhGrad {}, &[g]))],
    cases unary(|| GeluTanh {}, -4.0, 4.0);

    /// Backward of the tanh form.
    GeluTanhGrad = "gelu_tanh_grad"(x, g) => {
        let square = x * x;
        let inner = x * (R::of(2.0 * GELU_SCALE) + R::of(2.0 * GELU_SCALE * GELU_CUBE) * square);
        let gate = inner.sigmoid();
        let slope = R::of(2.0 * GELU_SCALE) + R::of(6.0 * GELU_SCALE * GELU_CUBE) * square;
        g * gate * (R::of(1.0) + x * (R::of(1.0) - gate) * slope)
    },
    grad |cx, g| backward(cx, GeluTanhGrad {}, |x| {
        // With `u = x·(a + b·x²)` and `s = sigmoid(u)`: `2·s′·u′ + x·(s″·u′² + s′·u″)`.
        let (a, b) = (2.0 * GELU_SCALE as f32, (2.0 * GELU_SCALE * GELU_CUBE) as f32);
        let square = x.square();
        let gate = x.mul(square.scale(b).shift(a)).sigmoid();
        let gate_slope = gate.mul(gate.neg().shift(1.0));
        let slope = square.scale(3.0 * b).shift(a);
        let bend = gate.scale(-2.0).shift(1.0).mul(slope.square()).add(x.scale(6.0 * b));
        gate_slope.mul(slope.scale(2.0).add(x.mul(bend)))
    }),
    cases derivative(|| GeluTanhGrad {}, -3.0, 3.0);

    /// Logistic function.
    Sigmoid = "sigmoid"(x) => x.sigmoid(),
    grad |cx, g| vec![Some(cx.output(0).then(SigmoidGrad {}, &[g]))],
    cases unary(|| Sigmoid {}, -4.0, 4.0);

    /// Backward of the logistic function, from its output.
    SigmoidGrad = "sigmoid_grad"(y, g) => g * y * (R::of(1.0) - y),
    grad |cx, g| backward(cx, SigmoidGrad {}, |x| {
        // `y·(1 − y)` grows by `1 − 2y`.
        x.scale(-2.0).shift(1.0)
    }),
    cases derivative(|| SigmoidGrad {}, 0.1, 0.9);

    /// Hyperbolic tangent.
    Tanh = "tanh"(x) => x.tanh(),
    grad |cx, g| vec![Some(cx.output(0).then(TanhGrad {}, &[g]))],
    cases unary(|| Tanh {}, -3.0, 3.0);

    /// Backward of tanh, from its output.
    TanhGrad = "tanh_grad"(y, g) => g * (R::of(1.0) - y * y),
    grad |cx, g| backward(cx, TanhGrad {}, |x| {
        // `1 − y²` grows by `−2y`.
        x.scale(-2.0)
    }),
    cases derivative(|| TanhGrad {}, -0.9, 0.9);

    /// `x·sigmoid(x)`, also called swish.
    Silu = "silu"(x) => x * x.sigmoid(),
    grad |cx, g| vec![Some(cx.input(0).then(SiluGrad {}, &[g]))],
    cases unary(|| Silu {}, -4.0, 4.0);

    /// Backward of silu.
    SiluGrad = "silu_grad"(x, g) => {
        let gate = x.sigmoid();
        g * gate * (R::of(1.0) + x * (R::of(1.0) - gate))
    },
    grad |cx, g| backward(cx, SiluGrad {}, |x| {
        // `s′·(2 + x·(1 − 2s))` with `s = sigmoid(x)`.
        let gate = x.sigmoid();
        let gate_slope = gate.mul(gate.neg().shift(1.0));
        gate_slope.mul(x.mul(gate.scale(-2.0).shift(1.0)).shift(2.0))
    }),
    cases derivative(|| SiluGrad {}, -3.0, 3.0);

    /// `ln(1 + eˣ)`.
    Softplus = "softplus"(x) => x.softplus(),
    grad |cx, g| vec![Some(g.mul(cx.input(0).sigmoid()))],
    cases unary(|| Softplus {}, -4.0, 4.0);

    /// Huber's loss of a difference: quadratic within `delta`, linear beyond.
    Huber = "huber"(x; delta) => {
        let size = x.abs();
        R::select(size.is_less(delta), R::of(0.5) * x * x, delta * (size - R::of(0.5) * delta))
    },
    grad |cx, g| vec![Some(g.mul(cx.input(0).clamp(-delta, delta)))],
    cases [Case::new(Huber { delta: 0.8 }, [Arg::spread([9])])];
}

kolo_graph::methods! {
    /// Elementwise arithmetic on tensors, with broadcasting.
    ElementwiseMethods {
        fn add(self, other: Tensor<'b>) -> Tensor<'b> { self.then(Add {}, &[other]) }
        fn sub(self, other: Tensor<'b>) -> Tensor<'b> { self.then(Sub {}, &[other]) }
        fn mul(self, other: Tensor<'b>) -> Tensor<'b> { self.then(Mul {}, &[other]) }
        /// `self · by + plus`, rounded once.
        fn mul_add(self, by: Tensor<'b>, plus: Tensor<'b>) -> Tensor<'b> { self.then(MulAdd {}, &[by, plus]) }
        fn div(self, other: Tensor<'b>) -> Tensor<'b> { self.then(Div {}, &[other]) }
        fn maximum(self, other: Tensor<'b>) -> Tensor<'b> { self.then(Maximum {}, &[other]) }
        fn minimum(self, other: Tensor<'b>) -> Tensor<'b> { self.then(Minimum {}, &[other]) }
        /// 1.0 where `self ≥ other`, else 0.0.
        fn at_least(self, other: Tensor<'b>) -> Tensor<'b> { self.then(AtLeast {}, &[other]) }
        fn pow(self, other: Tensor<'b>) -> Tensor<'b> { self.then(Pow {}, &[other]) }
        fn scale(self, factor: f32) -> Tensor<'b> { self.then(Scale { factor }, &[]) }
        fn shift(self, by: f32) -> Tensor<'b> { self.then(Shift { by }, &[]) }
        fn power(self, exponent: f32) -> Tensor<'b> { self.then(Power { exponent }, &[]) }
        fn neg(self) -> Tensor<'b> { self.then(Neg {}, &[]) }
        fn exp(self) -> Tensor<'b> { self.then(Exp {}, &[]) }
        fn ln(self) -> Tensor<'b> { self.then(Ln {}, &[]) }
        fn sqrt(self) -> Tensor<'b> { self.then(Sqrt {}, &[]) }
        fn rsqrt(self) -> Tensor<'b> { self.then(Rsqrt {}, &[]) }
        fn square(self) -> Tensor<'b> { self.then(Square {}, &[]) }
        fn abs(self) -> Tensor<'b> { self.then(Abs {}, &[]) }
        fn sign(self) -> Tensor<'b> { self.then(Sign {}, &[]) }
        fn floor(self) -> Tensor<'b> { self.then(Floor {}, &[]) }
        /// The same value as a constant: no gradient passes through.
        fn stop_gradient(self) -> Tensor<'b> { self.then(StopGradient {}, &[]) }
        fn sin(self) -> Tensor<'b> { self.then(Sin {}, &[]) }
        fn cos(self) -> Tensor<'b> { self.then(Cos {}, &[]) }
        fn relu(self) -> Tensor<'b> { self.then(Relu {}, &[]) }
        fn leaky_relu(self, slope: f32) -> Tensor<'b> { self.then(LeakyRelu { slope }, &[]) }
        fn elu(self, alpha: f32) -> Tensor<'b> { self.then(Elu { alpha }, &[]) }
        fn gelu(self) -> Tensor<'b> { self.then(Gelu {}, &[]) }
        fn gelu_tanh(self) -> Tensor<'b> { self.then(GeluTanh {}, &[]) }
        fn sigmoid(self) -> Tensor<'b> { self.then(Sigmoid {}, &[]) }
        fn tanh(self) -> Tensor<'b> { self.then(Tanh {}, &[]) }
        fn silu(self) -> Tensor<'b> { self.then(Silu {}, &[]) }
        fn softplus(self) -> Tensor<'b> { self.then(Softplus {}, &[]) }
        fn huber(self, delta: f32) -> Tensor<'b> { self.then(Huber { delta }, &[]) }
        fn clamp(self, low: f32, high: f32) -> Tensor<'b> {
            let builder = self.builder();
            let bound = |value: f32| builder.full(f64::from(value), Type::new(DType::F32, []));
            self.maximum(bound(low)).minimum(bound(high))
        }
    }
}
