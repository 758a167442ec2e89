//! CRC-32C (Castagnoli), as TFRecord files and TensorBoard's events have it: with the processor's instruction where there is one, from a table
//! otherwise, with the same result.

const POLYNOMIAL: u32 = 0x82f6_3b78;
const MASK_DELTA: u32 = 0xa282_ead8;

/// `TABLES[k][b]` is the checksum of byte `b` followed by `k` zero bytes.
static TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[table - 1][byte];
            tables[table][byte] = (before >> 8) ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
}

/// The checksum of these bytes, masked as TFRecord files store it: a check over bytes that hold their own check says little.
pub fn masked_crc32c(bytes: &[u8]) -> u32 {
    checksum(bytes).rotate_right(15).wrapping_add(MASK_DELTA)
}

fn checksum(bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor has SSE 4.2, as was just asked.
        return unsafe { by_instruction(bytes) };
    }
    by_table(bytes)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn by_instruction(bytes: &[u8]) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u64};
    let (words, rest) = bytes.as_chunks::<8>();
    let crc = words.iter().fold(u64::from(!0u32), |crc, word| _mm_crc32_u64(crc, u64::from_le_bytes(*word)));
    !rest.iter().fold(crc as u32, |crc, byte| _mm_crc32_u8(crc, *byte))
}

fn by_table(bytes: &[u8]) -> u32 {
    let (words, rest) = bytes.as_chunks::<8>();
    let crc = words.iter().fold(!0u32, |crc, word| {
        let mixed = (u64::from_le_bytes(*word) ^ u64::from(crc)).to_le_bytes();
        mixed.iter().zip(TABLES.iter().rev()).fold(0, |sum, (byte, table)| sum ^ table[usize::from(*byte)])
    });
    !rest.iter().fold(crc, |crc, byte| (crc >> 8) ^ TABLES[0][usize::from(crc as u8 ^ byte)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values_by_both_ways() {
        // RFC 3720, B.4.
        let ascending: Vec<u8> = (0..32).collect();
        for (bytes, crc) in [(&[0u8; 32][..], 0x8a91_36aa), (&[0xff; 32], 0x62a8_ab43), (&ascending, 0x46dd_794e)] {
            assert_eq!((checksum(bytes), by_table(bytes)), (crc, crc));
        }
        let bytes: Vec<u8> = (0..1000u32).map(|at| ((at * at) >> 3) as u8).collect();
        for (start, end) in [(0, 0), (0, 1), (1, 8), (3, 20), (5, 1000)] {
            assert_eq!(checksum(&bytes[start..end]), by_table(&bytes[start..end]));
        }
    }
}
