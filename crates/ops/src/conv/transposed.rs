//! Transposed convolution: the input gradient of a convolution, used as a layer. Its own gradients are the convolution
//! and that convolution's weight gradient with image and gradient in swapped roles.

use super::conv2d::gpu_operands;
use super::conv2d::{Conv2d, GROUPS, by_groups, check_bias, weight_grad};
use super::gpu;
use super::shape::{Padding, Shape, Window};
use super::strips::{self, Held};
use super::{cases, definition, passes};
use crate::cast::CastMethods;
use crate::matmul::one_float_type;
use crate::reduce::ReduceMethods;
use kolo_graph::cuda::{ChannelsLast, ConvolutionPass, Cuda, CudaCalls, CudaCx};
use kolo_graph::index::Index;
use kolo_graph::split::Split;
use kolo_graph::{
    Case, Cases, Cpu, CpuCx, Dense, GradCx, Mixed, Op, Operand, Operands, ProductShape, Tensor, Type, Work, op,
};
use std::sync::Arc;

op! {
    /// Image `[n, c, h, w]`, weight `[c, o / groups, kh, kw]` and perhaps bias `[o]` to `[n, o, oh, ow]`.
    pub struct ConvTranspose2d = "conv_transpose2d" {
        stride: [usize; 2],
        padding: Padding,
        output_padding: [usize; 2],
        dilation: [usize; 2],
        groups: usize
    }
}

impl ConvTranspose2d {
    fn window(&self) -> Window {
        Window { stride: self.stride, padding: self.padding, dilation: self.dilation, groups: self.groups }
    }

    /// The convolution this is the input gradient of: its inputs are our outputs.
    fn shape(&self, x: &Type, weight: &Type) -> Result<Shape, String> {
        Shape::transposed(self.window(), x, weight, self.output_padding)
    }

    fn accepted(&self, x: &Type, weight: &Type) -> Shape {
        self.shape(x, weight).expect("the graph was checked when it was built")
    }
}

impl Op for ConvTranspose2d {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("image"), Operand::float("weight"), Operand::float("bias").optional()], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::Half
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let text = match (self.groups, inputs.len()) {
            (1, 2) => "n c h! w!, c o kh! kw! -> n o oh! ow!",
            (1, _) => "n c h! w!, c o kh! kw!, +o -> n o oh! ow!",
            (_, 2) => "n c! h! w!, c! i! kh! kw! -> n o! oh! ow!",
            _ => "n c! h! w!, c! i! kh! kw!, o! -> n o! oh! ow!",
        };
        Some(Index::parse(text))
    }
    fn splits(&self, inputs: &[Type], _: &[Type]) -> Vec<Split> {
        let shape = self.shape(&inputs[0], &inputs[1]);
        let mut splits = by_groups(self.index(inputs), inputs, shape.clone(), &[1, 0, 0], 1);
        let held = [Held::Reached, Held::Whole, Held::Whole];
        splits.extend(shape.into_iter().flat_map(|shape| strips::of_image(&shape, &held[..inputs.len()])));
        splits
    }
    fn part_at(&self, split: &Split, first: usize, units: usize) -> Option<Arc<dyn Op>> {
        if split.axis == GROUPS {
            return Some(Arc::new(Self { groups: units, ..self.clone() }));
        }
        let part = strips::image_part(split, &(first..first + units), self.stride, self.padding)?;
        let mut output_padding = self.output_padding;
        output_padding[part.dim] = part.beyond;
        Some(Arc::new(Self { padding: part.padding, output_padding, ..self.clone() }))
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [x, weight, bias @ ..] = inputs else { return Err("takes an image, a weight and perhaps a bias".into()) };
        let shape = self.shape(x, weight)?;
        check_bias(bias, self.groups * shape.inputs)?;
        Ok(vec![Type::new(one_float_type(inputs)?, shape.image_type().shape)])
    }
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        self.shape(&inputs[0], &inputs[1]).map_or(0, |shape| shape.flops())
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let (x, weight, grad) = (cx.input(0), cx.input(1), cx.grad());
        let mut grads = vec![
            cx.needs(0).then(|| grad.then(Conv2d::new(self.window()), &[weight])),
            cx.needs(1).then(|| weight_grad(self.window(), grad, x, weight)),
        ];
        if cx.inputs.len() > 2 {
            grads.push(cx.needs(2).then(|| grad.sum(&[0, 2, 3]).cast(x.dtype())));
        }
        grads
    }
    fn work(&self) -> Work {
        Work::Product
    }
    fn product_shape(&self, _: &[Type], outputs: &[Type]) -> ProductShape {
        ProductShape::Convolution {
            columns: outputs[0].shape[1],
            channels: outputs[0].shape[1] / self.groups,
            winograd: None,
        }
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        let ty = |at: usize| Type::f32(inputs[at].shape.clone());
        vec![definition::input_grad(&self.accepted(&ty(0), &ty(1)), inputs[1], inputs[0], inputs.get(2).copied())]
    }
}

impl Cpu for ConvTranspose2d {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let shape = self.accepted(&cx.inputs[0].ty, &cx.inputs[1].ty);
        let bias = (cx.inputs.len() > 2).then(|| cx.f32(2));
        passes::input_grad(&shape, cx, cx.f32(1), cx.f32(0), bias, cx.out_f32(0));
    }
    fn scratch_bytes(&self, inputs: &[Type], _: &[Type], threads: usize) -> usize {
        passes::input_grad_scratch(&self.accepted(&inputs[0], &inputs[1]), threads)
    }
}

impl Cuda for ConvTranspose2d {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let shape = self.accepted(&cx.inputs[0], &cx.inputs[1]);
        gpu::calls(ConvolutionPass::Image, &shape, cx, &gpu_operands(cx, [1, 0], 2))
    }
    fn channels_last(&self, cx: &CudaCx<'_>) -> Option<ChannelsLast> {
        gpu::channels_last(&self.accepted(&cx.inputs[0], &cx.inputs[1]), cx)
    }
}

impl Cases for ConvTranspose2d {
    fn cases() -> Vec<Case> {
        cases::all()
            .iter()
            .flat_map(|(shape, differentiate)| {
                let Window { stride, padding, dilation, groups } = shape.window;
                // What the forward convolution cut off at the far border.
                let output_padding = std::array::from_fn(|dim| {
                    let span = dilation[dim] * (shape.kernel[dim] - 1) + 1;
                    (shape.image[dim] + padding.both(dim) - span) % stride[dim]
                });
                let op = || ConvTranspose2d { stride, padding, output_padding, dilation, groups };
                let types = [shape.grid_type(), shape.weight_type(), Type::f32([groups * shape.inputs])];
                let args = cases::args(&types, *differentiate);
                [Case::new(op(), args[..2].to_vec()), Case::new(op(), args)]
            })
            .collect()
    }
}
