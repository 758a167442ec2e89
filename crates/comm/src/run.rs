//! A transport made of a wire and programs: picks an algorithm for each call, keeps its program, and runs it patiently.

use crate::algorithms::{Algorithm, CallShape};
use crate::call::CallKind;
use crate::choose::Costs;
use crate::element::Reduction;
use crate::execution::{Execution, PollOutcome, PreparedProgram};
use crate::fault::Fault;
use crate::task::{CollectiveTask, RankPart};
use crate::transport::Transport;
use crate::watch::{Backoff, Pause, Watch};
use crate::wire::SplitWire;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Bytes of one message at most, unless the caller says otherwise.
pub const SEGMENT_BYTES: usize = 128 << 10;
/// Programs kept. A training step makes far fewer different calls; beyond this, all are forgotten.
const PROGRAMS_MAX: usize = 1024;

/// Runs collectives as programs over a wire.
#[derive(Debug)]
pub struct Programs<W> {
    pub(crate) wire: W,
    watch: Arc<Watch>,
    costs: Costs,
    segment_bytes: usize,
    forced: Option<Algorithm>,
    cache: HashMap<u64, CachedProgram>,
    /// Scratch in words, for alignment.
    scratch: Vec<u64>,
    /// After a failed call the links' state is unknown, and so are all later calls.
    failed: Option<Fault>,
}

#[derive(Debug)]
struct CachedProgram {
    key: ProgramKey,
    send: Box<[RankPart]>,
    recv: Box<[RankPart]>,
    prepared: PreparedProgram,
}

/// What decides over a call's program, but for its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ProgramKey {
    kind: CallKind,
    width: usize,
    mean: bool,
    in_place: bool,
    reproducible: bool,
    root: usize,
    count: usize,
    peer: usize,
}

impl<W: SplitWire> Programs<W> {
    pub fn new(wire: W, watch: Arc<Watch>) -> Self {
        Self {
            wire,
            watch,
            costs: Costs::default(),
            segment_bytes: SEGMENT_BYTES,
            forced: None,
            cache: HashMap::new(),
            scratch: Vec::new(),
            failed: None,
        }
    }

    /// Messages of at most so many bytes. All ranks must say the same.
    pub fn segment_bytes(mut self, bytes: usize) -> Self {
        self.segment_bytes = bytes.max(1);
        self
    }

    /// The same in place; the old value. Programs are written anew.
    pub(crate) fn replace_segment_bytes(&mut self, bytes: usize) -> usize {
        self.cache.clear();
        std::mem::replace(&mut self.segment_bytes, bytes)
    }

    /// Uses this algorithm wherever it applies. All ranks must say the same.
    pub fn force(mut self, algorithm: Option<Algorithm>) -> Self {
        self.forced = algorithm;
        self
    }

    /// Chooses by these costs. All ranks must say the same.
    pub fn set_costs(&mut self, costs: Costs) {
        self.costs = costs;
        self.cache.clear();
    }

    pub fn costs(&self) -> Costs {
        self.costs
    }

    pub(crate) fn shape<'t>(&'t self, task: &CollectiveTask<'t>, in_place: bool) -> CallShape<'t> {
        CallShape {
            kind: task.kind(),
            rank: self.wire.rank(),
            size: self.wire.size(),
            root: task.root(),
            count: task.count(),
            mean: task.fingerprint.reduction == Reduction::Mean,
            in_place,
            send: task.send,
            recv: task.recv,
            peer: task.peer,
            hosts: self.wire.hosts(),
            segment: (self.segment_bytes / task.width()).max(1),
        }
    }

    /// The algorithm for a call: the same on all ranks, as they agree on what it depends on.
    pub fn algorithm(&self, task: &CollectiveTask<'_>) -> Algorithm {
        let shape = self.shape(task, false);
        match self.forced {
            Some(forced) if forced.applies(shape.kind, shape.size) => forced,
            _ => self.costs.choose(&shape, task.width(), task.reproducible),
        }
    }

