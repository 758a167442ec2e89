//! `kolo predict`: what a trained model says of new data.

use crate::fail::{Failure, refuse_inputs};
use crate::load::Kinds;
use crate::output;
use crate::progress::Bar;
use crate::saved::{SavedArgs, Trained};
use crate::whole_file::WholeFile;
use clap::{Args, ValueEnum};
use kolo_base::ShownPath;
use kolo_data::prefetch::Values;
use kolo_data::{Field, Kind, SampleName, Source, TargetScale};
use kolo_train::machine::format_count;
use kolo_train::predict::{PredictionKind, Predictor, softmax};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

#[derive(Debug, Args)]
pub struct PredictArgs {
    #[command(flatten)]
    pub saved: SavedArgs,
    /// Files like those of the training, with or without the target, or - for standard input; the held-out samples by default
    #[arg(value_name = "INPUT")]
    pub inputs: Vec<String>,
    /// Write to this file instead of standard output
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// How to write; by the ending of --out, else csv
    #[arg(long, value_enum)]
    pub format: Option<Format>,
    /// Write the probability of every class
    #[arg(long)]
    pub probabilities: bool,
    /// Print nothing but the predictions
    #[arg(long)]
    pub quiet: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Csv,
    Jsonl,
}

/// Classes whose probabilities can stand in one line.
const PROBABILITIES_MAX: usize = 10_000;

/// Which names samples have beside their number. What one input has, all lines have.
#[derive(Clone, Copy)]
struct Named {
    file: bool,
    key: bool,
}

/// What a sample's file says of it.
#[derive(Clone, Copy)]
enum Truth<'v> {
    /// Negative where it is not known.
    Classes(&'v [i32]),
    /// NaN where it is not known.
    Numbers(&'v [f32]),
}

/// Writes predictions, a line per sample.
struct Lines {
    out: Box<dyn Write>,
    format: Format,
    kind: PredictionKind,
    names: Option<Vec<String>>,
    probabilities: bool,
    /// Where the samples come from, if there are several inputs.
    input: Option<String>,
    named: Named,
    /// Whether any input says what is true.
    has_truth: bool,
    /// In what unit numbers are.
    scale: Option<TargetScale>,
    /// Whether the header is written.
    begun: bool,
    /// Predictions that are not a number.
    not_numbers: usize,
}

/// What an input may be called that is no file.
const STANDARD_INPUT: [&str; 2] = ["-", "/dev/stdin"];

/// The largest of some numbers, of equals the first.
fn largest(values: &[f32]) -> usize {
    (0..values.len()).reduce(|best, at| if values[at] > values[best] { at } else { best }).unwrap_or(0)
}

/// A number with no more digits than it has; nothing if it is none.
fn number(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, |value| json!(value))
}

/// A cell of a CSV file.
fn cell(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.into(),
    }
}

impl Lines {
    fn class(&self, number: usize) -> Value {
        match self.names.as_ref().and_then(|names| names.get(number)) {
            Some(name) => json!(name),
            None => json!(number),
        }
    }

    /// Number `at` of a sample, in its own unit.
    fn in_unit(&self, at: usize, value: f32) -> Value {
        number(self.scale.as_ref().map_or(value, |scale| scale.in_unit(at, value)))
    }

    /// What was true of a sample, under the names of its predictions. What is not known is nothing.
    fn truth(&self, truth: Option<Truth<'_>>) -> Vec<(String, Value)> {
        let class = |class: &i32| usize::try_from(*class).map_or(Value::Null, |class| self.class(class));
        let value = |at: usize| match truth {
            Some(Truth::Numbers(values)) if values[at].is_finite() => self.in_unit(at, values[at]),
            _ => Value::Null,
        };
        match &self.kind {
            PredictionKind::Values { count: 1 } => vec![("true".into(), value(0))],
            PredictionKind::Values { count } if self.format == Format::Jsonl => {
                vec![("true".into(), (0..*count).map(value).collect())]
            }
            PredictionKind::Values { count } => (0..*count).map(|at| (format!("true.{at}"), value(at))).collect(),
            PredictionKind::Classes { targets, .. } => {
                let classes: Vec<Value> = match truth {
                    Some(Truth::Classes(classes)) => classes.iter().map(class).collect(),
                    _ => vec![Value::Null; *targets],
                };
                let one = || classes.first().cloned().unwrap_or(Value::Null);
                vec![("true".into(), if *targets == 1 { one() } else { Value::Array(classes) })]
            }
        }
    }

