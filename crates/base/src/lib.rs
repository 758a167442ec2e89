#![doc = include_str!("../README.md")]

mod bytes;
mod crc32c;
mod limits;
mod memory;
mod pattern;
mod regular;
mod shown;
mod sync;
mod threads;

pub use bytes::ByteReader;
pub use crc32c::masked_crc32c;
pub use limits::{limit_hint, open_files_hint};
pub use memory::group_limit;
pub use pattern::matches_pattern;
pub use regular::{create_regular, is_open_stream, open_regular, read_limited, read_regular};
pub use shown::{Shown, ShownPath, is_hidden};
pub use sync::{lock, read, wait, wait_timeout, write};
pub use threads::on_threads;
