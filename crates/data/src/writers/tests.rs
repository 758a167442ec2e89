//! What is written reads back the same.

use crate::error::ReadError;
use crate::files::DataFile;
use crate::format::{Reader, choose as choose_format};
use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::writer::{WriteError, choose, convert};
use kolo_graph::settings::Settings;
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
    convert(data, choose(None, path)?, file, &mut |done| told = done)?;
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
fn tokens_are_as_wide_as_they_must_be() {
    for (classes, name) in [(300, "a.bin"), (100_000, "a.u32")] {
        let kind = RecordKind::Int { shape: vec![4], classes: Some(classes) };
        let data = data(&[("x", kind.clone()), ("y", kind)], 3, |row, column| {
            RecordValue::Ints((0..4).map(|at| ((row * 4 + at + column) * (classes / 13)) as i64).collect())
        });
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        written(&data, &path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let width = if classes == 300 { 2 } else { 4 };
        assert_eq!(bytes.len(), 12 * width);
        let token =
            |at: usize| bytes[at * width..][..width].iter().rev().fold(0, |sum, byte| sum << 8 | *byte as usize);
        assert!((0..12).all(|at| token(at) == at * (classes / 13)), "{bytes:?}");
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
    refused(&missing, "a.npz", "a record has 0 numbers in `x`");
    let negative = data(&[("x", int(&[1]))], 1, |_, _| RecordValue::Ints(vec![-1]));
    refused(&negative, "a.bin", "`x` has -1, which is not a token");
    let unknown = choose(None, Path::new("a.xyz")).unwrap_err().to_string();
    assert!(
        unknown.starts_with("a.xyz: the file ending does not name a format\n  hint: use one of the endings .csv"),
        "{unknown}"
    );
    let wrong = choose(Some("jsonk"), Path::new("a")).unwrap_err().to_string();
    assert!(wrong.contains("did you mean jsonl?"), "{wrong}");
}
