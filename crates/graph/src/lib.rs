//! The graph of kolo: a training step as data.
//!
//! One graph holds forward, backward and update. Ops are declared once ([`op::Op`]); shape, cost and sharding come from
//! their index expressions; autodiff and every other transformation is graph to graph; the text form can be printed,
//! read, checked and run. This crate knows no concrete op beyond the sources every graph starts from.

pub mod attr;
pub mod autodiff;
pub mod builder;
pub mod collective;
pub mod cpu;
pub mod cuda;
pub mod fetch;
pub mod field;
pub mod formula;
pub mod graph;
mod halo;
pub mod index;
pub mod layout;
pub mod op;
pub mod operand;
pub mod piece;
pub mod region;
pub mod rewrite;
pub mod rng;
pub mod settings;
pub mod share;
pub mod simd;
pub mod sources;
pub mod split;
pub mod steps;
pub mod team;
pub mod text;
pub mod types;
pub mod verify;

pub use builder::{Builder, Tensor};
pub use cpu::{Cpu, CpuCx, Taker, Tile};
pub use cuda::{ChannelsLast, Cuda, CudaArg, CudaCalls, CudaCx, CudaMatrix, CudaPlace, CudaSource, Launch, Product};
pub use formula::Formula;
pub use graph::{Graph, GraphError, Node, NodeId, Phase, Stage, ValueId};
pub use op::{Arg, Case, Cases, Declared, Dense, Describe, Domain, GradCx, Mixed, Op, OpKind, ProductShape, Work};
pub use operand::{Operand, Operands, checked_types};
pub use region::Region;
pub use sources::{Init, InputRole};
pub use split::{Placement, Reach, Split};
pub use team::Team;
pub use types::{DType, Shape, Type};
