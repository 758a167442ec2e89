//! How workers exchange data: what `--transport` can name, and what each is.
//!
//! Parsing, help, checks of flags, links and errors read [`TRANSPORTS`]; another transport is another entry.

use crate::args::Workers;
use clap::ValueEnum;
use clap::builder::PossibleValue;
use kolo_cluster::Member;
use kolo_comm::mpi::MpiWorld;
use kolo_comm::tcp::{self, TcpOptions};
use kolo_comm::{Bootstrap, Fault, Transport, host, shm};
use kolo_exec::LinkPreference;
use std::sync::Arc;

/// A value of `--transport`.
#[derive(Clone, Copy, Debug)]
pub struct TransportKind {
    pub name: &'static str,
    /// For `--help`.
    doc: &'static str,
    /// How hosts are linked; `None` if the best link that all can use is taken.
    pub link: Option<HostLink>,
    /// Whether devices exchange without the hosts.
    pub devices: LinkPreference,
}

type Connect = fn(&mut Member, Option<&MpiWorld>, &Workers) -> Result<Box<dyn Transport>, Fault>;

/// A link between hosts.
#[derive(Clone, Copy, Debug)]
pub struct HostLink {
    /// The lowest of those that all ranks can use is taken where none is asked for.
    preference: u8,
    /// Whether this rank and all others can use it. All ranks call it.
    usable: fn(&mut Member, Option<&MpiWorld>) -> Result<bool, Fault>,
    connect: Connect,
    /// Why it cannot be used where it is asked for, and what to do.
    unusable: [&'static str; 2],
    /// Whether `--streams` means something.
    pub streams: bool,
    /// Whether all ranks can reach one memory.
    shares_memory: bool,
    /// Whether an MPI launcher starts the ranks.
    pub by_mpi: bool,
}

const SHM: HostLink = HostLink {
    preference: 1,
    usable: |member, _| can_share_memory(member),
    connect: |member, _, _| {
        let (rank, world, watch) = (member.rank, member.world, Arc::clone(&member.watch));
        shm::connect(rank, world, watch, member)
    },
    unusable: ["the workers are on several hosts or in several containers", "leave --transport out"],
    streams: false,
    shares_memory: true,
    by_mpi: false,
};

const TCP: HostLink = HostLink {
    preference: 2,
    usable: |_, _| Ok(true),
    connect: |member, _, workers| {
        let local = TcpOptions::local(member.key.clone(), member.job);
        let local = TcpOptions { generation: member.generation.into(), ..local };
        let options = TcpOptions { listen: member.address, streams: workers.streams, ..local };
        let (rank, world, watch) = (member.rank, member.world, Arc::clone(&member.watch));
        tcp::connect(rank, world, options, watch, member)
    },
    unusable: ["no network joins the workers", "leave --transport out"],
    streams: true,
    shares_memory: false,
    by_mpi: false,
};

const NO_MPI: [&str; 2] = ["no MPI launcher started this process", "start it with mpirun or srun --mpi"];

const MPI: HostLink = HostLink {
    preference: 0,
    usable: |_, mpi| Ok(mpi.is_some()),
    connect: |member, mpi, _| {
        let mpi = mpi.ok_or_else(|| refused("mpi", NO_MPI))?;
        mpi.transport(Arc::clone(&member.watch))
    },
    unusable: NO_MPI,
    streams: false,
    shares_memory: false,
    by_mpi: true,
};

/// In the order of `--help`.
pub static TRANSPORTS: [TransportKind; 5] = [
    TransportKind {
        name: "auto",
        doc: "NCCL between workers with a GPU each, if it is there; else shared memory on one host, TCP across hosts, MPI \
              under mpirun",
        link: None,
        devices: LinkPreference::Auto,
    },
    TransportKind { name: "shm", doc: "", link: Some(SHM), devices: LinkPreference::Never },
    TransportKind { name: "tcp", doc: "", link: Some(TCP), devices: LinkPreference::Never },
    TransportKind { name: "mpi", doc: "", link: Some(MPI), devices: LinkPreference::Never },
    TransportKind {
        name: "nccl",
        doc: "NCCL between GPUs, one worker each; what else workers say to each other goes as with auto",
        link: None,
        devices: LinkPreference::Always,
    },
];

impl ValueEnum for TransportKind {
    fn value_variants<'a>() -> &'a [Self] {
        &TRANSPORTS
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let value = PossibleValue::new(self.name);
        Some(if self.doc.is_empty() { value } else { value.help(self.doc) })
    }
}

impl TransportKind {
    /// Whether it needs ranks that an MPI launcher started.
    pub fn by_mpi(&self) -> bool {
        self.link.is_some_and(|link| link.by_mpi)
    }

