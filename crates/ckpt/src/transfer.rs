//! Writing a model's tensors under another library's names, and finding them in a file of one.

use crate::disk::Disk;
use crate::error::CkptError;
use crate::manifest::Role;
use crate::mapping::{Architecture, Extra, Layout};
use crate::safetensors::{self, SafetensorsFile, Slot, StoredTensor};
use crate::source::{TensorSource, TensorView};
use half::{bf16, f16};
use kolo_base::ShownPath;
use kolo_graph::DType;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

/// Bytes that are copied at a time.
const BLOCK_BYTES: usize = 1 << 20;

/// A tensor on its way out.
struct Outgoing<'a> {
    key: String,
    from: Option<(TensorView<'a>, Layout)>,
    dtype: DType,
    shape: Vec<usize>,
}

impl Outgoing<'_> {
    fn bytes(&self) -> u64 {
        (kolo_graph::types::count(&self.shape) * self.dtype.bytes()) as u64
    }
}

/// Writes a model's parameters and statistics as one safetensors file, under the names of `architecture` or its own. The file
/// is there as a whole or not at all. Returns its tensors and bytes.
pub fn export(
    disk: &dyn Disk,
    source: &TensorSource,
    architecture: Option<&Architecture>,
    out: &Path,
) -> Result<(usize, u64), CkptError> {
    let tensors = source.tensors();
    let mut outgoing = Vec::new();
    for tensor in tensors.iter().filter(|tensor| tensor.role != Some(Role::Moment)) {
        outgoing.extend(outgoing_of(source, architecture, tensor)?);
    }
    outgoing.sort_by(|a, b| (b.dtype.bytes(), &a.key).cmp(&(a.dtype.bytes(), &b.key)));
    let slots = outgoing.iter().map(|tensor| {
        let Outgoing { key, dtype, shape, .. } = tensor;
        Slot { key, dtype: *dtype, shape, bytes: tensor.bytes() }
    });
    let header = safetensors::header(slots, &[("format", "pt")]);
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    let partial = out.with_file_name(format!(".{name}.unfinished"));
    let written = write_tensors(disk, source, &outgoing, &header, &partial).and_then(|bytes| {
        replace(disk, &partial, out)?;
        Ok(bytes)
    });
    if written.is_err() {
        let _ = disk.remove_file(&partial);
    }
    Ok((outgoing.len(), written?))
}

/// Gives a finished file its name.
fn replace(disk: &dyn Disk, from: &Path, to: &Path) -> Result<(), CkptError> {
    let above = to.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
    disk.rename(from, to).map_err(CkptError::io(to, "rename to it", None))?;
    disk.sync_dir(above).map_err(CkptError::io(above, "sync", None))
}

fn outgoing_of<'a>(
    source: &TensorSource,
    architecture: Option<&Architecture>,
    tensor: &TensorView<'a>,
) -> Result<Vec<Outgoing<'a>>, CkptError> {
    let refused = |what: String, hint: String| CkptError::Tensor {
        path: source.path().to_path_buf(),
        tensor: tensor.name.to_owned(),
        what,
        hint,
    };
    let Some(dtype) = tensor.dtype else {
        return Err(refused("has a type that kolo does not support".into(), "convert it to F32".into()));
    };
    let mut shape = tensor.shape.to_vec();
    let Some(architecture) = architecture else {
        return Ok(vec![Outgoing { key: tensor.name.into(), from: Some((*tensor, Layout::Same)), dtype, shape }]);
    };
    let name = architecture.name;
    let Some((key, layout)) = architecture.theirs(tensor.name) else {
        return Err(refused(format!("has no counterpart in {name}"), "leave --to out: names stay as they are".into()));
    };
    if let Some(hint) = architecture.refuses_shape(tensor.name, tensor.shape) {
        return Err(refused(format!("has the shape {:?}, which does not match {name}", tensor.shape), hint));
    }
    if layout == Layout::Transposed {
        shape.reverse();
    }
    let counter = architecture.counter_beside(&key);
    let mut outgoing = vec![Outgoing { key, from: Some((*tensor, layout)), dtype, shape }];
    outgoing.extend(counter.map(|key| Outgoing { key, from: None, dtype: DType::I64, shape: Vec::new() }));
    Ok(outgoing)
}

