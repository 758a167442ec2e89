//! Records in memory through the whole pipeline.

use super::open::join;
use super::part::{Part, Places};
use super::*;
use crate::format::Reader;
use crate::record::{RecordColumn, RecordKind, RecordValue};
use kolo_graph::field::Kind;
use kolo_graph::settings::{Setting, Settings};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Records in memory, of which some are broken.
#[derive(Clone, Debug)]
struct Memory {
    columns: Vec<RecordColumn>,
    records: Vec<Vec<RecordValue>>,
    broken: BTreeSet<usize>,
}

impl Reader for Memory {
    fn columns(&self) -> &[RecordColumn] {
        &self.columns
    }

    fn len(&self) -> usize {
        self.records.len()
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        if self.broken.contains(&at) {
            return Err(ReadError::new("half a record", "copy it again").in_file(Path::new("a.bin")).at(77));
        }
        for (column, value) in self.records[at].iter().enumerate() {
            match value {
                RecordValue::Bytes(bytes) => record.bytes(column).extend_from_slice(bytes),
                RecordValue::Text(text) => record.text(column).push_str(text),
                RecordValue::Reals(reals) => record.reals(column).extend_from_slice(reals),
                RecordValue::Ints(ints) => record.ints(column).extend_from_slice(ints),
                RecordValue::Missing => record.missing(column),
            }
        }
        Ok(())
    }
}

fn column(name: &str, kind: RecordKind) -> RecordColumn {
    RecordColumn { name: name.into(), kind }
}

fn real() -> RecordKind {
    RecordKind::Real { shape: vec![] }
}

/// Pictures of 6×6 pixels in three classes.
fn pictures(count: usize) -> Memory {
    let names: Arc<[String]> = ["cat", "dog", "owl"].map(String::from).into();
    let columns = vec![
        column("image", RecordKind::Pixels { shape: vec![3, 6, 6] }),
        column("label", RecordKind::Class { names }),
    ];
    let record = |at: usize| {
        let bytes = (0..108).map(|byte| (byte * 7 + at * 31) as u8).collect();
        vec![RecordValue::Bytes(bytes), RecordValue::Ints(vec![at as i64 % 3])]
    };
    Memory { columns, records: (0..count).map(record).collect(), broken: BTreeSet::new() }
}

/// Rows of a, colour, b and a label.
fn table(count: usize) -> Memory {
    let columns = vec![
        column("a", real()),
        column("colour", RecordKind::Text),
        column("b", real()),
        column("label", RecordKind::Text),
    ];
    let record = |at: usize| {
        let text = |text: &str| RecordValue::Text(text.into());
        let number = |value: f32| RecordValue::Reals(vec![value]);
        let label = if at.is_multiple_of(2) { "yes" } else { "no" };
        vec![number(at as f32), text(["red", "blue", "green"][at % 3]), number(at as f32 * 10.0), text(label)]
    };
    Memory { columns, records: (0..count).map(record).collect(), broken: BTreeSet::new() }
}

fn settings(toml: &[(&str, Setting)]) -> Settings {
    let mut settings = Settings::new("data", "job.toml:3");
    toml.iter().for_each(|(key, value)| settings.set(key, "job.toml:4", value.clone()));
    settings
}

fn text(text: &str) -> Setting {
    Setting::Text(text.into())
}

fn transforms(list: &[&[(&str, Setting)]]) -> (&'static str, Setting) {
    let table = |keys: &&[(&str, Setting)]| {
        let mut table = Settings::new("data.transforms", "job.toml:5");
        keys.iter().for_each(|(key, value)| table.set(key, "job.toml:5", value.clone()));
        Setting::Table(table)
    };
    ("transforms", Setting::List(list.iter().map(table).collect()))
}

fn part(name: &str, memory: &Memory) -> Part {
    let reader = Box::new(memory.clone());
    let places = Places::default();
    Part { name: name.into(), format: "memory", files: vec![], reader, stream: None, places, notes: vec![] }
}

fn opened(memory: &Memory, keys: &[(&str, Setting)]) -> Result<FileSource, String> {
    let settings = settings(keys);
    let source = join(vec![("source", part("some", memory))], &settings, 1, None).map_err(|error| error.to_string())?;
    settings.finish().map_err(|error| error.to_string())?;
    Ok(source)
}

struct Values {
    x: Vec<f32>,
    y: Vec<i32>,
}

impl Row for Values {
    fn column(&mut self, at: usize) -> Column<'_> {
        if at == 0 { Column::F32(&mut self.x) } else { Column::I32(&mut self.y) }
    }
}

fn values(source: &FileSource, sample: usize, epoch: Option<usize>) -> Result<(Vec<f32>, Vec<i32>), ReadError> {
    let [x, y] = [0, 1].map(|field| source.fields()[field].elements());
    let mut row = Values { x: vec![f32::NAN; x], y: vec![i32::MIN; y] };
    source.read(Draw { sample, epoch }, &[0, 1], &mut row).map(|()| (row.x, row.y))
}

/// Augmentation of every kind.
fn augmented() -> (&'static str, Setting) {
    let number = |key: &'static str, value: f64| (key, Setting::Float(value));
    transforms(&[
        &[("kind", text("resize")), ("size", Setting::List(vec![Setting::Int(9), Setting::Int(8)]))],
        &[("kind", text("crop")), ("size", Setting::Int(6)), ("random", Setting::Bool(true))],
        &[("kind", text("flip"))],
        &[("kind", text("jitter")), number("brightness", 0.4), number("saturation", 0.3)],
        &[("kind", text("mixup"))],
        &[("kind", text("normalise")), number("mean", 0.5), number("std", 0.25)],
    ])
}

#[test]
fn pictures_become_fields() {
    let source = opened(&pictures(20), &[]).unwrap();
    assert_eq!(source.fields(), [Field::real("x", &[3, 6, 6]), Field::index("y", &[], 3)]);
    assert_eq!(source.class_names().unwrap(), ["cat", "dog", "owl"]);
    let (x, y) = values(&source, 4, None).unwrap();
    let RecordValue::Bytes(bytes) = &pictures(5).records[4][0] else { panic!() };
    assert!(x.iter().zip(bytes).all(|(real, byte)| *real == f32::from(*byte) / 255.0));
    assert_eq!(y, [1]);
    assert!(source.describe().starts_with("some 20 samples (memory); x [3, 6, 6] real, y [] index below 3"));
}

/// What is random depends on the seed, the epoch and the sample, not on who asks, or on a cache.
#[test]
fn augmentation_repeats_with_any_order_threads_and_cache() {
    let memory = pictures(40);
    let plain = opened(&memory, &[augmented()]).unwrap();
    let draws: Vec<(usize, Option<usize>)> =
        (0..40).flat_map(|sample| [(sample, Some(0)), (sample, Some(1)), (sample, None)]).collect();
    let expected: Vec<_> = draws.iter().map(|(sample, epoch)| values(&plain, *sample, *epoch).unwrap()).collect();
    assert!((0..40).all(|sample| expected[3 * sample] != expected[3 * sample + 1]), "epochs differ");
    for cache in ["none", "memory", "disk"] {
        for cache_max in [0, 3000] {
            let mut keys = vec![augmented(), ("cache", text(cache))];
            if cache != "none" {
                keys.push(("cache_max", Setting::Int(cache_max)));
            }
            let source = opened(&memory, &keys).unwrap();
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let (source, draws, expected) = (&source, &draws, &expected);
                    scope.spawn(move || {
                        for at in (0..draws.len()).rev().cycle().skip(thread * 31).take(2 * draws.len()) {
                            let (sample, epoch) = draws[at];
                            assert!(
                                values(source, sample, epoch).unwrap() == expected[at],
                                "{cache} {sample} {epoch:?}"
                            );
                        }
                    });
                }
            });
            assert_eq!(source.load_times().unwrap().cached > 0, cache != "none");
        }
    }
}

#[test]
fn times_are_kept_by_stage() {
    let source = opened(&pictures(40), &[augmented()]).unwrap();
    (0..30).for_each(|sample| _ = values(&source, sample, Some(0)).unwrap());
    let times = source.load_times().unwrap();
    assert_eq!((times.samples, times.skipped, times.cached), (30, 0, 0));
    assert!(times.read_ns > 0 && times.decode_ns > 0 && times.transform_ns > 0 && times.slowest().is_some());
}

