//! Messages between two ranks, through the ring from one to the other. No third rank takes part.
//!
//! A message is a cache line with its length and fingerprint, and then its bytes, filled up to a whole line. It may be
//! longer than the ring.

use super::Shm;
use super::layout::{CACHE_LINE_BYTES, RING_BYTES, Ring};
use super::rounds::Rounds;
use crate::call::{CallKind, FINGERPRINT_BYTES, Fingerprint};
use crate::fault::Fault;
use crate::task::CollectiveTask;
use std::sync::atomic::Ordering;

/// Bytes after which the other side learns of them: it reads the first while the next are written.
const PIECE_BYTES: usize = RING_BYTES / 4;

type Header = [u8; CACHE_LINE_BYTES];

fn header(call: &Fingerprint, bytes: usize) -> Header {
    let mut header = [0; CACHE_LINE_BYTES];
    header[..FINGERPRINT_BYTES].copy_from_slice(&call.encode());
    header[FINGERPRINT_BYTES..].copy_from_slice(&(bytes as u64).to_le_bytes());
    header
}

fn padded(position: u64) -> u64 {
    position.next_multiple_of(CACHE_LINE_BYTES as u64)
}

/// Bytes that can be read at this position, after waiting for at least one.
fn filled(rounds: &Rounds, ring: &Ring, position: u64, peer: usize, call: &Fingerprint) -> Result<usize, Fault> {
    let written = || ring.written.0.load(Ordering::Acquire) - position;
    rounds.until(peer, call, || written() > 0)?;
    Ok(written() as usize)
}

/// Bytes that can be written at this position, after waiting for at least one.
fn free(rounds: &Rounds, ring: &Ring, position: u64, peer: usize, call: &Fingerprint) -> Result<usize, Fault> {
    let free = || RING_BYTES - (position - ring.read.0.load(Ordering::Acquire)) as usize;
    rounds.until(peer, call, || free() > 0)?;
    Ok(free())
}

impl Shm {
    /// # Safety
    /// The bytes are valid for reading.
    pub(super) unsafe fn send_bytes(
        &mut self,
        to: usize,
        call: &Fingerprint,
        data: *const u8,
        bytes: usize,
    ) -> Result<(), Fault> {
        let rounds = &self.rounds;
        let ring = rounds.control.ring(rounds.rank, to);
        let publish = |position: u64| {
            ring.written.0.store(padded(position), Ordering::Release);
            rounds.wake(to);
        };
        let mut position = ring.written.0.load(Ordering::Relaxed);
        free(rounds, ring, position, to, call)?;
        // SAFETY: positions are whole lines here, so a line is free and does not wrap.
        unsafe { ring.at(position).0.cast::<Header>().write(header(call, bytes)) };
        position += CACHE_LINE_BYTES as u64;
        let mut done = 0;
        while done < bytes {
            if position - ring.read.0.load(Ordering::Relaxed) == RING_BYTES as u64 {
                publish(position);
            }
            let space = free(rounds, ring, position, to, call)?;
            let (place, contiguous) = ring.at(position);
            let here = space.min(contiguous).min(PIECE_BYTES).min(bytes - done);
            // SAFETY: inside the caller's bytes and the free part of the ring.
            unsafe { std::ptr::copy_nonoverlapping(data.add(done), place, here) };
            (position, done) = (position + here as u64, done + here);
            if done < bytes {
                publish(position);
            }
        }
        publish(position);
        Ok(())
    }

    /// # Safety
    /// The bytes are valid for writing.
    pub(super) unsafe fn recv_bytes(
        &mut self,
        from: usize,
        call: &Fingerprint,
        data: *mut u8,
        bytes: usize,
    ) -> Result<(), Fault> {
        let rounds = &self.rounds;
        let ring = rounds.control.ring(from, rounds.rank);
        let mut position = ring.read.0.load(Ordering::Relaxed);
        filled(rounds, ring, position, from, call)?;
        // SAFETY: a line was written here and does not wrap.
        let theirs = unsafe { ring.at(position).0.cast::<Header>().read() };
        if theirs != header(call, bytes) {
            let mut fingerprint = [0; FINGERPRINT_BYTES];
            fingerprint.copy_from_slice(&theirs[..FINGERPRINT_BYTES]);
            return Err(rounds.disagree(from, call, Fingerprint::decode(&fingerprint)));
        }
        position += CACHE_LINE_BYTES as u64;
        let mut done = 0;
        while done < bytes {
            let ready = filled(rounds, ring, position, from, call)?;
            let (place, contiguous) = ring.at(position);
            let here = ready.min(contiguous).min(bytes - done);
            // SAFETY: inside the caller's bytes and the written part of the ring.
            unsafe { std::ptr::copy_nonoverlapping(place.cast_const(), data.add(done), here) };
            (position, done) = (position + here as u64, done + here);
            ring.read.0.store(if done < bytes { position } else { padded(position) }, Ordering::Release);
            rounds.wake(from);
        }
        if bytes == 0 {
            ring.read.0.store(position, Ordering::Release);
            rounds.wake(from);
        }
        Ok(())
    }

    /// # Safety
    /// As [`crate::Transport::run`].
    pub(super) unsafe fn message(&mut self, task: &CollectiveTask<'_>) -> Result<(), Fault> {
        let call = Fingerprint { kind: CallKind::Send, ..task.fingerprint };
        let bytes = task.count() * task.width();
        self.rounds.enter(&call);
        // SAFETY: the caller's promise, passed on.
        unsafe {
            match task.kind() {
                CallKind::Send => self.send_bytes(task.peer, &call, task.input, bytes),
                _ => self.recv_bytes(task.peer, &call, task.output, bytes),
            }
        }
    }
}
