//! The directory of a run: one run each, so that nothing of an earlier one is overwritten or mixed in.
//!
//! Without `--out` a run gets a directory of its own, `runs/NAME-NUMBER`. Making it is what claims the number, so two runs that
//! start at once get two.

use crate::fail::Failure;
use crate::output::print_error;
use kolo_base::ShownPath;
use kolo_ckpt::StepName;
use kolo_cluster::host_name;
use kolo_train::checkpoint::{CHECKPOINTS, JOB_FILE};
use kolo_train::record::OutDir;
use kolo_train::run_dir::{LOCK, LockText, RunDir};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where runs go that name no directory.
const RUNS: &str = "runs";
const NAME_CHARACTERS_MAX: usize = 64;
/// Numbers that others take while we look, at most.
const ATTEMPTS_MAX: u64 = 1000;
/// RunFiles of an old run that a message names.
const NAMED_FILES_MAX: usize = 3;

/// Whether a run has left a checkpoint.
pub fn has_checkpoints(out: &OutDir) -> bool {
    let is_step = |entry: fs::DirEntry| entry.file_name().to_str().and_then(StepName::parse).is_some();
    fs::read_dir(out.path.join(CHECKPOINTS)).is_ok_and(|entries| entries.flatten().any(is_step))
}

/// Whose files a directory may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunFiles {
    /// All that a run writes.
    All,
    /// All but the logs of ranks: the supervisor, which writes those, has been here already.
    OfRankZero,
}

/// Whether a run writes files of this name.
fn is_ours(name: &str, files: RunFiles) -> bool {
    let within = |prefix: &str, suffix: &str| {
        let middle = name.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(suffix));
        middle.is_some_and(|middle| !middle.is_empty() && middle.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let log = files == RunFiles::All && within("rank-", ".log");
    matches!(name, "metrics.jsonl" | "report.json" | "decision.png" | CHECKPOINTS | JOB_FILE)
        || within("events.out.tfevents.", ".kolo")
        || log
}

/// The files of an earlier run.
fn old_files(dir: &Path, files: RunFiles) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if is_ours(&name.to_string_lossy(), files) && !is_left_over(&entry.path()) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// Whether a start that failed left this, such as on a full disk: it belongs to no run.
fn is_left_over(path: &Path) -> bool {
    let begins = [CHECKPOINTS, JOB_FILE, "metrics.jsonl"];
    let is_first = path.file_name().is_some_and(|name| begins.iter().any(|first| name == *first));
    let Some(meta) = fs::symlink_metadata(path).ok().filter(|_| is_first) else { return false };
    match meta.is_dir() {
        true => fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none()),
        false => meta.is_file() && meta.len() == 0,
    }
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    Failure::job(format!("{}: {error}", path.shown()), "choose another --out directory or free some space there")
}

fn is_log(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "log")
}

/// Removes the logs of ranks: a run that is resumed may have fewer of them.
pub fn clear_logs(dir: &Path, files: RunFiles) -> Result<(), Failure> {
    let old = old_files(dir, files).map_err(|error| failed(dir, &error))?;
    let is_file = |path: &&PathBuf| fs::symlink_metadata(path).is_ok_and(|meta| meta.is_file());
    let mut logs = old.iter().filter(|path| is_log(path)).filter(is_file);
    logs.try_for_each(|path| fs::remove_file(path).map_err(|error| failed(path, &error)))
}

