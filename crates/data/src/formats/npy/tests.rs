use super::*;
use crate::formats::testing::{file, open, open_bytes, read, read_error, survive_damage, text};
use crate::record::{RecordKind, RecordValue};

#[test]
fn every_element_type_is_read() {
    let names = ["bool", "u1", "i1", "little_u2", "big_i2", "little_u4", "big_i4", "little_u8", "big_i8"];
    for name in names {
        let reader = open(&FORMAT, &[file(&format!("npy_{name}.npy"))], &[]).unwrap();
        assert_eq!(reader.len(), 4);
        let (classes, expected) = match name {
            "bool" => (Some(2), vec![0, 1, 0]),
            _ => (None, vec![6, 7, 8]),
        };
        assert_eq!(reader.columns()[0].kind, RecordKind::Int { shape: vec![3], classes }, "{name}");
        assert_eq!(read(&*reader, 2).value(0), &RecordValue::Ints(expected), "{name}");
    }
    for name in ["little_f2", "little_f4", "big_f4", "little_f8", "big_f8", "version2"] {
        let reader = open(&FORMAT, &[file(&format!("npy_{name}.npy"))], &[]).unwrap();
        assert_eq!(reader.columns()[0].kind, RecordKind::Real { shape: vec![3] });
        assert_eq!(read(&*reader, 3).value(0), &RecordValue::Reals(vec![9.0, 10.0, 11.0]), "{name}");
    }
}

#[test]
fn archives_hold_images_and_labels_stored_or_deflated() {
    for name in ["npz_stored.npz", "npz_deflated.npz"] {
        let reader = open(&ARCHIVE, &[file(name), file(name)], &[]).unwrap();
        assert_eq!(reader.len(), 4);
        let kinds: Vec<_> = reader.columns().iter().map(|column| (column.name.as_str(), &column.kind)).collect();
        let (x, y) = (RecordKind::Pixels { shape: vec![3, 4, 5] }, RecordKind::Int { shape: vec![], classes: None });
        assert_eq!(kinds, [("x", &x), ("y", &y)]);
        let record = read(&*reader, 3);
        let RecordValue::Bytes(pixels) = record.value(0) else { panic!("pixels") };
        // Channels first: the first channel of an image is every third byte of the file's.
        assert_eq!(pixels[..3], [60, 63, 66]);
        assert_eq!((pixels[20], pixels.len()), (61, 60));
        assert_eq!(record.value(1), &RecordValue::Ints(vec![0]));
    }
}

#[test]
fn names_of_any_letters_are_searched_for_labels() {
    let dir = tempfile::tempdir().unwrap();
    let place = |name: &str| dir.path().join(name);
    for name in ["éx_y.npy", "y_é.npy", "données-labels-été.npy", "日本 y.npy", "y.npy"] {
        std::fs::write(place(name), b"").unwrap();
    }
    for (samples, labels) in [
        ("éx_x.npy", Some("éx_y.npy")),
        ("x_é.npy", Some("y_é.npy")),
        ("données-images-été.npy", Some("données-labels-été.npy")),
        ("éx.npy", None),
        ("xé.npy", None),
        ("日本_éxé.npy", None),
        ("x.npy", Some("y.npy")),
    ] {
        assert_eq!(found_labels(&place(samples)), labels.map(place), "{samples}");
    }
}

#[test]
fn labels_are_found_beside_the_samples_or_given() {
    let beside = open(&FORMAT, &[file("pair_x.npy")], &[]).unwrap();
    let both = open(&FORMAT, &[file("pair_x.npy"), file("pair_y.npy")], &[]).unwrap();
    let labels = file("pair_y.npy").display().to_string();
    let given = open(&FORMAT, &[file("pair_x.npy")], &[("labels", text(&labels))]).unwrap();
    let archive = open(&ARCHIVE, &[file("npz_stored.npz")], &[]).unwrap();
    for reader in [beside, both, given] {
        assert_eq!((reader.columns(), reader.len()), (archive.columns(), 2));
        assert_eq!(read(&*reader, 1), read(&*archive, 1));
    }
}

