//! Convolution and its two gradients as ops. The three are closed under differentiation.

use super::cases;
use super::gpu;
use super::shape::{Padding, Shape, Window};
use super::strips::{self, Held};
use super::{definition, passes, winograd};
use crate::cast::CastMethods;
use crate::matmul::one_float_type;
use crate::reduce::ReduceMethods;
use crate::sums::Values;
use kolo_graph::cuda::{ChannelsLast, ConvolutionPass, Cuda, CudaCalls, CudaCx, CudaPlace};
use kolo_graph::index::Index;
use kolo_graph::split::{Placement, Split};
use kolo_graph::{
    Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, ProductShape, Tensor, Type, Work, op,
};
use std::sync::Arc;

op! {
    /// Image `[n, c, h, w]`, weight `[o, c / groups, kh, kw]` and perhaps bias `[o]` to `[n, o, oh, ow]`.
    pub struct Conv2d = "conv2d" { stride: [usize; 2], padding: Padding, dilation: [usize; 2], groups: usize }
}

op! {
    /// Weight and gradient `[n, o, oh, ow]` to the gradient of the image, `height` × `width` large.
    pub struct Conv2dInputGrad = "conv2d_input_grad" {
        stride: [usize; 2], padding: Padding, dilation: [usize; 2], groups: usize, height: usize, width: usize
    }
}

op! {
    /// Image and gradient `[n, o, oh, ow]` to the gradient of the weight, whose kernel has this size.
    pub struct Conv2dWeightGrad = "conv2d_weight_grad" {
        stride: [usize; 2], padding: Padding, dilation: [usize; 2], groups: usize, kernel: [usize; 2]
    }
}

impl Conv2d {
    pub fn new(window: Window) -> Self {
        let Window { stride, padding, dilation, groups } = window;
        Self { stride, padding, dilation, groups }
    }

    fn window(&self) -> Window {
        Window { stride: self.stride, padding: self.padding, dilation: self.dilation, groups: self.groups }
    }

    fn shape(&self, inputs: &[Type]) -> Result<Shape, String> {
        let [x, weight, bias @ ..] = inputs else { return Err("takes an image, a weight and perhaps a bias".into()) };
        let shape = Shape::forward(self.window(), x, weight)?;
        check_bias(bias, self.groups * shape.outputs)?;
        Ok(shape)
    }
}

/// At most one bias, with a number for each channel.
pub fn check_bias(bias: &[Type], channels: usize) -> Result<(), String> {
    match bias {
        [] => Ok(()),
        [bias] if bias.shape == [channels] => Ok(()),
        [bias] => Err(format!("the bias must be [{channels}], one number for each channel, but is {bias}")),
        _ => Err(format!("takes two or three inputs, but got {}", bias.len() + 2)),
    }
}

/// The splits of the index expression, and by groups, each of which has channels of its own along `dims` of the inputs and
/// `output`. A part that is one group may be large enough for the transforms, which groups do without.
pub fn by_groups(
    index: Option<Index>,
    inputs: &[Type],
    shape: Result<Shape, String>,
    dims: &[usize],
    output: usize,
) -> Vec<Split> {
    let (Some(index), Ok(shape)) = (index, shape) else { return Vec::new() };
    let mut splits = index.splits(inputs);
    if shape.window.groups > 1 {
        let placements: Vec<Placement> = dims[..inputs.len()].iter().map(|dim| Placement::Shard(*dim)).collect();
        let groups = Split::new(GROUPS, shape.window.groups, placements, [Placement::Shard(output)]);
        let exact = shape.kernel != [3, 3] || shape.inputs.max(shape.outputs) < winograd::CHANNELS_MIN;
        splits.push(Split { exact, ..groups });
    }
    splits
}

/// The axis of [`by_groups`].
pub const GROUPS: &str = "groups";

/// The shape of inputs that `infer` has accepted.
fn accepted(shape: Result<Shape, String>) -> Shape {
    shape.expect("the graph was checked when it was built")
}

fn types<const COUNT: usize>(cx: &CpuCx<'_>, check: impl Fn([&Type; COUNT]) -> Result<Shape, String>) -> Shape {
    accepted(check(std::array::from_fn(|at| &cx.inputs[at].ty)))
}

