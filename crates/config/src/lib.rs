//! Files of settings: TOML text to [`Settings`], every key with the line it stood on.
//!
//! Nothing here knows what a key means. Whoever reads a section reports wrong keys at the place recorded here. Any text
//! gives settings or an error with a place and a hint, never a panic; a test mutates a valid file many times.

pub mod edit;

use kolo_base::ShownPath;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use kolo_graph::settings::{Setting, SettingError, Settings, nearest};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

const FILE_BYTES_MAX: u64 = 1 << 20;
/// Tables and lists inside one another. No section needs more than three.
const DEPTH_MAX: usize = 16;
const QUOTED_CHARACTERS_MAX: usize = 60;

/// What a file is, for the errors about it.
#[derive(Clone, Copy, Debug)]
pub struct FileKind {
    /// Such as `job file`.
    pub noun: &'static str,
    /// What to do if there is none.
    pub missing: &'static str,
    /// What to do if it is too large.
    pub too_large: &'static str,
}

/// Reads the settings in the file at `path`.
pub fn read(path: &Path, kind: &FileKind) -> Result<Settings, SettingError> {
    let FileKind { noun, missing, too_large } = kind;
    let file = path.shown().to_string();
    let error = |message: String, hint: &str| SettingError { place: file.clone(), message, hint: hint.into() };
    let bytes = read_bytes(path).map_err(|cause| match cause.kind() {
        io::ErrorKind::NotFound => error(format!("{noun} not found"), missing),
        _ => error(format!("cannot read the {noun}: {cause}"), "name a TOML file that you may read"),
    })?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(error(format!("the {noun} is larger than {FILE_BYTES_MAX} bytes"), too_large));
    }
    let text = String::from_utf8(bytes)
        .map_err(|_| error(format!("the {noun} is not UTF-8 text"), "save it as UTF-8, or name another file"))?;
    parse(&text, &file)
}

/// What came through descriptors that this process was started with, which can be read once.
static READ_ONCE: Mutex<BTreeMap<PathBuf, Vec<u8>>> = Mutex::new(BTreeMap::new());

/// Reads one byte more than the limit at most, so that the caller can tell.
fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if !kolo_base::is_open_stream(path) {
        kolo_base::open_regular(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
        return Ok(bytes);
    }
    let mut known = kolo_base::lock(&READ_ONCE);
    if let Some(bytes) = known.get(path) {
        return Ok(bytes.clone());
    }
    fs::File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    known.insert(path.into(), bytes.clone());
    Ok(bytes)
}

/// The settings in `text`; `file` is the name for the places of its keys.
pub fn parse(text: &str, file: &str) -> Result<Settings, SettingError> {
    let places = Places::of_file(text, file);
    let table = DeTable::parse(text).map_err(|error| syntax_error(&error, text, &places))?;
    convert_table(table.get_ref(), Settings::new("", file), &places, 0)
}

/// Applies `--set path.to.key=value`. The value is TOML, or text if it is not.
pub fn override_with(root: &mut Settings, assignment: &str) -> Result<(), SettingError> {
    let (path, value) = assignment.split_once('=').ok_or_else(|| assignment_error(assignment, "has no `=`"))?;
    let keys: Vec<&str> = path.split('.').map(str::trim).collect();
    if keys.iter().any(|key| key.is_empty()) {
        return Err(assignment_error(assignment, "has an empty key"));
    }
    if keys.len() > DEPTH_MAX {
        return Err(assignment_error(assignment, "names too many tables inside one another"));
    }
    let section = keys.join(".");
    let place = format!("--set {section}");
    let value = override_value(value.trim(), &section, &place)?;
    let Some((last, sections)) = keys.split_last() else { return Ok(()) };
    let mut table = root;
    for (depth, key) in sections.iter().enumerate() {
        table = table.table_mut(key, &place).ok_or_else(|| SettingError {
            place: place.clone(),
            message: format!("`{}` is not a table, so nothing can be set inside it", keys[..=depth].join(".")),
            hint: format!("set the whole of it: `--set {}=VALUE`", keys[..=depth].join(".")),
        })?;
    }
    table.set(last, &place, value);
    Ok(())
}

