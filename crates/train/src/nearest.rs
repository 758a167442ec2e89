//! The layouts nearest to one that a job cannot have, which an error names beside its reason. Each of them was checked as the
//! job itself is.

use crate::error::Error;
use crate::job::{Job, Kinds};
use crate::job_file;
use crate::step::LayoutCheck;
use kolo_graph::settings::{Setting, Settings};
use kolo_parallel::Parallel;
use kolo_parallel::keys::{self, SequenceSplit, TUNABLE, TUNABLE_PAIRS, Tunable, TunablePair, Unit};
use kolo_parallel::schedules::{FAMILIES, USUAL};
use kolo_parallel::strategy::Key;

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

/// Images that nobody shares, and the places of workers and tiles among [`TUNABLE_PAIRS`].
const WHOLE: [[usize; 2]; TUNABLE_PAIRS.len()] = [[1; 2]; TUNABLE_PAIRS.len()];
const SPATIAL: usize = 0;
const TILES: usize = 1;

const SCHEDULE_DISTANCE: f64 = 0.9;
const WORKERS_DISTANCE: f64 = 1.1;

/// A layout, as far as it may change.
#[derive(Clone, Debug, PartialEq)]
struct NearLayout {
    workers: usize,
    /// The values of [`TUNABLE`].
    counts: [usize; TUNABLE.len()],
    /// The values of [`TUNABLE_PAIRS`].
    pairs: [[usize; 2]; TUNABLE_PAIRS.len()],
    schedule: String,
    /// Tokens have slices of their own, and layers others.
    by_tokens: bool,
    /// Workers that lines of `[parallel.layers]` give to layers: with `spatial`, and with `tensor`.
    lines: [usize; 2],
}

impl NearLayout {
    /// As a job file has it; `None` if one of its keys is no such thing, which is what to mend first.
    fn of(parallel: &Settings, workers: usize) -> Option<Self> {
        let mut counts = [0; TUNABLE.len()];
        for (count, Tunable { key, .. }) in counts.iter_mut().zip(TUNABLE) {
            *count = match parallel.peek(key.name) {
                None => key.default_count(),
                Some(Setting::Int(value)) => usize::try_from(*value).ok()?,
                Some(_) => return None,
            };
        }
        let mut pairs = WHOLE;
        for (pair, TunablePair { key, .. }) in pairs.iter_mut().zip(TUNABLE_PAIRS) {
            *pair = parallel.peek(key.name).map_or(Some([1, 1]), pair_of)?;
        }
        let schedule = match parallel.peek(keys::SCHEDULE.name) {
            None => USUAL.name.to_string(),
            Some(Setting::Text(text)) => text.clone(),
            Some(_) => return None,
        };
        let by_tokens = match parallel.peek(keys::SEQUENCE.name) {
            Some(Setting::Text(text)) => SequenceSplit::named(text).axis().is_some(),
            _ => false,
        };
        let lines = [keys::SPATIAL, keys::TENSOR].map(|key| most_of_lines(parallel, key.name));
        Some(Self { workers, counts, pairs, schedule, by_tokens, lines })
    }

    /// What decides whether the model can be split so.
    fn of_model(&self) -> Self {
        let mut model = Self { workers: 0, ..self.clone() };
        model.counts[place_of(&keys::ZERO)] = 0;
        model
    }

    /// What differs from another, as assignments of `--set`.
    fn changes(&self, from: &NearLayout) -> Vec<String> {
        let counts = TUNABLE.iter().zip(self.counts.iter().zip(&from.counts));
        let counts = counts.filter(|(_, (own, other))| own != other);
        let mut changes: Vec<String> =
            counts.map(|(one, (own, _))| format!("parallel.{}={own}", one.key.name)).collect();
        let pairs = TUNABLE_PAIRS.iter().zip(self.pairs.iter().zip(&from.pairs));
        let pairs = pairs.filter(|(_, (own, other))| own != other);
        changes
            .extend(pairs.map(|(one, ([rows, columns], _))| format!("parallel.{}=[{rows},{columns}]", one.key.name)));
        if self.schedule != from.schedule {
            changes.push(format!("parallel.{}={}", keys::SCHEDULE.name, self.schedule));
        }
        changes
    }

