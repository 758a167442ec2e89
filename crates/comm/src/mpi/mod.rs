//! MPI as a transport: the library of the launcher that started us is opened while the program runs, so that one binary
//! works with Open MPI, with MPICH and its relatives, with MPI's standard binary interface, and without any.
//!
//! Every collective starts with an agreement of all ranks on the call's fingerprint. What MPI does well then runs
//! natively, in its nonblocking form; reductions whose order of additions matters run as programs over messages. Nothing
//! waits in MPI itself: we test and look up, so a deadline or the end of the job is seen at once. Requests of a call that
//! ended that way cannot be taken back, so the library is given up with it and never called again.

mod abi;
mod agree;
mod choose;
mod group;
mod library;
mod native;
mod transport;
mod wait_report;
mod wire;

use crate::fault::Fault;
use crate::host::EnvLookup;
use crate::transport::{BOOTSTRAP_BYTES_MAX, Bootstrap, Transport};
use crate::watch::{STALL_HEARTBEATS, Watch};
use choose::Launch;
use group::MpiGroup;
use kolo_base::ShownPath;
use library::Library;
use std::ffi::c_int;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use transport::MpiTransport;

/// This process in the world of all ranks that the launcher started.
#[derive(Debug)]
pub struct MpiWorld {
    all: MpiGroup,
    /// The name of each rank's host.
    hosts: Vec<String>,
    version: String,
    launcher: &'static str,
    /// For what happens before and after the job has a watch of its own.
    watch: Arc<Watch>,
}

/// An initialised library, and its end.
#[derive(Debug)]
pub(crate) struct MpiRuntime {
    library: Library,
    /// All ranks are through with it.
    all_done: AtomicBool,
}

impl Drop for MpiRuntime {
    fn drop(&mut self) {
        // Finalising waits for all ranks, and cannot be told for how long. A rank that goes without it is seen by the
        // launcher, which ends the job.
        if self.all_done.load(Ordering::Acquire) {
            // SAFETY: once, as whoever holds a communicator holds the session.
            let _ = self.library.call("Finalize", |f| unsafe { (f.finalize)() });
        }
    }
}

const HOST_NAME_BYTES: usize = 256;
/// How long a rank that is done waits for the others, which may still be writing their results.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(3600);
/// How long one waits that goes without having said that it is done: something failed.
const FINALIZE_TIMEOUT_AFTER_FAULT: Duration = Duration::from_secs(1);

impl MpiWorld {
    /// Opens the library of the launcher, or the one that is named, and initialises it. Once in a process.
    pub fn init(env: EnvLookup<'_>, library: Option<&Path>) -> Result<MpiWorld, Fault> {
        let launch = Launch::detect(env);
        if let Some(error) = launch.unsupported(env, library) {
            return Err(Fault::System { what: "MPI".into(), error });
        }
        let library = open(&launch, env, library)?;
        initialise(&library)?;
        let version = library.version()?;
        let runtime = Arc::new(MpiRuntime { library, all_done: AtomicBool::new(false) });
        let mut all = MpiGroup::world(runtime)?;
        let (name, family) = (&all.library().name, all.library().constants.family);
        if let Some(error) = launch.mismatch(all.size(), &format!("{name} ({version})"), family) {
            return Err(Fault::System { what: "MPI".into(), error });
        }
        let watch = Watch::alone();
        let hosts = host_names(&all, &watch)?;
        let first = |host: &String| hosts.iter().position(|other| other == host).unwrap_or(0);
        all.set_hosts(hosts.iter().map(first).collect());
        Ok(Self { all, hosts, version, launcher: launch.describe(), watch })
    }

    pub fn rank(&self) -> usize {
        self.all.rank()
    }

    pub fn size(&self) -> usize {
        self.all.size()
    }

    /// The name of each rank's host.
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// The name under which the library was opened.
    pub fn library(&self) -> &str {
        &self.all.library().name
    }

