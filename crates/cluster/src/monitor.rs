//! The thread in every worker that sends heartbeats and learns when the job ends.

use crate::control_link::ControlLink;
use crate::deadlines::Deadlines;
use crate::ending_mark::LossReporter;
use crate::member::{lost, unheard};
use crate::message::{Assignment, ControlMessage, Envelope, RosterEntry};
use crate::timeout::HeartbeatTimeout;
use kolo_base::{lock, wait_timeout};
use kolo_comm::watch::Activity;
use kolo_comm::{Fault, Watch};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Exit code of a process that had to be ended because its job has ended.
pub const ABORTED_EXIT_CODE: i32 = 1;

pub(crate) struct MonitorState {
    link: Mutex<ControlLink>,
    inbox: Mutex<MonitorInbox>,
    changed: Condvar,
    /// The generation that this rank is in, with its watch.
    current: Mutex<(u32, Arc<Watch>)>,
    job: u64,
    /// Whether the job is elastic, and another generation may follow.
    pub elastic: bool,
    deadlines: Deadlines,
    /// Whether somebody else ends this process, if it must be.
    pub supervised: bool,
    /// Whether the coordinator lives in rank 0, and not in a process of its own.
    pub in_rank_0: bool,
    /// Says that the coordinator is lost, where that is for a rank to say.
    pub reporter: Mutex<Option<LossReporter>>,
    /// Called when the job is asked to end and this rank is to tell the others.
    pub on_interrupt: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
    /// Told before this process ends itself.
    pub on_end: Mutex<Option<OnEnd>>,
    /// The coordinator was last told of ranks that cannot be reached.
    told_unreachable: AtomicBool,
    closing: AtomicBool,
}

impl std::fmt::Debug for MonitorState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MonitorState of job {}", self.job)
    }
}

#[derive(Debug, Default)]
struct MonitorInbox {
    /// Blobs of the current exchange, in rank order.
    blobs: Vec<(u64, Vec<u8>)>,
    released: bool,
    /// Why the job is over for this process.
    ended: Option<Fault>,
    next: NextGeneration,
}

/// What an elastic job's worker has heard of a generation that it is not in yet.
#[derive(Debug, Default)]
struct NextGeneration {
    /// The newest one that it has heard of.
    announced: u32,
    /// The newest one that it was told to get ready for.
    regroup: u32,
    assignment: Option<Assignment>,
    roster: Vec<RosterEntry>,
    /// Spares that were lost since it was formed.
    lost: Vec<String>,
}

/// Told why the job is over for this process.
pub(crate) type OnEnd = Box<dyn Fn(&Fault) + Send + Sync>;

impl MonitorState {
    pub fn new(link: ControlLink, job: u64, generation: u32, deadlines: Deadlines, watch: Arc<Watch>) -> Self {
        Self {
            link: Mutex::new(link),
            inbox: Mutex::default(),
            changed: Condvar::new(),
            current: Mutex::new((generation, watch)),
            job,
            elastic: false,
            deadlines,
            supervised: true,
            in_rank_0: false,
            reporter: Mutex::default(),
            on_interrupt: Mutex::default(),
            on_end: Mutex::default(),
            told_unreachable: AtomicBool::new(false),
            closing: AtomicBool::new(false),
        }
    }

    fn current(&self) -> (u32, Arc<Watch>) {
        lock(&self.current).clone()
    }

    fn watch(&self) -> Arc<Watch> {
        self.current().1
    }

    fn send_of(&self, generation: u32, message: ControlMessage) {
        lock(&self.link).send(&Envelope { job: self.job, generation, message });
    }

    /// As a member of the generation that this rank is in.
    pub fn send(&self, message: ControlMessage) {
        self.send_of(self.current().0, message);
    }

    pub fn send_if_idle(&self, message: ControlMessage) {
        let generation = self.current().0;
        let mut link = lock(&self.link);
        if !link.busy() {
            link.send(&Envelope { job: self.job, generation, message });
        }
    }

    /// What this rank does, in which generation, and whom it cannot reach there.
    fn beat(&self) {
        let (generation, watch) = self.current();
        let message = ControlMessage::Heartbeat(watch.activity());
        // Only an elastic job can go on without them.
        let ranks = if self.elastic { watch.unreachable() } else { Vec::new() };
        let mut link = lock(&self.link);
        if !link.busy() {
            link.send(&Envelope { job: self.job, generation, message });
            let news = !ranks.is_empty();
            if self.told_unreachable.swap(news, Ordering::Relaxed) || news {
                link.send(&Envelope { job: self.job, generation, message: ControlMessage::Unreachable { ranks } });
            }
        }
    }

