//! Where arriving parts of messages belong: into the place that a receive named, or, if it has not come yet, into a bounded
//! store. What does not fit there stays in the network until the receive comes.

use super::frame::Frame;
use crate::call::Fingerprint;
use std::collections::{BTreeMap, VecDeque};

/// A receive that was asked for.
#[derive(Debug)]
struct Posted {
    call: Fingerprint,
    data: *mut u8,
    bytes: usize,
    parts: Parts,
    done: bool,
}

/// A message without a receive yet.
#[derive(Debug)]
struct Held {
    call: Fingerprint,
    data: Vec<u8>,
    parts: Parts,
}

/// How far a message has come. No more is ever placed than it has bytes, so once all of it has arrived nobody
/// writes to its place any more.
#[derive(Debug, Default)]
struct Parts {
    placed: usize,
    arrived: usize,
}

impl Parts {
    fn place(&mut self, frame: &Frame) -> Result<(), &'static str> {
        self.placed += frame.part;
        if self.placed > frame.total { Err("more parts than the message has") } else { Ok(()) }
    }
}

/// The messages from one peer.
#[derive(Debug)]
pub struct Inbox {
    /// Receives from number `first` on.
    posted: VecDeque<Posted>,
    first: u64,
    held: BTreeMap<u64, Held>,
    held_bytes: usize,
    held_bytes_max: usize,
    /// The call in which the peer waits, by its last notice.
    notice: Option<Fingerprint>,
}

/// What to do with a part.
#[derive(Debug, PartialEq, Eq)]
pub enum Placing {
    /// Its bytes go here.
    Here(*mut u8),
    /// Nobody has asked for it, and the store is full.
    Later,
    /// The call here, and the bytes it expects, are others.
    Mismatch(Box<Fingerprint>, usize),
}

/// Smallest share of the store that a message takes: many empty messages are no way around the limit.
const HELD_BYTES_MIN: usize = 256;

impl Inbox {
    pub fn new(held_bytes_max: usize) -> Self {
        let (posted, held) = (VecDeque::new(), BTreeMap::new());
        Self { posted, first: 0, held, held_bytes: 0, held_bytes_max, notice: None }
    }

    /// Names the place for the next message; its number, or the other call that came.
    pub fn post(&mut self, call: &Fingerprint, data: *mut u8, bytes: usize) -> Result<u64, (Fingerprint, usize)> {
        let number = self.first + self.posted.len() as u64;
        if let Some(held) = self.held.get(&number)
            && (held.call != *call || held.data.len() != bytes)
        {
            return Err((held.call, held.data.len()));
        }
        self.posted.push_back(Posted { call: *call, data, bytes, parts: Parts::default(), done: false });
        self.settle(number);
        Ok(number)
    }

    pub fn done(&self, number: u64) -> bool {
        number < self.first || self.posted.get((number - self.first) as usize).is_some_and(|posted| posted.done)
    }

    /// The first call that still waits for this peer.
    pub fn waiting(&self) -> Option<&Fingerprint> {
        self.posted.iter().find(|posted| !posted.done).map(|posted| &posted.call)
    }

    pub fn notice(&self) -> Option<&Fingerprint> {
        self.notice.as_ref()
    }

    pub fn set_notice(&mut self, call: Option<Fingerprint>) {
        self.notice = call;
    }

    /// Bytes of the store in use.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Where a part belongs. `frame` has a call.
    pub fn place(&mut self, frame: &Frame) -> Result<Placing, &'static str> {
        let call = frame.call.ok_or("a message without a call")?;
        let index = frame.message.checked_sub(self.first).ok_or("a message that was complete already")?;
        // A message whose first parts were held stays there until it is whole.
        if !self.held.contains_key(&frame.message) {
            if let Some(posted) = self.posted.get_mut(index as usize) {
                if posted.done {
                    return Err("a message that was complete already");
                }
                if posted.call != call || posted.bytes != frame.total {
                    return Ok(Placing::Mismatch(Box::new(posted.call), posted.bytes));
                }
                posted.parts.place(frame)?;
                return Ok(Placing::Here(posted.data.wrapping_add(frame.offset)));
            }
            let share = frame.total.max(HELD_BYTES_MIN);
            if share > self.held_bytes_max - self.held_bytes {
                return Ok(Placing::Later);
            }
            self.held_bytes += share;
            self.held.insert(frame.message, Held { call, data: vec![0; frame.total], parts: Parts::default() });
        }
        let held = self.held.get_mut(&frame.message).ok_or("a message that is not held")?;
        if held.call != call || held.data.len() != frame.total {
            return Err("parts of one message that do not fit together");
        }
        held.parts.place(frame)?;
        Ok(Placing::Here(held.data.as_mut_ptr().wrapping_add(frame.offset)))
    }

    /// A part that was placed is authentic.
    pub fn arrived(&mut self, frame: &Frame) {
        if let Some(held) = self.held.get_mut(&frame.message) {
            held.parts.arrived += frame.part;
            self.settle(frame.message);
        } else if let Some(posted) = self.posted.get_mut(frame.message.wrapping_sub(self.first) as usize) {
            posted.parts.arrived += frame.part;
            posted.done = posted.parts.arrived == posted.bytes;
            self.retire();
        }
    }

    /// Moves a message from the store to its receive, if it is whole and the receive is there.
    fn settle(&mut self, number: u64) {
        let Some(posted) = self.posted.get_mut(number.wrapping_sub(self.first) as usize) else { return };
        let Some(held) = self.held.get(&number).filter(|held| held.parts.arrived == held.data.len()) else { return };
        // SAFETY: the receive named a place of `bytes` bytes, which are as many as were held: checked when either came.
        unsafe { std::ptr::copy_nonoverlapping(held.data.as_ptr(), posted.data, held.data.len()) };
        posted.done = true;
        self.held_bytes -= held.data.len().max(HELD_BYTES_MIN);
        self.held.remove(&number);
        self.retire();
    }

    /// Forgets finished receives.
    fn retire(&mut self) {
        while self.posted.front().is_some_and(|posted| posted.done) {
            self.posted.pop_front();
            self.first += 1;
        }
    }
}
