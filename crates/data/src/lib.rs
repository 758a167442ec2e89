//! The data of kolo: sources of samples, and the order in which a job sees them.
//!
//! A [`Source`] is a pure function from (sample, field) to values: it keeps no cursor, so any worker may ask for any
//! sample at any time and gets the same bits. Which samples train, which are held out and in what order an epoch walks
//! them is a [`Permutation`], computed per position and never stored. Everything random derives from the job's seed.
//!
//! ```
//! use kolo_data::{Column, SOURCES, Split, open};
//! use kolo_graph::settings::Settings;
//!
//! let source = open(SOURCES, "builtin:digits", &Settings::new("data", "job.toml:1"), 1, None)?;
//! let split = Split::holdout(source.len(), 0.2, 1);
//! let mut image = vec![0.0; source.fields()[0].elements()];
//! source.fill(split.train(0), 0, Column::F32(&mut image))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod ahead;
mod arrays;
mod cache;
mod chosen;
mod error;
mod file_source;
pub mod files;
mod fingerprint;
mod folder_parts;
pub mod format;
pub mod formats;
#[cfg(any(feature = "parquet", feature = "hdf5"))]
mod guard;
pub mod image;
pub mod index_file;
pub mod inspect;
pub mod load_times;
mod noise;
pub mod notes;
mod parts;
mod pattern;
pub mod prefetch;
mod ranges;
pub mod record;
mod resample;
pub mod sample;
mod shards;
pub mod sheet;
mod source;
pub mod sources;
mod split;
pub mod stream;
pub mod tokenizer;
pub mod transform;
pub mod transforms;
#[cfg(any(feature = "parquet", feature = "hdf5"))]
mod units;
mod unpack;
mod windows;
pub mod writer;
pub mod writers;

pub use chosen::ChosenSamples;
pub use error::ReadError;
pub use file_source::{FileSource, open_for_evaluation, open_for_field, open_for_prediction, tokenizer_used};
pub use kolo_graph::field::{Column, Field, IGNORED, Kind};
pub use load_times::LoadTimes;
pub use source::{Draw, Opened, Row, SOURCES, SampleCost, SampleName, Source, SourceKind, find, open};
pub use split::{Permutation, Purpose, Split, epoch_order};
pub use transform::TargetScale;
