//! Which of the algorithms that cuBLASLt names is the fastest, by measurement that cannot change a result.
//!
//! An algorithm counts only if it gives the bits of the library's first choice on two sets of operands: numbers at random, and numbers
//! whose sum is nothing but what rounding makes of the order of adding. So whatever timing says, the bits are those of the first. What was found
//! is kept on disk, by everything that it depends on, and used only while the library still names it.

use crate::commands::{Command, LaunchCall};
use crate::error::CudaError;
use crate::gpu::{Event, Gpu};
use crate::memory::{self, DeviceMemory};
use kolo_graph::DType;
use kolo_graph::cuda::{CudaMatrix, CudaSource, Launch, Product, cuda_type};
use std::sync::Arc;

/// Candidates that are asked for.
pub(crate) const CANDIDATES_MAX: usize = 8;
/// Seconds that all trials of a process may take; later products run with the library's first choice.
pub(crate) const TRIALS_SECONDS_MAX: f64 = 2.0;
/// Floating-point operations of a product that is worth a trial: a few microseconds.
const FLOPS_MIN: f64 = 5e7;
/// What a trial may take of the memory that is free.
const MEMORY_SHARE: usize = 4;
const ROUNDS: usize = 5;
/// A round of one candidate lasts about so long, in so many calls at most.
const ROUND_MS: f32 = 0.2;
const CALLS_MAX: f32 = 50.0;
/// A candidate that is so much slower than the best in the first round is not timed again.
const HOPELESS: f32 = 1.25;
/// The library's first choice stays unless another takes less than this part of its time.
const WORTH_IT: f32 = 0.98;
const BLOCK: usize = 256;
const BLOCKS_MAX: usize = 1024;

/// Whether a product is large enough for a trial.
pub(crate) fn is_worth_it(product: &Product) -> bool {
    let sizes = [product.rows, product.columns, product.depth, product.batch];
    2.0 * sizes.iter().map(|size| *size as f64).product::<f64>() >= FLOPS_MIN
}

/// What can be tried: candidates by number, 0 the first choice.
pub(crate) trait Contest {
    /// Runs a candidate on a set of operands; a checksum of what it made, `None` if it does not run.
    fn checksum(&mut self, candidate: usize, data: Data) -> Result<Option<u64>, CudaError>;
    /// Milliseconds of one run among so many.
    fn time(&mut self, candidate: usize, runs: usize) -> Result<f32, CudaError>;
}

/// A set of operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Data {
    Random,
    /// Sums of zero.
    Cancelling,
}

/// The number of the fastest candidate that gives the bits of the first.
pub(crate) fn winner(contest: &mut impl Contest, count: usize) -> Result<usize, CudaError> {
    let mut equal: Vec<usize> = (0..count).collect();
    for data in [Data::Cancelling, Data::Random] {
        let Some(expected) = contest.checksum(0, data)? else { return Ok(0) };
        let mut same = vec![0];
        for candidate in equal.into_iter().skip(1) {
            if contest.checksum(candidate, data)? == Some(expected) {
                same.push(candidate);
            }
        }
        equal = same;
    }
    if equal.len() == 1 {
        return Ok(0);
    }
    let runs = (ROUND_MS / contest.time(0, 1)?.max(1e-4)).clamp(1.0, CALLS_MAX) as usize;
    let mut times: Vec<(usize, Vec<f32>)> = equal.into_iter().map(|candidate| (candidate, Vec::new())).collect();
    for _ in 0..ROUNDS {
        for (candidate, taken) in &mut times {
            taken.push(contest.time(*candidate, runs)?);
        }
        let best = times.iter().map(|(_, taken)| taken[0]).fold(f32::MAX, f32::min);
        times.retain(|(candidate, taken)| *candidate == 0 || taken[0] <= best * HOPELESS);
    }
    let medians: Vec<(usize, f32)> = times.into_iter().map(|(candidate, taken)| (candidate, median(taken))).collect();
    let best = medians.iter().copied().fold(medians[0], |best, one| if one.1 < best.1 { one } else { best });
    Ok(if best.1 < medians[0].1 * WORTH_IT { best.0 } else { 0 })
}

fn median(mut values: Vec<f32>) -> f32 {
    values.sort_by(f32::total_cmp);
    values[values.len() / 2]
}

/// Operands of a product in memory of their own.
#[derive(Debug)]
pub(crate) struct TrialMemory {
    gpu: Arc<Gpu>,
    product: Product,
    /// Left, right and result.
    matrices: [DeviceMemory; 3],
    bias: DeviceMemory,
    sum: DeviceMemory,
    filled: Option<Data>,
    between: [Event; 2],
}

