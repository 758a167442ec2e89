//! Half precision: the bits of one worker in every layout, results near those of f32, and steps that f16 leaves out.

use crate::same_bits::jobs;
use crate::workers::{assert_same, on_ranks, report, with_servers};
use kolo_exec::Precision;
use kolo_exec::reference::Reference;
use kolo_graph::DType;
use kolo_models::MODELS;
use kolo_parallel::{Mesh, Purpose};
use kolo_train::asynchronous::Roles;
use kolo_train::session::WorkerGroup;
use kolo_train::step::{LayoutCheck, graph_of};
use kolo_train::{Job, Report, job_file};
use std::sync::Arc;

/// One of the jobs in this precision, with more under `[train]` and `[parallel]`.
fn job(name: &str, train: &str, parallel: &str) -> Arc<Job> {
    let (_, text) = jobs().into_iter().find(|(known, _)| *known == name).expect("a job");
    crate::job(&format!("{text}{train}\n[parallel]\n{parallel}\n"))
}

fn on(workers: usize, job: &Arc<Job>) -> Vec<Report> {
    match workers {
        1 => vec![report(job, WorkerGroup::Alone)],
        _ => on_ranks(workers, |world| report(job, WorkerGroup::Workers(world))),
    }
}

fn assert_layouts(name: &str, train: &str, alone: &str, layouts: &[(usize, &str)]) -> Report {
    let one = report(&job(name, train, alone), WorkerGroup::Alone);
    for (workers, parallel) in layouts {
        for other in on(*workers, &job(name, train, &format!("{alone}\n{parallel}"))) {
            assert_same(&format!("{name}, {train}: {workers} workers, {parallel}"), &one, &other);
            assert_eq!((one.loss_scale, one.skipped_steps), (other.loss_scale, other.skipped_steps), "{parallel}");
        }
    }
    one
}

/// Every strategy that threads can have among them, on the model that all of them can split.
const LAYOUTS: [(usize, &str); 10] = [
    (2, ""),
    (4, "zero = 1"),
    (2, "zero = 2\nbucket_mib = 0"),
    (4, "zero = 3"),
    (2, "pipeline = 2"),
    (2, "tensor = 2"),
    (4, "tensor = 2\npipeline = 2"),
    (4, "tensor = 2\nzero = 3"),
    (1, "\n[memory]\nrecompute = \"blocks\""),
    (2, "pipeline = 2\nschedule = \"bidirectional\"\n[memory]\nrecompute = \"selective\""),
];

#[test]
fn layouts_do_not_matter_in_bf16() {
    assert_layouts("gpt", "precision = \"bf16\"", "slices = 2", &LAYOUTS);
    for sequence in ["heads", "context"] {
        let alone = format!("slices = 2\nsequence = \"{sequence}\"");
        assert_layouts("gpt", "precision = \"bf16\"", &alone, &[(2, "context = 2")]);
    }
    for name in ["cnn", "mlp", "lstm", "resnet18"] {
        let layouts = [(2, "zero = 1"), (4, "zero = 3"), (2, "pipeline = 2"), (4, "pipeline = 2\nzero = 2")];
        assert_layouts(name, "precision = \"bf16\"", "", &layouts);
    }
}

/// Where values are cast, a pipeline is cut as in f32: as many layers, and about as many parameters in each stage.
#[test]
fn pipelines_are_cut_in_bf16_where_they_are_in_f32() {
    let texts = [
        ("gpt", "kind = \"gpt\"\nlayers = 5\nwidth = 24\nheads = 3\ncontext = 8\nvocab = 11", "synthetic:tokens"),
        ("mlp", "kind = \"mlp\"\nhidden = [24, 38, 25]", "builtin:digits"),
        ("cnn", "kind = \"cnn\"\nchannels = [8, 8, 8, 8]\nimage = [3, 32, 32]", "synthetic:images"),
    ];
    for (name, model, source) in texts {
        let job = |precision: &str, parallel: &str| {
            crate::job(&format!(
                "[model]\n{model}\n[data]\nsource = \"{source}\"\nbatch = 8\ngrains = 4\n\
                 [train]\nsteps = 2\nprecision = \"{precision}\"\n[parallel]\n{parallel}\n"
            ))
        };
        let alone = report(&job("bf16", ""), WorkerGroup::Alone);
        for stages in [2, 3, 4] {
            let parallel = format!("pipeline = {stages}");
            let params = |precision: &str| {
                let job = job(precision, &parallel);
                let of = |rank| {
                    let mesh = job.parallel.mesh(stages, rank).expect("a mesh");
                    let graph = graph_of(&job, &job.parallel, Purpose::Training, &mesh).expect("a part");
                    let mut names: Vec<String> = graph.params().map(|(_, op)| op.name.clone()).collect();
                    names.sort();
                    names
                };
                (0..stages).map(of).collect::<Vec<_>>()
            };
            assert_eq!(params("bf16"), params("f32"), "{name}, {stages} stages");
            let split = job("bf16", &parallel);
            on(stages, &split).iter().for_each(|other| assert_same(&format!("{name}, {stages}"), &alone, other));
        }
    }
}

