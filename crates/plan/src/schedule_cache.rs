//! Schedules of pipelines, each built and proven once: layouts that differ in nothing else share them.

use crate::step_model::ParallelLayout;
use kolo_parallel::axes::PIPELINE;
use kolo_parallel::schedules::{ScheduleError, Verified, verify};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Of what the schedules of the literature have on their way, nothing grows beyond so many micro-batches per rank.
const MICRO_BATCHES_PER_RANK: usize = 2;
/// Proven schedules that are kept; a large one takes some megabytes.
const PROVEN_MAX: usize = 64;

/// The family, ranks, chunks and micro-batches.
type Key = (String, usize, usize, usize);

/// What was found of schedules so far. Without a pipeline there is none: `Ok(None)`.
#[derive(Debug, Default)]
pub struct ScheduleCache {
    peaks: Mutex<BTreeMap<Key, Result<Arc<[usize]>, ScheduleError>>>,
    proven: Mutex<BTreeMap<Key, Result<Arc<Verified>, ScheduleError>>>,
}

/// How many micro-batches are followed: few enough to be quick, and enough for as many on their way as all of them have.
pub(crate) fn followed(layout: &ParallelLayout) -> usize {
    let ranks = layout.size(PIPELINE);
    match layout.schedule.as_str() {
        "gpipe" => layout.micro_batches,
        _ => layout.micro_batches.min(MICRO_BATCHES_PER_RANK * ranks),
    }
    .max(1)
}

fn key(layout: &ParallelLayout) -> Key {
    (layout.schedule.clone(), layout.size(PIPELINE), layout.chunks, followed(layout))
}

impl ScheduleCache {
    /// Micro-batches on their way at each place of the pipeline, in stages: each keeps the activations of one stage.
    pub fn peaks(&self, layout: &ParallelLayout) -> Result<Option<Arc<[usize]>>, ScheduleError> {
        if layout.size(PIPELINE) == 1 {
            return Ok(None);
        }
        let key = key(layout);
        if let Some(known) = kolo_base::lock(&self.peaks).get(&key) {
            return known.clone().map(Some);
        }
        let made = layout.schedule(key.3).map(|schedule| schedule.map(|one| Arc::from(one.rank_peaks())));
        let Some(made) = made.transpose() else { return Ok(None) };
        kolo_base::lock(&self.peaks).insert(key, made.clone());
        made.map(Some)
    }

    /// The schedule of the micro-batches that are followed.
    pub fn proven(&self, layout: &ParallelLayout) -> Result<Option<Arc<Verified>>, ScheduleError> {
        if layout.size(PIPELINE) == 1 {
            return Ok(None);
        }
        let key = key(layout);
        if let Some(known) = kolo_base::lock(&self.proven).get(&key) {
            return known.clone().map(Some);
        }
        let made = layout.schedule(key.3).and_then(|schedule| schedule.map(|one| verify(&one)).transpose());
        let Some(made) = made.transpose() else { return Ok(None) };
        let made = made.map(Arc::new);
        let mut proven = kolo_base::lock(&self.proven);
        if proven.len() >= PROVEN_MAX {
            proven.clear();
        }
        proven.insert(key, made.clone());
        made.map(Some)
    }
}
