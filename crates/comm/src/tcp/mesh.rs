//! Connecting the ranks: all listen and exchange their addresses, the higher rank connects to the lower, and both prove that
//! they hold the job's key. Unauthenticated connections get no answer, delay nobody, and are limited in number.

use super::TcpOptions;
use super::poll;
use crate::auth::{HELLO_BYTES, Identity, Initiator, LinkRole, LinkSession, PROOF_BYTES, Responder};
use crate::fault::Fault;
use crate::reach::probe_pause;
use crate::transport::Bootstrap;
use crate::watch::{STALL_HEARTBEATS, Watch};
use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Connections that have not shown an authentic hello; beyond this the oldest is dropped.
const UNAUTHENTICATED_MAX: usize = 64;
const BACKLOG: i32 = 1024;
/// Before a failed attempt to connect is repeated.
const RETRY: Duration = Duration::from_millis(20);
/// How often the wait looks whether the job was ended.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// An idle link is given up after a few probes.
const KEEPALIVE_PROBES: u32 = 3;

const BLOB_VERSION: u8 = 1;
/// Bytes by which a rank says where it listens.
pub const BLOB_BYTES: usize = 20;

/// A rank's place in a communicator.
#[derive(Clone, Debug)]
pub struct MeshRank {
    pub rank: usize,
    pub communicator: u32,
    /// The ranks of the job that are members, for messages.
    pub world: Vec<usize>,
}

/// An authenticated stream.
pub type Joined = (TcpStream, LinkSession);

/// One attempt at a stream.
struct Attempt {
    socket: TcpStream,
    side: HandshakeSide,
    stage: HandshakeStage,
    buffer: [u8; HELLO_BYTES],
    filled: usize,
    since: Instant,
}

enum HandshakeSide {
    Initiator(Initiator),
    Responder(Responder),
}

/// What an attempt waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HandshakeStage {
    Connection,
    Reply,
    Hello,
    Proof,
}

/// What became of an attempt.
enum HandshakeStep {
    Waiting,
    Done(Box<LinkSession>),
    Dropped,
}

struct MeshSetup<'a> {
    options: &'a TcpOptions,
    mesh_rank: &'a MeshRank,
    /// Where each rank listens.
    addresses: Vec<SocketAddr>,
    listener: TcpListener,
    attempts: Vec<Attempt>,
    /// Streams to try again, not before the time: rank, stream.
    later: Vec<(Instant, usize, usize)>,
    /// By rank and stream.
    joined: Vec<Vec<Option<Joined>>>,
}

/// Joins this rank with all others; the streams to each.
pub fn connect_mesh(
    options: &TcpOptions,
    mesh_rank: &MeshRank,
    watch: &Watch,
    bootstrap: &mut dyn Bootstrap,
) -> Result<Vec<Vec<Joined>>, Fault> {
    let listener = listen(options.listen)?;
    let address = listener.local_addr().map_err(|error| Fault::system("finding the port", &error))?;
    let addresses = exchange(options, mesh_rank, address, bootstrap)?;
    let later =
        (0..mesh_rank.rank).flat_map(|rank| (0..options.streams).map(move |stream| (Instant::now(), rank, stream)));
    let joined = mesh_rank.world.iter().map(|_| (0..options.streams).map(|_| None).collect()).collect();
    let later = later.collect();
    let mut setup = MeshSetup { options, mesh_rank, addresses, listener, attempts: Vec::new(), later, joined };
    setup.run(watch)?;
    let streams = setup.joined.into_iter().map(|streams| streams.into_iter().flatten().collect());
    Ok(streams.collect())
}

fn listen(address: IpAddr) -> Result<TcpListener, Fault> {
    let listening = || {
        let socket = Socket::new(Domain::for_address((address, 0).into()), Type::STREAM, Some(Protocol::TCP))?;
        socket.bind(&SocketAddr::from((address, 0)).into())?;
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        Ok(TcpListener::from(socket))
    };
    listening().map_err(|error| Fault::system(format!("listening on {address}"), &error))
}

