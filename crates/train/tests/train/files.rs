//! Jobs on files: the same bits with any number of workers, loader threads and any cache, whatever is random or broken.

use crate::checkpoints::run_on;
use crate::workers::{assert_same, on_ranks, options, report};
use kolo_models::MODELS;
use kolo_train::checkpoint::CheckpointDir;
use kolo_train::session::{RunOptions, Silent, WorkerGroup};
use kolo_train::{Job, Report, job_file};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

/// A PNG file of 9×8 pixels: stripes along or across, of some colour.
fn picture(class: usize, number: usize) -> Vec<u8> {
    striped(class, number, 9, 8)
}

fn striped(class: usize, number: usize, width: usize, height: usize) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width as u32, height as u32);
    encoder.set_color(png::ColorType::Rgb);
    let pixel = |at: usize| {
        let along = if class == 0 { at / width } else { at % width };
        let bright = if (along + number) % 4 < 2 { 200 } else { 30 };
        [bright, (number * 37 % 256) as u8, (at * 3 + number) as u8]
    };
    let bytes: Vec<u8> = (0..width * height).flat_map(pixel).collect();
    encoder.write_header().unwrap().write_image_data(&bytes).unwrap();
    file
}

/// A folder per class, of so many pictures each.
fn folders(root: &Path, count: usize) {
    for (class, name) in ["along", "across"].iter().enumerate() {
        fs::create_dir_all(root.join(name)).unwrap();
        (0..count).for_each(|at| fs::write(root.join(format!("{name}/{at:03}.png")), picture(class, at)).unwrap());
    }
}

fn read(root: &Path, keys: &str) -> Result<Job, String> {
    let text = format!(
        "[model]\nkind = \"mlp\"\nhidden = [16]\n[data]\nsource = \"{}\"\nbatch = 16\ngrains = 4\n{keys}\n[train]\nepochs = 3\n\
         optimizer = {{ kind = \"adamw\", lr = 1e-3 }}\n",
        root.display()
    );
    Job::read(&job_file::parse(&text, "test.toml").unwrap(), MODELS).map_err(|error| error.to_string())
}

fn job(root: &Path, keys: &str) -> Arc<Job> {
    Arc::new(read(root, keys).unwrap_or_else(|error| panic!("{error}")))
}

/// Of rank 0.
fn among(workers: usize, root: &Path, keys: &str) -> Report {
    let one = |world| report(&job(root, keys), WorkerGroup::Workers(world));
    on_ranks(workers, one).swap_remove(0)
}

const AUGMENTED: &str = "transforms = [{ kind = \"resize\", size = [8, 10] }, \
    { kind = \"crop\", size = 8, random = true, padding = 1 }, { kind = \"flip\" }, \
    { kind = \"jitter\", brightness = 0.3, hue = 0.1 }, { kind = \"mixup\", alpha = 0.4 }, \
    { kind = \"normalise\", mean = 0.5, std = 0.25 }]\n";

#[test]
fn augmented_images_give_the_same_bits_in_every_layout() {
    let root = TempDir::new().unwrap();
    folders(root.path(), 40);
    let alone = report(&job(root.path(), AUGMENTED), WorkerGroup::Alone);
    let plain = report(
        &job(root.path(), "transforms = [{ kind = \"resize\", size = 8 }, { kind = \"crop\", size = 8 }]"),
        WorkerGroup::Alone,
    );
    assert_ne!(alone.weights, plain.weights);
    for keys in ["threads = 1", "threads = 4\nprefetch = 3", "cache = \"memory\"", "cache = \"disk\"\ncache_max = 9000"]
    {
        let other = report(&job(root.path(), &format!("{AUGMENTED}{keys}")), WorkerGroup::Alone);
        assert_same(keys, &alone, &other);
        let stages = other.data_stages_ms.unwrap();
        assert!(
            stages.samples > 0 && stages.decode > 0.0 && (stages.cached > 0) == keys.contains("cache"),
            "{stages:?}"
        );
    }
    for workers in [2, 4] {
        assert_same(&format!("{workers} workers"), &alone, &among(workers, root.path(), AUGMENTED));
    }
}

