use super::super::tests::{int, open_file, read_all, settings};
use super::*;
use crate::record::{RecordKind, RecordValue, UnreadColumn};
use ::parquet::data_type::{ByteArray, ByteArrayType, DataType, Int32Type, Int64Type};
use ::parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use ::parquet::schema::parser::parse_message_type;
use std::path::Path;
use std::sync::Arc;

/// Writes a file of this schema, whose leaves `write` fills in their order.
fn file(path: &Path, schema: &str, write: &[&dyn Fn(&mut SerializedColumnWriter<'_>)]) {
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(std::fs::File::create(path).unwrap(), schema, Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for write in write {
        let mut column = group.next_column().unwrap().unwrap();
        write(&mut column);
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

fn put<T: DataType>(
    column: &mut SerializedColumnWriter<'_>,
    values: &[T::T],
    definitions: &[i16],
    repetitions: &[i16],
) {
    let levels = |levels: &[i16]| (!levels.is_empty()).then(|| levels.to_vec());
    let (definitions, repetitions) = (levels(definitions), levels(repetitions));
    column.typed::<T>().write_batch(values, definitions.as_deref(), repetitions.as_deref()).unwrap();
}

fn ints(values: &[i64]) -> Result<RecordValue, String> {
    Ok(RecordValue::Ints(values.to_vec()))
}

#[test]
fn lists_of_every_shape_of_schema_are_lists() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lists.parquet");
    // [1, 2], [3, 4] by each; where it can be, a null and an empty list after.
    for (schema, definitions, nulls) in [
        ("message m { repeated int32 x; }", [1, 1, 1, 1, 0, 0], 0),
        ("message m { required group x (LIST) { repeated int32 element; } }", [1, 1, 1, 1, 0, 0], 0),
        ("message m { optional group x (LIST) { repeated int32 array; } }", [2, 2, 2, 2, 0, 1], 1),
        (
            "message m { optional group x (LIST) { repeated group list { required int32 element; } } }",
            [2, 2, 2, 2, 0, 1],
            1,
        ),
        (
            "message m { optional group x (LIST) { repeated group bag { optional int32 array_element; } } }",
            [3, 3, 3, 3, 0, 1],
            1,
        ),
        (
            "message m { required group x (LIST) { repeated group list { optional int32 item; } } }",
            [2, 2, 2, 2, 0, 0],
            0,
        ),
        (
            "message m { optional group x (MAP) { repeated group key_value { required int32 key; } } }",
            [2, 2, 2, 2, 0, 1],
            1,
        ),
    ] {
        file(&path, schema, &[&|column| put::<Int32Type>(column, &[1, 2, 3, 4], &definitions, &[0, 1, 0, 1, 0, 0])]);
        let reader = open_file("parquet", &path, &settings()).unwrap();
        assert_eq!(reader.columns()[0].kind, int(&[2]), "{schema}");
        let read = read_all(&*reader);
        assert_eq!(read[..2], [ints(&[1, 2]), ints(&[3, 4])], "{schema}");
        let empty = Err("column \"x\": a list has 0 values, but the first record has 2".into());
        let fifth = if nulls == 1 { Ok(RecordValue::Missing) } else { empty.clone() };
        assert_eq!(read[2..], [fifth, empty], "{schema}");
    }
}

#[test]
fn lists_of_lists_without_a_group_between() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lists.parquet");
    let schema = "message m { optional group x (LIST) { repeated group array (LIST) { repeated int32 array; } } }";
    // [[1, 2], [3, 4]], null, [[5, 6], [7]], [[8, 9], []]
    let (definitions, repetitions) = ([3, 3, 3, 3, 0, 3, 3, 3, 3, 3, 2], [0, 2, 1, 2, 0, 0, 2, 1, 0, 2, 1]);
    let write = |column: &mut SerializedColumnWriter<'_>| {
        put::<Int32Type>(column, &[1, 2, 3, 4, 5, 6, 7, 8, 9], &definitions, &repetitions);
    };
    file(&path, schema, &[&write]);
    let reader = open_file("parquet", &path, &settings()).unwrap();
    assert_eq!(reader.columns()[0].kind, int(&[2, 2]));
    let wrong =
        |found: usize| Err(format!("column \"x\": a list has {found} values, but the first record has 2 (depth 1)"));
    assert_eq!(read_all(&*reader), [ints(&[1, 2, 3, 4]), Ok(RecordValue::Missing), wrong(1), wrong(0)]);
}

#[test]
fn a_list_may_be_the_repeated_group_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lists.parquet");
    let inner = "repeated group element (LIST) { repeated group list { optional int32 e; } }";
    // [[1, 2], [3, 4]], null
    let write = |column: &mut SerializedColumnWriter<'_>| {
        put::<Int32Type>(column, &[1, 2, 3, 4], &[4, 4, 4, 4, 0], &[0, 2, 1, 2, 0]);
    };
    file(&path, &format!("message m {{ optional group x (LIST) {{ {inner} }} }}"), &[&write]);
    let reader = open_file("parquet", &path, &settings()).unwrap();
    assert_eq!(reader.columns()[0].kind, int(&[2, 2]));
    assert_eq!(read_all(&*reader), [ints(&[1, 2, 3, 4]), Ok(RecordValue::Missing)]);
}

