//! Using what was trained, and looking at data.

use super::{json_at, run_in, stdout_of, tempdir};
use kolo_data::{Column, Source};
use std::fmt::Write;
use std::path::Path;

const DIGITS: &str = "[job]\nname = \"digits\"\n[model]\nkind = \"mlp\"\nhidden = [16]\n[data]\nsource = \"builtin:digits\"\n\
                      batch = 64\ngrains = 2\n[train]\nsteps = 40\n";

const ADDITION: &str = "[job]\nname = \"sums\"\n[model]\nkind = \"gpt\"\nlayers = 1\nwidth = 16\nheads = 2\n[data]\n\
                        source = \"builtin:addition\"\nbatch = 16\ngrains = 1\n[train]\nsteps = 3\n";

const TABLE: &str = "[job]\nname = \"table\"\n[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nsource = \"table.csv\"\n\
                     target = \"kind\"\nbatch = 16\ngrains = 1\ntransforms = [{ kind = \"standardise\" }]\n[train]\nepochs = 30\n\
                     optimizer = { kind = \"adamw\", lr = 0.02 }\n";

/// Trains a job into `run`; the report.
fn trained(dir: &Path, job: &str) -> serde_json::Value {
    std::fs::write(dir.join("job.toml"), job).expect("a job file");
    stdout_of(dir, &["train", "job.toml", "--out", "run", "--quiet"]);
    json_at(&dir.join("run/report.json"))
}

/// Points on two sides of a line, with a column of text.
fn table(dir: &Path, name: &str, with_target: bool) {
    let mut text = String::from(if with_target { "a,b,kind\n" } else { "b,a\n" });
    for row in 0..120 {
        let (a, b) = ((row * 37 % 101) as f32 / 10.0, (row * 53 % 97) as f32 / 10.0);
        let kind = if a > b { "below" } else { "above" };
        match with_target {
            true => writeln!(text, "{a},{b},{kind}"),
            false => writeln!(text, "{b},{a}"),
        }
        .expect("text");
    }
    std::fs::write(dir.join(name), text).expect("a table");
}

