//! The reference executor trains as the CPU does, within the rounding of f32: two implementations of every op and one schedule.

use kolo_exec::Options;
use kolo_exec::reference::Reference;
use kolo_models::MODELS;
use kolo_train::session::WorkerGroup;
use kolo_train::{Error, Job, Trainer, job_file};
use std::sync::Arc;

fn job(text: &str, reference: bool) -> Arc<Job> {
    let root = job_file::parse(text, "test.toml").unwrap();
    let mut job = Job::read(&root, MODELS).unwrap_or_else(|error| panic!("{error}"));
    if reference {
        job.executor = Arc::new(Reference);
    }
    Arc::new(job)
}

const JOBS: [(&str, &str); 4] = [
    (
        "mlp",
        "[model]\nkind = \"mlp\"\nhidden = [6]\n[data]\nsource = \"builtin:playground\"\nbatch = 16\ngrains = 4\n\
         [train]\nsteps = 6\nclip = 0.5\noptimizer = { kind = \"adamw\", lr = 0.01 }\n",
    ),
    (
        "cnn with dropout",
        "[model]\nkind = \"cnn\"\nchannels = [2, 3]\nhidden = 8\ndropout = 0.3\n[data]\nsource = \"builtin:digits\"\nholdout = 0.01\nbatch = 8\n\
         grains = 2\n[train]\nsteps = 3\noptimizer = { kind = \"sgd\", lr = 0.05, momentum = 0.9 }\n",
    ),
    (
        "gpt",
        "[model]\nkind = \"gpt\"\nlayers = 1\nwidth = 8\nheads = 2\n[data]\nsource = \"builtin:addition\"\nbatch = 4\n\
         grains = 1\nholdout = 0.01\n[train]\nsteps = 3\noptimizer = { kind = \"lamb\", lr = 0.01 }\n",
    ),
    (
        "lstm",
        "[model]\nkind = \"lstm\"\nlayers = 1\nwidth = 6\n[data]\nsource = \"builtin:waves\"\nbatch = 4\ngrains = 2\n[train]\nsteps = 3\n\
         optimizer = { kind = \"rmsprop\", lr = 0.01 }\n",
    ),
];

#[test]
fn it_trains_as_the_cpu_does() {
    for (name, text) in JOBS {
        let [mut cpu, mut reference] = [false, true].map(|reference| {
            let job = job(text, reference);
            let grains = job.grains;
            Trainer::new(job, Options { threads: 2, lanes: 1, grains, slots: 1, ways: 1 })
                .unwrap_or_else(|error| panic!("{name}: {error}"))
        });
        let start = cpu.store().digest();
        assert_eq!(start, reference.store().digest(), "{name}: both start alike");
        for step in 0..cpu.job().total_steps {
            let [fast, slow] = [&mut cpu, &mut reference].map(|trainer| trainer.step().unwrap());
            assert!((fast - slow).abs() <= 1e-4 * slow.abs().max(1.0), "{name}, step {step}: {fast} and {slow}");
        }
        assert_ne!(start, reference.store().digest(), "{name}: it learns");
        assert_ne!(cpu.store().digest(), reference.store().digest(), "{name}: f64 rounds otherwise");
        let mut compared = 0;
        for entry in cpu.store().entries() {
            let [fast, slow] = [&cpu, &reference].map(|trainer| trainer.store().values(&entry.name).unwrap());
            let scale = slow.iter().fold(1e-2f32, |most, x| most.max(x.abs()));
            for (fast, slow) in fast.iter().zip(slow) {
                assert!((fast - slow).abs() <= 5e-3 * scale, "{name}: `{}` is {fast} and {slow}", entry.name);
                compared += 1;
            }
        }
        assert!(compared > 50, "{name}");
        let [fast, slow] = [&mut cpu, &mut reference].map(|trainer| trainer.evaluate().unwrap().unwrap());
        assert!(
            (fast.loss - slow.loss).abs() <= 1e-3 * slow.loss.abs().max(1.0),
            "{name}: {} {}",
            fast.loss,
            slow.loss
        );
    }
}

/// Between steps the state is f64: it is not the rounded one that goes on, unless somebody changed it.
#[test]
fn a_run_of_it_can_be_taken_up_again() {
    let (_, text) = JOBS[0];
    let options = |job: &Job| Options { threads: 1, lanes: 1, grains: job.grains, slots: 1, ways: 1 };
    let job = job(text, true);
    let mut whole = Trainer::new(Arc::clone(&job), options(&job)).unwrap();
    (0..3).for_each(|_| _ = whole.step().unwrap());
    let state = whole.state();
    let mut resumed = Trainer::new(Arc::clone(&job), options(&job)).unwrap();
    resumed.resume(&state).unwrap();
    assert_eq!(whole.store().digest(), resumed.store().digest());
    let [one, other] = [&mut whole, &mut resumed].map(|trainer| trainer.step().unwrap());
    assert!((one - other).abs() < 1e-6, "{one} {other}");
}

#[test]
fn it_runs_one_worker() {
    let job = job(JOBS[0].1, true);
    let errors = crate::workers::on_ranks(2, |world| {
        let group = WorkerGroup::Workers(world);
        let options = group.options(&job, 1).unwrap();
        Trainer::in_group(Arc::clone(&job), &group, options).unwrap_err()
    });
    for error in errors {
        assert!(matches!(error, Error::Workers { workers: 2, .. }), "{error}");
        assert!(error.to_string().contains("--device cpu"), "{error}");
    }
}
