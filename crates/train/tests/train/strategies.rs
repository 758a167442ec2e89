//! Strategies as a list: one from outside the workspace works like those inside, and nobody asks for one by its name.

use crate::same_bits::{STEPS, jobs};
use crate::workers::{assert_same, on_ranks, report};
use kolo_graph::Graph;
use kolo_graph::collective::AllReduce;
use kolo_graph::settings::Settings;
use kolo_models::MODELS;
use kolo_parallel::data::{Bucket, buckets, copy_grains, exchange_bucket};
use kolo_parallel::keys::SequenceSplit;
use kolo_parallel::mesh::DATA;
use kolo_parallel::strategy::{Facts, Key, KeyValue, Part, Refusal};
use kolo_parallel::{Mesh, Purpose, STRATEGIES, Strategy, StrategyKind};
use kolo_train::job::Kinds;
use kolo_train::session::WorkerGroup;
use kolo_train::step::graph_of;
use kolo_train::{Job, job_file};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

const HALVES: Key = Key {
    name: "halves",
    value: KeyValue::Flag { default: false },
    of_job: false,
    doc: "the gradients of the parameters are summed in two halves",
};

const KIND: StrategyKind = StrategyKind {
    name: "halves",
    doc: "data parallelism with two exchanges of gradients",
    keys: &[HALVES],
    read: |settings| Ok(HALVES.flag(settings)?.then(|| Arc::new(Halves) as Arc<dyn Strategy>)),
};

#[derive(Debug)]
struct Halves;

impl Strategy for Halves {
    fn name(&self) -> &'static str {
        KIND.name
    }
    fn part(&self) -> Part {
        Part::Update
    }
    fn written(&self) -> String {
        "parallel.halves = true".into()
    }
    fn check(&self, job: Facts, _: &[&dyn Strategy]) -> Result<(), Refusal> {
        match job.early_stop {
            true => Err(Refusal::of_key(&HALVES, "does not stop early", "leave one of the two out")),
            false => Ok(()),
        }
    }
    fn rewrite(&self, graph: Graph, purpose: Purpose, mesh: &Mesh) -> Graph {
        if purpose != Purpose::Training || mesh.size(DATA) == 1 {
            return graph;
        }
        let (mut rebuild, after) = copy_grains(&graph);
        let all = buckets(&graph, usize::MAX);
        for bucket in &all {
            let (first, second) = bucket.sums.split_at(if bucket.gradients { bucket.sums.len() / 2 } else { 0 });
            for (half, sums) in [first, second].into_iter().enumerate().filter(|(_, sums)| !sums.is_empty()) {
                let half = Bucket { name: format!("{}/{half}", bucket.name), sums: sums.to_vec(), ..bucket.clone() };
                exchange_bucket(&mut rebuild, AllReduce { axis: DATA.into() }, &half);
            }
        }
        after.into_iter().for_each(|node| {
            rebuild.copy(node);
        });
        rebuild.finish()
    }
    fn layout(&self) -> Vec<(&'static str, usize)> {
        vec![("halves", 2)]
    }
}

fn settings(text: &str, parallel: &str) -> Settings {
    job_file::parse(&format!("{text}[parallel]\n{parallel}\n"), "test.toml").unwrap()
}

/// The job, read with the strategy from outside beside the others.
fn job(text: &str, parallel: &str) -> Result<Arc<Job>, String> {
    let kinds = [STRATEGIES, &[KIND]].concat();
    Job::read_among(&settings(text, parallel), &Kinds { strategies: &kinds, ..Kinds::default() })
        .map(Arc::new)
        .map_err(|error| error.to_string())
}

const TEXT: &str = "[model]\nkind = \"mlp\"\n[data]\nsource = \"builtin:playground\"\nbatch = 32\ngrains = 8\n";

#[test]
fn a_strategy_from_outside_gives_the_same_bits() {
    for (name, text) in jobs().into_iter().take(2) {
        let alone = report(&job(&text, "").unwrap(), WorkerGroup::Alone);
        assert_eq!(alone.steps, STEPS);
        let halves = job(&text, "halves = true").unwrap();
        let sums = |job: &Job| {
            let graph = graph_of(job, &job.parallel, Purpose::Training, &Mesh::data(2, 0).unwrap()).unwrap();
            graph.nodes.iter().filter(|node| node.op.is::<AllReduce>()).count()
        };
        assert_eq!(sums(&halves), 3, "two halves, and the loss");
        for workers in [2, 4] {
            let reports = on_ranks(workers, |world| report(&halves, WorkerGroup::Workers(world)));
            reports.iter().for_each(|other| assert_same(&format!("{name}, {workers} workers"), &alone, other));
            let layout = [("data", workers), ("halves", 2), ("pipeline", 1), ("tensor", 1), ("zero", 0)];
            assert_eq!(reports[0].layout, layout.into());
        }
    }
}