    /// Whether devices must exchange without the hosts.
    pub fn joins_devices(&self) -> bool {
        self.devices == LinkPreference::Always
    }

    /// Whether `--streams` means something. `by_mpi`: an MPI launcher started the ranks, or will.
    pub fn has_streams(&self, by_mpi: bool) -> bool {
        self.link.map_or(!by_mpi, |link| link.streams)
    }

    /// Whether workers that it links, on one host, can reach one memory. `by_mpi`: an MPI launcher started the ranks.
    pub fn shares_memory(&self, by_mpi: bool) -> bool {
        self.link.map_or(!by_mpi, |link| link.shares_memory)
    }

    /// Links this rank with all others.
    pub fn connect(
        &self,
        member: &mut Member,
        mpi: Option<&MpiWorld>,
        workers: &Workers,
    ) -> Result<Box<dyn Transport>, Fault> {
        if let Some(link) = self.link {
            return match (link.usable)(member, mpi)? {
                true => (link.connect)(member, mpi, workers),
                false => Err(refused(self.name, link.unusable)),
            };
        }
        for link in by_preference() {
            if (link.usable)(member, mpi)? {
                return (link.connect)(member, mpi, workers);
            }
        }
        Err(Fault::BadCall("no transport joins the workers".into()))
    }
}

/// The links between hosts, the one that is taken first before the others.
fn by_preference() -> Vec<HostLink> {
    let mut links: Vec<HostLink> = TRANSPORTS.iter().filter_map(|kind| kind.link).collect();
    links.sort_by_key(|link| link.preference);
    links
}

fn refused(name: &str, [why, hint]: [&str; 2]) -> Fault {
    Fault::BadCall(format!("--transport {name}, but {why}\n  hint: {hint}"))
}

/// The transports that link hosts without an MPI launcher.
pub fn measured_alone() -> impl Iterator<Item = TransportKind> {
    TRANSPORTS.into_iter().filter(|kind| kind.link.is_some_and(|link| !link.by_mpi))
}

/// Whether all ranks run under one kernel and see each other's processes. All ranks call it.
pub fn can_share_memory(member: &mut Member) -> Result<bool, Fault> {
    let processes = std::fs::read_link("/proc/self/ns/pid").ok();
    let mine = match (host::kernel(), processes) {
        (Some(kernel), Some(processes)) => format!("{kernel} {}", processes.display()),
        _ => member.host().to_string(),
    };
    Ok(member.all_gather(mine.as_bytes())?.iter().all(|theirs| theirs == mine.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_transport_is_read_by_its_name() {
        for kind in &TRANSPORTS {
            assert_eq!(TransportKind::from_str(kind.name, false).unwrap().name, kind.name);
            let same = TRANSPORTS.iter().filter(|other| other.name == kind.name).count();
            assert_eq!(same, 1, "{} is there once", kind.name);
        }
        assert!(TransportKind::from_str("pigeons", false).is_err());
    }

    /// MPI where it started the ranks, then shared memory, then TCP, which is always there.
    #[test]
    fn auto_tries_links_in_a_fixed_order() {
        let links = by_preference();
        let name = |link: &HostLink| {
            let is = |kind: &&TransportKind| kind.link.is_some_and(|other| other.preference == link.preference);
            let named: Vec<&str> = TRANSPORTS.iter().filter(is).map(|kind| kind.name).collect();
            named.join(" ")
        };
        assert_eq!(links.iter().map(name).collect::<Vec<_>>(), ["mpi", "shm", "tcp"]);
        let alone: Vec<&str> = measured_alone().map(|kind| kind.name).collect();
        assert_eq!(alone, ["shm", "tcp"]);
    }

    #[test]
    fn only_tcp_has_streams() {
        let with: Vec<&str> = TRANSPORTS.iter().filter(|kind| kind.has_streams(true)).map(|kind| kind.name).collect();
        assert_eq!(with, ["tcp"]);
        let without_mpi: Vec<&str> =
            TRANSPORTS.iter().filter(|kind| kind.has_streams(false)).map(|kind| kind.name).collect();
        assert_eq!(without_mpi, ["auto", "tcp", "nccl"], "auto may come to TCP");
    }
}
