//! Images cut into strips and tiles: the bits of one worker, the bytes of the plan, and less memory.

use crate::workers::{assert_same, on_ranks, report};
use kolo_comm::Communicator;
use kolo_exec::Options;
use kolo_train::session::WorkerGroup;
use kolo_train::{Job, Trainer};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Odd sizes, halves that end between rows, and blocks with fewer rows than tiles.
const RESNET: &str = "[model]\nkind = \"resnet18\"\nwidth = 16\nimage = [3, 13, 10]\n";
/// Two convolutions, a pooling, dropout.
const CNN: &str = "[model]\nkind = \"cnn\"\nimage = [2, 11, 9]\nchannels = [6, 5]\nhidden = 12\ndropout = 0.2\n";

fn job(model: &str, parallel: &str) -> Arc<Job> {
    let data = "source = \"synthetic:images\"\nsamples = 20\nbatch = 4\ngrains = 2";
    crate::job(&format!("{model}[data]\n{data}\n[train]\nsteps = 2\n[parallel]\n{parallel}\n"))
}

fn agree(model: &str, part_of_job: &str, layouts: &[(usize, &str)]) {
    let alone = report(&job(model, part_of_job), WorkerGroup::Alone);
    for (workers, parallel) in layouts {
        let job = job(model, &format!("{part_of_job}\n{parallel}"));
        let reports = on_ranks(*workers, |world| report(&job, WorkerGroup::Workers(world)));
        let name = format!("{model}{part_of_job}: {workers} workers, {parallel}");
        reports.iter().for_each(|other| assert_same(&name, &alone, other));
    }
}

#[test]
fn strips_and_tiles_have_the_weights_of_one_worker() {
    agree(RESNET, "tiles = [4, 1]", &[(2, "spatial = [2, 1]"), (4, "spatial = [4, 1]")]);
    agree(
        CNN,
        "tiles = [2, 4]",
        &[
            (2, "spatial = [2, 1]"),
            (4, "spatial = [1, 4]"),
            (4, "spatial = [2, 2]"),
            (4, "spatial = [2, 1]\nzero = 3"),
            (8, "spatial = [2, 2]\nzero = 1"),
            (4, "spatial = [1, 2]\npipeline = 2"),
        ],
    );
    agree(
        CNN,
        "tiles = [2, 1]\nslices = 2",
        &[
            (2, "tensor = 2"),
            (4, "spatial = [2, 1]\ntensor = 2"),
            (4, "spatial = 2\npipeline = 2\nschedule = \"gpipe\""),
        ],
    );
}

/// Layers that are split in different ways by the same workers; one worker does all parts.
#[test]
fn single_layers_are_split_as_the_job_says() {
    let mixed = "layers = { \"convs.*\" = { spatial = 2 }, \"fc\" = { tensor = 2 }, \"head\" = { tensor = 2 } }";
    agree(CNN, mixed, &[(2, ""), (4, "zero = 2")]);
    agree(CNN, "tiles = [2, 1]\nlayers = { \"convs.0\" = { spatial = 1 } }", &[(2, "spatial = [2, 1]")]);
    agree(CNN, "layers = { \"fc\" = { tensor = 2 } }", &[(2, "")]);
    agree(CNN, "slices = 2\nlayers = { \"convs.*\" = { tensor = 1 } }", &[(2, "tensor = 2")]);
    agree(CNN, "tiles = [2, 1]\nlayers = { \"fc\" = { tensor = 2 } }", &[(2, "spatial = [2, 1]")]);
    // Weights that are smaller than what they are multiplied with, in slices as well: the evaluation finds them as training has them.
    let narrow = "[model]\nkind = \"cnn\"\nimage = [1, 21, 41]\nchannels = [3]\nhidden = 5\nclasses = 3\n";
    let mixed = "slices = 2\ntiles = [4, 2]\nlayers = { \"convs.*\" = { spatial = 4 }, \"fc\" = { tensor = 4 } }";
    agree(narrow, mixed, &[(4, ""), (4, "zero = 1"), (8, "zero = 3"), (8, "pipeline = 2")]);
}

