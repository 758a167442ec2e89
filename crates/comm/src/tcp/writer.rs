//! Cuts messages into frames, seals them, and writes them to the streams of one peer.
//!
//! A stream holds at most one buffer of sealed frames. A message has left when all of its frames were taken by the
//! operating system.

use super::frame::{Frame, FrameKind, HEADER_BYTES, JobGeneration};
use crate::call::Fingerprint;
use crate::failure_report::FAILURE_BYTES_MAX;
use crate::record::{Sealer, TAG_BYTES};
use std::collections::VecDeque;
use std::io::{ErrorKind, Write};

/// Room for small frames beside a large one.
const SPARE_BYTES: usize = 4 << 10;
const _: () = assert!(SPARE_BYTES >= HEADER_BYTES, "a notice fits beside any frame");
/// Room that is kept for a farewell.
const FAREWELL_BYTES: usize = HEADER_BYTES + FAILURE_BYTES_MAX + TAG_BYTES;

/// A message on its way out.
#[derive(Debug)]
struct Leaving {
    call: Fingerprint,
    data: *const u8,
    bytes: usize,
    /// Bytes that are in frames already.
    cut: usize,
    framed: bool,
    /// Frames that were not taken yet.
    frames: usize,
}

/// The messages to one peer.
#[derive(Debug)]
pub struct Outbox {
    /// From message number `first` on.
    leaving: VecDeque<Leaving>,
    first: u64,
    /// Messages before this index are all in frames.
    next: usize,
    segment_bytes: usize,
    /// A call to tell the peer of.
    notice: Option<Fingerprint>,
}

impl Outbox {
    pub fn new(segment_bytes: usize) -> Self {
        Self { leaving: VecDeque::new(), first: 0, next: 0, segment_bytes, notice: None }
    }

    /// Queues a message; its number.
    pub fn push(&mut self, call: &Fingerprint, data: *const u8, bytes: usize) -> u64 {
        self.leaving.push_back(Leaving { call: *call, data, bytes, cut: 0, framed: false, frames: 0 });
        self.first + self.leaving.len() as u64 - 1
    }

    pub fn done(&self, number: u64) -> bool {
        let gone = |leaving: &Leaving| leaving.framed && leaving.frames == 0;
        number < self.first || self.leaving.get((number - self.first) as usize).is_some_and(gone)
    }

    pub fn is_empty(&self) -> bool {
        self.leaving.is_empty() && self.notice.is_none()
    }

    /// Tells the peer in which call this end waits, with the next frames.
    pub fn set_notice(&mut self, call: Fingerprint) {
        self.notice = Some(call);
    }

    /// The first call that is still on its way.
    pub fn waiting(&self) -> Option<&Fingerprint> {
        self.leaving.front().map(|leaving| &leaving.call)
    }

    /// The next frame, and where its bytes are.
    fn peek(&self) -> Option<(Frame, *const u8)> {
        let leaving = self.leaving.get(self.next)?;
        let frame = Frame {
            kind: FrameKind::Message,
            message: self.first + self.next as u64,
            total: leaving.bytes,
            offset: leaving.cut,
            part: (leaving.bytes - leaving.cut).min(self.segment_bytes),
            call: Some(leaving.call),
        };
        Some((frame, leaving.data.wrapping_add(leaving.cut)))
    }

    /// The frame of `peek` was sealed.
    fn cut(&mut self, part: usize) {
        let leaving = &mut self.leaving[self.next];
        leaving.cut += part;
        leaving.frames += 1;
        if leaving.cut == leaving.bytes {
            leaving.framed = true;
            self.next += 1;
        }
    }

    /// A frame of this message was taken.
    fn taken(&mut self, message: u64) {
        self.leaving[(message - self.first) as usize].frames -= 1;
        while self.leaving.front().is_some_and(|leaving| leaving.framed && leaving.frames == 0) {
            self.leaving.pop_front();
            self.first += 1;
            self.next -= 1;
        }
    }
}

/// One stream's way out.
#[derive(Debug)]
pub struct FrameWriter {
    sealer: Sealer,
    era: JobGeneration,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// The messages whose frames are in the buffer.
    carried: Vec<u64>,
}

impl FrameWriter {
    pub fn new(sealer: Sealer, era: JobGeneration, segment_bytes: usize) -> Self {
        let bytes = HEADER_BYTES + segment_bytes + TAG_BYTES + SPARE_BYTES + FAREWELL_BYTES;
        let buffer = vec![0; bytes].into_boxed_slice();
        Self { sealer, era, buffer, start: 0, end: 0, carried: Vec::new() }
    }

    /// Whether sealed bytes wait for the operating system.
    pub fn pending(&self) -> bool {
        self.start < self.end
    }

    /// Writes what can be written now; whether anything moved.
    ///
    /// # Safety
    /// The messages in `outbox` are valid, and the same outbox comes with every call.
    pub unsafe fn pump(&mut self, sink: &mut impl Write, outbox: &mut Outbox) -> std::io::Result<bool> {
        let mut moved = false;
        loop {
            if !self.pending() {
                // SAFETY: the caller's promise.
                unsafe { self.pack(outbox) };
            }
            if !self.pending() {
                return Ok(moved);
            }
            if !self.flush(sink)? {
                return Ok(moved);
            }
            moved = true;
            if !self.pending() {
                self.carried.drain(..).for_each(|message| outbox.taken(message));
                return Ok(true);
            }
        }
    }

    /// Seals frames into the empty buffer, as many as fit.
    ///
    /// # Safety
    /// The messages in `outbox` are valid.
    unsafe fn pack(&mut self, outbox: &mut Outbox) {
        (self.start, self.end) = (0, 0);
        if let Some(call) = outbox.notice.take() {
            self.seal(&Frame { call: Some(call), ..Frame::bare(FrameKind::Notice, 0) }, &[]);
        }
        while let Some((frame, data)) = outbox.peek() {
            if self.buffer.len() - self.end < HEADER_BYTES + frame.part + TAG_BYTES + FAREWELL_BYTES {
                return;
            }
            // SAFETY: the frame's part lies within its message.
            let payload = if frame.part == 0 { &[] } else { unsafe { std::slice::from_raw_parts(data, frame.part) } };
            self.seal(&frame, payload);
            self.carried.push(frame.message);
            outbox.cut(frame.part);
        }
    }

    fn seal(&mut self, frame: &Frame, payload: &[u8]) {
        self.end += self.sealer.seal(&frame.encode(self.era), &mut self.buffer[self.end..]);
        if !payload.is_empty() {
            self.end += self.sealer.seal(payload, &mut self.buffer[self.end..]);
        }
    }

    /// Whether the operating system took anything.
    fn flush(&mut self, sink: &mut impl Write) -> std::io::Result<bool> {
        match sink.write(&self.buffer[self.start..self.end]) {
            Ok(count) => {
                self.start += count;
                Ok(count > 0)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Seals a last frame behind what is pending; nothing may follow it.
    pub fn farewell(&mut self, kind: FrameKind, payload: &[u8]) {
        self.seal(&Frame::bare(kind, payload.len()), payload);
    }

    /// Writes what is pending, without waiting; whether all of it went.
    pub fn drain(&mut self, sink: &mut impl Write) -> bool {
        while self.pending() {
            if !self.flush(sink).unwrap_or(false) {
                return false;
            }
        }
        true
    }
}
