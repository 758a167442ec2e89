//! What an op takes and gives: the name and element types of every input, and where gradients flow.
//!
//! Every op declares its operands, and [`checked_types`] compares them with what it is given before the op's own `infer`
//! looks at shapes. A kernel therefore never sees a number of inputs or an element type that its op did not name.

use crate::op::Op;
use crate::types::{DIMS_MAX, DType, Type};

/// One input of an op, or several of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    pub name: &'static str,
    pub dtypes: &'static [DType],
    pub gradient: Gradient,
    pub count: Count,
    /// Whether it stays f32 in mixed precision although the op takes halves.
    pub full: bool,
}

/// How many inputs an operand stands for. Only the last one may stand for other than one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    One,
    Optional,
    /// One or more.
    Many,
}

/// What an input's gradient is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gradient {
    /// `Op::grad` gives it.
    Rule,
    /// There is none by definition: the op is piecewise constant in it, or draws with it.
    Zero,
    /// There is one, but the op has no rule for it: asking for it is an error.
    Missing,
}

/// One output of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output {
    pub name: &'static str,
    /// Whether `Op::grad` takes its gradient into account.
    pub gradient: bool,
}

/// The inputs and outputs of an op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operands {
    pub inputs: Vec<Operand>,
    pub outputs: Vec<Output>,
}

/// The float types. Kernels compute in f32; the executor converts the halves.
pub const FLOATS: &[DType] = &[DType::F32, DType::BF16, DType::F16];

impl Operand {
    pub const fn of(name: &'static str, dtypes: &'static [DType]) -> Self {
        Self { name, dtypes, gradient: Gradient::Rule, count: Count::One, full: false }
    }

    /// Of any float type.
    pub const fn float(name: &'static str) -> Self {
        Self::of(name, FLOATS)
    }

    pub const fn f32(name: &'static str) -> Self {
        Self::of(name, &[DType::F32])
    }

    pub const fn i32(name: &'static str) -> Self {
        Self::of(name, &[DType::I32])
    }

    pub const fn bool(name: &'static str) -> Self {
        Self::of(name, &[DType::Bool])
    }

    /// Of any element type at all.
    pub const fn any(name: &'static str) -> Self {
        Self::of(name, &DType::ALL)
    }

    /// It has no gradient by definition.
    pub const fn constant(mut self) -> Self {
        self.gradient = Gradient::Zero;
        self
    }

    /// It has a gradient, but there is no rule for it.
    pub const fn without_rule(mut self) -> Self {
        self.gradient = Gradient::Missing;
        self
    }

    /// It stays f32 in mixed precision: a statistic, or the parameter of a norm.
    pub const fn in_full(mut self) -> Self {
        self.full = true;
        self
    }

    pub const fn optional(mut self) -> Self {
        self.count = Count::Optional;
        self
    }

    pub const fn many(mut self) -> Self {
        self.count = Count::Many;
        self
    }

    /// Whether it is a half in mixed precision, in an op that takes halves.
    pub fn may_be_half(&self) -> bool {
        !self.full && self.dtypes.contains(&DType::BF16) && self.dtypes.contains(&DType::F16)
    }

    /// Whether it can have a gradient at all.
    pub fn is_float(&self) -> bool {
        self.dtypes.iter().any(|dtype| dtype.is_float())
    }

    fn dtype_names(&self) -> String {
        self.dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(" or ")
    }
}

