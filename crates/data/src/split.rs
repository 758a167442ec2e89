//! Which samples train, which are held out, and in what order: permutations that need no memory.
//!
//! A shuffle is a Feistel network over the smallest power of two that holds `0..n`, keyed by a named stream of the
//! seed. An output outside the range is fed back until it falls inside (cycle walking), which keeps it a bijection of
//! `0..n`. Any position of any epoch is reached in constant time, so a job may resume anywhere and a worker may read
//! only its part.

use kolo_graph::rng::Stream;
use kolo_graph::settings::{SettingError, Settings};

/// Feistel rounds. Four suffice for a secret cipher's proof; six also mix the halves of a few bits that small sets
/// have.
const ROUNDS: u64 = 6;

/// Samples that an evaluation may go through.
const HELD_OUT_MAX: usize = 1 << 30;

/// A keyed pseudo-random permutation of `0..n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permutation {
    stream: Stream,
    len: usize,
    /// The widths of the two halves; together they hold `0..len`.
    left_bits: u32,
    right_bits: u32,
}

impl Permutation {
    /// The permutation of `0..n` that belongs to the stream `stream_name` of `seed`.
    pub fn new(seed: u64, stream_name: &str, n: usize) -> Self {
        let bits = usize::BITS - n.saturating_sub(1).leading_zeros();
        Self { stream: Stream::new(seed, stream_name), len: n, left_bits: bits / 2, right_bits: bits - bits / 2 }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where `position` goes.
    pub fn at(&self, position: usize) -> usize {
        assert!(position < self.len, "position {position} of a permutation of {}", self.len);
        let mut value = self.scramble(position as u64);
        while value >= self.len as u64 {
            value = self.scramble(value);
        }
        value as usize
    }

    /// A bijection of `0..2^(left_bits + right_bits)`. Each round changes one half by a function of the other, so it
    /// could be undone.
    fn scramble(&self, value: u64) -> u64 {
        let (left_mask, right_mask) = ((1 << self.left_bits) - 1, (1 << self.right_bits) - 1);
        let (mut left, mut right) = (value >> self.right_bits, value & right_mask);
        for round in (0..ROUNDS).step_by(2) {
            left ^= self.stream.bits(round, right) & left_mask;
            right ^= self.stream.bits(round + 1, left) & right_mask;
        }
        left << self.right_bits | right
    }
}

impl Permutation {
    /// Which position goes to `value`.
    pub fn position(&self, value: usize) -> usize {
        assert!(value < self.len, "value {value} of a permutation of {}", self.len);
        let mut position = self.unscramble(value as u64);
        while position >= self.len as u64 {
            position = self.unscramble(position);
        }
        position as usize
    }

    /// What `scramble` makes `value` of: its rounds backwards.
    fn unscramble(&self, value: u64) -> u64 {
        let (left_mask, right_mask) = ((1 << self.left_bits) - 1, (1 << self.right_bits) - 1);
        let (mut left, mut right) = (value >> self.right_bits, value & right_mask);
        for round in (0..ROUNDS / 2).rev().map(|pair| 2 * pair) {
            right ^= self.stream.bits(round + 1, left) & right_mask;
            left ^= self.stream.bits(round, right) & left_mask;
        }
        left << self.right_bits | right
    }
}

/// The order in which epoch `epoch` walks `n` training samples.
pub fn epoch_order(seed: u64, epoch: usize, n: usize) -> Permutation {
    // A seed per epoch rather than a name per epoch: a step asks for its order and must not allocate.
    Permutation::new(Stream::new(seed, "data.order").bits(0, epoch as u64), "epoch", n)
}

/// The samples of a source, divided into those that train, those that are held out, and those that only a test at the end
/// looks at. Together they are all samples, and they share none. Either the seed divides the samples into training and held
/// out, as shuffled runs of one permutation; or the parts are given, as runs of samples in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    order: Order,
    held_out_start: usize,
    held_out_len: usize,
    /// Samples after all others.
    test_len: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Shuffled(Permutation),
    /// So many samples as they come.
    Given(usize),
    Spaced(Spaced),
}

