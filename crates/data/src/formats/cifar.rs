//! CIFAR-10 and CIFAR-100 in their binary version: per image one label byte (CIFAR-100: coarse, then fine), then 3 × 32 × 32
//! bytes, channels first. The names of the classes are taken from the text files that come with them.

use crate::arrays::{Array, ArrayReader};
use crate::error::ReadError;
use crate::files::{Contents, DataFile, open_regular};
use crate::format::{Format, OpenError, OpenedFiles};
use kolo_graph::settings::Settings;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub const FORMAT: Format = Format {
    name: "cifar",
    doc: "CIFAR-10 and CIFAR-100 in their binary version; `fine = false` for the 20 coarse classes of CIFAR-100",
    extensions: &["bin"],
    sniff,
    open,
};

const SHAPE: [usize; 3] = [3, 32, 32];
const PIXELS: u64 = 3 * 32 * 32;
/// The batches to train on, as they are called in the archives.
const BATCHES_10: [&str; 5] =
    ["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"];
const BATCH_100: &str = "train.bin";
/// Of a file with the names of classes.
const NAMES_BYTES_MAX: u64 = 64 << 10;
/// Labels looked at to tell the two sets, and other files, apart.
const LOOKED_AT: u64 = 64;

/// Which of the two sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Cifar10,
    Cifar100,
}

impl Set {
    fn record_bytes(self) -> u64 {
        match self {
            Set::Cifar10 => PIXELS + 1,
            Set::Cifar100 => PIXELS + 2,
        }
    }

    fn labels_fit(self, labels: &[u8]) -> bool {
        match (self, labels) {
            (Set::Cifar10, [label, ..]) => *label < 10,
            (Set::Cifar100, [coarse, fine, ..]) => *coarse < 20 && *fine < 100,
            _ => false,
        }
    }

    /// The first records whose labels are none of this set, if the size is one of it: how many, and the first of them.
    fn misfits(self, file: &File, bytes: u64) -> Option<(u64, Option<Misfit>)> {
        let record = self.record_bytes();
        if bytes == 0 || !bytes.is_multiple_of(record) {
            return None;
        }
        let (mut count, mut first) = (0, None);
        for at in 0..(bytes / record).min(LOOKED_AT) {
            let mut labels = [u8::MAX; 2];
            if file.read_exact_at(&mut labels, at * record).is_err() || !self.labels_fit(&labels) {
                count += 1;
                first.get_or_insert(Misfit { set: self, record: at, labels });
            }
        }
        Some((count, first))
    }

    /// The set whose records these are, by the size and all of the first labels.
    fn of(file: &File, bytes: u64) -> Option<Self> {
        let fits = |set: &Set| matches!(set.misfits(file, bytes), Some((0, _)));
        [Set::Cifar10, Set::Cifar100].into_iter().find(fits)
    }

    /// The same of a file that is known to be of one of them: three of four of the first labels must fit. One that does not is
    /// an error when it is read.
    fn by_most(file: &File, bytes: u64) -> Result<Self, Option<Misfit>> {
        let mut misfit = None;
        let mut least: Option<(u64, Set)> = None;
        for set in [Set::Cifar10, Set::Cifar100] {
            let Some((count, first)) = set.misfits(file, bytes) else { continue };
            misfit = misfit.or(first);
            let looked_at = (bytes / set.record_bytes()).min(LOOKED_AT);
            if 4 * count <= looked_at && least.is_none_or(|(fewest, _)| count < fewest) {
                least = Some((count, set));
            }
        }
        least.map(|(_, set)| set).ok_or(misfit)
    }
}

/// A record whose labels are none of the set that the size of the file speaks for.
#[derive(Clone, Copy, Debug)]
struct Misfit {
    set: Set,
    record: u64,
    labels: [u8; 2],
}

