//! From a record to a sample: images are decoded, columns of numbers joined, targets looked up.

use super::lookup::{Lookup, NameMap, listed, shown, whole_number};
use super::part::Places;
use crate::error::ReadError;
use crate::image::{self, Pixels};
use crate::record::{Record, RecordValue};
use crate::sample::{Form, Sample, TableColumn, Value, ValueForm};
use kolo_graph::field::IGNORED;

/// How records become samples.
#[derive(Clone, Debug)]
pub(crate) struct Assembly {
    pub input: Input,
    pub target: Target,
    /// The column that holds it.
    pub target_name: Option<String>,
    /// Of a classifier whose classes have names.
    pub class_names: Option<Vec<String>>,
    /// What stands in a target of several indices for one that does not count.
    pub ignore: i64,
    /// A target that makes no sense is none, as of samples whose target is still unknown.
    pub target_may_lack: bool,
}

#[derive(Clone, Debug)]
pub(crate) enum Input {
    /// An encoded image; `size`, height and width, if all must have it.
    Image {
        channels: usize,
        size: Option<(usize, usize)>,
    },
    /// Unsigned bytes of this shape: channels, height, width.
    Pixels {
        shape: [usize; 3],
    },
    Tokens {
        len: usize,
        classes: usize,
    },
    Table {
        columns: Vec<InputColumn>,
        shape: Vec<usize>,
    },
    /// So many rows of a table, one after the other.
    Windows {
        columns: Vec<InputColumn>,
        past: usize,
    },
}

impl Input {
    /// Those of a table.
    pub fn columns(&self) -> &[InputColumn] {
        match self {
            Input::Table { columns, .. } | Input::Windows { columns, .. } => columns,
            _ => &[],
        }
    }
}

/// One column of numbers, or of names that stand for numbers.
#[derive(Clone, Debug)]
pub(crate) struct InputColumn {
    pub name: String,
    pub elements: usize,
    pub categories: Option<Lookup>,
    /// What stands for missing values.
    pub fill: Option<Vec<f32>>,
}

#[derive(Clone, Debug)]
pub(crate) enum Target {
    None,
    /// The token after each of the input's.
    Next,
    /// An index for each of several places.
    Tokens {
        shape: Vec<usize>,
        classes: usize,
    },
    Class {
        lookup: Lookup,
        classes: usize,
    },
    Reals {
        shape: Vec<usize>,
    },
}

impl Assembly {
    /// What the samples look like before any transform.
    pub fn form(&self) -> Form {
        let x = match &self.input {
            Input::Image { channels, size } => ValueForm::Image {
                channels: *channels,
                height: size.map(|size| size.0),
                width: size.map(|size| size.1),
            },
            Input::Pixels { shape: [channels, height, width] } => {
                ValueForm::Image { channels: *channels, height: Some(*height), width: Some(*width) }
            }
            Input::Tokens { len, classes } => {
                let len = if matches!(self.target, Target::Next) { len - 1 } else { *len };
                ValueForm::Indices { shape: vec![len], classes: *classes }
            }
            Input::Table { columns, shape } => {
                let column = |column: &InputColumn| TableColumn {
                    name: column.name.clone(),
                    elements: column.elements,
                    categories: column.categories.as_ref().map(Lookup::len),
                };
                ValueForm::Reals { shape: shape.clone(), columns: columns.iter().map(column).collect() }
            }
            Input::Windows { columns, past } => {
                let number = |column: &InputColumn| TableColumn::number(&column.name);
                let row = || columns.iter().map(number);
                let columns = (0..*past).flat_map(|_| row()).collect();
                ValueForm::Reals { shape: vec![*past, row().len()], columns }
            }
        };
        // The rows of one column to come.
        let future = |count: usize| match (&self.input, &self.target_name) {
            (Input::Windows { .. }, Some(name)) => vec![TableColumn::number(name); count],
            _ => Vec::new(),
        };
        let y = match &self.target {
            Target::None => None,
            Target::Next => Some(x.clone()),
            Target::Tokens { shape, classes } => Some(ValueForm::Indices { shape: shape.clone(), classes: *classes }),
            Target::Class { classes, .. } => Some(ValueForm::Indices { shape: vec![], classes: *classes }),
            Target::Reals { shape } => {
                let columns = future(shape.iter().product());
                Some(ValueForm::Reals { shape: shape.clone(), columns })
            }
        };
        Form { x, y }
    }

