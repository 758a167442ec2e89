//! Attributes: the constants of an op, as data. They are what the text form prints and the parser reads back.

use crate::types::DType;
use std::fmt;

#[derive(Clone, Debug, PartialEq)]
pub enum Attr {
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    List(Vec<i64>),
    DType(DType),
}

impl fmt::Display for Attr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Attr::Bool(value) => write!(f, "{value}"),
            Attr::Int(value) => write!(f, "{value}"),
            // Debug keeps a point or an exponent in every float, which is how the parser tells it from a whole number.
            Attr::Float(value) => write!(f, "{value:?}"),
            Attr::Text(value) => write!(f, "{}", crate::text::quote(value)),
            Attr::List(values) => {
                write!(f, "[")?;
                for (at, value) in values.iter().enumerate() {
                    write!(f, "{}{value}", if at == 0 { "" } else { "," })?;
                }
                write!(f, "]")
            }
            Attr::DType(dtype) => write!(f, "{}", dtype.name()),
        }
    }
}

pub type Attrs = Vec<(&'static str, Attr)>;

/// A Rust type that can stand as an attribute.
pub trait AttrValue: Sized {
    fn to_attr(&self) -> Attr;
    fn from_attr(attr: &Attr) -> Option<Self>;
}

macro_rules! attr_value {
    ($t:ty, $to:expr, $pattern:pat => $from:expr) => {
        impl AttrValue for $t {
            fn to_attr(&self) -> Attr {
                let to: fn(&$t) -> Attr = $to;
                to(self)
            }
            fn from_attr(attr: &Attr) -> Option<Self> {
                match attr {
                    $pattern => $from,
                    _ => None,
                }
            }
        }
    };
}

attr_value!(bool, |v| Attr::Bool(*v), Attr::Bool(v) => Some(*v));
attr_value!(i64, |v| Attr::Int(*v), Attr::Int(v) => Some(*v));
attr_value!(usize, |v| Attr::Int(*v as i64), Attr::Int(v) => usize::try_from(*v).ok());
attr_value!(f64, |v| Attr::Float(*v), Attr::Float(v) => Some(*v));
attr_value!(f32, |v| Attr::Float(f64::from(*v)), Attr::Float(v) => Some(*v as f32));
attr_value!(String, |v| Attr::Text(v.clone()), Attr::Text(v) => Some(v.clone()));
attr_value!(DType, |v| Attr::DType(*v), Attr::DType(v) => Some(*v));
attr_value!(Vec<i64>, |v| Attr::List(v.clone()), Attr::List(v) => Some(v.clone()));
attr_value!(Vec<usize>, |v| Attr::List(v.iter().map(|x| *x as i64).collect()),
    Attr::List(v) => v.iter().map(|x| usize::try_from(*x).ok()).collect());

impl AttrValue for [usize; 2] {
    fn to_attr(&self) -> Attr {
        self.to_vec().to_attr()
    }
    fn from_attr(attr: &Attr) -> Option<Self> {
        Vec::<usize>::from_attr(attr)?.try_into().ok()
    }
}

/// Reads an op's attributes out of its text form. Every attribute without a default must be there, and no other.
#[derive(Debug)]
pub struct AttrReader<'a> {
    pub attrs: &'a [(String, Attr)],
}

impl AttrReader<'_> {
    pub fn get<T: AttrValue>(&self, name: &str) -> Result<T, String> {
        let (_, attr) =
            self.attrs.iter().find(|(key, _)| key == name).ok_or_else(|| format!("attribute `{name}` is missing"))?;
        T::from_attr(attr).ok_or_else(|| format!("attribute `{name}` has the wrong type: {attr}"))
    }

    /// An attribute with a default, which the text form leaves out.
    pub fn get_or<T: AttrValue>(&self, name: &str, default: T) -> Result<T, String> {
        if self.attrs.iter().any(|(key, _)| key == name) { self.get(name) } else { Ok(default) }
    }

    pub fn expect_only(&self, names: &[&str]) -> Result<(), String> {
        match self.attrs.iter().find(|(key, _)| !names.contains(&key.as_str())) {
            Some((key, _)) => Err(format!("unknown attribute `{key}`; known are {}", names.join(", "))),
            None => Ok(()),
        }
    }
}

/// Declares an op: its struct, its name in the text form, and its attributes, each public and in the order printed. One with
/// a default (`field: type = value`) is printed only if it has another value.
///
/// ```
/// kolo_graph::op! {
///     /// Matrix product.
///     pub struct Product = "product" { ta: bool, tb: bool }
/// }
/// ```
#[macro_export]
macro_rules! op {
    (@read $attrs:ident $field:ident) => { $attrs.get(stringify!($field))? };
    (@read $attrs:ident $field:ident $default:expr) => { $attrs.get_or(stringify!($field), $default)? };
    ($(#[doc = $doc:literal])* pub struct $op:ident = $name:literal {
        $($(#[$fdoc:meta])* $field:ident : $t:ty $(= $default:expr)?),* $(,)?
    }) => {
        $(#[doc = $doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $op { $($(#[$fdoc])* pub $field: $t),* }

        impl $crate::op::Describe for $op {
            fn name(&self) -> &'static str { $name }
            fn attrs(&self) -> $crate::attr::Attrs {
                #[allow(unused_mut)]
                let mut attrs = vec![$((stringify!($field), $crate::attr::AttrValue::to_attr(&self.$field))),*];
                $($(if self.$field == $default {
                    attrs.retain(|(name, _): &(&'static str, _)| *name != stringify!($field));
                })?)*
                attrs
            }
        }

        impl $crate::op::Declared for $op {
            const NAME: &'static str = $name;
            const DOC: &'static str = concat!($($doc, "\n"),*);
            const ATTRIBUTES: &'static [(&'static str, &'static str)] = &[$((stringify!($field), stringify!($t))),*];
            fn read(attrs: &$crate::attr::AttrReader<'_>) -> Result<Self, String> {
                attrs.expect_only(&[$(stringify!($field)),*])?;
                Ok(Self { $($field: $crate::op!(@read attrs $field $($default)?)),* })
            }
        }
    };
}
