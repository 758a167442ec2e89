//! The checkpoints of a run: a directory with one directory for each.

use crate::checkpoint::Checkpoint;
use crate::disk::{Disk, Item, SharedDisk};
use crate::error::CkptError;
use kolo_base::ShownPath;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

const STEP: &str = "step-";
const UNFINISHED: &str = ".unfinished-";
const REMOVING: &str = ".removing-";
/// Damaged checkpoints that notes name, at most.
const SKIPPED_NAMED_MAX: usize = 3;

/// The name of a checkpoint: `step-00000200`, or `step-00000200.2` for a later one of the same step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StepName {
    pub step: u64,
    /// From 1.
    pub revision: u64,
}

impl StepName {
    pub fn parse(name: &str) -> Option<Self> {
        let rest = name.strip_prefix(STEP)?;
        let (step, revision) = rest.split_once('.').unwrap_or((rest, "1"));
        let parsed = Self { step: step.parse().ok()?, revision: revision.parse().ok()? };
        (parsed.to_string() == name).then_some(parsed)
    }
}

impl fmt::Display for StepName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{STEP}{:08}", self.step)?;
        if self.revision == 1 { Ok(()) } else { write!(f, ".{}", self.revision) }
    }
}

/// Where ranks write a checkpoint until it is committed. `attempt` tells attempts apart that could run at the same time, such
/// as those of two generations; all ranks of one must agree on it.
pub fn staging_dir(root: &Path, step: u64, attempt: u64) -> PathBuf {
    root.join(format!("{UNFINISHED}{step:08}-{attempt}"))
}

/// A directory among the checkpoints of a run.
#[derive(Debug)]
pub struct Listed {
    pub name: StepName,
    pub path: PathBuf,
    /// The checkpoint, if its manifest is sound and its files have the right sizes, or what is wrong.
    pub checkpoint: Result<Checkpoint, CkptError>,
}

/// What was found on the way to the newest sound checkpoint.
#[derive(Debug, Default)]
pub struct Found {
    pub checkpoint: Option<Checkpoint>,
    /// Newer ones that are not sound, and why.
    pub skipped: Vec<(PathBuf, String)>,
}

/// The checkpoints in a directory, the newest last. What is in files is not looked at ([`Checkpoint::verify`] does).
pub fn list(disk: &SharedDisk, root: &Path) -> Result<Vec<Listed>, CkptError> {
    let open = |name: StepName| {
        let path = root.join(name.to_string());
        let checkpoint = open_named(disk, &path, name);
        Listed { name, path, checkpoint }
    };
    Ok(shown_names(disk.as_ref(), root)?.into_iter().map(open).collect())
}

/// The checkpoint of this name. One that was renamed would pass for a newer or an older one.
fn open_named(disk: &SharedDisk, path: &Path, name: StepName) -> Result<Checkpoint, CkptError> {
    let checkpoint = Checkpoint::open(disk, path)?;
    let step = checkpoint.header().step;
    if step == name.step {
        return Ok(checkpoint);
    }
    let right = StepName { step, revision: 1 };
    Err(CkptError::refused(
        path,
        format!("is named after step {}, but holds the state after step {step}", name.step),
        format!("name it {right} again"),
    ))
}

/// Checkpoints that were begun and not committed.
pub fn unfinished(disk: &dyn Disk, root: &Path) -> Result<Vec<PathBuf>, CkptError> {
    let items = items(disk, root)?;
    let begun = items.iter().filter(|item| item.is_dir && item.name.starts_with(UNFINISHED));
    Ok(begun.map(|item| root.join(&item.name)).collect())
}

/// What a directory holds; nothing if there is none.
fn items(disk: &dyn Disk, root: &Path) -> Result<Vec<Item>, CkptError> {
    match disk.list(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        outcome => outcome.map_err(CkptError::io(root, "list", None)),
    }
}

/// Names of checkpoints that are in this directory itself, the newest last; none if there is no such directory.
fn names(disk: &dyn Disk, root: &Path) -> Result<Vec<StepName>, CkptError> {
    named(disk, root, |item| item.is_dir)
}

/// Those, and links to some elsewhere, which can be read but are not removed. One that leads nowhere, or a file in the place of
/// a checkpoint, is a damaged one.
fn shown_names(disk: &dyn Disk, root: &Path) -> Result<Vec<StepName>, CkptError> {
    named(disk, root, |_| true)
}

