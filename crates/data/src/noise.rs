//! Cheap normal numbers for synthetic data: one random word each, no transcendental function.
//!
//! The sum of a word's four bytes, centred and scaled, has mean 0 and variance 1 and looks normal out to three standard
//! deviations. It is exact integer arithmetic up to the last scaling, hence the same bits everywhere.

use kolo_graph::rng::Stream;

/// Four independent bytes: mean 4 · 127.5, variance 4 · (256² − 1) / 12 = 21845.
const MEAN: f32 = 510.0;
const INVERSE_DEVIATION: f32 = 0.006_765_875;

/// A nearly normal number with mean 0 and variance 1.
#[inline(always)]
pub fn normal_of_word(word: u32) -> f32 {
    let pairs = (word & 0x00FF_00FF) + ((word >> 8) & 0x00FF_00FF);
    let sum = (pairs & 0xFFFF) + (pairs >> 16);
    (sum as f32 - MEAN) * INVERSE_DEVIATION
}

/// The nearly normal numbers of `sample`, in order, `out.len()` of them.
pub fn fill_normal(stream: &Stream, sample: usize, out: &mut [f32]) {
    stream.fill(sample as u64, 0, out, normal_of_word);
}

/// The top bits of `word` as a whole number in `0..bound`.
#[inline(always)]
pub fn below_of_word(word: u32, bound: usize) -> usize {
    ((u64::from(word) * bound as u64) >> 32) as usize
}

/// The top 24 bits of `word` as a number in `[low, high)`.
pub fn between(word: u32, low: f32, high: f32) -> f32 {
    low + (high - low) * kolo_graph::rng::unit(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_the_moments_of_a_normal() {
        let mut values = vec![0.0; 1_000_003];
        fill_normal(&Stream::new(3, "test"), 5, &mut values);
        let moment = |power: i32| values.iter().map(|v| f64::from(*v).powi(power)).sum::<f64>() / values.len() as f64;
        assert!(moment(1).abs() < 0.01, "mean {}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.01, "variance {}", moment(2));
        // Four uniforms have a kurtosis of 3 − 1.2 / 4 = 2.7; a normal has 3.
        assert!((moment(4) - 2.7).abs() < 0.04, "kurtosis {}", moment(4));
    }

    #[test]
    fn a_prefix_does_not_depend_on_the_length() {
        let stream = Stream::new(3, "test");
        let (mut short, mut long) = ([0.0; 7], [0.0; 20]);
        fill_normal(&stream, 1, &mut short);
        fill_normal(&stream, 1, &mut long);
        assert_eq!(short, long[..7]);
    }

    #[test]
    fn whole_numbers_stay_below_the_bound() {
        assert_eq!((below_of_word(0, 10), below_of_word(u32::MAX, 10)), (0, 9));
    }
}
