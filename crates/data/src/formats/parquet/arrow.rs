//! Arrow files: the IPC file format, which is also Feather's second version, and the stream format. Record batches are the
//! units; their places come from the footer, or from a walk over the messages of a stream.

use super::columns::{TableColumns, decode_error};
use super::{TableReader, push_rows, same_columns};
use crate::error::ReadError;
use crate::files::{Contents, DataFile};
use crate::format::{Format, OpenedFiles};
use crate::guard::guarded;
use crate::units::{DECODED_BYTES_MAX, Decode, Rows, Units};
use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::{FileDecoder, read_footer_length};
use arrow_ipc::{Block, Message, MessageHeader, MetadataVersion, root_as_footer, root_as_message};
use arrow_schema::Schema;
use kolo_graph::settings::Settings;
use std::path::Path;
use std::sync::Arc;

pub(super) const FORMAT: Format = Format {
    name: "arrow",
    doc: "Arrow tables (IPC files and streams, Feather); records are rows",
    extensions: &["arrow", "feather", "ipc", "arrows"],
    sniff,
    open,
};

const MAGIC: &[u8] = b"ARROW1";
/// Marks a message, before the four bytes of its length.
const CONTINUATION: [u8; 4] = [0xFF; 4];
/// A batch or dictionary may unpack to this much.
const BATCH_BYTES_MAX: u64 = 1 << 30;
/// Rows that one block of decoded rows holds.
const BLOCK_ROWS: usize = 4096;

fn sniff(_: &Path, head: &[u8]) -> bool {
    head.starts_with(MAGIC) || (head.starts_with(&CONTINUATION) && head.len() >= 16 && head[7] == 0)
}

/// One open file.
#[derive(Debug)]
struct ArrowFile {
    contents: Contents,
    decoder: FileDecoder,
    schema: Arc<Schema>,
    batches: Vec<Block>,
}

/// The messages of a file: of dictionaries, and of batches.
struct Messages {
    schema: Schema,
    version: MetadataVersion,
    dictionaries: Vec<Block>,
    batches: Vec<Block>,
}

impl Messages {
    fn of(contents: &Contents) -> Result<Self, ReadError> {
        let mut start = [0; 6];
        match contents.bytes() >= 6 {
            true => contents.read_at(0, &mut start)?,
            false => return Err(contents.damaged(0, "an Arrow file is expected here")),
        }
        if start == MAGIC { Self::of_footer(contents) } else { Self::of_stream(contents) }
    }

    fn of_footer(contents: &Contents) -> Result<Self, ReadError> {
        let failed = |error: &dyn std::fmt::Display| decode_error(contents.path(), "its footer cannot be read", error);
        let mut end = [0; 10];
        let at = contents.bytes().saturating_sub(10);
        contents.read_at(at, &mut end)?;
        let len = read_footer_length(end).map_err(|error| failed(&error))? as u64;
        let offset = at.checked_sub(len).ok_or_else(|| contents.damaged(at, "the footer is longer than the file"))?;
        let mut bytes = Vec::new();
        contents.read_into(offset, len, &mut bytes)?;
        let footer = root_as_footer(&bytes).map_err(|error| failed(&error))?;
        let schema = footer.schema().ok_or_else(|| failed(&"it has no schema"))?;
        if !schema.endianness().equals_to_target_endianness() {
            return Err(failed(&"its numbers have the byte order of another machine"));
        }
        Ok(Self {
            schema: try_fb_to_schema(schema).map_err(|error| failed(&error))?,
            version: footer.version(),
            dictionaries: footer.dictionaries().iter().flatten().copied().collect(),
            batches: footer.recordBatches().iter().flatten().copied().collect(),
        })
    }

