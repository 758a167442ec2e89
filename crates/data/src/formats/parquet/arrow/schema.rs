//! The schema of an Arrow file: the types of its columns, and how each is laid out in a batch.
//! The numbers of fields and types are those of `Schema.fbs` in the Arrow format.

use super::super::table::{Field, Kind, Number, SCHEMA_DEPTH_MAX, Schema};
use super::flatbuffer::{Broken, Table};
use std::borrow::Cow;
use std::collections::HashMap;

/// What the fields of a schema may take together, at so much for each, and its names and metadata. Fields may share what they
/// point to, so a small file can claim a huge schema.
const SIZE_MAX: usize = 1 << 26;
const FIELD_SIZE: usize = 64;
/// Of the name of a time zone.
const ZONE_BYTES_SHOWN: usize = 40;

/// How a type is laid out: a node in a batch says its length, then come its buffers, then its children.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub form: Form,
    pub children: Vec<Self>,
}

/// The buffers of a type. All begin with one that says which values are there, but for `Null`, which has none at all, and for
/// `Runs` and `Union`, which have it only in version 4.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Null,
    Runs,
    /// One buffer of values.
    Plain,
    /// Offsets of four or eight bytes, and what they point into.
    Joined {
        large: bool,
    },
    /// Views, and as many buffers as the batch says.
    Views,
    List {
        large: bool,
    },
    /// Offsets and sizes.
    ListView,
    FixedList,
    Struct,
    Union {
        dense: bool,
    },
    /// Keys. The values come with other messages, by this number.
    Dictionary {
        id: i64,
        values: Box<Layout>,
    },
}

/// Reads a schema. What it may still take.
struct Walk {
    left: usize,
}

impl Walk {
    fn take(&mut self, size: usize) -> Result<(), Broken> {
        self.left = self.left.checked_sub(size).ok_or("its schema is too large")?;
        Ok(())
    }

    fn field(&mut self, table: Table<'_>, depth: usize) -> Result<(Field, Layout), Broken> {
        let name = table.text(0)?;
        self.take(FIELD_SIZE + name.len())?;
        if depth >= SCHEMA_DEPTH_MAX {
            return Err("its schema is too deep");
        }
        let (mut fields, mut children) = (Vec::new(), Vec::new());
        for child in table.tables(5)? {
            let (field, layout) = self.field(child?, depth + 1)?;
            fields.push(field);
            children.push(layout);
        }
        let (mut kind, form) = kind(table, fields)?;
        let mut layout = Layout { form, children };
        if let Some(dictionary) = table.table(4)? {
            let keys = dictionary.table(1)?.map_or(Ok(Number::Int { bits: 32, signed: true }), int)?;
            kind = Kind::Dictionary(keys, Box::new(kind));
            let form = Form::Dictionary { id: dictionary.long(0)?, values: Box::new(layout) };
            layout = Layout { form, children: Vec::new() };
        }
        Ok((Field { name: name.into(), nullable: table.byte(1)? != 0, kind }, layout))
    }
}

/// Reads a schema.
pub(super) fn schema(table: Table<'_>) -> Result<(Schema, Vec<Layout>), Broken> {
    if table.short(0, 0)? != 0 {
        return Err("its numbers have the byte order of another machine");
    }
    let mut walk = Walk { left: SIZE_MAX };
    let (mut fields, mut layouts) = (Vec::new(), Vec::new());
    for field in table.tables(1)? {
        let (field, layout) = walk.field(field?, 0)?;
        fields.push(field);
        layouts.push(layout);
    }
    let mut metadata = HashMap::new();
    for pair in table.tables(2)? {
        let pair = pair?;
        let (key, value) = (pair.text(0)?, pair.text(1)?);
        walk.take(FIELD_SIZE + key.len() + value.len())?;
        metadata.insert(key.into(), value.into());
    }
    Ok((Schema { fields, metadata }, layouts))
}

