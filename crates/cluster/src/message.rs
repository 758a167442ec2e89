//! What members and coordinator say to each other, as bytes.
//!
//! A frame is `length u32 | kind u8 | job u64 | generation u32 | body`, little-endian; `length` counts what follows it.
//! What is longer than [`FRAME_BYTES_MAX`], or does not fill its frame exactly, is malformed. Nothing is allocated from a
//! length before it was checked.

use crate::codec::{ReadMessage, Writer};
use crate::introduction::Manifest;
use kolo_base::ByteReader;
use kolo_comm::auth::KEY_BYTES;
use kolo_comm::call::FINGERPRINT_BYTES;
use kolo_comm::transport::BOOTSTRAP_BYTES_MAX;
use kolo_comm::watch::Activity;
use kolo_comm::{Fault, Fingerprint};
use zeroize::Zeroize;

/// The job's key on its way to a member. It does not show in messages, and is wiped when dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct KeyBytes(pub [u8; KEY_BYTES]);

impl Drop for KeyBytes {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl std::fmt::Debug for KeyBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeyBytes")
    }
}

/// Longest event a member may send.
pub const EVENT_BYTES_MAX: usize = 64 << 10;
/// Most ranks that a member may report as unreachable at a time.
pub const UNREACHABLE_RANKS_MAX: usize = 1 << 12;
/// Bytes of a frame before its body, the length itself included.
pub const HEADER_BYTES: usize = 17;
/// Longest frame, the length itself included.
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + 32 + BOOTSTRAP_BYTES_MAX;
/// A member as it introduces itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub rank: usize,
    /// The number of ranks it believes in.
    pub world: usize,
    pub host: String,
    pub pid: u32,
    pub version: String,
    /// What it is if it is no plain worker, such as `server 0`; empty otherwise.
    pub role: String,
    /// The job it was given.
    pub manifest: Manifest,
}

impl Hello {
    /// Where it runs, and what it is, for messages.
    pub fn label(&self) -> String {
        label(&self.host, &self.role)
    }
}

/// `node7`, or `node7 (server 0)`.
pub(crate) fn label(host: &str, role: &str) -> String {
    if role.is_empty() { host.into() } else { format!("{host} ({role})") }
}

/// One line of the roster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RosterEntry {
    pub host: String,
    pub pid: u32,
    /// What it is if it is no plain worker, such as `server 0`; empty otherwise.
    pub role: String,
}

