//! Who may speak on a link: the job's key, and the three messages by which two ends prove that they hold it.
//!
//! The initiator speaks first; its hello is already authenticated, so a listener answers nobody who does not hold the key.
//! The responder's reply covers the hello's nonce, the initiator's proof covers the reply's nonce: both ends are alive
//! now, and a recorded hello leads nowhere. Both directions get keys of their own from the two messages. Nothing here does
//! any input or output; `docs/wire.md` has the bytes.

use crate::fault::Fault;
use crate::record::{LinkKey, Opener, Sealer};
use kolo_base::ByteReader;
use std::io::{Read, Write};
use zeroize::Zeroizing;

pub const KEY_BYTES: usize = 32;
pub const NONCE_BYTES: usize = 32;
/// Bytes of a hello and of a reply.
pub const HELLO_BYTES: usize = 112;
/// Bytes of the initiator's proof.
pub const PROOF_BYTES: usize = 32;

/// Bytes of a hello before its authenticator.
const BODY_BYTES: usize = HELLO_BYTES - 32;
const MAGIC: [u8; 8] = *b"kololink";
const VERSION: u16 = 1;
/// A hello to whoever listens there.
const ANYBODY: u32 = u32::MAX;

/// The secret of one launch of one job. It is never printed, and wiped from memory when dropped.
#[derive(Clone)]
pub struct JobKey(Secret);

/// Wiped from memory when dropped.
type Secret = Zeroizing<[u8; KEY_BYTES]>;

impl std::fmt::Debug for JobKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JobKey")
    }
}

impl JobKey {
    /// A new key from the operating system's random numbers.
    pub fn fresh() -> Result<Self, Fault> {
        Ok(Self(Zeroizing::new(random()?)))
    }

    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// For handing over to another process, through a pipe that nobody else can read.
    pub fn write_to(&self, pipe: &mut impl Write) -> std::io::Result<()> {
        pipe.write_all(&*self.0)
    }

    /// The other end of [`JobKey::write_to`].
    pub fn read_from(pipe: &mut impl Read) -> std::io::Result<Self> {
        let mut key = Self(Secret::default());
        pipe.read_exact(&mut *key.0)?;
        Ok(key)
    }

    /// The bytes themselves, for engines that carry a key in their own messages.
    pub fn expose(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }

    /// A key for one purpose.
    fn derive(&self, purpose: &str) -> Secret {
        Zeroizing::new(blake3::derive_key(purpose, &*self.0))
    }
}

/// Random bytes from the operating system.
pub fn random<const BYTES: usize>() -> Result<[u8; BYTES], Fault> {
    let mut bytes = [0; BYTES];
    let failed = |error: getrandom::Error| Fault::System { what: "random numbers".into(), error: error.to_string() };
    getrandom::fill(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// What an end of a link is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum LinkRole {
    /// The process that holds the job together.
    Coordinator = 1,
    /// A rank that talks to the coordinator.
    Member = 2,
    /// One of the streams between two ranks.
    Data = 3,
}

impl LinkRole {
    fn from_code(code: u16) -> Option<Self> {
        [LinkRole::Coordinator, LinkRole::Member, LinkRole::Data].into_iter().find(|role| *role as u16 == code)
    }
}

/// Who is at an end of a link. All of it is covered by the proofs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    pub role: LinkRole,
    pub rank: u32,
    pub job: u64,
    pub generation: u64,
    pub communicator: u32,
    /// Which of several parallel streams.
    pub stream: u32,
}

impl Identity {
    pub fn new(role: LinkRole, rank: usize, job: u64, generation: u64) -> Self {
        Self { role, rank: rank as u32, job, generation, communicator: 0, stream: 0 }
    }

