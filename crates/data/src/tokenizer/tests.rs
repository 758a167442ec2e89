use super::*;
use crate::files::DataFile;
use crate::formats::tokens::Description;
use kolo_graph::settings::Settings;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

fn pieces_of(text: &[u8]) -> Result<Vec<String>, ReadError> {
    TextPieces::new(text, Path::new("a.txt")).collect()
}

#[test]
fn pieces_make_up_the_text_and_end_at_lines() {
    let text = "first line\n\n  indented\nschön 🦀\n".repeat(20_000);
    let pieces = pieces_of(text.as_bytes()).unwrap();
    assert!(pieces.len() > 5 && pieces.concat() == text);
    let (_, whole) = pieces.split_last().unwrap();
    assert!(whole.iter().all(|piece| piece.ends_with('\n')));
    assert!(pieces.iter().all(|piece| !piece.starts_with(char::is_whitespace)));
    // Without lines, pieces end before a space; without spaces, between characters.
    let words = "word  ".repeat(50_000);
    let pieces = pieces_of(words.as_bytes()).unwrap();
    assert!(pieces.concat() == words && pieces[1..].iter().all(|piece| piece.starts_with("  word")));
    let crabs = "🦀".repeat(50_000);
    assert_eq!(pieces_of(format!("a{crabs}").as_bytes()).unwrap().concat(), format!("a{crabs}"));
    assert_eq!(pieces_of(b"").unwrap(), Vec::<String>::new());
}

#[test]
fn broken_text_is_refused_with_its_place() {
    for (text, offset) in [(&b"ab\xffcd"[..], 2), (b"ab\xc3", 2), (b"\xed\xa0\x80", 0)] {
        let error = pieces_of(text).unwrap_err();
        assert_eq!((error.offset, error.file), (Some(offset), Some(PathBuf::from("a.txt"))));
    }
}

#[test]
fn bytes_need_no_file() {
    let tokenizer = Tokenizer::bytes();
    let mut tokens = vec![1];
    tokenizer.encode("aé", &mut tokens).unwrap();
    assert_eq!(tokens, [1, 0x61, 0xc3, 0xa9]);
    assert_eq!(tokenizer.decode(&tokens[1..]), "aé");
    assert_eq!(tokenizer.decode(&tokens[1..3]), "a\u{fffd}");
    assert_eq!((tokenizer.vocab(), tokenizer.dtype(), tokenizer.end_of_text()), (256, "u16", None));
}

#[test]
fn characters_of_an_alphabet_are_tokens() {
    let tokenizer = Tokenizer::characters("01é+");
    let mut tokens = Vec::new();
    tokenizer.encode("1+é", &mut tokens).unwrap();
    assert_eq!((&tokens[..], tokenizer.vocab(), tokenizer.is_bytes()), (&[1, 3, 2][..], 4, false));
    assert_eq!(tokenizer.decode(&[2, 0, 4]), "é0\u{fffd}");
    let error = tokenizer.encode("1é2", &mut tokens).unwrap_err();
    assert_eq!(error.message, "character 3 of the text, '2', is no token");
    assert!(error.hint.contains("01é+"), "{}", error.hint);
}

/// The names of the files in a directory, sorted.
fn names_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A text file in this directory.
fn text_file(dir: &Path, name: &str, text: &[u8]) -> DataFile {
    std::fs::write(dir.join(name), text).unwrap();
    DataFile::at(&dir.join(name)).unwrap()
}

/// The text of whole files.
fn texts(files: &[DataFile]) -> TextSource {
    TextSource::open(files.to_vec(), None, &Settings::new("", "here")).unwrap()
}