fn fails(dir: &Path, args: &[&str], text: &str) {
    let output = run_in(dir, args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
    assert!(said.contains(text) && said.contains("\n  hint: "), "{args:?}: {said}");
}

#[test]
fn a_run_is_evaluated_as_it_was_trained_and_predicts() {
    let dir = tempdir();
    let report = trained(dir.path(), DIGITS);
    let said = stdout_of(dir.path(), &["eval", "run", "--report", "eval.json"]);
    assert!(said.contains("accuracy") && said.contains("held-out"), "{said}");
    let eval = json_at(&dir.path().join("eval.json"));
    assert_eq!(eval["weights"], report["weights"]);
    assert_eq!(eval["loss"], report["metrics"]["eval_loss"]);
    assert_eq!(eval["metrics"]["accuracy"], report["metrics"]["accuracy"]);
    let lines = stdout_of(dir.path(), &["predict", "run"]);
    let rows: Vec<&str> = lines.lines().collect();
    assert_eq!(
        (rows[0], rows.len() as u64 - 1),
        ("record,class,probability,true", eval["samples"].as_u64().expect("a count"))
    );
    // What is true stands beside what the model says, and the evaluation counts the same.
    let right = rows[1..].iter().map(|row| row.split(',').collect::<Vec<_>>()).filter(|row| row[1] == row[3]).count();
    let accuracy = eval["metrics"]["accuracy"].as_f64().expect("an accuracy");
    assert!((right as f64 / (rows.len() - 1) as f64 - accuracy).abs() < 1e-6, "{right} of {}: {accuracy}", rows.len());
    stdout_of(dir.path(), &["predict", "run", "--out", "all.jsonl", "--probabilities", "--quiet"]);
    let text = std::fs::read_to_string(dir.path().join("all.jsonl")).expect("predictions");
    for (row, line) in rows[1..].iter().zip(text.lines()) {
        let value: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let sum: f64 = (0..10).map(|class| value[format!("p.{class}")].as_f64().expect("a probability")).sum();
        assert!((sum - 1.0).abs() < 1e-5, "{line}");
        let cells = ["record", "class", "probability", "true"].map(|name| value[name].to_string());
        assert_eq!(*row, cells.join(","));
    }
    predicts_files_without_having_seen_any(dir.path(), &rows[1..]);
    fails(dir.path(), &["generate", "run", "--prompt", "a"], "the model does not generate text");
    fails(dir.path(), &["eval", "run", "--test"], "the job has no test files");
    fails(dir.path(), &["eval", "nowhere"], "nowhere");
}

/// The digits as a table of 64 numbers and the digit, whose column may stay: what the model says of its held-out samples, it
/// says of them there.
/// A source whose tokens are characters says which.
#[test]
fn a_model_of_sums_takes_sums_as_text() {
    let dir = tempdir();
    trained(dir.path(), ADDITION);
    let args = ["generate", "run", "--tokens", "3", "--temperature", "0", "--quiet"];
    let text = stdout_of(dir.path(), &[&args[..], &["--prompt", "07+35="]].concat());
    let tokens = stdout_of(dir.path(), &[&args[..], &["--prompt-tokens", "0,7,10,3,5,11"]].concat());
    let named = |token: &str| "0123456789+=".chars().nth(token.parse().expect("a number"));
    assert_eq!(text.trim(), tokens.split_whitespace().filter_map(named).collect::<String>());
    fails(dir.path(), &[&args[..], &["--prompt", "7 plus 35"]].concat(), "character 2 of the text, ' ', is no token");
}

#[test]
fn models_are_used_on_other_devices() {
    let (dir, run) =
        (tempdir(), |dir: &Path, args: &[&str], device: &str| stdout_of(dir, &[args, &["--device", device]].concat()));
    trained(dir.path(), DIGITS);
    let losses = ["cpu", "reference"].map(|device| {
        run(dir.path(), &["eval", "run", "--report", "eval.json"], device);
        json_at(&dir.path().join("eval.json"))["loss"].as_f64().expect("a loss")
    });
    assert!((losses[0] - losses[1]).abs() < 1e-5, "{losses:?}");
    let predicted = ["cpu", "reference"].map(|device| run(dir.path(), &["predict", "run"], device));
    let row = |line: &str| {
        let cells: Vec<&str> = line.split(',').collect();
        let [record, class, probability, truth] = cells[..] else { panic!("four columns: {line}") };
        (format!("{record} {class} {truth}"), probability.parse::<f64>().unwrap_or_default())
    };
    let [ours, exact]: [Vec<_>; 2] = predicted.map(|lines| lines.lines().map(row).collect());
    assert_eq!(ours.len(), exact.len());
    let differ = ours.iter().zip(&exact).find(|(a, b)| a.0 != b.0 || (a.1 - b.1).abs() > 1e-5);
    assert!(differ.is_none(), "{differ:?}");
    let other = tempdir();
    trained(other.path(), ADDITION);
    let text = |device: &str| {
        run(other.path(), &["generate", "run", "--prompt", "12+34=", "--tokens", "5", "--temperature", "0"], device)
    };
    assert_eq!(text("cpu"), text("reference"));
    for command in ["eval", "predict", "generate"] {
        let output = run_in(dir.path(), &[command, "run", "--device", "gpu"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains("write auto, cpu, cuda"), "{command}: {said}");
    }
}

fn predicts_files_without_having_seen_any(dir: &Path, held_out: &[&str]) {
    let digits = kolo_data::sources::digits::Digits::new();
    let mut text = (0..64).map(|at| format!("p{at},")).collect::<String>() + "label\n";
    for sample in 0..digits.len() {
        let (mut pixels, mut label) = ([0.0; 64], [0]);
        digits.fill(sample, 0, Column::F32(&mut pixels)).expect("pixels");
        digits.fill(sample, 1, Column::I32(&mut label)).expect("a digit");
        text += &(pixels.iter().map(|pixel| format!("{pixel},")).collect::<String>() + &format!("{}\n", label[0]));
    }
    std::fs::write(dir.join("digits.csv"), text).expect("a table");
    let lines = stdout_of(dir, &["predict", "run", "digits.csv"]);
    // Held-out samples have the numbers that they have among all.
    let all: std::collections::BTreeSet<&str> = lines.lines().collect();
    assert_eq!(lines.lines().count(), 1 + digits.len());
    // A run on built-in data does not know which column of a file would be true.
    let said = |row: &str| row.rsplit_once(',').map_or(String::new(), |(said, _)| said.to_string());
    let strange: Vec<&&str> = held_out.iter().filter(|row| !all.contains(&said(row)[..])).collect();
    assert!(strange.is_empty(), "{strange:?}");
    table(dir, "small.csv", true);
    fails(
        dir,
        &["predict", "run", "small.csv"],
        "has 2 numbers in a record, but 64 are expected: \"a\", \"b\", \"kind\"",
    );
}

#[test]
fn a_language_model_continues_the_same_way_every_time() {
    let dir = tempdir();
    trained(dir.path(), ADDITION);
    let words = ["generate", "run", "--prompt-tokens", "1,2,3", "--tokens", "12", "--seed", "4", "--top-k", "5"];
    let first = stdout_of(dir.path(), &words);
    assert_eq!(first.split_whitespace().count(), 12, "{first}");
    assert_eq!(stdout_of(dir.path(), &[&words[..], &["--threads", "1"]].concat()), first);
    fails(dir.path(), &["generate", "run", "--prompt-tokens", "99999"], "the prompt has token 99999");
    fails(dir.path(), &["generate", "run", "--prompt-tokens", "1", "--top-p", "2"], "top-p is 2");
}

#[test]
fn a_table_is_trained_on_and_new_rows_need_no_target() {
    let dir = tempdir();
    table(dir.path(), "table.csv", true);
    trained(dir.path(), TABLE);
    table(dir.path(), "new.csv", false);
    // The rows of the training are not needed any more.
    std::fs::rename(dir.path().join("table.csv"), dir.path().join("gone.csv")).expect("a rename");
    let lines = stdout_of(dir.path(), &["predict", "run", "new.csv"]);
    let rows: Vec<&str> = lines.lines().collect();
    assert_eq!((rows[0], rows.len()), ("record,class,probability", 121));
    let right = (0..120).filter(|row| {
        let (a, b) = (row * 37 % 101, row * 53 % 97);
        rows[row + 1].split(',').nth(1) == Some(if a > b { "below" } else { "above" })
    });
    assert!(right.count() > 100, "{lines}");
    let both = stdout_of(dir.path(), &["predict", "run", "new.csv", "gone.csv", "--set", "data.threads=1"]);
    assert_eq!(both.lines().count(), 241);
    assert!(both.starts_with("input,record,class,probability,true\nnew.csv,0,"), "{both}");
    let known: Vec<&str> = both.lines().skip(1).map(|line| line.rsplit(',').next().unwrap_or_default()).collect();
    assert!(known[..120].iter().all(|truth| truth.is_empty()), "new rows have no target: {both}");
    assert!(known[120..].iter().all(|truth| ["above", "below"].contains(truth)), "{both}");
    // A target that is still unknown is no error.
    std::fs::write(dir.path().join("half.csv"), "a,b,kind\n0.5,0.1,below\n0.2,0.9,\n0.3,0.8,sideways\n")
        .expect("a table");
    let half = stdout_of(dir.path(), &["predict", "run", "half.csv"]);
    let known: Vec<&str> = half.lines().skip(1).map(|line| line.rsplit(',').next().unwrap_or_default()).collect();
    assert_eq!(known, ["below", "", ""], "{half}");
    let eval = |file: &str| stdout_of(dir.path(), &["eval", "run", "--data", file]);
    let said = eval("gone.csv");
    assert!(said.starts_with("120 samples, gone.csv\n"), "{said}");
    let output = run_in(dir.path(), &["eval", "run", "--data", "new.csv"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("it has no column \"kind\", the target: nothing to compare with"), "{error}");
    std::fs::rename(dir.path().join("gone.csv"), dir.path().join("table.csv")).expect("a rename");
    assert_eq!(eval("table.csv"), said.replace("gone.csv", "table.csv"));
}

/// What a file calls by numbers, a job may call by names.
#[test]
fn numbers_are_classes_with_names() {
    let dir = tempdir();
    let row = |at: usize| format!("{},{}\n", (at * 37 % 101) as f32 / 50.0 - 1.0, usize::from(at * 37 % 101 > 50));
    let text = format!("a,side\n{}", (0..101).map(row).collect::<String>());
    std::fs::write(dir.path().join("table.csv"), text).expect("a table");
    let job = TABLE.replace("target = \"kind\"", "target = \"side\"\nclasses = [\"left\", \"right\"]");
    trained(dir.path(), &job);
    let lines = stdout_of(dir.path(), &["predict", "run", "table.csv", "--probabilities"]);
    assert!(lines.starts_with("record,class,probability,p.left,p.right,true\n"), "{lines}");
    let classes: Vec<&str> = lines.lines().skip(1).filter_map(|line| line.split(',').nth(1)).collect();
    let right =
        classes.iter().enumerate().filter(|(at, class)| **class == ["left", "right"][usize::from(at * 37 % 101 > 50)]);
    assert!(right.count() > 90, "{lines}");
    std::fs::write(dir.path().join("other.csv"), "a,side\n0.5,7\n").expect("a table");
    let output = run_in(dir.path(), &["eval", "run", "--data", "other.csv"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("the target is 7, but there are 2 classes"), "{said}");
}

#[test]
fn data_are_inspected_and_converted() {
    let dir = tempdir();
    table(dir.path(), "table.csv", true);
    let said = stdout_of(dir.path(), &["data", "inspect", "table.csv", "--show", "1"]);
    for text in ["csv: 1 file", "120 records", "3 columns", "2 values: \"above\" (", "record 0\n", "0 to 10"] {
        assert!(said.contains(text), "`{text}` in\n{said}");
    }
    stdout_of(dir.path(), &["data", "convert", "table.csv", "table.jsonl"]);
    stdout_of(dir.path(), &["data", "convert", "table.jsonl", "back.csv", "--columns", "a,b,kind"]);
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).expect("a file");
    let numbers = |text: String| -> Vec<Vec<String>> {
        let cell = |cell: &str| cell.parse::<f32>().map_or(cell.to_string(), |number| number.to_string());
        text.lines().map(|line| line.split(',').map(cell).collect()).collect()
    };
    assert_eq!(numbers(read("back.csv")), numbers(read("table.csv")));
    fails(dir.path(), &["data", "convert", "table.csv", "back.csv"], "back.csv already exists");
    fails(dir.path(), &["data", "convert", "table.csv", "a.npz"], "`kind` holds no numbers");
    fails(dir.path(), &["data", "convert", "table.csv", "a.xyz"], "the file ending does not name a format");
    fails(dir.path(), &["data", "inspect", "table.csv", "--sheet", "a.png"], "no column holds images");
    let left: Vec<_> =
        std::fs::read_dir(dir.path()).expect("files").filter_map(|entry| Some(entry.ok()?.file_name())).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains(".part-")), "{left:?}");
    stdout_of(dir.path(), &["data", "convert", "table.csv", "numbers.npz", "--columns", "a,b"]);
    assert!(stdout_of(dir.path(), &["data", "inspect", "numbers.npz"]).contains("npz: 1 file"));
}

/// Names in files may hold anything, and be of any length.
/// A table as pandas writes it, with the index of a shuffled DataFrame.
#[test]
fn an_index_is_left_out_of_training_predictions_and_new_files() {
    let dir = tempdir();
    let rows: String = (0..40).map(|at| format!("{},{at},{},{}\n", at * 7 % 40, at % 3, at * 2 + 1)).collect();
    std::fs::write(dir.path().join("houses.csv"), format!(",sqm,rooms,price\n{rows}")).expect("a file");
    let job = "[model]\nkind = \"mlp\"\nhidden = [4]\n[data]\nsource = \"houses.csv\"\ntask = \"regression\"\nbatch = 8\n\
               grains = 1\n[train]\nsteps = 2\noptimizer = { kind = \"sgd\", lr = 1e-6 }\n";
    std::fs::write(dir.path().join("job.toml"), job).expect("a file");
    let index = "left out: column0, the index of the table; `inputs` or `target` can name it";
    let shown = stdout_of(dir.path(), &["train", "job.toml", "--out", "run"]);
    let lines: Vec<&str> = shown.lines().take(4).collect();
    assert!(
        lines[0].starts_with("job: houses.csv 40 samples (csv, ") && lines[0].contains("; x [2] real, y [1] real"),
        "{shown}"
    );
    assert_eq!(lines[1], "  target price (the last column of numbers; `target` names another), inputs sqm, rooms");
    assert_eq!(lines[2], format!("  {index}"));
    assert!(lines[3].starts_with("2 steps, "), "{shown}");
    assert!(!stdout_of(dir.path(), &["train", "job.toml", "--no-out", "--quiet"]).contains("target"));
    assert!(stdout_of(dir.path(), &["data", "inspect", "houses.csv"]).contains(&format!("\nnote: {index}\n")));
    assert!(stdout_of(dir.path(), &["eval", "run"]).contains(&format!("  {index}\n")));
    let predicted = run_in(dir.path(), &["predict", "run", "houses.csv"]);
    assert!(String::from_utf8_lossy(&predicted.stderr).contains(&format!("note: {index}\n")), "{predicted:?}");
    assert_eq!(String::from_utf8_lossy(&predicted.stdout).lines().count(), 41);
    let converted = stdout_of(dir.path(), &["data", "convert", "houses.csv", "houses.jsonl"]);
    assert!(converted.contains(&format!("note: {index}\n")), "{converted}");
    let first = std::fs::read_to_string(dir.path().join("houses.jsonl"))
        .expect("a file")
        .lines()
        .next()
        .expect("a file")
        .to_string();
    assert!(first.contains("\"sqm\"") && !first.contains("column0"), "{first}");
}

#[test]
fn odd_names_are_shown_short_and_escaped() {
    let dir = tempdir();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("a file");
    write("odd.jsonl", &format!("{{\"{}\": 1, \"a\\u001b[2J\\nb\": \"\\u001b\"}}\n", "n".repeat(70_000)));
    let said = stdout_of(dir.path(), &["data", "inspect", "odd.jsonl"]);
    assert!(!said.contains('\u{1b}') && said.contains("a\\u{1b}[2J\\nb  "), "{said}");
    assert!(said.contains(&format!("{}…", "n".repeat(59))) && !said.contains(&"n".repeat(60)), "{said}");
    write("broken.jsonl", "{\"a\\u001b\": 1}\n{\"a\\u001b\": [1, 2]}\n");
    let said = stdout_of(dir.path(), &["data", "inspect", "broken.jsonl"]);
    assert!(!said.contains('\u{1b}') && said.contains("record 1 cannot be read: "), "{said}");
}

#[test]
fn a_sheet_does_not_replace_what_it_shows() {
    let dir = tempdir();
    let grey = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tests/files/packed/images/grey.png");
    std::fs::create_dir_all(dir.path().join("photos/new")).expect("a folder");
    std::fs::copy(grey, dir.path().join("photos/new/a.png")).expect("an image");
    let inspect = |from: &str, sheet: &str| run_in(dir.path(), &["data", "inspect", from, "--sheet", sheet]);
    for from in ["photos", "photos/new/a.png"] {
        let output = inspect(from, "photos/new/a.png");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains("photos/new/a.png is one of the inputs"), "{said}");
        assert!(inspect(from, "sheet.png").status.success());
    }
}

