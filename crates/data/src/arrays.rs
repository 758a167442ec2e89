//! Arrays whose first dim is the sample: what npy, npz, safetensors, IDX and CIFAR files hold, read as records.
//!
//! A format says where its arrays lie ([`Array`]); [`ArrayReader`] makes columns of them. The range of an array is checked
//! against its file before anything else, so that no shape makes a reader take memory that the file does not fill.

mod element;

pub(crate) use element::Element;

use crate::ahead::ReadAhead;
use crate::error::ReadError;
use crate::files::{self, Contents, DataFile};
use crate::format::{OpenError, OpenedFiles, Reader};
use crate::inspect::shown_name;
use crate::parts::Parts;
use crate::record::{Record, RecordColumn, RecordKind, TOO_LARGE_HINT, UnreadColumn};
use kolo_base::ShownPath;
use kolo_graph::settings::{SIZE_MAX, SettingError, Settings};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const SHAPE_HINT: &str =
    "the first dim counts the samples: give the array one (`array[None]`), or name others: `arrays = \"x, y\"`";
/// Bytes that one sample of an array may have.
const ROW_BYTES_MAX: u64 = 1 << 30;

/// Why an array is no column.
#[derive(Debug)]
pub(crate) struct Unreadable {
    /// What it is, if it is whole, but of a kind that is not read. Nobody needs it who does not name it.
    pub kind: Option<String>,
    error: ReadError,
}

impl Unreadable {
    /// An array of a kind that is not read.
    pub fn kind(kind: impl Into<String>, error: ReadError) -> Self {
        Self { kind: Some(kind.into()), error }
    }
}

impl From<ReadError> for Unreadable {
    fn from(error: ReadError) -> Self {
        Self { kind: None, error }
    }
}

impl From<Unreadable> for ReadError {
    fn from(unreadable: Unreadable) -> Self {
        unreadable.error
    }
}

/// The arrays of one file, and those that are not read.
#[derive(Debug, Default)]
pub(crate) struct FileArrays {
    pub arrays: Vec<Array>,
    pub unread: Vec<UnreadColumn>,
    /// What else the file holds.
    pub notes: Vec<String>,
}

impl FileArrays {
    /// Opens the arrays that `data.arrays` names, in that order; of all by default those of a kind that is read. An array that
    /// is not asked for is not looked at.
    pub fn open<T>(
        all: &[(String, T)],
        settings: &Settings,
        mut open: impl FnMut(&str, &T) -> Result<Array, Unreadable>,
    ) -> Result<Self, OpenError> {
        let wanted = settings.text("arrays", "")?;
        let mut opened = Self::default();
        if !wanted.trim().is_empty() {
            for (name, place) in chosen(all, &wanted, settings)? {
                opened.arrays.push(open(name, place).map_err(ReadError::from)?);
            }
            return Ok(opened);
        }
        let mut first = None;
        for (name, place) in all {
            match open(name, place) {
                Ok(array) => opened.arrays.push(array),
                Err(Unreadable { kind: Some(kind), error }) => {
                    opened.unread.push(UnreadColumn { name: name.clone(), kind });
                    first.get_or_insert(error);
                }
                Err(Unreadable { kind: None, error }) => return Err(error.into()),
            }
        }
        match first {
            Some(error) if opened.arrays.is_empty() => Err(error.into()),
            _ => Ok(opened),
        }
    }
}

/// One array of a file: `shape[0]` samples of `shape[1..]` each.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub name: String,
    pub shape: Vec<usize>,
    pub element: Element,
    pub big_endian: bool,
    /// Its whole numbers lie below this, or the file is damaged.
    pub classes: Option<usize>,
    /// The names of these classes.
    pub names: Option<Arc<[String]>>,
    file: ReadAhead,
    /// Where the first sample starts.
    start: u64,
    /// From one sample to the next.
    stride: u64,
    /// Of one sample.
    row_bytes: u64,
}

