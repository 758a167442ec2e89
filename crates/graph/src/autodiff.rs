//! Reverse-mode differentiation, graph to graph: a table of rules (`Op::grad`) and this walk.
//!
//! The walk goes over the nodes backwards once. A value read by several nodes collects one contribution from each; they
//! are added in the order of the readers, last to first, which fixes the bits.

use crate::builder::{Builder, Tensor};
use crate::graph::{Graph, NodeId, Stage};
use crate::op::GradCx;

/// Gradients of `loss`, a scalar, with respect to each of `wrt`; `None` where `loss` does not depend on it.
///
/// `seed` is the gradient of the loss itself; `add` sums contributions.
pub fn gradients<'b>(
    builder: &'b Builder,
    loss: Tensor<'b>,
    seed: Tensor<'b>,
    wrt: &[Tensor<'b>],
    add: impl Fn(&[Tensor<'b>]) -> Tensor<'b>,
) -> Vec<Option<Tensor<'b>>> {
    builder.stage(Stage::Backward, || {
        let last = builder.graph().value(loss.id()).node;
        let wanted = reaches(&builder.graph(), last, wrt);
        let mut parts: Vec<Vec<Tensor<'b>>> = vec![Vec::new(); wanted.len()];
        parts[loss.id().0 as usize].push(seed);
        let total = |parts: &[Tensor<'b>]| match parts {
            [] => None,
            [one] => Some(*one),
            many => Some(add(many)),
        };
        for at in (0..=last.0).rev() {
            let node = builder.graph().node(NodeId(at)).clone();
            let needs: Vec<bool> = node.inputs.iter().map(|id| wanted[id.0 as usize]).collect();
            if !needs.contains(&true) || builder.failed() {
                continue;
            }
            let scope = node.scope.to_string();
            let contributions = scoped(builder, &scope, || {
                let grads: Vec<Option<Tensor<'b>>> =
                    node.outputs.iter().map(|id| total(&parts[id.0 as usize])).collect();
                if grads.iter().all(Option::is_none) {
                    return Vec::new();
                }
                let cx = GradCx {
                    inputs: node.inputs.iter().map(|id| builder.tensor(*id)).collect(),
                    outputs: node.outputs.iter().map(|id| builder.tensor(*id)).collect(),
                    grads,
                    needs: needs.clone(),
                };
                if cx.grads[0].is_none() {
                    builder.fail(node.op.name(), "only its first output can be differentiated", "use output 0");
                    return Vec::new();
                }
                node.op.grad(&cx)
            });
            for ((id, needed), part) in node.inputs.iter().zip(&needs).zip(contributions) {
                if let (true, Some(part)) = (*needed, part) {
                    parts[id.0 as usize].push(part);
                }
            }
        }
        wrt.iter()
            .map(|tensor| {
                let scope = builder.graph().maker(tensor.id()).scope.to_string();
                scoped(builder, &scope, || total(&parts[tensor.id().0 as usize]))
            })
            .collect()
    })
}

fn scoped<R>(builder: &Builder, scope: &str, f: impl FnOnce() -> R) -> R {
    if scope.is_empty() { f() } else { builder.scope(scope, f) }
}

/// For each value up to `last`, whether it depends on one of `wrt` through floats.
fn reaches(graph: &Graph, last: NodeId, wrt: &[Tensor<'_>]) -> Vec<bool> {
    let mut wanted = vec![false; graph.values.len()];
    for tensor in wrt {
        wanted[tensor.id().0 as usize] = true;
    }
    for node in &graph.nodes[..=last.0 as usize] {
        if node.inputs.iter().any(|id| wanted[id.0 as usize]) {
            for output in node.outputs.iter().filter(|id| graph.ty(**id).dtype.is_float()) {
                wanted[output.0 as usize] = true;
            }
        }
    }
    wanted
}
