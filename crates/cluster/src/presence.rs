//! Who has come, before anything connects the ranks.
//!
//! The start of an MPI library waits for all ranks, without a word and without an end, and the job's key travels through that
//! library. So until the ranks have met, each leaves a file with its host, its process and a count that grows, in a
//! directory named after the launcher's job, and a thread beside the start looks at the others'. A rank that is stopped, that
//! ended or never came is named, once, and this process ends. The files hold no secret, and nothing is trusted that stands in
//! them: at worst a rank is named wrongly in a job that does not start anyway.
//!
//! [`Roll`] decides, and is pure; [`Presence`] reads and writes the files.

use crate::launcher::{Launcher, Lookup, Place};
use crate::rendezvous::{JOIN_HEARTBEATS, name_ranks};
use kolo_comm::Fault;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Heartbeats in which the count of a rank must grow, of one on another host too: network file systems look late.
const SILENT_HEARTBEATS: u64 = 3;
const SILENT_ELSEWHERE_HEARTBEATS: u64 = 15;
/// Heartbeats that the start may take as long as all ranks are seen to live, in units of those they have to come.
const SLOW_START: u64 = 5;
/// Heartbeats between two looks of a rank that looks seldom.
const LOOK_HEARTBEATS: u64 = 4;
/// Longest file of a rank.
const FILE_BYTES_MAX: u64 = 512;
/// The mark of the rank that says what is wrong.
const MARK: &str = "told";

/// What a look at a rank's file shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sight {
    pub rank: usize,
    pub host: String,
    pub count: u64,
    /// What the operating system says of a process of this host.
    pub process: Process,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Process {
    Runs,
    Stopped,
    Ended,
    /// It is on another host.
    Unknown,
}

/// What is known of a rank.
#[derive(Clone, Debug)]
struct Row {
    sight: Sight,
    /// When its count last grew.
    grew_ms: u64,
    /// It was seen to live, so that its file is not left over from an earlier job.
    lives: bool,
}

/// Decides from looks at the files whether the start can still succeed.
#[derive(Debug)]
pub(crate) struct Roll {
    host: String,
    world: usize,
    local_world: usize,
    heartbeat_ms: u64,
    rows: BTreeMap<usize, Row>,
    deadline_ms: u64,
    last_ms: u64,
}

impl Roll {
    pub fn new(host: &str, world: usize, local_world: usize, heartbeat_ms: u64, now_ms: u64) -> Self {
        let (host, rows) = (host.to_string(), BTreeMap::new());
        let deadline_ms = now_ms + heartbeat_ms * JOIN_HEARTBEATS;
        Self { host, world, local_world, heartbeat_ms, rows, deadline_ms, last_ms: now_ms }
    }

    /// Time in which this process was suspended counts for nobody.
    fn forgive(&mut self, now_ms: u64) {
        let absent_ms = now_ms.saturating_sub(self.last_ms);
        self.last_ms = now_ms;
        if absent_ms > 2 * self.heartbeat_ms {
            self.deadline_ms += absent_ms;
            self.rows.values_mut().for_each(|row| row.grew_ms = now_ms);
        }
    }

    fn late(&self, now_ms: u64) -> bool {
        now_ms >= self.deadline_ms
    }

    /// Whether this rank must look at the others. There may be many on one file system: two of them look all the time, the
    /// others only towards the deadline, and seldom.
    fn looks(&self, rank: usize, now_ms: u64, turn: u64) -> bool {
        let soon = now_ms + 2 * LOOK_HEARTBEATS * self.heartbeat_ms >= self.deadline_ms;
        rank <= 1 || (soon && turn.is_multiple_of(LOOK_HEARTBEATS))
    }

    /// What is wrong, if anything is.
    pub fn look(&mut self, now_ms: u64, sights: Vec<Sight>) -> Option<Fault> {
        self.forgive(now_ms);
        for sight in sights.into_iter().filter(|sight| sight.rank < self.world) {
            let seen = matches!(sight.process, Process::Runs | Process::Stopped);
            let row = match self.rows.get(&sight.rank) {
                None => Row { grew_ms: now_ms, lives: seen, sight },
                Some(row) if row.sight.count != sight.count => Row { grew_ms: now_ms, lives: true, sight },
                Some(row) => Row { grew_ms: row.grew_ms, lives: row.lives || seen, sight },
            };
            self.rows.insert(row.sight.rank, row);
        }
        self.silent(now_ms).or_else(|| self.late(now_ms).then(|| self.missing(now_ms)).flatten())
    }

