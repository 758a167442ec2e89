//! Parquet files, and Arrow files (IPC, Feather). Both are columnar: what is decoded at once is a row group or a record batch
//! (`crate::units`), and records are its rows.

mod arrow;
mod budget;
mod columns;
mod leaf;
mod levels;
mod pages;
mod schema;
mod table;
mod thrift;
mod values;

use crate::error::ReadError;
use crate::files::{Contents, DataFile, last_read};
use crate::format::{Format, OpenedFiles, Reader};
use crate::guard::guarded;
use crate::record::{Record, RecordColumn, UnreadColumn};
use crate::units::{DECODED_BYTES_MAX, Decode, Rows, Units};
use ::parquet::basic::Compression;
use ::parquet::errors::ParquetError;
use ::parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use ::parquet::file::reader::{ChunkReader, Length};
use bytes::Bytes;
use columns::{ROWS_LOOKED_AT, TableColumns, decode_error};
use kolo_base::ShownPath;
use kolo_graph::settings::Settings;
use leaf::LeafReader;
use pages::Claims;
use schema::ColumnPath;
use std::io::{self, BufReader, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use table::{Column, Schema};

pub const FORMAT: Format = Format {
    name: "parquet",
    doc: "Parquet tables; records are rows",
    extensions: &["parquet", "pq"],
    sniff: |_, head| head.starts_with(b"PAR1"),
    open: open::<ParquetFile>,
};
pub const ARROW: Format = arrow::FORMAT;

/// What a batch of rows should take, decoded.
const BATCH_BYTES: u64 = 4 << 20;
const BATCH_ROWS_MAX: u64 = 4096;
/// Row groups, or record batches, that are tried to learn what the columns are.
const UNITS_TRIED: usize = 16;
/// What a number takes in a row.
const NUMBER_BYTES: u64 = 9;

/// Rows of a table, of Parquet or Arrow.
#[derive(Debug)]
struct TableReader {
    units: Units,
    unread: Vec<UnreadColumn>,
    /// Whether each column is the index of a DataFrame.
    index: Vec<bool>,
}

impl Reader for TableReader {
    fn columns(&self) -> &[RecordColumn] {
        self.units.columns()
    }

    fn unread(&self) -> &[UnreadColumn] {
        &self.unread
    }

    fn is_index(&self, column: usize) -> bool {
        self.index.get(column).copied().unwrap_or(false)
    }

    fn len(&self) -> usize {
        self.units.len()
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        // Without a column nothing is decoded, and rows are known by their number only.
        if self.columns().is_empty() {
            return Ok(());
        }
        self.units.read(at, record)
    }
}

/// The file as the decoder asks for it.
#[derive(Clone, Debug)]
struct Chunks(Contents);

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.0.bytes()
    }
}

/// Reads on from an offset.
#[derive(Debug)]
struct From {
    contents: Contents,
    offset: u64,
}

impl Read for From {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = (self.contents.bytes().saturating_sub(self.offset)).min(out.len() as u64) as usize;
        self.contents.read_at(self.offset, &mut out[..len]).map_err(|error| io::Error::other(error.message))?;
        self.offset += len as u64;
        Ok(len)
    }
}

/// Page headers take a few dozen bytes.
const HEADER_BUFFER_BYTES: usize = 512;

impl ChunkReader for Chunks {
    type T = BufReader<From>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        let from = From { contents: self.0.clone(), offset: start };
        Ok(BufReader::with_capacity(HEADER_BUFFER_BYTES, from))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        let mut bytes = Vec::new();
        let read = self.0.read_into(start, length as u64, &mut bytes);
        read.map_err(|error| ParquetError::General(format!("byte {start}: {}", error.message)))?;
        Ok(bytes.into())
    }
}

/// The metadata at the end of a file, as they stand there.
struct Footer {
    offset: u64,
    bytes: Vec<u8>,
}

