//! Runs a job on several hosts: an agent on each, started through a remote shell, and the coordinator in this process.
//!
//! The key goes to the agents through their standard input, and from there to the workers through a socket. When a host can
//! no longer be reached, both sides end: this one says so, and the agent there ends its workers.

use crate::agent_message::{AgentMessage, StartWorkers};
use crate::control_link::ControlLink;
use crate::coordinator::{CoordinatorConfig, Notice};
use crate::deadlines::Deadlines;
use crate::driver::{Driver, ProcessControl, ProcessEvent};
use crate::elastic::ElasticOptions;
use crate::hostlist::Slots;
use crate::interface;
use crate::join;
use crate::listener::{self, Listener};
use crate::local::{HEARTBEAT_MS, Outcome, watch_signals, with_roles};
use crate::logs::{self, Echo, LogWriter, Logs, Speakers, WriteErrors};
use crate::message::KeyBytes;
use crate::pipe::Pipe;
use crate::process::{Change, Process};
use crate::rank_state::Exit;
use crate::timeout::{HeartbeatTimeout, SuspensionDetector};
use kolo_base::lock;
use kolo_comm::{Fault, JobKey};
use std::io::Read;
use std::net::IpAddr;
use std::os::fd::{OwnedFd, RawFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of a remote shell's stderr that a message shows.
const STDERR_BYTES_MAX: usize = 2 << 10;
const STDERR_WAIT: Duration = Duration::from_millis(250);

/// What to run where.
#[derive(Clone)]
pub struct HostsOptions {
    pub slots: Vec<Slots>,
    /// The program on the hosts, by its full name there.
    pub program: String,
    pub arguments: Vec<String>,
    /// Further variables for the workers, as `name=value`.
    pub environment: Vec<String>,
    /// Where the workers run, on each host.
    pub directory: String,
    /// What starts a command on a host: it gets the host and the command line as its last arguments.
    pub shell: Vec<String>,
    /// The command line that starts the agent.
    pub agent: String,
    pub heartbeat_ms: u64,
    pub out: Option<PathBuf>,
    pub echo: Option<Echo>,
    /// Where the coordinator listens; by default the address on the way to the hosts.
    pub address: Option<IpAddr>,
    /// What the last ranks are if they are no plain workers, such as `server 0`; for messages.
    pub roles: Vec<String>,
    /// Whether the job goes on when workers are lost, and takes in others.
    pub elastic: Option<ElasticOptions>,
}

impl HostsOptions {
    /// Over ssh, with the agent in the same program.
    pub fn new(slots: Vec<Slots>, program: &str, arguments: Vec<String>) -> Self {
        let directory = std::env::current_dir().unwrap_or_default().to_string_lossy().into_owned();
        Self {
            slots,
            program: program.into(),
            arguments,
            environment: Vec::new(),
            directory,
            shell: ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"].map(String::from).to_vec(),
            agent: format!("exec {} agent", quoted(program)),
            heartbeat_ms: HEARTBEAT_MS,
            out: None,
            echo: Some(logs::terminal()),
            address: None,
            roles: Vec::new(),
            elastic: None,
        }
    }
}

impl std::fmt::Debug for HostsOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?} on {:?}", self.program, self.arguments, self.slots)
    }
}

