//! Samples kept after decoding, in memory or in a file without a name.
//!
//! What comes first stays: an epoch asks for every sample once, so what was used longest ago is not what will be used latest.
//! A full cache, or a full disk, keeps what it has. Only speed depends on it, never a sample.

use crate::error::ReadError;
use crate::image::Pixels;
use crate::sample::{Held, Sample, Value};
use kolo_base::ShownPath;
use kolo_base::{ByteReader, group_limit, lock};
use kolo_graph::settings::{SettingError, Settings};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The part of the memory that is free at the start, and may be used.
const MEMORY_PART: u64 = 8;
/// If the system does not tell.
const MEMORY_BYTES: u64 = 1 << 30;
const DISK_BYTES: u64 = 64 << 30;
/// Threads meet at one lock that rarely.
const SHARDS: usize = 64;
/// Bytes that an entry takes beside its contents.
const ENTRY_BYTES: u64 = 64;

#[derive(Debug)]
pub(crate) struct Cache {
    shards: Vec<Mutex<HashMap<usize, Entry>>>,
    disk: Option<Disk>,
    bytes_max: AtomicU64,
    /// Nobody said how many bytes it may take.
    is_default: bool,
    used: AtomicU64,
    full: AtomicBool,
}

#[derive(Debug)]
struct Disk {
    file: File,
    directory: PathBuf,
}

#[derive(Clone, Debug)]
enum Entry {
    Memory(Arc<[u8]>),
    /// Offset and length in the file.
    Disk(u64, usize),
}

impl Cache {
    /// What `cache`, `cache_max` and `cache_dir` ask for.
    pub fn read(settings: &Settings) -> Result<Option<Self>, SettingError> {
        let kind = settings.choice("cache", &["none", "memory", "disk"])?;
        // 0, so that ranks of machines of different sizes have the same job.
        let asked = settings.count("cache_max", 0, 0)? as u64;
        let directory = settings.text("cache_dir", "")?;
        let unused = [("cache_max", kind == "none"), ("cache_dir", kind != "disk")];
        if let Some((key, _)) = unused.into_iter().find(|(key, unused)| *unused && settings.peek(key).is_some()) {
            let (message, hint) = match key {
                "cache_max" => {
                    ("is for a cache, but there is none", "write `cache = \"memory\"` or `\"disk\"`, or leave it out")
                }
                _ => ("is for a cache on disk", "write `cache = \"disk\"`, or leave it out"),
            };
            return Err(settings.wrong(key, message, hint));
        }
        let bytes_max = |default: u64| if asked == 0 { default } else { asked };
        match kind {
            "memory" => {
                let cache = Self::new(None, bytes_max(memory_bytes()));
                Ok(Some(Self { is_default: asked == 0, ..cache }))
            }
            "disk" => {
                let directory = if directory.is_empty() { std::env::temp_dir() } else { directory.into() };
                let file = tempfile::tempfile_in(&directory).map_err(|error| {
                    let message = format!("cannot be made in {}: {error}", directory.shown());
                    settings.wrong("cache", message, "name a directory with enough space: `cache_dir = \"/scratch\"`")
                })?;
                Ok(Some(Self::new(Some(Disk { file, directory }), bytes_max(DISK_BYTES))))
            }
            _ => Ok(None),
        }
    }