/// A bias that does not learn is added by the first slice alone. Evaluations find it wherever they read it.
#[test]
fn frozen_layers_are_split_in_bf16_as_in_f32() {
    let lstm = "kind = \"lstm\"\nwidth = 13\ncontext = 9\nfeatures = 2\noutputs = 1\nfreeze = [\"head.*\"]";
    let gpt = "kind = \"gpt\"\nlayers = 1\nheads = 3\nwidth = 15\ncontext = 16\nvocab = 13\nfreeze = [\"*.bias\"]";
    let models = [(lstm, "synthetic:series", ""), (gpt, "synthetic:tokens", "sequence = \"tensor\"")];
    for (precision, (model, source, own)) in
        ["f32", "bf16"].into_iter().flat_map(|one| models.map(|model| (one, model)))
    {
        let job = |parallel: &str| {
            crate::job(&format!(
                "[model]\n{model}\n[data]\nsource = \"{source}\"\nsamples = 26\nholdout = 0.2\nbatch = 8\ngrains = 4\n\
                 [train]\nsteps = 2\nprecision = \"{precision}\"\n[parallel]\nslices = 4\n{own}\n{parallel}\n"
            ))
        };
        let alone = report(&job(""), WorkerGroup::Alone);
        for (workers, parallel) in
            [(2, "tensor = 2"), (4, "tensor = 4"), (4, "tensor = 2\npipeline = 2"), (4, "tensor = 2\nzero = 3")]
        {
            let name = format!("{model}, {precision}, {parallel}");
            on(workers, &job(parallel)).iter().for_each(|other| assert_same(&name, &alone, other));
        }
    }
}

const PURE: &str = "precision = \"bf16\"\nrounding = \"stochastic\"";

/// Random numbers are counted by elements of whole parameters, whoever has which.
#[test]
fn layouts_do_not_matter_where_weights_are_rounded_by_chance() {
    let one = assert_layouts("gpt", PURE, "slices = 2", &LAYOUTS);
    let kept = report(&job("gpt", "precision = \"bf16\"", "slices = 2"), WorkerGroup::Alone);
    assert_ne!(one.weights, kept.weights);
    for name in ["cnn", "mlp", "lstm"] {
        assert_layouts(name, PURE, "", &[(2, ""), (4, "zero = 1"), (4, "zero = 3")]);
    }
    for kind in ["sgd", "lamb", "lars", "rmsprop", "adagrad"] {
        let text = |parallel: &str| {
            format!(
                "[model]\nkind = \"mlp\"\nhidden = [9]\n[data]\nsource = \"builtin:playground\"\nbatch = 8\ngrains = 4\n\
                 [train]\nsteps = 5\noptimizer = {{ kind = \"{kind}\" }}\n{PURE}\n[parallel]\n{parallel}\n"
            )
        };
        let one = report(&crate::job(&text("")), WorkerGroup::Alone);
        for zero in ["zero = 1", "zero = 3"] {
            on(4, &crate::job(&text(zero)))
                .iter()
                .for_each(|other| assert_same(&format!("{kind}, {zero}"), &one, other));
        }
    }
}

/// Servers update, so servers round; whole parameters as well as pieces of them.
#[test]
fn servers_round_weights_as_workers_do() {
    for kind in ["sgd", "adamw", "lamb"] {
        let text = format!(
            "[model]\nkind = \"mlp\"\ninputs = 64\nhidden = [300]\nclasses = 10\n[data]\nsource = \"synthetic:features\"\n\
             batch = 8\ngrains = 4\nsamples = 64\n[train]\nsteps = 4\noptimizer = {{ kind = \"{kind}\" }}\n{PURE}\n"
        );
        let job = crate::job(&text);
        let alone = report(&job, WorkerGroup::Alone);
        for servers in [1, 3] {
            let (reports, _) = with_servers(&job, Roles { workers: 2, servers, staleness: Some(0) });
            let name = format!("{kind}, {servers} servers");
            reports.iter().for_each(|other| assert_eq!(alone.weights, other.weights, "{name}"));
            assert_same(&name, &alone, &reports[0]);
        }
    }
}

