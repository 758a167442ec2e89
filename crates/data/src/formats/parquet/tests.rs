use super::*;
use crate::format::{choose, named};
use crate::record::{RecordKind, RecordValue};
use ::parquet::basic::Encoding;
use ::parquet::data_type::{ByteArray, ByteArrayType};
use ::parquet::file::properties::{WriterProperties, WriterPropertiesBuilder};
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use kolo_graph::settings::Setting;
use std::path::PathBuf;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files").join(name)
}

pub(super) fn settings() -> Settings {
    Settings::new("data", "job.toml:1")
}

fn open_as(format: &str, names: &[&str], settings: &Settings) -> OpenedFiles {
    let files: Vec<DataFile> = names.iter().map(|name| DataFile::at(&path(name)).unwrap()).collect();
    (named(format).unwrap().open)(&files, settings)
}

pub(super) fn int(shape: &[usize]) -> RecordKind {
    RecordKind::Int { shape: shape.into(), classes: None }
}

fn real(shape: &[usize]) -> RecordKind {
    RecordKind::Real { shape: shape.into() }
}

pub(super) fn open_file(format: &str, path: &Path, settings: &Settings) -> OpenedFiles {
    (named(format).unwrap().open)(&[DataFile::at(path).unwrap()], settings)
}

/// The first column of every row, or why it cannot be read.
pub(super) fn read_all(reader: &dyn Reader) -> Vec<Result<RecordValue, String>> {
    let mut record = Record::new();
    let mut read = |at| reader.read(at, &mut record).map(|()| record.value(0).clone()).map_err(|error| error.message);
    (0..reader.len()).map(&mut read).collect()
}

/// What `make_tables.py` writes as row `i`.
fn expected(i: i64) -> Vec<RecordValue> {
    let f = i as f32;
    vec![
        RecordValue::Ints(vec![i * i - 5]),
        RecordValue::Ints(vec![i * 37 % 256]),
        RecordValue::Ints(vec![i64::from(i % 3 == 0)]),
        RecordValue::Reals(vec![f * 0.25 - 1.0]),
        if i == 4 { RecordValue::Missing } else { RecordValue::Reals(vec![f / 8.0]) },
        if i % 7 == 3 { RecordValue::Missing } else { RecordValue::Text(format!("řádek {i}")) },
        RecordValue::Bytes(vec![i as u8; i as usize % 5]),
        RecordValue::Reals(vec![f + 0.5, -f, 2.0 * f]),
        RecordValue::Ints(vec![i, i + 1, i + 2, i + 3]),
        RecordValue::Text(["red", "green", "blue"][i as usize % 3].into()),
    ]
}

fn check_table(reader: &dyn Reader, rows: usize) {
    let columns: Vec<_> = reader.columns().iter().map(|column| (column.name.as_str(), column.kind.clone())).collect();
    let wanted = [
        ("id", int(&[])),
        ("small", int(&[])),
        ("flag", int(&[])),
        ("weight", real(&[])),
        ("wide", real(&[])),
        ("name", RecordKind::Text),
        ("blob", RecordKind::Bytes),
        ("vector", real(&[3])),
        ("matrix", int(&[2, 2])),
        ("kind", RecordKind::Text),
    ];
    assert_eq!(columns, wanted);
    assert_eq!(reader.len(), rows);
    let mut record = Record::new();
    for step in 0..rows {
        let at = step * 23 % rows;
        reader.read(at, &mut record).unwrap();
        for (column, value) in expected(at as i64 % 50).iter().enumerate() {
            assert_eq!(record.value(column), value, "row {at}, column {column}");
        }
    }
    assert!(reader.read(rows, &mut record).is_err());
}

#[test]
fn every_value_of_every_packing_is_read() {
    for codec in ["none", "snappy", "gzip", "zstd", "lz4"] {
        check_table(&*open_as("parquet", &[&format!("table_{codec}.parquet")], &settings()).unwrap(), 50);
    }
    for name in ["table.arrow", "table_lz4.arrow", "table_zstd.arrow", "table.arrows", "table.feather"] {
        check_table(&*open_as("arrow", &[name], &settings()).unwrap(), 50);
    }
}

