//! What becomes of output that cannot be written: the command fails and says so, and nothing panics.

use crate::job::{Job, KOLO, LIMIT, kolo, report, tempdir, under};
use crate::process::{Ended, installed, run};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// A command line with this after it, such as a redirection.
fn redirected(words: &[&str], redirection: &str, dir: &Path) -> Ended {
    let words: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
    let script = format!("'{KOLO}' {} {redirection}", words.join(" "));
    run(&mut under(&["sh", "-c", &script], dir), LIMIT)
}

fn trains(flags: &[&'static str]) -> Vec<String> {
    let mut words = Job::Digits.command();
    words.extend(flags.iter().map(|flag| flag.to_string()));
    words
}

#[test]
fn lost_output_fails_the_command() {
    let dir = tempdir();
    let quick = [&["list", "models"][..], &["list", "ops"], &["graph"], &["--help"], &["train", "--help"], &["slurm"]];
    for words in quick {
        let ended = redirected(words, "> /dev/full", dir.path());
        assert_eq!(ended.code, Some(1), "{words:?}: {ended}");
        assert!(ended.only_error().starts_with("error: standard output: No space left on device"), "{ended}");
        assert!(ended.stderr.contains("\n  hint: ") && !ended.stderr.contains("panicked"), "{ended}");
    }
    let ended = redirected(&["list", "models"], ">&-", dir.path());
    assert_eq!(ended.code, Some(1), "{ended}");
    assert!(ended.only_error().starts_with("error: standard output: Bad file descriptor"), "{ended}");
    let ended = redirected(&["list", "models"], "> /dev/null", dir.path());
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended}");
}

/// A run goes on without its words, writes its report, and fails.
#[test]
fn a_run_whose_output_is_lost_fails_at_its_end() {
    for flags in [&["--threads", "1", "--report", "report.json"][..], &["-n", "4", "--report", "report.json"]] {
        for (redirection, why) in [("> /dev/full", "No space left"), (">&-", "Bad file descriptor")] {
            let dir = tempdir();
            let words = trains(flags);
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let ended = redirected(&words, redirection, dir.path());
            assert_eq!(ended.code, Some(1), "{flags:?}: {ended}");
            assert!(ended.only_error().starts_with(&format!("error: standard output: {why}")), "{flags:?}: {ended}");
            assert_eq!(report(dir.path())["weights"].as_str(), Some(Job::Digits.digest()), "{flags:?}");
        }
    }
}

#[test]
fn a_reader_that_leaves_ends_the_command_without_a_word() {
    let dir = tempdir();
    let train = trains(&["-n", "2", "--threads", "1"]);
    let train: Vec<&str> = train.iter().map(String::as_str).collect();
    for words in [&["list", "ops"][..], &train] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = kolo(dir.path()).args(words).stdout(writer).output().expect("the binary runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*error), (Some(141), ""), "{words:?}");
    }
}

/// Complaints that nobody hears change nothing.
#[test]
fn a_lost_standard_error_is_no_panic() {
    let dir = tempdir();
    for redirection in ["2> /dev/full", "2>&-"] {
        assert_eq!(redirected(&["train", "nowhere.toml"], redirection, dir.path()).code, Some(2), "{redirection}");
        assert_eq!(redirected(&["train", "--nonsense"], redirection, dir.path()).code, Some(2), "{redirection}");
        let words = trains(&["-n", "2", "--threads", "1"]);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        assert_eq!(redirected(&words, redirection, dir.path()).code, Some(0), "{redirection}");
    }
}

/// Limits of the system are told as what they are.
#[test]
fn limits_are_explained() {
    let dir = tempdir();
    let train = Job::Digits.command().join(" ");
    let script = format!("ulimit -n 16; exec '{KOLO}' {train} -n 4 --quiet");
    let ended = run(&mut under(&["bash", "-c", &script], dir.path()), LIMIT);
    assert_eq!(ended.code, Some(1), "{ended}");
    assert!(ended.only_error().contains("Too many open files"), "{ended}");
    assert!(ended.stderr.contains("hint: raise the limit on open files (`ulimit -n`)"), "{ended}");
    // Data in more files than may be open, and a checkpoint where no more may be.
    let many = dir.path().join("many");
    std::fs::create_dir(&many).expect("a directory");
    for file in 0..60 {
        std::fs::write(many.join(format!("{file}.csv")), "a,b,y\n1,2,0\n2,3,1\n").expect("a file");
    }
    let script = format!("ulimit -n 40; exec '{KOLO}' train --set 'data.source=many/*.csv' --quiet");
    let ended = run(&mut under(&["bash", "-c", &script], dir.path()), LIMIT);
    assert_eq!(ended.code, Some(2), "{ended}");
    assert!(ended.only_error().contains(".csv: cannot be opened: Too many open files"), "{ended}");
    assert!(ended.stderr.contains("hint: raise the limit on open files (`ulimit -n`)"), "{ended}");
    // Root has no limit on threads, and whoever is not root may have reached a lower one.
    // SAFETY: asks who we are.
    if unsafe { libc::geteuid() } != 0 || !installed("setpriv", "setpriv") {
        return;
    }
    let copy = dir.path().join("kolo");
    std::fs::copy(KOLO, &copy).expect("a copy of the binary");
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).expect("a directory for all");
    let job = "[model]\nkind = \"mlp\"\n[data]\nsource = \"builtin:playground\"\n[train]\nsteps = 2\n";
    std::fs::write(dir.path().join("job.toml"), job).expect("a job file");
    for (flags, what) in [("--threads 8", "starting a thread: "), ("-n 4", "starting ")] {
        let script = format!("ulimit -u 4; exec '{}' train job.toml {flags} --quiet", copy.display());
        let words = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "bash", "-c", &script];
        let ended = run(&mut under(&words, dir.path()), LIMIT);
        assert_eq!(ended.code, Some(1), "{flags}: {ended}");
        assert!(ended.stderr.contains(what) && ended.stderr.contains("Resource temporarily unavailable"), "{ended}");
        assert!(ended.stderr.contains("(`ulimit -u`)") && !ended.stderr.contains("panicked"), "{ended}");
    }
    // Loaders can be done without.
    let script = format!("ulimit -u 1; exec '{}' train job.toml --threads 1 --set data.prefetch=2", copy.display());
    let words = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "bash", "-c", &script];
    let ended = run(&mut under(&words, dir.path()), LIMIT);
    assert_eq!(ended.code, Some(0), "{ended}");
    assert!(ended.stderr.contains("note: the system refused a thread for the data"), "{ended}");
}

