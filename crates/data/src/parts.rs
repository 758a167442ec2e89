//! Several files read as one: which of them holds record number `at`.

use crate::error::ReadError;

/// The files of a reader in their order, each with its number of records.
#[derive(Debug)]
pub(crate) struct Parts<T> {
    parts: Vec<T>,
    /// Records of each part and all parts before it.
    ends: Vec<usize>,
}

impl<T> Parts<T> {
    pub fn new() -> Self {
        Self { parts: Vec::new(), ends: Vec::new() }
    }

    pub fn push(&mut self, part: T, records: usize) {
        self.ends.push(self.len().saturating_add(records));
        self.parts.push(part);
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.parts.iter()
    }

    /// The records of all parts.
    pub fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The part with record number `at`, and the number of the record in it.
    pub fn find(&self, at: usize) -> Result<(&T, usize), ReadError> {
        let part = self.ends.partition_point(|end| *end <= at);
        match self.parts.get(part) {
            Some(found) => Ok((found, at - if part == 0 { 0 } else { self.ends[part - 1] })),
            None => {
                let message = format!("record {at} was requested, but there are {}", self.len());
                Err(ReadError::new(message, "ask for a smaller number"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_part_and_the_place_in_it() {
        let mut parts = Parts::new();
        for (name, records) in [("a", 2), ("empty", 0), ("b", 3)] {
            parts.push(name, records);
        }
        let found: Vec<_> = (0..5).map(|at| parts.find(at).unwrap()).collect();
        assert_eq!(found, [(&"a", 0), (&"a", 1), (&"b", 0), (&"b", 1), (&"b", 2)]);
        assert!(parts.find(5).unwrap_err().message.contains("there are 5"));
    }
}
