use super::*;
use crate::formats::testing::{file, open, open_bytes, read, read_error, survive_damage, text};
use crate::record::{RecordKind, RecordValue};

#[test]
fn files_of_the_library_are_read() {
    let reader = open(&FORMAT, &[file("numpy.safetensors")], &[]).unwrap();
    assert_eq!(reader.len(), 3);
    assert_eq!(reader.columns()[0].kind, RecordKind::Real { shape: vec![2] });
    assert_eq!(reader.columns()[1].kind, RecordKind::Int { shape: vec![], classes: None });
    let record = read(&*reader, 2);
    assert_eq!(record.value(0), &RecordValue::Reals(vec![1.0, 1.25]));
    assert_eq!(record.value(1), &RecordValue::Ints(vec![4]));
    let reader = open(&FORMAT, &[file("torch.safetensors")], &[]).unwrap();
    assert_eq!(read(&*reader, 0).value(0), &RecordValue::Reals(vec![1.5]));
    assert_eq!(read(&*reader, 0).value(1), &RecordValue::Reals(vec![0.5, -2.0]));
}

/// A file with this header and so many bytes of data.
fn made(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat()
}

#[test]
fn overlapping_and_missing_data_are_refused() {
    let tensor = |name: &str, begin: u64, end: u64| {
        format!(
            "\"{name}\":{{\"dtype\":\"U8\",\"shape\":[{}],\"data_offsets\":[{begin},{end}]}}",
            end.wrapping_sub(begin)
        )
    };
    for (tensors, data, expected) in [
        (vec![tensor("a", 0, 4), tensor("b", 2, 6)], 6, "but must start at 4"),
        (vec![tensor("a", 0, 4), tensor("b", 6, 8)], 8, "but must start at 4"),
        (vec![tensor("a", 0, 4)], 5, "end at byte 4 of the data, but the file has 5"),
        (vec![tensor("a", 0, 40)], 4, "end at byte 40"),
        (vec![tensor("a", 4, 0)], 4, "the bytes 4 to 0, but must start at 0"),
        (
            vec!["\"a\":{\"dtype\":\"U8\",\"shape\":[9],\"data_offsets\":[0,4]}".into()],
            4,
            "needs 9 bytes, but the file has 4",
        ),
        (
            vec!["\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,4]}".into()],
            4,
            "needs 2 bytes, but the file has 4",
        ),
        (vec!["\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[4],\"data_offsets\":[0,4]}".into()], 4, "type F8_E4M3"),
        (vec!["\"a\":7".into()], 0, "is malformed"),
    ] {
        let file = made(&format!("{{{}}}", tensors.join(",")), data);
        let error = read_error(open_bytes(&FORMAT, &file, &[]).1).to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = read_error(open_bytes(&FORMAT, &u64::MAX.to_le_bytes(), &[]).1);
    assert!(error.message.contains("18446744073709551615 bytes"), "{error}");
}

#[test]
fn tensors_that_are_not_read_matter_only_where_they_are_named() {
    let header = "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\
                  \"b\":{\"dtype\":\"F8_E4M3\",\"shape\":[2],\"data_offsets\":[2,4]},\
                  \"c\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[4,8]}}";
    let file = made(header, 8);
    let (_dir, reader) = open_bytes(&FORMAT, &file, &[]);
    let reader = reader.unwrap();
    assert_eq!((reader.columns().len(), reader.len()), (1, 2));
    let unread: Vec<_> = reader.unread().iter().map(|column| (&column.name[..], &column.kind[..])).collect();
    assert_eq!(unread, [("b", "F8_E4M3"), ("c", "f32 []")]);
    assert!(open_bytes(&FORMAT, &file, &[("arrays", text("a"))]).1.is_ok());
    for (name, message) in [("b", "type F8_E4M3"), ("c", "has no dims")] {
        let error = read_error(open_bytes(&FORMAT, &file, &[("arrays", text(name))]).1);
        assert!(error.message.contains(message), "{error}");
    }
}

#[test]
fn damaged_files_are_refused() {
    survive_damage(&FORMAT, &std::fs::read(file("numpy.safetensors")).unwrap(), &[]);
}
