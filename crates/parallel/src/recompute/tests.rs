use super::*;
use kolo_graph::collective::AxisSum;
use kolo_graph::layout::{NoAbilities, plan};
use kolo_graph::rewrite::{eliminate_dead, merge_common};
use kolo_graph::settings::{Setting, Settings};
use kolo_graph::sources::GrainSum;
use kolo_graph::verify::verify;
use kolo_graph::{Builder, Node, Type};
use kolo_ops::dropout::Dropout;
use kolo_ops::matmul::MatMul;
use kolo_ops::prelude::*;
use std::collections::BTreeSet;

const WIDTH: usize = 16;

/// Residual layers of two products, gelu and dropout; with `scopes`, each in a scope of its own, and with `exchange`, the sum
/// over two ranks before the residual.
fn step(layers: usize, scopes: bool, exchange: bool) -> Graph {
    let builder = Builder::new();
    let rng = builder.input("rng", Type::i32([4]));
    let mut x = builder.input("x", Type::f32([8, WIDTH]));
    let mut params = Vec::new();
    for layer in 0..layers {
        let mut build = || {
            let mut weight = |name: &str, shape: [usize; 2]| {
                let name = if scopes { name.into() } else { format!("{name}{layer}") };
                let param = builder.param(&name, shape, Init::ZEROS);
                params.push(param);
                param
            };
            let (up, down) = (weight("up", [4 * WIDTH, WIDTH]), weight("down", [WIDTH, 4 * WIDTH]));
            let hidden = x.linear(up, None).gelu_tanh();
            let mut out = hidden.linear(down, None);
            if exchange {
                out = out.then(AxisSum { axis: "tensor".into(), ranks: 2 }, &[]);
            }
            x.add(out.dropout(0.5, rng, layer as i64))
        };
        x = if scopes { builder.scope(format!("h.{layer}"), build) } else { build() };
    }
    let loss = x.mul(x).sum_all();
    builder.output("loss", loss.then(GrainSum { of: String::new() }, &[]));
    let grads = kolo_ops::gradients(&builder, loss, 1.0, &params);
    for (param, grad) in params.iter().zip(grads) {
        let name = builder.qualify(&format!("{:?}", param.id()));
        builder.output(&name, grad.unwrap().then(GrainSum { of: String::new() }, &[]));
    }
    merge_common(eliminate_dead(builder.finish().unwrap()))
}

/// Residual layers of two products with the sum over two ranks between them.
fn summed_step(layers: usize) -> Graph {
    let builder = Builder::new();
    let mut x = builder.input("x", Type::f32([8, WIDTH]));
    let mut params = Vec::new();
    for layer in 0..layers {
        x = builder.scope(format!("h.{layer}"), || {
            let up = builder.param("up", [4 * WIDTH, WIDTH], Init::ZEROS);
            let down = builder.param("down", [WIDTH, 4 * WIDTH], Init::ZEROS);
            params.extend([up, down]);
            let hidden = x.linear(up, None).then(AxisSum { axis: "tensor".into(), ranks: 2 }, &[]);
            x.add(hidden.linear(down, None))
        });
    }
    let loss = x.mul(x).sum_all();
    builder.output("loss", loss.then(GrainSum { of: String::new() }, &[]));
    let grads = kolo_ops::gradients(&builder, loss, 1.0, &params);
    for (param, grad) in params.iter().zip(grads) {
        let name = builder.qualify(&format!("{:?}", param.id()));
        builder.output(&name, grad.unwrap().then(GrainSum { of: String::new() }, &[]));
    }
    merge_common(eliminate_dead(builder.finish().unwrap()))
}

fn count(graph: &Graph, is: impl Fn(&Node) -> bool) -> usize {
    graph.nodes.iter().filter(|node| is(node)).count()
}

/// Operations of the forward pass that a graph's backward pass reads the results of, by scope.
fn read_across(graph: &Graph) -> BTreeSet<String> {
    let backward = graph.nodes.iter().filter(|node| node.stage == Stage::Backward);
    let makers = backward.flat_map(|node| &node.inputs).map(|id| graph.maker(*id));
    let made = makers.filter(|node| node.stage == Stage::Forward && !node.inputs.is_empty());
    made.map(|node| format!("{} {}", node.scope, node.op.name())).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| name.to_string()).collect()
}

#[test]
fn blocks_are_computed_again_from_their_inputs() {
    let before = step(3, true, false);
    let after = recompute(before.clone(), &Recompute::Blocks.into());
    verify(&after).unwrap();
    // The last layer's result is read by the loss, which belongs to no layer.
    assert_eq!(read_across(&after), set(&["h.0 add", "h.1 add", "h.2 add"]));
    assert!(read_across(&before).contains("h.1 gelu_tanh"));
    // What leads to the layer's result alone is not repeated: its second product and the dropout.
    let products = |graph: &Graph| count(graph, |node| node.op.is::<MatMul>());
    assert_eq!(products(&after) - products(&before), 3);
    let drops = |graph: &Graph| count(graph, |node| node.op.is::<Dropout>());
    assert_eq!(drops(&after), drops(&before));
}

