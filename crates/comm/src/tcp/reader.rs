//! Takes the frames of one stream apart, wherever their bytes come from.
//!
//! Headers pass through a small buffer of fixed size; payloads are read straight into their place and opened there. Nothing
//! counts as arrived before it is authentic, and no length is believed before its header is.

use super::frame::{Frame, FrameKind, HEADER_BYTES, JobGeneration, Malformed, PLAIN_BYTES};
use super::inbox::{Inbox, Placing};
use crate::call::Fingerprint;
use crate::failure_report::FAILURE_BYTES_MAX;
use crate::record::{Opener, TAG_BYTES};
use std::io::{ErrorKind, IoSliceMut, Read};

/// Bytes of the buffer for headers and small payloads: a small message needs one read.
const STAGING_BYTES: usize = 8 << 10;
/// Behind a payload of this size, no more is read ahead than the next header: what comes next is large too, and belongs
/// straight into its place.
const LARGE_BYTES: usize = 32 << 10;
/// Reads before the other streams have their turn.
const READS_PER_TURN: usize = 2;

#[derive(Debug)]
pub struct FrameReader {
    opener: Opener,
    era: JobGeneration,
    staging: Box<[u8; STAGING_BYTES]>,
    start: usize,
    end: usize,
    state: ReadState,
    failure: Box<[u8; FAILURE_BYTES_MAX]>,
}

#[derive(Clone, Copy, Debug)]
enum ReadState {
    Header,
    /// The header has opened, but the payload has no buffer yet.
    AwaitsBuffer(Frame),
    /// `filled` bytes of the payload are in their place.
    Payload {
        frame: Frame,
        buffer: *mut u8,
        filled: usize,
    },
}

/// What stopped a stream for good.
#[derive(Debug)]
pub enum StreamStop {
    /// No byte will come any more.
    End,
    /// The peer said goodbye.
    Goodbye,
    /// The peer's call failed; its failure report.
    Failed(Vec<u8>),
    /// The peer made another call, of so many bytes, than this end, of so many.
    Mismatch {
        mine: Box<Fingerprint>,
        mine_bytes: usize,
        theirs: Box<Fingerprint>,
        theirs_bytes: usize,
    },
    Malformed(Malformed),
    System(std::io::Error),
}

impl From<Malformed> for StreamStop {
    fn from(malformed: Malformed) -> Self {
        StreamStop::Malformed(malformed)
    }
}

impl FrameReader {
    pub fn new(opener: Opener, era: JobGeneration) -> Self {
        Self {
            opener,
            era,
            staging: Box::new([0; STAGING_BYTES]),
            start: 0,
            end: 0,
            state: ReadState::Header,
            failure: Box::new([0; FAILURE_BYTES_MAX]),
        }
    }

    /// Whether it waits for a receive rather than for bytes.
    pub fn awaits_buffer(&self) -> bool {
        matches!(self.state, ReadState::AwaitsBuffer(_))
    }

    /// Reads some of what is there now; whether anything moved.
    ///
    /// # Safety
    /// The places in `inbox` are valid, and the same inbox comes with every call.
    pub unsafe fn pump(&mut self, source: &mut impl Read, inbox: &mut Inbox) -> Result<bool, StreamStop> {
        let mut moved = false;
        for _ in 0..READS_PER_TURN {
            // SAFETY: the caller's promise.
            moved |= unsafe { self.digest(inbox) }?;
            if self.awaits_buffer() {
                return Ok(moved);
            }
            // SAFETY: the caller's promise.
            let (read, space) = match unsafe { self.fill(source) } {
                Ok((0, _)) => return Err(StreamStop::End),
                Ok(counts) => counts,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(moved),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(StreamStop::System(error)),
            };
            moved = true;
            // SAFETY: the caller's promise.
            unsafe { self.digest(inbox) }?;
            if read < space {
                break;
            }
        }
        Ok(moved)
    }

    /// One read: into the payload's place if there is one, and behind it into the buffer. The bytes read and asked for.
    ///
    /// # Safety
    /// The payload's place is valid.
    unsafe fn fill(&mut self, source: &mut impl Read) -> std::io::Result<(usize, usize)> {
        let ReadState::Payload { frame, buffer, filled } = &mut self.state else {
            self.staging.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            let count = source.read(&mut self.staging[self.end..])?;
            self.end += count;
            return Ok((count, STAGING_BYTES - self.end + count));
        };
        let rest = frame.part - *filled;
        let ahead = if frame.part >= LARGE_BYTES { TAG_BYTES + HEADER_BYTES } else { STAGING_BYTES };
        // The buffer was digested before the payload went to its place, but for a piece of the tag.
        let space = ahead.saturating_sub(self.end - self.start);
        self.staging.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        // SAFETY: `rest` bytes of the place are still to be filled.
        let target = unsafe { std::slice::from_raw_parts_mut(buffer.add(*filled), rest) };
        let slices = &mut [IoSliceMut::new(target), IoSliceMut::new(&mut self.staging[self.end..self.end + space])];
        let count = source.read_vectored(slices)?;
        *filled += count.min(rest);
        self.end += count - count.min(rest);
        Ok((count, rest + space))
    }

