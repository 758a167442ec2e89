//! The sizes of an attention, and the blocks in which it is computed.

use super::Alignment;
use kolo_graph::types::count;
use kolo_graph::{CpuCx, ProductShape, Type};

/// Queries per block.
pub(super) const BLOCK: usize = 64;
/// The same if there are several blocks and later keys are hidden: a smaller one computes fewer of those in vain.
pub(super) const CAUSAL_BLOCK: usize = 32;

/// The sizes of one attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub batch: usize,
    pub queries: usize,
    pub keys: usize,
    pub heads: usize,
    pub dim: usize,
    pub mask: Mask,
}

/// Which keys a query may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mask {
    None,
    Causal(Alignment),
}

impl Mask {
    pub(super) fn new(causal: bool, align: Alignment) -> Self {
        if causal { Mask::Causal(align) } else { Mask::None }
    }
}

impl Sizes {
    /// Matrix products over all pairs of a query and a key, as a planner sees them.
    pub(super) fn product_shape(&self, products: u32) -> ProductShape {
        let masked = if self.mask == Mask::None { 0.0 } else { ProductShape::CAUSAL };
        let scores = count(&[self.batch, self.heads, self.queries, self.keys]);
        ProductShape::Attention { scores, products, masked }
    }
    pub(super) fn masked(self, mask: Mask) -> Self {
        Self { mask, ..self }
    }
    pub(super) fn width(&self) -> usize {
        self.heads * self.dim
    }
    pub(super) fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }
    /// Keys that any query below `end` may see.
    pub(super) fn visible(&self, end: usize) -> usize {
        match self.mask {
            Mask::None => self.keys,
            Mask::Causal(Alignment::TopLeft) => end.min(self.keys),
            Mask::Causal(Alignment::BottomRight) => (end + self.keys).saturating_sub(self.queries).min(self.keys),
        }
    }
    /// The blocks of queries.
    pub(super) fn blocks(&self) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let queries = self.queries;
        let size = if self.mask != Mask::None && queries > BLOCK { CAUSAL_BLOCK } else { BLOCK };
        (0..queries).step_by(size).map(move |start| start..(start + size).min(queries))
    }
    /// Whether query `q` may not see key `k`.
    pub(super) fn hidden(&self, q: usize, k: usize) -> bool {
        match self.mask {
            Mask::None => false,
            Mask::Causal(Alignment::TopLeft) => k > q,
            Mask::Causal(Alignment::BottomRight) => k + self.queries > q + self.keys,
        }
    }
}

/// Sizes from the operand types; with `packed`, one operand, else three.
pub(super) fn sizes(inputs: &[Type], heads: usize, packed: bool) -> Result<Sizes, String> {
    let q = inputs.first().ok_or("takes q, k and v")?;
    if q.rank() != 3 || heads == 0 {
        return Err(format!("needs [batch, time, width] and at least one head, not {q} and {heads} heads"));
    }
    let width = q.shape[2] / if packed { 3 } else { 1 };
    if width % heads != 0 || (packed && q.shape[2] % 3 != 0) {
        return Err(format!("width {width} cannot be cut into {heads} heads"));
    }
    let keys = match packed {
        true => q.shape[1],
        false => *inputs.get(1).and_then(|k| k.shape.get(1)).ok_or("k and v must be [batch, time, width] like q")?,
    };
    if !packed {
        let kv = Type::new(q.dtype, [q.shape[0], keys, width]);
        if inputs.get(1) != Some(&kv) || inputs.get(2) != Some(&kv) {
            return Err(format!("k and v must both be {kv}"));
        }
    }
    if q.elements() == 0 || keys == 0 {
        return Err(format!("none of batch, time and width may be empty, but q is {q} and there are {keys} keys"));
    }
    Ok(Sizes { batch: q.shape[0], queries: q.shape[1], keys, heads, dim: width / heads, mask: Mask::None })
}

pub(super) fn check_bias(bias: &Type, s: &Sizes) -> Result<(), String> {
    let fits = |size: usize, full: usize| size == 1 || size == full;
    match bias.shape[..] {
        [b, h, q, k] if fits(b, s.batch) && fits(h, s.heads) && q == s.queries && k == s.keys => Ok(()),
        _ => {
            Err(format!("the bias must be [1 or {}, 1 or {}, {}, {}], not {bias}", s.batch, s.heads, s.queries, s.keys))
        }
    }
}

pub(super) fn cpu_sizes(cx: &CpuCx<'_>, heads: usize, packed: bool) -> Sizes {
    let shape = cx.shape(0);
    let width = shape[2] / if packed { 3 } else { 1 };
    let keys = if packed { shape[1] } else { cx.shape(1)[1] };
    Sizes { batch: shape[0], queries: shape[1], keys, heads, dim: width / heads, mask: Mask::None }
}
