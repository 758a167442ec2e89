//! Prints how far each pass of a convolution is from the definition in f64, relative to the largest and the mean number.
use kolo_graph::cpu::{Buffer, CpuCx};
use kolo_graph::op::Dense;
use kolo_graph::rng::Stream;
use kolo_graph::{Cpu, Op, Team, Type};
use kolo_ops::conv::{Conv2d, Conv2dInputGrad, Conv2dWeightGrad, Padding};

fn error(op: &dyn Cpu, inputs: &[Type], team: &Team) -> String {
    let outputs = op.infer(inputs).expect("a valid shape");
    let stream = Stream::new(1, "error");
    let mut data: Vec<Vec<f32>> = inputs
        .iter()
        .chain(&outputs)
        .enumerate()
        .map(|(which, ty)| (0..ty.elements()).map(|at| stream.uniform(which as u64, at as u64) * 2.0 - 1.0).collect())
        .collect();
    let buffers: Vec<Buffer> = data
        .iter_mut()
        .zip(inputs.iter().chain(&outputs))
        .map(|(data, ty)| Buffer { data: data.as_mut_ptr().cast(), ty: ty.clone() })
        .collect();
    let bytes = op.scratch_bytes(inputs, &outputs, team.threads());
    let mut scratch = vec![0u128; bytes.div_ceil(16) + 4];
    let at = scratch.as_mut_ptr().cast::<u8>();
    let at = at.wrapping_add(at.align_offset(64));
    let (ins, outs) = buffers.split_at(inputs.len());
    // SAFETY: every buffer has its type's size and the scratch what was asked for.
    op.run(&mut unsafe { CpuCx::new(ins, outs, team, (at, bytes)) });
    let dense: Vec<Dense> = inputs
        .iter()
        .zip(&data)
        .map(|(ty, data)| Dense::new(ty.shape.clone(), data.iter().map(|x| f64::from(*x)).collect()))
        .collect();
    let refs: Vec<&Dense> = dense.iter().collect();
    let want = op.reference(&refs, &outputs).remove(0);
    let got = &data[inputs.len()];
    let differences: Vec<f64> = want.data.iter().zip(got).map(|(want, got)| want - f64::from(*got)).collect();
    let largest = |x: &[f64]| x.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
    format!(
        "{:.1e} largest, {:.1e} mean",
        largest(&differences) / largest(&want.data),
        rms(&differences) / rms(&want.data)
    )
}

fn main() {
    let team = Team::new(1);
    for (n, c, side, o, p) in [
        (4, 3, 32, 64, 1),
        (4, 64, 32, 64, 1),
        (4, 128, 16, 128, 1),
        (4, 256, 8, 256, 1),
        (4, 512, 4, 512, 1),
        (8, 16, 8, 32, 1),
    ] {
        let (stride, padding, dilation, groups) = ([1, 1], Padding::from([p, p]), [1, 1], 1);
        let (x, weight) = (Type::f32([n, c, side, side]), Type::f32([o, c, 3, 3]));
        let forward = Conv2d { stride, padding, dilation, groups };
        let y = forward.infer(&[x.clone(), weight.clone()]).expect("a valid shape").remove(0);
        let input = Conv2dInputGrad { stride, padding, dilation, groups, height: side, width: side };
        let weights = Conv2dWeightGrad { stride, padding, dilation, groups, kernel: [3, 3] };
        println!(
            "[{n},{c},{side},{side}] -> {o}: forward {}; input gradient {}; weight gradient {}",
            error(&forward, &[x.clone(), weight.clone()], &team),
            error(&input, &[weight, y.clone()], &team),
            error(&weights, &[x, y], &team),
        );
    }
}
