//! What several workers must agree on, and how they got on.

use crate::error::Error;
use crate::machine::peak_rss_bytes;
use crate::quantiles::Quantiles;
use crate::report::{Communication, RankTimes};
use crate::timeline::{COMMUNICATION, Timeline};
use crate::trainer::Trainer;
use kolo_comm::communicator::CallSpan;
use kolo_comm::{Communicator, Fault, Reduction};
use kolo_data::LoadTimes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// This rank's times, step by step.
#[derive(Debug, Default)]
pub struct Meter {
    busy_ns: Arc<AtomicU64>,
    times: Times,
    /// Bytes sent until the last step began and until it ended, by axis.
    sent: [BTreeMap<String, u64>; 2],
    planned_bytes: u64,
    /// How devices exchange directly, if they do.
    device_transport: Option<&'static str>,
}

/// Of all steps.
#[derive(Debug, Default)]
struct Times {
    compute_ms: Quantiles,
    busy_ms: Quantiles,
    exposed_ms: Quantiles,
    /// The parts of `exposed_ms`, by axis.
    waited_ms: BTreeMap<String, Quantiles>,
    data_wait_ms: Quantiles,
}

/// What a rank tells the others of its axes, and of the samples that it could not read.
#[derive(Default, Deserialize, Serialize)]
struct OfAxes {
    sent_bytes: BTreeMap<String, u64>,
    waited_ms: BTreeMap<String, f64>,
    skip_messages: Vec<(usize, String)>,
}

impl Meter {
    /// Watches a communicator, and shows its calls on the timeline if there is one.
    pub fn attach(&self, world: &Communicator, timeline: Option<Arc<Timeline>>) {
        let busy = Arc::clone(&self.busy_ns);
        world.record(Some(Arc::new(move |span: &CallSpan| {
            // A message is mostly a wait for the other rank.
            if !span.call.kind.is_message() {
                busy.fetch_add(span.end.duration_since(span.start).as_nanos() as u64, Ordering::Relaxed);
            }
            if let Some(timeline) = &timeline {
                timeline.add_call(COMMUNICATION, span);
            }
        })));
    }

    /// What a worker has sent so far, by axis, as a step ends, and what it was planned to hold.
    pub fn count(&mut self, trainer: &Trainer) {
        self.sent = [std::mem::take(&mut self.sent[1]), trainer.session().sent_bytes()];
        self.planned_bytes = trainer.memory().total() as u64;
        self.device_transport = trainer.session().device_transport();
    }

    /// Bytes that it sent in the last step.
    fn sent_in_step(&self) -> BTreeMap<String, u64> {
        let before = |axis: &String| self.sent[0].get(axis).copied().unwrap_or(0);
        self.sent[1].iter().map(|(axis, bytes)| (axis.clone(), bytes.saturating_sub(before(axis)))).collect()
    }

    /// One step is over, for which compute waited so long for others along each axis, and so long for its samples.
    pub fn step(&mut self, step_ms: f64, waited_ns: &BTreeMap<String, u64>, data_wait_ns: u64) {
        let (exposed_ms, data_wait_ms) =
            (waited_ns.values().map(milliseconds).sum::<f64>(), milliseconds(&data_wait_ns));
        let times = &mut self.times;
        for axis in waited_ns.keys() {
            if !times.waited_ms.contains_key(axis) {
                times.waited_ms.insert(axis.clone(), Quantiles::of_zeros(times.compute_ms.count()));
            }
        }
        for (axis, waited_ms) in &mut times.waited_ms {
            waited_ms.push(waited_ns.get(axis).map_or(0.0, milliseconds));
        }
        times.compute_ms.push(step_ms - exposed_ms - data_wait_ms);
        times.busy_ms.push(milliseconds(&self.busy_ns.swap(0, Ordering::Relaxed)));
        times.exposed_ms.push(exposed_ms);
        times.data_wait_ms.push(data_wait_ms);
    }

    /// Waits along each axis.
    fn waited(&self) -> BTreeMap<String, f64> {
        self.times.waited_ms.iter().map(|(axis, waited_ms)| (axis.clone(), waited_ms.median())).collect()
    }

    /// Brings all ranks' times together, and what samples each could not read. All ranks call it.
    pub fn gather(&self, world: &Communicator, load: LoadTimes) -> Result<Communication, Error> {
        let rss = peak_rss_bytes().unwrap_or(0);
        let own = [
            self.times.compute_ms.median(),
            self.times.busy_ms.median(),
            self.times.exposed_ms.median(),
            self.times.data_wait_ms.median(),
            rss as f64,
            load.skipped as f64,
            self.planned_bytes as f64,
        ];
        let mut all = vec![0.0f64; own.len() * world.size()];
        world.all_gather(&own, &mut all)?;
        let axes =
            OfAxes { sent_bytes: self.sent_in_step(), waited_ms: self.waited(), skip_messages: load.skip_messages };
        let axes = gather_bytes(Some(world), &serde_json::to_vec(&axes).unwrap_or_default())?;
        let mut axes: Vec<OfAxes> = axes.iter().map(|text| serde_json::from_slice(text).unwrap_or_default()).collect();
        let rank = |(rank, times): (usize, &[f64])| RankTimes {
            rank,
            host: world.watch().host(rank),
            compute_ms: times[0],
            busy_ms: times[1],
            exposed_ms: times[2],
            data_wait_ms: times[3],
            peak_rss: times[4] as u64,
            skipped: times[5] as u64,
            planned_bytes: times[6] as u64,
            sent_bytes: std::mem::take(&mut axes[rank].sent_bytes),
            waited_ms: std::mem::take(&mut axes[rank].waited_ms),
            skip_messages: std::mem::take(&mut axes[rank].skip_messages),
        };
        let ranks: Vec<RankTimes> = all.chunks(own.len()).enumerate().map(rank).collect();
        let mean = |of: fn(&RankTimes) -> f64| ranks.iter().map(of).sum::<f64>() / ranks.len() as f64;
        let (busy_ms, exposed_ms) = (mean(|rank| rank.busy_ms), mean(|rank| rank.exposed_ms));
        let slowest = ranks.iter().max_by(|a, b| a.compute_ms.total_cmp(&b.compute_ms)).map_or(0, |rank| rank.rank);
        Ok(Communication {
            transport: self.device_transport.unwrap_or(world.transport()).into(),
            busy_ms,
            exposed_ms,
            hidden: if busy_ms > 0.0 { (1.0 - exposed_ms / busy_ms).clamp(0.0, 1.0) } else { 0.0 },
            slowest_rank: slowest,
            ranks,
        })
    }
}

