//! The preprocessing of a job as text: what a trained model needs to see new data as it saw the old, without the old.

use super::assembly::{Assembly, Input, InputColumn, Target};
use super::lookup::Lookup;
use super::open::{add_transforms, fields_of, pack, readable, set_text};
use super::part::{Part, Places};
use super::table_windows::{Future, TableWindows, WindowColumns, WindowRule};
use super::{FileSource, OnError, columns};
use crate::error::ReadError;
use crate::format::{OpenError, Reader};
use crate::inspect::kind_name;
use crate::record::{RecordColumn, RecordKind};
use crate::split::Split;
use crate::tokenizer::UsedTokenizer;
use crate::transform::Fitted;
use kolo_graph::field::IGNORED;
use kolo_graph::settings::{Setting, SettingError, Settings};
use serde_json::{Map, Value, json};
use std::io::Write;
use tempfile::NamedTempFile;

/// Changes when an older text cannot be read any more.
const VERSION: u64 = 1;

impl FileSource {
    /// What the inputs are made of, class names, and what was measured on the training samples, as JSON. Together with the
    /// `[data]` section, [`open_for_prediction`] reads it.
    pub fn preprocessing(&self) -> String {
        let part = &self.parts[0];
        let names: Vec<&str> = part.places.inputs.iter().map(|at| part.reader.columns()[*at].name.as_str()).collect();
        let fitted: Map<String, Value> =
            self.fitted.values.iter().map(|(key, values)| (key.clone(), json!(values))).collect();
        let value = json!({
            "version": VERSION,
            "input": input_to_json(&self.assembly.input),
            "input_columns": names,
            "next_token": matches!(self.assembly.target, Target::Next),
            "target": target_to_json(&self.assembly),
            "classes": self.assembly.class_names,
            "ignore": self.assembly.ignore,
            "fitted": fitted,
            "tokenizer": part.reader.tokenizer(),
        });
        value.to_string()
    }
}

fn input_to_json(input: &Input) -> Value {
    match input {
        Input::Image { channels, size } => json!({ "kind": "image", "channels": channels, "size": size }),
        Input::Pixels { shape } => json!({ "kind": "pixels", "shape": shape }),
        Input::Tokens { len, classes } => json!({ "kind": "tokens", "len": len, "classes": classes }),
        Input::Table { columns, shape } => {
            let columns: Vec<Value> = columns.iter().map(column_to_json).collect();
            json!({ "kind": "table", "columns": columns, "shape": shape })
        }
        Input::Windows { columns, past } => {
            let columns: Vec<Value> = columns.iter().map(column_to_json).collect();
            json!({ "kind": "windows", "columns": columns, "past": past })
        }
    }
}

fn column_to_json(column: &InputColumn) -> Value {
    let categories = column.categories.as_ref().map(lookup_to_json);
    json!({ "name": column.name, "elements": column.elements, "categories": categories, "fill": column.fill })
}

/// A number of classes, or their values in the order of the classes.
fn lookup_to_json(lookup: &Lookup) -> Value {
    match lookup {
        Lookup::Index(classes) => json!(classes),
        Lookup::Whole(values) => json!(values.keys().collect::<Vec<_>>()),
        Lookup::Names(_) => json!(lookup.names()),
    }
}

fn lookup_from_json(lookup: &Value) -> Option<Lookup> {
    Some(match lookup {
        Value::Number(classes) => Lookup::Index(classes.as_u64()? as usize),
        Value::Array(values) if values.iter().all(Value::is_i64) => {
            Lookup::Whole(values.iter().filter_map(Value::as_i64).zip(0..).collect())
        }
        names => Lookup::of_names(names.as_array()?.iter().filter_map(Value::as_str)),
    })
}

