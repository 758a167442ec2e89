//! A digest of files: of every byte where they are small together, and of chunks spread over each where they are not. A digest
//! depends on names, sizes and contents only, so copies on other disks have the same.

use crate::error::ReadError;
use kolo_base::lock;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Files whose contents count. Of more, so many that are spread evenly.
pub(crate) const FILES_MAX: usize = 16_384;
/// Every byte counts of files that are not larger than this, all together.
const WHOLE_BYTES_MAX: u64 = 256 << 20;
/// Of larger files, chunks of this size count.
const CHUNK_BYTES: u64 = 16 << 10;
/// So many of all files together, by their sizes.
const CHUNKS: u64 = 4096;
/// So many of each file at least.
const CHUNKS_OF_FILE_MIN: u64 = 2;
/// Read at once.
const BLOCK_BYTES: usize = 1 << 20;
const THREADS_MAX: usize = 8;

/// A digest of these files. One that cannot be read is an error, unless it may be left out.
pub(crate) fn of_files(paths: &[PathBuf], skips: bool) -> Result<blake3::Hash, ReadError> {
    digest(paths, skips, WHOLE_BYTES_MAX)
}

/// `chosen` numbers below `count`, from the first to the last, or all.
pub(crate) fn spread(count: usize, chosen: usize) -> impl Iterator<Item = usize> {
    let chosen = chosen.min(count);
    let steps = chosen.saturating_sub(1).max(1) as u128;
    (0..chosen).map(move |at| (at as u128 * (count as u128 - 1) / steps) as usize)
}

fn digest(paths: &[PathBuf], skips: bool, whole_bytes_max: u64) -> Result<blake3::Hash, ReadError> {
    let mut sizes = Vec::new();
    for at in spread(paths.len(), FILES_MAX) {
        match std::fs::metadata(&paths[at]) {
            Ok(meta) if meta.is_file() => sizes.push((&paths[at], meta.len())),
            // A directory or a pipe has no contents of its own.
            Ok(_) => {}
            Err(_) if skips => {}
            Err(error) => return Err(ReadError::io(&paths[at], &error)),
        }
    }
    let all_bytes: u64 = sizes.iter().map(|(_, bytes)| bytes).sum();
    let chunks_of = |bytes: u64| match all_bytes <= whole_bytes_max {
        true => None,
        false => Some((u128::from(CHUNKS) * u128::from(bytes)).div_ceil(u128::from(all_bytes)) as u64),
    };
    let digests: Vec<Mutex<Option<io::Result<blake3::Hash>>>> = sizes.iter().map(|_| Mutex::new(None)).collect();
    let left = Mutex::new(sizes.iter().zip(&digests));
    let work = || {
        let mut block = Vec::new();
        while let Some(((path, bytes), digest)) = { lock(&left).next() } {
            *lock(digest) = Some(of_file(path, *bytes, chunks_of(*bytes), &mut block));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX).min(sizes.len());
    kolo_base::on_threads(threads, work);
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(paths.len() as u64).to_le_bytes());
    for ((path, bytes), digest) in sizes.iter().zip(&digests) {
        hasher.update(path.file_name().unwrap_or_default().as_encoded_bytes()).update(&bytes.to_le_bytes());
        match lock(digest).take() {
            Some(Ok(digest)) => _ = hasher.update(digest.as_bytes()),
            Some(Err(error)) if !skips => return Err(ReadError::io(path, &error)),
            _ => {}
        }
    }
    Ok(hasher.finalize())
}

/// A digest of all of a file, or of so many chunks of it.
fn of_file(path: &Path, bytes: u64, chunks: Option<u64>, block: &mut Vec<u8>) -> io::Result<blake3::Hash> {
    let file = kolo_base::open_regular(path)?;
    let mut hasher = blake3::Hasher::new();
    let chunks = chunks.map(|chunks| chunks.max(CHUNKS_OF_FILE_MIN));
    match chunks.filter(|chunks| chunks.saturating_mul(CHUNK_BYTES) < bytes) {
        None => add(&file, 0, bytes, block, &mut hasher)?,
        Some(chunks) => {
            for chunk in 0..chunks {
                let start = u128::from(bytes - CHUNK_BYTES) * u128::from(chunk) / u128::from(chunks - 1);
                add(&file, start as u64, CHUNK_BYTES, block, &mut hasher)?;
            }
        }
    }
    Ok(hasher.finalize())
}

fn add(
    file: &File,
    mut start: u64,
    mut bytes: u64,
    block: &mut Vec<u8>,
    hasher: &mut blake3::Hasher,
) -> io::Result<()> {
    while bytes > 0 {
        let now = bytes.min(BLOCK_BYTES as u64);
        block.resize(now as usize, 0);
        file.read_exact_at(block, start)?;
        hasher.update(block);
        (start, bytes) = (start + now, bytes - now);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_byte_of_small_files_counts() {
        let directory = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| directory.path().join(name));
        let mut contents = [vec![7; 3000], vec![9; 70]];
        let print = |contents: &[Vec<u8>; 2], most: u64| {
            paths.iter().zip(contents).for_each(|(path, contents)| std::fs::write(path, contents).unwrap());
            digest(&paths, false, most).unwrap()
        };
        let whole = print(&contents, 3070);
        assert_eq!(whole, print(&contents, 1 << 20));
        for (file, at) in [(0, 0), (0, 1234), (0, 2999), (1, 0), (1, 69)] {
            contents[file][at] ^= 1;
            assert_ne!(whole, print(&contents, 3070), "byte {at} of file {file}");
            contents[file][at] ^= 1;
        }
        contents[1].push(0);
        assert_ne!(whole, print(&contents, 1 << 20));
    }

    #[test]
    fn chunks_are_spread_over_large_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = [directory.path().join("large")];
        let bytes = 4 * CHUNKS * CHUNK_BYTES;
        let file = File::create(&path[0]).unwrap();
        file.set_len(bytes).unwrap();
        let print = || digest(&path, false, 1).unwrap();
        let first = print();
        // A stretch of eight chunks is never missed, wherever it is; the first and the last byte count.
        for start in [0, 12_345_678, bytes / 2 + 77, bytes - 8 * CHUNK_BYTES] {
            file.write_all_at(&[1; 8 * CHUNK_BYTES as usize], start).unwrap();
            assert_ne!(first, print(), "from byte {start}");
            file.write_all_at(&[0; 8 * CHUNK_BYTES as usize], start).unwrap();
        }
        for at in [0, bytes - 1] {
            file.write_all_at(&[1], at).unwrap();
            assert_ne!(first, print(), "byte {at}");
            file.write_all_at(&[0], at).unwrap();
        }
        assert_eq!(first, print());
    }

    #[test]
    fn a_file_that_is_gone_may_be_left_out() {
        let gone = [PathBuf::from("/nowhere/a.png")];
        assert!(of_files(&gone, true).is_ok());
        assert!(of_files(&gone, false).unwrap_err().to_string().contains("/nowhere/a.png"));
        assert_eq!(spread(10, 4).collect::<Vec<_>>(), [0, 3, 6, 9]);
        assert_eq!((spread(2, 4).collect::<Vec<_>>(), spread(0, 4).count(), spread(5, 1).count()), (vec![0, 1], 0, 1));
    }
}
