//! The precision that a step is computed in, as `train.precision` names it.

use kolo_graph::DType;

/// How the floats of a step are stored, and its products computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Everything in f32.
    #[default]
    F32,
    /// Stored in f32; a device multiplies with its shorter mantissa. Only where an executor has it.
    Tf32,
    /// What products read and make is bf16, the rest f32.
    Bf16,
    /// What products read and make is f16, the rest f32; gradients are scaled up on their way, as f16 has no small numbers.
    F16,
}

impl Precision {
    pub const ALL: [Precision; 4] = [Precision::F32, Precision::Tf32, Precision::Bf16, Precision::F16];

    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Tf32 => "tf32",
            Precision::Bf16 => "bf16",
            Precision::F16 => "f16",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|precision| precision.name() == name)
    }

    /// The type of what products read and make, if it is not f32.
    pub fn half(self) -> Option<DType> {
        match self {
            Precision::F32 | Precision::Tf32 => None,
            Precision::Bf16 => Some(DType::BF16),
            Precision::F16 => Some(DType::F16),
        }
    }
}
