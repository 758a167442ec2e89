//! A blocking, authenticated link over a TCP or Unix stream, for the messages that hold a job together.
//!
//! Records arrive whole, unchanged, once, and in order, or the link fails. Nothing is sent to, and nothing beyond one
//! message of fixed size is read from, a stranger.

use crate::auth::{HELLO_BYTES, Identity, Initiator, JobKey, PROOF_BYTES, Responder, Session};
use crate::fault::{Fault, place};
use crate::record::{RECORD_BYTES_MAX, RecordKind, RecordReader, Sealer, seal_record};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How long a record may take to leave, unless [`Sender::set_limit`] says otherwise.
pub const SEND_LIMIT: Duration = Duration::from_secs(10);
/// The socket's clock is coarse: a shorter limit would mean none at all.
const TIMEOUT_MIN: Duration = Duration::from_millis(1);

/// A connected byte stream that can be shared between two threads.
pub trait Stream: Read + Write + Send + Sized + 'static {
    fn try_clone(&self) -> std::io::Result<Self>;
    fn set_read_timeout(&self, limit: Option<Duration>) -> std::io::Result<()>;
    fn set_write_timeout(&self, limit: Option<Duration>) -> std::io::Result<()>;
    /// Ends both directions, also for clones that wait in another thread.
    fn shutdown(&self);
    /// Blocking, and without delay for small records.
    fn prepare(&self) -> std::io::Result<()>;
    /// The other end, for messages.
    fn describe(&self) -> String;
}

impl Stream for TcpStream {
    fn try_clone(&self) -> std::io::Result<Self> {
        TcpStream::try_clone(self)
    }
    fn set_read_timeout(&self, limit: Option<Duration>) -> std::io::Result<()> {
        TcpStream::set_read_timeout(self, limit)
    }
    fn set_write_timeout(&self, limit: Option<Duration>) -> std::io::Result<()> {
        TcpStream::set_write_timeout(self, limit)
    }
    fn shutdown(&self) {
        let _ = TcpStream::shutdown(self, Shutdown::Both);
    }
    fn prepare(&self) -> std::io::Result<()> {
        self.set_nonblocking(false)?;
        self.set_nodelay(true)
    }
    fn describe(&self) -> String {
        self.peer_addr().map_or_else(|_| "an unknown address".into(), |address| address.to_string())
    }
}

impl Stream for UnixStream {
    fn try_clone(&self) -> std::io::Result<Self> {
        UnixStream::try_clone(self)
    }
    fn set_read_timeout(&self, limit: Option<Duration>) -> std::io::Result<()> {
        UnixStream::set_read_timeout(self, limit)
    }
    fn set_write_timeout(&self, limit: Option<Duration>) -> std::io::Result<()> {
        UnixStream::set_write_timeout(self, limit)
    }
    fn shutdown(&self) {
        let _ = UnixStream::shutdown(self, Shutdown::Both);
    }
    fn prepare(&self) -> std::io::Result<()> {
        self.set_nonblocking(false)
    }
    fn describe(&self) -> String {
        "a local socket".into()
    }
}

/// What came of a receive with a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// A whole record is in the buffer.
    Record,
    /// The deadline passed first. What has come of a record is kept.
    Nothing,
    /// The peer said goodbye.
    End,
}

/// Both halves of a link.
#[derive(Debug)]
pub struct Link<S> {
    sender: Sender<S>,
    receiver: Receiver<S>,
}

/// The half that sends.
#[derive(Debug)]
pub struct Sender<S> {
    stream: S,
    peer: Peer,
    sealer: Sealer,
    scratch: Vec<u8>,
    limit: Duration,
    broken: bool,
}

/// The half that receives.
#[derive(Debug)]
pub struct Receiver<S> {
    stream: S,
    peer: Peer,
    reader: RecordReader,
    ended: bool,
}

#[derive(Clone, Debug)]
struct Peer {
    identity: Identity,
    host: String,
}

impl Peer {
    fn rank(&self) -> usize {
        self.identity.rank as usize
    }

    fn lost(&self, why: impl Into<String>) -> Fault {
        Fault::Lost { peer: self.rank(), host: self.host.clone(), during: "a talk on its link".into(), why: why.into() }
    }