    fn distance(&self, from: &NearLayout) -> f64 {
        let octaves = |one: usize, other: usize| ((one.max(1) as f64) / (other.max(1) as f64)).log2().abs();
        let counts = TUNABLE.iter().zip(self.counts.iter().zip(&from.counts));
        let counts = counts.map(|(one, (own, other))| match one.unit {
            Unit::One => one.distance * own.abs_diff(*other) as f64,
            Unit::Doubling => one.distance * octaves(*own, *other),
        });
        let pairs = TUNABLE_PAIRS.iter().zip(self.pairs.iter().zip(&from.pairs));
        let pairs =
            pairs.map(|(one, (own, other))| one.distance * (0..2).map(|at| octaves(own[at], other[at])).sum::<f64>());
        let schedule = if self.schedule == from.schedule { 0.0 } else { SCHEDULE_DISTANCE };
        counts.sum::<f64>() + pairs.sum::<f64>() + schedule + WORKERS_DISTANCE * octaves(self.workers, from.workers)
    }

    /// Puts it into the settings of `[parallel]`, but for what is as it was.
    fn write(&self, from: &NearLayout, parallel: &mut Settings) {
        for (one, (own, other)) in TUNABLE.iter().zip(self.counts.iter().zip(&from.counts)) {
            if own != other {
                parallel.set(one.key.name, "job", Setting::Int(*own as i64));
            }
        }
        for (one, (own, other)) in TUNABLE_PAIRS.iter().zip(self.pairs.iter().zip(&from.pairs)) {
            if own != other {
                parallel.set(one.key.name, "job", Setting::List(own.map(|count| Setting::Int(count as i64)).to_vec()));
            }
        }
        if self.schedule != from.schedule {
            parallel.set(keys::SCHEDULE.name, "job", Setting::Text(self.schedule.clone()));
        }
    }

    fn count(&self, key: &Key) -> usize {
        self.counts[place_of(key)]
    }

    fn count_mut(&mut self, key: &Key) -> &mut usize {
        &mut self.counts[place_of(key)]
    }

    /// Workers of one data rank.
    fn unit(&self) -> usize {
        let counts = TUNABLE.iter().zip(&self.counts).filter(|(one, _)| one.takes_workers);
        let (spatial, tiles) = (self.pairs[SPATIAL], self.pairs[TILES]);
        // Lines say how many workers there are where no key does, and those of both ways are the same.
        let images = if spatial == [1, 1] { self.lines[0] } else { spatial[0] * spatial[1] };
        let is_cut = images > 1 || tiles != [1, 1];
        let layers = if is_cut || self.counts[place_of(&keys::TENSOR)] > 1 { 1 } else { self.lines[1] };
        counts.map(|(_, ranks)| ranks).product::<usize>() * images * layers
    }

    /// Whether it changes all that another one changes, and more.
    fn goes_beyond(&self, other: &NearLayout, from: &NearLayout) -> bool {
        let own = self.changes(from);
        let workers = other.workers == from.workers || other.workers == self.workers;
        workers && other.changes(from).iter().all(|change| own.contains(change))
    }
}

/// The place of a key among [`TUNABLE`].
fn place_of(key: &Key) -> usize {
    TUNABLE.iter().position(|one| one.key == *key).expect("a key that may change")
}

/// The largest number that a line of `[parallel.layers]` has for a way; 1 if none has any.
fn most_of_lines(parallel: &Settings, way: &str) -> usize {
    let Ok(table) = parallel.table(keys::LAYERS.name) else { return 1 };
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
    let wanted = NearLayout::of(&root.table("parallel").ok()?, workers)?;
    let mut plain = fresh()?;
    let counts = TUNABLE.map(|one| one.key.default_count());
    let alone = NearLayout { counts, pairs: WHOLE, schedule: USUAL.name.into(), ..wanted.clone() };
    alone.write(&wanted, plain.table_mut("parallel", "job")?);
    // With no layout at all it can be read, so the layout is what is wrong.
    let job = Job::read_among(&plain, kinds).ok()?;
    let check = LayoutCheck::new(&job).ok()?;
    let mut tries = (NODES_MAX / check.nodes().max(1)).clamp(TRIES_MIN, TRIES_MAX);
    let mut orders = ORDERS_MAX;
    let (mut found, mut unfit): (Vec<NearLayout>, Vec<NearLayout>) = (Vec::new(), Vec::new());
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
    let text = |layout: &NearLayout| {
        let changes = layout.changes(&wanted).into_iter().map(|change| format!(" --set {change}"));
        format!("-n {}{}", layout.workers, changes.collect::<String>())
    };
    Some(found.iter().map(text).collect())
}

