//! Limits of the system that were reached.

use std::io;

/// Error numbers of Linux: too many open files of this process, and of the system.
const EMFILE: i32 = 24;
const ENFILE: i32 = 23;

/// What to do if a file could not be opened because too many are; `None` if that was not why.
pub fn open_files_hint(error: &io::Error) -> Option<&'static str> {
    let is_limit = matches!(error.raw_os_error(), Some(EMFILE | ENFILE));
    is_limit.then_some("raise the limit on open files (`ulimit -n`)")
}

/// The same of any limit on files: how many, and how large.
pub fn limit_hint(error: &io::Error) -> Option<&'static str> {
    match error.kind() {
        io::ErrorKind::FileTooLarge if error.raw_os_error().is_some() => {
            Some("raise the limit on the size of files (`ulimit -f`)")
        }
        _ => open_files_hint(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_too_many_files_are_too_many_files() {
        for (number, hinted) in [(EMFILE, true), (ENFILE, true), (2, false), (28, false)] {
            let error = io::Error::from_raw_os_error(number);
            assert_eq!(open_files_hint(&error).is_some(), hinted, "{error}");
            assert_eq!(error.to_string().contains("oo many open files"), hinted, "{error}");
        }
    }
}