    fn rejected(&self, why: impl ToString) -> Fault {
        Fault::Rejected { from: place(self.rank(), &self.host), why: why.to_string() }
    }
}

fn timed_out(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// Fills `bytes` by the deadline, during the handshake.
fn read_by<S: Stream>(stream: &mut S, mut bytes: &mut [u8], deadline: Instant) -> Result<(), Fault> {
    let rejected = |stream: &S, why: String| Fault::Rejected { from: stream.describe(), why };
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(rejected(stream, "it did not authenticate in time".into()));
        }
        stream
            .set_read_timeout(Some(left.max(TIMEOUT_MIN)))
            .map_err(|error| Fault::system("setting a socket's time limit", &error))?;
        match stream.read(bytes) {
            Ok(0) => return Err(rejected(stream, "it closed the link without authenticating".into())),
            Ok(count) => bytes = &mut bytes[count..],
            Err(error) if timed_out(&error) || error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(rejected(stream, error.to_string())),
        }
    }
    Ok(())
}

/// Writes a message of the handshake by the deadline.
fn write_by<S: Stream>(stream: &mut S, mut bytes: &[u8], deadline: Instant) -> Result<(), Fault> {
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        let from = stream.describe();
        if left.is_zero() {
            return Err(Fault::Rejected { from, why: "it did not take our side of the handshake in time".into() });
        }
        stream
            .set_write_timeout(Some(left.max(TIMEOUT_MIN)))
            .map_err(|error| Fault::system("setting a socket's time limit", &error))?;
        match stream.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if timed_out(&error) || error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(Fault::Rejected { from, why: error.to_string() }),
        }
    }
    Ok(())
}

impl<S: Stream> Link<S> {
    /// The connecting end. With `peer`, only that one will do.
    pub fn connect(
        mut stream: S,
        key: &JobKey,
        me: Identity,
        peer: Option<Identity>,
        deadline: Instant,
    ) -> Result<Self, Fault> {
        stream.prepare().map_err(|error| Fault::system("preparing a socket", &error))?;
        let initiator = Initiator::new(key, me, peer)?;
        write_by(&mut stream, initiator.hello(), deadline)?;
        let mut reply = [0; HELLO_BYTES];
        read_by(&mut stream, &mut reply, deadline)?;
        let refused = |why: crate::auth::Refused| Fault::Rejected { from: stream.describe(), why: why.0 };
        let (proof, session) = initiator.finish(&reply).map_err(refused)?;
        write_by(&mut stream, &proof, deadline)?;
        Self::established(stream, session)
    }

    /// The listening end. The caller looks at [`Link::peer`] for who came; only the job is checked here.
    pub fn accept(mut stream: S, key: &JobKey, me: Identity, deadline: Instant) -> Result<Self, Fault> {
        stream.prepare().map_err(|error| Fault::system("preparing a socket", &error))?;
        let mut responder = Responder::new(key, me);
        let mut hello = [0; HELLO_BYTES];
        read_by(&mut stream, &mut hello, deadline)?;
        let from = stream.describe();
        let refused = |why: crate::auth::Refused| Fault::Rejected { from: from.clone(), why: why.0 };
        let reply = responder.reply(&hello).map_err(refused)?;
        write_by(&mut stream, &reply, deadline)?;
        let mut proof = [0; PROOF_BYTES];
        read_by(&mut stream, &mut proof, deadline)?;
        let session = responder.finish(&proof).map_err(refused)?;
        Self::established(stream, session)
    }

    fn established(stream: S, session: Session) -> Result<Self, Fault> {
        let system = |error: std::io::Error| Fault::system("setting up a link", &error);
        stream.set_read_timeout(None).map_err(system)?;
        stream.set_write_timeout(Some(SEND_LIMIT)).map_err(system)?;
        let peer = Peer { identity: session.peer, host: String::new() };
        let sender = Sender {
            stream: stream.try_clone().map_err(system)?,
            peer: peer.clone(),
            sealer: session.sealer,
            scratch: Vec::new(),
            limit: SEND_LIMIT,
            broken: false,
        };
        let receiver = Receiver { stream, peer, reader: RecordReader::new(session.opener), ended: false };
        Ok(Self { sender, receiver })
    }

    pub fn peer(&self) -> &Identity {
        &self.sender.peer.identity
    }

