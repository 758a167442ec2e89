//! Sizes that every convolution op must try.

use super::shape::{Padding, Shape, Window};
use kolo_graph::{Arg, Type};

/// `[images, channels, height, width]`, `[outputs, kernel height, kernel width]`, stride, padding, dilation, groups.
type Row = ([usize; 4], [usize; 3], [usize; 2], [usize; 2], [usize; 2], usize);

/// Small enough for finite differences.
const SMALL: &[Row] = &[
    ([1, 1, 1, 1], [1, 1, 1], [1, 1], [0, 0], [1, 1], 1),
    ([2, 2, 5, 4], [3, 3, 3], [1, 1], [1, 1], [1, 1], 1),
    ([2, 2, 5, 7], [2, 3, 3], [2, 2], [1, 1], [1, 1], 1),
    ([1, 2, 6, 5], [2, 3, 3], [2, 1], [0, 3], [1, 2], 1),
    ([3, 3, 4, 4], [2, 1, 1], [1, 1], [0, 0], [1, 1], 1),
    ([2, 3, 5, 4], [2, 1, 1], [2, 2], [0, 0], [1, 1], 1),
    ([1, 4, 5, 4], [6, 3, 2], [1, 2], [1, 1], [1, 1], 2),
    ([2, 3, 4, 5], [3, 3, 3], [1, 1], [1, 1], [1, 1], 3),
    ([1, 1, 9, 7], [2, 5, 3], [3, 2], [2, 1], [1, 1], 1),
    ([1, 2, 7, 7], [2, 2, 2], [3, 3], [3, 3], [2, 2], 1),
    ([1, 1, 8, 6], [1, 3, 3], [2, 2], [2, 2], [2, 2], 1),
    // Pixels beyond the last window, and a stride that skips some for good.
    ([1, 2, 8, 8], [1, 2, 2], [3, 3], [0, 0], [1, 1], 1),
];

/// Whole tiles, more than one canvas, more than one block of `k`, runs of every length.
const LARGE: &[Row] = &[
    ([5, 40, 32, 32], [13, 3, 3], [1, 1], [1, 1], [1, 1], 1),
    ([3, 36, 16, 16], [33, 3, 3], [2, 2], [1, 1], [1, 1], 1),
    ([4, 33, 8, 8], [24, 3, 3], [1, 1], [1, 1], [1, 1], 1),
    ([9, 70, 4, 4], [40, 3, 3], [1, 1], [1, 1], [1, 1], 1),
    ([6, 64, 7, 7], [20, 1, 1], [1, 1], [0, 0], [1, 1], 1),
    ([2, 17, 14, 14], [30, 3, 3], [1, 1], [1, 1], [1, 1], 1),
    ([1, 3, 30, 31], [16, 7, 7], [2, 2], [3, 3], [1, 1], 1),
    ([2, 130, 6, 6], [5, 3, 3], [1, 1], [2, 2], [2, 2], 1),
    ([2, 16, 9, 9], [16, 3, 3], [1, 1], [1, 1], [1, 1], 16),
    // Groups so large that one of them alone would be transformed.
    ([1, 128, 6, 6], [130, 3, 3], [1, 1], [1, 1], [1, 1], 2),
    // Odd sides, every padding, several blocks of channels and of outputs, parts of an image.
    ([3, 64, 7, 9], [67, 3, 3], [1, 1], [0, 0], [1, 1], 1),
    ([2, 82, 5, 6], [80, 3, 3], [1, 1], [2, 2], [1, 1], 1),
    ([2, 65, 13, 12], [100, 3, 3], [1, 1], [1, 2], [1, 1], 1),
    ([2, 300, 4, 4], [70, 3, 3], [1, 1], [1, 1], [1, 1], 1),
    ([1, 64, 40, 33], [64, 3, 3], [1, 1], [1, 0], [1, 1], 1),
];

/// Padding that differs from side to side, `[top, bottom, left, right]`, in place of the row's own. Some are small enough
/// for finite differences, the others have channels enough for the transforms.
const UNEVEN: &[(Row, [usize; 4])] = &[
    (([1, 2, 5, 4], [2, 3, 3], [1, 1], [0, 0], [1, 1], 1), [1, 0, 0, 2]),
    (([2, 1, 6, 5], [2, 3, 2], [2, 2], [0, 0], [1, 1], 1), [0, 1, 1, 0]),
    (([1, 2, 5, 6], [2, 2, 3], [1, 3], [0, 0], [2, 1], 2), [3, 1, 0, 1]),
    (([1, 1, 3, 3], [1, 2, 2], [1, 1], [0, 0], [1, 1], 1), [0, 4, 5, 0]),
    (([3, 20, 11, 9], [24, 3, 3], [1, 1], [0, 0], [1, 1], 1), [0, 2, 1, 0]),
    (([2, 66, 9, 12], [70, 3, 3], [1, 1], [0, 0], [1, 1], 1), [0, 1, 2, 0]),
    (([2, 64, 10, 7], [64, 3, 3], [1, 1], [0, 0], [1, 1], 1), [2, 0, 0, 2]),
    // Wider than the transforms take, on one side.
    (([1, 64, 8, 8], [64, 3, 3], [1, 1], [0, 0], [1, 1], 1), [1, 3, 1, 1]),
];

/// Every shape, and whether its gradients are small enough to check.
pub fn all() -> Vec<(Shape, bool)> {
    let padded = |row: &Row, padding: Padding| {
        let ([images, channels, height, width], [outputs, kh, kw], stride, _, dilation, groups) = *row;
        let window = Window { stride, padding, dilation, groups };
        let image = Type::f32([images, channels, height, width]);
        let weight = Type::f32([outputs, channels / groups, kh, kw]);
        Shape::forward(window, &image, &weight).expect("a case is valid")
    };
    let shape = |row: &Row| padded(row, row.3.into());
    let small = SMALL.iter().map(|row| (shape(row), true));
    let uneven = UNEVEN.iter().map(|(row, padding)| (padded(row, (*padding).into()), row.0[1] < 10));
    small.chain(LARGE.iter().map(|row| (shape(row), false))).chain(uneven).collect()
}

pub fn args(types: &[Type], differentiate: bool) -> Vec<Arg> {
    types.iter().map(|ty| Arg { differentiate, ..Arg::real(ty.shape.clone()) }).collect()
}
