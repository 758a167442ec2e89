//! Executors: `cpu` is fast, `reference` is the definition in f64, `null` runs nothing and counts.
//!
//! An [`Executor`] lays out memory and runs one call; a [`Schedule`](schedule::Schedule) says what runs when; a [`Session`]
//! drives the one through the other.

pub mod cpu;
pub mod device_links;
pub mod element;
pub mod exchange;
mod exchanges;
pub mod executor;
mod feed;
pub mod gradcheck;
pub mod memory;
mod monitor;
pub mod null;
mod offload;
mod options;
mod precision;
mod program;
pub mod reference;
pub mod schedule;
pub mod selftest;
pub mod session;
pub mod store;

pub use device_links::{DeviceGroup, DeviceLinks, FoundLinks, GroupPlace, LinkPreference, Look};
pub use element::{Element, Plain, ValueError, Values, View};
pub use exchange::{Collectives, Exchange, ExchangeError, ExchangeKind};
pub use exchanges::Rows;
pub use executor::{Device, Executor, SessionBytes};
pub use feed::Feed;
pub use half::{bf16, f16};
pub use memory::Memory;
pub use monitor::{DeviceReading, Monitor};
pub use offload::Offload;
pub use options::Options;
pub use precision::Precision;
pub use program::{Order, Program, Turn};
pub use session::{Alive, Session, StepError, Stop};
pub use store::Store;
