//! The search finds what trying everything finds, keeps to its limits, and names only what is accepted.

use super::space::SearchSpace;
use super::*;
use crate::collective::{Algorithm, CollectiveKind, seconds};
use crate::device::Precision;
use crate::simulate::{Conditions, simulate_step};
use crate::step_model::{Compute, DeviceMemory, Pass, PlannedBucket, PlannedExchange, RankRole, StageModel, Transfer};

#[test]
fn candidates_have_all_devices_and_share_the_batch() {
    let space = space(24, 96);
    let all = space.candidates();
    assert!(all.len() > 50);
    for one in &all {
        assert_eq!(one.devices(), 24);
        assert!(96usize.is_multiple_of(one.grains()) && one.grains().is_power_of_two(), "{one}");
        assert!(one.data > 1 || one.zero == 0);
    }
    let mut sorted = all.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!(sorted.len(), all.len(), "each once");
}

fn space(devices: usize, batch: usize) -> SearchSpace {
    SearchSpace {
        devices,
        batch,
        stages_max: 8,
        tensor_max: 8,
        tokens_max: 4,
        zero_max: 3,
        sequences: vec![SequenceSplit::Whole, SequenceSplit::Tensor, SequenceSplit::Heads],
        recomputes: kolo_parallel::Recompute::ALL.to_vec(),
        schedules: vec!["1f1b", "interleaved", "zero-bubble", "bidirectional"],
        micro_batches_max: 64,
        reproducible: true,
    }
}

/// A model of equal layers, with costs by formulas that a reader can check.
struct Toy {
    layers: usize,
    batch: usize,
}

const LAYER_SECONDS: f64 = 1e-3;
const LAYER_BYTES: f64 = 1e9;

fn cluster() -> Cluster {
    let text = "device = \"h100-80\"\n[[level]]\ncount = 8\nlink = \"nvlink4\"\n[[level]]\ncount = 16384\nlink = \"infiniband-ndr\"\n";
    let root = kolo_config::parse(text, "cluster.toml").unwrap();
    Cluster::read(&root, &crate::device::DeviceTable::built_in().unwrap()).unwrap()
}

impl Toy {
    fn pass(&self, candidate: &Candidate, cluster: &Cluster, layers: f64, share: f64) -> Pass {
        let samples = (self.batch / candidate.grains()) as f64;
        let ranks = (candidate.tensor * candidate.tokens) as f64;
        let product = LAYER_SECONDS * layers * samples * share / ranks;
        let compute = Compute { product, stream: 0.1 * product, overhead: 1e-5 * layers, flops: product * 1e15 };
        let mut exchanges = Vec::new();
        if candidate.tensor > 1 {
            let bytes = 5e7 * samples;
            let span = cluster.span(1, candidate.tensor);
            let seconds = seconds(CollectiveKind::AllReduce, Algorithm::Fastest, bytes, &span) * layers;
            let axis = "tensor".to_string();
            let kind = CollectiveKind::AllReduce;
            exchanges.push(PlannedExchange { axis, kind, bytes, times: layers, seconds, exposed: seconds });
        }
        Pass { compute, exchanges }
    }
}

