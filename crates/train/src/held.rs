//! One batch kept in memory, to time steps without what it takes to make data.

use crate::job::Job;
use crate::supply;
use kolo_data::ReadError;
use kolo_data::prefetch::{Maker, Recipe, Samples};
use kolo_exec::Feed;
use kolo_parallel::GrainShare;
use std::sync::OnceLock;

#[derive(Debug)]
pub struct HeldBatch {
    /// Grain by grain.
    grains: Vec<OnceLock<Samples>>,
}

impl HeldBatch {
    pub fn new(job: &Job) -> Self {
        Self { grains: (0..job.grains).map(|_| OnceLock::new()).collect() }
    }

    /// Makes these grains, as `step` has them, unless they are there.
    pub(crate) fn prepare(
        &self,
        recipe: &dyn Recipe,
        job: &Job,
        step: usize,
        grains: GrainShare,
    ) -> Result<(), ReadError> {
        if grains.iter().all(|grain| self.grains[grain].get().is_some()) {
            return Ok(());
        }
        let walk = recipe.walk(step, grains.count());
        let maker = Maker { recipe, walk: walk.as_deref() };
        let places = grains.iter().map(|grain| &self.grains[grain]).enumerate();
        for (local, place) in places.filter(|(_, place)| place.get().is_none()) {
            let mut samples = Samples::new(recipe, job.grain_batch());
            samples.make(maker, step, local, &|| true)?;
            let _ = place.set(samples);
        }
        Ok(())
    }

    /// Gives a kept grain.
    pub(crate) fn feed(&self, job: &Job, grain: usize, feed: &mut Feed<'_>) {
        if let Some(samples) = self.grains[grain].get() {
            supply::copy(&job.fields, samples, feed);
        }
    }
}
