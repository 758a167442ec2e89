//! The system calls of the shared-memory transport: memory without a name, sleeping on a word, noticing a dead process.

use crate::fault::Fault;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

fn refused(what: impl Into<String>) -> Fault {
    Fault::system(what, &std::io::Error::last_os_error())
}

/// What the memory of a process is called in the lists of mappings of all who map it, before the number of that process.
const MEMORY_NAME: &str = "kolo-memory-of-";

/// A file in memory that has no name in any file system and can neither shrink nor grow.
pub fn anonymous_file(bytes: usize) -> Result<OwnedFd, Fault> {
    let name = CString::new(format!("{MEMORY_NAME}{}", std::process::id())).unwrap_or_default();
    // SAFETY: the name is a terminated string; it shows only in /proc.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(refused("making shared memory"));
    }
    // SAFETY: just opened, owned by nobody else.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: plain calls on an open descriptor.
    let sized = unsafe {
        libc::ftruncate(fd, bytes as libc::off_t) == 0
            && libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL) == 0
    };
    if sized { Ok(file) } else { Err(refused(format!("making {bytes} bytes of shared memory"))) }
}

/// Opens another process's descriptor, if it is sealed memory of this size.
pub fn open_of_process(pid: u32, fd: RawFd, bytes: usize) -> Result<OwnedFd, String> {
    let path = format!("/proc/{pid}/fd/{fd}");
    let file = File::options().read(true).write(true).open(&path).map_err(|error| format!("{path}: {error}"))?;
    let length = file.metadata().map_err(|error| format!("{path}: {error}"))?.len();
    // SAFETY: a plain call on an open descriptor.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if length != bytes as u64 || seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
        return Err(format!("{path} is not the memory that was offered"));
    }
    Ok(file.into())
}

/// Bytes of other processes' memory that this process has mapped and touched, which count as resident in both; 0 where the system does
/// not say.
pub fn resident_bytes_of_peers() -> u64 {
    std::fs::read_to_string("/proc/self/smaps").map_or(0, |maps| touched_of_others(&maps, std::process::id()))
}

/// Of a list of mappings, each a line with its name and lines about it.
fn touched_of_others(maps: &str, process: u32) -> u64 {
    let own = format!("/memfd:{MEMORY_NAME}{process}");
    let (mut is_of_peer, mut kibibytes) = (false, 0u64);
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("Rss:") if is_of_peer => kibibytes += words.next().and_then(|count| count.parse().ok()).unwrap_or(0),
            // Addresses, rights, offset, device and inode stand before the name.
            Some(word) if !word.ends_with(':') => {
                let name = words.nth(4).unwrap_or_default();
                is_of_peer =
                    name.strip_prefix("/memfd:").is_some_and(|name| name.starts_with(MEMORY_NAME)) && name != own;
            }
            _ => {}
        }
    }
    kibibytes * 1024
}

/// Gives every page of a fresh mapping its memory now, so that want of memory is an error here and not a signal later.
///
/// # Safety
/// The mapping is ours.
pub unsafe fn populate(data: *mut u8, bytes: usize) -> Result<(), Fault> {
    // SAFETY: the caller's promise.
    if unsafe { libc::madvise(data.cast(), bytes, libc::MADV_POPULATE_WRITE) } == 0 {
        return Ok(());
    }
    match std::io::Error::last_os_error() {
        // A kernel before 5.14 fills the pages when they are touched.
        error if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        error => Err(Fault::system(format!("getting {bytes} bytes of shared memory"), &error)),
    }
}

/// Sleeps while the word is `value`, at most this long. May return early.
pub fn futex_wait(word: &AtomicU32, value: u32, at_most: Duration) {
    let time = libc::timespec {
        tv_sec: at_most.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(at_most.subsec_nanos()),
    };
    // SAFETY: the word lives through the call; the kernel only compares it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &time) };
}

/// Wakes whoever sleeps on the word, in any process.
pub fn futex_wake(word: &AtomicU32) {
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

const MEMBARRIER_GLOBAL_EXPEDITED: libc::c_int = 1 << 1;
const MEMBARRIER_REGISTER_GLOBAL_EXPEDITED: libc::c_int = 1 << 2;

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: takes two numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0) == 0 }
}

/// Lets this process take part in [`barrier_everywhere`]; whether the kernel can.
pub fn register_barrier() -> bool {
    membarrier(MEMBARRIER_REGISTER_GLOBAL_EXPEDITED)
}

/// A memory fence in every running thread of every registered process: they need none of their own on their fast paths.
pub fn barrier_everywhere() {
    if !membarrier(MEMBARRIER_GLOBAL_EXPEDITED) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
}

/// A process that can be asked whether it still runs.
#[derive(Debug)]
pub enum ProcessHandle {
    /// Ourselves, or one that this kernel cannot watch.
    Unwatched,
    Watched(OwnedFd),
    Gone,
}

impl ProcessHandle {
    pub fn new(pid: u32) -> Self {
        if pid == std::process::id() {
            return ProcessHandle::Unwatched;
        }
        // SAFETY: takes two numbers; the descriptor returned is ours.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) } as RawFd;
        if fd >= 0 {
            // SAFETY: just opened, owned by nobody else.
            return ProcessHandle::Watched(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        match std::io::Error::last_os_error().raw_os_error() {
            Some(libc::ESRCH) => ProcessHandle::Gone,
            _ => ProcessHandle::Unwatched,
        }
    }

    pub fn is_gone(&self) -> bool {
        let ProcessHandle::Watched(descriptor) = self else { return matches!(self, ProcessHandle::Gone) };
        let mut poll = libc::pollfd { fd: descriptor.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry.
        unsafe { libc::poll(&mut poll, 1, 0) == 1 }
    }
}

/// Words of the mask of processors that ranks tell each other.
pub const PROCESSOR_WORDS: usize = 16;

/// The processors this process may run on.
pub fn processors() -> [u64; PROCESSOR_WORDS] {
    let mut mask = [0u64; PROCESSOR_WORDS];
    // SAFETY: the buffer has this length.
    unsafe { libc::sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr().cast()) };
    mask
}

#[cfg(test)]
mod tests {
    use super::touched_of_others;

    #[test]
    fn memory_of_other_processes_is_counted_once() {
        let maps = "\
7f00-7f10 rw-s 00000000 00:01 11 /memfd:kolo-memory-of-12 (deleted)
Size:                 64 kB
Rss:                  60 kB
Pss:                  30 kB
VmFlags: rd wr sh
7f10-7f20 rw-s 00000000 00:01 12 /memfd:kolo-memory-of-123 (deleted)
Rss:                  32 kB
7f20-7f30 rw-p 00000000 00:00 0
Rss:                 999 kB
7f30-7f40 rw-s 00000000 00:01 13 /memfd:kolo-memory-of-7 (deleted)
Rss:                   8 kB
7f40-7f50 r--p 00000000 00:01 14 /usr/lib/libc.so
Rss:                 999 kB
";
        assert_eq!(touched_of_others(maps, 12), 40 * 1024);
        assert_eq!(touched_of_others(maps, 123), 68 * 1024);
        assert_eq!(touched_of_others("", 1), 0);
    }
}
