//! What a system does changes what a step takes.

use super::compose;
use crate::anatomy::{Anatomy, Kept, Unit, UnitPass};
use crate::cluster::{Cluster, SystemTraits};
use crate::collective::Algorithm;
use crate::device::{DeviceTable, Precision};
use crate::op_cost::{Body, OpCall};
use crate::simulate::{Conditions, simulate_step};
use crate::step_model::{ParallelLayout, StepModel};
use kolo_exec::Offload;
use kolo_parallel::Recompute;

const WIDTH: f64 = 4096.0;
const TOKENS: f64 = 8192.0;

/// A product of so many rows with a weight of the width.
fn pass() -> UnitPass {
    let (weights, flops) = (WIDTH * WIDTH, 2.0 * TOKENS * WIDTH * WIDTH);
    let body = Body::Product { rows: TOKENS, columns: WIDTH, terms: WIDTH, convolution: None };
    let reals = 2.0 * TOKENS * WIDTH + weights;
    let call = OpCall { name: "linear", body, flops, reals, bytes: 0.0, weights, reread: 0.0, composite: false };
    UnitPass { calls: vec![call], exchanges: Vec::new() }
}

fn anatomy() -> Anatomy {
    let unit = Unit {
        forward: pass(),
        input: pass(),
        weight: pass(),
        parameters: WIDTH * WIDTH,
        saved: Kept { reals: TOKENS * WIDTH, bytes: 0.0 },
        ..Unit::default()
    };
    Anatomy {
        units: vec![unit],
        order: vec![0; 8],
        update_bytes: 24.0,
        update_calls: 1.0,
        optimizer_bytes: 8.0,
        offload: Offload::None,
        model_flops: 1.0,
        layer_flops: 1.0,
        samples: 1,
        layers: Vec::new(),
    }
}

fn step(zero: usize, micro_batches: usize, precision: Precision, system: SystemTraits) -> StepModel {
    let text = "device = \"h100-80\"\n[[level]]\nname = \"host\"\ncount = 8\nlink = \"nvlink4\"\n";
    let root = kolo_config::parse(text, "cluster.toml").unwrap();
    let cluster = Cluster::read(&root, &DeviceTable::built_in().unwrap()).unwrap();
    let layout = ParallelLayout {
        axes: vec![("data".into(), 8)],
        zero,
        chunks: 1,
        schedule: String::new(),
        micro_batch: 1,
        micro_batches,
        recompute: Recompute::None,
        precision,
        algorithm: Algorithm::Fastest,
    };
    compose(&anatomy(), &layout, &Cluster { system, ..cluster }).unwrap()
}

#[test]
fn exchanges_that_are_hidden_take_multiprocessors() {
    let [shared, whole] = [3, 0].map(|zero| step(zero, 1, Precision::Bf16, SystemTraits::default()));
    let forward = |step: &StepModel| step.stages[0].forward.clone();
    let hidden: f64 = forward(&shared).exchanges.iter().map(|one| one.seconds - one.exposed).sum();
    let lost = forward(&shared).compute.seconds() - forward(&whole).compute.seconds();
    assert!(hidden > 0.0 && (lost / hidden - 16.0 / 132.0).abs() < 1e-6, "{lost} {hidden}");
    let alone = step(3, 1, Precision::Bf16, SystemTraits { overlaps_gathers: false, ..SystemTraits::default() });
    assert_eq!(forward(&alone).compute, forward(&whole).compute);
}

#[test]
fn new_weights_can_come_while_the_next_step_begins() {
    let waited = |overlaps_updates: bool| {
        let step = step(1, 4, Precision::Bf16, SystemTraits { overlaps_updates, ..SystemTraits::default() });
        step.roles[0].after.iter().map(|one| one.exposed).sum::<f64>()
    };
    assert!(waited(false) > 0.0);
    assert_eq!(waited(true), 0.0);
}

#[test]
fn weights_become_narrow_once_per_step_or_gather() {
    let forward = |zero, micro_batches, precision| {
        let step = step(zero, micro_batches, precision, SystemTraits::default());
        step.stages[0].forward.compute.stream
    };
    let narrowing = |zero, micro_batches| {
        forward(zero, micro_batches, Precision::F8) - forward(zero, micro_batches, Precision::Bf16)
    };
    assert!(narrowing(0, 1) > 0.0);
    assert!((narrowing(0, 4) / narrowing(0, 1) - 0.25).abs() < 1e-6);
    assert!((narrowing(3, 4) / narrowing(3, 1) - 1.0).abs() < 1e-6);
}

#[test]
fn fragments_are_a_share_of_activations() {
    let kept = |fragments: f64| {
        step(0, 1, Precision::Bf16, SystemTraits { fragments, ..SystemTraits::default() }).roles[0].memory
    };
    let (without, with) = (kept(0.0), kept(0.1));
    assert!((with.activations / without.activations - 1.1).abs() < 1e-9);
    assert_eq!(with.weights, without.weights);
}

/// Between hosts, gathers hide for a share of the time in which they could; what is simulated is what is planned.
#[test]
fn gathers_between_hosts_are_hidden_in_part() {
    let text = "device = \"h100-80\"\n[[level]]\ncount = 8\nlink = \"nvlink4\"\n[[level]]\ncount = 4\nlink = \"infiniband-ndr\"\n";
    let root = kolo_config::parse(text, "cluster.toml").unwrap();
    let cluster = Cluster::read(&root, &DeviceTable::built_in().unwrap()).unwrap();
    let seconds = |overlap_share: f64, overlaps_gathers: bool| {
        let system = SystemTraits { overlap_share, overlaps_gathers, ..SystemTraits::default() };
        let cluster = Cluster { system, ..cluster.clone() };
        let layout = ParallelLayout { axes: vec![("data".into(), 32)], ..step(3, 1, Precision::Bf16, system).layout };
        let model = compose(&anatomy(), &layout, &cluster).unwrap();
        let (planned, played) =
            (model.times().unwrap(), simulate_step(&model, &cluster, &Conditions::default()).unwrap());
        assert!((played.seconds / planned.seconds - 1.0).abs() < 0.02, "{} {}", played.seconds, planned.seconds);
        let stage = &model.stages[0];
        let passes = || [&stage.forward, &stage.input].into_iter().flat_map(|pass| &pass.exchanges);
        (passes().map(|one| one.exposed).sum::<f64>(), passes().map(|one| one.seconds).sum::<f64>())
    };
    let [(all, _), (half, _), (none, travelling)] = [1.0, 0.5, 0.0].map(|share| seconds(share, true));
    assert!(all < half && half < none, "{all} {half} {none}");
    assert!((none / travelling - 1.0).abs() < 1e-9 && (seconds(1.0, false).0 / travelling - 1.0).abs() < 1e-9);
    // These gathers are shorter than the passes: half of them is hidden.
    assert!((half / travelling - 0.5).abs() < 1e-9 && all == 0.0, "{half} of {travelling}, {all}");
}
