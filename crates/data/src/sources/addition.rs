//! `builtin:addition`: sums as text, such as `07+35=042`, for a model that predicts the next character.
//!
//! Every number has a fixed width, so all samples are equally long. The target is the text moved by one character,
//! ignored as long as that character still belongs to the question: only the answer is learnt.

use kolo_graph::settings::Settings;

use crate::error::ReadError;
use crate::source::{Opened, SampleCost, Source, SourceKind};
use crate::split::Permutation;
use kolo_graph::field::{Column, Field, IGNORED};

pub const KIND: SourceKind = SourceKind {
    name: "builtin:addition",
    doc: "sums as text, one character per token; only the answer counts",
    shaped_by_model: false,
    make,
};

/// The character of each token. The tokens 0 to 9 are the digits.
pub const VOCABULARY: &str = "0123456789+=";
const CLASSES: usize = VOCABULARY.len();
const PLUS: i32 = 10;
const EQUALS: i32 = 11;

/// Ten to the power of twice this many must fit 64 bits.
const DIGITS_MAX: usize = 9;
/// Above so many pairs the set is a random part of them.
const SAMPLES_MAX: usize = 1_000_000;

/// The sums: `x` the tokens of the text but the last, `y` the tokens that follow them.
#[derive(Debug)]
pub struct Addition {
    fields: [Field; 2],
    digits: usize,
    reverse: bool,
    samples: usize,
    /// Which pair of numbers a sample is, where the set is not all of them.
    choice: Option<Permutation>,
}

impl Addition {
    /// Pairs of numbers of 1 to 9 `digits`. `reverse` writes the answer's least significant digit first, the order in
    /// which the carries arise.
    pub fn new(digits: usize, reverse: bool, seed: u64) -> Self {
        assert!((1..=DIGITS_MAX).contains(&digits), "{digits} digits");
        let pairs = power_of_ten(2 * digits) as usize;
        let choice = (pairs > SAMPLES_MAX).then(|| Permutation::new(seed, "data.addition", pairs));
        let context = 3 * digits + 2;
        let fields = ["x", "y"].map(|name| Field::index(name, &[context], CLASSES));
        Self { fields, digits, reverse, samples: pairs.min(SAMPLES_MAX), choice }
    }

    /// The sample as text, such as `07+35=042`.
    pub fn text(&self, sample: usize) -> String {
        let pair = self.pair(sample);
        (0..3 * self.digits + 3).map(|position| character(self.token(pair, position))).collect()
    }

    fn pair(&self, sample: usize) -> (u64, u64) {
        assert!(sample < self.samples, "sample {sample} of {}", self.samples);
        let number = self.choice.map_or(sample, |choice| choice.at(sample)) as u64;
        let base = power_of_ten(self.digits);
        (number / base, number % base)
    }

    /// The token at `position` of the text.
    fn token(&self, (left, right): (u64, u64), position: usize) -> i32 {
        let digits = self.digits;
        let (plus, equals, last) = (digits, 2 * digits + 1, 3 * digits + 2);
        if position == plus {
            PLUS
        } else if position == equals {
            EQUALS
        } else if position < plus {
            digit(left, plus - 1 - position)
        } else if position < equals {
            digit(right, equals - 1 - position)
        } else if self.reverse {
            digit(left + right, position - equals - 1)
        } else {
            digit(left + right, last - position)
        }
    }
}

fn power_of_ten(exponent: usize) -> u64 {
    10_u64.pow(exponent as u32)
}

/// The digit of `number` that counts the `place`th power of ten.
fn digit(number: u64, place: usize) -> i32 {
    (number / power_of_ten(place) % 10) as i32
}

fn character(token: i32) -> char {
    usize::try_from(token)
        .ok()
        .and_then(|token| VOCABULARY.as_bytes().get(token))
        .map_or('·', |byte| char::from(*byte))
}

/// Tokens as text. What is no token of the vocabulary, an ignored one above all, prints as `·`.
pub fn render(tokens: &[i32]) -> String {
    tokens.iter().map(|token| character(*token)).collect()
}

fn make(settings: &Settings, seed: u64, _: &[Field]) -> Opened {
    let digits = settings.count("digits", 2, 1)?;
    if digits > DIGITS_MAX {
        let message = format!("must be at most {DIGITS_MAX}, but is {digits}");
        return Err(settings.wrong("digits", message, format!("write `digits = {DIGITS_MAX}`")));
    }
    Ok(Box::new(Addition::new(digits, settings.bool("reverse", false)?, seed)))
}

impl Source for Addition {
    fn fields(&self) -> &[Field] {
        &self.fields
    }

    fn len(&self) -> usize {
        self.samples
    }

    fn fill(&self, sample: usize, field: usize, out: Column<'_>) -> Result<(), ReadError> {
        assert!(field < self.fields.len(), "field {field}");
        let pair = self.pair(sample);
        let answer_start = 2 * self.digits + 2;
        for (position, token) in out.indices().iter_mut().enumerate() {
            *token = match field {
                0 => self.token(pair, position),
                _ if position + 1 < answer_start => IGNORED,
                _ => self.token(pair, position + 1),
            };
        }
        Ok(())
    }

    fn alphabet(&self) -> Option<&str> {
        Some(VOCABULARY)
    }

    fn cost(&self) -> SampleCost {
        SampleCost::Computed { ns: 20 * self.fields[0].elements() as u64 }
    }

    fn describe(&self) -> String {
        format!(
            "{}: {} sums of {} digits, such as {}",
            KIND.name,
            self.samples,
            self.digits,
            self.text(self.samples / 3)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::settings::Setting;

    fn tokens(source: &Addition, sample: usize, field: usize) -> String {
        let mut out = vec![0; source.fields[field].elements()];
        source.fill(sample, field, Column::I32(&mut out)).unwrap();
        render(&out)
    }

    #[test]
    fn writes_sums_of_fixed_width() {
        let source = Addition::new(2, false, 1);
        assert_eq!(source.len(), 10_000);
        assert_eq!(source.text(735), "07+35=042");
        assert_eq!(source.text(9999), "99+99=198");
        assert_eq!(tokens(&source, 735, 0), "07+35=04");
        assert_eq!(tokens(&source, 735, 1), "·····042");
    }

    #[test]
    fn reverse_turns_the_answer_alone() {
        assert_eq!(Addition::new(2, true, 1).text(735), "07+35=240");
    }

    #[test]
    fn every_text_is_true() {
        for digits in [1, 3, 9] {
            let source = Addition::new(digits, false, 4);
            for sample in (0..source.len()).step_by(source.len() / 97 + 1) {
                let text = source.text(sample);
                let numbers: Vec<u64> = text.split(['+', '=']).map(|number| number.parse().unwrap()).collect();
                assert!(numbers[0] + numbers[1] == numbers[2] && text.len() == 3 * digits + 3, "{text}");
            }
        }
    }

    #[test]
    fn large_sets_are_a_random_part() {
        let source = Addition::new(6, false, 1);
        assert_eq!(source.len(), SAMPLES_MAX);
        assert_ne!(source.text(0), Addition::new(6, false, 2).text(0));
    }

    #[test]
    fn too_many_digits_are_refused() {
        let mut settings = Settings::new("data", "job.toml:3");
        settings.set("digits", "job.toml:5", Setting::Int(12));
        assert_eq!(
            make(&settings, 1, &[]).unwrap_err().to_string(),
            "job.toml:5: `data.digits` must be at most 9, but is 12\n  hint: write `digits = 9`"
        );
    }
}