    /// A rank that came and went silent.
    fn silent(&self, now_ms: u64) -> Option<Fault> {
        let limit_ms = |sight: &Sight| match sight.process {
            Process::Unknown => SILENT_ELSEWHERE_HEARTBEATS * self.heartbeat_ms,
            _ => SILENT_HEARTBEATS * self.heartbeat_ms,
        };
        let silent = |row: &&Row| row.lives && now_ms >= row.grew_ms + limit_ms(&row.sight);
        let Row { sight, .. } = self.rows.values().find(silent)?;
        let limit_ms = limit_ms(sight);
        let why = match sight.process {
            Process::Stopped => format!("its process was stopped for {limit_ms} ms"),
            Process::Ended => "its process has ended".into(),
            Process::Runs | Process::Unknown => format!("no sign of life for {limit_ms} ms"),
        };
        Some(Fault::Lost { peer: sight.rank, host: sight.host.clone(), during: "its start".into(), why })
    }

    /// Somebody did not come at all, or the start takes too long.
    fn missing(&self, now_ms: u64) -> Option<Fault> {
        let waited_ms = self.heartbeat_ms * JOIN_HEARTBEATS;
        let came: Vec<&Row> = self.rows.values().filter(|row| row.lives).collect();
        let here = came.iter().filter(|row| row.sight.host == self.host).count();
        // Without a shared home directory, only the ranks of this host are seen.
        let shared = self.local_world == self.world || came.len() > here;
        let (seen, expected, whose) =
            if shared { (came.len(), self.world, "") } else { (here, self.local_world, " of this host") };
        let came: Vec<usize> = came.iter().map(|row| row.sight.rank).collect();
        let missing: Vec<usize> = (0..self.world).filter(|rank| !came.contains(rank)).collect();
        let hint = "see whether those processes were started, and whether they are stopped";
        if seen < expected {
            let who = match shared {
                true => name_ranks(&missing),
                false => format!("{} of {expected} ranks of this host, beside {},", expected - seen, name_ranks(&came)),
            };
            return Some(Fault::Aborted(format!(
                "{who} did not start within {waited_ms} ms; {seen} of {expected} ranks{whose} wait in MPI_Init\n  hint: {hint}"
            )));
        }
        let slow_ms = waited_ms * SLOW_START;
        let all = if shared { "all ranks are there" } else { "all ranks of this host are there" };
        (now_ms + waited_ms >= self.deadline_ms + slow_ms).then(|| {
            Fault::Aborted(format!(
                "MPI_Init did not return within {slow_ms} ms, though {all}\n  hint: the MPI library cannot connect the hosts, or a rank on another host did not start; see its own messages"
            ))
        })
    }
}

/// This rank's entry in the list, and the thread that looks at the others'.
#[derive(Debug)]
pub struct Presence {
    file: Option<PathBuf>,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Presence {
    /// From now on until this is dropped, this process ends with a message if a rank is missing. Without a directory that can
    /// be written, only the deadline is left.
    pub fn begin(place: &Place, lookup: Lookup<'_>, heartbeat_ms: u64) -> Self {
        let directory = directory(place, lookup).filter(|path| make(path).is_ok());
        let file = directory.as_ref().map(|path| path.join(place.rank.to_string()));
        let (end, ended) = channel();
        let host = crate::host_name();
        let mut roll = Roll::new(&host, place.world, place.local_world, heartbeat_ms, 0);
        // Those who look seldom leave the word to the others.
        roll.deadline_ms += if place.rank > 1 { LOOK_HEARTBEATS * heartbeat_ms } else { 0 };
        let watcher = Watcher {
            rank: place.rank,
            directory,
            roll,
            heartbeat: Duration::from_millis(heartbeat_ms),
            begin: Instant::now(),
            count: 0,
        };
        watcher.write();
        let watch = move || watcher.watch(&|pause| ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout));
        let thread = std::thread::Builder::new().name("presence".into()).spawn(watch).ok();
        Self { file, end: Some(end), thread }
    }
}

impl Presence {
    /// The job does not start. Ranks that its launcher ends now leave their files behind, so all go.
    pub fn abandon(mut self) {
        self.end_watch();
        if let Some(directory) = self.file.take().as_deref().and_then(Path::parent) {
            let _ = std::fs::remove_dir_all(directory);
        }
    }

    fn end_watch(&mut self) {
        drop(self.end.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.end_watch();
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
            // The last one takes the directory with it.
            let _ = file.parent().map(std::fs::remove_dir);
        }
    }
}

struct Watcher {
    rank: usize,
    directory: Option<PathBuf>,
    roll: Roll,
    heartbeat: Duration,
    begin: Instant,
    count: u64,
}

