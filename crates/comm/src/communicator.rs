//! The collectives as a user calls them: typed and checked, in the caller's thread or in order on a thread of their own.

use crate::call::{Fingerprint, Kind, short_name};
use crate::element::{Element, Reduction, Scalar};
use crate::engine::Engine;
use crate::fault::Fault;
use crate::memory::SharedMemory;
use crate::run::in_place;
use crate::task::{Part, Task, even_parts, packed_parts};
use crate::transport::Transport;
use crate::watch::Watch;
use kolo_base::lock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

/// A finished call, for timelines.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub call: Fingerprint,
    pub bytes: usize,
    pub start: Instant,
    pub end: Instant,
}

/// Sees every finished call.
pub type Recorder = Arc<dyn Fn(&Span) + Send + Sync>;

/// Largest buffer of one call: what fits the smallest counter of any engine underneath.
pub const CALL_BYTES_MAX: usize = 1 << 40;

/// One rank's view of a group of ranks. Ranks make the same calls in the same order.
pub struct Communicator {
    shared: Arc<Shared>,
    engine: OnceLock<Engine>,
}

/// What the caller's thread and the engine's thread both need.
pub(crate) struct Shared {
    transport: Mutex<Box<dyn Transport>>,
    counters: Mutex<Counters>,
    pub watch: Arc<Watch>,
    recorder: Mutex<Option<Recorder>>,
    /// Whether there is a recorder: short calls shall not pay for looking.
    recording: AtomicBool,
    name: &'static str,
    id: u32,
    rank: usize,
    size: usize,
    reproducible: bool,
    /// Numbers for sub-communicators.
    children: AtomicU32,
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

/// A call by its raw parts, for callers whose buffers outlive a borrow.
#[derive(Clone, Debug)]
pub struct Request {
    pub kind: Kind,
    pub element: Element,
    pub reduction: Reduction,
    pub root: usize,
    pub count: usize,
    pub input: *const u8,
    pub output: *mut u8,
    pub input_bytes: usize,
    pub output_bytes: usize,
    pub send: Arc<[Part]>,
    pub recv: Arc<[Part]>,
    pub peer: usize,
    pub name: [u8; crate::call::NAME_BYTES],
}

// SAFETY: the pointers are the caller's promise, made where the request is started.
unsafe impl Send for Request {}

impl Request {
    /// A call of this kind with nothing in it.
    pub fn new(kind: Kind, element: Element) -> Self {
        Self {
            kind,
            element,
            reduction: Reduction::Sum,
            root: 0,
            count: 0,
            input: std::ptr::null(),
            output: std::ptr::null_mut(),
            input_bytes: 0,
            output_bytes: 0,
            send: Arc::default(),
            recv: Arc::default(),
            peer: 0,
            name: [0; crate::call::NAME_BYTES],
        }
    }

    /// `name` shows in messages and timelines.
    pub fn named(mut self, name: &str) -> Self {
        self.name = short_name(name);
        self
    }

    fn input<T: Scalar>(mut self, data: &[T]) -> Self {
        (self.input, self.input_bytes) = (data.as_ptr().cast(), size_of_val(data));
        self
    }

    fn output<T: Scalar>(mut self, data: &mut [T]) -> Self {
        (self.output, self.output_bytes) = (data.as_mut_ptr().cast(), size_of_val(data));
        self
    }

    fn in_place<T: Scalar>(self, data: &mut [T]) -> Self {
        let input = data.as_ptr().cast();
        Self { input, input_bytes: size_of_val(data), ..self.output(data) }
    }
}

/// Elements of all parts; more than there is memory for is refused later.
fn total(counts: &[usize]) -> usize {
    counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
}

/// That a call runs, on the board: until this is dropped, whatever happens.
struct Stay<'a>(&'a Watch, u32);

impl<'a> Stay<'a> {
    fn enter(watch: &'a Watch, communicator: u32, fingerprint: &Fingerprint) -> Self {
        match communicator {
            0 => watch.enter(fingerprint),
            _ => watch.enter_group(),
        }
        Self(watch, communicator)
    }
}

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        match self.1 {
            0 => self.0.leave(),
            _ => self.0.leave_group(),
        }
    }
}

