//! How simulated elastic jobs end, and in which run.

use super::{GRAINS, NOTHING_SAVED, Simulation, State, Worker};
use crate::membership::Verdict;
use std::panic::{AssertUnwindSafe, catch_unwind};

const SEEDS: u64 = 3000;

impl Simulation {
    /// Whether the job is done; if so, or if it could not be, it ended as it should.
    fn judge(&self, verdict: Option<&Verdict>) -> bool {
        let about = format!(
            "seed {}, run {}: {:?}, {} steps, delay {} ms, {} harms: {verdict:?}",
            self.seed, self.run, self.config, self.steps, self.delay_max_ms, self.harms
        );
        let done = verdict.is_some_and(|verdict| verdict.exit_code == 0);
        assert!(done || self.harms > 0, "failed without harm, {about}");
        if let Some(verdict) = verdict.filter(|_| !done) {
            let text = verdict.text().unwrap_or_default();
            // Where nobody sees their processes, workers leave a coordinator that does not run.
            let expected = ["the job needs at least", NOTHING_SAVED, "left in the meantime"]
                .iter()
                .any(|part| text.contains(part));
            assert!(expected, "ended for another reason, {about}");
        }
        let finished: Vec<&Worker> = self.workers.iter().filter(|worker| worker.finished).collect();
        assert!(!done || !finished.is_empty(), "nobody finished, {about}");
        for worker in finished.iter().filter(|_| done) {
            assert_eq!(worker.state.as_ref().map_or(0, State::step), self.steps, "{about}");
        }
        done
    }
}

/// What happened in all jobs.
#[derive(Debug, Default)]
struct Totals {
    harms: usize,
    resumed: u64,
    relieved: u64,
    /// Generations that went back to a checkpoint.
    went_back: u64,
    /// Jobs that no run had to resume.
    done_at_once: u64,
    /// Runs that continued from a checkpoint.
    restored: u64,
    commits: u64,
    failures: u64,
    remade: u64,
    superseded: u64,
    repeated: u64,
}

fn check(seed: u64, totals: &mut Totals) {
    let mut simulation = Simulation::new(seed);
    loop {
        let verdict = simulation.run();
        let done = simulation.judge(verdict.as_ref());
        simulation.find_newest();
        totals.harms += simulation.harms;
        totals.resumed += simulation.resumed;
        totals.relieved += simulation.relieved;
        totals.went_back += simulation.went_back.values().filter(|state| state.step() > 0).count() as u64;
        if done {
            break;
        }
        simulation = simulation.resume();
        totals.restored += u64::from(simulation.origin.step() > 0);
    }
    simulation.saves.fail();
    simulation.find_newest();
    let Simulation { run, saves, groups, .. } = simulation;
    groups.are_undisturbed(GRAINS);
    totals.done_at_once += u64::from(run == 0);
    totals.commits += saves.commits;
    totals.failures += saves.failures;
    totals.remade += groups.remade;
    totals.superseded += groups.superseded;
    totals.repeated += groups.repeated;
}

#[test]
fn thousands_of_elastic_jobs() {
    let mut totals = Totals::default();
    for seed in 0..SEEDS {
        let outcome = catch_unwind(AssertUnwindSafe(|| check(seed, &mut totals)));
        assert!(outcome.is_ok(), "seed {seed}");
    }
    // The jobs are harmed, and most survive.
    let Totals { harms, resumed, relieved, done_at_once, .. } = totals;
    assert!(harms > 2000 && resumed > SEEDS + 1000 && relieved > 100 && done_at_once * 10 > SEEDS * 6, "{totals:?}");
    let Totals { commits, failures, restored, went_back, .. } = totals;
    assert!(commits > 2 * SEEDS && failures > SEEDS + 1000 && restored > 100 && went_back > 20, "{totals:?}");
    // Groups do meet: they make and commit the same again, and commit when others go on.
    let Totals { remade, superseded, repeated, .. } = totals;
    assert!(remade > 10 && superseded > 50 && repeated > 100, "{totals:?}");
}
