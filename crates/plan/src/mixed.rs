//! A step in which layers differ in what they compute again, from steps in which all compute the same again.

use crate::anatomy::Anatomy;
use kolo_parallel::Recompute;

/// One for each of [`Recompute::ALL`].
pub const KINDS: usize = Recompute::ALL.len();

impl Anatomy {
    /// The step whose layers compute `what` again, one by one in the order of the forward pass. `all` are the steps in which every
    /// layer computes the same again, by [`Recompute`]. `None` if they do not have so many layers.
    ///
    /// What a layer saves and takes is its own: what crosses to the next is kept whatever either computes again.
    pub fn mixed(all: [&Anatomy; KINDS], what: &[Recompute]) -> Option<Anatomy> {
        let whole = all[Recompute::None as usize];
        if all.iter().any(|one| one.order.len() != what.len() + 2) {
            return None;
        }
        let mut begins = [0; KINDS];
        let mut units = Vec::new();
        for (begin, one) in begins.iter_mut().zip(all) {
            *begin = units.len();
            units.extend(one.units.iter().cloned());
        }
        let ends = [Recompute::None];
        let kinds = ends.iter().chain(what).chain(&ends).map(|kind| *kind as usize);
        let order = kinds.enumerate().map(|(at, kind)| begins[kind] + all[kind].order[at]).collect();
        Some(Anatomy { units, order, ..whole.clone() })
    }
}
