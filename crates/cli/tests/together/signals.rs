//! Signals, as a terminal, a shell and a scheduler send them, at moments when a run is busy with something else than steps.

use crate::job::{KOLO, LIMIT, report, tempdir};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The longest evaluation that is allowed.
const ENDLESS: &str = "[model]\nkind = \"mlp\"\ninputs = 4\nhidden = [8]\nclasses = 3\n[data]\n\
                       source = \"synthetic:features\"\nsamples = 2147483648\nholdout = 0.5\nbatch = 16\n\
                       [train]\nsteps = 2\n";

/// A program on a terminal of its own.
struct OnTerminal {
    child: Child,
    shown: Arc<Mutex<String>>,
    _master: File,
}

impl OnTerminal {
    fn start(words: &[&str], dir: &Path) -> Self {
        let (mut master, mut slave) = (0, 0);
        let size = libc::winsize { ws_row: 24, ws_col: 200, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: places for two descriptors; no name and no attributes are asked for.
        let made = unsafe { libc::openpty(&mut master, &mut slave, std::ptr::null_mut(), std::ptr::null(), &size) };
        assert_eq!(made, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: both were just made, and nobody else has them.
        let (master, slave) = unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        let stream = || slave.try_clone().expect("a descriptor");
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).current_dir(dir).env("TERM", "xterm");
        command.stdin(stream()).stdout(stream()).stderr(stream());
        // SAFETY: system calls, between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                // Whoever runs the tests under `nohup` ignores it.
                libc::signal(libc::SIGHUP, libc::SIG_DFL);
                libc::ioctl(0, libc::TIOCSCTTY, 0);
                Ok(())
            });
        }
        let child = command.spawn().expect("a program");
        let shown = Arc::new(Mutex::new(String::new()));
        let (mut from, ours) = (master.try_clone().expect("a descriptor"), Arc::clone(&shown));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut buffer) {
                ours.lock().expect("no panic").push_str(&String::from_utf8_lossy(&buffer[..count]));
            }
        });
        assert!(master.as_raw_fd() > 2);
        Self { child, shown, _master: master }
    }

    fn shown(&self) -> String {
        self.shown.lock().expect("no panic").clone()
    }

    fn await_text(&mut self, text: &str) {
        let start = Instant::now();
        while !self.shown().contains(text) {
            let early = self.child.try_wait().expect("a child");
            assert!(early.is_none() && start.elapsed() < LIMIT, "no {text:?} ({early:?}): {}", self.shown());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a process that this test started and has not waited for.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    fn end(&mut self) -> Option<i32> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.code();
            }
            assert!(start.elapsed() < LIMIT, "it goes on: {}", self.shown());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        self.signal(libc::SIGKILL);
        let _ = self.child.wait();
    }
}

#[test]
fn an_evaluation_ends_when_it_is_interrupted() {
    for (workers, signal) in
        [("1", libc::SIGINT), ("1", libc::SIGTERM), ("1", libc::SIGHUP), ("2", libc::SIGINT), ("2", libc::SIGHUP)]
    {
        let dir = tempdir();
        std::fs::write(dir.path().join("job.toml"), ENDLESS).expect("a job file");
        let words = [KOLO, "train", "job.toml", "-n", workers, "--threads", "1", "--report", "report.json"];
        let mut run = OnTerminal::start(&words, dir.path());
        // The bar says what goes on, and no time that is left of it.
        run.await_text("evaluating");
        run.signal(signal);
        run.await_text("stopping after this step; press Ctrl-C again to quit at once");
        assert_eq!(run.end(), Some(128 + signal), "signal {signal}, {workers} workers: {}", run.shown());
        let report = report(dir.path());
        assert_eq!((report["ended"].as_str(), report["steps"].as_u64()), (Some("interrupted"), Some(2)), "{report:#}");
        let evaluating =
            run.shown().split('\r').filter(|line| line.contains("evaluating")).map(String::from).collect::<Vec<_>>();
        assert!(evaluating.iter().all(|line| !line.contains(" left")), "{evaluating:?}");
    }
}

/// What is not begun has nothing to save.
#[test]
fn a_signal_before_the_first_step_ends_at_once() {
    for (workers, signal, code) in [("1", libc::SIGINT, 130), ("2", libc::SIGTERM, 143)] {
        let dir = tempdir();
        // Compiling this takes a while.
        let job = "[model]\nkind = \"gpt\"\nlayers = 400\nwidth = 8\nheads = 1\ncontext = 4\nvocab = 8\n[data]\n\
                   source = \"synthetic:tokens\"\nbatch = 8\n[train]\nsteps = 1000000\n";
        std::fs::write(dir.path().join("job.toml"), job).expect("a job file");
        let words = [KOLO, "train", "job.toml", "-n", workers, "--threads", "1"];
        let mut run = OnTerminal::start(&words, dir.path());
        run.await_text("starting");
        run.signal(signal);
        assert_eq!(run.end(), Some(code), "{}", run.shown());
    }
}
