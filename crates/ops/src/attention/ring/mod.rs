//! Attention in rounds, for keys and values that arrive piece by piece (ring attention).
//!
//! A sequence is cut into `blocks` of `rows` tokens. Blocks lie in *slots*: slot `2i` has block `i`, slot `2i + 1` the block
//! `blocks − 1 − i` ([`block_of`]). So whoever has a run of slots has early and late blocks, and with a causal mask as much to
//! compute as anybody else. Whoever has the queries of some slots meets the keys of other slots in rounds, and keeps of each
//! query its largest score, the sum of exponentials and the result before it is divided by that sum.
//!
//! The order is part of the definition, so that the bits do not depend on who has which slots. A query of slot `p` meets the
//! keys of slots `p, p − 1, …, 0`, then those of the last slot down to `p + 1`: the order in which they come round a ring,
//! however many ranks it has. Gradients of the keys of slot `j` are added up over the queries of slots `j, j + 1, …`, and from
//! the first slot on up to `j − 1`: the order in which they go round. In its *first* round a rank meets its own keys up to the
//! query's own slot; in its *last* one, after those of all others, its own keys after that.

mod backward;
mod forward;

use super::gpu;
use super::sizes::{Mask, Sizes};
use super::{Alignment, head::Head};
use kolo_graph::attr::{Attr, AttrValue};
use kolo_graph::cuda::{CudaPlace, CudaTarget};
use kolo_graph::op::OpKind;
use kolo_graph::split::{Placement, Split};
use kolo_graph::{DType, ProductShape, Type, op};

/// Which pairs of slots a round is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// A rank's own keys, up to the slot of the query.
    First,
    /// Another rank's keys.
    Next,
    /// A rank's own keys after the slot of the query.
    Last,
}

impl Round {
    const NAMES: [(Round, &str); 3] = [(Round::First, "first"), (Round::Next, "next"), (Round::Last, "last")];
}

impl AttrValue for Round {
    fn to_attr(&self) -> Attr {
        Attr::Text(Self::NAMES.iter().find(|(round, _)| round == self).map_or("", |(_, name)| name).into())
    }
    fn from_attr(attr: &Attr) -> Option<Self> {
        let Attr::Text(text) = attr else { return None };
        Self::NAMES.into_iter().find(|(_, name)| name == text).map(|(round, _)| round)
    }
}

op! {
    /// A round of attention computed block by block. The tokens of `q` `[b, t, h·d]` are the blocks of `rows` tokens in the
    /// slots from `query` on, those of `kv` `[b, s, 2·h·d]` (keys and values side by side) the ones from `key` on, of `blocks`
    /// in all. With `causal` a query sees no key of a later token. Outputs: the result before it is divided, and of every row
    /// its largest score and the sum of exponentials, `[b, h, t, 2]`; with `running` they go on from those of the last two inputs.
    pub struct AttentionStep = "attention_step" {
        heads: usize, causal: bool, blocks: usize, rows: usize, query: usize, key: usize, round: Round, running: bool,
    }
}

op! {
    /// Ends the rounds of attention: the result, and the log-sum-exp of every row (−∞ if it has seen nothing).
    pub struct AttentionClose = "attention_close" {}
}

op! {
    /// Backward of one round of attention: what it adds to the gradient of `q`, and to that of `kv`. With `dq` and `dkv` they
    /// go on from inputs of these names.
    pub struct AttentionStepGrad = "attention_step_grad" {
        heads: usize, causal: bool, blocks: usize, rows: usize, query: usize, key: usize, round: Round, dq: bool, dkv: bool,
    }
}

pub const KINDS: &[OpKind] = &[
    OpKind::of::<AttentionStep>().with_cuda::<AttentionStep>(),
    OpKind::of::<AttentionClose>().with_cuda::<AttentionClose>(),
    OpKind::of::<AttentionStepGrad>().with_cuda::<AttentionStepGrad>(),
];

/// Blocks of a sequence, at most.
const BLOCKS_MAX: usize = 1 << 10;
/// Numbers of a row beside its result: the largest score and the sum of exponentials.
const NUMBERS: usize = 2;

/// The block in a slot.
pub const fn block_of(slot: usize, blocks: usize) -> usize {
    if slot.is_multiple_of(2) { slot / 2 } else { blocks - 1 - slot / 2 }
}

/// The slot of a block.
pub const fn slot_of(block: usize, blocks: usize) -> usize {
    if 2 * block < blocks { 2 * block } else { 2 * (blocks - 1 - block) + 1 }
}

/// A round: whose queries meet whose keys.
#[derive(Clone, Copy, Debug)]
pub struct Meeting {
    pub causal: bool,
    pub blocks: usize,
    pub rows: usize,
    /// The first slot of the queries and of the keys.
    pub query: usize,
    pub key: usize,
    pub round: Round,
}

