//! The listener on which members of a job connect to the coordinator. A connection gets no answer, and at most a fixed number
//! of its bytes is read, before the handshake has proved that it holds the job's key.

use crate::message::ANY_RANK;
use kolo_comm::auth::{HELLO_BYTES, Identity, Initiator, JobKey, LinkRole, LinkSession, PROOF_BYTES, Responder};
use kolo_comm::{Fault, fault::rank_name};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Unfinished handshakes, beside those of the expected members; beyond this the oldest connection is dropped.
const HANDSHAKES_MAX: usize = 256;
/// Pause between two tries to connect.
const RETRY: Duration = Duration::from_millis(50);

pub(crate) struct Listener {
    listener: TcpListener,
    key: JobKey,
    me: Identity,
    handshakes: Vec<Handshake>,
    handshakes_max: usize,
}

/// A connection that has not proved yet who it is.
struct Handshake {
    stream: TcpStream,
    responder: Responder,
    bytes: [u8; HELLO_BYTES],
    filled: usize,
    replied: bool,
    deadline: Instant,
}

/// How far a handshake has come.
enum HandshakeState {
    Pending,
    Failed,
    Authenticated(LinkSession),
}

pub(crate) fn coordinator_identity(job: u64, generation: u32) -> Identity {
    Identity::new(LinkRole::Coordinator, 0, job, u64::from(generation))
}

impl Listener {
    /// Listens on this address only.
    pub fn open(address: IpAddr, key: JobKey, me: Identity, world: usize) -> Result<(Self, SocketAddr), Fault> {
        let refused = |error: std::io::Error| Fault::system(format!("listening on {address}"), &error);
        let listener = TcpListener::bind((address, 0)).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        Ok((Self { listener, key, me, handshakes: Vec::new(), handshakes_max: HANDSHAKES_MAX + world }, address))
    }

    pub fn interests(&self) -> impl Iterator<Item = (RawFd, i16)> {
        let own = std::iter::once(self.listener.as_raw_fd());
        own.chain(self.handshakes.iter().map(|handshake| handshake.stream.as_raw_fd())).map(|fd| (fd, libc::POLLIN))
    }

    /// The connections that have finished their handshake since the last call.
    pub fn accept(&mut self) -> Vec<(TcpStream, LinkSession)> {
        while let Ok((stream, _)) = self.listener.accept() {
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.handshakes.len() >= self.handshakes_max {
                self.handshakes.remove(0);
            }
            let responder = Responder::new(&self.key, self.me);
            let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
            self.handshakes.push(Handshake {
                stream,
                responder,
                bytes: [0; HELLO_BYTES],
                filled: 0,
                replied: false,
                deadline,
            });
        }
        let mut accepted = Vec::new();
        for mut handshake in std::mem::take(&mut self.handshakes) {
            match handshake.advance() {
                HandshakeState::Pending => self.handshakes.push(handshake),
                HandshakeState::Failed => {}
                HandshakeState::Authenticated(session) => {
                    if session.peer.role == LinkRole::Member {
                        accepted.push((handshake.stream, session));
                    }
                }
            }
        }
        accepted
    }
}

impl Handshake {
    fn advance(&mut self) -> HandshakeState {
        loop {
            let wanted = if self.replied { PROOF_BYTES } else { HELLO_BYTES };
            match self.stream.read(&mut self.bytes[self.filled..wanted]) {
                Ok(0) => return HandshakeState::Failed,
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() != ErrorKind::WouldBlock => return HandshakeState::Failed,
                Err(_) if Instant::now() > self.deadline => return HandshakeState::Failed,
                Err(_) => return HandshakeState::Pending,
            }
            if self.filled < wanted {
                continue;
            }
            if self.replied {
                let mut proof = [0; PROOF_BYTES];
                proof.copy_from_slice(&self.bytes[..PROOF_BYTES]);
                return self.responder.finish(&proof).map_or(HandshakeState::Failed, HandshakeState::Authenticated);
            }
            let Ok(reply) = self.responder.reply(&self.bytes) else { return HandshakeState::Failed };
            // A fresh socket takes these few bytes at once.
            if !matches!(self.stream.write(&reply), Ok(HELLO_BYTES)) {
                return HandshakeState::Failed;
            }
            (self.replied, self.filled) = (true, 0);
        }
    }
}

