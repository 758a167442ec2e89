//! What tells one set of samples from another, cheaply.

mod contents;

use crate::error::ReadError;
use crate::source::Source;
pub(crate) use contents::{FILES_MAX, of_files, spread};
use kolo_graph::field::{Column, Kind};

/// Samples whose contents count, spread evenly from the first to the last.
const SAMPLES: usize = 8;
/// Hexadecimal digits of a digest that a message shows.
pub(crate) const DIGITS: usize = 16;

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
    for sample in spread(count, SAMPLES) {
        (0..source.fields().len())
            .try_for_each(|field| add(&mut hasher, source, (sample, field), fill))
            .map_err(|error| error.of("", sample))?;
    }
    Ok(hasher.finalize().to_hex()[..DIGITS].to_string())
}

/// Writes a field of a sample.
pub(crate) type Fill<'f> = dyn Fn(usize, usize, Column<'_>) -> Result<(), ReadError> + 'f;

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
