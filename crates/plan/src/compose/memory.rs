//! What a rank holds, by kind.

use super::Composition;
use crate::anatomy::Unit;
use crate::schedule_cache::ScheduleCache;
use crate::step_model::{DeviceMemory, ParallelLayout};
use kolo_exec::Offload;
use kolo_parallel::mesh::DATA;
use kolo_parallel::strategy::Refusal;

const MASTER_BYTES: f64 = 4.0;

impl Composition<'_> {
    /// Micro-batches on their way at each place of the pipeline, in stages: each keeps the activations of one stage.
    pub(super) fn in_flight(&self, schedules: &ScheduleCache) -> Result<Vec<f64>, Refusal> {
        let peaks = schedules
            .peaks(self.layout)
            .map_err(|error| Refusal::new(format!("the schedule does not fit: {error}"), error.hint()))?;
        Ok(peaks.map_or_else(|| vec![1.0], |peaks| peaks.iter().map(|peak| *peak as f64).collect()))
    }

    /// What the rank that holds the most holds.
    pub(crate) fn largest_memory(&self, schedules: &ScheduleCache) -> Result<DeviceMemory, Refusal> {
        let in_flight = self.in_flight(schedules)?;
        let of_place = |(place, in_flight): (usize, &f64)| {
            let own = self.stages_of(place);
            self.memory(&own, self.parameters(&own), *in_flight)
        };
        let all = in_flight.iter().enumerate().map(of_place);
        Ok(all.max_by(|one, other| one.total().total_cmp(&other.total())).unwrap_or_default())
    }

    pub(super) fn memory(&self, own: &[usize], parameters: f64, in_flight: f64) -> DeviceMemory {
        let ParallelLayout { zero, precision, .. } = *self.layout;
        let data = self.layout.size(DATA) as f64;
        let share = |from: usize| if zero >= from { data } else { 1.0 };
        let gradient = self.cluster.system.gradient_bytes as f64;
        let width = precision.bytes() as f64;
        let once = zero == 3 && !self.gathers_each_use() && data > 1.0;
        // Products read a copy in their own precision, which under ZeRO 3 is only there while it is gathered.
        let copied = precision.is_mixed() && zero < 3 || once;
        let (offloads, streams) = (self.anatomy.offload != Offload::None, self.anatomy.offload == Offload::Weights);
        let copy = if copied && !streams { width } else { 0.0 };
        // Masters of which the device reads a half-precision copy alone are the host's.
        let master = if offloads && (precision.is_mixed() || streams) { 0.0 } else { MASTER_BYTES };
        let state = if offloads { 0.0 } else { self.anatomy.optimizer_bytes };
        let mut memory = DeviceMemory {
            weights: parameters * (master / share(if precision.is_mixed() { 1 } else { 3 }) + copy),
            gradients: parameters * gradient / share(2),
            optimizer: parameters * state / share(1),
            reserved: self.cluster.reserved_bytes(),
            ..DeviceMemory::default()
        };
        if zero >= 2 && data > 1.0 && !self.gathers_each_use() && self.layout.micro_batches > 1 {
            // Gradients of several micro-batches are summed before they are scattered.
            memory.gradients += parameters * gradient;
        }
        let mirrored = self.mirrored(own);
        memory.weights += mirrored * width;
        memory.gradients += mirrored * gradient;
        let units = || own.iter().flat_map(|stage| self.units_of(*stage)).map(|(_, unit)| unit);
        let saved: f64 = units().map(|unit| self.saved(unit)).sum();
        memory.activations = saved / own.len() as f64 * in_flight;
        memory.transient = self.transient(own);
        if self.gathers_each_use() || streams {
            // The unit that computes and the next one; the gradient of one that is gathered.
            let largest = units().map(|unit| unit.parameters + unit.borrowed).fold(0.0, f64::max);
            memory.transient += largest * (2.0 * width + if self.gathers_each_use() { gradient } else { 0.0 });
        }
        memory
    }

    /// What a rank holds whatever its layers compute again.
    pub(super) fn without_activations(&self, own: &[usize]) -> f64 {
        let memory = self.memory(own, self.parameters(own), 1.0);
        memory.total() - memory.activations - self.transient(own)
    }

    /// What a unit's forward pass keeps.
    pub(super) fn saved(&self, unit: &Unit) -> f64 {
        unit.saved.bytes_at(self.layout.precision.bytes()) * (1.0 + self.cluster.system.fragments)
    }

    /// The most that a unit's backward pass takes on top of what is kept: units behind it have given up theirs.
    fn transient(&self, own: &[usize]) -> f64 {
        let mut most = 0.0f64;
        for stage in own {
            let all: f64 = self.units_of(*stage).map(|(_, unit)| self.saved(unit)).sum();
            let mut kept = 0.0;
            for (_, unit) in self.units_of(*stage) {
                kept += self.saved(unit);
                most = most.max(kept - all + self.on_top(unit));
            }
        }
        most
    }

    /// What a unit's backward pass holds beyond what all units up to it have saved.
    pub(super) fn on_top(&self, unit: &Unit) -> f64 {
        let copies = if self.layout.precision.is_mixed() { self.cluster.system.logit_copies as f64 } else { 0.0 };
        let used = unit.transient.bytes_at(self.layout.precision.bytes()) + copies * unit.widened * MASTER_BYTES;
        used * (1.0 + self.cluster.system.fragments)
    }
}
