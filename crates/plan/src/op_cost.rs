//! How long one call of an op takes on a device.
//!
//! A product takes its multiply-adds at the device's rate, or its bytes at the memory's, whichever is more. The rate falls where
//! the result is no whole number of rounds of tiles on all multiprocessors, and where few terms are summed. Everything else takes
//! its bytes. Attention runs block by block (flash), so that it moves its operands only, or step by step through memory.

use crate::device::{Device, Precision};
use crate::step_model::Compute;
use crate::system::SystemTraits;
use kolo_graph::{Op, ProductShape, Type, Work};

/// What a convolution is beyond a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Convolved {
    /// Of its images, in a group.
    pub channels: f64,
    /// Taps of a side, if Winograd's algorithm can multiply less often for it.
    pub winograd: Option<usize>,
}

/// What of an op sets its time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Body {
    /// Rows and columns of its result, and the number of terms of each sum.
    Product {
        rows: f64,
        columns: f64,
        terms: f64,
        convolution: Option<Convolved>,
    },
    /// Products of a few rows, one after the other.
    ThinProducts,
    /// `scores` is the number of pairs of a query and a key over all heads; `passes` the products over them; `masked` the share
    /// of the pairs that is hidden.
    Attention {
        scores: f64,
        passes: f64,
        masked: f64,
    },
    Stream,
}

/// One call of an op.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OpCall {
    /// The op's name.
    pub name: &'static str,
    pub body: Body,
    pub flops: f64,
    /// Real numbers read and written, whose width is the precision's.
    pub reals: f64,
    /// Bytes of everything else.
    pub bytes: f64,
    /// Of `reals`, those of weights: they are the same in every micro-batch of a step.
    pub weights: f64,
    /// Of `reals`, those that are read twice.
    pub reread: f64,
    /// Whether a framework that does not fuse runs it as several ops.
    pub composite: bool,
}

impl OpCall {
    pub fn moved_bytes(&self, precision: Precision) -> f64 {
        self.reals * precision.bytes() as f64 + self.bytes
    }
}

/// What a device has to do for calls of a precision.
#[derive(Clone, Copy, Debug)]
pub struct Runner<'d> {
    pub device: &'d Device,
    pub precision: Precision,
    /// Attention keeps no scores.
    pub flash: bool,
    /// The share of the peak that such attention reaches, if it is known.
    pub attention_share: Option<f64>,
    /// Elementwise ops are fused.
    pub fuses: bool,
    /// Images lie channel by channel.
    pub channels_first: bool,
}

