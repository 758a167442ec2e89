//! The binary from outside: what it says to bad input, and the shape of all it prints and writes.
//!
//! `tests/cli/*.txt` are transcripts: a job file, a command line, then the exit code and standard error as they must be.
//! A file there is a test. `KOLO_BLESS=1 cargo test -p kolo --test cli` writes the answers anew; read the diff.

#[path = "ckpt/mod.rs"]
mod ckpt;
#[path = "documented/mod.rs"]
mod documented;
#[path = "planned/mod.rs"]
mod planned;
#[path = "trained/mod.rs"]
mod trained;

use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const KOLO: &str = env!("CARGO_BIN_EXE_kolo");
/// How long a started process may take to do what a test waits for.
const PATIENCE: Duration = Duration::from_secs(60);

/// An example job's file.
fn example(name: &str) -> String {
    format!("{}/../../examples/{name}.toml", env!("CARGO_MANIFEST_DIR"))
}

fn run_in(dir: &Path, args: &[&str]) -> Output {
    Command::new(KOLO).current_dir(dir).args(args).output().expect("the binary runs")
}

/// Standard output of a command that must succeed.
fn stdout_of(dir: &Path, args: &[&str]) -> String {
    let output = run_in(dir, args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn json_at(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).expect("JSON")
}

/// Trains an example quietly and reads its report.
fn train(dir: &Path, job: &str, args: &[&str]) -> Value {
    let mut all = vec!["train", job, "--quiet", "--report", "report.json"];
    all.extend(args);
    assert_eq!(stdout_of(dir, &all), "", "--quiet prints nothing");
    json_at(&dir.join("report.json"))
}

fn tempdir() -> TempDir {
    tempfile::tempdir().expect("a directory")
}

/// One transcript, in the words of its file.
struct Transcript {
    /// Names and contents.
    files: Vec<(String, String)>,
    command: String,
    answer: String,
}

impl Transcript {
    const FILE: &str = "$ cat ";
    const KOLO: &str = "$ kolo ";

    /// Files come first, if there are any; what follows the command line is the answer.
    fn parse(text: &str) -> Option<Self> {
        let (before, after) = text.split_once(Self::KOLO)?;
        let (command, answer) = after.split_once('\n')?;
        let file = |text: &str| text.split_once('\n').map(|(name, content)| (name.to_string(), content.to_string()));
        let files = before.split(Self::FILE).filter_map(file).collect();
        Some(Self { files, command: command.into(), answer: answer.into() })
    }

    fn print(&self) -> String {
        let files = self.files.iter().map(|(name, content)| format!("{}{name}\n{content}", Self::FILE));
        format!("{}{}{}\n{}", files.collect::<String>(), Self::KOLO, self.command, self.answer)
    }

    /// What the binary answers now, in a directory that holds nothing but these files.
    fn replay(&self) -> String {
        let dir = tempdir();
        for (name, content) in &self.files {
            std::fs::write(dir.path().join(name), content).expect("a file");
        }
        let words: Vec<&str> = self.command.split(' ').collect();
        let output = run_in(dir.path(), &words);
        let code = output.status.code().map_or("a signal".into(), |code| code.to_string());
        // What takes long, as on a busy machine, says so now and then.
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.split_inclusive('\n').filter(|line| !line.ends_with(" s so far\n"));
        format!("exit code {code}\n{}", said.collect::<String>())
    }
}

#[test]
fn bad_input_is_answered_as_written() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli");
    let entries = std::fs::read_dir(&dir).expect("the transcripts");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    assert!(files.len() >= 25, "only {} transcripts", files.len());
    let mut wrong = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a transcript");
        let mut transcript = Transcript::parse(&text).unwrap_or_else(|| panic!("{}: no command", file.display()));
        let answer = transcript.replay();
        if answer == transcript.answer {
            continue;
        }
        if std::env::var_os("KOLO_BLESS").is_some() {
            transcript.answer = answer;
            std::fs::write(&file, transcript.print()).expect("a transcript");
        } else {
            wrong.push(format!("{}\n--- expected\n{}--- answered\n{answer}", file.display(), transcript.answer));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What stands in a script's line must not end it.
#[test]
fn an_option_of_sbatch_is_one_line() {
    let dir = tempdir();
    for flag in ["--partition=a\nrm -rf x", "--time=1\n#SBATCH --uid=0", "--sbatch=--gres=gpu\n"] {
        let output = run_in(dir.path(), &["slurm", flag]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flag:?}: {text}");
        let name = flag.split('=').next().expect("a name");
        assert!(text.starts_with(&format!("error: {name} ")) && text.contains("\n  hint: "), "{text}");
        assert_eq!(text.lines().count(), 2, "{text}");
    }
}

#[test]
fn a_report_that_cannot_be_written_is_refused_before_training() {
    let dir = tempdir();
    let words = ["train", &example("playground"), "--set", "train.epochs=2", "--report", "nowhere/report.json"];
    let output = run_in(dir.path(), &words);
    assert_eq!(output.status.code(), Some(1));
    assert!(!String::from_utf8_lossy(&output.stdout).contains("epoch "), "it trained first");
    assert!(String::from_utf8_lossy(&output.stderr).contains("nowhere/report.json"));
}

#[test]
fn a_plan_names_parameters_work_and_memory() {
    let dir = tempdir();
    let text = stdout_of(dir.path(), &["plan", &example("digits"), "--price", "2"]);
    for word in
        ["parameters", "multiply-adds", "FLOP", "memory", "weights", "gradients", "optimizer", "measured on", "cost"]
    {
        assert!(text.contains(word), "no {word} in\n{text}");
    }
    assert!(text.starts_with("digits\n  parameters        151,306\n"), "{text}");
    // A job without a name is called by its file.
    let nameless = std::fs::read_to_string(example("digits")).unwrap().replace("name = \"digits\"\n", "");
    std::fs::write(dir.path().join("seven.toml"), nameless).unwrap();
    let text = stdout_of(dir.path(), &["plan", "seven.toml", "--by-rates"]);
    assert!(text.starts_with("seven\n"), "{text}");
    let text = stdout_of(dir.path(), &["plan", "seven.toml", "--by-rates", "--json"]);
    assert!(text.contains("\"job\": \"job\""), "{text}");
    let text = stdout_of(dir.path(), &["plan", &example("digits"), "--by-rates"]);
    assert!(
        text.contains("GFLOP/s") && text.contains("by these rates alone") && !text.contains("measured on"),
        "{text}"
    );
}

/// What one worker does and what all do is told apart, and a sample costs what it costs, whoever computes it.
#[test]
fn a_plan_for_workers_says_whose_numbers_it_has() {
    let dir = tempdir();
    let plan = |flags: &[&str]| -> Value {
        let text = stdout_of(dir.path(), &[&["plan", "--json", "--by-rates", "--threads", "1"], flags].concat());
        serde_json::from_str(&text).expect("JSON")
    };
    let (one, four) = (plan(&[]), plan(&["-n", "4"]));
    assert_eq!(one["forward_macs_per_sample"], four["forward_macs_per_sample"]);
    let forward = |plan: &Value| plan["flops"]["forward"].as_u64().unwrap();
    assert_eq!(forward(&one), 4 * forward(&four), "the numbers are those of a worker");
    assert_eq!((&one["per"], &four["per"]), (&"step".into(), &"step and worker".into()));
    assert_eq!((&one["workers"], &four["workers"]), (&1.into(), &4.into()));
    let [alone, together] = [&one, &four].map(|plan| plan["run"]["flops"].as_f64().unwrap());
    assert!(alone > 1e9 && (together / alone - 1.0).abs() < 0.05, "a run of one {alone}, of four {together}");
    let text = stdout_of(dir.path(), &["plan", "-n", "2", "--threads", "1"]);
    for words in
        ["FLOP, per worker", "FLOP, all workers", " per worker, ", "for all 2 workers", " exchange, per worker"]
    {
        assert!(text.contains(words), "no {words} in\n{text}");
    }
}

#[test]
fn places_on_hosts_count_like_workers_here() {
    let dir = tempdir();
    let [hosts, here] = [["--hosts", "a:1,b:3"], ["-n", "4"]].map(|flags| {
        let graph = stdout_of(dir.path(), &[&["graph", "--rank", "3"], &flags[..]].concat());
        let plan = stdout_of(dir.path(), &[&["plan", "--json", "--threads", "1"], &flags[..]].concat());
        let plan: Value = serde_json::from_str(&plan).expect("JSON");
        (graph, plan["flops"].clone(), plan["memory"].clone())
    });
    assert!(hosts == here, "{hosts:?}\n{here:?}");
}

#[test]
fn the_plan_agrees_with_the_report_and_fits_the_process() {
    let dir = tempdir();
    let short = ["--set", "train.epochs=1", "--threads", "2"];
    let mut args = vec!["plan", "--json"];
    args.extend(short);
    let plan: Value = serde_json::from_str(&stdout_of(dir.path(), &args)).expect("JSON");
    let job = example("digits");
    let report = train(dir.path(), &job, &short);
    let flops: u64 = ["forward", "backward", "update"].iter().map(|stage| plan["flops"][stage].as_u64().unwrap()).sum();
    assert_eq!(report["planned"]["flops"], flops);
    assert_eq!(report["planned"]["bytes"], plan["memory"]["total"]);
    let parts = ["weights", "gradients", "optimizer", "activations", "scratch", "evaluation", "data", "process"];
    let total: u64 = parts.iter().map(|part| plan["memory"][part].as_u64().unwrap()).sum();
    assert_eq!(plan["memory"]["total"], total);
    let rss = report["peak_bytes"]["rss"].as_u64().unwrap();
    // A debug build has several times the code, whose pages count, and the allocator keeps what it likes.
    assert!(
        total.abs_diff(rss) <= (rss / 20).max(32 << 20),
        "{total} bytes planned, {rss} bytes were the most resident"
    );
    assert!(report["planned"]["step_ms"].as_f64().unwrap() > 0.0);
}

/// What others have published of their clusters comes out of the model of cost, which was fitted on one row per device.
#[test]
fn published_results_are_predicted() {
    let dir = tempdir();
    // Of the files that the program carries.
    let text = stdout_of(dir.path(), &["bench", "published", "--report", "rows.json"]);
    let rows = json_at(&dir.path().join("rows.json"));
    let rows = rows.as_array().expect("rows");
    let number = |row: &Value, key: &str| row[key].as_f64().unwrap_or(f64::NAN);
    let median = |mut errors: Vec<f64>| {
        errors.sort_by(f64::total_cmp);
        errors[errors.len() / 2]
    };
    let speed: Vec<f64> =
        rows.iter().filter(|row| row["fitted"] != true).map(|row| number(row, "error").abs()).collect();
    assert!(speed.len() >= 15 && median(speed.clone()) <= 0.15, "{text}");
    let memory = rows.iter().filter(|row| row["memory_gib_published"].is_number());
    let memory: Vec<f64> =
        memory.map(|row| (number(row, "memory_gib") / number(row, "memory_gib_published") - 1.0).abs()).collect();
    assert!(memory.len() >= 10 && median(memory) <= 0.1, "{text}");
    let mut fitted: Vec<&str> =
        rows.iter().filter(|row| row["fitted"] == true).map(|row| row["device"].as_str().expect("a device")).collect();
    let count = fitted.len();
    fitted.sort_unstable();
    fitted.dedup();
    assert!(count > 0 && fitted.len() == count, "one row per device is fitted: {fitted:?}");
    // What is simulated is what is planned, but for links that exchanges of several axes share.
    let apart = |row: &Value| (number(row, "simulated_ms") / number(row, "step_ms") - 1.0).abs();
    let apart: Vec<f64> = rows.iter().map(apart).collect();
    assert!(apart.iter().all(|one| *one <= 0.2) && median(apart.clone()) <= 0.01, "{apart:?}");
    // Interleaving helps as much as it did: 128 tokens/s to 100.
    let named = |name: &str| rows.iter().find(|row| row["row"].as_str().is_some_and(|row| row.contains(name))).unwrap();
    let gain = number(named("405B, interleaved"), "predicted") / number(named("405B, 1F1B"), "predicted");
    assert!((gain / 1.28 - 1.0).abs() < 0.15, "{gain}\n{text}");
}

/// A device that was measured, and one that was calibrated on a run, are entries that can be read.
#[test]
fn a_measured_machine_is_an_entry() {
    let dir = tempdir();
    stdout_of(dir.path(), &["bench", "device", "--threads", "1", "--write", "device.toml"]);
    let text = std::fs::read_to_string(dir.path().join("device.toml")).unwrap();
    assert!(text.starts_with("[this-machine]\n") && text.contains("bandwidth_gbs = "), "{text}");
    let report = train(dir.path(), &example("digits"), &["--set", "train.epochs=1", "--threads", "1"]);
    let parts: Vec<&str> =
        report["compared"].as_array().unwrap().iter().map(|part| part["part"].as_str().unwrap()).collect();
    assert_eq!(parts[..5], ["step", "compute", "waiting", "data", "memory"]);
    let kinds = ["activations", "gradients", "optimizer", "other", "scratch", "weights"];
    assert_eq!(parts[5..], kinds.map(|kind| format!("memory of {kind}")));
    let printed = stdout_of(dir.path(), &["plan", "--calibrate", "report.json", "--entry", "mine.toml"]);
    assert!(printed.contains("times as long as planned"), "{printed}");
    assert!(std::fs::read_to_string(dir.path().join("mine.toml")).unwrap().contains("fitted_on"));
    std::fs::write(dir.path().join("report.json"), "{}").unwrap();
    let output = run_in(dir.path(), &["plan", "--calibrate", "report.json"]);
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A default that costs a factor is said, with the factor; where it costs nothing, nothing is.
#[test]
fn grains_that_cost_a_factor_are_said() {
    let dir = tempdir();
    let wide = "[model]\nkind = \"mlp\"\nhidden = [8192]\n[data]\nsource = \"builtin:digits\"\nbatch = 8\n[train]\nsteps = 1\n";
    std::fs::write(dir.path().join("wide.toml"), wide).unwrap();
    let plan = |job: &str, more: &[&str]| -> Value {
        let words = [&["plan", job, "--json", "--threads", "1"], more].concat();
        serde_json::from_str::<Value>(&stdout_of(dir.path(), &words)).expect("JSON")["grain_cost"].take()
    };
    let cost = plan("wide.toml", &["--by-rates"]);
    assert_eq!((&cost["grains"], &cost["fewer"], &cost["timed"]), (&8.into(), &1.into(), &false.into()), "{cost}");
    let [own, fewer] = ["step_ms", "fewer_step_ms"].map(|key| cost[key].as_f64().unwrap());
    assert!(own > 1.15 * fewer && fewer > 0.0, "{cost}");
    let tried = plan("wide.toml", &[]);
    assert!(tried.is_null() || tried["timed"] == true, "{tried}");
    for job in [&example("addition"), &example("waves")] {
        assert!(plan(job, &["--by-rates"]).is_null(), "{job}");
    }
    let said = |words: &[&str]| {
        let output = run_in(dir.path(), &[words, &["--threads", "1"]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let note = "note: 8 grains take ";
    for words in [&["train", "wide.toml", "--no-out"][..], &["bench", "train", "wide.toml", "--steps", "1"]] {
        let text = said(words);
        assert!(text.contains(note) && text.contains("`data.grains = 1` is faster"), "{text}");
    }
    assert_eq!(said(&["train", "wide.toml", "--no-out", "--quiet"]), "");
    assert!(!said(&["train", "wide.toml", "--no-out", "--set", "data.grains=1"]).contains("grain"));
}

/// What a run writes to a terminal of so many columns on standard error.
fn on_terminal(dir: &Path, columns: u16, words: &[&str]) -> String {
    let (mut terminal, mut end) = (0, 0);
    let size = libc::winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: both descriptors are written, the size is read, and the others may be null.
    let opened = unsafe {
        libc::openpty(&raw mut terminal, &raw mut end, std::ptr::null_mut(), std::ptr::null(), &raw const size)
    };
    assert_eq!(opened, 0);
    // SAFETY: they were just opened, and nobody else has them.
    let (mut terminal, end) = unsafe { (File::from_raw_fd(terminal), OwnedFd::from_raw_fd(end)) };
    let mut child = Command::new(KOLO);
    child.current_dir(dir).args(words).stdout(Stdio::null()).stderr(end);
    let mut running = child.spawn().expect("the binary runs");
    // It keeps the other end open.
    drop(child);
    let (mut said, mut block) = (Vec::new(), [0; 4096]);
    // When nobody is left at the other end, reading fails.
    while let Ok(bytes @ 1..) = terminal.read(&mut block) {
        said.extend_from_slice(&block[..bytes]);
    }
    assert!(running.wait().expect("it ends").success(), "{}", String::from_utf8_lossy(&said));
    String::from_utf8_lossy(&said).into_owned()
}

/// Without codes that move, colour and erase.
fn visible(text: &str) -> String {
    let mut parts = text.split("\u{1b}[");
    let first = parts.next().unwrap_or_default().to_string();
    parts.fold(first, |text, part| {
        text + part.split_once(|letter: char| letter.is_ascii_alphabetic()).map_or("", |(_, rest)| rest)
    })
}

/// A bar is never wider than the terminal, and nothing of it is left when the run is over.
#[test]
fn a_bar_fits_its_terminal_and_goes() {
    let dir = tempdir();
    for (columns, words) in [(40, &["-n", "1"][..]), (30, &["-n", "2"]), (100, &["-n", "1"])] {
        let all = [&["train", "--no-out", "--threads", "1", "--set", "train.steps=4"], words].concat();
        let said = on_terminal(dir.path(), columns, &all);
        let shown = visible(&said);
        let lines: Vec<&str> = shown.split(['\r', '\n']).filter(|line| !line.starts_with("note: ")).collect();
        assert!(lines.iter().any(|line| line.contains("/4 steps")), "{said:?}");
        let widest = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0);
        assert!(widest <= usize::from(columns), "{widest} of {columns} columns: {said:?}");
        let (_, left) = said.rsplit_once("\u{1b}[2K").expect("lines are erased");
        assert_eq!(visible(left).trim(), "", "{said:?}");
    }
}

/// What stands on standard error before a process is ended, once it has this text.
fn told_before_the_end(dir: &Path, words: &[&str], wanted: &str) -> String {
    let mut child = Command::new(KOLO);
    child.current_dir(dir).args(words).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut running = child.spawn().expect("the binary runs");
    let mut lines = BufReader::new(running.stderr.take().expect("standard error")).lines();
    let mut said = String::new();
    while let Some(Ok(line)) = lines.next() {
        said += &format!("{line}\n");
        if line.contains(wanted) {
            break;
        }
    }
    running.kill().expect("it runs");
    running.wait().expect("it ends");
    said
}

/// Who starts what takes hours is told so at its start.
#[test]
fn a_long_run_says_how_long_it_takes() {
    let dir = tempdir();
    let words = ["train", "--no-out", "--device", "reference", "--set", "data.batch=8", "--set", "train.steps=1000000"];
    let said = told_before_the_end(dir.path(), &words, "note: at ");
    assert!(said.contains(" a step, the other 999998 steps take about "), "{said}");
}

/// Whoever interrupts a measurement keeps what was measured.
#[test]
fn collectives_measured_before_an_interruption_are_kept() {
    let dir = tempdir();
    let mut child = Command::new(KOLO);
    child.current_dir(dir.path()).args(["bench", "comm", "-n", "2", "--report", "rows.json"]);
    let running = child.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the binary runs");
    let begin = Instant::now();
    let rows = || std::fs::read_to_string(dir.path().join("rows.json")).unwrap_or_default();
    while rows().is_empty() && begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(20));
    }
    // SAFETY: the process is this test's own, and was not waited for.
    unsafe { libc::kill(running.id().cast_signed(), libc::SIGINT) };
    let output = running.wait_with_output().expect("it ends");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!output.status.success(), "it ran to its end: {printed}");
    let rows: Value = serde_json::from_str(&rows()).expect("JSON");
    let kept = rows.as_array().expect("rows").len();
    assert!(kept > 0 && printed.lines().count() > kept, "{kept} rows in the report, and\n{printed}");
}

/// A run that is resumed with another length says both, and none where none is written.
#[test]
fn a_resumed_run_says_what_length_it_had() {
    let dir = tempdir();
    let train = |length: &str| run_in(dir.path(), &["train", "--out", "run", "--resume", "--set", length]);
    assert!(train("train.steps=2").status.success());
    let said = String::from_utf8_lossy(&train("train.epochs=1").stderr).into_owned();
    assert!(said.contains("note: `train.steps` was 2 when ") && said.contains(" and is not set now"), "{said}");
}

/// What is no flag may be a key of the job.
#[test]
fn a_flag_that_is_a_key_says_how_to_set_it() {
    let dir = tempdir();
    let said = |words: &[&str]| {
        let output = run_in(dir.path(), words);
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for (flag, key) in [("--epochs", "train.epochs"), ("--lr=1", "train.optimizer.lr"), ("--batch", "data.batch")] {
        let text = said(&["train", flag, "3"]);
        assert!(text.contains(&format!("write `--set {key}=VALUE`")), "{text}");
    }
    let text = said(&["train", "--nonsense"]);
    assert!(!text.contains("-- --nonsense") && !text.contains("--set"), "{text}");
    // What follows `--` does go to `kolo train`.
    assert!(said(&["slurm", "--elastic"]).contains("-- --elastic"));
    let text = said(&["data", "bench", "--seconds", "-1"]);
    assert!(text.starts_with("error: --seconds -1 is out of range\n  hint: "), "{text}");
    std::fs::write(dir.path().join("table.csv"), "a,b\n1,2\n").unwrap();
    let text = said(&["train", "table.csv"]);
    assert!(
        text.contains("hint: name a job file; data are named in it: `source = \"table.csv\"` under [data]"),
        "{text}"
    );
    std::fs::write(dir.path().join("data.xyz"), "").unwrap();
    let text = said(&["data", "inspect", "data.xyz"]);
    assert!(text.contains("hint: add `--format csv`"), "{text}");
}

/// Weights of 4 TB: more than any machine that runs tests.
const HUGE: &str = "[model]\nkind = \"mlp\"\nhidden = [1000000, 1000000]\n[data]\nsource = \"builtin:digits\"\nbatch = 64\n[train]\nsteps = 1\n";

#[test]
fn a_job_that_does_not_fit_is_refused_before_it_takes_memory() {
    let dir = tempdir();
    std::fs::write(dir.path().join("huge.toml"), HUGE).unwrap();
    for workers in [&["-n", "1"][..], &["-n", "2"], &["-n", "2", "--transport", "tcp"]] {
        let output = run_in(dir.path(), &[&["train", "huge.toml", "--threads", "1"], workers].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert_eq!(error.matches("error: ").count(), 1, "{error}");
        assert_eq!(error.contains(" of 2 "), workers[1] == "2", "{error}");
        assert!(error.contains("TiB of memory, but ") && error.contains("weights 3.64 TiB"), "{error}");
    }
    assert!(stdout_of(dir.path(), &["plan", "huge.toml"]).contains("  does not fit      "), "planning takes nothing");
}

/// The chart of the README shows figures of the benchmarks' tables.
#[test]
fn the_chart_shows_what_was_measured() {
    let (chart, tables) = (include_str!("../../../docs/speed.svg"), include_str!("../../../bench/README.md"));
    let figures: Vec<&str> =
        chart.split("<tspan class=\"figure\">").skip(1).map(|rest| rest.split('<').next().unwrap()).collect();
    assert!(figures.len() >= 8, "{figures:?}");
    for figure in figures {
        let cell = [format!("| {figure} |"), format!("| {figure} (")];
        assert!(cell.iter().any(|cell| tables.contains(cell)), "{figure} is not measured: run python3 bench/chart.py");
    }
}

/// What a poisoned lock means is decided in one place.
#[test]
fn locks_go_through_kolo_base() {
    fn visit(folder: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                visit(&entry, found);
            } else if std::fs::read_to_string(&entry).is_ok_and(|text| text.contains("PoisonError")) {
                found.push(entry.display().to_string());
            }
        }
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.ends_with("base") {
            visit(&folder.join("src"), &mut found);
        }
    }
    assert!(found.is_empty(), "use kolo_base::lock: {found:?}");
}

/// Job files as the documents print them can be copied.
#[test]
fn job_files_in_documents_are_jobs() {
    let dir = tempdir();
    let documents = [include_str!("../../../README.md"), include_str!("../../../docs/guide.md")];
    let blocks = |document: &'static str, start: &'static str, end: &'static str| {
        document.split(start).skip(1).map(move |rest| rest.split(end).next().unwrap())
    };
    let mut jobs: Vec<&str> = documents.into_iter().flat_map(|document| blocks(document, "```toml\n", "```")).collect();
    jobs.extend(documents.into_iter().flat_map(|document| blocks(document, ".toml <<'END'\n", "END\n")));
    assert!(jobs.len() >= 3, "{} jobs", jobs.len());
    for job in jobs {
        std::fs::write(dir.path().join("job.toml"), job).unwrap();
        assert!(stdout_of(dir.path(), &["plan", "--by-rates", "job.toml"]).contains("parameters"), "{job}");
    }
}

#[test]
fn a_printed_graph_parses_verifies_and_prints_the_same() {
    let dir = tempdir();
    for job in ["digits", "playground", "addition", "waves", "cifar-like"] {
        for flags in [&[][..], &["--raw"], &["--evaluation"], &["--raw", "--evaluation"]] {
            let job = example(job);
            let mut args = vec!["graph", job.as_str()];
            args.extend(flags);
            let text = stdout_of(dir.path(), &args);
            let graph = kolo::graph_ir::text::parse(&text, &kolo::ops::registry())
                .unwrap_or_else(|error| panic!("{args:?}: {error:?}"));
            kolo::graph_ir::verify::verify(&graph).unwrap_or_else(|error| panic!("{args:?}: {error}"));
            assert_eq!(graph.to_string(), text, "{args:?}");
        }
    }
}

#[test]
fn lists_name_what_a_job_can_name() {
    let dir = tempdir();
    for (what, name) in [("models", "resnet18"), ("sources", "builtin:digits"), ("ops", "matmul")] {
        let text = stdout_of(dir.path(), &["list", what]);
        assert!(text.lines().any(|line| line.split_whitespace().next() == Some(name)), "{text}");
    }
}

#[test]
fn the_report_has_every_key() {
    let dir = tempdir();
    let small = ["--set", "model.width=16", "--set", "train.epochs=1", "--threads", "2"];
    let report = train(dir.path(), &example("addition"), &small);
    let numbers = "/steps /epochs /loss /metrics/exact_match /metrics/perplexity /metrics/eval_loss /step_ms/median /step_ms/p95 \
                   /samples_per_s /tokens_per_s /workers /layout/data /layout/tensor /layout/pipeline /layout/zero /threads \
                   /peak_bytes/rss /peak_bytes/device /planned/step_ms /planned/bytes /planned/flops /grains /seed";
    for key in numbers.split_whitespace() {
        assert!(report.pointer(key).is_some_and(Value::is_number), "{key} in {report:#}");
    }
    for (key, text) in
        [("job", "addition"), ("device", "cpu"), ("version", env!("CARGO_PKG_VERSION")), ("ended", "done")]
    {
        assert_eq!(report[key], text, "{key}");
    }
    let digest = report["weights"].as_str().unwrap().strip_prefix("blake3:").expect("blake3");
    assert!(digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()), "{digest}");
    assert_eq!((&report["workers"], &report["threads"], &report["seed"]), (&1.into(), &2.into(), &1.into()));
}