    fn new(disk: Option<Disk>, bytes_max: u64) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        let bytes_max = AtomicU64::new(bytes_max);
        Self { shards, disk, bytes_max, is_default: false, used: AtomicU64::new(0), full: AtomicBool::new(false) }
    }

    /// So many processes of this host have such a cache, and share the memory that one alone would take by default.
    pub fn share(&self, processes: usize) {
        if self.is_default {
            self.bytes_max.store(memory_bytes() / processes.max(1) as u64, Ordering::Relaxed);
        }
    }

    /// Bytes of memory that it takes at most, for samples of which one takes so many.
    pub fn memory_for(&self, samples: usize, sample_bytes: u64) -> u64 {
        match self.disk {
            Some(_) => 0,
            None => self.bytes_max.load(Ordering::Relaxed).min((samples as u64).saturating_mul(sample_bytes)),
        }
    }

    fn shard(&self, sample: usize) -> &Mutex<HashMap<usize, Entry>> {
        &self.shards[sample % SHARDS]
    }

    /// Puts a sample back together, if it is here.
    pub fn get(&self, number: usize, sample: &mut Sample, buffer: &mut Vec<u8>) -> Result<bool, ReadError> {
        let Some(entry) = lock(self.shard(number)).get(&number).cloned() else { return Ok(false) };
        let whole = match (&entry, &self.disk) {
            (Entry::Memory(bytes), _) => unpack(bytes, sample),
            (Entry::Disk(offset, len), Some(disk)) => {
                buffer.clear();
                buffer.resize(*len, 0);
                let read = disk.file.read_exact_at(buffer, *offset);
                read.map_err(|error| ReadError::io(&disk.directory.join("(cache)"), &error).at(*offset))?;
                unpack(buffer, sample)
            }
            (Entry::Disk(..), None) => None,
        };
        Ok(whole.is_some())
    }

    /// Keeps a sample, if there is room.
    pub fn put(&self, number: usize, sample: &Sample, buffer: &mut Vec<u8>) {
        if self.full.load(Ordering::Relaxed) {
            return;
        }
        buffer.clear();
        pack(sample, buffer);
        let bytes = buffer.len() as u64 + ENTRY_BYTES;
        let offset = self.used.fetch_add(bytes, Ordering::Relaxed);
        if offset + bytes > self.bytes_max.load(Ordering::Relaxed) {
            self.full.store(true, Ordering::Relaxed);
            return;
        }
        let entry = match &self.disk {
            None => Entry::Memory(buffer.as_slice().into()),
            Some(disk) => match disk.file.write_all_at(buffer, offset) {
                Ok(()) => Entry::Disk(offset, buffer.len()),
                // No room, most likely. The sample is made again next time.
                Err(_) => return self.full.store(true, Ordering::Relaxed),
            },
        };
        lock(self.shard(number)).insert(number, entry);
    }

    /// For the terminal.
    pub fn describe(&self) -> String {
        let place = match &self.disk {
            None => "memory".to_string(),
            Some(disk) => disk.directory.display().to_string(),
        };
        format!("cached in {place}")
    }
}

/// What one sample takes in a cache.
pub(crate) fn bytes_of(sample: &Sample, buffer: &mut Vec<u8>) -> u64 {
    buffer.clear();
    pack(sample, buffer);
    buffer.len() as u64 + ENTRY_BYTES
}

