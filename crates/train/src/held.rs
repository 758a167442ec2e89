//! One batch kept in memory, to time steps without what it takes to make data.

use crate::job::Job;
use crate::supply;
use kolo_data::ReadError;
use kolo_data::prefetch::{Maker, Recipe, Samples};
use kolo_exec::Feed;
use kolo_parallel::GrainShare;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub struct HeldBatch {
    /// Grain by grain.
    grains: Vec<OnceLock<Samples>>,
    /// Of its first grain, among all of this process.
    number: u64,
}

impl HeldBatch {
    pub fn new(job: &Job) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(job.grains as u64, Ordering::Relaxed);
        Self { grains: (0..job.grains).map(|_| OnceLock::new()).collect(), number }
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

    /// Gives a kept grain, unless it is what was given last.
    pub(crate) fn feed_once(&self, job: &Job, grain: usize, feed: &mut Feed<'_>) {
        let content = self.number + grain as u64;
        if !feed.holds(content) {
            self.feed(job, grain, feed);
            feed.call(content);
        }
    }

    /// Gives a kept grain.
    pub(crate) fn feed(&self, job: &Job, grain: usize, feed: &mut Feed<'_>) {
        if let Some(samples) = self.grains[grain].get() {
            supply::copy(&job.fields, samples, feed);
        }
    }
}
