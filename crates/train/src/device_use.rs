//! How a device got on during a run: a thread asks it now and then.

use kolo_base::lock;
use kolo_exec::{DeviceReading, Monitor};
use serde::Serialize;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// From one reading to the next. What a device tells is itself a mean over some tenths of a second.
const PERIOD: Duration = Duration::from_millis(500);

/// What the report says of a device that tells of itself. Of all readings since the run began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DeviceUse {
    /// The mean part of the time in which it computed, from 0 to 1.
    pub utilisation: Option<f64>,
    /// Bytes in use at most, by all processes.
    pub memory_bytes: Option<u64>,
    pub watts: Option<f64>,
    /// The energy of the whole run.
    pub joules: Option<f64>,
    pub celsius_max: Option<f64>,
    pub readings: usize,
}

/// Adds up readings.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    last: DeviceReading,
    utilisation: (f64, usize),
    memory: Option<u64>,
    watts: (f64, usize),
    celsius: Option<f64>,
    readings: usize,
}

impl Sums {
    fn add(&mut self, reading: DeviceReading) {
        let mean = |sum: &mut (f64, usize), value: Option<f64>| {
            if let Some(value) = value {
                *sum = (sum.0 + value, sum.1 + 1);
            }
        };
        mean(&mut self.utilisation, reading.utilisation);
        mean(&mut self.watts, reading.power_watts);
        self.memory = self.memory.max(reading.memory_bytes.map(|[used, _]| used));
        self.celsius = match (self.celsius, reading.celsius) {
            (Some(known), Some(now)) => Some(known.max(now)),
            (known, now) => known.or(now),
        };
        (self.last, self.readings) = (reading, self.readings + 1);
    }

    fn of(&self, elapsed: Duration) -> DeviceUse {
        let mean = |(sum, count): (f64, usize)| (count > 0).then(|| sum / count as f64);
        let watts = mean(self.watts);
        DeviceUse {
            utilisation: mean(self.utilisation),
            memory_bytes: self.memory,
            watts,
            joules: watts.map(|watts| watts * elapsed.as_secs_f64()),
            celsius_max: self.celsius,
            readings: self.readings,
        }
    }
}

/// Watches a device until it is dropped.
#[derive(Debug)]
pub struct DeviceWatch {
    monitor: Arc<dyn Monitor>,
    sums: Arc<Mutex<Sums>>,
    begin: Instant,
    thread: Option<(Sender<()>, JoinHandle<()>)>,
}

impl DeviceWatch {
    /// Without a thread, if the system refuses one, the device is asked at the end alone.
    pub fn new(monitor: Arc<dyn Monitor>) -> Self {
        let sums: Arc<Mutex<Sums>> = Arc::default();
        let (end, ended) = channel();
        let (asked, added) = (Arc::clone(&monitor), Arc::clone(&sums));
        let watch = move || {
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(PERIOD) {
                let reading = asked.read();
                lock(&added).add(reading);
            }
        };
        let thread = std::thread::Builder::new().name("device watch".into()).spawn(watch).ok();
        Self { monitor, sums, begin: Instant::now(), thread: thread.map(|thread| (end, thread)) }
    }

    /// The newest reading.
    pub fn last(&self) -> Option<DeviceReading> {
        let sums = lock(&self.sums);
        (sums.readings > 0).then_some(sums.last)
    }

    /// How it got on until now.
    pub fn so_far(&self) -> DeviceUse {
        let reading = self.monitor.read();
        let mut sums = lock(&self.sums);
        sums.add(reading);
        sums.of(self.begin.elapsed())
    }
}

impl Drop for DeviceWatch {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.thread.take() {
            drop(end);
            // What it could panic with was said by then.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Steady(DeviceReading);

    impl Monitor for Steady {
        fn read(&self) -> DeviceReading {
            self.0
        }
    }

    #[test]
    fn readings_add_up_to_means_and_peaks() {
        let mut sums = Sums::default();
        let reading = |utilisation, memory, watts, celsius| DeviceReading {
            utilisation: Some(utilisation),
            memory_bytes: Some([memory, 100]),
            power_watts: Some(watts),
            power_limit_watts: None,
            celsius: Some(celsius),
        };
        sums.add(reading(0.5, 30, 100.0, 40.0));
        sums.add(reading(1.0, 20, 300.0, 35.0));
        sums.add(DeviceReading::default());
        let seen = sums.of(Duration::from_secs(10));
        assert_eq!((seen.utilisation, seen.memory_bytes, seen.watts), (Some(0.75), Some(30), Some(200.0)));
        assert_eq!((seen.joules, seen.celsius_max, seen.readings), (Some(2000.0), Some(40.0), 3));
        let nothing = Sums::default().of(Duration::from_secs(1));
        assert_eq!(nothing, DeviceUse::default(), "what tells nothing has no numbers");
    }

    #[test]
    fn a_short_run_has_one_reading_at_its_end() {
        let watch =
            DeviceWatch::new(Arc::new(Steady(DeviceReading { celsius: Some(50.0), ..DeviceReading::default() })));
        let seen = watch.so_far();
        assert!(seen.readings >= 1 && seen.celsius_max == Some(50.0) && seen.joules.is_none(), "{seen:?}");
        assert_eq!(watch.last().and_then(|reading| reading.celsius), Some(50.0));
    }
}
