//! `builtin:playground`: points of the plane in two classes, after the sets of the TensorFlow playground.
//!
//! The shapes keep the playground's measures: a plane of about −6 to 6 and a noise of 0 to 0.5.

use std::f32::consts::TAU;

use kolo_graph::rng::Stream;
use kolo_graph::settings::Settings;

use crate::error::ReadError;
use crate::noise::between;
use crate::source::{Opened, SampleCost, Source, SourceKind};
use kolo_graph::field::{Column, Field};

pub const KIND: SourceKind = SourceKind {
    name: "builtin:playground",
    doc: "points of the plane in two classes: circle, xor, gauss or spiral",
    shaped_by_model: false,
    make,
};

/// How the two classes lie in the plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Circle,
    Xor,
    Gauss,
    Spiral,
}

const SHAPES: [(&str, Shape); 4] =
    [("circle", Shape::Circle), ("xor", Shape::Xor), ("gauss", Shape::Gauss), ("spiral", Shape::Spiral)];

const RADIUS: f32 = 5.0;
const NOISE_MAX: f64 = 0.5;

/// The points: `x [2]` real, `y []` the class.
#[derive(Debug)]
pub struct Playground {
    fields: [Field; 2],
    shape: Shape,
    noise: f32,
    samples: usize,
    stream: Stream,
}

/// A point and its class.
type Point = ([f32; 2], bool);

impl Playground {
    pub fn new(shape: Shape, noise: f32, samples: usize, seed: u64) -> Self {
        let fields = [Field::real("x", &[2]), Field::index("y", &[], 2)];
        Self { fields, shape, noise, samples, stream: Stream::new(seed, "data.playground") }
    }

    /// Circle, gauss and spiral alternate the classes; xor reads the class off the point.
    fn point(&self, sample: usize) -> Point {
        let words = self.stream.block(sample as u64, 0);
        let first = sample.is_multiple_of(2);
        match self.shape {
            Shape::Circle => self.circle(words, first),
            Shape::Xor => self.xor(words),
            Shape::Gauss => self.gauss(sample, first),
            Shape::Spiral => self.spiral(words, sample, first),
        }
    }

    /// A disc inside a ring. Noise moves the point before its class is read, so the classes bleed into each other.
    fn circle(&self, words: [u32; 4], inner: bool) -> Point {
        let (low, high) = if inner { (0.0, 0.5) } else { (0.7, 1.0) };
        let (radius, angle) = (between(words[0], low, high) * RADIUS, between(words[1], 0.0, TAU));
        let point = [radius * angle.sin(), radius * angle.cos()];
        let [dx, dy] = self.jitter([words[2], words[3]], RADIUS);
        let distance = (point[0] + dx).hypot(point[1] + dy);
        (point, distance < 0.5 * RADIUS)
    }

    /// Quadrants, moved a little away from the axes.
    fn xor(&self, words: [u32; 4]) -> Point {
        const GAP: f32 = 0.3;
        let spread = |word| {
            let at = between(word, -RADIUS, RADIUS);
            at + GAP.copysign(at)
        };
        let point = [spread(words[0]), spread(words[1])];
        let [dx, dy] = self.jitter([words[2], words[3]], RADIUS);
        (point, (point[0] + dx) * (point[1] + dy) >= 0.0)
    }

    /// Two clouds on the diagonal; noise widens them.
    fn gauss(&self, sample: usize, upper: bool) -> Point {
        let center = if upper { 2.0 } else { -2.0 };
        let deviation = (0.5 + 7.0 * self.noise).sqrt();
        let coordinate = |number| center + deviation * self.stream.normal(sample as u64, number);
        ([coordinate(1), coordinate(2)], upper)
    }

    /// Two arms that wind one and three quarter times around the origin.
    fn spiral(&self, words: [u32; 4], sample: usize, first: bool) -> Point {
        let along = (sample / 2) as f32 / self.samples.div_ceil(2) as f32;
        let angle = 1.75 * along * TAU + if first { 0.0 } else { TAU / 2.0 };
        let [dx, dy] = self.jitter([words[2], words[3]], 1.0);
        ([along * RADIUS * angle.sin() + dx, along * RADIUS * angle.cos() + dy], first)
    }