#[test]
fn tables_join_their_columns() {
    let one_hot: &[(&str, Setting)] = &[("kind", text("one_hot")), ("columns", Setting::List(vec![text("colour")]))];
    let source = opened(&table(12), &[transforms(&[one_hot]), ("holdout", Setting::Float(0.0))]).unwrap();
    assert_eq!(source.fields(), [Field::real("x", &[5]), Field::index("y", &[], 2)]);
    assert_eq!(source.class_names().unwrap(), ["no", "yes"]);
    assert_eq!(values(&source, 4, None).unwrap(), (vec![4.0, 1.0, 0.0, 0.0, 40.0], vec![1]), "blue, green, red");
    let standardise: &[(&str, Setting)] = &[("kind", text("standardise"))];
    let source = opened(&table(12), &[transforms(&[standardise]), ("holdout", Setting::Float(0.5))]).unwrap();
    // Mean and deviation are of the training samples only.
    let training: Vec<f64> = (0..6).map(|at| source.split.train(at) as f64).collect();
    let mean = training.iter().sum::<f64>() / 6.0;
    let deviation = (training.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / 6.0).sqrt();
    let (x, _) = values(&source, 7, None).unwrap();
    assert!((f64::from(x[0]) - (7.0 - mean) / deviation).abs() < 1e-5, "{x:?}");
    assert!((x[0] - x[1]).abs() < 1e-6);
    let named = [("inputs", Setting::List(vec![text("colour")])), ("target", text("label"))];
    assert!(opened(&table(12), &named).unwrap_err().contains("column \"colour\" holds names"));
}

#[test]
fn missing_values_are_named_or_filled() {
    let mut memory = table(10);
    memory.records[3][2] = RecordValue::Missing;
    memory.records[5][0] = RecordValue::Reals(vec![f32::NAN]);
    let refused = opened(&memory, &[]).unwrap();
    let error = values(&refused, 3, None).unwrap_err();
    assert_eq!(error.what(), "cannot read sample 3 of \"some\": column \"b\" has no value");
    assert!(values(&refused, 5, None).is_err());
    let zero = opened(&memory, &[("missing", Setting::Int(0))]).unwrap();
    assert_eq!(values(&zero, 3, None).unwrap().0, [3.0, 0.0]);
    let mean = opened(&memory, &[("missing", text("mean")), ("holdout", Setting::Float(0.0))]).unwrap();
    assert_eq!(values(&mean, 3, None).unwrap().0, [3.0, 420.0 / 9.0]);
    assert_eq!(values(&mean, 5, None).unwrap().0, [40.0 / 9.0, 50.0]);
}

#[test]
fn targets_are_classes_or_numbers() {
    let of = |kind: RecordKind, label: &dyn Fn(usize) -> RecordValue, keys: &[(&str, Setting)]| {
        let mut memory = table(100);
        memory.columns[3].kind = kind;
        memory.records.iter_mut().enumerate().for_each(|(at, record)| record[3] = label(at));
        opened(&memory, keys).map(|source| (source.fields()[1].clone(), source.class_names().map(<[String]>::to_vec)))
    };
    let int = || RecordKind::Int { shape: vec![], classes: None };
    let whole = |at: usize| RecordValue::Ints(vec![at as i64 % 3 * 5 - 5]);
    let names = Some(["-5", "0", "5"].map(String::from).to_vec());
    assert_eq!(of(int(), &whole, &[]), Ok((Field::index("y", &[], 3), names)));
    let known = RecordKind::Int { shape: vec![], classes: Some(7) };
    assert_eq!(of(known, &whole, &[]), Ok((Field::index("y", &[], 7), None)));
    let count = [("classes", Setting::Int(4))];
    assert_eq!(of(int(), &whole, &count), Ok((Field::index("y", &[], 4), None)));
    let broken = |at: usize| RecordValue::Reals(vec![at as f32 / 8.0]);
    let error = of(real(), &broken, &[]).unwrap_err();
    assert_eq!(
        error,
        "job.toml:3: `data.target` is \"label\", which holds 0.125: it looks like a target for regression\n  hint: write \
         `task = \"regression\"` under [data], or name another `target`"
    );
    let regression = [("task", text("regression"))];
    assert_eq!(of(real(), &broken, &regression), Ok((Field::real("y", &[1]), None)));
    let many = |at: usize| RecordValue::Ints(vec![at as i64 * 3]);
    let error = of(int(), &many, &[]).unwrap_err();
    assert!(error.contains("100 different numbers in 100 records"), "{error}");
    assert!(error.contains("`task = \"regression\"`") && error.contains("`task = \"classification\"`"), "{error}");
    // Few samples of each of many values; of few values, or with many samples of each, numbers are classes.
    let some = |values: usize| move |at: usize| RecordValue::Ints(vec![(at % values) as i64]);
    assert!(of(int(), &some(21), &[]).unwrap_err().contains("21 different numbers in 100 records"));
    assert_eq!(of(int(), &some(20), &[]).unwrap().0.kind, Kind::Index { classes: 20 });
    // Written as 151.0: whole, but perhaps amounts.
    let written = |at: usize| RecordValue::Reals(vec![at as f32 % 3.0]);
    let error = of(real(), &written, &[]).unwrap_err();
    assert!(error.contains("written as real ones") && error.contains("each of its 3 values a class"), "{error}");
    let types = |column: &str, name: &str| {
        let mut table = Settings::new("data.types", "job.toml:6");
        table.set(column, "job.toml:6", text(name));
        ("types", Setting::Table(table))
    };
    assert_eq!(of(real(), &written, &[types("label", "class")]).unwrap().0, Field::index("y", &[], 3));
    assert_eq!(of(int(), &some(21), &[types("label", "real")]), Ok((Field::real("y", &[1]), None)));
    let both = [types("label", "real"), ("task", text("classification"))];
    assert!(of(int(), &whole, &both).unwrap_err().contains("`data.types` says otherwise of \"label\""));
    let unknown = of(int(), &whole, &[types("lable", "class")]).unwrap_err();
    assert!(unknown.contains("`data.types.lable` names a column that does not exist"), "{unknown}");
    assert!(unknown.contains("did you mean `label`?"), "{unknown}");
    let error = of(int(), &whole, &[types("label", "tokens")]).unwrap_err();
    assert!(error.contains("takes a row of whole numbers, but column \"label\" of \"some\" is int"), "{error}");
    assert_eq!(of(int(), &many, &[("task", text("classification"))]).unwrap().0.kind, Kind::Index { classes: 100 });
    let given = [("classes", Setting::List(vec![text("no"), text("maybe"), text("yes")]))];
    let label = |at: usize| RecordValue::Text(["yes", "no"][at % 2].into());
    assert_eq!(of(RecordKind::Text, &label, &given).unwrap().0, Field::index("y", &[], 3));
    // Numbers are places among such names.
    let places = |at: usize| RecordValue::Ints(vec![at as i64 % 3]);
    let names = Some(["no", "maybe", "yes"].map(String::from).to_vec());
    for kind in [int(), RecordKind::Int { shape: vec![], classes: Some(3) }, real()] {
        assert_eq!(of(kind, &places, &given), Ok((Field::index("y", &[], 3), names.clone())));
    }
}

#[test]
fn tokens_predict_the_next_one() {
    let kind = || RecordKind::Int { shape: vec![5], classes: Some(50) };
    let records = (0..10).map(|at| vec![RecordValue::Ints((at..at + 5).collect())]).collect();
    let memory = Memory { columns: vec![column("tokens", kind())], records, broken: BTreeSet::new() };
    let source = opened(&memory, &[]).unwrap();
    assert_eq!(source.fields(), [Field::index("x", &[4], 50), Field::index("y", &[4], 50)]);
    let [mut x, mut y] = [[0; 4]; 2];
    source.fill(3, 0, Column::I32(&mut x)).unwrap();
    source.fill(3, 1, Column::I32(&mut y)).unwrap();
    assert_eq!((x, y), ([3, 4, 5, 6], [4, 5, 6, 7]));
    let mask: &[(&str, Setting)] = &[("kind", text("mask"))];
    let masked = opened(&memory, &[transforms(&[mask])]).unwrap();
    assert_eq!(masked.fields()[1], Field::index("y", &[4], 51));
}

