//! `kolo data convert`: the same records in another format.

use super::open::{Input, open};
use crate::fail::Failure;
use crate::output::println;
use crate::progress::Bar;
use crate::whole_file::WholeFile;
use clap::Args;
use kolo_base::ShownPath;
use kolo_data::ReadError;
use kolo_data::format::Reader;
use kolo_data::formats::tokens::Description;
use kolo_data::inspect::shown_name;
use kolo_data::record::{Record, RecordColumn, RecordKind, RecordValue};
use kolo_data::writer::{self, WriteError};
use kolo_train::machine::{format_bytes, format_count};
use std::path::{Path, PathBuf};
use std::time::Instant;

#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// A file, a directory or a pattern
    pub from: String,
    /// The file to write: .csv .tsv .jsonl .npy .npz .bin .tar .tfrecord
    pub to: PathBuf,
    #[command(flatten)]
    pub input: Input,
    /// The format to write, if the ending does not say it
    #[arg(long = "to", value_name = "FORMAT")]
    pub to_format: Option<String>,
    /// Columns to keep, in this order; all by default
    #[arg(long, value_delimiter = ',')]
    pub columns: Vec<String>,
    /// Replace the file if it is there
    #[arg(long)]
    pub overwrite: bool,
}

/// Some columns of a reader.
#[derive(Debug)]
struct Chosen {
    reader: Box<dyn Reader>,
    columns: Vec<RecordColumn>,
    places: Vec<usize>,
}

impl Reader for Chosen {
    fn columns(&self) -> &[RecordColumn] {
        &self.columns
    }

    fn len(&self) -> usize {
        self.reader.len()
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        let mut whole = Record::new();
        self.reader.read(at, &mut whole)?;
        for (to, from) in self.places.iter().enumerate() {
            match whole.value(*from) {
                RecordValue::Bytes(values) => record.bytes(to).extend(values),
                RecordValue::Text(text) => record.text(to).push_str(text),
                RecordValue::Reals(values) => record.reals(to).extend(values),
                RecordValue::Ints(values) => record.ints(to).extend(values),
                RecordValue::Missing => record.missing(to),
            }
        }
        Ok(())
    }

    fn place(&self, at: usize) -> Option<(PathBuf, u64)> {
        self.reader.place(at)
    }
}

fn chosen(reader: Box<dyn Reader>, names: &[String]) -> Result<Box<dyn Reader>, Failure> {
    let unread = |name: &str, kind: &str| {
        let message =
            format!("the column \"{}\" has the type {}, which is not read", shown_name(name), shown_name(kind));
        Failure::usage(message, "name the columns to keep with --columns")
    };
    let all = reader.columns();
    if names.is_empty() {
        if let Some(column) = reader.unread().first() {
            return Err(unread(&column.name, &column.kind));
        }
        // The new file would have it as a column like any other.
        let places: Vec<usize> = (0..all.len()).filter(|at| !reader.is_index(*at)).collect();
        if places.len() == all.len() {
            return Ok(reader);
        }
        let columns = places.iter().map(|at| all[*at].clone()).collect();
        return Ok(Box::new(Chosen { reader, columns, places }));
    }
    let place = |(number, name): (usize, &String)| {
        let shown = shown_name(name);
        if names[..number].contains(name) {
            return Err(Failure::usage(format!("--columns: `{shown}` is named twice"), "name each column once"));
        }
        let mut places = (0..all.len()).filter(|at| all[*at].name == *name);
        match (places.next(), places.next()) {
            (Some(place), None) => Ok(place),
            (Some(_), Some(_)) => {
                let message = format!("--columns: two columns are called `{shown}`");
                Err(Failure::usage(message, "rename one of them where the files were made, or choose others"))
            }
            (None, _) => Err(match reader.unread().iter().find(|column| column.name == *name) {
                Some(column) => unread(&column.name, &column.kind),
                None => {
                    let known: Vec<String> = all.iter().map(|column| shown_name(&column.name)).collect();
                    let hint = format!("the columns are {}", known.join(", "));
                    Failure::usage(format!("--columns: there is no `{shown}`"), &hint)
                }
            }),
        }
    };
    let places: Vec<usize> = names.iter().enumerate().map(place).collect::<Result<_, _>>()?;
    let columns = places.iter().map(|at| all[*at].clone()).collect();
    Ok(Box::new(Chosen { reader, columns, places }))
}

/// Refuses to write over what is there, unless that was asked for.
pub fn check_absent(path: &Path, overwrite: bool) -> Result<(), Failure> {
    match overwrite || !path.exists() {
        true => Ok(()),
        false => {
            let message = format!("{} already exists", path.shown());
            Err(Failure::usage(message, "choose another name, or add --overwrite"))
        }
    }
}

fn io_failure(path: &Path, error: &std::io::Error) -> Failure {
    Failure::job(format!("{}: {error}", path.shown()), "choose a writable path")
}

pub fn convert(args: &ConvertArgs) -> Result<(), Failure> {
    let failed = |error: WriteError| match error {
        WriteError::Read(error) => kolo_train::Error::from(error.without_skipping()).into(),
        WriteError::Unfit { message, hint } => Failure::usage(message, &hint),
        WriteError::Io(error) => io_failure(&args.to, &error),
    };
    let kind = writer::choose(args.to_format.as_deref(), &args.to).map_err(failed)?;
    check_absent(&args.to, args.overwrite)?;
    // It would say of the new file what was true of an earlier one.
    let description = (kind.name == "tokens").then(|| Description::path(&args.to)).filter(|path| path.exists());
    if let Some(path) = &description {
        check_absent(path, args.overwrite)?;
    }
    let opened = open(std::slice::from_ref(&args.from), &args.input, &args.columns)?;
    let notes = opened.notes;
    let reader = chosen(opened.reader, &args.columns)?;
    let begin = Instant::now();
    let target = WholeFile::create(&args.to).map_err(|error| io_failure(&args.to, &error))?;
    let file = target.handle().map_err(|error| io_failure(&args.to, &error))?;
    let bar = Bar::new(reader.len(), "records");
    writer::convert(&*reader, kind, &args.to, file, &mut |done| bar.tell(done)).map_err(failed)?;
    bar.finish();
    if let Some(path) = &description {
        std::fs::remove_file(path).map_err(|error| io_failure(path, &error))?;
    }
    let bytes = target.finish().map_err(|error| io_failure(&args.to, &error))?;
    let seconds = begin.elapsed().as_secs_f64();
    println!(
        "{} records in {} ({}, {seconds:.1} s, {} records/s)",
        format_count(reader.len() as u64),
        args.to.shown(),
        format_bytes(bytes),
        format_count((reader.len() as f64 / seconds.max(1e-9)) as u64),
    );
    notes.iter().for_each(|note| println!("note: {note}"));
    if ["npy", "npz", "webdataset", "tfrecord"].contains(&kind.name) {
        reader.columns().iter().filter_map(classes).for_each(|text| println!("{text}"));
    }
    Ok(())
}

/// Names that the new file does not keep.
fn classes(column: &RecordColumn) -> Option<String> {
    let RecordKind::Class { names } = &column.kind else { return None };
    Some(format!(
        "`{}` is written as a number; write these names into the job: classes = {names:?}",
        shown_name(&column.name)
    ))
}
