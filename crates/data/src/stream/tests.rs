//! Streams give the records of their files, in the same order however many workers walk them.

use super::*;
use crate::files::DataFile;
use crate::format::{Reader, named};
use crate::formats::testing::{file, settings, text};
use crate::source::{Draw, Row, Source};
use crate::split::Purpose;
use crate::{Column, SOURCES};
use kolo_graph::settings::Setting;
use std::fs;
use std::io::Write;
use std::path::PathBuf;

fn stream_of(path: &str, keys: &[(&str, Setting)]) -> files::StreamFiles {
    let settings = settings(keys);
    let stream = StreamSettings { files: true, buffer: 1, samples: None };
    files::StreamFiles::open(path, &settings, "source", stream).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn records_are_those_of_the_reader_with_random_access() {
    let directory = tempfile::tempdir().unwrap();
    let shards = ["a-000000.tar", "a-000001.tar"];
    let mut cases: Vec<(&str, Vec<PathBuf>)> =
        vec![("csv", vec![file("table.csv")]), ("jsonl", vec![file("records.jsonl")])];
    for (format, folder, names) in [
        ("webdataset", "shards", &shards[..]),
        ("tfrecord", "records", &["train.tfrecord"]),
        ("tfrecord", "records", &["train.tfrecord.gz"]),
    ] {
        let copy = |name: &&str| {
            let path = directory.path().join(name);
            fs::copy(file("packed").join(folder).join(name), &path).unwrap();
            path
        };
        cases.push((format, names.iter().map(copy).collect()));
    }
    for (format, paths) in cases {
        let listed: Vec<DataFile> = paths.iter().map(|path| DataFile::at(path).unwrap()).collect();
        let random = (named(format).unwrap().open)(&listed, &settings(&[])).unwrap();
        let name = paths.iter().map(|path| path.to_str().unwrap()).collect::<Vec<_>>().join(",");
        let stream = Arc::new(stream_of(&name, &[("format", text(format))]));
        let reader = StreamReader::new(stream);
        assert_eq!((reader.columns(), reader.len()), (random.columns(), random.len()), "{format}");
        // In order, twice the same, and back to the start.
        for at in (0..random.len()).flat_map(|at| [at, at]).chain([random.len() - 1, 0]) {
            let (mut one, mut other) = (Record::new(), Record::new());
            let outcomes = (random.read(at, &mut one).is_ok(), reader.read(at, &mut other).is_ok());
            assert_eq!(outcomes.0, outcomes.1, "{format} {at}");
            if outcomes.0 {
                assert_eq!(one, other, "{format} {at}");
            }
        }
    }
}

/// Rows of a number and a label; some numbers are broken.
fn table(path: &Path, rows: std::ops::Range<usize>, broken: &[usize]) {
    let mut text = "x,label\n".to_string();
    for row in rows {
        let x = if broken.contains(&row) { "half".to_string() } else { row.to_string() };
        text += &format!("{x},{}\n", row % 3);
    }
    fs::write(path, text).unwrap();
}

fn open(path: &Path, keys: &[(&str, Setting)]) -> Result<Box<dyn Source>, String> {
    let mut all = vec![("stream", Setting::Bool(true)), ("shuffle_buffer", Setting::Int(10))];
    all.extend(keys.iter().cloned());
    crate::open(SOURCES, path.to_str().unwrap(), &settings(&all), 5, None).map_err(|error| error.to_string())
}

struct Values([f32; 1], [i32; 1]);

impl Row for Values {
    fn column(&mut self, at: usize) -> Column<'_> {
        if at == 0 { Column::F32(&mut self.0) } else { Column::I32(&mut self.1) }
    }
}

/// Steps of 8 samples in 4 grains.
fn route(source: &dyn Source, purpose: Purpose, first_step: usize, grains: std::ops::Range<usize>) -> Route {
    let split = source.split().unwrap();
    Route {
        purpose,
        split,
        first_step,
        steps_per_epoch: (split.train_len() / 8).max(1),
        step_samples: 8,
        first_sample: grains.start * 2,
        grain_samples: 2,
        grains: grains.len(),
        grain_stride: 2,
        run_grains: grains.len(),
        run_stride: 0,
    }
}

