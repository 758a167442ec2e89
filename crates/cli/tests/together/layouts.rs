//! Workers that share the model itself: tensor, pipeline and ZeRO together, one digest per job. `bench/layouts.py` runs the whole
//! matrix.

use crate::job::{LIMIT, kolo, report, tempdir, weights};
use crate::process::run;
use std::path::Path;

/// A small GPT with tied weights, an odd vocabulary, heads that do not divide and dropout.
const GPT: &str = "[model]\nkind = \"gpt\"\nlayers = 4\nwidth = 24\nheads = 3\ncontext = 8\nvocab = 11\ndropout = 0.1\n\
                   [data]\nsource = \"synthetic:tokens\"\nsamples = 64\nbatch = 8\ngrains = 4\n\
                   [train]\nsteps = 3\nclip = 1.0\n[parallel]\nslices = 2\n";
const RESNET: &str = "[model]\nkind = \"resnet18\"\nwidth = 16\nimage = [3, 8, 8]\n[data]\nsource = \"synthetic:images\"\nsamples = 24\n\
                      batch = 8\ngrains = 4\n[train]\nsteps = 2\n[parallel]\nslices = 4\n";
const LSTM: &str = "[model]\nkind = \"lstm\"\nwidth = 16\n[data]\nsource = \"builtin:waves\"\nbatch = 8\ngrains = 4\n\
                    [train]\nsteps = 3\n[parallel]\nslices = 2\n";
const MLP: &str = "[model]\nkind = \"mlp\"\nhidden = [33, 20, 17]\n[data]\nsource = \"builtin:playground\"\nbatch = 16\n\
                   grains = 8\n[train]\nsteps = 4\noptimizer = { kind = \"lamb\" }\n[parallel]\nslices = 2\n";

/// The weights of a layout: workers, then settings of `[parallel]`.
fn trained(dir: &Path, workers: usize, layout: &str, flags: &[&str]) -> String {
    let mut command = kolo(dir);
    command.args([
        "train",
        "job.toml",
        "--quiet",
        "--threads",
        "1",
        "--report",
        "report.json",
        "-n",
        &workers.to_string(),
    ]);
    command.args(layout.split_whitespace().flat_map(|setting| ["--set".to_string(), format!("parallel.{setting}")]));
    run(command.args(flags), LIMIT).well();
    weights(&report(dir)).to_string()
}

fn agree(job: &str, layouts: &[(usize, &str)]) {
    let dir = tempdir();
    std::fs::write(dir.path().join("job.toml"), job).expect("a job file");
    let alone = trained(dir.path(), 1, "", &[]);
    for (workers, layout) in layouts {
        let transport: &[&str] = if workers % 8 == 0 { &["--transport", "tcp"] } else { &[] };
        assert_eq!(trained(dir.path(), *workers, layout, transport), alone, "-n {workers} {layout}\n{job}");
    }
}

#[test]
fn a_split_gpt_has_the_weights_of_one_worker() {
    let layouts = [
        (2, "tensor=2"),
        (2, "pipeline=2"),
        (4, "tensor=2 zero=1"),
        (2, "zero=2"),
        (4, "zero=3"),
        (4, "pipeline=2 schedule=zero-bubble"),
        (4, "pipeline=2 chunks=2 schedule=interleaved zero=1"),
        (4, "pipeline=2 zero=3"),
        (4, "pipeline=4 schedule=bidirectional"),
        (4, "pipeline=2 schedule=bidirectional zero=2"),
        (4, "tensor=2 pipeline=2 schedule=gpipe"),
        (8, "tensor=2 pipeline=2 zero=1"),
        (8, "tensor=2 zero=3"),
    ];
    agree(GPT, &layouts);
}

/// Gradients of tied weights, and of positions that a stage of their own keeps, go past stages that are behind, and are larger
/// than what a link holds.
#[test]
fn large_gradients_cross_stages() {
    let gpt =
        GPT.replace("width = 24", "width = 192").replace("vocab = 11", "vocab = 701").replace("steps = 3", "steps = 2");
    agree(&gpt, &[(4, "pipeline=4"), (2, "pipeline=2 schedule=zero-bubble stages=[\"h.0\"]")]);
}

/// The sequence is part of the job as slices are: what is between layers is cut along it, or all but attention.
#[test]
fn a_split_sequence_has_the_weights_of_one_worker() {
    let job = |sequence: &str| {
        GPT.replace("heads = 3", "heads = 4").replace("slices = 2", &format!("slices = 2\nsequence = \"{sequence}\""))
    };
    agree(&job("tensor"), &[(2, "tensor=2"), (4, "tensor=2 zero=1"), (4, "tensor=2 pipeline=2")]);
    agree(&job("heads"), &[(2, "context=2"), (4, "context=2 zero=1"), (4, "context=2 pipeline=2")]);
    // Tokens and layers have slices each.
    let both = |sequence: &str| job(sequence) + "tensor_slices = 2\n";
    agree(&both("heads"), &[(2, "tensor=2"), (4, "context=2 tensor=2")]);
    // Fewer heads than slices of the layers: attention is whole along them, and a worker of two has other shapes than one alone.
    let few = |job: String| job.replace("heads = 4", "heads = 3").replace("tensor_slices = 2", "tensor_slices = 4");
    agree(&few(both("heads")), &[(2, "tensor=2"), (4, "context=2 tensor=2"), (4, "tensor=4")]);
    let llama = both("heads").replace("gpt", "llama").replace("dropout = 0.1", "kv_heads = 3\nhidden = 8");
    agree(&few(llama), &[(2, "tensor=2"), (4, "tensor=4")]);
}

