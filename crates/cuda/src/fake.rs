//! A driver and a compiler without a GPU, for tests: the device's memory is the host's, work is done when a test says
//! ([`crate::fake_streams`]), and there are two kernels, of which one adds terms to sums over grains, the other the parts of ranks.

use crate::driver::{DevicePointer, Driver, Handle, RowCopy};
use crate::error::CudaError;
use crate::fake_streams as streams;
use crate::gpu::Gpu;
use crate::kernels::Kernels;
use crate::nvrtc::Nvrtc;
use kolo_comm::combine::combine_tree;
use kolo_comm::{ElementType, Reduction};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What the driver says of a kernel, or a name, that is not there.
const NOT_FOUND: c_int = 500;
const ALIGNMENT: usize = 256;
/// All that a fake GPU has.
const MEMORY_BYTES: usize = 1 << 30;

thread_local! {
    /// What calls that start or wait for work answer on this thread.
    static ANSWER: Cell<c_int> = const { Cell::new(0) };
    /// GPUs of the machine, as this thread sees it.
    static COUNT: Cell<c_int> = const { Cell::new(1) };
}

/// From now on work fails with this code on this thread; 0 ends it.
pub(crate) fn fail_with(code: c_int) {
    ANSWER.set(code);
}

/// A GPU of this driver.
pub(crate) fn gpu() -> Arc<Gpu> {
    Arc::new(open(0).expect("a fake GPU"))
}

/// One of several GPUs, of which a thread for each rank may have one.
pub(crate) fn gpu_of(index: usize, count: usize) -> Arc<Gpu> {
    COUNT.set(count as c_int);
    let opened = open(index);
    COUNT.set(1);
    Arc::new(opened.expect("a fake GPU"))
}

/// That of this index, if there is one.
pub(crate) fn open(index: usize) -> Result<Gpu, CudaError> {
    Gpu::of_driver(&DRIVER, index, |_| Kernels::of_compiler(|| Ok(&COMPILER)))
}

fn handle() -> Handle {
    std::ptr::dangling_mut::<u64>().cast()
}

/// Of a stream or an event: no two are the same.
unsafe extern "C" fn make_handle(to: *mut Handle, _: c_uint) -> c_int {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed) + 1;
    // SAFETY: the driver's contract: the place of a handle.
    unsafe { *to = std::ptr::without_provenance_mut(number) };
    0
}
extern "C" fn with_handle(_: Handle) -> c_int {
    0
}
extern "C" fn synchronize(stream: Handle) -> c_int {
    streams::synchronize(stream as usize);
    ANSWER.get()
}
extern "C" fn synchronize_event(event: Handle) -> c_int {
    streams::synchronize_event(event as usize);
    ANSWER.get()
}
extern "C" fn record(event: Handle, stream: Handle) -> c_int {
    streams::record(event as usize, stream as usize);
    ANSWER.get()
}
extern "C" fn flags(_: c_uint) -> c_int {
    0
}
unsafe extern "C" fn number(to: *mut c_int) -> c_int {
    // SAFETY: the place of a number.
    unsafe { *to = COUNT.get() };
    0
}
unsafe extern "C" fn version(to: *mut c_int) -> c_int {
    // SAFETY: as above.
    unsafe { *to = 13_000 };
    0
}
unsafe extern "C" fn device(to: *mut c_int, index: c_int) -> c_int {
    // SAFETY: as above.
    unsafe { *to = index };
    0
}
unsafe extern "C" fn name(to: *mut c_char, bytes: c_int, _: c_int) -> c_int {
    let text = b"a fake GPU\0";
    assert!(bytes as usize >= text.len());
    // SAFETY: as many bytes as said, of which these are fewer.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len()) };
    0
}
unsafe extern "C" fn total(to: *mut usize, _: c_int) -> c_int {
    // SAFETY: the place of a number.
    unsafe { *to = MEMORY_BYTES };
    0
}
unsafe extern "C" fn attribute(to: *mut c_int, _: c_int, _: c_int) -> c_int {
    // SAFETY: as above. Compute capability 9.9, and 9 of everything.
    unsafe { *to = 9 };
    0
}
unsafe extern "C" fn retain(to: *mut Handle, _: c_int) -> c_int {
    // SAFETY: the place of a handle.
    unsafe { *to = handle() };
    0
}
unsafe extern "C" fn info(free: *mut usize, all: *mut usize) -> c_int {
    // SAFETY: the places of two numbers.
    unsafe { (*free, *all) = (MEMORY_BYTES, MEMORY_BYTES) };
    0
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes + ALIGNMENT, ALIGNMENT).expect("a size that is no nonsense")
}