#[test]
fn the_out_directory_gets_metrics_events_and_a_picture() {
    let dir = tempdir();
    let every_other = ["--set", "train.epochs=4", "--set", "train.eval_every=2", "--out", "deep/out"];
    let report = train(dir.path(), &example("playground"), &every_other);
    let out = dir.path().join("deep/out");
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let (lines, steps): (Vec<Value>, Vec<Value>) = lines.into_iter().partition(|line| line["train/loss"].is_number());
    assert_eq!(steps.iter().map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [50, 100, 150, 200]);
    let numbers = ["step/loss", "step/lr", "step/samples_per_s"];
    assert!(steps.iter().all(|line| numbers.iter().all(|name| line[name].as_f64().is_some_and(|value| value >= 0.0))));
    assert!(steps.iter().all(|line| line["step/grad_norm"].is_null()), "this job measures no norm");
    let mean = steps.iter().map(|line| line["step/loss"].as_f64().unwrap()).sum::<f64>() / 4.0;
    let by_epochs = lines.iter().map(|line| line["train/loss"].as_f64().unwrap()).sum::<f64>() / 2.0;
    assert!((mean - by_epochs).abs() < 1e-9, "{mean} {by_epochs}");
    assert_eq!(json_at(&out.join("report.json")), report);
    let matrix = report["classification"]["confusion"].as_array().expect("a confusion matrix");
    let counts = |row: &Value| row.as_array().expect("a row").iter().map(|cell| cell.as_i64().unwrap()).sum::<i64>();
    assert_eq!((matrix.len(), matrix.iter().map(counts).sum::<i64>()), (2, 400));
    assert_eq!(lines[1]["eval/recall"], report["metrics"]["recall"]);
    assert_eq!(lines.iter().map(|line| line["epoch"].as_u64().unwrap()).collect::<Vec<_>>(), [2, 4]);
    assert_eq!(lines[1]["step"], report["steps"]);
    assert_eq!(lines[1]["eval/accuracy"], report["metrics"]["accuracy"]);
    assert_eq!(lines[1]["train/loss"], report["loss"]);
    assert!(lines[1]["train/lr"].is_number() && lines[1]["eval/loss"].is_number());
    let names = std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let events: Vec<String> = names.filter(|name| name.starts_with("events.out.tfevents.")).collect();
    assert_eq!(events.len(), 1);
    // Tags are in TensorBoard's file as they are, once per row.
    let bytes = std::fs::read(out.join(&events[0])).unwrap();
    let times = |tag: &str| bytes.windows(tag.len()).filter(|window| *window == tag.as_bytes()).count();
    assert_eq!(["step/loss", "step/lr", "train/loss", "step/grad_norm"].map(times), [4, 4, 2, 0]);
    assert!(std::fs::read(out.join("decision.png")).unwrap().starts_with(b"\x89PNG\r\n\x1a\n"));
}

