//! Weights rounded to bf16 after their update, up or down by chance, so that what a rounding loses others win.
//!
//! A value between two neighbours of bf16 becomes the upper one as often as it is nearer to it: the mean over all draws is the value
//! itself, and small steps are not lost. The draw is a function of (seed, parameter, step, element of the whole tensor) and
//! nothing else: a shard, a piece or another device draws the same. A value of bf16 stays as it is.

use crate::device;
use crate::tiles::Address;
use kolo_graph::collective::{AfterGrains, Barrier};
use kolo_graph::cuda::{Cuda, CudaArg, CudaCalls, CudaCx, Launch};
use kolo_graph::piece::Piece;
use kolo_graph::region::Region;
use kolo_graph::rewrite::Rebuild;
use kolo_graph::rng::Stream;
use kolo_graph::sources::{Input, InputRole, Param};
use kolo_graph::{
    Arg, Case, Cases, Cpu, CpuCx, CudaSource, Dense, Domain, Graph, Op, Operand, Operands, Stage, Type, ValueId, op,
};
use std::sync::Arc;

op! {
    /// Rounds f32 values to neighbouring ones of bf16 by chance, where they are. The second input is the number of the step; `key` is that of
    /// the parameter's random numbers, and these are the elements of it that `region` says, as a parameter does.
    pub struct RoundBf16 = "round_bf16" { key: i64, region: Vec<usize> = Vec::new() }
}

/// Elements of one task, and words drawn at a time.
const ELEMENTS_PER_TASK: usize = 16 * 1024;
const WORDS: usize = 256;
/// Elements that share a counter.
const QUAD: usize = 4;

/// The bits of f32 that bf16 has not.
const CUT: u32 = 0xffff;
const EXPONENT: u32 = 0x7f80_0000;
const MANTISSA: u32 = 0x007f_ffff;
const QUIET: u32 = 0x0040_0000;

/// A neighbour of bf16, by 16 random bits.
#[inline(always)]
fn rounded(value: f32, word: u32) -> f32 {
    let bits = value.to_bits();
    let finite = bits.wrapping_add(word & CUT) & !CUT;
    // NaN stays NaN, whatever bits it is cut to.
    let special = bits & !CUT | if bits & MANTISSA == 0 { 0 } else { QUIET };
    f32::from_bits(if bits & EXPONENT == EXPONENT { special } else { finite })
}

impl RoundBf16 {
    /// For all of a parameter, or for these elements of it.
    pub fn new(seed: u64, name: &str, region: Region) -> Self {
        let key = Stream::new(seed, &format!("rounding.{name}")).key() as i64;
        Self { key, region: region.to_numbers() }
    }

    /// The same from one of its elements on.
    pub fn skip(&self, elements: usize) -> Self {
        Self { region: self.region().skip(elements).to_numbers(), ..self.clone() }
    }

    fn region(&self) -> Region {
        Region::from_numbers(&self.region)
    }

    fn stream(&self) -> Stream {
        Stream::from_key([self.key as u32, (self.key >> 32) as u32])
    }
}

impl Op for RoundBf16 {
    fn operands(&self) -> Operands {
        Operands::without_rules([Operand::f32("value"), Operand::f32("step")], &["value"])
    }
    fn unsplittable(&self) -> Option<&'static str> {
        Some("it counts elements of a parameter, and is placed after everything else")
    }
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
        match inputs[1].elements() {
            1 => Ok(vec![inputs[0].clone()]),
            _ => Err(format!("the step is one number, not {}", inputs[1])),
        }
    }
    /// Ten rounds of Philox make four words.
    fn flops(&self, inputs: &[Type], _: &[Type]) -> u64 {
        inputs[0].elements() as u64 * 20
    }
    fn reference(&self, inputs: &[&Dense], outputs: &[Type]) -> Vec<Dense> {
        let (stream, step) = (self.stream(), inputs[1].data[0] as u64);
        let word = |place: usize| stream.block(step, (place / QUAD) as u64)[place % QUAD];
        let elements = self.region().runs(0..inputs[0].data.len());
        let places = elements.flat_map(|(_, place, len)| place..place + len);
        let values = inputs[0].data.iter().zip(places);
        let made = values.map(|(value, place)| f64::from(rounded(*value as f32, word(place))));
        vec![Dense::new(outputs[0].shape.clone(), made.collect())]
    }
    fn aliases(&self) -> bool {
        true
    }
    fn changes_input(&self) -> bool {
        true
    }
}

impl Cpu for RoundBf16 {
    fn run(&self, cx: &mut CpuCx<'_>) {
        let (region, stream, step) = (self.region(), self.stream(), cx.f32(1)[0] as u64);
        let [from, to] = [&cx.inputs[0], &cx.outputs[0]].map(|buffer| Address(buffer.data.cast()));
        cx.team.chunks(cx.outputs[0].ty.elements(), ELEMENTS_PER_TASK, |range, _| {
            for (local, place, len) in region.runs(range) {
                let mut done = 0;
                while done < len {
                    let (at, before) = (local + done, (place + done) % QUAD);
                    let count = (WORDS - before).min(len - done);
                    let mut words = [0; WORDS];
                    stream.fill_words(step, ((place + done) / QUAD) as u64, &mut words[..before + count]);
                    for (offset, word) in words[before..before + count].iter().enumerate() {
                        // SAFETY: both hold all elements, tasks own disjoint ranges of them, and each is read before it is written.
                        unsafe { *to.get().add(at + offset) = rounded(*from.get().add(at + offset), *word) };
                    }
                    done += count;
                }
            }
        });
    }
}

