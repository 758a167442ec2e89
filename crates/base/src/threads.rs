//! Threads for work that fewer of them do as well: where the system gives none, by a limit on processes or on memory, this one
//! does it.

use std::thread::{Builder, scope};

/// Does the same work on this thread and on others beside it, `threads` in all or as many as there are to be had. What each made
/// of it.
pub fn on_threads<R: Send>(threads: usize, work: impl Fn() -> R + Sync) -> Vec<R> {
    scope(|scope| {
        let start = |_| Builder::new().name("kolo-helper".into()).spawn_scoped(scope, &work).ok();
        let others: Vec<_> = (1..threads).map_while(start).collect();
        let mut all = vec![work()];
        all.extend(others.into_iter().map(|one| one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))));
        all
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn the_work_is_done_by_as_many_as_there_are() {
        let next = AtomicUsize::new(0);
        let share =
            || std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed)).take_while(|at| *at < 100).count();
        let done = on_threads(4, share);
        assert!((1..=4).contains(&done.len()) && done.iter().sum::<usize>() == 100, "{done:?}");
        assert_eq!(on_threads(0, || 7), [7]);
    }
}
