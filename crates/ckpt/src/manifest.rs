//! `manifest.json`: what a checkpoint holds, where, and the digest of every chunk of every file. The last member is the
//! digest of all bytes before it, so that no bit of it can change unnoticed.
//!
//! Reading checks everything that the rest of the crate relies on, before any other file is opened.

use crate::digest::Digest;
use crate::error::CkptError;
use kolo_graph::types::{DIMS_MAX, ELEMENTS_MAX, count};
use kolo_graph::{DType, Region};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

pub const MANIFEST: &str = "manifest.json";
pub const INDEX: &str = "model.safetensors.index.json";

const FORMAT: &str = "kolo-checkpoint";
/// Of a checkpoint in which every part of a tensor is one run of elements, and of one in which some are several.
const FORMAT_VERSION: u32 = 1;
const FORMAT_VERSION_REGIONS: u32 = 2;

/// Bytes of a chunk, whose digest is kept: 1.2 GB have some 1,200 of them.
pub const CHUNK_BYTES: u64 = 1 << 20;
const CHUNK_BYTES_MIN: u64 = 64;
const CHUNK_BYTES_MAX: u64 = 64 << 20;

/// Bytes of a manifest: 1 GiB lists some ten million chunks, 10 TB.
pub const MANIFEST_BYTES_MAX: u64 = 1 << 30;
const NAME_BYTES_MAX: usize = 4096;
/// Runs of a tensor, over all files: the rows of a large layer, each cut for some workers.
const PARTS_MAX: usize = 1 << 24;

const DIGEST_KEY: &str = "\"digest\": \"blake3:";
const DIGEST_END: &str = "\"\n}\n";
const DIGEST_DIGITS: usize = 64;

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Parameter,
    /// State of the optimizer.
    Moment,
    /// State of the model: a running average, a counter.
    Statistic,
}

/// What a checkpoint says of itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// The number of the next step.
    pub step: u64,
    /// The weights digest, as `kolo train` prints it.
    pub weights: String,
    /// Every key of the job with the value that counts.
    pub settings: Vec<(String, String)>,
    /// What the trainer needs to go on beside tensors.
    pub trainer: Value,
    /// What it takes to use the model: job text, class names, preprocessing.
    pub model: Value,
    /// Seconds since 1970.
    pub created_s: u64,
    /// The version of kolo that wrote it.
    pub version: String,
    pub workers: u64,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileInfo {
    pub name: String,
    pub bytes: u64,
    /// Of each chunk in order; the last one may be short.
    pub chunks: Vec<Digest>,
}

/// Elements of a tensor side by side in one file: a run of them in the tensor as well, or several at equal distances.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The number of its file.
    pub file: usize,
    /// Its name in that file.
    pub key: String,
    /// The first of its elements, and their number.
    pub start: usize,
    pub elements: usize,
    /// Where they lie in the tensor, if not side by side: the start of a run, its length, the distance to the next, and how many
    /// elements of those runs come before the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub region: Vec<usize>,
    /// The first of its bytes in the file.
    pub offset: u64,
}

impl Run {
    /// Which elements of the tensor it has.
    pub fn region(&self) -> Region {
        if self.region.is_empty() { Region::from(self.start) } else { Region::from_numbers(&self.region) }
    }

    /// Its runs in this range of the tensor: (the first of it here, the same in the tensor, how many).
    pub fn within(&self, range: Range<usize>) -> impl Iterator<Item = (usize, usize, usize)> {
        self.region().within(self.elements, range)
    }
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorInfo {
    pub name: String,
    #[serde(with = "dtype_name")]
    pub dtype: DType,
    /// Of the whole tensor.
    #[serde(rename = "shape")]
    pub whole: Vec<usize>,
    pub role: Role,
    /// In order; together they are the whole tensor, and no two share an element.
    pub runs: Vec<Run>,
}

impl TensorInfo {
    pub fn elements(&self) -> usize {
        count(&self.whole)
    }

    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.bytes()
    }
}

