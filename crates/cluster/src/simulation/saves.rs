//! The checkpoints of a simulated elastic job, on a simulated disk that all hosts share and whose power may fail.
//!
//! Every rank of a generation writes its part of the state before a call; when that has completed for the first rank, it
//! commits and removes old ones, perhaps only when its generation is over. The power fails between operations or in one.
//! Checked: what is newest on the disk is always whole and of one state, now and after a power failure at this moment. Whose
//! state that is, [`super::groups`] says.

use super::job::Random;
use super::state::{Group, State};
use kolo_ckpt::simulated::{Fate, SimulatedDisk, Trouble};
use kolo_ckpt::{
    Header, Keep, Piece, Role, ShardWriter, Summary, Unfinished, commit, newest_valid, prune, staging_dir,
};
use kolo_graph::DType;
use kolo_graph::region::Region;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const ROOT: &str = "runs/a/checkpoints";
const CHUNK_BYTES: u64 = 64;
/// Elements of the one tensor; each rank has a part.
const ELEMENTS: usize = 96;
/// Steps from one save to the next.
const EVERY: u64 = 6;
/// How many checkpoints are kept.
const KEPT: usize = 2;
/// Operations of the disk until its power fails, where it fails in one.
const OPERATIONS_MAX: u64 = 60;

pub struct Saves {
    disk: SimulatedDisk,
    /// What becomes of the disk is drawn apart from what becomes of the workers.
    random: Random,
    /// What the ranks of a group wrote at a step.
    written: BTreeMap<(Group, u64), Vec<Summary>>,
    /// The operation in which the power fails.
    cut: Option<u64>,
    pub commits: u64,
    pub failures: u64,
}

pub fn is_due(step: u64) -> bool {
    step > 0 && step.is_multiple_of(EVERY)
}

fn staging(group: Group, step: u64) -> PathBuf {
    staging_dir(Path::new(ROOT), step, u64::from(group.number()))
}

impl Saves {
    pub fn new(seed: u64) -> Self {
        let random = Random(seed.wrapping_mul(0xd134_2543_de82_ef95) ^ 0x5eed);
        let (disk, written) = (SimulatedDisk::new(), BTreeMap::new());
        Self { disk, random, written, cut: None, commits: 0, failures: 0 }
    }

    /// When the power of the disk fails.
    pub fn power_fails_ms(&mut self) -> u64 {
        500 + self.random.below(8000)
    }

    /// Milliseconds until a commit is done: nobody waits for it, and a disk may be slow.
    pub fn commit_takes_ms(&mut self) -> u64 {
        let slow = self.random.below(4) == 0;
        self.random.below(if slow { 4000 } else { 50 })
    }

    /// What rank `rank` of `ranks` has.
    pub fn write(&mut self, group: Group, state: &State, (rank, ranks): (usize, usize)) {
        let numbers = state.numbers(ELEMENTS);
        let (start, end) = (ELEMENTS * rank / ranks, ELEMENTS * (rank + 1) / ranks);
        let bytes: Vec<u8> = numbers[start..end].iter().flat_map(|number| number.to_le_bytes()).collect();
        let (dtype, role, region) = (DType::F32, Role::Parameter, Region::from(start));
        let piece = Piece { tensor: "w", whole: &[ELEMENTS], dtype, role, region, bytes: &bytes };
        let writer = ShardWriter { rank, ranks, chunk_bytes: CHUNK_BYTES };
        let staging = staging(group, state.step());
        let written = writer.write(&self.disk, &staging, &mut [piece].into_iter(), &|_| ());
        self.written.entry((group, state.step())).or_default().extend(written);
        self.cut_off();
    }

    /// Makes visible what the ranks wrote; whether that is known to have succeeded.
    pub fn commit(&mut self, group: Group, step: u64) -> bool {
        let shards = self.written.remove(&(group, step)).unwrap_or_default();
        let header = Header { step, ..Header::default() };
        let done = commit(&self.disk, Path::new(ROOT), &staging(group, step), &header, &shards);
        if let Ok(path) = &done {
            self.commits += 1;
            let unfinished = Unfinished::Before { step, attempt: u64::from(group.number()) };
            let keep = Keep { newest: KEPT, best: None, committed: Some(path), unfinished };
            // A clean-up that fails leaves more than it should, and no less.
            drop(prune(&self.disk.shared(), Path::new(ROOT), keep));
        }
        self.cut_off();
        done.is_ok()
    }

    /// The power of the disk fails, now or in one of its next operations; whether now.
    pub fn loses_power(&mut self) -> bool {
        if self.random.below(2) == 0 {
            self.fail();
            return true;
        }
        let at = self.random.below(OPERATIONS_MAX);
        self.disk.set_trouble(Trouble::Cut { at });
        self.cut = Some(at);
        false
    }

    /// The power comes back once it has failed in an operation.
    fn cut_off(&mut self) {
        if self.cut.is_some_and(|at| self.disk.operations() > at) {
            self.fail();
        }
    }

    /// What was not synced is lost, kept or torn.
    pub fn fail(&mut self) {
        (self.failures, self.cut) = (self.failures + 1, None);
        self.disk = self.failed();
    }

    /// The disk after a power failure at this moment.
    fn failed(&mut self) -> SimulatedDisk {
        let random = &mut self.random;
        self.disk.after_power_failure(&mut || match random.below(3) {
            0 => Fate::Lost,
            1 => Fate::Kept,
            _ => Fate::Torn(random.below(256) as u8),
        })
    }

    /// The newest state on the disk, and the newest there would be after a power failure.
    pub fn newest(&mut self) -> [State; 2] {
        let now = self.disk.copy();
        now.set_trouble(Trouble::None);
        [newest(&now), newest(&self.failed())]
    }
}

/// The newest state on this disk, which is whole; that of the start if there is none.
fn newest(disk: &SimulatedDisk) -> State {
    let found = newest_valid(&disk.shared(), Path::new(ROOT)).expect("a directory that can be listed");
    assert!(found.skipped.is_empty(), "{:?}", found.skipped);
    let Some(checkpoint) = found.checkpoint else { return State::default() };
    let held = checkpoint.read_all(&checkpoint.tensors()[0]).expect("a tensor");
    let numbers: Vec<u32> = held.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    let state = State::of_numbers(&numbers).expect("a checkpoint of one state");
    assert_eq!(state.step(), checkpoint.header().step);
    state
}
