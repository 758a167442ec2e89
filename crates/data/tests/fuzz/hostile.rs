//! Small Parquet and Arrow files that claim huge things, each in a way that damage to a whole file hardly finds: all the places that
//! say a number agree with each other.

/// Address space of a process that reads damaged files, its own needs included.
const MEMORY_BYTES_MAX: u64 = 2 << 30;

/// Bounds the memory of this process: what a file claims must not be taken.
pub fn bound_memory() {
    let limit = libc::rlimit { rlim_cur: MEMORY_BYTES_MAX, rlim_max: MEMORY_BYTES_MAX };
    // SAFETY: the call reads the struct and changes nothing of this process but its limit.
    unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) };
}

/// A file that must be refused.
pub struct Hostile {
    pub name: &'static str,
    pub format: &'static str,
    pub bytes: Vec<u8>,
    /// What the error says.
    pub error: &'static str,
}

/// Writes a struct of Thrift's compact protocol.
#[derive(Clone, Default)]
pub struct Thrift {
    bytes: Vec<u8>,
    last: u8,
}

pub fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn zigzag(value: i64) -> Vec<u8> {
    varint(((value << 1) ^ (value >> 63)) as u64)
}

impl Thrift {
    fn field(mut self, field: u8, kind: u8, value: &[u8]) -> Self {
        self.bytes.push((field - self.last) << 4 | kind);
        self.bytes.extend(value);
        self.last = field;
        self
    }

    fn int(self, field: u8, value: i64) -> Self {
        self.field(field, 5, &zigzag(value))
    }

    fn long(self, field: u8, value: i64) -> Self {
        self.field(field, 6, &zigzag(value))
    }

    fn text(self, field: u8, text: &str) -> Self {
        self.field(field, 8, &[varint(text.len() as u64), text.into()].concat())
    }

    fn list(self, field: u8, kind: u8, items: &[Vec<u8>]) -> Self {
        let head = [vec![0xF0 | kind], varint(items.len() as u64)].concat();
        self.field(field, 9, &[head, items.concat()].concat())
    }

    fn below(self, field: u8, value: Self) -> Self {
        self.field(field, 12, &value.end())
    }

    fn end(mut self) -> Vec<u8> {
        self.bytes.push(0);
        self.bytes
    }
}

pub const INT32: i64 = 1;
pub const BYTES: i64 = 6;
pub const FIXED: i64 = 7;
const REPEATED: i64 = 2;
const TYPE_LIST: i64 = 3;
const PLAIN: i64 = 0;
const DELTA_LENGTHS: i64 = 6;
const DICTIONARY: i64 = 8;
const SPLIT: i64 = 9;
const MAX: i64 = i32::MAX as i64;

/// An element of a schema that is a group.
fn group(name: &str, repetition: i64, children: i64, converted: Option<i64>) -> Vec<u8> {
    let element = Thrift::default().int(3, repetition).text(4, name).int(5, children);
    converted.into_iter().fold(element, |element, converted| element.int(6, converted)).end()
}

/// A column of values that are never null, or of lists.
pub struct Column {
    elements: Vec<Vec<u8>>,
    path: Vec<&'static str>,
    physical: i64,
    codec: i64,
    values: i64,
    encodings: Vec<i64>,
    /// Where its pages begin, and where the footer says that its data and its dictionary do.
    start: usize,
    data: Option<usize>,
    dictionary: Option<usize>,
}

impl Column {
    pub fn new(physical: i64, values: i64, start: usize) -> Self {
        let element = Thrift::default().int(1, physical).int(3, 0).text(4, "x").end();
        let (elements, path, encodings) = (vec![element], vec!["x"], vec![PLAIN]);
        Self { elements, path, physical, codec: 0, values, encodings, start, data: None, dictionary: None }
    }

    pub fn compressed(mut self, codec: i64) -> Self {
        self.codec = codec;
        self
    }

