//! Quantiles of values that come one by one, such as the times of steps, in bounded memory.
//!
//! Up to `KEPT_MAX` values are all kept. Of more, a random sample stands for them (reservoir sampling): every value is in
//! it with the same chance. Which ones depends on their number only, so the same values give the same quantiles.

use kolo_graph::rng::Stream;

/// Values that are kept: 32 KiB. The p95 of a larger number has a rank within one percent.
const KEPT_MAX: usize = 4096;

/// Values without the first, which touches the memory and says little of the others, unless it is the only one.
#[derive(Clone, Debug, Default)]
pub struct Quantiles {
    first: Option<f64>,
    /// After the first.
    kept: Vec<f64>,
    count: u64,
    sum: f64,
}

impl Quantiles {
    /// So many zeros.
    pub fn of_zeros(count: u64) -> Self {
        let kept = vec![0.0; KEPT_MAX.min(count.saturating_sub(1) as usize)];
        Self { first: (count > 0).then_some(0.0), kept, count, sum: 0.0 }
    }

    pub fn of(values: &[f64]) -> Self {
        let mut all = Self::default();
        values.iter().for_each(|value| all.push(*value));
        all
    }

    pub fn push(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
        if self.first.is_none() {
            self.first = Some(value);
        } else if self.kept.len() < KEPT_MAX {
            self.kept.push(value);
        } else {
            let at = Stream::new(0, "quantiles").below(0, self.count, self.count - 1);
            if let Some(place) = self.kept.get_mut(at as usize) {
                *place = value;
            }
        }
    }

    /// Values so far.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The sum of all values, with the first.
    pub fn sum(&self) -> f64 {
        self.sum
    }

    /// The values that these parts of all are not above; zero if there are none.
    pub fn at<const PARTS: usize>(&self, parts: [f64; PARTS]) -> [f64; PARTS] {
        let mut sorted = self.kept.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().saturating_sub(1) as f64;
        parts.map(|part| sorted.get((last * part).round() as usize).copied().or(self.first).unwrap_or(0.0))
    }

    pub fn median(&self) -> f64 {
        let [median] = self.at([0.5]);
        median
    }

    /// Of the heap.
    #[cfg(test)]
    pub(crate) fn held_bytes(&self) -> usize {
        self.kept.capacity() * size_of::<f64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_values_are_exact() {
        assert_eq!((Quantiles::default().median(), Quantiles::of(&[3.0]).at([0.5, 0.95])), (0.0, [3.0, 3.0]));
        assert_eq!(Quantiles::of(&[100.0, 3.0]).at([0.5, 0.95]), [3.0, 3.0]);
        let values: Vec<f64> = (0..101).rev().map(f64::from).collect();
        let all = Quantiles::of(&values);
        assert_eq!((all.at([0.0, 0.5, 0.95, 1.0]), all.count(), all.sum()), ([0.0, 50.0, 94.0, 99.0], 101, 5050.0));
        assert_eq!((Quantiles::of_zeros(9).count(), Quantiles::of_zeros(9).median()), (9, 0.0));
    }

    #[test]
    fn many_values_are_bounded_and_nearly_exact() {
        // Rising and periodic values, which a sample of every so many would get wrong.
        let rising: Vec<f64> = (0..200_000).map(f64::from).collect();
        let [median, p95] = Quantiles::of(&rising).at([0.5, 0.95]);
        assert!((median / 200_000.0 - 0.5).abs() < 0.03 && (p95 / 200_000.0 - 0.95).abs() < 0.015, "{median} {p95}");
        let periodic: Vec<f64> = (0..200_000).map(|at| f64::from(u8::from(at % 8 == 0))).collect();
        let all = Quantiles::of(&periodic);
        assert_eq!((all.at([0.5, 0.8, 0.95]), all.count(), all.sum()), ([0.0, 0.0, 1.0], 200_000, 25_000.0));
        assert_eq!(all.held_bytes(), KEPT_MAX * size_of::<f64>());
        assert_eq!(Quantiles::of(&rising).at([0.5, 0.95]), [median, p95]);
    }
}
