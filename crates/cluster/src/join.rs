//! Joining a job that somebody else started (`mpirun`, `srun`, `torchrun`): rank 0 hosts the coordinator in a thread, and
//! the others learn its address and the job's key through an engine that connects them already, or through a file.
//!
//! The file is readable by its owner only, lies in a directory of its owner, appears whole, and is gone once all have
//! joined.

use crate::control_link::ControlLink;
use crate::coordinator::{CoordinatorConfig, Notice};
use crate::coordinator_thread::{CoordinatorThread, MeetingFiles};
use crate::deadlines::Deadlines;
use crate::elastic::{ElasticOptions, Invitation};
use crate::ending_mark::{EndingMark, LossReporter};
use crate::interface;
use crate::introduction::Introduction;
use crate::launcher::{Launcher, RankInfo};
use crate::listener::{self, Listener};
use crate::local::HEARTBEAT_MS;
use crate::logs;
use crate::member::{Connected, JobCredentials, Member};
use crate::message::{ANY_RANK, ControlMessage, Envelope, KeyBytes};
use crate::rendezvous::JOIN_HEARTBEATS;
use crate::startup_watch::{self, AnnouncedRanks};
use crate::timeout::SuspensionDetector;
use kolo_base::ShownPath;
use kolo_comm::host::EnvLookup;
use kolo_comm::{Bootstrap, Fault, JobKey};
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often a rank polls for the file.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long a rank waits before it goes while another one says why.
const SPEAKING: Duration = Duration::from_millis(500);
/// Largest file of credentials.
const CREDENTIALS_BYTES_MAX: u64 = 128 << 10;

/// Sees what happens in the job: at rank 0, and at another rank when rank 0 is lost.
pub type NoticeObserver = Arc<dyn Fn(&Notice) + Send + Sync>;

/// How the ranks learn of the coordinator.
pub enum Discovery<'a> {
    /// Through an engine that connects all ranks already.
    Bootstrap(&'a mut dyn Bootstrap),
    /// Through this file, which all hosts see.
    File(PathBuf),
}

pub struct JoinOptions<'a> {
    pub way: Discovery<'a>,
    pub heartbeat_ms: u64,
    /// The address on which rank 0 listens; by default the one that routes to the other hosts.
    pub address: Option<IpAddr>,
    pub observer: NoticeObserver,
    /// What this rank says of itself.
    pub introduction: Introduction,
    /// A file name that only ranks of this job use, where all hosts see it: by it they agree who says why the job ends.
    pub job_file: Option<PathBuf>,
}

impl std::fmt::Debug for Discovery<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Discovery::Bootstrap(_) => f.write_str("through an engine"),
            Discovery::File(path) => write!(f, "through {}", path.shown()),
        }
    }
}

impl std::fmt::Debug for JoinOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "JoinOptions {:?}", self.way)
    }
}

impl<'a> JoinOptions<'a> {
    /// With the usual heartbeat; the reason of an early end goes to standard error.
    pub fn new(way: Discovery<'a>) -> Self {
        let observer: NoticeObserver = Arc::new(|notice| match notice {
            Notice::Ending { text, shown: false } => logs::print_error(&format!("error: {text}")),
            Notice::Lost { text, .. } => logs::print_error(text),
            Notice::Resumed(resumed) if resumed.generation > 0 => logs::print_error(&resumed.to_string()),
            _ => {}
        });
        let job_file = match &way {
            Discovery::File(path) => Some(path.clone()),
            Discovery::Bootstrap(_) => None,
        };
        let introduction = Introduction::default();
        Self { way, heartbeat_ms: HEARTBEAT_MS, address: None, observer, introduction, job_file }
    }
}

/// The file by which the ranks of this job find each other, in the user's home.
pub fn default_file(rank_info: &RankInfo, lookup: EnvLookup<'_>) -> Result<PathBuf, Fault> {
    let why = |what: &str| Fault::BadCall(format!("{} gives {what}", rank_info.launcher.name()));
    let job = rank_info.job.as_ref().ok_or_else(|| {
        why("the job no name, so its ranks cannot find each other\n  hint: use the transport `mpi`, or srun")
    })?;
    let home = lookup("HOME").ok_or_else(|| why("no HOME, so its ranks cannot find each other"))?;
    Ok(Path::new(&home).join(".kolo").join("run").join(job))
}

