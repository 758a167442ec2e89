//! Which libraries for GPUs this machine has.

use crate::convolutions::{CUDNN, version};
use crate::driver::{DRIVER, Driver, version_text};
use crate::error::CudaError;
use crate::library::{Library, LibraryName};
use crate::nccl::{NCCL, Nccl};
use crate::nvml::{NVML, Nvml};
use crate::nvrtc::{NVRTC, Nvrtc};
use crate::products::CUBLASLT;

/// A library, and its version or why it cannot be used.
#[derive(Clone, Debug)]
pub struct LibraryState {
    pub title: &'static str,
    pub needed_for: &'static str,
    /// Whether there is no training on GPUs without it.
    pub required: bool,
    pub found: Result<String, CudaError>,
}

/// All libraries that are used for GPUs.
pub fn libraries() -> Vec<LibraryState> {
    let state = |name: &LibraryName, found: Result<String, CudaError>| LibraryState {
        title: name.title,
        needed_for: name.needed_for,
        required: true,
        found,
    };
    let nvrtc = |nvrtc: &Nvrtc| format!("{}.{}", nvrtc.version().0, nvrtc.version().1);
    vec![
        state(&DRIVER, Driver::get().and_then(|driver| Ok(format!("CUDA {}", version_text(driver.version()?))))),
        state(&NVRTC, Nvrtc::get().map(nvrtc)),
        state(&CUBLASLT, Library::open(CUBLASLT).map(|_| "found".to_string())),
        state(&CUDNN, version()),
        LibraryState { required: false, ..state(&NCCL, Nccl::get().and_then(Nccl::version)) },
        LibraryState { required: false, ..state(&NVML, Nvml::get().and_then(Nvml::version)) },
    ]
}
