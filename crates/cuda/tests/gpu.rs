//! What needs a GPU: skipped, with a word, where there is none. `kolo selftest --device cuda` is the whole of it.

use kolo_cuda::Cuda;
use kolo_exec::{Executor, selftest};
use std::sync::Arc;

/// Whether there is a GPU to test on; says so if there is none.
fn has_gpu() -> bool {
    match kolo_cuda::devices() {
        Ok(devices) if !devices.is_empty() => true,
        Ok(_) => {
            println!("skipped: no CUDA device");
            false
        }
        Err(error) => {
            println!("skipped: no CUDA device ({})", error.to_string().lines().next().unwrap_or_default());
            false
        }
    }
}

#[test]
fn some_ops_compute_what_they_are_defined_to() {
    if !has_gpu() {
        return;
    }
    let some = ["matmul", "add", "softmax", "layer_norm", "sum", "adam", "cast", "cross_entropy"];
    let kinds: Vec<_> = kolo_ops::registry().into_iter().filter(|kind| some.contains(&kind.name)).collect();
    assert!(kinds.len() > 4, "{} ops", kinds.len());
    let executor: Arc<dyn Executor> = Arc::new(Cuda { poison: true, ..Cuda::default() });
    let outcomes = selftest::run(&executor, &kinds, |_| ());
    for outcome in &outcomes {
        assert_eq!(outcome.failed, 0, "{}: {:?}", outcome.name, outcome.failures);
        assert!(!outcome.cases.is_empty(), "{} has cases", outcome.name);
    }
}