    /// Tells where this rank is and then this, and waits a moment until it has left this process.
    pub fn send_and_flush(&self, message: ControlMessage) {
        let (generation, watch) = self.current();
        self.send_of(generation, ControlMessage::Heartbeat(watch.activity()));
        self.send_of(generation, message);
        let deadline = Instant::now() + Duration::from_millis(self.deadlines.grace_ms());
        while lock(&self.link).busy() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
            lock(&self.link).flush();
        }
    }

    /// Waits for changed until `ready` has an answer, the job ends, or the deadline passes.
    fn wait_until<T>(&self, what: &str, mut ready: impl FnMut(&mut MonitorInbox) -> Option<T>) -> Result<T, Fault> {
        // The coordinator names whoever does not come; this deadline is for a coordinator that does not respond.
        let mut timeout = HeartbeatTimeout::new(Instant::now(), 2 * self.deadlines.stall_ms());
        let mut inbox = lock(&self.inbox);
        loop {
            if let Some(answer) = ready(&mut inbox) {
                return Ok(answer);
            }
            self.watch().check()?;
            if timeout.expired(Instant::now()) && what != RELEASE {
                return Err(lost(&format!("no answer in {what}")));
            }
            let pause = Duration::from_millis(self.deadlines.beat_ms());
            inbox = wait_timeout(&self.changed, inbox, pause);
        }
    }

    pub fn await_blobs(&self, round: u64, world: usize) -> Result<Vec<Vec<u8>>, Fault> {
        self.wait_until("an exchange", |inbox| {
            inbox.blobs.retain(|(of, _)| *of == round);
            (inbox.blobs.len() == world).then(|| inbox.blobs.drain(..).map(|(_, bytes)| bytes).collect())
        })
    }

    /// Waits for a place in a generation after `generation`, for which this worker is ready with so much of a state, and for
    /// everybody's place in it. `None` if the job is done without it. From then on the watch is of that generation.
    pub fn await_generation(
        &self,
        mut ready_for: u32,
        position: Option<u64>,
        heartbeat: Duration,
    ) -> Result<Option<(u32, Assignment, Vec<RosterEntry>, Arc<Watch>)>, Fault> {
        let pause = Duration::from_millis(self.deadlines.beat_ms());
        let mut inbox = lock(&self.inbox);
        loop {
            if let Some(fault) = &inbox.ended {
                return Err(fault.clone());
            }
            if inbox.released {
                return Ok(None);
            }
            let NextGeneration { announced, regroup, assignment, roster, .. } = &mut inbox.next;
            if *regroup > ready_for {
                ready_for = *regroup;
                self.send_of(ready_for, ControlMessage::Ready { position });
            }
            let world = assignment.as_ref().map_or(0, |assignment| assignment.world);
            if let Some(assignment) = assignment.take_if(|_| world > 0 && roster.len() == world) {
                let (generation, roster) = (*announced, std::mem::take(roster));
                let watch = Watch::new(roster.iter().map(RosterEntry::label).collect(), heartbeat);
                *lock(&self.current) = (generation, Arc::clone(&watch));
                // The job goes on without whoever gives it up from here on.
                lock(&self.reporter).iter_mut().for_each(|reporter| reporter.mark = None);
                return Ok(Some((generation, assignment, roster, watch)));
            }
            inbox = wait_timeout(&self.changed, inbox, pause);
        }
    }

    pub fn await_release(&self) -> Result<(), Fault> {
        self.wait_until(RELEASE, |inbox| inbox.released.then_some(()))
    }

    /// Spares that were lost since this rank's generation formed, in words.
    pub fn lost_spares(&self) -> Vec<String> {
        lock(&self.inbox).next.lost.clone()
    }

    /// The coordinator itself is at fault: nobody else will report it.
    fn abandon(&self, fault: Fault) {
        let text = fault.to_string();
        let ended = lock(&self.inbox).ended.replace(fault.clone()).is_some();
        let reporter = lock(&self.reporter).clone().filter(|_| self.watch().check().is_ok() && !ended);
        let shown = reporter.is_some_and(|reporter| reporter.report(&text));
        // If it was only suspended, it learns that it was given up, and accuses nobody.
        self.send(ControlMessage::GiveUp { text, shown });
        // A launcher that sees this rank go ends the others: whoever speaks for all comes first, and looks up this often.
        if self.in_rank_0 && !shown {
            std::thread::sleep(Duration::from_millis(2 * self.deadlines.beat_ms()));
        }
        self.watch().abort(fault);
        self.changed.notify_all();
    }

    /// The coordinator is lost, and with it the rank it lives in.
    fn lost(&self, why: &str) -> Fault {
        if !self.in_rank_0 {
            return lost(why);
        }
        let why = match self.elastic {
            true => format!("{why}; it coordinates the job, which ends with it: start the job again with --resume"),
            false => why.into(),
        };
        let Activity { step, call, in_call, .. } = self.watch().activity();
        let during = match call {
            Some(call) if in_call => format!("step {step}, {call}"),
            _ => format!("step {step}"),
        };
        Fault::Lost { peer: 0, host: self.watch().host(0), during, why }
    }

    /// What is of an older generation has no effect; of a newer one than is known, only what tells of it has.
    fn receive(&self, generation: u32, message: ControlMessage) {
        let mut inbox = lock(&self.inbox);
        let known = if self.elastic { inbox.next.announced } else { self.current().0 };
        let tells = self.elastic && matches!(message, ControlMessage::Regroup | ControlMessage::Assign(_));
        if generation < known || (generation > known && !tells) {
            // A coordinator that is a generation ahead is still alive, and its end is the end: also for a worker that joined
            // and was not needed, and so has heard of no generation.
            if generation > known && self.elastic {
                match message {
                    ControlMessage::Abort { text } => self.over(&mut inbox, Fault::Aborted(text)),
                    ControlMessage::Release => {
                        inbox.released = true;
                        self.changed.notify_all();
                    }
                    _ => {}
                }
            }
            return;
        }
        match message {
            ControlMessage::Regroup => {
                (inbox.next.announced, inbox.next.regroup) = (generation, generation);
                (inbox.next.assignment, inbox.next.roster) = (None, Vec::new());
                inbox.blobs.clear();
                self.watch().abort(Fault::Regroup { generation });
            }
            ControlMessage::Assign(assignment) => {
                inbox.next.announced = generation;
                (inbox.next.assignment, inbox.next.roster) = (Some(assignment), Vec::new());
                inbox.next.lost.clear();
                inbox.blobs.clear();
            }
            ControlMessage::Roster { rank, peer } if rank == inbox.next.roster.len() => inbox.next.roster.push(peer),
            ControlMessage::Interrupt => lock(&self.on_interrupt).iter().for_each(|ask| ask()),
            ControlMessage::Lost { text } => inbox.next.lost.push(text),
            ControlMessage::Yield => self.watch().ask_to_yield(),
            ControlMessage::Blob { round, bytes, .. } => inbox.blobs.push((round, bytes)),
            ControlMessage::Release => inbox.released = true,
            ControlMessage::Abort { text } => self.over(&mut inbox, Fault::Aborted(text)),
            ControlMessage::CoordinatorHeartbeat { moved: true } => self.watch().others_moved(),
            _ => {}
        }
        self.changed.notify_all();
    }

    fn over(&self, inbox: &mut MonitorInbox, fault: Fault) {
        inbox.ended.get_or_insert(fault.clone());
        self.watch().abort(fault);
        self.changed.notify_all();
    }

    /// Reads what came; whether the coordinator was heard.
    fn receive_all(&self) -> bool {
        let mut link = lock(&self.link);
        let received = link.receive();
        let open = link.open();
        link.flush();
        drop(link);
        let heard = matches!(&received, Ok(envelopes) if !envelopes.is_empty());
        match received {
            Ok(envelopes) => {
                let own = envelopes.into_iter().filter(|envelope| envelope.job == self.job);
                own.for_each(|envelope| self.receive(envelope.generation, envelope.message));
            }
            Err(fault) => self.abandon(fault),
        }
        let over = {
            let inbox = lock(&self.inbox);
            inbox.released || inbox.ended.is_some() || (!self.elastic && self.watch().check().is_err())
        };
        if !open && !over && !self.closing.load(Ordering::Acquire) {
            self.abandon(self.lost("it closed the link"));
        }
        heard
    }

    fn serve(&self, wake: &UnixStream) {
        let mut timeout = HeartbeatTimeout::new(Instant::now(), self.deadlines.orphan_ms());
        let mut patience = HeartbeatTimeout::new(Instant::now(), self.deadlines.suspended_ms());
        let mut beaten = Instant::now();
        let beat = Duration::from_millis(self.deadlines.beat_ms());
        let tick = Duration::from_millis(self.deadlines.tick_ms());
        let mut aborted: Option<Instant> = None;
        while !self.closing.load(Ordering::Acquire) {
            if self.receive_all() {
                timeout.reset(Instant::now());
                patience.reset(Instant::now());
            }
            let (silent, for_long) = (timeout.expired(Instant::now()), patience.expired(Instant::now()));
            if !self.supervised && silent {
                self.give_up_silent(for_long);
            }
            if beaten.elapsed() >= beat {
                beaten = Instant::now();
                self.beat();
            }
            let ended = lock(&self.inbox).ended.is_some() || (!self.elastic && self.watch().check().is_err());
            if ended {
                self.ended(*aborted.get_or_insert_with(Instant::now));
            }
            let at_most = if aborted.is_some() { tick } else { beat.saturating_sub(beaten.elapsed()) };
            self.pause(wake, at_most);
        }
    }

    /// The coordinator is silent. As long as its host answers, it is only suspended, and nobody is cut off.
    fn give_up_silent(&self, for_long: bool) {
        let silence = Duration::from_millis(self.deadlines.orphan_ms());
        let answers = !self.in_rank_0 && lock(&self.link).is_acknowledged(silence);
        match (answers, for_long) {
            (true, false) => {}
            (true, true) => {
                let waited_ms = self.deadlines.suspended_ms();
                let why =
                    format!("no heartbeat for {waited_ms} ms; its process is suspended, as its host still answers");
                self.abandon(self.lost(&why));
            }
            (false, _) => {
                let silence_ms = silence.as_millis();
                let why =
                    format!("no heartbeat for {silence_ms} ms; its process is stopped or its host is unreachable");
                self.abandon(if self.in_rank_0 { self.lost(&why) } else { unheard(&why) });
            }
        }
    }

    /// The job is over for this process: if nobody else sees to it that it ends, it ends itself.
    fn ended(&self, since: Instant) {
        if !self.supervised && since.elapsed() > Duration::from_millis(self.deadlines.grace_ms()) {
            let fault = lock(&self.inbox).ended.clone();
            if let Some((say, fault)) = lock(&self.on_end).as_ref().zip(fault) {
                say(&fault);
            }
            // SAFETY: ends the process at once; whatever the other threads do has no meaning any more.
            unsafe { libc::_exit(ABORTED_EXIT_CODE) };
        }
    }

    fn pause(&self, wake: &UnixStream, at_most: Duration) {
        let interest = lock(&self.link).interest();
        crate::poll::poll(&[interest, (wake.as_raw_fd(), libc::POLLIN)], at_most.as_millis() as u64 + 1);
    }
}

