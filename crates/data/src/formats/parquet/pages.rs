//! The headers of a column chunk's pages, before the pages are decoded: the decoder takes memory for what they claim.
//!
//! A page header is a struct of Thrift's compact protocol; of it only the sizes and the number of values are read.

use crate::error::ReadError;
use crate::files::Contents;
use ::parquet::file::metadata::ColumnChunkMetaData;

/// A page may unpack to this much. Pages are usually of one MiB; one value alone can be larger.
const PAGE_BYTES_MAX: u64 = 512 << 20;
/// Numbers in lists that a chunk may hold whatever bytes they take.
const LIST_VALUES_FREE: u64 = 1 << 26;
/// And beyond that, for each unpacked byte: a bit-packed number takes a bit or more, only a run of equal ones takes less.
const LIST_VALUES_PER_BYTE: u64 = 8;
/// Page headers hold statistics with values, so they have no natural size.
const HEADER_BYTES_MAX: u64 = 1 << 20;
const HEADER_BYTES_USUAL: u64 = 256;
const DEPTH_MAX: usize = 16;

/// Reads the compact protocol.
struct Thrift<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// What a page header claims.
#[derive(Debug, Default, PartialEq, Eq)]
struct PageHeader {
    unpacked: i64,
    packed: i64,
    values: i64,
    /// Bytes of the header itself.
    len: u64,
}