#[test]
fn keys_and_conflicts_of_a_strategy_from_outside_are_told() {
    let refused = |parallel: &str| job(TEXT, parallel).unwrap_err();
    assert_eq!(
        refused("halfs = true"),
        "test.toml:8: unknown key `parallel.halfs`\n  hint: did you mean `halves`? The keys here are bucket_mib, central, chunks, context, halves, layers, pipeline, prefetch, schedule, sequence, slices, spatial, stages, tensor, tensor_slices, tiles, wire, zero"
    );
    let unknown = Job::read(&settings(TEXT, "halves = true"), MODELS).unwrap_err().to_string();
    assert!(unknown.starts_with("test.toml:8: unknown key `parallel.halves`"), "{unknown}");
    assert_eq!(
        refused("zero = 1\nhalves = true"),
        "test.toml:7: `parallel.halves = true` cannot be combined with `parallel.zero = 1`\n  hint: keep one of the two"
    );
    let early = format!("{TEXT}[train]\nearly_stop = {{ patience = 2 }}\n");
    assert_eq!(
        job(&early, "halves = true").unwrap_err(),
        "test.toml:10: `parallel.halves` does not stop early\n  hint: leave one of the two out"
    );
    let settings = job(TEXT, "halves = true").unwrap().settings.clone();
    assert!(settings.contains(&("parallel.halves".into(), "true".into())), "ranks agree on it: {settings:?}");
}

/// Every strategy that a job file can choose, and what it refuses: where, what and a hint.
#[test]
fn strategies_inside_are_refused_where_they_stand() {
    let refused = |text: &str, parallel: &str| job(text, parallel).unwrap_err();
    assert_eq!(
        refused(TEXT, "zero = 4"),
        "test.toml:8: `parallel.zero` is 4, but stages are 0 to 3\n  hint: write 1 to shard the optimizer, 2 for the gradients as well, or 3 for the weights, too"
    );
    assert_eq!(
        refused(TEXT, "zero = 1\ncentral = true"),
        "test.toml:9: `parallel.central` cannot be combined with `zero = 1`\n  hint: keep one of the two: central storage shards the optimizer already"
    );
    assert_eq!(
        refused(TEXT, "tensor = 2"),
        "test.toml:8: `parallel.tensor` is 2, but sums have 1 slice: workers that share a sum need a slice each, so that its order is that of the job\n  hint: write `slices = 2` beside it, or `job.reproducible = false`"
    );
    assert_eq!(
        refused(TEXT, "wire = \"bf16\""),
        "test.toml:8: `parallel.wire` is \"bf16\", which changes the bits of the sums\n  hint: write `reproducible = false` under [job], or `wire = \"f32\"`"
    );
    let free = format!("[job]\nreproducible = false\n{TEXT}");
    assert_eq!(
        refused(&free, "wire = \"bf16\"\ncentral = true"),
        "test.toml:10: `parallel.wire` is \"bf16\", which cannot be combined with a sharded optimizer\n  hint: keep one of the two"
    );
}

/// Ranks along an axis of their own, each of which computes the same; it has a key of its own.
#[derive(Debug)]
struct Copies(usize);

const COUNT: Key = Key {
    name: "copies",
    value: KeyValue::Count { default: 1, least: 1, most: usize::MAX },
    of_job: false,
    doc: "ranks that compute the same",
};

const COPIES: StrategyKind = StrategyKind {
    name: "copies",
    doc: "ranks that compute the same",
    keys: &[COUNT],
    read: |settings| Ok(Some(Arc::new(Copies(COUNT.count(settings)?)))),
};

impl Strategy for Copies {
    fn name(&self) -> &'static str {
        COPIES.name
    }
    fn part(&self) -> Part {
        Part::Model
    }
    fn written(&self) -> String {
        format!("parallel.copies = {}", self.0)
    }
    fn axes(&self) -> Vec<(&'static str, usize)> {
        vec![(COUNT.name, self.0)]
    }
}

