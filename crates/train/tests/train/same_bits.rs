//! The same job gives the same weights to the bit: on any number of threads, with any number of grains at a time, when
//! run again, and when stopped and taken up from its state at any step.

use crate::trainer;
use kolo_train::Trainer;

pub const STEPS: usize = 6;
/// Of the largest model, whose steps take a hundred times as long.
const STEPS_OF_RESNET: usize = 3;

/// Small versions of every family, with dropout and clipping so that random numbers and global norms take part.
pub fn jobs() -> [(&'static str, String); 5] {
    let text = |model: &str, source: &str, batch: usize, optimizer: &str| {
        format!(
            "[job]\nseed = 7\n[model]\n{model}\n[data]\nsource = \"{source}\"\nbatch = {batch}\ngrains = 8\n\
             [train]\nsteps = {STEPS}\noptimizer = {optimizer}\nschedule = {{ kind = \"cosine\", warmup = 2 }}\nclip = 0.5\n"
        )
    };
    [
        ("cnn", text("kind = \"cnn\"\ndropout = 0.3", "builtin:digits", 32, "{ kind = \"adamw\" }")),
        ("mlp", text("kind = \"mlp\"\nhidden = [33, 17]", "builtin:playground", 32, "{ kind = \"lamb\" }")),
        (
            "gpt",
            text(
                "kind = \"gpt\"\nlayers = 2\nwidth = 24\nheads = 3\ndropout = 0.1",
                "builtin:addition",
                16,
                "{ kind = \"adam\" }",
            ),
        ),
        ("lstm", text("kind = \"lstm\"\nlayers = 2\nwidth = 20", "builtin:waves", 16, "{ kind = \"rmsprop\" }")),
        (
            "resnet18",
            text(
                "kind = \"resnet18\"\nwidth = 16\nimage = [3, 8, 8]",
                "synthetic:images",
                8,
                "{ kind = \"lars\", lr = 0.1 }",
            )
            .replace(&format!("steps = {STEPS}"), &format!("steps = {STEPS_OF_RESNET}")),
        ),
    ]
}

fn run(trainer: &mut Trainer, steps: usize) {
    for _ in 0..steps {
        trainer.step().unwrap_or_else(|error| panic!("{error}"));
    }
}

fn digest(text: &str, threads: usize, lanes: usize) -> String {
    let mut trainer = trainer(text, threads, lanes);
    let steps = trainer.job().total_steps;
    run(&mut trainer, steps);
    trainer.store().digest()
}

#[test]
fn threads_and_grains_per_pass_do_not_matter() {
    for (name, text) in jobs() {
        let one = digest(&text, 1, 1);
        assert_eq!(one, digest(&text, 1, 1), "{name}: a rerun differs");
        for (threads, lanes) in [(2, 1), (2, 2), (3, 1), (4, 4), (8, 8), (4, 2)] {
            assert_eq!(one, digest(&text, threads, lanes), "{name}: {threads} threads, {lanes} grains at a time");
        }
    }
}

/// Without clipping nobody but the update wants a gradient, and then the update adds up the lanes' sums itself.
#[test]
fn whoever_adds_up_the_gradients_does_not_matter() {
    for kind in ["sgd", "adam", "adamw", "rmsprop", "adagrad", "lars", "lamb"] {
        let text = format!(
            "[model]\nkind = \"mlp\"\nhidden = [200, 150]\n[data]\nsource = \"builtin:playground\"\nbatch = 32\n\
             grains = 8\n[train]\nsteps = {STEPS}\noptimizer = {{ kind = \"{kind}\", lr = 0.01 }}\n"
        );
        let one = digest(&text, 1, 1);
        for (threads, lanes) in [(2, 2), (4, 4), (8, 8)] {
            assert_eq!(one, digest(&text, threads, lanes), "{kind}: {threads} threads, {lanes} grains at a time");
        }
    }
}

#[test]
fn a_run_can_be_stopped_anywhere() {
    for (name, text) in jobs() {
        let mut whole = trainer(&text, 2, 2);
        let (mut states, steps) = (Vec::new(), whole.job().total_steps);
        for _ in 0..steps {
            states.push(whole.state());
            run(&mut whole, 1);
        }
        let want = whole.store().digest();
        for state in states {
            let mut resumed = trainer(&text, 2, 1);
            resumed.resume(&state).unwrap();
            run(&mut resumed, steps - state.step);
            assert_eq!(want, resumed.store().digest(), "{name}: taken up at step {}", state.step);
        }
    }
}

#[test]
fn the_seed_matters() {
    let (_, text) = &jobs()[0];
    assert_ne!(digest(text, 1, 1), digest(&text.replace("seed = 7", "seed = 8"), 1, 1));
}

/// Fusing and merging must not change a bit.
#[test]
fn rewrites_do_not_matter() {
    use kolo_exec::{Options, Session, Store};
    use kolo_train::step::{UpdateRule, optimise, training_graph};
    for (name, text) in jobs() {
        let job = crate::job(&text);
        let raw =
            training_graph(&*job.model, &UpdateRule::all(&job.optimizer, job.clip), job.grain_batch(), 1).unwrap();
        let loss = |graph: kolo_graph::Graph| {
            let mut store = Store::new(&graph, 3);
            let mut session = Session::new(graph, &store, Options::single(1));
            let fill = |feed: &mut kolo_exec::Feed<'_>| {
                let names: Vec<_> = feed.names().map(|(name, ty)| (name.to_string(), ty.clone())).collect();
                for (at, (name, ty)) in names.iter().enumerate() {
                    if ty.dtype.is_float() {
                        let out = feed.f32(name).unwrap();
                        out.iter_mut().enumerate().for_each(|(i, x)| *x = ((i * 7 + at) % 11) as f32 / 11.0 + 0.01);
                    } else {
                        feed.i32(name).unwrap().iter_mut().for_each(|x| *x = 1);
                    }
                }
            };
            for _ in 0..3 {
                session.run(&mut store, fill, |_, feed| fill(feed)).unwrap();
            }
            store.digest()
        };
        assert_eq!(loss(raw.clone()), loss(optimise(raw)), "{name}");
    }
}

