//! The index expression of an op: which named axis each dim of each operand walks.
//!
//! From `"m k, k n -> m n"` alone come the output shapes, the shape errors, the number of points (and so the FLOPs) and
//! every legal way to split the op: an axis that is in an output can be split and the outputs concatenated; an axis that
//! is in no output is summed over, and splitting it leaves partial sums. An axis marked `!` must stay whole; one marked `~`
//! can be split, but then results may be rounded differently. `_` is a dim of size one that stretches over whatever the
//! output has there. An operand that begins with `+` (a bias) is added to the sum: where that is split, it is too.

use crate::types::Type;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Index {
    pub inputs: Vec<Vec<String>>,
    pub outputs: Vec<Vec<String>>,
    /// Axes that cannot be split.
    pub whole: Vec<String>,
    /// Axes whose split changes how results are rounded.
    pub rounded: Vec<String>,
    /// Inputs that are added to a sum.
    pub added: Vec<usize>,
}

impl Index {
    /// Reads `"m k, k n -> m n"`.
    pub fn parse(text: &str) -> Self {
        let (inputs, outputs) = text.split_once("->").expect("an index expression has an arrow");
        let [mut whole, mut rounded] = [Vec::new(), Vec::new()];
        let mut axis = |text: &str| {
            let axis = text.trim_end_matches(['!', '~']).to_string();
            match text.chars().last() {
                Some('!') => whole.push(axis.clone()),
                Some('~') => rounded.push(axis.clone()),
                _ => {}
            }
            axis
        };
        let mut side = |side: &str| -> Vec<Vec<String>> {
            let operand =
                |operand: &str| operand.trim_start_matches([' ', '+']).split_whitespace().map(&mut axis).collect();
            side.split(',').map(operand).collect()
        };
        let plus = |(at, operand): (usize, &str)| operand.trim_start().starts_with('+').then_some(at);
        let added = inputs.split(',').enumerate().filter_map(plus).collect();
        let (inputs, outputs) = (side(inputs), side(outputs));
        for marked in [&mut whole, &mut rounded] {
            marked.sort_unstable();
            marked.dedup();
        }
        Self { inputs, outputs, whole, rounded, added }
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
            ..Self::default()
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
        let axis = |axis: &String| match axis {
            axis if self.whole.contains(axis) => format!("{axis}!"),
            axis if self.rounded.contains(axis) => format!("{axis}~"),
            axis => axis.clone(),
        };
        let operand = |axes: &Vec<String>| axes.iter().map(axis).collect::<Vec<_>>().join(" ");
        let plus = |at: usize| if self.added.contains(&at) { "+" } else { "" };
        let inputs: Vec<String> =
            self.inputs.iter().enumerate().map(|(at, axes)| format!("{}{}", plus(at), operand(axes))).collect();
        let outputs: Vec<String> = self.outputs.iter().map(operand).collect();
        write!(f, "{} -> {}", inputs.join(", "), outputs.join(", "))
    }
}
