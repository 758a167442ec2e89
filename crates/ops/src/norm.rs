//! What the normalisations share: sums whose order depends on the length alone, moments of a row, and parameter
//! gradients summed over blocks of rows.

use crate::pairwise::{self, COLUMNS};
use crate::simd::{self, LANES};
use crate::tiles::Address;
use kolo_graph::index::Index;
use kolo_graph::{CpuCx, DType, Type};

/// Elements added to one set of partial sums before the sets are joined, so that long sums stay accurate.
const RUN: usize = pairwise::RUN;
/// Slices up to this length need no partial sums of their own.
const SHORT: usize = 256;
/// Rows whose parameter gradients are summed together; the blocks are then added as a tree.
pub const ROWS_PER_BLOCK: usize = 32;
/// Below this many elements a second thread costs more than it saves.
pub const ELEMENTS_PER_TASK: usize = 8 * 1024;

/// How many rows of `width` elements make a task.
pub fn rows_per_task(width: usize) -> usize {
    (ELEMENTS_PER_TASK / width.max(1)).max(1)
}

/// The interleaved partial sums of `K` sums.
pub type Lanes<const K: usize> = [[f32; LANES]; K];

/// Adds the elements of `M` slices of one length to `K` sums: `step` adds one element of each slice to a lane's sums.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // one block of each of M slices
fn add_run<const M: usize, const K: usize>(
    total: &mut Lanes<K>,
    slices: [&[f32]; M],
    step: impl Fn([f32; M], [f32; K]) -> [f32; K],
) {
    let mut lanes = *total;
    let split = slices.map(|slice| slice.as_chunks::<LANES>());
    let (blocks, rest) = (split[0].0.len(), split[0].1.len());
    let chunks = split.map(|(chunks, _)| &chunks[..blocks]);
    for block in 0..blocks {
        for lane in 0..LANES {
            let chunk = std::array::from_fn(|m| chunks[m][block][lane]);
            let next = step(chunk, std::array::from_fn(|k| lanes[k][lane]));
            (0..K).for_each(|k| lanes[k][lane] = next[k]);
        }
    }
    *total = lanes;
    if rest > 0 {
        // Without this the compiler takes the lanes apart to reach single ones here, and the loop above stays scalar.
        let ends = std::hint::black_box(total);
        for lane in 0..rest {
            let end = std::array::from_fn(|m| split[m].1[lane]);
            let next = step(end, std::array::from_fn(|k| ends[k][lane]));
            (0..K).for_each(|k| ends[k][lane] = next[k]);
        }
    }
}

/// Slices of so many elements that are added to one set of partial sums before it is folded: its lanes take some 128 terms.
pub fn slices_per_block(len: usize) -> usize {
    let terms = if len <= SHORT { len.div_ceil(LANES) } else { len.div_ceil(RUN) };
    (128 / terms.max(1)).max(1)
}

/// Adds the elements of `M` slices of one length to `K` sums: a short slice straight into the lanes, a long one in runs
/// of their own.
#[inline(always)]
pub fn add_sums<const M: usize, const K: usize>(
    total: &mut Lanes<K>,
    slices: [&[f32]; M],
    step: impl Fn([f32; M], [f32; K]) -> [f32; K] + Copy,
) {
    let count = slices[0].len();
    if count <= SHORT {
        return add_run(total, slices, step);
    }
    let mut start = 0;
    while start < count {
        let mut run = [[0.0; LANES]; K];
        add_run(&mut run, slices.map(|slice| &slice[start..(start + RUN).min(count)]), step);
        (0..K).for_each(|k| (0..LANES).for_each(|lane| total[k][lane] += run[k][lane]));
        start += RUN;
    }
}

/// `K` sums over the elements of `M` slices of one length; `step` adds one element of each.
#[inline(always)]
pub fn sums<const M: usize, const K: usize>(
    slices: [&[f32]; M],
    step: impl Fn([f32; M], [f32; K]) -> [f32; K] + Copy,
) -> [f32; K] {
    let mut lanes = [[0.0; LANES]; K];
    add_sums(&mut lanes, slices, step);
    lanes.map(simd::fold)
}

/// `1/√(variance + eps)`.
#[inline(always)]
pub fn reciprocal_deviation(variance: f32, eps: f32) -> f32 {
    1.0 / (variance + eps).sqrt()
}

/// Mean and `1/√(variance + eps)` of a row: the mean first, then the squares around it, which never cancels.
#[inline(always)]
pub fn moments(row: &[f32], eps: f32) -> (f32, f32) {
    let count = row.len() as f32;
    let [sum] = sums([row], |[x], [sum]| [sum + x]);
    let mean = sum / count;
    let [squares] = sums([row], |[x], [sum]| [(x - mean).mul_add(x - mean, sum)]);
    (mean, reciprocal_deviation(squares / count, eps))
}

/// `y = (x − mean)·scale + bias`.
#[inline(always)]
pub fn affine(y: &mut [f32], x: &[f32], mean: f32, scale: f32, bias: f32) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = (x - mean).mul_add(scale, bias);
    }
}

/// `dx = scale·(g − shift − (x − mean)·slope)`.
#[inline(always)]
pub fn affine_grad(dx: &mut [f32], x: &[f32], g: &[f32], [mean, scale, shift, slope]: [f32; 4]) {
    for ((dx, x), g) in dx.iter_mut().zip(x).zip(g) {
        *dx = scale * (mean - x).mul_add(slope, g - shift);
    }
}

/// `out[i] = Σ partials[block·stride + i]`, as a tree over blocks.
pub fn join_blocks(cx: &CpuCx<'_>, partials: &[f32], stride: usize, out: &mut [f32]) {
    let blocks = partials.len().div_ceil(stride.max(1));
    let address = Address(out.as_mut_ptr());
    let columns = rows_per_task(blocks).next_multiple_of(LANES).min(COLUMNS);
    cx.team.chunks(out.len(), columns, |range, _| {
        // SAFETY: tasks own disjoint columns.
        let out = unsafe { address.slice(range.start, range.len()) };
        pairwise::sum_rows(out, partials.get(range.start..).unwrap_or(&[]), blocks, stride);
    });
}

/// The names of `count` axes, such as `d0 d1`; each whole if `whole`.
pub fn axes(count: usize, whole: bool) -> String {
    let mark = if whole { "!" } else { "" };
    (0..count).map(|axis| format!("d{axis}{mark} ")).collect()
}

/// Output types by the index expression. Each output has the dtype of the named input; a statistic (`None`) is f32.
pub fn infer(index: &Index, inputs: &[Type], dtypes: &[Option<usize>]) -> Result<Vec<Type>, String> {
    let shapes = index.output_shapes(inputs)?;
    if let [_, weight, bias] = inputs
        && weight.dtype != bias.dtype
    {
        return Err(format!("mixes {} with {}; cast one", weight.dtype.name(), bias.dtype.name()));
    }
    if let Some(empty) = inputs.iter().find(|ty| ty.elements() == 0) {
        return Err(format!("has nothing to normalise: an input is {empty}"));
    }
    let dtype = |input: &Option<usize>| input.map_or(DType::F32, |at| inputs[at].dtype);
    Ok(shapes.into_iter().zip(dtypes).map(|(shape, input)| Type::new(dtype(input), shape)).collect())
}
