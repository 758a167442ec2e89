//! Why a sample could not be read.

use crate::unpack::Packing;
use kolo_base::ShownPath;
use kolo_base::limit_hint;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A sample could not be read. A source says what is wrong and where ([`ReadError::new`], [`ReadError::in_file`],
/// [`ReadError::at`]); whoever asked adds which sample of which source it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadError {
    /// What `data.source` names.
    pub source: String,
    pub sample: Option<usize>,
    pub file: Option<PathBuf>,
    /// Bytes from the start of the file, or of what it unpacks to.
    pub offset: Option<u64>,
    /// The file is packed with gzip or zstd, and the offset is one of what it unpacks to.
    pub is_unpacked: bool,
    pub message: String,
    pub hint: String,
    /// No other sample can be read in its place: what comes after it in the stream is out of reach, too.
    pub is_final: bool,
}

impl ReadError {
    pub fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        let (source, sample, file, offset) = (String::new(), None, None, None);
        let (message, hint) = (message.into(), hint.into());
        Self { source, sample, file, offset, is_unpacked: false, message, hint, is_final: false }
    }

    /// The system refused to read this file.
    pub fn io(file: &Path, error: &io::Error) -> Self {
        let hint = match error.kind() {
            io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => "the file is damaged; copy or make it again",
            io::ErrorKind::UnexpectedEof => "the file is truncated; copy it again",
            io::ErrorKind::NotFound => "the file existed when the job started; put it back",
            _ => "check the file, and the disk or network that it is on",
        };
        let hint = limit_hint(error).unwrap_or(hint);
        Self::new(error.to_string(), hint).in_file(file)
    }

    /// It is about this file. Whether the file is packed is looked up, so that the message can say what its offset counts.
    pub fn in_file(self, file: &Path) -> Self {
        Self { file: Some(file.into()), is_unpacked: Packing::at(file) != Packing::None, ..self }
    }

    /// It is the stream that cannot be read, not the sample.
    pub(crate) fn of_stream(self) -> Self {
        Self { is_final: true, ..self }
    }

    pub fn at(self, offset: u64) -> Self {
        Self { offset: Some(offset), ..self }
    }

    /// Which sample was asked for; what the source itself said of it stays.
    pub fn of(self, source: &str, sample: usize) -> Self {
        let name = if self.source.is_empty() { source.into() } else { self.source };
        Self { source: name, sample: self.sample.or(Some(sample)), ..self }
    }

    /// It is told although `on_error = "skip"` leaves out what can be left out, so that hint would not help.
    pub(crate) fn despite_skipping(self) -> Self {
        match self.hint.contains("on_error") {
            true => Self {
                hint: "too many records cannot be used: correct the files, or take these records out".into(),
                ..self
            },
            false => self,
        }
    }

    /// Where nothing can be skipped, a hint that says so would not help.
    pub fn without_skipping(self) -> Self {
        let remedies: Vec<&str> = self.hint.split(", or ").filter(|remedy| !remedy.contains("on_error")).collect();
        match remedies.is_empty() {
            true => self,
            false => Self { hint: remedies.join(", or "), ..self },
        }
    }

    /// What happened, in one line and without the hint.
    pub fn what(&self) -> String {
        let sample = self.sample.map_or("a sample".into(), |sample| format!("sample {sample}"));
        let of = if self.source.is_empty() { String::new() } else { format!(" of \"{}\"", self.source) };
        format!("cannot read {sample}{of}: {}", self.place_and_message())
    }

    /// File, offset and message.
    pub fn place_and_message(&self) -> String {
        let place = match (&self.file, self.offset) {
            (Some(file), Some(offset)) if self.is_unpacked => {
                format!("{}, byte {offset} of what it unpacks to: ", file.shown())
            }
            (Some(file), Some(offset)) => format!("{}, byte {offset}: ", file.shown()),
            (Some(file), None) => format!("{}: ", file.shown()),
            (None, Some(offset)) => format!("byte {offset}: "),
            (None, None) => String::new(),
        };
        format!("{place}{}", self.message)
    }
}

/// Characters of a text from a file that a message shows.
const SHOWN_CHARACTERS: usize = 60;

/// A text from a file in quotes, short enough for a message.
pub(crate) fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}\n  hint: {}", self.what(), self.hint)
    }
}

impl std::error::Error for ReadError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_where_and_what_to_do() {
        let short = ReadError::new("the file ends inside the sample", "copy the file again");
        assert_eq!(
            short.clone().in_file(Path::new("a.points")).at(480).of("points", 12).to_string(),
            "cannot read sample 12 of \"points\": a.points, byte 480: the file ends inside the sample\n  hint: copy the file again"
        );
        assert_eq!(
            short.to_string(),
            "cannot read a sample: the file ends inside the sample\n  hint: copy the file again"
        );
        assert_eq!((shown("a\"ß"), shown(&"ß".repeat(70)).chars().count()), (r#""a\"ß""#.into(), 63));
        let lost = ReadError::io(Path::new("b"), &io::ErrorKind::UnexpectedEof.into()).of("points", 3);
        assert!(lost.to_string().starts_with("cannot read sample 3 of \"points\": b: unexpected end of file\n"));
    }
}
