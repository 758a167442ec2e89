//! Arrow files: the IPC file format, which is also Feather's second version, and the stream format. Record batches are the
//! units; their offsets come from the footer, or from a walk over the messages of a stream.

mod batch;
mod flatbuffer;
mod message;
mod schema;

use super::columns::{ROWS_LOOKED_AT, TableColumns, decode_error};
use super::table::{Column, Field, Kind, Schema};
use super::{TableFile, TableReader, UNITS_TRIED, push_rows};
use crate::error::ReadError;
use crate::files::Contents;
use crate::format::Format;
use crate::guard::guarded;
use crate::units::{Decode, Rows, Units};
use batch::{BatchReader, Dictionaries};
use bytes::Bytes;
use message::{Block, CONTINUATION, FEATHER_1, Header, MAGIC, Messages, body, message, read_block, rows};
use schema::{Form, Layout};
use std::path::Path;
use std::sync::Arc;

pub(super) const FORMAT: Format = Format {
    name: "arrow",
    doc: "Arrow tables (IPC files and streams, Feather); records are rows",
    extensions: &["arrow", "feather", "ipc", "arrows"],
    sniff,
    open: super::open::<ArrowFile>,
};

/// What the dictionaries of a file may take, decompressed, whatever bytes the file has.
const DICTIONARIES_BYTES_FREE: u64 = 1 << 30;

fn sniff(_: &Path, head: &[u8]) -> bool {
    head.starts_with(MAGIC)
        || head.starts_with(FEATHER_1)
        || (head.starts_with(&CONTINUATION) && head.len() >= 16 && head[7] == 0)
}

/// One open file.
#[derive(Debug)]
pub(super) struct ArrowFile {
    contents: Contents,
    pub schema: Schema,
    layouts: Vec<Layout>,
    dictionaries: Dictionaries,
    batches: Vec<Block>,
}

impl ArrowFile {
    pub fn open(contents: Contents) -> Result<Self, ReadError> {
        let Messages { schema, layouts, dictionaries, batches } = Messages::of(&contents)?;
        let mut file = Self { contents, schema, layouts, dictionaries: Dictionaries::new(), batches };
        let most = DICTIONARIES_BYTES_FREE.max(file.contents.bytes());
        let mut left = most;
        for block in &dictionaries {
            let (bytes, decompressed) = read_block(&file.contents, block)?;
            left = left.checked_sub(decompressed).ok_or_else(|| {
                let message = format!("its dictionaries take more than {most} bytes");
                let hint = "the file is damaged, or its texts hardly repeat: write them without dictionaries";
                ReadError::new(message, hint).in_file(file.contents.path()).at(block.offset())
            })?;
            file.read_dictionary(block, &bytes).map_err(|error| {
                decode_error(file.contents.path(), "a dictionary cannot be read", error).at(block.offset())
            })?;
        }
        Ok(file)
    }

    /// Keeps the values of a dictionary if a column that can be read needs them.
    fn read_dictionary(&mut self, block: &Block, bytes: &Bytes) -> Result<(), String> {
        let message = message(bytes)?;
        message.check_version()?;
        let dictionary = message.header(Header::DictionaryBatch).ok_or("it is another message")?;
        let id = dictionary.long(0)?;
        let needs = |(field, layout): (&Field, &'_ Layout)| match (&field.kind, &layout.form) {
            (Kind::Dictionary(_, kind), Form::Dictionary { id: own, values }) if *own == id && **kind == Kind::Text => {
                Some((**values).clone())
            }
            _ => None,
        };
        let Some(layout) = self.schema.fields.iter().zip(&self.layouts).find_map(needs) else { return Ok(()) };
        let data = dictionary.table(1)?.ok_or("it has no values")?;
        let nothing = Dictionaries::new();
        let mut reader = BatchReader::new(data, message.version, body(block, bytes)?, &nothing)?;
        let values = reader.column(&Kind::Text, &layout)?;
        match dictionary.byte(2)? != 0 {
            false => _ = self.dictionaries.insert(id, Arc::default()),
            true if self.dictionaries.contains_key(&id) => {}
            true => return Err("it is a delta for a dictionary that was never defined".into()),
        }
        let words = self.dictionaries.entry(id).or_default();
        Arc::get_mut(words).ok_or("its dictionary is in use")?.push(values);
        Ok(())
    }