/// Every key of `root` must be a section of this list.
pub fn check_sections(root: &Settings, allowed: &[&str]) -> Result<(), SettingError> {
    let list = || allowed.iter().map(|name| format!("[{name}]")).collect::<Vec<_>>().join(", ");
    for key in root.keys() {
        if allowed.contains(&key) {
            if !matches!(root.peek(key), Some(Setting::Table(_))) {
                let error = root.wrong(key, "must be a section", format!("write `[{key}]` on a line of its own"));
                return Err(said_of_override(error, format!("set one of its keys: `--set {key}.KEY=VALUE`")));
            }
        } else if matches!(root.peek(key), Some(Setting::Table(_))) {
            let hint = match nearest(key, allowed.iter().copied()) {
                Some(near) => format!("did you mean `[{near}]`? The sections are {}", list()),
                None => format!("the sections are {}", list()),
            };
            return Err(root.wrong(key, "is not a section of a job file", hint));
        } else {
            let error = root.wrong(key, "is outside of any section", format!("put it under one of {}", list()));
            let hint =
                format!("write the section before it, such as `--set {}.{key}=VALUE`; they are {}", allowed[0], list());
            return Err(said_of_override(error, hint));
        }
    }
    Ok(())
}

/// An error with a hint of its own where the key stands on the command line.
fn said_of_override(error: SettingError, hint: String) -> SettingError {
    if error.place.starts_with("--set ") { SettingError { hint, ..error } } else { error }
}

/// The job as a file would say it, with everything that overrides changed.
pub fn write(root: &Settings) -> String {
    let mut text = String::new();
    for key in root.keys() {
        match root.peek(key) {
            Some(Setting::Table(section)) => {
                text += &format!("[{}]\n", key_text(key));
                for inner in section.keys() {
                    if let Some(value) = section.peek(inner) {
                        text += &format!("{} = {}\n", key_text(inner), value_text(value));
                    }
                }
                text.push('\n');
            }
            Some(value) => text += &format!("{} = {}\n", key_text(key), value_text(value)),
            None => {}
        }
    }
    text
}

fn key_text(key: &str) -> String {
    let bare = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    if bare { key.into() } else { toml::Value::String(key.into()).to_string() }
}

fn value_text(value: &Setting) -> String {
    match value {
        Setting::Bool(value) => value.to_string(),
        Setting::Int(value) => value.to_string(),
        Setting::Float(value) => toml::Value::Float(*value).to_string(),
        Setting::Text(value) => toml::Value::String(value.clone()).to_string(),
        Setting::List(items) => format!("[{}]", items.iter().map(value_text).collect::<Vec<_>>().join(", ")),
        Setting::Table(table) => {
            let pair = |key: &str| Some(format!("{} = {}", key_text(key), value_text(table.peek(key)?)));
            format!("{{ {} }}", table.keys().filter_map(pair).collect::<Vec<_>>().join(", "))
        }
    }
}

/// Names the place of a byte offset: a line of a file, or one fixed place.
struct Places {
    name: String,
    /// Where each line starts; empty for a fixed place.
    line_starts: Vec<usize>,
}

impl Places {
    fn of_file(text: &str, file: &str) -> Self {
        let breaks = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at + 1);
        Self { name: file.into(), line_starts: std::iter::once(0).chain(breaks).collect() }
    }

    fn fixed(name: &str) -> Self {
        Self { name: name.into(), line_starts: Vec::new() }
    }

    fn at(&self, offset: usize) -> String {
        match self.line_starts.partition_point(|start| *start <= offset) {
            0 => self.name.clone(),
            line => format!("{}:{line}", self.name),
        }
    }
}

