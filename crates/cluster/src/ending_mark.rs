//! Who says why a job ends, where ranks have no launcher of ours and only a file system in common.
//!
//! Whoever speaks first leaves a mark beside the file by which the ranks meet, and nobody speaks after that. So a rank 0 that
//! was suspended, and wakes when all others have given it up, accuses nobody. The mark holds what was said. It stays, as
//! nobody knows who will still wake; jobs of later days sweep it away.
//!
//! An elastic job that has begun goes on without a rank that gives it up: from then on, no mark counts.

use crate::coordinator::Notice;
use crate::join::{NoticeObserver, make_directory, read_private};
use crate::startup_watch;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

const EXTENSION: &str = "told";
/// Marks older than this are nobody's any more.
const SWEPT_AFTER: Duration = Duration::from_secs(24 * 3600);
/// How far a file's time may lie before the time at which it was made: file systems take it from a clock that ticks every few
/// milliseconds, and the age of a process is counted in such ticks too.
const CLOCK_TICKS: Duration = Duration::from_millis(50);

/// The mark of a job, as one of its ranks sees it.
#[derive(Clone, Debug)]
pub(crate) struct EndingMark {
    path: PathBuf,
    /// When this process began. Nobody gives up a job before its ranks have started.
    began: SystemTime,
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    This,
    Another,
    /// The mark cannot be written.
    Unknown,
}

impl EndingMark {
    /// Of the job whose ranks meet through this file.
    pub fn new(meeting: &Path) -> Self {
        let age = Duration::from_millis(startup_watch::age_ms().unwrap_or_default());
        let now = SystemTime::now();
        // Appended: names of jobs have dots of their own.
        let name = format!("{}.{EXTENSION}", meeting.file_name().unwrap_or_default().to_string_lossy());
        let mark = Self { path: meeting.with_file_name(name), began: now.checked_sub(age).unwrap_or(now) };
        // A mark of an earlier job with the same name goes now, long before a rank of this one can leave another.
        let _ = mark.said();
        mark
    }

    /// What a rank of this job has said.
    pub fn said(&self) -> Option<String> {
        let made = std::fs::symlink_metadata(&self.path).and_then(|meta| meta.modified()).ok()?;
        if made + CLOCK_TICKS < self.began {
            let _ = std::fs::remove_file(&self.path);
            return None;
        }
        read_private(&self.path).ok()?.map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Claims the word for whoever comes first.
    pub fn claim(&self, text: &str) -> Claim {
        // Rank 0 would have made it.
        let _ = self.path.parent().map(make_directory);
        match std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.path) {
            Ok(mut file) => {
                let _ = file.write_all(text.as_bytes());
                Claim::This
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Claim::Another,
            Err(_) => Claim::Unknown,
        }
    }

    /// The same observer; the end of the job is new to it only if nobody has spoken of it.
    pub fn observing(self, inner: NoticeObserver) -> NoticeObserver {
        let goes_on = AtomicBool::new(false);
        Arc::new(move |notice| match notice {
            Notice::Ending { text, shown: false } if !goes_on.load(Ordering::Relaxed) => {
                let shown = self.claim(text) == Claim::Another;
                inner(&Notice::Ending { text: text.clone(), shown });
            }
            notice => {
                goes_on.fetch_or(matches!(notice, Notice::Resumed(_)), Ordering::Relaxed);
                inner(notice);
            }
        })
    }

    /// Removes marks that jobs of long ago have left in this directory.
    pub fn sweep(directory: &Path) {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            let made = entry.metadata().and_then(|meta| meta.modified());
            let old = made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > SWEPT_AFTER));
            if old && path.extension().is_some_and(|extension| extension == EXTENSION) {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// Says that rank 0 is lost, for all ranks that find out.
#[derive(Clone)]
pub(crate) struct LossReporter {
    pub observer: NoticeObserver,
    pub mark: Option<EndingMark>,
    /// Whether this rank speaks where no mark decides.
    pub speaks: bool,
}

impl LossReporter {
    /// Says it, unless another rank does; whether this one did.
    pub fn report(&self, text: &str) -> bool {
        let speaks = match self.mark.as_ref().map(|mark| mark.claim(text)) {
            Some(Claim::This) => true,
            Some(Claim::Another) => false,
            Some(Claim::Unknown) | None => self.speaks,
        };
        if speaks {
            (self.observer)(&Notice::Ending { text: text.into(), shown: false });
        }
        speaks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn the_first_of_a_job_speaks_and_nobody_after_it() {
        let home = tempfile::tempdir().unwrap();
        let meeting = home.path().join("run").join("slurm-7.0.");
        let mark = EndingMark::new(&meeting);
        assert_eq!(mark.said(), None);
        assert_eq!([mark.claim("rank 0 was lost"), mark.claim("rank 1 was lost")], [Claim::This, Claim::Another]);
        assert_eq!(EndingMark::new(&meeting).said().as_deref(), Some("rank 0 was lost"));
        let heard = Arc::new(Mutex::new(Vec::new()));
        let ours = Arc::clone(&heard);
        let observer: NoticeObserver = Arc::new(move |notice| ours.lock().unwrap().push(notice.clone()));
        mark.clone().observing(Arc::clone(&observer))(&Notice::Ending { text: "late".into(), shown: false });
        let reporter = LossReporter { observer, mark: Some(mark.clone()), speaks: true };
        assert!(!reporter.report("later"));
        assert_eq!(*heard.lock().unwrap(), [Notice::Ending { text: "late".into(), shown: true }]);
        std::fs::remove_file(&mark.path).unwrap();
        assert!(reporter.report("first again"));
    }

    #[test]
    fn a_mark_of_an_earlier_job_counts_for_nothing() {
        let home = tempfile::tempdir().unwrap();
        let mark = EndingMark::new(&home.path().join("torch-1"));
        assert_eq!(mark.claim("an earlier job"), Claim::This);
        let later = EndingMark { began: SystemTime::now() + Duration::from_secs(1), ..mark.clone() };
        assert_eq!((later.said(), later.claim("this one")), (None, Claim::This));
        EndingMark::sweep(home.path());
        assert_eq!(mark.said().as_deref(), Some("this one"), "it is young");
        let long_ago = std::fs::FileTimes::new().set_modified(SystemTime::now() - 2 * SWEPT_AFTER);
        std::fs::File::options().write(true).open(&mark.path).unwrap().set_times(long_ago).unwrap();
        EndingMark::sweep(home.path());
        assert!(!mark.path.exists());
    }
}
