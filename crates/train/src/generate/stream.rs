//! Text as it comes, token by token. A character may take several tokens; it is held back until it is whole.

/// Turns a growing list of tokens into pieces of text.
#[derive(Clone, Debug, Default)]
pub struct TextStream {
    tokens: Vec<u32>,
    /// Tokens before it were told. Those from `context` on are decoded with the new ones: a tokenizer may decode the first
    /// of a list in another way.
    context: usize,
    told: usize,
}

/// Tokens that may be held back: no character takes more than four bytes.
const HELD_MAX: usize = 8;
/// What a decoder puts where bytes are no character.
const REPLACEMENT: char = '\u{FFFD}';

impl TextStream {
    /// Adds a token; the text that is whole now.
    pub fn push(&mut self, token: u32, decode: impl Fn(&[u32]) -> String) -> String {
        self.tokens.push(token);
        let (before, all) = (decode(&self.tokens[self.context..self.told]), decode(&self.tokens[self.context..]));
        let held = all.ends_with(REPLACEMENT) && self.tokens.len() - self.told < HELD_MAX;
        if held || all.len() <= before.len() || !all.is_char_boundary(before.len()) {
            return String::new();
        }
        (self.context, self.told) = (self.told, self.tokens.len());
        all[before.len()..].into()
    }

    /// What was held back.
    pub fn finish(self, decode: impl Fn(&[u32]) -> String) -> String {
        let (before, all) = (decode(&self.tokens[self.context..self.told]), decode(&self.tokens[self.context..]));
        all.get(before.len()..).unwrap_or_default().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(tokens: &[u32]) -> String {
        String::from_utf8_lossy(&tokens.iter().map(|token| *token as u8).collect::<Vec<_>>()).into_owned()
    }

    fn pieces(text: &[u8]) -> (Vec<String>, String) {
        let mut stream = TextStream::default();
        let pieces = text.iter().map(|byte| stream.push(u32::from(*byte), bytes)).collect();
        (pieces, stream.finish(bytes))
    }

    #[test]
    fn characters_are_never_broken() {
        let text = "aß€😀b";
        let (pieces, rest) = pieces(text.as_bytes());
        assert_eq!((pieces.concat() + &rest, rest.as_str()), (text.to_string(), ""));
        assert!(pieces.iter().all(|piece| piece.chars().count() <= 1 && !piece.contains(REPLACEMENT)), "{pieces:?}");
    }

    #[test]
    fn bytes_that_are_no_character_come_through_in_the_end() {
        let (pieces, rest) = pieces(b"a\xff\xff\xff\xff\xff\xff\xff\xff\xffb\xc3");
        let whole = pieces.concat() + &rest;
        assert!(whole.starts_with('a') && whole.contains('b') && whole.ends_with(REPLACEMENT), "{whole:?}");
        assert_eq!(whole.chars().filter(|char| *char == REPLACEMENT).count(), 10);
    }
}
