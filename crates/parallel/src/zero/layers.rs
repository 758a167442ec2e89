//! Layers: the parameters that are gathered together, and who keeps which run of each.
//!
//! A layer is what the names of parameters say: all that begins with the same words up to the first number, such as `h.3`, or
//! up to the last word where there is no number. Parameters that are trained and those that are frozen are two layers.

use crate::cut::{Owned, Unit, shares_of};
use crate::data::{buckets, param_of};
use kolo_graph::layout::shown_by;
use kolo_graph::piece::Piece;
use kolo_graph::share::packed;
use kolo_graph::sources::Param;
use kolo_graph::{Graph, ValueId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A run of a parameter's elements, and who keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub elements: Range<usize>,
    pub owner: usize,
}

/// A parameter of a layer.
#[derive(Clone, Debug)]
pub(super) struct Member {
    /// As a rank would have it that keeps it whole.
    pub param: Param,
    /// Elements before it in the packed layer.
    pub start: usize,
    pub runs: Vec<Run>,
}

impl Member {
    pub fn name(&self) -> &str {
        &self.param.name
    }

    /// What a rank keeps of it.
    pub fn own(&self, rank: usize) -> Option<Param> {
        let Run { elements, .. } = self.runs.iter().find(|run| run.owner == rank)?;
        let param = &self.param;
        if self.runs.len() == 1 {
            return Some(param.clone());
        }
        let region = param.region().skip(elements.start).to_numbers();
        Some(Param { shape: vec![elements.len()], whole: param.whole().to_vec(), region, ..param.clone() })
    }
}

/// Parameters that are gathered together, in the order of memory.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    pub name: String,
    pub members: Vec<Member>,
    /// Packed elements of each rank.
    pub sizes: Vec<usize>,
}

/// All layers of a model.
#[derive(Clone, Debug)]
pub(super) struct Layers(pub Vec<Layer>);

impl Layers {
    /// The layers of a step whose parameters are owned.
    pub fn of(owned: &Owned, ranks: usize) -> Self {
        let graph = &owned.graph;
        let mut runs: BTreeMap<String, Vec<Run>> = BTreeMap::new();
        for unit in &owned.units {
            let name = param_of(graph, shown_by(graph, unit.sum)).to_string();
            runs.entry(name).or_default().push(Run { elements: elements_of(graph, unit), owner: unit.owner });
        }
        let trained = layered(graph, |name| runs.contains_key(name));
        let frozen = layered(graph, |name| !runs.contains_key(name));
        let shares = shares_of(graph, frozen.iter().map(|(_, ids)| ids.clone()), ranks);
        for (id, pieces) in shares {
            let pieces = pieces.into_iter().map(|(elements, owner)| Run { elements, owner });
            runs.insert(name_of(graph, id).to_string(), pieces.collect());
        }
        let layer = |(name, ids): (String, Vec<ValueId>)| {
            let (mut start, mut sizes) = (0, vec![0; ranks]);
            let member = |id: &ValueId| {
                let param = param_at(graph, *id);
                let member = Member { param: param.clone(), start, runs: runs[&param.name].clone() };
                for run in &member.runs {
                    sizes[run.owner] += packed(run.elements.len());
                    start += packed(run.elements.len());
                }
                member
            };
            let members = ids.iter().map(member).collect();
            Layer { name, members, sizes }
        };
        Self(trained.into_iter().chain(frozen).map(layer).collect())
    }

    /// Each parameter's layer and place in it.
    pub fn places(&self) -> BTreeMap<&str, (usize, usize)> {
        let of_layer = |(number, layer): (usize, &'_ Layer)| {
            (0..layer.members.len()).map(move |member| (number, member)).collect::<Vec<_>>()
        };
        let all = self.0.iter().enumerate().flat_map(of_layer);
        all.map(|(layer, member)| (self.0[layer].members[member].name(), (layer, member))).collect()
    }
}

/// The elements of its parameter that a unit is.
pub(super) fn elements_of(graph: &Graph, unit: &Unit) -> Range<usize> {
    let start = graph.maker(unit.param).op.downcast::<Piece>().map_or(0, |piece| piece.start);
    start..start + graph.ty(unit.param).elements()
}

fn param_at(graph: &Graph, id: ValueId) -> &Param {
    graph.maker(id).op.downcast().expect("the value of a parameter")
}

fn name_of(graph: &Graph, id: ValueId) -> &str {
    &param_at(graph, id).name
}

/// The sums of gradients, layer by layer.
pub(super) fn layers_of_sums(graph: &Graph) -> Vec<Vec<ValueId>> {
    let gradients = buckets(graph, usize::MAX).into_iter().filter(|bucket| bucket.gradients);
    let sums: BTreeMap<String, ValueId> =
        gradients.flat_map(|bucket| bucket.sums).map(|sum| (param_of(graph, sum).to_string(), sum)).collect();
    let layers = layered(graph, |name| sums.contains_key(name));
    layers.into_iter().map(|(_, ids)| ids.iter().map(|id| sums[name_of(graph, *id)]).collect()).collect()
}

/// The chosen parameters in the order of memory, those of a layer that lie side by side together.
fn layered(graph: &Graph, chosen: impl Fn(&str) -> bool) -> Vec<(String, Vec<ValueId>)> {
    let mut layers: Vec<(String, Vec<ValueId>)> = Vec::new();
    let mut names: BTreeSet<String> = BTreeSet::new();
    let mut params: Vec<(ValueId, &Param)> = graph.params().filter(|(_, param)| chosen(&param.name)).collect();
    // The last made lies first.
    params.reverse();
    for (id, param) in params {
        let layer = layer_of(&param.name);
        match layers.last_mut().filter(|_| names.contains(layer)) {
            Some((name, ids)) if name.as_str() == layer => ids.push(id),
            _ => {
                names.insert(layer.into());
                layers.push((layer.into(), vec![id]));
            }
        }
    }
    layers
}

/// The layer that a parameter's name says.
fn layer_of(name: &str) -> &str {
    let mut end = 0;
    for word in name.split('.') {
        end += word.len();
        if !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit()) {
            return &name[..end];
        }
        end += 1;
    }
    name.rsplit_once('.').map_or(name, |(layer, _)| layer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_the_layer() {
        let names = ["h.3.attn.qkv.weight", "wte.weight", "layer1.0.conv1.weight", "bias", "fc.bias", "0.weight"];
        assert_eq!(names.map(layer_of), ["h.3", "wte", "layer1.0", "bias", "fc", "0"]);
    }
}
