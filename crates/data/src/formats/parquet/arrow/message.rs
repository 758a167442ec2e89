//! The messages of an Arrow file: where they stand, and what their metadata say. The numbers of fields are those of `File.fbs`
//! and `Message.fbs` in the Arrow format.

use super::super::columns::decode_error;
use super::super::table::Schema;
use super::batch::{VERSION_4, VERSION_5, pair};
use super::flatbuffer::{Broken, Table};
use super::schema::{Layout, schema};
use crate::error::ReadError;
use crate::files::Contents;
use bytes::Bytes;

pub(super) const MAGIC: &[u8] = b"ARROW1";
pub(super) const FEATHER_1: &[u8] = b"FEA1";
/// Of the schema of an old stream, which is only looked for to name it.
const OLD_SCHEMA_BYTES_MAX: u32 = 16 << 20;
/// Begins a message, before the four bytes of its length.
pub(super) const CONTINUATION: [u8; 4] = [0xFF; 4];
/// A batch or dictionary may decompress to this much.
const BATCH_BYTES_MAX: u64 = 1 << 30;
/// Where a message stands in the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    offset: i64,
    /// Of the metadata, with what stands before them.
    pub meta: i32,
    body: i64,
}

/// The messages of a file: of dictionaries, and of batches.
pub(super) struct Messages {
    pub schema: Schema,
    pub layouts: Vec<Layout>,
    pub dictionaries: Vec<Block>,
    pub batches: Vec<Block>,
}

/// The kind of a message's header, by the number in the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header {
    Schema,
    DictionaryBatch,
    RecordBatch,
    Other(u8),
}

/// A message's metadata.
pub(super) struct Message<'a> {
    pub version: i16,
    header: Header,
    table: Option<Table<'a>>,
    body: i64,
}

impl<'a> Message<'a> {
    fn of(bytes: &'a [u8]) -> Result<Self, Broken> {
        let root = Table::root(bytes)?;
        let header = match root.byte(1)? {
            1 => Header::Schema,
            2 => Header::DictionaryBatch,
            3 => Header::RecordBatch,
            other => Header::Other(other),
        };
        Ok(Self { version: root.short(0, 0)?, header, table: root.table(2)?, body: root.long(3)? })
    }

    /// What older versions say about buffers is laid out in another way. The footer's version does not count: libraries write
    /// messages of version 4 into files of version 5.
    pub fn check_version(&self) -> Result<(), Broken> {
        match self.version {
            VERSION_4 | VERSION_5 => Ok(()),
            _ => Err("its version of the format is not 4 or 5"),
        }
    }

    pub fn header(&self, header: Header) -> Option<Table<'a>> {
        self.table.filter(|_| self.header == header)
    }

    /// The batch of rows, or of a dictionary's values.
    fn batch(&self) -> Result<Option<Table<'a>>, Broken> {
        match self.header(Header::DictionaryBatch) {
            Some(dictionary) => dictionary.table(1),
            None => Ok(self.header(Header::RecordBatch)),
        }
    }
}

impl Messages {
    pub fn of(contents: &Contents) -> Result<Self, ReadError> {
        let mut start = [0; 6];
        match contents.bytes() >= 6 {
            true => contents.read_at(0, &mut start)?,
            false => return Err(contents.damaged(0, "an Arrow file is expected here")),
        }
        if start.starts_with(FEATHER_1) {
            let message = "this is version 1 of the Feather format; kolo reads version 2, which is Arrow's own";
            let hint = "write it again with `pyarrow.feather.write_feather(table, path)`";
            return Err(contents.unsupported(0, message, hint));
        }
        if start == MAGIC { Self::of_footer(contents) } else { Self::of_stream(contents) }
    }

    /// Whether this is a stream as Arrow wrote them before version 0.15: the length of a message stands alone before it.
    fn is_old_stream(contents: &Contents) -> bool {
        let (mut len, mut bytes) = ([0; 4], Vec::new());
        let read = contents.read_at(0, &mut len).and_then(|()| {
            let len = u32::from_le_bytes(len).min(OLD_SCHEMA_BYTES_MAX);
            contents.read_into(4, len.into(), &mut bytes)
        });
        read.is_ok() && Message::of(&bytes).is_ok_and(|message| message.header == Header::Schema)
    }