/// What one worker makes of its grains of these steps: the number and the value of each sample.
fn walked(
    source: &dyn Source,
    steps: std::ops::Range<usize>,
    grains: std::ops::Range<usize>,
) -> Result<Vec<Vec<(usize, f32)>>, ReadError> {
    let route = route(source, Purpose::Training, steps.start, grains.clone());
    let walk = source.walk(&route).unwrap();
    let mut made = Vec::new();
    for step in steps {
        // The second grain may come before the first.
        let mut order: Vec<usize> = (0..grains.len()).collect();
        order.reverse();
        let mut of_step = vec![Vec::new(); grains.len()];
        for grain in order {
            let mut numbers = Vec::new();
            walk.choose(step, grain, &mut numbers);
            for sample in numbers {
                let mut row = Values([f32::NAN], [-1]);
                let draw = Draw { sample, epoch: Some(step / route.steps_per_epoch) };
                walk.read(draw, &[0, 1], &mut row)?;
                assert_eq!(row.1[0], row.0[0] as i32 % 3);
                of_step[grain].push((sample, row.0[0]));
            }
        }
        made.push(of_step.concat());
    }
    Ok(made)
}

#[test]
fn workers_share_one_order_and_go_on_anywhere() {
    let directory = tempfile::tempdir().unwrap();
    let names = ["a.csv", "b.csv"].map(|name| directory.path().join(name));
    table(&names[0], 0..70, &[]);
    table(&names[1], 70..107, &[]);
    let source = open(&directory.path().join("*.csv"), &[]).unwrap();
    let split = source.split().unwrap();
    assert_eq!((source.len(), split.train_len(), split.held_out_len()), (107, 86, 21));
    for (sample, file) in [(0, 0), (69, 0), (70, 1), (106, 1)] {
        assert_eq!(source.sample_name(sample).file.as_deref(), Some(names[file].as_path()), "{sample}");
    }
    let alone = walked(&*source, 0..25, 0..4).unwrap();
    for of_step in &alone {
        assert!(of_step.iter().all(|(sample, value)| *sample as f32 == *value && of_step.len() == 8));
        assert!(of_step.iter().all(|(sample, _)| split.purpose(*sample) == Purpose::Training));
    }
    // Two epochs and a half of ten steps each, none the same, and every sample at most once in each.
    let epoch = |number: usize| alone[number * 10..(number + 1) * 10].concat();
    assert_ne!(epoch(0), epoch(1));
    let mut once = epoch(0);
    once.sort_by_key(|(sample, _)| *sample);
    once.dedup();
    assert_eq!(once.len(), 80);
    for workers in [2, 4] {
        let each: Vec<_> = (0..workers)
            .map(|rank| walked(&*source, 0..25, rank * 4 / workers..(rank + 1) * 4 / workers).unwrap())
            .collect();
        for (step, of_step) in alone.iter().enumerate() {
            assert_eq!(*of_step, each.iter().flat_map(|own| own[step].clone()).collect::<Vec<_>>(), "step {step}");
        }
    }
    for start in 1..25 {
        assert_eq!(walked(&*source, start..25, 0..4).unwrap(), alone[start..], "from step {start}");
    }
    let in_order = open(&directory.path().join("*.csv"), &[("shuffle_buffer", Setting::Int(1))]).unwrap();
    let order: Vec<usize> =
        walked(&*in_order, 0..10, 0..4).unwrap().concat().iter().map(|(sample, _)| *sample).collect();
    assert!(order.iter().eq((0..80).map(|i| split.train(i)).collect::<Vec<_>>().iter()));
}

#[test]
fn an_evaluation_walks_what_is_held_out_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.csv");
    table(&path, 0..60, &[]);
    let source = open(&path, &[]).unwrap();
    let split = source.split().unwrap();
    let whole = Route { steps_per_epoch: usize::MAX, ..route(&*source, Purpose::HeldOut, 0, 0..4) };
    let walk = source.walk(&whole).unwrap();
    let mut numbers = Vec::new();
    (0..2).for_each(|step| (0..4).for_each(|grain| walk.choose(step, grain, &mut numbers)));
    assert_eq!(numbers, (0..12).map(|i| split.held_out(i)).collect::<Vec<_>>());
    for sample in numbers {
        let mut row = Values([0.0], [0]);
        walk.read(Draw { sample, epoch: None }, &[0, 1], &mut row).unwrap();
        assert_eq!(row.0[0], sample as f32);
    }
}

