//! Largest values along a dim, and where they are. NaN counts as the largest of all, so that it cannot hide; among equals
//! the lower index wins. A gradient goes to the element that won.

use crate::by_id;
use crate::device;
use crate::elementwise::ElementwiseMethods;
use crate::reduce::ReduceMethods;
use crate::scatter::ScatterAddGrad;
use crate::simd;
use crate::softmax::rows_per_task;
use crate::tiles::Address;
use crate::vectorized;
use kolo_graph::cuda::{Cuda, CudaArg, CudaCalls, CudaCx, CudaSource, Launch};
use kolo_graph::index::Index;
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, DType, Dense, GradCx, Mixed, Op, Operand, Operands, Tensor, Type, op};

op! {
    /// The largest value along `dim`, which becomes size one (`keep`) or vanishes, and its i32 index. Of equal values the
    /// first counts, and all of the gradient goes to it; PyTorch's `amax` shares it out.
    pub struct Max = "max" { dim: usize, keep: bool }
}

op! {
    /// The i32 index of the largest value along `dim`, which vanishes.
    pub struct Argmax = "argmax" { dim: usize }
}

op! {
    /// The `k` largest values of the last dim in falling order, and their i32 indices.
    pub struct TopK = "top_k" { k: usize }
}

op! {
    /// Adds each value into a tensor of zeros that is `size` long along `dim`, at the i32 index given for it; values with
    /// an index outside are dropped. Backward of `max` and `top_k`.
    pub struct Place = "place" { dim: usize, size: usize }
}

/// A shape around one dim: `outer × size × inner`.
#[derive(Clone, Copy)]
struct Around {
    outer: usize,
    size: usize,
    inner: usize,
}

fn around(shape: &[usize], dim: usize) -> Around {
    Around { outer: shape[..dim].iter().product(), size: shape[dim], inner: shape[dim + 1..].iter().product() }
}

/// Whether `a` comes before `b` in falling order.
#[inline(always)]
#[allow(clippy::eq_op)]
fn beats<T: Copy + PartialOrd>(a: T, b: T) -> bool {
    a > b || (a != a && b == b)
}

fn check(input: &Type, dim: usize) -> Result<(), String> {
    if dim >= input.rank() {
        return Err(format!("there is no dim {dim} in {input}"));
    }
    if !input.dtype.is_float() {
        return Err(format!("compares floats, not {}; cast it", input.dtype.name()));
    }
    if input.shape[dim] == 0 {
        return Err(format!("dim {dim} of {input} is empty: nothing in it is largest"));
    }
    Ok(())
}

fn reduced(input: &Type, dim: usize, keep: bool) -> Vec<usize> {
    let mut shape = input.shape.to_vec();
    if keep {
        shape[dim] = 1;
    } else {
        shape.remove(dim);
    }
    shape
}

/// `dim` stays whole; the outputs walk the other dims.
fn index(input: &Type, dim: usize, keep: bool, outputs: usize) -> Option<Index> {
    let axes: Vec<String> = (0..input.rank()).map(|dim| format!("d{dim}")).collect();
    let whole = vec![axes.get(dim)?.clone()];
    let mut kept = axes.clone();
    kept[dim] = "_".into();
    kept.retain(|axis| keep || axis != "_");
    Some(Index { inputs: vec![axes], outputs: vec![kept; outputs], whole, ..Index::default() })
}

/// Indices of the largest values along `dim`.
fn define(input: &Dense, dim: usize) -> Vec<usize> {
    let Around { outer, size, inner } = around(&input.shape, dim);
    let column = |at: usize| {
        let value = |row: usize| input.data[(at / inner * size + row) * inner + at % inner];
        (1..size).fold(0, |best, row| if beats(value(row), value(best)) { row } else { best })
    };
    (0..outer * inner).map(column).collect()
}