/// A word that a shell takes as it is.
pub fn quoted(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./=:,@%+".contains(&byte);
    if !word.is_empty() && word.bytes().all(plain) { word.into() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

struct Remote {
    host: String,
    first_rank: usize,
    /// By local rank.
    ended: Vec<bool>,
    process: Process,
    /// How the remote shell ended, and when that was seen.
    exit: Option<(Exit, Instant)>,
    pipe: Pipe,
    start: Option<StartWorkers>,
    stderr: Arc<Mutex<Vec<u8>>>,
    listener: JoinHandle<()>,
    timeout: HeartbeatTimeout,
    lost: bool,
}

struct Remotes {
    remotes: Vec<Remote>,
    log_writer: LogWriter,
    deadlines: Deadlines,
    heartbeat_sent: Instant,
    /// Whether this process itself was suspended.
    suspension: SuspensionDetector,
}

/// Starts the agents and returns when all workers are gone. The observer sees what happens meanwhile.
pub fn run(options: &HostsOptions, observer: &mut dyn FnMut(&Notice)) -> Result<Outcome, Fault> {
    let world: usize = options.slots.iter().map(|slots| slots.count).sum();
    if world == 0 {
        return Err(Fault::BadCall("the list of hosts is empty".into()));
    }
    let mut signals = watch_signals()?;
    let (logs, unwritten) = (Logs::create(options.out.as_ref(), world)?, WriteErrors::default());
    let names: Vec<String> = options.slots.iter().map(|slots| without_user(&slots.host).to_string()).collect();
    let address = options.address.map_or_else(|| interface::choose(false, &names), interface::checked)?;
    let deadlines = Deadlines { heartbeat_ms: options.heartbeat_ms };
    let (job, key) = (u64::from_le_bytes(kolo_comm::auth::random()?), JobKey::fresh()?);
    let config = CoordinatorConfig { world, job, generation: 0, deadlines, supervised: true, bound: false };
    let (listener, socket) = Listener::open(address, key.clone(), listener::coordinator_identity(job, 0), world)?;
    let files = (0..world).map(|rank| logs.of(rank)).collect::<Result<_, _>>()?;
    let speakers = Speakers::new(options.elastic.is_some());
    let log_writer = LogWriter::start(files, options.echo.clone(), unwritten.clone(), speakers.clone())?;
    let (now, suspension_ms) = (Instant::now(), deadlines.orphan_ms());
    let suspension = SuspensionDetector::new(now, suspension_ms);
    let mut remotes = Remotes { remotes: Vec::new(), log_writer, deadlines, heartbeat_sent: now, suspension };
    let order = StartWorkers {
        job,
        generation: 0,
        heartbeat_ms: options.heartbeat_ms,
        key: KeyBytes(*key.expose()),
        address: socket.to_string(),
        world,
        first_rank: 0,
        count: 0,
        directory: options.directory.clone(),
        program: options.program.clone(),
        arguments: options.arguments.clone(),
        environment: options.environment.clone(),
        elastic: options.elastic.is_some(),
    };
    remotes.start(options, &order)?;
    let places =
        options.slots.iter().flat_map(|slots| std::iter::repeat_n(without_user(&slots.host).to_string(), slots.count));
    let places = with_roles(places.collect(), &options.roles);
    let mut observed = |notice: &Notice| {
        speakers.hear(notice);
        observer(notice);
    };
    let (mut driver, _invited) = match &options.elastic {
        None => (Driver::new(config, Vec::new(), Some(listener), remotes, &mut observed), None),
        Some(elastic) => {
            let invited = join::publish_invitation(elastic, socket, job, &key, options.heartbeat_ms)?;
            let core = Box::new(elastic.core(job, deadlines, &places, true));
            let times = (deadlines, true);
            (Driver::with_core(core, times, Vec::new(), Some(listener), remotes, &mut observed), invited)
        }
    };
    driver.expect(&places);
    let verdict = loop {
        if let Some(verdict) = driver.run_once(signals.pending()) {
            break verdict;
        }
    };
    driver.processes.drain_output();
    let out = logs.close(verdict.exit_code != 0, options.echo.is_some());
    Ok(Outcome { out, verdict, unwritten: unwritten.take() })
}

/// A host without the user's name before it.
fn without_user(host: &str) -> &str {
    host.rsplit_once('@').map_or(host, |(_, host)| host)
}

impl Remote {
    fn open(mut command: Command, host: &str, start: StartWorkers, deadlines: Deadlines) -> Result<Self, Fault> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = Process::spawn(command, None)?;
        let child = process.child();
        let streams = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(input), Some(output), Some(mut errors)) = streams else {
            return Err(Fault::BadCall("a remote shell without standard streams".into()));
        };
        let stderr = Arc::new(Mutex::new(Vec::new()));
        let ours = Arc::clone(&stderr);
        let listen = move || {
            let mut buffer = [0; 1024];
            while let Ok(count) = errors.read(&mut buffer) {
                let mut all = lock(&ours);
                if count == 0 {
                    break;
                }
                all.extend_from_slice(&buffer[..count]);
                let extra = all.len().saturating_sub(STDERR_BYTES_MAX);
                all.drain(..extra);
            }
        };
        let started = std::thread::Builder::new().name("stderr".into()).spawn(listen);
        let listener = started.map_err(|error| Fault::thread("starting a thread for output", &error))?;
        let pipe = Pipe::new(OwnedFd::from(output), OwnedFd::from(input), false)?;
        let (first_rank, ended) = (start.first_rank, vec![false; start.count]);
        let (host, start) = (host.to_string(), Some(start));
        let timeout = HeartbeatTimeout::new(Instant::now(), deadlines.orphan_ms());
        Ok(Self { host, first_rank, ended, process, exit: None, pipe, start, stderr, listener, timeout, lost: false })
    }

    fn note_exit(&mut self) {
        if let Some(Change::Exited(exit)) = self.process.look() {
            self.exit = Some((exit, Instant::now()));
        }
    }

    /// What the remote shell said last, in one line.
    fn stderr_text(&self) -> String {
        let bytes = lock(&self.stderr).clone();
        let text = String::from_utf8_lossy(&bytes).trim().replace('\n', "; ");
        if text.is_empty() { String::new() } else { format!(": {text}") }
    }

    /// Nobody there can be reached any more.
    fn mark_lost(&mut self, why: String, events: &mut Vec<(usize, ProcessEvent)>) {
        self.lost = true;
        self.pipe.open = false;
        self.process.signal(libc::SIGKILL);
        let open = self.ended.iter().enumerate().filter(|(_, ended)| !**ended);
        let ranks: Vec<usize> = open.map(|(local, _)| self.first_rank + local).collect();
        if let Some(first) = ranks.first() {
            events.push((*first, ProcessEvent::Trouble(why)));
        }
        events.extend(ranks.iter().map(|rank| (*rank, ProcessEvent::Change(Change::Exited(Exit::Unknown)))));
    }

    /// `absent` is how long this process itself was suspended.
    fn check(&mut self, deadlines: Deadlines, absent: Option<Duration>, events: &mut Vec<(usize, ProcessEvent)>) {
        if self.lost || self.ended.iter().all(|ended| *ended) {
            return;
        }
        self.note_exit();
        // The last words of an agent that ended are read first: they may say that its ranks ended well.
        let read = self.exit.as_ref().is_some_and(|(_, since)| since.elapsed() > STDERR_WAIT);
        if read || !self.pipe.open {
            // What the remote shell said, and how it ended, may take a moment to come through.
            let deadline = Instant::now() + STDERR_WAIT;
            while (self.exit.is_none() || !self.listener.is_finished()) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
                self.note_exit();
            }
            let why = match &self.exit {
                Some((exit, _)) => format!("its remote shell: {exit}"),
                None => "its agent closed the link".into(),
            };
            let absent = absent.map_or(String::new(), |absent| {
                format!(
                    "; this launcher was suspended for {} ms, and that host did not wait for it",
                    absent.as_millis()
                )
            });
            self.mark_lost(format!("host {}: {why}{}{absent}", self.host, self.stderr_text()), events);
        } else if self.pipe.greeted && self.timeout.expired(Instant::now()) {
            let why = format!("host {}: its agent sent no heartbeat for {} ms", self.host, deadlines.orphan_ms());
            self.mark_lost(why, events);
        }
    }
}

