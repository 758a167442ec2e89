//! A run that was stopped and goes on, on any number of workers, ends with the weights of one that was not.

use crate::workers::{assert_same, on_ranks, options, report};
use kolo_ckpt::{RealDisk, SharedDisk};
use kolo_train::asynchronous::{self, Roles};
use kolo_train::checkpoint::{CheckpointDir, Every};
use kolo_train::interrupt::Interrupt;
use kolo_train::record::OutDir;
use kolo_train::run_dir::{LOCK, LockText};
use kolo_train::session::{Observer, RunOptions, Silent, WorkerGroup};
use kolo_train::{Error, Job, Report};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::Mutex;

const MODEL: &str = "[model]\nkind = \"mlp\"\ninputs = 17\nhidden = [241]\nclasses = 3\n";
const DATA: &str = "[data]\nsource = \"synthetic:features\"\nbatch = 16\ngrains = 8\nsamples = 200\n";
/// Ten steps to the epoch, and two and a half epochs.
const TRAIN: &str = "[train]\nsteps = 25\nclip = 0.5\noptimizer = { kind = \"adamw\" }\nlog_every = 4\n";

fn text(rest: &str) -> String {
    format!("{MODEL}{DATA}{TRAIN}{rest}")
}

/// Stops the run after a step, and remembers what was saved and said.
#[derive(Default)]
pub struct Stopper {
    after: Option<usize>,
    interrupt: Interrupt,
    saved: Vec<PathBuf>,
    notes: Vec<String>,
}

impl Observer for Stopper {
    fn step(&mut self, step: usize, _: f32, _: f64) {
        if self.after == Some(step) {
            self.interrupt.request();
        }
    }

    fn saved(&mut self, path: &Path) {
        self.saved.push(path.into());
    }

    fn note(&mut self, text: &str) {
        self.notes.push(text.into());
    }
}

fn dir(root: &Path, resume: bool) -> Option<CheckpointDir> {
    Some(CheckpointDir { root: root.into(), required: true, job_text: String::new(), resume })
}

/// One rank's run; stopped after a step, if one is named.
fn one_run(job: &Arc<Job>, group: WorkerGroup, root: &Path, after: Option<usize>, resume: bool) -> (Report, Stopper) {
    let mut stopper = Stopper { after, ..Stopper::default() };
    let checkpoints = dir(root, resume).filter(|_| group.is_rank_zero());
    let options = RunOptions { interrupt: stopper.interrupt.clone(), checkpoints, ..options(group) };
    let outcome = kolo_train::run(Arc::clone(job), &options, &mut stopper);
    (outcome.unwrap_or_else(|error| panic!("{error}")).1, stopper)
}

/// Runs on so many workers, with so many servers if any; what the first one reports.
pub fn run_on(
    job: &Arc<Job>,
    layout: (usize, usize),
    root: &Path,
    after: Option<usize>,
    resume: bool,
) -> (Report, Stopper) {
    let (workers, servers) = layout;
    let roles = Roles { workers, servers, staleness: Some(0) };
    let mut outcomes = match (workers, servers) {
        (1, 0) => return one_run(job, WorkerGroup::Alone, root, after, resume),
        (_, 0) => on_ranks(workers, |world| Some(one_run(job, WorkerGroup::Workers(world), root, after, resume))),
        _ => on_ranks(workers + servers, |world| match world.rank() < workers {
            true => Some(one_run(job, WorkerGroup::Served(world, roles), root, after, resume)),
            false => {
                asynchronous::serve(job, 1, &world, roles, None).unwrap_or_else(|error| panic!("{error}"));
                None
            }
        }),
    };
    outcomes.swap_remove(0).expect("the first is a worker")
}

