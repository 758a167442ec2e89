//! Collectives straight out of and into each other's memory, when all ranks' buffers lie in one allocation.
//!
//! In the first round each rank says where its buffers are; all see the same and choose alike. At the end all meet again,
//! as nobody may touch its buffers while others still use them. For every element the owner of its slice combines all
//! ranks' values in tree order, so the result does not depend on the number of owners.

use super::Shm;
use super::exchange::{copy, slice};
use super::registry::BufferLocation;
use crate::call::CallKind;
use crate::combine::combine_twins;
use crate::element::Reduction;
use crate::fault::Fault;
use crate::task::{CollectiveTask, RankPart};
use std::sync::atomic::Ordering;

/// A block is combined into one rank's memory and copied to the others while it is in the nearest cache.
const BLOCK_BYTES: usize = 8 << 10;
/// A buffer of no allocation.
const PRIVATE: u64 = 0;

/// Where all ranks have their inputs and, if others write there, their outputs. Kept between calls for its memory.
#[derive(Default)]
pub(super) struct BufferAddresses {
    pub inputs: Vec<*mut u8>,
    outputs: Vec<*mut u8>,
}

/// The end of the last part, in bytes.
fn end(parts: &[RankPart], width: usize) -> usize {
    parts.iter().map(|part| (part.offset + part.count) * width).max().unwrap_or(0)
}

/// Where others find what they need of this rank, and how many bytes of it. A rank of which they need nothing shows another
/// buffer, so that it is no reason to go through the staging buffers.
fn shown(task: &CollectiveTask<'_>, rank: usize) -> (*const u8, usize) {
    let bytes = reach(task, rank);
    match task.kind() {
        CallKind::Broadcast => (task.output, bytes),
        _ if bytes == 0 => (task.output, 0),
        _ => (task.input, bytes),
    }
}

/// Bytes that others need behind the address that a rank shows.
fn reach(task: &CollectiveTask<'_>, rank: usize) -> usize {
    match task.kind() {
        CallKind::AllGather | CallKind::Gather => task.recv[rank].count * task.width(),
        CallKind::Broadcast | CallKind::Scatter if rank != task.root() => 0,
        CallKind::ReduceScatter | CallKind::Scatter => end(task.recv, task.width()),
        CallKind::AllToAll => end(task.send, task.width()),
        _ => task.count() * task.width(),
    }
}

impl Shm {
    /// Runs the call directly if all buffers allow it; otherwise `false`, and one round has been.
    ///
    /// # Safety
    /// As [`crate::Transport::run`].
    pub(super) unsafe fn direct(&mut self, task: &CollectiveTask<'_>) -> Result<bool, Fault> {
        let mut addresses = std::mem::take(&mut self.addresses);
        let agreed = self.agree(task, &mut addresses);
        if let Ok(true) = agreed {
            // SAFETY: the caller's promise; all ranks' buffers hold what the same call needs.
            unsafe {
                match task.kind() {
                    CallKind::AllReduce => self.reduce_into_all(task, &addresses),
                    _ => self.pull(task, &addresses),
                }
            }
        }
        self.addresses = addresses;
        let agreed = agreed?;
        if agreed {
            self.round(task)?;
        }
        Ok(agreed)
    }

    /// Writes into its staging buffer where this rank's buffers are.
    pub(super) fn show(&self, task: &CollectiveTask<'_>) -> [Option<BufferLocation>; 2] {
        let origins = &self.rounds.peers.origins;
        let (input, bytes) = shown(task, self.rounds.rank);
        let input = self.registry.find(input, bytes, origins);
        let output = match task.kind() {
            CallKind::AllReduce => self.registry.find(task.output, task.count() * task.width(), origins),
            _ => None,
        };
        let found = [input, output];
        for (words, found) in self.rounds.own_staging().words.chunks_exact(2).zip(&found) {
            words[0].store(found.as_ref().map_or(PRIVATE, |found| found.id), Ordering::Relaxed);
            words[1].store(found.as_ref().map_or(0, |found| found.offset as u64), Ordering::Relaxed);
        }
        found
    }

    /// One round in which all learn where all buffers are, and whether they serve.
    fn agree(&mut self, task: &CollectiveTask<'_>, addresses: &mut BufferAddresses) -> Result<bool, Fault> {
        let [input, output] = self.show(task);
        self.round(task)?;
        let reach = |rank: usize| reach(task, rank);
        Ok(self.locate(input.as_ref(), 0, reach, &mut addresses.inputs)
            && (task.kind() != CallKind::AllReduce || self.locate(output.as_ref(), 2, reach, &mut addresses.outputs)))
    }

