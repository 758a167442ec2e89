//! `mask`: tokens to be guessed (Devlin et al. 2018).
//!
//! Of the tokens that are chosen, eight in ten become the mask token, one becomes any token, one stays. The target is the
//! original token where one was chosen, and is ignored elsewhere. An evaluation masks too, the same tokens every time.

use crate::error::ReadError;
use crate::format::OpenError;
use crate::noise::below_of_word;
use crate::sample::{Form, Sample, ValueForm};
use crate::transform::{Cx, Setup, Transform, TransformKind, misplaced};
use kolo_graph::field::IGNORED;
use kolo_graph::rng::{Stream, unit};
use kolo_graph::settings::Settings;

pub const KIND: TransformKind = TransformKind {
    name: "mask",
    doc: "tokens hidden as BERT does; the target is the original where one was hidden, and ignored elsewhere",
    keys: "`probability = 0.15`, `token` (default: a new one after the vocabulary)",
    when: "always; the same tokens in every evaluation",
    make,
};

const BECOME_MASK: f32 = 0.8;
const BECOME_ANY: f32 = 0.9;

#[derive(Debug)]
struct Mask {
    probability: f32,
    token: i32,
    vocabulary: usize,
    stream: Stream,
}

fn make(table: &Settings, form: &mut Form, setup: &mut Setup<'_>) -> Result<Box<dyn Transform>, OpenError> {
    let ValueForm::Indices { classes, .. } = &mut form.x else { return Err(misplaced(table, "tokens")) };
    let vocabulary = *classes;
    let token = table.count("token", vocabulary, 0)?;
    if token > vocabulary || token >= i32::MAX as usize {
        let message = format!("is {token}, but the vocabulary has {vocabulary} tokens");
        return Err(table.wrong("token", message, "leave it out, or name one of them").into());
    }
    *classes = vocabulary.max(token + 1);
    form.y = Some(form.x.clone());
    let probability = table.float_in("probability", 0.15, 0.0, 1.0)? as f32;
    Ok(Box::new(Mask { probability, token: token as i32, vocabulary, stream: setup.stream() }))
}

impl Transform for Mask {
    fn apply(&self, sample: &mut Sample, cx: &mut Cx<'_>) -> Result<(), ReadError> {
        let targets = sample.y.set_indices();
        for (at, token) in sample.x.indices.iter_mut().enumerate() {
            let [chosen, what, any, _] = cx.words(&self.stream, at as u64);
            if unit(chosen) >= self.probability {
                targets.push(IGNORED);
                continue;
            }
            targets.push(*token);
            match unit(what) {
                part if part < BECOME_MASK => *token = self.token,
                part if part < BECOME_ANY => *token = below_of_word(any, self.vocabulary) as i32,
                _ => {}
            }
        }
        Ok(())
    }

    fn is_random(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Draw;
    use crate::transform::tests::{Few, applied, made, text};
    use kolo_graph::settings::Setting;

    #[test]
    fn tokens_are_hidden_and_asked_for() {
        let x = ValueForm::Indices { shape: vec![4000], classes: 50 };
        let mut form = Form { x: x.clone(), y: Some(x) };
        let keys = [("kind", text("mask")), ("probability", Setting::Float(0.5))];
        let mask = made(&keys, &mut form, &Few::default()).unwrap();
        assert_eq!(form.x, ValueForm::Indices { shape: vec![4000], classes: 51 });
        assert_eq!(form.y.as_ref(), Some(&form.x));
        let mut sample = Sample::default();
        sample.x.set_indices().extend((0..4000).map(|at| at % 50));
        let at = |epoch| applied(&*mask, &sample, Draw { sample: 0, epoch }, &Few::default()).unwrap();
        let after = at(Some(0));
        let (mut asked, mut masked) = (0, 0);
        for ((before, token), target) in sample.x.indices.iter().zip(&after.x.indices).zip(&after.y.indices) {
            match *target {
                IGNORED => assert_eq!(before, token),
                target => {
                    assert_eq!(target, *before);
                    (asked, masked) = (asked + 1, masked + usize::from(*token == 50));
                }
            }
        }
        assert!((1800..2200).contains(&asked) && (1400..1800).contains(&masked), "{asked} {masked}");
        assert!(at(Some(0)) == after && at(Some(1)) != after && at(None) == at(None));
    }
}