/// Whole numbers in rows are what the model takes, or what the job says that they are.
#[test]
fn rows_of_whole_numbers_are_tokens_or_numbers() {
    let int = |shape: &[usize]| RecordKind::Int { shape: shape.into(), classes: None };
    let ints = |values: Vec<i64>| RecordValue::Ints(values);
    let record = |at: i64| vec![ints(vec![at, at + 1, 3]), ints(vec![-1, at + 2, -1])];
    let columns = vec![column("x", int(&[3])), column("y", int(&[3]))];
    let memory = Memory { columns, records: (0..10).map(record).collect(), broken: BTreeSet::new() };
    let open = |memory: &Memory, wanted: Option<&[Field]>, keys: &[(&str, Setting)]| {
        let made = join(vec![("source", part("some", memory))], &settings(keys), 1, wanted);
        made.map_err(|error| error.to_string())
    };
    let language = [Field::index("x", &[8], 100), Field::index("y", &[8], 100)];
    let source = open(&memory, Some(&language), &[]).unwrap();
    // The largest of each column, the ignored ones left out.
    assert_eq!(source.fields(), [Field::index("x", &[3], 11), Field::index("y", &[3], 12)]);
    let (mut x, mut y) = ([0; 3], [0; 3]);
    source.fill(4, 0, Column::I32(&mut x)).unwrap();
    source.fill(4, 1, Column::I32(&mut y)).unwrap();
    assert_eq!((x, y), ([4, 5, 3], [-1, 6, -1]));
    let numbers = open(&memory, Some(&[Field::real("x", &[3])]), &[]).unwrap();
    assert_eq!(numbers.fields(), [Field::real("x", &[3]), Field::index("y", &[3], 12)]);
    let mut types = Settings::new("data.types", "job.toml:6");
    types.set("x", "job.toml:6", text("tokens"));
    let named = open(&memory, None, &[("types", Setting::Table(types)), ("vocab", Setting::Int(50))]).unwrap();
    assert_eq!(named.fields(), [Field::index("x", &[3], 50), Field::index("y", &[3], 50)]);
    // What does not count may have another number.
    let mut other = memory.clone();
    other.records[2][1] = ints(vec![-100, 4, 255]);
    let refused = open(&other, Some(&language), &[]).unwrap_err();
    assert!(
        refused.contains("column \"y\" has -100, which is no index") && refused.contains("`ignore = -100`"),
        "{refused}"
    );
    other.records.iter_mut().for_each(|record| record[1] = ints(vec![255, 4, 255]));
    let source = open(&other, Some(&language), &[("ignore", Setting::Int(255))]).unwrap();
    source.fill(0, 1, Column::I32(&mut y)).unwrap();
    assert_eq!((y, &source.fields()[1]), ([-1, 4, -1], &Field::index("y", &[3], 5)));
    // An input has none that do not count.
    other.records[1][0] = ints(vec![0, -1, 0]);
    let refused = open(&other, Some(&language), &[]).unwrap_err();
    assert!(refused.contains("column \"x\" has -1, which is no index"), "{refused}");
}

#[test]
fn arrays_of_whole_numbers_are_masks() {
    let int = RecordKind::Int { shape: vec![2, 2], classes: None };
    let columns = vec![column("x", RecordKind::Real { shape: vec![1, 2, 2] }), column("y", int)];
    let record = |at: i64| vec![RecordValue::Reals(vec![at as f32; 4]), RecordValue::Ints(vec![at % 3, 0, -1, 2])];
    let mut memory = Memory { columns, records: (0..10).map(record).collect(), broken: BTreeSet::new() };
    let source = opened(&memory, &[]).unwrap();
    assert_eq!(source.fields()[1], Field::index("y", &[2, 2], 3));
    let named = opened(&memory, &[("classes", Setting::List(["sky", "sea", "sand", "sun"].map(text).into()))]).unwrap();
    assert_eq!((named.fields()[1].kind, named.class_names().unwrap().len()), (Kind::Index { classes: 4 }, 4));
    assert_eq!(opened(&memory, &[("task", text("regression"))]).unwrap().fields()[1], Field::real("y", &[2, 2]));
    let wanted = [Field::real("x", &[1, 2, 2]), Field::real("y", &[1])];
    let source = join(vec![("source", part("some", &memory))], &settings(&[]), 1, Some(&wanted)).unwrap();
    assert_eq!(source.fields()[1], Field::real("y", &[2, 2]), "a model of numbers");
    // Bytes of a plane, which would be an image elsewhere.
    memory.columns[1].kind = RecordKind::Pixels { shape: vec![1, 2, 2] };
    memory.records.iter_mut().for_each(|record| record[1] = RecordValue::Bytes(vec![0, 1, 2, 255]));
    let mut types = Settings::new("data.types", "job.toml:6");
    types.set("y", "job.toml:6", text("mask"));
    let keys = [("types", Setting::Table(types)), ("ignore", Setting::Int(255))];
    let source = opened(&memory, &keys).unwrap();
    assert_eq!(source.fields()[1], Field::index("y", &[2, 2], 3));
    let mut y = [0; 4];
    source.fill(3, 1, Column::I32(&mut y)).unwrap();
    assert_eq!(y, [0, 1, 2, -1]);
}

/// Two series whose rows lie between each other; sales of a store are 100 times its number and the day.
fn sales(days: usize) -> Memory {
    let columns = vec![
        column("store", RecordKind::Text),
        column("warm", RecordKind::Int { shape: vec![], classes: None }),
        column("sales", real()),
    ];
    let record = |at: usize| {
        let (store, day) = (at % 2, at / 2);
        let name = RecordValue::Text(["north", "south"][store].into());
        vec![name, RecordValue::Ints(vec![(day % 2) as i64]), RecordValue::Reals(vec![(store * 100 + day) as f32])]
    };
    Memory { columns, records: (0..2 * days).map(record).collect(), broken: BTreeSet::new() }
}

fn window(past: i64, future: i64, step: i64, series: Option<&str>) -> (&'static str, Setting) {
    let mut keys = Settings::new("data.window", "job.toml:7");
    [("past", past), ("future", future), ("step", step)]
        .into_iter()
        .for_each(|(key, value)| keys.set(key, "job.toml:7", Setting::Int(value)));
    series.into_iter().for_each(|name| keys.set("series", "job.toml:7", text(name)));
    ("window", Setting::Table(keys))
}

fn reals(source: &FileSource, sample: usize) -> (Vec<f32>, Vec<f32>) {
    let read = |field: usize| {
        let mut out = vec![f32::NAN; source.fields()[field].elements()];
        source.fill(sample, field, Column::F32(&mut out)).map(|()| out)
    };
    (read(0).unwrap(), read(1).unwrap())
}

#[test]
fn windows_forecast_within_a_series_and_a_part() {
    let keys = [window(3, 2, 1, Some("store")), ("holdout", Setting::Float(0.3)), ("target", text("sales"))];
    let source = opened(&sales(20), &keys).unwrap();
    assert_eq!(source.fields(), [Field::real("x", &[3, 2]), Field::real("y", &[2])]);
    // Of 20 days of each series 14 train: 10 windows. 6 days are held out: 2 windows.
    assert_eq!((source.split.train_len(), source.split.held_out_len()), (20, 4));
    let described = source.describe();
    let wanted = "windows of 3 rows and 2 to come of 2 series by \"store\", the last 30 % of the rows of each held out";
    assert!(described.contains(wanted), "{described}");
    assert_eq!(reals(&source, 0), (vec![0.0, 0.0, 1.0, 1.0, 0.0, 2.0], vec![3.0, 4.0]), "warm and sales of three days");
    let days = |sample: usize| {
        let (x, y) = reals(&source, sample);
        let days: Vec<f32> = x.iter().skip(1).step_by(2).chain(&y).copied().collect();
        assert!(days.windows(2).all(|pair| pair[1] - pair[0] == 1.0), "one series, without gaps: {days:?}");
        (days[0], days[4])
    };
    for at in 0..source.split.train_len() {
        assert!(days(source.split.train(at)).1 % 100.0 < 14.0);
    }
    let held_out: Vec<(f32, f32)> = (0..4).map(|at| days(source.split.held_out(at))).collect();
    assert_eq!(held_out, [(14.0, 18.0), (15.0, 19.0), (114.0, 118.0), (115.0, 119.0)]);
    let name = source.sample_name(20);
    assert_eq!((name.record, name.key.as_deref()), (32, Some("north")), "the last row that the window sees");
    // Windows further apart end at the last row.
    let apart = [window(3, 2, 4, Some("store")), ("holdout", Setting::Float(0.0)), ("target", text("sales"))];
    let source = opened(&sales(20), &apart).unwrap();
    assert_eq!((source.len(), reals(&source, 3).1, reals(&source, 7).1), (8, vec![18.0, 19.0], vec![118.0, 119.0]));
}

