//! The step as one graph: forward, backward, sum over grains, clipping, update.
//!
//! [`graph_of`] leads from a job, its strategies and a rank's place in the mesh to the graph that the rank runs, whatever for.

use crate::class_weights;
use crate::error::Error;
use crate::job::{Job, Rounding};
use crate::loss_scale::LossScale;
#[cfg(doc)]
use crate::loss_scale::{LOSS_SCALE, SKIPPED};
use crate::optimizer::{Optimizer, StepScalars};
#[cfg(doc)]
use crate::residuals::Residuals;
use kolo_data::{Field, Kind};
use kolo_exec::{Options, Precision, Program};
use kolo_graph::rewrite::{eliminate_dead, merge_common};
use kolo_graph::sources::GrainSum;
use kolo_graph::verify::debug_verify;
use kolo_graph::{GraphError, Stage, ValueId};
use kolo_models::{Build, Mean, Model};
use kolo_ops::cross_entropy::CrossEntropy;
use kolo_ops::fuse::fuse_elementwise;
use kolo_ops::lower_precision::lower_precision;
use kolo_ops::optim::round_weights;
use kolo_ops::prelude::*;
use kolo_ops::product_part::absorb_slices;
use kolo_parallel::mesh::DATA;
use kolo_parallel::recompute::recompute;
use kolo_parallel::strategy::Refusal;
use kolo_parallel::{Mesh, Parallel, Purpose};
use std::collections::BTreeSet;

/// The graph that a rank runs: the same function for training, evaluation, plans, printing, measuring and servers. `parallel`
/// is the job's own, or the job's with parameter servers.
pub fn graph_of(job: &Job, parallel: &Parallel, purpose: Purpose, mesh: &Mesh) -> Result<Graph, GraphError> {
    let graph = graph_before_rounding(job, parallel, purpose, mesh)?;
    if job.rounding == Rounding::None {
        return Ok(graph);
    }
    let graph = round_weights(&graph, job.seed).map_err(cannot_round)?;
    debug_verify(&graph, "round_weights");
    Ok(graph)
}

fn cannot_round(what: String) -> GraphError {
    let message = format!("`train.rounding = \"stochastic\"` cannot be combined with {what}");
    let hint = "leave it out, or split the model in another way".into();
    GraphError { op: "`[train]`".into(), scope: String::new(), message, hint, inputs: None }
}

fn graph_before_rounding(job: &Job, parallel: &Parallel, purpose: Purpose, mesh: &Mesh) -> Result<Graph, GraphError> {
    let mut graph = model_graph(job, parallel, purpose)?;
    if purpose == Purpose::Training {
        parallel.recompute().check_names(&graph).map_err(|refusal| refused_of("`[memory]`", refusal))?;
    }
    if parallel.splits_model() {
        graph = match purpose {
            Purpose::Evaluation { .. } => {
                let training = model_graph(job, parallel, Purpose::Training)?;
                parallel.split_model(graph, &training, purpose, mesh, None)
            }
            Purpose::Training | Purpose::Server => {
                parallel.split_model(graph.clone(), &graph, purpose, mesh, grains_of_rank(job.grains, mesh))
            }
        }
        .map_err(refused)?;
    }
    let graph = match purpose {
        Purpose::Training => fuse(recompute_again(tidy(graph), parallel)),
        Purpose::Evaluation { .. } | Purpose::Server => optimise(graph),
    };
    match purpose {
        Purpose::Evaluation { .. } if parallel.shards_weights(mesh) => {
            let training = WholeStep::of(job).split(job, parallel, mesh)?;
            Ok(parallel.spread_evaluation(graph, &optimise(training), mesh))
        }
        _ => Ok(parallel.spread(graph, purpose, mesh)),
    }
}

/// The graph as a single worker would run it, in the job's precision and without anything needless. What strategies do to it comes
/// after: where values are rounded does not depend on them.
pub fn model_graph(job: &Job, parallel: &Parallel, purpose: Purpose) -> Result<Graph, GraphError> {
    Ok(in_precision(tidy(raw_graph(job, parallel, purpose)?), job.precision))
}

