//! Decodes a record batch: from the nodes and buffers that its message lists to columns.
//! <https://arrow.apache.org/docs/format/Columnar.html#recordbatch-message>

use super::super::table::{Column, Kind, Number, Offsets, Validity, Values, Words};
use super::flatbuffer::Table;
use super::schema::{Form, Layout};
use bytes::Bytes;
use std::collections::HashMap;
use std::io::Read;
use std::sync::Arc;

/// Rows that a column may have whose values take no bytes.
const EMPTY_VALUES_MAX: usize = 1 << 24;
/// Versions of the metadata, by their numbers there.
pub(super) const VERSION_4: i16 = 3;
/// From this on unions and runs say nothing about nulls.
pub(super) const VERSION_5: i16 = 4;

/// The values of dictionaries by their number.
pub(super) type Dictionaries = HashMap<i64, Arc<Words>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Codec {
    Lz4,
    Zstd,
}

/// Nodes and buffers of a batch, in the order of the columns.
pub(super) struct BatchReader<'a> {
    nodes: std::slice::Iter<'a, [u8; 16]>,
    buffers: std::slice::Iter<'a, [u8; 16]>,
    variadic: std::slice::Iter<'a, [u8; 8]>,
    codec: Option<Codec>,
    version: i16,
    body: Bytes,
    dictionaries: &'a Dictionaries,
}

/// A node's length and nulls, or a buffer's offset and length.
pub(super) fn pair(bytes: &[u8; 16]) -> (i64, i64) {
    let (words, _) = bytes.as_chunks::<8>();
    (i64::from_le_bytes(words[0]), i64::from_le_bytes(words[1]))
}

impl<'a> BatchReader<'a> {
    /// `batch` is a table of the type `RecordBatch`, whose buffers stand in `body`.
    pub fn new(batch: Table<'a>, version: i16, body: Bytes, dictionaries: &'a Dictionaries) -> Result<Self, String> {
        let codec = match batch.table(3)? {
            None => None,
            Some(compression) => match (compression.byte(0)?, compression.byte(1)?) {
                (0, 0) => Some(Codec::Lz4),
                (1, 0) => Some(Codec::Zstd),
                _ => return Err("unknown compression codec".into()),
            },
        };
        let (nodes, buffers, variadic) = (batch.structs(1)?.iter(), batch.structs(2)?.iter(), batch.structs(4)?.iter());
        Ok(Self { nodes, buffers, variadic, codec, version, body, dictionaries })
    }

    /// The next node: its length, and whether it says that there are nulls.
    fn node(&mut self) -> Result<(usize, bool), String> {
        let (len, nulls) = pair(self.nodes.next().ok_or("a batch has too few columns")?);
        Ok((usize::try_from(len).map_err(|_| "a column has a negative length")?, nulls != 0))
    }

    fn skip_buffers(&mut self, count: usize) -> Result<(), String> {
        match count {
            0 => Ok(()),
            _ => self.buffers.nth(count - 1).map(|_| ()).ok_or_else(|| "a batch has too few buffers".into()),
        }
    }

    /// The next buffer, decompressed. Its message was checked: the buffers claim no more than fits into memory.
    fn buffer(&mut self) -> Result<Bytes, String> {
        let (start, len) = pair(self.buffers.next().ok_or("a batch has too few buffers")?);
        let range = usize::try_from(start).ok().zip(usize::try_from(len).ok());
        let range = range.and_then(|(start, len)| Some(start..start.checked_add(len)?));
        let range =
            range.filter(|range| range.end <= self.body.len()).ok_or("a buffer ends past the end of the message")?;
        let bytes = self.body.slice(range);
        match self.codec {
            Some(codec) if !bytes.is_empty() => decompress(codec, &bytes),
            _ => Ok(bytes),
        }
    }

    /// The next buffer, which must have `count` values of `bytes` each.
    fn buffer_of(&mut self, count: usize, bytes: usize) -> Result<Bytes, String> {
        let buffer = self.buffer()?;
        match count.checked_mul(bytes).is_some_and(|needed| needed <= buffer.len()) {
            true => Ok(buffer),
            false => Err(format!("{count} values of {bytes} bytes are expected in a buffer of {} bytes", buffer.len())),
        }
    }

    fn validity(&mut self, len: usize, nulls: bool) -> Result<Validity, String> {
        match nulls {
            false => self.skip_buffers(1).map(|()| Validity::All),
            true => self.buffer_of(len.div_ceil(8), 1).map(Validity::Bits),
        }
    }

    fn offsets(&mut self, len: usize, large: bool) -> Result<Offsets, String> {
        // A column without rows may do without the one offset.
        let count = if len == 0 { 0 } else { len.checked_add(1).ok_or("a column is too long")? };
        Ok(match large {
            false => Offsets::Small(self.buffer_of(count, 4)?),
            true => Offsets::Large(self.buffer_of(count, 8)?),
        })
    }

    fn variadic(&mut self) -> Result<usize, String> {
        let count = self.variadic.next().map(|count| i64::from_le_bytes(*count));
        let count = count.and_then(|count| usize::try_from(count).ok()).filter(|count| *count <= self.buffers.len());
        count.ok_or_else(|| "the number of a column's buffers is wrong".into())
    }

