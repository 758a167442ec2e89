//! Numbers, texts and bytes in messages. Nothing is allocated before a length was checked.

use crate::message::KeyBytes;
use kolo_base::ByteReader;

/// Longest text in a message.
pub(crate) const TEXT_BYTES_MAX: usize = 16 << 10;
/// Most ranks of a job.
pub(crate) const WORLD_MAX: usize = 1 << 16;

pub(crate) struct Writer(pub Vec<u8>);

impl Writer {
    pub fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.u32(bytes.len() as u32);
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

/// What messages are made of, beyond plain numbers.
pub(crate) trait ReadMessage {
    fn rank(&mut self) -> Option<usize>;
    /// Bytes behind their length, at most this many.
    fn bytes(&mut self, most: usize) -> Option<Vec<u8>>;
    fn text(&mut self) -> Option<String>;
    fn key(&mut self) -> Option<KeyBytes>;
}

impl ReadMessage for ByteReader<'_> {
    fn rank(&mut self) -> Option<usize> {
        self.u32().map(|rank| rank as usize).filter(|rank| *rank < WORLD_MAX)
    }

    fn bytes(&mut self, most: usize) -> Option<Vec<u8>> {
        let count = self.u32()? as usize;
        if count > most { None } else { self.take(count).map(<[u8]>::to_vec) }
    }

    fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes(TEXT_BYTES_MAX)?).ok()
    }

    fn key(&mut self) -> Option<KeyBytes> {
        self.array().map(KeyBytes)
    }
}