/// A part of the memory that is free now, or that the control group may use, if that is less.
pub(crate) fn memory_bytes() -> u64 {
    let text = std::fs::read_to_string(Path::new("/proc/meminfo")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    let free = kilobytes.map(|kilobytes| kilobytes.saturating_mul(1024));
    let limit = group_limit().map(|(bytes, _)| bytes);
    free.into_iter().chain(limit).min().map_or(MEMORY_BYTES, |bytes| bytes / MEMORY_PART)
}

fn pack(sample: &Sample, out: &mut Vec<u8>) {
    for value in [&sample.x, &sample.y] {
        let mut head = |kind: u8, sizes: &[usize]| {
            out.push(kind);
            sizes.iter().for_each(|size| out.extend((*size as u64).to_le_bytes()));
        };
        match value.held {
            Held::Nothing => head(0, &[]),
            Held::Pixels => {
                let Pixels { channels, height, width, bytes } = &value.pixels;
                head(1, &[*channels, *height, *width, bytes.len()]);
                out.extend_from_slice(bytes);
            }
            Held::Reals => {
                head(2, &[value.reals.len()]);
                value.reals.iter().for_each(|real| out.extend(real.to_le_bytes()));
            }
            Held::Indices => {
                head(3, &[value.indices.len()]);
                value.indices.iter().for_each(|index| out.extend(index.to_le_bytes()));
            }
        }
    }
}

fn unpack(bytes: &[u8], sample: &mut Sample) -> Option<()> {
    fn size(bytes: &mut ByteReader<'_>) -> Option<usize> {
        usize::try_from(bytes.u64()?).ok()
    }
    let mut bytes = ByteReader::new(bytes);
    let mut value = |value: &mut Value| -> Option<()> {
        match bytes.u8()? {
            0 => value.held = Held::Nothing,
            1 => {
                let [channels, height, width, len] = [(); 4].map(|()| size(&mut bytes));
                let pixels = value.set_pixels();
                (pixels.channels, pixels.height, pixels.width) = (channels?, height?, width?);
                pixels.bytes.clear();
                pixels.bytes.extend_from_slice(bytes.take(len?)?);
            }
            2 => {
                let len = size(&mut bytes)?;
                let words = bytes.take(len.checked_mul(4)?)?.as_chunks::<4>().0;
                value.set_reals().extend(words.iter().map(|word| f32::from_le_bytes(*word)));
            }
            _ => {
                let len = size(&mut bytes)?;
                let words = bytes.take(len.checked_mul(4)?)?.as_chunks::<4>().0;
                value.set_indices().extend(words.iter().map(|word| i32::from_le_bytes(*word)));
            }
        }
        Some(())
    };
    value(&mut sample.x)?;
    value(&mut sample.y)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::settings::Setting;

    fn sample(number: u8) -> Sample {
        let mut sample = Sample::default();
        *sample.x.set_pixels() = Pixels { channels: 1, height: 2, width: 3, bytes: vec![number; 6] };
        sample.y.set_indices().extend([i32::from(number), -1]);
        sample
    }

    fn cache(kind: &str, max: i64) -> Cache {
        let mut settings = Settings::new("data", "job.toml:1");
        settings.set("cache", "job.toml:2", Setting::Text(kind.into()));
        settings.set("cache_max", "job.toml:3", Setting::Int(max));
        Cache::read(&settings).unwrap().unwrap()
    }

    #[test]
    fn samples_come_back_as_they_were() {
        for kind in ["memory", "disk"] {
            let (cache, mut buffer) = (cache(kind, 0), Vec::new());
            (0..200).for_each(|number| cache.put(usize::from(number), &sample(number), &mut buffer));
            let mut reals = Sample::default();
            reals.x.set_reals().extend([1.5, f32::NAN]);
            cache.put(200, &reals, &mut buffer);
            let mut back = Sample::default();
            for number in (0..200).rev() {
                assert_eq!(cache.get(usize::from(number), &mut back, &mut buffer), Ok(true));
                assert_eq!(back, sample(number), "{kind}");
            }
            assert_eq!(cache.get(200, &mut back, &mut buffer), Ok(true));
            assert_eq!((back.x.reals[0], back.x.reals[1].is_nan(), back.y.held), (1.5, true, Held::Nothing));
            assert_eq!(cache.get(201, &mut back, &mut buffer), Ok(false));
        }
    }

    #[test]
    fn a_full_cache_keeps_what_it_has() {
        for kind in ["memory", "disk"] {
            let (cache, mut buffer) = (cache(kind, 1000), Vec::new());
            (0..50).for_each(|number| cache.put(usize::from(number), &sample(number), &mut buffer));
            let kept =
                (0..50).filter(|number| cache.get(*number, &mut Sample::default(), &mut buffer).unwrap()).count();
            assert!((5..15).contains(&kept), "{kept}");
            assert!(cache.get(0, &mut Sample::default(), &mut buffer).unwrap());
        }
    }

    #[test]
    fn workers_share_what_nobody_set() {
        let most = |cache: &Cache| cache.memory_for(usize::MAX, 1 << 40);
        let (default, set) = (cache("memory", 0), cache("memory", 1000));
        let alone = most(&default);
        [&default, &set].into_iter().for_each(|cache| cache.share(4));
        assert!(most(&default) <= alone / 2, "{} of {alone}", most(&default));
        assert_eq!((most(&set), set.memory_for(7, 100), cache("disk", 1000).memory_for(7, 100)), (1000, 700, 0));
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error() {
        let mut settings = Settings::new("data", "job.toml:1");
        settings.set("cache", "job.toml:2", Setting::Text("disk".into()));
        settings.set("cache_dir", "job.toml:3", Setting::Text("/no/such/directory".into()));
        let error = Cache::read(&settings).unwrap_err().to_string();
        assert!(error.starts_with("job.toml:2: `data.cache` cannot be made in /no/such/directory: "), "{error}");
    }
}
