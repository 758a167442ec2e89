//! Where the members of every sample of a shard are, and the payload of its index file.
//!
//! A sample is a run of members whose names agree up to the first dot after the last slash. The payload: the number of members
//! that belong to none (u32), the number of endings (u16), each as its length (u16) and its text; then per member its ending (u16, the highest bit set at the first
//! member of a sample), its bytes (u32) and its offset (u64).

use super::tar::Members;
use crate::error::{ReadError, shown};
use crate::files::Contents;
use crate::shards::Headers;
use kolo_base::ByteReader;

pub(super) const KIND: &str = "webdataset 2";
/// Bytes of one member.
pub(super) const MEMBER_BYTES_MAX: u64 = 1 << 30;
/// Different endings in one shard: a sample has a handful.
pub(super) const ENDINGS_MAX: usize = 1000;
const FIRST: u16 = 1 << 15;

/// Where a member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemberPlace {
    pub offset: u64,
    pub bytes: u32,
    pub ending: u16,
}

/// The samples of a shard.
#[derive(Debug, Default, PartialEq)]
pub(super) struct ShardIndex {
    pub endings: Vec<String>,
    pub members: Vec<MemberPlace>,
    /// The number of the first member of each sample.
    pub starts: Vec<u32>,
    /// Members that belong to no sample: links and the like, and files whose names have no ending.
    pub left_out: u32,
}

/// The key and the ending of a member, if it belongs to a sample.
pub(super) fn split(name: &str) -> Option<(&str, String)> {
    let directory = name.rfind('/').map_or(0, |slash| slash + 1);
    let dot = directory + name[directory..].find('.').filter(|dot| *dot > 0)?;
    let is_about_the_shard = name.starts_with("__") && name.ends_with("__");
    (!is_about_the_shard).then(|| (&name[..dot], name[dot + 1..].to_lowercase()))
}

/// The key of the sample whose first member has its data at `first`. The member before it ends at `from`.
pub(super) fn key_at(contents: &Contents, from: u64, first: u64) -> Result<Option<String>, ReadError> {
    let mut members = Members::starting_at(Headers::new(contents), from);
    while let Some(member) = members.next()? {
        if member.offset >= first {
            return Ok(split(&member.name).map(|(key, _)| key.to_string()));
        }
    }
    Ok(None)
}

impl ShardIndex {
    /// Reads all headers of a shard.
    pub fn make(contents: &Contents) -> Result<Self, ReadError> {
        let mut index = Self::default();
        let mut key = None;
        let mut members = Members::new(Headers::new(contents));
        while let Some(member) = members.next()? {
            let wrong = |message: String| Err(contents.damaged(member.header, message));
            let Some((member_key, ending)) = split(&member.name) else {
                index.left_out = index.left_out.saturating_add(1);
                continue;
            };
            if member.bytes > MEMBER_BYTES_MAX {
                return wrong(format!("a member has {} bytes; {MEMBER_BYTES_MAX} are allowed", member.bytes));
            }
            let known = index.endings.iter().position(|known| *known == ending);
            let ending = match known {
                Some(ending) => ending as u16,
                None if index.endings.len() < ENDINGS_MAX => {
                    index.endings.push(ending);
                    index.endings.len() as u16 - 1
                }
                None => return wrong(format!("the members have more than {ENDINGS_MAX} different endings")),
            };
            if key.as_deref() != Some(member_key) {
                key = Some(member_key.to_string());
                index.starts.push(index.members.len() as u32);
            }
            let first = index.starts.last().map_or(0, |start| *start as usize);
            if index.members[first..].iter().any(|place| place.ending == ending) {
                return wrong(format!("the sample has a second member with the name {}", shown(&member.name)));
            }
            index.members.push(MemberPlace { offset: member.offset, bytes: member.bytes as u32, ending });
        }
        index.left_out = index.left_out.saturating_add(members.passed);
        Ok(index)
    }

    pub fn payload(&self) -> Vec<u8> {
        let mut payload = self.left_out.to_le_bytes().to_vec();
        payload.extend((self.endings.len() as u16).to_le_bytes());
        for ending in &self.endings {
            payload.extend((ending.len() as u16).to_le_bytes());
            payload.extend(ending.as_bytes());
        }
        let mut starts = self.starts.iter().peekable();
        for (at, place) in self.members.iter().enumerate() {
            let first = if starts.next_if_eq(&&(at as u32)).is_some() { FIRST } else { 0 };
            payload.extend((place.ending | first).to_le_bytes());
            payload.extend(place.bytes.to_le_bytes());
            payload.extend(place.offset.to_le_bytes());
        }
        payload
    }

    /// The index in this payload, if it makes sense for a file of so many bytes.
    pub fn parse(payload: &[u8], file_bytes: u64) -> Option<Self> {
        let mut reader = ByteReader::new(payload);
        let mut index = Self { left_out: reader.u32()?, ..Self::default() };
        for _ in 0..reader.u16()? {
            let length = reader.u16()?;
            let ending = std::str::from_utf8(reader.take(usize::from(length))?).ok()?;
            index.endings.push(ending.into());
        }
        while !reader.is_empty() {
            let ending = reader.u16()?;
            let place = MemberPlace { bytes: reader.u32()?, offset: reader.u64()?, ending: ending & !FIRST };
            if ending & FIRST != 0 {
                index.starts.push(index.members.len() as u32);
            }
            let is_inside = place.offset.checked_add(u64::from(place.bytes)).is_some_and(|end| end <= file_bytes);
            if !is_inside || usize::from(place.ending) >= index.endings.len() || index.starts.is_empty() {
                return None;
            }
            index.members.push(place);
        }
        Some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_at_the_first_dot_of_the_last_part() {
        let part = |name| split(name).map(|(key, ending)| (key.to_string(), ending));
        let some = |key: &str, ending: &str| Some((key.to_string(), ending.to_string()));
        assert_eq!(part("0001.jpg"), some("0001", "jpg"));
        assert_eq!(part("./a.b/0001.left.JPG"), some("./a.b/0001", "left.jpg"));
        assert_eq!(part("README"), None);
        assert_eq!(part("a/.hidden.jpg"), None);
        assert_eq!(part("__meta.info__"), None);
    }

    #[test]
    fn a_payload_is_read_back_and_checked() {
        let places = [(512, 10, 0), (1536, 2, 1), (3072, 7, 0)];
        let index = ShardIndex {
            endings: vec!["jpg".into(), "cls".into()],
            members: places.map(|(offset, bytes, ending)| MemberPlace { offset, bytes, ending }).to_vec(),
            starts: vec![0, 2],
            left_out: 3,
        };
        let payload = index.payload();
        assert_eq!(ShardIndex::parse(&payload, 3079), Some(index));
        assert_eq!(ShardIndex::parse(&payload, 3078), None);
        for length in 0..payload.len() {
            // What ends between two members is an index of fewer; the checksum of its file is there to tell.
            let is_between = length >= 16 && (length - 16) % 14 == 0;
            assert_eq!(ShardIndex::parse(&payload[..length], 3079).is_some(), is_between, "{length}");
        }
    }
}
