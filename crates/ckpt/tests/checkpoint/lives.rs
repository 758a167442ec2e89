//! Runs that live many times: each life resumes from what it finds, saves at every step, and ends by a power failure, a killed
//! process or a bad disk. A rank of an earlier life may still be writing, and try to commit what it has.

use crate::*;
use kolo_ckpt::simulated::{Fate, Trouble};
use kolo_ckpt::{Keep, newest_valid, prune};
use std::io::ErrorKind;

const SEEDS: u64 = 2000;
const LIVES: u64 = 4;
const CHUNK_BYTES: u64 = 512;

/// The state after so many steps, whatever happened on the way.
fn state_at(step: u64) -> Vec<Whole> {
    state(step, 3)
}

/// One life. Returns the last step that was committed for sure.
fn live(disk: &SimulatedDisk, draw: &mut dyn FnMut(u64) -> u64, life: u64, first: u64) -> u64 {
    let root = Path::new(ROOT);
    let (shared, ranks) = (disk.shared(), 1 + draw(4) as usize);
    let keep = 1 + draw(3) as usize;
    let mut committed = first;
    for step in first + 1..=first + 1 + draw(3) {
        let staging = staging_dir(root, step, life);
        let write = |rank| write_rank(disk, &staging, &state_at(step), (rank, ranks), CHUNK_BYTES);
        let shards: Result<Vec<Summary>, CkptError> = (0..ranks).map(write).collect();
        let saved = shards.and_then(|shards| commit(disk, root, &staging, &header(step), &shards));
        match saved {
            Ok(path) => {
                committed = step;
                let keep = Keep { newest: keep, committed: Some(&path), ..Keep::default() };
                // Whether old ones could be removed is nobody's concern here.
                let _ = prune(&shared, root, keep);
            }
            // Training goes on, and saves again at the next step.
            Err(error) => assert!(error.to_string().contains("\n  hint: ")),
        }
    }
    committed
}

/// A rank of an earlier life, whose others are gone, writes its part and commits what it has: part of a state, or all of an
/// old one.
fn haunt(disk: &SimulatedDisk, draw: &mut dyn FnMut(u64) -> u64, life: u64, step: u64) {
    let ranks = 1 + draw(2) as usize;
    let staging = staging_dir(Path::new(ROOT), step, 1000 + life);
    if let Ok(summary) = write_rank(disk, &staging, &state_at(step), (0, ranks), CHUNK_BYTES)
        && draw(2) == 0
    {
        let _ = commit(disk, Path::new(ROOT), &staging, &header(step), &[summary]);
    }
}

fn run(seed: u64) -> (u64, u64) {
    let stream = Stream::new(seed, "lives");
    let mut drawn = 0;
    let mut draw = |bound: u64| {
        drawn += 1;
        stream.below(seed, drawn, bound)
    };
    let mut disk = SimulatedDisk::new();
    let (mut durable, mut losses) = (0, 0);
    for life in 0..LIVES {
        let found = newest_valid(&disk.shared(), Path::new(ROOT)).unwrap();
        assert!(found.skipped.is_empty(), "seed {seed}, life {life}: {:?}", found.skipped);
        let first = found.checkpoint.map_or(0, |checkpoint| {
            let step = checkpoint.header().step;
            assert_eq!(load(&checkpoint), sorted(state_at(step)), "seed {seed}, life {life}: step {step} is a mix");
            step
        });
        assert!(first >= durable, "seed {seed}, life {life}: step {durable} was committed, and {first} is the newest");
        if life > 0 && draw(3) == 0 {
            haunt(&disk, &mut draw, life, first);
        }
        let at = draw(260);
        disk.set_trouble(match draw(4) {
            0 => Trouble::None,
            1 => Trouble::Once { at, kind: [ErrorKind::StorageFull, ErrorKind::Other][draw(2) as usize] },
            2 => Trouble::ReadOnly { from: at },
            _ => Trouble::Cut { at },
        });
        durable = live(&disk, &mut draw, life, first);
        disk = match draw(3) {
            // The process was killed: the system has everything.
            0 => disk.after_power_failure(&mut || Fate::Kept),
            _ => disk.after_power_failure(&mut || match draw(3) {
                0 => Fate::Lost,
                1 => Fate::Kept,
                _ => Fate::Torn(draw(256) as u8),
            }),
        };
        losses += u64::from(durable == first);
    }
    (durable, losses)
}

#[test]
fn whatever_happens_the_newest_is_whole_and_no_older_than_the_last_commit() {
    let threads = 4;
    let totals: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let share = |thread: u64| {
            scope.spawn(move || (thread..SEEDS).step_by(threads).map(run).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1)))
        };
        let running: Vec<_> = (0..threads as u64).map(share).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let (steps, losses) = totals.iter().fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
    assert!(steps > 2 * SEEDS && losses > SEEDS / 4, "{steps} steps, {losses} lives that saved nothing");
}