/// Save with one layout, load with another: one digest.
#[test]
fn a_run_goes_on_in_any_layout() {
    let alone = report(&crate::job(&text("")), WorkerGroup::Alone);
    let layouts = [
        (1, 0, ""),
        (2, 0, "zero = 2"),
        (4, 0, ""),
        (8, 0, "zero = 1"),
        (2, 0, "bucket_mib = 0.001"),
        (2, 2, ""),
        (4, 0, "zero = 3"),
    ];
    for (number, (workers, servers, parallel)) in layouts.into_iter().enumerate() {
        let first = crate::job(&text(&format!("[parallel]\n{parallel}\n")));
        // Stopped within an epoch, and at the end of one.
        let after = [7, 13, 10, 24, 20, 6, 1][number];
        let temp = tempfile::tempdir().unwrap();
        let (stopped, seen) = run_on(&first, (workers, servers), temp.path(), Some(after), false);
        assert_eq!((stopped.ended.as_str(), stopped.steps), ("interrupted", after));
        assert_eq!(seen.saved.len(), 1, "{:?}", seen.notes);
        for (to, (workers, servers, parallel)) in
            layouts.into_iter().enumerate().filter(|(to, _)| (to + number) % 3 != 1)
        {
            let copy = tempfile::tempdir().unwrap();
            copy_tree(temp.path(), copy.path());
            let job = crate::job(&text(&format!("[parallel]\n{parallel}\n")));
            let (resumed, seen) = run_on(&job, (workers, servers), copy.path(), None, true);
            let name = format!("layout {number} after {after}, then {to}: {:?}", seen.notes);
            assert_eq!(resumed.ended, "done", "{name}");
            assert_same(&name, &alone, &resumed);
            assert_eq!(resumed.history.len(), alone.history.len(), "{name}");
        }
    }
}

/// Evaluations within an epoch: where they are due, whether a run was stopped between them or right before one, and the best state
/// of them is kept.
#[test]
fn evaluations_by_steps_go_on_where_they_were() {
    let job = crate::job(&format!("{}[checkpoint]\nbest = \"loss\"\n", text("eval_every = \"7 steps\"\n")));
    let whole = tempfile::tempdir().unwrap();
    let (alone, _) = run_on(&job, (1, 0), whole.path(), None, false);
    let rows = |report: &Report| -> Vec<_> {
        let rows = report.history.iter().map(|row| (row.epoch, row.step, row.loss.to_bits(), row.metrics.clone()));
        rows.collect()
    };
    assert_eq!(
        alone.history.iter().map(|row| (row.epoch, row.step)).collect::<Vec<_>>(),
        [(1, 7), (2, 14), (3, 21), (3, 25)]
    );
    let best = |root: &Path| {
        let listed = kolo_ckpt::list(&RealDisk::shared(), root).unwrap();
        listed.iter().map(|one| one.name.step).collect::<Vec<_>>()
    };
    let losses: Vec<f64> = alone.history.iter().map(|row| row.metrics["eval_loss"]).collect();
    let least = (0..losses.len()).min_by(|a, b| losses[*a].total_cmp(&losses[*b])).unwrap();
    assert!(best(whole.path()).contains(&(alone.history[least].step as u64)), "{losses:?}");
    for (after, workers) in [(7, 1), (10, 2), (20, 4)] {
        let stopped = tempfile::tempdir().unwrap();
        run_on(&job, (workers, 0), stopped.path(), Some(after), false);
        let (resumed, seen) = run_on(&job, (1, 0), stopped.path(), None, true);
        let name = format!("stopped after {after} on {workers}: {:?}", seen.notes);
        assert_same(&name, &alone, &resumed);
        assert_eq!(rows(&resumed), rows(&alone), "{name}");
    }
}

/// The steps after which checkpoints became visible, with the step that was the last by then.
#[derive(Default)]
struct Saves {
    last: usize,
    seen: Vec<(usize, usize)>,
}

impl Observer for Saves {
    fn step(&mut self, step: usize, _: f32, _: f64) {
        self.last = step;
    }

    fn saved(&mut self, path: &Path) {
        let name = path.file_name().unwrap().to_str().unwrap();
        self.seen.push((name.strip_prefix("step-").unwrap().parse().unwrap(), self.last));
    }
}

