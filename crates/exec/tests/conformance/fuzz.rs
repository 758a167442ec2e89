//! Every op on random attributes, numbers of inputs, ranks, sizes and element types, from a seed: an error, or the result of
//! the definition. Never a panic, and never a byte outside the operands, which lie between canaries and a page that
//! cannot be touched.

use super::{draw, graph_of, name, numbers, run_graph, source};
use kolo_exec::reference;
use kolo_graph::attr::{Attr, AttrReader};
use kolo_graph::cpu::{Buffer, Cpu, CpuCx};
use kolo_graph::op::{Arg, Case, Dense, Domain, OpKind};
use kolo_graph::rng::Stream;
use kolo_graph::sources::{Input, InputRole, Param, State};
use kolo_graph::{Builder, DType, Op, Team, Tensor, Type, checked_types};
use kolo_ops::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Trials of each op; `ROUNDS=20000` digs deeper.
const ROUNDS: u64 = 300;
/// Elements of all operands together that are computed; of more, only the types are checked.
const ELEMENTS_MAX: usize = 3000;

/// Numbers drawn one after the other.
struct Dice {
    stream: Stream,
    drawn: u64,
}

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.drawn += 1;
        self.stream.below(0, self.drawn, end as u64) as usize
    }
    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// One try: an op, its inputs' types and the values to draw.
struct Trial {
    op: Arc<dyn Op>,
    args: Vec<Arg>,
    tolerance: f64,
    /// Whether the numbers mean something: no attribute is infinite or huge.
    tame: bool,
}

const SIZES: [usize; 8] = [0, 1, 1, 2, 3, 4, 5, 7];
const HUGE: [usize; 5] = [1 << 31, 1 << 40, 1 << 43, 1 << 44, usize::MAX / 3];
const INTS: [i64; 12] = [0, 1, 2, 3, 4, -1, -100, 7, 1 << 31, 1 << 40, 1 << 62, i64::MAX];
const FLOATS: [f64; 8] = [0.0, -1.0, 0.5, 1e-3, 3.0, f64::NAN, f64::INFINITY, 1e38];

fn change_attr(attr: &mut Attr, dice: &mut Dice, tame: &mut bool) {
    match attr {
        Attr::Bool(value) => *value = !*value,
        Attr::Int(value) => {
            *value = if dice.one_in(3) { value.saturating_add(dice.pick(&[1, -1])) } else { dice.pick(&INTS) }
        }
        Attr::Float(value) => {
            *value = dice.pick(&FLOATS);
            *tame &= value.abs() < 10.0;
        }
        Attr::Text(value) => drop(value.pop()),
        Attr::DType(value) => *value = dice.pick(&DType::ALL),
        Attr::List(values) => match dice.below(4) {
            0 => values.push(dice.pick(&INTS)),
            1 => drop(values.pop()),
            _ if !values.is_empty() => {
                let at = dice.below(values.len());
                values[at] = if dice.one_in(2) { dice.below(6) as i64 } else { dice.pick(&INTS) };
            }
            _ => {}
        },
    }
}

fn change_types(args: &mut Vec<Arg>, dice: &mut Dice) {
    let plain = |dtype: DType| match dtype {
        DType::Bool => Domain::Index(0, 2),
        DType::U8 => Domain::Index(0, 6),
        dtype if dtype.is_float() => Domain::Real(-2.0, 2.0),
        _ => Domain::Index(-2, 6),
    };
    if args.is_empty() || dice.one_in(12) {
        args.push(Arg::real([dice.pick(&SIZES)]));
        return;
    }
    let at = dice.below(args.len());
    match dice.below(8) {
        0 => drop(args.remove(at)),
        1 => {
            let dtype = dice.pick(&DType::ALL);
            args[at].domain = plain(dtype);
            args[at].ty.dtype = dtype;
        }
        2 => {
            let dtype = dice.pick(&DType::ALL);
            for arg in args.iter_mut().filter(|arg| arg.ty.dtype.is_float()) {
                arg.ty.dtype = dtype;
                arg.domain = plain(dtype);
            }
        }
        3 => {
            let size = dice.pick(&SIZES);
            args[at].ty.shape = args[at].ty.shape.iter().copied().chain([size]).collect();
        }
        4 => args[at].ty.shape = args[at].ty.shape.split_last().map_or([].into(), |(_, rest)| rest.into()),
        5 if args[at].ty.rank() > 0 => {
            let dim = dice.below(args[at].ty.rank());
            args[at].ty.shape[dim] = if dice.one_in(4) { dice.pick(&HUGE) } else { dice.pick(&SIZES) };
        }
        // The same size everywhere, so that shapes still fit each other.
        _ if args[at].ty.rank() > 0 => {
            let dim = dice.below(args[at].ty.rank());
            let (old, new) =
                (args[at].ty.shape[dim], if dice.one_in(9) { dice.pick(&HUGE) } else { dice.pick(&SIZES) });
            let sizes = args.iter_mut().flat_map(|arg| arg.ty.shape.iter_mut());
            sizes.filter(|size| **size == old).for_each(|size| *size = new);
        }
        _ => {}
    }
}