fn copies(text: &str, parallel: &str) -> Result<Job, String> {
    let kinds = [STRATEGIES, &[COPIES]].concat();
    let kinds = Kinds { strategies: &kinds, ..Kinds::default() };
    Job::read_among(&settings(text, parallel), &kinds).map_err(|error| error.to_string())
}

#[test]
fn an_axis_takes_workers_from_the_data() {
    let mut job = copies(TEXT, "copies = 2\nzero = 1").unwrap();
    let mesh = job.parallel.mesh(8, 5).unwrap();
    assert_eq!((mesh.size(DATA), mesh.size("copies")), (4, 2));
    assert_eq!((mesh.coordinate(DATA), mesh.coordinate("copies")), (2, 1));
    assert_eq!(
        job.parallel.layout(8),
        [("copies", 2), ("data", 4), ("pipeline", 1), ("tensor", 1), ("zero", 1)].into()
    );
    job.fit_to(16).unwrap();
    let error = job.fit_to(3).unwrap_err().to_string();
    assert_eq!(error, "3 workers cannot be arranged as a mesh with copies = 2\n  hint: use a multiple of 2 workers");
    assert_eq!(
        copies(TEXT, "copies = 2\ncentral = true").unwrap_err(),
        "test.toml:9: `parallel.central` cannot be combined with `parallel.copies = 2`\n  hint: keep one of the two"
    );
}

/// Grains belong to the data axis alone, and so do sums and turns in evaluations.
#[test]
fn ranks_along_another_axis_share_no_grains() {
    let (_, text) = &jobs()[1];
    let alone = report(&job(text, "").unwrap(), WorkerGroup::Alone);
    for (workers, parallel) in [(2, "copies = 2"), (4, "copies = 2"), (8, "copies = 2\nzero = 1")] {
        let job = Arc::new(copies(text, parallel).unwrap());
        let reports = on_ranks(workers, |world| report(&job, WorkerGroup::Workers(world)));
        reports.iter().for_each(|other| assert_same(&format!("{workers} workers, {parallel}"), &alone, other));
    }
}

/// A rank that owns nothing of a bucket makes the same exchanges in the same order as the others.
#[test]
fn all_ranks_make_the_same_exchanges_in_one_order() {
    let exchanges = |graph: &Graph| {
        let mut found: Vec<_> = graph.nodes.iter().zip(graph.phases()).collect();
        found.retain(|(node, _)| node.op.collective().is_some());
        found.sort_by_key(|(_, phase)| *phase);
        found.iter().map(|(node, phase)| format!("{phase:?} {} {}", node.op.name(), node.scope)).collect::<Vec<_>>()
    };
    for optimizer in ["sgd", "adamw", "lars", "lamb"] {
        for clip in ["", "clip = 0.5\n"] {
            let text = format!("{TEXT}[train]\n{clip}optimizer = {{ kind = \"{optimizer}\" }}\n");
            for parallel in ["", "zero = 1", "zero = 1\nbucket_mib = 0", "central = true\nbucket_mib = 0"] {
                let job = job(&text, parallel).unwrap();
                for ranks in [2, 4, 8] {
                    let graph = |rank: usize| {
                        let mesh = Mesh::data(ranks, rank).unwrap();
                        exchanges(&graph_of(&job, &job.parallel, Purpose::Training, &mesh).unwrap())
                    };
                    let first = graph(0);
                    assert!(first.iter().all(|name| name.starts_with("After")), "{first:?}");
                    (1..ranks).for_each(|rank| assert_eq!(graph(rank), first, "{optimizer}, {parallel}, rank {rank}"));
                }
            }
        }
    }
}

/// Every source file of these crates, with its path from their folder.
fn sources(wanted: impl Fn(&str) -> bool) -> Vec<(String, String)> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folders = std::fs::read_dir(&crates).unwrap().map(|entry| entry.unwrap());
    let folders = folders.filter(|folder| folder.file_name().to_str().is_some_and(&wanted));
    let mut todo: Vec<_> = folders.map(|folder| folder.path().join("src")).collect();
    let mut files = Vec::new();
    while let Some(path) = todo.pop() {
        if path.is_dir() {
            todo.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let name = path.strip_prefix(&crates).unwrap().display().to_string();
        files.push((name, std::fs::read_to_string(&path).unwrap_or_default()));
    }
    files
}

