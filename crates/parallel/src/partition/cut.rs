//! Where a tensor is cut along an axis of the mesh.

use kolo_graph::Placement;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A dim of equal blocks, each of which is cut at the same places into slices. A rank has its slices of every block, one block
/// after the other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    pub dim: usize,
    pub blocks: usize,
    /// Slice `i` of a block is its elements `bounds[i]..bounds[i + 1]`.
    pub bounds: Arc<[usize]>,
}

impl Cut {
    pub fn slices(&self) -> usize {
        self.bounds.len() - 1
    }

    /// Elements of a block.
    pub fn block(&self) -> usize {
        self.bounds[self.slices()]
    }

    /// The elements of these slices in each block.
    pub fn range(&self, slices: &Range<usize>) -> Range<usize> {
        self.bounds[slices.start]..self.bounds[slices.end]
    }

    /// The size of the dim for whoever has these slices.
    pub fn size(&self, slices: &Range<usize>) -> usize {
        self.blocks * self.range(slices).len()
    }
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Placement::blocks(self.dim, self.blocks).fmt(f)
    }
}

/// How a value lies along the axis.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Sharding {
    /// Every rank has all of it.
    Replicated,
    Sharded(Cut),
}

impl Sharding {
    pub fn cut(&self) -> Option<&Cut> {
        match self {
            Sharding::Replicated => None,
            Sharding::Sharded(cut) => Some(cut),
        }
    }
}

impl fmt::Display for Sharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sharding::Replicated => Placement::Replicate.fmt(f),
            Sharding::Sharded(cut) => cut.fmt(f),
        }
    }
}

/// Which units of a split each slice takes: of every block of units, a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arrangement {
    pub blocks: usize,
    /// Slice `i` of a block is its units `bounds[i]..bounds[i + 1]`.
    pub bounds: Arc<[usize]>,
}

impl Arrangement {
    /// Runs as even as possible; `None` if there are not enough units.
    pub fn even(units: usize, slices: usize) -> Option<Self> {
        (units >= slices)
            .then(|| Self { blocks: 1, bounds: (0..=slices).map(|slice| slice * units / slices).collect() })
    }

    /// The arrangement of a split of `units` in which an operand of this extent, placed along a dim in `blocks`, is cut so.
    pub fn of_operand(cut: &Cut, placement: Placement, extent: usize, units: usize) -> Option<Self> {
        let (dim, blocks) = placement.cut()?;
        let width = extent.checked_div(blocks * units)?;
        let fits = cut.dim == dim && cut.blocks.is_multiple_of(blocks) && width > 0;
        if !fits || !units.is_multiple_of(cut.blocks / blocks) || cut.bounds.iter().any(|at| !at.is_multiple_of(width))
        {
            return None;
        }
        Some(Self { blocks: cut.blocks / blocks, bounds: cut.bounds.iter().map(|at| at / width).collect() })
    }

    /// Where an operand of this extent is cut, which a split of `units` places so.
    pub fn cut(&self, placement: Placement, extent: usize, units: usize) -> Option<Cut> {
        let (dim, blocks) = placement.cut()?;
        let width = extent / (blocks * units).max(1);
        let bounds = self.bounds.iter().map(|at| at * width).collect();
        Some(Cut { dim, blocks: blocks * self.blocks, bounds })
    }

    /// Whether every slice has units.
    pub fn is_full(&self) -> bool {
        self.bounds.windows(2).all(|pair| pair[0] < pair[1])
    }

    /// Units of these slices in all blocks, and the first of them.
    pub fn units(&self, slices: &Range<usize>) -> (usize, usize) {
        let (start, end) = (self.bounds[slices.start], self.bounds[slices.end]);
        (start, self.blocks * (end - start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_and_its_arrangement_say_the_same() {
        // Queries, keys and values of three heads of four elements each.
        let heads = Arrangement::even(3, 2).unwrap();
        let cut = heads.cut(Placement::blocks(2, 3), 36, 3).unwrap();
        assert_eq!((cut.dim, cut.blocks, &cut.bounds[..]), (2, 3, &[0, 4, 12][..]));
        // The same columns of the layer before, which knows nothing of heads.
        let columns = Arrangement::of_operand(&cut, Placement::Shard(2), 36, 36).unwrap();
        assert_eq!((columns.blocks, &columns.bounds[..]), (3, &[0, 4, 12][..]));
        assert_eq!(columns.units(&(1..2)), (4, 24));
        assert_eq!(columns.cut(Placement::Shard(0), 36, 36).unwrap().size(&(0..1)), 12);
        assert_eq!(Arrangement::of_operand(&cut, Placement::blocks(2, 3), 36, 3), Some(heads));
        // Heads of six elements are not cut there.
        assert_eq!(Arrangement::of_operand(&cut, Placement::blocks(2, 3), 36, 2), None);
        assert_eq!(Arrangement::even(1, 2), None);
    }
}