    /// What the library says of itself, such as `Open MPI v4.1.4`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// What started this process.
    pub fn launcher(&self) -> &'static str {
        self.launcher
    }

    /// A transport of all ranks. All of them call it.
    pub fn transport(&self, watch: Arc<Watch>) -> Result<Box<dyn Transport>, Fault> {
        self.transport_in_pieces(watch, native::PIECE_BYTES)
    }

    /// For tests: longer vectors and messages than this go in pieces.
    #[doc(hidden)]
    pub fn transport_in_pieces(&self, watch: Arc<Watch>, piece_bytes: usize) -> Result<Box<dyn Transport>, Fault> {
        MpiTransport::boxed(self.all.duplicate(&watch)?, watch, piece_bytes)
    }

    /// For tests: as with a library whose calls must go one at a time.
    #[doc(hidden)]
    pub fn serialize(&self) {
        self.all.library().serialize();
    }

    /// The end of a job that went well: waits for all ranks. MPI is finalised with the last communicator on it. A world
    /// that is dropped without it does the same if the others are there, but waits only a moment.
    pub fn finish(self) -> Result<(), Fault> {
        self.await_all_ranks(FINALIZE_TIMEOUT)
    }

    fn await_all_ranks(&self, backoff: Duration) -> Result<(), Fault> {
        self.all.barrier(&Watch::new(Vec::new(), backoff / STALL_HEARTBEATS))?;
        self.all.runtime().all_done.store(true, Ordering::Release);
        Ok(())
    }

    /// Ends all ranks at once.
    pub fn abort(&self, code: i32) -> ! {
        self.all.library().abort(code);
        std::process::exit(code)
    }
}

impl Drop for MpiWorld {
    fn drop(&mut self) {
        if !self.all.runtime().all_done.load(Ordering::Acquire) {
            let _ = self.await_all_ranks(FINALIZE_TIMEOUT_AFTER_FAULT);
        }
    }
}

impl Bootstrap for MpiWorld {
    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Fault> {
        if mine.len() > BOOTSTRAP_BYTES_MAX {
            return Err(Fault::BadCall(format!(
                "a rank gives at most {BOOTSTRAP_BYTES_MAX} bytes, not {}",
                mine.len()
            )));
        }
        self.all.gather_blobs(mine, BOOTSTRAP_BYTES_MAX, &self.watch)
    }
}

/// Each rank's own name for its host.
fn host_names(all: &MpiGroup, watch: &Watch) -> Result<Vec<String>, Fault> {
    let mut name = [0u8; HOST_NAME_BYTES];
    // SAFETY: room for all but the last byte, which stays zero.
    let code = unsafe { libc::gethostname(name.as_mut_ptr().cast(), HOST_NAME_BYTES - 1) };
    if code != 0 {
        return Err(Fault::system("the name of this host", &std::io::Error::last_os_error()));
    }
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(HOST_NAME_BYTES);
    let names = all.gather_blobs(&name[..end], HOST_NAME_BYTES, watch)?;
    Ok(names.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect())
}

/// The first library that can be opened.
fn open(launch: &Launch, env: EnvLookup<'_>, named: Option<&Path>) -> Result<Library, Fault> {
    let mut tried = Vec::new();
    for path in launch.candidates(env, named) {
        match Library::open(&path) {
            Ok(library) => return Ok(library),
            Err(why) => tried.push(if why.contains(&*path.to_string_lossy()) {
                why
            } else {
                format!("{}: {why}", path.shown())
            }),
        }
    }
    Err(Fault::System { what: "MPI".into(), error: launch.missing(&tried) })
}

fn initialise(library: &Library) -> Result<(), Fault> {
    let mut initialized: c_int = 0;
    // SAFETY: may be called at any time.
    library.call("Initialized", |f| unsafe { (f.initialized)(&mut initialized) })?;
    if initialized != 0 {
        return Err(Fault::BadCall("MPI can be initialised only once in a process, and it already has been".into()));
    }
    let (serialized, multiple) = (library.constants.thread_serialized, library.constants.thread_multiple);
    let mut provided: c_int = 0;
    // SAFETY: nobody initialised it yet; arguments of the command line need not be given.
    library.call("Init_thread", |f| unsafe { (f.init_thread)(null_mut(), null_mut(), multiple, &mut provided) })?;
    if provided < serialized {
        library.give_up();
        let error =
            "it can be used from one thread only, but collectives run beside compute\n  hint: use an MPI built \
                     with thread support"
                .to_owned();
        return Err(Fault::System { what: format!("MPI library {}", library.name), error });
    }
    if provided < multiple {
        library.serialize();
    }
    let handles = (library.constants.world, library.constants.errors_return);
    // SAFETY: initialised, and the handles are the library's own.
    library.call("Comm_set_errhandler", |f| unsafe { (f.comm_set_errhandler)(handles.0, handles.1) })
}
