//! `mixup`: a sample blended with another training sample (Zhang et al. 2018).
//!
//! Models take one class per sample, where the paper's loss is that of both classes, weighed. So the class is drawn: that of a
//! sample as often as the sample weighs. The loss and its gradient are then the paper's on average over the draws. The first
//! sample weighs at least a half, which changes nothing, as each of a pair is as often the first. Targets that are numbers are
//! blended like the input.

use crate::error::ReadError;
use crate::format::OpenError;
use crate::sample::{Form, Held, Sample, Value, ValueForm, unit_of_byte};
use crate::source::Draw;
use crate::split::Split;
use crate::transform::{Cx, Setup, TRAINING, Transform, TransformKind, misplaced};
use kolo_graph::rng::{Stream, exp, ln, unit};
use kolo_graph::settings::Settings;

pub const KIND: TransformKind = TransformKind {
    name: "mixup",
    doc: "a blend with another training sample; the class is that of either, as often as it weighs",
    keys: "`alpha = 0.2` (0.05 to 2: the weight is Beta(alpha, alpha)), `probability = 1.0`",
    when: TRAINING,
    make,
};

/// Pairs of numbers that are tried for a weight. At alpha 2 one in six is taken.
const TRIES: u64 = 256;

#[derive(Debug)]
struct Mixup {
    alpha: f64,
    probability: f32,
    stream: Stream,
    /// Transforms before this one, which the other sample goes through too.
    before: usize,
    split: Split,
}

fn make(table: &Settings, form: &mut Form, setup: &mut Setup<'_>) -> Result<Box<dyn Transform>, OpenError> {
    form.x = match &form.x {
        ValueForm::Image { channels, height: Some(height), width: Some(width) } => {
            ValueForm::Reals { shape: vec![*channels, *height, *width], columns: vec![] }
        }
        ValueForm::Reals { shape, columns } => ValueForm::Reals { shape: shape.clone(), columns: columns.clone() },
        _ => return Err(misplaced(table, "numbers or images of one size")),
    };
    Ok(Box::new(Mixup {
        alpha: table.float_in("alpha", 0.2, 0.05, 2.0)?,
        probability: table.float_in("probability", 1.0, 0.0, 1.0)? as f32,
        stream: setup.stream(),
        before: setup.before,
        split: setup.split,
    }))
}

impl Mixup {
    /// A weight from a half to one: Jöhnk's method, on our own logarithm and exponential.
    fn weight(&self, cx: &Cx<'_>) -> f32 {
        let power = |word: u32| exp(ln((f64::from(word) + 0.5) / 4_294_967_296.0) / self.alpha);
        let tried = (0..TRIES).find_map(|attempt| {
            let [a, b, ..] = cx.words(&self.stream, 1 + attempt);
            let (x, y) = (power(a), power(b));
            (x + y <= 1.0 && x + y > 0.0).then(|| x / (x + y))
        });
        tried.map_or(0.5, |weight| weight.max(1.0 - weight)) as f32
    }
}

fn to_reals(value: &mut Value) {
    if value.held == Held::Pixels {
        value.pixels_to_reals(|_| std::array::from_fn(|byte| unit_of_byte(byte as u8)));
    }
}

/// `into = weight · into + (1 − weight) · other`, where pixels are 0 to 1.
fn blend(into: &mut Value, other: &Value, weight: f32) {
    match other.held {
        Held::Pixels => {
            let (channels, area) = (other.pixels.channels, other.pixels.height * other.pixels.width);
            for (channel, plane) in into.reals.chunks_exact_mut(area.max(1)).enumerate() {
                let bytes = other.pixels.bytes[channel..].iter().step_by(channels);
                let both = plane.iter_mut().zip(bytes);
                both.for_each(|(value, byte)| *value = weight * *value + (1.0 - weight) * unit_of_byte(*byte));
            }
        }
        Held::Reals => {
            let both = into.reals.iter_mut().zip(&other.reals);
            both.for_each(|(value, other)| *value = weight * *value + (1.0 - weight) * *other);
        }
        Held::Nothing | Held::Indices => {}
    }
}

impl Transform for Mixup {
    fn apply(&self, sample: &mut Sample, cx: &mut Cx<'_>) -> Result<(), ReadError> {
        to_reals(&mut sample.x);
        let [a, b, c, d] = cx.words(&self.stream, 0);
        if !cx.trains() || unit(a) >= self.probability {
            return Ok(());
        }
        let bits = u64::from(b) | u64::from(c) << 32;
        let other = ((u128::from(bits) * self.split.train_len() as u128) >> 64) as usize;
        let draw = Draw { sample: self.split.train(other), epoch: cx.draw.epoch };
        let weight = self.weight(cx);
        cx.others.load(draw, self.before, &mut |other| {
            blend(&mut sample.x, &other.x, weight);
            match sample.y.held {
                Held::Reals => blend(&mut sample.y, &other.y, weight),
                Held::Indices if unit(d) >= weight => sample.y.indices.clone_from(&other.y.indices),
                _ => {}
            }
        })
    }

    fn is_random(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transform::Work;
    use crate::transform::tests::{Few, applied, image, made, text};
    use kolo_graph::settings::Setting;

    #[test]
    fn samples_are_blended_and_their_classes_drawn() {
        let (mut form, sample) = image(3, 2, 2);
        let mut other = sample.clone();
        other.x.pixels.bytes.fill(255);
        other.y.indices[0] = 2;
        let few = Few(vec![other]);
        let mixup = made(&[("kind", text("mixup")), ("alpha", Setting::Float(1.0))], &mut form, &few).unwrap();
        assert_eq!(form.x, ValueForm::Reals { shape: vec![3, 2, 2], columns: vec![] });
        let at = |epoch| applied(&*mixup, &sample, Draw { sample: 0, epoch }, &few).unwrap();
        let plain = at(None);
        let mixed = at(Some(3));
        assert_eq!((at(Some(3)) == mixed, at(Some(4)) == mixed), (true, false));
        for (mixed, plain) in mixed.x.reals.iter().zip(&plain.x.reals) {
            assert!((*plain..=0.5 * plain + 0.5001).contains(mixed), "{plain} {mixed}");
        }
        // The mean of uniform weights from a half to one.
        let kept = (0..4000).filter(|epoch| at(Some(*epoch)).y.indices[0] == 1).count();
        assert!((2900..3100).contains(&kept), "{kept} of 4000, where 3000 are expected");
    }

    /// The mean of max(w, 1 − w) for uniform weights is 3/4; for alpha 0.2 most weights lie at the ends.
    #[test]
    fn weights_have_the_distribution() {
        let mean = |alpha: f64| {
            let stream = Stream::new(3, "test");
            let mixup = Mixup { alpha, probability: 1.0, stream, before: 0, split: Split::given(1, 0) };
            let weight = |sample| {
                let mut work = Work::default();
                mixup.weight(&Cx { draw: Draw { sample, epoch: Some(0) }, work: &mut work, others: &Few::default() })
            };
            let weights: Vec<f32> = (0..4000).map(weight).collect();
            assert!(weights.iter().all(|weight| (0.5..=1.0).contains(weight)));
            weights.iter().sum::<f32>() / 4000.0
        };
        assert!((mean(1.0) - 0.75).abs() < 0.01, "{}", mean(1.0));
        assert!(mean(0.2) > 0.85 && mean(2.0) < 0.72, "{} {}", mean(0.2), mean(2.0));
    }
}
