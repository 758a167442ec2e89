//! Ranges of numbers in the names of shards, `train-{000000..000099}.tar`, as WebDataset and shells write them.

/// Names that one range may stand for.
const NAMES_MAX: u64 = 1_000_000;

/// Digits of a number, zeros in front included. No name of a file is longer.
const DIGITS_MAX: usize = 255;

/// Ranges in one text.
const RANGES_MAX: usize = 8;

/// The names that this text stands for; the text itself if it has no range. Numbers have the digits of the first one, zeros
/// in front included.
pub(crate) fn expand(text: &str) -> Result<Vec<String>, String> {
    expand_ranges(text, RANGES_MAX)
}

fn expand_ranges(text: &str, ranges_left: usize) -> Result<Vec<String>, String> {
    let Some((before, first, last, after)) = range(text) else { return Ok(vec![text.into()]) };
    if first.len().max(last.len()) > DIGITS_MAX {
        return Err(format!("has a range whose numbers have more than {DIGITS_MAX} digits"));
    }
    let (Ok(low), Ok(high)) = (first.parse::<u64>(), last.parse::<u64>()) else {
        return Err(format!("has the range {first}..{last}, whose numbers are too large"));
    };
    if low > high || high - low >= NAMES_MAX {
        return Err(format!("has the range {first}..{last}, which is not one of 1 to {NAMES_MAX} names"));
    }
    let Some(ranges_left) = ranges_left.checked_sub(1) else {
        return Err(format!("has more than {RANGES_MAX} ranges"));
    };
    let digits = first.len();
    // There may be another range behind this one.
    let rests = expand_ranges(after, ranges_left)?;
    let mut names = Vec::new();
    for number in low..=high {
        for rest in &rests {
            names.push(format!("{before}{number:0digits$}{rest}"));
        }
        if names.len() as u64 > NAMES_MAX {
            return Err(format!("stands for more than {NAMES_MAX} names"));
        }
    }
    Ok(names)
}

/// What is before, in (first and last number) and after the first range of a text.
fn range(text: &str) -> Option<(&str, &str, &str, &str)> {
    let (before, rest) = text.split_once('{')?;
    let (inside, after) = rest.split_once('}')?;
    let (first, last) = inside.split_once("..")?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(first) && is_number(last)).then_some((before, first, last, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_become_names_with_the_same_digits() {
        assert_eq!(expand("a-{008..010}.tar").unwrap(), ["a-008.tar", "a-009.tar", "a-010.tar"]);
        assert_eq!(expand("{1..2}/{0..1}").unwrap(), ["1/0", "1/1", "2/0", "2/1"]);
        for plain in ["a.tar", "a{b}.tar", "a{..}.tar", "a{1..x}.tar", "}{"] {
            assert_eq!(expand(plain).unwrap(), [plain]);
        }
        for wrong in ["{2..1}", "{0..1000000}", "{0..99999999999999999999}", "{1..9999}{1..9999}"] {
            assert!(expand(wrong).is_err(), "{wrong}");
        }
        assert_eq!(expand(&"{1..1}".repeat(RANGES_MAX)).unwrap(), ["1".repeat(RANGES_MAX)]);
        assert!(expand(&"{1..1}".repeat(100_000)).unwrap_err().contains("more than 8 ranges"));
        let zeros = |count: usize| format!("a{{{}..1}}.csv", "0".repeat(count));
        assert_eq!(expand(&zeros(DIGITS_MAX)).unwrap()[1].len(), DIGITS_MAX + 5);
        for digits in [DIGITS_MAX + 1, 70_000] {
            assert!(expand(&zeros(digits)).unwrap_err().contains("more than 255 digits"), "{digits}");
        }
    }
}