impl Watcher {
    /// `wait` pauses, and says whether to go on.
    fn watch(mut self, wait: &dyn Fn(Duration) -> bool) {
        while wait(self.heartbeat / 2) {
            self.count += 1;
            self.write();
            if self.directory.as_ref().is_some_and(|path| path.join(MARK).exists()) {
                // Another rank has said what is wrong. It goes first, as it tidies up.
                std::thread::sleep(3 * self.heartbeat);
                end();
            }
            let now_ms = self.begin.elapsed().as_millis() as u64;
            let looks = self.roll.looks(self.rank, now_ms, self.count);
            let sights = if looks { self.sights() } else { self.sight(self.rank).into_iter().collect() };
            if let Some(fault) = self.roll.look(now_ms, sights) {
                self.tell(&fault);
            }
        }
    }

    fn write(&self) {
        let Some(path) = self.directory.as_ref().map(|path| path.join(self.rank.to_string())) else { return };
        let text = format!("{} {} {}\n", crate::host_name(), std::process::id(), self.count);
        let open = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
        // Who cannot write is missed by the others, and says so itself at the deadline.
        let _ = open.and_then(|mut file| file.write_all(text.as_bytes()));
    }

    fn sights(&self) -> Vec<Sight> {
        (0..self.roll.world).filter_map(|rank| self.sight(rank)).collect()
    }

    fn sight(&self, rank: usize) -> Option<Sight> {
        let path = self.directory.as_ref()?.join(rank.to_string());
        let mut text = String::new();
        std::fs::File::open(path).ok()?.take(FILE_BYTES_MAX).read_to_string(&mut text).ok()?;
        // A file that is being written is read again the next time.
        let [host, pid, count] = text.strip_suffix('\n')?.split(' ').collect::<Vec<_>>()[..] else { return None };
        let process = if host == self.roll.host { process(pid.parse().ok()?) } else { Process::Unknown };
        Some(Sight { rank, host: host.to_string(), count: count.parse().ok()?, process })
    }

    /// Says what is wrong, unless another rank does, and ends this process.
    fn tell(&self, fault: &Fault) {
        let mark = self.directory.as_ref().map(|path| path.join(MARK));
        let made = mark.map(|mark| std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(mark));
        let first = match made {
            Some(Ok(_)) => true,
            Some(Err(error)) => error.kind() != std::io::ErrorKind::AlreadyExists && self.rank <= 1,
            None => self.rank <= 1,
        };
        if !first {
            std::thread::sleep(3 * self.heartbeat);
            end();
        }
        eprintln!("error: {fault}");
        std::thread::sleep(self.heartbeat);
        if let Some(path) = &self.directory {
            let _ = std::fs::remove_dir_all(path);
        }
        end();
    }
}

fn end() -> ! {
    // SAFETY: ends the process at once; another thread is in a start that does not end.
    unsafe { libc::_exit(crate::monitor::ABORTED_EXIT_CODE) }
}

fn make(path: &Path) -> std::io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// The fields of a process after its name: the first is its state.
fn status(pid: i32) -> Option<(String, Vec<String>)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (head, tail) = text.rsplit_once(')')?;
    let name = head.split_once('(')?.1.to_string();
    Some((name, tail.split_whitespace().map(String::from).collect()))
}

fn process(pid: i32) -> Process {
    match status(pid).and_then(|(_, fields)| fields.first().cloned()).as_deref() {
        Some("T" | "t") => Process::Stopped,
        None | Some("Z" | "X") => Process::Ended,
        Some(_) => Process::Runs,
    }
}

/// Where the ranks of this job leave their files. MPICH's launcher gives the job no name: there, those of one host find each
/// other by the process that started them all.
fn directory(place: &Place, lookup: Lookup<'_>) -> Option<PathBuf> {
    let job = match (&place.job, place.launcher) {
        (Some(job), _) => job.clone(),
        (None, Launcher::Mpich) => format!("mpich-{}-{}", crate::host_name(), hydra()?),
        (None, _) => return None,
    };
    Some(Path::new(&lookup("HOME")?).join(".kolo").join("run").join(format!("{job}.start")))
}