fn syntax_error(error: &toml::de::Error, text: &str, places: &Places) -> SettingError {
    let offset = error.span().map_or(0, |span| span.start);
    let line = text.lines().nth(places.line_starts.partition_point(|start| *start <= offset).saturating_sub(1));
    let line: String = line.unwrap_or_default().trim().chars().take(QUOTED_CHARACTERS_MAX).collect();
    let rules = "a line is `[section]` or `key = value`, text is in quotes, and a key appears once in its section";
    let hint = if line.is_empty() { rules.into() } else { format!("check `{line}`: {rules}") };
    SettingError { place: places.at(offset), message: error.message().into(), hint }
}

fn assignment_error(assignment: &str, what: &str) -> SettingError {
    SettingError {
        place: format!("--set {assignment}"),
        message: format!("`{assignment}` {what}"),
        hint: "write `--set section.key=value`, such as `--set train.optimizer.lr=1e-2`".into(),
    }
}

fn override_value(value: &str, section: &str, place: &str) -> Result<Setting, SettingError> {
    match DeValue::parse(value) {
        Ok(parsed) if !parsed.get_ref().is_datetime() => convert(&parsed, section, &Places::fixed(place), 0),
        // Whoever opened a bracket or a quote meant TOML: taking it as text would hide the mistake.
        Err(error) if value.starts_with(['[', '{', '"', '\'']) => Err(SettingError {
            place: place.into(),
            message: format!("`{value}` is not a TOML value: {}", error.message()),
            hint: "close every bracket and quote, and quote the whole assignment for the shell".into(),
        }),
        _ => Ok(Setting::Text(value.into())),
    }
}

/// Fills `settings` from `table`, in the order of the file: the parser keeps keys sorted by name.
fn convert_table(
    table: &DeTable<'_>,
    mut settings: Settings,
    places: &Places,
    depth: usize,
) -> Result<Settings, SettingError> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    for (key, value) in entries {
        let name = key.get_ref();
        let section = match settings.section() {
            "" => name.to_string(),
            parent => format!("{parent}.{name}"),
        };
        let place = places.at(key.span().start);
        let value = match value.get_ref() {
            // A section stands where its name does; the parser's span of it may begin elsewhere.
            DeValue::Table(inner) => {
                check_depth(depth, &place)?;
                Setting::Table(convert_table(inner, Settings::new(&section, &place), places, depth + 1)?)
            }
            _ => convert(value, &section, places, depth)?,
        };
        settings.set(name, &place, value);
    }
    Ok(settings)
}

/// One value; `section` is the path of its key.
fn convert(
    value: &Spanned<DeValue<'_>>,
    section: &str,
    places: &Places,
    depth: usize,
) -> Result<Setting, SettingError> {
    let place = places.at(value.span().start);
    let wrong = |message: &str, hint: &str| SettingError {
        place: place.clone(),
        message: format!("`{section}` {message}"),
        hint: hint.into(),
    };
    check_depth(depth, &place)?;
    Ok(match value.get_ref() {
        DeValue::String(text) => Setting::Text(text.to_string()),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map(Setting::Int)
            .map_err(|_| wrong("does not fit 64 bits", "write a smaller number, or a number with a point"))?,
        DeValue::Float(number) => number
            .as_str()
            .parse()
            .map(Setting::Float)
            .map_err(|_| wrong("is not a number", "write it like `0.1` or `1e-3`"))?,
        DeValue::Boolean(value) => Setting::Bool(*value),
        DeValue::Datetime(_) => return Err(wrong("is a date, which no key takes", "put it in quotes")),
        DeValue::Array(items) => {
            Setting::List(items.iter().map(|item| convert(item, section, places, depth + 1)).collect::<Result<_, _>>()?)
        }
        DeValue::Table(table) => {
            Setting::Table(convert_table(table, Settings::new(section, &place), places, depth + 1)?)
        }
    })
}

