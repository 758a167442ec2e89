//! From the value of a record to the number of its class.

use crate::record::RecordValue;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Numbers beyond this have no exact f32.
const WHOLE_MAX: f32 = 16_777_216.0;

/// Which value is which class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// The value is the class, below this number.
    Index(usize),
    /// Whole numbers, each a class.
    Whole(BTreeMap<i64, i32>),
    Names(BTreeMap<String, i32>),
}

impl Lookup {
    /// Names in the order of their classes. Of a name that comes again, the first place counts.
    pub fn of_names<'n>(names: impl Iterator<Item = &'n str>) -> Self {
        let mut known = BTreeMap::new();
        for name in names {
            let class = known.len() as i32;
            known.entry(name.to_string()).or_insert(class);
        }
        Lookup::Names(known)
    }

    /// The number of classes.
    pub fn len(&self) -> usize {
        match self {
            Lookup::Index(classes) => *classes,
            Lookup::Whole(values) => values.len(),
            Lookup::Names(names) => names.len(),
        }
    }

    /// The names in the order of their classes, if there are any.
    pub fn names(&self) -> Option<Vec<&str>> {
        let Lookup::Names(names) = self else { return None };
        let mut sorted: Vec<(i32, &str)> = names.iter().map(|(name, class)| (*class, name.as_str())).collect();
        sorted.sort_unstable();
        Some(sorted.into_iter().map(|(_, name)| name).collect())
    }

    /// What its values are, for a hint.
    pub fn described(&self) -> String {
        let whole = |values: &BTreeMap<i64, i32>| values.keys().map(i64::to_string).collect::<Vec<_>>();
        match self {
            Lookup::Index(classes) => format!("numbers from 0 to {}", classes.saturating_sub(1)),
            Lookup::Whole(values) => listed(&whole(values)),
            Lookup::Names(_) => listed(&self.names().unwrap_or_default()),
        }
    }

    /// The class of a value; `Err` says why there is none.
    pub fn class(&self, value: &RecordValue) -> Result<i32, String> {
        let whole = || match value {
            RecordValue::Ints(values) if values.len() == 1 => Ok(values[0]),
            RecordValue::Reals(values) if values.len() == 1 => whole_number(values[0]),
            RecordValue::Text(text) => text.trim().parse().map_err(|_| format!("\"{}\" is not a class", shown(text))),
            RecordValue::Missing => Err("the target is missing".into()),
            _ => Err("the target is not one value".into()),
        };
        match self {
            Lookup::Index(classes) => match whole()? {
                class if (0..*classes as i64).contains(&class) => Ok(class as i32),
                class => Err(format!("the target is {class}, but there are {classes} classes")),
            },
            Lookup::Whole(known) => {
                let value = whole()?;
                known.get(&value).copied().ok_or_else(|| format!("the target is {value}, which is not a known class"))
            }
            Lookup::Names(names) => {
                let found = match value {
                    RecordValue::Text(text) => names.get(text.trim()),
                    _ => names.get(&whole()?.to_string()),
                };
                let Some(class) = found else {
                    return Err(match value {
                        RecordValue::Text(text) => format!("\"{}\" is not a known class", shown(text)),
                        _ => format!("the target is {}, which is not a known class", whole()?),
                    });
                };
                Ok(*class)
            }
        }
    }
}

/// The names that the values of one file's column are indices of, and the class that each name has in another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NameMap {
    names: Arc<[String]>,
    classes: Vec<Option<i32>>,
}

impl NameMap {
    pub fn new(names: &Arc<[String]>, class: impl Fn(&str) -> Option<i32>) -> Self {
        Self { names: Arc::clone(names), classes: names.iter().map(|name| class(name)).collect() }
    }

    /// The class of a value that is an index; `Err` says why there is none.
    pub fn class(&self, value: &RecordValue) -> Result<i32, String> {
        let index = match value {
            RecordValue::Ints(values) if values.len() == 1 => values[0],
            RecordValue::Missing => return Err("the value is missing".into()),
            _ => return Err("it is not the number of a name".into()),
        };
        let at = usize::try_from(index).ok().filter(|at| *at < self.names.len());
        let at = at.ok_or_else(|| format!("class {index} has no name"))?;
        self.classes[at].ok_or_else(|| format!("\"{}\" is not a known class", shown(&self.names[at])))
    }

    /// The first name that has no class.
    pub fn unknown(&self) -> Option<&str> {
        let at = self.classes.iter().position(Option::is_none)?;
        Some(&self.names[at])
    }
}

/// A few names.
pub(crate) fn listed(names: &[impl AsRef<str>]) -> String {
    const SHOWN: usize = 10;
    let first = names.iter().take(SHOWN).map(|name| format!("\"{}\"", name.as_ref())).collect::<Vec<_>>().join(", ");
    match names.len() > SHOWN {
        true => format!("{first} and {} more", names.len() - SHOWN),
        false => first,
    }
}

/// A few characters of a text that may be of any length.
pub(crate) fn shown(text: &str) -> String {
    const CHARACTERS: usize = 40;
    match text.chars().count() > CHARACTERS {
        true => text.chars().take(CHARACTERS).chain(['…']).collect(),
        false => text.into(),
    }
}

/// The whole number that this is.
pub(crate) fn whole_number(value: f32) -> Result<i64, String> {
    match value.fract() == 0.0 && value.abs() <= WHOLE_MAX {
        true => Ok(value as i64),
        false => Err(format!("the target is {value}, which is not a class")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_find_their_class() {
        let text = |text: &str| RecordValue::Text(text.into());
        let index = Lookup::Index(3);
        assert_eq!(index.class(&RecordValue::Ints(vec![2])), Ok(2));
        assert_eq!(index.class(&RecordValue::Reals(vec![1.0])), Ok(1));
        assert_eq!(index.class(&text(" 1 ")), Ok(1));
        for wrong in [
            RecordValue::Ints(vec![3]),
            RecordValue::Ints(vec![-1]),
            RecordValue::Reals(vec![0.5]),
            RecordValue::Missing,
        ] {
            assert!(index.class(&wrong).is_err(), "{wrong:?}");
        }
        let names = Lookup::of_names(["cat", "7"].into_iter());
        assert_eq!((names.class(&text("cat")), names.class(&RecordValue::Ints(vec![7]))), (Ok(0), Ok(1)));
        assert_eq!(names.class(&text("dog")), Err("\"dog\" is not a known class".into()));
        let unknown = names.class(&RecordValue::Ints(vec![3]));
        assert_eq!(unknown, Err("the target is 3, which is not a known class".into()));
        let whole = Lookup::Whole([(-1, 0), (5, 1)].into());
        assert_eq!((whole.class(&RecordValue::Ints(vec![5])), whole.class(&text("-1"))), (Ok(1), Ok(0)));
    }
}
