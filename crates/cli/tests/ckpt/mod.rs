//! `kolo ckpt` from outside, on a run that was imported.

use crate::{run_in, stdout_of, tempdir};
use std::path::Path;

const JOB: &str = "[model]\nkind = \"gpt\"\nlayers = 2\nwidth = 16\nheads = 2\ncontext = 8\nvocab = 20\n\
                   [data]\nsource = \"synthetic:tokens\"\nbatch = 4\ngrains = 1\nsamples = 16\n";
const STEP: &str = "run/checkpoints/step-00000000";

fn import(dir: &Path, run: &str) -> String {
    let file = format!("{}/tests/imports/gpt2/model.safetensors", env!("CARGO_MANIFEST_DIR"));
    std::fs::write(dir.join("job.toml"), JOB).unwrap();
    stdout_of(dir, &["ckpt", "import", &file, run, "--model", "job.toml"])
}

#[test]
fn a_run_is_imported_listed_shown_and_verified() {
    let dir = tempdir();
    let imported = import(dir.path(), "run");
    assert!(
        imported.contains("step-00000000: 28 tensors of GPT2LMHeadModel of transformers, weights blake3:"),
        "{imported}"
    );
    let digest = imported.trim_end().rsplit(' ').next().unwrap();
    let listed = stdout_of(dir.path(), &["ckpt", "ls", "run"]);
    assert!(
        listed.lines().nth(1).is_some_and(|line| line.starts_with("step-00000000 ") && line.ends_with(digest)),
        "{listed}"
    );
    let shown = stdout_of(dir.path(), &["ckpt", "show", "run"]);
    for line in ["  step     0", "parameters: 28 tensors, 7.04 k elements, 27.5 KiB", "  model.heads = 2"] {
        assert!(shown.lines().any(|shown| shown == line), "no `{line}` in {shown}");
    }
    assert!(shown.lines().any(|line| line.split_whitespace().eq(["h.1.attn.c_attn.weight", "f32[16,48]"])), "{shown}");
    let verified = stdout_of(dir.path(), &["ckpt", "verify", "run"]);
    assert!(verified.ends_with("step-00000000: sound, 29.7 KiB in 1 file\n"), "{verified}");
    let again = run_in(dir.path(), &["ckpt", "import", "x.safetensors", "run", "--model", "job.toml"]);
    assert_eq!(
        String::from_utf8_lossy(&again.stderr),
        "error: run contains the files of another run: checkpoints, job.toml\n  hint: name another directory, or add --overwrite to replace that run's files\n"
    );
}

#[test]
fn what_is_damaged_or_differs_is_named() {
    let dir = tempdir();
    import(dir.path(), "run");
    stdout_of(dir.path(), &["ckpt", "export", "run", "before.safetensors"]);
    let same = stdout_of(dir.path(), &["ckpt", "diff", "run", "before.safetensors"]);
    assert!(same.ends_with("28 tensors are the same to the bit\n"), "{same}");

    let path = dir.path().join("before.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&2.5f32.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let differs = run_in(dir.path(), &["ckpt", "diff", "run", "before.safetensors"]);
    assert_eq!(differs.status.code(), Some(1));
    let text = String::from_utf8_lossy(&differs.stdout);
    assert!(
        text.contains("`wte.weight` first differs at [19, 15]: ") && text.contains(" and 2.5; 1 of 320 elements"),
        "{text}"
    );
    assert!(text.contains("1 of 28 tensors differ; by "), "{text}");

    let weights = dir.path().join(STEP).join("weights-00001-of-00001.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    let damaged = run_in(dir.path(), &["ckpt", "verify", "run"]);
    assert_eq!(damaged.status.code(), Some(1));
    let text = String::from_utf8_lossy(&damaged.stdout);
    assert!(text.starts_with(&format!("{STEP}/weights-00001-of-00001.safetensors: chunk 0 (bytes 0 to ")), "{text}");
    let error = String::from_utf8_lossy(&damaged.stderr);
    assert!(error.starts_with("error: damaged: 1 of 1 checkpoint\n  hint: "), "{error}");
    let shown = run_in(dir.path(), &["ckpt", "export", "run", "after.safetensors"]);
    let error = String::from_utf8_lossy(&shown.stderr);
    assert!(
        error.contains("none of its 1 checkpoints is intact") && error.contains("step-00000000: weights-"),
        "{error}"
    );
    assert!(!dir.path().join("after.safetensors").exists());
}

#[test]
fn an_export_replaces_nothing_unasked() {
    let dir = tempdir();
    import(dir.path(), "run");
    let export = |more: &[&str]| run_in(dir.path(), &[&["ckpt", "export", "run", "m.safetensors"], more].concat());
    let refused = |more: &[&str], text: &str| {
        let output = export(more);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(text) && said.contains("\n  hint: "), "{said}");
    };
    assert!(export(&["--to", "hf"]).status.success());
    let file = dir.path().join("m.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    refused(&[], "m.safetensors is there already");
    assert!(export(&["--overwrite"]).status.success());
    assert_ne!(std::fs::read(&file).unwrap(), bytes, "names of their own");
    // Sizes of another model beside it.
    std::fs::remove_file(&file).unwrap();
    let config = dir.path().join("config.json");
    let sizes = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, sizes.replace("\"n_layer\": 2", "\"n_layer\": 3")).unwrap();
    assert_ne!(std::fs::read_to_string(&config).unwrap(), sizes);
    refused(&["--to", "hf"], "config.json has the sizes of another model");
    assert!(!file.exists());
    assert!(export(&["--to", "hf", "--overwrite"]).status.success());
    assert_eq!(std::fs::read_to_string(&config).unwrap(), sizes);
    // A pipe is no file, and stays.
    std::fs::remove_file(&file).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&file).status().unwrap().success());
    refused(&["--overwrite"], "m.safetensors is no regular file");
    assert!(!file.is_file() && file.exists());
}

