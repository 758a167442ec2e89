//! Jobs on files: the same bits with any number of workers, loader threads and any cache, whatever is random or broken.

use crate::workers::{assert_same, on_ranks, report};
use kolo_models::MODELS;
use kolo_train::session::Company;
use kolo_train::{Job, Report, job_file};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

/// A PNG file of 9×8 pixels: stripes along or across, of some colour.
fn picture(class: usize, number: usize) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, 9, 8);
    encoder.set_color(png::ColorType::Rgb);
    let pixel = |at: usize| {
        let along = if class == 0 { at / 9 } else { at % 9 };
        let bright = if (along + number) % 4 < 2 { 200 } else { 30 };
        [bright, (number * 37 % 256) as u8, (at * 3 + number) as u8]
    };
    let bytes: Vec<u8> = (0..72).flat_map(pixel).collect();
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
    let one = |world| report(&job(root, keys), Company::Workers(world));
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
    let alone = report(&job(root.path(), AUGMENTED), Company::Alone);
    let plain = report(
        &job(root.path(), "transforms = [{ kind = \"resize\", size = 8 }, { kind = \"crop\", size = 8 }]"),
        Company::Alone,
    );
    assert_ne!(alone.weights, plain.weights);
    for keys in ["threads = 1", "threads = 4\nprefetch = 3", "cache = \"memory\"", "cache = \"disk\"\ncache_max = 9000"]
    {
        let other = report(&job(root.path(), &format!("{AUGMENTED}{keys}")), Company::Alone);
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

#[test]
fn broken_images_stop_the_run_or_are_counted() {
    let root = TempDir::new().unwrap();
    folders(root.path(), 30);
    for (name, bytes) in [("along/007.png", 40), ("across/003.png", 0), ("across/020.png", 20)] {
        let whole = fs::read(root.path().join(name)).unwrap();
        fs::write(root.path().join(name), &whole[..bytes]).unwrap();
    }
    let skip = format!("{AUGMENTED}on_error = \"skip\"");
    let alone = report(&job(root.path(), &skip), Company::Alone);
    let skipped = alone.skipped.clone().unwrap();
    let decoded = skipped.messages.iter().any(|message| message.contains("the image cannot be decoded"));
    assert!(skipped.samples >= 3 && decoded, "{skipped:?}");
    for workers in [2, 4] {
        let other = among(workers, root.path(), &format!("{skip}\ncache = \"memory\"\nthreads = 3"));
        assert_same(&format!("{workers} workers"), &alone, &other);
        assert_eq!(skipped.samples, other.skipped.unwrap().samples, "{workers} workers");
    }
    let stops = job(root.path(), AUGMENTED);
    let mut trainer = kolo_train::Trainer::new(stops, kolo_exec::Options { threads: 1, lanes: 1, grains: 4 }).unwrap();
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
    let alone = report(&job, Company::Alone);
    assert!(alone.metrics.contains_key("accuracy") && alone.steps == 6);
    // What is held out has no part in the weights.
    fs::write(validation.join("along/001.png"), picture(1, 99)).unwrap();
    let other = report(&self::job(&train, &keys), Company::Alone);
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
    assert_eq!((source.fields(), source.len()), (&job.source.fields()[..1], 6));
    assert_eq!(source.class_names().unwrap(), ["across", "along"]);
    let mut image = vec![0.0; source.fields()[0].elements()];
    source.fill(2, 0, kolo_data::Column::F32(&mut image)).unwrap();
    assert!(image.iter().all(|value| (-2.0..=2.0).contains(value)) && image.iter().any(|value| *value < 0.0));
}
