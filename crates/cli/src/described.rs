//! The cluster that a plan or a simulation is about: described in a file, by the name of a device, or this machine.

use crate::clusters;
use crate::fail::Failure;
use kolo_comm::CallKind;
use kolo_config::FileKind;
use kolo_plan::Rates;
use kolo_plan::cluster::{Cluster, Level};
use kolo_plan::collective::CollectiveKind;
use kolo_plan::device::{Device, DeviceTable, PeerLink, Precision};
use kolo_plan::link::{self, Link, Measured};
use kolo_train::trial_run;
use std::collections::BTreeSet;
use std::path::Path;

/// Sizes of exchanges that are measured, from those of a few tokens to those of all gradients.
const EXCHANGED_BYTES: [usize; 5] = [1 << 10, 32 << 10, 256 << 10, 1 << 20, 8 << 20];

/// Devices on one host, and links inside and between hosts, where only the name of a device is known.
const PER_HOST: usize = 8;
const USUAL_LINKS: [(&str, &str, &str); 8] = [
    ("p100", "nvlink1", "infiniband-hdr"),
    ("v100", "nvlink2", "infiniband-hdr"),
    ("a100", "nvlink3", "infiniband-hdr"),
    ("h100-pcie", "pcie5", "infiniband-ndr"),
    ("h100", "nvlink4", "infiniband-ndr"),
    ("h200", "nvlink4", "infiniband-ndr"),
    ("rtx", "pcie4", "ethernet-25"),
    ("cpu", "shared-memory", "ethernet-25"),
];

const CLUSTER_FILE: FileKind = FileKind {
    noun: "cluster file",
    missing: "check the path, or name a cluster of `kolo list clusters`",
    too_large: "a cluster file describes a device and a few levels of links",
};

/// The cluster of this name, or that a file describes.
pub fn named_or_from_file(path: &Path) -> Result<Cluster, Failure> {
    let name = path.to_string_lossy();
    let root = match clusters::named(&name).filter(|_| !path.exists()) {
        Some(file) => kolo_config::parse(file.text, &format!("the built-in {name}.toml"))?,
        None => kolo_config::read(path, &CLUSTER_FILE)?,
    };
    Ok(Cluster::read(&root, &DeviceTable::built_in()?)?)
}

const DEVICE_FILE: FileKind = FileKind {
    noun: "device file",
    missing: "check the path; `kolo bench device --write FILE` makes one",
    too_large: "a device file has a few keys for each device",
};

/// A device by its name, or by a file: of `mine.toml` the first one, of `mine.toml:name` that one.
pub fn device(name: &str) -> Result<Device, Failure> {
    let mut table = DeviceTable::built_in()?;
    let (file, named) = match name.rsplit_once(".toml:") {
        Some((path, named)) => (Some(format!("{path}.toml")), Some(named.to_string())),
        None if name.ends_with(".toml") => (Some(name.to_string()), None),
        None => (None, Some(name.to_string())),
    };
    let first = file.as_ref().map(|path| table.extend(&kolo_config::read(Path::new(path), &DEVICE_FILE)?));
    let first = first.transpose()?.flatten();
    let Some(wanted) = named.or(first) else {
        let hint = "write a section for it: `[name]`, and its keys below, as `kolo bench device --write` does";
        return Err(Failure::usage(format!("--device {name}: the file describes no device"), hint));
    };
    // `h100` is the first of its kind.
    let found = table.find(&wanted).or_else(|hint| {
        let near = table.devices.iter().find(|device| device.name.starts_with(&format!("{wanted}-")));
        near.ok_or(hint)
    });
    Ok(found.map_err(|hint| Failure::usage(format!("--device {name} is unknown"), &hint))?.clone())
}

/// So many devices, eight to a host, on the links that usually go with them.
pub fn usual(device: Device, devices: usize) -> Result<Cluster, Failure> {
    if device.peers.is_some() {
        let name = format!("{devices} × {}", device.name);
        return Ok(Cluster { name, ..on_one_host(device, devices) });
    }
    let (_, inside, between) = USUAL_LINKS
        .into_iter()
        .find(|(prefix, _, _)| device.name.starts_with(prefix))
        .unwrap_or(("", "pcie4", "ethernet-100"));
    let links = Link::built_in()?;
    let level = |name: &str, link: &str, count: usize, links_of: usize| -> Result<Level, Failure> {
        let link =
            link::find(&links, link).map_err(|hint| Failure::usage(format!("link {link} is not known"), &hint))?;
        Ok(Level { name: name.into(), count, link: link.clone(), links: links_of, contention: 1.0 })
    };
    let per_host = PER_HOST.min(devices).max(1);
    let mut levels = vec![level("host", inside, per_host, 1)?];
    if devices > per_host {
        levels.push(level("network", between, devices.div_ceil(per_host), per_host)?);
    }
    let name = format!("{devices} × {}", device.name);
    Ok(Cluster { name, levels, ..Cluster::of_one(device) })
}

