//! Flags that mean nothing where they stand: whoever wrote one expects something of it, so it is an error and not ignored.
//!
//! A single process takes `--transport`, `--streams` and `--heartbeat-ms` as it is: one worker exchanges nothing, over whatever
//! transport, and a script may vary the number of workers alone.

use crate::args::Workers;
use crate::fail::Failure;
use kolo_cluster::{Launcher, RankInfo, interface};

/// Refuses flags that have no meaning for this process: `rank_info` is its rank if a launcher started it, `count` the number of
/// workers that it starts if none did.
pub fn check(workers: &Workers, rank_info: Option<&RankInfo>, count: usize) -> Result<(), Failure> {
    check_under(workers, rank_info.map(|rank_info| (rank_info.launcher, rank_info.world)), count)
}

/// As [`check`], for a process that this launcher starts as one of so many.
pub fn check_under(workers: &Workers, launcher: Option<(Launcher, usize)>, count: usize) -> Result<(), Failure> {
    if let Some(address) = workers.interface {
        interface::checked(address).map_err(Failure::wrong_flag)?;
    }
    match launcher {
        // Whoever started it has checked.
        Some((Launcher::Kolo, _)) => Ok(()),
        Some((launcher, world)) => check_found(workers, launcher, world),
        None => check_started(workers, count),
    }
}

fn refuse(workers: &Workers, flags: &[(&str, &str)], why: &str, hint: &str) -> Result<(), Failure> {
    let given = |flag: &str| workers.given.iter().any(|id| id == flag);
    match flags.iter().find(|(id, _)| given(id)) {
        Some((_, shown)) => Err(Failure::usage(format!("{shown}: {why}"), hint)),
        None => Ok(()),
    }
}

/// Another launcher started this process.
fn check_found(workers: &Workers, launcher: Launcher, world: usize) -> Result<(), Failure> {
    let name = launcher.name();
    let count = format!("-n {}", workers.count);
    let flags = [("count", count.as_str()), ("hosts", "--hosts"), ("ssh", "--ssh")];
    let why = format!("{name} started the workers, {world} of them");
    refuse(workers, &flags, &why, "leave it out, or start kolo without that launcher")?;
    let by_mpi = matches!(launcher, Launcher::OpenMpi | Launcher::Mpich);
    if !by_mpi && !workers.transport.by_mpi() {
        let why = "MPI is not used";
        refuse(workers, &[("mpi-library", "--mpi-library")], why, "leave it out, or add --transport mpi")?;
    }
    check_streams(workers, by_mpi)
}

/// This process is alone, or starts the workers itself.
fn check_started(workers: &Workers, count: usize) -> Result<(), Failure> {
    let why = "no MPI launcher started this process";
    refuse(workers, &[("mpi-library", "--mpi-library")], why, "start it with mpirun or srun --mpi, without -n")?;
    if workers.transport.by_mpi() {
        let message = format!("--transport {}, but no MPI launcher started this process", workers.transport.name);
        let hint = "start it with mpirun or srun --mpi, without -n, or leave --transport out";
        return Err(Failure::usage(message, hint));
    }
    if workers.hosts.is_none() {
        let flags = [("ssh", "--ssh"), ("interface", "--interface")];
        let why = "all workers run on this host and need no network";
        refuse(workers, &flags, why, "leave it out, or name hosts with --hosts")?;
    }
    // Workers of one host share memory unless they are told otherwise.
    let by_memory = workers.hosts.is_none() && workers.transport.link.is_none();
    if count > 1 { check_streams(workers, by_memory) } else { Ok(()) }
}

/// `by_others`: without `--transport`, something else than TCP links the workers.
fn check_streams(workers: &Workers, by_others: bool) -> Result<(), Failure> {
    if workers.transport.has_streams(by_others) {
        return Ok(());
    }
    let why = "only TCP has streams, and this run does not use it";
    refuse(workers, &[("streams", "--streams")], why, "leave it out, or add --transport tcp")
}

/// A command that runs in one process, whatever a job's workers are.
pub fn check_alone(workers: &Workers, command: &str) -> Result<(), Failure> {
    let count = format!("-n {}", workers.count);
    let flags = [("count", count.as_str()), ("hosts", "--hosts")];
    let flags = if workers.count == 1 { &flags[1..] } else { &flags[..] };
    refuse(workers, flags, &format!("`kolo {command}` starts no workers"), "leave it out")?;
    check_planned(workers, command)
}

/// A command that starts no workers knows their number, and nothing else of them.
pub fn check_planned(workers: &Workers, command: &str) -> Result<(), Failure> {
    let flags = [
        ("ssh", "--ssh"),
        ("interface", "--interface"),
        ("transport", "--transport"),
        ("streams", "--streams"),
        ("mpi-library", "--mpi-library"),
        ("heartbeat-ms", "--heartbeat-ms"),
    ];
    refuse(workers, &flags, &format!("`kolo {command}` starts no workers"), "leave it out")
}
