//! The cluster that a plan or a simulation is about: described in a file, by the name of a device, or this machine.

use crate::fail::Failure;
use kolo_config::FileKind;
use kolo_plan::Rates;
use kolo_plan::cluster::{Cluster, Level};
use kolo_plan::device::{Device, DeviceTable, Precision};
use kolo_plan::link::{self, Link};
use std::path::Path;

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
    missing: "check the path; examples/clusters/h100.toml is one",
    too_large: "a cluster file describes a device and a few levels of links",
};

/// The cluster that a file describes.
pub fn from_file(path: &Path) -> Result<Cluster, Failure> {
    let root = kolo_config::read(path, &CLUSTER_FILE)?;
    Ok(Cluster::read(&root, &DeviceTable::built_in()?)?)
}

/// Devices of this name, eight to a host, on the links that usually go with them.
pub fn usual(name: &str, devices: usize) -> Result<Cluster, Failure> {
    let table = DeviceTable::built_in()?;
    // `h100` is the first of its kind.
    let found = table.find(name).or_else(|hint| {
        let near = table.devices.iter().find(|device| device.name.starts_with(&format!("{name}-")));
        near.ok_or(hint)
    });
    let device = found.map_err(|hint| Failure::usage(format!("--device {name} is unknown"), &hint))?.clone();
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

/// This machine: so many workers of so many threads each, with rates that are measured now.
pub fn this_machine(workers: usize, threads: usize) -> Result<Cluster, Failure> {
    machine_of(&Rates::measure(), workers, threads)
}

/// A machine of these rates.
pub fn machine_of(rates: &Rates, workers: usize, threads: usize) -> Result<Cluster, Failure> {
    let threads = threads.max(1) as f64;
    let memory = kolo_train::memory_check::host_bytes().unwrap_or(u64::MAX) as f64 / workers.max(1) as f64;
    let mut peak = [0.0; Precision::ALL.len()];
    peak[Precision::F32 as usize] = rates.flops * threads;
    let device = Device {
        name: "this machine".into(),
        doc: "as measured now".into(),
        peak,
        memory_bytes: memory,
        bandwidth: rates.bytes * threads,
        product_share: 1.0,
        stream_share: 1.0,
        launch: rates.call,
        host_bandwidth: rates.bytes * threads,
        units: 1,
        tile: [1, 1],
        price_per_hour: None,
        fitted_on: None,
    };
    let links = Link::built_in()?;
    let shared = link::find(&links, "shared-memory").map_err(|hint| Failure::usage("no link of this host", &hint))?;
    let level = Level { name: "host".into(), count: workers.max(1), link: shared.clone(), links: 1, contention: 1.0 };
    let mut cluster = Cluster { levels: vec![level], ..Cluster::of_one(device) };
    // Cores that exchange do not compute meanwhile.
    cluster.system.overlaps_gradients = false;
    cluster.system.overlaps_layers = false;
    cluster.system.overlaps_gathers = false;
    Ok(cluster)
}
