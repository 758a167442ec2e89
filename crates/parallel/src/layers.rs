//! `[parallel.layers]`: how single layers are split, by patterns of their names.
//!
//! A line such as `"features.*" = { spatial = 2 }` says how many workers share these layers in that way, and 1 that each has them
//! whole. If the ways of all layers have keys of their own (`tensor`, `spatial`), lines are exceptions, with 1; otherwise only
//! layers that a line names are split.

use crate::strategy::{Key, KeyValue, Refusal};
use kolo_base::matches_pattern;
use kolo_graph::Graph;
use kolo_graph::settings::{SettingError, Settings};
use kolo_ops::cross_entropy_parts::SLICES_MAX;
use std::collections::{BTreeMap, BTreeSet};

pub const LAYERS: Key = Key {
    name: "layers",
    value: KeyValue::Layers,
    of_job: true,
    doc: "a table of layers that are split otherwise, such as `\"features.*\" = { spatial = 2 }` or `\"head\" = { tensor = 1 }`; `*` stands for any text",
};

/// A way to split a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Spatial,
    Tensor,
}

impl Way {
    const ALL: [Way; 2] = [Way::Spatial, Way::Tensor];

    fn key(self) -> &'static str {
        match self {
            Way::Spatial => "spatial",
            Way::Tensor => "tensor",
        }
    }
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    pattern: String,
    /// Where it is written, such as `job.toml:12`.
    place: String,
    /// Workers, for each way.
    ranks: [Option<usize>; 2],
}

impl Line {
    fn refusal(&self, message: impl std::fmt::Display, hint: impl Into<String>) -> Refusal {
        let message = format!("`parallel.layers.\"{}\"` {message}", self.pattern);
        Refusal { place: Some(self.place.clone()), ..Refusal::new(message, hint) }
    }
}

/// The lines of the table, in the order of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Layers(Vec<Line>);

impl Layers {
    pub fn read(settings: &Settings) -> Result<Self, SettingError> {
        let table = settings.table_like(LAYERS.name, "{ \"features.*\" = { spatial = 2 } }")?;
        let mut lines = Vec::new();
        for pattern in table.keys() {
            let line = table.table_like(pattern, "{ spatial = 2 }")?;
            let mut ranks = [None; 2];
            for way in Way::ALL.into_iter().filter(|way| line.peek(way.key()).is_some()) {
                let count = line.count(way.key(), 1, 1)?;
                if count > SLICES_MAX {
                    let message = format!("is {count}, and at most {SLICES_MAX} are possible");
                    return Err(line.wrong(way.key(), message, format!("write a number up to {SLICES_MAX}")));
                }
                ranks[way as usize] = Some(count);
            }
            for way in Way::ALL {
                line.count(way.key(), 1, 1)?;
            }
            line.finish()?;
            if ranks == [None; 2] {
                let message = "sets nothing for the layers it names";
                return Err(table.wrong(
                    pattern,
                    message,
                    "write `{ spatial = 2 }`, `{ tensor = 2 }`, or 1 for whole layers",
                ));
            }
            let place = table.place_of(pattern).unwrap_or(table.place()).to_string();
            lines.push(Line { pattern: pattern.into(), place, ranks });
        }
        Ok(Self(lines))
    }

    fn numbers(&self, way: Way) -> impl Iterator<Item = (&Line, usize)> {
        self.0.iter().filter_map(move |line| Some((line, line.ranks[way as usize]?)))
    }

    /// How many workers share layers in a way; 1 if no line says more.
    pub fn ranks(&self, way: Way) -> usize {
        self.numbers(way).map(|(_, ranks)| ranks).max().unwrap_or(1)
    }

    /// Refuses numbers that are neither 1 nor that of the workers who share layers in this way.
    pub fn check_ranks(&self, way: Way, ranks: usize) -> Result<(), Refusal> {
        match self.numbers(way).find(|(_, own)| *own != 1 && *own != ranks) {
            Some((line, own)) => {
                let message = format!("has `{} = {own}`, but {ranks} workers share layers in this way", way.key());
                Err(line.refusal(message, format!("write {ranks}, or 1 for whole layers")))
            }
            None => Ok(()),
        }
    }