/// Makes sure that a directory holds no other run. With `overwrite`, removes that run's logs, and has the rest of what it wrote,
/// and nothing else, which goes when the new run has begun.
pub fn claim(dir: &Path, overwrite: bool, files: RunFiles) -> Result<Vec<PathBuf>, Failure> {
    let old = old_files(dir, files).map_err(|error| failed(dir, &error))?;
    if old.is_empty() {
        return Ok(Vec::new());
    }
    if overwrite {
        let is_ours = |path: &PathBuf| {
            let wants_dir = path.file_name().is_some_and(|name| name == CHECKPOINTS);
            fs::symlink_metadata(path).is_ok_and(|meta| if wants_dir { meta.is_dir() } else { meta.is_file() })
        };
        if let Some(path) = old.iter().find(|path| !is_ours(path)) {
            let message = format!("--overwrite: {} is not a file that a run writes", path.shown());
            return Err(Failure::usage(message, "name another directory for --out"));
        }
        let (logs, rest): (Vec<PathBuf>, Vec<PathBuf>) = old.into_iter().partition(|path| is_log(path));
        logs.iter().try_for_each(|path| fs::remove_file(path).map_err(|error| failed(path, &error)))?;
        return Ok(rest);
    }
    let names = old.iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    let mut shown = names.take(NAMED_FILES_MAX).collect::<Vec<_>>().join(", ");
    if old.len() > NAMED_FILES_MAX {
        shown += ", …";
    }
    Err(Failure::usage(
        format!("{} contains the files of another run: {shown}", dir.shown()),
        "name another directory, or add --overwrite to replace that run's files",
    ))
}

/// Removes a file or directory that [`claim`] found.
pub fn remove(path: &Path) -> Result<(), Failure> {
    let is_dir = fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir());
    let removed = if is_dir { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed.map_err(|error| failed(path, &error))
}

/// A directory in which a run writes: no other run does meanwhile.
#[derive(Debug)]
pub struct RunLock {
    path: PathBuf,
    /// The directory was made for it.
    is_new: bool,
    file: fs::File,
    dir: RunDir,
    text: LockText,
}

/// A network file system takes so long to find out that a host is gone, and its locks with it.
const HOST_GONE_S_MAX: u64 = 120;

impl RunLock {
    /// What its file says of this run alone.
    pub fn mark(&self) -> Option<String> {
        self.text.mark.clone()
    }

    /// Whether the directory is still that of this run.
    pub fn check(&self) -> Result<(), Failure> {
        self.dir.check().map_err(|lost| kolo_train::Error::from(lost).into())
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // Another run may have begun in another directory of this name.
        if !is_same_file(&self.file, &self.path) {
            return;
        }
        let _ = fs::remove_file(&self.path);
        if let Some(dir) = self.path.parent().filter(|_| self.is_new) {
            // Fails if the run left something.
            let _ = fs::remove_dir(dir);
        }
    }
}

/// Locks a directory, which is made if it is not there. `None` where that is not possible: the run finds out why by itself.
pub fn lock(dir: &Path) -> Result<Option<RunLock>, Failure> {
    lock_within(dir, Duration::from_secs(HOST_GONE_S_MAX))
}

/// The same; waits so long for a holder on another host, which may be gone.
fn lock_within(dir: &Path, patience: Duration) -> Result<Option<RunLock>, Failure> {
    let (path, is_new, begun) = (dir.join(LOCK), !dir.exists(), Instant::now());
    let mut is_told = false;
    // Once more if the one before removes its file right now.
    for _ in 0..ATTEMPTS_MAX {
        let opened = fs::create_dir_all(dir)
            .and_then(|()| fs::File::options().read(true).write(true).create(true).truncate(false).open(&path));
        let file = match opened {
            // The one before removes the directory, too, if it left nothing there.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(_) => return Ok(None),
            Ok(file) => file,
        };
        match file.try_lock() {
            Err(fs::TryLockError::WouldBlock) => {
                let holder = LockText::of(dir).unwrap_or_default().holder;
                if !is_elsewhere(&holder) || begun.elapsed() >= patience {
                    return Err(in_use(dir, &holder));
                }
                if !is_told {
                    let dir = dir.shown();
                    print_error(&format!("note: {dir} is in use by another run, {holder}; waiting in case it is gone"));
                }
                is_told = true;
                std::thread::sleep(Duration::from_secs(1).min(patience));
                continue;
            }
            Err(fs::TryLockError::Error(_)) => {
                if file.metadata().is_ok_and(|meta| meta.len() == 0) {
                    let _ = fs::remove_file(&path);
                }
                return Ok(None);
            }
            Ok(()) => {}
        }
        if is_same_file(&file, &path) {
            let _ = file.set_len(0);
            let mut text = LockText::fresh(format!("process {} on {}", std::process::id(), host_name()));
            if fs::write(&path, text.written()).is_err() {
                // On a full disk nobody can tell by it whose the directory is.
                text.mark = None;
            }
            let Ok(dir) = RunDir::open(dir, text.mark.clone()) else { return Ok(None) };
            return Ok(Some(RunLock { path, is_new, file, dir, text }));
        }
    }
    Ok(None)
}

