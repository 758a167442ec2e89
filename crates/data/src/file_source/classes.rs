//! The classes of a target: named by the job, known to the file, or found by one scan.

use super::assembly::{Target, each_index, hint_of_indices};
use super::lookup::{Lookup, listed, whole_number};
use super::part::Part;
use super::types::{ColumnType, ColumnTypes, shape_of};
use crate::error::ReadError;
use crate::format::OpenError;
use crate::record::{RecordKind, RecordValue};
use kolo_graph::settings::{SIZE_MAX, Setting, SettingError, Settings};
use std::collections::BTreeSet;

/// Classes that one scan may find.
const CLASSES_MAX: usize = 100_000;
/// Whole numbers are classes if they are no more than this,
const CLASSES_FEW: usize = 20;
/// or if there are so many samples of each.
const SAMPLES_PER_CLASS: usize = 10;
/// What a job writes to predict numbers.
const REGRESSION: &str = "`task = \"regression\"`";
const CLASSIFICATION: &str = "`task = \"classification\"`";

/// What the values are, and their names if they have any.
pub(crate) type Found = (Target, Option<Vec<String>>);

/// The target in the column `at` of the first of some parts. What the job says comes first, then what the file knows, then a
/// scan; of indices in all parts, as any of them may have the largest.
pub(crate) fn find(
    parts: &[&Part],
    at: usize,
    types: &ColumnTypes,
    settings: &Settings,
    skips: bool,
) -> Result<Found, OpenError> {
    let part = parts[0];
    let task = settings.choice("task", &["auto", "classification", "regression"])?;
    let given = given(settings)?;
    let column = &part.reader.columns()[at];
    let named = types.of(column);
    let task = match (named, task) {
        (Some(ColumnType::Real), "classification") | (Some(ColumnType::Class), "regression") => {
            let message = format!("is \"{task}\", but `data.types` says otherwise of \"{}\", the target", column.name);
            return Err(settings.wrong("task", message, "leave one of the two out").into());
        }
        (Some(ColumnType::Real), _) => "regression",
        (Some(ColumnType::Class), _) => "classification",
        (_, task) => task,
    };
    let refuse = |message: String, hint: &str| -> OpenError {
        settings.wrong("target", format!("is \"{}\", {message}", column.name), hint).into()
    };
    let class = |lookup: Lookup, classes: usize| Target::Class { lookup, classes };
    let shape = shape_of(&column.kind);
    let are_indices = matches!(named, Some(ColumnType::Tokens | ColumnType::Mask));
    if task == "regression" && !are_indices {
        return match shape {
            // A model's output is a row of numbers, of one if need be.
            Some([]) => Ok((Target::Reals { shape: vec![1] }, None)),
            Some(shape) => Ok((Target::Reals { shape: shape.to_vec() }, None)),
            None => Err(refuse("which holds no numbers".into(), "name a column of numbers, or leave `task` out")),
        };
    }
    match (&column.kind, given) {
        (RecordKind::Int { shape, .. } | RecordKind::Real { shape }, given) if are_indices => {
            indices(parts, at, shape.clone(), given, types, settings, skips)
        }
        (RecordKind::Pixels { shape }, given) if are_indices => {
            // A plane of bytes has no channels.
            let shape = if shape[0] == 1 { shape[1..].to_vec() } else { shape.clone() };
            indices(parts, at, shape, given, types, settings, skips)
        }
        (RecordKind::Int { shape, classes: None }, None)
            if shape.iter().product::<usize>() != 1 && types.predicts_numbers() && task == "auto" =>
        {
            Ok((Target::Reals { shape: shape.clone() }, None))
        }
        (RecordKind::Int { shape, .. }, given) if shape.iter().product::<usize>() != 1 => {
            indices(parts, at, shape.clone(), given, types, settings, skips)
        }
        (RecordKind::Real { shape }, _) if shape.iter().product::<usize>() != 1 => {
            Ok((Target::Reals { shape: shape.clone() }, None))
        }
        (RecordKind::Image | RecordKind::Pixels { .. } | RecordKind::Bytes, _) => {
            Err(refuse("which cannot be a target".into(), "name a column of classes or numbers"))
        }
        // Numbers are places among the names, unless the names are numbers themselves.
        (RecordKind::Int { .. } | RecordKind::Real { .. }, Some(Given::Names(names))) if !are_whole(&names) => {
            Ok((class(Lookup::Index(names.len()), names.len()), Some(names)))
        }
        (_, Some(Given::Names(names))) => {
            Ok((class(Lookup::of_names(names.iter().map(String::as_str)), names.len()), Some(names)))
        }
        (RecordKind::Class { names }, given) => {
            // The names tell the classes of one file from those of another, however many the model has.
            let classes = match given {
                Some(Given::Count(count)) if count < names.len() => {
                    let message = format!("is {count}, but \"{}\" has {} classes", part.name, names.len());
                    let hint = format!("leave it out, or give at least {}; they are {}", names.len(), listed(names));
                    return Err(settings.wrong("classes", message, hint).into());
                }
                Some(Given::Count(count)) => count,
                _ => names.len(),
            };
            Ok((class(Lookup::Index(classes), classes), Some(names.to_vec())))
        }
        (_, Some(Given::Count(classes))) => Ok((class(Lookup::Index(classes), classes), None)),
        (RecordKind::Int { classes: Some(classes), .. }, None) => Ok((class(Lookup::Index(*classes), *classes), None)),
        _ => {
            part.check_scan(settings, "classes", "name them, as `classes = [\"cat\", \"dog\"]`, or give their number")?;
            scan(part, at, task == "classification", skips, &refuse)
        }
    }
}