    /// A column of lists of optional numbers.
    fn list(values: i64, start: usize) -> Self {
        let leaf = Thrift::default().int(1, INT32).int(3, 1).text(4, "e").end();
        let elements = vec![group("x", 0, 1, Some(TYPE_LIST)), group("list", REPEATED, 1, None), leaf];
        Self { elements, path: vec!["x", "list", "e"], ..Self::new(INT32, values, start) }
    }

    fn chunk(&self, len: usize) -> Vec<u8> {
        let path: Vec<Vec<u8>> =
            self.path.iter().map(|name| [vec![name.len() as u8], (*name).into()].concat()).collect();
        let encodings: Vec<Vec<u8>> = self.encodings.iter().map(|encoding| zigzag(*encoding)).collect();
        let meta = Thrift::default().int(1, self.physical).list(2, 5, &encodings).list(3, 8, &path).int(4, self.codec);
        let meta = meta.long(5, self.values).long(6, 99).long(7, len as i64);
        let meta = meta.long(9, self.data.unwrap_or(self.start) as i64);
        let meta = self.dictionary.into_iter().fold(meta, |meta, offset| meta.long(11, offset as i64));
        Thrift::default().long(2, 0).below(3, meta).end()
    }
}

/// A whole file. All columns have the same pages, or `pages` begin with the magic of those before.
pub fn parquet(rows: i64, columns: &[Column], pages: &[u8]) -> Vec<u8> {
    let root = Thrift::default().text(4, "m").int(5, columns.len() as i64).end();
    let elements = [vec![root], columns.iter().flat_map(|column| column.elements.clone()).collect()].concat();
    let chunks: Vec<Vec<u8>> = columns.iter().map(|column| column.chunk(4 + pages.len() - column.start)).collect();
    let group = Thrift::default().list(1, 12, &chunks).long(2, 1).long(3, rows).end();
    with_schema(&elements, rows, &[group], pages)
}

fn with_schema(elements: &[Vec<u8>], rows: i64, groups: &[Vec<u8>], pages: &[u8]) -> Vec<u8> {
    let footer = Thrift::default().int(1, 1).list(2, 12, elements).long(3, rows).list(4, 12, groups).end();
    [b"PAR1", pages, &footer, &(footer.len() as u32).to_le_bytes(), b"PAR1"].concat()
}

/// A page of the first version, with the size it claims to decompress to.
pub fn page(claimed: i64, values: i64, encoding: i64, bytes: &[u8]) -> Vec<u8> {
    let data = Thrift::default().int(1, values).int(2, encoding).int(3, 3).int(4, 3);
    let header = Thrift::default().int(1, 0).int(2, claimed).int(3, bytes.len() as i64).below(5, data);
    [header.end(), bytes.into()].concat()
}

fn dictionary(values: i64, bytes: &[u8]) -> Vec<u8> {
    let len = bytes.len() as i64;
    let header = Thrift::default().int(1, 2).int(2, len).int(3, len);
    [header.below(7, Thrift::default().int(1, values).int(2, 0)).end(), bytes.into()].concat()
}

/// The levels of one list of this many nulls, as two runs each.
fn null_levels(values: i64) -> Vec<u8> {
    let run = |level: u8, count: i64| [varint(count as u64 * 2), vec![level]].concat();
    let sized = |bytes: Vec<u8>| [(bytes.len() as u32).to_le_bytes().to_vec(), bytes].concat();
    [sized([run(0, 1), run(1, values - 1)].concat()), sized(run(1, values))].concat()
}

fn parquet_of(name: &'static str, error: &'static str, bytes: Vec<u8>) -> Hostile {
    Hostile { name, format: "parquet", bytes, error }
}

/// The lengths of so many empty texts, in one block of the encoding for deltas.
fn lengths(total: u64) -> Vec<u8> {
    [varint(1 << 31), varint(4), varint(total), vec![0, 0, 0, 0, 0, 0]].concat()
}

/// Columns of empty texts, each small enough alone.
pub fn empty_texts(columns: usize, rows: i64) -> Vec<u8> {
    let columns: Vec<Column> = (0..columns).map(|_| Column::new(BYTES, rows, 4)).collect();
    parquet(rows, &columns, &page(99, rows, DELTA_LENGTHS, &lengths(rows as u64)))
}

