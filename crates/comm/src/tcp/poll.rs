//! Waiting for several sockets at once.

use std::os::fd::RawFd;
use std::time::Duration;

/// What to wait for on a socket.
pub fn interest(socket: RawFd, read: bool, write: bool) -> libc::pollfd {
    let events = if read { libc::POLLIN } else { 0 } | if write { libc::POLLOUT } else { 0 };
    libc::pollfd { fd: socket, events, revents: 0 }
}

/// Waits until something is ready, at most this long. An interrupted wait is one that found nothing.
pub fn wait(sockets: &mut [libc::pollfd], at_most: Duration) -> bool {
    let limit = libc::timespec { tv_sec: at_most.as_secs() as _, tv_nsec: at_most.subsec_nanos() as _ };
    // SAFETY: the slice is valid for its length, the time is ours, and no signal mask is given.
    let ready = unsafe { libc::ppoll(sockets.as_mut_ptr(), sockets.len() as _, &limit, std::ptr::null()) };
    if ready <= 0 {
        sockets.iter_mut().for_each(|socket| socket.revents = 0);
    }
    ready > 0
}
