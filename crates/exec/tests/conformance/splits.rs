//! Every split of every case, in two and three parts on a simulated mesh: inputs are cut as the split says, each part runs
//! its own op, and the outputs put together are those of the whole op.
//!
//! What is sharded or replicated has the whole's bits; sums of partial outputs are compared with the definition, or where
//! that is slow with the whole kernel, which another test compares with it.

use super::{assert_close, computed, defined, for_each_case, numbers};
use kolo_graph::op::{Case, Dense};
use kolo_graph::{DType, Placement, Split, Type, checked_types};

/// FLOPs of a case whose parts are run by the definition too, which is slow.
const DEFINED_FLOPS_MAX: u64 = 300_000;

/// Which units each part takes.
type Deal = Vec<Vec<usize>>;

/// In runs as even as possible, and one by one in turn: which units a part takes must not matter.
fn deals(split: &Split, ways: usize) -> Vec<Deal> {
    let size = split.size;
    let runs: Deal = (0..ways).map(|part| (part * size / ways..(part + 1) * size / ways).collect()).collect();
    let turns: Deal = (0..ways).map(|part| (part..size).step_by(ways).collect()).collect();
    match size {
        0 => Vec::new(),
        size if size > ways && !split.ordered => vec![runs, turns],
        _ => vec![runs],
    }
}

/// The places along a dim of `extent` that belong to some units, in order.
fn places(extent: usize, blocks: usize, size: usize, units: &[usize]) -> Vec<usize> {
    let width = extent / (blocks * size);
    let starts = (0..blocks).flat_map(|block| units.iter().map(move |unit| (block * size + unit) * width));
    starts.flat_map(|start| start..start + width).collect()
}

/// What one part has of an input.
fn cut(input: &Dense, placement: Placement, split: &Split, units: &[usize], (part, ways): (usize, usize)) -> Dense {
    if placement == Placement::Partial {
        // A half, a quarter, …, and the last once more: their sum has no rounding.
        let share = 0.5f64.powi((part + 1).min(ways - 1) as i32);
        return Dense::new(input.shape.clone(), input.data.iter().map(|x| x * share).collect());
    }
    let (dim, places) = match (placement, placement.cut()) {
        // What the units, a run, reach of it.
        (Placement::Halo(dim), _) => (dim, reached(split, units)),
        (_, Some((dim, blocks))) => (dim, places(input.shape[dim], blocks, split.size, units)),
        _ => return input.clone(),
    };
    let mut shape = input.shape.clone();
    shape[dim] = places.len();
    Dense::from_fn(shape, |at| {
        let mut at = at.to_vec();
        at[dim] = places[at[dim]];
        input.data[offset(&input.shape, &at)]
    })
}

/// The places that a run of units reads of an input with a halo.
fn reached(split: &Split, units: &[usize]) -> Vec<usize> {
    let first = units.first().copied().unwrap_or(0);
    split.reach.expect("a split with halos says what they are").range(&(first..first + units.len())).collect()
}

fn offset(shape: &[usize], at: &[usize]) -> usize {
    shape.iter().zip(at).fold(0, |offset, (size, at)| offset * size + at)
}

/// The parts' outputs as one tensor.
fn join(parts: &[Vec<f64>], shape: &[usize], placement: Placement, split: &Split, deal: &Deal) -> Vec<f64> {
    let count: usize = shape.iter().product();
    let Some((dim, blocks)) = placement.cut() else {
        return (0..count).map(|at| parts.iter().map(|part| part[at]).sum()).collect();
    };
    let mut whole = vec![f64::NAN; count];
    for (values, units) in parts.iter().zip(deal) {
        let places = places(shape[dim], blocks, split.size, units);
        let mut part = shape.to_vec();
        part[dim] = places.len();
        assert_eq!(values.len(), part.iter().product::<usize>(), "elements of a part");
        let mut at = vec![0; shape.len()];
        for value in values {
            let here = std::mem::replace(&mut at[dim], 0);
            at[dim] = places[here];
            whole[offset(shape, &at)] = *value;
            at[dim] = here;
            kolo_graph::op::advance(&mut at, &part);
        }
    }
    whole
}

fn types_of(case: &Case) -> Vec<Type> {
    case.args.iter().map(|arg| arg.ty.clone()).collect()
}

