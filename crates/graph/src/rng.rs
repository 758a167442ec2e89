//! Counter-based random numbers: Philox4x32-10.
//!
//! A number depends only on (seed, stream name, counter), never on how many were drawn before it, by whom, or on which
//! thread. That is what lets a shard be initialised alone and a dropped activation be dropped again in the backward pass.

use crate::vectorized;

/// A named stream of random numbers. Two counters address a block of four words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
}

const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

impl Stream {
    /// The stream `name` of `seed`.
    pub fn new(seed: u64, name: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes());
        hasher.update(name.as_bytes());
        let hash = hasher.finalize();
        let word = |at: usize| {
            let bytes = hash.as_bytes();
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Self::from_key([word(0), word(4)])
    }

    /// The stream with this raw key.
    pub const fn from_key(key: [u32; 2]) -> Self {
        Self { key }
    }

    /// The raw key, as one word. It is what a graph's `rng` input carries.
    pub fn key(&self) -> u64 {
        u64::from(self.key[0]) | u64::from(self.key[1]) << 32
    }

    /// The four words at counter (`high`, `low`).
    #[inline(always)]
    pub fn block(&self, high: u64, low: u64) -> [u32; 4] {
        self.blocks::<1>(high, low).map(|[word]| word)
    }

    /// The words of `COUNT` blocks from (`high`, `low`) on: first the first of each. A compiler that knows the machine works
    /// many out at the same time.
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "four arrays in step")]
    fn blocks<const COUNT: usize>(&self, high: u64, low: u64) -> [[u32; COUNT]; 4] {
        let mut counter = [[0; COUNT], [0; COUNT], [high as u32; COUNT], [(high >> 32) as u32; COUNT]];
        for at in 0..COUNT {
            let low = low.wrapping_add(at as u64);
            (counter[0][at], counter[1][at]) = (low as u32, (low >> 32) as u32);
        }
        let mut key = self.key;
        for _ in 0..ROUNDS {
            for at in 0..COUNT {
                let product0 = u64::from(MULTIPLIER[0]) * u64::from(counter[0][at]);
                let product1 = u64::from(MULTIPLIER[1]) * u64::from(counter[2][at]);
                counter[0][at] = (product1 >> 32) as u32 ^ counter[1][at] ^ key[0];
                counter[1][at] = product1 as u32;
                counter[2][at] = (product0 >> 32) as u32 ^ counter[3][at] ^ key[1];
                counter[3][at] = product0 as u32;
            }
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        counter
    }

    /// Fills `out` with a number for each word from block (`high`, `low`) on. The last block may be used in part.
    pub fn fill(&self, high: u64, low: u64, out: &mut [f32], number: impl Fn(u32) -> f32) {
        let mut words = [[0; 4]; BATCH];
        for (batch, out) in out.chunks_mut(4 * BATCH).enumerate() {
            words_of_batch(*self, high, low.wrapping_add((batch * BATCH) as u64), &mut words);
            out.iter_mut().zip(words.as_flattened()).for_each(|(value, word)| *value = number(*word));
        }
    }

    /// Fills `out` with the words from block (`high`, `low`) on. The last block may be used in part.
    pub fn fill_words(&self, high: u64, low: u64, out: &mut [u32]) {
        let mut words = [[0; 4]; BATCH];
        for (batch, out) in out.chunks_mut(4 * BATCH).enumerate() {
            words_of_batch(*self, high, low.wrapping_add((batch * BATCH) as u64), &mut words);
            out.copy_from_slice(&words.as_flattened()[..out.len()]);
        }
    }

    /// Fills `out` with standard normal numbers `4·quad ..` of row `high`, each made smaller or larger by `deviation`.
    pub fn fill_normals(&self, high: u64, quad: u64, deviation: f64, out: &mut [f32]) {
        let mut numbers = [[0.0; 4]; BATCH];
        for (batch, out) in out.chunks_mut(4 * BATCH).enumerate() {
            normals_of_batch(*self, high, quad.wrapping_add((batch * BATCH) as u64), deviation, &mut numbers);
            out.copy_from_slice(&numbers.as_flattened()[..out.len()]);
        }
    }

    /// 64 random bits.
    pub fn bits(&self, high: u64, low: u64) -> u64 {
        let block = self.block(high, low);
        u64::from(block[0]) | u64::from(block[1]) << 32
    }

    /// Uniform in `[0, 1)`, with 24 bits.
    #[inline(always)]
    pub fn uniform(&self, high: u64, low: u64) -> f32 {
        unit(self.block(high, low)[0])
    }

    /// A whole number in `0..bound`. The bias is below 2⁻³² for any bound that fits 32 bits.
    pub fn below(&self, high: u64, low: u64, bound: u64) -> u64 {
        assert!(bound > 0, "an empty range has no number in it");
        ((u128::from(self.bits(high, low)) * u128::from(bound)) >> 64) as u64
    }

    /// Standard normal number `low` of row `high`.
    pub fn normal(&self, high: u64, low: u64) -> f32 {
        self.normals(high, low / 4)[(low % 4) as usize]
    }

    /// Standard normal numbers `4·quad .. 4·quad + 4`.
    pub fn normals(&self, high: u64, quad: u64) -> [f32; 4] {
        let [a, b, c, d] = self.block(high, quad);
        let (first, second) = (normal_pair(a, b), normal_pair(c, d));
        [first.0, first.1, second.0, second.1]
    }
}

