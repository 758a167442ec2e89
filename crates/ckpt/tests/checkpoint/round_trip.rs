use crate::*;
use kolo_ckpt::safetensors::SafetensorsFile;
use kolo_ckpt::transfer::open_files;
use kolo_ckpt::{Keep, RealDisk, Unfinished, list, newest_valid, prune};

#[test]
fn any_number_of_ranks_save_the_same_state() {
    let state = state(1, 40);
    for ranks in [1, 2, 3, 8] {
        let disk = disk_with(&state, ranks, 256);
        let checkpoint = newest_valid(&disk.shared(), Path::new(ROOT)).unwrap().checkpoint.unwrap();
        assert_eq!(load(&checkpoint), sorted(state.clone()), "{ranks} ranks");
        assert_eq!(*checkpoint.header(), header(100));
        for tensor in &state {
            let elements = tensor.shape.iter().product::<usize>();
            for (start, end) in [(0, 0), (0, elements / 2), (elements / 3, elements), (elements, elements)] {
                let size = tensor.dtype.bytes();
                let mut out = vec![0; (end - start) * size];
                checkpoint.read(&tensor.name, start..end, &mut out).unwrap();
                assert_eq!(out, tensor.bytes[start * size..end * size], "{} {start}..{end}", tensor.name);
            }
        }
        let index = disk.contents(&checkpoint.dir().join(kolo_ckpt::INDEX));
        assert_eq!(index.is_ok(), ranks > 1);
    }
}

#[test]
fn files_are_safetensors_with_whole_tensors_under_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let (state, disk) = (state(2, 40), RealDisk::shared());
    let staging = staging_dir(dir.path(), 7, 3);
    let shards: Vec<Summary> =
        (0..2).map(|rank| write_rank(disk.as_ref(), &staging, &state, (rank, 2), 64).unwrap()).collect();
    let path = commit(disk.as_ref(), dir.path(), &staging, &header(7), &shards).unwrap();
    assert_eq!(path, dir.path().join("step-00000007"));
    assert!(!staging.exists());
    let file = SafetensorsFile::open(disk.as_ref(), &path.join("weights-00001-of-00002.safetensors")).unwrap();
    let names: Vec<&str> = file.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["bn.count", "bn.running_mean@0", "h.0.bias@0", "h.0.weight@0", "none", "scalar", "half@0"]);
    let weight = file.tensor("h.0.weight@0").unwrap();
    assert_eq!((weight.shape.as_slice(), weight.type_name.as_str()), (&[140][..], "F32"));
    let mut bytes = vec![0; 140 * 4];
    file.read(weight, 0..140 * 4, &mut bytes).unwrap();
    assert_eq!(bytes, state[0].bytes[..140 * 4]);
    assert!(
        file.tensors.iter().all(|tensor| tensor.place.start.is_multiple_of(tensor.dtype().unwrap().bytes() as u64))
    );
    let index = std::fs::read(path.join(kolo_ckpt::INDEX)).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    let mut places = index["weight_map"].as_object().unwrap().iter();
    let second = |(name, file): (&String, &serde_json::Value)| {
        name.starts_with("half@") && *file == "weights-00002-of-00002.safetensors"
    };
    assert!(places.any(second), "{index}");
    let index_path = path.join(kolo_ckpt::INDEX);
    assert_eq!(open_files(disk.as_ref(), &index_path).unwrap().len(), 2);
    assert!(newest_valid(&disk, dir.path()).unwrap().checkpoint.is_some());
}

#[test]
fn an_index_must_be_that_of_its_files() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), RealDisk::shared());
    let staging = staging_dir(dir.path(), 7, 3);
    let state = state(2, 40);
    let shards: Vec<Summary> =
        (0..2).map(|rank| write_rank(disk.as_ref(), &staging, &state, (rank, 2), 64).unwrap()).collect();
    let path = commit(disk.as_ref(), dir.path(), &staging, &header(7), &shards).unwrap();
    let index = path.join(kolo_ckpt::INDEX);
    let text = std::fs::read_to_string(&index).unwrap();
    let refused = |changed: String| {
        assert_ne!(changed, text);
        std::fs::write(&index, changed).unwrap();
        open_files(disk.as_ref(), &index).unwrap_err().to_string()
    };
    let error = refused(text.replace("h.0.weight@0", "h.9.weight@0"));
    assert!(error.contains("says that `weights-00001-of-00002.safetensors` holds `h.9.weight@0`"), "{error}");
    let error = refused(text.replace("00001-of", "00003-of"));
    assert!(error.contains("weights-00003-of-00002.safetensors"), "{error}");
    let error = refused(text.replace("weights-00002", "../weights-00002"));
    assert!(error.contains("there is no file `../weights-00002-of-00002.safetensors` beside it"), "{error}");
    let error = refused("{\"weight_map\": {}}".into());
    assert!(error.contains("it names no tensor"), "{error}");
    // What it does not name is not taken from a file that holds it.
    std::fs::write(&index, r#"{"weight_map": {"none": "weights-00001-of-00002.safetensors"}}"#).unwrap();
    let files = open_files(disk.as_ref(), &index).unwrap();
    assert_eq!(files[0].tensors.iter().map(|tensor| tensor.name.as_str()).collect::<Vec<_>>(), ["none"]);
}

