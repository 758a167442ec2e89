//! The memory of a job's own layout on a GPU, from the executor that would run it: it lays out a step without a GPU, too.

use kolo_cuda::Cuda;
use kolo_exec::Options;
use kolo_parallel::mesh::DATA;
use kolo_plan::MemoryPlan;
use kolo_plan::device::{Device, Precision};
use kolo_plan::step_model::DeviceMemory;
use kolo_train::Job;
use kolo_train::step::program_of;
use std::sync::Arc;

/// If more ranks than this share the model, the model of memory counts alone.
const SHARERS_MAX: usize = 16;
/// The same for models with more layers than this: laying them all out takes seconds.
const LAYERS_MAX: usize = 256;

/// What the rank that holds the most holds. `None` on what is no GPU, and where too many ranks share the model.
pub fn planned_memory(mut job: Job, device: &Device, devices: usize) -> Option<DeviceMemory> {
    if device.peak[Precision::F16 as usize] == 0.0 || job.model.layers().is_some_and(|layers| layers > LAYERS_MAX) {
        return None;
    }
    job.run_on(Arc::new(Cuda::default())).ok()?;
    let data = job.parallel.mesh(devices, 0).ok()?.size(DATA);
    if devices / data > SHARERS_MAX || !job.grains.is_multiple_of(data) {
        return None;
    }
    let options = Options { threads: 1, lanes: 1, grains: job.grains / data, slots: 1, ways: 1 };
    let mut largest: Option<DeviceMemory> = None;
    for rank in 0..devices / data {
        let mesh = job.parallel.mesh(devices, rank).ok()?;
        let program = program_of(&job, &job.parallel, &mesh, options).ok()?;
        let memory = by_kind(&kolo_plan::device_memory(&program)?);
        if largest.is_none_or(|known| known.total() < memory.total()) {
            largest = Some(memory);
        }
    }
    largest
}

fn by_kind(plan: &MemoryPlan) -> DeviceMemory {
    DeviceMemory {
        weights: plan.weights as f64,
        gradients: plan.gradients as f64,
        optimizer: plan.optimizer as f64,
        activations: plan.activations as f64,
        transient: plan.scratch as f64,
        reserved: 0.0,
    }
}
