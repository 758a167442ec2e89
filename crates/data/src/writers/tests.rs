//! What is written reads back the same.

use crate::error::ReadError;
use crate::files::DataFile;
use crate::format::{Reader, choose as choose_format};
use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::writer::{WRITERS, WriteError, choose, convert};
use kolo_graph::settings::{Setting, Settings};
use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Arc;

#[derive(Debug, Clone)]
struct InMemory {
    columns: Vec<RecordColumn>,
    rows: Vec<Vec<RecordValue>>,
}

impl Reader for InMemory {
    fn columns(&self) -> &[RecordColumn] {
        &self.columns
    }

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        for (column, value) in self.rows[at].iter().enumerate() {
            match value {
                RecordValue::Bytes(values) => record.bytes(column).extend(values),
                RecordValue::Text(text) => record.text(column).push_str(text),
                RecordValue::Reals(values) => record.reals(column).extend(values),
                RecordValue::Ints(values) => record.ints(column).extend(values),
                RecordValue::Missing => record.missing(column),
            }
        }
        Ok(())
    }
}

fn real(shape: &[usize]) -> RecordKind {
    RecordKind::Real { shape: shape.into() }
}

fn int(shape: &[usize]) -> RecordKind {
    RecordKind::Int { shape: shape.into(), classes: None }
}

fn data(columns: &[(&str, RecordKind)], rows: usize, value: impl Fn(usize, usize) -> RecordValue) -> InMemory {
    let columns: Vec<RecordColumn> =
        columns.iter().map(|(name, kind)| RecordColumn { name: (*name).into(), kind: kind.clone() }).collect();
    let rows = (0..rows).map(|row| (0..columns.len()).map(|column| value(row, column)).collect()).collect();
    InMemory { columns, rows }
}

fn written(data: &InMemory, path: &Path) -> Result<(), WriteError> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    let mut told = 0;
    convert(data, choose(None, path)?, path, file, &mut |done| told = done)?;
    assert_eq!(told, data.len());
    Ok(())
}

fn opened(path: &Path, keys: Settings) -> Box<dyn Reader> {
    let files = [DataFile::at(path).unwrap()];
    let format = choose_format(&files, &keys).unwrap_or_else(|error| panic!("{error}"));
    (format.open)(&files, &keys).unwrap_or_else(|error| panic!("{error}"))
}

/// Names and values of every record, written to a file of this name and read back.
fn round_trip(data: &InMemory, name: &str) -> (Vec<String>, Vec<Vec<RecordValue>>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    written(data, &path).unwrap_or_else(|error| panic!("{name}: {error}"));
    let reader = opened(&path, Settings::new("data", "test"));
    let names = reader.columns().iter().map(|column| column.name.clone()).collect();
    let mut record = Record::new();
    let row = |at: usize| {
        reader.read(at, &mut record).unwrap_or_else(|error| panic!("{error}"));
        (0..reader.columns().len()).map(|column| record.value(column).clone()).collect()
    };
    (names, (0..reader.len()).map(row).collect())
}

fn reals(row: usize, count: usize) -> RecordValue {
    RecordValue::Reals((0..count).map(|at| (row * 10 + at) as f32 * 0.37 - 1.5).collect())
}

fn png(row: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, 2, 2);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.write_header().unwrap().write_image_data(&[row as u8, 1, 2, 3]).unwrap();
    bytes
}

fn table() -> InMemory {
    let names: Arc<[String]> = ["cat, large".to_string(), "dog".into()].into();
    let columns =
        [("x", real(&[])), ("n", int(&[])), ("text", RecordKind::Text), ("label", RecordKind::Class { names })];
    data(&columns, 20, |row, column| match column {
        0 if row == 3 => RecordValue::Missing,
        0 => reals(row, 1),
        1 => RecordValue::Ints(vec![row as i64 * 1_000_000_007 - 5]),
        2 => RecordValue::Text(["plain", "a \"quoted\", one", "two\nlines", " spaces ", "ünï"][row % 5].into()),
        _ => RecordValue::Ints(vec![(row % 2) as i64]),
    })
}

