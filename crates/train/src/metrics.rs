//! The metrics of a run as JSON lines: `{"step":12,"epoch":1,"loss":0.52,…}`.
//!
//! Every line reaches the operating system before `write` returns, so a killed run keeps all it measured. A resumed run
//! drops what the interrupted one wrote after its checkpoint: each step stands in the file once.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// An open `metrics.jsonl`.
#[derive(Debug)]
pub struct MetricsFile {
    file: File,
}

impl MetricsFile {
    /// Starts a new file, replacing an old one.
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(Self { file: File::create(path)? })
    }

    /// Continues a file with `next_step`: lines of that step or later, and a last line torn by a kill, are removed.
    pub fn resume(path: &Path, next_step: u64) -> io::Result<Self> {
        let text = match fs::read(path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error),
        };
        let kept: String = text.split_inclusive('\n').filter(|line| is_before(line, next_step)).collect();
        // The old file stays whole until the shortened one is complete.
        let shortened = path.with_extension("jsonl.partial");
        fs::write(&shortened, kept)?;
        fs::rename(&shortened, path)?;
        Ok(Self { file: OpenOptions::new().append(true).open(path)? })
    }

    /// Appends a line. JSON has no NaN and no infinity: they are written as null.
    pub fn write(&mut self, step: u64, epoch: u64, values: &[(&str, f64)]) -> io::Result<()> {
        self.file.write_all(line(step, epoch, values)?.as_bytes())
    }
}

/// Whether `line` is complete and about a step before `next_step`.
fn is_before(line: &str, next_step: u64) -> bool {
    let step = serde_json::from_str::<serde_json::Value>(line).ok().and_then(|value| value.get("step")?.as_u64());
    line.ends_with('\n') && step.is_some_and(|step| step < next_step)
}

fn line(step: u64, epoch: u64, values: &[(&str, f64)]) -> io::Result<String> {
    let mut line = format!("{{\"step\":{step},\"epoch\":{epoch}");
    for (name, value) in values {
        line += &format!(",{}:{}", serde_json::to_string(name)?, serde_json::to_string(value)?);
    }
    Ok(line + "}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_json_in_the_order_given() {
        let values = [("loss", 0.5), ("a \"b\"", f64::NAN), ("norm", f64::INFINITY), ("lr", 1e-3)];
        let line = line(3, 1, &values).unwrap();
        assert_eq!(line, "{\"step\":3,\"epoch\":1,\"loss\":0.5,\"a \\\"b\\\"\":null,\"norm\":null,\"lr\":0.001}\n");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&line).unwrap()["loss"], 0.5);
    }

    #[test]
    fn a_resumed_file_is_the_uninterrupted_one() {
        let directory = tempfile::tempdir().unwrap();
        let (whole, resumed) = (directory.path().join("whole.jsonl"), directory.path().join("metrics.jsonl"));
        let write = |file: &mut MetricsFile, steps: std::ops::Range<u64>| {
            steps.for_each(|step| file.write(step, step / 4, &[("loss", 1.0 / (1.0 + step as f64))]).unwrap());
        };
        write(&mut MetricsFile::create(&whole).unwrap(), 0..10);
        write(&mut MetricsFile::resume(&resumed, 0).unwrap(), 0..7);
        OpenOptions::new().append(true).open(&resumed).unwrap().write_all(b"{\"step\":1").unwrap();
        write(&mut MetricsFile::resume(&resumed, 5).unwrap(), 5..10);
        assert_eq!(fs::read_to_string(&resumed).unwrap(), fs::read_to_string(&whole).unwrap());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }
}
