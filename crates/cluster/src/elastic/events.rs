//! What the coordinator of an elastic job hears.

use super::{ANY_RANK, Actions, Elastic, JobPhase, WORKERS_MAX, WorkerState, first_line};
use super::{CoordinatorAction, CoordinatorEvent, Core, Exit, Notice, Resumed, Verdict};
use crate::compute::HostLoad;
use crate::message::{ControlMessage, Envelope, Hello};
use kolo_comm::watch::Activity;

/// Positions up to this one are of the start, before any step.
const START: u64 = 1;

impl Core for Elastic {
    fn step(&mut self, now_ms: u64, event: CoordinatorEvent) -> Actions {
        self.forgive(now_ms);
        let mut actions = Vec::new();
        match event {
            CoordinatorEvent::Message { link, envelope } => self.message(now_ms, link, envelope, &mut actions),
            CoordinatorEvent::Rejected { link, fault } => {
                if let Some(worker) = self.links.get(&link).copied() {
                    self.lose(now_ms, worker, first_line(&fault.to_string()), &mut actions);
                }
            }
            CoordinatorEvent::Closed { link } => self.closed(now_ms, link, &mut actions),
            CoordinatorEvent::Exited { rank, exit } => self.exited(now_ms, rank, exit, &mut actions),
            CoordinatorEvent::Stopped { rank } => self.stopped(now_ms, rank, Some(now_ms), &mut actions),
            CoordinatorEvent::Continued { rank } => self.stopped(now_ms, rank, None, &mut actions),
            CoordinatorEvent::Computed { rank, load } => self.computed(now_ms, rank, load, &mut actions),
            CoordinatorEvent::Trouble { rank, why } => {
                // Whoever could be seen there is not seen any more, and nobody can be started there.
                if let Some(state) = self.workers.get_mut(&rank) {
                    state.launched = false;
                }
                self.lose(now_ms, rank, why, &mut actions);
            }
            CoordinatorEvent::Interrupt { signal } => self.interrupt(now_ms, signal, &mut actions),
            CoordinatorEvent::GivenUp { text } => self.end(now_ms, self.failed(text), &mut actions),
            CoordinatorEvent::Tick => self.tick(now_ms, &mut actions),
        }
        self.finish(now_ms, &mut actions);
        actions
    }
}

impl Elastic {
    fn message(&mut self, now_ms: u64, link: usize, envelope: Envelope, actions: &mut Actions) {
        if envelope.job != self.config.job {
            return;
        }
        let Some(worker) = self.links.get(&link).copied() else {
            // Nobody speaks before its hello; what a lost one still says has no effect.
            if let ControlMessage::Hello(hello) = envelope.message {
                self.hello(now_ms, link, hello, actions);
            }
            return;
        };
        let current = envelope.generation == self.generation;
        let is_rank = self.rank(worker).is_some();
        let Some(state) = self.workers.get_mut(&worker) else { return };
        state.heard_ms = now_ms;
        match envelope.message {
            ControlMessage::Ready { position } => {
                if current && matches!(self.phase, JobPhase::Gathering { .. }) {
                    self.progressed |= position.is_some_and(|position| position > START);
                    (state.ready, state.position) = (Some(self.generation), position.filter(|_| !state.stale));
                    self.try_to_form(now_ms, actions);
                }
            }
            ControlMessage::Yielded => {
                if current && self.phase == JobPhase::Running && is_rank {
                    self.gather(now_ms, actions);
                }
            }
            ControlMessage::Resumed { step } => {
                if current && self.rank(worker) == Some(0) {
                    self.resumed(now_ms, step, actions);
                }
            }
            ControlMessage::Unreachable { ranks } => {
                if current {
                    self.hear_unreachable(now_ms, worker, ranks);
                }
            }
            ControlMessage::GiveUp { text, .. } => self.lose(now_ms, worker, first_line(&text), actions),
            message if is_rank => {
                if current {
                    if let ControlMessage::Heartbeat(Activity { step: step @ 1.., .. }) = message {
                        (state.step, self.step, self.progressed) = (step, self.step.max(step), true);
                    }
                    let envelope = Envelope { message, ..envelope };
                    self.forward(now_ms, CoordinatorEvent::Message { link, envelope }, actions);
                }
            }
            // One without a place in a generation says why it cannot go on.
            ControlMessage::Fail { text, culprit: None } if envelope.generation == self.generation || !self.formed => {
                let failed = self.failed(format!("worker {worker} failed: {text}"));
                self.end(now_ms, Verdict { culprit: Some(worker), ..failed }, actions);
            }
            _ => {}
        }
    }

