use super::*;
use crate::formats::testing::open_stream;
use crate::image;
use crate::record::{RecordKind, RecordValue};
use kolo_base::masked_crc32c;
use kolo_graph::rng::Stream;
use kolo_graph::settings::Setting;
use std::fs;
use std::path::PathBuf;

fn written() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/files/packed/records")
}

/// A copy of what Python wrote, as an index is written beside it.
fn copied() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(written()).unwrap().flatten() {
        fs::copy(entry.path(), directory.path().join(entry.file_name())).unwrap();
    }
    directory
}

fn settings() -> Settings {
    Settings::new("data", "job.toml:1")
}

fn open_path(path: &Path) -> OpenedFiles {
    open(&[DataFile::at(path).unwrap()], &settings())
}

fn open_bytes(bytes: &[u8]) -> OpenedFiles {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.tfrecord");
    fs::write(&path, bytes).unwrap();
    let file = DataFile::at(&path).unwrap();
    let opened = open(std::slice::from_ref(&file), &settings());
    // It reads on, from the handle that it opened first or from a file that is gone.
    if let Ok(reader) = &opened {
        for at in 0..reader.len() {
            let _ = reader.read(at, &mut Record::new());
        }
    }
    opened
}

/// A file with these records.
fn framed(records: &[Vec<u8>]) -> Vec<u8> {
    let mut file = Vec::new();
    for record in records {
        let length = (record.len() as u64).to_le_bytes();
        file.extend(length);
        file.extend(masked_crc32c(&length).to_le_bytes());
        file.extend(record);
        file.extend(masked_crc32c(record).to_le_bytes());
    }
    file
}

