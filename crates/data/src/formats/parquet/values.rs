//! Values of decoded columns as numbers, text and bytes.

use super::table::{Column, Kind, Number, Values, Words, bit};
use crate::record::narrowed;
use half::f16;
use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Numbers {
    Int,
    Real,
}

const WRONG_TYPE: &str = "it is not of the type that the file names";

/// Which numbers a type holds, if it holds numbers.
pub(super) fn numbers(kind: &Kind) -> Option<Numbers> {
    match kind {
        Kind::Bool | Kind::Number(Number::Int { .. }) => Some(Numbers::Int),
        Kind::Number(Number::Float { .. }) => Some(Numbers::Real),
        _ => None,
    }
}

/// A type in a few words: nested ones would fill a screen.
pub(super) fn short(kind: &Kind) -> String {
    let text = kind.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn check_range(column: &Column, range: &Range<usize>) -> Result<(), String> {
    if range.end > column.len || range.start > range.end {
        return Err(format!("elements {} to {} were requested, but there are {}", range.start, range.end, column.len));
    }
    match column.has_null(range.clone()) {
        true => Err("the list contains a null".into()),
        false => Ok(()),
    }
}

/// Appends numbers of `N` bytes each.
fn extend_raw<const N: usize, T>(
    bytes: &[u8],
    range: Range<usize>,
    out: &mut Vec<T>,
    convert: impl Fn([u8; N]) -> T,
) -> Result<(), String> {
    let numbers = bytes.as_chunks::<N>().0.get(range).ok_or(WRONG_TYPE)?;
    out.extend(numbers.iter().map(|number| convert(*number)));
    Ok(())
}

fn extend_unsigned(values: impl Iterator<Item = u64>, out: &mut Vec<i64>) -> Result<(), String> {
    for value in values {
        out.push(i64::try_from(value).map_err(|_| format!("{value} is larger than {}", i64::MAX))?);
    }
    Ok(())
}

fn extend_narrowed(values: impl ExactSizeIterator<Item = f64>, out: &mut Vec<f32>) -> Result<(), String> {
    out.reserve(values.len());
    for value in values {
        out.push(narrowed(value).map_err(|value| format!("it has {value}"))?);
    }
    Ok(())
}

/// Appends elements of a column of whole numbers or booleans.
pub(super) fn extend_ints(column: &Column, range: Range<usize>, out: &mut Vec<i64>) -> Result<(), String> {
    check_range(column, &range)?;
    match &column.values {
        Values::Ints(values) => out.extend_from_slice(values.get(range).ok_or(WRONG_TYPE)?),
        Values::Unsigned(values) => extend_unsigned(values.get(range).ok_or(WRONG_TYPE)?.iter().copied(), out)?,
        Values::Bits(bits) => out.extend(range.map(|at| i64::from(bit(bits, at)))),
        Values::Raw(Number::Int { bits, signed }, bytes) => match (bits, signed) {
            (8, true) => extend_raw(bytes, range, out, |[byte]| i64::from(byte as i8))?,
            (8, false) => extend_raw(bytes, range, out, |[byte]| i64::from(byte))?,
            (16, true) => extend_raw(bytes, range, out, |bytes| i64::from(i16::from_le_bytes(bytes)))?,
            (16, false) => extend_raw(bytes, range, out, |bytes| i64::from(u16::from_le_bytes(bytes)))?,
            (32, true) => extend_raw(bytes, range, out, |bytes| i64::from(i32::from_le_bytes(bytes)))?,
            (32, false) => extend_raw(bytes, range, out, |bytes| i64::from(u32::from_le_bytes(bytes)))?,
            (64, true) => extend_raw(bytes, range, out, i64::from_le_bytes)?,
            (64, false) => {
                let numbers = bytes.as_chunks().0.get(range).ok_or(WRONG_TYPE)?;
                extend_unsigned(numbers.iter().map(|bytes| u64::from_le_bytes(*bytes)), out)?;
            }
            _ => return Err(WRONG_TYPE.into()),
        },
        _ => return Err(WRONG_TYPE.into()),
    }
    Ok(())
}

/// Appends elements of a column of real numbers.
pub(super) fn extend_reals(column: &Column, range: Range<usize>, out: &mut Vec<f32>) -> Result<(), String> {
    check_range(column, &range)?;
    match &column.values {
        Values::Reals(values) => out.extend_from_slice(values.get(range).ok_or(WRONG_TYPE)?),
        Values::Doubles(values) => extend_narrowed(values.get(range).ok_or(WRONG_TYPE)?.iter().copied(), out)?,
        Values::Raw(Number::Float { bits }, bytes) => match bits {
            16 => extend_raw(bytes, range, out, |bytes| f16::from_le_bytes(bytes).to_f32())?,
            32 => extend_raw(bytes, range, out, f32::from_le_bytes)?,
            64 => {
                let numbers = bytes.as_chunks().0.get(range).ok_or(WRONG_TYPE)?;
                extend_narrowed(numbers.iter().map(|bytes| f64::from_le_bytes(*bytes)), out)?;
            }
            _ => return Err(WRONG_TYPE.into()),
        },
        _ => return Err(WRONG_TYPE.into()),
    }
    Ok(())
}

/// The column of a list's items and the range of those of one row.
fn list_items(column: &Column, row: usize) -> Option<(&Column, Range<usize>)> {
    match &column.values {
        Values::List(offsets, items) if row < column.len => Some((items, offsets.range(row)?)),
        _ => None,
    }
}

fn is_list(column: &Column) -> bool {
    matches!(column.values, Values::List(..))
}

/// The sizes of the lists of one row: of the first list at every depth. `None` if an empty list hides the sizes below it.
pub(super) fn shape(column: &Column, row: usize) -> Option<Vec<usize>> {
    let (mut column, mut row, mut shape) = (column, row, Vec::new());
    while is_list(column) {
        let (items, range) = list_items(column, row)?;
        shape.push(range.len());
        if range.is_empty() && is_list(items) {
            return None;
        }
        (column, row) = (items, range.start);
    }
    Some(shape)
}

/// The numbers of one row's lists, which must have this shape.
pub(super) fn items<'c>(column: &'c Column, row: usize, shape: &[usize]) -> Result<(&'c Column, Range<usize>), String> {
    let (mut column, mut rows) = (column, row..row + 1);
    for (depth, size) in shape.iter().enumerate() {
        let (start, mut end) = match rows.is_empty() {
            true => (0, 0),
            false => {
                let (_, first) = list_items(column, rows.start).ok_or("a list is expected")?;
                (first.start, first.start)
            }
        };
        let mut below = None;
        for row in rows {
            if column.is_null(row) {
                return Err("the list contains a null".into());
            }
            let (items, range) = list_items(column, row).ok_or("a list is expected")?;
            if range.len() != *size {
                let found = range.len();
                let wanted = format!("a list has {found} values, but the first record has {size}");
                return Err(if depth == 0 { wanted } else { format!("{wanted} (depth {depth})") });
            }
            if range.start != end {
                return Err("its lists do not follow each other".into());
            }
            (end, below) = (range.end, Some(items));
        }
        rows = start..end;
        match below {
            Some(items) => column = items,
            None => return Err("a list is expected".into()),
        }
    }
    match is_list(column) {
        true => Err("the first records have empty lists only, so the shape is not known".into()),
        false => Ok((column, rows)),
    }
}

