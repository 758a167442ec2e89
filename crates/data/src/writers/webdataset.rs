//! WebDataset: a tar archive whose samples are runs of members with one name and different endings.
//!
//! Images keep their bytes; pixels become PNG files; one whole number is a `.cls`, text a `.txt`, other numbers an `.npy`.

use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::writer::{Target, WriteError, Writer, WriterKind, shape_of};
use crate::writers::npy;
use std::fs::File;
use std::io::{BufWriter, IntoInnerError, Write};

pub const KIND: WriterKind = WriterKind {
    name: "webdataset",
    doc: "a tar archive of samples: images, numbers and text",
    extensions: &["tar"],
    open,
};

/// Of tar.
const BLOCK_BYTES: usize = 512;

#[derive(Debug)]
struct ShardWriter {
    out: BufWriter<File>,
    columns: Vec<RecordColumn>,
    number: usize,
}

fn open(target: Target<'_>) -> Result<Box<dyn Writer>, WriteError> {
    let (out, columns) = (BufWriter::new(target.file), target.columns.to_vec());
    Ok(Box::new(ShardWriter { out, columns, number: 0 }))
}

/// The name of a column as part of an ending.
fn plain(name: &str) -> String {
    let letter = |char: char| if char.is_ascii_alphanumeric() || char == '-' { char.to_ascii_lowercase() } else { '_' };
    name.chars().map(letter).collect()
}

/// The ending of a column's members, by what they are.
fn ending(column: &RecordColumn, is: &str) -> String {
    let usual: &[&str] = match is {
        "png" | "jpg" => &["image"],
        "cls" => &["cls", "class", "label"],
        "txt" => &["txt", "text"],
        _ => &[],
    };
    if usual.contains(&column.name.as_str()) || column.name == is {
        is.into()
    } else {
        format!("{}.{is}", plain(&column.name))
    }
}

/// Pixels, channels first, as a PNG file.
fn png(shape: &[usize], pixels: &[u8]) -> Result<Option<Vec<u8>>, WriteError> {
    let &[channels, height, width] = shape else { return Ok(None) };
    let color = match channels {
        1 => png::ColorType::Grayscale,
        3 => png::ColorType::Rgb,
        4 => png::ColorType::Rgba,
        _ => return Ok(None),
    };
    let area = height * width;
    let rows: Vec<u8> = (0..area * channels).map(|at| pixels[at % channels * area + at / channels]).collect();
    let mut bytes = Vec::new();
    let failed = |error: png::EncodingError| WriteError::unfit(error.to_string(), "write .npz instead");
    let mut encoder = png::Encoder::new(&mut bytes, width as u32, height as u32);
    encoder.set_color(color);
    let mut writer = encoder.write_header().map_err(failed)?;
    writer.write_image_data(&rows).map_err(failed)?;
    writer.finish().map_err(failed)?;
    Ok(Some(bytes))
}

fn array(descr: &str, shape: &[usize], bytes: impl Iterator<Item = u8>) -> Vec<u8> {
    npy::header(descr, shape).into_iter().chain(bytes).collect()
}

/// The ending and the bytes of one member.
fn member(column: &RecordColumn, value: &RecordValue) -> Result<Option<(String, Vec<u8>)>, WriteError> {
    let shape = shape_of(&column.kind).unwrap_or_default();
    let (is, bytes) = match (&column.kind, value) {
        (_, RecordValue::Missing) => return Ok(None),
        (RecordKind::Image, RecordValue::Bytes(bytes)) => {
            (if bytes.starts_with(b"\x89PNG") { "png" } else { "jpg" }, bytes.clone())
        }
        (RecordKind::Pixels { .. }, RecordValue::Bytes(bytes)) => match png(shape, bytes)? {
            Some(bytes) => ("png", bytes),
            None => ("npy", array("|u1", shape, bytes.iter().copied())),
        },
        (_, RecordValue::Bytes(bytes)) => ("bin", bytes.clone()),
        (_, RecordValue::Text(text)) => ("txt", text.clone().into_bytes()),
        (_, RecordValue::Ints(values)) if shape.is_empty() => {
            ("cls", values.first().map_or(String::new(), i64::to_string).into_bytes())
        }
        (_, RecordValue::Ints(values)) => {
            ("npy", array("<i8", shape, values.iter().flat_map(|value| value.to_le_bytes())))
        }
        (_, RecordValue::Reals(values)) => {
            ("npy", array("<f4", shape, values.iter().flat_map(|value| value.to_le_bytes())))
        }
    };
    Ok(Some((ending(column, is), bytes)))
}

impl Writer for ShardWriter {
    fn write(&mut self, record: &Record) -> Result<(), WriteError> {
        for (at, column) in self.columns.iter().enumerate() {
            let Some((ending, bytes)) = member(column, record.value(at))? else { continue };
            let mut header = tar::Header::new_ustar();
            let name = format!("{:09}.{ending}", self.number);
            if header.set_path(&name).is_err() {
                let message = format!("`{}` is too long a name for a member of an archive", column.name);
                return Err(WriteError::unfit(message, "rename the column"));
            }
            header.set_mode(0o644);
            header.set_size(bytes.len() as u64);
            header.set_cksum();
            self.out.write_all(header.as_bytes())?;
            self.out.write_all(&bytes)?;
            self.out.write_all(&[0; BLOCK_BYTES][..bytes.len().next_multiple_of(BLOCK_BYTES) - bytes.len()])?;
        }
        self.number += 1;
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<File, WriteError> {
        self.out.write_all(&[0; 2 * BLOCK_BYTES])?;
        Ok(self.out.into_inner().map_err(IntoInnerError::into_error)?)
    }
}
