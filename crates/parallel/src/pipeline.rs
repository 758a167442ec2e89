//! Pipeline schedules as data: which rank runs which part of the model on which micro-batch, and in which order.
//!
//! The model is cut into *stages*, in the order of the forward pass. A [`PipelineSchedule`] places the stages on ranks and lists the
//! [`Action`]s of each rank. Messages are not listed: they follow from the placement. A rank sends as soon as a value is made,
//! without waiting, and waits for what an action reads.
//!
//! | file | what it is |
//! |---|---|
//! | [`schedule`] | the data: actions, placement, channels |
//! | [`families`] | the schedules of the literature, each a function of ranks, micro-batches and chunks |
//! | [`text`] | the text form, for a schedule of one's own |
//! | [`verify()`] | the proof, before anything runs, that a schedule computes the right gradients and ends |
//! | [`verified`] | what the proof found: slots of activations, peaks, orders of channels |
//! | [`cost`] | when each action starts, and how long ranks wait |
//! | [`draw`] | pictures for a terminal and as SVG |
//!
//! | `program` | the proof that the graphs of all ranks, with every message in them, run together |
//! | [`strategy`] | the strategy: keys of a job, the order of a rank's work, and its graph, cut by [`Stages`] |
//!
//! Only a [`Verified`] schedule can be timed or drawn, so neither can wait for ever. `docs/schedules.md` is the description for
//! users; its examples are tests.
//!
//! ```
//! use kolo_parallel::pipeline::{Durations, Sizes, draw, family, verify};
//!
//! let schedule = family("1f1b")?.schedule(Sizes { ranks: 4, micro_batches: 8, chunks: 1 })?;
//! let verified = verify(&schedule)?;
//! assert_eq!(verified.rank_peak(0), 4);
//! let timeline = verified.timeline(&Durations::textbook(4))?;
//! assert_eq!(timeline.bubble_share(), 3.0 / 11.0);
//! println!("{}", draw::draw_text(&verified, &timeline, 120));
//! # Ok::<(), kolo_parallel::pipeline::ScheduleError>(())
//! ```

mod after;
pub mod cost;
mod directions;
pub mod draw;
pub mod error;
pub mod families;
mod lower;
mod program;
pub mod schedule;
mod slots;
mod stages;
pub mod strategy;
#[cfg(test)]
mod tests;
pub mod text;
pub mod verified;
mod verify;

pub use cost::{Durations, StageDurations, Timeline};
pub use error::{ScheduleError, Wait};
pub use families::{FAMILIES, Family, Sizes, USUAL, family};
pub use lower::PIPELINE;
pub use schedule::{Action, ActionKind, Channel, Direction, Pass, PipelineSchedule, StagePlacement};
pub use stages::{Stages, balanced};
pub use strategy::Pipeline;
pub use verified::{ChannelOrder, Step, Verified};
pub use verify::verify;
