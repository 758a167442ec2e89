//! Layouts near one that does not fit into memory, which do.

use super::LayoutModels;
use super::candidate::Candidate;
use super::changes::difference;
use super::rank::{Limits, search};
use super::space::SearchSpace;
use crate::cluster::Cluster;

/// A layout that fits, and how it differs.
#[derive(Clone, Debug, PartialEq)]
pub struct FittingLayout {
    pub candidate: Candidate,
    /// Keys to set, as `--set` takes them.
    pub set: Vec<String>,
    pub seconds: f64,
    /// Bytes of the rank that holds the most.
    pub bytes: f64,
}

/// Layouts that are named.
const NAMED_MAX: usize = 3;

/// The fastest layouts that fit, those whose ranks stand as they do now before all others.
pub fn layouts_that_fit(
    now: &Candidate,
    space: &SearchSpace,
    models: &dyn LayoutModels,
    cluster: &Cluster,
    limits: &Limits,
) -> Vec<FittingLayout> {
    let limits = Limits { ranked: None, cost: None, deadline: None, ..*limits };
    let all = space.candidates().into_iter().map(|one| Candidate { slices: now.slices, ..one });
    let mesh = |one: &Candidate| (one.data, one.pipeline, one.tensor, one.tokens, one.sequence);
    let (same, others): (Vec<Candidate>, Vec<Candidate>) = all.partition(|one| mesh(one) == mesh(now));
    let near = search(&same, models, cluster, &limits).ranked;
    let found = if near.is_empty() { search(&others, models, cluster, &limits).ranked } else { near };
    let named = found.into_iter().take(NAMED_MAX).map(|one| {
        let (_, set) = difference(now, &one.candidate);
        FittingLayout { set, seconds: one.seconds, bytes: one.memory.total(), candidate: one.candidate }
    });
    named.collect()
}
