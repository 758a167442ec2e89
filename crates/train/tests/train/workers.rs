//! However many workers share a job, and however they share it, the weights are the same to the bit.

use crate::same_bits::jobs;
use kolo_comm::{Communicator, Watch, thread};
use kolo_exec::store::{Role, Saved};
use kolo_exec::{Options, Program};
use kolo_parallel::{Mesh, Purpose};
use kolo_train::asynchronous::{Links, Roles, Served};
use kolo_train::memory_limit::{self, WorkersNow};
use kolo_train::session::{RunOptions, Silent, WorkerGroup};
use kolo_train::step::graph_of;
use kolo_train::worker_plan::WorkerPlan;
use kolo_train::{Error, Job, Report, Trainer, asynchronous, job_file};
use std::ops::Range;
use std::sync::Arc;

/// Runs `body` on every rank of a world of threads.
pub fn on_ranks<T: Send>(size: usize, body: impl Fn(Arc<Communicator>) -> T + Sync) -> Vec<T> {
    let watches: Vec<Arc<Watch>> = (0..size).map(|_| Watch::alone()).collect();
    let transports = thread::world(&watches);
    std::thread::scope(|scope| {
        let body = &body;
        let spawn = |(transport, watch): (_, &Arc<Watch>)| {
            let world = Communicator::new(transport, Arc::clone(watch), true);
            scope.spawn(move || body(Arc::new(world)))
        };
        let threads: Vec<_> = transports.into_iter().zip(&watches).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub fn options(group: WorkerGroup) -> RunOptions {
    RunOptions {
        threads: 1,
        out: None,
        interrupt: Default::default(),
        planned: Default::default(),
        group,
        timeline: None,
        checkpoints: None,
        elastic: None,
    }
}

pub fn report(job: &Arc<Job>, group: WorkerGroup) -> Report {
    kolo_train::run(Arc::clone(job), &options(group), &mut Silent).unwrap_or_else(|error| panic!("{error}")).1
}

/// The job with `[parallel]` settings.
fn job(text: &str, parallel: &str) -> Arc<Job> {
    crate::job(&format!("{text}[parallel]\n{parallel}\n"))
}

/// The same evaluation, too: every worker measured its turns.
pub fn assert_same(name: &str, one: &Report, other: &Report) {
    assert_eq!(one.weights, other.weights, "{name}");
    assert_eq!(one.loss.to_bits(), other.loss.to_bits(), "{name}: the loss");
    assert_eq!(one.metrics, other.metrics, "{name}: the evaluation");
    assert_eq!(one.classification, other.classification, "{name}: the confusion matrix");
}

#[test]
fn the_number_of_workers_does_not_matter() {
    for (name, text) in jobs() {
        let alone = report(&job(&text, ""), WorkerGroup::Alone);
        let layouts = [
            (2, "zero = 1\nbucket_mib = 0"),
            (2, "bucket_mib = 0.001"),
            (4, "zero = 2\nbucket_mib = 0"),
            (2, "zero = 3\nprefetch = 0"),
            (4, "zero = 3"),
            (8, "zero = 1"),
        ];
        for (workers, parallel) in layouts {
            let job = job(&text, parallel);
            let reports = on_ranks(workers, |world| report(&job, WorkerGroup::Workers(world)));
            let name = format!("{name}, {workers} workers, {parallel}");
            reports.iter().for_each(|other| assert_same(&name, &alone, other));
        }
    }
}

/// Tensors so large that a share of the optimizer ends inside of one.
fn wide(optimizer: &str, parallel: &str) -> Arc<Job> {
    layered("inputs = 64\nhidden = [300, 200]\nclasses = 10", optimizer, parallel)
}

fn layered(sizes: &str, optimizer: &str, parallel: &str) -> Arc<Job> {
    let data = "source = \"synthetic:features\"\nbatch = 32\ngrains = 8\nsamples = 256";
    let train = format!("steps = 4\nclip = 0.5\noptimizer = {{ kind = \"{optimizer}\" }}");
    job(&format!("[model]\nkind = \"mlp\"\n{sizes}\n[data]\n{data}\n[train]\n{train}\n"), parallel)
}

/// Layers where a cut, or what is left after it, is one element long, and where two cuts come near each other.
const ODD: [&str; 2] = ["inputs = 17\nhidden = [241]\nclasses = 3", "inputs = 45\nhidden = [268]\nclasses = 10"];

#[test]
fn where_tensors_are_cut_does_not_matter() {
    for optimizer in ["sgd", "adam", "adamw", "lars", "lamb", "rmsprop", "adagrad"] {
        let alone = report(&wide(optimizer, ""), WorkerGroup::Alone);
        let layouts = [
            (2, "zero = 1"),
            (4, "zero = 1"),
            (4, "zero = 1\nbucket_mib = 0"),
            (4, "zero = 2\nbucket_mib = 0"),
            (4, "zero = 3"),
            (8, "zero = 1"),
            (8, "zero = 2"),
        ];
        for (workers, parallel) in layouts {
            let job = wide(optimizer, parallel);
            let reports = on_ranks(workers, |world| report(&job, WorkerGroup::Workers(world)));
            let name = format!("{optimizer}, {workers} workers, {parallel}");
            reports.iter().for_each(|other| assert_same(&name, &alone, other));
        }
    }
}

#[test]
fn odd_pieces_do_not_matter() {
    for (sizes, optimizer) in ODD.into_iter().zip(["lamb", "adamw"]) {
        let alone = report(&layered(sizes, optimizer, ""), WorkerGroup::Alone);
        let job = layered(sizes, optimizer, "zero = 1");
        for workers in [2, 4, 8] {
            let reports = on_ranks(workers, |world| report(&job, WorkerGroup::Workers(world)));
            reports.iter().for_each(|other| assert_same(&format!("{sizes}, {workers} workers"), &alone, other));
        }
    }
}

/// What every worker reports, and what every server saw.
pub fn with_servers(job: &Arc<Job>, roles: Roles) -> (Vec<Report>, Vec<Served>) {
    let outcomes = on_ranks(roles.workers + roles.servers, |world| match world.rank() < roles.workers {
        true => Ok(report(job, WorkerGroup::Served(world, roles))),
        false => Err(asynchronous::serve(job, 1, &world, roles, None).unwrap_or_else(|error| panic!("{error}"))),
    });
    let (workers, servers) = outcomes.into_iter().partition::<Vec<_>, _>(Result::is_ok);
    (workers.into_iter().flatten().collect(), servers.into_iter().filter_map(Result::err).collect())
}

#[test]
fn servers_without_slack_give_the_synchronous_bits() {
    for (name, text) in jobs() {
        let job = job(&text, "");
        let alone = report(&job, WorkerGroup::Alone);
        for (workers, servers) in [(2, 1), (4, 2)] {
            let (reports, served) = with_servers(&job, Roles { workers, servers, staleness: Some(0) });
            let name = format!("{name}, {workers} workers, {servers} servers");
            reports.iter().for_each(|other| assert_eq!(alone.weights, other.weights, "{name}"));
            served.iter().for_each(|served| assert_eq!(served.pushes, (workers * job.total_steps) as u64, "{name}"));
            assert_same(&name, &alone, &reports[0]);
        }
    }
}

/// Servers whose shares end inside of tensors, if nobody needs a norm of the whole parameter.
#[test]
fn servers_have_pieces() {
    let jobs = [wide("adamw", ""), wide("lamb", "")].into_iter().chain(ODD.map(|sizes| layered(sizes, "adamw", "")));
    for (number, job) in jobs.enumerate() {
        let alone = report(&job, WorkerGroup::Alone);
        for (workers, servers) in [(2, 2), (2, 3)] {
            let (reports, _) = with_servers(&job, Roles { workers, servers, staleness: Some(0) });
            let name = format!("job {number}, {servers} servers");
            reports.iter().for_each(|other| assert_eq!(alone.weights, other.weights, "{name}"));
        }
    }
}

/// Steps of a worker with servers that begins where `from` left off; what all of them keep then, and the digest.
fn served_steps(job: &Arc<Job>, roles: Roles, from: &[Saved], steps: Range<usize>) -> (Vec<Saved>, String) {
    let worker = |world: Arc<Communicator>| {
        let group = WorkerGroup::Served(Arc::clone(&world), roles);
        let mut links = Links::connect(job, &world, roles)?;
        let mut trainer = Trainer::in_group(Arc::clone(job), &group, group.options(job, 1)?)?;
        if steps.start > 0 {
            trainer.resume_from(steps.start, from)?;
            if world.rank() == 0 {
                links.restore(from)?;
            }
        }
        for _ in steps.clone() {
            trainer
                .step_through(|step, session, store| links.exchange(step, session.sums_mut(), store.params_mut()))?;
        }
        let mut saved = Vec::new();
        if world.rank() == 0 {
            saved = links.save()?;
            assert!(saved.iter().all(|entry| entry.role != Role::Statistic));
            saved.extend(trainer.entries().into_iter().filter(|entry| entry.role == Role::Statistic));
        }
        links.finish(trainer.store_mut().params_mut())?;
        Ok::<_, Error>((saved, trainer.store().digest()))
    };
    let outcomes = on_ranks(roles.workers + roles.servers, |world| match world.rank() < roles.workers {
        true => Some(worker(world).unwrap_or_else(|error| panic!("{error}"))),
        false => {
            asynchronous::serve(job, 1, &world, roles, None).map(|_| None).unwrap_or_else(|error| panic!("{error}"))
        }
    });
    outcomes.into_iter().flatten().next().unwrap()
}

fn run(trainer: &mut Trainer, steps: usize) {
    for _ in 0..steps {
        trainer.step().unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Whole tensors, put together from wherever their elements were.
fn whole(mut entries: Vec<Saved>) -> Vec<(String, Role, Vec<u8>)> {
    entries.sort_by(|a, b| (&a.tensor, a.start).cmp(&(&b.tensor, b.start)));
    let mut whole: Vec<(String, Role, Vec<u8>)> = Vec::new();
    for entry in entries {
        match whole.last_mut().filter(|(tensor, ..)| *tensor == entry.tensor) {
            Some((tensor, _, values)) => {
                assert_eq!(entry.start * 4, values.len(), "{tensor}");
                values.extend(entry.bytes);
            }
            None => whole.push((entry.tensor, entry.role, entry.bytes)),
        }
    }
    whole
}

/// A run is stopped, what everybody keeps is taken by entry, and another group goes on with the same bits.
#[test]
fn saved_state_moves_between_groups_of_workers() {
    const HALF: usize = 2;
    let alone = |job: &Arc<Job>| Trainer::new(Arc::clone(job), Options::for_grains(job.grains, 1)).unwrap();
    let jobs = [wide("adamw", ""), crate::job(&jobs()[4].1), layered(ODD[0], "lamb", "")];
    for (number, job) in jobs.iter().enumerate() {
        let steps = job.total_steps;
        let mut trainer = alone(job);
        run(&mut trainer, HALF);
        let saved = trainer.entries();
        assert!(saved.iter().any(|entry| entry.role == Role::Moment), "job {number}");
        assert_eq!(saved.iter().any(|entry| entry.role == Role::Statistic), number == 1, "job {number}");
        run(&mut trainer, steps - HALF);
        let digest = trainer.store().digest();
        let roles = Roles { workers: 2, servers: 2, staleness: Some(0) };
        let (from_servers, _) = served_steps(job, roles, &[], 0..HALF);
        assert_eq!(whole(from_servers.clone()), whole(saved.clone()), "job {number}: what is kept");
        let mut resumed = alone(job);
        resumed.resume_from(HALF, &from_servers).unwrap();
        run(&mut resumed, steps - HALF);
        assert_eq!(resumed.store().digest(), digest, "job {number}: from servers to one worker");
        // One job is enough for other numbers of servers.
        for servers in [1, 3].into_iter().filter(|_| number == 0) {
            let (_, other) = served_steps(job, Roles { servers, ..roles }, &from_servers, HALF..steps);
            assert_eq!(other, digest, "job {number}: from two servers to {servers}");
        }
        let (_, other) = served_steps(job, roles, &saved, HALF..steps);
        assert_eq!(other, digest, "job {number}: from one worker to servers");
        let missing = alone(job).resume_from(HALF, &from_servers[1..]).unwrap_err().to_string();
        assert!(missing.contains("has no element 0 in what was saved"), "{missing}");
    }
}

/// The shards of a sharded optimizer know of which tensor they are.
#[test]
fn shards_together_are_the_whole() {
    let (text, sharded) = (wide("adamw", ""), wide("adamw", "zero = 1"));
    let mut alone = Trainer::new(Arc::clone(&text), Options::for_grains(8, 1)).unwrap();
    run(&mut alone, 2);
    let parts = on_ranks(4, |world| {
        let (rank, mut trainer) = (world.rank(), Trainer::among(Arc::clone(&sharded), 1, world).unwrap());
        run(&mut trainer, 2);
        let mut entries = trainer.entries();
        entries.retain(|entry| rank == 0 || entry.role == Role::Moment);
        entries
    });
    assert_eq!(whole(parts.into_iter().flatten().collect()), whole(alone.entries()));
}

#[test]
fn free_workers_stay_within_the_bound_and_learn() {
    let text = "[model]\nkind = \"mlp\"\nhidden = [16]\n[data]\nsource = \"builtin:playground\"\nbatch = 32\ngrains = 8\n\
                [train]\nepochs = 8\noptimizer = { kind = \"adamw\", lr = 0.01 }\nclip = 1.0\n";
    let job = crate::job(text);
    for staleness in [Some(2), None] {
        let (reports, served) = with_servers(&job, Roles { workers: 4, servers: 1, staleness });
        let (first, served) = (&reports[0], &served[0]);
        assert_eq!(served.pushes as usize, 4 * job.total_steps);
        if let Some(bound) = staleness {
            // A push may come one step after the bound was checked.
            assert!(served.ahead_max <= bound + 1, "{served:?}");
        }
        assert!(first.metrics["accuracy"] > 0.85, "{:?}", first.metrics);
        reports.iter().for_each(|other| assert_eq!(other.weights, first.weights));
    }
}

/// Bytes of state that each of some workers has.
fn states(job: &Arc<Job>, workers: usize) -> Vec<usize> {
    on_ranks(workers, |world| {
        let trainer = Trainer::among(Arc::clone(job), 1, world).unwrap();
        let moments = trainer.store().entries().iter().filter(|entry| !entry.is_param());
        moments.map(|entry| entry.ty.bytes()).sum::<usize>()
    })
}

#[test]
fn zero_keeps_only_its_share_of_the_moments() {
    for workers in [2, 4] {
        let (whole, shares) = (states(&wide("adamw", ""), workers), states(&wide("adamw", "zero = 1"), workers));
        assert_eq!(shares.iter().sum::<usize>(), whole[0], "together the shards are the whole");
        // Both ends may have moved by half a run of 4096 elements, of which there are two moments.
        let most = whole[0] / workers + 2 * 2048 * 8;
        assert!(shares.iter().all(|share| *share <= most), "{shares:?} of {}", whole[0]);
    }
}

#[test]
fn a_number_that_is_not_finite_is_explained_by_one_rank() {
    let text = "[model]\nkind = \"mlp\"\n[data]\nsource = \"builtin:playground\"\nbatch = 32\ngrains = 8\n\
                [train]\nsteps = 60\noptimizer = { kind = \"sgd\", lr = 1000.0 }\n";
    let job = crate::job(text);
    let errors = on_ranks(4, |world| {
        kolo_train::run(Arc::clone(&job), &options(WorkerGroup::Workers(world)), &mut Silent).unwrap_err()
    });
    let explained = errors.iter().filter(|error| matches!(error, Error::NotFinite { .. })).count();
    let passed_on = errors.iter().filter(|error| matches!(error, Error::ReportedElsewhere { .. })).count();
    assert_eq!((explained, passed_on), (1, 3), "{errors:?}");
}

#[test]
fn workers_that_do_not_share_the_grains_are_told_which_would() {
    let root = kolo_train::job_file::parse(
        "[model]\nkind = \"mlp\"\n[data]\nsource = \"builtin:playground\"\nbatch = 48\ngrains = 8\n",
        "test.toml",
    )
    .unwrap();
    let mut job = Job::read(&root, kolo_models::MODELS).unwrap();
    let error = job.fit_to(3).unwrap_err().to_string();
    assert!(error.contains("1, 2, 4, 8 workers"), "{error}");
    job.reproducible = false;
    job.fit_to(3).unwrap();
    assert_eq!(job.grains, 6);
    let job = Arc::new(job);
    let reports = on_ranks(3, |world| report(&job, WorkerGroup::Workers(world)));
    assert!(reports.iter().all(|report| report.weights == reports[0].weights));
}

/// Gradients in half the bytes: other bits, the same on all ranks, and it learns as well.
#[test]
fn narrow_gradients_learn_too() {
    let text = "[job]\nreproducible = false\n[model]\nkind = \"mlp\"\nhidden = [16]\n[data]\nsource = \"builtin:playground\"\n\
                batch = 32\ngrains = 8\n[train]\nepochs = 20\noptimizer = { kind = \"adamw\", lr = 0.01 }\n";
    let (wide, narrow) = (job(text, ""), job(text, "wire = \"bf16\""));
    let whole = report(&wide, WorkerGroup::Alone);
    let watches: Vec<Arc<Watch>> = (0..2).map(|_| Watch::alone()).collect();
    let reports: Vec<Report> = std::thread::scope(|scope| {
        let narrow = &narrow;
        let spawn = |(transport, watch): (_, &Arc<Watch>)| {
            let world = Arc::new(Communicator::new(transport, Arc::clone(watch), false));
            scope.spawn(move || report(narrow, WorkerGroup::Workers(world)))
        };
        let threads: Vec<_> = thread::world(&watches).into_iter().zip(&watches).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(reports[0].weights, reports[1].weights);
    assert_ne!(reports[0].weights, whole.weights, "nothing was rounded");
    let (one, other) = (whole.metrics["accuracy"], reports[0].metrics["accuracy"]);
    assert!(other > one - 0.03 && other > 0.9, "{one} alone, {other} with bf16 on the wire");
}

/// What is computed again comes out the same: no dropout, no exchange and no layout changes a bit of it.
#[test]
fn computing_again_changes_no_bit() {
    for (name, text) in jobs() {
        let alone = report(&job(&text, ""), WorkerGroup::Alone);
        let backward = |text: &str| {
            let job = job(text, "");
            let graph = graph_of(&job, &job.parallel, Purpose::Training, &Mesh::alone()).unwrap();
            kolo_plan::cost(&Program::cpu(graph, Options::single(1))).flops.backward
        };
        for (what, workers, parallel) in [("blocks", 2, "zero = 1\nbucket_mib = 0"), ("selective", 4, "")] {
            let text = format!("{text}[memory]\nrecompute = \"{what}\"\n");
            let grows = backward(&text) > backward(&text.replace(what, "none"));
            // A recurrent layer is a product as a whole.
            assert!(grows || (name, what) == ("lstm", "selective"), "{name}, {what}: nothing is computed again");
            assert_same(&format!("{name}, {what}"), &alone, &report(&job(&text, ""), WorkerGroup::Alone));
            let job = job(&text, parallel);
            let reports = on_ranks(workers, |world| report(&job, WorkerGroup::Workers(world)));
            let name = format!("{name}, {what}, {workers} workers, {parallel}");
            reports.iter().for_each(|other| assert_same(&name, &alone, other));
        }
    }
}

#[test]
fn workers_that_share_layers_compute_them_again() {
    let text = "[model]\nkind = \"gpt\"\nlayers = 3\nwidth = 32\nheads = 4\ndropout = 0.1\n[data]\nsource = \"builtin:addition\"\n\
                batch = 16\ngrains = 4\n[train]\nsteps = 3\nclip = 0.5\n";
    // How tokens are shared is part of what a job computes.
    let alone =
        ["slices = 2", "slices = 2\nsequence = \"tensor\""].map(|cut| report(&job(text, cut), WorkerGroup::Alone));
    let by_layer = "layers = { \"h.0\" = \"blocks\", \"h.2.*\" = \"selective\" }";
    for (what, written) in [
        ("blocks", "recompute = \"blocks\""),
        ("selective", "recompute = \"selective\""),
        ("full", "recompute = \"full\""),
        ("by layer", by_layer),
    ] {
        let text = format!("{text}[memory]\n{written}\n");
        let layouts = [
            (2, "tensor = 2\nslices = 2"),
            (4, "tensor = 2\nslices = 2\nzero = 1"),
            (2, "pipeline = 2\nslices = 2\nschedule = \"zero-bubble\""),
            (2, "zero = 3\nslices = 2"),
            // What repeats exchanges repeats them in the same order on all ranks, in stages and shares of tokens, too.
            (2, "tensor = 2\nslices = 2\nsequence = \"tensor\""),
            (4, "tensor = 2\nslices = 2\npipeline = 2"),
        ];
        for (workers, parallel) in layouts {
            let job = job(&text, parallel);
            let reports = on_ranks(workers, |world| report(&job, WorkerGroup::Workers(world)));
            let alone = &alone[usize::from(parallel.contains("sequence"))];
            reports.iter().for_each(|other| assert_same(&format!("{what}, {parallel}"), alone, other));
            assert_eq!(reports[0].recompute, what);
        }
    }
}

/// A limit that one worker cannot keep to, and what it says would fit: four workers that share the model.
#[test]
fn a_job_that_exceeds_its_limit_runs_in_a_layout_that_fits() {
    let text = "[model]\nkind = \"mlp\"\ninputs = 64\nhidden = [1536, 1536]\nclasses = 10\n[data]\nsource = \"builtin:digits\"\n\
                batch = 32\ngrains = 4\n[train]\nsteps = 3\noptimizer = { kind = \"adamw\" }\n";
    let bytes = |workers: usize, parallel: &str| {
        let job = job(text, parallel);
        let of = |rank| {
            let mesh = job.parallel.mesh(workers, rank).unwrap();
            let options = Options::for_grains(job.grains / mesh.size("data"), 1);
            WorkerPlan::new(&job, &job.parallel, &mesh, Some(&mesh), options).unwrap().memory.total() as u64
        };
        (0..workers).map(of).max().unwrap()
    };
    // A quarter of all weights, gradients and moments.
    let limit = bytes(4, "tensor = 4\nslices = 4");
    let shared = "tensor = 2\nslices = 2";
    assert!(limit < bytes(2, shared) && bytes(2, shared) < bytes(1, ""), "{limit}");
    let limited = |parallel: &str| job(&format!("{text}[memory]\nlimit = {limit}\n"), parallel);
    let refused = Trainer::new(limited(""), Options::for_grains(4, 1)).map(drop).unwrap_err();
    assert!(matches!(refused, Error::Memory(_)), "{refused}");
    let message = refused.to_string();
    assert!(message.contains("but `memory.limit` allows") && message.contains("layouts that fit"), "{message}");

    let found = memory_limit::fitting(&limited(""), limit, WorkersNow { workers: 1, threads: 1 }).unwrap();
    assert!(found.fitting.iter().all(|one| one.bytes <= limit && message.contains(&one.to_string())), "{message}");
    let four = &found.fitting[0];
    assert_eq!(four.layout.workers, 4, "{message}");
    // As `--set` would; the slices are part of the job.
    let with = |limit: u64, changes: &mut dyn Iterator<Item = &String>| {
        let mut root = job_file::parse(&format!("{text}[memory]\nlimit = {limit}\n"), "test.toml").unwrap();
        changes.for_each(|change| job_file::override_with(&mut root, change).unwrap());
        Arc::new(Job::read(&root, kolo_models::MODELS).unwrap())
    };
    let fitting = with(limit, &mut four.changes.iter());
    let slices = with(1 << 40, &mut four.changes.iter().filter(|change| change.contains("slices")));
    let alone = report(&slices, WorkerGroup::Alone);
    let reports = on_ranks(4, |world| report(&fitting, WorkerGroup::Workers(world)));
    reports.iter().for_each(|other| assert_same("the layout that fits", &alone, other));

    // With two workers none starts, and all say why in the words of the first.
    let job = limited(shared);
    let outcome = |world: Arc<Communicator>| Trainer::among(Arc::clone(&job), 1, world).map(drop).unwrap_err();
    let [first, second] = &on_ranks(2, outcome)[..] else { panic!("two ranks") };
    assert!(matches!(first, Error::Memory(_)) && first.to_string() == second.to_string(), "{first}, {second}");
}

/// Images that are too large for a worker are cut, if little else is large, and a model of many layers is laid on several workers.
#[test]
fn a_limit_names_what_shares_images_and_layers() {
    let changes = |text: &str, parallel: &str, shared: (usize, &str)| {
        // Just enough for a worker of this layout.
        let job_of = |more: &str| job(text, &format!("{parallel}\n{more}"));
        let (workers, layout) = (shared.0, job_of(shared.1));
        let bytes = |rank| {
            let mesh = layout.parallel.mesh(workers, rank).unwrap();
            let options = Options::for_grains(layout.grains, 1);
            WorkerPlan::new(&layout, &layout.parallel, &mesh, Some(&mesh), options).unwrap().memory.total() as u64
        };
        let limit = (0..workers).map(bytes).max().unwrap();
        let found = memory_limit::fitting(&job_of(""), limit, WorkersNow { workers: 1, threads: 1 }).unwrap();
        found.fitting.iter().map(|one| one.changes.join(" ")).collect::<Vec<_>>()
    };
    // A sample per batch: nobody can share the grains.
    let images = "[model]\nkind = \"cnn\"\nimage = [3, 256, 256]\nchannels = [32, 16]\nhidden = 4\n[data]\n\
                  source = \"synthetic:images\"\nsamples = 4\nbatch = 1\n[train]\nsteps = 1\n";
    let found = changes(images, "", (4, "spatial = 4\ntiles = 4"));
    assert!(found.contains(&"parallel.spatial=4 parallel.tiles=4".to_string()), "{found:?}");
    let deep = "[model]\nkind = \"mlp\"\ninputs = 512\nhidden = [512, 512, 512, 512, 512, 512]\nclasses = 10\n[data]\n\
                source = \"synthetic:features\"\nsamples = 64\nbatch = 8\ngrains = 8\n[train]\nsteps = 1\n\
                optimizer = { kind = \"adamw\" }\n";
    let found = changes(deep, "", (2, "pipeline = 2"));
    assert!(found.contains(&"parallel.pipeline=2".to_string()), "{found:?}");
    let tokens = "[model]\nkind = \"gpt\"\nlayers = 8\nwidth = 32\nheads = 2\ncontext = 1024\nvocab = 11\n[data]\n\
                  source = \"synthetic:tokens\"\nsamples = 4\nholdout = 0\nbatch = 1\n[train]\nsteps = 1\n";
    let found = changes(tokens, "sequence = \"context\"\nslices = 4", (2, "context = 2"));
    assert!(found.contains(&"parallel.context=2".to_string()), "{found:?}");
}

#[test]
fn a_limit_that_nothing_keeps_to_names_the_smallest_layout() {
    let message = |limit: &str| {
        let text = format!(
            "[model]\nkind = \"mlp\"\n[data]\nsource = \"builtin:playground\"\nbatch = 32\ngrains = 4\n[memory]\nlimit = {limit}\n"
        );
        Trainer::new(job(&text, ""), Options::for_grains(4, 1)).map(drop).unwrap_err().to_string()
    };
    let none = "no layout of recompute, zero, pipeline, spatial, context, tensor and workers fits";
    // Less than a share of the weights, which no plan is needed for, and less than the process itself.
    for (limit, shown, why) in
        [("1000", "1000 B", ": weights and gradients alone take"), ("\"1MiB\"", "1.00 MiB", "; the smallest is")]
    {
        let message = message(limit);
        assert!(message.contains(&format!("{none}{why}")), "{message}");
        assert!(message.contains(&format!("`memory.limit` allows {shown}")), "{message}");
        assert!(message.contains("or raise `memory.limit`"), "{message}");
    }
}
