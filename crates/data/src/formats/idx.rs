//! IDX files, in which MNIST and its likes come: two zero bytes, the element type, the number of dims, the dims and the
//! elements, highest byte first. Images and labels are two files; the labels are found by name.

use crate::arrays::{Array, ArrayReader, Element, existing_file, with_labels};
use crate::error::ReadError;
use crate::files::{Contents, DataFile};
use crate::format::{Format, OpenedFiles};
use kolo_graph::settings::Settings;
use std::path::{Path, PathBuf};

pub const FORMAT: Format = Format {
    name: "idx",
    doc: "MNIST's files: images, with their labels found by name (`images-idx3` and `labels-idx1`) or given by `labels`",
    extensions: &["idx", "ubyte", "idx1-ubyte", "idx3-ubyte"],
    sniff,
    open,
};

fn sniff(path: &Path, head: &[u8]) -> bool {
    if path.is_dir() {
        return training_images(path).is_some();
    }
    matches!(head, [0, 0, kind, dims, ..] if element(*kind).is_some() && (1..=8).contains(dims))
}

/// The images to train on in a directory with the four files of MNIST.
fn training_images(dir: &Path) -> Option<PathBuf> {
    let names = ["train-images-idx3-ubyte", "train-images.idx3-ubyte"];
    names.iter().find_map(|name| existing_file(&dir.join(name), name))
}

fn labels_beside(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let labels = name.replacen("images", "labels", 1).replacen("idx3", "idx1", 1);
    (labels != name).then(|| existing_file(path, &labels)).flatten()
}

fn open(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let (mut listed, mut notes) = (Vec::new(), Vec::new());
    for file in files {
        match file.is_directory.then(|| training_images(&file.path)).flatten() {
            Some(images) => {
                notes.push(format!(
                    "read of {}: {}, the images to train on; `test` can name others",
                    file.path.display(),
                    images.file_name().unwrap_or_default().to_string_lossy()
                ));
                listed.push(DataFile::at(&images)?);
            }
            None => listed.push(file.clone()),
        }
    }
    let mut all = Vec::new();
    for (images, labels) in with_labels(&listed, settings, labels_beside)? {
        let mut arrays = vec![array(&images.contents(settings)?, "x")?];
        if let Some(labels) = labels {
            arrays.push(array(&labels.contents(settings)?, "y")?);
        }
        all.push(arrays);
    }
    ArrayReader::open_noting(all, notes, settings)
}

fn element(kind: u8) -> Option<Element> {
    match kind {
        0x08 => Some(Element::U8),
        0x09 => Some(Element::I8),
        0x0b => Some(Element::I16),
        0x0c => Some(Element::I32),
        0x0d => Some(Element::F32),
        0x0e => Some(Element::F64),
        _ => None,
    }
}

fn array(contents: &Contents, name: &str) -> Result<Array, ReadError> {
    let mut magic = [0; 4];
    contents.read_at(0, &mut magic)?;
    let [0, 0, kind, dims] = magic else {
        return Err(contents.damaged(0, "it does not start with two zero bytes, as IDX files do"));
    };
    let Some(element) = element(kind) else {
        return Err(contents.damaged(2, format!("the element type {kind:#04x} is not known")));
    };
    let mut sizes = vec![0; 4 * usize::from(dims)];
    contents.read_at(4, &mut sizes)?;
    let shape = sizes.as_chunks().0.iter().map(|bytes| u32::from_be_bytes(*bytes) as usize).collect();
    let start = 4 + sizes.len() as u64;
    let mut array = Array::new(name, contents, (start, contents.bytes() - start), element, shape)?;
    array.big_endian = true;
    Ok(array)
}

#[cfg(test)]
mod tests;