impl Footer {
    fn read(contents: &Contents) -> Result<Self, ReadError> {
        let mut end = [0; 8];
        let at =
            contents.bytes().checked_sub(8).ok_or_else(|| contents.damaged(0, "a Parquet file is expected here"))?;
        contents.read_at(at, &mut end)?;
        let [a, b, c, d, magic @ ..] = end;
        if &magic == b"PARE" {
            return Err(contents.unsupported(at + 4, "its footer is encrypted", "write it again without encryption"));
        }
        if &magic != b"PAR1" {
            return Err(contents.damaged(at + 4, "a Parquet file ends with `PAR1`"));
        }
        let len = u64::from(u32::from_le_bytes([a, b, c, d]));
        let offset = at.checked_sub(len).ok_or_else(|| contents.damaged(at, "the footer is longer than the file"))?;
        let mut bytes = Vec::new();
        contents.read_into(offset, len, &mut bytes)?;
        Ok(Self { offset, bytes })
    }
}

/// One open file.
#[derive(Clone, Debug)]
struct ParquetFile {
    chunks: Chunks,
    metadata: Arc<ParquetMetaData>,
    /// Where the metadata are.
    footer: u64,
    schema: Schema,
    /// Of each column of the schema, if it can be read.
    paths: Vec<Option<ColumnPath>>,
}

impl ParquetFile {
    fn open(contents: Contents) -> Result<Self, ReadError> {
        let path = contents.path().to_owned();
        let chunks = Chunks(contents);
        let footer = Footer::read(&chunks.0)?;
        let failed =
            |error: &dyn std::fmt::Display| decode_error(&path, "its footer cannot be read", error).at(footer.offset);
        thrift::check_schema(&footer.bytes).map_err(|error| failed(&error))?;
        let metadata = ParquetMetaDataReader::decode_metadata(&footer.bytes).map_err(|error| failed(&error))?;
        let (schema, paths) = schema::schema(metadata.file_metadata());
        Ok(Self { chunks, metadata: Arc::new(metadata), footer: footer.offset, schema, paths })
    }

    fn path(&self) -> &Path {
        self.chunks.0.path()
    }

    /// Rows of each row group.
    fn rows(&self) -> Result<Vec<usize>, ReadError> {
        let groups = self.metadata.row_groups().iter();
        let rows = groups.map(|group| {
            let rows = usize::try_from(group.num_rows()).ok();
            rows.ok_or_else(|| {
                let error = decode_error(self.path(), "a row group cannot be read", "it has a negative size");
                error.at(self.footer)
            })
        });
        rows.collect()
    }

    /// Refuses columns that are compressed in a way that is not read: their metadata say so before anything is decoded.
    fn check_codecs(&self, columns: &TableColumns) -> Result<(), ReadError> {
        for group in self.metadata.row_groups() {
            for (column, record) in columns.columns.iter().zip(&columns.records) {
                let path = self.paths.get(column.index).and_then(Option::as_ref);
                let Some(path) = path.filter(|path| path.leaf < group.num_columns()) else { continue };
                let codec = match group.column(path.leaf).compression() {
                    Compression::BROTLI(_) => "brotli",
                    Compression::LZO => "lzo",
                    _ => continue,
                };
                let message =
                    format!("its column \"{}\" is compressed with {codec}, which kolo does not read", record.name);
                let hint =
                    "write it again with `compression=\"zstd\"`; snappy, gzip, lz4 and no compression are read, too";
                return Err(self.chunks.0.unsupported(self.footer, message, hint));
            }
        }
        Ok(())
    }

    /// Readers of the columns, and how many rows they should read at once.
    fn readers(&self, group: usize, columns: &TableColumns) -> Result<(Vec<LeafReader<'_>>, usize), ReadError> {
        let metadata = self.metadata.row_group(group);
        let rows = usize::try_from(metadata.num_rows()).unwrap_or(0);
        let (mut claims, mut paths) = (Claims::default(), Vec::new());
        for column in &columns.columns {
            let path = self.paths.get(column.index).and_then(Option::as_ref);
            let path = path.filter(|path| path.leaf < metadata.num_columns());
            let path = path.ok_or_else(|| self.group_error(group, &"a column is missing"))?;
            let chunk = metadata.column(path.leaf);
            paths.push((path, chunk, pages::check(&self.chunks.0, chunk, &mut claims)?));
        }
        let budget = claims.budget();
        let readers = paths.into_iter().map(|(path, chunk, offsets)| {
            let reader = LeafReader::new(&self.chunks, chunk, offsets, rows, path, &budget);
            reader.map_err(|error| self.group_error(group, &error))
        });
        let row_bytes = (claims.bytes / (rows as u64).max(1)).max(claims.row_bytes).max(1);
        Ok((readers.collect::<Result<_, _>>()?, (BATCH_BYTES / row_bytes).clamp(1, BATCH_ROWS_MAX) as usize))
    }

