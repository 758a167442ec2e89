//! Messages over MPI. Each starts with a header of fixed size, which carries the call's fingerprint and the length, so
//! that the receiver learns of a message it did not expect before a byte of it touches its buffer. A short message travels
//! behind its header; a longer one follows straight from buffer to buffer.

use super::abi::Handle;
use super::group::MpiGroup;
use crate::call::{FINGERPRINT_BYTES, Fingerprint};
use crate::fault::Fault;
use crate::watch::Watch;
use crate::wire::{SplitWire, Wire};
use kolo_base::ByteReader;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

const HEADER_TAG: c_int = 1;
const PAYLOAD_TAG: c_int = 2;
const HEADER_BYTES: usize = FINGERPRINT_BYTES + 8;
/// A header and what travels behind it.
const SLOT_BYTES: usize = 4096;
const INLINE_BYTES: usize = SLOT_BYTES - HEADER_BYTES;
/// How long `cancel` gives messages under way to come to an end.
const CANCEL: Duration = Duration::from_millis(200);
/// While long messages are under way MPI wants to be called often; else a rank may sleep so long.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

type HeaderSlot = ManuallyDrop<Box<[u8; SLOT_BYTES]>>;

/// Which of many numbered things are done.
#[derive(Debug, Default)]
struct Ledger {
    base: u64,
    done: VecDeque<bool>,
}

impl Ledger {
    fn open(&mut self) -> u64 {
        self.done.push_back(false);
        self.base + self.done.len() as u64 - 1
    }

    fn close(&mut self, number: u64) {
        if let Some(done) = number.checked_sub(self.base).and_then(|at| self.done.get_mut(at as usize)) {
            *done = true;
        }
        while self.done.front() == Some(&true) {
            self.done.pop_front();
            self.base += 1;
        }
    }

    fn is_done(&self, number: u64) -> bool {
        number.checked_sub(self.base).is_none_or(|at| self.done.get(at as usize) == Some(&true))
    }
}

/// A message that leaves.
struct Sending {
    number: u64,
    slot: HeaderSlot,
    /// The header's, then the payload's pieces.
    requests: Vec<Handle>,
}

/// A message that is awaited.
struct Receiving {
    number: u64,
    from: usize,
    call: Fingerprint,
    data: *mut u8,
    bytes: usize,
    slot: HeaderSlot,
    header: Handle,
    /// The header came and was found good.
    expected: bool,
    payload: Vec<Handle>,
}

pub(super) struct MpiWire {
    pub group: Arc<MpiGroup>,
    watch: Arc<Watch>,
    sending: Vec<Sending>,
    receiving: Vec<Receiving>,
    sent: Ledger,
    received: Ledger,
    /// Slots that nobody uses.
    slots: Vec<HeaderSlot>,
    piece_bytes: usize,
}

// SAFETY: the pointers are the promise of whoever queued them, and hold in any thread.
unsafe impl Send for MpiWire {}

impl MpiWire {
    pub fn new(group: Arc<MpiGroup>, watch: Arc<Watch>, piece_bytes: usize) -> Self {
        Self {
            group,
            watch,
            sending: Vec::new(),
            receiving: Vec::new(),
            sent: Ledger::default(),
            received: Ledger::default(),
            slots: Vec::new(),
            piece_bytes: piece_bytes.clamp(1, c_int::MAX as usize),
        }
    }

    fn slot(&mut self) -> HeaderSlot {
        self.slots.pop().unwrap_or_else(|| ManuallyDrop::new(Box::new([0; SLOT_BYTES])))
    }

    /// Starts to send bytes.
    ///
    /// # Safety
    /// They stay as they are until the request is done.
    unsafe fn post_send(&self, to: usize, tag: c_int, data: *const u8, bytes: usize) -> Result<Handle, Fault> {
        let (group, mut request, byte) = (&self.group, 0, self.group.library().constants.byte());
        // SAFETY: the caller's promise; a piece fits a count.
        group.library().call("Isend", |f| unsafe {
            (f.isend)(data.cast(), bytes as c_int, byte, to as c_int, tag, group.comm, &mut request)
        })?;
        Ok(request)
    }

    /// Starts to receive bytes.
    ///
    /// # Safety
    /// The place is valid and otherwise unused until the request is done.
    unsafe fn post_recv(&self, from: usize, tag: c_int, data: *mut u8, bytes: usize) -> Result<Handle, Fault> {
        let (group, mut request, byte) = (&self.group, 0, self.group.library().constants.byte());
        // SAFETY: the caller's promise; a piece fits a count.
        group.library().call("Irecv", |f| unsafe {
            (f.irecv)(data.cast(), bytes as c_int, byte, from as c_int, tag, group.comm, &mut request)
        })?;
        Ok(request)
    }