impl Op for Max {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x")], &["values"]).saved(&["indices"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        index(inputs.first()?, self.dim, self.keep, 2)
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        check(input, self.dim)?;
        let shape = reduced(input, self.dim, self.keep);
        Ok(vec![Type::new(input.dtype, shape.clone()), Type::i32(shape)])
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let kept = reduced(&cx.input(0).ty(), self.dim, true);
        let (at, g) = (cx.output(1).reshape_to(kept.clone()), cx.grad().reshape_to(kept));
        vec![Some(at.then(Place { dim: self.dim, size: cx.input(0).dim(self.dim) }, &[g]))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let Around { size, inner, .. } = around(&inputs[0].shape, self.dim);
        let best = define(inputs[0], self.dim);
        let value = |(at, row): (usize, &usize)| inputs[0].data[(at / inner * size + row) * inner + at % inner];
        let values = best.iter().enumerate().map(value).collect();
        let places = best.iter().map(|row| *row as f64).collect();
        vec![Dense::new(outputs[0].shape.clone(), values), Dense::new(outputs[1].shape.clone(), places)]
    }
}

impl Cpu for Max {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let values = Address(cx.outputs[0].data.cast());
        let places = Address(cx.outputs[1].data.cast());
        for_each_strip(cx, self.dim, |start, best, at| {
            // SAFETY: strips are disjoint, and an i32 has the size of an f32.
            unsafe {
                values.slice(start, best.len()).copy_from_slice(best);
                places_at(&places, start, at.len()).copy_from_slice(at);
            }
        });
    }
}

impl Op for Argmax {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x").constant()], &["indices"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        index(inputs.first()?, self.dim, false, 1)
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        check(input, self.dim)?;
        Ok(vec![Type::i32(reduced(input, self.dim, false))])
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let places = define(inputs[0], self.dim).into_iter().map(|row| row as f64).collect();
        vec![Dense::new(outputs[0].shape.clone(), places)]
    }
}

impl Cpu for Argmax {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let places = Address(cx.outputs[0].data.cast());
        // SAFETY: strips are disjoint.
        for_each_strip(cx, self.dim, |start, _, at| unsafe {
            places_at(&places, start, at.len()).copy_from_slice(at);
        });
    }
}

/// A part of an i32 buffer.
///
/// # Safety
/// As for [`Address::slice`].
unsafe fn places_at<'a>(address: &Address, start: usize, len: usize) -> &'a mut [i32] {
    // SAFETY: by the contract above.
    unsafe { std::slice::from_raw_parts_mut(address.get().cast::<i32>().add(start), len) }
}

/// Results per strip: what one task keeps on its stack.
const STRIP: usize = 256;

/// Runs `store(start, largest values, their indices)` for every strip of the outputs.
fn for_each_strip(cx: &CpuCx<'_>, dim: usize, store: impl Fn(usize, &[f32], &[i32]) + Sync) {
    let (x, Around { outer, size, inner }) = (cx.f32(0), around(cx.shape(0), dim));
    if inner == 1 {
        return cx.team.chunks(outer, rows_per_task(size), |range, _| {
            for row in range {
                let row_at = find_largest(&x[row * size..(row + 1) * size]);
                store(row, &[x[row * size + row_at]], &[row_at as i32]);
            }
        });
    }
    let strips = inner.div_ceil(STRIP);
    let task = |at: usize| {
        let (block, first) = (at / strips, at % strips * STRIP);
        let width = STRIP.min(inner - first);
        let (mut best, mut places) = ([0.0; STRIP], [0; STRIP]);
        let columns = &x[block * size * inner + first..(block + 1) * size * inner];
        largest_columns(columns, size, inner, &mut best[..width], &mut places[..width]);
        store(block * inner + first, &best[..width], &places[..width]);
    };
    let per_task = rows_per_task(size * inner.min(STRIP));
    cx.team.chunks(outer * strips, per_task, |range, _| range.for_each(task));
}

/// The first of the largest.
fn find_largest(row: &[f32]) -> usize {
    let largest = simd::max(row);
    let found = match largest.is_nan() {
        true => row.iter().position(|x| x.is_nan()),
        false => row.iter().position(|x| *x == largest),
    };
    found.unwrap_or(0)
}

vectorized! {
    /// Largest of each column of `rows` rows that begin `stride` apart.
    fn largest_columns(x: &[f32], rows: usize, stride: usize, best: &mut [f32], places: &mut [i32]) {
        let width = best.len();
        let places = &mut places[..width];
        best.copy_from_slice(&x[..width]);
        places.fill(0);
        for row in 1..rows {
            let values = &x[row * stride..row * stride + width];
            for at in 0..width {
                let better = beats(values[at], best[at]);
                best[at] = if better { values[at] } else { best[at] };
                places[at] = if better { row as i32 } else { places[at] };
            }
        }
    }
}