#[test]
fn a_small_budget_gives_the_same_rows() {
    for budget in [0, 3000] {
        let mut settings = settings();
        settings.set("decoded_max", "job.toml:2", Setting::Int(budget));
        check_table(&*open_as("parquet", &["table_snappy.parquet"], &settings).unwrap(), 50);
        check_table(&*open_as("arrow", &["table.arrow"], &settings).unwrap(), 50);
    }
}

#[test]
fn several_files_are_one_table_if_their_columns_agree() {
    let names = ["table_gzip.parquet", "table_lz4.parquet", "table_none.parquet"];
    check_table(&*open_as("parquet", &names, &settings()).unwrap(), 150);
    check_table(&*open_as("arrow", &["table.arrow", "table.arrows"], &settings()).unwrap(), 100);
    let error = open_as("parquet", &["table_gzip.parquet", "raw.parquet"], &settings()).unwrap_err().to_string();
    assert!(error.contains("raw.parquet: its column \"id\" is not the one of "), "{error}");
}

#[test]
fn images_and_classes_of_hugging_face_are_known() {
    let reader = open_as("parquet", &["pictures.parquet"], &settings()).unwrap();
    let names: Arc<[String]> = ["cat".into(), "dog".into()].into();
    assert_eq!(reader.columns()[0].kind, RecordKind::Image);
    assert_eq!(reader.columns()[1].kind, RecordKind::Class { names });
    let mut record = Record::new();
    for at in 0..6 {
        reader.read(at, &mut record).unwrap();
        assert!(
            matches!(record.value(0), RecordValue::Bytes(bytes) if bytes.starts_with(b"\x89PNG") && bytes.len() > 60)
        );
        assert_eq!(record.value(1), &RecordValue::Ints(vec![at as i64 % 2]));
    }
    let reader = open_as("parquet", &["raw.parquet"], &settings()).unwrap();
    assert_eq!((reader.columns()[0].kind.clone(), reader.len()), (RecordKind::Image, 3));
}

#[test]
fn a_column_of_another_type_is_named_and_not_read() {
    let reader = open_as("parquet", &["odd.parquet"], &settings()).unwrap();
    let unread: Vec<_> = reader.unread().iter().map(|column| (&column.name[..], &column.kind[..])).collect();
    assert_eq!(unread, [("when", "Timestamp(ms)")]);
    let mut record = Record::new();
    reader.read(0, &mut record).unwrap();
    assert_eq!((reader.columns().len(), record.value(0)), (1, &RecordValue::Ints(vec![1])));
}

#[test]
fn a_list_of_another_length_fails_alone() {
    let reader = open_as("parquet", &["ragged.parquet"], &settings()).unwrap();
    assert_eq!(reader.columns()[0].kind, int(&[2]));
    let mut record = Record::new();
    let mut read = |at| reader.read(at, &mut record).map(|()| record.value(0).clone()).map_err(|error| error.message);
    assert_eq!(read(0), Ok(RecordValue::Ints(vec![1, 2])));
    assert_eq!(read(1), Err("column \"list\": a list has 1 values, but the first record has 2".into()));
    assert_eq!(read(2), Err("column \"list\": the list contains a null".into()));
    assert_eq!(read(3), Ok(RecordValue::Missing));
    assert_eq!(read(4), Ok(RecordValue::Ints(vec![5, 6])));
}

/// Columns are told from the first row group or batch that can be decoded; rows of the others are errors of their own.
#[test]
fn a_damaged_start_does_not_hide_the_columns() {
    let dir = tempfile::tempdir().unwrap();
    for (format, name) in [("parquet", "table_none.parquet"), ("arrow", "table_zstd.arrow")] {
        let mut bytes = std::fs::read(path(name)).unwrap();
        let first = match format {
            "parquet" => 4,
            _ => {
                let contents = DataFile::at(&path(name)).unwrap().contents(&settings()).unwrap();
                arrow::first_values(&contents) as usize
            }
        };
        bytes[first..first + 64].fill(0x7F);
        let damaged = dir.path().join(name);
        std::fs::write(&damaged, bytes).unwrap();
        let reader = open_file(format, &damaged, &settings()).unwrap();
        assert_eq!((reader.columns()[7].kind.clone(), reader.columns()[8].kind.clone()), (real(&[3]), int(&[2, 2])));
        let mut record = Record::new();
        for at in 0..50 {
            assert_eq!(reader.read(at, &mut record).is_err(), at < 20, "{format}, row {at}");
        }
    }
}

