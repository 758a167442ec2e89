//! A worker process on this host: started so that it cannot outlive us, ended with all it started.

use crate::rank_state::Exit;
use kolo_comm::Fault;
use std::fs::File;
use std::io::ErrorKind;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::time::Duration;

/// A started process and the group it leads.
#[derive(Debug)]
pub struct Process {
    child: Child,
    exit: Option<Exit>,
    stopped: bool,
}

/// What became of a process since we last asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Exited(Exit),
    Stopped,
    Continued,
}

/// Where a process's output goes.
#[derive(Debug)]
pub enum ProcessOutput {
    File(File),
    Pipes,
}

impl Process {
    /// Starts a worker, with `control` inherited.
    pub fn start(mut command: Command, control: OwnedFd, output: ProcessOutput) -> Result<Self, Fault> {
        let (out, err) = match output {
            ProcessOutput::File(file) => {
                let again = file.try_clone().map_err(|error| Fault::system("sharing a log", &error))?;
                (Stdio::from(again), Stdio::from(file))
            }
            ProcessOutput::Pipes => (Stdio::piped(), Stdio::piped()),
        };
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        Self::spawn(command, Some(control))
    }

    /// Starts `command` as leader of its own group, its end bound to that of this thread.
    pub fn spawn(mut command: Command, control: Option<OwnedFd>) -> Result<Self, Fault> {
        let descriptor = control.as_ref().map(AsRawFd::as_raw_fd);
        let parent = std::process::id() as libc::pid_t;
        command.process_group(0);
        // SAFETY: between fork and exec it makes system calls only, and allocates nothing.
        unsafe { command.pre_exec(move || prepare(descriptor, parent)) };
        let child = command.spawn().map_err(|error| {
            let what = format!("starting {}", command.get_program().to_string_lossy());
            match error.kind() {
                ErrorKind::NotFound | ErrorKind::PermissionDenied => {
                    let hint = "check that the program exists and is executable";
                    Fault::System { what, error: format!("{error}\n  hint: {hint}") }
                }
                _ => Fault::thread(what, &error),
            }
        })?;
        Ok(Self { child, exit: None, stopped: false })
    }

    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    pub fn take_pipes(&mut self) -> Option<(ChildStdout, ChildStderr)> {
        self.child.stdout.take().zip(self.child.stderr.take())
    }

    fn id(&self) -> libc::pid_t {
        self.child.id() as libc::pid_t
    }

    /// Sends a signal to the process and all of its group.
    pub fn signal(&self, signal: i32) {
        if self.exit.is_none() {
            // SAFETY: the leader is not reaped yet, so its number still names our group.
            unsafe { libc::kill(-self.id(), signal) };
        }
    }

    /// What became of it, without waiting. What is left of the group of an ended process is ended too.
    pub fn look(&mut self) -> Option<Change> {
        if self.exit.is_some() {
            return None;
        }
        // SAFETY: a zeroed `siginfo_t` is a valid place for the answer.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let ended = libc::WEXITED | libc::WNOWAIT | libc::WNOHANG;
        // SAFETY: asks about our own child and leaves it as it is.
        let answer = unsafe { libc::waitid(libc::P_PID, self.child.id(), &mut info, ended) };
        // SAFETY: `waitid` has filled it, or left it zeroed.
        if answer == 0 && unsafe { info.si_pid() } == self.id() {
            self.signal(libc::SIGKILL);
        }
        let mut status = 0;
        let flags = libc::WNOHANG | libc::WUNTRACED | libc::WCONTINUED;
        // SAFETY: our own child, not yet reaped.
        match unsafe { libc::waitpid(self.id(), &mut status, flags) } {
            0 => None,
            id if id == self.id() => Some(self.change(status)),
            // Somebody else reaped it: it is gone, and nobody can tell how.
            _ if std::io::Error::last_os_error().raw_os_error() == Some(libc::ECHILD) => {
                self.exit = Some(Exit::Unknown);
                Some(Change::Exited(Exit::Unknown))
            }
            _ => None,
        }
    }

    /// Whether it was stopped when it was last looked at.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Whether it had ended when it was last looked at.
    pub fn has_ended(&self) -> bool {
        self.exit.is_some()
    }

    /// Processor time that all its threads have used.
    pub fn processor_time(&self) -> Option<Duration> {
        let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
        // SAFETY: both pointers are to live values. A process that is gone has no clock, which is an error.
        let read = self.exit.is_none()
            && unsafe {
                libc::clock_getcpuclockid(self.id(), &mut clock) == 0 && libc::clock_gettime(clock, &mut time) == 0
            };
        read.then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }

    fn change(&mut self, status: i32) -> Change {
        self.stopped = libc::WIFSTOPPED(status);
        if self.stopped {
            return Change::Stopped;
        }
        if libc::WIFCONTINUED(status) {
            return Change::Continued;
        }
        let signalled = libc::WIFSIGNALED(status);
        let exit = if signalled { Exit::Signal(libc::WTERMSIG(status)) } else { Exit::Code(libc::WEXITSTATUS(status)) };
        self.exit = Some(exit);
        Change::Exited(exit)
    }
}

/// Runs in the new process before the program does.
fn prepare(control: Option<i32>, parent: libc::pid_t) -> std::io::Result<()> {
    let stop = stop_set();
    // SAFETY: plain system calls on this process.
    unsafe {
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &stop, std::ptr::null_mut());
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // The parent may have died before that; then nobody would ever end us.
        if libc::getppid() != parent {
            libc::_exit(1);
        }
        if let Some(control) = control
            && libc::fcntl(control, libc::F_SETFD, 0) != 0
        {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Keeps SIGTSTP pending, so that a launcher can stop its ranks before it stops itself. The system forgets a pending
/// SIGTSTP when SIGCONT comes, so a launcher that is continued before it got round to stopping does not stop for good, as
/// one would that handles the signal and raises it again. Threads started later keep it pending, too; processes do not.
#[derive(Debug)]
pub struct StopSignal {
    before: libc::sigset_t,
    /// The mask is that of a thread.
    _of_this_thread: PhantomData<*const ()>,
}

impl StopSignal {
    pub fn hold() -> Self {
        // SAFETY: a zeroed set is a valid one, and all pointers are to live sets.
        unsafe {
            let mut before = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, &stop_set(), &mut before);
            Self { before, _of_this_thread: PhantomData }
        }
    }

    pub fn is_pending(&self) -> bool {
        // SAFETY: as above.
        unsafe {
            let mut pending: libc::sigset_t = std::mem::zeroed();
            libc::sigpending(&mut pending) == 0 && libc::sigismember(&pending, libc::SIGTSTP) == 1
        }
    }
}

impl Drop for StopSignal {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}

fn stop_set() -> libc::sigset_t {
    // SAFETY: a zeroed set is a valid one.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGTSTP);
        set
    }
}

/// Stops this process if SIGTSTP is still pending, and returns when it goes on. Where no shell could continue it, the system
/// does not stop it.
pub fn stop_self() {
    let set = stop_set();
    // SAFETY: both pointers are to a live set. A pending signal comes, and the process goes on, before the first call returns.
    unsafe {
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.exit.is_none() {
            self.signal(libc::SIGKILL);
            let _ = self.child.wait();
        }
    }
}

/// Two ends of a control link.
pub fn control_pair() -> Result<(UnixStream, OwnedFd), Fault> {
    let (ours, theirs) = UnixStream::pair().map_err(|error| Fault::system("making a control link", &error))?;
    Ok((ours, theirs.into()))
}
