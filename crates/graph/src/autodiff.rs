//! Reverse-mode differentiation, graph to graph: a table of rules (`Op::grad`) and this walk.
//!
//! The walk goes over the nodes backwards once. A value read by several nodes collects one contribution from each; they
//! are added in the order of the readers, last to first, which fixes the bits.

use crate::builder::{Builder, Tensor};
use crate::graph::{Graph, Node, NodeId, Stage};
use crate::op::GradCx;
use crate::operand::{Gradient, Operands};

/// Gradients of `loss`, a scalar, with respect to each of `wrt`; `None` where `loss` does not depend on it.
///
/// No gradient is dropped: an op without a rule for an input or output that the gradient passes through is an error that
/// names both. `seed` is the gradient of the loss itself; `add` sums contributions.
pub fn gradients<'b>(
    builder: &'b Builder,
    loss: Tensor<'b>,
    seed: Tensor<'b>,
    wrt: &[Tensor<'b>],
    add: impl Fn(&[Tensor<'b>]) -> Tensor<'b>,
) -> Vec<Option<Tensor<'b>>> {
    if !check_ends(builder, loss, wrt) {
        return vec![None; wrt.len()];
    }
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
            let operands = node.op.operands();
            let flows = |at: usize| operands.input(at).is_some_and(|operand| operand.gradient != Gradient::Zero);
            let needs: Vec<bool> =
                node.inputs.iter().enumerate().map(|(at, id)| wanted[id.0 as usize] && flows(at)).collect();
            if !needs.contains(&true) || builder.failed() {
                continue;
            }
            let contributions = scoped(builder, node.scope.as_ref(), || {
                let grads: Vec<Option<Tensor<'b>>> =
                    node.outputs.iter().map(|id| total(&parts[id.0 as usize])).collect();
                match grads.iter().all(Option::is_none) {
                    true => Vec::new(),
                    false => contribute(builder, &node, &operands, grads, needs.clone()),
                }
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

/// The loss must be one number, and what it is differentiated by must be floats.
fn check_ends(builder: &Builder, loss: Tensor<'_>, wrt: &[Tensor<'_>]) -> bool {
    let ty = loss.ty();
    if ty.rank() != 0 || !ty.dtype.is_float() {
        let message = format!("the loss must be one float, but is {ty}");
        builder.fail("gradients", message, "take its sum or its mean over all elements");
    }
    if let Some(other) = wrt.iter().find(|tensor| !tensor.dtype().is_float()) {
        builder.fail("gradients", format!("{} has no gradient", other.ty()), "ask for gradients of floats only");
    }
    !builder.failed()
}

/// What one node adds to the gradients of its inputs, by its rule. That the rule is there and complete is checked.
fn contribute<'b>(
    builder: &'b Builder,
    node: &Node,
    operands: &Operands,
    mut grads: Vec<Option<Tensor<'b>>>,
    needs: Vec<bool>,
) -> Vec<Option<Tensor<'b>>> {
    let name = node.op.name();
    for (at, _) in grads.iter().enumerate().filter(|(_, grad)| grad.is_some()) {
        if let Some(output) = operands.output(at).filter(|output| !output.gradient) {
            let message =
                format!("the loss depends on its output `{}` (output {at}), which has no gradient", output.name);
            builder.fail(
                name,
                message,
                format!("compute `{}` from the inputs with other ops; {REFERENCE}", output.name),
            );
            return Vec::new();
        }
    }
    let missing = |at: usize| {
        let input = operands.input(at).map_or("?", |operand| operand.name);
        let message =
            format!("the loss depends on its input `{input}` (input {at}), for which it has no gradient rule");
        let why = if name.ends_with("_grad") { "this is a second derivative: " } else { "" };
        builder.fail(
            name,
            message,
            format!("{why}use other ops, or `stop_gradient` if it is meant as a constant; {REFERENCE}"),
        );
    };
    let needed = || needs.iter().enumerate().filter(|(_, needed)| **needed).map(|(at, _)| at);
    let ruled = |at: &usize| operands.input(*at).is_some_and(|operand| operand.gradient == Gradient::Rule);
    if let Some(at) = needed().find(|at| !ruled(at)) {
        missing(at);
        return Vec::new();
    }
    // Of several outputs, only a later one may have a gradient; rules need not know.
    let first = builder.tensor(node.outputs[0]).ty();
    grads[0].get_or_insert_with(|| builder.full(0.0, first));
    let made = node.op.grad(&GradCx {
        inputs: node.inputs.iter().map(|id| builder.tensor(*id)).collect(),
        outputs: node.outputs.iter().map(|id| builder.tensor(*id)).collect(),
        grads,
        needs: needs.clone(),
    });
    if let Some(at) = needed().find(|at| !matches!(made.get(*at), Some(Some(_)))) {
        missing(at);
    }
    made
}

/// Where to look up what has a gradient.
const REFERENCE: &str = "docs/ops.md lists the gradients of every op";

fn scoped<R>(builder: &Builder, scope: &str, f: impl FnOnce() -> R) -> R {
    if scope.is_empty() { f() } else { builder.scope(scope, f) }
}

/// For each value up to `last`, whether it depends on one of `wrt` through floats and inputs that have a gradient.
fn reaches(graph: &Graph, last: NodeId, wrt: &[Tensor<'_>]) -> Vec<bool> {
    let mut wanted = vec![false; graph.values.len()];
    for tensor in wrt {
        wanted[tensor.id().0 as usize] = true;
    }
    for node in &graph.nodes[..=last.0 as usize] {
        let operands = node.op.operands();
        let flows = |at: usize| operands.input(at).is_some_and(|operand| operand.gradient != Gradient::Zero);
        if node.inputs.iter().enumerate().any(|(at, id)| wanted[id.0 as usize] && flows(at)) {
            for output in node.outputs.iter().filter(|id| graph.ty(**id).dtype.is_float()) {
                wanted[output.0 as usize] = true;
            }
        }
    }
    wanted
}
