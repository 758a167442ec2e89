//! Names from elsewhere in messages. A file may have any name: one with an end of a line in it could look like another message,
//! and one with control codes could make a terminal do things.

use std::fmt::{self, Write};
use std::path::Path;

/// Whether a letter does not show as itself: control characters, and those that turn the direction of writing.
pub fn is_hidden(letter: char) -> bool {
    let turns =
        matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    turns || letter.is_control()
}

/// A path as messages show it.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'p>(&'p Path);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.to_string_lossy().chars().try_for_each(|letter| match is_hidden(letter) {
            true => write!(f, "\\u{:04x}", u32::from(letter)),
            false => f.write_char(letter),
        })
    }
}

/// For paths in messages, in place of [`Path::display`].
pub trait ShownPath {
    /// On one line, with every control character as `\u000a`.
    fn shown(&self) -> Shown<'_>;
}

impl ShownPath for Path {
    fn shown(&self) -> Shown<'_> {
        Shown(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stays_on_its_line() {
        let shown = |name: &str| Path::new(name).shown().to_string();
        assert_eq!(shown("a dir/löß 円.csv"), "a dir/löß 円.csv");
        assert_eq!(shown("a\nerror: all is lost\t\x1b[2J\u{202e}"), r"a\u000aerror: all is lost\u0009\u001b[2J\u202e");
    }
}