/// The value of a dictionary that a row has: the column that holds it, and its row there.
fn word<'c>(keys: &Column, words: &'c Words, row: usize) -> Option<(&'c Column, usize)> {
    let mut key = Vec::new();
    extend_ints(keys, row..row + 1, &mut key).ok()?;
    words.find(usize::try_from(*key.first()?).ok()?)
}

/// Whether a row has no value: it is null itself, or its key is that of a null.
pub(super) fn is_null(column: &Column, row: usize) -> bool {
    match &column.values {
        Values::Dictionary(keys, words) if !column.is_null(row) => {
            word(keys, words, row).is_some_and(|(words, at)| words.is_null(at))
        }
        _ => column.is_null(row),
    }
}

/// The text of one row, if it is text.
pub(super) fn text(column: &Column, row: usize) -> Option<&str> {
    let (column, row) = match &column.values {
        Values::Dictionary(keys, words) => word(keys, words, row)?,
        _ => (column, row),
    };
    std::str::from_utf8(bytes(column, row)?).ok()
}

/// The bytes of one row, if it has some.
pub(super) fn bytes(column: &Column, row: usize) -> Option<&[u8]> {
    match &column.values {
        Values::Parts(parts) => parts.get(row).map(|part| part.data()),
        Values::Joined(offsets, bytes) if row < column.len => bytes.get(offsets.range(row)?),
        Values::Views(views, buffers) => view(views, buffers, row),
        _ => None,
    }
}

/// Short values stand in the view itself; that of a long one has its first four bytes, its buffer and the offset there.
fn view<'c>(views: &'c [u8], buffers: &'c [bytes::Bytes], row: usize) -> Option<&'c [u8]> {
    const SHORT_BYTES_MAX: usize = 12;
    let view = views.as_chunks::<16>().0.get(row)?;
    let word = |at: usize| Some(usize::try_from(i32::from_le_bytes(*view.get(at..)?.first_chunk()?)).ok());
    let len = word(0)??;
    if len <= SHORT_BYTES_MAX {
        return view.get(4..4 + len);
    }
    let (buffer, start) = (word(8)??, word(12)??);
    buffers.get(buffer)?.get(start..start.checked_add(len)?)
}