/// The grains that each data rank computes, if they can be shared out.
fn grains_of_rank(grains: usize, mesh: &Mesh) -> Option<usize> {
    grains.is_multiple_of(mesh.size(DATA)).then(|| grains / mesh.size(DATA))
}

fn in_precision(graph: Graph, precision: Precision) -> Graph {
    let Some(half) = precision.half() else { return graph };
    let graph = lower_precision(&graph, half);
    debug_verify(&graph, "lower_precision");
    eliminate_dead(graph)
}

/// A training step as a single worker would run it, perhaps of another size than the job's: what a plan counts, and what strategies
/// are tried on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WholeStep<'m> {
    pub model: &'m dyn Model,
    /// Samples of a grain.
    pub samples: usize,
    pub grains: usize,
    pub precision: Precision,
}

impl<'j> WholeStep<'j> {
    /// The step of the job itself.
    pub fn of(job: &'j Job) -> Self {
        Self { model: &*job.model, samples: job.grain_batch(), grains: job.grains, precision: job.precision }
    }

    /// Before any rewrite.
    fn raw(&self, job: &Job, parallel: &Parallel, purpose: Purpose) -> Result<Graph, GraphError> {
        let clip = parallel.clip(job.clip, purpose);
        let frozen: &dyn Fn(&str) -> bool = &|name| job.start.is_frozen(name);
        let rule = UpdateRule {
            optimizer: &job.optimizer,
            clip,
            frozen,
            loss_scale: job.loss_scale,
            class_weights: job.class_weights.as_deref(),
        };
        training_graph(self.model, &rule, self.samples, self.grains)
    }

    /// As strategies take it: tidy, in its precision.
    pub fn graph(&self, job: &Job, parallel: &Parallel) -> Result<Graph, GraphError> {
        Ok(in_precision(tidy(self.raw(job, parallel, Purpose::Training)?), self.precision))
    }

    /// As one worker runs it, whose model no strategy splits.
    pub fn graph_of_one(&self, job: &Job, mesh: &Mesh) -> Result<Graph, GraphError> {
        let graph = fuse(recompute_again(tidy(self.graph(job, &job.parallel)?), &job.parallel));
        Ok(job.parallel.spread(graph, Purpose::Training, mesh))
    }

    /// A rank's part of it, before anything is computed again or fused.
    pub fn split(&self, job: &Job, parallel: &Parallel, mesh: &Mesh) -> Result<Graph, GraphError> {
        let graph = self.graph(job, parallel)?;
        parallel.split_model(graph.clone(), &graph, Purpose::Training, mesh, None).map_err(refused)
    }
}

/// A rank's part of the training step with every op of the model in it, as it is before ops are fused and sums exchanged.
pub fn graph_before_fusing(job: &Job, parallel: &Parallel, mesh: &Mesh) -> Result<Graph, GraphError> {
    Ok(tidy(WholeStep::of(job).split(job, parallel, mesh)?))
}

/// With what the job computes again.
pub(crate) fn recompute_again(graph: Graph, parallel: &Parallel) -> Graph {
    let graph = recompute(graph, parallel.recompute());
    debug_verify(&graph, "recompute");
    graph
}

/// Why a model cannot be split so.
pub(crate) fn refused(refusal: Refusal) -> GraphError {
    refused_of("`[parallel]`", refusal)
}

/// Why the model cannot be what a section of the job says.
fn refused_of(section: &str, refusal: Refusal) -> GraphError {
    let Refusal { place, key, message, hint } = refusal;
    let message = key.map_or(message.clone(), |key| format!("`parallel.{key}` {message}"));
    let message = place.map_or(message.clone(), |place| format!("{place}: {message}"));
    GraphError { op: section.into(), scope: String::new(), message, hint, inputs: None }
}