impl RosterEntry {
    /// Where it runs, and what it is, for messages.
    pub fn label(&self) -> String {
        label(&self.host, &self.role)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum ControlMessage {
    /// The first word of whoever started the process, over the inherited socket.
    Welcome {
        heartbeat_ms: u64,
        key: KeyBytes,
    },
    /// Instead of a welcome: the coordinator is there.
    Redirect {
        heartbeat_ms: u64,
        key: KeyBytes,
        address: String,
    },
    Hello(Hello),
    /// One line of the roster; all lines, in rank order, are the roster.
    Roster {
        rank: usize,
        peer: RosterEntry,
    },
    /// A part of a bootstrap all-gather: a member's own, or any rank's on the way back.
    Blob {
        round: u64,
        rank: usize,
        bytes: Vec<u8>,
    },
    Heartbeat(Activity),
    /// The coordinator is alive; `moved` if some rank made progress since its last heartbeat.
    CoordinatorHeartbeat {
        moved: bool,
    },
    /// For the observer of the job.
    Event(Vec<u8>),
    /// A member gives up. `culprit` is the rank it blames, if that is another one.
    Fail {
        text: String,
        culprit: Option<usize>,
    },
    Finish,
    /// All have finished.
    Release,
    Abort {
        text: String,
    },
    /// The workers form a new generation, the envelope's: what was under way in the one before is over.
    Regroup,
    /// A worker has left the generation before, and waits for its place in the new one. `position` is how far its state has
    /// come, if it has any.
    Ready {
        position: Option<u64>,
    },
    /// A worker's place in the new generation.
    Assign(Assignment),
    /// Somebody waits to be taken in: regroup after the step at hand.
    Yield,
    /// A member has done so.
    Yielded,
    /// The first rank of a new generation has its state, and goes on with this step.
    Resumed {
        step: u64,
    },
    /// The job is asked to end, and this rank is the one that is told: no signal of the launcher's reaches it.
    Interrupt,
    /// A spare was lost while the generation went on.
    Lost {
        text: String,
    },
    /// A member has not heard of the coordinator for too long, and leaves. `shown` if it has shown this to the user.
    GiveUp {
        text: String,
        shown: bool,
    },
    /// The ranks of its generation whose hosts do not answer a member of an elastic job; it replaces what it said before.
    Unreachable {
        ranks: Vec<usize>,
    },
}

/// What a worker of an elastic job learns when a generation forms.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    pub rank: usize,
    /// Ranks of the new generation; 0 for a worker that has no place in it and waits as a spare.
    pub world: usize,
    /// Who was lost since the last generation that went on, one in a line.
    pub lost: String,
    /// The last generation that is known to have gone on.
    pub resumed: u32,
    /// Milliseconds since the coordinator found out.
    pub since_ms: u64,
    /// If not 0, the group only hands the state over to so many of its first ranks, and then regroups.
    pub keepers: usize,
    /// Nobody who is left has the state of the job, and steps were made: all go back to the newest checkpoint.
    pub state_lost: bool,
}

/// The rank of a worker that joins a running job, which it gets there.
pub const ANY_RANK: usize = crate::codec::WORLD_MAX - 1;

/// A message of a job. What comes from another job or an older generation has no effect.
#[derive(Clone, Debug, PartialEq)]
pub struct Envelope {
    pub job: u64,
    pub generation: u32,
    pub message: ControlMessage,
}

fn write_activity(out: &mut Writer, activity: &Activity) {
    out.u64(activity.step);
    out.u64(activity.progress);
    let flags = [activity.in_call, activity.call.is_some(), activity.waits];
    out.0.push(flags.iter().enumerate().map(|(bit, flag)| u8::from(*flag) << bit).sum());
    if let Some(call) = &activity.call {
        out.0.extend_from_slice(&call.encode());
    }
}

fn read_activity(body: &mut ByteReader<'_>) -> Option<Activity> {
    let (step, progress, flags) = (body.u64()?, body.u64()?, body.u8()?);
    if flags > 7 {
        return None;
    }
    let [in_call, called, waits] = [0, 1, 2].map(|bit| flags >> bit & 1 == 1);
    let call = match called {
        true => Some(Fingerprint::decode(body.take(FINGERPRINT_BYTES)?.try_into().ok()?)?),
        false => None,
    };
    Some(Activity { step, progress, call, in_call, waits })
}

impl Hello {
    fn write(&self, out: &mut Writer) {
        out.u32(self.rank as u32);
        out.u32(self.world as u32);
        out.u32(self.pid);
        out.text(&self.host);
        out.text(&self.version);
        out.text(&self.role);
        self.manifest.write(out);
    }
}

impl Assignment {
    fn write(&self, out: &mut Writer) {
        out.u32(self.rank as u32);
        out.u32(self.world as u32);
        out.u32(self.keepers as u32);
        out.u64(self.since_ms);
        out.u32(self.resumed);
        out.0.push(u8::from(self.state_lost));
        out.text(&self.lost);
    }
}

impl ControlMessage {
    fn code(&self) -> u8 {
        match self {
            ControlMessage::Welcome { .. } => 0,
            ControlMessage::Redirect { .. } => 1,
            ControlMessage::Hello(_) => 2,
            ControlMessage::Roster { .. } => 3,
            ControlMessage::Blob { .. } => 4,
            ControlMessage::Heartbeat(_) => 5,
            ControlMessage::CoordinatorHeartbeat { .. } => 6,
            ControlMessage::Event(_) => 7,
            ControlMessage::Fail { .. } => 8,
            ControlMessage::Finish => 9,
            ControlMessage::Release => 10,
            ControlMessage::Abort { .. } => 11,
            ControlMessage::GiveUp { .. } => 12,
            ControlMessage::Regroup => 13,
            ControlMessage::Ready { .. } => 14,
            ControlMessage::Assign(_) => 15,
            ControlMessage::Yield => 16,
            ControlMessage::Yielded => 17,
            ControlMessage::Resumed { .. } => 18,
            ControlMessage::Lost { .. } => 19,
            ControlMessage::Interrupt => 20,
            ControlMessage::Unreachable { .. } => 21,
        }
    }

