//! What one rank writes: its parts of tensors, in two safetensors files, with the digest of every chunk computed on the way.

use crate::digest::Digest;
use crate::disk::{Disk, WriteFile};
use crate::error::CkptError;
use crate::manifest::{CHUNK_BYTES, FileInfo, Role, dtype_name};
use crate::safetensors::{self, Slot};
use kolo_graph::types::count;
use kolo_graph::{DType, Region};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Elements of a tensor: where they lie in memory, and which elements of which tensor they are.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    pub tensor: &'a str,
    /// The shape of the whole tensor.
    pub whole: &'a [usize],
    pub dtype: DType,
    pub role: Role,
    /// Which elements: a run of them, or several at equal distances.
    pub region: Region,
    /// The elements, little-endian.
    pub bytes: &'a [u8],
}

impl Piece<'_> {
    fn elements(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    fn is_whole(&self) -> bool {
        self.region == Region::from(0) && self.elements() == count(self.whole)
    }

    /// The number of the first element.
    fn start(&self) -> usize {
        self.region.first()
    }

    /// Its name in a file.
    fn key(&self) -> String {
        if self.is_whole() { self.tensor.to_owned() } else { format!("{}@{}", self.tensor, self.start()) }
    }

    fn check(&self) -> Result<(), CkptError> {
        let Self { tensor, whole, region, .. } = self;
        let fits = region.fits(self.elements(), count(whole));
        if !fits || !self.bytes.len().is_multiple_of(self.dtype.bytes()) || !safetensors::is_key(tensor) {
            let (bytes, start) = (self.bytes.len(), self.start());
            let what = format!("{bytes} bytes at element {start} lie outside of `{tensor}` of shape {whole:?}");
            return Err(CkptError::unsound(what, "this is a bug in kolo; please report it"));
        }
        Ok(())
    }
}

/// A run that a rank wrote.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WrittenRun {
    pub tensor: String,
    pub whole: Vec<usize>,
    #[serde(with = "dtype_name")]
    pub dtype: DType,
    pub role: Role,
    pub start: usize,
    /// The numbers of its region, if it is not one run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub region: Vec<usize>,
    pub elements: usize,
    /// The number of its file in the summary.
    pub file: usize,
    pub key: String,
    pub offset: u64,
}

/// What one rank wrote. It goes to the rank that commits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub rank: usize,
    pub ranks: usize,
    pub chunk_bytes: u64,
    pub files: Vec<FileInfo>,
    pub runs: Vec<WrittenRun>,
}

impl Summary {
    pub fn to_bytes(&self) -> Vec<u8> {
        // Numbers, texts and lists always have a text form.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// What another rank sent.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CkptError> {
        serde_json::from_slice(bytes).map_err(|error| {
            CkptError::unsound(
                format!("the record of what a rank wrote is malformed: {error}"),
                "run one build of kolo on all hosts",
            )
        })
    }

