//! The agent on another host: starts that host's workers as it is told over its standard input, sends back what they print
//! and how they end, and ends them all when its input closes or falls silent.
//!
//! Invariant: no worker outlives the agent.

use crate::launcher;
use crate::line::{self, Line};
use crate::logs::{self, Source};
use crate::message::{Envelope, Message};
use crate::order::{GREETING, Order, Start};
use crate::pace::Pace;
use crate::pipe::Pipe;
use crate::process::{self, Change, Output, Process};
use crate::silence::Silence;
use kolo_comm::Fault;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

/// How long the first order may take.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Pieces of output that may wait; then the workers wait.
const OUTPUT_PIECES_MAX: usize = 64;
/// Unsent bytes from which on no more output is taken.
const BACKLOG_BYTES_MAX: usize = 1 << 20;

/// A piece of what a worker printed.
struct Piece {
    rank: usize,
    source: Source,
    bytes: Vec<u8>,
}

struct Agent {
    pipe: Pipe,
    pace: Pace,
    first_rank: usize,
    workers: Vec<Process>,
    /// Kept open: a worker's end shows here too.
    _controls: Vec<Line>,
    pieces: Receiver<Piece>,
    /// All that workers printed has been taken.
    drained: bool,
    silence: Silence,
    /// The launcher said that it will be silent.
    suspended: bool,
    pulsed: Instant,
}

/// Runs the agent over this process's standard streams until its workers are gone. The exit code.
pub fn run() -> i32 {
    match prepare().and_then(serve) {
        Ok(()) => 0,
        Err(fault) => {
            logs::complain(&fault.to_string());
            1
        }
    }
}

fn prepare() -> Result<Pipe, Fault> {
    let copy = |descriptor: i32| {
        // SAFETY: a copy of our own standard stream, that only we hold.
        let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 3) };
        if copy < 0 {
            return Err(Fault::system("copying a standard stream", &std::io::Error::last_os_error()));
        }
        // SAFETY: just made, and nobody else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(copy) })
    };
    let mut pipe = Pipe::new(copy(0)?, copy(1)?, true)?;
    pipe.send_bytes(GREETING);
    Ok(pipe)
}

fn serve(mut pipe: Pipe) -> Result<(), Fault> {
    let (start, later) = await_start(&mut pipe)?;
    let (sender, pieces) = sync_channel(OUTPUT_PIECES_MAX);
    let (workers, controls) = match start_all(&start, &sender) {
        Ok(started) => started,
        Err(fault) => {
            pipe.send(&Order::Unable { text: fault.to_string() });
            return Err(fault);
        }
    };
    drop(sender);
    let pace = Pace { heartbeat_ms: start.heartbeat_ms };
    let now = Instant::now();
    let (first_rank, silence) = (start.first_rank, Silence::new(now, pace.orphan_ms()));
    let mut agent = Agent {
        pipe,
        pace,
        first_rank,
        workers,
        _controls: controls,
        pieces,
        drained: false,
        silence,
        suspended: false,
        pulsed: now,
    };
    later.into_iter().for_each(|order| agent.obey(order));
    agent.watch();
    Ok(())
}

fn await_start(pipe: &mut Pipe) -> Result<(Start, Vec<Order>), Fault> {
    let deadline = Instant::now() + START_LIMIT;
    while pipe.open && Instant::now() < deadline {
        line::poll(&pipe.interests(), 100);
        pipe.flush();
        let mut orders = pipe.receive()?.into_iter();
        if let Some(Order::Start(start)) = orders.next() {
            return Ok((*start, orders.collect()));
        }
    }
    Err(Fault::BadCall("an agent is started by `kolo train --hosts`, which tells it what to do; nobody did".into()))
}