/// A job that does not say when to save plans no copy of its state. Where there is no memory for one, its steps wait.
#[test]
fn a_default_save_waits_where_there_is_no_memory_for_a_copy() {
    let alone = report(&crate::job(&text("")), WorkerGroup::Alone);
    for workers in [1, 2] {
        let in_group = |job: &Arc<Job>, group: WorkerGroup| {
            let options = group.options(job, 1).unwrap();
            kolo_train::Trainer::in_group(Arc::clone(job), &group, options).unwrap().memory()
        };
        let planned = |job: &Arc<Job>| match workers {
            1 => in_group(job, WorkerGroup::Alone).total(),
            _ => on_ranks(workers, |world| in_group(job, WorkerGroup::Workers(world)).total())[0],
        };
        let total = planned(&crate::job(&text("")));
        for (limit, waits) in [(total + 1024, true), (2 * total, false)] {
            let settings = format!("{}[memory]\nlimit = {limit}\n", text(""));
            let mut job = Arc::into_inner(crate::job(&settings)).unwrap();
            // The clock strikes at every eighth step.
            assert!(job.saving.by_default);
            job.saving.every = Some(Every::Steps(8));
            let (job, temp) = (Arc::new(job), tempfile::tempdir().unwrap());
            assert_eq!(planned(&job), total, "a plan counts no copy");
            let saving = |group: WorkerGroup| {
                let mut saves = Saves::default();
                let checkpoints = dir(temp.path(), false).filter(|_| group.is_rank_zero());
                let options = RunOptions { checkpoints, ..options(group) };
                (kolo_train::run(Arc::clone(&job), &options, &mut saves).unwrap().1, saves.seen)
            };
            let (report, seen) = match workers {
                1 => saving(WorkerGroup::Alone),
                _ => on_ranks(workers, |world| saving(WorkerGroup::Workers(world))).swap_remove(0),
            };
            assert_eq!(report.weights, alone.weights, "{workers} workers, limit {limit}");
            let on_the_way: Vec<_> = seen.iter().filter(|(step, _)| *step < 25).collect();
            assert!(!on_the_way.is_empty() && seen.last() == Some(&(25, 25)), "{seen:?}");
            assert!(on_the_way.iter().all(|(step, last)| (step == last) == waits), "{waits}: {seen:?}");
            assert_eq!(kolo_ckpt::list(&RealDisk::shared(), temp.path()).unwrap().len(), 2, "two are kept");
        }
    }
}

/// What an interrupt leaves of a row is made again when the run goes on.
#[test]
fn an_interrupted_run_has_the_rows_of_one_that_was_not() {
    let job = crate::job(&text(""));
    let rows = |out: &Path| -> Vec<(u64, Vec<String>)> {
        let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
        let row = |line: &str| {
            let row: serde_json::Value = serde_json::from_str(line).unwrap();
            (row["step"].as_u64().unwrap(), row.as_object().unwrap().keys().cloned().collect())
        };
        text.lines().map(row).collect()
    };
    let trained = |out: &Path, after: Option<usize>, resume: bool| {
        let mut stopper = Stopper { after, ..Stopper::default() };
        let checkpoints = dir(&out.join("checkpoints"), resume);
        let out = Some(kolo_train::record::OutDir::new(out.into(), true));
        let options =
            RunOptions { interrupt: stopper.interrupt.clone(), checkpoints, out, ..options(WorkerGroup::Alone) };
        kolo_train::run(Arc::clone(&job), &options, &mut stopper).unwrap_or_else(|error| panic!("{error}"));
    };
    let whole = tempfile::tempdir().unwrap();
    trained(whole.path(), None, false);
    // Within an epoch, and at the end of one, before its evaluation.
    for after in [7, 10] {
        let stopped = tempfile::tempdir().unwrap();
        trained(stopped.path(), Some(after), false);
        trained(stopped.path(), None, true);
        assert_eq!(rows(stopped.path()), rows(whole.path()), "stopped after {after}");
    }
}

/// One, two, four and eight workers, with and without ZeRO: saved by each and loaded by each.
#[test]
fn every_number_of_workers_goes_on_from_every_other() {
    let short = |zero: usize| {
        let job = text(&format!("[parallel]\nzero = {zero}\n")).replace("steps = 25", "steps = 4");
        crate::job(&job.replace("hidden = [241]", "hidden = [37]"))
    };
    let alone = report(&short(0), WorkerGroup::Alone);
    let layouts = [1, 2, 4, 8].into_iter().flat_map(|workers| [(workers, 0), (workers, 1)]);
    for (number, (workers, zero)) in layouts.clone().enumerate() {
        let (saved, after) = (tempfile::tempdir().unwrap(), 1 + number % 3);
        let (stopped, _) = run_on(&short(zero), (workers, 0), saved.path(), Some(after), false);
        assert_eq!((stopped.ended.as_str(), stopped.steps), ("interrupted", after));
        for (next, next_zero) in layouts.clone() {
            let copy = tempfile::tempdir().unwrap();
            copy_tree(saved.path(), copy.path());
            let (resumed, seen) = run_on(&short(next_zero), (next, 0), copy.path(), None, true);
            let name = format!("{workers} workers, zero = {zero}, then {next}, zero = {next_zero}: {:?}", seen.notes);
            assert_eq!(resumed.ended, "done", "{name}");
            assert_same(&name, &alone, &resumed);
        }
    }
}

