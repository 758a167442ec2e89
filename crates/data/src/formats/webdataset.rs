//! WebDataset shards: tar archives, plain or packed, whose samples are runs of members with one name and different endings.
//!
//! Opening reads the headers of all members, once: offsets are kept in an index file beside the shard, and any sample is
//! then one read away. Names of members group them and are never used as paths; one that leads out of the archive (`../`,
//! `/`) is refused all the same. An ending becomes a column; those of images together are the column `image`.

use crate::error::ReadError;
use crate::files::{DataFile, Listed};
use crate::format::{Format, OpenedFiles, Reader};
use crate::index_file::IndexPlace;
use crate::record::{Record, RecordColumn, RecordName, UnreadColumn};
use crate::shards::{self, Shards};
use crate::stream::StreamKind;
use columns::Part;
use index::{MemberPlace, ShardIndex};
use kolo_graph::settings::Settings;
use std::cell::RefCell;
use std::path::{Path, PathBuf};

pub(crate) mod columns;
mod index;
mod npy;
mod stream;
mod tar;
#[cfg(test)]
mod tests;

pub const FORMAT: Format = Format {
    name: "webdataset",
    doc: "WebDataset: tar archives of samples, whose files have one name and different endings",
    extensions: &["tar"],
    sniff,
    open,
};

/// As a stream.
pub const STREAM: StreamKind = StreamKind { format: FORMAT.name, is_shard, open: stream::open };

/// Samples that the columns are told from.
const LOOKED_AT: usize = 16;

fn is_shard(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    [".tar", ".tar.gz", ".tgz", ".tar.zst"].iter().any(|ending| name.ends_with(ending))
}

fn sniff(path: &Path, head: &[u8]) -> bool {
    match path.is_dir() {
        true => shards::holds(path, is_shard),
        false => head.get(257..262) == Some(b"ustar"),
    }
}

/// Samples of tar archives.
#[derive(Debug)]
struct WebDataset {
    columns: Vec<RecordColumn>,
    unread: Vec<UnreadColumn>,
    /// What was left out of the files.
    notes: Vec<String>,
    parts: Vec<Part>,
    /// The part of each ending.
    part_of: Vec<usize>,
    shards: Shards,
    /// The number of samples up to and with each shard.
    ends: Vec<usize>,
    samples: Samples,
}

/// Where all members are.
#[derive(Debug, Default)]
struct Samples {
    endings: Vec<String>,
    members: Vec<MemberPlace>,
    /// The number of the first member of each sample.
    starts: Vec<usize>,
    /// Whether some sample has two images with plain endings.
    has_two_images: bool,
}

fn open(files: &[DataFile], settings: &Settings) -> OpenedFiles {
    let index_place = IndexPlace::of(settings)?;
    let (mut shards, mut ends, mut samples) = (Shards::new(), Vec::new(), Samples::default());
    let Listed { files, mut notes } = shards::expand(files, is_shard, settings)?;
    let mut left_out = 0;
    for file in &files {
        let (contents, is_packed) = shards::unpack(file, settings)?;
        let payload = index_place.load_or_make(file, index::KIND, || Ok(ShardIndex::make(&contents)?.payload()))?;
        let index = match ShardIndex::parse(&payload, contents.bytes()) {
            Some(index) => index,
            None => ShardIndex::make(&contents)?,
        };
        samples.add(&index);
        left_out += u64::from(index.left_out);
        ends.push(samples.starts.len());
        shards.push(file, contents, is_packed);
    }
    if samples.starts.is_empty() {
        let hint = "the members of a shard have names such as `0001.jpg` and `0001.cls`";
        return Err(ReadError::new("it has no sample", hint).in_file(&files[0].path).into());
    }
    if left_out > 0 {
        let members = if left_out == 1 { "member" } else { "members" };
        notes.push(format!("left out: {left_out} {members} of archives that are links or have no ending"));
    }
    let mut opened =
        WebDataset { columns: vec![], unread: vec![], notes, parts: vec![], part_of: vec![], shards, ends, samples };
    opened.find_columns()?;
    Ok(Box::new(opened))
}

impl Samples {
    fn add(&mut self, index: &ShardIndex) {
        let mut number = Vec::new();
        for ending in &index.endings {
            let known = self.endings.iter().position(|known| known == ending);
            number.push(known.unwrap_or(self.endings.len()) as u16);
            if known.is_none() {
                self.endings.push(ending.clone());
            }
        }
        let before = self.members.len();
        self.starts.extend(index.starts.iter().map(|start| before + *start as usize));
        let places =
            index.members.iter().map(|place| MemberPlace { ending: number[usize::from(place.ending)], ..*place });
        self.members.extend(places);
        let is_image: Vec<bool> =
            self.endings.iter().map(|ending| columns::IMAGES.contains(&ending.as_str())).collect();
        let first = self.starts.len() - index.starts.len();
        for sample in first..self.starts.len() {
            let images = self.of(sample).iter().filter(|place| is_image[usize::from(place.ending)]);
            self.has_two_images |= images.count() > 1;
        }
    }

