#![doc = include_str!("../README.md")]

mod bytes;
mod sync;

pub use bytes::ByteReader;
pub use sync::{lock, read, wait, wait_timeout, write};
