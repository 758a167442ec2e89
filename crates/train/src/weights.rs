//! The digest of a run's weights, wherever they lie.

use crate::error::Error;
use crate::together;
use kolo_comm::Communicator;
use kolo_exec::Store;
use kolo_exec::store::{Digest, Entry};
use kolo_graph::Region;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

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

/// The digest of all parameters. Where ranks have shards of them, each hands its own to all, block by block; all ranks call it
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
    let mut block = Block { values: vec![0.0f32; BLOCK_ELEMENTS], part: vec![0.0f32; BLOCK_ELEMENTS] };
    for (tensor, shards) in holders {
        let shards = shards.iter().find(|(_, shard)| shard.is_whole()).map_or(shards.clone(), |whole| vec![*whole]);
        let shape = &shards[0].1.whole;
        digest.begin(tensor, shape);
        let elements: usize = shape.iter().product();
        for start in (0..elements).step_by(BLOCK_ELEMENTS) {
            let range = start..elements.min(start + BLOCK_ELEMENTS);
            digest.add_values(block.gather(store, world, (tensor, &shards), range)?);
        }
    }
    Ok(digest.finish())
}

/// Elements that ranks hand each other at a time: no rank ever has a whole tensor for its digest.
const BLOCK_ELEMENTS: usize = 1 << 17;

/// Some elements of a tensor, and what one rank has of them.
struct Block {
    values: Vec<f32>,
    part: Vec<f32>,
}

impl Block {
    /// These elements of a tensor from the ranks that have them.
    fn gather(
        &mut self,
        store: &Store,
        world: &Communicator,
        (tensor, shards): (&str, &[(usize, &Shard)]),
        range: Range<usize>,
    ) -> Result<&[f32], Error> {
        for (rank, shard) in shards {
            let runs = || Region::from_numbers(&shard.region).within(shard.elements, range.clone());
            let part = &mut self.part[..runs().map(|(_, _, len)| len).sum()];
            if part.is_empty() {
                continue;
            }
            if world.rank() == *rank {
                let own = store.values(tensor).unwrap_or_default();
                let mut at = 0;
                for (local, _, len) in runs() {
                    part[at..at + len].copy_from_slice(&own[local..local + len]);
                    at += len;
                }
            }
            world.broadcast(part, *rank)?;
            let mut at = 0;
            for (_, start, len) in runs() {
                let start = start - range.start;
                self.values[start..start + len].copy_from_slice(&part[at..at + len]);
                at += len;
            }
        }
        Ok(&self.values[..range.len()])
    }
}
