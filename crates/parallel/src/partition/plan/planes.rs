//! Planes cut along their rows or columns, from the images on.
//!
//! Every tensor `[n, c, h, w]` that is cut is cut evenly, so where its slices lie follows from its shape. A node whose inputs are
//! cut is run on the slices if some split of it makes slices of planes, or sums over them; what windows reach beyond a slice is a
//! halo. Whatever has no such split, or fewer rows than slices, is computed whole by all, and so is what follows, up to a layer
//! that is to cut planes again. None of this weighs costs: the plan is the job's, not the layout's.

use super::{Choice, Halo, Need, Parts, Pass};
use crate::partition::cut::{Arrangement, Cut, Sharding};
use kolo_graph::sources::Input;
use kolo_graph::{DType, InputRole, Node, Placement, Split, Type, ValueId};

/// Dims of an image and of what is made of it.
const DIMS: usize = 4;

impl Pass<'_> {
    /// Cuts an input that is an image; whether it is one.
    pub(super) fn image(&mut self, node: &Node) -> bool {
        let image = |input: &&Input| input.role == InputRole::Data && !input.per_step && input.dtype == DType::F32;
        let Some(input) = node.op.downcast::<Input>().filter(image) else { return false };
        let Some(cut) = self.plane_cut(&input.shape) else { return false };
        self.shardings[node.outputs[0].0 as usize] = Some(Sharding::Sharded(cut));
        true
    }

    /// Where a tensor of this shape is cut if its planes are.
    fn plane_cut(&self, shape: &[usize]) -> Option<Cut> {
        let dim = self.rules.planes.as_ref()?.dim;
        let size = (shape.len() == DIMS).then(|| shape[dim])?;
        Some(Cut { dim, blocks: 1, bounds: Arrangement::even(size, self.slices)?.bounds })
    }

    fn has_planes(&self, id: ValueId) -> bool {
        self.cut_of(id).is_some_and(|cut| self.plane_cut(&self.graph.ty(id).shape).as_ref() == Some(cut))
    }

    /// How a node runs that has slices of planes among its inputs, or is of a layer that cuts whole ones.
    pub(super) fn on_planes(&self, node: &Node) -> Option<Choice> {
        let planes = self.rules.planes.as_ref()?;
        let is_of = |layers: &[String]| layers.iter().any(|scope| *node.scope == **scope);
        let could_cut = || node.inputs.iter().any(|id| self.plane_cut(&self.graph.ty(*id).shape).is_some());
        let has_planes = node.inputs.iter().any(|id| self.has_planes(*id));
        if !has_planes && !(is_of(&planes.starts) && could_cut()) {
            return None;
        }
        if is_of(&planes.whole) {
            return Some(Choice::Whole);
        }
        let (inputs, outputs) = (self.graph.types(&node.inputs), self.graph.types(&node.outputs));
        let mut splits = node.op.splits(&inputs, &outputs).into_iter();
        Some(
            splits
                .find_map(|split| self.plane_parts(node, split, (&inputs, &outputs)))
                .map_or(Choice::Whole, Choice::Parts),
        )
    }

    /// The parts of a node along a split, if that takes the slices there are and makes slices of planes or sums over them.
    fn plane_parts(&self, node: &Node, split: Split, (inputs, outputs): (&[Type], &[Type])) -> Option<Parts> {
        let arrangement = Arrangement::even(split.size, self.slices)?;
        let along_planes = |placement: &Placement, ty: &Type| {
            let (dim, _) = placement.cut()?;
            let cut = arrangement.cut(*placement, ty.shape[dim], split.size)?;
            (Some(&cut) == self.plane_cut(&ty.shape).as_ref()).then_some(cut)
        };
        let made = |(placement, ty): (&Placement, &Type)| match placement {
            Placement::Partial => ty.dtype == DType::F32 || node.op.wide().is_some(),
            Placement::Replicate => false,
            placement => along_planes(placement, ty).is_some(),
        };
        if !split.outputs.iter().zip(outputs).all(made) {
            return None;
        }
        let need = |((id, placement), ty): ((&ValueId, &Placement), &Type)| match placement {
            Placement::Partial => (!self.has_planes(*id)).then_some(Need::Term),
            Placement::Replicate => (!self.has_planes(*id)).then_some(Need::Replicated),
            Placement::Halo(dim) => Some(Need::Halo(self.halo(&split, *dim, &arrangement)?)),
            placement => along_planes(placement, ty).map(Need::Sharded),
        };
        let needs: Vec<Need> = node.inputs.iter().zip(&split.inputs).zip(inputs).map(need).collect::<Option<_>>()?;
        Some(Parts { sliced: self.is_sliced(&split), split, arrangement, needs })
    }

    /// What each slice reads of an input that has a halo, if planes are cut along that dim.
    fn halo(&self, split: &Split, dim: usize, arrangement: &Arrangement) -> Option<Halo> {
        let (reach, planes) = (split.reach?, self.rules.planes.as_ref()?);
        let range = |pair: &[usize]| reach.range(&(pair[0]..pair[1]));
        (dim == planes.dim).then(|| Halo { dim, ranges: arrangement.bounds.windows(2).map(range).collect() })
    }
}
