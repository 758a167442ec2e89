//! Orders over two pipes, without ever blocking.

use crate::agent_message::{AgentMessage, FRAME_BYTES_MAX, GREETING};
use kolo_comm::Fault;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const READ_BYTES: usize = 64 << 10;
/// Bytes that may come before the greeting.
const NOISE_BYTES_MAX: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Pipe {
    input: File,
    output: File,
    incoming: Vec<u8>,
    pending: Vec<u8>,
    sent: usize,
    /// Whether the other end has greeted, or need not.
    pub greeted: bool,
    pub open: bool,
}

impl Pipe {
    pub fn new(input: OwnedFd, output: OwnedFd, greeted: bool) -> Result<Self, Fault> {
        for descriptor in [input.as_raw_fd(), output.as_raw_fd()] {
            // SAFETY: flags of descriptors that are ours.
            let answer = unsafe {
                let flags = libc::fcntl(descriptor, libc::F_GETFL);
                libc::fcntl(descriptor, libc::F_SETFL, flags | libc::O_NONBLOCK)
            };
            if answer < 0 {
                return Err(Fault::system("preparing a pipe", &std::io::Error::last_os_error()));
            }
        }
        let (input, output) = (File::from(input), File::from(output));
        Ok(Self { input, output, incoming: Vec::new(), pending: Vec::new(), sent: 0, greeted, open: true })
    }

    pub fn interests(&self) -> [(RawFd, i16); 2] {
        let input = if self.open { self.input.as_raw_fd() } else { -1 };
        let output = if self.open && self.backlog() > 0 { self.output.as_raw_fd() } else { -1 };
        [(input, libc::POLLIN), (output, libc::POLLOUT)]
    }

    /// Bytes not yet written.
    pub fn backlog(&self) -> usize {
        self.pending.len() - self.sent
    }

    pub fn send(&mut self, order: &AgentMessage) {
        self.send_bytes(&order.encode());
    }

    pub fn send_bytes(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
        self.flush();
    }

    pub fn flush(&mut self) {
        while self.open && self.backlog() > 0 {
            match self.output.write(&self.pending[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.pending.clear();
        self.sent = 0;
    }

    /// The messages that are whole. After the end, `open` is false.
    pub fn receive(&mut self) -> Result<Vec<AgentMessage>, Fault> {
        let mut messages = Vec::new();
        let mut buffer = vec![0; READ_BYTES];
        while self.open && self.incoming.len() <= FRAME_BYTES_MAX {
            match self.input.read(&mut buffer) {
                Ok(0) => self.open = false,
                Ok(count) => self.incoming.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.open = false,
            }
            self.parse(&mut messages)?;
        }
        Ok(messages)
    }

    fn parse(&mut self, messages: &mut Vec<AgentMessage>) -> Result<(), Fault> {
        if !self.greeted {
            let found = self.incoming.windows(GREETING.len()).position(|window| window == GREETING);
            let Some(at) = found else {
                if self.incoming.len() > NOISE_BYTES_MAX {
                    self.open = false;
                }
                return Ok(());
            };
            self.incoming.drain(..at + GREETING.len());
            self.greeted = true;
        }
        let mut used = 0;
        while let Some((order, length)) =
            AgentMessage::decode(&self.incoming[used..]).inspect_err(|_| self.open = false)?
        {
            messages.push(order);
            used += length;
        }
        self.incoming.drain(..used);
        Ok(())
    }
}
