//! The pages of a column chunk, checked before and while they are decoded: the decoder takes memory for what they claim.
//!
//! [`check`] walks over the headers, at the bytes where the decoder begins. [`CheckedPages`] looks at each decompressed page
//! before the decoder does, and holds all columns of a row group to one memory budget.

use super::thrift::{PageHeader, PageKind, Thrift};
use crate::error::ReadError;
use crate::files::Contents;
use ::parquet::basic::{Compression, Encoding, Type as Physical};
use ::parquet::column::page::{Page, PageMetadata, PageReader};
use ::parquet::errors::ParquetError;
use ::parquet::file::metadata::ColumnChunkMetaData;
use ::parquet::schema::types::{ColumnDescPtr, ColumnDescriptor};
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A page may decompress to this much. Pages are usually of one MiB; one value alone can be larger.
const PAGE_BYTES_MAX: u64 = 512 << 20;
/// Numbers in lists that a row group may hold whatever bytes they take.
const LIST_VALUES_FREE: u64 = 1 << 24;
/// And beyond that, for each decompressed byte: a bit-packed number takes a bit or more, only a run of equal ones takes less.
const LIST_VALUES_PER_BYTE: u64 = 8;
/// Page headers hold statistics with values, so they have no natural size.
const HEADER_BYTES_MAX: u64 = 1 << 20;
const HEADER_BYTES_USUAL: u64 = 256;
/// What the columns of a row group may take at once, whatever bytes the file has for them.
const MEMORY_BYTES_FREE: u64 = 1 << 30;
/// And beyond that, for each compressed byte.
const MEMORY_PER_COMPRESSED_BYTE: u64 = 8;
/// A value of a dictionary, decoded.
const DICTIONARY_VALUE_BYTES: u64 = 32;
/// A number in a list, decoded: its two levels, and the number as the file has it and as 64 bits.
const LIST_VALUE_BYTES: u64 = 20;
/// A length that is decoded before the text or bytes it belongs to.
const LENGTH_BYTES: u64 = 4;
/// Values that repeat the one before may take this much in all, in units of a batch of rows.
const REPEATED_BATCHES: u64 = 16;
/// The number of the encoding in page headers.
const DELTA_BYTE_ARRAY: i32 = 7;

/// What the pages of the columns that are read claim together.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Bytes of all rows, decoded.
    pub bytes: u64,
    /// Bytes that one row can take, whatever the average is.
    pub row_bytes: u64,
    compressed: u64,
    decompressed: u64,
    list_values: u64,
}

/// The memory that the columns of a row group may take at once.
#[derive(Debug)]
pub(super) struct Budget {
    most: u64,
    taken: AtomicU64,
}

impl Claims {
    fn add(&mut self, row_bytes: u64, compressed: u64, decompressed: u64, list_values: u64) {
        self.row_bytes = self.row_bytes.saturating_add(row_bytes);
        self.compressed = self.compressed.saturating_add(compressed);
        self.decompressed = self.decompressed.saturating_add(decompressed);
        self.list_values = self.list_values.saturating_add(list_values);
        self.bytes = self.bytes.saturating_add(decompressed.max(list_values.saturating_mul(4)));
    }

    pub fn budget(&self) -> Arc<Budget> {
        let most = MEMORY_BYTES_FREE.max(self.compressed.saturating_mul(MEMORY_PER_COMPRESSED_BYTE));
        Arc::new(Budget { most, taken: AtomicU64::new(0) })
    }
}

impl Budget {
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

