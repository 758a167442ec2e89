//! How an NVIDIA GPU runs ops: the trait beside [`Op`], and calls as data.
//!
//! An `impl Cuda` stands in the file of its op, its kernels in a `.cu` file beside it. It names kernels, grids and operands;
//! no CUDA library is in sight here, so an op's calls can be built, counted and tested on a machine without a GPU. The executor
//! (`kolo-cuda`) compiles the sources at run time and gives every operand its address.
//!
//! Rules for kernels. Every result is a function of the operands alone: no atomics on floats, reductions blocked by shape.
//! Products and sums are contracted only where the source says `fmaf` (sources are compiled with `--fmad=false`), so that a
//! fused chain gives the bits of its parts. Outputs start with any content, and every element is to be written. Sizes are known when calls are
//! made: give them as definitions or as arguments. [`PRELUDE`] stands before every source.

mod channels;
mod convolution;
pub(crate) mod moves;

pub use channels::{ChannelsLast, any_order, last};
pub use convolution::{Convolution, ConvolutionKind, ConvolutionPass, ConvolutionShape};

use crate::op::Op;
use crate::types::{DType, Type};
use std::borrow::Cow;

/// What every source may use: element types (`bf16`, `f16`), conversions, packs of 16 bytes, sums over a warp or block.
pub const PRELUDE: &str = include_str!("cuda/prelude.cu");

/// Scratch of a call starts on multiples of this many bytes.
pub const SCRATCH_ALIGNMENT: usize = 256;

/// How an NVIDIA GPU runs an op.
pub trait Cuda: Op {
    /// What to run, one after the other, on operands of these types. Types are those that the op's operands allow; it is not asked
    /// if no output has elements.
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls;

    /// The operands that it also knows with their channels last, all of them or none ([`CudaCx::channels_last`]). An op that knows
    /// one order alone gets and gives that: the executor moves elements around it.
    fn channels_last(&self, _cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        None
    }

    /// Pairs (input, output) that may share one buffer: every element is read before it is written, by the same thread.
    fn in_place(&self) -> Vec<(usize, usize)> {
        Vec::new()
    }
}

/// What calls are made for.
#[derive(Clone, Copy, Debug)]
pub struct CudaCx<'a> {
    pub inputs: &'a [Type],
    pub outputs: &'a [Type],
    pub target: &'a CudaTarget,
    /// Whether the operands that the op named ([`Cuda::channels_last`]) lie in memory with their channels last.
    pub channels_last: bool,
}

impl<'a> CudaCx<'a> {
    /// Operands as their types say.
    pub fn new(inputs: &'a [Type], outputs: &'a [Type], target: &'a CudaTarget) -> Self {
        Self { inputs, outputs, target, channels_last: false }
    }
}

/// What is known of the GPU when calls are made. Speed may depend on it, results only on the kind of GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaTarget {
    /// Compute capability: (9, 0) for a Hopper.
    pub capability: (u32, u32),
    pub multiprocessors: u32,
    /// Shared memory that a block can have if it asks for it.
    pub shared_bytes_max: usize,
    /// Whether products of f32 may round their operands to TF32.
    pub tf32: bool,
    /// Whether the vendor's library for convolutions is there.
    pub convolutions: bool,
}

impl Default for CudaTarget {
    /// An H200 without a library for convolutions.
    fn default() -> Self {
        Self {
            capability: (9, 0),
            multiprocessors: 132,
            shared_bytes_max: 227 * 1024,
            tf32: false,
            convolutions: false,
        }
    }
}

/// The calls of one op, in their order, and the scratch that they share.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CudaCalls {
    pub calls: Vec<CudaCall>,
    pub scratch_bytes: usize,
}

impl CudaCalls {
    pub fn new() -> Self {
        Self::default()
    }

    /// So many bytes that nothing else uses while the op's calls run. They start with any content.
    pub fn scratch(&mut self, bytes: usize) -> CudaPlace {
        let place = CudaPlace::scratch(self.scratch_bytes);
        self.scratch_bytes += bytes.next_multiple_of(SCRATCH_ALIGNMENT);
        place
    }

    /// The sources of its kernels.
    pub fn sources(&self) -> impl Iterator<Item = &CudaSource> {
        self.calls.iter().filter_map(|call| match call {
            CudaCall::Launch(launch) => Some(&launch.source),
            _ => None,
        })
    }

    pub fn launch(&mut self, launch: Launch) {
        self.calls.push(CudaCall::Launch(launch));
    }

    pub fn product(&mut self, product: Product) {
        self.calls.push(CudaCall::Product(product));
    }

    pub fn convolution(&mut self, convolution: Convolution) {
        self.calls.push(CudaCall::Convolution(convolution));
    }

    /// Writes zero bytes.
    pub fn zero(&mut self, to: CudaPlace, bytes: usize) {
        self.calls.push(CudaCall::Zero { to, bytes });
    }

