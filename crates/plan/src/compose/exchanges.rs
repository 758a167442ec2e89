//! What data ranks exchange: sums of gradients, and shares of weights under ZeRO; and weights that two stages read.

use super::{Composition, UnitTimes, hide};
use crate::anatomy::Unit;
use crate::collective::{self, Algorithm, CollectiveKind};
use crate::step_model::{PlannedBucket, PlannedExchange, StageModel};
use kolo_parallel::axes::PIPELINE;
use kolo_parallel::mesh::DATA;

/// Multiprocessors that NCCL's kernels of a gather or a scatter take: one block for each of its channels, of which it opens 16 to 24
/// between GPUs that NVSwitch joins.
const COLLECTIVE_UNITS: f64 = 16.0;
/// Cycles from the moment a gradient is ready until its exchange begins, on average.
const CYCLES_WAITED: f64 = 1.5;

impl Composition<'_> {
    /// An exchange along the data axis.
    fn of_data(&self, kind: CollectiveKind, bytes: f64) -> PlannedExchange {
        let seconds = collective::seconds(kind, self.layout.algorithm, bytes, &self.data_span);
        PlannedExchange { axis: DATA.into(), kind, bytes, times: 1.0, seconds, exposed: seconds }
    }

    /// A gathered weight is as wide as products read it.
    fn weight_bytes(&self, parameters: f64) -> f64 {
        parameters * self.layout.precision.bytes() as f64
    }

    fn gradient_bytes(&self, parameters: f64) -> f64 {
        parameters * self.cluster.system.gradient_bytes as f64
    }

    /// A unit whose weights are gathered for each of its passes, while the unit before it computes, and whose gradients are
    /// scattered while the next one computes.
    pub(super) fn add_gathers(&self, unit: &Unit, times: &mut UnitTimes) {
        let read = unit.parameters + unit.borrowed;
        let gather = || vec![self.of_data(CollectiveKind::AllGather, self.weight_bytes(read))];
        let mut forward = gather();
        let mut backward = gather();
        backward.push(self.of_data(CollectiveKind::ReduceScatter, self.gradient_bytes(unit.parameters)));
        if self.cluster.system.overlaps_gathers {
            self.hide_gathers(&mut forward, times.forward.compute.seconds());
            self.hide_gathers(&mut backward, times.input.compute.seconds() + times.weight.compute.seconds());
            times.forward.compute.overhead += self.slowed_by(&forward);
            times.input.compute.overhead += self.slowed_by(&backward);
        }
        times.forward.exchanges.extend(forward);
        times.input.exchanges.extend(backward);
    }

    /// Takes so many seconds of computing from what gathers and scatters wait; between hosts, a share of them.
    fn hide_gathers(&self, exchanges: &mut Vec<PlannedExchange>, computing: f64) {
        let share = self.cluster.system.overlap_share;
        if share == 1.0 || self.data_span.iter().all(|level| level.level == 0) {
            return hide(exchanges, computing);
        }
        let all: f64 = exchanges.iter().map(|one| one.seconds).sum();
        let hidden = share * (computing / all.max(f64::MIN_POSITIVE)).min(1.0);
        // The part that nothing delays is an exchange of its own, and so is the rest, which is waited for.
        let part = |one: &PlannedExchange, part: f64, exposed: f64| PlannedExchange {
            bytes: one.bytes * part,
            seconds: one.seconds * part,
            exposed: one.seconds * part * exposed,
            ..one.clone()
        };
        *exchanges = exchanges.iter().flat_map(|one| [part(one, hidden, 0.0), part(one, 1.0 - hidden, 1.0)]).collect();
        exchanges.retain(|one| one.seconds > 0.0);
    }

    /// Seconds that computing loses to exchanges that it hides: their kernels keep multiprocessors busy until the last byte is there.
    fn slowed_by(&self, exchanges: &[PlannedExchange]) -> f64 {
        let units = self.cluster.device.units as f64;
        let hidden: f64 = exchanges.iter().map(|one| one.seconds - one.exposed).sum();
        if units > COLLECTIVE_UNITS { hidden * COLLECTIVE_UNITS / units } else { 0.0 }
    }

    /// A unit whose weights come from the host for each of its passes, while the unit before it computes: what takes longer than a pass
    /// is waited for.
    pub(super) fn add_fetches(&self, unit: &Unit, times: &mut UnitTimes) {
        let copies = self.weight_bytes(unit.parameters + unit.borrowed) / self.cluster.device.host_bandwidth;
        times.forward.compute.stream += (copies - times.forward.compute.seconds()).max(0.0);
        let backward = times.input.compute.seconds() + times.weight.compute.seconds();
        times.input.compute.stream += (copies - backward).max(0.0);
    }

    /// Once before the first micro-batch: weights of a pipeline's rank that lie in shares, and weights of another stage.
    pub(super) fn before(&self, own: &[usize], stages: &[StageModel]) -> Vec<PlannedExchange> {
        let mut all = Vec::new();
        let data = self.layout.size(DATA);
        if self.gathers_each_use() {
            // The first unit's weights are waited for.
            let first = self.units_of(own[0]).next().map_or(0.0, |(_, unit)| unit.parameters);
            all.push(self.of_data(CollectiveKind::AllGather, self.weight_bytes(first)));
        } else if self.layout.zero == 3 && data > 1 {
            let parameters: f64 =
                own.iter().flat_map(|stage| self.units_of(*stage)).map(|(_, unit)| unit.parameters).sum();
            let mut gather = [self.of_data(CollectiveKind::AllGather, self.weight_bytes(parameters))];
            if self.cluster.system.overlaps_gathers {
                hide(&mut gather, own.iter().map(|stage| stages[*stage].forward.compute.seconds()).sum());
            }
            all.extend(gather);
        }
        let borrowed = self.borrowed(own);
        if borrowed > 0.0 {
            let (bytes, span) = (self.weight_bytes(borrowed), self.span(PIPELINE));
            let seconds = collective::seconds(CollectiveKind::Send, Algorithm::Fastest, bytes, &span);
            all.push(PlannedExchange {
                axis: PIPELINE.into(),
                kind: CollectiveKind::Send,
                bytes,
                times: 1.0,
                seconds,
                exposed: seconds,
            });
        }
        all
    }

    /// Parameters that a place of the pipeline reads and another one keeps: those of the first stage that later ones read, and
    /// those of the stage that it runs for the other direction.
    fn borrowed(&self, own: &[usize]) -> f64 {
        self.tied(own) + self.mirrored(own)
    }

    /// Parameters that a place of the pipeline reads and the first one keeps.
    fn tied(&self, own: &[usize]) -> f64 {
        match own.contains(&0) {
            true => 0.0,
            false => own.iter().flat_map(|stage| self.units_of(*stage)).map(|(_, unit)| unit.borrowed).sum(),
        }
    }

    /// Parameters of the stage that a place runs for micro-batches that enter at the other end.
    pub(super) fn mirrored(&self, own: &[usize]) -> f64 {
        match (self.layout.schedule.as_str(), own) {
            ("bidirectional", [stage]) if self.stages.len() > 1 => self.parameters(&[self.stages.len() - 1 - stage]),
            _ => 0.0,
        }
    }

    /// Gradients in the order in which the last backward pass makes them.
    pub(super) fn buckets(&self, own: &[usize]) -> Vec<PlannedBucket> {
        let mut buckets = Vec::new();
        let mut left: f64 =
            own.iter().flat_map(|stage| self.units_of(*stage)).map(|(at, _)| self.times[at].backward()).sum();
        self.add_borrowed(own, left, &mut buckets);
        if self.layout.size(DATA) == 1 || self.gathers_each_use() {
            return buckets;
        }
        let kind = if self.layout.zero > 0 { CollectiveKind::ReduceScatter } else { CollectiveKind::AllReduce };
        let others = self.layout.micro_batches.saturating_sub(1) as f64;
        if self.layout.zero == 2 && others > 0.0 {
            // Gradients of every micro-batch are scattered; those of all but the last in front of its own.
            let PlannedExchange { bytes, seconds, .. } = self.of_data(kind, self.gradient_bytes(self.parameters(own)));
            let (bytes, seconds, ready_before_end) = (bytes * others, seconds * others, left * others);
            buckets.push(PlannedBucket { kind, axis: DATA.into(), bytes, seconds, ready_before_end });
        }
        let mut waiting = 0.0;
        let mut close = |waiting: &mut f64, ready_before_end: f64| {
            let PlannedExchange { bytes, seconds, .. } = self.of_data(kind, *waiting);
            buckets.push(PlannedBucket { kind, axis: DATA.into(), bytes, seconds, ready_before_end });
            *waiting = 0.0;
        };
        for (at, unit) in own.iter().rev().flat_map(|stage| self.units_of(*stage).rev()) {
            left -= self.times[at].backward();
            waiting += self.gradient_bytes(unit.parameters);
            if waiting >= self.cluster.system.bucket_bytes {
                close(&mut waiting, left.max(0.0));
            }
        }
        if waiting > 0.0 {
            close(&mut waiting, 0.0);
        }
        // The last one is noticed half a cycle after it is ready, and agreed on a cycle later. Those before it are behind each other.
        if let Some(last) = buckets.last_mut().filter(|last| last.axis == DATA) {
            last.seconds += CYCLES_WAITED * self.cluster.system.cycle_seconds;
        }
        buckets
    }

    /// Gradients of weights that another stage keeps. Those of tied weights are added up there, micro-batch by micro-batch: all but
    /// the last's travel one behind the other from the end of the first micro-batch on.
    fn add_borrowed(&self, own: &[usize], backward: f64, buckets: &mut Vec<PlannedBucket>) {
        let span = self.span(PIPELINE);
        let others = match self.cluster.system.sums_tied_once {
            true => 0.0,
            false => self.layout.micro_batches.saturating_sub(1) as f64,
        };
        let tied = self.tied(own);
        for (parameters, times, ready_before_end) in
            [(tied, others, others * backward), (tied + self.mirrored(own), 1.0, 0.0)]
        {
            let bytes = self.gradient_bytes(parameters);
            let seconds = times * collective::seconds(CollectiveKind::Send, Algorithm::Fastest, bytes, &span);
            let (kind, axis, bytes) = (CollectiveKind::Send, PIPELINE.into(), bytes * times);
            if bytes > 0.0 {
                buckets.push(PlannedBucket { kind, axis, bytes, seconds, ready_before_end });
            }
        }
    }

    /// New weights of other ranks' shares.
    pub(super) fn after(&self, parameters: f64, own: &[usize], stages: &[StageModel]) -> Vec<PlannedExchange> {
        if !matches!(self.layout.zero, 1 | 2) || self.layout.size(DATA) == 1 {
            return Vec::new();
        }
        let mut gather = vec![self.of_data(CollectiveKind::AllGather, self.weight_bytes(parameters))];
        if self.cluster.system.overlaps_updates {
            hide(&mut gather, own.iter().map(|stage| stages[*stage].forward.compute.seconds()).sum());
        }
        gather
    }
}