    /// Passes over a column.
    pub fn skip(&mut self, layout: &Layout) -> Result<(), String> {
        self.node()?;
        let old = usize::from(self.version < VERSION_5);
        let buffers = match layout.form {
            Form::Null => 0,
            Form::Runs => old,
            Form::FixedList | Form::Struct => 1,
            Form::Plain | Form::List { .. } | Form::Dictionary { .. } => 2,
            Form::Joined { .. } | Form::ListView => 3,
            Form::Views => 2 + self.variadic()?,
            Form::Union { dense } => 1 + usize::from(dense) + old,
        };
        self.skip_buffers(buffers)?;
        layout.children.iter().try_for_each(|child| self.skip(child))
    }

    /// Decodes a column of a kind that is read.
    pub fn column(&mut self, kind: &Kind, layout: &Layout) -> Result<Column, String> {
        let (len, nulls) = self.node()?;
        if matches!(layout.form, Form::Null | Form::Runs | Form::ListView | Form::Union { .. }) {
            return Err("a column has a type that cannot be read".into());
        }
        let validity = self.validity(len, nulls)?;
        let child = || layout.children.first().ok_or("a list has no items");
        let values = match (&layout.form, kind) {
            (Form::Plain, Kind::Bool) => Values::Bits(self.buffer_of(len.div_ceil(8), 1)?),
            (Form::Plain, Kind::Number(number)) => Values::Raw(*number, self.buffer_of(len, number.bytes())?),
            (Form::Plain, Kind::FixedBytes(bytes)) => {
                check_empty(len, *bytes)?;
                Values::Joined(Offsets::Fixed(*bytes), self.buffer_of(len, *bytes)?)
            }
            (Form::Joined { large }, _) => {
                let offsets = self.offsets(len, *large)?;
                let bytes = self.buffer()?;
                check_offsets(&offsets, len, bytes.len())?;
                Values::Joined(offsets, bytes)
            }
            (Form::Views, _) => {
                let views = self.buffer_of(len, 16)?;
                let count = self.variadic()?;
                Values::Views(views, (0..count).map(|_| self.buffer()).collect::<Result<_, _>>()?)
            }
            (Form::List { large }, Kind::List(item)) => {
                let offsets = self.offsets(len, *large)?;
                let items = self.column(&item.kind, child()?)?;
                check_offsets(&offsets, len, items.len)?;
                Values::List(offsets, Box::new(items))
            }
            (Form::FixedList, Kind::FixedList(item, size)) => {
                check_empty(len, *size)?;
                let items = self.column(&item.kind, child()?)?;
                check_offsets(&Offsets::Fixed(*size), len, items.len)?;
                Values::List(Offsets::Fixed(*size), Box::new(items))
            }
            (Form::Struct, Kind::Struct(fields)) => {
                let index = kind.image_bytes().ok_or("a struct is expected to hold an image")?;
                let mut bytes = None;
                for (at, (field, child)) in fields.iter().zip(&layout.children).enumerate() {
                    match at == index {
                        true => bytes = Some(self.column(&field.kind, child)?),
                        false => self.skip(child)?,
                    }
                }
                let bytes = bytes.filter(|bytes| bytes.len == len).ok_or("the fields of a struct differ in length")?;
                Values::Image(Box::new(bytes))
            }
            (Form::Dictionary { id, .. }, Kind::Dictionary(keys, _)) => {
                let keys = self.keys(*keys, len, &validity)?;
                // Dictionaries without a value may be left out.
                Values::Dictionary(Box::new(keys), self.dictionaries.get(id).cloned().unwrap_or_default())
            }
            _ => return Err("a column has a type that cannot be read".into()),
        };
        Ok(Column { len, validity, values })
    }

    fn keys(&mut self, number: Number, len: usize, validity: &Validity) -> Result<Column, String> {
        let keys = Values::Raw(number, self.buffer_of(len, number.bytes())?);
        Ok(Column { len, validity: validity.clone(), values: keys })
    }
}

fn check_offsets(offsets: &Offsets, len: usize, end: usize) -> Result<(), String> {
    match offsets.fit(len, end) {
        true => Ok(()),
        false => Err("the offsets of a column do not match its values".into()),
    }
}

/// The claimed length of a column is bounded by its bytes, if its values have some.
fn check_empty(len: usize, bytes: usize) -> Result<(), String> {
    match bytes == 0 && len > EMPTY_VALUES_MAX {
        true => Err(format!("a column claims {len} values without a byte")),
        false => Ok(()),
    }
}

/// A compressed buffer begins with its decompressed length, or with -1 if it is not compressed.
fn decompress(codec: Codec, bytes: &Bytes) -> Result<Bytes, String> {
    let len = bytes.first_chunk().map(|len| i64::from_le_bytes(*len)).ok_or("a compressed buffer has no length")?;
    let compressed = bytes.slice(8..);
    if len == -1 {
        return Ok(compressed);
    }
    let len = usize::try_from(len).map_err(|_| "a compressed buffer has a negative length")?;
    let mut out = Vec::new();
    if len > 0 {
        let most = len as u64 + 1;
        let read = match codec {
            Codec::Lz4 => lz4_flex::frame::FrameDecoder::new(&compressed[..]).take(most).read_to_end(&mut out),
            Codec::Zstd => zstd::bulk::decompress(&compressed, len).map(|bytes| {
                out = bytes;
                out.len()
            }),
        };
        read.map_err(|error| format!("a buffer cannot be decompressed: {error}"))?;
    }
    match out.len() == len {
        true => Ok(out.into()),
        false => Err(format!("a buffer decompresses to {} bytes instead of {len}", out.len())),
    }
}
