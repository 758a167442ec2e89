//! Executors: `reference` is the definition, `null` runs nothing and counts, `cpu` is fast.

pub mod cpu;
pub mod memory;
pub mod null;
pub mod reference;
pub mod store;

pub use cpu::{Feed, Options, Session};
pub use store::Store;
