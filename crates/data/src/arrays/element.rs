//! The types of array elements, and turning their bytes into numbers.

use crate::record::{TooLarge, narrowed};
use half::{bf16, f16};
use std::fmt;

/// A whole number of more than 63 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLong(u64);

impl fmt::Display for TooLong {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}, which is larger than {}", self.0, i64::MAX)
    }
}

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

    /// Appends real numbers, given lowest byte first. One that is too large is an error that says which it is.
    pub fn reals(self, bytes: &[u8], out: &mut Vec<f32>) -> Result<(), (usize, TooLarge)> {
        let (twos, fours, eights) = (bytes.as_chunks().0, bytes.as_chunks().0, bytes.as_chunks().0);
        match self {
            Element::F16 => out.extend(twos.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32())),
            Element::BF16 => out.extend(twos.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32())),
            Element::F32 => out.extend(fours.iter().map(|bytes| f32::from_le_bytes(*bytes))),
            Element::F64 => {
                let before = out.len();
                let wide = || eights.iter().map(|bytes| f64::from_le_bytes(*bytes));
                out.extend(wide().map(|value| value as f32));
                if out[before..].iter().any(|value| value.is_infinite()) {
                    let too_large = |(at, value)| Some((at, narrowed(value).err()?));
                    return wide().enumerate().find_map(too_large).map_or(Ok(()), Err);
                }
            }
            _ => debug_assert!(false, "{self} is not a floating-point type"),
        }
        Ok(())
    }

    /// Appends whole numbers, given lowest byte first. One that has more than 63 bits is an error that says which it is.
    pub fn ints(self, bytes: &[u8], out: &mut Vec<i64>) -> Result<(), (usize, TooLong)> {
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
                let too_long = out[before..].iter().position(|value| *value < 0);
                return too_long.map_or(Ok(()), |at| Err((at, TooLong(out[before + at] as u64))));
            }
            _ => debug_assert!(false, "{self} is not an integer type"),
        }
        Ok(())
    }
}

impl fmt::Display for Element {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", format!("{self:?}").to_lowercase())
    }
}