#[test]
fn what_would_be_lost_is_not_written() {
    let dir = tempdir();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("a file");
    write("gaps.jsonl", "{\"a\": 1}\n{\"a\": null}\n{\"a\": 3}\n");
    let convert = |words: &[&str], text: &str| fails(dir.path(), &[&["data", "convert"], words].concat(), text);
    convert(&["gaps.jsonl", "gaps.tar"], "gaps.jsonl, byte 9: record 1: all its values are missing");
    convert(&["gaps.jsonl", "gaps.csv", "--columns", "a,a"], "--columns: `a` is named twice");
    let twice = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tests/files/twice.parquet");
    convert(&[twice, "twice.jsonl"], "two columns are called `a`");
    convert(&[twice, "twice.jsonl", "--columns", "a"], "--columns: two columns are called `a`");
    write("infinite.csv", "a,b\n1.5,2\ninf,3\n");
    convert(
        &["infinite.csv", "infinite.jsonl"],
        "infinite.csv, byte 10: record 1: `a` has inf, which JSON cannot store",
    );
    let files = std::fs::read_dir(dir.path()).expect("files").count();
    assert_eq!(files, 2, "nothing is left of what was refused");
}

/// Tokens are read as they were written, whatever was said of an earlier file of that name.
#[test]
fn a_description_of_other_tokens_does_not_stay_beside_new_ones() {
    let dir = tempdir();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("a file");
    write("a.txt", "some text");
    stdout_of(dir.path(), &["data", "tokens", "apply", "--out", "a.bin", "a.txt"]);
    write("a.jsonl", "{\"t\": [1, 2, 3]}\n{\"t\": [4, 5, 65535]}\n");
    let words = ["data", "convert", "a.jsonl", "a.bin"];
    fails(dir.path(), &words, "a.bin already exists");
    std::fs::remove_file(dir.path().join("a.bin")).expect("a file");
    fails(dir.path(), &words, "a.bin.json already exists");
    stdout_of(dir.path(), &[&words[..], &["--overwrite"]].concat());
    assert!(!dir.path().join("a.bin.json").exists());
    let said = stdout_of(dir.path(), &["data", "inspect", "a.bin", "--set", "context=5"]);
    assert!(said.contains("[1, 2, 3, 4, 5]") && said.contains("65535"), "{said}");
}