#[test]
fn a_group_with_a_repeated_field_is_the_item_of_its_list() {
    let schema = "message m { optional group x (LIST) { repeated group element { repeated int32 a; } } }";
    let schema = parse_message_type(schema).unwrap();
    let kind = node(&schema.get_fields()[0], 0, &mut 0).field.kind.to_string();
    assert_eq!(kind, "List(non-null Struct(\"a\": non-null List(non-null Int32)))");
}

#[test]
fn lists_of_groups_are_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lists.parquet");
    for group in ["array", "x_tuple"] {
        let schema = format!(
            "message m {{ required group x (LIST) {{ repeated group {group} {{ required int32 a; }} }} required int32 y; }}"
        );
        file(
            &path,
            &schema,
            &[&|column| put::<Int32Type>(column, &[1], &[1], &[0]), &|column| {
                put::<Int32Type>(column, &[7], &[], &[]);
            }],
        );
        let reader = open_file("parquet", &path, &settings()).unwrap();
        let kind = "List(non-null Struct(\"a\": non-null Int32))".into();
        assert_eq!(reader.unread(), [UnreadColumn { name: "x".into(), kind }]);
        assert_eq!(read_all(&*reader), [ints(&[7])]);
    }
}

#[test]
fn an_image_may_be_null_or_only_a_path() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("images.parquet");
    let schema = "message m { optional group x { optional binary path (STRING); optional binary bytes; } }";
    let bytes = |text: &str| ByteArray::from(text.as_bytes().to_vec());
    let paths = |column: &mut SerializedColumnWriter<'_>| {
        put::<ByteArrayType>(column, &[bytes("a"), bytes("b"), bytes("c")], &[2, 0, 2, 2], &[]);
    };
    let images = |column: &mut SerializedColumnWriter<'_>| {
        put::<ByteArrayType>(column, &[bytes("one"), bytes("two")], &[2, 0, 1, 2], &[]);
    };
    file(&path, schema, &[&paths, &images]);
    let reader = open_file("parquet", &path, &settings()).unwrap();
    assert_eq!(reader.columns()[0].kind, RecordKind::Image);
    let read = read_all(&*reader);
    assert_eq!(read[0], Ok(RecordValue::Bytes(b"one".to_vec())));
    assert_eq!(read[1], Ok(RecordValue::Missing));
    assert!(read[2].as_ref().is_err_and(|error| error.contains("the image is not in the file, only its path is")));
    assert_eq!(read[3], Ok(RecordValue::Bytes(b"two".to_vec())));
}

#[test]
fn annotations_of_old_and_new_files_are_known() {
    let kind = |leaf: &str| {
        let schema = parse_message_type(&format!("message m {{ required {leaf}; }}")).unwrap();
        node(&schema.get_fields()[0], 0, &mut 0).field.kind.to_string()
    };
    for (leaf, name) in [
        ("boolean x", "Boolean"),
        ("int32 x", "Int32"),
        ("int32 x (INT_8)", "Int8"),
        ("int32 x (UINT_16)", "UInt16"),
        ("int32 x (INTEGER(32, false))", "UInt32"),
        ("int64 x (UINT_64)", "UInt64"),
        ("int64 x (INTEGER(64, true))", "Int64"),
        ("int96 x", "Timestamp(ns)"),
        ("float x", "Float32"),
        ("double x", "Float64"),
        ("binary x", "Binary"),
        ("binary x (UTF8)", "Utf8"),
        ("binary x (STRING)", "Utf8"),
        ("binary x (JSON)", "Utf8"),
        ("binary x (BSON)", "Binary"),
        ("fixed_len_byte_array(2) x (FLOAT16)", "Float16"),
        ("fixed_len_byte_array(16) x (UUID)", "FixedSizeBinary(16)"),
        ("fixed_len_byte_array(12) x (INTERVAL)", "Interval(DayTime)"),
        ("int32 x (DATE)", "Date32"),
        ("int32 x (TIME_MILLIS)", "Time32(ms)"),
        ("int64 x (TIME(NANOS, true))", "Time64(ns)"),
        ("int64 x (TIMESTAMP(MICROS, true))", "Timestamp(µs, \"UTC\")"),
        ("int64 x (TIMESTAMP(MILLIS, false))", "Timestamp(ms)"),
        ("int64 x (DECIMAL(10, 2))", "Decimal(10, 2)"),
    ] {
        assert_eq!(kind(leaf), name, "{leaf}");
    }
}

#[test]
fn columns_that_differ_in_length_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lengths.parquet");
    file(
        &path,
        "message m { required int64 a; required int64 b; }",
        &[&|column| put::<Int64Type>(column, &[1, 2, 3], &[], &[]), &|column| {
            put::<Int64Type>(column, &[4, 5, 6], &[], &[])
        }],
    );
    assert_eq!(read_all(&*open_file("parquet", &path, &settings()).unwrap()).len(), 3);
    // The header of the second page: one value less, and eight bytes less of them.
    let mut bytes = std::fs::read(&path).unwrap();
    let places: Vec<usize> = (0..bytes.len() - 3).filter(|at| bytes[*at..].starts_with(&[0x2C, 0x15, 0x06])).collect();
    let second = *places.get(1).expect("two page headers");
    bytes[second + 2] = 0x04;
    std::fs::write(&path, bytes).unwrap();
    let reader = open_file("parquet", &path, &settings()).unwrap();
    assert!(
        read_all(&*reader)[0].as_ref().is_err_and(|error| error.contains("different numbers of rows")),
        "{:?}",
        read_all(&*reader)
    );
}