/// Weights that are rounded by chance are rounded by the same chance when the run goes on, on another layout.
#[test]
fn rounding_goes_on_where_it_was() {
    let job = |parallel: &str| {
        crate::job(&text(&format!("precision = \"bf16\"\nrounding = \"stochastic\"\n[parallel]\n{parallel}\n")))
    };
    let alone = report(&job(""), WorkerGroup::Alone);
    for (from, to) in [((1, ""), (1, "")), ((2, "zero = 1"), (4, "zero = 3")), ((4, "zero = 3"), (1, ""))] {
        let temp = tempfile::tempdir().unwrap();
        run_on(&job(from.1), (from.0, 0), temp.path(), Some(7), false);
        let (resumed, seen) = run_on(&job(to.1), (to.0, 0), temp.path(), None, true);
        assert_same(&format!("{from:?}, then {to:?}: {:?}", seen.notes), &alone, &resumed);
    }
}

pub fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => copy_tree(&entry.path(), &to.join(entry.file_name())),
            false => std::fs::copy(entry.path(), to.join(entry.file_name())).map(|_| ()).unwrap(),
        }
    }
}

fn steps(root: &Path) -> Vec<u64> {
    let disk: SharedDisk = RealDisk::shared();
    let listed = kolo_ckpt::list(&disk, root).unwrap();
    listed.iter().map(|listed| listed.checkpoint.as_ref().unwrap().header().step).collect()
}

#[test]
fn checkpoints_on_the_way_change_nothing_and_the_newest_are_kept() {
    let alone = report(&crate::job(&text("")), WorkerGroup::Alone);
    for (workers, parallel) in [(1, ""), (4, "zero = 1")] {
        let job = crate::job(&text(&format!("[checkpoint]\nevery = \"3 steps\"\nkeep = 2\n[parallel]\n{parallel}\n")));
        let temp = tempfile::tempdir().unwrap();
        let (saved, seen) = run_on(&job, (workers, 0), temp.path(), None, false);
        assert_same("with checkpoints", &alone, &saved);
        let kept = steps(temp.path());
        assert_eq!((kept.len(), kept.last()), (2, Some(&25)), "{kept:?} {:?}", seen.notes);
        // Nothing unfinished is left.
        let hidden = std::fs::read_dir(temp.path())
            .unwrap()
            .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with('.'));
        assert_eq!(hidden.count(), 0);
        // A run that has ended stays ended.
        let (again, _) = run_on(&job, (workers, 0), temp.path(), None, true);
        assert_eq!((again.weights, again.metrics), (alone.weights.clone(), alone.metrics.clone()));
        assert_eq!(steps(temp.path()), kept);
    }
}

#[test]
fn the_best_stays_whatever_comes_after() {
    let rest = "[checkpoint]\nevery = \"1 epoch\"\nkeep = 1\nbest = \"loss\"\n";
    let job = crate::job(&format!("{MODEL}{DATA}{SPOILING}{rest}").replace("epochs = 8", "epochs = 5"));
    let temp = tempfile::tempdir().unwrap();
    let (report, _) = run_on(&job, (1, 0), temp.path(), None, false);
    let losses: Vec<f64> = report.history.iter().map(|row| row.metrics["eval_loss"]).collect();
    let best = (0..losses.len()).min_by(|a, b| losses[*a].total_cmp(&losses[*b])).unwrap();
    assert!(best + 1 < losses.len(), "the last is not the best: {losses:?}");
    let kept = steps(temp.path());
    assert_eq!(kept, [(best as u64 + 1) * 10, 50], "{losses:?}");
}

