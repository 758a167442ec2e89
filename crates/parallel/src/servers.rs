//! Parameter servers: the step cut in two. Workers run forward and backward and push the sums of their grains; servers run
//! the update, each on its own run of the parameters, and hand the new ones back.
//!
//! How far workers may drift apart is the staleness bound. With 0 a server adds all workers' sums in the order of the
//! balanced tree and updates once per step, which gives the bits of synchronous training. With more, it applies each
//! worker's gradient as it comes.

use crate::cut::{Others, Owned, param_updates};
use crate::data::{buckets, copy_grains, param_of};
use crate::mesh::{DATA, Mesh};
use crate::strategy::{Facts, Part, Purpose, Refusal, Strategy, StrategyKind};
use crate::zero::{self, shard};
use crate::{central, data, narrow};
use kolo_graph::collective::{AllGather, AllReduce, ReduceScatter};
use kolo_graph::graph::Phase;
use kolo_graph::layout::shown_by;
use kolo_graph::piece::{Join, Piece};
use kolo_graph::rewrite::{Rebuild, eliminate_dead};
use kolo_graph::sources::{GrainSum, Input, InputRole};
use kolo_graph::{Graph, Stage, ValueId};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// The command line chooses it, as it says how many processes there are.
pub const KIND: StrategyKind = StrategyKind {
    name: "servers",
    doc: "parameter servers (`--async`): workers push gradients, servers update and hand the weights back",
    keys: &[],
    read: |_| Ok(None),
};

/// Who does what, and how far workers may drift apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Roles {
    pub workers: usize,
    pub servers: usize,
    /// `None`: no bound.
    pub staleness: Option<u64>,
}

impl Roles {
    pub fn synchronous(&self) -> bool {
        self.staleness == Some(0)
    }

    /// The number of a rank among the servers, who come after the workers.
    pub fn server(&self, rank: usize) -> Option<usize> {
        rank.checked_sub(self.workers)
    }
}

/// Parameter servers with their number.
#[derive(Clone, Copy, Debug)]
pub struct Servers(pub Roles);

impl Strategy for Servers {
    fn name(&self) -> &'static str {
        KIND.name
    }
    fn part(&self) -> Part {
        Part::Update
    }
    fn written(&self) -> String {
        "--async".into()
    }
    fn check(&self, job: Facts, others: &[&dyn Strategy]) -> Result<(), Refusal> {
        let refused = |what: String, name: &str, why: &str| {
            let message = format!("`{what}` cannot be combined with --async: {why}");
            Err(Refusal::new(message, format!("leave {name} out, or train synchronously")))
        };
        if job.early_stop {
            return refused("train.early_stop".into(), "early_stop", "workers do not end together");
        }
        if job.scales_gradients {
            let why = "a worker could not tell which steps the servers leave out";
            return refused("train.precision = \"f16\"".into(), "precision", why);
        }
        if job.freezes {
            return refused("model.freeze".into(), "freeze", "the servers have trained parameters only");
        }
        for other in others {
            let written = other.written();
            let key = written.trim_start_matches("parallel.").split(" = ").next().unwrap_or_default();
            let (key, why) = match other.name() {
                name if name == data::KIND.name => continue,
                name if name == zero::KIND.name => {
                    (name, "the servers keep the optimizer, and no worker has a share of it")
                }
                name if name == central::KIND.name => (name, "the servers keep the weights, and each worker a copy"),
                name if name == narrow::KIND.name => ("wire", "gradients travel to the servers as f32"),
                _ => (key, "workers with servers split the batch and nothing else"),
            };
            return refused(written.clone(), key, why);
        }
        Ok(())
    }
    /// A worker never clips inside its graph. Servers clip only where they see the whole gradient.
    fn clip(&self, clip: Option<f32>, purpose: Purpose) -> Option<f32> {
        clip.filter(|_| purpose == Purpose::Server && self.0.synchronous())
    }
    fn rewrite(&self, graph: Graph, purpose: Purpose, mesh: &Mesh) -> Graph {
        match purpose {
            Purpose::Training => worker_graph(&graph),
            Purpose::Server => server_graph(&graph, mesh.size(DATA), mesh.coordinate(DATA)),
            Purpose::Evaluation { .. } => graph,
        }
    }
}

