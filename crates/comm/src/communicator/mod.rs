//! The collectives as a user calls them: typed and checked, in the caller's thread or in order on a thread of their own.

mod check;
mod collectives;
mod request;

pub use request::Request;

use crate::call::{CallKind, Fingerprint};
use crate::engine::Engine;
use crate::fault::Fault;
use crate::memory::SharedMemory;
use crate::task::CollectiveTask;
use crate::transport::Transport;
use crate::watch::Watch;
use kolo_base::lock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

/// A finished call, for timelines.
#[derive(Clone, Debug)]
pub struct CallSpan {
    pub call: Fingerprint,
    /// What the communicator is for; `None` for that of all ranks.
    pub label: Option<Arc<str>>,
    pub bytes: usize,
    pub start: Instant,
    pub end: Instant,
}

/// Sees every finished call.
pub type Recorder = Arc<dyn Fn(&CallSpan) + Send + Sync>;

/// Largest buffer of one call: what fits the smallest counter of any engine underneath.
pub const CALL_BYTES_MAX: usize = 1 << 40;

/// One rank's view of a group of ranks. Ranks make the same calls in the same order.
pub struct Communicator {
    shared: Arc<CommunicatorState>,
    engine: OnceLock<Engine>,
}

/// What the caller's thread and the engine's thread both need.
pub(crate) struct CommunicatorState {
    transport: Mutex<Box<dyn Transport>>,
    counters: Mutex<Counters>,
    pub watch: Arc<Watch>,
    recording: Arc<Recording>,
    label: Option<Arc<str>>,
    name: &'static str,
    id: u32,
    rank: usize,
    size: usize,
    reproducible: bool,
    /// Numbers for sub-communicators.
    children: AtomicU32,
}

/// Who sees calls, of a communicator and of those with a label that were split off it.
#[derive(Default)]
struct Recording {
    recorder: Mutex<Option<Recorder>>,
    /// Whether there is a recorder: short calls shall not pay for looking.
    is_on: AtomicBool,
}

impl Recording {
    fn recorder(&self) -> Option<Recorder> {
        if self.is_on.load(Ordering::Acquire) { lock(&self.recorder).clone() } else { None }
    }
}

/// Sequence numbers: of collectives, and of messages to and from each rank.
struct Counters {
    calls: u64,
    sent: Vec<u64>,
    received: Vec<u64>,
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator {} ({} of {} over {})", self.id(), self.rank(), self.size(), self.transport())
    }
}

/// Shows in the watch that a call runs, until this is dropped.
struct CallGuard<'a>(&'a Watch, u32);

impl<'a> CallGuard<'a> {
    fn enter(watch: &'a Watch, communicator: u32, fingerprint: &Fingerprint) -> Self {
        match communicator {
            0 => watch.enter(fingerprint),
            _ => watch.enter_group(),
        }
        Self(watch, communicator)
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        match self.1 {
            0 => self.0.leave(),
            _ => self.0.leave_group(),
        }
    }
}

impl CommunicatorState {
    /// Gives a request its number.
    pub(crate) fn number(&self, request: &Request) -> Fingerprint {
        let mut counters = lock(&self.counters);
        let counter = match request.kind {
            CallKind::Send => &mut counters.sent[request.peer],
            CallKind::Recv => &mut counters.received[request.peer],
            _ => &mut counters.calls,
        };
        let sequence = *counter;
        *counter += 1;
        drop(counters);
        self.fingerprint(request, sequence)
    }

    fn fingerprint(&self, request: &Request, sequence: u64) -> Fingerprint {
        let root = match request.kind {
            CallKind::Send => request.peer,
            CallKind::Recv => self.rank,
            _ => request.root,
        };
        Fingerprint {
            communicator: self.id,
            // Both ends of a message have one fingerprint.
            kind: if request.kind == CallKind::Recv { CallKind::Send } else { request.kind },
            element: request.element,
            reduction: request.reduction,
            root: root as u32,
            sequence,
            count: request.count as u64,
            name: request.name,
        }
    }

    fn task<'r>(&self, request: &'r Request, fingerprint: Fingerprint) -> CollectiveTask<'r> {
        CollectiveTask {
            fingerprint,
            input: request.input,
            output: request.output,
            input_bytes: request.input_bytes,
            output_bytes: request.output_bytes,
            send: &request.send,
            recv: &request.recv,
            peer: request.peer,
            reproducible: self.reproducible,
        }
    }

    /// Runs a numbered request to its end.
    ///
    /// # Safety
    /// As [`Communicator::call`].
    pub(crate) unsafe fn run(&self, request: &Request, fingerprint: Fingerprint) -> Result<(), Fault> {
        self.watch.check()?;
        let mut task = self.task(request, fingerprint);
        let mut transport = lock(&self.transport);
        let recorder = self.recording.recorder();
        let start = recorder.as_ref().map(|_| Instant::now());
        // The watch has one writer: the communicator of all ranks, whose calls can be compared between them.
        let guard = CallGuard::enter(&self.watch, self.id, &fingerprint);
        task.fingerprint.kind = request.kind;
        // SAFETY: the caller's promise, passed on.
        let outcome = unsafe { transport.run(&task) };
        drop(guard);
        if let (Some(recorder), Some(start)) = (recorder, start) {
            let bytes = request.input_bytes.max(request.output_bytes);
            recorder(&CallSpan { call: fingerprint, label: self.label.clone(), bytes, start, end: Instant::now() });
        }
        outcome
    }
}

impl Communicator {
    /// The communicator of all ranks of a transport.
    pub fn new(transport: Box<dyn Transport>, watch: Arc<Watch>, reproducible: bool) -> Self {
        Self::numbered(transport, watch, reproducible, (0, None, Arc::default()))
    }