impl Remotes {
    /// An agent on each host; each gets the order with its own ranks in it.
    fn start(&mut self, options: &HostsOptions, order: &StartWorkers) -> Result<(), Fault> {
        let Some((shell, words)) = options.shell.split_first() else {
            return Err(Fault::BadCall("no remote shell is named".into()));
        };
        let mut first_rank = 0;
        for slots in &options.slots {
            let mut command = Command::new(shell);
            command.args(words).arg(&slots.host).arg(&options.agent);
            let start = StartWorkers { first_rank, count: slots.count, ..order.clone() };
            self.remotes.push(Remote::open(command, &slots.host, start, self.deadlines)?);
            first_rank += slots.count;
        }
        Ok(())
    }

    fn remote(&mut self, rank: usize) -> Option<&mut Remote> {
        self.remotes.iter_mut().find(|remote| (remote.first_rank..).take(remote.ended.len()).any(|own| own == rank))
    }

    fn receive(&mut self, at: usize, events: &mut Vec<(usize, ProcessEvent)>) {
        let remote = &mut self.remotes[at];
        remote.pipe.flush();
        let received = remote.pipe.receive();
        if remote.pipe.greeted
            && let Some(start) = remote.start.take()
        {
            remote.timeout.reset(Instant::now());
            remote.pipe.send(&AgentMessage::Start(Box::new(start)));
        }
        let messages = match received {
            Ok(messages) => messages,
            Err(fault) => return remote.mark_lost(fault.to_string(), events),
        };
        for order in messages {
            self.remotes[at].timeout.reset(Instant::now());
            self.take(at, order, events);
        }
    }

