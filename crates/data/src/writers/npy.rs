//! NumPy's `.npy` files, of one column, and `.npz` archives, of several. The first dim is the record.
//!
//! An archive is a zip file whose members are stored as they are. Each column waits in a file of its own, without a name,
//! until all records are there.

use crate::inspect::shown_name;
use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::writer::{Target, WriteError, Writer, WriterKind, shape_of};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};

pub const ARRAY: WriterKind =
    WriterKind { name: "npy", doc: "a NumPy array of one column", extensions: &["npy"], open: open_array };

pub const ARCHIVE: WriterKind =
    WriterKind { name: "npz", doc: "a NumPy archive, an array per column", extensions: &["npz"], open: open_archive };

/// Magic, version and the length of what follows.
const PREFIX_BYTES: usize = 10;
/// Elements start at a multiple of it.
const ALIGNMENT: usize = 64;
/// Zip has 16 bits for the length of a name.
const NAME_BYTES_MAX: usize = u16::MAX as usize;
/// Of an entry in the list of members, without its name, and of the whole list: the reader takes no more.
const CENTRAL_BYTES: usize = 74;
const LIST_BYTES_MAX: usize = 16 << 20;

/// One column on its way.
#[derive(Debug)]
struct Array {
    name: String,
    out: BufWriter<File>,
    /// Numbers of one record.
    width: usize,
}

/// NumPy's word for the elements of a column.
fn descr(kind: &RecordKind) -> Option<&'static str> {
    match kind {
        RecordKind::Pixels { .. } => Some("|u1"),
        RecordKind::Real { .. } => Some("<f4"),
        RecordKind::Int { .. } | RecordKind::Class { .. } => Some("<i8"),
        RecordKind::Image | RecordKind::Text | RecordKind::Bytes => None,
    }
}

/// The header of an array of this many records.
pub(crate) fn header(descr: &str, shape: &[usize]) -> Vec<u8> {
    let dims: Vec<String> = shape.iter().map(|dim| format!("{dim},")).collect();
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", dims.join(" "));
    let bytes = (PREFIX_BYTES + text.len() + 1).next_multiple_of(ALIGNMENT);
    text.extend(std::iter::repeat_n(' ', bytes - PREFIX_BYTES - text.len() - 1));
    text.push('\n');
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend((text.len() as u16).to_le_bytes());
    header.extend(text.as_bytes());
    header
}

impl Array {
    fn begin(column: &RecordColumn, records: usize, file: File) -> Result<Self, WriteError> {
        let (Some(descr), Some(shape)) = (descr(&column.kind), shape_of(&column.kind)) else {
            let message = format!("`{}` holds no numbers, and arrays store only numbers", shown_name(&column.name));
            return Err(WriteError::unfit(message, "write .jsonl, .tar or .tfrecord"));
        };
        let mut out = BufWriter::new(file);
        out.write_all(&header(descr, &[&[records], shape].concat()))?;
        Ok(Self { name: column.name.clone(), out, width: shape.iter().product() })
    }

    fn write(&mut self, value: &RecordValue) -> Result<(), WriteError> {
        let count = match value {
            RecordValue::Reals(values) => {
                values.iter().try_for_each(|value| self.out.write_all(&value.to_le_bytes()))?;
                values.len()
            }
            RecordValue::Ints(values) => {
                values.iter().try_for_each(|value| self.out.write_all(&value.to_le_bytes()))?;
                values.len()
            }
            RecordValue::Bytes(bytes) => {
                self.out.write_all(bytes)?;
                bytes.len()
            }
            RecordValue::Missing | RecordValue::Text(_) => 0,
        };
        if count != self.width {
            let (name, width) = (shown_name(&self.name), self.width);
            let message = match value {
                RecordValue::Missing => {
                    format!("`{name}` is missing, but an array needs {width} numbers in each record")
                }
                _ => format!("`{name}` has {count} numbers, but an array needs {width} in each record"),
            };
            return Err(WriteError::unfit(message, "fill what is missing first, or write .jsonl"));
        }
        Ok(())
    }

    fn finish(self) -> Result<File, WriteError> {
        Ok(self.out.into_inner().map_err(io::IntoInnerError::into_error)?)
    }
}

#[derive(Debug)]
struct ArrayWriter(Array);

fn open_array(target: Target<'_>) -> Result<Box<dyn Writer>, WriteError> {
    let [column] = target.columns else {
        let names: Vec<String> = target.columns.iter().map(|column| shown_name(&column.name)).collect();
        let message = format!("a .npy file holds one array, but there are {}: {}", names.len(), names.join(", "));
        return Err(WriteError::unfit(message, "write .npz, or choose a column with --columns"));
    };
    Ok(Box::new(ArrayWriter(Array::begin(column, target.records, target.file)?)))
}

impl Writer for ArrayWriter {
    fn write(&mut self, record: &Record) -> Result<(), WriteError> {
        self.0.write(record.value(0))
    }

    fn finish(self: Box<Self>) -> Result<File, WriteError> {
        self.0.finish()
    }
}

#[derive(Debug)]
struct ArchiveWriter {
    file: File,
    arrays: Vec<Array>,
}

/// The name of a column's member.
fn member_name(column: &str) -> String {
    format!("{column}.npy")
}

