//! What the executor does around its kernels, on a fake driver ([`crate::fake`]).

use crate::device::CudaDevice;
use crate::error::CudaError;
use crate::executor::Cuda;
use crate::fake;
use crate::gpu::Gpu;
use kolo_exec::executor::CompileError;
use kolo_exec::schedule::Schedule;
use kolo_exec::{Device, Executor, Memory, Offload, Options, Program, Session, SessionBytes, Store};
use kolo_graph::layout::Layout;
use kolo_graph::sources::GrainSum;
use kolo_graph::{Builder, DType, Graph, Init, Type};
use kolo_ops::optim::{Adam, LambApply, LambDirection, round_weights};
use kolo_ops::prelude::*;
use std::sync::Arc;

/// The executor for GPUs on the fake one.
#[derive(Debug)]
pub(crate) struct Faked(pub Cuda, pub Arc<Gpu>);

impl Executor for Faked {
    fn name(&self) -> &'static str {
        "fake"
    }
    fn options(&self, asked: Options) -> Options {
        self.0.options(asked)
    }
    fn rewrite(&self, graph: Graph, options: Options) -> Graph {
        self.0.rewrite(graph, options)
    }
    fn layout(&self, graph: &Graph, options: Options) -> Layout {
        self.0.layout(graph, options)
    }
    fn bytes(&self, graph: &Graph, layout: &Layout, options: Options) -> SessionBytes {
        self.0.bytes(graph, layout, options)
    }
    fn stored_bytes(&self, graph: &Graph, layout: &Layout) -> [usize; 2] {
        self.0.stored_bytes(graph, layout)
    }
    fn with_offload(&self, offload: Offload) -> Option<Arc<dyn Executor>> {
        Some(Arc::new(Self(Cuda { offload, ..self.0 }, Arc::clone(&self.1))))
    }
    fn can_exchange_on_device(&self, program: &Program, schedule: &Schedule) -> bool {
        self.0.can_exchange_on_device(program, schedule)
    }
    fn allocates_on_host(&self) -> bool {
        false
    }
    fn compile(
        &self,
        program: &Program,
        schedule: &Arc<Schedule>,
        store: &Store,
        sums: Option<Memory>,
    ) -> Result<Box<dyn Device>, CompileError> {
        Ok(Box::new(CudaDevice::new(self.0, &self.1, program, schedule, store, sums)?))
    }
}

fn offloading() -> Arc<dyn Executor> {
    Arc::new(Faked(Cuda { offload: Offload::Optimizer, ..Cuda::default() }, fake::gpu()))
}

/// Weights that follow the gradients they are fed, and a half-precision copy of each.
pub(crate) fn graph() -> Graph {
    let builder = Builder::new();
    let [lr, scale] = ["lr", "scale"].map(|name| builder.step_input(name, Type::f32([])));
    let step = builder.step_number();
    for (name, shape) in [("long", vec![2500]), ("matrix", vec![3, 5])] {
        let ty = Type::f32(shape.clone());
        let param = builder.param(name, shape, Init::ONES);
        let grad = builder.input(&format!("{name}.grad"), ty.clone());
        let grad = grad.then(GrainSum { of: name.into() }, &[]);
        let [m, v] = ["m", "v"].map(|state| builder.state(&format!("optim.{name}.{state}"), ty.clone(), Init::ZEROS));
        let made = builder.apply_all(Adam::default(), &[param, grad, m, v, lr, scale, step]);
        [param, m, v].into_iter().zip(made).for_each(|(state, value)| builder.update(state, value));
        builder.output(&format!("{name}.half"), param.cast(DType::BF16));
    }
    // The second of LAMB's rules reads what the first makes.
    let ty = Type::f32([7]);
    let param = builder.param("vector", [7], Init::ONES);
    let grad = builder.input("vector.grad", ty.clone()).then(GrainSum { of: "vector".into() }, &[]);
    let [m, v] = ["m", "v"].map(|state| builder.state(&format!("optim.vector.{state}"), ty.clone(), Init::ZEROS));
    let made = builder.apply_all(LambDirection::default(), &[param, grad, m, v, scale, step]);
    let moved = builder.apply(LambApply {}, &[param, made[0], scale, step, lr]);
    [param, m, v].into_iter().zip([moved, made[1], made[2]]).for_each(|(state, value)| builder.update(state, value));
    builder.finish().unwrap()
}

/// One step with gradients that differ from step to step and from grain to grain.
fn step(session: &mut Session, store: &mut Store, number: usize) {
    step_of(session, store, number, 0);
}

/// The same on a rank's share of the grains.
pub(crate) fn step_of(session: &mut Session, store: &mut Store, number: usize, first_grain: usize) {
    let value = |at: usize, grain: usize| ((at * 37 + grain * 11 + number * 5) % 23) as f32 * 1e-3 - 0.01;
    let feed_step = |feed: &mut kolo_exec::Feed<'_>| {
        for (name, value) in [("lr", 1e-2), ("scale", 0.75), ("step", number as f32)] {
            feed.set(name, &[value]).unwrap();
        }
    };
    let feed_grain = |grain: usize, feed: &mut kolo_exec::Feed<'_>| {
        let grain = first_grain + grain;
        for (name, count) in [("long.grad", 2500), ("matrix.grad", 15), ("vector.grad", 7)] {
            let values: Vec<f32> = (0..count).map(|at| value(at, grain)).collect();
            feed.set(name, &values).unwrap();
        }
    };
    session.run(store, feed_step, feed_grain).unwrap();
}