/// Tells all ranks where this one listens, and learns the same of them.
fn exchange(
    options: &TcpOptions,
    mesh_rank: &MeshRank,
    address: SocketAddr,
    bootstrap: &mut dyn Bootstrap,
) -> Result<Vec<SocketAddr>, Fault> {
    let mut blob = [0; BLOB_BYTES];
    (blob[0], blob[1]) = (BLOB_VERSION, options.streams as u8);
    blob[2..4].copy_from_slice(&address.port().to_le_bytes());
    let ip = match address.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    blob[4..].copy_from_slice(&ip.octets());
    let blobs = bootstrap.all_gather(&blob)?;
    if blobs.len() != mesh_rank.world.len() {
        return Err(Fault::BadCall(format!("{} addresses for {} ranks", blobs.len(), mesh_rank.world.len())));
    }
    let read = |(rank, blob): (usize, &Vec<u8>)| {
        let blob: [u8; BLOB_BYTES] = blob[..].try_into().ok()?;
        let octets: [u8; 16] = blob[4..].try_into().ok()?;
        let same = blob[..2] == [BLOB_VERSION, options.streams as u8];
        same.then(|| SocketAddr::new(Ipv6Addr::from(octets).to_canonical(), u16::from_le_bytes([blob[2], blob[3]])))
            .or_else(|| (rank == mesh_rank.rank).then_some(address))
    };
    let addresses: Option<Vec<SocketAddr>> = blobs.iter().enumerate().map(read).collect();
    addresses.ok_or_else(|| {
        Fault::BadCall("ranks disagree about the number of streams per link, or run different versions".into())
    })
}

impl MeshSetup<'_> {
    fn run(&mut self, watch: &Watch) -> Result<(), Fault> {
        let start = Instant::now();
        while let Some(missing) = self.missing() {
            watch.check()?;
            if start.elapsed() > self.options.connect_timeout {
                let peer = self.mesh_rank.world[missing];
                let waited_ms = start.elapsed().as_millis() as u64;
                return Err(Fault::Stalled {
                    peer,
                    host: watch.host(peer),
                    during: "the setup of all ranks".into(),
                    waited_ms,
                });
            }
            self.connect()?;
            let mut sockets = vec![poll::interest(self.listener.as_raw_fd(), true, false)];
            sockets.extend(self.attempts.iter().map(|attempt| {
                let connecting = attempt.stage == HandshakeStage::Connection;
                poll::interest(attempt.socket.as_raw_fd(), !connecting, connecting)
            }));
            if poll::wait(&mut sockets, POLL_INTERVAL) {
                self.advance(&sockets[1..]);
                self.accept();
            }
            self.expire();
        }
        Ok(())
    }

    /// A rank to which not all streams stand.
    fn missing(&self) -> Option<usize> {
        let whole = |rank: usize| rank == self.mesh_rank.rank || self.joined[rank].iter().all(Option::is_some);
        (0..self.joined.len()).find(|rank| !whole(*rank))
    }

    fn identity(&self, rank: usize, stream: usize) -> Identity {
        Identity {
            role: LinkRole::Data,
            rank: rank as u32,
            job: self.options.job,
            generation: self.options.generation,
            communicator: self.mesh_rank.communicator,
            stream: stream as u32,
        }
    }

    /// Starts the attempts that are due.
    fn connect(&mut self) -> Result<(), Fault> {
        let now = Instant::now();
        let due: Vec<_> = self.later.extract_if(.., |(at, ..)| *at <= now).collect();
        for (_, rank, stream) in due {
            let me = self.identity(self.mesh_rank.rank, stream);
            let initiator = Initiator::new(&self.options.key, me, Some(self.identity(rank, stream)))?;
            let Ok(socket) = start_connection(self.addresses[rank]) else {
                self.later.push((now + RETRY, rank, stream));
                continue;
            };
            self.attempts.push(Attempt::new(socket, HandshakeSide::Initiator(initiator)));
        }
        Ok(())
    }

    /// Accepts new connections: never so many at once that one would be dropped before it was read.
    fn accept(&mut self) {
        for _ in 0..UNAUTHENTICATED_MAX {
            let Ok((socket, _)) = self.listener.accept() else { return };
            let unauthenticated = self.attempts.iter().filter(|attempt| attempt.unauthenticated()).count();
            if unauthenticated >= UNAUTHENTICATED_MAX
                && let Some(oldest) = self.attempts.iter().position(Attempt::unauthenticated)
            {
                self.attempts.remove(oldest);
            }
            let me = self.identity(self.mesh_rank.rank, 0);
            if socket.set_nonblocking(true).is_ok() {
                self.attempts
                    .push(Attempt::new(socket, HandshakeSide::Responder(Responder::new(&self.options.key, me))));
            }
        }
    }

    /// Lets attempts that are ready take their next step.
    fn advance(&mut self, ready: &[libc::pollfd]) {
        let attempts = std::mem::take(&mut self.attempts);
        for (mut attempt, ready) in attempts.into_iter().zip(ready) {
            let step = if ready.revents == 0 { HandshakeStep::Waiting } else { attempt.step(|peer| self.wanted(peer)) };
            match step {
                HandshakeStep::Waiting => self.attempts.push(attempt),
                HandshakeStep::Done(session) => {
                    let slot = (session.peer.rank as usize, session.peer.stream as usize);
                    self.joined[slot.0][slot.1] = Some((attempt.socket, *session));
                }
                HandshakeStep::Dropped => self.again(&attempt),
            }
        }
    }

    /// Whether this end waits for a stream from `peer`. What belongs to an older generation is nobody's.
    fn wanted(&self, peer: &Identity) -> bool {
        let (rank, stream) = (peer.rank as usize, peer.stream as usize);
        *peer == self.identity(rank, stream)
            && rank > self.mesh_rank.rank
            && self.joined.get(rank).and_then(|streams| streams.get(stream)).is_some_and(Option::is_none)
    }

    /// An attempt of ours that failed is repeated.
    fn again(&mut self, attempt: &Attempt) {
        if let HandshakeSide::Initiator(initiator) = &attempt.side
            && let Some(peer) = initiator.expected()
        {
            self.later.push((Instant::now() + RETRY, peer.rank as usize, peer.stream as usize));
        }
    }

    /// Gives up on attempts that take too long.
    fn expire(&mut self) {
        let limit = self.options.handshake_timeout;
        let expired: Vec<_> = self.attempts.extract_if(.., |attempt| attempt.since.elapsed() > limit).collect();
        expired.iter().for_each(|attempt| self.again(attempt));
    }
}

