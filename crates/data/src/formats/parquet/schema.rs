//! The schema of a Parquet file: from its tree of types to the types of columns, and the way from a column to the values that
//! are read of it.

use super::levels::ListLevel;
use super::table::{Field, Kind, Number, Schema};
use ::parquet::basic::{ConvertedType, LogicalType, Repetition, TimeUnit, Type as Physical};
use ::parquet::file::metadata::FileMetaData;
use ::parquet::schema::types::{BasicTypeInfo, Type};

/// The way from a column to its values: those of one leaf of the tree, whatever stands above it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ColumnPath {
    pub leaf: usize,
    pub kind: Kind,
    /// The definition level of a value that is not null.
    pub max_definition: i16,
    /// From outside.
    pub lists: Vec<ListLevel>,
    /// The least definition level at which the struct around an image's bytes is there.
    pub image: Option<i16>,
}

/// A type in the tree, with what its levels say.
struct Node {
    field: Field,
    /// The least definition level at which it is there.
    defined_at: i16,
    below: Below,
}

enum Below {
    Leaf(usize),
    List(Box<Node>),
    Struct(Vec<Node>),
    Unread,
}

/// Columns and metadata of a file, and the paths of the columns that can be read.
pub(super) fn schema(metadata: &FileMetaData) -> (Schema, Vec<Option<ColumnPath>>) {
    let (mut leaf, mut paths) = (0, Vec::new());
    let mut schema = Schema::default();
    for column in metadata.schema().get_fields() {
        let node = node(column, 0, &mut leaf);
        paths.push(path(&node));
        schema.fields.push(node.field);
    }
    let pairs = metadata.key_value_metadata().into_iter().flatten();
    schema.metadata = pairs.filter_map(|pair| Some((pair.key.clone(), pair.value.clone()?))).collect();
    (schema, paths)
}

/// The way to the values, if there is one that is read.
fn path(root: &Node) -> Option<ColumnPath> {
    let (mut node, mut lists, mut image) = (root, Vec::new(), None);
    loop {
        match &node.below {
            Below::Leaf(leaf) => {
                return Some(ColumnPath {
                    leaf: *leaf,
                    kind: node.field.kind.clone(),
                    max_definition: node.defined_at,
                    lists,
                    image,
                });
            }
            Below::List(item) => {
                lists.push(ListLevel { defined_at: node.defined_at, item: node.defined_at.saturating_add(1) });
                node = item;
            }
            Below::Struct(fields) if lists.is_empty() && image.is_none() => {
                image = Some(node.defined_at);
                node = fields.get(node.field.kind.image_bytes()?)?;
            }
            Below::Struct(_) | Below::Unread => return None,
        }
    }
}

fn repetition(kind: &Type) -> Repetition {
    let info = kind.get_basic_info();
    if info.has_repetition() { info.repetition() } else { Repetition::REQUIRED }
}

/// A type below something that is there at the level `above`.
fn node(kind: &Type, above: i16, leaf: &mut usize) -> Node {
    match repetition(kind) {
        Repetition::REQUIRED => bare(kind, above, false, leaf),
        Repetition::OPTIONAL => bare(kind, above.saturating_add(1), true, leaf),
        // A field that is repeated outside of a list is one: never null, and its items neither.
        Repetition::REPEATED => {
            let item = bare(kind, above.saturating_add(1), false, leaf);
            list_of(kind.name(), item, above, false)
        }
    }
}

fn list_of(name: &str, item: Node, defined_at: i16, nullable: bool) -> Node {
    let kind = Kind::List(Box::new(item.field.clone()));
    Node { field: Field { name: name.into(), nullable, kind }, defined_at, below: Below::List(Box::new(item)) }
}