/// Numbers of workers that are no powers of two, for a job that does not promise its bits.
#[test]
fn three_workers_share_single_layers() {
    for layers in ["\"fc\" = { tensor = 3 }", "\"convs.*\" = { spatial = 3 }"] {
        let parallel = format!("layers = {{ {layers} }}\n[job]\nreproducible = false");
        let job = job(CNN, &parallel);
        let loss = |company| report(&job, company).loss;
        let alone = loss(WorkerGroup::Alone);
        for other in on_ranks(3, |world| loss(WorkerGroup::Workers(world))) {
            assert!((other - alone).abs() < 1e-4, "{layers}: {other} and {alone}");
        }
    }
}

/// What ranks send along every axis in a step, as they counted it, is what the plan says; the first and the last strip have one
/// neighbour, the others two.
#[test]
fn ranks_send_the_halos_of_the_plan() {
    for (workers, parallel) in [
        (4, "tiles = [4, 1]\nspatial = [4, 1]"),
        (4, "tiles = [2, 2]\nspatial = [2, 2]"),
        (4, "tiles = [2, 1]\nspatial = [2, 1]\nzero = 2"),
    ] {
        let job = job(RESNET, parallel);
        on_ranks(workers, |world: Arc<Communicator>| {
            let (rank, mut trainer) = (world.rank(), Trainer::among(Arc::clone(&job), 1, world).unwrap());
            let mesh = job.parallel.mesh(workers, rank).unwrap();
            let planned =
                kolo_plan::sent_bytes(trainer.session().program(), &|axis| (mesh.coordinate(axis), mesh.size(axis)));
            assert!(planned["height"] > 0);
            trainer.step().unwrap();
            assert_eq!(trainer.session().sent_bytes(), planned, "rank {rank} of {workers}, {parallel}");
        });
    }
}

/// The formula of the documentation: rows of the halo, of both neighbours, and the sums of statistics and weights.
#[test]
fn halos_are_what_the_formula_says() {
    let (images, height, width, channels) = (2, 32, 32, [3, 8, 16]);
    let model = "[model]\nkind = \"cnn\"\nimage = [3, 32, 32]\nchannels = [8, 16]\nhidden = 4\n";
    let planned = |rank: usize| -> BTreeMap<String, u64> {
        let job = job(model, "tiles = [4, 1]\nspatial = [4, 1]");
        let mesh = job.parallel.mesh(4, rank).unwrap();
        let program = kolo_train::step::program_of(&job, &job.parallel, &mesh, Options::for_grains(2, 1)).unwrap();
        kolo_plan::sent_bytes(&program, &|axis| (mesh.coordinate(axis), mesh.size(axis)))
    };
    let row = images * width * 4;
    // Forward and for the weights the rows of the input, for the input's gradient those of the result's; the image has none.
    let halos = (2 * channels[0] + 2 * channels[1] + channels[2]) * row;
    let weights = 4 * (channels[0] * channels[1] * 9 + channels[1] + channels[1] * channels[2] * 9 + channels[2]);
    let sums = 2 * 3 * weights / 4;
    // What the pooling gives is gathered before it is flattened.
    let gathered = 3 * images * channels[2] * (height / 2 / 4) * (width / 2) * 4;
    assert_eq!(planned(0)["height"] as usize, 2 * (halos + sums + gathered));
    assert_eq!(planned(1)["height"] as usize, 2 * (2 * halos + sums + gathered));
}

/// Activations lie on four workers.
#[test]
fn a_strip_takes_its_share_of_the_memory() {
    let activations = |workers: usize, parallel: &str| {
        let model = "[model]\nkind = \"resnet18\"\nimage = [3, 256, 256]\n";
        let job = job(model, &format!("tiles = [4, 1]\n{parallel}"));
        let mesh = job.parallel.mesh(workers, workers / 2).unwrap();
        let program = kolo_train::step::program_of(&job, &job.parallel, &mesh, Options::for_grains(2, 1)).unwrap();
        kolo_plan::memory(&program).activations
    };
    let (whole, quarter) = (activations(1, ""), activations(4, "spatial = [4, 1]"));
    assert!(quarter < whole * 2 / 5, "a strip takes {quarter} bytes, all of it {whole}");
}

