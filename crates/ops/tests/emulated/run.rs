//! The memory of one trial, and its calls on it.

use super::{
    Convolution, ConvolutionPass, CudaArg, CudaBuffer, CudaCall, CudaCalls, CudaMatrix, CudaPlace, Dense, Library,
    Product, Trial, Type,
};
use kolo_graph::cpu::Buffer;
use std::ffi::c_void;

/// Operands and scratch, each with a guard after it.
pub struct Memory {
    inputs: Vec<Block>,
    outputs: Vec<Block>,
    outputs_types: Vec<Type>,
    scratch: Block,
}

/// Bytes on a boundary of 256, and as many more that nobody may touch.
struct Block {
    words: Vec<u64>,
    start: usize,
    bytes: usize,
}

const GUARD: usize = 256;
const POISON: u64 = u64::MAX;

impl Block {
    fn new(bytes: usize) -> Self {
        let mut words = vec![POISON; (bytes + 3 * GUARD) / 8];
        let start = (words.as_mut_ptr() as usize).next_multiple_of(GUARD) - words.as_ptr() as usize;
        Self { words, start, bytes }
    }

    fn address(&mut self) -> *mut u8 {
        self.words.as_mut_ptr().cast::<u8>().wrapping_add(self.start)
    }

    fn assert_guard(&mut self, what: &str) {
        let end = self.address().wrapping_add(self.bytes);
        // SAFETY: a guard lies behind the bytes.
        let guard = unsafe { std::slice::from_raw_parts(end, GUARD) };
        assert!(guard.iter().all(|byte| *byte == 0xff), "something was written behind {what}");
    }
}

impl Memory {
    pub fn of(trial: &Trial, inputs: &[Dense]) -> Self {
        let filled = |(ty, input): (&Type, &Dense)| {
            let mut block = Block::new(ty.bytes());
            let buffer = Buffer { data: block.address(), ty: ty.clone() };
            input.data.iter().enumerate().for_each(|(at, value)| kolo_ops::cast::write(&buffer, at, *value));
            block
        };
        Self {
            inputs: trial.inputs.iter().zip(inputs).map(filled).collect(),
            outputs: trial.outputs.iter().map(|ty| Block::new(ty.bytes())).collect(),
            outputs_types: trial.outputs.clone(),
            scratch: Block::new(trial.calls.scratch_bytes),
        }
    }

    fn address(&mut self, place: CudaPlace) -> *mut u8 {
        let block = match place.buffer {
            CudaBuffer::Input(at) => &mut self.inputs[at],
            CudaBuffer::Output(at) => &mut self.outputs[at],
            CudaBuffer::Scratch => &mut self.scratch,
        };
        assert!(place.offset <= block.bytes, "{place:?} is beyond its buffer");
        block.address().wrapping_add(place.offset)
    }

    /// The elements of all outputs after the calls.
    pub fn run(mut self, calls: &CudaCalls, library: &Library) -> Vec<Vec<f64>> {
        for call in &calls.calls {
            match call {
                CudaCall::Launch(launch) => {
                    let mut words: Vec<u64> = launch.args.iter().map(|arg| self.word(*arg)).collect();
                    let args = words.iter_mut().map(|word| (word as *mut u64).cast::<c_void>()).collect();
                    library.launch(launch, args);
                }
                CudaCall::Product(product) => self.product(product),
                CudaCall::Convolution(convolution) => self.convolution(convolution),
                CudaCall::Zero { to, bytes } => {
                    let to = self.address(*to);
                    // SAFETY: the executor would check the range; a wrong one hits a guard here.
                    unsafe { std::ptr::write_bytes(to, 0, *bytes) };
                }
                CudaCall::Copy { from, to, bytes } => {
                    let (from, to) = (self.address(*from), self.address(*to));
                    // SAFETY: as above.
                    unsafe { std::ptr::copy(from, to, *bytes) };
                }
            }
        }
        self.scratch.assert_guard("the scratch");
        let types = self.outputs_types.clone();
        let read = |(block, ty): (&mut Block, &Type)| {
            block.assert_guard("an output");
            let buffer = Buffer { data: block.address(), ty: ty.clone() };
            (0..ty.elements()).map(|at| kolo_ops::cast::read(&buffer, at)).collect()
        };
        self.outputs.iter_mut().zip(&types).map(read).collect()
    }

    /// An argument's bytes, the lowest first.
    fn word(&mut self, arg: CudaArg) -> u64 {
        match arg {
            CudaArg::Address(place) => self.address(place) as u64,
            CudaArg::I32(value) => u64::from(value as u32),
            CudaArg::I64(value) => value as u64,
            CudaArg::U64(value) => value,
            CudaArg::F32(value) => u64::from(value.to_bits()),
        }
    }

