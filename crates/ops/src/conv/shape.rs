//! Sizes of a convolution and of its two gradients: the same eleven numbers, whichever of the three tensors is the result.

use crate::pool::WINDOW_MAX;
use kolo_graph::attr::{Attr, AttrValue};
use kolo_graph::types::ELEMENTS_MAX;
use kolo_graph::{ProductShape, Type};

/// Zeros around an image, each pair (vertical, horizontal). In the text form `[y, x]` if both sides have as many, else
/// `[top, bottom, left, right]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Padding {
    pub before: [usize; 2],
    pub after: [usize; 2],
}

impl Padding {
    pub fn both(&self, dim: usize) -> usize {
        self.before[dim] + self.after[dim]
    }
}

/// As many on both sides.
impl From<[usize; 2]> for Padding {
    fn from(sides: [usize; 2]) -> Self {
        Self { before: sides, after: sides }
    }
}

/// Top, bottom, left, right.
impl From<[usize; 4]> for Padding {
    fn from([top, bottom, left, right]: [usize; 4]) -> Self {
        Self { before: [top, left], after: [bottom, right] }
    }
}

impl AttrValue for Padding {
    fn to_attr(&self) -> Attr {
        let ([top, left], [bottom, right]) = (self.before, self.after);
        if self.before == self.after { vec![top, left].to_attr() } else { vec![top, bottom, left, right].to_attr() }
    }
    fn from_attr(attr: &Attr) -> Option<Self> {
        match Vec::<usize>::from_attr(attr)?[..] {
            [y, x] => Some([y, x].into()),
            [top, bottom, left, right] => Some([top, bottom, left, right].into()),
            _ => None,
        }
    }
}

/// How the kernel moves over the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub stride: [usize; 2],
    pub padding: Padding,
    pub dilation: [usize; 2],
    pub groups: usize,
}

impl Window {
    fn check(&self) -> Result<(), String> {
        if self.stride.contains(&0) || self.dilation.contains(&0) || self.groups == 0 {
            return Err("stride, dilation and groups must be at least 1".into());
        }
        let Padding { before, after } = self.padding;
        let numbers = [self.stride, before, after, self.dilation, [self.groups; 2]];
        match numbers.iter().flatten().find(|number| **number > WINDOW_MAX) {
            Some(large) => Err(format!("stride, padding, dilation and groups are at most {WINDOW_MAX}, not {large}")),
            None => Ok(()),
        }
    }

    /// The same convolution without strides and dilations that lead nowhere: they must not ask for memory.
    fn within(mut self, image: [usize; 2], kernel: [usize; 2], grid: [usize; 2]) -> Self {
        for dim in 0..2 {
            if grid[dim] == 1 {
                self.stride[dim] = self.stride[dim].min(image[dim] + self.padding.both(dim) + 1);
            }
            if kernel[dim] == 1 {
                self.dilation[dim] = 1;
            }
        }
        self
    }

    /// Output pixels along `dim` of an image of this size.
    pub fn output(&self, dim: usize, image: usize, kernel: usize) -> Result<usize, String> {
        let span = self.dilation[dim].saturating_mul(kernel.saturating_sub(1)).saturating_add(1);
        let padded = image + self.padding.both(dim);
        match padded.checked_sub(span) {
            Some(slack) if kernel > 0 => Ok(slack / self.stride[dim] + 1),
            _ => Err(format!(
                "the kernel spans {span} along dim {}, but the padded image has {padded}; pad more",
                dim + 2
            )),
        }
    }
}

/// A convolution `[images, groups·inputs, image] ⋆ [groups·outputs, inputs, kernel] → [images, groups·outputs, grid]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub window: Window,
    pub images: usize,
    /// Input channels of one group.
    pub inputs: usize,
    /// Output channels of one group.
    pub outputs: usize,
    pub image: [usize; 2],
    pub kernel: [usize; 2],
    pub grid: [usize; 2],
}

fn four_dims(what: &str, ty: &Type) -> Result<[usize; 4], String> {
    if !ty.dtype.is_float() {
        return Err(format!("{what} must be floats, but is {ty}; cast it"));
    }
    <[usize; 4]>::try_from(&*ty.shape).map_err(|_| format!("{what} must have 4 dims, but is {ty}; reshape it"))
}

fn per_group(what: &str, channels: usize, groups: usize) -> Result<usize, String> {
    match channels.is_multiple_of(groups) {
        true => Ok(channels / groups),
        false => Err(format!("{channels} {what} channels do not fall into {groups} groups")),
    }
}

impl Shape {
    /// As a product with so many columns. Devices have Winograd's algorithm for 3 × 3 and 5 × 5 taps at stride 1.
    pub fn product_shape(&self, columns: usize) -> ProductShape {
        let square = self.window.stride == [1, 1] && [[3, 3], [5, 5]].contains(&self.kernel);
        ProductShape::Convolution { columns, channels: self.inputs, winograd: square.then_some(self.kernel[0]) }
    }

    /// From image `[n, c, h, w]` and weight `[o, c / groups, kh, kw]`.
    pub fn forward(window: Window, image: &Type, weight: &Type) -> Result<Self, String> {
        Self::sized(window, four_dims("the image", image)?, four_dims("the weight", weight)?)
    }

