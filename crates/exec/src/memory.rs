//! One aligned, zeroed piece of memory.

use kolo_graph::layout::ALIGNMENT;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::io;

/// From this size on, memory is mapped and large pages are asked for: a step walks its arenas end to end, and page walks
/// would cost more than the data.
const LARGE_PAGE_BYTES: usize = 2 << 20;

#[derive(Debug)]
pub struct Memory {
    data: *mut u8,
    bytes: usize,
    owner: Owner,
}

enum Owner {
    Allocator(Layout),
    /// A mapping of this start and length, which holds the memory.
    Mapping(usize, usize),
    /// Whoever made the memory; it is given back when this is dropped.
    Keeper(#[allow(dead_code)] Box<dyn Any + Send + Sync>),
}

impl std::fmt::Debug for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Owner::Allocator(_) => "allocator",
            Owner::Mapping(..) => "mapping",
            Owner::Keeper(_) => "keeper",
        })
    }
}

// SAFETY: the memory is plain bytes; who writes what when is the executor's business.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Ends the program if the system refuses so much; see [`Memory::try_new`].
    pub fn new(bytes: usize) -> Self {
        let asked = Layout::from_size_align(bytes, ALIGNMENT).unwrap_or(Layout::new::<u8>());
        Self::try_new(bytes).unwrap_or_else(|_| handle_alloc_error(asked))
    }

    pub fn try_new(bytes: usize) -> io::Result<Self> {
        if bytes >= LARGE_PAGE_BYTES
            && let Some(mapped) = Self::mapped(bytes)
        {
            return Ok(mapped);
        }
        let refused = || io::Error::new(io::ErrorKind::OutOfMemory, format!("{bytes} bytes of memory"));
        let layout = Layout::from_size_align(bytes.max(ALIGNMENT), ALIGNMENT).map_err(|_| refused())?;
        // SAFETY: the layout is not empty.
        let data = unsafe { alloc_zeroed(layout) };
        if data.is_null() {
            return Err(refused());
        }
        Ok(Self { data, bytes: layout.size(), owner: Owner::Allocator(layout) })
    }

    /// Fresh pages on a large page's border. An allocator would zero memory that is aligned like this by writing to it,
    /// before large pages could be asked for.
    fn mapped(bytes: usize) -> Option<Self> {
        let reserved = bytes.checked_add(LARGE_PAGE_BYTES)?;
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), reserved, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        let skipped = start.cast::<u8>().align_offset(LARGE_PAGE_BYTES);
        // SAFETY: at most a large page is skipped, and one more than needed was mapped.
        let data = unsafe { start.cast::<u8>().add(skipped) };
        #[cfg(target_os = "linux")]
        // SAFETY: advice on our own memory; failure is harmless and ignored.
        unsafe {
            libc::madvise(data.cast(), bytes, libc::MADV_HUGEPAGE)
        };
        Some(Self { data, bytes, owner: Owner::Mapping(start as usize, reserved) })
    }

    /// Memory that somebody else made and keeps until `keeper` is dropped.
    ///
    /// # Safety
    /// `data` points to `bytes` zeroed bytes on an aligned address, valid as long as `keeper` lives.
    pub unsafe fn kept(data: *mut u8, bytes: usize, keeper: Box<dyn Any + Send + Sync>) -> Self {
        assert!((data as usize).is_multiple_of(ALIGNMENT), "memory for an executor starts on a cache line");
        Self { data, bytes, owner: Owner::Keeper(keeper) }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of it that have pages now.
    pub fn resident_bytes(&self) -> usize {
        let begin = self.data as usize / PAGE_BYTES * PAGE_BYTES;
        let pages = (self.data as usize + self.bytes - begin).div_ceil(PAGE_BYTES);
        let mut present = vec![0u8; pages];
        // SAFETY: whole pages of memory that is ours, and a byte for each of them.
        let status =
            unsafe { libc::mincore(begin as *mut libc::c_void, pages * PAGE_BYTES, present.as_mut_ptr().cast()) };
        let count = present.iter().filter(|page| **page & 1 == 1).count();
        if status == 0 { (count * PAGE_BYTES).min(self.bytes) } else { 0 }
    }

    /// Gives this run of it its pages.
    pub(crate) fn touch(&self, offset: usize, bytes: usize) {
        touch(self.at(offset), bytes);
    }

    /// The address of `offset`.
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes, "offset {offset} is outside {} bytes", self.bytes);
        // SAFETY: checked above.
        unsafe { self.data.add(offset) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match &self.owner {
            // SAFETY: allocated with this layout.
            Owner::Allocator(layout) => unsafe { dealloc(self.data, *layout) },
            // SAFETY: mapped by us with this length, and nobody holds it any more.
            Owner::Mapping(start, bytes) => unsafe {
                libc::munmap(*start as *mut libc::c_void, *bytes);
            },
            Owner::Keeper(_) => {}
        }
    }
}

const PAGE_BYTES: usize = 4096;

/// Gives memory its pages, so that no run is slowed down by it.
pub(crate) fn touch(data: *mut u8, bytes: usize) {
    if data.is_null() {
        return;
    }
    for offset in (0..bytes).step_by(PAGE_BYTES) {
        // SAFETY: inside the memory, which nobody else uses now; what is there stays.
        unsafe {
            let byte = data.add(offset);
            byte.write_volatile(byte.read_volatile());
        }
    }
}
