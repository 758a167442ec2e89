//! A worker's side of the job.
//!
//! [`Member::join`] introduces this process to the coordinator and returns once all ranks are there. From then on a thread
//! of its own sends heartbeats with what the rank is doing, and ends every wait of this rank if the job ends or the
//! coordinator is lost. A member that goes without [`Member::finish`] is a fault of the job.

use crate::control_link::ControlLink;
use crate::coordinator_thread::CoordinatorThread;
use crate::deadlines::Deadlines;
use crate::ending_mark::LossReporter;
use crate::introduction::Introduction;
use crate::join;
use crate::launcher::{Launcher, RankInfo};
use crate::message::{Assignment, ControlMessage, EVENT_BYTES_MAX, Envelope, Hello, RosterEntry};
use crate::monitor::{Monitor, MonitorState};
use crate::rendezvous::JOIN_HEARTBEATS;
use crate::timeout::{HeartbeatTimeout, SuspensionDetector};
use kolo_base::lock;
use kolo_comm::host::EnvLookup;
use kolo_comm::transport::BOOTSTRAP_BYTES_MAX;
use kolo_comm::watch::Activity;
use kolo_comm::{Bootstrap, Fault, JobKey, Watch};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Heartbeats that reaching a coordinator may take that is known to listen.
const REACH_HEARTBEATS: u64 = 10;
/// Heartbeats without a message after which a coordinator is given up while the ranks join.
pub(crate) const SILENT_HEARTBEATS: u64 = 10;
/// How long the first message of the launcher may take.
const WELCOME_MS: u64 = 10_000;

/// This process as a rank of a job.
#[derive(Debug)]
pub struct Member {
    pub rank: usize,
    pub world: usize,
    pub local_rank: usize,
    pub local_world: usize,
    pub launcher: Launcher,
    /// Number of the job, for names of files and the like; not secret.
    pub job: u64,
    /// How often the job was started before.
    pub generation: u32,
    /// The secret of this launch.
    pub key: JobKey,
    pub heartbeat: Duration,
    /// Host and process of every rank.
    pub roster: Vec<RosterEntry>,
    /// This host's address on the network that the job uses.
    pub address: IpAddr,
    /// To be given to the communicators, and told about steps.
    pub watch: Arc<Watch>,
    round: u64,
    monitor: Monitor,
    /// Dropped after the monitor: the coordinator outlives this rank's own link.
    coordinator_thread: Option<CoordinatorThread>,
    /// In its generation, if the job is elastic.
    place: Assignment,
}

/// What a member must know of its job.
pub(crate) struct JobCredentials {
    pub job: u64,
    pub generation: u32,
    pub heartbeat_ms: u64,
    pub key: JobKey,
}

/// How a member came to the coordinator.
pub(crate) struct Connected {
    pub link: ControlLink,
    /// Whether somebody else ends this process, if it must be.
    pub supervised: bool,
    pub address: IpAddr,
    pub coordinator_thread: Option<CoordinatorThread>,
    /// Whether the coordinator lives in rank 0, and not in a process of its own.
    pub in_rank_0: bool,
    /// Whether this rank says so if the coordinator falls silent while the ranks join.
    pub reports: bool,
    /// Says that the coordinator is lost, where that is for a rank to say.
    pub reporter: Option<LossReporter>,
}

impl Member {
    /// Joins the job this process was started for, by whatever launcher; `None` if it was started alone. The environment
    /// comes through `lookup`.
    pub fn join(lookup: EnvLookup<'_>) -> Result<Option<Self>, Fault> {
        join::join(lookup)
    }

    /// Joins as a rank that our own launcher started.
    pub fn join_launched(rank_info: &RankInfo, introduction: &Introduction) -> Result<Self, Fault> {
        let Some(descriptor) = rank_info.control else {
            return Err(Fault::BadCall(format!("{} gave this process no control link", rank_info.launcher.name())));
        };
        let mut link = ControlLink::plain(inherited(descriptor)?)?;
        let first = first(&mut link, Instant::now() + Duration::from_millis(WELCOME_MS))?;
        if let Some((address, credentials)) = join::redirected(&first) {
            // The coordinator listens already: who cannot reach it soon never will, and says so.
            let deadline = Instant::now() + Duration::from_millis(credentials.heartbeat_ms * REACH_HEARTBEATS);
            let connected = join::connect(rank_info, address, &credentials, deadline)?;
            return Self::enter(rank_info, introduction, credentials, connected);
        }
        let ControlMessage::Welcome { heartbeat_ms, key } = first.message else {
            return Err(lost("its first message was not a welcome"));
        };
        let (job, generation) = (first.job, first.generation);
        let credentials = JobCredentials { job, generation, heartbeat_ms, key: JobKey::from_bytes(key.0) };
        let address = Ipv4Addr::LOCALHOST.into();
        let (coordinator_thread, in_rank_0, reports, reporter) = (None, false, false, None);
        let connected = Connected { link, supervised: true, address, coordinator_thread, in_rank_0, reports, reporter };
        Self::enter(rank_info, introduction, credentials, connected)
    }

