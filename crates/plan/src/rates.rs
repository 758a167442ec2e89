//! Rates of this machine, measured in about a fifth of a second. They say what a job takes on a machine like this one where
//! none of it can be tried; where it can, `kolo plan` tries it.

use kolo_graph::{Team, Work};
use kolo_ops::gemm::{Gemm, Right, Rows, SCRATCH, Start, Strided};
use kolo_ops::simd;
use kolo_ops::tiles::Address;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// What one thread can do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Floating-point operations per second in a large matrix product.
    pub flops: f64,
    /// The same in a product of a few rows, as recurrent layers have one per time step.
    pub thin_flops: f64,
    /// Bytes per second, read and written, out of cache.
    pub bytes: f64,
    /// Seconds per kernel call beyond its work. Assumed, not measured: it matters only to very small layers.
    pub call: f64,
}

/// Twice this many bytes are larger than the caches of most cores' share of a socket.
const STREAM_FLOATS: usize = 8 << 20;
/// As many as are there in any case.
const STREAM_FLOATS_MIN: usize = 16 << 10;
const PRODUCT_SIZE: usize = 384;
const THIN_ROWS: usize = 16;
const PATIENCE: Duration = Duration::from_millis(40);
/// On a machine that does other work, too, one run may take any time.
const RUNS_MIN: usize = 5;

/// The shortest time of `work` within the patience.
fn best(mut work: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut best = f64::MAX;
    let mut runs = 0;
    while runs < RUNS_MIN || begin.elapsed() < PATIENCE {
        runs += 1;
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// Two streams of the same length. Where the system has less memory than they need, they are shorter: a rate that is a little
/// too high is better than a program that ends.
fn streams(mut reserve: impl FnMut(&mut Vec<f32>, usize) -> bool) -> (Vec<f32>, Vec<f32>) {
    let (mut y, mut x) = (Vec::new(), Vec::new());
    let mut floats = STREAM_FLOATS;
    while floats > STREAM_FLOATS_MIN && !(reserve(&mut y, floats) && reserve(&mut x, floats)) {
        (y, x, floats) = (Vec::new(), Vec::new(), floats / 2);
    }
    y.resize(floats, 1.0);
    x.resize(floats, 1.0);
    (y, x)
}

impl Rates {
    /// Assumed rates of a core with wide vectors, for comparing two steps where measuring would take too much memory.
    pub fn usual() -> Self {
        Self { flops: 80e9, thin_flops: 25e9, bytes: 15e9, call: 0.4e-6 }
    }

    /// Measures one thread: the first time that a process asks.
    pub fn measure() -> Self {
        static MEASURED: OnceLock<Rates> = OnceLock::new();
        *MEASURED.get_or_init(Self::measure_now)
    }

    fn measure_now() -> Self {
        let size = PRODUCT_SIZE;
        let (a, b) = (vec![0.5f32; size * size], vec![0.25f32; size * size]);
        let mut c = vec![0.0f32; size * size];
        let mut scratch = vec![0.0f32; SCRATCH];
        let team = Team::solo();
        let mut product = |rows: usize| {
            let seconds = best(|| {
                let a = Strided { data: &a, line_stride: size, k_stride: 1 };
                let b = Strided { data: &b, line_stride: 1, k_stride: size };
                let sink = Rows { data: Address(c.as_mut_ptr()), stride: size };
                let gemm = Gemm { shape: [rows, size, size], a: &a, b: Right::Fresh(&b), c: &sink, start: Start::Zero };
                gemm.run_on(&team, &mut scratch);
            });
            2.0 * (rows * size * size) as f64 / seconds
        };
        let (flops, thin_flops) = (product(size), product(THIN_ROWS));
        let (mut y, x) = streams(|vector, floats| vector.try_reserve_exact(floats).is_ok());
        let stream = best(|| simd::add_into(&mut y, &x));
        Self { flops, thin_flops, bytes: 12.0 * y.len() as f64 / stream, call: 0.4e-6 }
    }

    /// Seconds of one call on this many threads.
    pub fn seconds(&self, flops: u64, bytes: u64, work: Work, threads: f64) -> f64 {
        let compute = match work {
            Work::Product => flops as f64 / self.flops,
            Work::ThinProducts => flops as f64 / self.thin_flops,
            Work::Stream => 0.0,
        };
        self.call + compute.max(bytes as f64 / self.bytes) / threads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_as_long_as_memory_allows() {
        let lengths = |most: usize| {
            let (y, x) = streams(|_, floats| floats <= most);
            [y.len(), x.len()]
        };
        assert_eq!(lengths(STREAM_FLOATS), [STREAM_FLOATS; 2]);
        assert_eq!(lengths(STREAM_FLOATS - 1), [STREAM_FLOATS / 2; 2]);
        assert_eq!(lengths(100_000), [64 << 10; 2]);
        assert_eq!(lengths(0), [STREAM_FLOATS_MIN; 2]);
    }

    /// An op says itself what sets its time, so that an op of a program's own is no worse known than ours.
    #[test]
    fn the_ops_that_multiply_say_so() {
        let named = |work: Work| {
            let is = |kind: &kolo_graph::OpKind| (kind.cases)().first().is_some_and(|case| case.op.work() == work);
            let mut names: Vec<&str> =
                kolo_ops::registry().iter().filter(|kind| is(kind)).map(|kind| kind.name).collect();
            names.sort_unstable();
            names.join(" ")
        };
        assert_eq!(
            named(Work::Product),
            "attention attention_bias_grad attention_grad attention_step attention_step_grad cached_attention conv2d \
             conv2d_input_grad conv2d_weight_grad conv_transpose2d linear linear_part matmul matmul_part"
        );
        assert_eq!(named(Work::ThinProducts), "gru gru_grad lstm lstm_grad rnn rnn_grad");
    }
}
