//! ZeRO and pipelines: the bits of one worker at every stage, and what a rank keeps and exchanges.

use crate::workers::{assert_same, on_ranks, options, report};
use kolo_comm::Communicator;
use kolo_exec::Options;
use kolo_exec::store::Role;
use kolo_graph::collective::{AxisJoin, AxisSum};
use kolo_graph::share::{AxisShare, packed};
use kolo_graph::{Graph, Phase};
use kolo_plan::MemoryPlan;
use kolo_train::session::{RunOptions, Silent, WorkerGroup};
use kolo_train::{Error, Job, Trainer};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A small GPT with tied weights, an odd vocabulary and dropout.
const GPT: &str =
    "[model]\nkind = \"gpt\"\nlayers = 3\nwidth = 24\nheads = 3\ncontext = 8\nvocab = 11\ndropout = 0.1\n";

fn job(model: &str, train: &str, parallel: &str) -> Arc<Job> {
    let data = "source = \"synthetic:tokens\"\nsamples = 80\nbatch = 8\ngrains = 8";
    crate::job(&format!("{model}[data]\n{data}\n[train]\nsteps = 3\n{train}\n[parallel]\n{parallel}\n"))
}

fn run_on(job: &Arc<Job>, group: WorkerGroup, threads: usize) -> kolo_train::Report {
    let options = RunOptions { threads, ..options(group) };
    kolo_train::run(Arc::clone(job), &options, &mut Silent).unwrap_or_else(|error| panic!("{error}")).1
}

#[test]
fn lanes_frozen_layers_and_prefetch_do_not_matter() {
    let freezing = GPT.replace("dropout", "freeze = [\"h.1.*\", \"ln_f.*\"]\ndropout");
    for (model, train) in [(GPT, "clip = 0.5"), (freezing.as_str(), "optimizer = { kind = \"lamb\" }")] {
        let alone = report(&job(model, train, ""), WorkerGroup::Alone);
        for (workers, threads, parallel) in
            [(2, 2, "zero = 2"), (2, 2, "zero = 3\nprefetch = 2"), (4, 2, "zero = 3"), (4, 1, "zero = 3\nprefetch = 9")]
        {
            let job = job(model, train, parallel);
            let reports = on_ranks(workers, |world| run_on(&job, WorkerGroup::Workers(world), threads));
            let name = format!("{train}: {workers} workers with {threads} threads, {parallel}");
            reports.iter().for_each(|other| assert_same(&name, &alone, other));
        }
    }
}

/// Shares of tensor shards.
#[test]
fn tensor_ranks_have_shares_of_their_shards() {
    for train in ["clip = 0.5", "optimizer = { kind = \"lamb\" }"] {
        let alone = report(&job(GPT, train, "slices = 2"), WorkerGroup::Alone);
        for parallel in ["zero = 2", "zero = 3"] {
            let job = job(GPT, train, &format!("slices = 2\ntensor = 2\n{parallel}"));
            let reports = on_ranks(4, |world| report(&job, WorkerGroup::Workers(world)));
            reports.iter().for_each(|other| assert_same(&format!("{train}, {parallel}"), &alone, other));
        }
    }
}

fn assert_same_on(workers: usize, train: &str, alone: &kolo_train::Report, parallel: &str) {
    let job = job(GPT, train, &format!("slices = 2\n{parallel}"));
    let reports = on_ranks(workers, |world| report(&job, WorkerGroup::Workers(world)));
    let name = format!("{train}: {workers} workers, {parallel}");
    reports.iter().for_each(|other| assert_same(&name, alone, other));
}

/// Each stage's weights, gradients and moments are shared out among its data ranks. The embedding is read by two stages.
#[test]
fn stages_of_a_pipeline_are_shared_out() {
    for train in ["clip = 0.5", "optimizer = { kind = \"lamb\" }"] {
        let alone = report(&job(GPT, train, "slices = 2"), WorkerGroup::Alone);
        for (workers, parallel) in [
            (4, "pipeline = 2\nzero = 2"),
            (4, "pipeline = 2\nzero = 3"),
            (4, "pipeline = 2\nzero = 3\nschedule = \"zero-bubble\"\nprefetch = 0"),
            (8, "pipeline = 2\nzero = 2\nbucket_mib = 0"),
            (4, "pipeline = 2\nchunks = 2\nschedule = \"interleaved\"\nzero = 3"),
            (8, "pipeline = 2\ntensor = 2\nzero = 3"),
        ] {
            assert_same_on(workers, train, &alone, parallel);
        }
    }
}

