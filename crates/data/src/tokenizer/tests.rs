use super::*;
use std::path::PathBuf;

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
    fn training_ends_with_the_error_of_its_text() {
        let pieces = [Ok("some text".to_string()), Err(ReadError::new("bad", "hint")), Ok("more".into())];
        assert_eq!(train(300, pieces.into_iter()).unwrap_err().message, "bad");
        let error = train(100, std::iter::empty()).unwrap_err();
        assert!(error.message.contains("no place for all bytes"), "{error}");
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
            assert!(Tokenizer::from_json(&whole[..len]).unwrap_err().message.contains("no tokenizer"));
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
