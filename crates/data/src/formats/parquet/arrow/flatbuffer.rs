//! Reads flatbuffers, the format of Arrow's metadata: <https://flatbuffers.dev/internals>.
//!
//! A table begins with the distance back to its vtable, which has the place of each field in the table, or 0 for one that is
//! not set and so has its default. Strings, vectors and tables stand elsewhere, by their distance forward. Every place is checked
//! when it is read. Tables can only point forward, so there are no circles; but many may point to the same one, so who walks
//! a tree has to bound its size.

use kolo_base::ByteReader;

/// What is wrong with the bytes.
pub(super) type Broken = &'static str;

const OUTSIDE: Broken = "its metadata have an offset that is out of range";

#[derive(Clone, Copy, Debug)]
pub(super) struct Table<'a> {
    bytes: &'a [u8],
    at: usize,
    /// The places of the fields, without the two sizes before them.
    fields: &'a [[u8; 2]],
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Broken> {
    ByteReader::at(bytes, at).array().ok_or(OUTSIDE)
}

/// Where the distance at `at` leads.
fn forward(bytes: &[u8], at: usize) -> Result<usize, Broken> {
    let distance = u32::from_le_bytes(array(bytes, at)?) as usize;
    at.checked_add(distance).filter(|_| distance > 0).ok_or(OUTSIDE)
}

impl<'a> Table<'a> {
    pub fn root(bytes: &'a [u8]) -> Result<Self, Broken> {
        Self::at(bytes, forward(bytes, 0)?)
    }

    fn at(bytes: &'a [u8], at: usize) -> Result<Self, Broken> {
        let back = i64::from(i32::from_le_bytes(array(bytes, at)?));
        let start = i64::try_from(at).ok().and_then(|at| at.checked_sub(back));
        let start = start.and_then(|start| usize::try_from(start).ok()).ok_or(OUTSIDE)?;
        let len = usize::from(u16::from_le_bytes(array(bytes, start)?));
        let vtable = bytes.get(start..).and_then(|rest| rest.get(4..len)).ok_or(OUTSIDE)?;
        Ok(Self { bytes, at, fields: vtable.as_chunks().0 })
    }

    /// Where a field stands, if it is set.
    fn place(&self, field: usize) -> Option<usize> {
        let place = self.fields.get(field).map_or(0, |place| u16::from_le_bytes(*place));
        (place > 0).then(|| self.at.saturating_add(place.into()))
    }

    fn number<const N: usize>(&self, field: usize) -> Result<Option<[u8; N]>, Broken> {
        self.place(field).map(|at| array(self.bytes, at)).transpose()
    }

    pub fn byte(&self, field: usize) -> Result<u8, Broken> {
        Ok(self.number(field)?.map_or(0, u8::from_le_bytes))
    }

    pub fn short(&self, field: usize, default: i16) -> Result<i16, Broken> {
        Ok(self.number(field)?.map_or(default, i16::from_le_bytes))
    }

    pub fn int(&self, field: usize, default: i32) -> Result<i32, Broken> {
        Ok(self.number(field)?.map_or(default, i32::from_le_bytes))
    }

    pub fn long(&self, field: usize) -> Result<i64, Broken> {
        Ok(self.number(field)?.map_or(0, i64::from_le_bytes))
    }

    pub fn table(&self, field: usize) -> Result<Option<Self>, Broken> {
        let Some(place) = self.place(field) else { return Ok(None) };
        Self::at(self.bytes, forward(self.bytes, place)?).map(Some)
    }

    /// A vector of elements of `N` bytes each, and where it begins.
    fn vector<const N: usize>(&self, field: usize) -> Result<(usize, &'a [[u8; N]]), Broken> {
        let Some(place) = self.place(field) else { return Ok((0, &[])) };
        let at = forward(self.bytes, place)?;
        let count = u32::from_le_bytes(array(self.bytes, at)?) as usize;
        let elements = self.bytes.get(at + 4..).and_then(|rest| rest.get(..count.checked_mul(N)?)).ok_or(OUTSIDE)?;
        Ok((at + 4, elements.as_chunks().0))
    }

