//! Who started this process, and which rank it is.
//!
//! Several launchers may stand around each other (`mpirun` inside a Slurm step), and variables of one are inherited
//! through the other: the innermost counts. Where two of them cannot both be right, or a rank would be alone with its own
//! world, it is an error that says so.

use crate::hostlist;
use kolo_comm::Fault;
use kolo_comm::host::EnvLookup;
use std::os::fd::RawFd;

/// Variables of our own launcher. They hold numbers only, never secrets.
pub const RANK: &str = "KOLO_RANK";
pub const WORLD: &str = "KOLO_WORLD";
pub const LOCAL_RANK: &str = "KOLO_LOCAL_RANK";
pub const LOCAL_WORLD: &str = "KOLO_LOCAL_WORLD";
pub const CONTROL_FD: &str = "KOLO_CONTROL_FD";
/// Set for a worker that is started again: its run has begun before.
pub const RESTART: &str = "KOLO_RESTART";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// Our own.
    Kolo,
    Slurm,
    OpenMpi,
    /// MPICH and its relatives, through PMI.
    Mpich,
    /// Whoever sets `RANK` and `WORLD_SIZE`.
    Torchrun,
}

impl Launcher {
    /// Whether its MPI connects the ranks.
    pub fn is_mpi(self) -> bool {
        matches!(self, Launcher::OpenMpi | Launcher::Mpich)
    }

    pub fn name(self) -> &'static str {
        match self {
            Launcher::Kolo => "kolo",
            Launcher::Slurm => "srun",
            Launcher::OpenMpi => "mpirun of Open MPI",
            Launcher::Mpich => "mpirun of MPICH",
            Launcher::Torchrun => "torchrun",
        }
    }
}

/// Where this process stands among its peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankInfo {
    pub rank: usize,
    pub world: usize,
    /// The rank among those of this host.
    pub local_rank: usize,
    pub local_world: usize,
    pub launcher: Launcher,
    /// The inherited control link, of our own launcher.
    pub control: Option<RawFd>,
    /// A name that this job shares with no other, if the launcher gives one.
    pub job: Option<String>,
    /// All hosts of the job, if the launcher names them.
    pub hosts: Vec<String>,
    /// The host the job was started from, if the launcher names it.
    pub origin: Option<String>,
}

fn number(lookup: EnvLookup<'_>, name: &str) -> Result<Option<usize>, Fault> {
    let Some(text) = lookup(name) else { return Ok(None) };
    let parsed = text.trim().parse();
    parsed.map(Some).map_err(|_| Fault::BadCall(format!("the variable {name} is {text:?}, which is not a number")))
}