fn named(disk: &dyn Disk, root: &Path, is_dir: impl Fn(&Item) -> bool) -> Result<Vec<StepName>, CkptError> {
    let items = items(disk, root)?;
    let parsed = items.iter().filter_map(|item| StepName::parse(&item.name).filter(|_| is_dir(item)));
    let mut names: Vec<StepName> = parsed.collect();
    names.sort();
    Ok(names)
}

/// The newest checkpoint of which every byte is as it was written.
pub fn newest_valid(disk: &SharedDisk, root: &Path) -> Result<Found, CkptError> {
    let mut found = Found::default();
    for name in shown_names(disk.as_ref(), root)?.into_iter().rev() {
        let path = root.join(name.to_string());
        match sound(disk, &path, name) {
            Ok(checkpoint) => {
                found.checkpoint = Some(checkpoint);
                break;
            }
            Err(why) => found.skipped.push((path, why)),
        }
    }
    Ok(found)
}

/// Notes on checkpoints that were passed over, and why: the newest few, and how many more.
pub fn skipped_notes(skipped: &[(PathBuf, String)]) -> Vec<String> {
    let named = skipped.iter().take(SKIPPED_NAMED_MAX);
    let mut notes: Vec<String> = named.map(|(path, why)| format!("note: skipped {}: {why}", path.shown())).collect();
    match skipped.len().saturating_sub(SKIPPED_NAMED_MAX) {
        0 => {}
        1 => notes.push("note: skipped one more checkpoint; `kolo ckpt verify` says why".into()),
        more => notes.push(format!("note: skipped {more} more checkpoints; `kolo ckpt verify` says why")),
    }
    notes
}

/// A checkpoint of which every byte is as it was written, or what is wrong.
fn sound(disk: &SharedDisk, path: &Path, name: StepName) -> Result<Checkpoint, String> {
    let checkpoint = open_named(disk, path, name).map_err(|error| error.brief())?;
    match checkpoint.verify(&|_| ()).first() {
        None => Ok(checkpoint),
        Some(damage) => Err(damage.to_string()),
    }
}

/// Which checkpoints to keep.
#[derive(Clone, Copy, Debug, Default)]
pub struct Keep<'a> {
    /// So many of the newest; one at least.
    pub newest: usize,
    /// And this one.
    pub best: Option<&'a Path>,
    /// One that was just committed: it need not be read to be trusted.
    pub committed: Option<&'a Path>,
    /// Which unfinished ones nobody needs.
    pub unfinished: Unfinished,
}

/// Unfinished checkpoints that can go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unfinished {
    /// All of them: nobody is writing.
    #[default]
    All,
    /// Those of earlier steps than one that was just committed, and of its attempt, as in [`staging_dir`], those of its step.
    /// Ranks of another attempt may be writing that step, too, or a later one.
    Before { step: u64, attempt: u64 },
}

impl Unfinished {
    /// Whether a directory of this name can go.
    fn has(self, name: &str) -> bool {
        let Some(rest) = name.strip_prefix(UNFINISHED) else { return false };
        let parts = rest.split_once('-');
        let parsed = parts.map(|(step, attempt)| (step.parse::<u64>(), attempt.parse::<u64>()));
        match (self, parsed) {
            (Self::All, _) => true,
            (Self::Before { step, attempt }, Some((Ok(of), Ok(by)))) => of < step || (of == step && by == attempt),
            (Self::Before { .. }, _) => false,
        }
    }
}

