//! Patterns of names, as job files have them.

/// Numbers of a range, at most: each is tried.
const RANGE_MAX: usize = 10_000;

/// Whether a name matches a pattern, in which `*` stands for any text and `{3-11}` for a number from 3 to 11.
pub fn matches_pattern(pattern: &str, name: &str) -> bool {
    match first_range(pattern) {
        Some((begin, numbers, end)) => numbers.take(RANGE_MAX).any(|number| {
            let with_number = format!("{}{number}{}", &pattern[..begin], &pattern[end..]);
            matches_pattern(&with_number, name)
        }),
        None => matches_stars(pattern, name),
    }
}

/// The first `{3-11}` of a pattern: where it begins, its numbers, and where what follows it begins.
fn first_range(pattern: &str) -> Option<(usize, std::ops::RangeInclusive<usize>, usize)> {
    pattern.match_indices('{').find_map(|(begin, _)| {
        let end = begin + pattern[begin..].find('}')?;
        let (first, last) = pattern[begin + 1..end].split_once('-')?;
        Some((begin, first.parse().ok()?..=last.parse().ok()?, end + 1))
    })
}

fn matches_stars(pattern: &str, name: &str) -> bool {
    let parts: Vec<&str> = pattern.split('*').collect();
    let [first, middle @ .., last] = &parts[..] else { return pattern == name };
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    for part in middle {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_any_text_and_ranges_for_numbers() {
        for (pattern, name, expected) in [
            ("a.w", "a.w", true),
            ("a.w", "a.ww", false),
            ("a.*", "a.b.w", true),
            ("*.w", "a.b.w", true),
            ("*.w", "a.w.x", false),
            ("*.b.*", "a.b.w", true),
            ("a*b*b", "ab", false),
            ("a*b*b", "abb", true),
            ("*", "", true),
            ("", "a", false),
            ("blocks.0.*", "blocks.01.w", false),
            ("h.{0-11}", "h.11", true),
            ("h.{0-11}", "h.12", false),
            ("h.{2-3}.*", "h.3.attn", true),
            ("h.{2-3}.{0-1}.*", "h.3.2.attn", false),
            ("h.{2-x}", "h.{2-x}", true),
            ("h.{3-2}", "h.3", false),
        ] {
            assert_eq!(matches_pattern(pattern, name), expected, "{pattern} {name}");
        }
    }
}
