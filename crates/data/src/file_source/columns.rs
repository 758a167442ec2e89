//! Which columns of the records are the input, and which is the target.

use super::types::{ColumnType, ColumnTypes};
use crate::record::{RecordColumn, RecordKind, UnreadColumn};
use kolo_graph::settings::{SettingError, Settings, nearest};
use std::collections::{BTreeSet, HashMap};

/// Names by which a target is known.
const TARGET_NAMES: [&str; 7] = ["y", "label", "labels", "class", "cls", "target", "targets"];
/// A column of this name is the input, whatever else there is.
const INPUT_NAME: &str = "x";
const UNREAD_HINT: &str = "store it as numbers or text, or name another column";

/// What the input is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InputKind {
    Image,
    Tokens,
    Table,
}

/// The columns that count, by their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub kind: InputKind,
    pub inputs: Vec<usize>,
    pub target: Option<usize>,
    /// Why that column is the target, where nothing but its place says so.
    pub guess: Option<&'static str>,
}

/// Columns that can be chosen.
pub(crate) struct Choices<'c> {
    pub columns: &'c [RecordColumn],
    pub unread: &'c [UnreadColumn],
    /// Those that number or name the rows: chosen only where the job names them.
    pub is_index: &'c dyn Fn(usize) -> bool,
}

/// What decides about columns beside their own names.
#[derive(Debug)]
pub(crate) struct ChoiceRules<'a> {
    /// Columns of names that become inputs.
    pub categorical: &'a [String],
    /// Columns that say which samples belong together, and are inputs only if they are named.
    pub left_out: &'a [String],
    /// The target's past is an input, too.
    pub keeps_target: bool,
    pub types: &'a ColumnTypes,
}

/// What `target` and `inputs` of the `[data]` section say, and the rule where they say nothing. Columns of names are inputs
/// only if they are among `categorical`, or named. A column that is not read is never chosen in silence: it is an error if it is
/// named, or if its own name says that it is the input or the target. What is named as an input is no target.
pub(crate) fn choose(
    choices: &Choices<'_>,
    settings: &Settings,
    rules: &ChoiceRules<'_>,
) -> Result<Chosen, SettingError> {
    let Choices { columns, unread, is_index } = *choices;
    let types = rules.types;
    let (target, inputs) = (settings.text("target", "")?, settings.texts("inputs", "[\"a\", \"b\"]")?);
    let mut target = match target.as_str() {
        "" => {
            refuse_by_name(columns, unread, &TARGET_NAMES, settings, "target")?;
            let is_mask =
                |column: &RecordColumn| is_target_name(&column.name) && types.of(column) == Some(ColumnType::Mask);
            let is_one = |column: &RecordColumn| is_target(column) || is_mask(column);
            let is_input = |at: usize| !rules.keeps_target && inputs.contains(&columns[at].name);
            let is_free = |at: usize| !is_index(at) && !is_input(at);
            (0..columns.len()).find(|at| is_one(&columns[*at]) && is_free(*at))
        }
        name => Some(find(columns, unread, name, settings, "target")?),
    };
    let mut chosen = match inputs.is_empty() {
        false => {
            let known = by_name(columns);
            let found = |name: &String| match known.get(name.as_str()) {
                Some(at) => Ok(*at),
                None => find(columns, unread, name, settings, "inputs"),
            };
            inputs.iter().map(found).collect::<Result<Vec<_>, _>>()?
        }
        true => {
            refuse_by_name(columns, unread, &[INPUT_NAME], settings, "inputs")?;
            refuse_several_tokens(columns, target, settings, types)?;
            default_inputs(choices, target, rules)
        }
    };
    let kind = input_kind(columns, &chosen, settings, types)?;
    let is_row = |at: &usize| !is_index(*at) && !rules.left_out.contains(&columns[*at].name);
    let (rows, mut guess) = ((0..columns.len()).filter(is_row), None);
    if target.is_none() && kind == InputKind::Table && rows.clone().count() > 1 {
        // The last column of a table, as most tables have it. The only one cannot be told from itself.
        let one_is_named = matches!(chosen[..], [only] if is_input_name(&columns[only].name));
        (target, guess) = match inputs.is_empty() && !one_is_named {
            true => (chosen.pop(), Some("the last column of numbers")),
            false => {
                let taken: BTreeSet<usize> = chosen.iter().copied().collect();
                let mut others = rows.rev().filter(|at| !taken.contains(at));
                (others.find(|at| can_be_target(&columns[*at])), Some("the last column that is no input"))
            }
        };
    }
    if let Some(target) = target.filter(|target| rules.keeps_target && inputs.is_empty() && !chosen.contains(target)) {
        chosen.push(target);
        chosen.sort_unstable();
    }
    if !rules.keeps_target && target.is_some_and(|target| chosen.contains(&target)) {
        return Err(settings.wrong("inputs", "includes the target", "leave the target out of the inputs"));
    }
    if chosen.is_empty() {
        let mut message = format!("has no column that could be an input: it has {}", list(columns));
        if let Some(column) = unread.first() {
            message += &format!(", and \"{}\", whose type {} is not read", column.name, column.kind);
        }
        let hint = match columns.iter().any(|column| column.kind == RecordKind::Text) {
            true => {
                "for a language model, make tokens of the text: `transforms = [{ kind = \"pack\", context = 128 }]`; otherwise name columns: `inputs = [\"a\", \"b\"]`"
            }
            false => "name them: `inputs = [\"a\", \"b\"]`",
        };
        return Err(settings.wrong("source", message, hint));
    }
    if target.is_none() && kind != InputKind::Tokens {
        let message = format!("has no column that looks like a target: it has {}", list(columns));
        return Err(settings.wrong("source", message, "name it: `target = \"…\"` under [data]"));
    }
    Ok(Chosen { kind, inputs: chosen, target, guess: guess.filter(|_| target.is_some()) })
}

