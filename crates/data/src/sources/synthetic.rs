//! `synthetic:*`: samples of whatever shape the model takes, with something in them to learn.
//!
//! The fields are the model's inputs. What they hold follows from the kinds of `x` and `y`, see `Rule`; any other field
//! is noise. Nothing is stored per sample and filling allocates nothing, so that a benchmark measures the model.

mod chain;
mod pattern;
mod response;

use kolo_graph::rng::Stream;
use kolo_graph::settings::{SettingError, Settings};

use crate::error::ReadError;
use crate::noise::{below_of_word, fill_normal};
use crate::source::{Opened, SampleCost, Source, SourceKind};
use chain::Chain;
use kolo_graph::field::{Column, Field, Kind};
use pattern::Pattern;
use response::Response;

pub const TOKENS: SourceKind = SourceKind {
    name: "synthetic:tokens",
    doc: "random tokens, each of which mostly decides the next",
    shaped_by_model: true,
    make: |settings, seed, wanted| make(TOKENS.name, settings, seed, wanted),
};

pub const IMAGES: SourceKind = SourceKind {
    name: "synthetic:images",
    doc: "a smooth image per class, under noise",
    shaped_by_model: true,
    make: |settings, seed, wanted| make(IMAGES.name, settings, seed, wanted),
};

pub const FEATURES: SourceKind = SourceKind {
    name: "synthetic:features",
    doc: "a smooth vector per class under noise, or a smooth function of random vectors",
    shaped_by_model: true,
    make: |settings, seed, wanted| make(FEATURES.name, settings, seed, wanted),
};

pub const SERIES: SourceKind = SourceKind {
    name: "synthetic:series",
    doc: "a smooth series per class under noise, or a smooth function of random series",
    shaped_by_model: true,
    make: |settings, seed, wanted| make(SERIES.name, settings, seed, wanted),
};

const NOISE_MAX: f64 = 100.0;

/// How `x` and `y` hang together.
#[derive(Debug)]
enum Rule {
    /// `x` indices, `y` indices, no more than `x` has: a Markov chain, of which `y` is the end, one step ahead.
    Chain(Chain),
    /// `x` real, `y` one index: the class' pattern under noise.
    Pattern(Pattern),
    /// `x` real, `y` real: `x` is noise and `y` a function of it.
    Response(Response),
    /// Anything else: both are noise.
    Noise,
}

impl Rule {
    fn of(x: &Field, y: Option<&Field>, settings: &Settings, seed: u64) -> Result<Self, SettingError> {
        Ok(match (x.kind, y.map(|y| (y.kind, y.elements()))) {
            (Kind::Index { classes }, Some((Kind::Index { classes: targets }, count))) if count <= x.elements() => {
                Rule::Chain(Chain::new(seed, classes, targets, x.elements() + 1 - count))
            }
            (Kind::Real, Some((Kind::Index { classes }, 1))) => {
                let noise = settings.float_in("noise", 1.0, 0.0, NOISE_MAX)? as f32;
                Rule::Pattern(Pattern::new(seed, &x.shape, classes, noise))
            }
            (Kind::Real, Some((Kind::Real, count))) => Rule::Response(Response::new(seed, x.elements(), count)),
            _ => Rule::Noise,
        })
    }
}

/// Samples in the shape of a model's inputs.
#[derive(Debug)]
pub struct Synthetic {
    name: &'static str,
    fields: Vec<Field>,
    /// One stream per field, for those that are noise.
    noises: Vec<Stream>,
    rule: Rule,
    x: usize,
    y: Option<usize>,
    samples: usize,
}

fn make(name: &'static str, settings: &Settings, seed: u64, wanted: &[Field]) -> Opened {
    let position = |name: &str| wanted.iter().position(|field| field.name == name);
    let (Some(x), y) = (position("x"), position("y")) else {
        let names: Vec<&str> = wanted.iter().map(|field| field.name.as_str()).collect();
        let message = format!("is \"{name}\", but the model has no input `x`");
        return Err(settings.wrong("source", message, format!("its inputs are {}", names.join(", "))));
    };
    check_input(name, settings, &wanted[x])?;
    let samples = settings.count("samples", 4096, 1)?;
    let rule = Rule::of(&wanted[x], y.map(|y| &wanted[y]), settings, seed)?;
    let noises = wanted.iter().map(|field| Stream::new(seed, &format!("data.synthetic.{}", field.name))).collect();
    Ok(Box::new(Synthetic { name, fields: wanted.to_vec(), noises, rule, x, y, samples }))
}

