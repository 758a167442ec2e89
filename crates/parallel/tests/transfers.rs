//! Collectives in the middle of a graph, on real communicators between threads: in a grain's forward pass with their gradient,
//! along one axis of several, with lanes, in every element type.

use kolo_comm::{Communicator, Watch, thread};
use kolo_exec::{Feed, Options, Session, Store};
use kolo_graph::collective::{AxisGather, AxisScatter, Receive, Send};
use kolo_graph::sources::{GrainSum, Init};
use kolo_graph::{Builder, DType, Graph, Tensor, Type};
use kolo_ops::optim::SgdPlain;
use kolo_ops::prelude::*;
use kolo_parallel::partition::{Group, Rules, lower, plan};
use kolo_parallel::{CommLane, Mesh};
use std::sync::Arc;

/// Runs `body` on a thread for every rank.
fn on_ranks<T: std::marker::Send>(size: usize, body: impl Fn(Arc<Communicator>) -> T + Sync) -> Vec<T> {
    let watches: Vec<Arc<Watch>> = (0..size).map(|_| Watch::alone()).collect();
    let transports = thread::world(&watches);
    std::thread::scope(|scope| {
        let body = &body;
        let spawn = |(transport, watch): (_, &Arc<Watch>)| {
            let world = Communicator::new(transport, Arc::clone(watch), true);
            scope.spawn(move || body(Arc::new(world)))
        };
        let threads: Vec<_> = transports.into_iter().zip(&watches).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

const ROWS: usize = 3;
const INNER: usize = 8;
const COLUMNS: usize = 5;
const GRAINS: usize = 4;

fn x_at(grain: usize, row: usize, inner: usize) -> f32 {
    ((grain * 31 + row * 7 + inner * 3) % 13) as f32 / 8.0 - 0.75
}

fn w_at(inner: usize, column: usize) -> f32 {
    ((inner * 5 + column * 11) % 17) as f32 / 16.0 - 0.5
}

/// A step on `tanh(x w)²` whose inner axis is cut into `ranks` parts: each rank multiplies its part, and the sum over the
/// axis is the product. Every rank has the whole loss; its share of the sum of all ranks' losses is one part of it.
fn step_graph(ranks: usize) -> Graph {
    let builder = Builder::new();
    let part = INNER / ranks;
    let x = builder.input("x", Type::f32([ROWS, part]));
    let w = builder.param("w", [part, COLUMNS], Init::ZEROS);
    let product = x.matmul(w);
    let product = if ranks == 1 { product } else { product.axis_sum("tensor", ranks) };
    let y = product.tanh();
    let loss = y.mul(y).sum_all().scale(1.0 / ranks as f32);
    let grads = kolo_ops::gradients(&builder, loss, 1.0, &[w]);
    let sum = grads[0].unwrap().then(GrainSum { of: "w".into() }, &[]);
    builder.output("loss", loss.then(GrainSum { of: String::new() }, &[]));
    let (rate, scale) = (builder.scalar(0.05), builder.scalar(1.0));
    builder.update(w, w.then(SgdPlain { weight_decay: 0.0 }, &[sum, rate, scale]));
    builder.finish().unwrap()
}

/// Three steps; the losses, and the rank's part of the weights.
fn train(ranks: usize, rank: usize, lanes: usize, world: Option<Arc<Communicator>>) -> (Vec<f32>, Vec<f32>) {
    let graph = step_graph(ranks);
    let part = INNER / ranks;
    let mut store = Store::new(&graph, 0);
    let w = store.values_mut("w").unwrap();
    w.iter_mut().enumerate().for_each(|(at, w)| *w = w_at(rank * part + at / COLUMNS, at % COLUMNS));
    let options = Options { threads: lanes, lanes, grains: GRAINS, slots: 1, ways: 1 };
    let mut session = match world {
        Some(world) => {
            let mesh = Mesh::new(&[("tensor", ranks)], rank).unwrap();
            Session::with_collectives(graph, &store, options, Arc::new(CommLane::on_mesh(world, mesh))).unwrap()
        }
        None => Session::new(graph, &store, options),
    };
    let feed = |grain: usize, feed: &mut Feed<'_>| {
        let x = feed.f32("x").unwrap();
        x.iter_mut().enumerate().for_each(|(at, x)| *x = x_at(grain, at / part, rank * part + at % part));
    };
    let mut losses = Vec::new();
    for _ in 0..3 {
        session.run(&mut store, |_| {}, feed).unwrap();
        losses.push(session.output("loss").unwrap()[0] * ranks as f32);
    }
    (losses, store.values("w").unwrap().to_vec())
}

#[test]
fn a_sum_over_ranks_inside_a_grain_has_its_gradient() {
    let (losses, weights) = train(1, 0, 1, None);
    assert!(losses[2] < losses[0], "{losses:?}");
    for ranks in [2, 4] {
        let by_lanes = [1, 2, 4].map(|lanes| {
            let parts = on_ranks(ranks, |world| train(ranks, world.rank(), lanes, Some(world)));
            for (other, _) in &parts {
                assert_eq!(parts[0].0, *other, "all ranks have the same loss");
                let close = other.iter().zip(&losses).all(|(a, b)| (a - b).abs() < 1e-5 * b.abs());
                assert!(close, "{ranks} ranks: {other:?}, alone {losses:?}");
            }
            let together: Vec<f32> = parts.into_iter().flat_map(|(_, part)| part).collect();
            for (at, (got, wanted)) in together.iter().zip(&weights).enumerate() {
                assert!((got - wanted).abs() < 1e-5, "{ranks} ranks: weight {at} is {got}, alone {wanted}");
            }
            together
        });
        assert_eq!(by_lanes[0], by_lanes[1], "lanes do not matter");
        assert_eq!(by_lanes[0], by_lanes[2], "lanes do not matter");
    }
}

/// Runs a graph of one input `x` and one output `y` on every rank of a mesh of 2 × 2 and gives the outputs' values.
fn on_mesh(
    make: impl Fn(Tensor<'_>) -> Tensor<'_> + Sync,
    ty: &Type,
    value: impl Fn(usize, usize) -> f64 + Sync,
) -> Vec<Vec<f64>> {
    on_ranks(4, |world| {
        let rank = world.rank();
        let builder = Builder::new();
        builder.output("y", make(builder.input("x", ty.clone())));
        let graph = builder.finish().unwrap();
        let mut store = Store::new(&graph, 0);
        let mesh = Mesh::new(&[("data", 2), ("tensor", 2)], rank).unwrap();
        let lane = Arc::new(CommLane::on_mesh(world, mesh));
        let mut session = Session::with_collectives(graph, &store, Options::single(1), lane).unwrap();
        let feed = |_: usize, feed: &mut Feed<'_>| {
            let numbers: Vec<f64> = (0..ty.elements()).map(|at| value(rank, at)).collect();
            match ty.dtype {
                DType::F32 => feed.set("x", &numbers.iter().map(|x| *x as f32).collect::<Vec<_>>()),
                DType::I32 => feed.set("x", &numbers.iter().map(|x| *x as i32).collect::<Vec<_>>()),
                DType::I64 => feed.set("x", &numbers.iter().map(|x| *x as i64).collect::<Vec<_>>()),
                DType::Bool => feed.set("x", &numbers.iter().map(|x| *x != 0.0).collect::<Vec<_>>()),
                DType::U8 => feed.set("x", &numbers.iter().map(|x| *x as u8).collect::<Vec<_>>()),
                DType::BF16 => {
                    feed.set("x", &numbers.iter().map(|x| kolo_exec::bf16::from_f64(*x)).collect::<Vec<_>>())
                }
                DType::F16 => feed.set("x", &numbers.iter().map(|x| kolo_exec::f16::from_f64(*x)).collect::<Vec<_>>()),
            }
            .unwrap();
        };
        session.run(&mut store, |_| {}, feed).unwrap();
        session.tensor("y").unwrap().to_f64()
    })
}

/// The other rank along an axis of the mesh of 2 × 2.
fn partner(rank: usize, axis: &str) -> usize {
    if axis == "data" { (rank + 2) % 4 } else { rank ^ 1 }
}

#[test]
fn gathers_scatters_and_exchanges_along_every_dim_of_every_type() {
    let shape = [2, 4, 6];
    let index = |at: usize| [at / 24, at / 6 % 4, at % 6];
    let flat = |[a, b, c]: [usize; 3], [_, m, n]: [usize; 3]| (a * m + b) * n + c;
    for dtype in DType::ALL {
        let ty = Type::new(dtype, shape);
        let value = |rank: usize, at: usize| match dtype {
            DType::Bool => ((rank + at) % 2) as f64,
            _ => ((rank * 50 + at) % 97) as f64,
        };
        for (axis, dim) in [("data", 0), ("tensor", 0), ("data", 1), ("tensor", 1), ("tensor", 2)] {
            let outputs = on_mesh(|x| x.axis_gather(axis, dim, 2), &ty, value);
            for (rank, got) in outputs.iter().enumerate() {
                let pair = [rank.min(partner(rank, axis)), rank.max(partner(rank, axis))];
                let mut wide = shape;
                wide[dim] *= 2;
                for member in 0..2 {
                    for at in 0..48 {
                        let mut place = index(at);
                        place[dim] += member * shape[dim];
                        assert_eq!(got[flat(place, wide)], value(pair[member], at), "gather {dtype:?} {axis} {dim}");
                    }
                }
            }
            if !matches!(dtype, DType::Bool | DType::U8) {
                let outputs = on_mesh(|x| x.axis_scatter(axis, dim, 2), &ty, value);
                for (rank, got) in outputs.iter().enumerate() {
                    let other = partner(rank, axis);
                    let mut narrow = shape;
                    narrow[dim] /= 2;
                    for at in (0..48).filter(|at| index(*at)[dim] / narrow[dim] == usize::from(rank > other)) {
                        let mut place = index(at);
                        place[dim] %= narrow[dim];
                        let sum = value(rank, at) + value(other, at);
                        assert_eq!(got[flat(place, narrow)], sum, "scatter {dtype:?} {axis} {dim}");
                    }
                }
            }
            for join in 0..3 {
                let there = on_mesh(|x| x.all_to_all(axis, dim, join, 2), &ty, value);
                let back = on_mesh(|x| x.all_to_all(axis, dim, join, 2).all_to_all(axis, join, dim, 2), &ty, value);
                for (rank, got) in back.iter().enumerate() {
                    let wanted: Vec<f64> = (0..48).map(|at| value(rank, at)).collect();
                    assert_eq!(*got, wanted, "there and back, {dtype:?} {axis} {dim} {join}");
                    let first = rank < partner(rank, axis);
                    // The first element of the part that this rank gets of the first of the two.
                    let mut place = [0; 3];
                    place[dim] = if first { 0 } else { shape[dim] / 2 };
                    let giver = rank.min(partner(rank, axis));
                    assert_eq!(there[rank][0], value(giver, flat(place, shape)), "{dtype:?} {axis} {dim} {join}");
                }
            }
        }
    }
}

/// Values travel round a ring in every grain, on every lane, while others compute.
#[test]
fn tensors_are_sent_and_received_in_every_grain() {
    for lanes in [1, 2] {
        let sums = on_ranks(3, |world| {
            let (rank, builder) = (world.rank(), Builder::new());
            let x = builder.input("x", Type::f32([2, 3]));
            let sent = x.then(Send { axis: "pipeline".into(), to: (rank + 1) % 3, message: "x".into() }, &[]);
            let from = (rank + 2) % 3;
            let shape = vec![2, 3];
            let (axis, message) = ("pipeline".into(), "x".into());
            let receive = Receive { axis, from, dtype: DType::F32, shape, per_step: false, message };
            let came = builder.apply(receive, &[]);
            let sum = came.scale(10.0).add(sent).sum_all().then(GrainSum { of: String::new() }, &[]);
            builder.output("sum", sum);
            let graph = builder.finish().unwrap();
            let mut store = Store::new(&graph, 0);
            let mesh = Mesh::new(&[("pipeline", 3)], rank).unwrap();
            let options = Options { threads: lanes, lanes, grains: 4, slots: 1, ways: 1 };
            let lane = Arc::new(CommLane::on_mesh(world, mesh));
            let mut session = Session::with_collectives(graph, &store, options, lane).unwrap();
            let feed =
                |grain: usize, feed: &mut Feed<'_>| feed.f32("x").unwrap().fill((rank + 1) as f32 * (grain + 1) as f32);
            let mut last = 0.0;
            for _ in 0..3 {
                session.run(&mut store, |_| {}, feed).unwrap();
                last = session.output("sum").unwrap()[0];
            }
            last
        });
        // Six elements of ten grains' worth, own and ten times the one before.
        let wanted: Vec<f32> =
            (0..3).map(|rank| 60.0 * ((rank + 1) as f32 + 10.0 * ((rank + 2) % 3 + 1) as f32)).collect();
        assert_eq!(sums, wanted, "{lanes} lanes");
    }
}

/// Two messages of one size between the same ranks: the receiver awaits the other one.
#[test]
fn a_message_is_not_taken_for_another() {
    let results = on_ranks(2, |world| {
        let (rank, builder) = (world.rank(), Builder::new());
        let x = builder.input("x", Type::f32([3]));
        let (axis, shape) = ("pipeline".to_string(), vec![3]);
        let y = match rank {
            0 => x.then(Send { axis, to: 1, message: "%7 h.0".into() }, &[]),
            _ => {
                let message = "%8 h.1".into();
                let receive = Receive { axis, from: 0, dtype: DType::F32, shape, per_step: false, message };
                builder.apply(receive, &[]).add(x)
            }
        };
        builder.output("sum", y.sum_all().then(GrainSum { of: String::new() }, &[]));
        let graph = builder.finish().unwrap();
        let mut store = Store::new(&graph, 0);
        let lane = Arc::new(CommLane::on_mesh(world, Mesh::new(&[("pipeline", 2)], rank).unwrap()));
        let mut session = Session::with_collectives(graph, &store, Options::single(1), lane).unwrap();
        session.run(&mut store, |_| {}, |_, feed| feed.f32("x").unwrap().fill(1.0)).map_err(|error| error.to_string())
    });
    let said = results.into_iter().find_map(Result::err).expect("a fault");
    assert!(said.contains("%7 h.0") && said.contains("%8 h.1"), "{said}");
}

/// Every rank hands its tensor on, and as its gradient takes back that of the one it gave it to.
#[test]
fn tensors_go_round_a_ring() {
    let value = |rank: usize, at: usize| (rank * 10 + at) as f64;
    let outputs = on_mesh(|x| x.axis_shift("tensor", 1, 2), &Type::f32([2, 3]), value);
    for (rank, got) in outputs.iter().enumerate() {
        assert_eq!(*got, (0..6).map(|at| value(partner(rank, "tensor"), at)).collect::<Vec<_>>());
    }
    let sums = on_ranks(3, |world| {
        let (rank, builder) = (world.rank(), Builder::new());
        let w = builder.param("w", [2], Init::Constant(1.0));
        let came = w.scale((rank + 1) as f32).axis_shift("context", 2, 3);
        let loss = came.scale([3.0, 5.0, 7.0][rank]).sum_all();
        let grads = kolo_ops::gradients(&builder, loss, 1.0, &[w]);
        builder.output("came", came.scale(1.0));
        builder.output("grad", grads[0].unwrap().scale(1.0));
        let graph = builder.finish().unwrap();
        let mut store = Store::new(&graph, 0);
        let lane = Arc::new(CommLane::on_mesh(world, Mesh::new(&[("context", 3)], rank).unwrap()));
        let mut session = Session::with_collectives(graph, &store, Options::single(1), lane).unwrap();
        session.run(&mut store, |_| {}, |_, _| {}).unwrap();
        ["came", "grad"].map(|name| session.output(name).unwrap()[0])
    });
    // Two places on: from rank 0 to rank 2, whose factor is 7.
    assert_eq!(sums, [[2.0, 7.0], [3.0, 6.0], [1.0, 15.0]]);
}

const SAMPLES: usize = 2;
const TOKENS: usize = 16;

/// A step of a little model of tokens with positions, dropout and attention, as one worker has it.
fn attention_graph(packed: bool, causal: bool) -> Graph {
    let (builder, width) = (Builder::new(), 6);
    let tokens = builder.input("tokens", Type::i32([SAMPLES, TOKENS]));
    let normal = Init::Normal { deviation: 0.5 };
    let params = [("words", [5, width]), ("places", [TOKENS, width]), ("mix", [3 * width, width])]
        .map(|(name, shape)| builder.param(name, shape, normal));
    let [words, places, mix] = params;
    let rng = builder.full(3.0, Type::i32([4]));
    let x = words.embedding(tokens).add(places).dropout(0.2, rng, 7);
    let qkv = x.linear(mix, None);
    let part = |at: usize| qkv.slice(2, at * width..(at + 1) * width);
    let y = match packed {
        true => qkv.self_attention(2, causal),
        false => part(0).attention(part(1), part(2), None, 2, causal),
    };
    let y = y.add(x).tanh();
    let loss = y.mul(y.add(places)).sum_all();
    let names = ["words", "places", "mix"];
    let grads = kolo_ops::gradients(&builder, loss, 1.0, &params);
    let (rate, scale) = (builder.scalar(0.05), builder.scalar(1.0));
    builder.output("loss", loss.then(GrainSum { of: String::new() }, &[]));
    builder.output("y", y);
    for ((param, grad), name) in params.into_iter().zip(grads).zip(names) {
        let sum = grad.unwrap().then(GrainSum { of: name.into() }, &[]);
        builder.update(param, param.then(SgdPlain { weight_decay: 0.0 }, &[sum, rate, scale]));
    }
    builder.finish().unwrap()
}

/// Losses of three steps, the last result and all weights.
fn attend(graph: Graph, world: Option<Arc<Communicator>>) -> Vec<f32> {
    let mut store = Store::new(&graph, 0);
    let options = Options { threads: 2, lanes: 2, grains: 2, slots: 1, ways: 1 };
    let mut session = match world {
        Some(world) => {
            let mesh = Mesh::new(&[("context", world.size())], world.rank()).unwrap();
            Session::with_collectives(graph, &store, options, Arc::new(CommLane::on_mesh(world, mesh))).unwrap()
        }
        None => Session::new(graph, &store, options),
    };
    let feed = |grain: usize, feed: &mut Feed<'_>| {
        let tokens: Vec<i32> = (0..SAMPLES * TOKENS).map(|at| ((at * at + grain * 3 + at / 5) % 5) as i32).collect();
        feed.set("tokens", &tokens).unwrap();
    };
    let mut all = Vec::new();
    for _ in 0..3 {
        session.run(&mut store, |_| {}, feed).unwrap();
        all.extend(session.output("loss").unwrap());
    }
    all.extend(session.output("y").unwrap());
    ["words", "places", "mix"].iter().for_each(|name| all.extend(store.values(name).unwrap()));
    all
}

/// Attention whose keys and values go round a ring: the numbers of one that has all tokens, and the same bits on any number of
/// ranks, with as many blocks or with more.
#[test]
fn attention_round_a_ring_has_the_bits_of_one_rank() {
    for (slices, packed, causal) in [(4, true, true), (8, true, true), (4, false, false), (2, false, true)] {
        let whole = attention_graph(packed, causal);
        let rules =
            Rules { tokens: Some((SAMPLES, TOKENS)), by_tokens: true, strict: true, ring: true, ..Rules::default() };
        let planned = plan(&whole, slices, &rules);
        let part = |ranks: usize, rank: usize| {
            let graph = lower(&whole, &planned, &Group { axis: "context".into(), ranks, rank });
            kolo_graph::verify::verify(&graph).unwrap();
            graph
        };
        let what = format!("{slices} slices, packed {packed}, causal {causal}");
        let alone = attend(part(1, 0), None);
        for (at, (got, wanted)) in alone.iter().zip(attend(whole.clone(), None)).enumerate() {
            assert!((got - wanted).abs() < 1e-4 * wanted.abs().max(1.0), "{what}: {at} is {got}, must be {wanted}");
        }
        for ranks in [2, 4].into_iter().filter(|ranks| ranks <= &slices) {
            for (rank, got) in
                on_ranks(ranks, |world| attend(part(ranks, world.rank()), Some(world))).iter().enumerate()
            {
                let differs = got.iter().zip(&alone).position(|(a, b)| a.to_bits() != b.to_bits());
                assert_eq!(differs, None, "{what}: rank {rank} of {ranks}");
            }
        }
        // Nobody meets more keys and values at a time than one rank has.
        let graph = part(2, 1);
        let in_rounds = |node: &&kolo_graph::Node| {
            ["attention_step", "attention_step_grad", "axis_shift"].contains(&node.op.name())
        };
        let rounds: Vec<_> = graph.nodes.iter().filter(in_rounds).collect();
        assert!(rounds.iter().flat_map(|node| &node.inputs).all(|id| graph.ty(*id).shape[1] <= TOKENS / 2), "{what}");
        assert!(rounds.len() > 6 && graph.nodes.iter().all(|node| node.op.name() != "attention"), "{what}");
    }
}

/// A transfer that ends in a sum over grains, with a bucket of that sum behind it and one grain per lane; and a term of a sum that
/// is made before the grains. Both are the same whatever runs at a time.
#[test]
fn transfers_and_constants_under_a_sum_do_not_depend_on_lanes() {
    let sums = |lanes: usize| {
        on_ranks(4, |world| {
            let (rank, builder) = (world.rank(), Builder::new());
            let (x, w) = (builder.input("x", Type::f32([4, 3])), builder.param("w", [6], Init::Constant(0.5)));
            let part = x.axis_scatter("tensor", 0, 2).then(GrainSum { of: String::new() }, &[]);
            // Whatever runs next must not disturb what is being exchanged.
            let later = (0..6).fold(x, |y, _| y.mul(x).add(x)).sum_all().then(GrainSum { of: String::new() }, &[]);
            let constant = w.mul(w).sum_all().then(GrainSum { of: String::new() }, &[]);
            let summed = builder.apply_all(kolo_graph::collective::AllReduce { axis: "data".into() }, &[part, later]);
            builder.output("part", summed[0].scale(1.0));
            builder.output("later", summed[1].scale(1.0));
            builder.output("constant", constant);
            builder.output("wide", constant.axis_sum("tensor", 2));
            let graph = builder.finish().unwrap();
            let mut store = Store::new(&graph, 0);
            let mesh = Mesh::new(&[("data", 2), ("tensor", 2)], rank).unwrap();
            let options = Options { threads: lanes, lanes, grains: 4, slots: 1, ways: 1 };
            let lane = Arc::new(CommLane::on_mesh(world, mesh));
            let mut session = Session::with_collectives(graph, &store, options, lane).unwrap();
            let feed = |grain: usize, feed: &mut Feed<'_>| {
                let x = feed.f32("x").unwrap();
                x.iter_mut().enumerate().for_each(|(at, x)| *x = ((rank * 5 + grain * 3 + at) % 7) as f32 / 8.0);
            };
            (0..3).for_each(|_| session.run(&mut store, |_| {}, feed).unwrap());
            ["part", "later", "constant", "wide"].map(|name| session.output(name).unwrap().to_vec())
        })
    };
    let one = sums(1);
    assert_eq!((one[0][2][0], one[0][3][0]), (6.0, 12.0), "four grains of 1.5, and two ranks of that");
    assert_eq!(one, sums(2));
    assert_eq!(one, sums(4));
}

