//! Opening files as a source: from the keys of `[data]` to parts, columns, classes and transforms.

use super::assembly::{Assembly, Input, InputColumn, Target, reals_of};
use super::classes;
use super::columns::{self, ChoiceRules, Choices, Chosen, InputKind};
use super::held_out::{self, SplitRule};
use super::lookup::Lookup;
use super::part::{Part, Places};
use super::table_windows::{Future, TableWindows, WindowColumns, WindowRule};
use super::types::{ColumnTypes, shape_of};
use super::{FITTED_SAMPLES_MAX, FileSource, OnError, streamed};
use crate::cache::Cache;
use crate::error::ReadError;
use crate::folder_parts;
use crate::format::{OpenError, Reader};
use crate::formats::csv;
use crate::image::{self, Pixels};
use crate::inspect::{self, shown_name};
use crate::load_times::LoadMeter;
use crate::notes;
use crate::record::{RecordColumn, RecordKind, RecordValue};
use crate::sample::{Form, ValueForm};
use crate::source::Opened;
use crate::split::{HoldOut, Purpose, Split};
use crate::stream::{self, StreamSettings, StreamSource};
use crate::transform::{self, Fitted, Setup};
use crate::transforms::{one_hot, pack};
use kolo_graph::field::Field;
use kolo_graph::settings::{Setting, SettingError, Settings};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Opens the files that `name`, which is `data.source`, names, with those of `validation` and `test` if there are any.
/// `wanted` are the model's fields, where they are known.
pub(crate) fn open(name: &str, settings: &Settings, seed: u64, wanted: Option<&[Field]>) -> Opened {
    let stream = StreamSettings::read(settings, stream::is_pipe(name))?;
    let found = folder_parts::resolve(name, settings).map_err(|error| readable(error, settings, "source"))?;
    let found_at = |path: Option<&PathBuf>| path.map(|path| path.display().to_string());
    let source = found.as_ref().and_then(|found| found_at(Some(&found.training))).unwrap_or(name.into());
    let first = match stream {
        Some(stream) => Part::open_stream(&source, settings, "source", stream),
        None => Part::open(&source, settings, "source"),
    };
    let mut parts = vec![("source", first.map_err(|error| readable(error, settings, "source"))?)];
    let mut used = vec![("source", source)];
    for key in ["validation", "test"] {
        let beside = found.as_ref().and_then(|found| match key {
            "validation" => found_at(found.validation.as_ref()),
            _ => found_at(found.test.as_ref()),
        });
        let name = match (settings.text(key, "")?, beside) {
            (said, Some(beside)) if said.is_empty() => {
                used.push((key, beside.clone()));
                beside
            }
            (said, _) => said,
        };
        if stream::is_pipe(&name) {
            let message = format!("is \"{name}\", a pipe, but every evaluation reads its samples again");
            return Err(settings.wrong(key, message, "name files"));
        }
        if !name.is_empty() {
            let own = settings_of_other_files(settings, &parts[0].1, key)?;
            let part = match stream.filter(|stream| stream.files) {
                Some(stream) => Part::open_stream(&name, &own, key, StreamSettings { samples: None, ..stream }),
                None => Part::open(&name, &own, key),
            };
            parts.push((key, part.map_err(|error| readable(error, settings, key))?));
        }
    }
    if let Some(found) = &found {
        parts[0].1.notes.insert(0, found.note(&used));
    }
    let files = join(parts, settings, seed, wanted).map_err(|error| readable(error, settings, "source"))?;
    Ok(match stream {
        Some(stream) => Box::new(StreamSource::new(files, stream, seed)),
        None => Box::new(files),
    })
}

/// The settings for files beside those of the training: columns that are text there are text here, and labels that were named
/// are those of the training. Others are named by `validation_labels` and `test_labels`, or found beside the files.
fn settings_of_other_files(settings: &Settings, training: &Part, key: &str) -> Result<Settings, SettingError> {
    let mut own = settings.clone();
    let is_text = |column: &&RecordColumn| column.kind == RecordKind::Text;
    let text = training.reader.columns().iter().filter(is_text).map(|column| column.name.as_str());
    set_text(&mut own, text);
    own.remove("labels");
    let labels = format!("{key}_labels");
    if settings.has(&labels) {
        let place = settings.place_of(&labels).unwrap_or_default().to_string();
        own.set("labels", &place, Setting::Text(settings.text(&labels, "")?));
    }
    Ok(own)
}