#[test]
fn bytes_are_images_if_most_of_the_first_are() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bytes.parquet");
    let (image, other) = (&b"\x89PNG\r\n\x1a\n"[..], &b"none"[..]);
    let mixed = |first: &[&'static [u8]]| [first, &[image; 3]].concat();
    for (values, kind) in [
        (mixed(&[other]), RecordKind::Image),
        (mixed(&[other, image, other]), RecordKind::Image),
        (mixed(&[other, other, other]), RecordKind::Bytes),
    ] {
        let values: Vec<_> = values.into_iter().map(|value| ByteArray::from(value.to_vec())).collect();
        byte_arrays(&file, "x", &values, WriterProperties::builder());
        let reader = open_file("parquet", &file, &settings()).unwrap();
        assert_eq!(reader.columns()[0].kind, kind, "{values:?}");
    }
}

/// What is intact but not read is not called damaged.
#[test]
fn what_is_not_supported_is_told_from_what_is_damaged() {
    for (format, name, message, hint) in [
        ("parquet", "brotli.parquet", "its column \"id\" is compressed with brotli", "`compression=\"zstd\"`"),
        ("arrow", "first.feather", "this is version 1 of the Feather format", "`pyarrow.feather.write_feather"),
        ("arrow", "legacy.arrows", "a version before 0.15", "`pyarrow.ipc.new_stream`"),
    ] {
        let error = open_as(format, &[name], &settings()).unwrap_err().to_string();
        assert!(error.contains(&format!("{name}, byte ")) && error.contains(message), "{error}");
        assert!(error.contains(hint) && !error.contains("damaged"), "{error}");
    }
    assert_eq!(choose(&[DataFile::at(&path("first.feather")).unwrap()], &settings()).unwrap().name, "arrow");
    let mut bytes = std::fs::read(path("raw.parquet")).unwrap();
    let end = bytes.len() - 1;
    bytes[end] = b'E';
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.parquet"), bytes).unwrap();
    let error = open_file("parquet", &dir.path().join("a.parquet"), &settings()).unwrap_err().to_string();
    assert!(error.contains("its footer is encrypted") && !error.contains("damaged"), "{error}");
}

/// Numbers of a dictionary are read from Parquet files, whose schema says nothing of it, but not from Arrow files.
#[test]
fn numbers_of_a_dictionary_are_named() {
    let reader = open_as("arrow", &["codes.arrow"], &settings()).unwrap();
    assert_eq!((reader.columns().len(), reader.unread().len(), &reader.unread()[0].name[..]), (0, 1, "code"));
}

/// Every bit of a page counts if it has a checksum.
#[test]
fn checksums_of_pages_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["checksums_1.parquet", "checksums_2.parquet"] {
        let bytes = std::fs::read(path(name)).unwrap();
        let file = ParquetFile::open(DataFile::at(&path(name)).unwrap().contents(&settings()).unwrap()).unwrap();
        for chunk in file.metadata.row_group(0).columns() {
            // The last page ends where its column does.
            let (start, len) = chunk.byte_range();
            let end = (start + len) as usize;
            for at in end - 40..end {
                let mut damaged = bytes.clone();
                damaged[at] ^= 0x10;
                let place = dir.path().join(name);
                std::fs::write(&place, damaged).unwrap();
                let reader = open_file("parquet", &place, &settings()).unwrap();
                let error = reader.read(0, &mut Record::new()).unwrap_err().to_string();
                assert!(error.contains("CRC") && error.contains(&format!("{name}, byte ")), "{error}");
            }
        }
    }
}

#[test]
fn an_empty_table_has_columns_and_no_rows() {
    let reader = open_as("parquet", &["empty.parquet"], &settings()).unwrap();
    assert_eq!((reader.columns().len(), reader.len()), (1, 0));
}

