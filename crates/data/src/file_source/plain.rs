//! Files for a model that was trained on no files: its fields alone say what they must hold.

use super::assembly::{Assembly, Input, InputColumn, Target};
use super::columns::{is_number, is_picture, is_target, list};
use super::open::{add_transforms, fields_of, readable};
use super::part::{Part, Places};
use super::{FileSource, OnError};
use crate::format::OpenError;
use crate::record::{RecordColumn, RecordKind};
use crate::split::Split;
use crate::transform::Fitted;
use kolo_graph::field::{Field, IGNORED, Kind};
use kolo_graph::settings::{Setting, SettingError, Settings};

/// Opens files to predict from, for a model that takes this field. Images become the size that the model wants, with pixels
/// from 0 to 1; columns of numbers stand one after the other, without one that is named as a target; whole numbers are
/// indices, such as tokens.
pub fn open_for_field(name: &str, field: &Field) -> Result<FileSource, SettingError> {
    let mut settings = Settings::new("data", name);
    let read = |settings: &mut Settings| -> Result<FileSource, OpenError> {
        let mut part = Part::open(name, settings, "source")?;
        let (input, inputs) = input_of(part.reader.columns(), field, settings)?;
        part.places = Places { inputs, ..Places::default() };
        let assembly = Assembly {
            input,
            target: Target::None,
            target_name: None,
            class_names: None,
            ignore: IGNORED.into(),
            target_may_lack: false,
        };
        let split = Split::given(part.reader.len(), 0);
        let mut source = FileSource::new(vec![part], split, assembly, 0, OnError::Stop);
        let form = add_transforms(&mut source, settings, 0, Fitted { complete: true, ..Fitted::default() })?;
        source.fields = fields_of(&form, settings)?;
        source.fields[0].name.clone_from(&field.name);
        Ok(source)
    };
    read(&mut settings).map_err(|error| readable(error, &settings, "source"))
}

/// How records become the field, and from which columns.
fn input_of(
    columns: &[RecordColumn],
    field: &Field,
    settings: &mut Settings,
) -> Result<(Input, Vec<usize>), SettingError> {
    let refused = |message: String| {
        let hint = format!("the model expects {field}: give images or columns of numbers that match");
        settings.wrong("source", message, hint)
    };
    if let Kind::Index { classes } = field.kind {
        let is_row = |column: &RecordColumn| matches!(&column.kind, RecordKind::Int { shape, .. } if shape.iter().product::<usize>() == field.elements());
        let at = columns.iter().position(|column| !is_target(column) && is_row(column));
        let missing =
            || refused(format!("has no column of {} whole numbers: it has {}", field.elements(), list(columns)));
        return Ok((Input::Tokens { len: field.elements(), classes }, vec![at.ok_or_else(missing)?]));
    }
    if let Some(at) = columns.iter().position(is_picture)
        && let [channels @ (1 | 3), height, width] = field.shape[..]
    {
        let input = match &columns[at].kind {
            RecordKind::Pixels { shape } if shape[..] != field.shape[..] => {
                return Err(refused(format!("has pixels of shape {shape:?}")));
            }
            RecordKind::Pixels { .. } => return Ok((Input::Pixels { shape: [channels, height, width] }, vec![at])),
            _ => Input::Image { channels, size: None },
        };
        let mut resize = Settings::new("data.transforms[0]", "");
        resize.set("kind", "", Setting::Text("resize".into()));
        let size = [height, width].map(|side| Setting::Int(side as i64));
        resize.set("size", "", Setting::List(size.into()));
        settings.set("transforms", "", Setting::List(vec![Setting::Table(resize)]));
        return Ok((input, vec![at]));
    }
    let count = |at: &usize| match &columns[*at].kind {
        RecordKind::Real { shape } | RecordKind::Int { shape, .. } => shape.iter().product::<usize>(),
        _ => 0,
    };
    let numbers = (0..columns.len()).filter(|at| is_number(&columns[*at]) && !is_target(&columns[*at]));
    let inputs: Vec<usize> = numbers.collect();
    let given: usize = inputs.iter().map(count).sum();
    if given != field.elements() {
        let shown = list(columns);
        return Err(refused(format!(
            "has {given} numbers in a record, but {} are expected: {shown}",
            field.elements()
        )));
    }
    let column =
        |at: &usize| InputColumn { name: columns[*at].name.clone(), elements: count(at), categories: None, fill: None };
    Ok((Input::Table { columns: inputs.iter().map(column).collect(), shape: field.shape.clone() }, inputs))
}