#[test]
fn a_directory_holds_one_run() {
    let dir = tempdir();
    let job = example("playground");
    let words = ["train", &job, "--quiet", "--set", "train.epochs=1", "--out", "out"];
    stdout_of(dir.path(), &words);
    let out = dir.path().join("out");
    let before = std::fs::read(out.join("metrics.jsonl")).unwrap();
    std::fs::write(out.join("rank-3.log"), "old").unwrap();
    std::fs::write(out.join("notes.txt"), "mine").unwrap();
    // One process and several refuse alike, and leave everything as it is.
    for workers in ["1", "2"] {
        let refused = run_in(dir.path(), &[&words[..], &["-n", workers]].concat());
        assert_eq!(refused.status.code(), Some(2));
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(message.contains("out contains the files of another run"), "{message}");
        assert!(message.contains("--overwrite") && message.matches("error:").count() == 1, "{message}");
        assert_eq!(std::fs::read(out.join("metrics.jsonl")).unwrap(), before);
    }
    for workers in ["1", "2"] {
        stdout_of(dir.path(), &[&words[..], &["--overwrite", "-n", workers]].concat());
        let names = std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let names: Vec<String> = names.collect();
        assert_eq!(names.iter().filter(|name| name.starts_with("events.out")).count(), 1, "{names:?}");
        assert!(!names.contains(&"rank-3.log".into()), "{names:?}");
        assert_eq!(names.contains(&"rank-1.log".into()), workers == "2", "{names:?}");
    }
    // A run that goes on with fewer workers leaves no log of those that are gone.
    std::fs::write(out.join("rank-3.log"), "old").unwrap();
    for workers in ["2", "1"] {
        stdout_of(dir.path(), &[&words[..], &["--resume", "-n", workers]].concat());
        assert_eq!(out.join("rank-1.log").exists(), workers == "2");
        assert!(!out.join("rank-3.log").exists(), "-n {workers}");
    }
    assert_eq!(std::fs::read_to_string(out.join("notes.txt")).unwrap(), "mine");
}

