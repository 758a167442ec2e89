//! `kolo data inspect`: what files hold.

use super::open::{Input, Opened, open};
use crate::fail::{Failure, write_file};
use crate::output::println;
use crate::progress::Bar;
use clap::Args;
use kolo_base::ShownPath;
use kolo_data::inspect::{ColumnSummary, Numbers, Summary, Value, kind_name, printable, shown, shown_name};
use kolo_data::record::{Record, RecordKind};
use kolo_train::machine::{format_bytes, format_count};
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Files, directories or patterns
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<String>,
    #[command(flatten)]
    pub input: Input,
    /// Records to look at, spread evenly
    #[arg(long, default_value_t = 10_000, value_name = "RECORDS")]
    pub limit: usize,
    /// Records to show
    #[arg(long, default_value_t = 3, value_name = "RECORDS")]
    pub show: usize,
    /// Write the pictures of some records to this PNG file
    #[arg(long, value_name = "FILE.png")]
    pub sheet: Option<PathBuf>,
}

/// Values of a column that are named.
const VALUES_SHOWN: usize = 10;
/// Characters that names and kinds are aligned to.
const WIDTH_MAX: usize = 60;
const SHEET_ROWS: usize = 8;
const SHEET_COLUMNS: usize = 12;

pub fn inspect(args: &InspectArgs) -> Result<(), Failure> {
    let opened = open(&args.paths, &args.input, &[])?;
    let reader = &*opened.reader;
    if let Some(path) = args.sheet.as_ref().filter(|path| is_input(path, &opened)) {
        let message = format!("--sheet: {} is one of the inputs", path.shown());
        return Err(Failure::usage(message, "choose another name for the pictures"));
    }
    let bar = Bar::new(reader.len().min(args.limit), "records");
    let summary = Summary::of(reader, args.limit, &mut |done| bar.tell(done));
    bar.finish();
    println!("{}", heading(&opened, &summary));
    let unread = reader.unread();
    let names: Vec<String> = summary.columns.iter().map(|column| shown_name(&column.column.name)).collect();
    let kinds: Vec<String> = summary.columns.iter().map(|column| kind_name(&column.column.kind)).collect();
    let not_read: Vec<[String; 2]> =
        unread.iter().map(|column| [&column.name, &column.kind].map(|text| shown_name(text))).collect();
    let width = width_of(names.iter().chain(not_read.iter().map(|[name, _]| name)));
    let kind_width = width_of(kinds.iter().chain(not_read.iter().map(|[_, kind]| kind)));
    for ((column, name), kind) in summary.columns.iter().zip(&names).zip(&kinds) {
        println!("  {name:<width$}  {kind:<kind_width$}  {}", facts(column).join("; "));
    }
    for [name, kind] in not_read {
        println!("  {name:<width$}  {kind:<kind_width$}  not read");
    }
    opened.notes.iter().for_each(|note| println!("note: {note}"));
    let mut record = Record::new();
    for at in 0..reader.len().min(args.show) {
        match reader.read(at, &mut record) {
            Ok(()) => {
                println!("record {at}");
                for (number, (column, name)) in reader.columns().iter().zip(&names).enumerate() {
                    println!("  {name:<width$}  {}", shown(column, record.value(number)));
                }
            }
            Err(error) => println!("record {at}: {}", printable(&error.what())),
        }
    }
    for (at, error) in &summary.errors {
        println!("record {at} cannot be read: {}", printable(&error.what()));
    }
    if let Some(path) = &args.sheet {
        let picture = kolo_data::sheet::sheet(reader, SHEET_ROWS, SHEET_COLUMNS).map_err(kolo_train::Error::from)?;
        let Some(picture) = picture else {
            let message = "--sheet: no column holds images";
            return Err(Failure::usage(message, "leave it out, or inspect files with images"));
        };
        write_file(path, picture)?;
        println!("pictures in {}", path.shown());
    }
    Ok(())
}

fn is_input(path: &Path, opened: &Opened) -> bool {
    let Ok(path) = path.canonicalize() else { return false };
    let files = opened.files.iter().map(|file| file.path.clone()).chain(opened.reader.files());
    files.filter_map(|file| file.canonicalize().ok()).any(|file| file == path)
}

/// Characters of the longest, of those that are not too long to be aligned.
fn width_of<'t>(texts: impl Iterator<Item = &'t String>) -> usize {
    texts.map(|text| text.chars().count()).max().unwrap_or(0).min(WIDTH_MAX)
}

