//! A discrete-event simulation of a step on a cluster, of any number of devices.
//!
//! | file | what it is |
//! |---|---|
//! | [`script`] | what ranks do, as data: acts of each role, exchanges, replicas |
//! | [`engine`] | the event loop, with lanes and shared links |
//! | [`noise`] | seeded noise of compute |
//! | [`outcome`] | what came out |
//! | [`pipeline`] | scripts of a pipeline's ranks, from its schedule |
//! | [`scenario`] | scripts of all roles, from the model of a step |
//! | [`step`] | one step of a described cluster, with slow ranks and noise |
//! | [`picture`] | an SVG picture of all of it |
//! | [`messages`] | a collective, message by message, as its program says |
//!
//! Without noise it equals the formulas of the literature exactly; the tests are in `simulate/tests.rs`.

pub mod engine;
pub mod messages;
pub mod noise;
pub mod outcome;
pub mod picture;
pub mod pipeline;
pub mod scenario;
pub mod script;
pub mod step;
#[cfg(test)]
mod tests;

pub use engine::{SimulationOptions, simulate};
pub use noise::Noise;
pub use outcome::{Outcome, SimulationError, Span, UnitTimes};
pub use script::{Act, ExchangeCost, Replica, Scenario, Scope, Script};
pub use step::{Conditions, SimulatedStep, SlowRank, simulate_step};