/// Joins the job as this rank. All ranks call it.
pub fn join_rank(rank_info: &RankInfo, mut options: JoinOptions<'_>) -> Result<Member, Fault> {
    let hosts = match &mut options.way {
        Discovery::File(_) => rank_info.hosts.clone(),
        Discovery::Bootstrap(engine) => {
            let names = engine.all_gather(crate::host_name().as_bytes())?;
            names.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect()
        }
    };
    if rank_info.rank != 0 {
        return join_as_member(rank_info, options);
    }
    options.observer = noting_late_start(rank_info, options.heartbeat_ms, options.observer);
    if let Some(path) = &options.job_file {
        path.parent().into_iter().for_each(EndingMark::sweep);
        let mark = EndingMark::new(path);
        if let Some(text) = mark.said() {
            // This process was suspended before it came here, and the others did not wait.
            return Err(Fault::Aborted(text));
        }
        options.observer = mark.observing(options.observer);
    }
    match open_listener(rank_info, &options, hosts) {
        Ok(coordinator) => join_as_coordinator(rank_info, options, coordinator),
        Err(fault) => {
            publish_failure(&fault, options);
            Err(fault)
        }
    }
}

/// The same observer; if this process started so long ago that the others may have given it up, what it reports about them
/// begins with that. It was stopped before it could publish its address.
fn noting_late_start(rank_info: &RankInfo, heartbeat_ms: u64, inner: NoticeObserver) -> NoticeObserver {
    let Some(age_ms) = startup_watch::age_ms().filter(|age_ms| *age_ms > heartbeat_ms * JOIN_HEARTBEATS / 2) else {
        return inner;
    };
    let who = kolo_comm::fault::rank_name(rank_info.rank, &crate::host_name());
    let joined = AtomicBool::new(false);
    Arc::new(move |notice| match notice {
        Notice::Joined { .. } => {
            // All came: nobody had given it up.
            joined.store(true, Ordering::Relaxed);
            inner(notice);
        }
        Notice::Ending { text, shown } if !joined.load(Ordering::Relaxed) => {
            let text =
                format!("{who} arrived {age_ms} ms after its start, when others may have given up on it: {text}");
            inner(&Notice::Ending { text, shown: *shown });
        }
        notice => inner(notice),
    })
}

/// What rank 0 listens on, and what the others need to connect.
struct CoordinatorSocket {
    listener: Listener,
    key: JobKey,
    config: CoordinatorConfig,
    socket: SocketAddr,
}

/// Rank 0: finds an address that the others can reach, and listens there.
fn open_listener(
    rank_info: &RankInfo,
    options: &JoinOptions<'_>,
    hosts: Vec<String>,
) -> Result<CoordinatorSocket, Fault> {
    let one_host = rank_info.local_world == rank_info.world;
    let own = crate::host_name();
    // A host's own name says little about the network; the others' come first.
    let (own, mut names): (Vec<_>, Vec<_>) = hosts.into_iter().partition(|host| *host == own);
    names.extend(own.into_iter().take(1));
    names.dedup();
    names.extend(rank_info.origin.clone());
    let address = match options.address {
        Some(address) => interface::checked(address)?,
        None => interface::choose(one_host, &names)?,
    };
    let deadlines = Deadlines { heartbeat_ms: options.heartbeat_ms };
    let job = u64::from_le_bytes(kolo_comm::auth::random()?);
    let key = JobKey::fresh()?;
    let config =
        CoordinatorConfig { world: rank_info.world, job, generation: 0, deadlines, supervised: false, bound: false };
    let (listener, socket) =
        Listener::open(address, key.clone(), listener::coordinator_identity(job, 0), rank_info.world)?;
    Ok(CoordinatorSocket { listener, key, config, socket })
}