#[test]
fn tar_archives_hold_images_numbers_and_text() {
    let columns = [("image", RecordKind::Image), ("label", int(&[])), ("text", RecordKind::Text), ("x", real(&[2, 3]))];
    let data = data(&columns, 7, |row, column| match column {
        0 => RecordValue::Bytes(png(row)),
        1 => RecordValue::Ints(vec![row as i64]),
        2 if row == 2 => RecordValue::Missing,
        2 => RecordValue::Text(format!("line {row}\n")),
        _ => reals(row, 6),
    });
    let (names, rows) = round_trip(&data, "a.tar");
    let at = |name: &str| names.iter().position(|known| known == name).unwrap_or_else(|| panic!("{name}: {names:?}"));
    for (row, values) in data.rows.iter().enumerate() {
        let of = ["image", "cls", "txt", "x.npy"].map(|name| rows[row][at(name)].clone());
        assert_eq!(of[..], values[..], "record {row}");
    }
}

#[test]
fn pixels_become_images_in_a_tar_archive() {
    let shape = vec![3, 2, 5];
    let data = data(&[("image", RecordKind::Pixels { shape })], 3, |row, _| {
        RecordValue::Bytes((0..30).map(|at| (at * 7 + row) as u8).collect())
    });
    let (names, rows) = round_trip(&data, "a.tar");
    assert_eq!(names, ["image"]);
    for (row, values) in rows.iter().enumerate() {
        let RecordValue::Bytes(bytes) = &values[0] else { panic!("{values:?}") };
        let mut pixels = crate::image::Pixels::default();
        crate::image::decode(bytes, &mut pixels).unwrap();
        let planar = (0..30).map(|at| pixels.bytes[at % 10 * 3 + at / 10]).collect();
        assert_eq!(RecordValue::Bytes(planar), data.rows[row][0]);
    }
}

#[test]
fn tfrecords_hold_all_columns() {
    let columns = [("b", int(&[3])), ("image", RecordKind::Image), ("t", RecordKind::Text), ("x", real(&[4]))];
    let data = data(&columns, 9, |row, column| match column {
        0 => RecordValue::Ints(vec![row as i64, -1, i64::MIN]),
        1 => RecordValue::Bytes(png(row)),
        2 => RecordValue::Text(format!("text {row}")),
        _ => reals(row, 4),
    });
    let (names, rows) = round_trip(&data, "a.tfrecord");
    assert_eq!(names, ["b", "image", "t", "x"]);
    assert_eq!(rows, data.rows);
}

#[test]
fn csv_and_json_lines_hold_text_and_numbers() {
    let table = table();
    let text = |value: &RecordValue| match value {
        RecordValue::Ints(class) => RecordValue::Text(["cat, large", "dog"][class[0] as usize].into()),
        other => other.clone(),
    };
    for name in ["a.csv", "a.tsv", "a.jsonl"] {
        let (names, rows) = round_trip(&table, name);
        let at = ["x", "n", "text", "label"].map(|name| names.iter().position(|known| known == name).unwrap());
        for (row, values) in table.rows.iter().enumerate() {
            let wanted = [values[0].clone(), values[1].clone(), values[2].clone(), text(&values[3])];
            let got = at.map(|at| rows[row][at].clone());
            assert_eq!(got, wanted, "{name}, record {row}");
        }
    }
}

#[test]
fn lists_are_columns_of_csv_and_lists_of_json() {
    let data = data(&[("x", real(&[2, 2])), ("k", int(&[2]))], 5, |row, column| match column {
        0 => reals(row, 4),
        _ => RecordValue::Ints(vec![row as i64, 7]),
    });
    let (names, rows) = round_trip(&data, "a.csv");
    assert_eq!(names, ["x.0", "x.1", "x.2", "x.3", "k.0", "k.1"]);
    assert_eq!(rows[4][5], RecordValue::Ints(vec![7]));
    let (names, rows) = round_trip(&data, "a.jsonl");
    let at = names.iter().position(|name| name == "x").unwrap();
    assert_eq!(rows.iter().map(|row| row[at].clone()).collect::<Vec<_>>(), {
        data.rows.iter().map(|row| row[0].clone()).collect::<Vec<_>>()
    });
}