/// Refuses to guess which of several rows of whole numbers a model of tokens takes.
fn refuse_several_tokens(
    columns: &[RecordColumn],
    target: Option<usize>,
    settings: &Settings,
    types: &ColumnTypes,
) -> Result<(), SettingError> {
    let others = || columns.iter().enumerate().filter(|(at, _)| Some(*at) != target).map(|(_, column)| column);
    if others().any(|column| is_picture(column) || is_input_name(&column.name) || types.of(column).is_some()) {
        return Ok(());
    }
    let rows: Vec<RecordColumn> = others().filter(|column| types.is_tokens(column)).cloned().collect();
    // What a file calls tokens comes first, as it always has.
    let are_known = rows.iter().any(|column| matches!(column.kind, RecordKind::Int { classes: Some(_), .. }));
    match rows.len() > 1 && !are_known {
        false => Ok(()),
        true => {
            let message = format!("could be any of {}, which are rows of whole numbers", list(&rows));
            Err(settings.wrong("inputs", message, format!("name the tokens: `inputs = [\"{}\"]`", rows[0].name)))
        }
    }
}

/// What the columns are called.
pub(super) fn list(columns: &[RecordColumn]) -> String {
    const SHOWN: usize = 20;
    let names = columns.iter().take(SHOWN).map(|column| format!("\"{}\"", column.name)).collect::<Vec<_>>().join(", ");
    match columns.len() {
        0 => "no column".into(),
        1..=SHOWN => names,
        more => format!("{names} and {} more", more - SHOWN),
    }
}

/// The columns by their names; of several with one name, the first.
pub(crate) fn by_name(columns: &[RecordColumn]) -> HashMap<&str, usize> {
    columns.iter().enumerate().rev().map(|(at, column)| (column.name.as_str(), at)).collect()
}