pub(crate) fn halves(session: &Session) -> Vec<Vec<u8>> {
    ["long.half", "matrix.half"].map(|name| session.output_bytes(name).unwrap().to_vec()).to_vec()
}

pub(crate) fn states(store: &Store) -> Vec<Vec<f32>> {
    store.entries().iter().map(|entry| store.values(&entry.name).unwrap().to_vec()).collect()
}

#[test]
fn an_offloaded_optimizer_updates_as_the_cpu_does() {
    updates_as_the_cpu_does(&graph());
}

/// The host works on pieces, whose random numbers are those of the whole.
#[test]
fn offloaded_weights_are_rounded_as_the_cpu_does() {
    updates_as_the_cpu_does(&round_weights(&graph(), 5).unwrap());
}

fn updates_as_the_cpu_does(graph: &Graph) {
    let options = Options { threads: 1, lanes: 1, grains: 4, slots: 1, ways: 1 };
    let (mut own, mut other) = (Store::new(graph, 3), Store::new(graph, 3));
    let program = Program::new(&offloading(), graph.clone(), options);
    assert_eq!(program.executor.stored_bytes(&program.graph, &program.layout), [0, 0], "all of it is the host's");
    let mut offloaded = Session::compile(program, &own, None).unwrap();
    let mut cpu = Session::new(graph.clone(), &other, options);
    for number in 1..=5 {
        if number == 4 {
            // As a checkpoint that is restored.
            for store in [&mut own, &mut other] {
                store.values_mut("long").unwrap()[2000] = 7.0;
            }
        }
        step(&mut offloaded, &mut own, number);
        step(&mut cpu, &mut other, number);
        assert_eq!(halves(&offloaded), halves(&cpu), "what step {number} read of the weights");
        assert_eq!(states(&own), states(&other), "after step {number}");
    }
    assert_eq!(own.digest(), other.digest());
}

#[test]
fn a_lost_gpu_is_told_with_what_to_do() {
    for (code, name, hint) in [(719, "CUDA_ERROR_UNKNOWN", "--resume"), (46, "DEVICE_UNAVAILABLE", "nvidia-smi")] {
        let mut store = Store::new(&graph(), 3);
        let program = Program::new(&offloading(), graph(), Options::single(1));
        let mut session = Session::compile(program, &store, None).unwrap();
        step(&mut session, &mut store, 1);
        fake::fail_with(code);
        let failed = session.run(&mut store, |_| (), |_, _| ()).unwrap_err().to_string();
        fake::fail_with(0);
        assert!(failed.contains("a fake GPU") && failed.contains(&format!("({code})")), "{failed}");
        assert!(failed.contains(name) && failed.contains(hint), "{failed}");
        // It stays lost: a new session is needed.
        assert_eq!(session.run(&mut store, |_| (), |_, _| ()).unwrap_err().to_string(), failed);
    }
}

#[test]
fn a_wrong_index_names_what_there_is() {
    let error = fake::open(3).unwrap_err();
    assert_eq!(error, CudaError::NoSuchDevice { index: 3, count: 1 });
    assert!(error.to_string().contains("this machine has one, number 0"), "{error}");
}

#[test]
fn what_does_not_fit_is_refused_with_what_would_make_it_fit() {
    let builder = Builder::new();
    let [lr, scale, step] = ["lr", "scale", "step"].map(|name| builder.step_input(name, Type::f32([])));
    let ty = Type::f32([100 << 20]);
    let param = builder.param("w", [100 << 20], Init::ZEROS);
    let grad = builder.input("grad", ty.clone()).then(GrainSum { of: "w".into() }, &[]);
    let [m, v] = ["m", "v"].map(|state| builder.state(&format!("optim.w.{state}"), ty.clone(), Init::ZEROS));
    let made = builder.apply_all(Adam::default(), &[param, grad, m, v, lr, scale, step]);
    [param, m, v].into_iter().zip(made).for_each(|(state, value)| builder.update(state, value));
    let graph = builder.finish().unwrap();
    let executor: Arc<dyn Executor> = Arc::new(Faked(Cuda::default(), fake::gpu()));
    let store = Store::new(&graph, 1);
    let program = Program::new(&executor, graph, Options::single(1));
    let error = Session::compile(program, &store, None).unwrap_err().to_string();
    assert!(error.starts_with("the job needs 2.0 GiB on a fake GPU, of which 768.0 MiB are free"), "{error}");
    assert!(error.contains("weights and state 1.2 GiB") && error.contains("400.0 MiB f32[104857600]"), "{error}");
    assert!(error.contains("`[memory] offload = \"optimizer\"` leaves 1.2 GiB of it in the host's memory"), "{error}");
}
