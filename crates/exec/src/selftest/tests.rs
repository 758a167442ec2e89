//! The suite that users run from the program (`kolo selftest`): it passes on the CPU, and sees a kernel that is wrong.

use crate::{Executor, cpu, selftest};
use kolo_graph::op::OpKind;
use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, GradCx, Op, Operand, Operands, Tensor, Type, op};
use std::sync::Arc;

op! {
    /// One more; the kernel is wrong in one element, and gives other bits every time in another.
    pub struct Careless = "careless" { every_time: bool }
}

impl Op for Careless {
    fn operands(&self) -> Operands {
        Operands::new([Operand::f32("x").constant()], &["y"])
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        Ok(inputs.to_vec())
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        vec![Dense::new(inputs[0].shape.clone(), inputs[0].data.iter().map(|x| x + 1.0).collect())]
    }
}

impl Cpu for Careless {
    fn run(&self, cx: &mut CpuCx<'_>) {
        static RUNS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let out = cx.out_f32(0);
        out.iter_mut().zip(cx.f32(0)).for_each(|(y, x)| *y = x + 1.0);
        match self.every_time {
            true => out[1] += RUNS.fetch_add(1, std::sync::atomic::Ordering::Relaxed) as f32 * 1e-6,
            false => out[3] += 0.01,
        }
    }
}

impl Cases for Careless {
    fn cases() -> Vec<Case> {
        [false, true].map(|every_time| Case::new(Careless { every_time }, [Arg::real([5]).constant()])).to_vec()
    }
}

op! {
    /// Twice as much; half of the gradient is missing.
    pub struct Halved = "halved" {}
}

impl Op for Halved {
    fn operands(&self) -> Operands {
        Operands::new([Operand::f32("x")], &["y"])
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        Ok(inputs.to_vec())
    }
    fn grad<'b>(&self, cx: &GradCx<'b>) -> Vec<Option<Tensor<'b>>> {
        vec![Some(cx.grad())]
    }
    fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
        vec![Dense::new(inputs[0].shape.clone(), inputs[0].data.iter().map(|x| 2.0 * x).collect())]
    }
}

impl Cpu for Halved {
    fn run(&self, cx: &mut CpuCx<'_>) {
        cx.out_f32(0).iter_mut().zip(cx.f32(0)).for_each(|(y, x)| *y = 2.0 * x);
    }
}

impl Cases for Halved {
    fn cases() -> Vec<Case> {
        vec![Case::new(Halved {}, [Arg::real([5])])]
    }
}

const HALVED: &[OpKind] = &[OpKind::of::<Halved>()];

#[test]
fn wrong_gradients_are_found() {
    kolo_ops::register(HALVED).unwrap();
    let executor: Arc<dyn Executor> = Arc::new(cpu::Cpu);
    let found = selftest::run(&executor, HALVED, |_| ());
    assert_eq!((found[0].failed, found[0].gradients), (1, 1), "{found:?}");
    assert!(found[0].failures[0].starts_with("gradient of case 0 halved: the rule gives "), "{found:?}");
    assert!(
        found[0].failures[0].contains(" for `x` at element 0, but differences of the definition say "),
        "{found:?}"
    );
}

const CARELESS: &[OpKind] = &[OpKind::of::<Careless>()];

#[test]
fn wrong_kernels_are_found() {
    kolo_ops::register(CARELESS).unwrap();
    let executor: Arc<dyn Executor> = Arc::new(cpu::Cpu);
    let found = selftest::run(&executor, CARELESS, |_| ());
    assert_eq!(found[0].failed, 2, "{found:?}");
    assert!(found[0].failures[0].contains("element 3"), "{found:?}");
    assert!(found[0].failures[1].contains("other bits"), "{found:?}");
}

#[test]
fn the_cpu_passes() {
    let executor: Arc<dyn Executor> = Arc::new(cpu::Cpu);
    let some = ["add", "matmul", "softmax", "layer_norm", "cast", "adam", "select"];
    let kinds: Vec<OpKind> = kolo_ops::registry().into_iter().filter(|kind| some.contains(&kind.name)).collect();
    assert_eq!(kinds.len(), some.len());
    let mut reported = 0;
    for outcome in selftest::run(&executor, &kinds, |_| reported += 1) {
        assert_eq!((outcome.failed, outcome.cases.is_empty()), (0, false), "{outcome:?}");
        let differentiated = ["add", "matmul", "softmax", "layer_norm", "select"].contains(&outcome.name);
        assert!(outcome.gradients > 0 || !differentiated, "{outcome:?}");
    }
    assert_eq!(reported, kinds.len());
}
