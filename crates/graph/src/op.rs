//! The op trait: everything the system knows about an op, declared once.
//!
//! An op is plain data. The graph holds it behind `Arc<dyn Op>`; a registry slice lists the kinds. Shape, cost and
//! sharding come from the index expression; an op with none writes `infer` and `flops` by hand.

use crate::attr::{AttrReader, Attrs};
use crate::builder::Tensor;
use crate::index::Index;
use crate::operand::Operands;
use crate::team::Team;
use crate::types::{Shape, Type};
use std::any::Any;
use std::fmt::Debug;
use std::marker::PhantomData;
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

pub trait Op: Describe + Any + Debug + Send + Sync {
    /// The inputs with their element types and gradients, and the outputs. [`checked_types`](crate::checked_types) holds
    /// every use of the op to it.
    fn operands(&self) -> Operands;

    /// The index expression for these inputs; `None` for the odd ops that infer by hand.
    fn index(&self, _inputs: &[Type]) -> Option<Index> {
        None
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

    /// Gradients of the inputs, `None` where there is none. May build only what `cx.needs` asks for. It must give one for
    /// every input that `cx.needs` names and `operands` promises a rule for: the walk refuses to drop a gradient.
    fn grad<'b>(&self, _cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        Vec::new()
    }

    /// The definition: slow, obvious, in f64.
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense>;

    /// The fast kernel for f32 (and the integer types it names). Results never depend on the number of threads.
    fn cpu(&self, cx: &mut CpuCx<'_>);

    /// Bytes of scratch `cpu` wants with this many threads.
    fn scratch_bytes(&self, _inputs: &[Type], _outputs: &[Type], _threads: usize) -> usize {
        0
    }

    /// Pairs (input, output) that may share one buffer: the kernel reads every element before it writes it.
    fn in_place(&self) -> Vec<(usize, usize)> {
        Vec::new()
    }

    /// An f32 input that may come as several terms, which the kernel adds up as it goes: see [`CpuCx::terms`].
    fn takes_terms(&self) -> Option<usize> {
        None
    }

    /// An f32 input that may come tile by tile as it is made, so that it is never stored: see [`Op::cpu_taking`].
    fn takes_tiles(&self) -> Option<usize> {
        None
    }

    /// Runs with the input that [`Op::takes_tiles`] names made by `make`, which hands each element of it to the taker once.
    /// That input has no place of its own, and the scratch is `make`'s.
    fn cpu_taking(&self, _cx: &mut CpuCx<'_>, _make: &mut dyn FnMut(&dyn Taker)) {
        unreachable!("{} takes no tiles", self.name())
    }

    /// Whether `cpu` hands its only output to [`CpuCx::taker`] if there is one, and stores nothing then.
    fn gives_tiles(&self, _inputs: &[Type]) -> bool {
        false
    }

    /// Output 0 is input 0's bytes, or a run of them, under another type: no kernel runs.
    fn view(&self) -> bool {
        false
    }

    /// Every output is the memory of the input of the same number, or a run of it.
    fn aliases(&self) -> bool {
        self.view()
    }

    /// An op with an effect outside the graph's values, or whose result changes between calls, is never merged.
    fn pure(&self) -> bool {
        true
    }

    /// What it exchanges with other ranks, if that is what it does.
    fn collective(&self) -> Option<crate::collective::Collective<'_>> {
        None
    }