impl Shared {
    /// Gives a request its number.
    pub(crate) fn number(&self, request: &Request) -> Fingerprint {
        let mut counters = lock(&self.counters);
        let counter = match request.kind {
            Kind::Send => &mut counters.sent[request.peer],
            Kind::Recv => &mut counters.received[request.peer],
            _ => &mut counters.calls,
        };
        let sequence = *counter;
        *counter += 1;
        drop(counters);
        self.fingerprint(request, sequence)
    }

    fn fingerprint(&self, request: &Request, sequence: u64) -> Fingerprint {
        let root = match request.kind {
            Kind::Send => request.peer,
            Kind::Recv => self.rank,
            _ => request.root,
        };
        Fingerprint {
            communicator: self.id,
            // Both ends of a message have one fingerprint.
            kind: if request.kind == Kind::Recv { Kind::Send } else { request.kind },
            element: request.element,
            reduction: request.reduction,
            root: root as u32,
            sequence,
            count: request.count as u64,
            name: request.name,
        }
    }

    fn task<'r>(&self, request: &'r Request, fingerprint: Fingerprint) -> Task<'r> {
        Task {
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
        let recorder = if self.recording.load(Ordering::Acquire) { lock(&self.recorder).clone() } else { None };
        let start = recorder.as_ref().map(|_| Instant::now());
        // The board has one writer: the communicator of all ranks, whose calls can be compared between them.
        let stay = Stay::enter(&self.watch, self.id, &fingerprint);
        task.fingerprint.kind = request.kind;
        // SAFETY: the caller's promise, passed on.
        let outcome = unsafe { transport.run(&task) };
        drop(stay);
        if let (Some(recorder), Some(start)) = (recorder, start) {
            let bytes = request.input_bytes.max(request.output_bytes);
            recorder(&Span { call: fingerprint, bytes, start, end: Instant::now() });
        }
        outcome
    }
}

impl Communicator {
    /// The communicator of all ranks of a transport.
    pub fn new(transport: Box<dyn Transport>, watch: Arc<Watch>, reproducible: bool) -> Self {
        Self::numbered(transport, watch, reproducible, 0)
    }

