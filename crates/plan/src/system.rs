//! What the system that trains does, where systems differ: `[system]` of a cluster file.

use crate::collective::Algorithm;
use crate::device::{GIB, Precision};
use kolo_graph::settings::{SettingError, Settings};

const MIB: f64 = (1u64 << 20) as f64;

/// What 35 published runs of FSDP between hosts show, of seven sources: their median error is 0.5 % with this share, and 7 % if all that
/// could overlap did.
const OVERLAP_SHARE: f64 = 0.6;

/// What the system that trains does, where systems differ. The defaults are kolo's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SystemTraits {
    /// What it computes in, if that is not what the job says.
    pub precision: Option<Precision>,
    /// How it exchanges, if that is not what kolo would do.
    pub algorithm: Option<Algorithm>,
    /// Whether gradients are exchanged while the backward pass goes on, rather than after it.
    pub overlaps_gradients: bool,
    /// Whether what recomputation computes again includes the exchanges inside it.
    pub repeats_exchanges: bool,
    /// Bytes of a gradient as it is summed and exchanged.
    pub gradient_bytes: usize,
    /// Gradients that travel as one, in bytes.
    pub bucket_bytes: f64,
    /// Seconds between two looks at which gradients are ready on all ranks; 0 if nobody has to look.
    pub cycle_seconds: f64,
    /// Whether elementwise ops are fused; otherwise each passes through memory, as in an eager framework.
    pub fuses: bool,
    /// Whether images lie channel by channel, so that convolutions on tensor cores bring them into another order and back; if that is
    /// not said, an eager framework in TF32 keeps them so.
    pub channels_first: Option<bool>,
    /// Whether exchanges inside layers go on while gradients of weights are computed.
    pub overlaps_layers: bool,
    /// Whether exchanges inside layers go on while the products beside them are computed, piece by piece.
    pub overlaps_products: bool,
    /// Whether weights are gathered, and their gradients scattered, while other layers are computed. Not where the cores that compute
    /// exchange, too.
    pub overlaps_gathers: bool,
    /// Of the time in which gathers and scatters between hosts could go on beside computing, the share in which they do: they wait for
    /// each other, for the slowest rank and for memory, and pass several links one after the other.
    pub overlap_share: f64,
    /// Whether new weights of others' shares are gathered while the next step's first micro-batch comes forward, rather than before it.
    pub overlaps_updates: bool,
    /// Whether attention keeps no scores.
    pub flash_attention: bool,
    /// The share of the device's peak that attention without scores reaches, if that is known of its kernel.
    pub attention_share: Option<f64>,
    /// Selective recomputation runs every so manieth product of a layer again; 0 for none of them.
    pub repeats_products: usize,
    /// Copies of the logits in f32 that the loss holds, beside the logits and their gradient.
    pub logit_copies: usize,
    /// Whether pipeline stages have the same number of layers, rather than about the same cost.
    pub equal_stages: bool,
    /// Whether ranks that share layers each send a part of what they hand to the next stage, and join the parts there.
    pub scatters_sends: bool,
    /// Whether gradients of a weight that two stages read go from one to the other once per step, rather than for every micro-batch.
    pub sums_tied_once: bool,
    /// The spread of a rank's step time, as a share of it: the slowest of many sets the pace of all.
    pub jitter: f64,
    /// Memory of the framework itself on each device: context, libraries, buffers of collectives. What is usual on the device if that is
    /// not said.
    pub reserved_bytes: Option<f64>,
    /// What an allocator holds beyond the activations and temporaries that are in use, as a share of them.
    pub fragments: f64,
}

impl Default for SystemTraits {
    fn default() -> Self {
        Self {
            precision: None,
            algorithm: None,
            overlaps_gradients: true,
            repeats_exchanges: false,
            gradient_bytes: 4,
            bucket_bytes: 25.0 * MIB,
            cycle_seconds: 0.0,
            fuses: true,
            channels_first: None,
            overlaps_layers: true,
            overlaps_products: false,
            overlaps_gathers: true,
            overlap_share: OVERLAP_SHARE,
            overlaps_updates: false,
            flash_attention: true,
            attention_share: None,
            repeats_products: 0,
            logit_copies: 0,
            equal_stages: false,
            scatters_sends: false,
            sums_tied_once: false,
            jitter: 0.0,
            reserved_bytes: None,
            fragments: 0.0,
        }
    }
}