#[test]
fn files_are_told_by_their_first_bytes() {
    let dir = tempfile::tempdir().unwrap();
    for (name, format) in [("table_none.parquet", "parquet"), ("table.arrow", "arrow"), ("table.arrows", "arrow")] {
        let copy = dir.path().join("data");
        std::fs::copy(path(name), &copy).unwrap();
        assert_eq!(choose(&[DataFile::at(&copy).unwrap()], &settings()).unwrap().name, format);
    }
}

#[test]
fn a_file_that_is_cut_or_is_none_names_itself() {
    let dir = tempfile::tempdir().unwrap();
    for (format, name) in [("parquet", "table_snappy.parquet"), ("arrow", "table.arrow")] {
        let bytes = std::fs::read(path(name)).unwrap();
        for end in [0, 3, 4, 8, 100, bytes.len() / 2, bytes.len() - 1] {
            let cut = dir.path().join("cut");
            std::fs::write(&cut, &bytes[..end]).unwrap();
            let error = (named(format).unwrap().open)(&[DataFile::at(&cut).unwrap()], &settings()).unwrap_err();
            assert!(error.to_string().contains("cut"), "{format} of {end} bytes: {error}");
        }
    }
}

/// Writes a file with a column of these values.
fn byte_arrays(path: &Path, column: &str, values: &[ByteArray], properties: WriterPropertiesBuilder) {
    let schema = Arc::new(parse_message_type(&format!("message m {{ required binary {column}; }}")).unwrap());
    let out = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(out, schema, Arc::new(properties.build())).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(values, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
}

/// A file with the same text in every row.
fn equal_texts(path: &Path, text: &str, rows: usize, properties: WriterPropertiesBuilder) -> ParquetFile {
    let texts = vec![ByteArray::from(text.as_bytes().to_vec()); rows];
    byte_arrays(path, "x (STRING)", &texts, properties);
    ParquetFile::open(DataFile::at(path).unwrap().contents(&settings()).unwrap()).unwrap()
}

#[test]
fn rows_that_share_a_long_text_are_few_in_a_block() {
    const TEXT_BYTES: usize = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let text = "x".repeat(TEXT_BYTES);
    let dictionary = WriterProperties::builder().set_dictionary_page_size_limit(4 * TEXT_BYTES);
    let file = equal_texts(&dir.path().join("words.parquet"), &text, 64, dictionary);
    assert!(file.chunks.0.bytes() < 4 * TEXT_BYTES as u64);
    let columns = TableColumns::of_schema(&file.schema);
    let reader = reader(vec![file], columns, DECODED_BYTES_MAX).unwrap();
    assert!(read_all(&reader).into_iter().all(|read| read == Ok(RecordValue::Text(text.clone()))));
    let blocks = reader.units.block_bytes(0).unwrap();
    assert!(
        blocks.len() >= 13 && blocks.iter().all(|bytes| *bytes < BATCH_BYTES + 2 * TEXT_BYTES as u64),
        "{blocks:?}"
    );
}

#[test]
fn texts_that_repeat_the_one_before_are_decoded_a_few_at_a_time() {
    const TEXT_BYTES: usize = 1 << 18;
    let dir = tempfile::tempdir().unwrap();
    let text = "x".repeat(TEXT_BYTES);
    let repeated = WriterProperties::builder().set_dictionary_enabled(false).set_encoding(Encoding::DELTA_BYTE_ARRAY);
    let file = equal_texts(&dir.path().join("texts.parquet"), &text, 4096, repeated);
    assert!(file.chunks.0.bytes() < 2 * TEXT_BYTES as u64);
    let columns = TableColumns::of_schema(&file.schema);
    let mut batch_rows = 0;
    let look = &mut |batch: &[Column]| {
        batch_rows = batch[0].len;
        assert!((0..batch_rows).all(|row| values::text(&batch[0], row) == Some(text.as_str())));
        Ok(false)
    };
    file.batches(0, &columns, look).unwrap();
    assert!((1..=16 * BATCH_BYTES as usize / TEXT_BYTES).contains(&batch_rows), "{batch_rows} rows");
}
