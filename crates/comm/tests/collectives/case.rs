//! A call with its meaning: buffers before it, and what they must hold after.

use crate::oracle;
use kolo_comm::call::NAME_BYTES;
use kolo_comm::task::{CollectiveTask, RankPart};
use kolo_comm::{CallKind, ElementType, Fingerprint, Reduction};

/// One call as all ranks make it.
#[derive(Clone, Debug)]
pub struct Case {
    pub kind: CallKind,
    pub element: ElementType,
    pub reduction: Reduction,
    pub root: usize,
    pub count: usize,
    /// Counts of the parts, by rank; for all-to-all, `counts[from][to]`.
    pub counts: Vec<Vec<usize>>,
    pub in_place: bool,
    /// Elements between parts.
    pub gap: usize,
}

/// A rank's buffers before or after a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffers {
    pub input: Vec<u8>,
    pub output: Vec<u8>,
}

pub fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Numbers of moderate size in any element.
pub fn fill(element: ElementType, count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(count * element.bytes());
    for _ in 0..count {
        let value = (random(&mut state) % 4001) as f64 / 1000.0 - 2.0;
        match element {
            ElementType::F32 => bytes.extend((value as f32).to_le_bytes()),
            ElementType::F64 => bytes.extend(value.to_le_bytes()),
            ElementType::Bf16 => bytes.extend(half::bf16::from_f64(value).to_le_bytes()),
            ElementType::F16 => bytes.extend(half::f16::from_f64(value).to_le_bytes()),
            ElementType::I32 => bytes.extend(((value * 1e6) as i32).to_le_bytes()),
            ElementType::I64 => bytes.extend(((value * 1e6) as i64).to_le_bytes()),
            ElementType::U8 => bytes.push((value * 60.0) as i32 as u8),
        }
    }
    bytes
}

pub fn as_numbers(element: ElementType, bytes: &[u8]) -> Vec<f64> {
    let number = |chunk: &[u8]| match element {
        ElementType::F32 => f64::from(f32::from_le_bytes(chunk.try_into().unwrap())),
        ElementType::F64 => f64::from_le_bytes(chunk.try_into().unwrap()),
        ElementType::Bf16 => half::bf16::from_le_bytes(chunk.try_into().unwrap()).to_f64(),
        ElementType::F16 => half::f16::from_le_bytes(chunk.try_into().unwrap()).to_f64(),
        ElementType::I32 => f64::from(i32::from_le_bytes(chunk.try_into().unwrap())),
        ElementType::I64 => i64::from_le_bytes(chunk.try_into().unwrap()) as f64,
        ElementType::U8 => f64::from(chunk[0]),
    };
    bytes.chunks_exact(element.bytes()).map(number).collect()
}

impl Case {
    pub fn size(&self) -> usize {
        self.counts.len()
    }

    fn parts(&self, counts: &[usize]) -> Vec<RankPart> {
        let mut offset = 0;
        // The last rank's part comes first, so that the order of parts is not that of ranks.
        let mut parts = vec![RankPart::default(); counts.len()];
        for rank in (0..counts.len()).rev() {
            parts[rank] = RankPart { offset, count: counts[rank] };
            offset += counts[rank] + self.gap;
        }
        parts
    }

    fn send(&self, rank: usize) -> Vec<RankPart> {
        self.parts(&self.counts[rank])
    }

    fn recv(&self, rank: usize) -> Vec<RankPart> {
        if self.kind == CallKind::AllToAll {
            return self.parts(&self.counts.iter().map(|row| row[rank]).collect::<Vec<_>>());
        }
        self.parts(&self.counts[0])
    }

    fn span(parts: &[RankPart]) -> usize {
        parts.iter().map(|part| part.offset + part.count).max().unwrap_or(0)
    }

    /// Elements of input and output of a rank.
    fn lengths(&self, rank: usize) -> (usize, usize) {
        let (recv, root) = (self.recv(rank), rank == self.root);
        let (whole, own) = (Self::span(&recv), recv[rank].count);
        match self.kind {
            CallKind::Barrier => (0, 0),
            CallKind::Broadcast => (0, self.count),
            CallKind::Reduce => (self.count, if root { self.count } else { 0 }),
            CallKind::AllReduce | CallKind::Scan | CallKind::ExclusiveScan => (self.count, self.count),
            CallKind::ReduceScatter => (whole, own),
            CallKind::Gather => (own, if root { whole } else { 0 }),
            CallKind::AllGather => (own, whole),
            CallKind::Scatter => (if root { whole } else { 0 }, own),
            CallKind::AllToAll => (Self::span(&self.send(rank)), whole),
            CallKind::Send | CallKind::Recv => (0, 0),
        }
    }

    pub fn before(&self, rank: usize) -> Buffers {
        let (input, output) = self.lengths(rank);
        Buffers {
            input: fill(self.element, input, 1 + rank as u64),
            output: fill(self.element, output, 1001 + rank as u64),
        }
    }

