use super::*;
use crate::element::{ValueError, Values};
use crate::feed::Feed;
use crate::session::Session;
use kolo_graph::collective::AllGather;
use kolo_graph::piece::{Join, Piece};
use kolo_graph::sources::{Full, GrainSum, Init};
use kolo_graph::{Builder, DType, Op, Type};
use kolo_ops::elementwise::ElementwiseMethods;
use kolo_ops::matmul::MatMul;
use kolo_ops::optim::adagrad::Adagrad;
use kolo_ops::optim::adam::Adam;
use kolo_ops::optim::rmsprop::Rmsprop;
use kolo_ops::optim::sgd::{Sgd, SgdPlain};
use kolo_ops::transpose::TransposeMethods;

/// The calls after the grains.
fn after(session: &Session) -> impl Iterator<Item = &Call> {
    session.device().downcast::<CpuDevice>().unwrap().after.iter().flatten()
}

/// Longer than a task of an update.
const ELEMENTS: usize = 40_003;

/// Trains a step on a gradient that is its input; whether the lanes' sums are left to the update, and all state after.
fn step(lanes: usize, wanted: &str) -> (bool, Vec<f32>) {
    let builder = Builder::new();
    let w = builder.param("w", [ELEMENTS], Init::Constant(1.0));
    let sum = builder.input("x", Type::f32([ELEMENTS])).then(GrainSum { of: "w".into() }, &[]);
    let (lr, scale) = (builder.scalar(0.1), builder.scalar(1.0));
    builder.update(w, w.then(SgdPlain { weight_decay: 0.0 }, &[sum, lr, scale]));
    match wanted {
        "output" => builder.output("sum", sum),
        "state" => builder.update(builder.state("last", sum.ty(), Init::Constant(0.0)), sum),
        _ => {}
    }
    let graph = builder.finish().unwrap();
    let mut store = Store::new(&graph, 1);
    let mut session = Session::new(graph, &store, Options { threads: lanes, lanes, grains: 4, slots: 1, ways: 1 });
    let fill = |grain: usize, feed: &mut Feed<'_>| {
        let x = feed.f32("x").unwrap();
        x.iter_mut().enumerate().for_each(|(at, x)| *x = 0.1 + (grain * at) as f32 * 1e-5);
    };
    session.run(&mut store, |_| {}, fill).unwrap();
    let names = ["w", "last"].into_iter().filter_map(|name| store.values(name));
    let all = names.chain(session.output("sum")).flatten().copied().collect();
    (after(&session).any(|call| !call.terms.is_empty()), all)
}

/// Steps on a gradient that is a product.
#[derive(Clone)]
struct Trial {
    /// Rows and columns of the gradient, and terms of the product.
    shape: [usize; 3],
    /// Whether the left factor is stored transposed.
    transposed: bool,
    /// The update with the numbers of its states and scalars.
    rule: (Arc<dyn Op>, usize, usize),
    /// What is an output too: the gradient, or the parameter before the step, so that it is not updated where it is.
    output: &'static str,
    scale: f32,
}

impl Trial {
    fn of(shape: [usize; 3]) -> Self {
        let adam = Adam { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, decoupled: true };
        Self { shape, transposed: true, rule: (Arc::new(adam), 2, 3), output: "nothing", scale: 1.0 }
    }

