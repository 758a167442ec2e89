//! What a sample is made of.

use std::fmt;

/// The index a target holds where the loss must not look.
pub const IGNORED: i32 = -1;

/// What the values of a field are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// f32 values.
    Real,
    /// i32 values in `0..classes`; a target may also hold [`IGNORED`].
    Index { classes: usize },
}

/// One column of a sample. By convention "x" is the input and "y" the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    pub name: String,
    /// The shape of one sample's values, without the batch dim.
    pub shape: Vec<usize>,
    pub kind: Kind,
}

impl Field {
    pub fn real(name: &str, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: shape.into(), kind: Kind::Real }
    }

    pub fn index(name: &str, shape: &[usize], classes: usize) -> Self {
        assert!(classes > 0, "field `{name}` has no class");
        Self { name: name.into(), shape: shape.into(), kind: Kind::Index { classes } }
    }

    /// The number of values one sample holds.
    pub fn elements(&self) -> usize {
        self.shape.iter().fold(1, |count, dim| count.saturating_mul(*dim))
    }
}

/// `x [1, 8, 8] real` or `y [] index below 10`.
impl fmt::Display for Field {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {:?} ", self.name, self.shape)?;
        match self.kind {
            Kind::Real => write!(out, "real"),
            Kind::Index { classes } => write!(out, "index below {classes}"),
        }
    }
}

/// Where one sample's field is written.
#[derive(Debug)]
pub enum Column<'a> {
    F32(&'a mut [f32]),
    I32(&'a mut [i32]),
}

impl<'a> Column<'a> {
    /// The f32 values. A caller that hands an index column to a real field has a bug.
    #[track_caller]
    pub fn reals(self) -> &'a mut [f32] {
        match self {
            Column::F32(values) => values,
            Column::I32(_) => panic!("a real field was given an i32 column"),
        }
    }

    /// The i32 values. A caller that hands a real column to an index field has a bug.
    #[track_caller]
    pub fn indices(self) -> &'a mut [i32] {
        match self {
            Column::I32(values) => values,
            Column::F32(_) => panic!("an index field was given an f32 column"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_count_and_print() {
        assert_eq!(Field::real("x", &[3, 4, 5]).elements(), 60);
        assert_eq!(Field::index("y", &[], 10).elements(), 1);
        assert_eq!(Field::real("x", &[1, 8]).to_string(), "x [1, 8] real");
        assert_eq!(Field::index("y", &[], 10).to_string(), "y [] index below 10");
    }
}