    /// Where the pieces of a payload start, and how long they are.
    fn pieces(&self, bytes: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let piece = self.piece_bytes;
        (0..bytes).step_by(piece).map(move |start| (start, piece.min(bytes - start)))
    }

    /// A header has come: is it the one of our call?
    fn check(&self, receiving: &Receiving) -> Result<(), Fault> {
        let mut header = ByteReader::new(&receiving.slot[..HEADER_BYTES]);
        let theirs = header.array().and_then(|call| Fingerprint::decode(&call)).zip(header.u64());
        let (rank, peer) = (self.group.world_rank(self.group.rank()), self.group.world_rank(receiving.from));
        let Some((theirs, bytes)) = theirs else {
            let why = "its header is malformed".into();
            return Err(Fault::Rejected { from: self.group.rank_name(receiving.from, &self.watch), why });
        };
        if theirs != receiving.call {
            return Err(Fault::Mismatch {
                rank,
                host: self.watch.host(rank),
                mine: Box::new(receiving.call),
                peer,
                peer_host: self.watch.host(peer),
                theirs: Box::new(theirs),
            });
        }
        if bytes != receiving.bytes as u64 {
            return Err(Fault::BadCall(format!(
                "ranks disagree: in {theirs}, {} expects {} bytes from {}, which sends {bytes}\n  hint: a rank must send \
                 exactly as much as the other one expects",
                self.group.rank_name(self.group.rank(), &self.watch),
                receiving.bytes,
                self.group.rank_name(receiving.from, &self.watch),
            )));
        }
        Ok(())
    }

    /// Looks for headers, in the order in which they were asked for: MPI keeps it between two ranks.
    fn progress_headers(&mut self) -> Result<bool, Fault> {
        let mut moved = false;
        let mut waiting = Vec::new();
        for at in 0..self.receiving.len() {
            let from = self.receiving[at].from;
            if self.receiving[at].expected || waiting.contains(&from) {
                continue;
            }
            let mut header = self.receiving[at].header;
            let arrived = self.group.test(&mut header)?;
            self.receiving[at].header = header;
            if !arrived {
                waiting.push(from);
                continue;
            }
            self.receiving[at].expected = true;
            self.accept(at)?;
            moved = true;
        }
        Ok(moved)
    }

    /// Takes in the message whose header has come.
    fn accept(&mut self, at: usize) -> Result<(), Fault> {
        let receiving = &self.receiving[at];
        self.check(receiving)?;
        let (from, data, bytes) = (receiving.from, receiving.data, receiving.bytes);
        if bytes <= INLINE_BYTES {
            // SAFETY: the place holds `bytes`, by the promise made to `recv`.
            unsafe { std::ptr::copy_nonoverlapping(receiving.slot[HEADER_BYTES..].as_ptr(), data, bytes) };
            return Ok(());
        }
        for (start, length) in self.pieces(bytes) {
            // SAFETY: inside the place, which is ours until the message is received or cancelled.
            let request = unsafe { self.post_recv(from, PAYLOAD_TAG, data.add(start), length)? };
            self.receiving[at].payload.push(request);
        }
        Ok(())
    }

    /// Forgets which of these requests are done; whether all are.
    fn sweep(group: &MpiGroup, requests: &mut Vec<Handle>) -> Result<bool, Fault> {
        while let Some(last) = requests.last_mut() {
            if !group.test(last)? {
                return Ok(false);
            }
            requests.pop();
        }
        Ok(true)
    }

    fn progress_sends(&mut self) -> Result<bool, Fault> {
        let before = self.sending.len();
        let mut at = 0;
        while at < self.sending.len() {
            if Self::sweep(&self.group, &mut self.sending[at].requests)? {
                let sending = self.sending.swap_remove(at);
                self.slots.push(sending.slot);
                self.sent.close(sending.number);
            } else {
                at += 1;
            }
        }
        Ok(self.sending.len() < before)
    }

    fn progress_payloads(&mut self) -> Result<bool, Fault> {
        let before = self.receiving.len();
        let mut at = 0;
        while at < self.receiving.len() {
            let receiving = &mut self.receiving[at];
            if receiving.expected && Self::sweep(&self.group, &mut receiving.payload)? {
                // In order: headers are matched by it.
                let receiving = self.receiving.remove(at);
                self.slots.push(receiving.slot);
                self.received.close(receiving.number);
            } else {
                at += 1;
            }
        }
        Ok(self.receiving.len() < before)
    }