#[test]
fn a_bench_of_data_says_what_feeds_what() {
    let dir = tempdir();
    table(dir.path(), "table.csv", true);
    std::fs::write(dir.path().join("job.toml"), TABLE).expect("a job file");
    let words = ["data", "bench", "job.toml", "--seconds", "0.05", "--report", "bench.json"];
    let said = stdout_of(dir.path(), &words);
    assert!(said.contains("samples/s") && said.contains("feed the model"), "{said}");
    let report = json_at(&dir.path().join("bench.json"));
    let stages: Vec<&str> =
        report["stages"].as_array().expect("stages").iter().filter_map(|stage| stage["stage"].as_str()).collect();
    assert_eq!(stages, ["read", "decode", "transform"]);
    assert!(report["samples_per_s"].as_f64().expect("a rate") > 0.0 && report["bottleneck"].is_string(), "{report}");
}

/// A cache in memory is part of what a job needs.
#[test]
fn plans_count_a_cache_in_memory() {
    let dir = tempdir();
    table(dir.path(), "table.csv", true);
    std::fs::write(dir.path().join("job.toml"), TABLE).expect("a job file");
    let planned = |cache: &[&str]| -> u64 {
        let words = ["plan", "job.toml", "--by-rates", "--json"];
        let said = stdout_of(dir.path(), &[&words[..], cache].concat());
        let plan: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        plan["memory"]["data"].as_u64().unwrap_or_else(|| panic!("{plan}"))
    };
    let without = planned(&[]);
    let whole = planned(&["--set", "data.cache=memory"]);
    assert!(whole >= without + 120 * 2 * 4, "{without} and {whole}");
    assert_eq!(planned(&["--set", "data.cache=memory", "--set", "data.cache_max=500"]), without + 500);
    assert_eq!(planned(&["--set", "data.cache=disk"]), without);
}