    /// All ranks' buffers as they showed them in this round; `false` if they are not all in the allocation of ours.
    pub(super) fn locate(
        &self,
        own: Option<&BufferLocation>,
        word: usize,
        reach: impl Fn(usize) -> usize,
        found: &mut Vec<*mut u8>,
    ) -> bool {
        found.clear();
        for rank in 0..self.rounds.size {
            let words = &self.rounds.staging(rank).words;
            let (id, offset) = (words[word].load(Ordering::Relaxed), words[word + 1].load(Ordering::Relaxed));
            let place = own.filter(|own| own.id == id);
            let origins = &self.rounds.peers.origins;
            match place.and_then(|own| own.of(rank, origins[rank], offset, reach(rank))) {
                Some(address) => found.push(address),
                None => return false,
            }
        }
        true
    }

    /// Combines this rank's slice and writes it into everybody's output.
    unsafe fn reduce_into_all(&mut self, task: &CollectiveTask<'_>, addresses: &BufferAddresses) {
        let (width, rank, size) = (task.width(), self.rounds.rank, self.rounds.size);
        for block in blocks(slice(task.count(), width, size, rank), width) {
            let at = block.offset * width;
            // SAFETY: inside all ranks' buffers; nobody else touches this slice until all have met.
            unsafe {
                let (call, output) = (task.fingerprint, addresses.outputs[rank].add(at));
                if size == 2 && call.reduction != Reduction::Mean {
                    let inputs = [addresses.inputs[0].add(at).cast_const(), addresses.inputs[1].add(at).cast_const()];
                    let outputs = [output, addresses.outputs[1 - rank].add(at)];
                    combine_twins(call.element, call.reduction, &inputs, outputs, block.count);
                    continue;
                }
                self.combine_block(task, addresses, block, output);
                for other in (0..size).filter(|other| *other != rank) {
                    copy(output, addresses.outputs[other].add(at), block.count * width);
                }
            }
        }
    }

    /// Takes what this rank needs from the others' inputs into its own output, which may be private.
    unsafe fn pull(&mut self, task: &CollectiveTask<'_>, addresses: &BufferAddresses) {
        let (width, rank, root) = (task.width(), self.rounds.rank, task.root());
        let own = task.recv.get(rank).copied().unwrap_or_default();
        let whole = RankPart { offset: 0, count: task.count() };
        // SAFETY: inside all ranks' buffers, which only their readers touch until all have met.
        unsafe {
            match task.kind() {
                CallKind::Broadcast if rank != root => copy(addresses.inputs[root], task.output, whole.count * width),
                CallKind::Scatter => {
                    copy(addresses.inputs[root].add(own.offset * width), task.output, own.count * width)
                }
                CallKind::AllGather => self.pull_parts(task, addresses),
                CallKind::Gather if rank == root => self.pull_parts(task, addresses),
                CallKind::ReduceScatter => self.pull_combined(task, addresses, own),
                CallKind::Reduce if rank == root => self.pull_combined(task, addresses, whole),
                _ => {}
            }
        }
    }

    unsafe fn pull_parts(&self, task: &CollectiveTask<'_>, addresses: &BufferAddresses) {
        let (width, rank, size) = (task.width(), self.rounds.rank, self.rounds.size);
        // Everybody starts at another rank, so that they do not all read the same memory.
        for other in (0..size).map(|step| (rank + step) % size) {
            let part = task.recv[other];
            // SAFETY: the caller's promise.
            unsafe { copy(addresses.inputs[other], task.output.wrapping_add(part.offset * width), part.count * width) };
        }
    }

    unsafe fn pull_combined(&mut self, task: &CollectiveTask<'_>, addresses: &BufferAddresses, part: RankPart) {
        for block in blocks(part, task.width()) {
            let output = task.output.wrapping_add((block.offset - part.offset) * task.width());
            // SAFETY: the caller's promise.
            unsafe { self.combine_block(task, addresses, block, output) };
        }
    }

    unsafe fn combine_block(
        &mut self,
        task: &CollectiveTask<'_>,
        addresses: &BufferAddresses,
        block: RankPart,
        output: *mut u8,
    ) {
        let at = block.offset * task.width();
        self.sources.clear();
        self.sources.extend(addresses.inputs.iter().map(|input| input.wrapping_add(at).cast_const()));
        // SAFETY: the caller's promise.
        unsafe { self.combine(task, output, block.count) };
    }
}

/// A part in blocks that the nearest cache holds.
pub(super) fn blocks(part: RankPart, width: usize) -> impl Iterator<Item = RankPart> {
    let (most, end) = (BLOCK_BYTES / width, part.offset + part.count);
    (part.offset..end).step_by(most).map(move |offset| RankPart { offset, count: most.min(end - offset) })
}
