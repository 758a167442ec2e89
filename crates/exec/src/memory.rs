//! One aligned, zeroed piece of memory.

use kolo_graph::layout::ALIGNMENT;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;

/// From this size on, ask for large pages: a step walks its arenas end to end, and page walks would cost more than the data.
const LARGE_PAGE_BYTES: usize = 2 << 20;

#[derive(Debug)]
pub struct Memory {
    data: *mut u8,
    bytes: usize,
    owner: Owner,
}

enum Owner {
    Allocator(Layout),
    /// Whoever made the memory; it is given back when this is dropped.
    Keeper(#[allow(dead_code)] Box<dyn Any + Send + Sync>),
}

impl std::fmt::Debug for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Owner::Allocator(_) => "allocator",
            Owner::Keeper(_) => "keeper",
        })
    }
}

// SAFETY: the memory is plain bytes; who writes what when is the executor's business.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(bytes: usize) -> Self {
        let alignment = if bytes >= LARGE_PAGE_BYTES { LARGE_PAGE_BYTES } else { ALIGNMENT };
        let layout =
            Layout::from_size_align(bytes.max(ALIGNMENT), alignment).expect("a size the address space can hold");
        // SAFETY: the layout is not empty.
        let data = unsafe { alloc_zeroed(layout) };
        if data.is_null() {
            handle_alloc_error(layout);
        }
        #[cfg(target_os = "linux")]
        if bytes >= LARGE_PAGE_BYTES {
            // SAFETY: advice on our own memory; failure is harmless and ignored.
            unsafe { libc::madvise(data.cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Self { data, bytes: layout.size(), owner: Owner::Allocator(layout) }
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

    /// The address of `offset`.
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes, "offset {offset} is outside {} bytes", self.bytes);
        // SAFETY: checked above.
        unsafe { self.data.add(offset) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Owner::Allocator(layout) = &self.owner {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(self.data, *layout) };
        }
    }
}