/// What the target is made of, and the column that holds it.
fn target_to_json(assembly: &Assembly) -> Value {
    let column = &assembly.target_name;
    match &assembly.target {
        Target::None => Value::Null,
        Target::Next => json!({ "kind": "next" }),
        Target::Tokens { shape, classes } => {
            json!({ "kind": "tokens", "column": column, "shape": shape, "classes": classes })
        }
        Target::Class { lookup, classes } => {
            json!({ "kind": "class", "column": column, "values": lookup_to_json(lookup), "classes": classes })
        }
        Target::Reals { shape } => json!({ "kind": "reals", "column": column, "shape": shape }),
    }
}

fn target_from_json(target: &Value) -> Option<(Target, Option<String>)> {
    let size = |key: &str| Some(target.get(key)?.as_u64()? as usize);
    let column = target.get("column").and_then(Value::as_str).map(str::to_string);
    let target = match target.get("kind")?.as_str()? {
        "next" => Target::Next,
        "tokens" => {
            // Earlier versions had rows alone.
            let shape = size("len").map(|len| vec![len]).or_else(|| sizes(target.get("shape")?))?;
            Target::Tokens { shape, classes: size("classes")? }
        }
        "class" => Target::Class { lookup: lookup_from_json(target.get("values")?)?, classes: size("classes")? },
        "reals" => Target::Reals { shape: sizes(target.get("shape")?)? },
        _ => return None,
    };
    Some((target, column))
}

/// What was saved, read again.
pub(super) struct Saved {
    /// For prediction: its target is none, or the next token.
    pub assembly: Assembly,
    /// What the training's samples were judged by, and its column. Runs of earlier versions do not say it.
    pub target: Option<(Target, Option<String>)>,
    pub columns: Vec<String>,
    pub fitted: Fitted,
    pub tokenizer: Option<UsedTokenizer>,
}

pub(super) fn from_json(text: &str) -> Option<Saved> {
    let value: Value = serde_json::from_str(text).ok()?;
    if value.get("version")?.as_u64()? != VERSION {
        return None;
    }
    let texts = |value: &Value| -> Option<Vec<String>> {
        value.as_array()?.iter().map(|text| Some(text.as_str()?.to_string())).collect()
    };
    let fitted = value.get("fitted")?.as_object()?.iter().map(|(key, values)| Some((key.clone(), reals(values)?)));
    let fitted = Fitted { values: fitted.collect::<Option<_>>()?, complete: true };
    let target = if value.get("next_token")?.as_bool()? { Target::Next } else { Target::None };
    let class_names = match value.get("classes")? {
        Value::Null => None,
        names => Some(texts(names)?),
    };
    let input = input_from_json(value.get("input")?)?;
    let ignore = value.get("ignore").and_then(Value::as_i64).unwrap_or(IGNORED.into());
    let assembly = Assembly { input, target, target_name: None, class_names, ignore, target_may_lack: false };
    let tokenizer = tokenizer_of(&value);
    let target = value.get("target").and_then(target_from_json);
    Some(Saved { assembly, target, columns: texts(value.get("input_columns")?)?, fitted, tokenizer })
}

fn tokenizer_of(value: &Value) -> Option<UsedTokenizer> {
    serde_json::from_value(value.get("tokenizer")?.clone()).ok()?
}

/// The tokenizer of the tokens that a model was trained on, by what [`FileSource::preprocessing`] said.
pub fn tokenizer_used(preprocessing: &str) -> Option<UsedTokenizer> {
    tokenizer_of(&serde_json::from_str(preprocessing).ok()?)
}