fn write_tensors(
    disk: &dyn Disk,
    source: &TensorSource,
    outgoing: &[Outgoing<'_>],
    header: &[u8],
    path: &Path,
) -> Result<u64, CkptError> {
    let mut file = disk.create(path).map_err(CkptError::io(path, "create", None))?;
    let mut total = 0;
    let mut put = |bytes: &[u8]| {
        total += bytes.len() as u64;
        file.write(bytes).map_err(CkptError::io(path, "write", Some(bytes.len() as u64)))
    };
    put(header)?;
    let mut block = Vec::new();
    for tensor in outgoing {
        let size = tensor.dtype.bytes();
        match &tensor.from {
            None => put(&vec![0; tensor.bytes() as usize])?,
            Some((view, Layout::Transposed)) if view.shape.len() == 2 => {
                let mut bytes = vec![0; tensor.bytes() as usize];
                source.read(view.name, 0..view.elements(), &mut bytes)?;
                put(&transpose(&bytes, view.shape[0], view.shape[1], size))?;
            }
            Some((view, _)) => {
                let elements = view.elements();
                for start in (0..elements).step_by(BLOCK_BYTES / size) {
                    let end = elements.min(start + BLOCK_BYTES / size);
                    block.resize((end - start) * size, 0);
                    source.read(view.name, start..end, &mut block)?;
                    put(&block)?;
                }
            }
        }
    }
    file.sync().map_err(CkptError::io(path, "bring to the disk", Some(total)))?;
    Ok(total)
}

/// A matrix of `rows` rows with its dims swapped.
fn transpose(bytes: &[u8], rows: usize, columns: usize, size: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    for column in 0..columns {
        for row in 0..rows {
            out.extend_from_slice(&bytes[(row * columns + column) * size..][..size]);
        }
    }
    out
}

/// A tensor that a model has.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    pub name: String,
    pub shape: Vec<usize>,
}

/// Files of another library in which all tensors of a model were found.
#[derive(Debug)]
pub struct Incoming {
    files: Vec<SafetensorsFile>,
    pub architecture: &'static Architecture,
    /// For every tensor of ours: its file, its number there and its layout.
    places: BTreeMap<String, (usize, usize, Layout)>,
}

/// Opens a safetensors file, or the index of several.
pub fn open_files(disk: &dyn Disk, path: &Path) -> Result<Vec<SafetensorsFile>, CkptError> {
    if path.extension().is_none_or(|extension| extension != "json") {
        return Ok(vec![SafetensorsFile::open(disk, path)?]);
    }
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    const INDEX_BYTES_MAX: u64 = 100_000_000;
    let refused = |what: String| CkptError::refused(path, what, "give a safetensors file, or the index of several");
    let file = disk.open(path).map_err(CkptError::io(path, "open", None))?;
    if file.bytes() > INDEX_BYTES_MAX {
        return Err(refused(format!("{} bytes are more than an index may have", file.bytes())));
    }
    let mut text = vec![0; file.bytes() as usize];
    file.read_at(0, &mut text).map_err(CkptError::io(path, "read", Some(file.bytes())))?;
    let Index { weight_map } = serde_json::from_slice(&text).map_err(|error| refused(error.to_string()))?;
    let names: BTreeSet<&String> = weight_map.values().collect();
    let open = |name: &String| match crate::manifest::is_plain(name) {
        true => SafetensorsFile::open(disk, &path.with_file_name(name)),
        false => Err(refused(format!("there is no file `{name}` beside it"))),
    };
    if weight_map.is_empty() {
        return Err(refused("it names no tensor".into()));
    }
    let mut files = names.iter().map(|name| open(name)).collect::<Result<Vec<_>, _>>()?;
    for (tensor, name) in &weight_map {
        let holds = names.iter().zip(&files).any(|(held, file)| *held == name && file.tensor(tensor).is_some());
        if !holds {
            return Err(refused(format!("it says that `{name}` holds `{tensor}`, and it does not")));
        }
    }
    // What else a file holds is not of this model, or another file has it.
    for (name, file) in names.iter().zip(&mut files) {
        file.tensors.retain(|tensor| weight_map.get(&tensor.name) == Some(*name));
    }
    Ok(files)
}

