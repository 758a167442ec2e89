//! A fence around libraries that decode what a file holds: a panic of theirs on damaged bytes becomes an error that names
//! the file, and prints nothing.

use crate::error::ReadError;
use crate::files;
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Once;

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Panics of guarded code are reported as errors, so the message of the standard hook would only confuse.
fn quieten() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                before(info);
            }
        }));
    });
}

fn text(panic: &(dyn Any + Send)) -> &str {
    let owned = || panic.downcast_ref::<String>().map(String::as_str);
    panic.downcast_ref::<&str>().copied().or_else(owned).unwrap_or("no message")
}

/// Runs `decode` over the contents of `file`. An error that does not say where it arose gets the byte that was read last. What it was working on must not be used after an error.
pub(crate) fn guarded<T>(file: &Path, decode: impl FnOnce() -> Result<T, ReadError>) -> Result<T, ReadError> {
    quieten();
    let outer = GUARDED.replace(true);
    files::forget_last_read();
    let result = catch_unwind(AssertUnwindSafe(decode));
    GUARDED.set(outer);
    let result = result.unwrap_or_else(|panic| {
        let message = format!("the decoder cannot make sense of its contents ({})", text(&*panic));
        Err(ReadError::new(message, "the file is damaged or cut short; copy or make it again").in_file(file))
    });
    result.map_err(|error| ReadError { offset: error.offset.or(files::last_read()), ..error })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error_of_the_file() {
        let empty: Vec<u8> = Vec::new();
        let error = guarded(Path::new("a.parquet"), || Ok(empty[3])).unwrap_err();
        assert!(
            error.to_string().contains("a.parquet: the decoder cannot make sense of its contents (index out of bounds")
        );
        assert_eq!(guarded(Path::new("a.parquet"), || Ok(5)), Ok(5));
        assert!(!GUARDED.get());
    }
}