/// Terms of a sum that cost as much as starting and ending it.
const START_TERMS: f64 = 64.0;
/// The rate of a tile of half the size, which reads its operands more often.
const SMALLER_TILE: f64 = 0.9;
/// Fewer terms than this are not shared out among multiprocessors.
const SPLIT_TERMS: f64 = 512.0;
/// The rate of attention beside that of products: exponentials between them, and smaller tiles.
const FLASH_SHARE: f64 = 0.6;
/// Attention that keeps its scores passes them this often through memory. Forward: written by one product and read by the next, with
/// scaling, mask, softmax and dropout between. Backward: through dropout and softmax to the products for queries and keys, and once
/// more for the values.
const SCORE_PASSES: [f64; 2] = [6.0, 10.0];
/// Where nothing is fused, scaling and mask read and write them on their own; backward, scaling does.
const EAGER_SCORE_PASSES: [f64; 2] = [4.0, 2.0];
/// Of the five products of a backward pass, one computes scores again; attention that keeps them has four.
const BACKWARD_KEPT: f64 = 4.0 / 5.0;
/// Algorithms of Winograd: taps of a side, how many times less often they multiply, and how often the tiles pass through memory, each
/// time as large as the operands. F(2 × 2, 3 × 3) multiplies 16 times where a convolution multiplies 36 times, and keeps its tiles in
/// the kernel. F(4 × 4, 3 × 3) does with 36 for 144, and F(4 × 4, 5 × 5) with 64 for 400; their tiles have 36 and 64 numbers for 16, and
/// are written for the products and read by them, as are their results. cuDNN has the first as `WINOGRAD`, the others as `WINOGRAD_NONFUSED`.
const WINOGRADS: [(usize, f64, f64); 3] = [(3, 2.25, 0.0), (3, 4.0, 2.0 * 36.0 / 16.0), (5, 6.25, 2.0 * 64.0 / 16.0)];
/// The share of the f32 peak that products reach on a device whose other precisions have units of their own: large SGEMM of cuBLAS does
/// about 14 of a V100's 15.7 TFLOP/s.
const PLAIN_SHARE: f64 = 0.89;
/// Tensor cores take channels in runs of 16 bytes; a convolution with fewer computes with zeros.
const RUN_BYTES: f64 = 16.0;
/// An image is read and written to lie in another order.
const ORDER_PASSES: f64 = 2.0;
/// Where nothing is fused, a norm, a rotation or a loss passes its operands so often through memory, much of it in f32.
const EAGER_PASSES: f64 = 6.0;
/// The share of the rate that 8-bit products reach beside wider ones: of an H100's peaks the best product reaches 0.71 in 8 bits and
/// 0.80 in 16 (stas00/ml-engineering, "Maximum Achievable Matmul FLOPS").
const NARROW_SHARE: f64 = 0.88;
/// The rate of products of a few rows.
const THIN_SHARE: f64 = 0.25;

impl<'d> Runner<'d> {
    pub fn new(device: &'d Device, precision: Precision, system: &SystemTraits) -> Self {
        let SystemTraits { flash_attention: flash, attention_share, fuses, channels_first, .. } = *system;
        let channels_first = channels_first.unwrap_or(precision == Precision::Tf32 && !fuses);
        Self { device, precision, flash, attention_share, fuses, channels_first }
    }

    /// What a call takes.
    pub fn compute(&self, call: &OpCall) -> Compute {
        let launch = self.device.launch;
        let rate = self.product_rate();
        let passes = if call.composite && !self.fuses { EAGER_PASSES } else { 1.0 };
        let reread = if self.device.units > 1 { call.reread * self.precision.bytes() as f64 } else { 0.0 };
        let stream = (call.moved_bytes(self.precision) * passes + reread) / self.stream_rate();
        let (product, seconds) = match call.body {
            Body::Stream => (0.0, stream),
            Body::Product { rows, columns, terms, convolution } => {
                let computed = call.flops * self.with_zeros(convolution) / rate / self.filled(rows, columns, terms);
                let result = rows * columns * self.precision.bytes() as f64 / self.stream_rate();
                let (product, seconds) = match convolution.and_then(|convolution| convolution.winograd) {
                    Some(taps) if self.transforms() => self.transformed(call, taps, computed, stream),
                    // One block of a kernel for tensor cores fills a multiprocessor: nothing multiplies while it writes its result.
                    _ if self.has_tensor_cores() => (computed, computed.max(stream - result) + result),
                    _ => (computed, computed.max(stream)),
                };
                let around =
                    self.narrowing(call.reals - rows * columns - call.weights) + self.reordering(call, convolution);
                (product.min(call.flops / rate), seconds + around)
            }
            Body::ThinProducts => (call.flops / rate, (call.flops / rate / THIN_SHARE).max(stream)),
            Body::Attention { scores, passes, masked } => self.attention(call.flops, scores, passes, masked, stream),
        };
        let (product, stream) = if seconds > stream || product >= stream { (product, 0.0) } else { (0.0, stream) };
        let overhead = (seconds - product - stream).max(0.0) + launch;
        Compute { product, stream, overhead, flops: call.flops }
    }

