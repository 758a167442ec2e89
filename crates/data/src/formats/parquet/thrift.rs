//! Reads Thrift's compact protocol, in which Parquet keeps page headers and the footer: what they claim is checked before the
//! parquet crate takes memory for it.
//!
//! That crate reads the fields it knows by their number, whatever type the file gives them. So a known field of another type
//! is refused here: both would read different things from the bytes behind it.

use super::table::SCHEMA_DEPTH_MAX;

/// Structs and lists within each other that are passed over.
const DEPTH_MAX: usize = 16;

const TRUE: u8 = 1;
const FALSE: u8 = 2;
const BYTE: u8 = 3;
const I16: u8 = 4;
const I32: u8 = 5;
const I64: u8 = 6;
const DOUBLE: u8 = 7;
const BINARY: u8 = 8;
const LIST: u8 = 9;
const SET: u8 = 10;
const STRUCT: u8 = 12;

/// The type of a known field.
enum Kind {
    Bool,
    Byte,
    I32,
    Binary,
    Struct(&'static Fields),
}

/// The fields of a struct that are known, by their numbers.
struct Fields {
    name: Name,
    known: &'static [(i64, Kind)],
}

/// A struct with numbers that are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name {
    Page,
    Data,
    DataV2,
    Dictionary,
    Element,
    Other,
}

use Kind::{Binary, Bool, Byte, I32 as Int, Struct};

static PAGE: Fields = Fields {
    name: Name::Page,
    known: &[
        (1, Int),
        (2, Int),
        (3, Int),
        (4, Int),
        (5, Struct(&DATA)),
        (6, Struct(&EMPTY)),
        (7, Struct(&DICTIONARY)),
        (8, Struct(&DATA_V2)),
    ],
};
static DATA: Fields = Fields { name: Name::Data, known: &[(1, Int), (2, Int), (3, Int), (4, Int)] };
static DATA_V2: Fields =
    Fields { name: Name::DataV2, known: &[(1, Int), (2, Int), (3, Int), (4, Int), (5, Int), (6, Int), (7, Bool)] };
static DICTIONARY: Fields = Fields { name: Name::Dictionary, known: &[(1, Int), (2, Int), (3, Bool)] };
static ELEMENT: Fields = Fields {
    name: Name::Element,
    known: &[
        (1, Int),
        (2, Int),
        (3, Int),
        (4, Binary),
        (5, Int),
        (6, Int),
        (7, Int),
        (8, Int),
        (9, Int),
        (10, Struct(&LOGICAL_TYPE)),
    ],
};
static LOGICAL_TYPE: Fields = Fields {
    name: Name::Other,
    known: &[
        (1, Struct(&EMPTY)),
        (2, Struct(&EMPTY)),
        (3, Struct(&EMPTY)),
        (4, Struct(&EMPTY)),
        (5, Struct(&DECIMAL)),
        (6, Struct(&EMPTY)),
        (7, Struct(&TIME)),
        (8, Struct(&TIME)),
        (10, Struct(&INTEGER)),
        (11, Struct(&EMPTY)),
        (12, Struct(&EMPTY)),
        (13, Struct(&EMPTY)),
        (14, Struct(&EMPTY)),
        (15, Struct(&EMPTY)),
        (16, Struct(&VARIANT)),
        (17, Struct(&GEOGRAPHY)),
        (18, Struct(&GEOGRAPHY)),
    ],
};
static EMPTY: Fields = Fields { name: Name::Other, known: &[] };
static DECIMAL: Fields = Fields { name: Name::Other, known: &[(1, Int), (2, Int)] };
static TIME: Fields = Fields { name: Name::Other, known: &[(1, Bool), (2, Struct(&TIME_UNIT))] };
static TIME_UNIT: Fields =
    Fields { name: Name::Other, known: &[(1, Struct(&EMPTY)), (2, Struct(&EMPTY)), (3, Struct(&EMPTY))] };
static INTEGER: Fields = Fields { name: Name::Other, known: &[(1, Byte), (2, Bool)] };
static VARIANT: Fields = Fields { name: Name::Other, known: &[(1, Byte)] };
static GEOGRAPHY: Fields = Fields { name: Name::Other, known: &[(1, Binary), (2, Int)] };

