//! What a rank says of itself when it joins: the job it was given, key by key, and what it does in it.
//!
//! Ranks that were given different jobs would train on and come to weights that mean nothing. So the coordinator compares
//! what they say before any of them starts, and names the first key that differs, with both values.

use crate::codec::{ReadMessage, Writer};
use crate::elastic::ElasticOptions;
use kolo_base::ByteReader;

/// Most keys of a manifest, and most bytes of all of them; what goes beyond is compared by its digest.
const KEYS_MAX: usize = 1024;
const BYTES_MAX: usize = 48 << 10;
/// Longest key or value as it is shown; of a longer one, the beginning and a digest.
const SHOWN_BYTES_MAX: usize = 160;

/// What all ranks of a job must agree on, in an order that depends on the contents only. An empty one has no opinion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest(Vec<(String, String)>);

/// What a rank says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Introduction {
    pub manifest: Manifest,
    /// What it is in the job if it is no plain worker, such as `server 0`.
    pub role: Option<String>,
    /// What makes the job elastic, if it is. It stays with this process, which may be the one that coordinates.
    pub elastic: Option<ElasticOptions>,
    /// Why it cannot take part. It joins to say so, and no rank waits for it.
    pub failure: Option<String>,
}

impl Manifest {
    pub fn new(entries: impl IntoIterator<Item = (String, String)>) -> Self {
        let (mut kept, mut bytes) = (Vec::new(), 0);
        let mut rest: Option<blake3::Hasher> = None;
        for (key, value) in entries {
            let (key, value) = (shortened(&key), shortened(&value));
            bytes += key.len() + value.len();
            if kept.len() < KEYS_MAX && bytes <= BYTES_MAX {
                kept.push((key, value));
            } else {
                rest.get_or_insert_default().update(format!("{key}\n{value}\n").as_bytes());
            }
        }
        kept.extend(rest.map(|rest| ("further keys".to_string(), rest.finalize().to_hex().to_string())));
        Self(kept)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn value(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str())
    }

    /// The first key on which two differ, and its value in each.
    pub fn difference<'a>(&'a self, other: &'a Self) -> Option<(&'a str, Option<&'a str>, Option<&'a str>)> {
        let differs = |key: &&str| self.value(key) != other.value(key);
        let keys = self.0.iter().chain(&other.0).map(|(key, _)| key.as_str());
        keys.into_iter().find(differs).map(|key| (key, self.value(key), other.value(key)))
    }

    pub(crate) fn write(&self, out: &mut Writer) {
        out.u32(self.0.len() as u32);
        for (key, value) in &self.0 {
            out.text(key);
            out.text(value);
        }
    }

    pub(crate) fn read(body: &mut ByteReader<'_>) -> Option<Self> {
        let count = body.u32()? as usize;
        if count > KEYS_MAX + 1 {
            return None;
        }
        (0..count).map(|_| Some((body.text()?, body.text()?))).collect::<Option<_>>().map(Self)
    }
}

/// The text itself, or its beginning with a digest of the whole.
fn shortened(text: &str) -> String {
    if text.len() <= SHOWN_BYTES_MAX {
        return text.into();
    }
    let end = (0..=SHOWN_BYTES_MAX / 2).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    format!("{}… ({} bytes, blake3 {})", &text[..end], text.len(), &blake3::hash(text.as_bytes()).to_hex()[..16])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(pairs: &[(&str, &str)]) -> Manifest {
        Manifest::new(pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())))
    }

    #[test]
    fn the_first_key_that_differs_is_found() {
        let one = manifest(&[("kind", "adamw"), ("beta1", "0.9"), ("seed", "1")]);
        assert_eq!(one.difference(&one.clone()), None);
        let other = manifest(&[("kind", "sgd"), ("momentum", "0.9"), ("seed", "2")]);
        assert_eq!(one.difference(&other), Some(("kind", Some("adamw"), Some("sgd"))));
        let more = manifest(&[("kind", "adamw"), ("beta1", "0.9"), ("seed", "1"), ("clip", "1.0")]);
        assert_eq!(one.difference(&more), Some(("clip", None, Some("1.0"))));
    }

    #[test]
    fn long_texts_and_many_keys_stay_short_and_still_differ() {
        let long = |end: &str| manifest(&[("name", &format!("{}{end}", "ü".repeat(90_000)))]);
        let [one, other] = ["a", "b"].map(long);
        assert!(one.difference(&other).is_some() && one.0[0].1.len() < 200, "{one:?}");
        let many = |last: usize| {
            Manifest::new((0..5000).map(|at| (format!("key {at}"), if at == 4999 { last } else { at }.to_string())))
        };
        let (one, other) = (many(1), many(2));
        assert_eq!(one.difference(&other).map(|(key, ..)| key), Some("further keys"));
        let mut out = Writer(Vec::new());
        one.write(&mut out);
        assert!(out.0.len() < BYTES_MAX + 8 * KEYS_MAX + 200);
        assert_eq!(Manifest::read(&mut ByteReader::new(&out.0)), Some(one));
    }
}
