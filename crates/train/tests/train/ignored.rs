//! Targets that do not count: loss, gradient and metrics are means over those that do, of the whole batch, against the formula
//! in f64; and the same bits in every layout.

use crate::workers::{assert_same, on_ranks, report, with_servers};
use kolo_data::{Column, Field, ReadError, SampleCost, Source};
use kolo_exec::{Feed, Options};
use kolo_graph::field::IGNORED;
use kolo_graph::settings::{SettingError, Settings};
use kolo_models::{Build, MODELS, Model, ModelKind, Outputs, classify};
use kolo_ops::prelude::*;
use kolo_train::asynchronous::Roles;
use kolo_train::session::WorkerGroup;
use kolo_train::{Error, Job, Trainer, job_file};
use std::sync::Arc;

/// A source some of whose targets do not count: of sample `s` the first `s % 5` that counted, which may be all.
#[derive(Debug)]
struct Uneven(Box<dyn Source>);

impl Source for Uneven {
    fn fields(&self) -> &[Field] {
        self.0.fields()
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn fill(&self, sample: usize, field: usize, out: Column<'_>) -> Result<(), ReadError> {
        if field == 0 {
            return self.0.fill(sample, field, out);
        }
        let targets = out.indices();
        self.0.fill(sample, field, Column::I32(targets))?;
        targets.iter_mut().filter(|target| **target != IGNORED).take(sample % 5).for_each(|target| *target = IGNORED);
        Ok(())
    }

    fn cost(&self) -> SampleCost {
        self.0.cost()
    }

    fn describe(&self) -> String {
        self.0.describe()
    }
}

fn read(text: &str, models: &[ModelKind]) -> Job {
    let root = job_file::parse(text, "test.toml").unwrap();
    Job::read(&root, models).unwrap_or_else(|error| panic!("{error}"))
}

fn uneven(text: &str) -> Arc<Job> {
    let job = read(text, MODELS);
    Arc::new(Job { source: Box::new(Uneven(job.source)), ..job })
}

fn gpt(parallel: &str) -> Arc<Job> {
    uneven(&format!(
        "[model]\nkind = \"gpt\"\nlayers = 1\nwidth = 24\nheads = 3\n[data]\nsource = \"builtin:addition\"\nbatch = 16\n\
         grains = 8\nholdout = 0.05\n[train]\nsteps = 4\nclip = 0.5\noptimizer = {{ kind = \"lamb\" }}\n{parallel}"
    ))
}

#[test]
fn the_layout_does_not_matter() {
    let alone = report(&gpt(""), WorkerGroup::Alone);
    for (workers, parallel) in [(2, "zero = 0"), (4, "zero = 0\nbucket_mib = 0"), (4, "zero = 1"), (8, "zero = 1")] {
        let job = gpt(&format!("[parallel]\n{parallel}\n"));
        let reports = on_ranks(workers, |world| report(&job, WorkerGroup::Workers(world)));
        reports.iter().for_each(|other| assert_same(&format!("{workers} workers, {parallel}"), &alone, other));
    }
    for (workers, servers) in [(2, 1), (4, 3)] {
        let (reports, _) = with_servers(&gpt(""), Roles { workers, servers, staleness: Some(0) });
        reports.iter().for_each(|other| assert_eq!(alone.weights, other.weights, "{workers} and {servers}"));
        assert_same(&format!("{workers} workers, {servers} servers"), &alone, &reports[0]);
    }
    // Parts of the model: bits follow from the slices.
    for (workers, slices, parallel) in
        [(2, 1, "pipeline = 2"), (4, 1, "pipeline = 2\nzero = 3"), (2, 2, "tensor = 2"), (4, 2, "tensor = 2\nzero = 1")]
    {
        let alone = report(&gpt(&format!("[parallel]\nslices = {slices}\n")), WorkerGroup::Alone);
        let job = gpt(&format!("[parallel]\nslices = {slices}\n{parallel}\n"));
        let reports = on_ranks(workers, |world| report(&job, WorkerGroup::Workers(world)));
        reports.iter().for_each(|other| assert_same(&format!("{workers} workers, {parallel}"), &alone, other));
    }
    for lanes in [1, 2, 8] {
        let mut trainer =
            Trainer::new(gpt(""), Options { threads: lanes, lanes, grains: 8, slots: 1, ways: 1 }).unwrap();
        (0..4).for_each(|_| _ = trainer.step().unwrap());
        assert_eq!(alone.weights, trainer.store().digest(), "{lanes} lanes");
    }
}

/// Workers that run ahead of each other divide by what they counted themselves. Alone, that is the synchronous run.
#[test]
fn a_worker_of_its_own_divides_by_its_own_count() {
    let text = "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nsource = \"builtin:digits\"\nbatch = 16\ngrains = 4\n\
                [train]\nsteps = 5\noptimizer = { kind = \"sgd\", lr = 0.1 }\n";
    let alone = report(&uneven(text), WorkerGroup::Alone);
    let (reports, _) = with_servers(&uneven(text), Roles { workers: 1, servers: 2, staleness: Some(3) });
    assert_same("one worker, two servers", &alone, &reports[0]);
}

const INPUTS: usize = 5;
const CLASSES: usize = 3;
const BATCH: usize = 16;
const GRAINS: usize = 8;

/// Multinomial regression in f64: weights `[CLASSES, INPUTS]` and biases.
struct Regression {
    weights: Vec<f64>,
    biases: Vec<f64>,
}

impl Regression {
    fn of(trainer: &Trainer) -> Self {
        let values = |name: &str| trainer.store().values(name).unwrap().iter().map(|x| f64::from(*x)).collect();
        Self { weights: values("layers.0.weight"), biases: values("layers.0.bias") }
    }

