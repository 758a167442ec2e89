//! Damaged files of every format: a few hundred of each. `cargo run --release -p kolo-data --example fuzz` tries millions.

mod fuzz;

use fuzz::corpus::find;
use fuzz::{Bench, Outcome};
use std::path::Path;

const INPUTS: u64 = 300;

#[test]
fn damaged_files_of_every_format_end_in_records_or_errors() {
    let mut findings = Vec::new();
    for corpus in find(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files")) {
        let name = corpus.format.name;
        if corpus.samples.is_empty() {
            eprintln!("{name}: no test files");
            continue;
        }
        let directory = tempfile::tempdir().unwrap();
        let bench = Bench::new(&corpus, directory.path());
        let (mut read, mut refused) = (0, 0);
        for input in 0..INPUTS {
            match bench.run(input) {
                Outcome::Read(..) => read += 1,
                Outcome::Refused => refused += 1,
                Outcome::Finding(what) => findings.push(format!("{name}, input {input}: {what}")),
            }
        }
        eprintln!("{name}: {read} read, {refused} refused");
    }
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}
