//! What is written between evaluations: a row every `train.log_every` steps.

use crate::job::Job;
use crate::report::number_or_null;
use crate::trainer::Trainer;
use kolo_exec::DeviceReading;
use serde::{Deserialize, Serialize};

/// Where a run stands after a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogRow {
    pub step: usize,
    pub epoch: usize,
    /// The mean over the steps since the row before.
    pub loss: f64,
    /// The learning rate of this step.
    pub rate: f64,
    /// The norm of this step's gradient before it was clipped, if it was measured.
    pub grad_norm: Option<f64>,
    /// The factor of the next step's gradients and the steps so far that changed nothing, in f16.
    pub loss_scale: Option<[f64; 2]>,
    /// Since the row before, without evaluations.
    pub samples_per_s: f64,
    /// What the device told last, if it tells of itself.
    pub device: Option<DeviceReading>,
    /// The job names how often it wants rows.
    pub asked: bool,
}

impl LogRow {
    /// As `metrics.jsonl` and TensorBoard name them.
    pub fn values(&self) -> Vec<(&'static str, f64)> {
        let norm = self.grad_norm.map(|norm| ("step/grad_norm", norm));
        let first = [("step/loss", self.loss), ("step/lr", self.rate)];
        let scale =
            self.loss_scale.map(|[scale, skipped]| [("step/loss_scale", scale), ("step/skipped_steps", skipped)]);
        let device = self.device.unwrap_or_default();
        let device = [
            device.utilisation.map(|value| ("device/utilisation", value)),
            device.memory_bytes.map(|[used, _]| ("device/memory_bytes", used as f64)),
            device.power_watts.map(|value| ("device/power_watts", value)),
        ];
        let speed = [("step/samples_per_s", self.samples_per_s)];
        let rest = scale.into_iter().flatten().chain(speed).chain(device.into_iter().flatten());
        first.into_iter().chain(norm).chain(rest).collect()
    }
}

/// Adds up steps until a row is due.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Log {
    #[serde(deserialize_with = "number_or_null")]
    loss: f64,
    milliseconds: f64,
    steps: usize,
}

impl Log {
    /// What it has added up, to be handed on as it is.
    pub(crate) fn to_bits(self) -> [u64; 3] {
        [self.loss.to_bits(), self.milliseconds.to_bits(), self.steps as u64]
    }

    pub(crate) fn from_bits([loss, milliseconds, steps]: [u64; 3]) -> Self {
        Self { loss: f64::from_bits(loss), milliseconds: f64::from_bits(milliseconds), steps: steps as usize }
    }

    /// A step is over; a row if it is time for one. Rows are due at multiples of `log_every`, whatever a run began with.
    pub fn step(&mut self, job: &Job, trainer: &Trainer, loss: f32, milliseconds: f64) -> Option<LogRow> {
        self.loss += f64::from(loss);
        self.milliseconds += milliseconds;
        self.steps += 1;
        let step = trainer.next_step();
        if job.log_every.steps == 0 || !step.is_multiple_of(job.log_every.steps) {
            return None;
        }
        let Self { loss, milliseconds, steps } = std::mem::take(self);
        Some(LogRow {
            step,
            epoch: step.div_ceil(job.steps_per_epoch),
            loss: loss / steps as f64,
            rate: job.schedule.rate(job.optimizer.lr(), step - 1),
            grad_norm: trainer.gradient_norm().map(f64::from),
            loss_scale: trainer.loss_scale().map(|numbers| numbers.map(f64::from)),
            samples_per_s: (steps * job.batch) as f64 / milliseconds.max(1e-6) * 1e3,
            device: None,
            asked: job.log_every.asked,
        })
    }
}