/// With its size before it.
fn allocate(bytes: usize) -> usize {
    // SAFETY: the layout is not empty, and its start holds the size.
    unsafe {
        let data = alloc_zeroed(layout(bytes));
        data.cast::<usize>().write(bytes);
        data.add(ALIGNMENT) as usize
    }
}
fn give_back(address: usize) {
    let data = (address - ALIGNMENT) as *mut u8;
    // SAFETY: made by `allocate`, which wrote the size there.
    unsafe { dealloc(data, layout(data.cast::<usize>().read())) };
}

unsafe extern "C" fn memory_alloc(to: *mut DevicePointer, bytes: usize) -> c_int {
    // SAFETY: the place of an address.
    unsafe { *to = allocate(bytes) as DevicePointer };
    0
}
extern "C" fn memory_free(address: DevicePointer) -> c_int {
    give_back(address as usize);
    0
}
unsafe extern "C" fn host_alloc(to: *mut *mut c_void, bytes: usize, _: c_uint) -> c_int {
    // SAFETY: as above.
    unsafe { *to = allocate(bytes) as *mut c_void };
    0
}
extern "C" fn host_free(address: *mut c_void) -> c_int {
    give_back(address as usize);
    0
}
extern "C" fn host_register(_: *mut c_void, _: usize, _: c_uint) -> c_int {
    0
}
extern "C" fn host_unregister(_: *mut c_void) -> c_int {
    0
}
unsafe extern "C" fn to_device(to: DevicePointer, from: *const c_void, bytes: usize, stream: Handle) -> c_int {
    // SAFETY: whoever calls has that many bytes at both places, until the work is done.
    streams::start(stream as usize, move || unsafe { std::ptr::copy(from.cast::<u8>(), to as *mut u8, bytes) });
    ANSWER.get()
}
unsafe extern "C" fn to_host(to: *mut c_void, from: DevicePointer, bytes: usize, stream: Handle) -> c_int {
    // SAFETY: as above.
    streams::start(stream as usize, move || unsafe { std::ptr::copy(from as *const u8, to.cast(), bytes) });
    ANSWER.get()
}
unsafe extern "C" fn on_device(to: DevicePointer, from: DevicePointer, bytes: usize, stream: Handle) -> c_int {
    // SAFETY: as above.
    streams::start(stream as usize, move || unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) });
    ANSWER.get()
}
unsafe extern "C" fn copy_rows(copy: *const RowCopy, stream: Handle) -> c_int {
    // SAFETY: the caller's description.
    let RowCopy { from, to, width_bytes, height } = unsafe { std::ptr::read(copy) };
    let (source, target) = ((from.device as usize, from.pitch_bytes), (to.device as usize, to.pitch_bytes));
    // SAFETY: as above, for every row.
    streams::start(stream as usize, move || unsafe {
        for row in 0..height {
            let (source, target) = (source.0 + row * source.1, target.0 + row * target.1);
            std::ptr::copy(source as *const u8, target as *mut u8, width_bytes);
        }
    });
    ANSWER.get()
}
unsafe extern "C" fn uuid(to: *mut [u8; 16], device: c_int) -> c_int {
    // SAFETY: the place of 16 bytes.
    unsafe { *to = [device as u8; 16] };
    0
}
unsafe extern "C" fn set_bytes(to: DevicePointer, byte: u8, bytes: usize, stream: Handle) -> c_int {
    // SAFETY: as above.
    streams::start(stream as usize, move || unsafe { std::ptr::write_bytes(to as *mut u8, byte, bytes) });
    ANSWER.get()
}
extern "C" fn wait_event(stream: Handle, event: Handle, _: c_uint) -> c_int {
    streams::wait(stream as usize, event as usize);
    0
}
/// Nothing can be recorded: calls are started one by one.
extern "C" fn begin_capture(_: Handle, _: c_uint) -> c_int {
    NOT_FOUND
}
extern "C" fn end_capture(_: Handle, _: *mut Handle) -> c_int {
    NOT_FOUND
}
extern "C" fn instantiate(_: *mut Handle, _: Handle, _: u64) -> c_int {
    NOT_FOUND
}
extern "C" fn two_handles(_: Handle, _: Handle) -> c_int {
    ANSWER.get()
}
unsafe extern "C" fn elapsed(to: *mut f32, _: Handle, _: Handle) -> c_int {
    // SAFETY: the place of a number. Nothing takes time.
    unsafe { *to = 0.0 };
    0
}
unsafe extern "C" fn load(to: *mut Handle, _: *const c_void) -> c_int {
    // SAFETY: the place of a handle.
    unsafe { *to = handle() };
    0
}
unsafe extern "C" fn find(to: *mut Handle, _: Handle, name: *const c_char) -> c_int {
    // SAFETY: a name that ends in a zero, and the place of a handle.
    unsafe {
        let name = CStr::from_ptr(name).to_string_lossy();
        let Some(at) = KERNELS.iter().position(|kernel| *kernel == name) else { return NOT_FOUND };
        *to = std::ptr::without_provenance_mut(at + 1);
        0
    }
}
extern "C" fn set_attribute(_: Handle, _: c_int, _: c_int) -> c_int {
    0
}
/// What `sums.cu` does.
unsafe fn add_term([term, levels, stride, depth, closes, elements]: [u64; 6]) {
    let (term, levels) = (term as *const f32, levels as *mut f32);
    let [stride, depth, closes, elements] = [stride, depth, closes, elements].map(|number| number as usize);
    // SAFETY: by the caller's contract.
    unsafe {
        for at in 0..elements {
            let mut carry = *term.add(at);
            (0..closes).for_each(|close| carry += *levels.add((depth - 1 - close) * stride + at));
            *levels.add((depth - closes) * stride + at) = carry;
        }
    }
}