fn start_connection(address: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(socket.into()),
    }
}

/// Sends a message of the handshake. A fresh socket takes it whole.
fn send_message(mut socket: &TcpStream, message: &[u8]) -> bool {
    socket.write(message).is_ok_and(|count| count == message.len())
}

impl Attempt {
    fn new(socket: TcpStream, side: HandshakeSide) -> Self {
        let stage = match side {
            HandshakeSide::Initiator(_) => HandshakeStage::Connection,
            HandshakeSide::Responder(_) => HandshakeStage::Hello,
        };
        Self { socket, side, stage, buffer: [0; HELLO_BYTES], filled: 0, since: Instant::now() }
    }

    /// Nothing authentic has come from there.
    fn unauthenticated(&self) -> bool {
        self.stage == HandshakeStage::Hello
    }

    /// One step of the handshake, as far as the bytes go. Whatever is wrong ends it without a word.
    fn step(&mut self, wanted: impl FnOnce(&Identity) -> bool) -> HandshakeStep {
        let expected = match self.stage {
            HandshakeStage::Connection => 0,
            HandshakeStage::Reply | HandshakeStage::Hello => HELLO_BYTES,
            HandshakeStage::Proof => PROOF_BYTES,
        };
        if expected > 0 {
            match (&self.socket).read(&mut self.buffer[self.filled..expected]) {
                Ok(0) => return HandshakeStep::Dropped,
                Ok(count) => self.filled += count,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(_) => return HandshakeStep::Dropped,
            }
        }
        if self.filled < expected {
            return HandshakeStep::Waiting;
        }
        self.filled = 0;
        self.answer(wanted).unwrap_or(HandshakeStep::Dropped)
    }