    /// The peer's host, for messages.
    pub fn set_host(&mut self, host: &str) {
        self.sender.peer.host = host.into();
        self.receiver.peer.host = host.into();
    }

    /// Halves for two threads.
    pub fn split(self) -> (Sender<S>, Receiver<S>) {
        (self.sender, self.receiver)
    }

    pub fn sender(&mut self) -> &mut Sender<S> {
        &mut self.sender
    }

    pub fn receiver(&mut self) -> &mut Receiver<S> {
        &mut self.receiver
    }

    /// As [`Sender::send`].
    pub fn send(&mut self, record: &[u8]) -> Result<(), Fault> {
        self.sender.send(record)
    }

    /// As [`Receiver::recv`].
    pub fn recv(&mut self, record: &mut Vec<u8>) -> Result<(), Fault> {
        self.receiver.recv(record)
    }

    /// As [`Receiver::recv_by`].
    pub fn recv_by(&mut self, record: &mut Vec<u8>, deadline: Instant) -> Result<Received, Fault> {
        self.receiver.recv_by(record, deadline)
    }
}

impl<S: Stream> Sender<S> {
    pub fn peer(&self) -> &Identity {
        &self.peer.identity
    }

    /// How long a record may take to leave.
    pub fn set_limit(&mut self, limit: Duration) -> Result<(), Fault> {
        self.limit = limit.max(TIMEOUT_MIN);
        self.stream
            .set_write_timeout(Some(self.limit))
            .map_err(|error| Fault::system("setting a socket's time limit", &error))
    }

    /// Sends one record; it has left this process when this returns. After a fault the link is of no more use.
    pub fn send(&mut self, record: &[u8]) -> Result<(), Fault> {
        if record.len() > RECORD_BYTES_MAX {
            let text = format!("a record of {} bytes; the largest is {RECORD_BYTES_MAX}", record.len());
            return Err(Fault::BadCall(text));
        }
        self.write(RecordKind::Data, record)
    }

    /// Says that nothing more will come. The other direction stays open.
    pub fn goodbye(&mut self) -> Result<(), Fault> {
        self.write(RecordKind::Goodbye, &[])
    }

    /// Ends the link at once, also for a receiver that waits in another thread.
    pub fn shutdown(&mut self) {
        self.broken = true;
        self.stream.shutdown();
    }

    fn write(&mut self, kind: RecordKind, record: &[u8]) -> Result<(), Fault> {
        if self.broken {
            return Err(self.peer.lost("the link failed earlier"));
        }
        self.scratch.clear();
        seal_record(&mut self.sealer, kind, record, &mut self.scratch);
        let outcome = self.write_out();
        self.broken = outcome.is_err();
        outcome
    }

    fn write_out(&mut self) -> Result<(), Fault> {
        let start = Instant::now();
        let mut bytes = &self.scratch[..];
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if timed_out(&error) => {}
                Err(error) => return Err(self.peer.lost(error.to_string())),
            }
            if !bytes.is_empty() && start.elapsed() > self.limit {
                let waited_ms = start.elapsed().as_millis() as u64;
                let (peer, host) = (self.peer.rank(), self.peer.host.clone());
                return Err(Fault::Stalled { peer, host, during: "taking a message".into(), waited_ms });
            }
        }
        Ok(())
    }
}

impl<S: Stream> Receiver<S> {
    pub fn peer(&self) -> &Identity {
        &self.peer.identity
    }

    /// Waits for the next record, however long. A goodbye is a loss here.
    pub fn recv(&mut self, record: &mut Vec<u8>) -> Result<(), Fault> {
        match self.next(record, None)? {
            Received::Record => Ok(()),
            Received::Nothing | Received::End => Err(self.peer.lost("it said goodbye")),
        }
    }

    /// Waits for the next record until the deadline.
    pub fn recv_by(&mut self, record: &mut Vec<u8>, deadline: Instant) -> Result<Received, Fault> {
        self.next(record, Some(deadline))
    }

