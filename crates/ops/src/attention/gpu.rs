//! Attention on the GPU, as calls: kernels on tensor cores for heads of fitting sizes, and general ones, which take any sizes and
//! masks. Forward, backward and the rounds of a ring are the same kernels on operands that lie differently.

use super::Alignment;
use super::sizes::{Mask, Sizes};
use crate::device::{THREADS, WARP, grid, long};
use kolo_graph::DType;
use kolo_graph::cuda::{CudaArg, CudaCalls, CudaPlace, CudaSource, CudaTarget, Launch};

const SOURCE: &str = include_str!("attention.cu");
/// Kernels on tensor cores, for some sizes.
const TENSOR: &str = concat!(include_str!("../tensor.cuh"), include_str!("tensor_attention.cu"));

/// The largest head that tensor cores take, and what it is a multiple of.
const TENSOR_DIM_MAX: usize = 128;
const TENSOR_DIM_STEP: usize = 16;
/// Bytes of one copy to shared memory; so many lie beside each row there, so that rows lie in different banks.
const UNIT_BYTES: usize = 16;

/// How a kernel on tensor cores shares out its work: warps of a block, tiles of 16 rows of a warp, and rows of the other side that pass
/// at once. As large as registers allow: what a warp reads of the other side serves all its tiles.
#[derive(Clone, Copy, Debug)]
struct TensorShape {
    warps: usize,
    tiles: usize,
    others: usize,
    /// Four warps multiply at once, as Hoppers do best.
    grouped: bool,
}

/// The dims of a head of halves whose rows are as long as grouped products want them.
const GROUPED_DIM: usize = 64;

impl TensorShape {
    /// For elements of so many bytes in heads of so many dims, with so many rows of sums and so many of scores to a row.
    fn of(dim: usize, bytes: usize, (sums, scores): (usize, usize), target: &CudaTarget) -> Self {
        if dim == GROUPED_DIM && bytes == 2 && target.capability == (9, 0) {
            // Measured on an H200; backward, where registers are short, two small blocks overlap better than one large one.
            let warps = if scores == 1 { 8 } else { 4 };
            return Self { warps, tiles: 1, others: 64, grouped: true };
        }
        let narrow = dim <= 64;
        let (warps, tiles) = if narrow || sums == 1 { (4, 2) } else { (8, 1) };
        let others = match (narrow, scores) {
            (true, 1) => 128 / bytes,
            (true, _) => 32,
            (false, _) => 64 / bytes,
        };
        Self { warps, tiles, others, grouped: false }
    }

    /// Rows of a block.
    fn own(&self) -> usize {
        self.warps * self.tiles * 16
    }

    /// Shared memory for so many tiles of a block's own rows and, of the other side, for two operands and two more on their way.
    fn shared_bytes(&self, own: usize, row_bytes: usize) -> usize {
        (own * self.own() + 4 * self.others) * (row_bytes + UNIT_BYTES)
    }
}

/// One kernel on tensor cores.
#[derive(Clone, Copy, Debug)]
struct TensorKernel {
    pass: &'static str,
    function: &'static str,
    result: DType,
    shape: TensorShape,
    /// Tiles of a block's own rows in shared memory.
    own: usize,
}

/// An operand's place, and the elements from one row to the next.
#[derive(Clone, Copy, Debug)]
pub(in crate::attention) struct Rows {
    pub place: CudaPlace,
    pub stride: usize,
}

/// An additive mask: its place and type, and the elements from one sample and one head to the next.
#[derive(Clone, Copy, Debug)]
pub(in crate::attention) struct Bias {
    pub place: CudaPlace,
    pub dtype: DType,
    pub batch: usize,
    pub head: usize,
}

/// One attention: `s.queries` rows of q against `s.keys` rows of k and v, of samples that have `rows` of each.
#[derive(Clone, Copy, Debug)]
pub(in crate::attention) struct Attend<'a> {
    pub s: Sizes,
    pub q: Rows,
    pub k: Rows,
    pub v: CudaPlace,
    /// Rows of a sample's queries and keys: more than `s` says if these are a block of them.
    pub rows: [usize; 2],
    pub bias: Option<Bias>,
    pub dtype: DType,
    /// Results go on from what is there.
    pub running: bool,
    pub target: &'a CudaTarget,
}

/// What a backward reads beside the operands: the gradient, log-sum-exps and deltas, of samples that have `rows` of them.
#[derive(Clone, Copy, Debug)]
pub(in crate::attention) struct Saved {
    pub g: Rows,
    pub lse: CudaPlace,
    pub delta: CudaPlace,
    pub rows: usize,
}

