//! JSON as Python writes it: with `NaN`, `Infinity` and `-Infinity`, which the standard does not have.
//!
//! The parser knows the standard only. Where it fails, these words are turned into texts that begin with a character that no text
//! has (U+10FFFE is set aside for use within programs), and [`not_finite`] knows them again.

use serde_json::Value;

const MARK: char = '\u{10fffe}';
const WORDS: [(&str, f32); 3] = [("NaN", f32::NAN), ("Infinity", f32::INFINITY), ("-Infinity", f32::NEG_INFINITY)];

/// What is wrong with a text that is no JSON.
#[derive(Debug)]
pub(super) struct NotJson {
    pub error: serde_json::Error,
    /// Bytes that the line with the error had become longer by, before the error.
    pub grown: usize,
}

/// Parses JSON.
pub(super) fn parse(bytes: &[u8]) -> Result<Value, NotJson> {
    let strict = match serde_json::from_slice(bytes) {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    let Some(marked) = marked(bytes) else { return Err(NotJson { error: strict, grown: 0 }) };
    serde_json::from_slice(&marked.bytes).map_err(|error| {
        let before = marked.words.iter().filter(|(line, column)| (*line, *column) < (error.line(), error.column()));
        let grown = before.filter(|(line, _)| *line == error.line()).count() * MARK_BYTES;
        NotJson { error, grown }
    })
}

/// What a word takes more as a text: two quotes and the mark.
const MARK_BYTES: usize = 2 + MARK.len_utf8();

struct Marked {
    bytes: Vec<u8>,
    /// Line and column, from 1, of every word in these bytes.
    words: Vec<(usize, usize)>,
}

/// The same with texts in the place of the words; `None` if there is none, or if the mark is in use.
fn marked(bytes: &[u8]) -> Option<Marked> {
    let mut mark = [0; 4];
    let mark = MARK.encode_utf8(&mut mark).as_bytes();
    if bytes.windows(mark.len()).any(|window| window == mark) {
        return None;
    }
    let (mut out, mut words) = (Vec::with_capacity(bytes.len() + 64), Vec::new());
    let (mut at, mut is_text, mut line, mut line_start) = (0, false, 1, 0);
    while at < bytes.len() {
        let rest = &bytes[at..];
        let word = match is_text {
            true => None,
            false => WORDS.iter().find(|(word, _)| rest.starts_with(word.as_bytes())),
        };
        if let Some((word, _)) = word {
            words.push((line, out.len() + 1 - line_start));
            out.push(b'"');
            out.extend_from_slice(mark);
            out.extend_from_slice(word.as_bytes());
            out.push(b'"');
            at += word.len();
            continue;
        }
        let taken = match rest {
            [b'\\', _, ..] if is_text => 2,
            _ => 1,
        };
        out.extend_from_slice(&rest[..taken]);
        match rest[0] {
            b'"' => is_text = !is_text,
            b'\n' => (line, line_start) = (line + 1, out.len()),
            _ => {}
        }
        at += taken;
    }
    (!words.is_empty()).then_some(Marked { bytes: out, words })
}

/// The number that a value is which JSON itself cannot say.
pub(super) fn not_finite(value: &Value) -> Option<f32> {
    let word = value.as_str()?.strip_prefix(MARK)?;
    WORDS.iter().find(|(known, _)| *known == word).map(|(_, number)| *number)
}

/// Whether there is no value: a null, or what stands for a missing number.
pub(super) fn is_missing(value: &Value) -> bool {
    value.is_null() || not_finite(value).is_some_and(f32::is_nan)
}

/// A value as JSON, in the words of the file.
pub(super) fn text_of(value: &Value) -> String {
    let text = value.to_string();
    match text.contains(MARK) {
        true => WORDS.iter().fold(text, |text, (word, _)| text.replace(&format!("\"{MARK}{word}\""), word)),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_python_are_numbers() {
        let parsed =
            parse(br#"{"a": NaN, "b": [1, -Infinity, Infinity], "c": "NaN \" Infinity", "d": {"e": NaN}}"#).unwrap();
        assert!(not_finite(&parsed["a"]).unwrap().is_nan() && is_missing(&parsed["a"]));
        assert_eq!(not_finite(&parsed["b"][1]), Some(f32::NEG_INFINITY));
        assert_eq!((not_finite(&parsed["b"][2]), is_missing(&parsed["b"][2])), (Some(f32::INFINITY), false));
        assert_eq!((parsed["c"].as_str(), not_finite(&parsed["c"])), (Some("NaN \" Infinity"), None));
        assert_eq!(text_of(&parsed["b"]), "[1,-Infinity,Infinity]");
        assert_eq!(text_of(&parse(b"[NaN, \"x\"]").unwrap()), "[NaN,\"x\"]");
    }

    #[test]
    fn errors_stay_where_they_are() {
        for (text, column) in [("[NaN, x]", 7), ("[nan]", 3), ("[NaN, Infinity, 1", 17), ("{\"a\": NaNs}", 10)] {
            let wrong = parse(text.as_bytes()).unwrap_err();
            assert_eq!(wrong.error.column() - wrong.grown, column, "{text}");
        }
        let lines = parse(b"[NaN,\nNaN,\n NaN, x]").unwrap_err();
        assert_eq!((lines.error.line(), lines.error.column() - lines.grown), (3, 7));
        // A text with the mark is left alone.
        assert!(parse("[NaN, \"\u{10fffe}NaN\"]".as_bytes()).is_err());
    }
}