    fn resumed(&mut self, now_ms: u64, step: u64, actions: &mut Actions) {
        let Some(group) = &mut self.group else { return };
        let (workers, first) = (group.members.len(), group.members[0]);
        // Who was lost since its members were told, the next one hears of.
        self.lost.drain(..std::mem::take(&mut group.told));
        (self.resumed, self.step) = (self.generation, step);
        let members = group.members.clone();
        for (worker, state) in &mut self.workers {
            // From here on a spare is left behind, and never brings its state back.
            state.stale = !members.contains(worker);
            state.step = step;
        }
        let spares = self.connected().len() - workers.min(self.connected().len());
        let took_ms = now_ms.saturating_sub(self.over_ms);
        let generation = self.generation;
        let resumed = Resumed { generation, step, workers, spares, first, took_ms };
        actions.push(CoordinatorAction::Notice(Notice::Resumed(resumed)));
        self.consider_growth(actions);
    }

    fn hello(&mut self, now_ms: u64, link: usize, hello: Hello, actions: &mut Actions) {
        if let Some(text) = self.refusal(&hello) {
            return self.send(link, ControlMessage::Abort { text }, actions);
        }
        let worker = match hello.rank {
            ANY_RANK => {
                self.joined += 1;
                self.config.workers + self.joined - 1
            }
            rank => rank,
        };
        let launched = self.workers.get(&worker).is_some_and(|state| state.launched);
        let mut state = WorkerState::new(hello.host.clone(), launched, now_ms);
        if matches!(self.phase, JobPhase::Gathering { .. }) {
            state.ready = Some(self.generation);
        }
        if self.formed {
            actions.push(CoordinatorAction::Notice(Notice::Spare { rank: worker, host: hello.label() }));
        }
        (state.link, state.hello) = (Some(link), Some(hello));
        self.links.insert(link, worker);
        self.workers.insert(worker, state);
        self.take_back_host(worker);
        self.try_to_form(now_ms, actions);
        self.consider_growth(actions);
    }

    /// Why somebody who introduces itself is not taken in.
    fn refusal(&self, hello: &Hello) -> Option<String> {
        if !matches!(self.phase, JobPhase::Gathering { .. } | JobPhase::Running) {
            return Some(self.verdict.text().unwrap_or_else(|| "the job has ended".into()));
        }
        if hello.rank != ANY_RANK {
            return match self.workers.get(&hello.rank) {
                Some(state) if state.link.is_none() && state.is_here() => self.difference(hello),
                Some(_) => Some(format!("worker {} is already another process", hello.rank)),
                None => Some(format!("the job has no worker {}", hello.rank)),
            };
        }
        if self.workers.len() >= WORKERS_MAX {
            return Some(format!("the job has {WORKERS_MAX} workers and accepts no more"));
        }
        self.difference(hello)
    }

    /// Once a generation has formed, its job is the job, and whoever has another one is told so and does no harm.
    fn difference(&self, hello: &Hello) -> Option<String> {
        let mine = self
            .workers
            .values()
            .filter(|state| self.formed && state.is_connected())
            .find_map(|state| state.hello.as_ref())?;
        if mine.version != hello.version {
            return Some(format!("this worker runs version {}, but the job runs {}", hello.version, mine.version));
        }
        let (key, theirs, ours) = hello.manifest.difference(&mine.manifest)?;
        let shown = |value: Option<&str>| value.map_or("missing".to_string(), |value| format!("`{value}`"));
        Some(format!(
            "this worker was given another job: `{key}` is {} here, but {} in the job\n  hint: start it with the same program, job file, data and flags",
            shown(theirs),
            shown(ours)
        ))
    }

