//! The ranks of one host over memory they all map.
//!
//! Memory comes from `memfd_create`: it has no name in any file system, and is gone with the last process that maps it,
//! however that ends. A rank tells the others process and descriptor; they open it through `/proc` and recognise it by
//! a random nonce. Collectives go in rounds (`rounds`): small calls and private buffers through staging buffers (`exchange`), large
//! ones on memory from [`Transport::allocate`] straight in each other's buffers (`direct`).

mod direct;
mod exchange;
mod layout;
mod message;
mod registry;
mod rounds;
mod system;
mod yield_backoff;

pub use system::resident_bytes_of_peers;

use crate::call::{CallKind, Fingerprint, short_name};
use crate::element::{ElementType, Reduction};
use crate::fault::Fault;
use crate::memory::SharedMemory;
use crate::task::CollectiveTask;
use crate::transport::{Bootstrap, Transport};
use crate::watch::Watch;
use direct::BufferAddresses;
use kolo_base::ByteReader;
use layout::{Control, NONCE_BYTES, RANKS_MAX};
use registry::{OFFER_BYTES, Offer, Registry};
use rounds::{LocalPeers, Rounds};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use system::{PROCESSOR_WORDS, ProcessHandle};

/// Up to this size a call goes through the staging buffers, wherever its buffers are.
const STAGED_CALL_BYTES: usize = 2 << 10;
/// Largest allocation of one rank.
const ALLOCATION_BYTES_MAX: usize = 1 << 40;
const PAGE_BYTES: usize = 4096;

struct Shm {
    rounds: Rounds,
    registry: Registry,
    communicator: u32,
    /// Allocations made so far.
    allocations: u32,
    /// Space for the addresses of one call.
    sources: Vec<*const u8>,
    addresses: BufferAddresses,
    /// A failed communicator stays failed.
    fault: Option<Fault>,
}

// SAFETY: the addresses are only used during one call.
unsafe impl Send for Shm {}

/// Joins the ranks of one host. All call it together.
pub fn connect(
    rank: usize,
    size: usize,
    watch: Arc<Watch>,
    bootstrap: &mut dyn Bootstrap,
) -> Result<Box<dyn Transport>, Fault> {
    if size > RANKS_MAX {
        return Err(Fault::BadCall(format!("{size} ranks on one host, but shared memory serves at most {RANKS_MAX}")));
    }
    let made = if rank == 0 { Some(make_control(size)?) } else { None };
    let offer = made.as_ref().map_or([0; OFFER_BYTES], |(offer, ..)| offer.encode());
    let hello = bootstrap.all_gather(&ShmHello::mine(offer).encode())?;
    let hellos = hello.iter().map(|bytes| ShmHello::decode(bytes)).collect::<Option<Vec<ShmHello>>>();
    let Some(hellos) = hellos.filter(|hellos| hellos.len() == size) else {
        return Err(Fault::Rejected { from: "the bootstrap".into(), why: "an answer has another size".into() });
    };
    // The descriptor stays open until all have mapped what is behind it.
    let (_file, control) = match made {
        Some((_, file, control)) => (Some(file), Ok(control)),
        None => (None, map_control(&hellos[0].offer, size)),
    };
    let said = control.as_ref().err().map_or(String::new(), |fault| fault.to_string());
    let said = bootstrap.all_gather(said.as_bytes())?;
    let control = control?;
    if let Some(failed) = said.iter().position(|text| !text.is_empty()) {
        let why = String::from_utf8_lossy(&said[failed]).into_owned();
        return Err(Fault::Failed { peer: failed, host: watch.host(failed), why });
    }
    let oversubscribed = size > processors(&hellos);
    let peers = LocalPeers {
        processes: hellos.iter().map(|hello| Arc::new(ProcessHandle::new(hello.pid))).collect(),
        origins: (0..size).collect(),
        oversubscribed,
        // Where ranks sleep often, a fence for each round is cheaper than one for all at each sleep.
        barrier: !oversubscribed && hellos.iter().all(|hello| hello.barrier),
    };
    Ok(Box::new(Shm::new(Rounds::new(control, rank, watch, peers), Registry::default(), 0)))
}

