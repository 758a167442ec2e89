//! Windows over the rows of a table, for forecasting: some rows of the past are the input, a column of the rows after them is
//! the target.
//!
//! A window lies within one run: the rows of one series in one file, in their order, and over no gap in time. Of each run the
//! last rows are held out, and no window reaches over that place, so that training sees nothing of what it is judged by. The last window of a run, and of
//! what trains in it, ends at its last row; others start `step` rows apart before it.

use super::columns::find;
use super::lookup::shown;
use super::moments::moment;
use super::part::Part;
use crate::error::ReadError;
use crate::format::{OpenError, Reader, named};
use crate::parts::Parts;
use crate::record::{Record, RecordColumn, RecordKind, RecordName, RecordValue, UnreadColumn};
use crate::split::held_out_count;
use crate::tokenizer::UsedTokenizer;
use kolo_graph::settings::{SIZE_MAX, SettingError, Settings};
use std::collections::HashMap;
use std::path::PathBuf;

const EXAMPLE: &str = "{ past = 24, future = 6 }";
/// Numbers that a window may hold.
const NUMBERS_MAX: usize = 1 << 24;

/// What `window` of the `[data]` section says.
#[derive(Clone, Debug)]
pub(crate) struct WindowRule {
    pub past: usize,
    pub future: usize,
    pub step: usize,
    /// The column that tells series apart.
    pub series: Option<String>,
    /// The column that says when a row was.
    pub time: Option<String>,
}

impl WindowRule {
    pub fn read(settings: &Settings) -> Result<Option<Self>, SettingError> {
        let keys = settings.table_like("window", EXAMPLE)?;
        if settings.peek("window").is_none() {
            return Ok(None);
        }
        if keys.peek("past").is_none() {
            return Err(keys.wrong("past", "is missing", format!("write `window = {EXAMPLE}`")));
        }
        let rule = Self {
            past: keys.count_in("past", 1, 1, SIZE_MAX)?,
            future: keys.count_in("future", 1, 1, SIZE_MAX)?,
            step: keys.count_in("step", 1, 1, SIZE_MAX)?,
            series: Some(keys.text("series", "")?).filter(|name| !name.is_empty()),
            time: Some(keys.text("time", "")?).filter(|name| !name.is_empty()),
        };
        keys.finish()?;
        Ok(Some(rule))
    }

    /// Rows from the first of a window to its end, if its future must be known.
    fn rows(&self, future: Future) -> usize {
        self.past + if future == Future::Known { self.future } else { 0 }
    }

    /// The windows of `rows` rows of a run, from row `base` on: the first row of the first, and how many there are.
    fn windows(&self, base: usize, rows: usize, future: Future) -> (usize, usize) {
        match rows.checked_sub(self.rows(future)) {
            Some(spare) => (base + spare % self.step, spare / self.step + 1),
            None => (base, 0),
        }
    }
}

/// Whether a window needs the rows that it forecasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Future {
    /// To train or to judge.
    Known,
    /// To predict: they may be still to come.
    Open,
}

/// The columns of a table that windows are made of.
#[derive(Clone, Debug)]
pub(crate) struct WindowColumns {
    pub inputs: Vec<usize>,
    pub target: Option<usize>,
}

/// Rows of one series in one file, in their order.
#[derive(Debug)]
struct Run {
    series: Option<String>,
    file: PathBuf,
    rows: Rows,
    /// The places in it before which rows lack.
    gaps: Vec<usize>,
}

impl Run {
    /// The parts of these places that are without gaps: where each starts, and its length.
    fn pieces(&self, places: std::ops::Range<usize>) -> impl Iterator<Item = (usize, usize)> {
        let inside = self.gaps.iter().copied().filter(|gap| places.contains(gap) && *gap > places.start);
        let mut ends: Vec<usize> = inside.collect();
        ends.push(places.end);
        let mut start = places.start;
        ends.into_iter().map(move |end| {
            let piece = (start, end - start);
            start = end;
            piece
        })
    }
}

#[derive(Debug)]
enum Rows {
    /// From this one on, so many.
    Range(usize, usize),
    Listed(Vec<u32>),
}

impl Rows {
    fn len(&self) -> usize {
        match self {
            Rows::Range(_, len) => *len,
            Rows::Listed(rows) => rows.len(),
        }
    }

    fn at(&self, place: usize) -> usize {
        match self {
            Rows::Range(start, _) => start + place,
            Rows::Listed(rows) => rows[place] as usize,
        }
    }
}

