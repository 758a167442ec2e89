//! The memory that ranks allocated together, and how a call finds out that its buffers lie in it.

use crate::fault::Fault;
use crate::memory::{self, SharedMemory};
use kolo_base::{ByteReader, lock};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use super::layout::NONCE_BYTES;
use super::system;

/// A communicator's allocations and those of its relatives: a buffer from the parent works directly in a child.
#[derive(Clone, Default)]
pub struct Registry(Arc<Mutex<Vec<SharedAllocation>>>);

struct SharedAllocation {
    id: u64,
    memory: Weak<SharedMemory>,
    /// The allocation's ranks by the numbers they had when the job connected.
    origins: Arc<[usize]>,
}

/// A buffer inside an allocation.
pub struct BufferLocation {
    pub id: u64,
    pub offset: usize,
    memory: Arc<SharedMemory>,
    origins: Arc<[usize]>,
}

impl BufferLocation {
    /// The buffer of a rank, by its number of now and that of the beginning, which has it at this offset; `None` if it
    /// would not fit.
    pub fn of(&self, rank: usize, origin: usize, offset: u64, bytes: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        if offset.checked_add(bytes)? > self.memory.bytes() {
            return None;
        }
        self.memory.peer(place(&self.origins, rank, origin)?, offset)
    }
}

/// Where a rank stands in an allocation: mostly where it stands in the communicator.
fn place(origins: &[usize], rank: usize, origin: usize) -> Option<usize> {
    match origins.get(rank) {
        Some(here) if *here == origin => Some(rank),
        _ => origins.iter().position(|other| *other == origin),
    }
}

impl Registry {
    fn allocations(&self) -> MutexGuard<'_, Vec<SharedAllocation>> {
        lock(&self.0)
    }

    pub fn add(&self, id: u64, memory: &Arc<SharedMemory>, origins: &[usize]) {
        let mut allocations = self.allocations();
        allocations.retain(|allocation| allocation.memory.strong_count() > 0);
        allocations.push(SharedAllocation { id, memory: Arc::downgrade(memory), origins: origins.into() });
    }

    /// The allocation around a buffer, if all ranks of `origins` take part in it.
    pub fn find(&self, address: *const u8, bytes: usize, origins: &[usize]) -> Option<BufferLocation> {
        self.allocations().iter().find_map(|allocation| {
            let memory = allocation.memory.upgrade()?;
            let offset = memory.offset_of(address, bytes)?;
            let takes_part = |(rank, origin): (usize, &usize)| place(&allocation.origins, rank, *origin).is_some();
            let all = origins.iter().enumerate().all(takes_part);
            all.then(|| BufferLocation { id: allocation.id, offset, memory, origins: Arc::clone(&allocation.origins) })
        })
    }
}

/// How a segment is described to those who shall map it.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    pub pid: u32,
    pub fd: RawFd,
    pub bytes: usize,
    pub nonce: [u8; NONCE_BYTES],
}

/// Bytes of an encoded [`Offer`].
pub const OFFER_BYTES: usize = 32;

impl Offer {
    pub fn encode(&self) -> [u8; OFFER_BYTES] {
        let mut bytes = [0; OFFER_BYTES];
        bytes[0..4].copy_from_slice(&self.pid.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.fd.to_le_bytes());
        bytes[8..16].copy_from_slice(&(self.bytes as u64).to_le_bytes());
        bytes[16..32].copy_from_slice(&self.nonce);
        bytes
    }

    pub fn decode(bytes: &[u8; OFFER_BYTES]) -> Self {
        let mut reader = ByteReader::new(bytes);
        let mut fields = || {
            let (pid, fd, bytes) = (reader.u32()?, reader.u32()? as RawFd, reader.u64()? as usize);
            Some(Self { pid, fd, bytes, nonce: reader.array()? })
        };
        fields().unwrap_or(Self { pid: 0, fd: -1, bytes: 0, nonce: [0; NONCE_BYTES] })
    }

    /// Makes memory of this size and writes a fresh nonce at its head.
    pub fn make(bytes: usize) -> Result<(Self, OwnedFd, *mut u8), Fault> {
        let file = system::anonymous_file(bytes)?;
        let data = memory::map(bytes, Some(file.as_raw_fd()))?;
        let nonce = crate::auth::random()?;
        // SAFETY: the mapping is fresh, page-aligned and larger than a nonce.
        unsafe { data.cast::<[u8; NONCE_BYTES]>().write(nonce) };
        Ok((Self { pid: std::process::id(), fd: file.as_raw_fd(), bytes, nonce }, file, data))
    }

    /// Maps what another process offered, if it is still that.
    pub fn accept(&self) -> Result<*mut u8, String> {
        let file = system::open_of_process(self.pid, self.fd, self.bytes)?;
        let data = memory::map(self.bytes, Some(file.as_raw_fd())).map_err(|fault| fault.to_string())?;
        // SAFETY: the mapping is page-aligned and larger than a nonce.
        if unsafe { data.cast::<[u8; NONCE_BYTES]>().read() } == self.nonce {
            return Ok(data);
        }
        // SAFETY: mapped just above, used by nobody.
        unsafe { libc::munmap(data.cast(), self.bytes) };
        Err(format!("descriptor {} of process {} is not the memory that was offered", self.fd, self.pid))
    }
}
