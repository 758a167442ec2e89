//! The GPU side of every op, run on the CPU by an emulator (`emulated/emulator.hpp`): every case of the registry against the
//! definition, in f32, in bf16 and, where the calls differ, in TF32, with numbers and with NaN and infinities. It needs a C++ compiler, and is skipped without one.
//! Whether the same sources compile for a GPU is `compiles_for_the_gpu`, which needs NVRTC.

use kolo_graph::checked_types;
use kolo_graph::cpu::Buffer;
use kolo_graph::cuda::{Convolution, ConvolutionPass, Cuda, CudaMatrix, PRELUDE, Product};
use kolo_graph::cuda::{CudaArg, CudaBuffer, CudaCall, CudaCalls, CudaCx, CudaPlace, CudaSource, CudaTarget, Launch};
use kolo_graph::op::{Case, Dense, Domain};
use kolo_graph::rng::Stream;
use kolo_graph::{Arg, DType, Type};
use std::collections::BTreeMap;

#[path = "emulated/chains.rs"]
mod chains;
#[path = "emulated/library.rs"]
mod library;
#[path = "emulated/nvrtc.rs"]
mod nvrtc;
#[path = "emulated/run.rs"]
mod run;

use library::Library;
use run::Memory;

/// Multiply-adds beyond which a case is left to the GPU: the emulator is some thousand times slower.
const FLOPS_MAX: u64 = 20_000_000;
/// The same for a convolution that stands in for the vendor's library.
const LIBRARY_FLOPS_MAX: u64 = 500_000;

/// A case with inputs of one element type, and what its op runs.
struct Trial {
    label: String,
    case: Case,
    inputs: Vec<Type>,
    outputs: Vec<Type>,
    calls: CudaCalls,
    /// Products may round their operands to TF32.
    tf32: bool,
}

/// Every case of every kind with a GPU side, as it is and with its floats in half precision where the op allows that. `OP` names
/// one kind.
fn trials() -> Vec<Trial> {
    let filter = std::env::var("OP").ok();
    let mut trials = Vec::new();
    let wanted = |name: &str| filter.as_ref().is_none_or(|wanted| wanted == name);
    for kind in kolo_ops::registry().into_iter().filter(|kind| wanted(kind.name)) {
        for (at, case) in (kind.cases)().into_iter().enumerate() {
            let own: Vec<Type> = case.args.iter().map(|arg| arg.ty.clone()).collect();
            let halves = halved(&case, &own);
            for inputs in std::iter::once(own).chain(halves) {
                let outputs = checked_types(&*case.op, &inputs).expect("a case is valid");
                let Some(side) = kolo_ops::cuda_of(&*case.op) else { continue };
                if outputs.iter().all(|ty| ty.elements() == 0) {
                    continue;
                }
                for (how, tf32, calls) in ways(side, &inputs, &outputs) {
                    let label = format!("{} case {at} {} on {inputs:?}{how}", kind.name, case.op.signature());
                    let (case, inputs, outputs) = (case.clone(), inputs.clone(), outputs.clone());
                    trials.push(Trial { label, case, inputs, outputs, calls, tf32 });
                }
            }
        }
    }
    trials
}

/// What an op runs by kernels alone, and where it then runs otherwise: in TF32, with the vendor's library, with channels last. The flag says
/// whether products may round to TF32.
fn ways(side: &dyn Cuda, inputs: &[Type], outputs: &[Type]) -> Vec<(&'static str, bool, CudaCalls)> {
    let plain = CudaTarget::default();
    let targets = [
        (", in TF32", true, CudaTarget { tf32: true, ..plain.clone() }),
        (", by the library", false, CudaTarget { convolutions: true, ..plain.clone() }),
    ];
    let mut ways = vec![("", false, side.calls(&CudaCx::new(inputs, outputs, &plain)))];
    for (how, tf32, target) in targets {
        let calls = side.calls(&CudaCx::new(inputs, outputs, &target));
        if calls != ways[0].2 {
            ways.push((how, tf32, calls));
        }
    }
    let target = CudaTarget { convolutions: true, tf32: true, ..plain };
    let cx = CudaCx { channels_last: true, ..CudaCx::new(inputs, outputs, &target) };
    if side.channels_last(&cx).is_some() {
        let (inputs, outputs) = (vec![false; inputs.len()], vec![false; outputs.len()]);
        ways.push((", with channels last", false, kolo_ops::channel_order::calls(side, &cx, &inputs, &outputs)));
    }
    ways
}

/// The inputs with bf16 in place of f32, of all that may be floats of any type.
fn halved(case: &Case, inputs: &[Type]) -> Option<Vec<Type>> {
    let half = |ty: &Type| if ty.dtype == DType::F32 { Type::new(DType::BF16, ty.shape.clone()) } else { ty.clone() };
    let all: Vec<Type> = inputs.iter().map(half).collect();
    if all == inputs {
        return None;
    }
    if checked_types(&*case.op, &all).is_ok() {
        return Some(all);
    }
    // Statistics stay in f32.
    let mut some = inputs.to_vec();
    for at in 0..some.len() {
        let before = std::mem::replace(&mut some[at], all[at].clone());
        if checked_types(&*case.op, &some).is_err() {
            some[at] = before;
        }
    }
    (some != inputs).then_some(some)
}