/// The worker's part: everything up to the sums, and the statistics that belong to no optimizer.
pub fn worker_graph(graph: &Graph) -> Graph {
    let (mut rebuild, after) = copy_grains(graph);
    after.into_iter().for_each(|node| {
        rebuild.copy(node);
    });
    let servers_own = graph.optimizer_states();
    let updates = graph.updates.iter().filter(|(state, _)| !servers_own.contains(state));
    let updates = updates.map(|(state, value)| (rebuild.get(*state), rebuild.get(*value))).collect();
    let mut outputs: Vec<(String, ValueId)> =
        graph.outputs.iter().map(|(name, id)| (name.clone(), rebuild.get(*id))).collect();
    for (id, sum) in graph.sources::<GrainSum>() {
        if !sum.of.is_empty() {
            outputs.push((gradient_name(&sum.of), rebuild.get(id)));
        }
    }
    (rebuild.new.outputs, rebuild.new.updates) = (outputs, updates);
    eliminate_dead(rebuild.new)
}

/// The name of the input through which a server takes a parameter's gradient.
pub fn gradient_name(param: &str) -> String {
    format!("grad.{param}")
}

/// The part of server `server` of `servers`: the update of its parameters from gradients that come as inputs.
pub fn server_graph(graph: &Graph, servers: usize, server: usize) -> Graph {
    let mesh = Mesh::data(servers, server).expect("a server is one of the servers");
    let sharded = shard(&Owned::cut(graph, servers, Others::Unknown), &mesh, usize::MAX);
    let needed = needed_by_optimizer(&sharded);
    let mut rebuild = Rebuild::new(&sharded);
    let updates = param_updates(&sharded);
    let mut known = vec![false; sharded.values.len()];
    for (node, phase) in sharded.nodes.iter().zip(sharded.phases()) {
        if node.op.is::<AllReduce>() {
            for (number, output) in node.outputs.iter().enumerate().filter(|(_, id)| needed[id.0 as usize]) {
                let new = step_input(&mut rebuild, sum_name(number), &sharded, *output);
                rebuild.set(*output, new);
                known[output.0 as usize] = true;
            }
            continue;
        }
        if node.op.is::<GrainSum>() || phase == Phase::Grain {
            continue;
        }
        if let Some(op) = node.op.downcast::<ReduceScatter>() {
            for ((sum, output), owner) in node.inputs.iter().zip(&node.outputs).zip(&op.owners) {
                if *owner == server {
                    let new = gradient_input(&mut rebuild, &sharded, *sum);
                    rebuild.set(*output, new);
                    known[output.0 as usize] = true;
                }
            }
            continue;
        }
        if !node.inputs.iter().all(|id| known[id.0 as usize]) {
            continue;
        }
        if node.op.is::<AllGather>() && node.outputs.iter().any(|id| updates.contains(id)) {
            for (input, output) in node.inputs.iter().zip(&node.outputs) {
                let new = rebuild.get(*input);
                rebuild.set(*output, new);
                known[output.0 as usize] = true;
            }
            continue;
        }
        rebuild.copy(node);
        node.outputs.iter().for_each(|id| known[id.0 as usize] = true);
    }
    let own = |value: &ValueId| known[value.0 as usize];
    let pairs = sharded.updates.iter().filter(|(_, value)| own(value));
    let pairs: Vec<(ValueId, ValueId)> =
        pairs.map(|(state, value)| (rebuild.get(*state), rebuild.get(*value))).collect();
    // A parameter of another server became itself, or a join of its own pieces: no update.
    let same = |state: ValueId, value: ValueId| {
        let node = rebuild.new.maker(value);
        let pieces = if node.op.is::<Join>() { &node.inputs[..] } else { &[value] };
        pieces.iter().all(|piece| shown_by(&rebuild.new, *piece) == state)
    };
    rebuild.new.updates = pairs.into_iter().filter(|(state, value)| !same(*state, *value)).collect();
    eliminate_dead(rebuild.new)
}

/// The name of the input through which a server takes a sum that is no gradient, by its number among those.
pub fn sum_name(number: usize) -> String {
    format!("sum.{number}")
}

