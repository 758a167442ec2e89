//! Folders of images: `DIR/CLASS/*.png`, `*.jpg` and the like, at any depth below the class.
//!
//! The classes are the sorted names of the folders right below `DIR`. A folder without folders has labels if it has a
//! `labels.csv`. Images that are named one by one, or by a pattern, have the names of their own folders as classes, if these
//! are at least two. Hidden files are left out. A folder of a class without an image is an error, and files that are no images
//! are counted.

use crate::error::ReadError;
use crate::files::DataFile;
use crate::fingerprint;
use crate::folder_parts::FolderParts;
use crate::format::{Format, OpenError, OpenedFiles, Reader};
use crate::formats::labels::Labels;
use crate::image;
use crate::notes::IgnoredFiles;
use crate::record::{Record, RecordColumn, RecordKind, RecordName};
use kolo_graph::settings::Settings;
use listing::{Listing, entries};
use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};

mod labels;
mod listing;
#[cfg(test)]
mod tests;

pub const FORMAT: Format = Format {
    name: "images",
    doc: "folders of PNG, JPEG, WebP and GIF images, one per class; or single images",
    extensions: image::ENDINGS,
    sniff,
    open,
};

/// Bytes of one encoded image.
const IMAGE_BYTES_MAX: u64 = 1 << 30;
/// Folders that are looked into to tell what a directory holds.
const FOLDERS_LOOKED_AT: usize = 64;

fn sniff(path: &Path, head: &[u8]) -> bool {
    if !path.is_dir() {
        return image::is_image(head);
    }
    holds_image(path, &mut { FOLDERS_LOOKED_AT })
}

/// Whether an image lies in this directory or below it, as far as so many folders tell.
fn holds_image(directory: &Path, folders_left: &mut usize) -> bool {
    if *folders_left == 0 {
        return false;
    }
    *folders_left -= 1;
    let Ok(found) = entries(directory) else { return false };
    !found.images.is_empty() || found.directories.iter().any(|folder| holds_image(folder, folders_left))
}

/// Images in files of their own.
#[derive(Debug)]
struct Images {
    columns: Vec<RecordColumn>,
    listing: Listing,
    /// What `labels.csv` says; else the label in the listing counts, if there is a column for it.
    labels: Option<Labels>,
    /// What was left out.
    notes: Vec<String>,
}

fn open(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let mut listing = Listing::default();
    let mut names = Vec::new();
    let (mut labels, mut notes) = (None, Vec::new());
    for file in files {
        match file.is_directory {
            true if files.len() == 1 && file.path.join(labels::NAME).is_file() => {
                labels = Some(labels::read(&file.path, &mut listing)?);
                notes.extend(labels::left_out(&file.path, &listing)?);
            }
            true => {
                if let Some(parts) = FolderParts::of(&file.path) {
                    return Err(parts.refused(settings).into());
                }
                let before = std::mem::take(&mut listing.ignored);
                add_folder(&file.path, &mut listing, &mut names)?;
                notes.extend(std::mem::replace(&mut listing.ignored, before).note(&file.path, "not images"));
            }
            false => {
                let (folder, name) = (file.path.parent().unwrap_or(Path::new("")), file.path.file_name());
                let label = class(&mut names, class_name(folder)?);
                listing.push(folder, name.unwrap_or_default(), label)?;
            }
        }
    }
    if listing.len() == 0 && labels.is_some() {
        let message = "has a `labels.csv` that names no image";
        return Err(settings
            .wrong("source", message, "write a line `NAME,LABEL` for each image, below a header")
            .into());
    }
    if listing.len() == 0 {
        let hint = format!("images have names that end in {}", image::endings_listed());
        return Err(settings.wrong("source", "names no image", hint).into());
    }
    if listing.again > 0 {
        let folders = if listing.again == 1 { "a folder that links lead" } else { "folders that links lead" };
        notes.push(format!("left out: {folders} to a second time"));
    }
    let mut columns = vec![RecordColumn { name: "image".into(), kind: RecordKind::Image }];
    if let Some(labels) = &labels {
        columns.push(RecordColumn { name: "label".into(), kind: labels.kind() });
    } else if names.len() > 1 || has_classes(files) {
        let sorted: Vec<String> = names.iter().cloned().collect::<BTreeSet<_>>().into_iter().collect();
        let places: Vec<u32> = names.iter().map(|name| sorted.binary_search(name).unwrap_or_default() as u32).collect();
        listing.relabel(|label| places[label as usize]);
        columns.push(RecordColumn { name: "label".into(), kind: RecordKind::Class { names: sorted.into() } });
    }
    Ok(Box::new(Images { columns, listing, labels, notes }))
}