#[test]
fn a_column_of_a_table_is_as_many_texts() {
    let dir = tempfile::tempdir().unwrap();
    let table = text_file(dir.path(), "a.jsonl", b"{\"t\": \"ab\", \"n\": 1}\n{\"n\": 2}\n{\"t\": \"c\"}\n");
    let settings = Settings::new("", "here");
    let open = |column| TextSource::open(vec![table.clone()], column, &settings);
    let out = dir.path().join("corpus.bin");
    let written = write_corpus(&open(Some("t")).unwrap(), &Tokenizer::bytes(), "", &out, |_| ()).unwrap();
    assert_eq!((written.count, std::fs::read(&out).unwrap()), (3, b"a\0b\0c\0".to_vec()));
    for (column, expected) in [(None, "is a table"), (Some("n"), "is \"n\", which is not a text column")] {
        let error = open(column).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let bad = text_file(dir.path(), "b.jsonl", b"{\"t\": \"ab\"}\n{\n");
    let bad = TextSource::open(vec![bad], Some("t"), &settings).unwrap();
    let error = write_corpus(&bad, &Tokenizer::bytes(), "", &out, |_| ()).unwrap_err();
    assert!(error.message.starts_with("line 2: "), "{error}");
    let nothing = text_file(dir.path(), "c.jsonl", b"{\"t\": \"\"}\n{\"t\": null}\n");
    let nothing = TextSource::open(vec![nothing], Some("t"), &settings).unwrap();
    let error = write_corpus(&nothing, &Tokenizer::bytes(), "", &out, |_| ()).unwrap_err();
    assert_eq!((error.message.as_str(), written.count), ("the text has no tokens", 3));
    assert_eq!(std::fs::read(&out).unwrap(), b"a\0b\0c\0");
}

#[test]
fn a_corpus_is_written_whole_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let (good, bad) = (text_file(dir.path(), "a.txt", b"abc"), text_file(dir.path(), "b.txt", b"de\xff"));
    let out = dir.path().join("corpus.bin");
    let (seen, bytes) = (AtomicU64::new(0), Tokenizer::bytes());
    let add = |bytes| _ = seen.fetch_add(bytes, Ordering::Relaxed);
    let written = write_corpus(&texts(&[good.clone(), good.clone()]), &bytes, "", &out, add).unwrap();
    assert_eq!((written.count, written.vocab, &written.dtype[..], seen.into_inner()), (6, 256, "u16", 6));
    assert_eq!(Description::beside(&out).unwrap(), Some(written.clone()));
    let before = std::fs::read(&out).unwrap();
    assert_eq!(before, b"a\0b\0c\0a\0b\0c\0");
    let error = write_corpus(&texts(&[good.clone(), bad]), &bytes, "", &out, |_| ()).unwrap_err();
    assert_eq!((error.offset, error.file), (Some(2), Some(dir.path().join("b.txt"))));
    // What was there stays, and nothing is left behind.
    assert_eq!(std::fs::read(&out).unwrap(), before);
    assert_eq!(Description::beside(&out).unwrap(), Some(written));
    assert_eq!(names_in(dir.path()), ["a.txt", "b.txt", "corpus.bin", "corpus.bin.json"]);
    let nowhere = dir.path().join("missing/corpus.bin");
    let error = write_corpus(&texts(&[good]), &bytes, "", &nowhere, |_| ()).unwrap_err();
    assert!(error.message.contains("cannot be written") && error.file == Some(nowhere), "{error}");
}

#[cfg(feature = "tokenizers")]
mod library {
    use super::*;
    use crate::formats::testing::file;