    fn numbered(transport: Box<dyn Transport>, watch: Arc<Watch>, reproducible: bool, id: u32) -> Self {
        let size = transport.size();
        let shared = Shared {
            name: transport.name(),
            id,
            rank: transport.rank(),
            size,
            transport: Mutex::new(transport),
            counters: Mutex::new(Counters { calls: 0, sent: vec![0; size], received: vec![0; size] }),
            watch,
            recorder: Mutex::new(None),
            recording: AtomicBool::new(false),
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

    /// Lets `recorder` see every call from now on.
    pub fn record(&self, recorder: Option<Recorder>) {
        self.shared.recording.store(recorder.is_some(), Ordering::Release);
        *lock(&self.shared.recorder) = recorder;
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
        let mut all = vec![0i64; 2 * self.size()];
        self.all_gather(&[color, key], &mut all)?;
        let mut members: Vec<usize> = (0..self.size()).filter(|rank| all[2 * rank] == color).collect();
        members.sort_by_key(|rank| (all[2 * rank + 1], *rank));
        let child = self.shared.children.fetch_add(1, Ordering::Relaxed);
        let id = child_id(self.id(), child, &members);
        let transport = lock(&self.shared.transport).split(&members, id)?;
        Ok(Self::numbered(transport, Arc::clone(&self.shared.watch), self.shared.reproducible, id))
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

    /// Starts a call on the communicator's own thread; calls run in the order in which they were started.
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

    /// Refuses what no transport could do.
    fn check(&self, request: &Request) -> Result<(), Fault> {
        let bad = |text: String| Err(Fault::BadCall(text));
        let size = self.size();
        if request.root >= size {
            return bad(format!("{} with root {}, but there are {size} ranks", request.kind.name(), request.root));
        }
        if request.kind.is_message() && (request.peer >= size || request.peer == self.rank()) {
            return bad(format!(
                "{} between rank {} and itself or nobody ({})",
                request.kind.name(),
                self.rank(),
                request.peer
            ));
        }
        if request.input_bytes.max(request.output_bytes) > CALL_BYTES_MAX {
            return bad(format!("{} of more than {CALL_BYTES_MAX} bytes", request.kind.name()));
        }
        let needs_parts = matches!(
            request.kind,
            Kind::ReduceScatter | Kind::Gather | Kind::AllGather | Kind::Scatter | Kind::AllToAll
        );
        if needs_parts && request.recv.len() != size {
            return bad(format!("{} with {} parts for {size} ranks", request.kind.name(), request.recv.len()));
        }
        if request.kind == Kind::AllToAll && request.send.len() != size {
            return bad(format!("all_to_all with {} parts to send for {size} ranks", request.send.len()));
        }
        if matches!(request.reduction, Reduction::Mean) && matches!(request.kind, Kind::Scan | Kind::ExclusiveScan) {
            return bad("a scan has no mean; use sum".into());
        }
        let (input, output) = self.spans(request);
        let width = request.element.bytes();
        if input.saturating_mul(width) > request.input_bytes {
            return bad(format!(
                "{} reads {input} elements, but the input has {}",
                request.kind.name(),
                request.input_bytes / width
            ));
        }
        if output.saturating_mul(width) > request.output_bytes {
            return bad(format!(
                "{} writes {output} elements, but the output has {}",
                request.kind.name(),
                request.output_bytes / width
            ));
        }
        let fingerprint = self.shared.fingerprint(request, 0);
        in_place(&self.shared.task(request, fingerprint), self.rank(), size).map(|_| ())
    }

    /// Elements the request reaches of its input and output.
    fn spans(&self, request: &Request) -> (usize, usize) {
        let end = |parts: &[Part]| {
            parts.iter().filter(|p| p.count > 0).map(|part| part.offset.saturating_add(part.count)).max().unwrap_or(0)
        };
        let own = request.recv.get(self.rank()).map_or(0, |part| part.count);
        let root = request.root == self.rank();
        match request.kind {
            Kind::Barrier => (0, 0),
            Kind::Broadcast | Kind::Recv => (0, request.count),
            Kind::Send => (request.count, 0),
            Kind::Reduce => (request.count, if root { request.count } else { 0 }),
            Kind::AllReduce | Kind::Scan | Kind::ExclusiveScan => (request.count, request.count),
            Kind::ReduceScatter => (end(&request.recv), own),
            Kind::Gather => (own, if root { end(&request.recv) } else { 0 }),
            Kind::AllGather => (own, end(&request.recv)),
            Kind::Scatter => (if root { end(&request.recv) } else { 0 }, own),
            Kind::AllToAll => (end(&request.send), end(&request.recv)),
        }
    }

    /// Runs a request whose buffers are borrowed by the caller's arguments.
    fn now(&self, request: Request) -> Result<(), Fault> {
        // SAFETY: the typed methods below take their buffers from borrows that outlive the call.
        unsafe { self.call(&request) }
    }

    pub fn barrier(&self) -> Result<(), Fault> {
        self.now(Request::new(Kind::Barrier, Element::U8))
    }

    /// The root's data, to all.
    pub fn broadcast<T: Scalar>(&self, data: &mut [T], root: usize) -> Result<(), Fault> {
        let count = data.len();
        self.now(Request { root, count, ..Request::new(Kind::Broadcast, T::ELEMENT).output(data) })
    }

    pub fn all_reduce<T: Scalar>(&self, data: &mut [T], reduction: Reduction) -> Result<(), Fault> {
        let count = data.len();
        self.now(Request { reduction, count, ..Request::new(Kind::AllReduce, T::ELEMENT).in_place(data) })
    }

    /// Combines all ranks' inputs into the root's `output`; the others' stays as it is.
    pub fn reduce<T: Scalar>(
        &self,
        input: &[T],
        output: &mut [T],
        reduction: Reduction,
        root: usize,
    ) -> Result<(), Fault> {
        let request = Request::new(Kind::Reduce, T::ELEMENT).input(input).output(output);
        self.now(Request { reduction, root, count: input.len(), ..request })
    }

    /// Combines all inputs and leaves each rank its equal part.
    pub fn reduce_scatter<T: Scalar>(&self, input: &[T], output: &mut [T], reduction: Reduction) -> Result<(), Fault> {
        self.reduce_scatter_v(input, output, &self.equal(input.len()), reduction)
    }

    /// With parts of these counts.
    pub fn reduce_scatter_v<T: Scalar>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        reduction: Reduction,
    ) -> Result<(), Fault> {
        let request = Request::new(Kind::ReduceScatter, T::ELEMENT).input(input).output(output);
        self.now(Request { reduction, count: total(counts), recv: packed_parts(counts).into(), ..request })
    }

    /// Equal parts of all ranks, to the root.
    pub fn gather<T: Scalar>(&self, input: &[T], output: &mut [T], root: usize) -> Result<(), Fault> {
        self.gather_v(input, output, &vec![input.len(); self.size()], root)
    }

    pub fn gather_v<T: Scalar>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        root: usize,
    ) -> Result<(), Fault> {
        let request = Request::new(Kind::Gather, T::ELEMENT).input(input).output(output);
        self.now(Request { root, count: total(counts), recv: packed_parts(counts).into(), ..request })
    }

    /// Equal parts of all ranks, to all.
    pub fn all_gather<T: Scalar>(&self, input: &[T], output: &mut [T]) -> Result<(), Fault> {
        self.all_gather_v(input, output, &vec![input.len(); self.size()])
    }

    pub fn all_gather_v<T: Scalar>(&self, input: &[T], output: &mut [T], counts: &[usize]) -> Result<(), Fault> {
        let request = Request::new(Kind::AllGather, T::ELEMENT).input(input).output(output);
        self.now(Request { count: total(counts), recv: packed_parts(counts).into(), ..request })
    }

    /// The root's input, an equal part to each.
    pub fn scatter<T: Scalar>(&self, input: &[T], output: &mut [T], root: usize) -> Result<(), Fault> {
        self.scatter_v(input, output, &vec![output.len(); self.size()], root)
    }

    pub fn scatter_v<T: Scalar>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        root: usize,
    ) -> Result<(), Fault> {
        let request = Request::new(Kind::Scatter, T::ELEMENT).input(input).output(output);
        self.now(Request { root, count: total(counts), recv: packed_parts(counts).into(), ..request })
    }