    /// Refuses numbers that are no powers of two: as many slices as workers would not add up in one order.
    pub fn check_powers(&self, way: Way) -> Result<(), Refusal> {
        match self.numbers(way).find(|(_, own)| !own.is_power_of_two()) {
            Some((line, own)) => {
                let (below, above) = (1 << own.ilog2(), own.next_power_of_two());
                let message = format!("has `{} = {own}`, which is no power of two", way.key());
                let hint = format!("write {below} or {above}, or `job.reproducible = false`");
                Err(line.refusal(message, hint))
            }
            None => Ok(()),
        }
    }

    /// Refuses lines that give layers to several workers where a key of their own gives all layers to some: without the key the
    /// same lines would be another job, which splits nothing else.
    pub fn check_exceptions(&self, way: Way) -> Result<(), Refusal> {
        match self.numbers(way).find(|(_, own)| *own > 1) {
            Some((line, own)) => {
                let key = way.key();
                let message = format!("has `{key} = {own}`, but `parallel.{key}` splits all layers");
                let hint = format!(
                    "leave `parallel.{key}` out, and workers share what lines name, or leave this line out, and they share all \
                     layers but those with `{{ {key} = 1 }}`"
                );
                Err(line.refusal(message, hint))
            }
            None => Ok(()),
        }
    }

    /// Refuses a line that names no layer of the model, and two that disagree about one.
    pub fn check_names(&self, graph: &Graph) -> Result<(), Refusal> {
        let layers = layers_of(graph);
        for line in &self.0 {
            if !layers.iter().any(|layer| matches_pattern(&line.pattern, layer)) {
                let known: Vec<&str> = layers.iter().map(String::as_str).take(8).collect();
                let hint = format!("layers are {} …; `*` stands for any text", known.join(", "));
                return Err(line.refusal("names no layer of the model", hint));
            }
        }
        for (layer, way) in layers.iter().flat_map(|layer| Way::ALL.map(|way| (layer, way))) {
            let mut lines = self.numbers(way).filter(|(line, _)| matches_pattern(&line.pattern, layer));
            let Some((first, number)) = lines.next() else { continue };
            if let Some((other, differs)) = lines.find(|(_, own)| *own != number) {
                let message = format!(
                    "has `{key} = {differs}` and \"{}\" ({}) has `{key} = {number}`, but both name `{layer}`",
                    first.pattern,
                    first.place,
                    key = way.key(),
                );
                return Err(other.refusal(message, "let one line name the layer, or both say the same"));
            }
        }
        Ok(())
    }

    /// How many workers share a layer in a way, if a line says so.
    pub fn of(&self, way: Way, layer: &str) -> Option<usize> {
        self.numbers(way).find(|(line, _)| matches_pattern(&line.pattern, layer)).map(|(_, ranks)| ranks)
    }

    /// The parameters that a line gives to several workers in this way, by the layer they are of.
    pub fn shared_params(&self, way: Way, graph: &Graph) -> BTreeMap<String, Vec<String>> {
        let mut shared: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (_, op) in graph.params() {
            let layer = layer_of(&op.name);
            if self.of(way, layer).is_some_and(|ranks| ranks > 1) {
                shared.entry(layer.into()).or_default().push(op.name.clone());
            }
        }
        shared
    }

    /// The parameters that a line leaves whole in this way.
    pub fn whole_params(&self, way: Way, graph: &Graph) -> Vec<String> {
        let is_whole = |name: &str| self.of(way, layer_of(name)) == Some(1);
        graph.params().filter(|(_, op)| is_whole(&op.name)).map(|(_, op)| op.name.clone()).collect()
    }

