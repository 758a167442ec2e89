//! Starting from weights that were learnt before: `[model] from`, `freeze` and `fresh`.

use crate::error::Error;
use kolo_base::ShownPath;
use kolo_base::matches_pattern;
use kolo_ckpt::mapping::ARCHITECTURES;
use kolo_ckpt::transfer::read_json;
use kolo_ckpt::{RealDisk, TensorSource};
use kolo_exec::Store;
use kolo_exec::store::{Entry, Role};
use kolo_graph::settings::{SettingError, Settings};
use std::path::Path;

/// Where a model's first weights come from, and which of them stay as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StartWeights {
    /// A run, a checkpoint or a safetensors file; without one, all weights are initialised from the seed.
    pub from: Option<String>,
    /// Patterns of parameters that are not trained.
    pub freeze: Vec<String>,
    /// Patterns of parameters that are initialised from the seed whatever `from` has.
    pub fresh: Vec<String>,
}

impl StartWeights {
    /// Reads its keys of `[model]`.
    pub fn read(model: &Settings) -> Result<Self, SettingError> {
        let from = model.text("from", "")?;
        let start = Self {
            from: if from.is_empty() { None } else { Some(from) },
            freeze: model.texts("freeze", "[\"blocks.0.*\"]")?,
            fresh: model.texts("fresh", "[\"head.*\"]")?,
        };
        if start.from.is_none() && !start.fresh.is_empty() {
            return Err(model.wrong("fresh", "needs `from`", "write `from = \"runs/a\"` as well, or leave it out"));
        }
        Ok(start)
    }

    /// Whether every pattern matches a parameter, and some are left to train.
    pub fn check(&self, names: &[String], model: &Settings) -> Result<(), SettingError> {
        for (key, patterns) in [("freeze", &self.freeze), ("fresh", &self.fresh)] {
            if let Some(pattern) =
                patterns.iter().find(|pattern| !names.iter().any(|name| matches_pattern(pattern, name)))
            {
                let some: Vec<&str> = names.iter().take(4).map(String::as_str).collect();
                let message = format!("has the pattern \"{pattern}\", which matches no parameter");
                let hint =
                    format!("the model has {} parameters: {}, …; `*` matches any text", names.len(), some.join(", "));
                return Err(model.wrong(key, message, hint));
            }
        }
        match names.iter().all(|name| self.is_frozen(name)) && !names.is_empty() {
            true => Err(model.wrong("freeze", "freezes every parameter", "leave some to train")),
            false => Ok(()),
        }
    }

    pub fn is_frozen(&self, parameter: &str) -> bool {
        self.freeze.iter().any(|pattern| matches_pattern(pattern, parameter))
    }

    /// Fills the parameters and statistics of a store, but for those that are to be fresh. The store may hold a part of the model
    /// only, whose tensors are `names`, and which has these `settings`. Returns what a user should know.
    pub fn fill(
        &self,
        store: &mut Store,
        names: &[String],
        settings: &[(String, String)],
    ) -> Result<Vec<String>, Error> {
        let Some(from) = &self.from else { return Ok(Vec::new()) };
        let failed = |error: kolo_ckpt::CkptError| Error::checkpoint(&error.to_string());
        let (source, skipped) = kolo_ckpt::resolve(&RealDisk::shared(), Path::new(from)).map_err(failed)?;
        let wanted = |entry: &Entry| {
            entry.role != Role::Moment && !self.fresh.iter().any(|pattern| matches_pattern(pattern, &entry.tensor))
        };
        let wrong: Vec<String> =
            store.entries().iter().filter(|entry| wanted(entry)).filter_map(|entry| misfit(&source, entry)).collect();
        if let Some(first) = wrong.first() {
            return Err(Error::Checkpoint {
                message: format!(
                    "{from}: {first}{}",
                    if wrong.len() > 1 { format!(" (and {} more)", wrong.len() - 1) } else { String::new() }
                ),
                hint: match source.checkpoint() {
                    Some(_) => "start from weights of the same model, or name what to initialise afresh: `fresh = [\"head.*\"]`",
                    None => {
                        "weights of another library: `kolo ckpt import FILE DIR --model JOB.toml`, and start from DIR; \
                         otherwise name what to initialise afresh: `fresh = [\"head.*\"]`"
                    }
                }
                .into(),
            });
        }
        store.fill(|entry, out| match wanted(entry) {
            true => {
                let size = entry.ty.dtype.bytes();
                let mut runs = entry.region.runs(0..entry.ty.elements());
                runs.try_for_each(|(local, start, len)| {
                    let out = &mut out[local * size..(local + len) * size];
                    source.read(&entry.tensor, start..start + len, out).map_err(failed)
                })
            }
            false => Ok(()),
        })?;
        let skipped = kolo_ckpt::skipped_notes(&skipped).into_iter();
        let surplus = surplus(&source, names).map(|text| format!("note: {from} {text}"));
        Ok(skipped.chain(surplus).chain(other_config(&source, settings)).collect())
    }
}

/// What the `config.json` beside a file of weights says that is not so here, such as another epsilon: shapes do not tell.
fn other_config(source: &TensorSource, settings: &[(String, String)]) -> Option<String> {
    if source.checkpoint().is_some() {
        return None;
    }
    let beside = source.path().with_file_name("config.json");
    let config = read_json(RealDisk::shared().as_ref(), &beside).ok()??;
    let kind = settings.iter().find(|(key, _)| key == "model.kind").map(|(_, kind)| kind.trim_matches('"'))?;
    let of_kind = ARCHITECTURES.iter().find(|one| one.is_of(kind, settings) && !one.config.is_empty())?;
    let wrong = of_kind.refuses_config(&config, settings);
    (!wrong.is_empty()).then(|| format!("note: {}: {}", beside.shown(), wrong.join("; ")))
}

/// What of the weights the model has no place for, as of one with fewer layers.
fn surplus(source: &TensorSource, names: &[String]) -> Option<String> {
    let tensors = source.tensors();
    let is_weight = |tensor: &&kolo_ckpt::TensorView<'_>| tensor.role != Some(kolo_ckpt::Role::Moment);
    let left: Vec<&str> = tensors
        .iter()
        .filter(is_weight)
        .map(|tensor| tensor.name)
        .filter(|name| !names.iter().any(|known| known == name))
        .collect();
    let first = left.first()?;
    Some(match left.len() {
        1 => format!("has `{first}`, which the model does not have"),
        count => format!("has {count} tensors that the model does not have, such as `{first}`"),
    })
}

/// What keeps an entry from being filled.
fn misfit(source: &TensorSource, entry: &Entry) -> Option<String> {
    let Some(tensor) = source.tensors().into_iter().find(|tensor| tensor.name == entry.tensor) else {
        return Some(format!("it has no tensor `{}`", entry.tensor));
    };
    let same = tensor.dtype == Some(entry.ty.dtype) && tensor.shape == &entry.whole[..];
    (!same).then(|| {
        let here = format!("{}{:?}", entry.ty.dtype.name(), &entry.whole[..]).replace(' ', "");
        format!("it has `{}` as {}, but the model has {here}", entry.tensor, shown(&tensor))
    })
}

fn shown(tensor: &kolo_ckpt::TensorView<'_>) -> String {
    format!("{}{:?}", tensor.dtype.map_or("?", kolo_graph::DType::name), tensor.shape).replace(' ', "")
}