impl LayoutModels for Toy {
    fn model(&self, candidate: &Candidate, cluster: &Cluster) -> Result<StepModel, String> {
        let layout = candidate.layout(self.batch, Precision::Bf16, Algorithm::Fastest);
        let stages = candidate.pipeline * candidate.chunks;
        let layers = self.layers as f64 / stages as f64;
        let again = if candidate.recompute == kolo_parallel::Recompute::Blocks { 2.0 } else { 1.0 };
        let samples = (self.batch / candidate.grains()) as f64;
        let stage = StageModel {
            forward: self.pass(candidate, cluster, layers, 1.0),
            input: self.pass(candidate, cluster, layers, again),
            weight: self.pass(candidate, cluster, layers, 1.0),
            sends: [Transfer { bytes: 1e7 * samples, seconds: 5e-6 + 2e-4 * samples }; 2],
        };
        layout.schedule(candidate.micro_batches).map_err(|error| error.to_string())?;
        let bytes = LAYER_BYTES * layers * candidate.chunks as f64 / candidate.tensor as f64;
        let span = cluster.span(layout.stride("data"), candidate.data);
        let all_reduce = seconds(CollectiveKind::AllReduce, Algorithm::Fastest, bytes, &span);
        let shards = |from: usize| if candidate.zero >= from { candidate.data as f64 } else { 1.0 };
        let kept = if again > 1.0 { 0.1 } else { 1.0 };
        let on_their_way = candidate.micro_batches.min(candidate.pipeline) as f64;
        let memory = DeviceMemory {
            weights: bytes / shards(3),
            gradients: bytes / shards(2),
            optimizer: 3.0 * bytes / shards(1),
            activations: 4e8 * samples * layers * candidate.chunks as f64 * kept * on_their_way
                / candidate.tensor as f64,
            ..DeviceMemory::default()
        };
        let role = |place: usize| RankRole {
            place,
            ranks: candidate.devices() / candidate.pipeline,
            stages: (0..candidate.chunks).map(|chunk| chunk * candidate.pipeline + place).collect(),
            before: Vec::new(),
            buckets: (0..4)
                .map(|at| PlannedBucket {
                    kind: CollectiveKind::AllReduce,
                    axis: "data".into(),
                    bytes: bytes / 4.0,
                    seconds: all_reduce / 4.0,
                    ready_before_end: f64::from(3 - at) * 1e-3,
                })
                .collect(),
            update: Compute { stream: 1e-3 / shards(1), ..Compute::default() },
            after: Vec::new(),
            memory,
            parameters: 1e9,
        };
        let roles = (0..candidate.pipeline).map(role).collect();
        Ok(StepModel {
            layout,
            stages: vec![stage; stages],
            roles,
            model_flops: 3e12 * (self.layers * self.batch) as f64,
            peak_flops: 989e12,
            overlaps_gradients: true,
            device_memory: cluster.device.memory_bytes,
            jitter: 0.0,
        })
    }

    fn accepts(&self, candidate: &Candidate) -> Result<(), String> {
        if candidate.schedule == "bidirectional" { Err("not in two directions".into()) } else { Ok(()) }
    }
}

/// The fastest layout of each kind, the fastest kinds first, by timing every candidate that fits.
fn exhaustive(candidates: &[Candidate], toy: &Toy, cluster: &Cluster) -> Vec<(f64, Candidate)> {
    let kind = |one: &Candidate| Candidate { micro_batches: 0, schedule: "", chunks: 0, ..one.clone() };
    let mut best: std::collections::BTreeMap<Candidate, (f64, Candidate)> = std::collections::BTreeMap::new();
    for one in candidates.iter().filter(|one| toy.accepts(one).is_ok()) {
        let Some(model) = toy.model(one, cluster).ok().filter(StepModel::fits) else { continue };
        let seconds = model.times().unwrap().seconds;
        assert!(crate::lower_bound(&model) <= seconds * (1.0 + 1e-9), "{one}");
        let known = best.entry(kind(one)).or_insert((seconds, one.clone()));
        if (seconds, one.clone()) < *known {
            *known = (seconds, one.clone());
        }
    }
    let mut all: Vec<(f64, Candidate)> = best.into_values().collect();
    all.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
    all
}

#[test]
fn the_search_finds_what_trying_everything_finds() {
    let cluster = cluster();
    for (devices, batch, layers) in [(16, 64, 8), (24, 96, 12), (8, 8, 5)] {
        let toy = Toy { layers, batch };
        let candidates = space(devices, batch).candidates();
        let found = search(&candidates, &toy, &cluster, &Limits { steps: 1000.0, ..Limits::default() });
        let all = exhaustive(&candidates, &toy, &cluster);
        // The ten are ranked anew as they are simulated.
        let seconds = |one: &Ranked| toy.model(&one.candidate, &cluster).unwrap().times().unwrap().seconds;
        let mut times: Vec<f64> = found.ranked.iter().map(seconds).collect();
        times.sort_by(f64::total_cmp);
        let wanted: Vec<f64> = all.iter().take(times.len()).map(|one| one.0).collect();
        assert_eq!(times, wanted, "{devices} devices");
        assert_eq!(times.len(), all.len().min(10));
        assert!(found.timed < candidates.len(), "bounds leave some out");
        assert!(found.ranked.windows(2).all(|pair| pair[0].seconds <= pair[1].seconds));
        assert!(found.ranked.iter().all(|one| one.candidate.schedule != "bidirectional"));
        assert!(found.refusals.is_empty() || found.refusals == ["not in two directions"]);
    }
}

