//! The order that a shuffle buffer gives.

use kolo_graph::rng::Stream;

/// The order in which samples `0..len` leave a buffer: it is filled from the front, one of it is drawn, and the next sample
/// takes its place. A buffer of one sample leaves the order as it is; one of all samples shuffles all of them. Which one is
/// drawn depends on the seed, the epoch and the position only.
#[derive(Clone, Debug)]
pub struct BufferedOrder {
    stream: Stream,
    epoch: u64,
    len: usize,
    capacity: usize,
    buffer: Vec<usize>,
    /// The next sample that comes into the buffer.
    incoming: usize,
    /// Samples that have left it.
    position: usize,
}

impl BufferedOrder {
    pub fn new(seed: u64, epoch: usize, len: usize, capacity: usize) -> Self {
        let stream = Stream::new(seed, "data.shuffle_buffer");
        let mut order =
            Self { stream, epoch: epoch as u64, len, capacity, buffer: Vec::new(), incoming: 0, position: 0 };
        order.fill();
        order
    }

    /// What the buffer holds, filled as far as it can be.
    pub fn buffer(&self) -> &[usize] {
        &self.buffer
    }

    /// Samples that have left it.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The sample that comes into the buffer `after` draws from the next one on, if there is one: 0 is the next draw's.
    pub fn incoming(&self, after: usize) -> Option<usize> {
        self.incoming.checked_add(after).filter(|sample| *sample < self.len)
    }

    fn fill(&mut self) {
        while self.buffer.len() < self.capacity && self.incoming < self.len {
            self.buffer.push(self.incoming);
            self.incoming += 1;
        }
    }
}

impl Iterator for BufferedOrder {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.buffer.is_empty() {
            return None;
        }
        let drawn = self.stream.below(self.epoch, self.position as u64, self.buffer.len() as u64);
        let sample = self.buffer.swap_remove(drawn as usize);
        self.position += 1;
        self.fill();
        Some(sample)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(seed: u64, epoch: usize, len: usize, capacity: usize) -> Vec<usize> {
        BufferedOrder::new(seed, epoch, len, capacity).collect()
    }

    #[test]
    fn every_sample_leaves_once_and_not_before_it_came() {
        for (len, capacity) in [(0, 5), (1, 1), (10, 3), (10, 10), (10, 100), (1000, 64)] {
            let order = order(7, 2, len, capacity);
            assert!(order.iter().enumerate().all(|(at, sample)| *sample < at + capacity), "{len} {capacity}");
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..len), "{len} {capacity}");
        }
    }

    #[test]
    fn a_buffer_of_one_is_the_order_of_the_file() {
        assert!(order(1, 4, 50, 1).into_iter().eq(0..50));
    }

    #[test]
    fn seed_and_epoch_change_the_order_and_nothing_else_does() {
        assert_eq!(order(1, 0, 200, 16), order(1, 0, 200, 16));
        assert_ne!(order(1, 0, 200, 16), order(1, 1, 200, 16));
        assert_ne!(order(1, 0, 200, 16), order(2, 0, 200, 16));
    }

    /// A buffer of all samples is a fair shuffle: each sample stands at each position about equally often.
    #[test]
    fn draws_are_fair() {
        let (len, seeds) = (6, 6000);
        let mut counts = vec![0_i32; len * len];
        for seed in 0..seeds {
            order(seed, 0, len, len).into_iter().enumerate().for_each(|(at, sample)| counts[at * len + sample] += 1);
        }
        assert!(counts.iter().all(|count| (count - 1000).abs() < 130), "{counts:?}");
    }
}