fn trial(kind: &OpKind, cases: &[Case], dice: &mut Dice) -> Option<Trial> {
    let case = &cases[dice.below(cases.len())];
    let mut attrs: Vec<(String, Attr)> = case.op.attrs().into_iter().map(|(key, value)| (key.into(), value)).collect();
    let mut tame = true;
    while !attrs.is_empty() && dice.one_in(2) {
        let at = dice.below(attrs.len());
        change_attr(&mut attrs[at].1, dice, &mut tame);
    }
    let read = catch_unwind(AssertUnwindSafe(|| (kind.read)(&AttrReader { attrs: &attrs })));
    let op = read.unwrap_or_else(|_| panic!("reading {attrs:?} panics")).ok()?;
    let mut args = case.args.clone();
    while !dice.one_in(3) {
        change_types(&mut args, dice);
    }
    for arg in &mut args {
        if let Domain::Index(low, high) = arg.domain
            && dice.one_in(3)
        {
            match arg.ty.dtype {
                DType::I32 => arg.domain = Domain::Index(low - 3, high + 3),
                DType::U8 => arg.domain = Domain::Index(0, 256),
                _ => {}
            }
        }
        if arg.domain == Domain::Rng && arg.ty != Type::i32([4]) {
            arg.domain = Domain::Index(0, 9);
        }
    }
    Some(Trial { op, args, tolerance: case.tolerance, tame })
}

/// What is running, for the message if it touches a page it must not.
static RUNNING: AtomicPtr<libc::c_char> = AtomicPtr::new(null_mut());

extern "C" fn report(signal: libc::c_int) {
    let text = RUNNING.load(Ordering::Relaxed);
    // SAFETY: only functions that are allowed in a signal handler; the text outlives the trial.
    unsafe {
        if !text.is_null() {
            libc::write(2, text.cast(), libc::strlen(text));
        }
        libc::signal(signal, libc::SIG_DFL);
    }
}

const PAGE: usize = 4096;
const CANARY: u8 = 0xFF;

/// An operand that ends right before a page that cannot be touched; around it, and in it at first, are canaries, which are
/// NaN as floats.
struct Guarded {
    start: *mut u8,
    mapped: usize,
    data: *mut u8,
    bytes: usize,
}

impl Guarded {
    fn new(bytes: usize) -> Self {
        let usable = (bytes.next_multiple_of(64) + 64).next_multiple_of(PAGE);
        let mapped = usable + PAGE;
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh mapping, of which the last page is closed.
        let start = unsafe {
            let start = libc::mmap(null_mut(), mapped, access, flags, -1, 0).cast::<u8>();
            assert_ne!(start.cast(), libc::MAP_FAILED);
            std::ptr::write_bytes(start, CANARY, usable);
            assert_eq!(libc::mprotect(start.add(usable).cast(), PAGE, libc::PROT_NONE), 0);
            start
        };
        // SAFETY: inside the mapping.
        let data = unsafe { start.add(usable - bytes.next_multiple_of(64)) };
        Self { start, mapped, data, bytes }
    }

    fn buffer(&self, ty: &Type) -> Buffer {
        Buffer { data: self.data, ty: ty.clone() }
    }

    fn contents(&self) -> Vec<u8> {
        // SAFETY: inside the mapping.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }.to_vec()
    }

