//! What a compressed file unpacks to, front to back. An error says how far the compressed bytes made sense: damage stands at
//! that byte or before it.

use flate2::bufread::GzDecoder;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
/// As many bytes of a start as tell how it is packed.
pub(crate) const MAGIC_BYTES: usize = 4;
/// Compressed bytes that are read at once. An error is told to about as many.
const BLOCK_BYTES: usize = 32 << 10;

/// How bytes are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    None,
    Gzip,
    Zstd,
}

impl Packing {
    /// By the first bytes.
    pub(crate) fn of(start: &[u8]) -> Self {
        match start {
            _ if start.starts_with(GZIP) => Self::Gzip,
            _ if start.starts_with(ZSTD) => Self::Zstd,
            _ => Self::None,
        }
    }

    /// Of the file at this path; `None` also of what is no file, or cannot be read.
    pub(crate) fn at(path: &Path) -> Self {
        // Opening a pipe would wait for its writer.
        if !std::fs::metadata(path).is_ok_and(|meta| meta.is_file()) {
            return Self::None;
        }
        let mut start = Vec::new();
        let read = kolo_base::open_regular(path).and_then(|file| file.take(MAGIC_BYTES as u64).read_to_end(&mut start));
        read.map_or(Self::None, |_| Self::of(&start))
    }
}

/// Counts the bytes that a reader gives.
struct Counted<R> {
    reader: BufReader<R>,
    taken: u64,
    /// Where the bytes end that were shown: a decoder takes none of those that it cannot decode.
    shown: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.fill_buf()?.read(out)?;
        self.consume(read);
        Ok(read)
    }
}

impl<R: Read> BufRead for Counted<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let bytes = self.reader.fill_buf()?;
        self.shown.store(self.taken + bytes.len() as u64, Ordering::Relaxed);
        Ok(bytes)
    }

    fn consume(&mut self, bytes: usize) {
        self.taken += bytes as u64;
        self.reader.consume(bytes);
    }
}

/// The members of a gzip file, one after the other. Zeros behind a member are passed over, as tools pad files with them: so do
/// gzip itself and Python's `gzip`.
struct GzipMembers<R> {
    /// The one at hand; `None` at the end.
    member: Option<GzDecoder<R>>,
}

impl<R: BufRead> Read for GzipMembers<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.member {
            let read = member.read(out)?;
            if read > 0 || out.is_empty() {
                return Ok(read);
            }
            let Some(mut packed) = self.member.take().map(GzDecoder::into_inner) else { break };
            let is_end = loop {
                let bytes = packed.fill_buf()?;
                let (zeros, all) = (bytes.iter().take_while(|byte| **byte == 0).count(), bytes.len());
                packed.consume(zeros);
                if zeros < all || all == 0 {
                    break all == 0;
                }
            };
            if !is_end {
                self.member = Some(GzDecoder::new(packed));
            }
        }
        Ok(0)
    }
}

/// Unpacked bytes, front to back.
pub(crate) struct Unpacked {
    inner: Box<dyn Read + Send>,
    name: &'static str,
    shown: Arc<AtomicU64>,
}

impl fmt::Debug for Unpacked {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Unpacked({}, byte {})", self.name, self.shown.load(Ordering::Relaxed))
    }
}

impl Unpacked {
    fn counted<R: Read>(packed: R) -> (Counted<R>, Arc<AtomicU64>) {
        let shown = Arc::new(AtomicU64::new(0));
        let reader = BufReader::with_capacity(BLOCK_BYTES, packed);
        (Counted { reader, taken: 0, shown: Arc::clone(&shown) }, shown)
    }

    pub fn gzip(packed: impl Read + Send + 'static) -> Self {
        let (packed, shown) = Self::counted(packed);
        Self { inner: Box::new(GzipMembers { member: Some(GzDecoder::new(packed)) }), name: "gzip", shown }
    }

    pub fn zlib(packed: impl Read + Send + 'static) -> Self {
        let (packed, shown) = Self::counted(packed);
        Self { inner: Box::new(flate2::bufread::ZlibDecoder::new(packed)), name: "zlib", shown }
    }

