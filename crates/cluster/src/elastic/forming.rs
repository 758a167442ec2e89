//! How the next generation forms.

use super::{
    Actions, Coordinator, CoordinatorAction, CoordinatorEvent, Elastic, ElasticConfig, Group, JobPhase, WorkerState,
};
use crate::coordinator::{CoordinatorConfig, Notice};
use crate::membership::Verdict;
use crate::message::{Assignment, ControlMessage, Hello};
use kolo_comm::Fault;
use std::collections::BTreeMap;

impl Elastic {
    /// Forms the next generation if all who are here are ready for it.
    pub(super) fn try_to_form(&mut self, now_ms: u64, actions: &mut Actions) {
        let JobPhase::Gathering { deadline_ms } = self.phase else { return };
        let (deadlines, generation) = (self.config.deadlines, self.generation);
        let awaited = |state: &WorkerState| state.is_connected() && state.ready != Some(generation);
        // The first generation waits for all that were started; later ones take in who comes.
        let starting = |state: &WorkerState| state.is_here() && state.link.is_none() && !self.formed;
        let unsettled = |state: &WorkerState| state.is_here() && state.closed_ms.is_some();
        let blocks = |state: &WorkerState| {
            awaited(state) || starting(state) || unsettled(state) || !state.is_fenced(now_ms, deadlines)
        };
        if self.workers.values().any(blocks) {
            return;
        }
        let here = self.connected();
        let ranks = self.config.ranks(here.len());
        // Asked to end, any number can save what there is.
        let min = if self.interrupted.is_some() { 1 } else { self.config.min.max(1) };
        if ranks < min {
            let coming = |state: &WorkerState| state.restart_ms.is_some() || (state.is_here() && state.link.is_none());
            if now_ms < deadline_ms && self.interrupted.is_none() && self.workers.values().any(coming) {
                return;
            }
            return self.end(now_ms, self.too_few(here.len(), ranks), actions);
        }
        self.form(now_ms, here, ranks, actions);
    }

    /// Those whose state is the newest become ranks, in the order of their numbers; the rest are spares.
    fn form(&mut self, now_ms: u64, here: Vec<usize>, ranks: usize, actions: &mut Actions) {
        let holders = here.iter().filter(|worker| self.workers[*worker].position.is_some()).count();
        let state_lost = self.progressed && holders == 0;
        let hands_over = self.config.sharded && holders > ranks;
        let (ranks, keepers) = if hands_over { (holders, ranks) } else { (ranks, 0) };
        let mut members = here.clone();
        members.sort_by_key(|worker| (std::cmp::Reverse(self.workers[worker].position), *worker));
        // Those who do not hold any of the state come last.
        members.truncate(ranks);
        members.sort_unstable();
        let ElasticConfig { job, deadlines, supervised, .. } = self.config;
        let generation = self.generation;
        let config = CoordinatorConfig { world: ranks, job, generation, deadlines, supervised, bound: false };
        if state_lost {
            let text = "every worker that had the state of the job was lost: going back to the newest checkpoint";
            actions.push(CoordinatorAction::Notice(Notice::Lost { text: text.into(), generation }));
        }
        let (lost, since_ms) = (self.lost.join("\n"), now_ms.saturating_sub(self.over_ms));
        let resumed = self.resumed;
        let mut hellos = Vec::new();
        for worker in &here {
            let (Some(link), Some(hello)) = (self.workers[worker].link, self.workers[worker].hello.clone()) else {
                continue;
            };
            let rank = members.iter().position(|member| member == worker);
            let world = if rank.is_some() { ranks } else { 0 };
            let (rank_there, lost) = (rank.unwrap_or(0), lost.clone());
            let assignment = Assignment { rank: rank_there, world, lost, resumed, since_ms, keepers, state_lost };
            self.send(link, ControlMessage::Assign(assignment), actions);
            hellos.extend(rank.map(|rank| (link, Hello { rank, world, ..hello })));
        }
        let supervised_members = members.iter().all(|worker| self.workers[worker].launched);
        let config = CoordinatorConfig { supervised: config.supervised && supervised_members, ..config };
        let coordinator = Coordinator::new(config, now_ms);
        let told = self.lost.len();
        let (unreachable, cut_ms) = (BTreeMap::new(), None);
        self.group = Some(Group { coordinator, members, yields: false, hands_over, told, unreachable, cut_ms });
        (self.phase, self.formed) = (JobPhase::Running, true);
        for (link, hello) in hellos {
            let envelope = self.envelope(ControlMessage::Hello(hello));
            self.forward(now_ms, CoordinatorEvent::Message { link, envelope }, actions);
        }
        self.pass_on_interrupt(actions);
    }

    /// Passes a signal on to ranks of the generation, unless one of them has it already: what one is asked, all agree on. Who
    /// is new may not listen yet, and would end at once; and who hears Ctrl-C twice does.
    pub(super) fn pass_on_interrupt(&mut self, actions: &mut Actions) {
        let Some((signal, group)) = self.interrupted.zip(self.group.as_ref()) else { return };
        let members = &group.members;
        if members.iter().any(|worker| self.workers[worker].asked) {
            return;
        }
        let has_state = |worker: &&usize| self.workers[*worker].position.is_some();
        let chosen: Vec<usize> = match members.iter().find(has_state) {
            Some(_) => members.iter().filter(has_state).copied().collect(),
            None => members.clone(),
        };
        for worker in chosen {
            let Some(state) = self.workers.get_mut(&worker) else { continue };
            state.asked = true;
            match state.link.filter(|_| !state.launched) {
                Some(link) => self.send(link, ControlMessage::Interrupt, actions),
                None => actions.push(CoordinatorAction::Signal { rank: worker, signal }),
            }
        }
    }

    pub(super) fn failed(&self, text: String) -> Verdict {
        let interrupted = self.interrupted;
        Verdict { exit_code: 1, fault: Some(Fault::Aborted(text)), interrupted, ..self.verdict.clone() }
    }

    /// So many are here, of whom so many can form a group.
    fn too_few(&self, here: usize, ranks: usize) -> Verdict {
        if let Some(signal) = self.interrupted.filter(|_| here == 0) {
            return Verdict { interrupted: Some(signal), exit_code: 128 + signal, ..self.verdict.clone() };
        }
        let ElasticConfig { min, grains, .. } = self.config;
        let left = match here {
            0 => "no worker is left".into(),
            1 => "only one worker is left".into(),
            _ if ranks < here => format!("only {here} workers are left, of which {ranks} can share {grains} grains"),
            _ => format!("only {here} workers are left"),
        };
        let mut text = format!("{left}; the job needs at least {min} (--min {min})");
        self.lost.iter().for_each(|lost| text += &format!("\n  {lost}"));
        self.failed(text + "\n  hint: continue from the newest checkpoint with --resume, or lower --min")
    }
}