impl Cuda for RoundBf16 {
    fn calls(&self, cx: &CudaCx<'_>) -> CudaCalls {
        let Region { start, run, stride, first } = self.region();
        let count = cx.outputs[0].elements();
        let sizes = [count, start, run.min(i64::MAX as usize), stride, first].map(device::long);
        let operands = [device::input(0), device::input(1), device::output(0), CudaArg::I64(self.key)];
        let args = [&operands[..], &sizes].concat();
        let grid = device::grid(count.div_ceil(QUAD), device::THREADS);
        Launch::new(CudaSource::new(include_str!("round.cu")), "round_bf16", grid, device::THREADS, args).into()
    }
}

impl Cases for RoundBf16 {
    fn cases() -> Vec<Case> {
        let case = |region: Region, shape: &[usize]| {
            let step = Arg { domain: Domain::Index(1, 40), ..Arg::real([]) };
            let op = RoundBf16::new(3, "weight", region);
            Case::new(op, [Arg::real(shape).constant(), step.constant()])
        };
        let columns = Region::of_dim(&[7, 9], 1, 1, &(2..5));
        vec![
            case(Region::from(0), &[]),
            case(Region::from(0), &[3, 5]),
            case(Region::from(6), &[4, 259]),
            case(columns, &[7, 3]),
            case(columns.skip(4), &[11]),
            case(Region::from(0), &[40_003]),
        ]
    }
}

/// Rounds every parameter that an optimizer updates. It is the last of all rewrites: whatever part of a parameter a rank updates, its
/// update reads it, and so says which. An error names what is updated and is no parameter.
pub fn round_weights(graph: &Graph, seed: u64) -> Result<Graph, String> {
    let mut rebuild = Rebuild::new(graph);
    let known = graph.inputs().find(|(_, input)| input.role == InputRole::StepNumber).map(|(id, _)| id);
    let mut own = None;
    for node in &graph.nodes {
        rebuild.copy(node);
        let outputs = node.op.operands().outputs;
        let updated = outputs.iter().position(|output| output.name == "param");
        let Some(slot) = updated.filter(|_| node.op.is_update_rule()) else { continue };
        let op = RoundBf16::for_update(graph, node.inputs[0], seed)?;
        let step = match known {
            Some(known) => rebuild.get(known),
            None => *own.get_or_insert_with(|| push_step(&mut rebuild.new)),
        };
        let (value, ty) = (rebuild.get(node.outputs[slot]), graph.ty(node.outputs[slot]).clone());
        let round = rebuild.new.push_typed(Arc::new(op), vec![value, step], vec![ty], node.scope.clone(), node.stage);
        rebuild.new.set_segment(round, node.segment);
        let output = rebuild.new.node(round).outputs[0];
        rebuild.set(node.outputs[slot], output);
    }
    Ok(rebuild.finish())
}

fn push_step(new: &mut Graph) -> ValueId {
    let role = InputRole::StepNumber;
    let op = Input { name: "step".into(), dtype: kolo_graph::DType::F32, shape: Vec::new(), per_step: true, role };
    let id = new.push_typed(Arc::new(op), Vec::new(), vec![Type::f32([])], "".into(), Stage::Update);
    new.node(id).outputs[0]
}

