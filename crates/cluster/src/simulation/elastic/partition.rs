//! The network between two groups of hosts is cut, while the coordinator reaches them all.

use super::{DEADLINES, Elastic, Event, Simulation};
use kolo_comm::reach::UNANSWERED_HEARTBEATS;
use std::collections::BTreeSet;

const SEEDS: u64 = 300;
/// From the cut until the others go on: until ranks are sure, all have said so, and who is lost is gone.
const RECOVERY_HEARTBEATS: u64 = 14;

impl Simulation {
    /// A job that nothing else happens to. Host 0 is on one side, host 1 on the other.
    fn cut_in_two(seed: u64) -> Self {
        let mut this = Self::new(seed);
        (this.queue, this.events, this.workers, this.harms, this.steps) = Default::default();
        let workers = [2, 4, 8][this.random.below(3) as usize];
        (this.steps, this.harms) = (30, 1);
        (this.config.workers, this.config.min, this.config.sharded) = (workers, 1, false);
        this.config.restarts = if this.config.supervised { 6 } else { 0 };
        let hosts = 2 + this.random.below(3);
        let mut places: Vec<u64> = (0..workers).map(|_| this.random.below(hosts)).collect();
        (places[0], places[1]) = (this.random.below(2), 0);
        places[1] = 1 - places[0];
        let is_far: Vec<bool> = (0..hosts).map(|host| host == 1 || (host > 1 && this.random.below(2) == 0)).collect();
        let far = (0..workers).filter(|worker| is_far[places[*worker] as usize]).collect();
        let names: Vec<String> = places.iter().map(|place| format!("h{place}")).collect();
        this.core = Elastic::new(this.config, &names, 0);
        this.cut = Some((500 + this.random.below(3000), far));
        (0..workers).for_each(|number| this.launch(number, this.config.supervised, 0));
        this.at(0, Event::Tick);
        this
    }

    fn is_far(&self, process: usize) -> bool {
        self.cut.as_ref().is_some_and(|(_, far)| far.contains(&self.workers[process].number))
    }

    /// Whether no call of this generation can complete any more.
    pub(super) fn is_cut(&self, generation: u32) -> bool {
        let Some((since_ms, _)) = &self.cut else { return false };
        let sides = self.members.get(&generation).into_iter().flat_map(|members| members.values());
        let sides: BTreeSet<bool> = sides.map(|process| self.is_far(*process)).collect();
        self.now_ms >= *since_ms && sides.len() > 1
    }

    /// Ranks of its generation that a process knows not to answer. Each finds out at another moment.
    pub(super) fn unreachable(&self, process: usize) -> Vec<usize> {
        let Some((since_ms, _)) = &self.cut else { return Vec::new() };
        let doubt_ms = u64::from(UNANSWERED_HEARTBEATS) * DEADLINES.heartbeat_ms;
        let late_ms = (process as u64 * 337) % DEADLINES.heartbeat_ms;
        let members = self.workers[process].generation.and_then(|generation| self.members.get(&generation));
        let Some(members) = members.filter(|_| self.now_ms >= since_ms + doubt_ms + late_ms) else { return Vec::new() };
        let other_side = |other: &usize| self.is_far(*other) != self.is_far(process);
        members.iter().filter(|(_, other)| other_side(other)).map(|(rank, _)| *rank).collect()
    }
}

#[test]
fn the_larger_side_of_a_cut_goes_on_at_once() {
    let mut smaller = [0; 2];
    for seed in 0..SEEDS {
        let mut simulation = Simulation::cut_in_two(seed);
        let Some((cut_ms, far)) = simulation.cut.clone() else { panic!("no cut") };
        let verdict = simulation.run();
        let about = format!("seed {seed}: {:?}, far {far:?}, {verdict:?}", simulation.config);
        assert!(verdict.is_some_and(|verdict| verdict.exit_code == 0), "{about}");
        let (workers, late_ms) = (simulation.config.workers, simulation.resumed_ms - cut_ms);
        // Rank 0 decides between equal sides.
        let far_stays = 2 * far.len() > workers || (2 * far.len() == workers && far.contains(&0));
        smaller[usize::from(far_stays)] += 1;
        for worker in simulation.workers.iter().filter(|worker| worker.finished) {
            assert_eq!(far.contains(&worker.number), far_stays, "who was cut off finished, {about}");
        }
        assert_eq!(simulation.core_generation, 1, "one change of the group, {about}");
        assert!(late_ms <= RECOVERY_HEARTBEATS * DEADLINES.heartbeat_ms, "after {late_ms} ms, {about}");
        assert_eq!(simulation.restarts, [], "nobody is started where the others cannot reach it, {about}");
    }
    assert!(smaller.iter().all(|count| *count > SEEDS / 10), "both happen: {smaller:?}");
}
