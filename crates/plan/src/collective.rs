//! How long collectives take, by algorithm and level, from latencies and bandwidths or from what was measured.
//!
//! With P ranks at one level of latency α and bandwidth β, and a tensor of S bytes, an all-reduce takes
//!
//! | algorithm | seconds |
//! |---|---|
//! | direct exchange | 2 α + 2 (P−1)/P · S/β: two rounds, all messages of a round at once |
//! | ring | 2 (P−1) (α + S/(P β)) |
//! | tree | 2 ⌈lg P⌉ (α + S/β) |
//! | halving-doubling | 2 ⌈lg P⌉ α + 2 (P−1)/P · S/β |
//!
//! and a reduce-scatter or an all-gather half of it. On several levels a ring enters and leaves each member of a level once,
//! whatever number of ranks is inside; a direct exchange and halving-doubling send from every rank to ranks outside; the
//! hierarchical algorithm scatters inside, exchanges parts outside, and gathers inside.

use crate::cluster::LevelUse;

/// What is exchanged. Bytes are those of the whole tensor: the sum, what is gathered, what is scattered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CollectiveKind {
    AllReduce,
    AllGather,
    ReduceScatter,
    /// Each rank's own tensor has these bytes; it keeps 1/P and sends the rest.
    AllToAll,
    /// From one rank to another.
    Send,
}

impl CollectiveKind {
    pub const ALL: [CollectiveKind; 5] = [
        CollectiveKind::AllReduce,
        CollectiveKind::AllGather,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllToAll,
        CollectiveKind::Send,
    ];

    pub fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllReduce => "all_reduce",
            CollectiveKind::AllGather => "all_gather",
            CollectiveKind::ReduceScatter => "reduce_scatter",
            CollectiveKind::AllToAll => "all_to_all",
            CollectiveKind::Send => "send",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Phases of an all-reduce that it has: to scatter, to gather.
    fn phases(self) -> f64 {
        if self == CollectiveKind::AllReduce { 2.0 } else { 1.0 }
    }
}

/// How a collective is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Algorithm {
    /// Everybody sends to everybody: kolo's, whose sums do not depend on the number of ranks.
    Direct,
    Ring,
    Tree,
    HalvingDoubling,
    Hierarchical,
    /// Whichever is the fastest, as libraries choose.
    #[default]
    Fastest,
}

impl Algorithm {
    pub const ALL: [Algorithm; 6] = [
        Algorithm::Fastest,
        Algorithm::Direct,
        Algorithm::Ring,
        Algorithm::Tree,
        Algorithm::HalvingDoubling,
        Algorithm::Hierarchical,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Direct => "direct",
            Algorithm::Ring => "ring",
            Algorithm::Tree => "tree",
            Algorithm::HalvingDoubling => "halving-doubling",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::Fastest => "fastest",
        }
    }
}

/// Seconds of a collective of `bytes` among the ranks of a [span](crate::cluster::Cluster::span).
pub fn seconds(kind: CollectiveKind, algorithm: Algorithm, bytes: f64, span: &[LevelUse]) -> f64 {
    if span.is_empty() {
        return 0.0;
    }
    if let Some(seconds) = measured(kind, bytes, span) {
        return seconds;
    }
    match kind {
        CollectiveKind::Send => send(bytes, span),
        CollectiveKind::AllToAll => all_to_all(bytes, span),
        _ => match algorithm {
            Algorithm::Direct => direct(kind, bytes, span),
            Algorithm::Ring => ring(kind, bytes, span),
            Algorithm::Tree => tree(kind, bytes, span),
            Algorithm::HalvingDoubling => halving(kind, bytes, span),
            Algorithm::Hierarchical => hierarchical(kind, bytes, span),
            Algorithm::Fastest => [ring, tree, hierarchical]
                .into_iter()
                .map(|algorithm| algorithm(kind, bytes, span))
                .fold(f64::INFINITY, f64::min),
        },
    }
}

/// What was measured on the link of a span of one level, among as many ranks.
fn measured(kind: CollectiveKind, bytes: f64, span: &[LevelUse]) -> Option<f64> {
    let [level] = span else { return None };
    // A message goes from one rank to one other, however many there are.
    let among = |ranks: usize| kind == CollectiveKind::Send || ranks == level.ranks;
    let table = level.link.measured.iter().find(|one| one.kind == kind && among(one.ranks))?;
    Some(table.seconds(bytes))
}

/// A message over the outermost level of a span.
fn send(bytes: f64, span: &[LevelUse]) -> f64 {
    span.last().map_or(0.0, |level| level.latency + bytes / level.bandwidth)
}

fn ranks_of(span: &[LevelUse]) -> f64 {
    span.first().map_or(1.0, |level| level.members as f64)
}

fn all_to_all(bytes: f64, span: &[LevelUse]) -> f64 {
    let all = ranks_of(span);
    let latency = span.iter().map(|level| level.latency).fold(0.0, f64::max);
    latency + span.iter().map(|level| leaving(level, all) * bytes / level.bandwidth).fold(0.0, f64::max)
}

/// The share of every rank's tensor, times its ranks, that leaves a member of a level for other members of it and beyond.
fn leaving(level: &LevelUse, all: f64) -> f64 {
    level.inside as f64 * (1.0 - level.inside as f64 / all)
}

fn direct(kind: CollectiveKind, bytes: f64, span: &[LevelUse]) -> f64 {
    let all = ranks_of(span);
    let latency = span.iter().map(|level| level.latency).fold(0.0, f64::max);
    let transfer = span.iter().map(|level| leaving(level, all) * bytes / level.bandwidth).fold(0.0, f64::max);
    kind.phases() * (latency + transfer)
}

