//! A minimal PNG encoder: 8-bit RGB, compressed by run lengths under deflate's fixed code.
//!
//! Each row is stored as the difference from the row above, so flat areas and vertical edges become runs of zeros.

use crate::crc::CRC32;

const SIGNATURE: [u8; 8] = [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1A, b'\n'];
const CHANNELS: usize = 3;
const FILTER_UP: u8 = 2;
const RUN_LENGTH_MIN: usize = 3;
/// One less than deflate allows: the longest length has a code outside the pattern of the others.
const RUN_LENGTH_MAX: usize = 257;

/// The PNG file of `rgb`, row by row from the top.
pub fn encode(width: usize, height: usize, rgb: &[u8]) -> Vec<u8> {
    assert_eq!(rgb.len(), width * height * CHANNELS, "a picture of {width} by {height} pixels");
    assert!(
        (1..1 << 16).contains(&width) && (1..1 << 16).contains(&height),
        "{width} by {height} pixels is no picture"
    );
    let mut file = SIGNATURE.to_vec();
    let mut header = Vec::new();
    header.extend((width as u32).to_be_bytes());
    header.extend((height as u32).to_be_bytes());
    let (depth_bits, true_colour, compression, filter, interlace) = (8, 2, 0, 0, 0);
    header.extend([depth_bits, true_colour, compression, filter, interlace]);
    chunk(&mut file, b"IHDR", &header);
    chunk(&mut file, b"IDAT", &zlib(&filter_rows(width * CHANNELS, rgb)));
    chunk(&mut file, b"IEND", &[]);
    file
}

fn chunk(file: &mut Vec<u8>, kind: &[u8; 4], data: &[u8]) {
    file.extend((data.len() as u32).to_be_bytes());
    let checked_from = file.len();
    file.extend(kind);
    file.extend(data);
    file.extend(CRC32.checksum(&file[checked_from..]).to_be_bytes());
}

fn filter_rows(row_bytes: usize, rgb: &[u8]) -> Vec<u8> {
    let mut filtered = Vec::with_capacity(rgb.len() + rgb.len() / row_bytes);
    let mut above: &[u8] = &vec![0; row_bytes];
    for row in rgb.chunks_exact(row_bytes) {
        filtered.push(FILTER_UP);
        filtered.extend(row.iter().zip(above).map(|(byte, above)| byte.wrapping_sub(*above)));
        above = row;
    }
    filtered
}

/// One deflate block in a zlib envelope.
fn zlib(data: &[u8]) -> Vec<u8> {
    let (deflate_window_32k, check_bits) = (0x78, 0x01);
    let mut bits = Bits { bytes: vec![deflate_window_32k, check_bits], ..Bits::default() };
    let (last_block, fixed_code) = (1, 1);
    bits.push(last_block, 1);
    bits.push(fixed_code, 2);
    let mut rest = data;
    while let Some((first, tail)) = rest.split_first() {
        bits.symbol(u16::from(*first));
        let run = tail.iter().take(RUN_LENGTH_MAX).take_while(|byte| *byte == first).count();
        if run >= RUN_LENGTH_MIN {
            bits.repeat_last(run);
            rest = &tail[run..];
        } else {
            rest = tail;
        }
    }
    let end_of_block = 256;
    bits.symbol(end_of_block);
    let mut bytes = bits.finish();
    bytes.extend(adler32(data).to_be_bytes());
    bytes
}

fn adler32(data: &[u8]) -> u32 {
    const MODULUS: u32 = 65_521;
    let (low, high) = data.iter().fold((1, 0), |(low, high), byte| {
        let low = (low + u32::from(*byte)) % MODULUS;
        (low, (high + low) % MODULUS)
    });
    high << 16 | low
}

/// Deflate's bit stream: the first bit is the lowest of the first byte.
#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    pending: u32,
    pending_count: u32,
}

impl Bits {
    fn push(&mut self, value: u32, count: u32) {
        self.pending |= value << self.pending_count;
        self.pending_count += count;
        while self.pending_count >= 8 {
            self.bytes.push(self.pending as u8);
            self.pending >>= 8;
            self.pending_count -= 8;
        }
    }

    /// A literal, length or end symbol in the fixed code of RFC 1951, section 3.2.6. Codes travel highest bit first.
    fn symbol(&mut self, symbol: u16) {
        let (code, count) = match symbol {
            0..144 => (0x30 + symbol, 8),
            144..256 => (0x190 + symbol - 144, 9),
            256..280 => (symbol - 256, 7),
            _ => (0xC0 + symbol - 280, 8),
        };
        self.push(u32::from(code.reverse_bits() >> (16 - count)), count);
    }

