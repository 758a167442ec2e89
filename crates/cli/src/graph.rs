//! `kolo graph` and `kolo list`.

use crate::args::{GraphArgs, Listing};
use crate::fail::Failure;
use crate::output::{print, println};
use crate::{load, workers};
use kolo_models::ModelKind;
use kolo_parallel::Mesh;
use kolo_train::step::{evaluation_graph, optimise, spread, training_graph};

pub fn graph(models: &[ModelKind], args: &GraphArgs) -> Result<(), Failure> {
    let workers = workers::asked(&args.job.workers)?;
    let job = load::job(models, &args.job, workers)?;
    let graph = match args.evaluation {
        true => evaluation_graph(&*job.model, job.grain_batch())?,
        false => training_graph(&*job.model, &job.optimizer, job.clip, job.grain_batch(), job.grains)?,
    };
    if args.raw || args.evaluation {
        print!("{}", if args.raw { graph } else { optimise(graph) });
        return Ok(());
    }
    let Some(mesh) = Mesh::data(workers, args.rank) else {
        return Err(Failure::usage(format!("--rank {} of {workers} workers", args.rank), "ranks count from 0"));
    };
    print!("{}", spread(optimise(graph), &job.parallel, &mesh));
    Ok(())
}

pub fn list(models: &[ModelKind], what: Listing) -> Result<(), Failure> {
    match what {
        Listing::Models => models.iter().for_each(|kind| println!("{:<12} {}", kind.name, kind.doc)),
        Listing::Sources => kolo_data::SOURCES.iter().for_each(|kind| println!("{:<22} {}", kind.name, kind.doc)),
        Listing::Ops => kolo_ops::registry().iter().for_each(|kind| println!("{}", kind.name)),
    }
    Ok(())
}
