//! Pages as the decoders get them: looked at once more when they are decompressed, and held to one memory budget for all columns
//! of a row group.

use super::thrift::Thrift;
use ::parquet::basic::Encoding;
use ::parquet::column::page::{Page, PageMetadata, PageReader};
use ::parquet::errors::ParquetError;
use ::parquet::schema::types::{ColumnDescPtr, ColumnDescriptor};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A value of a dictionary, decoded.
const DICTIONARY_VALUE_BYTES: u64 = 32;
/// A number in a list, decoded: its two levels, and the number as the file has it and as 64 bits.
const LIST_VALUE_BYTES: u64 = 20;
/// A length that is decoded before the text or bytes it belongs to.
const LENGTH_BYTES: u64 = 4;

/// The memory that the columns of a row group may take at once.
#[derive(Debug)]
pub(super) struct Budget {
    most: u64,
    taken: AtomicU64,
}

impl Budget {
    pub fn new(most: u64) -> Arc<Self> {
        Arc::new(Self { most, taken: AtomicU64::new(0) })
    }

    fn take(&self, bytes: u64) -> Result<(), String> {
        let taken = self.taken.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        match taken <= self.most {
            true => Ok(()),
            false => Err(format!(
                "its columns take more than {} bytes of memory at once; if the file is not damaged, write it again with \
                 smaller pages, or name fewer columns with `inputs`",
                self.most
            )),
        }
    }