/// A target with an index for each of several places.
fn indices(
    parts: &[&Part],
    at: usize,
    shape: Vec<usize>,
    given: Option<Given>,
    types: &ColumnTypes,
    settings: &Settings,
    skips: bool,
) -> Result<Found, OpenError> {
    let (classes, names) = match (&parts[0].reader.columns()[at].kind, given) {
        (_, Some(Given::Names(names))) => (names.len(), Some(names)),
        (_, Some(Given::Count(count))) => (count, None),
        (RecordKind::Int { classes: Some(classes), .. }, None) => (*classes, None),
        _ => match vocabulary(settings)?.filter(|_| shape.len() == 1) {
            Some(vocabulary) => (vocabulary, None),
            None => (count_of_indices(parts, at, Some(types.ignore), "classes", settings, skips)?, None),
        },
    };
    Ok((Target::Tokens { shape, classes }, names))
}

/// How many tokens there are, if the job says it.
pub(crate) fn vocabulary(settings: &Settings) -> Result<Option<usize>, SettingError> {
    Ok(Some(settings.count_in("vocab", 0, 0, SIZE_MAX)?).filter(|count| *count > 0))
}

/// The largest index in a column of all these parts, plus one. `ignored` may stand among them. `key` can say it instead.
pub(crate) fn count_of_indices(
    parts: &[&Part],
    at: usize,
    ignored: Option<i64>,
    key: &str,
    settings: &Settings,
    skips: bool,
) -> Result<usize, OpenError> {
    let name = &parts[0].reader.columns()[at].name;
    let mut most = None;
    for part in parts {
        let Some(at) = part.reader.columns().iter().position(|column| column.name == *name) else { continue };
        part.check_scan(settings, key, "give their number")?;
        part.visit(0..part.reader.len(), skips, &mut |_, record| {
            let wrong = |message| ReadError::new(format!("column \"{name}\" {message}"), hint_of_indices(ignored));
            let largest = match record.value(at) {
                RecordValue::Missing => None,
                value => each_index(value, ignored, &mut |_| {}).map_err(wrong)?,
            };
            most = most.max(largest);
            Ok(())
        })?;
    }
    match most {
        Some(most) => Ok(most as usize + 1),
        None => {
            Err(settings.wrong(key, format!("is needed: column \"{name}\" has no index"), "check the files").into())
        }
    }
}

fn are_whole(names: &[String]) -> bool {
    names.iter().all(|name| name.trim().parse::<i64>().is_ok())
}

enum Given {
    Names(Vec<String>),
    Count(usize),
}

