//! `kolo graph` and `kolo list`.

use crate::args::{GraphArgs, Listing};
use crate::fail::Failure;
use crate::load::{self, Kinds};
use crate::output::{print, println};
use crate::workers;
use kolo_parallel::Purpose;
use kolo_train::step::{graph_of, raw_graph};

pub fn graph(kinds: &Kinds, args: &GraphArgs) -> Result<(), Failure> {
    let workers = workers::asked(&args.job.workers)?;
    let job = load::job(kinds, &args.job, workers)?;
    let purpose = match args.evaluation {
        true => Purpose::Evaluation { batch: job.grain_batch() },
        false => Purpose::Training,
    };
    if args.raw {
        print!("{}", raw_graph(&job, &job.parallel, purpose)?);
        return Ok(());
    }
    if args.rank >= workers {
        let hint = format!("ranks are 0 to {}; -n gives the number of workers", workers - 1);
        let workers = if workers == 1 { "1 worker".into() } else { format!("{workers} workers") };
        return Err(Failure::usage(format!("--rank {} of {workers}", args.rank), &hint));
    }
    print!("{}", graph_of(&job, &job.parallel, purpose, &load::mesh(&job, workers, args.rank)?)?);
    Ok(())
}

pub fn list(kinds: &Kinds, what: Listing) -> Result<(), Failure> {
    match what {
        Listing::Models => kinds.models.iter().for_each(|kind| println!("{:<12} {}", kind.name, kind.doc)),
        Listing::Sources => kinds.sources.iter().for_each(|kind| println!("{:<22} {}", kind.name, kind.doc)),
        Listing::Strategies => kinds.strategies.iter().for_each(|kind| println!("{:<12} {}", kind.name, kind.doc)),
        Listing::Clusters => crate::clusters::list(),
        Listing::Ops => kolo_ops::registry().iter().for_each(|kind| println!("{}", kind.name)),
    }
    Ok(())
}