/// This machine: so many workers of so many threads each, with rates, and exchanges between them, that are measured now.
pub fn this_machine(workers: usize, threads: usize) -> Result<Cluster, Failure> {
    let mut cluster = machine_of(&Rates::measure(), workers, threads)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // Workers that take turns on a core would measure how the system shares it.
    if let Some(level) = cluster.levels.first_mut().filter(|_| (2..=cores).contains(&workers)) {
        // Where they cannot be tried, the link of the table counts.
        level.link.measured = measured_exchanges(workers).unwrap_or_default();
    }
    Ok(cluster)
}

/// What exchanges take between so many workers of this host, and in groups of them.
fn measured_exchanges(workers: usize) -> Result<Vec<Measured>, Failure> {
    let of = |kind: CollectiveKind| CallKind::ALL.into_iter().find(|call| call.name() == kind.name());
    let calls: Vec<CallKind> = CollectiveKind::ALL.into_iter().filter_map(of).collect();
    let rows = trial_run::time_links(workers, &calls, &EXCHANGED_BYTES)?;
    let groups: BTreeSet<usize> = rows.iter().map(|row| row.ranks).collect();
    let mut all = Vec::new();
    for (ranks, kind) in groups.into_iter().rev().flat_map(|ranks| CollectiveKind::ALL.map(|kind| (ranks, kind))) {
        let own = rows.iter().filter(|row| row.ranks == ranks && row.op == kind.name());
        let points: Vec<(f64, f64)> = own.map(|row| (row.bytes as f64, row.us_quarter / 1e6)).collect();
        all.push(Measured { kind, ranks, points });
    }
    Ok(all)
}

/// A machine of these rates. Workers that have no core of their own take turns.
pub fn machine_of(rates: &Rates, workers: usize, threads: usize) -> Result<Cluster, Failure> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let cores_of_one = (threads.max(1) as f64).min(cores as f64 / workers.max(1) as f64);
    let memory = kolo_train::memory_check::host_bytes().unwrap_or(u64::MAX) as f64 / workers.max(1) as f64;
    let mut peak = [0.0; Precision::ALL.len()];
    peak[Precision::F32 as usize] = rates.flops * cores_of_one;
    let device = Device {
        name: "this machine".into(),
        doc: "as measured now".into(),
        peak,
        memory_bytes: memory,
        reserved_bytes: Device::usual_reserve(memory, true),
        bandwidth: rates.bytes * cores_of_one,
        product_share: 1.0,
        stream_share: 1.0,
        launch: rates.call,
        host_bandwidth: rates.bytes * cores_of_one,
        units: 1,
        tile: [1, 1],
        price_per_hour: None,
        peers: Some(shared_memory()?),
        fitted_on: None,
    };
    Ok(on_one_host(device, workers.max(1)))
}

/// What workers of one host exchange over.
pub fn shared_memory() -> Result<PeerLink, Failure> {
    let links = Link::built_in()?;
    let shared = link::find(&links, "shared-memory").map_err(|hint| Failure::usage("no link of this host", &hint))?;
    Ok(PeerLink { bandwidth: shared.reached(), latency: shared.latency })
}

/// So many devices of one host; those that are cores do not compute while they exchange.
fn on_one_host(device: Device, count: usize) -> Cluster {
    let Some(peers) = device.peers else { return Cluster::of_one(device) };
    let level = Level { name: "host".into(), count, link: Link::of_peers(peers), links: 1, contention: 1.0 };
    let mut cluster = Cluster { levels: vec![level], ..Cluster::of_one(device) };
    cluster.system.overlaps_gradients = false;
    cluster.system.overlaps_layers = false;
    cluster.system.overlaps_gathers = false;
    cluster
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_that_share_cores_are_not_more_cores() {
        let rates = Rates { flops: 1e10, thin_flops: 1e9, bytes: 1e9, call: 1e-6 };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let peak = |workers: usize, threads: usize| {
            let cluster = machine_of(&rates, workers, threads).unwrap();
            cluster.device.peak(Precision::F32) * workers as f64
        };
        assert_eq!(peak(1, cores), 1e10 * cores as f64);
        assert_eq!(peak(cores, 1), 1e10 * cores as f64);
        for workers in [cores, 2 * cores, 8 * cores] {
            let all = peak(workers, 1) / (1e10 * cores as f64);
            assert!((all - 1.0).abs() < 1e-12, "{workers} workers on {cores} cores: {all}");
        }
    }
}
