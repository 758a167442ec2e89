//! The files of one purpose: those that train, validate or test.

use super::assembly::{Assembly, Target};
use super::columns;
use super::lookup::{Lookup, NameMap, listed, shown};
use crate::error::ReadError;
use crate::files::{DataFile, Listed};
use crate::format::{self, Format, OpenError, Reader};
use crate::inspect;
use crate::notes;
use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::stream::StreamFiles;
use kolo_graph::settings::{Setting, SettingError, Settings};
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
    /// What was left out or guessed in reading the files.
    pub notes: Vec<String>,
}

/// Where the columns are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Places {
    pub inputs: Vec<usize>,
    /// Of each input that is an index of names: what they are to the model. Inputs after the last are none.
    pub input_names: Vec<Option<NameMap>>,
    pub target: Option<usize>,
    /// Of a target that is an index of names: the class of each.
    pub class_of: Option<NameMap>,
}

/// What stands in the place of a reader that was taken.
#[derive(Debug)]
struct Nothing;

impl Reader for Nothing {
    fn columns(&self) -> &[RecordColumn] {
        &[]
    }

    fn len(&self) -> usize {
        0
    }

    fn read(&self, _: usize, _: &mut Record) -> Result<(), ReadError> {
        Err(ReadError::new("it has no record", "this is a bug"))
    }
}

impl Part {
    /// Opens the files that `name` names, which is what `key` says.
    pub fn open(name: &str, settings: &Settings, key: &str) -> Result<Self, OpenError> {
        let Listed { files, mut notes } = crate::files::list(name, settings, key)?;
        let Format { name: format, open, .. } = *format::choose(&files, settings)?;
        let reader = open(&files, settings)?;
        if reader.is_empty() {
            let message = format!("is \"{name}\", which holds no record");
            return Err(settings.wrong(key, message, "check the files").into());
        }
        notes.extend(notes::of_all(&*reader));
        Ok(Self { name: name.into(), format, files, reader, stream: None, places: Places::default(), notes })
    }

