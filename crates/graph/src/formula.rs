//! What an elementwise op computes for one element, as data: from it come the text of a kernel in C or CUDA, and, one day, a
//! kernel of several ops at once. Who writes an op writes the expression once; recording it is the op crate's part.

use crate::types::DType;
use std::fmt::Write;

/// One function of its inputs' elements at one place, with one result or several.
#[derive(Clone, Debug, PartialEq)]
pub struct Formula {
    /// The op's first inputs. Those after them are scalars, which [`Op::formula_numbers`](crate::Op::formula_numbers) reads.
    pub inputs: Vec<&'static str>,
    /// What is the same for every element.
    pub numbers: Vec<&'static str>,
    /// Each refers to earlier ones alone.
    pub terms: Vec<Term>,
    /// The terms that the op's outputs are.
    pub results: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Term {
    Input(usize),
    Number(usize),
    Literal(f64),
    /// A function of as many earlier terms as it takes.
    Apply(Function, [usize; 3]),
}

/// What terms are made of. A comparison gives a mask; logic and selection take masks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    Add,
    Sub,
    Mul,
    Div,
    Neg,
    /// `a · b + c` with one rounding.
    MulAdd,
    /// `a / b` for `b` not below zero by way of a reciprocal: the same operations, and so the same bits, on every device.
    Over,
    Exp,
    ExpM1,
    Ln,
    Ln1p,
    Sqrt,
    Abs,
    Tanh,
    Erf,
    Sin,
    Cos,
    Floor,
    Pow,
    /// `1 − aᵇ` for a whole `b`, by repeated squaring.
    BiasCorrection,
    Equal,
    Less,
    AtMost,
    And,
    Or,
    Not,
    /// The second where the first holds, else the third.
    Select,
}

impl Function {
    /// How it is called on f32 in C: `#` stands for its operands, one after the other.
    fn pattern(self) -> &'static str {
        match self {
            Function::Add => "# + #",
            Function::Sub => "# - #",
            Function::Mul => "# * #",
            Function::Div => "# / #",
            Function::Neg => "-#",
            Function::MulAdd => "fmaf(#, #, #)",
            Function::Over => "over(#, #)",
            Function::Exp => "expf(#)",
            Function::ExpM1 => "expm1f(#)",
            Function::Ln => "logf(#)",
            Function::Ln1p => "log1pf(#)",
            Function::Sqrt => "sqrtf(#)",
            Function::Abs => "fabsf(#)",
            Function::Tanh => "tanhf(#)",
            Function::Erf => "erff(#)",
            Function::Sin => "sinf(#)",
            Function::Cos => "cosf(#)",
            Function::Floor => "floorf(#)",
            Function::Pow => "powf(#, #)",
            Function::BiasCorrection => "bias_correction(#, #)",
            Function::Equal => "# == #",
            Function::Less => "# < #",
            Function::AtMost => "# <= #",
            Function::And => "# && #",
            Function::Or => "# || #",
            Function::Not => "!#",
            Function::Select => "# ? # : #",
        }
    }

    fn gives_a_mask(self) -> bool {
        use Function::*;
        matches!(self, Equal | Less | AtMost | And | Or | Not)
    }
}

/// The C type that one element is computed in; halves are converted on the way.
fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 | DType::BF16 | DType::F16 => "float",
        DType::I32 => "int",
        DType::I64 => "long long",
        DType::Bool | DType::U8 => "unsigned char",
    }
}

