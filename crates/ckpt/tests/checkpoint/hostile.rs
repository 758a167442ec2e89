//! Manifests and safetensors files that somebody made up: refused, and no memory is taken for what they claim.

use crate::*;
use kolo_ckpt::safetensors::SafetensorsFile;
use kolo_ckpt::{MANIFEST, newest_valid};
use serde_json::{Value, json};

/// A manifest as docs/checkpoint.md says: any JSON object whose last member is the digest of what is before its digits.
fn signed(mut manifest: Value) -> Vec<u8> {
    manifest.as_object_mut().unwrap().remove("digest");
    let text = manifest.to_string();
    let body = format!("{},\n\"digest\": \"blake3:", &text[..text.len() - 1]);
    format!("{body}{}\"\n}}\n", blake3_of(body.as_bytes())).into_bytes()
}

fn blake3_of(bytes: &[u8]) -> String {
    kolo_ckpt::digest::Digest::of(bytes).to_string()
}

#[test]
fn a_manifest_that_makes_no_sense_is_refused() {
    let disk = disk_with(&state(1, 20), 1, 256);
    let dir = Path::new(ROOT).join("step-00000100");
    let path = dir.join(MANIFEST);
    let sound: Value = serde_json::from_slice(&disk.contents(&path).unwrap()).unwrap();
    let weight = sound["tensors"].as_array().unwrap().iter().position(|tensor| tensor["name"] == "h.0.weight").unwrap();
    let tensor = |key: &str| format!("/tensors/{weight}/{key}");
    let huge = json!(u64::MAX);
    let cases: Vec<(String, Value, &str)> = vec![
        ("/format".into(), json!("zip"), "its format is `zip`"),
        ("/format_version".into(), json!(3), "this build of kolo reads versions 1 and 2"),
        ("/chunk_bytes".into(), json!(1u64 << 40), "chunks of 1099511627776 bytes"),
        ("/chunk_bytes".into(), json!(0), "chunks of 0 bytes"),
        ("/files/0/name".into(), json!("../../../etc/passwd"), "is not a valid name for a checkpoint file"),
        ("/files/0/name".into(), json!("/etc/passwd"), "is not a valid name for a checkpoint file"),
        ("/files/0/name".into(), json!(".."), "is not a valid name for a checkpoint file"),
        ("/files/0/name".into(), json!("a\u{0}b"), "is not a valid name for a checkpoint file"),
        ("/files/0/name".into(), json!("manifest.json"), "is not a valid name for a checkpoint file"),
        ("/files/0/name".into(), sound["files"][1]["name"].clone(), "is listed twice"),
        ("/files/0/bytes".into(), huge.clone(), "bytes and"),
        ("/files/0/chunks".into(), json!([]), "bytes and 0 chunks"),
        ("/files/0/chunks/0".into(), json!("00"), "not a BLAKE3 digest"),
        (tensor("shape"), json!([1u64 << 40, 1u64 << 40]), "has the shape"),
        (tensor("shape"), json!([1u64 << 50]), "has the shape"),
        (tensor("shape"), json!([1, 1, 1, 1, 1, 1, 1, 1, 140]), "has the shape"),
        (tensor("shape"), json!([141]), "element 140 of `h.0.weight` is missing"),
        (tensor("shape"), json!([-1]), "is malformed"),
        (tensor("dtype"), json!("f99"), "`f99` is not an element type"),
        (tensor("role"), json!("king"), "is malformed"),
        (tensor("name"), json!(""), "is malformed"),
        (tensor("runs"), json!([]), "element 0 of `h.0.weight` is missing"),
        (tensor("runs/0/file"), json!(99), "is in file 99, which does not exist"),
        (tensor("runs/0/start"), json!(1), "140 elements at 1 lie outside of `h.0.weight`"),
        (tensor("runs/0/start"), huge.clone(), "lie outside of `h.0.weight`"),
        (tensor("runs/0/elements"), huge.clone(), "ends past the end"),
        (tensor("runs/0/offset"), huge.clone(), "ends past the end"),
        (tensor("runs/0/offset"), json!(0), "share bytes"),
        ("/tensors".into(), json!({}), "is malformed"),
        ("/header/step".into(), json!("x"), "is malformed"),
    ];
    for (place, value, wanted) in cases {
        let mut manifest = sound.clone();
        *manifest.pointer_mut(&place).unwrap_or_else(|| panic!("no {place}")) = value.clone();
        disk.set_contents(&path, signed(manifest)).unwrap();
        let error = Checkpoint::open(&disk.shared(), &dir).unwrap_err().to_string();
        assert!(error.contains(wanted) && error.contains("manifest.json: "), "{place} = {value}: {error}");
    }
    // The same text, signed again, is accepted: it is what was changed that is refused.
    disk.set_contents(&path, signed(sound.clone())).unwrap();
    assert!(newest_valid(&disk.shared(), Path::new(ROOT)).unwrap().checkpoint.is_some());
    // A file that the manifest makes longer than it is.
    let mut manifest = sound;
    manifest["files"][0]["bytes"] = json!(256 * 1000);
    manifest["files"][0]["chunks"] = json!(vec![blake3_of(b""); 1000]);
    disk.set_contents(&path, signed(manifest)).unwrap();
    let error = Checkpoint::open(&disk.shared(), &dir).unwrap_err().to_string();
    assert!(error.contains("but the manifest says 256000"), "{error}");
}

