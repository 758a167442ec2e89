//! Starts real programs, bounds their time, and sees that nothing of them is left.
//!
//! All that a program starts, on whatever way, inherits a mark in its environment: by it, processes are found that a
//! launcher has moved out of the program's own process group.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MARK: &str = "KOLO_TEST_MARK";
/// How long what a program started may outlive it.
const LEFTOVER_LIMIT: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(5);

/// How a program ended, and what it printed.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    pub took: Duration,
}

impl Ended {
    /// Panics with all that was printed unless the program ended well.
    pub fn well(self) -> Self {
        assert_eq!(self.code, Some(0), "{self}");
        self
    }

    /// The messages of kolo's own: there must be one, whoever else complains.
    pub fn only_error(&self) -> &str {
        self.only_error_of(1)
    }

    /// As [`Self::only_error`], where the message also quotes what ranks printed.
    pub fn only_error_of(&self, messages: usize) -> &str {
        let begins: Vec<usize> = self.stderr.match_indices("error: ").map(|(at, _)| at).collect();
        assert_eq!(begins.len(), messages, "not {} messages: {self}", begins.len());
        &self.stderr[begins[0]..]
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { code, stdout, stderr, took } = self;
        write!(f, "exit code {code:?} after {took:?}\n--- stdout\n{stdout}--- stderr\n{stderr}---")
    }
}

/// Runs a program to its end. If it takes longer than the limit, it and all it started is killed, and the test fails with
/// what was printed until then.
pub fn run(command: &mut Command, limit: Duration) -> Ended {
    harmed(command, limit, |_| {})
}

/// As [`run`], with something done to its processes while they run.
pub fn harmed(command: &mut Command, limit: Duration, harm: impl FnOnce(&Processes) + Send + 'static) -> Ended {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    let mark = format!("{MARK}={}.{}", std::process::id(), RUNS.fetch_add(1, Ordering::Relaxed));
    command.env(MARK, &mark[MARK.len() + 1..]).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let begin = Instant::now();
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let stdout = collect(child.stdout.take().expect("piped"));
    let stderr = collect(child.stderr.take().expect("piped"));
    let processes = Processes { mark: mark.clone(), deadline: begin + limit };
    let harming = std::thread::spawn(move || harm(&processes));
    let mut code = None;
    while code.is_none() && begin.elapsed() < limit {
        std::thread::sleep(LOOK);
        code = child.try_wait().expect("a child");
    }
    let left = if code.is_some() { leftovers(&mark) } else { Vec::new() };
    if code.is_none() || !left.is_empty() {
        kill(&[format!("-{}", child.id())]);
        kill(&marked(&mark));
    }
    let _ = child.wait();
    let harmed = harming.join();
    let ended = Ended {
        code: code.and_then(|status| status.code()),
        stdout: stdout.text(),
        stderr: stderr.text(),
        took: begin.elapsed(),
    };
    assert!(harmed.is_ok(), "{command:?}: {ended}");
    assert!(code.is_some(), "{command:?} went on for more than {limit:?}: {ended}");
    assert!(left.is_empty(), "{command:?} left processes {left:?} behind: {ended}");
    ended
}

/// The processes of a program that runs.
pub struct Processes {
    mark: String,
    deadline: Instant,
}

impl Processes {
    /// The process whose environment says this, as soon as it is there and runs the binary.
    pub fn find(&self, variable: &str) -> i32 {
        loop {
            let says = |pid: &String| {
                let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
                let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
                program == Path::new(crate::job::KOLO)
                    && environment.split(|byte| *byte == 0).any(|word| word == variable.as_bytes())
            };
            if let Some(pid) = marked(&self.mark).into_iter().find(says) {
                return pid.parse().expect("a number");
            }
            assert!(Instant::now() < self.deadline, "no process with {variable}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Sends a signal to a process that a test started; it may be gone.
pub fn signal(pid: i32, number: i32) {
    let _ = Command::new("kill").args([format!("-{number}"), pid.to_string()]).stderr(Stdio::null()).status();
}

/// A stream that is read as it comes.
struct Collected {
    bytes: Arc<Mutex<Vec<u8>>>,
    thread: std::thread::JoinHandle<()>,
}

fn collect(mut stream: impl Read + Send + 'static) -> Collected {
    let bytes = Arc::new(Mutex::new(Vec::new()));
    let ours = Arc::clone(&bytes);
    let thread = std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = stream.read(&mut buffer) {
            ours.lock().expect("no panic").extend_from_slice(&buffer[..count]);
        }
    });
    Collected { bytes, thread }
}

impl Collected {
    /// What came, once the stream is closed; whoever else holds it open is not waited for.
    fn text(self) -> String {
        let deadline = Instant::now() + LEFTOVER_LIMIT;
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(LOOK);
        }
        String::from_utf8_lossy(&self.bytes.lock().expect("no panic")).into_owned()
    }
}

/// Marked processes that do not go by themselves.
fn leftovers(mark: &str) -> Vec<String> {
    let deadline = Instant::now() + LEFTOVER_LIMIT;
    loop {
        let left = marked(mark);
        if left.is_empty() || Instant::now() > deadline {
            return left;
        }
        std::thread::sleep(LOOK);
    }
}

/// Processes that carry the mark and are no zombies.
fn marked(mark: &str) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let carries = |pid: &String| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
    };
    names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).filter(carries).collect()
}

fn kill(pids: &[String]) {
    if !pids.is_empty() {
        let _ = Command::new("kill").args(["-KILL", "--"]).args(pids).stderr(Stdio::null()).status();
    }
}

/// Whether a program is installed; if not, says in plain sight that a test was skipped.
pub fn installed(program: &str, what: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let found = path.split(':').any(|folder| Path::new(folder).join(program).exists());
    if !found {
        skip(&format!("no {what}"));
    }
    found
}

/// Straight to standard error: what a passing test prints is not shown.
pub fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}
