//! Where members of a job come in over the network: nobody gets an answer, or more than a fixed number of bytes read,
//! before it has proved that it holds the job's key.

use kolo_comm::auth::{HELLO_BYTES, Identity, Initiator, JobKey, PROOF_BYTES, Responder, Role, Session};
use kolo_comm::{Fault, fault::place};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// How long a guest may take to prove who it is.
const PROOF_LIMIT: Duration = Duration::from_secs(5);
/// Guests, beside the expected ones, who may be at the door at a time; then the one waiting longest has to go.
const GUESTS_MAX: usize = 256;
/// Pause between two tries to connect.
const RETRY: Duration = Duration::from_millis(50);

pub(crate) struct Hall {
    listener: TcpListener,
    key: JobKey,
    me: Identity,
    guests: Vec<Guest>,
    guests_max: usize,
}

/// Somebody at the door.
struct Guest {
    stream: TcpStream,
    responder: Responder,
    bytes: [u8; HELLO_BYTES],
    filled: usize,
    replied: bool,
    deadline: Instant,
}

/// What became of a guest.
enum Look {
    Waits,
    Leaves,
    Enters(Session),
}

pub(crate) fn coordinator(job: u64, generation: u32) -> Identity {
    Identity::new(Role::Coordinator, 0, job, u64::from(generation))
}

impl Hall {
    /// Listens on this address only.
    pub fn open(address: IpAddr, key: JobKey, me: Identity, world: usize) -> Result<(Self, SocketAddr), Fault> {
        let refused = |error: std::io::Error| Fault::system(format!("listening on {address}"), &error);
        let listener = TcpListener::bind((address, 0)).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        Ok((Self { listener, key, me, guests: Vec::new(), guests_max: GUESTS_MAX + world }, address))
    }

    pub fn interests(&self) -> impl Iterator<Item = (RawFd, i16)> {
        let door = std::iter::once(self.listener.as_raw_fd());
        door.chain(self.guests.iter().map(|guest| guest.stream.as_raw_fd())).map(|fd| (fd, libc::POLLIN))
    }

    /// Those who have proved who they are since the last time.
    pub fn accept(&mut self) -> Vec<(TcpStream, Session)> {
        while let Ok((stream, _)) = self.listener.accept() {
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.guests.len() >= self.guests_max {
                self.guests.remove(0);
            }
            let responder = Responder::new(&self.key, self.me);
            let deadline = Instant::now() + PROOF_LIMIT;
            self.guests.push(Guest { stream, responder, bytes: [0; HELLO_BYTES], filled: 0, replied: false, deadline });
        }
        let mut entered = Vec::new();
        for mut guest in std::mem::take(&mut self.guests) {
            match guest.look() {
                Look::Waits => self.guests.push(guest),
                Look::Leaves => {}
                Look::Enters(session) => {
                    if session.peer.role == Role::Member {
                        entered.push((guest.stream, session));
                    }
                }
            }
        }
        entered
    }
}

impl Guest {
    fn look(&mut self) -> Look {
        loop {
            let wanted = if self.replied { PROOF_BYTES } else { HELLO_BYTES };
            match self.stream.read(&mut self.bytes[self.filled..wanted]) {
                Ok(0) => return Look::Leaves,
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Look::Leaves,
                Err(_) if Instant::now() > self.deadline => return Look::Leaves,
                Err(_) => return Look::Waits,
            }
            if self.filled < wanted {
                continue;
            }
            if self.replied {
                let mut proof = [0; PROOF_BYTES];
                proof.copy_from_slice(&self.bytes[..PROOF_BYTES]);
                return self.responder.finish(&proof).map_or(Look::Leaves, Look::Enters);
            }
            let Ok(reply) = self.responder.reply(&self.bytes) else { return Look::Leaves };
            // A fresh socket takes these few bytes at once.
            if !matches!(self.stream.write(&reply), Ok(HELLO_BYTES)) {
                return Look::Leaves;
            }
            (self.replied, self.filled) = (true, 0);
        }
    }
}

/// Connects to the coordinator as this rank; keeps trying until the deadline.
pub(crate) fn enter(
    address: SocketAddr,
    key: &JobKey,
    job: u64,
    generation: u32,
    rank: usize,
    deadline: Instant,
) -> Result<(TcpStream, Session), Fault> {
    loop {
        let me = Identity::new(Role::Member, rank, job, u64::from(generation));
        let error = match knock(address, key, me, coordinator(job, generation), deadline) {
            Ok(entered) => return Ok(entered),
            Err(error) => error,
        };
        if Instant::now() + RETRY > deadline {
            return Err(Fault::System {
                what: format!("{}: reaching the coordinator at {address}", place(rank, &crate::host_name())),
                error: format!(
                    "{error}\n  hint: the coordinator has ended, is stopped, or listens on an address that this host cannot reach (--interface); or a firewall stands between the hosts"
                ),
            });
        }
        std::thread::sleep(RETRY);
    }
}

fn knock(
    address: SocketAddr,
    key: &JobKey,
    me: Identity,
    peer: Identity,
    deadline: Instant,
) -> Result<(TcpStream, Session), String> {
    let left = || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let text = |error: std::io::Error| error.to_string();
    let mut stream = TcpStream::connect_timeout(&address, left()).map_err(text)?;
    stream.set_read_timeout(Some(left().min(PROOF_LIMIT))).map_err(text)?;
    stream.set_write_timeout(Some(left().min(PROOF_LIMIT))).map_err(text)?;
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
    fn strangers_get_no_byte_and_do_not_keep_members_out() {
        let key = JobKey::fresh().unwrap();
        let (mut hall, address) = Hall::open(Ipv4Addr::LOCALHOST.into(), key.clone(), coordinator(7, 0), 1).unwrap();
        let mut silent = Vec::new();
        for _ in 0..GUESTS_MAX + 40 {
            silent.push(TcpStream::connect(address).unwrap());
            assert!(hall.accept().is_empty());
        }
        let mut loud = TcpStream::connect(address).unwrap();
        loud.write_all(&[7; HELLO_BYTES + 50]).unwrap();
        let other = JobKey::fresh().unwrap();
        let mut wrong = TcpStream::connect(address).unwrap();
        let me = Identity::new(Role::Member, 0, 7, 0);
        wrong.write_all(Initiator::new(&other, me, None).unwrap().hello()).unwrap();
        let member = std::thread::spawn(move || {
            enter(address, &key, 7, 0, 0, Instant::now() + Duration::from_secs(60)).map(|(_, session)| session.peer)
        });
        let mut entered = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(60);
        while entered.is_empty() && Instant::now() < deadline {
            entered.extend(hall.accept());
            assert!(hall.guests.len() <= hall.guests_max);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!((entered.len(), entered[0].1.peer), (1, me));
        assert_eq!(member.join().unwrap().unwrap(), coordinator(7, 0));
        for mut stranger in [loud, wrong] {
            let mut answer = Vec::new();
            let _ = stranger.read_to_end(&mut answer);
            assert!(answer.is_empty());
        }
        drop(silent);
    }
}