/// The one part of the workspace that may know a strategy: parameter servers are processes of their own, and it runs them
/// (ARCHITECTURE.md, decision s).
const DRIVER: (&str, &str) = ("servers", "train/src/asynchronous");

/// Outside of their crate, strategies are asked, not known.
#[test]
fn nobody_asks_for_a_strategy_by_its_name() {
    let files = sources(|name| name != "parallel");
    for (path, text) in &files {
        let known = |kind: &&StrategyKind| (kind.name, true) == (DRIVER.0, path.starts_with(DRIVER.1));
        for kind in STRATEGIES.iter().filter(|kind| !known(kind)) {
            for used in [format!("kolo_parallel::{}", kind.name), format!("parallel.{}(", kind.name)] {
                assert!(!text.contains(&used), "{path} uses {used}");
            }
            let compared = [format!("name() == \"{}\"", kind.name), format!("name == \"{}\"", kind.name)];
            let names_strategy = text.contains("Strategy") && compared.iter().any(|used| text.contains(used));
            assert!(!names_strategy, "{path} compares a strategy with {}", kind.name);
        }
        let compared = ["== ", "!= "].iter().any(|sign| {
            let by_axis = ["PIPELINE", "TENSOR", "HEADS_AXIS", "RING_AXIS"].map(|axis| format!("name() {sign}{axis}"));
            by_axis.iter().any(|used| text.contains(used))
        });
        assert!(!compared, "{path} compares the name of a strategy with an axis");
        assert!(!text.contains("NarrowLane"), "{path} knows a lane of one strategy");
    }
    assert!(files.len() > 200, "{} files", files.len());
}

/// Words of other tables that keys of `[parallel]` share, and where: the keys of reports, of clusters and of other sections.
const OTHER_TABLES: [(&str, &[&str]); 7] = [
    ("cli/src/plan/layouts/json.rs", &["pipeline", "tensor", "sequence", "zero", "layers", "schedule", "chunks"]),
    ("cli/src/simulate/json.rs", &["pipeline", "tensor", "sequence", "zero", "layers", "schedule", "chunks"]),
    ("cli/src/data_command/bench.rs", &["stages"]),
    ("plan/src/system.rs", &["bucket_mib"]),
    ("plan/src/search/candidate.rs", &["layers"]),
    ("train/src/job.rs", &["schedule", "prefetch"]),
    // What other libraries call them, and what they are here; a test holds it against the keys that there are.
    ("train/src/foreign_keys.rs", &["schedule", "zero", "tensor", "pipeline"]),
];

/// Names, keys and axes of strategies are written where they are declared; others take the constants. `data` is a section of every
/// job as well.
#[test]
fn nobody_writes_a_key_of_a_strategy_again() {
    let mut words: BTreeSet<&str> = STRATEGIES.iter().flat_map(|kind| kind.keys).map(|key| key.name).collect();
    words.extend(STRATEGIES.iter().map(|kind| kind.name));
    words.extend(SequenceSplit::ALL.into_iter().filter_map(SequenceSplit::axis));
    words.remove(DATA);
    let users = ["train", "plan", "cli", "exec", "cluster", "cuda"];
    let files = sources(|name| users.contains(&name));
    for (path, text) in files.iter().filter(|(path, _)| !path.contains("tests")) {
        let text = text.split("#[cfg(test)]").next().unwrap_or_default();
        let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let own: Vec<&str> =
            OTHER_TABLES.iter().filter(|(at, _)| at == path).flat_map(|(_, words)| *words).copied().collect();
        for line in lines {
            let written =
                |word: &&&str| [format!("\"{word}\""), format!("\"parallel.{word}\"")].iter().any(|w| line.contains(w));
            let word = words.iter().filter(|word| !own.contains(word)).find(written);
            assert!(word.is_none(), "{path} writes {}, which `kolo_parallel` declares: {line}", word.unwrap());
        }
    }
    assert!(files.len() > 100, "{} files", files.len());
}

/// The guide's table of keys is the registry's.
#[test]
fn the_guide_has_every_key() {
    let guide = include_str!("../../../../docs/guide.md");
    let table = kolo_parallel::chosen::key_table(STRATEGIES);
    assert!(guide.contains(&table), "docs/guide.md does not hold this table:\n{table}");
}
