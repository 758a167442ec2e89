//! What a store holds, by entry: which elements of which tensor, wherever they are kept.
//!
//! Every rank saves what it has. Together that is every tensor of a run with one worker, and any other store can be filled
//! from it, however its tensors are cut.

use super::{Entry, Role, Store};
use kolo_graph::{DType, Shape};
use std::collections::BTreeMap;
use std::ops::Range;

/// Elements of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    pub tensor: String,
    /// The shape of the whole tensor.
    pub whole: Shape,
    pub dtype: DType,
    pub role: Role,
    /// The first of the elements.
    pub start: usize,
    pub bytes: Vec<u8>,
}

impl Saved {
    /// The elements, in the tensor.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.bytes.len() / self.dtype.bytes()
    }
}

/// Everything a store holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    pub entries: Vec<Saved>,
}

/// Why a store could not be filled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    #[error(
        "`{tensor}` has no element {element} in what was saved\n  hint: give the files of all ranks, of the same model and optimizer"
    )]
    Missing { tensor: String, element: usize },
    #[error(
        "`{tensor}` was saved as {saved}, but is {here} here\n  hint: resume with the job that saved it: same model, same optimizer"
    )]
    OtherType { tensor: String, saved: String, here: String },
}

impl Store {
    /// The elements of an entry that are its own: all, or of a parameter those that lie in the run `own` of the parameters'
    /// memory.
    pub(super) fn kept(entry: &Entry, own: Option<&Range<usize>>) -> Range<usize> {
        let elements = entry.ty.elements();
        let Some(own) = own.filter(|_| entry.is_param()) else { return 0..elements };
        let first = entry.offset / entry.ty.dtype.bytes();
        let within = |at: usize| at.clamp(first, first + elements) - first;
        within(own.start)..within(own.end)
    }

    pub(super) fn run(&self, entry: &Entry, kept: &Range<usize>) -> (*mut u8, usize) {
        let size = entry.ty.dtype.bytes();
        // SAFETY: the elements are the entry's.
        (unsafe { self.address(entry).add(kept.start * size) }, kept.len() * size)
    }

    /// What the store holds. Of the parameters, the elements `own` of their memory, if not all.
    pub fn save(&self, own: Option<&Range<usize>>) -> Vec<Saved> {
        let mut saved = Vec::new();
        for entry in &self.entries {
            let kept = Self::kept(entry, own);
            if kept.is_empty() {
                continue;
            }
            for (local, start, len) in entry.region.runs(kept) {
                let (data, bytes) = self.run(entry, &(local..local + len));
                saved.push(Saved {
                    tensor: entry.tensor.clone(),
                    whole: entry.whole.clone(),
                    dtype: entry.ty.dtype,
                    role: entry.role,
                    start,
                    // SAFETY: the run lies inside the memory, and nothing writes it while `self` is borrowed.
                    bytes: unsafe { std::slice::from_raw_parts(data, bytes) }.to_vec(),
                });
            }
        }
        saved
    }

    /// Fills the store from what was saved, which may be cut elsewhere. Nothing changes if some of it is missing.
    pub fn load(&mut self, own: Option<&Range<usize>>, saved: &[Saved]) -> Result<(), RestoreError> {
        self.load_where(own, saved, |_| true)
    }

    /// As [`Store::load`], but a tensor of which nothing was saved stays as it is.
    pub fn load_present(&mut self, own: Option<&Range<usize>>, saved: &[Saved]) -> Result<(), RestoreError> {
        self.load_where(own, saved, |entry| saved.iter().any(|part| part.tensor == entry.tensor))
    }

    fn load_where(
        &mut self,
        own: Option<&Range<usize>>,
        saved: &[Saved],
        wanted: impl Fn(&Entry) -> bool,
    ) -> Result<(), RestoreError> {
        let mut by_tensor: BTreeMap<&str, Vec<&Saved>> = BTreeMap::new();
        for part in saved {
            by_tensor.entry(&part.tensor).or_default().push(part);
        }
        by_tensor.values_mut().for_each(|parts| parts.sort_by_key(|part| part.start));
        let parts = |entry: &Entry| by_tensor.get(entry.tensor.as_str()).map_or(&[][..], Vec::as_slice);
        for entry in self.entries.iter().filter(|entry| wanted(entry)) {
            check(entry, &Self::kept(entry, own), parts(entry))?;
        }
        self.mirrored.write_host();
        for entry in self.entries.iter().filter(|entry| wanted(entry)) {
            for (local, start, len) in entry.region.runs(Self::kept(entry, own)) {
                let (data, _) = self.run(entry, &(local..local + len));
                // SAFETY: `&mut self` is exclusive, and these elements lie in the entry's run.
                let run = unsafe { std::slice::from_raw_parts_mut(data, len * entry.ty.dtype.bytes()) };
                copy_run(run, start..start + len, entry.ty.dtype.bytes(), parts(entry));
            }
        }
        Ok(())
    }

    pub fn snapshot(&self) -> Snapshot {
        Snapshot { entries: self.save(None) }
    }

    /// Returns to a snapshot, of this store or of one that is cut otherwise.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), RestoreError> {
        self.load(None, &snapshot.entries)
    }
}

