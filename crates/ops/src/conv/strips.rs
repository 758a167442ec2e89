//! Convolutions on strips of their images: a part of the rows or columns of the result, and what it reads of the operands.
//!
//! A part is a convolution with other padding: where a strip ends inside the image, its neighbours' pixels take the place of
//! zeros. The direct method gives each element one chain of terms, so a strip has the bits of the whole. Winograd's tiles begin
//! where a strip begins, and the method is chosen by the shape, so there it may not.

use super::shape::{Padding, Shape};
use super::winograd;
use kolo_graph::split::{Placement, Reach, Split};
use std::ops::Range;

/// The axes of the results, or of what is summed: rows and columns of the grid, of the image.
const GRID: [&str; 2] = ["oh", "ow"];
const IMAGE: [&str; 2] = ["h", "w"];

/// Where an operand of a pass lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    Whole,
    /// The same rows as the result, or as what is summed.
    Own,
    /// What those reach.
    Reached,
}

impl Held {
    fn placement(self, dim: usize) -> Placement {
        match self {
            Held::Whole => Placement::Replicate,
            Held::Own => Placement::Shard(dim),
            Held::Reached => Placement::Halo(dim),
        }
    }
}

fn span(shape: &Shape, dim: usize) -> usize {
    shape.window.dilation[dim] * (shape.kernel[dim] - 1) + 1
}

/// Whether the transforms may compute the whole, or a part of it.
fn may_transform(shape: &Shape) -> bool {
    let window = &shape.window;
    let plain = window.stride == [1, 1] && window.dilation == [1, 1] && window.groups == 1;
    plain && shape.kernel == [3, 3] && shape.inputs.max(shape.outputs) >= winograd::CHANNELS_MIN
}

/// The splits of a pass whose units are rows or columns of the grid: the forward pass, and the sum of the weight gradient.
pub fn of_grid(shape: &Shape, inputs: &[Held], output: Placement) -> Vec<Split> {
    let along = |dim: usize| {
        let window = &shape.window;
        let reach =
            Reach::of_windows(shape.image[dim], span(shape, dim), window.stride[dim], window.padding.before[dim]);
        let placements: Vec<Placement> = inputs.iter().map(|held| held.placement(dim + 2)).collect();
        let output = if output == Placement::Partial { output } else { Placement::Shard(dim + 2) };
        let split = Split::new(GRID[dim], shape.grid[dim], placements, [output]).reaching(reach);
        reach.meets(shape.grid[dim]).then(|| Split { exact: !may_transform(shape), ..split })
    };
    (0..2).filter_map(along).collect()
}

/// The splits of the input gradient, or of a transposed convolution, whose units are rows or columns of the image.
pub fn of_image(shape: &Shape, inputs: &[Held]) -> Vec<Split> {
    let along = |dim: usize| {
        let window = &shape.window;
        let reach = Reach::of_places(shape.grid[dim], span(shape, dim), window.stride[dim], window.padding.before[dim]);
        let placements: Vec<Placement> = inputs.iter().map(|held| held.placement(dim + 2)).collect();
        let split = Split::new(IMAGE[dim], shape.image[dim], placements, [Placement::Shard(dim + 2)]).reaching(reach);
        Split { exact: !may_transform(shape), ..split }
    };
    (0..2).map(along).collect()
}

/// The dim of the planes that a split of these goes along, and what its units read.
fn along(split: &Split, axes: [&str; 2]) -> Option<(usize, Reach)> {
    Some((axes.iter().position(|axis| *axis == split.axis)?, split.reach?))
}

/// The padding of a part that computes these rows or columns of the grid.
pub fn grid_part(split: &Split, units: &Range<usize>, stride: [usize; 2], padding: Padding) -> Option<Padding> {
    let (dim, reach) = along(split, GRID)?;
    let read = reach.range(units);
    let start = units.start * stride[dim];
    let end = units.end.saturating_sub(1) * stride[dim] + reach.span();
    let mut part = padding;
    // All counted from where the padding begins.
    part.before[dim] = (read.start + padding.before[dim]).saturating_sub(start);
    part.after[dim] = end.saturating_sub(read.end + padding.before[dim]);
    Some(part)
}

/// A part that computes some rows or columns of the image.
#[derive(Clone, Copy, Debug)]
pub struct ImagePart {
    /// The dim of the planes that is cut.
    pub dim: usize,
    pub padding: Padding,
    /// Rows or columns behind the last window.
    pub beyond: usize,
}

pub fn image_part(split: &Split, units: &Range<usize>, stride: [usize; 2], padding: Padding) -> Option<ImagePart> {
    let (dim, reach) = along(split, IMAGE)?;
    let read = reach.range(units);
    let mut part = padding;
    part.before[dim] = (padding.before[dim] + units.start).saturating_sub(read.start * stride[dim]);
    let covered = read.len().saturating_sub(1) * stride[dim] + reach.span();
    part.after[dim] = covered.saturating_sub(units.len() + part.before[dim]);
    let beyond = (units.len() + part.both(dim)).saturating_sub(covered);
    Some(ImagePart { dim, padding: part, beyond })
}