impl Array {
    /// An array without gaps in `range` (start and bytes) of `contents`. An array that needs more is an error at its start.
    pub fn new(
        name: &str,
        contents: &Contents,
        range: (u64, u64),
        element: Element,
        shape: Vec<usize>,
    ) -> Result<Self, Unreadable> {
        let (start, available) = range;
        let damaged = |message: String| contents.damaged(start, format!("array \"{name}\" {message}"));
        let unread = |message: String| {
            let error = ReadError::new(format!("array \"{name}\" {message}"), SHAPE_HINT).in_file(contents.path());
            Unreadable::kind(format!("{element} {shape:?}"), error.at(start))
        };
        let (Some(samples), mut inner) = (shape.first(), shape.iter().skip(1)) else {
            return Err(unread("has no dims, so it holds no samples".into()));
        };
        let row_bytes = inner.try_fold(element.bytes(), |bytes, dim| bytes.checked_mul(*dim as u64));
        let row_bytes = row_bytes
            .filter(|bytes| (1..=ROW_BYTES_MAX).contains(bytes))
            .ok_or_else(|| unread(format!("has the shape {shape:?}: a sample must have 1 to {ROW_BYTES_MAX} bytes")))?;
        let all = row_bytes.checked_mul(*samples as u64);
        match all {
            Some(bytes) if bytes == available => contents.check(start, bytes)?,
            _ => {
                let needed = all.map_or("more than can be counted".into(), |bytes| bytes.to_string());
                let message =
                    format!("has the shape {shape:?}, which needs {needed} bytes, but the file has {available}");
                return Err(damaged(message).into());
            }
        }
        let (name, file) = (name.to_string(), ReadAhead::new(contents.clone()));
        let plain = Self {
            name,
            shape,
            element,
            big_endian: false,
            classes: None,
            names: None,
            file,
            start,
            stride: row_bytes,
            row_bytes,
        };
        Ok(plain)
    }

    /// An array with a gap after each sample, of one dim more than `inner`: as many samples as the contents have.
    pub fn spaced(name: &str, contents: &Contents, start: u64, stride: u64, inner: &[usize]) -> Self {
        let row_bytes = inner.iter().product::<usize>() as u64;
        let samples = (contents.bytes() / stride) as usize;
        let shape = [&[samples], inner].concat();
        let file = ReadAhead::new(contents.clone());
        let (element, big_endian, classes, names) = (Element::U8, false, None, None);
        Self { name: name.into(), shape, element, big_endian, classes, names, file, start, stride, row_bytes }
    }

    pub fn samples(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }

    fn path(&self) -> &Path {
        self.file.contents().path()
    }

    fn offset_of(&self, at: usize) -> u64 {
        self.start + at as u64 * self.stride
    }

    /// Hands over the bytes of one sample, lowest byte of each number first.
    fn row<T>(&self, at: usize, take: impl FnOnce(&[u8]) -> T) -> Result<T, ReadError> {
        let offset = self.offset_of(at);
        if !self.big_endian || self.element.bytes() == 1 {
            return self.file.with(offset, self.row_bytes, take);
        }
        self.file.with(offset, self.row_bytes, |bytes| {
            let mut swapped = bytes.to_vec();
            swapped.chunks_exact_mut(self.element.bytes() as usize).for_each(<[u8]>::reverse);
            take(&swapped)
        })
    }

    /// The real numbers of one sample.
    fn read_reals(&self, at: usize, out: &mut Vec<f32>) -> Result<(), ReadError> {
        self.row(at, |bytes| self.element.reals(bytes, out))?.map_err(|(element, value)| {
            let offset = self.offset_of(at) + element as u64 * self.element.bytes();
            let message = format!("array \"{}\" has {value}", self.name);
            ReadError::new(message, TOO_LARGE_HINT).in_file(self.path()).at(offset)
        })
    }