/// As many records as the buffer holds and the samples in the making, however long the stream is.
#[test]
fn memory_is_that_of_the_buffer() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.csv");
    table(&path, 0..2000, &[]);
    let settings = settings(&[("stream", Setting::Bool(true)), ("holdout", Setting::Float(0.0))]);
    let files = crate::file_source::opened_stream(path.to_str().unwrap(), &settings, 1);
    let (first, stream) = files.stream_of(0).unwrap();
    let route = Route { split: files.split().unwrap(), ..route(&files, Purpose::Training, 0, 1..2) };
    let own = walk::WalkSettings { seed: 1, buffer: 16, bytes_max: 30_000, first, skips: true };
    let walk = walk::StreamWalk::new(Arc::new(files), stream, route, own);
    for step in 0..240 {
        let mut numbers = Vec::new();
        walk.choose(step, 0, &mut numbers);
        let (records, bytes) = walk.held();
        // The buffer, its neighbours, and those that may stand in for the samples in the making.
        assert!(records <= 16 + 3 * walk::NEIGHBOURS && bytes <= records * 256, "{records} records, {bytes} bytes");
        for sample in numbers {
            walk.read(Draw { sample, epoch: Some(0) }, &[0, 1], &mut Values([0.0], [0])).unwrap();
        }
    }
}

#[test]
fn bad_records_stop_or_another_stands_in() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.csv");
    // The columns are told before the first bad one.
    table(&path, 0..1400, &[1003, 1004, 1200]);
    let classes = ("classes", Setting::Int(3));
    let error = walked(&*open(&path, std::slice::from_ref(&classes)).unwrap(), 0..140, 0..4).unwrap_err();
    assert!(error.message.contains("line 100") && error.message.contains("not a number"), "{error}");
    assert_eq!(error.file.as_deref(), Some(path.as_path()));
    let skips = ("on_error", text("skip"));
    let source = open(&path, &[skips, classes]).unwrap();
    let alone = walked(&*source, 0..140, 0..4).unwrap();
    let stood_in = |made: &(usize, f32)| made.0 as f32 != made.1;
    assert_eq!(alone.concat().iter().filter(|made| stood_in(made)).count(), 3);
    assert_eq!(source.load_times().unwrap().skipped, 3);
    for (rank, start) in [(0, 0), (1, 0), (0, 77), (1, 126)] {
        let own = walked(&*source, start..140, rank * 2..rank * 2 + 2).unwrap();
        let same = own.iter().zip(&alone[start..]).all(|(own, all)| own[..] == all[rank * 4..rank * 4 + 4]);
        assert!(same, "rank {rank} from step {start}");
    }
}