#[test]
fn copies_stand_just_before_their_use() {
    let after = recompute(step(3, true, false), &Recompute::Blocks.into());
    let is_copy = |node: &Node| node.stage == Stage::Backward && node.op.name() == "gelu_tanh";
    let copies: Vec<(usize, &Node)> = after.nodes.iter().enumerate().filter(|(_, node)| is_copy(node)).collect();
    let scopes: Vec<&str> = copies.iter().map(|(_, node)| &*node.scope).collect();
    assert_eq!(scopes, ["h.2", "h.1", "h.0"], "in the order of the backward pass");
    for (at, node) in copies {
        assert_eq!(&*after.nodes[at - 1].scope, &*node.scope, "after the product that it repeats");
        assert!(after.nodes[at + 1].inputs.contains(&node.outputs[0]), "before the node that reads it");
    }
    let bytes = |graph: &Graph| plan(graph, 4, 1, &NoAbilities).grain_bytes;
    let before = step(12, true, false);
    let [blocks, selective] =
        [Recompute::Blocks, Recompute::Selective].map(|what| recompute(before.clone(), &what.into()));
    assert!(bytes(&blocks) * 3 < bytes(&before), "{} of {}", bytes(&blocks), bytes(&before));
    assert!(bytes(&selective) * 3 < bytes(&before) * 2, "{} of {}", bytes(&selective), bytes(&before));
}

#[test]
fn selective_keeps_products() {
    let before = step(3, true, false);
    let after = recompute(before.clone(), &Recompute::Selective.into());
    verify(&after).unwrap();
    let products = |graph: &Graph| count(graph, |node| node.op.is::<MatMul>());
    assert_eq!(products(&after), products(&before), "no product runs twice");
    assert_eq!(count(&after, |node| node.op.name() == "gelu_tanh"), 6, "gelu does");
    assert!(!read_across(&after).contains("h.1 gelu_tanh"));
}

#[test]
fn no_exchange_is_repeated() {
    // Of products that end in an exchange, a layer's second half would need one.
    for what in [Recompute::Blocks, Recompute::Selective] {
        let before = step(3, true, true);
        let exchanges = |graph: &Graph| count(graph, |node| node.op.collective().is_some());
        let after = recompute(before.clone(), &what.into());
        verify(&after).unwrap();
        assert_eq!(exchanges(&after), exchanges(&before), "{what:?}");
        assert!(after.nodes.len() > before.nodes.len());
    }
}

#[test]
fn full_repeats_exchanges_of_layers() {
    let exchanges = |graph: &Graph| count(graph, |node| node.op.collective().is_some());
    // The sum is read by a product that follows it: without that, no backward pass would need it again.
    let before = summed_step(3);
    let [blocks, full] = [Recompute::Blocks, Recompute::Full].map(|what| recompute(before.clone(), &what.into()));
    [&blocks, &full].into_iter().for_each(|graph| verify(graph).unwrap());
    assert_eq!(exchanges(&blocks), exchanges(&before));
    assert!(read_across(&blocks).iter().any(|made| made.ends_with("axis_sum")), "{:?}", read_across(&blocks));
    assert_eq!(exchanges(&full), exchanges(&before) + 3, "one of each layer");
    assert_eq!(read_across(&full), set(&["h.0 add", "h.1 add", "h.2 add"]));
    assert!(plan_bytes(&full) < plan_bytes(&blocks), "{} {}", plan_bytes(&full), plan_bytes(&blocks));
}

#[test]
fn a_model_without_layers_is_cut_where_few_bytes_cross() {
    let before = step(12, false, false);
    let known = Known::of(&before);
    let blocks: BTreeSet<usize> = known.block_of.iter().flatten().copied().collect();
    let nodes = known.block_of.iter().flatten().count();
    assert!((4..=2 * nodes.isqrt()).contains(&blocks.len()), "{} blocks of {nodes} nodes", blocks.len());
    let after = recompute(before.clone(), &Recompute::Blocks.into());
    verify(&after).unwrap();
    // Runs end at the narrow places between layers: what is read across is no hidden value.
    assert!(!read_across(&after).contains(" gelu_tanh"), "{:?}", read_across(&after));
    let bytes = |graph: &Graph| plan(graph, 4, 1, &NoAbilities).grain_bytes;
    assert!(bytes(&after) * 2 < bytes(&before), "{} of {}", bytes(&after), bytes(&before));
}

/// `[memory]` with these lines of `layers`.
fn plan_of(usual: &str, lines: &[(&str, &str)]) -> RecomputePlan {
    let mut memory = Settings::new("memory", "job.toml:1");
    memory.set("recompute", "job.toml:2", Setting::Text(usual.into()));
    let layers = memory.table_mut("layers", "job.toml:3").unwrap();
    for (at, (pattern, what)) in lines.iter().enumerate() {
        layers.set(pattern, &format!("job.toml:{}", at + 4), Setting::Text((*what).into()));
    }
    RecomputePlan::read(&memory).unwrap()
}