impl Op for Conv2d {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("image"), Operand::float("weight"), Operand::float("bias").optional()], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let text = match (self.groups, inputs.len()) {
            (1, 2) => "n c h! w!, o c kh! kw! -> n o oh! ow!",
            (1, _) => "n c h! w!, o c kh! kw!, +o -> n o oh! ow!",
            (_, 2) => "n c! h! w!, o! i! kh! kw! -> n o! oh! ow!",
            _ => "n c! h! w!, o! i! kh! kw!, o! -> n o! oh! ow!",
        };
        Some(Index::parse(text))
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let mut splits = by_groups(self.index(inputs), inputs, self.shape(inputs), &[1, 0, 0], 1);
        if let Ok(shape) = self.shape(inputs) {
            let held = [Held::Reached, Held::Whole, Held::Whole];
            splits.extend(strips::of_grid(&shape, &held[..inputs.len()], Placement::Shard(2)));
        }
        splits
    }
    fn part_at(&self, split: &Split, first: usize, units: usize) -> Option<Arc<dyn Op>> {
        if split.axis == GROUPS {
            return Some(Arc::new(Self { groups: units, ..self.clone() }));
        }
        let padding = strips::grid_part(split, &(first..first + units), self.stride, self.padding)?;
        Some(Arc::new(Self { padding, ..self.clone() }))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        Ok(vec![Type::new(one_float_type(inputs)?, self.shape(inputs)?.grid_type().shape)])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        self.shape(inputs).map_or(0, |shape| shape.flops())
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let (x, weight, grad) = (cx.input(0), cx.input(1), cx.grad());
        let mut grads = vec![
            cx.needs(0).then(|| input_grad(self.window(), weight, grad, x)),
            cx.needs(1).then(|| weight_grad(self.window(), x, grad, weight)),
        ];
        if cx.inputs.len() > 2 {
            grads.push(cx.needs(2).then(|| grad.sum(&[0, 2, 3]).cast(x.dtype())));
        }
        grads
    }
    fn work(&self) -> Work {
        Work::Product
    }
    fn product_shape(&self, inputs: &[Type], outputs: &[Type]) -> ProductShape {
        accepted(self.shape(inputs)).product_shape(outputs[0].shape[1])
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        let types: Vec<Type> = inputs.iter().map(|input| Type::f32(input.shape.clone())).collect();
        vec![definition::forward(&accepted(self.shape(&types)), inputs[0], inputs[1], inputs.get(2).copied())]
    }
}

impl Cpu for Conv2d {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let shape = types(cx, |[x, weight]| Shape::forward(self.window(), x, weight));
        let bias = (cx.inputs.len() > 2).then(|| cx.f32(2));
        passes::forward(&shape, cx, cx.f32(0), cx.f32(1), bias, cx.out_f32(0));
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        passes::forward_scratch(&accepted(self.shape(inputs)), threads)
    }
}

/// The gradient of image `like`.
pub fn input_grad<'b>(window: Window, weight: Tensor<'b>, grad: Tensor<'b>, like: Tensor<'b>) -> Tensor<'b> {
    let Window { stride, padding, dilation, groups } = window;
    let (height, width) = (like.dim(2), like.dim(3));
    weight.then(Conv2dInputGrad { stride, padding, dilation, groups, height, width }, &[grad])
}

/// The gradient of weight `like`.
pub fn weight_grad<'b>(window: Window, x: Tensor<'b>, grad: Tensor<'b>, like: Tensor<'b>) -> Tensor<'b> {
    let Window { stride, padding, dilation, groups } = window;
    let kernel = [like.dim(2), like.dim(3)];
    x.then(Conv2dWeightGrad { stride, padding, dilation, groups, kernel }, &[grad]).cast(like.dtype())
}

impl Conv2dInputGrad {
    fn window(&self) -> Window {
        Window { stride: self.stride, padding: self.padding, dilation: self.dilation, groups: self.groups }
    }

    fn shape(&self, inputs: &[Type]) -> Result<Shape, String> {
        let [weight, grad] = inputs else { return Err("takes a weight and a gradient".into()) };
        Shape::input_grad(self.window(), weight, grad, [self.height, self.width])
    }
}