/// What a rank says of itself on joining.
struct ShmHello {
    pid: u32,
    barrier: bool,
    /// Processors that its share of time amounts to, if that is less than those it may run on.
    quota: u32,
    processors: [u64; PROCESSOR_WORDS],
    offer: [u8; OFFER_BYTES],
}

const HELLO_BYTES: usize = 16 + 8 * PROCESSOR_WORDS + OFFER_BYTES;

impl ShmHello {
    fn mine(offer: [u8; OFFER_BYTES]) -> Self {
        let processors = system::processors();
        let allowed: u32 = processors.iter().map(|word| word.count_ones()).sum();
        let usable = std::thread::available_parallelism().map_or(u32::MAX, |number| number.get() as u32);
        let quota = if usable < allowed { usable } else { u32::MAX };
        Self { pid: std::process::id(), barrier: system::register_barrier(), quota, processors, offer }
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HELLO_BYTES);
        bytes.extend(self.pid.to_le_bytes());
        bytes.extend(u32::from(self.barrier).to_le_bytes());
        bytes.extend(self.quota.to_le_bytes());
        bytes.extend([0; 4]);
        self.processors.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.extend(self.offer);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = ByteReader::new(bytes);
        let (pid, barrier, quota) = (reader.u32()?, reader.u32()? != 0, reader.u32()?);
        reader.skip(4)?;
        let mut processors = [0; PROCESSOR_WORDS];
        for word in &mut processors {
            *word = reader.u64()?;
        }
        let offer = reader.array()?;
        reader.is_empty().then_some(Self { pid, barrier, quota, processors, offer })
    }
}

/// Processors that the ranks have together.
fn processors(hellos: &[ShmHello]) -> usize {
    let union = (0..PROCESSOR_WORDS).map(|at| hellos.iter().fold(0, |all, hello| all | hello.processors[at]));
    let together = union.map(u64::count_ones).sum::<u32>();
    hellos.iter().map(|hello| hello.quota).fold(together, u32::min) as usize
}

/// Makes a control segment for others to map.
fn make_control(size: usize) -> Result<(Offer, OwnedFd, Control), Fault> {
    let (offer, file, data) = Offer::make(Control::bytes_for(size))?;
    // SAFETY: mapped with this size just now.
    Ok((offer, file, unsafe { Control::new(data, size) }))
}

/// Maps the control segment that another rank offered.
fn map_control(offer: &[u8; OFFER_BYTES], size: usize) -> Result<Control, Fault> {
    let refused = |why: String| Fault::System {
        what: "mapping the memory of the ranks of this host (all must run on one host, in one container, as one user)"
            .into(),
        error: why,
    };
    let offer = Offer::decode(offer);
    if offer.bytes != Control::bytes_for(size) {
        return Err(refused(format!("it has {} bytes, not {}", offer.bytes, Control::bytes_for(size))));
    }
    // SAFETY: mapped with this size just now.
    offer.accept().map(|data| unsafe { Control::new(data, size) }).map_err(refused)
}

/// Mappings of one size, by rank, of which nobody else knows yet; null where there is none.
struct Mappings {
    list: Vec<*mut u8>,
    bytes: usize,
}

impl Drop for Mappings {
    fn drop(&mut self) {
        for data in self.list.iter().filter(|data| !data.is_null()) {
            // SAFETY: mapped with this size, and handed to nobody.
            unsafe { libc::munmap(data.cast(), self.bytes) };
        }
    }
}

impl Shm {
    fn new(rounds: Rounds, registry: Registry, communicator: u32) -> Self {
        let sources = Vec::with_capacity(rounds.size);
        Self {
            rounds,
            registry,
            communicator,
            allocations: 0,
            sources,
            addresses: BufferAddresses::default(),
            fault: None,
        }
    }