    fn group_error(&self, group: usize, error: &dyn std::fmt::Display) -> ReadError {
        // What is wrong before a page is read is wrong in the metadata.
        let at = last_read().unwrap_or(self.footer);
        decode_error(self.path(), &format!("row group {group} cannot be decoded"), error).at(at)
    }

    /// Hands the batches of a row group to `each`, with the columns that are read only; stops when it says so.
    fn batches(
        &self,
        group: usize,
        columns: &TableColumns,
        each: &mut dyn FnMut(&[Column]) -> Result<bool, ReadError>,
    ) -> Result<(), ReadError> {
        let (mut readers, batch_rows) = self.readers(group, columns)?;
        loop {
            let batch: Result<Vec<Column>, String> = readers.iter_mut().map(|reader| reader.read(batch_rows)).collect();
            let batch = batch.map_err(|error| self.group_error(group, &error))?;
            let rows = batch.first().map_or(0, |column| column.len);
            if let Some(at) = batch.iter().position(|column| column.len != rows) {
                let (names, other) = (&columns.records, batch[at].len);
                let message = format!(
                    "its columns have different numbers of rows: \"{}\" has {rows}, \"{}\" has {other}",
                    names[0].name, names[at].name
                );
                return Err(self.group_error(group, &message));
            }
            if rows == 0 || !each(&batch)? {
                return Ok(());
            }
        }
    }
}

/// Decodes row groups of all files.
#[derive(Debug)]
struct Groups {
    files: Vec<ParquetFile>,
    /// File and row group of every unit.
    units: Vec<(usize, usize)>,
    columns: TableColumns,
}

/// Puts all rows of a batch, given by the columns that are read, behind those before, in blocks of bounded size.
fn push_rows(columns: &TableColumns, batch: &[Column], out: &mut Rows) -> Result<(), ReadError> {
    let rows = batch.first().map_or(0, |column| column.len);
    let row_bytes = NUMBER_BYTES * batch.len().max(1) as u64;
    let block_rows = (BATCH_BYTES / row_bytes).clamp(1, BATCH_ROWS_MAX) as usize;
    for start in (0..rows).step_by(block_rows) {
        push_block(columns, batch, start..rows.min(start + block_rows), out)?;
    }
    Ok(())
}

fn push_block(columns: &TableColumns, batch: &[Column], rows: Range<usize>, out: &mut Rows) -> Result<(), ReadError> {
    // Most tables hold numbers only: column after column is much faster than cell after cell.
    if let Some(numbers) = columns.all_numbers(batch, &rows) {
        out.push_table(&numbers, rows.len());
        return out.end_block();
    }
    let mut record = Record::new();
    for row in rows {
        match columns.read(batch, row, &mut record) {
            Ok(()) => out.push(&record),
            Err(message) => out.push_broken(&message),
        }
        // Rows that share a long text take more than their batch does.
        if out.open_bytes() >= BATCH_BYTES {
            out.end_block()?;
        }
    }
    out.end_block()
}

impl Decode for Groups {
    fn path(&self, unit: usize) -> &Path {
        self.files[self.units[unit].0].path()
    }

    fn described_at(&self, unit: usize) -> Option<u64> {
        Some(self.files[self.units[unit].0].footer)
    }

    fn decode(&self, unit: usize, out: &mut Rows) -> Result<(), ReadError> {
        let (file, group) = self.units[unit];
        let file = &self.files[file];
        guarded(file.path(), || {
            file.batches(group, &self.columns, &mut |batch| push_rows(&self.columns, batch, out).map(|()| true))
        })
    }
}

