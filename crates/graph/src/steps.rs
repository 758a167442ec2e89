//! The work of a pass over a graph, in steps that do not depend on the machine: lookups in a graph, comparisons of ids, probes
//! of the memory plan. Tests compare the steps for a graph with those for one twice as deep, so that a search through a list
//! for every node is found before somebody trains a thousand layers. Release builds count nothing.

use std::cell::Cell;

thread_local! {
    static STEPS: Cell<u64> = const { Cell::new(0) };
}

/// Whether this build counts.
pub const ARE_COUNTED: bool = cfg!(debug_assertions);

/// This thread has done so many more steps.
#[inline(always)]
pub fn count(steps: u64) {
    if ARE_COUNTED {
        STEPS.with(|total| total.set(total.get().wrapping_add(steps)));
    }
}

/// What `work` returns, and the steps it took on this thread.
pub fn of<R>(work: impl FnOnce() -> R) -> (R, u64) {
    let before = STEPS.with(Cell::get);
    let result = work();
    (result, STEPS.with(Cell::get).wrapping_sub(before))
}