/// The others need not wait for a coordinator that does not come.
fn publish_failure(fault: &Fault, options: JoinOptions<'_>) {
    let message = ControlMessage::Abort { text: format!("rank 0 could not start: {fault}") };
    let bytes = Envelope { job: 0, generation: 0, message }.encode();
    match options.way {
        Discovery::Bootstrap(engine) => drop(engine.all_gather(&bytes)),
        Discovery::File(path) => {
            if publish(&path, &bytes).is_ok() {
                std::thread::sleep(Duration::from_millis(options.heartbeat_ms));
                let _ = std::fs::remove_file(&path);
            }
        }
    }
}

/// Rank 0: starts the coordinator's thread, tells the others, and joins.
fn join_as_coordinator(
    rank_info: &RankInfo,
    options: JoinOptions<'_>,
    coordinator: CoordinatorSocket,
) -> Result<Member, Fault> {
    let CoordinatorSocket { listener, key, config, socket } = coordinator;
    let job = config.job;
    let (ours, theirs) = UnixStream::pair().map_err(|error| Fault::system("making a control link", &error))?;
    let credentials = match &options.way {
        Discovery::File(path) => Some(path.clone()),
        Discovery::Bootstrap(_) => None,
    };
    let announced = credentials.as_ref().map(|path| AnnouncedRanks::new(path, rank_info, options.heartbeat_ms));
    let files = MeetingFiles { credentials, mark: options.job_file.as_deref().map(EndingMark::new), announced };
    let coordinator_thread = CoordinatorThread::start(
        config,
        listener,
        ControlLink::plain(theirs)?,
        Arc::clone(&options.observer),
        files,
        options.introduction.elastic.clone(),
    )?;
    let redirect = ControlMessage::Redirect {
        heartbeat_ms: options.heartbeat_ms,
        key: KeyBytes(*key.expose()),
        address: socket.to_string(),
    };
    let bytes = Envelope { job, generation: 0, message: redirect }.encode();
    match options.way {
        Discovery::Bootstrap(engine) => drop(engine.all_gather(&bytes)?),
        Discovery::File(path) => publish(&path, &bytes)?,
    }
    let credentials = JobCredentials { job, generation: 0, heartbeat_ms: options.heartbeat_ms, key };
    let address = socket.ip();
    let (coordinator_thread, reporter) = (Some(coordinator_thread), None);
    let connected = Connected {
        link: ControlLink::plain(ours)?,
        supervised: false,
        address,
        coordinator_thread,
        in_rank_0: true,
        reports: false,
        reporter,
    };
    Member::enter(rank_info, &options.introduction, credentials, connected)
}