    /// What an elementwise op computes per element, for fusion.
    fn elementwise(&self) -> Option<Elementwise> {
        None
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

/// A kernel over one tile: `out[i] = f(inputs[0][i], …)`. `constant` is the op's own number, if it has one.
pub type TileKernel = fn(inputs: &[&[f32]], out: &mut [f32], constant: f32);

/// An elementwise op as the fusion pass sees it.
#[derive(Clone, Copy, Debug)]
pub struct Elementwise {
    pub kernel: TileKernel,
    pub constant: f32,
}

/// A kind of op: how to read one from text, and the cases its conformance suite must try.
#[derive(Clone, Copy, Debug)]
pub struct OpKind {
    pub name: &'static str,
    /// What it does, as its declaration says.
    pub doc: &'static str,
    /// Names and Rust types of its attributes.
    pub attributes: &'static [(&'static str, &'static str)],
    pub read: fn(&AttrReader<'_>) -> Result<Arc<dyn Op>, String>,
    pub cases: fn() -> Vec<Case>,
}

impl OpKind {
    pub const fn of<T: Op + Declared + Cases>() -> Self {
        Self {
            name: T::NAME,
            doc: T::DOC,
            attributes: T::ATTRIBUTES,
            read: |attrs| Ok(Arc::new(T::read(attrs)?)),
            cases: T::cases,
        }
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

/// One operand of a kernel: where it is and what it is.
#[derive(Clone, Debug)]
pub struct Buffer {
    pub data: *mut u8,
    pub ty: Type,
}

// SAFETY: a buffer is an address; the executor guarantees that kernels running at one time write disjoint places.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

/// A part of a matrix, whose rows are `width` apart in `data`.
#[derive(Clone, Copy, Debug)]
pub struct Tile<'a> {
    /// The first element's place in the whole matrix, and from there to the next row's.
    pub start: usize,
    pub stride: usize,
    pub rows: usize,
    pub columns: usize,
    pub data: &'a [f32],
    pub width: usize,
}

/// Whoever uses a result while it is still in the nearest cache. Several threads may give it tiles at a time.
pub trait Taker: Debug + Sync {
    /// Uses a tile.
    ///
    /// # Safety
    /// The tile lies inside the result that the taker was made for, and nobody else gives it any element of the tile.
    unsafe fn take(&self, tile: Tile<'_>);

    /// What it reads and writes beside the result, element for element: to be brought nearer before a tile is given.
    fn beside(&self) -> Option<[*const f32; BESIDE_MAX]> {
        None
    }
}

/// Tensors beside a result that a taker can name.
pub const BESIDE_MAX: usize = 3;

/// What a CPU kernel sees: its operands, scratch, and the threads it may use.
#[derive(Debug)]
pub struct CpuCx<'a> {
    pub inputs: &'a [Buffer],
    pub outputs: &'a [Buffer],
    /// If not empty: the terms of the input that [`Op::takes_terms`] names, two or a higher power of two, to be added up as
    /// a balanced tree. The first is where the input is. They are the kernel's to write while it runs.
    pub terms: &'a [Buffer],
    /// Who takes the output of an op that [gives tiles](Op::gives_tiles), which then has no place of its own.
    pub taker: Option<&'a dyn Taker>,
    pub team: &'a Team,
    scratch: (*mut u8, usize),
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: the context is read-only; what its accessors hand out is guarded by their own contracts.
unsafe impl Sync for CpuCx<'_> {}

macro_rules! accessors {
    ($($input:ident $output:ident $t:ty),* $(,)?) => {$(
        pub fn $input(&self, at: usize) -> &'a [$t] {
            let buffer = &self.inputs[at];
            debug_assert_eq!(buffer.ty.dtype.bytes(), size_of::<$t>());
            assert!(!buffer.data.is_null(), "input {at} is taken as it is made, it has no place");
            // SAFETY: the executor lays out `elements` values there, aligned to 64 bytes, and nothing writes an input
            // while a kernel runs, except through an `in_place` pair, whose kernels use raw pointers.
            unsafe { std::slice::from_raw_parts(buffer.data.cast(), buffer.ty.elements()) }
        }
        #[allow(clippy::mut_from_ref)]
        pub fn $output(&self, at: usize) -> &'a mut [$t] {
            let buffer = &self.outputs[at];
            debug_assert_eq!(buffer.ty.dtype.bytes(), size_of::<$t>());
            assert!(!buffer.data.is_null(), "output {at} is taken as it is made, it has no place");
            // SAFETY: outputs of one node are disjoint, and the kernel calls this once per output.
            unsafe { std::slice::from_raw_parts_mut(buffer.data.cast(), buffer.ty.elements()) }
        }
    )*};
}

impl<'a> CpuCx<'a> {
    /// # Safety
    /// `scratch` points to that many bytes, aligned to 64, that nothing else uses during the call; every buffer points
    /// to its type's bytes, or is null if it is taken as it is made and has no place.
    pub unsafe fn new(inputs: &'a [Buffer], outputs: &'a [Buffer], team: &'a Team, scratch: (*mut u8, usize)) -> Self {
        Self { inputs, outputs, terms: &[], taker: None, team, scratch, lifetime: PhantomData }
    }

    accessors!(f32 out_f32 f32, i32 out_i32 i32, i64 out_i64 i64, u8 out_u8 u8, u16 out_u16 u16);

    pub fn shape(&self, at: usize) -> &'a [usize] {
        &self.inputs[at].ty.shape
    }

    pub fn out_shape(&self, at: usize) -> &'a [usize] {
        &self.outputs[at].ty.shape
    }

    /// The scratch asked for in `scratch_bytes`, as f32. Call once.
    #[allow(clippy::mut_from_ref)]
    pub fn scratch(&self) -> &'a mut [f32] {
        // SAFETY: by the contract of `new`.
        unsafe { std::slice::from_raw_parts_mut(self.scratch.0.cast(), self.scratch.1 / 4) }
    }
}