    /// Whether the gradient is stored, all state after three steps, and the op that is found to make what is not finite.
    fn run(&self, threads: usize) -> (bool, Vec<f32>, Option<String>) {
        let [rows, columns, terms] = self.shape;
        let (op, states, scalars) = &self.rule;
        let builder = Builder::new();
        let ty = Type::f32([rows, columns]);
        let w = builder.param("w", [rows, columns], Init::Constant(1.0));
        let names = ["m", "v"].into_iter().take(*states);
        let states: Vec<_> = names.map(|name| builder.state(name, ty.clone(), Init::Constant(0.01))).collect();
        let x = builder.input("x", Type::f32(if self.transposed { [terms, rows] } else { [rows, terms] }));
        let y = builder.input("y", Type::f32([terms, columns]));
        let sum = x.then(MatMul::new(self.transposed, false), &[y]).then(GrainSum { of: "w".into() }, &[]);
        let scalars: Vec<_> = [0.1, 0.5, 3.0].iter().take(*scalars).map(|value| builder.scalar(*value)).collect();
        let inputs: Vec<_> = [w, sum].into_iter().chain(states.clone()).chain(scalars).collect();
        let updated = builder.apply_arc(Arc::clone(op), &inputs);
        [w].into_iter().chain(states).zip(updated).for_each(|(state, value)| builder.update(state, value));
        match self.output {
            "gradient" => builder.output("gradient", sum),
            "parameter" => builder.output("parameter", w),
            _ => {}
        }
        let graph = builder.finish().unwrap();
        let mut store = Store::new(&graph, 1);
        let mut session = Session::new(graph, &store, Options::single(threads));
        let fill = |_: usize, feed: &mut Feed<'_>| {
            for (name, step) in [("x", 0.37f32), ("y", 0.61)] {
                let values = feed.f32(name).unwrap();
                values.iter_mut().enumerate().for_each(|(at, value)| *value = self.scale * (at as f32 * step).sin());
            }
        };
        for _ in 0..3 {
            session.run(&mut store, |_| {}, fill).unwrap();
        }
        let bad = session.find_nonfinite(0, fill).map(|node| session.graph().node(node).op.name().to_owned());
        let state = ["w", "m", "v"].into_iter().filter_map(|name| store.values(name)).flatten().copied().collect();
        (session.program().layout.unstored.is_empty(), state, bad)
    }

    /// The same weights as if the gradient were stored, and whether it is.
    fn expect(&self, is_stored: bool) {
        let (stored, wanted, bad) = Trial { output: "gradient", ..self.clone() }.run(1);
        assert!(stored && bad.is_none(), "an output is stored");
        let case = format!("{} {:?} {}", self.rule.0.name(), self.shape, self.output);
        for threads in [1, 2, 3] {
            let (stored, state, bad) = self.run(threads);
            assert_eq!((stored, bad), (is_stored, None), "{case}");
            assert!(state == wanted, "{case} on {threads} threads");
        }
    }
}

#[test]
fn an_update_takes_a_large_product_as_it_is_made() {
    // Whole tiles and remainders, and so few terms that the update is most of the work.
    for shape in [[96, 128, 8], [531, 217, 100], [50, 37, 3], [300, 500, 1]] {
        Trial::of(shape).expect(false);
        Trial { transposed: false, ..Trial::of(shape) }.expect(false);
    }
    // No larger than what it is the product of; too many terms.
    Trial::of([64, 64, 33]).expect(true);
    Trial::of([700, 700, 300]).expect(true);
    // Not where the parameter is.
    Trial { output: "parameter", ..Trial::of([96, 130, 8]) }.expect(false);
}

#[test]
fn every_elementwise_update_takes_products() {
    let rules: [(Arc<dyn Op>, usize, usize); 4] = [
        (Arc::new(SgdPlain { weight_decay: 0.1 }), 0, 2),
        (Arc::new(Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.1 }), 1, 2),
        (Arc::new(Rmsprop { alpha: 0.9, eps: 1e-8, momentum: 0.5, weight_decay: 0.0 }), 2, 2),
        (Arc::new(Adagrad { eps: 1e-8, weight_decay: 0.0, lr_decay: 0.01 }), 1, 3),
    ];
    for rule in rules {
        Trial { rule, ..Trial::of([70, 83, 9]) }.expect(false);
    }
}

#[test]
fn a_product_that_nobody_stores_is_looked_at_too() {
    let (stored, _, bad) = Trial { scale: 1e20, ..Trial::of([96, 128, 8]) }.run(1);
    assert_eq!((stored, bad.as_deref()), (false, Some("matmul")));
}

#[test]
fn lanes_are_added_by_the_update_if_it_is_alone() {
    for wanted in ["nothing", "output", "state"] {
        let (left, one) = step(1, wanted);
        assert!(!left, "one lane has one sum");
        for lanes in [2, 4] {
            let (left, several) = step(lanes, wanted);
            assert_eq!(left, wanted == "nothing", "{lanes} lanes, {wanted} wanted");
            assert!(several == one, "{lanes} lanes, {wanted} wanted");
        }
    }
}

/// Where the second piece starts.
const CUT: usize = 16_384;