    pub fn copy(&mut self, from: CudaPlace, to: CudaPlace, bytes: usize) {
        self.calls.push(CudaCall::Copy { from, to, bytes });
    }
}

impl From<Launch> for CudaCalls {
    fn from(launch: Launch) -> Self {
        Self { calls: vec![CudaCall::Launch(launch)], scratch_bytes: 0 }
    }
}

impl From<Product> for CudaCalls {
    fn from(product: Product) -> Self {
        Self { calls: vec![CudaCall::Product(product)], scratch_bytes: 0 }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum CudaCall {
    Launch(Launch),
    /// A matrix product by the vendor's library.
    Product(Product),
    /// A convolution by the vendor's library.
    Convolution(Convolution),
    Zero {
        to: CudaPlace,
        bytes: usize,
    },
    Copy {
        from: CudaPlace,
        to: CudaPlace,
        bytes: usize,
    },
}

/// A place in an operand of the op, or in its scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaPlace {
    pub buffer: CudaBuffer,
    /// Bytes further on.
    pub offset: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaBuffer {
    Input(usize),
    Output(usize),
    Scratch,
}

impl CudaPlace {
    pub const fn input(at: usize) -> Self {
        Self { buffer: CudaBuffer::Input(at), offset: 0 }
    }

    pub const fn output(at: usize) -> Self {
        Self { buffer: CudaBuffer::Output(at), offset: 0 }
    }

    pub const fn scratch(offset: usize) -> Self {
        Self { buffer: CudaBuffer::Scratch, offset }
    }

    /// So many bytes further on.
    pub const fn further(self, bytes: usize) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }
}

/// One kernel on a grid of blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    pub source: CudaSource,
    /// The kernel's name; sources declare kernels `extern "C"`.
    pub function: Cow<'static, str>,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory.
    pub shared_bytes: usize,
    pub args: Vec<CudaArg>,
}

/// Blocks of a grid along x, and along y or z.
pub const GRID_MAX: [usize; 2] = [(1 << 31) - 1, 65_535];

impl Launch {
    /// A kernel without dynamic shared memory.
    pub fn new(
        source: CudaSource,
        function: impl Into<Cow<'static, str>>,
        grid: [usize; 3],
        block: usize,
        args: impl Into<Vec<CudaArg>>,
    ) -> Self {
        let [x, y, z] = grid;
        let fits = x <= GRID_MAX[0] && y <= GRID_MAX[1] && z <= GRID_MAX[1];
        assert!(fits, "a grid of {grid:?} blocks is larger than any GPU takes");
        let grid = grid.map(|blocks| blocks as u32);
        let (block, function) = ([block as u32, 1, 1], function.into());
        Self { source, function, grid, block, shared_bytes: 0, args: args.into() }
    }

    /// The same with so much dynamic shared memory.
    pub fn shared(mut self, bytes: usize) -> Self {
        self.shared_bytes = bytes;
        self
    }
}

/// The text of kernels, and what is defined before it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CudaSource {
    pub text: Cow<'static, str>,
    /// Names and what they stand for.
    pub defines: Vec<(&'static str, String)>,
}

impl CudaSource {
    /// Of a file: `CudaSource::new(include_str!("x.cu"))`, or generated.
    pub fn new(text: impl Into<Cow<'static, str>>) -> Self {
        Self { text: text.into(), defines: Vec::new() }
    }

    pub fn define(mut self, name: &'static str, value: impl ToString) -> Self {
        self.defines.push((name, value.to_string()));
        self
    }

    /// Defines `name` as the element type.
    pub fn define_type(self, name: &'static str, dtype: DType) -> Self {
        self.define(name, cuda_type(dtype))
    }
}

/// An element type as sources call it.
pub fn cuda_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::I32 => "int",
        DType::I64 => "long long",
        DType::Bool | DType::U8 => "unsigned char",
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CudaArg {
    /// A pointer.
    Address(CudaPlace),
    I32(i32),
    I64(i64),
    U64(u64),
    F32(f32),
}

impl From<CudaPlace> for CudaArg {
    fn from(place: CudaPlace) -> Self {
        CudaArg::Address(place)
    }
}

/// `c = alpha · a · b + beta · c` with `a` of `rows × depth`, `b` of `depth × columns` and `c` of `rows × columns`, all row-major, and
/// so for each of a batch. Sums are kept in f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Product {
    pub rows: usize,
    pub columns: usize,
    pub depth: usize,
    pub batch: usize,
    pub a: CudaMatrix,
    pub b: CudaMatrix,
    pub c: CudaMatrix,
    pub alpha: f32,
    pub beta: f32,
    /// Added to every row of the result: `columns` elements of the type of `c`.
    pub bias: Option<CudaPlace>,
}

/// A matrix in memory. Transposed, its memory holds the matrix's columns as rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaMatrix {
    pub place: CudaPlace,
    pub dtype: DType,
    /// Elements from one row in memory to the next, and from one matrix of the batch to the next.
    pub row_stride: usize,
    pub batch_stride: usize,
    pub transposed: bool,
}
