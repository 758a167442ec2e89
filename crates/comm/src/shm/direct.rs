//! Collectives straight out of and into each other's memory, when all ranks' buffers lie in one allocation.
//!
//! In the first round each rank says where its buffers are; all see the same and choose alike. At the end all meet again,
//! as nobody may touch its buffers while others still use them. For every element the owner of its slice combines all
//! ranks' values in tree order, so the result does not depend on the number of owners.

use super::Shm;
use super::exchange::{copy, slice};
use super::registry::Found;
use crate::call::Kind;
use crate::fault::Fault;
use crate::task::{Part, Task};
use std::sync::atomic::Ordering;

/// A block is combined into one rank's memory and copied to the others while it is in the nearest cache.
const BLOCK_BYTES: usize = 16 << 10;
/// A buffer of no allocation.
const PRIVATE: u64 = 0;

/// Where all ranks have their inputs and, if wanted, their outputs.
#[derive(Default)]
pub(super) struct Places {
    inputs: Vec<*mut u8>,
    outputs: Vec<*mut u8>,
}

impl Shm {
    /// Runs the call directly if all buffers allow it; otherwise `false`, and one round has been.
    ///
    /// # Safety
    /// As [`crate::Transport::run`].
    pub(super) unsafe fn direct(&mut self, task: &Task<'_>) -> Result<bool, Fault> {
        let mut places = std::mem::take(&mut self.places);
        if !self.agree(task, &mut places)? {
            self.places = places;
            return Ok(false);
        }
        // SAFETY: the caller's promise; all ranks' buffers hold what the same call needs.
        unsafe {
            match task.kind() {
                Kind::AllReduce => self.reduce_into_all(task, &places),
                _ => self.pull(task, &places),
            }
        }
        self.places = places;
        self.round(task)?;
        Ok(true)
    }

    /// What this rank must show of its input, and of its output if others write there.
    fn shown(&self, task: &Task<'_>) -> (*const u8, usize, Option<(*const u8, usize)>) {
        let (width, own) = (task.width(), self.room.rank);
        let whole = task.count() * width;
        let end = |parts: &[Part]| parts.iter().map(|part| part.offset + part.count).max().unwrap_or(0) * width;
        match task.kind() {
            Kind::AllReduce => (task.input, whole, Some((task.output.cast_const(), whole))),
            Kind::ReduceScatter => (task.input, end(task.recv), None),
            Kind::AllGather | Kind::Gather if task.recv[own].count == 0 => (task.output, 0, None),
            Kind::AllGather | Kind::Gather => (task.input, task.recv[own].count * width, None),
            Kind::Broadcast => (task.output, whole, None),
            _ => (task.input, whole, None),
        }
    }

    /// One round in which all learn where all buffers are; whether all lie in one allocation.
    fn agree(&mut self, task: &Task<'_>, places: &mut Places) -> Result<bool, Fault> {
        let origins = &self.room.neighbours.origins;
        let (input, input_bytes, output) = self.shown(task);
        let input = self.registry.find(input, input_bytes, origins);
        let output = output.map(|(output, bytes)| self.registry.find(output, bytes, origins));
        let words =
            |found: &Option<Found>| found.as_ref().map_or((PRIVATE, 0), |found| (found.id, found.offset as u64));
        let (input_words, output_words) = (words(&input), output.as_ref().map_or((PRIVATE, 0), words));
        let mail = self.room.outbox();
        for (slot, word) in mail.words.iter().zip([input_words.0, input_words.1, output_words.0, output_words.1]) {
            slot.store(word, Ordering::Relaxed);
        }
        self.round(task)?;
        let found = self.gather_places(task, input.as_ref(), 0, &mut places.inputs);
        Ok(found && output.is_none_or(|output| self.gather_places(task, output.as_ref(), 2, &mut places.outputs)))
    }

    /// All ranks' buffers, if they are in the allocation in which ours is.
    fn gather_places(&self, task: &Task<'_>, own: Option<&Found>, word: usize, places: &mut Vec<*mut u8>) -> bool {
        let of = |rank: usize| {
            let words = &self.room.mail(rank).words;
            let (id, offset) = (words[word].load(Ordering::Relaxed), words[word + 1].load(Ordering::Relaxed));
            let own = own.filter(|own| own.id == id)?;
            own.of(self.room.neighbours.origins[rank], offset, self.reach(task, rank))
        };
        places.clear();
        places.extend((0..self.room.size).map_while(of));
        places.len() == self.room.size
    }

    /// Bytes that others touch behind a rank's shown address.
    fn reach(&self, task: &Task<'_>, rank: usize) -> usize {
        match task.kind() {
            Kind::AllGather | Kind::Gather => task.recv[rank].count * task.width(),
            Kind::ReduceScatter => {
                task.recv.iter().map(|part| part.offset + part.count).max().unwrap_or(0) * task.width()
            }
            _ => task.count() * task.width(),
        }
    }

    /// Combines this rank's slice and writes it into everybody's output.
    unsafe fn reduce_into_all(&mut self, task: &Task<'_>, places: &Places) {
        let (width, rank, size) = (task.width(), self.room.rank, self.room.size);
        let own = slice(task.count(), width, size, rank);
        let block = BLOCK_BYTES / width;
        let mut done = 0;
        while done < own.count {
            let here = block.min(own.count - done);
            let at = (own.offset + done) * width;
            self.sources.clear();
            self.sources.extend(places.inputs.iter().map(|input| input.wrapping_add(at).cast_const()));
            // SAFETY: inside all ranks' buffers; nobody else touches this slice until all have met.
            unsafe {
                let output = places.outputs[rank].add(at);
                self.combine(task, output, here);
                for other in (0..size).filter(|other| *other != rank) {
                    copy(output, places.outputs[other].add(at), here * width);
                }
            }
            done += here;
        }
    }

    /// Takes what this rank needs from the others' inputs into its own output, which may be private.
    unsafe fn pull(&mut self, task: &Task<'_>, places: &Places) {
        let (width, rank, size) = (task.width(), self.room.rank, self.room.size);
        let root = task.root();
        // SAFETY: inside all ranks' buffers, which only their readers touch until all have met.
        unsafe {
            match task.kind() {
                Kind::Broadcast if rank != root => copy(places.inputs[root], task.output, task.count() * width),
                Kind::Gather if rank != root => {}
                Kind::AllGather | Kind::Gather => {
                    // Everybody starts at another rank, so that they do not all read the same memory.
                    for other in (0..size).map(|step| (rank + step) % size) {
                        let part = task.recv[other];
                        copy(places.inputs[other], task.output.wrapping_add(part.offset * width), part.count * width);
                    }
                }
                Kind::ReduceScatter => self.pull_combined(task, places, task.recv[rank]),
                Kind::Reduce if rank == root => {
                    self.pull_combined(task, places, Part { offset: 0, count: task.count() });
                }
                _ => {}
            }
        }
    }

    unsafe fn pull_combined(&mut self, task: &Task<'_>, places: &Places, part: Part) {
        let at = part.offset * task.width();
        self.sources.clear();
        self.sources.extend(places.inputs.iter().map(|input| input.wrapping_add(at).cast_const()));
        // SAFETY: the caller's promise.
        unsafe { self.combine(task, task.output, part.count) };
    }
}