/// A stage with fewer runs of elements than data ranks: some of them have no share of any gradient.
#[test]
fn ranks_without_a_share_of_their_stage_get_their_weights() {
    let model = "[model]\nkind = \"mlp\"\nhidden = [32, 32]\n";
    let digits = |parallel: &str| {
        crate::job(&format!(
            "{model}[data]\nsource = \"builtin:digits\"\nbatch = 16\ngrains = 8\n[train]\nsteps = 3\n[parallel]\n{parallel}\n"
        ))
    };
    let alone = report(&digits(""), WorkerGroup::Alone);
    for (workers, parallel) in [
        (8, "pipeline = 2\nzero = 2"),
        (8, "pipeline = 2\nzero = 2\nschedule = \"gpipe\""),
        (8, "pipeline = 2\nzero = 2\nschedule = \"zero-bubble\""),
        (8, "pipeline = 2\nzero = 3"),
        (8, "zero = 2"),
    ] {
        let job = digits(parallel);
        for other in on_ranks(workers, |world| report(&job, WorkerGroup::Workers(world))) {
            assert_same(parallel, &alone, &other);
        }
    }
}

/// Both directions' gradients are added as those of one worker are.
#[test]
fn grains_in_two_directions_do_not_matter() {
    for train in ["clip = 0.5", "optimizer = { kind = \"lamb\" }"] {
        let alone = report(&job(GPT, train, "slices = 2"), WorkerGroup::Alone);
        for (workers, parallel) in [
            (2, "pipeline = 2"),
            (3, "pipeline = 3"),
            (4, "pipeline = 4"),
            (4, "pipeline = 2\nbucket_mib = 0"),
            (8, "pipeline = 2"),
            (4, "pipeline = 2\ntensor = 2"),
            (4, "pipeline = 2\nzero = 1"),
            (6, "pipeline = 3\nzero = 1"),
            (4, "pipeline = 2\nzero = 2"),
        ] {
            assert_same_on(workers, train, &alone, &format!("{parallel}\nschedule = \"bidirectional\""));
        }
    }
}

/// A model whose tensors are cut, with two moments.
fn large(parallel: &str) -> Arc<Job> {
    let model = "[model]\nkind = \"gpt\"\nlayers = 6\nwidth = 64\nheads = 4\ncontext = 8\nvocab = 251\n";
    job(model, "optimizer = { kind = \"adamw\" }\nclip = 1.0", parallel)
}

/// Bytes of each layer, from the names of its parameters; the largest first.
fn layers(trainer: &Trainer) -> Vec<usize> {
    let mut layers: BTreeMap<String, usize> = BTreeMap::new();
    for entry in trainer.store().entries().iter().filter(|entry| entry.role == Role::Parameter) {
        let words: Vec<&str> = entry.name.split('.').take(if entry.name.starts_with("h.") { 2 } else { 1 }).collect();
        *layers.entry(words.join(".")).or_default() += packed(entry.ty.elements()) * 4;
    }
    let mut bytes: Vec<usize> = layers.into_values().collect();
    bytes.sort_unstable_by(|a, b| b.cmp(a));
    bytes
}

fn plans(parallel: &str) -> Vec<MemoryPlan> {
    let job = large(parallel);
    on_ranks(4, |world| Trainer::among(Arc::clone(&job), 1, world).unwrap().memory())
}

#[test]
fn a_rank_keeps_a_quarter_and_two_layers() {
    let alone = Trainer::new(large(""), Options::for_grains(8, 1)).unwrap();
    let (whole, layers) = (alone.memory(), layers(&alone));
    let total = 2 * whole.weights + whole.optimizer;
    let two = layers[0] + layers[1];
    let kept = |plan: &MemoryPlan| plan.weights + plan.gradients + plan.optimizer;
    let tensor = alone.store().entries().iter().map(|entry| entry.ty.bytes()).max().unwrap();
    let plans = ["zero = 0", "zero = 2\nbucket_mib = 0", "zero = 3\nbucket_mib = 0"].map(plans);
    for rank in 0..4 {
        let [data, second, third] = [&plans[0][rank], &plans[1][rank], &plans[2][rank]];
        // A share is a quarter, but for the runs of 4096 elements whose squares are one sum.
        let slack = 4 * 4096 * 4;
        assert_eq!(second.weights, whole.weights);
        assert!(second.gradients + second.optimizer <= (total - whole.weights) / 4 + slack, "{second:?}");
        assert!(kept(third) <= total / 4 + slack, "{} of {total}", kept(third));
        // Gradients: one that is made, one on its way.
        let most = total / 4 + two + data.activations + 2 * tensor;
        assert!(kept(third) + third.activations <= most, "{third:?} for {most}, {data:?}, {layers:?}");
    }
}

/// Bytes that the exchanges of one grain take in, by kind: scattered, gathered, summed.
fn exchanged(graph: &Graph) -> [usize; 3] {
    let mut bytes = [0; 3];
    for (node, _) in graph.nodes.iter().zip(graph.phases()).filter(|(_, phase)| *phase == Phase::Grain) {
        if node.op.is::<AxisShare>() {
            bytes[0] += graph.ty(node.inputs[0]).bytes();
        } else if node.op.is::<AxisJoin>() {
            bytes[1] += graph.ty(node.outputs[0]).bytes();
        } else if node.op.is::<AxisSum>() {
            bytes[2] += graph.ty(node.inputs[0]).bytes();
        }
    }
    bytes
}

