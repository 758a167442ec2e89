//! Which algorithm for which call: the one with the least predicted time. The costs of messages, bytes and additions are
//! measured on the live links, and agreed on by all ranks, who must choose alike.

use crate::algorithms::{Algorithm, AlgorithmCost, CallShape};

/// What a message between two ranks costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkCost {
    /// From one rank's call to the other's, for an empty message.
    pub latency_s: f64,
    /// More for each further message sent at the same time.
    pub message_s: f64,
    pub byte_s: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Between ranks of one host.
    pub inside: LinkCost,
    /// Between hosts; `byte_s` is that of the network of one host, shared by its ranks.
    pub across: LinkCost,
    /// Combining two vectors, by byte of the result.
    pub combine_byte_s: f64,
}

impl Default for Costs {
    /// Before anything was measured: sockets on one machine, a network of 10 Gbit/s.
    fn default() -> Self {
        Self {
            inside: LinkCost { latency_s: 10e-6, message_s: 2e-6, byte_s: 1.0 / 4e9 },
            across: LinkCost { latency_s: 30e-6, message_s: 3e-6, byte_s: 1.0 / 1.2e9 },
            combine_byte_s: 1.0 / 8e9,
        }
    }
}

impl Costs {
    /// Seconds of a call with elements of `width` bytes.
    pub fn seconds(&self, cost: &AlgorithmCost, width: usize) -> f64 {
        let link = if cost.leaving > 0.0 { &self.across } else { &self.inside };
        let bytes = |elements: f64| elements * width as f64;
        cost.rounds * link.latency_s
            + (cost.messages - cost.rounds).max(0.0) * link.message_s
            + (bytes(cost.sent) * self.inside.byte_s).max(bytes(cost.leaving) * self.across.byte_s)
            + bytes(cost.combined) * self.combine_byte_s
    }

    /// The fastest algorithm that applies; with `reproducible`, of those in tree order.
    pub fn choose(&self, shape: &CallShape<'_>, width: usize, reproducible: bool) -> Algorithm {
        let possible = |algorithm: &Algorithm| {
            algorithm.applies(shape.kind, shape.size)
                && (!reproducible || algorithm.keeps_order(shape.kind, shape.hosts))
        };
        let seconds = |algorithm: &Algorithm| self.seconds(&algorithm.cost(shape), width);
        let fastest = Algorithm::ALL.into_iter().filter(possible).min_by(|a, b| seconds(a).total_cmp(&seconds(b)));
        // Every kind has one that applies and keeps the order; a test asks for all.
        fastest.unwrap_or(Algorithm::Direct)
    }
}