    /// If those who are here can form a larger group, its members are asked to regroup after their step.
    fn consider_growth(&mut self, actions: &mut Actions) {
        let possible = self.config.ranks(self.connected().len());
        let Some(group) = self.group.as_mut().filter(|_| self.phase == JobPhase::Running) else { return };
        if group.yields || possible <= group.members.len() || self.interrupted.is_some() {
            return;
        }
        group.yields = true;
        let members = group.members.clone();
        self.tell(&ControlMessage::Yield, |worker| members.contains(&worker), actions);
    }

    fn closed(&mut self, now_ms: u64, link: usize, actions: &mut Actions) {
        let Some(worker) = self.links.get(&link).copied() else {
            if let Some(state) = self.workers.values_mut().find(|state| state.link == Some(link)) {
                state.closed_ms.get_or_insert(now_ms);
            }
            return;
        };
        if let Some(state) = self.workers.get_mut(&worker) {
            state.closed_ms.get_or_insert(now_ms);
        }
        match self.rank(worker) {
            Some(_) => self.forward(now_ms, CoordinatorEvent::Closed { link }, actions),
            None => self.check_silence(now_ms, actions),
        }
    }

    fn exited(&mut self, now_ms: u64, worker: usize, exit: Exit, actions: &mut Actions) {
        let Some(state) = self.workers.get_mut(&worker) else { return };
        match exit {
            // With its host, perhaps: nobody sees it any more, but it may be there yet.
            Exit::Unknown => state.launched = false,
            _ => state.exit = Some(exit),
        }
        if state.lost_ms.is_some() {
            return self.try_to_form(now_ms, actions);
        }
        let joined = state.link.is_some();
        if let Some(rank) = self.rank(worker) {
            return self.forward(now_ms, CoordinatorEvent::Exited { rank, exit }, actions);
        }
        match exit {
            // A command that fails by itself before there is anything to lose would fail again.
            Exit::Code(code) if !joined && !self.formed => {
                let failed = self.failed(format!("worker {worker} was lost during its start: {exit}"));
                let verdict = Verdict { exit_code: code.max(1), culprit: Some(worker), ..failed };
                self.end(now_ms, verdict, actions);
            }
            _ => self.lose(now_ms, worker, exit.to_string(), actions),
        }
    }

    fn computed(&mut self, now_ms: u64, worker: usize, load: HostLoad, actions: &mut Actions) {
        if let Some(state) = self.workers.get_mut(&worker) {
            (state.computed_ms, state.load) = (Some(now_ms), load);
        }
        if let Some(rank) = self.rank(worker) {
            self.forward(now_ms, CoordinatorEvent::Computed { rank, load }, actions);
        }
    }

    fn stopped(&mut self, now_ms: u64, worker: usize, since_ms: Option<u64>, actions: &mut Actions) {
        if let Some(state) = self.workers.get_mut(&worker) {
            state.stopped_ms = since_ms;
            state.heard_ms = state.heard_ms.max(if since_ms.is_none() { now_ms } else { 0 });
        }
        if let Some(rank) = self.rank(worker) {
            let event = match since_ms {
                Some(_) => CoordinatorEvent::Stopped { rank },
                None => CoordinatorEvent::Continued { rank },
            };
            self.forward(now_ms, event, actions);
        }
    }

    fn interrupt(&mut self, now_ms: u64, signal: i32, actions: &mut Actions) {
        if self.interrupted.replace(signal).is_some()
            || !matches!(self.phase, JobPhase::Gathering { .. } | JobPhase::Running)
        {
            // Asked twice: no more patience.
            let interrupted = Some(signal);
            return self.end(now_ms, Verdict { interrupted, exit_code: 128 + signal, ..self.verdict.clone() }, actions);
        }
        self.workers.values_mut().for_each(|state| state.restart_ms = None);
        // The generation's own coordinator is not told: it would take a loss that comes now for the end that was asked for.
        actions.push(CoordinatorAction::Notice(Notice::Interrupted));
        self.pass_on_interrupt(actions);
        // A spare has no step to end after: it goes when the job does.
    }