/// Strategies are tried on what they will split: a layout is possible in a precision if its graph can be made.
#[test]
fn layouts_are_checked_in_the_precision_of_the_job() {
    for precision in ["f32", "bf16"] {
        for stages in [2, 3, 4, 6, 8] {
            let job = crate::job(&format!(
                "[model]\nkind = \"gpt\"\nlayers = 6\nwidth = 24\nheads = 3\n[data]\nsource = \"builtin:addition\"\nbatch = 16\n\
                 grains = 8\n[train]\nsteps = 1\nprecision = \"{precision}\"\n[parallel]\npipeline = {stages}\n"
            ));
            let mesh = job.parallel.mesh(stages, 0).unwrap();
            let made =
                graph_of(&job, &job.parallel, Purpose::Training, &mesh).map(drop).map_err(|error| error.to_string());
            let check = LayoutCheck::new(&job).unwrap();
            let checked = check.run(&job.parallel, stages).map_err(|error| error.to_string());
            assert_eq!(checked.is_ok(), made.is_ok(), "{precision}, {stages} stages: {checked:?} and {made:?}");
        }
    }
}

/// After a step every weight is one of bf16; a run that goes on from the middle ends where one that never stopped does.
#[test]
fn rounded_weights_are_of_bf16_and_learn() {
    let text = |train: &str| {
        format!(
            "[model]\nkind = \"mlp\"\nhidden = [32]\n[data]\nsource = \"builtin:playground\"\nbatch = 32\ngrains = 2\n\
             [train]\nsteps = 300\noptimizer = {{ kind = \"adamw\", lr = 3e-3 }}\n{train}\n"
        )
    };
    let last = |train: &str| {
        let mut trainer = crate::trainer(&text(train), 1, 1);
        let losses: Vec<f32> = (0..300).map(|_| trainer.step().unwrap_or_else(|error| panic!("{error}"))).collect();
        (losses[250..].iter().sum::<f32>() / 50.0, trainer)
    };
    let (full, _) = last("");
    let (pure, trainer) = last(PURE);
    for entry in trainer.store().entries().iter().filter(|entry| entry.is_param()) {
        let values = trainer.store().values(&entry.name).expect("a weight");
        assert!(values.iter().all(|value| value.to_bits() & 0xffff == 0), "`{}` has more digits", entry.name);
    }
    assert!(pure < full * 1.5 + 0.02, "{pure} and {full}");
}

/// A factor that is too large at first: steps are left out, on every layout the same, until it fits.
#[test]
fn layouts_do_not_matter_in_f16_and_an_overflow_changes_nothing() {
    let layouts = [LAYOUTS[0], LAYOUTS[1], LAYOUTS[3], LAYOUTS[5], LAYOUTS[7], LAYOUTS[8]];
    let train = "precision = \"f16\"\nloss_scale = 16777216";
    let one = assert_layouts("gpt", train, "slices = 2", &layouts);
    let skipped = one.skipped_steps.expect("f16 counts them");
    assert!(skipped > 0 && skipped < one.steps, "{skipped} of {} steps", one.steps);
    // Halved once for each step that was left out.
    assert!(one.loss_scale.is_some_and(|scale| scale <= 16_777_216.0 / 2.0), "{:?}", one.loss_scale);
    for name in ["mlp", "cnn", "lstm"] {
        let one = assert_layouts(name, "precision = \"f16\"", "", &[(2, "zero = 2")]);
        assert_eq!(one.skipped_steps, Some(0), "{name}");
    }
}

/// A step that is left out leaves parameters and moments as they are, whatever the optimizer.
#[test]
fn a_skipped_step_changes_the_factor_alone() {
    for kind in ["adamw", "sgd", "lamb", "lars", "rmsprop", "adagrad"] {
        let text = format!(
            "[model]\nkind = \"mlp\"\nhidden = [9]\n[data]\nsource = \"builtin:playground\"\nbatch = 2\ngrains = 1\n\
             [train]\nsteps = 8\noptimizer = {{ kind = \"{kind}\" }}\nprecision = \"f16\"\nloss_scale = 16777216\n"
        );
        let mut trainer = crate::trainer(&text, 1, 1);
        let before = trainer.store().digest();
        trainer.step().unwrap_or_else(|error| panic!("{kind}: {error}"));
        assert_eq!(trainer.loss_scale(), Some([8_388_608.0, 1.0]), "{kind}");
        assert_eq!(trainer.store().digest(), before, "{kind}: parameters");
        for entry in trainer.store().entries().iter().filter(|entry| entry.name.starts_with("optim.")) {
            let values = trainer.store().values(&entry.name).expect("a moment");
            assert!(values.iter().all(|value| *value == 0.0), "{kind}: `{}`", entry.name);
        }
        assert_eq!(trainer.store().values("loss_scale.factor"), Some(&[8_388_608.0][..]), "{kind}");
        (1..8).for_each(|_| _ = trainer.step().unwrap_or_else(|error| panic!("{kind}: {error}")));
        assert_ne!(trainer.store().digest(), before, "{kind}: it learns in the end");
    }
}

