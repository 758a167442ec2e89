//! Decodes the values of one Parquet column, some rows at a time.

use super::Chunks;
use super::budget::{Budget, CheckedPages, RowMemory};
use super::levels::{self, ListLevel};
use super::schema::ColumnPath;
use super::table::{Column, Kind, Number, Offsets, Validity, Values};
use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use ::parquet::data_type::{ByteArray, DataType, FixedLenByteArray};
use ::parquet::errors::ParquetError;
use ::parquet::file::metadata::ColumnChunkMetaData;
use ::parquet::file::serialized_reader::SerializedPageReader;
use bytes::Bytes;
use half::f16;
use std::sync::Arc;

/// Pages without a value that may follow each other.
const EMPTY_PAGES_MAX: usize = 64;

/// Reads a column chunk from its first row to its last.
pub(super) struct LeafReader<'p> {
    path: &'p ColumnPath,
    reader: ColumnReader,
    /// Rows that should come.
    left: usize,
    /// Of the rows that are being read.
    definitions: Vec<i16>,
    repetitions: Vec<i16>,
    memory: Arc<RowMemory>,
}

impl<'p> LeafReader<'p> {
    /// Reads a chunk whose pages, at these offsets, have been checked.
    pub fn new(
        chunks: &Chunks,
        chunk: &ColumnChunkMetaData,
        offsets: Vec<u64>,
        rows: usize,
        path: &'p ColumnPath,
        budget: &Arc<Budget>,
    ) -> Result<Self, ParquetError> {
        let memory = RowMemory::new(budget);
        let pages = SerializedPageReader::new(Arc::new(chunks.clone()), chunk, rows, None)?;
        let pages = CheckedPages::new(pages, chunk.column_descr_ptr(), offsets, Arc::clone(&memory));
        let reader = get_column_reader(chunk.column_descr_ptr(), Box::new(pages));
        Ok(Self { path, reader, left: rows, definitions: Vec::new(), repetitions: Vec::new(), memory })
    }

    /// Reads up to `rows` rows; none at the end.
    pub fn read(&mut self, rows: usize) -> Result<Column, String> {
        let Self { path, reader, left, definitions, repetitions, memory } = self;
        memory.release();
        definitions.clear();
        repetitions.clear();
        let levels = Levels { path, left, definitions, repetitions };
        let number = match path.kind {
            Kind::Number(number) => Some(number),
            _ => None,
        };
        match (reader, number) {
            (ColumnReader::BoolColumnReader(reader), None) => {
                levels.column(reader, rows, |values| Values::Ints(values.into_iter().map(i64::from).collect()))
            }
            (ColumnReader::Int32ColumnReader(reader), Some(Number::Int { bits, signed })) => {
                levels.column(reader, rows, |values| Values::Ints(widened(&values, bits, signed)))
            }
            (ColumnReader::Int64ColumnReader(reader), Some(Number::Int { signed: true, .. })) => {
                levels.column(reader, rows, Values::Ints)
            }
            (ColumnReader::Int64ColumnReader(reader), Some(Number::Int { signed: false, .. })) => {
                levels.column(reader, rows, |values| {
                    Values::Unsigned(values.into_iter().map(|value| value as u64).collect())
                })
            }
            (ColumnReader::FloatColumnReader(reader), Some(_)) => levels.column(reader, rows, Values::Reals),
            (ColumnReader::DoubleColumnReader(reader), Some(_)) => levels.column(reader, rows, Values::Doubles),
            (ColumnReader::FixedLenByteArrayColumnReader(reader), Some(_)) => {
                levels.column(reader, rows, |values| Values::Reals(values.iter().map(half).collect()))
            }
            (ColumnReader::FixedLenByteArrayColumnReader(reader), None) => {
                levels.column(reader, rows, |values| Values::Parts(values.into_iter().map(ByteArray::from).collect()))
            }
            (ColumnReader::ByteArrayColumnReader(reader), None) => levels.column(reader, rows, Values::Parts),
            _ => Err("its type cannot be read".into()),
        }
    }
}

fn half(bytes: &FixedLenByteArray) -> f32 {
    bytes.data().first_chunk().map_or(f32::NAN, |bytes| f16::from_le_bytes(*bytes).to_f32())
}