    fn body(&self, to: u32, nonce: &[u8; NONCE_BYTES]) -> [u8; BODY_BYTES] {
        let mut bytes = [0; BODY_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10..12].copy_from_slice(&(self.role as u16).to_le_bytes());
        bytes[12..16].copy_from_slice(&self.rank.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.job.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.generation.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.communicator.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.stream.to_le_bytes());
        bytes[40..72].copy_from_slice(nonce);
        bytes[72..76].copy_from_slice(&to.to_le_bytes());
        bytes
    }

    /// Reads an authenticated body; the identity and whom it is meant for.
    fn parse(bytes: &[u8; HELLO_BYTES]) -> Result<(Self, u32), Refused> {
        let no_hello = || Refused("it is not a handshake message".into());
        let mut reader = ByteReader::new(bytes);
        let (magic, version, role) = (reader.array(), reader.u16(), reader.u16());
        if magic != Some(MAGIC) {
            return Err(no_hello());
        }
        let (version, role) = version.zip(role).ok_or_else(no_hello)?;
        if version != VERSION {
            return Err(Refused(format!("it uses version {version} of the protocol, but this end uses {VERSION}")));
        }
        let role = LinkRole::from_code(role).ok_or_else(|| Refused(format!("unknown role {role}")))?;
        let mut fields = || {
            let (rank, job, generation) = (reader.u32()?, reader.u64()?, reader.u64()?);
            let identity = Self { role, rank, job, generation, communicator: reader.u32()?, stream: reader.u32()? };
            reader.skip(NONCE_BYTES)?;
            Some((identity, reader.u32()?))
        };
        fields().ok_or_else(no_hello)
    }
}

/// Why the other end is not let in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// An authenticated link: who is there, and the keys of both directions.
#[derive(Debug)]
pub struct LinkSession {
    pub peer: Identity,
    pub sealer: Sealer,
    pub opener: Opener,
}

/// Keys of the three messages and of the session.
struct Keys {
    hello: Secret,
    reply: Secret,
    proof: Secret,
    session: Secret,
}

impl Keys {
    fn new(key: &JobKey) -> Self {
        Self {
            hello: key.derive("kolo link 1 hello"),
            reply: key.derive("kolo link 1 reply"),
            proof: key.derive("kolo link 1 proof"),
            session: key.derive("kolo link 1 session"),
        }
    }

    /// The keys from initiator to responder, and back.
    fn directions(&self, hello: &[u8], reply: &[u8]) -> (LinkKey, LinkKey) {
        let mut keys = Secret::default();
        blake3::Hasher::new_keyed(&self.session).update(hello).update(reply).finalize_xof().fill(&mut *keys);
        let (mut out, mut back) = (LinkKey::default(), LinkKey::default());
        out.copy_from_slice(&keys[..16]);
        back.copy_from_slice(&keys[16..]);
        (out, back)
    }
}

/// A body with its authenticator over `before` and itself.
fn authenticated(key: &[u8; KEY_BYTES], before: &[u8], body: &[u8; BODY_BYTES]) -> [u8; HELLO_BYTES] {
    let mut message = [0; HELLO_BYTES];
    message[..BODY_BYTES].copy_from_slice(body);
    message[BODY_BYTES..].copy_from_slice(mac(key, before, body).as_bytes());
    message
}

fn mac(key: &[u8; KEY_BYTES], first: &[u8], second: &[u8]) -> blake3::Hash {
    blake3::Hasher::new_keyed(key).update(first).update(second).finalize()
}

/// Whether a message's last 32 bytes authenticate it; takes the same time whatever the answer.
fn authentic(key: &[u8; KEY_BYTES], before: &[u8], message: &[u8; HELLO_BYTES]) -> bool {
    let mut claimed = [0; 32];
    claimed.copy_from_slice(&message[BODY_BYTES..]);
    mac(key, before, &message[..BODY_BYTES]) == blake3::Hash::from(claimed)
}

/// The end that connects.
#[derive(Debug)]
pub struct Initiator {
    keys: Keys,
    hello: [u8; HELLO_BYTES],
    me: Identity,
    expected: Option<Identity>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys")
    }
}

