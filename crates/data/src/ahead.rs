//! Reading a file at an offset, with a block read ahead where offsets grow.
//!
//! Small records read in order would cost a system call each. Every thread keeps one block of the file it read last; a read
//! that follows the one before takes a whole block, any other read takes its own bytes only. Blocks belong to threads, so
//! that nobody waits for a lock. There is no memory mapping: a file that shrinks under one ends the process by a signal,
//! here it is an error of the record.

use crate::error::ReadError;
use crate::files::Contents;
use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a read in order takes at once.
const AHEAD_BYTES: u64 = 256 << 10;
/// A thread keeps no larger block than this when it is done with it.
const KEPT_BYTES_MAX: usize = 4 << 20;

/// Of the next file; 0 is none.
static NEXT: AtomicU64 = AtomicU64::new(1);

thread_local! {
    static BLOCK: RefCell<Block> = const { RefCell::new(Block::none()) };
}

/// What a thread has read last.
struct Block {
    file: u64,
    start: u64,
    bytes: Vec<u8>,
    /// Where the last read from it began and ended.
    last: (u64, u64),
}

impl Block {
    const fn none() -> Self {
        Self { file: 0, start: 0, bytes: Vec::new(), last: (0, 0) }
    }

    /// The place of these bytes in the block, if it has them.
    fn find(&self, offset: u64, len: u64) -> Option<usize> {
        let end = self.start + self.bytes.len() as u64;
        (offset >= self.start && offset + len <= end).then(|| (offset - self.start) as usize)
    }

    /// Whether a read at `offset` goes on where the last one was, with little left out.
    fn goes_on(&self, offset: u64) -> bool {
        offset > self.last.0 && offset <= self.last.1 + AHEAD_BYTES / 4
    }
}

/// A file with random access, fast in order.
#[derive(Clone, Debug)]
pub(crate) struct ReadAhead {
    number: u64,
    contents: Contents,
}

impl ReadAhead {
    pub fn new(contents: Contents) -> Self {
        Self { number: NEXT.fetch_add(1, Ordering::Relaxed), contents }
    }

    pub fn contents(&self) -> &Contents {
        &self.contents
    }

    /// Hands `len` bytes from `offset` on to `take`.
    pub fn with<T>(&self, offset: u64, len: u64, take: impl FnOnce(&[u8]) -> T) -> Result<T, ReadError> {
        self.contents.check(offset, len)?;
        let mut block = BLOCK.with(|block| block.replace(Block::none()));
        let at = match (block.file == self.number).then(|| block.find(offset, len)).flatten() {
            Some(at) => at,
            None => {
                self.fill(&mut block, offset, len)?;
                0
            }
        };
        block.last = (offset, offset + len);
        let result = take(&block.bytes[at..at + len as usize]);
        if block.bytes.capacity() > KEPT_BYTES_MAX {
            block = Block::none();
        }
        BLOCK.with(|place| place.replace(block));
        Ok(result)
    }

    fn fill(&self, block: &mut Block, offset: u64, len: u64) -> Result<(), ReadError> {
        let goes_on = block.file == self.number && block.goes_on(offset);
        let wanted = if goes_on { len.max(AHEAD_BYTES) } else { len };
        let wanted = wanted.min(self.contents.bytes() - offset) as usize;
        // What the block held is overwritten: only growth is worth clearing.
        block.bytes.resize(wanted, 0);
        self.contents.read_at(offset, &mut block.bytes)?;
        (block.file, block.start) = (self.number, offset);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::DataFile;
    use kolo_graph::settings::Settings;

    fn file(bytes: &[u8]) -> (tempfile::TempDir, ReadAhead) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, bytes).unwrap();
        let contents = DataFile::at(&path).unwrap().contents(&Settings::new("data", "job.toml:1")).unwrap();
        (dir, ReadAhead::new(contents))
    }

    #[test]
    fn gives_the_bytes_of_the_file_in_any_order_and_size() {
        let bytes: Vec<u8> = (0..600_000_u32).map(|i| (i % 251) as u8).collect();
        let (_dir, file) = file(&bytes);
        let (_other_dir, other) = self::file(&[9; 300]);
        let ordered = (0..2000).map(|i| (i * 300, 302));
        let scattered = (0..2000).map(|i| ((i * 7919) % 599_000, i % 900));
        for (offset, len) in ordered.chain(scattered).chain([(0, 600_000), (600_000, 0), (0, 1)]) {
            if offset + len > bytes.len() {
                continue;
            }
            let same = file.with(offset as u64, len as u64, |read| read == &bytes[offset..offset + len]).unwrap();
            assert!(same, "{offset} {len}");
            if offset % 5 == 0 {
                assert_eq!(other.with(10, 2, <[u8]>::to_vec).unwrap(), [9, 9]);
            }
        }
        assert_eq!(file.with(599_999, 2, <[u8]>::len).unwrap_err().offset, Some(599_999));
        assert!(file.with(u64::MAX, 2, <[u8]>::len).is_err());
    }

    #[test]
    fn a_file_that_shrinks_is_an_error_and_no_signal() {
        let (dir, file) = file(&vec![1; 1 << 20]);
        assert_eq!(file.with(0, 4, <[u8]>::len).unwrap(), 4);
        std::fs::OpenOptions::new().write(true).open(dir.path().join("f")).unwrap().set_len(100).unwrap();
        let error = file.with(900_000, 4, <[u8]>::len).unwrap_err();
        assert_eq!(error.offset, Some(900_000));
        assert_eq!(file.with(0, 4, <[u8]>::len).unwrap(), 4);
    }
}
