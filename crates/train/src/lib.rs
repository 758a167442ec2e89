//! Training: from a job file to trained weights.
//!
//! A [`job::Job`] is read from the file; [`step`] turns its model into one graph of forward, backward and update;
//! [`trainer::Trainer`] runs steps of it; [`session`] is the loop around it with metrics, evaluation and reports.

mod assemble;
pub mod asynchronous;
pub mod checkpoint;
pub mod compared;
pub mod confusion;
mod copies;
pub mod data_bench;
pub mod decision;
pub mod device_use;
pub mod error;
pub mod events;
pub mod generate;
mod held;
pub mod interrupt;
pub mod job;
pub mod job_file;
pub mod layout_models;
pub mod log;
pub mod loss_scale;
pub mod machine;
pub mod memory_check;
pub mod memory_limit;
pub mod memory_settings;
pub mod metrics;
pub mod nearest;
pub mod optimizer;
mod parts;
pub mod picture;
pub mod predict;
pub mod quantiles;
pub mod rate_scaling;
pub mod record;
pub mod report;
pub mod schedule;
pub mod session;
pub mod step;
pub mod step_inputs;
pub mod step_model;
pub mod supply;
pub mod timeline;
pub mod together;
pub mod trainer;
pub mod trial_run;
pub mod weights;
pub mod worker_group;
pub mod worker_plan;

pub use error::Error;
pub use held::HeldBatch;
pub use job::Job;
pub use report::Report;
pub use session::{Observer, run};
pub use trainer::{Trainer, TrainerState};
pub use worker_group::WorkerGroup;