/// Queries and keys of a tile, the largest that fit first.
const TILES: [[usize; 2]; 3] = [[16, 32], [16, 8], [4, 4]];

/// Where the dim of a head stands among the operands of a kernel.
const DIM_AT: usize = 10;

impl Attend<'_> {
    /// A tile whose memory fits, of so many rows of the queries' and of the keys' kind; and that memory.
    fn tile(&self, rows: impl Fn([usize; 2]) -> usize, squares: usize) -> ([usize; 2], usize) {
        let bytes = |tile: [usize; 2]| {
            let [queries, keys] = tile;
            (rows(tile) * (self.s.dim + 1) + squares * queries * (keys + 1) + 3 * queries) * size_of::<f32>()
        };
        let fits = TILES.into_iter().find(|tile| bytes(*tile) <= self.target.shared_bytes_max);
        let tile = fits.unwrap_or(TILES[TILES.len() - 1]);
        (tile, bytes(tile))
    }

    fn source(&self, pass: &'static str, [queries, keys]: [usize; 2], result: DType) -> CudaSource {
        let source =
            CudaSource::new(SOURCE).define_type("OPERAND", self.dtype).define_type("RESULT", result).define(pass, 1);
        let source =
            source.define("CAUSAL", i32::from(self.s.mask != Mask::None)).define("QB", queries).define("KB", keys);
        let source = source.define("RUNNING", i32::from(self.running));
        match self.bias {
            Some(bias) => source.define_type("BIAS", bias.dtype),
            None => source,
        }
    }

    /// The operands as the kernels take them; the dim is number [`DIM_AT`].
    fn operands(&self) -> Vec<CudaArg> {
        let s = &self.s;
        let offset = match s.mask {
            Mask::Causal(Alignment::BottomRight) => s.keys as i64 - s.queries as i64,
            _ => 0,
        };
        let places = [self.q.place, self.k.place, self.v].map(CudaArg::from);
        let sizes = [self.q.stride, self.k.stride, self.rows[0], self.rows[1], s.queries, s.keys, s.heads, s.dim];
        let mut args = [&places[..], &sizes.map(long), &[CudaArg::F32(s.scale()), CudaArg::I64(offset)]].concat();
        if let Some(bias) = self.bias {
            args.extend([bias.place.into(), long(bias.batch), long(bias.head)]);
        }
        args
    }

    /// Whether tensor cores take it: heads of a fitting size, nothing added, and rows on boundaries of 16 bytes.
    fn suits_tensor_cores(&self, others: &[Rows]) -> bool {
        let (dim, bytes) = (self.s.dim, self.dtype.bytes());
        let fits = dim.is_multiple_of(TENSOR_DIM_STEP) && dim <= TENSOR_DIM_MAX;
        let aligned = |rows: &Rows| [rows.stride * bytes, rows.place.offset].iter().all(|at| at % UNIT_BYTES == 0);
        let rows = [self.q, self.k, Rows { place: self.v, ..self.k }];
        let largest = TensorShape::of(dim, bytes, (2, 2), self.target).shared_bytes(2, dim * bytes);
        let able = self.target.capability >= (8, 0) && largest <= self.target.shared_bytes_max;
        able && fits && self.bias.is_none() && !self.running && rows.iter().chain(others).all(aligned)
    }

    /// A launch on tensor cores over so many rows.
    fn tensor_launch(&self, kernel: TensorKernel, rows: usize, rest: &[CudaArg]) -> Launch {
        let (s, TensorShape { warps, tiles, others, grouped }) = (&self.s, kernel.shape);
        let types = CudaSource::new(TENSOR).define_type("OPERAND", self.dtype).define_type("RESULT", kernel.result);
        let source = types.define(kernel.pass, 1).define("CAUSAL", i32::from(s.mask != Mask::None)).define("D", s.dim);
        let source = source.define("WARPS", warps).define("TILES", tiles).define("OTHERS", others);
        let exact = self.dtype == DType::F32 && !self.target.tf32;
        let source = source.define("GROUPED", i32::from(grouped)).define("EXACT", i32::from(exact));
        let bytes = kernel.shape.shared_bytes(kernel.own, s.dim * self.dtype.bytes());
        let mut operands = self.operands();
        // The dim is a definition there; in its place stands the number of samples.
        operands[DIM_AT] = long(s.batch);
        let blocks = rows.div_ceil(kernel.shape.own()) * s.batch * s.heads;
        Launch::new(source, kernel.function, [blocks, 1, 1], warps * WARP, [&operands[..], rest].concat()).shared(bytes)
    }

    fn launch(
        &self,
        source: CudaSource,
        function: &'static str,
        tiles: usize,
        bytes: usize,
        rest: &[CudaArg],
    ) -> Launch {
        let blocks = self.s.batch * self.s.heads * tiles;
        let args = [&self.operands()[..], rest].concat();
        Launch::new(source, function, [blocks, 1, 1], THREADS, args).shared(bytes)
    }

    /// The results at `y`, and at `lse` the log-sum-exps or, of running results, the two numbers of each row.
    pub(in crate::attention) fn forward(&self, calls: &mut CudaCalls, y: Rows, lse: CudaPlace, result: DType) {
        let rest = [y.place.into(), long(y.stride), lse.into(), long(self.rows[0])];
        if self.suits_tensor_cores(&[y]) {
            let shape = TensorShape::of(self.s.dim, self.dtype.bytes(), (1, 1), self.target);
            let kernel = TensorKernel { pass: "FORWARD", function: "attend_on_tensor_cores", result, shape, own: 1 };
            return calls.launch(self.tensor_launch(kernel, self.s.queries, &rest));
        }
        let (tile, bytes) = self.tile(|[queries, keys]| 2 * queries + 2 * keys, 1);
        let source = self.source("FORWARD", tile, result);
        calls.launch(self.launch(source, "attend", self.s.queries.div_ceil(tile[0]), bytes, &rest));
    }

    /// What a backward needs of each row: `Σ y·g`. Both lie as `[b, t, h·d]`.
    pub(in crate::attention) fn deltas(&self, calls: &mut CudaCalls, y: CudaPlace, g: CudaPlace) -> CudaPlace {
        let s = &self.s;
        let rows = s.batch * s.heads * self.rows[0];
        let delta = calls.scratch(rows * size_of::<f32>());
        let sizes = [rows, self.rows[0], self.rows[0], s.heads, s.dim].map(long);
        let args = [&[y.into(), g.into(), delta.into()], &sizes[..]].concat();
        let source = self.source("BACKWARD", TILES[0], self.dtype);
        calls.launch(Launch::new(source, "row_deltas", grid(rows, THREADS / WARP), THREADS, args));
        delta
    }

    fn saved(saved: &Saved) -> Vec<CudaArg> {
        let Saved { g, lse, delta, rows } = *saved;
        vec![g.place.into(), long(g.stride), lse.into(), delta.into(), long(rows)]
    }

    /// The gradients of queries, keys and values.
    pub(in crate::attention) fn backward(
        &self,
        calls: &mut CudaCalls,
        saved: &Saved,
        [dq, dk, dv]: [Rows; 3],
        result: DType,
    ) {
        let of_queries = [Self::saved(saved), vec![dq.place.into(), long(dq.stride)]].concat();
        let of_keys = [Self::saved(saved), vec![dk.place.into(), dv.place.into(), long(dk.stride)]].concat();
        if self.suits_tensor_cores(&[saved.g, dq, dk, dv]) {
            let kernel = |function, sums| {
                let shape = TensorShape::of(self.s.dim, self.dtype.bytes(), (sums, 2), self.target);
                TensorKernel { pass: "BACKWARD", function, result, shape, own: 2 }
            };
            let of_rows = kernel("query_gradients_on_tensor_cores", 1);
            calls.launch(self.tensor_launch(of_rows, self.s.queries, &of_queries));
            let of_rows = kernel("key_gradients_on_tensor_cores", 2);
            return calls.launch(self.tensor_launch(of_rows, self.s.keys, &of_keys));
        }
        let (tile, bytes) = self.tile(|[queries, keys]| 3 * queries + 2 * keys, 2);
        let source = self.source("BACKWARD", tile, result);
        calls.launch(self.launch(source, "query_gradients", self.s.queries.div_ceil(tile[0]), bytes, &of_queries));
        let (tile, bytes) = self.tile(|[queries, keys]| 2 * queries + 4 * keys, 2);
        let source = self.source("BACKWARD", tile, result);
        calls.launch(self.launch(source, "key_gradients", self.s.keys.div_ceil(tile[1]), bytes, &of_keys));
    }

    /// The gradient of the scores, `[b, h, q, k]`.
    pub(in crate::attention) fn bias_gradient(
        &self,
        calls: &mut CudaCalls,
        saved: &Saved,
        to: CudaPlace,
        result: DType,
    ) {
        let s = &self.s;
        let count = s.batch * s.heads * s.queries * s.keys;
        let saved = &Self::saved(saved)[..4];
        let args = [&self.operands()[..], saved, &[to.into(), long(count)]].concat();
        let source = self.source("BACKWARD", TILES[0], result);
        calls.launch(Launch::new(source, "bias_gradients", grid(count, THREADS), THREADS, args));
    }
}