/// Windows of one run, one after the other.
#[derive(Clone, Copy, Debug)]
struct Segment {
    run: usize,
    /// The row of the run where the first one starts.
    first: usize,
}

/// The windows of a table as records: a row of past values of each input, and the future values of the target. Those that train
/// come first.
#[derive(Debug)]
pub(crate) struct TableWindows {
    table: Box<dyn Reader>,
    columns: Vec<RecordColumn>,
    chosen: WindowColumns,
    rule: WindowRule,
    runs: Vec<Run>,
    windows: Parts<Segment>,
    /// Windows that train.
    pub training: usize,
    /// Places where rows lack.
    gaps: usize,
}

impl TableWindows {
    /// Windows over the records of a part. The last `holdout` of the rows of each run make windows of their own.
    pub fn over(
        part: &mut Part,
        chosen: WindowColumns,
        rule: &WindowRule,
        (holdout, future): (f64, Future),
        settings: &Settings,
    ) -> Result<Self, OpenError> {
        let columns = window_columns(part, &chosen, rule, settings)?;
        let runs = runs(part, rule, settings)?;
        // Without a target there is nothing to wait for.
        let future = if chosen.target.is_none() { Future::Open } else { future };
        let (mut windows, mut held_out) = (Parts::new(), Vec::new());
        for (number, run) in runs.iter().enumerate() {
            let rows = run.rows.len();
            let training = rows - held_out_count(rows, holdout);
            for (start, len) in run.pieces(0..training) {
                let (first, count) = rule.windows(start, len, future);
                windows.push(Segment { run: number, first }, count);
            }
            held_out.extend(run.pieces(training..rows).map(|(start, len)| (number, rule.windows(start, len, future))));
        }
        let training = windows.len();
        held_out.into_iter().for_each(|(run, (first, count))| windows.push(Segment { run, first }, count));
        let longest = runs.iter().flat_map(|run| run.pieces(0..run.rows.len())).map(|(_, len)| len).max().unwrap_or(0);
        let gaps: usize = runs.iter().map(|run| run.gaps.len()).sum();
        let wanted = rule.rows(future);
        let wrong = |message: String, hint: &str| -> OpenError { settings.wrong("window", message, hint).into() };
        if training == 0 {
            let parts =
                if holdout > 0.0 { format!(", of which {} % are held out", percent(holdout)) } else { String::new() };
            let message =
                format!("takes {wanted} rows, but the longest series of \"{}\" has {longest}{parts}", part.name);
            return Err(wrong(message, "make `past` and `future` smaller, or give longer series"));
        }
        if holdout > 0.0 && windows.len() == training {
            let message = format!(
                "takes {wanted} rows, but of no series of \"{}\" so many are held out: the longest has {longest}, and {} % of \
                 them are",
                part.name,
                percent(holdout)
            );
            return Err(wrong(
                message,
                "make `holdout` larger, `past` and `future` smaller, or name files: `validation = \"…\"`",
            ));
        }
        let table = part.take_reader();
        Ok(Self { table, columns, chosen, rule: rule.clone(), runs, windows, training, gaps })
    }

    /// How the samples came about, for the first lines of a run.
    pub fn described(&self, holdout: f64) -> String {
        let WindowRule { past, future, .. } = self.rule;
        let series = match &self.rule.series {
            Some(column) => format!(" of {} series by \"{}\"", self.runs.len(), shown(column)),
            None => String::new(),
        };
        let held_out = match holdout > 0.0 {
            true => format!(
                ", the last {} % of the rows{} held out",
                percent(holdout),
                if self.runs.len() > 1 { " of each" } else { "" }
            ),
            false => String::new(),
        };
        let gaps = match self.gaps {
            0 => String::new(),
            1 => " without 1 gap in time".into(),
            many => format!(" without {many} gaps in time"),
        };
        format!("windows of {past} rows and {future} to come{series}{gaps}{held_out}")
    }

    /// The run of a window and the row of the run where it starts.
    fn locate(&self, at: usize) -> Result<(&Run, usize), ReadError> {
        let (segment, number) = self.windows.find(at)?;
        Ok((&self.runs[segment.run], segment.first + number * self.rule.step))
    }

    /// The last row that a window sees.
    fn last_row(&self, at: usize) -> Option<usize> {
        let (run, start) = self.locate(at).ok()?;
        Some(run.rows.at(start + self.rule.past - 1))
    }
}

fn percent(part: f64) -> f64 {
    (part * 1000.0).round() / 10.0
}

