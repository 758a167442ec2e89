//! The B+tree of an LMDB file, read page by page with every place checked.
//!
//! A file is pages of equal size. Pages 0 and 1 are meta pages, of which the one of the newer transaction counts; it names the
//! root of the main database. Branch pages hold keys and page numbers, leaf pages keys and values; a long value stands in
//! overflow pages of its own. The layout is that of LMDB 0.9 on little-endian machines with 64 bits.
//!
//! The C library maps the file and trusts it: a damaged one ends the process by a signal. Here it is an error, and a tree that
//! shares pages or runs in a circle is told by the pages seen.

use crate::error::ReadError;
use crate::files::Contents;
use kolo_base::ByteReader;

const MAGIC: u32 = 0xBEEF_C0DE;
pub(super) const MAGIC_AT: usize = PAGE_HEADER_BYTES;
const VERSION: u32 = 1;
const PAGE_HEADER_BYTES: usize = 16;
const META_BYTES: usize = 136;
const DATABASE_BYTES: usize = 48;
const NODE_HEADER_BYTES: usize = 8;
/// The library's own bound on the height of a tree.
const DEPTH_MAX: usize = 32;
const NO_PAGE: u64 = u64::MAX;

const BRANCH_PAGE: u16 = 0x01;
const LEAF_PAGE: u16 = 0x02;
const FIXED_LEAF_PAGE: u16 = 0x20;
const LONG_VALUE: u16 = 0x01;
const SUB_DATABASE: u16 = 0x02;
const DUPLICATES: u16 = 0x04;

/// Where a key and its value stand in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub key_at: u64,
    pub value_at: u64,
    pub value_bytes: u32,
    pub key_bytes: u16,
}

/// One database of an environment.
#[derive(Clone, Copy, Debug)]
struct Database {
    root: u64,
}

/// What a leaf says of one key.
#[derive(Debug)]
pub(super) enum Found {
    Value(Entry),
    Database(u64),
}

#[derive(Debug)]
pub(super) struct Tree<'c> {
    contents: &'c Contents,
    page_bytes: u64,
    root: u64,
    /// One bit for each page, set when it was seen.
    seen: Vec<u64>,
}

impl Database {
    fn parse(bytes: &[u8]) -> Option<Self> {
        (bytes.len() >= DATABASE_BYTES).then_some(())?;
        Some(Self { root: ByteReader::at(bytes, 40).u64()? })
    }
}

/// What a meta page says.
struct Meta {
    page_bytes: u64,
    main: Database,
    transaction: u64,
}

impl Meta {
    fn read(contents: &Contents, offset: u64) -> Result<Self, ReadError> {
        let mut page = [0; PAGE_HEADER_BYTES + META_BYTES];
        contents.read_at(offset, &mut page)?;
        let wrong = |what: &str| contents.damaged(offset, what);
        let meta = &page[PAGE_HEADER_BYTES..];
        if ByteReader::at(meta, 0).u32() != Some(MAGIC) {
            return Err(wrong("this is not an LMDB file of a 64-bit little-endian machine"));
        }
        if ByteReader::at(meta, 4).u32() != Some(VERSION) {
            let version = ByteReader::at(meta, 4).u32().unwrap_or(0);
            let message = format!("this is version {version} of the LMDB format; kolo reads version {VERSION}");
            return Err(contents.unsupported(offset, message, "copy the records with a current version of LMDB"));
        }
        // The size of a page stands in the first database, that of free pages.
        let page_bytes = ByteReader::at(meta, 24).u32().unwrap_or(0);
        if !page_bytes.is_power_of_two() || !(512..=65_536).contains(&page_bytes) {
            return Err(wrong(&format!("a page cannot have {page_bytes} bytes")));
        }
        let main = Database::parse(&meta[24 + DATABASE_BYTES..]).ok_or_else(|| wrong("it has no database"))?;
        let transaction = ByteReader::at(meta, 24 + 2 * DATABASE_BYTES + 8).u64().unwrap_or(0);
        Ok(Self { page_bytes: page_bytes.into(), main, transaction })
    }
}

impl<'c> Tree<'c> {
    /// The main database, as the newest transaction left it.
    pub fn open(contents: &'c Contents) -> Result<Self, ReadError> {
        let first = Meta::read(contents, 0)?;
        let second = Meta::read(contents, first.page_bytes)?;
        let meta = if second.transaction > first.transaction { second } else { first };
        let pages = contents.bytes().div_ceil(meta.page_bytes);
        let seen = vec![0; (pages as usize).div_ceil(64)];
        Ok(Self { contents, page_bytes: meta.page_bytes, root: meta.main.root, seen })
    }

    /// A database within the main one.
    pub fn go_into(&mut self, root: u64) {
        self.root = root;
    }

    /// Hands every key to `each`, in order.
    pub fn walk(&mut self, each: &mut dyn FnMut(&[u8], Found) -> Result<(), ReadError>) -> Result<(), ReadError> {
        match self.root {
            NO_PAGE => Ok(()),
            root => self.page(root, 0, each),
        }
    }

