//! The text form of a schedule: a header, then a line per rank. `docs/schedules.md` has the grammar.
//!
//! What is printed parses to the same schedule. The parser names line and column of what it does not understand, and stops at the
//! limits of a schedule before it keeps more. It checks the form only; [`verify`](super::verify()) says whether it is right.

use super::error::ScheduleError;
use super::schedule::{Action, ActionKind, Direction, PipelineSchedule, StagePlacement, check_counts};
use std::fmt;

/// The longest text that is read. The longest that a schedule within the limits prints is shorter.
pub const TEXT_BYTES_MAX: usize = 16 << 20;
/// The longest part of a text that a message repeats.
const SHOWN_CHARS_MAX: usize = 40;

impl fmt::Display for PipelineSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { placement, .. } = self;
        writeln!(f, "ranks: {}\nstages: {}\nmicro-batches: {}", self.ranks, self.stages, self.micro_batches)?;
        writeln!(f, "placement:{}", listed(&placement.down))?;
        if let Some(up) = &placement.up {
            writeln!(f, "placement up:{}\nmicro-batches up:{}", listed(up), ranges(&placement.directions))?;
        }
        for (rank, actions) in self.actions.iter().enumerate() {
            writeln!(f, "rank {rank}:{}", listed(actions))?;
        }
        Ok(())
    }
}

fn listed<T: fmt::Display>(items: &[T]) -> String {
    items.iter().map(|item| format!(" {item}")).collect()
}

/// The micro-batches that go up, runs of them as `first-last`.
fn ranges(directions: &[Direction]) -> String {
    let mut shown = String::new();
    let mut number = 0;
    for run in directions.chunk_by(|a, b| a == b) {
        let last = number + run.len() - 1;
        if run[0] == Direction::Up {
            shown += &if number == last { format!(" {number}") } else { format!(" {number}-{last}") };
        }
        number = last + 1;
    }
    shown
}

/// Reads the text form from bytes that may be anything.
pub fn parse_bytes(bytes: &[u8]) -> Result<PipelineSchedule, ScheduleError> {
    check_length(bytes.len())?;
    match std::str::from_utf8(bytes) {
        Ok(text) => parse(text),
        Err(error) => {
            let before = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
            let (line, last) = before.split('\n').enumerate().last().unwrap_or((0, ""));
            let at = TextPosition { line: line + 1, column: last.chars().count() + 1 };
            at.error("these bytes are not UTF-8".into(), "a schedule is a text file")
        }
    }
}

/// Reads the text form.
pub fn parse(text: &str) -> Result<PipelineSchedule, ScheduleError> {
    check_length(text.len())?;
    let mut parser = Parser::default();
    let mut lines = 0;
    for (number, line) in text.lines().enumerate() {
        lines = number + 1;
        parser.line(lines, line)?;
    }
    parser.finish(TextPosition { line: lines.max(1), column: 1 })
}

fn check_length(bytes: usize) -> Result<(), ScheduleError> {
    if bytes > TEXT_BYTES_MAX {
        let message = format!("a text of {bytes} bytes is too long for a schedule");
        return Err(ScheduleError::size(message, format!("at most {TEXT_BYTES_MAX} bytes")));
    }
    Ok(())
}

/// A place in the text, from 1.
#[derive(Clone, Copy, Debug)]
struct TextPosition {
    line: usize,
    column: usize,
}

impl TextPosition {
    fn error<T>(self, message: String, hint: &str) -> Result<T, ScheduleError> {
        Err(ScheduleError::Text { line: self.line, column: self.column, message, hint: hint.into() })
    }
}

/// A word of the text where it stands.
#[derive(Clone, Copy, Debug)]
struct Word<'t> {
    place: TextPosition,
    text: &'t str,
}

impl Word<'_> {
    fn shown(&self) -> String {
        shown(self.text)
    }

    /// A number of at most nine digits.
    fn number(&self, hint: &str) -> Result<usize, ScheduleError> {
        match number(self.text) {
            Some(number) => Ok(number),
            None => self.place.error(format!("{} is not a valid number here", self.shown()), hint),
        }
    }

    fn below(&self, count: usize, what: &str) -> Result<usize, ScheduleError> {
        let hint = format!("{what} are 0 to {}", count - 1);
        match self.number(&hint)? {
            number if number < count => Ok(number),
            number => self.place.error(format!("{number} is not one of the {count} {what}"), &hint),
        }
    }
}

fn number(text: &str) -> Option<usize> {
    let digits = text.len() <= 9 && text.bytes().all(|byte| byte.is_ascii_digit());
    if digits { text.parse().ok() } else { None }
}