/// What a rank runs in a step with these options: its graph, where everything lies, and the order of its work on grains.
pub fn program_of(job: &Job, parallel: &Parallel, mesh: &Mesh, options: Options) -> Result<Program, GraphError> {
    let graph = graph_of(job, parallel, Purpose::Training, mesh)?;
    let order = parallel.order(mesh, options.grains).map_err(refused)?;
    let options = order.as_ref().map_or(options, |order| options.with_slots(order.slots, order.ways));
    Ok(Program::new(&job.executor, graph, options).in_order(order))
}

/// Whether a job's model can be split among workers in some way, or in several, one after the other.
#[derive(Debug)]
pub struct LayoutCheck<'j> {
    job: &'j Job,
    /// The step of a single worker.
    training: Graph,
}

impl<'j> LayoutCheck<'j> {
    pub fn new(job: &'j Job) -> Result<Self, GraphError> {
        Ok(Self { job, training: WholeStep::of(job).graph(job, &job.parallel)? })
    }

    /// Nodes of the graph that is split.
    pub fn nodes(&self) -> usize {
        self.training.nodes.len()
    }

    /// The mesh of so many workers, if they can share the grains in an order of these strategies.
    pub fn order(&self, parallel: &Parallel, workers: usize) -> Result<Mesh, Error> {
        let grains = self.job.grains_for(parallel, workers)?;
        let mesh = parallel.mesh(workers, 0).map_err(|refusal| Error::workers(workers, refusal))?;
        parallel.order(&mesh, grains / mesh.size(DATA)).map_err(refused)?;
        Ok(mesh)
    }

    /// Whether these strategies can split it among so many workers.
    pub fn run(&self, parallel: &Parallel, workers: usize) -> Result<(), Error> {
        let mesh = self.order(parallel, workers)?;
        let grains = grains_of_rank(self.job.grains_for(parallel, workers)?, &mesh);
        let split = parallel.split_model(self.training.clone(), &self.training, Purpose::Training, &mesh, grains);
        Ok(split.map(drop).map_err(refused)?)
    }
}

/// The graph as a single worker would run it, before any rewrite.
pub fn raw_graph(job: &Job, parallel: &Parallel, purpose: Purpose) -> Result<Graph, GraphError> {
    match purpose {
        Purpose::Evaluation { batch } => evaluation_graph(&*job.model, batch),
        Purpose::Training | Purpose::Server => WholeStep::of(job).raw(job, parallel, purpose),
    }
}

/// How parameters follow their gradients.
#[derive(Clone, Copy)]
pub struct UpdateRule<'a> {
    pub optimizer: &'a Optimizer,
    /// The largest norm of a gradient; infinite if it is only measured.
    pub clip: Option<f32>,
    /// Whether the parameter of this name stays as it is.
    pub frozen: &'a dyn Fn(&str) -> bool,
    /// The factor by which gradients are scaled at first, as f16 needs it. The norm is then measured whatever `clip` is.
    pub loss_scale: Option<f64>,
    /// What each class weighs in the loss, if they do not weigh the same.
    pub class_weights: Option<&'a [f32]>,
}

impl<'a> UpdateRule<'a> {
    /// All parameters are trained.
    pub fn all(optimizer: &'a Optimizer, clip: Option<f32>) -> Self {
        Self { optimizer, clip, frozen: &|_| false, loss_scale: None, class_weights: None }
    }
}

impl std::fmt::Debug for UpdateRule<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}, clipped to {:?}", self.optimizer, self.clip)
    }
}

