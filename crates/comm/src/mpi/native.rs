//! Collectives that MPI runs itself, in their nonblocking forms.

use super::abi::Handle;
use super::agree::CollectiveForm;
use super::group::{MpiGroup, Wait};
use super::library::Functions;
use crate::call::CallKind;
use crate::combine::divide;
use crate::element::{ElementType, Reduction};
use crate::fault::Fault;
use crate::task::{CollectiveTask, RankPart};
use crate::watch::Watch;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr::{null, null_mut};

/// A vector longer than this goes in pieces. Far below what MPI's counts allow, as some pieces need scratch memory.
pub(super) const PIECE_BYTES: usize = 256 << 20;

/// One native call.
pub(super) struct Native<'a> {
    pub group: &'a MpiGroup,
    pub task: &'a CollectiveTask<'a>,
    pub watch: &'a Watch,
    pub piece_bytes: usize,
}

/// How MPI could run this call on this rank.
pub(super) fn form(task: &CollectiveTask<'_>) -> CollectiveForm {
    match task.kind() {
        CallKind::Send | CallKind::Recv => CollectiveForm::Program,
        CallKind::Barrier | CallKind::Broadcast => CollectiveForm::Plain,
        CallKind::Reduce | CallKind::AllReduce | CallKind::Scan | CallKind::ExclusiveScan => arithmetic(task),
        CallKind::ReduceScatter if is_packed(task.recv) && fits(task.recv) => arithmetic(task),
        CallKind::ReduceScatter => CollectiveForm::Program,
        CallKind::Gather | CallKind::AllGather | CallKind::Scatter => parts(task.recv),
        CallKind::AllToAll => parts(task.recv).min(parts(task.send)),
    }
}

/// MPI adds in an order of its own: only where the order cannot be seen, or nobody asked for one. For minimum and maximum
/// of floats a NaN wins with us, and may be lost in MPI.
fn arithmetic(task: &CollectiveTask<'_>) -> CollectiveForm {
    let element = task.fingerprint.element;
    let integer = matches!(element, ElementType::I32 | ElementType::I64 | ElementType::U8);
    let float = matches!(element, ElementType::F32 | ElementType::F64);
    let adds = !matches!(task.fingerprint.reduction, Reduction::Min | Reduction::Max);
    if integer || float && adds && !task.reproducible { CollectiveForm::Plain } else { CollectiveForm::Program }
}

fn parts(parts: &[RankPart]) -> CollectiveForm {
    let equal = parts.windows(2).all(|pair| pair[0].count == pair[1].count);
    match fits(parts) {
        false => CollectiveForm::Program,
        true if equal && is_packed(parts) => CollectiveForm::Plain,
        true => CollectiveForm::Parts,
    }
}

/// One part behind the other, from the start.
fn is_packed(parts: &[RankPart]) -> bool {
    let mut end = 0;
    parts.iter().all(|part| {
        let here = part.offset == end;
        end = part.offset.saturating_add(part.count);
        here
    })
}

/// Whether counts and offsets can be told to MPI.
fn fits(parts: &[RankPart]) -> bool {
    parts.iter().all(|part| part.offset.saturating_add(part.count) <= c_int::MAX as usize)
}

fn counts(parts: &[RankPart]) -> Vec<c_int> {
    parts.iter().map(|part| part.count as c_int).collect()
}

fn offsets(parts: &[RankPart]) -> Vec<c_int> {
    parts.iter().map(|part| part.offset as c_int).collect()
}

