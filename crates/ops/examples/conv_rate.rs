//! Prints the rate of each pass of a convolution at the sizes of a residual network on 32 × 32 images, on one thread.
use kolo_graph::cpu::{Buffer, CpuCx};
use kolo_graph::{Cpu, Op, Team, Type};
use kolo_ops::conv::{Conv2d, Conv2dInputGrad, Conv2dWeightGrad, Padding};

const ROUNDS: usize = 30;
/// `CLOCK_THREAD_CPUTIME_ID`.
const THREAD_CLOCK: i32 = 3;

unsafe extern "C" {
    fn clock_gettime(clock: i32, time: *mut [i64; 2]) -> i32;
}

/// Seconds this thread has computed: what others do on the same cores does not count.
fn thread_seconds() -> f64 {
    let mut time = [0; 2];
    // SAFETY: the system writes seconds and nanoseconds.
    assert_eq!(unsafe { clock_gettime(THREAD_CLOCK, &mut time) }, 0, "the system has a clock for each thread");
    time[0] as f64 + time[1] as f64 * 1e-9
}

fn buffers(types: &[Type]) -> (Vec<Vec<f32>>, Vec<Buffer>) {
    let mut data: Vec<Vec<f32>> =
        types.iter().map(|ty| (0..ty.elements()).map(|at| (at % 17) as f32 * 0.1 - 0.8).collect()).collect();
    let buffers = data
        .iter_mut()
        .zip(types)
        .map(|(data, ty)| Buffer { data: data.as_mut_ptr().cast(), ty: ty.clone() })
        .collect();
    (data, buffers)
}

/// Best GFLOP/s of many runs.
fn rate(op: &dyn Cpu, inputs: &[Type], team: &Team) -> f64 {
    let outputs = op.infer(inputs).expect("a valid shape");
    let (_keep_in, ins) = buffers(inputs);
    let (_keep_out, outs) = buffers(&outputs);
    let bytes = op.scratch_bytes(inputs, &outputs, team.threads());
    let mut scratch = vec![0u128; bytes.div_ceil(16) + 4];
    let at = scratch.as_mut_ptr().cast::<u8>();
    let at = at.wrapping_add(at.align_offset(64));
    let mut best = f64::MAX;
    for _ in 0..ROUNDS {
        let start = thread_seconds();
        // SAFETY: every buffer has its type's size and the scratch what was asked for.
        op.run(&mut unsafe { CpuCx::new(&ins, &outs, team, (at, bytes)) });
        best = best.min(thread_seconds() - start);
    }
    op.flops(inputs, &outputs) as f64 / best / 1e9
}

fn main() {
    let team = Team::new(std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(1));
    // Images, channels, side, outputs, kernel, stride.
    let shapes = [
        (16, 3, 32, 64, 3, 1),
        (16, 64, 32, 64, 3, 1),
        (16, 64, 32, 128, 3, 2),
        (16, 64, 32, 128, 1, 2),
        (16, 128, 16, 128, 3, 1),
        (16, 128, 16, 256, 3, 2),
        (16, 256, 8, 256, 3, 1),
        (16, 256, 8, 512, 3, 2),
        (16, 512, 4, 512, 3, 1),
        (16, 256, 14, 64, 1, 1),
        (16, 64, 14, 64, 3, 1),
    ];
    for (n, c, side, o, k, s) in shapes {
        let (stride, padding, dilation, groups) = ([s, s], Padding::from([k / 2, k / 2]), [1, 1], 1);
        let (x, weight) = (Type::f32([n, c, side, side]), Type::f32([o, c, k, k]));
        let forward = Conv2d { stride, padding, dilation, groups };
        let y = forward.infer(&[x.clone(), weight.clone()]).expect("a valid shape").remove(0);
        let input = Conv2dInputGrad { stride, padding, dilation, groups, height: side, width: side };
        let weights = Conv2dWeightGrad { stride, padding, dilation, groups, kernel: [k, k] };
        println!(
            "[{n},{c},{side},{side}] {k}x{k} -> {o} stride {s}: forward {:.0}  input gradient {:.0}  weight gradient {:.0} GFLOP/s",
            rate(&forward, &[x.clone(), weight.clone()], &team),
            rate(&input, &[weight, y.clone()], &team),
            rate(&weights, &[x, y], &team),
        );
    }
}
