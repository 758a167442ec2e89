//! Rows in bytes: the records of one decoded batch behind each other, in memory or in a temporary file.
//!
//! A columnar batch is decoded as a whole and read row by row in any order, so its values are put side by side once. A row
//! that could not be understood is kept as the error it gives, so that only its own sample fails.

use crate::error::ReadError;
use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use kolo_base::ByteReader;

const MISSING: u8 = 0;
const BYTES: u8 = 1;
const TEXT: u8 = 2;
const REALS: u8 = 3;
const INTS: u8 = 4;
/// Starts a row that is an error; nothing but its offset and its message follow.
const BROKEN: u8 = 5;
/// The offset of an error that has none.
const NOWHERE: u64 = u64::MAX;

/// Numbers of one value of this column.
pub(crate) fn elements(kind: &RecordKind) -> usize {
    match kind {
        RecordKind::Pixels { shape } | RecordKind::Real { shape } | RecordKind::Int { shape, .. } => {
            shape.iter().product()
        }
        RecordKind::Class { .. } => 1,
        RecordKind::Image | RecordKind::Text | RecordKind::Bytes => 0,
    }
}

/// Appends a row. Numbers have the column's shape: no length is stored for them.
pub(crate) fn push(record: &Record, columns: usize, out: &mut Vec<u8>) {
    for column in 0..columns {
        match record.value(column) {
            RecordValue::Missing => out.push(MISSING),
            RecordValue::Bytes(bytes) => sized(BYTES, bytes, out),
            RecordValue::Text(text) => sized(TEXT, text.as_bytes(), out),
            RecordValue::Reals(values) => {
                out.push(REALS);
                values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
            }
            RecordValue::Ints(values) => {
                out.push(INTS);
                values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
            }
        }
    }
}

/// The numbers of a column, one per row.
#[derive(Debug)]
pub(crate) enum NumberColumn {
    Reals(Vec<f32>),
    Ints(Vec<i64>),
}

/// Appends row number `row` of columns of numbers, as [`push`] would.
pub(crate) fn push_numbers(columns: &[NumberColumn], row: usize, out: &mut Vec<u8>) {
    for column in columns {
        match column {
            NumberColumn::Reals(values) => {
                let [a, b, c, d] = values[row].to_le_bytes();
                out.extend_from_slice(&[REALS, a, b, c, d]);
            }
            NumberColumn::Ints(values) => {
                out.push(INTS);
                out.extend_from_slice(&values[row].to_le_bytes());
            }
        }
    }
}

/// Appends a row that could not be understood, with the byte near which it stands, if that is known.
pub(crate) fn push_broken(message: &str, offset: Option<u64>, out: &mut Vec<u8>) {
    out.push(BROKEN);
    out.extend_from_slice(&offset.unwrap_or(NOWHERE).to_le_bytes());
    out.extend_from_slice(message.as_bytes());
}

fn sized(tag: u8, bytes: &[u8], out: &mut Vec<u8>) {
    out.push(tag);
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// Reads a row that [`push`] made. The bytes are our own, yet they come from a disk: an error, never a panic.
pub(crate) fn pull(row: &[u8], columns: &[RecordColumn], record: &mut Record) -> Result<(), ReadError> {
    if let [BROKEN, broken @ ..] = row
        && let Some((offset, message)) = broken.split_first_chunk()
    {
        let hint = "choose other columns with `data.inputs`, or write `on_error = \"skip\"`";
        let offset = Some(u64::from_le_bytes(*offset)).filter(|offset| *offset != NOWHERE);
        return Err(ReadError { offset, ..ReadError::new(String::from_utf8_lossy(message), hint) });
    }
    let mut row = ByteReader::new(row);
    for (at, column) in columns.iter().enumerate() {
        let pulled = pull_value(&mut row, elements(&column.kind), at, record);
        pulled.ok_or_else(|| {
            ReadError::new("the temporary file of decoded rows is damaged", "check the disk that holds it")
        })?;
    }
    Ok(())
}

fn pull_value(row: &mut ByteReader<'_>, elements: usize, at: usize, record: &mut Record) -> Option<()> {
    let tag = row.u8()?;
    match tag {
        MISSING => record.missing(at),
        BYTES | TEXT => {
            let len = usize::try_from(row.u64()?).ok()?;
            let bytes = row.take(len)?;
            match tag {
                BYTES => record.bytes(at).extend_from_slice(bytes),
                _ => record.text(at).push_str(str::from_utf8(bytes).ok()?),
            }
        }
        REALS => {
            let bytes = row.take(elements.checked_mul(4)?)?.as_chunks::<4>().0;
            record.reals(at).extend(bytes.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        }
        INTS => {
            let bytes = row.take(elements.checked_mul(8)?)?.as_chunks::<8>().0;
            record.ints(at).extend(bytes.iter().map(|bytes| i64::from_le_bytes(*bytes)));
        }
        _ => return None,
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns() -> Vec<RecordColumn> {
        let column = |name: &str, kind| RecordColumn { name: name.into(), kind };
        vec![
            column("a", RecordKind::Int { shape: vec![], classes: None }),
            column("b", RecordKind::Real { shape: vec![2, 1] }),
            column("c", RecordKind::Text),
            column("d", RecordKind::Image),
            column("e", RecordKind::Text),
        ]
    }

    #[test]
    fn a_row_comes_back_as_it_was() {
        let (mut record, mut bytes) = (Record::new(), Vec::new());
        record.ints(0).push(-7);
        record.reals(1).extend([1.5, f32::MIN]);
        record.text(2).push_str("žlutý");
        record.bytes(3).extend([1, 2, 3]);
        record.missing(4);
        push(&record, 5, &mut bytes);
        let mut read = Record::new();
        pull(&bytes, &columns(), &mut read).unwrap();
        assert_eq!(read, record);
        for end in 0..bytes.len() {
            assert!(pull(&bytes[..end], &columns(), &mut read).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn columns_of_numbers_make_the_same_rows() {
        let columns = [NumberColumn::Ints(vec![3, -4]), NumberColumn::Reals(vec![0.5, f32::NAN])];
        let (mut record, mut one, mut other) = (Record::new(), Vec::new(), Vec::new());
        for row in 0..2 {
            record.ints(0).push([3, -4][row]);
            record.reals(1).push([0.5, f32::NAN][row]);
            push(&record, 2, &mut one);
            push_numbers(&columns, row, &mut other);
        }
        assert_eq!(one, other);
    }

    #[test]
    fn a_broken_row_gives_its_own_error() {
        let mut bytes = Vec::new();
        push_broken("a list of 3", Some(480), &mut bytes);
        let error = pull(&bytes, &columns(), &mut Record::new()).unwrap_err();
        assert_eq!((&error.message[..], error.offset), ("a list of 3", Some(480)));
    }
}