fn join_as_member(rank_info: &RankInfo, options: JoinOptions<'_>) -> Result<Member, Fault> {
    let patience = Duration::from_millis(options.heartbeat_ms * JOIN_HEARTBEATS);
    let deadline = Instant::now() + patience;
    let JoinOptions { way, heartbeat_ms, observer, introduction, job_file, .. } = options;
    let mark = job_file.as_deref().map(EndingMark::new);
    let reports = rank_info.rank == 1 || mark.is_some();
    let reporter = LossReporter { observer, mark, speaks: rank_info.rank == 1 };
    let enter = |credentials: JobCredentials, connected: Connected| {
        let connected = Connected { in_rank_0: true, reports, reporter: Some(reporter.clone()), ..connected };
        Member::enter(rank_info, &introduction, credentials, connected)
    };
    match way {
        Discovery::Bootstrap(engine) => {
            let blobs = engine.all_gather(&[])?;
            let bytes = blobs.first().map(Vec::as_slice).unwrap_or_default();
            let (address, credentials) = decode_credentials(bytes, "rank 0")?;
            let reached = connect(rank_info, address, &credentials, deadline).map_err(silent);
            reached.and_then(|connected| enter(credentials, connected)).map_err(|fault| report_once(&reporter, fault))
        }
        Discovery::File(path) => {
            let mut suspension = SuspensionDetector::new(Instant::now(), 1000 + 2 * heartbeat_ms);
            let told = |fault: Fault, suspension: &SuspensionDetector| {
                let absent = suspension.longest().filter(|absent| *absent > patience / 2);
                let fault = absent.map_or(fault, |absent| left_behind(rank_info.rank, absent));
                report_once(&reporter, fault)
            };
            let mut last = None;
            loop {
                suspension.tick(Instant::now());
                let deadline = deadline + suspension.total();
                if let Some(text) = reporter.mark.as_ref().and_then(EndingMark::said) {
                    std::thread::sleep(SPEAKING);
                    return Err(Fault::Aborted(text));
                }
                // What lies there may be left over from an earlier job: then nobody answers, and a new one will come.
                if let Some((address, credentials)) = read(&path)? {
                    let soon = deadline.min(Instant::now() + Duration::from_secs(1));
                    let reached = connect(rank_info, address, &credentials, soon);
                    suspension.tick(Instant::now());
                    match reached {
                        Ok(connected) => {
                            return enter(credentials, connected).map_err(|fault| told(fault, &suspension));
                        }
                        Err(fault @ Fault::System { .. }) => last = Some(fault),
                        Err(fault) => return Err(fault),
                    }
                }
                if Instant::now() > deadline {
                    let fault = last.map_or_else(|| missing(rank_info, &path, heartbeat_ms), silent);
                    return Err(told(fault, &suspension));
                }
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }
}

/// Rank 0, and with it the coordinator, is lost before this rank knows where it runs.
pub(crate) fn first_lost(why: &str) -> Fault {
    Fault::System { what: "rank 0, which coordinates the job, was lost".into(), error: why.into() }
}

/// Nobody answers at its address.
fn silent(fault: Fault) -> Fault {
    match fault {
        fault @ Fault::System { .. } => first_lost(&format!("it does not answer: {fault}")),
        fault => fault,
    }
}

/// This rank was suspended, and the others did not wait for it.
pub(crate) fn left_behind(rank: usize, absent: Duration) -> Fault {
    let error = format!(
        "it was suspended for {} ms while the ranks joined, and the job has ended\n  hint: the job's own error message names the missing rank",
        absent.as_millis()
    );
    Fault::System { what: kolo_comm::fault::rank_name(rank, &crate::host_name()), error }
}

/// Of all ranks that find rank 0 missing, the first to come here says so.
fn report_once(reporter: &LossReporter, fault: Fault) -> Fault {
    if !matches!(fault, Fault::System { .. }) {
        return fault;
    }
    let text = fault.to_string();
    if !reporter.report(&text) {
        // Whoever reports must not be ended by a launcher that sees this rank go.
        std::thread::sleep(SPEAKING);
    }
    Fault::Aborted(text)
}

fn missing(rank_info: &RankInfo, path: &Path, heartbeat_ms: u64) -> Fault {
    let waited = heartbeat_ms * JOIN_HEARTBEATS;
    let who = kolo_comm::fault::rank_name(rank_info.rank, &crate::host_name());
    let error = format!(
        "reported by {who}\n  hint: rank 0 did not start or is stopped, or the hosts do not share that file system"
    );
    Fault::System { what: format!("rank 0 did not write {} within {waited} ms", path.shown()), error }
}

/// The file of an invitation, which goes with the job.
#[derive(Debug)]
pub(crate) struct InvitationFile(PathBuf);

impl Drop for InvitationFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Opens an elastic job to those who join later, if it is meant to be: they listen at this address, and find it in a file.
pub(crate) fn invite(
    elastic: &ElasticOptions,
    address: IpAddr,
    job: u64,
    key: &JobKey,
    heartbeat_ms: u64,
) -> Result<Option<(Listener, InvitationFile)>, Fault> {
    if elastic.invitation.is_none() {
        return Ok(None);
    }
    let identity = listener::coordinator_identity(job, 0);
    let (listener, socket) = Listener::open(address, key.clone(), identity, elastic.grains)?;
    let file = publish_invitation(elastic, socket, job, key, heartbeat_ms)?;
    Ok(file.map(|file| (listener, file)))
}

/// Writes where the job listens, for those who join later, if it is meant to be open to them.
pub(crate) fn publish_invitation(
    elastic: &ElasticOptions,
    socket: SocketAddr,
    job: u64,
    key: &JobKey,
    heartbeat_ms: u64,
) -> Result<Option<InvitationFile>, Fault> {
    let Some(Invitation { path, command }) = &elastic.invitation else { return Ok(None) };
    let envelope = |message: ControlMessage| Envelope { job, generation: 0, message }.encode();
    let (key, address) = (KeyBytes(*key.expose()), socket.to_string());
    let mut bytes = envelope(ControlMessage::Redirect { heartbeat_ms, key, address });
    let directory = std::env::current_dir().unwrap_or_default();
    let words = [directory.to_string_lossy().into_owned()].into_iter().chain(command.iter().cloned());
    bytes.extend(envelope(ControlMessage::Event(words.collect::<Vec<_>>().join("\0").into_bytes())));
    publish(path, &bytes)?;
    Ok(Some(InvitationFile(path.clone())))
}

/// What an invitation says: how to reach the job, where its command was given, and the command.
pub struct Invited {
    address: SocketAddr,
    credentials: JobCredentials,
    pub directory: PathBuf,
    pub command: Vec<String>,
}

impl std::fmt::Debug for Invited {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "an invitation to {}", self.address)
    }
}