    /// The columns of one sample, in the order of the header.
    fn row(&self, name: &SampleName, numbers: &[f32], truth: Option<Truth<'_>>) -> Vec<(String, Value)> {
        let mut row = Vec::new();
        if let Some(input) = &self.input {
            row.push(("input".into(), json!(input)));
        }
        row.push(("record".into(), json!(name.record)));
        if self.named.file {
            row.push(("file".into(), json!(name.file.as_ref().map_or("".into(), |file| file.to_string_lossy()))));
        }
        if self.named.key {
            row.push(("key".into(), json!(name.key.as_deref().unwrap_or_default())));
        }
        match &self.kind {
            PredictionKind::Values { count: 1 } => {
                row.push(("value".into(), self.in_unit(0, numbers[0])));
            }
            PredictionKind::Values { .. } if self.format == Format::Jsonl => {
                let values = numbers.iter().enumerate().map(|(at, value)| self.in_unit(at, *value));
                row.push(("values".into(), values.collect()));
            }
            PredictionKind::Values { .. } => {
                row.extend(
                    numbers.iter().enumerate().map(|(at, value)| (format!("value.{at}"), self.in_unit(at, *value))),
                );
            }
            PredictionKind::Classes { targets: 1, .. } => {
                let shares = softmax(numbers);
                let best = largest(&shares);
                row.push(("class".into(), if shares[best].is_nan() { Value::Null } else { self.class(best) }));
                row.push(("probability".into(), number(shares[best])));
                if self.probabilities {
                    let of = |at: usize| match self.class(at) {
                        Value::String(name) => name,
                        number => number.to_string(),
                    };
                    row.extend(shares.iter().enumerate().map(|(at, share)| (format!("p.{}", of(at)), number(*share))));
                }
            }
            PredictionKind::Classes { classes, .. } => {
                let classes: Vec<Value> = numbers.chunks(*classes).map(|logits| self.class(largest(logits))).collect();
                row.push(("classes".into(), Value::Array(classes)));
            }
        }
        if self.has_truth {
            row.extend(self.truth(truth));
        }
        row
    }

    fn write(&mut self, name: &SampleName, numbers: &[f32], truth: Option<Truth<'_>>) -> std::io::Result<()> {
        let row = self.row(name, numbers, truth);
        self.not_numbers += usize::from(!numbers.iter().all(|number| number.is_finite()));
        if self.format == Format::Jsonl {
            let members: Vec<String> = row.iter().map(|(name, value)| format!("{}:{value}", json!(name))).collect();
            return writeln!(self.out, "{{{}}}", members.join(","));
        }
        if !self.begun {
            self.begun = true;
            let names: Vec<String> = row.iter().map(|(name, _)| cell(name)).collect();
            writeln!(self.out, "{}", names.join(","))?;
        }
        let text = |value: &Value| match value {
            Value::String(text) => cell(text),
            Value::Null => String::new(),
            Value::Array(values) => {
                let parts: Vec<String> =
                    values.iter().map(|value| value.to_string().trim_matches('"').into()).collect();
                cell(&parts.join(" "))
            }
            other => other.to_string(),
        };
        let cells: Vec<String> = row.iter().map(|(_, value)| text(value)).collect();
        writeln!(self.out, "{}", cells.join(","))
    }
}

/// Samples to predict, and where they come from.
struct Given {
    /// As the user wrote it, if there are several.
    input: Option<String>,
    source: Arc<dyn Source>,
    /// Its fields behind the model's inputs.
    columns: Vec<usize>,
    /// Its field behind the model's target, if it says what is true.
    truth: Option<usize>,
    samples: Vec<usize>,
    class_names: Option<Vec<String>>,
    /// Its file is one that the user does not know.
    is_spooled: bool,
}

impl Given {
    fn name(&self, sample: usize) -> SampleName {
        shown_name(&*self.source, sample, self.is_spooled)
    }
}

fn shown_name(source: &dyn Source, sample: usize, is_spooled: bool) -> SampleName {
    let name = source.sample_name(sample);
    SampleName { file: name.file.filter(|_| !is_spooled), ..name }
}

fn columns_of(source: &dyn Source, inputs: &[Field]) -> Result<Vec<usize>, Failure> {
    let fields = source.fields();
    let place = |input: &Field| {
        let found = fields.iter().position(|field| field.name == input.name && field.elements() == input.elements());
        found.ok_or_else(|| {
            let given: Vec<String> = fields.iter().map(Field::to_string).collect();
            let message = format!("the model expects {input}, but the inputs give {}", given.join(", "));
            Failure::usage(message, "give files like the training files")
        })
    };
    inputs.iter().map(place).collect()
}

