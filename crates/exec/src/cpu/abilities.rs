//! What this executor can do with an op, as its kernel says.

use kolo_graph::layout::Abilities;
use kolo_graph::{Op, Type};
use kolo_ops::cpu_of;

/// The abilities of the CPU's kernels, which the registry knows.
#[derive(Clone, Copy, Debug)]
pub struct CpuAbilities;

impl Abilities for CpuAbilities {
    fn in_place(&self, op: &dyn Op) -> Vec<(usize, usize)> {
        cpu_of(op).map_or_else(Vec::new, |op| op.in_place())
    }

    fn gives_tiles(&self, op: &dyn Op, inputs: &[Type]) -> bool {
        cpu_of(op).is_some_and(|op| op.gives_tiles(inputs))
    }

    fn takes_tiles(&self, op: &dyn Op) -> Option<usize> {
        cpu_of(op)?.takes_tiles()
    }
}
