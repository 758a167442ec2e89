use super::*;
use crate::format::OpenError;
use crate::image;
use crate::record::{RecordKind, RecordValue};
use kolo_graph::rng::Stream;
use std::fs;
use std::path::PathBuf;

fn written() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/files/packed/shards")
}

/// A copy of what Python wrote, as an index is written beside it.
fn copied(names: &[&str]) -> (tempfile::TempDir, Vec<DataFile>) {
    let directory = tempfile::tempdir().unwrap();
    let copy = |name: &&str| {
        let path = directory.path().join(name);
        fs::copy(written().join(name), &path).unwrap();
        DataFile::at(&path).unwrap()
    };
    let files = names.iter().map(copy).collect();
    (directory, files)
}

fn settings() -> Settings {
    Settings::new("data", "job.toml:1")
}

fn open_bytes(directory: &Path, bytes: &[u8]) -> OpenedFiles {
    let path = directory.join("a.tar");
    fs::write(&path, bytes).unwrap();
    let opened = open(&[DataFile::at(&path).unwrap()], &settings());
    if let Ok(reader) = &opened {
        for at in 0..reader.len() {
            let _ = reader.read(at, &mut Record::new());
        }
    }
    opened
}

fn read_error(opened: OpenedFiles) -> ReadError {
    match opened {
        Err(OpenError::Read(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// An archive of members with these names and contents.
fn archive(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, data) in members {
        bytes.extend(header(name, data.len() as u64, b'0'));
        bytes.extend(*data);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
    }
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

fn header(name: &str, bytes: u64, kind: u8) -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[124..136].copy_from_slice(format!("{bytes:011o} ").as_bytes());
    header[156] = kind;
    header[257..265].copy_from_slice(b"ustar\x0000");
    seal(&mut header);
    header
}

fn seal(header: &mut [u8]) {
    header[148..156].fill(b' ');
    let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

#[test]
fn shards_of_the_webdataset_library_are_read() {
    let (directory, files) = copied(&["a-000000.tar", "a-000001.tar"]);
    for _ in 0..2 {
        check(&*open(&files, &settings()).unwrap(), &[0, 1, 2, 3, 4, 5, 6]);
    }
    assert!(directory.path().join("a-000001.tar.kolo-index").exists());
    let whole = DataFile::at(directory.path()).unwrap();
    assert!(sniff(&whole.path, b""));
    check(&*open(&[whole], &settings()).unwrap(), &[0, 1, 2, 3, 4, 5, 6]);
    let range = directory.path().join("a-{000000..000001}.tar");
    let listed = crate::files::list(range.to_str().unwrap(), &settings(), "source").unwrap();
    assert_eq!(listed.files, files);
    let absent = directory.path().join("a-{000000..000002}.tar");
    let error = crate::files::list(absent.to_str().unwrap(), &settings(), "source").unwrap_err().to_string();
    assert!(error.contains("a-000002.tar\", but there is no such file"), "{error}");
    let (_directory, packed) = copied(&["b.tar.gz"]);
    check(&*open(&packed, &settings()).unwrap(), &[4, 5, 6]);
}

fn check(reader: &dyn Reader, numbers: &[i64]) {
    let columns: Vec<_> = reader.columns().iter().map(|column| (column.name.as_str(), column.kind.clone())).collect();
    let int = RecordKind::Int { shape: vec![], classes: None };
    assert_eq!(
        columns,
        [
            ("blob", RecordKind::Bytes),
            ("cls", int.clone()),
            ("image", RecordKind::Image),
            ("json.id", int),
            ("json.name", RecordKind::Text),
            ("json.score", RecordKind::Real { shape: vec![] }),
            ("txt", RecordKind::Text),
            ("vector.npy", RecordKind::Real { shape: vec![3] }),
        ]
    );
    assert_eq!(reader.len(), numbers.len());
    let mut record = Record::new();
    let mut pixels = image::Pixels::default();
    for at in (0..numbers.len()).rev() {
        let number = numbers[at];
        reader.read(at, &mut record).unwrap();
        assert_eq!(record.value(0), &RecordValue::Bytes(vec![number as u8, 255, 0]));
        assert_eq!(record.value(1), &RecordValue::Ints(vec![number % 3]));
        let RecordValue::Bytes(encoded) = record.value(2) else { panic!("{record:?}") };
        image::decode(encoded, &mut pixels).unwrap();
        assert_eq!((pixels.channels, pixels.height, pixels.width), (3, 12, 16));
        assert_eq!(record.value(3), &RecordValue::Ints(vec![100 + number]));
        assert_eq!(record.value(4), &RecordValue::Text(format!("n{number}")));
        let score = if number % 2 == 1 { number as f32 } else { number as f32 / 2.0 + 0.25 };
        assert_eq!(record.value(5), &RecordValue::Reals(vec![score]));
        assert_eq!(record.value(6), &RecordValue::Text(format!("Bild Nr. {number} ÿ")));
        assert_eq!(record.value(7), &RecordValue::Reals((0..3).map(|it| (it + number) as f32).collect()));
    }
}

#[test]
fn long_names_and_other_members_are_understood() {
    for name in ["pax.tar", "gnu.tar"] {
        let (_directory, files) = copied(&[name]);
        let reader = open(&files, &settings()).unwrap();
        let columns: Vec<_> = reader.columns().iter().map(|column| column.name.as_str()).collect();
        assert_eq!((columns, reader.len()), (vec!["image", "cls"], 2), "{name}");
        let mut record = Record::new();
        for (at, class, magic) in [(0, 41, &b"\x89PNG"[..]), (1, -1, b"\xff\xd8")] {
            reader.read(at, &mut record).unwrap();
            assert_eq!(record.value(1), &RecordValue::Ints(vec![class]));
            assert!(matches!(record.value(0), RecordValue::Bytes(bytes) if bytes.starts_with(magic)));
        }
    }
}

#[test]
fn two_images_of_a_sample_are_two_columns_and_what_is_missing_is_missing() {
    let directory = tempfile::tempdir().unwrap();
    let members: &[(&str, &[u8])] =
        &[("a.jpg", b"1"), ("a.png", b"2"), ("b.jpg", b"3"), ("b.json", b"[1]"), ("c.npy", b"no array")];
    let reader = open_bytes(directory.path(), &archive(members)).unwrap();
    let kinds: Vec<_> = reader.columns().iter().map(|column| (column.name.as_str(), &column.kind)).collect();
    let (image, text, bytes) = (&RecordKind::Image, &RecordKind::Text, &RecordKind::Bytes);
    assert_eq!(kinds, [("jpg", image), ("png", image), ("json", text), ("npy", bytes)]);
    let mut record = Record::new();
    let is_missing = |record: &Record| (0..4).map(|at| record.value(at) == &RecordValue::Missing).collect::<Vec<_>>();
    for (at, missing) in
        [(0, [false, false, true, true]), (1, [false, true, false, true]), (2, [true, true, true, false])]
    {
        reader.read(at, &mut record).unwrap();
        assert_eq!(is_missing(&record), missing);
    }
}

#[test]
fn names_that_lead_out_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["../a.jpg", "/etc/a.jpg", "a/../../b.jpg", "a/.."] {
        let error = read_error(open_bytes(directory.path(), &archive(&[("x.jpg", b"1"), (name, b"2")])));
        assert!(error.message.contains("outside of its archive"), "{error}");
        assert_eq!((error.offset, error.file.is_some()), (Some(1024), true));
    }
    assert!(open_bytes(directory.path(), &archive(&[("./a..b.jpg", b"1"), ("./...jpg", b"2")])).is_ok());
}

#[test]
fn a_bad_value_is_an_error_of_its_sample_only() {
    let directory = tempfile::tempdir().unwrap();
    let good: &[(&str, &[u8])] = &[("a.cls", b"1"), ("a.json", b"{\"k\": 1}"), ("a.txt", b"x")];
    for (name, bad) in [("cls", &b"one"[..]), ("json", b"{\"k\": \"s\"}"), ("json", b"{"), ("txt", b"\xff")] {
        let mut members = good.to_vec();
        // Enough samples that the columns are told from others.
        let names: Vec<String> = (0..LOOKED_AT).map(|at| format!("{at}.{name}")).collect();
        let value = good.iter().find(|(full, _)| full.ends_with(name)).unwrap().1;
        members.extend(names.iter().map(|name| (name.as_str(), value)));
        let damaged = format!("z.{name}");
        members.push((&damaged, bad));
        members.push(("zz.cls", b"2"));
        let bytes = archive(&members);
        let reader = open_bytes(directory.path(), &bytes).unwrap();
        let mut record = Record::new();
        let errors: Vec<_> =
            (0..reader.len()).filter_map(|at| Some((at, reader.read(at, &mut record).err()?))).collect();
        let [(at, error)] = &errors[..] else { panic!("{name}: {errors:?}") };
        assert_eq!(*at, LOOKED_AT + 1);
        let offset = error.offset.unwrap() as usize;
        assert_eq!(&bytes[offset..offset + bad.len()], bad);
    }
}

#[test]
fn members_that_do_not_parse_do_not_say_what_the_columns_are() {
    let array = b"\x93NUMPY\x01\x00\x37\x00{'descr': '<i2', 'fortran_order': False, 'shape': (1,)}\x03\x00";
    let directory = tempfile::tempdir().unwrap();
    for (ending, good, bad, kind) in [
        ("json", &b"{\"k\": 1}"[..], &b"{\"k\": "[..], RecordKind::Int { shape: vec![], classes: None }),
        ("json", b"{\"k\": \"s\"}", b"[1]", RecordKind::Text),
        ("npy", array, &array[..60], RecordKind::Int { shape: vec![1], classes: None }),
    ] {
        for bad_at in [0, 3, LOOKED_AT - 1] {
            let names: Vec<String> = (0..LOOKED_AT + 2).map(|at| format!("{at}.{ending}")).collect();
            let member = |at: usize| if at == bad_at { bad } else { good };
            let members: Vec<_> = names.iter().enumerate().map(|(at, name)| (name.as_str(), member(at))).collect();
            let reader = open_bytes(directory.path(), &archive(&members)).unwrap();
            assert_eq!(reader.columns().len(), 1);
            assert_eq!(reader.columns()[0].kind, kind);
            let mut record = Record::new();
            let errors: Vec<_> = (0..reader.len()).filter(|at| reader.read(*at, &mut record).is_err()).collect();
            assert_eq!(errors, [bad_at], "{ending}");
        }
    }
}

#[test]
fn keys_that_are_no_columns_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.tar");
    let members: &[(&str, &[u8])] = &[
        ("a.json", b"{\"n\": 1, \"box\": [1], \"meta\": {}, \"odd\": 1, \"real\": 1, \"flag\": true}"),
        ("b.json", b"{\"n\": null, \"box\": [1, 2], \"meta\": {}, \"odd\": \"s\", \"real\": 1.5, \"flag\": 2}"),
    ];
    fs::write(&path, archive(members)).unwrap();
    let random = open(&[DataFile::at(&path).unwrap()], &settings()).unwrap();
    for reader in [random, crate::formats::testing::open_stream(&path, &[]).unwrap()] {
        let names: Vec<_> = reader.columns().iter().map(|column| &column.name[..]).collect();
        assert_eq!(names, ["json.flag", "json.n", "json.real"]);
        let unread: Vec<_> = reader.unread().iter().map(|column| (&column.name[..], &column.kind[..])).collect();
        let expected = [("json.box", "list"), ("json.meta", "object"), ("json.odd", "values of several types")];
        assert_eq!(unread, expected);
    }
}

#[test]
fn an_archive_cut_anywhere_is_an_error_with_its_offset() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = fs::read(written().join("pax.tar")).unwrap();
    let used = 512 * bytes.chunks(512).rposition(|block| block.iter().any(|byte| *byte != 0)).unwrap() + 512;
    for length in (0..used + 500).step_by(97) {
        let error = read_error(open_bytes(directory.path(), &bytes[..length]));
        assert!(error.offset.is_some_and(|at| at <= (length as u64).next_multiple_of(512)), "{length}: {error}");
    }
    assert!(open_bytes(directory.path(), &bytes[..used + 512]).is_ok());
}

#[test]
fn hostile_headers_are_errors() {
    let directory = tempfile::tempdir().unwrap();
    let wrong = |change: &dyn Fn(&mut [u8])| {
        let mut bytes = archive(&[("a.jpg", b"1")]);
        change(&mut bytes[..512]);
        seal(&mut bytes[..512]);
        read_error(open_bytes(directory.path(), &bytes))
    };
    // Sizes beyond the file, in octal and in base 256.
    assert!(wrong(&|header| header[124..136].copy_from_slice(b"77777777777\0")).message.contains("the file ends"));
    assert!(wrong(&|header| header[124..136].fill(0xff)).message.contains("is malformed"));
    let huge = |header: &mut [u8]| {
        header[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
    };
    assert!(wrong(&huge).message.contains("the file ends"));
    assert!(wrong(&|header| header[124..136].copy_from_slice(b"-1234567890\0")).message.contains("is malformed"));
    // A long name, an extended header and a list of holes that never end.
    for kind in [b'L', b'x'] {
        let error = wrong(&|header: &mut [u8]| {
            header[156] = kind;
            header[124..136].copy_from_slice(b"00007777777\0");
        });
        assert!(error.offset.is_some(), "{error}");
    }
    let mut bytes = header("a.jpg", 512, b'S');
    bytes[482] = 1;
    seal(&mut bytes);
    bytes.extend([1; 2048]);
    assert!(read_error(open_bytes(directory.path(), &bytes)).message.contains("the file ends"));
    for pax in ["5 a\n", "999 path=x\n", "8 path=\n", "x", "12 size=-1\n\n", "9 size=z\n"] {
        let mut bytes = header("pax", pax.len() as u64, b'x');
        bytes.extend(pax.as_bytes());
        bytes.resize(1024, 0);
        bytes.extend(archive(&[("a.jpg", b"1")]));
        let opened = open_bytes(directory.path(), &bytes);
        assert!(pax.starts_with('8') || opened.is_err(), "{pax:?}");
    }
    let twice = archive(&[("a.jpg", b"1"), ("a.JPG", b"2")]);
    assert!(read_error(open_bytes(directory.path(), &twice)).message.contains("second member"));
    assert!(read_error(open_bytes(directory.path(), &archive(&[("README", b"1")]))).message.contains("no sample"));
    assert!(read_error(open_bytes(directory.path(), &[7; 2000])).message.contains("not a tar archive"));
}

#[test]
fn damaged_archives_end_in_an_error_or_samples() {
    let directory = tempfile::tempdir().unwrap();
    let stream = Stream::new(5, "shards");
    for name in ["pax.tar", "gnu.tar", "a-000000.tar"] {
        let whole = fs::read(written().join(name)).unwrap();
        for trial in 0..150 {
            let mut bytes = whole.clone();
            let block = stream.below(trial, 0, bytes.len() as u64 / 512) as usize * 512;
            for flip in 0..1 + stream.below(trial, 1, 3) {
                let at = block + stream.below(trial, 2 + 2 * flip, 512) as usize;
                bytes[at] = stream.bits(trial, 3 + 2 * flip) as u8;
            }
            // With a right checksum the damage is believed.
            if trial % 2 == 0 && bytes[block + 257..block + 262] == *b"ustar" {
                seal(&mut bytes[block..block + 512]);
            }
            if let Err(error) = open_bytes(directory.path(), &bytes) {
                let OpenError::Read(error) = error else { panic!("{error}") };
                assert!(error.file.is_some(), "{error}");
            }
        }
    }
}

#[test]
fn arrays_of_numpy_are_checked() {
    let array = |header: &str, data: &[u8]| {
        let mut file = b"\x93NUMPY\x01\x00".to_vec();
        file.extend((header.len() as u16).to_le_bytes());
        [file, header.as_bytes().to_vec(), data.to_vec()].concat()
    };
    let good = array("{'descr': '<i2', 'fortran_order': False, 'shape': (2, 1), }", &[1, 0, 0xfe, 0xff]);
    let parsed = npy::Array::parse(&good).unwrap();
    let mut ints = Vec::new();
    parsed.ints(&mut ints).unwrap();
    assert_eq!((parsed.shape, ints), (vec![2, 1], vec![1, -2]));
    let half = array("{'descr': '<f2', 'fortran_order': False, 'shape': (), }", &[0, 0x3c]);
    let mut reals = Vec::new();
    npy::Array::parse(&half).unwrap().reals(&mut reals).unwrap();
    assert_eq!(reals, [1.0]);
    // Whatever the reader of .npy files takes, in any order of the keys and with any quotes.
    let other = array("{\"shape\": (2L,), \"fortran_order\": True, 'descr': '=u1'}", &[3, 250]);
    let mut ints = Vec::new();
    npy::Array::parse(&other).unwrap().ints(&mut ints).unwrap();
    assert_eq!(ints, [3, 250]);
    let header = |descr: &str| format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': (1,)}}");
    let wide = array(&header("<f8"), &1e300_f64.to_le_bytes());
    let error = npy::Array::parse(&wide).unwrap().reals(&mut reals).unwrap_err();
    assert_eq!(error, "the array has 1e300, which is too large for 32 bits");
    let long = array(&header("<u8"), &u64::MAX.to_le_bytes());
    let error = npy::Array::parse(&long).unwrap().ints(&mut ints).unwrap_err();
    assert_eq!(error, "the array has 18446744073709551615, which is larger than 9223372036854775807");
    for (descr, shape, bytes) in [
        ("|O", "(1,)", 8),
        (">f4", "(1,)", 4),
        ("<f4", "(2,)", 4),
        ("<f4", "(4611686018427387904, 4)", 0),
        ("<f4", "(-1,)", 4),
        ("<f4", "1", 4),
    ] {
        let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
        assert!(npy::Array::parse(&array(&header, &vec![0; bytes])).is_err(), "{header}");
    }
    for length in 0..good.len() {
        assert!(npy::Array::parse(&good[..length]).is_err());
    }
}

#[test]
fn members_of_no_sample_are_counted() {
    let directory = tempfile::tempdir().unwrap();
    let mut bytes = header("dir/", 0, b'5');
    bytes.extend(header("0.jpg", 0, b'2'));
    bytes.extend(archive(&[("README", b"1"), ("1.cls", b"2")]));
    // The second time from the index.
    for _ in 0..2 {
        let reader = open_bytes(directory.path(), &bytes).unwrap();
        assert_eq!(reader.notes(), ["left out: 2 members of archives that are links or have no ending"]);
    }
    // A directory of shards with other files in it; and the same once more, by a link.
    fs::write(directory.path().join("notes.txt"), "x").unwrap();
    let again = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(directory.path(), again.path().join("link")).unwrap();
    let files = [directory.path().into(), again.path().join("link")].map(|path| DataFile::at(&path).unwrap());
    let reader = open(&files, &settings()).unwrap();
    assert_eq!(reader.len(), 1);
    let notes = reader.notes();
    assert!(
        notes[0].starts_with("left out: 1 file (.txt 1) in ") && notes[0].ends_with(": not of this format"),
        "{notes:?}"
    );
    assert!(notes[1].ends_with("link, which was read by another path"), "{notes:?}");
}
