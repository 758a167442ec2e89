//! What a launcher and the agent on another host say to each other, over the agent's standard streams.
//!
//! Frames are `length u32 | kind u8 | body`. The agent's first bytes are [`GREETING`], since a login may print something
//! before it. The key of the job comes with the first order, and is in no argument or variable.

use crate::codec::{ReadMessage, Writer};
use crate::compute::HostLoad;
use crate::logs::OutputStream;
use crate::message::KeyBytes;
use crate::process::Change;
use crate::rank_state::Exit;
use kolo_base::ByteReader;
use kolo_comm::Fault;

pub(crate) const GREETING: &[u8] = b"\nkolo agent 1\n";
/// Longest frame.
pub(crate) const FRAME_BYTES_MAX: usize = 4 << 20;
/// Most arguments and variables of a worker.
const STRINGS_MAX: usize = 1 << 16;
const OUTPUT_BYTES_MAX: usize = 64 << 10;

/// What to start on a host.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StartWorkers {
    pub job: u64,
    pub generation: u32,
    pub heartbeat_ms: u64,
    pub key: KeyBytes,
    /// Where the coordinator listens.
    pub address: String,
    pub world: usize,
    /// The ranks of this host follow each other.
    pub first_rank: usize,
    pub count: usize,
    pub directory: String,
    pub program: String,
    pub arguments: Vec<String>,
    pub environment: Vec<String>,
    /// Whether the job is elastic: workers may be started again, and the agent stays until the launcher goes.
    pub elastic: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AgentMessage {
    Start(Box<StartWorkers>),
    Signal {
        rank: usize,
        signal: i32,
    },
    Heartbeat,
    /// Starts a worker again that has ended.
    Restart {
        rank: usize,
    },
    /// The launcher is suspended: until its next order, its silence means nothing.
    Suspend,
    // Back from the agent.
    Changed {
        rank: usize,
        change: Change,
    },
    Output {
        rank: usize,
        source: OutputStream,
        bytes: Vec<u8>,
    },
    /// A worker's process has computed since this was last said.
    Computed {
        rank: usize,
        load: HostLoad,
    },
    /// The agent cannot do what it was told.
    Unable {
        text: String,
    },
}

fn write_strings(out: &mut Writer, strings: &[String]) {
    out.u32(strings.len() as u32);
    strings.iter().for_each(|text| out.bytes(text.as_bytes()));
}

fn read_string(body: &mut ByteReader<'_>) -> Option<String> {
    String::from_utf8(body.bytes(FRAME_BYTES_MAX)?).ok()
}

fn read_strings(body: &mut ByteReader<'_>) -> Option<Vec<String>> {
    let count = body.u32()? as usize;
    if count > STRINGS_MAX { None } else { (0..count).map(|_| read_string(body)).collect() }
}

fn change_code(change: Change) -> (u8, i32) {
    match change {
        Change::Exited(Exit::Code(code)) => (0, code),
        Change::Exited(Exit::Signal(signal)) => (1, signal),
        Change::Exited(Exit::Unknown) => (2, 0),
        Change::Stopped => (3, 0),
        Change::Continued => (4, 0),
    }
}

fn change_from(code: u8, value: i32) -> Option<Change> {
    Some(match code {
        0 => Change::Exited(Exit::Code(value)),
        1 => Change::Exited(Exit::Signal(value)),
        2 => Change::Exited(Exit::Unknown),
        3 => Change::Stopped,
        4 => Change::Continued,
        _ => return None,
    })
}

impl StartWorkers {
    fn write(&self, out: &mut Writer) {
        out.u64(self.job);
        out.u32(self.generation);
        out.u64(self.heartbeat_ms);
        out.0.extend_from_slice(&self.key.0);
        for number in [self.world, self.first_rank, self.count] {
            out.u32(number as u32);
        }
        for text in [&self.address, &self.directory, &self.program] {
            out.bytes(text.as_bytes());
        }
        write_strings(out, &self.arguments);
        write_strings(out, &self.environment);
        out.0.push(u8::from(self.elastic));
    }

    fn read(body: &mut ByteReader<'_>) -> Option<Self> {
        let (job, generation, heartbeat_ms, key) = (body.u64()?, body.u32()?, body.u64()?, body.key()?);
        let (world, first_rank, count) = (body.u32()? as usize, body.rank()?, body.rank()?);
        let (address, directory, program) = (read_string(body)?, read_string(body)?, read_string(body)?);
        let (arguments, environment, elastic) = (read_strings(body)?, read_strings(body)?, body.u8()? != 0);
        let last = first_rank + count;
        (heartbeat_ms > 0 && count > 0 && last <= world).then_some(Self {
            job,
            generation,
            heartbeat_ms,
            key,
            address,
            world,
            first_rank,
            count,
            directory,
            program,
            arguments,
            environment,
            elastic,
        })
    }
}