/// Losses of the first steps are those of f32 within the rounding of halves.
#[test]
fn steps_are_near_those_of_f32() {
    for (name, text) in jobs().into_iter().filter(|(name, _)| *name != "resnet18") {
        let losses = |precision: &str| {
            let mut trainer = crate::trainer(&format!("{text}precision = \"{precision}\"\n"), 1, 1);
            (0..4).map(|_| trainer.step().unwrap_or_else(|error| panic!("{error}"))).collect::<Vec<f32>>()
        };
        let full = losses("f32");
        for precision in ["bf16", "f16"] {
            for (step, (half, full)) in losses(precision).iter().zip(&full).enumerate() {
                let near = (half - full).abs() <= 0.02 * full.abs().max(0.1);
                assert!(near, "{name} in {precision}, step {step}: {half} and {full}");
            }
        }
    }
}

/// Layers are shared in bf16 as they are in f32: as many parameters are cut, and partial sums are exchanged.
#[test]
fn halves_are_split_as_f32_is() {
    let shards = |precision: &str| {
        let job = job("gpt", &format!("precision = \"{precision}\""), "slices = 2\ntensor = 2");
        let mesh = job.parallel.mesh(2, 0).unwrap();
        let graph = graph_of(&job, &job.parallel, Purpose::Training, &mesh).unwrap();
        let sums = graph.nodes.iter().filter(|node| node.op.is::<kolo_graph::collective::AxisSum>());
        let types: Vec<DType> = sums.map(|node| graph.ty(node.outputs[0]).dtype).collect();
        assert!(types.iter().all(|dtype| *dtype == DType::F32), "{precision}: terms of sums are f32");
        (graph.params().filter(|(_, param)| !param.region.is_empty()).count(), types.len())
    };
    let [(cut, sums), full] = [shards("bf16"), shards("f32")];
    assert!(cut > 4 && sums > 2, "{cut} parameters are cut, {sums} sums");
    assert_eq!((cut, sums), full);
}

/// Between two ops of a grain there is no activation in f32 that a product made or reads.
#[test]
fn what_products_read_and_make_is_halves() {
    for (name, _) in jobs() {
        let job = job(name, "precision = \"bf16\"", "");
        let graph = graph_of(&job, &job.parallel, Purpose::Training, &Mesh::alone()).unwrap();
        let products = graph.nodes.iter().filter(|node| node.op.work() != kolo_graph::Work::Stream);
        let mut count = 0;
        for node in products {
            let floats = node.inputs.iter().map(|id| graph.ty(*id)).filter(|ty| ty.rank() > 1 && ty.dtype.is_float());
            // What attention keeps of its sums is f32.
            let halves = floats.filter(|ty| ty.dtype == DType::BF16).count();
            assert!(
                halves >= 2 || node.inputs.len() < 3,
                "{name}: {} reads {:?}",
                node.op.name(),
                graph.types(&node.inputs)
            );
            count += 1;
        }
        assert!(count > 2, "{name}");
        let stays = |id: &kolo_graph::ValueId| graph.ty(*id).dtype == DType::F32;
        assert!(graph.updates.iter().all(|(state, value)| stays(state) && stays(value)), "{name}: states are f32");
    }
}

#[test]
fn a_precision_that_a_device_lacks_is_refused() {
    let read = |train: &str| {
        let text = format!("[model]\nkind = \"mlp\"\n[data]\nsource = \"builtin:digits\"\n[train]\n{train}\n");
        Job::read(&job_file::parse(&text, "test.toml").unwrap(), MODELS)
    };
    let mut job = read("precision = \"tf32\"").unwrap();
    assert_eq!(job.precision, Precision::Tf32);
    let error = job.run_on(Arc::new(Reference)).unwrap_err().to_string();
    assert!(error.contains("`train.precision` is \"tf32\", which the device `reference` does not have"), "{error}");
    assert!(job.check_executor().unwrap_err().to_string().contains("`cpu`"));
    let error = read("precision = \"bf16\"\nloss_scale = 2").unwrap_err().to_string();
    assert!(error.contains("test.toml:7") && error.contains("has no effect with `precision = \"bf16\"`"), "{error}");
    let error = read("precision = \"f16\"\nloss_scale = 3").unwrap_err().to_string();
    assert!(error.contains("is 3, which is not a power of two"), "{error}");
    let error = read("precision = \"f16\"\n[parallel]\npipeline = 2").unwrap_err().to_string();
    assert!(error.contains("is 2, which cannot be combined with `train.precision = \"f16\"`"), "{error}");
    let error = read("precision = \"fp16\"").unwrap_err().to_string();
    assert!(error.contains("did you mean \"f16\"?"), "{error}");
}