impl Meeting {
    /// Which keys of its block number `key` the queries of their block number `query` see in this round, if any.
    fn mask(&self, query: usize, key: usize) -> Option<Mask> {
        let (query, key) = (self.query + query, self.key + key);
        let is_met = match self.round {
            Round::First => key <= query,
            Round::Next => true,
            Round::Last => key > query,
        };
        let (query, key) = (block_of(query, self.blocks), block_of(key, self.blocks));
        match is_met && !(self.causal && key > query) {
            true if self.causal && key == query => Some(Mask::Causal(Alignment::TopLeft)),
            true => Some(Mask::None),
            false => None,
        }
    }

    /// How many pairs of blocks meet, of so many blocks of queries and of keys.
    pub fn pairs(&self, queries: usize, keys: usize) -> usize {
        let of_key = |key: usize| (0..queries).filter(|query| self.mask(*query, key).is_some()).count();
        (0..keys).map(of_key).sum()
    }
}

/// The sizes of a round.
#[derive(Clone, Copy, Debug)]
struct Grid {
    meeting: Meeting,
    batch: usize,
    heads: usize,
    dim: usize,
    /// Blocks.
    queries: usize,
    keys: usize,
}

impl Grid {
    /// Of operands whose shapes were checked.
    fn of(meeting: Meeting, heads: usize, q: &[usize], kv: &[usize]) -> Self {
        let rows = meeting.rows;
        Self { meeting, batch: q[0], heads, dim: q[2] / heads, queries: q[1] / rows, keys: kv[1] / rows }
    }

    fn checked(meeting: Meeting, heads: usize, inputs: &[Type]) -> Result<Self, String> {
        let [q, kv, ..] = inputs else { return Err("takes q and kv".into()) };
        let (&[batch, queries, width], &[_, keys, _]) = (&q.shape[..], &kv.shape[..]) else {
            return Err(format!("needs [batch, time, width] of queries and of keys, not {q} and {kv}"));
        };
        let Meeting { blocks, rows, query, key, .. } = meeting;
        if heads == 0 || width == 0 || batch == 0 || width % heads != 0 {
            return Err(format!("{q} cannot be cut into {heads} heads"));
        }
        if kv.shape[..] != [batch, keys, width.saturating_mul(2)] {
            return Err(format!("kv is [{batch}, time, 2·{width}] beside {q}, not {kv}"));
        }
        let fits = |first: usize, tokens: usize| {
            rows > 0 && tokens > 0 && tokens.is_multiple_of(rows) && first.saturating_add(tokens / rows) <= blocks
        };
        if blocks > BLOCKS_MAX || !fits(query, queries) || !fits(key, keys) {
            return Err(format!(
                "{q} and {kv} are not blocks of {rows} tokens in the slots from {query} and {key} on, of {blocks}"
            ));
        }
        Ok(Self::of(meeting, heads, &q.shape, &kv.shape))
    }

    fn width(&self) -> usize {
        self.heads * self.dim
    }

    /// Tokens of the queries.
    fn query_rows(&self) -> usize {
        self.queries * self.meeting.rows
    }

    fn key_rows(&self) -> usize {
        self.keys * self.meeting.rows
    }

    /// Of one pair of blocks.
    fn pair(&self, mask: Mask) -> Sizes {
        let rows = self.meeting.rows;
        Sizes { batch: self.batch, queries: rows, keys: rows, heads: self.heads, dim: self.dim, mask }
    }

    fn is_met(&self, key: usize) -> bool {
        (0..self.queries).any(|query| self.meeting.mask(query, key).is_some())
    }

    /// Matrix products over the pairs of tokens of this round: blocks behind the mask are none of them, and the mask hides a part
    /// of the blocks that meet themselves.
    fn product_shape(&self, products: u32) -> ProductShape {
        let blocks = (0..self.queries).flat_map(|query| (0..self.keys).map(move |key| (query, key)));
        let masks: Vec<Mask> = blocks.filter_map(|(query, key)| self.meeting.mask(query, key)).collect();
        let causal = masks.iter().filter(|mask| **mask != Mask::None).count();
        let rows = self.meeting.rows;
        ProductShape::Attention {
            scores: kolo_graph::types::count(&[masks.len(), self.batch, self.heads, rows, rows]),
            products,
            masked: ProductShape::CAUSAL * causal as f64 / masks.len().max(1) as f64,
        }
    }

    /// Multiply-adds of one product over all pairs.
    fn points(&self) -> u64 {
        let pairs = self.meeting.pairs(self.queries, self.keys);
        let sizes = [self.batch, self.heads, self.meeting.rows, self.meeting.rows, self.dim];
        pairs as u64 * kolo_graph::types::count(&sizes) as u64
    }

