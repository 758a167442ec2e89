//! Cyclic redundancy checks of 32 bits, reflected, one table each: the one of PNG and the one of TensorBoard's records.

/// A check for one polynomial.
#[derive(Debug)]
pub struct Crc {
    table: [u32; 256],
}

/// CRC-32 (IEEE 802.3), as in PNG and zip.
pub static CRC32: Crc = Crc::new(0xEDB8_8320);
/// CRC-32C (Castagnoli), as in iSCSI and TFRecord.
pub static CRC32C: Crc = Crc::new(0x82F6_3B78);

impl Crc {
    /// The table of a polynomial, written with its lowest power in the highest bit.
    const fn new(reflected_polynomial: u32) -> Self {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            let mut remainder = byte as u32;
            let mut bit = 0;
            while bit < 8 {
                let carry = remainder & 1;
                remainder = (remainder >> 1) ^ (carry * reflected_polynomial);
                bit += 1;
            }
            table[byte] = remainder;
            byte += 1;
        }
        Self { table }
    }

    pub fn checksum(&self, bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0, |crc, byte| (crc >> 8) ^ self.table[((crc ^ u32::from(*byte)) & 0xFF) as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32_known_answers() {
        assert_eq!(CRC32.checksum(b""), 0);
        assert_eq!(CRC32.checksum(b"123456789"), 0xCBF4_3926);
        assert_eq!(CRC32.checksum(b"IEND"), 0xAE42_6082);
    }

    /// From RFC 3720, appendix B.4.
    #[test]
    fn crc32c_known_answers() {
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        assert_eq!(CRC32C.checksum(&[0; 32]), 0x8A91_36AA);
        assert_eq!(CRC32C.checksum(&[0xFF; 32]), 0x62A8_AB43);
        assert_eq!(CRC32C.checksum(&ascending), 0x46DD_794E);
        assert_eq!(CRC32C.checksum(&descending), 0x113F_DB5C);
        assert_eq!(CRC32C.checksum(b"123456789"), 0xE306_9283);
    }
}
