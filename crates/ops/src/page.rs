//! The reference of every op, `docs/ops.md`, from the registry: what the declarations say, and nothing by hand.

use kolo_graph::Type;
use kolo_graph::checked_types;
use kolo_graph::op::Case;
use kolo_graph::operand::{Count, FLOATS, Gradient, Operand, Operands, Output};
use kolo_graph::split::Split;
use std::fmt::Write;

const HEAD: &str = "\
# Ops

Every op of a graph, as its declaration says. `crates/ops/src/page.rs` writes this page from the registry, and a test compares them; after a change,
`UPDATE=1 cargo test -p kolo-ops --test rewrite page` writes it anew. How a graph is written as text is in [ir.md](ir.md).

- **inputs**, in order, with their element types: *float* is f32, bf16 or f16 (kernels compute in f32), *any* is every type. An input with *?* may be
  left out, one with *…* stands for one or more. After the type: whether the op has a rule for its gradient. *no gradient* means there is none by
  definition (a comparison, an index, a constant piece); *no rule* means that differentiating through it is an error, never a zero.
- **outputs**, in order; what is in parentheses is kept for the backward pass or is whole numbers, and a loss cannot depend on it.
- **attributes** are the op's constants.
- **index** says which axis each dim walks, for one of the op's own test cases. An axis on both sides can be split; one that is on the left only is summed over; `!` marks one that
  must stay whole, `~` one whose split may round differently, `_` a dim of size one that stretches, `+` an input that is added to the sum.
- **splits** are all the ways to split the op along an axis of the mesh, in its test cases: the axis, where the inputs lie, and where the outputs lie then. *S1* is sharded along dim 1;
  *S2/3* is the same in each of three equal blocks of dim 2; *R* is replicated; *P* is a term of a sum; *H2* is what the part's windows reach of dim 2, a halo. A split marked *~* does not keep the whole op's bits.
";

/// Of the sources, which have no cases that could say it.
const NO_CASES: &str = "it takes no inputs; its placement is decided by what feeds or stores it";

/// The whole page.
pub fn markdown() -> String {
    let mut page = HEAD.to_string();
    for kind in crate::registry() {
        let _ = write!(page, "\n## `{}`\n\n{}\n\n", kind.name, sentence(kind.doc));
        let cases = (kind.cases)();
        let richest = cases.iter().max_by_key(|case| {
            let inputs = case.op.operands().inputs;
            // A part of an op may have fewer rules than the whole.
            let rules = inputs.iter().filter(|input| input.gradient == Gradient::Rule).count();
            (inputs.len(), rules, std::cmp::Reverse(case.args.len()))
        });
        let operands = richest.map_or_else(|| Operands::new([], &["value"]), |case| case.op.operands());
        let _ = writeln!(page, "- inputs: {}", or_none(operands.inputs.iter().map(input).collect()));
        let _ = writeln!(page, "- outputs: {}", or_none(operands.outputs.iter().map(output).collect()));
        let _ = writeln!(page, "- attributes: {}", or_none(kind.attributes.iter().map(attribute).collect()));
        if let Some((_, index)) = cases.iter().filter_map(index).max_by_key(|(axes, _)| *axes) {
            let _ = writeln!(page, "- index: `{index}`");
        }
        let _ = writeln!(page, "- splits: {}", splits(&cases));
    }
    page
}

fn or_none(items: Vec<String>) -> String {
    if items.is_empty() { "none".into() } else { items.join("; ") }
}

/// A doc comment as one line, without links into the code.
pub fn sentence(doc: &str) -> String {
    let line = doc.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    line.trim().replace("[`", "`").replace("`]", "`")
}

fn input(operand: &Operand) -> String {
    let dtypes = match operand.dtypes {
        dtypes if dtypes == FLOATS => "float".to_string(),
        dtypes if dtypes.len() == kolo_graph::DType::ALL.len() => "any".to_string(),
        dtypes => dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(" or "),
    };
    let count = match operand.count {
        Count::One => "",
        Count::Optional => "?",
        Count::Many => "…",
    };
    let gradient = match operand.gradient {
        _ if !operand.is_float() => "",
        Gradient::Rule => ", gradient",
        Gradient::Zero => ", no gradient",
        Gradient::Missing => ", no rule",
    };
    format!("`{}`{count} {dtypes}{gradient}", operand.name)
}

fn output(output: &Output) -> String {
    if output.gradient { format!("`{}`", output.name) } else { format!("(`{}`)", output.name) }
}

fn attribute((name, rust): &(&'static str, &'static str)) -> String {
    let ty = match *rust {
        "bool" => "bool",
        "usize" => "count",
        "i64" => "integer",
        "f32" | "f64" => "number",
        "String" => "text",
        "Vec<usize>" => "list of counts",
        "[usize; 2]" => "pair of counts",
        "DType" => "element type",
        "Init" => "initial values",
        other => other,
    };
    format!("`{name}` {ty}")
}

/// The index expression with the number of axes its inputs have: the more, the more it shows.
fn index(case: &Case) -> Option<(usize, String)> {
    let types: Vec<Type> = case.args.iter().map(|arg| arg.ty.clone()).collect();
    let index = case.op.index(&types)?;
    Some((index.inputs.iter().map(Vec::len).sum(), index.to_string()))
}

/// Every axis that some case can be split along, for each number of inputs, as the case with the most splits has it; or why
/// there is none.
fn splits(cases: &[Case]) -> String {
    let of = |case: &Case| -> Vec<Split> {
        let types: Vec<Type> = case.args.iter().map(|arg| arg.ty.clone()).collect();
        checked_types(&*case.op, &types).map_or_else(|_| Vec::new(), |outputs| case.op.splits(&types, &outputs))
    };
    let mut all: Vec<Vec<Split>> = cases.iter().map(of).collect();
    all.sort_by_key(|splits| std::cmp::Reverse(splits.len()));
    let mut seen = Vec::new();
    let mut items = Vec::new();
    for split in all.iter().flatten() {
        let key = (&split.axis, split.inputs.len());
        if !seen.contains(&key) {
            seen.push(key);
            items.push(format!("`{split}`{}", if split.exact { "" } else { " ~" }));
        }
    }
    match items.is_empty() {
        true => format!("none: {}", cases.iter().find_map(|case| case.op.unsplittable()).unwrap_or(NO_CASES)),
        false => items.join("; "),
    }
}