    fn take(&mut self, at: usize, order: AgentMessage, events: &mut Vec<(usize, ProcessEvent)>) {
        let remote = &mut self.remotes[at];
        let own = |rank: usize| rank.checked_sub(remote.first_rank).filter(|local| *local < remote.ended.len());
        match order {
            AgentMessage::Changed { rank, change } => {
                if let Some(local) = own(rank) {
                    remote.ended[local] |= matches!(change, Change::Exited(_));
                    events.push((rank, ProcessEvent::Change(change)));
                }
            }
            AgentMessage::Computed { rank, load } if own(rank).is_some() => {
                events.push((rank, ProcessEvent::Computed(load)));
            }
            AgentMessage::Output { rank, source, bytes } if own(rank).is_some() => {
                self.log_writer.write(rank, source, bytes);
            }
            AgentMessage::Unable { text } => {
                let why = format!("host {}: {text}", remote.host);
                remote.mark_lost(why, events);
            }
            _ => {}
        }
    }

    fn signal_all(&mut self, signal: i32) {
        for remote in self.remotes.iter_mut().filter(|remote| remote.pipe.greeted) {
            let open = remote.ended.iter().enumerate().filter(|(_, ended)| !**ended);
            for (local, _) in open {
                remote.pipe.send(&AgentMessage::Signal { rank: remote.first_rank + local, signal });
            }
        }
    }

    /// Takes in what agents still have to say after the end.
    fn drain_output(&mut self) {
        let deadline = Instant::now() + Duration::from_millis(self.deadlines.heartbeat_ms);
        while Instant::now() < deadline && self.remotes.iter().any(|remote| remote.pipe.open && !remote.lost) {
            let mut entries = Vec::new();
            self.interests(&mut entries);
            crate::poll::poll(&entries, self.deadlines.tick_ms());
            (0..self.remotes.len()).for_each(|at| self.receive(at, &mut Vec::new()));
        }
        self.log_writer.finish(deadline);
    }
}

impl ProcessControl for Remotes {
    fn events(&mut self) -> Vec<(usize, ProcessEvent)> {
        let mut events = Vec::new();
        self.suspension.tick(Instant::now());
        let due = self.heartbeat_sent.elapsed() >= Duration::from_millis(self.deadlines.beat_ms());
        if due {
            self.heartbeat_sent = Instant::now();
        }
        for at in 0..self.remotes.len() {
            self.receive(at, &mut events);
            if due && self.remotes[at].pipe.greeted {
                self.remotes[at].pipe.send(&AgentMessage::Heartbeat);
            }
            self.remotes[at].check(self.deadlines, self.suspension.longest(), &mut events);
        }
        events
    }

    fn signal(&mut self, rank: usize, signal: i32) {
        if let Some(remote) = self.remote(rank) {
            remote.pipe.send(&AgentMessage::Signal { rank, signal });
        }
    }

    fn kill(&mut self, rank: usize) -> bool {
        self.signal(rank, libc::SIGKILL);
        // Of a lost host's ranks, and of those that joined by themselves, there is only the link.
        self.remote(rank).is_some_and(|remote| !remote.lost)
    }

    fn start(&mut self, rank: usize) -> Result<Option<ControlLink>, Fault> {
        let lost = || Fault::BadCall(format!("the host of worker {rank} is lost"));
        let remote = self.remote(rank).filter(|remote| !remote.lost).ok_or_else(lost)?;
        remote.ended[rank - remote.first_rank] = false;
        remote.pipe.send(&AgentMessage::Restart { rank });
        Ok(None)
    }

    fn suspend(&mut self) {
        self.signal_all(libc::SIGSTOP);
        for remote in self.remotes.iter_mut().filter(|remote| remote.pipe.greeted) {
            remote.pipe.send(&AgentMessage::Suspend);
        }
        // This process must not stop before it has said so.
        let deadline = Instant::now() + Duration::from_millis(self.deadlines.heartbeat_ms);
        while self.remotes.iter().any(|remote| remote.pipe.open && remote.pipe.backlog() > 0)
            && Instant::now() < deadline
        {
            let mut entries = Vec::new();
            self.interests(&mut entries);
            crate::poll::poll(&entries, self.deadlines.tick_ms());
            self.remotes.iter_mut().for_each(|remote| remote.pipe.flush());
        }
    }

    fn resume(&mut self) {
        // The agents know of this one.
        self.suspension = SuspensionDetector::new(Instant::now(), self.deadlines.orphan_ms());
        self.signal_all(libc::SIGCONT);
    }

    fn interests(&self, entries: &mut Vec<(RawFd, i16)>) {
        entries.extend(self.remotes.iter().flat_map(|remote| remote.pipe.interests()));
    }
}
