//! The file formats, one file each. Every one is a [`Format`](crate::format::Format) in the list
//! [`FORMATS`](crate::format::FORMATS).

pub mod cifar;
pub mod csv;
mod encoding;
#[cfg(feature = "hdf5")]
pub mod hdf5;
pub mod idx;
pub mod images;
mod json;
pub mod jsonl;
mod labels;
pub mod lmdb;
pub mod npy;
#[cfg(feature = "parquet")]
pub mod parquet;
pub mod safetensors;
pub mod text;
pub mod tfrecord;
pub mod tokens;
pub mod webdataset;

#[cfg(test)]
pub(crate) mod testing;