/// Two steps of an update in one piece or in two; how many joins had something to do, and the parameter after.
fn in_pieces(cut: bool, output: bool) -> (usize, Vec<f32>) {
    let builder = Builder::new();
    let w = builder.param("w", [ELEMENTS], Init::Normal { deviation: 1.0 });
    let sum = builder.input("x", Type::f32([ELEMENTS])).then(GrainSum { of: "w".into() }, &[]);
    let (lr, scale) = (builder.scalar(0.1), builder.scalar(1.0));
    let updated = match cut {
        false => w.then(SgdPlain { weight_decay: 0.1 }, &[sum, lr, scale]),
        true => {
            let pieces = [(0, CUT), (CUT, ELEMENTS - CUT)].map(|(start, len)| Piece { start, len });
            let [first, second] = pieces.map(|piece| {
                let [w, sum] = [w, sum].map(|whole| whole.then(piece.clone(), &[]));
                w.then(SgdPlain { weight_decay: 0.1 }, &[sum, lr, scale])
            });
            first.then(Join { shape: vec![ELEMENTS] }, &[second])
        }
    };
    builder.update(w, updated);
    if output {
        builder.output("before", w);
    }
    let graph = builder.finish().unwrap();
    let mut store = Store::new(&graph, 1);
    let mut session = Session::new(graph, &store, Options { threads: 2, lanes: 2, grains: 4, slots: 1, ways: 1 });
    for _ in 0..2 {
        let fill = |grain: usize, feed: &mut Feed<'_>| feed.f32("x").unwrap().fill(0.1 + grain as f32);
        session.run(&mut store, |_| {}, fill).unwrap();
    }
    let joins = after(&session).filter(|call| call.op.is::<Join>()).count();
    (joins, store.values("w").unwrap().to_vec())
}

#[test]
fn pieces_are_updated_where_they_are() {
    let (_, whole) = in_pieces(false, false);
    let (joins, pieces) = in_pieces(true, false);
    assert!(joins == 0 && pieces == whole, "{joins} joins");
    // Not if the parameter is wanted as it was.
    let (joins, pieces) = in_pieces(true, true);
    assert!(joins == 1 && pieces == whole, "{joins} joins");
}