impl Op for Conv2dInputGrad {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("weight"), Operand::float("g")], &["dimage"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse(match self.groups {
            1 => "o c kh! kw!, n o oh! ow! -> n c h! w!",
            _ => "o! i! kh! kw!, n o! oh! ow! -> n c! h! w!",
        }))
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let mut splits = by_groups(self.index(inputs), inputs, self.shape(inputs), &[0, 1], 1);
        splits.extend(
            self.shape(inputs).into_iter().flat_map(|shape| strips::of_image(&shape, &[Held::Whole, Held::Reached])),
        );
        splits
    }
    fn part_at(&self, split: &Split, first: usize, units: usize) -> Option<Arc<dyn Op>> {
        if split.axis == GROUPS {
            return Some(Arc::new(Self { groups: units, ..self.clone() }));
        }
        let part = strips::image_part(split, &(first..first + units), self.stride, self.padding)?;
        let (height, width) = if part.dim == 0 { (units, self.width) } else { (self.height, units) };
        Some(Arc::new(Self { padding: part.padding, height, width, ..self.clone() }))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        Ok(vec![Type::new(one_float_type(inputs)?, self.shape(inputs)?.image_type().shape)])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        self.shape(inputs).map_or(0, |shape| shape.flops())
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let (weight, grad, image) = (cx.input(0), cx.input(1), cx.grad());
        vec![
            cx.needs(0).then(|| weight_grad(self.window(), image, grad, weight)),
            cx.needs(1).then(|| image.then(Conv2d::new(self.window()), &[weight])),
        ]
    }
    fn work(&self) -> Work {
        Work::Product
    }
    fn product_shape(&self, inputs: &[Type], outputs: &[Type]) -> ProductShape {
        accepted(self.shape(inputs)).product_shape(outputs[0].shape[1])
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        let types: Vec<Type> = inputs.iter().map(|input| Type::f32(input.shape.clone())).collect();
        vec![definition::input_grad(&accepted(self.shape(&types)), inputs[0], inputs[1], None)]
    }
}

impl Cpu for Conv2dInputGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let shape =
            types(cx, |[weight, grad]| Shape::input_grad(self.window(), weight, grad, [self.height, self.width]));
        passes::input_grad(&shape, cx, cx.f32(0), cx.f32(1), None, cx.out_f32(0));
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        passes::input_grad_scratch(&accepted(self.shape(inputs)), threads)
    }
}

impl Conv2dWeightGrad {
    fn window(&self) -> Window {
        Window { stride: self.stride, padding: self.padding, dilation: self.dilation, groups: self.groups }
    }

    fn shape(&self, inputs: &[Type]) -> Result<Shape, String> {
        let [x, grad] = inputs else { return Err("takes an image and a gradient".into()) };
        Shape::weight_grad(self.window(), x, grad, self.kernel)
    }
}

impl Op for Conv2dWeightGrad {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("image"), Operand::float("g")], &["dweight"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, _: &[Type]) -> Option<Index> {
        Some(Index::parse(match self.groups {
            // The channels decide whether the transforms are used, and how many images are summed at a time.
            1 => "n c~ h! w!, n o~ oh! ow! -> o c kh! kw!",
            _ => "n c! h! w!, n o! oh! ow! -> o! i! kh! kw!",
        }))
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let mut splits = by_groups(self.index(inputs), inputs, self.shape(inputs), &[1, 1], 0);
        let held = [Held::Reached, Held::Own];
        let sums = |shape: Shape| strips::of_grid(&shape, &held, Placement::Partial);
        splits.extend(self.shape(inputs).into_iter().flat_map(sums));
        splits
    }
    fn part_at(&self, split: &Split, first: usize, units: usize) -> Option<Arc<dyn Op>> {
        if split.axis == GROUPS {
            return Some(Arc::new(Self { groups: units, ..self.clone() }));
        }
        let padding = strips::grid_part(split, &(first..first + units), self.stride, self.padding)?;
        Some(Arc::new(Self { padding, ..self.clone() }))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        one_float_type(inputs)?;
        Ok(vec![self.shape(inputs)?.weight_type()])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        self.shape(inputs).map_or(0, |shape| shape.flops())
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let (x, grad, weight) = (cx.input(0), cx.input(1), cx.grad());
        vec![
            cx.needs(0).then(|| input_grad(self.window(), weight, grad, x)),
            cx.needs(1).then(|| x.then(Conv2d::new(self.window()), &[weight])),
        ]
    }
    fn work(&self) -> Work {
        Work::Product
    }
    fn product_shape(&self, inputs: &[Type], outputs: &[Type]) -> ProductShape {
        accepted(self.shape(inputs)).product_shape(outputs[0].shape[1..].iter().product())
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        let types: Vec<Type> = inputs.iter().map(|input| Type::f32(input.shape.clone())).collect();
        vec![definition::weight_grad(&accepted(self.shape(&types)), inputs[0], inputs[1])]
    }
}