/// The case of each part, with its inputs; `None` if a part is empty and the op refuses that.
fn parts_of(case: &Case, inputs: &[Dense], split: &Split, deal: &Deal) -> Option<Vec<(Case, Vec<Dense>)>> {
    let outputs = checked_types(&*case.op, &types_of(case)).unwrap();
    let part = |(part, units): (usize, &Vec<usize>)| {
        let ranked = (part, deal.len());
        let own: Vec<Dense> =
            inputs.iter().zip(&split.inputs).map(|(x, placement)| cut(x, *placement, split, units, ranked)).collect();
        let mut small =
            Case { op: split.part(&case.op, units.first().copied().unwrap_or(0), units.len()), ..case.clone() };
        for ((arg, input), placement) in small.args.iter_mut().zip(&own).zip(&split.inputs) {
            if !matches!(placement, Placement::Halo(_)) {
                let expected = split.part_shape(*placement, &arg.ty.shape, units.len());
                assert_eq!(expected, input.shape, "part_shape of an input");
            }
            arg.ty.shape = input.shape.clone();
        }
        match checked_types(&*small.op, &types_of(&small)) {
            Ok(types) => {
                let shape = |(ty, placement): (&Type, &Placement)| split.part_shape(*placement, &ty.shape, units.len());
                let expected: Vec<_> = outputs.iter().zip(&split.outputs).map(shape).collect();
                assert_eq!(types.iter().map(|ty| ty.shape.clone()).collect::<Vec<_>>(), expected, "outputs of a part");
                Some((small, own))
            }
            Err(_) if units.is_empty() => None,
            Err(error) => panic!("a part of {} units is refused: {error}", units.len()),
        }
    };
    deal.iter().enumerate().map(part).collect()
}

/// A kernel's results against the whole kernel's, or for partial sums the definition's.
fn compare(case: &Case, split: &Split, deal: &Deal, parts: &[(Case, Vec<Dense>)], whole: &Whole) {
    let made: Vec<Vec<(Type, Vec<u8>)>> = parts.iter().map(|(case, inputs)| computed(case, inputs, 1)).collect();
    for (slot, placement) in split.outputs.iter().enumerate() {
        let (ty, bytes) = &whole.kernel[slot];
        let values: Vec<Vec<f64>> = made.iter().map(|outputs| numbers(&outputs[slot])).collect();
        let what = format!("output {slot}");
        let tolerance = match ty.dtype {
            DType::BF16 => 1e-2,
            DType::F16 => 1e-3,
            _ => case.tolerance,
        };
        match placement {
            Placement::Replicate => made.iter().for_each(|outputs| assert_eq!(outputs[slot].1, *bytes, "{what}")),
            Placement::Partial => {
                let sum = join(&values, &ty.shape, *placement, split, deal);
                let expected = match &whole.defined {
                    Some(defined) => defined[slot].data.clone(),
                    None => numbers(&whole.kernel[slot]),
                };
                assert_close(&sum, &expected, tolerance, &what);
            }
            _ => {
                let joined = join(&values, &ty.shape, *placement, split, deal);
                let expected = numbers(&whole.kernel[slot]);
                let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                if split.exact {
                    let differs = bits(&joined).iter().zip(&bits(&expected)).position(|(a, b)| a != b);
                    assert!(differs.is_none(), "{what}: other bits at {differs:?}");
                } else {
                    assert_close(&joined, &expected, tolerance, &what);
                }
            }
        }
    }
}

/// The definition in parts against the definition.
fn compare_definition(split: &Split, deal: &Deal, parts: &[(Case, Vec<Dense>)], whole: &[Dense]) {
    let made: Vec<Vec<Dense>> = parts.iter().map(|(case, inputs)| defined(case, inputs)).collect();
    for (slot, (placement, whole)) in split.outputs.iter().zip(whole).enumerate() {
        let mut values: Vec<Vec<f64>> = made.iter().map(|outputs| outputs[slot].data.clone()).collect();
        if *placement == Placement::Replicate {
            values.truncate(1);
        }
        let joined = join(&values, &whole.shape, *placement, split, deal);
        assert_close(&joined, &whole.data, 1e-12, &format!("output {slot} of the definition"));
    }
}

struct Whole {
    kernel: Vec<(Type, Vec<u8>)>,
    /// Unless it would take long.
    defined: Option<Vec<Dense>>,
}

