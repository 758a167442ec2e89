//! Scaling curves: efficiency over the number of devices, for the same batch and for a batch that grows with them.

use super::canvas::{Canvas, FAINT, seconds};
use super::{MARGIN, Picture, ScalingPoint, WIDTH};

const HEIGHT: f64 = 170.0;
const COLOURS: [&str; 2] = ["#4e79a7", "#e15759"];

/// Draws both curves side by side from this height on; the bottom of it.
pub fn draw(canvas: &mut Canvas, picture: &Picture<'_>, top: f64) -> f64 {
    let half = (WIDTH - 3.0 * MARGIN) / 2.0;
    let charts = [
        ("Weak scaling: the batch grows with the devices", picture.weak),
        ("Strong scaling: the same batch on more devices", picture.strong),
    ];
    for (at, ((title, points), colour)) in charts.into_iter().zip(COLOURS).enumerate() {
        let left = MARGIN + at as f64 * (half + MARGIN);
        canvas.text(left, top + 12.0, 14.0, "start", title);
        chart(canvas, (left + 40.0, top + 26.0, half - 56.0), points, colour);
    }
    top + 26.0 + HEIGHT + 42.0
}

fn chart(canvas: &mut Canvas, (left, top, width): (f64, f64, f64), points: &[ScalingPoint], colour: &str) {
    for part in 0..=4 {
        let y = top + HEIGHT * (1.0 - f64::from(part) / 4.0);
        canvas.line((left, y), (left + width, y), FAINT);
        canvas.text(left - 6.0, y + 4.0, 11.0, "end", &format!("{} %", 25 * part));
    }
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return };
    let span = (last.devices as f64 / first.devices as f64).ln().max(1e-9);
    let x =
        |point: &ScalingPoint| left + 12.0 + (width - 40.0) * (point.devices as f64 / first.devices as f64).ln() / span;
    let y = |point: &ScalingPoint| top + HEIGHT * (1.0 - point.efficiency.clamp(0.0, 1.0));
    let places: Vec<(f64, f64)> = points.iter().map(|point| (x(point), y(point))).collect();
    canvas.curve(&places, colour);
    // Labels where there is room for them.
    let mut taken = f64::NEG_INFINITY;
    for (point, (x, y)) in points.iter().zip(&places) {
        if x - taken < 46.0 {
            continue;
        }
        taken = *x;
        canvas.text(*x, top + HEIGHT + 16.0, 11.0, "middle", &point.devices.to_string());
        canvas.text(*x, top + HEIGHT + 30.0, 10.0, "middle", &seconds(point.seconds));
        let above = if *y < top + 18.0 { *y + 16.0 } else { *y - 8.0 };
        canvas.text(*x, above, 10.0, "middle", &format!("{:.0} %", 100.0 * point.efficiency));
    }
}
