//! The jobs that all layouts must agree on, and one process's answer to each.

use crate::process::{Ended, run};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;
use tempfile::TempDir;

pub const KOLO: &str = env!("CARGO_BIN_EXE_kolo");
/// Far more than any command here takes, also on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(300);
/// A job whose loss is not a number at the fourth step.
pub const NOT_FINITE: &str = "[model]\nkind = \"mlp\"\nhidden = [64, 64, 64]\n[data]\nsource = \"builtin:playground\"\n\
                              [train]\nepochs = 2\noptimizer = { kind = \"sgd\", lr = 1000 }\n";

/// Examples, cut to a few steps; all have eight grains, so that up to eight workers share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    Digits,
    Addition,
    Resnet,
}

impl Job {
    pub const ALL: [Job; 3] = [Job::Digits, Job::Addition, Job::Resnet];

    fn example(self) -> (&'static str, &'static str) {
        match self {
            Job::Digits => ("digits", "train.steps=4"),
            Job::Addition => ("addition", "data.grains=8 train.steps=3"),
            Job::Resnet => (
                "cifar-like",
                "model.width=16 model.image=[3,8,8] data.samples=40 data.batch=8 data.grains=8 train.steps=2",
            ),
        }
    }

    /// `train FILE --set …`, with a report in `report.json` and no output.
    pub fn quiet(self) -> Vec<String> {
        let mut words = self.command();
        words.extend(["--quiet", "--report", "report.json"].map(String::from));
        words
    }

    pub fn command(self) -> Vec<String> {
        let (name, settings) = self.example();
        let file = format!("{}/../../examples/{name}.toml", env!("CARGO_MANIFEST_DIR"));
        let file = std::fs::canonicalize(file).expect("an example").to_string_lossy().into_owned();
        let settings = settings.split(' ').flat_map(|setting| ["--set".to_string(), setting.to_string()]);
        ["train".to_string(), file].into_iter().chain(settings).collect()
    }

    /// The weights after one process with one thread.
    pub fn digest(self) -> &'static str {
        static DIGESTS: [OnceLock<String>; 3] = [const { OnceLock::new() }; 3];
        DIGESTS[self as usize].get_or_init(|| {
            let dir = tempdir();
            let report = self.reported(kolo(dir.path()).args(self.quiet()).args(["--threads", "1"]), dir.path());
            weights(&report).to_string()
        })
    }

    /// Runs a command that trains this job quietly in this directory; its report.
    pub fn reported(self, command: &mut Command, dir: &Path) -> Value {
        let ended = run(command, LIMIT).well();
        assert_eq!(ended.stdout, "", "--quiet prints nothing: {command:?}: {ended}");
        report(dir)
    }

    /// Runs a command that trains this job quietly in this directory; it must come to the weights of one process.
    pub fn agrees(self, command: &mut Command, dir: &Path) -> Value {
        let report = self.reported(command, dir);
        assert_eq!(weights(&report), self.digest(), "{self:?}: {command:?}");
        report
    }
}

pub fn weights(report: &Value) -> &str {
    report["weights"].as_str().expect("a digest")
}

/// The transport that the workers of a run used.
pub fn transport(report: &Value) -> &str {
    report["communication"]["transport"].as_str().unwrap_or_default()
}

/// The report in this directory, which it no longer has.
pub fn report(dir: &Path) -> Value {
    let path = dir.join("report.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    std::fs::remove_file(&path).expect("a report");
    serde_json::from_str(&text).expect("JSON")
}

pub fn tempdir() -> TempDir {
    tempfile::tempdir().expect("a directory")
}

/// The binary, at home in this directory.
pub fn kolo(dir: &Path) -> Command {
    under(&[KOLO], dir)
}

/// A command line, such as a launcher's with the binary at its end, at home in this directory.
pub fn under(words: &[&str], dir: &Path) -> Command {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).current_dir(dir).env("HOME", dir);
    command
}

/// Trains a job that cannot end well.
pub fn fails(command: &mut Command, dir: &Path, flags: &[&str]) -> Ended {
    std::fs::write(dir.join("job.toml"), NOT_FINITE).expect("a job file");
    run(command.args(["train", "job.toml", "--threads", "1"]).args(flags), LIMIT)
}