    /// The whole numbers of one sample, checked against the number of classes.
    fn read_ints(&self, at: usize, classes: Option<usize>, out: &mut Vec<i64>) -> Result<(), ReadError> {
        let offset = |element: usize| self.offset_of(at) + element as u64 * self.element.bytes();
        self.row(at, |bytes| self.element.ints(bytes, out))?.map_err(|(element, value)| {
            let message = format!("array \"{}\" has {value}", self.name);
            let hint = "store smaller numbers, or real ones if not every digit matters";
            ReadError::new(message, hint).in_file(self.path()).at(offset(element))
        })?;
        let Some(classes) = classes else { return Ok(()) };
        // A number below 0 may stand in a target for what does not count, unless the file itself says that there is none.
        let least = if self.classes.is_some() || self.names.is_some() { 0 } else { i64::MIN };
        match out.iter().position(|value| !(least..classes as i64).contains(value)) {
            None => Ok(()),
            Some(element) => {
                let message = format!("array \"{}\" has {}, but there are {classes} classes", self.name, out[element]);
                Err(self.file.contents().damaged(offset(element), message))
            }
        }
    }
}

/// How the bytes of an image lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PixelOrder {
    ChannelsFirst,
    ChannelsLast,
}

/// Records from arrays, one array per column; several files one after the other.
#[derive(Debug)]
pub(crate) struct ArrayReader {
    columns: Vec<RecordColumn>,
    orders: Vec<Option<PixelOrder>>,
    parts: Parts<Vec<Array>>,
    unread: Vec<UnreadColumn>,
    notes: Vec<String>,
}

impl ArrayReader {
    /// The arrays of each file. All files must have the same ones.
    pub fn open(files: Vec<Vec<Array>>, settings: &Settings) -> OpenedFiles {
        Self::open_noting(files, Vec::new(), settings)
    }

    /// The same, with what was left out beside them.
    pub fn open_noting(files: Vec<Vec<Array>>, notes: Vec<String>, settings: &Settings) -> OpenedFiles {
        Self::open_beside(files, (Vec::new(), notes), settings)
    }

    /// The same for files with arrays that are not read.
    pub fn open_files(files: Vec<FileArrays>, settings: &Settings) -> OpenedFiles {
        let unread = files.first().map_or(Vec::new(), |file| file.unread.clone());
        let notes = files.iter().flat_map(|file| file.notes.clone()).collect();
        Self::open_beside(files.into_iter().map(|file| file.arrays).collect(), (unread, notes), settings)
    }

    fn open_beside(
        files: Vec<Vec<Array>>,
        (unread, mut notes): (Vec<UnreadColumn>, Vec<String>),
        settings: &Settings,
    ) -> OpenedFiles {
        let layout = settings.choice("layout", &["auto", "hwc", "chw"])?;
        let vocab = settings.count_in("vocab", 0, 0, SIZE_MAX)?;
        let Some(first) = files.first().filter(|arrays| !arrays.is_empty()) else {
            return Err(settings.wrong("source", "names a file without arrays", "choose another file").into());
        };
        let orders: Vec<_> = first.iter().map(|array| pixel_order(array, layout)).collect();
        let guessed = first.iter().zip(&orders).filter(|(array, order)| layout == "auto" && is_guess(array, **order));
        notes.extend(guessed.map(|(array, _)| {
            let name = shown_name(&array.name);
            format!(
                "the channels of {name} {:?} are its last dim; `layout = \"chw\"` takes the first",
                &array.shape[1..]
            )
        }));
        let mut columns = Vec::new();
        for (at, array) in first.iter().enumerate() {
            files.iter().try_for_each(|arrays| same_array(array, at, arrays))?;
            columns.push(RecordColumn { name: array.name.clone(), kind: kind(array, orders[at], vocab) });
        }
        let mut parts = Parts::new();
        for arrays in files {
            let samples = same_samples(&arrays, settings)?;
            parts.push(arrays, samples);
        }
        Ok(Box::new(Self { columns, orders, parts, unread, notes }))
    }
}

impl Reader for ArrayReader {
    fn columns(&self) -> &[RecordColumn] {
        &self.columns
    }