fn start_all(start: &Start, sender: &SyncSender<Piece>) -> Result<(Vec<Process>, Vec<Line>), Fault> {
    let (mut workers, mut controls) = (Vec::new(), Vec::new());
    for local in 0..start.count {
        let rank = start.first_rank + local;
        let (ours, theirs) = process::control_pair()?;
        let mut command = Command::new(&start.program);
        command.args(&start.arguments).current_dir(&start.directory);
        command.envs(start.environment.iter().filter_map(|pair| pair.split_once('=')));
        let numbers = [
            (launcher::RANK, rank),
            (launcher::WORLD, start.world),
            (launcher::LOCAL_RANK, local),
            (launcher::LOCAL_WORLD, start.count),
            (launcher::CONTROL_FD, theirs.as_raw_fd() as usize),
        ];
        command.envs(numbers.map(|(name, value)| (name, value.to_string())));
        let mut process = Process::start(command, theirs, Output::Pipes)?;
        if let Some((stdout, stderr)) = process.take_pipes() {
            forward(rank, Source::Out, stdout, sender.clone())?;
            forward(rank, Source::Err, stderr, sender.clone())?;
        }
        let mut line = Line::plain(ours)?;
        let (heartbeat_ms, key, address) = (start.heartbeat_ms, start.key.clone(), start.address.clone());
        let message = Message::Redirect { heartbeat_ms, key, address };
        line.send(&Envelope { job: start.job, generation: start.generation, message });
        workers.push(process);
        controls.push(line);
    }
    Ok((workers, controls))
}

fn forward(
    rank: usize,
    source: Source,
    from: impl Read + AsRawFd + Send + 'static,
    to: SyncSender<Piece>,
) -> Result<(), Fault> {
    let copy = move || logs::copy_lines(from, |bytes| to.send(Piece { rank, source, bytes: bytes.to_vec() }).is_ok());
    let started = std::thread::Builder::new().name("output".into()).spawn(copy);
    started.map(drop).map_err(|error| Fault::thread("starting a thread for output", &error))
}

impl Agent {
    fn watch(&mut self) {
        let mut left = self.workers.len();
        while left > 0 && self.pipe.open && (self.suspended || !self.silence.too_long(Instant::now())) {
            self.turn(self.pace.tick_ms());
            for local in 0..self.workers.len() {
                while let Some(change) = self.workers[local].look() {
                    left -= usize::from(matches!(change, Change::Exited(_)));
                    self.drain();
                    self.pipe.send(&Order::Changed { rank: self.first_rank + local, change });
                }
            }
        }
        // Whoever is left goes with us.
        self.workers.clear();
        let deadline = Instant::now() + Duration::from_millis(self.pace.heartbeat_ms);
        // Last words may still be on their way.
        while self.pipe.open && Instant::now() < deadline && !(self.drained && self.pipe.backlog() == 0) {
            self.turn(1);
        }
    }

    fn turn(&mut self, at_most_ms: u64) {
        line::poll(&self.pipe.interests(), at_most_ms);
        self.drain();
        if self.pulsed.elapsed() >= Duration::from_millis(self.pace.beat_ms()) {
            self.pulsed = Instant::now();
            self.pipe.send(&Order::Pulse);
        }
        self.pipe.flush();
        for order in self.pipe.receive().unwrap_or_default() {
            self.silence.hear(Instant::now());
            self.obey(order);
        }
    }

    /// Sends on what workers printed.
    fn drain(&mut self) {
        while self.pipe.backlog() < BACKLOG_BYTES_MAX {
            match self.pieces.try_recv() {
                Ok(Piece { rank, source, bytes }) => self.pipe.send(&Order::Output { rank, source, bytes }),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.drained = true;
                    return;
                }
            }
        }
    }

    fn obey(&mut self, order: Order) {
        self.suspended = order == Order::Suspend;
        if let Order::Signal { rank, signal } = order
            && let Some(worker) = rank.checked_sub(self.first_rank).and_then(|local| self.workers.get(local))
        {
            worker.signal(signal);
        }
    }
}