    fn jitter(&self, words: [u32; 2], reach: f32) -> [f32; 2] {
        words.map(|word| between(word, -reach, reach) * self.noise)
    }
}

fn make(settings: &Settings, seed: u64, _: &[Field]) -> Opened {
    let name = settings.choice("shape", &SHAPES.map(|(name, _)| name))?;
    let shape = SHAPES.iter().find(|(known, _)| *known == name).map_or(Shape::Circle, |(_, shape)| *shape);
    let noise = settings.float_in("noise", 0.0, 0.0, NOISE_MAX)? as f32;
    let samples = settings.count("samples", 1000, 1)?;
    Ok(Box::new(Playground::new(shape, noise, samples, seed)))
}

impl Source for Playground {
    fn fields(&self) -> &[Field] {
        &self.fields
    }

    fn len(&self) -> usize {
        self.samples
    }

    fn fill(&self, sample: usize, field: usize, out: Column<'_>) -> Result<(), ReadError> {
        assert!(sample < self.samples && field < self.fields.len(), "sample {sample}, field {field}");
        let (point, class) = self.point(sample);
        match field {
            0 => out.reals().copy_from_slice(&point),
            _ => out.indices()[0] = i32::from(class),
        }
        Ok(())
    }

    fn cost(&self) -> SampleCost {
        SampleCost::Computed { ns: 200 }
    }

    fn describe(&self) -> String {
        let name = SHAPES.iter().find(|(_, shape)| *shape == self.shape).map_or("", |(name, _)| name);
        format!("{}: {} points, {name}, noise {}", KIND.name, self.samples, self.noise)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often `rule` names the class.
    fn accuracy(shape: Shape, noise: f32, rule: impl Fn([f32; 2]) -> bool) -> f64 {
        let source = Playground::new(shape, noise, 1000, 5);
        let right = (0..1000).filter(|sample| {
            let (point, class) = source.point(*sample);
            rule(point) == class
        });
        right.count() as f64 / 1000.0
    }

    /// Turns the point back along its spiral: the first arm ends up at angle 0.
    fn on_first_arm([x, y]: [f32; 2]) -> bool {
        let turned = x.atan2(y) - 1.75 * x.hypot(y) / RADIUS * TAU;
        turned.cos() > 0.0
    }

    #[test]
    fn without_noise_the_right_rule_is_perfect() {
        assert_eq!(accuracy(Shape::Circle, 0.0, |[x, y]| x.hypot(y) < 0.6 * RADIUS), 1.0);
        assert_eq!(accuracy(Shape::Xor, 0.0, |[x, y]| x * y > 0.0), 1.0);
        assert!(accuracy(Shape::Gauss, 0.0, |[x, y]| x + y > 0.0) > 0.995);
        assert!(accuracy(Shape::Spiral, 0.0, on_first_arm) > 0.995);
    }

    #[test]
    fn noise_makes_it_harder_but_not_hopeless() {
        for accuracy in [
            accuracy(Shape::Circle, 0.3, |[x, y]| x.hypot(y) < 0.6 * RADIUS),
            accuracy(Shape::Xor, 0.3, |[x, y]| x * y > 0.0),
            accuracy(Shape::Gauss, 0.5, |[x, y]| x + y > 0.0),
            accuracy(Shape::Spiral, 0.5, on_first_arm),
        ] {
            assert!((0.7..0.99).contains(&accuracy), "{accuracy}");
        }
    }

    #[test]
    fn classes_are_balanced_and_seeds_differ() {
        for (_, shape) in SHAPES {
            let source = Playground::new(shape, 0.1, 1000, 5);
            let ones = (0..1000).filter(|sample| source.point(*sample).1).count();
            assert!((400..600).contains(&ones), "{shape:?}: {ones}");
            assert_ne!(source.point(2), Playground::new(shape, 0.1, 1000, 6).point(2));
        }
    }
}