fn is_same_file(file: &fs::File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let same = |a: fs::Metadata, b: fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    file.metadata().ok().zip(fs::metadata(path).ok()).is_some_and(|(open, named)| same(open, named))
}

/// Whether this holder of a lock is on another host.
fn is_elsewhere(holder: &str) -> bool {
    !holder.is_empty() && !holder.ends_with(&format!(" on {}", host_name()))
}

/// Somebody holds the lock.
fn in_use(dir: &Path, holder: &str) -> Failure {
    let (place, is_elsewhere) = (dir.shown(), is_elsewhere(holder));
    let who = if holder.is_empty() { String::new() } else { format!(", {holder}") };
    let gone = if is_elsewhere { format!("; if that process is gone, remove {place}/{LOCK}") } else { String::new() };
    let hint = format!("wait until it ends, stop it, or name another directory{gone}");
    Failure::usage(format!("{place} is in use by another run{who}"), &hint)
}

/// A job's name as a part of a path: no separators, no control characters, and not hidden.
fn safe_name(name: &str) -> String {
    let safe = |c: char| if c.is_alphanumeric() || matches!(c, '-' | '_' | '.') { c } else { '-' };
    let name: String = name.chars().map(safe).take(NAME_CHARACTERS_MAX).collect();
    match name.trim_matches(['.', '-']) {
        "" => "job".into(),
        name => name.into(),
    }
}