fn shown(text: &str) -> String {
    let start: String = text.chars().take(SHOWN_CHARS_MAX).collect();
    if start.len() < text.len() { format!("{start:?}…") } else { format!("{start:?}") }
}

/// The words after byte `from` of a line.
fn words(line_number: usize, line: &str, from: usize) -> impl Iterator<Item = Word<'_>> {
    let mut rest = &line[from..];
    let mut column = line[..from].chars().count() + 1;
    std::iter::from_fn(move || {
        let trimmed = rest.trim_start();
        column += rest[..rest.len() - trimmed.len()].chars().count();
        let end = trimmed.find(char::is_whitespace).unwrap_or(trimmed.len());
        let (text, after) = trimmed.split_at(end);
        let place = TextPosition { line: line_number, column };
        (rest, column) = (after, column + text.chars().count());
        (!text.is_empty()).then_some(Word { place, text })
    })
}

const COUNTS: [&str; 3] = ["ranks", "stages", "micro-batches"];
const KEYS: &str = "a line is `ranks:`, `stages:`, `micro-batches:`, `placement:`, `placement up:`, `micro-batches up:` or \
                    `rank N:`, and what belongs to it";
const ACTION: &str = "an action is F, B, I or W, then the stage, a point and the micro-batch: `F0.3`";

#[derive(Default)]
struct Parser {
    counts: [Option<usize>; 3],
    /// Once all counts are known.
    ranks: Vec<Option<Vec<Action>>>,
    down: Option<Vec<usize>>,
    up: Option<Vec<usize>>,
    going_up: Option<Vec<bool>>,
    actions: usize,
}

impl Parser {
    fn line(&mut self, number: usize, line: &str) -> Result<(), ScheduleError> {
        let line = line.split('#').next().unwrap_or_default();
        let Some(first) = words(number, line, 0).next() else { return Ok(()) };
        let Some(colon) = line.find(':') else {
            return first.place.error(format!("{} has no `:` after the name", shown(line.trim())), KEYS);
        };
        let mut key = words(number, &line[..colon], 0);
        let name = key.next().unwrap_or(first);
        let (second, third) = (key.next(), key.next());
        let values = words(number, line, colon + 1);
        if let Some(which) = COUNTS.iter().position(|count| *count == name.text && second.is_none()) {
            return self.count(which, name, values.collect());
        }
        let Some([ranks, stages, micro_batches]) = self.known() else {
            let missing = COUNTS.into_iter().zip(self.counts).find(|(_, count)| count.is_none());
            let missing = missing.map_or("", |(name, _)| name);
            return name.place.error(format!("`{missing}` is not known here"), "give the three counts first");
        };
        match (name.text, second.map(|word| word.text), third.is_some()) {
            ("placement", None, _) => {
                let found = placement(name.place, values, ranks, stages)?;
                set(&mut self.down, name.place, found)
            }
            ("placement", Some("up"), false) => {
                let found = placement(name.place, values, ranks, stages)?;
                set(&mut self.up, name.place, found)
            }
            ("micro-batches", Some("up"), false) => {
                let found = going_up(values, micro_batches)?;
                set(&mut self.going_up, name.place, found)
            }
            ("rank", Some(_), false) => {
                let rank = second.unwrap_or(name).below(ranks, "ranks")?;
                self.rank(name.place, rank, values)
            }
            _ => name.place.error(format!("{} is not a line of a schedule", shown(line[..colon].trim())), KEYS),
        }
    }

    fn known(&self) -> Option<[usize; 3]> {
        let [ranks, stages, micro_batches] = self.counts;
        Some([ranks?, stages?, micro_batches?])
    }

    fn count(&mut self, which: usize, name: Word<'_>, values: Vec<Word<'_>>) -> Result<(), ScheduleError> {
        let hint = format!("write one number, such as `{}: 4`", name.text);
        let [value] = values[..] else {
            return name.place.error(format!("`{}` has {} values", name.text, values.len()), &hint);
        };
        set(&mut self.counts[which], name.place, value.number(&hint)?)?;
        if let Some([ranks, stages, micro_batches]) = self.known() {
            if let Err(error) = check_counts(ranks, stages, micro_batches) {
                return value.place.error(error.to_string(), &error.hint());
            }
            self.ranks = vec![None; ranks];
        }
        Ok(())
    }

