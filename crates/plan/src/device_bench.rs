//! Measures the cores at hand as a device: products by shape and streams, with operands that no cache holds.
//!
//! All threads run the same work at the same time, each on memory of its own, as lanes of a worker do; rates are those of all
//! together. The best of several rounds counts: what else the machine does can only make a round slower.

use crate::device::{Device, PeerLink, Precision};
use kolo_graph::Team;
use kolo_ops::gemm::{Gemm, Right, Rows, SCRATCH, Start, Strided};
use kolo_ops::simd;
use kolo_ops::tiles::Address;
use std::sync::RwLock;
use std::time::{Duration, Instant};

/// What was measured of one piece of work.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceRow {
    pub work: &'static str,
    /// What a product is computed in.
    pub precision: Precision,
    /// Rows, columns and terms of a product; the length of a stream.
    pub shape: Vec<usize>,
    /// Operations per second of a product, bytes per second of a stream or a copy, launches per second.
    pub rate: f64,
}

impl DeviceRow {
    /// Of something that is no product.
    pub fn of(work: &'static str, length: usize, rate: f64) -> Self {
        Self { work, precision: Precision::F32, shape: vec![length], rate }
    }

    /// Its rate in the unit that goes with the work.
    pub fn text(&self) -> String {
        match self.work {
            STREAM | TO_HOST | FROM_HOST => format!("{:.1} GB/s", self.rate / 1e9),
            LAUNCH => format!("{:.2} µs", 1e6 / self.rate),
            _ if self.rate >= 1e12 => format!("{:.1} TFLOP/s", self.rate / 1e12),
            _ => format!("{:.1} GFLOP/s", self.rate / 1e9),
        }
    }
}

/// The works of a device file beside products.
pub const STREAM: &str = "stream";
pub const LAUNCH: &str = "launch";
pub const TO_HOST: &str = "copy to the host";
pub const FROM_HOST: &str = "copy from the host";

/// What else is known of a device that was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceFacts {
    pub doc: String,
    pub memory_bytes: f64,
    pub units: usize,
    pub tile: [usize; 2],
    pub peers: Option<PeerLink>,
    pub fitted_on: String,
}

impl DeviceFacts {
    /// Of cores with so much memory, which exchange over this.
    pub fn of_cores(memory_bytes: f64, peers: Option<PeerLink>) -> Self {
        Self {
            doc: "measured by `kolo bench device`".into(),
            memory_bytes,
            units: 1,
            tile: [6, 16],
            peers,
            fitted_on: "products of 512 rows and streams of 32 MiB".into(),
        }
    }
}

/// Products as layers have them: square ones, those of a few rows, of few terms, of many terms.
const PRODUCTS: [(&str, [usize; 3]); 5] = [
    ("product", [512, 512, 512]),
    ("product", [512, 2048, 512]),
    ("product of few rows", [16, 1024, 1024]),
    ("product of few terms", [1024, 1024, 32]),
    ("product of many terms", [256, 256, 4096]),
];
/// Floats of a stream: more than the cache of most cores' share of a socket.
const STREAM_FLOATS: usize = 8 << 20;
/// How long each piece of work is repeated.
const PATIENCE: Duration = Duration::from_millis(150);
/// Copies of a product's operands, used in turn, so that none is in a cache when its turn comes again.
const OPERAND_FLOATS: usize = 16 << 20;

/// Measures so many threads.
pub fn measure(threads: usize) -> Vec<DeviceRow> {
    let mut rows: Vec<DeviceRow> = PRODUCTS
        .iter()
        .map(|(work, shape)| {
            let (precision, rate) = (Precision::F32, product_rate(*shape, threads));
            DeviceRow { work, precision, shape: shape.to_vec(), rate }
        })
        .collect();
    rows.push(DeviceRow::of(STREAM, STREAM_FLOATS, stream_rate(threads)));
    rows
}

/// The device that these rows show. What no row tells is taken to be as on a machine like this one.
pub fn device_of(name: &str, rows: &[DeviceRow], facts: &DeviceFacts) -> Device {
    let best = |chosen: &dyn Fn(&DeviceRow) -> bool| {
        let rates = rows.iter().filter(|row| chosen(row)).map(|row| row.rate);
        rates.fold(None, |most: Option<f64>, rate| Some(most.map_or(rate, |most| most.max(rate))))
    };
    let of = |work: &'static str| best(&move |row| row.work == work);
    let product = |precision: Precision| best(&move |row| row.work == "product" && row.precision == precision);
    let bandwidth = of(STREAM).unwrap_or(0.0);
    // The slower way: an update needs both.
    let host = of(TO_HOST).zip(of(FROM_HOST)).map_or(bandwidth, |(one, other)| one.min(other));
    Device {
        name: name.into(),
        doc: facts.doc.clone(),
        peak: Precision::ALL.map(|precision| product(precision).unwrap_or(0.0)),
        memory_bytes: facts.memory_bytes,
        reserved_bytes: Device::usual_reserve(facts.memory_bytes, facts.peers.is_some()),
        bandwidth,
        product_share: 1.0,
        stream_share: 1.0,
        launch: of(LAUNCH).map_or(LAUNCH_SECONDS, |rate| 1.0 / rate),
        host_bandwidth: host,
        units: facts.units,
        tile: facts.tile,
        price_per_hour: None,
        peers: facts.peers,
        fitted_on: Some(facts.fitted_on.clone()),
    }
}

/// A call of a kernel beyond its work. Assumed, not measured: it matters only to very small layers.
const LAUNCH_SECONDS: f64 = 0.4e-6;

