//! Prints the rate of the matrix product at the sizes training uses: operands that are not in the cache, one thread per
//! core, each with products of its own, as lanes run them.

use kolo_graph::Team;
use kolo_ops::gemm::*;
use kolo_ops::tiles::Address;
use std::time::Instant;

/// Sets of operands walked in turn, so that each is cold when its turn comes.
const SETS: usize = 12;

/// A cache line, so that memory starts where one does, as the executor's does.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [f32; 16]);

fn lines(len: usize, value: f32) -> Memory {
    Memory(vec![Line([value; 16]); len.div_ceil(16)])
}

struct Memory(Vec<Line>);

impl Memory {
    fn floats(&mut self) -> &mut [f32] {
        // SAFETY: a line is sixteen floats and nothing else.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 16) }
    }
}

/// Median GFLOP/s of one thread over `m × n × k` products in one of the forms nn, nt, tn.
fn rate(m: usize, n: usize, k: usize, form: usize) -> f64 {
    let team = Team::solo();
    let mut sets: Vec<_> = (0..SETS).map(|_| (lines(m * k, 0.5), lines(k * n, 0.25), lines(m * n, 0.0))).collect();
    let mut scratch = lines(SCRATCH, 0.0);
    let mut times: Vec<f64> = (0..6 * SETS)
        .map(|round| {
            let (a, b, c) = &mut sets[round % SETS];
            let [a, b, c, scratch] = [a, b, c, &mut scratch].map(|lines| lines.floats());
            let (a_line, a_k) = if form == 2 { (1, m) } else { (k, 1) };
            let (b_line, b_k) = if form == 1 { (k, 1) } else { (1, n) };
            let a = Strided { data: a, line_stride: a_line, k_stride: a_k };
            let b = Strided { data: b, line_stride: b_line, k_stride: b_k };
            let sink = Rows { data: Address(c.as_mut_ptr()), stride: n };
            let start = Instant::now();
            Gemm { shape: [m, n, k], a: &a, b: Right::Fresh(&b), c: &sink, start: Start::Zero }.run_on(&team, scratch);
            start.elapsed().as_secs_f64()
        })
        .skip(SETS)
        .collect();
    times.sort_by(f64::total_cmp);
    2.0 * (m * n * k) as f64 / times[times.len() / 2] / 1e9
}

fn main() {
    let sizes = [
        (512, 1024, 256),
        (512, 256, 1024),
        (512, 768, 256),
        (256, 1024, 512),
        (1024, 256, 512),
        (64, 512, 784),
        (512, 784, 64),
    ];
    for (m, n, k) in sizes {
        let rates: Vec<f64> = (0..3)
            .map(|form| {
                let threads: Vec<_> = (0..2).map(|_| std::thread::spawn(move || rate(m, n, k, form))).collect();
                threads.into_iter().map(|thread| thread.join().expect("a rate")).sum()
            })
            .collect();
        println!("{m}x{n}x{k} on two cores: nn {:.0}  nt {:.0}  tn {:.0} GFLOP/s", rates[0], rates[1], rates[2]);
    }
}
