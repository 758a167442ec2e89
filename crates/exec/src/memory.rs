//! One aligned, zeroed piece of memory.

use kolo_graph::layout::ALIGNMENT;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

/// From this size on, ask for large pages: a step walks its arenas end to end, and page walks would cost more than the data.
const LARGE_PAGE_BYTES: usize = 2 << 20;

#[derive(Debug)]
pub struct Memory {
    data: *mut u8,
    layout: Layout,
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
        Self { data, layout }
    }

    pub fn bytes(&self) -> usize {
        self.layout.size()
    }

    /// The address of `offset`.
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.layout.size(), "offset {offset} is outside {} bytes", self.layout.size());
        // SAFETY: checked above.
        unsafe { self.data.add(offset) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.data, self.layout) };
    }
}