impl Op for TopK {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x")], &["values"]).saved(&["indices"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let mut axes: Vec<String> = (0..inputs.first()?.rank()).map(|dim| format!("d{dim}")).collect();
        let input = axes.clone();
        let whole = vec![axes.pop()?, "k".to_string()];
        axes.push("k".into());
        Some(Index { inputs: vec![input], outputs: vec![axes; 2], whole, ..Index::default() })
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [input] = inputs else { return Err("takes one input".into()) };
        let last = input.rank().checked_sub(1).ok_or("works along the last dim, but a scalar has none")?;
        check(input, last)?;
        if self.k == 0 || self.k > input.last() {
            return Err(format!("k must be in 1..={}, the last dim of {input}, but is {}", input.last(), self.k));
        }
        let mut shape = input.shape.clone();
        shape[last] = self.k;
        Ok(vec![Type::new(input.dtype, shape.clone()), Type::i32(shape)])
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let dim = cx.input(0).rank() - 1;
        vec![Some(cx.output(1).then(Place { dim, size: cx.input(0).dim(dim) }, &[cx.grad()]))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let (mut values, mut places) = (Vec::new(), Vec::new());
        for row in inputs[0].data.chunks(inputs[0].shape[inputs[0].shape.len() - 1]) {
            let mut order: Vec<usize> = (0..row.len()).collect();
            // The sort is stable: equal values stay in the order of their indices.
            order.sort_by_key(|at| std::cmp::Reverse(Falling(row[*at])));
            values.extend(order[..self.k].iter().map(|at| row[*at]));
            places.extend(order[..self.k].iter().map(|at| *at as f64));
        }
        vec![Dense::new(outputs[0].shape.clone(), values), Dense::new(outputs[1].shape.clone(), places)]
    }
}

impl Cpu for TopK {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (x, size, k) = (cx.f32(0), cx.inputs[0].ty.last(), self.k);
        let values = Address(cx.outputs[0].data.cast());
        let places = Address(cx.outputs[1].data.cast());
        cx.team.chunks(x.len() / size, rows_per_task(size), |range, _| {
            for row in range {
                // SAFETY: tasks own disjoint rows.
                let (values, places) = unsafe { (values.slice(row * k, k), places_at(&places, row * k, k)) };
                keep_largest(&x[row * size..(row + 1) * size], values, places);
            }
        });
    }
}

/// The order of `beats`, for sorting.
#[derive(PartialEq)]
struct Falling(f64);

impl Eq for Falling {}

impl PartialOrd for Falling {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Falling {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        beats(self.0, other.0).cmp(&beats(other.0, self.0))
    }
}

/// Keeps the largest values seen so far in falling order. Few elements of a long row ever enter the list.
fn keep_largest(row: &[f32], values: &mut [f32], places: &mut [i32]) {
    let k = values.len();
    let mut held = 0;
    for (at, value) in row.iter().enumerate() {
        if held == k && !beats(*value, values[k - 1]) {
            continue;
        }
        let slot = values[..held].partition_point(|known| !beats(*value, *known));
        held = (held + 1).min(k);
        values.copy_within(slot..held - 1, slot + 1);
        places.copy_within(slot..held - 1, slot + 1);
        values[slot] = *value;
        places[slot] = at as i32;
    }
}