impl Invited {
    /// Reads the file of a running job.
    pub fn read(path: &Path) -> Result<Self, Fault> {
        let from = path.shown().to_string();
        let absent = || Fault::System {
            what: format!("reading {from}"),
            error: "there is no such file\n  hint: it is in the --out directory of an elastic job while that runs"
                .into(),
        };
        let other = |why: &str| Fault::System {
            what: format!("{from} is not the invitation of an elastic job"),
            error: format!(
                "{why}\n  hint: give the --out directory of a running elastic job, or the file `join` in it"
            ),
        };
        let bytes = read_private(path).map_err(|fault| match fault {
            Fault::Rejected { why, .. } => other(&why),
            fault => fault,
        })?;
        let bytes = bytes.ok_or_else(absent)?;
        let unreadable = || other("it is damaged, or another kind of file");
        Self::decode(&bytes).ok_or_else(unreadable)
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (first, length) = Envelope::decode(bytes).ok()??;
        let (address, credentials) = redirected(&first)?;
        let (second, _) = Envelope::decode(&bytes[length..]).ok()??;
        let ControlMessage::Event(words) = second.message else { return None };
        let words = String::from_utf8(words).ok()?;
        let mut words = words.split('\0').map(String::from);
        let directory = words.next().map(PathBuf::from)?;
        Some(Self { address, credentials, directory, command: words.collect() })
    }

    /// Joins the job, and waits until it takes this worker in.
    pub fn join(self, introduction: &Introduction) -> Result<Member, Fault> {
        let rank_info = invited_rank();
        let deadline = Instant::now() + Duration::from_millis(self.credentials.heartbeat_ms * INVITED_HEARTBEATS);
        let connected = connect(&rank_info, self.address, &self.credentials, deadline)?;
        Member::enter(&rank_info, introduction, self.credentials, connected)
    }
}

/// Heartbeats that reaching a running job may take.
const INVITED_HEARTBEATS: u64 = 10;

/// A worker that nobody has given a rank.
pub fn invited_rank() -> RankInfo {
    RankInfo {
        rank: ANY_RANK,
        world: ANY_RANK + 1,
        local_rank: 0,
        local_world: 1,
        launcher: Launcher::Kolo,
        control: None,
        job: None,
        hosts: Vec::new(),
        origin: None,
    }
}

/// Reads what rank 0 published.
fn decode_credentials(bytes: &[u8], from: &str) -> Result<(SocketAddr, JobCredentials), Fault> {
    let envelope = Envelope::decode(bytes)?.map(|(envelope, _)| envelope);
    if let Some(Envelope { message: ControlMessage::Abort { text }, .. }) = envelope {
        return Err(Fault::Aborted(text));
    }
    let unreadable = || Fault::Rejected { from: from.into(), why: "it holds no job credentials".into() };
    envelope.as_ref().and_then(redirected).ok_or_else(unreadable)
}

