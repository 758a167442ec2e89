//! A call by its raw parts.

use crate::call::{CallKind, short_name};
use crate::element::{ElementType, Reduction, Scalar};
use crate::task::{RankPart, even_parts};
use std::sync::Arc;

/// A call by its raw parts, for callers whose buffers outlive a borrow.
#[derive(Clone, Debug)]
pub struct Request {
    pub kind: CallKind,
    pub element: ElementType,
    pub reduction: Reduction,
    pub root: usize,
    pub count: usize,
    pub input: *const u8,
    pub output: *mut u8,
    pub input_bytes: usize,
    pub output_bytes: usize,
    pub send: Arc<[RankPart]>,
    pub recv: Arc<[RankPart]>,
    pub peer: usize,
    pub name: [u8; crate::call::NAME_BYTES],
}

// SAFETY: the pointers are the caller's promise, made where the request is started.
unsafe impl Send for Request {}

impl Request {
    /// A call of this kind with nothing in it.
    pub fn new(kind: CallKind, element: ElementType) -> Self {
        Self {
            kind,
            element,
            reduction: Reduction::Sum,
            root: 0,
            count: 0,
            input: std::ptr::null(),
            output: std::ptr::null_mut(),
            input_bytes: 0,
            output_bytes: 0,
            send: Arc::default(),
            recv: Arc::default(),
            peer: 0,
            name: [0; crate::call::NAME_BYTES],
        }
    }

    /// `name` shows in messages and timelines.
    pub fn named(mut self, name: &str) -> Self {
        self.name = short_name(name);
        self
    }

    /// Bytes that one of so many ranks sends in this call if everyone speaks to everyone, which takes as few as any algorithm. Small
    /// sums may take more bytes and fewer rounds; over shared memory, it is what others take from this rank.
    pub fn sent_bytes(&self, rank: usize, size: usize) -> u64 {
        let part = |parts: &[RankPart], rank: usize| parts.get(rank).map_or(0, |part| part.count);
        let all = |parts: &[RankPart]| parts.iter().map(|part| part.count).sum::<usize>();
        let (others, is_root) = (size.saturating_sub(1), rank == self.root);
        let own_slice = part(&even_parts(self.count, size.max(1)), rank);
        let elements = match self.kind {
            _ if others == 0 => 0,
            CallKind::Barrier | CallKind::Recv => 0,
            CallKind::Send => self.count,
            CallKind::AllReduce => self.count - own_slice + own_slice * others,
            CallKind::ReduceScatter => all(&self.recv) - part(&self.recv, rank),
            CallKind::AllGather => part(&self.recv, rank) * others,
            CallKind::AllToAll => all(&self.send) - part(&self.send, rank),
            CallKind::Gather => {
                if is_root {
                    0
                } else {
                    part(&self.recv, rank)
                }
            }
            CallKind::Scatter => {
                if is_root {
                    all(&self.recv) - part(&self.recv, rank)
                } else {
                    0
                }
            }
            CallKind::Reduce => {
                if is_root {
                    self.count - own_slice
                } else {
                    self.count
                }
            }
            CallKind::Broadcast => match is_root {
                true => self.count - own_slice + own_slice * others,
                false => own_slice * (others - 1),
            },
            CallKind::Scan | CallKind::ExclusiveScan => self.count * (others - rank.min(others)),
        };
        (elements * self.element.bytes()) as u64
    }

    pub(super) fn input<T: Scalar>(mut self, data: &[T]) -> Self {
        (self.input, self.input_bytes) = (data.as_ptr().cast(), size_of_val(data));
        self
    }

    pub(super) fn output<T: Scalar>(mut self, data: &mut [T]) -> Self {
        (self.output, self.output_bytes) = (data.as_mut_ptr().cast(), size_of_val(data));
        self
    }

    pub(super) fn in_place<T: Scalar>(self, data: &mut [T]) -> Self {
        let input = data.as_ptr().cast();
        Self { input, input_bytes: size_of_val(data), ..self.output(data) }
    }
}
