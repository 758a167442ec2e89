//! The streams to one peer, and what travels on them.

use super::TcpOptions;
use super::frame::Era;
use super::inbox::Inbox;
use super::mesh::{self, Joined};
use super::reader::{FrameReader, Stop};
use super::writer::{FrameWriter, Outbox};
use crate::fault::Fault;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::time::Duration;

/// How a stream stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Open,
    /// The peer said goodbye; nothing more comes.
    Ended,
    /// Nothing goes either way.
    Broken,
}

pub struct Stream {
    pub socket: TcpStream,
    pub reader: FrameReader,
    pub writer: FrameWriter,
    pub state: State,
}

pub struct Peer {
    pub streams: Vec<Stream>,
    pub inbox: Inbox,
    pub outbox: Outbox,
}

impl Peer {
    pub fn new(joined: Vec<Joined>, options: &TcpOptions, stall: Duration) -> Result<Self, Fault> {
        let era = Era { job: options.job, generation: options.generation };
        let stream = |(socket, session): Joined| {
            mesh::tune(&socket, options.socket_bytes, stall)
                .map_err(|error| Fault::system("setting up a link", &error))?;
            let reader = FrameReader::new(session.opener, era);
            Ok(Stream {
                socket,
                reader,
                writer: FrameWriter::new(session.sealer, era, options.segment_bytes),
                state: State::Open,
            })
        };
        Ok(Self {
            streams: joined.into_iter().map(stream).collect::<Result<_, Fault>>()?,
            inbox: Inbox::new(options.held_bytes_max),
            outbox: Outbox::new(options.segment_bytes),
        })
    }

    /// Whether the peer has left for good.
    pub fn gone(&self) -> bool {
        !self.streams.is_empty() && self.streams.iter().all(|stream| stream.state == State::Ended)
    }
}

impl Stream {
    /// # Safety
    /// As [`FrameWriter::pump`] and [`FrameReader::pump`].
    pub unsafe fn pump(&mut self, inbox: &mut Inbox, outbox: &mut Outbox) -> Result<bool, Stop> {
        if self.state == State::Broken {
            return Ok(false);
        }
        // SAFETY: the caller's promise.
        let written = unsafe { self.writer.pump(&mut &self.socket, outbox) };
        if self.state == State::Ended {
            return written.map_err(Stop::System);
        }
        // SAFETY: the caller's promise.
        let read = match (written, unsafe { self.reader.pump(&mut &self.socket, inbox) }) {
            (Ok(written), Ok(read)) => return Ok(written | read),
            (_, Err(stop)) => stop,
            // A peer that fails says why before it closes: that is what counts, and not our broken pipe.
            (Err(error), Ok(true)) if error.kind() != ErrorKind::WouldBlock => return Ok(true),
            (Err(error), Ok(_)) => Stop::System(error),
        };
        match read {
            Stop::Goodbye => {
                self.state = State::Ended;
                Ok(true)
            }
            // A peer that disagrees still hears what we have to say about it.
            stop @ Stop::Mismatch { .. } => Err(stop),
            stop => {
                self.state = State::Broken;
                Err(stop)
            }
        }
    }
}
