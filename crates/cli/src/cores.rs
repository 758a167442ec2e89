//! How many cores a rank may call its own.
//!
//! Launchers bind ranks to cores of their own, to a part of the machine that several ranks share, or not at all. Nothing tells
//! a rank which of these it was, so all tell each other: every core is shared evenly among the ranks that may use it.

use kolo_cluster::Member;
use kolo_comm::{Bootstrap, Fault, host};
use std::collections::BTreeSet;

/// The most cores of a machine that are told apart.
const CORES_MAX: usize = 1 << 16;

/// Cores by number.
type Cores = BTreeSet<usize>;

/// The cores of this rank. All ranks call it.
pub fn own(member: &mut Member) -> Result<usize, Fault> {
    let available = std::thread::available_parallelism().map_or(1, usize::from);
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default().trim();
    let kernel = host::kernel().unwrap_or_else(|| member.host().into());
    let blobs = member.all_gather(format!("{kernel} {list}").as_bytes())?;
    let told = blobs.iter().filter_map(|blob| std::str::from_utf8(blob).ok()?.split_once(' '));
    let here: Vec<Cores> = told.filter(|(theirs, _)| *theirs == kernel).map(|(_, list)| cores(list)).collect();
    Ok(share(&cores(list), &here, available))
}

/// Reads `0-3,8`; empty if it is nothing of the kind.
fn cores(list: &str) -> Cores {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        (last < CORES_MAX).then_some(first..=last)
    };
    list.split(',').map(range).collect::<Option<Vec<_>>>().unwrap_or_default().into_iter().flatten().collect()
}

/// This rank's share of the cores it may use, given those of all ranks of its host, this one among them. A quota may leave it
/// fewer `available` ones than it has numbers of.
fn share(mine: &Cores, here: &[Cores], available: usize) -> usize {
    if mine.is_empty() {
        return (available / here.len().max(1)).max(1);
    }
    let users = |core: &usize| here.iter().filter(|cores| cores.contains(core)).count().max(1);
    let parts: f64 = mine.iter().map(|core| 1.0 / users(core) as f64).sum();
    // Thirds do not add up to the last bit.
    let share = parts * available.min(mine.len()) as f64 / mine.len() as f64 + 1e-6;
    (share as usize).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share of each rank that may use these.
    fn shares(lists: &[&str], available: usize) -> Vec<usize> {
        let here: Vec<Cores> = lists.iter().map(|list| cores(list)).collect();
        here.iter().map(|mine| share(mine, &here, available)).collect()
    }

    #[test]
    fn every_core_is_shared_by_those_that_may_use_it() {
        assert_eq!(shares(&["0-31"; 4], 32), [8; 4], "unbound");
        assert_eq!(shares(&["0-31"; 3], 32), [10; 3], "unbound, with a rest");
        assert_eq!(shares(&["0-7", "8-15", "16-23", "24-31"], 8), [8; 4], "each on its own");
        assert_eq!(shares(&["0-15,32-47", "0-15,32-47", "16-31,48-63", "16-31,48-63"], 32), [16; 4], "halves");
        assert_eq!(shares(&["8-15"; 4], 8), [2; 4], "all in a part of the machine");
        assert_eq!(shares(&["0-7", "0-3"], 8), [6, 2], "some overlap");
        assert_eq!(shares(&["0-63"; 2], 8), [4; 2], "a quota");
        assert_eq!(shares(&["0"; 5], 1), [1; 5], "more ranks than cores");
        assert_eq!(shares(&["", ""], 8), [4; 2], "nothing known");
    }

    #[test]
    fn lists_are_read_with_care() {
        assert_eq!(cores("0-2,8"), Cores::from([0, 1, 2, 8]));
        for list in ["", "x", "0-", "1,,2", "0-99999999999", "3-1"] {
            assert!(cores(list).is_empty(), "{list}");
        }
    }
}
