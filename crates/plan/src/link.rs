//! Links: how fast a message goes from one device to another, by data sheet or as measured.

use crate::collective::CollectiveKind;
use crate::device::PeerLink;
use kolo_graph::settings::{Setting, SettingError, Settings, nearest};

const BUILT_IN: &str = include_str!("links.toml");
const BUILT_IN_NAME: &str = "the built-in links.toml";

/// Measured seconds of a collective among so many ranks, by bytes, sizes rising.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    pub kind: CollectiveKind,
    pub ranks: usize,
    /// Bytes of the whole tensor, and seconds.
    pub points: Vec<(f64, f64)>,
}

impl Measured {
    /// Seconds for so many bytes: between two points as a power law, beyond the last at its rate, before the first as that.
    pub fn seconds(&self, bytes: f64) -> f64 {
        let (Some(first), Some(last)) = (self.points.first(), self.points.last()) else { return 0.0 };
        if bytes <= first.0 {
            return first.1;
        }
        if bytes >= last.0 {
            return last.1 * bytes / last.0;
        }
        let above = self.points.partition_point(|(size, _)| *size < bytes).max(1);
        let ((low, fast), (high, slow)) = (self.points[above - 1], self.points[above]);
        let part = (bytes / low).ln() / (high / low).ln();
        fast * (slow / fast).powf(part)
    }
}

/// One kind of link.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    pub name: String,
    /// Bytes per second in one direction, of the data sheet.
    pub bandwidth: f64,
    /// The part of it that collectives reach.
    pub share: f64,
    /// Seconds of an empty message.
    pub latency: f64,
    pub measured: Vec<Measured>,
}

impl Link {
    /// The links that are built in.
    pub fn built_in() -> Result<Vec<Link>, SettingError> {
        read_all(&kolo_config::parse(BUILT_IN, BUILT_IN_NAME)?, Vec::new())
    }

    /// What cores of one host exchange over.
    pub fn of_peers(peers: PeerLink) -> Link {
        let PeerLink { bandwidth, latency } = peers;
        Link { name: "peers".into(), bandwidth, share: 1.0, latency, measured: Vec::new() }
    }

    /// Bytes per second that collectives reach.
    pub fn reached(&self) -> f64 {
        self.bandwidth * self.share
    }
}

/// Sections of links, added to those that are known or changing them.
pub(crate) fn read_all(root: &Settings, mut links: Vec<Link>) -> Result<Vec<Link>, SettingError> {
    for name in root.keys().map(str::to_string).collect::<Vec<_>>() {
        if !matches!(root.peek(&name), Some(Setting::Table(_))) {
            return Err(root.wrong(
                &name,
                "is not a link",
                "a link is a section with `bandwidth_gbs` and `latency_us`",
            ));
        }
        let section = root.table(&name)?;
        let known = links.iter().position(|link| link.name == name);
        section.text("doc", "")?;
        let link = read(&name, &section, known.map(|at| &links[at]))?;
        section.finish()?;
        match known {
            Some(at) => links[at] = link,
            None => links.push(link),
        }
    }
    Ok(links)
}

/// The link of this name, or what to write instead.
pub fn find<'l>(links: &'l [Link], name: &str) -> Result<&'l Link, String> {
    let names: Vec<&str> = links.iter().map(|link| link.name.as_str()).collect();
    links.iter().find(|link| link.name == name).ok_or_else(|| match nearest(name, names.iter().copied()) {
        Some(near) => format!("did you mean \"{near}\"? The links are {}", names.join(", ")),
        None => format!("the links are {}; or write `bandwidth_gbs` and `latency_us`", names.join(", ")),
    })
}

/// No link does more.
const GBS_MAX: f64 = 1e6;
const LATENCY_US_MAX: f64 = 1e7;

/// A link by its keys, or by those that change a known one.
pub(crate) fn read(name: &str, section: &Settings, known: Option<&Link>) -> Result<Link, SettingError> {
    if known.is_none() && !section.has("bandwidth_gbs") {
        return Err(section.wrong(
            "bandwidth_gbs",
            "is missing",
            "write the bytes per second in one direction, in GB/s",
        ));
    }
    let bandwidth = section.float("bandwidth_gbs", known.map_or(0.0, |link| link.bandwidth / 1e9))? * 1e9;
    if !(bandwidth > 0.0 && bandwidth <= GBS_MAX * 1e9) {
        let message = format!("is {}, but must be greater than 0", bandwidth / 1e9);
        return Err(section.wrong("bandwidth_gbs", message, format!("write GB/s above 0, at most {GBS_MAX}")));
    }
    let share = section.float_in("share", known.map_or(0.9, |link| link.share), 0.01, 1.0)?;
    let latency = section.float_in("latency_us", known.map_or(10.0, |link| link.latency * 1e6), 0.0, LATENCY_US_MAX)?;
    let measured = read_measured(section)?;
    let measured = if measured.is_empty() { known.map_or(Vec::new(), |link| link.measured.clone()) } else { measured };
    Ok(Link { name: name.into(), bandwidth, share, latency: latency / 1e6, measured })
}

const MEASURED_EXAMPLE: &str = "[{ op = \"all_reduce\", ranks = 2, bytes = [4096], us = [3.5] }]";

fn read_measured(section: &Settings) -> Result<Vec<Measured>, SettingError> {
    let mut all = Vec::new();
    for table in section.tables("measured", MEASURED_EXAMPLE)? {
        let op = table.text("op", "")?;
        let Some(kind) = CollectiveKind::named(&op) else {
            let names: Vec<&str> = CollectiveKind::ALL.iter().map(|kind| kind.name()).collect();
            return Err(table.wrong(
                "op",
                format!("is \"{op}\", which is not a collective"),
                format!("write one of {}", names.join(", ")),
            ));
        };
        let ranks = table.count("ranks", 2, 1)?;
        let (bytes, micros) = (table.floats("bytes", "[4096]")?, table.floats("us", "[3.5]")?);
        let rises = bytes.windows(2).all(|pair| pair[0] < pair[1]) && bytes.first().is_some_and(|first| *first > 0.0);
        if bytes.len() != micros.len() || !rises || micros.iter().any(|one| !(*one > 0.0 && one.is_finite())) {
            return Err(table.wrong(
                "bytes",
                "and `us` are not a valid table",
                "write increasing sizes, and a time above 0 for each",
            ));
        }
        table.finish()?;
        let points = bytes.into_iter().zip(micros.into_iter().map(|one| one / 1e6)).collect();
        all.push(Measured { kind, ranks, points });
    }
    Ok(all)
}