impl Thrift<'_> {
    fn byte(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    fn unsigned(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7F) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn signed(&mut self) -> Option<i64> {
        let value = self.unsigned()?;
        Some((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// The next field's number and type; `Some(None)` at the end of the struct.
    fn field(&mut self, last: i64) -> Option<Option<(i64, u8)>> {
        let head = self.byte()?;
        Some(match (head >> 4, head & 0x0F) {
            (_, 0) => None,
            (0, kind) => Some((self.signed()?, kind)),
            (step, kind) => Some((last.checked_add(step.into())?, kind)),
        })
    }

    fn skip(&mut self, kind: u8, depth: usize) -> Option<()> {
        match kind {
            1 | 2 => {}
            3 => _ = self.byte()?,
            4..=6 => _ = self.unsigned()?,
            7 => self.at = self.at.checked_add(8)?,
            8 => {
                let len = usize::try_from(self.unsigned()?).ok()?;
                self.at = self.at.checked_add(len)?;
            }
            9 | 10 if depth < DEPTH_MAX => {
                let head = self.byte()?;
                let count = if head >> 4 == 15 { self.unsigned()? } else { u64::from(head >> 4) };
                for _ in 0..count {
                    // Booleans in lists take a byte.
                    self.skip(if matches!(head & 0x0F, 1 | 2) { 3 } else { head & 0x0F }, depth + 1)?;
                }
            }
            12 if depth < DEPTH_MAX => {
                let mut last = 0;
                while let Some((field, kind)) = self.field(last)? {
                    self.skip(kind, depth + 1)?;
                    last = field;
                }
            }
            _ => return None,
        }
        (self.at <= self.bytes.len()).then_some(())
    }

    /// The first field of a struct, which in every kind of page header is the number of values.
    fn values(&mut self) -> Option<i64> {
        let (mut last, mut values) = (0, 0);
        while let Some((field, kind)) = self.field(last)? {
            match (field, kind) {
                (1, 5) => values = self.signed()?,
                _ => self.skip(kind, 1)?,
            }
            last = field;
        }
        Some(values)
    }
}

fn parse(bytes: &[u8]) -> Option<PageHeader> {
    let mut thrift = Thrift { bytes, at: 0 };
    let (mut header, mut last) = (PageHeader::default(), 0);
    while let Some((field, kind)) = thrift.field(last)? {
        match (field, kind) {
            (2, 5) => header.unpacked = thrift.signed()?,
            (3, 5) => header.packed = thrift.signed()?,
            // Data pages; the values of a dictionary count where they are used.
            (5 | 8, 12) => header.values = thrift.values()?,
            _ => thrift.skip(kind, 0)?,
        }
        last = field;
    }
    header.len = thrift.at as u64;
    Some(header)
}

/// Reads the header at `offset`, before `end`.
fn header_at(contents: &Contents, offset: u64, end: u64) -> Result<PageHeader, ReadError> {
    let mut bytes = Vec::new();
    let mut len = HEADER_BYTES_USUAL;
    loop {
        let here = len.min(end - offset);
        contents.read_into(offset, here, &mut bytes)?;
        match parse(&bytes) {
            Some(header) => return Ok(header),
            None if here < len || len >= HEADER_BYTES_MAX => {
                return Err(contents.damaged(offset, "a page header is expected here"));
            }
            None => len *= 8,
        }
    }
}

/// Checks the pages of a column chunk. Returns the bytes that they unpack to.
pub(super) fn check(contents: &Contents, chunk: &ColumnChunkMetaData) -> Result<u64, ReadError> {
    let data = u64::try_from(chunk.data_page_offset()).unwrap_or(u64::MAX);
    let dictionary = chunk.dictionary_page_offset().and_then(|offset| u64::try_from(offset).ok());
    let start = dictionary.filter(|offset| *offset > 0).map_or(data, |offset| offset.min(data));
    let len = u64::try_from(chunk.compressed_size()).unwrap_or(u64::MAX);
    contents.check(start, len)?;
    let is_list = chunk.column_descr().max_rep_level() > 0;
    let (mut offset, mut bytes, mut values) = (start, 0_u64, 0_u64);
    while offset < start + len {
        let header = header_at(contents, offset, start + len)?;
        let (Ok(packed), Ok(unpacked), Ok(page_values)) =
            (u64::try_from(header.packed), u64::try_from(header.unpacked), u64::try_from(header.values))
        else {
            return Err(contents.damaged(offset, "a page has a negative size"));
        };
        if unpacked > PAGE_BYTES_MAX {
            let message = format!("a page claims {unpacked} bytes, more than {PAGE_BYTES_MAX}");
            let hint = "the file is damaged, or has huge pages: write it again with the usual page size";
            return Err(ReadError::new(message, hint).in_file(contents.path()).at(offset));
        }
        bytes += unpacked;
        values = values.saturating_add(page_values);
        offset += header.len;
        let left = (start + len).checked_sub(offset);
        if left.is_none_or(|left| left < packed) {
            return Err(contents.damaged(offset, format!("a page of {packed} bytes does not fit into its column")));
        }
        offset += packed;
    }
    if is_list && values > LIST_VALUES_FREE.max(bytes.saturating_mul(LIST_VALUES_PER_BYTE)) {
        let message = format!("{bytes} bytes claim to be {values} numbers in lists");
        let hint = "the file is damaged, or has long lists of equal numbers: write it again with smaller row groups";
        return Err(ReadError::new(message, hint).in_file(contents.path()).at(start));
    }
    Ok(bytes.max(if is_list { values.saturating_mul(4) } else { 0 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_sizes_of_a_page_header() {
        // type 0, unpacked 100, packed 60, crc, then a data page header: 7 values, encoding, a struct of statistics.
        let header = [
            0x15, 0x00, 0x15, 0xC8, 0x01, 0x15, 0x78, 0x15, 0x02, 0x1C, 0x15, 0x0E, 0x15, 0x00, 0x15, 0x06, 0x15, 0x06,
            0x1C, 0x18, 0x02, 0xAA, 0xBB, 0x00, 0x00, 0x00,
        ];
        let read = parse(&header).unwrap();
        assert_eq!(read, PageHeader { unpacked: 100, packed: 60, values: 7, len: header.len() as u64 });
        for end in 0..header.len() {
            assert_eq!(parse(&header[..end]), None, "cut at {end}");
        }
    }

    #[test]
    fn depth_and_lengths_are_bounded() {
        assert_eq!(parse(&[0x1C; 4096]), None);
        assert_eq!(parse(&[0x18, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01, 0x00]), None);
        assert_eq!(parse(&[0x19, 0xF1, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F]), None);
    }
}