    /// What the call means.
    pub fn after(&self, rank: usize) -> Vec<u8> {
        let width = self.element.bytes();
        let all: Vec<Buffers> = (0..self.size()).map(|rank| self.before(rank)).collect();
        let mut output = all[rank].output.clone();
        let bytes = |part: RankPart| part.offset * width..(part.offset + part.count) * width;
        let combined = |from: usize, to: usize, part: RankPart| {
            let vectors: Vec<&[u8]> = all[from..to].iter().map(|buffers| &buffers.input[bytes(part)]).collect();
            oracle::tree(self.element, self.reduction, &vectors, self.size())
        };
        let whole = RankPart { offset: 0, count: self.count };
        let recv = self.recv(rank);
        match self.kind {
            CallKind::Broadcast => output = all[self.root].output.clone(),
            CallKind::Reduce if rank == self.root => output = combined(0, self.size(), whole),
            CallKind::AllReduce => output = combined(0, self.size(), whole),
            CallKind::Scan => output = combined(0, rank + 1, whole),
            CallKind::ExclusiveScan if rank > 0 => output = combined(0, rank, whole),
            CallKind::ExclusiveScan if self.in_place => output = all[0].input.clone(),
            CallKind::ReduceScatter => output = combined(0, self.size(), recv[rank]),
            CallKind::Gather if rank != self.root => {}
            CallKind::Gather | CallKind::AllGather => {
                for (from, part) in recv.iter().enumerate() {
                    output[bytes(*part)].copy_from_slice(&all[from].input);
                }
            }
            CallKind::Scatter => output = all[self.root].input[bytes(recv[rank])].to_vec(),
            CallKind::AllToAll => {
                for (from, part) in recv.iter().enumerate() {
                    output[bytes(*part)].copy_from_slice(&all[from].input[bytes(self.send(from)[rank])]);
                }
            }
            _ => {}
        }
        output
    }

    /// In-place calls: where the input and the output lie in their common memory.
    fn shifts(&self, rank: usize) -> (usize, usize) {
        let own = self.recv(rank)[rank].offset;
        match self.kind {
            CallKind::Gather | CallKind::AllGather => (own, 0),
            CallKind::ReduceScatter | CallKind::Scatter => (0, own),
            _ => (0, 0),
        }
    }

    fn can_be_in_place(&self) -> bool {
        !matches!(self.kind, CallKind::Barrier | CallKind::Broadcast | CallKind::AllToAll)
    }

    pub fn fingerprint(&self) -> Fingerprint {
        let count = match self.kind {
            CallKind::Barrier | CallKind::AllToAll => 0,
            CallKind::ReduceScatter | CallKind::Gather | CallKind::AllGather | CallKind::Scatter => {
                self.counts[0].iter().sum()
            }
            _ => self.count,
        };
        Fingerprint {
            communicator: 0,
            kind: self.kind,
            element: self.element,
            reduction: self.reduction,
            root: self.root as u32,
            sequence: 0,
            count: count as u64,
            name: [0; NAME_BYTES],
        }
    }

    /// The call of one rank with its buffers.
    pub fn begin(&self, rank: usize, sequence: u64) -> Running {
        let width = self.element.bytes();
        let Buffers { input, output } = self.before(rank);
        let (shift_input, shift_output) = self.shifts(rank);
        let (shift_input, shift_output) = (shift_input * width, shift_output * width);
        let both = !input.is_empty() && !output.is_empty();
        let in_place = self.in_place && self.can_be_in_place() && both;
        let mut common = vec![0; (shift_input + input.len()).max(shift_output + output.len())];
        common[shift_output..][..output.len()].copy_from_slice(&output);
        common[shift_input..][..input.len()].copy_from_slice(&input);
        Running {
            fingerprint: Fingerprint { sequence, ..self.fingerprint() },
            untouched: input.clone(),
            input,
            output,
            common: in_place.then_some((common, shift_input, shift_output)),
            send: self.send(rank),
            recv: self.recv(rank),
        }
    }
}

/// A call in progress.
pub struct Running {
    pub fingerprint: Fingerprint,
    input: Vec<u8>,
    untouched: Vec<u8>,
    output: Vec<u8>,
    /// The memory of an in-place call, and where input and output begin in it.
    common: Option<(Vec<u8>, usize, usize)>,
    send: Vec<RankPart>,
    recv: Vec<RankPart>,
}

impl Running {
    pub fn task(&mut self) -> CollectiveTask<'_> {
        let (input_bytes, output_bytes) = (self.input.len(), self.output.len());
        let (input, output) = match &mut self.common {
            Some((common, input, output)) => {
                let base = common.as_mut_ptr();
                (base.wrapping_add(*input).cast_const(), base.wrapping_add(*output))
            }
            None => (self.input.as_ptr(), self.output.as_mut_ptr()),
        };
        let (fingerprint, send, recv) = (self.fingerprint, &self.send[..], &self.recv[..]);
        CollectiveTask {
            fingerprint,
            input,
            output,
            input_bytes,
            output_bytes,
            send,
            recv,
            peer: 0,
            reproducible: true,
        }
    }

    pub fn in_place(&self) -> bool {
        self.common.is_some()
    }

    /// The output, when the call is done.
    pub fn end(self) -> Vec<u8> {
        assert_eq!(self.input, self.untouched, "the input was changed");
        match self.common {
            Some((common, _, output)) => common[output..][..self.output.len()].to_vec(),
            None => self.output,
        }
    }
}

/// Exact where the order of additions is the tree's; otherwise near.
pub fn agree(case: &Case, exact: bool, ours: &[u8], expected: &[u8]) -> bool {
    if exact {
        return ours == expected;
    }
    let tolerance = match case.element {
        ElementType::F32 => 1e-5,
        ElementType::F64 => 1e-13,
        ElementType::Bf16 => 6e-2,
        ElementType::F16 => 8e-3,
        _ => return ours == expected,
    };
    let close = |a: &f64, b: &f64| (a - b).abs() <= tolerance * (4.0 + b.abs());
    let (ours, expected) = (as_numbers(case.element, ours), as_numbers(case.element, expected));
    ours.len() == expected.len() && ours.iter().zip(&expected).all(|(a, b)| close(a, b))
}
