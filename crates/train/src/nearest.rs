//! The layouts nearest to one that a job cannot have, which an error names beside its reason. Each of them was checked as the
//! job itself is.

use crate::error::Error;
use crate::job::{Job, Kinds};
use crate::job_file;
use crate::step::LayoutCheck;
use kolo_graph::settings::{Setting, Settings};
use kolo_parallel::Parallel;

/// Layouts that are named, at most.
const NAMED_MAX: usize = 3;
/// Nodes of all graphs that are split to find them, at most: a deep model is tried in few ways.
const NODES_MAX: usize = 500_000;
/// Ways to split a model that are tried in any case, and at most.
const TRIES_MIN: usize = 4;
const TRIES_MAX: usize = 48;
/// Schedules that are made to find out which go with the grains, at most.
const ORDERS_MAX: usize = 512;
/// Layouts that are considered at all.
const CONSIDERED_MAX: usize = 20_000;
/// Workers of a layout that is considered.
const WORKERS_MAX: usize = 1024;

/// The keys of `[parallel]` that may change, with their defaults and how far from the wish a change to the next power of two is.
/// Slices are near, since they are what a wish for more workers lacks; but others are another job.
const COUNTS: [(&str, usize, f64); 7] = [
    ("tensor", 1, 1.0),
    ("context", 1, 1.0),
    ("pipeline", 1, 1.0),
    ("chunks", 1, 0.6),
    ("zero", 0, 0.8),
    ("slices", 1, 0.4),
    ("tensor_slices", 1, 0.4),
];
const TENSOR: usize = 0;
const CONTEXT: usize = 1;
const PIPELINE: usize = 2;
const CHUNKS: usize = 3;
const ZERO: usize = 4;
const SLICES: usize = 5;
const TENSOR_SLICES: usize = 6;

/// Pairs of rows and columns: workers, and the parts of the job that they share, as slices are.
const PAIRS: [(&str, f64); 2] = [("spatial", 1.0), ("tiles", 0.4)];
const SPATIAL: usize = 0;
const TILES: usize = 1;

const SCHEDULE: &str = "schedule";
/// The schedule that goes with every number of ranks and grains.
const ANY_SCHEDULE: &str = "1f1b";
const SCHEDULE_DISTANCE: f64 = 0.9;
const WORKERS_DISTANCE: f64 = 1.1;

/// A layout, as far as it may change.
#[derive(Clone, Debug, PartialEq)]
struct Layout {
    workers: usize,
    /// The values of [`COUNTS`].
    counts: [usize; COUNTS.len()],
    /// The values of [`PAIRS`].
    pairs: [[usize; 2]; PAIRS.len()],
    schedule: String,
    /// Tokens have slices of their own, and layers others.
    by_tokens: bool,
    /// Workers that lines of `[parallel.layers]` give to layers: with `spatial`, and with `tensor`.
    lines: [usize; 2],
}

impl Layout {
    /// As a job file has it; `None` if one of its keys is no such thing, which is what to mend first.
    fn of(parallel: &Settings, workers: usize) -> Option<Self> {
        let mut counts = [0; COUNTS.len()];
        for (count, (key, default, _)) in counts.iter_mut().zip(COUNTS) {
            *count = match parallel.peek(key) {
                None => default,
                Some(Setting::Int(value)) => usize::try_from(*value).ok()?,
                Some(_) => return None,
            };
        }
        let mut pairs = [[1; 2]; PAIRS.len()];
        for (pair, (key, _)) in pairs.iter_mut().zip(PAIRS) {
            *pair = parallel.peek(key).map_or(Some([1, 1]), pair_of)?;
        }
        let schedule = match parallel.peek(SCHEDULE) {
            None => ANY_SCHEDULE.to_string(),
            Some(Setting::Text(text)) => text.clone(),
            Some(_) => return None,
        };
        let by_tokens =
            matches!(parallel.peek("sequence"), Some(Setting::Text(text)) if text == "heads" || text == "context");
        let lines = ["spatial", "tensor"].map(|way| most_of_lines(parallel, way));
        Some(Self { workers, counts, pairs, schedule, by_tokens, lines })
    }