/// A rate that spoils what was learnt, so that later evaluations are worse.
const SPOILING: &str =
    "[train]\nepochs = 8\noptimizer = { kind = \"sgd\", lr = 6.0 }\nschedule = { kind = \"constant\", warmup = 50 }\n";

/// A run that stopped early is over, however often it is resumed, on whatever number of workers.
#[test]
fn a_run_that_stopped_early_stays_stopped() {
    let job = crate::job(&format!("{MODEL}{DATA}{SPOILING}early_stop = {{ metric = \"loss\", patience = 2 }}\n"));
    let temp = tempfile::tempdir().unwrap();
    let (stopped, _) = run_on(&job, (1, 0), temp.path(), None, false);
    assert_eq!(stopped.ended, "early stop");
    assert!(stopped.steps < job.total_steps, "{}", stopped.steps);
    let kept = steps(temp.path());
    for workers in [1, 2] {
        let (again, _) = run_on(&job, (workers, 0), temp.path(), None, true);
        assert_eq!((again.ended.as_str(), again.steps), ("early stop", stopped.steps), "{workers}");
        assert_eq!((again.weights, again.metrics), (stopped.weights.clone(), stopped.metrics.clone()));
        assert_eq!(again.history.len(), stopped.history.len());
        assert!(again.history.iter().is_sorted_by(|row, next| row.seconds <= next.seconds));
        assert_eq!(steps(temp.path()), kept);
    }
}

/// A value of one metric is not compared with one of another.
#[test]
fn the_best_of_another_metric_does_not_count() {
    let with = |best: &str| crate::job(&text(&format!("[checkpoint]\nkeep = 1\nbest = \"{best}\"\n")));
    let temp = tempfile::tempdir().unwrap();
    // Accuracies are below one and may not get better; losses are.
    let (first, _) = run_on(&with("loss"), (1, 0), temp.path(), Some(12), false);
    assert!(first.metrics["eval_loss"] > 0.0);
    let (_, seen) = run_on(&with("accuracy"), (1, 0), temp.path(), None, true);
    let saved = |step: &str| seen.saved.iter().any(|path| path.ends_with(step));
    assert!(saved("step-00000020") && saved("step-00000025"), "{:?}", seen.saved);
}

/// Where there are checkpoints and none can be read, a run does not begin anew beside them.
#[test]
fn a_run_does_not_start_over_beside_damaged_checkpoints() {
    let job = crate::job(&text("[checkpoint]\nevery = \"5 steps\"\n"));
    let temp = tempfile::tempdir().unwrap();
    run_on(&job, (1, 0), temp.path(), Some(12), false);
    let kept = steps(temp.path());
    assert!(kept.len() > 1, "{kept:?}");
    for step in &kept {
        let manifest = temp.path().join(format!("step-{step:08}/manifest.json"));
        std::fs::File::options().write(true).open(manifest).unwrap().set_len(100).unwrap();
    }
    let names = || {
        let items = std::fs::read_dir(temp.path()).unwrap();
        items.map(|item| item.unwrap().file_name()).collect::<std::collections::BTreeSet<_>>()
    };
    let before = names();
    for workers in [1, 2] {
        let failed = |group: WorkerGroup| {
            let options = RunOptions { checkpoints: dir(temp.path(), true), ..options(group) };
            kolo_train::run(Arc::clone(&job), &options, &mut Silent).map(|_| ()).unwrap_err().to_string()
        };
        let errors = match workers {
            1 => vec![failed(WorkerGroup::Alone)],
            _ => on_ranks(workers, |world| failed(WorkerGroup::Workers(world))),
        };
        for error in errors {
            let said = format!("none of the {} checkpoints can be read; ", kept.len());
            assert!(error.contains(&said) && error.contains("step-00000012"), "{error}");
            assert!(error.contains("--overwrite"), "{error}");
        }
        assert_eq!(names(), before);
    }
}