/// Gradients are summed once per grain; layers are gathered for both passes, but for the last, which both use at once, and the
/// positions, which the backward pass does not read.
#[test]
fn exchanges_are_those_of_the_formulas() {
    let alone = Trainer::new(large(""), Options::for_grains(8, 1)).unwrap();
    let bytes = |wanted: &dyn Fn(&str) -> bool| -> usize {
        let entries =
            alone.store().entries().iter().filter(|entry| entry.role == Role::Parameter && wanted(&entry.name));
        entries.map(|entry| packed(entry.ty.elements()) * 4).sum()
    };
    let all = bytes(&|_| true);
    let of = |parallel: &str| {
        let job = large(parallel);
        on_ranks(4, |world| exchanged(Trainer::among(Arc::clone(&job), 1, world).unwrap().session().graph()))
    };
    // The loss, and how many targets count.
    let small = 2 * packed(1) * 4;
    for found in of("zero = 2") {
        assert_eq!(found, [all, 0, small]);
    }
    let tied = bytes(&|name| name.starts_with("wte"));
    let twice = bytes(&|name| name.starts_with("h.") || name.starts_with("ln_f"));
    for found in of("zero = 3") {
        // The embedding is gathered to look tokens up, and for the head in both passes.
        assert_eq!(found, [all, 2 * tied + 2 * twice + bytes(&|name| name.starts_with("wpe")), small]);
    }
}

/// What ranks send along every axis in a step, as they counted it, is what the plan says, for every rank.
#[test]
fn ranks_send_what_is_planned() {
    let model = "[model]\nkind = \"gpt\"\nlayers = 4\nwidth = 24\nheads = 4\ncontext = 8\nvocab = 11\ndropout = 0.1\n";
    for (workers, parallel) in [
        (2, ""),
        (4, "bucket_mib = 0"),
        (4, "zero = 1"),
        (4, "zero = 2"),
        (4, "zero = 3"),
        (2, "tensor = 2"),
        (2, "tensor = 2\nsequence = \"tensor\""),
        (2, "context = 2\nsequence = \"heads\""),
        (2, "context = 2\nsequence = \"context\""),
        (2, "pipeline = 2"),
        (2, "pipeline = 2\nchunks = 2\nschedule = \"interleaved\""),
        (4, "pipeline = 2\nschedule = \"bidirectional\""),
        (8, "pipeline = 2\ntensor = 2"),
        (8, "pipeline = 2\ntensor = 2\nzero = 1"),
        (8, "pipeline = 2\ntensor = 2\nsequence = \"tensor\"\nzero = 3"),
    ] {
        let job = job(model, "clip = 0.5", &format!("slices = 2\n{parallel}"));
        let compare = |world: Arc<Communicator>| {
            let (rank, mut trainer) = (world.rank(), Trainer::among(Arc::clone(&job), 1, world).unwrap());
            let mesh = job.parallel.mesh(workers, rank).unwrap();
            let place = |axis: &str| (mesh.coordinate(axis), mesh.size(axis));
            let planned = kolo_plan::sent_bytes(trainer.session().program(), &place);
            assert_eq!(trainer.session().sent_bytes().values().sum::<u64>(), 0);
            for step in 1..3 {
                trainer.step().unwrap();
                let all: BTreeMap<String, u64> = planned.iter().map(|(axis, one)| (axis.clone(), one * step)).collect();
                assert_eq!(trainer.session().sent_bytes(), all, "rank {rank} of {workers}, {parallel}");
            }
            let used = planned.iter().filter(|(_, bytes)| **bytes > 0).map(|(axis, _)| axis.clone());
            used.collect::<Vec<String>>()
        };
        let used: BTreeSet<String> = on_ranks(workers, compare).into_iter().flatten().collect();
        let wanted = ["context", "data", "pipeline", "sequence", "tensor"].map(String::from);
        let wanted = wanted.into_iter().filter(|axis| job.parallel.mesh(workers, 0).unwrap().size(axis) > 1);
        assert_eq!(used, wanted.collect(), "{parallel}");
    }
}

/// All ranks look at their grains together, and one speaks.
#[test]
fn a_number_that_is_not_finite_is_found_in_gathered_layers() {
    let text = "[model]\nkind = \"mlp\"\n[data]\nsource = \"builtin:playground\"\nbatch = 32\ngrains = 8\n\
                [train]\nsteps = 60\noptimizer = { kind = \"sgd\", lr = 1000.0 }\n[parallel]\nzero = 3\n";
    let job = crate::job(text);
    let errors = on_ranks(4, |world| {
        kolo_train::run(Arc::clone(&job), &options(WorkerGroup::Workers(world)), &mut Silent).map(|_| ()).unwrap_err()
    });
    let explained: Vec<String> =
        errors.iter().filter(|error| matches!(error, Error::NotFinite { .. })).map(Error::to_string).collect();
    assert_eq!(explained.len(), 1, "{errors:?}");
    assert!(explained[0].contains("forward pass"), "{explained:?}");
}
