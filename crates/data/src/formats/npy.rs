//! NumPy's `.npy` files and `.npz` archives of them. The first dim is the sample.
//!
//! An `.npy` file is a header, a dictionary in Python's notation, and the elements. Objects need `pickle`, which runs code:
//! they are refused. An `.npz` file is a zip archive: arrays that are stored are read where they lie, compressed ones are
//! unpacked once.

pub(super) mod header;
mod zip;

use crate::arrays::{Array, ArrayReader, FileArrays, existing_file, with_labels};
use crate::error::ReadError;
use crate::files::{Contents, DataFile, UNPACKED_BYTES_MAX};
use crate::format::{Format, OpenError, OpenedFiles};
use crate::notes::IgnoredFiles;
use kolo_graph::settings::Settings;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use zip::{Member, OpenedMembers};

pub const FORMAT: Format = Format {
    name: "npy",
    doc: "NumPy arrays, whose first dim is the sample; labels from `y.npy` beside `x.npy`, or `labels`",
    extensions: &["npy"],
    sniff: |_, head| head.starts_with(header::MAGIC),
    open: open_arrays,
};

pub const ARCHIVE: Format = Format {
    name: "npz",
    doc: "NumPy archives, a column per array",
    extensions: &["npz"],
    sniff: |_, head| head.starts_with(b"PK\x03\x04") && head.windows(4).any(|window| window == b".npy"),
    open: open_archives,
};

fn open_arrays(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let mut all = Vec::new();
    for (samples, labels) in with_labels(files, settings, found_labels)? {
        let mut arrays = vec![whole(&samples.contents(settings)?, "x")?];
        if let Some(labels) = labels {
            arrays.push(whole(&labels.contents(settings)?, "y")?);
        }
        all.push(arrays);
    }
    ArrayReader::open(all, settings)
}

/// The labels of `x.npy`, `x_train.npy`, `train_x.npy` or `images.npy`: y instead of x, labels instead of images.
fn found_labels(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let stem = name.split('.').next()?;
    let words: Vec<&str> = stem.split(['_', '-']).collect();
    let pairs: &[(&str, &str)] = &[("x", "y"), ("X", "Y"), ("X", "y"), ("images", "labels"), ("data", "labels")];
    pairs.iter().filter(|(from, _)| words.contains(from)).find_map(|(from, to)| {
        let at = stem.match_indices(from).map(|(at, _)| at).find(|at| {
            let (before, after) = (&stem[..*at], &stem[at + from.len()..]);
            !before.ends_with(char::is_alphanumeric) && !after.starts_with(char::is_alphanumeric)
        })?;
        existing_file(path, &format!("{}{to}{}", &name[..at], &name[at + from.len()..]))
    })
}

fn whole(contents: &Contents, name: &str) -> Result<Array, ReadError> {
    Ok(header::read(contents, (0, contents.bytes()), name)?)
}

fn open_archives(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let all: Result<Vec<_>, _> = files.iter().map(|file| archive(file, settings)).collect();
    ArrayReader::open_files(all?, settings)
}

fn archive(file: &DataFile, settings: &Settings) -> Result<FileArrays, OpenError> {
    let archive = file.contents(settings)?;
    let mut opened = OpenedMembers::new(settings.count("unpacked_max", UNPACKED_BYTES_MAX as usize, 1)? as u64);
    let mut members: Vec<(String, Member)> = Vec::new();
    let (mut names, mut ignored) = (BTreeSet::new(), IgnoredFiles::default());
    for member in zip::members(&archive)? {
        let Some(name) = member.name.strip_suffix(".npy") else {
            ignored.add(Path::new(&member.name));
            continue;
        };
        if !names.insert(name.to_string()) {
            let message = format!("it has two members named \"{}\"", member.name);
            let hint = "write the archive again, with a name of its own for every array";
            return Err(archive.unsupported(member.offset, message, hint).into());
        }
        members.push((name.into(), member));
    }
    let mut arrays = FileArrays::open(&members, settings, |name, member| {
        let (contents, range) = member.open(&archive, &mut opened)?;
        header::read(&contents, range, name)
    })?;
    arrays.notes.extend(ignored.note(&file.path, "not arrays"));
    Ok(arrays)
}

#[cfg(test)]
mod tests;