/// A key that changes nothing may be written where it was not before, or left out.
#[test]
fn free_keys_may_come_and_go() {
    let temp = tempfile::tempdir().unwrap();
    run_on(&crate::job(&text("")), (1, 0), temp.path(), Some(6), false);
    let without = text("").replace("log_every = 4\n", "");
    let as_epochs = without.replace("steps = 25", "epochs = 2");
    let prefetched = without.replace("samples = 200\n", "samples = 200\nprefetch = 3\nthreads = 1\n");
    for (number, changed) in [&without, &as_epochs, &prefetched].into_iter().enumerate() {
        let copy = tempfile::tempdir().unwrap();
        copy_tree(temp.path(), copy.path());
        let job = crate::job(changed);
        let (resumed, _) = run_on(&job, (1, 0), copy.path(), None, true);
        assert_same(&format!("change {number}"), &report(&job, WorkerGroup::Alone), &resumed);
    }
    let stops = format!("{without}early_stop = {{ patience = 2 }}\n");
    let options = RunOptions { checkpoints: dir(temp.path(), true), ..options(WorkerGroup::Alone) };
    let error = kolo_train::run(crate::job(&stops), &options, &mut Silent).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("was saved without a `train.early_stop`, but this job has one"), "{error}");
}

/// What a user should know of weights that a run starts from: that they are not the newest, and that some have no place.
#[test]
fn starting_weights_are_described() {
    let temp = tempfile::tempdir().unwrap();
    let source = crate::job(&text("[checkpoint]\nevery = \"5 steps\"\n").replace("[241]", "[241, 3]"));
    run_on(&source, (1, 0), &temp.path().join("checkpoints"), Some(12), false);
    let manifest = temp.path().join("checkpoints/step-00000012/manifest.json");
    std::fs::File::options().write(true).open(manifest).unwrap().set_len(100).unwrap();
    let from = format!("classes = 3\nfrom = \"{}\"\nfresh = [\"layers.1.*\"]\n", temp.path().display());
    let job = crate::job(&text("").replace("classes = 3\n", &from));
    let (_, seen) = run_on(&job, (1, 0), &temp.path().join("new"), Some(1), false);
    let told = |what: &str| seen.notes.iter().any(|note| note.contains(what));
    assert!(told("skipped") && told("step-00000012"), "{:?}", seen.notes);
    assert!(told("has 2 tensors that the model does not have, such as `layers.2."), "{:?}", seen.notes);
}

#[test]
fn another_job_is_refused_and_a_longer_one_is_not() {
    let temp = tempfile::tempdir().unwrap();
    run_on(&crate::job(&text("")), (1, 0), temp.path(), Some(6), false);
    let refused = |change: (&str, &str)| {
        let job = crate::job(&text("").replace(change.0, change.1));
        let options = RunOptions { checkpoints: dir(temp.path(), true), ..options(WorkerGroup::Alone) };
        kolo_train::run(job, &options, &mut Silent).map(|_| ()).unwrap_err()
    };
    let batch = refused(("batch = 16", "batch = 8"));
    assert!(matches!(batch, Error::Checkpoint { .. }), "{batch}");
    assert!(
        batch.to_string().contains("was saved with `data.batch` = 16, but this job has 8\n  hint: change it back"),
        "{batch}"
    );
    assert!(refused(("adamw", "lamb")).to_string().contains("was saved with `train.optimizer."));
    // Slices are part of the job: they say how sums are made.
    let slices = refused(("log_every = 4\n", "log_every = 4\n[parallel]\nslices = 2\n")).to_string();
    assert!(slices.contains("was saved with `parallel.slices` = 1, but this job has 2"), "{slices}");
    let longer = crate::job(&text("").replace("steps = 25", "steps = 30").replace("log_every = 4", "log_every = 5"));
    let (report, seen) = run_on(&longer, (2, 0), temp.path(), None, true);
    assert_eq!(report.steps, 30);
    assert!(seen.notes.iter().any(|note| note.contains("`train.steps` was 25")), "{:?}", seen.notes);
}

