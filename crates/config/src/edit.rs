//! Changes keys of a settings file and leaves the rest of its text as it is: comments, order, spaces.

use kolo_graph::settings::SettingError;
use toml::de::{DeTable, DeValue};

/// A key to set, or to leave to its default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyChange<'a> {
    pub section: &'a str,
    pub key: &'a str,
    /// As TOML; `None` takes the key out.
    pub value: Option<String>,
}

/// The text with these keys changed. `file` is the name for messages.
pub fn with_keys(text: &str, file: &str, changes: &[KeyChange<'_>]) -> Result<String, SettingError> {
    let mut text = text.to_string();
    for change in changes {
        text = with_key(&text, file, change)?;
    }
    Ok(text)
}

fn with_key(text: &str, file: &str, change: &KeyChange<'_>) -> Result<String, SettingError> {
    let KeyChange { section, key, value } = change;
    let wrong = |message: String, hint: &str| SettingError { place: file.into(), message, hint: hint.into() };
    let table = DeTable::parse(text)
        .map_err(|error| wrong(format!("is not valid TOML: {}", error.message()), "fix the file"))?;
    let inner = table.get_ref().get(*section).map(|found| found.get_ref());
    let written = match inner {
        Some(DeValue::Table(inner)) => inner.iter().find(|(name, _)| name.get_ref() == *key),
        Some(_) => {
            return Err(wrong(format!("`{section}` is not a section"), "write `[section]` on a line of its own"));
        }
        None => None,
    };
    if let Some((_, old)) = written
        && matches!(old.get_ref(), DeValue::Table(_))
        && !text[old.span().start..].starts_with('{')
    {
        let message = format!("`{section}.{key}` is a separate section");
        return Err(wrong(message, "remove it, or write it on one line, in braces"));
    }
    match (written, value) {
        (None, None) => Ok(text.into()),
        (Some((_, old)), Some(value)) => {
            let span = old.span();
            Ok(format!("{}{value}{}", &text[..span.start], &text[span.end..]))
        }
        (Some((name, old)), None) => {
            let (start, end) = (name.span().start, old.span().end);
            remove_line(text, start, end)
                .ok_or_else(|| wrong(format!("`{section}.{key}` is not on a line of its own"), "remove it"))
        }
        (None, Some(value)) => match (header_end(text, section), inner) {
            (Some(at), _) => Ok(format!("{}{key} = {value}\n{}", &text[..at], &text[at..])),
            (None, None) => {
                let gap = if text.is_empty() || text.ends_with("\n\n") { "" } else { "\n" };
                let end = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
                Ok(format!("{text}{end}{gap}[{section}]\n{key} = {value}\n"))
            }
            (None, Some(_)) => {
                let message = format!("`{section}` has no `[{section}]` line after which `{key}` could be written");
                Err(wrong(message, "write it as a separate section"))
            }
        },
    }
}

/// The text without the lines from one byte to another, if nothing but a comment stands beside them.
fn remove_line(text: &str, start: usize, end: usize) -> Option<String> {
    let line = text[..start].rfind('\n').map_or(0, |at| at + 1);
    let next = text[end..].find('\n').map_or(text.len(), |at| end + at + 1);
    let (before, after) = (text[line..start].trim(), text[end..next].trim());
    let alone = before.is_empty() && (after.is_empty() || after.starts_with('#'));
    alone.then(|| format!("{}{}", &text[..line], &text[next..]))
}

/// Where the line after `[section]` begins.
fn header_end(text: &str, section: &str) -> Option<usize> {
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        at += line.len();
        let bare = line.split('#').next().unwrap_or_default().trim();
        if bare.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).map(str::trim) == Some(section) {
            return line.ends_with('\n').then_some(at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: &str = "# mine\n[model] # the net\nkind = \"gpt\"\n\n[parallel]\ntensor = 2   # two\nstages = [\n  \"h.1\",\n  \"h.2\",\n]\nzero = 1\n";

    fn changed(text: &str, section: &str, key: &str, value: Option<&str>) -> Result<String, String> {
        let change = KeyChange { section, key, value: value.map(str::to_string) };
        with_keys(text, "job.toml", &[change]).map_err(|error| error.to_string())
    }

    #[test]
    fn the_rest_of_the_text_stays() {
        assert_eq!(changed(JOB, "parallel", "tensor", Some("8")).unwrap(), JOB.replace("tensor = 2 ", "tensor = 8 "));
        let stages = changed(JOB, "parallel", "stages", None).unwrap();
        assert_eq!(stages, JOB.replace("stages = [\n  \"h.1\",\n  \"h.2\",\n]\n", ""));
        assert_eq!(changed(JOB, "parallel", "zero", None).unwrap(), JOB.replace("zero = 1\n", ""));
        let new = changed(JOB, "parallel", "pipeline", Some("4")).unwrap();
        assert_eq!(new, JOB.replace("[parallel]\n", "[parallel]\npipeline = 4\n"));
        let section = changed(JOB, "memory", "recompute", Some("\"blocks\"")).unwrap();
        assert_eq!(section, format!("{JOB}\n[memory]\nrecompute = \"blocks\"\n"));
        assert_eq!(changed(JOB, "memory", "recompute", None).unwrap(), JOB);
        assert_eq!(changed("", "data", "grains", Some("4")).unwrap(), "[data]\ngrains = 4\n");
    }

    #[test]
    fn what_cannot_be_changed_is_said() {
        let inline = "parallel = { tensor = 2, zero = 1 }\n";
        assert_eq!(changed(inline, "parallel", "tensor", Some("4")).unwrap(), inline.replace('2', "4"));
        assert!(changed(inline, "parallel", "pipeline", Some("4")).unwrap_err().contains("no `[parallel]` line"));
        assert!(changed(inline, "parallel", "zero", None).unwrap_err().contains("not on a line of its own"));
        let section = "[memory]\nlimit = 3\n[memory.layers]\n\"h.3\" = \"blocks\"\n";
        assert!(changed(section, "memory", "layers", None).unwrap_err().contains("is a separate section"));
        let line = "[memory]\nlayers = { \"h.3\" = \"blocks\" }\n";
        assert_eq!(changed(line, "memory", "layers", None).unwrap(), "[memory]\n");
        assert!(changed("a = [", "data", "grains", None).unwrap_err().contains("is not valid TOML"));
        assert!(changed("data = 3\n", "data", "grains", Some("4")).unwrap_err().contains("is not a section"));
    }
}