/// What comes through standard input is trained on like a file that is read as a stream, by one process.
#[test]
fn standard_input_is_a_stream() {
    let dir = tempdir();
    table(dir.path(), "table.csv", true);
    let job = TABLE
        .replace(
            "transforms = [{ kind = \"standardise\" }]",
            "classes = [\"above\", \"below\"]\nstream = true\nsamples = 120\nholdout = 0",
        )
        .replace("epochs = 30", "epochs = 1");
    let of_file = trained(dir.path(), &job);
    let piped = |args: &[&str]| {
        let table = std::fs::File::open(dir.path().join("table.csv")).expect("a table");
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kolo"));
        command.current_dir(dir.path()).args(["train", "job.toml", "--no-out", "--quiet", "--set", "data.source=-"]);
        command.args(args).stdin(table).output().expect("kolo runs")
    };
    let output = piped(&["--report", "piped.json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(json_at(&dir.path().join("piped.json"))["weights"], of_file["weights"]);
    let said = String::from_utf8_lossy(&piped(&["-n", "2"]).stderr).into_owned();
    assert!(said.contains("`data.source` is \"-\", a pipe, which only one process can read\n  hint: "), "{said}");
    stdout_of(
        dir.path(),
        &["train", "job.toml", "--no-out", "--quiet", "--set", "data.holdout=0.2", "--report", "held.json"],
    );
    let held_out = json_at(&dir.path().join("held.json"));
    assert_eq!(held_out["classification"]["classes"][1]["name"], "below");
}

/// The samples of a pipe are gone, and nobody waits for more of them.
#[test]
fn a_run_that_was_trained_from_a_pipe_is_evaluated_on_files() {
    let dir = tempdir();
    table(dir.path(), "table.csv", true);
    let of_pipe = "classes = [\"above\", \"below\"]\nsamples = 120";
    let job = TABLE
        .replace("transforms = [{ kind = \"standardise\" }]", of_pipe)
        .replace("epochs = 30", "epochs = 1")
        .replace("source = \"table.csv\"", "source = \"pipe\"");
    std::fs::write(dir.path().join("job.toml"), job).expect("a job file");
    let pipe = dir.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    let rows = std::fs::read(dir.path().join("table.csv")).expect("a table");
    let writer = std::thread::spawn(move || std::fs::write(pipe, rows));
    stdout_of(dir.path(), &["train", "job.toml", "--out", "run", "--quiet", "--set", "data.format=csv"]);
    writer.join().expect("a thread").expect("somebody reads");
    let said = stdout_of(dir.path(), &["eval", "run", "--data", "table.csv"]);
    assert!(said.starts_with("120 samples, table.csv\n"), "{said}");
    let of_key = stdout_of(dir.path(), &["eval", "run", "--set", "data.validation=table.csv"]);
    assert_eq!(of_key.lines().skip(1).collect::<Vec<_>>(), said.lines().skip(1).collect::<Vec<_>>());
    for (args, text) in [
        (&["eval", "run"][..], "the run was trained from a pipe, and its job names no `data.validation`"),
        (&["eval", "run", "--data", "pipe"], "--data: pipe is a pipe"),
        (&["predict", "run"], "`data.source` is \"pipe\", a pipe, whose samples are gone"),
        (&["predict", "run", "pipe"], "error: pipe: is a pipe, which only `kolo train` can read"),
        (&["data", "bench", "job.toml"], "`data.source` is \"pipe\", a pipe, whose samples come only once"),
        (&["data", "bench", "job.toml", "--seconds", "0"], "--seconds 0 is out of range"),
    ] {
        fails(dir.path(), args, text);
    }
}

/// A run that was trained to skip what it cannot read, with `bad.csv`, of whose records 1 and 3 cannot be read.
fn trained_to_skip(dir: &Path) {
    table(dir, "table.csv", true);
    trained(dir, &TABLE.replace("[train]", "on_error = \"skip\"\n[train]"));
    std::fs::write(dir.join("bad.csv"), "b,a\n1,2\noops\n3,1\n,5\n9,2\n").expect("a table");
}

#[test]
fn a_record_that_cannot_be_read_has_no_prediction() {
    let dir = tempdir();
    trained_to_skip(dir.path());
    std::fs::write(dir.path().join("good.csv"), "b,a\n1,2\n3,1\n9,2\n").expect("a table");
    let answers = |text: &str| -> Vec<(String, String)> {
        let rows = text.lines().skip(1).filter_map(|line| line.split_once(','));
        rows.map(|(record, answer)| (record.into(), answer.into())).collect()
    };
    let good = answers(&stdout_of(dir.path(), &["predict", "run", "good.csv"]));
    let output = run_in(dir.path(), &["predict", "run", "bad.csv"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{said}");
    let expected: Vec<(String, String)> =
        ["0", "2", "4"].iter().zip(&good).map(|(record, (_, answer))| (record.to_string(), answer.clone())).collect();
    assert_eq!(answers(&String::from_utf8_lossy(&output.stdout)), expected);
    assert!(said.contains("2 records could not be read and have no prediction; the first: "), "{said}");
    // With nothing to read there is nothing to say, and no other record to say it of.
    std::fs::write(dir.path().join("bad.csv"), "b,a\noops\n,5\n").expect("a table");
    assert_eq!(stdout_of(dir.path(), &["predict", "run", "bad.csv"]), "");
}

#[test]
fn an_evaluation_counts_no_sample_twice() {
    let dir = tempdir();
    trained_to_skip(dir.path());
    std::fs::write(dir.path().join("good.csv"), "a,b,kind\n1,2,above\n3,1,below\n9,2,above\n").expect("a table");
    let bad = "a,b,kind\n1,2,above\n,1,below\n3,1,below\n,7,above\n9,2,above\n";
    std::fs::write(dir.path().join("bad.csv"), bad).expect("a table");
    let eval = |data: &str| {
        let said = stdout_of(dir.path(), &["eval", "run", "--data", data, "--report", "eval.json"]);
        (said, json_at(&dir.path().join("eval.json")))
    };
    let ((_, good), (said, mixed)) = (eval("good.csv"), eval("bad.csv"));
    assert!(said.contains("3 samples, bad.csv\n  skipped     2 samples that could not be read\n"), "{said}");
    assert_eq!((&mixed["samples"], &mixed["skipped"], &good["skipped"]), (&3.into(), &2.into(), &0.into()));
    assert_eq!((&mixed["loss"], &mixed["metrics"]), (&good["loss"], &good["metrics"]));
}

#[test]
fn predictions_replace_a_file_only_when_they_are_whole() {
    let dir = tempdir();
    table(dir.path(), "table.csv", true);
    trained(dir.path(), TABLE);
    table(dir.path(), "new.csv", false);
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).expect("a file");
    let input = read("new.csv");
    fails(dir.path(), &["predict", "run", "new.csv", "--out", "./new.csv"], "new.csv is one of the inputs");
    fails(dir.path(), &["predict", "run", "ne*.csv", "--out", "new.csv"], "new.csv is one of the inputs");
    fails(dir.path(), &["predict", "run", "--out", "table.csv"], "table.csv is one of the inputs");
    fails(dir.path(), &["eval", "run", "--report", "table.csv"], "table.csv is one of the inputs");
    fails(dir.path(), &["train", "job.toml", "--no-out", "--report", "job.toml"], "job.toml is one of the inputs");
    assert_eq!(read("new.csv"), input);
    // What was open stays what is written to, and what only the user may read stays so.
    let shell = "(echo head; $KOLO predict run new.csv --out /dev/stdout --quiet; echo foot) > all.txt; \
                 touch own.csv; chmod 600 own.csv; $KOLO predict run new.csv --out own.csv --quiet; stat -c %a own.csv";
    let done = std::process::Command::new("sh")
        .args(["-c", shell])
        .current_dir(dir.path())
        .env("KOLO", env!("CARGO_BIN_EXE_kolo"))
        .output();
    assert_eq!(String::from_utf8_lossy(&done.expect("a shell").stdout), "600\n");
    let all = read("all.txt");
    assert!(all.starts_with("head\nrecord,") && all.ends_with("\nfoot\n") && all.lines().count() == 123, "{all}");
    stdout_of(dir.path(), &["predict", "run", "new.csv", "--out", "said.csv", "--quiet"]);
    let said = read("said.csv");
    std::fs::write(dir.path().join("bad.csv"), format!("{input}oops\n")).expect("a table");
    let output = run_in(dir.path(), &["predict", "run", "bad.csv", "--out", "said.csv"]);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!((read("said.csv"), said.lines().count()), (said.clone(), 121));
    let left = std::fs::read_dir(dir.path()).expect("a directory").filter_map(Result::ok);
    let left: Vec<String> = left.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    assert!(left.iter().all(|name| !name.contains(".part-")), "{left:?}");
}

/// `when` of this table is a moment, which is no number.
#[test]
fn columns_that_are_not_read_are_shown_and_left_out_where_others_are_chosen() {
    let dir = tempdir();
    let odd = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tests/files/odd.parquet");
    let names = |words: &[&str]| {
        let said = run_in(dir.path(), words);
        assert_eq!(said.status.code(), Some(0), "{}", String::from_utf8_lossy(&said.stderr));
        String::from_utf8_lossy(&said.stdout).into_owned()
    };
    let said = "the column \"when\" has the type Timestamp(ms), which is not read";
    fails(dir.path(), &["data", "convert", odd, "all.csv"], said);
    fails(dir.path(), &["data", "convert", odd, "some.csv", "--columns", "id,when"], said);
    names(&["data", "convert", odd, "some.csv", "--columns", "id"]);
    let table = std::fs::read_to_string(dir.path().join("some.csv")).expect("a table");
    assert!(table.starts_with("id\n"), "{table}");
    let said = names(&["data", "inspect", odd]);
    assert!(said.contains("1 record, 2 columns"), "{said}");
    let lines: Vec<Vec<&str>> = said.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(lines.contains(&vec!["when", "Timestamp(ms)", "not", "read"]), "{said}");
    assert!(lines.contains(&vec!["id", "1"]), "{said}");
}

#[test]
fn predictions_name_the_image_or_the_key_that_they_are_of() {
    let dir = tempdir();
    trained(dir.path(), &DIGITS.replace("\"mlp\"\nhidden = [16]", "\"cnn\"").replace("steps = 40", "steps = 3"));
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/files");
    std::fs::create_dir_all(dir.path().join("photos/new")).expect("a folder");
    for (from, to) in [("grey.png", "photos/new/b, c.png"), ("rgb.png", "photos/new/a.png")] {
        std::fs::copy(files.join("packed/images").join(from), dir.path().join(to)).expect("an image");
    }
    std::fs::copy(files.join("packed/shards/pax.tar"), dir.path().join("pax.tar")).expect("an archive");
    let predicted = |inputs: &[&str]| -> Vec<String> {
        let lines = stdout_of(dir.path(), &[&["predict", "run"], inputs].concat());
        lines.lines().map(String::from).collect()
    };
    for folder in ["photos", "photos/new", "photos/new/*.png"] {
        let lines = predicted(&[folder]);
        assert_eq!((&lines[0][..], lines.len()), ("record,file,class,probability", 3), "{folder}");
        assert!(lines[1].starts_with("0,photos/new/a.png,"), "{lines:?}");
        assert!(lines[2].starts_with("1,\"photos/new/b, c.png\","), "{lines:?}");
    }
    let alone = predicted(&["photos/new/a.png"]);
    assert_eq!(alone[1], predicted(&["photos"])[1]);
    let archive = predicted(&["pax.tar"]);
    assert_eq!(archive[0], "record,file,key,class,probability");
    // The first name is too long for a header of its own.
    assert!(archive[1].starts_with("0,pax.tar,dddd") && archive[1].contains("/ßßßß"), "{archive:?}");
    assert!(archive[2].starts_with("1,pax.tar,second,"), "{archive:?}");
    // Every line has the columns of all inputs.
    let both = predicted(&["photos", "pax.tar"]);
    assert_eq!(both[0], "input,record,file,key,class,probability");
    assert!(both[1].starts_with("photos,0,photos/new/a.png,,"), "{both:?}");
    assert_eq!(both[3], format!("pax.tar,{}", archive[1]));
    let lines = predicted(&["photos", "--format", "jsonl"]);
    let first: serde_json::Value = serde_json::from_str(&lines[0]).expect("JSON");
    assert_eq!((&first["record"], &first["file"]), (&0.into(), &"photos/new/a.png".into()));
}

/// An array of `rows` rows in NumPy's format.
fn npy(path: &Path, rows: usize, values: &[f32]) {
    let mut header =
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {}), }}", values.len() / rows);
    while !(header.len() + 11).is_multiple_of(64) {
        header.push(' ');
    }
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
    std::fs::write(path, bytes).expect("an array");
}