    fn unread(&self) -> &[UnreadColumn] {
        &self.unread
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn len(&self) -> usize {
        self.parts.len()
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        let (arrays, row) = self.parts.find(at)?;
        for (number, (column, array)) in self.columns.iter().zip(arrays).enumerate() {
            match (&column.kind, self.orders[number]) {
                (RecordKind::Pixels { shape }, Some(PixelOrder::ChannelsLast)) => {
                    let out = record.bytes(number);
                    array.row(row, |bytes| channels_first(bytes, shape[0], out))?;
                }
                (RecordKind::Pixels { .. }, _) => {
                    let out = record.bytes(number);
                    array.row(row, |bytes| out.extend_from_slice(bytes))?;
                }
                (RecordKind::Int { classes, .. }, _) => array.read_ints(row, *classes, record.ints(number))?,
                (RecordKind::Class { names }, _) => array.read_ints(row, Some(names.len()), record.ints(number))?,
                _ => array.read_reals(row, record.reals(number))?,
            }
        }
        Ok(())
    }

    fn files(&self) -> Vec<PathBuf> {
        self.parts.iter().flatten().map(|array| array.file.contents().path().into()).collect()
    }
}

/// From `[height, width, channels]` to `[channels, height, width]`.
fn channels_first(bytes: &[u8], channels: usize, out: &mut Vec<u8>) {
    for channel in 0..channels {
        out.extend(bytes.iter().skip(channel).step_by(channels));
    }
}

/// Whether the samples are images, by what a user would have meant.
fn pixel_order(array: &Array, layout: &str) -> Option<PixelOrder> {
    let lower = array.name.to_lowercase();
    let is_target = ["y", "label", "target", "mask"].iter().any(|word| lower.starts_with(word));
    if array.element != Element::U8 || is_target {
        return None;
    }
    let is_channels = |dim: usize| [1, 3, 4].contains(&dim);
    match (array.shape[..].get(1..)?, layout) {
        ([_, _], _) | ([_, _, _], "chw") => Some(PixelOrder::ChannelsFirst),
        ([_, _, _], "hwc") => Some(PixelOrder::ChannelsLast),
        ([_, _, last], _) if is_channels(*last) => Some(PixelOrder::ChannelsLast),
        ([first, _, _], _) if is_channels(*first) => Some(PixelOrder::ChannelsFirst),
        _ => None,
    }
}

/// Whether the first dim of an image could be its channels as well as the last.
fn is_guess(array: &Array, order: Option<PixelOrder>) -> bool {
    let is_first = matches!(array.shape[1..], [1 | 3 | 4, _, _]);
    order == Some(PixelOrder::ChannelsLast) && is_first
}

/// What the values of an array are. Rows of whole numbers are tokens if `data.vocab` says how many there are.
fn kind(array: &Array, order: Option<PixelOrder>, vocab: usize) -> RecordKind {
    let shape = array.shape[1..].to_vec();
    match (order, &shape[..]) {
        (Some(_), [height, width]) => return RecordKind::Pixels { shape: vec![1, *height, *width] },
        (Some(PixelOrder::ChannelsLast), [height, width, channels]) => {
            return RecordKind::Pixels { shape: vec![*channels, *height, *width] };
        }
        (Some(_), _) => return RecordKind::Pixels { shape },
        (None, _) => {}
    }
    match (&array.names, array.element) {
        (Some(names), _) => RecordKind::Class { names: Arc::clone(names) },
        (None, element) if element.is_real() => RecordKind::Real { shape },
        (None, Element::Bool) => RecordKind::Int { shape, classes: Some(2) },
        (None, _) if shape.len() == 1 && vocab > 0 => RecordKind::Int { shape, classes: Some(vocab) },
        (None, _) => RecordKind::Int { shape, classes: array.classes },
    }
}

/// Whether another file has an array that goes on this one.
fn same_array(wanted: &Array, at: usize, arrays: &[Array]) -> Result<(), ReadError> {
    let same = |array: &&Array| {
        array.name == wanted.name
            && array.shape[1..] == wanted.shape[1..]
            && array.element.is_real() == wanted.element.is_real()
            && (array.element == Element::U8) == (wanted.element == Element::U8)
            && (array.element == Element::Bool) == (wanted.element == Element::Bool)
    };
    arrays.get(at).filter(same).map(|_| ()).ok_or_else(|| {
        let (name, shape) = (&wanted.name, &wanted.shape[1..]);
        let first = wanted.path().shown();
        let message =
            format!("it has no array \"{name}\" with samples of {} {shape:?}, as {first} has", wanted.element);
        let path = arrays.first().map_or(wanted.path(), Array::path);
        ReadError::new(message, "give files with the same arrays").in_file(path)
    })
}

/// The number of samples of the arrays of one file.
fn same_samples(arrays: &[Array], settings: &Settings) -> Result<usize, OpenError> {
    let samples = arrays.first().map_or(0, Array::samples);
    if arrays.iter().all(|array| array.samples() == samples) {
        return Ok(samples);
    }
    let path = arrays[0].path();
    let length = |array: &Array| match array.path() == path {
        true => format!("{} {}", array.name, array.samples()),
        false => format!("{} {} (in {})", array.name, array.samples(), array.path().shown()),
    };
    let lengths: Vec<String> = arrays.iter().map(length).collect();
    let message =
        format!("names {}, whose arrays have different numbers of samples: {}", path.shown(), lengths.join(", "));
    let hint = match arrays.len() > 2 && settings.peek("arrays").is_none() {
        true => "name those to read, such as `arrays = \"x, y\"`",
        false => "give arrays with the same number of samples",
    };
    Err(settings.wrong("source", message, hint).into())
}

/// The arrays that `data.arrays` names, in that order.
fn chosen<'a, T>(
    all: &'a [(String, T)],
    wanted: &str,
    settings: &Settings,
) -> Result<Vec<&'a (String, T)>, SettingError> {
    let (mut chosen, mut names): (Vec<&(String, T)>, BTreeSet<&str>) = (Vec::new(), BTreeSet::new());
    let by_name: BTreeMap<&str, &(String, T)> = all.iter().map(|array| (array.0.as_str(), array)).collect();
    for name in wanted.split(',').map(str::trim) {
        let found = *by_name.get(name).ok_or_else(|| {
            let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
            let message = format!("names \"{name}\", which is not in the file");
            settings.wrong("arrays", message, format!("the arrays there are {}", names.join(", ")))
        })?;
        if !names.insert(name) {
            return Err(settings.wrong("arrays", format!("names \"{name}\" twice"), "name every array once"));
        }
        chosen.push(found);
    }
    Ok(chosen)
}

