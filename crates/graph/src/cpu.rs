//! How the CPU runs ops: the trait beside [`Op`], and what its kernels see.
//!
//! An `impl Cpu` stands in the file of its op. Executors find it through the registry ([`OpKind::cpu`](crate::OpKind)), so
//! nothing here is reachable from a graph alone, and another device is another trait.

use crate::op::Op;
use crate::team::Team;
use crate::types::Type;
use std::fmt::Debug;
use std::marker::PhantomData;

/// How the CPU runs an op.
pub trait Cpu: Op {
    /// The kernel for f32 (and the integer types that the op's operands name). Results never depend on the number of
    /// threads.
    fn run(&self, cx: &mut CpuCx<'_>);

    /// Bytes of scratch `run` wants with this many threads.
    fn scratch_bytes(&self, _inputs: &[Type], _outputs: &[Type], _threads: usize) -> usize {
        0
    }

    /// Pairs (input, output) that may share one buffer: the kernel reads every element before it writes it.
    fn in_place(&self) -> Vec<(usize, usize)> {
        Vec::new()
    }

    /// Whether `run` takes operands in half precision as they are. For any other op the executor makes copies in f32.
    fn takes_halves(&self) -> bool {
        false
    }

    /// An f32 input that may come as several terms, which the kernel adds up as it goes: see [`CpuCx::terms`].
    fn takes_terms(&self) -> Option<usize> {
        None
    }

    /// An f32 input that may come tile by tile as it is made, so that it is never stored: see [`Cpu::run_taking`].
    fn takes_tiles(&self) -> Option<usize> {
        None
    }

    /// Runs with the input that [`Cpu::takes_tiles`] names made by `make`, which hands each element of it to the taker once.
    /// That input has no place of its own, and the scratch is `make`'s.
    fn run_taking(&self, _cx: &mut CpuCx<'_>, _make: &mut dyn FnMut(&dyn Taker)) {
        unreachable!("{} takes no tiles", self.name())
    }

    /// Whether `run` hands its only output to [`CpuCx::taker`] if there is one, and stores nothing then.
    fn gives_tiles(&self, _inputs: &[Type]) -> bool {
        false
    }

    /// Of an elementwise op, its kernel over one tile, for fused passes.
    fn tile_kernel(&self) -> Option<TileKernel> {
        None
    }
}

/// Operands, result and the op's own number.
pub type TileFunction = fn(inputs: &[&[f32]], out: &mut [f32], constant: f32);

/// A kernel over one tile: `out[i] = f(inputs[0][i], …)`.
#[derive(Clone, Copy, Debug)]
pub struct TileKernel {
    pub function: TileFunction,
    /// The op's own number, if it has one.
    pub constant: f32,
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
    /// If not empty: the terms of the input that [`Cpu::takes_terms`] names, two or a higher power of two, to be added up as
    /// a balanced tree. The first is where the input is. They are the kernel's to write while it runs.
    pub terms: &'a [Buffer],
    /// Who takes the output of an op that [gives tiles](Cpu::gives_tiles), which then has no place of its own.
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
