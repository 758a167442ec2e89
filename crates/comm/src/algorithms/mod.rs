//! Collectives as programs. An algorithm is a pure function from a [`CallShape`] to this rank's [`CollectiveProgram`]; all ranks that run
//! the same algorithm on the same plan fit together.
//!
//! Costs are formulas in the number of ranks and the size of the vector, written down in `docs/collectives.md`; the tests
//! walk the programs of all ranks and find the same numbers, and no schedule in which they wait for each other for ever.

mod binomial;
mod builder;
mod direct;
mod halving_doubling;
mod hierarchical;
mod ring;
#[cfg(test)]
mod walk;

use crate::call::CallKind;
use crate::program::{BufferRange, CollectiveProgram, Region};
use crate::task::{RankPart, even_parts};
use builder::{ProgramBuilder, range};

/// What a program depends on. Counts and offsets are in elements.
#[derive(Clone, Copy, Debug)]
pub struct CallShape<'a> {
    pub kind: CallKind,
    pub rank: usize,
    pub size: usize,
    pub root: usize,
    pub count: usize,
    /// The reduction ends with a division.
    pub mean: bool,
    /// Input and output are one memory, as [`crate::task::CollectiveTask`] allows.
    pub in_place: bool,
    pub send: &'a [RankPart],
    pub recv: &'a [RankPart],
    /// The other end of a message.
    pub peer: usize,
    /// Each rank's host.
    pub hosts: &'a [usize],
    /// Elements of one message at most.
    pub segment: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    Exchange,
    Direct,
    Ring,
    Doubling,
    HalvingDoubling,
    Binomial,
    Hierarchical,
}

/// What an algorithm costs the busiest rank if parts are even. Counts are in elements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AlgorithmCost {
    /// Messages one behind the other on the longest way.
    pub rounds: f64,
    /// Messages sent by one rank, before they are cut to segments.
    pub messages: f64,
    pub sent: f64,
    pub combined: f64,
    /// Of all that the ranks of one host send, what leaves the host.
    pub leaving: f64,
}

impl Algorithm {
    pub const ALL: [Algorithm; 7] = [
        Algorithm::Exchange,
        Algorithm::Direct,
        Algorithm::Ring,
        Algorithm::Doubling,
        Algorithm::HalvingDoubling,
        Algorithm::Binomial,
        Algorithm::Hierarchical,
    ];

    pub fn name(self) -> &'static str {
        ["exchange", "direct", "ring", "doubling", "halving_doubling", "binomial", "hierarchical"][self as usize]
    }

    /// Whether it can do this kind of call with this number of ranks.
    pub fn applies(self, kind: CallKind, size: usize) -> bool {
        use CallKind::*;
        match self {
            Algorithm::Exchange => kind == AllReduce,
            Algorithm::Direct => !matches!(kind, Barrier | Scan | ExclusiveScan),
            Algorithm::Ring => matches!(kind, AllReduce | ReduceScatter | AllGather),
            Algorithm::Doubling => {
                matches!(kind, Barrier | AllReduce | Scan | ExclusiveScan)
                    || kind == AllGather && size.is_power_of_two()
            }
            Algorithm::HalvingDoubling => kind == AllReduce || kind == ReduceScatter && size.is_power_of_two(),
            Algorithm::Binomial => matches!(kind, Broadcast | Reduce | AllReduce | Gather | Scatter),
            Algorithm::Hierarchical => matches!(kind, AllReduce | Broadcast),
        }
    }

    /// Whether it combines in tree order over ranks, which gives the promised bits.
    pub fn keeps_order(self, kind: CallKind, hosts: &[usize]) -> bool {
        if !matches!(kind, CallKind::AllReduce | CallKind::ReduceScatter) {
            return true;
        }
        match self {
            Algorithm::Ring => hosts.len() == 1,
            Algorithm::HalvingDoubling => hosts.len().is_power_of_two(),
            Algorithm::Hierarchical => hierarchical::keeps_order(hosts),
            _ => true,
        }
    }

    /// This rank's program. The algorithm must apply.
    pub fn program(self, shape: &CallShape<'_>) -> CollectiveProgram {
        let mut builder = ProgramBuilder::new(shape);
        match self {
            Algorithm::Exchange => direct::exchange(&mut builder, shape),
            Algorithm::Direct => direct::write(&mut builder, shape),
            Algorithm::Ring => ring::write(&mut builder, shape),
            Algorithm::Doubling => halving_doubling::doubling(&mut builder, shape),
            Algorithm::HalvingDoubling => halving_doubling::write(&mut builder, shape),
            Algorithm::Binomial => binomial::write(&mut builder, shape),
            Algorithm::Hierarchical => hierarchical::write(&mut builder, shape),
        }
        builder.finish()
    }

    /// What it costs; 0 for one rank.
    pub fn cost(self, shape: &CallShape<'_>) -> AlgorithmCost {
        if shape.size == 1 {
            return AlgorithmCost::default();
        }
        match self {
            Algorithm::Exchange => direct::exchange_cost(shape),
            Algorithm::Direct => direct::cost(shape),
            Algorithm::Ring => ring::cost(shape),
            Algorithm::Doubling => halving_doubling::doubling_cost(shape),
            Algorithm::HalvingDoubling => halving_doubling::cost(shape),
            Algorithm::Binomial => binomial::cost(shape),
            Algorithm::Hierarchical => hierarchical::cost(shape),
        }
    }
}

