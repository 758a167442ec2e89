//! Tables as Parquet and Arrow files give them: the types of columns, and decoded columns.
//!
//! A column keeps numbers and bytes as its file lays them out where it can: what a row needs is taken from there, and nothing is
//! copied before. Every access is checked, so a column made of damaged bytes gives errors and no panics.

use ::parquet::data_type::ByteArray;
use bytes::Bytes;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Types within types, in a schema of Parquet or Arrow.
pub(super) const SCHEMA_DEPTH_MAX: usize = 64;

/// A type of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    /// Of 8, 16, 32 or 64 bits.
    Int { bits: u8, signed: bool },
    /// Of 16, 32 or 64 bits.
    Float { bits: u8 },
}

impl Number {
    pub fn bytes(self) -> usize {
        match self {
            Self::Int { bits, .. } | Self::Float { bits } => usize::from(bits / 8),
        }
    }
}

/// The type of a column, as the schema says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Bool,
    Number(Number),
    Text,
    Bytes,
    FixedBytes(usize),
    List(Box<Field>),
    FixedList(Box<Field>, usize),
    Struct(Vec<Field>),
    /// The type of the keys, and of the values.
    Dictionary(Number, Box<Self>),
    /// A type that is not read, by its name.
    Other(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Field {
    pub name: String,
    pub nullable: bool,
    pub kind: Kind,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Schema {
    pub fields: Vec<Field>,
    pub metadata: HashMap<String, String>,
}

impl Kind {
    /// The index of `bytes` in a struct of `bytes` and `path`: how Hugging Face's `datasets` keeps images.
    pub fn image_bytes(&self) -> Option<usize> {
        let Self::Struct(fields) = self else { return None };
        let bytes = fields.iter().position(|field| field.name == "bytes")?;
        let is_bytes = matches!(fields[bytes].kind, Self::Bytes | Self::FixedBytes(_));
        (is_bytes && fields.iter().any(|field| field.name == "path")).then_some(bytes)
    }
}

/// Bytes that the name of a type may have; messages cut it shorter.
const NAME_BYTES_MAX: usize = 1000;

impl Kind {
    /// The name as the Arrow libraries write it, into `out`, until that is long enough.
    fn write_name(&self, out: &mut String) {
        let item = |field: &Field, out: &mut String| {
            out.push_str(if field.nullable { "" } else { "non-null " });
            field.kind.write_name(out);
        };
        if out.len() > NAME_BYTES_MAX {
            return;
        }
        match self {
            Self::Bool => out.push_str("Boolean"),
            Self::Number(number) => out.push_str(&number.to_string()),
            Self::Text => out.push_str("Utf8"),
            Self::Bytes => out.push_str("Binary"),
            Self::FixedBytes(bytes) => out.push_str(&format!("FixedSizeBinary({bytes})")),
            Self::List(field) => {
                out.push_str("List(");
                item(field, out);
                out.push(')');
            }
            Self::FixedList(field, size) => {
                out.push_str(&format!("FixedSizeList({size} x "));
                item(field, out);
                out.push(')');
            }
            Self::Struct(fields) => {
                out.push_str("Struct(");
                for (at, field) in fields.iter().enumerate() {
                    if out.len() > NAME_BYTES_MAX {
                        return;
                    }
                    out.push_str(&format!("{}{:?}: ", if at == 0 { "" } else { ", " }, field.name));
                    item(field, out);
                }
                out.push(')');
            }
            Self::Dictionary(keys, values) => {
                out.push_str(&format!("Dictionary({keys}, "));
                values.write_name(out);
                out.push(')');
            }
            Self::Other(name) => out.push_str(name),
        }
    }
}

impl fmt::Display for Number {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int { bits, signed } => write!(out, "{}{bits}", if *signed { "Int" } else { "UInt" }),
            Self::Float { bits } => write!(out, "Float{bits}"),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut name = String::new();
        self.write_name(&mut name);
        out.write_str(&name)
    }
}

/// Which values of a column are there.
#[derive(Clone, Debug)]
pub(super) enum Validity {
    All,
    Flags(Vec<bool>),
    /// A bit for each, the lowest of a byte first.
    Bits(Bytes),
}

/// Where each of a column's parts begins and ends.
#[derive(Clone, Debug)]
pub(super) enum Offsets {
    Words(Vec<usize>),
    /// Of four bytes each.
    Small(Bytes),
    /// Of eight bytes each.
    Large(Bytes),
    /// All parts have this size.
    Fixed(usize),
}

/// A decoded column.
#[derive(Clone, Debug)]
pub(super) struct Column {
    pub len: usize,
    pub validity: Validity,
    pub values: Values,
}

#[derive(Clone, Debug)]
pub(super) enum Values {
    Ints(Vec<i64>),
    /// Of 64 bits: some may be too large for `i64`.
    Unsigned(Vec<u64>),
    Reals(Vec<f32>),
    /// Of 64 bits: some may be too large for `f32`.
    Doubles(Vec<f64>),
    /// Numbers as the file holds them, little-endian.
    Raw(Number, Bytes),
    /// Booleans, a bit for each.
    Bits(Bytes),
    /// Text or bytes, each a part of its page.
    Parts(Vec<ByteArray>),
    /// Text or bytes, one behind the other.
    Joined(Offsets, Bytes),
    /// Text or bytes as Arrow's views: 16 bytes for each, and the buffers that they point into.
    Views(Bytes, Vec<Bytes>),
    List(Offsets, Box<Column>),
    /// Of a struct only the bytes of an image are read.
    Image(Box<Column>),
    /// Keys, and the values that they number.
    Dictionary(Box<Column>, Arc<Words>),
}

/// The values of a dictionary, in one or more columns.
#[derive(Clone, Debug, Default)]
pub(super) struct Words {
    parts: Vec<Column>,
    /// Values of each part and all before it.
    ends: Vec<usize>,
}

impl Words {
    pub fn push(&mut self, part: Column) {
        self.ends.push(self.ends.last().map_or(0, |end| *end).saturating_add(part.len));
        self.parts.push(part);
    }

    /// The part that holds a value, and its row there.
    pub fn find(&self, key: usize) -> Option<(&Column, usize)> {
        let at = self.ends.partition_point(|end| *end <= key);
        let part = self.parts.get(at)?;
        Some((part, key - (self.ends[at] - part.len)))
    }
}

/// A bit of a bitmap; what lies behind its end is not set.
pub(super) fn bit(bytes: &[u8], at: usize) -> bool {
    bytes.get(at / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1)
}

impl Column {
    pub fn is_null(&self, row: usize) -> bool {
        match &self.validity {
            Validity::All => row >= self.len,
            Validity::Flags(flags) => !flags.get(row).copied().unwrap_or(false),
            Validity::Bits(bits) => !bit(bits, row),
        }
    }

    /// Whether a value of `rows` is missing.
    pub fn has_null(&self, mut rows: Range<usize>) -> bool {
        match &self.validity {
            Validity::All => false,
            _ => rows.any(|row| self.is_null(row)),
        }
    }
}

impl Offsets {
    fn at(&self, at: usize) -> Option<usize> {
        match self {
            Self::Words(words) => words.get(at).copied(),
            Self::Small(bytes) => usize::try_from(i32::from_le_bytes(*bytes.as_chunks().0.get(at)?)).ok(),
            Self::Large(bytes) => usize::try_from(i64::from_le_bytes(*bytes.as_chunks().0.get(at)?)).ok(),
            Self::Fixed(size) => at.checked_mul(*size),
        }
    }

    /// Where part number `at` begins and ends.
    pub fn range(&self, at: usize) -> Option<Range<usize>> {
        let range = self.at(at)?..self.at(at.checked_add(1)?)?;
        (range.start <= range.end).then_some(range)
    }

    /// Whether `parts` parts follow each other and end before `end`.
    pub fn fit(&self, parts: usize, end: usize) -> bool {
        let mut last = 0;
        let mut follow = |next: Option<usize>| {
            let before = std::mem::replace(&mut last, next.unwrap_or(0));
            next.is_some_and(|next| before <= next)
        };
        let ordered = match self {
            _ if parts == 0 => true,
            Self::Fixed(size) => {
                last = parts.saturating_mul(*size);
                true
            }
            _ => (0..=parts).all(|at| follow(self.at(at))),
        };
        ordered && last <= end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_must_rise_and_stay_inside() {
        let small = |offsets: &[i32]| {
            Offsets::Small(offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect::<Vec<_>>().into())
        };
        assert!(small(&[0, 2, 2, 5]).fit(3, 5));
        assert!(small(&[3, 4]).fit(1, 4));
        assert!(small(&[]).fit(0, 0));
        assert!(!small(&[0, 2, 2, 5]).fit(3, 4));
        assert!(!small(&[0, 2, 1, 5]).fit(3, 5));
        assert!(!small(&[-1, 2]).fit(1, 5));
        assert!(!small(&[0, 2]).fit(2, 5));
        assert!(Offsets::Fixed(3).fit(2, 6) && !Offsets::Fixed(3).fit(3, 8) && !Offsets::Fixed(2).fit(usize::MAX, 9));
        assert_eq!(small(&[0, 2, 2, 5]).range(2), Some(2..5));
        assert_eq!((small(&[4, 2]).range(0), small(&[4]).range(0)), (None, None));
    }

    #[test]
    fn names_are_bounded() {
        let mut kind = Kind::Text;
        for _ in 0..12 {
            let field = Field { name: "ab".into(), nullable: true, kind };
            kind = Kind::Struct(vec![field.clone(), field]);
        }
        // 4096 times "Utf8" without the bound, and more.
        let len = kind.to_string().len();
        assert!((NAME_BYTES_MAX..NAME_BYTES_MAX + 100).contains(&len), "{len} bytes");
        let field = |nullable, kind| Box::new(Field { name: "item".into(), nullable, kind });
        let list = Kind::List(field(false, Kind::FixedList(field(true, Kind::Other("Date32".into())), 3)));
        assert_eq!(list.to_string(), "List(non-null FixedSizeList(3 x Date32))");
    }
}
