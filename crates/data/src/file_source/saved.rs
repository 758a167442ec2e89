//! The preprocessing of a job as text: what a trained model needs to see new data as it saw the old, without the old.

use super::assembly::{Assembly, Input, InputColumn, Target};
use super::lookup::Lookup;
use super::open::{add_transforms, fields_of, pack, readable};
use super::part::{Part, Places};
use super::{FileSource, OnError, columns};
use crate::error::ReadError;
use crate::format::{OpenError, Reader};
use crate::record::{RecordColumn, RecordKind};
use crate::split::Split;
use crate::tokenizer::UsedTokenizer;
use crate::transform::Fitted;
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
            "classes": self.assembly.class_names,
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
    }
}

fn column_to_json(column: &InputColumn) -> Value {
    let categories = match &column.categories {
        None => Value::Null,
        Some(Lookup::Index(classes)) => json!(classes),
        Some(Lookup::Whole(values)) => json!(values.keys().collect::<Vec<_>>()),
        Some(Lookup::Names(names)) => json!(names.keys().collect::<Vec<_>>()),
    };
    json!({ "name": column.name, "elements": column.elements, "categories": categories, "fill": column.fill })
}

/// What was saved, read again.
pub(super) struct Saved {
    pub assembly: Assembly,
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
    let assembly = Assembly { input: input_from_json(value.get("input")?)?, target, class_names };
    let tokenizer = tokenizer_of(&value);
    Some(Saved { assembly, columns: texts(value.get("input_columns")?)?, fitted, tokenizer })
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
    settings.set("tokenizer", "the run", Setting::Text(path));
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
        _ => return None,
    })
}

fn column_from_json(column: &Value) -> Option<InputColumn> {
    let categories = match column.get("categories")? {
        Value::Null => None,
        Value::Number(classes) => Some(Lookup::Index(classes.as_u64()? as usize)),
        Value::Array(values) if values.iter().all(Value::is_i64) => {
            Some(Lookup::Whole(values.iter().filter_map(Value::as_i64).zip(0..).collect()))
        }
        names => Some(Lookup::of_names(names.as_array()?.iter().filter_map(Value::as_str))),
    };
    let fill = match column.get("fill")? {
        Value::Null => None,
        fill => Some(reals(fill)?),
    };
    let name = column.get("name")?.as_str()?.to_string();
    Some(InputColumn { name, elements: column.get("elements")?.as_u64()? as usize, categories, fill })
}

/// Opens files to predict from, as a job saw its own: `settings` is its `[data]` section, `preprocessing` what
/// [`FileSource::preprocessing`] said. The files need no target, and the source has the one field `x`; of tokens whose target
/// is the next also `y`. With `on_error = "skip"`, a record that cannot be read is left out:
/// [`Source::is_unreadable`](crate::Source::is_unreadable) tells which.
pub fn open_for_prediction(name: &str, settings: &Settings, preprocessing: &str) -> Result<FileSource, SettingError> {
    let read = || -> Result<FileSource, OpenError> {
        let Some(Saved { assembly, columns, fitted, tokenizer }) = from_json(preprocessing) else {
            let hint = "save the model again with this version";
            return Err(settings.wrong("source", "has a saved preprocessing that cannot be read", hint).into());
        };
        // Another record's answer would be a wrong one.
        let on_error = if OnError::read(settings)?.skips() { OnError::LeaveOut } else { OnError::Stop };
        let kept = with_tokenizer(settings, tokenizer.as_ref());
        let (with_tokenizer, _file) = kept.map_err(|error| ReadError::io(&std::env::temp_dir(), &error))?;
        let mut part = pack(Part::open(name, &with_tokenizer, "source")?, settings, on_error.skips())?;
        check_tokenizer(&part, tokenizer.as_ref(), settings)?;
        let found = columns.iter().map(|column| place(&*part.reader, column, &assembly.input, settings));
        let inputs = found.collect::<Result<_, _>>()?;
        part.places = Places { inputs, target: None, class_of: None };
        let split = Split::given(part.reader.len(), 0);
        let mut source = FileSource::new(vec![part], split, assembly, 0, on_error);
        let form = add_transforms(&mut source, settings, 0, fitted)?;
        source.fields = fields_of(&form, settings)?;
        Ok(source)
    };
    read().map_err(|error| readable(error, settings, "source"))
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
