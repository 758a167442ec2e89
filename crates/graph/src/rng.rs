//! Counter-based random numbers: Philox4x32-10.
//!
//! A number depends only on (seed, stream name, counter), never on how many were drawn before it, by whom, or on which
//! thread. That is what lets a shard be initialised alone and a dropped activation be dropped again in the backward pass.

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
        let mut counter = [low as u32, (low >> 32) as u32, high as u32, (high >> 32) as u32];
        let mut key = self.key;
        for _ in 0..ROUNDS {
            let product0 = u64::from(MULTIPLIER[0]) * u64::from(counter[0]);
            let product1 = u64::from(MULTIPLIER[1]) * u64::from(counter[2]);
            counter = [
                (product1 >> 32) as u32 ^ counter[1] ^ key[0],
                product1 as u32,
                (product0 >> 32) as u32 ^ counter[3] ^ key[1],
                product0 as u32,
            ];
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        counter
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

    /// Standard normal numbers `4·quad .. 4·quad + 4`, by Box and Muller: each pair of words gives two. The arithmetic is
    /// our own, so that initial weights do not depend on the system's library.
    pub fn normals(&self, high: u64, quad: u64) -> [f32; 4] {
        let block = self.block(high, quad);
        let pair = |a: u32, b: u32| {
            let radius = (-2.0 * ln((f64::from(a) + 0.5) / 4_294_967_296.0)).sqrt();
            let (sin, cos) = sin_cos(f64::from(b) / 4_294_967_296.0);
            ((radius * cos) as f32, (radius * sin) as f32)
        };
        let ((a, b), (c, d)) = (pair(block[0], block[1]), pair(block[2], block[3]));
        [a, b, c, d]
    }
}

/// Natural logarithm of a normal number, within 2e-12: the exponent, and the series of the inverse hyperbolic tangent.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let exponent = (bits >> 52) as i64 - 1022;
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
    (exponent - i64::from(small)) as f64 * std::f64::consts::LN_2 + 2.0 * s * series
}

/// Sine and cosine of a number of turns in `[0, 1)`, within 1e-11: Taylor's series around the nearest quarter.
fn sin_cos(turns: f64) -> (f64, f64) {
    let quarter = (turns * 4.0 + 0.5) as i64;
    let x = (turns - quarter as f64 * 0.25) * std::f64::consts::TAU;
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
    match quarter & 3 {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
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
    fn logarithm_and_sine_are_accurate() {
        for at in 0..100_000 {
            let x = (f64::from(at) * 42_949.0 + 0.5) / 4_294_967_296.0;
            assert!((ln(x) / x.ln() - 1.0).abs() < 2e-12, "ln {x}");
            let ((sin, cos), want) = (sin_cos(x), (x * std::f64::consts::TAU).sin_cos());
            assert!((sin - want.0).abs() < 1e-11 && (cos - want.1).abs() < 1e-11, "turns {x}");
        }
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