/// Days 6 to 9 of the second store are not there.
#[test]
fn windows_reach_over_no_gap_in_time() {
    let mut memory = sales(20);
    memory.columns.push(column("day", RecordKind::Text));
    for (at, record) in memory.records.iter_mut().enumerate() {
        record.push(RecordValue::Text(format!("2024-03-{:02}", at / 2 + 1)));
    }
    let mut at = 0;
    memory.records.retain(|_| {
        at += 1;
        !((at - 1) % 2 == 1 && (6..10).contains(&((at - 1) / 2)))
    });
    let with_time = |memory: &Memory| {
        let (key, Setting::Table(mut keys)) = window(3, 2, 1, Some("store")) else { panic!() };
        keys.set("time", "job.toml:7", text("day"));
        opened(memory, &[(key, Setting::Table(keys)), ("holdout", Setting::Float(0.0)), ("target", text("sales"))])
    };
    let source = with_time(&memory).unwrap();
    assert!(source.describe().contains("of 2 series by \"store\" without 1 gap in time"), "{}", source.describe());
    // 16 windows of the first, and of the second 2 of 6 days and 6 of 10.
    assert_eq!((source.len(), &source.fields()[0]), (24, &Field::real("x", &[3, 2])));
    for sample in 0..source.len() {
        let (x, y) = reals(&source, sample);
        let days: Vec<f32> = x.iter().skip(1).step_by(2).chain(&y).copied().collect();
        assert!(days.windows(2).all(|pair| pair[1] - pair[0] == 1.0), "{days:?}");
    }
    memory.records.swap(4, 6);
    let error = with_time(&memory).unwrap_err();
    assert!(error.contains("column \"day\" does not rise from row to row"), "{error}");
}

#[test]
fn windows_refuse_what_would_leak_or_is_too_short() {
    let error = |keys: &[(&str, Setting)]| {
        let keys: Vec<_> = [("target", text("sales"))].into_iter().chain(keys.iter().cloned()).collect();
        opened(&sales(20), &keys).unwrap_err()
    };
    let random = error(&[window(3, 2, 1, None), ("split", text("random"))]);
    assert!(random.contains("`data.split` cannot be combined with `window`: windows that overlap"), "{random}");
    let group = error(&[window(3, 2, 1, None), ("group", text("store"))]);
    assert!(group.contains("`data.group` cannot be combined"), "{group}");
    let folds = error(&[window(3, 2, 1, None), ("folds", Setting::Int(4))]);
    assert!(folds.contains("`data.folds` cannot be combined"), "{folds}");
    let long = error(&[window(30, 2, 1, Some("store"))]);
    assert!(
        long.contains("takes 32 rows, but the longest series of \"some\" has 20, of which 20 % are held out"),
        "{long}"
    );
    let held_out = error(&[window(8, 2, 1, Some("store"))]);
    assert!(held_out.contains("of no series of \"some\" so many are held out"), "{held_out}");
    let names = error(&[window(3, 2, 1, None), ("inputs", Setting::List(vec![text("store")]))]);
    assert!(names.contains("names the column \"store\", which is text: a window takes one number of a row"), "{names}");
    assert!(error(&[window(3, 2, 1, Some("shop"))]).contains("`data.window.series` names the column \"shop\""));
}

/// Mean and deviation are those of the training samples, of all rows of a column together; predictions come back to the unit.
#[test]
fn targets_are_standardised_and_brought_back() {
    let of_target: &[(&str, Setting)] = &[("kind", text("standardise")), ("of", text("target"))];
    let of_inputs: &[(&str, Setting)] = &[("kind", text("standardise"))];
    let keys = [
        window(3, 2, 1, Some("store")),
        ("holdout", Setting::Float(0.3)),
        ("target", text("sales")),
        ("inputs", Setting::List(vec![text("sales")])),
        transforms(&[of_inputs, of_target]),
    ];
    let source = opened(&sales(20), &keys).unwrap();
    let future: Vec<f64> = (0..20)
        .flat_map(|at| [at / 10 * 100 + at % 10 + 3, at / 10 * 100 + at % 10 + 4])
        .map(|day| day as f64)
        .collect();
    let mean = future.iter().sum::<f64>() / 40.0;
    let deviation = (future.iter().map(|day| (day - mean).powi(2)).sum::<f64>() / 40.0).sqrt();
    let scale = source.target_scale().unwrap().clone();
    assert!(scale.mean.iter().all(|own| (f64::from(*own) - mean).abs() < 1e-4), "{scale:?} {mean}");
    assert!(scale.deviation.iter().all(|own| (f64::from(*own) - deviation).abs() < 1e-4), "{scale:?} {deviation}");
    let (x, y) = reals(&source, 15);
    assert!((x[1] - x[0] - (x[2] - x[1])).abs() < 1e-5 && x[0] > 0.0, "one scale for all rows: {x:?}");
    assert_eq!([scale.in_unit(0, y[0]), scale.in_unit(1, y[1])], [108.0, 109.0]);
    for number in [0.1f32, 151.0, 123_456.7, -3.25, 1e-3, 16_777_215.0] {
        let far = TargetScale { mean: vec![150.25], deviation: vec![77.125] };
        let back = far.in_unit(0, far.standard(0, number));
        assert!((back - number).abs() <= 1e-5 + number.abs() * 1e-6, "{number} {back}");
    }
    let near = TargetScale { mean: vec![152.133], deviation: vec![77.005] };
    (25..347).for_each(|number| assert_eq!(near.in_unit(0, near.standard(0, number as f32)), number as f32));
    assert!(near.in_unit(0, f32::NAN).is_nan());
    let twice = [("task", text("regression")), ("target", text("b")), transforms(&[of_target, of_target])];
    assert!(opened(&table(12), &twice).unwrap_err().contains("is \"target\" for the second time"));
    let classes = opened(&table(12), &[transforms(&[of_target])]).unwrap_err();
    assert!(classes.contains("the target is not made of numbers"), "{classes}");
}

#[test]
fn rules_hold_out_classes_groups_and_the_last_samples() {
    let held_out = |keys: &[(&str, Setting)]| {
        let source = opened(&table(60), keys).unwrap();
        let records = |samples: Vec<usize>| -> BTreeSet<usize> {
            samples.into_iter().map(|sample| source.sample_name(sample).record).collect()
        };
        let split = source.split;
        let training = records((0..split.train_len()).map(|at| split.train(at)).collect());
        let held_out = records((0..split.held_out_len()).map(|at| split.held_out(at)).collect());
        assert!(training.is_disjoint(&held_out) && training.len() + held_out.len() == 60);
        (held_out, source)
    };
    let (stratified, source) = held_out(&[("split", text("stratified"))]);
    assert_eq!((stratified.len(), stratified.iter().filter(|record| *record % 2 == 0).count()), (12, 6));
    assert!(source.describe().contains("; the same part of each of 2 classes held out"), "{}", source.describe());
    // The values are those of the record that a sample is called after.
    let (x, y) = values(&source, 50, None).unwrap();
    let record = source.sample_name(50).record;
    assert_eq!((x[0], y[0]), (record as f32, i32::from(record % 2 == 0)));
    let (groups, source) = held_out(&[("group", text("colour")), ("holdout", Setting::Float(0.4))]);
    assert_eq!(groups.len(), 20);
    assert!(groups.iter().map(|record| record % 3).collect::<BTreeSet<_>>().len() == 1, "{groups:?}");
    assert!(source.describe().contains("; 1 of 3 groups by \"colour\" held out"), "{}", source.describe());
    let (last, source) = held_out(&[("split", text("chronological"))]);
    assert_eq!(last, (48..60).collect());
    assert!(source.describe().contains("; the last 12 samples held out"), "{}", source.describe());
    let wrong = |keys: &[(&str, Setting)]| opened(&table(60), keys).unwrap_err();
    let both = wrong(&[("group", text("colour")), ("split", text("stratified"))]);
    assert!(
        both.contains("`data.group` is \"colour\", which cannot be combined with `split = \"stratified\"`"),
        "{both}"
    );
    let numbers = wrong(&[("split", text("stratified")), ("task", text("regression")), ("target", text("b"))]);
    assert!(numbers.contains("the target is not one class per sample"), "{numbers}");
    assert_eq!(opened(&table(60), &[]).unwrap().class_counts(&Split::given(48, 12)).unwrap(), [24, 24]);
}