    /// Workers along all axes but that of the data.
    fn model_ranks(&self) -> usize {
        let counts = [TENSOR, CONTEXT, PIPELINE].map(|at| self.counts[at]);
        let [spatial @ [rows, columns], tiles] = self.pairs;
        // Lines say how many workers there are where no key does, and those of both ways are the same.
        let images = if spatial == [1, 1] { self.lines[0] } else { rows * columns };
        let is_cut = images > 1 || tiles != [1, 1];
        let layers = if is_cut || self.counts[TENSOR] > 1 { 1 } else { self.lines[1] };
        counts.iter().product::<usize>() * images * layers
    }

    /// What decides whether the model can be split so.
    fn of_model(&self) -> Self {
        let mut model = Self { workers: 0, ..self.clone() };
        model.counts[ZERO] = 0;
        model
    }

    /// What differs from another, as assignments of `--set`.
    fn changes(&self, from: &Layout) -> Vec<String> {
        let counts = COUNTS.iter().zip(self.counts.iter().zip(&from.counts));
        let counts = counts.filter(|(_, (own, other))| own != other);
        let mut changes: Vec<String> = counts.map(|((key, ..), (own, _))| format!("parallel.{key}={own}")).collect();
        let pairs = PAIRS.iter().zip(self.pairs.iter().zip(&from.pairs)).filter(|(_, (own, other))| own != other);
        changes.extend(pairs.map(|((key, _), ([rows, columns], _))| format!("parallel.{key}=[{rows},{columns}]")));
        if self.schedule != from.schedule {
            changes.push(format!("parallel.{SCHEDULE}={}", self.schedule));
        }
        changes
    }

    fn distance(&self, from: &Layout) -> f64 {
        let octaves = |one: usize, other: usize| ((one.max(1) as f64) / (other.max(1) as f64)).log2().abs();
        let counts = COUNTS.iter().zip(self.counts.iter().zip(&from.counts)).enumerate();
        let counts = counts.map(|(at, ((_, _, unit), (own, other)))| match at {
            ZERO => unit * own.abs_diff(*other) as f64,
            _ => unit * octaves(*own, *other),
        });
        let pairs = PAIRS.iter().zip(self.pairs.iter().zip(&from.pairs));
        let pairs =
            pairs.map(|((_, unit), (own, other))| unit * (0..2).map(|at| octaves(own[at], other[at])).sum::<f64>());
        let schedule = if self.schedule == from.schedule { 0.0 } else { SCHEDULE_DISTANCE };
        counts.sum::<f64>() + pairs.sum::<f64>() + schedule + WORKERS_DISTANCE * octaves(self.workers, from.workers)
    }

    /// Puts it into the settings of `[parallel]`, but for what is as it was.
    fn write(&self, from: &Layout, parallel: &mut Settings) {
        for ((key, ..), (own, other)) in COUNTS.iter().zip(self.counts.iter().zip(&from.counts)) {
            if own != other {
                parallel.set(key, "job", Setting::Int(*own as i64));
            }
        }
        for ((key, _), (own, other)) in PAIRS.iter().zip(self.pairs.iter().zip(&from.pairs)) {
            if own != other {
                parallel.set(key, "job", Setting::List(own.map(|count| Setting::Int(count as i64)).to_vec()));
            }
        }
        if self.schedule != from.schedule {
            parallel.set(SCHEDULE, "job", Setting::Text(self.schedule.clone()));
        }
    }

    /// Whether it changes all that another one changes, and more.
    fn goes_beyond(&self, other: &Layout, from: &Layout) -> bool {
        let own = self.changes(from);
        let workers = other.workers == from.workers || other.workers == self.workers;
        workers && other.changes(from).iter().all(|change| own.contains(change))
    }
}

/// The largest number that a line of `[parallel.layers]` has for a way; 1 if none has any.
fn most_of_lines(parallel: &Settings, way: &str) -> usize {
    let Ok(table) = parallel.table("layers") else { return 1 };
    let number = |pattern: &str| match table.table(pattern).ok()?.peek(way)? {
        Setting::Int(value) => usize::try_from(*value).ok(),
        _ => None,
    };
    table.keys().filter_map(number).max().unwrap_or(1).clamp(1, WORKERS_MAX)
}

