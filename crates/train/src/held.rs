//! One batch kept in memory, to time steps without what it takes to make data.

use crate::job::Job;
use kolo_exec::Feed;
use std::sync::OnceLock;

#[derive(Debug)]
pub struct HeldBatch {
    /// The bytes of every field, grain by grain.
    grains: Vec<OnceLock<Vec<Vec<u8>>>>,
}

impl HeldBatch {
    pub fn new(job: &Job) -> Self {
        Self { grains: (0..job.grains).map(|_| OnceLock::new()).collect() }
    }

    /// Gives the kept grain; what `make` gives is kept the first time.
    pub(crate) fn feed(&self, job: &Job, grain: usize, feed: &mut Feed<'_>, make: impl FnOnce(&mut Feed<'_>)) {
        let Some(fields) = self.grains[grain].get() else {
            make(feed);
            let fields =
                job.fields.iter().map(|field| feed.bytes(&field.name).map_or(Vec::new(), |bytes| bytes.to_vec()));
            let _ = self.grains[grain].set(fields.collect());
            return;
        };
        for (field, bytes) in job.fields.iter().zip(fields) {
            if let Some(place) = feed.bytes(&field.name) {
                place.copy_from_slice(bytes);
            }
        }
    }
}