    /// Bytes of all its files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

/// Writes what one of several ranks holds into the directory of an unfinished checkpoint, which is made if need be. What
/// an earlier attempt left there is replaced. `progress` hears how many bytes are written.
///
/// When this returns, the files and their names are on the disk. If it fails, they are removed.
pub fn write_shard(
    disk: &dyn Disk,
    staging_dir: &Path,
    rank: usize,
    ranks: usize,
    pieces: &mut dyn Iterator<Item = Piece<'_>>,
    progress: &dyn Fn(u64),
) -> Result<Summary, CkptError> {
    let writer = ShardWriter { rank, ranks, chunk_bytes: CHUNK_BYTES };
    writer.write(disk, staging_dir, pieces, progress)
}

/// How a rank writes.
#[derive(Clone, Copy, Debug)]
pub struct ShardWriter {
    pub rank: usize,
    pub ranks: usize,
    /// A power of two, the same for all ranks.
    pub chunk_bytes: u64,
}

impl ShardWriter {
    /// See [`write_shard`].
    pub fn write(
        &self,
        disk: &dyn Disk,
        staging_dir: &Path,
        pieces: &mut dyn Iterator<Item = Piece<'_>>,
        progress: &dyn Fn(u64),
    ) -> Result<Summary, CkptError> {
        let mut pieces: Vec<Piece<'_>> = pieces.filter(|piece| !piece.bytes.is_empty() || piece.is_whole()).collect();
        pieces.iter().try_for_each(Piece::check)?;
        // Wide elements first, so that all are aligned.
        pieces.sort_by(|a, b| {
            let wide = b.dtype.bytes().cmp(&a.dtype.bytes());
            wide.then_with(|| (a.tensor, a.start()).cmp(&(b.tensor, b.start())))
        });
        create_dirs(disk, staging_dir)?;
        let mut summary = Summary {
            rank: self.rank,
            ranks: self.ranks,
            chunk_bytes: self.chunk_bytes,
            files: Vec::new(),
            runs: Vec::new(),
        };
        let outcome = self.write_files(disk, staging_dir, &pieces, progress, &mut summary);
        match outcome {
            Ok(()) => Ok(summary),
            Err(error) => {
                for (kind, _) in KINDS {
                    let _ = disk.remove_file(&staging_dir.join(self.file_name(kind)));
                }
                Err(error)
            }
        }
    }

    fn file_name(&self, kind: &str) -> String {
        format!("{kind}-{:05}-of-{:05}.safetensors", self.rank + 1, self.ranks)
    }