/// The process of MPICH's launcher above this one, and when it began.
fn hydra() -> Option<String> {
    const GENERATIONS_MAX: usize = 8;
    const PARENT: usize = 1;
    const BEGIN: usize = 19;
    let mut pid = std::process::id() as i32;
    for _ in 0..GENERATIONS_MAX {
        let (_, fields) = status(pid)?;
        pid = fields.get(PARENT)?.parse().ok()?;
        let (name, fields) = status(pid)?;
        if name.starts_with("hydra") || name.starts_with("pmi_proxy") {
            return Some(format!("{pid}-{}", fields.get(BEGIN)?));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEAT: u64 = 1000;

    /// Ranks that come to a host each at second 1, as `present` says; the first fault, and when.
    fn first(roll: &mut Roll, present: impl Fn(u64, usize) -> Option<Sight>) -> (u64, String) {
        let look = |ms: u64, roll: &mut Roll| roll.look(ms, (0..4).filter_map(|rank| present(ms, rank)).collect());
        (1..2000).map(|half| half * 500).find_map(|ms| Some((ms, look(ms, roll)?.to_string()))).unwrap_or_default()
    }

    fn sight(rank: usize, host: &str, count: u64, process: Process) -> Option<Sight> {
        Some(Sight { rank, host: host.into(), count, process })
    }

    #[test]
    fn a_rank_that_never_comes_is_named_at_the_deadline() {
        let mut roll = Roll::new("a", 4, 4, BEAT, 0);
        let (ms, text) =
            first(&mut roll, |ms, rank| if rank == 2 { None } else { sight(rank, "a", ms, Process::Runs) });
        assert_eq!(ms, 60_000);
        assert!(text.starts_with("rank 2 did not start within 60000 ms; 3 of 4 ranks wait in MPI_Init\n"), "{text}");
        // On another host, whose files are seen, and are not.
        let other = |ms: u64, rank: usize| sight(rank, if rank < 2 { "a" } else { "b" }, ms, Process::Unknown);
        let mut roll = Roll::new("a", 4, 2, BEAT, 0);
        let (_, text) = first(&mut roll, |ms, rank| other(ms, rank).filter(|_| rank != 3));
        assert!(text.starts_with("rank 3 did not start within 60000 ms; 3 of 4 ranks wait"), "{text}");
        let mut roll = Roll::new("a", 4, 2, BEAT, 0);
        let (_, text) = first(&mut roll, |ms, rank| other(ms, rank).filter(|_| rank == 1));
        assert!(
            text.starts_with("1 of 2 ranks of this host, beside rank 1, did not start within 60000 ms; 1 of 2"),
            "{text}"
        );
        let mut roll = Roll::new("a", 4, 2, BEAT, 0);
        let (ms, text) = first(&mut roll, |ms, rank| other(ms, rank).filter(|_| rank < 2));
        assert!(
            ms == 300_000 && text.contains("did not return within 300000 ms, though all ranks of this host"),
            "{text}"
        );
    }

    #[test]
    fn a_rank_that_stops_or_ends_is_named_soon() {
        for (process, limit, why) in [
            (Process::Stopped, 3000, "its process was stopped for 3000 ms"),
            (Process::Ended, 3000, "its process has ended"),
            (Process::Unknown, 15_000, "no sign of life for 15000 ms"),
        ] {
            let mut roll = Roll::new("a", 4, 4, BEAT, 0);
            let stops = |ms: u64, rank: usize| {
                let stopped = rank == 3 && ms > 2000;
                sight(rank, "a", if stopped { 2000 } else { ms }, if stopped { process } else { Process::Runs })
            };
            let (ms, text) = first(&mut roll, stops);
            assert_eq!(ms, 2000 + limit);
            assert!(text.starts_with("rank 3 on a is gone during its start: ") && text.contains(why), "{text}");
        }
    }

    #[test]
    fn what_an_earlier_job_left_behind_is_no_rank() {
        for process in [Process::Ended, Process::Unknown] {
            let mut roll = Roll::new("a", 4, 4, BEAT, 0);
            let left = |ms: u64, rank: usize| match rank {
                2 => sight(2, "a", 7, process),
                _ => sight(rank, "a", ms, Process::Runs),
            };
            let (ms, text) = first(&mut roll, left);
            assert!(ms == 60_000 && text.starts_with("rank 2 did not start within 60000 ms; 3 of 4"), "{ms} {text}");
        }
    }

    #[test]
    fn own_absence_is_nobodys_silence() {
        let mut roll = Roll::new("a", 2, 2, BEAT, 0);
        let both = |count: u64| (0..2).filter_map(|rank| sight(rank, "a", count, Process::Runs)).collect::<Vec<_>>();
        assert_eq!(roll.look(500, both(1)), None);
        assert_eq!(roll.look(90_000, both(1)), None, "it slept");
        assert_eq!(roll.look(92_000, both(2)), None);
        assert!(!roll.late(100_000));
        let turns = |rank: usize, ms: u64| (0..8).filter(|turn| roll.looks(rank, ms, *turn)).count();
        assert_eq!([turns(0, 95_000), turns(1, 1), turns(2, 100_000), turns(2, 149_000)], [8, 8, 0, 2]);
    }
}