#[test]
fn arrays_hold_numbers() {
    let columns = [("k", int(&[])), ("p", RecordKind::Pixels { shape: vec![1, 2, 2] }), ("x", real(&[3]))];
    let data = data(&columns, 6, |row, column| match column {
        0 => RecordValue::Ints(vec![row as i64 - 3]),
        1 => RecordValue::Bytes(vec![row as u8, 1, 2, 255]),
        _ => reals(row, 3),
    });
    let (names, rows) = round_trip(&data, "a.npz");
    for (at, column) in data.columns.iter().enumerate() {
        let found = names.iter().position(|name| *name == column.name).unwrap_or_else(|| panic!("{names:?}"));
        let numbers = |value: &RecordValue| match value {
            RecordValue::Bytes(bytes) => RecordValue::Ints(bytes.iter().map(|byte| i64::from(*byte)).collect()),
            other => other.clone(),
        };
        for (row, values) in data.rows.iter().enumerate() {
            assert_eq!(numbers(&rows[row][found]), numbers(&values[at]), "{}, record {row}", column.name);
        }
    }
    let one = InMemory {
        columns: vec![data.columns[2].clone()],
        rows: data.rows.iter().map(|row| vec![row[2].clone()]).collect(),
    };
    let (_, rows) = round_trip(&one, "a.npy");
    assert_eq!(rows, one.rows);
}

#[test]
fn tokens_are_as_wide_as_they_are_read() {
    for (classes, name) in [(300, "a.bin"), (300, "a.tokens"), (100_000, "a.u32"), (300, "a.u32"), (300, "a.U16")] {
        for classes in [Some(classes), None] {
            let kind = RecordKind::Int { shape: vec![4], classes };
            let token = |at: usize| (at * (classes.unwrap_or(300) / 13)) as i64;
            let data = data(&[("x", kind.clone()), ("y", kind)], 3, |row, column| {
                RecordValue::Ints((0..4).map(|at| token(row * 4 + at + column)).collect())
            });
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join(name);
            written(&data, &path).unwrap();
            let mut keys = Settings::new("data", "test");
            keys.set("context", "test", Setting::Int(11));
            let (reader, mut record) = (opened(&path, keys), Record::new());
            reader.read(0, &mut record).unwrap();
            assert_eq!(record.value(0), &RecordValue::Ints((0..11).map(token).collect()), "{name}, {classes:?}");
        }
    }
}