/// The source whose name says what `x` is.
fn fitting(x: &Field) -> Option<&'static str> {
    match (x.kind, x.shape.len()) {
        (Kind::Index { .. }, _) => Some(TOKENS.name),
        (Kind::Real, 1) => Some(FEATURES.name),
        (Kind::Real, 2) => Some(SERIES.name),
        (Kind::Real, 3) => Some(IMAGES.name),
        _ => None,
    }
}

fn check_input(name: &str, settings: &Settings, x: &Field) -> Result<(), SettingError> {
    let hint = match fitting(x) {
        Some(fitting) if fitting == name => return Ok(()),
        Some(fitting) => format!("write `source = \"{fitting}\"`"),
        None => "inputs are tokens, or real with one dim (features), two (series) or three (images)".into(),
    };
    Err(settings.wrong("source", format!("is \"{name}\", but the model's input is {x}"), hint))
}

impl Source for Synthetic {
    fn fields(&self) -> &[Field] {
        &self.fields
    }

    fn len(&self) -> usize {
        self.samples
    }

    fn fill(&self, sample: usize, field: usize, out: Column<'_>) -> Result<(), ReadError> {
        assert!(sample < self.samples && field < self.fields.len(), "sample {sample}, field {field}");
        match &self.rule {
            Rule::Chain(chain) if field == self.x => chain.fill_input(sample, out.indices()),
            Rule::Chain(chain) if Some(field) == self.y => chain.fill_target(sample, out.indices()),
            Rule::Pattern(pattern) if field == self.x => pattern.fill_input(sample, out.reals()),
            Rule::Pattern(pattern) if Some(field) == self.y => out.indices()[0] = pattern.class(sample) as i32,
            Rule::Response(response) if field == self.x => response.fill_input(sample, out.reals()),
            Rule::Response(response) if Some(field) == self.y => response.fill_target(sample, out.reals()),
            _ => fill_noise(&self.noises[field], self.fields[field].kind, sample, out),
        }
        Ok(())
    }

    fn cost(&self) -> SampleCost {
        let ns = |field: &Field| match field.kind {
            Kind::Real => 2 * field.elements() as u64,
            Kind::Index { .. } => 8 * field.elements() as u64,
        };
        SampleCost::Computed { ns: self.fields.iter().map(ns).sum() }
    }

    fn describe(&self) -> String {
        let fields: Vec<String> = self.fields.iter().map(Field::to_string).collect();
        format!("{}: {} samples of {}", self.name, self.samples, fields.join(", "))
    }
}

/// Normal numbers, or uniform indices.
fn fill_noise(stream: &Stream, kind: Kind, sample: usize, out: Column<'_>) {
    match kind {
        Kind::Real => fill_normal(stream, sample, out.reals()),
        Kind::Index { classes } => {
            for (block, indices) in out.indices().chunks_mut(4).enumerate() {
                let words = stream.block(sample as u64, block as u64);
                for (index, word) in indices.iter_mut().zip(words) {
                    *index = below_of_word(word, classes) as i32;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{SOURCES, open};

    fn settings() -> Settings {
        Settings::new("data", "job.toml:3")
    }

    #[test]
    fn other_fields_are_noise() {
        let fields = [Field::index("x", &[4], 9), Field::index("mask", &[1000], 2), Field::real("weight", &[1000])];
        let source = open(SOURCES, "synthetic:tokens", &settings(), 1, Some(&fields)).unwrap();
        let (mut mask, mut weight) = ([7; 1000], [0.0; 1000]);
        source.fill(3, 1, Column::I32(&mut mask)).unwrap();
        source.fill(3, 2, Column::F32(&mut weight)).unwrap();
        let ones = mask.iter().sum::<i32>();
        assert!((400..600).contains(&ones) && mask.iter().all(|index| (0..2).contains(index)), "{ones}");
        let mean = weight.iter().sum::<f32>() / 1000.0;
        assert!(mean.abs() < 0.1, "{mean}");
    }

    #[test]
    fn a_source_of_the_wrong_kind_names_the_right_one() {
        let fields = [Field::index("x", &[4], 9), Field::index("y", &[4], 9)];
        assert_eq!(
            open(SOURCES, "synthetic:images", &settings(), 1, Some(&fields)).unwrap_err().to_string(),
            "job.toml:3: `data.source` is \"synthetic:images\", but the model's input is x [4] index below 9\n  \
             hint: write `source = \"synthetic:tokens\"`"
        );
        assert_eq!(
            open(SOURCES, "synthetic:images", &settings(), 1, Some(&[Field::real("image", &[3, 4, 4])]))
                .unwrap_err()
                .to_string(),
            "job.toml:3: `data.source` is \"synthetic:images\", but the model has no input `x`\n  \
             hint: its inputs are image"
        );
    }
}