/// What the file beside weights of another library says counts wherever they are read, whatever their names.
#[test]
fn sizes_beside_weights_of_others_are_compared() {
    let dir = tempdir();
    let weights = format!("{}/tests/imports/llama/model.safetensors", env!("CARGO_MANIFEST_DIR"));
    let job = |model: &str| {
        let model = format!(
            "kind = \"llama\"\nlayers = 2\nwidth = 16\nheads = 4\nkv_heads = 2\nhidden = 24\ncontext = 8\nvocab = 20\n{model}"
        );
        format!(
            "[model]\n{model}\n[data]\nsource = \"synthetic:tokens\"\nsamples = 16\nbatch = 4\ngrains = 1\n[train]\nsteps = 1\n"
        )
    };
    std::fs::write(dir.path().join("right.toml"), job("")).expect("a job");
    std::fs::write(dir.path().join("wrong.toml"), job("norm_eps = 1e-6")).expect("a job");
    let generate = |job: &'static str| {
        let words =
            ["generate", &weights, "--job", job, "--prompt-tokens", "1,2,3", "--tokens", "4", "--temperature", "0"];
        run_in(dir.path(), &words)
    };
    let said =
        |output: std::process::Output| (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned());
    let right = said(generate("right.toml"));
    assert_eq!(right.0, Some(0), "{}", right.1);
    for (code, error) in [
        said(generate("wrong.toml")),
        said(run_in(dir.path(), &["eval", &weights, "--job", "wrong.toml"])),
        said(run_in(dir.path(), &["ckpt", "import", &weights, "out", "--model", "wrong.toml"])),
    ] {
        let wanted = "config.json: `rms_norm_eps` is 0.00001, but kolo's model has `model.norm_eps = 1e-6`";
        assert!(code == Some(1) && error.contains(wanted), "{code:?} {error}");
    }
    // A run may start from them and go another way: it is told.
    let from = format!("norm_eps = 1e-6\nfrom = \"{weights}\"");
    std::fs::write(dir.path().join("from.toml"), job(&from)).expect("a job");
    let (code, error) = said(run_in(dir.path(), &["train", "from.toml", "--no-out"]));
    assert!(code == Some(0) && error.contains("note: ") && error.contains("`rms_norm_eps` is 0.00001"), "{error}");
    // The model is known without the data of its job.
    let gone = job("").replace("synthetic:tokens", "gone.bin");
    std::fs::write(dir.path().join("gone.toml"), gone).expect("a job");
    let gone = said(generate("gone.toml"));
    assert_eq!(gone.0, Some(0), "{}", gone.1);
}