    fn of_stream(contents: &Contents) -> Result<Self, ReadError> {
        let mut found: Option<Self> = None;
        let mut offset = 0;
        let mut bytes = Vec::new();
        while offset + 8 <= contents.bytes() {
            let mut prefix = [0; 8];
            contents.read_at(offset, &mut prefix)?;
            let [a, b, c, d, lens @ ..] = prefix;
            let len = u32::from_le_bytes(lens);
            if [a, b, c, d] != CONTINUATION {
                return Err(contents.damaged(offset, "a message of an Arrow stream is expected here"));
            }
            if len == 0 {
                break;
            }
            contents.read_into(offset + 8, len.into(), &mut bytes)?;
            let message = root_as_message(&bytes)
                .map_err(|error| decode_error(contents.path(), "a message cannot be read", error).at(offset))?;
            let body = u64::try_from(message.bodyLength()).unwrap_or(u64::MAX);
            contents.check(offset + 8 + u64::from(len), body)?;
            let meta = i32::try_from(len + 8).map_err(|_| contents.damaged(offset, "a message is too long"))?;
            let block = Block::new(offset as i64, meta, body as i64);
            match (&mut found, message.header_type()) {
                (None, MessageHeader::Schema) => {
                    let schema = message.header_as_schema().map(try_fb_to_schema);
                    let schema = schema.ok_or_else(|| contents.damaged(offset, "a schema is expected here"))?;
                    let schema =
                        schema.map_err(|error| decode_error(contents.path(), "its schema cannot be read", error))?;
                    let (dictionaries, batches) = (Vec::new(), Vec::new());
                    found = Some(Self { schema, version: message.version(), dictionaries, batches });
                }
                (Some(messages), MessageHeader::RecordBatch) => messages.batches.push(block),
                (Some(messages), MessageHeader::DictionaryBatch) if messages.batches.is_empty() => {
                    messages.dictionaries.push(block);
                }
                (_, other) => {
                    let message = format!("a message of the kind {other:?} cannot be read here");
                    return Err(contents.damaged(offset, message));
                }
            }
            offset += 8 + u64::from(len) + body;
        }
        found.ok_or_else(|| contents.damaged(0, "an Arrow stream begins with a schema, and here is none"))
    }
}

/// A message with its body.
fn read_block(contents: &Contents, block: &Block) -> Result<Buffer, ReadError> {
    let (Ok(offset), Ok(meta), Ok(body)) =
        (u64::try_from(block.offset()), u64::try_from(block.metaDataLength()), u64::try_from(block.bodyLength()))
    else {
        return Err(contents.damaged(0, "a message has a negative place or size"));
    };
    let mut bytes = Vec::new();
    let len = meta.checked_add(body).unwrap_or(u64::MAX);
    contents.read_into(offset, len, &mut bytes)?;
    check_sizes(contents, offset, &bytes, meta)?;
    Ok(Buffer::from_vec(bytes))
}

/// The flatbuffer of a message, without the mark and the length before it.
fn message(bytes: &[u8]) -> Option<Message<'_>> {
    let head = if bytes.starts_with(&CONTINUATION) { bytes.get(8..)? } else { bytes.get(4..)? };
    root_as_message(head).ok()
}

/// Packed buffers claim a length, for which the decoder takes memory: it must make sense.
fn check_sizes(contents: &Contents, offset: u64, bytes: &[u8], meta: u64) -> Result<(), ReadError> {
    let damaged = |what: &str| contents.damaged(offset, format!("a message cannot be read: {what}"));
    let message = message(bytes).ok_or_else(|| damaged("it is no message"))?;
    let batch = match message.header_type() {
        MessageHeader::DictionaryBatch => message.header_as_dictionary_batch().and_then(|batch| batch.data()),
        _ => message.header_as_record_batch(),
    };
    let batch = batch.ok_or_else(|| damaged("it is no batch"))?;
    let body = usize::try_from(meta).ok().and_then(|meta| bytes.get(meta..)).ok_or_else(|| damaged("it is cut off"))?;
    let mut total = 0_u64;
    for buffer in batch.buffers().iter().flatten() {
        let (Ok(start), Ok(len)) = (usize::try_from(buffer.offset()), usize::try_from(buffer.length())) else {
            return Err(damaged("a buffer has a negative place or size"));
        };
        let end = start.checked_add(len).filter(|end| *end <= body.len());
        let end = end.ok_or_else(|| damaged("a buffer ends behind the message"))?;
        if batch.compression().is_some() {
            let claimed = body[start..end].first_chunk::<8>().map_or(0, |bytes| i64::from_le_bytes(*bytes));
            total = total.saturating_add(u64::try_from(claimed).unwrap_or(0));
        }
    }
    match total > BATCH_BYTES_MAX {
        true => {
            let text = format!("a batch claims to unpack to {total} bytes, more than {BATCH_BYTES_MAX}");
            let hint = "the file is damaged, or has huge batches: write it again with smaller ones";
            Err(ReadError::new(text, hint).in_file(contents.path()).at(offset))
        }
        false => Ok(()),
    }
}