/// Completes the kinds of the columns from the first row group that has rows and can be decoded. Rows of one that cannot are
/// errors when they are read, so that they can be skipped.
fn look_at_first(files: &[ParquetFile], columns: &mut TableColumns) -> Result<(), ReadError> {
    let groups = |file: &ParquetFile| file.metadata.num_row_groups();
    let all = files.iter().flat_map(|file| (0..groups(file)).map(move |group| (file, group)));
    let with_rows = |(file, group): &(&ParquetFile, usize)| file.metadata.row_group(*group).num_rows() > 0;
    if !columns.need_values() {
        return Ok(());
    }
    let mut bad = None;
    for (file, group) in all.filter(with_rows).take(UNITS_TRIED) {
        let (mut looked_at, before) = (0, columns.clone());
        let looked = guarded(file.path(), || {
            file.batches(group, &before, &mut |batch| {
                looked_at += batch.first().map_or(0, |column| column.len);
                columns.look_at(batch);
                Ok(columns.need_values() && looked_at < ROWS_LOOKED_AT)
            })
        });
        match looked {
            Ok(()) => return Ok(()),
            Err(error) => _ = bad.get_or_insert(error),
        }
    }
    bad.map_or(Ok(()), Err)
}

/// An open file with a table.
trait TableFile: Sized {
    fn open(contents: Contents) -> Result<Self, ReadError>;

    fn schema(&self) -> &Schema;

    /// Reads these columns of the files.
    fn reader(files: Vec<Self>, columns: TableColumns, budget: usize) -> Result<TableReader, ReadError>;
}

impl TableFile for ParquetFile {
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

/// Opens files that are one table together.
fn open<F: TableFile>(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let budget = settings.count("decoded_max", DECODED_BYTES_MAX, 0)?;
    let (mut opened, mut columns) = (Vec::new(), None);
    for file in files {
        let contents = file.contents(settings)?;
        let table = guarded(&file.path, || F::open(contents))?;
        match &columns {
            None => columns = Some(TableColumns::of_schema(table.schema())),
            Some(columns) => same_columns(columns, &files[0].path, table.schema(), file)?,
        }
        opened.push(table);
    }
    let Some(columns) = columns else {
        return Err(settings.wrong("source", "names no file", "name a file or a pattern").into());
    };
    Ok(Box::new(F::reader(opened, columns, budget)?))
}

/// Reads these columns of the files.
fn reader(files: Vec<ParquetFile>, mut columns: TableColumns, budget: usize) -> Result<TableReader, ReadError> {
    let (mut units, mut rows) = (Vec::new(), Vec::new());
    for (number, file) in files.iter().enumerate() {
        file.check_codecs(&columns)?;
        let groups = file.rows()?;
        units.extend((0..groups.len()).map(|group| (number, group)));
        rows.extend(groups);
    }
    look_at_first(&files, &mut columns)?;
    let (records, unread, index) = (columns.records.clone(), columns.unread.clone(), columns.index.clone());
    let decoder = Groups { files, units, columns };
    Ok(TableReader { units: Units::new(Box::new(decoder), records, &rows, budget), unread, index })
}

/// Files that are read as one must have the same columns.
fn same_columns(first: &TableColumns, first_path: &Path, schema: &Schema, file: &DataFile) -> Result<(), ReadError> {
    let other = TableColumns::of_schema(schema);
    let same = |column: usize| {
        let (a, b) = (first.records.get(column), other.records.get(column));
        matches!((a, b), (Some(a), Some(b)) if a == b) && first.columns[column].index == other.columns[column].index
    };
    let count = first.records.len().max(other.records.len());
    let Some(differs) = (0..count).find(|column| !same(*column)) else { return Ok(()) };
    let name = first.records.get(differs).or(other.records.get(differs)).map_or("", |column| &column.name);
    let message = format!("its column \"{name}\" is not the one of {}", first_path.shown());
    Err(ReadError::new(message, "files that are read together need the same columns in the same order")
        .in_file(&file.path))
}

#[cfg(test)]
#[path = "parquet/tests.rs"]
mod tests;

#[cfg(test)]
#[path = "parquet/kinds_tests.rs"]
mod kinds_tests;