    /// Works off what was read; whether anything came of it.
    ///
    /// # Safety
    /// The places in `inbox` are valid.
    unsafe fn digest(&mut self, inbox: &mut Inbox) -> Result<bool, StreamStop> {
        let mut moved = false;
        loop {
            match self.state {
                ReadState::Header => match self.header()? {
                    Some(frame) => self.state = ReadState::AwaitsBuffer(frame),
                    None => return Ok(moved),
                },
                ReadState::AwaitsBuffer(frame) => match self.destination(&frame, inbox)? {
                    Some(buffer) => self.state = ReadState::Payload { frame, buffer, filled: 0 },
                    None => return Ok(moved),
                },
                ReadState::Payload { frame, buffer, filled } => {
                    // SAFETY: the place has room for the frame's part.
                    match unsafe { self.payload(&frame, buffer, filled) }? {
                        true => self.finish(&frame, inbox)?,
                        false => return Ok(moved),
                    }
                }
            }
            moved = true;
        }
    }

    /// The next header, if all of it is there.
    fn header(&mut self) -> Result<Option<Frame>, Malformed> {
        let Some(sealed) = self.staging[self.start..self.end].first_chunk_mut::<HEADER_BYTES>() else {
            return Ok(None);
        };
        self.opener.open_tagged(sealed)?;
        let mut plain = [0; PLAIN_BYTES];
        plain.copy_from_slice(&sealed[..PLAIN_BYTES]);
        self.start += HEADER_BYTES;
        Frame::decode(&plain, self.era).map(Some)
    }

    /// Where a payload goes, if it has a place now.
    fn destination(&mut self, frame: &Frame, inbox: &mut Inbox) -> Result<Option<*mut u8>, StreamStop> {
        match frame.kind {
            FrameKind::Goodbye => Err(StreamStop::Goodbye),
            FrameKind::Failed | FrameKind::Notice => Ok(Some(self.failure.as_mut_ptr())),
            FrameKind::Message => match inbox.place(frame).map_err(Malformed::Nonsense)? {
                Placing::Here(buffer) => Ok(Some(buffer)),
                Placing::Later => Ok(None),
                Placing::Mismatch(mine, mine_bytes) => {
                    let theirs = frame.call.map_or_else(|| mine.clone(), Box::new);
                    Err(StreamStop::Mismatch { mine, mine_bytes, theirs, theirs_bytes: frame.total })
                }
            },
        }
    }

    /// Moves what was read ahead to its place, and opens the payload when it is whole.
    ///
    /// # Safety
    /// `buffer` has room for the frame's part.
    unsafe fn payload(&mut self, frame: &Frame, buffer: *mut u8, filled: usize) -> Result<bool, Malformed> {
        let count = (frame.part - filled).min(self.end - self.start);
        // SAFETY: both are within their buffers, by the line above.
        unsafe { std::ptr::copy_nonoverlapping(self.staging[self.start..].as_ptr(), buffer.add(filled), count) };
        self.start += count;
        self.state = ReadState::Payload { frame: *frame, buffer, filled: filled + count };
        if frame.part == 0 {
            return Ok(true);
        }
        if filled + count < frame.part || self.end - self.start < TAG_BYTES {
            return Ok(false);
        }
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(&self.staging[self.start..self.start + TAG_BYTES]);
        self.start += TAG_BYTES;
        // SAFETY: the place is ours until the frame has arrived.
        let data = unsafe { std::slice::from_raw_parts_mut(buffer, frame.part) };
        self.opener.open(data, &tag)?;
        Ok(true)
    }

    fn finish(&mut self, frame: &Frame, inbox: &mut Inbox) -> Result<(), StreamStop> {
        self.state = ReadState::Header;
        match frame.kind {
            FrameKind::Message => inbox.arrived(frame),
            FrameKind::Notice => inbox.set_notice(frame.call),
            FrameKind::Goodbye => return Err(StreamStop::Goodbye),
            FrameKind::Failed => return Err(StreamStop::Failed(self.failure[..frame.part].to_vec())),
        }
        Ok(())
    }
}