    fn page(
        &mut self,
        number: u64,
        depth: usize,
        each: &mut dyn FnMut(&[u8], Found) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        let contents = self.contents;
        let offset = number.checked_mul(self.page_bytes).filter(|offset| *offset < contents.bytes());
        let Some(offset) = offset else {
            let message = format!("page {number} lies past the end of the file");
            return Err(contents.damaged(contents.bytes(), message));
        };
        let (word, bit) = (number as usize / 64, 1 << (number % 64));
        if number < 2 || depth >= DEPTH_MAX || self.seen[word] & bit != 0 {
            return Err(contents.damaged(offset, format!("page {number} is out of place in the tree")));
        }
        self.seen[word] |= bit;
        let mut page = Vec::new();
        contents.read_into(offset, self.page_bytes, &mut page)?;
        let damaged = |what: &str| contents.damaged(offset, format!("page {number}: {what}"));
        let (Some(flags), Some(lower)) = (ByteReader::at(&page, 10).u16(), ByteReader::at(&page, 12).u16()) else {
            return Err(damaged("it has no header"));
        };
        let nodes = usize::from(lower).checked_sub(PAGE_HEADER_BYTES).map(|bytes| bytes / 2);
        let nodes =
            nodes.filter(|_| u64::from(lower) <= self.page_bytes && ByteReader::at(&page, 0).u64() == Some(number));
        let nodes = nodes.ok_or_else(|| damaged("its header is malformed"))?;
        let kind = flags & (BRANCH_PAGE | LEAF_PAGE | FIXED_LEAF_PAGE);
        for node in 0..nodes {
            let at = ByteReader::at(&page, PAGE_HEADER_BYTES + 2 * node).u16().unwrap_or(0).into();
            let node = Node::parse(&page, at).ok_or_else(|| damaged("a node lies outside of it"))?;
            match kind {
                BRANCH_PAGE => self.page(node.child(), depth + 1, each)?,
                LEAF_PAGE => {
                    if node.flags & (DUPLICATES | LONG_VALUE) == DUPLICATES {
                        let message = "a key has several values (MDB_DUPSORT), which kolo does not read";
                        let hint = "write the values under keys of their own, into a database without `dupsort`";
                        return Err(contents.unsupported(offset + at as u64, message, hint));
                    }
                    let found = node.found(offset, self.page_bytes);
                    let found = found.map_err(|what| contents.damaged(offset + at as u64, what))?;
                    if let Found::Value(entry) = &found {
                        contents.check(entry.value_at, entry.value_bytes.into())?;
                    }
                    each(node.key, found)?;
                }
                _ => return Err(contents.damaged(offset, "it is neither a branch nor a leaf of a tree")),
            }
        }
        Ok(())
    }
}

/// A key with its value or page number.
struct Node<'p> {
    at: usize,
    low: u16,
    high: u16,
    flags: u16,
    key: &'p [u8],
    /// What follows the key on the page.
    rest: &'p [u8],
}

impl<'p> Node<'p> {
    fn parse(page: &'p [u8], at: usize) -> Option<Self> {
        let key_bytes = usize::from(ByteReader::at(page, at + 6).u16()?);
        let key_at = at + NODE_HEADER_BYTES;
        let (key, rest) = page.get(key_at..)?.split_at_checked(key_bytes)?;
        let (low, high, flags) =
            (ByteReader::at(page, at).u16()?, ByteReader::at(page, at + 2).u16()?, ByteReader::at(page, at + 4).u16()?);
        (at >= PAGE_HEADER_BYTES).then_some(Self { at, low, high, flags, key, rest })
    }

    fn child(&self) -> u64 {
        u64::from(self.low) | u64::from(self.high) << 16 | u64::from(self.flags) << 32
    }

    fn found(&self, page_at: u64, page_bytes: u64) -> Result<Found, &'static str> {
        let value_bytes = u32::from(self.low) | u32::from(self.high) << 16;
        let key_at = page_at + (self.at + NODE_HEADER_BYTES) as u64;
        let key_bytes = self.key.len() as u16;
        let here = self.rest.get(..value_bytes as usize);
        let value_at = match self.flags & (LONG_VALUE | SUB_DATABASE | DUPLICATES) {
            0 => {
                here.ok_or("a value does not fit on its page")?;
                key_at + u64::from(key_bytes)
            }
            LONG_VALUE => {
                let page = ByteReader::at(self.rest, 0).u64().ok_or("a long value has no page")?;
                let offset = page.checked_mul(page_bytes).and_then(|at| at.checked_add(PAGE_HEADER_BYTES as u64));
                offset.ok_or("a long value has a page that does not exist")?
            }
            SUB_DATABASE => {
                let database = here.and_then(Database::parse).ok_or("a database has no root")?;
                return Ok(Found::Database(database.root));
            }
            _ => return Err("the flags of a value make no sense"),
        };
        Ok(Found::Value(Entry { key_at, value_at, value_bytes, key_bytes }))
    }
}