    fn write_files(
        &self,
        disk: &dyn Disk,
        staging_dir: &Path,
        pieces: &[Piece<'_>],
        progress: &dyn Fn(u64),
        summary: &mut Summary,
    ) -> Result<(), CkptError> {
        let mut before = 0;
        for (kind, is_in) in KINDS {
            let mine: Vec<&Piece<'_>> = pieces.iter().filter(|piece| is_in(piece.role)).collect();
            if mine.is_empty() {
                continue;
            }
            let name = self.file_name(kind);
            let file =
                self.write_file(disk, &staging_dir.join(&name), &mine, &|bytes| progress(before + bytes), summary)?;
            before += file.bytes;
            summary.files.push(FileInfo { name, ..file });
        }
        disk.sync_dir(staging_dir).map_err(CkptError::io(staging_dir, "sync", None))
    }

    fn write_file(
        &self,
        disk: &dyn Disk,
        path: &Path,
        pieces: &[&Piece<'_>],
        progress: &dyn Fn(u64),
        summary: &mut Summary,
    ) -> Result<FileInfo, CkptError> {
        let keys: Vec<String> = pieces.iter().map(|piece| piece.key()).collect();
        let mut seen = HashSet::new();
        if let Some(twice) = keys.iter().find(|key| !seen.insert(key.as_str())) {
            return Err(CkptError::unsound(format!("`{twice}` appears twice"), "rename a tensor, or save it once"));
        }
        let shapes: Vec<Vec<usize>> = pieces
            .iter()
            .map(|piece| if piece.is_whole() { piece.whole.to_vec() } else { vec![piece.elements()] })
            .collect();
        let slots = pieces.iter().zip(&keys).zip(&shapes);
        let slots =
            slots.map(|((piece, key), shape)| Slot { key, dtype: piece.dtype, shape, bytes: piece.bytes.len() as u64 });
        let header = safetensors::header(slots, &[("format", "pt")]);
        let file = disk.create(path).map_err(CkptError::io(path, "create", None))?;
        let mut writer = ChunkWriter::new(file, path, self.chunk_bytes as usize, progress);
        writer.put(&header)?;
        for (piece, key) in pieces.iter().zip(keys) {
            let Piece { tensor, whole, dtype, role, region, bytes } = **piece;
            let run = WrittenRun {
                tensor: tensor.to_owned(),
                whole: whole.to_vec(),
                dtype,
                role,
                start: piece.start(),
                region: if region.is_run() { Vec::new() } else { region.to_numbers() },
                elements: piece.elements(),
                file: summary.files.len(),
                key,
                offset: writer.bytes(),
            };
            summary.runs.push(run);
            writer.put(bytes)?;
        }
        writer.finish()
    }
}

/// A kind of file, and what is in it. What it takes to use a model is in one, what only training needs in the other.
type FileKind = (&'static str, fn(Role) -> bool);
const KINDS: [FileKind; 2] = [("weights", |role| role != Role::Moment), ("state", |role| role == Role::Moment)];

/// Makes a directory, and those above it, so that their names are durable.
pub(crate) fn create_dirs(disk: &dyn Disk, path: &Path) -> Result<(), CkptError> {
    if path.as_os_str().is_empty() || disk.is_dir(path) {
        return Ok(());
    }
    let above = path.parent().unwrap_or(Path::new(""));
    create_dirs(disk, above)?;
    match disk.create_dir(path) {
        // Another rank was faster.
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && disk.is_dir(path) => return Ok(()),
        outcome => outcome.map_err(CkptError::io(path, "make the directory", None))?,
    }
    let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
    disk.sync_dir(above).map_err(CkptError::io(above, "sync", None))
}

/// Writes a file and takes the digest of each of its chunks. Large parts go out from where they lie; small ones are
/// gathered first, up to the end of a chunk.
pub(crate) struct ChunkWriter<'a> {
    file: Box<dyn WriteFile>,
    path: PathBuf,
    chunk_bytes: usize,
    /// Of the chunk that is not full yet, with what is gathered.
    hasher: blake3::Hasher,
    /// Bytes of that chunk.
    filled: usize,
    /// What was put and not written yet.
    gathered: Vec<u8>,
    written: u64,
    chunks: Vec<Digest>,
    progress: &'a dyn Fn(u64),
}

/// Parts below this are gathered.
const DIRECT_BYTES_MIN: usize = 64 << 10;

impl<'a> ChunkWriter<'a> {
    pub fn new(file: Box<dyn WriteFile>, path: &Path, chunk_bytes: usize, progress: &'a dyn Fn(u64)) -> Self {
        let hasher = blake3::Hasher::new();
        let path = path.to_path_buf();
        let (gathered, chunks) = (Vec::new(), Vec::new());
        Self { file, path, chunk_bytes, hasher, filled: 0, gathered, written: 0, chunks, progress }
    }

    /// Bytes put so far.
    pub fn bytes(&self) -> u64 {
        self.written + self.gathered.len() as u64
    }

    pub fn put(&mut self, mut bytes: &[u8]) -> Result<(), CkptError> {
        while !bytes.is_empty() {
            let (part, rest) = bytes.split_at(bytes.len().min(self.chunk_bytes - self.filled));
            self.hasher.update(part);
            self.filled += part.len();
            if part.len() < DIRECT_BYTES_MIN {
                self.gathered.extend_from_slice(part);
            } else {
                self.write_gathered()?;
                self.write(part)?;
            }
            if self.filled == self.chunk_bytes {
                self.end_chunk()?;
            }
            bytes = rest;
        }
        Ok(())
    }

    fn end_chunk(&mut self) -> Result<(), CkptError> {
        self.write_gathered()?;
        self.chunks.push(Digest(*self.hasher.finalize().as_bytes()));
        self.hasher.reset();
        self.filled = 0;
        (self.progress)(self.written);
        Ok(())
    }

    fn write_gathered(&mut self) -> Result<(), CkptError> {
        let gathered = std::mem::take(&mut self.gathered);
        if !gathered.is_empty() {
            self.write(&gathered)?;
        }
        self.gathered = gathered;
        self.gathered.clear();
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), CkptError> {
        self.file.write(bytes).map_err(CkptError::io(&self.path, "write", Some(bytes.len() as u64)))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Ends the file, and brings it to the disk.
    pub fn finish(mut self) -> Result<FileInfo, CkptError> {
        if self.filled > 0 {
            self.end_chunk()?;
        }
        self.file.sync().map_err(CkptError::io(&self.path, "bring to the disk", Some(self.written)))?;
        Ok(FileInfo { name: String::new(), bytes: self.written, chunks: self.chunks })
    }
}
