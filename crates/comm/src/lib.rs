//! Collectives over threads, shared memory, TCP, MPI and a simulator.
//!
//! A [`Communicator`] is a rank's view of a group. It numbers and checks calls and hands them to a [`Transport`]. Most
//! transports only move bytes between two ranks (a [`wire::Wire`]); for them a collective is a [`program::CollectiveProgram`], which an
//! algorithm writes as data. Nothing waits for ever: every wait goes through [`watch::Backoff`].

pub mod algorithms;
pub mod auth;
pub mod bench;
pub mod bootstrap;
pub mod call;
pub mod choose;
pub mod combine;
pub mod communicator;
pub mod compress;
pub mod element;
mod engine;
pub mod execution;
mod failure_report;
pub mod fault;
pub mod host;
mod measure;
pub mod memory;
pub mod mpi;
pub mod program;
pub mod reach;
pub mod record;
pub mod run;
pub mod shm;
pub mod sim;
pub mod task;
pub mod tcp;
pub mod thread;
pub mod transport;
pub mod watch;
pub mod wire;

pub use auth::{Identity, JobKey, LinkRole};
pub use call::{CallKind, Fingerprint};
pub use communicator::{Communicator, Request, Ticket};
pub use element::{ElementType, Reduction, Scalar};
pub use fault::Fault;
pub use transport::{Bootstrap, Transport};
pub use watch::Watch;