/// Every key of `[parallel]` is refused when it changes, or it changes nothing.
#[test]
fn no_key_of_a_layout_changes_the_weights() {
    let model = "[model]\nkind = \"cnn\"\nimage = [2, 11, 9]\nchannels = [4]\nhidden = 8\n[data]\nsource = \"synthetic:images\"\nbatch = 8\n\
                 grains = 4\nsamples = 40\n[train]\nsteps = 6\n";
    let job = |parallel: &str| crate::job(&format!("{model}[parallel]\n{parallel}\n"));
    let alone = report(&job(""), WorkerGroup::Alone);
    let saved = tempfile::tempdir().unwrap();
    run_on(&job(""), (1, 0), saved.path(), Some(2), false);
    let values = [
        ("bucket_mib", "0.001"),
        ("zero", "3"),
        ("prefetch", "2"),
        ("central", "true"),
        ("wire", ""),
        ("tensor", ""),
        ("slices", "2"),
        ("sequence", "\"tensor\""),
        ("tensor_slices", ""),
        ("context", ""),
        ("spatial", ""),
        ("tiles", "[2, 1]"),
        ("layers", "{ \"convs.*\" = { spatial = 2 } }"),
        ("pipeline", ""),
        ("chunks", ""),
        ("schedule", "\"gpipe\""),
        ("stages", ""),
    ];
    for key in kolo_parallel::STRATEGIES.iter().flat_map(|kind| kind.keys) {
        let (_, value) = values.iter().find(|(name, _)| *name == key.name).expect("a value for every key");
        // What needs workers, another model or a job that promises nothing has no value here.
        if value.is_empty() {
            continue;
        }
        let copy = tempfile::tempdir().unwrap();
        copy_tree(saved.path(), copy.path());
        let options = RunOptions { checkpoints: dir(copy.path(), true), ..options(WorkerGroup::Alone) };
        let outcome = kolo_train::run(job(&format!("{} = {value}", key.name)), &options, &mut Silent);
        match outcome {
            Ok((_, report)) => assert_eq!(report.weights, alone.weights, "{} = {value}", key.name),
            Err(error) => assert!(error.to_string().contains(&format!("`parallel.{}", key.name)), "{error}"),
        }
        assert_eq!(key.of_job, ["slices", "sequence", "tensor_slices", "tiles", "layers", "wire"].contains(&key.name));
    }
}

#[test]
fn a_damaged_checkpoint_is_passed_over() {
    let alone = report(&crate::job(&text("")), WorkerGroup::Alone);
    let job = crate::job(&text("[checkpoint]\nevery = \"5 steps\"\n"));
    let temp = tempfile::tempdir().unwrap();
    run_on(&job, (1, 0), temp.path(), Some(14), false);
    let newest = temp.path().join("step-00000014");
    let weights = std::fs::read_dir(&newest).unwrap().map(|entry| entry.unwrap().path());
    let weights = weights.into_iter().find(|path| path.to_string_lossy().contains("weights")).unwrap();
    let mut bytes = std::fs::read(&weights).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    let (resumed, seen) = run_on(&job, (2, 0), temp.path(), None, true);
    assert!(seen.notes[0].contains("skipped") && seen.notes[0].contains("step-00000014"), "{:?}", seen.notes);
    assert!(seen.notes.iter().any(|note| note.contains("resuming after step ")), "{:?}", seen.notes);
    assert_same("after damage", &alone, &resumed);
}

#[test]
fn a_directory_that_cannot_be_written_stops_no_training() {
    let job = crate::job(&text("[checkpoint]\nevery = \"5 steps\"\n"));
    let alone = report(&job, WorkerGroup::Alone);
    let temp = tempfile::tempdir().unwrap();
    let blocked = temp.path().join("checkpoints");
    // The directory turns into a file after the run has begun: every save fails from then on.
    struct Spoiler(PathBuf, Mutex<Vec<String>>);
    impl Observer for Spoiler {
        fn step(&mut self, step: usize, _: f32, _: f64) {
            if step == 1 {
                std::fs::remove_dir_all(&self.0).unwrap();
                std::fs::write(&self.0, "in the way").unwrap();
            }
        }
        fn note(&mut self, text: &str) {
            self.1.lock().unwrap().push(text.into());
        }
    }
    let mut spoiler = Spoiler(blocked.clone(), Mutex::default());
    let mut options = RunOptions { checkpoints: dir(&blocked, false), ..options(WorkerGroup::Alone) };
    options.checkpoints.iter_mut().for_each(|dir| dir.required = false);
    let (_, report) =
        kolo_train::run(Arc::clone(&job), &options, &mut spoiler).unwrap_or_else(|error| panic!("{error}"));
    assert_same("without checkpoints", &alone, &report);
    let notes = spoiler.1.into_inner().unwrap();
    assert!(!notes.is_empty() && notes.iter().all(|note| note.contains("checkpoints")), "{notes:?}");
    // Where the user asked for the directory, a last state that is lost fails the run.
    std::fs::remove_file(&blocked).unwrap();
    let mut spoiler = Spoiler(blocked.clone(), Mutex::default());
    options.checkpoints.iter_mut().for_each(|dir| dir.required = true);
    let error = kolo_train::run(job, &options, &mut spoiler).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Checkpoint { .. }) && error.to_string().contains("checkpoints"), "{error}");
}

