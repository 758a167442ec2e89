//! The checkpoints of a run: a directory with one directory for each.

use crate::checkpoint::Checkpoint;
use crate::disk::{Disk, Item, SharedDisk};
use crate::error::CkptError;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

const STEP: &str = "step-";
const UNFINISHED: &str = ".unfinished-";
const REMOVING: &str = ".removing-";

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
        let checkpoint = Checkpoint::open(disk, &path);
        Listed { name, path, checkpoint }
    };
    Ok(names(disk.as_ref(), root)?.into_iter().map(open).collect())
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

/// Names of checkpoints, the newest last; none if there is no such directory.
fn names(disk: &dyn Disk, root: &Path) -> Result<Vec<StepName>, CkptError> {
    let items = items(disk, root)?;
    let mut names: Vec<StepName> =
        items.iter().filter(|item| item.is_dir).filter_map(|item| StepName::parse(&item.name)).collect();
    names.sort();
    Ok(names)
}

/// The newest checkpoint of which every byte is as it was written.
pub fn newest_valid(disk: &SharedDisk, root: &Path) -> Result<Found, CkptError> {
    let mut found = Found::default();
    for name in names(disk.as_ref(), root)?.into_iter().rev() {
        let path = root.join(name.to_string());
        match sound(disk, &path) {
            Ok(checkpoint) => {
                found.checkpoint = Some(checkpoint);
                break;
            }
            Err(why) => found.skipped.push((path, why)),
        }
    }
    Ok(found)
}

/// A checkpoint of which every byte is as it was written, or what is wrong.
fn sound(disk: &SharedDisk, path: &Path) -> Result<Checkpoint, String> {
    let checkpoint = Checkpoint::open(disk, path).map_err(|error| error.brief())?;
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
    /// An unfinished one that ranks are writing.
    pub unfinished: Option<&'a Path>,
    /// All unfinished ones: ranks may have begun the next.
    pub all_unfinished: bool,
}

/// Removes old checkpoints, and what was left unfinished. The newest sound one always stays, and so does whatever could not
/// be opened, unless there are newer sound ones. Returns what was removed.
pub fn prune(disk: &SharedDisk, root: &Path, keep: Keep<'_>) -> Result<Vec<PathBuf>, CkptError> {
    let mut removed = Vec::new();
    let names = names(disk.as_ref(), root)?;
    let old = names.len().saturating_sub(keep.newest.max(1));
    let is_sound = |path: &Path| keep.committed == Some(path) || sound(disk, path).is_ok();
    let kept: Vec<PathBuf> = names[old..].iter().rev().map(|name| root.join(name.to_string())).collect();
    let old = names[..old].iter().map(|name| root.join(name.to_string()));
    let mut old: Vec<PathBuf> = old.filter(|path| Some(path.as_path()) != keep.best).collect();
    if !old.is_empty() && !kept.iter().any(|path| is_sound(path)) {
        // Of the old ones, the newest sound one stays instead.
        if let Some(at) = (0..old.len()).rev().find(|at| is_sound(&old[*at])) {
            old.remove(at);
        }
    }
    for path in old {
        remove(disk.as_ref(), root, &path)?;
        removed.push(path);
    }
    let items = items(disk.as_ref(), root)?;
    let left = if keep.all_unfinished { &[REMOVING][..] } else { &[UNFINISHED, REMOVING] };
    for item in items.iter().filter(|item| left.iter().any(|prefix| item.name.starts_with(prefix))) {
        let path = root.join(&item.name);
        if item.is_dir && Some(path.as_path()) != keep.unfinished {
            remove_tree(disk.as_ref(), &path)?;
            removed.push(path);
        }
    }
    Ok(removed)
}

/// Removes a checkpoint. It has another name first, so that a half-removed one never looks like one.
fn remove(disk: &dyn Disk, root: &Path, path: &Path) -> Result<(), CkptError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let aside = root.join(format!("{REMOVING}{name}"));
    remove_tree(disk, &aside)?;
    disk.rename(path, &aside).map_err(CkptError::io(path, "rename", None))?;
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