    /// Operations per second of large products.
    fn product_rate(&self) -> f64 {
        let Device { product_share, units, .. } = *self.device;
        let peak = self.device.peak(self.precision);
        let half = self.device.peak(Precision::F16);
        match self.precision {
            Precision::F32 if units > 1 && half > peak => peak * product_share.max(PLAIN_SHARE),
            Precision::F8 if self.narrows() => peak * product_share * NARROW_SHARE,
            _ => peak * product_share,
        }
    }

    /// Whether products run on units of their own.
    fn has_tensor_cores(&self) -> bool {
        self.device.units > 1 && self.device.peak(self.precision) > self.device.peak(Precision::F32)
    }

    /// How many times as many operations a convolution is on tensor cores, whose runs of channels it fills with zeros.
    fn with_zeros(&self, convolution: Option<Convolved>) -> f64 {
        match convolution.filter(|_| self.has_tensor_cores()) {
            Some(Convolved { channels, .. }) if channels > 0.0 => {
                let run = RUN_BYTES / self.precision.bytes() as f64;
                (channels / run).ceil() * run / channels
            }
            _ => 1.0,
        }
    }

    /// Seconds in which images are brought into the order that tensor cores read, and results back.
    fn reordering(&self, call: &OpCall, convolution: Option<Convolved>) -> f64 {
        match convolution.is_some() && self.channels_first && self.has_tensor_cores() {
            true => ORDER_PASSES * (call.reals - call.weights) * self.precision.bytes() as f64 / self.stream_rate(),
            false => 0.0,
        }
    }

    /// Whether Winograd's algorithm is worth trying. Tensor cores are faster without it, and processors' kernels do not have it.
    fn transforms(&self) -> bool {
        self.precision == Precision::F32 && self.device.units > 1
    }

    /// Seconds in which a convolution of so many taps a side multiplies, and in all, if it takes so long as it is written and so long
    /// for its bytes: by the fastest algorithm.
    fn transformed(&self, call: &OpCall, taps: usize, written: f64, stream: f64) -> (f64, f64) {
        let plain = (written, written.max(stream));
        let moved = call.moved_bytes(self.precision) / self.stream_rate();
        let by =
            |(_, gain, passes): &(usize, f64, f64)| (written / gain, (written / gain).max(stream) + passes * moved);
        let all = WINOGRADS.iter().filter(|(side, ..)| *side == taps).map(by);
        all.chain([plain]).min_by(|one, other| one.1.total_cmp(&other.1)).unwrap_or(plain)
    }

    /// Whether products are of 8 bits.
    fn narrows(&self) -> bool {
        self.precision == Precision::F8 && self.device.peak[Precision::F8 as usize] > 0.0
    }

    /// Bytes per second.
    fn stream_rate(&self) -> f64 {
        self.device.bandwidth * self.device.stream_share
    }

    /// Seconds in which operands become 8 bits wide: read and written, and read for their largest unless whoever made them did
    /// that.
    pub(crate) fn narrowing(&self, operands: f64) -> f64 {
        let wide = self.precision.bytes() as f64;
        let reads = if self.fuses { 1.0 } else { 2.0 };
        if self.narrows() { operands.max(0.0) * (reads * wide + 1.0) / self.stream_rate() } else { 0.0 }
    }

    /// Seconds at the full rate, and in all. 8-bit products are for layers, not for attention.
    fn attention(&self, flops: f64, scores: f64, passes: f64, masked: f64, stream: f64) -> (f64, f64) {
        let precision = if self.precision == Precision::F8 { Precision::Bf16 } else { self.precision };
        let rate = self.device.peak(precision) * self.device.product_share;
        if self.flash {
            // Blocks behind the mask are left out.
            let flops = flops * (1.0 - masked);
            let reached = self.attention_share.map_or(rate * FLASH_SHARE, |share| self.device.peak(precision) * share);
            return ((flops / rate).min(flops / reached), (flops / reached).max(stream));
        }
        let backward = passes > 2.0;
        let flops = if backward { flops * BACKWARD_KEPT } else { flops };
        let at = usize::from(backward);
        let passes = SCORE_PASSES[at] + if self.fuses { 0.0 } else { EAGER_SCORE_PASSES[at] };
        let through = scores * passes * precision.bytes() as f64 / self.stream_rate();
        (flops / rate, flops / rate + through + stream)
    }