#[cfg(test)]
mod tests {
    use super::super::table::{Offsets, Validity};
    use super::*;
    use bytes::Bytes;

    fn column(len: usize, values: Values) -> Column {
        Column { len, validity: Validity::All, values }
    }

    #[test]
    fn numbers_of_every_size_keep_their_sign() {
        let bytes = Bytes::from_static(&[0xFF; 16]);
        let ints = |bits: u8, signed: bool, len: usize| {
            let mut out = Vec::new();
            let values = Values::Raw(Number::Int { bits, signed }, bytes.clone());
            extend_ints(&column(len, values), 0..2, &mut out).map(|()| out[1])
        };
        for bits in [8, 16, 32, 64] {
            assert_eq!(ints(bits, true, 2), Ok(-1));
        }
        assert_eq!(
            (ints(8, false, 2), ints(16, false, 2), ints(32, false, 2)),
            (Ok(255), Ok(65535), Ok(u32::MAX.into()))
        );
        assert_eq!(ints(64, false, 2), Err(format!("{} is larger than {}", u64::MAX, i64::MAX)));
        // A column that claims more rows than its bytes hold.
        let values = Values::Raw(Number::Int { bits: 64, signed: true }, bytes.clone());
        assert!(extend_ints(&column(9, values), 0..9, &mut Vec::new()).is_err());
        assert!(ints(8, true, 1).unwrap_err().contains("elements 0 to 2 were requested, but there are 1"));
    }

    #[test]
    fn reals_beyond_32_bits_are_told_and_infinite_ones_stay() {
        let read = |values: Vec<f64>| {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
            let raw = Values::Raw(Number::Float { bits: 64 }, bytes.into());
            [Values::Doubles(values), raw].map(|values| {
                let mut out = Vec::new();
                extend_reals(&column(2, values), 0..2, &mut out).map(|()| out)
            })
        };
        let infinite = read(vec![f64::INFINITY, 0.1]);
        assert_eq!(infinite, [Ok(vec![f32::INFINITY, 0.1]), Ok(vec![f32::INFINITY, 0.1])]);
        for result in read(vec![1.0, -1e300]) {
            assert_eq!(result, Err("it has -1e300, which is too large for 32 bits".into()));
        }
    }

    #[test]
    fn views_are_checked_before_they_are_followed() {
        let view = |len: i32, buffer: i32, start: i32| {
            let words = [len, i32::from_le_bytes(*b"abcd"), buffer, start];
            let views: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            let buffers = vec![Bytes::from_static(b"0123456789abcdefghij")];
            text(&column(1, Values::Views(views.into(), buffers)), 0).map(String::from)
        };
        assert_eq!(view(4, 0, 0).as_deref(), Some("abcd"));
        assert_eq!(view(13, 0, 7).as_deref(), Some("789abcdefghij"));
        for (len, buffer, start) in
            [(14, 0, 7), (13, 1, 0), (13, -1, 0), (13, 0, -1), (-1, 0, 0), (i32::MAX, 0, i32::MAX)]
        {
            assert_eq!(view(len, buffer, start), None);
        }
    }

    #[test]
    fn dictionaries_in_parts_are_one() {
        let part = |words: &'static str, offsets: Vec<usize>| {
            column(offsets.len() - 1, Values::Joined(Offsets::Words(offsets), Bytes::from_static(words.as_bytes())))
        };
        let keys =
            column(5, Values::Raw(Number::Int { bits: 8, signed: true }, Bytes::from_static(&[2, 0, 1, 3, 0xFF])));
        let mut words = Words::default();
        words.push(part("abb", vec![0, 1, 3]));
        words.push(part("", vec![0]));
        let with_null = part("ccc", vec![0, 3, 3]);
        words.push(Column { validity: Validity::Flags(vec![true, false]), ..with_null });
        let column = column(5, Values::Dictionary(Box::new(keys), words.into()));
        let read: Vec<Option<&str>> = (0..6).map(|row| text(&column, row)).collect();
        assert_eq!(read, [Some("ccc"), Some("a"), Some("bb"), Some(""), None, None]);
        let nulls: Vec<bool> = (0..6).map(|row| is_null(&column, row)).collect();
        assert_eq!(nulls, [false, false, false, true, false, true]);
    }

    #[test]
    fn text_must_be_text() {
        let joined = |bytes: &'static [u8]| column(1, Values::Joined(Offsets::Fixed(2), Bytes::from_static(bytes)));
        assert_eq!(text(&joined("ř".as_bytes()), 0), Some("ř"));
        assert_eq!(
            (text(&joined(&[0xC5, 0x41]), 0), text(&joined(b"a"), 0), text(&joined(b"aabb"), 1)),
            (None, None, None)
        );
    }
}