/// Rows and columns of a matrix as it lies in memory, and whether the dim of size `depth` is its columns.
#[derive(Clone, Copy, Debug)]
struct Lines {
    rows: usize,
    columns: usize,
    depth_is_columns: bool,
}

impl Lines {
    /// Of `rows × columns`, where `depth_is_columns` says which dim a product sums over.
    fn of(matrix: &CudaMatrix, rows: usize, columns: usize, depth_is_columns: bool) -> Self {
        if matrix.transposed {
            return Self { rows: columns, columns: rows, depth_is_columns: !depth_is_columns };
        }
        Self { rows, columns, depth_is_columns }
    }

    /// Bytes from its first element to behind its last one, up to a whole word.
    fn bytes(&self, matrix: &CudaMatrix, batch: usize) -> usize {
        let last = (batch - 1) * matrix.batch_stride + (self.rows - 1) * matrix.row_stride + self.columns;
        (last * matrix.dtype.bytes()).next_multiple_of(4)
    }
}

fn lines(product: &Product) -> [Lines; 3] {
    let Product { rows, columns, depth, .. } = *product;
    [
        Lines::of(&product.a, rows, depth, true),
        Lines::of(&product.b, depth, columns, false),
        Lines::of(&product.c, rows, columns, true),
    ]
}

/// A factor without a common divisor with `half`, so that its multiples visit every number below `half`.
fn scrambling_factor(half: usize) -> usize {
    let common = |mut a: usize, mut b: usize| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (half * 5 / 8 + 1..half).find(|factor| common(*factor, half) == 1).unwrap_or(1)
}

impl TrialMemory {
    /// Memory for a product's operands; `None` if that would be too much of what is free.
    pub fn new(gpu: &Arc<Gpu>, product: &Product) -> Result<Option<Self>, CudaError> {
        let matrices = [&product.a, &product.b, &product.c];
        let of = lines(product);
        let bytes: [usize; 3] = std::array::from_fn(|at| of[at].bytes(matrices[at], product.batch));
        if bytes.iter().sum::<usize>() > gpu.free_bytes()? / MEMORY_SHARE {
            return Ok(None);
        }
        gpu.kernels.prepare(gpu, [&source()].into_iter())?;
        let [left, right, result] = bytes.map(|bytes| DeviceMemory::new(gpu, bytes));
        Ok(Some(Self {
            gpu: Arc::clone(gpu),
            product: product.clone(),
            matrices: [left?, right?, result?],
            bias: DeviceMemory::new(gpu, product.columns * product.c.dtype.bytes())?,
            sum: DeviceMemory::new(gpu, size_of::<u64>())?,
            filled: None,
            between: [Event::timed(gpu)?, Event::timed(gpu)?],
        }))
    }

    /// Left, right and result, then the bias.
    pub fn addresses(&self) -> ([u64; 3], u64) {
        ([0, 1, 2].map(|at| self.matrices[at].at(0)), self.bias.at(0))
    }

    /// Fills the operands, unless they are those of before, and the result with what it starts as.
    pub fn fill(&mut self, data: Data) -> Result<(), CudaError> {
        let Product { a, b, c, depth, .. } = self.product.clone();
        let of = lines(&self.product);
        let half = if data == Data::Cancelling { depth / 2 } else { 0 };
        if self.filled != Some(data) {
            self.fill_matrix(0, &a, of[0], (half, true))?;
            self.fill_matrix(1, &b, of[1], (half, false))?;
            let bias = Launch::new(source(), fill_name(c.dtype), [1, 1, 1], BLOCK, []);
            let columns = self.product.columns as u64;
            start(&self.gpu, &bias, &[self.bias.at(0), 1, columns, columns, 1, columns, 1, 0, 1, 0, 3])?;
            self.filled = Some(data);
        }
        self.matrices[2].fill(0)?;
        if self.product.beta != 0.0 { self.fill_matrix(2, &c, of[2], (0, false)) } else { Ok(()) }
    }