fn given(settings: &Settings) -> Result<Option<Given>, SettingError> {
    match settings.peek("classes") {
        None => {
            settings.has("classes");
            Ok(None)
        }
        Some(Setting::Int(_)) => {
            settings.count_in("classes", 2, 1, i32::MAX as usize).map(|count| Some(Given::Count(count)))
        }
        Some(_) => {
            let names = settings.texts("classes", "[\"cat\", \"dog\"]")?;
            let unique: BTreeSet<&String> = names.iter().collect();
            match names.is_empty() || unique.len() != names.len() {
                true => {
                    Err(settings.wrong("classes", "must name each class once", "write `classes = [\"cat\", \"dog\"]`"))
                }
                false => Ok(Some(Given::Names(names))),
            }
        }
    }
}

/// The names of a column's values, sorted, by one scan of all records.
pub(crate) fn names_in(part: &Part, at: usize, skips: bool) -> Result<Vec<String>, ReadError> {
    let mut seen = Seen::default();
    part.visit(0..part.reader.len(), skips, &mut |_, record| match record.value(at) {
        RecordValue::Text(text) if !text.trim().is_empty() => seen.name(text.trim()),
        RecordValue::Ints(values) if values.len() == 1 => seen.name(&values[0].to_string()),
        _ => Ok(()),
    })?;
    Ok(seen.names.into_iter().collect())
}

#[derive(Default)]
struct Seen {
    names: BTreeSet<String>,
    whole: BTreeSet<i64>,
    /// The first number that is not whole.
    broken: Option<f32>,
    count: usize,
}

impl Seen {
    fn full(&self) -> Result<(), ReadError> {
        match self.names.len() > CLASSES_MAX || self.whole.len() > CLASSES_MAX {
            false => Ok(()),
            true => Err(ReadError::new(
                format!("the column has more than {CLASSES_MAX} different values"),
                "for a numeric target write `task = \"regression\"`; otherwise give the number of `classes`",
            )),
        }
    }

    fn name(&mut self, name: &str) -> Result<(), ReadError> {
        if !self.names.contains(name) {
            self.names.insert(name.into());
        }
        self.full()
    }

    fn number(&mut self, value: i64) -> Result<(), ReadError> {
        self.whole.insert(value);
        self.full()
    }
}

fn scan(
    part: &Part,
    at: usize,
    forced: bool,
    skips: bool,
    refuse: &dyn Fn(String, &str) -> OpenError,
) -> Result<Found, OpenError> {
    let mut seen = Seen::default();
    part.visit(0..part.reader.len(), skips, &mut |_, record| {
        seen.count += 1;
        match record.value(at) {
            RecordValue::Text(text) if !text.trim().is_empty() => seen.name(text.trim()),
            RecordValue::Ints(values) => values.iter().try_for_each(|value| seen.number(*value)),
            RecordValue::Reals(values) => values.iter().try_for_each(|value| match whole_number(*value) {
                Ok(whole) => seen.number(whole),
                Err(_) => {
                    seen.broken = seen.broken.or(Some(*value));
                    Ok(())
                }
            }),
            _ => Ok(()),
        }
    })?;
    if let Some(value) = seen.broken {
        let hint = format!("write {REGRESSION} under [data], or name another `target`");
        return Err(refuse(format!("which holds {value}: it looks like a target for regression"), &hint));
    }
    let count = seen.whole.len();
    let both_ways = format!(
        "write {REGRESSION} under [data] to predict the number, or {CLASSIFICATION} to make each of its {count} values a \
         class"
    );
    let is_real = matches!(part.reader.columns()[at].kind, RecordKind::Real { .. });
    if !forced && is_real && count > 0 {
        let message = "whose numbers are written as real ones, with a decimal point: they may be amounts, or classes";
        return Err(refuse(message.into(), &both_ways));
    }
    if !forced && count > CLASSES_FEW && seen.count < SAMPLES_PER_CLASS * count {
        let message =
            format!("which has {count} different numbers in {} records: they may be amounts, or classes", seen.count);
        return Err(refuse(message, &both_ways));
    }
    let (lookup, names): (Lookup, Vec<String>) = match seen.names.is_empty() {
        false => (Lookup::of_names(seen.names.iter().map(String::as_str)), seen.names.into_iter().collect()),
        true => {
            let names = seen.whole.iter().map(i64::to_string).collect();
            (Lookup::Whole(seen.whole.into_iter().zip(0..).collect()), names)
        }
    };
    match names.len() {
        0 => Err(refuse("which has no value".into(), "name another `target`")),
        classes => Ok((Target::Class { lookup, classes }, Some(names))),
    }
}