    /// A vector of structs, or of numbers.
    pub fn structs<const N: usize>(&self, field: usize) -> Result<&'a [[u8; N]], Broken> {
        Ok(self.vector(field)?.1)
    }

    pub fn text(&self, field: usize) -> Result<&'a str, Broken> {
        let bytes = self.structs::<1>(field)?.as_flattened();
        std::str::from_utf8(bytes).map_err(|_| "a name in its metadata is not UTF-8 text")
    }

    pub fn tables(
        &self,
        field: usize,
    ) -> Result<impl ExactSizeIterator<Item = Result<Self, Broken>> + use<'a>, Broken> {
        let bytes = self.bytes;
        let (start, places) = self.vector::<4>(field)?;
        Ok((0..places.len()).map(move |at| Self::at(bytes, forward(bytes, start + 4 * at)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A root table of a byte, an `i32`, a text, a vector of `i64`, and a vector of two tables that are the same.
    fn sample() -> Vec<u8> {
        let mut bytes = vec![20, 0, 0, 0];
        // The vtable: its size, the table's size, places of fields 0 to 4.
        for place in [14_u16, 24, 20, 4, 8, 12, 16, 0] {
            bytes.extend(place.to_le_bytes());
        }
        assert_eq!(bytes.len(), 20);
        bytes.extend(16_i32.to_le_bytes());
        bytes.extend((-7_i32).to_le_bytes());
        // Distances from 28, 32 and 36 to what stands at 44, 52 and 72; the byte is at 40.
        for distance in [16_u32, 20, 36] {
            bytes.extend(distance.to_le_bytes());
        }
        bytes.extend([9, 0, 0, 0]);
        bytes.extend([2, 0, 0, 0, b'h', b'i', 0, 0]);
        bytes.extend(2_u32.to_le_bytes());
        bytes.extend([1_i64, -2].iter().flat_map(|value| value.to_le_bytes()));
        // Both elements lead to the table at 88, whose vtable, without fields, stands at 84.
        bytes.extend([2_u32, 12, 8].iter().flat_map(|value| value.to_le_bytes()));
        bytes.extend([4, 0, 4, 0]);
        bytes.extend(4_i32.to_le_bytes());
        bytes
    }

    #[test]
    fn every_kind_of_field_is_read() {
        let bytes = sample();
        let table = Table::root(&bytes).unwrap();
        assert_eq!((table.byte(0), table.int(1, 3), table.text(2)), (Ok(9), Ok(-7), Ok("hi")));
        assert_eq!(table.structs(3).unwrap().iter().map(|long| i64::from_le_bytes(*long)).collect::<Vec<_>>(), [1, -2]);
        assert_eq!(table.tables(4).unwrap().filter(|table| table.is_ok()).count(), 2);
        // Not set, or behind the vtable: the default.
        assert_eq!((table.byte(5), table.int(99, 3), table.text(99)), (Ok(0), Ok(3), Ok("")));
        assert!(table.table(99).unwrap().is_none());
    }

    #[test]
    fn damaged_bytes_are_errors() {
        let whole = sample();
        let walk = |bytes: &[u8]| -> Result<(), Broken> {
            let table = Table::root(bytes)?;
            table.byte(0)?;
            table.int(1, 0)?;
            table.text(2)?;
            table.structs::<8>(3)?;
            for below in table.tables(4)? {
                below?.table(0)?;
            }
            table.table(2)?;
            Ok(())
        };
        for end in 0..whole.len() {
            assert!(walk(&whole[..end]).is_err(), "cut at {end}");
        }
        for at in 0..whole.len() {
            for byte in [0, 1, 3, 0x7F, 0x80, 0xFF] {
                let mut bytes = whole.clone();
                bytes[at] = byte;
                let _ = walk(&bytes);
            }
        }
    }
}
