//! The metrics of a run as JSON lines: `{"step":12,"epoch":1,"loss":0.52,…}`.
//!
//! Every line reaches the operating system before `write` returns, so a killed run keeps all it measured.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::ops::Range;
use std::path::Path;

/// The key of a row that is written behind a step: the mean loss since the row before.
pub(crate) const MEAN_LOSS: &str = "train/loss";

/// An open `metrics.jsonl`.
#[derive(Debug)]
pub struct MetricsFile {
    file: File,
    /// Rows that the file has of the last steps, by step: they are not written again.
    there: BTreeMap<u64, usize>,
}

impl MetricsFile {
    /// Starts a new file, replacing an old one.
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(Self { file: kolo_base::create_regular(path)?, there: BTreeMap::new() })
    }

    /// Goes on with a file: rows that will be made again are dropped, and so is a torn line. Those are the rows of later steps
    /// than `step`, and if what follows it is `pending`, its row of the loss since the row before.
    pub fn resume(path: &Path, step: u64, pending: bool) -> io::Result<Self> {
        let old = match kolo_base::open_regular(path).and_then(std::io::read_to_string) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            old => old?,
        };
        let whole = &old[..old.rfind('\n').map_or(0, |end| end + 1)];
        let is_kept = |line: &&str| {
            let row: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
            let again = |of: u64| of > step || (pending && of == step && row.get(MEAN_LOSS).is_some());
            row["step"].as_u64().is_some_and(|of| !again(of))
        };
        let kept = whole.lines().filter(is_kept);
        let kept: String = kept.flat_map(|line| [line, "\n"]).collect();
        let draft = path.with_extension("jsonl.new");
        std::fs::write(&draft, kept)?;
        std::fs::rename(&draft, path)?;
        Ok(Self { file: File::options().append(true).open(path)?, there: BTreeMap::new() })
    }

    /// Takes up a file where it is, or starts one. What was written of the end of `steps` and later steps goes, whole lines or
    /// not, and if what follows the last of `steps` is `pending`, so does its row of the loss since the row before. The caller
    /// writes rows of `steps` once more; those that are there stay as they are.
    pub fn reopen(path: &Path, steps: Range<u64>, pending: bool) -> io::Result<Self> {
        let file = File::options().read(true).append(true).create(true).open(path)?;
        let (mut lines, mut line, mut kept) = (BufReader::new(&file), Vec::new(), 0);
        let mut there = BTreeMap::new();
        while lines.read_until(b'\n', &mut line)? > 0 {
            let row: serde_json::Value = serde_json::from_slice(&line).unwrap_or_default();
            let again = |of: u64| of >= steps.end || (pending && of + 1 == steps.end && row.get(MEAN_LOSS).is_some());
            let of = row["step"].as_u64().filter(|of| line.ends_with(b"\n") && !again(*of));
            let Some(of) = of else { break };
            if of >= steps.start {
                *there.entry(of).or_default() += 1;
            }
            kept += line.len() as u64;
            line.clear();
        }
        file.set_len(kept)?;
        Ok(Self { file, there })
    }

    /// Appends a line, unless it is there; whether it is new. JSON has no NaN and no infinity: they are written as null.
    pub fn write(&mut self, step: u64, epoch: u64, values: &[(&str, f64)]) -> io::Result<bool> {
        if let Some(rows) = self.there.get_mut(&step).filter(|rows| **rows > 0) {
            *rows -= 1;
            return Ok(false);
        }
        self.file.write_all(line(step, epoch, values)?.as_bytes()).map(|()| true)
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
    fn a_run_that_goes_on_drops_what_it_makes_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut first = MetricsFile::create(&path).unwrap();
        (1..=5).for_each(|step| assert!(first.write(step, 1, &[("loss", 0.5)]).unwrap()));
        std::fs::write(&path, std::fs::read_to_string(&path).unwrap() + "{\"step\":3,\"ep").unwrap();
        MetricsFile::resume(&path, 3, false).unwrap().write(4, 1, &[("loss", 0.25)]).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let steps: Vec<_> =
            text.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()["step"].clone()).collect();
        assert_eq!(steps, [1, 2, 3, 4]);
        assert!(text.ends_with("\"loss\":0.25}\n"));
    }

    #[test]
    fn a_reopened_file_goes_on_before_a_step() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsFile::reopen(&path, 0..0, false).unwrap();
        (1..5).for_each(|step| assert!(file.write(step, 1, &[("loss", 0.5)]).unwrap()));
        // The process was killed in the midst of a line.
        file.file.write_all(b"{\"step\":5,\"ep").unwrap();
        let mut file = MetricsFile::reopen(&path, 7..7, false).unwrap();
        file.write(5, 1, &[]).unwrap();
        let mut file = MetricsFile::reopen(&path, 3..3, false).unwrap();
        file.write(3, 2, &[]).unwrap();
        let steps: Vec<String> = std::fs::read_to_string(&path).unwrap().lines().map(|line| line[..9].into()).collect();
        assert_eq!(steps, ["{\"step\":1", "{\"step\":2", "{\"step\":3"]);
    }

    /// What is still to be done after the last step is written when it is done, however often the run is cut off before.
    #[test]
    fn a_row_that_will_be_made_again_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsFile::create(&path).unwrap();
        for (step, name) in [(2, MEAN_LOSS), (3, "step/loss"), (3, MEAN_LOSS)] {
            file.write(step, 1, &[(name, 0.5)]).unwrap();
        }
        let rows = |pending: bool| {
            drop(MetricsFile::resume(&path, 3, pending).unwrap());
            std::fs::read_to_string(&path).unwrap().lines().count()
        };
        assert_eq!((rows(false), rows(true), rows(true)), (3, 2, 2));
    }

    /// The row of a step that another process made is kept while what follows the step is still to be done.
    #[test]
    fn a_reopened_file_keeps_the_row_of_a_pending_step() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsFile::create(&path).unwrap();
        for (step, name) in [(2, "step/loss"), (2, MEAN_LOSS), (3, "step/loss"), (3, MEAN_LOSS), (4, "step/loss")] {
            file.write(step, 1, &[(name, 0.5)]).unwrap();
        }
        for pending in [false, true, true] {
            let mut file = MetricsFile::reopen(&path, 3..4, pending).unwrap();
            // It may be known to whoever reopens the file, or not.
            if pending {
                assert!(!file.write(3, 1, &[("step/loss", 0.5)]).unwrap());
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let of_three = if pending { 1 } else { 2 };
            assert_eq!(text.lines().filter(|line| line.starts_with("{\"step\":3,")).count(), of_three, "{text}");
            assert_eq!(text.lines().count(), 2 + of_three, "{text}");
        }
    }

    /// Whoever is killed between two of these rows has lost none that was there.
    #[test]
    fn rows_that_a_reopened_file_has_are_not_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsFile::create(&path).unwrap();
        for step in [1, 2, 2, 3, 5] {
            file.write(step, 1, &[("loss", 0.5)]).unwrap();
        }
        let steps = || {
            let text = std::fs::read_to_string(&path).unwrap();
            text.lines().map(|line| line[8..9].to_string()).collect::<String>()
        };
        let mut file = MetricsFile::reopen(&path, 2..5, false).unwrap();
        assert_eq!(steps(), "1223");
        for (step, then) in [(2, "1223"), (2, "1223"), (3, "1223"), (3, "12233"), (4, "122334"), (5, "1223345")] {
            file.write(step, 1, &[("loss", 0.25)]).unwrap();
            assert_eq!(steps(), then);
        }
    }

    #[test]
    fn lines_are_json_in_the_order_given() {
        let values = [("loss", 0.5), ("a \"b\"", f64::NAN), ("norm", f64::INFINITY), ("lr", 1e-3)];
        let line = line(3, 1, &values).unwrap();
        assert_eq!(line, "{\"step\":3,\"epoch\":1,\"loss\":0.5,\"a \\\"b\\\"\":null,\"norm\":null,\"lr\":0.001}\n");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&line).unwrap()["loss"], 0.5);
    }
}
