//! Where and when samples are made does not matter; a sample that cannot be read ends the run before its step.

use crate::workers::{on_ranks, report};
use kolo_comm::{Communicator, Fault, Watch, thread};
use kolo_data::{Column, Field, ReadError, SampleCost, Source};
use kolo_exec::Options;
use kolo_models::MODELS;
use kolo_train::interrupt::Interrupt;
use kolo_train::report::Planned;
use kolo_train::session::{RunOptions, Silent, WorkerGroup};
use kolo_train::{Error, HeldBatch, Job, Trainer, job_file};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// A source that says it reads, and may be slow or broken.
#[derive(Debug)]
struct Reader {
    inner: Box<dyn Source>,
    pause: Duration,
    /// The sample that cannot be read.
    broken: Option<usize>,
    /// Fills so far.
    fills: Arc<AtomicUsize>,
}

impl Source for Reader {
    fn fields(&self) -> &[Field] {
        self.inner.fields()
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn fill(&self, sample: usize, field: usize, out: Column<'_>) -> Result<(), ReadError> {
        self.fills.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(self.pause);
        if self.broken == Some(sample) {
            return Err(ReadError::new("half a record", "copy it again").in_file(Path::new("a.bin")).at(77));
        }
        self.inner.fill(sample, field, out)
    }

    fn cost(&self) -> SampleCost {
        SampleCost::Read
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}

fn text(data: &str) -> String {
    format!(
        "[model]\nkind = \"mlp\"\nhidden = [16]\ndropout = 0.1\n[data]\nsource = \"builtin:digits\"\nbatch = 32\ngrains = 4\n\
         {data}\n[train]\nsteps = 12\noptimizer = {{ kind = \"adamw\", lr = 1e-3 }}\n"
    )
}

fn plain(data: &str) -> Job {
    let root = job_file::parse(&text(data), "test.toml").unwrap();
    Job::read(&root, MODELS).unwrap_or_else(|error| panic!("{error}"))
}

fn reading(data: &str, pause: Duration, broken: Option<usize>) -> Arc<Job> {
    let job = plain(data);
    Arc::new(Job { source: Box::new(Reader { inner: job.source, pause, broken, fills: Arc::default() }), ..job })
}

/// The sample that stands at this place of the first epoch.
fn sample_at(job: &Job, place: usize) -> usize {
    job.split.train(kolo_data::epoch_order(job.seed, 0, job.split.train_len()).at(place))
}

#[test]
fn where_samples_are_made_does_not_matter() {
    let alone = report(&Arc::new(plain("")), WorkerGroup::Alone);
    assert_eq!((alone.loader.batches, alone.loader.threads), (0, 0), "cheap samples are made by the lanes");
    for (batches, threads) in [(1, 1), (1, 3), (2, 2), (4, 1), (4, 4)] {
        let keys = format!("prefetch = {batches}\nthreads = {threads}");
        let name = format!("{batches} batches, {threads} threads");
        for job in [Arc::new(plain(&keys)), reading(&keys, Duration::ZERO, None)] {
            let ahead = report(&job, WorkerGroup::Alone);
            assert_eq!(alone.weights, ahead.weights, "{name}");
            assert_eq!(alone.metrics, ahead.metrics, "{name}: the evaluation");
            assert_eq!((ahead.loader.batches, ahead.loader.threads), (batches, threads));
        }
        let workers = on_ranks(2, |world| report(&reading(&keys, Duration::ZERO, None), WorkerGroup::Workers(world)));
        workers.iter().for_each(|one| assert_eq!(alone.weights, one.weights, "{name}, 2 workers"));
    }
    for job in [Arc::new(plain("prefetch = 0")), reading("prefetch = 0", Duration::ZERO, None)] {
        let now = report(&job, WorkerGroup::Alone);
        assert_eq!((&alone.weights, now.loader.threads), (&now.weights, 0), "made when they are needed");
    }
}

#[test]
fn a_slow_source_is_waited_for_and_changes_nothing() {
    let alone = report(&Arc::new(plain("")), WorkerGroup::Alone);
    for keys in ["prefetch = 0", "prefetch = 1\nthreads = 1", "prefetch = 4\nthreads = 4"] {
        let slow = report(&reading(keys, Duration::from_micros(500), None), WorkerGroup::Alone);
        assert_eq!(alone.weights, slow.weights, "{keys}");
        // 64 fills of half a millisecond, while the step itself takes less.
        let wait = slow.data_wait_ms;
        assert!(wait.median > 0.0 && wait.median <= wait.p95 && wait.share <= 1.0, "{keys}: {wait:?}");
        if keys == "prefetch = 0" {
            assert!(wait.median > 30.0 && wait.share > 0.1, "{wait:?}");
        }
    }
}

#[test]
fn a_trainer_may_go_back_and_be_dropped_at_any_time() {
    let job = reading("prefetch = 3\nthreads = 2", Duration::from_micros(20), None);
    let options = Options { threads: 2, lanes: 2, grains: 4, slots: 1, ways: 1 };
    let mut trainer = Trainer::new(Arc::clone(&job), options).unwrap();
    (0..3).for_each(|_| _ = trainer.step().unwrap());
    let state = trainer.state();
    (0..4).for_each(|_| _ = trainer.step().unwrap());
    let digest = trainer.store().digest();
    trainer.resume(&state).unwrap();
    (0..4).for_each(|_| _ = trainer.step().unwrap());
    assert_eq!(digest, trainer.store().digest());
    assert_eq!(trainer.loader().threads, 2);
    drop(trainer);
    assert_eq!(Arc::strong_count(&job), 1, "a loader still holds the job");
}

/// An interrupted run ends after its step, whatever the loaders are at.
#[test]
fn an_interrupted_run_leaves_no_loader_behind() {
    let job = reading("prefetch = 4\nthreads = 3", Duration::from_micros(100), None);
    let interrupt = Interrupt::default();
    interrupt.request();
    let group = WorkerGroup::Alone;
    let options = RunOptions {
        threads: 1,
        out: None,
        interrupt,
        planned: Planned::default(),
        group,
        timeline: None,
        checkpoints: None,
        elastic: None,
    };
    let (trainer, report) = kolo_train::run(Arc::clone(&job), &options, &mut Silent).unwrap();
    assert_eq!((report.ended.as_str(), report.steps, report.loader.threads), ("interrupted", 1, 3));
    drop(trainer);
    assert_eq!(Arc::strong_count(&job), 1, "a loader still holds the job");
}

/// A source with a sample that takes an hour, and somebody who interrupts the run when it is asked for.
#[derive(Debug)]
struct Hanging {
    inner: Box<dyn Source>,
    sample: usize,
    interrupt: Interrupt,
}

impl Source for Hanging {
    fn fields(&self) -> &[Field] {
        self.inner.fields()
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn fill(&self, sample: usize, field: usize, out: Column<'_>) -> Result<(), ReadError> {
        if sample == self.sample {
            // By then, whoever wants the sample waits for it.
            std::thread::sleep(Duration::from_millis(300));
            self.interrupt.request();
            std::thread::sleep(Duration::from_secs(3600));
        }
        self.inner.fill(sample, field, out)
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}

/// Of the third step, or of the evaluation at the end.
#[test]
fn an_interrupt_is_seen_while_samples_are_waited_for() {
    let job = plain("prefetch = 1\nthreads = 1");
    for (sample, steps) in [(sample_at(&job, 70), 2), (job.split.held_out(0), 12)] {
        let (job, interrupt) = (plain("prefetch = 1\nthreads = 1"), Interrupt::default());
        let hanging = Hanging { inner: job.source, sample, interrupt: interrupt.clone() };
        let job = Arc::new(Job { source: Box::new(hanging), ..job });
        let options = RunOptions {
            threads: 1,
            out: None,
            interrupt,
            planned: Planned::default(),
            group: WorkerGroup::Alone,
            timeline: None,
            checkpoints: None,
            elastic: None,
        };
        let (_, report) = kolo_train::run(job, &options, &mut Silent).unwrap();
        assert_eq!((report.ended.as_str(), report.steps, report.loss.is_finite()), ("interrupted", steps, true));
    }
}

/// The 70th sample of an epoch of batches of 32 is the third step's.
#[test]
fn a_sample_that_cannot_be_read_ends_the_run_before_its_step() {
    let broken = sample_at(&plain(""), 70);
    let expected = format!(
        "cannot read sample {broken} of \"builtin:digits\": a.bin, byte 77: half a record\n  \
         at step 2 (epoch 1), and the weights were left as they were before it\n  hint: copy it again"
    );
    for keys in ["prefetch = 0", "prefetch = 1\nthreads = 1", "prefetch = 4\nthreads = 4"] {
        let job = reading(keys, Duration::ZERO, Some(broken));
        let mut trainer = Trainer::new(job, Options { threads: 1, lanes: 1, grains: 4, slots: 1, ways: 1 }).unwrap();
        (0..2).for_each(|_| _ = trainer.step().unwrap());
        let before = trainer.state();
        let error = trainer.step().unwrap_err();
        assert_eq!(error.to_string(), expected, "{keys}");
        assert!(!error.is_usage() && error.culprit().is_none());
        assert_eq!(before, trainer.state(), "{keys}: nothing changed");
    }
}

/// Rank 1 has the grains 2 and 3, so the sample at place 16 + 32 is its own. Whoever watches over the job tells rank 0.
#[test]
fn no_rank_updates_if_one_cannot_read() {
    let broken = sample_at(&plain(""), 32 + 16);
    let watches = [Watch::alone(), Watch::alone()];
    let both = Arc::new(std::sync::Barrier::new(2));
    let outcome = |(transport, watch): (_, &Arc<Watch>)| {
        let (watch, others, both) = (Arc::clone(watch), watches.clone(), Arc::clone(&both));
        move || {
            let world = Arc::new(Communicator::new(transport, watch, true));
            let job = reading("prefetch = 2\nthreads = 2", Duration::ZERO, Some(broken));
            let mut trainer = Trainer::among(job, 1, world).unwrap();
            trainer.step().unwrap();
            let before = trainer.state();
            both.wait();
            let error = trainer.step().unwrap_err();
            others.iter().for_each(|watch| watch.abort(Fault::Aborted("another rank failed".into())));
            assert_eq!(before, trainer.state(), "nothing changed");
            // A thread that ends is a lost rank, and the other shall hear of the abort.
            both.wait();
            error
        }
    };
    let bodies: Vec<_> = thread::world(&watches).into_iter().zip(&watches).map(outcome).collect();
    let errors = std::thread::scope(|scope| {
        let threads: Vec<_> = bodies.into_iter().map(|body| scope.spawn(body)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<Error>>()
    });
    assert!(matches!(&errors[0], Error::Together(Fault::Aborted(_))), "{}", errors[0]);
    assert!(matches!(&errors[1], Error::Data { error, .. } if error.sample == Some(broken)), "{}", errors[1]);
}

#[test]
fn evaluations_rehearsals_fingerprints_and_held_batches_say_so_too() {
    let keys = "prefetch = 2\nthreads = 1";
    let held_out = plain("").split.held_out(5);
    let job = reading(keys, Duration::ZERO, Some(held_out));
    let options = Options { threads: 1, lanes: 1, grains: 4, slots: 1, ways: 1 };
    let mut trainer = Trainer::new(job, options).unwrap();
    trainer.step().unwrap();
    let error = trainer.evaluate().unwrap_err().to_string();
    assert!(error.contains("byte 77: half a record\n  in the evaluation after 1 steps\n  hint: "), "{error}");
    // The first sample of all is part of the fingerprint.
    let error = reading(keys, Duration::ZERO, Some(0)).manifest().unwrap_err().to_string();
    assert!(error.starts_with("cannot read sample 0 of \"builtin:digits\": a.bin, byte 77: "), "{error}");
    let job = reading(keys, Duration::ZERO, Some(sample_at(&plain(""), 3)));
    let mut trainer = Trainer::new(Arc::clone(&job), options).unwrap();
    let held = HeldBatch::new(&job);
    assert!(matches!(trainer.step_on(&held), Err(Error::Data { .. })));
    let graph = trainer.session().graph().clone();
    let setup = kolo_train::trial_run::TrialSetup { workers: 1, per_host: 1, threads: 1 };
    let tried = kolo_train::trial_run::run(&job, &graph, setup, Duration::from_millis(1));
    assert!(matches!(tried, Err(Error::Data { .. })));
}

/// A plan knows that a step cannot be faster than its data.
#[test]
fn a_trial_run_counts_slow_data() {
    let setup = kolo_train::trial_run::TrialSetup { workers: 1, per_host: 1, threads: 1 };
    let tried = |keys: &str| {
        let job = reading(keys, Duration::from_micros(500), None);
        let trainer =
            Trainer::new(Arc::clone(&job), Options { threads: 1, lanes: 1, grains: 4, slots: 1, ways: 1 }).unwrap();
        kolo_train::trial_run::run(&job, trainer.session().graph(), setup, Duration::from_millis(1)).unwrap()
    };
    let ahead = tried("prefetch = 1\nthreads = 2");
    assert!(ahead.data_seconds >= 0.016 && ahead.step_seconds() >= ahead.data_seconds, "{ahead:?}");
    let now = tried("prefetch = 0");
    assert!(now.data_seconds >= 0.032 && now.step_seconds() > now.data_seconds, "{now:?}");
}

/// Two batches beside the one in use, each of 32 samples of 64 pixels, a class and a number.
#[test]
fn buffers_are_part_of_the_memory_plan() {
    let data = |keys: &str| kolo_train::supply::buffer_bytes(&reading(keys, Duration::ZERO, None), 32);
    let batch = 32 * (64 * 4 + 4 + 8);
    assert_eq!([data(""), data("prefetch = 0"), data("prefetch = 5")], [3 * batch, batch, 6 * batch]);
    let trainer =
        Trainer::new(reading("", Duration::ZERO, None), Options { threads: 1, lanes: 1, grains: 4, slots: 1, ways: 1 })
            .unwrap();
    assert_eq!(trainer.memory().data, 3 * batch);
}

/// What a source is follows from its kind and from what it says of itself.
#[test]
fn nobody_asks_for_a_source_by_its_name() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut todo: Vec<_> = std::fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().path().join("src")).collect();
    let mut files = 0;
    while let Some(path) = todo.pop() {
        if path.is_dir() {
            todo.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        files += 1;
        for used in ["starts_with(\"synthetic", "starts_with(\"builtin", "== \"synthetic:", "== \"builtin:"] {
            assert!(!text.contains(used), "{} has {used}", path.display());
        }
    }
    assert!(files > 200, "{files} files");
}
