//! Whole messages over a byte stream, without ever blocking.
//!
//! What cannot be written at once waits in memory, up to a limit; what has been read in part waits for the rest.

use crate::message::{Envelope, FRAME_BYTES_MAX};
use kolo_comm::Fault;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

/// Unsent bytes that may pile up before a link counts as dead.
const PENDING_BYTES_MAX: usize = 64 << 20;
const READ_BYTES: usize = 16 << 10;
/// Messages read at a time, so that nobody can keep a reader for itself.
const BATCH: usize = 256;

/// A link that carries [`Envelope`]s.
#[derive(Debug)]
pub struct Line {
    stream: UnixStream,
    incoming: Vec<u8>,
    pending: Vec<u8>,
    /// Bytes of `pending` already sent.
    sent: usize,
    open: bool,
}

impl Line {
    pub fn new(stream: UnixStream) -> Result<Self, Fault> {
        stream.set_nonblocking(true).map_err(|error| Fault::system("preparing a control link", &error))?;
        Ok(Self { stream, incoming: Vec::new(), pending: Vec::new(), sent: 0, open: true })
    }

    /// What to poll for; nothing once it is closed.
    pub fn interest(&self) -> (RawFd, i16) {
        let descriptor = if self.open { self.stream.as_raw_fd() } else { -1 };
        (descriptor, if self.busy() { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN })
    }

    /// Whether the other end may still hear or say something.
    pub fn open(&self) -> bool {
        self.open
    }

    pub fn close(&mut self) {
        self.open = false;
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    /// Whether something waits to be written.
    pub fn busy(&self) -> bool {
        self.open && self.sent < self.pending.len()
    }

    /// Queues a message and writes what can be written.
    pub fn send(&mut self, envelope: &Envelope) {
        if !self.open {
            return;
        }
        if self.pending.len() - self.sent > PENDING_BYTES_MAX {
            return self.close();
        }
        self.pending.extend_from_slice(&envelope.encode());
        self.flush();
    }

    pub fn flush(&mut self) {
        while self.busy() {
            match self.stream.write(&self.pending[self.sent..]) {
                Ok(0) => self.open = false,
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // What the other end said before it went can still be read.
                Err(_) => self.sent = self.pending.len(),
            }
        }
        self.pending.clear();
        self.sent = 0;
    }

    /// Reads what is there. The messages that are whole; a fault closes the link. After the end, `open` is false.
    pub fn receive(&mut self) -> Result<Vec<Envelope>, Fault> {
        let mut envelopes = Vec::new();
        let mut buffer = [0; READ_BYTES];
        while self.open && envelopes.len() < BATCH && self.incoming.len() < FRAME_BYTES_MAX {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.open = false,
                Ok(count) => {
                    self.incoming.extend_from_slice(&buffer[..count]);
                    self.parse(&mut envelopes)?;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.open = false,
            }
        }
        Ok(envelopes)
    }

    fn parse(&mut self, envelopes: &mut Vec<Envelope>) -> Result<(), Fault> {
        let mut used = 0;
        loop {
            match Envelope::decode(&self.incoming[used..]) {
                Ok(Some((envelope, length))) => {
                    envelopes.push(envelope);
                    used += length;
                }
                Ok(None) => break,
                Err(fault) => {
                    self.close();
                    return Err(fault);
                }
            }
        }
        self.incoming.drain(..used);
        Ok(())
    }
}

/// Waits until one of the lines can be read or, if busy, written; at most this long.
pub fn wait(lines: &[&Line], at_most_ms: u64) {
    let entries: Vec<_> = lines.iter().filter(|line| line.open()).map(|line| line.interest()).collect();
    poll(&entries, at_most_ms);
}

/// Waits until one of these descriptors is ready; at most this long. A negative one is passed over.
pub fn poll(entries: &[(RawFd, i16)], at_most_ms: u64) {
    let entry = |(fd, events): &(RawFd, i16)| libc::pollfd { fd: *fd, events: *events, revents: 0 };
    let mut entries: Vec<libc::pollfd> = entries.iter().map(entry).collect();
    let timeout = i32::try_from(at_most_ms).unwrap_or(i32::MAX);
    // SAFETY: the array is ours and has this many entries. Failure is an early return, which callers expect.
    unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, timeout) };
}