/// Removes old checkpoints, and what was left unfinished. The newest sound one always stays, and so does whatever could not
/// be opened, unless there are newer sound ones. Returns what was removed.
///
/// Whoever still writes into an unfinished one, or is about to commit it, finds it gone as a whole: it has another name before
/// any of it is removed.
pub fn prune(disk: &SharedDisk, root: &Path, keep: Keep<'_>) -> Result<Vec<PathBuf>, CkptError> {
    let mut removed = Vec::new();
    let names = names(disk.as_ref(), root)?;
    let old = names.len().saturating_sub(keep.newest.max(1));
    let place = |name: &StepName| (root.join(name.to_string()), *name);
    let is_sound =
        |(path, name): &(PathBuf, StepName)| keep.committed == Some(path) || sound(disk, path, *name).is_ok();
    let kept: Vec<(PathBuf, StepName)> = names[old..].iter().rev().map(place).collect();
    let old = names[..old].iter().map(place);
    let mut old: Vec<(PathBuf, StepName)> = old.filter(|(path, _)| Some(path.as_path()) != keep.best).collect();
    if !old.is_empty() && !kept.iter().any(is_sound) {
        // Of the old ones, the newest sound one stays instead.
        if let Some(at) = (0..old.len()).rev().find(|at| is_sound(&old[*at])) {
            old.remove(at);
        }
    }
    for (path, _) in old {
        remove(disk.as_ref(), root, &path)?;
        removed.push(path);
    }
    let items = items(disk.as_ref(), root)?;
    for item in items.iter().filter(|item| item.is_dir) {
        let path = root.join(&item.name);
        if keep.unfinished.has(&item.name) {
            remove_unfinished(disk.as_ref(), &path)?;
            removed.push(path);
        } else if item.name.starts_with(REMOVING) {
            remove_tree(disk.as_ref(), &path)?;
            removed.push(path);
        }
    }
    Ok(removed)
}

/// Removes an unfinished checkpoint, if it is still there: somebody may commit it at this moment, or remove it, too.
pub(crate) fn remove_unfinished(disk: &dyn Disk, path: &Path) -> Result<(), CkptError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let aside = path.with_file_name(format!("{REMOVING}{}", name.trim_start_matches('.')));
    remove_tree(disk, &aside)?;
    match disk.rename(path, &aside) {
        Err(error) if others_remove(&error) => Ok(()),
        outcome => {
            outcome.map_err(CkptError::io(path, "rename", None))?;
            remove_tree(disk, &aside)
        }
    }
}

/// Whether a rename failed because somebody else removes the same directory: it is gone, or in the new place already.
fn others_remove(error: &io::Error) -> bool {
    use io::ErrorKind::{AlreadyExists, DirectoryNotEmpty, NotFound};
    matches!(error.kind(), NotFound | DirectoryNotEmpty | AlreadyExists)
}

/// Removes a checkpoint. It has another name first, so that a half-removed one never looks like one.
fn remove(disk: &dyn Disk, root: &Path, path: &Path) -> Result<(), CkptError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let aside = root.join(format!("{REMOVING}{name}"));
    remove_tree(disk, &aside)?;
    match disk.rename(path, &aside) {
        Err(error) if others_remove(&error) => return Ok(()),
        outcome => outcome.map_err(CkptError::io(path, "rename", None))?,
    }
    disk.sync_dir(root).map_err(CkptError::io(root, "sync", None))?;
    remove_tree(disk, &aside)
}

/// Removes a directory of files, if it is there. Others may do the same at the same moment: a rank of an earlier generation that
/// gives up its checkpoint, say. What is gone is gone; what somebody still writes into stays for the next time.
pub(crate) fn remove_tree(disk: &dyn Disk, path: &Path) -> Result<(), CkptError> {
    let items = match disk.list(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        outcome => outcome.map_err(CkptError::io(path, "list", None))?,
    };
    for item in items {
        let inner = path.join(&item.name);
        match item.is_dir {
            true => remove_tree(disk, &inner)?,
            false => match disk.remove_file(&inner) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                outcome => outcome.map_err(CkptError::io(&inner, "remove", None))?,
            },
        }
    }
    match disk.remove_dir(path) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => Ok(()),
        outcome => outcome.map_err(CkptError::io(path, "remove", None)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_damaged_checkpoints_are_counted() {
        let skipped = |count: usize| -> Vec<(PathBuf, String)> {
            (0..count).map(|step| (PathBuf::from(format!("step-{step}")), "it is damaged".into())).collect()
        };
        assert_eq!(skipped_notes(&skipped(1)), ["note: skipped step-0: it is damaged"]);
        assert_eq!(skipped_notes(&skipped(3)).len(), 3);
        let last = |count: usize| skipped_notes(&skipped(count)).split_off(3);
        assert_eq!(last(4), ["note: skipped one more checkpoint; `kolo ckpt verify` says why"]);
        assert_eq!(last(10_003), ["note: skipped 10000 more checkpoints; `kolo ckpt verify` says why"]);
    }
}
