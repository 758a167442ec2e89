//! An MPI library, opened while the program runs, and the functions of it that we call.
//!
//! Every call goes through [`Library::call`]: it takes the process-wide lock where the library wants its calls one at a
//! time, turns error codes into faults, and refuses once the library was given up.

use super::abi::{Constants, Handle};
use crate::fault::Fault;
use kolo_base::lock;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Room for what a library says of itself; MPICH's header asks for this much.
const VERSION_BYTES: usize = 8192;
/// Room for an error's text; the largest of the headers.
const ERROR_BYTES: usize = 512;

type SendBuffer = *const c_void;
type RecvBuffer = *mut c_void;
type Counts = *const c_int;

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($ty:ty),*);)+) => {
        /// The functions by their names without `MPI_`.
        pub(super) struct Functions {
            $(pub $name: unsafe extern "C" fn($($ty),*) -> c_int,)+
        }

        impl Functions {
            fn load(symbol: &dyn Fn(&str) -> Option<usize>) -> Result<Self, String> {
                let find = |name: &str| symbol(name).ok_or_else(|| format!("it lacks the function {name}"));
                Ok(Self {$(
                    // SAFETY: the function of this name has this signature in every MPI from 3.0 on, with handles as
                    // the module `abi` explains.
                    $name: unsafe {
                        std::mem::transmute::<usize, unsafe extern "C" fn($($ty),*) -> c_int>(find($symbol)?)
                    },
                )+})
            }
        }
    };
}

functions! {
    init_thread = "MPI_Init_thread" (*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int);
    initialized = "MPI_Initialized" (*mut c_int);
    finalize = "MPI_Finalize" ();
    abort = "MPI_Abort" (Handle, c_int);
    get_library_version = "MPI_Get_library_version" (*mut c_char, *mut c_int);
    error_string = "MPI_Error_string" (c_int, *mut c_char, *mut c_int);
    comm_set_errhandler = "MPI_Comm_set_errhandler" (Handle, Handle);
    comm_rank = "MPI_Comm_rank" (Handle, *mut c_int);
    comm_size = "MPI_Comm_size" (Handle, *mut c_int);
    comm_dup = "MPI_Comm_dup" (Handle, *mut Handle);
    comm_free = "MPI_Comm_free" (*mut Handle);
    comm_group = "MPI_Comm_group" (Handle, *mut Handle);
    comm_create_group = "MPI_Comm_create_group" (Handle, Handle, c_int, *mut Handle);
    group_incl = "MPI_Group_incl" (Handle, c_int, Counts, *mut Handle);
    group_free = "MPI_Group_free" (*mut Handle);
    isend = "MPI_Isend" (SendBuffer, c_int, Handle, c_int, c_int, Handle, *mut Handle);
    irecv = "MPI_Irecv" (RecvBuffer, c_int, Handle, c_int, c_int, Handle, *mut Handle);
    iprobe = "MPI_Iprobe" (c_int, c_int, Handle, *mut c_int, *mut MpiStatus);
    test = "MPI_Test" (*mut Handle, *mut c_int, *mut MpiStatus);
    cancel = "MPI_Cancel" (*mut Handle);
    ibarrier = "MPI_Ibarrier" (Handle, *mut Handle);
    ibcast = "MPI_Ibcast" (RecvBuffer, c_int, Handle, c_int, Handle, *mut Handle);
    ireduce = "MPI_Ireduce" (SendBuffer, RecvBuffer, c_int, Handle, Handle, c_int, Handle, *mut Handle);
    iallreduce = "MPI_Iallreduce" (SendBuffer, RecvBuffer, c_int, Handle, Handle, Handle, *mut Handle);
    ireduce_scatter = "MPI_Ireduce_scatter" (SendBuffer, RecvBuffer, Counts, Handle, Handle, Handle, *mut Handle);
    iscan = "MPI_Iscan" (SendBuffer, RecvBuffer, c_int, Handle, Handle, Handle, *mut Handle);
    iexscan = "MPI_Iexscan" (SendBuffer, RecvBuffer, c_int, Handle, Handle, Handle, *mut Handle);
    igather = "MPI_Igather" (SendBuffer, c_int, Handle, RecvBuffer, c_int, Handle, c_int, Handle, *mut Handle);
    igatherv = "MPI_Igatherv" (SendBuffer, c_int, Handle, RecvBuffer, Counts, Counts, Handle, c_int, Handle, *mut Handle);
    iallgather = "MPI_Iallgather" (SendBuffer, c_int, Handle, RecvBuffer, c_int, Handle, Handle, *mut Handle);
    iallgatherv = "MPI_Iallgatherv" (SendBuffer, c_int, Handle, RecvBuffer, Counts, Counts, Handle, Handle, *mut Handle);
    iscatter = "MPI_Iscatter" (SendBuffer, c_int, Handle, RecvBuffer, c_int, Handle, c_int, Handle, *mut Handle);
    iscatterv = "MPI_Iscatterv" (SendBuffer, Counts, Counts, Handle, RecvBuffer, c_int, Handle, c_int, Handle, *mut Handle);
    ialltoall = "MPI_Ialltoall" (SendBuffer, c_int, Handle, RecvBuffer, c_int, Handle, Handle, *mut Handle);
    ialltoallv = "MPI_Ialltoallv" (SendBuffer, Counts, Counts, Handle, RecvBuffer, Counts, Counts, Handle, Handle, *mut Handle);
}