impl Operands {
    /// All outputs can be differentiated.
    pub fn new(inputs: impl Into<Vec<Operand>>, outputs: &[&'static str]) -> Self {
        let outputs = outputs.iter().map(|name| Output { name, gradient: true }).collect();
        Self { inputs: inputs.into(), outputs }
    }

    /// An op whose inputs have gradients but no rules.
    pub fn without_rules(inputs: impl Into<Vec<Operand>>, outputs: &[&'static str]) -> Self {
        let inputs: Vec<Operand> = inputs.into();
        Self::new(inputs.into_iter().map(Operand::without_rule).collect::<Vec<_>>(), outputs)
    }

    /// Further outputs, kept for the backward pass or of whole numbers, that have no gradient themselves.
    pub fn saved(mut self, outputs: &[&'static str]) -> Self {
        self.outputs.extend(outputs.iter().map(|name| Output { name, gradient: false }));
        self
    }

    /// The operand that input `at` belongs to.
    pub fn input(&self, at: usize) -> Option<&Operand> {
        self.inputs.get(at).or_else(|| self.inputs.last().filter(|last| last.count == Count::Many))
    }

    /// Output `at`; an op with as many outputs as inputs declares the first for all.
    pub fn output(&self, at: usize) -> Option<&Output> {
        self.outputs.get(at).or(self.outputs.last())
    }

    /// What is wrong with the number or the element types of the inputs, if anything.
    pub fn check(&self, inputs: &[Type]) -> Result<(), String> {
        let least = self.inputs.iter().filter(|operand| operand.count != Count::Optional).count();
        let open = self.inputs.last().is_some_and(|last| last.count == Count::Many);
        if inputs.len() < least || (!open && inputs.len() > self.inputs.len()) {
            return Err(format!("takes {}, but got {}", self.list(), inputs.len()));
        }
        for (at, ty) in inputs.iter().enumerate() {
            let operand = self.input(at).ok_or("has no such input")?;
            if !operand.dtypes.contains(&ty.dtype) {
                let (name, wanted) = (operand.name, operand.dtype_names());
                return Err(format!("`{name}` (input {at}) must be {wanted}, but is {ty}; cast it"));
            }
        }
        Ok(())
    }

    /// Such as `2 inputs (x, weight)`.
    fn list(&self) -> String {
        let name = |operand: &Operand| match operand.count {
            Count::One => operand.name.to_string(),
            Count::Optional => format!("perhaps {}", operand.name),
            Count::Many => format!("{}…", operand.name),
        };
        let names: Vec<String> = self.inputs.iter().map(name).collect();
        match &names[..] {
            [] => "no inputs".into(),
            [one] if self.inputs[0].count == Count::One => format!("one input ({one})"),
            _ if self.inputs.iter().any(|operand| operand.count != Count::One) => {
                format!("inputs ({})", names.join(", "))
            }
            _ => format!("{} inputs ({})", names.len(), names.join(", ")),
        }
    }
}

/// The output types of `op` on these inputs, or what is wrong with them. Everything that builds, reads or verifies a graph
/// goes through here: number and element types first, then the op's own `infer`, then the sizes.
pub fn checked_types(op: &dyn Op, inputs: &[Type]) -> Result<Vec<Type>, String> {
    op.operands().check(inputs)?;
    inputs.iter().try_for_each(check_size)?;
    let outputs = op.infer(inputs)?;
    if outputs.is_empty() {
        return Err("makes no output".into());
    }
    outputs.iter().try_for_each(check_size)?;
    Ok(outputs)
}

fn check_size(ty: &Type) -> Result<(), String> {
    if ty.rank() > DIMS_MAX {
        return Err(format!("{ty} has more than {DIMS_MAX} dims; merge some"));
    }
    if ty.fits() { Ok(()) } else { Err(format!("{ty} is larger than any memory")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_types_are_checked() {
        let operands = Operands::new([Operand::float("x"), Operand::i32("ids").optional()], &["y"]);
        let (x, ids) = (Type::f32([3]), Type::i32([3]));
        assert_eq!(operands.check(std::slice::from_ref(&x)), Ok(()));
        assert_eq!(operands.check(&[x.clone(), ids.clone()]), Ok(()));
        let wrong = |inputs: &[Type]| operands.check(inputs).unwrap_err();
        assert_eq!(wrong(&[]), "takes inputs (x, perhaps ids), but got 0");
        assert_eq!(wrong(&[x.clone(), ids.clone(), ids]), "takes inputs (x, perhaps ids), but got 3");
        let message = wrong(&[Type::new(DType::Bool, [3])]);
        assert_eq!(message, "`x` (input 0) must be f32 or bf16 or f16, but is bool[3]; cast it");
        let many = Operands::new([Operand::f32("part").many()], &["y"]);
        assert!(many.check(&[]).is_err());
        assert_eq!(many.check(&vec![x; 5]), Ok(()));
    }
}