/// Does something to the run's directory after a step.
struct Meddler<'m> {
    after: usize,
    meddle: &'m dyn Fn(),
    notes: Vec<String>,
}

impl Observer for Meddler<'_> {
    fn step(&mut self, step: usize, _: f32, _: f64) {
        if step == self.after {
            (self.meddle)();
        }
    }

    fn note(&mut self, text: &str) {
        self.notes.push(text.into());
    }
}

/// Nothing of a run comes among the files of another one that has its directory by now, and nobody takes what is lost for saved.
#[test]
fn a_directory_that_is_another_by_now_is_left_alone() {
    let job = crate::job(&text("[checkpoint]\nevery = \"2 steps\"\nkeep = 1\n"));
    let run = |out: OutDir, meddle: &dyn Fn()| {
        let checkpoints = dir(&out.path.join("checkpoints"), false);
        let mut meddler = Meddler { after: 7, meddle, notes: Vec::new() };
        let options = RunOptions { checkpoints, out: Some(out), ..options(WorkerGroup::Alone) };
        let outcome = kolo_train::run(Arc::clone(&job), &options, &mut meddler).map(|_| ());
        (outcome.map_err(|error| error.to_string()), meddler.notes)
    };
    // Whether or not the user asked for a directory.
    for required in [true, false] {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("run");
        // A save may be under way, and make a file meanwhile.
        let removed = || while std::fs::remove_dir_all(&path).is_err() {};
        let (ended, notes) = run(OutDir::new(path.clone(), required), &removed);
        let message = ended.unwrap_err();
        assert!(message.contains("run: it was removed or renamed while this run wrote into it"), "{message}");
        // How many saves fail before the end, and whether one was under way, is the clock's.
        let says_why = |note: &String| note.contains("it was removed") || note.contains("No such file or directory");
        assert!(notes.iter().all(says_why), "{notes:?}");
        assert!(!path.exists(), "nothing is made anew");
    }
    let temp = tempfile::tempdir().unwrap();
    let (path, aside) = (temp.path().join("run"), temp.path().join("aside"));
    let theirs = || {
        let names = std::fs::read_dir(path.join("checkpoints")).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect::<Vec<_>>()
    };
    let another = || {
        std::fs::rename(&path, &aside).unwrap();
        std::fs::create_dir_all(path.join("checkpoints/step-00000001")).unwrap();
        let lock = LockText { holder: "process 7 on node3".into(), mark: Some("theirs".into()) };
        std::fs::write(path.join(LOCK), lock.written()).unwrap();
    };
    let (ended, _) = run(OutDir::new(path.clone(), true).marked(Some("ours".into())), &another);
    assert!(ended.unwrap_err().contains("run: it is in use by another run, process 7 on node3"));
    assert_eq!(theirs(), ["step-00000001"]);
    // Nor does one that begins while another has it.
    let (ended, _) = run(OutDir::new(path.clone(), true).marked(Some("ours".into())), &|| {});
    assert!(ended.unwrap_err().contains("run: it is in use by another run, process 7 on node3"));
    assert_eq!(theirs(), ["step-00000001"]);
    // One that has its name again in time has lost nothing.
    let back = tempfile::tempdir().unwrap();
    let (path, aside) = (back.path().join("run"), back.path().join("aside"));
    let (ended, _) = run(OutDir::new(path.clone(), true), &|| std::fs::rename(&path, &aside).unwrap());
    assert!(ended.is_err());
    std::fs::rename(&aside, &path).unwrap();
    let (ended, _) = run(OutDir::new(path.clone(), true), &|| {
        std::fs::rename(&path, &aside).unwrap();
        std::fs::rename(&aside, &path).unwrap();
    });
    assert_eq!(ended, Ok(()));
}