#[test]
fn arrays_of_different_lengths_must_be_chosen() {
    let path = [file("npz_lengths.npz")];
    let error = open(&ARCHIVE, &path, &[]).unwrap_err().to_string();
    assert!(error.contains("x_train 3, y_train 3, x_test 1") && error.contains("`arrays = \"x, y\"`"), "{error}");
    let reader = open(&ARCHIVE, &path, &[("arrays", text("x_train, y_train"))]).unwrap();
    assert_eq!((reader.len(), reader.columns()[1].name.as_str()), (3, "y_train"));
    let error = open(&ARCHIVE, &path, &[("arrays", text("z"))]).unwrap_err().to_string();
    assert!(error.contains("the arrays there are x_train, y_train, x_test"), "{error}");
}

#[test]
fn rows_of_whole_numbers_are_tokens_with_a_vocabulary() {
    let keys = |vocab| [("vocab", kolo_graph::settings::Setting::Int(vocab))];
    let reader = open(&FORMAT, &[file("npy_little_u2.npy")], &keys(12)).unwrap();
    assert_eq!(reader.columns()[0].kind, RecordKind::Int { shape: vec![3], classes: Some(12) });
    assert_eq!(read(&*reader, 3).value(0), &RecordValue::Ints(vec![9, 10, 11]));
    let reader = open(&FORMAT, &[file("npy_little_u2.npy")], &keys(11)).unwrap();
    let error = reader.read(3, &mut crate::record::Record::new()).unwrap_err();
    assert!(error.message.contains("has 11, but there are 11 classes") && error.offset == Some(150), "{error}");
}

#[test]
fn numbers_that_do_not_fit_are_errors_of_their_sample() {
    let wide = [1.0, f64::INFINITY, 1e300].iter().flat_map(|value: &f64| value.to_le_bytes()).collect::<Vec<_>>();
    let long = [1, u64::MAX / 2, 1 << 63].iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
    for (descr, data, message) in [
        ("<f8", wide, "array \"x\" has 1e300, which is too large for 32 bits"),
        ("<u8", long, "array \"x\" has 9223372036854775808, which is larger than 9223372036854775807"),
    ] {
        let file = npy(descr, "(3,)", &data);
        let (_dir, reader) = open_bytes(&FORMAT, &file, &[]);
        let reader = reader.unwrap();
        read(&*reader, 1);
        let error = reader.read(2, &mut crate::record::Record::new()).unwrap_err();
        assert_eq!((&error.message[..], error.offset), (message, Some(file.len() as u64 - 8)));
    }
}

#[test]
fn what_cannot_be_read_is_explained() {
    for (name, expected) in [
        ("npy_fortran.npy", "Fortran order"),
        ("npy_objects.npy", "Python objects"),
        ("npy_fields.npy", "several fields"),
    ] {
        let error = read_error(open(&FORMAT, &[file(name)], &[])).to_string();
        assert!(error.contains(expected) && error.contains(name) && error.contains("byte "), "{error}");
    }
    let huge = b"\x93NUMPY\x01\x00\x4c\x00{'descr': '<f4', 'fortran_order': False, 'shape': (4294967295, 3, 1000), }  ";
    let error = read_error(open_bytes(&FORMAT, huge, &[]).1).to_string();
    assert!(error.contains("needs 51539607540000 bytes, but the file has 0"), "{error}");
    let longer = b"\x93NUMPY\x01\x00\x3a\x00{'descr': '|u1', 'fortran_order': False, 'shape': (2,), }\nabc";
    let error = read_error(open_bytes(&FORMAT, longer, &[]).1).to_string();
    assert!(error.contains("needs 2 bytes, but the file has"), "{error}");
    let long = b"\x93NUMPY\x02\x00\xff\xff\xff\xff{";
    assert!(read_error(open_bytes(&FORMAT, long, &[]).1).message.contains("4294967295 bytes"));
}

