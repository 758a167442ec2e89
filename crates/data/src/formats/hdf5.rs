//! HDF5 files: datasets with the same first dim are the columns, and their entries along it the records.
//!
//! A dataset in one piece is read record by record. One in chunks, packed or not, is decoded by runs of records of a chunk's
//! size (`crate::units`), so that a shuffled epoch unpacks every chunk once.

mod columns;

use crate::error::ReadError;
use crate::files::{Contents, DataFile, forget_last_read, last_read};
use crate::format::{Format, OpenError, OpenedFiles, Reader};
use crate::guard::guarded;
use crate::record::{Record, RecordColumn, UnreadColumn};
use crate::units::{DECODED_BYTES_MAX, Decode, Rows, Units};
use columns::{DatasetColumn, Values};
use hdf5_reader::storage::{Storage, StorageBuffer};
use hdf5_reader::{Dataset, Hdf5File, OpenOptions};
use kolo_base::ShownPath;
use kolo_graph::settings::{Setting, Settings};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub const FORMAT: Format = Format {
    name: "hdf5",
    doc: "HDF5 files; datasets with the same first dim are columns",
    extensions: &["h5", "hdf5", "hdf"],
    sniff: |_, head| head.starts_with(b"\x89HDF\r\n\x1a\n"),
    open,
};

/// Unpacked chunks that a file keeps by itself; runs of records are kept besides.
const CHUNK_CACHE_BYTES: usize = 32 << 20;
/// A chunk, or the values of one read, may take this much.
const READ_BYTES_MAX: usize = 512 << 20;
/// What a run of records should take, decoded.
const RUN_BYTES: u64 = 16 << 20;
const UNSUPPORTED_HINT: &str = "kolo does not read this kind of dataset: write it plain or with `compression=\"gzip\"` (`h5repack -f GZIP=4 IN OUT`), \
     or name those to read, such as `inputs = [\"x\"]` and `target = \"y\"`";
/// Groups within groups.
const DEPTH_MAX: usize = 16;
const DATASETS_MAX: usize = 4096;
/// The best that packing can do; a dataset that claims more than that of its file was never written.
const PACKING_MAX: u64 = 2048;

/// The file as the library asks for it.
#[derive(Debug)]
struct Bytes(Contents);

impl Storage for Bytes {
    fn len(&self) -> u64 {
        self.0.bytes()
    }

    fn read_range(&self, offset: u64, len: usize) -> hdf5_reader::error::Result<StorageBuffer> {
        let mut bytes = Vec::new();
        let read = self.0.read_into(offset, len as u64, &mut bytes);
        read.map_err(|error| hdf5_reader::error::Error::InvalidData(error.message))?;
        Ok(StorageBuffer::from_vec(bytes))
    }
}

/// One open file and its columns.
#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    columns: Vec<DatasetColumn>,
    unread: Vec<UnreadColumn>,
    rows: u64,
}

fn failed(path: &Path, what: &str, error: impl std::fmt::Display) -> ReadError {
    let error = columns::with_names(&error.to_string());
    let hint = match columns::is_unsupported(&error) {
        true => UNSUPPORTED_HINT,
        false => "the file is damaged or cut short; copy or make it again",
    };
    ReadError::new(format!("{what}: {error}"), hint).in_file(path)
}

/// The datasets below a group, by path.
fn datasets(file: &Hdf5File, group: &str, path: &Path) -> Result<Vec<(String, Dataset)>, ReadError> {
    let top = file.group(group).map_err(|error| {
        let hint = "correct `data.group`";
        ReadError::new(format!("its group \"{group}\" cannot be read: {error}"), hint).in_file(path)
    })?;
    let (mut found, mut seen) = (Vec::new(), Vec::new());
    let mut open = vec![(String::new(), top)];
    while let Some((prefix, group)) = open.pop() {
        // A file may link a group into itself.
        if seen.contains(&group.address()) || prefix.matches('/').count() >= DEPTH_MAX {
            continue;
        }
        seen.push(group.address());
        let (groups, datasets) = group.members().map_err(|error| failed(path, "a group cannot be read", error))?;
        found.extend(datasets.into_iter().map(|dataset| (format!("{prefix}{}", dataset.name()), dataset)));
        open.extend(groups.into_iter().map(|group| (format!("{prefix}{}/", group.name()), group)));
        if found.len() + open.len() > DATASETS_MAX {
            let message = format!("it has more than {DATASETS_MAX} datasets");
            return Err(ReadError::new(message, "name the group to read with `data.group`").in_file(path));
        }
    }
    found.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok(found)
}

