//! A strategy of your own with the whole command line around it: the gradients of all parameters travel in one exchange, when
//! the backward pass is over.
//!
//! `cargo run --release --example own_strategy -- train JOB.toml -n 2`, where the job says `at_once = true` under
//! `[parallel]`. A strategy is a rewrite of the step's graph; the weights stay the same to the bit.

use kolo::parallel::strategy::{Facts, Key, KeyValue, Part, Refusal};
use kolo::parallel::{Mesh, Purpose, Strategy, StrategyKind, data};
use kolo::prelude::Graph;
use std::sync::Arc;

const AT_ONCE: Key = Key {
    name: "at_once",
    value: KeyValue::Flag { default: false },
    of_job: false,
    doc: "all gradients travel in one exchange, when the backward pass is over",
};

const KIND: StrategyKind = StrategyKind {
    name: "at_once",
    doc: "data parallelism with one exchange of all gradients",
    keys: &[AT_ONCE],
    read: |settings| Ok(AT_ONCE.flag(settings)?.then(|| Arc::new(AtOnce) as Arc<dyn Strategy>)),
};

#[derive(Debug)]
struct AtOnce;

impl Strategy for AtOnce {
    fn name(&self) -> &'static str {
        KIND.name
    }

    /// It decides how gradients become new parameters, as `zero` and `central` do: a job has one of them.
    fn part(&self) -> Part {
        Part::Update
    }

    fn written(&self) -> String {
        "parallel.at_once = true".into()
    }

    /// What does not go with the job is said before anything runs, with the line of the key.
    fn check(&self, job: Facts, _others: &[&dyn Strategy]) -> Result<(), Refusal> {
        match job.early_stop {
            true => Err(Refusal::of_key(&AT_ONCE, "is for runs of a fixed length", "leave `early_stop` out")),
            false => Ok(()),
        }
    }

    fn rewrite(&self, graph: Graph, purpose: Purpose, mesh: &Mesh) -> Graph {
        match data::is_shared(purpose, mesh) {
            true => data::sum_over_ranks(&graph, usize::MAX),
            false => graph,
        }
    }

    /// Stands in the report, beside the sizes of the mesh's axes.
    fn layout(&self) -> Vec<(&'static str, usize)> {
        vec![("at_once", 1)]
    }
}

fn main() -> std::process::ExitCode {
    kolo::App::new().strategy(KIND).run()
}