/// The first of these variables that is set.
fn first(lookup: EnvLookup<'_>, names: &[&str]) -> Result<Option<usize>, Fault> {
    for name in names {
        if let Some(value) = number(lookup, name)? {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

/// Finds out who started this process, from its environment; `None` if nobody did.
pub fn detect(lookup: EnvLookup<'_>) -> Result<Option<RankInfo>, Fault> {
    if let Some(rank_info) = kolo(lookup)? {
        return checked(rank_info).map(Some);
    }
    let (open_mpi, mpich) = (open_mpi(lookup)?, mpich(lookup)?);
    let (slurm, torchrun) = (slurm(lookup)?, torchrun(lookup)?);
    let mpi = match (open_mpi, mpich) {
        // A lone task of `srun --mpi=pmi2`, in which mpirun was called.
        (Some(open_mpi), Some(mpich)) if mpich.world == 1 && open_mpi.world > 1 => Some(open_mpi),
        (Some(open_mpi), Some(mpich)) => Some(agreed(open_mpi, &mpich)?),
        (open_mpi, mpich) => open_mpi.or(mpich),
    };
    let rank_info = match (mpi, slurm, torchrun) {
        (Some(mpi), Some(slurm), _) => Some(within_slurm(mpi, slurm)?),
        (Some(mpi), None, _) => Some(mpi),
        // torchrun's own agents run as tasks of a step; a bare RANK beside a step is most often exported from it.
        (None, Some(_), Some(torchrun)) if lookup("TORCHELASTIC_RUN_ID").is_some() => Some(torchrun),
        (None, Some(slurm), Some(torchrun)) => Some(agreed(slurm, &torchrun)?),
        (None, slurm, torchrun) => slurm.or(torchrun),
    };
    rank_info.map(checked).transpose()
}

fn checked(rank_info: RankInfo) -> Result<RankInfo, Fault> {
    let RankInfo { rank, world, local_rank, local_world, launcher, .. } = rank_info;
    if rank >= world || local_rank >= local_world || local_world > world {
        return Err(Fault::BadCall(format!(
            "{} says rank {rank} of {world} and rank {local_rank} of {local_world} on this host, which is impossible",
            launcher.name()
        )));
    }
    Ok(rank_info)
}

/// Two launchers that say the same.
fn agreed(rank_info: RankInfo, other: &RankInfo) -> Result<RankInfo, Fault> {
    if (rank_info.rank, rank_info.world) == (other.rank, other.world) {
        return Ok(rank_info);
    }
    Err(Fault::BadCall(format!(
        "this process is rank {} of {} according to {}, but rank {} of {} according to {}\n  hint: start the job with one launcher, and unset the variables of the other",
        rank_info.rank,
        rank_info.world,
        rank_info.launcher.name(),
        other.rank,
        other.world,
        other.launcher.name()
    )))
}

/// `mpirun` in a step of Slurm: either `srun` speaks PMI, or the step only carries mpirun's helpers, or each task of the
/// step is an mpirun of its own, which nobody wants.
fn within_slurm(mpi: RankInfo, slurm: RankInfo) -> Result<RankInfo, Fault> {
    if (mpi.rank, mpi.world) == (slurm.rank, slurm.world) && slurm.world > 1 {
        return Ok(RankInfo { local_rank: slurm.local_rank, local_world: slurm.local_world, ..slurm });
    }
    if slurm.world > 1 && mpi.local_world == mpi.world {
        return Err(Fault::BadCall(format!(
            "srun started {} tasks, and in each of them {} started a separate world of {}\n  hint: use srun without mpirun, or mpirun without srun",
            slurm.world,
            mpi.launcher.name(),
            mpi.world
        )));
    }
    Ok(RankInfo { hosts: slurm.hosts, origin: slurm.origin, ..mpi })
}

fn kolo(lookup: EnvLookup<'_>) -> Result<Option<RankInfo>, Fault> {
    let (rank, world, control) = (number(lookup, RANK)?, number(lookup, WORLD)?, number(lookup, CONTROL_FD)?);
    let (Some(rank), Some(world), Some(control)) = (rank, world, control) else {
        if rank.is_none() && world.is_none() && control.is_none() {
            return Ok(None);
        }
        return Err(Fault::BadCall(format!(
            "only some of {RANK}, {WORLD} and {CONTROL_FD} are set\n  hint: they belong to `kolo`'s own launcher; unset them"
        )));
    };
    let (local_rank, local_world) = (number(lookup, LOCAL_RANK)?, number(lookup, LOCAL_WORLD)?);
    Ok(Some(RankInfo {
        rank,
        world,
        local_rank: local_rank.unwrap_or(rank),
        local_world: local_world.unwrap_or(world),
        launcher: Launcher::Kolo,
        control: RawFd::try_from(control).ok(),
        job: None,
        hosts: Vec::new(),
        origin: None,
    }))
}

fn open_mpi(lookup: EnvLookup<'_>) -> Result<Option<RankInfo>, Fault> {
    let Some(rank) = number(lookup, "OMPI_COMM_WORLD_RANK")? else { return Ok(None) };
    let world = number(lookup, "OMPI_COMM_WORLD_SIZE")?.unwrap_or(1);
    let names = ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"];
    Ok(Some(RankInfo {
        rank,
        world,
        local_rank: number(lookup, "OMPI_COMM_WORLD_LOCAL_RANK")?.unwrap_or(0),
        local_world: number(lookup, "OMPI_COMM_WORLD_LOCAL_SIZE")?.unwrap_or(1),
        launcher: Launcher::OpenMpi,
        control: None,
        job: names.iter().find_map(|name| lookup(name)).map(|name| file_name("mpi", &name)),
        hosts: Vec::new(),
        origin: None,
    }))
}

fn mpich(lookup: EnvLookup<'_>) -> Result<Option<RankInfo>, Fault> {
    let (Some(rank), Some(world)) = (number(lookup, "PMI_RANK")?, number(lookup, "PMI_SIZE")?) else {
        return Ok(None);
    };
    Ok(Some(RankInfo {
        rank,
        world,
        local_rank: first(lookup, &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"])?.unwrap_or(0),
        local_world: first(lookup, &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"])?.unwrap_or(1),
        launcher: Launcher::Mpich,
        control: None,
        job: None,
        hosts: Vec::new(),
        origin: None,
    }))
}

fn slurm(lookup: EnvLookup<'_>) -> Result<Option<RankInfo>, Fault> {
    // A batch script has a rank too, but is no worker: only tasks of a step are.
    let step = lookup("SLURM_STEP_ID").or_else(|| lookup("SLURM_STEPID"));
    let (Some(rank), Some(step)) = (number(lookup, "SLURM_PROCID")?, step) else { return Ok(None) };
    let world = first(lookup, &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"])?;
    let world = world.ok_or_else(|| Fault::BadCall("SLURM_PROCID is set, but SLURM_NTASKS is not".into()))?;
    let node = number(lookup, "SLURM_NODEID")?.unwrap_or(0);
    let tasks = lookup("SLURM_STEP_TASKS_PER_NODE").or_else(|| lookup("SLURM_TASKS_PER_NODE"));
    let tasks = tasks.map(|text| hostlist::tasks_per_node(&text)).transpose()?.unwrap_or_default();
    let list = lookup("SLURM_STEP_NODELIST").or_else(|| lookup("SLURM_JOB_NODELIST"));
    let local_rank = number(lookup, "SLURM_LOCALID")?.unwrap_or(0);
    let name = |name: &str| lookup(name).unwrap_or_default();
    let job = format!("{}.{step}.{}", name("SLURM_JOB_ID"), name("SLURM_RESTART_COUNT"));
    Ok(Some(RankInfo {
        rank,
        world,
        local_rank,
        local_world: tasks.get(node).copied().unwrap_or(local_rank + 1).min(world),
        launcher: Launcher::Slurm,
        control: None,
        job: Some(file_name("slurm", &job)),
        hosts: list.map(|list| hostlist::hosts(&list)).transpose()?.unwrap_or_default(),
        origin: lookup("SLURM_LAUNCH_NODE_IPADDR"),
    }))
}

fn torchrun(lookup: EnvLookup<'_>) -> Result<Option<RankInfo>, Fault> {
    let (rank, world) = (number(lookup, "RANK")?, number(lookup, "WORLD_SIZE")?);
    let (Some(rank), Some(world)) = (rank, world) else {
        if lookup("MASTER_ADDR").is_none() || (rank.is_none() && world.is_none()) {
            return Ok(None);
        }
        let (is, is_not) = if rank.is_some() { ("RANK", "WORLD_SIZE") } else { ("WORLD_SIZE", "RANK") };
        return Err(Fault::BadCall(format!(
            "{is} and MASTER_ADDR are set, but {is_not} is not\n  hint: set or unset all"
        )));
    };
    let name = |name: &str| lookup(name).unwrap_or_default();
    let names = ["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"];
    let job = names.map(name).join(".");
    Ok(Some(RankInfo {
        rank,
        world,
        local_rank: number(lookup, "LOCAL_RANK")?.unwrap_or(rank),
        local_world: number(lookup, "LOCAL_WORLD_SIZE")?.unwrap_or(world),
        launcher: Launcher::Torchrun,
        control: None,
        job: lookup("MASTER_PORT").map(|_| file_name("torch", &job)),
        hosts: Vec::new(),
        origin: lookup("MASTER_ADDR"),
    }))
}

/// A name without characters that mean something to a file system.
fn file_name(kind: &str, text: &str) -> String {
    const NAME_BYTES_MAX: usize = 100;
    let safe = |character: char| if character.is_ascii_alphanumeric() || character == '.' { character } else { '_' };
    format!("{kind}-{}", text.chars().map(safe).take(NAME_BYTES_MAX).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(variables: &str) -> Result<Option<RankInfo>, Fault> {
        let pairs: Vec<(&str, &str)> = variables.split(' ').filter_map(|pair| pair.split_once('=')).collect();
        detect(&|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string()))
    }

    fn rank_info(variables: &str) -> (Launcher, usize, usize, usize, usize) {
        let rank_info = find(variables).unwrap().expect("a rank_info");
        (rank_info.launcher, rank_info.rank, rank_info.world, rank_info.local_rank, rank_info.local_world)
    }

    const STEP: &str = "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 \
        SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_TASKS_PER_NODE=2(x2) SLURM_JOB_NODELIST=n[1-2]";
    const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
        OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=123@x";

    #[test]
    fn each_launcher_is_known() {
        assert_eq!(find("HOME=/root").unwrap(), None);
        assert_eq!(rank_info("KOLO_RANK=2 KOLO_WORLD=4 KOLO_CONTROL_FD=5"), (Launcher::Kolo, 2, 4, 2, 4));
        assert_eq!(rank_info(STEP), (Launcher::Slurm, 3, 4, 1, 2));
        let found = find(STEP).unwrap().unwrap();
        assert_eq!((found.hosts.join(" "), found.job.unwrap().as_str()), ("n1 n2".into(), "slurm-7.0."));
        assert_eq!(rank_info(OPEN_MPI), (Launcher::OpenMpi, 1, 4, 1, 2));
        assert_eq!(find(OPEN_MPI).unwrap().unwrap().job.unwrap(), "mpi-123_x");
        let mpich = "PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2";
        assert_eq!(rank_info(mpich), (Launcher::Mpich, 2, 4, 0, 2));
        let torch = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=29500";
        assert_eq!(rank_info(torch), (Launcher::Torchrun, 1, 2, 0, 1));
        let torch = "RANK=1 WORLD_SIZE=2";
        assert_eq!(rank_info(torch), (Launcher::Torchrun, 1, 2, 1, 2));
    }

    #[test]
    fn a_batch_script_is_no_worker() {
        let batch = "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_JOB_NODELIST=n[1-2]";
        assert_eq!(find(batch).unwrap(), None);
    }

    #[test]
    fn the_innermost_launcher_counts() {
        let ours = format!("KOLO_RANK=0 KOLO_WORLD=2 KOLO_CONTROL_FD=5 {STEP} {OPEN_MPI}");
        assert_eq!(rank_info(&ours), (Launcher::Kolo, 0, 2, 0, 2));
        // srun --mpi=pmi2 sets both, alike.
        assert_eq!(rank_info(&format!("{STEP} PMI_RANK=3 PMI_SIZE=4")), (Launcher::Slurm, 3, 4, 1, 2));
        // mpirun's helper on another node runs as a task of a step.
        let helper = STEP.replace("=4", "=2").replace("PROCID=3", "PROCID=1");
        assert_eq!(rank_info(&format!("{helper} {OPEN_MPI}")), (Launcher::OpenMpi, 1, 4, 1, 2));
        // mpirun in a shell that is the only task of a step.
        let shell = "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1 PMI_RANK=0 PMI_SIZE=1";
        assert_eq!(rank_info(&format!("{shell} {OPEN_MPI}")), (Launcher::OpenMpi, 1, 4, 1, 2));
        let torch = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1";
        let elastic = format!("{helper} {torch} TORCHELASTIC_RUN_ID=x");
        assert_eq!(rank_info(&elastic), (Launcher::Torchrun, 5, 8, 1, 4));
    }

    #[test]
    fn contradictions_are_explained() {
        let error = |variables: &str| find(variables).unwrap_err().to_string();
        let text = error(&format!("{STEP} RANK=0 WORLD_SIZE=1"));
        assert!(
            text.starts_with("this process is rank 3 of 4 according to srun, but rank 0 of 1 according to"),
            "{text}"
        );
        let text = error(&format!("{OPEN_MPI} PMI_RANK=0 PMI_SIZE=2"));
        assert!(text.contains("mpirun of Open MPI") && text.contains("mpirun of MPICH"), "{text}");
        let alone = OPEN_MPI.replace("LOCAL_SIZE=2", "LOCAL_SIZE=4");
        let text = error(&format!("{STEP} {alone}"));
        assert!(
            text.starts_with("srun started 4 tasks, and in each of them mpirun of Open MPI started a separate world"),
            "{text}"
        );
        let singleton = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_SIZE=1";
        assert!(error(&format!("{STEP} {singleton}")).contains("a separate world of 1"));
        assert!(error("KOLO_RANK=1").contains("only some of KOLO_RANK"));
        assert!(error("KOLO_RANK=x").contains("not a number"));
        assert!(error("RANK=4 WORLD_SIZE=4").contains("which is impossible"));
        assert!(error("WORLD_SIZE=4 MASTER_ADDR=a").contains("RANK is not"));
    }
}