/// Says which columns of a table are text, whatever their cells look like.
pub(super) fn set_text<'n>(settings: &mut Settings, names: impl Iterator<Item = &'n str>) {
    let names: Vec<Setting> = names.map(|name| Setting::Text(name.into())).collect();
    settings.set("text", csv::TEXT_OF_TRAINING, Setting::List(names));
}

/// Whatever is wrong, as an error of the key that led there, with file and offset.
pub(super) fn readable(error: OpenError, settings: &Settings, key: &str) -> SettingError {
    match error {
        OpenError::Setting(error) => error,
        OpenError::Read(error) => {
            // A tokenizer is a file, too, which another key names.
            let is_tokenizer =
                |path: &Path| settings.peek("tokenizer") == Some(&Setting::Text(path.display().to_string()));
            if error.sample.is_none() && error.file.as_deref().is_some_and(is_tokenizer) {
                let message = format!("names a file that cannot be used: {}", error.place_and_message());
                return settings.wrong("tokenizer", message, error.hint);
            }
            let message = match error.sample {
                Some(_) => format!("names files that cannot be used: {}", error.what()),
                None => format!("names files that cannot be read: {}", error.place_and_message()),
            };
            settings.wrong(key, message, error.hint)
        }
    }
}

/// One source of several parts, each with the key that names it: the first is to train.
pub(crate) fn join(
    parts: Vec<(&str, Part)>,
    settings: &Settings,
    seed: u64,
    wanted: Option<&[Field]>,
) -> Result<FileSource, OpenError> {
    let on_error = OnError::read(settings)?;
    let skips = on_error.skips();
    let (keys, parts): (Vec<&str>, Vec<Part>) = parts.into_iter().unzip();
    let tables = transform_tables(settings)?;
    parts.iter().try_for_each(|part| streamed::check(part, &tables, settings))?;
    let mut parts = parts.into_iter().map(|part| pack(part, settings, skips)).collect::<Result<Vec<_>, _>>()?;
    let types = ColumnTypes::read(parts[0].reader.columns(), &parts[0].name, settings, wanted)?;
    let (chosen, guess) = choose(&mut parts, &types, settings, skips)?;
    let (split, split_note) = read_split(&mut parts, &keys, &chosen, (settings, seed, skips))?;
    let assembly = read_assembly(&parts, chosen, types.ignore, split, settings, skips)?;
    parts[0].name_classes(&assembly, settings, "source")?;
    // A record with another class may be skipped, as any that cannot be used.
    let scanned = settings.peek("classes").is_none();
    let (first, others) = parts.split_at_mut(1);
    for (part, key) in others.iter_mut().zip(&keys[1..]) {
        part.align(&first[0], &assembly, settings, key)?;
        if *key == "validation" && !skips {
            part.check_known(&assembly, scanned).map_err(|error| readable(error.into(), settings, key))?;
        }
    }
    let mut source = FileSource::new(parts, split, assembly, seed, on_error);
    source.split_note = split_note;
    source.notes = columns_used(&source.parts[0], &source.assembly, guess, settings);
    source.notes.extend(source.notes_of_parts());
    let form = add_transforms(&mut source, settings, seed, Fitted::default())?;
    source.fields = fields_of(&form, settings)?;
    let cache = Cache::read(settings)?;
    if cache.is_some() && source.parts[0].is_pipe() {
        let message = "keeps samples for the next epoch, but that of a pipe has others: the next ones that come";
        return Err(settings.wrong("cache", message, "leave `cache` out").into());
    }
    source.keep_in(cache);
    // What opening took is no sample's time.
    source.meter = LoadMeter::default();
    Ok(source)
}