#[test]
fn layers_differ_in_what_they_compute_again() {
    let before = step(4, true, false);
    let plan = plan_of("none", &[("h.{0-1}", "blocks"), ("h.3.*", "selective")]);
    assert_eq!(
        ["h.0", "h.1", "h.2", "h.3"].map(|layer| plan.of(layer).name()),
        ["blocks", "blocks", "none", "selective"]
    );
    plan.check_names(&before).unwrap();
    let after = recompute(before.clone(), &plan);
    verify(&after).unwrap();
    let copies = |name: &str| -> Vec<String> {
        let copied = after.nodes.iter().filter(|node| node.stage == Stage::Backward && node.op.name() == name);
        copied.map(|node| node.scope.to_string()).collect()
    };
    assert_eq!(copies("gelu_tanh"), ["h.3", "h.1", "h.0"], "in the order of the backward pass");
    let products = |graph: &Graph| count(graph, |node| node.op.is::<MatMul>());
    assert_eq!(products(&after) - products(&before), 2, "of the first two layers");
    let bytes = |plan: &RecomputePlan| {
        let graph = recompute(before.clone(), plan);
        plan_bytes(&graph)
    };
    let sizes = [plan_of("none", &[]), plan_of("none", &[("h.0", "blocks")]), plan, plan_of("blocks", &[])]
        .map(|one| bytes(&one));
    assert!(sizes.is_sorted_by(|one, other| one > other), "{sizes:?}");
}

fn plan_bytes(graph: &Graph) -> usize {
    plan(graph, 4, 1, &NoAbilities).grain_bytes
}

#[test]
fn lines_name_layers_and_agree_about_them() {
    let graph = step(4, true, false);
    let wrong = |lines: &[(&str, &str)], graph: &Graph| {
        let refusal = plan_of("none", lines).check_names(graph).unwrap_err();
        (refusal.place.unwrap_or_default(), refusal.message, refusal.hint)
    };
    let (place, message, hint) = wrong(&[("h.0", "blocks"), ("h.{4-9}", "blocks")], &graph);
    assert_eq!(place, "job.toml:5");
    assert_eq!(message, "`memory.layers.\"h.{4-9}\"` names no layer of the model that can be recomputed");
    assert_eq!(hint, "layers are h.0, h.1, h.2, h.3 …; `*` stands for any text, `{0-3}` for a number");
    let (place, message, _) = wrong(&[("h.*", "blocks"), ("h.3", "none")], &graph);
    assert_eq!(place, "job.toml:5");
    assert_eq!(
        message,
        "`memory.layers.\"h.3\"` is \"none\" and \"h.*\" (job.toml:4) is \"blocks\", but both name `h.3`"
    );
    let (_, _, hint) = wrong(&[("h.0", "blocks")], &step(4, false, false));
    assert!(hint.contains("has no repeated layers"), "{hint}");
}

#[test]
fn layers_in_a_row_share_a_line() {
    let names: Vec<String> = (0..12).map(|number| format!("h.{number}")).collect();
    let text = |what: &dyn Fn(usize) -> Recompute| {
        table_text(&names.iter().enumerate().map(|(at, name)| (name.as_str(), what(at))).collect::<Vec<_>>())
    };
    assert_eq!(text(&|at| if at < 9 { Recompute::Blocks } else { Recompute::None }), "{ \"h.{0-8}\" = \"blocks\" }");
    let three = |at: usize| [Recompute::Blocks, Recompute::None, Recompute::Selective][at / 4];
    assert_eq!(text(&three), "{ \"h.{0-3}\" = \"blocks\", \"h.{8-11}\" = \"selective\" }");
    assert_eq!(text(&|at| if at == 10 { Recompute::Blocks } else { Recompute::None }), "{ \"h.10\" = \"blocks\" }");
    let stages = [("layer1.0", Recompute::Blocks), ("layer2.0", Recompute::Blocks), ("layer2.1", Recompute::Blocks)];
    assert_eq!(table_text(&stages), "{ \"layer1.0\" = \"blocks\", \"layer2.{0-1}\" = \"blocks\" }");
}

#[test]
fn without_a_backward_pass_nothing_changes() {
    let builder = Builder::new();
    let x = builder.input("x", Type::f32([4]));
    let y = builder.scope("h.0", || x.gelu_tanh());
    builder.output("y", builder.scope("h.1", || y.gelu_tanh()).sum_all().then(GrainSum { of: String::new() }, &[]));
    let graph = builder.finish().unwrap();
    let nodes = graph.nodes.len();
    for what in Recompute::ALL {
        assert_eq!(recompute(graph.clone(), &what.into()).nodes.len(), nodes);
    }
    assert_eq!(Recompute::ALL.map(|what| Recompute::named(what.name())), Recompute::ALL.map(Some));
    assert_eq!(Recompute::named("all"), None);
}
