//! The op trait: what an op is, declared once, and apart from any device.
//!
//! An op is plain data. The graph holds it behind `Arc<dyn Op>`; a registry slice lists the kinds. Shape, cost and
//! sharding come from the index expression; an op with none writes `infer` and `flops` by hand. How a device runs it is a
//! trait of that device ([`Cpu`], [`Cuda`]), implemented beside the op and reached through its [`OpKind`].

use crate::attr::{AttrReader, Attrs};
use crate::builder::Tensor;
use crate::cpu::Cpu;
use crate::cuda::Cuda;
use crate::formula::Formula;
use crate::index::Index;
use crate::operand::Operands;
use crate::split::Split;
use crate::types::{Shape, Type};
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

/// Name and attributes; implemented by the `op!` macro.
pub trait Describe {
    fn name(&self) -> &'static str;
    fn attrs(&self) -> Attrs;
}

/// What the parser needs of an op kind; implemented by the `op!` macro.
pub trait Declared: Sized {
    const NAME: &'static str;
    /// The doc comment of its declaration.
    const DOC: &'static str;
    /// Names and Rust types of its attributes.
    const ATTRIBUTES: &'static [(&'static str, &'static str)];
    fn read(attrs: &AttrReader<'_>) -> Result<Self, String>;
}

/// What sets the time of a call, beside its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Work {
    /// Its bytes alone.
    #[default]
    Stream,
    /// Its multiply-adds: a matrix product or a convolution.
    Product,
    /// Multiply-adds in products of a few rows, one after the other, as recurrent layers have one per time step.
    ThinProducts,
}

/// How the multiply-adds of a call are laid out, for a device that has to fill its units with them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ProductShape {
    /// A matrix product. The elements of its result that do not make up a row of `columns` are its rows.
    Matrix { columns: usize },
    /// A convolution, or a gradient of one, as a matrix product: of images with so many `channels` in a group. `winograd`: if
    /// Winograd's algorithm applies, so that it can do with fewer multiplications, how many taps a side of its kernel has.
    Convolution { columns: usize, channels: usize, winograd: Option<usize> },
    /// Attention: `products` matrix products over `scores` pairs of a query and a key. A share `masked` of the pairs is hidden,
    /// and need not be computed where the scores are not kept.
    Attention { scores: usize, products: u32, masked: f64 },
}

impl ProductShape {
    /// The share of the pairs that a causal mask hides from attention.
    pub const CAUSAL: f64 = 0.5;
}

/// What an op takes and gives in a step of mixed precision, where some values are halves (bf16 or f16) and others are f32.
/// A kernel computes in f32 whatever it reads; halves are how its operands and results are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mixed {
    /// It takes floats in f32: a loss, a reduction, an update, and whatever does not say otherwise.
    #[default]
    Full,
    /// It takes halves for every operand that [may be one](crate::Operand::in_full): a product, a norm.
    Half,
    /// It takes what there is, all floats of one type: it moves values about, or reduces them.
    AsGiven,
    /// It computes element by element, in f32; what it reads is widened and what it leaves is rounded on the way.
    Elementwise,
}

pub trait Op: Describe + Any + Debug + Send + Sync {
    /// The inputs with their element types and gradients, and the outputs. [`checked_types`](crate::checked_types) holds
    /// every use of the op to it.
    fn operands(&self) -> Operands;

    /// The index expression for these inputs; `None` for the odd ops that infer by hand.
    fn index(&self, _inputs: &[Type]) -> Option<Index> {
        None
    }

    /// Every legal way to split the op on inputs and outputs of these types. An op whose index expression does not say them
    /// all writes them by hand.
    fn splits(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<Split> {
        self.index(inputs).map_or_else(Vec::new, |index| index.splits(inputs))
    }

    /// What a part of a split runs that has this many units, if it is another op than the whole's: attributes that hold
    /// sizes change with them.
    fn part(&self, _split: &Split, _units: usize) -> Option<Arc<dyn Op>> {
        None
    }

    /// The same where the part's units follow on number `first`, for splits that are [ordered](Split::ordered).
    fn part_at(&self, split: &Split, _first: usize, units: usize) -> Option<Arc<dyn Op>> {
        self.part(split, units)
    }

    /// Why the op declares no split at all.
    fn unsplittable(&self) -> Option<&'static str> {
        (!self.pure()).then_some("it acts outside the graph's values, and is placed after everything else")
    }