/// Two counts, or one of rows.
fn pair_of(setting: &Setting) -> Option<[usize; 2]> {
    let count = |setting: &Setting| match setting {
        Setting::Int(value) => usize::try_from(*value).ok().filter(|count| *count > 0),
        _ => None,
    };
    match setting {
        Setting::List(both) => match &both[..] {
            [rows, columns] => Some([count(rows)?, count(columns)?]),
            _ => None,
        },
        one => Some([count(one)?, 1]),
    }
}

/// Lines that name the nearest layouts of a job which was refused with this many workers; empty if its layout is not to blame, or
/// there are none.
pub fn layouts(root: &Settings, kinds: &Kinds<'_>, workers: usize) -> Vec<String> {
    find(root, kinds, workers).unwrap_or_default()
}

fn find(root: &Settings, kinds: &Kinds<'_>, workers: usize) -> Option<Vec<String>> {
    let fresh = || job_file::parse(&job_file::write(root), "job").ok();
    let wanted = Layout::of(&root.table("parallel").ok()?, workers)?;
    let mut plain = fresh()?;
    let counts = COUNTS.map(|(_, default, _)| default);
    let alone = Layout { counts, pairs: [[1; 2]; PAIRS.len()], schedule: ANY_SCHEDULE.into(), ..wanted.clone() };
    alone.write(&wanted, plain.table_mut("parallel", "job")?);
    // With no layout at all it can be read, so the layout is what is wrong.
    let job = Job::read_among(&plain, kinds).ok()?;
    let check = LayoutCheck::new(&job).ok()?;
    let mut tries = (NODES_MAX / check.nodes().max(1)).clamp(TRIES_MIN, TRIES_MAX);
    let mut orders = ORDERS_MAX;
    let (mut found, mut unfit): (Vec<Layout>, Vec<Layout>) = (Vec::new(), Vec::new());
    for layout in around(&wanted, job.grains) {
        if tries == 0 || orders == 0 || found.len() == NAMED_MAX {
            break;
        }
        if found.iter().any(|known| layout.goes_beyond(known, &wanted)) {
            continue;
        }
        let mut settings = fresh()?;
        layout.write(&wanted, settings.table_mut("parallel", "job")?);
        let Ok(parallel) = read_parallel(&settings, kinds, &job) else { continue };
        let model = layout.of_model();
        if job.grains_for(&parallel, layout.workers).is_err() || unfit.contains(&model) {
            continue;
        }
        orders -= 1;
        if check.order(&parallel, layout.workers).is_err() {
            continue;
        }
        tries -= 1;
        match check.run(&parallel, layout.workers) {
            Ok(()) => found.push(layout),
            Err(_) => unfit.push(model),
        }
    }
    let text = |layout: &Layout| {
        let changes = layout.changes(&wanted).into_iter().map(|change| format!(" --set {change}"));
        format!("-n {}{}", layout.workers, changes.collect::<String>())
    };
    Some(found.iter().map(text).collect())
}

fn read_parallel(root: &Settings, kinds: &Kinds<'_>, job: &Job) -> Result<Parallel, Error> {
    Ok(Parallel::read(&root.table("parallel")?, kinds.strategies, job.facts())?)
}

/// Layouts around one, the nearest first.
fn around(wanted: &Layout, grains: usize) -> Vec<Layout> {
    let mut all = vec![wanted.clone()];
    for at in [TENSOR, CONTEXT, PIPELINE, CHUNKS, ZERO] {
        let values = near(at, wanted.counts[at]);
        let with = |layout: &Layout, value: usize| {
            let mut layout = layout.clone();
            layout.counts[at] = value;
            layout
        };
        all = all.iter().flat_map(|layout| values.iter().map(move |value| with(layout, *value))).collect();
        all.truncate(CONSIDERED_MAX);
    }
    let all = all.iter().flat_map(|layout| with_schedules(layout).into_iter().flat_map(|one| with_slices(&one)));
    let all = all.flat_map(|layout| with_tiles(&layout));
    let all: Vec<Layout> = all.flat_map(|layout| with_workers(&layout, grains)).collect();
    let mut all: Vec<(f64, Layout)> = all.into_iter().map(|layout| (layout.distance(wanted), layout)).collect();
    all.retain(|(_, layout)| layout != wanted);
    all.sort_by(|one, other| one.0.total_cmp(&other.0));
    all.into_iter().map(|(_, layout)| layout).collect()
}

