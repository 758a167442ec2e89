//! A picture of a simulation as SVG: the step's timeline, scaling curves, and where the weeks went.

mod canvas;
mod curves;
mod timeline;
mod weeks;

use super::step::SimulatedStep;
use crate::failures::RunOutcome;
use canvas::Canvas;

/// A point of a scaling curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalingPoint {
    pub devices: usize,
    pub seconds: f64,
    /// Throughput per device, as a share of that of the first point.
    pub efficiency: f64,
    pub utilisation: f64,
}

/// What to draw.
#[derive(Clone, Copy, Debug)]
pub struct Picture<'a> {
    pub title: &'a str,
    pub step: &'a SimulatedStep,
    pub strong: &'a [ScalingPoint],
    pub weak: &'a [ScalingPoint],
    pub run: Option<&'a RunOutcome>,
}

const WIDTH: f64 = 1000.0;
const MARGIN: f64 = 24.0;

/// The picture as an SVG document.
pub fn draw(picture: &Picture<'_>) -> String {
    let mut canvas = Canvas::new(WIDTH);
    canvas.text(MARGIN, 30.0, 18.0, "start", picture.title);
    let mut top = timeline::draw(&mut canvas, picture.step, 52.0);
    if picture.strong.len() > 1 || picture.weak.len() > 1 {
        top = curves::draw(&mut canvas, picture, top + 24.0);
    }
    if let Some(run) = picture.run {
        top = weeks::draw(&mut canvas, run, top + 24.0);
    }
    canvas.finish(top + MARGIN)
}
