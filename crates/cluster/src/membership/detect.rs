//! Finds ranks that are silent, that others wait for, or that hang while others make progress.

use super::{HUNG_STEPS, JobPhase, Membership, Weight};
use crate::compute::HostLoad;
use crate::deadlines::Deadlines;
use crate::rank_state::RankState;
use kolo_comm::Fault;

/// When a rank that was heard then counts as lost if it stays silent. One whose process is seen to compute is not stopped,
/// nor cut off: its host may be overloaded, and it has as long as one that does not move.
pub(crate) fn silent_ms(deadlines: Deadlines, heard_ms: u64, computed_ms: Option<u64>) -> u64 {
    let (silence_ms, computes_until) = (deadlines.silence_ms(), heard_ms + deadlines.stall_ms());
    let computed_ms = computed_ms.map_or(0, |computed_ms| (computed_ms + silence_ms).min(computes_until));
    (heard_ms + silence_ms).max(computed_ms)
}

/// Why it does.
pub(crate) fn silent_because(deadlines: Deadlines, heard_ms: u64, computed_ms: Option<u64>, load: HostLoad) -> String {
    let waited_ms = silent_ms(deadlines, heard_ms, computed_ms) - heard_ms;
    let crowded = if load.is_crowded() { format!("; its host is overloaded, with {load}") } else { String::new() };
    match waited_ms >= deadlines.stall_ms() {
        true => format!("no heartbeat for {waited_ms} ms, although its process computes{crowded}"),
        false => {
            format!("no heartbeat for {waited_ms} ms; its process is stopped or its host is unreachable{crowded}")
        }
    }
}

impl Membership {
    /// Suspects a rank that gives no heartbeat or makes no progress.
    pub(super) fn check_silence(&mut self, now_ms: u64) {
        if !matches!(self.phase, JobPhase::Running | JobPhase::Released { .. }) {
            return;
        }
        let (stopped_ms, silence_ms) = (self.deadlines.stopped_ms(), self.deadlines.silence_ms());
        let not_before_ms = match self.phase {
            // The word that a rank may end takes its time on the way there, and the end of its link on the way back.
            JobPhase::Released { deadline_ms } => deadline_ms - self.deadlines.stall_ms() + 2 * silence_ms,
            _ => 0,
        };
        let deadline = |state: &RankState| match state.stopped_ms {
            Some(since_ms) => since_ms + stopped_ms,
            None if state.joined => silent_ms(self.deadlines, state.heard_ms, state.computed_ms).max(not_before_ms),
            None => u64::MAX,
        };
        // At its end a process closes its link before it is gone, and may be stopped in between.
        let ends = |state: &RankState| state.closed && (self.phase == JobPhase::Running || state.stopped_ms.is_none());
        let silent =
            self.states.iter().filter(|state| state.exit.is_none() && !ends(state)).min_by_key(|state| deadline(state));
        if let Some(state) = silent.filter(|state| now_ms >= deadline(state)) {
            let why = match state.stopped_ms {
                Some(_) => format!("its process was stopped for {stopped_ms} ms"),
                None => silent_because(self.deadlines, state.heard_ms, state.computed_ms, state.load),
            };
            let (rank, fault) = (state.rank, self.lost(state.rank, why));
            return self.suspect(now_ms, Weight::Certain, Some(rank), 1, fault, None);
        }
        if self.phase != JobPhase::Running {
            return;
        }
        if let Some((rank, fault)) = self.stalled(now_ms).or_else(|| self.hung(now_ms)) {
            self.suspect(now_ms, Weight::Certain, Some(rank), 1, fault, None);
        }
    }

    /// A rank that does not move while another waits in a call it has not reached.
    fn stalled(&self, now_ms: u64) -> Option<(usize, Fault)> {
        let reached = |state: &RankState| state.world_call().map_or(0, |call| call.sequence + 1);
        let waits = |state: &&RankState| state.finished || (state.activity.in_call && state.world_call().is_some());
        let ahead = |state: &RankState| if state.finished { u64::MAX } else { reached(state) };
        let first = self.states.iter().filter(waits).max_by_key(|state| ahead(state))?;
        let comparable = |state: &RankState| state.activity.call.is_none() || state.world_call().is_some();
        // One that itself waited for long, and rightly, may not have said yet that it is over.
        let waited_ms = |state: &RankState| now_ms.saturating_sub(state.moved_ms.max(first.moved_ms));
        let stuck = |state: &&RankState| {
            state.joined
                && comparable(state)
                && reached(state) < ahead(first)
                && waited_ms(state) >= self.deadlines.stall_ms()
        };
        let slow =
            self.states.iter().filter(|state| !state.finished).filter(stuck).min_by_key(|state| reached(state))?;
        let target = match first.world_call() {
            Some(call) if !first.finished => call.to_string(),
            _ => "the end of the job".into(),
        };
        let during = format!("{target} ({} waits there; this one is at {})", first.name(), slow.during());
        let fault = Fault::Stalled { peer: slow.rank, host: slow.host.clone(), during, waited_ms: waited_ms(slow) };
        Some((slow.rank, fault))
    }

    /// A rank that neither moves nor waits, while others that do not wait for it get on: it is stuck in its work or halted in
    /// a call. As long as none of them took many steps meanwhile, its work may just be long.
    fn hung(&self, now_ms: u64) -> Option<(usize, Fault)> {
        let ahead = self.states.iter().max_by_key(|state| state.activity.step)?;
        let waited_ms = |state: &RankState| now_ms.saturating_sub(state.moved_ms);
        let works = |state: &RankState| state.joined && !state.finished && !state.activity.waits;
        let hangs = |state: &&RankState| {
            let passed = ahead.activity.step >= state.furthest + HUNG_STEPS;
            works(state) && passed && waited_ms(state) >= self.deadlines.stall_ms()
        };
        let state = self.states.iter().filter(hangs).max_by_key(|state| waited_ms(state))?;
        let (first, step, here) = (ahead.name(), ahead.activity.step, state.during());
        let during = format!("its next step ({first} is at step {step}; this one is at {here})");
        let fault = Fault::Stalled { peer: state.rank, host: state.host.clone(), during, waited_ms: waited_ms(state) };
        Some((state.rank, fault))
    }
}
