//! Ctrl-C and its kin: SIGINT, SIGTERM and SIGHUP.
//!
//! Until the first step there is nothing to lose, and a signal ends the process at once. Then it asks the run to end in
//! order: after its step, or in the midst of an evaluation; a second Ctrl-C ends it at once. What is done is said from the
//! handler itself, so that it is said however long a step takes.

use std::ffi::CString;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use kolo_comm::host::ignores_signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXCPU};
use signal_hook::low_level;

/// What a shell adds to a signal for the exit code of a process that it ended.
pub const EXIT_SIGNALLED: i32 = 128;

/// For so long a signal that comes again may be the same one.
const SAME_MS: u64 = 1000;

/// Said when the run was asked to stop.
pub const ACKNOWLEDGED: &str = "stopping after this step; press Ctrl-C again to quit at once";
const FINISHING: &str = "the results are being written; press Ctrl-C again to quit at once";
const TIME_IS_UP: &str = "error: the limit on processor time (`ulimit -t`) is reached";
const LIMIT_ACKNOWLEDGED: &str = "stopping after this step: the limit on processor time (`ulimit -t`) is reached";
const NOT_BEGUN: &str = "interrupted before the first step";

/// Where a run stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RunPhase {
    /// Nothing is trained yet.
    Starting,
    Training,
    /// The last step is done.
    Finishing,
}

/// A flag that every part of a run may look at. Clones share it. The default one hears no signal.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    state: Arc<InterruptState>,
}

#[derive(Debug, Default)]
struct InterruptState {
    requested: AtomicBool,
    phase: AtomicU8,
    /// The first signal; 0 before.
    signal: AtomicI32,
    /// When the first signal came; 0 before.
    first_ms: AtomicU64,
}

impl Interrupt {
    /// Sets the flag by hand.
    pub fn request(&self) {
        self.state.requested.store(true, Ordering::Relaxed);
    }

    /// Whether the run should stop at the next step.
    pub fn requested(&self) -> bool {
        self.state.requested.load(Ordering::Relaxed)
    }

    /// The signal that asked for it; that of a scheduler if it was none.
    pub fn signal(&self) -> i32 {
        match self.state.signal.load(Ordering::Relaxed) {
            0 => SIGTERM,
            signal => signal,
        }
    }

    /// Says where the run stands.
    pub fn enter(&self, phase: RunPhase) {
        self.state.phase.store(phase as u8, Ordering::Relaxed);
    }
}

/// Listens to SIGINT, SIGTERM and, unless it is ignored as under `nohup`, SIGHUP. Call once per process. Of several workers,
/// the one that `speaks` says on standard error what it does. A worker whose launcher passes signals on (`is_told`) may get
/// one twice, from whoever signals all processes and from the launcher: within a second it counts once. A user who means it
/// twice tells the launcher, which ends the workers.
pub fn install(speaks: bool, is_told: bool) -> io::Result<Interrupt> {
    let interrupt = Interrupt::default();
    let reply = speaks.then(|| StderrReply { terminal: io::stderr().is_terminal() });
    HEARS_LIMIT.store(true, Ordering::Relaxed);
    for signal in
        [SIGINT, SIGTERM, SIGHUP, SIGXCPU].into_iter().filter(|signal| *signal != SIGHUP || !ignores_signal(SIGHUP))
    {
        let state = Arc::clone(&interrupt.state);
        // SAFETY: the handler reads and writes atomics, writes to a descriptor and may end the process: all of it is allowed
        // in a handler, and nothing allocates or locks.
        unsafe { low_level::register(signal, move || on_signal(signal, &state, reply, is_told)) }?;
    }
    Ok(interrupt)
}

/// Whether a run listens to the limit on processor time, and ends in order.
static HEARS_LIMIT: AtomicBool = AtomicBool::new(false);

/// What the system does by itself at the limits on processor time and on the size of files is to end the process with a core
/// dump. From here on the first ends it with a message, or a run in order; at the second a write fails as on a full disk. Call
/// once per process.
pub fn hear_limits() -> io::Result<()> {
    // SAFETY: a signal that is ignored does nothing. Processes that are started from here ignore it, too.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    // SAFETY: the handler reads an atomic, writes to a descriptor and may end the process, all of which is allowed in one.
    unsafe {
        low_level::register(SIGXCPU, || {
            if !HEARS_LIMIT.load(Ordering::Relaxed) {
                StderrReply { terminal: false }.write(TIME_IS_UP);
                low_level::exit(EXIT_SIGNALLED + SIGXCPU);
            }
        })
    }
    .map(|_| ())
}

/// A directory that goes if a signal ends the process before there is anything in it.
static UNUSED: OnceLock<Unused> = OnceLock::new();

struct Unused {
    directory: CString,
    /// A file in it that goes with it: this process's lock, with its device and number, as another run may have one there by
    /// then.
    lock: Option<(CString, [u64; 2])>,
}

/// If the process is ended before its first step, this directory goes, unless there is something in it beside this lock of the
/// process itself.
pub fn leave_no_empty(directory: &Path, lock: Option<&Path>) {
    let text = |path: &Path| CString::new(path.as_os_str().as_bytes()).ok();
    let held = |path: &Path| {
        let meta = std::fs::symlink_metadata(path).ok()?;
        Some((text(path)?, [meta.dev(), meta.ino()]))
    };
    if let Some(directory) = text(directory) {
        let _ = UNUSED.set(Unused { directory, lock: lock.and_then(held) });
    }
}

