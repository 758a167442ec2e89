//! Weights that `transformers` and `torchvision` wrote: imported they answer as there, exported they are the same file.
//! `tests/imports/make.py` made them.

use super::*;
use kolo_ckpt::RealDisk;
use kolo_ckpt::safetensors::SafetensorsFile;
use kolo_exec::{Feed, Options, Session};
use std::collections::BTreeMap;
use std::path::PathBuf;

fn imports() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/imports")
}

fn numbers(text: &str) -> Vec<f64> {
    text.split_ascii_whitespace().map(|word| word.parse().unwrap()).collect()
}

fn write_job(dir: &Path, model: &str, source: &str) -> PathBuf {
    let path = dir.join("job.toml");
    let job =
        format!("[model]\n{model}\n[data]\nsource = \"synthetic:{source}\"\nbatch = 4\ngrains = 1\nsamples = 16\n");
    std::fs::write(&path, job).unwrap();
    path
}

const GPT: &str = "kind = \"gpt\"\nlayers = 2\nwidth = 16\nheads = 2\ncontext = 8\nvocab = 20";

fn args(job: &Path) -> ImportArgs<'_> {
    ImportArgs { model: job, set: &[], overwrite: false }
}

fn import_to(dir: &Path, file: &Path, job: &Path) -> Result<PathBuf, String> {
    let out = dir.join("imported");
    import(&Kinds::default(), &RealDisk::shared(), file, &out, &args(job))
        .map_err(|failure| failure.message().to_owned())?;
    Ok(out)
}