    /// A block of a head's rows.
    fn block(&self, head: &Head, at: usize) -> Head {
        let rows = self.meeting.rows;
        Head { data: head.data.wrapping_add(at * rows * head.stride), rows, ..*head }
    }

    /// The rows of one head of the operand with these columns per token, from column `shift` on.
    fn head(&self, data: &[f32], tokens: usize, columns: usize, (task, shift): (usize, usize)) -> Head {
        let (batch, head) = (task / self.heads, task % self.heads);
        let from = batch * tokens * columns + shift + head * self.dim;
        Head { data: data[from..].as_ptr(), stride: columns, rows: tokens, dim: self.dim }
    }

    /// Queries, keys and values of a task.
    fn heads(&self, q: &[f32], kv: &[f32], task: usize) -> [Head; 3] {
        let (width, keys) = (self.width(), self.key_rows());
        [
            self.head(q, self.query_rows(), width, (task, 0)),
            self.head(kv, keys, 2 * width, (task, 0)),
            self.head(kv, keys, 2 * width, (task, width)),
        ]
    }

    /// On the GPU: the attention of one pair of blocks, of queries and keys at these places (of all blocks).
    fn attend<'a>(&self, [query, key]: [usize; 2], mask: Mask, target: &'a CudaTarget) -> gpu::Attend<'a> {
        let (width, rows, bytes) = (self.width(), self.meeting.rows, size_of::<f32>());
        let q = gpu::Rows { place: CudaPlace::input(0).further(query * rows * width * bytes), stride: width };
        let k = gpu::Rows { place: CudaPlace::input(1).further(key * rows * 2 * width * bytes), stride: 2 * width };
        gpu::Attend {
            s: self.pair(mask),
            q,
            k,
            v: k.place.further(width * bytes),
            rows: [self.query_rows(), self.key_rows()],
            bias: None,
            dtype: DType::F32,
            running: true,
            target,
        }
    }

    /// The pairs of blocks that meet, with their masks, in the order of the definition.
    fn meetings(&self) -> impl Iterator<Item = (usize, usize, Mask)> {
        let of_key = |key: usize| (0..self.queries).map(move |query| (query, key));
        (0..self.keys)
            .rev()
            .flat_map(of_key)
            .filter_map(|(query, key)| Some((query, key, self.meeting.mask(query, key)?)))
    }

    /// By samples and by heads, for operands of which these hold heads in so many runs of columns; `None` for numbers of rows.
    fn splits(&self, inputs: &[Option<usize>], outputs: &[Option<usize>]) -> Vec<Split> {
        let side = |operands: &[Option<usize>], heads: bool| -> Vec<Placement> {
            let place = |runs: &Option<usize>| match (heads, runs) {
                (false, _) => Placement::Shard(0),
                (true, Some(runs)) => Placement::blocks(2, *runs),
                (true, None) => Placement::Shard(1),
            };
            operands.iter().map(place).collect()
        };
        [("batch", self.batch, false), ("heads", self.heads, true)]
            .map(|(axis, size, heads)| Split::new(axis, size, side(inputs, heads), side(outputs, heads)))
            .into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_early_and_late_blocks_in_turn() {
        for blocks in 1..9 {
            for slot in 0..blocks {
                assert_eq!(slot_of(block_of(slot, blocks), blocks), slot, "{blocks} blocks");
            }
        }
        assert_eq!([0, 1, 2, 3].map(|slot| block_of(slot, 4)), [0, 3, 1, 2]);
    }

    /// Every pair of blocks that see each other meets once, whoever has which slots, and all ranks have as many to compute.
    #[test]
    fn a_ring_of_any_size_meets_every_pair_once() {
        for (blocks, causal) in [(8, true), (8, false), (1, true)] {
            let all = if causal { blocks * (blocks + 1) / 2 } else { blocks * blocks };
            for ranks in (0..4).map(|power| 1 << power).filter(|ranks| ranks <= &blocks) {
                let each = blocks / ranks;
                let of_rank = |rank: usize| -> usize {
                    let meeting = |other: usize, round| {
                        Meeting { causal, blocks, rows: 1, query: rank * each, key: other * each, round }
                            .pairs(each, each)
                    };
                    let own = meeting(rank, Round::First) + meeting(rank, Round::Last);
                    own + (0..ranks)
                        .filter(|other| *other != rank)
                        .map(|other| meeting(other, Round::Next))
                        .sum::<usize>()
                };
                let counts: Vec<usize> = (0..ranks).map(of_rank).collect();
                assert_eq!(counts.iter().sum::<usize>(), all, "{blocks} blocks on {ranks} ranks");
                if each > 1 {
                    assert!(counts.iter().all(|count| *count == counts[0]), "{counts:?}");
                }
            }
        }
    }
}
