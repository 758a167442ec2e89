//! The paths that a pattern such as `photos/**/*.jpg` matches.
//!
//! Links to directories are followed, but no directory is entered twice for the same rest of the pattern: links in a circle end,
//! and the files of a folder that several links lead to are named once.

use glob::{MatchOptions, Pattern, PatternError};
use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Directories that one pattern may lead through.
const DIRECTORIES_MAX: usize = 10_000_000;
/// Stands for any directories, one inside of the other, and for none.
const ANY_DEPTH: &str = "**";

/// What a pattern matches.
#[derive(Debug, Default)]
pub(crate) struct Matches {
    /// Sorted by their components.
    pub paths: Vec<PathBuf>,
    /// Directories that were left out, as they had been entered by another path.
    pub again: usize,
}

/// Why a pattern cannot be followed.
#[derive(Debug)]
pub(crate) enum WalkError {
    Pattern(PatternError),
    Read(PathBuf, io::Error),
}

/// One component of a pattern.
enum Part {
    /// A name without wildcards, `.` and `..` among them.
    Name(String),
    Wild(Pattern),
    AnyDepth,
}

struct Walk<'p> {
    parts: &'p [Part],
    /// Directories by device and number, each with the part of the pattern that it was entered for.
    entered: HashSet<(u64, u64, usize)>,
    wants_directory: bool,
    found: Matches,
    paths_max: usize,
}

/// The paths that exist and match, at most one more than `paths_max`. Names that are not UTF-8 match nothing.
pub(crate) fn matches(pattern: &str, paths_max: usize) -> Result<Matches, WalkError> {
    Pattern::new(pattern).map_err(WalkError::Pattern)?;
    let mut parts: Vec<Part> = Vec::new();
    for text in pattern.split('/').filter(|text| !text.is_empty()) {
        match text {
            ANY_DEPTH if matches!(parts.last(), Some(Part::AnyDepth)) => {}
            ANY_DEPTH => parts.push(Part::AnyDepth),
            name if !name.contains(['*', '?', '[']) => parts.push(Part::Name(name.into())),
            wild => parts.push(Part::Wild(Pattern::new(wild).map_err(WalkError::Pattern)?)),
        }
    }
    let start = if pattern.starts_with('/') { PathBuf::from("/") } else { PathBuf::new() };
    let mut walk = Walk {
        parts: &parts,
        entered: HashSet::new(),
        wants_directory: pattern.ends_with('/'),
        found: Matches::default(),
        paths_max,
    };
    walk.below(&start, 0)?;
    walk.found.paths.sort_unstable();
    Ok(walk.found)
}

impl Walk<'_> {
    /// Looks in a directory for what the parts from number `at` on match. Whether it was entered, and not only passed by.
    fn below(&mut self, directory: &Path, at: usize) -> Result<bool, WalkError> {
        let readable = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
        let Some(part) = self.parts.get(at) else { return Ok(false) };
        // What is no directory has nothing below it.
        let Ok(meta) = fs::metadata(readable) else { return Ok(false) };
        if !meta.is_dir() || self.found.paths.len() > self.paths_max {
            return Ok(false);
        }
        if let Part::Name(name) = part {
            let path = directory.join(name);
            if path.exists() {
                self.matched(path, at)?;
            }
            return Ok(true);
        }
        if !self.entered.insert((meta.dev(), meta.ino(), at)) {
            self.found.again += 1;
            return Ok(false);
        }
        let failed = |error: io::Error| WalkError::Read(readable.into(), error);
        if self.entered.len() > DIRECTORIES_MAX {
            let message = format!("the pattern leads to more than {DIRECTORIES_MAX} directories");
            return Err(failed(io::Error::other(message)));
        }
        let is_last = at + 1 == self.parts.len();
        if matches!(part, Part::AnyDepth) && !is_last {
            self.below(directory, at + 1)?;
        }
        // Components are matched one by one: a wildcard never stands for a separator.
        let options = MatchOptions::new();
        for (name, may_be_directory) in entries(readable).map_err(failed)? {
            let path = directory.join(&name);
            match part {
                Part::AnyDepth if may_be_directory => {
                    if self.below(&path, at)? && is_last {
                        self.found.paths.push(path);
                    }
                }
                Part::Wild(pattern) if name.to_str().is_some_and(|name| pattern.matches_with(name, options)) => {
                    self.matched(path, at)?;
                }
                _ => {}
            }
        }
        Ok(true)
    }

    /// A path that all parts up to number `at` match.
    fn matched(&mut self, path: PathBuf, at: usize) -> Result<(), WalkError> {
        if at + 1 < self.parts.len() {
            return self.below(&path, at + 1).map(|_| ());
        }
        if !self.wants_directory || path.is_dir() {
            self.found.paths.push(path);
        }
        Ok(())
    }
}

