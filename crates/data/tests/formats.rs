//! Damaged files of every format: a few hundred of each, and files that are made to take all memory. `cargo run --release -p kolo-data --example fuzz` tries millions.

mod fuzz;

use fuzz::corpus::find;
use fuzz::hostile::{self, Column, Hostile, bound_memory};
use fuzz::{Bench, Outcome};
use kolo_data::files::DataFile;
use kolo_data::format::named;
use kolo_data::record::{Record, RecordValue};
use kolo_graph::settings::Settings;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

const INPUTS: u64 = 300;

/// Opens the file and reads its first record; the error of one of them.
fn refusal(file: &Hostile, directory: &Path) -> String {
    let path = directory.join(file.name);
    std::fs::write(&path, &file.bytes).unwrap();
    match (named(file.format).unwrap().open)(&[DataFile::at(&path).unwrap()], &Settings::new("data", "test")) {
        Ok(reader) => reader.read(0, &mut Record::new()).unwrap_err().to_string(),
        Err(error) => error.to_string(),
    }
}

/// Programs with bounded memory are tested one after the other.
static ALONE: Mutex<()> = Mutex::new(());

fn check_refused(files: &[Hostile]) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    bound_memory();
    let directory = tempfile::tempdir().unwrap();
    // A build may leave formats out.
    for file in files.iter().filter(|file| named(file.format).is_some()) {
        let error = refusal(file, directory.path());
        assert!(error.contains(file.name) && error.contains(file.error), "{}: {error}", file.name);
        assert!(error.contains(", byte ") || error.contains(": byte "), "{}: {error}", file.name);
    }
}

#[test]
fn small_files_that_claim_huge_things_are_refused() {
    check_refused(&hostile::files());
}

/// What makes hostile files makes whole ones as well.
#[test]
fn small_dictionaries_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("words.arrow");
    std::fs::write(&path, hostile::compressed_dictionaries(3, 100)).unwrap();
    let Some(format) = named("arrow") else { return };
    let reader = (format.open)(&[DataFile::at(&path).unwrap()], &Settings::new("data", "test")).unwrap();
    let mut record = Record::new();
    reader.read(0, &mut record).unwrap();
    assert_eq!(record.value(0), &RecordValue::Text("\0".repeat(100)));
}

#[test]
fn pages_do_not_decompress_to_more_than_they_claim() {
    const MEMBER_BYTES: usize = 1 << 20;
    let mut member = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    member.write_all(&vec![0; MEMBER_BYTES]).unwrap();
    // A stream may have many members: more than 600 MiB in all.
    let page = hostile::page(4, 1, 0, &member.finish().unwrap().repeat(600));
    let bytes = hostile::parquet(1, &[Column::new(hostile::INT32, 1, 4).compressed(2)], &page);
    let error = ": a page decompresses to more than the 4 bytes it claims";
    check_refused(&[Hostile { name: "gzip.parquet", format: "parquet", bytes, error }]);
}

#[test]
fn columns_and_dictionaries_share_one_memory_budget() {
    const BYTES: usize = 400 << 20;
    let mut page = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
    std::io::copy(&mut std::io::repeat(0).take(BYTES as u64), &mut page).unwrap();
    let values = (BYTES / 4) as i64;
    let page = hostile::page(BYTES as i64, values, 0, &page.finish().unwrap());
    let columns: Vec<Column> = (0..5).map(|_| Column::new(hostile::INT32, values, 4).compressed(6)).collect();
    let bytes = hostile::parquet(values, &columns, &page);
    let error = "byte 4: its columns take more than 1073741824 bytes of memory at once";
    let columns = Hostile { name: "columns.parquet", format: "parquet", bytes, error };
    let bytes = hostile::empty_texts(5, 1 << 26);
    let lengths = Hostile { name: "lengths.parquet", format: "parquet", bytes, error };
    let bytes = hostile::compressed_dictionaries(5, BYTES);
    let error = "its dictionaries take more than 1073741824 bytes";
    check_refused(&[columns, lengths, Hostile { name: "dictionaries.arrow", format: "arrow", bytes, error }]);
}

#[test]
fn damaged_files_of_every_format_end_in_records_or_errors() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    bound_memory();
    let mut findings = Vec::new();
    for corpus in find(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files")) {
        let name = corpus.format.name;
        assert!(!corpus.samples.is_empty(), "{name} has no test files");
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