/// A split must fit the operands it speaks of.
fn check(split: &Split, inputs: &[Type], outputs: &[Type]) {
    let sides = [(&split.inputs, inputs), (&split.outputs, outputs)];
    for (placements, types) in sides {
        assert_eq!(placements.len(), types.len(), "placements");
        let halos = placements.iter().zip(types).filter_map(|(placement, ty)| match placement {
            Placement::Halo(dim) => Some(ty.shape[*dim]),
            _ => None,
        });
        halos.for_each(|extent| assert_eq!(split.reach.map(|reach| reach.extent), Some(extent), "places of a halo"));
        for (dim, blocks, extent) in
            placements.iter().zip(types).filter_map(|(p, ty)| p.cut().map(|(dim, blocks)| (dim, blocks, ty.shape[dim])))
        {
            let unit = blocks * split.size;
            assert!(if unit == 0 { extent == 0 } else { extent.is_multiple_of(unit) }, "dim {dim} is {extent}");
        }
    }
    assert!(split.outputs.iter().any(|placement| *placement != Placement::Replicate), "nothing is split");
}

#[test]
fn parts_of_every_split_make_the_whole() {
    for_each_case(|_, case, inputs| {
        let types = types_of(case);
        let outputs = checked_types(&*case.op, &types).unwrap();
        let splits = case.op.splits(&types, &outputs);
        let small = case.op.flops(&types, &outputs) <= DEFINED_FLOPS_MAX;
        let whole = Whole { kernel: computed(case, inputs, 1), defined: small.then(|| defined(case, inputs)) };
        for (at, split) in splits.iter().enumerate() {
            assert!(splits[..at].iter().all(|other| other.axis != split.axis), "two splits called {}", split.axis);
            check(split, &types, &outputs);
            for deal in [2, 3].into_iter().flat_map(|ways| deals(split, ways)) {
                let attempt = || {
                    let Some(parts) = parts_of(case, inputs, split, &deal) else { return };
                    compare(case, split, &deal, &parts, &whole);
                    if let Some(defined) = &whole.defined {
                        compare_definition(split, &deal, &parts, defined);
                    }
                };
                let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(attempt));
                if let Err(panic) = outcome {
                    let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                    panic!("split {split}, units {deal:?}: {text}");
                }
            }
        }
    });
}

/// An op that has no split in any of its cases says why, and only such a one does.
#[test]
fn an_op_without_splits_says_why() {
    for kind in kolo_ops::registry() {
        let cases = (kind.cases)();
        let splits = |case: &Case| {
            let types = types_of(case);
            case.op.splits(&types, &checked_types(&*case.op, &types).unwrap()).len()
        };
        let (count, reason) =
            (cases.iter().map(splits).sum::<usize>(), cases.iter().find_map(|case| case.op.unsplittable()));
        assert!(cases.is_empty() || (count == 0) == reason.is_some(), "{}: {count} splits, {reason:?}", kind.name);
    }
}

/// A part's results of one op, from the units of the split along `axis` that it takes.
fn run_part(case: &Case, axis: &str, inputs: &[Dense], units: &[usize], ranked: (usize, usize)) -> Vec<Vec<f64>> {
    let types = types_of(case);
    let splits = case.op.splits(&types, &checked_types(&*case.op, &types).unwrap());
    let split = splits.iter().find(|split| split.axis == axis).unwrap();
    let mut small = Case { op: split.part(&case.op, units.first().copied().unwrap_or(0), units.len()), ..case.clone() };
    // What an earlier part made is cut already.
    let own: Vec<Dense> = inputs
        .iter()
        .zip(&split.inputs)
        .zip(&types)
        .map(|((x, placement), ty)| match x.shape == ty.shape {
            true => cut(x, *placement, split, units, ranked),
            false => x.clone(),
        })
        .collect();
    small.args.iter_mut().zip(&own).for_each(|(arg, x)| arg.ty.shape = x.shape.clone());
    computed(&small, &own, 1).iter().map(numbers).collect()
}

