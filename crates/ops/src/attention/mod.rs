//! Attention as one op that never stores the score matrix.
//!
//! Queries are taken in blocks; a block's scores against all its keys live in scratch, become probabilities there and are
//! gone. Backward recomputes them from the saved log-sum-exp. Legend: b batch, q query, k key, h head, d dim of a head.
//!
//! Operands are `[b, t, h·d]`, as linear layers leave them: heads are columns, and nothing is transposed in memory.

mod backward;
pub mod cached;
mod forward;
mod gpu;
mod head;
mod reference;
pub mod ring;
mod sizes;
mod splits;

use kolo_graph::attr::{Attr, AttrValue};
use kolo_graph::op::OpKind;
use kolo_graph::{Tensor, op};

/// Where the triangle of a causal mask lies if there are not as many queries as keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alignment {
    /// Query `i` sees keys `0..=i`, as PyTorch's `is_causal` has it: both sequences begin together.
    TopLeft,
    /// The last query sees all keys: both sequences end together, as when some keys come from a cache. With more queries
    /// than keys, the first queries see none.
    BottomRight,
}

impl AttrValue for Alignment {
    fn to_attr(&self) -> Attr {
        Attr::Text(if *self == Alignment::TopLeft { "top_left" } else { "bottom_right" }.into())
    }
    fn from_attr(attr: &Attr) -> Option<Self> {
        match attr {
            Attr::Text(text) if text == "top_left" => Some(Alignment::TopLeft),
            Attr::Text(text) if text == "bottom_right" => Some(Alignment::BottomRight),
            _ => None,
        }
    }
}

/// Matrix products over the pairs of a query and a key: scores and result.
const PRODUCTS: u32 = 2;
/// The same of the gradients, with the scores computed again.
const GRAD_PRODUCTS: u32 = 5;

op! {
    /// `softmax(q·kᵀ/√d + bias)·v` per head. With `packed`, the one input holds q, k and v side by side. `bias` (an
    /// additive mask) is `[1 or b, 1 or h, q, k]`. With `causal` a query sees no later key; `align` says what that means if
    /// there are not as many queries as keys. A query that sees no key, or only keys whose bias is −∞, gives zero and has
    /// zero gradients. Outputs: the result and the log-sum-exp of every row (−∞ if it sees nothing).
    pub struct Attention = "attention" {
        heads: usize, causal: bool, packed: bool, bias: bool, align: Alignment = Alignment::BottomRight,
    }
}

op! {
    /// Backward of attention: gradients of its q, k, v (or of the packed input).
    pub struct AttentionGrad = "attention_grad" {
        heads: usize, causal: bool, packed: bool, bias: bool, align: Alignment = Alignment::BottomRight,
    }
}

op! {
    /// Gradient of attention's bias. It is an op of its own because only learnt biases need it.
    pub struct AttentionBiasGrad = "attention_bias_grad" {
        heads: usize, causal: bool, packed: bool, align: Alignment = Alignment::BottomRight,
    }
}

pub const KINDS: &[OpKind] = &[
    OpKind::of::<Attention>().with_cuda::<Attention>(),
    OpKind::of::<AttentionGrad>().with_cuda::<AttentionGrad>(),
    OpKind::of::<AttentionBiasGrad>().with_cuda::<AttentionBiasGrad>(),
    cached::KIND,
];

kolo_graph::methods! {
    /// Attention.
    AttentionMethods {
        /// Self-attention on a packed `[b, t, 3·width]` of queries, keys and values.
        fn self_attention(self, heads: usize, causal: bool) -> Tensor<'b> {
            let align = Alignment::BottomRight;
            self.then(Attention { heads, causal, packed: true, bias: false, align }, &[])
        }
        /// Attention of queries `self` over keys and values, with an optional additive mask or learnt bias. A causal mask
        /// is aligned bottom right: the last query sees all keys. PyTorch's `is_causal` is aligned top left, which differs
        /// if there are not as many queries as keys; see `causal_attention`.
        fn attention(
            self, keys: Tensor<'b>, values: Tensor<'b>, bias: Option<Tensor<'b>>, heads: usize, causal: bool,
        ) -> Tensor<'b> {
            let mut rest = vec![keys, values];
            rest.extend(bias);
            let align = Alignment::BottomRight;
            self.then(Attention { heads, causal, packed: false, bias: bias.is_some(), align }, &rest)
        }
        /// Attention of queries `self` over keys that are not later, by the given alignment.
        fn causal_attention(
            self, keys: Tensor<'b>, values: Tensor<'b>, bias: Option<Tensor<'b>>, heads: usize, align: Alignment,
        ) -> Tensor<'b> {
            let mut rest = vec![keys, values];
            rest.extend(bias);
            self.then(Attention { heads, causal: true, packed: false, bias: bias.is_some(), align }, &rest)
        }
    }
}
