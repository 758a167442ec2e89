//! Transforms: what `data.transforms` lists, each made once and then run on every sample.
//!
//! A transform changes a sample in place. What it does depends on its settings, on the sample, and, if it is random, on
//! (seed, its place in the list, epoch, sample): never on who runs it, or when. Without an epoch, as in an evaluation, those
//! that augment do nothing random.

use crate::error::ReadError;
use crate::format::OpenError;
use crate::image::Pixels;
use crate::resample::Resampler;
use crate::sample::{Form, Sample};
use crate::source::Draw;
use crate::split::Split;
use crate::transforms::{crop, flip, jitter, mask, mixup, normalise, one_hot, pack, resize, standardise};
use kolo_graph::rng::Stream;
use kolo_graph::settings::{SettingError, Settings, nearest};
use std::fmt;

/// One step of the way from a record to a batch.
pub trait Transform: Send + Sync + fmt::Debug {
    /// Changes a sample.
    fn apply(&self, sample: &mut Sample, cx: &mut Cx<'_>) -> Result<(), ReadError>;

    /// Whether it draws random numbers: what comes before the first that does may be cached.
    fn is_random(&self) -> bool {
        false
    }

    /// How it changes the numbers of the target, if it does so.
    fn target_scale(&self) -> Option<&TargetScale> {
        None
    }
}

/// How the numbers of a target were standardised: a value is (number − mean) ÷ deviation.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetScale {
    pub mean: Vec<f32>,
    /// Never 0.
    pub deviation: Vec<f32>,
}

/// Digits that tell an f32 from all others.
const DIGITS_MAX: usize = 9;

impl TargetScale {
    /// What a number of a sample, the one at this place, is to a model.
    pub fn standard(&self, at: usize, number: f32) -> f32 {
        (number - self.mean[at]) / self.deviation[at]
    }

    /// The number in its own unit that value `at` of a sample stands for: of all that do, the one with the fewest digits, so that
    /// a target comes back as it stands in its file.
    pub fn in_unit(&self, at: usize, value: f32) -> f32 {
        let at = at % self.mean.len().max(1);
        let number = f64::from(value) * f64::from(self.deviation[at]) + f64::from(self.mean[at]);
        let rounded = |digits: usize| format!("{number:.*e}", digits - 1).parse::<f32>().ok();
        let stands_for_it = |number: &f32| self.standard(at, *number) == value;
        (1..=DIGITS_MAX).filter_map(rounded).find(stands_for_it).unwrap_or(number as f32)
    }
}

/// A kind of transform.
#[derive(Clone, Copy, Debug)]
pub struct TransformKind {
    /// What `kind` says.
    pub name: &'static str,
    /// One line of documentation.
    pub doc: &'static str,
    /// Its keys, with their defaults.
    pub keys: &'static str,
    /// When it runs.
    pub when: &'static str,
    pub make: Make,
}

/// Makes a transform of its table, and changes the form that samples have before it to the one that they have after it.
pub type Make = fn(&Settings, &mut Form, &mut Setup<'_>) -> Result<Box<dyn Transform>, OpenError>;

/// On every sample.
pub const ALWAYS: &str = "always";
/// On training samples only.
pub const TRAINING: &str = "training";

/// Every transform there is.
pub const TRANSFORMS: &[TransformKind] = &[
    resize::KIND,
    crop::KIND,
    flip::KIND,
    jitter::KIND,
    normalise::KIND,
    mixup::KIND,
    standardise::KIND,
    one_hot::KIND,
    pack::KIND,
    mask::KIND,
];

/// What a transform may ask for when it is made.
#[derive(Debug)]
pub struct Setup<'a> {
    pub seed: u64,
    /// Its place in the list.
    pub at: usize,
    /// Transforms that samples go through before it.
    pub before: usize,
    pub split: Split,
    pub training: &'a dyn VisitTraining,
    pub fitted: &'a mut Fitted,
}

/// Training samples, as they are after the transforms that come before.
pub trait VisitTraining: fmt::Debug {
    fn visit(&self, visitor: &mut dyn FnMut(&Sample)) -> Result<(), ReadError>;
}

/// Numbers that transforms took from the training samples, by the place of the transform and a name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fitted {
    pub values: Vec<(String, Vec<f32>)>,
    /// They are those of an earlier run: training samples are not asked.
    pub complete: bool,
}