#[test]
fn damaged_files_are_refused() {
    survive_damage(&FORMAT, &std::fs::read(file("npy_little_u2.npy")).unwrap(), &[]);
    survive_damage(&ARCHIVE, &std::fs::read(file("npz_deflated.npz")).unwrap(), &[]);
}

/// An archive of stored members with these names, methods and contents.
fn zipped(members: &[(&str, u16, Vec<u8>)]) -> Vec<u8> {
    let (mut bytes, mut list) = (Vec::new(), Vec::new());
    for (name, method, data) in members {
        let mut crc = flate2::Crc::new();
        crc.update(data);
        let (offset, size) = (bytes.len() as u32, data.len() as u32);
        let sizes = [[0; 4], crc.sum().to_le_bytes(), size.to_le_bytes(), size.to_le_bytes()].concat();
        let lengths = [name.len() as u16, 0].map(u16::to_le_bytes).concat();
        let start = [&[20, 0, 0, 0][..], &method.to_le_bytes(), &sizes, &lengths].concat();
        bytes.extend([b"PK\x03\x04", &start[..], name.as_bytes(), data].concat());
        list.extend([b"PK\x01\x02\x14\0", &start[..], &[0; 10], &offset.to_le_bytes(), name.as_bytes()].concat());
    }
    let end = [list.len() as u32, bytes.len() as u32].map(u32::to_le_bytes).concat();
    [&bytes[..], &list, b"PK\x05\x06", &[0; 8], &end, &[0; 2]].concat()
}

/// An `.npy` file of bytes.
fn npy(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}");
    [&b"\x93NUMPY\x01\x00"[..], &(header.len() as u16).to_le_bytes(), header.as_bytes(), data].concat()
}

/// Every member is read, so that many that share their bytes would take as long as a large archive.
#[test]
fn members_that_share_bytes_are_refused() {
    let array = npy("<f4", "(2,)", &[0; 8]);
    let archive = zipped(&[("x.npy", 0, array.clone()), ("y.npy", 0, array.clone())]);
    let (_dir, reader) = open_bytes(&ARCHIVE, &archive, &[]);
    assert_eq!(reader.unwrap().columns().len(), 2);
    let list = archive.windows(4).position(|bytes| bytes == b"PK\x01\x02").unwrap();
    let second = list + 1 + archive[list + 1..].windows(4).position(|bytes| bytes == b"PK\x01\x02").unwrap();
    // Both entries of the list name the first member; or the second begins within it.
    for inside in [false, true] {
        let mut shared = archive.clone();
        let mut offset = 0_u32;
        if inside {
            offset = 40;
            let header = archive[..35].to_vec();
            shared[40..75].copy_from_slice(&header);
            // Its checksum is wrong then, but nothing of it is read.
        }
        shared[second + 42..second + 46].copy_from_slice(&offset.to_le_bytes());
        let error = read_error(open_bytes(&ARCHIVE, &shared, &[("arrays", text("y, x"))]).1);
        let expected = ["has bytes of member", "has a wrong checksum"];
        assert!(expected.iter().any(|expected| error.message.contains(expected)), "{error}");
        assert!(inside || error.message.contains("member \"x.npy\" has bytes of member \"y.npy\""), "{error}");
    }
}

#[test]
fn what_members_unpack_to_lies_in_one_file() {
    use std::os::fd::AsRawFd;
    let path = file("npz_deflated.npz");
    let archive = DataFile::at(&path).unwrap().contents(&crate::formats::testing::settings(&[])).unwrap();
    let mut opened = OpenedMembers::new(1 << 20);
    let members = zip::members(&archive).unwrap();
    let contents: Vec<_> = members.iter().map(|member| member.open(&archive, &mut opened).unwrap()).collect();
    assert!(contents.len() > 1);
    let mut end = 0;
    for (contents_here, (start, bytes)) in &contents {
        assert_eq!(contents_here.file().as_raw_fd(), contents[0].0.file().as_raw_fd());
        assert_ne!(contents_here.file().as_raw_fd(), archive.file().as_raw_fd());
        assert_eq!(*start, end);
        end += bytes;
    }
}