fn draw(arg: &Arg, dtype: DType, salt: usize) -> Dense {
    let stream = Stream::new(salt as u64, "case");
    let value = |at: usize| {
        let uniform = f64::from(stream.uniform(0, at as u64));
        dtype.round(match arg.domain {
            Domain::Real(low, high) => f64::from((low + uniform * (high - low)) as f32),
            Domain::Index(low, high) => (low + stream.below(0, at as u64, (high - low) as u64) as i64) as f64,
            Domain::Rng => [12345.0, -678.0, 3.0, 8.0][at],
            Domain::Spread => (uniform - 0.5) * 7.0,
        })
    };
    Dense::new(arg.ty.shape.clone(), (0..arg.ty.elements()).map(value).collect())
}

/// The inputs with `special` at some elements of every float.
fn spoilt(trial: &Trial, inputs: &[Dense], special: f64, step: usize) -> Vec<Dense> {
    let spoil = |(input, ty): (&Dense, &Type)| {
        let mut input = input.clone();
        if ty.dtype.is_float() && !input.data.is_empty() {
            let first = 1 % input.data.len();
            input.data.iter_mut().skip(first).step_by(step).for_each(|x| *x = special);
        }
        input
    };
    inputs.iter().zip(&trial.inputs).map(spoil).collect()
}

fn check(trial: &Trial, inputs: &[Dense], library: &Library, exact: bool) -> Result<(), String> {
    let got = Memory::of(trial, inputs).run(&trial.calls, library);
    let all: Vec<&Dense> = inputs.iter().collect();
    let want = trial.case.op.reference(&all, &trial.outputs);
    let coarse = trial.inputs.iter().chain(&trial.outputs).any(|ty| ty.dtype == DType::BF16);
    let rounding = if coarse {
        1.5e-2
    } else if trial.tf32 {
        5e-3
    } else {
        0.0
    };
    let tolerance = trial.case.tolerance.max(rounding);
    for (slot, (got, want)) in got.iter().zip(&want).enumerate() {
        let size = want.data.iter().filter(|x| x.is_finite()).fold(0.0f64, |m, x| m.max(x.abs())).max(1e-3);
        for (at, (got, want)) in got.iter().zip(&want.data).enumerate() {
            let near = got == want || (got.is_nan() && want.is_nan()) || (got - want).abs() <= tolerance * size;
            let of_kind = got.is_nan() == want.is_nan() && got.is_infinite() == want.is_infinite();
            let left_out = trial.case.leaves_out_zeros && want.is_nan();
            if !(if exact { near } else { of_kind || left_out }) {
                return Err(format!("output {slot}, element {at} is {got}, must be {want}"));
            }
        }
    }
    Ok(())
}

/// Tries a kind's cases with numbers and with what is none. Returns how many were tried, and what failed.
fn try_all(trials: &[Trial], library: &Library) -> (usize, Vec<String>) {
    let (mut failures, mut tried) = (Vec::new(), 0);
    for trial in trials {
        let by_library = trial.calls.calls.iter().any(|call| matches!(call, CudaCall::Convolution(_)));
        let most = if by_library { LIBRARY_FLOPS_MAX } else { FLOPS_MAX };
        if trial.case.op.flops(&trial.inputs, &trial.outputs) > most {
            continue;
        }
        let draw = |(at, (arg, ty)): (usize, (&Arg, &Type))| draw(arg, ty.dtype, tried * 16 + at);
        let inputs: Vec<Dense> = trial.case.args.iter().zip(&trial.inputs).enumerate().map(draw).collect();
        tried += 1;
        let mut outcome = check(trial, &inputs, library, true);
        // What padding times infinity is, is the library's affair.
        if !by_library && trial.inputs.iter().map(Type::elements).sum::<usize>() < 3000 {
            for (special, step) in [(f64::NAN, 5), (f64::INFINITY, 7), (f64::NEG_INFINITY, 3)] {
                let inputs = spoilt(trial, &inputs, special, step);
                let spoilt = check(trial, &inputs, library, false);
                outcome = outcome.and(spoilt.map_err(|error| format!("{special} in all inputs: {error}")));
            }
        }
        if let Err(error) = outcome {
            failures.push(format!("{}: {error}", trial.label));
        }
    }
    (tried, failures)
}

