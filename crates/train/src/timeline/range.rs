//! Which steps a timeline shows.

use std::str::FromStr;

/// Steps from the first to before the end, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRange {
    first: usize,
    end: usize,
}

impl StepRange {
    pub const ALL: Self = Self { first: 0, end: usize::MAX };

    pub fn contains(&self, step: usize) -> bool {
        (self.first..self.end).contains(&step)
    }

    pub fn first(&self) -> usize {
        self.first
    }

    pub fn end(&self) -> usize {
        self.end
    }
}

impl FromStr for StepRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |part: &str, open: usize| match part {
            "" => Ok(open),
            digits => digits.parse().map_err(|_| format!("`{digits}` is not the number of a step")),
        };
        let (first, end) = text.split_once("..").ok_or(format!("`{text}` is not a range of steps"))?;
        let range = Self { first: number(first, 0)?, end: number(end, usize::MAX)? };
        if range.first >= range.end {
            return Err(format!("`{text}` has no steps in it"));
        }
        Ok(range)
    }
}
