//! Which ranks are alive, before anything connects them.
//!
//! `MPI_Init` waits for all ranks without a timeout, and the job's key travels through MPI. So until the ranks are connected,
//! each writes a heartbeat file with its host, its process and a growing count, in a directory named after the launcher's
//! job, and a thread reads the others'. A rank that is stopped, has ended or never started is named, once, and this process
//! ends. The files hold no secret, and nothing in them is trusted: at worst a rank is named wrongly in a job that does not
//! start anyway.
//!
//! `StartupCheck` decides, and is pure; [`StartupWatch`] reads and writes the files.

use crate::join::make_directory;
use crate::launcher::{Launcher, RankInfo};
use crate::startup_check::{LOOK_HEARTBEATS, Observation, ProcessState, StartupCheck};
use kolo_comm::Fault;
use kolo_comm::host::EnvLookup;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// Longest file of a rank.
const FILE_BYTES_MAX: u64 = 512;
/// What follows the job's name in that of the directory.
const DIRECTORY: &str = "start";
/// The mark of the rank that says what is wrong.
const MARK: &str = "told";
/// Clocks of file servers differ.
const MARK_MARGIN: Duration = Duration::from_secs(5);

/// This rank's heartbeat file, and the thread that reads the others'.
#[derive(Debug)]
pub struct StartupWatch {
    file: Option<PathBuf>,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl StartupWatch {
    /// From now on until this is dropped, this process ends with a message if a rank is missing. Without a directory that can
    /// be written, only the deadline is left.
    pub fn begin(rank_info: &RankInfo, lookup: EnvLookup<'_>, heartbeat_ms: u64) -> Self {
        Self::start(rank_info, lookup, heartbeat_ms, true)
    }

    /// From now on until this is dropped, others see that this process lives, before it has come to join them. It judges nobody.
    pub fn announce(rank_info: &RankInfo, lookup: EnvLookup<'_>, heartbeat_ms: u64) -> Self {
        Self::start(rank_info, lookup, heartbeat_ms, false)
    }

    fn start(rank_info: &RankInfo, lookup: EnvLookup<'_>, heartbeat_ms: u64, judges: bool) -> Self {
        let directory = directory(rank_info, lookup).filter(|path| make_directory(path).is_ok());
        let file = directory.as_ref().map(|path| path.join(rank_info.rank.to_string()));
        let (end, ended) = channel();
        let host = crate::host_name();
        let mut startup_check = StartupCheck::new(&host, rank_info.world, rank_info.local_world, heartbeat_ms, 0);
        // Ranks that check seldom leave the report to the others.
        startup_check.deadline_ms += if rank_info.rank > 1 { LOOK_HEARTBEATS * heartbeat_ms } else { 0 };
        let watcher = Watcher {
            rank: rank_info.rank,
            directory,
            startup_check,
            heartbeat: Duration::from_millis(heartbeat_ms),
            begin: Instant::now(),
            began: SystemTime::now(),
            count: 0,
            judges,
        };
        watcher.write();
        let watch = move || watcher.watch(&|pause| ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout));
        let thread = std::thread::Builder::new().name("startup_watch".into()).spawn(watch).ok();
        Self { file, end: Some(end), thread }
    }
}

impl StartupWatch {
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

impl Drop for StartupWatch {
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
    startup_check: StartupCheck,
    heartbeat: Duration,
    begin: Instant,
    began: SystemTime,
    count: u64,
    /// Whether it says who is missing, and ends this process.
    judges: bool,
}

impl Watcher {
    /// `wait` pauses, and says whether to go on.
    fn watch(mut self, wait: &dyn Fn(Duration) -> bool) {
        while wait(self.heartbeat / 2) {
            self.count += 1;
            self.write();
            if !self.judges {
                continue;
            }
            if self.is_told() {
                // Another rank has said what is wrong. It goes first, as it tidies up.
                std::thread::sleep(3 * self.heartbeat);
                end();
            }
            let now_ms = self.begin.elapsed().as_millis() as u64;
            if !self.startup_check.looks(self.rank, now_ms, self.count) {
                self.startup_check.pass(now_ms);
            } else if let Some(fault) = self.startup_check.look(now_ms, self.observations()) {
                self.tell(&fault);
            }
        }
    }

