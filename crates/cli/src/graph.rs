//! `kolo graph` and `kolo list`.

use crate::args::{GraphArgs, Listing};
use crate::fail::Failure;
use crate::output::{print, println};
use crate::{load, workers};
use kolo_models::ModelKind;
use kolo_parallel::{Purpose, STRATEGIES};
use kolo_train::step::{graph_of, raw_graph};

pub fn graph(models: &[ModelKind], args: &GraphArgs) -> Result<(), Failure> {
    let workers = workers::asked(&args.job.workers)?;
    let job = load::job(models, &args.job, workers)?;
    let purpose = match args.evaluation {
        true => Purpose::Evaluation { batch: job.grain_batch() },
        false => Purpose::Training,
    };
    if args.raw {
        print!("{}", raw_graph(&job, &job.parallel, purpose)?);
        return Ok(());
    }
    if args.rank >= workers {
        return Err(Failure::usage(format!("--rank {} of {workers} workers", args.rank), "ranks count from 0"));
    }
    print!("{}", graph_of(&job, &job.parallel, purpose, &load::mesh(&job, workers, args.rank)?)?);
    Ok(())
}

pub fn list(models: &[ModelKind], what: Listing) -> Result<(), Failure> {
    match what {
        Listing::Models => models.iter().for_each(|kind| println!("{:<12} {}", kind.name, kind.doc)),
        Listing::Sources => kolo_data::SOURCES.iter().for_each(|kind| println!("{:<22} {}", kind.name, kind.doc)),
        Listing::Strategies => STRATEGIES.iter().for_each(|kind| println!("{:<12} {}", kind.name, kind.doc)),
        Listing::Ops => kolo_ops::registry().iter().for_each(|kind| println!("{}", kind.name)),
    }
    Ok(())
}
