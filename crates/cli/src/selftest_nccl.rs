//! `kolo selftest --nccl`: exchanges over NCCL in a group of one GPU, which is all that a machine with one can try.
//!
//! First the exchanges alone; then whole sessions whose graphs have collectives in them, run through the same lane as among several ranks,
//! against sessions without.

use crate::device::DeviceArg;
use crate::fail::Failure;
use crate::output::println;
use kolo_comm::{Communicator, Watch, thread};
use kolo_cuda::{Cuda, NcclCheck};
use kolo_exec::{Collectives, ExchangeError, Executor, Feed, LinkPreference, Options, Program, Session, Store};
use kolo_graph::sources::GrainSum;
use kolo_graph::{Builder, DType, Graph, Init, Type};
use kolo_ops::optim::Adam;
use kolo_ops::prelude::*;
use kolo_parallel::mesh::DATA;
use kolo_parallel::{Mesh, device_lane, sum_over_ranks};
use std::sync::Arc;

const ELEMENTS: usize = 300_007;
const STEPS: usize = 5;
const GRAINS: usize = 4;
/// Small, so that there are several exchanges.
const BUCKET_BYTES: usize = 64 << 10;

pub fn selftest(device: DeviceArg) -> Result<(), Failure> {
    let index = device.index().unwrap_or(0);
    let mut checks = kolo_cuda::check_nccl(index).map_err(|error| Failure::device(&error))?;
    let executor: Arc<dyn Executor> = Arc::new(Cuda { index, links: LinkPreference::Always, ..Cuda::default() });
    for (what, graph) in [("tensors that are exchanged", tensors()), ("steps of an optimizer", steps())] {
        let outcome = compare(&executor, graph).map_err(|error| error.to_string());
        checks.push(NcclCheck { what: format!("session: {what}, as without collectives"), outcome });
    }
    for NcclCheck { what, outcome } in &checks {
        match outcome {
            Ok(()) => println!("{what:<62} ok"),
            Err(error) => println!("{what:<62} FAILED: {error}"),
        }
    }
    match checks.iter().filter(|check| check.outcome.is_err()).count() {
        0 => Ok(()),
        bad => Err(Failure::job(
            format!("{bad} of {} checks of NCCL failed", checks.len()),
            "report it with the output of `kolo devices`",
        )),
    }
}

/// One of each kind of exchange.
fn tensors() -> Graph {
    let builder = Builder::new();
    let x = builder.input("g", Type::f32([ELEMENTS]));
    builder.output("gathered", x.axis_gather(DATA, 0, 1));
    builder.output("summed", x.axis_sum(DATA, 1));
    builder.output("scattered", x.axis_scatter(DATA, 0, 1));
    builder.output("turned", x.all_to_all(DATA, 0, 0, 1));
    builder.output("halves", x.cast(DType::BF16).axis_sum(DATA, 1));
    builder.finish().expect("a graph of known shapes")
}

/// Weights that follow sums over grains, and those over ranks.
fn steps() -> Graph {
    let builder = Builder::new();
    let [lr, scale, step] = ["lr", "scale", "step"].map(|name| builder.step_input(name, Type::f32([])));
    let g = builder.input("g", Type::f32([ELEMENTS]));
    for name in ["first", "second"] {
        let ty = Type::f32([ELEMENTS]);
        let param = builder.param(name, [ELEMENTS], Init::ONES);
        let grad = g.mul(param).then(GrainSum { of: name.into() }, &[]);
        let [m, v] = ["m", "v"].map(|state| builder.state(&format!("optim.{name}.{state}"), ty.clone(), Init::ZEROS));
        let made = builder.apply_all(Adam::default(), &[param, grad, m, v, lr, scale, step]);
        [param, m, v].into_iter().zip(made).for_each(|(state, value)| builder.update(state, value));
        builder.output(name, param.cast(DType::BF16));
    }
    let graph = builder.finish().expect("a graph of known shapes");
    sum_over_ranks(&graph, BUCKET_BYTES)
}

/// A session over NCCL against one alone: outputs and weights, bit by bit.
fn compare(executor: &Arc<dyn Executor>, graph: Graph) -> Result<(), ExchangeError> {
    let watches = [Watch::alone()];
    let transport = thread::world(&watches).pop().ok_or("a world of threads has its ranks")?;
    let world = Arc::new(Communicator::new(transport, Arc::clone(&watches[0]), true));
    let lane = device_lane::lane(&Mesh::alone(), &world, executor.links())?;
    let alone = run(executor, graph.clone(), None)?;
    let linked = run(executor, graph, Some(lane))?;
    match alone == linked {
        true => Ok(()),
        false => Err("the results differ".into()),
    }
}

/// What some steps come to.
fn run(
    executor: &Arc<dyn Executor>,
    graph: Graph,
    lane: Option<Arc<dyn Collectives>>,
) -> Result<(Vec<Vec<u8>>, String), ExchangeError> {
    let mut store = Store::new(&graph, 1);
    let linked = lane.is_some();
    let grains = if graph.updates.is_empty() { 1 } else { GRAINS };
    let options = Options { threads: 1, lanes: 1, grains, slots: 1, ways: 1 };
    let has_rate = graph.inputs().any(|(_, input)| input.name == "lr");
    let mut session = Session::compile(Program::new(executor, graph, options), &store, lane)?;
    if linked && session.device_transport() != Some("nccl") {
        return Err("the session does not exchange over NCCL".into());
    }
    for number in 1..=STEPS {
        let feed_step = |feed: &mut Feed<'_>| {
            let values = [("lr", 1e-2), ("scale", 0.75), ("step", number as f32)];
            for (name, value) in values.iter().filter(|_| has_rate) {
                feed.set(name, &[*value]).expect("an input of the graph");
            }
        };
        let feed_grain = |grain: usize, feed: &mut Feed<'_>| {
            let value = |at: usize| ((at * 37 + grain * 11 + number * 5) % 101) as f32 * 1e-3 - 0.05;
            feed.set("g", &(0..ELEMENTS).map(value).collect::<Vec<f32>>()).expect("an input of the graph");
        };
        session.run(&mut store, feed_step, feed_grain)?;
    }
    let outputs = session.tensors().map(|(_, view)| view.bytes().to_vec()).collect();
    drop(session);
    Ok((outputs, store.digest()))
}
