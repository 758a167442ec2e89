//! A checkpoint to read. Whatever it gives was compared with the digests of the manifest.

use crate::digest::Digest;
use crate::disk::{ReadFile, SharedDisk};
use crate::error::CkptError;
use crate::manifest::{FileInfo, Header, MANIFEST, MANIFEST_BYTES_MAX, Manifest, TensorInfo};
use kolo_base::lock;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// A checkpoint whose manifest is sound and whose files have the right sizes.
#[derive(Debug)]
pub struct Checkpoint {
    pub(crate) disk: SharedDisk,
    dir: PathBuf,
    manifest: Manifest,
    /// The chunk that was read last, as tensors share chunks with their neighbours.
    last: Mutex<LastChunk>,
}

#[derive(Debug, Default)]
struct LastChunk {
    /// File and chunk.
    of: Option<(usize, usize)>,
    bytes: Vec<u8>,
}

impl Checkpoint {
    /// Reads the manifest of a checkpoint and looks whether its files are there.
    pub fn open(disk: &SharedDisk, dir: &Path) -> Result<Self, CkptError> {
        let path = dir.join(MANIFEST);
        let file = disk.open(&path).map_err(CkptError::io(&path, "open", None))?;
        let bytes = file.bytes();
        if bytes > MANIFEST_BYTES_MAX {
            return Err(CkptError::damaged(&path, format!("{bytes} bytes are more than a manifest may have")));
        }
        let mut text = vec![0; bytes as usize];
        file.read_at(0, &mut text).map_err(CkptError::io(&path, "read", Some(bytes)))?;
        let manifest = Manifest::decode(&path, &text)?;
        let checkpoint = Self { disk: disk.clone(), dir: dir.to_path_buf(), manifest, last: Mutex::default() };
        (0..checkpoint.files().len()).try_for_each(|at| checkpoint.open_file(at).map(drop))?;
        Ok(checkpoint)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn header(&self) -> &Header {
        &self.manifest.header
    }

    /// Its tensors, in order of name.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.manifest.tensors
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let at = self.tensors().binary_search_by(|tensor| tensor.name.as_str().cmp(name)).ok()?;
        self.tensors().get(at)
    }

    pub fn files(&self) -> &[FileInfo] {
        &self.manifest.files
    }

    /// Bytes of all its files but the manifest.
    pub fn bytes(&self) -> u64 {
        self.files().iter().map(|file| file.bytes).sum()
    }

    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.manifest.chunk_bytes
    }

    /// A file, if it is there and has its size.
    pub(crate) fn open_file(&self, at: usize) -> Result<(PathBuf, Box<dyn ReadFile>), CkptError> {
        let FileInfo { name, bytes, .. } = &self.files()[at];
        let path = self.dir.join(name);
        let file = self.disk.open(&path).map_err(CkptError::io(&path, "open", Some(*bytes)))?;
        match file.bytes() == *bytes {
            true => Ok((path, file)),
            false => {
                let what = format!("has {} bytes, but the manifest says {bytes}", file.bytes());
                Err(CkptError::damaged(&path, what))
            }
        }
    }

    /// The bytes of a chunk in its file.
    pub(crate) fn chunk_place(&self, file: usize, chunk: usize) -> Range<u64> {
        let start = chunk as u64 * self.chunk_bytes();
        start..(start + self.chunk_bytes()).min(self.files()[file].bytes)
    }

    /// Reads elements `range` of a tensor into `out`, little-endian, and checks them.
    pub fn read(&self, tensor: &str, range: Range<usize>, out: &mut [u8]) -> Result<(), CkptError> {
        let wrong = |what: String, hint: &str| CkptError::Tensor {
            path: self.dir.clone(),
            tensor: tensor.to_owned(),
            what,
            hint: hint.into(),
        };
        let Some(info) = self.tensor(tensor) else {
            return Err(wrong("is not in it".into(), "`kolo ckpt show` lists what is"));
        };
        let size = info.dtype.bytes();
        let fits = range.start <= range.end && range.end <= info.elements();
        if !fits || range.len().checked_mul(size) != Some(out.len()) {
            let what = format!("has {} elements: no {range:?} for {} bytes", info.elements(), out.len());
            return Err(wrong(what, "resume with the job that saved it: same model, same optimizer"));
        }
        for run in &info.runs {
            for (local, place, len) in run.within(range.clone()) {
                let at = (place - range.start) * size;
                self.read_bytes(run.file, run.offset + (local * size) as u64, &mut out[at..at + len * size])?;
            }
        }
        Ok(())
    }

    /// All of a tensor.
    pub fn read_all(&self, tensor: &TensorInfo) -> Result<Vec<u8>, CkptError> {
        let mut bytes = vec![0; tensor.bytes()];
        self.read(&tensor.name, 0..tensor.elements(), &mut bytes)?;
        Ok(bytes)
    }

    fn read_bytes(&self, file: usize, offset: u64, out: &mut [u8]) -> Result<(), CkptError> {
        let (path, reader) = self.open_file(file)?;
        let end = offset + out.len() as u64;
        let mut at = offset;
        while at < end {
            let chunk = (at / self.chunk_bytes()) as usize;
            let place = self.chunk_place(file, chunk);
            let part = &mut out[(at - offset) as usize..(place.end.min(end) - offset) as usize];
            if at == place.start && part.len() as u64 == place.end - place.start {
                // Straight to where it belongs.
                reader.read_at(at, part).map_err(CkptError::io(&path, "read", Some(part.len() as u64)))?;
                self.check(&path, file, chunk, part)?;
            } else {
                let mut last = lock(&self.last);
                if last.of != Some((file, chunk)) {
                    last.of = None;
                    last.bytes.resize((place.end - place.start) as usize, 0);
                    let failed = CkptError::io(&path, "read", Some(place.end - place.start));
                    reader.read_at(place.start, &mut last.bytes).map_err(failed)?;
                    self.check(&path, file, chunk, &last.bytes)?;
                    last.of = Some((file, chunk));
                }
                let from = (at - place.start) as usize;
                part.copy_from_slice(&last.bytes[from..from + part.len()]);
            }
            at = place.end;
        }
        Ok(())
    }

    fn check(&self, path: &Path, file: usize, chunk: usize, bytes: &[u8]) -> Result<(), CkptError> {
        if self.files()[file].chunks.get(chunk) == Some(&Digest::of(bytes)) {
            return Ok(());
        }
        let damage = self.damage_of(file, chunk);
        Err(CkptError::damaged(path, damage.what()))
    }
}
