//! What each layer computes again: `memory.recompute` for all of them, and lines of `[memory.layers]` for some.

use super::{Recompute, layers_of};
use crate::strategy::Refusal;
use kolo_base::matches_pattern;
use kolo_graph::Graph;
use kolo_graph::settings::{SettingError, Settings};

/// One line of the table, such as `"h.{0-11}" = "blocks"`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Line {
    pattern: String,
    what: Recompute,
    /// Where it is written, such as `job.toml:12`.
    place: String,
}

impl Line {
    /// Whether it names a layer; `h.3.*` is all that is in `h.3`.
    fn names(&self, layer: &str) -> bool {
        matches_pattern(&self.pattern, layer) || matches_pattern(&self.pattern, &format!("{layer}."))
    }

    fn refusal(&self, message: impl std::fmt::Display, hint: impl Into<String>) -> Refusal {
        let message = format!("`memory.layers.\"{}\"` {message}", self.pattern);
        Refusal { place: Some(self.place.clone()), ..Refusal::new(message, hint) }
    }
}

/// What the backward pass computes again, by layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct RecomputePlan {
    usual: Recompute,
    lines: Vec<Line>,
}

impl From<Recompute> for RecomputePlan {
    fn from(usual: Recompute) -> Self {
        Self { usual, lines: Vec::new() }
    }
}

/// What a report says of a plan with lines.
const BY_LAYER: &str = "by layer";
/// Layers that a hint names.
const NAMED_MAX: usize = 8;

impl RecomputePlan {
    /// The plan that `[memory]` writes.
    pub fn read(memory: &Settings) -> Result<Self, SettingError> {
        let usual = Recompute::named(memory.choice("recompute", &Recompute::NAMES)?).unwrap_or_default();
        let table = memory.table_like("layers", "{ \"h.{0-11}\" = \"blocks\" }")?;
        let mut lines = Vec::new();
        for pattern in table.keys() {
            let what = Recompute::named(table.choice(pattern, &Recompute::NAMES)?).unwrap_or_default();
            let place = table.place_of(pattern).unwrap_or(table.place()).to_string();
            lines.push(Line { pattern: pattern.into(), what, place });
        }
        Ok(Self { usual, lines })
    }

    /// For layers that no line names.
    pub fn usual(&self) -> Recompute {
        self.usual
    }

    pub fn has_lines(&self) -> bool {
        !self.lines.is_empty()
    }

    /// What a layer computes again.
    pub fn of(&self, layer: &str) -> Recompute {
        self.lines.iter().find(|line| line.names(layer)).map_or(self.usual, |line| line.what)
    }

    /// Whether nothing is computed again, whatever the layers.
    pub fn is_nothing(&self) -> bool {
        self.usual == Recompute::None && self.lines.iter().all(|line| line.what == Recompute::None)
    }

    pub fn name(&self) -> &'static str {
        if self.has_lines() { BY_LAYER } else { self.usual.name() }
    }

    /// Refuses lines that name no layer of the model, and two that disagree about one. `graph` is that of the whole model.
    pub fn check_names(&self, graph: &Graph) -> Result<(), Refusal> {
        if !self.has_lines() {
            return Ok(());
        }
        let layers = layers_of(graph);
        for line in &self.lines {
            if !layers.iter().any(|layer| line.names(layer)) {
                let known: Vec<&str> = layers.iter().map(String::as_str).take(NAMED_MAX).collect();
                let hint = match known.is_empty() {
                    true => "the model has no repeated layers: write `memory.recompute` for the whole of it".into(),
                    false => {
                        format!("layers are {} …; `*` stands for any text, `{{0-3}}` for a number", known.join(", "))
                    }
                };
                return Err(line.refusal("names no layer of the model that can be recomputed", hint));
            }
        }
        for layer in &layers {
            let mut lines = self.lines.iter().filter(|line| line.names(layer));
            let Some(first) = lines.next() else { continue };
            if let Some(other) = lines.find(|line| line.what != first.what) {
                let message = format!(
                    "is \"{}\" and \"{}\" ({}) is \"{}\", but both name `{layer}`",
                    other.what.name(),
                    first.pattern,
                    first.place,
                    first.what.name(),
                );
                return Err(other.refusal(message, "let one line name the layer, or both say the same"));
            }
        }
        Ok(())
    }
}

/// Lines that say this of these layers, as an inline table: layers in a row whose names differ in their last number share one.
pub fn table_text(layers: &[(&str, Recompute)]) -> String {
    let mut runs: Vec<Run<'_>> = Vec::new();
    for (name, what) in layers.iter().filter(|(_, what)| *what != Recompute::None) {
        let (prefix, number) =
            name.rsplit_once('.').map_or((*name, None), |(before, last)| (before, last.parse().ok()));
        let one = Run { name, prefix, first: number, last: number, what: *what };
        match runs.last_mut().filter(|run| run.goes_on_with(&one)) {
            Some(run) => run.last = number,
            None => runs.push(one),
        }
    }
    let lines: Vec<String> =
        runs.iter().map(|run| format!("\"{}\" = \"{}\"", run.pattern(), run.what.name())).collect();
    format!("{{ {} }}", lines.join(", "))
}

/// Layers in a row of which the same is computed again.
struct Run<'n> {
    name: &'n str,
    prefix: &'n str,
    first: Option<usize>,
    last: Option<usize>,
    what: Recompute,
}

impl Run<'_> {
    fn goes_on_with(&self, next: &Run<'_>) -> bool {
        let follows = self.last.is_some() && self.last.map(|last| last + 1) == next.first;
        follows && self.prefix == next.prefix && self.what == next.what
    }

    fn pattern(&self) -> String {
        match (self.first, self.last) {
            (Some(first), Some(last)) if first < last => format!("{}.{{{first}-{last}}}", self.prefix),
            _ => self.name.into(),
        }
    }
}
