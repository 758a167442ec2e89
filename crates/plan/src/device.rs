//! Devices: what each can do at its best, the share of that which training reaches, its memory and its price.
//!
//! The table of `devices.toml` is built in. A user's file extends it or changes some of its keys; both are read by the same
//! code, and errors name the file and the line.

use kolo_graph::settings::{Setting, SettingError, Settings, nearest};

const BUILT_IN: &str = include_str!("devices.toml");
const BUILT_IN_NAME: &str = "the built-in devices.toml";

/// What numbers are multiplied in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Precision {
    #[default]
    F32,
    /// 32 bits stored, 19 multiplied.
    Tf32,
    Bf16,
    F16,
    /// Products of 8 bits between tensors of 16.
    F8,
}

impl Precision {
    /// From the widest to the narrowest.
    pub const ALL: [Precision; 5] = [Precision::F32, Precision::Tf32, Precision::Bf16, Precision::F16, Precision::F8];

    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Tf32 => "tf32",
            Precision::Bf16 => "bf16",
            Precision::F16 => "f16",
            Precision::F8 => "f8",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }

    /// Bytes of an activation, a gathered weight or a message of the model.
    pub fn bytes(self) -> usize {
        match self {
            Precision::F32 | Precision::Tf32 => 4,
            Precision::Bf16 | Precision::F16 | Precision::F8 => 2,
        }
    }

    /// Whether there are f32 masters beside the weights that are multiplied.
    pub fn is_mixed(self) -> bool {
        self.bytes() < 4
    }
}

/// What devices of one host exchange over, where the cores that compute also exchange: neither goes on during the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeerLink {
    /// Bytes per second that exchanges reach.
    pub bandwidth: f64,
    /// Seconds of an empty message.
    pub latency: f64,
}

/// One kind of device.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    pub name: String,
    pub doc: String,
    /// Peak floating-point operations per second by precision, in the order of [`Precision::ALL`]; 0 if there is none.
    pub peak: [f64; Precision::ALL.len()],
    pub memory_bytes: f64,
    /// Bytes per second, read and written.
    pub bandwidth: f64,
    /// The share of the peak that large products reach.
    pub product_share: f64,
    /// The share of the bandwidth that ops which stream reach.
    pub stream_share: f64,
    /// Seconds from one kernel to the next.
    pub launch: f64,
    /// Bytes per second between its memory and the host's, one way.
    pub host_bandwidth: f64,
    /// Multiprocessors.
    pub units: usize,
    /// Rows and columns of a product that one multiprocessor computes at a time.
    pub tile: [usize; 2],
    pub price_per_hour: Option<f64>,
    /// Bytes of its memory that no plan fills: see [`Device::usual_reserve`].
    pub reserved_bytes: f64,
    /// Of cores.
    pub peers: Option<PeerLink>,
    /// The measurement that the shares were fitted on.
    pub fitted_on: Option<String>,
}

/// Of a small memory, the process takes no more than this share.
const RESERVED_SHARE_MAX: f64 = 0.1;
/// What a process takes of a GPU's memory beside what it computes with: the context of CUDA with the code of its kernels and the
/// workspaces of cuBLAS and cuDNN, and the buffers of NCCL's channels (PyTorch's take 2 GiB for both).
const CONTEXT_BYTES: f64 = 0.6 * GIB;
const COLLECTIVES_BYTES: f64 = 1.4 * GIB;
/// The share of a memory that lies in holes between what is in use, or that others of a host hold.
const HOLES_SHARE: f64 = 0.02;

impl Device {
    /// Bytes that are kept free on a device of its class, where neither its entry nor the cluster says how many: on GPUs for the
    /// context, collectives and holes; on cores for holes.
    pub fn usual_reserve(memory: f64, is_core: bool) -> f64 {
        let process = if is_core { 0.0 } else { CONTEXT_BYTES + COLLECTIVES_BYTES };
        process.min(memory * RESERVED_SHARE_MAX) + memory * HOLES_SHARE
    }

    /// What a job that does not say it is computed in: bf16 where there are units for it, else f16 where there are some, else f32.
    pub fn usual_precision(&self) -> Precision {
        let is_faster = |precision: Precision| self.peak[precision as usize] > self.peak[Precision::F32 as usize];
        [Precision::Bf16, Precision::F16].into_iter().find(|one| is_faster(*one)).unwrap_or_default()
    }

    /// Peak operations per second; a precision the device does not have runs as the next wider one.
    pub fn peak(&self, precision: Precision) -> f64 {
        let upto = Precision::ALL.iter().position(|one| *one == precision).unwrap_or(0);
        // 16-bit floats stand side by side: one is as fast as the other where only one is listed.
        let twin = match precision {
            Precision::Bf16 => self.peak[Precision::F16 as usize],
            _ => 0.0,
        };
        let wider = self.peak[..=upto].iter().rev().copied().find(|peak| *peak > 0.0);
        if self.peak[upto] == 0.0 && twin > 0.0 { twin } else { wider.unwrap_or(0.0) }
    }
}