/// Another sample that is for the same stands in, always the same one.
#[test]
fn broken_samples_stop_or_are_replaced() {
    let mut memory = pictures(60);
    memory.broken = [3, 17, 40].into();
    let stops = opened(&memory, &[]).unwrap();
    let error = values(&stops, 17, None).unwrap_err();
    assert_eq!(error.what(), "cannot read sample 17 of \"some\": a.bin, byte 77: half a record");
    let skips = || opened(&memory, &[("on_error", text("skip")), augmented()]).unwrap();
    let (one, other) = (skips(), skips());
    for sample in 0..60 {
        let drawn = values(&one, sample, Some(2)).unwrap();
        assert!(drawn == values(&one, sample, Some(2)).unwrap());
        if memory.broken.contains(&sample) {
            let purpose = one.split.purpose(sample);
            let alike = (0..60).filter(|other| one.split.purpose(*other) == purpose);
            let alike = alike.filter(|other| !memory.broken.contains(other));
            assert!(alike.into_iter().any(|other| values(&one, other, Some(2)).unwrap() == drawn), "{sample}");
        }
    }
    (0..60).rev().for_each(|sample| assert!(values(&one, sample, Some(2)) == values(&other, sample, Some(2))));
    let times = one.load_times().unwrap();
    assert!(times.skipped >= 9 && times.skip_messages[0].1.contains("a.bin, byte 77"), "{times:?}");
    memory.broken = (0..60).collect();
    let keys = [("on_error", text("skip")), ("classes", Setting::Int(3))];
    let error = values(&opened(&memory, &keys).unwrap(), 5, None).unwrap_err();
    assert!(error.message.contains("16 replacements that were tried cannot be read"), "{error}");
}

#[test]
fn files_for_validation_and_test_stay_apart() {
    let (train, mut validation) = (pictures(10), pictures(4));
    // A folder without owls.
    let names: Arc<[String]> = ["dog", "cat"].map(String::from).into();
    validation.columns[1].kind = RecordKind::Class { names };
    validation
        .records
        .iter_mut()
        .enumerate()
        .for_each(|(at, record)| record[1] = RecordValue::Ints(vec![at as i64 % 2]));
    validation.columns.swap(0, 1);
    validation.records.iter_mut().for_each(|record| record.swap(0, 1));
    let parts = |validation: &Memory| {
        vec![
            ("source", part("train", &train)),
            ("validation", part("val", validation)),
            ("test", part("end", &pictures(3))),
        ]
    };
    let source = join(parts(&validation), &settings(&[]), 1, None).unwrap();
    let split = Source::split(&source).unwrap();
    assert_eq!((split.train_len(), split.held_out_len(), split.test_len(), source.len()), (10, 4, 3, 17));
    let label = |sample| values(&source, sample, None).unwrap().1[0];
    assert_eq!((label(split.held_out(0)), label(split.held_out(1)), label(split.test(2))), (1, 0, 2));
    let both = [("holdout", Setting::Float(0.2)), ("validation", text("val"))];
    let error = join(parts(&validation), &settings(&both), 1, None).unwrap_err().to_string();
    assert!(error.contains("`data.holdout` cannot be combined with `validation`"), "{error}");
    validation.columns[0].kind = RecordKind::Class { names: ["dog", "cow"].map(String::from).into() };
    let error = join(parts(&validation), &settings(&[]), 1, None).unwrap_err().to_string();
    assert!(error.contains("is \"val\", which has the class \"cow\""), "{error}");
}

/// Names tell the classes of one file from those of another, also where only their number is given.
#[test]
fn a_number_of_classes_keeps_their_names() {
    let (train, mut validation) = (pictures(9), pictures(6));
    let names: Arc<[String]> = ["owl", "cat", "dog"].map(String::from).into();
    validation.columns[1].kind = RecordKind::Class { names };
    let joined = |count: i64| {
        let parts = vec![("source", part("train", &train)), ("validation", part("val", &validation))];
        join(parts, &settings(&[("classes", Setting::Int(count))]), 1, None).map_err(|error| error.to_string())
    };
    for count in [3, 5] {
        let source = joined(count).unwrap();
        assert_eq!(source.fields()[1], Field::index("y", &[], count as usize));
        assert_eq!(source.class_names().unwrap(), ["cat", "dog", "owl"]);
        let labels: Vec<i32> = (9..12).map(|sample| values(&source, sample, None).unwrap().1[0]).collect();
        assert_eq!(labels, [2, 0, 1]);
    }
    let error = joined(2).unwrap_err();
    assert!(error.starts_with("job.toml:4: `data.classes` is 2, but \"train\" has 3 classes"), "{error}");
    let named = [("classes", Setting::List(vec![text("dog"), text("cat")]))];
    let error = opened(&train, &named).unwrap_err();
    assert!(error.starts_with("job.toml:4: `data.classes` has no \"owl\", which is a class of \"some\""), "{error}");
}

/// A table with a column whose numbers stand for these names.
fn coloured(names: &[&str], values: &[i64]) -> Memory {
    let names: Arc<[String]> = names.iter().map(|name| name.to_string()).collect();
    let columns = vec![column("colour", RecordKind::Class { names }), column("y", real())];
    let record = |value: &i64| vec![RecordValue::Ints(vec![*value]), RecordValue::Reals(vec![*value as f32])];
    Memory { columns, records: values.iter().map(record).collect(), broken: BTreeSet::new() }
}

/// Each file may number the names of a column in its own way, and have some that no record uses.
#[test]
fn inputs_that_are_names_are_found_by_name() {
    let one_hot: &[(&str, Setting)] = &[("kind", text("one_hot"))];
    let keys = [
        transforms(&[one_hot]),
        ("inputs", Setting::List(vec![text("colour")])),
        ("target", text("y")),
        ("task", text("regression")),
    ];
    let train = coloured(&["red", "green", "blue"], &[0, 1, 2]);
    let joined = |validation: &Memory| {
        let parts = vec![("source", part("train", &train)), ("validation", part("val", validation))];
        join(parts, &settings(&keys), 1, None).map_err(|error| error.to_string())
    };
    let row = |source: &FileSource, sample| {
        let mut x = [f32::NAN; 3];
        source.fill(sample, 0, Column::F32(&mut x)).unwrap();
        x
    };
    let source = joined(&coloured(&["blue", "black", "red"], &[0, 2])).unwrap();
    assert_eq!(source.fields()[0], Field::real("x", &[3]));
    let rows: Vec<[f32; 3]> = (0..5).map(|sample| row(&source, sample)).collect();
    let [red, green, blue] = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]];
    assert_eq!(rows, [red, green, blue, blue, red]);
    let error = joined(&coloured(&["blue", "black", "red"], &[0, 1])).unwrap_err();
    assert!(
        error.contains("`data.validation` names files that cannot be used: cannot read sample 1 of \"val\""),
        "{error}"
    );
    assert!(
        error.contains("\"black\" is not a known class") && error.contains("\"red\", \"green\", \"blue\""),
        "{error}"
    );
    let mut numbers = coloured(&["red", "green", "blue"], &[0, 1]);
    numbers.columns[0].kind = RecordKind::Int { shape: vec![], classes: None };
    let error = joined(&numbers).unwrap_err();
    assert!(error.contains("whose column \"colour\" is int, but that of \"train\" is class"), "{error}");
    // What is saved keeps the names in the order of their numbers.
    let saved = super::saved::from_json(&source.preprocessing()).unwrap();
    assert_eq!(format!("{:?}", saved.assembly.input), format!("{:?}", source.assembly.input));
}