#[test]
fn no_manifest_makes_it_panic() {
    let disk = disk_with(&state(1, 20), 2, 256);
    let dir = Path::new(ROOT).join("step-00000100");
    let sound = disk.contents(&dir.join(MANIFEST)).unwrap();
    let body = sound.len() - 64 - 4;
    let stream = Stream::new(1, "hostile");
    let mut refused = 0;
    for round in 0..4000 {
        let mut bytes = sound[..body].to_vec();
        for change in 0..=stream.below(round, 0, 3) {
            let at = stream.below(round, 10 + change, (body - 20) as u64) as usize;
            match stream.below(round, 20 + change, 4) {
                0 => bytes[at] ^= 1 << stream.below(round, 30 + change, 8),
                1 => bytes[at] = b'0' + stream.below(round, 30 + change, 10) as u8,
                2 => _ = bytes.remove(at),
                _ => bytes.insert(at, b"0123456789,:{}[]\"\\- "[stream.below(round, 30 + change, 20) as usize]),
            }
        }
        if !bytes.ends_with(b"\"digest\": \"blake3:") {
            continue;
        }
        let digest = blake3_of(&bytes);
        bytes.extend_from_slice(format!("{digest}\"\n}}\n").as_bytes());
        disk.set_contents(&dir.join(MANIFEST), bytes).unwrap();
        match Checkpoint::open(&disk.shared(), &dir) {
            Ok(checkpoint) => _ = checkpoint.verify(&|_| ()),
            Err(error) => refused += usize::from(error.to_string().contains("\n  hint: ")),
        }
    }
    assert!(refused > 2000, "{refused} refused");
    for length in 0..sound.len().min(700) {
        disk.set_contents(&dir.join(MANIFEST), sound[..length].to_vec()).unwrap();
        assert!(Checkpoint::open(&disk.shared(), &dir).is_err());
    }
}

/// A safetensors file with this header and so many bytes of data.
fn safetensors(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![7; data]].concat()
}

#[test]
fn a_safetensors_file_that_makes_no_sense_is_refused() {
    let disk = SimulatedDisk::new();
    let path = Path::new("x.safetensors");
    disk.create(path).unwrap();
    let open = |bytes: Vec<u8>| {
        disk.set_contents(path, bytes).unwrap();
        SafetensorsFile::open(&disk, path).map_err(|error| error.to_string())
    };
    let one = |entry: &str| safetensors(&format!("{{\"a\":{entry}}}"), 16);
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        one(&format!("{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":{offsets}}}"))
    };
    let sound = open(entry("F32", "[2,2]", "[0,16]")).unwrap();
    assert_eq!((sound.tensors[0].shape.as_slice(), sound.tensors[0].elements()), (&[2, 2][..], 4));
    assert!(open(entry("F8_E4M3", "[16]", "[0,16]")).unwrap().tensors[0].dtype().is_none());
    let twice = "{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}";
    let cases = [
        (vec![], "0 bytes are too few for a safetensors file"),
        (vec![1; 7], "7 bytes are too few for a safetensors file"),
        (vec![255; 100], "a header of 18446744073709551615 bytes"),
        ([&200u64.to_le_bytes()[..], &[b' '; 100]].concat(), "a header of 200 bytes, but the whole file has 108"),
        (safetensors("{", 0), "header: "),
        (safetensors("[]", 0), "header: "),
        (safetensors(&"[".repeat(100_000), 0), "header: "),
        (safetensors("{\"__metadata__\": 3}", 0), "its metadata is not a table"),
        (one("3"), "`a` lacks a type, a shape or offsets"),
        (entry("F32", "[4]", "[0,20]"), "`a` has bytes 0 to 20 of 16"),
        (entry("F32", "[4]", "[16,0]"), "`a` has bytes 16 to 0 of 16"),
        (entry("F32", "[5]", "[0,16]"), "`a` is F32 of shape [5], and has 16 bytes"),
        (entry("F32", "[4294967296,4294967296]", "[0,16]"), "which is too large"),
        (entry("F32", "[1,1,1,1,1,1,1,1,4]", "[0,16]"), "which is too large"),
        (entry("F32", "[-4]", "[0,16]"), "`a` lacks a type, a shape or offsets"),
        (safetensors(&format!("{{\"a\":{twice},\"b\":{twice}}}"), 16), "`a` and `b` share bytes"),
        (safetensors(&format!("{{\"a\":{twice},\"a\":{twice}}}"), 16), "`a` appears twice"),
    ];
    for (bytes, wanted) in cases {
        let error = open(bytes).unwrap_err();
        assert!(error.starts_with("x.safetensors: ") && error.contains(wanted), "{wanted}: {error}");
    }
    let sound = entry("F32", "[4]", "[0,16]");
    for length in 0..sound.len() {
        assert!(open(sound[..length].to_vec()).is_err(), "cut at {length}");
    }
}