    /// Makes a sample of a record.
    pub fn assemble(&self, places: &Places, record: &Record, sample: &mut Sample) -> Result<(), ReadError> {
        match &self.input {
            Input::Image { channels, size } => {
                decode(record.value(places.inputs[0]), *channels, *size, sample.x.set_pixels())?;
            }
            Input::Pixels { shape } => interleave(record.value(places.inputs[0]), *shape, sample.x.set_pixels())?,
            Input::Tokens { len, classes } => {
                indices(record.value(places.inputs[0]), (*len, *classes), None, &mut sample.x)?;
            }
            Input::Windows { .. } => {}
            Input::Table { columns, .. } => {
                let reals = sample.x.set_reals();
                for (number, (column, at)) in columns.iter().zip(&places.inputs).enumerate() {
                    let names = places.input_names.get(number).and_then(Option::as_ref);
                    column.append(record.value(*at), names, reals)?;
                }
            }
        }
        if let Input::Windows { columns, past } = &self.input {
            let mut by_column = Vec::with_capacity(columns.len() * past);
            for (column, at) in columns.iter().zip(&places.inputs) {
                column.append(record.value(*at), None, &mut by_column)?;
            }
            let reals = sample.x.set_reals();
            reals.extend((0..*past).flat_map(|row| by_column[row..].iter().step_by(*past)));
        }
        match self.target(places, record, sample) {
            Err(_) if self.target_may_lack => {
                self.no_target(places, record, &mut sample.y);
                Ok(())
            }
            made => made,
        }
    }

    /// The target of a record, and its input only where that makes the target.
    pub fn target_alone(&self, places: &Places, record: &Record, sample: &mut Sample) -> Result<(), ReadError> {
        match self.target {
            Target::Next => self.assemble(places, record, sample),
            _ => self.target(places, record, sample),
        }
    }

    /// What stands for a target that is not known, in whole or in part.
    fn no_target(&self, places: &Places, record: &Record, y: &mut Value) {
        match &self.target {
            Target::None | Target::Next => {}
            Target::Tokens { shape, .. } => y.set_indices().resize(shape.iter().product(), IGNORED),
            Target::Class { .. } => y.set_indices().push(IGNORED),
            Target::Reals { shape } => {
                let known = places.target.and_then(|at| reals_of(record.value(at))).unwrap_or_default();
                let reals = y.set_reals();
                reals.extend(known);
                reals.resize(shape.iter().product(), f32::NAN);
            }
        }
    }

    fn target(&self, places: &Places, record: &Record, sample: &mut Sample) -> Result<(), ReadError> {
        let value = || places.target.map_or(&RecordValue::Missing, |at| record.value(at));
        match &self.target {
            Target::None => {}
            Target::Tokens { shape, .. } if places.target.is_none() => {
                sample.y.set_indices().resize(shape.iter().product(), IGNORED);
            }
            Target::Class { .. } if places.target.is_none() => sample.y.set_indices().push(IGNORED),
            Target::Reals { shape } if places.target.is_none() => {
                sample.y.set_reals().resize(shape.iter().product(), 0.0);
            }
            Target::Next => {
                let Sample { x, y } = sample;
                y.set_indices().extend_from_slice(&x.indices[1..]);
                x.indices.pop();
            }
            Target::Tokens { shape, classes } => {
                let size = (shape.iter().product(), *classes);
                indices(value(), size, Some(self.ignore), &mut sample.y)?;
            }
            Target::Class { lookup, .. } => {
                let class = match (&places.class_of, value()) {
                    (Some(class_of), value @ RecordValue::Ints(_)) => class_of.class(value),
                    (_, value) => lookup.class(value),
                };
                sample
                    .y
                    .set_indices()
                    .push(class.map_err(|message| ReadError::new(message, self.class_hint(value())))?);
            }
            Target::Reals { shape } => {
                let target = ColumnOfNumbers {
                    name: self.target_name.as_deref().unwrap_or("target"),
                    elements: shape.iter().product(),
                    fill: None,
                    missing: "correct the file, or leave such records out with `on_error = \"skip\"`",
                };
                target.append(value(), sample.y.set_reals())?;
            }
        }
        Ok(())
    }

