//! What this executor can do with an op, as its calls say.

use kolo_graph::Op;
use kolo_graph::layout::Abilities;
use kolo_ops::cuda_of;

#[derive(Clone, Copy, Debug)]
pub(crate) struct CudaAbilities;

impl Abilities for CudaAbilities {
    fn in_place(&self, op: &dyn Op) -> Vec<(usize, usize)> {
        cuda_of(op).map_or_else(Vec::new, |op| op.in_place())
    }
}
