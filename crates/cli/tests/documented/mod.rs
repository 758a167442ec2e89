//! The documents say what the program says.

mod commands;

use std::path::Path;

const ERRORS: &str = include_str!("../../../../docs/errors.md");
/// Words in capitals that a message contains; others stand for a name or a number.
const ACRONYMS: &[&str] = &["CUDA", "MPI", "NVIDIA", "TOML", "UTF"];

/// A document's text or a source file, so that one can be found in the other: one kind of quote, one space between words, no
/// continued lines, and `…` for each placeholder.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let after = &rest[first.len_utf8()..];
        let placeholder = (first == '{').then(|| after.split_once('}').map(|(inside, _)| inside)).flatten();
        let placeholder = placeholder.filter(|inside| !inside.contains([' ', '\n', '{']));
        rest = after;
        if let Some(inside) = placeholder {
            plain.push('…');
            rest = &after[inside.len() + 1..];
        } else if first == '\\' && after.starts_with('\n') {
            rest = after.trim_start();
        } else if first.is_whitespace() {
            plain.push_str(if plain.ends_with(' ') { "" } else { " " });
        } else if first != '\\' {
            plain.push(if "`'\"".contains(first) { '\'' } else { first });
        }
    }
    plain
}

/// The parts of a message between its placeholders, those of two words or more.
fn parts(message: &str) -> Vec<String> {
    let is_part_of_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let message = plain(message);
    let mut open = String::new();
    for word in message.split_inclusive(|letter| !is_part_of_word(letter)) {
        let name = word.trim_end_matches(|letter| !is_part_of_word(letter));
        let stands_for_another = name.chars().all(|letter| letter.is_ascii_uppercase()) && !ACRONYMS.contains(&name);
        match !name.is_empty() && stands_for_another {
            true => open.extend(["…", &word[name.len()..]]),
            false => open.push_str(word),
        }
    }
    let trimmed = open.split('…').map(|part| part.trim_matches([' ', '\'', ':', ';', ',']).to_string());
    trimmed.filter(|part| part.contains(' ')).collect()
}

/// The lines of all source files that have text in quotes.
fn sources(folder: &Path, found: &mut String) {
    for path in std::fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let mut continues = false;
            let has_text = |line: &&str| {
                let continued = std::mem::replace(&mut continues, line.ends_with("\\\n"));
                continued || line.contains('"')
            };
            found.extend(text.split_inclusive('\n').filter(has_text));
        }
    }
}

/// Every message that docs/errors.md quotes is one that a crate prints.
#[test]
fn quoted_messages_are_in_the_source() {
    let mut source = String::new();
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap() {
        sources(&entry.unwrap().path().join("src"), &mut source);
    }
    let source = plain(&source);
    let visible = ERRORS.split("## What a user can see").nth(1).and_then(|text| text.split("\n## ").next()).unwrap();
    let quoted = visible.split('`').skip(1).step_by(2).filter(|text| text.contains(' ') && !text.starts_with("kolo "));
    let quoted: Vec<&str> = quoted.collect();
    assert!(quoted.len() > 100, "{} messages", quoted.len());
    let unknown = |message: &&&str| parts(message).iter().any(|part| !source.contains(part));
    let unknown: Vec<&&str> = quoted.iter().filter(unknown).collect();
    assert!(unknown.is_empty(), "no crate says {unknown:#?}");
}
