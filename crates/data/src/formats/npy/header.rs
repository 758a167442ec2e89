//! The header of an `.npy` file: `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }`.

use crate::arrays::{Array, Element, Unreadable};
use crate::error::ReadError;
use crate::files::Contents;
use kolo_base::ByteReader;

pub const MAGIC: &[u8] = b"\x93NUMPY";
/// Magic, version and length of the header, at most.
const PREFIX_BYTES: usize = 12;
/// Bytes of a header. NumPy itself reads no more than 10,000 of a file that it does not trust.
const HEADER_BYTES_MAX: u64 = 64 << 10;
/// Dims of an array, as NumPy has it.
const DIMS_MAX: usize = 64;

/// The array in `range` (start and bytes) of the contents.
pub fn read(contents: &Contents, range: (u64, u64), name: &str) -> Result<Array, Unreadable> {
    let (start, bytes) = range;
    let mut prefix = [0; PREFIX_BYTES];
    let prefix = &mut prefix[..bytes.min(PREFIX_BYTES as u64) as usize];
    contents.read_at(start, prefix)?;
    let place = header_place(prefix, bytes);
    let (at, header_bytes) = place.map_err(|wrong| contents.damaged(start + wrong.at as u64, &wrong.message))?;
    let mut text = Vec::new();
    contents.read_into(start + at, header_bytes, &mut text)?;
    let header = Parser { text: &text, at: 0 }.header().map_err(|wrong| {
        let hint = "write the array with numpy.save, of numbers, in C order (numpy.ascontiguousarray)";
        let message = format!("array \"{name}\": {}", wrong.message);
        let error = ReadError::new(message, hint).in_file(contents.path()).at(start + at + wrong.at as u64);
        match wrong.kind {
            Some(kind) => Unreadable::kind(kind, error),
            None => error.into(),
        }
    })?;
    let data = at + header_bytes;
    let mut array = Array::new(name, contents, (start + data, bytes - data), header.element, header.shape)?;
    array.big_endian = header.big_endian;
    Ok(array)
}

/// The header of a file in memory, and the bytes behind it.
pub fn split(file: &[u8]) -> Result<(Header, &[u8]), Wrong> {
    let (at, header_bytes) = header_place(file, file.len() as u64)?;
    let (text, data) = file[at as usize..].split_at(header_bytes as usize);
    Ok((Parser { text, at: 0 }.header()?, data))
}

/// Where the header begins and its bytes, from the first bytes of a file of so many bytes.
fn header_place(prefix: &[u8], bytes: u64) -> Result<(u64, u64), Wrong> {
    let cut_short = || wrong(0, "it ends within the header");
    let rest = prefix.strip_prefix(MAGIC);
    let mut rest =
        ByteReader::new(rest.ok_or_else(|| wrong(0, "it does not start with \\x93NUMPY, as .npy files do"))?);
    let version = rest.array().map(|[major, _minor]| major).ok_or_else(cut_short)?;
    let (at, header_bytes) = match version {
        1 => (10, rest.u16().map(u64::from)),
        2 | 3 => (12, rest.u32().map(u64::from)),
        version => return Err(wrong(6, format!("version {version} of the .npy format is not known"))),
    };
    let header_bytes = header_bytes.ok_or_else(cut_short)?;
    if header_bytes > HEADER_BYTES_MAX || at + header_bytes > bytes {
        let message = format!("the header is said to have {header_bytes} bytes; {HEADER_BYTES_MAX} are allowed");
        return Err(wrong(8, message));
    }
    Ok((at, header_bytes))
}

#[derive(Debug)]
pub struct Header {
    pub element: Element,
    pub big_endian: bool,
    pub shape: Vec<usize>,
}

/// What is wrong, and at which byte of the header.
#[derive(Debug)]
pub struct Wrong {
    pub at: usize,
    pub message: String,
    /// What the array is, if it is only of a kind that is not read.
    pub kind: Option<String>,
}

fn wrong(at: usize, message: impl Into<String>) -> Wrong {
    Wrong { at, message: message.into(), kind: None }
}

