//! NCCL without GPUs, for tests: a table of functions of the same shape that moves bytes between threads, with memory of the host for that
//! of devices. As over the real one, calls return at once and are done later, when all ranks have made theirs. Sums of its own are added
//! from the last rank to the first, which is no order that we promise.

use crate::driver::Handle;
use crate::nccl::{Config, IN_PROGRESS, Nccl, NcclFunctions, SUCCESS, UNIQUE_ID_BYTES, UniqueId};
use kolo_base::lock;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

const INVALID_USAGE: c_int = 5;
const F32: c_int = 7;

/// Communicators that were given up, in all.
pub(crate) static ABORTED: AtomicUsize = AtomicUsize::new(0);

#[derive(Default)]
struct World {
    joined: usize,
    /// Messages from one rank to another.
    boxes: HashMap<(usize, usize), VecDeque<Vec<u8>>>,
    /// What each rank gave to the collective of this number.
    rounds: BTreeMap<usize, Vec<Option<Vec<u8>>>>,
}

struct Communicator {
    world: Arc<Mutex<World>>,
    rank: usize,
    size: usize,
    state: Mutex<Work>,
}

#[derive(Default)]
struct Work {
    /// Collectives so far.
    rounds: usize,
    pending: Vec<Pending>,
    failed: c_int,
}

/// Memory that is written when others have come.
enum Pending {
    Join,
    Receive { from: usize, to: usize, bytes: usize },
    Round { number: usize, kind: Round, to: usize },
}

#[derive(Clone, Copy)]
enum Round {
    AllReduce,
    ReduceScatter,
    AllGather,
}

/// A call in a group.
type Call = Box<dyn FnOnce()>;

thread_local! {
    static GROUP: RefCell<Option<Vec<Call>>> = const { RefCell::new(None) };
}

/// By the number in their id.
type Worlds = Mutex<HashMap<u64, Arc<Mutex<World>>>>;

static WORLDS: LazyLock<Worlds> = LazyLock::new(Mutex::default);

/// # Safety
/// A handle that `init_rank` gave and nobody gave back.
unsafe fn of(handle: Handle) -> &'static Communicator {
    // SAFETY: the caller's promise.
    unsafe { &*handle.cast::<Communicator>() }
}

fn width(dtype: c_int) -> usize {
    match dtype {
        0 | 1 => 1,
        6 | 9 => 2,
        4 | 5 | 8 => 8,
        _ => 4,
    }
}

/// # Safety
/// So many bytes.
unsafe fn read(from: *const c_void, bytes: usize) -> Vec<u8> {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(from.cast(), bytes) }.to_vec()
}

/// # Safety
/// So many bytes there.
unsafe fn write(to: usize, bytes: &[u8]) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
}