/// What is written can be read back, with as many records and columns, or it is refused: no format loses any silently.
#[test]
fn odd_names_and_missing_values_are_kept_or_refused() {
    let names: &[&[&str]] = &[
        &["a b", "a_b"],
        &["Text", "TEXT", "text"],
        &["txt", "text", "x"],
        &["label", "cls", "class"],
        &["jpg", "image", "png", "a.jpg"],
        &["x.0", "x", "x.0.1"],
        &["1", "2"],
        &["nan", "label"],
        &[" a", "a "],
        &["", "column0", "column1"],
        &["n\nl", "q\"", "x,y", "\u{1b}", "t\tt"],
        &["\u{feff}a", "a"],
        &["日本", "東京", "é", "É", "ß"],
        &["__a__", ".", "a/b", "../c"],
        &["a", "a"],
    ];
    let kinds = [
        RecordKind::Image,
        RecordKind::Pixels { shape: vec![2, 2, 2] },
        RecordKind::Text,
        RecordKind::Bytes,
        real(&[]),
        real(&[2]),
        int(&[]),
        int(&[2]),
    ];
    let value = |kind: &RecordKind, row: usize| match kind {
        RecordKind::Image => RecordValue::Bytes(png(row)),
        RecordKind::Pixels { .. } => RecordValue::Bytes(vec![row as u8; 8]),
        RecordKind::Text => RecordValue::Text(format!("word {row}")),
        RecordKind::Bytes => RecordValue::Bytes(vec![255, 0, row as u8]),
        RecordKind::Real { shape } => reals(row, shape.iter().product()),
        _ => RecordValue::Ints(vec![row as i64; crate::writer::shape_of(kind).unwrap().iter().product()]),
    };
    let mut kept = 0;
    for (names, first) in names.iter().flat_map(|names| (0..kinds.len()).map(move |first| (names, first))) {
        // All columns of one kind, or of different ones; then with records that miss some or all values.
        for (step, missing) in [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)] {
            let columns = names.iter().enumerate();
            let columns: Vec<_> =
                columns.map(|(at, name)| (*name, kinds[(first + at * step) % kinds.len()].clone())).collect();
            let data = data(&columns, 3, |row, column| match missing {
                1 if row == 1 && column == 0 => RecordValue::Missing,
                2 if row == 1 => RecordValue::Missing,
                _ => value(&columns[column].1, row),
            });
            for kind in WRITERS.iter().filter(|kind| kind.name != "tokens") {
                let dir = tempfile::tempdir().unwrap();
                let path = dir.path().join("a").with_extension(kind.extensions[0]);
                match written(&data, &path) {
                    Err(WriteError::Unfit { message, hint }) => assert!(!message.is_empty() && !hint.is_empty()),
                    Err(error) => panic!("{}: {error}", kind.name),
                    Ok(()) => {
                        let reader = opened(&path, Settings::new("data", "test"));
                        let what = format!("{}, {columns:?}, {missing}: {:?}", kind.name, reader.columns());
                        assert_eq!(reader.len(), 3, "{what}");
                        let cells = |column: &RecordColumn| match &column.kind {
                            RecordKind::Real { shape } | RecordKind::Int { shape, .. } if kind.name.ends_with("sv") => {
                                shape.iter().product()
                            }
                            _ => 1,
                        };
                        let all: usize = data.columns.iter().map(cells).sum();
                        assert_eq!(reader.columns().len(), all, "{what}");
                        let mut record = Record::new();
                        for (at, row) in data.rows.iter().enumerate() {
                            reader.read(at, &mut record).unwrap_or_else(|error| panic!("{what}: {error}"));
                            let is_there = |value: &RecordValue| *value != RecordValue::Missing;
                            let there = data.columns.iter().zip(row).filter(|(_, value)| is_there(value));
                            let there: usize = there.map(|(column, _)| cells(column)).sum();
                            let found = (0..all).filter(|column| is_there(record.value(*column))).count();
                            assert_eq!(found, there, "{what}: record {at}");
                        }
                        kept += 1;
                    }
                }
            }
        }
    }
    assert!(kept > 500, "{kept}");
}

