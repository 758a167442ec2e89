//! The verifier: every invariant of a graph, checked from scratch. It runs after every rewrite in tests and debug builds.

use crate::collective::AfterGrains;
use crate::graph::{Graph, Phase};
use crate::sources::{GrainSum, Input, Param, State};

/// Panics in debug builds if `rewrite` broke the graph.
pub fn debug_verify(graph: &Graph, rewrite: &str) {
    if cfg!(debug_assertions)
        && let Err(problem) = verify(graph)
    {
        panic!("{rewrite} broke the graph: {problem}");
    }
}

/// What is wrong with the graph, if anything.
pub fn verify(graph: &Graph) -> Result<(), String> {
    let mut made = 0u32;
    let (mut names, mut inputs): (Vec<&str>, Vec<&str>) = (Vec::new(), Vec::new());
    for id in graph.ids() {
        let node = graph.node(id);
        let context = || format!("node {} ({})", id.0, node.op.signature());
        if let Some(input) = node.inputs.iter().find(|input| input.0 >= made) {
            return Err(format!("{} reads %{} before it is made", context(), input.0));
        }
        let types = crate::checked_types(&*node.op, &graph.types(&node.inputs))
            .map_err(|problem| format!("{}: {problem}", context()))?;
        if types != graph.types(&node.outputs) {
            return Err(format!("{} says {types:?}, the graph {:?}", context(), graph.types(&node.outputs)));
        }
        for (slot, output) in node.outputs.iter().enumerate() {
            let value = graph.value(*output);
            if output.0 != made || value.node != id || value.slot != slot {
                return Err(format!("{}: output {slot} is not %{made}", context()));
            }
            made += 1;
        }
        let name = node.op.downcast::<Param>().map(|op| op.name.as_str());
        names.extend(name.or(node.op.downcast::<State>().map(|op| op.name.as_str())));
        inputs.extend(node.op.downcast::<Input>().map(|op| op.name.as_str()));
    }
    if made as usize != graph.values.len() {
        return Err(format!("{} values, but nodes make {made}", graph.values.len()));
    }
    for (what, names) in [("parameters or states", &mut names), ("inputs", &mut inputs)] {
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("two {what} are called `{}`", pair[0]));
        }
    }
    verify_ends(graph)
}

fn verify_ends(graph: &Graph) -> Result<(), String> {
    let phases = graph.phases();
    let phase = |id: crate::graph::ValueId| phases[graph.value(id).node.0 as usize];
    let has_sums = graph.nodes.iter().any(|node| node.op.is::<GrainSum>());
    let mut updated = vec![false; graph.values.len()];
    for (state, value) in &graph.updates {
        if std::mem::replace(&mut updated[state.0 as usize], true) {
            return Err(format!("%{} is updated twice", state.0));
        }
        if graph.maker(*value).inputs.is_empty() || graph.maker(*value).op.view() {
            return Err(format!(
                "%{} is updated with %{}, which is not computed; copy it with an op",
                state.0, value.0
            ));
        }
        let op = &graph.maker(*state).op;
        if !op.is::<Param>() && !op.is::<State>() {
            return Err(format!("%{} is updated, but is neither a parameter nor a state", state.0));
        }
        if graph.ty(*state) != graph.ty(*value) {
            return Err(format!("%{} is updated with a value of another type", state.0));
        }
        if has_sums && phase(*value) == Phase::Grain {
            return Err(format!("%{} is updated with a value of one grain; sum it over the grains first", state.0));
        }
    }
    for node in graph.nodes.iter().filter(|node| node.op.is::<GrainSum>()) {
        if phase(node.inputs[0]) == Phase::After {
            return Err(format!("%{} is summed over the grains twice", node.inputs[0].0));
        }
    }
    for (node, own) in graph.nodes.iter().zip(&phases) {
        if node.op.is::<AfterGrains>() && phase(node.inputs[0]) == Phase::Grain {
            return Err(format!("%{} is a value of one grain; sum it over the grains first", node.inputs[0].0));
        }
        if *own == Phase::Grain && node.op.collective().is_some() && node.op.aliases() {
            let op = node.op.signature();
            return Err(format!(
                "{op} works in place and cannot be part of a grain; sum over the grains first, or use axis_sum"
            ));
        }
    }
    for node in graph.nodes.iter().filter(|node| !node.op.is::<GrainSum>()) {
        let mixed = node.inputs.iter().map(|id| phase(*id));
        if mixed.clone().any(|p| p == Phase::Grain) && mixed.clone().any(|p| p == Phase::After) {
            return Err(format!("{} mixes a value of one grain with one of the whole step", node.op.signature()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::OpKind;

    #[test]
    fn two_inputs_of_one_name_are_found() {
        let text = "graph {\n  %0 = input{name=\"x\", dtype=f32, shape=[2], per_step=false}() : f32[2]\n  \
                    %1 = input{name=\"x\", dtype=f32, shape=[3], per_step=false}() : f32[3]\n}\n";
        let graph = crate::text::parse(text, &[OpKind::without_kernels::<Input>()]).unwrap();
        assert_eq!(verify(&graph).unwrap_err(), "two inputs are called `x`");
    }
}
