//! Dynamic loss scaling, which training in f16 needs: small gradients would vanish in it, so all are made larger by a factor
//! on their way and smaller again in the update.
//!
//! The factor is part of the step's state. A step whose gradient is not finite changes nothing but the factor, which becomes
//! half as large; after [`GOOD_STEPS`] good ones in a row it becomes twice as large. All of it is nodes of the graph on
//! numbers that every rank has alike, so the decision is one on every layout and is kept in checkpoints.

use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::prelude::*;

/// Steps in a row without an overflow after which the factor grows.
pub const GOOD_STEPS: f64 = 2000.0;
/// The first factor, the least and the largest: powers of two, by which a gradient is scaled without rounding.
pub const FIRST: f64 = 65_536.0;
pub const LEAST: f64 = 1.0;
pub const LARGEST: f64 = 16_777_216.0;

/// The output that has the factor of the next step.
pub const LOSS_SCALE: &str = "loss_scale";
/// The output that counts the steps that changed nothing so far.
pub const SKIPPED: &str = "skipped_steps";

/// The states behind them.
pub const FACTOR_STATE: &str = "loss_scale.factor";
pub const SKIPPED_STATE: &str = "loss_scale.skipped";

/// The first factor of a job in f16, from `[train]`.
pub fn read(train: &Settings) -> Result<f64, SettingError> {
    let first = train.float_in("loss_scale", FIRST, LEAST, LARGEST)?;
    match first.log2().fract() == 0.0 {
        true => Ok(first),
        false => {
            let message = format!("is {first}, which is not a power of two");
            Err(train.wrong("loss_scale", message, "write a power of two such as `loss_scale = 65536`"))
        }
    }
}

/// The factor and what it follows from.
#[derive(Clone, Copy, Debug)]
pub struct LossScale<'b> {
    builder: &'b Builder,
    factor: Tensor<'b>,
    good_steps: Tensor<'b>,
    skipped: Tensor<'b>,
}

impl<'b> LossScale<'b> {
    /// A factor that starts so.
    pub fn new(builder: &'b Builder, first: f64) -> Self {
        let state = |name: &str, first: f64| builder.state(name, Type::f32([]), Init::Constant(first));
        let factor = state(FACTOR_STATE, first);
        let (good_steps, skipped) = (state("loss_scale.good_steps", 0.0), state(SKIPPED_STATE, 0.0));
        Self { builder, factor, good_steps, skipped }
    }

    /// The gradient of the loss that the backward pass begins with.
    pub fn seed(&self, share: f64) -> Tensor<'b> {
        self.factor.scale(share as f32)
    }

    /// What a scaled gradient is multiplied with to be itself again.
    pub fn inverse(&self) -> Tensor<'b> {
        self.builder.scalar(1.0).div(self.factor)
    }

    /// The number of the update, of a step of this number: those that were skipped do not count.
    pub fn update_number(&self, step: Tensor<'b>) -> Tensor<'b> {
        step.sub(self.skipped)
    }

    /// The scale of the update: not above zero, which changes nothing, if the sum of the scaled gradient's squares is not
    /// finite. Also moves the factor on. Conditions are numbers, 1 or 0, as only numbers travel between the stages of a pipeline.
    pub fn guard(&self, squares: Tensor<'b>, scale: Tensor<'b>) -> Tensor<'b> {
        let Self { builder, factor, good_steps, skipped } = *self;
        let number = |value: f64| builder.scalar(value);
        let is_finite = number(f64::from(f32::MAX)).at_least(squares);
        let good = good_steps.shift(1.0);
        let grows = good.at_least(number(GOOD_STEPS));
        // Twice, once or half of it.
        let change = is_finite.mul(grows.shift(0.5)).shift(0.5);
        let next = factor.mul(change).minimum(number(LARGEST)).maximum(number(LEAST));
        let count = is_finite.mul(good.sub(grows.mul(good)));
        let skipped_now = skipped.shift(1.0).sub(is_finite);
        builder.output(LOSS_SCALE, next);
        builder.output(SKIPPED, skipped_now);
        // A copy each: a number that another stage of a pipeline computes cannot itself become a state.
        for (state, value) in [(factor, next), (good_steps, count), (skipped, skipped_now)] {
            builder.update(state, value.scale(1.0));
        }
        scale.mul(is_finite)
    }
}