    /// Output types, or what is wrong with the inputs' shapes: [`checked_types`](crate::checked_types) has compared their
    /// number and element types with `operands` before. By default the outputs have the first input's dtype.
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let index = self.index(inputs).ok_or("has no index expression and no infer of its own")?;
        let shapes = index.output_shapes(inputs)?;
        Ok(shapes.into_iter().map(|shape| Type::new(inputs[0].dtype, shape)).collect())
    }

    fn flops_per_point(&self) -> u64 {
        1
    }

    fn flops(&self, inputs: &[Type], outputs: &[Type]) -> u64 {
        match self.index(inputs) {
            Some(index) => index.points(inputs).saturating_mul(self.flops_per_point()),
            None => outputs.iter().map(|ty| ty.elements() as u64).sum::<u64>().saturating_mul(self.flops_per_point()),
        }
    }

    /// What sets the time of a call, for a device that knows no more than rates.
    fn work(&self) -> Work {
        Work::Stream
    }

    /// The layout of its multiply-adds, if its [`work`](Self::work) is a product. By default a matrix product whose columns are
    /// the last dim of the first output.
    fn product_shape(&self, _inputs: &[Type], outputs: &[Type]) -> ProductShape {
        ProductShape::Matrix { columns: outputs[0].shape.last().copied().unwrap_or(1) }
    }

    /// Whether a framework that does not fuse runs it as several ops, each of which reads and writes memory.
    fn composite(&self) -> bool {
        false
    }

    /// Whether it needs sums over its large operands before it can compute the first number of its result, so that a device reads
    /// them twice.
    fn reads_twice(&self) -> bool {
        false
    }

    /// The input that a framework may copy to f32 before it computes: the logits of a loss.
    fn widened(&self) -> Option<usize> {
        None
    }

    /// Whether it is the rule of an optimizer: it moves a parameter, or finds where to, element by element, with the same bits
    /// on every device. Its first input and its output `param`, if it has one, are the parameter.
    fn is_update_rule(&self) -> bool {
        false
    }

    /// What it takes and gives in a step of mixed precision.
    fn mixed(&self) -> Mixed {
        Mixed::Full
    }

    /// The same op with a result in f32 where its operands are halves, if it has such a form: a gradient that is summed over
    /// grains, or a part of a sum, is not rounded on its way.
    fn wide(&self) -> Option<Arc<dyn Op>> {
        None
    }

    /// Gradients of the inputs, `None` where there is none. May build only what `cx.needs` asks for. It must give one for
    /// every input that `cx.needs` names and `operands` promises a rule for: the walk refuses to drop a gradient.
    fn grad<'b>(&self, _cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        Vec::new()
    }

    /// The definition: slow, obvious, in f64.
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense>;

    /// Output 0 is input 0's bytes, or a run of them, under another type: no kernel runs.
    fn view(&self) -> bool {
        false
    }

    /// Every output is the memory of the input of the same number, or a run of it.
    fn aliases(&self) -> bool {
        self.view()
    }

    /// Whether an op that aliases changes the memory that it is given. Nobody else reads that input.
    fn changes_input(&self) -> bool {
        false
    }

    /// An op with an effect outside the graph's values, or whose result changes between calls, is never merged.
    fn pure(&self) -> bool {
        true
    }

    /// What it exchanges with other ranks, if that is what it does.
    fn collective(&self) -> Option<crate::collective::Collective<'_>> {
        None
    }

    /// What an elementwise op computes for one element; `None` for any other op.
    fn formula(&self) -> Option<Formula> {
        None
    }

    /// The numbers of the formula, from the values of the scalar inputs that follow the formula's own.
    fn formula_numbers(&self, _scalars: &[f64]) -> Vec<f64> {
        Vec::new()
    }
}

impl dyn Op {
    pub fn downcast<T: Op>(&self) -> Option<&T> {
        (self as &dyn Any).downcast_ref::<T>()
    }

    pub fn is<T: Op>(&self) -> bool {
        self.downcast::<T>().is_some()
    }