/// What a run would find out only at its first evaluation.
#[test]
fn validation_with_unknown_values_is_refused_at_the_start() {
    let one_hot: &[(&str, Setting)] = &[("kind", text("one_hot")), ("columns", Setting::List(vec![text("colour")]))];
    let joined = |validation: &Memory, keys: &[(&str, Setting)]| {
        let parts = vec![("source", part("train", &table(12))), ("validation", part("val", validation))];
        let keys = [&[transforms(&[one_hot])], keys].concat();
        join(parts, &settings(&keys), 1, None).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(joined(&table(5), &[]), Ok(()));
    for (at, name, known) in [
        (3, "perhaps", "the classes of the training files are \"no\", \"yes\""),
        (1, "black", "the names of the training files are \"blue\", \"green\", \"red\""),
    ] {
        let mut validation = table(5);
        validation.records[4][at] = RecordValue::Text(name.into());
        let error = joined(&validation, &[]).unwrap_err();
        let what =
            "`data.validation` names files that cannot be used: cannot read sample 4 of \"val\": column".to_string();
        assert!(error.contains(&what) && error.contains(name) && error.contains(known), "{error}");
        assert_eq!(joined(&validation, &[("on_error", text("skip"))]), Ok(()));
    }
    let mut numbers = table(6);
    numbers.columns[3].kind = RecordKind::Int { shape: vec![], classes: None };
    numbers.records.iter_mut().enumerate().for_each(|(at, record)| record[3] = RecordValue::Ints(vec![at as i64 % 2]));
    let mut more = numbers.clone();
    more.records[5][3] = RecordValue::Ints(vec![2]);
    let parts = vec![("source", part("train", &numbers)), ("validation", part("val", &more))];
    let error = join(parts, &settings(&[]), 1, None).unwrap_err().to_string();
    assert!(error.contains("the target is 2, which is not a known class"), "{error}");
}

#[test]
fn missing_columns_and_values_are_named() {
    let mut folder = pictures(4);
    folder.columns.truncate(1);
    let mut val = part("val", &folder);
    val.format = "images";
    let parts = vec![("source", part("train", &pictures(10))), ("validation", val)];
    let error = join(parts, &settings(&[]), 1, None).unwrap_err().to_string();
    assert!(error.contains("`data.validation` is \"val\", which has no column \"label\", the target"), "{error}");
    assert!(error.contains("put its images into a folder per class"), "{error}");
    let mut memory = table(10);
    memory.columns[3].kind = real();
    memory.records.iter_mut().for_each(|record| record[3] = RecordValue::Reals(vec![0.5]));
    memory.records[2][3] = RecordValue::Missing;
    let source = opened(&memory, &[("task", text("regression"))]).unwrap();
    let mut row = [0.0];
    let error = source.fill(2, 1, Column::F32(&mut row)).unwrap_err();
    assert_eq!(error.message, "column \"label\" has no value");
    assert!(!error.hint.contains("missing ="), "{error}");
    for wrong in [f64::NAN, f64::INFINITY, 1e300] {
        let error = opened(&memory, &[("missing", Setting::Float(wrong)), ("task", text("regression"))]).unwrap_err();
        assert!(error.starts_with("job.toml:4: `data.missing` is "), "{error}");
    }
    memory.records[3][2] = RecordValue::Reals(vec![f32::INFINITY]);
    let error = opened(&memory, &[("missing", text("mean")), ("task", text("regression"))]).unwrap_err();
    assert!(error.contains("the mean of column \"b\", for `missing = \"mean\"`, is "), "{error}");
    memory.records[2][3] = RecordValue::Reals(vec![0.5]);
    let standardise: &[(&str, Setting)] = &[("kind", text("standardise"))];
    let keys = [transforms(&[standardise]), ("task", text("regression")), ("holdout", Setting::Float(0.0))];
    let error = opened(&memory, &keys).unwrap_err();
    assert!(error.contains("column \"b\" has the mean"), "{error}");
}

/// A sample counts once, whatever goes into it.
#[test]
fn samples_that_are_mixed_in_are_no_cache_hits() {
    let kinds = ["normalise", "mixup"].map(text);
    let [normalise, mixup] = kinds.map(|kind| vec![("kind", kind)]);
    let normalise = [&normalise[..], &[("mean", Setting::Float(0.5)), ("std", Setting::Float(0.5))]].concat();
    let list = [&normalise[..], &mixup[..]];
    let source = opened(&pictures(20), &[transforms(&list), ("cache", text("memory"))]).unwrap();
    for epoch in 0..3 {
        (0..20).for_each(|sample| _ = values(&source, sample, Some(epoch)).unwrap());
    }
    let times = source.load_times().unwrap();
    assert!(times.samples == 60 && (40..60).contains(&times.cached), "{times:?}");
}

/// What a cache takes is known before it is full, so that a plan can count it.
#[test]
fn a_cache_in_memory_tells_what_it_may_take() {
    let normalise: &[(&str, Setting)] =
        &[("kind", text("normalise")), ("mean", Setting::Float(0.5)), ("std", Setting::Float(0.5))];
    let bytes = |keys: &[(&str, Setting)]| {
        opened(&pictures(20), &[&[transforms(&[normalise])], keys].concat()).unwrap().cached_bytes()
    };
    let whole = bytes(&[("cache", text("memory"))]);
    assert!((20 * 108 * 4..20 * (108 * 4 + 200)).contains(&whole), "{whole}");
    assert_eq!(bytes(&[("cache", text("memory")), ("cache_max", Setting::Int(3000))]), 3000);
    assert_eq!((bytes(&[]), bytes(&[("cache", text("disk"))])), (0, 0));
}

#[test]
fn keys_of_a_cache_need_one() {
    for (keys, part) in [
        (vec![("cache_max", Setting::Int(9))], "`data.cache_max` is for a cache, but there is none"),
        (vec![("cache_dir", text("/tmp"))], "`data.cache_dir` is for a cache on disk"),
        (vec![("cache", text("memory")), ("cache_dir", text("/tmp"))], "`data.cache_dir` is for a cache on disk"),
    ] {
        let error = opened(&pictures(4), &keys).unwrap_err();
        assert!(error.starts_with("job.toml:4: ") && error.contains(part), "{error}");
    }
}

/// New files are judged as the training's were, which need not be there any more.
#[test]
fn evaluations_need_no_training_files() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name).to_string_lossy().into_owned();
        std::fs::write(&path, text).unwrap();
        path
    };
    let train = write(
        "train.csv",
        &"a,colour,label\n1,red,yes\n2,blue,no\n3,red,no\n4,green,yes\n".repeat(3).replace("\na,colour,label", ""),
    );
    let one_hot: &[(&str, Setting)] = &[("kind", text("one_hot"))];
    let settings = || settings(&[transforms(&[one_hot]), ("inputs", Setting::List(vec![text("a"), text("colour")]))]);
    let source = crate::open(crate::SOURCES, &train, &settings(), 1, None).unwrap();
    let preprocessing = source.preprocessing().unwrap();
    let fields = source.fields().to_vec();
    std::fs::remove_file(&train).unwrap();
    let new = write("new.csv", "label,colour,a\nyes,green,7\nno,red,8\n");
    let open = |path: &str, preprocessing: &str| crate::open_for_evaluation(path, &settings(), preprocessing, 1);
    let source = open(&new, &preprocessing).unwrap().unwrap();
    assert_eq!((source.fields(), source.class_names().unwrap()), (&fields[..], &["no".to_string(), "yes".into()][..]));
    let split = Source::split(&source).unwrap();
    assert_eq!((split.train_len(), split.held_out_len()), (0, 2));
    assert_eq!(values(&source, split.held_out(0), None).unwrap(), (vec![7.0, 0.0, 1.0, 0.0], vec![1]));
    let none = write("none.csv", "colour,a\ngreen,7\n");
    let error = open(&none, &preprocessing).unwrap_err().to_string();
    assert!(error.contains("which has no column \"label\", the target: nothing to compare with"), "{error}");
    let other = write("other.csv", "label,colour,a\nmaybe,green,7\n");
    let error = values(&open(&other, &preprocessing).unwrap().unwrap(), 0, None).unwrap_err();
    assert!(
        error.message.contains("\"maybe\" is not a known class") && error.hint.contains("\"no\", \"yes\""),
        "{error}"
    );
    // Runs of earlier versions do not say what the target is.
    let mut earlier: serde_json::Value = serde_json::from_str(&preprocessing).unwrap();
    earlier.as_object_mut().unwrap().remove("target");
    assert!(open(&new, &earlier.to_string()).unwrap().is_none());
}