    /// Part `j` of rank `i`'s input becomes part `i` of rank `j`'s output. All parts have one size.
    pub fn all_to_all<T: Scalar>(&self, input: &[T], output: &mut [T]) -> Result<(), Fault> {
        if !input.len().is_multiple_of(self.size()) {
            let (count, size) = (input.len(), self.size());
            return Err(Fault::BadCall(format!(
                "all_to_all of {count} elements, which is no multiple of {size} ranks"
            )));
        }
        let counts = self.equal(input.len());
        self.all_to_all_v(input, &counts, output, &counts)
    }

    pub fn all_to_all_v<T: Scalar>(
        &self,
        input: &[T],
        send: &[usize],
        output: &mut [T],
        recv: &[usize],
    ) -> Result<(), Fault> {
        let request = Request::new(Kind::AllToAll, T::ELEMENT).input(input).output(output);
        self.now(Request { send: packed_parts(send).into(), recv: packed_parts(recv).into(), ..request })
    }

    /// The combination of this rank's data and that of all before it.
    pub fn scan<T: Scalar>(&self, data: &mut [T], reduction: Reduction) -> Result<(), Fault> {
        let count = data.len();
        self.now(Request { reduction, count, ..Request::new(Kind::Scan, T::ELEMENT).in_place(data) })
    }

    /// The combination of the data of all ranks before this one; rank 0's stays as it is.
    pub fn exclusive_scan<T: Scalar>(&self, data: &mut [T], reduction: Reduction) -> Result<(), Fault> {
        let count = data.len();
        self.now(Request { reduction, count, ..Request::new(Kind::ExclusiveScan, T::ELEMENT).in_place(data) })
    }

    pub fn send<T: Scalar>(&self, data: &[T], to: usize) -> Result<(), Fault> {
        self.now(Request { peer: to, count: data.len(), ..Request::new(Kind::Send, T::ELEMENT).input(data) })
    }

    pub fn recv<T: Scalar>(&self, data: &mut [T], from: usize) -> Result<(), Fault> {
        let count = data.len();
        self.now(Request { peer: from, count, ..Request::new(Kind::Recv, T::ELEMENT).output(data) })
    }

    fn equal(&self, count: usize) -> Vec<usize> {
        even_parts(count, self.size()).iter().map(|part| part.count).collect()
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