/// A tar archive of pictures and their classes, as WebDataset has it.
fn shard(path: &Path, pictures: std::ops::Range<usize>) {
    let mut bytes = Vec::new();
    for at in pictures {
        let class = at % 2;
        for (name, data) in
            [(format!("{at:04}.cls"), class.to_string().into_bytes()), (format!("{at:04}.png"), picture(class, at))]
        {
            let mut header = vec![0; 512];
            header[..name.len()].copy_from_slice(name.as_bytes());
            header[124..136].copy_from_slice(format!("{:011o} ", data.len()).as_bytes());
            header[156] = b'0';
            header[148..156].fill(b' ');
            let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
            header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            bytes.extend([header, data].concat());
            bytes.resize(bytes.len().next_multiple_of(512), 0);
        }
    }
    bytes.resize(bytes.len() + 1024, 0);
    fs::write(path, bytes).unwrap();
}

const STREAMED: &str = "stream = true\nshuffle_buffer = 9\nclasses = 2\n\
    transforms = [{ kind = \"crop\", size = 8, random = true, padding = 1 }, { kind = \"flip\" }]\n";

#[test]
fn streams_give_the_same_bits_in_every_layout_and_go_on() {
    let root = TempDir::new().unwrap();
    shard(&root.path().join("a.tar"), 0..61);
    shard(&root.path().join("b.tar"), 61..109);
    let alone = report(&job(root.path(), STREAMED), WorkerGroup::Alone);
    // 87 samples train, in 5 steps to the epoch.
    assert_eq!((alone.steps, fs::read_dir(root.path()).unwrap().count()), (15, 2), "no index is made");
    let in_order = report(&job(root.path(), &STREAMED.replace("= 9", "= 1")), WorkerGroup::Alone);
    assert_ne!(alone.weights, in_order.weights);
    for keys in ["threads = 1", "threads = 4\nprefetch = 3", "prefetch = 0", "cache = \"memory\""] {
        assert_same(keys, &alone, &report(&job(root.path(), &format!("{STREAMED}{keys}")), WorkerGroup::Alone));
    }
    for workers in [2, 4] {
        let keys = format!("{STREAMED}threads = 3");
        assert_same(&format!("{workers} workers"), &alone, &among(workers, root.path(), &keys));
    }
    let job = job(root.path(), STREAMED);
    for (before, after, step) in [(1, 2, 3), (2, 1, 5), (4, 1, 11)] {
        let saved = TempDir::new().unwrap();
        let (stopped, _) = run_on(&job, (before, 0), saved.path(), Some(step), false);
        assert_eq!((stopped.ended.as_str(), stopped.steps), ("interrupted", step));
        let (resumed, _) = run_on(&job, (after, 0), saved.path(), None, true);
        assert_same(&format!("{before} to {after} workers at step {step}"), &alone, &resumed);
    }
}

#[test]
fn broken_images_stop_the_run_or_are_counted() {
    let root = TempDir::new().unwrap();
    folders(root.path(), 30);
    for (name, bytes) in [("along/007.png", 40), ("across/003.png", 0), ("across/020.png", 20)] {
        let whole = fs::read(root.path().join(name)).unwrap();
        fs::write(root.path().join(name), &whole[..bytes]).unwrap();
    }
    let skip = format!("{AUGMENTED}on_error = \"skip\"");
    let alone = report(&job(root.path(), &skip), WorkerGroup::Alone);
    let skipped = alone.skipped.clone().unwrap();
    let damaged = |message: &String| message.contains("007.png") && message.contains("the image cannot be decoded");
    assert!(skipped.samples >= 3 && skipped.messages.iter().any(damaged), "{skipped:?}");
    for workers in [2, 4] {
        let other = among(workers, root.path(), &format!("{skip}\ncache = \"memory\"\nthreads = 3"));
        assert_same(&format!("{workers} workers"), &alone, &other);
        assert_eq!(skipped, other.skipped.unwrap(), "{workers} workers");
    }
    let stops = job(root.path(), AUGMENTED);
    let mut trainer =
        kolo_train::Trainer::new(stops, kolo_exec::Options { threads: 1, lanes: 1, grains: 4, slots: 1, ways: 1 })
            .unwrap();
    let error = (0..9).find_map(|_| trainer.step().err()).unwrap().to_string();
    assert!(error.starts_with("cannot read sample ") && error.contains("\n  at step "), "{error}");
}

