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
    kolo_base::is_hidden(letter) && letter != '\n' && letter != '\t'
}

/// A message whose further lines are indented, as those of every message are: what it quotes cannot look like another one.
pub fn one_message(text: &str) -> Cow<'_, str> {
    if text.lines().skip(1).all(|line| line.is_empty() || line.starts_with(' ')) {
        return Cow::Borrowed(text);
    }
    let mut lines = text.lines();
    let mut shown = lines.next().unwrap_or_default().to_string();
    for line in lines {
        shown += if line.is_empty() || line.starts_with(' ') { "\n" } else { "\n  " };
        shown += line;
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_one_first_line() {
        assert!(matches!(one_message("a: b\n  hint: c\n    d"), Cow::Borrowed(_)));
        assert_eq!(one_message("a\nerror: all is lost\n  hint: c"), "a\n  error: all is lost\n  hint: c");
    }

    #[test]
    fn what_a_terminal_would_obey_is_shown() {
        assert!(matches!(printable("a line\n\tand löß 円"), Cow::Borrowed(_)));
        assert_eq!(printable("\x1b[2J\x1b]0;title\x07 \r \x7f"), r"\u001b[2J\u001b]0;title\u0007 \u000d \u007f");
        assert_eq!(printable("\u{9b}31m \u{202e}txt.exe"), r"\u009b31m \u202etxt.exe");
    }
}