/// The values that updates of the optimizer's states are computed from.
fn needed_by_optimizer(graph: &Graph) -> Vec<bool> {
    let mut needed = vec![false; graph.values.len()];
    let own = graph.optimizer_states();
    for (_, value) in graph.updates.iter().filter(|(state, _)| own.contains(state)) {
        needed[value.0 as usize] = true;
    }
    for node in graph.nodes.iter().rev() {
        // An exchange passes values on; it does not mix them.
        let pairs = node.op.is::<AllReduce>() || node.op.is::<ReduceScatter>();
        for (at, input) in node.inputs.iter().enumerate() {
            let wanted = match pairs {
                true => needed[node.outputs[at].0 as usize],
                false => node.outputs.iter().any(|id| needed[id.0 as usize]),
            };
            needed[input.0 as usize] |= wanted;
        }
    }
    needed
}

fn gradient_input(rebuild: &mut Rebuild<'_>, graph: &Graph, sum: ValueId) -> ValueId {
    step_input(rebuild, gradient_name(param_of(graph, shown_by(graph, sum))), graph, sum)
}

fn step_input(rebuild: &mut Rebuild<'_>, name: String, graph: &Graph, like: ValueId) -> ValueId {
    let ty = graph.ty(like).clone();
    let (dtype, shape, role) = (ty.dtype, ty.shape.to_vec(), InputRole::Data);
    let input = Input { name, dtype, shape, per_step: true, role };
    let node = rebuild.new.push_typed(Arc::new(input), Vec::new(), vec![ty], "".into(), Stage::Update);
    rebuild.new.node(node).outputs[0]
}

/// The runs of elements, in the memory of sums and in that of parameters alike, that each server has; then the sums that
/// are no gradients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shares {
    pub servers: Vec<Range<usize>>,
    pub others: Range<usize>,
    /// Those of the others that updates need, by their number among them: every server gets these.
    pub needed: Vec<(usize, Range<usize>)>,
    /// For each server, the elements of its first tensor that are before its run.
    pub skipped: Vec<usize>,
}

/// Elements of a tensor with its padding.
fn padded(graph: &Graph, id: ValueId) -> usize {
    kolo_graph::layout::align(graph.ty(id).bytes()) / 4
}

/// Who has what. Refuses a step with a parameter that is not trained: it would lie between others in the memory of
/// parameters, but not in that of sums.
pub fn shares(graph: &Graph, servers: usize) -> Result<Shares, String> {
    let gradients: BTreeSet<&str> = graph.sources::<GrainSum>().map(|(_, sum)| sum.of.as_str()).collect();
    let updated = graph.updated_values();
    let is_trained = |id: ValueId, name: &str| gradients.contains(name) && updated[id.0 as usize].is_some();
    if let Some((_, param)) = graph.params().find(|(id, param)| !is_trained(*id, &param.name)) {
        return Err(format!(
            "parameter `{}` is not trained, and parameter servers have trained parameters only\n  hint: train without `--async`, or make it a constant",
            param.name
        ));
    }
    let Owned { graph, units } = Owned::cut(graph, servers, Others::Unknown);
    let (nobody, skipped) = (vec![0..0; servers], vec![0; servers]);
    let mut shares = Shares { servers: nobody, others: 0..0, needed: Vec::new(), skipped };
    let mut at = 0;
    for unit in units {
        let next = at + padded(&graph, unit.sum);
        let share = &mut shares.servers[unit.owner];
        if share.start == share.end {
            let piece = graph.maker(unit.sum).op.downcast::<Piece>();
            shares.skipped[unit.owner] = piece.map_or(0, |piece| piece.start);
            share.start = at;
        }
        share.end = next;
        at = next;
    }
    let others = buckets(&graph, usize::MAX).into_iter().filter(|bucket| !bucket.gradients);
    let needed = needed_by_optimizer(&graph);
    shares.others = at..at;
    for (number, id) in others.flat_map(|bucket| bucket.sums).enumerate() {
        let start = shares.others.end;
        if needed[id.0 as usize] {
            shares.needed.push((number, start..start + graph.ty(id).elements()));
        }
        shares.others.end = start + padded(&graph, id);
    }
    Ok(shares)
}

/// The bound on how far workers drift apart, as a server keeps it. Clocks count the steps a worker has pushed.
#[derive(Clone, Debug)]
pub struct Clocks {
    clocks: Vec<u64>,
    /// `None`: no bound.
    staleness: Option<u64>,
}

impl Clocks {
    pub fn new(workers: usize, staleness: Option<u64>) -> Self {
        Self { clocks: vec![0; workers], staleness }
    }