#[test]
fn validation_files_are_not_trained_on() {
    let root = TempDir::new().unwrap();
    let [train, validation, test] = ["train", "val", "test"].map(|name| root.path().join(name));
    folders(&train, 20);
    folders(&validation, 7);
    folders(&test, 3);
    let keys = format!("validation = \"{}\"\n", validation.display());
    let job = job(&train, &format!("{keys}test = \"{}\"", test.display()));
    let lens = (job.split.train_len(), job.split.held_out_len(), job.split.test_len(), job.source.len());
    assert_eq!(lens, (40, 14, 6, 60));
    assert_eq!(job.source.class_names().unwrap(), ["across", "along"]);
    let alone = report(&job, WorkerGroup::Alone);
    assert!(alone.metrics.contains_key("accuracy") && alone.steps == 6);
    // What is held out has no part in the weights.
    fs::write(validation.join("along/001.png"), picture(1, 99)).unwrap();
    let other = report(&self::job(&train, &keys), WorkerGroup::Alone);
    assert_eq!(alone.weights, other.weights);
    assert_ne!(job.manifest().unwrap(), self::job(&train, &keys).manifest().unwrap());
    let error = read(&train, &format!("{keys}holdout = 0.1")).unwrap_err();
    assert!(error.contains("`data.holdout` cannot be combined with `validation`"), "{error}");
}

/// A model sees new files as it saw the old ones, from what was saved and without the old ones.
#[test]
fn new_files_are_seen_as_the_old_ones() {
    let root = TempDir::new().unwrap();
    let [train, new] = ["train", "new"].map(|name| root.path().join(name));
    folders(&train, 10);
    folders(&new, 3);
    let job = job(&train, AUGMENTED);
    let saved = job.source.preprocessing().unwrap();
    fs::remove_dir_all(&train).unwrap();
    let text = format!("[data]\n{AUGMENTED}");
    let data = job_file::parse(&text, "test.toml").unwrap().table("data").unwrap();
    let source = kolo_data::open_for_prediction(new.to_str().unwrap(), &data, &saved).unwrap();
    use kolo_data::Source;
    // Their target, which they need not have, comes with them.
    assert_eq!((source.fields(), source.len()), (job.source.fields(), 6));
    assert_eq!(source.class_names().unwrap(), ["across", "along"]);
    let mut image = vec![0.0; source.fields()[0].elements()];
    source.fill(2, 0, kolo_data::Column::F32(&mut image)).unwrap();
    assert!(image.iter().all(|value| (-2.0..=2.0).contains(value)) && image.iter().any(|value| *value < 0.0));
}

/// The job of an example, with some keys changed.
fn example(name: &str, assignments: &[String]) -> Arc<Job> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name);
    let mut root = job_file::read(&path).unwrap();
    assignments.iter().for_each(|assignment| job_file::override_with(&mut root, assignment).unwrap());
    Arc::new(Job::read(&root, MODELS).unwrap_or_else(|error| panic!("{error}")))
}

/// A table as `examples/make_csv.py` writes it.
fn flowers(count: usize) -> String {
    let mut text = "petal_length,petal_width,height,colour,acidity,species\n".to_string();
    for at in 0..count {
        let class = at % 3;
        let noise = |prime: usize| (at * prime % 101) as f32 / 101.0 - 0.5;
        let (length, width) = (4.0 + class as f32 + noise(37), 1.2 + [0.0, 0.7, 0.2][class] + 0.5 * noise(53));
        let acidity = if at % 19 == 0 { String::new() } else { format!("{:.2}", 6.5 + noise(71)) };
        let (colour, species) = (["white", "yellow", "violet"][(at / 3) % 3], ["aurelia", "borealis", "calida"][class]);
        text += &format!("{length:.2},{width:.2},{:.2},{colour},{acidity},{species}\n", 20.0 + 14.0 * noise(29));
    }
    text
}

