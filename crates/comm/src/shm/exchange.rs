//! Collectives through the staging buffers: every rank copies what others need of its input into its buffer, all meet, and
//! each takes from the others' buffers. Small calls are one round; larger ones go chunk by chunk through the two buffers in
//! turn. A large all-reduce takes two rounds for a chunk: others write into a buffer between them, and its rank reads that.

use super::Shm;
use super::direct::blocks;
use super::layout::{CACHE_LINE_BYTES, STAGING_BYTES};
use crate::call::CallKind;
use crate::combine::{combine_tree, combine_twins, divide};
use crate::element::Reduction;
use crate::fault::Fault;
use crate::task::{CollectiveTask, RankPart};

/// A chunk of a call in which every rank reads all of every staging buffer: four of them fit the second cache of a processor.
const CHUNK_BYTES: usize = 128 << 10;
/// Up to this size each rank combines everything alone, and above it each its slice.
const ALONE_BYTES: usize = 8 << 10;

/// A part of an all-to-all as its sender tells it.
#[derive(Clone, Copy)]
#[repr(C)]
struct PairEntry {
    offset: u64,
    count: u64,
}

/// The `step`-th piece of a part that goes `most` elements at a time.
fn piece(part: RankPart, step: usize, most: usize) -> RankPart {
    let done = (step * most).min(part.count);
    RankPart { offset: part.offset + done, count: most.min(part.count - done) }
}

/// How many steps the longest part takes; at least one, as every call is at least one round.
fn steps(longest: usize, most: usize) -> usize {
    longest.div_ceil(most).max(1)
}