#[test]
fn a_run_without_a_directory_gets_its_own() {
    let dir = tempdir();
    let job = example("playground");
    let words = ["train", &job, "--set", "train.epochs=1", "--set", "job.name=../x"];
    let said = stdout_of(dir.path(), &words);
    assert!(said.contains("runs/x-1"), "{said}");
    stdout_of(dir.path(), &[&words[..], &["-n", "2", "--quiet"]].concat());
    for name in ["x-1/metrics.jsonl", "x-1/report.json", "x-2/metrics.jsonl", "x-2/report.json"] {
        assert!(dir.path().join("runs").join(name).exists(), "{name}");
    }
    stdout_of(dir.path(), &[&words[..], &["--no-out"]].concat());
    // A job that does not begin leaves nothing behind.
    let refused = run_in(dir.path(), &[&words[..], &["--set", "model.inputs=3"]].concat());
    assert_eq!(refused.status.code(), Some(2));
    assert_eq!(std::fs::read_dir(dir.path().join("runs")).unwrap().count(), 2);
    // Where no directory can be made, training goes on.
    std::fs::remove_dir_all(dir.path().join("runs")).unwrap();
    std::fs::write(dir.path().join("runs"), "a file").unwrap();
    let output = run_in(dir.path(), &words);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("metrics are not saved"), "{output:?}");
}

#[test]
fn steps_are_logged_as_often_as_asked() {
    let dir = tempdir();
    let digits = example("digits");
    let words = ["train", &digits, "--set", "train.epochs=1", "--set", "train.log_every=5", "--no-out"];
    let said = stdout_of(dir.path(), &words);
    let rows: Vec<&str> = said.lines().filter(|line| line.contains("samples/s") && line.contains("rate")).collect();
    assert_eq!(rows.len(), 4, "{said}");
    assert!(rows.iter().all(|row| row.contains("  norm ") && row.contains("  step loss ")), "{said}");
    assert!(said.contains("confusion") && said.contains("  recall      0."), "{said}");
}