impl Cpu for Conv2dWeightGrad {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let shape = types(cx, |[x, grad]| Shape::weight_grad(self.window(), x, grad, self.kernel));
        passes::weight_grad(&shape, cx, cx.f32(0), cx.f32(1), cx.out_f32(0));
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        passes::weight_grad_scratch(&accepted(self.shape(inputs)), threads)
    }
}

/// The operands of a pass on the GPU: these inputs, the bias if input `bias` is there, and the output.
pub(super) fn gpu_operands(cx: &CudaCx<'_>, factors: [usize; 2], bias: usize) -> gpu::Operands {
    let values = |at: usize| Values::new(CudaPlace::input(at), cx.inputs[at].dtype);
    gpu::Operands {
        factors: factors.map(CudaPlace::input),
        dtype: cx.inputs[0].dtype,
        bias: (cx.inputs.len() > bias).then(|| values(bias)),
        result: Values::new(CudaPlace::output(0), cx.outputs[0].dtype),
    }
}

impl Cuda for Conv2d {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        gpu::calls(ConvolutionPass::Forward, &accepted(self.shape(cx.inputs)), cx, &gpu_operands(cx, [0, 1], 2))
    }
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        gpu::channels_last(&accepted(self.shape(cx.inputs)), cx)
    }
}

impl Cuda for Conv2dInputGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        gpu::calls(ConvolutionPass::Image, &accepted(self.shape(cx.inputs)), cx, &gpu_operands(cx, [0, 1], 2))
    }
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        gpu::channels_last(&accepted(self.shape(cx.inputs)), cx)
    }
}

impl Cuda for Conv2dWeightGrad {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        gpu::calls(ConvolutionPass::Weight, &accepted(self.shape(cx.inputs)), cx, &gpu_operands(cx, [0, 1], 2))
    }
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        gpu::channels_last(&accepted(self.shape(cx.inputs)), cx)
    }
}

impl Cases for Conv2d {
    fn cases() -> Vec<Case> {
        cases::all()
            .iter()
            .flat_map(|(shape, differentiate)| {
                let types = [shape.image_type(), shape.weight_type(), Type::f32([shape.window.groups * shape.outputs])];
                let args = cases::args(&types, *differentiate);
                let op = || Conv2d::new(shape.window);
                [Case::new(op(), args[..2].to_vec()), Case::new(op(), args)]
            })
            .collect()
    }
}

impl Cases for Conv2dInputGrad {
    fn cases() -> Vec<Case> {
        cases::all()
            .iter()
            .map(|(shape, differentiate)| {
                let (Window { stride, padding, dilation, groups }, [height, width]) = (shape.window, shape.image);
                let op = Conv2dInputGrad { stride, padding, dilation, groups, height, width };
                Case::new(op, cases::args(&[shape.weight_type(), shape.grid_type()], *differentiate))
            })
            .collect()
    }
}

impl Cases for Conv2dWeightGrad {
    fn cases() -> Vec<Case> {
        cases::all()
            .iter()
            .map(|(shape, differentiate)| {
                let (Window { stride, padding, dilation, groups }, kernel) = (shape.window, shape.kernel);
                let op = Conv2dWeightGrad { stride, padding, dilation, groups, kernel };
                Case::new(op, cases::args(&[shape.image_type(), shape.grid_type()], *differentiate))
            })
            .collect()
    }
}
