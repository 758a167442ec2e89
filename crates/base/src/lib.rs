#![doc = include_str!("../README.md")]

mod bytes;
mod crc32c;
mod pattern;
mod sync;

pub use bytes::ByteReader;
pub use crc32c::masked_crc32c;
pub use pattern::matches_pattern;
pub use sync::{lock, read, wait, wait_timeout, write};
