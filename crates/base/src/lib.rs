#![doc = include_str!("../README.md")]

mod bytes;
mod pattern;
mod sync;

pub use bytes::ByteReader;
pub use pattern::matches_pattern;
pub use sync::{lock, read, wait, wait_timeout, write};
