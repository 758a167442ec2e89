//! Feeds damaged files to every reader, as many as you like:
//!
//! ```text
//! cargo run --release -p kolo-data --example fuzz -- --inputs 1000000 [--format csv] [--first 0]
//! ```
//!
//! Inputs are made from the test files by number, so a finding is repeated with `--first NUMBER --inputs 1`. They are read in
//! a child process with bounded memory: one that ends the process (a signal, memory) or takes too long is found too, and the
//! search goes on behind it. Damaged files of findings are kept in `target/fuzz`.

#[path = "../tests/fuzz/mod.rs"]
mod fuzz;

use fuzz::corpus::{Corpus, find};
use fuzz::hostile::bound_memory;
use fuzz::{Bench, Outcome};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

const INPUT_TIME_MAX: Duration = Duration::from_secs(10);
const FINDINGS_MAX: usize = 20;

struct Arguments {
    inputs: u64,
    first: u64,
    format: Option<String>,
    /// In a child: where it notes the input that it works on.
    status: Option<PathBuf>,
}

fn arguments() -> Result<Arguments, String> {
    let mut found = Arguments { inputs: 10_000, first: 0, format: None, status: None };
    let mut words = std::env::args().skip(1);
    while let Some(key) = words.next() {
        let value = words.next().ok_or(format!("{key} needs a value"))?;
        let number = || value.parse().map_err(|_| format!("{key} needs a number, not {value}"));
        match key.as_str() {
            "--inputs" => found.inputs = number()?,
            "--first" => found.first = number()?,
            "--format" => found.format = Some(value),
            "--status" => found.status = Some(value.into()),
            _ => return Err(format!("{key} is not known; there are --inputs, --first and --format")),
        }
    }
    Ok(found)
}

fn corpora(format: Option<&str>) -> Vec<Corpus> {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files");
    // A program that was copied to another machine finds them below the directory where it is started.
    let mut corpora = find(if built.is_dir() { &built } else { Path::new("crates/data/tests/files") });
    corpora.retain(|corpus| format.is_none_or(|format| format == corpus.format.name));
    corpora
}

/// A directory in memory, if there is one: a million files are written.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Reads inputs, and says on standard output what it found.
fn child(arguments: &Arguments, status: &Path) {
    bound_memory();
    std::panic::set_hook(Box::new(|_| {}));
    let corpus = corpora(arguments.format.as_deref()).pop().unwrap();
    let directory = scratch();
    let bench = Bench::new(&corpus, directory.path());
    let status = std::fs::OpenOptions::new().write(true).open(status).unwrap();
    let (mut read, mut refused) = (0_u64, 0_u64);
    for input in arguments.first..arguments.first + arguments.inputs {
        status.write_all_at(&input.to_le_bytes(), 0).unwrap();
        match bench.run(input) {
            Outcome::Read(..) => read += 1,
            Outcome::Refused => refused += 1,
            Outcome::Finding(what) => println!("finding {input} {}", what.replace('\n', " ")),
        }
    }
    println!("done {read} {refused}");
}

/// What one child came to: its counts, its findings, and the input at which it ended, if it did not get through.
struct Outcomes {
    read: u64,
    refused: u64,
    findings: Vec<(u64, String)>,
    ended_at: Option<(u64, String)>,
}

/// Runs a child over the inputs from `first` on, and watches it.
fn run_child(format: &str, first: u64, inputs: u64) -> Outcomes {
    let status = tempfile::NamedTempFile::new().unwrap();
    status.as_file().write_all_at(&first.to_le_bytes(), 0).unwrap();
    let output = tempfile::NamedTempFile::new().unwrap();
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--format", format, "--first", &first.to_string(), "--inputs", &inputs.to_string()])
        .arg("--status")
        .arg(status.path())
        .stdout(output.reopen().unwrap())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let current = || {
        let mut bytes = [0; 8];
        status.as_file().read_exact_at(&mut bytes, 0).unwrap();
        u64::from_le_bytes(bytes)
    };
    let (mut last, mut since, mut too_long) = (current(), Instant::now(), false);
    let end = loop {
        if let Some(end) = process.try_wait().unwrap() {
            break end;
        }
        std::thread::sleep(Duration::from_millis(20));
        if current() != last {
            (last, since) = (current(), Instant::now());
        } else if since.elapsed() > INPUT_TIME_MAX && !too_long {
            too_long = true;
            process.kill().unwrap();
        }
    };
    let mut outcomes = Outcomes { read: 0, refused: 0, findings: Vec::new(), ended_at: None };
    for line in std::fs::read_to_string(output.path()).unwrap().lines() {
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        let (number, text) = rest.split_once(' ').unwrap_or((rest, ""));
        match (kind, number.parse()) {
            ("finding", Ok(number)) => outcomes.findings.push((number, text.into())),
            ("done", Ok(read)) => (outcomes.read, outcomes.refused) = (read, text.parse().unwrap_or(0)),
            _ => {}
        }
    }
    if !end.success() {
        let why = if too_long { format!("it took longer than {INPUT_TIME_MAX:?}") } else { format!("{end}") };
        outcomes.ended_at = Some((current(), why));
    }
    outcomes
}

fn keep(corpus: &Corpus, input: u64) -> PathBuf {
    let (sample, file, bytes) = corpus.input(input);
    let directory = Path::new("target/fuzz").join(corpus.format.name);
    let path = directory.join(format!("{input}-{}", sample.files[file].0.display().to_string().replace('/', "_")));
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Tries one format; the number of findings.
fn search(corpus: &Corpus, arguments: &Arguments) -> usize {
    let name = corpus.format.name;
    if corpus.samples.is_empty() {
        println!("{name}: no test files");
        return 0;
    }
    let (mut first, end) = (arguments.first, arguments.first + arguments.inputs);
    let (mut read, mut refused, mut findings) = (0, 0, 0);
    let begun = Instant::now();
    let mut report = |input: u64, what: &str| {
        findings += 1;
        println!("{name}, input {input}: {what}\n  kept as {}", keep(corpus, input).display());
        let _ = std::io::stdout().flush();
        findings
    };
    while first < end {
        // In portions, so that an early finding is seen early.
        let portion = (end - first).min(50_000);
        let outcomes = run_child(name, first, portion);
        (read, refused) = (read + outcomes.read, refused + outcomes.refused);
        let mut count = 0;
        for (input, what) in &outcomes.findings {
            count = report(*input, what);
        }
        first = match outcomes.ended_at {
            None => first + portion,
            Some((input, why)) => {
                count = report(input, &format!("the process ended: {why}"));
                input + 1
            }
        };
        if count >= FINDINGS_MAX {
            break;
        }
    }
    let tried = first - arguments.first;
    let rate = tried as f64 / begun.elapsed().as_secs_f64();
    println!("{name}: {tried} inputs, {read} read, {refused} refused, {findings} findings, {rate:.0} inputs/s");
    findings
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    if let Some(status) = &arguments.status {
        child(&arguments, status);
        return ExitCode::SUCCESS;
    }
    let corpora = corpora(arguments.format.as_deref());
    if corpora.is_empty() {
        eprintln!("there is no format named {}", arguments.format.unwrap_or_default());
        return ExitCode::from(2);
    }
    let findings: usize = corpora.iter().map(|corpus| search(corpus, &arguments)).sum();
    if findings == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
