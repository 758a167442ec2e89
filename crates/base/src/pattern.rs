//! Patterns of names, as job files have them.

/// Whether a name matches a pattern, in which `*` stands for any text.
pub fn matches_pattern(pattern: &str, name: &str) -> bool {
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
    fn a_star_stands_for_any_text() {
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
        ] {
            assert_eq!(matches_pattern(pattern, name), expected, "{pattern} {name}");
        }
    }
}
