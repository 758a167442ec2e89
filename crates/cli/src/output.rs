//! Standard output and standard error. Nothing else in this crate writes to them.
//!
//! The macros stand in for those of the standard library, which panic where a write fails. Here the command goes on, since a
//! run must not be lost with its words, and fails at its end. A reader who has enough, as `head` does, ends it without a
//! word. What is printed may quote names from anywhere: codes that a terminal would obey are shown, not passed on.

use crate::fail::Failure;
use kolo_base::lock;
use kolo_cluster::logs::OutputStream;
use kolo_cluster::{one_message, printable};
use std::fmt::Arguments;
use std::io::{Error, ErrorKind, Result, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a shell reports for a process that wrote to a pipe without a reader: 128 + SIGPIPE.
const EXIT_READER_GONE: i32 = 141;

/// The first write to standard output that failed.
static LOST: Mutex<Option<Error>> = Mutex::new(None);

/// Whether standard output was closed when this process started. The standard library opens something else in its place
/// before `main`, so that nothing could tell later.
static CLOSED: AtomicBool = AtomicBool::new(false);

extern "C" fn look_at_standard_output() {
    // SAFETY: asks about a descriptor, and changes nothing.
    if unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) } < 0 {
        CLOSED.store(true, Ordering::Relaxed);
    }
}

// SAFETY: the loader calls each entry of this section once, before `main`; this one only makes a system call.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = look_at_standard_output;

/// As the standard library's, but a write that fails is told at the end.
macro_rules! println {
    ($($argument:tt)*) => { $crate::output::write(format_args!("{}\n", format_args!($($argument)*))) };
}
macro_rules! print {
    ($($argument:tt)*) => { $crate::output::write(format_args!($($argument)*)) };
}
pub(crate) use {print, println};

pub fn write(text: Arguments<'_>) {
    keep(write_out(printable(&text.to_string()).as_bytes()));
}

/// Hands what was printed to the reader now.
pub fn flush() {
    keep(std::io::stdout().flush());
}

/// Standard output as a place to write, for data: what is written comes through as it is.
#[derive(Debug)]
pub struct Out;

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        write_out(bytes).map(|()| bytes.len()).map_err(end_with_reader)
    }

    fn flush(&mut self) -> Result<()> {
        std::io::stdout().flush().map_err(end_with_reader)
    }
}

/// A message on standard error, if anybody hears it. Its further lines are indented.
pub fn print_error(text: &str) {
    kolo_cluster::logs::print_error(&one_message(text));
}

/// Lines on standard error.
pub fn print_lines(text: &str) {
    kolo_cluster::logs::print_error(text);
}

/// Passes on what a worker printed, as it is.
pub fn relay(source: OutputStream, bytes: &[u8]) -> Result<()> {
    match source {
        OutputStream::Out => write_out(bytes).and_then(|()| std::io::stdout().flush()).map_err(end_with_reader),
        // Complaints that nobody hears are no reason to fail.
        OutputStream::Err => std::io::stderr().write_all(bytes).or(Ok(())),
    }
}

/// Takes note of how somebody else's writing to standard output went.
pub fn keep(outcome: Result<()>) {
    if let Err(error) = outcome.map_err(end_with_reader) {
        lock(&LOST).get_or_insert(error);
    }
}

/// Whether all that was printed was written.
pub fn finish() -> std::result::Result<(), Failure> {
    keep(std::io::stdout().flush());
    match lock(&LOST).take() {
        Some(error) => {
            Err(Failure::job(format!("standard output: {error}"), "free some space there, or write elsewhere"))
        }
        None => Ok(()),
    }
}

fn write_out(bytes: &[u8]) -> Result<()> {
    if CLOSED.load(Ordering::Relaxed) && !bytes.is_empty() {
        return Err(Error::from_raw_os_error(libc::EBADF));
    }
    std::io::stdout().write_all(bytes)
}

fn end_with_reader(error: Error) -> Error {
    if error.kind() == ErrorKind::BrokenPipe {
        std::process::exit(EXIT_READER_GONE);
    }
    error
}
