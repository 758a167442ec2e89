//! Decoded units (row groups, record batches) behind random access to rows, in bounded memory.
//!
//! A unit is decoded at the first read of one of its rows. Decoded units stay in memory up to a budget. The one that was
//! not read for longest goes first: if all its rows were read (a scan in order), it is dropped; if not (a shuffled epoch), its
//! rows go to a temporary file without a name, from where a row is one read. So a scan writes nothing, and a shuffled epoch
//! decodes every unit once, however many times it comes back to it.

mod rows;

use crate::error::ReadError;
use crate::files::last_read;
use crate::record::{Record, RecordColumn};
use kolo_base::lock;
pub(crate) use rows::NumberColumn;
use rows::{pull, push, push_broken, push_numbers};
use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Bytes of decoded units in memory, unless `data.decoded_max` says otherwise.
pub(crate) const DECODED_BYTES_MAX: usize = 256 << 20;

/// Decodes one unit into rows.
pub(crate) trait Decode: Send + Sync + fmt::Debug {
    /// The file that holds a unit.
    fn path(&self, unit: usize) -> &Path;

    /// Where the file says what the unit holds, if that is not beside it: what is wrong before it is read is wrong there.
    fn described_at(&self, _unit: usize) -> Option<u64> {
        None
    }

    /// Hands the rows of `unit` to `out`, in order.
    fn decode(&self, unit: usize, out: &mut Rows) -> Result<(), ReadError>;
}

/// Rows of one decoded batch and where they stand. The rows come first, then the end of each as eight bytes.
#[derive(Debug)]
struct Block {
    first: usize,
    rows: usize,
    bytes: u64,
    place: UnitStorage,
}

#[derive(Debug)]
enum UnitStorage {
    Memory(Vec<u8>),
    /// Offset in the temporary file.
    Disk(u64),
}

#[derive(Debug)]
enum UnitState {
    Unread,
    Decoded(Arc<Vec<Block>>),
    /// It will not get better: a unit is not decoded again for each of its rows.
    Broken(ReadError),
}

#[derive(Debug)]
struct Unit {
    rows: usize,
    state: Mutex<UnitState>,
    /// When it was read last.
    last: AtomicU64,
    /// Reads since it was decoded.
    reads: AtomicUsize,
    bytes_in_memory: AtomicUsize,
}

#[derive(Debug)]
pub(crate) struct Units {
    decoder: Box<dyn Decode>,
    columns: Vec<RecordColumn>,
    units: Vec<Unit>,
    /// Rows of each unit and all before it.
    ends: Vec<usize>,
    budget: usize,
    bytes_in_memory: AtomicUsize,
    clock: AtomicU64,
    spill: Arc<Spill>,
}

/// The temporary file, made when it is first needed.
#[derive(Debug, Default)]
struct Spill {
    file: OnceLock<File>,
    next: AtomicU64,
}

impl Spill {
    fn write(&self, bytes: &[u8]) -> Result<u64, ReadError> {
        let failed = |error: io::Error| {
            let message = format!("cannot keep decoded rows in a temporary file: {error}");
            let hint = "free space where TMPDIR points, or raise `data.decoded_max` if there is enough memory";
            ReadError::new(message, hint)
        };
        if self.file.get().is_none() {
            let file = tempfile::tempfile().map_err(failed)?;
            // Another thread may have been first: its file is as good.
            let _ = self.file.set(file);
        }
        let file = self.file.get().ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        let offset = self.next.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        file.write_all_at(bytes, offset).map_err(failed)?;
        Ok(offset)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), ReadError> {
        let failed = |error: io::Error| {
            let message = format!("cannot read decoded rows back from a temporary file: {error}");
            ReadError::new(message, "check the disk that TMPDIR points to")
        };
        let file = self.file.get().ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        file.read_exact_at(out, offset).map_err(failed)
    }
}

/// Takes the rows of one unit while it is decoded.
#[derive(Debug)]
pub(crate) struct Rows {
    columns: usize,
    blocks: Vec<Block>,
    rows: usize,
    bytes_in_memory: usize,
    /// A unit that is larger than this goes to the temporary file while it is decoded.
    unit_bytes_max: usize,
    open: Vec<u8>,
    ends: Vec<u8>,
    spill: Arc<Spill>,
}

impl Rows {
    pub fn push(&mut self, record: &Record) {
        push(record, self.columns, &mut self.open);
        self.end_row();
    }