    /// Name and attributes as text; equal text means equal op.
    pub fn signature(&self) -> String {
        let attrs: Vec<String> = self.attrs().iter().map(|(key, value)| format!("{key}={value}")).collect();
        if attrs.is_empty() { self.name().into() } else { format!("{}{{{}}}", self.name(), attrs.join(", ")) }
    }
}

/// From an op of a kind to how the CPU runs it; `None` for an op of another kind.
pub type CpuSide = for<'a> fn(&'a dyn Op) -> Option<&'a dyn Cpu>;

/// The same for an NVIDIA GPU.
pub type CudaSide = for<'a> fn(&'a dyn Op) -> Option<&'a dyn Cuda>;

/// A kind of op: how to read one from text, the cases its conformance suite must try, and how each device runs it.
///
/// Devices stand beside the op, one field each. Another device adds a trait of its own, an optional field here and a `const fn`
/// like [`OpKind::with_cuda`]; [`Op`] and the kinds that the device cannot run stay as they are.
#[derive(Clone, Copy, Debug)]
pub struct OpKind {
    pub name: &'static str,
    /// What it does, as its declaration says.
    pub doc: &'static str,
    /// Names and Rust types of its attributes.
    pub attributes: &'static [(&'static str, &'static str)],
    pub read: fn(&AttrReader<'_>) -> Result<Arc<dyn Op>, String>,
    pub cases: fn() -> Vec<Case>,
    /// How the CPU runs it. `None` for what executors do themselves (sources, views, sums over grains, collectives), and for
    /// an op that the CPU cannot run.
    pub cpu: Option<CpuSide>,
    /// How an NVIDIA GPU runs it, likewise.
    pub cuda: Option<CudaSide>,
}

impl OpKind {
    /// A kind that the CPU runs.
    pub const fn of<T: Cpu + Declared + Cases>() -> Self {
        Self::without_kernels::<T>().with_cpu::<T>()
    }

    /// A kind that no device has a kernel for.
    pub const fn without_kernels<T: Op + Declared + Cases>() -> Self {
        Self {
            name: T::NAME,
            doc: T::DOC,
            attributes: T::ATTRIBUTES,
            read: |attrs| Ok(Arc::new(T::read(attrs)?)),
            cases: T::cases,
            cpu: None,
            cuda: None,
        }
    }

    /// The same with `T`, the op itself, as its CPU side.
    pub const fn with_cpu<T: Cpu>(mut self) -> Self {
        self.cpu = Some(|op| op.downcast::<T>().map(|op| op as &dyn Cpu));
        self
    }

    /// The same with `T`, the op itself, as its side for NVIDIA GPUs.
    pub const fn with_cuda<T: Cuda>(mut self) -> Self {
        self.cuda = Some(|op| op.downcast::<T>().map(|op| op as &dyn Cuda));
        self
    }
}

/// The shapes and values a kind's conformance suite must try.
pub trait Cases {
    fn cases() -> Vec<Case>;
}

/// One op on inputs of given types and domains.
#[derive(Clone, Debug)]
pub struct Case {
    pub op: Arc<dyn Op>,
    pub args: Vec<Arg>,
    /// Relative tolerance of the f32 kernel against the f64 reference.
    pub tolerance: f64,
    /// Whether the kernel may leave out products with zeros of the definition, and with them what is not finite there.
    pub leaves_out_zeros: bool,
}

impl Case {
    pub fn new(op: impl Op, args: impl Into<Vec<Arg>>) -> Self {
        Self { op: Arc::new(op), args: args.into(), tolerance: 2e-5, leaves_out_zeros: false }
    }

    pub fn tolerance(mut self, tolerance: f64) -> Self {
        self.tolerance = tolerance;
        self
    }

    pub fn leaves_out_zeros(mut self) -> Self {
        self.leaves_out_zeros = true;
        self
    }
}

/// A test argument: a type and the values drawn for it.
#[derive(Clone, Debug)]
pub struct Arg {
    pub ty: Type,
    pub domain: Domain,
    /// Whether the suite demands a gradient for it.
    pub differentiate: bool,
}

/// Values drawn for a test argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Domain {
    /// Uniform in the range.
    Real(f64, f64),
    /// Distinct values at least 0.01 apart in random order, so that maxima and kinks have clear gradients.
    Spread,
    /// Whole numbers in `low..high`.
    Index(i64, i64),
    /// The `[key, key, step, first sample]` words of a random stream.
    Rng,
}

