//! Text that is not in UTF-8, told from damage.

use crate::error::ReadError;
use crate::files::Contents;
use std::path::Path;

/// Bytes that are looked at.
const LOOKED_AT_BYTES: usize = 64;
const HINT_16: &str = "convert it first: `iconv -f UTF-16 -t UTF-8 IN > OUT`";
/// What to do about text that is not UTF-8, and nobody says what it is.
pub(super) const HINT: &str = "convert the file to UTF-8 first, such as with `iconv -f ISO-8859-1 -t UTF-8 IN > OUT`";

/// Refuses text in UTF-16, whose bytes are no lines.
pub(super) fn refuse_utf16(path: &Path, head: &[u8]) -> Result<(), ReadError> {
    match is_utf16(head) {
        true => Err(ReadError::new("it is text in UTF-16, not in UTF-8", HINT_16).in_file(path).at(0)),
        false => Ok(()),
    }
}

/// The same for a file.
pub(super) fn refuse_utf16_in(contents: &Contents) -> Result<(), ReadError> {
    let mut head = Vec::new();
    contents.read_into(0, contents.bytes().min(LOOKED_AT_BYTES as u64), &mut head)?;
    refuse_utf16(contents.path(), &head)
}

/// With a byte order mark, or of characters that all have one byte that is zero.
fn is_utf16(head: &[u8]) -> bool {
    let head = &head[..head.len().min(LOOKED_AT_BYTES)];
    let pairs = head.as_chunks::<2>().0;
    let all = |is: fn(&[u8; 2]) -> bool| pairs.len() >= 2 && pairs.iter().all(is);
    head.starts_with(&[0xFF, 0xFE])
        || head.starts_with(&[0xFE, 0xFF])
        || all(|[low, high]| *low != 0 && *high == 0)
        || all(|[high, low]| *low != 0 && *high == 0)
}

/// Where the first byte is that is not UTF-8.
pub(super) fn first_bad(text: &[u8]) -> u64 {
    std::str::from_utf8(text).map_or_else(|error| error.valid_up_to(), |_| 0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Format;
    use crate::formats::testing::{open_bytes, open_stream, read_error};
    use crate::formats::{csv, jsonl, text};

    #[test]
    fn utf16_is_told_with_a_mark_and_without() {
        let encoded = |big: bool, mark: bool, text: &str| -> Vec<u8> {
            let units = mark.then_some(0xFEFF).into_iter().chain(text.encode_utf16());
            units.flat_map(|unit| if big { unit.to_be_bytes() } else { unit.to_le_bytes() }).collect()
        };
        let formats: [(&Format, &str); 3] =
            [(&csv::FORMAT, "a,b\n1,2\n"), (&jsonl::FORMAT, "{\"a\": 1}\n"), (&text::FORMAT, "Some words\n")];
        for (format, text) in formats {
            for (big, mark) in [(false, false), (false, true), (true, false), (true, true)] {
                let (dir, opened) = open_bytes(format, &encoded(big, mark, text), &[]);
                let mut errors = vec![read_error(opened)];
                if format.name != "text" {
                    let path = dir.path().join(format!("file.{}", format.extensions[0]));
                    errors.push(read_error(open_stream(&path, &[])));
                }
                for error in errors {
                    assert_eq!((&error.message[..], error.offset), ("it is text in UTF-16, not in UTF-8", Some(0)));
                    assert!(error.hint.contains("iconv"), "{error}");
                }
            }
        }
        for head in [&b""[..], b"a", b"a\0", b"ab", b"a,b\n", b"\0\0\0\0", "é\0".as_bytes()] {
            assert!(!is_utf16(head), "{head:?}");
        }
    }
}