/// An element type by its name.
pub(crate) mod dtype_name {
    use kolo_graph::DType;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(dtype: &DType, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(dtype.name())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
        let name = std::borrow::Cow::<str>::deserialize(deserializer)?;
        DType::parse(&name).ok_or_else(|| serde::de::Error::custom(format!("`{name}` is not an element type")))
    }
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Manifest {
    format: String,
    format_version: u32,
    pub header: Header,
    pub chunk_bytes: u64,
    pub files: Vec<FileInfo>,
    /// In order of name.
    pub tensors: Vec<TensorInfo>,
}

impl Manifest {
    /// Fails if this is not a manifest that [`decode`](Self::decode) accepts.
    pub fn new(
        header: Header,
        chunk_bytes: u64,
        files: Vec<FileInfo>,
        mut tensors: Vec<TensorInfo>,
    ) -> Result<Self, CkptError> {
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        tensors.iter_mut().for_each(|tensor| tensor.runs.sort_by_key(|run| (run.start, run.elements)));
        let regions = tensors.iter().flat_map(|tensor| &tensor.runs).any(|run| !run.region.is_empty());
        let format_version = if regions { FORMAT_VERSION_REGIONS } else { FORMAT_VERSION };
        let manifest = Self { format: FORMAT.into(), format_version, header, chunk_bytes, files, tensors };
        match manifest.check() {
            Ok(()) => Ok(manifest),
            Err(what) => {
                Err(CkptError::unsound(what, "every element of every tensor must be saved by exactly one rank"))
            }
        }
    }

    /// The file's bytes: a line for every file and every tensor, the digest last.
    pub fn encode(&self) -> Result<Vec<u8>, CkptError> {
        let text = |value: serde_json::Result<String>| {
            value.map_err(|error| CkptError::unsound(error.to_string(), "this is a bug in kolo"))
        };
        let lines = |lines: Vec<serde_json::Result<String>>| -> Result<String, CkptError> {
            let lines: Result<Vec<String>, CkptError> = lines.into_iter().map(text).collect();
            Ok(lines?.join(",\n"))
        };
        let mut out = format!(
            "{{\n\"format\": \"{FORMAT}\",\n\"format_version\": {},\n\"header\": {},\n\"chunk_bytes\": {},\n\
             \"files\": [\n{}\n],\n\"tensors\": [\n{}\n],\n{DIGEST_KEY}",
            self.format_version,
            text(serde_json::to_string_pretty(&self.header))?,
            self.chunk_bytes,
            lines(self.files.iter().map(serde_json::to_string).collect())?,
            lines(self.tensors.iter().map(serde_json::to_string).collect())?,
        );
        let digest = Digest::of(out.as_bytes());
        out.push_str(&digest.to_string());
        out.push_str(DIGEST_END);
        Ok(out.into_bytes())
    }

    /// Reads a manifest. Its digest is looked at first.
    pub fn decode(path: &Path, bytes: &[u8]) -> Result<Self, CkptError> {
        let tail = DIGEST_DIGITS + DIGEST_END.len();
        let signed = bytes.len().checked_sub(tail).map(|at| bytes.split_at(at));
        let Some((body, tail)) = signed.filter(|(body, _)| body.ends_with(DIGEST_KEY.as_bytes())) else {
            return Err(CkptError::damaged(
                path,
                "the manifest does not end with its digest: it was truncated or changed",
            ));
        };
        let (digits, end) = tail.split_at(DIGEST_DIGITS);
        let digest = std::str::from_utf8(digits).ok().and_then(Digest::parse);
        if end != DIGEST_END.as_bytes() || digest != Some(Digest::of(body)) {
            return Err(CkptError::damaged(path, "the manifest does not match its digest: it was changed"));
        }
        let hint = "a checkpoint is a directory that `kolo train` wrote";
        let manifest: Self = serde_json::from_slice(bytes)
            .map_err(|error| CkptError::refused(path, format!("the manifest is malformed: {error}"), hint))?;
        if manifest.format != FORMAT {
            return Err(CkptError::refused(path, format!("its format is `{}`", manifest.format), hint));
        }
        if !(FORMAT_VERSION..=FORMAT_VERSION_REGIONS).contains(&manifest.format_version) {
            let what = format!("it has version {} of the format", manifest.format_version);
            let known = format!("this build of kolo reads versions {FORMAT_VERSION} and {FORMAT_VERSION_REGIONS}");
            return Err(CkptError::refused(path, what, known));
        }
        manifest
            .check()
            .map_err(|what| CkptError::refused(path, format!("the manifest is malformed: {what}"), hint))?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), String> {
        if !self.chunk_bytes.is_power_of_two() || !(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&self.chunk_bytes) {
            return Err(format!("chunks of {} bytes", self.chunk_bytes));
        }
        let mut names = HashSet::new();
        for file in &self.files {
            if !is_plain(&file.name) || file.name == MANIFEST {
                return Err(format!("`{}` is not a valid name for a checkpoint file", file.name));
            }
            if !names.insert(file.name.as_str()) {
                return Err(format!("the file `{}` is listed twice", file.name));
            }
            if file.bytes.div_ceil(self.chunk_bytes) != file.chunks.len() as u64 {
                return Err(format!("`{}` has {} bytes and {} chunks", file.name, file.bytes, file.chunks.len()));
            }
        }
        for pair in self.tensors.windows(2) {
            if pair[0].name >= pair[1].name {
                return Err(format!("the tensors `{}` and `{}` are not in order", pair[0].name, pair[1].name));
            }
        }
        self.tensors.iter().try_for_each(|tensor| self.check_tensor(tensor))?;
        self.check_shared_bytes()
    }

