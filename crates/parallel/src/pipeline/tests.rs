//! Families against their formulas, verdicts of the verifier against runs on symbolic values, texts and pictures.

mod documents;
mod families;
mod mutations;
mod oracle;
mod text;
mod verdicts;

use super::*;
use kolo_graph::rng::Stream;

pub fn build(name: &str, ranks: usize, micro_batches: usize, chunks: usize) -> PipelineSchedule {
    let sizes = Sizes { ranks, micro_batches, chunks };
    family(name).unwrap().schedule(sizes).unwrap_or_else(|error| panic!("{name} {sizes:?}: {error}"))
}

/// All families in all small sizes that they accept.
pub fn all_small(
    ranks_max: usize,
    micro_batches_max: usize,
    chunks_max: usize,
) -> Vec<(&'static str, Sizes, PipelineSchedule)> {
    let mut all = Vec::new();
    for family in &FAMILIES {
        for ranks in 1..=ranks_max {
            for micro_batches in 1..=micro_batches_max {
                for chunks in 1..=chunks_max {
                    let sizes = Sizes { ranks, micro_batches, chunks };
                    all.extend(family.schedule(sizes).ok().map(|schedule| (family.name, sizes, schedule)));
                }
            }
        }
    }
    all
}

/// Random numbers, one after another.
pub struct Random {
    stream: Stream,
    row: u64,
    drawn: u64,
}

impl Random {
    pub fn new(name: &str, row: u64) -> Self {
        Self { stream: Stream::new(1, name), row, drawn: 0 }
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.drawn += 1;
        self.stream.below(self.row, self.drawn, bound.max(1) as u64) as usize
    }
}
