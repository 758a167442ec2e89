//! What the values of a column are: `types` of the `[data]` section says it, else the file, else the model.
//!
//! A file that holds a row of whole numbers does not say whether they are tokens or measurements. The job may (`types`), and the
//! model does where its input is an index. A type that does not go with the shape of its column is an error before the first step.

use crate::inspect::kind_name;
use crate::record::{RecordColumn, RecordKind};
use kolo_graph::field::{Field, IGNORED, Kind};
use kolo_graph::settings::{SettingError, Settings, nearest};

/// The fields of models.
const INPUT_FIELD: &str = "x";
const TARGET_FIELD: &str = "y";
const EXAMPLE: &str = "{ x = \"tokens\" }";

/// What the values of a column are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ColumnType {
    /// A row of indices, such as words of a vocabulary.
    Tokens,
    /// An index for each place of an array, such as the class of each pixel.
    Mask,
    /// One class.
    Class,
    Real,
}

impl ColumnType {
    const NAMES: [&'static str; 4] = ["tokens", "mask", "class", "real"];

    fn named(name: &str) -> Self {
        match name {
            "tokens" => Self::Tokens,
            "mask" => Self::Mask,
            "class" => Self::Class,
            _ => Self::Real,
        }
    }

    fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// What a column must be to have this type.
    fn wanted(self) -> &'static str {
        match self {
            Self::Tokens => "a row of whole numbers",
            Self::Mask => "an array of whole numbers",
            Self::Class => "one number or name",
            Self::Real => "numbers",
        }
    }

    /// Whether a column of the file can have it. Whether numbers that may have fractions are whole is seen when they are read.
    fn fits(self, kind: &RecordKind) -> bool {
        let shape = shape_of(kind);
        match self {
            Self::Tokens => shape.is_some_and(|shape| shape.len() == 1),
            Self::Mask => shape.is_some_and(|shape| !shape.is_empty()) || matches!(kind, RecordKind::Pixels { .. }),
            Self::Class => {
                matches!(kind, RecordKind::Text | RecordKind::Class { .. })
                    || shape.is_some_and(|shape| shape.iter().product::<usize>() == 1)
            }
            Self::Real => shape.is_some(),
        }
    }
}

/// The shape of a column of numbers.
pub(crate) fn shape_of(kind: &RecordKind) -> Option<&[usize]> {
    match kind {
        RecordKind::Real { shape } | RecordKind::Int { shape, .. } => Some(shape),
        _ => None,
    }
}

/// What is known of the types of columns.
#[derive(Clone, Debug)]
pub(crate) struct ColumnTypes {
    /// By the job, with the name of the column.
    named: Vec<(String, ColumnType)>,
    /// The model takes indices, not numbers.
    model_takes_tokens: bool,
    /// The model predicts numbers, whatever the data are.
    model_predicts_numbers: bool,
    /// What stands in a target for a place that does not count.
    pub ignore: i64,
}

impl ColumnTypes {
    /// What the job and the model's fields, if they are known, say of these columns of the files `name`.
    pub fn read(
        columns: &[RecordColumn],
        name: &str,
        settings: &Settings,
        wanted: Option<&[Field]>,
    ) -> Result<Self, SettingError> {
        let table = settings.table_like("types", EXAMPLE)?;
        let mut named = Vec::new();
        for column in table.keys() {
            let kind = ColumnType::named(table.choice(column, &ColumnType::NAMES)?);
            let Some(found) = columns.iter().find(|known| known.name == column) else {
                let near = nearest(column, columns.iter().map(|column| column.name.as_str()));
                let near = near.map_or(String::new(), |near| format!("did you mean `{near}`? "));
                let hint = format!("{near}The columns are {}", super::columns::list(columns));
                return Err(table.wrong(column, "names a column that does not exist", hint));
            };
            if !kind.fits(&found.kind) {
                let message = format!(
                    "is \"{}\", which takes {}, but column \"{column}\" of \"{name}\" is {}",
                    kind.name(),
                    kind.wanted(),
                    kind_name(&found.kind)
                );
                return Err(table.wrong(column, message, "choose another type, or leave it out"));
            }
            named.push((column.to_string(), kind));
        }
        let is = |name: &str, real: bool| {
            let is_one = |field: &Field| field.name == name && (field.kind == Kind::Real) == real;
            wanted.is_some_and(|fields| fields.iter().any(is_one))
        };
        let (model_takes_tokens, model_predicts_numbers) = (is(INPUT_FIELD, false), is(TARGET_FIELD, true));
        Ok(Self { named, model_takes_tokens, model_predicts_numbers, ignore: settings.int("ignore", IGNORED.into())? })
    }

    /// The same beside tokens as the input: a model that takes them, though it takes numbers by itself, follows the data.
    pub fn beside_tokens(&self) -> Self {
        Self { model_predicts_numbers: false, ..self.clone() }
    }

    /// What the job says of this column.
    pub fn of(&self, column: &RecordColumn) -> Option<ColumnType> {
        self.named.iter().find(|(name, _)| *name == column.name).map(|(_, kind)| *kind)
    }

    /// Whether an array of whole numbers is a target of numbers, as far as the model says it.
    pub fn predicts_numbers(&self) -> bool {
        self.model_predicts_numbers
    }

    /// Whether this column, as an input, is a row of indices.
    pub fn is_tokens(&self, column: &RecordColumn) -> bool {
        match (self.of(column), &column.kind) {
            (Some(kind), _) => kind == ColumnType::Tokens,
            (None, RecordKind::Int { shape, classes }) if shape.len() == 1 => {
                classes.is_some() || self.model_takes_tokens
            }
            _ => false,
        }
    }
}
