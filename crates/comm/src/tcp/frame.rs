//! What crosses a stream: frames of a sealed header of fixed size and at most one sealed payload. `docs/wire.md` has the bytes.
//!
//! A message travels as one or more frames, each complete in itself: any stream may carry any of them.

use crate::call::{FINGERPRINT_BYTES, Fingerprint};
use crate::communicator::CALL_BYTES_MAX;
use crate::failure_report::FAILURE_BYTES_MAX;
use crate::record::{Forged, TAG_BYTES};
use kolo_base::ByteReader;

/// Largest payload of a frame.
pub const SEGMENT_BYTES_MAX: usize = 1 << 20;
/// Bytes of a header before sealing.
pub const PLAIN_BYTES: usize = 112;
/// Bytes of a sealed header.
pub const HEADER_BYTES: usize = PLAIN_BYTES + TAG_BYTES;

const FINGERPRINT_AT: usize = PLAIN_BYTES - FINGERPRINT_BYTES;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// A part of a message, or all of it.
    Message = 1,
    /// The sender is done and leaves.
    Goodbye = 2,
    /// The sender's call failed; the payload says how.
    Failed = 3,
    /// The sender has waited for a while in this call.
    Notice = 4,
}

/// The job and generation that all frames of a link carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobGeneration {
    pub job: u64,
    pub generation: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: FrameKind,
    /// The number of the message between these two ranks, in this direction.
    pub message: u64,
    /// Bytes of the whole message.
    pub total: usize,
    /// Where this part belongs.
    pub offset: usize,
    /// Bytes of this part.
    pub part: usize,
    /// The call of a message or a notice.
    pub call: Option<Fingerprint>,
}

/// Why a stream is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error(transparent)]
    Forged(#[from] Forged),
    #[error("a frame of job {0}, generation {1}")]
    JobGeneration(u64, u64),
    #[error("a malformed frame: {0}")]
    Nonsense(&'static str),
}

impl Frame {
    /// A frame without a message.
    pub fn bare(kind: FrameKind, part: usize) -> Self {
        Self { kind, message: 0, total: part, offset: 0, part, call: None }
    }

    pub fn encode(&self, era: JobGeneration) -> [u8; PLAIN_BYTES] {
        let mut bytes = [0; PLAIN_BYTES];
        bytes[0] = self.kind as u8;
        bytes[4..8].copy_from_slice(&(self.part as u32).to_le_bytes());
        let longs = [era.job, era.generation, self.message, self.total as u64, self.offset as u64];
        for (slot, long) in bytes[8..48].chunks_exact_mut(8).zip(longs) {
            slot.copy_from_slice(&long.to_le_bytes());
        }
        if let Some(call) = &self.call {
            bytes[FINGERPRINT_AT..].copy_from_slice(&call.encode());
        }
        bytes
    }

    /// Reads an opened header.
    pub fn decode(bytes: &[u8; PLAIN_BYTES], era: JobGeneration) -> Result<Self, Malformed> {
        let fields = || {
            let mut reader = ByteReader::new(bytes);
            let kind = reader.u8()?;
            reader.skip(3)?;
            let part = u64::from(reader.u32()?);
            Some((kind, part, [reader.u64()?, reader.u64()?, reader.u64()?, reader.u64()?, reader.u64()?]))
        };
        let short = Malformed::Nonsense("it is too short");
        let (kind, part, [job, generation, message, total, offset]) = fields().ok_or(short)?;
        if (JobGeneration { job, generation }) != era {
            return Err(Malformed::JobGeneration(job, generation));
        }
        let kind = match kind {
            1 => FrameKind::Message,
            2 => FrameKind::Goodbye,
            3 => FrameKind::Failed,
            4 => FrameKind::Notice,
            _ => return Err(Malformed::Nonsense("its kind is unknown")),
        };
        let part_max = if kind == FrameKind::Message { SEGMENT_BYTES_MAX } else { FAILURE_BYTES_MAX };
        if part > part_max as u64 || total > CALL_BYTES_MAX as u64 {
            return Err(Malformed::Nonsense("it is too long"));
        }
        if offset > total || part > total - offset || (part == 0 && total > 0) {
            return Err(Malformed::Nonsense("its part lies outside its message"));
        }
        let mut call = [0; FINGERPRINT_BYTES];
        call.copy_from_slice(&bytes[FINGERPRINT_AT..]);
        let call = match kind {
            FrameKind::Goodbye | FrameKind::Failed => None,
            FrameKind::Message | FrameKind::Notice => {
                Some(Fingerprint::decode(&call).ok_or(Malformed::Nonsense("its call is unknown"))?)
            }
        };
        Ok(Self { kind, message, total: total as usize, offset: offset as usize, part: part as usize, call })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{CallKind, short_name};
    use crate::element::{ElementType, Reduction};

    fn call() -> Fingerprint {
        Fingerprint {
            communicator: 3,
            kind: CallKind::AllReduce,
            element: ElementType::Bf16,
            reduction: Reduction::Max,
            root: 2,
            sequence: 1 << 40,
            count: 77,
            name: short_name("bucket 3"),
        }
    }

    #[test]
    fn frames_survive_the_journey() {
        let era = JobGeneration { job: 5, generation: 9 };
        let frame =
            Frame { kind: FrameKind::Message, message: 8, total: 1000, offset: 600, part: 400, call: Some(call()) };
        assert_eq!(Frame::decode(&frame.encode(era), era), Ok(frame));
        let older = JobGeneration { generation: 8, ..era };
        assert_eq!(Frame::decode(&frame.encode(older), era), Err(Malformed::JobGeneration(5, 8)));
        for wrong in [
            Frame { part: 401, ..frame },
            Frame { total: CALL_BYTES_MAX + 1, ..frame },
            Frame { part: SEGMENT_BYTES_MAX + 1, total: 4 << 20, ..frame },
            Frame { part: 0, ..frame },
        ] {
            assert!(Frame::decode(&wrong.encode(era), era).is_err(), "{wrong:?}");
        }
    }
}