#[test]
fn the_example_of_a_table_trains() {
    let root = TempDir::new().unwrap();
    let file = root.path().join("flowers.csv");
    fs::write(&file, flowers(400)).unwrap();
    let keys = [format!("data.source={}", file.display()), "train.epochs=8".into()];
    let job = example("csv.toml", &keys);
    assert_eq!(job.source.class_names().unwrap(), ["aurelia", "borealis", "calida"]);
    assert_eq!(job.fields[0].shape, [7], "four numbers and three colours");
    let alone = report(&job, WorkerGroup::Alone);
    assert!(alone.metrics["accuracy"] > 0.9, "{:?}", alone.metrics);
    let two = on_ranks(2, |world| report(&example("csv.toml", &keys), WorkerGroup::Workers(world)));
    assert_same("2 workers", &alone, &two[0]);
    let regression = ["data.target=petal_length", "data.task=regression", "data.inputs=[\"petal_width\", \"colour\"]"];
    let keys: Vec<String> = keys.iter().cloned().chain(regression.map(String::from)).collect();
    let other = report(&example("csv.toml", &keys), WorkerGroup::Alone);
    assert!(other.metrics["mse"] < 3.0, "{:?}", other.metrics);
}

#[test]
fn the_example_of_an_image_folder_trains() {
    let root = TempDir::new().unwrap();
    for (part, count) in [("train", 30), ("val", 10)] {
        for (class, name) in ["circle", "cross"].iter().enumerate() {
            let folder = root.path().join(part).join(name);
            fs::create_dir_all(&folder).unwrap();
            (0..count).for_each(|at| fs::write(folder.join(format!("{at}.png")), striped(class, at, 32, 32)).unwrap());
        }
    }
    let [train, validation] = ["train", "val"].map(|part| root.path().join(part));
    let keys = [
        format!("data.source={}", train.display()),
        format!("data.validation={}", validation.display()),
        "train.epochs=4".into(),
        "model.channels=[4, 8]".into(),
    ];
    let alone = report(&example("images.toml", &keys), WorkerGroup::Alone);
    assert!(alone.loss.is_finite() && alone.steps == 4 && alone.metrics.contains_key("accuracy"));
    assert!(alone.data_stages_ms.unwrap().cached > 0);
}

/// What comes of going on from a checkpoint.
fn resumed(root: &Path, keys: &str, saved: &Path) -> Result<Report, String> {
    let checkpoints = Some(CheckpointDir { root: saved.into(), required: true, job_text: String::new(), resume: true });
    let options = RunOptions { checkpoints, ..options(WorkerGroup::Alone) };
    kolo_train::run(job(root, keys), &options, &mut Silent).map(|(_, report)| report).map_err(|error| error.to_string())
}

#[test]
fn a_run_goes_on_with_the_data_it_was_trained_on() {
    let root = TempDir::new().unwrap();
    let [train, copy, saved] = ["train", "copy", "saved"].map(|name| root.path().join(name));
    folders(&train, 30);
    folders(&copy, 30);
    let alone = report(&job(&train, ""), WorkerGroup::Alone);
    run_on(&job(&train, ""), (1, 0), &saved, Some(4), false);
    let refused = |what: &str| {
        let error = resumed(&train, "", &saved).unwrap_err();
        assert!(error.contains("the data are not those that ") && error.contains(what), "{error}");
        assert!(error.contains("\n  hint: restore them to resume"), "{error}");
    };
    fs::write(train.join("along/030.png"), picture(0, 30)).unwrap();
    refused("48 samples to train on and 12 held out then, 49 samples to train on and 12 held out now");
    fs::remove_file(train.join("along/030.png")).unwrap();
    // Two files of the middle with each other's contents, of the same size.
    let swapped = |names: [&str; 2]| {
        let [a, b] = names.map(|name| fs::read(train.join(name)).unwrap());
        assert_eq!(a.len(), b.len());
        names.iter().zip([b, a]).for_each(|(name, bytes)| fs::write(train.join(name), bytes).unwrap());
    };
    let same_size = |a: &usize| picture(0, *a).len() == picture(1, *a).len();
    let at = (1..29).find(same_size).expect("two files of one size");
    let names = [format!("along/{at:03}.png"), format!("across/{at:03}.png")];
    swapped([&names[0], &names[1]]);
    refused("as before, with other contents");
    swapped([&names[0], &names[1]]);
    fs::rename(train.join("along"), train.join("upright")).unwrap();
    refused("as before, with other contents");
    fs::remove_dir_all(&train).unwrap();
    for keys in ["", "cache = \"memory\"\ncache_max = 1000000"] {
        let again = TempDir::new().unwrap();
        crate::checkpoints::copy_tree(&saved, again.path());
        assert_same(keys, &alone, &resumed(&copy, keys, again.path()).unwrap());
    }
}

