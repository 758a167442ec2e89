//! Scripts of the ranks of a pipeline, from the schedule that they run.

use super::script::{Act, Scenario, Script};
use kolo_parallel::schedules::{Action, Channel, Pass, PipelineSchedule};

/// What the ranks of a pipeline do beside what the schedule says.
pub struct PipelineActs<'a> {
    /// What a rank does for an action, between receiving and sending.
    pub acts: &'a dyn Fn(usize, Action) -> Vec<Act>,
    /// The exchange that a message on a channel is.
    pub message: &'a dyn Fn(Channel) -> u32,
    /// What a rank does when it has done all its actions.
    pub after: &'a dyn Fn(usize) -> Vec<Act>,
}

impl std::fmt::Debug for PipelineActs<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PipelineActs")
    }
}

/// Adds a script for every rank of the schedule.
pub fn pipeline_scripts(scenario: &mut Scenario, schedule: &PipelineSchedule, parts: &PipelineActs<'_>) {
    let cells = schedule.stages * schedule.micro_batches;
    scenario.messages = 2 * cells as u32;
    let number = |channel: Channel, micro_batch: usize| {
        let pass = if channel.pass == Pass::Forward { 0 } else { cells };
        (pass + channel.stage * schedule.micro_batches + micro_batch) as u32
    };
    for (rank, actions) in schedule.actions.iter().enumerate() {
        let mut acts = Vec::new();
        for action in actions {
            if let Some(channel) = schedule.receives(*action) {
                acts.push(Act::Receive { message: number(channel, action.micro_batch) });
            }
            acts.extend((parts.acts)(rank, *action));
            if let Some(channel) = schedule.sends(*action) {
                let message = number(channel, action.micro_batch);
                acts.push(Act::Send { message, exchange: (parts.message)(channel) });
            }
        }
        acts.extend((parts.after)(rank));
        let handle = |act: &Act| match act {
            Act::Start { handle, .. } => Some(handle + 1),
            _ => None,
        };
        let handles = acts.iter().filter_map(handle).max().unwrap_or(0);
        scenario.scripts.push(Script { acts, handles });
    }
}