/// The columns of windows: rows of numbers of one column each.
fn window_columns(
    part: &Part,
    chosen: &WindowColumns,
    rule: &WindowRule,
    settings: &Settings,
) -> Result<Vec<RecordColumn>, SettingError> {
    let numbers = (chosen.inputs.len().saturating_mul(rule.past)).saturating_add(rule.future);
    if numbers > NUMBERS_MAX {
        let message = format!("holds {numbers} numbers, more than {NUMBERS_MAX}");
        return Err(settings.wrong("window", message, "make `past` or `future` smaller, or choose fewer `inputs`"));
    }
    let column = |at: usize, len: usize, key: &str| {
        let column = &part.reader.columns()[at];
        let is_number = match &column.kind {
            RecordKind::Real { shape } | RecordKind::Int { shape, .. } => shape.iter().product::<usize>() == 1,
            _ => false,
        };
        match is_number {
            true => Ok(RecordColumn { name: column.name.clone(), kind: RecordKind::Real { shape: vec![len] } }),
            false => {
                let kind = crate::inspect::kind_name(&column.kind);
                let message = format!(
                    "names the column \"{}\", which is {kind}: a window takes one number of a row",
                    column.name
                );
                Err(settings.wrong(key, message, "choose columns of numbers"))
            }
        }
    };
    let inputs = chosen.inputs.iter().map(|at| column(*at, rule.past, "inputs"));
    let target = chosen.target.iter().map(|at| column(*at, rule.future, "target"));
    inputs.chain(target).collect()
}

/// The rows of each series in each file. Series come in the order of their first rows.
fn runs(part: &Part, rule: &WindowRule, settings: &Settings) -> Result<Vec<Run>, OpenError> {
    let mut files = Vec::new();
    let mut start = 0;
    match (&part.files[..], named(part.format)) {
        ([_, _, ..], Some(format)) => {
            for file in &part.files {
                let rows = (format.open)(std::slice::from_ref(file), &settings.detached())?.len();
                files.push((file.path.clone(), start..start + rows));
                start += rows;
            }
        }
        (files_of_part, _) => {
            let path = files_of_part.first().map_or_else(PathBuf::new, |file| file.path.clone());
            files.push((path, 0..part.reader.len()));
        }
    }
    if rule.series.is_none() && rule.time.is_none() {
        let run = |(file, rows): (PathBuf, std::ops::Range<usize>)| Run {
            series: None,
            file,
            rows: Rows::Range(rows.start, rows.len()),
            gaps: Vec::new(),
        };
        return Ok(files.into_iter().map(run).collect());
    }
    let keys = settings.table_like("window", EXAMPLE)?;
    let columns = part.reader.columns();
    let place = |name: &Option<String>, key: &str| {
        name.as_ref().map(|name| find(columns, part.reader.unread(), name, &keys, key)).transpose()
    };
    let (series, time) = (place(&rule.series, "series")?, place(&rule.time, "time")?);
    let mut sorted: Vec<Sorted> = Vec::new();
    for (file, rows) in files {
        let mut known: HashMap<Option<String>, usize> = HashMap::new();
        part.visit(rows, false, &mut |at, record| {
            let lacks = |column: usize, what: &str| {
                ReadError::new(format!("column \"{}\" does not say {what}", columns[column].name), "correct the file")
            };
            let name = |column: usize| {
                name_of(record.value(column), &columns[column]).ok_or_else(|| lacks(column, "the series"))
            };
            let name = series.map(name).transpose()?;
            let row =
                u32::try_from(at).map_err(|_| ReadError::new("there are more rows than 2³²", "split the files"))?;
            let number = *known.entry(name).or_insert_with_key(|name| {
                sorted.push(Sorted { series: name.clone(), file: file.clone(), rows: Vec::new(), moments: Vec::new() });
                sorted.len() - 1
            });
            if let Some(time) = time {
                let moment = moment(record.value(time)).ok_or_else(|| lacks(time, "when: a number or an ISO date"))?;
                if sorted[number].moments.last().is_some_and(|last| *last >= moment) {
                    let message = format!("column \"{}\" does not rise from row to row", columns[time].name);
                    let hint = "sort the rows by time, and name the column that tells series apart: `series = \"…\"`";
                    return Err(ReadError::new(message, hint));
                }
                sorted[number].moments.push(moment);
            }
            sorted[number].rows.push(row);
            Ok(())
        })?;
    }
    let run = |Sorted { series, file, rows, moments }| {
        let gaps = gaps(&moments);
        Run { series, file, rows: Rows::Listed(rows), gaps }
    };
    Ok(sorted.into_iter().map(run).collect())
}

