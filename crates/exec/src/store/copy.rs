//! Copying what a store holds while a step computes.
//!
//! Parameters and state change only when a step finishes. So a thread may copy them from the end of one step until the next
//! one is about to update them, and training waits for the copy there, if it waits at all.

use super::{Entry, Mirrored, Store};
use crate::memory::Memory;
use kolo_graph::Type;
use std::ops::Range;
use std::sync::Arc;

/// Some of a store's entries, to be copied by another thread. It keeps the memory alive, not its contents.
#[derive(Debug)]
pub struct Copier {
    entries: Vec<Entry>,
    /// Address and length of each entry.
    runs: Vec<(*const u8, usize)>,
    _memories: [Arc<Memory>; 2],
    mirrored: Arc<Mirrored>,
}

// SAFETY: the memory may be read from any thread; when is the contract of `copy`.
unsafe impl Send for Copier {}

/// A thread that copies less is not worth its start.
const THREAD_BYTES_MIN: usize = 32 << 20;

/// What one thread copies: from where, to where, and how many bytes.
#[derive(Clone, Default)]
struct Part(Vec<(*const u8, *mut u8, usize)>);

// SAFETY: the parts of a copy write different memory, and nobody writes what they read.
unsafe impl Sync for Part {}

impl Part {
    fn copy(&self) {
        for (from, to, bytes) in &self.0 {
            // SAFETY: both lie inside memories that whoever made the part keeps alive, and no two parts meet.
            unsafe { std::ptr::copy_nonoverlapping(*from, *to, *bytes) };
        }
    }
}

impl Store {
    /// The entries of these numbers, to be copied elsewhere.
    pub fn copier(&self, numbers: &[usize]) -> Copier {
        let entries: Vec<Entry> = numbers.iter().map(|number| self.entries[*number].clone()).collect();
        let run = |entry: &Entry| (self.address(entry).cast_const(), entry.ty.bytes());
        let runs = entries.iter().map(run).collect();
        self.copier_with(entries, runs)
    }

    fn copier_with(&self, entries: Vec<Entry>, runs: Vec<(*const u8, usize)>) -> Copier {
        let mirrored = Arc::clone(&self.mirrored);
        Copier { entries, runs, _memories: [Arc::clone(&self.params), Arc::clone(&self.states)], mirrored }
    }

    /// All state, and of the parameters those that lie in these runs of their memory, in elements.
    pub fn copier_of_runs(&self, runs: &[Range<usize>]) -> Copier {
        let (mut entries, mut places, all) = (Vec::new(), Vec::new(), 0..self.params_elements());
        for entry in &self.entries {
            for run in if entry.is_param() { runs } else { std::slice::from_ref(&all) } {
                let kept = Self::kept(entry, Some(run));
                if !kept.is_empty() {
                    let (data, bytes) = self.run(entry, &kept);
                    places.push((data.cast_const(), bytes));
                    let ty = Type::new(entry.ty.dtype, [kept.len()]);
                    entries.push(Entry { region: entry.region.skip(kept.start), ty, ..entry.clone() });
                }
            }
        }
        self.copier_with(entries, places)
    }

    /// Replaces elements of a tensor, as many as the store has of them.
    pub fn write_run(&mut self, tensor: &str, start: usize, bytes: &[u8]) {
        self.mirrored.write_host();
        for entry in self.entries.iter().filter(|entry| entry.tensor == tensor) {
            let size = entry.ty.dtype.bytes();
            let given = start..start + bytes.len() / size;
            for (local, own, len) in entry.region.runs(0..entry.ty.elements()) {
                let (from, to) = (given.start.max(own), given.end.min(own + len));
                if from < to {
                    let (data, _) = self.run(entry, &(local + from - own..local + to - own));
                    let bytes = &bytes[(from - given.start) * size..(to - given.start) * size];
                    // SAFETY: `&mut self` is exclusive, and these elements lie in the entry's run.
                    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), data, bytes.len()) };
                }
            }
        }
    }

    /// The bytes of the entry of this number.
    pub fn bytes_of(&self, number: usize) -> &[u8] {
        let entry = &self.entries[number];
        // SAFETY: the entry lies inside the memory; sessions take the store mutably while they run.
        unsafe { std::slice::from_raw_parts(self.address(entry), entry.ty.bytes()) }
    }

    /// Replaces the contents of every entry: `fill` is given the entry and its bytes, one after the other.
    pub fn fill<E>(&mut self, mut fill: impl FnMut(&Entry, &mut [u8]) -> Result<(), E>) -> Result<(), E> {
        self.mirrored.write_host();
        for entry in &self.entries {
            // SAFETY: the entry lies inside the memory, and `&mut self` is exclusive.
            fill(entry, unsafe { std::slice::from_raw_parts_mut(self.address(entry), entry.ty.bytes()) })?;
        }
        Ok(())
    }
}