    fn of_footer(contents: &Contents) -> Result<Self, ReadError> {
        let failed = |error: &dyn std::fmt::Display| decode_error(contents.path(), "its footer cannot be read", error);
        let mut end = [0; 10];
        let at = contents.bytes().saturating_sub(10);
        contents.read_at(at, &mut end)?;
        let [a, b, c, d, magic @ ..] = end;
        if magic != MAGIC {
            return Err(failed(&"an Arrow file ends with `ARROW1`"));
        }
        let len = u64::try_from(i32::from_le_bytes([a, b, c, d]));
        let len = len.map_err(|_| failed(&"it has a negative length"))?;
        let offset = at.checked_sub(len).ok_or_else(|| contents.damaged(at, "the footer is longer than the file"))?;
        let mut bytes = Vec::new();
        contents.read_into(offset, len, &mut bytes)?;
        let messages = Self::of_footer_table(&bytes).map_err(|error| failed(&error).at(offset))?;
        let mut blocks = messages.dictionaries.iter().chain(&messages.batches);
        let total = blocks.try_fold(0_u64, |total, block| total.checked_add(block.bytes()?));
        // Otherwise a small file could list a message thousands of times.
        match total.is_some_and(|total| total <= contents.bytes()) {
            true => Ok(messages),
            false => Err(contents.damaged(offset, "the messages that the footer lists are larger than the file")),
        }
    }

    fn of_footer_table(bytes: &[u8]) -> Result<Self, Broken> {
        let footer = Table::root(bytes)?;
        let (schema, layouts) = schema(footer.table(1)?.ok_or("it has no schema")?)?;
        let blocks = |field: usize| -> Result<Vec<Block>, Broken> {
            Ok(footer.structs::<24>(field)?.iter().map(Block::of).collect())
        };
        Ok(Self { schema, layouts, dictionaries: blocks(2)?, batches: blocks(3)? })
    }

    fn of_stream(contents: &Contents) -> Result<Self, ReadError> {
        let mut found: Option<Self> = None;
        let mut offset = 0;
        let mut bytes = Vec::new();
        while offset < contents.bytes() {
            let mut prefix = [0; 8];
            contents.read_at(offset, &mut prefix)?;
            let [a, b, c, d, lens @ ..] = prefix;
            let len = u32::from_le_bytes(lens);
            if offset == 0 && [a, b, c, d] != CONTINUATION && Self::is_old_stream(contents) {
                let message = "this is an Arrow stream of a version before 0.15, which kolo does not read";
                let hint = "write it again with `pyarrow.ipc.new_stream`, without `use_legacy_format`";
                return Err(contents.unsupported(0, message, hint));
            }
            if [a, b, c, d] != CONTINUATION {
                return Err(contents.damaged(offset, "a message of an Arrow stream is expected here"));
            }
            if len == 0 {
                break;
            }
            contents.read_into(offset + 8, len.into(), &mut bytes)?;
            let message = Message::of(&bytes)
                .map_err(|error| decode_error(contents.path(), "a message cannot be read", error).at(offset))?;
            let body = u64::try_from(message.body).unwrap_or(u64::MAX);
            contents.check(offset + 8 + u64::from(len), body)?;
            let meta = len.checked_add(8).and_then(|meta| i32::try_from(meta).ok());
            let meta = meta.ok_or_else(|| contents.damaged(offset, "a message is too long"))?;
            let block = Block { offset: offset as i64, meta, body: body as i64 };
            match (&mut found, message.header) {
                (None, Header::Schema) => {
                    let schema = message.table.map(schema);
                    let schema = schema.ok_or_else(|| contents.damaged(offset, "a schema is expected here"))?;
                    let (schema, layouts) =
                        schema.map_err(|error| decode_error(contents.path(), "its schema cannot be read", error))?;
                    let (dictionaries, batches) = (Vec::new(), Vec::new());
                    found = Some(Self { schema, layouts, dictionaries, batches });
                }
                (Some(messages), Header::RecordBatch) => messages.batches.push(block),
                (Some(messages), Header::DictionaryBatch) if messages.batches.is_empty() => {
                    messages.dictionaries.push(block);
                }
                (Some(_), Header::DictionaryBatch) => {
                    let message = "a dictionary changes within the stream, which is not supported";
                    let hint = "write it as an Arrow file (`pyarrow.ipc.new_file`), or with the same dictionary in all batches";
                    return Err(ReadError::new(message, hint).in_file(contents.path()).at(offset));
                }
                (_, other) => {
                    let message = format!("a message of the kind {other:?} cannot be read here");
                    return Err(contents.damaged(offset, message));
                }
            }
            offset += 8 + u64::from(len) + body;
        }
        found.ok_or_else(|| contents.damaged(0, "an Arrow stream begins with a schema, which is missing"))
    }
}

