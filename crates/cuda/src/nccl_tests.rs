//! Exchanges between GPUs over NCCL, on fake GPUs and a fake NCCL with a thread for each rank ([`crate::fake_nccl`]).

use crate::driver::DevicePointer;
use crate::executor::Cuda;
use crate::fake;
use crate::fake_nccl::{self, ABORTED};
use crate::gpu::Gpu;
use crate::memory::{self, DeviceMemory};
use crate::nccl_group::NcclLinks;
use crate::tests::{Faked, graph, halves, states, step_of};
use kolo_comm::combine::combine_tree;
use kolo_comm::{Communicator, ElementType, Fault, Reduction, Watch, thread};
use kolo_exec::{
    Collectives, DeviceGroup, DeviceLinks, Exchange, ExchangeError, ExchangeKind, Executor, FoundLinks, GroupPlace,
    LinkPreference, Offload, Options, Program, Session, Store,
};
use kolo_graph::collective::{AllReduce, Receive, Send};
use kolo_graph::{Builder, DType, Graph, Type};
use kolo_parallel::device_lane;
use kolo_parallel::{CommLane, Mesh, push_collective, sum_over_ranks};
use std::sync::Arc;
use std::sync::atomic::Ordering;

fn links(gpu: &Arc<Gpu>) -> NcclLinks {
    // Little scratch, so that parts are taken in several segments.
    NcclLinks { gpu: Arc::clone(gpu), nccl: &fake_nccl::NCCL, scratch_bytes_max: 4096 }
}