/// The field that says what is true of a sample, if it is of the kind that the model predicts.
fn truth_of(source: &dyn Source, target: Option<&Field>, kind: PredictionKind) -> Option<usize> {
    let target = target?;
    source.fields().iter().position(|field| {
        let fits = match kind {
            PredictionKind::Classes { targets, .. } => field.kind != Kind::Real && field.elements() == targets,
            PredictionKind::Values { count } => field.kind == Kind::Real && field.elements() == count,
        };
        field.name == target.name && fits
    })
}

fn given(kinds: &Kinds, trained: &Trained, paths: &[String], predictor: &Predictor) -> Result<Vec<Given>, Failure> {
    let (inputs, target, kind) = (predictor.inputs(), predictor.target(), predictor.kind());
    let one = |input: Option<&String>, source: Arc<dyn Source>, samples: Vec<usize>| -> Result<Given, Failure> {
        let class_names = source.class_names().map(<[String]>::to_vec);
        let columns = columns_of(&*source, inputs)?;
        let truth = truth_of(&*source, target.as_ref(), kind);
        let is_spooled = input.is_some_and(|input| STANDARD_INPUT.contains(&input.as_str()));
        let input = input.filter(|_| paths.len() > 1).cloned();
        Ok(Given { input, columns, truth, source, samples, class_names, is_spooled })
    };
    if paths.is_empty() {
        let job = trained.job(kinds)?;
        let samples: Vec<usize> = (0..job.split.held_out_len()).map(|at| job.split.held_out(at)).collect();
        if samples.is_empty() {
            let message = "nothing to predict: the job holds out no samples";
            return Err(Failure::usage(message, "name files after the run"));
        }
        return Ok(vec![one(None, Arc::from(job.source), samples)?]);
    }
    let open = |path: &String| {
        let source = match STANDARD_INPUT.contains(&path.as_str()) {
            true => trained.inputs_of(&mut std::io::stdin().lock(), inputs)?,
            false => trained.inputs(path, inputs)?,
        };
        let samples = (0..source.len()).collect();
        one(Some(path), Arc::from(source), samples)
    };
    paths.iter().map(open).collect()
}

/// Images that a shell has listed are one input: each is a sample, with the name of its file.
fn joined(paths: &[String]) -> Vec<String> {
    let is_image = |path: &String| {
        let ending = Path::new(path).extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        kolo_data::image::ENDINGS.contains(&ending.to_ascii_lowercase().as_str())
            && !path.contains(',')
            && Path::new(path).is_file()
    };
    match paths.len() > 1 && paths.iter().all(is_image) {
        true => vec![paths.join(",")],
        false => paths.to_vec(),
    }
}

/// Where predictions go.
struct Sink {
    out: Box<dyn Write>,
    /// Of --out.
    file: Option<WholeFile>,
    format: Format,
}

fn target(args: &PredictArgs, all: &[Given]) -> Result<Sink, Failure> {
    let by_ending =
        |path: &PathBuf| match path.extension().is_some_and(|ending| ending == "jsonl" || ending == "ndjson") {
            true => Format::Jsonl,
            false => Format::Csv,
        };
    let format = args.format.or(args.out.as_ref().map(by_ending)).unwrap_or(Format::Csv);
    let Some(path) = &args.out else {
        return Ok(Sink { out: Box::new(BufWriter::new(output::Out)), file: None, format });
    };
    all.iter().try_for_each(|given| refuse_inputs("--out", path, &*given.source, None))?;
    let file = WholeFile::create(path).map_err(|error| cannot_write(path, &error))?;
    let out = Box::new(BufWriter::new(file.handle().map_err(|error| cannot_write(path, &error))?));
    Ok(Sink { out, file: Some(file), format })
}

fn cannot_write(path: &Path, error: &std::io::Error) -> Failure {
    Failure::job(format!("{}: {error}", path.shown()), "choose a writable path")
}