/// The settings with the tokenizer that was kept, as a file that lives as long as the second.
fn with_tokenizer(
    settings: &Settings,
    tokenizer: Option<&UsedTokenizer>,
) -> std::io::Result<(Settings, Option<NamedTempFile>)> {
    let mut settings = settings.clone();
    let Some(json) = tokenizer.and_then(|tokenizer| tokenizer.json.as_ref()) else { return Ok((settings, None)) };
    let mut file = NamedTempFile::new()?;
    file.write_all(json.as_bytes())?;
    let path = file.path().to_string_lossy().into_owned();
    // Of texts that are packed, the transform names it.
    if let Some(Setting::List(mut tables)) = settings.peek("transforms").cloned()
        && let Some(Setting::Table(pack)) = tables.first_mut()
        && pack.peek("kind") == Some(&Setting::Text("pack".into()))
        && pack.peek("tokenizer").is_some()
    {
        pack.set("tokenizer", "the run", Setting::Text(path));
        let place = settings.place_of("transforms").unwrap_or_default().to_string();
        settings.set("transforms", &place, Setting::List(tables));
    } else {
        settings.set("tokenizer", "the run", Setting::Text(path));
    }
    Ok((settings, Some(file)))
}

/// Refuses new tokens that another tokenizer made.
fn check_tokenizer(part: &Part, tokenizer: Option<&UsedTokenizer>, settings: &Settings) -> Result<(), SettingError> {
    let (Some(then), Some(now)) = (tokenizer, part.reader.tokenizer()) else { return Ok(()) };
    match then.digest == now.digest {
        true => Ok(()),
        false => {
            let message = format!(
                "is \"{}\", whose tokens come from another tokenizer ({}) than the model was trained with ({})",
                part.name, now.digest, then.digest
            );
            Err(settings.wrong("source", message, "make the tokens with the tokenizer of the training"))
        }
    }
}

fn sizes(value: &Value) -> Option<Vec<usize>> {
    value.as_array()?.iter().map(|size| Some(size.as_u64()? as usize)).collect()
}

fn reals(value: &Value) -> Option<Vec<f32>> {
    value.as_array()?.iter().map(|value| Some(value.as_f64()? as f32)).collect()
}

fn input_from_json(input: &Value) -> Option<Input> {
    let size = |key: &str| Some(input.get(key)?.as_u64()? as usize);
    Some(match input.get("kind")?.as_str()? {
        "image" => {
            let fixed = match input.get("size")? {
                Value::Null => None,
                pair => Some(<[usize; 2]>::try_from(sizes(pair)?).ok()?.into()),
            };
            Input::Image { channels: size("channels")?, size: fixed }
        }
        "pixels" => Input::Pixels { shape: sizes(input.get("shape")?)?.try_into().ok()? },
        "tokens" => Input::Tokens { len: size("len")?, classes: size("classes")? },
        "table" => {
            let columns = input.get("columns")?.as_array()?.iter().map(column_from_json).collect::<Option<_>>()?;
            Input::Table { columns, shape: sizes(input.get("shape")?)? }
        }
        "windows" => {
            let columns = input.get("columns")?.as_array()?.iter().map(column_from_json).collect::<Option<_>>()?;
            Input::Windows { columns, past: size("past")? }
        }
        _ => return None,
    })
}

fn column_from_json(column: &Value) -> Option<InputColumn> {
    let categories = match column.get("categories")? {
        Value::Null => None,
        lookup => Some(lookup_from_json(lookup)?),
    };
    let fill = match column.get("fill")? {
        Value::Null => None,
        fill => Some(reals(fill)?),
    };
    let name = column.get("name")?.as_str()?.to_string();
    Some(InputColumn { name, elements: column.get("elements")?.as_u64()? as usize, categories, fill })
}

/// Opens files to predict from, as a job saw its own: `settings` is its `[data]` section, `preprocessing` what
/// [`FileSource::preprocessing`] said. The files need no target: the source has the field `x`, and `y` if they have it, or if the
/// target is the next token. What a target does not say is [`IGNORED`], or NaN. With `on_error = "skip"`, a record that cannot be read is left out:
/// [`Source::is_unreadable`](crate::Source::is_unreadable) tells which.
pub fn open_for_prediction(name: &str, settings: &Settings, preprocessing: &str) -> Result<FileSource, SettingError> {
    let read = || {
        let mut saved = from_json(preprocessing).ok_or_else(|| unreadable(settings))?;
        if let Some((target @ (Target::Tokens { .. } | Target::Class { .. } | Target::Reals { .. }), name)) =
            saved.target.take()
        {
            (saved.assembly.target, saved.assembly.target_name) = (target, name);
            saved.assembly.target_may_lack = true;
        }
        // Another record's answer would be a wrong one.
        let on_error = if OnError::read(settings)?.skips() { OnError::LeaveOut } else { OnError::Stop };
        open_alone(name, settings, saved, on_error, 0)
    };
    read().map_err(|error| readable(error, settings, "source"))
}

