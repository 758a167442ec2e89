//! `labels.csv` of a flat folder: a header line, then the name of an image and its label per line. Images that it does not name
//! are left out.

use super::listing::{Listing, entries};
use crate::error::{ReadError, shown};
use crate::formats::labels::Labels;
use std::collections::HashSet;
use std::path::{Component, Path, PathBuf};

pub(super) const NAME: &str = "labels.csv";
const HINT: &str = "write a header line, then `NAME,LABEL` with names of images in this folder";
/// Of a name, to tell it from all others: names themselves would take more memory than the listing.
const DIGEST_BYTES: usize = 16;

/// The same name for the same file: `a//b.png` is `a/b.png`. `None` if it leads out of the folder.
fn plain(name: &str) -> Option<PathBuf> {
    let is_inside = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
    (is_inside && !name.is_empty()).then(|| Path::new(name).components().collect())
}

/// What is said of the images and other files of the folder that the file does not name.
pub(super) fn left_out(directory: &Path, listing: &Listing) -> Result<Vec<String>, ReadError> {
    let mut inside = entries(directory)?;
    let named: HashSet<&[u8]> = (0..listing.len()).map(|at| listing.name(at)).collect();
    let is_named = |path: &PathBuf| path.file_name().is_some_and(|name| named.contains(name.as_encoded_bytes()));
    inside.images.retain(|path| !is_named(path));
    let mut notes = Vec::new();
    if !inside.images.is_empty() {
        let plural = if inside.images.len() == 1 { "image" } else { "images" };
        notes.push(format!(
            "left out: {} {plural} in {} that {NAME} does not name",
            inside.images.len(),
            directory.display()
        ));
    }
    Ok(notes)
}

/// Reads the file, and lists the images that it names.
pub(super) fn read(directory: &Path, listing: &mut Listing) -> Result<Labels, ReadError> {
    let path = directory.join(NAME);
    let opened = kolo_base::open_regular(&path).map_err(|error| ReadError::io(&path, &error))?;
    let mut reader = csv::ReaderBuilder::new().has_headers(true).flexible(true).from_reader(opened);
    let (mut texts, mut known, mut line) = (Vec::new(), HashSet::new(), csv::StringRecord::new());
    let wrong = |message: String, offset: u64| ReadError::new(message, HINT).in_file(&path).at(offset);
    let header = reader.byte_headers().map_err(|error| wrong(error.to_string(), 0))?;
    if let Some(name) = header.get(0).and_then(|name| str::from_utf8(name).ok()).map(str::trim)
        && plain(name).is_some_and(|name| directory.join(name).is_file())
    {
        let message = format!("line 1: a header is expected, but {} is an image of this folder", shown(name));
        let hint = "write a line such as `file,label` before it: the first line is not read as an image";
        return Err(ReadError::new(message, hint).in_file(&path).at(0));
    }
    loop {
        let (offset, number) = (reader.position().byte(), reader.position().line());
        let wrong = |message: String| wrong(format!("line {number}: {message}"), offset);
        if !reader.read_record(&mut line).map_err(|error| wrong(error.to_string()))? {
            break;
        }
        let (Some(name), Some(label)) = (line.get(0), line.get(1)) else {
            return Err(wrong("a line has fewer than two columns".into()));
        };
        let (name, label) = (name.trim(), label.trim());
        let Some(plain) = plain(name) else {
            return Err(wrong(format!("{} is not the name of a file in this folder", shown(name))));
        };
        if !directory.join(&plain).is_file() {
            return Err(wrong(format!("there is no file {} in this folder", shown(name))));
        }
        if label.is_empty() {
            return Err(wrong(format!("the label of {} is empty", shown(name))));
        }
        let digest = blake3::hash(plain.as_os_str().as_encoded_bytes());
        let (digest, _) = digest.as_bytes().split_at(DIGEST_BYTES);
        if !known.insert(<[u8; DIGEST_BYTES]>::try_from(digest).unwrap_or_default()) {
            return Err(wrong(format!("{} has a second label", shown(name))));
        }
        listing.push(directory, plain.as_os_str(), 0)?;
        texts.push(label.to_string());
    }
    Labels::of(texts).map_err(|message| ReadError::new(message, "scale the labels").in_file(&path))
}
