//! The reference executor: every value in f64, every op by its definition, one after the other. It *is* what a graph
//! means; the others are compared with it.

mod device;

pub use device::Reference;

use kolo_graph::sources::{Input, Param, State};
use kolo_graph::{Dense, Graph};

/// Evaluates every value of the graph. `source` supplies inputs, parameters and state by name.
pub fn evaluate(graph: &Graph, source: impl Fn(&str) -> Option<Dense>) -> Result<Vec<Dense>, String> {
    let mut values: Vec<Dense> = Vec::with_capacity(graph.values.len());
    for node in &graph.nodes {
        let name = node.op.downcast::<Input>().map(|op| &op.name);
        let name = name.or(node.op.downcast::<Param>().map(|op| &op.name));
        let name = name.or(node.op.downcast::<State>().map(|op| &op.name));
        if let Some(name) = name {
            let value = source(name).ok_or_else(|| format!("no value for `{name}`"))?;
            let wanted = &graph.ty(node.outputs[0]).shape;
            if value.shape != *wanted {
                return Err(format!("`{name}` must be {wanted:?}, but is {:?}", value.shape));
            }
            values.push(value);
            continue;
        }
        let inputs: Vec<&Dense> = node.inputs.iter().map(|id| &values[id.0 as usize]).collect();
        let types = graph.types(&node.outputs);
        let mut made = node.op.reference(&inputs, &types);
        assert_eq!(made.len(), types.len(), "{} made the wrong number of outputs", node.op.name());
        for (value, ty) in made.iter_mut().zip(&types) {
            assert_eq!(value.shape, ty.shape, "{} made the wrong shape", node.op.name());
            value.data.iter_mut().for_each(|x| *x = ty.dtype.round(*x));
        }
        values.extend(made);
    }
    Ok(values)
}