    fn rank<'t>(
        &mut self,
        place: TextPosition,
        rank: usize,
        values: impl Iterator<Item = Word<'t>>,
    ) -> Result<(), ScheduleError> {
        let Some([_, stages, micro_batches]) = self.known() else { return Ok(()) };
        let mut actions = Vec::new();
        for word in values {
            // More than this cannot be right: each stage of each micro-batch has F, I and W.
            self.actions += 1;
            if self.actions > 3 * stages * micro_batches {
                let message = format!("{} is one action too many", word.shown());
                return word.place.error(message, "every stage of every micro-batch has F and B, or F, I and W, once");
            }
            actions.push(action(word, stages, micro_batches)?);
        }
        set(&mut self.ranks[rank], place, actions)
    }

    fn finish(self, end: TextPosition) -> Result<PipelineSchedule, ScheduleError> {
        let Some([ranks, stages, micro_batches]) = self.known() else {
            let missing = COUNTS.into_iter().zip(self.counts).find(|(_, count)| count.is_none());
            let name = missing.map_or("ranks", |(name, _)| name);
            return end.error(format!("`{name}` is missing"), &format!("add a line `{name}: 4`"));
        };
        let Some(down) = self.down else {
            return end.error("`placement` is missing".into(), "add the rank of every stage: `placement: 0 1 2 3`");
        };
        let directions = match (&self.up, self.going_up) {
            (None, Some(_)) => {
                let hint = "add `placement up:` with the rank of every stage on the way up";
                return end.error("`placement up` is missing".into(), hint);
            }
            (_, going_up) => going_up.unwrap_or_else(|| vec![false; micro_batches]),
        };
        let direction = |up: bool| if up { Direction::Up } else { Direction::Down };
        let directions = directions.into_iter().map(direction).collect();
        if let Some(rank) = self.ranks.iter().position(Option::is_none) {
            return end.error(
                format!("there is no line for rank {rank}"),
                &format!("add a line `rank {rank}:` with its actions"),
            );
        }
        let actions = self.ranks.into_iter().flatten().collect();
        let placement = StagePlacement { down, up: self.up, directions };
        Ok(PipelineSchedule { ranks, stages, micro_batches, placement, actions })
    }
}

fn set<T>(field: &mut Option<T>, place: TextPosition, value: T) -> Result<(), ScheduleError> {
    match field.replace(value) {
        Some(_) => place.error("this line was given before".into(), "give every line once"),
        None => Ok(()),
    }
}

fn placement<'t>(
    place: TextPosition,
    values: impl Iterator<Item = Word<'t>>,
    ranks: usize,
    stages: usize,
) -> Result<Vec<usize>, ScheduleError> {
    let mut found = Vec::new();
    for word in values {
        if found.len() == stages {
            let message = format!("{} is the rank of a stage too many", word.shown());
            return word.place.error(message, &format!("name {stages} ranks, one for every stage"));
        }
        found.push(word.below(ranks, "ranks")?);
    }
    if found.len() < stages {
        let message = format!("only {} of {stages} stages have a rank", found.len());
        return place.error(message, "name one rank for every stage");
    }
    Ok(found)
}

/// Numbers and ranges `first-last`.
fn going_up<'t>(values: impl Iterator<Item = Word<'t>>, count: usize) -> Result<Vec<bool>, ScheduleError> {
    let mut up = vec![false; count];
    for word in values {
        let (first, last) = word.text.split_once('-').unwrap_or((word.text, word.text));
        let part = |text| Word { text, ..word }.below(count, "micro-batches");
        let (first, last) = (part(first)?, part(last)?);
        if first > last {
            let hint = "write the smaller number first";
            return word.place.error(format!("{} is an empty range", word.shown()), hint);
        }
        if up[first..=last].contains(&true) {
            return word.place.error(format!("{} was named before", word.shown()), "name every micro-batch once");
        }
        up[first..=last].fill(true);
    }
    Ok(up)
}

fn action(word: Word<'_>, stages: usize, micro_batches: usize) -> Result<Action, ScheduleError> {
    let mut letters = word.text.chars();
    let kind = letters.next().and_then(ActionKind::from_letter);
    let parts = letters.as_str().split_once('.');
    let numbers = parts.and_then(|(stage, micro_batch)| Some((number(stage)?, number(micro_batch)?)));
    let (Some(kind), Some((stage, micro_batch))) = (kind, numbers) else {
        return word.place.error(format!("{} is not an action", word.shown()), ACTION);
    };
    for (number, count, what) in [(stage, stages, "stages"), (micro_batch, micro_batches, "micro-batches")] {
        if number >= count {
            let message = format!("{} names {number} of {count} {what}", word.shown());
            return word.place.error(message, &format!("{what} are 0 to {}", count - 1));
        }
    }
    Ok(Action { kind, stage, micro_batch })
}