/// A test file may be without its target.
#[test]
fn samples_of_a_test_need_no_target() {
    let mut test = pictures(3);
    test.columns.truncate(1);
    test.records.iter_mut().for_each(|record| record.truncate(1));
    let with =
        |key| join(vec![("source", part("train", &pictures(10))), (key, part("new", &test))], &settings(&[]), 1, None);
    let source = with("test").unwrap();
    assert_eq!(values(&source, source.split.test(1), None).unwrap().1, [kolo_graph::field::IGNORED]);
    assert!(with("validation").is_err());
}

#[test]
fn what_was_measured_is_saved() {
    let one_hot: &[(&str, Setting)] = &[("kind", text("one_hot")), ("columns", Setting::List(vec![text("colour")]))];
    let standardise: &[(&str, Setting)] = &[("kind", text("standardise"))];
    let source = opened(&table(30), &[transforms(&[one_hot, standardise]), ("missing", text("mean"))]).unwrap();
    let saved = super::saved::from_json(&source.preprocessing()).unwrap();
    assert_eq!(saved.columns, ["a", "colour", "b"]);
    assert_eq!(saved.fitted.values, source.fitted.values);
    assert_eq!(saved.assembly.class_names, source.assembly.class_names);
    assert_eq!(format!("{:?}", saved.assembly.input), format!("{:?}", source.assembly.input));
    let pictures = opened(&pictures(10), &[]).unwrap();
    let saved = super::saved::from_json(&pictures.preprocessing()).unwrap();
    assert_eq!(format!("{:?}", saved.assembly.input), format!("{:?}", pictures.assembly.input));
    assert!(super::saved::from_json("{}").is_none() && super::saved::from_json("[").is_none());
}

#[test]
fn fingerprints_see_contents() {
    let print = |memory: &Memory| opened(memory, &[]).unwrap().fingerprint().unwrap();
    let (same, mut other) = (print(&pictures(20)), pictures(20));
    assert_eq!(same, print(&pictures(20)));
    assert_ne!(same, print(&pictures(21)));
    other.records[0][0] = RecordValue::Bytes(vec![1; 108]);
    assert_ne!(same, print(&other));
}

/// What was named, and what belongs to it: labels beside arrays, and everything in a directory.
#[test]
fn fingerprints_see_every_byte_of_small_files() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, contents: &[u8]| {
        let path = directory.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, contents).unwrap();
    };
    let print = |name: &str| {
        let source = directory.path().join(name).to_string_lossy().into_owned();
        crate::open(crate::SOURCES, &source, &Settings::new("data", "job.toml:1"), 1, None)
            .unwrap()
            .fingerprint()
            .unwrap()
    };
    let rows = |flipped: Option<usize>| -> String {
        let label = |row: usize| usize::from(row.is_multiple_of(2) != (flipped == Some(row)));
        let row = |row: usize| format!("{row},{}.5,{}\n", row % 7, ["yes", "no"][label(row)]);
        format!("a,b,y\n{}", (0..500).map(row).collect::<String>())
    };
    let idx = |dims: &[u32], bytes: &[u8]| {
        let header = [0, 0, 8, dims.len() as u8].into_iter().chain(dims.iter().flat_map(|dim| dim.to_be_bytes()));
        header.chain(bytes.iter().copied()).collect::<Vec<u8>>()
    };
    let mut labels: Vec<u8> = (0..200).map(|at| at % 10).collect();
    write("t.csv", rows(None).as_bytes());
    write("m/train-images-idx3-ubyte", &idx(&[200, 4, 4], &[3; 3200]));
    write("m/train-labels-idx1-ubyte", &idx(&[200], &labels));
    let before = ["t.csv", "m", "m/train-images-idx3-ubyte"].map(print);
    assert_eq!(before, ["t.csv", "m", "m/train-images-idx3-ubyte"].map(print));
    write("t.csv", rows(Some(301)).as_bytes());
    labels[77] ^= 1;
    write("m/train-labels-idx1-ubyte", &idx(&[200], &labels));
    for (before, name) in before.iter().zip(["t.csv", "m", "m/train-images-idx3-ubyte"]) {
        assert_ne!(*before, print(name), "{name}");
    }
}

#[test]
fn the_guide_lists_every_format() {
    let guide = include_str!("../../../../docs/data.md");
    for format in crate::format::FORMATS.iter().filter(|format| !format.doc.is_empty()) {
        let endings: Vec<String> = format.extensions.iter().map(|ending| format!(".{ending}")).collect();
        let row = format!("| `{}` | {} | {} |", format.name, format.doc, endings.join(" "));
        assert!(guide.contains(&row), "docs/data.md lacks the row: {row}");
    }
}

/// A committed file of the tests.
fn file(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files").join(name).display().to_string()
}

/// What opening files says, and their fields.
fn said(name: &str, keys: &[(&str, Setting)]) -> Result<(Vec<String>, String), String> {
    let source = open(name, &settings(keys), 1, None).map_err(|error| error.to_string())?;
    Ok((source.notes(), source.fields().iter().map(Field::to_string).collect::<Vec<_>>().join(", ")))
}

#[test]
fn the_index_of_a_data_frame_is_left_out_and_said() {
    let regression = [("task", text("regression"))];
    let guess = "target price (the last column of numbers; `target` names another), inputs sqm, rooms";
    let index = |name: &str| format!("left out: {name}, the index of the table; `inputs` or `target` can name it");
    for (name, column) in [
        ("pandas_index.csv", "column0"),
        ("pandas_index.parquet", "__index_level_0__"),
        ("pandas_index.arrow", "__index_level_0__"),
        ("pandas_lost.parquet", "__index_level_0__"),
        ("pandas_named_index.parquet", "id"),
    ] {
        let (notes, fields) = said(&file(name), &regression).unwrap();
        assert_eq!(notes, [guess.into(), index(column)], "{name}");
        assert_eq!(fields, "x [2] real, y [1] real", "{name}");
        // Who means it can name it.
        let target = [("task", text("regression")), ("target", text(column))];
        let (notes, fields) = said(&file(name), &target).unwrap();
        assert_eq!(notes[0], format!("target {column}, inputs sqm, rooms, price"));
        assert_eq!(fields, "x [3] real, y [1] real", "{name}");
        let inputs = [("task", text("regression")), ("inputs", Setting::List(vec![text(column), text("rooms")]))];
        assert_eq!(
            said(&file(name), &inputs).unwrap().0[0],
            format!("target price (the last column that is no input; `target` names another), inputs {column}, rooms")
        );
    }
    assert_eq!(said(&file("pandas_range.parquet"), &regression).unwrap().0, [guess]);
    // The same as a stream.
    let stream = [("task", text("regression")), ("stream", Setting::Bool(true))];
    assert_eq!(said(&file("pandas_index.csv"), &stream).unwrap().0, [guess.into(), index("column0")]);
}

