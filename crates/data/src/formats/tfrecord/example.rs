//! The protocol buffer `tf.train.Example`: features by name, each a list of bytes, floats or whole numbers. And
//! `tf.train.SequenceExample`, whose context is the same, with lists of features by name beside it: one per step.
//!
//! Only what is needed of the wire format, borrowed from the record: nothing is allocated but what the values take, which
//! is bounded by the record's bytes.

/// The fields of a feature, by the type of their values.
const BYTES: u64 = 1;
const FLOATS: u64 = 2;
const INTS: u64 = 3;

/// The values of a feature, not yet parsed: the feature from where its lists of this type begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum FeatureList<'r> {
    Bytes(&'r [u8]),
    Floats(&'r [u8]),
    Ints(&'r [u8]),
    /// Of a sequence: the list of features, one per step.
    Steps(&'r [u8]),
    /// A feature without any list.
    Empty,
}

/// Why a record is no example: what, and where in the record it stands.
#[derive(Debug, PartialEq)]
pub(super) struct Malformed {
    pub what: &'static str,
    /// How many bytes before the end of the record.
    pub before_end: usize,
}

type Parsed<T> = Result<T, Malformed>;

/// One field of a message: its number, and its value by wire type.
enum Value<'r> {
    Number(u64),
    Fixed64,
    Fixed32(u32),
    Bytes(&'r [u8]),
}

/// A message that is read field by field. `after` is what of the record follows it, for the place of an error.
struct Message<'r> {
    rest: &'r [u8],
    after: usize,
}

impl<'r> Message<'r> {
    fn wrong(&self, what: &'static str) -> Malformed {
        Malformed { what, before_end: self.rest.len() + self.after }
    }

    fn varint(&mut self) -> Parsed<u64> {
        let mut value = 0u64;
        for at in 0..10 {
            let byte = *self.rest.get(at).ok_or_else(|| self.wrong("a number is truncated"))?;
            value |= u64::from(byte & 0x7f) << (7 * at);
            if byte < 0x80 {
                self.rest = &self.rest[at + 1..];
                return Ok(value);
            }
        }
        Err(self.wrong("a number has more than 64 bits"))
    }

    fn take(&mut self, count: u64) -> Parsed<&'r [u8]> {
        match usize::try_from(count).ok().and_then(|count| self.rest.split_at_checked(count)) {
            Some((head, rest)) => {
                self.rest = rest;
                Ok(head)
            }
            None => Err(self.wrong("a length runs past the end")),
        }
    }

    /// The next field, or `None` at the end.
    fn next(&mut self) -> Parsed<Option<(u64, Value<'r>)>> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Value::Number(self.varint()?),
            1 => self.take(8).map(|_| Value::Fixed64)?,
            2 => {
                let length = self.varint()?;
                Value::Bytes(self.take(length)?)
            }
            5 => {
                let bytes = self.take(4)?;
                Value::Fixed32(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            }
            _ => return Err(self.wrong("a field has an unknown type")),
        };
        Ok(Some((tag >> 3, value)))
    }

    /// Calls `found` with each message in field `number`, and with what follows it in the record.
    fn each(mut self, number: u64, mut found: impl FnMut(Message<'r>) -> Parsed<()>) -> Parsed<()> {
        while let Some((field, value)) = self.next()? {
            if let (true, Value::Bytes(bytes)) = (field == number, value) {
                found(Message { rest: bytes, after: self.rest.len() + self.after })?;
            }
        }
        Ok(())
    }
}

/// The features of an example, or of the context of a sequence; and the lists of features of a sequence.
const FEATURES: u64 = 1;
const SEQUENCES: u64 = 2;

/// Calls `found` with the name and the list of every feature of the example in `record`, and of every sequence in it.
pub(super) fn features<'r>(
    record: &'r [u8],
    mut found: impl FnMut(&'r [u8], FeatureList<'r>) -> Parsed<()>,
) -> Parsed<()> {
    let mut example = Message { rest: record, after: 0 };
    while let Some((part, value)) = example.next()? {
        let (FEATURES | SEQUENCES, Value::Bytes(features)) = (part, value) else { continue };
        let features = Message { rest: features, after: example.rest.len() + example.after };
        features.each(1, |mut entry| {
            let (mut name, mut list) = (&[][..], FeatureList::Empty);
            while let Some((field, value)) = entry.next()? {
                match (field, value) {
                    (1, Value::Bytes(bytes)) => name = bytes,
                    (2, Value::Bytes(bytes)) if part == SEQUENCES => list = FeatureList::Steps(bytes),
                    (2, Value::Bytes(bytes)) => {
                        list = feature(Message { rest: bytes, after: entry.rest.len() + entry.after })?;
                    }
                    _ => {}
                }
            }
            found(name, list)
        })?;
    }
    Ok(())
}

/// Calls `found` with the list of every step of a sequence.
pub(super) fn steps_of<'r>(steps: &'r [u8], mut found: impl FnMut(FeatureList<'r>) -> Parsed<()>) -> Parsed<()> {
    Message { rest: steps, after: 0 }.each(1, |step| found(feature(step)?))
}

/// Of lists of several types the last counts, and of one type all, one behind the other: so are messages merged.
fn feature(mut feature: Message<'_>) -> Parsed<FeatureList<'_>> {
    let (whole, mut kind, mut start) = (feature.rest, 0, 0);
    loop {
        let at = whole.len() - feature.rest.len();
        match feature.next()? {
            None => break,
            Some((field @ (BYTES | FLOATS | INTS), Value::Bytes(_))) if field != kind => (kind, start) = (field, at),
            Some(_) => {}
        }
    }
    let lists = &whole[start..];
    Ok(match kind {
        BYTES => FeatureList::Bytes(lists),
        FLOATS => FeatureList::Floats(lists),
        INTS => FeatureList::Ints(lists),
        _ => FeatureList::Empty,
    })
}

/// The lists in field `number` of a feature. Where values in them are wrong is told from the start of the lists only.
fn each_list<'r>(feature: &'r [u8], number: u64, mut found: impl FnMut(Message<'r>) -> Parsed<()>) -> Parsed<()> {
    Message { rest: feature, after: 0 }.each(number, |list| found(Message { rest: list.rest, after: 0 }))
}

/// Calls `found` with each value of lists of bytes.
pub(super) fn bytes_of<'r>(feature: &'r [u8], mut found: impl FnMut(&'r [u8])) -> Parsed<()> {
    each_list(feature, BYTES, |list| {
        list.each(1, |value| {
            found(value.rest);
            Ok(())
        })
    })
}

/// Appends the values of lists of floats, packed or not.
pub(super) fn floats_of(feature: &[u8], out: &mut Vec<f32>) -> Parsed<()> {
    each_list(feature, FLOATS, |mut list| {
        while let Some((field, value)) = list.next()? {
            match (field, value) {
                (1, Value::Fixed32(bits)) => out.push(f32::from_bits(bits)),
                (1, Value::Bytes(packed)) => {
                    let (values, rest) = packed.as_chunks::<4>();
                    if !rest.is_empty() {
                        return Err(list.wrong("floats are cut off"));
                    }
                    out.extend(values.iter().map(|value| f32::from_le_bytes(*value)));
                }
                _ => {}
            }
        }
        Ok(())
    })
}

/// Appends the values of lists of whole numbers, packed or not.
pub(super) fn ints_of(feature: &[u8], out: &mut Vec<i64>) -> Parsed<()> {
    each_list(feature, INTS, |mut list| {
        while let Some((field, value)) = list.next()? {
            match (field, value) {
                (1, Value::Number(value)) => out.push(value as i64),
                (1, Value::Bytes(packed)) => {
                    let mut packed = Message { rest: packed, after: list.rest.len() };
                    while !packed.rest.is_empty() {
                        out.push(packed.varint()? as i64);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    })
}