fn heading(opened: &Opened, summary: &Summary) -> String {
    let plural = |count: usize, word: &str| {
        format!("{} {word}{}", format_count(count as u64), if count == 1 { "" } else { "s" })
    };
    let bytes = match opened.bytes() {
        0 => String::new(),
        bytes => format!(", {}", format_bytes(bytes)),
    };
    let looked = match summary.looked_at == summary.records {
        true => String::new(),
        false => format!(" ({} looked at; --limit for more)", format_count(summary.looked_at as u64)),
    };
    let unreadable = match summary.unreadable {
        0 => String::new(),
        count => format!(", {} of them cannot be read", format_count(count as u64)),
    };
    format!(
        "{}: {}{bytes}; {}{looked}{unreadable}, {}",
        opened.format.name,
        plural(opened.files.len(), "file"),
        plural(summary.records, "record"),
        plural(summary.columns.len() + opened.reader.unread().len(), "column"),
    )
}

/// A number with as many digits as it needs.
fn number(value: f64) -> String {
    if value == value.trunc() && value.abs() < 1e15 { format!("{value}") } else { format!("{value:.4}") }
}

fn range(numbers: &Numbers) -> String {
    match numbers.least == numbers.most {
        true => number(numbers.least),
        false => format!("{} to {}", number(numbers.least), number(numbers.most)),
    }
}

/// What there is to say of a column.
fn facts(summary: &ColumnSummary) -> Vec<String> {
    let mut facts = Vec::new();
    let ColumnSummary { column, numbers, lengths, .. } = summary;
    let is_class = matches!(column.kind, RecordKind::Class { .. });
    if numbers.count > 0 && !is_class {
        facts.push(range(numbers));
        facts.push(format!("mean {}, deviation {}", number(numbers.mean()), number(numbers.deviation())));
    }
    if numbers.not_finite > 0 {
        facts.push(format!("{} not finite", numbers.not_finite));
    }
    if lengths.count > 0 {
        let unit = if column.kind == RecordKind::Text { "characters" } else { "bytes" };
        facts.push(format!("{} {unit}", range(lengths)));
    }
    if !summary.sizes.is_empty() {
        facts.push(sizes(summary));
    }
    if summary.broken > 0 {
        facts.push(format!("{} broken", summary.broken));
    }
    if summary.missing > 0 {
        facts.push(format!("{} missing", format_count(summary.missing as u64)));
    }
    facts.extend(values(summary));
    facts
}

fn sizes(summary: &ColumnSummary) -> String {
    let text = |[channels, height, width]: &[usize; 3]| format!("{width} × {height} × {channels}");
    let mut sizes: Vec<(&[usize; 3], &usize)> = summary.sizes.iter().collect();
    sizes.sort_by_key(|(size, count)| (std::cmp::Reverse(**count), **size));
    match sizes[..] {
        [(size, _)] => format!("all {}", text(size)),
        _ => {
            let most: Vec<String> =
                sizes.iter().take(3).map(|(size, count)| format!("{} ({count})", text(size))).collect();
            format!("{} sizes: {}", sizes.len(), most.join(", "))
        }
    }
}

fn values(summary: &ColumnSummary) -> Option<String> {
    let values = summary.values.as_ref().filter(|values| !values.is_empty())?;
    let total: usize = values.values().sum();
    // Of texts that hardly repeat, a list says nothing.
    if values.len() > VALUES_SHOWN && values.len() * 2 > total {
        return None;
    }
    let mut sorted: Vec<(&Value, &usize)> = values.iter().collect();
    let is_class = matches!(summary.column.kind, RecordKind::Class { .. });
    if values.len() > VALUES_SHOWN {
        sorted.sort_by_key(|(value, count)| (std::cmp::Reverse(**count), (*value).clone()));
    }
    let text = |value: &Value| match value {
        Value::Int(number) => number.to_string(),
        Value::Text(text) if is_class => shown_name(text),
        Value::Text(text) => format!("{text:?}"),
    };
    let named: Vec<String> =
        sorted.iter().take(VALUES_SHOWN).map(|(value, count)| format!("{} ({count})", text(value))).collect();
    let more = if values.len() > VALUES_SHOWN { ", …" } else { "" };
    let what = if is_class { "classes" } else { "values" };
    Some(format!("{} {what}: {}{more}", values.len(), named.join(", ")))
}
