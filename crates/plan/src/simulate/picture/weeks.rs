//! Where the weeks went: shares of the time, and when the job stood still.

use super::canvas::{Canvas, seconds};
use super::{MARGIN, WIDTH};
use crate::failures::{PeriodKind, RunOutcome};

const BAR_HEIGHT: f64 = 26.0;
const STRIP_HEIGHT: f64 = 18.0;

fn colour(kind: PeriodKind) -> &'static str {
    match kind {
        PeriodKind::Working => "#59a14f",
        PeriodKind::Restarting => "#f28e2b",
        PeriodKind::Waiting => "#79706e",
    }
}

/// Draws a run from this height on; the bottom of it.
pub fn draw(canvas: &mut Canvas, run: &RunOutcome, top: f64) -> f64 {
    let title = format!(
        "{}: goodput {:.1} %, availability {:.1} %, {} failures",
        seconds(run.horizon),
        100.0 * run.goodput(),
        100.0 * run.availability(),
        run.failure_count()
    );
    canvas.text(MARGIN, top + 12.0, 14.0, "start", &title);
    let shares = [
        ("progress", run.useful, "#59a14f"),
        ("computed and lost", run.lost, "#e15759"),
        ("checkpoints", run.checkpoints, "#4e79a7"),
        ("restarting", run.restarting, "#f28e2b"),
        ("waiting for a repair", run.waiting, "#79706e"),
        ("missing devices", run.slowed, "#edc948"),
    ];
    let (width, bar) = (WIDTH - 2.0 * MARGIN, top + 24.0);
    let mut x = MARGIN;
    let mut legend: Vec<(String, &str)> = Vec::new();
    for (name, share, fill) in shares.into_iter().filter(|(_, share, _)| *share > 0.0) {
        let part = share / run.horizon;
        let label = format!("{name} {:.2} %", 100.0 * part);
        canvas.rect((x, bar), (width * part, BAR_HEIGHT), fill, &label);
        legend.push((label, fill));
        x += width * part;
    }
    let strip = canvas.legend(MARGIN, bar + BAR_HEIGHT + 8.0, &legend) + 8.0;
    let scale = width / run.horizon.max(f64::MIN_POSITIVE);
    let mut kinds: Vec<(String, &str)> = Vec::new();
    // Standing still is drawn last and at least a hair wide, so that a short stop in a long run can be seen.
    let mut periods = run.periods.clone();
    periods.sort_by(|one, other| one.kind.cmp(&other.kind).then(one.start.total_cmp(&other.start)));
    for period in &periods {
        let (name, fill) = (period.kind.name().to_string(), colour(period.kind));
        let about = format!("{name} for {} from {}", seconds(period.end - period.start), seconds(period.start));
        let x = MARGIN + period.start * scale;
        canvas.rect((x, strip), ((period.end - period.start) * scale, STRIP_HEIGHT), fill, &about);
        if !kinds.iter().any(|(known, _)| *known == name) {
            kinds.push((name, fill));
        }
    }
    let axis = strip + STRIP_HEIGHT;
    for part in 0..=4 {
        let anchor = ["start", "middle", "middle", "middle", "end"][part as usize];
        let x = MARGIN + width * f64::from(part) / 4.0;
        canvas.text(x, axis + 14.0, 11.0, anchor, &seconds(run.horizon * f64::from(part) / 4.0));
    }
    canvas.legend(MARGIN, axis + 24.0, &kinds)
}
