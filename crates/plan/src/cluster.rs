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

/// What one level gives to a group of ranks. Where groups of ranks lie differently, this is the one that crosses the most.
#[derive(Clone, Debug, PartialEq)]
pub struct LevelUse {
    /// The level's place in [`Cluster::levels`].
    pub level: usize,
    /// Members of this level in which the group has ranks, all groups of the level together. At the first level of a span these
    /// are the ranks themselves.
    pub members: usize,
    /// How many of them one group of the level has, at most.
    pub ranks: usize,
    /// Ranks of the group inside one member, at most.
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

    /// Bytes of every device that no plan fills.
    pub fn reserved_bytes(&self) -> f64 {
        self.system.reserved_bytes.unwrap_or(self.device.reserved_bytes)
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
        let group = RankGroup { stride: stride.max(1), size: size.max(1), devices: self.devices() };
        let (mut found, mut below) = (Vec::new(), GroupShare { groups: group.size, inside: 1 });
        let mut devices_below = 1;
        for (at, level) in self.levels.iter().enumerate() {
            let devices = devices_below * level.count;
            let share = group.share(devices);
            let ranks = match below.groups == share.groups {
                true => 1,
                false if at == 0 => share.inside,
                false => below.groups.min(devices.div_ceil(devices_below.max(group.stride))),
            };
            if ranks > 1 {
                let sharers = group.leaving(devices_below) as f64;
                let bandwidth = level.link.reached() * level.links as f64 / sharers / level.contention;
                let (latency, link) = (level.link.latency, level.link.clone());
                let GroupShare { groups: members, inside } = below;
                found.push(LevelUse { level: at, members, ranks, inside, latency, bandwidth, link });
            }
            (devices_below, below) = (devices, share);
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

/// Groups of devices whose borders are looked at; with more, these stand for all.
const GROUPS_LOOKED_AT: usize = 64;

/// Ranks of one axis of a mesh: `size` of them, `stride` apart. Blocks of `stride` such groups follow each other on the devices.
#[derive(Clone, Copy)]
struct RankGroup {
    stride: usize,
    size: usize,
    /// Devices of the cluster.
    devices: usize,
}

/// How a group of ranks lies on groups of so many devices.
struct GroupShare {
    /// Groups of devices in which it has ranks.
    groups: usize,
    /// The most ranks in one of them.
    inside: usize,
}

impl RankGroup {
    /// Devices from the first rank of a block to the first of the next one.
    fn block(&self) -> usize {
        self.stride.saturating_mul(self.size)
    }

    /// Of all groups of ranks, the one that meets the most groups of so many devices.
    fn share(&self, devices: usize) -> GroupShare {
        if devices >= self.devices {
            return GroupShare { groups: 1, inside: self.size };
        }
        if self.stride >= devices {
            return GroupShare { groups: self.size, inside: 1 };
        }
        let reach = (self.size - 1) * self.stride;
        let whole = reach / devices + 1;
        let straddles = self.last_offset(devices) + reach % devices >= devices;
        let inside = match straddles && whole == 1 {
            // It would fit into one, and lies in two.
            true => self.size.div_ceil(2),
            false => self.size.min(devices.div_ceil(self.stride)),
        };
        GroupShare { groups: whole + usize::from(straddles), inside }
    }

    /// The farthest from the begin of a group of so many devices at which a group of ranks starts.
    fn last_offset(&self, devices: usize) -> usize {
        let block = self.block();
        let blocks = (self.devices / block).max(1);
        let common = common_divisor(block, devices);
        let offset = match blocks >= devices / common {
            true => devices - common,
            false => (0..blocks).map(|number| number * block % devices).max().unwrap_or(0),
        };
        (offset + self.stride - 1).min(devices - 1)
    }

    /// Groups of ranks that leave the same group of so many devices, at most.
    fn leaving(&self, devices: usize) -> usize {
        let block = self.block();
        if self.stride >= devices || devices.is_multiple_of(block) || block.is_multiple_of(devices) {
            return self.stride.min(devices);
        }
        // A block ends, and the next one begins, inside a group of devices.
        let of_group = |group: usize| {
            let [begin, end] = [group * devices, (group + 1) * devices].map(|border| self.across(border));
            if group * devices / block == (group + 1) * devices / block { begin.max(end) } else { begin + end }
        };
        let groups = (self.devices / devices).min(GROUPS_LOOKED_AT);
        (0..groups).map(of_group).max().unwrap_or(1).clamp(1, devices)
    }

    /// Groups of ranks on both sides of a border between devices.
    fn across(&self, border: usize) -> usize {
        let (block, at) = (border / self.block(), border % self.block());
        if block >= self.devices / self.block() {
            return 0;
        }
        let reach = (self.size - 1) * self.stride;
        at.min(self.stride).saturating_sub(at.saturating_sub(reach))
    }
}

fn common_divisor(one: usize, other: usize) -> usize {
    if other == 0 { one } else { common_divisor(other, one % other) }
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
    use crate::collective::{Algorithm, CollectiveKind, seconds};

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

    fn of_levels(counts: &[usize]) -> Cluster {
        let level = |count: &usize| format!("[[level]]\ncount = {count}\nlink = \"nvlink4\"\n");
        read(&format!("device = \"h100-80\"\n{}", counts.iter().map(level).collect::<String>())).unwrap()
    }

    /// Numbers of the devices of every group of ranks in the blocks that a cluster has.
    fn rank_groups(devices: usize, stride: usize, size: usize) -> Vec<Vec<usize>> {
        let starts = (0..devices / (stride * size)).flat_map(|block| {
            let first = block * stride * size;
            first..first + stride
        });
        starts.map(|start| (0..size).map(|at| start + at * stride).collect()).collect()
    }

    fn distinct(ranks: &[usize], devices: usize) -> usize {
        let mut groups: Vec<usize> = ranks.iter().map(|rank| rank / devices).collect();
        groups.dedup();
        groups.len()
    }

    #[test]
    fn spans_are_what_the_numbers_of_the_ranks_say() {
        for counts in [&[8, 2][..], &[6, 4], &[4, 3, 5], &[8, 4, 3]] {
            let cluster = of_levels(counts);
            let devices = cluster.devices();
            for stride in 1..=devices {
                for size in 2..=devices / stride {
                    let groups = rank_groups(devices, stride, size);
                    let span = cluster.span(stride, size);
                    let context = format!("levels {counts:?}, stride {stride}, size {size}: {span:?}");
                    assert_eq!(span[0].members, size, "{context}");
                    let crossed = |level: usize| match level {
                        0 => size,
                        _ => groups.iter().map(|one| distinct(one, cluster.devices_at(level - 1))).max().unwrap(),
                    };
                    let outermost = (0..counts.len()).rev().find(|level| crossed(*level) > 1);
                    assert_eq!(span.last().map(|level| level.level), outermost, "{context}");
                    for level in &span {
                        assert_eq!(level.members, crossed(level.level), "{context}");
                        assert!(level.members >= level.ranks && level.inside * level.members >= size, "{context}");
                        let below = level.level.checked_sub(1).map_or(1, |below| cluster.devices_at(below));
                        let most = |one: &Vec<usize>| {
                            one.iter()
                                .map(|rank| one.iter().filter(|other| *other / below == rank / below).count())
                                .max()
                        };
                        let inside = groups.iter().filter_map(most).max().unwrap();
                        assert!(level.inside <= inside, "{context}");
                        let leaves = |at: usize, one: &Vec<usize>| {
                            one.iter().any(|rank| rank / below == at) && one.iter().any(|rank| rank / below != at)
                        };
                        let leaving = |at: usize| groups.iter().filter(|one| leaves(at, one)).count();
                        let sharers = (0..devices / below).map(leaving).max().unwrap();
                        let full =
                            cluster.levels[level.level].link.reached() * cluster.levels[level.level].links as f64;
                        let planned = (full / level.bandwidth).round() as usize;
                        assert_eq!(sharers, planned, "{context}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_group_that_gains_a_host_is_no_faster() {
        let pod = of_levels(&[8, 4]);
        let all_reduce = |ranks: usize| {
            let span = pod.with_devices(ranks).unwrap().span(1, ranks);
            seconds(CollectiveKind::AllReduce, Algorithm::Fastest, 1e9, &span)
        };
        let times: Vec<f64> = (2..=32).map(all_reduce).collect();
        assert!(times.windows(2).all(|pair| pair[0] <= pair[1]), "{times:?}");
        // A pipeline that leaves its host sends over the network.
        let slow = read("device = \"h100-80\"\n[[level]]\ncount = 8\nlink = \"nvlink4\"\n[[level]]\ncount = 2\nbandwidth_gbs = 0.125\n").unwrap();
        let send = |ranks| seconds(CollectiveKind::Send, Algorithm::Fastest, 1e9, &slow.span(1, ranks));
        assert!(send(12) == send(16) && send(12) > 100.0 * send(8));
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
