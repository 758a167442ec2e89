//! The power fails at every operation of a save, and of what was not synced any part is there afterwards.

use crate::*;
use kolo_ckpt::simulated::{Fate, Trouble};
use kolo_ckpt::{Keep, newest_valid, prune};

const CHUNK_BYTES: u64 = 128;

/// A save of step 200 as two ranks do it, and what follows: older ones are removed.
fn save_and_prune(disk: &SimulatedDisk, state: &[Whole]) -> Result<(), CkptError> {
    let path = save(disk, 200, state, 2, CHUNK_BYTES)?;
    prune(&disk.shared(), Path::new(ROOT), Keep { newest: 1, committed: Some(&path), ..Keep::default() })?;
    Ok(())
}

/// What became of everything that was not synced, in the `way`-th of many.
fn fates(way: u64, cut: u64) -> impl FnMut() -> Fate {
    let stream = Stream::new(way, "power failure");
    let mut drawn = 0;
    move || {
        drawn += 1;
        let number = stream.bits(cut, drawn);
        match (way, number % 4) {
            (0, _) | (3.., 0) => Fate::Lost,
            (1, _) | (3.., 1) => Fate::Kept,
            (2, _) => Fate::Torn((number >> 8) as u8),
            (_, 2) => Fate::Torn((number >> 8) as u8),
            // Mostly kept in some ways, mostly lost in others.
            _ => {
                if way.is_multiple_of(2) {
                    Fate::Kept
                } else {
                    Fate::Lost
                }
            }
        }
    }
}

#[test]
fn after_a_power_failure_there_is_the_old_or_the_new() {
    const WAYS: u64 = 24;
    let (old, new) = (state(1, 6), state(2, 6));
    let disk = disk_with(&old, 2, CHUNK_BYTES);
    let (old, new_sorted) = (sorted(old), sorted(new.clone()));
    disk.set_trouble(Trouble::None);
    let counted = disk.copy();
    save_and_prune(&counted, &new).unwrap();
    let operations = counted.operations();
    assert!(operations > 50, "{operations} operations");
    let (mut olds, mut news) = (0, 0);
    for cut in 0..=operations {
        let running = disk.copy();
        running.set_trouble(Trouble::Cut { at: cut });
        let outcome = save_and_prune(&running, &new);
        assert_eq!(outcome.is_ok(), cut == operations, "cut at {cut}");
        for way in 0..WAYS {
            let after = running.after_power_failure(&mut fates(way, cut));
            let shared = after.shared();
            let found = newest_valid(&shared, Path::new(ROOT)).unwrap();
            let checkpoint = found.checkpoint.unwrap_or_else(|| panic!("cut at {cut}, way {way}: neither"));
            let is_new = checkpoint.header().step == 200;
            assert!(found.skipped.is_empty(), "cut at {cut}, way {way}: {:?} is visible", found.skipped);
            assert_eq!(load(&checkpoint), if is_new { new_sorted.clone() } else { old.clone() }, "cut at {cut}");
            assert!(is_new || outcome.is_err(), "way {way}: what was committed is lost");
            *(if is_new { &mut news } else { &mut olds }) += 1;
            // The job is started again and saves that step once more.
            save_and_prune(&after, &new).unwrap();
            let found = newest_valid(&shared, Path::new(ROOT)).unwrap();
            assert_eq!(load(&found.checkpoint.unwrap()), new_sorted, "cut at {cut}, way {way}: saved again");
            assert_eq!(after.list(Path::new(ROOT)).unwrap().len(), 1, "cut at {cut}, way {way}: something is left");
        }
    }
    assert!(olds > 100 && news > 100, "{olds} old, {news} new");
}

/// The simulation finds what the order of a save is for: without the syncs, a checkpoint can be torn.
#[test]
fn a_save_without_syncs_is_torn() {
    #[derive(Clone, Debug)]
    struct Careless(SimulatedDisk);
    impl Disk for Careless {
        fn create_dir(&self, path: &Path) -> std::io::Result<()> {
            self.0.create_dir(path)
        }
        fn create(&self, path: &Path) -> std::io::Result<Box<dyn kolo_ckpt::disk::WriteFile>> {
            Ok(Box::new(CarelessFile(self.0.create(path)?)))
        }
        fn open(&self, path: &Path) -> std::io::Result<Box<dyn kolo_ckpt::disk::ReadFile>> {
            self.0.open(path)
        }
        fn list(&self, path: &Path) -> std::io::Result<Vec<kolo_ckpt::disk::Item>> {
            self.0.list(path)
        }
        fn rename(&self, from: &Path, to: &Path) -> std::io::Result<()> {
            self.0.rename(from, to)
        }
        fn remove_file(&self, path: &Path) -> std::io::Result<()> {
            self.0.remove_file(path)
        }
        fn remove_dir(&self, path: &Path) -> std::io::Result<()> {
            self.0.remove_dir(path)
        }
        fn sync_dir(&self, path: &Path) -> std::io::Result<()> {
            self.0.sync_dir(path)
        }
        fn is_dir(&self, path: &Path) -> bool {
            self.0.is_dir(path)
        }
    }
    #[derive(Debug)]
    struct CarelessFile(Box<dyn kolo_ckpt::disk::WriteFile>);
    impl kolo_ckpt::disk::WriteFile for CarelessFile {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
            self.0.write(bytes)
        }
        fn sync(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let disk = disk_with(&state(1, 6), 2, CHUNK_BYTES);
    save(&Careless(disk.clone()), 200, &state(2, 6), 2, CHUNK_BYTES).unwrap();
    let after = disk.after_power_failure(&mut fates(0, 0));
    let found = newest_valid(&after.shared(), Path::new(ROOT)).unwrap();
    assert_eq!((found.checkpoint.unwrap().header().step, found.skipped.len()), (100, 1));
}