/// Splits fit each other: heads of an attention are columns of the layer before, in three blocks, and summed columns of the
/// layer after. Each part runs all three ops with nothing exchanged, and their sum is the whole.
#[test]
fn heads_go_through_the_layers_around_an_attention() {
    let _shared = super::WIDTH.read().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (time, width, heads) = (5, 12, 3);
    let real = |shape: &[usize]| kolo_graph::Arg::real(shape);
    let linear = || kolo_ops::matmul::Linear::new(true);
    let attention = kolo_ops::attention::Attention {
        heads,
        causal: true,
        packed: true,
        bias: false,
        align: kolo_ops::attention::Alignment::BottomRight,
    };
    let cases = [
        Case::new(linear(), [real(&[2, time, width]), real(&[3 * width, width]), real(&[3 * width])]),
        Case::new(attention, [real(&[2, time, 3 * width])]),
        Case::new(linear(), [real(&[2, time, width]), real(&[width, width]), real(&[width])]),
    ];
    let drawn = |case: usize, arg: usize| super::draw(&cases[case].args[arg], case * 16 + arg);
    let after = |case: usize, before: Dense| {
        [vec![before], (1..cases[case].args.len()).map(|arg| drawn(case, arg)).collect()].concat()
    };
    let whole = cases.iter().enumerate().fold(drawn(0, 0), |x, (at, case)| {
        let made = computed(case, &after(at, x), 1).swap_remove(0);
        Dense::new(made.0.shape.clone(), numbers(&made))
    });
    for deal in [2, 3].into_iter().flat_map(|ways| deals(&Split::new("heads", heads, [], []), ways)) {
        let mut sum = vec![0.0; whole.data.len()];
        for (part, units) in deal.iter().enumerate() {
            let ranked = (part, deal.len());
            let columns = places(3 * width, 3, heads, units);
            let made = run_part(&cases[0], "n", &after(0, drawn(0, 0)), &columns, ranked).swap_remove(0);
            let packed = Dense::new([2, time, columns.len()], made);
            let made = run_part(&cases[1], "heads", &[packed], units, ranked).swap_remove(0);
            let columns = places(width, 1, heads, units);
            let attended = Dense::new([2, time, columns.len()], made);
            let made = run_part(&cases[2], "k", &after(2, attended), &columns, ranked).swap_remove(0);
            sum.iter_mut().zip(made).for_each(|(sum, x)| *sum += x);
        }
        assert_close(&sum, &whole.data, 2e-5, &format!("heads {deal:?}"));
    }
}

/// Maxima remember their taps, and gradients find them again strip by strip: the halo of a backward pass has every window over
/// a place of the strip. (The taps in the cases of `max_pool2d_grad` are drawn, and some are in the padding.)
#[test]
fn gradients_find_the_maxima_of_their_strip() {
    let _shared = super::WIDTH.read().unwrap_or_else(std::sync::PoisonError::into_inner);
    for (size, kernel, stride, padding, ceil_mode) in [
        ([9, 8], [3, 3], [2, 2], [1, 1], false),
        ([10, 7], [3, 2], [2, 3], [0, 1], true),
        ([7, 9], [5, 4], [1, 1], [2, 2], false),
        ([8, 8], [1, 2], [3, 2], [0, 0], false),
    ] {
        let (rows, columns) = (Vec::new(), Vec::new());
        let pool = kolo_ops::max_pool::MaxPool2d { kernel, stride, padding, ceil_mode, rows, columns };
        let image = kolo_graph::Arg::spread([2, 3, size[0], size[1]]);
        let pooled = computed(&Case::new(pool, [image.clone()]), &[super::draw(&image, 1)], 1);
        let shape = pooled[1].0.shape.clone();
        let (rows, columns) = (Vec::new(), Vec::new());
        let backward = kolo_ops::max_pool::MaxPool2dGrad { kernel, stride, padding, size, ceil_mode, rows, columns };
        let gradient = kolo_graph::Arg::real(shape.clone());
        let taps = kolo_graph::Arg::byte(shape.clone(), 0, (kernel[0] * kernel[1]) as i64);
        let case = Case::new(backward, [taps, gradient.clone()]);
        let inputs = [Dense::new(shape, numbers(&pooled[1])), super::draw(&gradient, 2)];
        let whole = Whole { kernel: computed(&case, &inputs, 1), defined: None };
        let splits = case.op.splits(&types_of(&case), &checked_types(&*case.op, &types_of(&case)).unwrap());
        let strips: Vec<&Split> = splits.iter().filter(|split| split.reach.is_some()).collect();
        assert_eq!(strips.len(), 2, "rows and columns");
        for (split, ways) in strips.into_iter().flat_map(|split| [2, 3].map(|ways| (split, ways))) {
            for deal in deals(split, ways) {
                let parts = parts_of(&case, &inputs, split, &deal).unwrap();
                compare(&case, split, &deal, &parts, &whole);
            }
        }
    }
}