    /// Whoever has no place in a generation is watched by this core itself.
    fn check_silence(&mut self, now_ms: u64, actions: &mut Actions) {
        let (deadlines, join_ms) = (self.config.deadlines, self.config.join_ms());
        let watched = |worker: usize| self.rank(worker).is_none();
        let silent = |state: &WorkerState| {
            let here = state.lost_ms.is_none() && state.exit.is_none() && state.restart_ms.is_none();
            here && now_ms >= state.silent_ms(deadlines, join_ms)
        };
        let lost: Vec<(usize, String)> = self
            .workers
            .iter()
            .filter(|(worker, state)| watched(**worker) && silent(state))
            .map(|(worker, state)| (*worker, state.silent_because(deadlines, join_ms)))
            .collect();
        for (worker, why) in lost {
            self.lose(now_ms, worker, why, actions);
        }
    }

    fn tick(&mut self, now_ms: u64, actions: &mut Actions) {
        self.forward(now_ms, CoordinatorEvent::Tick, actions);
        self.end_silent(now_ms, actions);
        if !matches!(self.phase, JobPhase::Gathering { .. } | JobPhase::Running) {
            return;
        }
        if now_ms >= self.heartbeat_sent_ms + self.config.deadlines.beat_ms() {
            self.heartbeat_sent_ms = now_ms;
            let members = self.group.as_ref().map_or(Vec::new(), |group| group.members.clone());
            let outside = |worker: usize| !members.contains(&worker);
            self.tell(&ControlMessage::CoordinatorHeartbeat { moved: true }, outside, actions);
        }
        self.check_silence(now_ms, actions);
        self.cut_off(now_ms, actions);
        self.forget(now_ms);
        self.expel_late(now_ms, actions);
        self.restart(now_ms, actions);
        self.try_to_form(now_ms, actions);
    }

    /// The job is done and all its results are there: whoever is stopped or silent is not waited for.
    fn end_silent(&mut self, now_ms: u64, actions: &mut Actions) {
        let JobPhase::Released { deadline_ms } = self.phase else { return };
        let released_ms = deadline_ms - self.config.deadlines.stall_ms();
        let (deadlines, join_ms) = (self.config.deadlines, self.config.join_ms());
        for (worker, state) in &mut self.workers {
            // A closed link is that of a process that ends.
            let watched = state.is_here() && (state.stopped_ms.is_some() || state.closed_ms.is_none());
            // The word that it may end takes its time on the way there, and the end of its link on the way back.
            let not_before_ms = if state.stopped_ms.is_some() { 0 } else { released_ms + 2 * deadlines.silence_ms() };
            if watched && now_ms >= state.silent_ms(deadlines, join_ms).max(not_before_ms) {
                state.lost_ms = Some(now_ms);
                actions.push(CoordinatorAction::Kill { rank: *worker, link: state.link });
            }
        }
    }

    /// Nothing comes of those who joined and are gone. Of the launcher's, any may be started again.
    pub(super) fn forget(&mut self, now_ms: u64) {
        let deadlines = self.config.deadlines;
        let members = self.group.as_ref().map_or(&[][..], |group| &group.members);
        let first = self.config.workers;
        self.workers.retain(|worker, state| {
            let is_over = state.lost_ms.is_some() && state.is_gone() && state.is_fenced(now_ms, deadlines);
            *worker < first || !is_over || members.contains(worker)
        });
    }

    /// Who does not leave the generation before in time is lost.
    fn expel_late(&mut self, now_ms: u64, actions: &mut Actions) {
        let JobPhase::Gathering { deadline_ms } = self.phase else { return };
        if now_ms < deadline_ms {
            return;
        }
        let generation = self.generation;
        let late = |state: &WorkerState| state.is_connected() && state.ready != Some(generation);
        let late: Vec<usize> =
            self.workers.iter().filter(|(_, state)| late(state)).map(|(worker, _)| *worker).collect();
        let why = format!("it did not stop its step within {} ms to regroup", self.config.deadlines.stall_ms());
        for worker in late {
            self.lose(now_ms, worker, why.clone(), actions);
        }
    }

    fn restart(&mut self, now_ms: u64, actions: &mut Actions) {
        for (worker, state) in &mut self.workers {
            // Its last process must be gone, and its last words read.
            if state.restart_ms.is_some_and(|due_ms| now_ms >= due_ms) && state.exit.is_some() {
                *state = WorkerState::new(state.host.clone(), true, now_ms);
                actions.push(CoordinatorAction::Start { rank: *worker });
            }
        }
    }
}