    /// What to do about a value that stands for no class.
    fn class_hint(&self, value: &RecordValue) -> String {
        match (value, &self.class_names) {
            (RecordValue::Missing, _) => {
                "correct the file, or leave such records out with `on_error = \"skip\"`".into()
            }
            (RecordValue::Reals(values), _) if values.len() != 1 => ONE_CLASS_HINT.into(),
            (RecordValue::Ints(values), _) if values.len() != 1 => ONE_CLASS_HINT.into(),
            (_, Some(names)) => {
                let remedy = "name all classes: `classes = [\"a\", \"b\"]`, or correct the file";
                format!("{remedy}; the classes are {}", listed(names))
            }
            (RecordValue::Text(_), None) => "name the classes: `classes = [\"a\", \"b\"]`, or correct the file".into(),
            _ => "name the classes: `classes = [\"a\", \"b\"]` or their number, or correct the file".into(),
        }
    }
}

impl InputColumn {
    /// Adds the numbers of this column; `names` are those that its values stand for, if the file has some of its own.
    fn append(&self, value: &RecordValue, names: Option<&NameMap>, reals: &mut Vec<f32>) -> Result<(), ReadError> {
        let numbers = ColumnOfNumbers {
            name: &self.name,
            elements: self.elements,
            fill: self.fill.as_deref(),
            missing: "write `missing = \"mean\"` or a number under [data], or `on_error = \"skip\"`",
        };
        let Some(categories) = &self.categories else { return numbers.append(value, reals) };
        match value {
            RecordValue::Missing => return numbers.fill_up(reals, reals.len()),
            RecordValue::Text(text) if text.trim().is_empty() => return numbers.fill_up(reals, reals.len()),
            _ => {}
        }
        let class = names.map_or_else(|| categories.class(value), |names| names.class(value));
        let class = class.map_err(|message| {
            let hint = format!("it was not in the training samples, which have {}", categories.described());
            ReadError::new(format!("column \"{}\": {message}", self.name), hint)
        })?;
        reals.push(class as f32);
        Ok(())
    }
}

const ONE_CLASS_HINT: &str =
    "a class is one number or text; name another `target`, or train on numbers with `task = \"regression\"`";

/// A column whose values are numbers.
struct ColumnOfNumbers<'c> {
    name: &'c str,
    elements: usize,
    /// What stands for missing values.
    fill: Option<&'c [f32]>,
    /// What to do about a missing value where nothing stands for it.
    missing: &'static str,
}

impl ColumnOfNumbers<'_> {
    fn append(&self, value: &RecordValue, reals: &mut Vec<f32>) -> Result<(), ReadError> {
        let start = reals.len();
        match value {
            RecordValue::Missing => return self.fill_up(reals, start),
            RecordValue::Reals(values) => reals.extend_from_slice(values),
            RecordValue::Ints(values) => reals.extend(values.iter().map(|value| *value as f32)),
            RecordValue::Text(text) => match text.trim().parse() {
                Ok(number) => reals.push(number),
                Err(_) if text.trim().is_empty() => return self.fill_up(reals, start),
                Err(_) => {
                    let message = format!("column \"{}\" holds \"{}\", which is not a number", self.name, shown(text));
                    return Err(ReadError::new(message, "leave it out of `inputs`, or add a one_hot transform"));
                }
            },
            RecordValue::Bytes(bytes) => reals.extend(bytes.iter().map(|byte| f32::from(*byte))),
        }
        let found = reals.len() - start;
        if found != self.elements {
            let message = format!("column \"{}\" has {found} values, but {} are expected", self.name, self.elements);
            return Err(ReadError::new(message, "every record must have the same number of values"));
        }
        match reals[start..].iter().any(|value| value.is_nan()) {
            true => self.fill_up(reals, start),
            false => Ok(()),
        }
    }

    /// Puts what stands for missing values where there is none.
    fn fill_up(&self, reals: &mut Vec<f32>, start: usize) -> Result<(), ReadError> {
        let Some(fill) = self.fill else {
            return Err(ReadError::new(format!("column \"{}\" has no value", self.name), self.missing));
        };
        reals.resize(start + self.elements, f32::NAN);
        let missing = reals[start..].iter_mut().zip(fill).filter(|(value, _)| value.is_nan());
        missing.for_each(|(value, fill)| *value = *fill);
        Ok(())
    }
}