/// The training step of a model, before any rewrite. Its outputs:
///
/// | output | |
/// |---|---|
/// | `loss` | the mean over the batch; if there is a `counted`, the sum over the targets that count |
/// | `counted` | how many targets count, where some may not, or what they weigh |
/// | `ignored` | targets that a part of the loss ignores, which then is no mean over the batch |
/// | `grad_norm` | with `clip`: the norm of the whole gradient, before it is clipped |
/// | [`LOSS_SCALE`], [`SKIPPED`] | in f16: the factor of the next step's gradients, and the steps so far that changed nothing |
///
/// An infinite `clip` measures the norm and clips nothing.
pub fn training_graph(
    model: &dyn Model,
    rule: &UpdateRule<'_>,
    batch: usize,
    grains: usize,
) -> Result<Graph, GraphError> {
    let UpdateRule { optimizer, clip, frozen, loss_scale, class_weights } = *rule;
    let builder = Builder::new();
    let loss_scale = loss_scale.map(|first| LossScale::new(&builder, first));
    let loss = model.build(&Build { builder: &builder, batch, grains, training: true }).loss;
    let Mean { value, counted } = class_weights.map_or(loss, |weights| class_weights::weigh(&builder, loss, weights));
    let targets = grains * counted.map_or(1, |counted| counted.of);
    let share = 1.0 / targets as f64;
    let ids: Vec<_> = {
        let graph = builder.graph();
        let trained = graph.params().filter(|(_, op)| !frozen(&op.name));
        trained.map(|(id, op)| (id, op.name.clone())).collect()
    };
    let params: Vec<Tensor<'_>> = ids.iter().map(|(id, _)| builder.tensor(*id)).collect();
    let grads = match &loss_scale {
        Some(scale) => kolo_ops::gradients_from(&builder, value, scale.seed(share), &params),
        None => kolo_ops::gradients(&builder, value, share, &params),
    };
    let counted = counted.map(|counted| sum_over_grains(counted.number));
    match counted {
        Some(counted) => {
            builder.output("loss", sum_over_grains(value));
            builder.output("counted", counted);
        }
        // `grains` is a power of two, so dividing by it is exact: the mean over the batch is the sum of these.
        None => builder.output("loss", sum_over_grains(value.scale(share as f32))),
    }
    if grains > 1
        && let Some(ignored) = ignored_inside(&builder, &[value])
    {
        builder.output(IGNORED, sum_over_grains(ignored));
    }
    builder.stage(Stage::Update, || {
        let trained: Vec<(&str, Tensor<'_>, Tensor<'_>)> = ids
            .iter()
            .zip(&params)
            .zip(&grads)
            .filter_map(|(((_, name), param), grad)| {
                Some((name.as_str(), *param, grad.as_ref()?.then(GrainSum { of: name.clone() }, &[])))
            })
            .collect();
        let (lr, step) = (builder.learning_rate(), builder.step_number());
        let counted = counted.map(|counted| (counted, targets));
        let scale = gradient_scale(&builder, &trained, counted, clip, loss_scale.as_ref());
        let step = loss_scale.map_or(step, |scale| scale.update_number(step));
        let scalars = StepScalars { lr, scale, step };
        for (name, param, grad) in trained {
            optimizer.update(&builder, name, param, grad, scalars);
        }
    });
    builder.finish()
}

/// The targets of a whole step, if some of them may not count.
pub fn targets(model: &dyn Model, batch: usize, grains: usize) -> Result<Option<usize>, GraphError> {
    let builder = Builder::new();
    let loss = model.build(&Build { builder: &builder, batch, grains, training: true }).loss;
    let targets = loss.counted.map(|counted| counted.of * grains);
    builder.finish().map(|_| targets)
}

fn sum_over_grains(value: Tensor<'_>) -> Tensor<'_> {
    value.then(GrainSum { of: String::new() }, &[])
}

/// The factor every gradient is multiplied with.
///
/// Gradients are made as if all targets counted; where fewer do, the factor makes up for it. If all do, it is exactly 1, and
/// if none does, the gradient is zero whatever it is. Then it is less if the global norm exceeds the limit, and zero if a
/// scaled gradient is not finite.
fn gradient_scale<'b>(
    builder: &'b Builder,
    trained: &[(&str, Tensor<'b>, Tensor<'b>)],
    counted: Option<(Tensor<'b>, usize)>,
    clip: Option<f32>,
    loss_scale: Option<&LossScale<'b>>,
) -> Tensor<'b> {
    let factor = counted.map(|(counted, of)| builder.scalar(of as f64).div(counted.maximum(builder.scalar(1.0))));
    let factor = match (factor, loss_scale.map(LossScale::inverse)) {
        (Some(factor), Some(inverse)) => Some(factor.mul(inverse)),
        (factor, inverse) => factor.or(inverse),
    };
    let by_factor = |value: Tensor<'b>| factor.map_or(value, |factor| value.mul(factor));
    let squares = || trained.iter().map(|(_, _, grad)| grad.sum_squares()).reduce(|total, next| total.add(next));
    let limit = clip.or(loss_scale.map(|_| f32::INFINITY));
    let Some((limit, squares)) = limit.and_then(|limit| Some((limit, squares()?))) else {
        return factor.unwrap_or_else(|| builder.scalar(1.0));
    };
    let total = by_factor(by_factor(squares));
    builder.output("grad_norm", total.sqrt());
    let scale = match limit.is_finite() {
        true => by_factor(total.clip_scale(f64::from(limit))),
        false => by_factor(builder.scalar(1.0)),
    };
    loss_scale.map_or(scale, |loss_scale| loss_scale.guard(squares, scale))
}

