//! Who started this process, and which rank it is.

use kolo_comm::Fault;
use std::os::fd::RawFd;

/// Variables of our own launcher. They hold numbers only, never secrets.
pub const RANK: &str = "KOLO_RANK";
pub const WORLD: &str = "KOLO_WORLD";
pub const LOCAL_RANK: &str = "KOLO_LOCAL_RANK";
pub const LOCAL_WORLD: &str = "KOLO_LOCAL_WORLD";
pub const CONTROL_FD: &str = "KOLO_CONTROL_FD";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// Our own, on this host.
    Local,
}

impl Launcher {
    pub fn name(self) -> &'static str {
        match self {
            Launcher::Local => "kolo",
        }
    }
}

/// Where this process stands among its peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub rank: usize,
    pub world: usize,
    /// The rank among those of this host.
    pub local_rank: usize,
    pub local_world: usize,
    pub launcher: Launcher,
    /// The inherited control link.
    pub control: Option<RawFd>,
}

/// Finds out who started this process, from its environment; `None` if nobody did.
pub fn detect(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Option<Place>, Fault> {
    let number = |name: &str| -> Result<Option<usize>, Fault> {
        let parse =
            |text: String| text.trim().parse().map_err(|_| Fault::BadCall(format!("{name}={text} is no number")));
        lookup(name).map(parse).transpose()
    };
    let (Some(rank), Some(world), Some(control)) = (number(RANK)?, number(WORLD)?, number(CONTROL_FD)?) else {
        return Ok(None);
    };
    let local_rank = number(LOCAL_RANK)?.unwrap_or(rank);
    let local_world = number(LOCAL_WORLD)?.unwrap_or(world);
    Ok(Some(Place { rank, world, local_rank, local_world, launcher: Launcher::Local, control: Some(control as RawFd) }))
}