/// Days of three stores, whose sales go up and down with the day of the week.
fn sales(path: &Path, days: usize) {
    let mut text = String::from("day,store,open,sales,rush\n");
    for day in 0..days {
        for (store, level) in [("north", 150.0), ("south", 90.0), ("west", 400.0)] {
            let season = [0.0, 4.0, 9.0, 11.0, 8.0, 3.0, -6.0][day % 7];
            let sales: f64 = level + season * level / 40.0 + day as f64 / 50.0;
            let rush = if day % 7 == 3 { "yes" } else { "no" };
            text += &format!("{day},{store},{},{sales:.3},{rush}\n", usize::from(day % 7 < 6));
        }
    }
    fs::write(path, text).unwrap();
}

fn job_of(text: &str) -> Arc<Job> {
    let root = job_file::parse(text, "test.toml").unwrap();
    Arc::new(Job::read(&root, MODELS).unwrap_or_else(|error| panic!("{error}")))
}

/// Windows of a table are samples like any others, and metrics are in the target's own unit.
#[test]
fn forecasts_over_tables_give_the_same_bits_and_metrics_in_their_unit() {
    let root = TempDir::new().unwrap();
    let path = root.path().join("sales.csv");
    sales(&path, 120);
    let text = |model: &str| {
        format!(
            "[model]\n{model}\n[data]\nsource = \"{}\"\nbatch = 16\ngrains = 4\ntarget = \"sales\"\n\
             inputs = [\"sales\", \"open\"]\nwindow = {{ past = 14, future = 3, step = 1, series = \"store\" }}\n\
             transforms = [{{ kind = \"standardise\" }}, {{ kind = \"standardise\", of = \"target\" }}]\n[train]\nepochs = 12\n\
             optimizer = {{ kind = \"adamw\", lr = 5e-3 }}\n",
            path.display()
        )
    };
    for model in ["kind = \"mlp\"\nhidden = [24]", "kind = \"lstm\"\nlayers = 1\nwidth = 12"] {
        let job = job_of(&text(model));
        // 96 days train and 24 are held out, of each store.
        assert_eq!((job.split.train_len(), job.split.held_out_len()), (3 * 80, 3 * 8));
        let alone = report(&job, WorkerGroup::Alone);
        let reports = on_ranks(2, |world| report(&job, WorkerGroup::Workers(world)));
        reports.iter().for_each(|other| assert_same(model, &alone, other));
        let deviation = f64::from(job.source.target_scale().unwrap().deviation[0]);
        let metric = |name: &str| alone.metrics[name];
        assert!(deviation > 100.0, "{deviation}");
        assert!(
            (metric("rmse") - metric("mse").sqrt() * deviation).abs() < 1e-3 * metric("rmse"),
            "{:?}",
            alone.metrics
        );
        assert!(metric("mae") <= metric("rmse") && metric("mae") > 0.0, "{:?}", alone.metrics);
        assert!(metric("r2") > 0.8 && metric("r2") < 1.0, "{:?}", alone.metrics);
    }
}