/// Blocks worked out together.
const BATCH: usize = 16;

vectorized! {
    fn words_of_batch(stream: Stream, high: u64, low: u64, out: &mut [[u32; 4]; BATCH]) {
        let [a, b, c, d] = stream.blocks::<BATCH>(high, low);
        for at in 0..BATCH {
            out[at] = [a[at], b[at], c[at], d[at]];
        }
    }
}

vectorized! {
    fn normals_of_batch(stream: Stream, high: u64, quad: u64, deviation: f64, out: &mut [[f32; 4]; BATCH]) {
        let words = stream.blocks::<BATCH>(high, quad);
        let mut numbers = [[0.0; BATCH]; 4];
        for pair in 0..2 {
            for at in 0..BATCH {
                let (first, second) = normal_pair(words[2 * pair][at], words[2 * pair + 1][at]);
                numbers[2 * pair][at] = (f64::from(first) * deviation) as f32;
                numbers[2 * pair + 1][at] = (f64::from(second) * deviation) as f32;
            }
        }
        for at in 0..BATCH {
            out[at] = std::array::from_fn(|word| numbers[word][at]);
        }
    }
}

/// Two normal numbers of two words, by Box and Muller. The arithmetic is our own, so that initial weights do not depend on
/// the system's library, and has no branches, so that many can be worked out at the same time.
#[inline(always)]
fn normal_pair(a: u32, b: u32) -> (f32, f32) {
    let radius = (-2.0 * ln((f64::from(a) + 0.5) / 4_294_967_296.0)).sqrt();
    let (sin, cos) = sin_cos(f64::from(b) / 4_294_967_296.0);
    ((radius * cos) as f32, (radius * sin) as f32)
}

/// The exponential of a number from −700 to 700, within 1e-14 of it: a power of two, and Taylor's series of the rest. Smaller
/// numbers give 0. The arithmetic is our own, as that of [`ln`].
pub fn exp(x: f64) -> f64 {
    if x < -700.0 {
        return 0.0;
    }
    let twos = (x.min(700.0) * std::f64::consts::LOG2_E).round();
    let rest = x.min(700.0) - twos * std::f64::consts::LN_2;
    let series = (1..=16).rev().fold(1.0, |series, n| 1.0 + series * rest / f64::from(n));
    series * f64::from_bits(((twos as i64 + 1023) as u64) << 52)
}

