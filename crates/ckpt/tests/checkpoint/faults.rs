//! The disk refuses, at every operation of a save.

use crate::*;
use kolo_ckpt::disk::{Item, ReadFile, WriteFile};
use kolo_ckpt::simulated::Trouble;
use kolo_ckpt::{Disk, Keep, newest_valid, prune};
use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicUsize, Ordering};

const CHUNK_BYTES: u64 = 256;

/// Saves on a disk in trouble: it fails, and says which path; what was there before is there still, and nothing else is,
/// once the trouble is over and the unfinished is cleaned up. Then it can be saved.
fn check(disk: &SimulatedDisk, trouble: Trouble, old: &[Whole], new: &[Whole]) -> String {
    let disk = disk.copy();
    let root = Path::new(ROOT);
    disk.set_trouble(trouble);
    let error = save(&disk, 200, new, 2, CHUNK_BYTES).unwrap_err().to_string();
    disk.set_trouble(Trouble::None);
    assert!(error.starts_with(ROOT) && error.contains("\n  hint: "), "{trouble:?}: {error}");
    let found = newest_valid(&disk.shared(), root).unwrap();
    let newest = found.checkpoint.unwrap();
    // The very last operation is the sync after the rename: the new one is there, but may not outlive the power.
    match newest.header().step {
        100 => assert_eq!(load(&newest), old, "{trouble:?}"),
        _ => assert_eq!(load(&newest), sorted(new.to_vec()), "{trouble:?}"),
    }
    save(&disk, 200, new, 2, CHUNK_BYTES).unwrap();
    prune(&disk.shared(), root, Keep { newest: 1, ..Keep::default() }).unwrap();
    assert_eq!(disk.list(root).unwrap().len(), 1, "{trouble:?}");
    assert_eq!(load(&newest_valid(&disk.shared(), root).unwrap().checkpoint.unwrap()), sorted(new.to_vec()));
    error
}

#[test]
fn an_error_at_any_operation_loses_nothing() {
    let (old, new) = (state(1, 20), state(2, 20));
    let disk = disk_with(&old, 2, CHUNK_BYTES);
    let old = sorted(old);
    disk.set_trouble(Trouble::None);
    let counted = disk.copy();
    save(&counted, 200, &new, 2, CHUNK_BYTES).unwrap();
    for at in 0..counted.operations() {
        for kind in [ErrorKind::StorageFull, ErrorKind::PermissionDenied, ErrorKind::Other] {
            check(&disk, Trouble::Once { at, kind }, &old, &new);
        }
        check(&disk, Trouble::ReadOnly { from: at }, &old, &new);
    }
}

#[test]
fn a_full_disk_is_named_with_path_and_bytes() {
    let (old, new) = (state(1, 20), state(2, 20));
    let disk = disk_with(&old, 2, CHUNK_BYTES);
    let old = sorted(old);
    let used: u64 = {
        let dir = Path::new(ROOT).join("step-00000100");
        let size = |name: String| disk.contents(&dir.join(name)).unwrap().len() as u64;
        disk.list(&dir).unwrap().into_iter().map(|item| size(item.name)).sum()
    };
    for room in (0..used - 1).step_by(97) {
        let error = check(&disk, Trouble::Full { bytes: used + room }, &old, &new);
        assert!(error.contains(": cannot write ") && error.contains(" bytes"), "{error}");
        assert!(error.contains("free space on that file system"), "{error}");
    }
}

/// Ranks of two generations may clean up the same directory: neither finds fault with what the other was quicker to remove.
#[test]
fn several_may_clean_up_at_once() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..50 {
        let unfinished = dir.path().join(format!(".unfinished-{round:08}-1"));
        let old = (0..3).map(|at| dir.path().join(format!("step-{:08}", 3 * round + at)));
        let old: Vec<_> = old.chain([unfinished.clone()]).collect();
        for made in &old {
            std::fs::create_dir(made).unwrap();
            (0..20).for_each(|file| std::fs::write(made.join(format!("{file}")), [7]).unwrap());
        }
        let clean = || prune(&kolo_ckpt::RealDisk::shared(), dir.path(), Keep { newest: 1, ..Keep::default() });
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(clean)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        outcomes.into_iter().for_each(|outcome| drop(outcome.unwrap()));
        let left = old.iter().filter(|made| made.exists()).collect::<Vec<_>>();
        assert_eq!(left, [&old[2]], "round {round}");
    }
}

/// A disk on which somebody else does something before one of the operations.
#[derive(Debug)]
struct Interrupted {
    disk: SimulatedDisk,
    left: AtomicUsize,
}

impl Interrupted {
    /// Somebody cleans up what is unfinished: the first rank of the next run or generation.
    fn turn(&self) {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 0 {
            let all = Keep { newest: usize::MAX, ..Keep::default() };
            prune(&self.disk.shared(), Path::new(ROOT), all).unwrap();
        }
    }
}

impl Disk for Interrupted {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.turn();
        self.disk.create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn WriteFile>> {
        self.turn();
        self.disk.create(path)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn ReadFile>> {
        self.turn();
        self.disk.open(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Item>> {
        self.turn();
        self.disk.list(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.turn();
        self.disk.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.turn();
        self.disk.remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.turn();
        self.disk.remove_dir(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.turn();
        self.disk.sync_dir(path)
    }

    fn is_dir(&self, path: &Path) -> bool {
        self.disk.is_dir(path)
    }
}

/// While one commits, another removes what is unfinished, at every moment: either there is a whole new checkpoint then, or none.
/// And the other way round: one cleans up, and another commits meanwhile.
#[test]
fn a_commit_beside_a_clean_up_is_whole_or_fails() {
    let (old, new, root) = (state(1, 20), state(2, 20), Path::new(ROOT));
    let prepared = disk_with(&old, 2, CHUNK_BYTES);
    let staging = staging_dir(root, 200, 7);
    let shards: Vec<Summary> =
        (0..2).map(|rank| write_rank(&prepared, &staging, &new, (rank, 2), CHUNK_BYTES).unwrap()).collect();
    let (mut whole, mut failed) = (0, 0);
    for left in 0.. {
        let disk = Interrupted { disk: prepared.copy(), left: AtomicUsize::new(left) };
        let outcome = commit(&disk, root, &staging, &header(200), &shards);
        let found = newest_valid(&disk.disk.shared(), root).unwrap();
        assert!(found.skipped.is_empty(), "{left}: {:?}", found.skipped);
        let newest = found.checkpoint.unwrap();
        match outcome {
            Ok(_) => assert_eq!(load(&newest), sorted(new.clone()), "{left}"),
            Err(_) => assert_eq!(load(&newest), sorted(old.clone()), "{left}"),
        }
        match newest.header().step {
            200 => whole += 1,
            _ => failed += 1,
        }
        if disk.left.load(Ordering::SeqCst) < usize::MAX / 2 {
            break;
        }
    }
    assert!(whole > 1 && failed > 4, "{whole} whole, {failed} failed");
}