/// Whether a value of a table is missing, in whole or in part.
pub(crate) fn reals_of(value: &RecordValue) -> Option<Vec<f32>> {
    match value {
        RecordValue::Reals(values) => Some(values.clone()),
        RecordValue::Ints(values) => Some(values.iter().map(|value| *value as f32).collect()),
        RecordValue::Text(text) => text.trim().parse().ok().map(|value| vec![value]),
        RecordValue::Bytes(_) | RecordValue::Missing => None,
    }
}

/// Writes indices, so many of so many classes. `ignored` may stand among those of a target.
fn indices(
    value: &RecordValue,
    (count, classes): (usize, usize),
    ignored: Option<i64>,
    out: &mut Value,
) -> Result<(), ReadError> {
    let wrong = |message: String| ReadError::new(message, hint_of_indices(ignored));
    if *value == RecordValue::Missing {
        return Err(wrong("the indices are missing".into()));
    }
    let out = out.set_indices();
    let largest = each_index(value, ignored, &mut |index| out.push(index)).map_err(&wrong)?;
    match largest {
        _ if out.len() != count => Err(wrong(format!("there are {} indices, but {count} are expected", out.len()))),
        Some(index) if index as usize >= classes => {
            Err(wrong(format!("index {index} is out of range: indices are below {classes}")))
        }
        _ => Ok(()),
    }
}

/// Hands over each index of a value, [`IGNORED`] for those that do not count, and gives the largest.
pub(crate) fn each_index(
    value: &RecordValue,
    ignored: Option<i64>,
    take: &mut dyn FnMut(i32),
) -> Result<Option<i32>, String> {
    let mut largest = None;
    let mut next = |value: i64| match i32::try_from(value) {
        _ if Some(value) == ignored => {
            take(IGNORED);
            Ok(())
        }
        Ok(index @ 0..) => {
            largest = largest.max(Some(index));
            take(index);
            Ok(())
        }
        _ => Err(format!("has {value}, which is no index")),
    };
    match value {
        RecordValue::Ints(values) => values.iter().try_for_each(|value| next(*value))?,
        RecordValue::Reals(values) => values.iter().try_for_each(|value| next(whole_number(*value)?))?,
        RecordValue::Bytes(values) => values.iter().try_for_each(|value| next(i64::from(*value)))?,
        RecordValue::Text(_) | RecordValue::Missing => return Err("holds no numbers".into()),
    }
    Ok(largest)
}

/// What to do about indices that are wrong.
pub(crate) fn hint_of_indices(ignored: Option<i64>) -> String {
    match ignored {
        None => "correct the file, or make `data.vocab` larger".into(),
        Some(ignored) => format!(
            "correct the file, or give the right number of `data.classes`; {ignored} stands for what does not count, or \
             write another number: `ignore = -100`"
        ),
    }
}

fn decode(
    value: &RecordValue,
    channels: usize,
    size: Option<(usize, usize)>,
    out: &mut Pixels,
) -> Result<(), ReadError> {
    let RecordValue::Bytes(bytes) = value else {
        return Err(ReadError::new("the image is missing", "correct the file, or write `on_error = \"skip\"`"));
    };
    image::decode(bytes, out).map_err(|error| {
        ReadError::new(format!("the image cannot be decoded: {error}"), "copy it again, or write `on_error = \"skip\"`")
    })?;
    to_channels(out, channels);
    match size.filter(|size| *size != (out.height, out.width)) {
        None => Ok(()),
        Some((height, width)) => {
            let message = format!("the image is {}×{}, but the first is {width}×{height}", out.width, out.height);
            let hint = "add a transform: `{ kind = \"resize\", size = [224, 224] }`";
            Err(ReadError::new(message, hint))
        }
    }
}