/// Their handles count from one.
const KERNELS: [&str; 6] =
    ["add_term", "add_ranks_f32", "add_ranks_bf16", "add_ranks_f16", "add_ranks_i32", "add_ranks_i64"];
const ELEMENTS: [ElementType; 5] =
    [ElementType::F32, ElementType::Bf16, ElementType::F16, ElementType::I32, ElementType::I64];

/// What `ranks.cu` does.
///
/// # Safety
/// The kernel's arguments, and memory of the sizes that they say.
unsafe fn add_ranks(element: ElementType, args: [u64; 7]) {
    let [own, others, slot, rank, ranks, to, elements] = args;
    let slot_of = |other: u64| if other == rank { own } else { others + other * slot * element.bytes() as u64 };
    let inputs: Vec<*const u8> = (0..ranks).map(|other| slot_of(other) as *const u8).collect();
    // SAFETY: the caller's promise; the result goes to this rank's own part or elsewhere.
    unsafe { combine_tree(element, Reduction::Sum, &inputs, to as *mut u8, elements as usize) };
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn launch(
    kernel: Handle,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    stream: Handle,
    args: *mut *mut c_void,
    _: *mut *mut c_void,
) -> c_int {
    let kernel = kernel.addr();
    // SAFETY: the kernel's arguments, eight bytes each.
    let arg = |at: usize| unsafe { *(*args.add(at)).cast::<u64>() };
    if kernel > 1 {
        let args = std::array::from_fn(arg);
        // SAFETY: memory of the sizes that the arguments say, until the work is done.
        streams::start(stream as usize, move || unsafe { add_ranks(ELEMENTS[kernel - 2], args) });
        return ANSWER.get();
    }
    let args = std::array::from_fn(arg);
    // SAFETY: as above.
    streams::start(stream as usize, move || unsafe { add_term(args) });
    ANSWER.get()
}
unsafe extern "C" fn error_name(code: c_int, to: *mut *const c_char) -> c_int {
    let name = match code {
        2 => c"CUDA_ERROR_OUT_OF_MEMORY",
        46 => c"CUDA_ERROR_DEVICE_UNAVAILABLE",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        802 => c"CUDA_ERROR_SYSTEM_NOT_READY",
        _ => c"CUDA_ERROR_UNKNOWN",
    };
    // SAFETY: the place of an address.
    unsafe { *to = name.as_ptr() };
    0
}
unsafe extern "C" fn bus(to: *mut c_char, bytes: c_int, device: c_int) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe { name(to, bytes, device) }
}

