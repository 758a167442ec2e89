//! Every formula of the registry: printed, evaluated in f64 against the op's definition, and compiled as C.

use kolo_graph::formula::{Formula, Function, Term};
use kolo_graph::op::{Case, Domain};
use kolo_graph::{DType, Dense, Op, Type, checked_types};
use kolo_ops::real::Real;
use std::process::Command;

/// The formula's results in f64; a mask is 0 or 1.
fn evaluate(formula: &Formula, inputs: &[f64], numbers: &[f64]) -> Vec<f64> {
    let mut values: Vec<f64> = Vec::new();
    for term in &formula.terms {
        let value = match term {
            Term::Input(at) => inputs[*at],
            Term::Number(at) => numbers[*at],
            Term::Literal(value) => *value,
            Term::Apply(function, [a, b, c]) => {
                // A function of fewer has term 0 in the places that it leaves open.
                call(*function, [a, b, c].map(|at| values[*at]))
            }
        };
        values.push(value);
    }
    formula.results.iter().map(|at| values[*at]).collect()
}

fn call(function: Function, [a, b, c]: [f64; 3]) -> f64 {
    let mask = |holds: bool| f64::from(u8::from(holds));
    match function {
        Function::Add => a + b,
        Function::Sub => a - b,
        Function::Mul => a * b,
        Function::Div => a / b,
        Function::Neg => -a,
        Function::MulAdd => a.mul_add(b, c),
        Function::Over => a.over(b),
        Function::Exp => a.exp(),
        Function::ExpM1 => a.exp_m1(),
        Function::Ln => a.ln(),
        Function::Ln1p => a.ln_1p(),
        Function::Sqrt => a.sqrt(),
        Function::Abs => a.abs(),
        Function::Tanh => a.tanh(),
        Function::Erf => Real::erf(a),
        Function::Sin => a.sin(),
        Function::Cos => a.cos(),
        Function::Floor => a.floor(),
        Function::Pow => a.powf(b),
        Function::BiasCorrection => b.bias_correction(a),
        Function::Equal => mask(a == b),
        Function::Less => mask(a < b),
        Function::AtMost => mask(a <= b),
        Function::And => mask(a != 0.0 && b != 0.0),
        Function::Or => mask(a != 0.0 || b != 0.0),
        Function::Not => mask(a == 0.0),
        Function::Select => {
            if a != 0.0 {
                b
            } else {
                c
            }
        }
    }
}

/// Values that a case's arguments may have, each an f32. With `odd` ones among them, where the type has any.
fn draw(case: &Case, odd: bool) -> Vec<Dense> {
    const ODD: [f64; 6] = [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1e30];
    let argument = |(number, arg): (usize, &kolo_graph::Arg)| {
        let mut at = 0;
        Dense::from_fn(arg.ty.shape.clone(), |_| {
            at += 1;
            let fraction = (f64::from(at) * 0.618_034 + number as f64 * 0.37).fract();
            let value = match arg.domain {
                _ if odd && arg.ty.dtype.is_float() && at % 3 == 0 => ODD[(at as usize / 3 + number) % ODD.len()],
                Domain::Real(low, high) => low + (high - low) * fraction,
                Domain::Spread => (fraction - 0.5) * 4.0,
                Domain::Index(low, high) => (low as f64 + (high - low) as f64 * fraction).floor(),
                Domain::Rng => f64::from(at),
            };
            f64::from(value as f32)
        })
    };
    case.args.iter().enumerate().map(argument).collect()
}

/// One use of a formula: its arguments, the numbers, and what must come out.
struct Point {
    inputs: Vec<f64>,
    numbers: Vec<f64>,
    wanted: Vec<f64>,
}

/// The formula at every element of a case, beside the definition.
fn points(op: &dyn Op, formula: &Formula, arguments: &[Dense], types: &[Type]) -> Vec<Point> {
    let outputs = checked_types(op, types).unwrap();
    let references: Vec<&Dense> = arguments.iter().collect();
    let wanted = op.reference(&references, &outputs);
    let (own, scalars) = arguments.split_at(formula.inputs.len());
    let scalars: Vec<f64> = scalars.iter().map(|scalar| scalar.data[0]).collect();
    let mut points = Vec::new();
    let mut at = vec![0; outputs[0].shape.len()];
    for element in 0..outputs[0].elements() {
        points.push(Point {
            inputs: own.iter().map(|input| input.get(&at)).collect(),
            numbers: op.formula_numbers(&scalars),
            wanted: wanted.iter().map(|output| output.data[element]).collect(),
        });
        kolo_graph::op::advance(&mut at, &outputs[0].shape);
    }
    points
}

/// Every small case of every elementwise op: its name as a C function, itself and its formula.
fn elementwise_cases() -> Vec<(String, Case, Formula)> {
    let mut all = Vec::new();
    for kind in kolo_ops::registry() {
        for (number, case) in (kind.cases)().into_iter().enumerate() {
            // A cast is how a value is stored, which devices do by themselves.
            let stores = case.op.is::<kolo_ops::cast::Cast>();
            let tiled = kolo_ops::cpu_of(&*case.op).and_then(|op| op.tile_kernel()).filter(|_| !stores);
            assert!(tiled.is_none() || case.op.formula().is_some(), "{} has a tile kernel and no formula", kind.name);
            let small = case.args.iter().all(|arg| arg.ty.elements() <= 200);
            if let Some(formula) = case.op.formula().filter(|_| small) {
                all.push((format!("kolo_{}_{number}", kind.name), case, formula));
            }
        }
    }
    all
}

