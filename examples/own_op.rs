//! An op of your own, used by a model of your own, with the whole command line around it.
//!
//! `cargo run --release --example own_op -- train JOB.toml`, where the job says `kind = "softsign-mlp"`. The op is declared
//! once: what it is (`Op`), how the CPU runs it (`Cpu`), and what the conformance suite would try (`Cases`).

use kolo::graph_ir::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Op, OpKind, Operand, Operands, op};
use kolo::prelude::*;

op! {
    /// `x / (1 + sharpness · |x|)`: bends like tanh, without an exponential.
    pub struct Softsign = "softsign" { sharpness: f64 }
}

impl Op for Softsign {
    fn operands(&self) -> Operands {
        Operands::new([Operand::float("x")], &["y"])
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        Ok(vec![inputs[0].clone()])
    }

    /// Of a graph, not of numbers: the derivative is built from ops that there are.
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        let x = cx.input(0);
        let bend = x.abs().scale(self.sharpness as f32).add(x.builder().scalar(1.0));
        vec![Some(cx.grad().div(bend.square()))]
    }

    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let y = inputs[0].data.iter().map(|x| x / (1.0 + self.sharpness * x.abs())).collect();
        vec![Dense::new(outputs[0].shape.clone(), y)]
    }
}

impl Cpu for Softsign {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let sharpness = self.sharpness as f32;
        for (y, x) in cx.out_f32(0).iter_mut().zip(cx.f32(0)) {
            *y = x / (1.0 + sharpness * x.abs());
        }
    }
}

impl Cases for Softsign {
    fn cases() -> Vec<Case> {
        vec![Case::new(Softsign { sharpness: 1.5 }, [Arg::real([3, 5])])]
    }
}

#[derive(Debug)]
struct SoftsignMlp {
    inputs: Vec<usize>,
    classes: usize,
    sharpness: f64,
}

fn make(settings: &Settings, data: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> {
    Ok(Box::new(SoftsignMlp {
        inputs: data_shape(data, "x").unwrap_or(vec![64]),
        classes: data_classes(data, "y").unwrap_or(10),
        sharpness: settings.float_in("sharpness", 1.0, 0.0, 100.0)?,
    }))
}

impl Model for SoftsignMlp {
    fn fields(&self) -> Vec<Field> {
        vec![Field::real("x", &self.inputs), Field::index("y", &[], self.classes)]
    }

    fn build<'b>(&self, cx: &Build<'b>) -> Outputs<'b> {
        let fields = self.fields();
        let x = cx.field(&fields[0]).reshape_to([cx.batch, self.inputs.iter().product()]);
        let hidden = cx.linear("hidden", x, 64).then(Softsign { sharpness: self.sharpness }, &[]);
        classify(cx.linear("head", hidden, self.classes), cx.field(&fields[1]), 0.0)
    }
}

fn main() -> std::process::ExitCode {
    kolo::App::new().op(OpKind::of::<Softsign>()).model("softsign-mlp", "one bent layer: sharpness", make).run()
}
