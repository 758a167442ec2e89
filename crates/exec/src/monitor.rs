//! What a device tells of itself while it works.

use std::fmt::Debug;

/// Watches a device that has something to tell.
pub trait Monitor: Debug + Send + Sync {
    /// How it is now.
    fn read(&self) -> DeviceReading;
}

/// How a device is, as far as it tells.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeviceReading {
    /// The part of the time in which it computed, from 0 to 1.
    pub utilisation: Option<f64>,
    /// Bytes in use, by whomever, and all that it has.
    pub memory_bytes: Option<[u64; 2]>,
    /// What it draws and what it may draw.
    pub power_watts: Option<f64>,
    pub power_limit_watts: Option<f64>,
    pub celsius: Option<f64>,
}
