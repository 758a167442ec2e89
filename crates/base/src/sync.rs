//! Locks whose poison is ignored: a thread that panicked has its own way of being reported, and nothing that kolo keeps
//! behind a lock is half-written across a panic.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shared access.
pub fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Exclusive access.
pub fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until notified, or for no reason.
pub fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// The same, at most this long.
pub fn wait_timeout<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>, at_most: Duration) -> MutexGuard<'a, T> {
    condition.wait_timeout(guard, at_most).unwrap_or_else(PoisonError::into_inner).0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_panic_leaves_the_value_usable() {
        let value = Arc::new((Mutex::new(1), Condvar::new()));
        let theirs = Arc::clone(&value);
        let panicked = std::thread::spawn(move || {
            let mut guard = lock(&theirs.0);
            *guard = 2;
            panic!("on purpose");
        });
        assert!(panicked.join().is_err() && value.0.is_poisoned());
        let guard = wait_timeout(&value.1, lock(&value.0), Duration::from_millis(1));
        assert_eq!(*guard, 2);
    }
}