fn unread(at: usize, kind: impl Into<String>, message: impl Into<String>) -> Wrong {
    Wrong { at, message: message.into(), kind: Some(kind.into()) }
}

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    fn header(mut self) -> Result<Header, Wrong> {
        let (mut descr, mut shape) = (None, None);
        let mut fortran = None;
        self.expect(b'{')?;
        while self.peek() != Some(b'}') {
            let at = self.at;
            let key = self.string()?;
            self.expect(b':')?;
            match key.as_str() {
                "descr" => descr = Some(self.element()?),
                "fortran_order" => fortran = Some((self.at, self.boolean()?)),
                "shape" => shape = Some(self.shape()?),
                other => return Err(wrong(at, format!("the header has the unknown key {other:?}"))),
            }
            if self.peek() == Some(b',') {
                self.at += 1;
            }
        }
        let (Some((element, big_endian)), Some((at, fortran)), Some(shape)) = (descr, fortran, shape) else {
            return Err(wrong(0, "the header lacks `descr`, `fortran_order` or `shape`"));
        };
        if fortran && shape.len() > 1 {
            let message = "the array is in Fortran order, where a sample is scattered over the file";
            return Err(unread(at, format!("{element} in Fortran order"), message));
        }
        Ok(Header { element, big_endian, shape })
    }

    /// The next byte that is no space.
    fn peek(&mut self) -> Option<u8> {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    fn expect(&mut self, byte: u8) -> Result<(), Wrong> {
        match self.peek() {
            Some(found) if found == byte => {
                self.at += 1;
                Ok(())
            }
            _ => Err(wrong(self.at, format!("the header is not a dictionary: `{}` is expected here", byte as char))),
        }
    }

    fn string(&mut self) -> Result<String, Wrong> {
        let quote = self.peek().filter(|byte| [b'\'', b'"'].contains(byte));
        let quote = quote.ok_or_else(|| wrong(self.at, "the header has no string here"))?;
        let start = self.at + 1;
        let len = self.text[start..].iter().position(|byte| *byte == quote);
        let len = len.ok_or_else(|| wrong(self.at, "a text in the header does not end"))?;
        self.at = start + len + 1;
        Ok(String::from_utf8_lossy(&self.text[start..start + len]).into_owned())
    }

    fn element(&mut self) -> Result<(Element, bool), Wrong> {
        let at = self.at;
        if self.peek() == Some(b'[') {
            return Err(unread(at, "records of several fields", "the array has records of several fields"));
        }
        let descr = self.string()?;
        let (order, kind) = descr.split_at_checked(1).unwrap_or(("", ""));
        let element = match kind {
            "b1" => Element::Bool,
            "u1" => Element::U8,
            "i1" => Element::I8,
            "u2" => Element::U16,
            "i2" => Element::I16,
            "u4" => Element::U32,
            "i4" => Element::I32,
            "u8" => Element::U64,
            "i8" => Element::I64,
            "f2" => Element::F16,
            "f4" => Element::F32,
            "f8" => Element::F64,
            _ if kind.starts_with('O') => {
                let message = "the array holds Python objects, which cannot be read without running their code";
                return Err(unread(at, "Python objects", message));
            }
            _ => return Err(unread(at, descr.clone(), format!("elements of the type {descr:?} cannot be read"))),
        };
        match order {
            "<" | "|" | "=" => Ok((element, false)),
            ">" => Ok((element, true)),
            _ => Err(wrong(at, format!("elements of the type {descr:?} cannot be read"))),
        }
    }

    fn boolean(&mut self) -> Result<bool, Wrong> {
        self.peek();
        let (at, rest) = (self.at, &self.text[self.at..]);
        let found = [("True", true), ("False", false)].into_iter().find(|(word, _)| rest.starts_with(word.as_bytes()));
        let (word, value) = found.ok_or_else(|| wrong(at, "True or False is expected here"))?;
        self.at += word.len();
        Ok(value)
    }

    fn shape(&mut self) -> Result<Vec<usize>, Wrong> {
        let mut dims = Vec::new();
        self.expect(b'(')?;
        while self.peek() != Some(b')') {
            let start = self.at;
            let digits = self.text[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
            let text = String::from_utf8_lossy(&self.text[start..start + digits]);
            let dim = text.parse().map_err(|_| wrong(start, "the shape is not a tuple of numbers"))?;
            if dims.len() == DIMS_MAX {
                return Err(wrong(start, format!("the shape has more than {DIMS_MAX} dims")));
            }
            dims.push(dim);
            self.at += digits;
            // Python 2 marked long numbers.
            if self.text.get(self.at) == Some(&b'L') {
                self.at += 1;
            }
            if self.peek() != Some(b')') {
                self.expect(b',')?;
            }
        }
        self.at += 1;
        Ok(dims)
    }
}
