//! A source of samples, the list of all of them, and opening one by its name.

use std::fmt;
use std::path::{Path, PathBuf};

use kolo_graph::settings::{SettingError, Settings, nearest};

use crate::error::ReadError;
use crate::file_source;
use crate::fingerprint;
use crate::load_times::LoadTimes;
use crate::sources::{addition, digits, playground, synthetic, waves};
use crate::split::Split;
use crate::stream::{self, Route, Walk};
use crate::transform::TargetScale;
use kolo_graph::field::{Column, Field, Kind};

/// What the field of the target is called.
const TARGET: &str = "y";

/// A set of samples with random access.
pub trait Source: Send + Sync + fmt::Debug {
    /// The columns of every sample.
    fn fields(&self) -> &[Field];

    /// The number of all samples; a [`Split`](crate::Split) divides them.
    fn len(&self) -> usize;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes field number `field` of `sample`, all of its elements. What is written depends on the source and these
    /// two numbers only. It may be called from several threads at once, and may take its time.
    fn fill(&self, sample: usize, field: usize, out: Column<'_>) -> Result<(), ReadError>;

    /// Writes these fields of a sample, each into the row's column of the same place. A source that reads and decodes does so
    /// once for all of them. What is written depends on the source and the draw only.
    fn read(&self, draw: Draw, fields: &[usize], row: &mut dyn Row) -> Result<(), ReadError> {
        fields.iter().enumerate().try_for_each(|(at, field)| self.fill(draw.sample, *field, row.column(at)))
    }

    /// What a sample takes to make, which decides where it is made; never what it holds.
    fn cost(&self) -> SampleCost {
        SampleCost::Read
    }

    /// A way through samples that come in an order of their own, which only the source knows; `None` if any sample can be read
    /// at any time.
    fn walk(&self, _route: &Route) -> Option<Box<dyn Walk>> {
        None
    }

    /// Bytes of samples that a walk keeps beside those of the batches.
    fn held_bytes(&self) -> usize {
        0
    }

    /// Bytes of samples that stay in memory from one epoch to the next, at most.
    fn cached_bytes(&self) -> usize {
        0
    }

    /// So many processes of this host read such a source at the same time: each takes its part of the memory for which nobody
    /// said how much it may be.
    fn share_memory(&self, _processes: usize) {}

    /// Whether reading samples in another order than that of their numbers takes long.
    fn in_order(&self) -> bool {
        false
    }

    /// Whether this file is among those that it reads, so that nobody writes over it.
    fn reads(&self, _file: &Path) -> bool {
        false
    }

    /// One line for the terminal.
    fn describe(&self) -> String;

    /// Which columns are the inputs and the target, and what was left out or guessed in reading: a line each, for the terminal.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// What tells these data from others: ranks of one job compare it when they meet. By default a digest of the fields, the
    /// number of samples, and the contents of a few of them, which is cheap for any source. A source that reads files says
    /// more: their sizes and contents.
    fn fingerprint(&self) -> Result<String, ReadError> {
        fingerprint::sampled(self)
    }

    /// Which samples are for what, if the source decides that: one that reads files does. Otherwise the seed does.
    fn split(&self) -> Option<Split> {
        None
    }

    /// What the classes of the target are called, if they have names.
    fn class_names(&self) -> Option<&[String]> {
        None
    }

    /// The characters that its tokens stand for, in the order of their numbers; `None` if tokens are not single characters.
    fn alphabet(&self) -> Option<&str> {
        None
    }

    /// What a trained model needs to see new files as it saw these, for `open_for_prediction`; `None` if it reads no files.
    fn preprocessing(&self) -> Option<String> {
        None
    }

    /// What this sample is called where it comes from.
    fn sample_name(&self, sample: usize) -> SampleName {
        SampleName { record: sample, file: None, key: None }
    }

    /// The column that would hold the target of this sample, if its files have none: such samples can be predicted, not judged.
    fn missing_target(&self, _sample: usize) -> Option<&str> {
        None
    }

    /// How its target's numbers were standardised, if they were: in what unit predictions are.
    fn target_scale(&self) -> Option<&TargetScale> {
        None
    }

    /// How many targets of the training samples are of each class; none if they are no classes.
    fn class_counts(&self, split: &Split) -> Result<Vec<u64>, ReadError> {
        let Some((at, classes)) = target_classes(self.fields()) else { return Ok(Vec::new()) };
        let (mut counts, mut targets) = (vec![0; classes], vec![0; self.fields()[at].elements()]);
        for sample in (0..split.train_len()).map(|at| split.train(at)) {
            self.fill(sample, at, Column::I32(&mut targets))?;
            count_classes(&targets, &mut counts);
        }
        Ok(counts)
    }

    /// Whether this sample was asked for and could not be read: what was given in its place is not it.
    fn is_unreadable(&self, _sample: usize) -> bool {
        false
    }

    /// Where the time of making samples went, if the source measures it.
    fn load_times(&self) -> Option<LoadTimes> {
        None
    }
}

/// The field of the target, if it is classes, and how many there are.
pub(crate) fn target_classes(fields: &[Field]) -> Option<(usize, usize)> {
    fields.iter().enumerate().find_map(|(at, field)| match field.kind {
        Kind::Index { classes } if field.name == TARGET => Some((at, classes)),
        _ => None,
    })
}

/// Counts those of the targets that count.
pub(crate) fn count_classes(targets: &[i32], counts: &mut [u64]) {
    for class in targets.iter().filter_map(|target| usize::try_from(*target).ok()) {
        counts.get_mut(class).into_iter().for_each(|count| *count += 1);
    }
}

/// What a sample is called where it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleName {
    /// Its number, from 0: of the row of a table, without the header.
    pub record: usize,
    /// Its file, if each sample has its own, or there are several.
    pub file: Option<PathBuf>,
    /// What it is called in its file.
    pub key: Option<String>,
}

