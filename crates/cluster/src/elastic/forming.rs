//! How the next generation forms.

use super::{Actions, Coordinator, CoordinatorEvent, Elastic, ElasticConfig, Group, JobPhase, WorkerState};
use crate::coordinator::CoordinatorConfig;
use crate::membership::Verdict;
use crate::message::{Assignment, ControlMessage, Hello};
use kolo_comm::Fault;

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
        if ranks < self.config.min.max(1) {
            let coming = |state: &WorkerState| state.restart_ms.is_some() || (state.is_here() && state.link.is_none());
            if now_ms < deadline_ms && self.interrupted.is_none() && self.workers.values().any(coming) {
                return;
            }
            return self.end(now_ms, self.too_few(here.len()), actions);
        }
        if self.progressed && here.iter().all(|worker| self.workers[worker].position.is_none()) {
            let text = "no remaining worker has the state of the job\n  hint: continue from the newest checkpoint with --resume";
            return self.end(now_ms, self.failed(text.into()), actions);
        }
        self.form(now_ms, here, ranks, actions);
    }

    /// Those whose state is the newest become ranks, in the order of their numbers; the rest are spares.
    fn form(&mut self, now_ms: u64, here: Vec<usize>, ranks: usize, actions: &mut Actions) {
        let holders = here.iter().filter(|worker| self.workers[*worker].position.is_some()).count();
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
        let (lost, since_ms) = (self.lost.join("\n"), now_ms.saturating_sub(self.over_ms));
        let mut hellos = Vec::new();
        for worker in &here {
            let (Some(link), Some(hello)) = (self.workers[worker].link, self.workers[worker].hello.clone()) else {
                continue;
            };
            let rank = members.iter().position(|member| member == worker);
            let world = if rank.is_some() { ranks } else { 0 };
            let assignment = Assignment { rank: rank.unwrap_or(0), world, lost: lost.clone(), since_ms, keepers };
            self.send(link, ControlMessage::Assign(assignment), actions);
            hellos.extend(rank.map(|rank| (link, Hello { rank, world, ..hello })));
        }
        let supervised_members = members.iter().all(|worker| self.workers[worker].launched);
        let config = CoordinatorConfig { supervised: config.supervised && supervised_members, ..config };
        let coordinator = Coordinator::new(config, now_ms);
        self.group = Some(Group { coordinator, members, yields: false, hands_over });
        (self.phase, self.formed) = (JobPhase::Running, true);
        if !hands_over {
            self.lost.clear();
        }
        for (link, hello) in hellos {
            let envelope = self.envelope(ControlMessage::Hello(hello));
            self.forward(now_ms, CoordinatorEvent::Message { link, envelope }, actions);
        }
        if let Some(signal) = self.interrupted {
            self.forward(now_ms, CoordinatorEvent::Interrupt { signal }, actions);
        }
    }

    pub(super) fn failed(&self, text: String) -> Verdict {
        let interrupted = self.interrupted;
        Verdict { exit_code: 1, fault: Some(Fault::Aborted(text)), interrupted, ..self.verdict.clone() }
    }

    fn too_few(&self, here: usize) -> Verdict {
        let ElasticConfig { min, grains, .. } = self.config;
        let left = match here {
            0 => "no worker is left".into(),
            1 => "only one worker is left".into(),
            _ => format!("only {here} workers are left"),
        };
        let mut text = format!("{left}, but the job needs at least {min} that share its {grains} grains (--min {min})");
        self.lost.iter().for_each(|lost| text += &format!("\n  {lost}"));
        self.failed(text + "\n  hint: continue from the newest checkpoint with --resume, or lower --min")
    }
}
