//! How attention is split: by samples, by heads, and by queries where none depends on its place.

use super::sizes::{Mask, Sizes};
use kolo_graph::Type;
use kolo_graph::split::{Placement, Split};

/// Which dims of an operand walk samples, heads and queries. The heads of a packed operand lie in three blocks.
#[derive(Clone, Copy)]
pub(super) enum Role {
    /// `[b, t, h·d]` of queries, their results and gradients.
    Queries,
    /// The same of keys and values.
    Keys,
    /// `[b, t, 3·h·d]`.
    Packed,
    /// `[b, h, q]`.
    LogSumExp,
    /// `[1 or b, 1 or h, q, k]`.
    Bias,
}

impl Role {
    fn placement(self, ty: &Type, axis: &str, size: usize) -> Placement {
        let stretched = |dim: usize| if ty.shape[dim] == size { Placement::Shard(dim) } else { Placement::Replicate };
        match (self, axis) {
            (Role::Bias, BATCH) => stretched(0),
            (Role::Bias, HEADS) => stretched(1),
            (_, BATCH) => Placement::Shard(0),
            (Role::LogSumExp, HEADS) => Placement::Shard(1),
            (Role::Packed, HEADS) => Placement::blocks(2, 3),
            (_, HEADS) => Placement::Shard(2),
            (Role::Queries, _) => Placement::Shard(1),
            (Role::Bias | Role::LogSumExp, _) => Placement::Shard(2),
            (Role::Keys | Role::Packed, _) => Placement::Replicate,
        }
    }
}

const BATCH: &str = "batch";
pub(super) const HEADS: &str = "heads";
const QUERIES: &str = "queries";

/// The roles of the forward's inputs.
pub(super) fn operands(packed: bool, bias: bool) -> Vec<Role> {
    let operands: &[Role] = if packed { &[Role::Packed] } else { &[Role::Queries, Role::Keys, Role::Keys] };
    operands.iter().copied().chain(bias.then_some(Role::Bias)).collect()
}

/// The splits of an op on operands in these roles. Gradients of keys, which all queries read, are sums over them.
pub(super) fn splits(s: &Sizes, inputs: (&[Type], &[Role]), outputs: (&[Type], &[Role])) -> Vec<Split> {
    let mut axes = vec![(BATCH, s.batch), (HEADS, s.heads)];
    let packed = inputs.1.iter().any(|role| matches!(role, Role::Packed));
    if s.mask == Mask::None && !packed {
        axes.push((QUERIES, s.queries));
    }
    let along = |(axis, size): (&'static str, usize)| {
        let side = |(types, roles): (&[Type], &[Role])| -> Vec<Placement> {
            types.iter().zip(roles).map(|(ty, role)| role.placement(ty, axis, size)).collect()
        };
        let summed = |placement| if placement == Placement::Replicate { Placement::Partial } else { placement };
        Split::new(axis, size, side(inputs), side(outputs).into_iter().map(summed).collect::<Vec<_>>())
    };
    axes.into_iter().map(along).collect()
}
