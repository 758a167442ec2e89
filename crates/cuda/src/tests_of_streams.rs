//! Weights that come from the host while they are used, on a fake driver whose streams run apart ([`crate::fake_streams`]).

use crate::executor::Cuda;
use crate::fake;
use crate::fake_streams::{Pace, set_pace};
use crate::gpu::Gpu;
use crate::tests::{Faked, states};
use kolo_exec::{Executor, Feed, Offload, Options, Program, Session, Store};
use kolo_graph::fetch::Fetch;
use kolo_graph::piece::{Join, Piece};
use kolo_graph::share::EachGrain;
use kolo_graph::sources::GrainSum;
use kolo_graph::{Builder, DType, Graph, Init, NodeId, Tensor, Type};
use kolo_ops::optim::Adam;
use kolo_ops::prelude::*;
use std::sync::Arc;

const LAYERS: usize = 8;
const ELEMENTS: usize = 300;
const OPTIONS: Options = Options { threads: 1, lanes: 1, grains: 4, slots: 1, ways: 1 };

/// A piece of each: the only op but copies that needs no kernel.
fn joined<'b>(parts: &[Tensor<'b>]) -> Tensor<'b> {
    let len = ELEMENTS / parts.len();
    let piece = |(at, part): (usize, &Tensor<'b>)| part.then(Piece { start: at * len, len }, &[]);
    let pieces: Vec<Tensor<'b>> = parts.iter().enumerate().map(piece).collect();
    pieces[0].then(Join { shape: vec![ELEMENTS] }, &pieces[1..])
}

/// Layers whose weights are read on the way forward and, in the other order, on the way back: a gradient is made of both and of what the
/// grain is fed. Of the first ones half-precision copies are read too. One is small, and one is a sum's term: these stay.
fn graph() -> Graph {
    let builder = Builder::new();
    let [lr, scale, step] = ["lr", "scale", "step"].map(|name| builder.step_input(name, Type::f32([])));
    let fed = builder.input("fed", Type::f32([ELEMENTS]));
    let params: Vec<Tensor<'_>> = (0..LAYERS)
        .map(|at| builder.param(&format!("h.{at}.weight"), [ELEMENTS], Init::Normal { deviation: 0.1 }))
        .collect();
    let summed = builder.param("summed", [ELEMENTS], Init::ONES);
    builder.output("summed", summed.then(EachGrain {}, &[]).then(GrainSum { of: String::new() }, &[]));
    let small = builder.param("small", [3], Init::ONES);
    builder.output("small", small.then(EachGrain {}, &[]).then(Join { shape: vec![3] }, &[]));
    for (at, param) in params.iter().enumerate().take(2) {
        let half = param.cast(DType::BF16).then(EachGrain {}, &[]);
        let copy = Fetch { number: 1000 + at, after_grains: false };
        builder.output(&format!("half.{at}"), half.then(copy, &[]));
    }
    let forward: Vec<Tensor<'_>> = params.iter().map(|param| joined(&[param.then(EachGrain {}, &[]), fed])).collect();
    let mut grads = Vec::new();
    for (param, forward) in params.iter().zip(&forward).rev() {
        grads.push(joined(&[*forward, param.then(EachGrain {}, &[]), fed]));
    }
    for (at, (param, grad)) in params.iter().zip(grads.iter().rev()).enumerate() {
        let name = format!("h.{at}.weight");
        let grad = grad.then(GrainSum { of: name.clone() }, &[]);
        let state = |state: &str| builder.state(&format!("optim.{name}.{state}"), Type::f32([ELEMENTS]), Init::ZEROS);
        let (m, v) = (state("m"), state("v"));
        let made = builder.apply_all(Adam::default(), &[*param, grad, m, v, lr, scale, step]);
        [*param, m, v].into_iter().zip(made).for_each(|(state, value)| builder.update(state, value));
    }
    builder.finish().unwrap()
}

fn step(session: &mut Session, store: &mut Store, number: usize) {
    let value = |at: usize, grain: usize| ((at * 37 + grain * 11 + number * 5) % 23) as f32 * 1e-3 - 0.01;
    let feed_step = |feed: &mut Feed<'_>| {
        for (name, value) in [("lr", 1e-2), ("scale", 0.75), ("step", number as f32)] {
            feed.set(name, &[value]).unwrap();
        }
    };
    let feed_grain = |grain: usize, feed: &mut Feed<'_>| {
        let values: Vec<f32> = (0..ELEMENTS).map(|at| value(at, grain)).collect();
        feed.set("fed", &values).unwrap();
    };
    session.run(store, feed_step, feed_grain).unwrap();
}