/// The file of this name beside `path`, packed or not.
pub(crate) fn existing_file(path: &Path, name: &str) -> Option<PathBuf> {
    let plain = name.strip_suffix(".gz").unwrap_or(name);
    let names = [name.to_string(), plain.into(), format!("{plain}.gz")];
    names.iter().map(|name| path.with_file_name(name)).find(|path| path.is_file())
}

/// Each file with that of its labels: what `data.labels` names, or what is found beside it. A file that is found as the
/// labels of another is none of its own.
pub(crate) fn with_labels(
    files: &[DataFile],
    settings: &Settings,
    beside: fn(&Path) -> Option<PathBuf>,
) -> Result<Vec<(DataFile, Option<DataFile>)>, OpenError> {
    let given = settings.text("labels", "")?;
    if !given.is_empty() {
        let labels = files::list(&given, settings, "labels")?.files;
        if labels.len() == files.len() {
            return Ok(files.iter().cloned().zip(labels.into_iter().map(Some)).collect());
        }
        let message = format!("names {} files, and `data.source` {}", labels.len(), files.len());
        return Err(settings.wrong("labels", message, "name one file with labels for each").into());
    }
    let found: Vec<Option<PathBuf>> = files.iter().map(|file| beside(&file.path)).collect();
    let mut all = Vec::new();
    for (file, labels) in files.iter().zip(&found) {
        if !found.contains(&Some(file.path.clone())) {
            let labels = labels.as_ref().map(|path| DataFile::at(path)).transpose()?;
            all.push((file.clone(), labels));
        }
    }
    Ok(all)
}
