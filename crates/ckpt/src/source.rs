//! Where tensors can be read from, as a user names it: a run, a checkpoint or a safetensors file.

use crate::catalog::{self, Found};
use crate::checkpoint::Checkpoint;
use crate::disk::{Disk, SharedDisk};
use crate::error::CkptError;
use crate::manifest::{MANIFEST, Role, TensorInfo};
use crate::safetensors::{self, SafetensorsFile};
use kolo_base::ShownPath;
use kolo_graph::DType;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The directory of a run that has its checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";

/// Tensors by name.
#[derive(Debug)]
pub enum TensorSource {
    Checkpoint(Box<Checkpoint>),
    Safetensors(SafetensorsFile),
}

/// A tensor of a source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorView<'a> {
    pub name: &'a str,
    /// `None` if it has a type that kolo does not support.
    pub dtype: Option<DType>,
    /// What the format calls its type.
    pub type_name: &'a str,
    pub bytes: u64,
    pub shape: &'a [usize],
    /// What a safetensors file does not say.
    pub role: Option<Role>,
}

impl<'a> TensorView<'a> {
    fn of(tensor: &'a TensorInfo) -> Self {
        let bytes = (kolo_graph::types::count(&tensor.whole) * tensor.dtype.bytes()) as u64;
        Self {
            name: &tensor.name,
            dtype: Some(tensor.dtype),
            type_name: safetensors::type_name(tensor.dtype),
            bytes,
            shape: &tensor.whole,
            role: Some(tensor.role),
        }
    }

    pub fn elements(&self) -> usize {
        kolo_graph::types::count(self.shape)
    }
}

impl std::fmt::Display for TensorView<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sizes: Vec<String> = self.shape.iter().map(usize::to_string).collect();
        let name = self.dtype.map_or_else(|| self.type_name.to_lowercase(), |dtype| dtype.name().into());
        write!(f, "{name}[{}]", sizes.join(","))
    }
}

impl TensorSource {
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        match self {
            Self::Checkpoint(checkpoint) => Some(checkpoint),
            Self::Safetensors(_) => None,
        }
    }

    pub fn path(&self) -> &Path {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.dir(),
            Self::Safetensors(file) => &file.path,
        }
    }

    /// In order of name.
    pub fn tensors(&self) -> Vec<TensorView<'_>> {
        let mut views: Vec<TensorView<'_>> = match self {
            Self::Checkpoint(checkpoint) => checkpoint.tensors().iter().map(TensorView::of).collect(),
            Self::Safetensors(file) => {
                let tensors = file.tensors.iter();
                tensors
                    .map(|tensor| TensorView {
                        name: &tensor.name,
                        dtype: tensor.dtype(),
                        type_name: &tensor.type_name,
                        bytes: tensor.place.end - tensor.place.start,
                        shape: &tensor.shape,
                        role: None,
                    })
                    .collect()
            }
        };
        views.sort_by(|a, b| a.name.cmp(b.name));
        views
    }

    /// Reads elements `range` of a tensor into `out`, little-endian.
    pub fn read(&self, tensor: &str, range: Range<usize>, out: &mut [u8]) -> Result<(), CkptError> {
        let file = match self {
            Self::Checkpoint(checkpoint) => return checkpoint.read(tensor, range, out),
            Self::Safetensors(file) => file,
        };
        let wrong = |what: &str, hint: &str| CkptError::Tensor {
            path: file.path.clone(),
            tensor: tensor.into(),
            what: what.into(),
            hint: hint.into(),
        };
        let stored = file.tensor(tensor).ok_or_else(|| wrong("is not in it", "`kolo ckpt show` lists what is"))?;
        let dtype = stored.dtype();
        let size =
            dtype.ok_or_else(|| wrong("has a type that kolo does not support", "convert it to F32"))?.bytes() as u64;
        let too_far = || wrong("has fewer elements", "check its shape");
        let at = |element: usize| (element as u64).checked_mul(size).ok_or_else(too_far);
        file.read(stored, at(range.start)?..at(range.end)?, out)
    }
}

/// The directory with the checkpoints of a run, which may be the path itself.
pub fn checkpoints_of(disk: &dyn Disk, path: &Path) -> PathBuf {
    let inner = path.join(CHECKPOINTS);
    if disk.is_dir(&inner) { inner } else { path.to_path_buf() }
}

/// What a user means by a path: a safetensors file, a checkpoint, a directory of checkpoints or that of a run, both of which
/// stand for their newest sound one. Also says which newer ones were not sound, and why.
pub fn resolve(disk: &SharedDisk, path: &Path) -> Result<(TensorSource, Vec<(PathBuf, String)>), CkptError> {
    if !disk.is_dir(path) {
        return Ok((TensorSource::Safetensors(SafetensorsFile::open(disk.as_ref(), path)?), Vec::new()));
    }
    let items = disk.list(path).map_err(CkptError::io(path, "list", None))?;
    if items.iter().any(|item| item.name == MANIFEST) {
        return Ok((TensorSource::Checkpoint(Box::new(Checkpoint::open(disk, path)?)), Vec::new()));
    }
    let root = checkpoints_of(disk.as_ref(), path);
    let Found { checkpoint, skipped } = catalog::newest_valid(disk, &root)?;
    match (checkpoint, skipped.first()) {
        (Some(checkpoint), _) => Ok((TensorSource::Checkpoint(Box::new(checkpoint)), skipped)),
        (None, Some((damaged, why))) => {
            let what =
                format!("none of its {} checkpoints is intact; the newest, {}: {why}", skipped.len(), damaged.shown());
            Err(CkptError::refused(path, what, "`kolo ckpt verify` lists everything that is damaged"))
        }
        (None, None) => {
            let hint = "name a run directory (`kolo train --out`), a checkpoint or a safetensors file";
            Err(CkptError::refused(path, "it contains no checkpoint", hint))
        }
    }
}
