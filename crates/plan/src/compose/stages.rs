//! Which units lie on which stage of the pipeline.

use crate::anatomy::{Anatomy, Unit};
use kolo_parallel::schedules::balanced;
use kolo_parallel::strategy::Refusal;
use std::ops::Range;
use std::sync::Arc;

/// Operations that cost as much as a number that is moved: as the strategy weighs them.
const FLOPS_PER_REAL: f64 = 32.0;

/// Runs of an anatomy's order, one per stage.
pub(crate) type StageRuns = Arc<[Range<usize>]>;

/// Runs of the anatomy's order, one per stage: of about the same cost, or of the same number of layers, with what comes before
/// the layers on the first stage and what comes after them on the last.
pub(crate) fn deal(anatomy: &Anatomy, stages: usize, equal: bool) -> Result<StageRuns, Refusal> {
    let size = anatomy.order.len();
    if stages == 1 {
        return Ok(std::iter::once(0..size).collect());
    }
    let layers = size - 2;
    if stages > layers {
        let message = format!("{stages} stages cannot be cut from a model of {layers} layers");
        return Err(Refusal::new(message, format!("use at most {layers} stages (ranks times chunks)")));
    }
    let begins: Vec<usize> = match equal {
        true => (0..stages).map(|stage| if stage == 0 { 0 } else { 1 + stage * layers / stages }).collect(),
        false => balanced(&anatomy.order.iter().map(|at| cost(&anatomy.units[*at])).collect::<Vec<_>>(), stages),
    };
    let ends = begins.iter().skip(1).copied().chain([size]);
    Ok(begins.iter().copied().zip(ends).map(|(begin, end)| begin..end).collect())
}

fn cost(unit: &Unit) -> f64 {
    unit.forward.calls.iter().map(|call| call.flops + FLOPS_PER_REAL * call.reals / 3.0).sum()
}