/// Files whose pages claim more than they hold.
fn pages() -> Vec<Hostile> {
    let words = dictionary(MAX, &[1, 0, 0, 0, b'a']);
    let key = page(3, 1, DICTIONARY, &[1, 2, 0]);
    let texts = Column { dictionary: Some(4), data: Some(4 + words.len()), ..Column::new(BYTES, 1, 4) };
    // The footer says that the dictionary stands behind the data, where the decoder begins.
    let (good, bad) = (page(4, 1, PLAIN, &[7, 0, 0, 0, 0, 0, 0, 0]), page(MAX, 1, PLAIN, &[7, 0, 0, 0]));
    assert_eq!(good.len(), bad.len());
    let behind = Column { data: Some(4), dictionary: Some(4 + good.len()), ..Column::new(INT32, 1, 4 + good.len()) };
    let levels = null_levels(MAX);
    let data = |values: i64| Thrift::default().int(1, values).int(2, 0);
    let len = levels.len() as i64;
    let two = Thrift::default().int(1, 0).int(2, len).int(3, len).below(5, data(MAX).int(3, 3).int(4, 3));
    let two = two.below(8, data(0).int(3, 0).int(4, 0).int(5, 0).int(6, 0)).end();
    let levels_40 = null_levels(1 << 26);
    let fixed = Thrift::default().int(1, FIXED).int(2, MAX).int(3, 0).text(4, "x").end();
    let fixed = Column { elements: vec![fixed], ..Column::new(FIXED, 4096, 4) };
    let lists: Vec<Column> = (0..40).map(|_| Column::list(1 << 26, 4)).collect();
    vec![
        parquet_of(
            "dictionary.parquet",
            "byte 4: a dictionary claims 2147483647 values in 5 bytes",
            parquet(1, &[texts.compressed(0)], &[words, key].concat()),
        ),
        parquet_of(
            "lengths.parquet",
            "byte 4: a page claims more values than it holds",
            parquet(1, &[Column::new(BYTES, 1, 4)], &page(99, 1, DELTA_LENGTHS, &lengths(3 << 30))),
        ),
        parquet_of(
            "lengths_of_runs.parquet",
            "byte 4: a column claims 2147483647 values in 99 bytes",
            parquet(MAX, &[Column::new(BYTES, MAX, 4)], &page(99, MAX, DELTA_LENGTHS, &lengths(MAX as u64))),
        ),
        parquet_of(
            "offsets.parquet",
            "a page claims 2147483647 bytes, more than 536870912",
            parquet(1, &[behind.compressed(1)], &[good, bad].concat()),
        ),
        parquet_of(
            "two_headers.parquet",
            "byte 4: its columns claim 2147483647 numbers in lists",
            parquet(1, &[Column::list(MAX, 4)], &[two, levels].concat()),
        ),
        parquet_of(
            "lists.parquet",
            "byte 4: its columns claim 67108864 numbers in lists",
            parquet(1, &lists, &page(levels_40.len() as i64, 1 << 26, PLAIN, &levels_40)),
        ),
        parquet_of(
            "fixed.parquet",
            "byte 4: a column claims values of 2147483647 bytes each",
            parquet(4096, &[fixed], &page(0, 4096, SPLIT, &[])),
        ),
    ]
}

/// Files whose schema is too deep, or claims fields that it does not have.
fn schemas() -> Vec<Hostile> {
    let leaf = || Thrift::default().int(1, INT32).int(3, 0).text(4, "x").end();
    let deep = |depth: usize| {
        let mut elements = vec![group("g", 0, 1, None); depth];
        elements.push(leaf());
        with_schema(&elements, 0, &[], &[])
    };
    let children = with_schema(&vec![group("g", 0, MAX, None); 20], 0, &[], &[]);
    // The number of fields as 64 bits: the parquet crate reads it all the same.
    let long = Thrift::default().int(3, 0).text(4, "g").long(5, MAX).end();
    vec![
        parquet_of(
            "negative.parquet",
            "a row group cannot be read: it has a negative size",
            parquet(-1, &[Column::new(INT32, 1, 4)], &page(4, 1, PLAIN, &[0; 4])),
        ),
        parquet_of("deep.parquet", "byte 4: its footer cannot be read: its schema is too deep", deep(300)),
        parquet_of("children.parquet", "byte 4: its footer cannot be read: a group of its schema claims", children),
        parquet_of(
            "long.parquet",
            "byte 4: its footer cannot be read: its schema",
            with_schema(&vec![long; 20], 0, &[], &[]),
        ),
    ]
}

