//! Runs one rank's program over a wire, a little at a time and without ever blocking, so that a thread can drive one rank
//! or a simulator many.
//!
//! A send or receive is handed to the wire when all it waits for is done and the one before it to the same rank was
//! handed over; a computation runs in `poll`. Everything a run needs is prepared once and used again.

use crate::call::{CallKind, Fingerprint};
use crate::combine::{combine, divide};
use crate::fault::Fault;
use crate::program::{BufferRange, CollectiveAction, CollectiveProgram, Region};
use crate::task::CollectiveTask;
use crate::wire::Wire;
use std::borrow::BorrowMut;
use std::collections::VecDeque;

/// A program with what follows from it, and room for the state of one run.
#[derive(Debug)]
pub struct PreparedProgram {
    program: CollectiveProgram,
    /// Instructions that wait for instruction `i`: `waiters[starts[i]..starts[i + 1]]`.
    starts: Vec<u32>,
    waiters: Vec<u32>,
    /// The next message to or from the same rank.
    next: Vec<Option<u32>>,
    /// The first message to and from each rank.
    chains: Vec<u32>,
    /// How many events each instruction waits for at the start.
    awaited: Vec<u32>,
    state: RunState,
}

#[derive(Debug, Default)]
struct RunState {
    awaited: Vec<u32>,
    /// The wire's number of a message handed over.
    numbers: Vec<Option<u64>>,
    /// The oldest unfinished message of each chain.
    heads: Vec<Option<u32>>,
    messages: VecDeque<u32>,
    computations: VecDeque<u32>,
    left: usize,
}

impl PreparedProgram {
    pub fn new(program: CollectiveProgram) -> Self {
        let len = program.instructions.len();
        let mut awaited: Vec<u32> = program.instructions.iter().map(|i| i.after.len() as u32).collect();
        let mut starts = vec![0u32; len + 1];
        for earlier in program.instructions.iter().flat_map(|instruction| &instruction.after) {
            starts[earlier + 1] += 1;
        }
        for at in 0..len {
            starts[at + 1] += starts[at];
        }
        let mut filled = starts.clone();
        let mut waiters = vec![0; starts[len] as usize];
        for (number, instruction) in program.instructions.iter().enumerate() {
            for earlier in &instruction.after {
                waiters[filled[*earlier] as usize] = number as u32;
                filled[*earlier] += 1;
            }
        }
        let (mut next, mut chains, mut last) = (vec![None; len], Vec::new(), Vec::<((bool, usize), usize)>::new());
        for (number, instruction) in program.instructions.iter().enumerate() {
            let link = match instruction.action {
                CollectiveAction::Send { to, .. } => (false, to),
                CollectiveAction::Recv { from, .. } => (true, from),
                _ => continue,
            };
            if let Some((_, tail)) = last.iter_mut().find(|(other, _)| *other == link) {
                next[*tail] = Some(number as u32);
                awaited[number] += 1;
                *tail = number;
            } else {
                last.push((link, number));
                chains.push(number as u32);
            }
        }
        let state = RunState {
            awaited: Vec::with_capacity(len),
            numbers: Vec::with_capacity(len),
            heads: Vec::with_capacity(chains.len()),
            messages: VecDeque::with_capacity(len),
            computations: VecDeque::with_capacity(len),
            left: 0,
        };
        Self { program, starts, waiters, next, chains, awaited, state }
    }

    /// Elements of scratch that a run needs.
    pub fn scratch(&self) -> usize {
        self.program.scratch
    }

    fn reset(&mut self) {
        let state = &mut self.state;
        state.awaited.clear();
        state.awaited.extend_from_slice(&self.awaited);
        state.numbers.clear();
        state.numbers.resize(self.awaited.len(), None);
        state.heads.clear();
        state.heads.extend(self.chains.iter().map(|first| Some(*first)));
        state.messages.clear();
        state.computations.clear();
        state.left = self.awaited.len();
        for number in 0..self.awaited.len() {
            if self.awaited[number] == 0 {
                self.enqueue(number);
            }
        }
    }

    fn enqueue(&mut self, number: usize) {
        match self.program.instructions[number].action {
            CollectiveAction::Send { .. } | CollectiveAction::Recv { .. } => {
                self.state.messages.push_back(number as u32)
            }
            _ => self.state.computations.push_back(number as u32),
        }
    }

    /// One event that `number` awaits has happened.
    fn relieve(&mut self, number: usize) {
        self.state.awaited[number] -= 1;
        if self.state.awaited[number] == 0 {
            self.enqueue(number);
        }
    }

    fn finish(&mut self, number: usize) {
        self.state.left -= 1;
        for at in self.starts[number] as usize..self.starts[number + 1] as usize {
            self.relieve(self.waiters[at] as usize);
        }
    }
}

/// What a poll came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollOutcome {
    Done,
    /// Something happened: poll again.
    Moved,
    /// Nothing to do until the wire moves.
    Idle,
}

/// One run of a program, its own or a borrowed one, on the buffers of a task.
#[derive(Debug)]
pub struct Execution<P> {
    prepared: P,
    call: Fingerprint,
    width: usize,
    ranks: usize,
    input: *const u8,
    output: *mut u8,
    scratch: *mut u8,
}

/// Bytes computed before the wire is looked after again.
const COMPUTE_BYTES: usize = 1 << 20;

