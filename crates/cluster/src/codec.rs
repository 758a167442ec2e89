//! Numbers, texts and bytes in messages. A reader never goes past its end, and allocates nothing before a length was
//! checked.

use crate::message::Key;
use kolo_comm::auth::KEY_BYTES;

/// Longest text in a message.
pub(crate) const TEXT_BYTES_MAX: usize = 16 << 10;
/// Most ranks of a job.
pub(crate) const WORLD_MAX: usize = 1 << 16;

pub(crate) struct Writer(pub Vec<u8>);

impl Writer {
    pub fn word(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn long(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u32);
        self.0.extend_from_slice(bytes);
    }

    pub fn text(&mut self, text: &str) {
        let mut end = text.len().min(TEXT_BYTES_MAX);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.bytes(&text.as_bytes()[..end]);
    }
}

/// Reads a body; every method is `None` past its end.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether all was read.
    pub fn done(&self) -> bool {
        self.0.is_empty()
    }

    pub fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(head)
    }

    pub fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    pub fn word(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    pub fn long(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    pub fn rank(&mut self) -> Option<usize> {
        self.word().map(|rank| rank as usize).filter(|rank| *rank < WORLD_MAX)
    }

    pub fn bytes(&mut self, most: usize) -> Option<Vec<u8>> {
        let count = self.word()? as usize;
        if count > most { None } else { self.take(count).map(<[u8]>::to_vec) }
    }

    pub fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes(TEXT_BYTES_MAX)?).ok()
    }

    pub fn key(&mut self) -> Option<Key> {
        self.take(KEY_BYTES)?.try_into().ok().map(Key)
    }
}