    /// Whether a rank of this job has said what is wrong. A mark from before this process is of an earlier job, and goes.
    fn is_told(&self) -> bool {
        let Some(mark) = self.directory.as_ref().map(|path| path.join(MARK)) else { return false };
        let Ok(made) = std::fs::metadata(&mark).and_then(|meta| meta.modified()) else { return false };
        let earlier = made + MARK_MARGIN < self.began;
        if earlier {
            let _ = std::fs::remove_file(mark);
        }
        !earlier
    }

    fn write(&self) {
        let Some(directory) = &self.directory else { return };
        let text = line(&crate::host_name(), std::process::id(), self.count, &process_space());
        // Renamed when it is whole: whoever looks finds the old line or the new one.
        let fresh = directory.join(format!("{}.new", self.rank));
        let open = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh);
        let written = open.and_then(|mut file| file.write_all(text.as_bytes()));
        // Who cannot write is missed by the others, and says so itself at the deadline.
        let _ = written.and_then(|()| std::fs::rename(fresh, directory.join(self.rank.to_string())));
    }

    fn observations(&self) -> Vec<Observation> {
        let (world, space) = (self.startup_check.world, process_space());
        self.directory.iter().flat_map(|directory| observations(directory, world, &space)).collect()
    }

    /// Says what is wrong, unless another rank does, and ends this process.
    fn tell(&self, fault: &Fault) {
        let mark = self.directory.as_ref().map(|path| path.join(MARK));
        let made = mark.map(|mark| std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(mark));
        let first = match made {
            Some(Ok(_)) => true,
            // Whoever told it first has left its mark, or has tidied up already.
            Some(Err(error)) if matches!(error.kind(), ErrorKind::AlreadyExists | ErrorKind::NotFound) => false,
            Some(Err(_)) => self.rank <= 1,
            None => self.rank <= 1,
        };
        if !first {
            std::thread::sleep(3 * self.heartbeat);
            end();
        }
        crate::logs::print_error(&format!("error: {fault}"));
        std::thread::sleep(self.heartbeat);
        if let Some(path) = &self.directory {
            let _ = std::fs::remove_dir_all(path);
        }
        end();
    }
}

/// What a rank's file holds.
fn line(host: &str, pid: u32, count: u64, space: &str) -> String {
    format!("{host} {pid} {count} {space}\n")
}

/// Where a process's number means a process: in one name space of one running kernel. Hosts that were made from one image have
/// one name, and containers of one host have processes of their own.
fn process_space() -> String {
    let kernel = kolo_comm::host::kernel().unwrap_or_else(crate::host_name);
    let space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{kernel}/{}", space.to_string_lossy())
}

/// What the files of all ranks show in this space.
fn observations(directory: &Path, world: usize, space: &str) -> Vec<Observation> {
    (0..world).filter_map(|rank| observation(directory, rank, space)).collect()
}

fn observation(directory: &Path, rank: usize, own: &str) -> Option<Observation> {
    let mut text = String::new();
    let file = kolo_base::open_regular(&directory.join(rank.to_string())).ok()?;
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).ok()?;
    let [host, pid, count, space] = text.strip_suffix('\n')?.split(' ').collect::<Vec<_>>()[..] else { return None };
    let process = if space == own { process(pid.parse().ok()?) } else { ProcessState::Unknown };
    Some(Observation { rank, host: host.to_string(), count: count.parse().ok()?, process })
}

/// The coordinator's look at the ranks of its own host that have announced themselves and not come yet. Those of other hosts
/// it sees late, if at all: file servers may show old files for a minute.
#[derive(Debug)]
pub(crate) struct AnnouncedRanks {
    directory: PathBuf,
    startup_check: StartupCheck,
    heartbeat: Duration,
    begin: Instant,
    looked: Instant,
}

impl AnnouncedRanks {
    /// Of the job whose ranks meet through this file.
    pub fn new(meeting: &Path, rank_info: &RankInfo, heartbeat_ms: u64) -> Self {
        let name = format!("{}.{DIRECTORY}", meeting.file_name().unwrap_or_default().to_string_lossy());
        let host = crate::host_name();
        let startup_check = StartupCheck::new(&host, rank_info.world, rank_info.local_world, heartbeat_ms, 0);
        let (heartbeat, now) = (Duration::from_millis(heartbeat_ms), Instant::now());
        Self { directory: meeting.with_file_name(name), startup_check, heartbeat, begin: now, looked: now }
    }