/// Rows of a batch: its header says it.
fn rows(contents: &Contents, block: &Block) -> Result<usize, ReadError> {
    let offset = u64::try_from(block.offset()).unwrap_or(u64::MAX);
    let damaged = || contents.damaged(offset, "a record batch is expected here");
    let meta = u64::try_from(block.metaDataLength()).map_err(|_| damaged())?;
    let mut bytes = Vec::new();
    contents.read_into(offset, meta, &mut bytes)?;
    let batch = message(&bytes).and_then(|message| message.header_as_record_batch().map(|batch| batch.length()));
    batch.and_then(|rows| usize::try_from(rows).ok()).ok_or_else(damaged)
}

impl ArrowFile {
    fn open(contents: Contents) -> Result<Self, ReadError> {
        let messages = Messages::of(&contents)?;
        let schema = Arc::new(messages.schema);
        let mut decoder = FileDecoder::new(Arc::clone(&schema), messages.version);
        for block in &messages.dictionaries {
            let bytes = read_block(&contents, block)?;
            let read = decoder.read_dictionary(block, &bytes);
            read.map_err(|error| decode_error(contents.path(), "a dictionary cannot be read", error))?;
        }
        Ok(Self { contents, decoder, schema, batches: messages.batches })
    }

    fn batch(&self, number: usize) -> Result<RecordBatch, ReadError> {
        let what = format!("record batch {number} cannot be decoded");
        let block = &self.batches[number];
        let bytes = read_block(&self.contents, block)?;
        let batch = self.decoder.read_record_batch(block, &bytes);
        let batch = batch.map_err(|error| decode_error(self.contents.path(), &what, error))?;
        batch.ok_or_else(|| decode_error(self.contents.path(), &what, "it is empty"))
    }
}

#[derive(Debug)]
struct Batches {
    files: Vec<ArrowFile>,
    /// File and batch of every unit.
    units: Vec<(usize, usize)>,
    columns: TableColumns,
}

impl Decode for Batches {
    fn path(&self, unit: usize) -> &Path {
        self.files[self.units[unit].0].contents.path()
    }

    fn decode(&self, unit: usize, out: &mut Rows) -> Result<(), ReadError> {
        let (file, number) = self.units[unit];
        let file = &self.files[file];
        guarded(file.contents.path(), || {
            let batch = file.batch(number)?;
            for start in (0..batch.num_rows()).step_by(BLOCK_ROWS) {
                let part = batch.slice(start, BLOCK_ROWS.min(batch.num_rows() - start));
                let arrays = self.columns.arrays(&part);
                let arrays = arrays.map_err(|error| decode_error(file.contents.path(), "a batch is broken", error))?;
                push_rows(&self.columns, &arrays, out)?;
            }
            Ok(())
        })
    }
}

fn look_at_first(files: &[ArrowFile], columns: &mut TableColumns) -> Result<(), ReadError> {
    if !columns.need_values() {
        return Ok(());
    }
    for file in files {
        for number in 0..file.batches.len() {
            let batch = file.batch(number)?;
            if batch.num_rows() > 0 {
                let failed = |error| decode_error(file.contents.path(), "the first record cannot be read", error);
                let arrays = columns.arrays(&batch).map_err(failed)?;
                return columns.look_at(&arrays).map_err(failed);
            }
        }
    }
    Ok(())
}

fn open(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let budget = settings.count("decoded_max", DECODED_BYTES_MAX, 0)?;
    let mut opened: Vec<ArrowFile> = Vec::new();
    let mut columns: Option<TableColumns> = None;
    let (mut units, mut unit_rows) = (Vec::new(), Vec::new());
    for file in files {
        let contents = file.contents(settings)?;
        let arrow = guarded(&file.path, || ArrowFile::open(contents))?;
        match &columns {
            None => columns = Some(TableColumns::of_schema(&arrow.schema, settings)?),
            Some(columns) => same_columns(columns, &files[0].path, &arrow.schema, file, settings)?,
        }
        for (number, block) in arrow.batches.iter().enumerate() {
            units.push((opened.len(), number));
            unit_rows.push(guarded(&file.path, || rows(&arrow.contents, block))?);
        }
        opened.push(arrow);
    }
    let Some(mut columns) = columns else {
        return Err(settings.wrong("source", "names no file", "name a file or a pattern").into());
    };
    guarded(&files[0].path, || look_at_first(&opened, &mut columns))?;
    let records = columns.records.clone();
    let decoder = Batches { files: opened, units, columns };
    Ok(Box::new(TableReader { units: Units::new(Box::new(decoder), records, &unit_rows, budget) }))
}