/// A type that is there at the level `defined_at`, whatever its repetition.
fn bare(kind: &Type, defined_at: i16, nullable: bool, leaf: &mut usize) -> Node {
    let field = |kind_here: Kind| Field { name: kind.name().into(), nullable, kind: kind_here };
    if kind.is_primitive() {
        *leaf += 1;
        return Node { field: field(primitive(kind)), defined_at, below: Below::Leaf(*leaf - 1) };
    }
    match kind.get_basic_info().converted_type() {
        ConvertedType::LIST => list(kind, defined_at, nullable, leaf),
        ConvertedType::MAP | ConvertedType::MAP_KEY_VALUE => match kind.get_fields() {
            // A map without values is the list of its keys.
            [entries] if entries.is_group() && entries.get_fields().len() == 1 => {
                list(kind, defined_at, nullable, leaf)
            }
            _ => unread(kind, defined_at, nullable, leaf, "Map"),
        },
        _ if is_list(kind) => list(kind, defined_at, nullable, leaf),
        _ => structure(kind, defined_at, nullable, leaf),
    }
}

fn unread(kind: &Type, defined_at: i16, nullable: bool, leaf: &mut usize, name: &str) -> Node {
    // The leaves below count all the same.
    let below = structure(kind, defined_at, nullable, leaf);
    Node { field: Field { kind: Kind::Other(name.into()), ..below.field }, defined_at, below: Below::Unread }
}

fn structure(kind: &Type, defined_at: i16, nullable: bool, leaf: &mut usize) -> Node {
    let fields: Vec<Node> = kind.get_fields().iter().map(|field| node(field, defined_at, leaf)).collect();
    let kinds = Kind::Struct(fields.iter().map(|node| node.field.clone()).collect());
    Node { field: Field { name: kind.name().into(), nullable, kind: kinds }, defined_at, below: Below::Struct(fields) }
}

fn is_list(kind: &Type) -> bool {
    let info = kind.get_basic_info();
    match info.logical_type_ref() {
        Some(logical) => *logical == LogicalType::List,
        None => info.converted_type() == ConvertedType::LIST,
    }
}

/// A list by the rules of the Parquet format, with those for the files of old writers:
/// <https://github.com/apache/parquet-format/blob/master/LogicalTypes.md#lists>.
fn list(kind: &Type, defined_at: i16, nullable: bool, leaf: &mut usize) -> Node {
    let repeated = match kind.get_fields() {
        [repeated] if repetition(repeated) == Repetition::REPEATED => repeated,
        _ => return unread(kind, defined_at, nullable, leaf, "List"),
    };
    let above = defined_at.saturating_add(1);
    if repeated.is_primitive() {
        let item = bare(repeated, above, false, leaf);
        return list_of(kind.name(), item, defined_at, nullable);
    }
    let item = match repeated.get_fields() {
        [item] => {
            let old_name = repeated.name() == "array" || repeated.name() == format!("{}_tuple", kind.name());
            let is_repeated = repetition(item) == Repetition::REPEATED;
            match is_list(repeated) {
                true if is_repeated => list(repeated, above, false, leaf),
                // The group is the item, not a layer around it.
                false if is_repeated || old_name => structure(repeated, above, false, leaf),
                _ => node(item, above, leaf),
            }
        }
        _ => structure(repeated, above, false, leaf),
    };
    list_of(kind.name(), item, defined_at, nullable)
}

fn int(bits: u8, signed: bool) -> Kind {
    Kind::Number(Number::Int { bits, signed })
}

fn other(name: impl Into<String>) -> Kind {
    Kind::Other(name.into())
}

fn unit(unit: &TimeUnit) -> &'static str {
    match unit {
        TimeUnit::MILLIS => "ms",
        TimeUnit::MICROS => "µs",
        TimeUnit::NANOS => "ns",
    }
}