    /// Appends all rows of a table that holds numbers only.
    pub fn push_table(&mut self, columns: &[NumberColumn], rows: usize) {
        for row in 0..rows {
            push_numbers(columns, row, &mut self.open);
            self.end_row();
        }
    }

    /// A row that could not be understood. It stands near what was read last.
    pub fn push_broken(&mut self, message: &str) {
        push_broken(message, last_read(), &mut self.open);
        self.end_row();
    }

    fn end_row(&mut self) {
        self.ends.extend_from_slice(&(self.open.len() as u64).to_le_bytes());
    }

    /// Bytes of the rows that are in no block yet.
    pub fn open_bytes(&self) -> u64 {
        self.open.len() as u64
    }

    /// The rows so far become a block. To be called after every batch.
    pub fn end_block(&mut self) -> Result<(), ReadError> {
        let rows = self.ends.len() / 8;
        if rows == 0 {
            return Ok(());
        }
        let mut bytes = std::mem::take(&mut self.open);
        bytes.append(&mut self.ends);
        bytes.shrink_to_fit();
        let (first, len) = (self.rows, bytes.len());
        self.rows += rows;
        let place = match self.bytes_in_memory + len > self.unit_bytes_max {
            true => UnitStorage::Disk(self.spill.write(&bytes)?),
            false => {
                self.bytes_in_memory += len;
                UnitStorage::Memory(bytes)
            }
        };
        self.blocks.push(Block { first, rows, bytes: len as u64, place });
        Ok(())
    }
}

thread_local! {
    static ROW: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}
/// A thread keeps no larger buffer than this for rows of the temporary file.
const ROW_BYTES_KEPT_MAX: usize = 4 << 20;

impl Block {
    /// Where the row begins and ends, from two entries of the table.
    fn range(&self, table: &[u8], row: usize) -> Result<(u64, u64), ReadError> {
        let mut ends = table.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
        let start = if row == 0 { Some(0) } else { ends.next() };
        match (start, ends.next()) {
            (Some(start), Some(end)) if start <= end && end <= self.bytes => Ok((start, end)),
            _ => Err(ReadError::new(
                "the temporary file of decoded rows is damaged",
                "check the disk that TMPDIR points to",
            )),
        }
    }

    fn read(&self, row: usize, spill: &Spill, columns: &[RecordColumn], record: &mut Record) -> Result<(), ReadError> {
        let table = self.bytes - 8 * self.rows as u64 + 8 * row.saturating_sub(1) as u64;
        let entries = if row == 0 { 8 } else { 16 };
        match &self.place {
            UnitStorage::Memory(bytes) => {
                let (start, end) = self.range(&bytes[table as usize..table as usize + entries], row)?;
                pull(&bytes[start as usize..end as usize], columns, record)
            }
            UnitStorage::Disk(offset) => {
                let mut ends = [0; 16];
                spill.read(offset + table, &mut ends[..entries])?;
                let (start, end) = self.range(&ends[..entries], row)?;
                let mut bytes = ROW.take();
                bytes.resize((end - start) as usize, 0);
                spill.read(offset + start, &mut bytes)?;
                pull(&bytes, columns, record)?;
                if bytes.capacity() <= ROW_BYTES_KEPT_MAX {
                    ROW.set(bytes);
                }
                Ok(())
            }
        }
    }
}

impl Units {
    /// `rows` of every unit. Decoded units take up to `budget` bytes of memory.
    pub fn new(decoder: Box<dyn Decode>, columns: Vec<RecordColumn>, rows: &[usize], budget: usize) -> Self {
        let unit = |rows: &usize| Unit {
            rows: *rows,
            state: Mutex::new(UnitState::Unread),
            last: AtomicU64::new(0),
            reads: AtomicUsize::new(0),
            bytes_in_memory: AtomicUsize::new(0),
        };
        let mut end = 0_usize;
        let ends = rows.iter().map(|rows| {
            end = end.saturating_add(*rows);
            end
        });
        Self {
            ends: ends.collect(),
            units: rows.iter().map(unit).collect(),
            decoder,
            columns,
            budget,
            bytes_in_memory: AtomicUsize::new(0),
            clock: AtomicU64::new(1),
            spill: Arc::default(),
        }
    }

    pub fn columns(&self) -> &[RecordColumn] {
        &self.columns
    }

