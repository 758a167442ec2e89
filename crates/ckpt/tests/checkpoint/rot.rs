//! Every bit of a checkpoint of 64 KiB is flipped in turn.

use crate::*;
use kolo_ckpt::{DamageKind, INDEX, MANIFEST};

const CHUNK_BYTES: u64 = 4096;
const THREADS: usize = 4;

#[test]
fn every_flipped_bit_is_found_and_named() {
    let disk = disk_with(&state(1, 940), 2, CHUNK_BYTES);
    let dir = Path::new(ROOT).join("step-00000100");
    let names: Vec<String> = disk.list(&dir).unwrap().into_iter().map(|item| item.name).collect();
    assert_eq!(names.len(), 6, "{names:?}");
    let total: usize = names.iter().map(|name| disk.contents(&dir.join(name)).unwrap().len()).sum();
    assert!((64 << 10..72 << 10).contains(&total), "{total} bytes");
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (disk, dir, names) = (disk.copy(), &dir, &names);
            scope.spawn(move || flip_all(&disk, dir, names, thread));
        }
    });
}

/// Flips every bit of the bytes that are this thread's. Chunks are compared one by one, so that one bit of each can be
/// flipped at a time: exactly these chunks must be found.
fn flip_all(disk: &SimulatedDisk, dir: &Path, names: &[String], thread: usize) {
    let shared = disk.shared();
    let sound = Checkpoint::open(&shared, dir).unwrap();
    assert_eq!(sound.verify(&|_| ()), []);
    let bytes = disk.contents(&dir.join(MANIFEST)).unwrap().len();
    for (byte, bit) in bits(thread, bytes) {
        disk.flip(&dir.join(MANIFEST), byte, bit).unwrap();
        let error = Checkpoint::open(&shared, dir).unwrap_err();
        let named = matches!(&error, CkptError::Damaged { path, .. } if path.ends_with(MANIFEST));
        assert!(named, "byte {byte} bit {bit}: {error}");
        disk.flip(&dir.join(MANIFEST), byte, bit).unwrap();
    }
    let files = sound.files();
    assert_eq!(files.len() + 1, names.len());
    for (byte, bit) in bits(thread, CHUNK_BYTES as usize) {
        let flipped = |file: &kolo_ckpt::FileInfo| (byte..file.bytes as usize).step_by(CHUNK_BYTES as usize);
        let flips: Vec<(&str, usize)> =
            files.iter().flat_map(|file| flipped(file).map(|at| (file.name.as_str(), at))).collect();
        flips.iter().for_each(|(name, at)| disk.flip(&dir.join(name), *at, bit).unwrap());
        let damages = sound.verify(&|_| ());
        assert_eq!(damages.len(), flips.len(), "byte {byte} bit {bit}");
        damages.iter().zip(&flips).for_each(|(damage, (name, at))| check(&sound, damage, name, *at));
        flips.iter().for_each(|(name, at)| disk.flip(&dir.join(name), *at, bit).unwrap());
    }
}

/// The bits of this thread's share of so many bytes.
fn bits(thread: usize, bytes: usize) -> impl Iterator<Item = (usize, u32)> {
    (thread..bytes).step_by(THREADS).flat_map(|byte| (0..8).map(move |bit| (byte, bit)))
}

/// The damage names the file, the chunk, and the tensor that the byte is in.
fn check(sound: &Checkpoint, damage: &kolo_ckpt::Damage, name: &str, byte: usize) {
    let DamageKind::Chunk { chunk, bytes } = &damage.kind else { panic!("{damage}") };
    assert!(damage.file == name && bytes.contains(&(byte as u64)) && *chunk == byte / CHUNK_BYTES as usize, "{damage}");
    let file = sound.files().iter().position(|file| file.name == name).unwrap();
    for tensor in sound.tensors() {
        let size = tensor.dtype.bytes() as u64;
        for run in tensor.runs.iter().filter(|run| run.file == file) {
            if let Some(at) = (byte as u64).checked_sub(run.offset).filter(|at| *at < run.elements as u64 * size) {
                let local = (at / size) as usize;
                let element = run.region().skip(local).first();
                let named =
                    |(name, range): &(String, std::ops::Range<usize>)| *name == tensor.name && range.contains(&element);
                assert!(
                    damage.tensors.iter().any(named),
                    "{damage} does not name element {element} of {}",
                    tensor.name
                );
            }
        }
    }
}

/// Reading a damaged chunk fails and says what is in it, and other chunks can be read.
#[test]
fn what_is_damaged_is_not_given() {
    let disk = disk_with(&state(1, 830), 1, CHUNK_BYTES);
    let dir = Path::new(ROOT).join("step-00000100");
    let checkpoint = Checkpoint::open(&disk.shared(), &dir).unwrap();
    let weight = checkpoint.tensor("h.0.weight").unwrap();
    let (file, offset) = (&checkpoint.files()[weight.runs[0].file], weight.runs[0].offset);
    disk.flip(&dir.join(&file.name), offset as usize + 4 * 3000, 7).unwrap();
    let error = checkpoint.read_all(weight).unwrap_err().to_string();
    assert!(error.contains("weights-00001-of-00001.safetensors: chunk 4 (bytes 16384 to 20480)"), "{error}");
    assert!(error.contains(" of `h.0.weight`"), "{error}");
    checkpoint.read("h.0.weight", 0..100, &mut [0; 400]).unwrap();
    assert!(checkpoint.read_all(checkpoint.tensor("optim.h.0.weight.m").unwrap()).is_ok());
    disk.set_contents(&dir.join(&file.name), vec![0; 10]).unwrap();
    let damages = checkpoint.verify(&|_| ());
    assert_eq!(damages.len(), 1);
    assert!(damages[0].to_string().contains("has 10 bytes, but the manifest says"), "{}", damages[0]);
    disk.remove_file(&dir.join(&file.name)).unwrap();
    assert!(checkpoint.verify(&|_| ())[0].to_string().contains("cannot open"));
    assert!(disk.contents(&dir.join(INDEX)).is_err());
}
