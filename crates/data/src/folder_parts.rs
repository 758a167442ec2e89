//! A folder that holds the parts of a data set, as `train` and `val`, and not a folder per class.

use crate::files::DataFile;
use crate::format::{self, OpenError};
use crate::shards::is_hidden;
use kolo_graph::settings::{SettingError, Settings};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const TRAINING: &[&str] = &["train", "training"];
const VALIDATION: &[&str] = &["val", "valid", "validation"];
const TEST: &[&str] = &["test", "testing"];

/// The folders of a data set's parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FolderParts {
    root: PathBuf,
    pub training: PathBuf,
    pub validation: Option<PathBuf>,
    pub test: Option<PathBuf>,
    /// A folder beside them that is none of them.
    other: Option<PathBuf>,
}

impl FolderParts {
    /// The parts in a directory, if it has one to train on and another one, by their names.
    pub fn of(directory: &Path) -> Option<Self> {
        let mut parts: [Vec<PathBuf>; 3] = Default::default();
        let mut other = None;
        for entry in fs::read_dir(directory).ok()?.flatten() {
            let path = entry.path();
            // Of a million files none is looked at.
            let kind = entry.file_type().ok()?;
            if is_hidden(&path) || !(kind.is_dir() || kind.is_symlink() && path.is_dir()) {
                continue;
            }
            let name = entry.file_name().to_string_lossy().to_lowercase();
            match [TRAINING, VALIDATION, TEST].iter().position(|names| names.contains(&name.as_str())) {
                Some(part) => parts[part].push(path),
                None => other = other.into_iter().chain([path]).min(),
            }
        }
        // Of two that are called alike, nobody knows which is meant.
        for part in &mut parts {
            part.sort_unstable();
            other = other.or(part.get(1).cloned());
        }
        let [training, validation, test] = parts.map(|paths| paths.into_iter().next());
        let found = Self { root: directory.into(), training: training?, validation, test, other };
        (found.validation.is_some() || found.test.is_some()).then_some(found)
    }

    /// What the job file could say instead, where the parts hold files that end in `pattern`.
    fn lines(&self, pattern: &str) -> String {
        let line = |(key, path): (&str, &PathBuf)| format!("`{key} = \"{}{pattern}\"`", path.display());
        let keys = [("validation", &self.validation), ("test", &self.test)];
        let others = keys.into_iter().filter_map(|(key, path)| Some((key, path.as_ref()?)));
        let lines: Vec<String> = [("source", &self.training)].into_iter().chain(others).map(line).collect();
        lines.join(", ")
    }

    fn names(&self) -> String {
        let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let all = [Some(&self.training), self.validation.as_ref(), self.test.as_ref()];
        let names: Vec<String> = all.into_iter().flatten().map(name).collect();
        names.join(" and ")
    }

    /// The error of reading the folders as classes.
    pub fn refused(&self, settings: &Settings) -> SettingError {
        let message = format!("names {}, whose folders {} are parts of a data set", self.root.display(), self.names());
        let hint = format!(
            "name one of them, such as \"{}\"; if they are classes, name the images: \"{}/*/*\"",
            self.validation.as_ref().unwrap_or(&self.training).display(),
            self.root.display()
        );
        settings.wrong("source", message, hint)
    }

    /// What the parts are used for.
    pub fn note(&self, keys: &[(&str, String)]) -> String {
        let uses = keys.iter().map(|(key, path)| match *key {
            "source" => format!("trains on {path}"),
            "validation" => format!("validates on {path}"),
            key => format!("keeps {path} for the {key}"),
        });
        let uses: Vec<String> = uses.collect();
        format!("{} holds the parts {}: {}", self.root.display(), self.names(), uses.join(", "))
    }
}

/// The parts of a data set in the folder that `source` names, if it names one and the job does not say otherwise. Folders with
/// others beside them, or whose files can only be named one by one, are refused with what to write.
pub(crate) fn resolve(source: &str, settings: &Settings) -> Result<Option<FolderParts>, OpenError> {
    let directory = Path::new(source);
    let Some(parts) = FolderParts::of(directory) else { return Ok(None) };
    let format = |path: &Path| -> Result<Option<&'static str>, OpenError> {
        Ok(format::choose(&[DataFile::at(path)?], settings).ok().map(|format| format.name))
    };
    let inside = format(&parts.training)?;
    // Data may lie in the directory itself, beside folders of these names.
    if format(directory)?.is_some_and(|own| inside != Some(own)) {
        return Ok(None);
    }
    let Some(_) = inside else {
        let Some(ending) = commonest_ending(&parts.training) else { return Ok(None) };
        let message = format!("names {source}, whose folders {} are parts of a data set", parts.names());
        let hint = format!("name their files: {}", parts.lines(&format!("/*.{ending}")));
        return Err(settings.wrong("source", message, hint).into());
    };
    if let Some(other) = &parts.other {
        let message = format!("names {source}, which holds {} beside the parts {}", other.display(), parts.names());
        let hint = format!("write {}", parts.lines(""));
        return Err(settings.wrong("source", message, hint).into());
    }
    Ok(Some(parts))
}

/// The ending that most files of a folder have.
fn commonest_ending(directory: &Path) -> Option<String> {
    let mut endings: BTreeMap<String, usize> = BTreeMap::new();
    for path in fs::read_dir(directory).ok()?.flatten().map(|entry| entry.path()) {
        if let Some(ending) = path.extension().filter(|_| !is_hidden(&path) && path.is_file()) {
            *endings.entry(ending.to_string_lossy().into_owned()).or_default() += 1;
        }
    }
    endings.into_iter().max_by_key(|(_, count)| *count).map(|(ending, _)| ending)
}
