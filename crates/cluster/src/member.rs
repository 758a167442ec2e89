//! A worker's side of the job.
//!
//! [`Member::join`] introduces this process to the coordinator and returns once all ranks are there. From then on a thread
//! of its own gives signs of life with what the rank is doing, and ends every wait of this rank if the job ends or the
//! coordinator is lost. A member that goes without [`Member::finish`] is a fault of the job.

use crate::hosting::Hosting;
use crate::introduction::Introduction;
use crate::launcher::{Launcher, Lookup, Place};
use crate::line::{self, Line};
use crate::meet::{self, Observer};
use crate::message::{EVENT_BYTES_MAX, Envelope, Hello, Message, Peer};
use crate::monitor::{Monitor, Shared};
use crate::pace::Pace;
use crate::rendezvous::JOIN_HEARTBEATS;
use crate::silence::{Absence, Silence};
use kolo_comm::transport::BOOTSTRAP_BYTES_MAX;
use kolo_comm::watch::Activity;
use kolo_comm::{Bootstrap, Fault, JobKey, Watch};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Heartbeats that reaching a coordinator may take that is known to listen.
const REACH_HEARTBEATS: u64 = 10;
/// Heartbeats without a word after which a coordinator is given up while the ranks join.
const MUTE_HEARTBEATS: u64 = 10;
/// How long the first word of whoever started us may take.
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
    pub roster: Vec<Peer>,
    /// This host's address on the network that the job uses.
    pub address: IpAddr,
    /// To be given to the communicators, and told about steps.
    pub watch: Arc<Watch>,
    round: u64,
    monitor: Monitor,
    /// Dropped after the monitor: the coordinator outlives this rank's own link.
    hosting: Option<Hosting>,
}

/// What a member must know of its job.
pub(crate) struct Invitation {
    pub job: u64,
    pub generation: u32,
    pub heartbeat_ms: u64,
    pub key: JobKey,
}

/// How a member came to the coordinator.
pub(crate) struct Entry {
    pub line: Line,
    /// Whether somebody else ends this process, if it must be.
    pub supervised: bool,
    pub address: IpAddr,
    pub hosting: Option<Hosting>,
    /// Whether the coordinator lives in rank 0, and not in a process of its own.
    pub in_rank_0: bool,
    /// Whether this rank says so if the coordinator falls silent while the ranks join.
    pub speaks: bool,
    /// To be told if the coordinator is lost, and this rank is to say so.
    pub observer: Option<Observer>,
}

impl Member {
    /// Joins the job this process was started for, by whatever launcher; `None` if it was started alone. The environment
    /// comes through `lookup`.
    pub fn join(lookup: Lookup<'_>) -> Result<Option<Self>, Fault> {
        meet::join(lookup)
    }

    /// Joins at a place that our own launcher made.
    pub fn take(place: &Place, introduction: &Introduction) -> Result<Self, Fault> {
        let Some(descriptor) = place.control else {
            return Err(Fault::BadCall(format!("{} gave this process no control link", place.launcher.name())));
        };
        let mut line = Line::plain(inherited(descriptor)?)?;
        let first = first(&mut line, Instant::now() + Duration::from_millis(WELCOME_MS))?;
        if let Some((address, invitation)) = meet::redirected(&first) {
            // The coordinator listens already: who cannot reach it soon never will, and says so.
            let deadline = Instant::now() + Duration::from_millis(invitation.heartbeat_ms * REACH_HEARTBEATS);
            let entry = meet::reach(place, address, &invitation, deadline)?;
            return Self::enter(place, introduction, invitation, entry);
        }
        let Message::Welcome { heartbeat_ms, key } = first.message else {
            return Err(lost("its first word was no welcome"));
        };
        let (job, generation) = (first.job, first.generation);
        let invitation = Invitation { job, generation, heartbeat_ms, key: JobKey::from_bytes(key.0) };
        let address = Ipv4Addr::LOCALHOST.into();
        let (hosting, in_rank_0, speaks, observer) = (None, false, false, None);
        let entry = Entry { line, supervised: true, address, hosting, in_rank_0, speaks, observer };
        Self::enter(place, introduction, invitation, entry)
    }

