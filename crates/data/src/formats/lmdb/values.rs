//! What the values of a column are, told from the first few. Values are read as members of WebDataset shards are, by the
//! ending that their contents would have as files.

use super::keys::PLAIN;
use crate::formats::webdataset::columns::{Part, part};
use crate::image::is_image;
use crate::record::{RecordColumn, UnreadColumn};

/// Names of columns whose texts are whole numbers, if the first ones are.
const LABELS: [&str; 7] = ["cls", "label", "labels", "class", "target", "index", "y"];

/// Of so many values, one may be something else than the others.
const BAD_TEXTS: usize = 8;

/// Whether this is what Python's `pickle` writes, of its second protocol or a later one.
fn is_pickled(bytes: &[u8]) -> bool {
    matches!(bytes, [0x80, 2..=5, .., b'.'])
}

/// Whether at most one of so many values is something else.
fn almost_all(count: usize, all: usize) -> bool {
    all > 0 && BAD_TEXTS * (all - count) <= all
}

/// The ending that files with these contents would have. More than half of the values must be images, arrays or objects, and
/// almost all of them text, if the column is to be that: what does not fit is an error when it is read.
fn ending(name: &str, first: &[Vec<u8>]) -> &'static str {
    let most = |is: fn(&[u8]) -> bool| 2 * first.iter().filter(|bytes| is(bytes)).count() > first.len();
    let texts: Vec<&str> = first.iter().filter_map(|bytes| str::from_utf8(bytes).ok()).collect();
    // Short values that are not text are often valid UTF-8 by chance.
    let are_texts = almost_all(texts.len(), first.len());
    let whole = texts.iter().filter(|text| text.trim().parse::<i64>().is_ok()).count();
    match () {
        () if most(is_image) => "png",
        () if most(|bytes| bytes.starts_with(b"\x93NUMPY")) => "npy",
        () if !are_texts => "bin",
        () if LABELS.contains(&name) && almost_all(whole, first.len()) => "cls",
        () if most(|bytes| bytes.trim_ascii_start().starts_with(b"{")) => "json",
        () => "txt",
    }
}

/// The first of the values that is a pickle, unless they are values of another kind with a bad one among them.
pub(super) fn first_pickle(name: &str, first: &[Vec<u8>]) -> Option<usize> {
    match ending(name, first) {
        "bin" => first.iter().position(|bytes| is_pickled(bytes)),
        _ => None,
    }
}

/// What the column `name` is, by its first values; its record columns are appended. Keys of JSON objects are columns, or are not
/// read.
pub(super) fn value(
    name: &str,
    first: &[Vec<u8>],
    columns: &mut Vec<RecordColumn>,
    unread: &mut Vec<UnreadColumn>,
) -> Part {
    let before = (columns.len(), unread.len());
    let part = part(ending(name, first), name, first, (columns, unread));
    if let (PLAIN, Part::Json(_)) = (name, &part) {
        let columns = columns[before.0..].iter_mut().map(|column| &mut column.name);
        for name in columns.chain(unread[before.1..].iter_mut().map(|column| &mut column.name)) {
            if let Some(key) = name.strip_prefix(PLAIN).and_then(|key| key.strip_prefix('.')) {
                *name = key.into();
            }
        }
    }
    part
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of which those `at` these places are `bad`.
    fn values(good: &[u8], bad: &[u8], at: &[usize]) -> Vec<Vec<u8>> {
        (0..16).map(|place| if at.contains(&place) { bad.to_vec() } else { good.to_vec() }).collect()
    }

    #[test]
    fn values_are_told_by_most_of_them() {
        let (png, npy) = (b"\x89PNG\r\n\x1a\n", b"\x93NUMPY");
        for (name, good, bad, places, expected) in [
            ("value", &png[..], &b"garbage"[..], &[0][..], "png"),
            ("value", png, b"\xff\xfe", &[0, 1, 2, 3, 4, 5, 6], "png"),
            ("value", npy, b"{", &[0, 9], "npy"),
            ("value", b"{}", b"\xff", &[0, 1], "json"),
            ("value", b"word", b"\xff", &[0, 7], "txt"),
            ("value", b"word", b"\xff", &[0, 7, 8], "bin"),
            ("label", b" 3\n", b"\xff", &[0], "cls"),
            ("label", b"3", b"three", &[0, 9], "cls"),
            ("label", b"3", b"three", &[0, 8, 9], "txt"),
            ("value", b"\xff", b"word", &[1, 2, 3, 4], "bin"),
        ] {
            assert_eq!(ending(name, &values(good, bad, places)), expected, "{good:?} {bad:?}");
        }
        assert_eq!(ending("value", &[]), "bin");
        let (mut columns, mut unread) = (Vec::new(), Vec::new());
        value(PLAIN, &[b"{\"a\": 1, \"value\": 2, \"b\": [1]}".to_vec()], &mut columns, &mut unread);
        assert_eq!(columns.iter().map(|column| &column.name[..]).collect::<Vec<_>>(), ["a", "value"]);
        assert_eq!(unread, [UnreadColumn { name: "b".into(), kind: "list".into() }]);
        let pickle = b"\x80\x04N.";
        assert_eq!(first_pickle("value", &values(b"\xff", pickle, &[3, 4])), Some(3));
        assert_eq!(first_pickle("value", &values(png, pickle, &[3])), None);
    }
}