#[test]
fn a_file_on_a_full_disk_is_named() {
    for flag in ["--report", "--trace"] {
        for workers in ["1", "2"] {
            let dir = tempdir();
            let mut command = kolo(dir.path());
            command.args(Job::Digits.command()).args(["-n", workers, "--threads", "1", "--quiet", flag, "/dev/full"]);
            let ended = run(&mut command, LIMIT);
            assert_eq!(ended.code, Some(1), "{flag}: {ended}");
            assert!(ended.only_error().contains("/dev/full: No space left on device"), "{flag}: {ended}");
        }
    }
    // A limit on the size of files is what a test can have of a full disk.
    let limit = "trap '' XFSZ; ulimit -f 1;";
    let dir = tempdir();
    let words = Job::Digits.command().join(" ");
    let many = "--set train.steps=600 --set data.holdout=0.9 --set data.batch=16 --threads 1 --out out";
    let script = format!("{limit} '{KOLO}' {words} {many} --quiet");
    let ended = run(&mut under(&["bash", "-c", &script], dir.path()), LIMIT);
    assert_eq!(ended.code, Some(1), "{ended}");
    let named = ["out/events.out.tfevents.", "out/metrics.jsonl"].iter().any(|file| ended.stderr.contains(file));
    assert!(named && ended.stderr.contains("File too large"), "{ended}");
}

/// Rows that cannot be written any more end no training: it reaches its last step, saves it, and then says that it failed.
#[test]
fn a_disk_that_fills_up_ends_no_training() {
    let dir = tempdir();
    let job = "[model]\nkind = \"mlp\"\nhidden = [4]\n[data]\nsource = \"builtin:playground\"\nbatch = 64\ngrains = 2\n\
               [train]\nsteps = 3000\nlog_every = 1\n[checkpoint]\nevery = \"1000 steps\"\n";
    std::fs::write(dir.path().join("job.toml"), job).expect("a job file");
    run(kolo(dir.path()).args(["train", "job.toml", "--out", "whole", "--threads", "1", "--quiet"]), LIMIT).well();
    for workers in [1, 2] {
        // Shared memory is files, too.
        let (out, transport) = (format!("out{workers}"), if workers > 1 { "--transport tcp" } else { "" });
        let script = format!(
            "trap '' XFSZ; ulimit -f 200; '{KOLO}' train job.toml -n {workers} {transport} --threads 1 --quiet --out {out}"
        );
        let ended = run(&mut under(&["bash", "-c", &script], dir.path()), LIMIT);
        assert_eq!(ended.code, Some(1), "{ended}");
        let said = ["error: ", "cannot write the row of step ", " bytes: File too large"];
        assert!(said.iter().all(|words| ended.stderr.contains(words)), "{ended}");
        let read = |run: &str| -> serde_json::Value {
            let text = std::fs::read(dir.path().join(run).join("report.json")).expect("a report");
            serde_json::from_slice(&text).expect("JSON")
        };
        let (whole, report) = (read("whole"), read(&out));
        assert_eq!((&report["steps"], &report["weights"]), (&whole["steps"], &whole["weights"]), "{ended}");
        run(kolo(dir.path()).args(["ckpt", "verify", &out]), LIMIT).well();
    }
}

/// The standard library's macros panic where a write fails. Those of `output` stand in for them, where they are imported.
#[test]
fn nothing_prints_by_itself() {
    fn visit(folder: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).expect("sources").map(|entry| entry.expect("an entry").path()) {
            if entry.is_dir() {
                visit(&entry, found);
            } else if entry.extension().is_some_and(|kind| kind == "rs")
                && !entry.ends_with("cli/src/output.rs")
                && !entry.ends_with("tests.rs")
            {
                let text = std::fs::read_to_string(&entry).expect("a source");
                let code = text.split("#[cfg(test)]").next().unwrap_or_default();
                let own = |name: &str| {
                    let used = code.lines().find(|line| line.starts_with("use crate::output::")).unwrap_or_default();
                    used.split(|letter: char| !letter.is_alphanumeric()).any(|word| word == name)
                };
                for name in ["print", "println", "eprint", "eprintln", "dbg"] {
                    let calls = |line: &&str| {
                        let at = line.find(&format!("{name}!("));
                        let before = at.and_then(|at| line[..at].chars().last());
                        let whole = !before.is_some_and(|letter| letter.is_alphanumeric() || letter == '_');
                        at.is_some() && whole && !line.trim_start().starts_with("//")
                    };
                    let lines = code.lines().filter(calls).filter(|_| !own(name));
                    found.extend(lines.map(|line| format!("{}: {}", entry.display(), line.trim())));
                }
            }
        }
    }
    let mut found = Vec::new();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for entry in std::fs::read_dir(crates).expect("crates") {
        visit(&entry.expect("a crate").path().join("src"), &mut found);
    }
    assert!(found.is_empty(), "print through `output`:\n{}", found.join("\n"));
}
