//! JSON Lines: an object per record. Numbers of a shape are nested lists; what is missing is `null`.

use crate::inspect::shown_name;
use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::writer::{Target, WriteError, Writer, WriterKind, class_name, real_text, shape_of};
use std::fs::File;
use std::io::{BufWriter, Write};

pub const KIND: WriterKind =
    WriterKind { name: "jsonl", doc: "a JSON object per line", extensions: &["jsonl", "ndjson"], open };

/// Bytes of a line, with its end, and keys: the reader takes no more.
const LINE_BYTES_MAX: usize = 16 << 20;
const KEYS_MAX: usize = 1 << 16;

#[derive(Debug)]
struct JsonWriter {
    out: BufWriter<File>,
    columns: Vec<RecordColumn>,
    line: String,
}

fn open(target: Target<'_>) -> Result<Box<dyn Writer>, WriteError> {
    if let Some(column) =
        target.columns.iter().find(|column| matches!(column.kind, RecordKind::Image | RecordKind::Bytes))
    {
        let message = format!("`{}` holds images or bytes, which JSON cannot store", shown_name(&column.name));
        return Err(WriteError::unfit(message, "write a .tar or a .tfrecord"));
    }
    if target.columns.len() > KEYS_MAX {
        let message = format!("there are {} columns, more than the {KEYS_MAX} keys", target.columns.len());
        return Err(WriteError::unfit(format!("{message} that can be read"), "choose some with --columns"));
    }
    let (out, columns) = (BufWriter::new(target.file), target.columns.to_vec());
    Ok(Box::new(JsonWriter { out, columns, line: String::new() }))
}

/// A text in JSON's quotes.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Refuses what JSON has no number for: as `null` it would be a missing value.
fn check_finite(column: &RecordColumn, values: &[f32]) -> Result<(), WriteError> {
    let Some(value) = values.iter().find(|value| !value.is_finite()) else { return Ok(()) };
    let message = format!("`{}` has {value}, which JSON cannot store", shown_name(&column.name));
    Err(WriteError::unfit(message, "write .npz or .tfrecord, which store it"))
}

/// Lists within lists, as the shape says.
fn nested(line: &mut String, shape: &[usize], numbers: &mut dyn Iterator<Item = String>) {
    let Some((first, rest)) = shape.split_first() else {
        line.push_str(&numbers.next().unwrap_or_else(|| "null".into()));
        return;
    };
    line.push('[');
    for at in 0..*first {
        if at > 0 {
            line.push(',');
        }
        nested(line, rest, numbers);
    }
    line.push(']');
}

impl Writer for JsonWriter {
    fn write(&mut self, record: &Record) -> Result<(), WriteError> {
        let line = &mut self.line;
        line.push('{');
        for (at, column) in self.columns.iter().enumerate() {
            if at > 0 {
                line.push(',');
            }
            line.push_str(&quoted(&column.name));
            line.push(':');
            let (value, shape) = (record.value(at), shape_of(&column.kind).unwrap_or_default());
            match value {
                RecordValue::Text(text) => line.push_str(&quoted(text)),
                RecordValue::Reals(values) => {
                    check_finite(column, values)?;
                    nested(line, shape, &mut values.iter().map(|value| real_text(*value)));
                }
                RecordValue::Bytes(values) => nested(line, shape, &mut values.iter().map(u8::to_string)),
                RecordValue::Ints(values) => match class_name(column, value) {
                    Some(name) => line.push_str(&quoted(name)),
                    None => nested(line, shape, &mut values.iter().map(i64::to_string)),
                },
                RecordValue::Missing => line.push_str("null"),
            }
        }
        line.push_str("}\n");
        if line.len() > LINE_BYTES_MAX {
            let message = format!("it would be a line of more than {LINE_BYTES_MAX} bytes");
            return Err(WriteError::unfit(message, "write .tfrecord or .tar"));
        }
        self.out.write_all(line.as_bytes())?;
        line.clear();
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<File, WriteError> {
        Ok(self.out.into_inner().map_err(std::io::IntoInnerError::into_error)?)
    }
}