/// The section of a device file.
pub fn as_toml(device: &Device) -> String {
    let peaks: Vec<String> = Precision::ALL
        .iter()
        .zip(device.peak)
        .filter(|(_, peak)| *peak > 0.0)
        .map(|(precision, peak)| format!("{} = {:.6}", precision.name(), peak / 1e12))
        .collect();
    let fitted = device.fitted_on.as_ref().map_or_else(String::new, |text| format!("fitted_on = {text:?}\n"));
    let peers = device.peers.map_or_else(String::new, |PeerLink { bandwidth, latency }| {
        format!("peer_gbs = {:.6}\npeer_latency_us = {:.6}\n", bandwidth / 1e9, latency * 1e6)
    });
    let price = device.price_per_hour.map_or_else(String::new, |price| format!("price_per_hour = {price}\n"));
    format!(
        "[{}]\ndoc = {:?}\npeak_tflops = {{ {} }}\nmemory_gib = {:.3}\nbandwidth_gbs = {:.3}\nproduct_share = {:.4}\nstream_share = {:.4}\nlaunch_us = {:.3}\nhost_gbs = {:.3}\nunits = {}\ntile = [{}, {}]\n{peers}{fitted}{price}",
        device.name,
        device.doc,
        peaks.join(", "),
        device.memory_bytes / crate::device::GIB,
        device.bandwidth / 1e9,
        device.product_share,
        device.stream_share,
        device.launch * 1e6,
        device.host_bandwidth / 1e9,
        device.units,
        device.tile[0],
        device.tile[1],
    )
}

/// Work per second of all threads together, each of which does `work` once per round: the best round counts.
fn best_rate(threads: usize, work_of_one: f64, make: impl Fn() -> Box<dyn FnMut()> + Sync) -> f64 {
    // Closed until all that could be started are.
    let gate = RwLock::new(());
    let run = || {
        let mut work = make();
        drop(kolo_base::read(&gate));
        let (begin, mut best) = (Instant::now(), f64::MAX);
        while begin.elapsed() < PATIENCE {
            let start = Instant::now();
            work();
            best = best.min(start.elapsed().as_secs_f64());
        }
        work_of_one / best
    };
    std::thread::scope(|scope| {
        let closed = kolo_base::write(&gate);
        let start = |_| std::thread::Builder::new().spawn_scoped(scope, run).ok();
        let others: Vec<_> = (1..threads).map_while(start).collect();
        drop(closed);
        let own = run();
        own + others.into_iter().map(|one| one.join().unwrap_or(0.0)).sum::<f64>()
    })
}

fn product_rate([rows, columns, terms]: [usize; 3], threads: usize) -> f64 {
    let make = || -> Box<dyn FnMut()> {
        let (left, right) = (rows * terms, terms * columns);
        let copies = (OPERAND_FLOATS / (left + right)).max(1);
        let (a, b) = (vec![0.5f32; left * copies], vec![0.25f32; right * copies]);
        let (mut c, mut scratch) = (vec![0.0f32; rows * columns], vec![0.0f32; SCRATCH]);
        let (team, mut turn) = (Team::solo(), 0);
        Box::new(move || {
            let a = Strided { data: &a[turn * left..][..left], line_stride: terms, k_stride: 1 };
            let b = Strided { data: &b[turn * right..][..right], line_stride: 1, k_stride: columns };
            let sink = Rows { data: Address(c.as_mut_ptr()), stride: columns };
            let shape = [rows, columns, terms];
            Gemm { shape, a: &a, b: Right::Fresh(&b), c: &sink, start: Start::Zero }.run_on(&team, &mut scratch);
            turn = (turn + 1) % copies;
        })
    };
    best_rate(threads, 2.0 * (rows * columns * terms) as f64, make)
}

fn stream_rate(threads: usize) -> f64 {
    let make = || -> Box<dyn FnMut()> {
        let (mut y, x) = (vec![1.0f32; STREAM_FLOATS], vec![1.0f32; STREAM_FLOATS]);
        Box::new(move || simd::add_into(&mut y, &x))
    };
    best_rate(threads, 12.0 * STREAM_FLOATS as f64, make)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceTable;

    #[test]
    fn a_measured_device_reads_as_it_was() {
        let rows = vec![
            DeviceRow { work: "product", precision: Precision::F32, shape: vec![512; 3], rate: 9e10 },
            DeviceRow { work: "product", precision: Precision::Bf16, shape: vec![512; 3], rate: 2e11 },
            DeviceRow { work: "product", precision: Precision::Bf16, shape: vec![64; 3], rate: 1e11 },
            DeviceRow::of(STREAM, 1, 1.25e10),
            DeviceRow::of(TO_HOST, 1, 5e9),
            DeviceRow::of(FROM_HOST, 1, 6e9),
        ];
        let device = device_of(
            "mine",
            &rows,
            &DeviceFacts::of_cores(8.0 * crate::device::GIB, Some(PeerLink { bandwidth: 5e9, latency: 2e-6 })),
        );
        assert_eq!((device.peak(Precision::Bf16), device.host_bandwidth), (2e11, 5e9));
        let mut table = DeviceTable::built_in().unwrap();
        table.extend(&kolo_config::parse(&as_toml(&device), "mine.toml").unwrap()).unwrap();
        let read = table.find("mine").unwrap();
        assert!((read.launch - device.launch).abs() < 1e-12, "{} s", read.launch);
        assert_eq!(&crate::device::Device { launch: device.launch, ..read.clone() }, &device);
    }
}