/// The reader takes as much as the writer writes.
#[test]
fn limits_are_those_of_the_reader() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |data: &InMemory, name: &str, text: &str| {
        let error = written(data, &dir.path().join(name)).unwrap_err().to_string();
        assert!(error.contains(text) && error.contains("\n  hint: "), "{error}");
        std::fs::remove_file(dir.path().join(name)).unwrap_or_default();
    };
    let wide = |count: usize| data(&[("x", real(&[count]))], 2, move |row, _| reals(row, count));
    let (names, _) = round_trip(&wide(1 << 16), "a.csv");
    assert_eq!(names.len(), 1 << 16);
    refused(&wide((1 << 16) + 1), "a.csv", "a record would be a line of more than 65536 cells");
    let long = |bytes: usize| {
        data(&[("t", RecordKind::Text), ("n", int(&[]))], 2, move |row, column| match column {
            0 => RecordValue::Text("a".repeat(if row == 1 { bytes } else { 3 })),
            _ => RecordValue::Ints(vec![1]),
        })
    };
    for (name, beside) in [("a.csv", ",1\n".len()), ("a.jsonl", "{\"t\":\"\",\"n\":1}\n".len())] {
        let (_, rows) = round_trip(&long((16 << 20) - beside), name);
        assert_eq!(rows.len(), 2, "{name}");
        refused(&long((16 << 20) + 1 - beside), name, "record 1: it would be a line of more than 16777216 bytes");
    }
    let names: Vec<String> = (0..1001).map(|at| format!("n{at}")).collect();
    let many = |count: usize| {
        let columns: Vec<_> = names[..count].iter().map(|name| (name.as_str(), int(&[]))).collect();
        data(&columns, 1, |_, column| RecordValue::Ints(vec![column as i64]))
    };
    assert_eq!(round_trip(&many(1000), "a.tar").0.len(), 1000);
    refused(&many(1001), "a.tar", "there would be 1001 kinds of members; an archive has at most 1000");
    let named = |length: usize| {
        let name = "n".repeat(length);
        data(&[(&name, int(&[]))], 1, |_, _| RecordValue::Ints(vec![3]))
    };
    let longest = [("a.tar", 86), ("a.npz", 65_531), ("a.csv", 100_000), ("a.jsonl", 100_000), ("a.tfrecord", 100_000)];
    for (name, most) in longest {
        assert_eq!(round_trip(&named(most), name).1, [[RecordValue::Ints(vec![3])]], "{name}");
    }
    for (name, most) in &longest[..2] {
        refused(&named(most + 1), name, "is too long a name for a member of an archive");
    }
}

/// A column may begin late, where the reader still finds it.
#[test]
fn columns_that_begin_late_are_kept_or_refused() {
    for first in [0, 15, 16, 40, 50] {
        let data = data(&[("n", int(&[])), ("late", real(&[2]))], 50, |row, column| match column {
            0 => RecordValue::Ints(vec![row as i64]),
            _ if row < first => RecordValue::Missing,
            _ => reals(row, 2),
        });
        for (name, columns) in [("a.tfrecord", 2), ("a.tar", 2), ("a.jsonl", 2), ("a.csv", 3)] {
            let refused = match (name, first) {
                ("a.tfrecord" | "a.tar", 50) => Some("`late` is missing in all records".to_string()),
                ("a.tfrecord", 16..) => Some(format!("record {first}: `late` is missing in the first 16 records")),
                _ => None,
            };
            if let Some(refused) = refused {
                let dir = tempfile::tempdir().unwrap();
                let error = written(&data, &dir.path().join(name)).unwrap_err().to_string();
                assert!(error.starts_with(&refused) && error.contains("\n  hint: "), "{error}");
                continue;
            }
            let (names, rows) = round_trip(&data, name);
            let at = names.iter().position(|name| name.starts_with("late")).unwrap_or_else(|| panic!("{names:?}"));
            assert_eq!(names.len(), columns, "{name}");
            let there = rows.iter().filter(|row| row[at] != RecordValue::Missing).count();
            assert_eq!(there, 50 - first, "{name}");
        }
    }
}

