//! Which samples of the training files are held out, where more than chance decides: so many of each class, whole groups, or the
//! last ones.
//!
//! The result is an order of the records, those that train first, in their own order, and then those that are held out. It
//! depends on the files, the keys and the seed only.

use super::assembly::Target;
use super::columns::find;
use super::part::Part;
use super::table_windows::name_of;
use crate::error::ReadError;
use crate::format::{OpenError, Reader};
use crate::record::{Record, RecordColumn, RecordName, UnreadColumn};
use crate::split::{HoldOut, Permutation, Split, held_out_count};
use crate::tokenizer::UsedTokenizer;
use kolo_graph::settings::{SettingError, Settings};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What `split` and `group` of the `[data]` section say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SplitRule {
    /// Samples by chance.
    Random,
    /// Of each class the same part, by chance.
    Stratified,
    /// The last ones, in the order of the files.
    Chronological,
    /// All samples of a group, by the value of this column.
    Groups(String),
}

const CHOICES: [&str; 4] = ["auto", "random", "stratified", "chronological"];

impl SplitRule {
    /// `None` if the job does not say it.
    pub fn read(settings: &Settings) -> Result<Option<Self>, SettingError> {
        let (split, group) = (settings.choice("split", &CHOICES)?, settings.text("group", "")?);
        if !group.is_empty() {
            return match split {
                "auto" => Ok(Some(Self::Groups(group))),
                _ => {
                    let message = format!("is \"{group}\", which cannot be combined with `split = \"{split}\"`");
                    Err(settings.wrong("group", message, "keep one of the two"))
                }
            };
        }
        Ok(match split {
            "random" => Some(Self::Random),
            "stratified" => Some(Self::Stratified),
            "chronological" => Some(Self::Chronological),
            _ => None,
        })
    }

    /// The key that says it.
    pub fn key(&self) -> &'static str {
        if matches!(self, Self::Groups(_)) { "group" } else { "split" }
    }
}

/// The split of a part's records, of which some may now come in another order, and a word on it for the first lines of a run.
pub(crate) fn hold_out(
    part: &mut Part,
    target: &Target,
    rule: &SplitRule,
    (settings, seed, skips): (&Settings, u64, bool),
) -> Result<(Split, Option<String>), OpenError> {
    let records = part.reader.len();
    let how = HoldOut::read(settings, records)?;
    let (held_out, said) = match rule {
        SplitRule::Random => return Ok((how.split(records, seed).bounded(settings)?, None)),
        SplitRule::Chronological => {
            let held_out = match how {
                HoldOut::Part(part) => held_out_count(records, part),
                HoldOut::Fold { .. } => {
                    let message =
                        "cannot be combined with `split = \"chronological\"`, which holds out the last samples";
                    return Err(settings.wrong("folds", message, "leave one of the two out").into());
                }
            };
            let said = (held_out > 0).then(|| format!("the last {held_out} samples held out"));
            return Ok((Split::given(records - held_out, held_out), said));
        }
        SplitRule::Stratified => {
            let Some(classes) = classes_of(part, target, skips)? else {
                let message = "is \"stratified\", but the target is not one class per sample";
                return Err(settings.wrong("split", message, "leave it out, or name a `target` of classes").into());
            };
            let said = format!("the same part of each of {} classes held out", classes.len());
            (stratified(&classes, &how, records, seed), said)
        }
        SplitRule::Groups(column) => {
            let groups = groups_of(part, column, settings, skips)?;
            let wanted = if let HoldOut::Fold { folds, .. } = how { folds } else { 2 };
            if groups.len() < wanted {
                let message = format!("is \"{column}\", which has {} values, but {wanted} are needed", groups.len());
                return Err(settings.wrong("group", message, "name a column that tells more groups apart").into());
            }
            let held_out = grouped(&groups, &how, records, seed);
            let count = groups.values().filter(|rows| rows.first().is_some_and(|row| held_out[*row as usize])).count();
            let said = format!("{count} of {} groups by \"{column}\" held out", groups.len());
            (held_out, said)
        }
    };
    let order = |of: bool| (0..records as u32).filter(|at| held_out[*at as usize] == of).collect::<Vec<u32>>();
    let (mut all, last) = (order(false), order(true));
    let split = Split::given(all.len(), last.len());
    all.extend(last);
    part.reader = Box::new(Reordered { records: part.take_reader(), order: all });
    Ok((split, (split.held_out_len() > 0).then_some(said)))
}

/// Records by some value.
type Sorted<K> = BTreeMap<K, Vec<u32>>;

fn row_number(at: usize) -> Result<u32, ReadError> {
    u32::try_from(at)
        .map_err(|_| ReadError::new("there are more than 2³² samples", "hold out files: `validation = \"…\"`"))
}

