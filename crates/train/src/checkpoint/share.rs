//! Which rank writes what.

use crate::error::Error;
use crate::together;
use kolo_comm::Communicator;
use kolo_exec::store::Entry;
use kolo_graph::{Graph, ValueId};
use std::collections::BTreeMap;

/// A run of a tensor that a rank holds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
struct Held {
    tensor: String,
    region: Vec<usize>,
    bytes: usize,
}

/// The numbers of the entries that this rank writes. Every run is written by one of the ranks that hold it and can write:
/// the one with the least to write so far. All ranks call it together, and each says whether it sees the directory.
pub(super) fn own(world: Option<&Communicator>, entries: &[Entry], can_write: bool) -> Result<Vec<usize>, Error> {
    let held = |entry: &Entry| {
        let (tensor, region, bytes) = (entry.tensor.clone(), entry.region.to_numbers(), entry.ty.bytes());
        Held { tensor, region, bytes }
    };
    let mine: Vec<Held> = entries.iter().map(held).collect();
    let text = serde_json::to_vec(&(can_write, &mine)).map_err(|error| Error::bug(&error))?;
    let all: Result<Vec<(bool, Vec<Held>)>, _> =
        together::gather_bytes(world, &text)?.iter().map(|text| serde_json::from_slice(text)).collect();
    let all = all.map_err(|error| Error::bug(&error))?;
    let rank = world.map_or(0, Communicator::rank);
    let writers = writers(&all).map_err(|lost| Error::Checkpoint {
        message: format!("rank {} holds `{}`, but does not see the directory of checkpoints", lost.0, lost.1),
        hint: "let --out name a directory that all hosts share".into(),
    })?;
    Ok(mine.iter().enumerate().filter(|(_, held)| writers[held] == rank).map(|(number, _)| number).collect())
}

/// Who writes each run; an error is a rank and the tensor that only it holds, where it cannot write.
fn writers(all: &[(bool, Vec<Held>)]) -> Result<BTreeMap<&Held, usize>, (usize, String)> {
    let mut holders: BTreeMap<&Held, Vec<usize>> = BTreeMap::new();
    for (rank, (_, runs)) in all.iter().enumerate() {
        runs.iter().for_each(|run| holders.entry(run).or_default().push(rank));
    }
    // The largest first, so that the small ones even out.
    let mut runs: Vec<(&Held, Vec<usize>)> = holders.into_iter().collect();
    runs.sort_by_key(|(run, _)| std::cmp::Reverse(run.bytes));
    let mut load = vec![0usize; all.len()];
    let mut writers = BTreeMap::new();
    for (run, ranks) in runs {
        let able = ranks.iter().copied().filter(|rank| all[*rank].0);
        let Some(rank) = able.min_by_key(|rank| (load[*rank], *rank)) else {
            return Err((ranks[0], run.tensor.clone()));
        };
        load[rank] += run.bytes;
        writers.insert(run, rank);
    }
    Ok(writers)
}

/// Bytes of the copy that a rank of so many makes of its share, at most.
pub fn copied_bytes(graph: &Graph, workers: usize) -> usize {
    let is_whole = |whole: &[usize], id: ValueId| whole.iter().product::<usize>() == graph.ty(id).elements();
    let params = graph.params().map(|(id, param)| {
        let whole = is_whole(param.whole(), id);
        (param.name.clone(), param.region(), graph.ty(id).bytes(), whole)
    });
    let states = graph.states().map(|(id, state)| {
        let (tensor, region) = state.shard();
        (tensor.to_string(), region, graph.ty(id).bytes(), is_whole(state.whole(), id))
    });
    let (mut shared, mut own) = (Vec::new(), 0);
    for (tensor, region, bytes, whole) in params.chain(states) {
        match whole {
            true => shared.push(Held { tensor, region: region.to_numbers(), bytes }),
            false => own += bytes,
        }
    }
    let all = vec![(true, shared); workers.max(1)];
    let mut load = vec![0; workers.max(1)];
    for (run, rank) in writers(&all).unwrap_or_default() {
        load[rank] += run.bytes;
    }
    own + load.into_iter().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(tensor: &str, start: usize, bytes: usize) -> Held {
        Held { tensor: tensor.into(), region: vec![start], bytes }
    }

    #[test]
    fn every_run_is_written_once_by_a_rank_that_can() {
        let shared = [held("a", 0, 100), held("b", 0, 60), held("c", 0, 50)];
        let mut all: Vec<(bool, Vec<Held>)> = (0..3).map(|_| (true, shared.to_vec())).collect();
        all[1].1.push(held("m", 0, 40));
        all[2].1.push(held("m", 40, 40));
        let found = writers(&all).unwrap();
        let rank = |run: &Held| found[run];
        assert_eq!((rank(&shared[0]), rank(&shared[1]), rank(&shared[2])), (0, 1, 2));
        assert_eq!((rank(&held("m", 0, 40)), rank(&held("m", 40, 40))), (1, 2));
        all[0].0 = false;
        assert!(writers(&all).unwrap().values().all(|rank| *rank > 0));
        all[2].0 = false;
        assert_eq!(writers(&all), Err((2, "m".into())));
    }
}
