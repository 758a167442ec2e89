//! Whole messages over a byte stream, without ever blocking.
//!
//! What cannot be written at once waits in memory, up to a limit; what has been read in part waits for the rest. Over an
//! inherited socket messages travel as they are; over a network each is a sealed record of an authenticated session.

use crate::message::{Envelope, FRAME_BYTES_MAX};
use crate::poll::poll;
use kolo_comm::Fault;
use kolo_comm::auth::LinkSession;
use kolo_comm::reach::acknowledgements;
use kolo_comm::record::{RecordKind, RecordReader, Sealer, seal_record};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Unsent bytes that may pile up before a link counts as dead.
const PENDING_BYTES_MAX: usize = 64 << 20;
const READ_BYTES: usize = 16 << 10;
/// Messages read at a time, so that nobody can keep a reader for itself.
const BATCH: usize = 256;

/// What a control link runs over.
#[derive(Debug)]
pub(crate) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Socket {
    fn descriptor(&self) -> RawFd {
        match self {
            Socket::Unix(stream) => stream.as_raw_fd(),
            Socket::Tcp(stream) => stream.as_raw_fd(),
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Socket::Unix(stream) => stream.read(bytes),
            Socket::Tcp(stream) => stream.read(bytes),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            Socket::Unix(stream) => stream.write(bytes),
            Socket::Tcp(stream) => stream.write(bytes),
        }
    }
}

/// The two directions of an authenticated session.
#[derive(Debug)]
struct Seal {
    sealer: Sealer,
    reader: RecordReader,
}

/// A link that carries [`Envelope`]s.
#[derive(Debug)]
pub(crate) struct ControlLink {
    socket: Socket,
    seal: Option<Seal>,
    incoming: Vec<u8>,
    pending: Vec<u8>,
    /// Bytes of `pending` already sent.
    sent: usize,
    open: bool,
}

impl ControlLink {
    /// Over a socket that only the two ends can reach.
    pub fn plain(stream: UnixStream) -> Result<Self, Fault> {
        stream.set_nonblocking(true).map_err(|error| Fault::system("preparing a control link", &error))?;
        Ok(Self::new(Socket::Unix(stream), None))
    }

    /// Over a network, after both ends have proved who they are.
    pub fn sealed(stream: TcpStream, session: LinkSession) -> Result<Self, Fault> {
        let prepared = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
        prepared.map_err(|error| Fault::system("preparing a control link", &error))?;
        let seal = Seal { sealer: session.sealer, reader: RecordReader::new(session.opener) };
        Ok(Self::new(Socket::Tcp(stream), Some(seal)))
    }

    fn new(socket: Socket, seal: Option<Seal>) -> Self {
        Self { socket, seal, incoming: Vec::new(), pending: Vec::new(), sent: 0, open: true }
    }

    /// Waits until something can be read or, if something is left to send, written; at most this long.
    pub fn wait(&self, at_most_ms: u64) {
        poll(&[self.interest()], at_most_ms);
    }

    /// What to poll for; nothing once it is closed.
    pub fn interest(&self) -> (RawFd, i16) {
        let descriptor = if self.open { self.socket.descriptor() } else { -1 };
        (descriptor, if self.busy() { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN })
    }

    /// Whether the other end may still hear or say something.
    pub fn open(&self) -> bool {
        self.open
    }

    /// Whether the system at the other end has acknowledged what we send within this time, although the process there may be
    /// suspended and read nothing. Of a link on this host, nobody can tell.
    pub fn is_acknowledged(&self, within: Duration) -> bool {
        let Socket::Tcp(stream) = &self.socket else { return false };
        self.open && acknowledgements(stream).is_some_and(|known| known.ago < within)
    }

    pub fn close(&mut self) {
        self.open = false;
        let _ = match &self.socket {
            Socket::Unix(stream) => stream.shutdown(Shutdown::Both),
            Socket::Tcp(stream) => stream.shutdown(Shutdown::Both),
        };
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
        let frame = envelope.encode();
        match &mut self.seal {
            None => self.pending.extend_from_slice(&frame),
            Some(seal) => seal_record(&mut seal.sealer, RecordKind::Data, &frame, &mut self.pending),
        }
        self.flush();
    }

    pub fn flush(&mut self) {
        while self.busy() {
            match self.socket.write(&self.pending[self.sent..]) {
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
        while self.open && envelopes.len() < BATCH && self.incoming.len() < FRAME_BYTES_MAX {
            let outcome = match self.seal.is_some() {
                true => self.receive_record(&mut envelopes),
                false => self.receive_plain(&mut envelopes),
            };
            match outcome {
                Ok(Ok(())) => {}
                Ok(Err(fault)) => {
                    self.close();
                    return Err(fault);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.open = false,
            }
        }
        Ok(envelopes)
    }

    fn receive_plain(&mut self, envelopes: &mut Vec<Envelope>) -> std::io::Result<Result<(), Fault>> {
        let mut buffer = [0; READ_BYTES];
        let count = self.socket.read(&mut buffer)?;
        self.open = count > 0;
        self.incoming.extend_from_slice(&buffer[..count]);
        let mut used = 0;
        loop {
            match Envelope::decode(&self.incoming[used..]) {
                Ok(Some((envelope, length))) => {
                    envelopes.push(envelope);
                    used += length;
                }
                Ok(None) => break,
                Err(fault) => return Ok(Err(fault)),
            }
        }
        self.incoming.drain(..used);
        Ok(Ok(()))
    }

    fn receive_record(&mut self, envelopes: &mut Vec<Envelope>) -> std::io::Result<Result<(), Fault>> {
        let Some(seal) = &mut self.seal else { return Ok(Ok(())) };
        let count = self.socket.read(seal.reader.space())?;
        if count == 0 {
            self.open = false;
            return Ok(Ok(()));
        }
        let rejected = |why: String| Fault::Rejected { from: "a control link".into(), why };
        match seal.reader.filled(count, &mut self.incoming) {
            Ok(Some(RecordKind::Data)) => {
                let decoded = Envelope::decode(&self.incoming);
                let length = self.incoming.len();
                self.incoming.clear();
                match decoded {
                    Ok(Some((envelope, used))) if used == length => envelopes.push(envelope),
                    Ok(_) => return Ok(Err(rejected("a record that is not one frame".into()))),
                    Err(fault) => return Ok(Err(fault)),
                }
            }
            Ok(Some(RecordKind::Goodbye)) => self.open = false,
            Ok(None) => {}
            Err(forged) => return Ok(Err(rejected(forged.to_string()))),
        }
        Ok(Ok(()))
    }
}
