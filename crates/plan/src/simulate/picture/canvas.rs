//! Shapes and text of an SVG document.

use std::fmt::Write;

/// An SVG document that grows.
#[derive(Debug)]
pub struct Canvas {
    width: f64,
    body: String,
}

pub const INK: &str = "#222222";
pub const FAINT: &str = "#d5d5d5";

impl Canvas {
    pub fn new(width: f64) -> Self {
        Self { width, body: String::new() }
    }

    fn push(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = self.body.write_fmt(text);
        self.body.push('\n');
    }

    pub fn rect(&mut self, (x, y): (f64, f64), (width, height): (f64, f64), fill: &str, about: &str) {
        let about = escaped(about);
        self.push(format_args!(
            "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{:.2}\" height=\"{height:.2}\" fill=\"{fill}\"><title>{about}</title></rect>",
            width.max(0.3)
        ));
    }

    /// Text at a point; `anchor` is `start`, `middle` or `end`.
    pub fn text(&mut self, x: f64, y: f64, size: f64, anchor: &str, text: &str) {
        let text = escaped(text);
        self.push(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" text-anchor=\"{anchor}\" fill=\"{INK}\">{text}</text>"
        ));
    }

    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), stroke: &str) {
        self.push(format_args!(
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{stroke}\"/>",
            from.0, from.1, to.0, to.1
        ));
    }

    /// A line through points, with a dot at each.
    pub fn curve(&mut self, points: &[(f64, f64)], stroke: &str) {
        let list: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        self.push(format_args!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{stroke}\" stroke-width=\"2\"/>",
            list.join(" ")
        ));
        for (x, y) in points {
            self.push(format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.2\" fill=\"{stroke}\"/>"));
        }
    }

    /// Coloured squares with their names, in a row that breaks before the margin; the bottom of it.
    pub fn legend(&mut self, x: f64, y: f64, entries: &[(String, &str)]) -> f64 {
        let (mut at, mut row) = (x, y);
        for (name, fill) in entries {
            let width = 22.0 + 6.6 * name.chars().count() as f64;
            if at + width > self.width - x && at > x {
                (at, row) = (x, row + 18.0);
            }
            self.rect((at, row), (11.0, 11.0), fill, name);
            self.text(at + 16.0, row + 10.0, 12.0, "start", name);
            at += width + 8.0;
        }
        row + 18.0
    }

    pub fn finish(self, height: f64) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{w:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {w:.0} {height:.0}\" \
             font-family=\"sans-serif\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{}</svg>\n",
            self.body,
            w = self.width,
        )
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Three digits and a unit.
pub fn seconds(value: f64) -> String {
    let digits = |value: f64| match value {
        _ if value < 9.995 => format!("{value:.2}"),
        _ if value < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    };
    match value {
        _ if value < 1e-3 => format!("{} µs", digits(value * 1e6)),
        _ if value < 1.0 => format!("{} ms", digits(value * 1e3)),
        _ if value < 120.0 => format!("{} s", digits(value)),
        _ if value < 7200.0 => format!("{} min", digits(value / 60.0)),
        _ if value < 172_800.0 => format!("{} h", digits(value / 3600.0)),
        _ => format!("{} days", digits(value / 86_400.0)),
    }
}
