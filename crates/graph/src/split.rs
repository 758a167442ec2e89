//! How an op may be split along an axis of the mesh: where its operands lie, and what each part runs.
//!
//! A [`Split`] is one direction of an op, cut into units (rows, heads, groups of channels). Every part takes some of the
//! units, the same ones of every operand that is sharded, and which ones is free: a run, or every third. So whatever a
//! neighbour leaves sharded can be taken as it is, and packed operands (queries, keys and values side by side) are cut
//! block by block. Most splits follow from the index expression; the rest are written by the op ([`Op::splits`]).
//! The conformance suite runs every split of every op in parts and compares them with the whole.

use crate::index::Index;
use crate::op::Op;
use crate::types::{Shape, Type};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// How a tensor lies along an axis of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank has all of it.
    Replicate,
    /// Cut along this dim.
    Shard(usize),
    /// The dim is this many equal blocks, and each of them is cut: a part has its units of every block, one after the other.
    StridedShard { dim: usize, blocks: usize },
    /// Every rank has a term of the sum.
    Partial,
    /// Cut along this dim, with a halo: a part has what its units reach of it ([`Split::reach`]).
    Halo(usize),
}

impl Placement {
    /// Cut along `dim`, in each of this many blocks.
    pub fn blocks(dim: usize, blocks: usize) -> Self {
        if blocks == 1 { Placement::Shard(dim) } else { Placement::StridedShard { dim, blocks } }
    }

    /// The dim that is cut, and the blocks in it.
    pub fn cut(self) -> Option<(usize, usize)> {
        match self {
            Placement::Shard(dim) => Some((dim, 1)),
            Placement::StridedShard { dim, blocks } => Some((dim, blocks)),
            Placement::Replicate | Placement::Partial | Placement::Halo(_) => None,
        }
    }
}

/// Which places of a dim the units of a split read: unit `u` those from `⌈(u·step + low) / stride⌉` to
/// `⌊(u·step + high) / stride⌋`, as far as the dim has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Places of the dim.
    pub extent: usize,
    pub step: usize,
    pub stride: usize,
    pub low: i64,
    pub high: i64,
}

impl Reach {
    /// Windows of `span` places, the first of which begins in the padding, over a dim of `extent`.
    pub fn of_windows(extent: usize, span: usize, stride: usize, padding: usize) -> Self {
        let low = -(padding as i64);
        Self { extent, step: stride, stride: 1, low, high: low + span as i64 - 1 }
    }

    /// The other way round: of `windows`, those that a place lies under.
    pub fn of_places(windows: usize, span: usize, stride: usize, padding: usize) -> Self {
        let high = padding as i64;
        Self { extent: windows, step: 1, stride, low: high - (span as i64 - 1), high }
    }

    /// Places from the first to the last that a unit reads.
    pub fn span(&self) -> usize {
        (self.high - self.low + 1) as usize
    }

    /// Whether each of so many units reads something of the dim.
    pub fn meets(&self, units: usize) -> bool {
        let last = units.saturating_sub(1) as i64 * self.step as i64;
        self.high >= 0 && last + self.low < (self.extent * self.stride) as i64
    }

    /// What a run of units reads; at least one place, if there are units.
    pub fn range(&self, units: &Range<usize>) -> Range<usize> {
        if units.is_empty() || self.extent == 0 {
            return 0..0;
        }
        let (stride, at) = (self.stride as i64, |unit: usize| unit as i64 * self.step as i64);
        let floor = |number: i64| number.div_euclid(stride);
        let ceil = |number: i64| -(-number).div_euclid(stride);
        let first = ceil(at(units.start) + self.low).min(floor(at(units.start) + self.high));
        let start = first.clamp(0, self.extent as i64 - 1);
        let end = (floor(at(units.end - 1) + self.high) + 1).clamp(start + 1, self.extent as i64);
        start as usize..end as usize
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Replicate => write!(f, "R"),
            Placement::Shard(dim) => write!(f, "S{dim}"),
            Placement::StridedShard { dim, blocks } => write!(f, "S{dim}/{blocks}"),
            Placement::Partial => write!(f, "P"),
            Placement::Halo(dim) => write!(f, "H{dim}"),
        }
    }
}

