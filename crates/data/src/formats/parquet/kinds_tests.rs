//! Columns of every type in every encoding, as `make_kinds.py` writes them.

use super::arrow::ArrowFile;
use super::columns::TableColumns;
use super::table::Schema;
use super::tests::{int, open_file, read_all, settings};
use super::{ParquetFile, TableFile, TableReader};
use crate::files::DataFile;
use crate::format::Reader;
use crate::record::{Record, RecordKind, RecordValue};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files").join(name)
}

/// The numbers in nested lists, in order, if their sizes are those of `shape` and none is null.
fn flat<'v>(value: &'v Value, shape: &[usize], out: &mut Vec<&'v Value>) -> bool {
    match (value, shape) {
        (Value::Array(items), [size, below @ ..]) => {
            items.len() == *size && items.iter().all(|item| flat(item, below, out))
        }
        (Value::Number(_), []) => {
            out.push(value);
            true
        }
        _ => false,
    }
}

/// The sizes of nested lists, by the first at every depth.
fn shape_of(value: &Value) -> Vec<usize> {
    let Value::Array(items) = value else { return Vec::new() };
    let below = items.first().map(shape_of).unwrap_or_default();
    [vec![items.len()], below].concat()
}

/// The value of a record, or `None` if there is an error instead.
fn expected(value: &Value, kind: &RecordKind) -> Option<RecordValue> {
    let mut numbers = Vec::new();
    match (value, kind) {
        (Value::Null, _) => Some(RecordValue::Missing),
        (Value::String(text), RecordKind::Text) => Some(RecordValue::Text(text.clone())),
        (Value::Object(object), RecordKind::Bytes) => {
            let bytes = object["bytes"].as_array()?.iter().map(|byte| byte.as_u64().map(|byte| byte as u8));
            Some(RecordValue::Bytes(bytes.collect::<Option<_>>()?))
        }
        (_, RecordKind::Int { shape, .. }) if flat(value, shape, &mut numbers) => {
            numbers.iter().map(|number| number.as_i64()).collect::<Option<_>>().map(RecordValue::Ints)
        }
        (_, RecordKind::Real { shape }) if flat(value, shape, &mut numbers) => {
            let real = |number: &&Value| number.as_f64().map(|number| number as f32);
            numbers.iter().map(real).collect::<Option<_>>().map(RecordValue::Reals)
        }
        _ => None,
    }
}

/// One column of a file alone: a row that cannot be read fails with all its columns.
fn open_column(name: &str, column: &str) -> TableReader {
    let contents = DataFile::at(&path(name)).unwrap().contents(&settings()).unwrap();
    let only = |schema: &Schema| {
        let mut columns = TableColumns::of_schema(schema);
        let index = columns.records.iter().position(|record| record.name == column).unwrap();
        columns.columns = vec![columns.columns.swap_remove(index)];
        columns.records = vec![columns.records.swap_remove(index)];
        columns
    };
    if name.ends_with(".parquet") {
        let file = ParquetFile::open(contents).unwrap();
        let columns = only(&file.schema);
        return <ParquetFile as TableFile>::reader(vec![file], columns, 0).unwrap();
    }
    let file = ArrowFile::open(contents).unwrap();
    let columns = only(&file.schema);
    ArrowFile::reader(vec![file], columns, 0).unwrap()
}

/// Compares every value of every column.
fn check(name: &str, parts: &[&str]) {
    let all: Value = serde_json::from_slice(&std::fs::read(path("kinds_expected.json")).unwrap()).unwrap();
    for (column, values) in parts.iter().flat_map(|part| all[part].as_object().unwrap()) {
        let values = values.as_array().unwrap();
        let reader = open_column(name, column);
        let kind = &reader.columns()[0].kind;
        assert_eq!(reader.len(), values.len(), "{name}, {column}");
        let first = values.iter().find(|value| !value.is_null());
        if let (Some(first), RecordKind::Int { shape, .. } | RecordKind::Real { shape }) = (first, kind) {
            assert_eq!(shape, &shape_of(first), "{name}, {column}");
        }
        let read = read_all(&reader);
        let has_value =
            |read: &Result<RecordValue, String>| matches!(read, Ok(value) if *value != RecordValue::Missing);
        assert_eq!(read.iter().any(has_value), first.is_some(), "{name}, {column}");
        for (row, (read, value)) in read.into_iter().zip(values).enumerate() {
            assert_eq!(read.clone().ok(), expected(value, kind), "{name}, {column}, row {row}: {read:?}, {value}");
        }
    }
}

#[test]
fn every_type_and_encoding_of_parquet_is_read() {
    for name in ["plain", "dictionary", "delta", "split", "required"] {
        check(&format!("kinds_{name}.parquet"), &["both"]);
    }
}

#[test]
fn every_type_of_arrow_is_read_or_passed_over() {
    for name in ["kinds.arrow", "kinds_lz4.arrow", "kinds_zstd.arrow", "kinds_version4.arrow", "kinds.arrows"] {
        check(name, &["both", "arrow"]);
    }
}

