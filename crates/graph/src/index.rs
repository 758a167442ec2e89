//! The index expression of an op: which named axis each dim of each operand walks.
//!
//! From `"m k, k n -> m n"` alone come the output shapes, the shape errors, the number of points (and so the FLOPs) and
//! every legal way to split the op: an axis that is in an output can be split and the outputs concatenated; an axis that
//! is in no output is summed over, and splitting it leaves partial sums. An axis marked `!` must stay whole.
//! `_` is a dim of size one that stretches over whatever the output has there.

use crate::types::Type;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    pub inputs: Vec<Vec<String>>,
    pub outputs: Vec<Vec<String>>,
    /// Axes that cannot be split.
    pub whole: Vec<String>,
}

impl Index {
    /// Reads `"m k, k n -> m n"`.
    pub fn parse(text: &str) -> Self {
        let (inputs, outputs) = text.split_once("->").expect("an index expression has an arrow");
        let mut whole: Vec<String> = Vec::new();
        let mut side = |side: &str| -> Vec<Vec<String>> {
            side.split(',')
                .map(|operand| {
                    operand
                        .split_whitespace()
                        .map(|axis| match axis.strip_suffix('!') {
                            Some(axis) => {
                                whole.push(axis.into());
                                axis.into()
                            }
                            None => axis.into(),
                        })
                        .collect()
                })
                .collect()
        };
        let (inputs, outputs) = (side(inputs), side(outputs));
        whole.sort_unstable();
        whole.dedup();
        Self { inputs, outputs, whole }
    }

    /// Every operand walks the dims of the broadcast shape.
    pub fn elementwise(inputs: &[Type], outputs: usize) -> Result<Self, String> {
        let mut shape: Vec<usize> = Vec::new();
        for input in inputs {
            shape = crate::types::broadcast(&shape, &input.shape)
                .ok_or_else(|| format!("{:?} does not broadcast with {shape:?}", input.shape))?;
        }
        let axis = |dim: usize| format!("d{dim}");
        let operand = |ty: &Type| -> Vec<String> {
            let skip = shape.len() - ty.rank();
            (0..ty.rank())
                .map(|dim| if ty.shape[dim] == shape[skip + dim] { axis(skip + dim) } else { "_".into() })
                .collect()
        };
        Ok(Self {
            inputs: inputs.iter().map(operand).collect(),
            outputs: vec![(0..shape.len()).map(axis).collect(); outputs],
            whole: Vec::new(),
        })
    }

    /// The size of each axis, in order of first use.
    pub fn sizes(&self, inputs: &[Type]) -> Result<Vec<(String, usize)>, String> {
        if inputs.len() != self.inputs.len() {
            return Err(format!("takes {} inputs, but got {}", self.inputs.len(), inputs.len()));
        }
        let mut sizes: Vec<(String, usize)> = Vec::new();
        for (at, (axes, ty)) in self.inputs.iter().zip(inputs).enumerate() {
            if axes.len() != ty.rank() {
                return Err(format!("input {at} must have {} dims ({}), but is {ty}", axes.len(), axes.join(" ")));
            }
            for (axis, size) in axes.iter().zip(&ty.shape).filter(|(axis, _)| *axis != "_") {
                match sizes.iter().find(|(name, _)| name == axis) {
                    Some((_, known)) if known != size => {
                        return Err(format!("axis `{axis}` is {known}, but {size} in input {at}, which is {ty}"));
                    }
                    Some(_) => {}
                    None => sizes.push((axis.clone(), *size)),
                }
            }
        }
        Ok(sizes)
    }

    pub fn output_shapes(&self, inputs: &[Type]) -> Result<Vec<Vec<usize>>, String> {
        let sizes = self.sizes(inputs)?;
        let size = |axis: &String| sizes.iter().find(|(name, _)| name == axis).map_or(1, |(_, size)| *size);
        Ok(self.outputs.iter().map(|axes| axes.iter().map(size).collect()).collect())
    }

    /// How many points the expression walks: the product of all axis sizes.
    pub fn points(&self, inputs: &[Type]) -> u64 {
        self.sizes(inputs)
            .map_or(0, |sizes| sizes.iter().fold(1u64, |total, (_, size)| total.saturating_mul(*size as u64)))
    }
}

impl std::fmt::Display for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let axis = |axis: &String| if self.whole.contains(axis) { format!("{axis}!") } else { axis.clone() };
        let operand = |axes: &Vec<String>| axes.iter().map(axis).collect::<Vec<_>>().join(" ");
        let side = |operands: &[Vec<String>]| operands.iter().map(operand).collect::<Vec<_>>().join(", ");
        write!(f, "{} -> {}", side(&self.inputs), side(&self.outputs))
    }
}