impl Initiator {
    /// With `expected`, nobody else will do.
    pub fn new(key: &JobKey, me: Identity, expected: Option<Identity>) -> Result<Self, Fault> {
        let keys = Keys::new(key);
        let to = expected.map_or(ANYBODY, |peer| peer.rank);
        let hello = authenticated(&keys.hello, &[], &me.body(to, &random()?));
        Ok(Self { keys, hello, me, expected })
    }

    pub fn expected(&self) -> Option<&Identity> {
        self.expected.as_ref()
    }

    /// What to send first.
    pub fn hello(&self) -> &[u8; HELLO_BYTES] {
        &self.hello
    }

    /// Checks the reply; the proof to send, and the session.
    pub fn finish(&self, reply: &[u8; HELLO_BYTES]) -> Result<([u8; PROOF_BYTES], LinkSession), Refused> {
        if !authentic(&self.keys.reply, &self.hello, reply) {
            return Err(Refused("it does not hold this job's key".into()));
        }
        let (peer, to) = Identity::parse(reply)?;
        if peer.job != self.me.job || to != self.me.rank {
            return Err(Refused(format!("it answers another job or rank ({}, rank {to})", peer.job)));
        }
        if self.expected.is_some_and(|expected| expected != peer) {
            return Err(Refused(format!("expected another end than {peer:?}")));
        }
        let proof = *mac(&self.keys.proof, &self.hello, reply).as_bytes();
        let (out, back) = self.keys.directions(&self.hello, reply);
        Ok((proof, LinkSession { peer, sealer: Sealer::new(out), opener: Opener::new(back) }))
    }
}

/// The end that listens. It says nothing before an authentic hello.
#[derive(Debug)]
pub struct Responder {
    keys: Keys,
    me: Identity,
    /// The hello, the reply and who sent the hello.
    met: Option<([u8; HELLO_BYTES], [u8; HELLO_BYTES], Identity)>,
}

impl Responder {
    pub fn new(key: &JobKey, me: Identity) -> Self {
        Self { keys: Keys::new(key), me, met: None }
    }

    /// Checks a hello; the reply to send. A refused hello gets no answer.
    pub fn reply(&mut self, hello: &[u8; HELLO_BYTES]) -> Result<[u8; HELLO_BYTES], Refused> {
        self.reply_if(hello, |_| true)
    }

    /// As [`Responder::reply`], to none but those whom `admit` wants.
    pub fn reply_if(
        &mut self,
        hello: &[u8; HELLO_BYTES],
        admit: impl FnOnce(&Identity) -> bool,
    ) -> Result<[u8; HELLO_BYTES], Refused> {
        if !authentic(&self.keys.hello, &[], hello) {
            return Err(Refused("it does not hold this job's key".into()));
        }
        let (peer, to) = Identity::parse(hello)?;
        if peer.job != self.me.job {
            return Err(Refused(format!("it belongs to job {}, not {}", peer.job, self.me.job)));
        }
        if to != ANYBODY && to != self.me.rank {
            return Err(Refused(format!("it looks for rank {to}, this is rank {}", self.me.rank)));
        }
        if !admit(&peer) {
            return Err(Refused(format!("no connection from {peer:?} is expected")));
        }
        let nonce = random().map_err(|fault| Refused(fault.to_string()))?;
        // The streams of a link are numbered by who connects.
        let me = Identity { stream: peer.stream, ..self.me };
        let reply = authenticated(&self.keys.reply, hello, &me.body(peer.rank, &nonce));
        self.met = Some((*hello, reply, peer));
        Ok(reply)
    }