    fn probabilities(&self, x: &[f32]) -> Vec<f64> {
        let logit = |class: usize| {
            let row = &self.weights[class * INPUTS..(class + 1) * INPUTS];
            self.biases[class] + row.iter().zip(x).map(|(w, x)| w * f64::from(*x)).sum::<f64>()
        };
        let exponentials: Vec<f64> = (0..CLASSES).map(|class| logit(class).exp()).collect();
        let sum: f64 = exponentials.iter().sum();
        exponentials.iter().map(|e| e / sum).collect()
    }

    /// The mean loss over the samples that count, its gradient by the weights, and how many count.
    fn loss(&self, samples: &[(Vec<f32>, i32)]) -> (f64, Vec<f64>, usize) {
        let counted: Vec<_> = samples.iter().filter(|(_, y)| *y != IGNORED).collect();
        let (mut loss, mut gradient) = (0.0, vec![0.0; CLASSES * INPUTS]);
        for (x, y) in &counted {
            let probabilities = self.probabilities(x);
            loss -= probabilities[*y as usize].ln() / counted.len() as f64;
            for at in 0..CLASSES * INPUTS {
                let (class, input) = (at / INPUTS, at % INPUTS);
                let error = probabilities[class] - f64::from(class == *y as usize);
                gradient[at] += error * f64::from(x[input]) / counted.len() as f64;
            }
        }
        (loss, gradient, counted.len())
    }
}

fn regression(train: &str, grains: usize) -> String {
    format!(
        "[model]\nkind = \"mlp\"\nhidden = []\ninputs = {INPUTS}\nclasses = {CLASSES}\n[data]\nsource = \"synthetic:features\"\n\
         samples = 2000\nbatch = {BATCH}\ngrains = {grains}\nholdout = 0.5\n[train]\nsteps = 2\n{train}\n"
    )
}

/// Sixteen samples in grains of two: some grains count none, some one, some both.
fn batch() -> Vec<(Vec<f32>, i32)> {
    let x = |sample: usize| (0..INPUTS).map(|at| ((sample * 7 + at * 3) % 11) as f32 / 5.0 - 1.0).collect();
    let ignored = [0, 1, 2, 5, 6, 7, 8, 12];
    (0..BATCH).map(|at| (x(at), if ignored.contains(&at) { IGNORED } else { (at % CLASSES) as i32 })).collect()
}

fn feed(samples: &[(Vec<f32>, i32)], grains: usize) -> impl Fn(usize, &mut Feed<'_>) + Sync {
    move |grain, feed| {
        let own = &samples[grain * BATCH / grains..(grain + 1) * BATCH / grains];
        feed.f32("x").unwrap().copy_from_slice(&own.iter().flat_map(|(x, _)| x.clone()).collect::<Vec<_>>());
        feed.i32("y").unwrap().copy_from_slice(&own.iter().map(|(_, y)| *y).collect::<Vec<_>>());
    }
}

#[test]
fn loss_gradient_and_norm_are_those_of_the_formula() {
    for grains in [1, 2, GRAINS] {
        let text = regression("optimizer = { kind = \"sgd\", lr = 1.0 }\ngrad_norm = true", grains);
        let mut trainer = crate::trainer(&text, 1, 1);
        let samples = batch();
        let before = Regression::of(&trainer);
        let (loss, gradient, counted) = before.loss(&samples);
        assert_eq!(counted, 8);
        let got = trainer.step_with(feed(&samples, grains)).unwrap();
        assert!((f64::from(got) - loss).abs() < 1e-6, "{grains} grains: loss {got}, formula {loss}");
        let after = Regression::of(&trainer);
        for (at, wanted) in gradient.iter().enumerate() {
            let got = before.weights[at] - after.weights[at];
            assert!((got - wanted).abs() < 1e-6, "{grains} grains: gradient {at} is {got}, formula {wanted}");
        }
        let biases = before.biases.iter().zip(&after.biases).map(|(before, after)| (before - after).powi(2));
        let norm = (gradient.iter().map(|g| g * g).sum::<f64>() + biases.sum::<f64>()).sqrt();
        let got = f64::from(trainer.gradient_norm().unwrap());
        assert!((got - norm).abs() < 1e-6, "{grains} grains: norm {got}, formula {norm}");
    }
}

/// `Σ w[y]·loss ÷ Σ w[y]` over the whole batch, as PyTorch's `cross_entropy(…, weight=w, label_smoothing=s)` has it, and its
/// gradient by differences, however the batch is cut.
#[test]
fn class_weights_are_those_of_pytorch() {
    let weights = [0.5, 2.0, 5.0];
    let formula = |regression: &Regression, samples: &[(Vec<f32>, i32)], smoothing: f64| {
        let (mut loss, mut total) = (0.0, 0.0);
        for (x, y) in samples.iter().filter(|(_, y)| *y != IGNORED) {
            let logs: Vec<f64> = regression.probabilities(x).iter().map(|share| share.ln()).collect();
            let spread: f64 = logs.iter().zip(weights).map(|(log, weight)| -log * weight).sum();
            loss -= (1.0 - smoothing) * weights[*y as usize] * logs[*y as usize];
            loss += smoothing / CLASSES as f64 * spread;
            total += weights[*y as usize];
        }
        loss / total
    };
    for grains in [1, 2, GRAINS] {
        let train = "optimizer = { kind = \"sgd\", lr = 1.0 }\nclass_weights = [0.5, 2.0, 5.0]";
        let mut trainer = crate::trainer(&regression(train, grains), 1, 1);
        let samples = batch();
        let before = Regression::of(&trainer);
        let got = trainer.step_with(feed(&samples, grains)).unwrap();
        let loss = formula(&before, &samples, 0.0);
        assert!((f64::from(got) - loss).abs() < 1e-6, "{grains} grains: loss {got}, formula {loss}");
        let after = Regression::of(&trainer);
        for at in 0..CLASSES * INPUTS {
            let moved = |by: f64| {
                let mut weights = before.weights.clone();
                weights[at] += by;
                formula(&Regression { weights, biases: before.biases.clone() }, &samples, 0.0)
            };
            let wanted = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            let got = before.weights[at] - after.weights[at];
            assert!((got - wanted).abs() < 2e-6, "{grains} grains: gradient {at} is {got}, formula {wanted}");
        }
        // Only ratios count.
        let scaled = train.replace("[0.5, 2.0, 5.0]", "[0.05, 0.2, 0.5]");
        let mut other = crate::trainer(&regression(&scaled, grains), 1, 1);
        let again = other.step_with(feed(&samples, grains)).unwrap();
        assert!((again - got).abs() < 1e-6, "{again} {got}");
    }
    let smooth =
        read(&regression("optimizer = { kind = \"sgd\", lr = 1.0 }\nclass_weights = [0.5, 2.0, 5.0]", 2), &[SMOOTH]);
    let mut trainer = Trainer::new(Arc::new(smooth), Options::for_grains(2, 1)).unwrap();
    let before = Regression::of(&trainer);
    let got = trainer.step_with(feed(&batch(), 2)).unwrap();
    let loss = formula(&before, &batch(), 0.1);
    assert!((f64::from(got) - loss).abs() < 1e-6, "smoothed: loss {got}, formula {loss}");
}

/// The regression with label smoothing, as a model of its own.
#[derive(Debug)]
struct Smooth;

const SMOOTH: ModelKind = ModelKind { name: "mlp", doc: "a regression with label smoothing", make: make_smooth };

fn make_smooth(settings: &Settings, _: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    settings.counts("hidden", &[1])?;
    settings.size("inputs", INPUTS)?;
    settings.size("classes", CLASSES)?;
    Ok(Box::new(Smooth))
}

impl Model for Smooth {
    fn fields(&self) -> Vec<Field> {
        vec![Field::real("x", &[INPUTS]), Field::index("y", &[], CLASSES)]
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        classify(cx.linear("layers.0", cx.field(&fields[0]), CLASSES), cx.field(&fields[1]), 0.1)
    }
}

#[test]
fn class_weights_belong_to_classifiers() {
    let refused = |text: &str| {
        let root = job_file::parse(text, "test.toml").unwrap();
        Job::read(&root, MODELS).map(|_| ()).unwrap_err().to_string()
    };
    let weighted = |weights: &str| regression(&format!("class_weights = {weights}"), 2);
    assert!(refused(&weighted("[1.0, 2.0]")).contains("has 2 weights, but there are 3 classes"));
    assert!(refused(&weighted("[1.0, -2.0, 1.0]")).contains("has the weight -2"));
    assert!(refused(&weighted("\"balance\"")).contains("did you mean \"balanced\"?"));
    assert!(refused(&weighted("{ 3 = 2.0 }")).contains("`train.class_weights.3` is not a class"));
    let waves = "[model]\nkind = \"lstm\"\n[data]\nsource = \"builtin:waves\"\n[train]\nsteps = 1\nclass_weights = \"balanced\"\n";
    assert!(refused(waves).contains("is not one cross-entropy over classes"));
    let job = read(&weighted("{ 1 = 4.0 }"), MODELS);
    assert_eq!(job.class_weights, Some(vec![1.0, 4.0, 1.0]));
}

#[test]
fn clipping_sees_the_gradient_of_the_targets_that_count() {
    let norm = |train: &str| {
        let mut trainer = crate::trainer(&regression(train, GRAINS), 1, 1);
        let before = Regression::of(&trainer);
        trainer.step_with(feed(&batch(), GRAINS)).unwrap();
        let after = Regression::of(&trainer);
        let moved = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
        (moved(&before.weights, &after.weights) + moved(&before.biases, &after.biases)).sqrt()
    };
    let free = norm("optimizer = { kind = \"sgd\", lr = 1.0 }");
    let clipped = norm("optimizer = { kind = \"sgd\", lr = 1.0 }\nclip = 0.1");
    assert!(free > 0.2 && (clipped - 0.1).abs() < 1e-5, "{free} {clipped}");
}

#[test]
fn a_batch_in_which_nothing_counts_changes_nothing() {
    let mut trainer = crate::trainer(&regression("optimizer = { kind = \"sgd\", lr = 1.0 }\nclip = 1.0", 2), 1, 1);
    let samples: Vec<(Vec<f32>, i32)> = batch().into_iter().map(|(x, _)| (x, IGNORED)).collect();
    let before = trainer.store().digest();
    assert_eq!(trainer.step_with(feed(&samples, 2)).unwrap(), 0.0);
    assert_eq!(before, trainer.store().digest());
    assert_eq!(trainer.gradient_norm(), Some(0.0));
}

/// Batches of an evaluation have different counts; the confusion matrix leaves out what does not count.
#[test]
fn an_evaluation_divides_once() {
    let job = uneven(&regression("optimizer = { kind = \"sgd\", lr = 0.5 }", 2));
    let mut trainer =
        Trainer::new(Arc::clone(&job), Options { threads: 1, lanes: 1, grains: 2, slots: 1, ways: 1 }).unwrap();
    (0..2).for_each(|_| _ = trainer.step().unwrap());
    let sample = |at: usize| {
        let (mut x, mut y) = (vec![0.0f32; INPUTS], [0i32]);
        job.source.fill(job.split.held_out(at), 0, Column::F32(&mut x)).unwrap();
        job.source.fill(job.split.held_out(at), 1, Column::I32(&mut y)).unwrap();
        (x, y[0])
    };
    let samples: Vec<(Vec<f32>, i32)> = (0..job.split.held_out_len()).map(sample).collect();
    let regression = Regression::of(&trainer);
    let (loss, _, counted) = regression.loss(&samples);
    assert!(samples.len() > 900 && counted < samples.len() / 2 && counted > 100, "{counted} of {}", samples.len());
    let mut pairs = vec![vec![0i64; CLASSES]; CLASSES];
    for (x, y) in samples.iter().filter(|(_, y)| *y != IGNORED) {
        let probabilities = regression.probabilities(x);
        let said = (0..CLASSES).max_by(|a, b| probabilities[*a].total_cmp(&probabilities[*b])).unwrap();
        pairs[*y as usize][said] += 1;
    }
    let right: i64 = (0..CLASSES).map(|class| pairs[class][class]).sum();
    let evaluation = trainer.evaluate().unwrap().unwrap();
    assert!((evaluation.loss - loss).abs() < 1e-6, "{} {loss}", evaluation.loss);
    assert_eq!(evaluation.get("accuracy"), Some(right as f64 / counted as f64));
    let confusion = evaluation.confusion.clone().unwrap();
    assert_eq!(confusion.report(None).confusion, Some(pairs));
    assert_eq!(evaluation.get("precision"), Some(confusion.macro_means().0));
}

/// A model whose loss is a formula of a mean over the targets that count.
#[derive(Debug)]
struct Squared;

impl Model for Squared {
    fn fields(&self) -> Vec<Field> {
        vec![Field::real("x", &[INPUTS]), Field::index("y", &[], CLASSES)]
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        let (logits, labels) = (cx.linear("layers.0", cx.field(&fields[0]), CLASSES), cx.field(&fields[1]));
        let mean = logits.cross_entropy_with(labels, i64::from(IGNORED), 0.0);
        Outputs { loss: mean.mul(mean).into(), ..classify(logits, labels, 0.0) }
    }
}

/// The same with the cross-entropy itself, which becomes a sum and a count.
#[derive(Debug)]
struct Plain;

impl Model for Plain {
    fn fields(&self) -> Vec<Field> {
        Squared.fields()
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        let logits = cx.linear("layers.0", cx.field(&fields[0]), CLASSES);
        Outputs::new(logits.cross_entropy_with(cx.field(&fields[1]), i64::from(IGNORED), 0.0), logits)
    }
}

fn squared(_: &Settings, _: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    Ok(Box::new(Squared))
}

fn plain(_: &Settings, _: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    Ok(Box::new(Plain))
}

fn own_job(make: kolo_models::Make, samples: usize, grains: usize) -> Job {
    let models = [ModelKind { name: "own", doc: "", make }];
    let text = format!(
        "[model]\nkind = \"own\"\n[data]\nsource = \"synthetic:features\"\nsamples = {samples}\nbatch = {BATCH}\n\
         grains = {grains}\nholdout = 0.5\n[train]\nsteps = 2\noptimizer = {{ kind = \"sgd\", lr = 1.0 }}\n"
    );
    read(&text, &models)
}

fn own_model(make: kolo_models::Make, grains: usize) -> Trainer {
    let job = own_job(make, 100, grains);
    Trainer::new(Arc::new(job), Options { threads: 1, lanes: 1, grains, slots: 1, ways: 1 }).unwrap()
}

/// An evaluation's batch has 256 samples at most. Over several of them a formula of means is no mean, and every rank says so.
#[test]
fn a_formula_of_means_over_batches_is_refused_only_if_something_is_ignored() {
    let job = |make, samples, uneven: bool| {
        let job = own_job(make, samples, 1);
        Arc::new(if uneven { Job { source: Box::new(Uneven(job.source)), ..job } } else { job })
    };
    let trainer = |job| Trainer::new(job, Options { threads: 1, lanes: 1, grains: 1, slots: 1, ways: 1 }).unwrap();
    for (name, job) in [
        ("one batch", job(squared, 300, true)),
        ("nothing is ignored", job(squared, 2000, false)),
        ("a sum and a count", job(plain, 2000, true)),
    ] {
        let evaluation = trainer(job).evaluate().unwrap_or_else(|error| panic!("{name}: {error}")).unwrap();
        assert!(evaluation.get("ignored").is_none(), "{evaluation:?}");
    }
    let error = trainer(job(squared, 2000, true)).evaluate().unwrap_err();
    let Error::IgnoredInEvaluation { targets, first: 0, end: 256, batches: 4 } = error else { panic!("{error}") };
    assert!((1..256).contains(&targets), "{targets}");
    let (name, wanted) = (error.to_string(), "samples 0..256 are ignored");
    assert!(name.contains(wanted) && name.contains("Mean::counted"), "{name}");
    let errors = on_ranks(2, |world| {
        let job = Arc::new(Job { grains: 2, ..Arc::into_inner(job(squared, 2000, true)).unwrap() });
        Trainer::among(job, 1, world).unwrap().evaluate().unwrap_err().to_string()
    });
    assert_eq!(errors, [name.clone(), name], "all ranks say the same");
}

#[test]
fn a_formula_of_means_over_grains_is_refused_only_if_something_is_ignored() {
    let all: Vec<(Vec<f32>, i32)> = batch().into_iter().map(|(x, y)| (x, y.max(0))).collect();
    let mut trainer = own_model(squared, GRAINS);
    trainer.step_with(feed(&all, GRAINS)).unwrap();
    let before = trainer.store().digest();
    let error = trainer.step_with(feed(&batch(), GRAINS)).unwrap_err();
    assert!(matches!(error, Error::Ignored { targets: 8, step: 1, grains: GRAINS }), "{error}");
    assert_eq!(before, trainer.store().digest(), "the weights were left as they were");
    own_model(squared, 1).step_with(feed(&batch(), 1)).unwrap();
}

#[test]
fn a_models_own_cross_entropy_counts_by_itself() {
    let losses = [1, GRAINS].map(|grains| own_model(plain, grains).step_with(feed(&batch(), grains)).unwrap());
    assert!((losses[0] - losses[1]).abs() < 1e-6, "{losses:?}");
}

/// Tokens and targets of one's own, most of which do not count.
const ROWS: usize = 40;
const LENGTH: usize = 6;
const WORDS: i32 = 9;

fn sequence(row: usize) -> ([i32; LENGTH], [i32; LENGTH]) {
    let x = std::array::from_fn(|at| ((row * 5 + at * at) % WORDS as usize) as i32);
    let y = std::array::from_fn(|at| if (row + at).is_multiple_of(3) { (x[at] + 1) % WORDS } else { IGNORED });
    (x, y)
}

/// A NumPy file of rows of i32.
fn npy(row: impl Fn(usize) -> [i32; LENGTH]) -> Vec<u8> {
    let mut header = format!("{{'descr': '<i4', 'fortran_order': False, 'shape': ({ROWS}, {LENGTH}), }}");
    while (header.len() + 11) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend((0..ROWS).flat_map(row).flat_map(i32::to_le_bytes));
    bytes
}

/// The same sequences as JSON Lines, NumPy arrays and safetensors.
fn write_sequences(root: &std::path::Path) -> [String; 3] {
    let lines: Vec<String> =
        (0..ROWS).map(sequence).map(|(x, y)| format!("{{\"x\": {x:?}, \"y\": {y:?}}}\n")).collect();
    std::fs::write(root.join("a.jsonl"), lines.concat()).unwrap();
    std::fs::write(root.join("x.npy"), npy(|row| sequence(row).0)).unwrap();
    std::fs::write(root.join("y.npy"), npy(|row| sequence(row).1)).unwrap();
    let bytes = ROWS * LENGTH * 4;
    let tensor = |start| {
        format!("{{\"dtype\":\"I32\",\"shape\":[{ROWS},{LENGTH}],\"data_offsets\":[{start},{}]}}", start + bytes)
    };
    let header = format!("{{\"x\":{},\"y\":{}}}", tensor(0), tensor(bytes));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend((0..ROWS).flat_map(|row| sequence(row).0).flat_map(i32::to_le_bytes));
    file.extend((0..ROWS).flat_map(|row| sequence(row).1).flat_map(i32::to_le_bytes));
    std::fs::write(root.join("a.safetensors"), file).unwrap();
    ["a.jsonl", "x.npy", "a.safetensors"].map(|name| root.join(name).display().to_string())
}

/// The mean over all targets that count, as PyTorch's `cross_entropy(…, ignore_index=-1)` and NumPy have it.
#[test]
fn token_sequences_of_files_have_targets_of_their_own() {
    let root = tempfile::tempdir().unwrap();
    let text = |source: &str, model: &str| {
        format!(
            "[model]\n{model}\nlayers = 1\nwidth = 16\n[data]\nsource = \"{source}\"\nbatch = 8\n\
             grains = 4\ntypes = {{ x = \"tokens\" }}\n[train]\nsteps = 4\noptimizer = {{ kind = \"adamw\" }}\n"
        )
    };
    let gpt = |source: &str| text(source, "kind = \"gpt\"\nheads = 2").replace("types = { x = \"tokens\" }\n", "");
    let sources = write_sequences(root.path());
    let mut jobs: Vec<(String, String)> = sources.iter().map(|source| (source.clone(), gpt(source))).collect();
    jobs.push(("an lstm".into(), text(&sources[0], "kind = \"lstm\"")));
    let mut digests = Vec::new();
    for (source, text) in jobs {
        let job = Arc::new(read(&text, MODELS));
        // The largest target that counts is 7, but a language model gives a logit to every token.
        let classes = if source == "an lstm" { 8 } else { WORDS as usize };
        assert_eq!(job.fields, [Field::index("x", &[LENGTH], 9), Field::index("y", &[LENGTH], classes)], "{source}");
        let mut trainer = Trainer::new(Arc::clone(&job), Options::for_grains(4, 1)).unwrap();
        let loss = trainer.evaluate().unwrap().unwrap().loss;
        let (mut total, mut counted) = (0.0f64, 0.0f64);
        for at in 0..job.split.held_out_len() {
            let (x, y) = sequence(job.split.held_out(at));
            let feed = |feed: &mut Feed<'_>| {
                if let Some(place) = feed.i32("x") {
                    place.copy_from_slice(&x);
                }
                if let Some(place) = feed.i32("y") {
                    place.copy_from_slice(&y);
                }
            };
            let logits = trainer.predict(1, feed).unwrap();
            for (row, target) in logits.chunks(classes).zip(y).filter(|(_, target)| *target != IGNORED) {
                let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
                total += sum.ln() - f64::from(row[target as usize]);
                counted += 1.0;
            }
        }
        assert!(counted > 5.0 && (loss - total / counted).abs() < 1e-5, "{source}: {loss} {}", total / counted);
        let alone = report(&job, WorkerGroup::Alone);
        let reports = on_ranks(2, |world| report(&job, WorkerGroup::Workers(world)));
        reports.iter().for_each(|other| assert_same(&source, &alone, other));
        digests.push(alone.weights);
    }
    assert!(digests[..3].iter().all(|digest| *digest == digests[0]) && digests[3] != digests[0], "{digests:?}");
}