#[test]
fn names_of_archives_are_utf8() {
    let dir = tempfile::tempdir().unwrap();
    let data = data(&[("日本", int(&[])), ("plain", int(&[]))], 2, |row, _| RecordValue::Ints(vec![row as i64]));
    let path = dir.path().join("a.npz");
    written(&data, &path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    // The flags of an entry of the list, and of a local header, stand after its magic and its versions.
    for (magic, place, name) in [(b"PK\x01\x02", 8, 46), (b"PK\x03\x04", 6, 30)] {
        let at = |wanted: &str| {
            let starts = bytes.windows(4).enumerate().filter(|(_, four)| four == magic).map(|(at, _)| at);
            let mut found = starts.filter(|at| bytes[at + name..].starts_with(wanted.as_bytes()));
            found.next().unwrap_or_else(|| panic!("{wanted}"))
        };
        let flags = ["日本.npy", "plain.npy"].map(|wanted| &bytes[at(wanted) + place..][..2]);
        assert_eq!(flags, [[0, 8], [0, 0]]);
    }
}

#[test]
fn what_a_format_cannot_hold_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |data: &InMemory, name: &str, text: &str| {
        let error = written(data, &dir.path().join(name)).unwrap_err().to_string();
        assert!(error.starts_with(text) && error.contains("\n  hint: "), "{error}");
        std::fs::remove_file(dir.path().join(name)).unwrap_or_default();
    };
    let images = data(&[("image", RecordKind::Image)], 1, |row, _| RecordValue::Bytes(png(row)));
    refused(&images, "a.csv", "`image` holds images or bytes, which a CSV file cannot store");
    refused(&images, "a.jsonl", "`image` holds images or bytes, which JSON cannot store");
    refused(&images, "a.npz", "`image` holds no numbers");
    refused(&table(), "a.npy", "a .npy file holds one array, but there are 4: x, n, text, label");
    let missing = data(&[("x", real(&[2]))], 2, |row, _| if row == 1 { RecordValue::Missing } else { reals(row, 2) });
    refused(&missing, "a.npz", "record 1: `x` is missing, but an array needs 2 numbers in each record");
    refused(&missing, "a.tar", "record 1: all its values are missing");
    for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let strange = data(&[("a", real(&[])), ("b", real(&[2]))], 3, |row, column| match (row, column) {
            (2, 1) => RecordValue::Reals(vec![1.0, value]),
            _ => reals(row, column + 1),
        });
        refused(&strange, "a.jsonl", &format!("record 2: `b` has {value}, which JSON cannot store"));
    }
    let pair = |names: [&str; 2]| data(&names.map(|name| (name, int(&[]))), 1, |_, _| RecordValue::Ints(vec![3]));
    let twice = pair(["a", "a"]);
    for kind in WRITERS {
        refused(&twice, &format!("a.{}", kind.extensions[0]), "two columns are called `a`");
    }
    refused(&pair(["a b", "a_b"]), "a.tar", "`a b` and `a_b` would both be called `a_b.cls` in the file");
    refused(&pair(["a ", "a"]), "a.csv", "`a ` and `a` would both be called `a` in the file");
    refused(&pair(["a", "-1e3"]), "a.tsv", "a column is called `-1e3`, and a line with a number in it");
    refused(&pair(["a\u{1b}", "b"]), "a.npy", "a .npy file holds one array, but there are 2: a\\u{1b}, b");
    refused(&pair(["a", "b"]), "a.bin", "a token file stores one column of whole numbers, and not: a, b");
    let empty = data(&[("x", real(&[2, 0]))], 1, |_, _| RecordValue::Reals(vec![]));
    refused(&empty, "a.jsonl", "`x` has lists without any numbers");
    refused(&data(&[("x", int(&[]))], 0, |_, _| RecordValue::Missing), "a.jsonl", "there are no records to write");
    let large = data(&[("x", int(&[1]))], 2, |row, _| RecordValue::Ints(vec![row as i64 * 65_536]));
    refused(&large, "a.bin", "record 1: `x` has 65536, which has more than 16 bits");
    let kind = RecordKind::Int { shape: vec![1], classes: Some(65_537) };
    let large = data(&[("x", kind)], 1, |_, _| RecordValue::Ints(vec![0]));
    refused(&large, "a.bin", "`x` has a vocabulary of 65537, more than 16 bits hold");
    let negative = data(&[("x", int(&[1]))], 1, |_, _| RecordValue::Ints(vec![-1]));
    refused(&negative, "a.bin", "record 0: `x` has -1, which is not a token");
    let unknown = choose(None, Path::new("a.xyz")).unwrap_err().to_string();
    assert!(
        unknown.starts_with("a.xyz: the file ending does not name a format\n  hint: use one of the endings .csv"),
        "{unknown}"
    );
    let wrong = choose(Some("jsonk"), Path::new("a")).unwrap_err().to_string();
    assert!(wrong.contains("did you mean jsonl?"), "{wrong}");
}