/// How a signal is answered on standard error.
#[derive(Clone, Copy, Debug)]
struct StderrReply {
    /// A bar may stand in the line.
    terminal: bool,
}

impl StderrReply {
    /// In one piece, so that nothing gets between.
    fn write(self, text: &str) {
        const LINE_BYTES_MAX: usize = 96;
        let mut line = [b'\n'; LINE_BYTES_MAX];
        let length = text.len().min(LINE_BYTES_MAX - 2);
        line[1..=length].copy_from_slice(&text.as_bytes()[..length]);
        let line = &line[usize::from(!self.terminal)..length + 2];
        // SAFETY: our own bytes. A terminal that is gone is no reason to do otherwise.
        unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
    }
}

/// Milliseconds of a clock that only goes on.
fn now_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live value; the call is allowed in a handler.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

fn on_signal(signal: i32, state: &InterruptState, reply: Option<StderrReply>, is_told: bool) {
    let phase = state.phase.load(Ordering::Relaxed);
    let text = if signal == SIGXCPU {
        if phase == RunPhase::Starting as u8 { TIME_IS_UP } else { LIMIT_ACKNOWLEDGED }
    } else if phase == RunPhase::Starting as u8 {
        NOT_BEGUN
    } else if phase == RunPhase::Training as u8 {
        ACKNOWLEDGED
    } else {
        FINISHING
    };
    let now = now_ms();
    let first = state.first_ms.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
    let is_same = is_told && now < first.map_or_else(|first| first, |_| now) + SAME_MS;
    let _ = state.signal.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
    let again = state.requested.swap(true, Ordering::Relaxed);
    // The limit is each process's own: nobody else knows of it.
    let reply = if signal == SIGXCPU { Some(StderrReply { terminal: false }) } else { reply };
    if let Some(reply) = reply.filter(|_| !again) {
        reply.write(text);
    }
    // Only Ctrl-C is meant twice, because a scheduler and a launcher may both pass on the same SIGTERM.
    if phase == RunPhase::Starting as u8 || (again && signal == SIGINT && !is_same) {
        if let Some(Unused { directory, lock }) = UNUSED.get() {
            if let Some((path, number)) = lock {
                // SAFETY: a string that is never changed, and a live value to write to; the calls are allowed in a handler.
                unsafe {
                    let mut there: libc::stat = std::mem::zeroed();
                    if libc::lstat(path.as_ptr(), &mut there) == 0 && [there.st_dev, there.st_ino] == *number {
                        libc::unlink(path.as_ptr());
                    }
                }
            }
            // SAFETY: as above; it fails if there is a file in it.
            unsafe { libc::rmdir(directory.as_ptr()) };
        }
        low_level::exit(EXIT_SIGNALLED + signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::low_level::raise;
    use std::process::Command;

    #[test]
    fn clones_share_the_flag() {
        let interrupt = Interrupt::default();
        let clone = interrupt.clone();
        assert!(!clone.requested());
        interrupt.request();
        assert!(clone.requested());
    }

    /// Runs in a process of its own, started by the test below, as does the next one.
    #[test]
    #[ignore = "ends the process"]
    fn raise_signals() {
        let interrupt = install(true, false).unwrap();
        interrupt.enter(RunPhase::Training);
        assert!(!interrupt.requested());
        raise(SIGHUP).unwrap();
        assert!(interrupt.requested());
        raise(SIGTERM).unwrap();
        assert_eq!(interrupt.signal(), SIGHUP);
        eprintln!("still here");
        raise(SIGINT).unwrap();
    }

    #[test]
    #[ignore = "ends the process"]
    fn raise_to_a_worker() {
        let interrupt = install(true, true).unwrap();
        interrupt.enter(RunPhase::Training);
        raise(SIGINT).unwrap();
        raise(SIGINT).unwrap();
        eprintln!("still here");
        std::thread::sleep(std::time::Duration::from_millis(SAME_MS + 100));
        raise(SIGINT).unwrap();
        eprintln!("and here");
    }

    #[test]
    #[ignore = "ends the process"]
    fn raise_early() {
        let _interrupt = install(true, false).unwrap();
        raise(SIGTERM).unwrap();
        eprintln!("still here");
    }

    /// Exit code and standard error of such a process.
    fn ends(test: &str) -> (Option<i32>, String) {
        let path = module_path!().split_once("::").unwrap().1;
        let output = Command::new("env")
            .args(["--default-signal=HUP,INT,TERM".as_ref(), std::env::current_exe().unwrap().as_os_str()])
            .args(["--exact", &format!("{path}::{test}"), "--ignored", "--nocapture"])
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    #[test]
    fn a_signal_that_comes_from_two_counts_once() {
        let (code, error) = ends("raise_to_a_worker");
        assert!(error.contains("still here") && !error.contains("and here"), "{error}");
        assert_eq!(code, Some(130), "{error}");
    }

    #[test]
    fn the_first_signal_asks_and_the_next_interrupt_leaves() {
        let (code, error) = ends("raise_signals");
        assert!(error.contains("still here"), "{error}");
        assert_eq!((code, error.matches(ACKNOWLEDGED).count()), (Some(130), 1), "{error}");
    }

    #[test]
    fn a_signal_before_the_first_step_leaves_at_once() {
        let (code, error) = ends("raise_early");
        assert_eq!((code, error.trim()), (Some(143), NOT_BEGUN));
    }
}