impl Setup<'_> {
    /// The stream of random numbers of this transform.
    pub fn stream(&self) -> Stream {
        Stream::new(self.seed, &format!("data.transforms[{}]", self.at))
    }

    /// Numbers that come from the training samples, or were saved when they did.
    pub fn fit(
        &mut self,
        name: &str,
        find: impl FnOnce(&dyn VisitTraining) -> Result<Vec<f32>, ReadError>,
    ) -> Result<Vec<f32>, ReadError> {
        let key = format!("transforms[{}].{name}", self.at);
        if let Some((_, values)) = self.fitted.values.iter().find(|(known, _)| *known == key) {
            return Ok(values.clone());
        }
        if self.fitted.complete {
            let message = format!("the saved preprocessing has no `{key}`");
            return Err(ReadError::new(message, "use the job file that the model was trained with"));
        }
        let values = find(self.training)?;
        self.fitted.values.push((key, values.clone()));
        Ok(values)
    }
}

/// What a transform may use while it runs.
#[derive(Debug)]
pub struct Cx<'a> {
    pub draw: Draw,
    pub work: &'a mut Work,
    pub others: &'a dyn Others,
}

/// Other samples, for those that mix.
pub trait Others: fmt::Debug {
    /// Sample `draw` after the first `transforms` of the list.
    fn load(&self, draw: Draw, transforms: usize, use_it: &mut dyn FnMut(&Sample)) -> Result<(), ReadError>;
}

/// Memory that is used again from one sample to the next.
#[derive(Debug, Default)]
pub struct Work {
    pub pixels: Pixels,
    pub(crate) resampler: Resampler,
}

/// Blocks of random words that one transform may draw for a sample and an epoch.
const BLOCK_BITS: u32 = 24;
/// What stands for the epoch where there is none.
const NO_EPOCH: u64 = (1 << (u64::BITS - BLOCK_BITS)) - 1;

impl Cx<'_> {
    /// Four random words, number `block` of this stream for the sample and the epoch.
    pub fn words(&self, stream: &Stream, block: u64) -> [u32; 4] {
        let epoch = self.draw.epoch.map_or(NO_EPOCH, |epoch| epoch as u64);
        stream.block(self.draw.sample as u64, epoch << BLOCK_BITS | block)
    }

    pub fn trains(&self) -> bool {
        self.draw.epoch.is_some()
    }
}

/// The transform that this table names, made.
pub(crate) fn make(table: &Settings, form: &mut Form, setup: &mut Setup<'_>) -> Result<Box<dyn Transform>, OpenError> {
    let kind = kind(table)?;
    let transform = (kind.make)(table, form, setup)?;
    table.finish()?;
    Ok(transform)
}

/// The kind that a table of the list names.
pub(crate) fn kind(table: &Settings) -> Result<&'static TransformKind, SettingError> {
    let names: Vec<&str> = TRANSFORMS.iter().map(|kind| kind.name).collect();
    let name = table.text("kind", "")?;
    TRANSFORMS.iter().find(|kind| kind.name == name).ok_or_else(|| {
        let near = nearest(&name, names.iter().copied());
        let near = near.map_or(String::new(), |near| format!("did you mean \"{near}\"? "));
        let message = if name.is_empty() { "is missing".into() } else { format!("is \"{name}\", which is not known") };
        table.wrong("kind", message, format!("{near}The transforms are {}", names.join(", ")))
    })
}

/// A table's wrong use: it stands where the samples are something else.
pub(crate) fn misplaced(table: &Settings, wants: &str) -> OpenError {
    let message = format!("is for {wants}, which the samples are not at this point");
    table.wrong("kind", message, "change the order of the list, or leave it out").into()
}