/// A part of a flatbuffer.
enum Flat {
    Number(u64),
    Text(&'static str),
    /// Fields by their numbers.
    Table(Vec<(usize, Flat)>),
    Tables(Vec<Flat>),
    /// Structs of so many bytes each.
    Structs(usize, Vec<u8>),
}

/// Appends a part, behind all that points to it, and returns where it begins.
fn append(part: &Flat, out: &mut Vec<u8>) -> usize {
    match part {
        Flat::Number(_) => out.len(),
        Flat::Text(text) => append(&Flat::Structs(1, text.as_bytes().into()), out),
        Flat::Structs(size, bytes) => {
            let at = out.len();
            out.extend(((bytes.len() / size) as u32).to_le_bytes());
            out.extend(bytes);
            at
        }
        Flat::Tables(tables) => {
            let at = out.len();
            out.extend((tables.len() as u32).to_le_bytes());
            out.extend(vec![0; 4 * tables.len()]);
            tables.iter().enumerate().for_each(|(number, table)| point(at + 4 + 4 * number, table, out));
            at
        }
        Flat::Table(fields) => {
            let count = fields.iter().map(|(field, _)| field + 1).max().unwrap_or(0);
            let (vtable, at) = (out.len(), out.len() + 4 + 2 * count);
            // Eight bytes for every field.
            let slot = |field: usize| 4 + 8 * field;
            let is_set = |field: usize| fields.iter().any(|(set, _)| *set == field);
            let slots = (0..count).map(|field| if is_set(field) { slot(field) as u16 } else { 0 });
            let sizes = [(4 + 2 * count) as u16, slot(count) as u16];
            out.extend(sizes.into_iter().chain(slots).flat_map(u16::to_le_bytes));
            out.extend(((at - vtable) as i32).to_le_bytes());
            out.extend(vec![0; 8 * count]);
            for (field, value) in fields {
                match value {
                    Flat::Number(number) => out[at + slot(*field)..][..8].copy_from_slice(&number.to_le_bytes()),
                    below => point(at + slot(*field), below, out),
                }
            }
            at
        }
    }
}

/// Appends a part that the four bytes at `from` point to.
fn point(from: usize, part: &Flat, out: &mut Vec<u8>) {
    let distance = append(part, out) - from;
    out[from..from + 4].copy_from_slice(&(distance as u32).to_le_bytes());
}

fn flatbuffer(root: &Flat) -> Vec<u8> {
    let mut out = vec![0; 4];
    point(0, root, &mut out);
    out
}

fn structs<const N: usize>(longs: &[[u64; N]]) -> Flat {
    Flat::Structs(8 * N, longs.as_flattened().iter().flat_map(|long| long.to_le_bytes()).collect())
}

fn numbers<const N: usize>(fields: [(usize, u64); N]) -> Vec<(usize, Flat)> {
    fields.into_iter().map(|(field, number)| (field, Flat::Number(number))).collect()
}

const DICTIONARY_BATCH: u64 = 2;
const RECORD_BATCH: u64 = 3;

/// A batch with one column: its rows, its buffers, and whether they are compressed with Zstandard.
fn batch(rows: u64, buffers: &[[u64; 2]], is_compressed: bool) -> Flat {
    let mut fields = numbers([(0, rows)]);
    fields.push((1, structs(&[[rows, 0]])));
    fields.push((2, structs(buffers)));
    if is_compressed {
        fields.push((3, Flat::Table(numbers([(0, 1)]))));
    }
    Flat::Table(fields)
}

/// A message of version 5.
fn message(header: u64, about: Flat, body: &[u8]) -> (Vec<u8>, usize) {
    let mut fields = numbers([(0, 4), (1, header), (3, body.len() as u64)]);
    fields.push((2, about));
    let meta = flatbuffer(&Flat::Table(fields));
    ([&[0xFF; 4], &(meta.len() as u32).to_le_bytes()[..], &meta, body].concat(), 8 + meta.len())
}

/// A dictionary of one text.
fn word(body: &[u8], buffers: &[[u64; 2]], is_compressed: bool, is_delta: bool) -> (Vec<u8>, usize) {
    let mut fields = numbers([(0, 0), (2, is_delta.into())]);
    fields.push((1, batch(1, buffers, is_compressed)));
    message(DICTIONARY_BATCH, Flat::Table(fields), body)
}

/// A file with a column of dictionary keys, of which one row has key 0. The footer lists each dictionary so many times.
fn arrow(dictionaries: &[(Vec<u8>, usize)], times: usize) -> Vec<u8> {
    let mut bytes = b"ARROW1\0\0".to_vec();
    let mut put = |(message, meta): &(Vec<u8>, usize)| {
        let block = [bytes.len() as u64, *meta as u64, (message.len() - meta) as u64];
        bytes.extend(message);
        block
    };
    let blocks: Vec<[u64; 3]> = dictionaries.iter().map(&mut put).collect();
    let row = put(&message(RECORD_BATCH, batch(1, &[[0, 0], [0, 1]], false), &[0; 8]));
    let mut keys = numbers([(0, 0)]);
    keys.push((1, Flat::Table(numbers([(0, 8), (1, 1)]))));
    let mut field = numbers([(1, 1), (2, 5)]);
    field.extend([(0, Flat::Text("word")), (3, Flat::Table(Vec::new())), (4, Flat::Table(keys))]);
    let mut footer = numbers([(0, 4)]);
    footer.push((1, Flat::Table(vec![(1, Flat::Tables(vec![Flat::Table(field)]))])));
    footer.push((2, structs(&blocks.repeat(times))));
    footer.push((3, structs(&[row])));
    let footer = flatbuffer(&Flat::Table(footer));
    bytes.extend([&footer[..], &(footer.len() as u32).to_le_bytes(), b"ARROW1"].concat());
    bytes
}

/// Dictionaries that are one text of zeros each, compressed: so many of them, each of this size.
pub fn compressed_dictionaries(count: usize, bytes: usize) -> Vec<u8> {
    let mut text = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
    std::io::copy(&mut std::io::Read::take(std::io::repeat(0), bytes as u64), &mut text).unwrap();
    let text = text.finish().unwrap();
    // Of the offsets the length says that they are not compressed.
    let offsets = [&(-1_i64).to_le_bytes()[..], &0_i32.to_le_bytes(), &(bytes as i32).to_le_bytes()].concat();
    let body = [&offsets, &(bytes as i64).to_le_bytes()[..], &text].concat();
    let buffers = [[0, 0], [0, 16], [16, 8 + text.len() as u64]];
    let dictionaries: Vec<_> = (0..count).map(|number| word(&body, &buffers, true, number > 0)).collect();
    arrow(&dictionaries, 1)
}

/// Arrow files whose footer lists more than the file has.
fn messages() -> Vec<Hostile> {
    let body = [&[0, 0, 0, 0, 200, 0, 0, 0][..], &[b'x'; 200]].concat();
    let buffers = [[0, 0], [0, 8], [8, 200]];
    let first = word(&body, &buffers, false, false);
    let bytes = arrow(&[first], 1000);
    vec![Hostile {
        name: "messages.arrow",
        format: "arrow",
        bytes,
        error: "the messages that the footer lists are larger than the file",
    }]
}

/// All of them; each is small enough to be damaged further.
pub fn files() -> Vec<Hostile> {
    pages().into_iter().chain(schemas()).chain(messages()).collect()
}
