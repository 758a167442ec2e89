//! WebDataset: a tar archive whose samples are runs of members with one name and different endings.
//!
//! Images keep their bytes; pixels become PNG files; one whole number is a `.cls`, text a `.txt`, other numbers an `.npy`.

use crate::image::{self, PIXELS_MAX};
use crate::inspect::shown_name;
use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::writer::{Target, WriteError, Writer, WriterKind, check_known, check_names, shape_of};
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
/// Bytes of a member's name, of which the number of its sample takes the first.
const NAME_BYTES_MAX: usize = 100;
const NUMBER_DIGITS: usize = 9;
/// Bytes of a member, and different endings: the reader takes no more.
const MEMBER_BYTES_MAX: usize = 1 << 30;
const ENDINGS_MAX: usize = 1000;

#[derive(Debug)]
struct ShardWriter {
    out: BufWriter<File>,
    columns: Vec<MemberColumn>,
    number: usize,
}

/// A column, and what its members are called.
#[derive(Debug)]
struct MemberColumn {
    column: RecordColumn,
    /// By what a member is: images have two.
    endings: Vec<(&'static str, String)>,
    /// A record had a value of it.
    is_known: bool,
}

fn open(target: Target<'_>) -> Result<Box<dyn Writer>, WriteError> {
    let mut taken: Vec<String> = Vec::new();
    let mut columns = Vec::new();
    for column in target.columns {
        let endings: Vec<(&str, String)> = kinds(column).iter().map(|is| (*is, ending(column, is, &taken))).collect();
        taken.extend(endings.iter().map(|(_, ending)| ending.clone()));
        columns.push(MemberColumn { column: column.clone(), endings, is_known: false });
    }
    let all =
        || columns.iter().flat_map(|of| of.endings.iter().map(|(_, ending)| (&of.column.name[..], ending.clone())));
    let hint = "rename one where the files were made, choose others with --columns, or write .tfrecord";
    check_names(all(), hint)?;
    if let Some((name, _)) = all().find(|(_, ending)| NUMBER_DIGITS + 1 + ending.len() > NAME_BYTES_MAX) {
        return Err(too_long(name));
    }
    if all().count() > ENDINGS_MAX {
        let message =
            format!("there would be {} kinds of members; an archive has at most {ENDINGS_MAX}", all().count());
        return Err(WriteError::unfit(message, "choose fewer columns with --columns, or write .tfrecord"));
    }
    Ok(Box::new(ShardWriter { out: BufWriter::new(target.file), columns, number: 0 }))
}

fn too_long(name: &str) -> WriteError {
    let message = format!("`{}` is too long a name for a member of an archive", shown_name(name));
    WriteError::unfit(message, "rename the column, leave it out with --columns, or write .tfrecord")
}

/// The name of a column as part of an ending, which readers take in lower case.
fn plain(name: &str) -> String {
    let letter = |char: char| if char.is_alphanumeric() || char == '-' { char } else { '_' };
    name.to_lowercase().chars().map(letter).collect()
}

/// What members of a column may be.
fn kinds(column: &RecordColumn) -> &'static [&'static str] {
    match &column.kind {
        RecordKind::Image => image::ENDINGS,
        RecordKind::Pixels { shape } if is_drawable(shape) => &["png"],
        RecordKind::Bytes => &["bin"],
        RecordKind::Text => &["txt"],
        RecordKind::Class { .. } => &["cls"],
        RecordKind::Int { shape, .. } if shape.is_empty() => &["cls"],
        RecordKind::Pixels { .. } | RecordKind::Int { .. } | RecordKind::Real { .. } => &["npy"],
    }
}

/// The ending of a column's members, by what they are: the usual one, unless another column has it.
fn ending(column: &RecordColumn, is: &str, taken: &[String]) -> String {
    let usual: &[&str] = match is {
        _ if image::ENDINGS.contains(&is) => &["image"],
        "cls" => &["cls", "class", "label"],
        "txt" => &["txt", "text"],
        _ => &[],
    };
    let is_usual = usual.contains(&column.name.as_str()) || column.name == is;
    match is_usual && !taken.iter().any(|taken| taken == is) {
        true => is.into(),
        false => format!("{}.{is}", plain(&column.name)),
    }
}

/// Whether pixels of this shape can be a PNG file that is read again.
fn is_drawable(shape: &[usize]) -> bool {
    matches!(shape, &[1 | 3 | 4, height, width] if height.checked_mul(width).is_some_and(|area| area <= PIXELS_MAX))
}

/// Pixels, channels first, as a PNG file, if they can be one.
fn png(shape: &[usize], pixels: &[u8]) -> Result<Option<Vec<u8>>, WriteError> {
    let &[channels, height, width] = shape else { return Ok(None) };
    let color = match channels {
        _ if !is_drawable(shape) => return Ok(None),
        1 => png::ColorType::Grayscale,
        3 => png::ColorType::Rgb,
        _ => png::ColorType::Rgba,
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

/// What one member is, and its bytes.
fn member(column: &RecordColumn, value: &RecordValue) -> Result<Option<(&'static str, Vec<u8>)>, WriteError> {
    let shape = shape_of(&column.kind).unwrap_or_default();
    Ok(Some(match (&column.kind, value) {
        (_, RecordValue::Missing) => return Ok(None),
        (RecordKind::Image, RecordValue::Bytes(bytes)) => (image::ending_of(bytes).unwrap_or("jpg"), bytes.clone()),
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
    }))
}

impl Writer for ShardWriter {
    fn write(&mut self, record: &Record) -> Result<(), WriteError> {
        let mut is_empty = true;
        for (at, MemberColumn { column, endings, is_known }) in self.columns.iter_mut().enumerate() {
            let Some((is, bytes)) = member(column, record.value(at))? else { continue };
            let Some((_, ending)) = endings.iter().find(|(kind, _)| *kind == is) else {
                let message = format!("`{}` has a value of another type than its column", shown_name(&column.name));
                return Err(WriteError::unfit(message, "leave the column out with --columns"));
            };
            if bytes.len() > MEMBER_BYTES_MAX {
                let (name, count) = (shown_name(&column.name), bytes.len());
                let message = format!("`{name}` has {count} bytes; a member has at most {MEMBER_BYTES_MAX}");
                return Err(WriteError::unfit(message, "leave the column out with --columns"));
            }
            let mut header = tar::Header::new_ustar();
            let name = format!("{:0NUMBER_DIGITS$}.{ending}", self.number);
            if header.set_path(&name).is_err() {
                return Err(too_long(&column.name));
            }
            header.set_mode(0o644);
            header.set_size(bytes.len() as u64);
            header.set_cksum();
            self.out.write_all(header.as_bytes())?;
            self.out.write_all(&bytes)?;
            self.out.write_all(&[0; BLOCK_BYTES][..bytes.len().next_multiple_of(BLOCK_BYTES) - bytes.len()])?;
            (is_empty, *is_known) = (false, true);
        }
        if is_empty {
            let message = "all its values are missing, and an archive has no members for it";
            return Err(WriteError::unfit(message, "leave such records out first, or write .jsonl or .tfrecord"));
        }
        self.number += 1;
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<File, WriteError> {
        self.columns.iter().try_for_each(|of| check_known(&of.column.name, of.is_known))?;
        self.out.write_all(&[0; 2 * BLOCK_BYTES])?;
        Ok(self.out.into_inner().map_err(IntoInnerError::into_error)?)
    }
}