#[test]
fn labels_of_the_training_are_not_those_of_other_files() {
    let dir = tempdir();
    let x: Vec<f32> = (0..120).map(|at| (at * 37 % 101) as f32 / 50.0).collect();
    let sums = |offset: f32| -> Vec<f32> { x.chunks(3).map(|row| row.iter().sum::<f32>() + offset).collect() };
    for (name, offset) in [("a", 0.0), ("b", 1000.0)] {
        npy(&dir.path().join(format!("{name}_in.npy")), 40, &x);
        npy(&dir.path().join(format!("{name}_out.npy")), 40, &sums(offset));
    }
    npy(&dir.path().join("c_in.npy"), 7, &x[..21]);
    let job = "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nsource = \"a_in.npy\"\nlabels = \"a_out.npy\"\n\
               task = \"regression\"\nbatch = 8\ngrains = 1\n[train]\nepochs = 2\n";
    trained(dir.path(), job);
    let loss = |args: &[&str]| {
        stdout_of(dir.path(), &[&["eval", "run", "--report", "eval.json"], args].concat());
        json_at(&dir.path().join("eval.json"))["loss"].as_f64().expect("a loss")
    };
    let of_a = loss(&["--data", "a_in.npy", "--set", "data.labels=a_out.npy"]);
    let of_b = loss(&["--data", "b_in.npy", "--set", "data.labels=b_out.npy"]);
    assert!(of_a < 1e3 && of_b > 1e5, "{of_a} {of_b}");
    fails(dir.path(), &["eval", "run", "--data", "b_in.npy"], "nothing to compare with");
    assert_eq!(stdout_of(dir.path(), &["predict", "run", "c_in.npy"]).lines().count(), 8);
    // Files beside those of the training have labels of their own.
    let validated = |labels: &str| {
        let args = ["train", "job.toml", "--no-out", "--report", "r.json", "--set", "data.validation=b_in.npy"];
        stdout_of(
            dir.path(),
            &[&args[..], &["--set", &format!("data.validation_labels={labels}"), "--quiet"]].concat(),
        );
        json_at(&dir.path().join("r.json"))["metrics"]["eval_loss"].as_f64().expect("a loss")
    };
    assert!(validated("b_out.npy") > 1e5 && validated("a_out.npy") < 1e3);
    std::fs::remove_file(dir.path().join("a_out.npy")).expect("a file");
    assert_eq!(stdout_of(dir.path(), &["predict", "run", "c_in.npy"]).lines().count(), 8);
}

