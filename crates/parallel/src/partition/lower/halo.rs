//! What windows reach beyond the slices of planes that a rank has.

use super::{For, Lowering};
use crate::partition::cut::Cut;
use crate::partition::plan::{Halo, Need};
use kolo_graph::ValueId;
use kolo_graph::collective::AxisHalo;
use kolo_ops::slice::Slice;
use std::ops::Range;

impl Lowering<'_> {
    /// What this rank's slices reach of a tensor, of which it has its part of a cut, or all. What others have of it is not worth
    /// its memory until the backward pass: a halo is exchanged again there.
    pub(super) fn widen(&mut self, here: ValueId, cut: Option<&Cut>, halo: &Halo, who: &For) -> ValueId {
        let wanted = halo.range(&self.own);
        let Some(cut) = cut.filter(|_| !self.is_alone()) else {
            return self.run_of(here, halo.dim, 0, wanted, who);
        };
        let ranks = 0..self.group.ranks;
        let slices = |rank: usize| self.group.slices(rank, self.plan.slices);
        let is_inside = |rank: usize| {
            let (own, wanted) = (cut.range(&slices(rank)), halo.range(&slices(rank)));
            own.start <= wanted.start && wanted.end <= own.end
        };
        if ranks.clone().all(is_inside) {
            let start = cut.range(&self.own).start;
            return self.run_of(here, halo.dim, start, wanted, who);
        }
        let bounds = ranks.clone().map(|rank| cut.range(&slices(rank)).start).chain([cut.block()]).collect();
        let ranges = ranks.flat_map(|rank| [halo.range(&slices(rank)).start, halo.range(&slices(rank)).end]).collect();
        let (axis, rank) = (self.group.axis.clone(), self.group.rank);
        self.push(AxisHalo { axis, dim: halo.dim, rank, bounds, ranges }, vec![here], who)
    }

    /// What one slice reaches.
    pub(super) fn fetch_reached(&mut self, id: ValueId, halo: &Halo, slice: usize, who: &For) -> ValueId {
        let need = Need::Halo(halo.clone());
        let (here, start) = match self.is_alone() {
            true => (self.rebuild.get(id), 0),
            false => (self.fetch(id, &need, who), halo.range(&self.own).start),
        };
        let (slices, range) = (slice..slice + 1, halo.ranges[slice].clone());
        self.cached(id, &need, slices, Some(who.stage), |this| this.run_of(here, halo.dim, start, range, who))
    }

    /// A run of places of a tensor that begins with place `start`.
    fn run_of(&mut self, id: ValueId, dim: usize, start: usize, run: Range<usize>, who: &For) -> ValueId {
        if self.ty(id).shape[dim] == run.len() {
            return id;
        }
        self.push(Slice { dim, start: run.start - start, len: run.len() }, vec![id], who)
    }
}