    /// Makes the program for a call if it is not kept; its key.
    fn prepare(&mut self, task: &CollectiveTask<'_>, in_place: bool) -> u64 {
        let key = ProgramKey {
            kind: task.kind(),
            width: task.width(),
            mean: task.fingerprint.reduction == Reduction::Mean,
            in_place,
            reproducible: task.reproducible,
            root: task.root(),
            count: task.count(),
            peer: task.peer,
        };
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        for part in task.send.iter().chain(task.recv) {
            (part.offset, part.count).hash(&mut hasher);
        }
        let number = hasher.finish();
        if let Some(cache) = self.cache.get(&number)
            && cache.key == key
            && *cache.send == *task.send
            && *cache.recv == *task.recv
        {
            return number;
        }
        let program = self.algorithm(task).program(&self.shape(task, in_place));
        if self.cache.len() >= PROGRAMS_MAX {
            self.cache.clear();
        }
        let words = (program.scratch * task.width()).div_ceil(8);
        if self.scratch.len() < words {
            self.scratch.resize(words, 0);
        }
        let (send, recv) = (task.send.into(), task.recv.into());
        self.cache.insert(number, CachedProgram { key, send, recv, prepared: PreparedProgram::new(program) });
        number
    }

    /// # Safety
    /// As [`Transport::run`].
    unsafe fn attempt(&mut self, task: &CollectiveTask<'_>) -> Result<(), Fault> {
        let in_place = in_place(task, self.wire.rank(), self.wire.size())?;
        let number = self.prepare(task, in_place);
        let Some(cache) = self.cache.get_mut(&number) else {
            return Err(Fault::BadCall("a program was forgotten while it was needed".into()));
        };
        let (wire, watch) = (&mut self.wire, &*self.watch);
        let scratch = self.scratch.as_mut_ptr().cast();
        // SAFETY: the program was made for this task; scratch was grown to its size; the caller promised the buffers.
        let mut execution = unsafe { Execution::new(&mut cache.prepared, task, wire.size(), scratch) };
        let mut backoff = Backoff::new(watch);
        loop {
            match execution.poll(wire)? {
                PollOutcome::Done => return Ok(()),
                PollOutcome::Moved => backoff.reset(),
                PollOutcome::Idle => {
                    backoff.sleep_after(wire.turns());
                    let pause = backoff.turn(|waited_ms| {
                        let peer = wire.job_rank(execution.waits_for().unwrap_or(0));
                        let during = execution.call().to_string();
                        Fault::Stalled { peer, host: watch.host(peer), during, waited_ms }
                    })?;
                    if let Pause::Sleep(at_most) = pause {
                        wire.wait(at_most);
                    }
                }
            }
        }
    }
}

/// Whether input and output are one memory in the way a call's kind allows.
pub(crate) fn in_place(task: &CollectiveTask<'_>, rank: usize, size: usize) -> Result<bool, Fault> {
    if task.input_bytes == 0 || task.output_bytes == 0 {
        return Ok(false);
    }
    let shape = CallShape {
        kind: task.kind(),
        rank,
        size,
        root: 0,
        count: 0,
        mean: false,
        in_place: false,
        send: task.send,
        recv: task.recv,
        peer: 0,
        hosts: &[],
        segment: 1,
    };
    let [input, output] = shape.shifts().map(|shift| shift * task.width());
    // An input that lies `input` bytes into the shared memory starts it that much earlier.
    let start = |address: *const u8, shift: usize| (address as usize).wrapping_sub(shift);
    if start(task.input, input) == start(task.output, output) && task.kind() != CallKind::AllToAll {
        return Ok(true);
    }
    let (from, into) = (task.input as usize, task.output as usize);
    if from < into + task.output_bytes && into < from + task.input_bytes {
        let why = format!("{}: input and output overlap, but not as an in-place call allows", task.fingerprint);
        return Err(Fault::BadCall(why));
    }
    Ok(false)
}

impl<W: SplitWire> Transport for Programs<W> {
    fn name(&self) -> &'static str {
        self.wire.name()
    }

    fn rank(&self) -> usize {
        self.wire.rank()
    }

    fn size(&self) -> usize {
        self.wire.size()
    }

    unsafe fn run(&mut self, task: &CollectiveTask<'_>) -> Result<(), Fault> {
        if let Some(fault) = &self.failed {
            return Err(fault.clone());
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { self.attempt(task) }.inspect_err(|fault| {
            self.wire.cancel(fault);
            self.failed = Some(fault.clone());
        })
    }

    fn split(&mut self, members: &[usize], communicator: u32) -> Result<Box<dyn Transport>, Fault> {
        let wire = self.wire.split(members, communicator)?;
        let mut child = Programs::new(wire, Arc::clone(&self.watch)).segment_bytes(self.segment_bytes);
        child.forced = self.forced;
        child.costs = self.costs;
        Ok(Box::new(child))
    }
}