    pub fn give_back(&self, bytes: u64) {
        self.taken.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Reads the header at `offset`, before `end`.
fn header_at(contents: &Contents, offset: u64, end: u64) -> Result<PageHeader, ReadError> {
    let mut bytes = Vec::new();
    let mut len = HEADER_BYTES_USUAL;
    loop {
        let available = len.min(end - offset);
        contents.read_into(offset, available, &mut bytes)?;
        match PageHeader::parse(&bytes) {
            Some(header) => return Ok(header),
            None if available < len || len >= HEADER_BYTES_MAX => {
                return Err(contents.damaged(offset, "a page header is expected here"));
            }
            None => len *= 8,
        }
    }
}

/// Checks the headers of a column chunk's pages, and adds up what they claim. Returns the offsets of the pages.
pub(super) fn check(
    contents: &Contents,
    chunk: &ColumnChunkMetaData,
    claims: &mut Claims,
) -> Result<Vec<u64>, ReadError> {
    // Where the decoder begins.
    let start = chunk.dictionary_page_offset().unwrap_or(chunk.data_page_offset());
    let (Ok(start), Ok(len)) = (u64::try_from(start), u64::try_from(chunk.compressed_size())) else {
        return Err(contents.damaged(0, "a column has a negative offset or size"));
    };
    contents.check(start, len)?;
    let mut row_bytes = fixed_len(chunk.column_descr());
    if row_bytes > PAGE_BYTES_MAX {
        return Err(contents.damaged(start, format!("a column claims values of {row_bytes} bytes each")));
    }
    let (mut offset, mut bytes, mut values, mut offsets) = (start, 0_u64, 0_u64, Vec::new());
    while offset < start + len {
        let header = header_at(contents, offset, start + len)?;
        let page = check_page(contents, chunk, offset, &header)?;
        let end = offset + header.len + page.compressed;
        if end > start + len {
            let message = format!("a page of {} bytes does not fit into its column", page.compressed);
            return Err(contents.damaged(offset, message));
        }
        check_decompression(contents, chunk.compression(), offset + header.len, &page)?;
        if header.kind != PageKind::Other {
            offsets.push(offset);
        }
        if header.kind == PageKind::Data {
            values = values.saturating_add(page.values);
        }
        if header.encoding == DELTA_BYTE_ARRAY {
            // A value can be as long as its page, and take no bytes of it.
            row_bytes = row_bytes.max(page.decompressed / REPEATED_BATCHES);
        }
        bytes = bytes.saturating_add(page.compressed.max(page.decompressed));
        offset = end;
    }
    let list_values = if chunk.column_descr().max_rep_level() > 0 { values } else { 0 };
    claims.add(row_bytes, len, bytes, list_values);
    let most = LIST_VALUES_FREE.max(claims.decompressed.saturating_mul(LIST_VALUES_PER_BYTE));
    match claims.list_values > most {
        true => {
            let message = format!("its columns claim {} numbers in lists, more than they can hold", claims.list_values);
            let hint =
                "the file is damaged, or has long lists of equal numbers: write it again with smaller row groups";
            Err(ReadError::new(message, hint).in_file(contents.path()).at(start))
        }
        false => Ok(offsets),
    }
}

/// The sizes of a page.
struct PageSizes {
    decompressed: u64,
    compressed: u64,
    values: u64,
    levels: u64,
}

/// Bytes of each value, if a column of bytes has a fixed size.
fn fixed_len(column: &ColumnDescriptor) -> u64 {
    match column.physical_type() {
        Physical::FIXED_LEN_BYTE_ARRAY => u64::try_from(column.type_length()).unwrap_or(0),
        _ => 0,
    }
}

/// Checks the header of a page at `offset`.
fn check_page(
    contents: &Contents,
    chunk: &ColumnChunkMetaData,
    offset: u64,
    header: &PageHeader,
) -> Result<PageSizes, ReadError> {
    let sizes = [header.decompressed, header.compressed, header.values, header.levels];
    if sizes.iter().any(|size| *size < 0) {
        return Err(contents.damaged(offset, "a page has a negative size"));
    }
    let [decompressed, compressed, values, levels] = sizes.map(|size| size as u64);
    if decompressed > PAGE_BYTES_MAX {
        let message = format!("a page claims {decompressed} bytes, more than {PAGE_BYTES_MAX}");
        let hint = "the file is damaged, or has huge pages: write it again with the usual page size";
        return Err(ReadError::new(message, hint).in_file(contents.path()).at(offset));
    }
    let column = chunk.column_descr();
    let value_bits = match column.physical_type() {
        Physical::BOOLEAN => 1,
        Physical::INT32 | Physical::FLOAT => 32,
        Physical::INT64 | Physical::DOUBLE => 64,
        Physical::INT96 => 96,
        // At least the length.
        Physical::BYTE_ARRAY => 32,
        Physical::FIXED_LEN_BYTE_ARRAY => 8 * fixed_len(column).max(1),
    };
    let bytes = compressed.max(decompressed);
    if header.kind == PageKind::Dictionary && values.saturating_mul(value_bits) > bytes * 8 {
        return Err(contents.damaged(offset, format!("a dictionary claims {values} values in {bytes} bytes")));
    }
    Ok(PageSizes { decompressed, compressed, values, levels })
}

/// How much longer a page can become, for codecs that do not stop at the size which the header claims.
fn growth_max(codec: Compression) -> u64 {
    match codec {
        Compression::GZIP(_) => 1032,
        Compression::LZ4 => 255,
        _ => 0,
    }
}

/// Checks that a compressed page holds no more than it claims. Usual pages are too small to need it.
fn check_decompression(
    contents: &Contents,
    codec: Compression,
    offset: u64,
    page: &PageSizes,
) -> Result<(), ReadError> {
    if page.compressed.saturating_mul(growth_max(codec)) <= PAGE_BYTES_MAX {
        return Ok(());
    }
    let levels = page.levels.min(page.compressed);
    let mut bytes = Vec::new();
    contents.read_into(offset + levels, page.compressed - levels, &mut bytes)?;
    let most = page.decompressed.saturating_sub(levels);
    let counted = match codec {
        Compression::GZIP(_) => count(flate2::read::MultiGzDecoder::new(&bytes[..]), most),
        _ => count(lz4_flex::frame::FrameDecoder::new(&bytes[..]), most),
    };
    // What is no such stream is for the decoder to report.
    match counted.is_ok_and(|bytes| bytes > most) {
        true => {
            let message = format!("a page decompresses to more than the {} bytes it claims", page.decompressed);
            Err(contents.damaged(offset, message))
        }
        false => Ok(()),
    }
}

/// Bytes of a stream, as far as one more than `most`.
fn count(stream: impl Read, most: u64) -> io::Result<u64> {
    io::copy(&mut stream.take(most + 1), &mut io::sink())
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
        let budget = Claims::default().budget();
        let (one, other) = (RowMemory::new(&budget), RowMemory::new(&budget));
        one.take(MEMORY_BYTES_FREE / 2 + 1).unwrap();
        assert!(other.take(MEMORY_BYTES_FREE / 2).unwrap_err().contains("1073741824 bytes of memory"));
        one.release();
        other.release();
        other.take(MEMORY_BYTES_FREE).unwrap();
    }
}