    /// The members of a sample.
    fn of(&self, sample: usize) -> &[MemberPlace] {
        let end = self.starts.get(sample + 1).map_or(self.members.len(), |next| *next);
        &self.members[self.starts[sample]..end]
    }
}

impl WebDataset {
    fn find_columns(&mut self) -> Result<(), ReadError> {
        let endings = std::mem::take(&mut self.samples.endings);
        let first = self.first_members(endings.len());
        let looked_at = |(number, ending): (usize, &String)| match columns::says_more(ending) {
            true => self.contents_of(&first[number]),
            false => Ok(vec![]),
        };
        let looked_at = endings.iter().enumerate().map(looked_at).collect::<Result<Vec<_>, _>>()?;
        let found = columns::of_endings(&endings, self.samples.has_two_images, &looked_at);
        (self.columns, self.parts, self.part_of) = (found.columns, found.parts, found.part_of);
        self.unread = found.unread;
        Ok(())
    }

    /// The first few members with each ending, and the sample that each belongs to.
    fn first_members(&self, endings: usize) -> Vec<Vec<(usize, MemberPlace)>> {
        let mut first = vec![Vec::new(); endings];
        for sample in 0..self.samples.starts.len() {
            for place in self.samples.of(sample) {
                let of_ending = &mut first[usize::from(place.ending)];
                if of_ending.len() < LOOKED_AT {
                    of_ending.push((sample, *place));
                }
            }
        }
        first
    }

    fn contents_of(&self, members: &[(usize, MemberPlace)]) -> Result<Vec<Vec<u8>>, ReadError> {
        let read = |(sample, place): &(usize, MemberPlace)| {
            let mut bytes = Vec::new();
            self.shards.contents(self.shard_of(*sample))?.read_into(place.offset, place.bytes.into(), &mut bytes)?;
            Ok(bytes)
        };
        members.iter().map(read).collect()
    }

    fn shard_of(&self, sample: usize) -> usize {
        self.ends.partition_point(|end| *end <= sample)
    }
}

/// What a thread needs while it reads a sample.
#[derive(Default)]
struct Scratch {
    bytes: Vec<u8>,
    /// Which columns the sample has.
    is_there: Vec<bool>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Reader for WebDataset {
    fn columns(&self) -> &[RecordColumn] {
        &self.columns
    }

    fn unread(&self) -> &[UnreadColumn] {
        &self.unread
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn len(&self) -> usize {
        self.samples.starts.len()
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        let contents = self.shards.contents(self.shard_of(at))?;
        SCRATCH.with_borrow_mut(|Scratch { bytes, is_there }| {
            is_there.clear();
            is_there.resize(self.columns.len(), false);
            for place in self.samples.of(at) {
                contents.read_into(place.offset, place.bytes.into(), bytes)?;
                let part = &self.parts[self.part_of[usize::from(place.ending)]];
                let read = part.read(bytes, record, &mut |column| is_there[column] = true);
                read.map_err(|message| {
                    let hint = "make the sample again, or leave it out with `on_error = \"skip\"`";
                    ReadError::new(message, hint).in_file(contents.path()).at(place.offset)
                })?;
            }
            // Not before, so that the buffers of the others are used again.
            (0..is_there.len()).filter(|column| !is_there[*column]).for_each(|column| record.missing(column));
            Ok(())
        })
    }

    fn files(&self) -> Vec<PathBuf> {
        self.shards.paths()
    }

    fn name(&self, at: usize) -> Option<RecordName> {
        let contents = self.shards.contents(self.shard_of(at)).ok()?;
        let first = self.samples.of(at).first()?.offset;
        // Headers of a long name stand before the member's own; they begin where the sample before ends.
        let before = at.checked_sub(1).filter(|before| self.shard_of(*before) == self.shard_of(at));
        let before = before.and_then(|before| self.samples.of(before).last());
        let from = before.map_or(0, |place| place.offset + u64::from(place.bytes));
        let key = index::key_at(&contents, from, first).ok()?;
        Some(RecordName { file: contents.path().into(), key })
    }

    fn place(&self, at: usize) -> Option<(PathBuf, u64)> {
        let contents = self.shards.contents(self.shard_of(at)).ok()?;
        let first = self.samples.of(at).iter().next()?.offset;
        Some((contents.path().into(), first))
    }
}
