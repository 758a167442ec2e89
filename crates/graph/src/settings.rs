//! Settings: the keys of one section of a job file, read by whoever understands them.
//!
//! A reader takes the keys it knows with a default each; what nobody took is an error that suggests the nearest known
//! key. The reader needs no file format: where a key stood travels along as text, for the error alone.

use kolo_base::lock;
use std::cell::RefCell;
use std::sync::{Arc, Mutex};

/// Behind a key among what was resolved: whether it was written, where that means something.
pub const WRITTEN: &str = " is written";

/// The largest size of a dim: a few of them multiplied can still be counted, and no machine holds more.
pub const SIZE_MAX: usize = i32::MAX as usize;

/// One setting's value.
#[derive(Clone, Debug, PartialEq)]
pub enum Setting {
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    List(Vec<Setting>),
    Table(Settings),
}

impl Setting {
    fn kind(&self) -> &'static str {
        match self {
            Setting::Bool(_) => "a boolean",
            Setting::Int(_) => "a whole number",
            Setting::Float(_) => "a number",
            Setting::Text(_) => "text",
            Setting::List(_) => "a list",
            Setting::Table(_) => "a table",
        }
    }
}

/// A wrong setting: what, where, and what to do.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{place}: {message}\n  hint: {hint}")]
pub struct SettingError {
    pub place: String,
    pub message: String,
    pub hint: String,
}

/// How the error of a key that nobody reads begins.
const UNKNOWN: &str = "unknown key `";

impl SettingError {
    /// The path of the key that nobody reads, if that is what is wrong.
    pub fn unknown_key(&self) -> Option<&str> {
        self.message.strip_prefix(UNKNOWN)?.strip_suffix('`')
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Entry {
    key: String,
    place: String,
    value: Setting,
}

/// The keys of one section, in the order they were written.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    section: String,
    place: String,
    entries: Vec<Entry>,
    known: RefCell<Vec<String>>,
    /// What every key came to that was read from here, or from a table taken from here.
    resolved: Arc<Mutex<Vec<(String, String)>>>,
}

impl PartialEq for Settings {
    fn eq(&self, other: &Self) -> bool {
        self.section == other.section && self.entries == other.entries
    }
}

impl Settings {
    /// An empty section; `place` is where it stands, such as `job.toml:7`.
    pub fn new(section: &str, place: &str) -> Self {
        Self { section: section.into(), place: place.into(), ..Self::default() }
    }

    pub fn section(&self) -> &str {
        &self.section
    }

    pub fn place(&self) -> &str {
        &self.place
    }

    /// The same keys for a try: what is read from it counts for nothing here.
    pub fn detached(&self) -> Self {
        Self { resolved: Arc::default(), ..self.clone() }
    }

    /// Adds a key, or replaces its value.
    pub fn set(&mut self, key: &str, place: &str, value: Setting) {
        match self.entries.iter_mut().find(|entry| entry.key == key) {
            Some(entry) => (entry.value, entry.place) = (value, place.into()),
            None => self.entries.push(Entry { key: key.into(), place: place.into(), value }),
        }
    }