    /// Acts on a complete message; nothing if it is not what it should be.
    fn answer(&mut self, wanted: impl FnOnce(&Identity) -> bool) -> Option<HandshakeStep> {
        match (&mut self.side, self.stage) {
            (HandshakeSide::Initiator(initiator), HandshakeStage::Connection) => {
                let connected = matches!(self.socket.take_error(), Ok(None));
                (connected && send_message(&self.socket, initiator.hello())).then_some(())?;
                self.stage = HandshakeStage::Reply;
            }
            (HandshakeSide::Initiator(initiator), _) => {
                let (proof, session) = initiator.finish(&self.buffer).ok()?;
                send_message(&self.socket, &proof).then_some(())?;
                return Some(HandshakeStep::Done(Box::new(session)));
            }
            (HandshakeSide::Responder(responder), HandshakeStage::Hello) => {
                let reply = responder.reply_if(&self.buffer, wanted).ok()?;
                send_message(&self.socket, &reply).then_some(())?;
                self.stage = HandshakeStage::Proof;
            }
            (HandshakeSide::Responder(responder), _) => {
                let proof = self.buffer.first_chunk::<PROOF_BYTES>()?;
                return Some(HandshakeStep::Done(Box::new(responder.finish(proof).ok()?)));
            }
        }
        Some(HandshakeStep::Waiting)
    }
}

/// Settings of a stream that stands.
pub fn tune(socket: &TcpStream, socket_bytes: usize, stall: Duration) -> std::io::Result<()> {
    let local = socket.peer_addr()?.ip() == socket.local_addr()?.ip();
    let socket = socket2::SockRef::from(socket);
    socket.set_tcp_nodelay(true)?;
    if local {
        // Within a host nothing is lost, and pacing by a model of a network only slows down. If it is not to be had, the
        // system's choice does.
        let _ = socket.set_tcp_congestion(b"reno");
    }
    if socket_bytes > 0 {
        socket.set_send_buffer_size(socket_bytes)?;
        socket.set_recv_buffer_size(socket_bytes)?;
    }
    let pause = probe_pause(stall / STALL_HEARTBEATS);
    let keepalive = TcpKeepalive::new().with_time(pause).with_interval(pause).with_retries(KEEPALIVE_PROBES);
    socket.set_tcp_keepalive(&keepalive)?;
    // It also ends links to peers that are alive and do not read, so it must not be shorter than a call may take.
    socket.set_tcp_user_timeout(Some(stall))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::{HELLO_BYTES, PROOF_BYTES};
    use crate::communicator::CALL_BYTES_MAX;
    use crate::failure_report::FAILURE_BYTES_MAX;
    use crate::record::RECORD_BYTES_MAX;
    use crate::tcp::STREAMS_MAX;
    use crate::tcp::frame::SEGMENT_BYTES_MAX;

    fn document(name: &str) -> String {
        let path = format!("{}/../../docs/{name}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}")).replace('\n', " ")
    }

    /// The documents name these limits, for those who write another end of the link.
    #[test]
    fn limits_are_as_documented() {
        let options = TcpOptions::local(crate::JobKey::fresh().unwrap(), 1);
        let seconds = options.handshake_timeout.as_secs();
        let rows = [
            ("hello, reply", format!("{HELLO_BYTES} bytes")),
            ("proof", format!("{PROOF_BYTES} bytes")),
            ("payload of a record", format!("{} MiB", RECORD_BYTES_MAX >> 20)),
            ("payload of a frame", format!("{} MiB", SEGMENT_BYTES_MAX >> 20)),
            ("failure report", format!("{} KiB", FAILURE_BYTES_MAX >> 10)),
            ("bytes of one call", format!("{} TiB", CALL_BYTES_MAX >> 40)),
            ("streams between two ranks", STREAMS_MAX.to_string()),
            (
                "held for receives that have not come",
                format!("{} MiB per peer by default", options.held_bytes_max >> 20),
            ),
            ("connections at a rank's listener without an authentic hello", UNAUTHENTICATED_MAX.to_string()),
            ("time to authenticate", format!("{seconds} s by default")),
        ];
        let wire = document("wire.md");
        for (what, value) in rows {
            assert!(wire.contains(&format!("| {what} | {value} |")), "{what}: {value}");
        }
        let threats = document("threat-model.md");
        let slow =
            format!("{seconds} seconds to authenticate; at most {UNAUTHENTICATED_MAX} unauthenticated connections");
        assert!(threats.contains(&slow), "{slow}");
    }
}
