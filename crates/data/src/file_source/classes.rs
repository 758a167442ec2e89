//! The classes of a target: named by the job, known to the file, or found by one scan.

use super::assembly::Target;
use super::lookup::{Lookup, listed, whole_number};
use super::part::Part;
use crate::error::ReadError;
use crate::format::OpenError;
use crate::record::{RecordKind, RecordValue};
use kolo_graph::settings::{Setting, SettingError, Settings};
use std::collections::BTreeSet;

/// Classes that one scan may find.
const CLASSES_MAX: usize = 100_000;
/// A target of whole numbers with more values than this, most of them seen once, is no class.
const FEW: usize = 50;

/// What the values are, and their names if they have any.
pub(crate) type Found = (Target, Option<Vec<String>>);

/// The target in the column `at`. What the job says comes first, then what the file knows, then a scan.
pub(crate) fn find(part: &Part, at: usize, settings: &Settings, skips: bool) -> Result<Found, OpenError> {
    let task = settings.choice("task", &["auto", "classification", "regression"])?;
    let given = given(settings)?;
    let column = &part.reader.columns()[at];
    let refuse = |message: String, hint: &str| -> OpenError {
        settings.wrong("target", format!("is \"{}\", {message}", column.name), hint).into()
    };
    let class = |lookup: Lookup, classes: usize| Target::Class { lookup, classes };
    let shape = match &column.kind {
        RecordKind::Real { shape } | RecordKind::Int { shape, .. } => Some(shape),
        _ => None,
    };
    if task == "regression" {
        return match shape {
            // A model's output is a row of numbers, of one if need be.
            Some(shape) if shape.is_empty() => Ok((Target::Reals { shape: vec![1] }, None)),
            Some(shape) => Ok((Target::Reals { shape: shape.clone() }, None)),
            None => Err(refuse("which holds no numbers".into(), "name a column of numbers, or leave `task` out")),
        };
    }
    match (&column.kind, given) {
        (RecordKind::Int { shape, classes: Some(classes) }, _) if shape.len() == 1 && shape != &[1] => {
            Ok((Target::Tokens { len: shape[0], classes: *classes }, None))
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
    let regression = "write `task = \"regression\"` under [data], or name another `target`";
    if let Some(value) = seen.broken {
        return Err(refuse(format!("which holds {value}: it looks like a target for regression"), regression));
    }
    if !forced && seen.whole.len() > FEW && seen.whole.len() > seen.count / 2 {
        let message = format!(
            "which has {} different numbers in {} records: it looks like a target for regression",
            seen.whole.len(),
            seen.count
        );
        return Err(refuse(message, &format!("{regression}; `task = \"classification\"` uses its values as classes")));
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
