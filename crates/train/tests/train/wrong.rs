//! A loss that is no number stops the run before the weights are touched and names the culprit. A number of a job file that
//! is out of all proportion is refused.

use crate::trainer;
use kolo_exec::Options;
use kolo_models::MODELS;
use kolo_train::step::{UpdateRule, optimise, training_graph};
use kolo_train::{Error, Job, job_file};

#[test]
fn a_nan_names_its_op_and_layer_and_leaves_the_weights() {
    let text = "[model]\nkind = \"mlp\"\nhidden = [8, 8]\n[data]\nsource = \"builtin:playground\"\nbatch = 32\n[train]\nsteps = 5\n";
    let mut trainer = trainer(text, 2, 2);
    trainer.step().unwrap();
    trainer.store_mut().values_mut("layers.1.weight").unwrap()[3] = f32::NAN;
    let before = trainer.store().snapshot();
    let error = trainer.step().unwrap_err();
    assert_eq!(before, trainer.store().snapshot(), "the update must not run");
    let Error::NotFinite { step, culprit, .. } = &error else { panic!("{error}") };
    assert_eq!(*step, 1);
    assert_eq!(culprit, "op `linear` in layer `layers.1`, forward pass");
    assert!(error.to_string().contains("lower the learning rate"), "{error}");
}

/// A small job of every kind, and the keys that take numbers. Lists take a number, too.
const JOBS: &[(&str, &[&str])] = &[
    (
        "[model]\nkind = \"mlp\"\ninputs = 4\nclasses = 3\nhidden = [8]\n[data]\nsource = \"synthetic:features\"\n\
         samples = 64\nbatch = 8\n",
        &[
            "job.seed",
            "model.inputs",
            "model.hidden",
            "model.classes",
            "data.samples",
            "data.batch",
            "data.grains",
            "data.holdout",
            "data.folds",
            "data.fold",
            "data.noise",
            "train.steps",
            "train.epochs",
            "train.clip",
            "train.eval_every",
            "train.optimizer.lr",
            "train.optimizer.momentum",
            "train.optimizer.weight_decay",
            "train.schedule.warmup",
            "train.early_stop.patience",
            "parallel.zero",
            "parallel.tensor",
            "parallel.bucket_mib",
        ],
    ),
    (
        "[model]\nkind = \"gpt\"\nlayers = 1\nwidth = 8\nheads = 2\ncontext = 4\nvocab = 9\n[data]\n\
         source = \"synthetic:tokens\"\nsamples = 64\nbatch = 8\n",
        &["model.layers", "model.width", "model.heads", "model.context", "model.vocab", "model.dropout"],
    ),
    (
        "[model]\nkind = \"lstm\"\nlayers = 1\nwidth = 8\n[data]\nsource = \"builtin:waves\"\nsamples = 64\nbatch = 8\n",
        &["model.layers", "model.width", "model.outputs", "data.context", "data.waves", "data.noise", "data.samples"],
    ),
    (
        "[model]\nkind = \"cnn\"\nimage = [1, 8, 8]\nclasses = 3\n[data]\nsource = \"synthetic:images\"\nsamples = 64\nbatch = 8\n",
        &["model.channels", "model.hidden", "model.image", "model.classes"],
    ),
    ("[model]\nkind = \"mlp\"\n[data]\nsource = \"builtin:addition\"\n", &["data.digits"]),
    ("[model]\nkind = \"mlp\"\n[data]\nsource = \"builtin:playground\"\n", &["data.samples", "data.noise"]),
];

const EXTREMES: [&str; 13] = [
    "0",
    "1",
    "-1",
    "2147483647",
    "2147483648",
    "1000000000000",
    "4611686018427387904",
    "9223372036854775807",
    "-9223372036854775808",
    "1e308",
    "nan",
    "inf",
    "-inf",
];

/// Reads a job and plans its memory, as `kolo plan` does.
fn plan(text: &str, assignment: &str) -> Result<(), Error> {
    let mut root = job_file::parse(text, "job.toml")?;
    job_file::override_with(&mut root, assignment)?;
    let job = Job::read(&root, MODELS)?;
    let graph = training_graph(&*job.model, &UpdateRule::all(&job.optimizer, job.clip), job.grain_batch(), job.grains)?;
    let options = Options::for_grains(job.grains, 2);
    let planned = kolo_plan::memory(&kolo_exec::Program::cpu(optimise(graph), options)).total();
    assert!(planned > 0, "{assignment}");
    assert!(job.schedule.rate(job.optimizer.lr(), job.total_steps - 1).is_finite(), "{assignment}");
    // Any sample of any part can be found.
    let last = job.split.train(job.split.train_len() - 1);
    assert!(last < job.source.len(), "{assignment}");
    Ok(())
}

/// Every number of a job file, however far off: an error with a hint, or a plan; no panic, and nothing taken from memory that
/// is large because a number is.
#[test]
fn extreme_numbers_are_refused_or_planned() {
    let (mut planned, mut refused) = (0, 0);
    for (text, keys) in JOBS {
        for (key, value) in keys.iter().flat_map(|key| EXTREMES.map(|value| (key, value))) {
            for assignment in [format!("{key}={value}"), format!("{key}=[{value}]"), format!("{key}=[{value}, 8, 8]")] {
                match plan(text, &assignment) {
                    Ok(()) => planned += 1,
                    Err(error) => {
                        assert!(error.to_string().contains("hint: "), "{assignment}: {error}");
                        refused += 1;
                    }
                }
            }
        }
    }
    assert!(planned > 50 && refused > 1000, "{planned} planned, {refused} refused");
}

/// A list of layers is as limited as a number of them: nothing is built of one that is too long.
#[test]
fn a_list_of_too_many_layers_is_refused() {
    let (_, mlp) = (JOBS[0].1, JOBS[0].0);
    let widths = vec!["1"; 20_000].join(", ");
    let root = job_file::parse(&mlp.replace("hidden = [8]", &format!("hidden = [{widths}]")), "test.toml").unwrap();
    let error = Job::read(&root, MODELS).unwrap_err().to_string();
    assert!(
        error.starts_with("test.toml:5: `model.hidden` has 20000 layers, but at most 10000 are possible"),
        "{error}"
    );
}
