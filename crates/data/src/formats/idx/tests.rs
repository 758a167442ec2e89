use super::*;
use crate::formats::testing::{file, open, open_bytes, read, read_error, survive_damage};
use crate::record::{RecordKind, RecordValue};

#[test]
fn images_come_with_the_labels_beside_them() {
    let images = file("train-images-idx3-ubyte.gz");
    let labels = file("train-labels-idx1-ubyte.gz");
    // A directory, the images, or all that a pattern matches.
    for paths in [vec![file("")], vec![images.clone()], vec![images, labels]] {
        let reader = open(&FORMAT, &paths, &[]).unwrap();
        assert_eq!(reader.len(), 3);
        assert_eq!(reader.columns()[0].kind, RecordKind::Pixels { shape: vec![1, 4, 5] });
        assert_eq!(reader.columns()[1].kind, RecordKind::Int { shape: vec![], classes: None });
        let record = read(&*reader, 2);
        assert_eq!(record.value(0), &RecordValue::Bytes((40..60).collect()));
        assert_eq!(record.value(1), &RecordValue::Ints(vec![9]));
    }
}

#[test]
fn reals_are_read_highest_byte_first() {
    let reader = open(&FORMAT, &[file("reals.idx")], &[]).unwrap();
    assert_eq!(reader.columns().len(), 1);
    assert_eq!(read(&*reader, 1).value(0), &RecordValue::Reals(vec![0.25, 3.0]));
}

#[test]
fn sizes_that_the_file_does_not_have_are_refused() {
    let huge = [&[0, 0, 8, 3][..], &[0xff; 12], &[1, 2, 3]].concat();
    let error = read_error(open_bytes(&FORMAT, &huge, &[]).1).to_string();
    assert!(error.contains("byte 16") && error.contains("a sample must have"), "{error}");
    let error = read_error(open_bytes(&FORMAT, &[0, 0, 7, 1, 0, 0, 0, 0], &[]).1).to_string();
    assert!(error.contains("byte 2: the element type 0x07 is not known"), "{error}");
}

#[test]
fn damaged_files_are_refused() {
    survive_damage(&FORMAT, &std::fs::read(file("reals.idx")).unwrap(), &[]);
    survive_damage(&FORMAT, &std::fs::read(file("train-images-idx3-ubyte.gz")).unwrap(), &[]);
}