/// Which sample is wanted, and what for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    pub sample: usize,
    /// The epoch that trains on it, which random transforms depend on; `None` if it is to be as it is.
    pub epoch: Option<usize>,
}

/// Where the fields of one sample are written.
pub trait Row {
    /// The place of the wanted field number `at`.
    fn column(&mut self, at: usize) -> Column<'_>;
}

/// What one sample takes to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleCost {
    /// Computed from what is in memory, in about so many nanoseconds. It never waits and never fails, so that a compute lane
    /// may make it as well.
    Computed { ns: u64 },
    /// Read from a file or a network: it may wait, and it may fail. Threads of their own make it.
    Read,
}

/// What opening a source gives.
pub type Opened = Result<Box<dyn Source>, SettingError>;

/// How one source is named and made.
#[derive(Clone, Copy, Debug)]
pub struct SourceKind {
    /// What `data.source` says, such as `builtin:digits`.
    pub name: &'static str,
    /// One line of documentation.
    pub doc: &'static str,
    /// Whether its fields are the model's inputs instead of its own.
    pub shaped_by_model: bool,
    /// Makes the source from its settings, the seed, and the model's inputs (empty unless `shaped_by_model`).
    pub make: fn(&Settings, u64, &[Field]) -> Opened,
}

/// Every source there is.
pub const SOURCES: &[SourceKind] = &[
    digits::KIND,
    playground::KIND,
    addition::KIND,
    waves::KIND,
    synthetic::TOKENS,
    synthetic::IMAGES,
    synthetic::FEATURES,
    synthetic::SERIES,
];

/// The kind of this name among `kinds`, if there is one.
pub fn find<'k>(kinds: &'k [SourceKind], source: &str) -> Option<&'k SourceKind> {
    kinds.iter().find(|kind| kind.name == source)
}

/// Opens the one of `kinds` that `data.source` names, or the files. It reads its own keys from `settings`, the `[data]`
/// section; `wanted` are the model's fields, where they are known: they tell whether a row of whole numbers is tokens.
pub fn open(kinds: &[SourceKind], source: &str, settings: &Settings, seed: u64, wanted: Option<&[Field]>) -> Opened {
    let Some(kind) = find(kinds, source) else {
        return match is_path(kinds, source) {
            true => file_source::open(source, settings, seed, wanted),
            false => Err(unknown(kinds, source, settings)),
        };
    };
    match (kind.shaped_by_model, wanted) {
        (false, _) => (kind.make)(settings, seed, &[]),
        (true, Some(wanted)) => (kind.make)(settings, seed, wanted),
        (true, None) => Err(settings.wrong(
            "source",
            format!("is \"{source}\", which takes its shape from the model, but there is no model"),
            "name a model in `[model]`, or use a source with a fixed shape, such as builtin:digits",
        )),
    }
}

fn unknown(kinds: &[SourceKind], source: &str, settings: &Settings) -> SettingError {
    let names: Vec<&str> = kinds.iter().map(|kind| kind.name).collect();
    let list = format!("the sources are {}, and files by their path", names.join(", "));
    if let Some(near) = suggestion(kinds, source) {
        let hint = format!("did you mean \"{near}\"? Otherwise {list}");
        return settings.wrong("source", format!("is \"{source}\", which is not known"), hint);
    }
    let message = match source.split_once(':') {
        Some((scheme, _)) => format!("is \"{source}\", but there is no `{scheme}:` source of that name"),
        None => format!("is \"{source}\", but there is no source of that name"),
    };
    settings.wrong("source", message, list)
}

/// Whether this is no name but a file, there or not.
fn is_path(kinds: &[SourceKind], source: &str) -> bool {
    let scheme = kinds.iter().any(|kind| kind.name.split(':').next() == source.split(':').next());
    source == stream::STANDARD_INPUT
        || Path::new(source).exists()
        || (!scheme && !source.contains("://") && source.contains(['/', '.', '\\', '*']))
}

