//! Executors: `reference` is the definition, `null` runs nothing and counts, `cpu` is fast.

pub mod cpu;
pub mod element;
pub mod exchange;
pub mod memory;
pub mod null;
mod overlap;
pub mod reference;
pub mod store;

pub use cpu::{Alive, Feed, Options, Session, StepError, Stop};
pub use element::{Element, Plain, ValueError, Values, View};
pub use exchange::{Collectives, Exchange, ExchangeError, ExchangeKind};
pub use half::{bf16, f16};
pub use memory::Memory;
pub use store::Store;