#[test]
#[cfg(unix)]
fn an_interrupt_ends_the_run_in_order() {
    let dir = tempdir();
    let job = example("playground");
    let mut child = Command::new(KOLO)
        .current_dir(dir.path())
        .args(["train", &job, "--quiet", "--set", "train.epochs=1000000", "--out", "out", "--report", "report.json"])
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    // The first line of metrics says that training is under way.
    let metrics = dir.path().join("out/metrics.jsonl");
    let begin = Instant::now();
    while std::fs::metadata(&metrics).map_or(0, |file| file.len()) == 0 && begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(20));
    }
    let kill = Command::new("sh").args(["-c", &format!("kill -INT {}", child.id())]).status().expect("a shell");
    assert!(kill.success());
    let begin = Instant::now();
    let status = loop {
        match child.try_wait().expect("a child") {
            Some(status) => break status,
            None if begin.elapsed() > PATIENCE => {
                let _ = child.kill();
                panic!("the run went on after an interrupt");
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    assert_eq!(status.code(), Some(130));
    let report = json_at(&dir.path().join("report.json"));
    assert_eq!(report["ended"], "interrupted");
    assert!(report["steps"].as_u64().unwrap() > 0);
    assert!(report["loss"].is_number());
    let text = std::fs::read_to_string(&metrics).unwrap();
    assert!(text.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()));
}

/// A job that says nothing of checkpoints, and a command that names no directory.
#[test]
fn an_interrupted_run_says_how_to_go_on() {
    const STEPS: &str = "train.steps=6000";
    let job = example("playground");
    for workers in ["1", "2"] {
        let dir = tempdir();
        let words = ["train", &job, "--threads", "1", "-n", workers, "--set", STEPS, "--set", "train.log_every=1"];
        let child =
            Command::new(KOLO).current_dir(dir.path()).args(words).stdout(Stdio::piped()).spawn().expect("the binary");
        let metrics = dir.path().join("runs/playground-1/metrics.jsonl");
        let begin = Instant::now();
        while std::fs::metadata(&metrics).map_or(0, |file| file.len()) == 0 && begin.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        let kill = Command::new("sh").args(["-c", &format!("kill -TERM {}", child.id())]).status().expect("a shell");
        assert!(kill.success());
        let output = child.wait_with_output().expect("a child");
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(143), "{text}");
        let told = "checkpoints in runs/playground-1: every 10 minutes, after each epoch that takes 60 s or more, \
                    and at the end; the newest 2 are kept";
        assert!(text.lines().take(3).any(|line| line == told), "{text}");
        let command = text.lines().find_map(|line| line.strip_prefix("go on with: ")).expect("a command");
        let resumed = Command::new("sh").current_dir(dir.path()).args(["-c", command]).output().expect("a shell");
        assert!(resumed.status.success(), "{command}: {}", String::from_utf8_lossy(&resumed.stderr));
        assert!(String::from_utf8_lossy(&resumed.stderr).contains("resuming after step "), "{command}");
        let whole = train(dir.path(), &job, &["--threads", "1", "--no-out", "--set", STEPS]);
        let report = json_at(&dir.path().join("runs/playground-1/report.json"));
        assert_eq!((&report["weights"], &report["ended"]), (&whole["weights"], &"done".into()));
    }
}

/// Every fold is the run that its keys describe, on any number of workers; and they are summed up.
#[test]
fn folds_are_runs_that_are_summed_up() {
    let (dir, job) = (tempdir(), example("playground"));
    let short = ["--threads", "1", "--set", "train.epochs=2"];
    let folded = |workers: &str, out: &str| {
        let words = [&["--folds", "3", "--out", out, "-n", workers], &short[..]].concat();
        train(dir.path(), &job, &words)
    };
    let all = folded("1", "cv");
    let of = |report: &Value| -> Vec<Value> {
        report["folds"].as_array().unwrap().iter().map(|row| row["weights"].clone()).collect()
    };
    assert_eq!(of(&folded("2", "cv-2")), of(&all));
    let mut accuracies = Vec::new();
    for (fold, row) in all["folds"].as_array().unwrap().iter().enumerate() {
        let keys = format!("data.fold={fold}");
        let words = [&["--no-out", "--set", "data.folds=3", "--set", &keys], &short[..]].concat();
        let own = train(dir.path(), &job, &words);
        assert_eq!((&row["weights"], &row["metrics"]["accuracy"]), (&own["weights"], &own["metrics"]["accuracy"]));
        assert_eq!((row["fold"].as_u64(), row["ended"].as_str()), (Some(fold as u64), Some("done")));
        accuracies.push(own["metrics"]["accuracy"].as_f64().unwrap());
        assert!(dir.path().join(format!("cv/fold-{fold}/checkpoints")).is_dir());
    }
    let mean = accuracies.iter().sum::<f64>() / 3.0;
    let deviation = (accuracies.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 2.0).sqrt();
    let near = |value: &Value, wanted: f64| (value.as_f64().unwrap() - wanted).abs() < 1e-12;
    assert!(near(&all["mean"]["accuracy"], mean) && near(&all["deviation"]["accuracy"], deviation), "{all:#}");
    assert_eq!(json_at(&dir.path().join("cv/folds.json")), all);
    // What is done stays so.
    let words = [&["train", &job, "--folds", "3", "--out", "cv", "--resume"], &short[..]].concat();
    let text = stdout_of(dir.path(), &words);
    let line = format!("  accuracy    {mean:.4} ± {deviation:.4}   {:.4} ", accuracies[0]);
    assert!(text.contains("\n3 folds: mean ± standard deviation, then each fold\n") && text.contains(&line), "{text}");
    assert_eq!(of(&json_at(&dir.path().join("cv/folds.json"))), of(&all));
    let refused = |words: &[&str]| {
        let words = [&["train", &job, "--folds", "3"], words].concat();
        let output = Command::new(KOLO).current_dir(dir.path()).args(words).output().expect("the binary runs");
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let named = refused(&["--set", "data.fold=1"]);
    assert!(named.starts_with("error: --set data.fold: `data.fold` names one fold, but --folds trains all"), "{named}");
    assert!(refused(&["--set", "data.folds=4"]).contains("`data.folds` is not the 3 of --folds"));
    assert!(refused(&["--trace", "t.json"]).contains("--trace is for one run"));
    assert!(refused(&["--out", "cv/fold-0"]).contains("contains the files of another run"));
}

/// The fold under way saves its state, no other one begins, and the command that is printed finishes all of them.
#[test]
fn interrupted_folds_go_on() {
    let (dir, job) = (tempdir(), example("playground"));
    let steps = ["--threads", "1", "--set", "train.steps=2000", "--set", "train.log_every=1"];
    let words = [&["train", &job, "--folds", "2"], &steps[..]].concat();
    let child =
        Command::new(KOLO).current_dir(dir.path()).args(&words).stdout(Stdio::piped()).spawn().expect("it runs");
    let out = dir.path().join("runs/playground-1");
    let begin = Instant::now();
    while !out.join("fold-0/metrics.jsonl").exists() && begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(5));
    }
    let kill = Command::new("sh").args(["-c", &format!("kill -TERM {}", child.id())]).status().expect("a shell");
    assert!(kill.success());
    let output = child.wait_with_output().expect("a child");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(143), "{text}");
    assert!(!out.join("fold-1").exists() && !out.join("folds.json").exists(), "{text}");
    let command = text.lines().find_map(|line| line.strip_prefix("all folds go on with: ")).expect("a command");
    let resumed = Command::new("sh").current_dir(dir.path()).args(["-c", command]).output().expect("a shell");
    assert!(resumed.status.success(), "{command}: {}", String::from_utf8_lossy(&resumed.stderr));
    let all = json_at(&out.join("folds.json"));
    let words = [&["--no-out", "--set", "data.folds=2", "--set", "data.fold=0"], &steps[..]].concat();
    assert_eq!(all["folds"][0]["weights"], train(dir.path(), &job, &words)["weights"]);
}

#[test]
fn threads_do_not_change_the_weights() {
    let dir = tempdir();
    let digest = |threads| {
        let report = train(dir.path(), &example("digits"), &["--set", "train.epochs=1", "--threads", threads]);
        report["weights"].as_str().unwrap().to_string()
    };
    let alone = digest("1");
    assert_eq!(digest("2"), alone);
    assert_eq!(digest("3"), alone);
}

#[test]
fn the_reference_trains_in_f64_and_comes_close() {
    let dir = tempdir();
    let job = "[model]\nkind = \"mlp\"\nhidden = [6]\n[data]\nsource = \"builtin:playground\"\nbatch = 32\ngrains = 4\n\
               [train]\nsteps = 20\n";
    std::fs::write(dir.path().join("job.toml"), job).expect("a job");
    let [cpu, reference] = ["cpu", "reference"].map(|device| {
        let report = train(dir.path(), "job.toml", &["--no-out", "--threads", "1", "--device", device]);
        assert_eq!(report["device"], device);
        report
    });
    assert_ne!(cpu["weights"], reference["weights"], "f64 rounds otherwise");
    let loss = |report: &Value| report["loss"].as_f64().expect("a loss");
    assert!((loss(&cpu) - loss(&reference)).abs() < 1e-4, "{} {}", cpu["loss"], reference["loss"]);
    let refused = run_in(dir.path(), &["train", "job.toml", "--no-out", "-n", "2", "--device", "reference"]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && message.contains("which runs one worker"), "{message}");
}

#[test]
fn a_reader_that_has_enough_ends_it_quietly() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = Command::new(KOLO).args(["graph", &example("digits")]).stdout(writer).output().expect("it ends");
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(141), ""));
}

