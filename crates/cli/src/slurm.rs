//! `kolo slurm`: a batch script that trains a job on a Slurm cluster.

use crate::args::{Args, Command, Slurm};
use crate::fail::{Failure, write_file};
use crate::load::Kinds;
use crate::output::{print, println};
use crate::{flags, train, workers};
use kolo_cluster::Launcher;
use kolo_cluster::slurm::{Batch, script, submit};

pub fn slurm(kinds: &Kinds, args: &Slurm) -> Result<(), Failure> {
    let count = args.nodes.saturating_mul(args.tasks_per_node);
    if count == 0 {
        return Err(Failure::usage(
            "--nodes and --tasks-per-node must be at least 1",
            "write --nodes 1 --tasks-per-node 1",
        ));
    }
    check_lines(args)?;
    let mut command: Vec<String> = vec![program()?, "train".into()];
    command.extend(args.job.iter().map(|path| path.display().to_string()));
    if let Some(cpus) = args.cpus_per_task {
        command.push(format!("--threads={cpus}"));
    }
    command.extend(args.train.iter().cloned());
    if args.requeue && !command.iter().any(|word| word == "--resume") {
        command.push("--resume".into());
    }
    // What would fail on the cluster after hours in the queue fails here.
    let train = match Args::read(command.iter().map(Into::into)) {
        Ok(Args { command: Command::Train(train) }) => train,
        Ok(_) => return Err(Failure::usage("only options of `kolo train` may follow `--`", "leave the rest out")),
        Err(error) => {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            return Err(Failure::usage(first.trim_start_matches("error: "), "see `kolo train --help`"));
        }
    };
    if count > 1 && workers::are_started(&train.job.workers, train.job.workers.count) {
        return Err(Failure::usage("-n and --hosts after `--`: srun starts the workers", "leave them out"));
    }
    // A single task may start workers of its own.
    let job = train::check(kinds, &train, (count > 1).then_some(count))?.job;
    flags::check_under(&train.job.workers, (count > 1).then_some((Launcher::Slurm, count)), train.job.workers.count)?;
    let directory = std::env::current_dir()
        .map_err(|error| Failure::job(format!("the current directory: {error}"), "change to one that exists"))?;
    let text = script(&Batch {
        name: job.name.clone(),
        nodes: args.nodes,
        tasks_per_node: args.tasks_per_node,
        cpus_per_task: args.cpus_per_task,
        time: args.time.clone(),
        partition: args.partition.clone(),
        options: args.options.clone(),
        requeue: args.requeue,
        directory: directory.to_string_lossy().into_owned(),
        elastic: train.elastic,
        // Whoever comes back must find its own run, and no earlier one.
        run: (args.requeue && train.out.is_none()).then(|| format!("runs/{}", job.name)),
        command,
    })?;
    if let Some(path) = &args.output {
        write_file(path, &text)?;
    }
    if args.submit {
        println!("submitted batch job {}", submit(&text)?);
    } else if args.output.is_none() {
        print!("{text}");
    }
    Ok(())
}

/// What stands in a line of the script must not end it.
fn check_lines(args: &Slurm) -> Result<(), Failure> {
    let named = [("--time", &args.time), ("--partition", &args.partition)];
    let named = named.into_iter().filter_map(|(flag, value)| Some((flag, value.as_ref()?)));
    let mut values = named.chain(args.options.iter().map(|option| ("--sbatch", option)));
    match values.find(|(_, value)| value.chars().any(char::is_control)) {
        Some((flag, value)) => {
            let message = format!("{flag} {value:?} contains control characters");
            Err(Failure::usage(message, "write it in one line; pass each sbatch option with its own --sbatch"))
        }
        None => Ok(()),
    }
}

fn program() -> Result<String, Failure> {
    let path = std::env::current_exe()
        .map_err(|error| Failure::job(format!("cannot find this program: {error}"), "start it by its full path"))?;
    Ok(path.to_string_lossy().into_owned())
}