/// `007` and `7` are two names in a column that has other text in training; alone they look like one number.
#[test]
fn columns_that_were_text_in_training_are_text() {
    let dir = tempdir();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("a table");
    write("t.csv", &format!("zip,label\n{}", "007,01\n7,1\nA1,x\n".repeat(20)));
    let job = "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nsource = \"t.csv\"\ntarget = \"label\"\ninputs = [\"zip\"]\n\
               batch = 8\ngrains = 1\ntransforms = [{ kind = \"one_hot\" }]\n\
               [train]\nepochs = 40\noptimizer = { kind = \"adamw\", lr = 0.05 }\n";
    trained(dir.path(), job);
    write("all.csv", "zip\n007\n7\nA1\n");
    write("alone.csv", "zip\n007\n007\n");
    let classes = |file: &str| -> Vec<String> {
        let said = stdout_of(dir.path(), &["predict", "run", file, "--set", "data.header=true"]);
        said.lines().skip(1).filter_map(|line| line.split(',').nth(1).map(String::from)).collect()
    };
    assert_eq!(
        (classes("all.csv"), classes("alone.csv")),
        (vec!["01".into(), "1".into(), "x".into()], vec!["01".into(); 2])
    );
    write("labelled.csv", "zip,label\n007,01\n007,01\n");
    let said = stdout_of(dir.path(), &["eval", "run", "--data", "labelled.csv"]);
    assert!(said.contains("accuracy    1.0000"), "{said}");
    stdout_of(dir.path(), &["train", "job.toml", "--no-out", "--quiet", "--set", "data.validation=labelled.csv"]);
    // A file may call its columns otherwise.
    write("other.csv", "code,kind\n007,01\n007,1\n");
    let named = ["--set", "data.inputs=[\"code\"]", "--set", "data.target=kind"];
    let said = stdout_of(dir.path(), &[&["eval", "run", "--data", "other.csv"][..], &named].concat());
    assert!(said.contains("accuracy    0.5000"), "{said}");
    fails(
        dir.path(),
        &["train", "job.toml", "--no-out", "--set", "data.text=[\"zap\"]"],
        "names \"zap\", which is no column",
    );
}

#[test]
fn the_tokenizer_of_packed_texts_is_kept() {
    let dir = tempdir();
    let line = |at: usize| format!("{{\"text\": \"the {} of {} is a {}\"}}\n", at * 7 % 13, at * 5 % 11, at * 3 % 17);
    let texts: String = (0..200).map(line).collect();
    std::fs::write(dir.path().join("p.jsonl"), &texts).expect("texts");
    let tokens = ["data", "tokens", "train", "--column", "text", "--vocab", "300", "--out", "tok.json", "p.jsonl"];
    stdout_of(dir.path(), &tokens);
    let job = "[model]\nkind = \"gpt\"\nlayers = 1\nwidth = 16\nheads = 2\n[data]\nsource = \"p.jsonl\"\nbatch = 8\ngrains = 1\n\
               transforms = [{ kind = \"pack\", context = 16, tokenizer = \"tok.json\" }]\n[train]\nepochs = 1\n";
    trained(dir.path(), job);
    let eval = || stdout_of(dir.path(), &["eval", "run", "--data", "p.jsonl"]);
    let before = eval();
    let write = |text: &str| std::fs::write(dir.path().join("tok.json"), text).expect("a file");
    write("{}");
    assert_eq!(eval(), before);
    std::fs::remove_file(dir.path().join("tok.json")).expect("a file");
    assert_eq!(eval(), before);
    stdout_of(dir.path(), &["generate", "run", "--prompt", "the", "--tokens", "3"]);
}

