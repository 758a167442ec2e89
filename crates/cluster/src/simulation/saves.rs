//! The checkpoints of a simulated elastic job, on a simulated disk that all hosts share and whose power may fail.
//!
//! Every rank of a generation writes its part before an agreement; when that has completed for the first rank, it commits.
//! Checked: no generation commits what it would have made after its successor began; what is newest on the disk is always whole,
//! of one step, and no older than the last commit that succeeded.

use super::job::Random;
use kolo_ckpt::simulated::{Fate, SimulatedDisk};
use kolo_ckpt::{CkptError, Header, Piece, Role, ShardWriter, Summary, commit, newest_valid, staging_dir};
use kolo_graph::DType;
use kolo_graph::region::Region;
use std::collections::BTreeMap;
use std::path::Path;

const ROOT: &str = "runs/a/checkpoints";
const CHUNK_BYTES: u64 = 64;
/// Elements of the one tensor; each rank has a part.
const ELEMENTS: usize = 24;
/// Steps from one save to the next.
const EVERY: u64 = 6;

pub struct Saves {
    disk: SimulatedDisk,
    /// What becomes of the disk is drawn apart from what becomes of the workers.
    random: Random,
    /// What the ranks of a generation wrote at a step.
    written: BTreeMap<(u32, u64), Vec<Summary>>,
    /// The last step whose commit succeeded.
    durable: u64,
    pub commits: u64,
    pub failures: u64,
}

fn state_at(step: u64) -> Vec<u8> {
    (0..ELEMENTS * 4).map(|byte| (step as usize * 31 + byte * 7) as u8).collect()
}

pub fn is_due(step: u64) -> bool {
    step > 0 && step.is_multiple_of(EVERY)
}

impl Saves {
    pub fn new(seed: u64) -> Self {
        let random = Random(seed.wrapping_mul(0xd134_2543_de82_ef95) ^ 0x5eed);
        let (disk, written) = (SimulatedDisk::new(), BTreeMap::new());
        Self { disk, random, written, durable: 0, commits: 0, failures: 0 }
    }

    /// When the power of the disk fails.
    pub fn power_fails_ms(&mut self) -> u64 {
        500 + self.random.below(8000)
    }

    /// What rank `rank` of `ranks` has after so many steps.
    pub fn write(&mut self, generation: u32, step: u64, (rank, ranks): (usize, usize)) {
        let (state, staging) = (state_at(step), staging_dir(Path::new(ROOT), step, u64::from(generation)));
        let (start, end) = (ELEMENTS * rank / ranks, ELEMENTS * (rank + 1) / ranks);
        let (dtype, role, bytes) = (DType::F32, Role::Parameter, &state[start * 4..end * 4]);
        let piece = Piece { tensor: "w", whole: &[ELEMENTS], dtype, role, region: Region::from(start), bytes };
        let writer = ShardWriter { rank, ranks, chunk_bytes: CHUNK_BYTES };
        let written = writer.write(&self.disk, &staging, &mut [piece].into_iter(), &|_| ());
        self.written.entry((generation, step)).or_default().extend(written);
    }

    /// The first rank commits; `later` are the steps at which newer generations began.
    pub fn commit(&mut self, generation: u32, step: u64, later: impl Iterator<Item = u64>) {
        let shards = self.written.remove(&(generation, step)).unwrap_or_default();
        let staging = staging_dir(Path::new(ROOT), step, u64::from(generation));
        let header = Header { step, ..Header::default() };
        let done: Result<_, CkptError> = commit(&self.disk, Path::new(ROOT), &staging, &header, &shards);
        // The step in flight may be made by both, to the same bits.
        for began in later {
            assert!(step <= began + 1, "generation {generation} commits step {step}, its successor began at {began}");
        }
        if done.is_ok() {
            (self.durable, self.commits) = (self.durable.max(step), self.commits + 1);
        }
    }

    /// The power of the disk fails, and what was not synced is lost, kept or torn.
    pub fn fail(&mut self) {
        self.failures += 1;
        let random = &mut self.random;
        self.disk = self.disk.after_power_failure(&mut || match random.below(3) {
            0 => Fate::Lost,
            1 => Fate::Kept,
            _ => Fate::Torn(random.below(256) as u8),
        });
        self.check();
    }

    /// The newest is whole, of one step, and no older than the last that was committed.
    pub fn check(&self) {
        let found = newest_valid(&self.disk.shared(), Path::new(ROOT)).expect("a directory that can be listed");
        assert!(found.skipped.is_empty(), "{:?}", found.skipped);
        let newest = found.checkpoint.map_or(0, |checkpoint| {
            let step = checkpoint.header().step;
            let held = checkpoint.read_all(&checkpoint.tensors()[0]).expect("a tensor");
            assert_eq!(held, state_at(step), "step {step} is a mix");
            step
        });
        assert!(newest >= self.durable, "step {} was committed, and {newest} is the newest", self.durable);
    }
}