/// What the model of a job answers with the weights of a run.
fn answers(job: &Path, run: &Path, batch: usize, feed: impl Fn(&mut Feed<'_>) + Sync) -> Vec<f32> {
    let job = read_job(&Kinds::default(), job, &[]).unwrap();
    let graph = evaluation_graph(&*job.model, batch).unwrap();
    let mut store = Store::new(&graph, 99);
    let source = opened(&RealDisk::shared(), run).unwrap();
    for entry in store.entries().to_vec() {
        let mut bytes = vec![0; entry.ty.bytes()];
        source.read(&entry.tensor, 0..entry.ty.elements(), &mut bytes).unwrap();
        let values = bytes.chunks_exact(4).map(|word| f32::from_le_bytes(std::array::from_fn(|at| word[at])));
        store.values_mut(&entry.name).unwrap().iter_mut().zip(values).for_each(|(place, value)| *place = value);
    }
    assert_eq!(store.digest(), source.checkpoint().unwrap().header().weights);
    let mut session = Session::new(graph, &store, Options::single(1));
    session.run(&mut store, |_| {}, |_, inputs| feed(inputs)).unwrap();
    session.output("predictions").unwrap().to_vec()
}

fn assert_close(got: &[f32], wanted: &[f64], tolerance: f64) {
    assert_eq!(got.len(), wanted.len());
    let largest = wanted.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
    for (at, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        assert!((f64::from(*got) - wanted).abs() <= tolerance * largest, "answer {at} is {got}, theirs {wanted}");
    }
}

/// All tensors of a safetensors file.
fn contents(path: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let file = SafetensorsFile::open(&RealDisk, path).unwrap();
    let read = |tensor: &kolo_ckpt::safetensors::StoredTensor| {
        let mut bytes = vec![0; (tensor.place.end - tensor.place.start) as usize];
        file.read(tensor, 0..bytes.len() as u64, &mut bytes).unwrap();
        (tensor.name.clone(), (tensor.type_name.clone(), tensor.shape.clone(), bytes))
    };
    file.tensors.iter().map(read).collect()
}

/// A model that transformers wrote, imported and exported again, in these directories.
fn language_model_answers_the_same(name: &str, model: &str, dir: &Path) -> (PathBuf, PathBuf) {
    let (file, job) = (imports().join(name).join("model.safetensors"), write_job(dir, model, "tokens"));
    let run = import_to(dir, &file, &job).unwrap();
    let text = std::fs::read_to_string(imports().join(name).join("logits.txt")).unwrap();
    let numbers = numbers(&text);
    let (tokens, logits) = numbers[2..].split_at(16);
    let got = answers(&job, &run, 2, |feed| {
        feed.i32("x").unwrap().iter_mut().zip(tokens).for_each(|(place, token)| *place = *token as i32);
        feed.i32("y").unwrap().fill(0);
    });
    assert_close(&got, logits, 1e-6);

    let out = dir.join("model.safetensors");
    export(&RealDisk::shared(), &run, &out, (Some(ExportTarget::Hf), false)).unwrap();
    assert_eq!(contents(&out), contents(&file));
    let config =
        |path: PathBuf| -> serde_json::Value { serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap() };
    let (ours, theirs) = (config(dir.join("config.json")), config(imports().join(name).join("config.json")));
    // How many positions there are is not in the weights; older versions want the base of the positions outside.
    let is_free = |key: &str| ["max_position_embeddings", "rope_theta"].contains(&key);
    let checked = ours.as_object().unwrap().iter().filter(|(key, _)| !is_free(key));
    checked.for_each(|(key, value)| assert_eq!(*value, theirs[key], "{key}"));
    (job, run)
}

#[test]
fn untied_gpt2_and_llama_of_transformers_answer_the_same() {
    let untied = format!("{GPT}\ntied = false");
    let dir = tempfile::tempdir().unwrap();
    let (job, run) = language_model_answers_the_same("gpt2-untied", &untied, dir.path());
    let linear = dir.path().join("linear.safetensors");
    export(&RealDisk::shared(), &run, &linear, (Some(ExportTarget::Torch), false)).unwrap();
    assert_eq!(contents(&linear)["lm_head.weight"].1, [20, 16]);
    let second = tempfile::tempdir().unwrap();
    let back = import_to(second.path(), &linear, &job).unwrap();
    assert!(super::super::compare(&RealDisk::shared(), &run, &back).is_ok());
    // As a model whose head is its embedding it is refused, with what to do.
    let third = tempfile::tempdir().unwrap();
    let error = import_to(
        third.path(),
        &imports().join("gpt2-untied/model.safetensors"),
        &write_job(third.path(), GPT, "tokens"),
    );
    assert!(error.unwrap_err().contains("`tied = false` in `[model]`"));

    let llama =
        "kind = \"llama\"\nlayers = 2\nwidth = 16\nheads = 4\nkv_heads = 2\nhidden = 24\ncontext = 8\nvocab = 20";
    let dir = tempfile::tempdir().unwrap();
    language_model_answers_the_same("llama", llama, dir.path());
}

#[test]
fn gpt2_of_transformers_answers_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let (job, run) = language_model_answers_the_same("gpt2", GPT, dir.path());
    // With `nn.Linear`'s layout, there and back.
    let linear = dir.path().join("linear.safetensors");
    export(&RealDisk::shared(), &run, &linear, (Some(ExportTarget::Torch), false)).unwrap();
    assert_eq!(contents(&linear)["transformer.h.0.attn.c_attn.weight"].1, [48, 16]);
    let second = tempfile::tempdir().unwrap();
    let back = import_to(second.path(), &linear, &job).unwrap();
    assert!(super::super::compare(&RealDisk::shared(), &run, &back).is_ok());
}

#[test]
fn a_gpt2_that_kolo_has_not_is_refused() {
    let file = imports().join("gpt2/model.safetensors");
    let refused = |model: &str| {
        let dir = tempfile::tempdir().unwrap();
        let job = write_job(dir.path(), model, "tokens");
        import_to(dir.path(), &file, &job).unwrap_err()
    };
    let heads = refused(&GPT.replace("heads = 2", "heads = 4"));
    assert!(heads.contains("config.json: `n_head` is 2, but kolo's model has `model.heads = 4`\n  hint: "), "{heads}");
    let layers = refused(&GPT.replace("layers = 2", "layers = 3"));
    assert!(
        layers.contains("`transformer.h.2.") && layers.contains(" is missing, but the job's model needs it as `h.2."),
        "{layers}"
    );
    let fewer = refused(&GPT.replace("layers = 2", "layers = 1"));
    assert!(
        fewer.contains("tensor `transformer.h.1.") && fewer.contains("has no counterpart in the job's model"),
        "{fewer}"
    );
    let vocabulary = refused(&GPT.replace("vocab = 20", "vocab = 24"));
    assert!(vocabulary.contains("is [20, 16], but `wte.weight` of the job's model is [24, 16]"), "{vocabulary}");
}