    /// The columns that are read of a batch, and its number of rows.
    fn batch(&self, number: usize, columns: &TableColumns) -> Result<(Vec<Column>, usize), ReadError> {
        let block = &self.batches[number];
        let (bytes, _) = read_block(&self.contents, block)?;
        self.decode(block, &bytes, columns).map_err(|error| {
            let what = format!("record batch {number} cannot be decoded");
            decode_error(self.contents.path(), &what, error).at(block.offset())
        })
    }

    fn decode(&self, block: &Block, bytes: &Bytes, columns: &TableColumns) -> Result<(Vec<Column>, usize), String> {
        let message = message(bytes)?;
        message.check_version()?;
        let batch = message.header(Header::RecordBatch).ok_or("it is another message")?;
        let rows = usize::try_from(batch.long(0)?).map_err(|_| "it has a negative number of rows")?;
        let mut reader = BatchReader::new(batch, message.version, body(block, bytes)?, &self.dictionaries)?;
        let mut decoded = Vec::new();
        for (index, (field, layout)) in self.schema.fields.iter().zip(&self.layouts).enumerate() {
            // The columns that are read stand in the order of the schema.
            match columns.columns.get(decoded.len()) {
                None => break,
                Some(column) if column.index == index => decoded.push(reader.column(&field.kind, layout)?),
                Some(_) => reader.skip(layout)?,
            }
        }
        match decoded.len() == columns.columns.len() && decoded.iter().all(|column| column.len == rows) {
            true => Ok((decoded, rows)),
            false => Err("its columns differ in length".into()),
        }
    }
}

/// Where the values of the first record batch are.
#[cfg(test)]
pub(super) fn first_values(contents: &Contents) -> u64 {
    let block = &Messages::of(contents).unwrap().batches[0];
    block.offset() + block.meta as u64
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
            let (batch, _) = file.batch(number, &self.columns)?;
            push_rows(&self.columns, &batch, out)
        })
    }
}

/// Completes the kinds of the columns from the first rows of batches that can be decoded. Rows of one that cannot are errors
/// when they are read, so that they can be skipped.
fn look_at_first(files: &[ArrowFile], columns: &mut TableColumns) -> Result<(), ReadError> {
    let (mut looked_at, mut tried, mut bad) = (0, 0, None);
    for (file, number) in files.iter().flat_map(|file| (0..file.batches.len()).map(move |number| (file, number))) {
        if !columns.need_values() || looked_at >= ROWS_LOOKED_AT || tried == UNITS_TRIED {
            break;
        }
        match guarded(file.contents.path(), || file.batch(number, columns)) {
            Ok((batch, rows)) => {
                columns.look_at(&batch);
                looked_at += rows;
            }
            Err(error) => {
                tried += 1;
                bad = bad.or(Some(error));
            }
        }
    }
    match bad {
        Some(bad) if looked_at == 0 => Err(bad),
        _ => Ok(()),
    }
}

impl TableFile for ArrowFile {
    fn open(contents: Contents) -> Result<Self, ReadError> {
        Self::open(contents)
    }

    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn reader(files: Vec<Self>, columns: TableColumns, budget: usize) -> Result<TableReader, ReadError> {
        reader(files, columns, budget)
    }
}

fn reader(files: Vec<ArrowFile>, mut columns: TableColumns, budget: usize) -> Result<TableReader, ReadError> {
    let (mut units, mut unit_rows) = (Vec::new(), Vec::new());
    for (at, file) in files.iter().enumerate() {
        for (number, block) in file.batches.iter().enumerate() {
            units.push((at, number));
            unit_rows.push(guarded(file.contents.path(), || rows(&file.contents, block))?);
        }
    }
    look_at_first(&files, &mut columns)?;
    let (records, unread, index) = (columns.records.clone(), columns.unread.clone(), columns.index.clone());
    let decoder = Batches { files, units, columns };
    Ok(TableReader { units: Units::new(Box::new(decoder), records, &unit_rows, budget), unread, index })
}
