//! A grammar as it stands on a page, and whether it makes a text.

use std::collections::BTreeMap;

/// What a rule says.
#[derive(Debug)]
enum Part {
    Literal(String),
    Rule(String),
    /// Between question marks, in words.
    Special(String),
    Sequence(Vec<Part>),
    Choice(Vec<Part>),
    /// `[ … ]`, and with `true` `{ … }`.
    Optional(Box<Part>, bool),
}

#[derive(Debug)]
pub struct Grammar {
    rules: BTreeMap<String, Part>,
    /// Rules without white space inside: `value` and those after it.
    tokens: Vec<String>,
}

struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn peek(&mut self) -> Option<char> {
        self.rest = self.rest.trim_start();
        self.rest.chars().next()
    }

    fn take(&mut self, c: char) -> bool {
        let there = self.peek() == Some(c);
        if there {
            self.rest = &self.rest[c.len_utf8()..];
        }
        there
    }

    fn until(&mut self, end: char) -> String {
        let (inside, rest) = self.rest.split_once(end).unwrap_or_else(|| panic!("`{end}` is missing: {}", self.rest));
        self.rest = rest;
        inside.to_string()
    }

    fn name(&mut self) -> String {
        self.peek();
        let end = self.rest.find(|c: char| !c.is_alphanumeric()).unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        assert!(!name.is_empty(), "expected a name: {}", self.rest);
        self.rest = rest;
        name.to_string()
    }

    fn choice(&mut self) -> Part {
        let mut choices = vec![self.sequence()];
        while self.take('|') {
            choices.push(self.sequence());
        }
        if choices.len() == 1 { choices.remove(0) } else { Part::Choice(choices) }
    }

    fn sequence(&mut self) -> Part {
        let mut parts = Vec::new();
        while let Some(c) = self.peek().filter(|c| !"|;)]}".contains(*c)) {
            parts.push(self.part(c));
        }
        Part::Sequence(parts)
    }

    fn part(&mut self, first: char) -> Part {
        if !"\"'?([{".contains(first) {
            return Part::Rule(self.name());
        }
        self.take(first);
        let closed = |reader: &mut Self, end: char, repeated| {
            let inside = Box::new(reader.choice());
            assert!(reader.take(end), "expected `{end}`: {}", reader.rest);
            Part::Optional(inside, repeated)
        };
        match first {
            '"' | '\'' => Part::Literal(self.until(first)),
            '?' => Part::Special(self.until('?').trim().into()),
            '(' => {
                let inside = self.choice();
                assert!(self.take(')'), "expected `)`: {}", self.rest);
                inside
            }
            '[' => closed(self, ']', false),
            _ => closed(self, '}', true),
        }
    }
}

impl Grammar {
    pub fn read(text: &str) -> Self {
        let mut reader = Reader { rest: text };
        let (mut rules, mut tokens) = (BTreeMap::new(), Vec::new());
        while reader.peek().is_some() {
            let name = reader.name();
            assert!(reader.take('='), "expected `=` after {name}");
            let part = reader.choice();
            assert!(reader.take(';'), "expected `;` at the end of {name}: {}", reader.rest);
            if name == "value" || !tokens.is_empty() {
                tokens.push(name.clone());
            }
            assert!(rules.insert(name.clone(), part).is_none(), "two rules {name}");
        }
        Self { rules, tokens }
    }

    /// Whether `rule` makes the whole text, whose lines are trimmed and hold no comments.
    pub fn makes(&self, rule: &str, text: &str) -> bool {
        self.rule(rule, text, 0, false).contains(&text.len())
    }

    fn rule(&self, name: &str, text: &str, from: usize, token: bool) -> Vec<usize> {
        let part = self.rules.get(name).unwrap_or_else(|| panic!("the grammar has no rule {name}"));
        let begins = !token && self.tokens.iter().any(|token| token == name) && name != "newline";
        let from = if begins { skip(text, from) } else { from };
        self.ends(part, text, from, token || begins)
    }

    /// Where the part can end if it begins at `from`.
    fn ends(&self, part: &Part, text: &str, from: usize, token: bool) -> Vec<usize> {
        let mut ends = match part {
            Part::Literal(literal) => {
                let from = if token { from } else { skip(text, from) };
                text[from..].starts_with(literal.as_str()).then(|| from + literal.len()).into_iter().collect()
            }
            Part::Rule(name) => self.rule(name, text, from, token),
            Part::Special(words) => special(words, text, from).into_iter().collect(),
            Part::Sequence(parts) => parts.iter().fold(vec![from], |starts, part| {
                let mut ends: Vec<usize> =
                    starts.iter().flat_map(|start| self.ends(part, text, *start, token)).collect();
                ends.sort_unstable();
                ends.dedup();
                ends
            }),
            Part::Choice(parts) => parts.iter().flat_map(|part| self.ends(part, text, from, token)).collect(),
            Part::Optional(inside, repeated) => {
                let (mut all, mut next) = (vec![from], vec![from]);
                while !next.is_empty() {
                    next = next.iter().flat_map(|start| self.ends(inside, text, *start, token)).collect();
                    next.sort_unstable();
                    next.dedup();
                    next.retain(|end| !all.contains(end));
                    all.extend(&next);
                    if !repeated {
                        break;
                    }
                }
                all
            }
        };
        ends.sort_unstable();
        ends.dedup();
        ends
    }
}

/// Past white space, but not past the end of a line.
fn skip(text: &str, from: usize) -> usize {
    let rest = &text[from..];
    from + rest.find(|c: char| c == '\n' || !c.is_whitespace()).unwrap_or(rest.len())
}

fn special(words: &str, text: &str, from: usize) -> Option<usize> {
    let line = text[from..].find('\n').map_or(text.len(), |end| from + end);
    let next = text[from..].chars().next();
    let one = |accept: fn(char) -> bool| next.filter(|c| accept(*c)).map(|c| from + c.len_utf8());
    match words {
        "the rest of the line, trimmed" => Some(line),
        "the end of a line" => (next == Some('\n')).then_some(from + 1),
        "any character but \" and \\" => one(|c| c != '"' && c != '\\' && c != '\n'),
        "a letter from a to z or A to Z" => one(|c| c.is_ascii_alphabetic()),
        "a letter or digit of any script" => one(char::is_alphanumeric),
        other => panic!("nothing is known of `? {other} ?`"),
    }
}