/// What is in a directory, in the order of names: by which of several paths a folder is entered depends on them only. And whether
/// each may be a directory: what a link leads to is looked at when it is followed.
fn entries(directory: &Path) -> io::Result<Vec<(OsString, bool)>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let may_be_directory = entry.file_type().map_or(true, |kind| kind.is_dir() || kind.is_symlink());
        entries.push((entry.file_name(), may_be_directory));
    }
    entries.sort_unstable();
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn tree(files: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for file in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        root
    }

    fn found(root: &Path, pattern: &str) -> (Vec<String>, usize) {
        let matches = matches(&format!("{}/{pattern}", root.display()), 1000).unwrap();
        let name = |path: &PathBuf| path.strip_prefix(root).unwrap().display().to_string();
        (matches.paths.iter().map(name).collect(), matches.again)
    }

    /// Without links, what the library finds, in its order.
    #[test]
    fn patterns_mean_what_they_mean_elsewhere() {
        let names = ["a/1.csv", "a/b/2.csv", "a/b/c/3.csv", "a/b.csv", "a/b-d/4.csv", ".h/5.csv", "z.csv", "b/x/1.csv"];
        let root = tree(&names);
        for pattern in [
            "*.csv",
            "*/*.csv",
            "**/*.csv",
            "a/**/*.csv",
            "a/**",
            "**/b/**/*.csv",
            "**/b/*",
            "*/",
            "a/b/c/3.csv",
            "a/./b/*",
            "a/../b/**/1.csv",
            "[ab]/?.csv",
            "**/**/3.csv",
            "a/*/",
            "nothing/*",
            "a//b/*.csv",
            "z.csv/*",
        ] {
            let whole = format!("{}/{pattern}", root.path().display());
            let theirs: Vec<PathBuf> = glob::glob(&whole).unwrap().map(Result::unwrap).collect();
            let ours = matches(&whole, 1000).unwrap();
            assert_eq!((ours.paths, ours.again), (theirs, 0), "{pattern}");
        }
        assert!(matches!(matches("a***b", 1), Err(WalkError::Pattern(_))));
    }

    #[test]
    fn links_in_a_circle_end_and_no_folder_is_read_twice() {
        let root = tree(&["a/1.csv", "a/deep/2.csv", "b/3.csv"]);
        let path = |name: &str| root.path().join(name);
        symlink("..", path("a/up")).unwrap();
        symlink(".", path("a/self")).unwrap();
        symlink("../../b", path("a/deep/other")).unwrap();
        symlink("../a", path("b/back")).unwrap();
        let (files, again) = found(root.path(), "**/*.csv");
        assert_eq!(files, ["a/1.csv", "a/deep/2.csv", "a/deep/other/3.csv"]);
        assert!(again > 0);
        assert_eq!(found(root.path(), "b/**/3.csv").0, ["b/3.csv"]);
        // Two links to one folder.
        let root = tree(&["real/1.csv", "real/2.csv"]);
        symlink("real", root.path().join("first")).unwrap();
        symlink("real", root.path().join("second")).unwrap();
        for pattern in ["**/*.csv", "*/*.csv", "*/**/*.csv"] {
            assert_eq!(found(root.path(), pattern), (vec!["first/1.csv".into(), "first/2.csv".into()], 2), "{pattern}");
        }
        // A link to a file is a file of its own.
        symlink("real/1.csv", root.path().join("3.csv")).unwrap();
        assert_eq!(found(root.path(), "*.csv").0, ["3.csv"]);
    }
}