/// Samples in their order, first those that train and then those that are held out, which lie among them at even distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Spaced {
    len: usize,
    held_out: usize,
}

impl Spaced {
    /// The held-out sample number `i`.
    fn held_out(&self, i: usize) -> usize {
        ((2 * i as u128 + 1) * self.len as u128 / (2 * self.held_out as u128)) as usize
    }

    /// The number of held-out samples with this property, which the first of them have and the others have not.
    fn count(&self, holds: impl Fn(usize) -> bool) -> usize {
        let (mut low, mut high) = (0, self.held_out);
        while low < high {
            let middle = low + (high - low) / 2;
            if holds(middle) { low = middle + 1 } else { high = middle }
        }
        low
    }

    fn at(&self, position: usize) -> usize {
        match position.checked_sub(self.len - self.held_out) {
            Some(i) => self.held_out(i),
            // Before held-out sample number `i` lie as many that train.
            None => position + self.count(|i| self.held_out(i) - i <= position),
        }
    }

    fn position(&self, sample: usize) -> usize {
        let before = self.count(|i| self.held_out(i) < sample);
        match before < self.held_out && self.held_out(before) == sample {
            true => self.len - self.held_out + before,
            false => sample - before,
        }
    }
}

impl Order {
    fn len(&self) -> usize {
        match self {
            Order::Shuffled(order) => order.len(),
            Order::Given(len) => *len,
            Order::Spaced(spaced) => spaced.len,
        }
    }

    fn at(&self, position: usize) -> usize {
        match self {
            Order::Shuffled(order) => order.at(position),
            Order::Given(_) => position,
            Order::Spaced(spaced) => spaced.at(position),
        }
    }

    fn position(&self, sample: usize) -> usize {
        match self {
            Order::Shuffled(order) => order.position(sample),
            Order::Given(_) => sample,
            Order::Spaced(spaced) => spaced.position(sample),
        }
    }
}

/// What a sample is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    Training,
    HeldOut,
    Test,
}

impl Split {
    /// Holds out about `fraction` of `n` samples. A fraction above zero holds out at least one, and never all of
    /// several.
    pub fn holdout(n: usize, fraction: f64, seed: u64) -> Self {
        let held_out_len = held_out_count(n, fraction);
        Self { order: Self::order(n, seed), held_out_start: n - held_out_len, held_out_len, test_len: 0 }
    }

    /// Holds out about `fraction` of `n` samples, at even distances. Both parts keep the order of the samples.
    pub fn spaced(n: usize, fraction: f64) -> Self {
        let held_out_len = held_out_count(n, fraction);
        let order = Order::Spaced(Spaced { len: n, held_out: held_out_len });
        Self { order, held_out_start: n - held_out_len, held_out_len, test_len: 0 }
    }

    /// Holds out part `fold` of `folds` nearly equal ones. Over all folds each sample is held out exactly once.
    pub fn fold(n: usize, folds: usize, fold: usize, seed: u64) -> Self {
        assert!(folds >= 2 && fold < folds, "fold {fold} of {folds}");
        let start = |fold: usize| (n as u128 * fold as u128 / folds as u128) as usize;
        let (held_out_start, held_out_len) = (start(fold), start(fold + 1) - start(fold));
        Self { order: Self::order(n, seed), held_out_start, held_out_len, test_len: 0 }
    }

    /// Parts that are given: first the training samples, then those that are held out.
    pub fn given(train_len: usize, held_out_len: usize) -> Self {
        Self { order: Order::Given(train_len + held_out_len), held_out_start: train_len, held_out_len, test_len: 0 }
    }

