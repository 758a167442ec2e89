//! The disk refuses, at every operation of a save.

use crate::*;
use kolo_ckpt::simulated::Trouble;
use kolo_ckpt::{Keep, newest_valid, prune};
use std::io::ErrorKind;

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
        std::fs::create_dir(&unfinished).unwrap();
        (0..20).for_each(|file| std::fs::write(unfinished.join(format!("{file}")), [7]).unwrap());
        let clean = || prune(&kolo_ckpt::RealDisk::shared(), dir.path(), Keep { newest: 1, ..Keep::default() });
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(clean)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        outcomes.into_iter().for_each(|outcome| drop(outcome.unwrap()));
        assert!(!unfinished.exists(), "round {round}");
    }
}
