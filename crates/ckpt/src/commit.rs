//! From what all ranks wrote to one checkpoint: the manifest last, everything synced, then one rename.

use crate::catalog::{self, StepName};
use crate::disk::Disk;
use crate::error::CkptError;
use crate::manifest::{FileInfo, Header, INDEX, MANIFEST, Manifest, Role, Run, TensorInfo};
use crate::shard::{ChunkWriter, Summary, create_dirs};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

/// Makes a checkpoint of what the ranks wrote into `staging_dir`, a directory in `root`, and returns its path,
/// `root/step-00000200`. If there is one of that step already, it is left alone and the new one is `step-00000200.2`, which
/// counts as newer.
///
/// Until the rename there is no new checkpoint, and after it there is all of it. If this fails before, the unfinished one
/// is removed.
pub fn commit(
    disk: &dyn Disk,
    root: &Path,
    staging_dir: &Path,
    header: &Header,
    shards: &[Summary],
) -> Result<PathBuf, CkptError> {
    create_dirs(disk, root)?;
    let ready = prepare(disk, staging_dir, header, shards).and_then(|()| free_name(disk, root, header.step));
    let renamed = ready.and_then(|target| {
        disk.rename(staging_dir, &target).map_err(CkptError::io(staging_dir, "rename", None))?;
        Ok(target)
    });
    match renamed {
        Ok(target) => {
            disk.sync_dir(root).map_err(CkptError::io(root, "sync", None))?;
            Ok(target)
        }
        Err(error) => {
            discard(disk, staging_dir);
            Err(error)
        }
    }
}

/// Removes an unfinished checkpoint, as far as that goes.
pub fn discard(disk: &dyn Disk, staging_dir: &Path) {
    let _ = catalog::remove_unfinished(disk, staging_dir);
}

/// Everything but the rename.
fn prepare(disk: &dyn Disk, staging_dir: &Path, header: &Header, shards: &[Summary]) -> Result<(), CkptError> {
    let (mut files, tensors, chunk_bytes) = together(shards)?;
    check_files(disk, staging_dir, &files)?;
    if let Some(index) = index(&files, &tensors) {
        files.push(write_synced(disk, staging_dir, INDEX, chunk_bytes, &index)?);
    }
    let manifest = Manifest::new(header.clone(), chunk_bytes, files, tensors)?;
    write_synced(disk, staging_dir, MANIFEST, chunk_bytes, &manifest.encode()?)?;
    disk.sync_dir(staging_dir).map_err(CkptError::io(staging_dir, "sync", None))
}

/// The files and tensors of all ranks.
fn together(shards: &[Summary]) -> Result<(Vec<FileInfo>, Vec<TensorInfo>, u64), CkptError> {
    const HINT: &str = "run one build of kolo on all hosts";
    let Some(first) = shards.first() else {
        return Err(CkptError::unsound("no rank wrote anything", HINT));
    };
    let (mut files, mut ranks) = (Vec::new(), HashSet::new());
    let mut tensors: BTreeMap<&str, TensorInfo> = BTreeMap::new();
    for shard in shards {
        if (shard.ranks, shard.chunk_bytes) != (first.ranks, first.chunk_bytes) || !ranks.insert(shard.rank) {
            let what = format!("rank {} of {} and rank {} of {}", first.rank, first.ranks, shard.rank, shard.ranks);
            return Err(CkptError::unsound(format!("{what} wrote for different checkpoints"), HINT));
        }
        for run in &shard.runs {
            let tensor = tensors.entry(&run.tensor).or_insert_with(|| TensorInfo {
                name: run.tensor.clone(),
                dtype: run.dtype,
                whole: run.whole.clone(),
                role: run.role,
                runs: Vec::new(),
            });
            if (tensor.dtype, &tensor.whole, tensor.role) != (run.dtype, &run.whole, run.role) {
                let what = format!(
                    "rank {} has `{}` with a different type, shape or role than the others",
                    shard.rank, run.tensor
                );
                return Err(CkptError::unsound(what, HINT));
            }
            let file = files.len() + run.file;
            let (key, region) = (run.key.clone(), run.region.clone());
            let (start, elements, offset) = (run.start, run.elements, run.offset);
            tensor.runs.push(Run { file, key, start, elements, region, offset });
        }
        files.extend(shard.files.iter().cloned());
    }
    Ok((files, tensors.into_values().collect(), first.chunk_bytes))
}

/// Every rank's files are here in full, and nothing of an earlier attempt is.
fn check_files(disk: &dyn Disk, staging_dir: &Path, files: &[FileInfo]) -> Result<(), CkptError> {
    for file in files {
        let path = staging_dir.join(&file.name);
        let here = disk.open(&path).map_err(CkptError::io(&path, "find", Some(file.bytes)))?.bytes();
        if here != file.bytes {
            let what = format!("has {here} bytes, but {} were written", file.bytes);
            return Err(CkptError::refused(&path, what, "all hosts must write to one file system that they share"));
        }
    }
    let names: HashSet<&str> = files.iter().map(|file| file.name.as_str()).collect();
    let here = disk.list(staging_dir).map_err(CkptError::io(staging_dir, "list", None))?;
    for left in here.iter().filter(|item| !item.is_dir && !names.contains(item.name.as_str())) {
        let path = staging_dir.join(&left.name);
        disk.remove_file(&path).map_err(CkptError::io(&path, "remove", None))?;
    }
    Ok(())
}

/// Which file has which weight, as Hugging Face writes it, if there are several.
fn index(files: &[FileInfo], tensors: &[TensorInfo]) -> Option<Vec<u8>> {
    let (mut map, mut total, mut weights) = (Map::new(), 0, HashSet::new());
    for tensor in tensors.iter().filter(|tensor| tensor.role != Role::Moment) {
        total += tensor.bytes();
        for run in &tensor.runs {
            weights.insert(run.file);
            map.insert(run.key.clone(), Value::String(files.get(run.file)?.name.clone()));
        }
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
    (weights.len() > 1).then(|| format!("{index:#}\n").into_bytes())
}

fn write_synced(
    disk: &dyn Disk,
    dir: &Path,
    name: &str,
    chunk_bytes: u64,
    bytes: &[u8],
) -> Result<FileInfo, CkptError> {
    let path = dir.join(name);
    let file = disk.create(&path).map_err(CkptError::io(&path, "create", None))?;
    let mut writer = ChunkWriter::new(file, &path, chunk_bytes as usize, &|_| ());
    writer.put(bytes)?;
    Ok(FileInfo { name: name.into(), ..writer.finish()? })
}

/// A name for a checkpoint of this step that is newer than all of it that are there.
fn free_name(disk: &dyn Disk, root: &Path, step: u64) -> Result<PathBuf, CkptError> {
    let items = disk.list(root).map_err(CkptError::io(root, "list", None))?;
    let taken = items.iter().filter_map(|item| StepName::parse(&item.name)).filter(|name| name.step == step);
    let revision = taken.map(|name| name.revision).max().map_or(1, |last| last.saturating_add(1));
    Ok(root.join(StepName { step, revision }.to_string()))
}