fn ring(kind: CollectiveKind, bytes: f64, span: &[LevelUse]) -> f64 {
    let all = ranks_of(span);
    // Of the steps, those that cross a level are as many as it has members; the last one of each closes the circle.
    let mut outside = 1.0;
    let mut latency = 0.0;
    for level in span.iter().rev() {
        latency += (level.members as f64 - outside) * level.latency;
        outside = level.members as f64;
    }
    let slowest = span.iter().map(|level| level.bandwidth).fold(f64::INFINITY, f64::min);
    kind.phases() * (latency + (all - 1.0) / all * bytes / slowest)
}

fn tree(kind: CollectiveKind, bytes: f64, span: &[LevelUse]) -> f64 {
    let hop = |level: &LevelUse| (level.ranks as f64).log2().ceil() * (level.latency + bytes / level.bandwidth);
    kind.phases() * span.iter().map(hop).sum::<f64>()
}

fn halving(kind: CollectiveKind, bytes: f64, span: &[LevelUse]) -> f64 {
    // The farthest exchange comes first, of the whole tensor.
    let (mut left, mut seconds) = (bytes, 0.0);
    for level in span.iter().rev() {
        let ranks = level.ranks as f64;
        let sent = level.inside as f64 * left * (ranks - 1.0) / ranks;
        seconds += ranks.log2().ceil() * level.latency + sent / level.bandwidth;
        left /= ranks;
    }
    kind.phases() * seconds
}

fn hierarchical(kind: CollectiveKind, bytes: f64, span: &[LevelUse]) -> f64 {
    let (mut left, mut seconds) = (bytes, 0.0);
    for level in span {
        let ranks = level.ranks as f64;
        // All ranks inside a member exchange their parts with their like at the same time.
        let sent = level.inside as f64 * left * (ranks - 1.0) / ranks;
        seconds += (ranks - 1.0) * level.latency + sent / level.bandwidth;
        left /= ranks;
    }
    kind.phases() * seconds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::{Link, Measured};

    fn level(ranks: usize, inside: usize, latency: f64, bandwidth: f64) -> LevelUse {
        let link = Link { name: "test".into(), bandwidth, share: 1.0, latency, measured: Vec::new() };
        LevelUse { level: 0, members: ranks, ranks, inside, latency, bandwidth, link }
    }

    #[test]
    fn one_level_is_the_textbooks() {
        let (ranks, alpha, beta, bytes) = (8.0, 5e-6, 1e10, 1e8);
        let span = [level(8, 1, alpha, beta)];
        let all_reduce = |algorithm| seconds(CollectiveKind::AllReduce, algorithm, bytes, &span);
        let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-12, "{a} {b}");
        close(all_reduce(Algorithm::Ring), 2.0 * (ranks - 1.0) * (alpha + bytes / ranks / beta));
        close(all_reduce(Algorithm::Tree), 6.0 * (alpha + bytes / beta));
        close(all_reduce(Algorithm::Direct), 2.0 * alpha + 2.0 * 7.0 / 8.0 * bytes / beta);
        close(all_reduce(Algorithm::HalvingDoubling), 6.0 * alpha + 2.0 * 7.0 / 8.0 * bytes / beta);
        close(all_reduce(Algorithm::Hierarchical), all_reduce(Algorithm::Ring));
        close(seconds(CollectiveKind::AllGather, Algorithm::Ring, bytes, &span), all_reduce(Algorithm::Ring) / 2.0);
        close(seconds(CollectiveKind::Send, Algorithm::Ring, bytes, &span), alpha + bytes / beta);
    }

    /// Four devices behind one card: what a ring sends over it once, a direct exchange sends four times.
    #[test]
    fn levels_are_crossed_as_often_as_the_algorithm_does() {
        let span = [LevelUse { members: 64, ..level(4, 1, 0.0, 1e11) }, level(16, 4, 0.0, 1e9)];
        let all_reduce = |algorithm| seconds(CollectiveKind::AllReduce, algorithm, 1e9, &span);
        let ring = all_reduce(Algorithm::Ring);
        assert!((ring / (2.0 * 63.0 / 64.0) - 1.0).abs() < 1e-9, "{ring}");
        assert!((all_reduce(Algorithm::Direct) / (2.0 * 4.0 * 15.0 / 16.0) - 1.0).abs() < 1e-9);
        let hierarchical = all_reduce(Algorithm::Hierarchical);
        assert!((hierarchical / (2.0 * (0.0075 + 15.0 / 16.0)) - 1.0).abs() < 1e-9, "{hierarchical}");
        assert!(all_reduce(Algorithm::Fastest) <= hierarchical.min(ring));
    }

    #[test]
    fn what_was_measured_counts() {
        let mut span = vec![level(2, 1, 1e-6, 1e9)];
        let points = vec![(1e3, 1e-5), (1e5, 1e-4), (1e7, 1e-2)];
        span[0].link.measured = vec![Measured { kind: CollectiveKind::AllReduce, ranks: 2, points }];
        let at = |bytes| seconds(CollectiveKind::AllReduce, Algorithm::Ring, bytes, &span);
        let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-9, "{a} {b}");
        close(at(10.0), 1e-5);
        close(at(1e4), 1e-5 * 10f64.sqrt());
        close(at(2e7), 2e-2);
        (span[0].ranks, span[0].members) = (4, 4);
        assert!((seconds(CollectiveKind::AllReduce, Algorithm::Ring, 1e4, &span) - (6e-6 + 1.5e-5)).abs() < 1e-9);
    }
}
