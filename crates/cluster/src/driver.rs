//! Moves the bytes between the coordinator and its members, and carries out what it decides.

use crate::compute::HostLoad;
use crate::control_link::ControlLink;
use crate::coordinator::{Coordinator, CoordinatorAction, CoordinatorConfig, CoordinatorEvent, Core, Notice};
use crate::deadlines::Deadlines;
use crate::listener::Listener;
use crate::membership::Verdict;
use crate::process::{self, Change};
use crate::rank_state::Exit;
use crate::timeout::SuspensionDetector;
use kolo_comm::Fault;
use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::time::Instant;

/// What became of a rank's process.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ProcessEvent {
    Change(Change),
    /// It has computed since this was last said.
    Computed(HostLoad),
    /// It cannot be reached or watched any more, for this reason.
    Trouble(String),
}

/// What the driver's owner knows of the processes, and can do to them.
pub(crate) trait ProcessControl {
    /// What became of processes since the last time.
    fn events(&mut self) -> Vec<(usize, ProcessEvent)>;
    fn signal(&mut self, rank: usize, signal: i32);
    /// Ends a rank by force; false if only its link can be closed.
    fn kill(&mut self, rank: usize) -> bool;
    /// Starts a rank's process anew; its link, where it does not come by itself.
    fn start(&mut self, rank: usize) -> Result<Option<ControlLink>, Fault> {
        Err(Fault::BadCall(format!("this launcher cannot restart worker {rank}")))
    }
    /// Stops all ranks, until they are resumed.
    fn suspend(&mut self) {}
    fn resume(&mut self) {}
    /// Descriptors that tell of changes.
    fn interests(&self, entries: &mut Vec<(RawFd, i16)>);
}

pub(crate) struct Driver<'o, H> {
    pub processes: H,
    deadlines: Deadlines,
    supervised: bool,
    core: Box<dyn Core>,
    links: BTreeMap<usize, ControlLink>,
    /// Where members come in; closed once all are there.
    listener: Option<Listener>,
    next_link: usize,
    start: Instant,
    /// Whether this process itself was suspended.
    suspension: SuspensionDetector,
    observer: &'o mut dyn FnMut(&Notice),
    verdict: Option<Verdict>,
}

impl<'o, H: ProcessControl> Driver<'o, H> {
    /// `links` are those that exist already, numbered from 0.
    pub fn new(
        config: CoordinatorConfig,
        links: Vec<ControlLink>,
        listener: Option<Listener>,
        processes: H,
        observer: &'o mut dyn FnMut(&Notice),
    ) -> Self {
        let core = Box::new(Coordinator::new(config, 0));
        Self::with_core(core, (config.deadlines, config.supervised), links, listener, processes, observer)
    }

    /// As [`Driver::new`], for a core of another kind that was made at time 0.
    pub fn with_core(
        core: Box<dyn Core>,
        (deadlines, supervised): (Deadlines, bool),
        links: Vec<ControlLink>,
        listener: Option<Listener>,
        processes: H,
        observer: &'o mut dyn FnMut(&Notice),
    ) -> Self {
        let next_link = links.len();
        let links = links.into_iter().enumerate().collect();
        let start = Instant::now();
        let suspension = SuspensionDetector::new(start, deadlines.orphan_ms());
        let verdict = None;
        Self {
            processes,
            deadlines,
            supervised,
            core,
            links,
            listener,
            next_link,
            start,
            suspension,
            observer,
            verdict,
        }
    }

    /// The host of each rank, as far as it is known before they come.
    pub fn expect(&mut self, hosts: &[String]) {
        self.core.expect(hosts);
    }

    /// Waits a moment, takes in what happened and acts on it. The verdict, once the job is over.
    pub fn run_once(&mut self, signals: impl IntoIterator<Item = i32>) -> Option<Verdict> {
        let mut entries: Vec<_> = self.links.values().map(ControlLink::interest).collect();
        entries.extend(self.listener.iter().flat_map(Listener::interests));
        self.processes.interests(&mut entries);
        crate::poll::poll(&entries, self.deadlines.tick_ms());
        self.notice_suspension();
        self.accept_members();
        self.receive();
        let events = self.processes.events();
        if !events.is_empty() {
            // The last words of a process come before its end.
            self.receive();
        }
        for (rank, events) in events {
            self.step(match events {
                ProcessEvent::Change(Change::Exited(exit)) => CoordinatorEvent::Exited { rank, exit },
                ProcessEvent::Change(Change::Stopped) => CoordinatorEvent::Stopped { rank },
                ProcessEvent::Change(Change::Continued) => CoordinatorEvent::Continued { rank },
                ProcessEvent::Computed(load) => CoordinatorEvent::Computed { rank, load },
                ProcessEvent::Trouble(why) => CoordinatorEvent::Trouble { rank, why },
            });
        }
        for signal in signals {
            match signal {
                libc::SIGTSTP => self.suspend(),
                _ => self.step(CoordinatorEvent::Interrupt { signal }),
            }
        }
        self.step(CoordinatorEvent::Tick);
        self.verdict.take()
    }

