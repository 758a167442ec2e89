//! The search of layouts on real jobs: what it finds without looking at everything is what looking at everything finds.

use crate::job;
use kolo_parallel::Recompute;
use kolo_plan::cluster::Cluster;
use kolo_plan::device::DeviceTable;
use kolo_plan::search::{Candidate, LayerChoices, LayoutModels, Limits, search};
use kolo_plan::step_model::StepModel;
use kolo_train::layout_models::JobModels;
use std::collections::BTreeMap;
use std::sync::Arc;

fn cluster(device: &str) -> Cluster {
    let text = format!(
        "device = \"{device}\"\n[[level]]\ncount = 4\nlink = \"nvlink4\"\n[[level]]\ncount = 4\nlink = \"infiniband-ndr\"\n[system]\nprecision = \"bf16\"\n"
    );
    let root = kolo_config::parse(&text, "cluster.toml").unwrap();
    Cluster::read(&root, &DeviceTable::built_in().unwrap()).unwrap()
}

const GPT: &str = "[model]\nkind = \"gpt\"\nlayers = 6\nwidth = 512\nheads = 8\ncontext = 256\nvocab = 2048\n\
    [data]\nsource = \"synthetic:tokens\"\nbatch = 16\ngrains = 4\n[train]\nsteps = 1\noptimizer = { kind = \"adamw\" }\n";

/// The fastest time of each kind of layout, ascending, over every candidate that fits; bounds and memory are checked on the way.
fn exhaustive(candidates: &[Candidate], models: &JobModels<'_>, cluster: &Cluster, most: f64) -> Vec<f64> {
    let mut best: BTreeMap<Candidate, f64> = BTreeMap::new();
    let of = |one: &Candidate| models.model(one, cluster).unwrap().times().unwrap().seconds;
    for one in candidates {
        let Ok(model) = models.model(one, cluster) else {
            assert!(models.memory(one, cluster).is_err(), "{one}");
            continue;
        };
        let memory = model.largest().unwrap().memory;
        assert_eq!(models.memory(one, cluster).unwrap(), memory, "{one}");
        let seconds = model.times().unwrap().seconds;
        let almost = seconds * (1.0 + 1e-9);
        let bounds = [models.least_seconds(one, cluster), kolo_plan::lower_bound(&model)];
        assert!(bounds.iter().all(|bound| *bound <= almost), "{one}: {bounds:?} {seconds}");
        let again =
            models.fitted(one, cluster, most).filter(|_| memory.total() > most && one.recompute == Recompute::None);
        let fits = if memory.total() <= most {
            Some((one.clone(), seconds))
        } else {
            again.map(|one| (one.clone(), of(&one)))
        };
        if let Some((one, seconds)) = fits.filter(|_| models.accepts(one).is_ok()) {
            // The search ranks the fastest of those that differ in more than this.
            let layers = one.layers.is_some().then(Arc::default);
            let kind = Candidate { micro_batches: 0, schedule: "", chunks: 0, layers, ..one };
            let known = best.entry(kind).or_insert(seconds);
            *known = known.min(seconds);
        }
    }
    let mut times: Vec<f64> = best.into_values().collect();
    times.sort_by(f64::total_cmp);
    times
}

#[test]
fn the_search_finds_what_timing_every_layout_finds() {
    let (job, cluster) = (job(GPT), cluster("h100-80"));
    let models = JobModels::new(&job, &cluster).unwrap();
    let candidates = models.space(16).candidates();
    // Enough for some layouts, and too little for others.
    for most in [f64::INFINITY, 200e6] {
        let limits = Limits { steps: 1.0, memory: Some(most), ..Limits::default() };
        let found = search(&candidates, &models, &cluster, &limits);
        let seconds = |model: StepModel| model.times().unwrap().seconds;
        let mut times: Vec<f64> =
            found.ranked.iter().map(|one| seconds(models.model(&one.candidate, &cluster).unwrap())).collect();
        times.sort_by(f64::total_cmp);
        // A limit is about what the job holds.
        let all = exhaustive(&candidates, &models, &cluster, most + cluster.reserved_bytes());
        assert_eq!(times, all[..times.len()], "at most {most} bytes");
        assert_eq!(times.len(), all.len().min(10));
        assert!(found.timed < candidates.len() / 2, "{} of {} were timed", found.timed, candidates.len());
    }
}