/// The source meant by a name with a typing error, or by a name without its scheme.
fn suggestion(kinds: &[SourceKind], source: &str) -> Option<&'static str> {
    let short = |name: &'static str| name.split_once(':').map_or(name, |(_, short)| short);
    nearest(source, kinds.iter().map(|kind| kind.name)).or_else(|| {
        let near = nearest(source, kinds.iter().map(|kind| short(kind.name)))?;
        kinds.iter().map(|kind| kind.name).find(|name| short(name) == near)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::field::IGNORED;

    fn settings() -> Settings {
        Settings::new("data", "job.toml:3")
    }

    /// Inputs of a model that the source of this name can serve.
    fn wanted(name: &str) -> Vec<Field> {
        let label = Field::index("y", &[], 10);
        match name {
            "synthetic:tokens" => vec![Field::index("x", &[16], 50), Field::index("y", &[16], 50)],
            "synthetic:images" => vec![Field::real("x", &[3, 8, 8]), label],
            "synthetic:series" => vec![Field::real("x", &[12, 2]), Field::real("y", &[2])],
            _ => vec![Field::real("x", &[20]), label],
        }
    }

    /// The values of one field as f64, whatever its kind.
    fn values(source: &dyn Source, sample: usize, field: usize) -> Vec<f64> {
        let elements = source.fields()[field].elements();
        match source.fields()[field].kind {
            Kind::Real => {
                let mut out = vec![f32::NAN; elements];
                source.fill(sample, field, Column::F32(&mut out)).unwrap();
                out.into_iter().map(f64::from).collect()
            }
            Kind::Index { .. } => {
                let mut out = vec![i32::MIN; elements];
                source.fill(sample, field, Column::I32(&mut out)).unwrap();
                out.into_iter().map(f64::from).collect()
            }
        }
    }

    #[test]
    fn every_source_fills_every_field_within_its_range() {
        for kind in SOURCES {
            let source = open(SOURCES, kind.name, &settings(), 1, Some(&wanted(kind.name))).unwrap();
            assert!(source.describe().starts_with(kind.name) && !source.describe().contains('\n'));
            assert!(source.fields().iter().any(|field| field.name == "x"), "{}", kind.name);
            for sample in [0, 1, source.len() / 2, source.len() - 1] {
                for (number, field) in source.fields().iter().enumerate() {
                    let values = values(&*source, sample, number);
                    let good = |value: &f64| match field.kind {
                        Kind::Real => value.is_finite(),
                        Kind::Index { classes } => (f64::from(IGNORED)..classes as f64).contains(value),
                    };
                    assert!(values.iter().all(good), "{} {field} {values:?}", kind.name);
                }
            }
        }
    }

    #[test]
    fn every_source_repeats_itself_in_any_order() {
        for kind in SOURCES {
            let [first, second] =
                [(); 2].map(|()| open(SOURCES, kind.name, &settings(), 1, Some(&wanted(kind.name))).unwrap());
            let read = |source: &dyn Source, sample| (values(source, sample, 0), values(source, sample, 1));
            let forward: Vec<_> = (0..20).map(|sample| read(&*first, sample)).collect();
            let backward: Vec<_> = (0..20).rev().map(|sample| read(&*second, sample)).collect();
            assert!(forward.iter().eq(backward.iter().rev()), "{}", kind.name);
        }
    }

    #[test]
    fn sources_shaped_by_the_model_have_its_fields() {
        for kind in SOURCES.iter().filter(|kind| kind.shaped_by_model) {
            let wanted = wanted(kind.name);
            assert_eq!(open(SOURCES, kind.name, &settings(), 1, Some(&wanted)).unwrap().fields(), wanted);
            let error = open(SOURCES, kind.name, &settings(), 1, None).unwrap_err().to_string();
            assert!(error.contains("takes its shape from the model"), "{error}");
        }
    }

    #[test]
    fn the_readme_lists_every_source() {
        let readme = include_str!("../README.md");
        for kind in SOURCES {
            let row = format!("| `{}` | {} |", kind.name, kind.doc);
            assert!(readme.contains(&row), "README.md lacks the row: {row}");
        }
    }

    #[test]
    fn unknown_sources_are_explained() {
        let names = "builtin:digits, builtin:playground, builtin:addition, builtin:waves, synthetic:tokens, \
                     synthetic:images, synthetic:features, synthetic:series, and files by their path";
        let place = "job.toml:3: `data.source`";
        for (source, expected) in [
            (
                "builtin:digit",
                format!(
                    "{place} is \"builtin:digit\", which is not known\n  hint: did you mean \"builtin:digits\"? \
                     Otherwise the sources are {names}"
                ),
            ),
            (
                "waves",
                format!(
                    "{place} is \"waves\", which is not known\n  hint: did you mean \"builtin:waves\"? \
                     Otherwise the sources are {names}"
                ),
            ),
            (
                "cats/train.csv",
                format!(
                    "{place} is \"cats/train.csv\", but there is no such file\n  \
                     hint: check the path; a relative one starts where kolo was started"
                ),
            ),
            (
                "cats/*.csv",
                format!(
                    "{place} is \"cats/*.csv\", which matches no file\n  \
                     hint: check the path; a relative one starts where kolo was started"
                ),
            ),
            (
                "s3://bucket/cats",
                format!(
                    "{place} is \"s3://bucket/cats\", but there is no `s3:` source of that name\n  \
                     hint: the sources are {names}"
                ),
            ),
        ] {
            assert_eq!(open(SOURCES, source, &settings(), 1, None).unwrap_err().to_string(), expected);
        }
    }
}