/// The column of this name, which `key` asks for.
pub(crate) fn find(
    columns: &[RecordColumn],
    unread: &[UnreadColumn],
    name: &str,
    settings: &Settings,
    key: &str,
) -> Result<usize, SettingError> {
    columns.iter().position(|column| column.name == name).ok_or_else(|| {
        if let Some(column) = unread.iter().find(|column| column.name == name) {
            let message = format!("names the column \"{name}\", whose type {} is not read", column.kind);
            return settings.wrong(key, message, UNREAD_HINT);
        }
        let near = nearest(name, columns.iter().map(|column| column.name.as_str()));
        let near = near.map_or(String::new(), |near| format!("did you mean \"{near}\"? "));
        let hint = format!("{near}The columns are {}", list(columns));
        settings.wrong(key, format!("names the column \"{name}\", which does not exist"), hint)
    })
}

/// Refuses to choose other columns than one that has one of these names, but is not read. `key` can name another one.
fn refuse_by_name(
    columns: &[RecordColumn],
    unread: &[UnreadColumn],
    names: &[&str],
    settings: &Settings,
    key: &str,
) -> Result<(), SettingError> {
    let is_one = |column: &str| names.iter().any(|name| column.eq_ignore_ascii_case(name));
    match unread.iter().find(|column| is_one(&column.name)) {
        Some(column) if !columns.iter().any(|column| is_one(&column.name)) => {
            let message = format!("has the column \"{}\", whose type {} is not read", column.name, column.kind);
            Err(settings.wrong("source", message, format!("{UNREAD_HINT}: write `{key}` under [data]")))
        }
        _ => Ok(()),
    }
}

/// Whether targets are called so.
pub(crate) fn is_target_name(name: &str) -> bool {
    TARGET_NAMES.iter().any(|known| name.eq_ignore_ascii_case(known))
}

pub(super) fn is_target(column: &RecordColumn) -> bool {
    !is_picture(column) && is_target_name(&column.name)
}

fn is_input_name(name: &str) -> bool {
    name.eq_ignore_ascii_case(INPUT_NAME)
}

/// Whether its values can be classes or numbers to be predicted.
fn can_be_target(column: &RecordColumn) -> bool {
    is_number(column) || matches!(column.kind, RecordKind::Class { .. } | RecordKind::Text)
}

pub(super) fn is_picture(column: &RecordColumn) -> bool {
    matches!(column.kind, RecordKind::Image | RecordKind::Pixels { .. })
}

pub(super) fn is_number(column: &RecordColumn) -> bool {
    matches!(column.kind, RecordKind::Real { .. } | RecordKind::Int { .. })
}

fn default_inputs(choices: &Choices<'_>, target: Option<usize>, rules: &ChoiceRules<'_>) -> Vec<usize> {
    let ChoiceRules { categorical, left_out, types, .. } = rules;
    let all = choices.columns.iter().enumerate();
    let is_left_out = |at: usize| (choices.is_index)(at) || left_out.contains(&choices.columns[at].name);
    let others = || all.clone().filter(|(at, _)| Some(*at) != target && !is_left_out(*at));
    let one = |is: &dyn Fn(&RecordColumn) -> bool| others().find(|(_, column)| is(column)).map(|(at, _)| vec![at]);
    let is_tokens = |column: &RecordColumn| types.is_tokens(column);
    one(&|column| is_input_name(&column.name)).or_else(|| one(&is_picture)).or_else(|| one(&is_tokens)).unwrap_or_else(
        || {
            let categorical: BTreeSet<&String> = categorical.iter().collect();
            let counts = |column: &RecordColumn| is_number(column) || categorical.contains(&column.name);
            others().filter(|(_, column)| counts(column)).map(|(at, _)| at).collect()
        },
    )
}