impl Op for Place {
    fn operands(&self) -> Operands {
        Operands::new([Operand::i32("indices"), Operand::float("values")], &["y"])
    }
    fn mixed(&self) -> Mixed {
        Mixed::AsGiven
    }
    fn index(&self, inputs: &[Type]) -> Option<Index> {
        let mut axes: Vec<String> = (0..inputs.first()?.rank()).map(|dim| format!("d{dim}")).collect();
        let input = axes.clone();
        let whole = vec![axes.get(self.dim)?.clone(), "size".to_string()];
        axes[self.dim] = "size".into();
        Some(Index { inputs: vec![input.clone(), input], outputs: vec![axes], whole, ..Index::default() })
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        let [places, values] = inputs else { return Err("takes two inputs, indices and values".into()) };
        if places.dtype != DType::I32 || !values.dtype.is_float() || places.shape != values.shape {
            return Err(format!("expects i32 indices and floats of one shape, but got {places} and {values}"));
        }
        if self.dim >= values.rank() {
            return Err(format!("there is no dim {} in {values}", self.dim));
        }
        let mut shape = values.shape.clone();
        shape[self.dim] = self.size;
        Ok(vec![Type::new(values.dtype, shape)])
    }
    /// What stands where each value was added; zero for one that was dropped.
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        vec![None, Some(cx.input(0).then(ScatterAddGrad { dim: self.dim }, &[cx.grad()]))]
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let mut out = Dense::zeros(outputs[0].shape.clone());
        let from = around(&inputs[1].shape, self.dim);
        for (at, (place, value)) in inputs[0].data.iter().zip(&inputs[1].data).enumerate() {
            if (0.0..self.size as f64).contains(place) {
                let (block, column) = (at / (from.size * from.inner), at % from.inner);
                out.data[(block * self.size + *place as usize) * from.inner + column] += value;
            }
        }
        vec![out]
    }
}

impl Cpu for Place {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (places, values, size) = (cx.i32(0), cx.f32(1), self.size);
        let from = around(cx.shape(1), self.dim);
        let (given, made) = (from.size * from.inner, size * from.inner);
        let address = Address(cx.outputs[0].data.cast());
        cx.team.chunks(from.outer, rows_per_task(given + made), |range, _| {
            for block in range {
                // SAFETY: tasks own disjoint blocks.
                let out = unsafe { address.slice(block * made, made) };
                out.fill(0.0);
                for at in 0..given {
                    let from_at = block * given + at;
                    if let Some(row) = usize::try_from(places[from_at]).ok().filter(|row| *row < size) {
                        out[row * from.inner + at % from.inner] += values[from_at];
                    }
                }
            }
        });
    }
}

const SOURCE: &str = concat!(include_str!("rows.cuh"), include_str!("extremes.cu"));

/// The source, with so many threads to a row that read so many elements at a time.
fn source(cx: &CudaCx<'_>, threads: usize, pack: usize) -> CudaSource {
    device::typed(SOURCE, cx).define("GROUP", threads).define("PACK", pack)
}

/// `function` on the first input around `dim`; it writes the outputs after the input.
fn largest_calls(cx: &CudaCx<'_>, function: &'static str, dim: usize) -> CudaCalls {
    let Around { outer, size, inner } = around(&cx.inputs[0].shape, dim);
    let operands = [device::input(0)].into_iter().chain((0..cx.outputs.len()).map(device::output));
    let args: Vec<CudaArg> = operands.chain([outer * inner, size, inner].map(device::long)).collect();
    if inner > 1 {
        let grid = device::grid(outer * inner, device::THREADS);
        let name = format!("{function}_of_columns");
        return Launch::new(source(cx, device::WARP, 1), name, grid, device::THREADS, args).into();
    }
    let (threads, pack) = (device::row_threads(size), device::pack(size, cx.inputs[0].dtype));
    let (grid, block) = device::row_grid(outer, threads);
    Launch::new(source(cx, threads, pack), format!("{function}_of_rows"), grid, block, args).into()
}

impl Cuda for Max {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        largest_calls(cx, "max", self.dim)
    }
}

impl Cuda for Argmax {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        largest_calls(cx, "argmax", self.dim)
    }
}

impl Cuda for TopK {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let size = cx.inputs[0].last();
        let rows = cx.inputs[0].elements() / size;
        let operands = [device::input(0), device::output(0), device::output(1)];
        let args = [&operands[..], &[rows, size, self.k].map(device::long)].concat();
        let (grid, block) = device::row_grid(rows, device::WARP);
        Launch::new(source(cx, device::WARP, 1), "top_k", grid, block, args).into()
    }
}

impl Cuda for Place {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        by_id::column_sums(cx, (None, 0, 1), self.dim)
    }
}

