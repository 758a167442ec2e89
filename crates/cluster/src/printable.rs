//! Text from elsewhere, made safe to show: names, paths and what other programs said may hold codes that a terminal obeys.

use std::borrow::Cow;

/// The text with every control character but the end of a line and the tabulator written as `\u001b`, and so those that turn
/// the direction of writing. Text that is JSON stays so, and means the same.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for letter in text.chars() {
        match is_hidden(letter) {
            true => shown += &format!("\\u{:04x}", u32::from(letter)),
            false => shown.push(letter),
        }
    }
    Cow::Owned(shown)
}

fn is_hidden(letter: char) -> bool {
    let turns =
        matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    turns || (letter.is_control() && letter != '\n' && letter != '\t')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_shown() {
        assert!(matches!(printable("a line\n\tand löß 円"), Cow::Borrowed(_)));
        assert_eq!(printable("\x1b[2J\x1b]0;title\x07 \r \x7f"), r"\u001b[2J\u001b]0;title\u0007 \u000d \u007f");
        assert_eq!(printable("\u{9b}31m \u{202e}txt.exe"), r"\u009b31m \u202etxt.exe");
    }
}