#[test]
fn what_is_left_out_or_guessed_is_said_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let rows: String = (0..20).map(|at| format!("{at},n{at},{},{}\n", at * 2, at % 2)).collect();
    std::fs::write(path("a.csv"), format!("size,note,odd,label\n{rows}1,last,x,0\n")).unwrap();
    let both = [("validation", text(&path("a.csv")))];
    let (notes, _) = said(&path("a.csv"), &both).unwrap();
    assert_eq!(
        notes,
        [
            "target label, inputs size".to_string(),
            "left out: note (text), odd (text); `inputs` can name them".into(),
            format!("odd is text: {}, line 22: \"x\" is not a number", path("a.csv")),
        ]
    );
    let named = [("inputs", Setting::List(vec![text("size")]))];
    assert_eq!(said(&path("a.csv"), &named).unwrap().0.len(), 2, "nothing is left out that was not named");
    // Whether numbers in the first line are names is a guess.
    std::fs::write(path("b.csv"), "1,2,label\n3,4,0\n5,6,1\n").unwrap();
    std::fs::write(path("c.csv"), "3,4,0\n5,6,1\n").unwrap();
    let header = "its first line is read as a header; `header = false` reads it as a sample";
    assert_eq!(said(&path("b.csv"), &[]).unwrap().0[1], format!("{}: {header}", path("b.csv")));
    let sample = "its first line is read as a sample; `header = true` reads it as a header";
    assert_eq!(said(&path("c.csv"), &[]).unwrap().0[1], format!("{}: {sample}", path("c.csv")));
    assert_eq!(said(&path("c.csv"), &[("header", Setting::Bool(false))]).unwrap().0.len(), 1);
    // Columns that are not read.
    let keys = [("target", text("small")), ("inputs", Setting::List(vec![text("weight")]))];
    let (notes, _) = said(&file("odd.parquet"), &keys).unwrap_or_else(|error| (vec![error], String::new()));
    assert!(notes.iter().any(|note| note.contains("not read") || note.contains("does not exist")), "{notes:?}");
}

/// A folder with so many images per path, all of one class each.
fn images(names: &[&str]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for name in names {
        let path = directory.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::copy(file("packed/images/rgb.png"), path).unwrap();
    }
    directory
}

#[test]
fn the_parts_of_a_data_set_are_no_classes() {
    let names = ["train/cat/1.png", "train/cat/2.png", "train/dog/1.png", "Val/cat/1.png", "Val/dog/1.png"];
    let directory = images(&[&names[..], &["test/dog/1.png", "test/cat/1.png"]].concat());
    let (root, at) =
        (directory.path().display().to_string(), |name: &str| directory.path().join(name).display().to_string());
    let source = open(&root, &settings(&[]), 1, None).unwrap();
    assert_eq!(source.class_names().unwrap(), ["cat", "dog"]);
    let split = source.split().unwrap();
    assert_eq!((split.train_len(), split.held_out_len(), split.test_len()), (3, 2, 2));
    let [train, val, test] = ["train", "Val", "test"].map(at);
    let note = format!(
        "{root} holds the parts train and Val and test: trains on {train}, validates on {val}, keeps {test} for the test"
    );
    assert_eq!(source.notes(), ["target label, inputs image".to_string(), note]);
    // What the job says counts.
    let said = open(&root, &settings(&[("validation", text(&test))]), 1, None).unwrap();
    assert_eq!(said.split().unwrap().held_out_len(), 2);
    assert!(!said.notes()[1].contains("validates"), "{:?}", said.notes());
    let refused = |keys: &[(&str, Setting)]| open(&root, &settings(keys), 1, None).unwrap_err().to_string();
    let error = refused(&[("holdout", Setting::Float(0.1))]);
    assert!(error.contains(&format!("`data.holdout` cannot be combined with {val}")), "{error}");
    // Beside another folder nobody knows.
    std::fs::create_dir(at("extra")).unwrap();
    std::fs::copy(file("packed/images/rgb.png"), at("extra/1.png")).unwrap();
    let error = refused(&[]);
    assert!(error.contains("extra beside the parts train and Val and test"), "{error}");
    assert!(
        error.ends_with(&format!("write `source = \"{train}\"`, `validation = \"{val}\"`, `test = \"{test}\"`")),
        "{error}"
    );
    // A folder that is read for itself, as in an inspection, is no folder of classes either.
    let settings = settings(&[]);
    let files = crate::files::list(&root, &settings, "source").unwrap().files;
    let error = (crate::formats::images::FORMAT.open)(&files, &settings).unwrap_err().to_string();
    assert!(error.contains("whose folders train and Val and test are parts of a data set"), "{error}");
}

#[test]
fn parts_with_tables_are_refused_with_what_to_write() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["train", "valid"] {
        std::fs::create_dir(directory.path().join(name)).unwrap();
        std::fs::write(directory.path().join(name).join("a.csv"), "a,y\n1,0\n2,1\n").unwrap();
    }
    let root = directory.path().display().to_string();
    let error = open(&root, &settings(&[]), 1, None).unwrap_err().to_string();
    let lines = format!("`source = \"{root}/train/*.csv\"`, `validation = \"{root}/valid/*.csv\"`");
    assert!(error.ends_with(&format!("name their files: {lines}")), "{error}");
    // Only with one to train on and another one.
    let only = images(&["train/1.png", "bus/1.png"]);
    let classes = open(&only.path().display().to_string(), &settings(&[]), 1, None).unwrap();
    assert_eq!(classes.class_names().unwrap(), ["bus", "train"]);
}

/// Columns of the same numbers in every format, of which some need 64 bits without a sign.
#[test]
fn numbers_of_64_bits_without_a_sign_are_read_or_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let long = u64::MAX - 1;
    std::fs::write(path("a.csv"), format!("id,y\n{long},0\n5,1\n")).unwrap();
    std::fs::write(path("a.jsonl"), format!("{{\"id\": {long}, \"y\": 0}}\n{{\"id\": 5, \"y\": 1}}\n")).unwrap();
    for name in ["a.csv", "a.jsonl"] {
        let source = open(&path(name), &settings(&[("holdout", Setting::Float(0.0))]), 1, None).unwrap();
        let mut x = [0.0];
        source.fill(0, 0, Column::F32(&mut x)).unwrap();
        assert_eq!(x, [long as f32], "{name}");
        // As a class it cannot be told from its neighbours.
        let class = [("target", text("id")), ("task", text("classification"))];
        let error = open(&path(name), &settings(&class), 1, None).unwrap_err().to_string();
        assert!(error.contains("`data.target` is \"id\", which holds 18446744000000000000"), "{name}: {error}");
    }
    let mut npy =
        b"\x93NUMPY\x01\x00\x46\x00{'descr': '<u8', 'fortran_order': False, 'shape': (2,), }            \n".to_vec();
    npy.extend([long, 5].iter().flat_map(|value| value.to_le_bytes()));
    std::fs::write(path("x.npy"), &npy).unwrap();
    std::fs::write(path("y.npy"), [&npy[..80], &0u64.to_le_bytes(), &1u64.to_le_bytes()].concat()).unwrap();
    let source =
        open(&path("x.npy"), &settings(&[("classes", Setting::Int(2)), ("holdout", Setting::Float(0.0))]), 1, None)
            .unwrap();
    let error = source.fill(0, 0, Column::F32(&mut [0.0])).unwrap_err();
    assert_eq!(error.message, format!("array \"x\" has {long}, which is larger than {}", i64::MAX));
}

#[test]
fn files_without_a_sample_and_guessed_channels_are_said() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    std::fs::write(path("a.txt"), "abcdefghijklmnop").unwrap();
    std::fs::write(path("b.txt"), "abc").unwrap();
    let context = ("context", Setting::Int(4));
    let note = "left out: 1 of 2 files, which have fewer than the 5 tokens of a sample";
    assert_eq!(said(&path("*.txt"), &[context]).unwrap().0[1..], [note]);
    let array = |dims: &str, bytes: usize| {
        let header = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({dims})}}");
        [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), &vec![0; bytes]].concat()
    };
    std::fs::write(path("x.npy"), array("6, 3, 5, 4", 360)).unwrap();
    std::fs::write(path("y.npy"), array("6,", 6)).unwrap();
    let classes = ("classes", Setting::Int(2));
    let (notes, fields) = said(&path("x.npy"), std::slice::from_ref(&classes)).unwrap();
    assert_eq!(notes[1], "the channels of x [3, 5, 4] are its last dim; `layout = \"chw\"` takes the first");
    assert!(fields.starts_with("x [4, 3, 5]"), "{fields}");
    let (notes, fields) = said(&path("x.npy"), &[classes, ("layout", text("chw"))]).unwrap();
    assert!(notes.len() == 1 && fields.starts_with("x [3, 5, 4]"), "{notes:?} {fields}");
}
