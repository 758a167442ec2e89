//! NVIDIA's library of collectives between GPUs, one rank each: its functions, and the few types of its interface that we hold.
//!
//! Communicators do not block: a call that is not done says so, and whoever made it looks until it is, so that a rank that is gone can be
//! given up ([`crate::nccl_group`]). The library's version of the day its functions got their present form is 2.14.

use crate::driver::Handle;
use crate::error::CudaError;
use crate::library::{Library, LibraryName, functions};
use kolo_graph::DType;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

pub(crate) const NCCL: LibraryName = LibraryName {
    title: "NCCL (libnccl)",
    files: &["libnccl.so.2", "libnccl.so"],
    wheels: &["nccl"],
    needed_for: "`--transport nccl`, exchanges between GPUs without the host's memory",
    hint: "install NVIDIA's package libnccl2, or `pip install nvidia-nccl-cu13` and set VIRTUAL_ENV or LD_LIBRARY_PATH; without it workers exchange through the host's memory",
};

/// 2.14: the first whose communicators need not block.
const VERSION_MIN: c_int = 21_400;

/// `ncclUniqueId`: what ranks need to find each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId(pub [u8; UNIQUE_ID_BYTES]);

pub(crate) const UNIQUE_ID_BYTES: usize = 128;

/// `ncclConfig_t` as it was in version 2.14. The library reads no more than the size says, and takes its own defaults for what came later.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    /// Where a later version has its first field.
    padding: c_int,
}

impl Config {
    pub fn new() -> Self {
        let version = VERSION_MIN as c_uint;
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version, blocking: 0, padding: c_int::MIN }
    }
}

functions! {
    NcclFunctions:
    version = "ncclGetVersion" (*mut c_int);
    unique_id = "ncclGetUniqueId" (*mut UniqueId);
    init_rank = "ncclCommInitRankConfig" (*mut Handle, c_int, UniqueId, c_int, *const Config);
    finalize = "ncclCommFinalize" (Handle);
    destroy = "ncclCommDestroy" (Handle);
    abort = "ncclCommAbort" (Handle);
    async_error = "ncclCommGetAsyncError" (Handle, *mut c_int);
    group_start = "ncclGroupStart" ();
    group_end = "ncclGroupEnd" ();
    all_reduce = "ncclAllReduce" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle);
    reduce_scatter = "ncclReduceScatter" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle);
    all_gather = "ncclAllGather" (*const c_void, *mut c_void, usize, c_int, Handle, Handle);
    send = "ncclSend" (*const c_void, usize, c_int, c_int, Handle, Handle);
    receive = "ncclRecv" (*mut c_void, usize, c_int, c_int, Handle, Handle);
}

/// A function of the library that answers with a text.
type TextOf<T> = unsafe extern "C" fn(T) -> *const c_char;

#[derive(Debug)]
pub(crate) struct Nccl {
    pub calls: NcclFunctions,
    /// `ncclGetErrorString`.
    pub error_text: TextOf<c_int>,
    /// `ncclGetLastError`.
    pub last_error: TextOf<Handle>,
}

/// `ncclSuccess` and `ncclInProgress`.
pub(crate) const SUCCESS: c_int = 0;
pub(crate) const IN_PROGRESS: c_int = 7;
/// `ncclSum`.
pub(crate) const SUM: c_int = 0;

/// `ncclDataType_t`.
pub(crate) fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::Bool | DType::U8 => 1,
        DType::I32 => 2,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::BF16 => 9,
    }
}

/// What to do about results that are not kolo's mistakes.
fn hint(code: c_int) -> &'static str {
    match code {
        1 => "a GPU failed: check `nvidia-smi` and `dmesg` (Xid)",
        2 => {
            "the system or the network refused: NCCL_DEBUG=INFO logs more, and NCCL_SOCKET_IFNAME names the interface to use"
        }
        6 => "another rank ended or the network failed: its log says why",
        _ => {
            "NCCL_DEBUG=INFO logs more; `--transport auto` without NCCL, or `--transport tcp`, goes through the host's memory"
        }
    }
}

impl Nccl {
    /// The library. The first answer stays.
    pub fn get() -> Result<&'static Self, CudaError> {
        static LOADED: OnceLock<Result<Nccl, CudaError>> = OnceLock::new();
        LOADED.get_or_init(Self::open).as_ref().map_err(CudaError::clone)
    }

    fn open() -> Result<Self, CudaError> {
        let library = Library::open(NCCL)?;
        let calls = NcclFunctions::load(&library)?;
        let (error_text, last_error) = (library.symbol("ncclGetErrorString")?, library.symbol("ncclGetLastError")?);
        // SAFETY: the functions of these names have these signatures in the library's public interface.
        let nccl = unsafe {
            Self {
                calls,
                error_text: std::mem::transmute::<usize, TextOf<c_int>>(error_text),
                last_error: std::mem::transmute::<usize, TextOf<Handle>>(last_error),
            }
        };
        let found = nccl.version_code()?;
        if found < VERSION_MIN {
            let text = format!("this is NCCL {}, but kolo needs 2.14\n  hint: {}", version_text(found), NCCL.hint);
            return Err(CudaError::Other(text));
        }
        Ok(nccl)
    }

    fn version_code(&self) -> Result<c_int, CudaError> {
        let mut version = 0;
        // SAFETY: the place of a number.
        let code = unsafe { (self.calls.version)(&mut version) };
        self.check("ncclGetVersion", "NCCL", code, std::ptr::null_mut())?;
        Ok(version)
    }

    /// Such as 2.28.3.
    pub fn version(&self) -> Result<String, CudaError> {
        self.version_code().map(version_text)
    }

    /// An error of the code, if it is one. The communicator may be null.
    pub fn check(&self, call: &'static str, device: &str, code: c_int, communicator: Handle) -> Result<(), CudaError> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: both answer with texts that live long enough to be copied, or null; a null communicator is allowed.
        let words = unsafe { [(self.error_text)(code), (self.last_error)(communicator)].map(|text| words(text)) };
        let text = words.iter().map(|word| word.trim()).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(": ");
        Err(CudaError::Call { call, device: device.into(), code, text, hint: hint(code) })
    }
}

/// # Safety
/// Null, or a text that ends in a zero.
unsafe fn words(text: *const c_char) -> String {
    // SAFETY: the caller's promise.
    if text.is_null() { String::new() } else { unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned() }
}

/// Of 22803, 2.28.3.
fn version_text(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}
