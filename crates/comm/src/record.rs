//! What travels on an authenticated link: sealed pieces, and records made of them.
//!
//! A piece is encrypted and authenticated with AEGIS-128X4 under its direction's key; its number, which never travels, is the
//! nonce. A piece that was changed, replayed, left out or put elsewhere does not open. A record is a sealed header of
//! fixed size and, if it has a payload, the sealed payload: the length is believed only after the header has opened.

use aegis::aegis128x4::Aegis128X4;
use kolo_base::ByteReader;
use zeroize::Zeroizing;

/// Bytes of a piece's authenticator.
pub const TAG_BYTES: usize = 16;
/// Largest payload of a record.
pub const RECORD_BYTES_MAX: usize = 16 << 20;
/// Bytes of a record's header with its authenticator.
pub const HEADER_BYTES: usize = PLAIN_BYTES + TAG_BYTES;

const PLAIN_BYTES: usize = 8;

/// A piece did not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Forged {
    #[error("its authenticator is wrong: it was changed, repeated, or is not from this job")]
    Tag,
    #[error("it says {0} bytes, more than the {RECORD_BYTES_MAX} allowed")]
    Length(usize),
    #[error("it is of an unknown kind ({0})")]
    Kind(u8),
    #[error("the link was given up earlier")]
    Broken,
}

/// The key of one direction of a link, wiped when it is dropped.
pub type LinkKey = Zeroizing<[u8; 16]>;

fn cipher(key: &[u8; 16], number: u64) -> Aegis128X4<TAG_BYTES> {
    let mut nonce = [0; 16];
    nonce[..8].copy_from_slice(&number.to_le_bytes());
    Aegis128X4::new(key, &nonce)
}

/// Seals the pieces of one direction, in order.
pub struct Sealer {
    key: LinkKey,
    number: u64,
}

impl std::fmt::Debug for Sealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sealer at piece {}", self.number)
    }
}

impl Sealer {
    pub fn new(key: impl Into<LinkKey>) -> Self {
        Self { key: key.into(), number: 0 }
    }

    fn next(&mut self) -> Aegis128X4<TAG_BYTES> {
        let cipher = cipher(&self.key, self.number);
        self.number += 1;
        cipher
    }

    pub fn seal_in_place(&mut self, data: &mut [u8]) -> [u8; TAG_BYTES] {
        self.next().encrypt_in_place(data, &[])
    }

    /// Seals `plain` into the front of `sealed`, the authenticator behind it; the bytes written.
    pub fn seal(&mut self, plain: &[u8], sealed: &mut [u8]) -> usize {
        let (data, rest) = sealed.split_at_mut(plain.len());
        let mut encryptor = self.next().encryptor(&[]);
        encryptor.update(plain, data);
        rest[..TAG_BYTES].copy_from_slice(&encryptor.finalize());
        plain.len() + TAG_BYTES
    }
}

/// Opens the pieces of one direction, in order.
pub struct Opener {
    key: LinkKey,
    number: u64,
}

impl std::fmt::Debug for Opener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Opener at piece {}", self.number)
    }
}

impl Opener {
    pub fn new(key: impl Into<LinkKey>) -> Self {
        Self { key: key.into(), number: 0 }
    }

    /// Opens a piece in place; what does not open is wiped.
    pub fn open(&mut self, data: &mut [u8], tag: &[u8; TAG_BYTES]) -> Result<(), Forged> {
        let opened = cipher(&self.key, self.number).decrypt_in_place(data, tag, &[]);
        self.number += 1;
        opened.map_err(|_| Forged::Tag)
    }

    /// Opens a piece whose authenticator stands behind it; its plain part.
    pub fn open_tagged<'a>(&mut self, piece: &'a mut [u8]) -> Result<&'a mut [u8], Forged> {
        let plain = piece.len().checked_sub(TAG_BYTES).ok_or(Forged::Tag)?;
        let (data, rest) = piece.split_at_mut(plain);
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(rest);
        self.open(data, &tag)?;
        Ok(data)
    }
}

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RecordKind {
    /// The user's bytes.
    Data = 1,
    /// The sender has said all it had to say. An end without it is a loss.
    Goodbye = 2,
}