impl<P: BorrowMut<PreparedProgram>> Execution<P> {
    /// # Safety
    /// The program was made for this task, whose buffers and `prepared.scratch()` elements at `scratch` stay valid and
    /// unused by others until the run is done, or failed and the wire was told to cancel.
    pub unsafe fn new(mut prepared: P, task: &CollectiveTask<'_>, ranks: usize, scratch: *mut u8) -> Self {
        prepared.borrow_mut().reset();
        let mut call = task.fingerprint;
        // Both ends of a message have one fingerprint.
        if call.kind == CallKind::Recv {
            call.kind = CallKind::Send;
        }
        Self { prepared, call, width: task.width(), ranks, input: task.input, output: task.output, scratch }
    }

    fn address(&self, place: BufferRange) -> *mut u8 {
        let base = match place.region {
            Region::Input => self.input.cast_mut(),
            Region::Output => self.output,
            Region::Scratch => self.scratch,
        };
        base.wrapping_add(place.offset * self.width)
    }

    /// Moves what can be moved now.
    pub fn poll<W: Wire + ?Sized>(&mut self, wire: &mut W) -> Result<PollOutcome, Fault> {
        let mut moved = self.hand_over(wire)?;
        moved |= wire.progress()?;
        moved |= self.collect(wire);
        moved |= self.hand_over(wire)?;
        moved |= self.compute();
        Ok(match (self.prepared.borrow().state.left, moved) {
            (0, _) => PollOutcome::Done,
            (_, true) => PollOutcome::Moved,
            _ => PollOutcome::Idle,
        })
    }

    /// Gives ready messages to the wire.
    fn hand_over<W: Wire + ?Sized>(&mut self, wire: &mut W) -> Result<bool, Fault> {
        let mut moved = false;
        while let Some(number) = self.prepared.borrow_mut().state.messages.pop_front() {
            let number = number as usize;
            let action = self.prepared.borrow().program.instructions[number].action;
            let name = match action {
                // SAFETY: places lie in their buffers by the promise made to `new`; the program orders their use.
                CollectiveAction::Send { to, from } => unsafe {
                    wire.send(to, &self.call, self.address(from), from.count * self.width)?
                },
                // SAFETY: as above.
                CollectiveAction::Recv { from, into } => unsafe {
                    wire.recv(from, &self.call, self.address(into), into.count * self.width)?
                },
                _ => continue,
            };
            let prepared = self.prepared.borrow_mut();
            prepared.state.numbers[number] = Some(name);
            if let Some(next) = prepared.next[number] {
                prepared.relieve(next as usize);
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Takes note of messages that are done; those of one chain finish in order.
    fn collect<W: Wire + ?Sized>(&mut self, wire: &mut W) -> bool {
        let prepared = self.prepared.borrow_mut();
        let mut moved = false;
        for chain in 0..prepared.state.heads.len() {
            while let Some(head) = prepared.state.heads[chain] {
                let head = head as usize;
                let Some(name) = prepared.state.numbers[head] else { break };
                let done = match prepared.program.instructions[head].action {
                    CollectiveAction::Send { .. } => wire.sent(name),
                    _ => wire.received(name),
                };
                if !done {
                    break;
                }
                prepared.finish(head);
                prepared.state.heads[chain] = prepared.next[head];
                moved = true;
            }
        }
        moved
    }

    fn compute(&mut self) -> bool {
        let mut bytes = 0;
        while bytes < COMPUTE_BYTES {
            let Some(number) = self.prepared.borrow_mut().state.computations.pop_front() else { break };
            let action = self.prepared.borrow().program.instructions[number as usize].action;
            bytes += self.run(action).max(1);
            self.prepared.borrow_mut().finish(number as usize);
        }
        bytes > 0
    }

    /// Bytes written.
    fn run(&self, action: CollectiveAction) -> usize {
        let (element, reduction) = (self.call.element, self.call.reduction);
        // SAFETY: places lie in their buffers by the promise made to `new`; the program orders their use.
        unsafe {
            match action {
                CollectiveAction::Copy { from, into } => {
                    std::ptr::copy(self.address(from), self.address(into), into.count * self.width);
                    into.count * self.width
                }
                CollectiveAction::Combine { left, right, into } => {
                    let (left, right, target) = (self.address(left), self.address(right), self.address(into));
                    combine(element, reduction, left, right, target, into.count);
                    into.count * self.width
                }
                CollectiveAction::Divide { range } => {
                    divide(element, self.address(range), self.ranks, range.count);
                    range.count * self.width
                }
                CollectiveAction::Send { .. } | CollectiveAction::Recv { .. } => 0,
            }
        }
    }

    pub fn call(&self) -> &Fingerprint {
        &self.call
    }

    /// The rank whose message is awaited since longest, or if none is, one that does not take ours. Later messages may be
    /// missing only because that one is.
    pub fn waits_for(&self) -> Option<usize> {
        let prepared = self.prepared.borrow();
        let heads = prepared.state.heads.iter().flatten().map(|head| *head as usize);
        let open = heads.filter(|head| prepared.state.numbers[*head].is_some());
        let peer = |head: usize| match prepared.program.instructions[head].action {
            CollectiveAction::Recv { from, .. } => Some((false, head, from)),
            CollectiveAction::Send { to, .. } => Some((true, head, to)),
            _ => None,
        };
        open.filter_map(peer).min().map(|(_, _, rank)| rank)
    }
}