impl Copier {
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub fn bytes(&self) -> usize {
        self.runs.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Replaces what `out` holds by the contents of all entries, one after the other.
    ///
    /// # Safety
    /// Nothing writes the store meanwhile.
    pub unsafe fn copy(&self, out: &mut Vec<u8>) {
        // SAFETY: the contract is the same.
        unsafe { self.copy_on(1, out) };
    }

    /// The same with so many threads, if there is enough to copy. Each takes its time from another core, where as many lanes
    /// compute: none of them is held up for the whole of it.
    ///
    /// # Safety
    /// Nothing writes the store meanwhile.
    pub unsafe fn copy_on(&self, threads: usize, out: &mut Vec<u8>) {
        // SAFETY: the contract is the same.
        unsafe { self.copy_in_parts(threads.min(self.bytes() / THREAD_BYTES_MIN), out) };
    }

    /// # Safety
    /// Nothing writes the store meanwhile.
    unsafe fn copy_in_parts(&self, parts: usize, out: &mut Vec<u8>) {
        self.mirrored.read_host();
        let total = self.bytes();
        out.clear();
        out.reserve_exact(total);
        let mut parts: Vec<Part> = vec![Part::default(); parts.max(1)];
        let share = total.div_ceil(parts.len()).max(1);
        let (mut at, base) = (0, out.as_mut_ptr());
        for (data, bytes) in &self.runs {
            let mut done = 0;
            while done < *bytes {
                let part = at / share;
                let piece = (bytes - done).min((part + 1) * share - at);
                // SAFETY: inside the run, and inside the memory that was reserved for all of them.
                parts[part].0.push(unsafe { (data.add(done), base.add(at), piece) });
                (done, at) = (done + piece, at + piece);
            }
        }
        std::thread::scope(|scope| {
            for part in &parts[1..] {
                let helper = std::thread::Builder::new().name("kolo-copy".into());
                if helper.spawn_scoped(scope, || part.copy()).is_err() {
                    part.copy();
                }
            }
            parts[0].copy();
        });
        // SAFETY: reserved above, and the parts cover all of it.
        unsafe { out.set_len(total) };
    }

    /// The contents of each entry in a copy.
    pub fn split<'c>(&'c self, copy: &'c [u8]) -> impl Iterator<Item = (&'c Entry, &'c [u8])> {
        let mut rest = copy;
        self.entries.iter().zip(&self.runs).map(move |(entry, (_, bytes))| {
            let (own, others) = rest.split_at(*bytes);
            rest = others;
            (entry, own)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::{Builder, Init, Type};
    use kolo_ops::prelude::*;

    #[test]
    fn a_copy_has_the_chosen_entries_and_fills_another_store() {
        let builder = Builder::new();
        let [a, b] = ["a", "b"].map(|name| builder.param(name, [3], Init::Constant(1.5)));
        let m = builder.state("m", Type::f32([2]), Init::ZEROS);
        builder.output("y", a.add(b));
        builder.update(m, m.scale(2.0));
        let graph = builder.finish().unwrap();
        let mut store = Store::new(&graph, 1);
        store.values_mut("m").unwrap().copy_from_slice(&[4.0, 5.0]);
        let number = |name: &str| store.entries().iter().position(|entry| entry.name == name).unwrap();
        let copier = store.copier(&[number("m"), number("a")]);
        let mut copy = vec![9; 100];
        // SAFETY: nobody writes the store here.
        unsafe { copier.copy(&mut copy) };
        let found: Vec<(&str, usize)> =
            copier.split(&copy).map(|(entry, bytes)| (entry.name.as_str(), bytes.len())).collect();
        assert_eq!(found, [("m", 8), ("a", 12)]);
        let mut other = Store::new(&graph, 2);
        let parts: Vec<(String, Vec<u8>)> =
            copier.split(&copy).map(|(e, bytes)| (e.name.clone(), bytes.to_vec())).collect();
        other
            .fill(|entry, out| {
                let Some((_, bytes)) = parts.iter().find(|(name, _)| *name == entry.name) else {
                    return Err(entry.name.clone());
                };
                out.copy_from_slice(bytes);
                Ok(())
            })
            .unwrap_err();
        assert_eq!(copy.len(), 20);
        assert_eq!(store.bytes_of(number("m")), &copy[..8]);
    }

    #[test]
    fn runs_of_the_parameters_memory_are_copied_and_written_back() {
        let builder = Builder::new();
        let [a, b] = ["a", "b"].map(|name| builder.param(name, [20], Init::Constant(1.5)));
        let m = builder.state("m", Type::f32([2]), Init::ZEROS);
        builder.output("y", a.add(b));
        builder.update(m, m.scale(2.0));
        let mut store = Store::new(&builder.finish().unwrap(), 1);
        let (first, second) = (store.entries()[0].tensor.clone(), store.entries()[1].tensor.clone());
        store.values_mut(&first).unwrap()[7] = 3.0;
        store.values_mut(&second).unwrap()[0] = 4.0;
        // Each tensor has 32 elements of the memory, with its padding.
        let copier = store.copier_of_runs(&[7..9, 30..33]);
        let found: Vec<(&str, usize, usize)> =
            copier.entries().iter().map(|e| (e.tensor.as_str(), e.region.start, e.ty.elements())).collect();
        assert_eq!(found, [(first.as_str(), 7, 2), (second.as_str(), 0, 1), ("m", 0, 2)]);
        let mut copy = Vec::new();
        // SAFETY: nobody writes the store here.
        unsafe { copier.copy(&mut copy) };
        store.values_mut(&first).unwrap().fill(0.0);
        store.values_mut(&second).unwrap().fill(0.0);
        let parts: Vec<(Entry, Vec<u8>)> =
            copier.split(&copy).map(|(entry, bytes)| (entry.clone(), bytes.to_vec())).collect();
        parts.iter().for_each(|(entry, bytes)| store.write_run(&entry.tensor, entry.region.start, bytes));
        assert_eq!(store.values(&first).unwrap()[6..10], [0.0, 3.0, 1.5, 0.0]);
        assert_eq!(store.values(&second).unwrap()[..2], [4.0, 0.0]);
        let whole = copy.clone();
        for parts in 1..=5 {
            // SAFETY: as above.
            unsafe { copier.copy(&mut copy) };
            let now = copy.clone();
            // SAFETY: as above.
            unsafe { copier.copy_in_parts(parts, &mut copy) };
            assert!(copy == now && copy.len() == whole.len(), "{parts} parts");
        }
    }
}