#[test]
fn what_is_no_whole_state_is_not_committed() {
    let (disk, state) = (SimulatedDisk::new(), state(3, 40));
    let staging = staging_dir(Path::new(ROOT), 1, 0);
    let write = |rank, ranks| write_rank(&disk, &staging, &state, (rank, ranks), 64).unwrap();
    let refused = |shards: &[Summary]| {
        let error = commit(&disk, Path::new(ROOT), &staging, &header(1), shards).unwrap_err();
        assert!(!disk.is_dir(&staging), "{error}");
        error.to_string()
    };
    assert!(refused(&[write(0, 2)]).contains("element 20 of `bn.running_mean` is missing"));
    assert!(refused(&[write(0, 2), write(1, 3)]).contains("rank 0 of 2 and rank 1 of 3"));
    assert!(refused(&[write(0, 1), write(0, 1)]).contains("different checkpoints"));
    let whole = write(0, 1);
    let mut copy = whole.clone();
    copy.rank = 1;
    copy.ranks = 1;
    assert!(refused(&[whole, copy]).contains("weights-00001-of-00001.safetensors` is listed twice"));
    let summary = write(0, 1);
    disk.set_contents(&staging.join(&summary.files[0].name), vec![0; 10]).unwrap();
    assert!(refused(&[summary]).contains("has 10 bytes, but"));
    assert!(refused(&[]).contains("no rank wrote anything"));
}

#[test]
fn a_later_save_of_the_same_step_is_newer_and_old_ones_are_pruned() {
    let disk = SimulatedDisk::new();
    let root = Path::new(ROOT);
    let names = || disk.list(root).unwrap().into_iter().map(|item| item.name).collect::<Vec<_>>();
    for (seed, step) in [(1, 100), (2, 200), (3, 200), (4, 300)] {
        save(&disk, step, &state(seed, 10), 2, 256).unwrap();
    }
    assert_eq!(names(), ["step-00000100", "step-00000200", "step-00000200.2", "step-00000300"]);
    for (step, attempt) in [(200, 0), (300, 0), (300, 1), (400, 0), (400, 1)] {
        write_rank(&disk, &staging_dir(root, step, attempt), &state(5, 10), (0, 2), 256).unwrap();
    }
    let weights = root.join("step-00000300/weights-00001-of-00002.safetensors");
    disk.flip(&weights, 600, 1).unwrap();
    let shared = disk.shared();
    let found = newest_valid(&shared, root).unwrap();
    assert_eq!(load(found.checkpoint.as_ref().unwrap()), sorted(state(3, 10)));
    assert!(found.skipped[0].1.contains("weights-00001-of-00002.safetensors: chunk 2"), "{}", found.skipped[0].1);
    let (best, unfinished) = (root.join("step-00000100"), Unfinished::Before { step: 300, attempt: 1 });
    let keep = Keep { newest: 1, best: Some(&best), unfinished, ..Keep::default() };
    prune(&shared, root, keep).unwrap();
    // The newest is damaged, so that the newest sound one stays.
    let kept = ["step-00000100", "step-00000200.2", "step-00000300"];
    let written = [".unfinished-00000300-0", ".unfinished-00000400-0", ".unfinished-00000400-1"];
    assert_eq!(names(), [written, kept].concat());
    save(&disk, 400, &state(6, 10), 2, 256).unwrap();
    prune(&shared, root, Keep { newest: 1, ..Keep::default() }).unwrap();
    assert_eq!(names(), ["step-00000400"]);
    assert_eq!(list(&shared, root).unwrap().len(), 1);
}

#[test]
fn a_renamed_checkpoint_does_not_pass_for_a_newer_one() {
    let disk = SimulatedDisk::new();
    let root = Path::new(ROOT);
    for (seed, step) in [(1, 100), (2, 200)] {
        save(&disk, step, &state(seed, 10), 1, 256).unwrap();
    }
    disk.rename(&root.join("step-00000100"), &root.join("step-00000900")).unwrap();
    let found = newest_valid(&disk.shared(), root).unwrap();
    assert_eq!(found.checkpoint.unwrap().header().step, 200);
    let why = "is named after step 900, but holds the state after step 100";
    assert!(found.skipped[0].1.contains(why), "{}", found.skipped[0].1);
    // By its own path it is read as what it is.
    assert_eq!(
        resolved(&disk.shared(), "runs/a/checkpoints/step-00000900").unwrap().checkpoint().unwrap().header().step,
        100
    );
}