    /// # Safety
    /// As [`Transport::run`].
    unsafe fn collective(&mut self, task: &CollectiveTask<'_>) -> Result<(), Fault> {
        let counts = task.recv.iter().map(|part| part.count);
        // What all read of one input, they must read at the same place.
        let offsets = task.recv.iter().map(|part| part.offset);
        match task.kind() {
            CallKind::Gather | CallKind::AllGather => self.rounds.enter_with_parts(&task.fingerprint, counts),
            CallKind::Scatter | CallKind::ReduceScatter => {
                self.rounds.enter_with_parts(&task.fingerprint, counts.chain(offsets));
            }
            _ => self.rounds.enter(&task.fingerprint),
        }
        let large = task.count() * task.width() > STAGED_CALL_BYTES;
        // A scan in place would overwrite what later ranks still read.
        let direct =
            !matches!(task.kind(), CallKind::Scan | CallKind::ExclusiveScan | CallKind::AllToAll | CallKind::Barrier);
        // SAFETY: the caller's promise, passed on.
        unsafe {
            if large && direct && self.direct(task)? {
                return Ok(());
            }
            self.exchange(task)
        }
    }

    /// Tells the others of a failure, and remembers it.
    fn settle<T>(&mut self, outcome: Result<T, Fault>) -> Result<T, Fault> {
        if let Err(fault) = &outcome {
            self.rounds.fail(fault);
            self.fault = Some(fault.clone());
        }
        outcome
    }

    /// A call of our own, so that ranks which do something else at this place are told apart.
    fn own_call(&self, name: &str, count: usize) -> Fingerprint {
        Fingerprint {
            communicator: self.communicator,
            kind: CallKind::AllGather,
            element: ElementType::U8,
            reduction: Reduction::Sum,
            root: 0,
            sequence: u64::from(self.allocations),
            count: count as u64,
            name: short_name(name),
        }
    }

    /// One round with a small payload; the others' are then in their staging buffers.
    fn exchange_small<const BYTES: usize>(
        &mut self,
        call: &Fingerprint,
        mine: [u8; BYTES],
    ) -> Result<Vec<[u8; BYTES]>, Fault> {
        self.rounds.enter(call);
        // SAFETY: a staging buffer holds it.
        unsafe { self.rounds.own_staging().payload(BYTES).cast::<[u8; BYTES]>().write(mine) };
        self.rounds.publish();
        self.rounds.await_all(call)?;
        // SAFETY: all wrote as many bytes.
        Ok((0..self.rounds.size)
            .map(|rank| unsafe { self.rounds.staging(rank).payload(BYTES).cast::<[u8; BYTES]>().read() })
            .collect())
    }

    /// Maps the memory that each other rank offers; which rank of the job's could not be mapped, and why.
    fn map_offers(&self, offers: &[[u8; OFFER_BYTES]], mappings: &mut Mappings) -> Option<(usize, String)> {
        for (rank, offer) in offers.iter().map(Offer::decode).enumerate().filter(|(rank, _)| *rank != self.rounds.rank)
        {
            match offer.accept() {
                Ok(data) => mappings.list[rank] = data,
                Err(why) => return Some((self.rounds.peers.origins[rank], why)),
            }
        }
        None
    }

    fn allocate_together(&mut self, bytes: usize, populate: bool) -> Result<Arc<SharedMemory>, Fault> {
        if bytes > ALLOCATION_BYTES_MAX {
            return Err(Fault::BadCall(format!("an allocation of {bytes} bytes is more than {ALLOCATION_BYTES_MAX}")));
        }
        let call = self.own_call("allocate", bytes);
        let bytes = bytes.max(NONCE_BYTES).next_multiple_of(PAGE_BYTES);
        let (offer, file, own) = Offer::make(bytes)?;
        let mut mappings = Mappings { list: vec![std::ptr::null_mut(); self.rounds.size], bytes };
        mappings.list[self.rounds.rank] = own;
        // SAFETY: mapped just now.
        let populated = if populate { unsafe { system::populate(own, bytes) } } else { Ok(()) };
        let offers = self.exchange_small(&call, offer.encode())?;
        let refused = self.map_offers(&offers, &mut mappings);
        let failed = populated.is_err() || refused.is_some();
        let failures = self.exchange_small(&call, [u8::from(failed)])?;
        // SAFETY: all have compared the nonce, and nobody uses the memory yet.
        unsafe { own.cast::<[u8; NONCE_BYTES]>().write([0; NONCE_BYTES]) };
        drop(file);
        self.exchange_small(&call, [0])?;
        if let Some(rank) = failures.iter().position(|failed| *failed != [0]) {
            populated?;
            let rank = self.rounds.peers.origins[rank];
            let why =
                refused.map_or_else(|| format!("rank {rank} failed"), |(rank, why)| format!("of rank {rank}: {why}"));
            return Err(Fault::System { what: format!("sharing {bytes} bytes of memory"), error: why });
        }
        self.allocations += 1;
        // SAFETY: all are mappings of this size that only the result will unmap.
        let memory = unsafe { SharedMemory::from_mappings(own, bytes, std::mem::take(&mut mappings.list)) };
        let id = u64::from(self.communicator) << 32 | u64::from(self.allocations);
        self.registry.add(id, &memory, &self.rounds.peers.origins);
        Ok(memory)
    }