/// One legal way to split an op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// The name of the direction: an axis of the index expression, or a name by hand, such as `heads`.
    pub axis: String,
    /// Units of it.
    pub size: usize,
    /// Where each input must lie. A partial input is a term of a sum that all parts' inputs make.
    pub inputs: Vec<Placement>,
    /// Where each output lies then.
    pub outputs: Vec<Placement>,
    /// Whether what is sharded or replicated has the bits of the whole op. If not, kernels choose their method or their
    /// blocks by the size of this axis, and a layout that promises the same bits cannot use the split.
    pub exact: bool,
    /// Parts take runs of units, in order, and are told where theirs begins ([`Op::part_at`]).
    pub ordered: bool,
    /// What units read of inputs that are cut with a halo.
    pub reach: Option<Reach>,
}

impl Split {
    pub fn new(
        axis: impl Into<String>,
        size: usize,
        inputs: impl Into<Vec<Placement>>,
        outputs: impl Into<Vec<Placement>>,
    ) -> Self {
        let (axis, inputs, outputs) = (axis.into(), inputs.into(), outputs.into());
        Self { axis, size, inputs, outputs, exact: true, ordered: false, reach: None }
    }

    /// What units read of inputs that are cut with a halo.
    pub fn reaching(self, reach: Reach) -> Self {
        Self { reach: Some(reach), ..self.ordered() }
    }

    /// Parts take runs of units, in order.
    pub fn ordered(mut self) -> Self {
        self.ordered = true;
        self
    }

    /// The shape of an operand in a part of `units`.
    pub fn part_shape(&self, placement: Placement, shape: &[usize], units: usize) -> Shape {
        let mut shape = Shape::from(shape);
        if let Some((dim, _)) = placement.cut() {
            shape[dim] = shape[dim] / self.size.max(1) * units;
        }
        shape
    }

    /// What a part of `units` runs, the first of which is number `first`.
    pub fn part(&self, op: &Arc<dyn Op>, first: usize, units: usize) -> Arc<dyn Op> {
        op.part_at(self, first, units).unwrap_or_else(|| op.clone())
    }
}

impl fmt::Display for Split {
    /// `k: S1 S0 -> P`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |placements: &[Placement]| placements.iter().map(Placement::to_string).collect::<Vec<_>>().join(" ");
        write!(f, "{}: {} -> {}", self.axis, side(&self.inputs), side(&self.outputs))
    }
}

impl Index {
    /// The splits that the expression allows. An axis in an output shards it; one that is in no output is summed over, which
    /// leaves partial sums, and an operand that is added to them must be one too.
    pub fn splits(&self, inputs: &[Type]) -> Vec<Split> {
        let Ok(sizes) = self.sizes(inputs) else { return Vec::new() };
        let splittable = sizes.into_iter().filter(|(axis, _)| !self.whole.contains(axis));
        splittable
            .map(|(axis, size)| {
                let dim = |axes: &[String]| axes.iter().position(|name| *name == axis).map(Placement::Shard);
                let outputs: Vec<Placement> =
                    self.outputs.iter().map(|axes| dim(axes).unwrap_or(Placement::Partial)).collect();
                let summed = outputs.contains(&Placement::Partial);
                let input = |(at, axes): (usize, &Vec<String>)| match dim(axes) {
                    Some(shard) => shard,
                    None if summed && self.added.contains(&at) => Placement::Partial,
                    None => Placement::Replicate,
                };
                let inputs: Vec<Placement> = self.inputs.iter().enumerate().map(input).collect();
                let exact = !self.rounded.contains(&axis);
                Split { axis, size, inputs, outputs, exact, ordered: false, reach: None }
            })
            .collect()
    }
}