/// Opens files with their target to evaluate on, as a job saw its own, without those of its training: all samples are held
/// out. Transforms that are random in evaluations, too, depend on the seed. `None` if `preprocessing` is of an earlier version,
/// which did not say what the target is.
pub fn open_for_evaluation(
    name: &str,
    settings: &Settings,
    preprocessing: &str,
    seed: u64,
) -> Result<Option<FileSource>, SettingError> {
    let read = || -> Result<Option<FileSource>, OpenError> {
        let mut saved = from_json(preprocessing).ok_or_else(|| unreadable(settings))?;
        let Some((target, target_name)) = saved.target.take() else { return Ok(None) };
        (saved.assembly.target, saved.assembly.target_name) = (target, target_name);
        let mut source = open_alone(name, settings, saved, OnError::read(settings)?, seed)?;
        source.split = Split::given(0, source.split.train_len());
        Ok(Some(source))
    };
    read().map_err(|error| readable(error, settings, "source"))
}

fn unreadable(settings: &Settings) -> OpenError {
    let hint = "save the model again with this version";
    settings.wrong("source", "has a saved preprocessing that cannot be read", hint).into()
}

/// Files that are seen as what was saved says.
fn open_alone(
    name: &str,
    settings: &Settings,
    saved: Saved,
    on_error: OnError,
    seed: u64,
) -> Result<FileSource, OpenError> {
    let Saved { mut assembly, mut columns, fitted, tokenizer, .. } = saved;
    // Where the new files call them otherwise.
    let named = settings.texts("inputs", "[\"a\", \"b\"]")?;
    if named.len() == columns.len() {
        columns = named;
    }
    let target = settings.text("target", "")?;
    if !target.is_empty() && assembly.target_name.is_some() {
        assembly.target_name = Some(target);
    }
    let kept = with_tokenizer(settings, tokenizer.as_ref());
    let (mut own, _file) = kept.map_err(|error| ReadError::io(&std::env::temp_dir(), &error))?;
    set_text(&mut own, text_columns(&assembly, &columns).into_iter());
    let arrays = settings.text("arrays", "")?;
    let names_inputs = columns.iter().all(|name| arrays.split(',').any(|array| array.trim() == name));
    let opened = match (assembly.target_name.is_none() || assembly.target_may_lack) && names_inputs {
        // The target need not be there.
        true => Part::open(name, &own, "source").or_else(|_| {
            own.set("arrays", "the training files", Setting::Text(columns.join(", ")));
            Part::open(name, &own, "source")
        }),
        false => Part::open(name, &own, "source"),
    };
    let mut part = pack(opened?, &own, on_error.skips())?;
    check_tokenizer(&part, tokenizer.as_ref(), settings)?;
    let known = columns::by_name(part.reader.columns());
    let found = columns.iter().map(|column| match known.get(column.as_str()) {
        Some(at) => Ok(*at),
        None => place(&*part.reader, column, &assembly.input, settings),
    });
    let inputs = found.collect::<Result<_, _>>()?;
    let target = assembly.target_name.as_ref().map(|target| target_place(&part, target, &assembly, settings));
    let target = match target.transpose() {
        Err(_) if assembly.target_may_lack => None,
        found => found?,
    };
    part.places = Places { inputs, target, ..Places::default() };
    if let Some(windows) = WindowRule::read(settings)? {
        let future = if assembly.target_may_lack || target.is_none() { Future::Open } else { Future::Known };
        let chosen = WindowColumns { inputs: part.places.inputs.clone(), target };
        let made = TableWindows::over(&mut part, chosen, &windows, (0.0, future), settings)?;
        part.reader = Box::new(made);
        let inputs = part.places.inputs.len();
        part.places = Places { inputs: (0..inputs).collect(), target: target.map(|_| inputs), ..Places::default() };
    }
    if assembly.target_may_lack && part.name_classes(&assembly, settings, "source").is_err() {
        part.places.target = None;
    }
    if assembly.target_may_lack && part.places.target.is_none() {
        (assembly.target, assembly.target_name) = (Target::None, None);
    }
    part.name_classes(&assembly, settings, "source")?;
    let split = Split::given(part.reader.len(), 0);
    let mut source = FileSource::new(vec![part], split, assembly, seed, on_error);
    source.notes = source.notes_of_parts();
    let form = add_transforms(&mut source, settings, seed, fitted)?;
    source.fields = fields_of(&form, settings)?;
    Ok(source)
}