/// The datasets that the job names, of a file whose datasets cannot be listed as one of them is of a kind that the library does
/// not know, such as a virtual one.
fn by_path(file: &Hdf5File, group: &str, named: &[String], path: &Path) -> Result<Vec<(String, Dataset)>, ReadError> {
    let open = |name: &String| {
        let place = format!("{}/{}", group.trim_end_matches('/'), name.trim_start_matches('/'));
        let dataset = file.dataset(&place).map_err(|error| failed(path, &format!("its dataset \"{name}\""), error))?;
        Ok((name.clone(), dataset))
    };
    named.iter().map(open).collect()
}

/// What the job names with `inputs` and `target`.
fn named(settings: &Settings) -> Vec<String> {
    let texts = |key: &str| match settings.peek(key) {
        Some(Setting::Text(text)) => vec![text.clone()],
        Some(Setting::List(list)) => list
            .iter()
            .filter_map(|item| match item {
                Setting::Text(text) => Some(text.clone()),
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    };
    match settings.peek("inputs") {
        Some(_) => [texts("inputs"), texts("target")].concat(),
        None => Vec::new(),
    }
}

impl OpenFile {
    fn open(contents: Contents, group: &str, named: &[String], layout: &str) -> Result<Self, ReadError> {
        let path = contents.path().to_owned();
        let file_bytes = contents.bytes();
        let options = OpenOptions::default()
            .with_chunk_cache_bytes(CHUNK_CACHE_BYTES)
            .with_max_chunk_bytes(READ_BYTES_MAX)
            .with_max_read_bytes(READ_BYTES_MAX);
        let file = Hdf5File::from_storage_with_options(Arc::new(Bytes(contents)), options);
        // Nothing is read of a file that is too short to begin with its magic bytes.
        let begin = || last_read().unwrap_or(0);
        let file = file.map_err(|error| failed(&path, "it cannot be read", error).at(begin()))?;
        let found = match (datasets(&file, group, &path), named.is_empty()) {
            (Ok(found), true) => found,
            (Ok(found), false) => choose(found, named, &path)?,
            (Err(error), false) if error.hint == UNSUPPORTED_HINT => by_path(&file, group, named, &path)?,
            (Err(error), _) => return Err(error),
        };
        let mut unread = Vec::new();
        let (mut columns, mut first) = (Vec::new(), None);
        for (name, dataset) in found {
            let kind = match DatasetColumn::new(name.clone(), dataset, layout) {
                Ok(column) => {
                    check_claim(&column, file_bytes, &path)?;
                    match column.unsupported() {
                        None => {
                            columns.push(column);
                            continue;
                        }
                        Some(kind) => kind,
                    }
                }
                Err(kind) => kind,
            };
            let message = format!("its dataset \"{name}\" cannot be read ({kind})");
            first.get_or_insert(ReadError::new(message, UNSUPPORTED_HINT).in_file(&path));
            unread.push(UnreadColumn { name, kind });
        }
        if let Some(error) = first.filter(|_| columns.is_empty() || !named.is_empty()) {
            return Err(error);
        }
        let rows = same_rows(&columns, &path)?;
        Ok(Self { path, columns, unread, rows })
    }

    /// Reads the records from `start` to `end` and hands each to `each`.
    fn read(
        &self,
        start: u64,
        end: u64,
        record: &mut Record,
        each: &mut dyn FnMut(&Record, Result<(), String>) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        guarded(&self.path, || {
            let read = |column: &DatasetColumn| {
                forget_last_read();
                column.read(start, end).map_err(|error| {
                    // An error before anything is read is one of the dataset's header.
                    let at = last_read().unwrap_or(column.dataset.address());
                    failed(&self.path, &format!("dataset \"{}\"", column.name), error).at(at)
                })
            };
            let values = self.columns.iter().map(read).collect::<Result<Vec<Values>, _>>()?;
            for row in 0..(end - start) as usize {
                let mut result = Ok(());
                for (at, (column, values)) in self.columns.iter().zip(&values).enumerate() {
                    let written = column.write(values, row, at, record);
                    if let Err(message) = written {
                        result = Err(format!("dataset \"{}\": {message}", column.name));
                        break;
                    }
                }
                each(record, result)?;
            }
            Ok(())
        })
    }
}

/// A dataset that claims more than its file can hold is damaged, or was hardly written.
fn check_claim(column: &DatasetColumn, file_bytes: u64, path: &Path) -> Result<(), ReadError> {
    let claimed = column.row_bytes().saturating_mul(column.rows());
    if claimed <= file_bytes.saturating_mul(PACKING_MAX) && column.row_bytes() <= READ_BYTES_MAX as u64 {
        return Ok(());
    }
    let message = format!("its dataset \"{}\" claims {claimed} bytes, but the file has {file_bytes}", column.name);
    let hint = "the file is damaged or cut short, or most of the dataset was never written: write all of it, or name other datasets \
                with `inputs` and `target`";
    Err(ReadError::new(message, hint).in_file(path))
}

/// The datasets that the job names, under the names that it uses.
fn choose(found: Vec<(String, Dataset)>, named: &[String], path: &Path) -> Result<Vec<(String, Dataset)>, ReadError> {
    let names: Vec<String> = found.iter().map(|(name, _)| name.clone()).collect();
    let mut found: Vec<Option<(String, Dataset)>> = found.into_iter().map(Some).collect();
    let mut chosen = Vec::new();
    for name in named {
        let at = names.iter().position(|known| known == name.trim_start_matches('/'));
        let dataset = at.and_then(|at| found[at].take());
        let Some((_, dataset)) = dataset else {
            let message = format!("it has no dataset \"{name}\"");
            let hint = match names.is_empty() {
                true => "it has no datasets at all".into(),
                false => format!("its datasets are {}", names[..names.len().min(12)].join(", ")),
            };
            return Err(ReadError::new(message, hint).in_file(path));
        };
        chosen.push((name.clone(), dataset));
    }
    Ok(chosen)
}

/// Columns have one value for every record.
fn same_rows(columns: &[DatasetColumn], path: &Path) -> Result<u64, ReadError> {
    let Some(first) = columns.first() else {
        return Err(ReadError::new("it has no datasets", "list its contents with `h5dump -n`").in_file(path));
    };
    match columns.iter().find(|column| column.rows() != first.rows()) {
        None => Ok(first.rows()),
        Some(other) => {
            let (name, one, other, two) = (&first.name, first.rows(), &other.name, other.rows());
            let message = format!("its dataset \"{name}\" has {one} records, and \"{other}\" has {two}");
            let hint =
                "choose some with `inputs = [\"train/x\"]` and `target = \"train/y\"`, or with `group = \"train\"`";
            Err(ReadError::new(message, hint).in_file(path))
        }
    }
}

/// Decodes runs of records.
#[derive(Debug)]
struct Runs {
    files: Vec<OpenFile>,
    /// File, first record and end of every run.
    runs: Vec<(usize, u64, u64)>,
}

impl Decode for Runs {
    fn path(&self, unit: usize) -> &Path {
        &self.files[self.runs[unit].0].path
    }

    fn decode(&self, unit: usize, out: &mut Rows) -> Result<(), ReadError> {
        let (file, start, end) = self.runs[unit];
        self.files[file].read(start, end, &mut Record::new(), &mut |record, result| {
            match result {
                Ok(()) => out.push(record),
                Err(message) => out.push_broken(&message),
            }
            Ok(())
        })
    }
}

#[derive(Debug)]
struct RunReader {
    units: Units,
    unread: Vec<UnreadColumn>,
}

impl Reader for RunReader {
    fn columns(&self) -> &[RecordColumn] {
        self.units.columns()
    }

    fn unread(&self) -> &[UnreadColumn] {
        &self.unread
    }

    fn len(&self) -> usize {
        self.units.len()
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        self.units.read(at, record)
    }
}

/// Reads datasets in one piece, record by record.
#[derive(Debug)]
struct PlainReader {
    files: Vec<OpenFile>,
    /// Records of each file and all before it.
    ends: Vec<usize>,
    columns: Vec<RecordColumn>,
    unread: Vec<UnreadColumn>,
}

impl Reader for PlainReader {
    fn columns(&self) -> &[RecordColumn] {
        &self.columns
    }

    fn unread(&self) -> &[UnreadColumn] {
        &self.unread
    }

    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        let number = self.ends.partition_point(|end| *end <= at);
        let Some(file) = self.files.get(number) else {
            let message = format!("record {at} was requested, but there are {}", self.len());
            return Err(ReadError::new(message, "ask for a smaller number"));
        };
        let row = (at - number.checked_sub(1).map_or(0, |before| self.ends[before])) as u64;
        file.read(row, row + 1, record, &mut |_, result| {
            let hint = "choose other datasets with `data.inputs`, or write `on_error = \"skip\"`";
            result.map_err(|message| ReadError::new(message, hint).in_file(&file.path))
        })
    }
}

/// The runs of a file: of as many records as the largest chunk, if that is not too much.
fn runs(number: usize, file: &OpenFile) -> Vec<(usize, u64, u64)> {
    let row_bytes: u64 = file.columns.iter().map(DatasetColumn::row_bytes).sum();
    let chunk_rows = file.columns.iter().filter_map(DatasetColumn::chunk_rows).max().unwrap_or(1);
    // At least so many that the list of runs is small beside the file.
    let least = file.rows.div_ceil(1 << 20).max(1);
    let rows = chunk_rows.max((1 << 20) / row_bytes.max(1)).min(RUN_BYTES / row_bytes.max(1)).max(least);
    let starts = (0..file.rows).step_by(usize::try_from(rows).unwrap_or(usize::MAX));
    starts.map(|start| (number, start, (start + rows).min(file.rows))).collect()
}

fn open(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let group = settings.text("group", "/")?;
    let layout = settings.choice("layout", &["auto", "hwc", "chw"])?;
    let budget = settings.count("decoded_max", DECODED_BYTES_MAX, 0)?;
    let named = named(settings);
    let mut opened: Vec<OpenFile> = Vec::new();
    for file in files {
        let contents = file.contents(settings)?;
        let here = guarded(&file.path, || OpenFile::open(contents, &group, &named, layout))?;
        if let Some(first) = opened.first() {
            same_columns(first, &here)?;
        }
        opened.push(here);
    }
    let Some(first) = opened.first() else {
        return Err(settings.wrong("source", "names no file", "name a file or a pattern").into());
    };
    let column = |column: &DatasetColumn| RecordColumn { name: column.name.clone(), kind: column.kind() };
    let columns: Vec<RecordColumn> = first.columns.iter().map(column).collect();
    let unread = first.unread.clone();
    let is_chunked = opened.iter().flat_map(|file| &file.columns).any(|column| column.chunk_rows().is_some());
    if is_chunked {
        let runs: Vec<_> = opened.iter().enumerate().flat_map(|(number, file)| runs(number, file)).collect();
        let rows: Vec<usize> = runs.iter().map(|(_, start, end)| (end - start) as usize).collect();
        let decoder = Runs { files: opened, runs };
        return Ok(Box::new(RunReader { units: Units::new(Box::new(decoder), columns, &rows, budget), unread }));
    }
    let mut end = 0_usize;
    let ends = opened.iter().map(|file| {
        end = end.saturating_add(usize::try_from(file.rows).unwrap_or(usize::MAX));
        end
    });
    Ok(Box::new(PlainReader { ends: ends.collect(), files: opened, columns, unread }))
}

fn same_columns(first: &OpenFile, here: &OpenFile) -> Result<(), OpenError> {
    let kinds = |file: &OpenFile| -> Vec<_> {
        file.columns.iter().map(|column| (column.name.clone(), column.kind())).collect()
    };
    match kinds(first) == kinds(here) {
        true => Ok(()),
        false => {
            let message = format!("its datasets are not those of {}", first.path.shown());
            let hint = "files that are read together need the same datasets, but for the number of records";
            Err(ReadError::new(message, hint).in_file(&here.path).into())
        }
    }
}

#[cfg(test)]
mod tests;
