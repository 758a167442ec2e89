//! Prints the rate of the matrix product at the sizes training uses.
use kolo_graph::Team;
use kolo_ops::gemm::*;
use kolo_ops::tiles::Address;
use std::time::Instant;

fn main() {
    for threads in [1, 2] {
        let team = Team::new(threads);
        for (m, n, k) in [(512, 1024, 256), (512, 256, 1024), (512, 768, 256), (256, 1024, 512), (1024, 1024, 1024), (16, 1024, 256), (64, 512, 784), (64, 1024, 576)] {
            let (a, b) = (vec![0.5f32; m * k], vec![0.25f32; k * n]);
            let mut c = vec![0.0f32; m * n];
            let mut scratch = vec![0.0; SCRATCH * threads];
            let mut best = [f64::MAX; 3];
            for _ in 0..40 {
                for (form, best) in best.iter_mut().enumerate() {
                    let a = Strided { data: &a, line_stride: if form == 2 { 1 } else { k }, k_stride: if form == 2 { m } else { 1 } };
                    let b = Strided { data: &b, line_stride: if form == 1 { k } else { 1 }, k_stride: if form == 1 { 1 } else { n } };
                    let sink = Rows { data: Address(c.as_mut_ptr()), stride: n };
                    let start = Instant::now();
                    multiply(&team, m, n, k, &a, Right::Fresh(&b), &sink, Start::Zero, &mut scratch);
                    *best = best.min(start.elapsed().as_secs_f64());
                }
            }
            let rate = |t: f64| 2.0 * (m * n * k) as f64 / t / 1e9;
            println!("{threads} threads {m}x{n}x{k}: nn {:.0}  nt {:.0}  tn {:.0} GFLOP/s", rate(best[0]), rate(best[1]), rate(best[2]));
        }
    }
}