    fn write(&self, out: &mut Writer) {
        match self {
            ControlMessage::Welcome { heartbeat_ms, key } => {
                out.u64(*heartbeat_ms);
                out.0.extend_from_slice(&key.0);
            }
            ControlMessage::Redirect { heartbeat_ms, key, address } => {
                out.u64(*heartbeat_ms);
                out.0.extend_from_slice(&key.0);
                out.text(address);
            }
            ControlMessage::Hello(hello) => hello.write(out),
            ControlMessage::Roster { rank, peer } => {
                out.u32(*rank as u32);
                out.u32(peer.pid);
                out.text(&peer.host);
                out.text(&peer.role);
            }
            ControlMessage::Blob { round, rank, bytes } => {
                out.u64(*round);
                out.u32(*rank as u32);
                out.bytes(bytes);
            }
            ControlMessage::Heartbeat(activity) => write_activity(out, activity),
            ControlMessage::Event(bytes) => out.bytes(bytes),
            ControlMessage::Fail { text, culprit } => {
                out.u32(culprit.map_or(u32::MAX, |rank| rank as u32));
                out.text(text);
            }
            ControlMessage::Abort { text } | ControlMessage::Lost { text } => out.text(text),
            ControlMessage::GiveUp { text, shown } => {
                out.0.push(u8::from(*shown));
                out.text(text);
            }
            ControlMessage::CoordinatorHeartbeat { moved } => out.0.push(u8::from(*moved)),
            ControlMessage::Ready { position } => {
                out.0.push(u8::from(position.is_some()));
                out.u64(position.unwrap_or(0));
            }
            ControlMessage::Assign(assignment) => assignment.write(out),
            ControlMessage::Resumed { step } => out.u64(*step),
            ControlMessage::Unreachable { ranks } => {
                let ranks = &ranks[..ranks.len().min(UNREACHABLE_RANKS_MAX)];
                out.u32(ranks.len() as u32);
                ranks.iter().for_each(|rank| out.u32(*rank as u32));
            }
            ControlMessage::Finish
            | ControlMessage::Interrupt
            | ControlMessage::Release
            | ControlMessage::Regroup
            | ControlMessage::Yield
            | ControlMessage::Yielded => {}
        }
    }

    fn read(code: u8, body: &mut ByteReader<'_>) -> Option<Self> {
        Some(match code {
            0 => ControlMessage::Welcome { heartbeat_ms: body.u64()?, key: body.key()? },
            1 => ControlMessage::Redirect { heartbeat_ms: body.u64()?, key: body.key()?, address: body.text()? },
            2 => {
                let (rank, world, pid) = (body.rank()?, body.u32()? as usize, body.u32()?);
                let (host, version) = (body.text()?, body.text()?);
                // An older program says no more; it is refused by its version.
                let (role, manifest) = match body.is_empty() {
                    true => (String::new(), Manifest::default()),
                    false => (body.text()?, Manifest::read(body)?),
                };
                ControlMessage::Hello(Hello { rank, world, pid, host, version, role, manifest })
            }
            3 => {
                let (rank, pid) = (body.rank()?, body.u32()?);
                ControlMessage::Roster { rank, peer: RosterEntry { pid, host: body.text()?, role: body.text()? } }
            }
            4 => {
                ControlMessage::Blob { round: body.u64()?, rank: body.rank()?, bytes: body.bytes(BOOTSTRAP_BYTES_MAX)? }
            }
            5 => ControlMessage::Heartbeat(read_activity(body)?),
            6 => ControlMessage::CoordinatorHeartbeat { moved: body.u8()? != 0 },
            7 => ControlMessage::Event(body.bytes(EVENT_BYTES_MAX)?),
            8 => {
                let culprit = Some(body.u32()?).filter(|rank| *rank != u32::MAX);
                ControlMessage::Fail { culprit: culprit.map(|rank| rank as usize), text: body.text()? }
            }
            9 => ControlMessage::Finish,
            10 => ControlMessage::Release,
            11 => ControlMessage::Abort { text: body.text()? },
            12 => ControlMessage::GiveUp { shown: body.u8()? != 0, text: body.text()? },
            13 => ControlMessage::Regroup,
            14 => {
                let (known, position) = (body.u8()?, body.u64()?);
                ControlMessage::Ready { position: (known != 0).then_some(position) }
            }
            15 => {
                let (rank, world, keepers, since_ms) = (body.rank()?, body.rank()?, body.rank()?, body.u64()?);
                let (resumed, state_lost) = (body.u32()?, body.u8()? != 0);
                let lost = body.text()?;
                ControlMessage::Assign(Assignment { rank, world, lost, resumed, since_ms, keepers, state_lost })
            }
            16 => ControlMessage::Yield,
            17 => ControlMessage::Yielded,
            18 => ControlMessage::Resumed { step: body.u64()? },
            19 => ControlMessage::Lost { text: body.text()? },
            20 => ControlMessage::Interrupt,
            21 => {
                let count = Some(body.u32()? as usize).filter(|count| *count <= UNREACHABLE_RANKS_MAX)?;
                ControlMessage::Unreachable { ranks: (0..count).map(|_| body.rank()).collect::<Option<_>>()? }
            }
            _ => return None,
        })
    }
}

impl Envelope {
    /// The whole frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer(vec![0; 4]);
        out.0.push(self.message.code());
        out.u64(self.job);
        out.u32(self.generation);
        self.message.write(&mut out);
        let length = (out.0.len() - 4) as u32;
        out.0[..4].copy_from_slice(&length.to_le_bytes());
        out.0
    }

