//! `labels.csv` of a flat folder: a header line, then the name of an image and its label per line.

use super::listing::Listing;
use crate::error::{ReadError, shown};
use crate::formats::labels::Labels;
use std::fs::File;
use std::path::{Component, Path};

pub(super) const NAME: &str = "labels.csv";

/// Reads the file, and lists the images that it names.
pub(super) fn read(directory: &Path, listing: &mut Listing) -> Result<Labels, ReadError> {
    let path = directory.join(NAME);
    let opened = File::open(&path).map_err(|error| ReadError::io(&path, &error))?;
    let mut reader = csv::ReaderBuilder::new().has_headers(true).flexible(true).from_reader(opened);
    let mut texts = Vec::new();
    let mut line = csv::StringRecord::new();
    reader.byte_headers().map_err(|error| ReadError::new(error.to_string(), "check the file").in_file(&path).at(0))?;
    loop {
        let offset = reader.position().byte();
        let wrong = |message: String| {
            let hint = "write a header line, then `NAME,LABEL` with names of images in this folder";
            ReadError::new(message, hint).in_file(&path).at(offset)
        };
        if !reader.read_record(&mut line).map_err(|error| wrong(error.to_string()))? {
            break;
        }
        let (Some(name), Some(label)) = (line.get(0), line.get(1)) else {
            return Err(wrong("a line has fewer than two columns".into()));
        };
        let (name, label) = (name.trim(), label.trim());
        let is_inside = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
        if name.is_empty() || !is_inside {
            return Err(wrong(format!("{} is not the name of a file in this folder", shown(name))));
        }
        if !directory.join(name).is_file() {
            return Err(wrong(format!("there is no file {} in this folder", shown(name))));
        }
        listing.push(directory, name.as_ref(), 0)?;
        texts.push(label.to_string());
    }
    Labels::of(texts).map_err(|message| ReadError::new(message, "scale the labels").in_file(&path))
}