    /// Repeats the last byte `run` times: a copy from distance 1.
    fn repeat_last(&mut self, run: usize) {
        let excess = (run - RUN_LENGTH_MIN) as u32;
        let extra_bits = (excess | 7).ilog2() - 2;
        self.symbol(257 + (4 * extra_bits + (excess >> extra_bits)) as u16);
        self.push(excess & ((1 << extra_bits) - 1), extra_bits);
        let (distance_one, distance_bits) = (0, 5);
        self.push(distance_one, distance_bits);
    }

    fn finish(mut self) -> Vec<u8> {
        if self.pending_count > 0 {
            self.bytes.push(self.pending as u8);
        }
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::rng::Stream;

    struct Reader<'a> {
        bytes: &'a [u8],
        at: usize,
    }

    impl Reader<'_> {
        fn bit(&mut self) -> usize {
            let bit = self.bytes[self.at / 8] >> (self.at % 8) & 1;
            self.at += 1;
            bit.into()
        }

        fn number(&mut self, count: usize) -> usize {
            (0..count).fold(0, |number, shift| number | self.bit() << shift)
        }

        fn code(&mut self, count: usize) -> usize {
            (0..count).fold(0, |code, _| code << 1 | self.bit())
        }

        fn symbol(&mut self) -> usize {
            let code = self.code(7);
            match code {
                0..24 => 256 + code,
                24..96 => (code << 1 | self.bit()) - 0x30,
                96..100 => 280 + (code << 1 | self.bit()) - 0xC0,
                _ => 144 + (code << 2 | self.code(2)) - 0x190,
            }
        }
    }

    /// Lengths straight from the table of RFC 1951, section 3.2.5.
    const LENGTH_BASES: [usize; 28] =
        [3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227];

    fn inflate(zlib: &[u8]) -> Vec<u8> {
        let (body, check) = zlib.split_at(zlib.len() - 4);
        assert_eq!((u32::from(body[0]) << 8 | u32::from(body[1])) % 31, 0);
        let mut reader = Reader { bytes: &body[2..], at: 0 };
        assert_eq!((reader.number(1), reader.number(2)), (1, 1));
        let mut data = Vec::new();
        loop {
            match reader.symbol() {
                256 => break,
                literal @ 0..256 => data.push(literal as u8),
                length => {
                    let extra_bits = (length - 257).saturating_sub(4) / 4;
                    let run = LENGTH_BASES[length - 257] + reader.number(extra_bits);
                    assert_eq!(reader.code(5), 0, "distance 1");
                    data.extend(vec![data[data.len() - 1]; run]);
                }
            }
        }
        assert_eq!(check, adler32(&data).to_be_bytes());
        data
    }

    #[test]
    fn adler32_known_answers() {
        assert_eq!(adler32(b""), 1);
        assert_eq!(adler32(b"Wikipedia"), 0x11E6_0398);
    }

    #[test]
    fn every_run_length_and_byte_comes_back() {
        for run in 0..600 {
            let data: Vec<u8> = std::iter::repeat_n(7, run).chain([255, 0, 143, 144]).collect();
            assert_eq!(inflate(&zlib(&data)), data, "run of {run}");
        }
        let stream = Stream::new(1, "png");
        let data: Vec<u8> = (0..10_000).map(|at| stream.below(0, at, 256) as u8).collect();
        assert_eq!(inflate(&zlib(&data)), data);
    }

    #[test]
    fn the_file_has_three_checked_chunks() {
        let rgb: Vec<u8> = (0..5 * 4 * 3).collect();
        let file = encode(5, 4, &rgb);
        assert_eq!(file[..8], SIGNATURE);
        let word = |at: usize| u32::from_be_bytes(file[at..at + 4].try_into().unwrap());
        let mut chunks = Vec::new();
        let mut at = 8;
        while at < file.len() {
            let data = at + 8..at + 8 + word(at) as usize;
            assert_eq!(word(data.end), CRC32.checksum(&file[at + 4..data.end]));
            chunks.push((&file[at + 4..at + 8], &file[data.clone()]));
            at = data.end + 4;
        }
        assert_eq!(chunks[0], (&b"IHDR"[..], &[0, 0, 0, 5, 0, 0, 0, 4, 8, 2, 0, 0, 0][..]));
        assert_eq!(chunks[2], (&b"IEND"[..], &[][..]));
        let filtered = inflate(chunks[1].1);
        assert_eq!(filtered[..6], [2, 0, 1, 2, 3, 4]);
        assert_eq!(filtered[16..22], [2, 15, 15, 15, 15, 15]);
    }
}
