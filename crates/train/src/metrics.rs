//! The metrics of a run as JSON lines: `{"step":12,"epoch":1,"loss":0.52,…}`.
//!
//! Every line reaches the operating system before `write` returns, so a killed run keeps all it measured.

use std::fs::File;
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

    /// Appends a line. JSON has no NaN and no infinity: they are written as null.
    pub fn write(&mut self, step: u64, epoch: u64, values: &[(&str, f64)]) -> io::Result<()> {
        self.file.write_all(line(step, epoch, values)?.as_bytes())
    }
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
}