/// The records of each class; those that have none, or cannot be read, are one more.
fn classes_of(part: &Part, target: &Target, skips: bool) -> Result<Option<Sorted<i32>>, ReadError> {
    let (Target::Class { lookup, .. }, Some(at)) = (target, part.places.target) else { return Ok(None) };
    let mut classes = vec![-1; part.reader.len()];
    part.visit(0..part.reader.len(), skips, &mut |row, record| {
        classes[row] = lookup.class(record.value(at)).unwrap_or(-1);
        Ok(())
    })?;
    let mut sorted = Sorted::new();
    for (row, class) in classes.into_iter().enumerate() {
        sorted.entry(class).or_insert_with(Vec::new).push(row_number(row)?);
    }
    Ok(Some(sorted))
}

fn groups_of(part: &Part, column: &str, settings: &Settings, skips: bool) -> Result<Sorted<String>, OpenError> {
    let columns = part.reader.columns();
    let at = find(columns, part.reader.unread(), column, settings, "group")?;
    let mut groups = Sorted::new();
    part.visit(0..part.reader.len(), skips, &mut |row, record| {
        let name = name_of(record.value(at), &columns[at]).ok_or_else(|| {
            ReadError::new(
                format!("column \"{column}\" does not say the group"),
                "correct the file, or leave `group` out",
            )
        })?;
        groups.entry(name).or_insert_with(Vec::new).push(row_number(row)?);
        Ok(())
    })?;
    // Nobody trains on what cannot be read, so it may be on either side.
    Ok(groups)
}

/// Whether each record is held out: of each class the same part, as nearly as whole samples allow, and one at least that trains.
fn stratified(classes: &Sorted<i32>, how: &HoldOut, records: usize, seed: u64) -> Vec<bool> {
    let mut held_out = vec![false; records];
    let shuffled = |class: &i32, rows: &[u32]| -> Vec<usize> {
        let order = Permutation::new(seed, &format!("data.split.class {class}"), rows.len());
        (0..rows.len()).map(|at| rows[order.at(at)] as usize).collect()
    };
    match how {
        HoldOut::Fold { folds, fold } => {
            // Dealt like cards, one class after the other.
            let all = classes.iter().flat_map(|(class, rows)| shuffled(class, rows));
            all.skip(*fold).step_by(*folds).for_each(|row| held_out[row] = true);
        }
        HoldOut::Part(part) => {
            let wanted = held_out_count(records, *part);
            let share = |rows: &Vec<u32>| rows.len() as u128 * wanted as u128;
            let mut counts: Vec<usize> =
                classes.values().map(|rows| (share(rows) / records.max(1) as u128) as usize).collect();
            let spare = |at: usize, rows: &Vec<u32>, counts: &[usize]| counts[at] + 1 < rows.len();
            let mut rest: Vec<(std::cmp::Reverse<u128>, usize)> = classes
                .values()
                .enumerate()
                .filter(|(at, rows)| spare(*at, rows, &counts))
                .map(|(at, rows)| (std::cmp::Reverse(share(rows) % records.max(1) as u128), at))
                .collect();
            rest.sort_unstable();
            let missing = wanted - counts.iter().sum::<usize>();
            rest.iter().take(missing).for_each(|(_, at)| counts[*at] += 1);
            for ((class, rows), count) in classes.iter().zip(counts) {
                shuffled(class, rows).into_iter().take(count).for_each(|row| held_out[row] = true);
            }
        }
    }
    held_out
}

/// Whether each record is held out: whole groups, drawn by chance, as long as they are no more than the wanted part; the smallest
/// one if all are more. Of folds, the largest groups come first, each into the fold that has the fewest samples.
fn grouped(groups: &Sorted<String>, how: &HoldOut, records: usize, seed: u64) -> Vec<bool> {
    let all: Vec<&Vec<u32>> = groups.values().collect();
    let order = Permutation::new(seed, "data.split.groups", all.len());
    let mut shuffled: Vec<&Vec<u32>> = (0..all.len()).map(|at| all[order.at(at)]).collect();
    let chosen: Vec<&Vec<u32>> = match how {
        HoldOut::Fold { folds, fold } => {
            shuffled.sort_by_key(|rows| std::cmp::Reverse(rows.len()));
            let mut sizes = vec![0usize; *folds];
            let mut deal = |rows: &Vec<u32>| {
                let least = (0..*folds).min_by_key(|fold| sizes[*fold]).unwrap_or(0);
                sizes[least] += rows.len();
                least == *fold
            };
            shuffled.into_iter().filter(|rows| deal(rows)).collect()
        }
        HoldOut::Part(part) => {
            let wanted = held_out_count(records, *part);
            let mut count = 0;
            let mut fits = |rows: &Vec<u32>| {
                let fits = count + rows.len() <= wanted;
                count += if fits { rows.len() } else { 0 };
                fits
            };
            let smallest = shuffled.iter().min_by_key(|rows| rows.len()).copied();
            let chosen: Vec<&Vec<u32>> = shuffled.into_iter().filter(|rows| fits(rows)).collect();
            if chosen.is_empty() && wanted > 0 { smallest.into_iter().collect() } else { chosen }
        }
    };
    let mut held_out = vec![false; records];
    chosen.into_iter().flatten().for_each(|row| held_out[*row as usize] = true);
    held_out
}