impl RoundBf16 {
    /// For what an update reads: a parameter, or a piece of one.
    fn for_update(graph: &Graph, mut read: ValueId, seed: u64) -> Result<Self, String> {
        let mut start = 0;
        loop {
            let maker = graph.maker(read);
            let slot = if maker.op.view() {
                start += maker.op.downcast::<Piece>().map_or(0, |piece| piece.start);
                Some(0)
            } else if maker.op.downcast::<Barrier>().is_some() || maker.op.downcast::<AfterGrains>().is_some() {
                // What waits for others is what went in.
                maker.outputs.iter().position(|output| *output == read)
            } else {
                None
            };
            let Some(input) = slot.and_then(|slot| maker.inputs.get(slot)) else { break };
            read = *input;
        }
        match graph.maker(read).op.downcast::<Param>() {
            Some(param) => Ok(Self::new(seed, &param.name, param.region().skip(start))),
            None => Err(format!("an update of what `{}` makes", graph.maker(read).op.name())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::Team;
    use kolo_graph::cpu::Buffer;

    fn run(op: &RoundBf16, step: f32, values: &[f32]) -> Vec<f32> {
        let (mut data, mut step) = (values.to_vec(), step);
        let whole = Buffer { data: data.as_mut_ptr().cast(), ty: Type::f32([values.len()]) };
        let step = Buffer { data: std::ptr::from_mut(&mut step).cast(), ty: Type::f32([]) };
        let (inputs, outputs, team) = ([whole.clone(), step], [whole], Team::solo());
        // SAFETY: buffers of their types that nobody else uses; the op wants no scratch.
        let mut cx = unsafe { CpuCx::new(&inputs, &outputs, &team, (std::ptr::null_mut(), 0)) };
        op.run(&mut cx);
        data
    }

    /// The mean of many draws is the value: the deviation of n draws is at most half a gap over the root of n.
    #[test]
    fn rounding_has_the_value_as_its_mean() {
        const DRAWS: usize = 40_000;
        for value in [1.0 + 1.0 / 1024.0, -3.000_1, 1e-3, 6.02e23, -2.7e-39, 0.333_333_34f32] {
            let below = f32::from_bits(value.to_bits() & !CUT);
            let gap = f32::from_bits((value.to_bits() & !CUT) + CUT + 1) - below;
            let made = run(&RoundBf16::new(7, "w", Region::from(0)), 5.0, &vec![value; DRAWS]);
            assert!(made.iter().all(|one| *one == below || *one == below + gap), "{value}: a neighbour");
            let mean = made.iter().map(|one| f64::from(*one)).sum::<f64>() / DRAWS as f64;
            let limit = 5.0 * f64::from(gap.abs()) * 0.5 / (DRAWS as f64).sqrt();
            assert!((mean - f64::from(value)).abs() < limit, "{value}: the mean is {mean}");
        }
    }

    /// Of one element over many steps, too.
    #[test]
    fn draws_of_different_steps_are_apart() {
        let value = 1.0f32 + 0.25 / 128.0;
        let op = RoundBf16::new(7, "w", Region::from(11));
        let ups = (1..=4000).filter(|step| run(&op, *step as f32, &[value])[0] > 1.0).count();
        assert!((900..1100).contains(&ups), "{ups} of 4000 for a quarter");
    }

    #[test]
    fn what_bf16_has_stays_as_it_is() {
        let kept = [0.0, -0.0, 1.5, -2.0, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x0001_0000), 3.0e38];
        let values: Vec<f32> = kept.iter().map(|value| f32::from_bits(value.to_bits() & !CUT)).collect();
        let op = RoundBf16::new(1, "w", Region::from(0));
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        (1..50).for_each(|step| assert_eq!(bits(&run(&op, step as f32, &values)), bits(&values)));
        let nans = run(&op, 1.0, &[f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xff80_ffff)]);
        assert!(nans.iter().all(|value| value.is_nan()), "{nans:?}");
    }

    #[test]
    fn pieces_and_shards_are_rounded_as_the_whole() {
        let values: Vec<f32> = (0..2000).map(|at| (at as f32 * 0.37).sin()).collect();
        let op = RoundBf16::new(2, "w", Region::from(0));
        let whole = run(&op, 9.0, &values);
        for start in [1, 4, 255, 1023] {
            assert_eq!(run(&op.skip(start), 9.0, &values[start..]), whole[start..], "from {start} on");
        }
        let region = Region::of_dim(&[40, 50], 1, 1, &(7..20));
        let picked = |from: &[f32]| -> Vec<f32> {
            region.runs(0..40 * 13).flat_map(|(_, place, len)| from[place..place + len].to_vec()).collect()
        };
        assert_eq!(run(&RoundBf16::new(2, "w", region), 9.0, &picked(&values)), picked(&whole));
        assert_ne!(run(&RoundBf16::new(2, "v", Region::from(0)), 9.0, &values), whole, "another parameter");
        assert_ne!(run(&op, 10.0, &values), whole, "another step");
    }

    op! {
        /// `param − grad`.
        pub struct Own = "own_rule" {}
    }

    impl Op for Own {
        fn operands(&self) -> Operands {
            Operands::without_rules([Operand::f32("param"), Operand::f32("grad")], &["param"])
        }
        fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, String> {
            Ok(vec![inputs[0].clone()])
        }
        fn is_update_rule(&self) -> bool {
            true
        }
        fn reference(&self, inputs: &[&Dense], _: &[Type]) -> Vec<Dense> {
            let moved = inputs[0].data.iter().zip(&inputs[1].data).map(|(param, grad)| param - grad);
            vec![Dense::new(inputs[0].shape.clone(), moved.collect())]
        }
    }

    #[test]
    fn weights_of_a_rule_of_any_name_are_rounded() {
        let builder = kolo_graph::Builder::new();
        let param = builder.param("w", [3], kolo_graph::Init::ONES);
        let grad = builder.input("grad", Type::f32([3])).then(kolo_graph::sources::GrainSum { of: "w".into() }, &[]);
        builder.update(param, builder.apply(Own {}, &[param, grad]));
        let rounded = round_weights(&builder.finish().unwrap(), 1).unwrap();
        let (_, updated) = rounded.updates.first().unwrap();
        assert!(rounded.maker(*updated).op.is::<RoundBf16>());
    }
}
