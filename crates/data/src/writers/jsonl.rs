//! JSON Lines: an object per record. Numbers of a shape are nested lists; what is missing is `null`.

use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::writer::{Target, WriteError, Writer, WriterKind, class_name, real_text, shape_of};
use std::fs::File;
use std::io::{BufWriter, Write};

pub const KIND: WriterKind =
    WriterKind { name: "jsonl", doc: "a JSON object per line", extensions: &["jsonl", "ndjson"], open };

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
        let message = format!("`{}` holds images or bytes, which JSON cannot store", column.name);
        return Err(WriteError::unfit(message, "write a .tar or a .tfrecord"));
    }
    let (out, columns) = (BufWriter::new(target.file), target.columns.to_vec());
    Ok(Box::new(JsonWriter { out, columns, line: String::new() }))
}

/// A text in JSON's quotes.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A number as JSON has it, which knows none that is not finite.
fn real(value: f32) -> String {
    if value.is_finite() { real_text(value) } else { "null".into() }
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
                RecordValue::Reals(values) => nested(line, shape, &mut values.iter().map(|value| real(*value))),
                RecordValue::Bytes(values) => nested(line, shape, &mut values.iter().map(u8::to_string)),
                RecordValue::Ints(values) => match class_name(column, value) {
                    Some(name) => line.push_str(&quoted(name)),
                    None => nested(line, shape, &mut values.iter().map(i64::to_string)),
                },
                RecordValue::Missing => line.push_str("null"),
            }
        }
        line.push_str("}\n");
        self.out.write_all(line.as_bytes())?;
        line.clear();
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<File, WriteError> {
        Ok(self.out.into_inner().map_err(std::io::IntoInnerError::into_error)?)
    }
}
