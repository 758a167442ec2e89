//! An anatomy with what its layouts have in common, each part found once: its cuts into stages, and what its units take on a
//! device. A search looks at thousands of layouts of a few anatomies.

use crate::anatomy::Anatomy;
use crate::cluster::Cluster;
use crate::compose::{Composition, StageRuns, UnitCosts, deal};
use crate::device::Precision;
use crate::schedule_cache::ScheduleCache;
use crate::step_model::{DeviceMemory, ParallelLayout, StepModel};
use kolo_parallel::axes::PIPELINE;
use kolo_parallel::mesh::DATA;
use kolo_parallel::strategy::Refusal;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// What the costs of units follow from, beside the anatomy.
#[derive(Debug, PartialEq)]
struct CostKey {
    cluster: Cluster,
    precision: Precision,
    /// Axes inside layers: names, strides and sizes.
    axes: Vec<(String, usize, usize)>,
}

/// A counted anatomy.
#[derive(Debug)]
pub struct Counted {
    pub anatomy: Anatomy,
    /// By number of stages, and whether they have equally many layers.
    cuts: Mutex<BTreeMap<(usize, bool), Result<StageRuns, Refusal>>>,
    costs: Mutex<Option<(CostKey, Arc<UnitCosts>)>>,
}

impl Counted {
    pub fn new(anatomy: Anatomy) -> Self {
        Self { anatomy, cuts: Mutex::new(BTreeMap::new()), costs: Mutex::new(None) }
    }

    pub(crate) fn stages(&self, layout: &ParallelLayout, cluster: &Cluster) -> Result<StageRuns, Refusal> {
        let key = (layout.size(PIPELINE) * layout.chunks.max(1), cluster.system.equal_stages);
        if let Some(known) = kolo_base::lock(&self.cuts).get(&key) {
            return known.clone();
        }
        let made = deal(&self.anatomy, key.0, key.1);
        kolo_base::lock(&self.cuts).insert(key, made.clone());
        made
    }

    pub(crate) fn costs(&self, layout: &ParallelLayout, cluster: &Cluster) -> Arc<UnitCosts> {
        let inner = layout.axes.iter().filter(|(name, _)| name != DATA && name != PIPELINE);
        let axes: Vec<(String, usize, usize)> =
            inner.map(|(name, size)| (name.clone(), layout.stride(name), *size)).collect();
        let mut costs = kolo_base::lock(&self.costs);
        if let Some((key, known)) = &*costs
            && key.axes == axes
            && key.precision == layout.precision
            && key.cluster == *cluster
        {
            return Arc::clone(known);
        }
        let made = Arc::new(UnitCosts::new(&self.anatomy, layout, cluster));
        *costs = Some((CostKey { cluster: cluster.clone(), precision: layout.precision, axes }, Arc::clone(&made)));
        made
    }

    /// The model of a step, as [`compose`](crate::compose()) makes it.
    pub fn compose(
        &self,
        layout: &ParallelLayout,
        cluster: &Cluster,
        schedules: &ScheduleCache,
    ) -> Result<StepModel, Refusal> {
        let stages = self.stages(layout, cluster)?;
        Composition::new(&self.anatomy, layout, cluster, stages)?.model(&self.costs(layout, cluster), schedules)
    }

    /// What the rank that holds the most holds: that of the model, without making it.
    pub fn memory(
        &self,
        layout: &ParallelLayout,
        cluster: &Cluster,
        schedules: &ScheduleCache,
    ) -> Result<DeviceMemory, Refusal> {
        let stages = self.stages(layout, cluster)?;
        Composition::new(&self.anatomy, layout, cluster, stages)?.largest_memory(schedules)
    }

    /// Seconds that a step takes at least, known without its stages.
    pub fn least_seconds(&self, layout: &ParallelLayout, cluster: &Cluster) -> f64 {
        self.costs(layout, cluster).least_seconds(&self.anatomy, layout, cluster)
    }
}
