//! Rewrites as text: each file under `rewrite/` shows a graph, names a rewrite, and shows the graph after it.
//! `KOLO_BLESS=1` writes what the rewrite gives into the file; read the difference before you commit it.

use kolo_graph::{Graph, text, verify};
use kolo_parallel::recompute::{Recompute, recompute};
use kolo_parallel::servers::{server_graph, worker_graph};
use kolo_parallel::spatial::Spatial;
use kolo_parallel::{Mesh, Purpose, Strategy, TrainingGraphs, central, data, zero};
use std::path::Path;

/// Small, so that the two gradients are two buckets.
const BUCKET_BYTES: usize = 16;

fn apply(name: &str, graph: &Graph) -> Graph {
    let rank = |rank| Mesh::data(2, rank).expect("two ranks");
    match name {
        "sum_over_ranks" => data::sum_over_ranks(graph, BUCKET_BYTES),
        "shard_optimizer, rank 0 of 2" => zero::shard_optimizer(graph, &rank(0), BUCKET_BYTES),
        "shard_optimizer, rank 1 of 2" => zero::shard_optimizer(graph, &rank(1), BUCKET_BYTES),
        "shard_gradients, rank 1 of 2" => zero::shard_gradients(graph, &rank(1), BUCKET_BYTES),
        "shard_weights, rank 0 of 2" => zero::shard_weights(graph, &rank(0), BUCKET_BYTES, 1),
        "share_weights, rank 0 of 2" => central::share_weights(graph, &rank(0), BUCKET_BYTES),
        "worker_graph" => worker_graph(graph),
        "server_graph, server 1 of 2" => server_graph(graph, 2, 1),
        "cut rows, one worker" => cut_rows(graph, 1, 0),
        "cut rows, rank 0 of 2" => cut_rows(graph, 2, 0),
        "recompute, blocks" => recompute(graph.clone(), &Recompute::Blocks.into()),
        "recompute, selective" => recompute(graph.clone(), &Recompute::Selective.into()),
        other => panic!("there is no rewrite `{other}`"),
    }
}

/// Images in two strips, of one worker or of two.
fn cut_rows(graph: &Graph, ranks: usize, rank: usize) -> Graph {
    let mesh = Mesh::new(&[("height", ranks)], rank).expect("a rank of the mesh");
    Spatial::new([ranks, 1], [2, 1])
        .split(graph.clone(), TrainingGraphs::new(graph), Purpose::Training, &mesh)
        .expect("images")
}

fn check(path: &Path) {
    let content = std::fs::read_to_string(path).unwrap();
    let (intro, before) = content.split_once("```\n").unwrap();
    let (before, rest) = before.split_once("```\n").unwrap();
    let graph =
        text::parse(before, &kolo_ops::registry()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    verify::verify(&graph).unwrap();
    let mut got = format!("{intro}```\n{before}```\n");
    for section in rest.split("\nAfter ").skip(1) {
        let name = section.split('`').nth(1).expect("the rewrite's name in backquotes");
        let rewritten = apply(name, &graph);
        verify::verify(&rewritten).unwrap_or_else(|problem| panic!("{name}: {problem}"));
        let (words, _) = section.split_once("```\n").unwrap_or((section, ""));
        got += &format!("\nAfter {}\n\n```\n{rewritten}```\n", words.trim_end());
    }
    if std::env::var_os("KOLO_BLESS").is_some() {
        std::fs::write(path, got).unwrap();
        return;
    }
    assert_eq!(got, content, "{}", path.display());
}

#[test]
fn every_file_holds() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rewrite");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty());
    files.iter().for_each(|path| check(path));
}
