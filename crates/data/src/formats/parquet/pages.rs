//! The headers of a column chunk's pages, before the pages are decoded: the decoder takes memory for what they claim.
//! The walk begins at the byte where the decoder does.

use super::budget::Budget;
use super::thrift::{PageHeader, PageKind};
use crate::error::ReadError;
use crate::files::Contents;
use ::parquet::basic::{Compression, Type as Physical};
use ::parquet::file::metadata::ColumnChunkMetaData;
use ::parquet::schema::types::ColumnDescriptor;
use std::io::{self, Read};
use std::sync::Arc;

/// A page may decompress to this much. Pages are usually of one MiB; one value alone can be larger.
const PAGE_BYTES_MAX: u64 = 512 << 20;
/// Numbers in lists that a row group may hold whatever bytes they take.
const LIST_VALUES_FREE: u64 = 1 << 24;
/// Rows that a row group may hold whatever bytes they take.
const ROWS_FREE: u64 = 1 << 26;
/// And beyond that, for each decompressed byte: a bit-packed number takes a bit or more, only a run of equal ones takes less.
const VALUES_PER_BYTE: u64 = 8;
/// Page headers hold statistics with values, so they have no natural size.
const HEADER_BYTES_MAX: u64 = 1 << 20;
const HEADER_BYTES_USUAL: u64 = 256;
/// What the columns of a row group may take at once, whatever bytes the file has for them.
const MEMORY_BYTES_FREE: u64 = 1 << 30;
/// And beyond that, for each compressed byte.
const MEMORY_PER_COMPRESSED_BYTE: u64 = 8;
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
        Budget::new(most)
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
    let is_list = chunk.column_descr().max_rep_level() > 0;
    if !is_list && values > ROWS_FREE.max(bytes.saturating_mul(VALUES_PER_BYTE)) {
        return Err(too_many(contents, start, format!("a column claims {values} values in {bytes} bytes")));
    }
    let list_values = if is_list { values } else { 0 };
    claims.add(row_bytes, len, bytes, list_values);
    let most = LIST_VALUES_FREE.max(claims.decompressed.saturating_mul(VALUES_PER_BYTE));
    match claims.list_values > most {
        true => {
            let message = format!("its columns claim {} numbers in lists, more than they can hold", claims.list_values);
            Err(too_many(contents, start, message))
        }
        false => Ok(offsets),
    }
}

fn too_many(contents: &Contents, offset: u64, message: String) -> ReadError {
    let hint = "the file is damaged, or repeats the same values very often: write it again with smaller row groups";
    ReadError::new(message, hint).in_file(contents.path()).at(offset)
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