    fn check(&self, what: &str) {
        // SAFETY: the open pages.
        let all = unsafe { std::slice::from_raw_parts(self.start, self.mapped - PAGE) };
        let first = self.data as usize - self.start as usize;
        let outside = all[..first].iter().chain(&all[first + self.bytes..]);
        assert!(outside.clone().all(|byte| *byte == CANARY), "{what} was written outside");
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        unsafe { libc::munmap(self.start.cast(), self.mapped) };
    }
}

/// Runs the kernel on guarded memory.
fn run_guarded(op: &dyn Cpu, types: &[Type], inputs: &[Dense], outputs: &[Type], team: &Team) -> Vec<(Type, Vec<u8>)> {
    let guarded = |ty: &Type| Guarded::new(ty.bytes());
    let (ins, outs): (Vec<Guarded>, Vec<Guarded>) =
        (types.iter().map(guarded).collect(), outputs.iter().map(guarded).collect());
    let scratch = Guarded::new(op.scratch_bytes(types, outputs, team.threads()));
    let input_buffers: Vec<Buffer> = ins.iter().zip(types).map(|(memory, ty)| memory.buffer(ty)).collect();
    let output_buffers: Vec<Buffer> = outs.iter().zip(outputs).map(|(memory, ty)| memory.buffer(ty)).collect();
    for (buffer, input) in input_buffers.iter().zip(inputs) {
        input.data.iter().enumerate().for_each(|(at, value)| kolo_ops::cast::write(buffer, at, *value));
    }
    let before: Vec<Vec<u8>> = ins.iter().map(Guarded::contents).collect();
    // SAFETY: every buffer has its type's bytes on a cache line, and so has the scratch.
    let mut cx = unsafe { CpuCx::new(&input_buffers, &output_buffers, team, (scratch.data, scratch.bytes)) };
    op.run(&mut cx);
    scratch.check("the scratch");
    ins.iter().for_each(|memory| memory.check("an input"));
    outs.iter().for_each(|memory| memory.check("an output"));
    assert_eq!(before, ins.iter().map(Guarded::contents).collect::<Vec<_>>(), "an input changed");
    outputs.iter().cloned().zip(outs.iter().map(Guarded::contents)).collect()
}

/// Numbers are compared with the largest of the tensor, and that with `least`: what cancels has no precision of its own.
fn compare(got: &(Type, Vec<u8>), want: &Dense, (tolerance, least): (f64, f64), what: &str) {
    let numbers = numbers(got);
    let dtype = got.0.dtype;
    let tolerance = match dtype {
        DType::BF16 => 3e-2,
        DType::F16 => 4e-3,
        DType::F32 => tolerance,
        _ => 0.0,
    };
    let size = want.data.iter().filter(|x| x.is_finite()).fold(0.0f64, |m, x| m.max(x.abs())).max(least);
    for (at, (got, want)) in numbers.iter().zip(&want.data).enumerate() {
        let same = (got.is_nan() && want.is_nan()) || got == want || (got - want).abs() <= tolerance * size;
        let overflow = dtype.is_float() && want.abs() > 6e4 && (!got.is_finite() || want.abs() > 1e30);
        assert!(same || overflow, "{what}: element {at} is {got}, must be {want}");
    }
}

/// The gradient of the first output's sum by every float: an error, or a sound graph that runs as defined.
fn differentiate(trial: &Trial, inputs: &[Dense]) {
    let builder = Builder::new();
    let tensors: Vec<Tensor<'_>> =
        trial.args.iter().enumerate().map(|(at, arg)| builder.input(&name(at), arg.ty.clone())).collect();
    let y = builder.apply_arc(trial.op.clone(), &tensors)[0];
    let floats: Vec<Tensor<'_>> = tensors.into_iter().filter(|tensor| tensor.dtype() == DType::F32).collect();
    if y.dtype() != DType::F32 || floats.is_empty() {
        return;
    }
    for (at, grad) in kolo_ops::gradients(&builder, y.mul(y).sum_all(), 1.0, &floats).into_iter().enumerate() {
        if let Some(grad) = grad {
            assert!(builder.failed() || grad.ty() == floats[at].ty(), "a gradient of type {}", grad.ty());
            builder.output(&format!("g{at}"), grad);
        }
    }
    let Ok(graph) = builder.finish() else { return };
    kolo_graph::verify::verify(&graph).unwrap();
    let values = reference::evaluate(&graph, source(inputs)).unwrap();
    for ((_, id), got) in graph.outputs.iter().zip(run_graph(&graph, inputs, 1)) {
        if trial.tame {
            compare(&got, &values[id.0 as usize], ((trial.tolerance * 50.0).max(1e-3), 1e-1), "gradient");
        }
    }
}