/// Copies elements `wanted` of a tensor, as far as these parts of it, which lie in order, have them.
fn copy_run(out: &mut [u8], wanted: Range<usize>, size: usize, parts: &[&Saved]) {
    let first = parts.partition_point(|part| part.range().end <= wanted.start);
    for part in &parts[first..] {
        let range = part.range();
        let (from, to) = (range.start.max(wanted.start), range.end.min(wanted.end));
        if from < to {
            let bytes = &part.bytes[(from - range.start) * size..(to - range.start) * size];
            out[(from - wanted.start) * size..(to - wanted.start) * size].copy_from_slice(bytes);
        } else if range.start >= wanted.end {
            return;
        }
    }
}

/// Whether these parts, in order, have all the elements that are wanted of an entry.
fn check(entry: &Entry, kept: &Range<usize>, parts: &[&Saved]) -> Result<(), RestoreError> {
    if let Some(other) = parts.iter().find(|part| part.whole != entry.whole || part.dtype != entry.ty.dtype) {
        let text = |dtype: DType, whole: &Shape| format!("{} of shape {whole:?}", dtype.name());
        return Err(RestoreError::OtherType {
            tensor: entry.tensor.clone(),
            saved: text(other.dtype, &other.whole),
            here: text(entry.ty.dtype, &entry.whole),
        });
    }
    for (_, start, len) in entry.region.runs(kept.clone()) {
        let first = parts.partition_point(|part| part.range().end <= start);
        let mut element = start;
        for part in &parts[first..] {
            let range = part.range();
            if range.start > element || element >= start + len {
                break;
            }
            element = element.max(range.end);
        }
        if element < start + len {
            return Err(RestoreError::Missing { tensor: entry.tensor.clone(), element });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::{Builder, Graph, Init, Type};
    use kolo_ops::prelude::*;

    /// A parameter, a moment of it that is whole or cut at `cut`, a statistic, and a counter of whole numbers.
    fn graph(cut: Option<usize>) -> Graph {
        use kolo_graph::sources::{GrainSum, State};
        let builder = Builder::new();
        let w = builder.param("w", [2, 3], Init::Constant(1.0));
        let sum = builder.input("x", Type::f32([2, 3])).then(GrainSum { of: "w".into() }, &[]);
        let count = builder.state("count", Type::i32([2]), Init::ZEROS);
        builder.output("count", count);
        let mean = builder.state("mean", Type::f32([]), Init::ZEROS);
        builder.update(mean, mean.scale(2.0));
        let state = |name: &str, start: usize, len: usize| State {
            name: name.into(),
            dtype: kolo_graph::DType::F32,
            shape: vec![len],
            init: Init::ZEROS,
            of: "m".into(),
            region: vec![start],
            whole: vec![2, 3],
        };
        match cut {
            None => {
                let m = builder.state("m", Type::f32([2, 3]), Init::ZEROS);
                builder.update(m, m.add(sum));
            }
            Some(cut) => {
                for (name, start, len) in [("m@0", 0, cut), ("m@1", cut, 6 - cut)] {
                    let m = builder.apply(state(name, start, len), &[]);
                    let part = sum.then(kolo_graph::piece::Piece { start, len }, &[]);
                    builder.update(m, m.add(part));
                }
            }
        }
        builder.update(w, w.add(sum));
        builder.finish().unwrap()
    }

    #[test]
    fn what_was_saved_fills_a_store_that_is_cut_otherwise() {
        let mut whole = Store::new(&graph(None), 1);
        whole.values_mut("m").unwrap().copy_from_slice(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        whole.values_mut("w").unwrap()[4] = 9.0;
        whole.values_mut("mean").unwrap()[0] = 7.0;
        let saved = whole.snapshot();
        let roles: Vec<(&str, Role)> = saved.entries.iter().map(|saved| (saved.tensor.as_str(), saved.role)).collect();
        let wanted =
            [("w", Role::Parameter), ("count", Role::Statistic), ("mean", Role::Statistic), ("m", Role::Moment)];
        assert_eq!(roles, wanted);
        let mut halves = Store::new(&graph(Some(2)), 1);
        halves.restore(&saved).unwrap();
        assert_eq!(
            (halves.values("m@0").unwrap(), halves.values("m@1").unwrap()),
            (&[0.0, 1.0][..], &[2.0, 3.0, 4.0, 5.0][..])
        );
        assert_eq!(halves.digest(), whole.digest());
        // And back, from two that are cut elsewhere, in any order.
        let mut other = Store::new(&graph(Some(5)), 1);
        let mut parts = halves.snapshot();
        parts.entries.reverse();
        other.restore(&parts).unwrap();
        let mut back = Store::new(&graph(None), 2);
        back.restore(&other.snapshot()).unwrap();
        assert_eq!(back.snapshot(), saved);
    }

    #[test]
    fn what_is_missing_or_of_another_model_is_named_and_nothing_changes() {
        let store = Store::new(&graph(Some(2)), 1);
        let mut saved = store.snapshot();
        let mut other = Store::new(&graph(None), 1);
        other.values_mut("w").unwrap()[0] = 3.0;
        let before = other.snapshot();
        saved.entries.retain(|saved| saved.start != 2);
        let error = other.restore(&saved).unwrap_err();
        assert_eq!(error, RestoreError::Missing { tensor: "m".into(), element: 2 });
        saved = store.snapshot();
        saved.entries[0].whole = [3, 2].into();
        let error = other.restore(&saved).unwrap_err().to_string();
        assert!(error.starts_with("`w` was saved as f32 of shape [3, 2], but is f32 of shape [2, 3] here"), "{error}");
        assert_eq!(other.snapshot(), before);
    }
}
