//! What was left out or guessed in reading files, in sentences for the first lines of a run and for `kolo data inspect`.

use crate::format::Reader;
use crate::inspect::{printable, shown_name};
use std::collections::BTreeMap;
use std::path::Path;

/// Names that one note lists.
const NAMES_MAX: usize = 8;
/// Columns of which it is said why they are text.
const REASONS_MAX: usize = 3;
/// Endings of files that are told apart.
const ENDINGS_MAX: usize = 64;
/// And that one note lists.
const ENDINGS_SHOWN: usize = 4;

/// Names in the order given; of many, the first ones and how many more there are.
pub(crate) fn listed(names: impl ExactSizeIterator<Item = String>) -> String {
    let more = names.len().saturating_sub(NAMES_MAX);
    let shown = names.take(NAMES_MAX).collect::<Vec<_>>().join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

/// What a reader left out or guessed, but for the columns that it does not read.
pub fn of_reader(reader: &dyn Reader) -> Vec<String> {
    let columns = reader.columns();
    let index: Vec<String> =
        (0..columns.len()).filter(|at| reader.is_index(*at)).map(|at| shown_name(&columns[at].name)).collect();
    let mut notes = Vec::new();
    if !index.is_empty() {
        notes.push(format!("left out: {}, the index of the table; `inputs` or `target` can name it", index.join(", ")));
    }
    let reasons = (0..columns.len()).filter_map(|at| Some((at, reader.kind_reason(at)?)));
    notes.extend(
        reasons.take(REASONS_MAX).map(|(at, reason)| format!("{} is text: {reason}", shown_name(&columns[at].name))),
    );
    notes.extend(reader.notes());
    notes.iter_mut().for_each(|note| *note = printable(note));
    notes
}

/// The same with the columns that it does not read.
pub(crate) fn of_all(reader: &dyn Reader) -> Vec<String> {
    let unread = reader.unread();
    let mut notes = of_reader(reader);
    if !unread.is_empty() {
        let names = unread.iter().map(|column| format!("{} ({})", shown_name(&column.name), shown_name(&column.kind)));
        notes.push(format!("not read: {}", listed(names)));
    }
    notes
}

/// Files of a directory that are none of its data, by their endings.
#[derive(Clone, Debug, Default)]
pub(crate) struct IgnoredFiles {
    count: usize,
    endings: BTreeMap<String, usize>,
}

impl IgnoredFiles {
    pub fn add(&mut self, path: &Path) {
        self.count += 1;
        let ending = path.extension().map_or("no ending".into(), |ending| format!(".{}", ending.to_string_lossy()));
        let ending = ending.to_lowercase();
        if self.endings.len() < ENDINGS_MAX || self.endings.contains_key(&ending) {
            *self.endings.entry(ending).or_default() += 1;
        }
    }

    pub fn add_all(&mut self, other: &Self) {
        self.count += other.count;
        for (ending, count) in &other.endings {
            *self.endings.entry(ending.clone()).or_default() += count;
        }
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether a file with one of these endings is among them.
    pub fn has_one_of(&self, endings: &[&str]) -> bool {
        endings.iter().any(|ending| self.endings.contains_key(&format!(".{ending}")))
    }

    /// `12 files (.txt 8, .tif 4)`.
    pub fn described(&self) -> String {
        let mut endings: Vec<(&String, &usize)> = self.endings.iter().collect();
        endings.sort_by_key(|(ending, count)| (std::cmp::Reverse(**count), (*ending).clone()));
        let shown = endings.iter().take(ENDINGS_SHOWN).map(|(ending, count)| format!("{ending} {count}"));
        let mut shown: Vec<String> = shown.collect();
        if endings.len() > ENDINGS_SHOWN {
            shown.push("…".into());
        }
        let plural = if self.count == 1 { "file" } else { "files" };
        format!("{} {plural} ({})", self.count, shown.join(", "))
    }

    /// What is said of them, if there are any, and why.
    pub fn note(&self, directory: &Path, what: &str) -> Option<String> {
        (self.count > 0).then(|| format!("left out: {} in {}: {what}", self.described(), directory.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_names_and_endings_are_shortened() {
        let names = |count: usize| listed((0..count).map(|at| format!("c{at}")).collect::<Vec<_>>().into_iter());
        assert_eq!((names(2), names(8)), ("c0, c1".into(), "c0, c1, c2, c3, c4, c5, c6, c7".into()));
        assert_eq!(names(10), "c0, c1, c2, c3, c4, c5, c6, c7 and 2 more");
        let mut ignored = IgnoredFiles::default();
        assert_eq!(ignored.note(Path::new("d"), "not images"), None);
        ignored.add(Path::new("d/a.TXT"));
        let note = ignored.note(Path::new("d"), "not images").unwrap();
        assert_eq!(note, "left out: 1 file (.txt 1) in d: not images");
        for name in ["b.txt", "c", "d.e1", "d.e2", "d.e3"] {
            ignored.add(Path::new(name));
        }
        assert_eq!(ignored.described(), "6 files (.txt 2, .e1 1, .e2 1, .e3 1, …)");
        assert!(ignored.has_one_of(&["tif", "e3"]) && !ignored.has_one_of(&["e4"]));
    }
}
