//! Rewrites as text: each file under `rewrite/` shows a graph, names a rewrite, and shows the graph after it.
//! `KOLO_BLESS=1` writes what the rewrite gives into the file; read the difference before you commit it.

use kolo_graph::rng::Stream;
use kolo_graph::{Builder, DType, Graph, Tensor, rewrite, text, verify};
use kolo_ops::fuse::fuse_elementwise;
use kolo_ops::lower_precision::lower_precision;
use kolo_ops::product_part::absorb_slices;
use std::path::Path;

mod grammar;
/// What needs every op. Here, because a library's own test binary would have all kernels compiled a second time for them.
mod whole;

fn apply(name: &str, graph: Graph) -> Graph {
    match name {
        "eliminate_dead" => rewrite::eliminate_dead(graph),
        "merge_common" => rewrite::merge_common(graph),
        "absorb_slices" => rewrite::eliminate_dead(absorb_slices(&graph)),
        "fuse_elementwise" => fuse_elementwise(&graph),
        "lower_precision" => lower_precision(&graph, DType::BF16),
        "lower_precision and fuse_elementwise" => fuse_elementwise(&lower_precision(&graph, DType::BF16)),
        "gradients" => differentiate(graph),
        other => panic!("there is no rewrite `{other}`"),
    }
}

/// Adds the gradient of output "loss" with respect to every parameter as an output.
fn differentiate(graph: Graph) -> Graph {
    let loss = graph.output("loss").expect("a loss");
    let params: Vec<_> = graph.params().map(|(id, op)| (id, op.name.clone())).collect();
    let builder = Builder::resume(graph);
    let wrt: Vec<Tensor<'_>> = params.iter().map(|(id, _)| builder.tensor(*id)).collect();
    for (grad, (_, name)) in kolo_ops::gradients(&builder, builder.tensor(loss), 1.0, &wrt).iter().zip(&params) {
        builder.output(&format!("grad {name}"), grad.expect("the loss depends on every parameter"));
    }
    builder.finish().unwrap()
}

fn check(path: &Path) {
    let content = std::fs::read_to_string(path).unwrap();
    let mut parts = content.split("```\n");
    let (intro, before, middle, after) =
        (parts.next().unwrap(), parts.next().unwrap(), parts.next().unwrap(), parts.next().unwrap_or(""));
    let name = middle.split('`').nth(1).expect("the rewrite's name in backquotes");
    let graph =
        text::parse(before, &kolo_ops::registry()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    verify::verify(&graph).unwrap();
    let rewritten = apply(name, graph);
    verify::verify(&rewritten).unwrap_or_else(|problem| panic!("{}: {problem}", path.display()));
    let got = rewritten.to_string();
    if std::env::var_os("KOLO_BLESS").is_some() {
        std::fs::write(path, format!("{intro}```\n{before}```\n{middle}```\n{got}```\n")).unwrap();
        return;
    }
    assert_eq!(got, after, "{}", path.display());
}

#[test]
fn every_file_holds() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rewrite");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 4, "{} files", files.len());
    files.iter().for_each(|path| check(path));
}

/// Mutated graphs are read or refused, never a panic; what is read prints and reads again.
#[test]
fn mutated_graphs_never_panic() {
    let registry = kolo_ops::registry();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rewrite");
    let seeds: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap())
        .flat_map(|content| content.split("```\n").skip(1).step_by(2).map(String::from).collect::<Vec<_>>())
        .collect();
    let stream = Stream::new(1, "fuzz");
    let mut accepted = 0;
    for round in 0..20_000u64 {
        let mut bytes = seeds[round as usize % seeds.len()].clone().into_bytes();
        for edit in 0..1 + stream.below(round, 0, 3) {
            let at = stream.below(round, 10 + edit, bytes.len() as u64) as usize;
            let other = stream.below(round, 20 + edit, bytes.len() as u64) as usize;
            match stream.below(round, 30 + edit, 4) {
                0 => bytes[at] = b" %=(){}[],:#@\"0123456789-.abfx\n"[stream.below(round, 40 + edit, 31) as usize],
                1 => drop(bytes.remove(at)),
                2 => bytes.insert(at, bytes[other]),
                _ => bytes.swap(at, other),
            }
        }
        let Ok(mutated) = String::from_utf8(bytes) else { continue };
        if let Ok(graph) = text::parse(&mutated, &registry) {
            accepted += 1;
            let again = text::parse(&graph.to_string(), &registry).unwrap();
            assert_eq!(again.to_string(), graph.to_string());
            let _ = verify::verify(&graph);
        }
    }
    assert!(accepted > 100, "{accepted} mutations were still graphs");
}
