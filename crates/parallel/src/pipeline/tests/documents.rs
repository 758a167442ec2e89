//! `docs/schedules.md` and its pictures are what the code gives. `KOLO_BLESS=1` writes them anew; read the difference before you
//! commit it.

use super::build;
use crate::pipeline::draw::{COLUMNS_MIN, draw_svg, draw_text};
use crate::pipeline::text::parse;
use crate::pipeline::{Durations, FAMILIES, StageDurations, Timeline, Verified, verify};
use std::path::PathBuf;

fn docs(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name)
}

fn check(name: &str, got: &str) {
    let path = docs(name);
    if std::env::var_os("KOLO_BLESS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        return std::fs::write(path, got).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(stored == got, "{} differs; it should be\n{got}", path.display());
}

fn textbook(verified: &Verified) -> Timeline {
    verified.timeline(&Durations::textbook(verified.schedule().stages)).unwrap()
}

/// What a block whose fence says `text schedule 1f1b 4 8 1` or `text picture …` holds; `text own` is any right schedule.
fn block(words: &[&str], content: &str) -> String {
    match words {
        ["text", what, name, ranks, micro_batches, chunks] => {
            let [ranks, micro_batches, chunks] = [ranks, micro_batches, chunks].map(|word| word.parse().unwrap());
            let schedule = build(name, ranks, micro_batches, chunks);
            let verified = verify(&schedule).unwrap();
            match *what {
                "schedule" => schedule.to_string(),
                "picture" => draw_text(&verified, &textbook(&verified), 120),
                other => panic!("{other}"),
            }
        }
        ["text", "own"] => {
            verify(&parse(content).unwrap_or_else(|e| panic!("{e}\n{content}")))
                .unwrap_or_else(|e| panic!("{e}\n{content}"));
            content.to_string()
        }
        _ => content.to_string(),
    }
}

#[test]
fn the_document_shows_what_the_code_gives() {
    let document = std::fs::read_to_string(docs("schedules.md")).unwrap();
    let (mut got, mut content, mut fence) = (String::new(), String::new(), None);
    let mut blocks = 0;
    for line in document.lines() {
        match (line.strip_prefix("```"), &fence) {
            (Some(words), None) => {
                fence = Some(words.to_string());
                got += &format!("{line}\n");
            }
            (Some(_), Some(words)) => {
                let words: Vec<&str> = words.split_whitespace().collect();
                blocks += usize::from(words.len() > 1);
                got += &block(&words, &content);
                got += &format!("{line}\n");
                (content, fence) = (String::new(), None);
            }
            (None, Some(_)) => content += &format!("{line}\n"),
            (None, None) => got += &format!("{line}\n"),
        }
    }
    assert!(blocks >= 2 * FAMILIES.len(), "every family has its text and its picture");
    check("schedules.md", &got);
}

#[test]
fn pictures_of_all_families() {
    for family in &FAMILIES {
        let chunks = if family.name == "interleaved" { 2 } else { 1 };
        let verified = verify(&build(family.name, 4, 8, chunks)).unwrap();
        check(&format!("schedules/{}.svg", family.name), &draw_svg(&verified, &textbook(&verified)).unwrap());
    }
}

#[test]
fn a_picture_keeps_to_its_width() {
    let verified = verify(&build("1f1b", 2, 2, 1)).unwrap();
    let labelled = "rank 0  F0 F1 ······B0─── ···B1───\nrank 1  ···F0 B0─── F1 B1─── ······\n";
    let picture = draw_text(&verified, &textbook(&verified), 80);
    assert!(picture.starts_with(labelled), "{picture}");
    let chunks = verify(&build("interleaved", 2, 2, 2)).unwrap();
    for (columns, start) in [(90, "rank 0  F0.0 F0.1 F2.0 "), (60, "rank 0  F0 F1 F0 "), (40, "rank 0  FF")] {
        let picture = draw_text(&chunks, &textbook(&chunks), columns);
        assert!(picture.starts_with(start), "{columns}\n{picture}");
    }
    let large = verify(&build("bidirectional", 12, 64, 1)).unwrap();
    for columns in [0, 40, 79, 120] {
        let picture = draw_text(&large, &textbook(&large), columns);
        let widest = picture.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(widest <= columns.max(COLUMNS_MIN), "{picture}");
        assert!(picture.lines().nth(1).unwrap().starts_with("rank 1   "), "{picture}");
    }
}

/// No durations make a picture fail, and no picture grows without bound.
#[test]
fn odd_durations_are_drawn() {
    let verified = verify(&build("zero-bubble", 3, 5, 1)).unwrap();
    for time in [0.0, 5e-324, 1e-9, 1.0 / 3.0, 1e200] {
        for transfer in [0.0, 7.0, 1e200] {
            let stage = StageDurations { forward: time, backward: 1.0, input: 1.0, weight: time, transfer };
            let timeline = verified.timeline(&Durations::uniform(3, stage)).unwrap();
            assert!(draw_text(&verified, &timeline, 100).lines().count() < 10);
            let picture = draw_svg(&verified, &timeline).unwrap();
            assert!(picture.len() < 20_000 && !picture.contains("NaN") && !picture.contains("inf\""), "{picture}");
        }
    }
    let large = verify(&build("gpipe", 16, 1024, 1)).unwrap();
    assert!(draw_svg(&large, &textbook(&large)).unwrap_err().to_string().contains("too many for a picture"));
}