#[test]
fn rows_that_cannot_be_read_say_why() {
    let why = |name: &str, column: &str, row: usize| read_all(&open_column(name, column)).swap_remove(row).unwrap_err();
    for name in ["kinds_plain.parquet", "kinds.arrow"] {
        let large = "column \"u64_large\": 9223372036854775808 is larger than 9223372036854775807";
        assert_eq!(why(name, "u64_large", 2), large);
        assert_eq!(
            why(name, "list_empty", 1),
            "column \"list_empty\": a list has 0 values, but the first record has 1"
        );
        let nested = "column \"nested_odd\": a list has 2 values, but the first record has 1";
        assert_eq!(why(name, "nested_odd", 2), nested);
    }
}

#[test]
fn dictionaries_that_grow_are_read() {
    let read = read_all(&*open_file("arrow", &path("growing.arrow"), &settings()).unwrap());
    let words: Vec<_> = ["b", "a", "c", "a", "e", "a"].map(|word| Ok(RecordValue::Text(word.into()))).into();
    assert_eq!(read, words);
}

#[test]
fn columns_that_are_not_read_are_named() {
    for (format, name) in [("parquet", "kinds_plain.parquet"), ("arrow", "kinds.arrow")] {
        let reader = open_file(format, &path(name), &settings()).unwrap();
        let unread: Vec<_> = reader.unread().iter().map(|column| (&column.name[..], &column.kind[..])).collect();
        for column in [("when", "Timestamp(µs, \"UTC\")"), ("day", "Date32")] {
            assert!(unread.contains(&column), "{name}: {unread:?}");
        }
        for column in ["price", "map", "struct"] {
            assert!(unread.iter().any(|(name, _)| *name == column), "{name}: {unread:?}");
        }
    }
}

#[test]
fn columns_are_read_together() {
    let all: Value = serde_json::from_slice(&std::fs::read(path("kinds_expected.json")).unwrap()).unwrap();
    for (format, name) in [
        ("parquet", "kinds_dictionary.parquet"),
        ("parquet", "kinds_delta.parquet"),
        ("parquet", "kinds_split.parquet"),
        ("parquet", "kinds_required.parquet"),
        ("arrow", "kinds_lz4.arrow"),
        ("arrow", "kinds_zstd.arrow"),
        ("arrow", "kinds.arrows"),
    ] {
        let reader = open_file(format, &path(name), &settings()).unwrap();
        // Every row but the first has a column that cannot be read.
        let read = read_all(&*reader);
        assert_eq!(read.len(), 20, "{name}");
        assert!(read[1..].iter().all(|row| row.as_ref().is_err_and(|error| error.starts_with("column \""))), "{name}");
        let mut record = Record::new();
        reader.read(0, &mut record).unwrap();
        for (at, column) in reader.columns().iter().enumerate() {
            let values = ["both", "arrow"].into_iter().find_map(|part| all[part][&column.name].as_array()).unwrap();
            let wanted = expected(&values[0], &column.kind);
            assert_eq!(Some(record.value(at)), wanted.as_ref(), "{name}, {}", column.name);
        }
    }
}

#[test]
fn a_null_in_a_dictionary_is_a_missing_value() {
    let read = read_all(&*open_file("arrow", &path("null_word.arrow"), &settings()).unwrap());
    let text = |text: &str| Ok(RecordValue::Text(text.into()));
    assert_eq!(read, [text("a"), Ok(RecordValue::Missing), text("c"), Ok(RecordValue::Missing)]);
}

#[test]
fn a_stream_that_changes_a_dictionary_is_refused_with_a_way_out() {
    let error = open_file("arrow", &path("replaced.arrows"), &settings()).unwrap_err().to_string();
    let wanted = [", byte ", "a dictionary changes within the stream", "`pyarrow.ipc.new_file`"];
    assert!(wanted.iter().all(|part| error.contains(part)), "{error}");
}

#[test]
fn the_shape_is_that_of_the_first_list_that_has_one_and_durations_are_numbers() {
    for name in ["hollow.parquet", "hollow.arrow"] {
        let ints = |values: &[i64]| Ok(RecordValue::Ints(values.to_vec()));
        let reader = open_column(name, "hollow");
        assert_eq!(reader.columns()[0].kind, int(&[1, 2]), "{name}");
        let empty = "column \"hollow\": a list has 0 values, but the first record has 1";
        let wanted = [Err(empty.into()), Ok(RecordValue::Missing), ints(&[1, 2]), ints(&[3, 4])];
        assert_eq!(read_all(&reader), wanted, "{name}");
        let wanted = [ints(&[1]), ints(&[-2]), Ok(RecordValue::Missing), ints(&[4])];
        assert_eq!(read_all(&open_column(name, "duration")), wanted, "{name}");
    }
}

#[test]
fn a_stream_that_is_cut_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let cut = dir.path().join("cut.arrows");
    let bytes = std::fs::read(path("kinds.arrows")).unwrap();
    let opened = |len: usize| {
        std::fs::write(&cut, &bytes[..len]).unwrap();
        open_file("arrow", &cut, &settings())
    };
    // The last eight bytes say that it ends, and may be left out.
    assert!(opened(bytes.len()).is_ok() && opened(bytes.len() - 8).is_ok());
    for left in 1..8 {
        let error = opened(bytes.len() - left).unwrap_err().to_string();
        assert!(error.contains("8 bytes are expected here"), "{error}");
    }
}