    /// Takes a key away, as if nobody had written it.
    pub fn remove(&mut self, key: &str) {
        self.entries.retain(|entry| entry.key != key);
    }

    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.key.as_str())
    }

    /// The value of `key`, without marking it as known.
    pub fn peek(&self, key: &str) -> Option<&Setting> {
        self.entries.iter().find(|entry| entry.key == key).map(|entry| &entry.value)
    }

    /// Where `key` was written.
    pub fn place_of(&self, key: &str) -> Option<&str> {
        self.entries.iter().find(|entry| entry.key == key).map(|entry| entry.place.as_str())
    }

    /// Mutable access to a table value, created empty if absent.
    pub fn table_mut(&mut self, key: &str, place: &str) -> Option<&mut Settings> {
        if self.peek(key).is_none() {
            let section = if self.section.is_empty() { key.into() } else { format!("{}.{key}", self.section) };
            self.set(key, place, Setting::Table(Settings::new(&section, place)));
        }
        match self.entries.iter_mut().find(|entry| entry.key == key).map(|entry| &mut entry.value) {
            Some(Setting::Table(table)) => Some(table),
            _ => None,
        }
    }

    fn path(&self, key: &str) -> String {
        if self.section.is_empty() { key.into() } else { format!("{}.{key}", self.section) }
    }

    fn entry(&self, key: &str) -> Option<&Entry> {
        let mut known = self.known.borrow_mut();
        if !known.iter().any(|name| name == key) {
            known.push(key.into());
        }
        self.entries.iter().find(|entry| entry.key == key)
    }

    /// Every key that was read, of nested tables too, with the value that counts: the one written, or the default. In the
    /// order of reading, which depends on the values only.
    pub fn resolved(&self) -> Vec<(String, String)> {
        lock(&self.resolved).clone()
    }

    fn resolve<T: std::fmt::Debug>(&self, key: &str, value: T) -> T {
        let (path, text) = (self.path(key), format!("{value:?}"));
        let mut resolved = lock(&self.resolved);
        match resolved.iter_mut().find(|(known, _)| *known == path) {
            Some((_, earlier)) => *earlier = text,
            None => resolved.push((path, text)),
        }
        value
    }

    /// An error about `key`'s value.
    pub fn wrong(&self, key: &str, message: impl Into<String>, hint: impl Into<String>) -> SettingError {
        let place = self.entries.iter().find(|entry| entry.key == key).map_or(&self.place, |entry| &entry.place);
        SettingError {
            place: place.clone(),
            message: format!("`{}` {}", self.path(key), message.into()),
            hint: hint.into(),
        }
    }

    fn mismatch(&self, key: &str, value: &Setting, wanted: &str, example: &str) -> SettingError {
        self.wrong(key, format!("must be {wanted}, but is {}", value.kind()), format!("write `{key} = {example}`"))
    }

    pub fn bool(&self, key: &str, default: bool) -> Result<bool, SettingError> {
        match self.entry(key).map(|entry| &entry.value) {
            None => Ok(self.resolve(key, default)),
            Some(Setting::Bool(value)) => Ok(self.resolve(key, *value)),
            Some(other) => Err(self.mismatch(key, other, "true or false", "true")),
        }
    }

    /// A whole number of at least `least`.
    pub fn count(&self, key: &str, default: usize, least: usize) -> Result<usize, SettingError> {
        match self.entry(key).map(|entry| &entry.value) {
            None => Ok(self.resolve(key, default)),
            Some(Setting::Int(value)) if *value >= least as i64 => Ok(self.resolve(key, *value as usize)),
            Some(Setting::Int(value)) => Err(self.wrong(
                key,
                format!("must be at least {least}, but is {value}"),
                format!("write `{key} = {}`", default.max(least)),
            )),
            Some(other) => Err(self.mismatch(key, other, "a whole number", &default.max(least).to_string())),
        }
    }

    /// The size of a dim: a whole number from 1 to [`SIZE_MAX`].
    pub fn size(&self, key: &str, default: usize) -> Result<usize, SettingError> {
        self.count_in(key, default, 1, SIZE_MAX)
    }

    /// A whole number from `least` to `most`.
    pub fn count_in(&self, key: &str, default: usize, least: usize, most: usize) -> Result<usize, SettingError> {
        let value = self.count(key, default, least)?;
        if value <= most {
            return Ok(value);
        }
        Err(self.wrong(key, format!("must be at most {most}, but is {value}"), format!("write `{key} = {default}`")))
    }

    /// A whole number, which may be negative.
    pub fn int(&self, key: &str, default: i64) -> Result<i64, SettingError> {
        match self.entry(key).map(|entry| &entry.value) {
            None => Ok(self.resolve(key, default)),
            Some(Setting::Int(value)) => Ok(self.resolve(key, *value)),
            Some(other) => Err(self.mismatch(key, other, "a whole number", &default.to_string())),
        }
    }

    pub fn float(&self, key: &str, default: f64) -> Result<f64, SettingError> {
        match self.entry(key).map(|entry| &entry.value) {
            None => Ok(self.resolve(key, default)),
            Some(Setting::Float(value)) => Ok(self.resolve(key, *value)),
            Some(Setting::Int(value)) => Ok(self.resolve(key, *value as f64)),
            Some(other) => Err(self.mismatch(key, other, "a number", &default.to_string())),
        }
    }

    /// A number between `low` and `high`, both allowed.
    pub fn float_in(&self, key: &str, default: f64, low: f64, high: f64) -> Result<f64, SettingError> {
        let value = self.float(key, default)?;
        if (low..=high).contains(&value) {
            return Ok(value);
        }
        Err(self.wrong(
            key,
            format!("must lie between {low} and {high}, but is {value}"),
            format!("write `{key} = {default}`"),
        ))
    }

    pub fn text(&self, key: &str, default: &str) -> Result<String, SettingError> {
        match self.entry(key).map(|entry| &entry.value) {
            None => Ok(self.resolve(key, default.to_string())),
            Some(Setting::Text(value)) => Ok(self.resolve(key, value.clone())),
            Some(other) => {
                // An empty text is mostly as good as none.
                let example = if default.is_empty() { "…" } else { default };
                Err(self.mismatch(key, other, "text", &format!("\"{example}\"")))
            }
        }
    }

    /// One of `choices`; the first is the default.
    pub fn choice(&self, key: &str, choices: &[&'static str]) -> Result<&'static str, SettingError> {
        let value = self.text(key, choices[0])?;
        if let Some(choice) = choices.iter().find(|choice| **choice == value) {
            return Ok(choice);
        }
        let hint = match nearest(&value, choices.iter().copied()) {
            Some(near) => format!("did you mean \"{near}\"? The choices are {}", choices.join(", ")),
            None => format!("the choices are {}", choices.join(", ")),
        };
        Err(self.wrong(key, format!("is \"{value}\", which is not known"), hint))
    }

    /// A list of whole numbers from 1 to [`SIZE_MAX`].
    pub fn counts(&self, key: &str, default: &[usize]) -> Result<Vec<usize>, SettingError> {
        let example = format!("{default:?}");
        match self.entry(key).map(|entry| &entry.value) {
            None => Ok(self.resolve(key, default.to_vec())),
            Some(Setting::List(values)) => values
                .iter()
                .map(|value| match value {
                    Setting::Int(value) if (1..=SIZE_MAX as i64).contains(value) => Ok(*value as usize),
                    other => {
                        let found = match other {
                            Setting::Int(value) => value.to_string(),
                            other => other.kind().into(),
                        };
                        let message =
                            format!("must be a list of whole numbers from 1 to {SIZE_MAX}, but {found} is in it");
                        Err(self.wrong(key, message, format!("write `{key} = {example}`")))
                    }
                })
                .collect::<Result<_, _>>()
                .map(|counts: Vec<usize>| self.resolve(key, counts)),
            Some(other) => Err(self.mismatch(key, other, "a list of whole numbers", &example)),
        }
    }

    /// A list of texts; empty if absent.
    pub fn texts(&self, key: &str, example: &str) -> Result<Vec<String>, SettingError> {
        let text = |value: &Setting| match value {
            Setting::Text(text) => Some(text.clone()),
            _ => None,
        };
        self.list(key, "a list of texts", example, text)
    }

    /// A list of numbers; empty if absent.
    pub fn floats(&self, key: &str, example: &str) -> Result<Vec<f64>, SettingError> {
        let number = |value: &Setting| match value {
            Setting::Float(value) => Some(*value),
            Setting::Int(value) => Some(*value as f64),
            _ => None,
        };
        self.list(key, "a list of numbers", example, number)
    }

    fn list<T: std::fmt::Debug>(
        &self,
        key: &str,
        wanted: &str,
        example: &str,
        item: impl Fn(&Setting) -> Option<T>,
    ) -> Result<Vec<T>, SettingError> {
        let wrong = |value: &Setting| self.mismatch(key, value, wanted, example);
        let values = match self.entry(key).map(|entry| &entry.value) {
            None => Vec::new(),
            Some(Setting::List(values)) => {
                values.iter().map(|value| item(value).ok_or_else(|| wrong(value))).collect::<Result<_, _>>()?
            }
            Some(other) => return Err(wrong(other)),
        };
        Ok(self.resolve(key, values))
    }

    /// A list of tables, each a section of its own such as `data.transforms[0]`; empty if absent.
    pub fn tables(&self, key: &str, example: &str) -> Result<Vec<Settings>, SettingError> {
        let Some(entry) = self.entry(key) else { return Ok(Vec::new()) };
        let Setting::List(values) = &entry.value else {
            return Err(self.mismatch(key, &entry.value, "a list of tables", example));
        };
        let table = |(at, value): (usize, &Setting)| match value {
            Setting::Table(table) => Ok(Settings {
                section: format!("{}[{at}]", self.path(key)),
                resolved: Arc::clone(&self.resolved),
                ..table.clone()
            }),
            other => Err(self.mismatch(key, other, "a list of tables", example)),
        };
        values.iter().enumerate().map(table).collect()
    }

    /// A nested table; empty if absent.
    pub fn table(&self, key: &str) -> Result<Settings, SettingError> {
        self.table_like(key, "{ kind = \"…\" }")
    }

    /// A nested table; empty if absent. The `example` is for whoever wrote something else.
    pub fn table_like(&self, key: &str, example: &str) -> Result<Settings, SettingError> {
        match self.entry(key).map(|entry| &entry.value) {
            None => {
                Ok(Settings { resolved: Arc::clone(&self.resolved), ..Settings::new(&self.path(key), &self.place) })
            }
            Some(Setting::Table(table)) => Ok(Settings { resolved: Arc::clone(&self.resolved), ..table.clone() }),
            Some(other) => Err(self.mismatch(key, other, "a table", example)),
        }
    }

    /// Whether the key was written, marking it as known.
    pub fn has(&self, key: &str) -> bool {
        let written = self.entry(key).is_some();
        self.resolve(&format!("{key}{WRITTEN}"), written)
    }

    /// Call when every key has been read: any other key is an error.
    pub fn finish(&self) -> Result<(), SettingError> {
        let known = self.known.borrow();
        let Some(entry) = self.entries.iter().find(|entry| !known.contains(&entry.key)) else { return Ok(()) };
        let mut names: Vec<&str> = known.iter().map(String::as_str).collect();
        names.sort_unstable();
        let hint = match nearest(&entry.key, names.iter().copied()) {
            Some(near) => format!("did you mean `{near}`? The keys here are {}", names.join(", ")),
            None => format!("the keys here are {}", names.join(", ")),
        };
        Err(SettingError { place: entry.place.clone(), message: format!("{UNKNOWN}{}`", self.path(&entry.key)), hint })
    }
}

/// The candidate closest to `word` by edit distance, if close enough to be a typing error.
pub fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .map(|candidate| (edit_distance(word, candidate), candidate))
        .min()
        .filter(|(distance, candidate)| *distance <= 1 + word.len().max(candidate.len()) / 4)
        .map(|(_, candidate)| candidate)
}

