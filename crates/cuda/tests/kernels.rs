//! What can be known of the GPU's kernels without a GPU: every source that any case of any op asks for compiles, where NVRTC is found.

use kolo_cuda::{CudaError, compile_cases};
use kolo_graph::cuda::CudaTarget;

#[test]
fn sources_of_all_cases_compile() {
    match compile_cases(&kolo_ops::registry(), &CudaTarget::default()) {
        Err(missing @ (CudaError::MissingLibrary { .. } | CudaError::MissingFunction { .. })) => {
            println!("skipped: {missing}");
        }
        Err(error) => panic!("{error}"),
        Ok(compiled) => {
            println!("{compiled} sources");
            assert!(compiled > 0);
        }
    }
}
