//! File formats: which there are, which one a file has, and reading records of it.

use crate::error::ReadError;
use crate::files::DataFile;
use crate::formats;
use crate::image;
use crate::record::{Record, RecordColumn, RecordName, UnreadColumn};
use crate::tokenizer::UsedTokenizer;
use kolo_base::ShownPath;
use kolo_graph::settings::{SettingError, Settings, nearest};
use std::fmt;
use std::path::{Path, PathBuf};

/// Random access to the records of one or more files of one format. A reader keeps no cursor: any thread may ask for any
/// record at any time, and gets the same.
pub trait Reader: Send + Sync + fmt::Debug {
    /// The columns of every record.
    fn columns(&self) -> &[RecordColumn];

    /// The columns that the files have besides, but whose types are not read.
    fn unread(&self) -> &[UnreadColumn] {
        &[]
    }

    /// The number of records.
    fn len(&self) -> usize;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads record number `at`, of all columns. An error names the file and the offset in it, never the sample: whoever asks
    /// knows that. Memory is bounded by what the file really holds, whatever lengths it claims.
    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError>;

    /// Where record number `at` is: its file and the offset there. For messages about what is wrong with its contents.
    fn place(&self, _at: usize) -> Option<(PathBuf, u64)> {
        None
    }

    /// What record number `at` is called, if it has a name: the file of an image, or the key in an archive.
    fn name(&self, _at: usize) -> Option<RecordName> {
        None
    }

    /// The number by which a user knows record number `at`, where records come in another order than in the files.
    fn record_number(&self, at: usize) -> usize {
        at
    }

    /// Why a column is text where a number might be expected: the first cell that is none, with its file and line.
    fn kind_reason(&self, _column: usize) -> Option<String> {
        None
    }

    /// Whether a column is the index of the table that was written to the file: it counts or names the rows, and is neither an
    /// input nor the target unless the job names it.
    fn is_index(&self, _column: usize) -> bool {
        false
    }

    /// What was left out or guessed in opening the files, beside columns: a sentence each.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// The files that it reads, if they may be others than those it was opened with: those in a directory, or labels beside
    /// the data. Of very many, some that are spread evenly.
    fn files(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Which tokenizer made the tokens, if they are known to come from one.
    fn tokenizer(&self) -> Option<UsedTokenizer> {
        None
    }

    /// What tells these data from others, beside names, sizes and contents of the files: by default nothing.
    fn fingerprint(&self) -> String {
        String::new()
    }
}

/// What opening files gives.
pub type OpenedFiles = Result<Box<dyn Reader>, OpenError>;

/// Why files could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A file is damaged, or is not what it seems.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A key of `[data]` is wrong or missing.
    #[error(transparent)]
    Setting(#[from] SettingError),
}

/// One file format.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// What `data.format` says.
    pub name: &'static str,
    /// One line of documentation.
    pub doc: &'static str,
    /// Endings of its files, without the dot, in lower case.
    pub extensions: &'static [&'static str],
    /// Whether a file or directory is of this format, by its name and its first bytes (up to [`SNIFFED_BYTES`], unpacked if
    /// it is compressed; empty for a directory). Asked where the ending says nothing, or is shared.
    pub sniff: fn(&Path, &[u8]) -> bool,
    /// Opens the files, in this order. It reads its own keys from the `[data]` section.
    pub open: fn(&[DataFile], &Settings) -> OpenedFiles,
}

/// As much as a format may look at to tell its files.
pub const SNIFFED_BYTES: usize = 512;

/// Every format there is. Those whose ending or first bytes are surest come first.
pub const FORMATS: &[Format] = &[
    formats::npy::FORMAT,
    formats::npy::ARCHIVE,
    formats::safetensors::FORMAT,
    #[cfg(feature = "parquet")]
    formats::parquet::FORMAT,
    #[cfg(feature = "parquet")]
    formats::parquet::ARROW,
    #[cfg(feature = "hdf5")]
    formats::hdf5::FORMAT,
    formats::lmdb::FORMAT,
    formats::idx::FORMAT,
    formats::cifar::FORMAT,
    formats::webdataset::FORMAT,
    formats::tfrecord::FORMAT,
    formats::images::FORMAT,
    formats::tokens::FORMAT,
    formats::jsonl::FORMAT,
    formats::csv::FORMAT,
    formats::text::FORMAT,
];

/// The format of this name.
pub fn named(name: &str) -> Option<&'static Format> {
    FORMATS.iter().find(|format| format.name == name)
}

/// The format that `data.format` names, or else the one that the first of the files has.
pub fn choose(files: &[DataFile], settings: &Settings) -> Result<&'static Format, OpenError> {
    let Some(first) = files.first() else {
        return Err(settings.wrong("source", "names no file", "name a file, a directory or a pattern").into());
    };
    let head = if settings.text("format", "")?.is_empty() { first.head(SNIFFED_BYTES)? } else { Vec::new() };
    choose_by(&first.path, &first.extension(), &head, settings)
}

/// The format that `data.format` names, or else the one of a file with this name, ending and start.
pub(crate) fn choose_by(
    path: &Path,
    extension: &str,
    head: &[u8],
    settings: &Settings,
) -> Result<&'static Format, OpenError> {
    let names = || FORMATS.iter().map(|format| format.name).collect::<Vec<_>>().join(", ");
    let asked = settings.text("format", "")?;
    if !asked.is_empty() {
        return named(&asked).ok_or_else(|| {
            let near = nearest(&asked, FORMATS.iter().map(|format| format.name));
            let near = near.map_or(String::new(), |near| format!("did you mean \"{near}\"? "));
            let hint = format!("{near}The formats are {}", names());
            settings.wrong("format", format!("is \"{asked}\", which is not known"), hint).into()
        });
    }
    if extension == "json" && head.trim_ascii_start().starts_with(b"[") {
        let message = format!("names {}, a JSON array", path.shown());
        let hint = "make JSON Lines of it, an object per line: `jq -c '.[]' a.json > a.jsonl`";
        return Err(settings.wrong("source", message, hint).into());
    }
    let by_ending: Vec<&Format> = FORMATS.iter().filter(|format| format.extensions.contains(&extension)).collect();
    let sniffed = |formats: &[&'static Format]| formats.iter().find(|format| (format.sniff)(path, head)).copied();
    let all: Vec<&'static Format> = FORMATS.iter().collect();
    let found = match by_ending[..] {
        [only] => Some(only),
        [] => sniffed(&all),
        _ => sniffed(&by_ending).or(Some(by_ending[0])),
    };
    found.ok_or_else(|| {
        if path.is_dir() {
            let message = format!("names {}, a folder in which no data are found", path.shown());
            let hint = format!(
                "images in it end in {} and lie in it or in a folder per class; name other data by their files, such as \
                 `DIR/*.parquet`",
                image::endings_listed()
            );
            return settings.wrong("source", message, hint).into();
        }
        let message = format!("names {}, whose format is not known", path.shown());
        settings.wrong("source", message, format!("write `format = \"csv\"`, or another of {}", names())).into()
    })
}
