//! From the definition and repetition levels of a Parquet column to nulls and lists.
//!
//! An entry stands for a value, a null, or an empty list. Its repetition level says which list it goes on with: 0 begins a
//! row, `n` adds an item to the `n`th list from outside. Its definition level says how far down something is there. The
//! levels of a damaged file may be any numbers: what does not fit together is an error.

/// A list on the way from a column to its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ListLevel {
    /// The least definition level at which the list is there.
    pub defined_at: i16,
    /// And at which it has an item.
    pub item: i16,
}

/// Lists at one depth: which are there, and where their items begin, with the end of the last.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Lists {
    pub defined: Vec<bool>,
    pub offsets: Vec<usize>,
}

/// Builds the lists at every depth, the outermost first. Returns them and the number of innermost items, nulls among them.
pub(super) fn lists(
    levels: &[ListLevel],
    definitions: &[i16],
    repetitions: &[i16],
) -> Result<(Vec<Lists>, usize), String> {
    let (Some(innermost), true) = (levels.last(), definitions.len() == repetitions.len()) else {
        return Err("its levels are not complete".into());
    };
    let depth = levels.len();
    let mut lists: Vec<Lists> = levels.iter().map(|_| Lists::default()).collect();
    let mut items = 0;
    // The lists, from outside, that have an item at the entry before: only these can get another item.
    let mut open = 0;
    for (definition, repetition) in definitions.iter().zip(repetitions) {
        let first = usize::try_from(*repetition).map_err(|_| "a level is negative")?;
        // Most entries are one more item of an innermost list.
        if first == depth && open == depth && *definition >= innermost.item {
            items += 1;
            continue;
        }
        if first > open || (first > 0 && *definition < levels[first - 1].item) {
            return Err("its levels contradict each other".into());
        }
        open = first;
        while open < depth {
            let begin = lists.get(open + 1).map_or(items, |below| below.defined.len());
            lists[open].offsets.push(begin);
            lists[open].defined.push(*definition >= levels[open].defined_at);
            if *definition < levels[open].item {
                break;
            }
            open += 1;
        }
        items += usize::from(open == depth);
    }
    for at in 0..depth {
        let end = lists.get(at + 1).map_or(items, |below| below.defined.len());
        lists[at].offsets.push(end);
    }
    Ok((lists, items))
}

/// Whether each of these entries has a value, or `None` if all have one. `max_definition` is the level of a value.
pub(super) fn flags(
    definitions: impl Iterator<Item = i16>,
    values: usize,
    items: usize,
    max_definition: i16,
) -> Option<Vec<bool>> {
    (values != items).then(|| definitions.map(|definition| definition >= max_definition).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An optional list of optional lists of optional numbers.
    const NESTED: [ListLevel; 2] = [ListLevel { defined_at: 1, item: 2 }, ListLevel { defined_at: 3, item: 4 }];

    #[test]
    fn rows_nulls_and_empty_lists_of_lists() {
        // [[1, null], []], null, [], [null, [2]]
        let definitions = [5, 4, 3, 0, 1, 2, 5];
        let repetitions = [0, 2, 1, 0, 0, 0, 1];
        let (lists, items) = lists(&NESTED, &definitions, &repetitions).unwrap();
        assert_eq!(lists[0], Lists { defined: vec![true, false, true, true], offsets: vec![0, 2, 2, 2, 4] });
        assert_eq!(lists[1], Lists { defined: vec![true, true, false, true], offsets: vec![0, 2, 2, 2, 3] });
        assert_eq!(items, 3);
        let inner = definitions.into_iter().filter(|definition| *definition >= 4);
        assert_eq!(flags(inner, 2, items, 5), Some(vec![true, false, true]));
        assert_eq!(flags([].into_iter(), 3, 3, 5), None);
    }

    #[test]
    fn levels_that_contradict_each_other_are_refused() {
        for (definitions, repetitions) in [
            // The first entry goes on with a list.
            (&[5][..], &[1][..]),
            // A list that is null or empty gets another item.
            (&[0, 5], &[0, 1]),
            (&[1, 5], &[0, 1]),
            (&[3, 5], &[0, 2]),
            // A repeated entry that holds no item.
            (&[5, 3], &[0, 2]),
            (&[5, 1], &[0, 1]),
            (&[5, 5], &[0, 3]),
            (&[5, 5], &[0, -1]),
            (&[5, 5], &[0]),
        ] {
            assert!(lists(&NESTED, definitions, repetitions).is_err(), "{definitions:?} {repetitions:?}");
        }
        assert!(lists(&[], &[], &[]).is_err());
    }

    #[test]
    fn no_levels_are_no_rows() {
        let (lists, items) = lists(&NESTED, &[], &[]).unwrap();
        assert_eq!((lists[0].defined.len(), lists[1].defined.len(), items), (0, 0, 0));
    }
}