    /// The share of the multiprocessors' time in which they multiply, with the tile that suits the result best.
    fn filled(&self, rows: f64, columns: f64, terms: f64) -> f64 {
        let units = self.device.units as f64;
        let [tile_rows, tile_columns] = self.device.tile.map(|side| side as f64);
        let mut best = 0.0f64;
        for (down, across, rate) in [
            (1.0, 1.0, 1.0),
            (2.0, 1.0, SMALLER_TILE),
            (1.0, 2.0, SMALLER_TILE),
            (2.0, 2.0, SMALLER_TILE * SMALLER_TILE),
        ] {
            let (high, wide) = ((tile_rows / down).max(1.0), (tile_columns / across).max(1.0));
            let tiles = (rows / high).ceil() * (columns / wide).ceil();
            let parts = if tiles < units { (units / tiles).min(terms / SPLIT_TERMS).max(1.0).floor() } else { 1.0 };
            let rounds = (tiles * parts / units).ceil();
            let used = rows * columns * parts / (rounds * units * high * wide);
            let split = if parts > 1.0 { SMALLER_TILE } else { 1.0 };
            best = best.max(used.min(1.0) * rate * split);
        }
        best.max(1e-6) * terms / (terms + START_TERMS)
    }
}

/// What sets the time of an op, as it says itself.
pub(crate) fn body(op: &dyn Op, flops: f64, inputs: &[Type], outputs: &[Type]) -> Body {
    match op.work() {
        Work::Stream => Body::Stream,
        Work::ThinProducts => Body::ThinProducts,
        Work::Product => match op.product_shape(inputs, outputs) {
            ProductShape::Matrix { columns } => product(&outputs[0], columns, flops, None),
            ProductShape::Convolution { columns, channels, winograd } => {
                product(&outputs[0], columns, flops, Some(Convolved { channels: channels as f64, winograd }))
            }
            ProductShape::Attention { scores, products, masked } => {
                Body::Attention { scores: scores as f64, passes: f64::from(products), masked }
            }
        },
    }
}