/// Keys and values go round a ring, of ranks that have two blocks of tokens each, or one, or all.
#[test]
fn attention_round_a_ring_has_the_weights_of_one_worker() {
    let job = GPT.replace("slices = 2", "slices = 4\ntensor_slices = 2\nsequence = \"context\"");
    let layouts = [
        (2, "context=2"),
        (4, "context=4"),
        (4, "context=2 tensor=2"),
        (4, "context=2 pipeline=2 schedule=zero-bubble"),
        (4, "context=2 zero=3"),
        (8, "context=2 tensor=2 zero=1"),
    ];
    agree(&job, &layouts);
}

#[test]
fn split_models_of_other_kinds_have_the_weights_of_one_worker() {
    agree(RESNET, &[(2, "tensor=2"), (4, "tensor=4"), (4, "pipeline=4 schedule=bidirectional")]);
    agree(LSTM, &[(2, "tensor=2"), (2, "pipeline=2")]);
    // A frozen bias that the first rank alone adds, and whose layer is whole on nobody in an evaluation either.
    let frozen = LSTM.replace("width = 16", "width = 6\nfreeze = [\"*bias*\"]");
    agree(&frozen, &[(4, "tensor=2 zero=3")]);
    let layouts = [
        (4, "tensor=2 pipeline=2"),
        (2, "pipeline=2 schedule=zero-bubble"),
        (8, "tensor=2 pipeline=4"),
        // It ends with a map of decisions, for which no worker has all weights.
        (2, "zero=3"),
    ];
    agree(MLP, &layouts);
}

/// Images of odd sizes in strips and tiles, beside everything else.
#[test]
fn images_in_tiles_have_the_weights_of_one_worker() {
    let job = RESNET.replace("[3, 8, 8]", "[3, 15, 10]").replace("slices = 4", "slices = 2\ntiles = [2, 2]");
    agree(
        &job,
        &[
            (2, "spatial=[2,1]"),
            (4, "spatial=[2,2] zero=1"),
            (4, "spatial=[1,2] pipeline=2"),
            (8, "spatial=[2,2] tensor=2"),
        ],
    );
    let layers = RESNET.replace("[3, 8, 8]", "[3, 16, 16]").replace(
        "[parallel]\nslices = 4",
        "[parallel.layers]\n\"layer1.*\" = { spatial = 2 }\n\"fc\" = { tensor = 2 }",
    );
    agree(&layers, &[(4, "zero=3")]);
    let stem = layers.replace("layer1.*", "conv1");
    agree(&stem, &[(2, "")]);
}

/// The most runs that a tensor has in the last checkpoint of a run.
fn runs_of_a_tensor(out: &Path) -> usize {
    let manifest = out.join("checkpoints/step-00000003/manifest.json");
    let manifest: serde_json::Value =
        serde_json::from_slice(&std::fs::read(manifest).expect("a manifest")).expect("JSON");
    let tensors = manifest["tensors"].as_array().expect("tensors").iter();
    tensors.map(|tensor| tensor["runs"].as_array().map_or(0, Vec::len)).max().expect("a tensor")
}

/// Saved in one layout, gone on with in others. What a rank has of a tensor, however it is cut, is one entry of the checkpoint.
#[test]
fn a_checkpoint_of_a_split_model_moves_to_any_layout() {
    let dir = tempdir();
    std::fs::write(dir.path().join("job.toml"), GPT).expect("a job file");
    let alone = trained(dir.path(), 1, "", &[]);
    let layouts =
        [(4, "tensor=2 pipeline=2"), (4, "tensor=2 zero=3"), (2, "pipeline=2 chunks=2 schedule=interleaved"), (1, "")];
    for (at, (workers, layout)) in layouts.iter().enumerate() {
        let (next_workers, next) = layouts[(at + 1) % layouts.len()];
        let out = format!("run{at}");
        let saving = ["--set", "checkpoint.every=2 steps", "--set", "checkpoint.keep=9", "--out", &out];
        assert_eq!(trained(dir.path(), *workers, layout, &saving), alone);
        assert!(runs_of_a_tensor(&dir.path().join(&out)) <= *workers, "-n {workers} {layout}");
        // As if it had been killed before it was done.
        let checkpoints = dir.path().join(&out).join("checkpoints");
        std::fs::remove_dir_all(checkpoints.join("step-00000003")).expect("the last checkpoint");
        let last = trained(dir.path(), next_workers, next, &["--resume", "--out", &out]);
        assert_eq!(last, alone, "-n {workers} {layout}, then -n {next_workers} {next}");
    }
}