/// Gives pixels this many channels, 1 or 3: grey is repeated, colour becomes its luminance, transparency is dropped.
pub(crate) fn to_channels(pixels: &mut Pixels, channels: usize) {
    if pixels.channels == channels || pixels.channels == 0 {
        return;
    }
    let (from, area) = (pixels.channels, pixels.height * pixels.width);
    let bytes = &mut pixels.bytes;
    if from < channels {
        bytes.resize(area * channels, 0);
        for at in (0..area).rev() {
            // Grey, perhaps with transparency: the first of each pixel.
            let grey = bytes[at * from];
            bytes[at * channels..(at + 1) * channels].fill(grey);
        }
    } else {
        for at in 0..area {
            let pixel = &bytes[at * from..(at + 1) * from];
            match (channels, from >= 3) {
                (1, true) => bytes[at] = luminance(pixel[0], pixel[1], pixel[2]),
                _ => bytes.copy_within(at * from..at * from + channels, at * channels),
            }
        }
        bytes.truncate(area * channels);
    }
    pixels.channels = channels;
}

/// The grey of a colour, as JPEG has it (ITU-R 601), in whole numbers.
pub(crate) fn luminance(red: u8, green: u8, blue: u8) -> u8 {
    ((19_595 * u32::from(red) + 38_470 * u32::from(green) + 7_471 * u32::from(blue) + 0x8000) >> 16) as u8
}

/// Bytes channel by channel to pixels.
fn interleave(value: &RecordValue, shape: [usize; 3], out: &mut Pixels) -> Result<(), ReadError> {
    let [channels, height, width] = shape;
    let RecordValue::Bytes(bytes) = value else {
        return Err(ReadError::new("the pixels are missing", "correct the file, or write `on_error = \"skip\"`"));
    };
    let area = height * width;
    if bytes.len() != channels * area {
        let message = format!("there are {} bytes of pixels, but {} are expected", bytes.len(), channels * area);
        return Err(ReadError::new(message, "copy or make the file again"));
    }
    (out.channels, out.height, out.width) = (channels, height, width);
    out.bytes.clear();
    out.bytes.resize(bytes.len(), 0);
    for (channel, plane) in bytes.chunks_exact(area.max(1)).enumerate() {
        out.bytes[channel..].iter_mut().step_by(channels).zip(plane).for_each(|(out, byte)| *out = *byte);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_are_added_and_dropped() {
        let with = |channels, bytes: &[u8], wanted| {
            let width = bytes.len() / channels;
            let mut pixels = Pixels { channels, height: 1, width, bytes: bytes.into() };
            to_channels(&mut pixels, wanted);
            assert_eq!((pixels.channels, pixels.bytes.len()), (wanted, width * wanted));
            pixels.bytes
        };
        assert_eq!(with(1, &[5, 9], 3), [5, 5, 5, 9, 9, 9]);
        assert_eq!(with(2, &[5, 0, 9, 1], 3), [5, 5, 5, 9, 9, 9]);
        assert_eq!(with(2, &[5, 0, 9, 1], 1), [5, 9]);
        assert_eq!(with(4, &[1, 2, 3, 4, 5, 6, 7, 8], 3), [1, 2, 3, 5, 6, 7]);
        assert_eq!(with(3, &[255, 255, 255, 0, 0, 0, 255, 0, 0], 1), [255, 0, 76]);
    }

    #[test]
    fn columns_join_and_missing_values_are_filled() {
        let column = |fill| InputColumn { name: "a".into(), elements: 2, categories: None, fill };
        let mut reals = vec![1.0];
        column(None).append(&RecordValue::Ints(vec![2, 3]), None, &mut reals).unwrap();
        let half = RecordValue::Reals(vec![f32::NAN, 5.0]);
        let error = column(None).append(&half, None, &mut reals).unwrap_err();
        assert_eq!(error.message, "column \"a\" has no value");
        reals.truncate(3);
        let filled = column(Some(vec![7.0, 8.0]));
        filled.append(&half, None, &mut reals).unwrap();
        filled.append(&RecordValue::Missing, None, &mut reals).unwrap();
        assert_eq!(reals, [1.0, 2.0, 3.0, 7.0, 5.0, 7.0, 8.0]);
        assert!(filled.append(&RecordValue::Reals(vec![1.0]), None, &mut reals).is_err());
        let mut pixels = Pixels::default();
        interleave(&RecordValue::Bytes(vec![1, 2, 3, 4, 5, 6]), [3, 1, 2], &mut pixels).unwrap();
        assert_eq!(pixels.bytes, [1, 3, 5, 2, 4, 6]);
    }
}