/// A link to a checkpoint elsewhere is read like one, and what it leads to is never removed.
#[cfg(unix)]
#[test]
fn linked_checkpoints_are_read_and_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (root, elsewhere) = (dir.path().join("here"), dir.path().join("elsewhere"));
    let disk = RealDisk::shared();
    for (root, step) in [(&root, 100), (&root, 200), (&elsewhere, 300)] {
        let staging = staging_dir(root, step, 0);
        let shards = [write_rank(&RealDisk, &staging, &state(step, 10), (0, 1), 256).unwrap()];
        commit(&RealDisk, root, &staging, &header(step), &shards).unwrap();
    }
    std::os::unix::fs::symlink(elsewhere.join("step-00000300"), root.join("step-00000300")).unwrap();
    assert_eq!(newest_valid(&disk, &root).unwrap().checkpoint.unwrap().header().step, 300);
    assert_eq!(list(&disk, &root).unwrap().len(), 3);
    prune(&disk, &root, Keep { newest: 1, ..Keep::default() }).unwrap();
    let steps: Vec<u64> = list(&disk, &root).unwrap().iter().map(|listed| listed.name.step).collect();
    assert_eq!(steps, [200, 300]);
    assert_eq!(newest_valid(&disk, &elsewhere).unwrap().checkpoint.unwrap().header().step, 300);
    // What the link names may be away, as with a disk that is not mounted.
    std::fs::rename(&elsewhere, dir.path().join("away")).unwrap();
    let found = newest_valid(&disk, &root).unwrap();
    assert_eq!(found.checkpoint.unwrap().header().step, 200);
    assert!(found.skipped[0].0.ends_with("step-00000300"), "{:?}", found.skipped);
    assert_eq!(list(&disk, &root).unwrap().iter().filter(|listed| listed.checkpoint.is_err()).count(), 1);
    // A new one of its step goes beside it.
    let staging = staging_dir(&root, 300, 0);
    let shards = [write_rank(&RealDisk, &staging, &state(3, 10), (0, 1), 256).unwrap()];
    commit(&RealDisk, &root, &staging, &header(300), &shards).unwrap();
    assert_eq!(newest_valid(&disk, &root).unwrap().checkpoint.unwrap().header().step, 300);
}

/// Nobody writes into it, so opening it would wait for ever.
#[cfg(unix)]
#[test]
fn a_pipe_in_place_of_a_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let staging = staging_dir(dir.path(), 100, 0);
    let shards = [write_rank(&RealDisk, &staging, &state(1, 10), (0, 1), 256).unwrap()];
    let path = commit(&RealDisk, dir.path(), &staging, &header(100), &shards).unwrap();
    let file = path.join("weights-00001-of-00001.safetensors");
    std::fs::remove_file(&file).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&file).status().unwrap().success());
    let found = newest_valid(&RealDisk::shared(), dir.path()).unwrap();
    assert!(found.checkpoint.is_none() && found.skipped[0].1.contains("not a regular file"), "{:?}", found.skipped);
}

#[test]
fn a_path_may_be_a_run_a_checkpoint_or_a_file() {
    let disk = disk_with(&state(1, 10), 1, 256);
    let shared = disk.shared();
    for path in ["runs/a", ROOT, "runs/a/checkpoints/step-00000100"] {
        let source = resolved(&shared, path).unwrap();
        assert_eq!(source.checkpoint().unwrap().header().step, 100, "{path}");
        assert_eq!(source.tensors().len(), 9);
    }
    let file = resolved(&shared, "runs/a/checkpoints/step-00000100/weights-00001-of-00001.safetensors").unwrap();
    let mut bytes = vec![0; 8];
    file.read("h.0.bias", 1..3, &mut bytes).unwrap();
    assert_eq!(bytes, state(1, 10)[1].bytes[4..12]);
    assert!(resolved(&shared, "runs").unwrap_err().to_string().contains("it contains no checkpoint\n  hint: "));
    assert!(resolved(&shared, "elsewhere").unwrap_err().to_string().contains("elsewhere: cannot open"));
    disk.set_contents(&Path::new(ROOT).join("step-00000100/manifest.json"), vec![b'{'; 300]).unwrap();
    assert!(resolved(&shared, "runs/a").unwrap_err().to_string().contains("none of its 1 checkpoints is intact"));
}