/// What cannot be is refused with what can.
#[test]
fn impossible_tiles_name_possible_ones() {
    let refused = |model: &str, parallel: &str| -> String {
        let text = format!(
            "{model}[data]\nsource = \"synthetic:images\"\nbatch = 4\ngrains = 2\n[train]\nsteps = 1\n[parallel]\n{parallel}\n"
        );
        let root = kolo_train::job_file::parse(&text, "test.toml").unwrap();
        match Job::read(&root, kolo_models::MODELS) {
            Err(error) => error.to_string(),
            Ok(job) => Trainer::new(Arc::new(job), Options::for_grains(2, 1)).unwrap_err().to_string(),
        }
    };
    for (parallel, words) in [
        ("spatial = [2, 1]", "write `tiles = [2, 1]` beside it"),
        ("spatial = [3, 1]\ntiles = [4, 1]", "use [2, 1] or [4, 1]"),
        ("tiles = [3, 1]", "write 2 or 4"),
        ("tiles = [2]", "must be two numbers"),
        ("tiles = [16, 1]", "write `tiles = [8, 8]` or less"),
        ("spatial = [100, 1]", "at most 64"),
        ("layers = { \"conv.*\" = { spatial = 2 } }", "test.toml:14: `parallel.layers.\"conv.*\"` names no layer"),
        ("layers = { \"fc\" = { spatial = 2 } }", "`fc` cannot be split so"),
        ("layers = { \"convs.*\" = { spatial = 2 }, \"*.0\" = { spatial = 1 } }", "both name `convs.0`"),
        (
            "tiles = [2, 1]\nspatial = [2, 1]\nlayers = { \"convs.*\" = { spatial = 4 } }",
            "`parallel.spatial` splits all layers",
        ),
        (
            "tiles = [2, 1]\nspatial = [2, 1]\nlayers = { \"convs.*\" = { spatial = 2 } }",
            "leave `parallel.spatial` out, and workers share what lines name",
        ),
        (
            "slices = 2\ntensor = 2\nlayers = { \"fc\" = { tensor = 2 } }",
            "test.toml:16: `parallel.layers.\"fc\"` has `tensor = 2`, but `parallel.tensor` splits all layers",
        ),
        (
            "layers = { \"convs.*\" = { spatial = 2 }, \"fc\" = { spatial = 1, tensor = 4 } }",
            "write 2, or 1 for whole layers",
        ),
        ("layers = { \"convs.*\" = { spatial = 3 } }", "write 2 or 4, or `job.reproducible = false`"),
        ("layers = { \"fc\" = { tensor = 6 } }", "write 4 or 8, or `job.reproducible = false`"),
        ("layers = { \"fc\" = { tensor = 9223372036854775807 } }", "write a number up to 64"),
        ("layers = { \"convs.*\" = { strips = 2 } }", "the keys here are spatial, tensor"),
        ("layers = { \"convs.*\" = 2 }", "must be a table"),
    ] {
        let text = refused(CNN, parallel);
        assert!(text.contains(words), "{parallel}: {words:?} is not in\n{text}");
    }
    let tokens = "[model]\nkind = \"gpt\"\nlayers = 1\nwidth = 8\nheads = 1\ncontext = 4\nvocab = 5\n";
    let text = format!("{tokens}[data]\nsource = \"synthetic:tokens\"\nbatch = 4\n[parallel]\ntiles = [2, 1]\n");
    let error = Trainer::new(crate::job(&text), Options::for_grains(1, 1)).unwrap_err().to_string();
    assert!(error.contains("cuts images, but the model has none"), "{error}");
}