/// A layout that cannot be is refused with one that can.
#[test]
fn an_impossible_layout_names_possible_ones() {
    let dir = tempdir();
    let refused = |job: &str, workers: usize, layout: &str| {
        std::fs::write(dir.path().join("job.toml"), job).expect("a job file");
        let mut command = kolo(dir.path());
        command.args(["train", "job.toml", "--quiet", "-n", &workers.to_string()]);
        command
            .args(layout.split_whitespace().flat_map(|setting| ["--set".to_string(), format!("parallel.{setting}")]));
        let ended = run(&mut command, LIMIT);
        assert_ne!(ended.code, Some(0), "-n {workers} {layout}: {ended}");
        ended.stderr
    };
    // A name that is wrong is no matter of layouts.
    let text = refused(GPT, 2, "layers={\"h.9.*\"={tensor=2}}");
    assert!(text.contains("layers are h.0.attn"), "{text}");
    for (workers, layout, words) in [
        (4, "tensor=4", "write `slices = 4`"),
        (3, "tensor=3", "use 2 or 4 workers"),
        (3, "tensor=2", "multiple of 2"),
        (4, "pipeline=2 zero=3 schedule=bidirectional", "write `zero = 2`"),
        (2, "slices=3", "write 2 or 4"),
        (16, "pipeline=16", "at most 6 stages"),
        (2, "pipeline=2 schedule=2f2b", "gpipe, 1f1b, interleaved"),
        (2, "pipeline=2 chunks=2", "interleaved"),
        (2, "context=2", "`sequence = \"context\"` or"),
        (2, "context=2 sequence=context slices=1", "write `slices = 4`"),
        (2, "context=2 sequence=context slices=16", "write `slices = 8`, or use a context of 16 tokens"),
        (4, "tensor=2 context=2 sequence=heads", "write `tensor_slices = 2`"),
        (4, "tensor=2 context=2 sequence=heads tensor_slices=2", "write `sequence = \"context\"`"),
        (2, "tensor=2 tensor_slices=2", "write `slices = 2`"),
        (2, "pipeline=2 stages=[\"h.9\"]", "h.1"),
        (2, "spatial=[2,1]", "write `tiles = [2, 1]`"),
        (2, "spatial=[2,1] tiles=[2,1]", "use it for a model of images"),
        (2, "layers={\"h.1.*\"={tensor=4}}", "multiple of 4"),
        (8, "pipeline=4 layers={\"wte\"={tensor=4}}", "multiple of 16"),
        (2, "tensor=2 layers={\"h.1.*\"={tensor=2}}", "leave `parallel.tensor` out"),
    ] {
        let text = refused(GPT, workers, layout);
        assert!(text.contains(words), "-n {workers} {layout}: {words:?} is not in\n{text}");
        assert!(
            text.contains("layouts that would do:\n    -n "),
            "-n {workers} {layout}: no layout is named in\n{text}"
        );
    }
    // Most of what is near has more stages than the model has layers.
    let lstm = LSTM.replace("grains = 4", "grains = 2").replace("width = 16", "width = 16\nlayers = 2");
    let resnet = RESNET.replace("slices = 4", "slices = 1");
    for (job, workers, layout) in [
        (&lstm, 8, "pipeline=4 chunks=3 schedule=interleaved zero=2"),
        (&resnet, 2, "layers={\"conv1\"={spatial=4}}"),
        (&resnet, 2, "spatial=[2,1] tiles=[4,1] layers={\"conv1\"={spatial=4}}"),
    ] {
        let text = refused(job, workers, layout);
        assert!(text.contains("layouts that would do:\n    -n "), "-n {workers} {layout}: {text}");
    }
}

/// A pipe or a device is no schedule, and nobody waits for it.
#[test]
fn a_schedule_is_a_file_with_an_end() {
    let dir = tempdir();
    std::fs::write(dir.path().join("job.toml"), GPT).expect("a job file");
    run(std::process::Command::new("mkfifo").arg(dir.path().join("pipe")), LIMIT).well();
    for schedule in ["pipe", "/dev/zero"] {
        let mut command = kolo(dir.path());
        command.args(["plan", "job.toml", "-n", "2", "--set", "parallel.pipeline=2", "--set"]);
        let ended = run(command.arg(format!("parallel.schedule={schedule}")), LIMIT);
        assert!(ended.stderr.contains("it is not a regular file"), "{schedule}: {ended}");
    }
}

/// Jobs and layouts that nobody listed, of sizes that nobody chose. `bench/layouts.py --random 1000` tries more.
#[test]
fn random_layouts_have_the_weights_of_one_worker() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/layouts.py");
    let mut command = std::process::Command::new("python3");
    command.arg(script).args(["--random", "60", "--seed", "30", "--ways", "shm", "tcp"]);
    let run = match command.args(["--binary", env!("CARGO_BIN_EXE_kolo")]).output() {
        Ok(run) => run,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return println!("skipped: no python3"),
        Err(error) => panic!("{error}"),
    };
    let lines = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{lines}{}", String::from_utf8_lossy(&run.stderr));
    let same = lines.lines().filter(|line| line.contains(": same (")).count();
    assert!(same >= 20, "{same} of 60 layouts were trained\n{lines}");
}