impl Formula {
    /// A function of C, which is one of CUDA too with `__device__` among the qualifiers. Its parameters are the inputs, of
    /// these element types, then the numbers; one result is returned, several are written to `results`. It needs `math.h`
    /// and `stdbool.h`, which CUDA knows by itself, and `over` as the kernels' prelude has it.
    pub fn to_c(&self, qualifiers: &str, name: &str, inputs: &[DType]) -> String {
        let types = self.c_types(inputs);
        let given = self.inputs.iter().zip(inputs).map(|(name, dtype)| format!("{} {name}", c_type(*dtype)));
        let numbers = self.numbers.iter().map(|name| format!("float {name}"));
        let several = (self.results.len() > 1).then(|| "float *results".to_string());
        let parameters: Vec<String> = given.chain(numbers).chain(several).collect();
        let returned = if self.results.len() > 1 { "void" } else { types[self.results[0]] };
        let mut text = format!("{qualifiers} {returned} {name}({}) {{\n", parameters.join(", "));
        self.terms_to_c(&mut text, &types, |function| function.pattern().into(), &|term| self.operand(term));
        match &self.results[..] {
            [result] => {
                let _ = writeln!(text, "    return {};", self.operand(*result));
            }
            results => results.iter().enumerate().for_each(|(at, result)| {
                let _ = writeln!(text, "    results[{at}] = {};", self.operand(*result));
            }),
        }
        text + "}\n"
    }

    /// The same in double precision for a formula of numbers alone: its parameters are the inputs, and its results are rounded to
    /// floats and written to `results`. [`Function::BiasCorrection`] is a function of that name.
    pub fn to_c_numbers(&self, qualifiers: &str, name: &str) -> String {
        let parameters: Vec<String> = self.inputs.iter().map(|name| format!("double {name}")).collect();
        let mut text = format!("{qualifiers} void {name}({}, float *results) {{\n", parameters.join(", "));
        let types: Vec<&str> = self
            .c_types(&vec![DType::F32; self.inputs.len()])
            .iter()
            .map(|ty| if *ty == "float" { "double" } else { ty })
            .collect();
        let operand = |term: usize| match self.terms[term] {
            Term::Literal(value) => format!("({value:?})"),
            _ => self.operand(term),
        };
        let pattern = |function: Function| match function {
            Function::Over => Function::Div.pattern().into(),
            _ => function.pattern().replace("f(", "("),
        };
        self.terms_to_c(&mut text, &types, pattern, &operand);
        for (at, result) in self.results.iter().enumerate() {
            let _ = writeln!(text, "    results[{at}] = (float)({});", operand(*result));
        }
        text + "}\n"
    }

    /// One line for each function that is applied.
    fn terms_to_c(
        &self,
        text: &mut String,
        types: &[&str],
        pattern: impl Fn(Function) -> String,
        operand: &dyn Fn(usize) -> String,
    ) {
        for (at, term) in self.terms.iter().enumerate() {
            if let Term::Apply(function, operands) = term {
                let (pattern, mut operands) = (pattern(*function), operands.iter());
                let mut parts = pattern.split('#');
                let mut call = parts.next().unwrap_or_default().to_string();
                for part in parts {
                    let operand = operands.next().map(|term| operand(*term)).unwrap_or_default();
                    let _ = write!(call, "{operand}{part}");
                }
                let _ = writeln!(text, "    const {} t{at} = {call};", types[at]);
            }
        }
    }

    /// What the only result is in C.
    pub fn result_type(&self, inputs: &[DType]) -> &'static str {
        self.c_types(inputs)[self.results[0]]
    }

    fn operand(&self, term: usize) -> String {
        match self.terms[term] {
            Term::Input(at) => self.inputs[at].into(),
            Term::Number(at) => self.numbers[at].into(),
            Term::Literal(value) => literal(value as f32),
            Term::Apply(..) => format!("t{term}"),
        }
    }

    fn c_types(&self, inputs: &[DType]) -> Vec<&'static str> {
        let mut types: Vec<&'static str> = Vec::with_capacity(self.terms.len());
        for term in &self.terms {
            types.push(match term {
                Term::Input(at) => c_type(inputs[*at]),
                Term::Apply(Function::Select, [_, a, b]) if types[*a] == types[*b] => types[*a],
                Term::Apply(function, _) if function.gives_a_mask() => "bool",
                _ => "float",
            });
        }
        types
    }
}

/// A number as C writes it, to the last digit.
pub fn literal(value: f32) -> String {
    match value {
        value if value.is_nan() => "NAN".into(),
        value if value.is_infinite() => if value > 0.0 { "INFINITY" } else { "(-INFINITY)" }.into(),
        value if value.is_sign_negative() => format!("({value:?}f)"),
        value => format!("{value:?}f"),
    }
}