#[test]
fn limits_rule_out_and_say_what_is_nearest() {
    let (toy, cluster) = (Toy { layers: 8, batch: 64 }, cluster());
    let candidates = space(16, 64).candidates();
    let free = Limits { steps: 1000.0, ..Limits::default() };
    let best = search(&candidates, &toy, &cluster, &free).ranked[0].clone();
    let most = 0.8 * best.memory.total();
    let tight = search(&candidates, &toy, &cluster, &Limits { memory: Some(most), ..free });
    assert!(tight.ranked.iter().all(|one| one.memory.total() <= most) && tight.too_large > 0);
    assert!(tight.ranked[0].seconds >= best.seconds);
    let more = tight.with_more_memory.unwrap();
    assert!((most..1.5 * most).contains(&more.memory.total()) && more.seconds < tight.ranked[0].seconds);
    let none = search(&candidates, &toy, &cluster, &Limits { memory: Some(1e6), ..free });
    let miss = none.nearest.unwrap();
    assert!(none.ranked.is_empty() && miss.memory.total() > 1e6);
    assert!(!explain::memory_hint(&miss).is_empty());
    let late = search(&candidates, &toy, &cluster, &Limits { deadline: Some(1.0), ..free });
    assert!(late.ranked.is_empty() && late.beyond_limits.unwrap().run_seconds > 1.0);
}

#[test]
fn changes_that_help_come_with_their_gain() {
    let (toy, cluster, space) = (Toy { layers: 8, batch: 64 }, cluster(), space(16, 64));
    let candidates = space.candidates();
    let best = search(&candidates, &toy, &cluster, &Limits { steps: 1.0, ..Limits::default() }).ranked[0].clone();
    let poor = Candidate { recompute: kolo_parallel::Recompute::Blocks, ..best.candidate.clone() };
    let list = changes::changes(&poor, &space, &toy, &cluster);
    assert!(list.iter().any(|one| one.what == "compute nothing again" && one.set == ["memory.recompute=\"none\""]));
    assert!(list.iter().all(|one| one.gain > 0.0));
    let of_best = changes::changes(&best.candidate, &space, &toy, &cluster);
    assert!(of_best.iter().filter(|one| one.fits && !one.set.is_empty()).count() == 0, "{of_best:?}");
}

/// The spread of ranks' times that a cluster describes lengthens a simulated step as it lengthens a planned one.
#[test]
fn a_clusters_jitter_acts_on_simulated_steps() {
    let (toy, cluster) = (Toy { layers: 8, batch: 64 }, cluster());
    let candidates = space(16, 64).candidates();
    let best = search(&candidates, &toy, &cluster, &Limits { steps: 1.0, ..Limits::default() }).ranked[0].clone();
    let model = toy.model(&best.candidate, &cluster).unwrap();
    let spread = StepModel { jitter: 0.1, ..model.clone() };
    let step = |model: &StepModel| simulate_step(model, &cluster, &Conditions::default()).unwrap();
    let (even, slower) = (step(&model), step(&spread));
    let straggling = 1.0 + 0.1 * (2.0 * 16f64.ln()).sqrt();
    assert!((slower.seconds / even.seconds / straggling - 1.0).abs() < 1e-12);
    assert!((slower.utilisation * straggling / even.utilisation - 1.0).abs() < 1e-12);
    let parts = slower.compute + slower.exposed.values().sum::<f64>() + slower.bubble;
    assert!((parts / slower.seconds - 1.0).abs() < 1e-9 && slower.bubble > even.bubble);
    let times = |model: &StepModel| model.times().unwrap().seconds;
    assert!((times(&spread) / times(&model) / straggling - 1.0).abs() < 1e-12);
}

