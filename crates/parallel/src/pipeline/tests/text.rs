//! The text form: what is printed is read, and what is not a schedule is refused with its place.

use super::{Random, all_small, build};
use crate::pipeline::text::{TEXT_BYTES_MAX, parse, parse_bytes};
use crate::pipeline::{Direction, verify};

const HEAD: &str = "ranks: 2\nstages: 2\nmicro-batches: 1\nplacement: 0 1\n";

#[test]
fn what_is_printed_is_read() {
    for (name, sizes, schedule) in all_small(5, 8, 3) {
        let read = parse(&schedule.to_string()).unwrap_or_else(|error| panic!("{name} {sizes:?}: {error}\n{schedule}"));
        assert_eq!(read, schedule);
    }
    let mut schedule = build("bidirectional", 2, 6, 1);
    schedule.placement.directions = [Direction::Up, Direction::Down].repeat(3);
    assert!(schedule.to_string().contains("\nmicro-batches up: 0 2 4\n"));
    assert_eq!(parse(&schedule.to_string()), Ok(schedule));
}

#[test]
fn space_order_and_comments_do_not_matter() {
    let text = "\n # mine\nstages : 2\nmicro-batches:1\n\tranks: 2 # two\nrank 1: F1.0\tB1.0\r\nplacement: 0 1\nrank  0: F0.0  B0.0";
    assert_eq!(parse(text), Ok(build("1f1b", 2, 1, 1)));
}

#[test]
fn errors_name_line_and_column() {
    let cases = [
        ("", "line 1, column 1: `ranks` is missing; add a line `ranks: 4`"),
        ("ranks 4", "line 1, column 1: \"ranks 4\" has no `:` after the name; "),
        ("ranks: 4 5", "line 1, column 1: `ranks` has 2 values; write one number, such as `ranks: 4`"),
        ("ranks: -4", "line 1, column 8: \"-4\" is not a valid number here; "),
        ("ranks: 4\n ranks: 4", "line 2, column 2: this line was given before; give every line once"),
        ("ranks: 4\nplacement: 0", "line 2, column 1: `stages` is not known here; give the three counts first"),
        (
            "ranks: 4\nstages: 4\nmicro-batches: 999999999",
            "line 3, column 16: 4 stages of 999999999 micro-batches are too many; stages times micro-batches are at most 262144",
        ),
        (
            "ranks: 2\nstages: 2\nmicro-batches: 1\nplacement: 0 2",
            "line 4, column 14: 2 is not one of the 2 ranks; ranks are 0 to 1",
        ),
        (
            "ranks: 2\nstages: 2\nmicro-batches: 1\nplacement: 0",
            "line 4, column 1: only 1 of 2 stages have a rank; name one rank for every stage",
        ),
        ("HEADrank 2: F0.0", "line 5, column 6: 2 is not one of the 2 ranks; ranks are 0 to 1"),
        ("HEADrank 0: F0.0 é X0.0", "line 5, column 14: \"é\" is not an action; an action is F, B, I or W, "),
        ("HEADrank 0: F0.0 é\u{1b}[31m", "line 5, column 14: \"é\\u{1b}[31m\" is not an action; "),
        ("HEADrank 0: F0.0 B0.1", "line 5, column 14: \"B0.1\" names 1 of 1 micro-batches; micro-batches are 0 to 0"),
        ("HEADrank 0: F2.0", "line 5, column 9: \"F2.0\" names 2 of 2 stages; stages are 0 to 1"),
        ("HEADrank 0: F0.0 F0.0 F0.0 F0.0 F0.0 F0.0 F0.0", "line 5, column 39: \"F0.0\" is one action too many; "),
        ("HEADrank 0: F0.0\n", "line 5, column 1: there is no line for rank 1; add a line `rank 1:` with its actions"),
        ("HEADmicro-batches up: 0-1", "line 5, column 19: 1 is not one of the 1 micro-batches; "),
        ("HEADmicro-batches up: 0 0", "line 5, column 21: \"0\" was named before; name every micro-batch once"),
        ("HEADmicro-batches up: 0", "line 5, column 1: `placement up` is missing; "),
        ("HEADrang 0: F0.0", "line 5, column 1: \"rang 0\" is not a line of a schedule; a line is `ranks:`, "),
    ];
    for (text, wanted) in cases {
        let error = parse(&text.replace("HEAD", HEAD)).unwrap_err();
        let found = format!("{error}; {}", error.hint());
        assert!(found.starts_with(wanted), "{text:?}\n{found}\n{wanted}");
    }
    let error = parse_bytes(b"ranks: 2\nab\xff").unwrap_err();
    assert_eq!(error.to_string(), "line 2, column 3: these bytes are not UTF-8");
    assert!(parse_bytes(&vec![b'\n'; TEXT_BYTES_MAX + 1]).unwrap_err().to_string().contains("too long"));
}

/// Texts with bytes changed, lines moved and parts repeated end in a schedule or an error, and schedules in a verdict.
#[test]
fn damaged_texts_do_no_harm() {
    const PIECES: [&str; 12] =
        ["rank", "ranks", ":", " ", "\n", "up", "0-3", "F0.0", "999999999", "#", "\u{2003}é", "micro-batches up: 1"];
    let texts: Vec<String> = all_small(3, 4, 2).into_iter().map(|(_, _, schedule)| schedule.to_string()).collect();
    let (mut read, mut right) = (0, 0);
    for number in 0..20_000 {
        let mut random = Random::new("texts", number as u64);
        let mut bytes = texts[number % texts.len()].clone().into_bytes();
        for _ in 0..=random.below(3) {
            let (at, end) = (random.below(bytes.len()), random.below(bytes.len()));
            let (first, last) = (at.min(end), at.max(end));
            match random.below(5) {
                0 if !bytes.is_empty() => bytes[at] = random.below(256) as u8,
                1 if !bytes.is_empty() => bytes[at] = b'0' + random.below(10) as u8,
                2 => drop(bytes.drain(first..last.min(first + 8))),
                3 => {
                    let copy = bytes[first..last].to_vec();
                    bytes.splice(at..at, copy);
                }
                _ => drop(bytes.splice(at..at, PIECES[random.below(PIECES.len())].bytes())),
            }
        }
        if let Ok(schedule) = parse_bytes(&bytes) {
            read += 1;
            right += usize::from(verify(&schedule).is_ok());
            assert_eq!(parse(&schedule.to_string()).as_ref(), Ok(&schedule));
        }
    }
    assert!(read > 200 && right > 100, "{read} {right}");
}