unsafe extern "C" fn version(to: *mut c_int) -> c_int {
    // SAFETY: the place of a number.
    unsafe { *to = 22_803 };
    SUCCESS
}
unsafe extern "C" fn unique_id(to: *mut UniqueId) -> c_int {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut id = [0; UNIQUE_ID_BYTES];
    id[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    // SAFETY: the place of an id.
    unsafe { *to = UniqueId(id) };
    SUCCESS
}
unsafe extern "C" fn init_rank(to: *mut Handle, size: c_int, id: UniqueId, rank: c_int, _: *const Config) -> c_int {
    let id = u64::from_le_bytes(std::array::from_fn(|at| id.0[at]));
    let world = Arc::clone(lock(&WORLDS).entry(id).or_default());
    lock(&world).joined += 1;
    let state = Mutex::new(Work { pending: vec![Pending::Join], ..Work::default() });
    let made = Communicator { world, rank: rank as usize, size: size as usize, state };
    // SAFETY: the place of a handle.
    unsafe { *to = Box::into_raw(Box::new(made)).cast() };
    IN_PROGRESS
}
unsafe extern "C" fn finalize(_: Handle) -> c_int {
    SUCCESS
}
unsafe extern "C" fn destroy(handle: Handle) -> c_int {
    // SAFETY: made by `init_rank`, and given back once.
    drop(unsafe { Box::from_raw(handle.cast::<Communicator>()) });
    SUCCESS
}
unsafe extern "C" fn abort(handle: Handle) -> c_int {
    ABORTED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: as above.
    unsafe { destroy(handle) }
}
unsafe extern "C" fn async_error(handle: Handle, to: *mut c_int) -> c_int {
    // SAFETY: a communicator, and the place of a number.
    unsafe { *to = of(handle).progress() };
    SUCCESS
}
unsafe extern "C" fn group_start() -> c_int {
    GROUP.set(Some(Vec::new()));
    SUCCESS
}
unsafe extern "C" fn group_end() -> c_int {
    GROUP.take().into_iter().flatten().for_each(|call| call());
    IN_PROGRESS
}

/// At the end of the group if there is one.
fn run(call: impl FnOnce() + 'static) -> c_int {
    let call: Call = Box::new(call);
    GROUP.with_borrow_mut(|group| match group {
        Some(calls) => calls.push(call),
        None => call(),
    });
    IN_PROGRESS
}

unsafe extern "C" fn send(
    from: *const c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    handle: Handle,
    _: Handle,
) -> c_int {
    // SAFETY: a communicator, and memory of that size.
    let (own, bytes) = unsafe { (of(handle), read(from, count * width(dtype))) };
    run(move || lock(&own.world).boxes.entry((own.rank, peer as usize)).or_default().push_back(bytes))
}
unsafe extern "C" fn receive(
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    handle: Handle,
    _: Handle,
) -> c_int {
    // SAFETY: a communicator.
    let own = unsafe { of(handle) };
    let (to, bytes) = (to as usize, count * width(dtype));
    run(move || lock(&own.state).pending.push(Pending::Receive { from: peer as usize, to, bytes }))
}

/// # Safety
/// A communicator, and memory of that size.
unsafe fn round(handle: Handle, kind: Round, from: *const c_void, bytes: usize, to: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    let (own, given, to) = unsafe { (of(handle), read(from, bytes), to as usize) };
    run(move || {
        let mut state = lock(&own.state);
        let number = state.rounds;
        state.rounds += 1;
        lock(&own.world).rounds.entry(number).or_insert_with(|| vec![None; own.size])[own.rank] = Some(given);
        state.pending.push(Pending::Round { number, kind, to });
    })
}
unsafe extern "C" fn all_reduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    _: c_int,
    handle: Handle,
    _: Handle,
) -> c_int {
    assert_eq!(dtype, F32, "the tests add f32");
    // SAFETY: the library's contract.
    unsafe { round(handle, Round::AllReduce, from, count * 4, to) }
}
unsafe extern "C" fn reduce_scatter(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    _: c_int,
    handle: Handle,
    _: Handle,
) -> c_int {
    assert_eq!(dtype, F32, "the tests add f32");
    // SAFETY: the library's contract.
    unsafe { round(handle, Round::ReduceScatter, from, count * 4 * of(handle).size, to) }
}
unsafe extern "C" fn all_gather(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    handle: Handle,
    _: Handle,
) -> c_int {
    // SAFETY: the library's contract.
    unsafe { round(handle, Round::AllGather, from, count * width(dtype), to) }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// What a collective gives to a rank.
fn result(kind: Round, given: &[Vec<u8>], rank: usize) -> Vec<u8> {
    if let Round::AllGather = kind {
        return given.concat();
    }
    let mut sum = vec![0.0f32; given[0].len() / 4];
    for rank in given.iter().rev() {
        sum.iter_mut().zip(floats(rank)).for_each(|(sum, value)| *sum += value);
    }
    let bytes: Vec<u8> = sum.iter().flat_map(|value| value.to_le_bytes()).collect();
    match kind {
        Round::ReduceScatter => bytes.chunks(bytes.len() / given.len()).nth(rank).unwrap_or_default().to_vec(),
        _ => bytes,
    }
}

impl Communicator {
    /// Does what can be done now.
    fn progress(&self) -> c_int {
        let mut state = lock(&self.state);
        let pending = std::mem::take(&mut state.pending);
        for one in pending {
            match self.attempt(&one) {
                SUCCESS => (),
                IN_PROGRESS => state.pending.push(one),
                failed => state.failed = failed,
            }
        }
        match (state.failed, state.pending.is_empty()) {
            (SUCCESS, true) => SUCCESS,
            (SUCCESS, false) => IN_PROGRESS,
            (failed, _) => failed,
        }
    }

    fn attempt(&self, pending: &Pending) -> c_int {
        let mut world = lock(&self.world);
        match *pending {
            Pending::Join => {
                if world.joined == self.size {
                    SUCCESS
                } else {
                    IN_PROGRESS
                }
            }
            Pending::Receive { from, to, bytes } => {
                let Some(found) = world.boxes.entry((from, self.rank)).or_default().pop_front() else {
                    return IN_PROGRESS;
                };
                if found.len() != bytes {
                    return INVALID_USAGE;
                }
                // SAFETY: the receiver's memory of that size.
                unsafe { write(to, &found) };
                SUCCESS
            }
            Pending::Round { number, kind, to } => {
                let Some(given) = world.rounds[&number].iter().cloned().collect::<Option<Vec<_>>>() else {
                    return IN_PROGRESS;
                };
                // SAFETY: the rank's memory of that size.
                unsafe { write(to, &result(kind, &given, self.rank)) };
                SUCCESS
            }
        }
    }
}

unsafe extern "C" fn error_text(code: c_int) -> *const c_char {
    if code == INVALID_USAGE { c"invalid usage".as_ptr() } else { c"unhandled error".as_ptr() }
}
unsafe extern "C" fn last_error(_: Handle) -> *const c_char {
    c"".as_ptr()
}

pub(crate) static NCCL: Nccl = Nccl {
    calls: NcclFunctions {
        version,
        unique_id,
        init_rank,
        finalize,
        destroy,
        abort,
        async_error,
        group_start,
        group_end,
        all_reduce,
        reduce_scatter,
        all_gather,
        send,
        receive,
    },
    error_text,
    last_error,
};