impl Incoming {
    /// Finds every tensor of a model in the files, by the first of the architectures that fits. If none does, the error is that of
    /// the one that came closest.
    pub fn find(
        files: Vec<SafetensorsFile>,
        architectures: &[&'static Architecture],
        wanted: &[Wanted],
    ) -> Result<Self, CkptError> {
        let mut nearest: Option<(usize, CkptError)> = None;
        for architecture in architectures {
            match places(&files, architecture, wanted) {
                Ok(places) => return Ok(Self { files, architecture, places }),
                Err((found, error)) => {
                    if nearest.as_ref().is_none_or(|(most, _)| found > *most) {
                        nearest = Some((found, error));
                    }
                }
            }
        }
        let path = files.first().map_or(PathBuf::new(), |file| file.path.clone());
        let none =
            || CkptError::refused(&path, "kolo has no name mapping for this kind of model", "use kolo's own names");
        Err(nearest.map_or_else(none, |(_, error)| error))
    }

    /// A tensor of ours as f32.
    pub fn read(&self, name: &str) -> Result<Option<Vec<f32>>, CkptError> {
        let Some((file, at, layout)) = self.places.get(name) else { return Ok(None) };
        let (file, tensor) = (&self.files[*file], &self.files[*file].tensors[*at]);
        let mut values = read_f32(file, tensor)?;
        if let (Layout::Transposed, [rows, columns]) = (layout, tensor.shape.as_slice()) {
            values = (0..*columns)
                .flat_map(|column| (0..*rows).map(move |row| (row, column)))
                .map(|(row, column)| values[row * columns + column])
                .collect();
        }
        Ok(Some(values))
    }

    /// Looks whether tensors that must be the same are.
    pub fn check_tied(&self) -> Result<(), CkptError> {
        for (file, tensor) in self.files.iter().flat_map(|file| file.tensors.iter().map(move |tensor| (file, tensor))) {
            let Some(Extra::Tied(_, twin)) = self.architecture.extra(&tensor.name) else { continue };
            let other = self.files.iter().find_map(|file| Some((file, file.tensor(twin)?)));
            let Some((other_file, other)) = other else { continue };
            if tensor.shape != other.shape || read_f32(file, tensor)? != read_f32(other_file, other)? {
                return Err(CkptError::Tensor {
                    path: file.path.clone(),
                    tensor: tensor.name.clone(),
                    what: format!("differs from `{twin}`, but in kolo's model they are the same tensor"),
                    hint: "give the model a head of its own: `tied = false` in `[model]`".into(),
                });
            }
        }
        Ok(())
    }
}

type Places = BTreeMap<String, (usize, usize, Layout)>;

/// Where every tensor of ours is; or how many were found, and what is wrong.
fn places(
    files: &[SafetensorsFile],
    architecture: &Architecture,
    wanted: &[Wanted],
) -> Result<Places, (usize, CkptError)> {
    let mut places = Places::new();
    let by_name: BTreeMap<&str, &Wanted> = wanted.iter().map(|wanted| (wanted.name.as_str(), wanted)).collect();
    let name = architecture.name;
    let mut wrong: Option<CkptError> = None;
    let mut refuse = |file: &SafetensorsFile, tensor: &str, what: String, hint: &str| {
        let error = CkptError::Tensor { path: file.path.clone(), tensor: tensor.into(), what, hint: hint.into() };
        wrong.get_or_insert(error);
    };
    for (at, file) in files.iter().enumerate() {
        for (number, tensor) in file.tensors.iter().enumerate() {
            if architecture.extra(&tensor.name).is_some() {
                continue;
            }
            let ours = architecture.ours(&tensor.name);
            let Some((wanted, layout)) = ours.and_then(|(ours, layout)| Some((*by_name.get(ours.as_str())?, layout)))
            else {
                let what = format!("has no counterpart in the job's model ({name})");
                refuse(file, &tensor.name, what, "change `[model]` so that the layers are the same");
                continue;
            };
            let mut shape = tensor.shape.clone();
            if layout == Layout::Transposed {
                shape.reverse();
            }
            if shape != wanted.shape {
                let what = format!(
                    "is {:?}, but `{}` of the job's model is {:?} ({name})",
                    tensor.shape, wanted.name, wanted.shape
                );
                let hint = architecture.refuses_shape(&wanted.name, &wanted.shape);
                refuse(
                    file,
                    &tensor.name,
                    what,
                    hint.as_deref().unwrap_or("change `[model]` so that the sizes are the same"),
                );
                continue;
            }
            if let Some((other, twin, _)) = places.insert(wanted.name.clone(), (at, number, layout)) {
                let (other, twin) = (&files[other], &files[other].tensors[twin].name);
                let what =
                    format!("is `{}` of the job's model, and so is `{twin}` of {}", wanted.name, other.path.shown());
                refuse(file, &tensor.name, what, "leave one of them out");
            }
        }
    }
    if wrong.is_none() {
        let missing = wanted.iter().find(|wanted| !places.contains_key(&wanted.name));
        wrong = missing.map(|missing| CkptError::Tensor {
            path: files.first().map_or(PathBuf::new(), |file| file.path.clone()),
            tensor: architecture.theirs(&missing.name).map_or_else(|| missing.name.clone(), |(theirs, _)| theirs),
            what: format!("is missing, but the job's model needs it as `{}` ({name})", missing.name),
            hint: "change `[model]` so that the layers are the same".into(),
        });
    }
    match wrong {
        None => Ok(places),
        Some(error) => Err((places.len(), error)),
    }
}

/// A tensor's values; what is wider is rounded.
fn read_f32(file: &SafetensorsFile, tensor: &StoredTensor) -> Result<Vec<f32>, CkptError> {
    let mut bytes = vec![0; (tensor.place.end - tensor.place.start) as usize];
    file.read(tensor, 0..bytes.len() as u64, &mut bytes)?;
    let two = |pair: &[u8]| u16::from_le_bytes([pair[0], pair[1]]);
    Ok(match tensor.type_name.as_str() {
        "F32" => bytes.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect(),
        "F16" => bytes.chunks_exact(2).map(|pair| f16::from_bits(two(pair)).to_f32()).collect(),
        "BF16" => bytes.chunks_exact(2).map(|pair| bf16::from_bits(two(pair)).to_f32()).collect(),
        "F64" => {
            let words = bytes.chunks_exact(8).map(|word| f64::from_le_bytes(std::array::from_fn(|at| word[at])));
            if let Some(large) = words.clone().find(|word| word.is_finite() && (*word as f32).is_infinite()) {
                return Err(CkptError::Tensor {
                    path: file.path.clone(),
                    tensor: tensor.name.clone(),
                    what: format!("has {large:e}, which is too large for 32 bits"),
                    hint: "kolo's weights are f32: scale the model".into(),
                });
            }
            words.map(|word| word as f32).collect()
        }
        other => {
            return Err(CkptError::Tensor {
                path: file.path.clone(),
                tensor: tensor.name.clone(),
                what: format!("is {other}"),
                hint: "kolo reads F32, F16, BF16 and F64; convert it".into(),
            });
        }
    })
}

/// Reads a small JSON file, if it is there.
pub fn read_json(disk: &dyn Disk, path: &Path) -> Result<Option<serde_json::Value>, CkptError> {
    const BYTES_MAX: u64 = 10_000_000;
    let file = match disk.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        outcome => outcome.map_err(CkptError::io(path, "open", None))?,
    };
    let refused =
        |what: String| CkptError::refused(path, what, "move it elsewhere if it does not belong to the weights");
    if file.bytes() > BYTES_MAX {
        return Err(refused(format!("has {} bytes", file.bytes())));
    }
    let mut text = vec![0; file.bytes() as usize];
    file.read_at(0, &mut text).map_err(CkptError::io(path, "read", Some(file.bytes())))?;
    serde_json::from_slice(&text).map(Some).map_err(|error| refused(error.to_string()))
}