    /// Its reader, for another one that takes its place at once.
    pub fn take_reader(&mut self) -> Box<dyn Reader> {
        std::mem::replace(&mut self.reader, Box::new(Nothing))
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
        let known = columns::by_name(own);
        let same = |at: &usize| -> Result<usize, SettingError> {
            let wanted = &other[*at];
            let Some(found) = known.get(wanted.name.as_str()).copied() else {
                return Err(self.lacks(wanted, Some(*at) == with.places.target, settings, key));
            };
            let fits = match (&own[found].kind, &wanted.kind) {
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
                        "is \"{}\", whose column \"{}\" is {}, but that of \"{}\" is {}",
                        self.name,
                        own[found].name,
                        inspect::kind_name(&own[found].kind),
                        with.name,
                        inspect::kind_name(&wanted.kind)
                    );
                    Err(settings.wrong(key, message, "give it the columns of the training files"))
                }
            }
        };
        let inputs = with.places.inputs.iter().map(same).collect::<Result<_, _>>()?;
        // Samples of a test may have no target: then it is ignored.
        let is_there = |at: &&usize| key != "test" || own.iter().any(|column| column.name == other[**at].name);
        let target = with.places.target.as_ref().filter(is_there).map(same).transpose()?;
        self.places = Places { inputs, target, ..Places::default() };
        self.name_classes(assembly, settings, key)?;
        Ok(())
    }

    /// The error of a part that has not all columns.
    fn lacks(&self, wanted: &RecordColumn, is_target: bool, settings: &Settings, key: &str) -> SettingError {
        let columns = self.reader.columns();
        if let Err(error) = columns::find(&[], self.reader.unread(), &wanted.name, settings, key)
            && self.reader.unread().iter().any(|column| column.name == wanted.name)
        {
            return error;
        }
        let what = if is_target { "the target" } else { "an input" };
        let message = format!("is \"{}\", which has no column \"{}\", {what}", self.name, wanted.name);
        let hint = match (is_target, &wanted.kind, self.format) {
            (true, RecordKind::Class { .. }, "images") => {
                "put its images into a folder per class, as those of the training files are".into()
            }
            _ => format!("give it the columns of the training files; its own are {}", columns::list(columns)),
        };
        settings.wrong(key, message, hint)
    }

    /// Finds out what the names are whose indices this part holds: each file may number them in its own way.
    pub fn name_classes(&mut self, assembly: &Assembly, settings: &Settings, key: &str) -> Result<(), SettingError> {
        let columns = self.reader.columns();
        let inputs = assembly.input.columns();
        if !inputs.is_empty() {
            let both = self.places.inputs.iter().zip(inputs);
            let maps = both.map(|(at, input)| match (&columns[*at].kind, &input.categories) {
                (RecordKind::Class { names }, Some(Lookup::Names(known))) => {
                    Ok(Some(NameMap::new(names, |name| known.get(name).copied())))
                }
                (RecordKind::Class { .. }, _) => {
                    let message = format!(
                        "is \"{}\", whose column \"{}\" holds names, but the model was trained on numbers in it",
                        self.name, input.name
                    );
                    Err(settings.wrong(key, message, "store the numbers that the training files have, or train again"))
                }
                _ => Ok(None),
            });
            self.places.input_names = maps.collect::<Result<_, _>>()?;
        }
        let Some(at) = self.places.target else { return Ok(()) };
        let RecordKind::Class { names } = &columns[at].kind else { return Ok(()) };
        let (Target::Class { .. }, Some(classes)) = (&assembly.target, &assembly.class_names) else {
            let message = format!(
                "is \"{}\", whose column \"{}\" holds names of classes, but the model was trained on numbers in it",
                self.name, columns[at].name
            );
            return Err(settings.wrong(key, message, "store the numbers that the training files have"));
        };
        let known = Lookup::of_names(classes.iter().map(String::as_str));
        let class = |name: &str| match &known {
            Lookup::Names(known) => known.get(name).copied(),
            _ => None,
        };
        let map = NameMap::new(names, class);
        if let Some(name) = map.unknown() {
            let hint = format!("the classes are {}", listed(classes));
            return Err(match settings.peek("classes") {
                Some(Setting::List(_)) => {
                    let message = format!("has no \"{}\", which is a class of \"{}\"", shown(name), self.name);
                    settings.wrong("classes", message, format!("add it, or take its samples out of the files; {hint}"))
                }
                _ => {
                    let message = format!("is \"{}\", which has the class \"{}\"", self.name, shown(name));
                    settings.wrong(key, format!("{message}, but the training files do not"), hint)
                }
            });
        }
        self.places.class_of = Some(map);
        Ok(())
    }

    /// Refuses values that stand for no class and no name: the training files, whose values were looked through, do not have
    /// them. `scanned` says whether the classes of the target were found so.
    pub fn check_known(&self, assembly: &Assembly, scanned: bool) -> Result<(), ReadError> {
        let columns = self.reader.columns();
        let mut checked: Vec<(usize, &Lookup, Option<&NameMap>, &str)> = Vec::new();
        let inputs = assembly.input.columns();
        if !inputs.is_empty() {
            for (number, (at, input)) in self.places.inputs.iter().zip(inputs).enumerate() {
                let names = self.places.input_names.get(number).and_then(Option::as_ref);
                if let Some(lookup) = &input.categories
                    && names.is_none_or(|names| names.unknown().is_some())
                {
                    checked.push((*at, lookup, names, "names"));
                }
            }
        }
        if let (Some(at), Target::Class { lookup, classes }) = (self.places.target, &assembly.target) {
            let more = matches!(&columns[at].kind, RecordKind::Int { classes: Some(own), .. } if own > classes);
            if self.places.class_of.is_none() && (scanned || more) {
                checked.push((at, lookup, None, "classes"));
            }
        }
        if checked.is_empty() {
            return Ok(());
        }
        let is_missing = |value: &RecordValue| match value {
            RecordValue::Missing => true,
            RecordValue::Text(text) => text.trim().is_empty(),
            _ => false,
        };
        self.visit(0..self.reader.len(), false, &mut |_, record| {
            for (at, lookup, names, what) in &checked {
                let value = record.value(*at);
                if is_missing(value) {
                    continue;
                }
                let class = names.map_or_else(|| lookup.class(value), |names| names.class(value));
                class.map_err(|message| {
                    let message = format!("column \"{}\": {message}", columns[*at].name);
                    let hint = format!("the {what} of the training files are {}", lookup.described());
                    ReadError::new(message, hint)
                })?;
            }
            Ok(())
        })
    }
}