/// Targets that a cross-entropy inside these formulas ignores: a mean over one grain's other targets, which says nothing of
/// the mean over the batch. A loss that *is* a cross-entropy comes as a sum and a count instead.
fn ignored_inside<'b>(builder: &'b Builder, formulas: &[Tensor<'b>]) -> Option<Tensor<'b>> {
    let means: Vec<(ValueId, i64)> = {
        let graph = builder.graph();
        let mut reached = vec![false; graph.values.len()];
        formulas.iter().for_each(|formula| reached[formula.id().0 as usize] = true);
        let mut means = Vec::new();
        for node in graph.nodes.iter().rev() {
            if !node.outputs.iter().any(|id| reached[id.0 as usize]) {
                continue;
            }
            node.inputs.iter().for_each(|id| reached[id.0 as usize] = true);
            if let Some(op) = node.op.downcast::<CrossEntropy>().filter(|op| op.mean) {
                means.push((node.inputs[1], op.ignore));
            }
        }
        means
    };
    let ignored = |(targets, ignore): (ValueId, i64)| {
        let targets = builder.tensor(targets);
        targets.equal(builder.full(ignore as f64, targets.ty())).cast(DType::F32).sum_all()
    };
    means.into_iter().map(ignored).reduce(|total, next| total.add(next))
}

/// The output that counts the targets which a part of a loss or of a metric ignores.
pub const IGNORED: &str = "ignored";
/// The output of an evaluation that counts (class, prediction) pairs: row by row of the confusion matrix.
pub const CONFUSION: &str = "confusion";
/// The output of an evaluation that holds what [`Residuals`] joins, of a model that predicts numbers.
pub(crate) const RESIDUALS: &str = "residuals";
/// Numbers of a sample whose residuals are measured, at most.
const RESIDUALS_MAX: usize = 1024;
/// Classes of a confusion matrix, at most: ImageNet's, and some.
const CLASSES_MAX: usize = 1024;

/// The name of the output that says how much a metric counted.
pub fn count_name(metric: &str) -> String {
    format!("{metric}.counted")
}

/// The model's forward pass in evaluation mode: loss, metrics and predictions of one batch. A metric that does not count
/// everything is a sum, and the number that counted is an output of its own ([`count_name`]). [`IGNORED`] counts the targets
/// that a part of the loss or of a metric ignores: that one is then no mean over several batches.
pub fn evaluation_graph(model: &dyn Model, batch: usize) -> Result<Graph, GraphError> {
    let builder = Builder::new();
    let outputs = model.build(&Build { builder: &builder, batch, grains: 1, training: false });
    let mut measured = Vec::new();
    for (name, mean) in [("loss", outputs.loss)].into_iter().chain(outputs.metrics) {
        builder.output(name, mean.value);
        if let Some(counted) = mean.counted {
            builder.output(&count_name(name), counted.number);
        }
        measured.push(mean.value);
    }
    if let Some(ignored) = ignored_inside(&builder, &measured) {
        builder.output(IGNORED, ignored);
    }
    builder.output("predictions", outputs.predictions);
    if let Some(residuals) = residuals(&builder, outputs.predictions, &model.fields(), batch) {
        builder.output(RESIDUALS, residuals);
    }
    if let Some(labels) = outputs.labels
        && let Some(confusion) = confusion(&builder, outputs.predictions, labels)
    {
        builder.output(CONFUSION, confusion);
    }
    builder.finish()
}

/// The names of the inputs that a model's predictions follow from; its other fields are targets.
pub fn prediction_inputs(model: &dyn Model) -> Result<BTreeSet<String>, GraphError> {
    let builder = Builder::new();
    let predictions = model.build(&Build { builder: &builder, batch: 1, grains: 1, training: false }).predictions.id();
    Ok(inputs_behind(&builder.finish()?, predictions))
}

/// The names of the inputs that a value follows from.
fn inputs_behind(graph: &Graph, value: ValueId) -> BTreeSet<String> {
    let mut reached = vec![false; graph.values.len()];
    reached[value.0 as usize] = true;
    for node in graph.nodes.iter().rev().filter(|node| !node.inputs.is_empty()) {
        if node.outputs.iter().any(|id| reached[id.0 as usize]) {
            node.inputs.iter().for_each(|id| reached[id.0 as usize] = true);
        }
    }
    graph.inputs().filter(|(id, _)| reached[id.0 as usize]).map(|(_, input)| input.name.clone()).collect()
}

/// What a batch says of the errors of predicted numbers, in the order in which [`Residuals`] takes it; `None` if the model's
/// target is not as many numbers as it predicts.
fn residuals<'b>(builder: &'b Builder, predictions: Tensor<'b>, fields: &[Field], batch: usize) -> Option<Tensor<'b>> {
    let inputs = inputs_behind(&builder.graph(), predictions.id());
    let field = fields.iter().find(|field| !inputs.contains(&field.name))?;
    let outputs = field.elements();
    let is_measured = field.kind == Kind::Real
        && (1..=RESIDUALS_MAX).contains(&outputs)
        && predictions.ty().elements() == batch * outputs;
    let target = {
        let graph = builder.graph();
        let found = graph.inputs().find(|(_, input)| input.name == field.name).map(|(id, _)| id);
        found.filter(|_| is_measured)?
    };
    let [predictions, targets] =
        [predictions, builder.tensor(target)].map(|values| values.reshape_to([batch, outputs]).cast(DType::F32));
    let sum = |values: Tensor<'b>| values.sum(&[0]);
    let squares = |values: Tensor<'b>| sum(values.mul(values));
    let errors = predictions.sub(targets);
    let means = sum(targets).scale(1.0 / batch as f32);
    let numbers = [squares(errors), means, squares(targets.sub(means))];
    Some(sum(errors.abs()).concat(&numbers, 0))
}

/// How often which class was taken for which. A label that is ignored is negative, and so is its pair's number: nobody counts it.
fn confusion<'b>(builder: &'b Builder, logits: Tensor<'b>, labels: Tensor<'b>) -> Option<Tensor<'b>> {
    let classes = logits.ty().shape.last().copied().filter(|classes| (2..=CLASSES_MAX).contains(classes))?;
    let rows = labels.ty().elements();
    let guess = logits.argmax(logits.rank() - 1).cast(DType::F32);
    let pair = labels.cast(DType::F32).scale(classes as f32).add(guess).cast(DType::I32).reshape_to([rows]);
    Some(builder.full(1.0, Type::f32([rows])).segment_sum(pair, classes * classes))
}

/// Without what leads to nothing, and without doubles.
pub(crate) fn tidy(graph: Graph) -> Graph {
    let graph = eliminate_dead(graph);
    debug_verify(&graph, "eliminate_dead");
    let graph = merge_common(graph);
    debug_verify(&graph, "merge_common");
    graph
}

/// The rewrites every graph goes through before it runs. They change no bit of any result.
pub fn optimise(graph: Graph) -> Graph {
    fuse(tidy(graph))
}

pub(crate) fn fuse(graph: Graph) -> Graph {
    let graph = eliminate_dead(absorb_slices(&graph));
    debug_verify(&graph, "absorb_slices");
    let graph = fuse_elementwise(&graph);
    debug_verify(&graph, "fuse_elementwise");
    graph
}
