//! The image files below a directory: every directory in the order of names, hidden files left out. Links are followed, but no
//! directory is read twice: links in a circle end, and no image stands on both sides of a split.

use crate::error::ReadError;
use crate::image;
use crate::notes::IgnoredFiles;
use crate::shards::is_hidden;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Images of one data set.
const IMAGES_MAX: usize = 100_000_000;
/// Directories of one data set.
const DIRECTORIES_MAX: usize = 10_000_000;
/// Directories inside of each other.
const DEPTH_MAX: usize = 64;

/// Many file names in little memory.
#[derive(Debug, Default)]
pub(super) struct Listing {
    directories: Vec<PathBuf>,
    names: Vec<u8>,
    images: Vec<Image>,
    /// Directories that were read, by device and number: the path and the label of each. That of a root has no label.
    read: HashMap<(u64, u64), (PathBuf, Option<u32>)>,
    /// Directories that were left out as they had been read by another path.
    pub again: usize,
    /// Files that are no images.
    pub ignored: IgnoredFiles,
}

#[derive(Clone, Copy, Debug)]
struct Image {
    directory: u32,
    /// Where its name ends; it starts at the end of the one before.
    name_end: u64,
    label: u32,
}

pub(super) fn is_image_name(path: &Path) -> bool {
    let ending = path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
    ending.is_some_and(|ending| image::ENDINGS.contains(&ending.as_str()))
}

impl Listing {
    pub fn len(&self) -> usize {
        self.images.len()
    }

    pub fn path(&self, at: usize) -> PathBuf {
        self.directories[self.images[at].directory as usize].join(OsStr::from_bytes(self.name(at)))
    }

    pub fn name(&self, at: usize) -> &[u8] {
        let start = if at == 0 { 0 } else { self.images[at - 1].name_end };
        &self.names[start as usize..self.images[at].name_end as usize]
    }

    pub fn label(&self, at: usize) -> u32 {
        self.images[at].label
    }

    /// Gives every image the label that `new` says for its old one.
    pub fn relabel(&mut self, new: impl Fn(u32) -> u32) {
        self.images.iter_mut().for_each(|image| image.label = new(image.label));
    }

    /// Adds an image.
    pub fn push(&mut self, directory: &Path, name: &OsStr, label: u32) -> Result<(), ReadError> {
        if self.directories.last().is_none_or(|last| last != directory) {
            self.directories.push(directory.into());
        }
        if self.images.len() >= IMAGES_MAX || self.directories.len() > DIRECTORIES_MAX {
            return Err(too_many(directory));
        }
        self.names.extend(name.as_bytes());
        let directory = self.directories.len() as u32 - 1;
        self.images.push(Image { directory, name_end: self.names.len() as u64, label });
        Ok(())
    }

    /// Adds all images below `directory`, which is `root` or in it, and says which other files lie there. A link that leads back
    /// to `root` is not followed, either.
    pub fn walk(&mut self, root: &Path, directory: &Path, label: u32) -> Result<IgnoredFiles, ReadError> {
        if root != directory {
            self.read.entry(identity(root)?).or_insert_with(|| (root.into(), None));
        }
        let mut walk = Walk { listing: self, label, depth: 0, ignored: IgnoredFiles::default() };
        walk.enter(directory)?;
        let ignored = walk.ignored;
        self.ignored.add_all(&ignored);
        Ok(ignored)
    }
}

/// The same for every path to a directory.
fn identity(directory: &Path) -> Result<(u64, u64), ReadError> {
    let meta = fs::metadata(directory).map_err(|error| ReadError::io(directory, &error))?;
    Ok((meta.dev(), meta.ino()))
}

fn too_many(directory: &Path) -> ReadError {
    let message = format!("more than {IMAGES_MAX} images or {DIRECTORIES_MAX} directories");
    ReadError::new(message, "pack the images into tar shards").in_file(directory)
}

struct Walk<'l> {
    listing: &'l mut Listing,
    label: u32,
    /// Directories that the present one is in.
    depth: usize,
    ignored: IgnoredFiles,
}

impl Walk<'_> {
    fn enter(&mut self, directory: &Path) -> Result<(), ReadError> {
        let this = identity(directory)?;
        match self.listing.read.get(&this) {
            Some((path, Some(label))) if *label != self.label => {
                let message =
                    format!("this folder is {}, of another class: a link leads from one to the other", path.display());
                return Err(ReadError::new(message, "take the link away: an image has one class").in_file(directory));
            }
            Some(_) => {
                self.listing.again += 1;
                return Ok(());
            }
            None => {}
        }
        if self.listing.read.len() >= DIRECTORIES_MAX {
            return Err(too_many(directory));
        }
        if self.depth >= DEPTH_MAX {
            let message = format!("more than {DEPTH_MAX} directories inside of each other");
            return Err(ReadError::new(message, "move the images up").in_file(directory));
        }
        self.listing.read.insert(this, (directory.into(), Some(self.label)));
        let inside = entries(directory)?;
        for path in inside.images {
            self.listing.push(directory, path.file_name().unwrap_or_default(), self.label)?;
        }
        self.ignored.add_all(&inside.ignored);
        self.depth += 1;
        inside.directories.iter().try_for_each(|path| self.enter(path))?;
        self.depth -= 1;
        Ok(())
    }
}

/// What is in a directory, sorted by name.
#[derive(Default)]
pub(super) struct Entries {
    pub directories: Vec<PathBuf>,
    pub images: Vec<PathBuf>,
    /// Files that are no images.
    pub ignored: IgnoredFiles,
}

pub(super) fn entries(directory: &Path) -> Result<Entries, ReadError> {
    let failed = |error: io::Error| ReadError::io(directory, &error);
    let mut found = Entries::default();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let path = entry.path();
        if is_hidden(&path) {
            continue;
        }
        let kind = entry.file_type().map_err(failed)?;
        // A link that leads nowhere is no directory; if it is named like an image, reading it says so.
        let is_directory = if kind.is_symlink() { path.is_dir() } else { kind.is_dir() };
        if is_directory {
            found.directories.push(path);
        } else if is_image_name(&path) {
            found.images.push(path);
        } else {
            found.ignored.add(&path);
        }
    }
    found.directories.sort_unstable();
    found.images.sort_unstable();
    Ok(found)
}