fn read_error(opened: OpenedFiles) -> ReadError {
    match opened {
        Err(OpenError::Read(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn records_of_python_are_read_however_they_are_packed() {
    let directory = copied();
    for name in ["train.tfrecord", "train-00000-of-00002", "train.tfrecord.gz", "zlib.tfrecord"] {
        let path = directory.path().join(name);
        // The second time from the index.
        for _ in 0..2 {
            let reader = open_path(&path).unwrap();
            check(&*reader);
        }
        assert!(directory.path().join(format!("{name}.kolo-index")).exists());
    }
}

fn check(reader: &dyn Reader) {
    let columns: Vec<_> = reader.columns().iter().map(|column| (column.name.as_str(), column.kind.clone())).collect();
    // `boxes` has another length in every record, so it is no column.
    let unread = UnreadColumn { name: "boxes".into(), kind: "lists of different lengths".into() };
    assert_eq!(reader.unread(), [unread]);
    assert_eq!(
        columns,
        [
            ("blob", RecordKind::Bytes),
            ("image/class/label", RecordKind::Int { shape: vec![], classes: None }),
            ("image/class/text", RecordKind::Text),
            ("image/encoded", RecordKind::Image),
            ("vector", RecordKind::Real { shape: vec![3] }),
        ]
    );
    assert_eq!(reader.len(), 5);
    let mut record = Record::new();
    let mut pixels = image::Pixels::default();
    for at in [4, 0, 3, 1, 2] {
        reader.read(at, &mut record).unwrap();
        assert_eq!(record.value(0), &RecordValue::Bytes(vec![0, at as u8, 255]));
        assert_eq!(record.value(1), &RecordValue::Ints(vec![at as i64 * 1000 - 1]));
        let text = RecordValue::Text(format!("Klasse {at} ÿ"));
        assert_eq!(record.value(2), if at == 3 { &RecordValue::Missing } else { &text });
        let RecordValue::Bytes(encoded) = record.value(3) else { panic!("{record:?}") };
        image::decode(encoded, &mut pixels).unwrap();
        assert_eq!((pixels.channels, pixels.height, pixels.width), (3, 12, 16));
        assert_eq!(record.value(4), &RecordValue::Reals(vec![at as f32 + 0.5, -1.0, 1e-3]));
    }
}

#[test]
fn several_files_and_directories_are_one() {
    let directory = copied();
    fs::write(directory.path().join("notes.txt"), "not a record").unwrap();
    let reader = open_path(directory.path()).unwrap();
    assert_eq!(reader.len(), 20);
    let mut record = Record::new();
    for at in 0..20 {
        reader.read(at, &mut record).unwrap();
        assert_eq!(record.value(0), &RecordValue::Bytes(vec![0, (at % 5) as u8, 255]));
    }
}

#[test]
fn a_file_is_told_by_its_first_bytes_and_its_name() {
    let data = fs::read(written().join("train.tfrecord")).unwrap();
    assert!(sniff(Path::new("train-00000-of-00002"), &data[..512]));
    assert!(!sniff(Path::new("train-00000-of-00002"), &data[1..512]));
    assert!(sniff(&written(), b""));
    for (name, is) in [("a.tfrecords", true), ("x-00001-of-00010", true), ("x-1-of-2", false), ("a.tfrecord.gz", true)]
    {
        assert_eq!(is_shard(Path::new(name)), is, "{name}");
    }
}

#[test]
fn a_file_cut_anywhere_is_an_error_with_its_offset() {
    let data = fs::read(written().join("train.tfrecord")).unwrap();
    let places = places(&index(&contents(&data)).unwrap(), data.len() as u64).unwrap();
    let ends: Vec<u64> = places.iter().map(|(start, length)| start + u64::from(*length) + FOOTER_BYTES).collect();
    for length in (0..data.len()).step_by(3).chain(ends.iter().map(|end| *end as usize)) {
        if length == 0 || ends.contains(&(length as u64)) {
            continue;
        }
        let error = read_error(open_bytes(&data[..length]));
        let whole = ends.iter().rfind(|end| **end <= length as u64).copied().unwrap_or(0);
        assert!(error.offset.is_some_and(|at| at == whole || at == whole + HEADER_BYTES), "{length}: {error}");
        assert!(error.file.is_some());
    }
    assert!(read_error(open_bytes(b"")).message.contains("no record"));
}

fn contents(data: &[u8]) -> Contents {
    let mut file = tempfile::tempfile().unwrap();
    io::Write::write_all(&mut file, data).unwrap();
    Contents::made(Path::new("a.tfrecord"), file).unwrap()
}

#[test]
fn a_flipped_bit_is_noticed_wherever_it_is() {
    let data = fs::read(written().join("train.tfrecord")).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.tfrecord");
    let mut record = Record::new();
    for at in (0..data.len() * 8).step_by(61) {
        let mut damaged = data.clone();
        damaged[at / 8] ^= 1 << (at % 8);
        fs::write(&path, &damaged).unwrap();
        let noticed = match open_path(&path) {
            Err(OpenError::Read(error)) => error,
            Err(error) => panic!("{error}"),
            Ok(reader) => (0..reader.len()).find_map(|at| reader.read(at, &mut record).err()).unwrap(),
        };
        assert!(noticed.offset.is_some_and(|offset| offset <= at as u64 / 8), "bit {at}: {noticed}");
    }
}

#[test]
fn hostile_lengths_take_no_memory() {
    for length in [u64::MAX, 1 << 40, RECORD_BYTES_MAX + 1, RECORD_BYTES_MAX, 1000] {
        let mut file = length.to_le_bytes().to_vec();
        file.extend(masked_crc32c(&length.to_le_bytes()).to_le_bytes());
        file.extend([0; 100]);
        let error = read_error(open_bytes(&file));
        assert!(error.offset.is_some_and(|at| at <= HEADER_BYTES), "{error}");
    }
    // A bomb: a megabyte of zeros a thousand times.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.tfrecord.gz");
    let mut bomb = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    io::copy(&mut io::repeat(0).take(10 << 20), &mut bomb).unwrap();
    fs::write(&path, bomb.finish().unwrap()).unwrap();
    let mut settings = settings();
    settings.set("unpacked_max", "job.toml:3", Setting::Int(1 << 20));
    let error = read_error(open(&[DataFile::at(&path).unwrap()], &settings));
    assert!(error.message.contains("unpacks to more than 1048576 bytes"), "{error}");
}

#[test]
fn what_is_no_example_is_an_error_and_never_a_panic() {
    let data = fs::read(written().join("train.tfrecord")).unwrap();
    let places = places(&index(&contents(&data)).unwrap(), data.len() as u64).unwrap();
    let (start, length) = places[0];
    let first = data[start as usize..][..length as usize].to_vec();
    let stream = Stream::new(3, "records");
    let mut malformed = 0;
    for trial in 0..3000 {
        let mut record = first.clone();
        // Most of the structure is at the end, after the bytes of the image.
        for flip in 0..1 + stream.below(trial, 0, 3) {
            let at = stream.below(trial, 1 + 2 * flip, record.len() as u64) as usize;
            record[at] = stream.bits(trial, 2 + 2 * flip) as u8;
        }
        record.truncate(record.len() - stream.below(trial, 99, 20) as usize);
        let mut found = columns::Found::default();
        malformed += usize::from(found.add(&record).is_err());
        if trial % 50 == 0 {
            let _ = open_bytes(&framed(&[first.clone(), record]));
        }
    }
    assert!(malformed > 300, "{malformed}");
    let error = read_error(open_bytes(&framed(&[b"\x0a\x05hello, this is text".to_vec()])));
    assert!(error.message.contains("not a `tf.train.Example`"), "{error}");
}

#[test]
fn packed_and_single_values_are_the_same() {
    let (mut ints, mut reals) = (Vec::new(), Vec::new());
    let list = |tag: u8, values: &[u8]| wrap(tag, values.to_vec());
    example::ints_of(&list(0x1a, b"\x0a\x03\x01\xac\x02\x08\x07"), &mut ints).unwrap();
    example::ints_of(&list(0x1a, b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), &mut ints).unwrap();
    assert_eq!(ints, [1, 300, 7, -1]);
    example::floats_of(&list(0x12, b"\x0a\x08\0\0\x80\x3f\0\0\0\x40\x0d\0\0\x40\x40"), &mut reals).unwrap();
    assert_eq!(reals, [1.0, 2.0, 3.0]);
    assert!(example::floats_of(&list(0x12, b"\x0a\x07\0\0\x80\x3f\0\0\0"), &mut reals).is_err());
    assert!(example::ints_of(&list(0x1a, b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), &mut ints).is_err());
}

/// Lists of one type in a feature are one list, and of two types the last one counts, as libraries of protocol buffers read them.
#[test]
fn lists_of_a_feature_are_merged() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.tfrecord");
    let ints = |value: u8| wrap(0x1a, vec![0x0a, 1, value]);
    let text = |text: &str| wrap(0x0a, wrap(0x0a, text.into()));
    for (feature, expected) in [
        ([ints(1), ints(2)].concat(), RecordValue::Ints(vec![1, 2])),
        ([ints(1), text("a"), ints(2)].concat(), RecordValue::Ints(vec![2])),
        ([ints(1), text("a")].concat(), RecordValue::Text("a".into())),
    ] {
        fs::write(&path, framed(&[example_of(feature)])).unwrap();
        let (reader, mut record) = (open_path(&path).unwrap(), Record::new());
        reader.read(0, &mut record).unwrap();
        assert_eq!(record.value(0), &expected);
    }
}

/// A message in a field.
fn wrap(tag: u8, inner: Vec<u8>) -> Vec<u8> {
    let length = match inner.len() {
        len @ ..0x80 => vec![len as u8],
        len => vec![0x80 | (len & 0x7f) as u8, (len >> 7) as u8],
    };
    [vec![tag], length, inner].concat()
}

/// `{"a": feature}`.
fn example_of(feature: Vec<u8>) -> Vec<u8> {
    wrap(0x0a, wrap(0x0a, [b"\x0a\x01a".to_vec(), wrap(0x12, feature)].concat()))
}

/// `{"a": ints}` with so many numbers.
fn example(count: u8) -> Vec<u8> {
    let list: Vec<u8> = std::iter::once(0x0a).chain([count]).chain((0..count).map(|at| at + 5)).collect();
    example_of(wrap(0x1a, list))
}

/// Opens the file as it is, and as a stream.
fn opened_both_ways(path: &Path) -> [OpenedFiles; 2] {
    [open_path(path), open_stream(path, &[])]
}

#[test]
fn bad_records_at_the_start_are_errors_of_their_own() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.tfrecord");
    let wrong_checksum = |records: &[Vec<u8>], at: usize| {
        let mut file = framed(records);
        let end = framed(&records[..=at]).len();
        file[end - 1] ^= 1;
        file
    };
    let good: Vec<_> = (0..20).map(|_| example(1)).collect();
    for at in [0, 3, LOOKED_AT] {
        let mut malformed = good.clone();
        malformed[at] = b"\x0a\x05hello".to_vec();
        for (bytes, message) in
            [(framed(&malformed), "not a `tf.train.Example`"), (wrong_checksum(&good, at), "the checksum of a record")]
        {
            fs::write(&path, bytes).unwrap();
            for reader in opened_both_ways(&path) {
                let (reader, mut record) = (reader.unwrap(), Record::new());
                assert_eq!(reader.columns()[0].kind, RecordKind::Int { shape: vec![], classes: None });
                for number in 0..20 {
                    match reader.read(number, &mut record) {
                        Ok(()) => assert!(number != at && *record.value(0) == RecordValue::Ints(vec![5])),
                        Err(error) => {
                            assert!(number == at && error.message.contains(message), "{error}");
                            assert!(error.file.is_some() && error.offset.is_some(), "{error}");
                        }
                    }
                }
            }
        }
    }
    // With no good one there is nothing to go by.
    fs::write(&path, wrong_checksum(&good[..1], 0)).unwrap();
    for reader in opened_both_ways(&path) {
        let Err(OpenError::Read(error)) = reader else { panic!("{reader:?}") };
        assert!(error.message.contains("the checksum of a record") && error.offset == Some(12), "{error}");
    }
}

#[test]
fn sequences_of_one_length_are_columns_and_others_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.tfrecord");
    let entry =
        |name: &str, value: Vec<u8>| wrap(0x0a, [wrap(0x0a, name.as_bytes().to_vec()), wrap(0x12, value)].concat());
    let ints = |values: &[u8]| wrap(0x1a, wrap(0x0a, values.to_vec()));
    let floats = |values: &[f32]| {
        let packed: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        wrap(0x12, wrap(0x0a, packed))
    };
    let text = |text: &str| wrap(0x0a, wrap(0x0a, text.as_bytes().to_vec()));
    let steps = |steps: Vec<Vec<u8>>| steps.into_iter().flat_map(|step| wrap(0x0a, step)).collect::<Vec<u8>>();
    // The context, then the sequences.
    let record = |label: u8, frames: usize, words: usize| {
        let frames = (0..frames).map(|at| floats(&[at as f32, 0.5])).collect();
        let tokens = vec![ints(&[label]), ints(&[7]), ints(&[9])];
        let words = (0..words).map(|_| text("word")).collect();
        let lists = [
            entry("frames", steps(frames)),
            entry("tokens", steps(tokens)),
            entry("ragged", steps((0..usize::from(label)).map(|_| ints(&[1])).collect())),
            entry("words", steps(words)),
        ];
        [wrap(0x0a, entry("label", ints(&[label]))), wrap(0x12, lists.concat())].concat()
    };
    let written = |records: &[Vec<u8>]| fs::write(&path, framed(records));
    written(&[record(1, 2, 1), record(2, 2, 2), record(3, 2, 0)]).unwrap();
    for reader in opened_both_ways(&path).map(Result::unwrap) {
        let columns: Vec<_> = reader.columns().iter().map(|column| (&column.name[..], column.kind.clone())).collect();
        let int = |shape: &[usize]| RecordKind::Int { shape: shape.to_vec(), classes: None };
        let frames = RecordKind::Real { shape: vec![2, 2] };
        assert_eq!(columns, [("frames", frames), ("label", int(&[])), ("tokens", int(&[3]))]);
        let unread: Vec<_> = reader.unread().iter().map(|column| (&column.name[..], &column.kind[..])).collect();
        assert_eq!(unread, [("ragged", "lists of different lengths"), ("words", "lists of texts or bytes")]);
        let mut values = Record::new();
        reader.read(1, &mut values).unwrap();
        assert_eq!(values.value(0), &RecordValue::Reals(vec![0.0, 0.5, 1.0, 0.5]));
        assert_eq!(values.value(1), &RecordValue::Ints(vec![2]));
        assert_eq!(values.value(2), &RecordValue::Ints(vec![2, 7, 9]));
    }
    // Behind the records that the columns are told from, another length is an error of its record.
    let mut records: Vec<_> = (0..LOOKED_AT).map(|_| record(1, 2, 0)).collect();
    records.push(record(1, 3, 0));
    written(&records).unwrap();
    let reader = open_path(&path).unwrap();
    let error = reader.read(LOOKED_AT, &mut Record::new()).unwrap_err();
    assert!(error.message.contains("\"frames\" has 3 steps of 2 values instead of 2 steps of 2 values"), "{error}");
    // An empty sequence is a missing value.
    *records.last_mut().unwrap() = record(1, 0, 0);
    written(&records).unwrap();
    let (reader, mut values) = (open_path(&path).unwrap(), Record::new());
    reader.read(LOOKED_AT, &mut values).unwrap();
    assert_eq!(values.value(0), &RecordValue::Missing);
}

#[test]
fn features_that_are_no_columns_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.tfrecord");
    let named = |name: &str, feature: Vec<u8>| {
        let name = wrap(0x0a, name.as_bytes().to_vec());
        wrap(0x0a, wrap(0x0a, [name, wrap(0x12, feature)].concat()))
    };
    let ints = |values: &[u8]| wrap(0x1a, wrap(0x0a, values.to_vec()));
    let texts = |texts: &[&str]| wrap(0x0a, texts.iter().flat_map(|text| wrap(0x0a, text.as_bytes().into())).collect());
    // A message again and again is the two merged.
    let record = |lists: [Vec<u8>; 3]| {
        let [a, b, c] = lists;
        [named("good", ints(&[1])), named("a", a), named("b", b), named("c", c)].concat()
    };
    let records =
        [record([ints(&[1, 2]), texts(&["u", "v"]), ints(&[1])]), record([ints(&[1]), texts(&["u"]), texts(&["w"])])];
    fs::write(&path, framed(&records)).unwrap();
    for reader in opened_both_ways(&path) {
        let reader = reader.unwrap();
        assert_eq!((reader.columns().len(), reader.columns()[0].name.as_str()), (1, "good"));
        let unread: Vec<_> = reader.unread().iter().map(|column| (&column.name[..], &column.kind[..])).collect();
        let expected =
            [("a", "lists of different lengths"), ("b", "lists of texts or bytes"), ("c", "values of several types")];
        assert_eq!(unread, expected);
    }
    fs::write(&path, framed(&[named("b", texts(&["u", "v"]))])).unwrap();
    for reader in opened_both_ways(&path) {
        let error = read_error(reader);
        assert_eq!(error.message, "none of its features is read: \"b\" has lists of texts or bytes");
    }
}

#[test]
fn a_record_of_another_shape_is_an_error_at_its_place() {
    let records: Vec<_> = (0..LOOKED_AT + 2).map(|at| example(if at == LOOKED_AT { 2 } else { 1 })).collect();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.tfrecord");
    fs::write(&path, framed(&records)).unwrap();
    let reader = open_path(&path).unwrap();
    let mut record = Record::new();
    let error = reader.read(LOOKED_AT, &mut record).unwrap_err();
    assert!(error.message.contains("\"a\" has 2 values instead of 1"), "{error}");
    assert_eq!(error.offset, Some(LOOKED_AT as u64 * (records[0].len() as u64 + 16) + 12));
    reader.read(LOOKED_AT + 1, &mut record).unwrap();
    assert_eq!(record.value(0), &RecordValue::Ints(vec![5]));
}