/// The rows of a series in a file, and when they were.
struct Sorted {
    series: Option<String>,
    file: PathBuf,
    rows: Vec<u32>,
    moments: Vec<f64>,
}

/// Where rows lack: the time from one row to the next is more than one and a half times the usual one. Months and the hour of
/// summer time are no gaps.
fn gaps(moments: &[f64]) -> Vec<usize> {
    const LONG: f64 = 1.5;
    let steps: Vec<f64> = moments.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let mut sorted = steps.clone();
    sorted.sort_unstable_by(f64::total_cmp);
    let Some(usual) = sorted.get(sorted.len() / 2) else { return Vec::new() };
    (1..moments.len()).filter(|at| steps[at - 1] > LONG * usual).collect()
}

/// What a value is called that tells samples apart: a name, or a number.
pub(crate) fn name_of(value: &RecordValue, column: &RecordColumn) -> Option<String> {
    match (value, &column.kind) {
        (RecordValue::Text(text), _) => Some(text.trim().to_string()).filter(|text| !text.is_empty()),
        (RecordValue::Ints(values), RecordKind::Class { names }) => {
            names.get(usize::try_from(*values.first()?).ok()?).cloned()
        }
        (RecordValue::Ints(values), _) if values.len() == 1 => Some(values[0].to_string()),
        (RecordValue::Reals(values), _) if values.len() == 1 && !values[0].is_nan() => Some(values[0].to_string()),
        _ => None,
    }
}

/// One number of a row; NaN if there is none.
fn number_of(value: &RecordValue) -> Result<f32, ReadError> {
    match value {
        RecordValue::Reals(values) if values.len() == 1 => Ok(values[0]),
        RecordValue::Ints(values) if values.len() == 1 => Ok(values[0] as f32),
        RecordValue::Missing => Ok(f32::NAN),
        RecordValue::Text(text) if text.trim().is_empty() => Ok(f32::NAN),
        RecordValue::Text(text) => text.trim().parse().map_err(|_| {
            ReadError::new(format!("\"{}\" is not a number", shown(text)), "correct the file, or leave the column out")
        }),
        _ => Err(ReadError::new("a row has not one number in a column", "correct the file, or leave the column out")),
    }
}

impl Reader for TableWindows {
    fn columns(&self) -> &[RecordColumn] {
        &self.columns
    }

    fn unread(&self) -> &[UnreadColumn] {
        self.table.unread()
    }

    fn len(&self) -> usize {
        self.windows.len()
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        let (run, start) = self.locate(at)?;
        let WindowRule { past, future, .. } = self.rule;
        let (inputs, target) = (&self.chosen.inputs, self.chosen.target);
        let mut values: Vec<Vec<f32>> = self.columns.iter().map(|_| Vec::new()).collect();
        let mut row = Record::new();
        for place in start..start + past {
            self.table.read(run.rows.at(place), &mut row)?;
            for (column, values) in inputs.iter().zip(&mut values) {
                values.push(number_of(row.value(*column))?);
            }
        }
        if let (Some(target), Some(values)) = (target, values.get_mut(inputs.len())) {
            for place in start + past..start + past + future {
                if place >= run.rows.len() {
                    values.push(f32::NAN);
                    continue;
                }
                self.table.read(run.rows.at(place), &mut row)?;
                values.push(number_of(row.value(target))?);
            }
        }
        values.iter().enumerate().for_each(|(column, values)| record.reals(column).extend(values));
        Ok(())
    }

    fn place(&self, at: usize) -> Option<(PathBuf, u64)> {
        let (run, start) = self.locate(at).ok()?;
        self.table.place(run.rows.at(start))
    }

    fn name(&self, at: usize) -> Option<RecordName> {
        let (run, _) = self.locate(at).ok()?;
        run.series.is_some().then(|| RecordName { file: run.file.clone(), key: run.series.clone() })
    }

    fn record_number(&self, at: usize) -> usize {
        self.last_row(at).map_or(at, |row| self.table.record_number(row))
    }

    fn kind_reason(&self, _: usize) -> Option<String> {
        None
    }

    fn notes(&self) -> Vec<String> {
        self.table.notes()
    }

    fn files(&self) -> Vec<PathBuf> {
        self.table.files()
    }

    fn tokenizer(&self) -> Option<UsedTokenizer> {
        None
    }

    fn fingerprint(&self) -> String {
        self.table.fingerprint()
    }
}