    fn check_tensor(&self, tensor: &TensorInfo) -> Result<(), String> {
        let TensorInfo { name, whole, dtype, runs, .. } = tensor;
        let elements = whole.iter().try_fold(1usize, |total, size| total.checked_mul((*size).max(1)));
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(format!("a tensor's name has {} bytes", name.len()));
        }
        if whole.len() > DIMS_MAX || elements.is_none_or(|elements| elements > ELEMENTS_MAX) {
            return Err(format!("`{name}` has the shape {whole:?}"));
        }
        for run in runs {
            let file = self
                .files
                .get(run.file)
                .ok_or_else(|| format!("`{name}` is in file {}, which does not exist", run.file))?;
            let bytes = (run.elements as u64).checked_mul(dtype.bytes() as u64);
            if bytes.and_then(|bytes| bytes.checked_add(run.offset)).is_none_or(|end| end > file.bytes) {
                return Err(format!("`{name}` ends past the end of `{}`", file.name));
            }
            let numbers = run.region.is_empty() || run.region.len() == 4 && run.region().first() == run.start;
            if !numbers || !run.region().fits(run.elements, tensor.elements()) {
                return Err(format!("{} elements at {} lie outside of `{name}`", run.elements, run.start));
            }
        }
        check_cover(tensor)
    }

    /// No byte of a file belongs to two tensors.
    fn check_shared_bytes(&self) -> Result<(), String> {
        let mut places: Vec<(usize, u64, u64, &str)> = Vec::new();
        for tensor in &self.tensors {
            let end = |run: &Run| run.offset + (run.elements * tensor.dtype.bytes()) as u64;
            places.extend(tensor.runs.iter().map(|run| (run.file, run.offset, end(run), tensor.name.as_str())));
        }
        places.sort_unstable();
        match places.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[1].1 < pair[0].2) {
            Some(pair) => Err(format!("`{}` and `{}` share bytes", pair[0].3, pair[1].3)),
            None => Ok(()),
        }
    }
}

/// Every element of a tensor is in one of its runs, and in one only.
fn check_cover(tensor: &TensorInfo) -> Result<(), String> {
    let TensorInfo { name, runs, .. } = tensor;
    let number = |run: &Run| match run.region[..] {
        [_, length, ..] => run.elements / length.max(1) + 2,
        _ => 1,
    };
    if runs.iter().map(number).sum::<usize>() > PARTS_MAX {
        return Err(format!("`{name}` is in more than {PARTS_MAX} parts"));
    }
    let parts = |run: &Run| run.region().runs(0..run.elements).map(|(_, start, len)| (start, len));
    let mut parts: Vec<(usize, usize)> = runs.iter().flat_map(parts).collect();
    parts.sort_unstable();
    let mut end = 0;
    for (start, len) in parts {
        if start != end {
            let what = if start < end { "there twice" } else { "missing" };
            return Err(format!("element {} of `{name}` is {what}", start.min(end)));
        }
        end += len;
    }
    match end == tensor.elements() && !runs.is_empty() {
        true => Ok(()),
        false => Err(format!("element {end} of `{name}` is missing")),
    }
}

/// A name without directories, that cannot lead elsewhere and is not hidden.
pub(crate) fn is_plain(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    !name.is_empty() && name.len() <= 255 && !name.starts_with('.') && name.bytes().all(allowed)
}