    fn give_back(&self, bytes: u64) {
        self.taken.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// What the rows that are being read take: shared with the one who asks for them.
#[derive(Debug)]
pub(super) struct RowMemory {
    budget: Arc<Budget>,
    taken: AtomicU64,
}

impl RowMemory {
    pub fn new(budget: &Arc<Budget>) -> Arc<Self> {
        Arc::new(Self { budget: Arc::clone(budget), taken: AtomicU64::new(0) })
    }

    fn take(&self, bytes: u64) -> Result<(), String> {
        self.taken.fetch_add(bytes, Ordering::Relaxed);
        self.budget.take(bytes)
    }

    /// The rows so far are done with.
    pub fn release(&self) {
        self.budget.give_back(self.taken.swap(0, Ordering::Relaxed));
    }
}

/// Pages that fit the memory budget, and whose counts make sense.
pub(super) struct CheckedPages<P> {
    pages: P,
    column: ColumnDescPtr,
    offsets: std::vec::IntoIter<u64>,
    memory: Arc<RowMemory>,
    /// What the page that is being read takes.
    page: u64,
}

impl<P: PageReader> CheckedPages<P> {
    pub fn new(pages: P, column: ColumnDescPtr, offsets: Vec<u64>, memory: Arc<RowMemory>) -> Self {
        Self { pages, column, offsets: offsets.into_iter(), memory, page: 0 }
    }

    fn account(&mut self, page: &Page) -> Result<(), String> {
        let (bytes, values) = (page.buffer().len() as u64, u64::from(page.num_values()));
        if page.is_dictionary_page() {
            return self.memory.budget.take(bytes + values * DICTIONARY_VALUE_BYTES);
        }
        self.memory.budget.give_back(std::mem::take(&mut self.page));
        let lengths = lengths(page, &self.column).ok_or("a page claims more values than it holds")?;
        self.page = bytes + lengths * LENGTH_BYTES;
        self.memory.budget.take(self.page)?;
        let is_list = self.column.max_rep_level() > 0;
        self.memory.take(if is_list { values * LIST_VALUE_BYTES } else { 0 })
    }
}

impl<P: PageReader> Iterator for CheckedPages<P> {
    type Item = Result<Page, ParquetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl<P: PageReader> PageReader for CheckedPages<P> {
    fn get_next_page(&mut self) -> Result<Option<Page>, ParquetError> {
        let offset = self.offsets.next();
        let named = |message: String| {
            ParquetError::General(offset.map_or(message.clone(), |offset| format!("byte {offset}: {message}")))
        };
        let page = self.pages.get_next_page().map_err(|error| named(error.to_string()))?;
        page.iter().try_for_each(|page| self.account(page)).map_err(named)?;
        Ok(page)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>, ParquetError> {
        self.pages.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<(), ParquetError> {
        self.pages.skip_next_page()
    }

    fn at_record_boundary(&mut self) -> Result<bool, ParquetError> {
        self.pages.at_record_boundary()
    }
}

/// How many lengths a page decodes before its values, or `None` if it has more of them than values.
fn lengths(page: &Page, column: &ColumnDescriptor) -> Option<u64> {
    let lists = match page.encoding() {
        Encoding::DELTA_LENGTH_BYTE_ARRAY => 1,
        // Of prefixes, and of what follows them.
        Encoding::DELTA_BYTE_ARRAY => 2,
        _ => return Some(0),
    };
    let mut thrift = Thrift::new(page.buffer().get(level_bytes(page, column)?..)?);
    let mut total = 0;
    for _ in 0..lists {
        total += pass_deltas(&mut thrift, page.num_values().into())?;
    }
    Some(total)
}

/// Bytes of the levels before a page's values.
fn level_bytes(page: &Page, column: &ColumnDescriptor) -> Option<usize> {
    match page {
        Page::DictionaryPage { .. } => Some(0),
        Page::DataPageV2 { def_levels_byte_len, rep_levels_byte_len, .. } => {
            usize::try_from(def_levels_byte_len.checked_add(*rep_levels_byte_len)?).ok()
        }
        Page::DataPage { buf, num_values, def_level_encoding, rep_level_encoding, .. } => {
            let mut bytes = 0_usize;
            let levels = [(column.max_rep_level(), rep_level_encoding), (column.max_def_level(), def_level_encoding)];
            for (max, encoding) in levels.into_iter().filter(|(max, _)| *max > 0) {
                bytes = bytes.checked_add(match encoding {
                    Encoding::RLE => 4 + u32::from_le_bytes(*buf.get(bytes..)?.first_chunk()?) as usize,
                    // Bit-packed levels have the bits that the highest one needs.
                    _ => (*num_values as usize * (16 - max.leading_zeros() as usize)).div_ceil(8),
                })?;
            }
            Some(bytes)
        }
    }
}

/// Passes over at most `most` numbers in the encoding DELTA_BINARY_PACKED, whose integers are those of Thrift. Returns how many
/// there are.
fn pass_deltas(thrift: &mut Thrift<'_>, most: u64) -> Option<u64> {
    let (block, mini_blocks, total) = (thrift.unsigned()?, thrift.unsigned()?, thrift.unsigned()?);
    thrift.unsigned()?;
    let values = block.checked_div(mini_blocks).filter(|values| *values > 0 && values % 32 == 0)?;
    if total > most || block % mini_blocks != 0 {
        return None;
    }
    let mut left = total.saturating_sub(1);
    while left > 0 {
        thrift.unsigned()?;
        let widths = thrift.rest().get(..usize::try_from(mini_blocks).ok()?)?;
        thrift.pass(widths.len())?;
        for bits in widths {
            // The widths of mini blocks behind the last value may be anything.
            if left > 0 {
                thrift.pass(usize::try_from((values / 8).checked_mul((*bits).into())?).ok()?)?;
                left = left.saturating_sub(values);
            }
        }
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_deltas_are_counted_and_passed() {
        // Blocks of 128 numbers in 4 mini blocks; 40 numbers, the first is 5; a delta of 1 and 2 bits, a delta and 0 bits.
        let mut bytes = vec![0x80, 0x01, 4, 40, 10, 2, 2, 0, 9, 9];
        bytes.extend([0; 8]);
        bytes.push(0xAA);
        let mut thrift = Thrift::new(&bytes);
        assert_eq!((pass_deltas(&mut thrift, 40), thrift.rest()), (Some(40), &[0xAA][..]));
        assert_eq!(pass_deltas(&mut Thrift::new(&bytes), 39), None, "more than the page has values");
        for end in 0..bytes.len() - 1 {
            assert_eq!(pass_deltas(&mut Thrift::new(&bytes[..end]), 40), None, "cut at {end}");
        }
        // Blocks without numbers.
        assert_eq!(pass_deltas(&mut Thrift::new(&[0, 4, 40, 10, 2]), 40), None);
        assert_eq!(pass_deltas(&mut Thrift::new(&[4, 0, 40, 10, 2]), 40), None);
    }

    #[test]
    fn memory_is_bounded_over_all_columns() {
        let budget = Budget::new(1 << 30);
        let (one, other) = (RowMemory::new(&budget), RowMemory::new(&budget));
        one.take((1 << 29) + 1).unwrap();
        assert!(other.take(1 << 29).unwrap_err().contains("1073741824 bytes of memory"));
        one.release();
        other.release();
        other.take(1 << 30).unwrap();
    }
}