/// What a redirection says.
pub(crate) fn redirected(envelope: &Envelope) -> Option<(SocketAddr, JobCredentials)> {
    let ControlMessage::Redirect { heartbeat_ms, key, address } = &envelope.message else { return None };
    let Envelope { job, generation, .. } = *envelope;
    let credentials = JobCredentials { job, generation, heartbeat_ms: *heartbeat_ms, key: JobKey::from_bytes(key.0) };
    Some((address.parse().ok()?, credentials))
}

/// A link to the coordinator.
pub(crate) fn connect(
    rank_info: &RankInfo,
    address: SocketAddr,
    credentials: &JobCredentials,
    deadline: Instant,
) -> Result<Connected, Fault> {
    let JobCredentials { job, generation, .. } = *credentials;
    let (stream, session) = listener::connect(address, &credentials.key, job, generation, rank_info.rank, deadline)?;
    let local = stream.local_addr().map_err(|error| Fault::system("asking for a link's address", &error))?;
    let link = ControlLink::sealed(stream, session)?;
    Ok(Connected {
        link,
        supervised: false,
        address: local.ip(),
        coordinator_thread: None,
        in_rank_0: false,
        reports: false,
        reporter: None,
    })
}

/// A directory of the user's alone.
pub(crate) fn make_directory(path: &Path) -> std::io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Writes a temporary file and renames it, so that nobody sees half of it.
fn publish(path: &Path, bytes: &[u8]) -> Result<(), Fault> {
    let refused = |error: std::io::Error| Fault::system(format!("writing {}", path.shown()), &error);
    let directory = path.parent().unwrap_or(Path::new("."));
    make_directory(directory).map_err(refused)?;
    let temporary = path.with_extension(format!("{}.new", std::process::id()));
    let _ = std::fs::remove_file(&temporary);
    let mut file =
        std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary).map_err(refused)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| std::fs::rename(&temporary, path));
    written.map_err(|error| {
        let _ = std::fs::remove_file(&temporary);
        refused(error)
    })
}

/// The credentials, if the file is there.
fn read(path: &Path) -> Result<Option<(SocketAddr, JobCredentials)>, Fault> {
    let bytes = read_private(path)?;
    bytes.map(|bytes| decode_credentials(&bytes, &path.shown().to_string())).transpose()
}

/// The contents of a file for the user alone, if it is there. A file of somebody else is refused.
pub(crate) fn read_private(path: &Path) -> Result<Option<Vec<u8>>, Fault> {
    // On a network file system, listing the directory makes a client look again.
    let _ = path.parent().map(std::fs::read_dir);
    let refused = |error: std::io::Error| Fault::system(format!("reading {}", path.shown()), &error);
    let file = match std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
    {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(refused(error)),
    };
    let about = file.metadata().map_err(refused)?;
    // SAFETY: asks for this process's user.
    let me = unsafe { libc::geteuid() };
    let from = path.shown().to_string();
    if !about.is_file() {
        return Err(Fault::Rejected { from, why: "it is not a regular file".into() });
    }
    if about.uid() != me || about.mode() & 0o077 != 0 {
        return Err(Fault::Rejected { from, why: "other users can access it".into() });
    }
    let mut bytes = Vec::new();
    file.take(CREDENTIALS_BYTES_MAX).read_to_end(&mut bytes).map_err(refused)?;
    Ok(Some(bytes))
}

/// Joins the job this process was started for; `None` if it was started alone. Without our own launcher, the ranks meet
/// through [`default_file`].
pub fn join(lookup: EnvLookup<'_>) -> Result<Option<Member>, Fault> {
    let Some(rank_info) = crate::launcher::detect(lookup)? else { return Ok(None) };
    if rank_info.launcher == Launcher::Kolo {
        return Member::join_launched(&rank_info, &Introduction::default()).map(Some);
    }
    let way = Discovery::File(default_file(&rank_info, lookup)?);
    join_rank(&rank_info, JoinOptions::new(way)).map(Some)
}