/// Every layout that is named keeps to the deadline as it is simulated, and the fastest of all is always among them.
#[test]
fn what_is_named_keeps_to_its_limits() {
    let (toy, cluster) = (Toy { layers: 8, batch: 64 }, cluster());
    let candidates = space(16, 64).candidates();
    let free = Limits { steps: 1000.0, ..Limits::default() };
    let all = search(&candidates, &toy, &cluster, &free).ranked;
    let (first, last) = (all[0].run_seconds, all[all.len() - 1].run_seconds);
    assert!(all.len() == 10 && last > 1.001 * first);
    for at in 0..20 {
        let deadline = first + (last - first) * f64::from(at) / 19.0;
        let dear = all[0].cost.unwrap() * deadline / first;
        for limits in [Limits { deadline: Some(deadline), ..free }, Limits { cost: Some(dear * (1.0 + 1e-12)), ..free }]
        {
            let found = search(&candidates, &toy, &cluster, &limits);
            assert_eq!(found.ranked[0], all[0]);
            assert!(found.ranked.iter().all(|one| one.run_seconds <= deadline * (1.0 + 1e-9)));
            let kept = all.iter().filter(|one| one.run_seconds <= deadline * (1.0 - 1e-9)).count();
            assert!(found.ranked.len() >= kept);
        }
    }
    let late = search(&candidates, &toy, &cluster, &Limits { deadline: Some(0.999 * first), ..free });
    assert!(late.ranked.is_empty());
    assert_eq!(late.beyond_limits.unwrap(), all[0]);
}

/// Sums whose bits need not be kept are shared by any number of data ranks.
#[test]
fn jobs_that_allow_it_have_any_number_of_data_ranks() {
    let cluster = cluster();
    let limits = Limits { steps: 1.0, ..Limits::default() };
    for (devices, batch) in [(6, 48), (12, 96), (24, 96), (40, 120)] {
        let toy = Toy { layers: 8, batch };
        let bound = space(devices, batch).candidates();
        assert!(bound.iter().all(|one| one.data.is_power_of_two() && one.micro_batches.is_power_of_two()));
        let any = SearchSpace { reproducible: false, ..space(devices, batch) }.candidates();
        assert!(bound.iter().all(|one| any.contains(one)));
        let alone: Vec<Candidate> = any.iter().filter(|one| one.data == devices).cloned().collect();
        assert!(!alone.is_empty() && any.iter().all(|one| batch.is_multiple_of(one.grains())));
        let [best, own] = [&any, &alone].map(|some| search(some, &toy, &cluster, &limits).ranked[0].seconds);
        assert!(best <= own, "{devices} devices: {best} and {own}");
    }
}

/// A step of 100,000 devices costs what its roles cost; with noise every rank is simulated.
#[test]
fn many_devices_cost_no_more_than_their_roles() {
    let cluster = cluster();
    let events = |data: usize, spread: f64| {
        let toy = Toy { layers: 64, batch: data * 64 };
        let candidate = Candidate {
            data,
            pipeline: 8,
            tensor: 8,
            tokens: 1,
            sequence: SequenceSplit::Whole,
            slices: [1; 2],
            zero: 1,
            recompute: kolo_parallel::Recompute::Blocks,
            layers: None,
            micro_batches: 64,
            schedule: "1f1b",
            chunks: 1,
        };
        let model = toy.model(&candidate, &cluster).unwrap();
        let conditions = Conditions { spread, seed: 5, ..Conditions::default() };
        let step = simulate_step(&model, &cluster, &conditions).unwrap();
        (step.outcome.events, step.seconds)
    };
    let (few, _) = events(2, 0.0);
    let (many, quiet) = events(1024, 0.0);
    assert_eq!(few, many);
    let (noisy, slower) = events(32, 0.02);
    assert!(noisy > 32 * 8 * 128 && slower > quiet);
}