/// Appends a whole record to `out`.
///
/// # Panics
/// If the payload is larger than [`RECORD_BYTES_MAX`].
pub fn seal_record(sealer: &mut Sealer, kind: RecordKind, payload: &[u8], out: &mut Vec<u8>) {
    assert!(payload.len() <= RECORD_BYTES_MAX, "a record of {} bytes", payload.len());
    let mut header = [0; PLAIN_BYTES];
    header[0..4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    header[4] = kind as u8;
    let tag = sealer.seal_in_place(&mut header);
    out.extend_from_slice(&header);
    out.extend_from_slice(&tag);
    if !payload.is_empty() {
        let at = out.len();
        out.resize(at + payload.len() + TAG_BYTES, 0);
        sealer.seal(payload, &mut out[at..]);
    }
}

/// Takes records apart as their bytes come in. It holds one record at most, and nothing before its header has opened.
#[derive(Debug)]
pub struct RecordReader {
    opener: Opener,
    header: [u8; HEADER_BYTES],
    /// The header's kind once it has opened.
    kind: Option<RecordKind>,
    payload: Vec<u8>,
    filled: usize,
    broken: bool,
}

impl RecordReader {
    pub fn new(opener: Opener) -> Self {
        let header = [0; HEADER_BYTES];
        Self { opener, header, kind: None, payload: Vec::new(), filled: 0, broken: false }
    }

    /// Where the next bytes belong. It is never empty.
    pub fn space(&mut self) -> &mut [u8] {
        match self.kind {
            None => &mut self.header[self.filled..],
            Some(_) => &mut self.payload[self.filled..],
        }
    }

    /// Whether a record has begun and is not complete.
    pub fn within(&self) -> bool {
        self.filled > 0 || self.kind.is_some()
    }

    /// `bytes` of [`RecordReader::space`] were filled. A complete record is moved into `record`, whose old contents go.
    pub fn filled(&mut self, bytes: usize, record: &mut Vec<u8>) -> Result<Option<RecordKind>, Forged> {
        if self.broken {
            return Err(Forged::Broken);
        }
        let outcome = self.advance(bytes, record);
        self.broken = outcome.is_err();
        outcome
    }

    fn advance(&mut self, bytes: usize, record: &mut Vec<u8>) -> Result<Option<RecordKind>, Forged> {
        self.filled += bytes;
        let Some(kind) = self.kind else {
            if self.filled < HEADER_BYTES {
                return Ok(None);
            }
            let (kind, length) = self.open_header()?;
            self.filled = 0;
            if length == 0 {
                record.clear();
                return Ok(Some(kind));
            }
            self.kind = Some(kind);
            self.payload.clear();
            self.payload.resize(length + TAG_BYTES, 0);
            return Ok(None);
        };
        if self.filled < self.payload.len() {
            return Ok(None);
        }
        let length = self.opener.open_tagged(&mut self.payload)?.len();
        self.payload.truncate(length);
        std::mem::swap(record, &mut self.payload);
        (self.kind, self.filled) = (None, 0);
        Ok(Some(kind))
    }

    fn open_header(&mut self) -> Result<(RecordKind, usize), Forged> {
        let header = self.opener.open_tagged(&mut self.header)?;
        let mut reader = ByteReader::new(header);
        let (length, kind) = reader.u32().zip(reader.u8()).ok_or(Forged::Tag)?;
        let length = length as usize;
        let kind = match kind {
            1 => RecordKind::Data,
            2 => RecordKind::Goodbye,
            other => return Err(Forged::Kind(other)),
        };
        if length > RECORD_BYTES_MAX {
            return Err(Forged::Length(length));
        }
        Ok((kind, length))
    }
}