/// Connects to the coordinator as this rank; keeps trying until the deadline.
pub(crate) fn connect(
    address: SocketAddr,
    key: &JobKey,
    job: u64,
    generation: u32,
    rank: usize,
    deadline: Instant,
) -> Result<(TcpStream, LinkSession), Fault> {
    loop {
        let me = Identity::new(LinkRole::Member, rank, job, u64::from(generation));
        let error = match connect_once(address, key, me, coordinator_identity(job, generation), deadline) {
            Ok(connected) => return Ok(connected),
            Err(error) => error,
        };
        if Instant::now() + RETRY > deadline {
            return Err(Fault::System {
                what: match rank {
                    ANY_RANK => format!("reaching the coordinator of the job at {address}"),
                    rank => format!("{}: reaching the coordinator at {address}", rank_name(rank, &crate::host_name())),
                },
                error: format!(
                    "{error}\n  hint: the coordinator has ended or is stopped, this host cannot reach its address (--interface), or a firewall blocks it"
                ),
            });
        }
        std::thread::sleep(RETRY);
    }
}

fn connect_once(
    address: SocketAddr,
    key: &JobKey,
    me: Identity,
    peer: Identity,
    deadline: Instant,
) -> Result<(TcpStream, LinkSession), String> {
    let left = || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let text = |error: std::io::Error| error.to_string();
    let mut stream = TcpStream::connect_timeout(&address, left()).map_err(text)?;
    stream.set_read_timeout(Some(left().min(HANDSHAKE_TIMEOUT))).map_err(text)?;
    stream.set_write_timeout(Some(left().min(HANDSHAKE_TIMEOUT))).map_err(text)?;
    let initiator = Initiator::new(key, me, Some(peer)).map_err(|fault| fault.to_string())?;
    stream.write_all(initiator.hello()).map_err(text)?;
    let mut reply = [0; HELLO_BYTES];
    stream.read_exact(&mut reply).map_err(text)?;
    let (proof, session) = initiator.finish(&reply).map_err(|refused| refused.to_string())?;
    stream.write_all(&proof).map_err(text)?;
    Ok((stream, session))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn its_limit_is_as_documented() {
        for (name, text) in [
            ("wire.md", format!("| the same at the coordinator's | {HANDSHAKES_MAX}, and one for each rank |")),
            ("threat-model.md", format!("at the coordinator's {HANDSHAKES_MAX} and one for each rank")),
        ] {
            let path = format!("{}/../../docs/{name}", env!("CARGO_MANIFEST_DIR"));
            let document = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert!(document.contains(&text), "{name}: {text}");
        }
    }

    #[test]
    fn unauthenticated_connections_get_no_byte_and_do_not_keep_members_out() {
        let key = JobKey::fresh().unwrap();
        let (mut listener, address) =
            Listener::open(Ipv4Addr::LOCALHOST.into(), key.clone(), coordinator_identity(7, 0), 1).unwrap();
        let mut silent = Vec::new();
        for _ in 0..HANDSHAKES_MAX + 40 {
            silent.push(TcpStream::connect(address).unwrap());
            assert!(listener.accept().is_empty());
        }
        let mut loud = TcpStream::connect(address).unwrap();
        loud.write_all(&[7; HELLO_BYTES + 50]).unwrap();
        let other = JobKey::fresh().unwrap();
        let mut wrong = TcpStream::connect(address).unwrap();
        let me = Identity::new(LinkRole::Member, 0, 7, 0);
        wrong.write_all(Initiator::new(&other, me, None).unwrap().hello()).unwrap();
        let member = std::thread::spawn(move || {
            connect(address, &key, 7, 0, 0, Instant::now() + Duration::from_secs(60)).map(|(_, session)| session.peer)
        });
        let mut accepted = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(60);
        while accepted.is_empty() && Instant::now() < deadline {
            accepted.extend(listener.accept());
            assert!(listener.handshakes.len() <= listener.handshakes_max);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!((accepted.len(), accepted[0].1.peer), (1, me));
        assert_eq!(member.join().unwrap().unwrap(), coordinator_identity(7, 0));
        for mut rejected in [loud, wrong] {
            let mut answer = Vec::new();
            let _ = rejected.read_to_end(&mut answer);
            assert!(answer.is_empty());
        }
        drop(silent);
    }
}