fn check_depth(depth: usize, place: &str) -> Result<(), SettingError> {
    if depth < DEPTH_MAX {
        return Ok(());
    }
    Err(SettingError {
        place: place.into(),
        message: format!("more than {DEPTH_MAX} tables or lists inside one another"),
        hint: "a job file is `[section]`, `key = value` and at most a table or two as a value".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::rng::Stream;

    const JOB: &str = r#"# A comment first.
[job]
name = "digits"
seed = 1
reproducible = true

[model]
kind = "cnn"
image = [3, 32, 32]

[data]
source = "builtin:digits"
batch = 0x40

[train]
epochs = 20
optimizer = { kind = "adamw", lr = 1e-3, betas = [0.9, 0.95] }
schedule.kind = "cosine"
schedule.warmup = 5_0

[parallel]
zero = 0
"#;

    fn table<'a>(settings: &'a Settings, key: &str) -> &'a Settings {
        match settings.peek(key) {
            Some(Setting::Table(table)) => table,
            other => panic!("{key} is {other:?}"),
        }
    }

    #[test]
    fn keys_keep_their_values_order_and_lines() {
        let root = parse(JOB, "job.toml").unwrap();
        assert_eq!(root.keys().collect::<Vec<_>>(), ["job", "model", "data", "train", "parallel"]);
        let train = table(&root, "train");
        assert_eq!((train.section(), train.place()), ("train", "job.toml:15"));
        assert_eq!(train.keys().collect::<Vec<_>>(), ["epochs", "optimizer", "schedule"]);
        let optimizer = table(train, "optimizer");
        assert_eq!((optimizer.section(), optimizer.place()), ("train.optimizer", "job.toml:17"));
        assert_eq!(optimizer.peek("lr"), Some(&Setting::Float(1e-3)));
        assert_eq!(optimizer.peek("betas"), Some(&Setting::List(vec![Setting::Float(0.9), Setting::Float(0.95)])));
        let schedule = table(train, "schedule");
        assert_eq!((schedule.place(), schedule.count("warmup", 0, 0)), ("job.toml:18", Ok(50)));
        assert_eq!(schedule.finish().unwrap_err().place, "job.toml:18");
        assert_eq!(table(&root, "data").count("batch", 1, 1), Ok(64));
        assert_eq!(table(&root, "data").text("batch", "").unwrap_err().place, "job.toml:13");
    }

    #[test]
    fn tables_in_lists_know_their_section() {
        let root = parse("[[stage]]\nwidth = 1\n[[stage]]\nwidth = 2\n", "job.toml").unwrap();
        let Some(Setting::List(stages)) = root.peek("stage") else { panic!("not a list") };
        let Setting::Table(second) = &stages[1] else { panic!("not a table") };
        assert_eq!(second.section(), "stage");
        assert_eq!(second.text("width", "").unwrap_err().place, "job.toml:4");
    }

    #[test]
    fn syntax_errors_name_the_line() {
        let shown = |text: &str| parse(text, "job.toml").unwrap_err().to_string();
        let rules = "a line is `[section]` or `key = value`, text is in quotes, and a key appears once in its section";
        assert_eq!(
            shown("[job]\nname = digits\n"),
            format!(
                "job.toml:2: string values must be quoted, expected literal string\n  hint: \
                 check `name = digits`: {rules}"
            )
        );
        assert_eq!(
            shown("[job]\nseed = 1\nseed = 2\n"),
            format!("job.toml:3: duplicate key\n  hint: check `seed = 2`: {rules}")
        );
        assert_eq!(
            shown("[job]\nday = 2024-01-01"),
            "job.toml:2: `job.day` is a date, which no key takes\n  hint: put it in quotes"
        );
        assert_eq!(parse("a = 99999999999999999999", "job.toml").unwrap_err().message, "`a` does not fit 64 bits");
        let deep = format!("a = {}1{}", "[".repeat(40), "]".repeat(40));
        assert!(shown(&deep).contains("more than 16"), "{}", shown(&deep));
        let dotted = format!("[{}]\nb = 1", vec!["a"; 40].join("."));
        assert!(shown(&dotted).contains("more than 16"), "{}", shown(&dotted));
    }

    #[test]
    fn unreadable_files_say_what_to_do() {
        const KIND: FileKind =
            FileKind { noun: "job file", missing: "check the path", too_large: "a job file holds settings only" };
        let read = |path: &Path| read(path, &KIND);
        assert_eq!(
            read(Path::new("no/such/job.toml")).unwrap_err().to_string(),
            "no/such/job.toml: job file not found\n  hint: check the path"
        );
        let directory = tempfile::tempdir().unwrap();
        assert!(read(directory.path()).unwrap_err().message.starts_with("cannot read the job file: "));
        // Nobody would ever write into it.
        let pipe = directory.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let message = read(&pipe).unwrap_err().message;
        assert_eq!(message, "cannot read the job file: it is not a regular file, but a pipe");
        let file = directory.path().join("job.toml");
        fs::write(&file, [0xff, 0xfe]).unwrap();
        assert_eq!(read(&file).unwrap_err().message, "the job file is not UTF-8 text");
        fs::write(&file, vec![b' '; FILE_BYTES_MAX as usize + 1]).unwrap();
        assert_eq!(read(&file).unwrap_err().message, "the job file is larger than 1048576 bytes");
        fs::write(&file, JOB).unwrap();
        assert_eq!(read(&file), parse(JOB, &file.shown().to_string()));
    }

    #[test]
    fn overrides_replace_and_add() {
        let mut root = parse(JOB, "job.toml").unwrap();
        let assignments =
            ["train.optimizer.lr=1e-2", "job.name = two words", "model.image=[1, 8, 8]", "data.shuffle.kind=\"a=b\""];
        for assignment in assignments.into_iter().chain(["train.schedule={ kind = \"step\" }", "job.day=2024-01-01"]) {
            override_with(&mut root, assignment).unwrap();
        }
        let train = table(&root, "train");
        assert_eq!(table(train, "optimizer").peek("lr"), Some(&Setting::Float(1e-2)));
        assert_eq!(table(train, "optimizer").text("lr", "").unwrap_err().place, "--set train.optimizer.lr");
        assert_eq!(table(train, "schedule").section(), "train.schedule");
        assert_eq!(table(train, "schedule").keys().collect::<Vec<_>>(), ["kind"]);
        assert_eq!(table(&root, "job").text("name", ""), Ok("two words".into()));
        assert_eq!(table(&root, "job").text("day", ""), Ok("2024-01-01".into()));
        assert_eq!(table(&root, "model").counts("image", &[]), Ok(vec![1, 8, 8]));
        let shuffle = table(table(&root, "data"), "shuffle");
        assert_eq!((shuffle.section(), shuffle.text("kind", "")), ("data.shuffle", Ok("a=b".into())));
    }

    #[test]
    fn a_job_that_is_written_reads_as_it_was() {
        let mut root = parse(JOB, "job.toml").unwrap();
        for assignment in
            ["train.optimizer.lr=1e-300", "job.name=a \"b\"\\n", "data.\u{e4}=[[1, 2], [3]]", "data.on=true"]
        {
            override_with(&mut root, assignment).unwrap();
        }
        root.table_mut("data", "").unwrap().set("line", "", Setting::Text("two\nlines".into()));
        let text = write(&root);
        let again = parse(&text, "again").unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert_eq!(write(&again), text);
        let value = |root: &Settings, section: &str, key: &str| table(root, section).peek(key).cloned();
        for (section, key) in
            [("job", "name"), ("data", "\u{e4}"), ("data", "on"), ("data", "line"), ("model", "image")]
        {
            assert_eq!(value(&again, section, key), value(&root, section, key), "{text}");
        }
        assert_eq!(table(table(&again, "train"), "optimizer").peek("lr"), Some(&Setting::Float(1e-300)));
    }

    #[test]
    fn wrong_overrides_are_explained() {
        let mut root = parse(JOB, "job.toml").unwrap();
        let mut message = |assignment: &str| override_with(&mut root, assignment).unwrap_err().to_string();
        let usage = "\n  hint: write `--set section.key=value`, such as `--set train.optimizer.lr=1e-2`";
        assert_eq!(message("lr"), format!("--set lr: `lr` has no `=`{usage}"));
        assert_eq!(message("a..b=1"), format!("--set a..b=1: `a..b=1` has an empty key{usage}"));
        assert_eq!(
            message("job.name.first=1"),
            "--set job.name.first: `job.name` is not a table, so nothing can be set inside it\n  hint: set the \
             whole of it: `--set job.name=VALUE`"
        );
        assert!(message("model.image=[1, 2").starts_with("--set model.image: `[1, 2` is not a TOML value: "));
    }

    #[test]
    fn unknown_sections_suggest_the_nearest() {
        let allowed = ["job", "model", "data", "train", "parallel"];
        let check =
            |text: &str| check_sections(&parse(text, "job.toml").unwrap(), &allowed).map_err(|error| error.to_string());
        assert_eq!(check(JOB), Ok(()));
        let list = "[job], [model], [data], [train], [parallel]";
        assert_eq!(
            check("\n[modle]\nkind = \"mlp\"\n"),
            Err(format!(
                "job.toml:2: `modle` is not a section of a job file\n  hint: did you mean `[model]`? \
                 The sections are {list}"
            ))
        );
        assert_eq!(
            check("seed = 1"),
            Err(format!("job.toml:1: `seed` is outside of any section\n  hint: put it under one of {list}"))
        );
        assert_eq!(
            check("[[job]]"),
            Err("job.toml:1: `job` must be a section\n  hint: write `[job]` on a line of its own".into())
        );
    }

    /// Replaces, removes, repeats or inserts a few pieces of a valid file.
    fn mutate(stream: &Stream, round: u64) -> String {
        const PIECES: [&str; 17] =
            ["[", "]", "{", "}", "=", ".", ",", "\"", "'''", "\n", "#", "\\u", "1e999", "-0x", "é", "\0", "[[a]]"];
        let mut text: Vec<char> = JOB.chars().collect();
        for edit in 0..=stream.below(round, 0, 6) {
            let draw = |slot: u64, bound: usize| stream.below(round, 1 + 8 * edit + slot, bound.max(1) as u64) as usize;
            let at = draw(0, text.len());
            let end = (at + draw(1, 12)).min(text.len());
            let replacement: Vec<char> = match draw(2, 3) {
                0 => PIECES[draw(3, PIECES.len())].chars().collect(),
                1 => text[at..end].repeat(1 + draw(4, 4)),
                _ => Vec::new(),
            };
            text.splice(at..end, replacement);
        }
        text.into_iter().collect()
    }

    #[test]
    fn mutated_files_never_panic() {
        let stream = Stream::new(1, "job file mutations");
        let mut accepted = 0;
        for round in 0..20_000 {
            let text = mutate(&stream, round);
            match parse(&text, "job.toml") {
                Ok(mut root) => {
                    accepted += 1;
                    let _ = check_sections(&root, &["job", "model"]);
                    let _ = override_with(&mut root, text.lines().nth(2).unwrap_or_default());
                }
                Err(error) => {
                    assert!(
                        error.place.starts_with("job.toml:") && !error.message.is_empty() && !error.hint.is_empty()
                    );
                }
            }
        }
        assert!((1000..19_000).contains(&accepted), "{accepted} accepted: the mutations are too mild or too wild");
    }
}
