//! Parallel strategies as rewrites of one graph, and the lane on which their collectives run.
//!
//! | file | strategy |
//! |---|---|
//! | [`data`] | data parallelism: sums over grains become sums over all ranks' grains |
//! | [`zero`] | ZeRO stage 1: each rank keeps and runs its share of the optimizer |
//! | [`central`] | central storage: the ranks of a host share one copy of the weights |
//! | [`servers`] | parameter servers: workers push gradients, servers update and hand weights back |
//!
//! The last three share the parameters out in equal runs: `cut`.
//!
//! None of them is a training loop; each emits ordinary nodes.

pub mod central;
mod cut;
pub mod data;
pub mod lane;
pub mod mesh;
pub mod narrow;
pub mod servers;
pub mod zero;

pub use kolo_graph::Placement;
pub use lane::CommLane;
pub use mesh::Mesh;
pub use narrow::NarrowLane;