/// What layers compute again, chosen by dynamic programming, is what trying every choice finds.
#[test]
fn layers_that_are_computed_again_take_the_least_time_in_the_memory_there_is() {
    let (job, cluster) = (job(&GPT.replace("layers = 6", "layers = 4")), cluster("h100-80"));
    let models = JobModels::new(&job, &cluster).unwrap();
    let names: Vec<String> = (0..4).map(|layer| format!("h.{layer}")).collect();
    let mut fitted = 0;
    for (pipeline, micro_batches, chunks, zero) in [(1, 2, 1, 0), (2, 4, 1, 1), (2, 4, 2, 0), (1, 1, 1, 3)] {
        let schedule = if chunks > 1 { "interleaved" } else { "1f1b" };
        let whole = Candidate { data: 2, pipeline, micro_batches, chunks, zero, schedule, ..models.own(1).unwrap() };
        let seconds = |one: &Candidate| models.model(one, &cluster).unwrap().times().unwrap().seconds;
        let bytes = |one: &Candidate| models.memory(one, &cluster).unwrap().total();
        let choices: Vec<Candidate> = (0..3usize.pow(4))
            .map(|number| {
                let what = |at: usize| kolo_parallel::Recompute::ALL[number / 3usize.pow(at as u32) % 3];
                let layers = names.iter().enumerate().map(|(at, name)| (name.clone(), what(at))).collect();
                Candidate { layers: Some(std::sync::Arc::new(LayerChoices { layers })), ..whole.clone() }
            })
            .collect();
        let blocks = Candidate { recompute: kolo_parallel::Recompute::Blocks, ..whole.clone() };
        let (least, most) = (bytes(&blocks), bytes(&whole));
        assert!(least < most, "{whole}");
        for part in [0.05, 0.3, 0.6, 0.9] {
            let limit = least + part * (most - least);
            let wanted = choices.iter().filter(|one| bytes(one) <= limit).map(seconds).fold(f64::INFINITY, f64::min);
            let Some(found) = models.fitted(&whole, &cluster, limit) else { continue };
            fitted += 1;
            assert!(bytes(&found) <= limit, "{found}");
            assert!(
                seconds(&found) <= wanted * (1.0 + 1e-9),
                "{found}: {} s, but {wanted} s are possible",
                seconds(&found)
            );
        }
    }
    assert!(fitted >= 8, "{fitted} of 16");
}

/// A job is planned in what it, or the system, computes in, whatever its strategies are.
#[test]
fn the_precision_of_a_plan_is_the_jobs() {
    let text = format!("{GPT}precision = \"bf16\"\n[parallel]\nzero = 3\ntensor = 2\nslices = 2\n");
    let (job, mut cluster) = (job(&text), cluster("h100-80"));
    for precision in [None, Some(kolo_plan::device::Precision::F16)] {
        cluster.system.precision = precision;
        let models = JobModels::new(&job, &cluster).unwrap();
        let own = models.own(8).unwrap();
        let wanted = precision.unwrap_or(kolo_plan::device::Precision::Bf16);
        assert_eq!(models.model(&own, &cluster).unwrap().layout.precision, wanted);
    }
}

/// A job that computes in slices has more to add up, on one worker as on several.
#[test]
fn slices_are_part_of_what_a_layout_computes() {
    let cluster = cluster("cpu-core");
    let compute = |parallel: &str| {
        let job = job(&format!("{GPT}[parallel]\n{parallel}"));
        let models = JobModels::new(&job, &cluster).unwrap();
        let own = models.own(2).unwrap();
        let slices = own.assignments().into_iter().find(|one| one.starts_with("parallel.slices=")).unwrap();
        (slices, models.model(&own, &cluster).unwrap().times().unwrap().compute)
    };
    let [(_, whole), (slices, sliced)] = [compute(""), compute("slices = 4")];
    assert!(sliced > whole && slices == "parallel.slices=4", "{slices}: {sliced} and {whole}");
    let [(_, whole), (slices, sliced)] = [compute("slices = 2\ntensor = 2"), compute("slices = 8\ntensor = 2")];
    assert!(sliced > whole && slices == "parallel.slices=8", "{slices}: {sliced} and {whole}");
    let tokens = "sequence = \"heads\"\ncontext = 2\nslices = 4\ntensor_slices = 2";
    assert_eq!(compute(tokens).0, "parallel.slices=4");
}

/// Bytes that a rank of the pipeline hands to others while gradients of two stages, or of data ranks, are added up.
fn bucket_bytes(keys: &str, system: &str, place: usize) -> f64 {
    let mut cluster = cluster("h100-80");
    cluster.system.sums_tied_once = system == "once";
    let job = job(&format!("{GPT}[parallel]\n{keys}"));
    let models = JobModels::new(&job, &cluster).unwrap();
    let model = models.model(&models.own(2).unwrap(), &cluster).unwrap();
    model.roles[place].buckets.iter().map(|bucket| bucket.bytes).sum()
}

#[test]
fn gradients_of_tied_weights_travel_with_every_micro_batch() {
    let table = 4.0 * 2048.0 * 512.0;
    let last = |system| bucket_bytes("pipeline = 2", system, 1);
    assert_eq!((last("each"), last("once")), (4.0 * table, table));
    assert_eq!(bucket_bytes("pipeline = 2", "each", 0), 0.0);
}

#[test]
fn zero_2_scatters_the_gradients_of_every_micro_batch() {
    let [one, two] = ["zero = 1", "zero = 2"].map(|keys| bucket_bytes(keys, "each", 0));
    assert_eq!(two, 2.0 * one);
}

/// A layout whose calls are others for another number of samples is counted on its own number.
#[test]
fn micro_batches_that_are_not_computed_alike_are_counted_one_by_one() {
    let small = "[model]\nkind = \"gpt\"\nlayers = 6\nwidth = 64\nheads = 4\ncontext = 64\nvocab = 256\n\
        [data]\nsource = \"synthetic:tokens\"\nbatch = 8\ngrains = 4\n[train]\nsteps = 1\n\
        [parallel]\ntensor = 2\nslices = 2\nsequence = \"tensor\"\n";
    let (job, cluster) = (job(small), cluster("cpu-core"));
    let models = JobModels::new(&job, &cluster).unwrap();
    let own = models.own(2).unwrap();
    for micro_batches in [1, 2, 4, 8] {
        let one = Candidate { micro_batches, ..own.clone() };
        assert!(models.model(&one, &cluster).unwrap().times().unwrap().seconds > 0.0, "{one}");
    }
}