    fn numbered(
        transport: Box<dyn Transport>,
        watch: Arc<Watch>,
        reproducible: bool,
        (id, label, recording): (u32, Option<Arc<str>>, Arc<Recording>),
    ) -> Self {
        let size = transport.size();
        let shared = CommunicatorState {
            name: transport.name(),
            id,
            rank: transport.rank(),
            size,
            transport: Mutex::new(transport),
            counters: Mutex::new(Counters { calls: 0, sent: vec![0; size], received: vec![0; size] }),
            watch,
            recording,
            label,
            reproducible,
            children: AtomicU32::new(0),
        };
        Self { shared: Arc::new(shared), engine: OnceLock::new() }
    }

    pub fn id(&self) -> u32 {
        self.shared.id
    }

    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    pub fn size(&self) -> usize {
        self.shared.size
    }

    /// Whether sums have the promised bits.
    pub fn reproducible(&self) -> bool {
        self.shared.reproducible
    }

    /// The transport's name.
    pub fn transport(&self) -> &'static str {
        self.shared.name
    }

    pub fn watch(&self) -> &Arc<Watch> {
        &self.shared.watch
    }

    /// Lets `recorder` see every call from now on, of this communicator and of those with a label that are split off it.
    pub fn record(&self, recorder: Option<Recorder>) {
        let recording = &self.shared.recording;
        recording.is_on.store(recorder.is_some(), Ordering::Release);
        *lock(&recording.recorder) = recorder;
    }

    /// Memory that collectives can reach directly. All ranks call it together with the same size.
    pub fn allocate(&self, bytes: usize) -> Result<Arc<SharedMemory>, Fault> {
        self.drain()?;
        lock(&self.shared.transport).allocate(bytes)
    }

    /// The same, but only rank 0's memory will be used, by all ranks: the others' takes none as long as nobody touches it.
    pub fn allocate_at_first(&self, bytes: usize) -> Result<Arc<SharedMemory>, Fault> {
        self.drain()?;
        lock(&self.shared.transport).allocate_at_first(bytes)
    }

    /// Ranks that name the same `color` form a new communicator, ordered by `key`, then by rank. All ranks call it.
    pub fn split(&self, color: i64, key: i64) -> Result<Communicator, Fault> {
        self.split_with(color, key, None, Arc::default())
    }

    /// The same with a label for what it is for. Whoever records this communicator sees the new one's calls, too.
    pub fn split_labelled(&self, color: i64, key: i64, label: &str) -> Result<Communicator, Fault> {
        self.split_with(color, key, Some(label.into()), Arc::clone(&self.shared.recording))
    }

    fn split_with(
        &self,
        color: i64,
        key: i64,
        label: Option<Arc<str>>,
        recording: Arc<Recording>,
    ) -> Result<Communicator, Fault> {
        let mut all = vec![0i64; 2 * self.size()];
        self.all_gather(&[color, key], &mut all)?;
        let mut members: Vec<usize> = (0..self.size()).filter(|rank| all[2 * rank] == color).collect();
        members.sort_by_key(|rank| (all[2 * rank + 1], *rank));
        let child = self.shared.children.fetch_add(1, Ordering::Relaxed);
        let id = child_id(self.id(), child, &members);
        let transport = lock(&self.shared.transport).split(&members, id)?;
        let watch = Arc::clone(&self.shared.watch);
        Ok(Self::numbered(transport, watch, self.shared.reproducible, (id, label, recording)))
    }

    /// Runs a call now, after all that were started.
    ///
    /// # Safety
    /// The request's pointers are valid for its bytes, and nobody else uses them until this returns.
    pub unsafe fn call(&self, request: &Request) -> Result<(), Fault> {
        self.check(request)?;
        self.drain()?;
        let fingerprint = self.shared.number(request);
        // SAFETY: the caller's promise, passed on.
        unsafe { self.shared.run(request, fingerprint) }
    }

    /// Starts a call, which the communicator's own thread runs, or whoever waits for it first; calls run in the order in which they were
    /// started.
    ///
    /// # Safety
    /// The request's pointers are valid for its bytes, and nobody else uses them until `wait` on the ticket returns.
    pub unsafe fn start(&self, request: Request) -> Result<Ticket, Fault> {
        self.check(&request)?;
        let engine = self.engine.get_or_init(|| Engine::new(Arc::clone(&self.shared)));
        let fingerprint = self.shared.number(&request);
        Ok(Ticket(engine.push(request, fingerprint)))
    }

    /// Waits until a started call is done.
    pub fn wait(&self, ticket: Ticket) -> Result<(), Fault> {
        self.engine.get().map_or(Ok(()), |engine| engine.wait(ticket.0))
    }

    /// Whether a started call is done.
    pub fn done(&self, ticket: Ticket) -> bool {
        self.engine.get().is_none_or(|engine| engine.done(ticket.0))
    }

    /// Waits for all started calls.
    pub fn drain(&self) -> Result<(), Fault> {
        self.engine.get().map_or(Ok(()), Engine::drain)
    }
}

/// The number of a sub-communicator: members compute it alike, and groups of different members get different ones.
fn child_id(parent: u32, child: u32, members: &[usize]) -> u32 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&parent.to_le_bytes()).update(&child.to_le_bytes());
    members.iter().for_each(|member| {
        hasher.update(&(*member as u64).to_le_bytes());
    });
    let bytes = hasher.finalize();
    let [a, b, c, d, ..] = *bytes.as_bytes();
    // The first and the last number are taken: by the world, and by what is no communicator.
    u32::from_le_bytes([a, b, c, d]).clamp(1, u32::MAX - 1)
}

/// A started call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u64);