#[test]
fn a_join_that_is_read_is_a_copy() {
    let builder = Builder::new();
    let w = builder.param("w", [32], Init::Constant(1.0));
    let pieces = [0, 16].map(|start| w.then(Piece { start, len: 16 }, &[]));
    builder.output("old", pieces[0].then(Join { shape: vec![32] }, &[pieces[1]]));
    let sum = builder.input("x", Type::f32([32])).then(GrainSum { of: "w".into() }, &[]);
    let (lr, scale) = (builder.scalar(1.0), builder.scalar(1.0));
    builder.update(w, w.then(SgdPlain { weight_decay: 0.0 }, &[sum, lr, scale]));
    let graph = builder.finish().unwrap();
    let mut store = Store::new(&graph, 1);
    let mut session = Session::new(graph, &store, Options::single(1));
    session.run(&mut store, |_| {}, |_, feed: &mut Feed<'_>| feed.f32("x").unwrap().fill(5.0)).unwrap();
    assert_eq!((session.output("old").unwrap()[31], store.values("w").unwrap()[31]), (1.0, -4.0));
}

#[test]
fn what_is_exchanged_is_used_for_nothing_else_meanwhile() {
    // Nobody reads what is gathered, or one of the two, and only at the end: then it is waited for.
    for read in [false, true] {
        let builder = Builder::new();
        let x = builder.input("x", Type::f32([16])).then(GrainSum { of: String::new() }, &[]);
        let zeros = || builder.apply(Full { value: 0.0, dtype: DType::F32, shape: vec![16] }, &[]);
        let op = AllGather { axis: "data".into(), owners: vec![0, 1] };
        let gathered = builder.apply_all(op, &[zeros(), zeros()]);
        let (double, square) = (x.add(x), x.mul(x));
        let last = double.add(square);
        builder.output("last", if read { last.add(gathered[0]) } else { last });
        let [gathered, later] = [&gathered[..], &[double, square, last]]
            .map(|values| values.iter().map(|value| value.id()).collect::<Vec<ValueId>>());
        let graph = builder.finish().unwrap();
        let layout = layout::plan(&graph, 1, 1, &CpuAbilities);
        let place = |id: ValueId| layout.places[id.0 as usize].expect("a live value has a place");
        for value in &later {
            let apart = gathered.iter().all(|id| place(*id) != place(*value));
            assert!(apart, "{value:?} lies where {gathered:?} are, read: {read}");
        }
    }
}

#[test]
fn the_layout_uses_only_what_the_executor_can_do() {
    let builder = Builder::new();
    let x = builder.input("x", Type::f32([16]));
    let double = x.add(x);
    let square = double.square();
    builder.output("y", square);
    let ids = [double.id(), square.id()];
    let graph = builder.finish().unwrap();
    let shared = |abilities: &dyn layout::Abilities| {
        let layout = layout::plan(&graph, 1, 1, abilities);
        let [double, square] = ids.map(|id| layout.places[id.0 as usize].expect("a live value has a place"));
        (double == square, layout.grain_bytes)
    };
    assert_eq!([shared(&CpuAbilities), shared(&layout::NoAbilities)], [(true, 64), (false, 128)]);
}

/// One input of every element type, each an output too.
fn every_type() -> Graph {
    let builder = Builder::new();
    for dtype in kolo_graph::DType::ALL {
        let input = builder.input(dtype.name(), Type::new(dtype, [2, 3]));
        builder.output(dtype.name(), input.permute(&[1, 0]));
    }
    builder.finish().unwrap()
}

#[test]
fn feeds_take_every_type_and_outputs_know_theirs() {
    let graph = every_type();
    let mut store = Store::new(&graph, 0);
    let mut session = Session::new(graph, &store, Options::single(1));
    let floats = [1.0f32, -2.0, 3.0, 0.0, 5.0, 6.0];
    let (bf16s, f16s) = (floats.map(half::bf16::from_f32), floats.map(half::f16::from_f32));
    let (i32s, i64s, bools) = (floats.map(|x| x as i32), floats.map(|x| x as i64), floats.map(|x| x > 2.0));
    let u8s = floats.map(|x| x as u8);
    let inputs: [(&str, Values<'_>); 7] = [
        ("f32", (&floats).into()),
        ("bf16", (&bf16s).into()),
        ("f16", (&f16s).into()),
        ("i32", (&i32s).into()),
        ("i64", (&i64s).into()),
        ("bool", (&bools).into()),
        ("u8", (&u8s).into()),
    ];
    session.step(&mut store, &inputs).unwrap();
    for (name, view) in session.tensors() {
        assert_eq!((view.shape(), view.dtype().name()), (&[3, 2][..], name));
        let moved: [f64; 6] = [1.0, 0.0, -2.0, 5.0, 3.0, 6.0];
        let want = match name {
            "bool" => moved.map(|x| f64::from(x > 2.0)),
            "u8" => moved.map(|x| x.max(0.0)),
            _ => moved,
        };
        assert_eq!(view.to_f64(), want, "{name}");
        assert_eq!((view.at(&[1, 1]), view.at(&[3, 0]), view.at(&[1])), (Some(want[3]), None, None));
    }
    assert_eq!(session.tensor("i64").unwrap().values::<i64>().unwrap(), [1, 0, -2, 5, 3, 6]);
    let error = session.tensor("i64").unwrap().values::<f32>().unwrap_err().to_string();
    assert_eq!(error, "`i64` is i64[3,2], not f32\n  hint: convert the values to i64");

    let error = |inputs: &[(&str, Values<'_>)]| {
        session.check(inputs).unwrap_err().to_string().lines().next().unwrap_or_default().to_string()
    };
    assert_eq!(error(&inputs[1..]), "input `f32` was not given");
    let with = |name: &'static str, values| [&inputs[1..], &[(name, values)]].concat();
    assert_eq!(error(&with("f32", (&i32s).into())), "`f32` is f32[2,3], not i32");
    assert_eq!(error(&with("f32", (&floats[..5]).into())), "`f32` is f32[2,3], which takes 6 values, but there are 5");
    assert_eq!(error(&with("f23", (&floats).into())), "there is no input `f23`");
}

#[test]
fn a_feed_refuses_values_that_do_not_fit() {
    let graph = every_type();
    let mut store = Store::new(&graph, 0);
    let mut session = Session::new(graph, &store, Options::single(1));
    let feed = |_: usize, feed: &mut Feed<'_>| {
        feed.set("bool", &[true, false, true, true, false, false]).unwrap();
        feed.slice::<i64>("i64").unwrap().fill(7);
        assert!(matches!(feed.set("i32", &[1i64; 6]), Err(ValueError::OtherType { .. })));
        assert!(matches!(feed.set("i32", &[1i32; 7]), Err(ValueError::OtherLength { wanted: 6, given: 7, .. })));
        assert!(matches!(feed.slice::<f32>("x"), Err(ValueError::Unknown { .. })));
    };
    session.run(&mut store, |_| {}, feed).unwrap();
    assert_eq!(session.tensor("bool").unwrap().bytes(), [1, 1, 0, 0, 1, 0]);
    assert_eq!(session.tensor("i64").unwrap().values::<i64>().unwrap(), [7; 6]);
}

/// A trial run runs whole steps of what is short, some calls of each kind of what is long, and knows both of the same kernels.
#[test]
fn a_trial_run_finds_the_time_of_a_step() {
    use kolo_ops::prelude::*;
    let layers = |count: usize| {
        let builder = Builder::new();
        let mut x = builder.input("x", Type::f32([8, 64]));
        for at in 0..count {
            x = x.matmul(builder.param(&format!("w{at}"), [64, 64], Init::ZEROS)).relu();
        }
        builder.output("loss", x.sum_all().then(GrainSum { of: String::new() }, &[]));
        builder.finish().unwrap()
    };
    let trial = |count: usize, patience: std::time::Duration| {
        let graph = layers(count);
        let store = Store::new(&graph, 1);
        let mut session = Session::new(graph, &store, Options { threads: 2, lanes: 2, grains: 4, slots: 1, ways: 1 });
        session.trial_run(|_| {}, |_, feed| feed.f32("x").unwrap().fill(1.0), patience)
    };
    let short = trial(2, std::time::Duration::from_secs(60));
    assert!(short.whole_steps > 4 && short.step_seconds > 0.0, "{short:?}");
    let long = trial(40, std::time::Duration::ZERO);
    assert_eq!((long.whole_steps, long.kinds), (0, short.kinds));
    assert!(long.step_seconds > 0.0, "{long:?}");
    // If every call took a second: of each of a lane's two grains, making its data, the layers and the loss.
    for count in [2, 40] {
        let graph = layers(count);
        let store = Store::new(&graph, 1);
        let session = Session::new(graph, &store, Options { threads: 2, lanes: 2, grains: 4, slots: 1, ways: 1 });
        let device = session.device().downcast::<CpuDevice>().unwrap();
        let calls = device.lanes[0].calls.len();
        assert!(calls >= 2 * count, "{calls}");
        assert_eq!(session.trial_sum(1.0), 2.0 * (1 + calls) as f64 + device.after.len() as f64);
    }
}

/// Collectives that a trial run must not start: other ranks would have to come, too.
#[derive(Debug)]
struct Unmoved;

impl crate::Collectives for Unmoved {
    fn size(&self, _: &str) -> usize {
        2
    }
    fn memory(&self, bytes: usize) -> Result<Memory, crate::ExchangeError> {
        Ok(Memory::new(bytes))
    }
    fn prepare(&self, _: Vec<crate::Exchange>, _: usize) -> Result<usize, crate::ExchangeError> {
        Ok(0)
    }
    fn start(&self, number: usize) {
        panic!("exchange {number} was started");
    }
    fn wait(&self, number: usize) -> Result<(), crate::ExchangeError> {
        panic!("exchange {number} was waited for");
    }
}

/// Of exchanges a trial run makes the copies on both sides, and nothing of what one worker alone would compute in their place.
#[test]
fn a_trial_run_copies_what_is_exchanged() {
    use kolo_graph::collective::{AxisGather, AxisSum};
    let builder = Builder::new();
    let x = builder.input("x", Type::f32([2, 3]));
    let (axis, ranks) = ("tensor".to_string(), 2);
    let sum = x.relu().then(AxisSum { axis: axis.clone(), ranks }, &[]);
    // Columns of two ranks, which come one rank behind the other.
    let both = sum.then(AxisGather { axis, dim: 1, ranks }, &[]);
    builder.output("sum", sum);
    builder.output("both", both.relu());
    let graph = builder.finish().unwrap();
    let (store, options) = (Store::new(&graph, 1), Options::single(1));
    for patience in [std::time::Duration::ZERO, std::time::Duration::from_secs(1)] {
        let mut session = Session::with_collectives(graph.clone(), &store, options, Arc::new(Unmoved)).unwrap();
        let fill = |_: usize, feed: &mut Feed<'_>| feed.f32("x").unwrap().fill(1.5);
        let tried = session.trial_run(|_| {}, fill, patience);
        assert!(tried.step_seconds > 0.0 && tried.kinds == 4, "{tried:?}");
        assert_eq!(session.output("sum").unwrap(), [1.5; 6]);
        assert_eq!(session.output("both").unwrap(), [0.0; 12], "nothing came from the other rank");
    }
}

/// Ops of a program's own: with a kernel, with none, and with another op's name.
mod own {
    use kolo_graph::{Arg, Case, Cases, Cpu, CpuCx, Dense, Op, OpKind, Operand, Operands, Type, op};

    op! {
        /// Twice the value.
        pub struct Twice = "twice" {}
    }
    op! {
        /// As [`Twice`], but nobody says how it runs.
        pub struct Unknown = "unknown" { times: usize }
    }
    op! {
        /// Has the name of another.
        pub struct Impostor = "relu" {}
    }

    macro_rules! doubles {
        ($op:ident) => {
            impl Op for $op {
                fn operands(&self) -> Operands {
                    Operands::without_rules([Operand::float("x")], &["y"])
                }
                fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
                    Ok(inputs.to_vec())
                }
                fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
                    let data = inputs[0].data.iter().map(|x| 2.0 * x).collect();
                    vec![Dense::new(inputs[0].shape.clone(), data)]
                }
            }
        };
    }
    doubles!(Twice);
    doubles!(Unknown);
    doubles!(Impostor);

    impl Cpu for Twice {
        fn run(&self, cx: &mut CpuCx<'_>) {
            cx.out_f32(0).iter_mut().zip(cx.f32(0)).for_each(|(y, x)| *y = 2.0 * x);
        }
    }

    impl Cases for Twice {
        fn cases() -> Vec<Case> {
            vec![Case::new(Twice {}, [Arg::real([3])])]
        }
    }

    pub const KINDS: &[OpKind] = &[OpKind::of::<Twice>()];
}

