//! Takes the frames of one stream apart, wherever their bytes come from.
//!
//! Headers pass through a small buffer of fixed size; payloads are read straight into their place and opened there. Nothing
//! counts as arrived before it is authentic, and no length is believed before its header is.

use super::frame::{Era, Frame, FrameKind, HEADER_BYTES, Malformed, PLAIN_BYTES};
use super::inbox::{Inbox, Placing};
use crate::account::ACCOUNT_BYTES_MAX;
use crate::call::Fingerprint;
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
    era: Era,
    staging: Box<[u8; STAGING_BYTES]>,
    start: usize,
    end: usize,
    state: State,
    account: Box<[u8; ACCOUNT_BYTES_MAX]>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Header,
    /// The header has opened, but the payload has no place yet.
    Homeless(Frame),
    /// `filled` bytes of the payload are in their place.
    Payload {
        frame: Frame,
        place: *mut u8,
        filled: usize,
    },
}

/// What stopped a stream for good.
#[derive(Debug)]
pub enum Stop {
    /// No byte will come any more.
    End,
    /// The peer said goodbye.
    Goodbye,
    /// The peer's call failed; its account.
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

impl From<Malformed> for Stop {
    fn from(malformed: Malformed) -> Self {
        Stop::Malformed(malformed)
    }
}

impl FrameReader {
    pub fn new(opener: Opener, era: Era) -> Self {
        Self {
            opener,
            era,
            staging: Box::new([0; STAGING_BYTES]),
            start: 0,
            end: 0,
            state: State::Header,
            account: Box::new([0; ACCOUNT_BYTES_MAX]),
        }
    }

    /// Whether it waits for a receive rather than for bytes.
    pub fn homeless(&self) -> bool {
        matches!(self.state, State::Homeless(_))
    }

    /// Reads some of what is there now; whether anything moved.
    ///
    /// # Safety
    /// The places in `inbox` are valid, and the same inbox comes with every call.
    pub unsafe fn pump(&mut self, source: &mut impl Read, inbox: &mut Inbox) -> Result<bool, Stop> {
        let mut moved = false;
        for _ in 0..READS_PER_TURN {
            // SAFETY: the caller's promise.
            moved |= unsafe { self.digest(inbox) }?;
            if self.homeless() {
                return Ok(moved);
            }
            // SAFETY: the caller's promise.
            let (read, room) = match unsafe { self.fill(source) } {
                Ok((0, _)) => return Err(Stop::End),
                Ok(counts) => counts,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(moved),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(Stop::System(error)),
            };
            moved = true;
            // SAFETY: the caller's promise.
            unsafe { self.digest(inbox) }?;
            if read < room {
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
        let State::Payload { frame, place, filled } = &mut self.state else {
            self.staging.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            let count = source.read(&mut self.staging[self.end..])?;
            self.end += count;
            return Ok((count, STAGING_BYTES - self.end + count));
        };
        let rest = frame.part - *filled;
        let ahead = if frame.part >= LARGE_BYTES { TAG_BYTES + HEADER_BYTES } else { STAGING_BYTES };
        // The buffer was digested before the payload went to its place, but for a piece of the tag.
        let room = ahead.saturating_sub(self.end - self.start);
        self.staging.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        // SAFETY: `rest` bytes of the place are still to be filled.
        let target = unsafe { std::slice::from_raw_parts_mut(place.add(*filled), rest) };
        let slices = &mut [IoSliceMut::new(target), IoSliceMut::new(&mut self.staging[self.end..self.end + room])];
        let count = source.read_vectored(slices)?;
        *filled += count.min(rest);
        self.end += count - count.min(rest);
        Ok((count, rest + room))
    }

    /// Works off what was read; whether anything came of it.
    ///
    /// # Safety
    /// The places in `inbox` are valid.
    unsafe fn digest(&mut self, inbox: &mut Inbox) -> Result<bool, Stop> {
        let mut moved = false;
        loop {
            match self.state {
                State::Header => match self.header()? {
                    Some(frame) => self.state = State::Homeless(frame),
                    None => return Ok(moved),
                },
                State::Homeless(frame) => match self.home(&frame, inbox)? {
                    Some(place) => self.state = State::Payload { frame, place, filled: 0 },
                    None => return Ok(moved),
                },
                State::Payload { frame, place, filled } => {
                    // SAFETY: the place has room for the frame's part.
                    match unsafe { self.payload(&frame, place, filled) }? {
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
    fn home(&mut self, frame: &Frame, inbox: &mut Inbox) -> Result<Option<*mut u8>, Stop> {
        match frame.kind {
            FrameKind::Goodbye => Err(Stop::Goodbye),
            FrameKind::Failed | FrameKind::Notice => Ok(Some(self.account.as_mut_ptr())),
            FrameKind::Message => match inbox.place(frame).map_err(Malformed::Nonsense)? {
                Placing::Here(place) => Ok(Some(place)),
                Placing::Later => Ok(None),
                Placing::Mismatch(mine, mine_bytes) => {
                    let theirs = frame.call.map_or_else(|| mine.clone(), Box::new);
                    Err(Stop::Mismatch { mine, mine_bytes, theirs, theirs_bytes: frame.total })
                }
            },
        }
    }

    /// Moves what was read ahead to its place, and opens the payload when it is whole.
    ///
    /// # Safety
    /// `place` has room for the frame's part.
    unsafe fn payload(&mut self, frame: &Frame, place: *mut u8, filled: usize) -> Result<bool, Malformed> {
        let count = (frame.part - filled).min(self.end - self.start);
        // SAFETY: both are within their buffers, by the line above.
        unsafe { std::ptr::copy_nonoverlapping(self.staging[self.start..].as_ptr(), place.add(filled), count) };
        self.start += count;
        self.state = State::Payload { frame: *frame, place, filled: filled + count };
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
        let data = unsafe { std::slice::from_raw_parts_mut(place, frame.part) };
        self.opener.open(data, &tag)?;
        Ok(true)
    }

    fn finish(&mut self, frame: &Frame, inbox: &mut Inbox) -> Result<(), Stop> {
        self.state = State::Header;
        match frame.kind {
            FrameKind::Message => inbox.arrived(frame),
            FrameKind::Notice => inbox.set_notice(frame.call),
            FrameKind::Goodbye => return Err(Stop::Goodbye),
            FrameKind::Failed => return Err(Stop::Failed(self.account[..frame.part].to_vec())),
        }
        Ok(())
    }
}