    fn allocate_settled(&mut self, bytes: usize, populate: bool) -> Result<Arc<SharedMemory>, Fault> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        let outcome = self.allocate_together(bytes, populate);
        self.settle(outcome)
    }

    /// Member 0 makes a segment and tells the others through their rings.
    fn split_control(&mut self, members: &[usize], communicator: u32) -> Result<Control, Fault> {
        let size = members.len();
        let call = Fingerprint { communicator, kind: CallKind::Send, ..self.own_call("split", size) };
        if members[0] != self.rounds.rank {
            let mut offer = [0; OFFER_BYTES];
            // SAFETY: the buffer has this length.
            unsafe { self.recv_bytes(members[0], &call, offer.as_mut_ptr(), OFFER_BYTES)? };
            let control = map_control(&offer, size)?;
            // SAFETY: of no bytes.
            unsafe { self.send_bytes(members[0], &call, std::ptr::null(), 0)? };
            return Ok(control);
        }
        let (offer, file, control) = make_control(size)?;
        for member in &members[1..] {
            // SAFETY: the buffer has this length.
            unsafe { self.send_bytes(*member, &call, offer.encode().as_ptr(), OFFER_BYTES)? };
        }
        for member in &members[1..] {
            // SAFETY: as above.
            unsafe { self.recv_bytes(*member, &call, std::ptr::null_mut(), 0)? };
        }
        drop(file);
        Ok(control)
    }
}

impl Transport for Shm {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn rank(&self) -> usize {
        self.rounds.rank
    }

    fn size(&self) -> usize {
        self.rounds.size
    }

    unsafe fn run(&mut self, task: &CollectiveTask<'_>) -> Result<(), Fault> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        // SAFETY: the caller's promise, passed on.
        let outcome = unsafe {
            match task.kind().is_message() {
                true => self.message(task),
                false => self.collective(task),
            }
        };
        self.settle(outcome)
    }

    fn split(&mut self, members: &[usize], communicator: u32) -> Result<Box<dyn Transport>, Fault> {
        let Some(rank) = members.iter().position(|member| *member == self.rounds.rank) else {
            return Err(Fault::BadCall(format!("rank {} splits off a group it is not in", self.rounds.rank)));
        };
        let control = self.split_control(members, communicator);
        let control = self.settle(control)?;
        let mine = &self.rounds.peers;
        let peers = LocalPeers {
            processes: members.iter().map(|member| Arc::clone(&mine.processes[*member])).collect(),
            origins: members.iter().map(|member| mine.origins[*member]).collect(),
            ..*mine
        };
        let rounds = Rounds::new(control, rank, Arc::clone(&self.rounds.watch), peers);
        Ok(Box::new(Shm::new(rounds, self.registry.clone(), communicator)))
    }

    fn allocate(&mut self, bytes: usize) -> Result<Arc<SharedMemory>, Fault> {
        self.allocate_settled(bytes, true)
    }

    fn allocate_at_first(&mut self, bytes: usize) -> Result<Arc<SharedMemory>, Fault> {
        self.allocate_settled(bytes, self.rounds.rank == 0)
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        self.rounds.leave();
    }
}
