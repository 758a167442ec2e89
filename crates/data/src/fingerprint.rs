//! What tells one set of samples from another, cheaply.

use crate::error::ReadError;
use crate::files::DataFile;
use crate::source::Source;
use kolo_graph::field::{Column, Kind};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Samples whose contents count, spread evenly from the first to the last.
const SAMPLES: usize = 8;
/// Hexadecimal digits of a digest that a message shows.
pub(crate) const DIGITS: usize = 16;

/// Blocks of files whose contents count, spread evenly from the first file to the last: 16 MiB. Small files count whole.
const BLOCKS: usize = 256;
const BLOCK_BYTES: u64 = 64 << 10;

/// A digest of the fields, the number of samples, and the contents of a few.
pub(crate) fn sampled<S: Source + ?Sized>(source: &S) -> Result<String, ReadError> {
    sampled_by(source, &|sample, field, out| source.fill(sample, field, out))
}

/// The same, of values that `fill` writes.
pub(crate) fn sampled_by<S: Source + ?Sized>(source: &S, fill: &Fill<'_>) -> Result<String, ReadError> {
    let mut hasher = blake3::Hasher::new();
    let count = source.len();
    hasher.update(&(count as u64).to_le_bytes());
    for field in source.fields() {
        hasher.update(field.to_string().as_bytes());
    }
    for sample in spread(SAMPLES, count) {
        (0..source.fields().len())
            .try_for_each(|field| add(&mut hasher, source, (sample, field), fill))
            .map_err(|error| error.of("", sample))?;
    }
    Ok(hasher.finalize().to_hex()[..DIGITS].to_string())
}

/// Writes a field of a sample.
pub(crate) type Fill<'f> = dyn Fn(usize, usize, Column<'_>) -> Result<(), ReadError> + 'f;

/// So many numbers below `count`, or all, from the first to the last.
fn spread(most: usize, count: usize) -> impl Iterator<Item = usize> {
    let chosen = most.min(count);
    (0..chosen).map(move |at| (at as u128 * (count as u128 - 1) / chosen.saturating_sub(1).max(1) as u128) as usize)
}

/// Adds what some of these files hold. A pipe, or a file that cannot be read, adds nothing.
pub(crate) fn add_contents(hasher: &mut blake3::Hasher, files: &[DataFile]) {
    let mut block = vec![0; BLOCK_BYTES as usize];
    let chosen = spread(BLOCKS, files.len()).map(|at| &files[at]);
    let each = BLOCKS / files.len().clamp(1, BLOCKS);
    for file in chosen.filter(|file| std::fs::metadata(&file.path).is_ok_and(|there| there.is_file())) {
        let Ok(opened) = File::open(&file.path) else { continue };
        let blocks = usize::try_from(file.bytes.div_ceil(BLOCK_BYTES)).unwrap_or(usize::MAX);
        for at in spread(each, blocks) {
            let start = at as u64 * BLOCK_BYTES;
            let bytes = BLOCK_BYTES.min(file.bytes - start) as usize;
            if opened.read_exact_at(&mut block[..bytes], start).is_ok() {
                hasher.update(&block[..bytes]);
            }
        }
    }
}

fn add<S: Source + ?Sized>(
    hasher: &mut blake3::Hasher,
    source: &S,
    (sample, field): (usize, usize),
    fill: &Fill<'_>,
) -> Result<(), ReadError> {
    let elements = source.fields()[field].elements();
    match source.fields()[field].kind {
        Kind::Real => {
            let mut values = vec![0.0f32; elements];
            fill(sample, field, Column::F32(&mut values))?;
            values.iter().for_each(|value| _ = hasher.update(&value.to_le_bytes()));
        }
        Kind::Index { .. } => {
            let mut values = vec![0i32; elements];
            fill(sample, field, Column::I32(&mut values))?;
            values.iter().for_each(|value| _ = hasher.update(&value.to_le_bytes()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_graph::settings::{Setting, Settings};

    fn print(source: &str, seed: u64, samples: Option<i64>) -> String {
        let mut settings = Settings::new("data", "job.toml:1");
        if let Some(samples) = samples {
            settings.set("samples", "job.toml:2", Setting::Int(samples));
        }
        crate::open(crate::SOURCES, source, &settings, seed, None).unwrap().fingerprint().unwrap()
    }

    #[test]
    fn other_contents_another_number_and_another_source_differ() {
        let first = print("builtin:playground", 1, None);
        assert_eq!(first, print("builtin:playground", 1, None));
        let others = [
            print("builtin:playground", 2, None),
            print("builtin:playground", 1, Some(77)),
            print("builtin:digits", 1, None),
            print("builtin:waves", 1, None),
        ];
        assert!(!others.contains(&first), "{first} {others:?}");
    }
}
