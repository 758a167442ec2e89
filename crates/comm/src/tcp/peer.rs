//! The streams to one peer, and what travels on them.

use super::TcpOptions;
use super::frame::JobGeneration;
use super::inbox::Inbox;
use super::mesh::{self, Joined};
use super::reader::{FrameReader, StreamStop};
use super::writer::{FrameWriter, Outbox};
use crate::fault::Fault;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

/// How a stream stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamState {
    Open,
    /// The peer said goodbye; nothing more comes.
    Ended,
    /// Nothing goes either way.
    Broken,
}

pub struct PeerStream {
    pub socket: Arc<TcpStream>,
    pub reader: FrameReader,
    pub writer: FrameWriter,
    pub state: StreamState,
}

pub struct TcpPeer {
    pub streams: Vec<PeerStream>,
    pub inbox: Inbox,
    pub outbox: Outbox,
}

impl TcpPeer {
    pub fn new(joined: Vec<Joined>, options: &TcpOptions, stall: Duration) -> Result<Self, Fault> {
        let era = JobGeneration { job: options.job, generation: options.generation };
        let stream = |(socket, session): Joined| {
            mesh::tune(&socket, options.socket_bytes, stall)
                .map_err(|error| Fault::system("setting up a link", &error))?;
            let reader = FrameReader::new(session.opener, era);
            Ok(PeerStream {
                socket: Arc::new(socket),
                reader,
                writer: FrameWriter::new(session.sealer, era, options.segment_bytes),
                state: StreamState::Open,
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
        !self.streams.is_empty() && self.streams.iter().all(|stream| stream.state == StreamState::Ended)
    }
}

impl PeerStream {
    /// # Safety
    /// As [`FrameWriter::pump`] and [`FrameReader::pump`].
    pub unsafe fn pump(&mut self, inbox: &mut Inbox, outbox: &mut Outbox) -> Result<bool, StreamStop> {
        if self.state == StreamState::Broken {
            return Ok(false);
        }
        // SAFETY: the caller's promise.
        let written = unsafe { self.writer.pump(&mut &*self.socket, outbox) };
        if self.state == StreamState::Ended {
            return written.map_err(StreamStop::System);
        }
        // SAFETY: the caller's promise.
        let read = match (written, unsafe { self.reader.pump(&mut &*self.socket, inbox) }) {
            (Ok(written), Ok(read)) => return Ok(written | read),
            (_, Err(stop)) => stop,
            // A peer that fails says why before it closes: that is what counts, and not our broken pipe.
            (Err(error), Ok(true)) if error.kind() != ErrorKind::WouldBlock => return Ok(true),
            (Err(error), Ok(_)) => StreamStop::System(error),
        };
        match read {
            StreamStop::Goodbye => {
                self.state = StreamState::Ended;
                Ok(true)
            }
            // A peer that disagrees still hears what we have to say about it.
            stop @ StreamStop::Mismatch { .. } => Err(stop),
            stop => {
                self.state = StreamState::Broken;
                Err(stop)
            }
        }
    }
}