/// Devices by name, in the order in which they were read.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceTable {
    pub devices: Vec<Device>,
}

impl DeviceTable {
    /// The devices that are built in.
    pub fn built_in() -> Result<Self, SettingError> {
        let mut table = Self { devices: Vec::new() };
        table.extend(&kolo_config::parse(BUILT_IN, BUILT_IN_NAME)?)?;
        Ok(table)
    }

    /// Adds the devices of a file, or changes those it names. The name of the first:
    pub fn extend(&mut self, root: &Settings) -> Result<Option<String>, SettingError> {
        let names: Vec<String> = root.keys().map(str::to_string).collect();
        for name in &names {
            if !matches!(root.peek(name), Some(Setting::Table(_))) {
                let hint = "a device is a section: `[name]`, and its keys below";
                return Err(root.wrong(name, "is outside of any device", hint));
            }
            let section = root.table(name)?;
            let known = self.devices.iter().position(|device| device.name == *name);
            let device = read(name, &section, known.map(|at| &self.devices[at]))?;
            match known {
                Some(at) => self.devices[at] = device,
                None => self.devices.push(device),
            }
        }
        Ok(names.into_iter().next())
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.devices.iter().map(|device| device.name.as_str())
    }

    /// The device of this name, or what to write instead.
    pub fn find(&self, name: &str) -> Result<&Device, String> {
        let names: Vec<&str> = self.names().collect();
        self.devices.iter().find(|device| device.name == name).ok_or_else(|| match nearest(name, self.names()) {
            Some(near) => format!("did you mean \"{near}\"? The devices are {}", names.join(", ")),
            None => format!("the devices are {}; a file of your own can add one", names.join(", ")),
        })
    }
}

/// A key that has to be written, as nothing is known of the device: a number above 0.
fn needed(section: &Settings, key: &str, known: Option<f64>, most: f64) -> Result<f64, SettingError> {
    if known.is_none() && !section.has(key) {
        return Err(section.wrong(key, "is missing", format!("a device of your own needs `{key}`")));
    }
    let value = section.float(key, known.unwrap_or(0.0))?;
    if value > 0.0 && value <= most {
        return Ok(value);
    }
    let message = format!("is {value}, but must be above 0 and at most {most}");
    Err(section.wrong(key, message, "see devices.toml of kolo-plan for examples"))
}

/// Of PCI Express 4.0 with 16 lanes, as copies from pinned memory reach it.
const HOST_GBS: f64 = 25.0;
/// No device does more: a number with too many zeros is a mistake.
const TFLOPS_MAX: f64 = 1e6;
const GIB_MAX: f64 = 1e6;
const LAUNCH_US_MAX: f64 = 1e5;

fn read_peers(section: &Settings, known: Option<PeerLink>) -> Result<Option<PeerLink>, SettingError> {
    if known.is_none() && !section.has("peer_gbs") {
        return Ok(None);
    }
    let latency =
        section.float_in("peer_latency_us", known.map_or(1.0, |peers| peers.latency * 1e6), 0.0, LAUNCH_US_MAX)?;
    let bandwidth = needed(section, "peer_gbs", known.map(|peers| peers.bandwidth / 1e9), GIB_MAX)? * 1e9;
    Ok(Some(PeerLink { bandwidth, latency: latency / 1e6 }))
}