/// Makes the directory of the next run of this name under `root`.
fn make_fresh(root: &Path, name: &str) -> io::Result<PathBuf> {
    let (root, name) = (root.join(RUNS), safe_name(name));
    fs::create_dir_all(&root)?;
    let mut last = 0;
    for entry in fs::read_dir(&root)? {
        let file_name = entry?.file_name();
        let number = file_name.to_str().and_then(|text| text.strip_prefix(&name)?.strip_prefix('-')?.parse().ok());
        last = last.max(number.unwrap_or(0u64));
    }
    for attempt in 1..=ATTEMPTS_MAX {
        let dir = root.join(format!("{name}-{}", last.saturating_add(attempt)));
        match fs::create_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            outcome => return outcome.map(|()| dir),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// The directory of the last run of this name that saved anything.
pub fn last(name: &str) -> Option<OutDir> {
    last_with(name, |path| path.join(CHECKPOINTS).is_dir())
}

/// The directory of the last run of this name of which this is true.
pub fn last_with(name: &str, is_wanted: impl Fn(&Path) -> bool) -> Option<OutDir> {
    let prefix = safe_name(name);
    let number = |path: &Path| -> Option<u64> {
        path.file_name()?.to_str()?.strip_prefix(&prefix)?.strip_prefix('-')?.parse().ok()
    };
    let runs = fs::read_dir(RUNS).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let wanted = runs.filter(|path| is_wanted(path));
    let last = wanted.filter_map(|path| Some((number(&path)?, path))).max()?;
    Some(OutDir::new(last.1, false))
}

/// A directory for a run that names none. A place that cannot be written is told, and no reason not to train.
pub fn fresh(name: &str, quiet: bool) -> Option<OutDir> {
    match make_fresh(Path::new(""), name) {
        Ok(path) => Some(OutDir::new(path, false)),
        Err(error) => {
            if !quiet {
                print_error(&format!(
                    "note: cannot create a directory under {RUNS}: {error}; this run's metrics are not saved"
                ));
            }
            None
        }
    }
}

/// After a run that wrote nothing.
pub fn remove_if_empty(out: Option<&OutDir>) {
    if let Some(OutDir { path, required: false, .. }) = out {
        // Fails if there is something in it, which is what is wanted.
        let _ = fs::remove_dir(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_used_directory_is_refused_or_cleared_of_our_files_alone() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path();
        claim(&dir.join("new"), false, RunFiles::All).unwrap();
        let ours = ["metrics.jsonl", "events.out.tfevents.0000000007.kolo", "rank-0.log", "rank-12.log", "report.json"];
        let theirs = ["notes.txt", "rank-a.log", "events.out.tfevents.7.host", "rank-.log"];
        for name in theirs {
            fs::write(dir.join(name), "").unwrap();
        }
        claim(dir, false, RunFiles::All).unwrap();
        // What a start leaves that found no space.
        fs::create_dir(dir.join(CHECKPOINTS)).unwrap();
        [JOB_FILE, "metrics.jsonl"].iter().for_each(|name| fs::write(dir.join(name), "").unwrap());
        claim(dir, false, RunFiles::All).unwrap();
        fs::remove_dir(dir.join(CHECKPOINTS)).unwrap();
        for name in ours {
            fs::write(dir.join(name), "a line\n").unwrap();
        }
        let refused = claim(dir, false, RunFiles::All).unwrap_err();
        assert!(refused.message().contains("metrics.jsonl") && refused.message().contains("--overwrite"));
        fs::write(dir.join(JOB_FILE), "of the old run").unwrap();
        let stale = claim(dir, true, RunFiles::OfRankZero).unwrap();
        let stale: Vec<_> = stale.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(stale, ["events.out.tfevents.0000000007.kolo", JOB_FILE, "metrics.jsonl", "report.json"]);
        assert!(
            names(dir).contains(&"rank-12.log".into()) && names(dir).contains(&"metrics.jsonl".into()),
            "nothing began"
        );
        let stale = claim(dir, true, RunFiles::All).unwrap();
        let out = OutDir::new(dir.into(), true).replacing(stale);
        kolo_train::record::Record::create(Some(&out), "of the new one", None, &mut |_| {}).unwrap();
        assert_eq!(fs::read_to_string(dir.join(JOB_FILE)).unwrap(), "of the new one");
        let mut left: Vec<String> = theirs.map(String::from).into();
        left.extend([JOB_FILE.into(), "metrics.jsonl".into()]);
        left.sort();
        let event = |name: &String| name.ends_with(".kolo");
        assert_eq!(names(dir).into_iter().filter(|name| !event(name)).collect::<Vec<_>>(), left);
        assert!(!names(dir).contains(&"events.out.tfevents.0000000007.kolo".into()));
        fs::create_dir(dir.join("report.json")).unwrap();
        assert!(claim(dir, true, RunFiles::All).unwrap_err().message().contains("is not a file that a run writes"));
        assert!(names(dir).contains(&"metrics.jsonl".into()));
    }

    #[test]
    fn a_directory_has_one_run_at_a_time() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("runs/a");
        let held = lock(&dir).unwrap();
        assert!(held.is_some() && dir.join(LOCK).exists());
        let refused = lock(&dir).unwrap_err();
        let who = format!("is in use by another run, process {} on {}", std::process::id(), host_name());
        assert!(refused.message().contains(&who), "{}", refused.message());
        // Whoever holds it on another host may be gone, and is not driven out.
        fs::write(dir.join(LOCK), "process 1 on nowhere").unwrap();
        let refused = lock_within(&dir, Duration::ZERO).unwrap_err();
        assert!(refused.message().contains("is in use by another run, process 1 on nowhere"), "{}", refused.message());
        assert!(refused.message().contains("if that process is gone, remove "), "{}", refused.message());
        drop(held);
        assert!(!dir.exists(), "it was made for a run that left nothing");
        fs::create_dir_all(&dir).unwrap();
        // One that was killed left its file.
        fs::write(dir.join(LOCK), "process 1 on nowhere").unwrap();
        assert!(lock(&dir).unwrap().is_some());
        // Many at once: one at a time has it.
        let (inside, passed) = (std::sync::atomic::AtomicUsize::new(0), std::sync::atomic::AtomicUsize::new(0));
        let enter = || {
            for _ in 0..200 {
                if let Ok(Some(held)) = lock(&dir) {
                    assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                    passed.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    drop(held);
                }
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(enter))));
        assert!(passed.into_inner() > 0);
        // Where no lock can be had, the run itself says what is wrong.
        fs::write(temp.path().join("file"), "").unwrap();
        assert!(lock(&temp.path().join("file")).unwrap().is_none());
    }

    /// As when a user removes the directory of a run that goes on, and begins another one there.
    #[test]
    fn a_run_leaves_the_lock_of_another_alone() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("run");
        let first = lock(&dir).unwrap().unwrap();
        assert!(first.check().is_ok());
        fs::remove_dir_all(&dir).unwrap();
        assert!(
            first.check().unwrap_err().message().contains("it was removed or renamed while this run wrote into it")
        );
        let second = lock(&dir).unwrap().unwrap();
        let refused = first.check().unwrap_err();
        let who = format!("it is in use by another run, process {} on {}", std::process::id(), host_name());
        assert!(refused.message().contains(&who), "{}", refused.message());
        drop(first);
        assert!(second.check().is_ok() && LockText::of(&dir).unwrap().mark == second.mark());
        assert!(lock(&dir).unwrap_err().message().contains("is in use by another run"));
        drop(second);
        assert!(!dir.exists());
    }

    #[test]
    fn runs_are_numbered_and_never_shared() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path();
        assert_eq!(make_fresh(root, "digits").unwrap(), root.join("runs/digits-1"));
        fs::create_dir(root.join("runs/digits-7")).unwrap();
        fs::create_dir(root.join("runs/digits-large-9")).unwrap();
        assert_eq!(make_fresh(root, "digits").unwrap(), root.join("runs/digits-8"));
        let made: Vec<PathBuf> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| make_fresh(root, "at-once").unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let distinct: std::collections::BTreeSet<&PathBuf> = made.iter().collect();
        assert_eq!(distinct.len(), 8, "{made:?}");
    }

    #[test]
    fn a_name_cannot_leave_the_directory() {
        let pairs = [
            ("digits", "digits"),
            ("../../etc/passwd", "etc-passwd"),
            ("a/b\\c", "a-b-c"),
            ("..", "job"),
            (".hidden", "hidden"),
            ("", "job"),
            ("two words\n\u{1b}[31m", "two-words---31m"),
            ("größe", "größe"),
        ];
        for (name, expected) in pairs {
            assert_eq!(safe_name(name), expected);
        }
        assert_eq!(safe_name(&"x".repeat(1000)).len(), NAME_CHARACTERS_MAX);
    }

    #[test]
    fn an_empty_directory_does_not_stay() {
        let temp = tempfile::tempdir().unwrap();
        let out = OutDir::new(make_fresh(temp.path(), "a").unwrap(), false);
        fs::write(out.path.join("x"), "").unwrap();
        remove_if_empty(Some(&out));
        assert!(out.path.exists());
        fs::remove_file(out.path.join("x")).unwrap();
        remove_if_empty(Some(&out));
        assert!(!out.path.exists());
    }
}
