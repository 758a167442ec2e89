use super::*;
use crate::formats::testing::{file, open, open_bytes, read, read_error, survive_damage, text};
use crate::record::{Record, RecordKind, RecordValue};
use kolo_graph::settings::Setting;

fn window(reader: &dyn crate::format::Reader, at: usize) -> [Vec<i64>; 2] {
    let record = read(reader, at);
    [0, 1].map(|column| match record.value(column) {
        RecordValue::Ints(tokens) => tokens.clone(),
        other => panic!("{other:?}"),
    })
}

#[test]
fn windows_follow_one_another_and_targets_are_one_ahead() {
    let keys = [("context", Setting::Int(6))];
    let reader = open(&FORMAT, &[file("plain.u16")], &keys).unwrap();
    // 20 tokens: 0..7, 6..13, 12..19; the last one fills no window.
    assert_eq!(reader.len(), 3);
    let kind = RecordKind::Int { shape: vec![6], classes: Some(20) };
    assert!(reader.columns().iter().all(|column| column.kind == kind));
    assert_eq!(window(&*reader, 2), [(12..18).collect::<Vec<_>>(), (13..19).collect()]);
    let keys = [("context", Setting::Int(6)), ("stride", Setting::Int(1))];
    let reader = open(&FORMAT, &[file("plain.u16"), file("plain.u16")], &keys).unwrap();
    assert_eq!(reader.len(), 28);
    assert_eq!(window(&*reader, 13), [(13..19).collect::<Vec<_>>(), (14..20).collect()]);
    assert_eq!(window(&*reader, 14)[0], (0..6).collect::<Vec<_>>());
}

#[test]
fn wide_tokens_and_the_header_of_llm_c_are_read() {
    let keys = [("context", Setting::Int(4))];
    let wide = open(&FORMAT, &[file("plain.u32")], &keys).unwrap();
    assert_eq!(wide.columns()[0].kind, RecordKind::Int { shape: vec![4], classes: Some(560_001) });
    assert_eq!(window(&*wide, 1)[0], [280_000, 350_000, 420_000, 490_000]);
    let headed = open(&FORMAT, &[file("llm_c.bin")], &keys).unwrap();
    assert_eq!((headed.len(), window(&*headed, 0)), (2, [vec![10, 11, 12, 13], vec![11, 12, 13, 14]]));
    let narrow = [("context", Setting::Int(4)), ("dtype", text("u16"))];
    assert_eq!(window(&*open(&FORMAT, &[file("plain.u32")], &narrow).unwrap(), 0)[0], [0, 0, 4464, 1]);
    let cut = std::fs::read(file("llm_c.bin")).unwrap();
    let error = read_error(open_bytes(&FORMAT, &cut[..cut.len() - 2], &keys).1);
    assert!(error.message.contains("it has 9 tokens of u16, but its metadata say 10"), "{error}");
}

#[test]
fn the_description_beside_a_file_counts() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("corpus.bin");
    std::fs::write(&path, [7; 40]).unwrap();
    let keys = [("context", Setting::Int(4))];
    let (digest, tokenizer) = ("blake3:1".to_string(), "tok.json".to_string());
    let described = Description { dtype: "u32".into(), vocab: 300_000_000, count: 10, tokenizer, digest };
    let write = |described: &Description| {
        std::fs::write(Description::path(&path), described.to_json().to_string()).unwrap();
    };
    write(&described);
    assert_eq!(Description::beside(&path).unwrap(), Some(described.clone()));
    let reader = open(&FORMAT, std::slice::from_ref(&path), &keys).unwrap();
    assert_eq!((window(&*reader, 1)[0][0], reader.fingerprint()), (0x0707_0707, "blake3:1".into()));
    // A token outside of the vocabulary is an error where it stands.
    write(&Description { vocab: 1000, ..described.clone() });
    let error = open(&FORMAT, std::slice::from_ref(&path), &keys).unwrap().read(1, &mut Record::new()).unwrap_err();
    assert_eq!((error.offset, &error.message[..]), (Some(16), "token 117901063 is outside of the vocabulary of 1000"));
    write(&Description { count: 11, ..described });
    assert!(read_error(open(&FORMAT, std::slice::from_ref(&path), &keys)).message.contains("metadata say 11"));
    std::fs::write(Description::path(&path), "{").unwrap();
    let error = read_error(open(&FORMAT, std::slice::from_ref(&path), &keys));
    assert!(error.file.unwrap().ends_with("corpus.bin.json") && error.message.contains("not JSON"));
}

#[test]
fn short_and_odd_files_are_refused() {
    for (bytes, expected) in [
        (&[][..], "it has 0 tokens, but a sample needs 129"),
        (&[1; 7], "7 bytes are not a whole number of u16 tokens"),
        (&[1; 256], "it has 128 tokens"),
    ] {
        let error = read_error(open_bytes(&FORMAT, bytes, &[]).1);
        assert!(error.message.contains(expected) && error.file.is_some(), "{error}");
    }
    let keys = [("vocab", Setting::Int(9)), ("context", Setting::Int(4))];
    let reader = open(&FORMAT, &[file("plain.u16")], &keys).unwrap();
    assert!(reader.read(0, &mut Record::new()).is_ok());
    assert_eq!(reader.read(2, &mut Record::new()).unwrap_err().offset, Some(18));
}

#[test]
fn a_file_that_shrinks_while_it_is_read_is_an_error() {
    // With a vocabulary nothing is read ahead at opening.
    let (dir, reader) = open_bytes(&FORMAT, &[1; 4000], &[("vocab", Setting::Int(300))]);
    let (reader, mut record) = (reader.unwrap(), Record::new());
    reader.read(0, &mut record).unwrap();
    let path = dir.path().join("file.bin");
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(300).unwrap();
    assert!(reader.read(12, &mut record).is_err());
    reader.read(0, &mut record).unwrap();
}

#[test]
fn damaged_files_are_read_or_refused() {
    let keys = [("context", Setting::Int(4))];
    survive_damage(&FORMAT, &std::fs::read(file("plain.u16")).unwrap(), &keys);
    let headed = std::fs::read(file("llm_c.bin")).unwrap();
    survive_damage(&FORMAT, &[&headed[..40], &headed[1000..]].concat(), &keys);
}
