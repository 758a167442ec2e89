//! Attention as one op that never stores the score matrix.
//!
//! Queries are taken in blocks; a block's scores against all its keys live in scratch, become probabilities there and are
//! gone. Backward recomputes them from the saved log-sum-exp. Legend: b batch, q query, k key, h head, d dim of a head.
//!
//! Operands are `[b, t, h·d]`, as linear layers leave them: heads are columns, and nothing is transposed in memory.

mod backward;
mod forward;
mod head;
mod reference;
mod sizes;

use kolo_graph::op::OpKind;
use kolo_graph::{Tensor, op};

op! {
    /// `softmax(q·kᵀ/√d + bias)·v` per head. With `packed`, the one input holds q, k and v side by side. `bias` (an
    /// additive mask) is `[1 or b, 1 or h, q, k]`. Outputs: the result and the log-sum-exp of every row.
    pub struct Attention = "attention" { heads: usize, causal: bool, packed: bool, bias: bool }
}

op! {
    /// Backward of attention: gradients of its q, k, v (or of the packed input).
    pub struct AttentionGrad = "attention_grad" { heads: usize, causal: bool, packed: bool, bias: bool }
}

op! {
    /// Gradient of attention's bias. It is an op of its own because only learnt biases need it.
    pub struct AttentionBiasGrad = "attention_bias_grad" { heads: usize, causal: bool, packed: bool }
}

pub const KINDS: &[OpKind] =
    &[OpKind::of::<Attention>(), OpKind::of::<AttentionGrad>(), OpKind::of::<AttentionBiasGrad>()];

kolo_graph::methods! {
    /// Attention.
    AttentionMethods {
        /// Self-attention on a packed `[b, t, 3·width]` of queries, keys and values.
        fn self_attention(self, heads: usize, causal: bool) -> Tensor<'b> {
            self.then(Attention { heads, causal, packed: true, bias: false }, &[])
        }
        /// Attention of queries `self` over keys and values, with an optional additive mask or learnt bias.
        fn attention(
            self, keys: Tensor<'b>, values: Tensor<'b>, bias: Option<Tensor<'b>>, heads: usize, causal: bool,
        ) -> Tensor<'b> {
            let mut rest = vec![keys, values];
            rest.extend(bias);
            self.then(Attention { heads, causal, packed: false, bias: bias.is_some() }, &rest)
        }
    }
}