/// Whether a directory among the files has folders: then even a single class was meant.
fn has_classes(files: &[DataFile]) -> bool {
    let has_folders = |file: &DataFile| entries(&file.path).is_ok_and(|inside| !inside.directories.is_empty());
    files.iter().any(|file| file.is_directory && has_folders(file))
}

/// The number of a class in the order of appearance.
fn class(names: &mut Vec<String>, name: String) -> u32 {
    // The latest is the likeliest, as files come folder by folder.
    let at = names.iter().rposition(|known| *known == name).unwrap_or_else(|| {
        names.push(name);
        names.len() - 1
    });
    at as u32
}

fn class_name(folder: &Path) -> Result<String, ReadError> {
    let name = folder.file_name().unwrap_or_default();
    name.to_str().map(String::from).ok_or_else(|| {
        ReadError::new("the name of a class is not UTF-8", "give the folder another name").in_file(folder)
    })
}

fn add_folder(directory: &Path, listing: &mut Listing, names: &mut Vec<String>) -> Result<(), OpenError> {
    let found = entries(directory)?;
    if found.directories.is_empty() {
        let label = class(names, class_name(directory)?);
        listing.walk(directory, directory, label)?;
        return Ok(());
    }
    if let Some(loose) = found.images.first() {
        let message = "this image is in no class: there are folders beside it";
        let hint = "move it into the folder of its class, or name the images by a pattern";
        return Err(ReadError::new(message, hint).in_file(loose).into());
    }
    listing.ignored.add_all(&found.ignored);
    for folder in &found.directories {
        let before = (listing.len(), listing.again);
        let label = class(names, class_name(folder)?);
        let ignored = listing.walk(directory, folder, label)?;
        // The images of a folder that was read by another path are in the listing.
        if (listing.len(), listing.again) == before {
            return Err(without_image(folder, &ignored).into());
        }
    }
    Ok(())
}

/// The error of a folder of a class in which no image lies.
fn without_image(folder: &Path, ignored: &IgnoredFiles) -> ReadError {
    let endings = image::endings_listed();
    if ignored.is_empty() {
        let hint = format!("put images that end in {endings} into it, or take the folder away");
        return ReadError::new("the folder of a class is empty", hint).in_file(folder);
    }
    let message = format!("the folder of a class has no image that is read, but {}", ignored.described());
    let hint = match ignored.has_one_of(image::UNREAD_ENDINGS) {
        true => format!(
            "convert them, with `mogrify -format png` of ImageMagick or `Image.save` of Pillow: images that end in {endings} are read"
        ),
        false => format!("put images that end in {endings} into it, or move the folder away"),
    };
    ReadError::new(message, hint).in_file(folder)
}

impl Reader for Images {
    fn columns(&self) -> &[RecordColumn] {
        &self.columns
    }

    fn len(&self) -> usize {
        self.listing.len()
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        let path = self.listing.path(at);
        let failed = |error: std::io::Error| ReadError::io(&path, &error);
        let wrong = |message: String| {
            Err(ReadError::new(message, "leave it out, or put an image in its place").in_file(&path).at(0))
        };
        // Before it is opened: a pipe with the name of an image would never open.
        let meta = std::fs::metadata(&path).map_err(failed)?;
        if !meta.is_file() || meta.len() > IMAGE_BYTES_MAX {
            return wrong(format!("this is not a regular file of at most {IMAGE_BYTES_MAX} bytes"));
        }
        let bytes = record.bytes(0);
        bytes.reserve(meta.len() as usize + 1);
        let file = kolo_base::open_regular(&path).map_err(failed)?;
        file.take(IMAGE_BYTES_MAX).read_to_end(bytes).map_err(failed)?;
        if bytes.is_empty() {
            return wrong("the image is empty".into());
        }
        match &self.labels {
            Some(labels) => labels.write(at, 1, record),
            None if self.columns.len() > 1 => record.ints(1).push(self.listing.label(at).into()),
            None => {}
        }
        Ok(())
    }

    fn place(&self, at: usize) -> Option<(PathBuf, u64)> {
        Some((self.listing.path(at), 0))
    }

    fn name(&self, at: usize) -> Option<RecordName> {
        Some(RecordName { file: self.listing.path(at), key: None })
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn files(&self) -> Vec<PathBuf> {
        fingerprint::spread(self.listing.len(), fingerprint::FILES_MAX).map(|at| self.listing.path(at)).collect()
    }

    /// The names of all images: the directory's own name and size say nothing about them.
    fn fingerprint(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for at in 0..self.listing.len() {
            hasher.update(self.listing.name(at)).update(&self.listing.label(at).to_le_bytes());
        }
        self.labels.iter().for_each(|labels| labels.add_to(&mut hasher));
        hasher.finalize().to_hex().to_string()
    }
}