/// Packs the texts of a part, if that is the first transform.
pub(super) fn pack(mut part: Part, settings: &Settings, skips: bool) -> Result<Part, OpenError> {
    if let Some(first) = transform_tables(settings)?.first().filter(|table| is_pack(table)) {
        part.reader = pack::packed(part.reader, first, skips)?;
    }
    Ok(part)
}

fn is_pack(table: &Settings) -> bool {
    table.peek("kind") == Some(&Setting::Text(pack::KIND.name.into()))
}

/// What the columns are for, and what the target is.
struct Roles {
    kind: InputKind,
    target: Target,
    target_name: Option<String>,
    class_names: Option<Vec<String>>,
    windows: Option<WindowRule>,
    rule: Option<SplitRule>,
}

/// Finds inputs and target among the columns, and says why one of them is the target if its place alone says so.
fn choose(
    parts: &mut [Part],
    types: &ColumnTypes,
    settings: &Settings,
    skips: bool,
) -> Result<(Roles, Option<&'static str>), OpenError> {
    let (windows, rule) = (WindowRule::read(settings)?, SplitRule::read(settings)?);
    let categorical = categorical_columns(settings)?;
    let of_windows = windows.iter().flat_map(|windows| [windows.series.clone(), windows.time.clone()]).flatten();
    let group = if let Some(SplitRule::Groups(column)) = &rule { Some(column.clone()) } else { None };
    let left_out: Vec<String> = of_windows.chain(group).collect();
    let rules = ChoiceRules { categorical: &categorical, left_out: &left_out, keeps_target: windows.is_some(), types };
    let reader = &parts[0].reader;
    let is_index = |at: usize| reader.is_index(at);
    let choices = Choices { columns: reader.columns(), unread: reader.unread(), is_index: &is_index };
    let Chosen { kind, inputs, target, guess } = columns::choose(&choices, settings, &rules)?;
    parts[0].places = Places { inputs, target, ..Places::default() };
    let target_name = target.map(|at| columns_name(&parts[0], at));
    let all: Vec<&Part> = parts.iter().collect();
    let (target, class_names) = match (target, &windows) {
        (Some(_), Some(windows)) => (forecast(&all, windows, kind, settings)?, None),
        (Some(at), None) if kind == InputKind::Tokens => {
            classes::find(&all, at, &types.beside_tokens(), settings, skips)?
        }
        (Some(at), None) => classes::find(&all, at, types, settings, skips)?,
        (None, Some(_)) => {
            let message = "takes rows of a table, but the samples are tokens without a target";
            return Err(settings.wrong("window", message, "leave it out, or name a `target` of numbers").into());
        }
        (None, None) => (Target::Next, None),
    };
    Ok((Roles { kind, target, target_name, class_names, windows, rule }, guess))
}

fn columns_name(part: &Part, at: usize) -> String {
    part.reader.columns()[at].name.clone()
}

/// The target of windows: so many numbers to come.
fn forecast(
    parts: &[&Part],
    windows: &WindowRule,
    kind: InputKind,
    settings: &Settings,
) -> Result<Target, SettingError> {
    let refused = |key: &str, message: &str, hint: &str| Err(settings.wrong(key, message, hint));
    if settings.choice("task", &["auto", "classification", "regression"])? == "classification" {
        return refused("task", "is \"classification\", but windows forecast numbers", "leave one of the two out");
    }
    if kind != InputKind::Table {
        return refused(
            "window",
            "takes rows of a table, but the inputs are none",
            "name columns of numbers: `inputs = [\"a\"]`",
        );
    }
    if parts.iter().any(|part| part.stream.is_some()) {
        return refused(
            "stream",
            "cannot be combined with `window`, which needs rows in any order",
            "leave one of the two out",
        );
    }
    Ok(Target::Reals { shape: vec![windows.future] })
}

