//! Clusters: devices in groups of groups, with a link at each level, as a `cluster.toml` describes them.
//!
//! Rank r runs on device r: numbers run fastest inside the innermost group. The ranks of a mesh's axis are then so many in each
//! innermost group, in so many groups of the next level, and so on ([`Cluster::span`]); what a level's links give to one such
//! group of ranks follows from how many other groups use them at the same time.

use crate::device::{Device, DeviceTable};
use crate::link::{self, Link};
use crate::slow_devices::{self, SlowDevices};
pub use crate::system::SystemTraits;
use kolo_graph::settings::{SettingError, Settings};

/// Groups of the level below (or devices, at the first), joined by a link.
#[derive(Clone, Debug, PartialEq)]
pub struct Level {
    pub name: String,
    /// Members: devices at the first level, groups of the level below at the others.
    pub count: usize,
    pub link: Link,
    /// Links from each member to this level.
    pub links: usize,
    /// How many times less than its members' links together the level carries: 1 for a network without bottleneck.
    pub contention: f64,
}

/// How often what fails, and how long it then takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Failures {
    /// Mean hours between failures of one device; infinite if devices never fail.
    pub device_mtbf_hours: f64,
    /// Of one group of the first level, as a whole.
    pub host_mtbf_hours: f64,
    /// Of one link of a group of the first level to the others.
    pub link_mtbf_hours: f64,
    /// The Weibull shape of the time between failures: 1 is exponential, less is more of them early.
    pub shape: f64,
    /// Until a failed device or host is back, or replaced.
    pub repair_minutes: f64,
    /// From a failure to the first step after it, beside what has to be computed again.
    pub restart_seconds: f64,
    /// Bytes per second at which one host writes a checkpoint.
    pub checkpoint_bandwidth: f64,
}

impl Default for Failures {
    fn default() -> Self {
        Self {
            device_mtbf_hours: f64::INFINITY,
            host_mtbf_hours: f64::INFINITY,
            link_mtbf_hours: f64::INFINITY,
            shape: 1.0,
            repair_minutes: 60.0,
            restart_seconds: 180.0,
            checkpoint_bandwidth: 2e9,
        }
    }
}

/// A described cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    pub name: String,
    pub device: Device,
    /// Innermost first.
    pub levels: Vec<Level>,
    pub failures: Failures,
    pub slow: Vec<SlowDevices>,
    pub system: SystemTraits,
}

/// What one level gives to a group of ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct LevelUse {
    /// How many members of this level the group has, of each group of it that it has any of.
    pub ranks: usize,
    /// Ranks of the group inside one member.
    pub inside: usize,
    /// Seconds of an empty message.
    pub latency: f64,
    /// Bytes per second from one member to the others, for this group alone.
    pub bandwidth: f64,
    /// The link, for what was measured on it.
    pub link: Link,
}

/// The most levels and members: 100,000 devices are five of ten each.
const LEVELS_MAX: usize = 16;
const COUNT_MAX: usize = 1 << 24;
const LEVEL_EXAMPLE: &str = "[[level]] with `count` and `link`";

impl Cluster {
    /// One device, joined to nothing.
    pub fn of_one(device: Device) -> Self {
        Self {
            name: device.name.clone(),
            device,
            levels: Vec::new(),
            failures: Failures::default(),
            slow: Vec::new(),
            system: SystemTraits::default(),
        }
    }

    pub fn devices(&self) -> usize {
        self.levels.iter().map(|level| level.count).product()
    }

    /// Devices in one group of a level.
    pub fn devices_at(&self, level: usize) -> usize {
        self.levels[..=level].iter().map(|level| level.count).product()
    }

    /// The same cluster with as many devices as it takes: the outermost level shrinks.
    pub fn with_devices(&self, devices: usize) -> Result<Self, String> {
        if devices > self.devices().max(1) {
            return Err(format!(
                "{devices} devices requested, but the cluster \"{}\" has {}",
                self.name,
                self.devices()
            ));
        }
        let mut cluster = self.clone();
        let mut inside = 1;
        for level in &mut cluster.levels {
            level.count = level.count.min(devices.div_ceil(inside)).max(1);
            inside *= level.count;
        }
        Ok(cluster)
    }

    /// For `size` ranks whose numbers are `stride` apart: what each level gives to them, from the innermost. Levels at which
    /// the group has only one member are left out. All other ranks are taken to do the same at the same time.
    pub fn span(&self, stride: usize, size: usize) -> Vec<LevelUse> {
        let (mut found, mut inside, mut devices_below) = (Vec::new(), 1, 1);
        for level in &self.levels {
            let devices = devices_below * level.count;
            let reached = (devices / stride.max(1)).clamp(1, size);
            let ranks = (reached / inside).max(1);
            if ranks > 1 {
                // Groups like this one that leave the same member.
                let groups = (devices_below / inside).max(1);
                let bandwidth = level.link.reached() * level.links as f64 / groups as f64 / level.contention;
                let (latency, link) = (level.link.latency, level.link.clone());
                found.push(LevelUse { ranks, inside, latency, bandwidth, link });
                inside *= ranks;
            }
            devices_below = devices;
        }
        found
    }