    /// The members have given this coordinator up, and have said so.
    pub fn give_up(&mut self, text: String) {
        self.step(CoordinatorEvent::GivenUp { text });
    }

    /// This process did not run for so long that the ranks may have missed it. A coordinator within a rank says so by itself.
    fn notice_suspension(&mut self) {
        let before = self.suspension.total();
        self.suspension.tick(Instant::now());
        let absent = self.suspension.total().saturating_sub(before);
        if self.supervised && !absent.is_zero() {
            (self.observer)(&Notice::Suspended { ms: absent.as_millis() as u64 });
        }
    }

    /// Ctrl-Z: the ranks stop, then this process; when it goes on, so do they. The time between does not count.
    fn suspend(&mut self) {
        let since = Instant::now();
        self.processes.suspend();
        process::stop_self();
        self.processes.resume();
        self.start += since.elapsed();
        self.suspension = SuspensionDetector::new(Instant::now(), self.deadlines.orphan_ms());
    }

    fn accept_members(&mut self) {
        for (stream, session) in self.listener.as_mut().map(Listener::accept).unwrap_or_default() {
            if let Ok(link) = ControlLink::sealed(stream, session) {
                self.add_link(link);
            }
        }
    }

    fn add_link(&mut self, link: ControlLink) {
        self.links.insert(self.next_link, link);
        self.next_link += 1;
    }

    /// Starts a worker anew. One that cannot be started is gone.
    fn start_worker(&mut self, rank: usize) {
        match self.processes.start(rank) {
            Ok(link) => link.into_iter().for_each(|link| self.add_link(link)),
            Err(_) => self.step(CoordinatorEvent::Exited { rank, exit: Exit::Unknown }),
        }
    }

    /// Takes in what members said.
    fn receive(&mut self) {
        let ids: Vec<usize> = self.links.keys().copied().collect();
        for id in ids {
            let Some(link) = self.links.get_mut(&id) else { continue };
            link.flush();
            let received = link.receive();
            let closed = !link.open();
            if closed {
                self.links.remove(&id);
            }
            match received {
                Ok(envelopes) => envelopes
                    .into_iter()
                    .for_each(|envelope| self.step(CoordinatorEvent::Message { link: id, envelope })),
                Err(fault) => self.step(CoordinatorEvent::Rejected { link: id, fault }),
            }
            if closed {
                self.step(CoordinatorEvent::Closed { link: id });
            }
        }
    }

    fn step(&mut self, event: CoordinatorEvent) {
        let now_ms = self.start.elapsed().as_millis() as u64;
        for action in self.core.step(now_ms, event) {
            match action {
                CoordinatorAction::Send { link: id, envelope } => {
                    if let Some(link) = self.links.get_mut(&id) {
                        link.send(&envelope);
                    }
                }
                CoordinatorAction::Signal { rank, signal } => self.processes.signal(rank, signal),
                CoordinatorAction::Kill { rank, link: id } => {
                    if !self.processes.kill(rank)
                        && let Some(link) = id.and_then(|id| self.links.get_mut(&id))
                    {
                        link.close();
                    }
                }
                CoordinatorAction::Notice(notice) => {
                    // Those who come late to a job that ends hear why, unless somebody ends them.
                    let ending = matches!(notice, Notice::Ending { .. }) && self.supervised;
                    if matches!(notice, Notice::Joined { .. }) || ending {
                        self.listener = None;
                    }
                    (self.observer)(&notice);
                }
                CoordinatorAction::Start { rank } => self.start_worker(rank),
                CoordinatorAction::Ended(verdict) => self.verdict = Some(verdict),
            }
        }
    }
}