#[test]
fn vector_widths_do_not_change_the_weights() {
    let dir = tempdir();
    let run = |job: &str, vectors: &str| {
        let args = ["train", job, "--quiet", "--report", "report.json", "--set", "train.steps=4"];
        Command::new(KOLO).current_dir(dir.path()).env("KOLO_VECTORS", vectors).args(args).output().expect("it runs")
    };
    let digest = |job: &str, vectors: &str| {
        let output = run(job, vectors);
        assert!(output.status.success(), "{vectors}: {}", String::from_utf8_lossy(&output.stderr));
        json_at(&dir.path().join("report.json"))["weights"].as_str().unwrap().to_string()
    };
    // One grain, and layers whose gradients take more memory than their factors: they are never stored.
    let wide = dir.path().join("wide.toml");
    let text = "[model]\nkind = \"mlp\"\ninputs = 75\nhidden = [83, 61]\nclasses = 10\n\
        [data]\nsource = \"synthetic:features\"\nbatch = 16\ngrains = 1\n\
        [train]\nsteps = 4\noptimizer = { kind = \"adamw\", lr = 1e-3 }\n";
    std::fs::write(&wide, text).expect("it is written");
    let widest = [&example("digits"), wide.to_str().expect("a path in UTF-8")].map(|job| {
        let widest = digest(job, "avx512");
        assert_eq!(digest(job, "avx2"), widest, "{job}");
        assert_eq!(digest(job, "portable"), widest, "{job}");
        widest
    });
    let printed =
        format!("train.steps=4`, and the same with `avx512`, both print\n`weights     {}…`", &widest[0][..19]);
    assert!(include_str!("../../../docs/guide.md").contains(&printed), "docs/guide.md does not say: {printed}");
    let refused = run(&example("digits"), "avx");
    assert_eq!(refused.status.code(), Some(2));
    let told = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(told, "error: KOLO_VECTORS=avx is not a vector width\n  hint: write one of portable, avx2, avx512\n");
}

/// `cargo test` builds the examples beside the binary; a narrower command may not have.
fn rust_example(name: &str) -> Option<PathBuf> {
    let path = Path::new(KOLO).with_file_name("examples").join(name);
    path.exists().then_some(path)
}