    pub fn zstd(packed: impl Read + Send + 'static) -> io::Result<Self> {
        let (packed, shown) = Self::counted(packed);
        Ok(Self { inner: Box::new(zstd::stream::read::Decoder::with_buffer(packed)?), name: "zstd", shown })
    }
}

impl Read for Unpacked {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.inner.read(out).map_err(|error| {
            // A disk that fails says so itself.
            if error.raw_os_error().is_some() || error.kind() == io::ErrorKind::Interrupted {
                return error;
            }
            let (name, byte) = (self.name, self.shown.load(Ordering::Relaxed));
            if error.kind() == io::ErrorKind::UnexpectedEof {
                let message = format!("its {name} data end too early, at byte {byte} of the packed file");
                return io::Error::new(error.kind(), message);
            }
            let text = error.to_string();
            // `zstd -d` refuses such data without `--long`, too.
            if text.contains("too much memory") {
                let message =
                    format!("its {name} data take too much memory to unpack; pack them again without `--long`");
                return io::Error::new(io::ErrorKind::Unsupported, message);
            }
            let message = format!("its {name} data are damaged at or before byte {byte} of the packed file: {text}");
            io::Error::new(io::ErrorKind::InvalidData, message)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Cursor, Write};

    fn read(unpacked: Unpacked) -> Result<Vec<u8>, String> {
        let (mut bytes, mut unpacked) = (Vec::new(), unpacked);
        unpacked.read_to_end(&mut bytes).map(|_| bytes).map_err(|error| error.to_string())
    }

    #[test]
    fn zeros_behind_the_members_of_gzip_are_passed_over() {
        let member = |text: &[u8]| {
            let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            gzip.write_all(text).unwrap();
            gzip.finish().unwrap()
        };
        let unpacked = |bytes: Vec<u8>| read(Unpacked::gzip(Cursor::new(bytes)));
        let zeros = vec![0; 3 * BLOCK_BYTES];
        for packed in [
            [member(b"one"), member(b"two"), zeros.clone()].concat(),
            [member(b"one"), zeros.clone(), member(b""), vec![0], member(b"two")].concat(),
        ] {
            assert_eq!(unpacked(packed), Ok(b"onetwo".to_vec()));
        }
        let error = unpacked([member(b"one"), zeros, b"more".to_vec()].concat()).unwrap_err();
        assert!(error.starts_with("its gzip data"), "{error}");
    }

    #[test]
    fn errors_name_the_byte_of_the_packed_file() {
        let plain: Vec<u8> = (0..100_000_u32).flat_map(|at| at.wrapping_mul(at).to_le_bytes()).collect();
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&plain).unwrap();
        let gzip = gzip.finish().unwrap();
        let mut zstd = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
        zstd.include_checksum(true).unwrap();
        zstd.write_all(&plain).unwrap();
        let zstd = zstd.finish().unwrap();
        type Open = fn(Vec<u8>) -> Unpacked;
        let open: [(&str, Vec<u8>, Open); 2] = [
            ("gzip", gzip, |bytes| Unpacked::gzip(Cursor::new(bytes))),
            ("zstd", zstd, |bytes| Unpacked::zstd(Cursor::new(bytes)).unwrap()),
        ];
        for (name, packed, unpacked) in open {
            assert_eq!(read(unpacked(packed.clone())), Ok(plain.clone()));
            let cut = packed.len() / 2;
            let error = read(unpacked(packed[..cut].to_vec())).unwrap_err();
            assert_eq!(error, format!("its {name} data end too early, at byte {cut} of the packed file"));
            let mut damaged = packed.clone();
            damaged[cut..cut + 64].fill(0xA5);
            let error = read(unpacked(damaged)).unwrap_err();
            let start = format!("its {name} data are damaged at or before byte ");
            let byte = error.strip_prefix(&start).and_then(|rest| rest.split_once(' ')).map(|(byte, _)| byte.parse());
            let Some(Ok(byte)) = byte else { panic!("{error}") };
            assert!((cut..=packed.len()).contains(&byte), "{error}");
        }
    }
}
