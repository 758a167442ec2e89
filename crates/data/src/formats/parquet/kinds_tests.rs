//! Columns of every type in every encoding, as `make_kinds.py` writes them.

use super::arrow::{self, ArrowFile};
use super::columns::TableColumns;
use super::table::Schema;
use super::tests::{open_file, read_all, settings};
use super::{ParquetFile, TableReader, reader};
use crate::files::DataFile;
use crate::format::Reader;
use crate::record::{RecordKind, RecordValue};
use kolo_graph::settings::Setting;
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
    let mut settings = settings();
    settings.set("inputs", "job.toml:2", Setting::Text(column.into()));
    let contents = DataFile::at(&path(name)).unwrap().contents(&settings).unwrap();
    let only = |schema: &Schema| {
        let mut columns = TableColumns::of_schema(schema, &settings).unwrap();
        let place = columns.records.iter().position(|record| record.name == column).unwrap();
        columns.columns = vec![columns.columns.swap_remove(place)];
        columns.records = vec![columns.records.swap_remove(place)];
        columns
    };
    if name.ends_with(".parquet") {
        let file = ParquetFile::open(contents).unwrap();
        let columns = only(&file.schema);
        return reader(vec![file], columns, 0).unwrap();
    }
    let file = ArrowFile::open(contents).unwrap();
    let columns = only(&file.schema);
    arrow::reader(vec![file], columns, 0).unwrap()
}

/// Compares every value of every column.
fn check(name: &str, parts: &[&str]) {
    let all: Value = serde_json::from_slice(&std::fs::read(path("kinds_expected.json")).unwrap()).unwrap();
    for (column, values) in parts.iter().flat_map(|part| all[part].as_object().unwrap()) {
        let values = values.as_array().unwrap();
        let reader = open_column(name, column);
        let kind = &reader.columns()[0].kind;
        assert_eq!(reader.len(), values.len(), "{name}, {column}");
        for (row, (read, value)) in read_all(&reader).into_iter().zip(values).enumerate() {
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
fn columns_that_cannot_be_read_are_named() {
    for (format, name, column) in [
        ("parquet", "kinds_plain.parquet", "column \"when\" has the type Timestamp(µs, \"UTC\")"),
        ("arrow", "kinds.arrow", "column \"when\" has the type Timestamp(µs, \"UTC\")"),
    ] {
        let error = open_file(format, &path(name), &settings()).unwrap_err().to_string();
        assert!(error.contains(column), "{error}");
    }
}

#[test]
fn columns_are_read_together() {
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
        assert!(read.len() == 20 && read[0].is_ok(), "{name}: {:?}", read[0]);
        assert!(read[1..].iter().all(|row| row.as_ref().is_err_and(|error| error.starts_with("column \""))), "{name}");
    }
}