/// Small and unsigned numbers stand in 32 bits with a sign.
fn widened(values: &[i32], bits: u8, signed: bool) -> Vec<i64> {
    let each = |convert: fn(i32) -> i64| values.iter().map(|value| convert(*value)).collect();
    match (bits, signed) {
        (8, true) => each(|value| i64::from(value as i8)),
        (8, false) => each(|value| i64::from(value as u8)),
        (16, true) => each(|value| i64::from(value as i16)),
        (16, false) => each(|value| i64::from(value as u16)),
        (_, true) => values.iter().map(|value| i64::from(*value)).collect(),
        (_, false) => values.iter().map(|value| i64::from(*value as u32)).collect(),
    }
}

/// What is read of rows beside their values.
struct Levels<'l> {
    path: &'l ColumnPath,
    left: &'l mut usize,
    definitions: &'l mut Vec<i16>,
    repetitions: &'l mut Vec<i16>,
}

impl Levels<'_> {
    fn column<T: DataType>(
        self,
        reader: &mut ColumnReaderImpl<T>,
        rows: usize,
        convert: impl FnOnce(Vec<T::T>) -> Values,
    ) -> Result<Column, String> {
        let (mut values, mut read, mut empty) = (Vec::new(), 0, 0);
        // The reader stops at a page without a value, which some libraries write, as it does at the end.
        while read < rows && empty < EMPTY_PAGES_MAX && (empty == 0 || read < *self.left) {
            let (definitions, repetitions) = (&mut *self.definitions, &mut *self.repetitions);
            let more = reader.read_records(rows - read, Some(definitions), Some(repetitions), &mut values);
            let (records, _, levels) = more.map_err(|error| error.to_string())?;
            read += records;
            empty = if levels > 0 { 0 } else { empty + 1 };
        }
        *self.left = self.left.saturating_sub(read);
        let count = values.len();
        self.assembled(read, count, convert(values))
    }

    /// Puts the values, of which there are `count`, where the levels say.
    fn assembled(self, rows: usize, count: usize, values: Values) -> Result<Column, String> {
        let Self { path, definitions, repetitions, .. } = self;
        if definitions.iter().any(|level| *level > path.max_definition) {
            return Err("a level is too high".into());
        }
        let innermost = path.lists.last().map_or(0, |list: &ListLevel| list.item);
        let (lists, items) = match path.lists.is_empty() {
            false => levels::lists(&path.lists, definitions, repetitions)?,
            true if path.max_definition > 0 => (Vec::new(), definitions.len()),
            true => (Vec::new(), count),
        };
        let own = definitions.iter().copied().filter(|level| *level >= innermost);
        let defined = levels::flags(own, count, items, path.max_definition);
        let mut column = spread(values, items, defined);
        if let Some(level) = path.image {
            let image = definitions.iter().copied();
            let defined = matches!(column.validity, Validity::Flags(_)).then(|| image.map(|at| at >= level).collect());
            let validity = defined.map_or(Validity::All, Validity::Flags);
            column = Column { len: items, validity, values: Values::Image(Box::new(column)) };
        }
        for list in lists.into_iter().rev() {
            let (len, all) = (list.defined.len(), list.defined.iter().all(|defined| *defined));
            let validity = if all { Validity::All } else { Validity::Flags(list.defined) };
            column = Column { len, validity, values: Values::List(Offsets::Words(list.offsets), Box::new(column)) };
        }
        match column.len == rows {
            true => Ok(column),
            false => Err(format!("its levels say {} rows where its pages have {rows}", column.len)),
        }
    }
}

/// A column of `items` values; where `defined` says that there is none, something stands in for it.
fn spread(values: Values, items: usize, defined: Option<Vec<bool>>) -> Column {
    fn spaced<T: Clone>(values: Vec<T>, defined: &[bool], absent: &T) -> Vec<T> {
        let mut values = values.into_iter();
        let next = |defined: &bool| if *defined { values.next() } else { None };
        defined.iter().map(next).map(|value| value.unwrap_or_else(|| absent.clone())).collect()
    }
    let Some(defined) = defined else { return Column { len: items, validity: Validity::All, values } };
    let values = match values {
        Values::Ints(values) => Values::Ints(spaced(values, &defined, &0)),
        Values::Unsigned(values) => Values::Unsigned(spaced(values, &defined, &0)),
        Values::Reals(values) => Values::Reals(spaced(values, &defined, &0.0)),
        Values::Doubles(values) => Values::Doubles(spaced(values, &defined, &0.0)),
        Values::Parts(values) => Values::Parts(spaced(values, &defined, &ByteArray::from(Bytes::new()))),
        other => other,
    };
    Column { len: items, validity: Validity::Flags(defined), values }
}
