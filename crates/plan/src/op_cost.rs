//! How long one call of an op takes on a device.
//!
//! A product takes its multiply-adds at the device's rate, or its bytes at the memory's, whichever is more. The rate falls where
//! the result is no whole number of rounds of tiles on all multiprocessors, and where few terms are summed. Everything else takes
//! its bytes. Attention runs block by block (flash), so that it moves its operands only, or step by step through memory.

use crate::device::{Device, Precision};
use crate::step_model::Compute;
use crate::system::SystemTraits;
use kolo_graph::{Op, ProductShape, Type, Work};

/// What of an op sets its time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Body {
    /// Rows and columns of its result, and the number of terms of each sum. `winograd`: Winograd's algorithm can multiply less
    /// often for it.
    Product {
        rows: f64,
        columns: f64,
        terms: f64,
        winograd: bool,
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
/// Of the five products of a backward pass, one computes scores again; attention that keeps them has four.
const BACKWARD_KEPT: f64 = 4.0 / 5.0;
/// Winograd's F(2 × 2, 3 × 3) multiplies 16 times where a convolution multiplies 36 times, and F(4 × 4, 3 × 3) 36 times instead of 144.
const WINOGRAD_GAINS: [f64; 2] = [2.25, 4.0];
/// The tiles of F(4 × 4, 3 × 3) have 36 numbers for 16; they are written for the products and read by them, as are their results.
const TRANSFORM_PASSES: f64 = 2.0 * 36.0 / 16.0;
/// Where nothing is fused, a norm, a rotation or a loss passes its operands so often through memory, much of it in f32.
const EAGER_PASSES: f64 = 6.0;
/// The share of the rate that 8-bit products reach beside wider ones: of an H100's peaks the best product reaches 0.71 in 8 bits and
/// 0.80 in 16 (stas00/ml-engineering, "Maximum Achievable Matmul FLOPS").
const NARROW_SHARE: f64 = 0.88;
/// The rate of products of a few rows.
const THIN_SHARE: f64 = 0.25;

impl<'d> Runner<'d> {
    pub fn new(device: &'d Device, precision: Precision, system: &SystemTraits) -> Self {
        let SystemTraits { flash_attention: flash, attention_share, fuses, .. } = *system;
        Self { device, precision, flash, attention_share, fuses }
    }

    /// What a call takes.
    pub fn compute(&self, call: &OpCall) -> Compute {
        let Device { product_share, launch, .. } = *self.device;
        let narrow = if self.narrows() { NARROW_SHARE } else { 1.0 };
        let rate = self.device.peak(self.precision) * product_share * narrow;
        let passes = if call.composite && !self.fuses { EAGER_PASSES } else { 1.0 };
        let stream = call.moved_bytes(self.precision) * passes / self.stream_rate();
        let (product, seconds) = match call.body {
            Body::Stream => (0.0, stream),
            Body::Product { rows, columns, terms, winograd } => {
                let written = call.flops / rate / self.filled(rows, columns, terms);
                let (product, seconds) = match winograd && self.transforms() {
                    true => self.transformed(call, written, stream),
                    false => (written, written.max(stream)),
                };
                (product.min(call.flops / rate), seconds + self.narrowing(call.reals - rows * columns))
            }
            Body::ThinProducts => (call.flops / rate, (call.flops / rate / THIN_SHARE).max(stream)),
            Body::Attention { scores, passes, masked } => self.attention(call.flops, scores, passes, masked, stream),
        };
        let (product, stream) = if seconds > stream || product >= stream { (product, 0.0) } else { (0.0, stream) };
        let overhead = (seconds - product - stream).max(0.0) + launch;
        Compute { product, stream, overhead, flops: call.flops }
    }

    /// Whether Winograd's algorithm is worth trying. Tensor cores are faster without it, and processors' kernels do not have it.
    fn transforms(&self) -> bool {
        self.precision == Precision::F32 && self.device.units > 1
    }

    /// Seconds in which a convolution multiplies, and in all, if it takes so long as it is written and so long for its bytes: by
    /// the fastest algorithm.
    fn transformed(&self, call: &OpCall, written: f64, stream: f64) -> (f64, f64) {
        let plain = (written, written.max(stream));
        let [small, large] = WINOGRAD_GAINS.map(|gain| written / gain);
        let transforms = TRANSFORM_PASSES * call.moved_bytes(self.precision) / self.stream_rate();
        let all = [plain, (small, small.max(stream)), (large, large.max(stream) + transforms)];
        all.into_iter().min_by(|one, other| one.1.total_cmp(&other.1)).unwrap_or(plain)
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
    fn narrowing(&self, operands: f64) -> f64 {
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
        let through = scores * SCORE_PASSES[usize::from(backward)] * precision.bytes() as f64 / self.stream_rate();
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
            ProductShape::Matrix { columns } => product(&outputs[0], columns, flops, false),
            ProductShape::Convolution { columns, winograd } => product(&outputs[0], columns, flops, winograd),
            ProductShape::Attention { scores, products, masked } => {
                Body::Attention { scores: scores as f64, passes: f64::from(products), masked }
            }
        },
    }
}

fn product(result: &Type, columns: usize, flops: f64, winograd: bool) -> Body {
    let elements = (result.elements() as f64).max(1.0);
    let columns = (columns as f64).max(1.0);
    Body::Product { rows: elements / columns, columns, terms: (flops / 2.0 / elements).max(1.0), winograd }
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
                body: Body::Product { rows, columns, terms, winograd: false },
                flops,
                reals,
                bytes: 0.0,
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
            named(|case| matches!(body_of(case), Body::Product { winograd: true, .. })),
            "conv2d conv2d_input_grad conv2d_weight_grad"
        );
        assert_eq!(
            named(|case| case.op.composite()),
            "cross_entropy cross_entropy_grad rms_norm rms_norm_grad rotary softmax"
        );
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
