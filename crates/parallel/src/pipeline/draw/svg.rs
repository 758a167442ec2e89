//! A picture as SVG.

use super::{has_chunks, is_up, legend, short, summary, used_kinds};
use crate::pipeline::cost::Timeline;
use crate::pipeline::error::ScheduleError;
use crate::pipeline::schedule::{Action, ActionKind, Direction, PipelineSchedule};
use crate::pipeline::verified::Verified;
use std::fmt::Write;

/// The most actions of a picture; more could not be told apart.
pub const ACTIONS_DRAWN_MAX: usize = 20_000;
/// The widest picture, in pixels, but for the margins.
const WIDTH_MAX: f64 = 2400.0;
const WIDTH_MIN: f64 = 560.0;
const ROW: f64 = 30.0;
const BAR: f64 = 24.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 44.0;
const LETTER: f64 = 6.8;
/// How much paler the last chunk of a rank is than its first.
const PALER: f64 = 0.55;

/// A row per rank, a bar per action with the number of its micro-batch, a time axis and a legend. Later chunks of a rank are paler,
/// micro-batches that go up darker. Browsers show an action's name and time under the pointer.
pub fn draw_svg(verified: &Verified, timeline: &Timeline) -> Result<String, ScheduleError> {
    let count = timeline.spans.iter().map(Vec::len).sum::<usize>();
    if count > ACTIONS_DRAWN_MAX {
        let message = format!("{count} actions are too many for a picture");
        return Err(ScheduleError::size(message, format!("at most {ACTIONS_DRAWN_MAX}; draw fewer micro-batches")));
    }
    let mut picture = Picture::new(verified, timeline);
    picture.head();
    (0..verified.schedule().ranks).for_each(|rank| picture.row(rank));
    picture.axis();
    picture.legend();
    picture.out += "</svg>\n";
    Ok(picture.out)
}

struct Picture<'s> {
    verified: &'s Verified,
    schedule: &'s PipelineSchedule,
    timeline: &'s Timeline,
    /// Pixels per unit of time.
    scale: f64,
    width: f64,
    out: String,
}

/// Writing to a string cannot fail.
macro_rules! put {
    ($picture:expr, $($parts:tt)*) => {
        let _ = writeln!($picture.out, $($parts)*);
    };
}

impl<'s> Picture<'s> {
    fn new(verified: &'s Verified, timeline: &'s Timeline) -> Self {
        let letters = (verified.schedule().micro_batches - 1).to_string().len() as f64;
        let spans = timeline.spans.iter().flatten();
        let shortest = spans.map(|(start, end)| end - start).filter(|time| *time > 0.0).fold(f64::INFINITY, f64::min);
        let wanted = timeline.total / shortest * (letters * LETTER + 8.0).max(22.0);
        let width = if wanted.is_finite() { wanted.clamp(WIDTH_MIN, WIDTH_MAX) } else { WIDTH_MAX };
        let scale = if timeline.total > 0.0 { width / timeline.total } else { 0.0 };
        Self { verified, schedule: verified.schedule(), timeline, scale, width, out: String::new() }
    }

    fn bottom(&self) -> f64 {
        TOP + ROW * self.schedule.ranks as f64
    }

    fn head(&mut self) {
        let (width, height) = (LEFT + self.width + 16.0, self.bottom() + 56.0);
        put!(
            self,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"system-ui, sans-serif\" font-size=\"12\">"
        );
        put!(self, "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>");
        let summary = summary(self.verified, self.timeline).join(": ");
        put!(self, "<text x=\"{LEFT}\" y=\"24\" font-size=\"14\" fill=\"#161616\">{summary}</text>");
    }

    fn row(&mut self, rank: usize) {
        let (top, schedule) = (TOP + ROW * rank as f64, self.schedule);
        let middle = top + BAR / 2.0 + 4.0;
        put!(
            self,
            "<text x=\"{:.0}\" y=\"{middle}\" text-anchor=\"end\" fill=\"#161616\">rank {rank}</text>",
            LEFT - 8.0
        );
        let width = short(self.width);
        put!(self, "<rect x=\"{LEFT}\" y=\"{top}\" width=\"{width}\" height=\"{BAR}\" fill=\"#f2f4f8\"/>");
        let stages = schedule.stages_of(rank);
        for (number, action) in schedule.actions[rank].iter().enumerate() {
            let (start, end) = self.timeline.spans[rank][number];
            let chunk = stages.iter().position(|stage| *stage == action.stage).unwrap_or(0);
            // The stages of two directions already differ in colour.
            let paler =
                if has_chunks(schedule) { chunk as f64 / stages.len().saturating_sub(1).max(1) as f64 } else { 0.0 };
            self.bar(*action, top, (start, end), 1.0 - PALER * paler);
        }
    }