    /// From weight `[o, c / groups, kh, kw]`, gradient `[n, o, oh, ow]` and the image's size.
    pub fn input_grad(window: Window, weight: &Type, grad: &Type, image: [usize; 2]) -> Result<Self, String> {
        let [images, channels, ..] = four_dims("the gradient", grad)?;
        let weight = four_dims("the weight", weight)?;
        if channels != weight[0] {
            return Err(format!("the gradient has {channels} channels, but the weight makes {}", weight[0]));
        }
        window.check()?;
        let channels = weight[1].saturating_mul(window.groups);
        if image.iter().any(|size| *size > ELEMENTS_MAX) || channels > ELEMENTS_MAX {
            return Err(format!("an image of {channels} channels and {image:?} pixels is larger than any memory"));
        }
        let image = [images, channels, image[0], image[1]];
        Self::sized(window, image, weight)?.with_grid(grad)
    }

    /// From image `[n, c, h, w]`, gradient `[n, o, oh, ow]` and the kernel's size.
    pub fn weight_grad(window: Window, image: &Type, grad: &Type, kernel: [usize; 2]) -> Result<Self, String> {
        let image = four_dims("the image", image)?;
        let [grads, outputs, ..] = four_dims("the gradient", grad)?;
        if image[0] != grads {
            return Err(format!("{} images, but gradients of {grads}", image[0]));
        }
        window.check()?;
        let inputs = per_group("input", image[1], window.groups)?;
        Self::sized(window, image, [outputs, inputs, kernel[0], kernel[1]])?.with_grid(grad)
    }

    fn sized(window: Window, image: [usize; 4], weight: [usize; 4]) -> Result<Self, String> {
        window.check()?;
        let ([images, channels, height, width], [outputs, inputs, kh, kw]) = (image, weight);
        if per_group("input", channels, window.groups)? != inputs {
            return Err(format!(
                "the image has {channels} channels, but the weight reads {inputs} in each of {} groups",
                window.groups
            ));
        }
        let outputs = per_group("output", outputs, window.groups)?;
        if image.contains(&0) || inputs == 0 || outputs == 0 {
            return Err(format!("nothing may be empty, but the image is {image:?} and the weight {weight:?}"));
        }
        let grid = [window.output(0, height, kh)?, window.output(1, width, kw)?];
        let window = window.within([height, width], [kh, kw], grid);
        Ok(Self { window, images, inputs, outputs, image: [height, width], kernel: [kh, kw], grid })
    }

    /// From image `[n, c, h, w]` and weight `[c, o / groups, kh, kw]` of a transposed convolution: the convolution whose
    /// input gradient it is.
    pub fn transposed(window: Window, image: &Type, weight: &Type, extra: [usize; 2]) -> Result<Self, String> {
        window.check()?;
        let [_, _, height, width] = four_dims("the image", image)?;
        let [_, _, kh, kw] = four_dims("the weight", weight)?;
        let size = |dim: usize, image: usize, kernel: usize| {
            if extra[dim] >= window.stride[dim] {
                return Err(format!(
                    "output padding {} must be less than the stride {}",
                    extra[dim], window.stride[dim]
                ));
            }
            let steps = image.saturating_sub(1).saturating_mul(window.stride[dim]);
            let span = window.dilation[dim].saturating_mul(kernel.saturating_sub(1));
            let full = steps.saturating_add(span).saturating_add(1);
            full.saturating_add(extra[dim])
                .checked_sub(window.padding.both(dim))
                .filter(|size| *size > 0 && image > 0)
                .ok_or_else(|| format!("padding {} leaves nothing of {full} pixels", window.padding.both(dim)))
        };
        Self::input_grad(window, weight, image, [size(0, height, kh)?, size(1, width, kw)?])
    }

    fn with_grid(self, grad: &Type) -> Result<Self, String> {
        match grad.shape[2..] == self.grid {
            true => Ok(self),
            false => Err(format!("the gradient must be {:?} pixels large, but is {grad}", self.grid)),
        }
    }

    pub fn image_type(&self) -> Type {
        Type::f32([self.images, self.window.groups * self.inputs, self.image[0], self.image[1]])
    }

    pub fn weight_type(&self) -> Type {
        Type::f32([self.window.groups * self.outputs, self.inputs, self.kernel[0], self.kernel[1]])
    }

    pub fn grid_type(&self) -> Type {
        Type::f32([self.images, self.window.groups * self.outputs, self.grid[0], self.grid[1]])
    }

    /// Pixels of one image, taps of one kernel, pixels of one output.
    pub fn image_pixels(&self) -> usize {
        self.image[0] * self.image[1]
    }

    pub fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    pub fn grid_pixels(&self) -> usize {
        self.grid[0] * self.grid[1]
    }

    pub fn flops(&self) -> u64 {
        let sizes = [self.images, self.grid_pixels(), self.window.groups, self.outputs, self.inputs, self.taps()];
        sizes.iter().fold(2, |total: u64, size| total.saturating_mul(*size as u64))
    }
}