    /// Reads a description; `devices` are those that it may name.
    pub fn read(root: &Settings, devices: &DeviceTable) -> Result<Self, SettingError> {
        let links = link::read_all(&root.table("links")?, Link::built_in()?)?;
        let mut devices = devices.clone();
        devices.extend(&root.table("devices")?)?;
        let (name, device) = (root.text("name", "cluster")?, root.text("device", "")?);
        let known = devices.find(&device).map_err(|hint| match device.is_empty() {
            true => root.wrong("device", "is missing", hint),
            false => root.wrong("device", format!("is \"{device}\", which is not known"), hint),
        })?;
        let sections = root.tables("level", LEVEL_EXAMPLE)?;
        if sections.is_empty() || sections.len() > LEVELS_MAX {
            let message = match sections.len() {
                0 => "is missing: the cluster needs at least one `[[level]]`".into(),
                count => format!("is there {count} times, but at most {LEVELS_MAX} levels are possible"),
            };
            return Err(root.wrong(
                "level",
                message,
                format!("write {LEVEL_EXAMPLE}, the innermost first, at most {LEVELS_MAX}"),
            ));
        }
        let mut levels: Vec<Level> = Vec::new();
        for section in &sections {
            let below = levels.iter().map(|level| level.count).product();
            levels.push(read_level(section, &links, below)?);
        }
        let devices = levels.iter().map(|level| level.count).product();
        let cluster = Self {
            name,
            device: known.clone(),
            levels,
            failures: read_failures(&root.table("failures")?)?,
            slow: slow_devices::read(root, devices)?,
            system: SystemTraits::read(&root.table("system")?)?,
        };
        root.finish()?;
        Ok(cluster)
    }
}

/// A level above groups of so many devices.
fn read_level(section: &Settings, links: &[Link], devices_below: usize) -> Result<Level, SettingError> {
    let count = section.count_in("count", 0, 1, COUNT_MAX)?;
    if !section.has("count") {
        return Err(section.wrong("count", "is missing", "say how many devices or groups this level joins"));
    }
    let name = section.text("link", "")?;
    let known = match name.is_empty() {
        true if section.peek("bandwidth_gbs").is_none() => {
            let message = "is missing: a level needs a link between its members";
            return Err(section.wrong("link", message, "name a link such as \"nvlink4\", or write `bandwidth_gbs`"));
        }
        true => None,
        false => Some(
            link::find(links, &name)
                .map_err(|hint| section.wrong("link", format!("is \"{name}\", which is not known"), hint))?,
        ),
    };
    if devices_below.checked_mul(count).is_none_or(|devices| devices > COUNT_MAX) {
        let message = format!("is {count}, which makes more than {COUNT_MAX} devices");
        return Err(section.wrong("count", message, "describe fewer"));
    }
    let level = Level {
        name: section.text("name", "")?,
        count,
        link: link::read(&name, section, known)?,
        links: section.count_in("links", devices_below, 1, COUNT_MAX)?,
        contention: section.float_in("contention", 1.0, 0.01, 1e6)?,
    };
    section.finish()?;
    Ok(level)
}