/// The data of a tensor, as make.py says.
fn made(name: &str, shape: &[usize], last: &str) -> Vec<f32> {
    let hash =
        name.bytes().fold(0xCBF2_9CE4_8422_2325u64, |h, byte| (h ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3));
    let uniform = |index: u64| {
        let mut z = hash.wrapping_add((index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f64 / 16_777_216.0
    };
    let fan_in: usize = shape.iter().skip(1).product();
    let norm = name.ends_with(".weight")
        && (name.contains(".bn") || name.starts_with("bn") || name.contains(".downsample.1."));
    let scale = if name.contains(&format!(".{last}.weight")) { 0.2 } else { 1.0 };
    let value = |u: f64| match () {
        () if name == "x" => 2.0 * u - 1.0,
        () if shape.len() >= 2 => (2.0 * u - 1.0) * (6.0 / fan_in as f64).sqrt(),
        () if name.ends_with("running_var") => 0.5 + u,
        () if norm => (1.0 + 0.1 * (2.0 * u - 1.0)) * scale,
        () => 0.1 * (2.0 * u - 1.0),
    };
    (0..shape.iter().product::<usize>() as u64).map(|index| value(uniform(index)) as f32).collect()
}

/// The file that torchvision's model was saved to: its header as it was, and the data that follows from names.
fn torchvision_file(dir: &Path, kind: &str, last: &str) -> PathBuf {
    let header = std::fs::read(imports().join(format!("{kind}.header"))).unwrap();
    let entries: serde_json::Value = serde_json::from_slice(&header[8..]).unwrap();
    let mut tensors: Vec<(u64, &String, &serde_json::Value)> = entries
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| *name != "__metadata__")
        .map(|(name, entry)| (entry["data_offsets"][0].as_u64().unwrap(), name, entry))
        .collect();
    tensors.sort_by_key(|(offset, ..)| *offset);
    let mut bytes = header.clone();
    for (_, name, entry) in tensors {
        let shape: Vec<usize> = serde_json::from_value(entry["shape"].clone()).unwrap();
        match entry["dtype"].as_str().unwrap() {
            "I64" => bytes.extend(7i64.to_le_bytes()),
            _ => made(name, &shape, last).iter().for_each(|value| bytes.extend_from_slice(&value.to_le_bytes())),
        }
    }
    let path = dir.join(format!("{kind}.safetensors"));
    std::fs::write(&path, bytes).unwrap();
    path
}

fn resnet_answers_the_same(kind: &str, last: &str) {
    let dir = tempfile::tempdir().unwrap();
    let file = torchvision_file(dir.path(), kind, last);
    let model = format!("kind = \"{kind}\"\nimage = [3, 64, 64]\nclasses = 10");
    let job = write_job(dir.path(), &model, "images");
    let run = import_to(dir.path(), &file, &job).unwrap();
    let images = made("x", &[2, 3, 64, 64], last);
    let got = answers(&job, &run, 2, |feed| {
        feed.f32("x").unwrap().copy_from_slice(&images);
        feed.i32("y").unwrap().fill(0);
    });
    let text = std::fs::read_to_string(imports().join(format!("{kind}.txt"))).unwrap();
    assert_close(&got, &numbers(&text), 1e-5);

    let out = dir.path().join("exported.safetensors");
    export(&RealDisk::shared(), &run, &out, (Some(ExportTarget::Torch), false)).unwrap();
    let (mut theirs, ours) = (contents(&file), contents(&out));
    // Counters of batches start again.
    theirs
        .iter_mut()
        .filter(|(name, _)| name.ends_with("num_batches_tracked"))
        .for_each(|(_, (.., bytes))| bytes.fill(0));
    assert!(ours == theirs, "the file differs from what was imported");

    let small = write_job(dir.path(), &model.replace("64, 64", "32, 32"), "images");
    let error =
        import(&Kinds::default(), &RealDisk::shared(), &file, &dir.path().join("small"), &args(&small)).unwrap_err();
    let message = error.message();
    assert!(
        message.contains("`conv1.weight` is [64, 3, 7, 7], but `conv1.weight` of the job's model is [64, 3, 3, 3]"),
        "{message}"
    );
    assert!(message.contains("a different stem for images below 64 pixels"), "{message}");
}

#[test]
fn resnet18_of_torchvision_answers_the_same() {
    resnet_answers_the_same("resnet18", "bn2");
}

#[test]
fn resnet50_of_torchvision_answers_the_same() {
    resnet_answers_the_same("resnet50", "bn3");
}