/// Bad records that lie side by side, at the start, in the middle and at the end, where the buffer holds few others.
#[test]
fn neighbours_of_bad_records_stand_in() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.csv");
    for (broken, buffer) in [(0..2, 1), (0..16, 1), (38..41, 1), (30..46, 1), (94..96, 1), (80..96, 1), (80..96, 1000)]
    {
        let broken: Vec<usize> = broken.collect();
        // Cells without a value, as all numbers are told from the first records.
        table(&path, 0..96, &broken);
        fs::write(&path, fs::read_to_string(&path).unwrap().replace("half", "")).unwrap();
        let keys = |buffer| {
            let given = [("on_error", text("skip")), ("classes", Setting::Int(3)), ("holdout", Setting::Float(0.0))];
            let columns = [("inputs", Setting::List(vec![text("x")])), ("shuffle_buffer", Setting::Int(buffer))];
            [&given[..], &columns[..]].concat()
        };
        let source = open(&path, &keys(buffer)).unwrap();
        let alone = walked(&*source, 0..24, 0..4).unwrap_or_else(|error| panic!("{broken:?} {buffer}: {error}"));
        let made = alone.concat();
        let bad: Vec<usize> =
            made.iter().filter(|(sample, value)| *sample as f32 != *value).map(|made| made.0).collect();
        assert_eq!(bad.len(), 2 * broken.len(), "both epochs");
        assert!(made.iter().all(|(_, value)| !broken.contains(&(*value as usize))));
        for (rank, start) in [(0, 0), (1, 1), (0, 5), (1, 11), (0, 13)] {
            let own = walked(&*source, start..24, rank * 2..rank * 2 + 2).unwrap();
            let same = own.iter().zip(&alone[start..]).all(|(own, all)| own[..] == all[rank * 4..rank * 4 + 4]);
            assert!(same, "{broken:?}: rank {rank} from step {start}");
        }
    }
    // With more of them in a row than are tried and kept, the run stops, and the advice is not to write what is written.
    table(&path, 0..96, &(20..80).collect::<Vec<_>>());
    fs::write(&path, fs::read_to_string(&path).unwrap().replace("half", "")).unwrap();
    let keys = [("on_error", text("skip")), ("classes", Setting::Int(3)), ("shuffle_buffer", Setting::Int(1))];
    let keys = [&keys[..], &[("inputs", Setting::List(vec![text("x")])), ("holdout", Setting::Float(0.0))]].concat();
    let error = walked(&*open(&path, &keys).unwrap(), 0..12, 0..4).unwrap_err();
    assert!(error.message.contains("16 replacements that were tried cannot be read either"), "{error}");
    assert!(!error.hint.contains("on_error"), "{error}");
}

#[test]
fn what_streams_cannot_do_is_refused_by_its_key() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.csv");
    table(&path, 0..50, &[]);
    let mixup = || {
        let mut table = Settings::new("data.transforms", "job.toml:5");
        table.set("kind", "job.toml:5", text("mixup"));
        Setting::List(vec![Setting::Table(table)])
    };
    for (key, value, part) in [
        ("folds", Setting::Int(5), "`data.folds` cannot be combined with a stream"),
        ("transforms", mixup(), "`data.transforms` has `mixup`, which cannot be used with a stream"),
        ("shuffle_buffer", Setting::Int(0), "`data.shuffle_buffer`"),
        ("format", text("npy"), "`data.source` cannot be read as a stream, as its format is npy"),
    ] {
        let error = open(&path, &[(key, value)]).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
    let alone = settings(&[("shuffle_buffer", Setting::Int(10))]);
    let error = crate::open(SOURCES, path.to_str().unwrap(), &alone, 5, None).unwrap_err().to_string();
    assert!(error.contains("`data.shuffle_buffer` is for files that are read as a stream"), "{error}");
    let short = open(&path, &[("samples", Setting::Int(90)), ("classes", Setting::Int(3))]).unwrap();
    let error = walked(&*short, 0..9, 0..4).unwrap_err();
    assert!(error.message.contains("the stream ends after 50 records, but an epoch has 90"), "{error}");
    // What ends too early is no bad sample, of which there may be some: nobody looks for each of the others.
    let skips = ("on_error", text("skip"));
    let error = open(&path, &[("samples", Setting::Int(1 << 32)), skips]).unwrap_err();
    assert!(error.contains("the stream ends after 50 records"), "{error}");
    let zlib = directory.path().join("zlib.tfrecord");
    fs::copy(file("packed/records/zlib.tfrecord"), &zlib).unwrap();
    let error = open(&zlib, &[]).unwrap_err();
    assert!(error.contains("compressed with zlib, which cannot be read as a stream"), "{error}");
    let few = open(&path, &[("samples", Setting::Int(30)), ("holdout", Setting::Float(0.0))]).unwrap();
    assert_eq!(few.len(), 30);
    walked(&*few, 0..9, 0..4).unwrap();
}