const RELEASE: &str = "the end";

/// Owns the thread; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Monitor {
    pub state: Arc<MonitorState>,
    wake: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    pub fn start(state: MonitorState) -> Result<Self, Fault> {
        let state = Arc::new(state);
        let (wake, woken) = UnixStream::pair().map_err(|error| Fault::system("starting the monitor", &error))?;
        let theirs = Arc::clone(&state);
        let thread = std::thread::Builder::new()
            .name("monitor".into())
            .spawn(move || theirs.serve(&woken))
            .map_err(|error| Fault::thread("starting the monitor", &error))?;
        Ok(Self { state, wake, thread: Some(thread) })
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.state.closing.store(true, Ordering::Release);
        let _ = self.wake.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        lock(&self.state.link).flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_worker_that_no_generation_needed_goes_when_the_job_is_done() {
        let (here, _there) = UnixStream::pair().unwrap();
        let watch = Watch::new(Vec::new(), Duration::from_secs(1));
        let deadlines = Deadlines { heartbeat_ms: 1000 };
        let mut state = MonitorState::new(ControlLink::plain(here).unwrap(), 7, 0, deadlines, watch);
        state.elastic = true;
        state.receive(2, ControlMessage::Finish);
        assert!(!lock(&state.inbox).released);
        state.receive(2, ControlMessage::Release);
        assert_eq!(state.await_generation(0, None, Duration::from_secs(1)).unwrap().map(|formed| formed.0), None);
    }
}
