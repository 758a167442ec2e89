//! From one graph to the parts of it that the ranks along an axis run, derived from the splits that ops declare.
//!
//! A job says into how many *slices* an axis is cut, and the plan is made for the slices, whoever computes them: which values are
//! sharded, and where ops add up partial results ([`plan`]). A rank then runs its slices of the plan ([`lower`]): alone all of
//! them, among `t` ranks every `t`-th part of them in a row. Partial results are always made slice by slice and added as one
//! balanced tree over the slices, on one rank or on several, and an op whose split does not keep the bits of the whole is run
//! slice by slice as well. So the bits follow from the number of slices, never from the number of ranks.

mod cut;
mod lower;
mod plan;

pub use cut::{Cut, Sharding};
pub use lower::{Group, lower};
pub use plan::{Choice, PartitionPlan, Planes, Rules, plan, unfit_for_ring};
