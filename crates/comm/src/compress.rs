//! Sums of f32 with 16-bit numbers on the wire: half the bytes, for jobs that do not ask for the promised bits.
//!
//! What rounding takes away is kept and added the next time (error feedback), at each rank for what it sends and at each
//! owner for the sum of its part. So over many calls the sum of all results differs from the true one by no more than
//! one rounding, however many there were. All ranks get the same bits.

use crate::combine::{Bf16, Number};
use crate::communicator::Communicator;
use crate::element::Reduction;
use crate::fault::Fault;
use crate::task::even_parts;
use half::bf16;

/// What rounding took from one buffer so far, and room to work. The caller keeps one for each buffer.
#[derive(Debug, Default)]
pub struct Feedback {
    /// Of this rank's contribution.
    sent: Vec<f32>,
    /// Of the sum of this rank's part.
    owned: Vec<f32>,
    small: Vec<bf16>,
    parts: Vec<bf16>,
}

impl Feedback {
    pub fn new() -> Self {
        Self::default()
    }
}

/// Rounds each value plus what was taken before, and keeps what it takes now. An infinity or a NaN takes nothing, so that
/// it does not stay for ever.
fn round(values: &[f32], residual: &mut [f32], small: &mut [bf16]) {
    for ((value, residual), small) in values.iter().zip(residual).zip(small) {
        let wanted = value + *residual;
        let rounded = Bf16::narrow(wanted);
        let rest = wanted - rounded.widen();
        *residual = if rest.is_finite() { rest } else { 0.0 };
        *small = bf16::from_bits(rounded.0);
    }
}

/// An all-reduce of f32 by sum or mean. All ranks call it with equally long data.
///
/// Each rank sends every owner its part in bf16; owners add in f32, in rank order, and send the sum to all in bf16: S(P−1)/P
/// bytes per rank for S bytes of data, half of the plain exchange.
pub fn all_reduce(
    communicator: &Communicator,
    data: &mut [f32],
    reduction: Reduction,
    feedback: &mut Feedback,
) -> Result<(), Fault> {
    if communicator.reproducible() {
        let why = "bf16 on the wire changes the bits of a sum\n  hint: set reproducible = false, or send f32";
        return Err(Fault::BadCall(why.into()));
    }
    if !matches!(reduction, Reduction::Sum | Reduction::Mean) {
        let why = format!("bf16 on the wire is for sum and mean, not {}", reduction.name());
        return Err(Fault::BadCall(why));
    }
    let size = communicator.size();
    if size == 1 {
        return Ok(());
    }
    let counts: Vec<usize> = even_parts(data.len(), size).iter().map(|part| part.count).collect();
    let own = counts[communicator.rank()];
    let Feedback { sent, owned, small, parts } = feedback;
    sent.resize(data.len(), 0.0);
    owned.resize(own, 0.0);
    small.resize(data.len(), bf16::ZERO);
    parts.resize(own * size, bf16::ZERO);
    round(data, sent, small);
    communicator.all_to_all_v(small, &counts, parts, &vec![own; size])?;
    let scale = if reduction == Reduction::Mean { size as f32 } else { 1.0 };
    let sums = &mut data[..own];
    for (at, sum) in sums.iter_mut().enumerate() {
        *sum = (0..size).map(|rank| parts[rank * own + at].to_f32()).sum::<f32>() / scale;
    }
    round(sums, owned, &mut parts[..own]);
    communicator.all_gather_v(&parts[..own], small, &counts)?;
    for (value, small) in data.iter_mut().zip(&*small) {
        *value = small.to_f32();
    }
    Ok(())
}