    fn bar(&mut self, action: Action, top: f64, (start, end): (f64, f64), opacity: f64) {
        let (x, width) = (LEFT + start * self.scale, (end - start) * self.scale);
        let up = is_up(self.schedule, action);
        let (fill, ink) = colours(action.kind, up);
        let pale = if opacity < 1.0 { format!(" fill-opacity=\"{}\"", short(opacity)) } else { String::new() };
        put!(
            self,
            "<rect x=\"{}\" y=\"{top}\" width=\"{}\" height=\"{BAR}\" fill=\"{fill}\"{pale} stroke=\"#ffffff\">\
             <title>{action}: {} to {}</title></rect>",
            short(x),
            short(width),
            short(start),
            short(end)
        );
        let label = action.micro_batch.to_string();
        if label.len() as f64 * LETTER <= width {
            put!(
                self,
                "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"{ink}\" pointer-events=\"none\">{label}</text>",
                short(x + width / 2.0),
                top + BAR / 2.0 + 4.0
            );
        }
    }

    fn axis(&mut self) {
        let (y, total) = (self.bottom() + 12.0, self.timeline.total);
        let step = tick(total, (self.width / 60.0).max(1.0));
        // Sixty pixels apart, so there are few.
        let ticks = if step > 0.0 { (total / step) as usize } else { 0 };
        for number in 0..=ticks {
            let time = step * number as f64;
            let x = short(LEFT + time * self.scale);
            put!(
                self,
                "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\" font-size=\"11\" fill=\"#6f6f6f\">{}</text>",
                short(time)
            );
        }
    }

    fn legend(&mut self) {
        let (mut x, y) = (LEFT, self.bottom() + 30.0);
        for (kind, direction) in used_kinds(self.schedule) {
            let up = direction == Direction::Up;
            let name = format!("{}{}", legend(kind), if up { " up" } else { "" });
            x = self.swatch(x, y, colours(kind, up).0, &name);
        }
        x = self.swatch(x, y, "#f2f4f8", "idle");
        if has_chunks(self.schedule) {
            put!(self, "<text x=\"{x:.0}\" y=\"{:.0}\" fill=\"#161616\">paler: later chunks</text>", y + 12.0);
        }
    }

    fn swatch(&mut self, x: f64, y: f64, fill: &str, name: &str) -> f64 {
        put!(self, "<rect x=\"{x:.0}\" y=\"{y:.0}\" width=\"14\" height=\"14\" fill=\"{fill}\" stroke=\"#c6c6c6\"/>");
        put!(self, "<text x=\"{:.0}\" y=\"{:.0}\" fill=\"#161616\">{name}</text>", x + 20.0, y + 12.0);
        x + 20.0 + name.len() as f64 * LETTER + 16.0
    }
}

/// Fill and ink. Light fills have dark ink and the other way round.
fn colours(kind: ActionKind, up: bool) -> (&'static str, &'static str) {
    let (light, dark) = match kind {
        ActionKind::Forward => ("#a6c8ff", "#0f62fe"),
        ActionKind::Backward => ("#a7f0ba", "#198038"),
        ActionKind::BackwardInput => ("#9ef0f0", "#007d79"),
        ActionKind::BackwardWeight => ("#ffd6a0", "#a65300"),
    };
    if up { (dark, "#ffffff") } else { (light, "#161616") }
}

/// The smallest of 1, 2, 5, 10, 20, … with at most so many steps to the total.
fn tick(total: f64, count: f64) -> f64 {
    if total <= 0.0 {
        return 0.0;
    }
    let ten = 10f64.powf((total / count).log10().floor());
    let fits = |factor: &f64| total / (ten * factor) <= count;
    ten * [1.0, 2.0, 5.0].into_iter().find(fits).unwrap_or(10.0)
}
