//! The step in time: for each role a row of compute and, below it, one of communication.

use super::canvas::{Canvas, FAINT, seconds};
use super::{MARGIN, WIDTH};
use crate::simulate::outcome::Span;
use crate::simulate::step::SimulatedStep;
use kolo_parallel::axes::{DATA, HEADS_AXIS, TENSOR};

/// Roles that are drawn; of more, so many evenly spread.
const ROWS_MAX: usize = 16;
const LABEL_WIDTH: f64 = 96.0;
const ROW_HEIGHT: f64 = 26.0;
const COMPUTE_HEIGHT: f64 = 14.0;
const EXCHANGE_HEIGHT: f64 = 6.0;

/// The colour of what a span does.
fn colour(name: &str, lane: Option<&str>) -> &'static str {
    match (lane, name) {
        (None, "forward") => "#4e79a7",
        (None, "backward") => "#59a14f",
        (None, "input gradient") => "#8cd17d",
        (None, "weight gradient") => "#b6992d",
        (None, _) => "#79706e",
        (Some(DATA), _) => "#e15759",
        (Some(TENSOR), _) => "#f28e2b",
        (Some(HEADS_AXIS), _) => "#b07aa1",
        (Some(_), _) => "#9c755f",
    }
}

fn entry(step: &SimulatedStep, span: &Span) -> (String, &'static str) {
    let scenario = &step.scenario;
    let name = &scenario.names[span.name as usize];
    match span.lane {
        None => {
            // Micro-batches of a pass look alike.
            let pass = name.trim_end_matches(|letter: char| letter.is_ascii_digit()).trim_end();
            (pass.to_string(), colour(pass, None))
        }
        Some(lane) => {
            let lane = scenario.lanes[lane as usize].as_str();
            (format!("exchanges along {lane}"), colour(name, Some(lane)))
        }
    }
}

/// Draws the step from this height on; the bottom of it.
pub fn draw(canvas: &mut Canvas, step: &SimulatedStep, top: f64) -> f64 {
    let roles = step.scenario.scripts.len();
    let rows: Vec<usize> = match roles {
        0..=ROWS_MAX => (0..roles).collect(),
        _ => (0..ROWS_MAX).map(|at| at * (roles - 1) / (ROWS_MAX - 1)).collect(),
    };
    let left = MARGIN + LABEL_WIDTH;
    let scale = (WIDTH - left - MARGIN) / step.seconds.max(f64::MIN_POSITIVE);
    let mut legend: Vec<(String, &str)> = Vec::new();
    canvas.text(MARGIN, top + 12.0, 14.0, "start", &format!("One step: {}", seconds(step.seconds)));
    let begin = top + 24.0;
    for (row, role) in rows.iter().enumerate() {
        let y = begin + row as f64 * ROW_HEIGHT;
        let label = if roles == 1 { "every rank".into() } else { format!("stage rank {role}") };
        canvas.text(left - 8.0, y + 12.0, 12.0, "end", &label);
        canvas.line((left, y + ROW_HEIGHT - 3.0), (WIDTH - MARGIN, y + ROW_HEIGHT - 3.0), FAINT);
        for span in merged(step, *role, 0.5 / scale) {
            let (name, fill) = entry(step, &span);
            let (y, height) = match span.lane {
                None => (y, COMPUTE_HEIGHT),
                Some(_) => (y + COMPUTE_HEIGHT + 1.0, EXCHANGE_HEIGHT),
            };
            let about = format!("{name}: {}", seconds(span.end - span.start));
            canvas.rect((left + span.start * scale, y), ((span.end - span.start) * scale, height), fill, &about);
            if !legend.iter().any(|(known, _)| *known == name) {
                legend.push((name, fill));
            }
        }
    }
    let bottom = begin + rows.len() as f64 * ROW_HEIGHT;
    for part in 0..=4 {
        let x = left + (WIDTH - left - MARGIN) * f64::from(part) / 4.0;
        let anchor = ["start", "middle", "middle", "middle", "end"][part as usize];
        canvas.text(x, bottom + 14.0, 11.0, anchor, &seconds(step.seconds * f64::from(part) / 4.0));
    }
    canvas.legend(MARGIN, bottom + 24.0, &legend)
}

/// The spans of a role in the first replica, with those joined that are the same and closer than `gap`.
fn merged(step: &SimulatedStep, role: usize, gap: f64) -> Vec<Span> {
    let mut own: Vec<Span> = step.outcome.spans.iter().filter(|span| span.unit as usize == role).copied().collect();
    own.sort_by(|one, other| {
        (one.lane, one.start).partial_cmp(&(other.lane, other.start)).unwrap_or(std::cmp::Ordering::Equal)
    });
    let mut joined: Vec<Span> = Vec::new();
    for span in own {
        match joined.last_mut() {
            Some(last) if last.lane == span.lane && last.name == span.name && span.start - last.end <= gap => {
                last.end = last.end.max(span.end);
            }
            _ => joined.push(span),
        }
    }
    joined
}
