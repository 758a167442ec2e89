//! Waiting until a descriptor is ready.

use std::os::fd::RawFd;
use std::time::Duration;

/// Whether a descriptor can be read, or has ended, within this time.
pub(crate) fn readable(descriptor: RawFd, at_most: Duration) -> bool {
    poll(&[(descriptor, libc::POLLIN)], at_most.as_millis() as u64) > 0
}

/// Waits until one of these descriptors is ready; at most this long. A negative one is passed over. How many are ready.
pub(crate) fn poll(entries: &[(RawFd, i16)], at_most_ms: u64) -> i32 {
    let entry = |(fd, events): &(RawFd, i16)| libc::pollfd { fd: *fd, events: *events, revents: 0 };
    let mut entries: Vec<libc::pollfd> = entries.iter().map(entry).collect();
    let timeout = i32::try_from(at_most_ms).unwrap_or(i32::MAX);
    // SAFETY: the array is ours and has this many entries. Failure is an early return, which callers expect.
    unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, timeout) }
}
