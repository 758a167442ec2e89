//! What a job does when the network between its hosts is cut, while the coordinator reaches them all.

use super::{Actions, Elastic, JobPhase};
use crate::membership::cut::cut;
use std::collections::BTreeSet;

/// Hosts named in a message; of more, their number.
const NAMED_HOSTS_MAX: usize = 3;

impl Elastic {
    /// Where a worker runs: as its launcher calls the host, or as it does itself.
    pub(super) fn place(&self, worker: usize) -> &str {
        let named = self.places.get(worker).filter(|place| !place.is_empty());
        named.or(self.workers.get(&worker).map(|state| &state.host)).map_or("", String::as_str)
    }

    /// A rank cannot reach these; others may be about to say so too.
    pub(super) fn hear_unreachable(&mut self, now_ms: u64, worker: usize, ranks: Vec<usize>) {
        let Some(rank) = self.rank(worker) else { return };
        let reach_ms = self.config.deadlines.reach_ms();
        let Some(group) = &mut self.group else { return };
        if ranks.is_empty() {
            group.unreachable.remove(&rank);
        } else {
            group.unreachable.insert(rank, ranks);
        }
        group.cut_ms = match group.unreachable.is_empty() {
            true => None,
            false => Some(group.cut_ms.unwrap_or(now_ms + reach_ms)),
        };
    }

    /// If ranks cannot reach each other, the job goes on with one side, and all workers of the other hosts are lost at once.
    pub(super) fn cut_off(&mut self, now_ms: u64, actions: &mut Actions) {
        let Some(group) = self.group.as_ref().filter(|_| self.phase == JobPhase::Running) else { return };
        if group.cut_ms.is_none_or(|cut_ms| now_ms < cut_ms) {
            return;
        }
        let hosts: Vec<String> = group.members.iter().map(|worker| self.place(*worker).to_string()).collect();
        let at_home = |worker: &&usize| self.workers.get(*worker).is_some_and(|state| state.host == self.home);
        let home = group.members.iter().find(at_home).map(|worker| self.place(*worker));
        let pairs = group.unreachable.iter().flat_map(|(rank, others)| others.iter().map(|other| (*rank, *other)));
        let dropped = cut(&hosts, home, pairs);
        let Some(dropped) = dropped else {
            if let Some(group) = &mut self.group {
                group.cut_ms = None;
            }
            return;
        };
        let kept: BTreeSet<&str> = hosts.iter().map(String::as_str).filter(|host| !dropped.contains(host)).collect();
        let kept = match kept.len() {
            0..=NAMED_HOSTS_MAX => kept.into_iter().collect::<Vec<_>>().join(", "),
            more => format!("{more} other hosts"),
        };
        let why = format!("the network between its host and {kept} is cut; nothing is started there any more");
        self.cut_off.extend(dropped.into_iter().map(String::from));
        let is_lost = |worker: &&usize| self.cut_off.contains(self.place(**worker));
        let lost: Vec<usize> = self.workers.keys().filter(is_lost).copied().collect();
        for worker in &lost {
            if let Some(state) = self.workers.get_mut(worker) {
                state.restart_ms = None;
            }
        }
        self.lose_all(now_ms, &lost, &why, actions);
    }

    /// Somebody joins by hand from a host that was cut off: it is there again.
    pub(super) fn take_back_host(&mut self, worker: usize) {
        if worker < self.config.workers {
            return;
        }
        let Some(host) = self.workers.get(&worker).map(|state| state.host.clone()) else { return };
        let is_there = |worker: &usize| self.workers.get(worker).is_some_and(|state| state.host == host);
        let names: BTreeSet<String> = self
            .workers
            .keys()
            .filter(|worker| is_there(worker))
            .map(|worker| self.place(*worker).to_string())
            .collect();
        self.cut_off.retain(|place| !names.contains(place));
    }
}