    /// A rank that had begun to start and is gone or stopped, and why it is lost. Looks about twice a heartbeat.
    pub fn lost(&mut self) -> Option<(usize, String)> {
        if self.looked.elapsed() < self.heartbeat / 2 {
            return None;
        }
        self.looked = Instant::now();
        let mut here = observations(&self.directory, self.startup_check.world, &process_space());
        here.retain(|observation| observation.process != ProcessState::Unknown);
        let now_ms = self.begin.elapsed().as_millis() as u64;
        match self.startup_check.gone(now_ms, here)? {
            Fault::Lost { peer, why, .. } => Some((peer, why)),
            _ => None,
        }
    }

    /// All have come, or the job is over: nobody needs the files of those who did not.
    pub fn sweep(&self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn end() -> ! {
    // SAFETY: ends the process at once; another thread is in a start that does not end.
    unsafe { libc::_exit(crate::monitor::ABORTED_EXIT_CODE) }
}

/// The fields of a process after its name: the first is its state.
fn status(pid: i32) -> Option<(String, Vec<String>)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (head, tail) = text.rsplit_once(')')?;
    let name = head.split_once('(')?.1.to_string();
    Some((name, tail.split_whitespace().map(String::from).collect()))
}

fn process(pid: i32) -> ProcessState {
    match status(pid).and_then(|(_, fields)| fields.first().cloned()).as_deref() {
        Some("T" | "t") => ProcessState::Stopped,
        None | Some("Z" | "X") => ProcessState::Ended,
        Some(_) => ProcessState::Runs,
    }
}

/// Where the ranks of this job leave their files. MPICH's launcher gives the job no name: there, those of one host find each
/// other by the process that started them all.
fn directory(rank_info: &RankInfo, lookup: EnvLookup<'_>) -> Option<PathBuf> {
    let job = match (&rank_info.job, rank_info.launcher) {
        (Some(job), _) => job.clone(),
        (None, Launcher::Mpich) => format!("mpich-{}-{}", crate::host_name(), hydra()?),
        (None, _) => return None,
    };
    Some(Path::new(&lookup("HOME")?).join(".kolo").join("run").join(format!("{job}.{DIRECTORY}")))
}

/// Where among those fields the parent stands, and when it began, in ticks since the machine did.
const PARENT: usize = 1;
const BEGIN: usize = 19;

/// How long ago this process began.
pub(crate) fn age_ms() -> Option<u64> {
    let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
    let up_ms = uptime.split(' ').next()?.parse::<f64>().ok()? * 1e3;
    // SAFETY: asks for a constant of the system.
    let ticks_per_s = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1) as f64;
    let begin: f64 = status(std::process::id() as i32)?.1.get(BEGIN)?.parse().ok()?;
    Some((up_ms - begin * 1e3 / ticks_per_s).max(0.0) as u64)
}

/// The process of MPICH's launcher above this one, and when it began.
fn hydra() -> Option<String> {
    const GENERATIONS_MAX: usize = 8;
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

    /// Another host may have the same name, and a process there the number of one that has ended here.
    #[test]
    fn only_processes_of_this_space_are_looked_up() {
        let directory = tempfile::tempdir().unwrap();
        let write = |rank: usize, text: String| std::fs::write(directory.path().join(rank.to_string()), text).unwrap();
        let (own, me) = (process_space(), std::process::id());
        write(0, line("node", me, 7, &own));
        write(1, line("node", me, 7, "another/pid:[1]"));
        write(2, "node 1 2\n".into());
        let seen = observations(directory.path(), 4, &own);
        let states: Vec<_> = seen.iter().map(|one| (one.rank, one.process)).collect();
        assert_eq!(states, [(0, ProcessState::Runs), (1, ProcessState::Unknown)]);
    }

    #[test]
    fn a_process_knows_its_age() {
        let first = super::age_ms().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
        let later = super::age_ms().unwrap();
        assert!(later >= first + 30 && later < 3_600_000, "{first} {later}");
    }
}
