//! Checkpoints as ranks write them and others read them: in order, with the power failing, on a bad disk, with flipped bits.

mod faults;
mod hostile;
mod lives;
mod rot;
mod round_trip;
mod torn;

use kolo_ckpt::simulated::SimulatedDisk;
use kolo_ckpt::{
    Checkpoint, CkptError, Disk, Header, Piece, Role, ShardWriter, Summary, TensorSource, commit, staging_dir,
};
use kolo_graph::rng::Stream;
use kolo_graph::{DType, Region};
use std::path::{Path, PathBuf};

pub const ROOT: &str = "runs/a/checkpoints";

/// A tensor of a made-up state.
#[derive(Clone, Debug, PartialEq)]
pub struct Whole {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub role: Role,
    pub bytes: Vec<u8>,
}

/// A state of some tensors of all types and roles, a few hundred times `scale` bytes, that follows from the seed.
pub fn state(seed: u64, scale: usize) -> Vec<Whole> {
    let stream = Stream::new(seed, "checkpoint test");
    let tensor = |at: u64, name: &str, shape: &[usize], dtype: DType, role: Role| {
        let bytes = shape.iter().product::<usize>() * dtype.bytes();
        let word = |byte: usize| stream.bits(at, byte as u64) as u8;
        Whole { name: name.into(), shape: shape.into(), dtype, role, bytes: (0..bytes).map(word).collect() }
    };
    vec![
        tensor(0, "h.0.weight", &[scale, 7], DType::F32, Role::Parameter),
        tensor(1, "h.0.bias", &[scale], DType::F32, Role::Parameter),
        tensor(2, "scalar", &[], DType::F32, Role::Parameter),
        tensor(3, "half", &[3, 5], DType::BF16, Role::Parameter),
        tensor(4, "none", &[0, 4], DType::F32, Role::Parameter),
        tensor(5, "bn.running_mean", &[scale], DType::F32, Role::Statistic),
        tensor(6, "bn.count", &[], DType::I64, Role::Statistic),
        tensor(7, "optim.h.0.weight.m", &[scale, 7], DType::F32, Role::Moment),
        tensor(8, "optim.mask", &[9], DType::Bool, Role::Moment),
    ]
}

pub fn header(step: u64) -> Header {
    Header {
        step,
        weights: format!("blake3:of step {step}"),
        settings: vec![("train.steps".into(), "400".into())],
        trainer: serde_json::json!({ "best": 0.1 + 0.2, "cursor": 1u64 << 60 }),
        created_s: 1_700_000_000,
        version: "0.1.0".into(),
        workers: 2,
        ..Header::default()
    }
}

/// What rank `rank` of `ranks` has of a tensor: of one of some size an equal run, or every second time an equal part of each of its
/// rows; of the others all if it is its turn.
fn part_of(tensor: &Whole, at: usize, (rank, ranks): (usize, usize)) -> Option<(Region, Vec<u8>)> {
    let elements: usize = tensor.shape.iter().product();
    let cut = |size: usize| size * rank / ranks..size * (rank + 1) / ranks;
    let (region, count) = match tensor.shape[..] {
        [rows, columns] if columns >= ranks && at % 2 == 1 => {
            (Region::of_dim(&tensor.shape, 1, 1, &cut(columns)), rows * cut(columns).len())
        }
        _ if elements > 2 * ranks => (Region::from(cut(elements).start), cut(elements).len()),
        _ if at % ranks == rank => (Region::from(0), elements),
        _ => return None,
    };
    let size = tensor.dtype.bytes();
    let bytes = region.runs(0..count).flat_map(|(_, start, len)| &tensor.bytes[start * size..(start + len) * size]);
    Some((region, bytes.copied().collect()))
}

/// Writes what rank `rank` of `ranks` has.
pub fn write_rank(
    disk: &dyn Disk,
    staging: &Path,
    state: &[Whole],
    (rank, ranks): (usize, usize),
    chunk_bytes: u64,
) -> Result<Summary, CkptError> {
    let parts = state.iter().enumerate().filter_map(|(at, tensor)| Some((tensor, part_of(tensor, at, (rank, ranks))?)));
    let parts: Vec<(&Whole, (Region, Vec<u8>))> = parts.collect();
    let mut pieces = parts.iter().map(|(Whole { name, shape, dtype, role, .. }, (region, bytes))| Piece {
        tensor: name,
        whole: shape,
        dtype: *dtype,
        role: *role,
        region: *region,
        bytes,
    });
    ShardWriter { rank, ranks, chunk_bytes }.write(disk, staging, &mut pieces, &|_| ())
}

/// Saves a state as so many ranks do.
pub fn save(disk: &dyn Disk, step: u64, state: &[Whole], ranks: usize, chunk_bytes: u64) -> Result<PathBuf, CkptError> {
    let staging = staging_dir(Path::new(ROOT), step, 0);
    let shards: Result<Vec<Summary>, CkptError> = (0..ranks)
        .map(|rank| {
            let summary = write_rank(disk, &staging, state, (rank, ranks), chunk_bytes)?;
            Summary::from_bytes(&summary.to_bytes())
        })
        .collect();
    commit(disk, Path::new(ROOT), &staging, &header(step), &shards?)
}

/// All that a checkpoint holds.
pub fn load(checkpoint: &Checkpoint) -> Vec<Whole> {
    let read = |tensor: &kolo_ckpt::TensorInfo| Whole {
        name: tensor.name.clone(),
        shape: tensor.whole.clone(),
        dtype: tensor.dtype,
        role: tensor.role,
        bytes: checkpoint.read_all(tensor).unwrap(),
    };
    checkpoint.tensors().iter().map(read).collect()
}

/// A state in the order in which a checkpoint has it.
pub fn sorted(mut state: Vec<Whole>) -> Vec<Whole> {
    state.sort_by(|a, b| a.name.cmp(&b.name));
    state
}

/// A simulated disk with one checkpoint, of step 100.
pub fn disk_with(state: &[Whole], ranks: usize, chunk_bytes: u64) -> SimulatedDisk {
    let disk = SimulatedDisk::new();
    save(&disk, 100, state, ranks, chunk_bytes).unwrap();
    disk
}

/// What a path means, without the ones that were skipped.
pub fn resolved(disk: &kolo_ckpt::SharedDisk, path: &str) -> Result<TensorSource, CkptError> {
    kolo_ckpt::resolve(disk, Path::new(path)).map(|(source, _)| source)
}
