//! Where tensors can be read from, as a user names it: a run, a checkpoint, a safetensors file, or several with an index.

use crate::catalog::{self, Found};
use crate::checkpoint::Checkpoint;
use crate::disk::{Disk, SharedDisk};
use crate::error::CkptError;
use crate::manifest::{INDEX, MANIFEST, Role, TensorInfo};
use crate::safetensors::{self, SafetensorsFile};
use crate::transfer::open_files;
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
    Safetensors(SafetensorsFiles),
}

/// Files that hold a model together.
#[derive(Debug)]
pub struct SafetensorsFiles {
    /// The file, or the index of several.
    pub path: PathBuf,
    pub files: Vec<SafetensorsFile>,
}

impl SafetensorsFiles {
    pub fn open(disk: &dyn Disk, path: &Path) -> Result<Self, CkptError> {
        Ok(Self { path: path.to_path_buf(), files: open_files(disk, path)? })
    }
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
            Self::Safetensors(files) => &files.path,
        }
    }

    /// In order of name.
    pub fn tensors(&self) -> Vec<TensorView<'_>> {
        let mut views: Vec<TensorView<'_>> = match self {
            Self::Checkpoint(checkpoint) => checkpoint.tensors().iter().map(TensorView::of).collect(),
            Self::Safetensors(all) => {
                let tensors = all.files.iter().flat_map(|file| &file.tensors);
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
        let all = match self {
            Self::Checkpoint(checkpoint) => return checkpoint.read(tensor, range, out),
            Self::Safetensors(files) => files,
        };
        let wrong = |what: &str, hint: &str| CkptError::Tensor {
            path: all.path.clone(),
            tensor: tensor.into(),
            what: what.into(),
            hint: hint.into(),
        };
        let held = all.files.iter().find_map(|file| Some((file, file.tensor(tensor)?)));
        let (file, stored) = held.ok_or_else(|| wrong("is not in it", "`kolo ckpt show` lists what is"))?;
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

/// What transformers calls a model's only file.
const WHOLE: &str = "model.safetensors";

/// The safetensors file that a path means, or the index of several: the path itself, or what is in a directory as
/// `save_pretrained` leaves it.
pub fn weights_of(disk: &dyn Disk, path: &Path) -> PathBuf {
    if !disk.is_dir(path) {
        return path.to_path_buf();
    }
    let has_index = disk.list(path).is_ok_and(|items| items.iter().any(|item| item.name == INDEX));
    path.join(if has_index { INDEX } else { WHOLE })
}

/// What a user means by a path: a safetensors file or the index of several, a directory with either, a checkpoint, a directory of
/// checkpoints or that of a run, both of which stand for their newest sound one. Also says which newer ones were not sound, and why.
pub fn resolve(disk: &SharedDisk, path: &Path) -> Result<(TensorSource, Vec<(PathBuf, String)>), CkptError> {
    if !disk.is_dir(path) {
        return Ok((TensorSource::Safetensors(SafetensorsFiles::open(disk.as_ref(), path)?), Vec::new()));
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
        (None, None) if items.iter().any(|item| [INDEX, WHOLE].contains(&item.name.as_str())) => {
            let weights = weights_of(disk.as_ref(), path);
            Ok((TensorSource::Safetensors(SafetensorsFiles::open(disk.as_ref(), &weights)?), Vec::new()))
        }
        (None, None) => {
            let hint = "name a run directory (`kolo train --out`), a checkpoint or a safetensors file";
            Err(CkptError::refused(path, "it contains no checkpoint", hint))
        }
    }
}
