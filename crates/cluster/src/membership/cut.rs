//! Which hosts a job gives up where some of its ranks cannot reach each other.

use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Decides with which hosts a job goes on, if ranks of different hosts cannot reach each other; says which hosts are dropped.
///
/// `hosts` has the host of each rank, `home` is that of the coordinator, and `pairs` are ranks one of which has said that it
/// cannot reach the other. Hosts are on one side as long as one leads to the other over hosts that do reach each other. The side
/// with the most ranks stays; of equal ones that with `home`, else that with the lowest rank. If bad links are left within it,
/// hosts that have many of them for their number of ranks are dropped, until there are none.
pub(crate) fn cut<'h>(
    hosts: &'h [String],
    home: Option<&str>,
    pairs: impl IntoIterator<Item = (usize, usize)>,
) -> Option<BTreeSet<&'h str>> {
    // In the order of their lowest ranks.
    let mut names: Vec<&str> = Vec::new();
    let mut ranks: Vec<usize> = Vec::new();
    let mut of = Vec::new();
    for host in hosts {
        let index = names.iter().position(|name| name == host).unwrap_or(names.len());
        if index == names.len() {
            names.push(host);
            ranks.push(0);
        }
        ranks[index] += 1;
        of.push(index);
    }
    let link = |(one, other): (usize, usize)| {
        let (one, other) = (*of.get(one)?, *of.get(other)?);
        (one != other).then_some((one.min(other), one.max(other)))
    };
    let bad: BTreeSet<(usize, usize)> = pairs.into_iter().filter_map(link).collect();
    if bad.is_empty() {
        return None;
    }
    let is_home = |host: usize| home == Some(names[host]);
    let worth = |side: &BTreeSet<usize>| {
        let size: usize = side.iter().map(|host| ranks[*host]).sum();
        (size, side.iter().any(|host| is_home(*host)), Reverse(side.first().copied()))
    };
    let mut kept = sides(names.len(), &bad).into_iter().max_by_key(worth)?;
    loop {
        let links = |host: usize| {
            bad.iter()
                .filter(|(one, other)| (*one == host && kept.contains(other)) || (*other == host && kept.contains(one)))
                .count()
        };
        let candidates = kept.iter().map(|host| (*host, links(*host))).filter(|(_, links)| *links > 0);
        // As many links as possible for as few ranks.
        let worst = candidates.max_by(|(one, links), (other, their_links)| {
            let relative = (links * ranks[*other]).cmp(&(their_links * ranks[*one]));
            relative.then(is_home(*other).cmp(&is_home(*one))).then(one.cmp(other))
        });
        let Some((host, _)) = worst else { break };
        kept.remove(&host);
    }
    Some((0..names.len()).filter(|host| !kept.contains(host)).map(|host| names[host]).collect())
}

/// Groups of hosts that are connected by links that are not bad.
fn sides(hosts: usize, bad: &BTreeSet<(usize, usize)>) -> Vec<BTreeSet<usize>> {
    let mut left: BTreeSet<usize> = (0..hosts).collect();
    let mut sides = Vec::new();
    while let Some(first) = left.pop_first() {
        let mut side = BTreeSet::from([first]);
        let mut open = vec![first];
        while let Some(host) = open.pop() {
            let reached = |other: &usize| !bad.contains(&(host.min(*other), host.max(*other)));
            let found: Vec<usize> = left.iter().copied().filter(reached).collect();
            found.iter().for_each(|other| {
                left.remove(other);
            });
            side.extend(&found);
            open.extend(found);
        }
        sides.push(side);
    }
    sides
}

#[cfg(test)]
mod tests {
    use super::cut;

    /// The dropped hosts, for ranks on these hosts, named by a letter each.
    fn dropped(hosts: &str, home: Option<&str>, pairs: &[(usize, usize)]) -> Option<String> {
        let hosts: Vec<String> = hosts.chars().map(String::from).collect();
        cut(&hosts, home, pairs.iter().copied()).map(|dropped| dropped.into_iter().collect())
    }

    #[test]
    fn the_larger_side_goes_on() {
        assert_eq!(dropped("aaabb", None, &[(0, 3)]).as_deref(), Some("b"));
        assert_eq!(dropped("aabbb", Some("a"), &[(4, 1)]).as_deref(), Some("a"));
        // Two groups of hosts, each of which sees its own: one word about each link is enough, from either end.
        let across = [(0, 2), (4, 0), (1, 2), (1, 3), (1, 4), (3, 0)];
        assert_eq!(dropped("abcde", Some("a"), &across).as_deref(), Some("ab"));
        // Three sides.
        assert_eq!(dropped("abbc", None, &[(0, 1), (1, 3), (0, 3)]).as_deref(), Some("ac"));
    }

    #[test]
    fn of_equal_sides_that_of_the_coordinator_goes_on_else_that_of_the_lowest_rank() {
        assert_eq!(dropped("aabb", Some("b"), &[(0, 2), (3, 1)]).as_deref(), Some("a"));
        assert_eq!(dropped("aabb", Some("c"), &[(0, 2)]).as_deref(), Some("b"));
        assert_eq!(dropped("baab", None, &[(0, 2)]).as_deref(), Some("a"));
    }

    #[test]
    fn a_bad_link_costs_as_few_ranks_as_possible() {
        // Both reach the third.
        assert_eq!(dropped("aabccc", None, &[(0, 2)]).as_deref(), Some("b"));
        assert_eq!(dropped("abc", None, &[(0, 1)]).as_deref(), Some("b"));
        assert_eq!(dropped("abc", Some("b"), &[(0, 1)]).as_deref(), Some("a"));
        // One host is behind two bad links; with many ranks it is worth more than both of the others.
        assert_eq!(dropped("abcd", None, &[(1, 0), (1, 2)]).as_deref(), Some("b"));
        assert_eq!(dropped("abbbbcd", None, &[(1, 0), (1, 5)]).as_deref(), Some("ac"));
    }

    #[test]
    fn who_is_only_stuck_is_not_cut_off() {
        assert_eq!(dropped("aabb", None, &[]), None);
        // Ranks of one host, or none at all.
        assert_eq!(dropped("aabb", None, &[(0, 1), (2, 9)]), None);
    }
}