/// Ranks among which a part of an algorithm runs, in order, this rank among them.
#[derive(Clone, Debug)]
struct RankGroup {
    ranks: Vec<usize>,
    me: usize,
}

impl RankGroup {
    fn all(shape: &CallShape<'_>) -> Self {
        Self { ranks: (0..shape.size).collect(), me: shape.rank }
    }

    fn len(&self) -> usize {
        self.ranks.len()
    }

    /// The others' numbers in the group, from the next one round: so not all send to the same one first.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, len) = (self.me, self.len());
        (1..len).map(move |step| (me + step) % len)
    }
}

impl CallShape<'_> {
    fn input(&self) -> BufferRange {
        range(Region::Input, RankPart { offset: 0, count: self.count })
    }

    fn output(&self) -> BufferRange {
        range(Region::Output, RankPart { offset: 0, count: self.count })
    }

    /// An equal part of a place for each of `ranks`.
    fn even(whole: BufferRange, ranks: usize) -> Vec<BufferRange> {
        let part = |part: &RankPart| BufferRange { offset: whole.offset + part.offset, count: part.count, ..whole };
        even_parts(whole.count, ranks).iter().map(part).collect()
    }

    /// The parts of all ranks in a region.
    fn parts(&self, region: Region) -> Vec<BufferRange> {
        self.recv.iter().map(|part| range(region, *part)).collect()
    }

    /// This rank's part in a buffer that holds nothing else.
    fn own(&self, region: Region) -> BufferRange {
        BufferRange { region, offset: 0, count: self.recv[self.rank].count }
    }

    /// Ranks and elements as numbers for formulas.
    fn numbers(&self) -> (f64, f64) {
        (self.size as f64, self.count as f64)
    }

    /// Ranks of the fullest host, and whether there is more than one host.
    fn per_host(&self) -> (f64, bool) {
        let most = self.hosts.iter().map(|host| self.hosts.iter().filter(|other| *other == host).count()).max();
        let most = most.unwrap_or(self.size);
        (most as f64, most < self.size)
    }

    /// Of what each rank sends evenly to all others, what leaves the fullest host.
    fn leaving_evenly(&self, sent: f64) -> f64 {
        let (ranks, _) = self.numbers();
        let (local, _) = self.per_host();
        sent * local * (ranks - local) / (ranks - 1.0)
    }

    /// If `crossing` ranks of a host send all they send to other hosts.
    fn leaving_by(&self, crossing: f64, sent: f64) -> f64 {
        if self.per_host().1 { sent * crossing } else { 0.0 }
    }
}