fn open_archive(target: Target<'_>) -> Result<Box<dyn Writer>, WriteError> {
    let names = || target.columns.iter().map(|column| member_name(&column.name));
    if let Some(name) = names().find(|name| name.len() > NAME_BYTES_MAX) {
        let message = format!("`{}` is too long a name for a member of an archive", shown_name(&name));
        return Err(WriteError::unfit(message, "rename the column, or leave it out with --columns"));
    }
    if names().map(|name| CENTRAL_BYTES + name.len()).sum::<usize>() > LIST_BYTES_MAX {
        let message =
            format!("the list of {} arrays would have more than {LIST_BYTES_MAX} bytes", target.columns.len());
        return Err(WriteError::unfit(message, "choose fewer columns with --columns"));
    }
    let arrays: Result<Vec<Array>, WriteError> =
        target.columns.iter().map(|column| Array::begin(column, target.records, tempfile::tempfile()?)).collect();
    Ok(Box::new(ArchiveWriter { file: target.file, arrays: arrays? }))
}

impl Writer for ArchiveWriter {
    fn write(&mut self, record: &Record) -> Result<(), WriteError> {
        self.arrays.iter_mut().enumerate().try_for_each(|(at, array)| array.write(record.value(at)))
    }

    fn finish(self: Box<Self>) -> Result<File, WriteError> {
        let Self { file, arrays } = *self;
        let (mut out, mut offset, mut directory) = (BufWriter::new(file), 0u64, Vec::new());
        let count = arrays.len();
        for array in arrays {
            let name = member_name(&array.name);
            let mut member = array.finish()?;
            let (crc, bytes) = checksum(&mut member)?;
            let entry = Entry { name: name.as_bytes(), crc, bytes, offset };
            let local = entry.local();
            out.write_all(&local)?;
            member.rewind()?;
            io::copy(&mut member, &mut out)?;
            directory.extend(entry.central());
            offset += local.len() as u64 + bytes;
        }
        out.write_all(&directory)?;
        out.write_all(&end(count as u64, directory.len() as u64, offset))?;
        Ok(out.into_inner().map_err(io::IntoInnerError::into_error)?)
    }
}

fn checksum(file: &mut File) -> io::Result<(u32, u64)> {
    file.rewind()?;
    let (mut crc, mut bytes, mut reader) = (flate2::Crc::new(), 0, BufReader::new(&*file));
    let mut buffer = vec![0; 1 << 16];
    loop {
        match reader.read(&mut buffer)? {
            0 => return Ok((crc.sum(), bytes)),
            count => {
                crc.update(&buffer[..count]);
                bytes += count as u64;
            }
        }
    }
}

/// A member of a zip archive. Sizes and offset stand in the fields of zip64, as NumPy writes them.
struct Entry<'n> {
    name: &'n [u8],
    crc: u32,
    bytes: u64,
    offset: u64,
}

/// The version of zip that knows zip64.
const ZIP64_VERSION: u16 = 45;
/// Says that the name is UTF-8. Without it, names are read in an old code page.
const UTF8_FLAG: u16 = 1 << 11;
/// 1 January 1980, the first day of zip: files made of the same data are the same.
const DATE: u16 = 0x21;

impl Entry<'_> {
    /// What both headers have in common, from the version to the length of the name.
    fn common(&self, extra_bytes: u16) -> Vec<u8> {
        let mut out = Vec::new();
        let flags = if self.name.is_ascii() { 0 } else { UTF8_FLAG };
        for word in [ZIP64_VERSION, flags, 0, 0, DATE] {
            out.extend(word.to_le_bytes());
        }
        for word in [self.crc, u32::MAX, u32::MAX] {
            out.extend(word.to_le_bytes());
        }
        for word in [self.name.len() as u16, extra_bytes] {
            out.extend(word.to_le_bytes());
        }
        out
    }

    fn local(&self) -> Vec<u8> {
        let mut out = b"PK\x03\x04".to_vec();
        out.extend(self.common(20));
        out.extend(self.name);
        out.extend([1, 0, 16, 0]);
        [self.bytes, self.bytes].iter().for_each(|size| out.extend(size.to_le_bytes()));
        out
    }

    fn central(&self) -> Vec<u8> {
        let mut out = b"PK\x01\x02".to_vec();
        out.extend(ZIP64_VERSION.to_le_bytes());
        out.extend(self.common(28));
        // Comment, disk, attributes inside and outside, then the offset.
        out.extend([0; 10]);
        out.extend(u32::MAX.to_le_bytes());
        out.extend(self.name);
        out.extend([1, 0, 24, 0]);
        [self.bytes, self.bytes, self.offset].iter().for_each(|size| out.extend(size.to_le_bytes()));
        out
    }
}

/// The end of the central directory, in the form of zip64 and in the old one that points to it.
fn end(count: u64, bytes: u64, offset: u64) -> Vec<u8> {
    let mut out = b"PK\x06\x06".to_vec();
    out.extend(44u64.to_le_bytes());
    [ZIP64_VERSION; 2].iter().for_each(|version| out.extend(version.to_le_bytes()));
    out.extend([0; 8]);
    [count, count, bytes, offset].iter().for_each(|word| out.extend(word.to_le_bytes()));
    out.extend(b"PK\x06\x07");
    out.extend([0; 4]);
    out.extend((offset + bytes).to_le_bytes());
    out.extend(1u32.to_le_bytes());
    out.extend(b"PK\x05\x06");
    out.extend([0; 4]);
    [u16::MAX; 2].iter().for_each(|word| out.extend(word.to_le_bytes()));
    [u32::MAX; 2].iter().for_each(|word| out.extend(word.to_le_bytes()));
    out.extend([0; 2]);
    out
}
