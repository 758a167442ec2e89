//! What lies where in the control segment that the ranks of one communicator share.
//!
//! Each rank has a slot, and a ring to each other rank. A slot has two staging buffers used in turn: a rank
//! writes buffer `n % 2` for round `n` only after it saw all others in round `n − 1`, and they went there only when they
//! were done with everything of round `n − 2`. Others write a slot only in a large all-reduce: into the payload of a staging buffer that
//! its rank has sent in this round, for it to read after one more.

use crate::call::FINGERPRINT_BYTES;
use crate::failure_report::FAILURE_BYTES_MAX;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Ranks of one communicator on one host.
pub const RANKS_MAX: usize = 512;
/// Payload of one staging buffer.
pub const STAGING_BYTES: usize = 256 << 10;
/// Payload that travels in the cache line of the round's number.
pub const TINY_BYTES: usize = 48;
/// Bytes on their way between two ranks.
pub const RING_BYTES: usize = 128 << 10;
/// Random bytes at the head of every segment, by which it is recognised.
pub const NONCE_BYTES: usize = 16;
/// What caches exchange.
pub const CACHE_LINE_BYTES: usize = 64;

#[repr(C, align(128))]
pub struct StagingBuffer {
    /// The round this staging buffer is for; written last.
    pub round: AtomicU64,
    /// Of the call's fingerprint.
    pub digest: AtomicU64,
    /// Small words of the round, or the payload if it is tiny.
    pub words: [AtomicU64; TINY_BYTES / 8],
    payload: UnsafeCell<[u8; STAGING_BYTES]>,
}

impl StagingBuffer {
    /// Where a payload of this size lies.
    pub fn payload(&self, bytes: usize) -> *mut u8 {
        if bytes <= TINY_BYTES { self.words[0].as_ptr().cast() } else { self.payload.get().cast() }
    }
}

/// A call as its rank made it, read by others only if the digests differ.
#[repr(C, align(64))]
pub struct CallRecord(pub [AtomicU64; FINGERPRINT_BYTES / 8]);

/// How a rank ended, if it did.
#[repr(C, align(64))]
pub struct RankStatus {
    /// One of the `STATUS_` values; written last.
    pub code: AtomicU32,
    pub failure_bytes: AtomicU32,
    pub failure: UnsafeCell<[u8; FAILURE_BYTES_MAX]>,
}

pub const STATUS_WELL: u32 = 0;
/// The rank let go of the communicator.
pub const STATUS_LEFT: u32 = 1;
/// A call failed; the failure report says how.
pub const STATUS_FAILED: u32 = 2;

#[repr(C, align(4096))]
pub struct RankSlot {
    pub staging: [StagingBuffer; 2],
    pub record: [CallRecord; 2],
    pub status: RankStatus,
}

#[repr(C, align(128))]
pub struct Position(pub AtomicU64);

/// Bytes from one rank to another, in order.
#[repr(C, align(4096))]
pub struct Ring {
    /// Bytes ever read, by the receiver.
    pub read: Position,
    /// Bytes ever written, by the sender.
    pub written: Position,
    data: UnsafeCell<[u8; RING_BYTES]>,
}

impl Ring {
    /// The bytes at a position, and how many there are before the ring's end.
    pub fn at(&self, position: u64) -> (*mut u8, usize) {
        let offset = position as usize % RING_BYTES;
        // SAFETY: inside the ring.
        (unsafe { self.data.get().cast::<u8>().add(offset) }, RING_BYTES - offset)
    }
}

/// The start of the segment.
#[repr(C, align(4096))]
struct SegmentHeader {
    _nonce: UnsafeCell<[u8; NONCE_BYTES]>,
    /// Whom each rank waits for while it sleeps.
    wait_words: [AtomicU32; RANKS_MAX],
}

/// A mapped control segment.
pub struct Control {
    base: *mut u8,
    bytes: usize,
    size: usize,
}

// SAFETY: everything in it is atomic or guarded by the rounds.
unsafe impl Send for Control {}
// SAFETY: as above.
unsafe impl Sync for Control {}

impl Control {
    pub fn bytes_for(size: usize) -> usize {
        size_of::<SegmentHeader>() + size * size_of::<RankSlot>() + size * size * size_of::<Ring>()
    }

    /// Takes over a mapping. A fresh one is all zeros but for its nonce, which is its first state.
    ///
    /// # Safety
    /// `base` is a mapping of `bytes_for(size)` bytes that nobody else unmaps.
    pub unsafe fn new(base: *mut u8, size: usize) -> Self {
        Self { base, bytes: Self::bytes_for(size), size }
    }

    fn head(&self) -> &SegmentHeader {
        // SAFETY: the mapping starts with it, page-aligned, and any bits are valid.
        unsafe { &*self.base.cast() }
    }

    pub fn wait_words(&self) -> &[AtomicU32] {
        &self.head().wait_words[..self.size]
    }

    pub fn slot(&self, rank: usize) -> &RankSlot {
        debug_assert!(rank < self.size);
        // SAFETY: the mapping holds `size` slots behind its head.
        unsafe { &*self.base.add(size_of::<SegmentHeader>()).cast::<RankSlot>().add(rank) }
    }

    pub fn ring(&self, from: usize, to: usize) -> &Ring {
        debug_assert!(from < self.size && to < self.size);
        let rings = size_of::<SegmentHeader>() + self.size * size_of::<RankSlot>();
        // SAFETY: the mapping holds `size²` rings behind the slots.
        unsafe { &*self.base.add(rings).cast::<Ring>().add(from * self.size + to) }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // SAFETY: mapped with this size by us; the last user is gone.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}
