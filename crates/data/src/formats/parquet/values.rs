//! Values of Arrow arrays as numbers, text and bytes.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef};
use arrow_schema::DataType;
use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Numbers {
    Int,
    Real,
}

/// Which numbers a type holds, if it holds numbers.
pub(super) fn numbers(kind: &DataType) -> Option<Numbers> {
    match kind {
        DataType::Boolean => Some(Numbers::Int),
        kind if kind.is_integer() => Some(Numbers::Int),
        DataType::Float16 | DataType::Float32 | DataType::Float64 => Some(Numbers::Real),
        _ => None,
    }
}

/// A type in a few words: nested ones would fill a screen.
pub(super) fn short(kind: &DataType) -> String {
    let text = kind.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn check_range(array: &dyn Array, range: &Range<usize>) -> Result<(), String> {
    if range.end > array.len() || range.start > range.end {
        return Err(format!("elements {} to {} are asked for, of {}", range.start, range.end, array.len()));
    }
    match array.null_count() > 0 && range.clone().any(|at| array.is_null(at)) {
        true => Err("a null stands inside a list".into()),
        false => Ok(()),
    }
}

/// Appends elements of an array of whole numbers or booleans.
pub(super) fn extend_ints(array: &ArrayRef, range: Range<usize>, out: &mut Vec<i64>) -> Result<(), String> {
    check_range(array, &range)?;
    macro_rules! extend {
        ($kind:ty) => {
            match array.as_primitive_opt::<$kind>() {
                Some(array) => out.extend(array.values()[range].iter().map(|value| i64::from(*value))),
                None => return Err("it is not of the type that the file names".into()),
            }
        };
    }
    match array.data_type() {
        DataType::Boolean => {
            let array = array.as_boolean_opt().ok_or("it is not of the type that the file names")?;
            out.extend(range.map(|at| i64::from(array.value(at))));
        }
        DataType::Int8 => extend!(Int8Type),
        DataType::Int16 => extend!(Int16Type),
        DataType::Int32 => extend!(Int32Type),
        DataType::Int64 => extend!(Int64Type),
        DataType::UInt8 => extend!(UInt8Type),
        DataType::UInt16 => extend!(UInt16Type),
        DataType::UInt32 => extend!(UInt32Type),
        DataType::UInt64 => {
            let array = array.as_primitive_opt::<UInt64Type>().ok_or("it is not of the type that the file names")?;
            for value in &array.values()[range] {
                out.push(i64::try_from(*value).map_err(|_| format!("{value} is larger than {}", i64::MAX))?);
            }
        }
        other => return Err(format!("it has the type {}", short(other))),
    }
    Ok(())
}

/// Appends elements of an array of real numbers.
pub(super) fn extend_reals(array: &ArrayRef, range: Range<usize>, out: &mut Vec<f32>) -> Result<(), String> {
    check_range(array, &range)?;
    macro_rules! extend {
        ($kind:ty, $convert:expr) => {
            match array.as_primitive_opt::<$kind>() {
                Some(array) => out.extend(array.values()[range].iter().map($convert)),
                None => return Err("it is not of the type that the file names".into()),
            }
        };
    }
    match array.data_type() {
        DataType::Float16 => extend!(Float16Type, |value| value.to_f32()),
        DataType::Float32 => extend!(Float32Type, |value| *value),
        DataType::Float64 => extend!(Float64Type, |value| *value as f32),
        other => return Err(format!("it has the type {}", short(other))),
    }
    Ok(())
}

/// The array of a list's items and the range of those of one row.
fn list_items(array: &ArrayRef, row: usize) -> Option<(&ArrayRef, Range<usize>)> {
    let range = |start: i64, end: i64| Some(usize::try_from(start).ok()?..usize::try_from(end).ok()?);
    if let Some(list) = array.as_list_opt::<i32>() {
        let offsets = list.value_offsets();
        return Some((list.values(), range((*offsets.get(row)?).into(), (*offsets.get(row + 1)?).into())?));
    }
    if let Some(list) = array.as_list_opt::<i64>() {
        let offsets = list.value_offsets();
        return Some((list.values(), range(*offsets.get(row)?, *offsets.get(row + 1)?)?));
    }
    let list = array.as_fixed_size_list_opt()?;
    let start = list.value_offset_at(row);
    Some((list.values(), start..start.checked_add(usize::try_from(list.value_length()).ok()?)?))
}

fn is_list(array: &ArrayRef) -> bool {
    matches!(array.data_type(), DataType::List(_) | DataType::LargeList(_) | DataType::FixedSizeList(..))
}

/// The sizes of the lists of one row: of the first list at every depth.
pub(super) fn shape(array: &ArrayRef, row: usize) -> Result<Vec<usize>, String> {
    let (mut array, mut row, mut shape) = (array, row, Vec::new());
    while is_list(array) {
        let (items, range) = list_items(array, row).ok_or("a list has no items")?;
        shape.push(range.len());
        if range.is_empty() && is_list(items) {
            return Err("its first list is empty".into());
        }
        (array, row) = (items, range.start);
    }
    Ok(shape)
}

/// The numbers of one row's lists, which must have this shape.
pub(super) fn items(array: &ArrayRef, row: usize, shape: &[usize]) -> Result<(ArrayRef, Range<usize>), String> {
    let (mut array, mut rows) = (array, row..row + 1);
    for (depth, size) in shape.iter().enumerate() {
        let (start, mut end) = match rows.is_empty() {
            true => (0, 0),
            false => {
                let (_, first) = list_items(array, rows.start).ok_or("a list is expected")?;
                (first.start, first.start)
            }
        };
        let mut below = None;
        for row in rows {
            if array.is_null(row) {
                return Err("a null stands inside a list".into());
            }
            let (items, range) = list_items(array, row).ok_or("a list is expected")?;
            if range.len() != *size {
                let found = range.len();
                let wanted = format!("a list of {found} values stands where the first record has {size}");
                return Err(if depth == 0 { wanted } else { format!("{wanted} (depth {depth})") });
            }
            if range.start != end {
                return Err("its lists do not follow each other".into());
            }
            (end, below) = (range.end, Some(items));
        }
        rows = start..end;
        match below {
            Some(items) => array = items,
            None => return Err("a list is expected".into()),
        }
    }
    Ok((array.clone(), rows))
}

pub(super) fn text(array: &ArrayRef, row: usize) -> Option<&str> {
    match array.data_type() {
        DataType::Utf8 => Some(array.as_string_opt::<i32>()?.value(row)),
        DataType::LargeUtf8 => Some(array.as_string_opt::<i64>()?.value(row)),
        DataType::Utf8View => Some(array.as_string_view_opt()?.value(row)),
        DataType::Dictionary(..) => {
            let dictionary = array.as_any_dictionary_opt()?;
            let keys = dictionary.keys();
            let mut key = Vec::new();
            // Keys are an array of their own kind of whole numbers.
            extend_ints(&arrow_array::make_array(keys.to_data()), row..row + 1, &mut key).ok()?;
            let at = usize::try_from(*key.first()?).ok().filter(|at| *at < dictionary.values().len())?;
            text(dictionary.values(), at)
        }
        _ => None,
    }
}

pub(super) fn bytes(array: &ArrayRef, row: usize) -> Option<&[u8]> {
    match array.data_type() {
        DataType::Binary => Some(array.as_binary_opt::<i32>()?.value(row)),
        DataType::LargeBinary => Some(array.as_binary_opt::<i64>()?.value(row)),
        DataType::BinaryView => Some(array.as_binary_view_opt()?.value(row)),
        DataType::FixedSizeBinary(_) => Some(array.as_fixed_size_binary_opt()?.value(row)),
        _ => None,
    }
}
