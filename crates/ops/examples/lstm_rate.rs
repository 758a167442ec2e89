//! Prints the rate of one recurrent layer, forward and backward, at the sizes of the training benchmark.
use kolo_graph::cpu::{Buffer, Cpu, CpuCx};
use kolo_graph::{Team, Type};
use kolo_ops::recurrent::gru::{Gru, GruGrad};
use kolo_ops::recurrent::lstm::{Lstm, LstmGrad};
use kolo_ops::recurrent::rnn::{Rnn, RnnGrad};
use std::time::Instant;

const BATCH: usize = 16;
const STEPS: usize = 64;
const WIDTH: usize = 256;
const REPEATS: usize = 40;

/// A tensor with memory of its own.
struct Owned {
    data: Vec<f32>,
    ty: Type,
}

impl Owned {
    fn random(shape: &[usize], size: f32) -> Self {
        let ty = Type::f32(shape);
        let value = |at: usize| ((at as u32).wrapping_mul(2_654_435_761) >> 16) as f32 / 32768.0 - 1.0;
        Self { data: (0..ty.elements()).map(|at| value(at) * size).collect(), ty }
    }
    fn buffer(&self) -> Buffer {
        Buffer { data: self.data.as_ptr().cast_mut().cast(), ty: self.ty.clone() }
    }
}

/// Runs an op `REPEATS` times; its outputs and the best time in seconds.
fn time(op: &dyn Cpu, inputs: &[&Owned], team: &Team) -> (Vec<Owned>, f64) {
    let types: Vec<Type> = inputs.iter().map(|input| input.ty.clone()).collect();
    let out_types = op.infer(&types).expect("the shapes fit");
    let outputs: Vec<Owned> =
        out_types.iter().map(|ty| Owned { data: vec![0.0; ty.elements()], ty: ty.clone() }).collect();
    let bytes = op.scratch_bytes(&types, &out_types, team.threads());
    let mut scratch = vec![0.0f32; bytes / 4 + 16];
    let aligned = scratch.as_ptr().align_offset(64);
    let ins: Vec<Buffer> = inputs.iter().map(|input| input.buffer()).collect();
    let outs: Vec<Buffer> = outputs.iter().map(Owned::buffer).collect();
    let mut best = f64::MAX;
    for _ in 0..REPEATS {
        // SAFETY: every buffer has the memory of its type, and the scratch is as large as the op asked for.
        let mut cx = unsafe { CpuCx::new(&ins, &outs, team, (scratch[aligned..].as_mut_ptr().cast(), bytes)) };
        let start = Instant::now();
        op.run(&mut cx);
        best = best.min(start.elapsed().as_secs_f64());
    }
    let flops = op.flops(&types, &out_types) as f64;
    println!("  {:<10} {:6.2} ms  {:4.0} GFLOP/s", op.name(), best * 1e3, flops / best / 1e9);
    (outputs, best)
}

fn layer(forward: &dyn Cpu, backward: &dyn Cpu, gates: usize, team: &Team) {
    let rows = gates * WIDTH;
    let x = Owned::random(&[BATCH, STEPS, WIDTH], 1.0);
    let weights = [[rows, WIDTH], [rows, WIDTH]].map(|shape| Owned::random(&shape, 0.06));
    let biases = [[rows], [rows]].map(|shape| Owned::random(&shape, 0.06));
    let (saved, there) = time(forward, &[&x, &weights[0], &weights[1], &biases[0], &biases[1]], team);
    let g = Owned::random(&[BATCH, STEPS, WIDTH], 1.0);
    let mut inputs = vec![&x, &weights[0], &weights[1]];
    inputs.extend(&saved);
    inputs.push(&g);
    let (_, back) = time(backward, &inputs, team);
    let flops = 12.0 * (BATCH * STEPS * rows * WIDTH) as f64;
    println!("  together   {:6.2} ms  {:4.0} GFLOP/s", (there + back) * 1e3, flops / (there + back) / 1e9);
}

fn main() {
    for threads in [1, 2] {
        let team = Team::new(threads);
        println!("{threads} threads, batch {BATCH}, {STEPS} steps, width {WIDTH}");
        layer(&Lstm {}, &LstmGrad { need_dx: true }, 4, &team);
        layer(&Gru {}, &GruGrad { need_dx: true }, 3, &team);
        layer(&Rnn { relu: false }, &RnnGrad { relu: false, need_dx: true }, 1, &team);
    }
}