/// Parts as they are given, or as a rule divides the samples of the first; and a word on it.
fn read_split(
    parts: &mut [Part],
    keys: &[&str],
    roles: &Roles,
    (settings, seed, skips): (&Settings, u64, bool),
) -> Result<(Split, Option<String>), OpenError> {
    let place = |key: &str| keys.iter().position(|known| *known == key);
    let given = place("validation").is_some();
    if given {
        let written = roles.rule.as_ref().map(SplitRule::key);
        let key = ["holdout", "folds", "fold"].into_iter().find(|key| settings.has(key)).or(written);
        if let Some(key) = key {
            let at = place("validation").unwrap_or_default();
            let (what, hint) = match settings.peek("validation") {
                Some(_) => ("`validation`".to_string(), "leave one of the two out"),
                None => (
                    format!("{}, which holds the samples to validate on", parts[at].name),
                    "leave it out, or name the folder to train on alone",
                ),
            };
            return Err(settings.wrong(key, format!("cannot be combined with {what}"), hint).into());
        }
    }
    let (split, note) = match (&roles.windows, &roles.rule) {
        (Some(windows), rule) => split_windows(parts, windows, rule.as_ref(), given, settings)?,
        (None, Some(rule)) if parts[0].stream.is_some() => {
            let hint = "leave one of the two out, or name files: `validation = \"…\"`";
            return Err(settings.wrong(rule.key(), "cannot be combined with a stream", hint).into());
        }
        (None, _) if given => (None, None),
        (None, Some(rule)) => {
            let (split, note) = held_out::hold_out(&mut parts[0], &roles.target, rule, (settings, seed, skips))?;
            (Some(split), note)
        }
        (None, None) => match parts[0].stream.is_some() {
            true => (Some(streamed::read_split(&parts[0], settings)?), None),
            false => (Some(Split::read(settings, parts[0].reader.len(), seed)?), None),
        },
    };
    let len = |key: &str| place(key).map_or(0, |at| parts[at].reader.len());
    let split = split.unwrap_or_else(|| Split::given(len("source"), len("validation")));
    Ok((split.with_test(len("test")), note))
}

/// Makes windows of the rows of all parts. Of those that train, the last are held out unless files for that are given.
fn split_windows(
    parts: &mut [Part],
    windows: &WindowRule,
    rule: Option<&SplitRule>,
    given: bool,
    settings: &Settings,
) -> Result<(Option<Split>, Option<String>), OpenError> {
    if let Some(rule) = rule.filter(|rule| **rule != SplitRule::Chronological) {
        let message = "cannot be combined with `window`: windows that overlap would be on both sides";
        let hint = "leave it out, as the last rows are held out, or name files: `validation = \"…\"`";
        return Err(settings.wrong(rule.key(), message, hint).into());
    }
    let holdout = match given {
        true => 0.0,
        false => match HoldOut::read(settings, parts[0].reader.len())? {
            HoldOut::Part(part) => part,
            HoldOut::Fold { .. } => {
                let message = "cannot be combined with `window`, of which the last rows are held out";
                return Err(settings.wrong("folds", message, "leave one of the two out").into());
            }
        },
    };
    let names = |of: &[usize]| of.iter().map(|at| columns_name(&parts[0], *at)).collect::<Vec<String>>();
    let (inputs, target) = (names(&parts[0].places.inputs), names(parts[0].places.target.as_slice()));
    let (mut split, mut note) = (None, None);
    for (number, part) in parts.iter_mut().enumerate() {
        let find =
            |name: &String, key: &str| columns::find(part.reader.columns(), part.reader.unread(), name, settings, key);
        let columns = WindowColumns {
            inputs: inputs.iter().map(|name| find(name, "inputs")).collect::<Result<_, _>>()?,
            target: target.first().map(|name| find(name, "target")).transpose()?,
        };
        let part_held_out = if number == 0 { holdout } else { 0.0 };
        let made = TableWindows::over(part, columns, windows, (part_held_out, Future::Known), settings)?;
        if number == 0 {
            note = Some(made.described(holdout));
            split = (!given).then(|| Split::given(made.training, made.len() - made.training));
        }
        part.reader = Box::new(made);
    }
    parts[0].places = Places { inputs: (0..inputs.len()).collect(), target: Some(inputs.len()), ..Places::default() };
    Ok((split, note))
}