/// Levenshtein's distance, over one row of the table.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_key_suggests_the_nearest() {
        let mut settings = Settings::new("model", "job.toml:3");
        settings.set("widht", "job.toml:5", Setting::Int(3));
        settings.count("width", 8, 1).unwrap();
        settings.count("layers", 2, 1).unwrap();
        let error = settings.finish().unwrap_err();
        assert_eq!(error.unknown_key(), Some("model.widht"));
        assert_eq!(settings.wrong("width", "is odd", "").unknown_key(), None);
        assert_eq!(
            error.to_string(),
            "job.toml:5: unknown key `model.widht`\n  hint: did you mean `width`? The keys here are layers, width"
        );
    }

    #[test]
    fn wrong_type_says_how_to_write_it() {
        let mut settings = Settings::new("data", "job.toml:3");
        settings.set("batch", "job.toml:4", Setting::Text("many".into()));
        let error = settings.count("batch", 64, 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "job.toml:4: `data.batch` must be a whole number, but is text\n  hint: write `batch = 64`"
        );
    }

    #[test]
    fn every_key_that_was_read_is_known_with_the_value_that_counts() {
        let read = |inner: &[(&str, Setting)]| {
            let mut root = Settings::new("", "job.toml");
            let mut table = Settings::new("model", "job.toml:1");
            inner.iter().for_each(|(key, value)| table.set(key, "job.toml:2", value.clone()));
            if !inner.is_empty() {
                root.set("model", "job.toml:1", Setting::Table(table));
            }
            let model = root.table("model").unwrap();
            model.count("width", 8, 1).unwrap();
            model.float("rate", 0.5).unwrap();
            model.table("deep").unwrap().counts("sizes", &[1, 2]).unwrap();
            model.has("depth");
            root.resolved().into_iter().map(|(key, value)| format!("{key} = {value}")).collect::<Vec<_>>().join("; ")
        };
        let defaults = "model.width = 8; model.rate = 0.5; model.deep.sizes = [1, 2]; model.depth is written = false";
        assert_eq!(read(&[]), defaults);
        assert_eq!(read(&[("width", Setting::Int(8))]), defaults, "a default that is written out is the same job");
        let other = read(&[("rate", Setting::Int(2)), ("depth", Setting::Int(1))]);
        assert_eq!(
            other,
            "model.width = 8; model.rate = 2.0; model.deep.sizes = [1, 2]; model.depth is written = true"
        );
    }

    #[test]
    fn lists_hold_texts_numbers_and_tables() {
        let mut data = Settings::new("data", "job.toml:1");
        let text = |text: &str| Setting::Text(text.into());
        data.set("inputs", "job.toml:2", Setting::List(vec![text("a"), text("b")]));
        data.set("mean", "job.toml:3", Setting::List(vec![Setting::Int(1), Setting::Float(0.5)]));
        let mut flip = Settings::new("data.transforms", "job.toml:4");
        flip.set("kind", "job.toml:4", text("flip"));
        data.set("transforms", "job.toml:4", Setting::List(vec![Setting::Table(flip.clone()), Setting::Table(flip)]));
        assert_eq!(data.texts("inputs", "[]"), Ok(vec!["a".into(), "b".into()]));
        assert_eq!(data.floats("mean", "[]"), Ok(vec![1.0, 0.5]));
        assert_eq!(data.texts("absent", "[]"), Ok(Vec::new()));
        let tables = data.tables("transforms", "[]").unwrap();
        tables.iter().for_each(|table| _ = table.text("kind", ""));
        assert!(data.resolved().contains(&("data.transforms[1].kind".into(), "\"flip\"".into())));
        assert_eq!(
            data.texts("mean", "[\"a\"]").unwrap_err().to_string(),
            "job.toml:3: `data.mean` must be a list of texts, but is a whole number\n  hint: write `mean = [\"a\"]`"
        );
        assert!(data.tables("inputs", "[{ kind = \"flip\" }]").is_err());
    }

    #[test]
    fn distance_counts_edits() {
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(nearest("adamv", ["sgd", "adamw", "lamb"].into_iter()), Some("adamw"));
        assert_eq!(nearest("qqqq", ["sgd", "adamw"].into_iter()), None);
    }
}
