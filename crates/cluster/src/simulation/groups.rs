//! Which groups of a simulated job began, went on and committed, and from what.
//!
//! Checked, over all groups of a run and over the runs that resume it: whoever makes or commits a step has the same state after
//! it; no call of a group comes to its end once a later one has begun, but for one that a process was stopped in, and no group
//! makes a step beyond the one in flight then; whatever a group commits, before or after it was superseded, is a part of what
//! each later one of its run continued from, made by the same groups; whatever a run had safely committed is a part of what
//! the one that resumes it continues from.
//!
//! Two exceptions. A group that is lost as a whole before the coordinator has heard that it goes on cannot be continued: the
//! next one begins where that one did, and makes the same again. Where all who had the state are lost, the next one begins with
//! the newest checkpoint.

use super::state::{Group, State};
use std::collections::BTreeMap;

#[derive(Debug)]
struct Commit {
    by: Group,
    state: State,
    /// It is known to have succeeded.
    durable: bool,
    /// Nobody was left to continue from it.
    abandoned: bool,
}

#[derive(Debug, Default)]
pub struct Groups {
    /// The state with which each group began.
    began: BTreeMap<Group, State>,
    /// The furthest step that each has made, counted from 0.
    furthest: BTreeMap<Group, u64>,
    /// Who first made the state after each step, and its digest.
    made: BTreeMap<u64, (Group, u64)>,
    /// All that was tried, in the order of time.
    commits: Vec<Commit>,
    /// Steps made by a group that another one of its run had made.
    pub remade: u64,
    /// Commits by a group when a later one had begun.
    pub superseded: u64,
    /// Commits of a step that another group has committed.
    pub repeated: u64,
}

impl Groups {
    /// All ranks of a group continue from one state. An earlier group is `unheard` if nobody could know that it went on, and
    /// nobody who has a later state is left.
    pub fn begins(&mut self, group: Group, state: &State, unheard: impl Fn(Group) -> bool) {
        if let Some(before) = self.began.get(&group) {
            return assert_eq!(before, state, "ranks of {group:?} begin with different states");
        }
        self.is_the_state(group, state);
        let of_run = |earlier: Group| earlier.run == group.run && unheard(earlier);
        self.furthest.retain(|earlier, furthest| *furthest <= state.step() || !of_run(*earlier));
        for commit in &mut self.commits {
            commit.abandoned |= !commit.state.is_before(state) && of_run(commit.by);
        }
        for (earlier, furthest) in self.furthest.range(Group { generation: 0, ..group }..group) {
            let step = state.step();
            assert!(*furthest <= step, "{earlier:?} made step {furthest}, but {group:?} begins at {step}");
        }
        for commit in self.commits.iter().filter(|commit| !commit.abandoned) {
            let continued = commit.state.is_before(state);
            // The checkpoint of a run that is over may be lost as long as nobody was told of it.
            assert!(
                continued || (commit.by.run < group.run && !commit.durable),
                "{commit:?} is lost: {group:?} begins with {state:?}"
            );
        }
        self.began.insert(group, state.clone());
    }

    /// All ranks of a group have entered a call, so that it will complete.
    pub fn decides(&self, group: Group) {
        let later = self.began.range(group.later()).next();
        assert!(later.is_none(), "{group:?} goes on beside {later:?}");
    }

    /// A rank of a group has made the last step of this state.
    pub fn makes(&mut self, group: Group, state: &State) {
        let step = state.step() - 1;
        let furthest = self.furthest.entry(group).or_insert(step);
        *furthest = step.max(*furthest);
        for (later, began) in self.began.range(group.later()) {
            let at = began.step();
            assert!(step <= at, "{group:?} makes step {step}, but {later:?} began at {at}");
        }
        self.is_the_state(group, state);
        let maker = self.made[&state.step()].0;
        self.remade += u64::from(maker.run == group.run && maker != group);
    }

    /// Nobody has another state after this step.
    fn is_the_state(&mut self, group: Group, state: &State) {
        let (step, made) = (state.step(), (group, state.digest));
        let first = *self.made.entry(step).or_insert(made);
        assert_eq!(first.1, state.digest, "{group:?} and {:?} have different states after {step} steps", first.0);
    }

    /// A group is about to commit a state. Whether that succeeds or not, it may be found later; says where to note the outcome.
    pub fn commits(&mut self, by: Group, state: &State) -> usize {
        for Commit { by: other, state: theirs, .. } in
            self.commits.iter().filter(|commit| commit.state.step() == state.step())
        {
            assert_eq!(theirs.digest, state.digest, "{by:?} and {other:?} commit different states of one step");
            self.repeated += u64::from(*other != by);
        }
        for (later, began) in self.began.range(by.later()) {
            assert!(state.is_before(began), "{by:?} commits {state:?}, but {later:?} began with {began:?}");
        }
        self.is_the_state(by, state);
        self.superseded += u64::from(self.began.range(by.later()).next().is_some());
        self.commits.push(Commit { by, state: state.clone(), durable: false, abandoned: false });
        self.commits.len() - 1
    }

    pub fn committed(&mut self, commit: usize) {
        self.commits[commit].durable = true;
    }

    /// This is what is newest on the disk.
    pub fn finds(&self, newest: &State) {
        let (step, durable) = (newest.step(), self.commits.iter().filter(|commit| commit.durable));
        let durable = durable.map(|commit| commit.state.step()).max().unwrap_or(0);
        assert!(step >= durable, "step {durable} was committed, and {step} is the newest");
        let known = step == 0 || self.commits.iter().any(|commit| commit.state == *newest);
        assert!(known, "nobody committed what is newest: {newest:?}");
    }

    /// Every state that anybody had is one of an undisturbed job.
    pub fn are_undisturbed(&self, grains: usize) {
        for (step, (group, digest)) in &self.made {
            assert_eq!(*digest, State::undisturbed(*step, grains), "after {step} steps of {group:?}");
        }
    }
}
