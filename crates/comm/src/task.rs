//! One collective call with its buffers, as a transport sees it.

use crate::call::{CallKind, Fingerprint};

/// A run of elements that belongs to one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankPart {
    pub offset: usize,
    pub count: usize,
}

/// Equal parts one behind the other; the first ranks take one more if it does not come out even.
pub fn even_parts(count: usize, ranks: usize) -> Vec<RankPart> {
    let (each, more) = (count / ranks, count % ranks);
    let mut offset = 0;
    (0..ranks)
        .map(|rank| {
            let count = each + usize::from(rank < more);
            offset += count;
            RankPart { offset: offset - count, count }
        })
        .collect()
}

/// Parts of these counts, one behind the other.
pub fn packed_parts(counts: &[usize]) -> Vec<RankPart> {
    let mut offset = 0;
    let place = |count: &usize| {
        let part = RankPart { offset, count: *count };
        offset = offset.saturating_add(*count);
        part
    };
    counts.iter().map(place).collect()
}

/// A call with its buffers. Offsets and counts are in elements of `fingerprint.element`.
///
/// | kind | input | output | parts |
/// |---|---|---|---|
/// | barrier | – | – | – |
/// | broadcast | – | `count`, filled at the root | – |
/// | reduce | `count` | `count` at the root | – |
/// | all_reduce, scan, exclusive_scan | `count` | `count` | – |
/// | reduce_scatter | the whole | own part | `recv`: each rank's part of the input |
/// | gather | own part | the whole, at the root | `recv`: each rank's part of the output |
/// | all_gather | own part | the whole | `recv`: each rank's part of the output |
/// | scatter | the whole, at the root | own part | `recv`: each rank's part of the input |
/// | all_to_all | the whole | the whole | `send`: of the input, to each rank; `recv`: of the output, from each rank |
/// | send | `count` | – | `peer` |
/// | recv | – | `count` | `peer` |
///
/// `input` may be `output` (reduce, all_reduce, scans), or its own part of it (reduce_scatter, all_gather, gather,
/// scatter): the call is then in place.
#[derive(Clone, Copy, Debug)]
pub struct CollectiveTask<'a> {
    pub fingerprint: Fingerprint,
    pub input: *const u8,
    pub output: *mut u8,
    /// Bytes that `input` and `output` may touch.
    pub input_bytes: usize,
    pub output_bytes: usize,
    pub send: &'a [RankPart],
    pub recv: &'a [RankPart],
    /// The other end of a message.
    pub peer: usize,
    /// Only the fixed order of additions gives the promised bits; without the promise, any algorithm or native engine may
    /// run.
    pub reproducible: bool,
}

impl CollectiveTask<'_> {
    pub fn kind(&self) -> CallKind {
        self.fingerprint.kind
    }

    /// Bytes of one element.
    pub fn width(&self) -> usize {
        self.fingerprint.element.bytes()
    }

    pub fn root(&self) -> usize {
        self.fingerprint.root as usize
    }

    pub fn count(&self) -> usize {
        self.fingerprint.count as usize
    }
}