fn types_of(case: &Case) -> Vec<Type> {
    case.args.iter().map(|arg| arg.ty.clone()).collect()
}

#[test]
fn every_formula_is_what_its_op_means() {
    let cases = elementwise_cases();
    let kinds: std::collections::BTreeSet<&str> = cases.iter().map(|(_, case, _)| case.op.name()).collect();
    assert!(kinds.len() >= 58, "{} elementwise kinds", kinds.len());
    for (name, case, formula) in &cases {
        for odd in [false, true] {
            for point in points(&*case.op, formula, &draw(case, odd), &types_of(case)) {
                let got = evaluate(formula, &point.inputs, &point.numbers);
                for (got, wanted) in got.iter().zip(&point.wanted) {
                    let same = got == wanted || got.is_nan() && wanted.is_nan();
                    assert!(same, "{name} of {:?}: {got}, must be {wanted}", point.inputs);
                }
            }
        }
    }
}

fn c_function(name: &str, case: &Case, formula: &Formula) -> String {
    let dtypes: Vec<DType> = case.args[..formula.inputs.len()].iter().map(|arg| arg.ty.dtype).collect();
    formula.to_c("static inline", name, &dtypes)
}

#[test]
fn a_formula_is_printed_as_a_function_of_c() {
    let huber = kolo_ops::elementwise::Huber { delta: 0.5 };
    assert_eq!(
        huber.formula().unwrap().to_c("__device__ static inline", "huber", &[DType::F32]),
        "__device__ static inline float huber(float x, float delta) {
    const float t2 = fabsf(x);
    const bool t3 = t2 < delta;
    const float t5 = 0.5f * x;
    const float t6 = t5 * x;
    const float t7 = 0.5f * delta;
    const float t8 = t2 - t7;
    const float t9 = delta * t8;
    const float t10 = t3 ? t6 : t9;
    return t10;
}
"
    );
    let select = kolo_ops::compare::Select {}.formula().unwrap();
    assert_eq!(
        select.to_c("static", "choose", &[DType::Bool, DType::I32, DType::I32]),
        "static int choose(unsigned char condition, int a, int b) {
    const bool t4 = condition == 0.0f;
    const bool t5 = !t4;
    const int t6 = t5 ? a : b;
    return t6;
}
"
    );
}

/// A number as an argument of a C function.
fn argument(value: f64) -> String {
    format!("({:?}f)", value as f32)
}

#[test]
fn all_formulas_compile_as_c_and_give_the_same_values() {
    if Command::new("cc").arg("--version").output().is_err() {
        println!("skipped: no C compiler");
        return;
    }
    let mut text = String::from("#include <math.h>\n#include <stdbool.h>\n#include <stdio.h>\n\n");
    text += "static double bias_correction(double beta, double step) { return 1.0 - pow(beta, step); }\n";
    text += "static float over(float x, float by) { return x / by; }\n";
    let (mut body, mut wanted) = (String::new(), Vec::new());
    for (name, case, formula) in elementwise_cases() {
        text += &c_function(&name, &case, &formula);
        for point in points(&*case.op, &formula, &draw(&case, false), &types_of(&case)).iter().take(12) {
            let arguments: Vec<String> =
                point.inputs.iter().chain(&point.numbers).map(|value| argument(*value)).collect();
            let arguments = arguments.join(", ");
            match point.wanted.len() {
                1 => body += &format!("    printf(\"%.9g\\n\", (double)({name}({arguments})));\n"),
                count => {
                    body += &format!("    {name}({arguments}, r);\n");
                    (0..count).for_each(|at| body += &format!("    printf(\"%.9g\\n\", (double)r[{at}]);\n"));
                }
            }
            wanted.extend(point.wanted.iter().map(|wanted| (name.clone(), point.inputs.clone(), *wanted)));
        }
    }
    text += &format!("int main(void) {{\n    float r[8];\n    (void)r;\n{body}    return 0;\n}}\n");
    println!("{text}");
    let folder = std::env::temp_dir().join(format!("kolo-formulas-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, program) = (folder.join("formulas.c"), folder.join("formulas"));
    std::fs::write(&source, text).unwrap();
    let built = Command::new("cc").args(["-std=c99", "-o"]).args([&program, &source]).arg("-lm").output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let printed = String::from_utf8(Command::new(&program).output().unwrap().stdout).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let got: Vec<f64> = printed.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(got.len(), wanted.len());
    for (got, (name, inputs, wanted)) in got.iter().zip(&wanted) {
        assert!((got - wanted).abs() <= 2e-5 * wanted.abs().max(1.0), "{name} of {inputs:?}: {got}, must be {wanted}");
    }
}
