//! What is done before the first step takes time in proportion to the depth. Steps are counted, not seconds.

use crate::job;
use kolo_exec::cpu::CpuAbilities;
use kolo_exec::{Collectives, Exchange, ExchangeError, Memory, Options, Program, Session, Store, null};
use kolo_graph::sources::GrainSum;
use kolo_graph::{Graph, Init, Type, layout, rewrite, steps, verify};
use kolo_ops::fuse::fuse_elementwise;
use kolo_ops::optim::SgdPlain;
use kolo_ops::prelude::*;
use kolo_parallel::{Mesh, Purpose, central, data, servers, zero};
use kolo_train::memory_limit::{self, WorkersNow};
use kolo_train::step::{UpdateRule, evaluation_graph, graph_of, optimise, program_of, training_graph};
use std::sync::Arc;

/// With twice the depth, twice the steps, and a little for the logarithm.
const GROWTH_MAX: f64 = 2.35;
const RANKS: usize = 4;

type Passes = Vec<(&'static str, u64)>;

/// Collectives that nobody starts.
#[derive(Debug)]
struct Unstarted;

impl Collectives for Unstarted {
    fn size(&self, _: &str) -> usize {
        RANKS
    }
    fn memory(&self, bytes: usize) -> Result<Memory, ExchangeError> {
        Ok(Memory::new(bytes))
    }
    fn prepare(&self, _: Vec<Exchange>, _: usize) -> Result<usize, ExchangeError> {
        Ok(0)
    }
    fn start(&self, _: usize) {}
    fn wait(&self, _: usize) -> Result<(), ExchangeError> {
        Ok(())
    }
}

fn record<R>(passes: &mut Passes, name: &'static str, work: impl FnOnce() -> R) -> R {
    let (result, taken) = steps::of(work);
    passes.push((name, taken));
    result
}

/// The steps of every pass that a training graph goes through, whoever runs it.
fn passes(make: impl Fn() -> Graph) -> Passes {
    let mut all = Passes::new();
    let raw = record(&mut all, "building", make);
    let graph = record(&mut all, "eliminate_dead", || rewrite::eliminate_dead(raw.clone()));
    let graph = record(&mut all, "merge_common", || rewrite::merge_common(graph));
    let graph = record(&mut all, "fuse_elementwise", || fuse_elementwise(&graph));
    record(&mut all, "verify", || verify::verify(&graph)).unwrap();
    record(&mut all, "printing", || graph.to_string());
    for (name, grains, lanes) in [("one grain", 1, 1), ("a grain per lane", 2, 2), ("grains", 4, 2)] {
        record(&mut all, name, || layout::plan(&graph, grains, lanes, &CpuAbilities));
        let options = Options { threads: 2, lanes, grains, slots: 1, ways: 1 };
        let program = Program::cpu(graph.clone(), options);
        record(&mut all, "null::walk", || null::walk(&program, |_| {}));
        record(&mut all, "cost", || kolo_plan::cost(&program));
        let store = Store::new(&graph, 1);
        record(&mut all, "session", || Session::new(graph.clone(), &store, options));
    }
    let mesh = Mesh::data(RANKS, 1).unwrap();
    let spread = [
        ("data", record(&mut all, "sum_over_ranks", || data::sum_over_ranks(&graph, 1 << 12))),
        ("zero", record(&mut all, "shard_optimizer", || zero::shard_optimizer(&graph, &mesh, 1 << 12))),
        ("central", record(&mut all, "share_weights", || central::share_weights(&graph, &mesh, usize::MAX))),
    ];
    for (name, graph) in &spread {
        let store = Store::new(graph, 1);
        let options = Options { threads: 2, lanes: 2, grains: 4, slots: 1, ways: 1 };
        let session = || Session::with_collectives(graph.clone(), &store, options, Arc::new(Unstarted)).unwrap();
        record(&mut all, name, session);
    }
    let worker = record(&mut all, "worker_graph", || servers::worker_graph(&graph));
    record(&mut all, "a worker's plan", || layout::plan(&worker, 2, 2, &CpuAbilities));
    record(&mut all, "shares", || servers::shares(&graph, 2)).unwrap();
    record(&mut all, "server_graph", || servers::server_graph(&graph, 2, 1));
    all
}

/// Compares the steps for a size with those for twice of it.
fn assert_linear(what: &str, size: usize, make: impl Fn(usize) -> Graph) {
    if !steps::ARE_COUNTED {
        return;
    }
    let (once, twice) = (passes(|| make(size)), passes(|| make(2 * size)));
    for ((name, before), (_, after)) in once.iter().zip(&twice) {
        let growth = *after as f64 / (*before).max(1) as f64;
        assert!(growth < GROWTH_MAX, "{what}: {name} takes {before} steps for {size} and {after} for twice as many");
    }
}

/// A training step on what `model` makes of an input, with plain gradient descent.
fn training(model: impl Fn(&Builder) -> Tensor<'_>) -> Graph {
    let builder = Builder::new();
    let loss = model(&builder);
    let ids: Vec<_> = builder.graph().params().map(|(id, op)| (id, op.name.clone())).collect();
    let params: Vec<Tensor<'_>> = ids.iter().map(|(id, _)| builder.tensor(*id)).collect();
    let grads = kolo_ops::gradients(&builder, loss, 1.0, &params);
    builder.output("loss", loss.then(GrainSum { of: String::new() }, &[]));
    let (lr, scale) = (builder.step_input("lr", Type::f32([])), builder.scalar(1.0));
    for (((_, name), param), grad) in ids.iter().zip(&params).zip(grads) {
        let sum = grad.unwrap().then(GrainSum { of: name.clone() }, &[]);
        builder.update(*param, param.then(SgdPlain { weight_decay: 0.0 }, &[sum, lr, scale]));
    }
    builder.finish().unwrap()
}

fn layer<'b>(builder: &'b Builder, name: &str, x: Tensor<'b>) -> Tensor<'b> {
    x.matmul(builder.param(name, [8, 8], Init::ZEROS)).relu()
}

#[test]
fn a_deep_gpt_is_compiled_in_linear_time() {
    let make = |layers: usize| {
        let job = job(&format!(
            "[model]\nkind = \"gpt\"\nlayers = {layers}\nwidth = 8\nheads = 2\ncontext = 4\nvocab = 16\n\
             [data]\nsource = \"synthetic:tokens\"\nbatch = 8\ngrains = 4\n[train]\nclip = 1.0\n\
             optimizer = {{ kind = \"adamw\" }}\n"
        ));
        training_graph(&*job.model, &UpdateRule::all(&job.optimizer, job.clip), job.grain_batch(), job.grains).unwrap()
    };
    assert_linear("GPT", 24, make);
    let evaluation = |layers: usize| {
        let job = job(&format!("[model]\nkind = \"gpt\"\nlayers = {layers}\n[data]\nsource = \"synthetic:tokens\"\n"));
        steps::of(|| layout::plan(&optimise(evaluation_graph(&*job.model, 2).unwrap()), 1, 1, &CpuAbilities)).1
    };
    assert!(evaluation(32) as f64 <= GROWTH_MAX * evaluation(16) as f64);
}

/// What a rank of each layout runs, from the job on: training and evaluation.
#[test]
fn a_deep_gpt_is_split_in_linear_time() {
    if !steps::ARE_COUNTED {
        return;
    }
    let layouts = [
        ("slices = 2", 1),
        ("tensor = 2\nslices = 2", 2),
        ("tensor = 2\nslices = 2\nsequence = \"tensor\"", 2),
        ("pipeline = 2", 2),
        ("pipeline = 2\nchunks = 2\nschedule = \"interleaved\"", 2),
        ("zero = 2", 2),
        ("zero = 3", 2),
        ("zero = 3\npipeline = 2", 4),
        ("zero = 1\n[memory]\nrecompute = \"blocks\"", 2),
    ];
    for (keys, workers) in layouts {
        for precision in ["f32", "bf16"] {
            let taken = |layers: usize| compiled(layers, keys, precision, workers);
            let (once, twice) = (taken(24), taken(48));
            for ((name, before), (_, after)) in once.iter().zip(&twice) {
                let growth = *after as f64 / (*before).max(1) as f64;
                assert!(
                    growth < GROWTH_MAX,
                    "{keys} in {precision}: {name} takes {before} steps, and {after} for twice"
                );
            }
        }
    }
}

/// The steps to compile a GPT of so many layers for the last of these workers.
fn compiled(layers: usize, keys: &str, precision: &str, workers: usize) -> Passes {
    let job = job(&format!(
        "[model]\nkind = \"gpt\"\nlayers = {layers}\nwidth = 8\nheads = 2\ncontext = 4\nvocab = 16\n\
         [data]\nsource = \"synthetic:tokens\"\nbatch = 8\ngrains = 4\n[train]\nclip = 1.0\nprecision = \"{precision}\"\n\
         optimizer = {{ kind = \"adamw\" }}\n[parallel]\nbucket_mib = 0.01\n{keys}\n"
    ));
    let mesh = job.parallel.mesh(workers, workers - 1).unwrap();
    let mut all = Passes::new();
    let purposes = [("training", Purpose::Training), ("evaluation", Purpose::Evaluation { batch: 2 })];
    for (name, purpose) in purposes {
        let graph = record(&mut all, name, || graph_of(&job, &job.parallel, purpose, &mesh)).unwrap();
        record(&mut all, name, || layout::plan(&graph, 1, 1, &CpuAbilities));
    }
    let options = Options { threads: 1, lanes: 1, grains: 4, slots: 1, ways: 1 };
    record(&mut all, "program", || {
        let program = program_of(&job, &job.parallel, &mesh, options).unwrap();
        kolo_plan::cost(&program)
    });
    all
}

#[test]
fn a_wide_graph_is_compiled_in_linear_time() {
    assert_linear("branches", 100, |branches| {
        training(|builder| {
            let x = builder.input("x", Type::f32([2, 8]));
            let stem = layer(builder, "stem", x);
            let all = (0..branches).map(|at| layer(builder, &format!("branch.{at}"), stem).sum_all());
            all.reduce(|total, next| total.add(next)).unwrap()
        })
    });
}

/// Every level of the way down is read again on the way up.
#[test]
fn a_u_net_is_compiled_in_linear_time() {
    assert_linear("levels", 100, |levels| {
        training(|builder| {
            let mut x = builder.input("x", Type::f32([2, 8]));
            let mut skips = Vec::new();
            for at in 0..levels {
                x = layer(builder, &format!("down.{at}"), x);
                skips.push(x);
            }
            for (at, skip) in skips.into_iter().enumerate().rev() {
                x = layer(builder, &format!("up.{at}"), x.add(skip));
            }
            x.sum_all()
        })
    });
}

/// Long chains of views, and one parameter that every layer reads.
#[test]
fn shared_weights_and_views_are_compiled_in_linear_time() {
    assert_linear("views", 200, |depth| {
        training(|builder| {
            let mut x = builder.input("x", Type::f32([2, 8]));
            for at in 0..depth {
                x = layer(builder, "shared", x).reshape_to([4, 4]).reshape_to([2, 8]);
                if at == depth / 2 {
                    for _ in 0..depth {
                        x = x.reshape_to([16]).reshape_to([2, 8]);
                    }
                }
            }
            x.sum_all()
        })
    });
}

/// A job that no number of workers can run is refused from its parameters alone, before any layout is planned.
#[test]
fn what_can_never_fit_is_refused_before_anything_is_planned() {
    if !steps::ARE_COUNTED {
        return;
    }
    let taken = |limit: u64| {
        let job = job("[model]\nkind = \"gpt\"\nlayers = 24\nwidth = 128\nheads = 2\ncontext = 4\nvocab = 16\n\
                       [data]\nsource = \"synthetic:tokens\"\nbatch = 8\ngrains = 4\n");
        steps::of(|| memory_limit::fitting(&job, limit, WorkersNow { workers: 1, threads: 1 }).unwrap())
    };
    // 4.8 M parameters with their gradients, over 64 workers: 600 kB each.
    let ((never, few), (far, many)) = (taken(500 << 10), taken(2 << 20));
    assert!(never.fitting.is_empty() && never.smallest.is_none() && never.least > Some(500 << 10), "{never:?}");
    assert!(far.fitting.is_empty() && far.smallest.is_some(), "{far:?}");
    assert!(few * 20 < many, "{few} steps for what can never fit, {many} for what does not");
}
