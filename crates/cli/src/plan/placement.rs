//! Where every parameter and every activation of a model lies that workers share.

use crate::output::println;
use kolo_graph::collective::{AxisScatter, AxisSum};
use kolo_graph::graph::Phase;
use kolo_graph::sources::{Input, Param};
use kolo_graph::{Graph, Stage, ValueId};
use std::collections::BTreeMap;

/// Prints which part of every parameter each of these ranks has.
pub fn print_parameters<'g>(ranks: impl Iterator<Item = (usize, &'g Graph)>) {
    let mut holders: BTreeMap<&str, (&[usize], Vec<(usize, String)>)> = BTreeMap::new();
    for (rank, graph) in ranks {
        for (_, param) in graph.params() {
            let part = part_of(param);
            holders.entry(&param.name).or_insert((param.whole(), Vec::new())).1.push((rank, part));
        }
    }
    println!("parameters, and who has which part of them");
    for (name, (whole, parts)) in holders {
        println!("  {name} {whole:?}  {}", by_ranks(&parts));
    }
}

/// What a rank has of a parameter: all of it, a shape cut from it, or a run of its elements.
fn part_of(param: &Param) -> String {
    let (whole, elements) = (param.whole(), param.shape.iter().product::<usize>());
    if param.shape == whole {
        return "all".into();
    }
    let mut runs = param.region().runs(0..elements);
    let first = runs.next().map_or(0, |(_, place, _)| place);
    match (param.shape.len() == whole.len(), runs.next()) {
        (true, _) => format!("{:?} from element {first}", param.shape),
        (false, None) => format!("elements {first}..{}", first + elements),
        (false, Some(_)) => format!("{elements} elements from {first}"),
    }
}

/// `ranks 0 1: all, rank 2: [4, 8]`, of ranks in their order.
fn by_ranks(parts: &[(usize, String)]) -> String {
    let mut groups: Vec<(&str, Vec<usize>)> = Vec::new();
    for (rank, part) in parts {
        match groups.iter_mut().find(|(known, _)| known == part) {
            Some((_, ranks)) => ranks.push(*rank),
            None => groups.push((part, vec![*rank])),
        }
    }
    let group = |(part, ranks): &(&str, Vec<usize>)| {
        let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
        format!("rank{} {}: {part}", if ranks.len() == 1 { "" } else { "s" }, numbers.join(" "))
    };
    groups.iter().map(group).collect::<Vec<_>>().join(", ")
}

/// A kind of activation: its layer, the op that makes it, and which of the op's results it is.
type Kind = (String, String, usize);

/// The results of the forward pass of a grain, by kind, in the order in which they are made.
fn activations(graph: &Graph) -> Vec<(Kind, Vec<String>)> {
    let readers = graph.readers();
    let is_term = |id: &ValueId| {
        readers[id.0 as usize].iter().any(|reader| {
            let op = &graph.node(*reader).op;
            op.is::<AxisSum>() || op.is::<AxisScatter>()
        })
    };
    let mut found: Vec<(Kind, Vec<String>)> = Vec::new();
    let mut places: BTreeMap<Kind, usize> = BTreeMap::new();
    for (node, phase) in graph.nodes.iter().zip(graph.phases()) {
        if node.stage != Stage::Forward
            || phase != Phase::Grain
            || node.op.is::<Input>()
            || node.op.collective().is_some()
        {
            continue;
        }
        // A slice of a product is the product's.
        let name = node.op.name();
        let name = name.strip_suffix("_part").unwrap_or(name);
        for (slot, id) in node.outputs.iter().enumerate() {
            let kind = (node.scope.to_string(), name.to_string(), slot);
            let at = *places.entry(kind.clone()).or_insert_with(|| {
                found.push((kind, Vec::new()));
                found.len() - 1
            });
            let term = if is_term(id) { ", a term of the sum" } else { "" };
            found[at].1.push(format!("{}{term}", graph.ty(*id)));
        }
    }
    found
}

/// Prints which part of every activation of a grain each rank makes. `whole` is the model of one worker; both are graphs before
/// ops are fused.
pub fn print_activations(whole: &Graph, ranks: &[(usize, Graph)]) {
    let ranks: Vec<(usize, BTreeMap<Kind, Vec<String>>)> =
        ranks.iter().map(|(rank, graph)| (*rank, activations(graph).into_iter().collect())).collect();
    println!("activations of a grain, and who makes which part of them");
    for (kind, types) in activations(whole) {
        let (scope, op, slot) = &kind;
        let scope = if scope.is_empty() { "the model's top" } else { scope };
        let result = if *slot == 0 { String::new() } else { format!(", result {slot}") };
        for (number, ty) in types.iter().enumerate() {
            let parts: Vec<(usize, String)> = ranks
                .iter()
                .filter_map(|(rank, own)| Some((*rank, made(own.get(&kind)?, number, types.len(), ty)?)))
                .collect();
            let parts = if parts.is_empty() { "by other ops, in parts".into() } else { by_ranks(&parts) };
            println!("  {scope} {op}{result} {ty}  {parts}");
        }
    }
}

/// What a rank makes of one of so many activations of a kind: the same number of them, or each in several slices.
fn made(own: &[String], number: usize, count: usize, whole: &str) -> Option<String> {
    let slices = own.len() / count;
    if slices == 0 || !own.len().is_multiple_of(count) {
        return (number == 0 && !own.is_empty()).then(|| own.join(" and "));
    }
    let part = &own[number * slices];
    Some(match (slices, part == whole) {
        (1, true) => "all".into(),
        (1, false) => part.clone(),
        (slices, true) => format!("the sum of {slices} slices"),
        (slices, false) => format!("{slices} × {part}"),
    })
}