/// The records of another reader in an order of its own.
#[derive(Debug)]
struct Reordered {
    records: Box<dyn Reader>,
    order: Vec<u32>,
}

impl Reordered {
    /// The record behind number `at`.
    fn behind(&self, at: usize) -> usize {
        self.order.get(at).map_or(usize::MAX, |row| *row as usize)
    }
}

impl Reader for Reordered {
    fn columns(&self) -> &[RecordColumn] {
        self.records.columns()
    }

    fn unread(&self) -> &[UnreadColumn] {
        self.records.unread()
    }

    fn len(&self) -> usize {
        self.order.len()
    }

    fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
        self.records.read(self.behind(at), record)
    }

    fn place(&self, at: usize) -> Option<(PathBuf, u64)> {
        self.records.place(self.behind(at))
    }

    fn name(&self, at: usize) -> Option<RecordName> {
        self.records.name(self.behind(at))
    }

    fn record_number(&self, at: usize) -> usize {
        self.records.record_number(self.behind(at))
    }

    fn is_index(&self, column: usize) -> bool {
        self.records.is_index(column)
    }

    fn kind_reason(&self, column: usize) -> Option<String> {
        self.records.kind_reason(column)
    }

    fn notes(&self) -> Vec<String> {
        self.records.notes()
    }

    fn files(&self) -> Vec<PathBuf> {
        self.records.files()
    }

    fn tokenizer(&self) -> Option<UsedTokenizer> {
        self.records.tokenizer()
    }

    fn fingerprint(&self) -> String {
        self.records.fingerprint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 100 records, those of class 0 are 70, of class 1 are 25, of class 2 are 5.
    fn classes() -> Sorted<i32> {
        [(0, (0..70).collect()), (1, (70..95).collect()), (2, (95..100).collect())].into()
    }

    fn count(held_out: &[bool], rows: &[u32]) -> usize {
        rows.iter().filter(|row| held_out[**row as usize]).count()
    }

    #[test]
    fn each_class_gives_the_same_part() {
        let classes = classes();
        let counts = |how: &HoldOut, seed| {
            let held_out = stratified(&classes, how, 100, seed);
            classes.values().map(|rows| count(&held_out, rows)).collect::<Vec<usize>>()
        };
        assert_eq!(counts(&HoldOut::Part(0.2), 1), [14, 5, 1]);
        assert_eq!(counts(&HoldOut::Part(0.1), 1), [7, 3, 0], "10 samples, the largest remainders first");
        let [one, other] = [1, 2].map(|seed| stratified(&classes, &HoldOut::Part(0.2), 100, seed));
        assert!(one != other && one == stratified(&classes, &HoldOut::Part(0.2), 100, 1));
        let mut seen = [0; 100];
        for fold in 0..5 {
            let held_out = stratified(&classes, &HoldOut::Fold { folds: 5, fold }, 100, 1);
            assert_eq!(classes.values().map(|rows| count(&held_out, rows)).collect::<Vec<_>>(), [14, 5, 1]);
            seen.iter_mut().zip(&held_out).for_each(|(seen, held_out)| *seen += usize::from(*held_out));
        }
        assert_eq!(seen, [1; 100]);
    }

    #[test]
    fn groups_stay_whole() {
        let groups: Sorted<String> =
            (0..20u32).map(|group| (format!("g{group}"), (group * 5..group * 5 + 5).collect())).collect();
        let whole = |held_out: &[bool]| groups.values().all(|rows| [0, 5].contains(&count(held_out, rows)));
        let held_out = grouped(&groups, &HoldOut::Part(0.2), 100, 3);
        assert!(whole(&held_out) && held_out.iter().filter(|held_out| **held_out).count() == 20);
        let folds: Vec<Vec<bool>> =
            (0..3).map(|fold| grouped(&groups, &HoldOut::Fold { folds: 3, fold }, 100, 3)).collect();
        assert!(folds.iter().all(|held_out| whole(held_out)));
        assert!((0..100).all(|row| folds.iter().filter(|held_out| held_out[row]).count() == 1));
        // All groups are more than the wanted part: one has to do.
        let two: Sorted<String> = [("a".into(), (0..60).collect()), ("b".into(), (60..100).collect())].into();
        let held_out = grouped(&two, &HoldOut::Part(0.2), 100, 3);
        assert!(held_out[60] && !held_out[0]);
    }
}