fn input_kind(
    columns: &[RecordColumn],
    inputs: &[usize],
    settings: &Settings,
    types: &ColumnTypes,
) -> Result<InputKind, SettingError> {
    let is_tokens = |column: &RecordColumn| types.is_tokens(column);
    let is_one = |is: &dyn Fn(&RecordColumn) -> bool| matches!(inputs, [only] if is(&columns[*only]));
    if is_one(&is_picture) {
        return Ok(InputKind::Image);
    }
    if is_one(&is_tokens) {
        return Ok(InputKind::Tokens);
    }
    let odd = inputs.iter().map(|at| &columns[*at]).find(|column| {
        is_picture(column) || matches!(column.kind, RecordKind::Bytes) || (is_tokens(column) && inputs.len() > 1)
    });
    match odd {
        None => Ok(InputKind::Table),
        Some(column) => {
            let what = match column.kind {
                RecordKind::Bytes => "holds bytes of an unknown format",
                _ => "cannot be joined with others",
            };
            let message = format!("names the column \"{}\", which {what}", column.name);
            Err(settings.wrong("inputs", message, "name one column of images or tokens, or columns of numbers"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_graph::settings::Setting;

    fn real(name: &str) -> RecordColumn {
        RecordColumn { name: name.into(), kind: RecordKind::Real { shape: vec![] } }
    }

    fn column(name: &str, kind: RecordKind) -> RecordColumn {
        RecordColumn { name: name.into(), kind }
    }

    fn chosen(columns: &[RecordColumn], keys: &[(&str, Setting)]) -> Result<(Vec<usize>, Option<usize>), String> {
        chosen_beside(columns, &["when"], keys)
    }

    /// With columns that are not read.
    fn chosen_beside(
        columns: &[RecordColumn],
        unread_names: &[&str],
        keys: &[(&str, Setting)],
    ) -> Result<(Vec<usize>, Option<usize>), String> {
        let mut settings = Settings::new("data", "job.toml:1");
        keys.iter().for_each(|(key, value)| settings.set(key, "job.toml:2", value.clone()));
        let unread = |name: &&str| UnreadColumn { name: (*name).into(), kind: "Date32".into() };
        let unread: Vec<UnreadColumn> = unread_names.iter().map(unread).collect();
        let types = ColumnTypes::read(columns, "a.csv", &settings, None).unwrap();
        let categorical = ["colour".to_string()];
        let rules = ChoiceRules { categorical: &categorical, left_out: &[], keeps_target: false, types: &types };
        let is_index = |at: usize| columns[at].name == "index";
        let choices = Choices { columns, unread: &unread, is_index: &is_index };
        let chosen = choose(&choices, &settings, &rules).map_err(|error| error.to_string())?;
        Ok((chosen.inputs, chosen.target))
    }

    #[test]
    fn the_rule_finds_inputs_and_target() {
        let tokens = || RecordKind::Int { shape: vec![8], classes: Some(256) };
        let table = [real("a"), column("note", RecordKind::Text), column("colour", RecordKind::Text), real("b")];
        assert_eq!(chosen(&table, &[]), Ok((vec![0, 2], Some(3))), "the last number is the target");
        assert_eq!(chosen(&[real("Label"), real("a"), real("b")], &[]), Ok((vec![1, 2], Some(0))));
        let pictures = [real("size"), column("jpg", RecordKind::Image), real("cls")];
        assert_eq!(chosen(&pictures, &[]), Ok((vec![1], Some(2))));
        assert_eq!(chosen(&[column("tokens", tokens())], &[]), Ok((vec![0], None)));
        assert_eq!(chosen(&[column("x", tokens()), column("y", tokens())], &[]), Ok((vec![0], Some(1))));
        let text = |text: &str| Setting::Text(text.into());
        let named = [("target", text("a")), ("inputs", Setting::List(vec![text("b"), text("colour")]))];
        assert_eq!(chosen(&table, &named), Ok((vec![3, 2], Some(0))));
    }

    #[test]
    fn an_index_is_chosen_only_by_its_name() {
        let text = |text: &str| Setting::Text(text.into());
        let table = [real("index"), real("a"), real("b"), real("index")];
        assert_eq!(chosen(&table[..3], &[]), Ok((vec![1], Some(2))));
        assert_eq!(chosen(&table[1..], &[]), Ok((vec![0], Some(1))), "at the end of the table, too");
        assert_eq!(chosen(&table[..3], &[("target", text("index"))]), Ok((vec![1, 2], Some(0))));
        let named = [("inputs", Setting::List(vec![text("index"), text("b")]))];
        assert_eq!(chosen(&table[..3], &named), Ok((vec![0, 2], Some(1))));
        let error = chosen(&table[..2], &[]).unwrap_err();
        assert!(error.contains("no column that looks like a target"), "{error}");
    }

    #[test]
    fn beside_named_inputs_the_target_is_the_last_other_column() {
        let text = |text: &str| Setting::Text(text.into());
        let inputs = |names: &[&str]| [("inputs", Setting::List(names.iter().map(|name| text(name)).collect()))];
        let flowers = [real("length"), real("width"), column("species", RecordKind::Text)];
        assert_eq!(chosen(&flowers, &inputs(&["length", "width"])), Ok((vec![0, 1], Some(2))));
        assert_eq!(chosen(&flowers, &inputs(&["length"])), Ok((vec![0], Some(2))));
        // One that is named like a target counts first, but not if it is an input.
        let table = [real("y"), real("a"), real("b"), column("scan", RecordKind::Image)];
        assert_eq!(chosen(&table, &inputs(&["a"])), Ok((vec![1], Some(0))));
        assert_eq!(chosen(&table, &inputs(&["y", "a"])), Ok((vec![0, 1], Some(2))));
        assert_eq!(chosen(&[real("x"), real("z")], &[]), Ok((vec![0], Some(1))));
        let error = chosen(&table, &inputs(&["y", "a", "b"])).unwrap_err();
        assert!(error.contains("no column that looks like a target"), "{error}");
    }

    #[test]
    fn columns_that_are_not_read_matter_only_where_they_are_chosen() {
        let text = |text: &str| Setting::Text(text.into());
        let columns = [real("age"), real("height")];
        assert_eq!(chosen_beside(&columns, &["when", "born"], &[]), Ok((vec![0], Some(1))));
        let refused = |unread: &str, keys: &[(&str, Setting)]| chosen_beside(&columns, &[unread], keys).unwrap_err();
        let named = "names the column \"when\", whose type Date32 is not read";
        for (key, value) in [("target", text("when")), ("inputs", Setting::List(vec![text("age"), text("when")]))] {
            let error = refused("when", &[(key, value)]);
            assert!(error.contains(&format!("`data.{key}` {named}")), "{error}");
        }
        let error = refused("Label", &[]);
        assert!(error.contains("`data.source` has the column \"Label\", whose type Date32 is not read"), "{error}");
        assert!(error.ends_with("write `target` under [data]"), "{error}");
        let error = chosen_beside(&[], &["when"], &[]).unwrap_err();
        assert!(error.contains("it has no column, and \"when\", whose type Date32 is not read"), "{error}");
        assert!(refused("X", &[]).ends_with("write `inputs` under [data]"));
        assert_eq!(chosen_beside(&columns, &["Label"], &[("target", text("age"))]), Ok((vec![1], Some(0))));
        assert_eq!(chosen_beside(&[real("y"), real("a")], &["Label"], &[]), Ok((vec![1], Some(0))));
    }

    #[test]
    fn what_cannot_be_chosen_is_explained() {
        let text = |text: &str| Setting::Text(text.into());
        let columns = [real("age"), real("height")];
        assert_eq!(
            chosen(&columns, &[("target", text("hight"))]).unwrap_err(),
            "job.toml:2: `data.target` names the column \"hight\", which does not exist\n  hint: did you mean \"height\"? \
             The columns are \"age\", \"height\""
        );
        let both = [("target", text("age")), ("inputs", Setting::List(vec![text("age")]))];
        assert!(chosen(&columns, &both).unwrap_err().contains("includes the target"));
        let named = [("inputs", Setting::List(vec![text("age"), text("height")]))];
        assert!(chosen(&columns, &named).unwrap_err().contains("no column that looks like a target"));
        assert!(chosen(&[column("a", RecordKind::Text)], &[]).unwrap_err().contains("could be an input: it has \"a\""));
        let bytes = [column("a", RecordKind::Bytes), real("y")];
        let named = [("inputs", Setting::List(vec![text("a")]))];
        assert!(chosen(&bytes, &named).unwrap_err().contains("bytes of an unknown format"));
    }
}