/// The job of the documents forecasts in the target's unit, up to what is still to come.
#[test]
fn the_documents_forecast_sales() {
    let documents = include_str!("../../../../docs/data.md");
    let mut blocks = documents.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next());
    let job = blocks.find(|block| block.contains("window = {")).expect("a job");
    let dir = tempdir();
    let sales = |day: usize, store: usize| {
        let week = [0.0, 4.0, 9.0, 11.0, 8.0, 3.0, -6.0][day % 7];
        500.0 + 300.0 * store as f32 + 10.0 * week
    };
    let rows = |days: std::ops::Range<usize>| {
        let mut text = String::from("day,store,open,sales\n");
        for day in days {
            for (store, name) in ["north", "south"].iter().enumerate() {
                writeln!(text, "{day},{name},{},{}", usize::from(day % 7 < 6), sales(day, store)).expect("text");
            }
        }
        text
    };
    std::fs::write(dir.path().join("sales.csv"), rows(0..280)).expect("a table");
    std::fs::write(dir.path().join("new.csv"), rows(280..312)).expect("a table");
    let report = trained(dir.path(), job);
    let metric = |name: &str| report["metrics"][name].as_f64().expect("a metric");
    assert!(metric("rmse") >= metric("mae") && metric("mae") > 0.0 && metric("r2") > 0.9, "{}", report["metrics"]);
    let said = stdout_of(dir.path(), &["eval", "run"]);
    assert!(said.contains(&format!("  mae         {:.4}\n", metric("mae"))), "{said}");
    let lines = stdout_of(dir.path(), &["predict", "run", "new.csv", "--quiet"]);
    let mut rows = lines.lines();
    let header = "record,file,key,value.0,value.1,value.2,value.3,value.4,value.5,value.6,true.0,true.1,true.2,true.3,true.4,true.5,true.6";
    assert_eq!(rows.next(), Some(header));
    let rows: Vec<Vec<&str>> = rows.map(|line| line.split(',').collect()).collect();
    // Of 32 days, 28 are the past of the first window and of the last.
    assert_eq!(rows.len(), 2 * 5);
    let mut errors = Vec::new();
    for (store, series) in ["north", "south"].iter().enumerate() {
        let own: Vec<&Vec<&str>> = rows.iter().filter(|row| row[2] == *series).collect();
        let last = own.last().expect("a window");
        assert_eq!((last[0], last[10]), (&*(62 + store).to_string(), ""), "the last row of the file, and no truth");
        let first: f32 = own[0][10].parse().expect("a number");
        assert_eq!(first, sales(308, store), "the day after the first window");
        for row in own {
            let day = 280 + row[0].parse::<usize>().expect("a row") / 2 + 1;
            for ahead in 0..7 {
                let value: f32 = row[3 + ahead].parse().expect("a number");
                errors.push((value - sales(day + ahead, store)).abs());
            }
        }
    }
    let mae = errors.iter().sum::<f32>() / errors.len() as f32;
    assert!(mae < 60.0, "{mae}: {lines}");
}

/// A column of amounts is not taken for classes, and what is predicted of it is in its own unit.
#[test]
fn amounts_are_refused_as_classes_and_predicted_in_their_unit() {
    let dir = tempdir();
    let price = |row: usize| 100 + (row * 37 % 101) * 3 + (row * 53 % 97);
    let mut text = String::from("a,b,price\n");
    (0..300).for_each(|row| writeln!(text, "{},{},{}.0", row * 37 % 101, row * 53 % 97, price(row)).expect("text"));
    std::fs::write(dir.path().join("table.csv"), text).expect("a table");
    let job = TABLE.replace("target = \"kind\"", "target = \"price\"");
    std::fs::write(dir.path().join("job.toml"), &job).expect("a job file");
    fails(dir.path(), &["train", "job.toml"], "`task = \"regression\"` under [data] to predict the number, or");
    let job = job.replace("target = \"price\"", "target = \"price\"\ntask = \"regression\"");
    let job = job.replace(
        "{ kind = \"standardise\" }",
        "{ kind = \"standardise\" }, { kind = \"standardise\", of = \"target\" }",
    );
    let report = trained(dir.path(), &job);
    assert!(report["metrics"]["r2"].as_f64().expect("r2") > 0.97, "{}", report["metrics"]);
    let lines = stdout_of(dir.path(), &["predict", "run", "--quiet"]);
    assert!(lines.starts_with("record,value,true\n"), "{lines}");
    let mut errors = Vec::new();
    for line in lines.lines().skip(1) {
        let cells: Vec<f64> = line.split(',').map(|cell| cell.parse().expect("a number")).collect();
        assert_eq!(cells[2], price(cells[0] as usize) as f64, "{line}");
        errors.push((cells[1] - cells[2]).abs());
    }
    let mae = errors.iter().sum::<f64>() / errors.len() as f64;
    let measured = report["metrics"]["mae"].as_f64().expect("mae");
    assert!((mae - measured).abs() < 1e-3 * measured, "{mae} {measured}");
    std::fs::write(dir.path().join("new.csv"), "b,a\n10,20\n").expect("a table");
    let new = stdout_of(dir.path(), &["predict", "run", "new.csv", "--quiet"]);
    let value: f64 =
        new.lines().nth(1).and_then(|line| line.split(',').nth(1)).expect("a value").parse().expect("a number");
    assert!((value - 170.0).abs() < 60.0, "{new}");
}