pub fn predict(kinds: &Kinds, args: &PredictArgs) -> Result<(), Failure> {
    let trained = Trained::open(kinds, &args.saved)?;
    let (executor, threads) = (args.saved.device.executor()?, args.saved.threads()?);
    let mut predictor = Predictor::new(trained.model(kinds)?, &executor, threads)?;
    let all = given(kinds, &trained, &joined(&args.inputs), &predictor)?;
    trained.fill(predictor.store_mut(), |_| true)?;
    if !args.quiet && !args.inputs.is_empty() {
        let notes: BTreeSet<String> = all.iter().flat_map(|given| given.source.notes()).collect();
        notes.iter().for_each(|note| output::print_error(&format!("note: {note}")));
    }
    let Sink { out, file, format } = target(args, &all)?;
    let kind = predictor.kind();
    let few = !matches!(kind, PredictionKind::Classes { classes, .. } if classes > PROBABILITIES_MAX);
    let (names, probabilities) = (all[0].class_names.clone(), args.probabilities && few);
    let first = |given: &Given| given.samples.first().map(|sample| given.name(*sample));
    let firsts: Vec<SampleName> = all.iter().filter_map(first).collect();
    let named = Named {
        file: firsts.iter().any(|name| name.file.is_some()),
        key: firsts.iter().any(|name| name.key.is_some()),
    };
    let mut lines = Lines {
        out,
        format,
        kind,
        names,
        probabilities,
        input: None,
        named,
        has_truth: all.iter().any(|given| given.truth.is_some()),
        scale: all[0].source.target_scale().cloned(),
        begun: false,
        not_numbers: 0,
    };
    let (begin, total) = (Instant::now(), all.iter().map(|given| given.samples.len()).sum::<usize>());
    let written = write_all(&mut predictor, all, &mut lines, (threads, if file.is_some() { total } else { 0 }))?;
    let not_numbers = lines.not_numbers;
    let written = written.and_then(|skipped| lines.out.flush().map(|()| skipped)).and_then(|skipped| {
        drop(lines);
        file.map_or(Ok(0), WholeFile::finish).map(|_| skipped)
    });
    let path = args.out.as_deref();
    let skipped = written.map_err(|error| cannot_write(path.unwrap_or(Path::new("standard output")), &error))?;
    tell(args, total - skipped.samples, &skipped, begin);
    if not_numbers > 0 && !args.quiet {
        output::print_error(&format!(
            "note: {} of the predictions are not a number: the weights or these inputs have NaN or infinities",
            format_count(not_numbers as u64)
        ));
    }
    Ok(())
}

/// Records that have no prediction.
#[derive(Default)]
struct Skipped {
    samples: usize,
    /// What was wrong with the first of them.
    message: Option<String>,
}

fn tell(args: &PredictArgs, total: usize, skipped: &Skipped, begin: Instant) {
    if args.quiet {
        return;
    }
    if let Some(path) = &args.out {
        let rate = total as f64 / begin.elapsed().as_secs_f64().max(1e-9);
        let (total, rate) = (format_count(total as u64), format_count(rate as u64));
        output::print_error(&format!("{total} samples in {} ({rate} samples/s)", path.shown()));
    }
    if skipped.samples > 0 {
        let records = if skipped.samples == 1 { "record" } else { "records" };
        let first = skipped.message.as_ref().map_or(String::new(), |message| format!("; the first: {message}"));
        let count = format_count(skipped.samples as u64);
        output::print_error(&format!("note: {count} {records} could not be read and have no prediction{first}"));
    }
}

/// Writes what the model says of all samples, but of those that cannot be read. The bar shows `total`.
fn write_all(
    predictor: &mut Predictor,
    all: Vec<Given>,
    lines: &mut Lines,
    (threads, total): (usize, usize),
) -> Result<std::io::Result<Skipped>, Failure> {
    let (width, targets) = match lines.kind {
        PredictionKind::Classes { targets, classes } => (targets * classes, targets),
        PredictionKind::Values { count } => (count, count),
    };
    let bar = Bar::new(total, "samples");
    let (mut failed, mut before, mut skipped) = (None, 0, Skipped::default());
    for Given { input, source, columns, truth, samples, is_spooled, .. } in all {
        lines.input = input;
        let (asked, list) = (Arc::clone(&source), samples.clone());
        predictor.run(source, (columns, truth), samples, threads, &mut |first, numbers, truth| {
            for (at, numbers) in numbers.chunks(width.max(1)).enumerate() {
                let sample = list[first + at];
                if asked.is_unreadable(sample) {
                    skipped.samples += 1;
                    continue;
                }
                let truth = truth.as_ref().map(|values| match values {
                    Values::F32(values) => Truth::Numbers(&values[at * targets..][..targets]),
                    Values::I32(values) => Truth::Classes(&values[at * targets..][..targets]),
                });
                if let Err(error) = lines.write(&shown_name(&*asked, sample, is_spooled), numbers, truth) {
                    failed.get_or_insert(error);
                }
            }
            bar.tell(before + first + numbers.len() / width.max(1));
            Ok(())
        })?;
        before += list.len();
        let messages = asked.load_times().map(|times| times.skip_messages).unwrap_or_default();
        skipped.message = skipped.message.or(messages.into_iter().next().map(|(_, message)| message));
    }
    bar.finish();
    Ok(failed.map_or(Ok(skipped), Err))
}
