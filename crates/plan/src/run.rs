//! The whole run: samples × epochs, on a fleet of devices.

/// Devices that will do the work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fleet {
    pub devices: usize,
    /// Peak floating-point operations per second of one device.
    pub flops: f64,
    /// The fraction of the peak that training reaches.
    pub utilisation: f64,
    /// Price of one device for one hour.
    pub price_per_hour: Option<f64>,
}

/// What a whole run takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunCost {
    pub flops: f64,
    /// Days of one PFLOP/s.
    pub pflop_days: f64,
    /// Floating-point operations per byte of input, each byte counted once per pass.
    pub flops_per_input_byte: f64,
}

const SECONDS_PER_DAY: f64 = 86_400.0;

impl RunCost {
    /// `flops_per_sample` and `bytes_per_sample` times samples times epochs.
    pub fn new(flops_per_sample: f64, bytes_per_sample: f64, samples: f64, epochs: f64) -> Self {
        let flops = flops_per_sample * samples * epochs;
        Self {
            flops,
            pflop_days: flops / 1e15 / SECONDS_PER_DAY,
            flops_per_input_byte: flops_per_sample / bytes_per_sample,
        }
    }

    pub fn days(&self, fleet: &Fleet) -> f64 {
        self.flops / (fleet.devices as f64 * fleet.flops * fleet.utilisation) / SECONDS_PER_DAY
    }

    pub fn price(&self, fleet: &Fleet) -> Option<f64> {
        fleet.price_per_hour.map(|price| self.days(fleet) * 24.0 * fleet.devices as f64 * price)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The textbook's ResNet-152: 11.4 G multiply-adds forward, three times that for a training pass.
    #[test]
    fn resnet152_by_hand() {
        let per_sample = 11.4e9 * 2.0 * 3.0;
        let run = RunCost::new(per_sample, 3.0 * 224.0 * 224.0 * 4.0, 1.2e6, 128.0);
        assert!((run.flops / 1.05e19 - 1.0).abs() < 0.01, "{:e}", run.flops);
        assert!((run.flops_per_input_byte / 1.1e5 - 1.0).abs() < 0.05, "{}", run.flops_per_input_byte);
        let fleet = Fleet { devices: 8, flops: 1e15, utilisation: 0.4, price_per_hour: Some(2.0) };
        let days = run.flops / 3.2e15 / 86_400.0;
        assert!((run.days(&fleet) - days).abs() < 1e-9);
        assert!((run.price(&fleet).unwrap() - days * 24.0 * 16.0).abs() < 1e-6);
    }
}