/// The type of a leaf. The new annotation counts; an old file has only the "converted" one.
fn primitive(kind: &Type) -> Kind {
    let Type::PrimitiveType { basic_info, physical_type, type_length, scale, precision } = kind else {
        return other("Null");
    };
    match (basic_info.logical_type_ref(), basic_info.converted_type()) {
        (Some(LogicalType::Unknown), _) => return other("Null"),
        (Some(LogicalType::Decimal(decimal)), _) => {
            return other(format!("Decimal({}, {})", decimal.precision, decimal.scale));
        }
        (None, ConvertedType::DECIMAL) => return other(format!("Decimal({precision}, {scale})")),
        _ => {}
    }
    match physical_type {
        Physical::BOOLEAN => Kind::Bool,
        Physical::INT32 => whole(basic_info, 32),
        Physical::INT64 => whole(basic_info, 64),
        Physical::INT96 => other("Timestamp(ns)"),
        Physical::FLOAT => Kind::Number(Number::Float { bits: 32 }),
        Physical::DOUBLE => Kind::Number(Number::Float { bits: 64 }),
        Physical::BYTE_ARRAY => match (basic_info.logical_type_ref(), basic_info.converted_type()) {
            (Some(LogicalType::String | LogicalType::Json | LogicalType::Enum), _)
            | (None, ConvertedType::UTF8 | ConvertedType::JSON | ConvertedType::ENUM) => Kind::Text,
            _ => Kind::Bytes,
        },
        Physical::FIXED_LEN_BYTE_ARRAY => {
            match (basic_info.logical_type_ref(), basic_info.converted_type(), usize::try_from(*type_length)) {
                (Some(LogicalType::Float16), _, Ok(2)) => Kind::Number(Number::Float { bits: 16 }),
                (None, ConvertedType::INTERVAL, _) => other("Interval(DayTime)"),
                (_, _, Ok(bytes)) if bytes > 0 => Kind::FixedBytes(bytes),
                _ => other(format!("FixedSizeBinary({type_length})")),
            }
        }
    }
}

/// The type of a leaf of whole numbers of 32 or 64 bits.
fn whole(info: &BasicTypeInfo, physical: u8) -> Kind {
    if let Some(logical) = info.logical_type_ref() {
        return match logical {
            LogicalType::Integer(number) => match (physical, number.bit_width) {
                (32, bits @ (8 | 16 | 32)) | (64, bits @ 64) => int(bits as u8, number.is_signed),
                (_, bits) => other(format!("Int{bits} in {physical} bits")),
            },
            LogicalType::Date => other("Date32"),
            LogicalType::Time(time) => other(format!("Time{physical}({})", unit(&time.unit))),
            LogicalType::Timestamp(time) if time.is_adjusted_to_u_t_c => {
                other(format!("Timestamp({}, \"UTC\")", unit(&time.unit)))
            }
            LogicalType::Timestamp(time) => other(format!("Timestamp({})", unit(&time.unit))),
            logical => other(format!("{logical:?}")),
        };
    }
    match (physical, info.converted_type()) {
        (bits, ConvertedType::NONE) => int(bits, true),
        (32, ConvertedType::INT_8) => int(8, true),
        (32, ConvertedType::INT_16) => int(16, true),
        (32, ConvertedType::INT_32) => int(32, true),
        (32, ConvertedType::UINT_8) => int(8, false),
        (32, ConvertedType::UINT_16) => int(16, false),
        (32, ConvertedType::UINT_32) => int(32, false),
        (64, ConvertedType::INT_64) => int(64, true),
        (64, ConvertedType::UINT_64) => int(64, false),
        (_, ConvertedType::DATE) => other("Date32"),
        (_, ConvertedType::TIME_MILLIS) => other("Time32(ms)"),
        (_, ConvertedType::TIME_MICROS) => other("Time64(µs)"),
        (_, ConvertedType::TIMESTAMP_MILLIS) => other("Timestamp(ms, \"UTC\")"),
        (_, ConvertedType::TIMESTAMP_MICROS) => other("Timestamp(µs, \"UTC\")"),
        (_, converted) => other(converted.to_string()),
    }
}

#[cfg(test)]
#[path = "schema_tests.rs"]
mod tests;