#[test]
fn the_library_example_finds_its_line() {
    let Some(path) = rust_example("library") else { return };
    let output = Command::new(path).output().expect("the example runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("\ny = 3.000 x + 0.500\n"), "{text}");
    assert!(text.contains("\n`x` is f32[8,1], not bool\n  hint: "), "{text}");
}

#[test]
fn a_model_of_ones_own_trains_like_any_other() {
    let Some(path) = rust_example("own_model") else { return };
    let dir = tempdir();
    let job = "[model]\nkind = \"two-tower\"\n[data]\nsource = \"builtin:digits\"\n[train]\nepochs = 10\n\
               optimizer = { kind = \"adamw\", lr = 3e-3 }\n";
    std::fs::write(dir.path().join("job.toml"), job).unwrap();
    let args = ["train", "job.toml", "--quiet", "--report", "report.json"];
    let output = Command::new(path).current_dir(dir.path()).args(args).output().expect("the example runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let accuracy = json_at(&dir.path().join("report.json"))["metrics"]["accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.93, "{accuracy}");
}

/// In mixed precision, too: a table feeds a recurrent layer, and its gradient comes back from there.
#[test]
fn layers_of_ones_own_models_train_in_any_precision() {
    let Some(path) = rust_example("own_layers") else { return };
    let dir = tempdir();
    let text = "[model]\nkind = \"gru-text\"\nlayers = 1\n[data]\nsource = \"builtin:addition\"\ndigits = 1\n\
                [train]\nsteps = 60\noptimizer = { kind = \"adamw\", lr = 1e-2 }\n";
    let images = "[model]\nkind = \"autoencoder\"\n[data]\nsource = \"builtin:digits\"\n[train]\n\
                  steps = 100\noptimizer = { kind = \"adamw\", lr = 1e-2 }\n";
    for (job, metric, least, most) in [(text, "accuracy", 0.3, 1.0), (images, "mse", 0.0, 0.05)] {
        std::fs::write(dir.path().join("job.toml"), job).unwrap();
        for precision in ["f32", "bf16", "f16"] {
            let precision = format!("train.precision={precision}");
            let args = ["train", "job.toml", "--quiet", "--no-out", "--report", "report.json", "--set", &precision];
            let output = run_own(&path, dir.path(), &args);
            assert!(output.status.success(), "{precision}: {}", String::from_utf8_lossy(&output.stderr));
            let reached = json_at(&dir.path().join("report.json"))["metrics"][metric].as_f64().unwrap();
            assert!((least..=most).contains(&reached), "{precision}: {metric} {reached}");
        }
    }
}

/// No key of the job says how many inputs and classes such a model has: the run remembers its data's.
#[test]
fn a_model_of_ones_own_is_used_with_the_shapes_of_its_data() {
    let Some(program) = rust_example("own_model") else { return };
    let dir = tempdir();
    let row = |at: usize| format!("{},{},{},{}\n", at % 4, at / 4 % 5, at % 7, ["a", "b", "c", "d"][at % 4]);
    let rows: String = (0..400).map(row).collect();
    std::fs::write(dir.path().join("train.csv"), format!("u,v,w,label\n{rows}")).unwrap();
    std::fs::write(dir.path().join("new.csv"), "u,v,w\n2,1,5\n0,3,6\n").unwrap();
    let job = "[model]\nkind = \"two-tower\"\n[data]\nsource = \"train.csv\"\n[train]\nepochs = 30\n\
               optimizer = { kind = \"adamw\", lr = 1e-2 }\n";
    std::fs::write(dir.path().join("job.toml"), job).unwrap();
    let own = |args: &[&str]| {
        let output = run_own(&program, dir.path(), args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    own(&["train", "job.toml", "--quiet", "--out", "run"]);
    let evaluated = own(&["eval", "run"]);
    assert!(evaluated.contains("80 samples, held-out\n"), "{evaluated}");
    // Neither the job's data nor its files are needed from here on.
    std::fs::remove_file(dir.path().join("train.csv")).unwrap();
    let predicted = own(&["predict", "run", "new.csv", "--quiet"]);
    let classes: Vec<&str> = predicted.lines().skip(1).filter_map(|line| line.split(',').nth(1)).collect();
    assert_eq!(classes, ["c", "a"], "{predicted}");
    own(&["ckpt", "export", "run", "model.safetensors"]);
    let again = own(&["predict", "run", "new.csv", "--quiet", "--format", "jsonl"]);
    assert!(again.contains("\"class\":\"c\""), "{again}");
}

/// A program of somebody's own, run here.
fn run_own(program: &Path, dir: &Path, args: &[&str]) -> Output {
    Command::new(program).current_dir(dir).args(args).output().expect("the example runs")
}

/// Two clouds of points in the format of the example; `count` stands in the header.
fn points(count: u32, written: u32) -> Vec<u8> {
    let mut file = b"PTS1".to_vec();
    file.extend(count.to_le_bytes());
    for at in 0..written {
        let class = at % 2;
        let spread = |salt: u32| (at.wrapping_mul(2_654_435_761).wrapping_add(salt * 97) >> 8 & 0xff) as f32 / 255.0;
        let centre = if class == 0 { -1.0 } else { 1.0 };
        [centre + spread(1), centre - spread(2)].iter().for_each(|value: &f32| file.extend(value.to_le_bytes()));
        file.extend(class.to_le_bytes());
    }
    file
}

const POINTS_JOB: &str = "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nsource = \"points\"\npath = \"a.points\"\n\
    batch = 32\ngrains = 4\n[train]\nepochs = 4\n";

#[test]
fn a_source_of_ones_own_trains_plans_and_is_listed() {
    let Some(program) = rust_example("own_source") else { return };
    let dir = tempdir();
    let own = |args: &[&str]| {
        let output = run_own(&program, dir.path(), args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    std::fs::write(dir.path().join("a.points"), points(800, 800)).unwrap();
    std::fs::write(dir.path().join("job.toml"), POINTS_JOB).unwrap();
    let train = |flags: &[&str]| {
        own(&[&["train", "job.toml", "--quiet", "--report", "report.json"], flags].concat());
        json_at(&dir.path().join("report.json"))
    };
    let alone = train(&["--trace", "trace.json"]);
    assert!(alone["metrics"]["accuracy"].as_f64().unwrap() > 0.9, "{alone}");
    assert_eq!(alone["loader"], serde_json::json!({ "batches": 2, "threads": 2 }), "what is read is read ahead");
    assert!(alone["data_wait_ms"]["median"].as_f64().unwrap() >= 0.0);
    assert_eq!(alone["weights"], train(&["-n", "2"])["weights"]);
    let trace = std::fs::read_to_string(dir.path().join("trace.json")).unwrap();
    assert!(trace.contains("\"data 0\"") && trace.contains("\"make samples\""), "loaders are on the timeline");
    assert!(own(&["list", "sources"]).contains("points                 points of the plane, from a file\n"));
    let plan: Value = serde_json::from_str(&own(&["plan", "job.toml", "--json"])).expect("JSON");
    // Three batches of 32 samples: two coordinates, a class, and the sample's number.
    assert_eq!(plan["memory"]["data"], 3 * 32 * (2 * 4 + 4 + 8));
}

/// Every command that reads the data says which file and where, and with several workers who it was.
#[test]
fn a_damaged_file_is_named_with_the_place_in_it() {
    let Some(program) = rust_example("own_source") else { return };
    let dir = tempdir();
    std::fs::write(dir.path().join("job.toml"), POINTS_JOB).unwrap();
    let fails = |args: &[&str], code: i32, words: &[&str]| {
        let output = run_own(&program, dir.path(), args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        assert_eq!(error.matches("error: ").count(), 1, "{args:?}: {error}");
        words.iter().for_each(|word| assert!(error.contains(word), "{args:?}: {word:?} is not in: {error}"));
        assert!(!error.contains("panicked"), "{error}");
    };
    let train = ["train", "job.toml", "--no-out", "--threads", "1"];
    fails(&train, 2, &["job.toml:6: `data.path` names a.points: No such file", "\n  hint: "]);
    std::fs::write(dir.path().join("a.points"), b"PTS2....").unwrap();
    fails(&train, 2, &["`data.path` names a.points: it does not begin with PTS1"]);
    // The header tells of 800 points, and only 500 are there.
    std::fs::write(dir.path().join("a.points"), points(800, 500)).unwrap();
    let short = ["cannot read sample ", " of \"points\": a.points, byte ", "copy it again"];
    fails(&train, 1, &[&short[..], &[" (epoch 1), and the weights were left as they were before it"]].concat());
    fails(&["plan", "job.toml", "--threads", "1"], 1, &short);
    fails(&["bench", "train", "job.toml", "--threads", "1"], 1, &short);
    // Of several workers, whoever compares the data first finds it.
    fails(&[&train[..], &["-n", "2"]].concat(), 1, &short);
    // One point has a class that there is not. It is none of the few that ranks compare, so it is found by the rank that
    // trains on it, and the other one ends with it.
    let mut file = points(800, 800);
    file[8 + 12 * 333 + 8] = 7;
    std::fs::write(dir.path().join("a.points"), file).unwrap();
    let odd = "cannot read sample 333 of \"points\": a.points, byte 4012: class 7 of a point";
    fails(&train, 1, &[odd]);
    fails(&[&train[..], &["-n", "2", "--set", "data.holdout=0"]].concat(), 1, &["rank ", " failed at step ", odd]);
}

fn small(model: &str, parallel: &str) -> String {
    format!(
        "[model]\nkind = \"{model}\"\n[data]\nsource = \"builtin:digits\"\ngrains = 4\n[train]\nsteps = 60\n\
         optimizer = {{ kind = \"adamw\", lr = 3e-3 }}\n[parallel]\n{parallel}\n"
    )
}

#[test]
fn an_op_of_ones_own_is_in_graphs_plans_and_lists() {
    let Some(program) = rust_example("own_op") else { return };
    let dir = tempdir();
    let own = |args: &[&str]| {
        let output = run_own(&program, dir.path(), args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    std::fs::write(dir.path().join("job.toml"), small("softsign-mlp", "")).unwrap();
    own(&["train", "job.toml", "--quiet", "--report", "report.json"]);
    let report = json_at(&dir.path().join("report.json"));
    assert!(report["metrics"]["accuracy"].as_f64().unwrap() > 0.7, "{report}");
    own(&["train", "job.toml", "--quiet", "--report", "together.json", "-n", "2"]);
    assert_eq!(report["weights"], json_at(&dir.path().join("together.json"))["weights"]);
    assert!(own(&["graph", "job.toml", "--set", "model.sharpness=2.5"]).contains("softsign"));
    assert!(own(&["plan", "job.toml"]).contains("parameters"));
    assert!(own(&["list", "ops"]).lines().any(|line| line.starts_with("softsign")));
    let wrong = run_own(&program, dir.path(), &["plan", "job.toml", "--set", "model.sharpness=-1"]);
    assert_eq!(wrong.status.code(), Some(2));
    let error = String::from_utf8_lossy(&wrong.stderr);
    assert!(error.contains("`model.sharpness` must lie between 0 and 100"), "{error}");
}

#[test]
fn a_strategy_of_ones_own_keeps_the_weights() {
    let Some(program) = rust_example("own_strategy") else { return };
    let dir = tempdir();
    let own = |args: &[&str]| {
        let output = run_own(&program, dir.path(), args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    let job = |parallel: &str| std::fs::write(dir.path().join("job.toml"), small("mlp", parallel)).unwrap();
    job("");
    let alone = train(dir.path(), "job.toml", &[]);
    job("at_once = true");
    own(&["train", "job.toml", "--quiet", "--report", "own.json", "-n", "2"]);
    let together = json_at(&dir.path().join("own.json"));
    assert_eq!(alone["weights"], together["weights"]);
    assert_eq!(together["layout"]["at_once"], 1, "{together}");
    // One exchange of all gradients, and one of the loss.
    assert_eq!(own(&["graph", "job.toml", "-n", "2"]).matches("= all_reduce").count(), 2);
    assert!(own(&["plan", "job.toml", "-n", "2"]).contains("parameters"));
    assert!(own(&["list", "strategies"]).contains("at_once      data parallelism with one exchange of all gradients"));
    let fails = |parallel: &str, word: &str| {
        job(parallel);
        let output = run_own(&program, dir.path(), &["train", "job.toml", "-n", "2"]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(word) && error.contains("hint: "), "{error}");
    };
    fails("at_once = true\nzero = 1", "`parallel.at_once = true`");
    fails("at_ones = true", "did you mean `at_once`?");
    // kolo itself does not know it.
    job("at_once = true");
    assert_eq!(run_in(dir.path(), &["train", "job.toml"]).status.code(), Some(2));
}

/// A text of a few hundred lines that is never the same twice.
fn small_text() -> String {
    let (animals, places) = (["cat", "dog", "bird"], ["house", "garden", "forest", "river"]);
    let line = |at: usize| {
        let (animal, other, place) = (animals[at % 3], animals[at / 3 % 3], places[at / 9 % 4]);
        format!("On day {at} the {animal} met the {other} in the {place}, and they were friends.\n")
    };
    (0..400).map(line).collect()
}

#[test]
fn text_becomes_a_tokenizer_a_token_file_and_a_model() {
    let dir = tempdir();
    let at = |name: &str| dir.path().join(name);
    std::fs::write(at("stories.txt"), small_text()).expect("a text");
    let trained =
        stdout_of(dir.path(), &["data", "tokens", "train", "--vocab", "320", "--out", "tok.json", "stories.txt"]);
    assert_eq!(trained, "tok.json: 320 tokens, from 27.6 k bytes of text\n");
    let apply = ["data", "tokens", "apply", "--tokenizer", "tok.json", "--out", "stories.bin", "stories.txt"];
    let applied = stdout_of(dir.path(), &apply);
    assert!(applied.starts_with("stories.bin: ") && applied.contains(" tokens of u16, from 27.6 k bytes"), "{applied}");
    let described = json_at(&at("stories.bin.json"));
    let count = described["count"].as_u64().expect("a count");
    assert_eq!(std::fs::metadata(at("stories.bin")).expect("a file").len(), 2 * count);
    assert_eq!((&described["vocab"], &described["tokenizer"]), (&320.into(), &"tok.json".into()));
    // The example trains on it, here a smaller model.
    let smaller = ["model.width=32", "data.context=16", "data.batch=16", "train.steps=40", "train.schedule.warmup=5"];
    let mut args = vec!["--no-out"];
    smaller.iter().for_each(|change| args.extend(["--set", change]));
    let report = train(dir.path(), &example("text"), &args);
    let loss = report["loss"].as_f64().expect("a loss");
    assert!(loss < 5.5, "{loss}, where all of 320 tokens alike would give 5.77");
    continues_with_its_own_tokenizer(dir.path(), &smaller);
    // Bytes need no tokenizer; errors name file and place, and leave what was there.
    let bytes = stdout_of(dir.path(), &["data", "tokens", "apply", "--out", "bytes.bin", "*.txt", "--quiet"]);
    assert_eq!((bytes.as_str(), json_at(&at("bytes.bin.json"))["vocab"].as_u64()), ("", Some(256)));
    std::fs::write(at("broken.txt"), b"good\xffbad").expect("a text");
    let again = ["data", "tokens", "apply", "--out", "bytes.bin", "broken.txt", "--overwrite"];
    let output = run_in(dir.path(), &again);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(error.starts_with("error: broken.txt: byte 4: this is not UTF-8 text\n  hint: "), "{error}");
    assert_eq!(json_at(&at("bytes.bin.json"))["count"].as_u64(), Some(small_text().len() as u64));
    let refused = |args: &[&str], name: &str| {
        let output = run_in(dir.path(), args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.starts_with(&format!("error: {name} already exists\n  hint: ")), "{error}");
    };
    refused(&again[..6], "bytes.bin");
    refused(&["data", "tokens", "train", "--vocab", "300", "--out", "tok.json", "stories.txt"], "tok.json");
    std::fs::remove_file(at("bytes.bin")).expect("a file");
    refused(&again[..6], "bytes.bin.json");
}

/// A run keeps its tokenizer, whether its data are tokens or text; another one is refused.
fn continues_with_its_own_tokenizer(dir: &Path, smaller: &[&str]) {
    let elsewhere = tempdir();
    let sets: Vec<&str> = smaller.iter().flat_map(|change| ["--set", change]).collect();
    let text = ["--set", "data.source=stories.txt", "--set", "data.tokenizer=tok.json"];
    let generate = |dir: &Path, run: &str, more: &[&str]| {
        let words = ["generate", run, "--prompt", "The old", "--tokens", "12", "--quiet"];
        run_in(dir, &[&words[..], more].concat())
    };
    let said = |output: std::process::Output| {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let job = example("text");
    stdout_of(
        dir,
        &[&["data", "tokens", "train", "--vocab", "300", "--out", "other.json", "stories.txt"][..]].concat(),
    );
    for (run, more) in [("of-tokens", &[][..]), ("of-text", &text)] {
        stdout_of(dir, &[&["train", &job, "--out", run, "--quiet"], &sets[..], more].concat());
        let expected = said(generate(dir, run, &["--tokenizer", "tok.json"]));
        assert_eq!(said(generate(dir, run, &[])), expected, "{run}");
        let whole = dir.join(run).display().to_string();
        assert_eq!(said(generate(elsewhere.path(), &whole, &[])), expected, "{run}");
        let refused = generate(dir, run, &["--tokenizer", "other.json"]);
        let error = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(2), "{error}");
        assert!(error.contains("it is not the tokenizer that the model was trained with"), "{error}");
        // Text that is new to it becomes the same tokens; others are refused.
        std::fs::copy(dir.join("stories.txt"), elsewhere.path().join("new.txt")).expect("a copy");
        stdout_of(elsewhere.path(), &["predict", &whole, "new.txt", "--out", run, "--quiet"]);
        let lines = std::fs::read_to_string(elsewhere.path().join(run)).expect("predictions").lines().count();
        let bytes = small_text().len() / 16;
        assert!(lines > 10 && lines < bytes, "{lines} windows, where bytes would give {bytes}");
    }
}

/// Rerun, two workers on one GPU, the optimizer in the host's memory, and everything computed again: one digest.
#[test]
fn a_gpu_gives_one_digest_however_it_is_used() {
    if kolo_cuda::devices().map_or(true, |devices| devices.is_empty()) {
        return println!("skipped: no CUDA device");
    }
    let dir = tempdir();
    let digest = |args: &[&str]| {
        let job = example("addition");
        let all = [&["--device", "cuda", "--set", "train.epochs=1", "--set", "train.precision=bf16"], args].concat();
        train(dir.path(), &job, &all)["weights"].as_str().expect("a digest").to_string()
    };
    let first = digest(&[]);
    let (offload, stream) = ("memory.offload=optimizer", "memory.offload=weights");
    for args in [
        &[][..],
        &["-n", "2"],
        &["--set", offload],
        &["--set", offload, "-n", "2", "--set", "parallel.zero=1"],
        &["--set", offload, "--set", "memory.recompute=blocks"],
        &["--set", stream],
        &["--set", stream, "-n", "2", "--set", "parallel.zero=1"],
        &["--set", stream, "-n", "2", "--set", "parallel.zero=3"],
        &["--set", stream, "--set", "memory.recompute=blocks"],
    ] {
        assert_eq!(digest(args), first, "{args:?}");
    }
}

/// Runs a shell's words in a directory, in which `$0` is the binary.
fn shell(dir: &Path, words: &str) -> Output {
    Command::new("sh").current_dir(dir).args(["-c", words, KOLO]).output().expect("a shell")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_name_cannot_look_like_a_message() {
    let dir = tempdir();
    let name = "a\nerror: all is lost\n  hint: give up";
    let job = format!("[model]\nkind = \"mlp\"\n[data]\nsource = '''{name}.csv'''\n");
    std::fs::write(dir.path().join("job.toml"), &job).unwrap();
    std::fs::write(dir.path().join(format!("{name}.csv")), "a,b\n1,2\nx,y,z\n").unwrap();
    std::fs::write(dir.path().join(format!("{name}.toml")), "[model]\nkind = 3\n").unwrap();
    let commands: [&[&str]; 6] = [
        &["train", "job.toml"],
        &["train", "job.toml", "--set", &format!("data.source={name}-that-is-missing.csv")],
        &["train", &format!("{name}.toml")],
        &["train", &format!("{name}-that-is-missing.toml")],
        &["ckpt", "ls", name],
        &["eval", name],
    ];
    for command in commands {
        let output = run_in(dir.path(), command);
        let said = stderr(&output);
        assert!(!output.status.success(), "{command:?}: {said}");
        assert_eq!(said.lines().filter(|line| line.starts_with("error:")).count(), 1, "{command:?}: {said}");
        assert!(said.starts_with("error: "), "{command:?}: {said}");
    }
    let missing = run_in(dir.path(), &["train", &format!("{name}-that-is-missing.toml")]);
    let shown = r"error: a\u000aerror: all is lost\u000a  hint: give up-that-is-missing.toml: job file not found";
    assert!(stderr(&missing).starts_with(shown), "{}", stderr(&missing));
}

/// Nobody is at the other end, and nothing waits for somebody.
#[test]
fn pipes_are_refused_where_files_are_expected() {
    let dir = tempdir();
    let job = example("playground");
    let words = ["train", &job, "--quiet", "--set", "train.epochs=1", "--out", "run"];
    stdout_of(dir.path(), &words);
    let pipe = |name: &str| {
        let _ = std::fs::remove_file(dir.path().join(name));
        assert!(Command::new("mkfifo").arg(dir.path().join(name)).status().expect("mkfifo").success());
    };
    ["pipe", "run/metrics.jsonl"].into_iter().for_each(pipe);
    std::fs::create_dir(dir.path().join("elastic")).unwrap();
    pipe("elastic/join");
    let resume = [&words[..], &["--resume", "--set", "train.epochs=2"]].concat();
    let commands: [&[&str]; 4] = [&["train", "pipe"], &["plan", "--calibrate", "pipe"], &["join", "elastic"], &resume];
    for command in commands {
        let output = run_in(dir.path(), command);
        assert!(
            !output.status.success() && stderr(&output).contains("it is not a regular file"),
            "{}",
            stderr(&output)
        );
    }
    // What a shell opens is read once, by one process.
    std::fs::copy(&job, dir.path().join("job.toml")).unwrap();
    let piped = |more: &str| {
        shell(
            dir.path(),
            &format!("cat job.toml | \"$0\" train /dev/stdin --quiet --no-out --set train.epochs=1 {more}"),
        )
    };
    assert!(piped("").status.success(), "{}", stderr(&piped("")));
    let refused = piped("-n 2");
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).starts_with("error: /dev/stdin: this job file can be read once"), "{}", stderr(&refused));
}

#[test]
fn a_directory_must_have_a_name_in_utf8() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempdir();
    let out = std::ffi::OsStr::from_bytes(b"out-\xff");
    let mut command = Command::new(KOLO);
    command.current_dir(dir.path()).args(["train", &example("playground"), "--out"]).arg(out);
    let output = command.output().expect("the binary runs");
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
    assert!(
        stderr(&output).contains("the name is not UTF-8 text\n  hint: name another directory"),
        "{}",
        stderr(&output)
    );
    assert!(!dir.path().join(out).exists());
}

/// The system's own way to end a process at a limit leaves nothing but a core dump.
#[test]
fn limits_of_the_system_are_told() {
    let dir = tempdir();
    let job = example("playground");
    let output =
        shell(dir.path(), &format!("ulimit -f 2; \"$0\" train {job} --quiet --out small --set train.epochs=1"));
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("File too large") && said.contains("(`ulimit -f`)"), "{said}");
    let long = "--set train.epochs=1000000 --set train.eval_every=1000000";
    let output = shell(dir.path(), &format!("ulimit -St 1; \"$0\" train {job} {long} --out long"));
    let said = stderr(&output);
    assert!(said.contains("stopping after this step: the limit on processor time (`ulimit -t`) is reached"), "{said}");
    assert_eq!(json_at(&dir.path().join("long/report.json"))["ended"], "interrupted");
    assert!(output.status.code().is_some(), "{:?}", output.status);
}