impl SystemTraits {
    /// The same system if all exchanges that other work can hide were hidden, or none.
    pub fn overlapping(self, all: bool) -> Self {
        match all {
            true => Self { overlap_share: 1.0, ..self },
            false => Self {
                overlaps_gradients: false,
                overlaps_layers: false,
                overlaps_products: false,
                overlaps_gathers: false,
                overlaps_updates: false,
                ..self
            },
        }
    }

    /// Whether what lies in memory is what kolo itself keeps there.
    pub fn keeps_what_kolo_keeps(&self) -> bool {
        let own = Self::default();
        let kept = |one: &Self| {
            let Self { repeats_exchanges, gradient_bytes, fuses, flash_attention, .. } = *one;
            let Self { repeats_products, logit_copies, equal_stages, fragments, .. } = *one;
            (
                repeats_exchanges,
                gradient_bytes,
                fuses,
                flash_attention,
                repeats_products,
                logit_copies,
                equal_stages,
                fragments,
            )
        };
        kept(self) == kept(&own)
    }

    pub fn read(section: &Settings) -> Result<Self, SettingError> {
        let default = SystemTraits::default();
        let precision = section.text("precision", "")?;
        let named = Precision::named(&precision);
        if named.is_none() && !precision.is_empty() {
            let names: Vec<&str> = Precision::ALL.iter().map(|one| one.name()).collect();
            let message = format!("is \"{precision}\", which is not known");
            return Err(section.wrong("precision", message, format!("write one of {}", names.join(", "))));
        }
        let algorithm = section.text("algorithm", "")?;
        let chosen = Algorithm::ALL.into_iter().find(|one| one.name() == algorithm);
        if chosen.is_none() && !algorithm.is_empty() {
            let names: Vec<&str> = Algorithm::ALL.iter().map(|one| one.name()).collect();
            let message = format!("is \"{algorithm}\", which is not known");
            return Err(section.wrong("algorithm", message, format!("write one of {}", names.join(", "))));
        }
        let channels_first = section.bool("channels_first", false)?;
        let attention_share = section.float_in("attention_share", 1.0, 0.001, 1.0)?;
        let reserved = section.float_in("reserved_gib", 0.0, 0.0, 1e4)? * GIB;
        let system = SystemTraits {
            precision: named,
            algorithm: chosen,
            overlaps_gradients: section.bool("overlaps_gradients", default.overlaps_gradients)?,
            repeats_exchanges: section.bool("repeats_exchanges", default.repeats_exchanges)?,
            gradient_bytes: section.count_in("gradient_bytes", default.gradient_bytes, 1, 8)?,
            bucket_bytes: section.float_in("bucket_mib", default.bucket_bytes / MIB, 0.001, 1e6)? * MIB,
            cycle_seconds: section.float_in("cycle_ms", 0.0, 0.0, 1e4)? / 1e3,
            fuses: section.bool("fuses", default.fuses)?,
            channels_first: section.has("channels_first").then_some(channels_first),
            overlaps_gathers: section.bool("overlaps_gathers", default.overlaps_gathers)?,
            overlap_share: section.float_in("overlap_share", default.overlap_share, 0.0, 1.0)?,
            overlaps_updates: section.bool("overlaps_updates", default.overlaps_updates)?,
            overlaps_layers: section.bool("overlaps_layers", default.overlaps_layers)?,
            overlaps_products: section.bool("overlaps_products", default.overlaps_products)?,
            flash_attention: section.bool("flash_attention", default.flash_attention)?,
            attention_share: section.has("attention_share").then_some(attention_share),
            repeats_products: section.count_in("repeats_products", default.repeats_products, 0, 64)?,
            logit_copies: section.count_in("logit_copies", default.logit_copies, 0, 16)?,
            equal_stages: section.bool("equal_stages", default.equal_stages)?,
            scatters_sends: section.bool("scatters_sends", default.scatters_sends)?,
            sums_tied_once: section.bool("sums_tied_once", default.sums_tied_once)?,
            jitter: section.float_in("jitter", default.jitter, 0.0, 1.0)?,
            reserved_bytes: section.has("reserved_gib").then_some(reserved),
            fragments: section.float_in("fragments", default.fragments, 0.0, 1.0)?,
        };
        section.finish()?;
        Ok(system)
    }
}