impl Shm {
    /// # Safety
    /// As [`crate::Transport::run`].
    pub(super) unsafe fn exchange(&mut self, task: &CollectiveTask<'_>) -> Result<(), Fault> {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            match task.kind() {
                CallKind::AllReduce if task.count() * task.width() > ALONE_BYTES => self.exchange_sliced(task),
                CallKind::AllReduce | CallKind::Reduce | CallKind::Scan | CallKind::ExclusiveScan => {
                    self.exchange_whole(task)
                }
                CallKind::ReduceScatter | CallKind::Scatter => self.exchange_areas(task),
                CallKind::AllGather | CallKind::Gather | CallKind::Broadcast => self.exchange_parts(task),
                CallKind::AllToAll => self.exchange_pairs(task),
                CallKind::Barrier | CallKind::Send | CallKind::Recv => self.round(task),
            }
        }
    }

    /// A round whose staging buffer is already written.
    pub(super) fn round(&mut self, task: &CollectiveTask<'_>) -> Result<(), Fault> {
        self.rounds.publish();
        self.rounds.await_all(&task.fingerprint)
    }

    /// Combines `self.sources`, elements `count`, into `output`.
    ///
    /// # Safety
    /// All sources and the output hold that many elements.
    pub(super) unsafe fn combine(&self, task: &CollectiveTask<'_>, output: *mut u8, count: usize) {
        let (element, reduction) = (task.fingerprint.element, task.fingerprint.reduction);
        // SAFETY: the caller's promise, passed on.
        unsafe {
            combine_tree(element, reduction, &self.sources, output, count);
            if reduction == Reduction::Mean {
                divide(element, output, self.rounds.size, count);
            }
        }
    }

    /// Every rank's whole vector goes to all.
    unsafe fn exchange_whole(&mut self, task: &CollectiveTask<'_>) -> Result<(), Fault> {
        let (width, rank) = (task.width(), self.rounds.rank);
        let most = CHUNK_BYTES / width;
        let whole = RankPart { offset: 0, count: task.count() };
        let ranks = match task.kind() {
            CallKind::AllReduce => 0..self.rounds.size,
            CallKind::Reduce if rank == task.root() => 0..self.rounds.size,
            CallKind::Scan => 0..rank + 1,
            CallKind::ExclusiveScan => 0..rank,
            _ => 0..0,
        };
        for step in 0..steps(whole.count, most) {
            let here = piece(whole, step, most);
            let bytes = here.count * width;
            // SAFETY: the caller's promise; a chunk fits a staging buffer.
            unsafe {
                let input = task.input.wrapping_add(here.offset * width);
                copy(input, self.rounds.own_staging().payload(bytes), bytes);
                self.round(task)?;
                self.sources.clear();
                for other in ranks.clone() {
                    let staging = self.rounds.staging(other).payload(bytes).cast_const();
                    self.sources.push(if other == rank { input } else { staging });
                }
                if !self.sources.is_empty() {
                    self.combine(task, task.output.wrapping_add(here.offset * width), here.count);
                }
            }
        }
        Ok(())
    }

    /// All-reduce in slices. A rank's staging buffer carries the others' slices to them and comes back with their results: a
    /// cache line of it only ever travels between its writer and the owner of its slice, once there and once back.
    unsafe fn exchange_sliced(&mut self, task: &CollectiveTask<'_>) -> Result<(), Fault> {
        let (width, rank, size) = (task.width(), self.rounds.rank, self.rounds.size);
        let most = STAGING_BYTES / width;
        let whole = RankPart { offset: 0, count: task.count() };
        for step in 0..steps(whole.count, most) {
            let here = piece(whole, step, most);
            let input = task.input.wrapping_add(here.offset * width);
            let output = task.output.wrapping_add(here.offset * width);
            let bytes_of = |owner: usize| {
                let part = slice(here.count, width, size, owner);
                (part.offset * width, part.count * width)
            };
            let others = || (1..size).map(|distance| bytes_of((rank + distance) % size));
            let own_staging = self.rounds.own_staging().payload(STAGING_BYTES);
            // SAFETY: the caller's promise; a chunk fits a staging buffer. Between the two rounds only the owner of a slice touches it.
            unsafe {
                for (at, bytes) in others() {
                    copy(input.wrapping_add(at), own_staging.add(at), bytes);
                }
                self.round(task)?;
                self.combine_in_staging(task, input, output, slice(here.count, width, size, rank));
                self.round(task)?;
                for (at, bytes) in others() {
                    copy(own_staging.add(at), output.wrapping_add(at), bytes);
                }
            }
        }
        Ok(())
    }

    /// Combines this rank's slice of a chunk into its output and, in place, into the others' staging buffers.
    unsafe fn combine_in_staging(
        &mut self,
        task: &CollectiveTask<'_>,
        input: *const u8,
        output: *mut u8,
        own: RankPart,
    ) {
        let (width, rank, size) = (task.width(), self.rounds.rank, self.rounds.size);
        for block in blocks(own, width) {
            let (at, bytes) = (block.offset * width, block.count * width);
            let (input, output) = (input.wrapping_add(at), output.wrapping_add(at));
            // SAFETY: the caller's promise.
            unsafe {
                let staging = |other: usize| self.rounds.staging(other).payload(STAGING_BYTES).add(at);
                let source = |other: usize| if other == rank { input } else { staging(other).cast_const() };
                let (element, reduction) = (task.fingerprint.element, task.fingerprint.reduction);
                if size == 2 && reduction != Reduction::Mean {
                    let outputs = [output, staging(1 - rank)];
                    combine_twins(element, reduction, &[source(0), source(1)], outputs, block.count);
                    continue;
                }
                self.sources.clear();
                self.sources.extend((0..size).map(source));
                self.combine(task, output, block.count);
                for other in (0..size).filter(|other| *other != rank) {
                    copy(output, staging(other), bytes);
                }
            }
        }
    }

    /// Every rank's staging buffer has an area for each reader: reduce-scatter, and scatter from the root.
    unsafe fn exchange_areas(&mut self, task: &CollectiveTask<'_>) -> Result<(), Fault> {
        let (width, rank, size) = (task.width(), self.rounds.rank, self.rounds.size);
        let area = self.rounds.area_bytes();
        let most = area / width;
        let own = task.recv[rank];
        let scatter = task.kind() == CallKind::Scatter;
        let writes = !scatter || rank == task.root();
        let longest = task.recv.iter().map(|part| part.count).max().unwrap_or(0);
        for step in 0..steps(longest, most) {
            // SAFETY: the caller's promise; an area holds a piece.
            unsafe {
                let own_staging = self.rounds.own_staging().payload(STAGING_BYTES);
                for other in (0..size).filter(|other| writes && *other != rank) {
                    let here = piece(task.recv[other], step, most);
                    copy(
                        task.input.wrapping_add(here.offset * width),
                        own_staging.add(other * area),
                        here.count * width,
                    );
                }
                self.round(task)?;
                let here = piece(own, step, most);
                let input = task.input.wrapping_add(here.offset * width);
                let output = task.output.wrapping_add((here.offset - own.offset) * width);
                self.sources.clear();
                for other in (0..size).filter(|other| !scatter || *other == task.root()) {
                    let staging = self.rounds.staging(other).payload(STAGING_BYTES).add(rank * area).cast_const();
                    self.sources.push(if other == rank { input } else { staging });
                }
                match scatter {
                    true => copy(self.sources[0], output, here.count * width),
                    false => self.combine(task, output, here.count),
                }
            }
        }
        Ok(())
    }

    /// Every rank's part, or the root's whole vector, goes to all or to the root.
    unsafe fn exchange_parts(&mut self, task: &CollectiveTask<'_>) -> Result<(), Fault> {
        let (width, rank) = (task.width(), self.rounds.rank);
        let most = CHUNK_BYTES / width;
        let whole = RankPart { offset: 0, count: task.count() };
        let broadcast = task.kind() == CallKind::Broadcast;
        let part_of = |other: usize| match broadcast {
            true if other == task.root() => whole,
            true => RankPart::default(),
            false => task.recv[other],
        };
        let input = if broadcast { task.output.cast_const() } else { task.input };
        let own = part_of(rank);
        let reads = task.kind() != CallKind::Gather || rank == task.root();
        let longest = (0..self.rounds.size).map(|other| part_of(other).count).max().unwrap_or(0);
        for step in 0..steps(longest, most) {
            // SAFETY: the caller's promise; a chunk fits a staging buffer.
            unsafe {
                let here = piece(own, step, most);
                let input = input.wrapping_add((here.offset - own.offset) * width);
                copy(input, self.rounds.own_staging().payload(here.count * width), here.count * width);
                self.round(task)?;
                for other in (0..self.rounds.size).filter(|_| reads) {
                    let here = piece(part_of(other), step, most);
                    let staging = self.rounds.staging(other).payload(here.count * width).cast_const();
                    let output = task.output.wrapping_add(here.offset * width);
                    copy(if other == rank { input } else { staging }, output, here.count * width);
                }
            }
        }
        Ok(())
    }

    /// All-to-all: only sender and receiver know a part's size, so the first round carries a table of parts. Then it goes
    /// as with areas, or directly.
    unsafe fn exchange_pairs(&mut self, task: &CollectiveTask<'_>) -> Result<(), Fault> {
        let (rank, size, width) = (self.rounds.rank, self.rounds.size, task.width());
        let input = self.show(task).into_iter().next().flatten();
        // SAFETY: the table fits a staging buffer, as there are at most `RANKS_MAX` ranks.
        let table = unsafe {
            std::slice::from_raw_parts_mut(self.rounds.own_staging().payload(STAGING_BYTES).cast::<PairEntry>(), size)
        };
        for (entry, part) in table.iter_mut().zip(task.send) {
            *entry = PairEntry { offset: part.offset as u64, count: part.count as u64 };
        }
        self.round(task)?;
        let mut longest = 0;
        for other in 0..size {
            longest = self.table(other).iter().map(|entry| entry.count).max().unwrap_or(0).max(longest);
            let (theirs, mine) = (self.table(other)[rank].count, task.recv[other].count as u64);
            if theirs != mine {
                return Err(self.uneven(task, other, theirs, mine));
            }
        }
        let mut addresses = std::mem::take(&mut self.addresses);
        let end = |entry: &PairEntry| (entry.offset.saturating_add(entry.count) as usize).saturating_mul(width);
        let reach = |other: usize| self.table(other).iter().map(end).max().unwrap_or(0);
        let direct = self.locate(input.as_ref(), 0, reach, &mut addresses.inputs);
        for other in (0..size).filter(|_| direct) {
            let (from, part) = (self.table(other)[rank].offset as usize, task.recv[other]);
            let output = task.output.wrapping_add(part.offset * width);
            // SAFETY: inside the other's input, as its table says.
            unsafe { copy(addresses.inputs[other].add(from * width), output, part.count * width) };
        }
        self.addresses = addresses;
        match direct {
            true => self.round(task),
            // SAFETY: the caller's promise, passed on.
            false => unsafe { self.exchange_pair_areas(task, longest as usize) },
        }
    }

    /// The table of parts in a rank's staging buffer.
    fn table(&self, rank: usize) -> &[PairEntry] {
        // SAFETY: written before the round that the caller has seen, and not again before the next but one.
        unsafe {
            std::slice::from_raw_parts(
                self.rounds.staging(rank).payload(STAGING_BYTES).cast::<PairEntry>(),
                self.rounds.size,
            )
        }
    }

    unsafe fn exchange_pair_areas(&mut self, task: &CollectiveTask<'_>, longest: usize) -> Result<(), Fault> {
        let (width, rank, size) = (task.width(), self.rounds.rank, self.rounds.size);
        let area = self.rounds.area_bytes();
        let most = area / width;
        for step in 0..steps(longest, most) {
            // SAFETY: the caller's promise; an area holds a piece.
            unsafe {
                let own_staging = self.rounds.own_staging().payload(STAGING_BYTES);
                for other in (0..size).filter(|other| *other != rank) {
                    let here = piece(task.send[other], step, most);
                    copy(
                        task.input.wrapping_add(here.offset * width),
                        own_staging.add(other * area),
                        here.count * width,
                    );
                }
                self.round(task)?;
                for other in 0..size {
                    let (from, here) = (piece(task.send[rank], step, most), piece(task.recv[other], step, most));
                    let own = task.input.wrapping_add(from.offset * width);
                    let staging = self.rounds.staging(other).payload(STAGING_BYTES).add(rank * area).cast_const();
                    let output = task.output.wrapping_add(here.offset * width);
                    copy(if other == rank { own } else { staging }, output, here.count * width);
                }
            }
        }
        Ok(())
    }

    fn uneven(&mut self, task: &CollectiveTask<'_>, peer: usize, theirs: u64, mine: u64) -> Fault {
        let root = self.rounds.rank as u32;
        let count = |count| crate::Fingerprint { kind: CallKind::Send, count, root, ..task.fingerprint };
        self.rounds.enter(&count(mine));
        self.rounds.disagree(peer, &count(mine), Some(count(theirs)))
    }
}

/// Whole cache lines of a vector for each rank.
pub(super) fn slice(count: usize, width: usize, size: usize, rank: usize) -> RankPart {
    let per_line = CACHE_LINE_BYTES / width;
    let lines = count.div_ceil(per_line);
    let at = |rank: usize| (lines * rank / size * per_line).min(count);
    RankPart { offset: at(rank), count: at(rank + 1) - at(rank) }
}

/// Copies, unless it is in place already.
///
/// # Safety
/// Both places hold that many bytes.
#[inline]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes > 0 && !std::ptr::eq(from, to) {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy(from, to, bytes) };
    }
}