/// An emulator runs one block at a time. Two of them, each with the kernels of every second kind, use two cores.
#[test]
fn kernels_on_the_emulator_match_the_definition() {
    let mut names: Vec<&str> = kolo_ops::registry().into_iter().map(|kind| kind.name).collect();
    names.sort_unstable();
    let place = |trial: &Trial| names.binary_search(&trial.case.op.name()).expect("a kind of the registry");
    let (even, odd): (Vec<Trial>, Vec<Trial>) = trials().into_iter().partition(|trial| place(trial) % 2 == 0);
    let run = |trials: &[Trial]| Library::of(trials).map(|library| try_all(trials, &library));
    let (first, second) = std::thread::scope(|scope| {
        let first = scope.spawn(|| run(&even));
        let second = run(&odd);
        (first.join().expect("no panic"), second)
    });
    let (Some((first, mut failures)), Some((second, more))) = (first, second) else {
        return println!("skipped: no C++ compiler");
    };
    failures.extend(more);
    let tried = first + second;
    assert!(tried > 0, "no case was tried");
    assert!(failures.is_empty(), "{} of {tried} trials failed:\n{}", failures.len(), failures.join("\n"));
}

/// An offloaded optimizer runs on the host: rules of optimizers, roundings and casts of weights give the same bits there as on a GPU.
#[test]
fn rules_of_optimizers_and_casts_give_the_bits_of_the_cpu() {
    let both = |trial: &Trial| {
        let to_half = trial.outputs.iter().all(|ty| matches!(ty.dtype, DType::BF16 | DType::F16));
        let cast = trial.case.op.name() == "cast" && to_half;
        let as_is = trial.inputs.iter().all(|ty| ty.dtype == DType::F32);
        let round = trial.case.op.name() == "round_bf16";
        as_is && (cast || round || trial.case.op.is_update_rule())
    };
    let trials: Vec<Trial> = trials().into_iter().filter(both).collect();
    let Some(library) = Library::of(&trials) else {
        return println!("skipped: no C++ compiler");
    };
    assert!(trials.len() > 30, "{} trials", trials.len());
    for (at, trial) in trials.iter().enumerate() {
        // Values of every size, as gradients and second moments have them.
        let scales = [1.0, 1e-3, 3e-8, 2e-20, 7e-39, 1e15];
        for (turn, scale) in scales.iter().enumerate() {
            let value = |slot: usize, (arg, ty): (&Arg, &Type)| {
                let mut drawn = draw(arg, ty.dtype, at * 16 + slot);
                let scaled = ty.elements() > 1 && slot > 0;
                let scale = if scaled { *scale } else { 1.0 };
                drawn.data.iter_mut().for_each(|x| *x = f64::from((*x * scale) as f32));
                drawn
            };
            let args = trial.case.args.iter().zip(&trial.inputs).enumerate();
            let inputs: Vec<Dense> = args.map(|(slot, both)| value(slot, both)).collect();
            let got = Memory::of(trial, &inputs).run(&trial.calls, &library);
            let want = on_cpu(trial, &inputs);
            for (slot, (got, want)) in got.iter().zip(&want).enumerate() {
                let differ = got.iter().zip(want).position(|(a, b)| a.to_bits() != b.to_bits());
                assert_eq!(
                    differ,
                    None,
                    "{}, output {slot}, turn {turn}: {:?}",
                    trial.label,
                    differ.map(|at| (got[at], want[at]))
                );
            }
        }
    }
}

/// What the CPU's kernel makes of the same inputs.
fn on_cpu(trial: &Trial, inputs: &[Dense]) -> Vec<Vec<f64>> {
    let mut memory: Vec<Vec<u64>> =
        trial.inputs.iter().chain(&trial.outputs).map(|ty| vec![0; ty.bytes().div_ceil(8)]).collect();
    let types = trial.inputs.iter().chain(&trial.outputs);
    let buffers: Vec<Buffer> = memory
        .iter_mut()
        .zip(types)
        .map(|(words, ty)| Buffer { data: words.as_mut_ptr().cast(), ty: ty.clone() })
        .collect();
    for (buffer, input) in buffers.iter().zip(inputs) {
        input.data.iter().enumerate().for_each(|(at, value)| kolo_ops::cast::write(buffer, at, *value));
    }
    let (inputs, outputs) = buffers.split_at(trial.inputs.len());
    let team = kolo_graph::Team::solo();
    // SAFETY: every buffer has its type's bytes; these ops want no scratch.
    let mut cx = unsafe { kolo_graph::CpuCx::new(inputs, outputs, &team, (std::ptr::null_mut(), 0)) };
    kolo_ops::cpu_of(&*trial.case.op).expect("every op runs on the CPU").run(&mut cx);
    outputs.iter().map(|out| (0..out.ty.elements()).map(|at| kolo_ops::cast::read(out, at)).collect()).collect()
}

#[test]
fn compiles_for_the_gpu() {
    let Some(compiler) = nvrtc::Compiler::find() else {
        return println!("skipped: no NVRTC");
    };
    let sources: BTreeMap<String, String> = trials().iter().flat_map(|trial| library::sources(&trial.calls)).collect();
    let failures: Vec<String> = sources.values().filter_map(|text| compiler.compile(text).err()).collect();
    assert!(
        failures.is_empty(),
        "{} of {} sources do not compile:\n{}",
        failures.len(),
        sources.len(),
        failures.join("\n")
    );
}
