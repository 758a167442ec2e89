//! Devices that compute slowly: named by their ranks, or a share of all that a seed draws.

use crate::cluster::Cluster;
use crate::simulate::SlowRank;
use kolo_graph::rng::Stream;
use kolo_graph::settings::{SettingError, Settings};
use std::collections::BTreeSet;

/// Some devices, and how many times as long they take.
#[derive(Clone, Debug, PartialEq)]
pub struct SlowDevices {
    pub which: WhichDevices,
    pub factor: f64,
}

/// Devices by their numbers, or a part of all.
#[derive(Clone, Debug, PartialEq)]
pub enum WhichDevices {
    Ranks(Vec<usize>),
    Share(f64),
}

const SECTION_EXAMPLE: &str = "[[slow]] with `ranks` or `share`, and `factor`";
/// Slower than this is not slow but broken.
pub const FACTOR_MAX: f64 = 1e6;
/// Draws for each rank that is wanted, at most: half of the devices may be drawn already.
const DRAWS_PER_RANK: u64 = 64;

/// Reads `[[slow]]` of the description of so many devices.
pub(crate) fn read(root: &Settings, devices: usize) -> Result<Vec<SlowDevices>, SettingError> {
    let section = |section: &Settings| {
        let factor = section.float("factor", 0.0)?;
        if !(1.0..=FACTOR_MAX).contains(&factor) {
            let message = format!("is {factor}, but must be at least 1");
            return Err(section.wrong("factor", message, "write how many times as long they take, 1 or more"));
        }
        let which = match (section.has("ranks"), section.has("share")) {
            (true, false) => WhichDevices::Ranks(read_ranks(section, devices)?),
            (false, true) => WhichDevices::Share(section.float_in("share", 0.0, 0.0, 1.0)?),
            (true, true) => {
                return Err(section.wrong("share", "cannot be combined with `ranks`", "write two sections"));
            }
            (false, false) => {
                let hint = "write `ranks = [17]`, or `share = 0.01` of all devices";
                return Err(section.wrong("ranks", "and `share` are both missing", hint));
            }
        };
        section.finish()?;
        Ok(SlowDevices { which, factor })
    };
    root.tables("slow", SECTION_EXAMPLE)?.iter().map(section).collect()
}

fn read_ranks(section: &Settings, devices: usize) -> Result<Vec<usize>, SettingError> {
    let ranks = section.floats("ranks", "[17]")?;
    match ranks.iter().find(|rank| !(rank.fract() == 0.0 && (0.0..devices as f64).contains(*rank))) {
        None => Ok(ranks.into_iter().map(|rank| rank as usize).collect()),
        Some(beyond) => {
            let hint = format!("ranks are 0 to {}", devices.saturating_sub(1));
            Err(section.wrong("ranks", format!("names {beyond}, but there is no such rank"), hint))
        }
    }
}

impl Cluster {
    /// The slow ones of the first so many devices. A seed draws those of which only the share is known.
    pub fn slow_ranks(&self, devices: usize, seed: u64) -> Vec<SlowRank> {
        let mut slow = Vec::new();
        for (number, SlowDevices { which, factor }) in self.slow.iter().enumerate() {
            let ranks: Vec<usize> = match which {
                WhichDevices::Ranks(ranks) => ranks.iter().copied().filter(|rank| *rank < devices).collect(),
                WhichDevices::Share(share) => drawn(devices, *share, seed, number as u64).into_iter().collect(),
            };
            slow.extend(ranks.into_iter().map(|rank| SlowRank { rank, factor: *factor }));
        }
        slow
    }
}

/// A share of all ranks, each once.
fn drawn(devices: usize, share: f64, seed: u64, number: u64) -> BTreeSet<usize> {
    let wanted = ((devices as f64 * share).round() as usize).min(devices);
    // Of more than half, those that are not slow are drawn.
    let few = wanted.min(devices - wanted);
    let stream = Stream::new(seed, "slow devices");
    let mut ranks = BTreeSet::new();
    for draw in 0..few as u64 * DRAWS_PER_RANK {
        if ranks.len() == few {
            break;
        }
        let [high, low, ..] = stream.block(number, draw);
        ranks.insert(((u64::from(high) << 32 | u64::from(low)) % devices.max(1) as u64) as usize);
    }
    if few == wanted { ranks } else { (0..devices).filter(|rank| !ranks.contains(rank)).collect() }
}