fn read_failures(section: &Settings) -> Result<Failures, SettingError> {
    let default = Failures::default();
    let hours = |key: &str| -> Result<f64, SettingError> {
        let hours = section.float(key, 0.0)?;
        if section.has(key) && !(hours > 0.0) {
            return Err(section.wrong(
                key,
                format!("is {hours}"),
                "write hours above 0, or leave it out: nothing fails",
            ));
        }
        Ok(if section.has(key) { hours } else { f64::INFINITY })
    };
    let failures = Failures {
        device_mtbf_hours: hours("device_mtbf_hours")?,
        host_mtbf_hours: hours("host_mtbf_hours")?,
        link_mtbf_hours: hours("link_mtbf_hours")?,
        shape: section.float_in("shape", default.shape, 0.1, 10.0)?,
        repair_minutes: section.float_in("repair_minutes", default.repair_minutes, 0.0, 1e7)?,
        restart_seconds: section.float_in("restart_seconds", default.restart_seconds, 0.0, 1e7)?,
        checkpoint_bandwidth: section.float_in("checkpoint_gbs", default.checkpoint_bandwidth / 1e9, 1e-6, 1e6)? * 1e9,
    };
    section.finish()?;
    Ok(failures)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn read(text: &str) -> Result<Cluster, String> {
        let root = kolo_config::parse(text, "cluster.toml").map_err(|error| error.to_string())?;
        Cluster::read(&root, &DeviceTable::built_in().unwrap()).map_err(|error| error.to_string())
    }

    const SELENE: &str = "device = \"a100-80\"\n[[level]]\ncount = 8\nlink = \"nvlink3\"\n[[level]]\ncount = 384\nlink = \"infiniband-hdr\"\n";

    #[test]
    fn groups_of_ranks_span_levels() {
        let cluster = read(SELENE).unwrap();
        assert_eq!(cluster.devices(), 3072);
        let spans = |stride, size| -> Vec<(usize, f64)> {
            cluster.span(stride, size).iter().map(|level| (level.ranks, level.bandwidth / 1e9)).collect()
        };
        // Eight neighbours share a node; every device has a network card of its own.
        assert_eq!(spans(1, 8), [(8, 234.0)]);
        assert_eq!(spans(8, 64), [(64, 22.5)]);
        // Pairs in each of 16 nodes: four groups in each node, which leave it together.
        assert_eq!(spans(4, 32), [(2, 234.0), (16, 45.0)]);
        assert_eq!(spans(1, 16), [(8, 234.0), (2, 180.0)]);
    }

    #[test]
    fn one_card_of_a_host_is_shared_by_its_devices() {
        let cluster = read("device = \"p100\"\n[[level]]\ncount = 4\nlink = \"pcie3\"\n[[level]]\ncount = 128\nlink = \"roce-25\"\nlinks = 1\n").unwrap();
        let span = cluster.span(4, 128);
        assert!((span[0].bandwidth - 3.125e9 * 0.9 / 4.0).abs() < 1.0);
        let fewer = cluster.with_devices(16).unwrap();
        assert_eq!(fewer.levels.iter().map(|level| level.count).collect::<Vec<_>>(), [4, 4]);
        assert!(cluster.with_devices(513).unwrap_err().contains("513 devices requested"));
    }

    #[test]
    fn wrong_clusters_name_the_line() {
        let wrong = |from: &str, to: &str| read(&SELENE.replace(from, to)).unwrap_err();
        assert!(wrong("nvlink3", "nvlink33").starts_with("cluster.toml:4: `level[0].link` is \"nvlink33\""));
        assert!(wrong("link = \"infiniband-hdr\"", "").contains("a level needs a link"));
        assert!(
            wrong("link = \"infiniband-hdr\"", "bandwidth_gbs = 0")
                .starts_with("cluster.toml:7: `level[1].bandwidth_gbs` is 0")
        );
        assert!(wrong("a100-80", "a100").contains("The devices are"));
        assert!(read("device = \"a100-80\"\n").unwrap_err().contains("at least one `[[level]]`"));
        assert!(wrong("count = 384", "count = 0").contains("must be at least 1"));
        assert!(wrong("count = 384\n", "").contains("count"));
    }

    #[test]
    fn slow_devices_are_named_or_drawn() {
        let with = |slow: &str| read(&format!("{SELENE}{slow}"));
        let cluster = with("[[slow]]\nranks = [3, 7]\nfactor = 1.5\n[[slow]]\nshare = 0.01\nfactor = 1.2\n").unwrap();
        let slow = cluster.slow_ranks(3072, 1);
        assert_eq!(slow.iter().filter(|one| one.factor == 1.5).map(|one| one.rank).collect::<Vec<_>>(), [3, 7]);
        // A hundredth of 3,072, each once, by the seed.
        let mut drawn: Vec<usize> = slow.iter().filter(|one| one.factor == 1.2).map(|one| one.rank).collect();
        drawn.dedup();
        assert_eq!(drawn.len(), 31);
        assert_eq!(slow, cluster.slow_ranks(3072, 1));
        assert_ne!(slow, cluster.slow_ranks(3072, 2));
        assert!(cluster.slow_ranks(4, 1).iter().all(|one| one.rank < 4));
        let wrong = |slow: &str| with(slow).unwrap_err();
        assert!(
            wrong("[[slow]]\nranks = [3072]\nfactor = 2\n").starts_with("cluster.toml:9: `slow[0].ranks` names 3072")
        );
        assert!(wrong("[[slow]]\nranks = [1]\nfactor = 0.5\n").starts_with("cluster.toml:10: `slow[0].factor` is 0.5"));
        assert!(wrong("[[slow]]\nfactor = 2\n").contains("`slow[0].ranks` and `share` are both missing"));
        assert!(wrong("[[slow]]\nshare = 1.5\nfactor = 2\n").contains("share"));
    }
}
