use super::number::{Bf16, F16, Number};
use super::*;

#[test]
fn sixteen_bit_floats_agree_with_the_definition() {
    for bits in 0..=u16::MAX {
        let half = half::f16::from_bits(bits);
        assert!(F16(bits).widen() == half.to_f32() || half.is_nan() && F16(bits).widen().is_nan(), "{bits:x}");
    }
    for step in 0..=u32::MAX / 997 {
        let value = f32::from_bits(step * 997);
        let (half, brain) = (half::f16::from_f32(value), half::bf16::from_f32(value));
        let same = |ours: u16, theirs: u16| ours == theirs || value.is_nan();
        assert!(same(F16::narrow(value).0, half.to_bits()), "{value}");
        assert!(same(Bf16::narrow(value).0, brain.to_bits()), "{value}");
        assert_eq!(F16::narrow(value).widen().is_nan(), value.is_nan());
        assert_eq!(Bf16::narrow(value).widen().is_nan(), value.is_nan());
    }
}

fn values(seed: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| ((at * 7919 + seed * 104_729) % 1_000_003) as f32 * 1.37e-3 - 500.0).collect()
}

/// Stride doubling, as the module says it.
fn doubling(mut inputs: Vec<Vec<f32>>) -> Vec<f32> {
    let mut stride = 1;
    while stride < inputs.len() {
        for at in (0..inputs.len() - stride).step_by(2 * stride) {
            let right = inputs[at + stride].clone();
            inputs[at].iter_mut().zip(&right).for_each(|(left, right)| *left += right);
        }
        stride *= 2;
    }
    inputs.swap_remove(0)
}

#[test]
fn tree_order_for_every_number_of_inputs() {
    for ranks in 1..=19 {
        for count in [0, 1, 31, 32, 33, 1024, 3001] {
            let inputs: Vec<Vec<f32>> = (0..ranks).map(|rank| values(rank, count)).collect();
            let expected = doubling(inputs.clone());
            let places: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr().cast()).collect();
            let mut out = vec![0f32; count];
            // SAFETY: all have `count` elements.
            unsafe {
                combine_tree(ElementType::F32, Reduction::Sum, &places, out.as_mut_ptr().cast(), count);
                assert_eq!(out, expected, "{ranks} ranks, {count} elements");
                // In place in each input in turn.
                for own in 0..ranks {
                    let mut own_data = inputs[own].clone();
                    let mut places = places.clone();
                    places[own] = own_data.as_ptr().cast();
                    combine_tree(ElementType::F32, Reduction::Sum, &places, own_data.as_mut_ptr().cast(), count);
                    assert_eq!(own_data, expected, "{ranks} ranks, {count} elements, in place of {own}");
                }
            }
        }
    }
}

#[test]
fn twins_are_what_a_pair_is() {
    for count in [0, 1, 31, 33, 3001] {
        let inputs = [values(0, count), values(1, count)];
        let expected = doubling(inputs.to_vec());
        let [mut left, mut right] = inputs;
        let places = [left.as_ptr().cast(), right.as_ptr().cast()];
        let into = [right.as_mut_ptr().cast(), left.as_mut_ptr().cast()];
        // SAFETY: all have `count` elements.
        unsafe { combine_twins(ElementType::F32, Reduction::Sum, &places, into, count) };
        assert!(left == expected && right == expected, "{count} elements");
    }
}

#[test]
fn narrow_integers_nan_and_mean() {
    let (left, right) = ([250u8, 3, 7], [10u8, 4, 6]);
    let mut out = [0u8; 3];
    let mut floats = [1.0f32, f32::NAN];
    let others = [f32::NAN, 2.0f32];
    let mut means = [-7i32, 7, i32::MAX];
    // SAFETY: sizes as given.
    unsafe {
        combine(ElementType::U8, Reduction::Sum, left.as_ptr(), right.as_ptr(), out.as_mut_ptr(), 3);
        assert_eq!(out, [4, 7, 13]);
        for reduction in [Reduction::Min, Reduction::Max] {
            let into = floats.as_mut_ptr().cast::<u8>();
            combine(ElementType::F32, reduction, into, others.as_ptr().cast(), into, 2);
            assert!(floats.iter().all(|value| value.is_nan()));
            floats = [1.0, f32::NAN];
        }
        divide(ElementType::I32, means.as_mut_ptr().cast(), 2, 3);
    }
    assert_eq!(means, [-3, 3, i32::MAX / 2]);
}
