//! `docs/ir.md` against the parser: the page's grammar makes what the parser reads and nothing else, its examples read and
//! print, and its wrong examples give the errors it shows.

mod ebnf;

use ebnf::Grammar;
use kolo_graph::rng::Stream;
use kolo_graph::{Builder, Tensor, text, verify};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/ir.md");

/// What begins a message about the form of a text. Others are about its meaning, which a grammar does not know.
const FORM: [&str; 8] = [
    "expected `",
    "expected a name",
    "expected a number",
    "expected a whole number",
    "unexpected `",
    "text is not closed",
    "only \\\"",
    "the graph is not closed",
];

fn page() -> String {
    std::fs::read_to_string(PAGE).unwrap()
}

/// The blocks of the page that open with this word after the backquotes.
fn blocks(page: &str, kind: &str) -> Vec<String> {
    let (mut blocks, mut inside): (Vec<String>, Option<(bool, String)>) = (Vec::new(), None);
    for line in page.lines() {
        match (&mut inside, line.strip_prefix("```")) {
            (None, Some(opened)) => inside = Some((opened == kind, String::new())),
            (Some((wanted, block)), Some(_)) => {
                if *wanted {
                    blocks.push(std::mem::take(block));
                }
                inside = None;
            }
            (Some((_, block)), None) => *block += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    blocks
}

fn grammar(page: &str) -> Grammar {
    let [grammar] = &blocks(page, "ebnf")[..] else { panic!("the page has one grammar") };
    Grammar::read(grammar)
}

/// The text as the grammar sees it: trimmed lines without comments, none of them empty.
fn plain(text: &str) -> String {
    let line = |line: &str| {
        let mut kept = String::new();
        let (mut quoted, mut escaped) = (false, false);
        for c in line.chars() {
            if c == '/' && !quoted && kept.ends_with('/') {
                kept.pop();
                break;
            }
            (quoted, escaped) = match c {
                '"' if !escaped => (!quoted, false),
                '\\' if quoted => (quoted, !escaped),
                _ => (quoted, false),
            };
            kept.push(c);
        }
        kept.trim().to_string()
    };
    text.lines().map(line).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n")
}

#[test]
fn examples_of_the_page_read_and_print() {
    let (page, registry) = (page(), kolo_ops::registry());
    let examples: Vec<String> = blocks(&page, "").into_iter().filter(|block| block.starts_with("graph {")).collect();
    assert!(examples.len() >= 2, "{} examples", examples.len());
    for example in &examples {
        let graph = text::parse(example, &registry).unwrap_or_else(|error| panic!("{error}\n{example}"));
        verify::verify(&graph).unwrap();
        assert_eq!(graph.to_string(), *example);
        assert!(grammar(&page).makes("graph", &plain(example)), "the grammar does not make\n{example}");
    }
}

/// The message of a wrong example begins at its last line that begins with `line`. `UPDATE=1` writes it into the page.
#[test]
fn wrong_examples_give_the_errors_they_show() {
    let (page, registry) = (page(), kolo_ops::registry());
    let (examples, mut updated) = (blocks(&page, "wrong"), page.clone());
    assert!(examples.len() >= 10, "{} wrong examples", examples.len());
    for example in &examples {
        let (text, shown) = example.trim_end().rsplit_once("\nline ").expect("a text and its error");
        let shown = format!("line {shown}");
        let error = text::parse(text, &registry).expect_err(example).to_string();
        if std::env::var_os("UPDATE").is_some() {
            updated = updated.replace(&format!("```wrong\n{example}```"), &format!("```wrong\n{text}\n{error}\n```"));
            continue;
        }
        assert_eq!(error, shown, "UPDATE=1 writes the page anew:\n{text}");
        let form = FORM.iter().any(|form| error.split_once(": ").is_some_and(|(_, message)| message.starts_with(form)));
        assert!(!form || !grammar(&page).makes("graph", &plain(text)), "the grammar makes it: {error}\n{text}");
    }
    if updated != page {
        std::fs::write(PAGE, updated).unwrap();
    }
}

/// Every case of every op as text, which the printer makes one way.
fn printed() -> Vec<String> {
    let graph = |case: &kolo_graph::Case| {
        let builder = Builder::new();
        let input = |(at, arg): (usize, &kolo_graph::Arg)| builder.input(&format!("x{at}"), arg.ty.clone());
        let inputs: Vec<Tensor<'_>> = case.args.iter().enumerate().map(input).collect();
        builder.apply_arc(case.op.clone(), &inputs).into_iter().for_each(|y| builder.output("y \"\\\n // y", y));
        builder.finish().unwrap().to_string()
    };
    let few = |kind: &kolo_graph::OpKind| (kind.cases)().iter().take(4).map(graph).collect::<Vec<_>>();
    kolo_ops::registry().iter().flat_map(few).collect()
}

/// The same graph as the grammar lets it be written too: white space, commas at the end of lists, comments, empty lines, the
/// default stage, a scope.
fn rewritten(text: &str, stream: &Stream, round: u64) -> String {
    let mut drawn = 0;
    let mut one_in = |count: u64| {
        drawn += 1;
        stream.below(round, drawn, count) == 0
    };
    let mut out = String::new();
    for line in text.lines() {
        let (mut quoted, mut escaped, mut before) = (false, false, ' ');
        for c in line.trim().chars() {
            let inside = quoted;
            (quoted, escaped) = match c {
                '"' if !escaped => (!quoted, false),
                '\\' if quoted => (quoted, !escaped),
                _ => (quoted, false),
            };
            let free = !inside && line.starts_with("  ") && "=(){}[],:".contains(c);
            // A list, or what stands in brackets of another kind, may end with a comma if it is not empty.
            if free && ")]}".contains(c) && !"([{".contains(before) && one_in(4) {
                out.push(',');
            }
            if free && one_in(6) {
                out.push_str("  ");
            }
            out.push(c);
            if free && c != '(' && one_in(6) {
                out.push(' ');
            }
            before = c;
        }
        if line.contains(" : ") {
            out.push_str(if one_in(3) { " # forward" } else { "" });
            out.push_str(if one_in(3) { "@ a scope, %1 = x" } else { "" });
        }
        out.push_str(if one_in(4) { " // \"not\" text" } else { "" });
        out.push_str(if one_in(6) { "\n\n" } else { "\n" });
    }
    out
}

#[test]
fn what_the_grammar_makes_is_read() {
    let (grammar, registry, stream) = (grammar(&page()), kolo_ops::registry(), Stream::new(3, "grammar"));
    for (round, text) in printed().iter().enumerate() {
        assert!(grammar.makes("graph", &plain(text)), "the grammar does not make\n{text}");
        let other = rewritten(text, &stream, round as u64);
        assert!(grammar.makes("graph", &plain(&other)), "the grammar does not make\n{other}");
        let graph = text::parse(&other, &registry).unwrap_or_else(|error| panic!("{error}\n{other}"));
        let same = graph.to_string().replace(" @a scope, %1 = x", "");
        assert_eq!(same, *text, "read from\n{other}");
    }
}

/// Of texts with small mistakes: what is read is made by the grammar, and what is refused for its form is not.
#[test]
fn mistakes_are_mistakes_to_both() {
    let (grammar, registry, stream) = (grammar(&page()), kolo_ops::registry(), Stream::new(5, "mistakes"));
    let seeds: Vec<String> = printed().into_iter().filter(|text| text.len() < 600).collect();
    let (mut read, mut refused) = (0, 0);
    for round in 0..6000u64 {
        let mut characters: Vec<char> =
            rewritten(&seeds[round as usize % seeds.len()], &stream, round).chars().collect();
        let draw = |which: u64, end: usize| stream.below(1 << 40 | round, which, end as u64) as usize;
        let (at, other) = (draw(0, characters.len()), draw(1, characters.len()));
        match draw(2, 4) {
            0 => characters[at] = " %=(){}[],:#@\"0123456789-.abfx".chars().nth(draw(3, 30)).unwrap(),
            1 => drop(characters.remove(at)),
            2 => characters.insert(at, characters[other]),
            _ => characters.swap(at, other),
        }
        let text: String = characters.into_iter().collect();
        let makes = grammar.makes("graph", &plain(&text));
        match text::parse(&text, &registry) {
            Ok(_) => {
                read += 1;
                assert!(makes, "the parser reads what the grammar does not make:\n{text}");
            }
            Err(error) if FORM.iter().any(|form| error.message.starts_with(form)) => {
                refused += 1;
                assert!(!makes, "the grammar makes what the parser refuses: {error}\n{text}");
            }
            Err(_) => {}
        }
    }
    assert!(read > 100 && refused > 100, "{read} read, {refused} refused");
}