    fn next(&mut self, record: &mut Vec<u8>, deadline: Option<Instant>) -> Result<Received, Fault> {
        if self.ended {
            return Ok(Received::End);
        }
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            self.stream
                .set_read_timeout(left.map(|left| left.max(TIMEOUT_MIN)))
                .map_err(|error| Fault::system("setting a socket's time limit", &error))?;
            let count = match self.stream.read(self.reader.space()) {
                Ok(0) if self.reader.within() => return Err(self.peer.lost("the link ended within a record")),
                Ok(0) => return Err(self.peer.lost("the link ended without a goodbye")),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if timed_out(&error) && left.is_some_and(|left| left <= TIMEOUT_MIN) => {
                    return Ok(Received::Nothing);
                }
                Err(error) if timed_out(&error) => continue,
                Err(error) => return Err(self.peer.lost(error.to_string())),
            };
            match self.reader.filled(count, record).map_err(|forged| self.peer.rejected(forged))? {
                None => {}
                Some(RecordKind::Data) => return Ok(Received::Record),
                Some(RecordKind::Goodbye) => {
                    self.ended = true;
                    return Ok(Received::End);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::Role;
    use std::net::TcpListener;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    fn pair<S: Stream>(here: S, there: S) -> (Link<S>, Link<S>) {
        let key = JobKey::fresh().unwrap();
        let other = key.clone();
        let me = Identity::new(Role::Member, 4, 1, 0);
        let boss = Identity::new(Role::Coordinator, 0, 1, 0);
        let thread = std::thread::spawn(move || Link::accept(there, &other, boss, soon()).unwrap());
        let link = Link::connect(here, &key, me, Some(boss), soon()).unwrap();
        (link, thread.join().unwrap())
    }

    fn tcp() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (here, listener.accept().unwrap().0)
    }

    fn talk<S: Stream>(here: S, there: S) {
        let (mut link, other) = pair(here, there);
        assert_eq!(other.peer().rank, 4);
        let (mut sender, mut receiver) = other.split();
        let echo = std::thread::spawn(move || {
            let mut record = Vec::new();
            while receiver.recv_by(&mut record, soon()).unwrap() == Received::Record {
                sender.send(&record).unwrap();
            }
            sender.goodbye().unwrap();
        });
        let mut record = Vec::new();
        for bytes in [0, 1, 7, 100_000, RECORD_BYTES_MAX] {
            let text = vec![bytes as u8; bytes];
            let (sender, receiver) = (&mut link.sender, &mut link.receiver);
            std::thread::scope(|scope| {
                scope.spawn(|| sender.send(&text).unwrap());
                receiver.recv(&mut record).unwrap();
            });
            assert_eq!(record, text);
        }
        let nothing = link.recv_by(&mut record, Instant::now() + Duration::from_millis(20)).unwrap();
        assert_eq!(nothing, Received::Nothing);
        link.sender().goodbye().unwrap();
        assert_eq!(link.recv_by(&mut record, soon()).unwrap(), Received::End);
        assert!(matches!(link.send(&vec![0; RECORD_BYTES_MAX + 1]), Err(Fault::BadCall(_))));
        echo.join().unwrap();
    }

    #[test]
    fn records_cross_tcp_and_unix_streams() {
        let (here, there) = tcp();
        talk(here, there);
        let (here, there) = UnixStream::pair().unwrap();
        talk(here, there);
    }

    #[test]
    fn a_vanished_peer_is_named_and_a_stranger_gets_no_byte() {
        let (here, there) = tcp();
        let (mut link, other) = pair(here, there);
        link.set_host("node7");
        drop(other);
        let fault = link.recv(&mut Vec::new()).unwrap_err();
        assert!(matches!(&fault, Fault::Lost { peer: 0, host, .. } if host == "node7"), "{fault}");
        let (mut here, there) = tcp();
        here.write_all(&[7; 300]).unwrap();
        let key = JobKey::fresh().unwrap();
        let me = Identity::new(Role::Coordinator, 0, 1, 0);
        assert!(matches!(Link::accept(there, &key, me, soon()), Err(Fault::Rejected { .. })));
        let mut answer = Vec::new();
        let _ = here.read_to_end(&mut answer);
        assert!(answer.is_empty());
    }

    #[test]
    fn a_silent_stranger_is_dropped_at_the_deadline() {
        let (_here, there) = tcp();
        let key = JobKey::fresh().unwrap();
        let me = Identity::new(Role::Coordinator, 0, 1, 0);
        let deadline = Instant::now() + Duration::from_millis(50);
        assert!(matches!(Link::accept(there, &key, me, deadline), Err(Fault::Rejected { .. })));
    }
}