/// Which columns are the target and the inputs, and which are neither though the job does not name the inputs.
fn columns_used(part: &Part, assembly: &Assembly, guess: Option<&str>, settings: &Settings) -> Vec<String> {
    let columns = part.reader.columns();
    let name = |at: &usize| shown_name(&columns[*at].name);
    let target = match (part.places.target, &assembly.target) {
        (Some(at), _) => match guess {
            Some(guess) => format!("{} ({guess}; `target` names another)", name(&at)),
            None => name(&at),
        },
        (None, _) => "the next token".into(),
    };
    let mut notes = vec![format!("target {target}, inputs {}", notes::listed(part.places.inputs.iter().map(name)))];
    let inputs: BTreeSet<usize> = part.places.inputs.iter().copied().collect();
    let is_used = |at: usize| inputs.contains(&at) || part.places.target == Some(at);
    if settings.peek("inputs").is_none() {
        let others = (0..columns.len()).filter(|at| !is_used(*at) && !part.reader.is_index(*at));
        let others: Vec<String> = others
            .map(|at| format!("{} ({})", shown_name(&columns[at].name), inspect::kind_name(&columns[at].kind)))
            .collect();
        if !others.is_empty() {
            notes.push(format!("left out: {}; `inputs` can name them", notes::listed(others.into_iter())));
        }
    }
    notes
}

/// What becomes of the columns.
fn read_assembly(
    parts: &[Part],
    roles: Roles,
    ignore: i64,
    split: Split,
    settings: &Settings,
    skips: bool,
) -> Result<Assembly, OpenError> {
    let all: Vec<&Part> = parts.iter().collect();
    let (part, target) = (all[0], roles.target);
    let input = match roles.kind {
        InputKind::Image => image_input(part, settings, skips)?,
        InputKind::Tokens => token_input(&all, &target, settings, skips)?,
        InputKind::Table => table_input(part, roles.windows.as_ref(), split, settings, skips)?,
    };
    let Roles { target_name, class_names, .. } = roles;
    Ok(Assembly { input, target, target_name, class_names, ignore, target_may_lack: false })
}

/// Columns that `one_hot` transforms name.
fn categorical_columns(settings: &Settings) -> Result<Vec<String>, SettingError> {
    let mut names = Vec::new();
    for table in transform_tables(settings)? {
        if table.peek("kind") == Some(&Setting::Text("one_hot".into())) {
            names.extend(table.texts("columns", "[\"colour\"]")?);
        }
    }
    Ok(names)
}

fn transform_tables(settings: &Settings) -> Result<Vec<Settings>, SettingError> {
    settings.tables("transforms", "[{ kind = \"flip\" }]")
}

fn image_input(part: &Part, settings: &Settings, skips: bool) -> Result<Input, OpenError> {
    let column = &part.reader.columns()[part.places.inputs[0]];
    if let RecordKind::Pixels { shape } = &column.kind {
        return match shape[..] {
            [channels, height, width] => Ok(Input::Pixels { shape: [channels, height, width] }),
            _ => Err(settings
                .wrong("inputs", format!("are pixels of shape {shape:?}"), "three dims are expected")
                .into()),
        };
    }
    let asked = settings.count("channels", 0, 0)?;
    if ![0, 1, 3].contains(&asked) {
        return Err(settings.wrong("channels", format!("is {asked}"), "write 1 for grey or 3 for colour").into());
    }
    let first = first_image(part, skips)?;
    let channels = match asked {
        0 if first.channels < 3 => 1,
        0 => 3,
        asked => asked,
    };
    // Sizes may differ if a transform makes them one.
    let sized = |table: &Settings| matches!(table.peek("kind"), Some(Setting::Text(kind)) if kind == "resize" || kind == "crop");
    let changes = transform_tables(settings)?.iter().any(sized);
    Ok(Input::Image { channels, size: (!changes).then_some((first.height, first.width)) })
}

