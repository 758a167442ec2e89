use super::*;
use crate::format::choose;
use crate::formats::testing::{file, open, open_bytes, read, read_error, settings};
use crate::record::{RecordKind, RecordValue};
use kolo_graph::settings::Setting;

/// The unpacked contents of a committed file.
fn unpacked(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    DataFile::at(&file(name)).unwrap().stream().unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn both_sets_are_read() {
    let reader = open(&FORMAT, &[file("data_batch_1.bin.gz")], &[]).unwrap();
    assert_eq!(reader.len(), 2);
    assert_eq!(reader.columns()[0].kind, RecordKind::Pixels { shape: vec![3, 32, 32] });
    assert_eq!(reader.columns()[1].kind, RecordKind::Int { shape: vec![], classes: Some(10) });
    let record = read(&*reader, 1);
    let RecordValue::Bytes(pixels) = record.value(0) else { panic!("pixels") };
    assert_eq!((pixels.len(), pixels[9], pixels[21], pixels[0]), (3072, 0, 1, 255));
    assert_eq!(record.value(1), &RecordValue::Ints(vec![9]));
    for (fine, classes, labels) in [(true, 100, [99, 4]), (false, 20, [19, 0])] {
        let reader = open(&FORMAT, &[file("cifar100.bin.gz")], &[("fine", Setting::Bool(fine))]).unwrap();
        assert_eq!(reader.columns()[1].kind, RecordKind::Int { shape: vec![], classes: Some(classes) });
        let found = [0, 1].map(|at| read(&*reader, at).value(1).clone());
        assert_eq!(found, labels.map(|label| RecordValue::Ints(vec![label])));
    }
}

#[test]
fn a_directory_gives_its_batches_and_the_names_of_its_classes() {
    let dir = tempfile::tempdir().unwrap();
    let batch = unpacked("data_batch_1.bin.gz");
    for name in ["data_batch_2.bin", "data_batch_1.bin", "test_batch.bin"] {
        std::fs::write(dir.path().join(name), &batch).unwrap();
    }
    let names: Vec<String> = (0..10).map(|class| format!("class {class}")).collect();
    std::fs::write(dir.path().join("batches.meta.txt"), names.join("\n") + "\n\n").unwrap();
    assert!((FORMAT.sniff)(dir.path(), &[]));
    let reader = open(&FORMAT, &[dir.path().into()], &[]).unwrap();
    assert_eq!(reader.len(), 4);
    assert_eq!(reader.columns()[1].kind, RecordKind::Class { names: names.into() });
    let test = open(&FORMAT, &[dir.path().join("test_batch.bin")], &[]).unwrap();
    assert_eq!(read(&*test, 1), read(&*reader, 3));
}

#[test]
fn files_that_end_in_bin_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let name_of = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        choose(&[DataFile::at(&path).unwrap()], &settings(&[])).unwrap().name
    };
    assert_eq!(name_of("train.bin", &unpacked("cifar100.bin.gz")), "cifar");
    assert_eq!(name_of("data_batch_1.bin", &unpacked("data_batch_1.bin.gz")), "cifar");
    assert_eq!(name_of("train.bin", &[200; 3074 * 2]), "tokens");
    assert_eq!(name_of("val.bin", &[1; 100]), "tokens");
    assert_eq!(choose(&[DataFile::at(&file("data_batch_1.bin.gz")).unwrap()], &settings(&[])).unwrap().name, "cifar");
}

#[test]
fn what_is_no_whole_number_of_images_is_refused() {
    let batch = unpacked("data_batch_1.bin.gz");
    for len in [0, 1, 3072, 3074 * 2 - 3, 6145] {
        let error = read_error(open_bytes(&FORMAT, &batch[..len], &[]).1);
        assert!(error.message.contains("not a multiple of 3073"), "{error}");
    }
    // A label that is too large is an error of its image, wherever it is.
    for bad in [0, 3, 90] {
        let mut many = batch[..3073].repeat(100);
        many[3073 * bad] = 77;
        let (_dir, reader) = open_bytes(&FORMAT, &many, &[]);
        let reader = reader.unwrap();
        let error = reader.read(bad, &mut crate::record::Record::new()).unwrap_err();
        assert_eq!(error.offset, Some(3073 * bad as u64));
        assert!(error.message.contains("has 77, but there are 10 classes"), "{error}");
        read(&*reader, 50);
    }
    let mut few = batch[..3073].repeat(7);
    (2..5).for_each(|at| few[3073 * at] = 77);
    let error = read_error(open_bytes(&FORMAT, &few, &[]).1);
    assert!(error.message.contains("image 2 has the label 77") && error.offset == Some(3073 * 2), "{error}");
    // With most of them too large it is another kind of file.
    for (record, message) in [
        (3073, "image 0 has the label 200, but CIFAR-10 has 10 classes"),
        (3074, "image 0 has the labels 200 and 200, but CIFAR-100 has 20 and 100 classes"),
    ] {
        let error = read_error(open_bytes(&FORMAT, &vec![200; record * 5], &[]).1);
        assert_eq!((&error.message[..], error.offset), (message, Some(0)));
    }
}