fn int(table: Table<'_>) -> Result<Number, Broken> {
    match table.int(0, 0)? {
        bits @ (8 | 16 | 32 | 64) => Ok(Number::Int { bits: bits as u8, signed: table.byte(1)? != 0 }),
        _ => Err("unsupported integer width"),
    }
}

fn time_unit(unit: i16) -> &'static str {
    match unit {
        0 => "s",
        1 => "ms",
        2 => "µs",
        _ => "ns",
    }
}

/// The time zone of a timestamp. Many fields can share a long one: only its beginning is read.
fn zone(timestamp: Table<'_>) -> Result<Cow<'_, str>, Broken> {
    let zone = timestamp.structs::<1>(1)?.as_flattened();
    Ok(String::from_utf8_lossy(&zone[..zone.len().min(ZONE_BYTES_SHOWN)]))
}

fn size(size: i32) -> Result<usize, Broken> {
    usize::try_from(size).map_err(|_| "a type has a negative size")
}

fn only_child(fields: Vec<Field>) -> Result<Box<Field>, Broken> {
    let [item] = <[Field; 1]>::try_from(fields).map_err(|_| "a list must have exactly one child")?;
    Ok(Box::new(item))
}

/// The type of a field with these children.
fn kind(field: Table<'_>, children: Vec<Field>) -> Result<(Kind, Form), Broken> {
    let named = |name: String, form: Form| Ok((Kind::Other(name), form));
    let details = field.table(3)?;
    let details = || details.ok_or("a field has no type");
    Ok(match field.byte(2)? {
        1 => (Kind::Other("Null".into()), Form::Null),
        2 => (Kind::Number(int(details()?)?), Form::Plain),
        3 => {
            let bits = match details()?.short(0, 0)? {
                0 => 16,
                1 => 32,
                2 => 64,
                _ => return Err("unsupported floating-point width"),
            };
            (Kind::Number(Number::Float { bits }), Form::Plain)
        }
        4 => (Kind::Bytes, Form::Joined { large: false }),
        5 => (Kind::Text, Form::Joined { large: false }),
        6 => (Kind::Bool, Form::Plain),
        7 => {
            let (precision, scale, bits) = (details()?.int(0, 0)?, details()?.int(1, 0)?, details()?.int(2, 128)?);
            return named(format!("Decimal{bits}({precision}, {scale})"), Form::Plain);
        }
        8 => return named(if details()?.short(0, 1)? == 0 { "Date32" } else { "Date64" }.into(), Form::Plain),
        9 => {
            let (unit, bits) = (details()?.short(0, 1)?, details()?.int(1, 32)?);
            return named(format!("Time{bits}({})", time_unit(unit)), Form::Plain);
        }
        10 => {
            let (unit, zone) = (time_unit(details()?.short(0, 0)?), zone(details()?)?);
            let name =
                if zone.is_empty() { format!("Timestamp({unit})") } else { format!("Timestamp({unit}, {zone:?})") };
            return named(name, Form::Plain);
        }
        11 => {
            let unit = ["YearMonth", "DayTime", "MonthDayNano"].get(details()?.short(0, 0)? as usize);
            return named(format!("Interval({})", unit.copied().unwrap_or("?")), Form::Plain);
        }
        // Of a duration Parquet files have only the number: both are read so.
        18 => (Kind::Number(Number::Int { bits: 64, signed: true }), Form::Plain),
        12 => (Kind::List(only_child(children)?), Form::List { large: false }),
        21 => (Kind::List(only_child(children)?), Form::List { large: true }),
        25 => return named("ListView".into(), Form::ListView),
        26 => return named("LargeListView".into(), Form::ListView),
        16 => (Kind::FixedList(only_child(children)?, size(details()?.int(0, 0)?)?), Form::FixedList),
        17 => return named("Map".into(), Form::List { large: false }),
        13 => (Kind::Struct(children), Form::Struct),
        14 => {
            let dense = details()?.short(0, 0)? == 1;
            return named(format!("Union({})", if dense { "Dense" } else { "Sparse" }), Form::Union { dense });
        }
        15 => (Kind::FixedBytes(size(details()?.int(0, 0)?)?), Form::Plain),
        19 => (Kind::Bytes, Form::Joined { large: true }),
        20 => (Kind::Text, Form::Joined { large: true }),
        22 => return named("RunEndEncoded".into(), Form::Runs),
        23 => (Kind::Bytes, Form::Views),
        24 => (Kind::Text, Form::Views),
        _ => return Err("unknown type of a field"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A flatbuffer of a schema with one field, which has two children, which are the same, and so on for `depth` fields.
    fn shared(depth: usize) -> Vec<u8> {
        // The schema's vtable, of fields 0 and 1, and its table, with the distance to the vector of fields.
        let mut bytes = vec![12, 0, 0, 0];
        bytes.extend([8, 0, 8, 0, 0, 0, 4, 0]);
        bytes.extend(8_i32.to_le_bytes());
        bytes.extend(4_u32.to_le_bytes());
        bytes.extend([1_u32, 4].iter().flat_map(|word| word.to_le_bytes()));
        for level in 0..depth {
            // A field of the type Struct with children, if there is one more.
            let table = bytes.len();
            bytes.extend((-12_i32).to_le_bytes());
            bytes.extend([13, 0, 0, 0]);
            bytes.extend(24_u32.to_le_bytes());
            let children = if level + 1 < depth { 8_u16 } else { 0 };
            for word in [16_u16, 12, 0, 0, 4, 0, 0, children] {
                bytes.extend(word.to_le_bytes());
            }
            bytes.extend([0; 4]);
            assert_eq!(bytes.len(), table + 32);
            bytes.extend([2_u32, 8, 4].iter().flat_map(|word| word.to_le_bytes()));
        }
        bytes
    }

    #[test]
    fn of_a_long_time_zone_only_the_beginning_is_read() {
        // The vtable of a field of type 10 and its table; that of the type, with a zone, and its table.
        let mut bytes = Vec::new();
        bytes.extend(16_u32.to_le_bytes());
        bytes.extend([12_u16, 12, 0, 0, 4, 8].iter().flat_map(|word| word.to_le_bytes()));
        bytes.extend(12_i32.to_le_bytes());
        bytes.extend([10, 0, 0, 0]);
        bytes.extend(12_u32.to_le_bytes());
        bytes.extend([8_u16, 8, 0, 4].iter().flat_map(|word| word.to_le_bytes()));
        bytes.extend([8_u32, 4, 1 << 20].iter().flat_map(|word| word.to_le_bytes()));
        // What follows is no text.
        bytes.extend([vec![b'A'; ZONE_BYTES_SHOWN], vec![0xFF; (1 << 20) - ZONE_BYTES_SHOWN]].concat());
        let (kind, _) = kind(Table::root(&bytes).unwrap(), Vec::new()).unwrap();
        assert_eq!(kind.to_string(), format!("Timestamp(s, \"{}\")", "A".repeat(ZONE_BYTES_SHOWN)));
    }

    #[test]
    fn fields_that_share_their_children_are_bounded() {
        let (few, _) = schema(Table::root(&shared(3)).unwrap()).unwrap();
        let name = "Struct(\"\": non-null Struct(\"\": non-null Struct(), \"\": non-null Struct()), ";
        assert!(few.fields[0].kind.to_string().starts_with(name), "{}", few.fields[0].kind);
        assert_eq!(schema(Table::root(&shared(40)).unwrap()).err(), Some("its schema is too large"));
        assert_eq!(schema(Table::root(&shared(SCHEMA_DEPTH_MAX + 1)).unwrap()).err(), Some("its schema is too deep"));
    }
}