/// Values of a key around one.
fn near(at: usize, value: usize) -> Vec<usize> {
    let mut values = match at {
        ZERO => (0..=value.min(3)).collect(),
        CHUNKS => vec![value, 1, 2],
        // A pipeline may have any number of ranks.
        PIPELINE => {
            let below = value.min(64);
            (1..=below).chain([value]).collect()
        }
        _ => {
            let power = value.max(1).next_power_of_two();
            vec![value, power / 4, power / 2, power, 1]
        }
    };
    values.retain(|value| at == ZERO || *value > 0);
    values.sort_unstable();
    values.dedup();
    values
}

fn with_schedules(layout: &Layout) -> Vec<Layout> {
    let names = [layout.schedule.as_str(), ANY_SCHEDULE, "interleaved"];
    let mut names: Vec<&str> =
        names.into_iter().filter(|name| *name != "interleaved" || layout.counts[CHUNKS] > 1).collect();
    names.dedup();
    names.into_iter().map(|name| Layout { schedule: name.into(), ..layout.clone() }).collect()
}

/// With enough slices for whoever shares sums, and with fewer, too.
fn with_slices(layout: &Layout) -> Vec<Layout> {
    let mut enough = layout.clone();
    if !layout.by_tokens {
        enough.counts[TENSOR_SLICES] = 1;
    }
    let of_layers = if layout.by_tokens { TENSOR_SLICES } else { SLICES };
    let tokens = layout.by_tokens.then_some((SLICES, CONTEXT));
    for (slices, ranks) in [(of_layers, TENSOR)].into_iter().chain(tokens) {
        let least = layout.counts[ranks].next_power_of_two();
        enough.counts[slices] = enough.counts[slices].max(least).next_power_of_two();
    }
    let mut all = vec![layout.clone()];
    if enough != *layout {
        all.push(enough);
    }
    for times in [2, 4].into_iter().filter(|times| layout.counts[SLICES] > *times) {
        let mut fewer = layout.clone();
        fewer.counts[SLICES] /= times;
        all.push(fewer);
    }
    all
}

/// With fewer workers that share images, or enough tiles for them.
fn with_tiles(layout: &Layout) -> Vec<Layout> {
    let [spatial @ [rows, columns], tiles] = layout.pairs;
    let mut all = vec![layout.clone()];
    for fewer in [[1, 1], [rows / 2, columns], [rows, columns / 2]] {
        if fewer != spatial && !fewer.contains(&0) {
            let mut other = layout.clone();
            other.pairs[SPATIAL] = fewer;
            all.push(other);
        }
    }
    // For a model without images.
    let whole = [[1, 1]; PAIRS.len()];
    if layout.pairs != whole {
        all.push(Layout { pairs: whole, ..layout.clone() });
    }
    let enough = std::array::from_fn(|at| tiles[at].max(spatial[at]).next_power_of_two());
    if enough != tiles {
        let mut other = layout.clone();
        other.pairs[TILES] = enough;
        all.push(other);
    }
    all
}

/// With the number of workers that is wished for, if it can be, and with those below and above it that can.
fn with_workers(layout: &Layout, grains: usize) -> Vec<Layout> {
    let unit = layout.model_ranks();
    let sizes: Vec<usize> =
        (0..=grains.ilog2()).map(|power| unit << power).filter(|size| *size <= WORKERS_MAX).collect();
    let below = sizes.iter().rfind(|size| **size <= layout.workers);
    let above = sizes.iter().find(|size| **size > layout.workers);
    below.into_iter().chain(above).map(|workers| Layout { workers: *workers, ..layout.clone() }).collect()
}