/// Room for any library's `MPI_Status`; we never look inside.
#[repr(C, align(8))]
#[derive(Debug)]
pub(super) struct MpiStatus([u8; 64]);

impl MpiStatus {
    pub fn new() -> Self {
        Self([0; 64])
    }
}

pub(super) struct Library {
    functions: Functions,
    pub constants: Constants,
    /// The name under which it was opened.
    pub name: String,
    /// Calls go one at a time.
    serialized: AtomicBool,
    lock: Mutex<()>,
    /// Requests that could not be ended still know buffers that their owners took back: nothing may move any more.
    given_up: AtomicBool,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.name, self.constants.family.name())
    }
}

impl Library {
    /// Opens a library and finds all functions in it. It stays open for the life of the process: MPI leaves threads,
    /// handlers and mappings behind that would outlive their code.
    pub fn open(path: &Path) -> Result<Self, String> {
        let text = path.display().to_string();
        let name = CString::new(text.as_bytes()).map_err(|_| "a zero byte in the path".to_owned())?;
        // SAFETY: runs the library's initialisers, as linking it would. Its plugins look for its symbols: global.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if handle.is_null() {
            return Err(last_error());
        }
        let symbol = |name: &str| {
            let name = CString::new(name).ok()?;
            // SAFETY: an open handle and a C string.
            let address = unsafe { libc::dlsym(handle, name.as_ptr()) } as usize;
            (address != 0).then_some(address)
        };
        let functions = Functions::load(&symbol)?;
        let constants = Constants::of(claims_standard(&symbol), &symbol)?;
        Ok(Self {
            functions,
            constants,
            name: text,
            serialized: AtomicBool::new(false),
            lock: Mutex::new(()),
            given_up: AtomicBool::new(false),
        })
    }

    /// From now on calls go one at a time.
    pub fn serialize(&self) {
        self.serialized.store(true, Ordering::Release);
    }

    /// Nothing is called any more, as the library may still write to memory that is no longer ours to give.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Release);
    }

    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }

    /// Calls a function by its MPI name, which shows in the fault.
    pub fn call(&self, name: &str, call: impl FnOnce(&Functions) -> c_int) -> Result<(), Fault> {
        if self.is_given_up() {
            let why = "an earlier call of this rank failed while its messages were under way";
            return Err(Fault::Aborted(format!("MPI_{name} was not called: {why}")));
        }
        let guard = self.serialized.load(Ordering::Acquire).then(|| lock(&self.lock));
        let code = call(&self.functions);
        let outcome = if code == 0 { Ok(()) } else { Err(self.fault(name, code)) };
        drop(guard);
        outcome
    }

    /// The one call that is made even when the library was given up: it ends all ranks and does not return.
    pub fn abort(&self, code: c_int) {
        // SAFETY: of all ranks, at any time after initialisation.
        unsafe { (self.functions.abort)(self.constants.world, code) };
    }

    fn fault(&self, name: &str, code: c_int) -> Fault {
        let mut text = [0u8; ERROR_BYTES];
        let mut length = 0;
        // SAFETY: room for the longest text of any library.
        let outcome = unsafe { (self.functions.error_string)(code, text.as_mut_ptr().cast(), &mut length) };
        let error = if outcome == 0 { until_zero(&text) } else { String::new() };
        Fault::System { what: format!("MPI_{name} of {}", self.name), error: format!("{error} (code {code})") }
    }

    /// The beginning of what the library says of itself, such as `Open MPI v4.1.4`.
    pub fn version(&self) -> Result<String, Fault> {
        let mut text = vec![0u8; VERSION_BYTES];
        let mut length = 0;
        // SAFETY: room for the longest text of any library.
        self.call("Get_library_version", |f| unsafe {
            (f.get_library_version)(text.as_mut_ptr().cast(), &mut length)
        })?;
        let text = until_zero(&text);
        let words: Vec<&str> = text.lines().next().unwrap_or_default().split_whitespace().collect();
        let line = words.join(" ").replace(" Version:", "");
        Ok(line.split(',').next().unwrap_or_default().to_owned())
    }
}

fn until_zero(text: &[u8]) -> String {
    CStr::from_bytes_until_nul(text).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

/// What the dynamic loader had to say.
fn last_error() -> String {
    // SAFETY: a C string that lives until the next call of the loader, or null.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() { "unknown".into() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    }
}

/// Whether a library has MPI's own binary interface. One that has another says so with a version of -1.
fn claims_standard(symbol: &dyn Fn(&str) -> Option<usize>) -> bool {
    let Some(address) = symbol("MPI_Abi_get_version") else { return false };
    let (mut major, mut minor): (c_int, c_int) = (-1, -1);
    // SAFETY: the function of this name has this signature, and may be called before initialisation.
    let code = unsafe {
        let version = std::mem::transmute::<usize, unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(address);
        version(&mut major, &mut minor)
    };
    code == 0 && major >= 1
}