fn outputs(session: &Session) -> Vec<Vec<u8>> {
    ["small", "summed", "half.0", "half.1"].map(|name| session.output_bytes(name).unwrap().to_vec()).to_vec()
}

fn executor(gpu: &Arc<Gpu>, offload: Offload) -> Arc<dyn Executor> {
    Arc::new(Faked(Cuda { offload, ..Cuda::default() }, Arc::clone(gpu)))
}

fn fetches(graph: &Graph) -> Vec<NodeId> {
    graph.ids().filter(|id| graph.node(*id).op.downcast::<Fetch>().is_some_and(|fetch| fetch.number < 1000)).collect()
}

#[test]
fn streamed_weights_give_the_bits_of_the_cpu_however_the_streams_run() {
    let gpu = fake::gpu();
    for pace in [Pace::AtOnce, Pace::Late, Pace::LateOn(gpu.compute.handle as usize)] {
        set_pace(pace);
        let (mut own, mut other) = (Store::new(&graph(), 3), Store::new(&graph(), 3));
        let mut streamed =
            Session::compile(Program::new(&executor(&gpu, Offload::Weights), graph(), OPTIONS), &own, None).unwrap();
        let mut cpu = Session::new(graph(), &other, OPTIONS);
        for number in 1..=5 {
            if number == 4 {
                // As a checkpoint that is restored.
                for store in [&mut own, &mut other] {
                    store.values_mut("h.1.weight").unwrap().fill(0.25);
                }
            }
            step(&mut streamed, &mut own, number);
            step(&mut cpu, &mut other, number);
            assert!(outputs(&streamed) == outputs(&cpu), "what step {number} read of the weights, {pace:?}");
            assert!(states(&own) == states(&other), "after step {number}, {pace:?}");
        }
        assert_eq!(own.digest(), other.digest());
        drop(streamed);
        set_pace(Pace::AtOnce);
    }
}

/// On the device there is what is small, and of the rest a window.
#[test]
fn streamed_weights_take_a_window_of_the_devices_memory() {
    let gpu = fake::gpu();
    let [kept, streamed] = [Offload::Optimizer, Offload::Weights].map(|offload| {
        let program = Program::new(&executor(&gpu, offload), graph(), OPTIONS);
        let stored = program.executor.stored_bytes(&program.graph, &program.layout);
        (program, stored)
    });
    assert_eq!((kept.1, streamed.1), ([(LAYERS + 1) * 1216 + 64, 0], [1216 + 64, 0]));
    let more = streamed.0.layout.grain_bytes - kept.0.layout.grain_bytes;
    // What is read, what is read again soon, and what comes next.
    assert!((1..=5 * 1216).contains(&more), "{more} bytes more");
    assert_eq!(streamed.0.layout.host_bytes, 2 * 640, "half-precision copies are the host's");
    assert_eq!(kept.0.layout.host_bytes, 0);
}

/// Each weight comes once on the way forward and once on the way back, but the last ones, which stay in between; and before the weight that
/// is read before it is read.
#[test]
fn weights_are_fetched_ahead_of_their_use() {
    let program = Program::new(&executor(&fake::gpu(), Offload::Weights), graph(), OPTIONS);
    let graph = &program.graph;
    let named = |id: NodeId| {
        let from = kolo_graph::layout::shown_by(graph, graph.node(id).inputs[0]);
        graph.maker(from).op.signature()
    };
    let halves = fetches(graph).into_iter().filter(|id| graph.ty(graph.node(*id).outputs[0]).dtype == DType::BF16);
    assert_eq!(halves.count(), 2);
    let whole = fetches(graph).into_iter().filter(|id| graph.ty(graph.node(*id).outputs[0]).dtype == DType::F32);
    let whole: Vec<NodeId> = whole.collect();
    let times = |at: usize| whole.iter().filter(|id| named(**id).contains(&format!("h.{at}."))).count();
    let times: Vec<usize> = (0..LAYERS).map(times).collect();
    assert_eq!(times, [2, 2, 2, 2, 2, 1, 1, 1]);
    let readers = graph.readers();
    let first_reader = |id: NodeId| {
        let mut value = graph.node(id).outputs[0];
        loop {
            let reader = readers[value.0 as usize][0];
            if !graph.node(reader).op.view() {
                return reader;
            }
            value = graph.node(reader).outputs[0];
        }
    };
    // Two others lie between a copy's start and its first reader.
    for pair in whole.windows(3).skip(3) {
        assert!(pair[2] < first_reader(pair[0]), "{pair:?}");
    }
}