fn milliseconds(ns: &u64) -> f64 {
    *ns as f64 / 1e6
}

/// Whether any rank was asked to stop: then all do, after the same step.
pub fn any(world: Option<&Communicator>, mine: bool) -> Result<bool, Error> {
    any_of(world, [mine]).map(|[any]| any)
}

/// The same of several things, at the cost of one.
pub fn any_of<const COUNT: usize>(world: Option<&Communicator>, mine: [bool; COUNT]) -> Result<[bool; COUNT], Error> {
    let Some(world) = world else { return Ok(mine) };
    let mut flags = mine.map(i32::from);
    world.all_reduce(&mut flags, Reduction::Max)?;
    Ok(flags.map(|flag| flag > 0))
}

/// What a rank wants after a step, or what any of them does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// The run should end.
    pub stop: bool,
    /// The state should be saved.
    pub save: bool,
    /// An earlier save is not yet written.
    pub writing: bool,
    /// And began a short while ago.
    pub holds_up: bool,
    /// Somebody waits to be taken in.
    pub yields: bool,
}

/// What any rank wants: all do the same after the same step.
pub fn agree(world: Option<&Communicator>, mine: Wishes) -> Result<Wishes, Error> {
    let Some(world) = world else { return Ok(mine) };
    let mut flags = [mine.stop, mine.save, mine.writing, mine.holds_up, mine.yields].map(i32::from);
    world.all_reduce(&mut flags, Reduction::Max)?;
    let [stop, save, writing, holds_up, yields] = flags.map(|flag| flag > 0);
    Ok(Wishes { stop, save, writing, holds_up, yields })
}

/// The bytes of every rank, in the order of ranks.
pub fn gather_bytes(world: Option<&Communicator>, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
    let Some(world) = world else { return Ok(vec![mine.to_vec()]) };
    let mut lengths = vec![0i64; world.size()];
    world.all_gather(&[mine.len() as i64], &mut lengths)?;
    let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
    let mut padded = mine.to_vec();
    padded.resize(longest, 0);
    let mut all = vec![0u8; longest * world.size()];
    if longest > 0 {
        world.all_gather(&padded, &mut all)?;
    }
    let part = |(rank, length): (usize, &i64)| all[rank * longest..rank * longest + *length as usize].to_vec();
    Ok(lengths.iter().enumerate().map(part).collect())
}

/// All ranks must have come to the same weights; if not, the ranks that differ from the first are named.
pub fn same_weights(world: &Communicator, digest: &str) -> Result<(), Error> {
    let own = digest.as_bytes();
    let mut all = vec![0u8; own.len() * world.size()];
    world.all_gather(own, &mut all)?;
    let differ: Vec<String> = all
        .chunks(own.len())
        .enumerate()
        .filter(|(_, other)| *other != &all[..own.len()])
        .map(|(rank, _)| kolo_comm::fault::rank_name(rank, &world.watch().host(rank)))
        .collect();
    if differ.is_empty() {
        return Ok(());
    }
    Err(Error::Together(Fault::BadCall(format!(
        "the weights of {} differ from those of rank 0\n  hint: a memory or a processor is faulty, or the workers are not of the same kind",
        differ.join(", ")
    ))))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However many steps a run makes.
    #[test]
    fn a_meter_holds_bounded_memory() {
        let mut meter = Meter::default();
        let held = |meter: &Meter| {
            let Times { compute_ms, busy_ms, exposed_ms, waited_ms, data_wait_ms } = &meter.times;
            let series = [compute_ms, busy_ms, exposed_ms, data_wait_ms].into_iter().chain(waited_ms.values());
            series.map(Quantiles::held_bytes).sum::<usize>()
        };
        let step = |meter: &mut Meter, at: u64| {
            let mut waited = BTreeMap::from([("data".to_string(), 1_000_000 + at % 3)]);
            if at >= 6000 {
                waited.insert("tensor".into(), 2_000_000);
            }
            meter.step(10.0, &waited, 500_000);
        };
        (0..10_000).for_each(|at| step(&mut meter, at));
        let before = held(&meter);
        (10_000..20_000).for_each(|at| step(&mut meter, at));
        assert_eq!((held(&meter), before <= 6 * (32 << 10)), (before, true));
        let waited = meter.waited();
        assert!((waited["data"] - 1.0).abs() < 1e-5, "{waited:?}");
        // Steps without an axis did not wait along it.
        assert_eq!((waited["tensor"], meter.times.exposed_ms.count()), (2.0, 20_000));
        assert!((meter.times.compute_ms.median() - 6.5).abs() < 1e-5 && meter.times.data_wait_ms.median() == 0.5);
    }
}