    /// Ends what can be ended; whether nothing is under way any more.
    fn settle(&mut self) -> Result<bool, Fault> {
        for receiving in &mut self.receiving {
            for request in receiving.payload.iter_mut().chain((!receiving.expected).then_some(&mut receiving.header)) {
                // SAFETY: a request that is not done, by its handle.
                self.group.library().call("Cancel", |f| unsafe { (f.cancel)(request) })?;
            }
        }
        let until = Instant::now() + CANCEL;
        loop {
            self.progress_sends()?;
            let mut at = 0;
            while at < self.receiving.len() {
                let receiving = &mut self.receiving[at];
                let header = receiving.expected || self.group.test(&mut receiving.header)?;
                receiving.expected = header;
                if header && Self::sweep(&self.group, &mut receiving.payload)? {
                    let receiving = self.receiving.swap_remove(at);
                    self.slots.push(receiving.slot);
                    self.received.close(receiving.number);
                } else {
                    at += 1;
                }
            }
            if self.sending.is_empty() && self.receiving.is_empty() {
                return Ok(true);
            }
            if Instant::now() > until {
                return Ok(false);
            }
            std::thread::yield_now();
        }
    }
}

impl Wire for MpiWire {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    unsafe fn send(&mut self, to: usize, call: &Fingerprint, data: *const u8, bytes: usize) -> Result<u64, Fault> {
        let mut slot = self.slot();
        slot[..FINGERPRINT_BYTES].copy_from_slice(&call.encode());
        slot[FINGERPRINT_BYTES..HEADER_BYTES].copy_from_slice(&(bytes as u64).to_le_bytes());
        let inline = if bytes <= INLINE_BYTES { bytes } else { 0 };
        if inline > 0 {
            // SAFETY: the caller's promise, and the slot has room for it.
            unsafe { std::ptr::copy_nonoverlapping(data, slot[HEADER_BYTES..].as_mut_ptr(), inline) };
        }
        // SAFETY: the slot stays as it is until the request is done, or for ever.
        let header = unsafe { self.post_send(to, HEADER_TAG, slot.as_ptr(), HEADER_BYTES + inline)? };
        let number = self.sent.open();
        self.sending.push(Sending { number, slot, requests: vec![header] });
        if inline < bytes {
            for (start, length) in self.pieces(bytes) {
                // SAFETY: the caller's promise.
                let request = unsafe { self.post_send(to, PAYLOAD_TAG, data.add(start), length)? };
                self.sending.last_mut().into_iter().for_each(|sending| sending.requests.push(request));
            }
        }
        Ok(number)
    }

    unsafe fn recv(&mut self, from: usize, call: &Fingerprint, data: *mut u8, bytes: usize) -> Result<u64, Fault> {
        let mut slot = self.slot();
        // SAFETY: the slot is not used otherwise until the request is done, or ever.
        let header = unsafe { self.post_recv(from, HEADER_TAG, slot.as_mut_ptr(), SLOT_BYTES)? };
        let number = self.received.open();
        let (call, expected, payload) = (*call, false, Vec::new());
        self.receiving.push(Receiving { number, from, call, data, bytes, slot, header, expected, payload });
        Ok(number)
    }

    fn progress(&mut self) -> Result<bool, Fault> {
        let headers = self.progress_headers()?;
        let payloads = self.progress_payloads()?;
        Ok(self.progress_sends()? || headers || payloads)
    }

    fn sent(&mut self, number: u64) -> bool {
        self.sent.is_done(number)
    }

    fn received(&mut self, number: u64) -> bool {
        self.received.is_done(number)
    }

    fn wait(&mut self, at_most: Duration) {
        let long = |receiving: &Receiving| !receiving.payload.is_empty();
        if self.sending.iter().any(|sending| sending.requests.len() > 1) || self.receiving.iter().any(long) {
            std::thread::yield_now();
        } else {
            std::thread::sleep(at_most.min(POLL_INTERVAL));
        }
    }

    fn cancel(&mut self, _: &Fault) {
        self.forget();
    }
}

impl MpiWire {
    fn forget(&mut self) {
        if self.group.library().is_given_up() || !self.settle().unwrap_or(false) {
            // What is still under way knows buffers that their owners take back now.
            self.group.library().give_up();
            self.sending.clear();
            self.receiving.clear();
        }
    }
}

impl SplitWire for MpiWire {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn hosts(&self) -> &[usize] {
        self.group.hosts()
    }

    fn job_rank(&self, rank: usize) -> usize {
        self.group.world_rank(rank)
    }

    fn split(&mut self, members: &[usize], communicator: u32) -> Result<Self, Fault> {
        let group = Arc::new(self.group.subset(members, communicator)?);
        Ok(Self::new(group, Arc::clone(&self.watch), self.piece_bytes))
    }
}

impl Drop for MpiWire {
    fn drop(&mut self) {
        if !self.sending.is_empty() || !self.receiving.is_empty() {
            self.forget();
        }
        self.slots.drain(..).for_each(|slot| drop(ManuallyDrop::into_inner(slot)));
    }
}