impl Native<'_> {
    /// Runs the call, on which all ranks agreed, in the form on which they agreed.
    ///
    /// # Safety
    /// As [`crate::Transport::run`].
    pub unsafe fn run(&self, form: CollectiveForm) -> Result<(), Fault> {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            match self.task.kind() {
                // The agreement was one.
                CallKind::Barrier | CallKind::Send | CallKind::Recv => Ok(()),
                CallKind::Broadcast => self.broadcast(),
                CallKind::Reduce | CallKind::AllReduce => self.reduce(),
                CallKind::Scan | CallKind::ExclusiveScan => self.scan(),
                CallKind::ReduceScatter => self.reduce_scatter(),
                CallKind::Gather => self.gather(form),
                CallKind::AllGather => self.all_gather(form),
                CallKind::Scatter => self.scatter(form),
                CallKind::AllToAll => self.all_to_all(form),
            }
        }
    }

    fn complete(
        &self,
        name: &str,
        bytes: usize,
        start: impl FnOnce(&Functions, *mut Handle) -> c_int,
    ) -> Result<(), Fault> {
        self.group.complete(name, Wait { watch: self.watch, during: &self.task.fingerprint, bytes }, start)
    }

    /// The vector in pieces, in elements.
    fn pieces(&self) -> impl Iterator<Item = Range<usize>> {
        let (count, piece) = (self.task.count(), (self.piece_bytes / self.task.width()).max(1));
        (0..count).step_by(piece).map(move |start| start..count.min(start + piece))
    }

    fn in_place(&self) -> *const c_void {
        self.group.library().constants.in_place
    }

    fn is_root(&self) -> bool {
        self.task.root() == self.group.rank()
    }

    fn root(&self) -> c_int {
        self.task.root() as c_int
    }

    /// The type to move this call's elements.
    fn bits(&self) -> Handle {
        self.group.library().constants.bits(self.task.fingerprint.element)
    }

    /// The type and operation to combine them.
    fn arithmetic(&self) -> Result<(Handle, Handle), Fault> {
        let (constants, call) = (&self.group.library().constants, &self.task.fingerprint);
        let unknown = || Fault::BadCall(format!("MPI has no arithmetic for {}", call.element.name()));
        Ok((constants.number(call.element).ok_or_else(unknown)?, constants.operation(call.reduction)))
    }

    /// The address of an element. An empty slice of Rust's may lie at an address that means something special to MPI.
    fn input(&self, element: usize) -> *const c_void {
        match self.task.input_bytes {
            0 => null(),
            _ => self.task.input.wrapping_add(element * self.task.width()).cast(),
        }
    }

    fn output(&self, element: usize) -> *mut c_void {
        match self.task.output_bytes {
            0 => null_mut(),
            _ => self.task.output.wrapping_add(element * self.task.width()).cast(),
        }
    }

    /// Ends a mean.
    ///
    /// # Safety
    /// `place` holds `count` elements that nobody else uses.
    unsafe fn divide(&self, place: *mut c_void, count: usize) {
        if self.task.fingerprint.reduction == Reduction::Mean {
            // SAFETY: the caller's promise, passed on.
            unsafe { divide(self.task.fingerprint.element, place.cast(), self.group.size(), count) }
        }
    }

    unsafe fn broadcast(&self) -> Result<(), Fault> {
        let (bits, root, comm) = (self.bits(), self.root(), self.group.comm);
        for piece in self.pieces() {
            let (place, count) = (self.output(piece.start), piece.len() as c_int);
            // SAFETY: inside the buffer, which is the call's until it is done.
            self.complete("Ibcast", piece.len() * self.task.width(), |f, request| unsafe {
                (f.ibcast)(place, count, bits, root, comm, request)
            })?;
        }
        Ok(())
    }

    unsafe fn reduce(&self) -> Result<(), Fault> {
        let (number, operation) = self.arithmetic()?;
        let (root, comm) = (self.root(), self.group.comm);
        let all = self.task.kind() == CallKind::AllReduce;
        let receives = all || self.is_root();
        let in_place = receives && std::ptr::eq(self.task.input, self.task.output);
        for piece in self.pieces() {
            let input = if in_place { self.in_place() } else { self.input(piece.start) };
            let (output, count) = (self.output(piece.start), piece.len() as c_int);
            let bytes = piece.len() * self.task.width();
            let name = if all { "Iallreduce" } else { "Ireduce" };
            // SAFETY: inside the buffers, which are the call's until it is done.
            self.complete(name, bytes, |f, request| unsafe {
                match all {
                    true => (f.iallreduce)(input, output, count, number, operation, comm, request),
                    false => (f.ireduce)(input, output, count, number, operation, root, comm, request),
                }
            })?;
            if receives {
                // SAFETY: as above; the call is done.
                unsafe { self.divide(output, piece.len()) };
            }
        }
        Ok(())
    }

    unsafe fn scan(&self) -> Result<(), Fault> {
        let (number, operation) = self.arithmetic()?;
        let comm = self.group.comm;
        let exclusive = self.task.kind() == CallKind::ExclusiveScan;
        let first = exclusive && self.group.rank() == 0;
        // The first rank's output stays as it is with us; MPI may write anything there.
        let longest = self.pieces().next().map_or(0, |piece| piece.len());
        let mut unused = vec![0u64; if first { (longest * self.task.width()).div_ceil(8) } else { 0 }];
        let in_place = !first && std::ptr::eq(self.task.input, self.task.output);
        for piece in self.pieces() {
            let input = if in_place { self.in_place() } else { self.input(piece.start) };
            let output = if first { unused.as_mut_ptr().cast() } else { self.output(piece.start) };
            let (bytes, count) = (piece.len() * self.task.width(), piece.len() as c_int);
            let name = if exclusive { "Iexscan" } else { "Iscan" };
            // SAFETY: inside the buffers, which are the call's until it is done.
            self.complete(name, bytes, |f, request| unsafe {
                let scan = if exclusive { f.iexscan } else { f.iscan };
                scan(input, output, count, number, operation, comm, request)
            })?;
        }
        Ok(())
    }

    unsafe fn reduce_scatter(&self) -> Result<(), Fault> {
        let (number, operation) = self.arithmetic()?;
        let (comm, counts) = (self.group.comm, counts(self.task.recv));
        let own = self.task.recv[self.group.rank()].count;
        let bytes = own * self.task.width();
        // In place means a part of the input here, and its beginning in MPI.
        let inside = (self.task.output as usize).wrapping_sub(self.task.input as usize) < self.task.input_bytes;
        let mut scratch = vec![0u64; if inside { bytes.div_ceil(8) } else { 0 }];
        let output = if inside { scratch.as_mut_ptr().cast() } else { self.output(0) };
        let input = self.input(0);
        // SAFETY: parts of these counts are in the input, and there is room for the own one.
        self.complete("Ireduce_scatter", self.task.input_bytes, |f, request| unsafe {
            (f.ireduce_scatter)(input, output, counts.as_ptr(), number, operation, comm, request)
        })?;
        // SAFETY: the own part, and the call is done.
        unsafe {
            self.divide(output, own);
            if inside {
                std::ptr::copy_nonoverlapping(scratch.as_ptr().cast::<u8>(), self.task.output, bytes);
            }
        }
        Ok(())
    }

    /// The own part, and whether it lies where it belongs in the whole, which starts at `whole`.
    fn own(&self, part: *const u8, whole: *const u8) -> (c_int, bool) {
        let own = self.task.recv[self.group.rank()];
        (own.count as c_int, std::ptr::eq(part, whole.wrapping_add(own.offset * self.task.width())))
    }

    unsafe fn gather(&self, form: CollectiveForm) -> Result<(), Fault> {
        let (bits, root, comm) = (self.bits(), self.root(), self.group.comm);
        let (counts, offsets) = (counts(self.task.recv), offsets(self.task.recv));
        let (own, in_place) = self.own(self.task.input, self.task.output);
        let input = if self.is_root() && in_place { self.in_place() } else { self.input(0) };
        let output = self.output(0);
        // SAFETY: the own part in the input; at the root, room for all parts.
        self.complete("Igather(v)", self.task.output_bytes, |f, request| unsafe {
            match form {
                CollectiveForm::Plain => (f.igather)(input, own, bits, output, own, bits, root, comm, request),
                _ => {
                    let (counts, offsets) = (counts.as_ptr(), offsets.as_ptr());
                    (f.igatherv)(input, own, bits, output, counts, offsets, bits, root, comm, request)
                }
            }
        })
    }

    unsafe fn all_gather(&self, form: CollectiveForm) -> Result<(), Fault> {
        let (bits, comm) = (self.bits(), self.group.comm);
        let (counts, offsets) = (counts(self.task.recv), offsets(self.task.recv));
        let (own, in_place) = self.own(self.task.input, self.task.output);
        let input = if in_place { self.in_place() } else { self.input(0) };
        let output = self.output(0);
        // SAFETY: the own part in the input, and room for all parts.
        self.complete("Iallgather(v)", self.task.output_bytes, |f, request| unsafe {
            match form {
                CollectiveForm::Plain => (f.iallgather)(input, own, bits, output, own, bits, comm, request),
                _ => {
                    let (counts, offsets) = (counts.as_ptr(), offsets.as_ptr());
                    (f.iallgatherv)(input, own, bits, output, counts, offsets, bits, comm, request)
                }
            }
        })
    }

    unsafe fn scatter(&self, form: CollectiveForm) -> Result<(), Fault> {
        let (bits, root, comm) = (self.bits(), self.root(), self.group.comm);
        let (counts, offsets) = (counts(self.task.recv), offsets(self.task.recv));
        let (own, in_place) = self.own(self.task.output, self.task.input);
        let input = self.input(0);
        let output = if self.is_root() && in_place { self.in_place().cast_mut() } else { self.output(0) };
        // SAFETY: at the root, all parts in the input; room for the own part.
        self.complete("Iscatter(v)", self.task.input_bytes, |f, request| unsafe {
            match form {
                CollectiveForm::Plain => (f.iscatter)(input, own, bits, output, own, bits, root, comm, request),
                _ => {
                    let (counts, offsets) = (counts.as_ptr(), offsets.as_ptr());
                    (f.iscatterv)(input, counts, offsets, bits, output, own, bits, root, comm, request)
                }
            }
        })
    }

    unsafe fn all_to_all(&self, form: CollectiveForm) -> Result<(), Fault> {
        self.group.agree_on_pairs(self.task, self.watch)?;
        let (bits, comm) = (self.bits(), self.group.comm);
        let (sent, sent_at) = (counts(self.task.send), offsets(self.task.send));
        let (kept, kept_at) = (counts(self.task.recv), offsets(self.task.recv));
        let (input, output) = (self.input(0), self.output(0));
        // SAFETY: all parts to send are in the input; there is room for all that come, which are as large as expected.
        self.complete("Ialltoall(v)", self.task.input_bytes, |f, request| unsafe {
            match form {
                CollectiveForm::Plain => (f.ialltoall)(input, sent[0], bits, output, kept[0], bits, comm, request),
                _ => {
                    let (sent, sent_at, kept, kept_at) =
                        (sent.as_ptr(), sent_at.as_ptr(), kept.as_ptr(), kept_at.as_ptr());
                    (f.ialltoallv)(input, sent, sent_at, bits, output, kept, kept_at, bits, comm, request)
                }
            }
        })
    }
}
