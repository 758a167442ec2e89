//! The digest of a run's weights, wherever they lie.

use crate::error::Error;
use crate::together;
use kolo_comm::Communicator;
use kolo_exec::Store;
use kolo_exec::store::{Digest, Entry};
use kolo_graph::Region;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a rank has of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Shard {
    tensor: String,
    whole: Vec<usize>,
    region: Vec<usize>,
    elements: usize,
}

impl Shard {
    fn of(entry: &Entry) -> Self {
        let (tensor, whole) = (entry.tensor.clone(), entry.whole.to_vec());
        Self { tensor, whole, region: entry.region.to_numbers(), elements: entry.ty.elements() }
    }

    fn is_whole(&self) -> bool {
        self.elements == self.whole.iter().product::<usize>()
    }
}

/// The digest of all parameters. Where ranks have shards of them, each hands its own to all, tensor by tensor; all ranks call it
/// together.
pub fn digest(store: &Store, world: Option<&Communicator>) -> Result<String, Error> {
    let own: Vec<Shard> = store.entries().iter().filter(|entry| entry.is_param()).map(Shard::of).collect();
    let Some(world) = world else { return Ok(store.digest()) };
    let text = serde_json::to_vec(&own).map_err(|error| Error::bug(&error))?;
    let all: Result<Vec<Vec<Shard>>, _> =
        together::gather_bytes(Some(world), &text)?.iter().map(|text| serde_json::from_slice(text)).collect();
    let all = all.map_err(|error| Error::bug(&error))?;
    let names = |shards: &[Shard]| shards.iter().map(|shard| shard.tensor.clone()).collect::<Vec<_>>();
    if all.iter().all(|shards| shards.iter().all(Shard::is_whole) && names(shards) == names(&all[0])) {
        return Ok(store.digest());
    }
    let mut holders: BTreeMap<&str, Vec<(usize, &Shard)>> = BTreeMap::new();
    for (rank, shards) in all.iter().enumerate() {
        for shard in shards {
            let known = holders.entry(&shard.tensor).or_default();
            if !known.iter().any(|(_, other)| *other == shard) {
                known.push((rank, shard));
            }
        }
    }
    let mut digest = Digest::default();
    for (tensor, shards) in holders {
        let shards = shards.iter().find(|(_, shard)| shard.is_whole()).map_or(shards.clone(), |whole| vec![*whole]);
        let shape = &shards[0].1.whole;
        let mut values = vec![0.0f32; shape.iter().product()];
        for (rank, shard) in shards {
            let mut part = vec![0.0f32; shard.elements];
            if world.rank() == rank {
                part.copy_from_slice(store.values(tensor).unwrap_or_default());
            }
            world.broadcast(&mut part, rank)?;
            for (local, start, len) in Region::from_numbers(&shard.region).runs(0..shard.elements) {
                values[start..start + len].copy_from_slice(&part[local..local + len]);
            }
        }
        digest.add(tensor, shape, &values);
    }
    Ok(digest.finish())
}