#[test]
fn arrays_that_are_not_read_matter_only_where_they_are_named() {
    let members = [
        ("x.npy", 0, npy("<f4", "(2,)", &[0; 8])),
        ("words.npy", 0, npy("<U1", "(2,)", &[0; 8])),
        ("rate.npy", 0, npy("<f4", "()", &[0; 4])),
        ("none.npy", 0, npy("<f4", "(3, 0)", &[])),
        ("packed.npy", 12, vec![0; 9]),
        ("note.txt", 0, b"hello".to_vec()),
    ];
    let archive = zipped(&members);
    let (_dir, reader) = open_bytes(&ARCHIVE, &archive, &[]);
    let reader = reader.unwrap();
    assert_eq!((reader.columns().len(), reader.len()), (1, 2));
    assert!(reader.notes()[0].starts_with("left out: 1 file (.txt 1) in "), "{:?}", reader.notes());
    let unread: Vec<_> = reader.unread().iter().map(|column| (&column.name[..], &column.kind[..])).collect();
    let expected = [("words", "<U1"), ("rate", "f32 []"), ("none", "f32 [3, 0]"), ("packed", "compressed with bzip2")];
    assert_eq!(unread, expected);
    let (_dir, reader) = open_bytes(&ARCHIVE, &archive, &[("arrays", text("x"))]);
    assert!(reader.unwrap().unread().is_empty());
    for (name, message) in [
        ("words", "array \"words\": elements of the type \"<U1\" cannot be read"),
        ("rate", "array \"rate\" has no dims, so it holds no samples"),
        ("none", "a sample must have 1 to"),
        ("packed", "member \"packed.npy\" is compressed with bzip2, which kolo does not read"),
    ] {
        let error = read_error(open_bytes(&ARCHIVE, &archive, &[("arrays", text(name))]).1);
        assert!(error.message.contains(message) && !error.hint.contains("damaged"), "{error}");
        // Alone in its file it is an error, too.
        let alone: Vec<_> = members.iter().filter(|member| member.0.starts_with(name)).cloned().collect();
        let error = read_error(open_bytes(&ARCHIVE, &zipped(&alone), &[]).1);
        assert!(error.message.contains(message), "{error}");
    }
    let error = open_bytes(&ARCHIVE, &archive, &[("arrays", text("x, x"))]).1.unwrap_err().to_string();
    assert!(error.contains("`data.arrays` names \"x\" twice"), "{error}");
    let twice = zipped(&[members[0].clone(), members[0].clone()]);
    assert!(read_error(open_bytes(&ARCHIVE, &twice, &[]).1).message.contains("two members named \"x.npy\""));
}

/// Every bit of a member's data counts, stored or deflated.
#[test]
fn checksums_of_members_are_checked() {
    for name in ["npz_stored.npz", "npz_deflated.npz"] {
        let bytes = std::fs::read(file(name)).unwrap();
        let contents = DataFile::at(&file(name)).unwrap().contents(&crate::formats::testing::settings(&[])).unwrap();
        for member in zip::members(&contents).unwrap() {
            let (start, len) = member.place(&contents).unwrap();
            for at in (start..start + len).step_by(7) {
                let mut damaged = bytes.clone();
                damaged[at as usize] ^= 0x10;
                let error = read_error(open_bytes(&ARCHIVE, &damaged, &[]).1);
                assert!(error.message.contains(&format!("member \"{}\"", member.name)), "{name}, byte {at}: {error}");
                assert!(error.offset.is_some_and(|offset| offset <= at), "{error}");
            }
        }
    }
}

#[test]
fn an_archive_that_unpacks_to_too_much_is_refused() {
    let keys = [("unpacked_max", kolo_graph::settings::Setting::Int(100))];
    let error = read_error(open(&ARCHIVE, &[file("npz_deflated.npz")], &keys));
    assert!(error.message.contains("but only 100 are left") && error.hint.contains("unpacked_max"), "{error}");
}