/// Runs `body` on a thread for each rank, with a communicator over threads and a GPU of its own.
fn on_ranks<T: std::marker::Send>(
    ranks: usize,
    reproducible: bool,
    body: impl Fn(Arc<Communicator>, Arc<Gpu>) -> T + Sync,
) -> Vec<T> {
    let watches: Vec<Arc<Watch>> = (0..ranks).map(|_| Watch::alone()).collect();
    let transports = thread::world(&watches);
    std::thread::scope(|scope| {
        let body = &body;
        let spawn = |(transport, watch): (_, &Arc<Watch>)| {
            let world = Arc::new(Communicator::new(transport, Arc::clone(watch), reproducible));
            scope.spawn(move || {
                let gpu = fake::gpu_of(world.rank(), ranks);
                body(world, gpu)
            })
        };
        let threads: Vec<_> = transports.into_iter().zip(&watches).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What a rank has at a place: sums of such numbers depend on their order.
fn value(rank: usize, at: usize) -> f32 {
    let x = ((rank * 7919 + at * 104_729) % 1000) as f32;
    (x - 500.0) * 10f32.powi((at % 7) as i32 - 3)
}

fn upload(gpu: &Arc<Gpu>, values: &[f32]) -> DeviceMemory {
    let memory = DeviceMemory::zeroed(gpu, values.len() * 4).unwrap();
    memory::upload(gpu, values.as_ptr().cast(), memory.at(0), values.len() * 4).unwrap();
    memory
}

fn download(gpu: &Gpu, from: DevicePointer, elements: usize) -> Vec<f32> {
    let mut values = vec![0.0f32; elements];
    memory::download(gpu, from, values.as_mut_ptr().cast(), elements * 4).unwrap();
    values
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The sum over ranks in the promised order, by the host's own code.
fn tree(ranks: usize, elements: usize) -> Vec<f32> {
    let all: Vec<Vec<f32>> = (0..ranks).map(|rank| (0..elements).map(|at| value(rank, at)).collect()).collect();
    let inputs: Vec<*const u8> = all.iter().map(|values| values.as_ptr().cast()).collect();
    let mut sum = vec![0.0f32; elements];
    // SAFETY: all have that many elements.
    unsafe { combine_tree(ElementType::F32, Reduction::Sum, &inputs, sum.as_mut_ptr().cast(), elements) };
    sum
}

fn exchange(kind: ExchangeKind, from: DevicePointer, to: DevicePointer, elements: usize) -> Exchange {
    Exchange {
        kind,
        name: "x".into(),
        axis: "data".into(),
        lane: None,
        dtype: DType::F32,
        input: from as *mut u8,
        output: to as *mut u8,
        elements,
        parts: Vec::new(),
        of_gradients: false,
    }
}

/// A group of all ranks; the first one's invitation comes over the host's links, as in a job.
fn group(world: &Communicator, links: &NcclLinks) -> Box<dyn DeviceGroup> {
    let mut id = if world.rank() == 0 { links.invite().unwrap() } else { vec![0; 128] };
    world.broadcast(&mut id, 0).unwrap();
    let watch = Arc::clone(world.watch());
    let place = GroupPlace { rank: world.rank(), size: world.size() };
    links.join(&id, place, Arc::new(move || Ok(watch.check()?))).unwrap()
}

fn run(group: &dyn DeviceGroup, exchange: &Exchange, reproducible: bool) {
    let ticket = group.prepare(exchange, reproducible).unwrap();
    group.start(ticket).unwrap();
    group.order(ticket).unwrap();
    assert!(group.is_done(ticket).unwrap());
}

/// Parts of unequal sizes, one of them empty, in the opposite order of ranks.
fn odd_parts(ranks: usize) -> Vec<(usize, usize)> {
    let mut parts = Vec::new();
    let mut at = 0;
    for rank in (0..ranks).rev() {
        let count = if rank == 1 { 0 } else { 100 + 37 * rank };
        parts.push((at, count));
        at += count;
    }
    parts.reverse();
    parts
}

#[test]
fn sums_have_the_bits_of_the_tree() {
    for (ranks, elements) in [(1, 5), (2, 3001), (3, 3001), (4, 4096), (5, 2), (7, 3333)] {
        let parts = odd_parts(ranks);
        let whole: usize = parts.iter().map(|part| part.1).sum();
        let sums = on_ranks(ranks, true, |world, gpu| {
            let group = group(&world, &links(&gpu));
            let own: Vec<f32> = (0..elements.max(whole)).map(|at| value(world.rank(), at)).collect();
            let (in_place, other) = (upload(&gpu, &own), upload(&gpu, &vec![f32::NAN; own.len()]));
            run(&*group, &exchange(ExchangeKind::AllReduce, in_place.at(0), in_place.at(0), elements), true);
            let all = download(&gpu, in_place.at(0), elements);
            let input = upload(&gpu, &own);
            let scatter = Exchange {
                parts: parts.clone(),
                ..exchange(ExchangeKind::ReduceScatter, input.at(0), other.at(0), whole)
            };
            run(&*group, &scatter, true);
            (all, download(&gpu, other.at(0), parts[world.rank()].1))
        });
        let (wanted, wanted_parts) = (tree(ranks, elements), tree(ranks, whole));
        for (rank, (all, part)) in sums.iter().enumerate() {
            assert_eq!(bits(all), bits(&wanted), "all_reduce, rank {rank} of {ranks}");
            let (offset, count) = parts[rank];
            assert_eq!(
                bits(part),
                bits(&wanted_parts[offset..offset + count]),
                "reduce_scatter, rank {rank} of {ranks}"
            );
        }
    }
}

#[test]
fn without_the_promise_sums_are_those_of_nccl() {
    let (ranks, elements) = (4, 1000);
    let sums = on_ranks(ranks, false, |world, gpu| {
        let group = group(&world, &links(&gpu));
        let own: Vec<f32> = (0..elements).map(|at| value(world.rank(), at)).collect();
        let (memory, input, part) = (upload(&gpu, &own), upload(&gpu, &own), upload(&gpu, &own));
        run(&*group, &exchange(ExchangeKind::AllReduce, memory.at(0), memory.at(0), elements), false);
        let mut scatter = exchange(ExchangeKind::ReduceScatter, input.at(0), part.at(0), elements);
        scatter.parts = (0..ranks).map(|rank| (rank * 250, 250)).collect();
        run(&*group, &scatter, false);
        (download(&gpu, memory.at(0), elements), download(&gpu, part.at(0), 250))
    });
    let wanted = tree(ranks, elements);
    let differs = sums[0].0.iter().zip(&wanted).filter(|(one, other)| one.to_bits() != other.to_bits()).count();
    assert!(differs > 0, "the fake library adds in another order");
    for (rank, (all, part)) in sums.iter().enumerate() {
        assert_eq!(bits(all), bits(&sums[0].0), "rank {rank}");
        assert_eq!(bits(part), bits(&all[rank * 250..(rank + 1) * 250]), "rank {rank}");
        let close = |(one, other): (&f32, &f32)| (one - other).abs() <= 1e-5 * other.abs().max(1e3);
        assert!(all.iter().zip(&wanted).all(close), "rank {rank}");
    }
}

#[test]
fn parts_and_messages_arrive_where_they_belong() {
    for ranks in [1, 2, 3, 5] {
        let parts = odd_parts(ranks);
        let whole: usize = parts.iter().map(|part| part.1).sum();
        on_ranks(ranks, true, |world, gpu| {
            let (rank, group) = (world.rank(), group(&world, &links(&gpu)));
            // Unequal parts, gathered.
            let own: Vec<f32> = (0..parts[rank].1).map(|at| value(rank, at)).collect();
            let (input, output) = (upload(&gpu, &own), upload(&gpu, &vec![f32::NAN; whole]));
            let gather = exchange(ExchangeKind::AllGather, input.at(0), output.at(0), whole);
            run(&*group, &Exchange { parts: parts.clone(), ..gather }, true);
            let found = download(&gpu, output.at(0), whole);
            for (other, (offset, count)) in parts.iter().enumerate() {
                let wanted: Vec<f32> = (0..*count).map(|at| value(other, at)).collect();
                assert_eq!(bits(&found[*offset..offset + count]), bits(&wanted), "all_gather, {rank} of {ranks}");
            }
            // Equal parts in place, by NCCL's own call.
            let mut all = vec![f32::NAN; 8 * ranks];
            (0..8).for_each(|at| all[8 * rank + at] = value(rank, at));
            let memory = upload(&gpu, &all);
            let mut gather = exchange(ExchangeKind::AllGather, memory.at(0), memory.at(0), 8 * ranks);
            gather.parts = (0..ranks).map(|rank| (8 * rank, 8)).collect();
            run(&*group, &gather, true);
            let wanted: Vec<f32> = (0..ranks).flat_map(|rank| (0..8).map(move |at| value(rank, at))).collect();
            assert_eq!(bits(&download(&gpu, memory.at(0), 8 * ranks)), bits(&wanted), "in place, {rank} of {ranks}");
            // To each its part.
            let sent: Vec<f32> = (0..8 * ranks).map(|at| value(rank, at)).collect();
            let (input, output) = (upload(&gpu, &sent), upload(&gpu, &vec![f32::NAN; 8 * ranks]));
            let mut each = exchange(ExchangeKind::AllToAll, input.at(0), output.at(0), 8 * ranks);
            each.parts = gather.parts.clone();
            run(&*group, &each, true);
            let wanted: Vec<f32> =
                (0..ranks).flat_map(|from| (0..8).map(move |at| value(from, 8 * rank + at))).collect();
            assert_eq!(bits(&download(&gpu, output.at(0), 8 * ranks)), bits(&wanted), "all_to_all, {rank} of {ranks}");
            run(&*group, &exchange(ExchangeKind::Shift(1 % ranks), input.at(0), output.at(0), 8 * ranks), true);
            let before = (rank + ranks - 1) % ranks;
            let wanted: Vec<f32> = (0..8 * ranks).map(|at| value(before, at)).collect();
            assert_eq!(bits(&download(&gpu, output.at(0), 8 * ranks)), bits(&wanted), "shift, {rank} of {ranks}");
            run(&*group, &exchange(ExchangeKind::Barrier, input.at(0), output.at(0), 0), true);
            if ranks > 1 {
                let (first, last) = (rank == 0, rank == ranks - 1);
                let send = exchange(ExchangeKind::Send(ranks - 1), input.at(0), input.at(0), 5);
                let receive = exchange(ExchangeKind::Receive(0), output.at(0), output.at(0), 5);
                first.then(|| run(&*group, &send, true));
                last.then(|| run(&*group, &receive, true));
                let wanted: Vec<f32> = (0..5).map(|at| value(0, at)).collect();
                assert!(!last || bits(&download(&gpu, output.at(0), 5)) == bits(&wanted), "a message of {ranks}");
            }
        });
    }
}

fn faked(gpu: &Arc<Gpu>, offload: Offload) -> Arc<dyn Executor> {
    Arc::new(Faked(Cuda { offload, ..Cuda::default() }, Arc::clone(gpu)))
}

fn lane(world: &Arc<Communicator>, gpu: &Arc<Gpu>, preference: LinkPreference) -> Result<Arc<dyn Collectives>, Fault> {
    let mesh = Mesh::data(world.size(), world.rank()).unwrap();
    let found: FoundLinks = Ok(Arc::new(links(gpu)));
    device_lane::lane(&mesh, world, (preference != LinkPreference::Never).then_some((preference, found)))
}

/// Five steps of a rank's share of eight grains.
fn train(world: &Arc<Communicator>, gpu: &Arc<Gpu>, preference: LinkPreference) -> (Vec<Vec<f32>>, Vec<Vec<u8>>) {
    let ranks = world.size();
    let options = Options { threads: 1, lanes: 1, grains: 8 / ranks, slots: 1, ways: 1 };
    let graph = sum_over_ranks(&graph(), 1000);
    let mut store = Store::new(&graph, 3);
    let program = Program::new(&faked(gpu, Offload::Optimizer), graph, options);
    let mut session = Session::compile(program, &store, Some(lane(world, gpu, preference).unwrap())).unwrap();
    assert_eq!(session.device_transport(), (preference != LinkPreference::Never).then_some("nccl"));
    for number in 1..=5 {
        step_of(&mut session, &mut store, number, world.rank() * options.grains);
    }
    (states(&store), halves(&session))
}

#[test]
fn any_number_of_gpus_gives_the_bits_of_one() {
    let options = Options { threads: 1, lanes: 1, grains: 8, slots: 1, ways: 1 };
    let mut store = Store::new(&graph(), 3);
    let alone = faked(&fake::gpu(), Offload::Optimizer);
    let mut session = Session::compile(Program::new(&alone, graph(), options), &store, None).unwrap();
    (1..=5).for_each(|number| step_of(&mut session, &mut store, number, 0));
    let wanted = (states(&store), halves(&session));
    for ranks in [1, 2, 4, 8] {
        for preference in [LinkPreference::Always, LinkPreference::Auto, LinkPreference::Never] {
            for (rank, found) in on_ranks(ranks, true, |world, gpu| train(&world, &gpu, preference)).iter().enumerate()
            {
                assert_eq!(*found, wanted, "rank {rank} of {ranks}, {preference:?}");
            }
        }
    }
}

/// Tensors that are exchanged along other dims than their first, and so do not lie as they travel.
fn tensors(ranks: usize) -> Graph {
    let builder = Builder::new();
    let x = builder.input("x", Type::f32([2, 3 * ranks, 4]));
    builder.output("gathered", x.axis_gather("data", 1, ranks));
    builder.output("summed", x.axis_sum("data", ranks));
    builder.output("scattered", x.axis_scatter("data", 1, ranks));
    builder.output("turned", x.all_to_all("data", 1, 0, ranks));
    builder.output("shifted", x.axis_shift("data", 1, ranks));
    builder.finish().unwrap()
}

fn outputs(session: &mut Session, store: &mut Store, rank: usize) -> Vec<Vec<u32>> {
    for _ in 0..2 {
        let feed = |_: usize, feed: &mut kolo_exec::Feed<'_>| {
            let count = feed.names().map(|(_, ty)| ty.elements()).next().unwrap();
            let values: Vec<f32> = (0..count).map(|at| value(rank, at)).collect();
            feed.set("x", &values).unwrap();
        };
        session.run(store, |_| (), feed).unwrap();
    }
    ["gathered", "summed", "scattered", "turned", "shifted"].map(|name| bits(session.output(name).unwrap())).to_vec()
}

#[test]
fn tensors_travel_as_on_the_cpu() {
    for ranks in [2, 4] {
        on_ranks(ranks, true, |world, gpu| {
            let (graph, rank) = (tensors(ranks), world.rank());
            let mut store = Store::new(&graph, 1);
            let program = Program::new(&faked(&gpu, Offload::None), graph.clone(), Options::single(1));
            let lane = lane(&world, &gpu, LinkPreference::Always).unwrap();
            let mut own = Session::compile(program, &store, Some(lane)).unwrap();
            assert_eq!(own.device_transport(), Some("nccl"));
            let found = outputs(&mut own, &mut store, rank);
            drop(own);
            let mut store = Store::new(&graph, 1);
            let host = Arc::new(CommLane::new(Arc::clone(&world)));
            let mut cpu = Session::with_collectives(graph, &store, Options::single(1), host).unwrap();
            assert_eq!(found, outputs(&mut cpu, &mut store, rank), "rank {rank} of {ranks}");
        });
    }
}

/// Rank 0 sends to rank 1, which sends back.
#[test]
fn messages_go_from_gpu_to_gpu() {
    on_ranks(2, true, |world, gpu| {
        let builder = Builder::new();
        let ty = Type::f32([3, 5]);
        let x = builder.input("x", ty.clone());
        let other = 1 - world.rank();
        let receive = |from| Receive {
            axis: "data".into(),
            from,
            dtype: DType::F32,
            shape: vec![3, 5],
            per_step: false,
            message: "x".into(),
        };
        let send =
            |x: kolo_graph::Tensor<'_>| _ = x.then(Send { axis: "data".into(), to: other, message: "x".into() }, &[]);
        match world.rank() {
            0 => {
                send(x);
                builder.output("y", builder.apply(receive(1), &[]));
            }
            _ => {
                builder.output("y", builder.apply(receive(0), &[]));
                send(x);
            }
        }
        let graph = builder.finish().unwrap();
        let mut store = Store::new(&graph, 1);
        let program = Program::new(&faked(&gpu, Offload::None), graph, Options::single(1));
        let lane = lane(&world, &gpu, LinkPreference::Always).unwrap();
        let mut session = Session::compile(program, &store, Some(lane)).unwrap();
        let values = |rank: usize| (0..15).map(|at| value(rank, at)).collect::<Vec<f32>>();
        let feed = |_: usize, feed: &mut kolo_exec::Feed<'_>| feed.set("x", &values(world.rank())).unwrap();
        session.run(&mut store, |_| (), feed).unwrap();
        assert_eq!(bits(session.output("y").unwrap()), bits(&values(other)));
    });
}

#[test]
fn two_ranks_on_one_gpu_go_through_the_host_or_are_told() {
    let outcomes = on_ranks(2, true, |world, _| {
        let gpu = fake::gpu_of(0, 2);
        let refused = lane(&world, &gpu, LinkPreference::Always).unwrap_err().to_string();
        (refused, lane(&world, &gpu, LinkPreference::Auto).unwrap().device_transport())
    });
    for (refused, transport) in outcomes {
        assert!(refused.starts_with("--transport nccl: rank 0 and rank 1 are on the same GPU"), "{refused}");
        assert!(refused.contains("hint: start as many workers as there are GPUs"), "{refused}");
        assert_eq!(transport, None);
    }
}

#[test]
fn a_missing_library_is_told_to_all() {
    let outcomes = on_ranks(2, true, |world, gpu| {
        let mesh = Mesh::data(2, world.rank()).unwrap();
        let found = || -> FoundLinks {
            match world.rank() {
                0 => Ok(Arc::new(links(&gpu))),
                _ => Err("NCCL (libnccl) is needed for this, but cannot be loaded".into()),
            }
        };
        let refused =
            device_lane::lane(&mesh, &world, Some((LinkPreference::Always, found()))).unwrap_err().to_string();
        let auto = device_lane::lane(&mesh, &world, Some((LinkPreference::Auto, found()))).unwrap();
        let none = device_lane::lane(&mesh, &world, None).unwrap();
        (refused, auto.device_transport(), none.device_transport())
    });
    for (refused, auto, none) in outcomes {
        assert!(refused.starts_with("--transport nccl: rank 1: NCCL (libnccl) is needed"), "{refused}");
        assert_eq!((auto, none), (None, None));
    }
}

/// Sums of unequal lengths: over NCCL the ranks would wait for ever, or read nonsense.
#[test]
fn ranks_that_disagree_are_told_before_anything_moves() {
    let messages = on_ranks(2, true, |world, gpu| {
        let builder = Builder::new();
        let x = builder.input("x", Type::f32([3 + world.rank()]));
        builder.output("y", x.axis_sum("data", 2));
        let graph = builder.finish().unwrap();
        let store = Store::new(&graph, 1);
        let program = Program::new(&faked(&gpu, Offload::None), graph, Options::single(1));
        let lane = lane(&world, &gpu, LinkPreference::Always).unwrap();
        Session::compile(program, &store, Some(lane)).unwrap_err().to_string()
    });
    for message in &messages {
        assert_eq!(message, &messages[0]);
        assert!(
            message.contains("rank 0 has all_reduce of 3 f32") && message.contains("rank 1 has all_reduce of 4 f32")
        );
    }
}

/// Rank 1 is lost while rank 0 waits for it.
#[test]
fn a_lost_rank_ends_the_wait_and_is_named() {
    let before = ABORTED.load(Ordering::Relaxed);
    let outcomes = on_ranks(2, true, |world, gpu| -> Result<(), ExchangeError> {
        let graph = sum_over_ranks(&graph(), 1000);
        let mut store = Store::new(&graph, 3);
        let program = Program::new(&faked(&gpu, Offload::Optimizer), graph, Options::single(1));
        let lane = lane(&world, &gpu, LinkPreference::Always).unwrap();
        let mut session = Session::compile(program, &store, Some(lane)).unwrap();
        if world.rank() == 1 {
            return Ok(());
        }
        let watch = Arc::clone(world.watch());
        std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(50));
            let (during, why) = ("step 1".into(), "its process was killed".into());
            watch.abort(Fault::Lost { peer: 1, host: "node7".into(), during, why });
        });
        session.run(&mut store, |_| (), |_, _| ())
    });
    let error = outcomes[0].as_ref().unwrap_err();
    assert_eq!(error.downcast_ref::<Fault>().and_then(Fault::culprit), Some(1), "{error}");
    assert!(error.to_string().contains("rank 1 on node7 was lost during step 1"), "{error}");
    assert!(ABORTED.load(Ordering::Relaxed) > before, "the communicator was given up");
}

/// With its weights in the host's memory, a sharded optimizer exchanges them there.
#[test]
fn what_the_host_holds_is_exchanged_there() {
    on_ranks(2, true, |world, gpu| {
        let builder = Builder::new();
        let w = builder.param("w", [4], kolo_graph::Init::ONES);
        builder.output("w", w);
        let mut graph = builder.finish().unwrap();
        let id = graph.params().next().unwrap().0;
        let made = push_collective(&mut graph, AllReduce { axis: "data".into() }, vec![id], "w");
        graph.outputs.push(("sum".into(), made[0]));
        let schedule = |offload| {
            let program = Program::new(&faked(&gpu, offload), graph.clone(), Options::single(1));
            let schedule = kolo_exec::schedule::Schedule::new(&program.graph, &program.layout, false);
            assert_eq!(schedule.exchanges.len(), 1);
            program.executor.can_exchange_on_device(&program, &schedule)
        };
        assert!(schedule(Offload::None) && !schedule(Offload::Optimizer));
        world.barrier().unwrap();
    });
}
