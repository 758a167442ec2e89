//! A picture for a terminal.

use super::{has_chunks, is_up, legend, short, summary, used_kinds};
use crate::pipeline::cost::Timeline;
use crate::pipeline::schedule::{Action, ActionKind, Direction, PipelineSchedule};
use crate::pipeline::verified::Verified;

/// No picture is narrower than this.
pub const COLUMNS_MIN: usize = 40;
const IDLE: char = '·';

/// Rows are ranks, columns are time. Where there is space, each action shows its micro-batch (with several stages per rank and more
/// space, stage and micro-batch); otherwise a letter per column says what the rank does in the middle of that time. What goes up
/// is in lower case. No line is longer than `columns_max`, or [`COLUMNS_MIN`] if that is more.
pub fn draw_text(verified: &Verified, timeline: &Timeline, columns_max: usize) -> String {
    let schedule = verified.schedule();
    let columns_max = columns_max.max(COLUMNS_MIN);
    let names: Vec<String> = (0..schedule.ranks).map(|rank| format!("rank {rank}")).collect();
    let margin = names.iter().map(String::len).max().unwrap_or(0) + 2;
    let space = columns_max - margin;
    let fitting = |stages: bool| {
        let labels = Labels { schedule, stages };
        let scale = labels.scale(timeline).filter(|scale| timeline.total * scale <= space as f64);
        (labels, scale)
    };
    let (labels, scale) =
        Some(fitting(has_chunks(schedule))).filter(|found| found.1.is_some()).unwrap_or_else(|| fitting(false));
    let mut lines = Vec::new();
    for (rank, name) in names.iter().enumerate() {
        let row = match scale {
            Some(scale) => labels.row(rank, timeline, scale),
            None => labels.dense_row(rank, timeline, space),
        };
        lines.push(format!("{name:<margin$}{}", row.trim_end()));
    }
    if scale.is_none() {
        lines.push(format!("a column is {}", short(timeline.total / space as f64)));
    }
    lines.extend(filled(summary(verified, timeline).into_iter(), columns_max));
    let letters = |(kind, direction): (ActionKind, Direction)| match direction {
        Direction::Down => format!("{} {}", kind.letter(), legend(kind)),
        Direction::Up => format!("{} {} up", kind.letter().to_ascii_lowercase(), legend(kind)),
    };
    lines.extend(filled(used_kinds(schedule).into_iter().map(letters).chain([format!("{IDLE} idle")]), columns_max));
    let cut = |line: String| line.chars().take(columns_max).collect::<String>() + "\n";
    lines.into_iter().map(cut).collect()
}

/// Items in lines, as many as go into each.
fn filled(items: impl Iterator<Item = String>, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for item in items {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 3 + item.chars().count() <= columns => *line += &format!("   {item}"),
            _ => lines.push(item),
        }
    }
    lines
}

struct Labels<'s> {
    schedule: &'s PipelineSchedule,
    /// Whether labels name the stage.
    stages: bool,
}

impl Labels<'_> {
    fn letter(&self, action: Action) -> char {
        let letter = action.kind.letter();
        if is_up(self.schedule, action) { letter.to_ascii_lowercase() } else { letter }
    }

    fn label(&self, action: Action) -> String {
        let (letter, Action { stage, micro_batch, .. }) = (self.letter(action), action);
        if self.stages { format!("{letter}{stage}.{micro_batch}") } else { format!("{letter}{micro_batch}") }
    }

    /// The columns per unit of time with which every action has space for its label and a gap; `None` if nothing takes time.
    fn scale(&self, timeline: &Timeline) -> Option<f64> {
        let mut scale: f64 = 0.0;
        for (actions, spans) in self.schedule.actions.iter().zip(&timeline.spans) {
            for (action, (start, end)) in actions.iter().zip(spans).filter(|(_, (start, end))| end > start) {
                scale = scale.max((self.label(*action).len() + 1) as f64 / (end - start));
            }
        }
        (scale > 0.0).then_some(scale)
    }

    fn row(&self, rank: usize, timeline: &Timeline, scale: f64) -> String {
        let column = |time: f64| (time * scale).round() as usize;
        let mut row = vec![IDLE; column(timeline.total)];
        for (action, (start, end)) in self.schedule.actions[rank].iter().zip(&timeline.spans[rank]) {
            let Some(cells) = row.get_mut(column(*start)..column(*end)) else { continue };
            let Some((gap, cells)) = cells.split_last_mut() else { continue };
            *gap = ' ';
            cells.fill('─');
            cells.iter_mut().zip(self.label(*action).chars()).for_each(|(cell, letter)| *cell = letter);
        }
        row.into_iter().collect()
    }

    fn dense_row(&self, rank: usize, timeline: &Timeline, columns: usize) -> String {
        let (actions, spans) = (&self.schedule.actions[rank], &timeline.spans[rank]);
        let letter = |column: usize| {
            let time = timeline.total * (column as f64 + 0.5) / columns as f64;
            let number = spans.partition_point(|(_, end)| *end <= time);
            let runs = spans.get(number).is_some_and(|(start, _)| *start <= time);
            if runs { self.letter(actions[number]) } else { IDLE }
        };
        (0..columns).map(letter).collect()
    }
}
