//! Runs graphs on NVIDIA GPUs.
//!
//! Nothing of CUDA is linked: the driver, NVRTC, cuBLASLt and cuDNN are opened when a graph is compiled for a GPU, and one that is missing
//! is an error with a name. An op says what to run as data ([`kolo_graph::cuda`]); here its kernels are compiled and every operand gets
//! its address. A session's arenas are one allocation each, and its calls run in the order of one stream.

mod abilities;
mod captured;
mod commands;
mod convolutions;
mod coverage;
mod description;
mod device;
mod driver;
mod error;
mod executor;
#[cfg(test)]
mod fake;
#[cfg(test)]
mod fake_nccl;
#[cfg(test)]
mod fake_streams;
mod fetches;
mod gpu;
mod host_part;
mod host_places;
mod host_work;
mod inputs;
mod kernel_cache;
mod kernels;
mod library;
mod lowering;
mod memory;
mod memory_check;
mod mirror;
mod nccl;
mod nccl_check;
mod nccl_group;
mod nccl_plan;
#[cfg(test)]
mod nccl_tests;
mod nvml;
mod nvrtc;
mod places;
mod product_trials;
mod products;
mod rates;
mod stream_weights;
mod survey;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_of_streams;

pub use coverage::compile_cases;
pub use error::CudaError;
pub use executor::Cuda;
pub use gpu::{DeviceInfo, devices};
pub use nccl_check::{NcclCheck, check_nccl};
pub use rates::{GpuRate, GpuWork, measure};
pub use survey::{LibraryState, libraries};