/// A norm that is measured and not used changes no weight, and is the same for workers with and without a sharded optimizer.
#[test]
fn measuring_the_norm_changes_nothing() {
    use crate::workers::on_ranks;
    let text = |more: &str| {
        format!(
            "[model]\nkind = \"mlp\"\nhidden = [300]\n[data]\nsource = \"builtin:digits\"\nbatch = 16\ngrains = 4\n\
             [train]\nsteps = 4\noptimizer = {{ kind = \"adamw\" }}\n{more}"
        )
    };
    let mut plain = trainer(&text(""), 2, 2);
    run(&mut plain, 4);
    assert_eq!(plain.gradient_norm(), None);
    let mut measured = trainer(&text("grad_norm = true\n"), 2, 2);
    run(&mut measured, 4);
    assert_eq!(plain.store().digest(), measured.store().digest());
    let norm = measured.gradient_norm().expect("a norm");
    assert!(norm > 0.0);
    let clipped = {
        let mut trainer = trainer(&text("clip = 1e9\n"), 1, 1);
        run(&mut trainer, 4);
        trainer.gradient_norm()
    };
    assert_eq!(clipped, Some(norm));
    for parallel in ["zero = 0", "zero = 1"] {
        let job = crate::job(&text(&format!("grad_norm = true\n[parallel]\n{parallel}\n")));
        let norms = on_ranks(4, |world| {
            let mut trainer = Trainer::among(std::sync::Arc::clone(&job), 1, world).unwrap();
            run(&mut trainer, 4);
            (trainer.gradient_norm(), trainer.store().digest())
        });
        norms.iter().for_each(|found| assert_eq!(*found, (Some(norm), plain.store().digest()), "{parallel}"));
    }
}