    /// The frame at the start of `bytes` and its length; `None` if it is not whole yet.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, Fault> {
        let rejected = |why: &str| Fault::Rejected { from: "a control link".into(), why: why.into() };
        let Some(length) = bytes.first_chunk::<4>() else { return Ok(None) };
        let end = (u32::from_le_bytes(*length) as usize).saturating_add(4);
        if !(HEADER_BYTES..=FRAME_BYTES_MAX).contains(&end) {
            return Err(rejected("a frame of impossible length"));
        }
        let Some(frame) = bytes.get(4..end) else { return Ok(None) };
        let mut body = ByteReader::new(frame);
        let parsed = (|| {
            let (code, job, generation) = (body.u8()?, body.u64()?, body.u32()?);
            Some(Envelope { job, generation, message: ControlMessage::read(code, &mut body)? })
        })();
        match parsed {
            Some(envelope) if body.is_empty() => Ok(Some((envelope, end))),
            _ => Err(rejected("a malformed frame")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_comm::{CallKind, ElementType, Reduction};

    fn samples() -> Vec<ControlMessage> {
        let call = Fingerprint {
            communicator: 0,
            kind: CallKind::AllReduce,
            element: ElementType::F32,
            reduction: Reduction::Sum,
            root: 0,
            sequence: 17,
            count: 1024,
            name: [b'a'; 24],
        };
        let hello = Hello {
            rank: 3,
            world: 4,
            host: "node7".into(),
            pid: 77,
            version: "0.1.0".into(),
            role: "server 0".into(),
            manifest: Manifest::new([("job.seed".to_string(), "1".to_string())]),
        };
        vec![
            ControlMessage::Welcome { heartbeat_ms: 1000, key: KeyBytes([7; KEY_BYTES]) },
            ControlMessage::Redirect {
                heartbeat_ms: 1000,
                key: KeyBytes([7; KEY_BYTES]),
                address: "127.0.0.1:9".into(),
            },
            ControlMessage::Hello(hello),
            ControlMessage::Roster { rank: 1, peer: RosterEntry { host: "a".into(), pid: 5, role: "server 0".into() } },
            ControlMessage::Blob { round: 2, rank: 1, bytes: vec![1; 300] },
            ControlMessage::Heartbeat(Activity { step: 1, progress: 2, call: Some(call), in_call: true, waits: true }),
            ControlMessage::Heartbeat(Activity { step: 1, progress: 2, call: None, in_call: false, waits: true }),
            ControlMessage::CoordinatorHeartbeat { moved: true },
            ControlMessage::Event(vec![9; 10]),
            ControlMessage::Fail { text: "no".into(), culprit: Some(2) },
            ControlMessage::Fail { text: "no".into(), culprit: None },
            ControlMessage::Finish,
            ControlMessage::Release,
            ControlMessage::Abort { text: "x".into() },
            ControlMessage::GiveUp { text: "x".into(), shown: true },
            ControlMessage::Regroup,
            ControlMessage::Ready { position: Some(7) },
            ControlMessage::Ready { position: None },
            ControlMessage::Assign(Assignment {
                rank: 1,
                world: 2,
                lost: "rank 3".into(),
                resumed: 4,
                since_ms: 12,
                keepers: 1,
                state_lost: true,
            }),
            ControlMessage::Yield,
            ControlMessage::Yielded,
            ControlMessage::Resumed { step: 9 },
            ControlMessage::Lost { text: "worker 3".into() },
            ControlMessage::Interrupt,
            ControlMessage::Unreachable { ranks: vec![2, 3] },
            ControlMessage::Unreachable { ranks: Vec::new() },
        ]
    }

    #[test]
    fn every_message_comes_back() {
        for message in samples() {
            let envelope = Envelope { job: 5, generation: 2, message };
            let bytes = envelope.encode();
            for end in 0..bytes.len() {
                assert_eq!(Envelope::decode(&bytes[..end]).unwrap(), None);
            }
            assert_eq!(Envelope::decode(&bytes).unwrap(), Some((envelope, bytes.len())));
        }
    }

    #[test]
    fn damaged_frames_never_panic_and_never_grow() {
        let mut state = 1u64;
        let mut random = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize
        };
        for turn in 0..200_000 {
            let all = samples();
            let message = all[turn % all.len()].clone();
            let mut bytes = Envelope { job: 5, generation: 2, message }.encode();
            for _ in 0..1 + random() % 4 {
                let at = random() % bytes.len();
                bytes[at] = random() as u8;
            }
            bytes.truncate(1 + random() % bytes.len());
            if let Ok(Some((envelope, used))) = Envelope::decode(&bytes) {
                assert!(used <= bytes.len());
                assert_eq!(Envelope::decode(&envelope.encode()).unwrap().unwrap().0, envelope);
            }
        }
    }
}
