#![doc = include_str!("../README.md")]

mod bytes;
mod crc32c;
mod limits;
mod memory;
mod pattern;
mod sync;

pub use bytes::ByteReader;
pub use crc32c::masked_crc32c;
pub use limits::open_files_hint;
pub use memory::group_limit;
pub use pattern::matches_pattern;
pub use sync::{lock, read, wait, wait_timeout, write};
