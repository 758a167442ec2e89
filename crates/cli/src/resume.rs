//! The command that goes on with a run which was interrupted.

use crate::args::Train;
use kolo_cluster::hosts::quoted;
use std::ffi::OsString;
use std::path::Path;

/// This very command with `--resume` and the run's directory, as a shell takes it.
pub fn command(words: impl Iterator<Item = OsString>, args: &Train, out: &Path) -> String {
    let mut kept: Vec<String> = Vec::new();
    let mut words = words.map(|word| word.to_string_lossy().into_owned());
    // Behind a `--` all words are files.
    let mut are_flags = true;
    while let Some(word) = words.next() {
        are_flags &= word != "--";
        match word.as_str() {
            "--overwrite" if are_flags => {}
            // Flags by which a launcher tells its workers something.
            "--fresh-out" | "--out-mark" if are_flags => drop(words.next()),
            _ => kept.push(quoted(&word)),
        }
    }
    let mut added = Vec::new();
    if args.out.is_none() {
        added.extend(["--out".into(), quoted(&out.to_string_lossy())]);
    }
    if !args.resume {
        added.push("--resume".into());
    }
    let at = kept.iter().position(|word| word == "--").unwrap_or(kept.len());
    kept.splice(at..at, added);
    kept.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Args, Command};

    fn resumed(line: &[&str]) -> String {
        let words = || line.iter().map(|word| OsString::from(*word));
        let Command::Train(args) = Args::read(words()).unwrap().command else { panic!("not `train`") };
        command(words(), &args, Path::new("runs/a b-1"))
    }

    #[test]
    fn the_command_goes_on_where_the_run_is() {
        assert_eq!(resumed(&["kolo", "train"]), "kolo train --out 'runs/a b-1' --resume");
        assert_eq!(
            resumed(&[
                "target/kolo",
                "train",
                "--out-mark",
                "1f5e",
                "--fresh-out",
                "runs/a b-1",
                "-n",
                "2",
                "job.toml",
                "--set",
                "a.b='c'"
            ]),
            r"target/kolo train -n 2 job.toml --set 'a.b='\''c'\''' --out 'runs/a b-1' --resume"
        );
        assert_eq!(
            resumed(&["kolo", "train", "--out", "x", "--overwrite", "--", "--odd"]),
            "kolo train --out x --resume -- --odd"
        );
        assert_eq!(resumed(&["kolo", "train", "--out", "x", "--resume"]), "kolo train --out x --resume");
    }
}