fn sniff(path: &Path, head: &[u8]) -> bool {
    if path.is_dir() {
        return path.join(BATCHES_10[0]).is_file()
            || path.join(BATCH_100).is_file() && names(path, Set::Cifar100, true).is_some();
    }
    // A pipe is read once.
    let Some(file) = open_regular(path).ok() else { return false };
    let bytes = file.metadata().map_or(0, |meta| meta.len());
    let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    // A packed one is known by its name, as its size is not.
    Set::of(&file, bytes).is_some() || name.contains("_batch") && Set::Cifar10.labels_fit(head)
}

fn open(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let fine = settings.bool("fine", true)?;
    let (mut all, mut notes) = (Vec::new(), Vec::new());
    for file in files {
        if file.is_directory {
            let batches = "the batches to train on; `test` can name that of the test";
            notes.push(format!("read of {}: {batches}", file.path.display()));
        }
        for file in batches(file)? {
            all.push(arrays(&file, fine, settings)?);
        }
    }
    ArrayReader::open_noting(all, notes, settings)
}

/// The files to train on, if it is a directory.
fn batches(file: &DataFile) -> Result<Vec<DataFile>, ReadError> {
    if !file.is_directory {
        return Ok(vec![file.clone()]);
    }
    let found: Vec<PathBuf> =
        BATCHES_10.iter().chain([&BATCH_100]).map(|name| file.path.join(name)).filter(|path| path.is_file()).collect();
    if found.is_empty() {
        let hint = "name the directory that the archive unpacks to, or the files in it";
        return Err(ReadError::new("there is neither data_batch_1.bin nor train.bin in it", hint).in_file(&file.path));
    }
    found.iter().map(|path| DataFile::at(path)).collect()
}

fn arrays(file: &DataFile, fine: bool, settings: &Settings) -> Result<Vec<Array>, OpenError> {
    let contents = file.contents(settings)?;
    let set = Set::by_most(contents.file(), contents.bytes()).map_err(|misfit| not_cifar(&contents, misfit))?;
    let record = set.record_bytes();
    let (label_at, classes) = match (set, fine) {
        (Set::Cifar10, _) => (0, 10),
        (Set::Cifar100, true) => (1, 100),
        (Set::Cifar100, false) => (0, 20),
    };
    let x = Array::spaced("x", &contents, record - PIXELS, record, &SHAPE);
    let mut y = Array::spaced("y", &contents, label_at, record, &[]);
    y.classes = Some(classes);
    y.names = file.path.parent().and_then(|dir| names(dir, set, fine)).filter(|names| names.len() == classes);
    Ok(vec![x, y])
}

fn not_cifar(contents: &Contents, misfit: Option<Misfit>) -> ReadError {
    if let Some(Misfit { set, record, labels: [first, second] }) = misfit {
        let message = match set {
            Set::Cifar10 => format!("image {record} has the label {first}, but CIFAR-10 has 10 classes"),
            Set::Cifar100 => {
                format!("image {record} has the labels {first} and {second}, but CIFAR-100 has 20 and 100 classes")
            }
        };
        let hint = "if these are tokens and not images, write `format = \"tokens\"`; otherwise copy the file again";
        return ReadError::new(message, hint).in_file(contents.path()).at(record * set.record_bytes());
    }
    let (bytes, short) = (contents.bytes(), contents.bytes() % (PIXELS + 1));
    let message = format!("{bytes} bytes are not a multiple of 3073 or 3074, the bytes of an image with its labels");
    contents.damaged(bytes - short, message)
}

/// The names of the classes, one per line.
fn names(dir: &Path, set: Set, fine: bool) -> Option<Arc<[String]>> {
    let name = match (set, fine) {
        (Set::Cifar10, _) => "batches.meta.txt",
        (Set::Cifar100, true) => "fine_label_names.txt",
        (Set::Cifar100, false) => "coarse_label_names.txt",
    };
    let mut text = String::new();
    open_regular(&dir.join(name)).ok()?.take(NAMES_BYTES_MAX).read_to_string(&mut text).ok()?;
    Some(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(String::from).collect())
}

#[cfg(test)]
mod tests;
