//! Ring: every rank speaks to its two neighbours only. Each part travels once round, growing, and once more to be known
//! by all. The order of additions rotates with the part, so the bits are not those of the tree.

use super::builder::{ProgramBuilder, slice};
use super::{AlgorithmCost, CallShape, RankGroup};
use crate::call::CallKind;
use crate::program::{BufferRange, Region};

pub(super) fn write(builder: &mut ProgramBuilder, shape: &CallShape<'_>) {
    let group = RankGroup::all(shape);
    match shape.kind {
        CallKind::ReduceScatter => {
            reduce_scatter(builder, &group, &shape.parts(Region::Input), shape.own(Region::Output), shape.mean);
        }
        CallKind::AllGather => {
            let parts = shape.parts(Region::Output);
            builder.copy(shape.own(Region::Input), parts[shape.rank]);
            all_gather(builder, &group, &parts);
        }
        _ => {
            let output = CallShape::even(shape.output(), shape.size);
            reduce_scatter(
                builder,
                &group,
                &CallShape::even(shape.input(), shape.size),
                output[shape.rank],
                shape.mean,
            );
            all_gather(builder, &group, &output);
        }
    }
}

fn reduce_scatter(
    builder: &mut ProgramBuilder,
    group: &RankGroup,
    parts: &[BufferRange],
    into: BufferRange,
    mean: bool,
) {
    let (len, me) = (group.len(), group.me);
    if len == 1 {
        return builder.copy(parts[0], into);
    }
    let (next, previous) = (group.ranks[(me + 1) % len], group.ranks[(me + len - 1) % len]);
    let longest = parts.iter().map(|part| part.count).max().unwrap_or(0);
    // Two, so that one is sent while the other is filled.
    let buffers = [builder.scratch(longest), builder.scratch(longest)];
    let mut outgoing = parts[(me + len - 1) % len];
    for step in 0..len - 1 {
        let own = parts[(me + 2 * len - 2 - step) % len];
        let incoming = slice(buffers[step % 2], 0, own.count);
        let target = if step == len - 2 { into } else { incoming };
        builder.send(next, outgoing);
        builder.recv(previous, incoming);
        builder.combine_all(incoming, own, target);
        outgoing = incoming;
    }
    if mean {
        builder.divide(into);
    }
}

fn all_gather(builder: &mut ProgramBuilder, group: &RankGroup, parts: &[BufferRange]) {
    let (len, me) = (group.len(), group.me);
    let (next, previous) = (group.ranks[(me + 1) % len], group.ranks[(me + len - 1) % len]);
    for step in 0..len - 1 {
        builder.send(next, parts[(me + len - step) % len]);
        builder.recv(previous, parts[(me + 2 * len - 1 - step) % len]);
    }
}

pub(super) fn cost(shape: &CallShape<'_>) -> AlgorithmCost {
    let (ranks, count) = shape.numbers();
    let share = count * (ranks - 1.0) / ranks;
    let (turns, combined) = match shape.kind {
        CallKind::AllReduce => (2.0, share),
        CallKind::ReduceScatter => (1.0, share),
        _ => (1.0, 0.0),
    };
    let steps = turns * (ranks - 1.0);
    let sent = turns * share;
    AlgorithmCost { rounds: steps, messages: steps, sent, combined, leaving: shape.leaving_by(1.0, sent) }
}