    /// Introduces this process and waits until all ranks are there.
    pub(crate) fn enter(
        place: &Place,
        introduction: &Introduction,
        invitation: Invitation,
        mut entry: Entry,
    ) -> Result<Self, Fault> {
        let Invitation { job, generation, heartbeat_ms, key } = invitation;
        let pace = Pace { heartbeat_ms };
        let envelope = |message| Envelope { job, generation, message };
        let hello = Hello {
            rank: place.rank,
            world: place.world,
            host: crate::host_name(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").into(),
            role: introduction.role.clone().unwrap_or_default(),
            manifest: introduction.manifest.clone(),
        };
        entry.line.send(&envelope(Message::Hello(hello)));
        if let Some(text) = &introduction.failure {
            entry.line.send(&envelope(Message::Fail { text: text.clone(), culprit: None }));
        }
        let roster = await_roster(&mut entry, place, pace, &envelope)?;
        let hosts = roster.iter().map(Peer::label).collect();
        let heartbeat = Duration::from_millis(heartbeat_ms);
        let watch = Watch::new(hosts, heartbeat);
        let Entry { line, supervised, address, hosting, in_rank_0, observer, .. } = entry;
        let mut shared = Shared::new(line, job, generation, pace, Arc::clone(&watch));
        (shared.supervised, shared.in_rank_0) = (supervised, in_rank_0);
        shared.observer = observer.filter(|_| place.rank == teller(&roster));
        let monitor = Monitor::start(shared)?;
        let Place { rank, world, local_rank, local_world, launcher, .. } = *place;
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
            hosting,
        })
    }

    pub fn host(&self) -> &str {
        &self.roster[self.rank].host
    }

    /// Sends bytes to the observer of the job. If the observer does not keep up, they are dropped.
    pub fn event(&self, bytes: &[u8]) {
        if bytes.len() <= EVENT_BYTES_MAX {
            self.monitor.shared.tell_if_idle(Message::Event(bytes.to_vec()));
        }
    }

    /// Says why this rank gives up. The coordinator shows it, with rank, host and step, and ends the job; this process
    /// should print nothing and exit. Where another rank is to blame, that one's own word counts for more.
    pub fn fail(&self, text: &str, culprit: Option<usize>) {
        let culprit = culprit.filter(|culprit| *culprit != self.rank);
        self.monitor.shared.tell_and_flush(Message::Fail { text: text.into(), culprit });
        if let Some(hosting) = &self.hosting {
            hosting.await_ending();
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
        self.monitor.shared.tell_and_flush(Message::Finish);
        self.monitor.shared.await_release()
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
        self.monitor.shared.tell(Message::Blob { round, rank: self.rank, bytes: mine.to_vec() });
        self.monitor.shared.await_blobs(round, self.world)
    }
}

pub(crate) fn lost(why: &str) -> Fault {
    let error = format!("{why}\n  hint: the job has ended; its first message says why");
    Fault::System { what: "the coordinator of the job is lost".into(), error }
}

/// The socket that our parent left open for us. It is taken once, and no process started from here inherits it.
fn inherited(descriptor: RawFd) -> Result<UnixStream, Fault> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    // SAFETY: a zeroed `stat` is a valid place for the answer.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: only asks; any number may be asked about.
    let answer = unsafe { libc::fstat(descriptor, &mut status) };
    let is_socket = answer == 0 && status.st_mode & libc::S_IFMT == libc::S_IFSOCK;
    if descriptor <= 2 || !is_socket || TAKEN.swap(true, Ordering::Relaxed) {
        return Err(Fault::BadCall(format!(
            "the control link (descriptor {descriptor}) is not there\n  hint: this process inherited the variables of another job; unset KOLO_RANK, KOLO_WORLD and KOLO_CONTROL_FD"
        )));
    }
    // SAFETY: a flag of a descriptor that is ours.
    unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
    // SAFETY: it is a socket, our parent meant it for us, and nobody took it before.
    Ok(unsafe { UnixStream::from_raw_fd(descriptor) })
}

/// The first message.
fn first(line: &mut Line, deadline: Instant) -> Result<Envelope, Fault> {
    loop {
        // Exactly one message comes before we speak.
        if let Some(envelope) = line.receive()?.into_iter().next() {
            return Ok(envelope);
        }
        if !line.open() {
            return Err(lost("it closed the link before a word"));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(lost("it did not say a word"));
        }
        line::wait(line, left.as_millis() as u64 + 1);
    }
}

/// The rank that says so when rank 0 is lost: one on another host, if there is any, as a host may go as a whole.
fn teller(roster: &[Peer]) -> usize {
    let elsewhere = roster.iter().position(|peer| peer.host != roster[0].host);
    elsewhere.unwrap_or(1)
}

/// Gives signs of life until all ranks have joined.
fn await_roster(
    entry: &mut Entry,
    place: &Place,
    pace: Pace,
    envelope: &dyn Fn(Message) -> Envelope,
) -> Result<Vec<Peer>, Fault> {
    let Place { rank, world, .. } = *place;
    let (in_rank_0, told, line) = (entry.in_rank_0, entry.speaks, &mut entry.line);
    let mut absence = Absence::new(Instant::now(), 2 * pace.heartbeat_ms);
    let lost = |why: &str, absence: &Absence| match (in_rank_0, absence.longest()) {
        (true, Some(absent)) => meet::left_behind(rank, absent),
        (true, None) => meet::first_lost(why),
        (false, _) => lost(why),
    };
    let mut silence = Silence::new(Instant::now(), pace.heartbeat_ms * MUTE_HEARTBEATS);
    let mut roster = Vec::new();
    // The coordinator's own deadline comes first and names who is missing; this one is for a mute coordinator.
    let deadline = Instant::now() + Duration::from_millis(pace.heartbeat_ms * (JOIN_HEARTBEATS + 10));
    while roster.len() < world {
        line::wait(line, pace.beat_ms());
        absence.turn(Instant::now());
        for received in line.receive()? {
            silence.hear(Instant::now());
            match received.message {
                Message::Roster { rank, peer } if rank == roster.len() => roster.push(peer),
                Message::Abort { text } => return Err(Fault::Aborted(text)),
                _ => {}
            }
        }
        if !line.open() {
            return Err(lost("it closed the link before all ranks had joined", &absence));
        }
        if Instant::now() > deadline || (in_rank_0 && silence.too_long(Instant::now())) {
            let why = "it fell silent while the ranks joined; its process is stopped or its host is gone";
            let fault = lost(why, &absence);
            line.send(&envelope(Message::GiveUp { text: fault.to_string(), told }));
            return Err(fault);
        }
        if !line.busy() {
            line.send(&envelope(Message::Beat(Activity {
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