/// Splits along every dim of one shape: operands broadcast to it, and outputs have it.
pub fn elementwise(inputs: &[Type], outputs: &[Type]) -> Vec<Split> {
    let Some(shape) = outputs.first().map(|ty| &ty.shape) else { return Vec::new() };
    let along = |dim: usize| {
        let input = |ty: &Type| {
            let own = (dim + ty.rank()).checked_sub(shape.len());
            own.filter(|own| ty.shape[*own] == shape[dim]).map_or(Placement::Replicate, Placement::Shard)
        };
        let inputs: Vec<Placement> = inputs.iter().map(input).collect();
        Split::new(format!("d{dim}"), shape[dim], inputs, vec![Placement::Shard(dim); outputs.len()])
    };
    (0..shape.len()).map(along).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn splits(text: &str, shapes: &[&[usize]]) -> Vec<String> {
        let index = Index::parse(text);
        assert_eq!(index.to_string(), text, "an expression prints as it is read");
        let types: Vec<Type> = shapes.iter().map(|shape| Type::f32(*shape)).collect();
        index.splits(&types).iter().map(|split| format!("{split}, {} {}", split.size, split.exact)).collect()
    }

    #[test]
    fn index_expressions_say_how_ops_are_split() {
        let columns_and_rows = splits("m k, k n, +n -> m n", &[&[2, 3], &[3, 5], &[5]]);
        assert_eq!(
            columns_and_rows,
            ["m: S0 R R -> S0, 2 true", "k: S1 S0 P -> P, 3 true", "n: R S1 S0 -> S1, 5 true"]
        );
        assert_eq!(splits("d0 n!, _ n! -> d0 n!, d0", &[&[2, 3], &[1, 3]]), ["d0: S0 R -> S0 S0, 2 true"]);
        assert_eq!(splits("n~ c! -> c!", &[&[2, 3]]), ["n: S0 -> P, 2 false"]);
        assert_eq!(splits("m k, k n -> m n", &[&[2, 3], &[4, 5]]), [""; 0], "shapes that do not fit");
    }

    #[test]
    fn windows_and_the_places_under_them_reach_each_other() {
        for (extent, span, stride, padding) in [(9, 3, 1, 1), (9, 3, 2, 1), (10, 1, 2, 0), (7, 5, 3, 2), (6, 7, 1, 3)] {
            let windows = (extent + 2 * padding - span) / stride + 1;
            let (down, up) =
                (Reach::of_windows(extent, span, stride, padding), Reach::of_places(windows, span, stride, padding));
            assert!(down.meets(windows) && up.span() == span);
            for (window, place) in (0..windows).flat_map(|window| (0..extent).map(move |place| (window, place))) {
                let inside = (window * stride..window * stride + span).contains(&(place + padding));
                assert_eq!(down.range(&(window..window + 1)).contains(&place), inside, "{down:?}, window {window}");
                assert!(!inside || up.range(&(place..place + 1)).contains(&window), "{up:?}, place {place}");
            }
            assert_eq!(down.range(&(0..windows)).start, 0);
        }
        // A window that lies in the padding alone.
        assert!(!Reach::of_windows(4, 2, 1, 2).meets(7));
    }

    #[test]
    fn parts_have_their_units_of_every_block() {
        let packed = Placement::blocks(1, 3);
        let split = Split::new("heads", 4, [packed], [Placement::Shard(1)]);
        assert_eq!(split.part_shape(packed, &[2, 24], 3)[..], [2, 18]);
        assert_eq!(split.part_shape(Placement::Shard(0), &[8, 5], 1)[..], [2, 5]);
        assert_eq!(split.part_shape(Placement::Partial, &[8, 5], 1)[..], [8, 5]);
        assert_eq!(split.to_string(), "heads: S1/3 -> S1");
    }
}