fn read(name: &str, section: &Settings, known: Option<&Device>) -> Result<Device, SettingError> {
    let peaks = section.table_like("peak_tflops", "{ f32 = 19.5, bf16 = 312 }")?;
    let mut peak = known.map_or([0.0; Precision::ALL.len()], |device| device.peak);
    for (at, precision) in Precision::ALL.iter().enumerate() {
        peak[at] = peaks.float_in(precision.name(), peak[at] / 1e12, 0.0, TFLOPS_MAX)? * 1e12;
    }
    peaks.finish()?;
    if peak[0] == 0.0 {
        return Err(section.wrong("peak_tflops", "has no f32 rate", "write `peak_tflops = { f32 = 19.5 }`"));
    }
    let default = |value: fn(&Device) -> f64, otherwise: f64| known.map_or(otherwise, value);
    let tile = section.counts("tile", &known.map_or([128, 128], |device| device.tile))?;
    let [rows, columns] = tile[..] else {
        return Err(section.wrong("tile", "must be two numbers", "write `tile = [128, 256]`"));
    };
    let text = |key: &str, known: Option<&str>| section.text(key, known.unwrap_or_default());
    let fitted_on = text("fitted_on", known.and_then(|device| device.fitted_on.as_deref()))?;
    let price =
        section.float_in("price_per_hour", known.and_then(|device| device.price_per_hour).unwrap_or(0.0), 0.0, 1e6)?;
    let peers = read_peers(section, known.and_then(|device| device.peers))?;
    let memory_bytes = needed(section, "memory_gib", known.map(|device| device.memory_bytes / GIB), GIB_MAX)? * GIB;
    let same = known.filter(|device| device.memory_bytes == memory_bytes);
    let reserve = same.map_or(Device::usual_reserve(memory_bytes, peers.is_some()), |device| device.reserved_bytes);
    let device = Device {
        name: name.into(),
        doc: text("doc", known.map(|device| device.doc.as_str()))?,
        peak,
        memory_bytes,
        reserved_bytes: section.float_in("reserved_gib", reserve / GIB, 0.0, GIB_MAX)? * GIB,
        bandwidth: needed(section, "bandwidth_gbs", known.map(|device| device.bandwidth / 1e9), GIB_MAX)? * 1e9,
        product_share: needed(section, "product_share", Some(default(|device| device.product_share, 0.7)), 1.0)?,
        stream_share: needed(section, "stream_share", Some(default(|device| device.stream_share, 0.85)), 1.0)?,
        launch: section.float_in("launch_us", default(|device| device.launch, 3e-6) * 1e6, 0.0, LAUNCH_US_MAX)? / 1e6,
        host_bandwidth: needed(
            section,
            "host_gbs",
            Some(default(|device| device.host_bandwidth, HOST_GBS * 1e9) / 1e9),
            GIB_MAX,
        )? * 1e9,
        units: section.count_in("units", known.map_or(1, |device| device.units), 1, 1 << 20)?,
        tile: [rows, columns],
        price_per_hour: (price > 0.0).then_some(price),
        peers,
        fitted_on: (!fitted_on.is_empty()).then_some(fitted_on),
    };
    section.finish()?;
    Ok(device)
}

pub(crate) const GIB: f64 = (1u64 << 30) as f64;

#[cfg(test)]
mod tests {
    use super::*;

    fn extended(text: &str) -> Result<DeviceTable, String> {
        let mut table = DeviceTable::built_in().unwrap();
        let root = kolo_config::parse(text, "mine.toml").unwrap();
        table.extend(&root).map(|_| table).map_err(|error| error.to_string())
    }

    #[test]
    fn a_users_file_changes_and_adds() {
        let table = extended("[h200]\nproduct_share = 0.5\n[tpu]\npeak_tflops = { f32 = 1, bf16 = 275 }\nmemory_gib = 32\nbandwidth_gbs = 1200\n").unwrap();
        let h200 = table.find("h200").unwrap();
        assert_eq!((h200.product_share, h200.peak(Precision::Bf16)), (0.5, 989e12));
        let tpu = table.find("tpu").unwrap();
        assert_eq!((tpu.peak(Precision::F16), tpu.peak(Precision::Tf32)), (275e12, 1e12));
        assert!(table.find("h20").unwrap_err().contains("did you mean \"h200\""));
    }

    #[test]
    fn half_precisions_that_a_device_lacks_run_as_what_it_has() {
        let table = DeviceTable::built_in().unwrap();
        assert_eq!(table.find("v100").unwrap().peak(Precision::Bf16), 125e12);
        assert_eq!(table.find("p100").unwrap().peak(Precision::F16), 10.6e12);
        assert_eq!(table.find("a100-80").unwrap().peak(Precision::F8), 312e12);
    }

    #[test]
    fn a_class_of_devices_has_a_usual_precision_and_reserve() {
        let table = DeviceTable::built_in().unwrap();
        let usual = |name: &str| table.find(name).unwrap().usual_precision();
        let wanted = [Precision::Bf16, Precision::Bf16, Precision::F16, Precision::F32, Precision::F32];
        assert_eq!(["h100-80", "rtx4090", "v100", "p100", "cpu-core"].map(usual), wanted);
        let gib = |device: &Device| device.reserved_bytes / GIB;
        assert!((gib(table.find("h100-80").unwrap()) - (2.0 + 0.02 * 79.1)).abs() < 1e-9);
        assert!((gib(table.find("cpu-core").unwrap()) - 0.08).abs() < 1e-9);
        let own = extended("[h100-80]\nreserved_gib = 1\n[h200]\nproduct_share = 0.5\n").unwrap();
        assert_eq!(gib(own.find("h100-80").unwrap()), 1.0);
        assert_eq!(own.find("h200").unwrap().reserved_bytes, table.find("h200").unwrap().reserved_bytes);
    }

    #[test]
    fn wrong_devices_name_the_line() {
        let wrong = |text: &str| extended(text).unwrap_err();
        assert!(wrong("[x]\npeak_tflops = { f32 = 1 }\n").starts_with("mine.toml:1: `x.memory_gib` is missing"));
        assert!(wrong("[h200]\nbandwith_gbs = 1\n").contains("did you mean `bandwidth_gbs`"));
        assert!(wrong("[h200]\nbandwidth_gbs = 0\n").starts_with("mine.toml:2: `h200.bandwidth_gbs` is 0"));
        assert!(wrong("a = 1\n").starts_with("mine.toml:1: `a` is outside of any device"));
    }
}