/// A reader of the protocol. It returns `None` where the bytes are none of it.
pub(super) struct Thrift<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Thrift<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// What is not read yet.
    pub fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    pub fn byte(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    pub fn pass(&mut self, bytes: usize) -> Option<()> {
        self.at = self.at.checked_add(bytes).filter(|at| *at <= self.bytes.len())?;
        Some(())
    }

    pub fn unsigned(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7F) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn signed(&mut self) -> Option<i64> {
        let value = self.unsigned()?;
        Some((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// The next field's number and type; `Some(None)` at the end of the struct.
    fn field(&mut self, last: i64) -> Option<Option<(i64, u8)>> {
        let head = self.byte()?;
        let field = match (head >> 4, head & 0x0F) {
            (_, 0) => return Some(None),
            (0, kind) => (self.signed()?, kind),
            (step, kind) => (last.checked_add(step.into())?, kind),
        };
        i16::try_from(field.0).ok().map(|_| Some(field))
    }

    /// The type and number of a list's elements.
    fn list(&mut self) -> Option<(u8, u64)> {
        let head = self.byte()?;
        let count = if head >> 4 == 15 { self.unsigned()? } else { u64::from(head >> 4) };
        Some((head & 0x0F, count))
    }

    fn skip(&mut self, kind: u8, depth: usize) -> Option<()> {
        match kind {
            TRUE | FALSE => Some(()),
            BYTE => self.pass(1),
            I16 | I32 | I64 => self.unsigned().map(|_| ()),
            DOUBLE => self.pass(8),
            BINARY => {
                let len = self.unsigned()?;
                self.pass(usize::try_from(len).ok()?)
            }
            LIST | SET if depth < DEPTH_MAX => {
                let (kind, count) = self.list()?;
                // Booleans in lists take a byte.
                let kind = if matches!(kind, TRUE | FALSE) { BYTE } else { kind };
                (0..count).try_for_each(|_| self.skip(kind, depth + 1))
            }
            STRUCT if depth < DEPTH_MAX => self.structure(&EMPTY, depth + 1, &mut |_, _, _| ()),
            _ => None,
        }
    }

    /// Reads a struct. Hands the 32-bit integers of known structs to `found`, with the numbers of their fields.
    fn structure(
        &mut self,
        fields: &'static Fields,
        depth: usize,
        found: &mut dyn FnMut(Name, i64, i32),
    ) -> Option<()> {
        let mut last = 0;
        while let Some((field, kind)) = self.field(last)? {
            let known = fields.known.iter().find(|(known, _)| *known == field).map(|(_, kind)| kind);
            match (known, kind) {
                (None, _) | (Some(Binary), BINARY) | (Some(Byte), BYTE) | (Some(Bool), TRUE | FALSE) => {
                    self.skip(kind, depth)?;
                }
                (Some(Int), I32) => found(fields.name, field, i32::try_from(self.signed()?).ok()?),
                (Some(Struct(below)), STRUCT) => self.structure(below, depth + 1, found)?,
                _ => return None,
            }
            last = field;
        }
        Some(())
    }
}

/// What a page header claims.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PageHeader {
    pub kind: PageKind,
    pub decompressed: i32,
    pub compressed: i32,
    /// Of a data page: levels, and so values with nulls; of a dictionary: its values.
    pub values: i32,
    pub encoding: i32,
    /// Bytes of levels that are never compressed.
    pub levels: i32,
    /// Bytes of the header itself.
    pub len: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PageKind {
    Data,
    Dictionary,
    /// An index, which is not read.
    #[default]
    Other,
}

impl PageHeader {
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut numbers = Vec::new();
        let mut thrift = Thrift::new(bytes);
        thrift.structure(&PAGE, 0, &mut |name, field, number| numbers.push((name, field, number)))?;
        let number = |name: Name, field: i64| {
            let mut all = numbers.iter().rev().filter(|number| (number.0, number.1) == (name, field));
            all.next().map_or(0, |number| number.2)
        };
        // A header may hold those of several kinds: the type says which one counts.
        let (kind, about, encoding) = match number(Name::Page, 1) {
            0 => (PageKind::Data, Name::Data, 2),
            2 => (PageKind::Dictionary, Name::Dictionary, 2),
            3 => (PageKind::Data, Name::DataV2, 4),
            _ => (PageKind::Other, Name::Other, 0),
        };
        Some(Self {
            kind,
            decompressed: number(Name::Page, 2),
            compressed: number(Name::Page, 3),
            values: number(about, 1),
            encoding: number(about, encoding),
            levels: number(Name::DataV2, 5).checked_add(number(Name::DataV2, 6))?,
            len: thrift.at as u64,
        })
    }
}

/// Checks that the schema in a footer is a tree of bounded depth with all the children that it claims: the parquet crate
/// takes memory for what is claimed, and calls itself for every level.
pub(super) fn check_schema(footer: &[u8]) -> Result<(), &'static str> {
    let mut thrift = Thrift::new(footer);
    let mut last = 0;
    // Writers put the version first, and then the schema.
    while let Some(Some((field, kind))) = thrift.field(last) {
        match (field, kind) {
            (2, LIST) => return tree(&mut thrift).unwrap_or(Err("its schema is cut short")),
            (1, I32) if thrift.signed().is_some() => last = field,
            _ => break,
        }
    }
    Err("it does not begin with a version and a schema")
}

fn tree(thrift: &mut Thrift<'_>) -> Option<Result<(), &'static str>> {
    let (STRUCT, count) = thrift.list()? else { return None };
    // How many children are still to come, for every group that is open.
    let mut open: Vec<u64> = Vec::new();
    for at in 0..count {
        let mut children = 0;
        thrift.structure(&ELEMENT, 0, &mut |name, field, number| {
            if (name, field) == (Name::Element, 5) {
                children = number;
            }
        })?;
        let children = u64::try_from(children).ok()?;
        while open.last() == Some(&0) {
            open.pop();
        }
        if let Some(left) = open.last_mut() {
            *left -= 1;
        }
        if children > count - at - 1 {
            return Some(Err("a group of its schema claims more fields than there are"));
        }
        // The root counts as a group.
        if children > 0 && open.len() > SCHEMA_DEPTH_MAX {
            return Some(Err("its schema is too deep"));
        }
        if children > 0 {
            open.push(children);
        }
    }
    Some(Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_sizes_of_a_page_header() {
        // type 0, decompressed 100, compressed 60, crc, then a data page header: 7 values, encoding, a struct of statistics.
        let header = [
            0x15, 0x00, 0x15, 0xC8, 0x01, 0x15, 0x78, 0x15, 0x02, 0x1C, 0x15, 0x0E, 0x15, 0x00, 0x15, 0x06, 0x15, 0x06,
            0x1C, 0x18, 0x02, 0xAA, 0xBB, 0x00, 0x00, 0x00,
        ];
        let read = PageHeader::parse(&header).unwrap();
        let (kind, len) = (PageKind::Data, header.len() as u64);
        let wanted = PageHeader { kind, decompressed: 100, compressed: 60, values: 7, len, ..PageHeader::default() };
        assert_eq!(read, wanted);
        for end in 0..header.len() {
            assert_eq!(PageHeader::parse(&header[..end]), None, "cut at {end}");
        }
    }

    #[test]
    fn a_known_field_of_another_type_is_refused() {
        // The type of the page as 64 bits, the sizes as a list, a data page header as bytes.
        for header in [&[0x16, 0x00, 0x00][..], &[0x15, 0x00, 0x19, 0x15, 0x00, 0x00], &[0x58, 0x01, 0x00, 0x00]] {
            assert_eq!(PageHeader::parse(header), None, "{header:?}");
        }
    }

    #[test]
    fn of_two_headers_the_type_chooses_one() {
        // A data page of 7 values, with a header of the second version that says 0.
        let header = [0x15, 0x00, 0x15, 0x08, 0x15, 0x08, 0x2C, 0x15, 0x0E, 0x00, 0x3C, 0x15, 0x00, 0x00, 0x00];
        assert_eq!(PageHeader::parse(&header).unwrap().values, 7);
    }

    #[test]
    fn depth_and_lengths_are_bounded() {
        assert_eq!(PageHeader::parse(&[0x1C; 4096]), None);
        let long = [0x18, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01, 0x00];
        assert_eq!(PageHeader::parse(&long), None);
        assert_eq!(PageHeader::parse(&[0x19, 0xF1, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F]), None);
    }

    /// A footer with the schema elements of these numbers of children.
    fn footer(children: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x15, 0x02, 0x19, 0xFC, children.len() as u8];
        for count in children {
            bytes.extend([0x48, 0x01, b'g', 0x15, count * 2, 0x00]);
        }
        bytes
    }

    #[test]
    fn the_tree_of_a_schema_is_bounded() {
        assert_eq!(check_schema(&footer(&[2, 1, 0, 0])), Ok(()));
        assert_eq!(
            check_schema(&footer(&[2, 3, 0, 0])),
            Err("a group of its schema claims more fields than there are")
        );
        let deep = |groups: usize| footer(&[vec![1; groups + 1], vec![0]].concat());
        assert_eq!(check_schema(&deep(SCHEMA_DEPTH_MAX)), Ok(()));
        assert_eq!(check_schema(&deep(SCHEMA_DEPTH_MAX + 1)), Err("its schema is too deep"));
        let whole = footer(&[1, 0]);
        for end in 0..whole.len() {
            assert!(check_schema(&whole[..end]).is_err(), "cut at {end}");
        }
        // The number of children as 64 bits.
        assert_eq!(check_schema(&[0x15, 0x02, 0x19, 0x1C, 0x56, 0x02, 0x00]), Err("its schema is cut short"));
    }
}