/// Natural logarithm of a normal number, within 2e-12: the exponent, and the series of the inverse hyperbolic tangent.
#[inline(always)]
pub fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let exponent = (bits >> 52) as i32 - 1022;
    let half = f64::from_bits(bits & ((1 << 52) - 1) | 1022 << 52);
    let small = half < std::f64::consts::FRAC_1_SQRT_2;
    let m = if small { half * 2.0 } else { half };
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut series = 1.0 / 13.0;
    series = series * z + 1.0 / 11.0;
    series = series * z + 1.0 / 9.0;
    series = series * z + 1.0 / 7.0;
    series = series * z + 1.0 / 5.0;
    series = series * z + 1.0 / 3.0;
    series = series * z + 1.0;
    f64::from(exponent - i32::from(small)) * std::f64::consts::LN_2 + 2.0 * s * series
}

/// Sine and cosine of a number of turns in `[0, 1)`, within 1e-11: Taylor's series around the nearest quarter.
#[inline(always)]
fn sin_cos(turns: f64) -> (f64, f64) {
    let quarter = (turns * 4.0 + 0.5) as i32;
    let x = (turns - f64::from(quarter) * 0.25) * std::f64::consts::TAU;
    let z = x * x;
    let mut sin = 1.0 - z * (1.0 / 110.0);
    sin = 1.0 - sin * (z * (1.0 / 72.0));
    sin = 1.0 - sin * (z * (1.0 / 42.0));
    sin = 1.0 - sin * (z * (1.0 / 20.0));
    sin = 1.0 - sin * (z * (1.0 / 6.0));
    sin *= x;
    let mut cos = 1.0 - z * (1.0 / 132.0);
    cos = 1.0 - cos * (z * (1.0 / 90.0));
    cos = 1.0 - cos * (z * (1.0 / 56.0));
    cos = 1.0 - cos * (z * (1.0 / 30.0));
    cos = 1.0 - cos * (z * (1.0 / 12.0));
    cos = 1.0 - cos * (z * (1.0 / 2.0));
    let turned = quarter & 1 == 1;
    let (first, second) = if turned { (cos, sin) } else { (sin, cos) };
    let sign = |negative: bool| if negative { -1.0 } else { 1.0 };
    (first * sign(quarter & 2 == 2), second * sign((quarter + 1) & 2 == 2))
}

/// The top 24 bits of `word` as a number in `[0, 1)`.
#[inline(always)]
pub fn unit(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known-answer vectors of the Random123 distribution.
    #[test]
    fn philox_known_answers() {
        assert_eq!(Stream::from_key([0, 0]).block(0, 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(Stream::from_key([!0, !0]).block(!0, !0), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    }

    #[test]
    fn many_at_a_time_are_the_same() {
        let stream = Stream::new(7, "test");
        for (low, len) in [(0, 1), (5, 64), (u64::from(u32::MAX) - 3, 203)] {
            let (mut words, mut numbers) = (vec![0.0; len], vec![0.0; len]);
            stream.fill(3, low, &mut words, unit);
            stream.fill_normals(3, low, 0.5, &mut numbers);
            for at in 0..len {
                let (block, word) = (low + at as u64 / 4, at % 4);
                assert_eq!(words[at], unit(stream.block(3, block)[word]));
                assert_eq!(numbers[at], stream.normals(3, block)[word] * 0.5);
            }
        }
    }

    #[test]
    fn logarithm_and_sine_are_accurate() {
        for at in 0..100_000 {
            let x = (f64::from(at) * 42_949.0 + 0.5) / 4_294_967_296.0;
            assert!((ln(x) / x.ln() - 1.0).abs() < 2e-12, "ln {x}");
            let ((sin, cos), want) = (sin_cos(x), (x * std::f64::consts::TAU).sin_cos());
            assert!((sin - want.0).abs() < 1e-11 && (cos - want.1).abs() < 1e-11, "turns {x}");
        }
    }

    #[test]
    fn exponential_is_accurate() {
        for at in -6990..6990 {
            let x = f64::from(at) * 0.1 + 0.037;
            assert!((exp(x) / x.exp() - 1.0).abs() < 1e-12, "exp {x}");
        }
        assert_eq!((exp(0.0), exp(-1e9)), (1.0, 0.0));
    }

    #[test]
    fn normal_has_unit_moments() {
        let stream = Stream::new(7, "test");
        let values: Vec<f64> = (0..100_000).map(|i| f64::from(stream.normal(0, i))).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "mean {mean}, variance {variance}");
    }
}
