//! The types of array elements, and turning their bytes into numbers.

use half::{bf16, f16};
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    Bool,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    BF16,
    F32,
    F64,
}

impl Element {
    pub fn bytes(self) -> u64 {
        match self {
            Element::Bool | Element::U8 | Element::I8 => 1,
            Element::U16 | Element::I16 | Element::F16 | Element::BF16 => 2,
            Element::U32 | Element::I32 | Element::F32 => 4,
            Element::U64 | Element::I64 | Element::F64 => 8,
        }
    }

    pub fn is_real(self) -> bool {
        matches!(self, Element::F16 | Element::BF16 | Element::F32 | Element::F64)
    }

    /// Appends real numbers, given lowest byte first.
    pub fn reals(self, bytes: &[u8], out: &mut Vec<f32>) {
        let (twos, fours, eights) = (bytes.as_chunks().0, bytes.as_chunks().0, bytes.as_chunks().0);
        match self {
            Element::F16 => out.extend(twos.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32())),
            Element::BF16 => out.extend(twos.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32())),
            Element::F32 => out.extend(fours.iter().map(|bytes| f32::from_le_bytes(*bytes))),
            Element::F64 => out.extend(eights.iter().map(|bytes| f64::from_le_bytes(*bytes) as f32)),
            _ => debug_assert!(false, "{self} is not a floating-point type"),
        }
    }

    /// Appends whole numbers, given lowest byte first. The answer is the place of one that does not fit, if there is one.
    pub fn ints(self, bytes: &[u8], out: &mut Vec<i64>) -> Option<usize> {
        let (twos, fours, eights) = (bytes.as_chunks().0, bytes.as_chunks().0, bytes.as_chunks().0);
        match self {
            Element::Bool => out.extend(bytes.iter().map(|byte| i64::from(*byte != 0))),
            Element::U8 => out.extend(bytes.iter().map(|byte| i64::from(*byte))),
            Element::I8 => out.extend(bytes.iter().map(|byte| i64::from(*byte as i8))),
            Element::U16 => out.extend(twos.iter().map(|bytes| i64::from(u16::from_le_bytes(*bytes)))),
            Element::I16 => out.extend(twos.iter().map(|bytes| i64::from(i16::from_le_bytes(*bytes)))),
            Element::U32 => out.extend(fours.iter().map(|bytes| i64::from(u32::from_le_bytes(*bytes)))),
            Element::I32 => out.extend(fours.iter().map(|bytes| i64::from(i32::from_le_bytes(*bytes)))),
            Element::I64 => out.extend(eights.iter().map(|bytes| i64::from_le_bytes(*bytes))),
            Element::U64 => {
                let before = out.len();
                out.extend(eights.iter().map(|bytes| i64::from_le_bytes(*bytes)));
                return out[before..].iter().position(|value| *value < 0);
            }
            _ => debug_assert!(false, "{self} is not an integer type"),
        }
        None
    }
}

impl fmt::Display for Element {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", format!("{self:?}").to_lowercase())
    }
}
