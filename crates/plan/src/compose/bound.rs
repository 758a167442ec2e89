//! Bounds from below of a step's time: from the costs of its units alone, and from its stages.

use super::{UnitCosts, UnitTimes, accumulation, hide};
use crate::anatomy::Anatomy;
use crate::cluster::Cluster;
use crate::step_model::{ParallelLayout, RankRole, StageModel, StepModel};
use kolo_parallel::axes::PIPELINE;

/// What has to pass before a rank can start, and after it is done, of the work of the stages before it.
#[derive(Clone, Copy, PartialEq)]
enum Reach {
    /// The first micro-batch comes forward through them, and the last one goes back.
    Both,
    /// Gradients of weights may come after what goes back: only the way forward is sure.
    Forward,
    /// Micro-batches enter at both ends.
    Nothing,
}

impl Reach {
    fn of(schedule: &str) -> Self {
        match schedule {
            "gpipe" | "1f1b" | "interleaved" => Reach::Both,
            "zero-bubble" => Reach::Forward,
            _ => Reach::Nothing,
        }
    }
}

/// What a unit takes of a micro-batch, and how much of it is forward.
struct UnitWork {
    forward: f64,
    all: f64,
}

impl UnitTimes {
    /// With what adding gradients takes, and what that hides. Gathered weights may add to it.
    fn work(&self, parameters: f64, layout: &ParallelLayout, cluster: &Cluster) -> UnitWork {
        let weight = self.weight.compute.seconds() + accumulation(parameters, layout, cluster).seconds();
        let mut travelling = self.input.exchanges.clone();
        if cluster.system.overlaps_layers {
            hide(&mut travelling, weight);
        }
        let exposed: f64 = travelling.iter().map(|one| one.exposed).sum();
        let forward = self.forward.seconds();
        UnitWork { forward, all: forward + self.input.compute.seconds() + exposed + weight + self.weight.exposed() }
    }
}

impl UnitCosts {
    /// Seconds that a step takes at least, whatever its stages: one of p ranks has at least a p-th of the work, and those in
    /// front of it hold it up.
    pub(crate) fn least_seconds(&self, anatomy: &Anatomy, layout: &ParallelLayout, cluster: &Cluster) -> f64 {
        let (mut total, mut busiest, mut forward_share) = (0.0, 0.0f64, 1.0f64);
        let places = layout.size(PIPELINE) as f64;
        let micro_batches = layout.micro_batches as f64;
        for (at, (unit, times)) in anatomy.units.iter().zip(&self.by_unit).enumerate() {
            let work = times.work(unit.parameters, layout, cluster);
            let count = anatomy.order.iter().filter(|other| **other == at).count() as f64;
            total += count * work.all;
            busiest = busiest.max((count / places).ceil() * work.all);
            if work.all > 0.0 {
                forward_share = forward_share.min(work.forward / work.all);
            }
        }
        // Of a rank's work, what the ranks behind it have to wait for.
        let share = match Reach::of(&layout.schedule) {
            _ if places == 1.0 || layout.chunks > 1 => 0.0,
            Reach::Both => 1.0,
            Reach::Forward => forward_share,
            Reach::Nothing => 0.0,
        };
        // If ranks end at the same time C, then m w + s (all before it) = C for each: w shrinks from rank to rank by 1 - s/m.
        let even = match share > 0.0 && micro_batches >= 1.0 {
            true => share * total / (1.0 - (1.0 - share / micro_batches).powf(places)),
            false => micro_batches * total / places,
        };
        even.max(micro_batches * busiest) * layout.straggling(cluster.system.jitter)
    }
}

/// Seconds that a step takes at least: some rank waits until the first micro-batch reaches it, does all its work, and then the
/// last one goes back through the stages before it. Without a pipeline it is the time itself.
pub fn lower_bound(model: &StepModel) -> f64 {
    let reach = Reach::of(&model.layout.schedule);
    let whole = |stage: &StageModel| stage.forward.seconds() + stage.input.seconds() + stage.weight.seconds();
    let passing = |stage: &StageModel| match reach {
        Reach::Both => whole(stage),
        Reach::Forward => stage.forward.seconds(),
        Reach::Nothing => 0.0,
    };
    let work = |role: &RankRole| role.stages.iter().filter_map(|at| model.stages.get(*at)).map(whole).sum::<f64>();
    let works: Vec<f64> = model.roles.iter().map(work).collect();
    let of_role = |(place, role): (usize, &RankRole)| {
        // A rank of a pipeline in two directions has half of the micro-batches of each of two places.
        let work = match reach == Reach::Nothing && works.len() > 1 {
            true => 0.5 * (works[place] + works[works.len() - 1 - place]),
            false => works[place],
        };
        let first = role.stages.first().copied().unwrap_or(0);
        let before: f64 = model.stages.iter().take(first).map(passing).sum();
        before + work * model.layout.micro_batches as f64
    };
    let passed = model.roles.iter().enumerate().map(of_role).fold(0.0, f64::max);
    let tail = model.roles.iter().map(|role| model.tail(role)).fold(f64::INFINITY, f64::min);
    let before = model.roles.iter().map(RankRole::before_seconds).fold(0.0, f64::max);
    let tail = if tail.is_finite() { tail } else { 0.0 };
    (before + passed + tail) * model.layout.straggling(model.jitter)
}
