use super::*;
use crate::formats::testing::{file, open_bytes, read, read_error, survive_damage, text};
use crate::record::{RecordKind, RecordValue};
use kolo_graph::settings::Setting;

#[test]
fn bytes_are_the_tokens_by_default() {
    let (_dir, reader) = open_bytes(&FORMAT, "héllo wörld".as_bytes(), &[("context", Setting::Int(4))]);
    let reader = reader.unwrap();
    assert_eq!((reader.len(), reader.fingerprint()), (3, "bytes".into()));
    assert_eq!(reader.columns()[0].kind, RecordKind::Int { shape: vec![4], classes: Some(256) });
    assert_eq!(read(&*reader, 0).value(0), &RecordValue::Ints(vec![0x68, 0xc3, 0xa9, 0x6c]));
    assert_eq!(read(&*reader, 0).value(1), &RecordValue::Ints(vec![0xc3, 0xa9, 0x6c, 0x6c]));
}

#[test]
#[cfg(feature = "tokenizers")]
fn a_tokenizer_makes_the_tokens() {
    let path = file("tokenizer.json");
    let tokenizer = Tokenizer::open(&path).unwrap();
    let keys = [("context", Setting::Int(5)), ("tokenizer", text(&path.display().to_string()))];
    // Longer than a piece, so that several are put together.
    let long = "the cat sat on the mat, and the rat\n".repeat(4000);
    let (_dir, reader) = open_bytes(&FORMAT, long.as_bytes(), &keys);
    let reader = reader.unwrap();
    let mut tokens = Vec::new();
    tokenizer.encode(&long, &mut tokens).unwrap();
    assert_eq!(reader.len(), (tokens.len() - 6) / 5 + 1);
    for at in [0, 1, reader.len() / 2, reader.len() - 1] {
        let expected = tokens[5 * at..5 * at + 5].iter().map(|token| i64::from(*token)).collect();
        assert_eq!(read(&*reader, at).value(0), &RecordValue::Ints(expected), "{at}");
    }
    assert!(reader.fingerprint().starts_with("blake3:"));
    let error = read_error(open_bytes(&FORMAT, b"text", &[("tokenizer", text("nowhere.json"))]).1);
    assert!(error.to_string().contains("nowhere.json: cannot be opened"), "{error}");
    let small = [("vocab", Setting::Int(10)), keys[1].clone()];
    assert!(open_bytes(&FORMAT, b"text", &small).1.unwrap_err().to_string().contains("the tokenizer has 274 tokens"));
}

#[test]
fn what_is_no_text_is_refused_with_its_place() {
    let bytes = [&b"x".repeat(100_000)[..], b"\xff", b"more text of the file"].concat();
    let error = read_error(open_bytes(&FORMAT, &bytes, &[]).1);
    assert_eq!((error.offset, &error.message[..]), (Some(100_000), "this is not UTF-8 text"));
    let cut = &"aé".as_bytes()[..2];
    assert_eq!(read_error(open_bytes(&FORMAT, cut, &[]).1).offset, Some(1));
    assert!(read_error(open_bytes(&FORMAT, b"short", &[]).1).message.contains("5 tokens, but a sample needs 129"));
}

#[test]
fn damaged_files_are_read_or_refused() {
    survive_damage(&FORMAT, "Zażółć gęślą jaźń".as_bytes(), &[("context", Setting::Int(3))]);
}
