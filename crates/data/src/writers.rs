//! One file per format that can be written.

pub mod csv;
pub mod jsonl;
pub mod npy;
pub mod tfrecord;
pub mod tokens;
pub mod webdataset;

#[cfg(test)]
mod tests;