impl Arg {
    pub fn real(shape: impl Into<Shape>) -> Self {
        Self { ty: Type::f32(shape), domain: Domain::Real(-2.0, 2.0), differentiate: true }
    }

    pub fn positive(shape: impl Into<Shape>) -> Self {
        Self { ty: Type::f32(shape), domain: Domain::Real(0.5, 2.0), differentiate: true }
    }

    pub fn spread(shape: impl Into<Shape>) -> Self {
        Self { ty: Type::f32(shape), domain: Domain::Spread, differentiate: true }
    }

    /// This argument has no gradient.
    pub fn constant(mut self) -> Self {
        self.differentiate = false;
        self
    }

    pub fn within(mut self, low: f64, high: f64) -> Self {
        self.domain = Domain::Real(low, high);
        self
    }

    pub fn index(shape: impl Into<Shape>, low: i64, high: i64) -> Self {
        Self { ty: Type::i32(shape), domain: Domain::Index(low, high), differentiate: false }
    }

    pub fn boolean(shape: impl Into<Shape>) -> Self {
        Self { ty: Type::new(crate::types::DType::Bool, shape), domain: Domain::Index(0, 2), differentiate: false }
    }

    /// Bytes in `low..high`, which are at least 0 and at most 256.
    pub fn byte(shape: impl Into<Shape>, low: i64, high: i64) -> Self {
        Self { ty: Type::new(crate::types::DType::U8, shape), domain: Domain::Index(low, high), differentiate: false }
    }

    pub fn rng() -> Self {
        Self { ty: Type::i32([4]), domain: Domain::Rng, differentiate: false }
    }
}

/// A dense array of f64: the reference executor's only kind of value.
#[derive(Clone, Debug, PartialEq)]
pub struct Dense {
    pub shape: Shape,
    pub data: Vec<f64>,
}

impl Dense {
    pub fn new(shape: impl Into<Shape>, data: Vec<f64>) -> Self {
        let shape = shape.into();
        assert_eq!(shape.iter().product::<usize>(), data.len(), "shape {shape:?}");
        Self { shape, data }
    }

    pub fn zeros(shape: impl Into<Shape>) -> Self {
        let shape = shape.into();
        let count = shape.iter().product();
        Self { shape, data: vec![0.0; count] }
    }

    /// Builds each element from its multi-index.
    pub fn from_fn(shape: impl Into<Shape>, mut f: impl FnMut(&[usize]) -> f64) -> Self {
        let mut out = Self::zeros(shape);
        let mut at = vec![0; out.shape.len()];
        for slot in 0..out.data.len() {
            out.data[slot] = f(&at);
            advance(&mut at, &out.shape);
        }
        out
    }

    /// The element at `at`, where dims of size one stretch and missing leading dims are ignored.
    #[inline]
    pub fn get(&self, at: &[usize]) -> f64 {
        let skip = at.len() - self.shape.len();
        let mut offset = 0;
        for (size, at) in self.shape.iter().zip(&at[skip..]) {
            offset = offset * size + if *size == 1 { 0 } else { *at };
        }
        self.data[offset]
    }
}

/// Steps a multi-index in row-major order.
pub fn advance(at: &mut [usize], shape: &[usize]) {
    for dim in (0..shape.len()).rev() {
        at[dim] += 1;
        if at[dim] < shape[dim] {
            return;
        }
        at[dim] = 0;
    }
}

/// What a gradient rule sees.
#[derive(Debug)]
pub struct GradCx<'b> {
    pub inputs: Vec<Tensor<'b>>,
    pub outputs: Vec<Tensor<'b>>,
    pub grads: Vec<Option<Tensor<'b>>>,
    pub needs: Vec<bool>,
}

impl<'b> GradCx<'b> {
    pub fn input(&self, at: usize) -> Tensor<'b> {
        self.inputs[at]
    }

    pub fn output(&self, at: usize) -> Tensor<'b> {
        self.outputs[at]
    }

    /// The gradient of the first output; zeros if only others have one.
    pub fn grad(&self) -> Tensor<'b> {
        self.grads[0].expect("the walk gives the first output a gradient")
    }

    pub fn needs(&self, at: usize) -> bool {
        self.needs[at]
    }
}