    /// Checks the proof; the session.
    pub fn finish(&self, proof: &[u8; PROOF_BYTES]) -> Result<LinkSession, Refused> {
        let Some((hello, reply, peer)) = &self.met else { return Err(Refused("a proof before a hello".into())) };
        if mac(&self.keys.proof, hello, reply) != blake3::Hash::from(*proof) {
            return Err(Refused("its handshake was recorded earlier and replayed".into()));
        }
        let (out, back) = self.keys.directions(hello, reply);
        Ok(LinkSession { peer: *peer, sealer: Sealer::new(back), opener: Opener::new(out) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(rank: usize) -> Identity {
        Identity::new(LinkRole::Data, rank, 7, 3)
    }

    #[test]
    fn both_ends_meet() {
        let key = JobKey::fresh().unwrap();
        let initiator = Initiator::new(&key, identity(1), Some(identity(0))).unwrap();
        let mut responder = Responder::new(&key, identity(0));
        let reply = responder.reply(initiator.hello()).unwrap();
        let (proof, mut there) = initiator.finish(&reply).unwrap();
        let mut here = responder.finish(&proof).unwrap();
        assert_eq!((there.peer, here.peer), (identity(0), identity(1)));
        let mut bytes = *b"across";
        let tag = there.sealer.seal_in_place(&mut bytes);
        assert_ne!(&bytes, b"across");
        here.opener.open(&mut bytes, &tag).unwrap();
        assert_eq!(&bytes, b"across");
        let secret = format!("{:?}", key.expose());
        assert!(!format!("{key:?} {initiator:?} {responder:?} {here:?}").contains(&secret[1..20]));
    }

    #[test]
    fn any_flipped_bit_of_any_message_is_refused() {
        let key = JobKey::fresh().unwrap();
        let initiator = Initiator::new(&key, identity(1), None).unwrap();
        let mut responder = Responder::new(&key, identity(0));
        let reply = responder.reply(initiator.hello()).unwrap();
        let (proof, _) = initiator.finish(&reply).unwrap();
        for bit in 0..HELLO_BYTES * 8 {
            let flip = |bytes: &[u8; HELLO_BYTES]| {
                let mut bytes = *bytes;
                bytes[bit / 8] ^= 1 << (bit % 8);
                bytes
            };
            assert!(Responder::new(&key, identity(0)).reply(&flip(initiator.hello())).is_err(), "hello bit {bit}");
            assert!(initiator.finish(&flip(&reply)).is_err(), "reply bit {bit}");
        }
        for bit in 0..PROOF_BYTES * 8 {
            let mut proof = proof;
            proof[bit / 8] ^= 1 << (bit % 8);
            assert!(responder.finish(&proof).is_err(), "proof bit {bit}");
        }
    }

    #[test]
    fn a_recorded_talk_leads_nowhere() {
        let key = JobKey::fresh().unwrap();
        let initiator = Initiator::new(&key, identity(1), None).unwrap();
        let mut responder = Responder::new(&key, identity(0));
        let reply = responder.reply(initiator.hello()).unwrap();
        let (proof, _) = initiator.finish(&reply).unwrap();
        let mut again = Responder::new(&key, identity(0));
        again.reply(initiator.hello()).unwrap();
        assert!(again.finish(&proof).is_err());
        let other = Initiator::new(&key, identity(1), None).unwrap();
        assert!(other.finish(&reply).is_err());
        assert!(initiator.finish(initiator.hello()).is_err(), "an own message reflected");
    }

    #[test]
    fn strangers_are_refused() {
        let (key, other) = (JobKey::fresh().unwrap(), JobKey::fresh().unwrap());
        let initiator = Initiator::new(&key, identity(1), Some(identity(0))).unwrap();
        assert!(Responder::new(&other, identity(0)).reply(initiator.hello()).is_err(), "another key");
        assert!(Responder::new(&key, identity(2)).reply(initiator.hello()).is_err(), "another rank");
        assert!(Responder::new(&key, Identity { job: 8, ..identity(0) }).reply(initiator.hello()).is_err());
        let mut late = Responder::new(&key, Identity { generation: 2, ..identity(0) });
        let reply = late.reply(initiator.hello()).unwrap();
        assert!(initiator.finish(&reply).is_err(), "another generation than expected");
    }
}