    /// Introduces this process and waits until all ranks are there.
    pub(crate) fn enter(
        rank_info: &RankInfo,
        introduction: &Introduction,
        credentials: JobCredentials,
        mut connected: Connected,
    ) -> Result<Self, Fault> {
        let JobCredentials { job, generation, heartbeat_ms, key } = credentials;
        let deadlines = Deadlines { heartbeat_ms };
        let envelope = |message| Envelope { job, generation, message };
        let hello = Hello {
            rank: rank_info.rank,
            world: rank_info.world,
            host: crate::host_name(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").into(),
            role: introduction.role.clone().unwrap_or_default(),
            manifest: introduction.manifest.clone(),
        };
        connected.link.send(&envelope(ControlMessage::Hello(hello)));
        if let Some(text) = &introduction.failure {
            connected.link.send(&envelope(ControlMessage::Fail { text: text.clone(), culprit: None }));
        }
        if introduction.elastic.is_some() {
            let credentials = JobCredentials { job, generation, heartbeat_ms, key };
            return Self::enter_elastic(rank_info, credentials, connected);
        }
        let roster = await_roster(&mut connected, rank_info, deadlines, &envelope)?;
        let hosts = roster.iter().map(RosterEntry::label).collect();
        let heartbeat = Duration::from_millis(heartbeat_ms);
        let watch = Watch::new(hosts, heartbeat);
        let Connected { link, supervised, address, coordinator_thread, in_rank_0, reporter, .. } = connected;
        let mut state = MonitorState::new(link, job, generation, deadlines, Arc::clone(&watch));
        (state.supervised, state.in_rank_0) = (supervised, in_rank_0);
        let speaks = rank_info.rank == teller(&roster);
        state.reporter = Mutex::new(reporter.map(|reporter| LossReporter { speaks, ..reporter }));
        let monitor = Monitor::start(state)?;
        let RankInfo { rank, world, local_rank, local_world, launcher, .. } = *rank_info;
        Ok(Self {
            rank,
            world,
            local_rank,
            local_world,
            launcher,
            job,
            generation,
            key,
            heartbeat,
            roster,
            address,
            watch,
            round: 0,
            monitor,
            coordinator_thread,
            place: Assignment::default(),
        })
    }

    /// Waits for a place in a generation of an elastic job.
    fn enter_elastic(rank_info: &RankInfo, credentials: JobCredentials, connected: Connected) -> Result<Self, Fault> {
        let JobCredentials { job, generation, heartbeat_ms, key } = credentials;
        let heartbeat = Duration::from_millis(heartbeat_ms);
        let watch = Watch::new(Vec::new(), heartbeat);
        let Connected { link, supervised, address, coordinator_thread, in_rank_0, reporter, .. } = connected;
        let mut state = MonitorState::new(link, job, generation, Deadlines { heartbeat_ms }, Arc::clone(&watch));
        (state.supervised, state.in_rank_0, state.elastic) = (supervised, in_rank_0, true);
        state.reporter = Mutex::new(reporter);
        let monitor = Monitor::start(state)?;
        let RankInfo { rank, local_rank, local_world, launcher, .. } = *rank_info;
        let mut member = Self {
            rank,
            world: 0,
            local_rank,
            local_world,
            launcher,
            job,
            generation,
            key,
            heartbeat,
            roster: Vec::new(),
            address,
            watch,
            round: 0,
            monitor,
            coordinator_thread,
            place: Assignment::default(),
        };
        member.regroup(None)?;
        Ok(member)
    }

    /// Leaves the generation that is over and waits for a place in the next one, with a state that has come so far. If the
    /// job is done without this worker, `world` is 0.
    pub fn regroup(&mut self, position: Option<u64>) -> Result<(), Fault> {
        let formed = self.monitor.state.await_generation(self.generation, position, self.heartbeat)?;
        let Some((generation, assignment, roster, watch)) = formed else {
            self.world = 0;
            return Ok(());
        };
        (self.rank, self.world) = (assignment.rank, assignment.world);
        (self.generation, self.roster, self.watch, self.round) = (generation, roster, watch, 0);
        self.place = assignment;
        Ok(())
    }

    /// What it was told with its place in the generation of an elastic job.
    pub fn place(&self) -> &Assignment {
        &self.place
    }

    /// Says why this rank cannot go on with its generation: another rank is lost, or all agreed to regroup.
    pub fn leave(&self, fault: &Fault) {
        let message = match fault {
            Fault::Regroup { generation } if *generation <= self.generation => ControlMessage::Yielded,
            Fault::Regroup { .. } => return,
            fault => ControlMessage::Fail { text: fault.to_string(), culprit: fault.culprit() },
        };
        self.monitor.state.send_and_flush(message);
    }

    /// Somebody who tells the coordinator when this rank goes on.
    pub fn resume_sender(&self) -> ResumeSender {
        ResumeSender(Arc::clone(&self.monitor.state))
    }

    /// Somebody who can take this worker out of the job.
    pub fn leave_sender(&self) -> LeaveSender {
        LeaveSender(Arc::clone(&self.monitor.state))
    }

    /// Called if the job is asked to end and no signal says so to this process, which its launcher did not start.
    pub fn on_interrupt(&self, ask: impl Fn() + Send + Sync + 'static) {
        *lock(&self.monitor.state.on_interrupt) = Some(Box::new(ask));
    }

    /// Called if the job is over for this process, and nobody else ends it, just before it ends itself.
    pub fn on_end(&self, say: impl Fn(&Fault) + Send + Sync + 'static) {
        *lock(&self.monitor.state.on_end) = Some(Box::new(say));
    }

    /// Spares that were lost since this generation formed, in words.
    pub fn lost_spares(&self) -> Vec<String> {
        self.monitor.state.lost_spares()
    }

    /// As [`Member::finish`], for a job that may still regroup: then it is [`Fault::Regroup`].
    pub fn finish_generation(&self) -> Result<(), Fault> {
        self.monitor.state.send_and_flush(ControlMessage::Finish);
        self.monitor.state.await_release()
    }

    /// Somebody who sends events to the observer of the job, whatever generation it is in.
    pub fn events(&self) -> EventSender {
        EventSender(Arc::clone(&self.monitor.state))
    }

    pub fn host(&self) -> &str {
        &self.roster[self.rank].host
    }

    /// Sends bytes to the observer of the job. If the observer does not keep up, they are dropped.
    pub fn event(&self, bytes: &[u8]) {
        self.events().send(bytes);
    }

    /// Says why this rank gives up. The coordinator shows it, with rank, host and step, and ends the job; this process
    /// should print nothing and exit. Where another rank is to blame, that one's own word counts for more.
    pub fn fail(&self, text: &str, culprit: Option<usize>) {
        let culprit = culprit.filter(|culprit| *culprit != self.rank);
        self.monitor.state.send_and_flush(ControlMessage::Fail { text: text.into(), culprit });
        if let Some(coordinator_thread) = &self.coordinator_thread {
            coordinator_thread.await_ending();
        }
    }

    /// Waits a moment for the end of the job, where another rank brings it about.
    pub fn await_end(&self) {
        let deadline = Instant::now() + self.heartbeat;
        while self.watch.check().is_ok() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// As [`Member::fail`], with this fault.
    pub fn fail_with(&self, fault: &Fault) {
        self.fail(&fault.to_string(), fault.culprit());
    }

    /// Ends well: returns when all ranks have come here, or with the fault that ended the job before.
    pub fn finish(self) -> Result<(), Fault> {
        self.monitor.state.send_and_flush(ControlMessage::Finish);
        self.monitor.state.await_release()
    }
}

/// Takes a worker out of an elastic job, which goes on without it.
#[derive(Clone, Debug)]
pub struct LeaveSender(Arc<MonitorState>);

impl LeaveSender {
    /// It leaves, for this reason.
    pub fn leave(&self, why: &str) {
        self.0.send_and_flush(ControlMessage::GiveUp { text: why.into(), shown: false });
    }
}

/// Tells the coordinator of an elastic job when the first rank of a generation goes on.
#[derive(Clone, Debug)]
pub struct ResumeSender(Arc<MonitorState>);

impl ResumeSender {
    /// The first rank has its state, and goes on with this step.
    pub fn resumed(&self, step: u64) {
        self.0.send(ControlMessage::Resumed { step });
    }
}

/// Sends bytes to the observer of the job.
#[derive(Clone, Debug)]
pub struct EventSender(Arc<MonitorState>);

impl EventSender {
    /// If the observer does not keep up, they are dropped.
    pub fn send(&self, bytes: &[u8]) {
        if bytes.len() <= EVENT_BYTES_MAX {
            self.0.send_if_idle(ControlMessage::Event(bytes.to_vec()));
        }
    }
}

impl Bootstrap for Member {
    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Fault> {
        if mine.len() > BOOTSTRAP_BYTES_MAX {
            let bytes = mine.len();
            return Err(Fault::BadCall(format!("an exchange of {bytes} bytes, at most {BOOTSTRAP_BYTES_MAX}")));
        }
        let round = self.round;
        self.round += 1;
        self.monitor.state.send(ControlMessage::Blob { round, rank: self.rank, bytes: mine.to_vec() });
        self.monitor.state.await_blobs(round, self.world)
    }
}

pub(crate) fn lost(why: &str) -> Fault {
    let error = format!(
        "{why}\n  hint: the job has ended; its first message says why, if there was time for one. Continue from its newest checkpoint with --resume"
    );
    Fault::System { what: "the coordinator of the job was lost".into(), error }
}

/// Nothing was heard of it, which says nothing of the job.
pub(crate) fn unheard(why: &str) -> Fault {
    let error = format!(
        "{why}\n  hint: the link to it was lost, or it has ended. If the job goes on there, join it again; otherwise continue from its newest checkpoint with --resume"
    );
    Fault::System { what: "the coordinator of the job was lost".into(), error }
}

/// The socket that our parent left open for us. It is taken once, and no process started from here inherits it.
fn inherited(descriptor: RawFd) -> Result<UnixStream, Fault> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    // SAFETY: a zeroed `stat` is valid memory for the answer.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: only asks; any number may be asked about.
    let answer = unsafe { libc::fstat(descriptor, &mut status) };
    let is_socket = answer == 0 && status.st_mode & libc::S_IFMT == libc::S_IFSOCK;
    if descriptor <= 2 || !is_socket || TAKEN.swap(true, Ordering::Relaxed) {
        return Err(Fault::BadCall(format!(
            "the control link (descriptor {descriptor}) does not exist\n  hint: this process inherited the variables of another job; unset KOLO_RANK, KOLO_WORLD and KOLO_CONTROL_FD"
        )));
    }
    // SAFETY: a flag of a descriptor that is ours.
    unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
    // SAFETY: it is a socket, our parent meant it for us, and nobody took it before.
    Ok(unsafe { UnixStream::from_raw_fd(descriptor) })
}

/// The first message.
fn first(link: &mut ControlLink, deadline: Instant) -> Result<Envelope, Fault> {
    loop {
        // Exactly one message comes before we speak.
        if let Some(envelope) = link.receive()?.into_iter().next() {
            return Ok(envelope);
        }
        if !link.open() {
            return Err(lost("it closed the link before its first message"));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(lost("it sent nothing"));
        }
        link.wait(left.as_millis() as u64 + 1);
    }
}

/// The rank that says so when rank 0 is lost: one on another host, if there is any, as a host may go as a whole.
fn teller(roster: &[RosterEntry]) -> usize {
    let elsewhere = roster.iter().position(|peer| peer.host != roster[0].host);
    elsewhere.unwrap_or(1)
}

/// Sends heartbeats until all ranks have joined.
fn await_roster(
    connected: &mut Connected,
    rank_info: &RankInfo,
    deadlines: Deadlines,
    envelope: &dyn Fn(ControlMessage) -> Envelope,
) -> Result<Vec<RosterEntry>, Fault> {
    let RankInfo { rank, world, .. } = *rank_info;
    let (in_rank_0, shown, link) = (connected.in_rank_0, connected.reports, &mut connected.link);
    let mut suspension = SuspensionDetector::new(Instant::now(), 2 * deadlines.heartbeat_ms);
    let lost = |why: &str, absent: Option<Duration>| match (in_rank_0, absent) {
        (true, Some(absent)) => join::left_behind(rank, absent),
        (true, None) => join::first_lost(why),
        (false, _) => lost(why),
    };
    let mut timeout = HeartbeatTimeout::new(Instant::now(), deadlines.heartbeat_ms * SILENT_HEARTBEATS);
    let mut roster = Vec::new();
    // The coordinator's own deadline comes first and names who is missing; this one is for a coordinator that does not respond.
    let deadline = Instant::now() + Duration::from_millis(deadlines.heartbeat_ms * (JOIN_HEARTBEATS + 10));
    while roster.len() < world {
        link.wait(deadlines.beat_ms());
        suspension.tick(Instant::now());
        for received in link.receive()? {
            timeout.reset(Instant::now());
            match received.message {
                ControlMessage::Roster { rank, peer } if rank == roster.len() => roster.push(peer),
                ControlMessage::Abort { text } => return Err(Fault::Aborted(text)),
                _ => {}
            }
        }
        if !link.open() {
            return Err(lost("it closed the link before all ranks had joined", suspension.longest()));
        }
        if Instant::now() > deadline || (in_rank_0 && timeout.expired(Instant::now())) {
            let why = "it stopped responding while the ranks joined; its process is stopped or its host is unreachable";
            // Only time in which this rank listened has counted: its own absence is no excuse.
            let fault = lost(why, None);
            link.send(&envelope(ControlMessage::GiveUp { text: fault.to_string(), shown }));
            return Err(fault);
        }
        if !link.busy() {
            link.send(&envelope(ControlMessage::Heartbeat(Activity {
                step: 0,
                progress: 0,
                call: None,
                in_call: false,
                waits: false,
            })));
        }
    }
    Ok(roster)
}