    fn fill_matrix(
        &self,
        at: usize,
        matrix: &CudaMatrix,
        of: Lines,
        (half, negate): (usize, bool),
    ) -> Result<(), CudaError> {
        // Matrices that are one in memory are filled once.
        let batch = if matrix.batch_stride == 0 { 1 } else { self.product.batch };
        let blocks = (of.rows * batch).min(BLOCKS_MAX);
        let launch = Launch::new(source(), fill_name(matrix.dtype), [blocks, 1, 1], BLOCK, []);
        let sizes = [of.rows, of.columns, matrix.row_stride, batch, matrix.batch_stride].map(|size| size as u64);
        let mut args = vec![self.matrices[at].at(0)];
        args.extend(sizes);
        args.extend([u64::from(of.depth_is_columns), half as u64, scrambling_factor(half) as u64, u64::from(negate)]);
        args.push(at as u64);
        start(&self.gpu, &launch, &args)
    }

    /// A checksum of the whole result.
    pub fn checksum(&self) -> Result<u64, CudaError> {
        let result = &self.matrices[2];
        let words = lines(&self.product)[2].bytes(&self.product.c, self.product.batch) / 4;
        let blocks = words.div_ceil(BLOCK).min(BLOCKS_MAX);
        let launch = Launch::new(source(), "checksum", [blocks, 1, 1], BLOCK, []);
        self.sum.fill(0)?;
        start(&self.gpu, &launch, &[result.at(0), words as u64, self.sum.at(0)])?;
        let mut sum = [0u8; 8];
        memory::download(&self.gpu, self.sum.at(0), sum.as_mut_ptr(), sum.len())?;
        self.gpu.synchronize()?;
        Ok(u64::from_le_bytes(sum))
    }

    /// Milliseconds between what runs before `work` and what runs after it.
    pub fn time(&self, work: impl FnOnce() -> Result<(), CudaError>) -> Result<f32, CudaError> {
        let [before, after] = &self.between;
        before.record()?;
        work()?;
        after.record()?;
        after.wait()?;
        after.ms_since(before)
    }
}

fn source() -> CudaSource {
    CudaSource::new(include_str!("product_trials.cu"))
}

fn fill_name(dtype: DType) -> String {
    format!("fill_{}", cuda_type(dtype))
}

fn start(gpu: &Gpu, launch: &Launch, args: &[u64]) -> Result<(), CudaError> {
    match Command::launch(gpu, launch, Vec::new())? {
        Command::Launch(call) => LaunchCall::start_with(&call, gpu, args),
        _ => Err(CudaError::Other("a launch is a launch".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Candidates with a checksum per set of operands and a time; `None` does not run.
    struct Told(Vec<(Option<[u64; 2]>, f32)>);

    impl Contest for Told {
        fn checksum(&mut self, candidate: usize, data: Data) -> Result<Option<u64>, CudaError> {
            Ok(self.0[candidate].0.map(|sums| sums[usize::from(data == Data::Random)]))
        }
        fn time(&mut self, candidate: usize, _: usize) -> Result<f32, CudaError> {
            assert!(self.0[candidate].0.is_some_and(|sums| Some(sums) == self.0[0].0), "{candidate} is out");
            Ok(self.0[candidate].1)
        }
    }

    fn won(candidates: &[(Option<[u64; 2]>, f32)]) -> usize {
        winner(&mut Told(candidates.to_vec()), candidates.len()).unwrap()
    }

    #[test]
    fn the_fastest_with_the_same_bits_wins() {
        let same = Some([5, 6]);
        assert_eq!(won(&[(same, 1.0), (same, 0.9), (same, 0.7), (same, 0.8)]), 2);
        assert_eq!(won(&[(same, 1.0), (Some([5, 7]), 0.1), (Some([4, 6]), 0.1), (same, 0.9)]), 3, "other bits");
        assert_eq!(won(&[(same, 1.0), (None, 0.1), (same, 0.5)]), 2, "one does not run");
        assert_eq!(won(&[(None, 1.0), (None, 0.1)]), 0);
    }

    #[test]
    fn the_first_stays_unless_another_is_clearly_faster() {
        let same = Some([5, 6]);
        assert_eq!(won(&[(same, 1.0), (same, 0.99)]), 0);
        assert_eq!(won(&[(same, 1.0), (same, 2.0)]), 0);
        assert_eq!(won(&[(same, 3.0), (same, 1.0), (same, 2.9)]), 1);
        assert_eq!(won(&[(same, 1.0)]), 0);
    }

    #[test]
    fn a_factor_visits_every_term() {
        for half in [1usize, 2, 3, 32, 384, 1000, 8192] {
            let factor = scrambling_factor(half);
            let mut seen: Vec<usize> = (0..half).map(|at| at * factor % half).collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..half), "{half} and {factor}");
        }
    }
}