/// Whether the trial was computed.
fn check(trial: &Trial, teams: &[Team; 2], dice: &mut Dice) -> bool {
    let types: Vec<Type> = trial.args.iter().map(|arg| arg.ty.clone()).collect();
    let Ok(outputs) = checked_types(&*trial.op, &types) else { return false };
    trial.op.flops(&types, &outputs);
    if let Some(index) = trial.op.index(&types) {
        index.points(&types);
    }
    for split in trial.op.splits(&types, &outputs) {
        split.part(&trial.op, 0, split.size.div_ceil(2));
    }
    let elements = types.iter().chain(&outputs).fold(0usize, |total, ty| total.saturating_add(ty.elements()));
    if elements > ELEMENTS_MAX {
        return false;
    }
    // The executor supplies sources: they have no kernel.
    if trial.op.is::<Input>() || trial.op.is::<Param>() || trial.op.is::<State>() {
        assert!(types.is_empty(), "a source took an input");
        return true;
    }
    let salt = dice.below(1000);
    let inputs: Vec<Dense> = trial.args.iter().enumerate().map(|(at, arg)| draw(arg, salt * 16 + at)).collect();
    let inputs: Vec<Dense> = inputs
        .into_iter()
        .zip(&types)
        .map(|(dense, ty)| Dense::new(dense.shape, dense.data.into_iter().map(|x| ty.dtype.round(x)).collect()))
        .collect();
    let graph = graph_of(&trial.op, &trial.args);
    let printed = graph.to_string();
    let parsed = kolo_graph::text::parse(&printed, &kolo_ops::registry());
    assert_eq!(parsed.map(|graph| graph.to_string()), Ok(printed), "the text form differs");
    let values = reference::evaluate(&graph, source(&inputs)).unwrap();
    let halves = types.iter().chain(&outputs).any(|ty| matches!(ty.dtype, DType::BF16 | DType::F16));
    let got = match kolo_ops::cpu_of(&*trial.op).filter(|_| !halves) {
        Some(op) => run_guarded(op, &types, &inputs, &outputs, &teams[dice.below(2)]),
        None => run_graph(&graph, &inputs, 1),
    };
    for (at, ((_, id), got)) in graph.outputs.iter().zip(&got).enumerate() {
        if trial.tame {
            compare(got, &values[id.0 as usize], ((trial.tolerance * 10.0).max(1e-4), 1e-3), &format!("output {at}"));
        }
    }
    if dice.one_in(2) {
        differentiate(trial, &inputs);
    }
    true
}

/// The smaller cases of a kind. The sources have none of their own, and get one here.
fn cases_of(kind: &OpKind) -> Vec<Case> {
    let (name, shape) = ("x0".to_string(), vec![2, 3]);
    let all = match kind.name {
        "input" => {
            vec![Case::new(Input { name, dtype: DType::F32, shape, per_step: false, role: InputRole::Data }, [])]
        }
        "param" => vec![Case::new(Param::new(name, shape, Init::ZEROS), [])],
        "state" => {
            vec![Case::new(State::new(name, kolo_graph::Type::i32(shape), Init::ZEROS), [])]
        }
        _ => (kind.cases)(),
    };
    let small = |case: &&Case| case.args.iter().map(|arg| arg.ty.elements()).sum::<usize>() <= ELEMENTS_MAX / 3;
    let small: Vec<Case> = all.iter().filter(small).cloned().collect();
    if small.is_empty() { all } else { small }
}