    /// The same, with so many samples for a test after all others.
    pub fn with_test(self, test_len: usize) -> Self {
        Self { test_len, ..self }
    }

    /// What `holdout`, `folds` and `fold` of the `[data]` section make of `samples`.
    pub fn read(data: &Settings, samples: usize, seed: u64) -> Result<Self, SettingError> {
        HoldOut::read(data, samples)?.split(samples, seed).bounded(data)
    }

    /// The same, unless an evaluation would never end: sources that compute their samples may have any number of them.
    pub(crate) fn bounded(self, data: &Settings) -> Result<Self, SettingError> {
        if self.held_out_len <= HELD_OUT_MAX {
            return Ok(self);
        }
        let (held_out, samples) = (self.held_out_len, self.order.len());
        let message = format!("leaves {held_out} of {samples} samples to evaluate on; {HELD_OUT_MAX} are allowed");
        Err(data.wrong("holdout", message, "write a smaller one, such as `holdout = 0.001`, or use fewer samples"))
    }

    fn order(n: usize, seed: u64) -> Order {
        Order::Shuffled(Permutation::new(seed, "data.split", n))
    }

    pub fn train_len(&self) -> usize {
        self.order.len() - self.held_out_len
    }

    pub fn held_out_len(&self) -> usize {
        self.held_out_len
    }

    pub fn test_len(&self) -> usize {
        self.test_len
    }

    /// The samples of the test in the place of those that are held out.
    pub fn test_as_held_out(self) -> Self {
        let (held_out_start, held_out_len) = (self.order.len(), self.test_len);
        Self { order: Order::Given(held_out_start + held_out_len), held_out_start, held_out_len, test_len: 0 }
    }

    /// The training sample number `i`.
    pub fn train(&self, i: usize) -> usize {
        assert!(i < self.train_len(), "training sample {i} of {}", self.train_len());
        self.order.at(if i < self.held_out_start { i } else { i + self.held_out_len })
    }

    /// The held-out sample number `i`.
    pub fn held_out(&self, i: usize) -> usize {
        assert!(i < self.held_out_len, "held-out sample {i} of {}", self.held_out_len);
        self.order.at(self.held_out_start + i)
    }

    /// The test sample number `i`.
    pub fn test(&self, i: usize) -> usize {
        assert!(i < self.test_len, "test sample {i} of {}", self.test_len);
        self.order.len() + i
    }

    /// What this sample is for.
    pub fn purpose(&self, sample: usize) -> Purpose {
        if sample >= self.order.len() {
            return Purpose::Test;
        }
        let position = self.order.position(sample);
        match (self.held_out_start..self.held_out_start + self.held_out_len).contains(&position) {
            true => Purpose::HeldOut,
            false => Purpose::Training,
        }
    }

    /// How many samples are for this purpose.
    pub fn len_of(&self, purpose: Purpose) -> usize {
        match purpose {
            Purpose::Training => self.train_len(),
            Purpose::HeldOut => self.held_out_len(),
            Purpose::Test => self.test_len(),
        }
    }

    /// Sample number `i` of those for this purpose.
    pub fn sample_of(&self, purpose: Purpose, i: usize) -> usize {
        match purpose {
            Purpose::Training => self.train(i),
            Purpose::HeldOut => self.held_out(i),
            Purpose::Test => self.test(i),
        }
    }
}

/// How many of `n` samples about `fraction` are. A fraction above zero is at least one, and never all of several.
pub(crate) fn held_out_count(n: usize, fraction: f64) -> usize {
    assert!((0.0..1.0).contains(&fraction), "a fraction of {fraction} cannot be held out");
    let rounded = (n as f64 * fraction).round() as usize;
    if fraction == 0.0 || n < 2 { 0 } else { rounded.clamp(1, n - 1) }
}

/// How much is held out: what `holdout`, `folds` and `fold` of the `[data]` section say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum HoldOut {
    Part(f64),
    Fold { folds: usize, fold: usize },
}