fn read_parallel(root: &Settings, kinds: &Kinds<'_>, job: &Job) -> Result<Parallel, Error> {
    Ok(Parallel::read(&root.table("parallel")?, kinds.strategies, job.facts())?)
}

/// Layouts around one, the nearest first.
fn around(wanted: &NearLayout, grains: usize) -> Vec<NearLayout> {
    let mut all = vec![wanted.clone()];
    for (at, tunable) in TUNABLE.iter().enumerate() {
        let values = near(tunable, wanted.counts[at]);
        let with = |layout: &NearLayout, value: usize| {
            let mut layout = layout.clone();
            layout.counts[at] = value;
            layout
        };
        all = all.iter().flat_map(|layout| values.iter().map(move |value| with(layout, *value))).collect();
        all.truncate(CONSIDERED_MAX);
    }
    let all = all.iter().flat_map(|layout| with_schedules(layout).into_iter().flat_map(|one| with_slices(&one)));
    let all = all.flat_map(|layout| with_tiles(&layout));
    let all: Vec<NearLayout> = all.flat_map(|layout| with_workers(&layout, grains)).collect();
    let mut all: Vec<(f64, NearLayout)> = all.into_iter().map(|layout| (layout.distance(wanted), layout)).collect();
    all.retain(|(_, layout)| layout != wanted);
    all.sort_by(|one, other| one.0.total_cmp(&other.0));
    all.into_iter().map(|(_, layout)| layout).collect()
}

/// Values of a key around one.
fn near(tunable: &Tunable, value: usize) -> Vec<usize> {
    let least = tunable.key.default_count();
    let mut values: Vec<usize> = (tunable.near)(value).into_iter().filter(|value| *value >= least).collect();
    // What follows from others stays as it is for now.
    if values.is_empty() || value >= least {
        values.push(value);
    }
    values.sort_unstable();
    values.dedup();
    values
}

fn with_schedules(layout: &NearLayout) -> Vec<NearLayout> {
    let chunked = FAMILIES.iter().filter(|family| family.has_chunks && layout.count(&keys::CHUNKS) > 1);
    let mut names = vec![layout.schedule.as_str(), USUAL.name];
    names.extend(chunked.map(|family| family.name));
    names.dedup();
    names.into_iter().map(|name| NearLayout { schedule: name.into(), ..layout.clone() }).collect()
}

/// With enough slices for whoever shares sums, and with fewer, too.
fn with_slices(layout: &NearLayout) -> Vec<NearLayout> {
    let mut enough = layout.clone();
    if !layout.by_tokens {
        *enough.count_mut(&keys::TENSOR_SLICES) = 1;
    }
    let of_layers = if layout.by_tokens { keys::TENSOR_SLICES } else { keys::SLICES };
    let tokens = layout.by_tokens.then_some((keys::SLICES, keys::CONTEXT));
    for (slices, ranks) in [(of_layers, keys::TENSOR)].into_iter().chain(tokens) {
        let least = layout.count(&ranks).next_power_of_two();
        *enough.count_mut(&slices) = enough.count(&slices).max(least).next_power_of_two();
    }
    let mut all = vec![layout.clone()];
    if enough != *layout {
        all.push(enough);
    }
    for times in [2, 4].into_iter().filter(|times| layout.count(&keys::SLICES) > *times) {
        let mut fewer = layout.clone();
        *fewer.count_mut(&keys::SLICES) /= times;
        all.push(fewer);
    }
    all
}

/// With fewer workers that share images, or enough tiles for them.
fn with_tiles(layout: &NearLayout) -> Vec<NearLayout> {
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
    if layout.pairs != WHOLE {
        all.push(NearLayout { pairs: WHOLE, ..layout.clone() });
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
fn with_workers(layout: &NearLayout, grains: usize) -> Vec<NearLayout> {
    let unit = layout.unit();
    let sizes: Vec<usize> =
        (0..=grains.ilog2()).map(|power| unit << power).filter(|size| *size <= WORKERS_MAX).collect();
    let below = sizes.iter().rfind(|size| **size <= layout.workers);
    let above = sizes.iter().find(|size| **size > layout.workers);
    below.into_iter().chain(above).map(|workers| NearLayout { workers: *workers, ..layout.clone() }).collect()
}
