//! The files of one purpose: those that train, validate or test.

use super::assembly::Assembly;
use super::columns;
use crate::error::ReadError;
use crate::files::DataFile;
use crate::format::{self, Format, OpenError, Reader};
use crate::record::{Record, RecordKind};
use crate::stream::StreamFiles;
use kolo_graph::settings::{SettingError, Settings};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Records of one purpose, and where in them the columns of the source are.
#[derive(Debug)]
pub(crate) struct Part {
    /// What the job file says.
    pub name: String,
    pub format: &'static str,
    pub files: Vec<DataFile>,
    pub reader: Box<dyn Reader>,
    /// Behind the reader, if the records come front to back.
    pub stream: Option<Arc<StreamFiles>>,
    pub places: Places,
}

/// Where the columns are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Places {
    pub inputs: Vec<usize>,
    pub target: Option<usize>,
    /// Of a target that is an index of names: the class of each.
    pub class_of: Option<Vec<i32>>,
}

impl Part {
    /// Opens the files that `name` names, which is what `key` says.
    pub fn open(name: &str, settings: &Settings, key: &str) -> Result<Self, OpenError> {
        let files = crate::files::list(name, settings, key)?;
        let Format { name: format, open, .. } = *format::choose(&files, settings)?;
        let reader = open(&files, settings)?;
        if reader.is_empty() {
            let message = format!("is \"{name}\", which holds no record");
            return Err(settings.wrong(key, message, "check the files").into());
        }
        Ok(Self { name: name.into(), format, files, reader, stream: None, places: Places::default() })
    }

    /// Reads a record; an error says which of this part it is.
    pub fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        self.reader.read(at, record).map_err(|error| error.of(&self.name, at))
    }

    /// Says which record of this part is wrong, and where it is.
    pub fn blame(&self, at: usize, error: ReadError) -> ReadError {
        let place = if error.file.is_none() { self.reader.place(at) } else { None };
        let error = match place {
            Some((file, offset)) => error.in_file(&file).at(offset),
            None => error,
        };
        error.of(&self.name, at)
    }

    /// Shows these records to the visitor. Those that cannot be read are left out if they may be.
    pub fn visit(
        &self,
        records: impl Iterator<Item = usize>,
        skips: bool,
        visitor: &mut dyn FnMut(usize, &Record) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        let mut record = Record::new();
        for at in records {
            match self.read(at, &mut record) {
                Ok(()) => visitor(at, &record).map_err(|error| self.blame(at, error))?,
                Err(error) if skips && !error.is_final => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Finds the columns of another part here, by name, and the classes by theirs.
    pub fn align(&mut self, with: &Part, assembly: &Assembly, settings: &Settings, key: &str) -> Result<(), OpenError> {
        let (own, other) = (self.reader.columns(), with.reader.columns());
        let same = |at: &usize| -> Result<usize, SettingError> {
            let found = columns::find(own, self.reader.unread(), &other[*at].name, settings, key)?;
            let fits = match (&own[found].kind, &other[*at].kind) {
                (RecordKind::Class { .. }, RecordKind::Class { .. }) => true,
                (RecordKind::Int { shape, .. }, RecordKind::Int { shape: wanted, .. }) => shape == wanted,
                // A column of a text file may happen to hold whole numbers only.
                (RecordKind::Int { shape, .. }, RecordKind::Real { shape: wanted })
                | (RecordKind::Real { shape }, RecordKind::Int { shape: wanted, .. }) => shape == wanted,
                (kind, wanted) => kind == wanted,
            };
            match fits {
                true => Ok(found),
                false => {
                    let message = format!(
                        "is \"{}\", whose column \"{}\" is {:?}, but that of \"{}\" is {:?}",
                        self.name, own[found].name, own[found].kind, with.name, other[*at].kind
                    );
                    Err(settings.wrong(key, message, "give it the columns of the training files"))
                }
            }
        };
        let inputs = with.places.inputs.iter().map(same).collect::<Result<_, _>>()?;
        // Samples of a test may have no target: then it is ignored.
        let is_there = |at: &&usize| key != "test" || own.iter().any(|column| column.name == other[**at].name);
        let target = with.places.target.as_ref().filter(is_there).map(same).transpose()?;
        self.places = Places { inputs, target, class_of: None };
        self.places.class_of = self.class_of(assembly, settings, key)?;
        Ok(())
    }

    /// Of a target that is an index of names: the class of each.
    pub fn class_of(
        &self,
        assembly: &Assembly,
        settings: &Settings,
        key: &str,
    ) -> Result<Option<Vec<i32>>, SettingError> {
        let Some(RecordKind::Class { names }) = self.places.target.map(|at| &self.reader.columns()[at].kind) else {
            return Ok(None);
        };
        let Some(classes) = &assembly.class_names else { return Ok(None) };
        let known: BTreeMap<&String, i32> = classes.iter().zip(0..).collect();
        let class = |name: &String| {
            known.get(name).copied().ok_or_else(|| {
                let message =
                    format!("is \"{}\", which has the class \"{name}\", but the training files do not", self.name);
                settings.wrong(key, message, format!("the classes are {}", super::classes::listed(classes)))
            })
        };
        names.iter().map(class).collect::<Result<_, _>>().map(Some)
    }
}