    /// A worker has pushed one more step.
    pub fn push(&mut self, worker: usize) {
        self.clocks[worker] += 1;
    }

    /// A worker is done and holds nobody back.
    pub fn leave(&mut self, worker: usize) {
        self.clocks[worker] = u64::MAX;
    }

    /// Whether this worker may start its next step: nobody is more than the bound behind.
    pub fn may_go_on(&self, worker: usize) -> bool {
        let slowest = self.clocks.iter().copied().min().unwrap_or(0);
        self.staleness.is_none_or(|bound| self.clocks[worker].saturating_sub(slowest) <= bound)
    }

    /// How far this worker is ahead of the slowest.
    pub fn ahead(&self, worker: usize) -> u64 {
        self.clocks[worker].saturating_sub(self.clocks.iter().copied().min().unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_runs_ahead_of_the_bound() {
        let mut clocks = Clocks::new(2, Some(1));
        clocks.push(0);
        assert!(clocks.may_go_on(0));
        clocks.push(0);
        assert!(!clocks.may_go_on(0) && clocks.may_go_on(1) && clocks.ahead(0) == 2);
        clocks.push(1);
        assert!(clocks.may_go_on(0));
        clocks.push(0);
        clocks.leave(1);
        assert!(clocks.may_go_on(0));
        let mut free = Clocks::new(2, None);
        (0..100).for_each(|_| free.push(0));
        assert!(free.may_go_on(0));
    }

    #[test]
    fn a_parameter_that_is_not_trained_is_refused() {
        use kolo_graph::{Builder, Init, Type};
        use kolo_ops::optim::SgdPlain;
        use kolo_ops::prelude::*;
        let step = |frozen: bool| {
            let builder = Builder::new();
            let x = builder.input("x", Type::f32([4]));
            for name in ["a", "b", "c"] {
                let param = builder.param(name, [4], Init::ZEROS);
                let term = x.mul(param);
                if frozen && name == "b" {
                    builder.output("b", term);
                    continue;
                }
                let sum = term.then(GrainSum { of: name.into() }, &[]);
                let scalar = builder.scalar(0.1);
                builder.update(param, param.then(SgdPlain { weight_decay: 0.0 }, &[sum, scalar, scalar]));
            }
            builder.finish().unwrap()
        };
        assert_eq!(shares(&step(false), 2).unwrap().servers, [0..16, 16..48]);
        let refused = shares(&step(true), 2).unwrap_err();
        assert!(refused.starts_with("parameter `b` is not trained"), "{refused}");
    }

    /// Names say nothing: what a state follows from, and what follows from it, does.
    #[test]
    fn servers_have_the_states_of_the_update() {
        use kolo_graph::sources::State;
        use kolo_graph::{Builder, Init, Type};
        use kolo_ops::optim::Sgd;
        use kolo_ops::prelude::*;
        let builder = Builder::new();
        let x = builder.input("x", Type::f32([4]));
        let param = builder.param("p", [4], Init::ZEROS);
        let loss = x.mul(param);
        let gradient = loss.then(GrainSum { of: "p".into() }, &[]);
        let speed = builder.state("speed", gradient.ty(), Init::ZEROS);
        let counter = builder.state("counter", Type::f32([]), Init::ZEROS);
        let op = Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 };
        let moved = builder.apply_all(op, &[param, gradient, speed, counter.shift(1.0), builder.scalar(1.0)]);
        builder.update(param, moved[0]);
        builder.update(speed, moved[1]);
        builder.update(counter, counter.shift(1.0));
        let mean = loss.then(GrainSum { of: String::new() }, &[]);
        builder.update(builder.state("optim.mean", mean.ty(), Init::ZEROS), mean);
        let graph = builder.finish().unwrap();
        let states = |graph: &Graph| graph.sources::<State>().map(|(_, op)| op.name.clone()).collect::<Vec<_>>();
        assert_eq!(states(&worker_graph(&graph)), ["optim.mean"]);
        assert_eq!(states(&server_graph(&graph, 1, 0)), ["speed", "counter"]);
    }

    #[test]
    fn without_slack_all_wait_for_all() {
        let mut clocks = Clocks::new(3, Some(0));
        clocks.push(0);
        clocks.push(1);
        assert!(!clocks.may_go_on(0) && !clocks.may_go_on(1));
        clocks.push(2);
        assert!((0..3).all(|worker| clocks.may_go_on(worker)));
    }
}