/// The first image that can be decoded; if bad ones may be skipped, not only the first.
fn first_image(part: &Part, skips: bool) -> Result<Pixels, ReadError> {
    const TRIES: usize = 100;
    let at = part.places.inputs[0];
    let mut record = crate::record::Record::new();
    let mut failed = None;
    for number in 0..part.reader.len().min(if skips { TRIES } else { 1 }) {
        let mut pixels = Pixels::default();
        let decoded = part.read(number, &mut record).and_then(|()| match record.value(at) {
            RecordValue::Bytes(bytes) => image::decode(bytes, &mut pixels).map_err(|error| {
                let message = format!("the image cannot be decoded: {error}");
                part.blame(number, ReadError::new(message, "copy it again, or write `on_error = \"skip\"`"))
            }),
            _ => Err(part.blame(number, ReadError::new("the image is missing", "correct the file"))),
        });
        match decoded {
            Ok(()) => return Ok(pixels),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    let error = failed.unwrap_or_else(|| ReadError::new("there is no image", "check the files"));
    Err(if skips { error.despite_skipping() } else { error })
}

fn token_input(parts: &[&Part], target: &Target, settings: &Settings, skips: bool) -> Result<Input, OpenError> {
    let at = parts[0].places.inputs[0];
    let kind = &parts[0].reader.columns()[at].kind;
    let Some(&[len]) = shape_of(kind) else {
        return Err(settings.wrong("inputs", "are not tokens", "name a column of tokens").into());
    };
    let classes = match kind {
        RecordKind::Int { classes: Some(classes), .. } => *classes,
        _ => match classes::vocabulary(settings)? {
            Some(vocabulary) => vocabulary,
            None => classes::count_of_indices(parts, at, None, "vocab", settings, skips)?,
        },
    };
    if matches!(target, Target::Next) && len < 2 {
        let message = "has one token per sample and thus no next token";
        return Err(settings.wrong("source", message, "make `context` larger").into());
    }
    Ok(Input::Tokens { len, classes })
}

fn table_input(
    part: &Part,
    windows: Option<&WindowRule>,
    split: Split,
    settings: &Settings,
    skips: bool,
) -> Result<Input, OpenError> {
    let missing = read_missing(settings)?;
    let mut columns = Vec::new();
    for at in &part.places.inputs {
        let column = &part.reader.columns()[*at];
        let (elements, categories) = match &column.kind {
            RecordKind::Real { shape } | RecordKind::Int { shape, .. } => (shape.iter().product(), None),
            RecordKind::Class { names } => (1, Some(Lookup::of_names(names.iter().map(String::as_str)))),
            _ => {
                let hint = "leave the column out with `inputs`, or give the samples as files";
                part.check_scan(settings, "inputs", hint)?;
                let names = classes::names_in(part, *at, skips)?;
                (1, Some(Lookup::of_names(names.iter().map(String::as_str))))
            }
        };
        columns.push(InputColumn { name: column.name.clone(), elements, categories, fill: None });
    }
    fill_missing(part, &mut columns, missing, split, skips)?;
    if let Some(windows) = windows {
        return Ok(Input::Windows { columns, past: windows.past });
    }
    let shape = match (&part.places.inputs[..], &columns[..]) {
        // One column keeps its shape.
        ([at], [_]) => match &part.reader.columns()[*at].kind {
            RecordKind::Real { shape } | RecordKind::Int { shape, .. } if !shape.is_empty() => shape.clone(),
            _ => vec![1],
        },
        _ => vec![columns.iter().map(|column| column.elements).sum()],
    };
    Ok(Input::Table { columns, shape })
}

/// What stands for missing values.
#[derive(Clone, Copy)]
enum Missing {
    Refused,
    Mean,
    Number(f32),
}

fn read_missing(settings: &Settings) -> Result<Missing, SettingError> {
    Ok(match settings.peek("missing") {
        Some(Setting::Int(_) | Setting::Float(_)) => {
            let number = settings.float("missing", 0.0)?;
            match (number as f32).is_finite() {
                true => Missing::Number(number as f32),
                false => {
                    let message = format!("is {number:e}, which is not a finite f32");
                    let hint = format!("write a number up to {:e}, or `missing = \"mean\"`", f32::MAX);
                    return Err(settings.wrong("missing", message, hint));
                }
            }
        }
        _ => match settings.choice("missing", &["error", "mean"])? {
            "mean" => Missing::Mean,
            _ => Missing::Refused,
        },
    })
}

fn fill_missing(
    part: &Part,
    columns: &mut [InputColumn],
    missing: Missing,
    split: Split,
    skips: bool,
) -> Result<(), ReadError> {
    if !matches!(missing, Missing::Refused) {
        // A name that is missing is none of the names.
        let names = columns.iter_mut().filter(|column| column.categories.is_some());
        names.for_each(|column| column.fill = Some(vec![one_hot::NO_NAME]));
    }
    let numbers = columns.iter_mut().zip(&part.places.inputs).filter(|(column, _)| column.categories.is_none());
    let mut numbers: Vec<_> = numbers.collect();
    match missing {
        Missing::Refused => {}
        Missing::Number(number) => {
            numbers.iter_mut().for_each(|(column, _)| column.fill = Some(vec![number; column.elements]));
        }
        Missing::Mean => {
            let step = split.train_len().div_ceil(FITTED_SAMPLES_MAX).max(1);
            let training = (0..part.reader.len()).filter(|at| split.purpose(*at) == Purpose::Training).step_by(step);
            // The mean so far, and of how many, of each number.
            let mut means: Vec<Vec<(f64, f64)>> =
                numbers.iter().map(|(column, _)| vec![(0.0, 0.0); column.elements]).collect();
            part.visit(training, skips, &mut |_, record| {
                for ((_, at), means) in numbers.iter().zip(&mut means) {
                    let values = reals_of(record.value(**at)).unwrap_or_default();
                    for (value, (mean, count)) in values.iter().zip(means).filter(|(value, _)| !value.is_nan()) {
                        *count += 1.0;
                        *mean += (f64::from(*value) - *mean) / *count;
                    }
                }
                Ok(())
            })?;
            for ((column, _), means) in numbers.iter_mut().zip(means) {
                let fill: Vec<f32> = means.into_iter().map(|(mean, _)| mean as f32).collect();
                if let Some(mean) = fill.iter().find(|mean| !mean.is_finite()) {
                    let message =
                        format!("the mean of column \"{}\", for `missing = \"mean\"`, is {mean}", column.name);
                    let hint = "take infinite and huge numbers out of the file, or write a number for `missing`";
                    return Err(ReadError::new(message, hint));
                }
                column.fill = Some(fill);
            }
        }
    }
    Ok(())
}

/// Makes the transforms one after the other, as each sees what those before it leave.
pub(super) fn add_transforms(
    source: &mut FileSource,
    settings: &Settings,
    seed: u64,
    mut fitted: Fitted,
) -> Result<Form, OpenError> {
    let mut form = source.assembly.form();
    let tables = transform_tables(settings)?;
    // One that packs has done its work on the records.
    for (at, table) in tables.iter().enumerate().filter(|(at, table)| *at > 0 || !is_pack(table)) {
        let (before, split) = (source.transforms.len(), source.split);
        let mut setup = Setup { seed, at, before, split, training: &*source, fitted: &mut fitted };
        let made = transform::make(table, &mut form, &mut setup)?;
        if made.target_scale().is_some() && source.transforms.iter().any(|other| other.target_scale().is_some()) {
            return Err(table.wrong("of", "is \"target\" for the second time", "leave one of them out").into());
        }
        source.transforms.push(made);
    }
    source.fixed = source.transforms.iter().position(|made| made.is_random()).unwrap_or(source.transforms.len());
    source.fitted = fitted;
    Ok(form)
}

/// What a model sees.
pub(super) fn fields_of(form: &Form, settings: &Settings) -> Result<Vec<Field>, SettingError> {
    let wrong = |message: String| {
        let hint = match &form.x {
            ValueForm::Image { .. } => "end the list with a crop, or resize to `[height, width]`",
            _ => "add `{ kind = \"one_hot\" }` to `transforms`, or leave the column out of `inputs`",
        };
        settings.wrong("source", format!("cannot be used as is: {message}"), hint)
    };
    let x = form.x.field("x").map_err(wrong)?;
    let y = form.y.as_ref().map(|y| y.field("y")).transpose().map_err(wrong)?;
    Ok([x].into_iter().chain(y).collect())
}
