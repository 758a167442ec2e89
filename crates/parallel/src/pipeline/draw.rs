//! Pictures of a schedule in time: a row per rank, as papers draw them.

mod svg;
mod terminal;

pub use svg::{ACTIONS_DRAWN_MAX, draw_svg};
pub use terminal::{COLUMNS_MIN, draw_text};

use super::cost::Timeline;
use super::schedule::{Action, ActionKind, Direction, PipelineSchedule};
use super::verified::Verified;

/// What the legend calls a kind.
fn legend(kind: ActionKind) -> &'static str {
    match kind {
        ActionKind::Forward => "forward",
        ActionKind::Backward => "backward",
        ActionKind::BackwardInput => "input gradient",
        ActionKind::BackwardWeight => "weight gradient",
    }
}

/// The kinds and directions that a schedule has, in the order of a legend.
fn used_kinds(schedule: &PipelineSchedule) -> Vec<(ActionKind, Direction)> {
    let all = schedule.actions.iter().flatten();
    let mut used: Vec<_> = all.map(|action| (action.kind, schedule.placement.directions[action.micro_batch])).collect();
    used.sort_unstable_by_key(|(kind, direction)| (*direction, *kind));
    used.dedup();
    used
}

/// Whether a rank runs several stages of one direction, so that a micro-batch alone does not say which.
fn has_chunks(schedule: &PipelineSchedule) -> bool {
    let several = |ranks: &Vec<usize>| ranks.len() > schedule.ranks;
    several(&schedule.placement.down) || schedule.placement.up.as_ref().is_some_and(several)
}

fn is_up(schedule: &PipelineSchedule, action: Action) -> bool {
    schedule.placement.directions[action.micro_batch] == Direction::Up
}

/// Sizes; time, waiting and memory.
fn summary(verified: &Verified, timeline: &Timeline) -> [String; 2] {
    let PipelineSchedule { ranks, stages, micro_batches, .. } = *verified.schedule();
    let peak = (0..ranks).map(|rank| verified.rank_peak(rank)).max().unwrap_or(0);
    let (time, bubble) = (short(timeline.total), 100.0 * timeline.bubble_share());
    [
        format!("{ranks} ranks, {stages} stages, {micro_batches} micro-batches"),
        format!("time {time}, bubble {bubble:.1} %, activations kept {peak}"),
    ]
}

/// A number with at most three digits after the point.
fn short(value: f64) -> String {
    if value != 0.0 && !(1e-3..1e9).contains(&value) {
        return format!("{value:.3e}");
    }
    let digits = format!("{value:.3}");
    digits.trim_end_matches('0').trim_end_matches('.').to_string()
}