static DRIVER: Driver = Driver {
    init: flags,
    driver_version: version,
    device_count: number,
    device_get: device,
    device_name: name,
    device_bus: bus,
    device_uuid: uuid,
    device_memory: total,
    device_attribute: attribute,
    context_retain: retain,
    context_set: with_handle,
    memory_info: info,
    memory_alloc,
    memory_free,
    host_alloc,
    host_free,
    host_register,
    host_unregister,
    copy_to_device: to_device,
    copy_to_host: to_host,
    copy_on_device: on_device,
    copy_rows,
    set_bytes,
    stream_create: make_handle,
    stream_destroy: with_handle,
    stream_synchronize: synchronize,
    stream_wait: wait_event,
    stream_begin_capture: begin_capture,
    stream_end_capture: end_capture,
    graph_instantiate: instantiate,
    graph_launch: two_handles,
    graph_exec_destroy: with_handle,
    graph_destroy: with_handle,
    event_create: make_handle,
    event_destroy: with_handle,
    event_record: record,
    event_synchronize: synchronize_event,
    event_elapsed: elapsed,
    event_query: synchronize_event,
    module_load: load,
    module_function: find,
    function_attribute: set_attribute,
    launch,
    error_name,
    error_text: error_name,
};

unsafe extern "C" fn compiler_version(major: *mut c_int, minor: *mut c_int) -> c_int {
    // SAFETY: the places of two numbers.
    unsafe { (*major, *minor) = (13, 0) };
    0
}
unsafe extern "C" fn create(
    to: *mut *mut c_void,
    _: *const c_char,
    _: *const c_char,
    _: c_int,
    _: *const *const c_char,
    _: *const *const c_char,
) -> c_int {
    // SAFETY: the place of a handle.
    unsafe { *to = handle() };
    0
}
extern "C" fn compile(_: *mut c_void, _: c_int, _: *const *const c_char) -> c_int {
    0
}
extern "C" fn destroy(_: *mut *mut c_void) -> c_int {
    0
}
unsafe extern "C" fn size(_: *mut c_void, to: *mut usize) -> c_int {
    // SAFETY: the place of a number.
    unsafe { *to = 1 };
    0
}
unsafe extern "C" fn text(_: *mut c_void, to: *mut c_char) -> c_int {
    // SAFETY: a place of as many bytes as `size` says.
    unsafe { *to = 0 };
    0
}

static COMPILER: Nvrtc = Nvrtc {
    version: compiler_version,
    create,
    compile,
    destroy,
    log_size: size,
    log: text,
    cubin_size: size,
    cubin: text,
};
