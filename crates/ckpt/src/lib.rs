#![doc = include_str!("../README.md")]

mod catalog;
mod checkpoint;
mod commit;
pub mod diff;
pub mod digest;
pub mod disk;
mod error;
mod manifest;
pub mod mapping;
pub mod safetensors;
mod shard;
pub mod simulated;
mod source;
pub mod transfer;
mod verify;

pub use catalog::{
    Found, Keep, Listed, StepName, Unfinished, list, newest_valid, prune, skipped_notes, staging_dir, unfinished,
};
pub use checkpoint::Checkpoint;
pub use commit::{commit, discard};
pub use disk::{Disk, RealDisk, SharedDisk};
pub use error::{CkptError, human};
pub use manifest::{CHUNK_BYTES, FileInfo, Header, INDEX, MANIFEST, Role, Run, TensorInfo};
pub use shard::{Piece, ShardWriter, Summary, WrittenRun, write_shard};
pub use source::{CHECKPOINTS, SafetensorsFiles, TensorSource, TensorView, checkpoints_of, resolve, weights_of};
pub use verify::{Damage, DamageKind};