/// Large records are not read by the thousand to tell their columns, and the buffer is part of what is planned.
#[test]
fn opening_keeps_little() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.jsonl");
    let row = |at: usize| format!("{{\"x\": 1.5, \"label\": {}, \"note\": \"{}\"}}\n", at % 3, "n".repeat(1 << 20));
    fs::write(&path, (0..80).map(row).collect::<String>()).unwrap();
    let keys =
        [("samples", Setting::Int(80)), ("classes", Setting::Int(3)), ("inputs", Setting::List(vec![text("x")]))];
    let source = open(&path, &keys).unwrap();
    let held = source.held_bytes();
    assert!((10 << 20..11 << 20).contains(&held), "{held}");
    let pipe = piped(directory.path(), "pipe.jsonl", fs::read(&path).unwrap());
    let source = crate::open(SOURCES, pipe.to_str().unwrap(), &settings(&keys), 5, None).unwrap();
    assert_eq!(source.len(), 80);
}

/// A named pipe, and a thread that writes these bytes into it.
fn piped(directory: &Path, name: &str, bytes: Vec<u8>) -> PathBuf {
    let path = directory.join(name);
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let target = path.clone();
    std::thread::spawn(move || {
        // Whoever reads may have enough.
        let _ = fs::OpenOptions::new().write(true).open(target).unwrap().write_all(&bytes);
    });
    path
}

#[test]
fn a_pipe_is_walked_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.csv");
    table(&path, 0..300, &[]);
    let bytes = fs::read(&path).unwrap();
    let keys = || [("samples", Setting::Int(100)), ("classes", Setting::Int(3)), ("shuffle_buffer", Setting::Int(10))];
    let opened = |name: &str, keys: &[(&str, Setting)]| {
        let pipe = piped(directory.path(), name, bytes.clone());
        crate::open(SOURCES, pipe.to_str().unwrap(), &settings(keys), 5, None).map_err(|error| error.to_string())
    };
    let source = opened("one.csv", &keys()).unwrap();
    assert_eq!((source.len(), source.split().unwrap().held_out_len()), (100, 0));
    // The first epoch is that of a file with as many samples; the others follow in the pipe.
    let of_file = [&keys()[..], &[("holdout", Setting::Float(0.0))]].concat();
    let alone = walked(&*open(&path, &of_file).unwrap(), 0..12, 0..4).unwrap();
    let through = walked(&*source, 0..36, 0..4).unwrap();
    assert_eq!(through[..12], alone);
    let values: Vec<f32> = through[12..].concat().iter().map(|(_, value)| *value).collect();
    assert!(values.iter().all(|value| (100.0..300.0).contains(value)));
    let error = walked(&*opened("two.csv", &keys()).unwrap(), 3..6, 0..4).unwrap_err().message;
    assert!(error.contains("`data.source` is a pipe, whose samples are gone"), "{error}");
    let error = walked(&*opened("three.csv", &keys()).unwrap(), 0..3, 0..2).unwrap_err().message;
    assert!(error.contains("`data.source` is a pipe, which only one worker can read"), "{error}");
    for (name, keys, part) in [
        ("four.csv", &keys()[1..], "`data.samples` is needed"),
        ("five.csv", &keys()[..1], "`data.classes` would have to read all samples first"),
    ] {
        let error = opened(name, keys).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
    let words = piped(directory.path(), "words.csv", b"x,label\na,0\nb,1\n".repeat(50));
    let error = crate::open(SOURCES, words.to_str().unwrap(), &settings(&keys()), 5, None).unwrap_err().to_string();
    assert!(error.contains("`data.inputs` would have to read all samples first"), "{error}");
    let held_out = [&keys()[..], &[("holdout", Setting::Float(0.1))]].concat();
    let error = opened("six.csv", &held_out).unwrap_err();
    assert!(error.contains("`data.holdout` cannot be taken from a pipe"), "{error}");
    let cached = [&keys()[..], &[("cache", text("memory"))]].concat();
    let error = opened("seven.csv", &cached).unwrap_err();
    assert!(error.contains("`data.cache` keeps samples for the next epoch"), "{error}");
    // Its format is told from what has come: a pipe is opened once, and its writer may be gone.
    assert_eq!(opened("eight", &keys()).unwrap().len(), 100);
    let empty = piped(directory.path(), "nine", Vec::new());
    let error = crate::open(SOURCES, empty.to_str().unwrap(), &settings(&keys()), 5, None).unwrap_err().to_string();
    assert!(error.contains("nine: it is empty"), "{error}");
}