    /// Refuses a layer that a line gives to several workers, and that cannot be shared in this way.
    pub fn check_shared(
        &self,
        way: Way,
        is_shared: impl Fn(&str) -> bool,
        graph: &Graph,
        hint: &str,
    ) -> Result<(), Refusal> {
        for (line, ranks) in self.numbers(way).filter(|(_, ranks)| *ranks > 1) {
            let mut own = layers_of(graph);
            own.retain(|layer| matches_pattern(&line.pattern, layer));
            let own: Vec<String> = own.into_iter().collect();
            if !own.iter().any(|layer| is_shared(layer)) {
                let message = format!("has `{} = {ranks}`, but `{}` cannot be split so", way.key(), own.join("`, `"));
                return Err(line.refusal(message, hint));
            }
        }
        Ok(())
    }
}

/// The layer that a parameter is of: all but the last word of its name.
pub(crate) fn layer_of(parameter: &str) -> &str {
    parameter.rsplit_once('.').map_or(parameter, |(layer, _)| layer)
}

/// Layers that have parameters, in the order of their names.
pub(crate) fn layers_of(graph: &Graph) -> BTreeSet<String> {
    graph.params().map(|(_, op)| layer_of(&op.name).to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::settings::Setting;
    use kolo_graph::{Builder, Init};

    fn table(lines: &[(&str, &[(&str, i64)])]) -> Result<Layers, String> {
        let mut settings = Settings::new("parallel", "job.toml:1");
        let layers = settings.table_mut("layers", "job.toml:2").unwrap();
        for (at, (pattern, values)) in lines.iter().enumerate() {
            let place = format!("job.toml:{}", at + 3);
            let line = layers.table_mut(pattern, &place).unwrap();
            values.iter().for_each(|(key, value)| line.set(key, &place, Setting::Int(*value)));
        }
        Layers::read(&settings).map_err(|error| error.to_string())
    }

    #[test]
    fn lines_name_layers_and_agree_about_them() {
        let builder = Builder::new();
        for name in ["features.0.weight", "features.3.weight", "classifier.1.weight", "classifier.1.bias"] {
            builder.param(name, [2], Init::ONES);
        }
        let graph = builder.finish().unwrap();
        let layers = table(&[("features.*", &[("spatial", 2)]), ("classifier.*", &[("tensor", 2)])]).unwrap();
        layers.check_names(&graph).unwrap();
        assert_eq!((layers.of(Way::Spatial, "features.3"), layers.of(Way::Tensor, "features.3")), (Some(2), None));
        assert_eq!(layers.shared_params(Way::Tensor, &graph).keys().collect::<Vec<_>>(), ["classifier.1"]);
        assert_eq!((layers.ranks(Way::Spatial), layers.ranks(Way::Tensor)), (2, 2));
        let wrong = |lines: &[(&str, &[(&str, i64)])]| {
            let refusal = table(lines).unwrap().check_names(&graph).unwrap_err();
            (refusal.place, refusal.message)
        };
        assert_eq!(
            wrong(&[("feature.*", &[("spatial", 2)])]),
            (Some("job.toml:3".into()), "`parallel.layers.\"feature.*\"` names no layer of the model".into())
        );
        assert_eq!(
            wrong(&[("features.*", &[("spatial", 2)]), ("*.3", &[("spatial", 1)])]),
            (
                Some("job.toml:4".into()),
                "`parallel.layers.\"*.3\"` has `spatial = 1` and \"features.*\" (job.toml:3) has `spatial = 2`, but both name \
                 `features.3`"
                    .into()
            )
        );
        let four = table(&[("features.*", &[("spatial", 4)])]).unwrap();
        assert!(four.check_ranks(Way::Spatial, 2).unwrap_err().hint.contains("write 2, or 1"));
        assert!(table(&[("features.*", &[("pipeline", 2)])]).unwrap_err().contains("spatial, tensor"));
        assert!(table(&[("features.*", &[])]).unwrap_err().contains("sets nothing"));
    }
}
