//! TFRecord files of `tf.train.Example`s: a feature per column. What is missing is left out.

use crate::inspect::shown_name;
use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::writer::{Target, WriteError, Writer, WriterKind, check_known};
use kolo_base::masked_crc32c;
use std::fs::File;
use std::io::{BufWriter, IntoInnerError, Write};

pub const KIND: WriterKind = WriterKind {
    name: "tfrecord",
    doc: "TFRecord files of `tf.train.Example`s",
    extensions: &["tfrecord", "tfrecords"],
    open,
};

/// Of one record: the reader takes no more.
const RECORD_BYTES_MAX: usize = 1 << 30;
/// The reader tells from so many first records which columns there are.
const LOOKED_AT: usize = 16;

#[derive(Debug)]
struct RecordWriter {
    out: BufWriter<File>,
    columns: Vec<RecordColumn>,
    /// Which of them a record had a value of.
    is_known: Vec<bool>,
    written: usize,
}

fn open(target: Target<'_>) -> Result<Box<dyn Writer>, WriteError> {
    let (out, columns) = (BufWriter::new(target.file), target.columns.to_vec());
    let is_known = vec![false; columns.len()];
    Ok(Box::new(RecordWriter { out, columns, is_known, written: 0 }))
}

/// A whole number as protobuf writes it: seven bits at a time, the lowest first.
fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A field of bytes: its number, its length, and what is in it.
fn field(number: u8, bytes: &[u8], out: &mut Vec<u8>) {
    out.push(number << 3 | 2);
    varint(bytes.len() as u64, out);
    out.extend(bytes);
}

/// The `Feature` of a value: field 1 is a list of bytes, 2 of floats, 3 of whole numbers.
fn feature(kind: &RecordKind, value: &RecordValue) -> Option<Vec<u8>> {
    let (mut list, mut feature) = (Vec::new(), Vec::new());
    let number = match (kind, value) {
        (_, RecordValue::Missing) => return None,
        (RecordKind::Pixels { .. }, RecordValue::Bytes(bytes)) => {
            let mut packed = Vec::new();
            bytes.iter().for_each(|byte| varint(u64::from(*byte), &mut packed));
            field(1, &packed, &mut list);
            3
        }
        (_, RecordValue::Bytes(bytes)) => {
            field(1, bytes, &mut list);
            1
        }
        (_, RecordValue::Text(text)) => {
            field(1, text.as_bytes(), &mut list);
            1
        }
        (_, RecordValue::Reals(values)) => {
            let packed: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            field(1, &packed, &mut list);
            2
        }
        (_, RecordValue::Ints(values)) => {
            let mut packed = Vec::new();
            values.iter().for_each(|value| varint(*value as u64, &mut packed));
            field(1, &packed, &mut list);
            3
        }
    };
    field(number, &list, &mut feature);
    Some(feature)
}

impl Writer for RecordWriter {
    fn write(&mut self, record: &Record) -> Result<(), WriteError> {
        let mut features = Vec::new();
        for (at, column) in self.columns.iter().enumerate() {
            let Some(feature) = feature(&column.kind, record.value(at)) else { continue };
            if self.written >= LOOKED_AT && !self.is_known[at] {
                let name = shown_name(&column.name);
                let message = format!("`{name}` is missing in the first {LOOKED_AT} records, which tell the columns");
                return Err(WriteError::unfit(message, "put a record that has it first, or write .jsonl or .tar"));
            }
            self.is_known[at] = true;
            let mut entry = Vec::new();
            field(1, column.name.as_bytes(), &mut entry);
            field(2, &feature, &mut entry);
            field(1, &entry, &mut features);
        }
        let mut example = Vec::new();
        field(1, &features, &mut example);
        if example.len() > RECORD_BYTES_MAX {
            let message = format!("it has {} bytes; a record has at most {RECORD_BYTES_MAX}", example.len());
            return Err(WriteError::unfit(message, "choose fewer columns with --columns"));
        }
        let length = (example.len() as u64).to_le_bytes();
        self.out.write_all(&length)?;
        self.out.write_all(&masked_crc32c(&length).to_le_bytes())?;
        self.out.write_all(&example)?;
        self.out.write_all(&masked_crc32c(&example).to_le_bytes())?;
        self.written += 1;
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<File, WriteError> {
        let mut known = self.columns.iter().zip(&self.is_known);
        known.try_for_each(|(column, is_known)| check_known(&column.name, *is_known))?;
        Ok(self.out.into_inner().map_err(IntoInnerError::into_error)?)
    }
}