impl Cases for Max {
    fn cases() -> Vec<Case> {
        let case = |shape: &[usize], dim, keep| Case::new(Max { dim, keep }, [Arg::spread(shape)]);
        vec![
            case(&[7], 0, false),
            case(&[3, 37], 1, false),
            case(&[37, 3], 0, true),
            case(&[2, 3, 4], 1, false),
            case(&[2, 1, 5], 1, true),
            case(&[2, 3, 1], 2, true),
            // Many equal values: the first must win.
            Case::new(Max { dim: 1, keep: false }, [Arg::real([5, 40]).within(1.0, 1.000_000_5).constant()]),
            Case::new(Max { dim: 0, keep: false }, [Arg::real([40, 5]).within(1.0, 1.000_000_5).constant()]),
            Case::new(Max { dim: 1, keep: false }, [Arg::real([21, 1027]).constant()]),
            Case::new(Max { dim: 1, keep: true }, [Arg::real([3, 21, 519]).constant()]),
        ]
    }
}

impl Cases for Argmax {
    fn cases() -> Vec<Case> {
        let case = |shape: &[usize], dim| Case::new(Argmax { dim }, [Arg::spread(shape).constant()]);
        vec![
            case(&[7], 0),
            case(&[3, 37], 1),
            case(&[37, 3], 0),
            case(&[2, 3, 4], 1),
            case(&[4, 1], 1),
            case(&[3, 21, 519], 1),
            case(&[21, 1027], 1),
            Case::new(Argmax { dim: 1 }, [Arg::real([5, 40]).within(1.0, 1.000_000_5).constant()]),
            Case::new(Argmax { dim: 1 }, [Arg::real([3, 2048]).within(1.0, 1.000_05).constant()]),
        ]
    }
}

impl Cases for TopK {
    fn cases() -> Vec<Case> {
        let case = |shape: &[usize], k| Case::new(TopK { k }, [Arg::spread(shape)]);
        vec![
            case(&[7], 1),
            case(&[3, 9], 9),
            case(&[2, 3, 17], 4),
            case(&[3, 1], 1),
            Case::new(TopK { k: 6 }, [Arg::real([5, 40]).within(1.0, 1.000_000_5).constant()]),
            Case::new(TopK { k: 50 }, [Arg::real([21, 1027]).constant()]),
        ]
    }
}

impl Cases for Place {
    fn cases() -> Vec<Case> {
        let case = |shape: &[usize], dim, size: usize| {
            let places = Arg::index(shape, -1, size as i64 + 1);
            Case::new(Place { dim, size }, [places, Arg::real(shape).constant()])
        };
        vec![
            case(&[3], 0, 5),
            case(&[4, 1], 1, 6),
            case(&[2, 3, 5], 1, 4),
            case(&[2, 3, 5], 2, 1),
            case(&[1, 700], 0, 33),
            case(&[300, 3], 1, 70),
        ]
    }
}

pub const KINDS: &[OpKind] = &[
    OpKind::of::<Max>().with_cuda::<Max>(),
    OpKind::of::<Argmax>().with_cuda::<Argmax>(),
    OpKind::of::<TopK>().with_cuda::<TopK>(),
    OpKind::of::<Place>().with_cuda::<Place>(),
];

kolo_graph::methods! {
    /// Largest and smallest values, and where they are.
    ExtremeMethods {
        /// The largest along `dim`, which vanishes.
        fn max(self, dim: usize) -> Tensor<'b> { self.then(Max { dim, keep: false }, &[]) }
        /// The largest along `dim`, which becomes size one.
        fn max_keep(self, dim: usize) -> Tensor<'b> { self.then(Max { dim, keep: true }, &[]) }
        /// The largest along `dim` and its i32 index.
        fn max_with_index(self, dim: usize) -> (Tensor<'b>, Tensor<'b>) {
            let outputs = self.builder().apply_all(Max { dim, keep: false }, &[self]);
            (outputs[0], outputs[1])
        }
        /// The smallest along `dim`, which vanishes.
        fn min(self, dim: usize) -> Tensor<'b> { self.neg().max(dim).neg() }
        fn min_keep(self, dim: usize) -> Tensor<'b> { self.neg().max_keep(dim).neg() }
        fn argmax(self, dim: usize) -> Tensor<'b> { self.then(Argmax { dim }, &[]) }
        fn argmin(self, dim: usize) -> Tensor<'b> { self.neg().argmax(dim) }
        /// The `k` largest of the last dim in falling order, and their i32 indices.
        fn top_k(self, k: usize) -> (Tensor<'b>, Tensor<'b>) {
            let outputs = self.builder().apply_all(TopK { k }, &[self]);
            (outputs[0], outputs[1])
        }
    }
}