/// The graph `y = op(x)` within a layer, for inputs of this type.
fn in_a_layer(op: impl Op, ty: Type) -> Graph {
    let builder = Builder::new();
    let x = builder.input("x", ty);
    let y = builder.scope("block", || builder.scope("3", || x.then(op, &[])));
    builder.output("y", y);
    builder.finish().unwrap()
}

#[test]
fn an_op_without_a_kernel_is_an_error_that_names_it_and_its_layer() {
    let error = |graph: Graph| {
        let store = Store::new(&graph, 0);
        Session::try_new(graph, &store, Options::single(1)).unwrap_err().to_string()
    };
    assert_eq!(
        error(in_a_layer(own::Unknown { times: 2 }, Type::f32([3]))),
        "the CPU has no kernel for `unknown{times=2}` in layer `block.3`; implement `Cpu` for the op and register its kind"
    );
    // A name that a kernel is known for is not enough: the op itself must be of that kind.
    assert!(
        error(in_a_layer(own::Impostor {}, Type::f32([3]))).starts_with("the CPU has no kernel for `relu` in layer")
    );
    // A dead op runs nowhere.
    let builder = Builder::new();
    let x = builder.input("x", Type::f32([3]));
    x.then(own::Unknown { times: 1 }, &[]);
    builder.output("y", x.relu());
    let graph = builder.finish().unwrap();
    assert!(Session::try_new(graph.clone(), &Store::new(&graph, 0), Options::single(1)).is_ok());
}

#[test]
fn a_program_registers_its_own_ops() {
    assert!(kolo_ops::cpu_of(&own::Twice {}).is_none());
    kolo_ops::register(own::KINDS).unwrap();
    assert_eq!(kolo_ops::register(own::KINDS).unwrap_err(), "an op `twice` already exists; give yours another name");
    // Also in half precision, through copies that the executor makes, and from text.
    let floats = [1.0f32, -2.0, 0.5];
    let halves = floats.map(half::bf16::from_f32);
    for (dtype, values) in [(DType::F32, Values::from(&floats)), (DType::BF16, Values::from(&halves))] {
        let graph = in_a_layer(own::Twice {}, Type::new(dtype, [3]));
        let graph = kolo_graph::text::parse(&graph.to_string(), &kolo_ops::registry()).unwrap();
        let mut store = Store::new(&graph, 0);
        let mut session = Session::new(graph, &store, Options::single(1));
        session.step(&mut store, &[("x", values)]).unwrap();
        assert_eq!(session.tensor("y").unwrap().to_f64(), [2.0, -4.0, 1.0]);
    }
}
