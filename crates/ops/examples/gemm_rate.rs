//! Prints the rate of the matrix product at the sizes training uses: operands that are not in the cache, one thread per
//! core, each with products of its own, as lanes run them. f32 and bf16 take turns, so that their ratio means something on a busy
//! machine too.

use kolo_graph::cpu::Buffer;
use kolo_graph::{DType, Team, Type};
use kolo_ops::gemm::*;
use std::time::Instant;

/// Sets of operands walked in turn, so that each is cold when its turn comes.
const SETS: usize = 12;

/// A cache line, so that memory starts where one does, as the executor's does.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [u32; 16]);

/// Memory whose every 16 bits are 0x3f00: 0.5 as bf16, and about that as f32.
fn lines(len: usize) -> Vec<Line> {
    vec![Line([0x3f00_3f00; 16]); len.div_ceil(16)]
}

struct Operands {
    a: Vec<Line>,
    b: Vec<Line>,
    c: Vec<Line>,
}

/// Seconds of a product `m × n × k` in one of the forms nn, nt, tn on operands of this type.
fn seconds(dtype: DType, [m, n, k]: [usize; 3], form: usize, set: &mut Operands, scratch: &mut [f32]) -> f64 {
    let buffer = |lines: &mut Vec<Line>, rows, columns| Buffer {
        data: lines.as_mut_ptr().cast(),
        ty: Type::new(dtype, [rows, columns]),
    };
    let (a, b, c) = (buffer(&mut set.a, m, k), buffer(&mut set.b, k, n), buffer(&mut set.c, m, n));
    let (a_line, a_k) = if form == 2 { (1, m) } else { (k, 1) };
    let (b_line, b_k) = if form == 1 { (k, 1) } else { (1, n) };
    let (a, b) = (Lines::of(&a, 0, m * k, a_line, a_k), Lines::of(&b, 0, k * n, b_line, b_k));
    let sink = Output::of(&c, 0, n);
    let start = Instant::now();
    Gemm { shape: [m, n, k], a: &a, b: Right::Fresh(&b), c: &sink, start: Start::Zero }.run_on(&Team::solo(), scratch);
    start.elapsed().as_secs_f64()
}

/// Median GFLOP/s of one thread, in f32 and in bf16.
fn rates(shape: [usize; 3], form: usize) -> [f64; 2] {
    let [m, n, k] = shape;
    let mut sets: Vec<_> = (0..SETS).map(|_| Operands { a: lines(m * k), b: lines(k * n), c: lines(m * n) }).collect();
    let mut scratch = vec![0.0; scratch_bytes_of(DType::BF16, 0, 1) / 4];
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..6 * SETS {
        for (dtype, times) in [DType::F32, DType::BF16].into_iter().zip(&mut times) {
            times.push(seconds(dtype, shape, form, &mut sets[round % SETS], &mut scratch));
        }
    }
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        2.0 * (m * n * k) as f64 / times[times.len() / 2] / 1e9
    })
}

fn main() {
    let sizes = [
        [512, 1024, 256],
        [512, 256, 1024],
        [512, 768, 256],
        [256, 1024, 512],
        [1024, 256, 512],
        [64, 512, 784],
        [512, 784, 64],
    ];
    println!("GFLOP/s on two cores, f32 and bf16:");
    for shape in sizes {
        let forms: Vec<String> = ["nn", "nt", "tn"]
            .iter()
            .enumerate()
            .map(|(form, name)| {
                let threads: Vec<_> = (0..2).map(|_| std::thread::spawn(move || rates(shape, form))).collect();
                let [full, half] = threads.into_iter().fold([0.0; 2], |[full, half], thread| {
                    let [one, other] = thread.join().expect("rates");
                    [full + one, half + other]
                });
                format!("{name} {full:.0} {half:.0}")
            })
            .collect();
        println!("{:>4}x{:>4}x{:>4}: {}", shape[0], shape[1], shape[2], forms.join("   "));
    }
}
