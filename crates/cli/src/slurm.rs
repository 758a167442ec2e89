//! `kolo slurm`: a batch script that trains a job on a Slurm cluster.

use crate::args::{Args, Command, Slurm};
use crate::fail::{Failure, write_file};
use crate::load;
use clap::Parser;
use kolo_cluster::slurm::{Batch, script, submit};
use kolo_models::ModelKind;

pub fn slurm(models: &[ModelKind], args: &Slurm) -> Result<(), Failure> {
    let workers = args.nodes.saturating_mul(args.tasks_per_node);
    if workers == 0 {
        return Err(Failure::usage("a batch job needs a node and a task", "write --nodes 1 --tasks-per-node 1"));
    }
    let mut command: Vec<String> = vec![program()?, "train".into()];
    command.extend(args.job.iter().map(|path| path.display().to_string()));
    if let Some(cpus) = args.cpus_per_task {
        command.push(format!("--threads={cpus}"));
    }
    command.extend(args.train.iter().cloned());
    // What would fail on the cluster after hours in the queue fails here.
    let train = match Args::try_parse_from(&command) {
        Ok(Args { command: Command::Train(train) }) => train,
        Ok(_) => return Err(Failure::usage("what follows `--` is for `kolo train`", "write its options only")),
        Err(error) => {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            return Err(Failure::usage(first.trim_start_matches("error: "), "see `kolo train --help`"));
        }
    };
    let servers = if train.asynchronous { train.servers } else { 0 };
    let job = load::job(models, &train.job, workers.saturating_sub(servers))?;
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
        directory: directory.to_string_lossy().into_owned(),
        command,
    })?;
    if args.submit {
        println!("submitted batch job {}", submit(&text)?);
        return Ok(());
    }
    match &args.output {
        Some(path) => write_file(path, text),
        None => {
            print!("{text}");
            Ok(())
        }
    }
}

fn program() -> Result<String, Failure> {
    let path = std::env::current_exe()
        .map_err(|error| Failure::job(format!("cannot find this program: {error}"), "start it by its full path"))?;
    Ok(path.to_string_lossy().into_owned())
}
