//! The calls of a phase as one graph of the driver's: recorded once, then started with one call.
//!
//! Everything a call reads lies in memory of the device, the step's own numbers too, so a recording stays right from step to step. The
//! first run of a phase is never recorded: it loads what its kernels need.

use crate::driver::{CAPTURE_THREAD_LOCAL, Handle};
use crate::error::CudaError;
use crate::gpu::Gpu;
use kolo_base::lock;
use kolo_graph::Phase;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Recordings of one device; a phase beyond them runs call by call.
const RECORDINGS_MAX: usize = 64;

/// Which calls: a phase, its lane, how far a grain carries in the sums over grains (depth, closes), and the first item.
pub(crate) type PhaseKey = (Phase, usize, u32, u32, usize);

#[derive(Debug)]
enum Recording {
    /// It has run once, call by call.
    Seen,
    Ready(Executable),
    /// The driver cannot record it.
    Refused,
}

/// An instantiated graph.
#[derive(Debug)]
struct Executable {
    handle: Handle,
    gpu: Arc<Gpu>,
}

// SAFETY: the driver's handles may be used from any thread, one call at a time.
unsafe impl Send for Executable {}

impl Drop for Executable {
    fn drop(&mut self) {
        if self.gpu.synchronize().is_ok() {
            // SAFETY: instantiated by `record`, and nothing of it runs any more.
            unsafe { (self.gpu.driver.graph_exec_destroy)(self.handle) };
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Recordings(Mutex<BTreeMap<PhaseKey, Recording>>);

impl Recordings {
    /// Starts all calls of a phase: `start` does so one by one, or they are replayed.
    pub fn run(
        &self,
        gpu: &Arc<Gpu>,
        key: PhaseKey,
        start: impl Fn() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let mut known = lock(&self.0);
        let full = known.len() >= RECORDINGS_MAX;
        match known.get(&key) {
            Some(Recording::Ready(executable)) => return launch(gpu, executable),
            Some(Recording::Refused) => return start(),
            None => {
                known.insert(key, if full { Recording::Refused } else { Recording::Seen });
                return start();
            }
            Some(Recording::Seen) => (),
        }
        match record(gpu, &start) {
            Ok(executable) => {
                launch(gpu, &executable)?;
                known.insert(key, Recording::Ready(executable));
                Ok(())
            }
            // Nothing of it has run.
            Err(_) => {
                known.insert(key, Recording::Refused);
                start()
            }
        }
    }
}

fn launch(gpu: &Gpu, executable: &Executable) -> Result<(), CudaError> {
    gpu.enter()?;
    // SAFETY: an instantiated graph and a stream of this context.
    gpu.check("cuGraphLaunch", unsafe { (gpu.driver.graph_launch)(executable.handle, gpu.compute.handle) })
}

fn record(gpu: &Arc<Gpu>, start: &impl Fn() -> Result<(), CudaError>) -> Result<Executable, CudaError> {
    gpu.enter()?;
    let stream = gpu.compute.handle;
    // SAFETY: a stream of this context that is not being recorded.
    let code = unsafe { (gpu.driver.stream_begin_capture)(stream, CAPTURE_THREAD_LOCAL) };
    gpu.check("cuStreamBeginCapture", code)?;
    let started = start();
    let mut graph = std::ptr::null_mut();
    // SAFETY: the recording that was begun above ends, whatever came of it.
    let code = unsafe { (gpu.driver.stream_end_capture)(stream, &mut graph) };
    gpu.check("cuStreamEndCapture", code)?;
    let mut handle = std::ptr::null_mut();
    // SAFETY: the place of a handle and a graph that was recorded; it is not needed any more once it is instantiated.
    let code = unsafe {
        let code = (gpu.driver.graph_instantiate)(&mut handle, graph, 0);
        (gpu.driver.graph_destroy)(graph);
        code
    };
    started?;
    gpu.check("cuGraphInstantiate", code)?;
    Ok(Executable { handle, gpu: Arc::clone(gpu) })
}
