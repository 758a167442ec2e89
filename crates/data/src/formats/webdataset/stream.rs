//! Tar archives front to back. A record is the members of a sample.

use super::LOOKED_AT;
use super::columns::{self, Columns, IMAGES};
use super::index::{ENDINGS_MAX, MEMBER_BYTES_MAX, split};
use super::tar::{ForwardBytes, Member, Members};
use crate::error::{ReadError, shown};
use crate::files::damaged;
use crate::format::OpenError;
use crate::record::{Record, RecordColumn, UnreadColumn};
use crate::stream::{ByteStream, RawPart, RawRecord, RawRecords, StreamFormat, StreamHead};
use kolo_graph::settings::Settings;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Debug)]
struct TarStream {
    path: PathBuf,
    endings: Vec<String>,
    /// Of each ending the first few members, if they say more than it does.
    looked_at: Vec<Vec<Vec<u8>>>,
    has_two_images: bool,
    found: Columns,
}

pub(super) fn open(head: &StreamHead<'_>, _: &Settings) -> Result<Box<dyn StreamFormat>, OpenError> {
    let (endings, looked_at, found) = (vec![], vec![], Columns::default());
    Ok(Box::new(TarStream { path: head.path.into(), endings, looked_at, has_two_images: false, found }))
}

/// A member of a sample: the key of the sample, the ending, and where it is.
struct Found {
    key: String,
    ending: String,
    member: Member,
}

struct TarRecords {
    members: Members<ForwardBytes>,
    path: Arc<Path>,
    /// The first member of the next sample.
    pending: Option<Found>,
    is_at_end: bool,
}

impl TarRecords {
    /// The next member that belongs to a sample.
    fn member(&mut self) -> Result<Option<Found>, ReadError> {
        if let Some(pending) = self.pending.take() {
            return Ok(Some(pending));
        }
        while !self.is_at_end {
            let Some(member) = self.members.next()? else {
                self.is_at_end = true;
                break;
            };
            let Some((key, ending)) = split(&member.name) else { continue };
            return Ok(Some(Found { key: key.into(), ending, member }));
        }
        Ok(None)
    }

    /// Walks over the members of the next sample, if there is one, and hands each to `take`.
    fn sample(
        &mut self,
        take: &mut dyn FnMut(&mut ForwardBytes, Found) -> Result<(), ReadError>,
    ) -> Result<bool, ReadError> {
        let Some(first) = self.member()? else { return Ok(false) };
        let key = first.key.clone();
        take(&mut self.members.bytes, first)?;
        while let Some(next) = self.member()? {
            if next.key != key {
                self.pending = Some(next);
                break;
            }
            take(&mut self.members.bytes, next)?;
        }
        Ok(true)
    }
}

impl RawRecords for TarRecords {
    fn next(&mut self, raw: &mut RawRecord) -> Result<bool, ReadError> {
        let path = Arc::clone(&self.path);
        raw.restart(&path, 0, 0);
        self.sample(&mut |bytes, Found { ending, member, .. }| {
            let wrong = |message: String| Err(damaged(&path, member.header, message));
            if raw.parts.is_empty() {
                raw.offset = member.offset;
            }
            if member.bytes.saturating_add(raw.bytes.len() as u64) > MEMBER_BYTES_MAX {
                return wrong(format!("a sample has more than {MEMBER_BYTES_MAX} bytes"));
            }
            if raw.parts.len() == ENDINGS_MAX {
                return wrong(format!("a sample has more than {ENDINGS_MAX} members"));
            }
            if raw.parts.iter().any(|part| part.name == ending) {
                return wrong(format!("the sample has a second member with the name {}", shown(&member.name)));
            }
            bytes.append(member.offset, member.bytes, &mut raw.bytes)?;
            raw.parts.push(RawPart { name: ending, offset: member.offset, end: raw.bytes.len() });
            Ok(())
        })
    }

    fn skip(&mut self) -> Result<bool, ReadError> {
        self.sample(&mut |_, _| Ok(()))
    }
}

impl StreamFormat for TarStream {
    fn records(&self, bytes: ByteStream) -> Result<Box<dyn RawRecords>, ReadError> {
        let path = Arc::clone(bytes.path());
        let members = Members::new(ForwardBytes::new(bytes));
        Ok(Box::new(TarRecords { members, path, pending: None, is_at_end: false }))
    }

    fn look(&mut self, raw: &RawRecord) {
        let is_image = |part: &&RawPart| IMAGES.contains(&part.name.as_str());
        self.has_two_images |= raw.parts.iter().filter(is_image).count() > 1;
        for (part, bytes) in raw.each_part() {
            let known = self.endings.iter().position(|ending| *ending == part.name);
            let ending = known.unwrap_or(self.endings.len());
            if known.is_none() {
                self.endings.push(part.name.clone());
                self.looked_at.push(Vec::new());
            }
            if columns::says_more(&part.name) && self.looked_at[ending].len() < LOOKED_AT {
                self.looked_at[ending].push(bytes.to_vec());
            }
        }
    }

    fn columns(&mut self) -> Result<Vec<RecordColumn>, ReadError> {
        if self.endings.is_empty() {
            let hint = "the members of a shard have names such as `0001.jpg` and `0001.cls`";
            return Err(ReadError::new("it has no sample", hint).in_file(&self.path));
        }
        self.found = columns::of_endings(&self.endings, self.has_two_images, &self.looked_at);
        self.looked_at.clear();
        Ok(self.found.columns.clone())
    }

    fn unread(&self) -> Vec<UnreadColumn> {
        self.found.unread.clone()
    }

    /// Members whose endings the first samples do not have are left out.
    fn parse(&self, raw: &RawRecord, record: &mut Record) -> Result<(), ReadError> {
        let mut is_there = vec![false; self.found.columns.len()];
        for (part, bytes) in raw.each_part() {
            let Some(ending) = self.endings.iter().position(|ending| *ending == part.name) else { continue };
            let columns = &self.found.parts[self.found.part_of[ending]];
            columns.read(bytes, record, &mut |column| is_there[column] = true).map_err(|message| {
                let hint = "make the sample again, or leave it out with `on_error = \"skip\"`";
                ReadError::new(message, hint).in_file(raw.path()).at(part.offset)
            })?;
        }
        (0..is_there.len()).filter(|column| !is_there[*column]).for_each(|column| record.missing(column));
        Ok(())
    }
}