/// Two files and their index, as transformers saves a large model, with these names in the first of them.
fn in_two_files(whole: &Path, folder: &Path) {
    let bytes = std::fs::read(whole).unwrap();
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&bytes[8..8 + header_bytes]).unwrap();
    let data = &bytes[8 + header_bytes..];
    let mut files = [(serde_json::Map::new(), Vec::new()), (serde_json::Map::new(), Vec::new())];
    let mut places = serde_json::Map::new();
    for (at, (name, entry)) in header.iter().filter(|(name, _)| *name != "__metadata__").enumerate() {
        let (entries, part) = &mut files[at % 2];
        let [start, end] = [0, 1].map(|side| entry["data_offsets"][side].as_u64().unwrap() as usize);
        let begin = part.len();
        part.extend_from_slice(&data[start..end]);
        let mut entry = entry.clone();
        entry["data_offsets"] = serde_json::json!([begin, part.len()]);
        entries.insert(name.clone(), entry);
        places.insert(name.clone(), format!("model-0000{}-of-00002.safetensors", at % 2 + 1).into());
    }
    std::fs::create_dir(folder).unwrap();
    for (number, (entries, part)) in files.iter().enumerate() {
        let header = serde_json::to_vec(entries).unwrap();
        let file = [&(header.len() as u64).to_le_bytes()[..], &header, part].concat();
        std::fs::write(folder.join(format!("model-0000{}-of-00002.safetensors", number + 1)), file).unwrap();
    }
    let index = serde_json::json!({ "metadata": {}, "weight_map": places });
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Wherever weights are read, several files with an index are as good as one.
#[test]
fn several_files_are_read_as_one() {
    let dir = tempdir();
    import(dir.path(), "run");
    let whole = format!("{}/tests/imports/gpt2/model.safetensors", env!("CARGO_MANIFEST_DIR"));
    in_two_files(Path::new(&whole), &dir.path().join("sharded"));
    std::fs::copy(Path::new(&whole).with_file_name("config.json"), dir.path().join("sharded/config.json")).unwrap();
    let index = "sharded/model.safetensors.index.json";
    let with = |command: &str, path: &str, more: &[&str]| {
        stdout_of(dir.path(), &[&[command, path, "--job", "job.toml"], more].concat())
    };
    let words = ["--prompt-tokens", "1,2,3", "--tokens", "4", "--temperature", "0"];
    for path in ["sharded", index] {
        assert_eq!(with("generate", path, &words), with("generate", &whole, &words), "{path}");
        assert_eq!(with("predict", path, &[]), with("predict", &whole, &[]), "{path}");
        let metrics = |text: String| text.lines().filter(|line| line.starts_with("  ")).collect::<Vec<_>>().join("\n");
        assert_eq!(metrics(with("eval", path, &[])), metrics(with("eval", &whole, &[])), "{path}");
        let same = stdout_of(dir.path(), &["ckpt", "diff", path, &whole]);
        assert!(same.ends_with(" tensors are the same to the bit\n"), "{same}");
    }
    stdout_of(dir.path(), &["ckpt", "import", "sharded", "again", "--model", "job.toml"]);
    assert!(stdout_of(dir.path(), &["ckpt", "diff", "run", "again"]).ends_with("28 tensors are the same to the bit\n"));
    let without = run_in(dir.path(), &["generate", "sharded"]);
    let said = String::from_utf8_lossy(&without.stderr);
    assert!(without.status.code() == Some(2) && said.contains("\n  hint: name the job file with --job"), "{said}");
}

/// A model without a token that begins a text cannot begin one.
#[test]
fn an_empty_prompt_begins_a_text_or_is_refused() {
    let dir = tempdir();
    std::fs::write(dir.path().join("empty.txt"), "").unwrap();
    let train = ["train", &crate::example("addition"), "--set", "train.steps=1", "--out", "run", "--quiet"];
    stdout_of(dir.path(), &train);
    for words in [&[][..], &["--prompt", ""], &["--prompt-file", "empty.txt"]] {
        let output = run_in(dir.path(), &[&["generate", "run"], words].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.starts_with("error: there is nothing to continue") && said.contains("\n  hint: "), "{said}");
    }
}