/// `size = 224` or `size = [224, 256]`: height and width, the second absent.
pub(crate) fn read_size(table: &Settings) -> Result<(usize, Option<usize>), SettingError> {
    /// Pixels of a side.
    const SIDE_MAX: usize = 1 << 14;
    use kolo_graph::settings::Setting;
    match table.peek("size") {
        Some(Setting::List(_)) => match table.counts("size", &[224, 224])?[..] {
            [height, width] => match [height, width].into_iter().find(|side| !(1..=SIDE_MAX).contains(side)) {
                None => Ok((height, Some(width))),
                Some(side) => {
                    let message = format!("has a side of {side} pixels, but must be between 1 and {SIDE_MAX}");
                    Err(table.wrong("size", message, "write `size = [224, 224]`"))
                }
            },
            _ => Err(table.wrong("size", "must be height and width", "write `size = [224, 224]`")),
        },
        None => Err(table.wrong("size", "is missing", "write `size = 224` or `size = [224, 224]`")),
        Some(_) => Ok((table.count_in("size", 224, 1, SIDE_MAX)?, None)),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::sample::ValueForm;
    use kolo_graph::settings::Setting;

    /// No other sample, and no training sample but these.
    #[derive(Debug, Default)]
    pub struct Few(pub Vec<Sample>);

    impl Others for Few {
        fn load(&self, draw: Draw, _: usize, use_it: &mut dyn FnMut(&Sample)) -> Result<(), ReadError> {
            use_it(&self.0[draw.sample]);
            Ok(())
        }
    }

    impl VisitTraining for Few {
        fn visit(&self, visitor: &mut dyn FnMut(&Sample)) -> Result<(), ReadError> {
            self.0.iter().for_each(visitor);
            Ok(())
        }
    }

    pub fn table(keys: &[(&str, Setting)]) -> Settings {
        let mut table = Settings::new("data.transforms[0]", "job.toml:3");
        keys.iter().for_each(|(key, value)| table.set(key, "job.toml:3", value.clone()));
        table
    }

    pub fn list(values: &[f64]) -> Setting {
        Setting::List(values.iter().map(|value| Setting::Float(*value)).collect())
    }

    pub fn made(keys: &[(&str, Setting)], form: &mut Form, few: &Few) -> Result<Box<dyn Transform>, String> {
        let mut fitted = Fitted::default();
        let split = Split::given(few.0.len().max(1), 0);
        let mut setup = Setup { seed: 1, at: 0, before: 0, split, training: few, fitted: &mut fitted };
        make(&table(keys), form, &mut setup).map_err(|error| error.to_string())
    }

    pub fn applied(transform: &dyn Transform, sample: &Sample, draw: Draw, few: &Few) -> Result<Sample, String> {
        let mut sample = sample.clone();
        let mut cx = Cx { draw, work: &mut Work::default(), others: few };
        transform.apply(&mut sample, &mut cx).map_err(|error| error.to_string())?;
        Ok(sample)
    }

    pub fn text(text: &str) -> Setting {
        Setting::Text(text.into())
    }

    pub fn image(channels: usize, height: usize, width: usize) -> (Form, Sample) {
        let mut sample = Sample::default();
        let bytes = (0..channels * height * width).map(|at| (at * 37 % 256) as u8).collect();
        *sample.x.set_pixels() = Pixels { channels, height, width, bytes };
        sample.y.set_indices().push(1);
        let x = ValueForm::Image { channels, height: Some(height), width: Some(width) };
        (Form { x, y: Some(ValueForm::Indices { shape: vec![], classes: 3 }) }, sample)
    }

    #[test]
    fn unknown_transforms_are_explained() {
        let (mut form, _) = image(3, 2, 2);
        assert_eq!(
            made(&[("kind", text("flop"))], &mut form, &Few::default()).unwrap_err().split(" The ").next(),
            Some(
                "job.toml:3: `data.transforms[0].kind` is \"flop\", which is not known\n  hint: did you mean \"flip\"?"
            )
        );
        let error = made(&[], &mut form, &Few::default()).unwrap_err();
        assert!(error.contains("`data.transforms[0].kind` is missing"), "{error}");
        let odd = [("kind", text("flip")), ("horizonal", Setting::Float(0.5))];
        assert!(made(&odd, &mut form, &Few::default()).unwrap_err().contains("did you mean `horizontal`?"));
    }

    #[test]
    fn random_words_depend_on_seed_epoch_and_sample_only() {
        let words = |sample, epoch| {
            let mut work = Work::default();
            let cx = Cx { draw: Draw { sample, epoch }, work: &mut work, others: &Few::default() };
            cx.words(&Stream::new(1, "test"), 3)
        };
        assert_eq!(words(4, Some(2)), words(4, Some(2)));
        let all = [words(4, Some(2)), words(4, Some(3)), words(5, Some(2)), words(4, None)];
        assert!((0..4).all(|a| (0..a).all(|b| all[a] != all[b])));
    }

    #[test]
    fn the_guide_lists_every_transform() {
        let guide = include_str!("../../../docs/data.md");
        for kind in TRANSFORMS {
            let row = format!("| `{}` | {} | {} | {} |", kind.name, kind.doc, kind.keys, kind.when);
            assert!(guide.contains(&row), "docs/data.md lacks the row: {row}");
        }
    }
}