#[test]
fn any_op_on_anything_is_an_error_or_right() {
    let _shared = super::WIDTH.read().unwrap_or_else(std::sync::PoisonError::into_inner);
    // SAFETY: the handler only writes what is running and leaves the rest to the system.
    unsafe { libc::signal(libc::SIGSEGV, report as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    let teams = [Team::new(1), Team::new(2)];
    let filter = std::env::var("OP").ok();
    let rounds = std::env::var("ROUNDS").map_or(ROUNDS, |text| text.parse().unwrap());
    let (mut failures, mut computed, mut tried) = (Vec::new(), 0u64, 0u64);
    for kind in kolo_ops::registry().iter().filter(|kind| filter.as_ref().is_none_or(|name| name == kind.name)) {
        let cases = cases_of(kind);
        let before = (failures.len(), computed);
        for round in 0..rounds {
            if failures.len() > before.0 + 3 {
                break;
            }
            let mut dice = Dice { stream: Stream::new(round, kind.name), drawn: 0 };
            let Some(trial) = trial(kind, &cases, &mut dice) else { continue };
            let types: Vec<String> = trial.args.iter().map(|arg| arg.ty.to_string()).collect();
            let label = format!("round {round}: {} on {}", trial.op.signature(), types.join(", "));
            let text = std::ffi::CString::new(format!("outside: {label}\n")).unwrap();
            RUNNING.store(text.as_ptr().cast_mut(), Ordering::Relaxed);
            match catch_unwind(AssertUnwindSafe(|| check(&trial, &teams, &mut dice))) {
                Ok(ran) => computed += u64::from(ran),
                Err(panic) => {
                    let text = panic.downcast_ref::<String>().cloned();
                    let text = text.or(panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default();
                    failures.push(format!("{label}: {text}"));
                }
            }
            RUNNING.store(null_mut(), Ordering::Relaxed);
            tried += 1;
        }
        assert!(computed >= before.1 + 5, "{}: too few trials were computed", kind.name);
    }
    println!("{tried} trials, {computed} computed");
    assert!(failures.is_empty(), "{} of {tried} trials failed:\n{}", failures.len(), failures.join("\n"));
}

/// Inputs that an op does not take are errors in a text as well, and before anything runs.
#[test]
fn a_text_goes_through_the_same_check() {
    let line = |ty: &str, op: &str, out: &str| {
        let (dtype, shape) = ty.split_once('[').unwrap();
        format!(
            "graph {{\n  %0 = input{{name=\"x\", dtype={dtype}, shape=[{shape}, per_step=false}}() : {ty}\n  \
             %1, %2 = {op} : {out}\n}}\n"
        )
    };
    let attention = "attention{heads=1, causal=false, packed=true, bias=false}(%0)";
    let error = |text: String| kolo_graph::text::parse(&text, &kolo_ops::registry()).unwrap_err().message;
    let wrong = error(line("bool[1,4,6]", attention, "bool[1,4,2], f32[1,1,4]"));
    assert!(wrong.contains("`qkv` (input 0) must be f32 or bf16 or f16, but is bool[1,4,6]"), "{wrong}");
    let wrong = error(line("f32[1,4,6]", &attention.replace("(%0)", "(%0, %0)"), "f32[1,4,2], f32[1,1,4]"));
    assert!(wrong.contains("takes one input (qkv), but got 2"), "{wrong}");
    let masked = "attention{heads=1, causal=false, packed=true, bias=true}(%0, %0)";
    for dtype in ["i32", "bool", "u8"] {
        let text = line("f32[1,4,6]", masked, "f32[1,4,2], f32[1,1,4]").replace(
            "  %1, %2",
            &format!("  %1 = full{{value=0.0, dtype={dtype}, shape=[1,1,4,4]}}() : {dtype}[1,1,4,4]\n  %2, %3"),
        );
        let wrong = error(text.replace("(%0, %0)", "(%0, %1)"));
        assert!(wrong.contains(&format!("`bias` (input 1) must be f32 or bf16 or f16, but is {dtype}")), "{wrong}");
    }
    assert!(!wrong_hint().contains("[model]"), "there is no job file here");
}

fn wrong_hint() -> String {
    let builder = Builder::new();
    builder.input("x", Type::f32([3])).add(builder.input("y", Type::f32([4])));
    builder.finish().unwrap_err().hint
}