impl AgentMessage {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer(vec![0; 4]);
        match self {
            AgentMessage::Start(start) => {
                out.0.push(0);
                start.write(&mut out);
            }
            AgentMessage::Signal { rank, signal } => {
                out.0.push(1);
                out.u32(*rank as u32);
                out.u32(*signal as u32);
            }
            AgentMessage::Heartbeat => out.0.push(2),
            AgentMessage::Changed { rank, change } => {
                let (code, value) = change_code(*change);
                out.0.extend_from_slice(&[3, code]);
                out.u32(*rank as u32);
                out.u32(value as u32);
            }
            AgentMessage::Output { rank, source, bytes } => {
                out.0.extend_from_slice(&[4, u8::from(*source == OutputStream::Err)]);
                out.u32(*rank as u32);
                out.bytes(bytes);
            }
            AgentMessage::Unable { text } => {
                out.0.push(5);
                out.text(text);
            }
            AgentMessage::Suspend => out.0.push(6),
            AgentMessage::Restart { rank } => {
                out.0.push(7);
                out.u32(*rank as u32);
            }
            AgentMessage::Computed { rank, load } => {
                out.0.push(8);
                [*rank as u32, load.average_tenths, load.cores].into_iter().for_each(|number| out.u32(number));
            }
        }
        let length = (out.0.len() - 4) as u32;
        out.0[..4].copy_from_slice(&length.to_le_bytes());
        out.0
    }

    fn read(body: &mut ByteReader<'_>) -> Option<Self> {
        Some(match body.u8()? {
            0 => AgentMessage::Start(Box::new(StartWorkers::read(body)?)),
            1 => AgentMessage::Signal { rank: body.rank()?, signal: body.u32()? as i32 },
            2 => AgentMessage::Heartbeat,
            3 => {
                let code = body.u8()?;
                AgentMessage::Changed { rank: body.rank()?, change: change_from(code, body.u32()? as i32)? }
            }
            4 => {
                let source = if body.u8()? == 0 { OutputStream::Out } else { OutputStream::Err };
                AgentMessage::Output { rank: body.rank()?, source, bytes: body.bytes(OUTPUT_BYTES_MAX)? }
            }
            5 => AgentMessage::Unable { text: body.text()? },
            6 => AgentMessage::Suspend,
            7 => AgentMessage::Restart { rank: body.rank()? },
            8 => {
                let rank = body.rank()?;
                AgentMessage::Computed { rank, load: HostLoad { average_tenths: body.u32()?, cores: body.u32()? } }
            }
            _ => return None,
        })
    }

    /// The frame at the start of `bytes` and its length; `None` if it is not whole yet.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, Fault> {
        let rejected = |why: &str| Fault::Rejected { from: "a host's agent".into(), why: why.into() };
        let Some(length) = bytes.first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if !(1..=FRAME_BYTES_MAX).contains(&length) {
            return Err(rejected("a frame of impossible length"));
        }
        let Some(frame) = bytes.get(4..4 + length) else { return Ok(None) };
        let mut body = ByteReader::new(frame);
        match Self::read(&mut body) {
            Some(order) if body.is_empty() => Ok(Some((order, 4 + length))),
            _ => Err(rejected("a malformed frame")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<AgentMessage> {
        let start = StartWorkers {
            job: 1,
            generation: 2,
            heartbeat_ms: 1000,
            key: KeyBytes([3; 32]),
            address: "127.0.0.1:5".into(),
            world: 8,
            first_rank: 4,
            count: 4,
            directory: "/tmp".into(),
            program: "kolo".into(),
            arguments: vec!["train".into(), "".into()],
            environment: vec!["A=b".into()],
            elastic: true,
        };
        vec![
            AgentMessage::Start(Box::new(start)),
            AgentMessage::Signal { rank: 3, signal: 15 },
            AgentMessage::Heartbeat,
            AgentMessage::Changed { rank: 1, change: Change::Exited(Exit::Code(-1)) },
            AgentMessage::Changed { rank: 1, change: Change::Exited(Exit::Signal(9)) },
            AgentMessage::Changed { rank: 1, change: Change::Stopped },
            AgentMessage::Output { rank: 2, source: OutputStream::Err, bytes: b"text".to_vec() },
            AgentMessage::Unable { text: "no".into() },
            AgentMessage::Suspend,
            AgentMessage::Restart { rank: 5 },
            AgentMessage::Computed { rank: 3, load: HostLoad { average_tenths: 302, cores: 2 } },
        ]
    }

    #[test]
    fn orders_come_back_whole_and_damaged_ones_do_no_harm() {
        let mut state = 3u64;
        let mut random = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize
        };
        for order in samples() {
            let bytes = order.encode();
            assert_eq!(AgentMessage::decode(&bytes[..bytes.len() - 1]).unwrap(), None);
            assert_eq!(AgentMessage::decode(&bytes).unwrap(), Some((order, bytes.len())));
            for _ in 0..20_000 {
                let mut bytes = bytes.clone();
                for _ in 0..1 + random() % 3 {
                    let at = random() % bytes.len();
                    bytes[at] = random() as u8;
                }
                let _ = AgentMessage::decode(&bytes);
            }
        }
    }
}
