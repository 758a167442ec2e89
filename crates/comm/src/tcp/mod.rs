//! Ranks joined by TCP: any network, several streams per link, every byte sealed with the job's key.
//!
//! All ranks listen on the one interface they were given, meet, and close the listener: a running job has no open port.
//! `docs/wire.md` is the protocol, `docs/threat-model.md` says what it keeps out.

pub mod frame;
pub mod inbox;
mod mesh;
mod peer;
mod poll;
pub mod reader;
mod split;
mod wire;
pub mod writer;

use crate::auth::JobKey;
use crate::fault::Fault;
use crate::run::Programs;
use crate::transport::{Bootstrap, Transport};
use crate::watch::Watch;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;
pub use wire::TcpWire;

/// Most streams between two ranks.
pub const STREAMS_MAX: usize = 8;
/// Largest group.
pub const RANKS_MAX: usize = 1 << 16;

#[derive(Clone, Debug)]
pub struct TcpOptions {
    pub key: JobKey,
    pub job: u64,
    pub generation: u64,
    /// The interface's own address; loopback when all ranks are on one host.
    pub listen: IpAddr,
    /// Streams between two ranks, 1 to [`STREAMS_MAX`]: more than one for networks that one stream does not fill.
    pub streams: usize,
    /// Bytes of a message that are sealed and sent as one.
    pub segment_bytes: usize,
    /// Bytes kept per peer of messages that nobody has asked for yet.
    pub held_bytes_max: usize,
    /// Bytes the operating system may keep per stream and direction.
    pub socket_bytes: usize,
    /// How long all ranks may take to connect.
    pub connect_timeout: Duration,
    /// How long a connection may take to authenticate.
    pub handshake_timeout: Duration,
}

impl TcpOptions {
    /// For all ranks on this host.
    pub fn local(key: JobKey, job: u64) -> Self {
        Self {
            key,
            job,
            generation: 0,
            listen: IpAddr::V4(Ipv4Addr::LOCALHOST),
            streams: 1,
            segment_bytes: 256 << 10,
            held_bytes_max: 1 << 20,
            socket_bytes: 1 << 20,
            connect_timeout: Duration::from_secs(30),
            handshake_timeout: Duration::from_secs(5),
        }
    }

    fn check(&self, size: usize) -> Result<(), Fault> {
        let bad = |text: String| Err(Fault::BadCall(text));
        if !(1..=STREAMS_MAX).contains(&self.streams) {
            return bad(format!("{} streams per link; 1 to {STREAMS_MAX} are possible", self.streams));
        }
        if !(1..=frame::SEGMENT_BYTES_MAX).contains(&self.segment_bytes) {
            let most = frame::SEGMENT_BYTES_MAX;
            return bad(format!("segments of {} bytes; 1 to {most} are possible", self.segment_bytes));
        }
        if self.listen.is_unspecified() {
            return bad(format!(
                "listening on {} would open the job to every network; name one interface",
                self.listen
            ));
        }
        if size == 0 || size > RANKS_MAX {
            return bad(format!("a group of {size} ranks; 1 to {RANKS_MAX} are possible"));
        }
        Ok(())
    }
}

/// Collectives over TCP. All ranks call it with the same job, generation and number of streams.
pub fn connect(
    rank: usize,
    size: usize,
    options: TcpOptions,
    watch: Arc<Watch>,
    bootstrap: &mut dyn Bootstrap,
) -> Result<Box<dyn Transport>, Fault> {
    let segment_bytes = options.segment_bytes;
    let wire = join(rank, size, options, Arc::clone(&watch), bootstrap)?;
    let mut programs = Programs::new(wire, watch).segment_bytes(segment_bytes);
    programs.measure()?;
    Ok(Box::new(programs))
}

/// The wire under [`connect`]. All of them call it with the same job, generation and number of streams.
pub fn join(
    rank: usize,
    size: usize,
    options: TcpOptions,
    watch: Arc<Watch>,
    bootstrap: &mut dyn Bootstrap,
) -> Result<TcpWire, Fault> {
    options.check(size)?;
    let mesh_rank = mesh::MeshRank { rank, communicator: 0, world: (0..size).collect() };
    TcpWire::join(mesh_rank, options, watch, bootstrap)
}