#[test]
fn what_does_not_fit_the_mesh_is_an_error_on_all_ranks() {
    let compile = |world: Arc<Communicator>, graph: Graph, lanes: usize| {
        let mesh = Mesh::new(&[("tensor", 2)], world.rank()).unwrap();
        let store = Store::new(&graph, 0);
        let options = Options { threads: lanes, lanes, grains: 2, slots: 1, ways: 1 };
        let made = Session::with_collectives(graph, &store, options, Arc::new(CommLane::on_mesh(world, mesh)));
        made.unwrap_err().to_string()
    };
    let graph = |ranks: usize| {
        let builder = Builder::new();
        let x = builder.input("x", Type::f32([4]));
        builder.output("y", x.axis_gather("tensor", 0, ranks).sum_all().then(GrainSum { of: String::new() }, &[]));
        builder.finish().unwrap()
    };
    for error in on_ranks(2, |world| compile(world, graph(3), 1)) {
        let wanted =
            "axis_gather{axis=\"tensor\", dim=0, ranks=3} is for 3 ranks, but the axis `tensor` has 2\n  hint: ";
        assert!(error.starts_with(wanted), "{error}");
    }
    let errors = on_ranks(2, |world| {
        let lanes = world.rank() + 1;
        compile(world, graph(2), lanes)
    });
    for error in errors {
        assert!(error.contains("runs 2 grains at a time") || error.contains("runs 2,"), "{error}");
        assert!(error.contains("--threads"), "{error}");
    }
}

#[test]
fn shapes_that_cannot_be_cut_are_refused_when_the_graph_is_built() {
    let error = |make: &dyn Fn(Tensor<'_>)| {
        let builder = Builder::new();
        make(builder.input("x", Type::f32([4, 6])));
        builder.finish().unwrap_err().to_string()
    };
    let scatter = |dim, ranks| AxisScatter { axis: "tensor".into(), dim, ranks };
    assert!(error(&|x| _ = x.then(scatter(1, 4), &[])).contains("dim 1 of f32[4,6] cannot be cut into 4 equal parts"));
    assert!(error(&|x| _ = x.then(scatter(2, 2), &[])).contains("f32[4,6] has no dim 2"));
    assert!(
        error(&|x| _ = x.then(AxisGather { axis: "tensor".into(), dim: 0, ranks: 0 }, &[]))
            .contains("an axis has 1 to 65536 ranks")
    );
}