    /// Every product of a pixel and a tap goes to the tensor that is computed.
    fn convolution(&mut self, convolution: &Convolution) {
        let Convolution { kind, image, weight, grid, .. } = *convolution;
        let (shape, part) = (kind.shape, kind.shape.inputs / kind.shape.groups);
        let sizes = [
            [shape.images, shape.inputs, shape.image[0], shape.image[1]],
            [shape.outputs, part, shape.kernel[0], shape.kernel[1]],
            [shape.images, shape.outputs, shape.grid[0], shape.grid[1]],
        ];
        let places = [image, weight, grid];
        let buffers =
            [0, 1, 2].map(|at| Buffer { data: self.address(places[at]), ty: Type::new(kind.dtype, sizes[at]) });
        let index = |which: usize, [n, c, y, x]: [usize; 4]| {
            let [_, channels, height, width] = sizes[which];
            match kind.channels_last {
                true => ((n * height + y) * width + x) * channels + c,
                false => ((n * channels + c) * height + y) * width + x,
            }
        };
        let (result, factors) = match kind.pass {
            ConvolutionPass::Forward => (2, [0, 1]),
            ConvolutionPass::Image => (0, [1, 2]),
            ConvolutionPass::Weight => (1, [0, 2]),
        };
        let mut sums = vec![0.0; buffers[result].ty.elements()];
        for [n, o, row, column] in places_of(sizes[2]) {
            for [_, c, ky, kx] in places_of([1, part, shape.kernel[0], shape.kernel[1]]) {
                let y = row * shape.stride[0] + ky * shape.dilation[0];
                let x = column * shape.stride[1] + kx * shape.dilation[1];
                let (Some(y), Some(x)) = (y.checked_sub(shape.padding[0]), x.checked_sub(shape.padding[1])) else {
                    continue;
                };
                if y >= shape.image[0] || x >= shape.image[1] {
                    continue;
                }
                let group = o / (shape.outputs / shape.groups);
                let all = [[n, group * part + c, y, x], [o, c, ky, kx], [n, o, row, column]];
                let value = |which: usize| kolo_ops::cast::read(&buffers[which], index(which, all[which]));
                sums[index(result, all[result])] += value(factors[0]) * value(factors[1]);
            }
        }
        sums.iter().enumerate().for_each(|(at, sum)| kolo_ops::cast::write(&buffers[result], at, *sum));
    }

    /// The elements of a matrix of a batch: a buffer, and where (row, column) lies in it.
    fn view(
        &mut self,
        matrix: &CudaMatrix,
        batch: usize,
        [rows, columns]: [usize; 2],
    ) -> (Buffer, impl Fn(usize, usize) -> usize + use<>) {
        let (stride, transposed, start) = (matrix.row_stride, matrix.transposed, batch * matrix.batch_stride);
        let lines = if transposed { columns } else { rows };
        let ty = Type::new(matrix.dtype, [start + lines * stride + rows.max(columns)]);
        let buffer = Buffer { data: self.address(matrix.place), ty };
        (buffer, move |row, column| start + if transposed { column * stride + row } else { row * stride + column })
    }

    fn product(&mut self, product: &Product) {
        let Product { rows, columns, depth, .. } = *product;
        for batch in 0..product.batch {
            let (a, a_at) = self.view(&product.a, batch, [rows, depth]);
            let (b, b_at) = self.view(&product.b, batch, [depth, columns]);
            let (c, c_at) = self.view(&product.c, batch, [rows, columns]);
            let bias = product
                .bias
                .map(|place| Buffer { data: self.address(place), ty: Type::new(product.c.dtype, [columns]) });
            for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                let term =
                    |k: usize| kolo_ops::cast::read(&a, a_at(row, k)) * kolo_ops::cast::read(&b, b_at(k, column));
                let sum: f64 = (0..depth).map(term).sum();
                let before = match product.beta == 0.0 {
                    true => 0.0,
                    false => f64::from(product.beta) * kolo_ops::cast::read(&c, c_at(row, column)),
                };
                let bias = bias.as_ref().map_or(0.0, |bias| kolo_ops::cast::read(bias, column));
                kolo_ops::cast::write(&c, c_at(row, column), f64::from(product.alpha) * sum + before + bias);
            }
        }
    }
}

fn places_of([a, b, c, d]: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    (0..a * b * c * d).map(move |at| [at / (b * c * d), at / (c * d) % b, at / d % c, at % d])
}