/// Columns whose values are names: they were text in training.
fn text_columns<'a>(assembly: &'a Assembly, columns: &'a [String]) -> Vec<&'a str> {
    let is_named = |lookup: &Lookup| matches!(lookup, Lookup::Names(_));
    let mut text = Vec::new();
    let named = assembly
        .input
        .columns()
        .iter()
        .zip(columns)
        .filter(|(input, _)| input.categories.as_ref().is_some_and(is_named));
    text.extend(named.map(|(_, name)| name.as_str()));
    if let (Target::Class { lookup, .. }, Some(name)) = (&assembly.target, &assembly.target_name)
        && is_named(lookup)
    {
        text.push(name);
    }
    text
}

/// The column of the target, which must hold what the training's did.
fn target_place(part: &Part, name: &str, assembly: &Assembly, settings: &Settings) -> Result<usize, SettingError> {
    let columns = part.reader.columns();
    let Some(at) = columns.iter().position(|column| column.name == name) else {
        let message =
            format!("is \"{}\", which has no column \"{name}\", the target: nothing to compare with", part.name);
        return Err(settings.wrong("source", message, "add it, or run `kolo predict`, which needs no target"));
    };
    let kind = &columns[at].kind;
    let fits = match &assembly.target {
        Target::Reals { shape } => match kind {
            RecordKind::Real { shape: own } | RecordKind::Int { shape: own, .. } => {
                // A window takes one number of each row.
                let is_window = matches!(assembly.input, Input::Windows { .. });
                own.iter().product::<usize>() == if is_window { 1 } else { shape.iter().product::<usize>() }
            }
            // A cell of text may hold a number.
            kind => *kind == RecordKind::Text,
        },
        Target::Class { .. } => !matches!(kind, RecordKind::Image | RecordKind::Pixels { .. } | RecordKind::Bytes),
        _ => matches!(kind, RecordKind::Int { .. } | RecordKind::Real { .. } | RecordKind::Pixels { .. }),
    };
    match fits {
        true => Ok(at),
        false => {
            let message = format!(
                "is \"{}\", whose column \"{name}\" is {}, which is not what the target of the training files was",
                part.name,
                kind_name(kind)
            );
            Err(settings.wrong("source", message, "give it the columns of the training files"))
        }
    }
}

/// An input by its name; the images, whatever they are called there.
fn place(reader: &dyn Reader, name: &str, input: &Input, settings: &Settings) -> Result<usize, SettingError> {
    let columns = reader.columns();
    let is_image = |column: &RecordColumn| matches!(column.kind, RecordKind::Image);
    match columns::find(columns, reader.unread(), name, settings, "inputs") {
        Err(_) if matches!(input, Input::Image { .. }) && columns.iter().any(is_image) => {
            Ok(columns.iter().position(is_image).unwrap_or(0))
        }
        found => found,
    }
}
