//! How long a step takes, and where its time goes, by arithmetic: the simulator plays the same model event by event.

use crate::schedule_cache::{ScheduleCache, followed};
use crate::step_model::{RankRole, StageModel, StepModel, StepTimes};
use kolo_parallel::schedules::{Durations, ScheduleError, StageDurations};
use std::collections::BTreeMap;

/// Ends of every rank's last backward pass, and how long the pipeline takes.
struct Pipelined {
    ends: Vec<f64>,
    total: f64,
}

impl StepModel {
    /// How long the actions of each stage take.
    pub fn durations(&self) -> Durations {
        let stages = self.stages.iter().map(|stage| {
            let (input, weight) = (stage.input.seconds(), stage.weight.seconds());
            let transfer = stage.sends[0].seconds.max(stage.sends[1].seconds);
            StageDurations { forward: stage.forward.seconds(), backward: input + weight, input, weight, transfer }
        });
        Durations { stages: stages.collect() }
    }

    /// The step's time and its parts, seen from the rank that works the longest.
    pub fn times(&self) -> Result<StepTimes, ScheduleError> {
        self.times_with(&ScheduleCache::default())
    }

    /// The same, with schedules that are known already.
    pub fn times_with(&self, schedules: &ScheduleCache) -> Result<StepTimes, ScheduleError> {
        let pipelined = self.pipelined(schedules)?;
        let before = self.roles.iter().map(RankRole::before_seconds).fold(0.0, f64::max);
        let tails: Vec<f64> = self.roles.iter().map(|role| self.tail(role)).collect();
        let end = pipelined.ends.iter().zip(&tails).map(|(end, tail)| end + tail).fold(0.0, f64::max);
        let seconds = before + end;
        let busy = |role: &RankRole| self.micro_batch_seconds(role) * self.layout.micro_batches as f64;
        let Some(role) = self.roles.iter().max_by(|a, b| busy(a).total_cmp(&busy(b))) else {
            return Ok(StepTimes::default());
        };
        let mut exposed = self.exposed_in_passes(role);
        for one in role.before.iter().chain(&role.after) {
            *exposed.entry(one.axis.clone()).or_default() += one.exposed;
        }
        let gradients = self.gradients_exposed(role);
        if let Some(bucket) = role.buckets.last() {
            *exposed.entry(bucket.axis.clone()).or_default() += gradients;
        }
        let compute = role.stages.iter().map(|stage| compute_of(&self.stages[*stage])).sum::<f64>();
        let compute = compute * self.layout.micro_batches as f64;
        let update = role.update.seconds();
        let waits: f64 = exposed.values().sum();
        let bubble = (seconds - compute - update - waits).max(0.0);
        let straggling = seconds * (self.layout.straggling(self.jitter) - 1.0);
        let seconds = seconds + straggling;
        let ideal = self.model_flops / (self.peak_flops * self.layout.workers() as f64);
        Ok(StepTimes { seconds, compute, exposed, bubble, update, straggling, utilisation: ideal / seconds })
    }

    fn micro_batch_seconds(&self, role: &RankRole) -> f64 {
        let stages = role.stages.iter().map(|stage| &self.stages[*stage]);
        stages.map(|stage| stage.forward.seconds() + stage.input.seconds() + stage.weight.seconds()).sum()
    }

    fn exposed_in_passes(&self, role: &RankRole) -> BTreeMap<String, f64> {
        let mut exposed: BTreeMap<String, f64> = BTreeMap::new();
        for stage in role.stages.iter().map(|stage| &self.stages[*stage]) {
            for one in [&stage.forward, &stage.input, &stage.weight].into_iter().flat_map(|pass| &pass.exchanges) {
                *exposed.entry(one.axis.clone()).or_default() += one.exposed * self.layout.micro_batches as f64;
            }
        }
        exposed
    }

    /// From the end of a rank's last backward pass to the end of its step.
    pub(crate) fn tail(&self, role: &RankRole) -> f64 {
        let after: f64 = role.after.iter().map(|one| one.exposed).sum();
        self.gradients_exposed(role) + role.update.seconds() + after
    }

    /// Seconds after the last backward pass at which the last bucket is there: they travel one behind the other.
    pub(crate) fn gradients_exposed(&self, role: &RankRole) -> f64 {
        if !self.overlaps_gradients {
            return role.buckets.iter().map(|bucket| bucket.seconds).sum();
        }
        let mut free = f64::NEG_INFINITY;
        for bucket in &role.buckets {
            free = free.max(-bucket.ready_before_end) + bucket.seconds;
        }
        free.max(0.0)
    }

    /// All micro-batches through all stages. Of many, only some are followed: each one more takes as long as the busiest rank
    /// works on it.
    fn pipelined(&self, schedules: &ScheduleCache) -> Result<Pipelined, ScheduleError> {
        let count = self.layout.micro_batches;
        let busiest = self.roles.iter().map(|role| self.micro_batch_seconds(role)).fold(0.0, f64::max);
        let Some(proven) = schedules.proven(&self.layout)? else {
            let total = busiest * count as f64;
            return Ok(Pipelined { ends: vec![total], total });
        };
        let timeline = proven.timeline(&self.durations())?;
        let more = busiest * (count - followed(&self.layout)) as f64;
        let end = |spans: &Vec<(f64, f64)>| spans.last().map_or(0.0, |(_, end)| *end) + more;
        Ok(Pipelined { ends: timeline.spans.iter().map(end).collect(), total: timeline.total + more })
    }

    /// The part of the pipeline's time in which the busiest rank waits for others.
    pub fn bubble_share(&self) -> Result<f64, ScheduleError> {
        let pipelined = self.pipelined(&ScheduleCache::default())?;
        let busy = self.roles.iter().map(|role| self.micro_batch_seconds(role)).fold(0.0, f64::max);
        Ok(1.0 - busy * self.layout.micro_batches as f64 / pipelined.total.max(f64::MIN_POSITIVE))
    }
}

fn compute_of(stage: &StageModel) -> f64 {
    stage.forward.compute.seconds() + stage.input.compute.seconds() + stage.weight.compute.seconds()
}
