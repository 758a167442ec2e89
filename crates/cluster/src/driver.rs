//! Moves the bytes between the coordinator and its members, and carries out what it decides.

use crate::coordinator::{Action, Coordinator, Event, Notice, Terms};
use crate::hall::Hall;
use crate::line::{self, Line};
use crate::membership::Verdict;
use crate::process::{self, Change};
use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::time::Instant;

/// What became of a rank's process.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum News {
    Change(Change),
    /// It cannot be reached or watched any more, for this reason.
    Trouble(String),
}

/// What the driver's owner knows of the processes, and can do to them.
pub(crate) trait Hands {
    /// What became of processes since the last time.
    fn news(&mut self) -> Vec<(usize, News)>;
    fn signal(&mut self, rank: usize, signal: i32);
    /// Ends a rank by force; false if only its link can be closed.
    fn kill(&mut self, rank: usize) -> bool;
    /// Stops all ranks, until they are resumed.
    fn suspend(&mut self) {}
    fn resume(&mut self) {}
    /// Descriptors that tell of changes.
    fn interests(&self, entries: &mut Vec<(RawFd, i16)>);
}

pub(crate) struct Driver<'o, H> {
    pub hands: H,
    terms: Terms,
    coordinator: Coordinator,
    lines: BTreeMap<usize, Line>,
    /// Where members come in; closed once all are there.
    hall: Option<Hall>,
    next_link: usize,
    start: Instant,
    observer: &'o mut dyn FnMut(&Notice),
    verdict: Option<Verdict>,
}

impl<'o, H: Hands> Driver<'o, H> {
    /// `lines` are those that exist already, numbered from 0.
    pub fn new(
        terms: Terms,
        lines: Vec<Line>,
        hall: Option<Hall>,
        hands: H,
        observer: &'o mut dyn FnMut(&Notice),
    ) -> Self {
        let next_link = lines.len();
        let lines = lines.into_iter().enumerate().collect();
        let coordinator = Coordinator::new(terms, 0);
        let start = Instant::now();
        Self { hands, terms, coordinator, lines, hall, next_link, start, observer, verdict: None }
    }

    /// The host of each rank, as far as it is known before they come.
    pub fn expect(&mut self, hosts: &[String]) {
        self.coordinator.expect(hosts);
    }

    /// Waits a moment, takes in what happened and acts on it. The verdict, once the job is over.
    pub fn turn(&mut self, signals: impl IntoIterator<Item = i32>) -> Option<Verdict> {
        let mut entries: Vec<_> = self.lines.values().map(Line::interest).collect();
        entries.extend(self.hall.iter().flat_map(Hall::interests));
        self.hands.interests(&mut entries);
        line::poll(&entries, self.terms.pace.tick_ms());
        self.welcome();
        self.listen();
        let news = self.hands.news();
        if !news.is_empty() {
            // The last words of a process come before its end.
            self.listen();
        }
        for (rank, news) in news {
            self.step(match news {
                News::Change(Change::Exited(exit)) => Event::Exited { rank, exit },
                News::Change(Change::Stopped) => Event::Stopped { rank },
                News::Change(Change::Continued) => Event::Continued { rank },
                News::Trouble(why) => Event::Trouble { rank, why },
            });
        }
        for signal in signals {
            match signal {
                libc::SIGTSTP => self.suspend(),
                _ => self.step(Event::Interrupt { signal }),
            }
        }
        self.step(Event::Tick);
        self.verdict.take()
    }

    /// Ctrl-Z: the ranks stop, then this process; when it goes on, so do they. The time between does not count.
    fn suspend(&mut self) {
        let since = Instant::now();
        self.hands.suspend();
        process::stop_self();
        self.hands.resume();
        self.start += since.elapsed();
    }

    fn welcome(&mut self) {
        for (stream, session) in self.hall.as_mut().map(Hall::accept).unwrap_or_default() {
            if let Ok(line) = Line::sealed(stream, session) {
                self.lines.insert(self.next_link, line);
                self.next_link += 1;
            }
        }
    }

    /// Takes in what members said.
    fn listen(&mut self) {
        let links: Vec<usize> = self.lines.keys().copied().collect();
        for link in links {
            let Some(line) = self.lines.get_mut(&link) else { continue };
            line.flush();
            let received = line.receive();
            let closed = !line.open();
            if closed {
                self.lines.remove(&link);
            }
            match received {
                Ok(envelopes) => {
                    envelopes.into_iter().for_each(|envelope| self.step(Event::Message { link, envelope }))
                }
                Err(fault) => self.step(Event::Rejected { link, fault }),
            }
            if closed {
                self.step(Event::Closed { link });
            }
        }
    }

    fn step(&mut self, event: Event) {
        let now_ms = self.start.elapsed().as_millis() as u64;
        for action in self.coordinator.step(now_ms, event) {
            match action {
                Action::Send { link, envelope } => {
                    if let Some(line) = self.lines.get_mut(&link) {
                        line.send(&envelope);
                    }
                }
                Action::Signal { rank, signal } => self.hands.signal(rank, signal),
                Action::Kill { rank, link } => {
                    if !self.hands.kill(rank)
                        && let Some(line) = link.and_then(|link| self.lines.get_mut(&link))
                    {
                        line.close();
                    }
                }
                Action::Notice(notice) => {
                    // Those who come late to a job that ends hear why, unless somebody ends them.
                    let ending = matches!(notice, Notice::Ending { .. }) && self.terms.supervised;
                    if matches!(notice, Notice::Joined { .. }) || ending {
                        self.hall = None;
                    }
                    (self.observer)(&notice);
                }
                Action::Ended(verdict) => self.verdict = Some(verdict),
            }
        }
    }
}
