//! What the three computations are, in f64. Padding counts as real zeros: zero times infinity is NaN there too.

use super::shape::Shape;
use kolo_graph::Dense;

/// The image at a place that may lie in the padding.
fn pixel(image: &Dense, at: [usize; 2], y: isize, x: isize) -> f64 {
    let (height, width) = (image.shape[2] as isize, image.shape[3] as isize);
    match (0..height).contains(&y) && (0..width).contains(&x) {
        true => image.get(&[at[0], at[1], y as usize, x as usize]),
        false => 0.0,
    }
}

/// Where tap `tap` of output `at` reads along `dim`.
fn source(shape: &Shape, dim: usize, at: usize, tap: usize) -> isize {
    let window = &shape.window;
    (at * window.stride[dim] + tap * window.dilation[dim]) as isize - window.padding.before[dim] as isize
}

pub fn forward(shape: &Shape, x: &Dense, weight: &Dense, bias: Option<&Dense>) -> Dense {
    Dense::from_fn(shape.grid_type().shape, |at| {
        let group = at[1] / shape.outputs;
        let mut sum = bias.map_or(0.0, |bias| bias.data[at[1]]);
        for c in 0..shape.inputs {
            for ky in 0..shape.kernel[0] {
                for kx in 0..shape.kernel[1] {
                    let (y, x_at) = (source(shape, 0, at[2], ky), source(shape, 1, at[3], kx));
                    sum += pixel(x, [at[0], group * shape.inputs + c], y, x_at) * weight.get(&[at[1], c, ky, kx]);
                }
            }
        }
        sum
    })
}

/// The output pixel that reads image pixel `at` through tap `tap`, if the stride meets it; it may lie outside the grid.
fn target(shape: &Shape, dim: usize, at: usize, tap: usize) -> Option<isize> {
    let window = &shape.window;
    let from = (at + window.padding.before[dim]) as isize - (tap * window.dilation[dim]) as isize;
    (from.rem_euclid(window.stride[dim] as isize) == 0).then(|| from.div_euclid(window.stride[dim] as isize))
}

pub fn input_grad(shape: &Shape, weight: &Dense, grad: &Dense, bias: Option<&Dense>) -> Dense {
    Dense::from_fn(shape.image_type().shape, |at| {
        let (group, c) = (at[1] / shape.inputs, at[1] % shape.inputs);
        let mut sum = bias.map_or(0.0, |bias| bias.data[at[1]]);
        for o in group * shape.outputs..(group + 1) * shape.outputs {
            for ky in 0..shape.kernel[0] {
                for kx in 0..shape.kernel[1] {
                    let (y, x) = (target(shape, 0, at[2], ky), target(shape, 1, at[3], kx));
                    if let (Some(y), Some(x)) = (y, x) {
                        sum += pixel(grad, [at[0], o], y, x) * weight.get(&[o, c, ky, kx]);
                    }
                }
            }
        }
        sum
    })
}

pub fn weight_grad(shape: &Shape, x: &Dense, grad: &Dense) -> Dense {
    Dense::from_fn(shape.weight_type().shape, |at| {
        let channel = at[0] / shape.outputs * shape.inputs + at[1];
        let mut sum = 0.0;
        for image in 0..shape.images {
            for y in 0..shape.grid[0] {
                for x_at in 0..shape.grid[1] {
                    let from = (source(shape, 0, y, at[2]), source(shape, 1, x_at, at[3]));
                    sum += grad.get(&[image, at[0], y, x_at]) * pixel(x, [image, channel], from.0, from.1);
                }
            }
        }
        sum
    })
}
