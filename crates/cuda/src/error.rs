//! What can go wrong with a GPU. Every message says what to do.

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    #[error("{title} is needed for {needed_for}, but cannot be loaded: {reason}\n  hint: {hint}")]
    MissingLibrary { title: &'static str, needed_for: &'static str, reason: String, hint: &'static str },
    #[error("{title} has no function `{symbol}`, which {needed_for} needs: it is too old\n  hint: {hint}")]
    MissingFunction { symbol: &'static str, title: &'static str, needed_for: &'static str, hint: &'static str },
    #[error("the NVIDIA driver supports CUDA {found}, but kolo needs {needed}\n  hint: install a newer driver")]
    OldDriver { found: String, needed: String },
    #[error("there is no CUDA device\n  hint: check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use `--device cpu`")]
    NoDevice,
    #[error("there is no CUDA device {index}: this machine has {}\n  hint: `kolo devices` lists them", devices(*.count))]
    NoSuchDevice { index: usize, count: usize },
    #[error(
        "{device} has compute capability {found}, but kolo needs {needed}\n  hint: use `--device cpu`, or another GPU"
    )]
    OldDevice { device: String, found: String, needed: String },
    #[error("{call} failed on {device}: {text} ({code})\n  hint: {hint}")]
    Call { call: &'static str, device: String, code: i32, text: String, hint: &'static str },
    #[error(
        "a kernel does not compile for {arch}:\n{log}\n  hint: this is a bug in kolo; please report it with the output of `kolo devices`"
    )]
    Compile { arch: String, log: String },
    #[error("{0}")]
    Memory(String),
    #[error(
        "the GPU has no kernel for `{op}`{layer}\n  hint: use `--device cpu`; a program's own op needs `impl Cuda` and `OpKind::with_cuda`"
    )]
    MissingKernel {
        op: String,
        /// Where the op stands, as the message has it; empty if no layer made it.
        layer: String,
    },
    #[error("{0}")]
    Other(String),
}

fn devices(count: usize) -> String {
    match count {
        1 => "one, number 0".into(),
        count => format!("{count}, numbered from 0"),
    }
}
