//! A small NumPy array as a member of a sample: numbers in C order, little-endian. Objects are never unpickled.

use half::f16;

/// The type of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    Float(usize),
    Signed(usize),
    Unsigned(usize),
}

/// An array in an `.npy` file.
#[derive(Debug, PartialEq)]
pub(super) struct Array<'b> {
    element: Element,
    pub shape: Vec<usize>,
    bytes: &'b [u8],
}

/// The most dims that NumPy has.
const DIMS_MAX: usize = 64;

impl<'b> Array<'b> {
    pub fn parse(file: &'b [u8]) -> Result<Self, String> {
        let wrong = |what: &str| format!("the array {what}");
        let rest = file.strip_prefix(b"\x93NUMPY").ok_or_else(|| wrong("is not a `.npy` file"))?;
        let (length, rest) = match *rest {
            [1, _, a, b, ref rest @ ..] => (usize::from(u16::from_le_bytes([a, b])), rest),
            [2 | 3, _, a, b, c, d, ref rest @ ..] => (u32::from_le_bytes([a, b, c, d]) as usize, rest),
            _ => return Err(wrong("has an unknown version")),
        };
        let (header, bytes) = rest.split_at_checked(length).ok_or_else(|| wrong("ends inside its header"))?;
        let header = std::str::from_utf8(header).map_err(|_| wrong("has a header that is not text"))?;
        let element = element(value(header, "descr").unwrap_or_default())
            .ok_or_else(|| wrong("has elements other than plain little-endian numbers"))?;
        let shape = shape(value(header, "shape").unwrap_or_default()).ok_or_else(|| wrong("has no shape"))?;
        let is_fortran = value(header, "fortran_order").is_some_and(|text| text.starts_with("True"));
        if is_fortran && shape.len() > 1 {
            return Err(wrong("is in Fortran order; save it in C order"));
        }
        let count = shape.iter().try_fold(element.bytes(), |product, size| product.checked_mul(*size));
        if count != Some(bytes.len()) {
            return Err(wrong(&format!("says it has the shape {shape:?}, but holds {} bytes", bytes.len())));
        }
        Ok(Self { element, shape, bytes })
    }

    pub fn is_float(&self) -> bool {
        matches!(self.element, Element::Float(_))
    }

    /// The elements as f32.
    pub fn reals(&self, out: &mut Vec<f32>) {
        let bytes = self.bytes;
        match self.element {
            Element::Float(2) => out.extend(bytes.as_chunks().0.iter().map(|pair| f16::from_le_bytes(*pair).to_f32())),
            Element::Float(4) => out.extend(bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word))),
            Element::Float(_) => out.extend(bytes.as_chunks().0.iter().map(|word| f64::from_le_bytes(*word) as f32)),
            _ => self.each_int(|value| out.push(value as f32)),
        }
    }

    /// The elements of an array of whole numbers.
    pub fn ints(&self, out: &mut Vec<i64>) {
        self.each_int(|value| out.push(value));
    }

    fn each_int(&self, mut found: impl FnMut(i64)) {
        for chunk in self.bytes.chunks_exact(self.element.bytes()) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            let spare = 64 - 8 * chunk.len() as u32;
            let value = i64::from_le_bytes(word);
            found(if matches!(self.element, Element::Signed(_)) { value << spare >> spare } else { value });
        }
    }
}

impl Element {
    fn bytes(self) -> usize {
        match self {
            Self::Float(bytes) | Self::Signed(bytes) | Self::Unsigned(bytes) => bytes,
        }
    }
}

fn element(text: &str) -> Option<Element> {
    let text = text.strip_prefix('\'')?;
    Some(match text.split('\'').next()? {
        "<f2" => Element::Float(2),
        "<f4" => Element::Float(4),
        "<f8" => Element::Float(8),
        "|i1" => Element::Signed(1),
        "<i2" => Element::Signed(2),
        "<i4" => Element::Signed(4),
        "<i8" => Element::Signed(8),
        "|u1" | "|b1" => Element::Unsigned(1),
        "<u2" => Element::Unsigned(2),
        "<u4" => Element::Unsigned(4),
        "<u8" => Element::Unsigned(8),
        _ => return None,
    })
}

/// What follows `'key':` in the dictionary.
fn value<'h>(header: &'h str, key: &str) -> Option<&'h str> {
    let (_, after) = header.split_once(&format!("'{key}':"))?;
    Some(after.trim_start())
}

fn shape(text: &str) -> Option<Vec<usize>> {
    let (inside, _) = text.strip_prefix('(')?.split_once(')')?;
    let sizes = inside.split(',').map(str::trim).filter(|size| !size.is_empty());
    let shape: Vec<usize> = sizes.map(|size| size.parse().ok()).collect::<Option<_>>()?;
    (shape.len() <= DIMS_MAX).then_some(shape)
}
