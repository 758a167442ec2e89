//! Memory that collectives work on: private to the process, or mapped by all ranks of a host.

use crate::fault::Fault;
use std::sync::Arc;

const PAGE_BYTES: usize = 4096;
/// From this size on, large pages are asked for.
const LARGE_PAGE_BYTES: usize = 2 << 20;

/// A zeroed mapping. With a file descriptor behind it, other processes can map it too; it has no name in any file
/// system and is gone with the last process that maps it.
#[derive(Debug)]
pub struct SharedMemory {
    data: *mut u8,
    bytes: usize,
    /// Where each rank's memory of the same allocation is mapped in this process, own one included; empty if private.
    peers: Vec<usize>,
}

// SAFETY: plain bytes; who writes what when is the business of the collectives.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Memory of this process alone.
    pub fn private(bytes: usize) -> Result<Arc<Self>, Fault> {
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        let data = map(bytes, None)?;
        Ok(Arc::new(Self { data, bytes, peers: Vec::new() }))
    }

    /// Takes over a mapping and those of the peers.
    ///
    /// # Safety
    /// Each of `peers` is the start of a mapping of `bytes` bytes that nobody unmaps; `peers[rank]` is `data`.
    pub unsafe fn from_mappings(data: *mut u8, bytes: usize, peers: Vec<*mut u8>) -> Arc<Self> {
        Arc::new(Self { data, bytes, peers: peers.into_iter().map(|peer| peer as usize).collect() })
    }

    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes, "offset {offset} is outside {} bytes", self.bytes);
        // SAFETY: checked above.
        unsafe { self.data.add(offset) }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The same offset in the memory of `rank`, if this process maps it.
    pub fn peer(&self, rank: usize, offset: usize) -> Option<*mut u8> {
        let base = *self.peers.get(rank)?;
        (offset <= self.bytes).then_some((base + offset) as *mut u8)
    }

    /// The offset of an address that lies in this memory with `bytes` behind it.
    pub fn offset_of(&self, address: *const u8, bytes: usize) -> Option<usize> {
        let offset = (address as usize).checked_sub(self.data as usize)?;
        (offset.checked_add(bytes)? <= self.bytes).then_some(offset)
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        let own = [self.data as usize];
        let mappings = if self.peers.is_empty() { &own[..] } else { &self.peers[..] };
        for base in mappings {
            // SAFETY: mapped with this size, by us, and nobody holds it any more.
            unsafe { libc::munmap(*base as *mut libc::c_void, self.bytes) };
        }
    }
}

/// Maps zeroed memory, of a file if there is one.
pub(crate) fn map(bytes: usize, file: Option<libc::c_int>) -> Result<*mut u8, Fault> {
    let flags = if file.is_some() { libc::MAP_SHARED } else { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS };
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let data = unsafe {
        libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, file.unwrap_or(-1), 0)
    };
    if data == libc::MAP_FAILED {
        return Err(Fault::system(format!("mapping {bytes} bytes"), &std::io::Error::last_os_error()));
    }
    if bytes >= LARGE_PAGE_BYTES {
        // SAFETY: advice on our own mapping; failure is harmless and ignored.
        unsafe { libc::madvise(data, bytes, libc::MADV_HUGEPAGE) };
    }
    Ok(data.cast())
}