    pub fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    pub fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        let number = self.ends.partition_point(|end| *end <= at);
        let Some(unit) = self.units.get(number) else {
            let message = format!("record {at} was requested, but there are {}", self.len());
            return Err(ReadError::new(message, "ask for a smaller number"));
        };
        let row = at - (self.ends[number] - unit.rows);
        let blocks = self.blocks(number)?;
        unit.last.store(self.clock.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        unit.reads.fetch_add(1, Ordering::Relaxed);
        let block = &blocks[blocks.partition_point(|block| block.first + block.rows <= row)];
        let read = block.read(row - block.first, &self.spill, &self.columns, record);
        read.map_err(|error| error.in_file(self.decoder.path(number)))
    }

    /// The blocks of a unit; who comes first decodes it, others who need it wait.
    fn blocks(&self, number: usize) -> Result<Arc<Vec<Block>>, ReadError> {
        let unit = &self.units[number];
        let mut state = lock(&unit.state);
        match &*state {
            UnitState::Decoded(blocks) => return Ok(Arc::clone(blocks)),
            UnitState::Broken(error) => return Err(error.clone()),
            UnitState::Unread => {}
        }
        let (blocks, bytes) = match self.decode(number) {
            Ok(decoded) => decoded,
            Err(error) => {
                *state = UnitState::Broken(error.clone());
                return Err(error);
            }
        };
        let blocks = Arc::new(blocks);
        *state = UnitState::Decoded(Arc::clone(&blocks));
        unit.reads.store(0, Ordering::Relaxed);
        unit.last.store(self.clock.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        unit.bytes_in_memory.store(bytes, Ordering::Relaxed);
        self.bytes_in_memory.fetch_add(bytes, Ordering::Relaxed);
        // Other units are locked below: nobody may hold two.
        drop(state);
        self.evict(number)?;
        Ok(blocks)
    }

    /// Bytes of the blocks of a unit.
    #[cfg(test)]
    pub fn block_bytes(&self, number: usize) -> Result<Vec<u64>, ReadError> {
        Ok(self.blocks(number)?.iter().map(|block| block.bytes).collect())
    }

    fn decode(&self, number: usize) -> Result<(Vec<Block>, usize), ReadError> {
        let mut rows = Rows {
            columns: self.columns.len(),
            blocks: Vec::new(),
            rows: 0,
            bytes_in_memory: 0,
            unit_bytes_max: self.budget / 4,
            open: Vec::new(),
            ends: Vec::new(),
            spill: Arc::clone(&self.spill),
        };
        self.decoder.decode(number, &mut rows)?;
        rows.end_block()?;
        match rows.rows == self.units[number].rows {
            true => Ok((rows.blocks, rows.bytes_in_memory)),
            false => {
                let message = format!("{} rows are expected, but there are {}", self.units[number].rows, rows.rows);
                let hint = "the file is damaged or cut short; copy or make it again";
                let error = ReadError::new(message, hint).in_file(self.decoder.path(number));
                Err(ReadError { offset: last_read().or(self.decoder.described_at(number)), ..error })
            }
        }
    }

    /// Makes room until the budget is kept, but for the unit that was decoded last.
    fn evict(&self, newest: usize) -> Result<(), ReadError> {
        while self.bytes_in_memory.load(Ordering::Relaxed) > self.budget {
            let oldest = |unit: &&Unit| unit.last.load(Ordering::Relaxed);
            let others = self.units.iter().enumerate().filter(|(number, _)| *number != newest);
            let held = others.map(|(_, unit)| unit).filter(|unit| unit.bytes_in_memory.load(Ordering::Relaxed) > 0);
            let Some(unit) = held.min_by_key(oldest) else { break };
            let mut state = lock(&unit.state);
            let bytes = unit.bytes_in_memory.swap(0, Ordering::Relaxed);
            self.bytes_in_memory.fetch_sub(bytes, Ordering::Relaxed);
            let UnitState::Decoded(blocks) = &*state else { continue };
            *state = match unit.reads.load(Ordering::Relaxed) >= unit.rows {
                true => UnitState::Unread,
                false => UnitState::Decoded(Arc::new(self.to_disk(blocks)?)),
            };
        }
        Ok(())
    }

    fn to_disk(&self, blocks: &[Block]) -> Result<Vec<Block>, ReadError> {
        let moved = |block: &Block| {
            let offset = match &block.place {
                UnitStorage::Memory(bytes) => self.spill.write(bytes)?,
                UnitStorage::Disk(offset) => *offset,
            };
            Ok(Block { first: block.first, rows: block.rows, bytes: block.bytes, place: UnitStorage::Disk(offset) })
        };
        blocks.iter().map(moved).collect()
    }
}

#[cfg(test)]
mod tests;