impl Block {
    /// Where it begins, for messages.
    pub fn offset(&self) -> u64 {
        u64::try_from(self.offset).unwrap_or(0)
    }

    fn bytes(&self) -> Option<u64> {
        u64::try_from(self.meta).ok()?.checked_add(u64::try_from(self.body).ok()?)
    }

    fn of(bytes: &[u8; 24]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        let [a, b, c, d, ..] = words[1];
        Self {
            offset: i64::from_le_bytes(words[0]),
            meta: i32::from_le_bytes([a, b, c, d]),
            body: i64::from_le_bytes(words[2]),
        }
    }
}

/// A message with its body, and the bytes that this takes, decompressed.
pub(super) fn read_block(contents: &Contents, block: &Block) -> Result<(Bytes, u64), ReadError> {
    let (Ok(offset), Ok(meta), Ok(body)) =
        (u64::try_from(block.offset), u64::try_from(block.meta), u64::try_from(block.body))
    else {
        return Err(contents.damaged(0, "a message has a negative offset or size"));
    };
    let mut bytes = Vec::new();
    let len = meta.saturating_add(body);
    contents.read_into(offset, len, &mut bytes)?;
    let decompressed = check_sizes(contents, offset, &bytes, meta)?;
    Ok((bytes.into(), decompressed.max(body)))
}

/// A message, behind the continuation marker and the length.
pub(super) fn message(bytes: &[u8]) -> Result<Message<'_>, Broken> {
    let start = if bytes.starts_with(&CONTINUATION) { 8 } else { 4 };
    Message::of(bytes.get(start..).ok_or("it is too short")?)
}

/// Compressed buffers claim a length, for which memory is taken: it must make sense. Returns the sum of these lengths.
fn check_sizes(contents: &Contents, offset: u64, bytes: &[u8], meta: u64) -> Result<u64, ReadError> {
    let damaged = |what: &str| contents.damaged(offset, format!("a message cannot be read: {what}"));
    let batch = message(bytes).and_then(|message| message.batch()).map_err(damaged)?;
    let batch = batch.ok_or_else(|| damaged("it is not a batch"))?;
    let is_compressed = batch.table(3).map_err(damaged)?.is_some();
    let body = usize::try_from(meta).ok().and_then(|meta| bytes.get(meta..)).ok_or_else(|| damaged("it is cut off"))?;
    let mut total = 0_u64;
    for buffer in batch.structs(2).map_err(damaged)?.iter().map(pair) {
        let (Ok(start), Ok(len)) = (usize::try_from(buffer.0), usize::try_from(buffer.1)) else {
            return Err(damaged("a buffer has a negative offset or size"));
        };
        let end = start.checked_add(len).filter(|end| *end <= body.len());
        let end = end.ok_or_else(|| damaged("a buffer ends behind the message"))?;
        if is_compressed {
            let claimed = body[start..end].first_chunk::<8>().map_or(0, |bytes| i64::from_le_bytes(*bytes));
            total = total.saturating_add(u64::try_from(claimed).unwrap_or(0));
        }
    }
    match total > BATCH_BYTES_MAX {
        true => {
            let text = format!("a batch claims to decompress to {total} bytes, more than {BATCH_BYTES_MAX}");
            let hint = "the file is damaged, or has huge batches: write it again with smaller ones";
            Err(ReadError::new(text, hint).in_file(contents.path()).at(offset))
        }
        false => Ok(total),
    }
}

/// Rows of a batch: its header says it.
pub(super) fn rows(contents: &Contents, block: &Block) -> Result<usize, ReadError> {
    let offset = u64::try_from(block.offset).unwrap_or(u64::MAX);
    let damaged = || contents.damaged(offset, "a record batch is expected here");
    let meta = u64::try_from(block.meta).map_err(|_| damaged())?;
    let mut bytes = Vec::new();
    contents.read_into(offset, meta, &mut bytes)?;
    let batch = message(&bytes).ok().and_then(|message| message.header(Header::RecordBatch));
    batch.and_then(|batch| usize::try_from(batch.long(0).ok()?).ok()).ok_or_else(damaged)
}

/// What follows the metadata of a message.
pub(super) fn body(block: &Block, bytes: &Bytes) -> Result<Bytes, Broken> {
    let meta = usize::try_from(block.meta).ok().filter(|meta| *meta <= bytes.len());
    meta.map(|meta| bytes.slice(meta..)).ok_or("it is cut off")
}
