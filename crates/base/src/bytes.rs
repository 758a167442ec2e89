//! Reading numbers from bytes, little-endian, in order. Every method is `None` past the end, and nothing is allocated.

/// What is left of some bytes.
#[derive(Clone, Debug)]
pub struct ByteReader<'a>(&'a [u8]);

impl<'a> ByteReader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// From this place on; from the end if it lies beyond.
    pub fn at(bytes: &'a [u8], offset: usize) -> Self {
        Self(bytes.get(offset..).unwrap_or_default())
    }

    /// The bytes not read yet.
    pub fn rest(&self) -> &'a [u8] {
        self.0
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(head)
    }

    pub fn skip(&mut self, count: usize) -> Option<()> {
        self.take(count).map(drop)
    }

    pub fn array<const COUNT: usize>(&mut self) -> Option<[u8; COUNT]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub fn i32(&mut self) -> Option<i32> {
        self.array().map(i32::from_le_bytes)
    }

    pub fn i64(&mut self) -> Option<i64> {
        self.array().map(i64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_little_endian_and_end_with_the_bytes() {
        let bytes: Vec<u8> = (1..=16).collect();
        let mut reader = ByteReader::new(&bytes);
        assert_eq!((reader.u8(), reader.u16(), reader.u32()), (Some(1), Some(0x0302), Some(0x0706_0504)));
        assert_eq!((reader.skip(2), reader.u64(), reader.rest()), (Some(()), None, &bytes[9..]));
        assert_eq!((reader.array(), reader.u32(), reader.is_empty()), (Some([10, 11, 12]), Some(0x100f_0e0d), true));
        assert_eq!((reader.take(0), reader.take(1), reader.array::<2>()), (Some(&[][..]), None, None));
    }

    #[test]
    fn a_place_beyond_the_end_has_nothing() {
        let bytes = [0xff; 12];
        let at = |offset: usize| ByteReader::at(&bytes, offset);
        assert_eq!((at(4).i64(), at(5).i64(), at(8).i32()), (Some(-1), None, Some(-1)));
        assert_eq!((at(12).rest(), at(13).u8(), at(usize::MAX).u8()), (&[][..], None, None));
    }
}