    #[test]
    fn tokens_are_those_of_the_library_in_python() {
        let tokenizer = Tokenizer::open(&file("tokenizer.json")).unwrap();
        assert_eq!((tokenizer.vocab(), tokenizer.end_of_text()), (274, Some(0)));
        let expected = std::fs::read(file("tokenizer_expected.json")).unwrap();
        let expected: serde_json::Value = serde_json::from_slice(&expected).unwrap();
        for case in expected.as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let mut tokens = Vec::new();
            tokenizer.encode(text, &mut tokens).unwrap();
            assert_eq!(serde_json::json!(tokens), case["tokens"], "{text:?}");
            assert_eq!(tokenizer.decode(&tokens), text);
        }
    }

    #[test]
    fn training_depends_on_the_text_only() {
        let text: Vec<String> = (0..60).map(|i| format!("the {i}th cat sat on mat {}\n", i * i)).collect();
        let train = |text: &[String]| train(300, text.iter().map(|piece| Ok(piece.clone()))).unwrap();
        let first = train(&text);
        assert_eq!(first, train(&text));
        assert_eq!(first, train(&[text.concat()]));
        let tokenizer = Tokenizer::from_json(first.as_bytes()).unwrap();
        assert_eq!((tokenizer.vocab(), tokenizer.end_of_text()), (300, Some(0)));
        let (sample, mut tokens) = ("the cat: naïve 🦀 \t\n", Vec::new());
        tokenizer.encode(sample, &mut tokens).unwrap();
        assert_eq!(tokenizer.decode(&tokens), sample);
        assert!(tokens.len() < sample.len());
    }

    #[test]
    fn a_tokenizer_is_trained_on_files_and_makes_a_corpus_of_them() {
        let dir = tempfile::tempdir().unwrap();
        let files = ["a.txt", "b.txt"].map(|name| text_file(dir.path(), name, &b"the cat sat on the mat\n".repeat(50)));
        let (json, out) = (dir.path().join("tok.json"), dir.path().join("corpus.bin"));
        let seen = AtomicU64::new(0);
        let add = |bytes| _ = seen.fetch_add(bytes, Ordering::Relaxed);
        let files = texts(&files);
        let tokenizer = train_on(&files, 265, &json, add).unwrap();
        assert_eq!((tokenizer.vocab(), seen.into_inner()), (265, 2 * 50 * 23));
        let written = write_corpus(&files, &tokenizer, "tok.json", &out, |_| ()).unwrap();
        assert_eq!((written.vocab, &written.digest[..]), (265, tokenizer.digest()));
        // Every text ends with the token for it.
        let tokens: Vec<u32> =
            std::fs::read(&out).unwrap().as_chunks().0.iter().map(|two| u16::from_le_bytes(*two).into()).collect();
        assert_eq!(tokens.len() as u64, written.count);
        let text = "the cat sat on the mat\n".repeat(50) + END_OF_TEXT;
        assert_eq!(tokenizer.decode(&tokens), text.repeat(2));
        assert_eq!(names_in(dir.path()), ["a.txt", "b.txt", "corpus.bin", "corpus.bin.json", "tok.json"]);
        let error = train_on(&texts(&[text_file(dir.path(), "c.txt", b"\xff")]), 270, &json, |_| ()).unwrap_err();
        assert_eq!(error.offset, Some(0));
        assert_eq!(Tokenizer::open(&json).unwrap().digest(), tokenizer.digest());
    }

    /// An empty text is a text, and ends; a missing one is none.
    #[test]
    fn missing_texts_do_not_end() {
        let dir = tempfile::tempdir().unwrap();
        let table = text_file(dir.path(), "a.jsonl", b"{\"t\": \"the cat\"}\n{\"t\": null}\n{}\n{\"t\": \"\"}\n");
        let texts = TextSource::open(vec![table], Some("t"), &Settings::new("", "here")).unwrap();
        let (tokenizer, out) = (Tokenizer::open(&file("tokenizer.json")).unwrap(), dir.path().join("corpus.bin"));
        write_corpus(&texts, &tokenizer, "tok.json", &out, |_| ()).unwrap();
        let tokens: Vec<u32> =
            std::fs::read(&out).unwrap().as_chunks().0.iter().map(|two| u16::from_le_bytes(*two).into()).collect();
        assert_eq!(tokenizer.decode(&tokens), format!("the cat{END_OF_TEXT}{END_OF_TEXT}"));
    }

    #[test]
    fn training_ends_with_the_error_of_its_text() {
        let pieces = [Ok("some text".to_string()), Err(ReadError::new("bad", "hint")), Ok("more".into())];
        assert_eq!(train(300, pieces.into_iter()).unwrap_err().message, "bad");
        let error = train(100, std::iter::empty()).unwrap_err();
        assert!(error.message.contains("too small for all byte values"), "{error}");
    }

    #[test]
    fn tokens_are_written_in_order_by_any_number_of_threads() {
        let tokenizer = Tokenizer::open(&file("tokenizer.json")).unwrap();
        let text = "the rat sat on the cat\n".repeat(20_000);
        let mut written = Vec::new();
        let pieces = TextPieces::new(text.as_bytes(), Path::new("a.txt"));
        let count = tokenizer.write_tokens(pieces, &mut written).unwrap();
        let mut tokens = Vec::new();
        tokenizer.encode(&text, &mut tokens).unwrap();
        let expected: Vec<u8> = tokens.iter().flat_map(|token| (*token as u16).to_le_bytes()).collect();
        assert!(count == tokens.len() as u64 && written == expected);
        let pieces: Vec<String> = TextPieces::new(text.as_bytes(), Path::new("a")).map(Result::unwrap).collect();
        assert_eq!(tokenizer.encode_all(&pieces, 1).unwrap(), tokenizer.encode_all(&pieces, 3).unwrap());
    }

    #[test]
    fn damaged_tokenizers_are_refused() {
        let whole = std::fs::read(file("tokenizer.json")).unwrap();
        for len in (0..whole.len()).step_by(7) {
            assert!(Tokenizer::from_json(&whole[..len]).unwrap_err().message.contains("not a tokenizer"));
        }
        // The library panics on this one.
        let odd = String::from_utf8(whole.clone()).unwrap().replace("\"type\":\"ByteLevel\"", "\"type\":[]");
        assert!(Tokenizer::from_json(odd.as_bytes()).is_err());
        for at in (0..whole.len()).step_by(11) {
            let mut damaged = whole.clone();
            damaged[at] = b'9';
            if let Ok(tokenizer) = Tokenizer::from_json(&damaged) {
                let mut tokens = Vec::new();
                let _ = tokenizer.encode("the cat sat", &mut tokens);
                tokenizer.decode(&tokens);
            }
        }
    }
}