/// Who is held out, and what classes weigh, follows from the data and the seed alone.
#[test]
fn splits_by_class_or_group_and_class_weights_give_the_same_bits() {
    let root = TempDir::new().unwrap();
    let path = root.path().join("sales.csv");
    sales(&path, 60);
    let text = |data: &str, train: &str| {
        format!(
            "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nsource = \"{}\"\nbatch = 16\ngrains = 4\ntarget = \"rush\"\n\
             inputs = [\"day\", \"open\", \"sales\"]\n{data}\n[train]\nepochs = 2\n{train}\n",
            path.display()
        )
    };
    let plain = report(&job_of(&text("", "")), WorkerGroup::Alone);
    for (data, train) in [
        ("split = \"stratified\"", ""),
        ("group = \"store\"\nholdout = 0.4", ""),
        ("split = \"chronological\"", ""),
        ("", "class_weights = \"balanced\""),
        ("split = \"stratified\"", "class_weights = { no = 1.0, yes = 6.0 }"),
    ] {
        let job = job_of(&text(data, train));
        let name = format!("{data} {train}");
        if data.contains("stratified") {
            // 27 of 180 samples are "yes": 5 of 36 are as near as whole samples come.
            let counts = job.source.class_counts(&job.split).unwrap();
            assert_eq!(counts, [122, 22], "{name}");
        }
        if train.contains("balanced") {
            let counts = job.source.class_counts(&job.split).unwrap();
            let weights = job.class_weights.clone().unwrap();
            assert!(
                weights[0] == 1.0 && (weights[1] - counts[0] as f32 / counts[1] as f32).abs() < 1e-5,
                "{weights:?}"
            );
        }
        let alone = report(&job, WorkerGroup::Alone);
        assert_ne!(alone.weights, plain.weights, "{name}");
        let reports = on_ranks(2, |world| report(&job, WorkerGroup::Workers(world)));
        reports.iter().for_each(|other| assert_same(&name, &alone, other));
    }
}

/// What a model cannot take is refused with the field, its shape and the shape that is wanted, before anything runs.
#[test]
fn shapes_and_types_are_judged_before_the_run() {
    let root = TempDir::new().unwrap();
    let path = root.path().join("masks.jsonl");
    let line = |at: usize| format!("{{\"x\": [{at}, 2, 3, 4], \"y\": [[{}, 0], [1, -1]]}}\n", at % 3);
    fs::write(&path, (0..40).map(line).collect::<String>()).unwrap();
    let error = read(&path, "").unwrap_err();
    let found = format!(
        "is \"{}\", which has x [4] real; y [2, 2] index below 3, but the model expects y [] index below 3",
        path.display()
    );
    assert!(error.contains(&found), "{error}");
    // As numbers they are four values to predict.
    let job = read(&path, "types = { y = \"real\" }").unwrap();
    assert_eq!(job.fields[1], kolo_data::Field::real("y", &[2, 2]));
    // The model takes numbers, whatever a row of whole numbers may be.
    let error = read(&path, "types = { x = \"tokens\", y = \"real\" }").unwrap_err();
    assert!(
        error.contains("which has x [4] index below 40; y [2, 2] real, but the model expects x [4] real"),
        "{error}"
    );
    assert!(error.contains("`types = { COLUMN = \"tokens\" }` says what a column holds"), "{error}");
    let error = read(&path, "types = { y = \"tokens\" }").unwrap_err();
    assert!(
        error.contains("takes a row of whole numbers, but column \"y\" of") && error.contains("is int [2, 2]"),
        "{error}"
    );
}

#[test]
fn an_evaluation_that_outweighs_all_steps_is_said_and_one_without_an_end_refused() {
    let read = |keys: &str| {
        let text = format!(
            "[model]\nkind = \"mlp\"\ninputs = 4\nhidden = [4]\nclasses = 3\n[data]\nsource = \"synthetic:features\"\n{keys}\n\
             batch = 16\n[train]\nsteps = 2\n"
        );
        Job::read(&job_file::parse(&text, "test.toml").unwrap(), MODELS).map_err(|error| error.to_string())
    };
    let note = read("samples = 1000000").unwrap().evaluation_note();
    let said = "an evaluation takes 200000 samples, 6250 times those of all steps: `holdout` can leave it fewer";
    assert_eq!(note.as_deref(), Some(said));
    assert_eq!(read("samples = 1000000\nholdout = 0.01").unwrap().evaluation_note(), None);
    assert_eq!(read("").unwrap().evaluation_note(), None);
    let error = read("samples = 9223372036854775807").map(|_| ()).unwrap_err();
    assert!(error.contains("`data.holdout` leaves 1844674407370955"), "{error}");
}