fn product(result: &Type, columns: usize, flops: f64, convolution: Option<Convolved>) -> Body {
    let elements = (result.elements() as f64).max(1.0);
    let columns = (columns as f64).max(1.0);
    Body::Product { rows: elements / columns, columns, terms: (flops / 2.0 / elements).max(1.0), convolution }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceTable;
    use kolo_graph::{Arg, Case, Dense, Operand, Operands};

    #[test]
    fn products_lose_by_tiles_terms_and_memory() {
        let table = DeviceTable::built_in().unwrap();
        let device = table.find("a100-80").unwrap();
        let runner = Runner::new(device, Precision::Bf16, &SystemTraits::default());
        let share = |rows: f64, columns: f64, terms: f64| {
            let reals = rows * columns + rows * terms + columns * terms;
            let flops = 2.0 * rows * columns * terms;
            let call = OpCall {
                name: "linear",
                body: Body::Product { rows, columns, terms, convolution: None },
                flops,
                reals,
                bytes: 0.0,
                weights: 0.0,
                reread: 0.0,
                composite: false,
            };
            flops / runner.compute(&call).seconds() / device.peak(Precision::Bf16) / device.product_share
        };
        let large = share(16384.0, 8192.0, 8192.0);
        assert!(large > 0.9, "{large}");
        // One tile more than all multiprocessors compute at a time.
        assert!(share(128.0 * 109.0, 256.0, 8192.0) < 0.75 * share(128.0 * 108.0, 256.0, 8192.0));
        assert!(share(16384.0, 8192.0, 64.0) < 0.6 * large);
        // A few rows read the whole weight.
        assert!(share(16.0, 8192.0, 8192.0) < 0.2);
    }

    /// A convolution of 64 images of 56 × 56 places to as many channels.
    fn convolution(channels: f64, taps: f64, winograd: Option<usize>) -> OpCall {
        let (places, terms) = (64.0 * 56.0 * 56.0, channels * taps * taps);
        let weights = channels * terms;
        OpCall {
            name: "conv2d",
            body: Body::Product {
                rows: places,
                columns: channels,
                terms,
                convolution: Some(Convolved { channels, winograd }),
            },
            flops: 2.0 * places * channels * terms,
            reals: 2.0 * places * channels + weights,
            bytes: 0.0,
            weights,
            reread: 0.0,
            composite: false,
        }
    }

    #[test]
    fn convolutions_on_tensor_cores_take_runs_of_channels_in_their_order() {
        let table = DeviceTable::built_in().unwrap();
        let seconds = |device: &str, precision, channels_first, call: &OpCall| {
            let system = SystemTraits { channels_first: Some(channels_first), ..SystemTraits::default() };
            Runner::new(table.find(device).unwrap(), precision, &system).compute(call).seconds()
        };
        let full = convolution(128.0, 3.0, Some(3));
        for (device, precision, transposes) in
            [("a100-80", Precision::Tf32, true), ("v100", Precision::F16, true), ("v100", Precision::F32, false)]
        {
            let [last, first] = [false, true].map(|order| seconds(device, precision, order, &full));
            assert_eq!(first > 1.05 * last, transposes, "{device} {}", precision.name());
        }
        let assumed = |precision, fuses| {
            let system = SystemTraits { fuses, ..SystemTraits::default() };
            Runner::new(table.find("a100-80").unwrap(), precision, &system).channels_first
        };
        assert!(assumed(Precision::Tf32, false));
        assert!(!assumed(Precision::Tf32, true) && !assumed(Precision::Bf16, false));
        // Three channels take as long as eight halves do.
        let stem = |channels: f64| OpCall {
            body: Body::Product {
                rows: 64.0 * 112.0 * 112.0,
                columns: 64.0,
                terms: 147.0,
                convolution: Some(Convolved { channels, winograd: None }),
            },
            ..convolution(64.0, 7.0, None)
        };
        assert!(
            seconds("a100-80", Precision::F16, false, &stem(3.0))
                > 1.5 * seconds("a100-80", Precision::F16, false, &stem(8.0))
        );
        assert_eq!(
            seconds("p100", Precision::F32, false, &stem(3.0)),
            seconds("p100", Precision::F32, false, &stem(8.0))
        );
        let large = convolution(192.0, 5.0, Some(5));
        let plain = convolution(192.0, 5.0, None);
        assert!(seconds("p100", Precision::F32, false, &large) < 0.5 * seconds("p100", Precision::F32, false, &plain));
    }

    #[test]
    fn gpus_read_twice_what_has_to_be_summed_first() {
        let table = DeviceTable::built_in().unwrap();
        let norm = |reread: f64| OpCall {
            name: "batch_norm",
            body: Body::Stream,
            flops: 0.0,
            reals: 2e8,
            bytes: 0.0,
            weights: 0.0,
            reread,
            composite: false,
        };
        let ratio = |device: &str| {
            let runner = Runner::new(table.find(device).unwrap(), Precision::F32, &SystemTraits::default());
            runner.compute(&norm(1e8)).seconds() / runner.compute(&norm(0.0)).seconds()
        };
        assert!((ratio("v100") - 1.5).abs() < 0.01);
        assert_eq!(ratio("cpu-core"), 1.0);
    }

    #[test]
    fn f32_reaches_more_of_its_peak_beside_tensor_cores() {
        let table = DeviceTable::built_in().unwrap();
        let rate = |device: &str| {
            let device = table.find(device).unwrap();
            let runner = Runner::new(device, Precision::F32, &SystemTraits::default());
            runner.product_rate() / device.peak(Precision::F32)
        };
        assert_eq!(rate("v100"), PLAIN_SHARE);
        assert_eq!(rate("p100"), table.find("p100").unwrap().product_share);
        assert_eq!(rate("cpu-core"), table.find("cpu-core").unwrap().product_share);
    }

    fn types_of(case: &Case) -> (Vec<Type>, Vec<Type>) {
        let inputs: Vec<Type> = case.args.iter().map(|arg| arg.ty.clone()).collect();
        let outputs = case.op.infer(&inputs).unwrap();
        (inputs, outputs)
    }

    fn body_of(case: &Case) -> Body {
        let (inputs, outputs) = types_of(case);
        body(&*case.op, case.op.flops(&inputs, &outputs) as f64, &inputs, &outputs)
    }

    /// The registered ops of which a case is so.
    fn named(is: impl Fn(&Case) -> bool) -> String {
        let has = |kind: &&kolo_graph::OpKind| (kind.cases)().iter().any(&is);
        let mut names: Vec<&str> = kolo_ops::registry().iter().filter(has).map(|kind| kind.name).collect();
        names.sort_unstable();
        names.join(" ")
    }

    #[test]
    fn ops_say_what_work_they_are() {
        assert_eq!(
            named(|case| matches!(body_of(case), Body::Attention { .. })),
            "attention attention_grad attention_step attention_step_grad cached_attention"
        );
        assert_eq!(
            named(|case| matches!(body_of(case), Body::Attention { masked, .. } if masked > 0.0)),
            "attention attention_grad attention_step attention_step_grad"
        );
        assert_eq!(
            named(|case| matches!(
                body_of(case),
                Body::Product { convolution: Some(Convolved { winograd: Some(_), .. }), .. }
            )),
            "conv2d conv2d_input_grad conv2d_weight_grad"
        );
        assert_eq!(
            named(|case| case.op.composite()),
            "cross_entropy cross_entropy_grad rms_norm rms_norm_grad rotary softmax"
        );
        assert_eq!(named(|case| case.op.reads_twice()), "batch_norm batch_norm_grad");
        assert_eq!(named(|case| case.op.widened().is_some()), "cross_entropy cross_entropy_join cross_entropy_part");
    }

    /// Every pair of a query and a key takes two operations per number of a head in each product.
    #[test]
    fn scores_and_operations_of_attention_agree() {
        for kind in kolo_ops::registry().iter() {
            for case in (kind.cases)() {
                let (inputs, outputs) = types_of(&case);
                let Body::Attention { scores, passes, .. } = body_of(&case) else { continue };
                let flops = case.op.flops(&inputs, &outputs) as f64;
                let head = flops / (2.0 * passes * scores.max(1.0));
                assert_eq!(head.fract(), 0.0, "{} on {inputs:?}", case.op.signature());
            }
        }
    }

    kolo_graph::op! {
        /// Attention of a program's own.
        pub struct Own = "own" {}
    }

    impl Op for Own {
        fn operands(&self) -> Operands {
            Operands::without_rules([Operand::f32("x")], &["y"])
        }
        fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
            Ok(inputs.to_vec())
        }
        fn work(&self) -> Work {
            Work::Product
        }
        fn product_shape(&self, _: &[Type], _: &[Type]) -> ProductShape {
            ProductShape::Attention { scores: 6, products: 2, masked: ProductShape::CAUSAL }
        }
        fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
            vec![inputs[0].clone()]
        }
    }

    #[test]
    fn an_op_of_any_name_can_be_attention() {
        let own = body_of(&Case::new(Own {}, [Arg::real([2, 3])]));
        assert_eq!(own, Body::Attention { scores: 6.0, passes: 2.0, masked: 0.5 });
    }
}