impl HoldOut {
    pub fn read(data: &Settings, samples: usize) -> Result<Self, SettingError> {
        let folds = data.count("folds", 0, 0)?;
        let fold = data.count("fold", 0, 0)?;
        let holdout = data.float_in("holdout", 0.2, 0.0, 0.9)?;
        if folds == 0 {
            if data.has("fold") {
                return Err(data.wrong("fold", "needs `folds`", "write `folds = 5` as well"));
            }
            return Ok(Self::Part(holdout));
        }
        if folds == 1 || folds > samples {
            return Err(data.wrong("folds", format!("is {folds}"), format!("choose between 2 and {samples} folds")));
        }
        if fold >= folds {
            return Err(data.wrong("fold", format!("is {fold}"), format!("folds are numbered 0 to {}", folds - 1)));
        }
        Ok(Self::Fold { folds, fold })
    }

    /// Of samples that chance divides.
    pub fn split(&self, samples: usize, seed: u64) -> Split {
        match *self {
            Self::Part(part) => Split::holdout(samples, part, seed),
            Self::Fold { folds, fold } => Split::fold(samples, folds, fold, seed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_evaluation_without_an_end_is_refused() {
        use kolo_graph::settings::Setting;
        let mut data = Settings::new("data", "job.toml:1");
        let error = Split::read(&data, i64::MAX as usize, 1).unwrap_err().to_string();
        assert!(error.starts_with("job.toml:1: `data.holdout` leaves 184467440737095"), "{error}");
        assert!(error.contains("of 9223372036854775807 samples to evaluate on; 1073741824 are allowed"), "{error}");
        data.set("folds", "job.toml:2", Setting::Int(5));
        assert!(Split::read(&data, i64::MAX as usize, 1).is_err());
        data.remove("folds");
        data.set("holdout", "job.toml:2", Setting::Float(0.0));
        assert_eq!(Split::read(&data, i64::MAX as usize, 1).unwrap().held_out_len(), 0);
        data.set("holdout", "job.toml:2", Setting::Float(0.5));
        assert_eq!(Split::read(&data, 1 << 31, 1).unwrap().held_out_len(), HELD_OUT_MAX);
    }

    fn is_everything_once(samples: impl Iterator<Item = usize>, n: usize) -> bool {
        let mut samples: Vec<usize> = samples.collect();
        samples.sort_unstable();
        samples.into_iter().eq(0..n)
    }

    #[test]
    fn permutation_is_a_bijection() {
        for n in (0..130).chain([255, 256, 257, 1797, 4096, 10_000, 65_537]) {
            let permutation = Permutation::new(n as u64, "test", n);
            assert!(is_everything_once((0..n).map(|i| permutation.at(i)), n), "n = {n}");
            assert!((0..n).all(|i| permutation.position(permutation.at(i)) == i), "n = {n}");
        }
    }

    #[test]
    fn permutation_reaches_huge_ranges() {
        for n in [usize::MAX, 1 << 63, 1_000_000_000_000_000_000] {
            let permutation = Permutation::new(1, "test", n);
            assert!((0..100).all(|i| permutation.at(n - 1 - i) < n && permutation.at(i) != i));
        }
    }

    /// Over many seeds every value must land on every position about equally often.
    #[test]
    fn permutation_is_unbiased() {
        let (n, seeds) = (10, 20_000);
        let mut counts = vec![0_i32; n * n];
        for seed in 0..seeds {
            let permutation = Permutation::new(seed, "test", n);
            (0..n).for_each(|i| counts[i * n + permutation.at(i)] += 1);
        }
        let expected = (seeds as usize / n) as i32;
        assert!(counts.iter().all(|count| (count - expected).abs() < expected / 8), "{counts:?}");
    }

    #[test]
    fn epochs_differ_and_repeat() {
        let walk = |seed, epoch| (0..1797).map(|i| epoch_order(seed, epoch, 1797).at(i)).collect::<Vec<_>>();
        assert_eq!(walk(1, 3), walk(1, 3));
        let same = |a: Vec<usize>, b: Vec<usize>| a.iter().zip(&b).filter(|(a, b)| a == b).count();
        assert!(same(walk(1, 3), walk(1, 4)) < 10 && same(walk(1, 3), walk(2, 3)) < 10);
    }

    #[test]
    fn holdout_divides_all_samples() {
        for (n, fraction, held_out) in
            [(1797, 0.2, 359), (10, 0.0, 0), (3, 0.01, 1), (2, 0.99, 1), (1, 0.5, 0), (0, 0.5, 0)]
        {
            let split = Split::holdout(n, fraction, 7);
            assert_eq!((split.train_len(), split.held_out_len()), (n - held_out, held_out));
            let train = (0..split.train_len()).map(|i| split.train(i));
            assert!(is_everything_once(train.chain((0..held_out).map(|i| split.held_out(i))), n));
        }
    }

    #[test]
    fn spaced_parts_keep_the_order_and_lie_evenly() {
        for (n, fraction) in [(10, 0.2), (1797, 0.2), (7, 0.9), (100, 0.013), (5, 0.0), (1, 0.5), (1000, 0.5)] {
            let split = Split::spaced(n, fraction);
            let train: Vec<usize> = (0..split.train_len()).map(|i| split.train(i)).collect();
            let held_out: Vec<usize> = (0..split.held_out_len()).map(|i| split.held_out(i)).collect();
            assert!(train.is_sorted() && held_out.is_sorted(), "{n} {fraction}");
            assert!(train.iter().all(|sample| split.purpose(*sample) == Purpose::Training));
            assert!(held_out.iter().all(|sample| split.purpose(*sample) == Purpose::HeldOut));
            assert_eq!(split.held_out_len(), Split::holdout(n, fraction, 1).held_out_len());
            assert!(is_everything_once(train.into_iter().chain(held_out), n));
        }
        assert_eq!((Split::spaced(10, 0.2).held_out(0), Split::spaced(10, 0.2).held_out(1)), (2, 7));
        assert_eq!(Split::spaced(usize::MAX, 0.5).train_len(), usize::MAX / 2);
    }

    #[test]
    fn parts_know_their_samples() {
        let shuffled = Split::holdout(100, 0.3, 7).with_test(11);
        let given = Split::given(70, 30).with_test(11);
        let spaced = Split::spaced(100, 0.3).with_test(11);
        for split in [shuffled, given, spaced] {
            let parts = [(Purpose::Training, 70), (Purpose::HeldOut, 30), (Purpose::Test, 11)];
            let all =
                parts.iter().flat_map(|(purpose, len)| (0..*len).map(|i| (*purpose, split.sample_of(*purpose, i))));
            assert!(all.clone().all(|(purpose, sample)| split.purpose(sample) == purpose));
            assert!(is_everything_once(all.map(|(_, sample)| sample), 111));
            assert!(parts.iter().all(|(purpose, len)| split.len_of(*purpose) == *len));
        }
        assert_eq!((given.train(3), given.held_out(0), given.test(1)), (3, 70, 101));
    }

    #[test]
    fn folds_partition_all_samples() {
        for (n, folds) in [(1797, 5), (10, 3), (7, 7), (3, 5)] {
            let splits: Vec<Split> = (0..folds).map(|fold| Split::fold(n, folds, fold, 7)).collect();
            let held_out = splits.iter().flat_map(|split| (0..split.held_out_len()).map(|i| split.held_out(i)));
            assert!(is_everything_once(held_out, n));
            for split in &splits {
                let train = (0..split.train_len()).map(|i| split.train(i));
                assert!(is_everything_once(train.chain((0..split.held_out_len()).map(|i| split.held_out(i))), n));
            }
        }
    }
}
