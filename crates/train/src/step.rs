//! The step as one graph: forward, backward, sum over grains, clipping, update.

use crate::job::Parallel;
use crate::optimizer::Optimizer;
use kolo_graph::rewrite::{eliminate_dead, merge_common};
use kolo_graph::sources::GrainSum;
use kolo_graph::verify::debug_verify;
use kolo_graph::{GraphError, Stage};
use kolo_models::{Build, Model};
use kolo_ops::fuse::fuse_elementwise;
use kolo_ops::prelude::*;
use kolo_parallel::{Mesh, central, data, zero};

/// The training step of a model, before any rewrite.
pub fn training_graph(
    model: &dyn Model,
    optimizer: &Optimizer,
    clip: Option<f32>,
    batch: usize,
    grains: usize,
) -> Result<Graph, GraphError> {
    let builder = Builder::new();
    let outputs = model.build(&Build { builder: &builder, batch, grains, training: true });
    // `grains` is a power of two, so dividing by it is exact: the mean over the batch is the sum of these.
    let share = 1.0 / grains as f64;
    let ids: Vec<_> = builder.graph().params().map(|(id, op)| (id, op.name.clone())).collect();
    let params: Vec<Tensor<'_>> = ids.iter().map(|(id, _)| builder.tensor(*id)).collect();
    let grads = kolo_ops::gradients(&builder, outputs.loss, share, &params);
    builder.output("loss", outputs.loss.scale(share as f32).then(GrainSum { of: String::new() }, &[]));
    builder.stage(Stage::Update, || {
        let trained: Vec<(&str, Tensor<'_>, Tensor<'_>)> = ids
            .iter()
            .zip(&params)
            .zip(&grads)
            .filter_map(|(((_, name), param), grad)| {
                Some((name.as_str(), *param, grad.as_ref()?.then(GrainSum { of: name.clone() }, &[])))
            })
            .collect();
        let lr = builder.step_input("lr", Type::f32([]));
        let step = builder.step_input("step", Type::f32([]));
        let scale = clipping(&builder, &trained, clip);
        for (name, param, grad) in trained {
            optimizer.update(&builder, name, param, grad, lr, scale, step);
        }
    });
    builder.finish()
}

/// The factor every gradient is multiplied with: 1, or less if the global norm exceeds the limit.
fn clipping<'b>(builder: &'b Builder, trained: &[(&str, Tensor<'b>, Tensor<'b>)], clip: Option<f32>) -> Tensor<'b> {
    let squares = trained.iter().map(|(_, _, grad)| grad.sum_squares());
    match (clip, squares.reduce(|total, next| total.add(next))) {
        (Some(limit), Some(total)) => total.clip_scale(f64::from(limit)),
        _ => builder.scalar(1.0),
    }
}

/// A step as one of the workers of a mesh runs it.
pub fn spread(graph: &Graph, parallel: &Parallel, mesh: &Mesh) -> Graph {
    if mesh.ranks() == 1 {
        return graph.clone();
    }
    let bytes = parallel.bucket_bytes;
    let graph = match (parallel.zero, parallel.central) {
        (_, true) => central::share_weights(graph, mesh, bytes),
        (0, _) => data::sum_over_ranks(graph, bytes),
        _ => zero::shard_optimizer(graph, mesh, bytes),
    };
    debug_verify(&graph, "spread");
    graph
}

/// The model's forward pass in evaluation mode: loss, metrics and predictions of one batch.
pub fn evaluation_graph(model: &dyn Model, batch: usize) -> Result<Graph, GraphError> {
    let builder = Builder::new();
    let outputs = model.build(&Build { builder: &builder, batch, grains: 1, training: false });
    builder.output("loss", outputs.loss);
    for (name, metric) in outputs.metrics {
        builder.output(name, metric);
    }
    builder.output("predictions", outputs.predictions);
    builder.finish()
}

/// The rewrites every graph goes through before it runs. They change no bit of any result.
pub fn optimise(graph: &Graph) -> Graph {
    let graph = eliminate_dead(graph);
    debug_verify(&graph, "eliminate_dead");
    let graph = merge_common(&graph);
    debug_verify(&graph, "merge_common");
    let graph = fuse_elementwise(&graph);
    debug_verify(&graph, "fuse_elementwise");
    graph
}
