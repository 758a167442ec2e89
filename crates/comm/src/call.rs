//! What a rank calls, and the fixed-size fingerprint that all ranks must agree on.

use crate::element::{ElementType, Reduction};
use kolo_base::ByteReader;
use std::fmt;

/// The collectives of the MPI set, and the two ends of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum CallKind {
    Barrier = 0,
    Broadcast = 1,
    Reduce = 2,
    AllReduce = 3,
    ReduceScatter = 4,
    Gather = 5,
    AllGather = 6,
    Scatter = 7,
    AllToAll = 8,
    Scan = 9,
    ExclusiveScan = 10,
    Send = 11,
    Recv = 12,
}

impl CallKind {
    pub const ALL: [CallKind; 13] = [
        CallKind::Barrier,
        CallKind::Broadcast,
        CallKind::Reduce,
        CallKind::AllReduce,
        CallKind::ReduceScatter,
        CallKind::Gather,
        CallKind::AllGather,
        CallKind::Scatter,
        CallKind::AllToAll,
        CallKind::Scan,
        CallKind::ExclusiveScan,
        CallKind::Send,
        CallKind::Recv,
    ];

    pub fn name(self) -> &'static str {
        [
            "barrier",
            "broadcast",
            "reduce",
            "all_reduce",
            "reduce_scatter",
            "gather",
            "all_gather",
            "scatter",
            "all_to_all",
            "scan",
            "exclusive_scan",
            "send",
            "recv",
        ][self as usize]
    }

    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// A message between two ranks, which the others know nothing of.
    pub fn is_message(self) -> bool {
        matches!(self, CallKind::Send | CallKind::Recv)
    }
}

/// Bytes of a call's name that travel with it.
pub const NAME_BYTES: usize = 24;
/// Bytes of an encoded [`Fingerprint`].
pub const FINGERPRINT_BYTES: usize = 56;

/// Everything about a call on which the ranks of a communicator must agree.
///
/// `count` is the number of elements: of the whole vector for broadcast, reductions and scans, and the sum over ranks for
/// the collectives with parts. For all-to-all, whose counts differ by rank, it is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    pub communicator: u32,
    pub kind: CallKind,
    pub element: ElementType,
    pub reduction: Reduction,
    /// The root, or 0 for collectives without one; for a message, the receiver.
    pub root: u32,
    /// The number of this call on its communicator, from 0. Messages have a sequence per pair of ranks.
    pub sequence: u64,
    pub count: u64,
    pub name: [u8; NAME_BYTES],
}

/// Cuts a name to what travels.
pub fn short_name(name: &str) -> [u8; NAME_BYTES] {
    let mut short = [0; NAME_BYTES];
    let mut end = name.len().min(NAME_BYTES);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    short[..end].copy_from_slice(&name.as_bytes()[..end]);
    short
}

impl Fingerprint {
    pub fn encode(&self) -> [u8; FINGERPRINT_BYTES] {
        let mut bytes = [0; FINGERPRINT_BYTES];
        bytes[0..4].copy_from_slice(&self.communicator.to_le_bytes());
        bytes[4] = self.kind as u8;
        bytes[5] = self.element as u8;
        bytes[6] = self.reduction as u8;
        bytes[8..12].copy_from_slice(&self.root.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.count.to_le_bytes());
        bytes[32..56].copy_from_slice(&self.name);
        bytes
    }

    /// `None` if a code is unknown.
    pub fn decode(bytes: &[u8; FINGERPRINT_BYTES]) -> Option<Self> {
        let mut reader = ByteReader::new(bytes);
        let communicator = reader.u32()?;
        let kind = CallKind::from_code(reader.u8()?)?;
        let element = ElementType::from_code(reader.u8()?)?;
        let reduction = Reduction::from_code(reader.u8()?)?;
        reader.skip(1)?;
        let root = reader.u32()?;
        reader.skip(4)?;
        let (sequence, count, name) = (reader.u64()?, reader.u64()?, reader.array()?);
        Some(Self { communicator, kind, element, reduction, root, sequence, count, name })
    }

    pub fn name(&self) -> &str {
        let end = self.name.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES);
        std::str::from_utf8(&self.name[..end]).unwrap_or("?")
    }
}

impl fmt::Display for Fingerprint {
    /// Such as `all_reduce(sum) of 1024 f32 "bucket 3", call 17`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind.name())?;
        match self.kind {
            CallKind::Reduce
            | CallKind::AllReduce
            | CallKind::ReduceScatter
            | CallKind::Scan
            | CallKind::ExclusiveScan => write!(f, "({})", self.reduction.name())?,
            _ => {}
        }
        if self.kind != CallKind::Barrier && self.kind != CallKind::AllToAll {
            write!(f, " of {} {}", self.count, self.element.name())?;
        }
        // Of the communicator of all ranks the numbers are the job's.
        let who = if self.communicator == 0 { "rank" } else { "member" };
        if matches!(self.kind, CallKind::Broadcast | CallKind::Scatter) {
            write!(f, " from {who} {}", self.root)?;
        }
        if matches!(self.kind, CallKind::Reduce | CallKind::Gather | CallKind::Send) {
            write!(f, " to {who} {}", self.root)?;
        }
        if !self.name().is_empty() {
            write!(f, " \"{}\"", self.name())?;
        }
        write!(f, ", call {}", self.sequence)?;
        if self.communicator != 0 { write!(f, " of communicator {}", self.communicator) } else { Ok(()) }
    }
}
