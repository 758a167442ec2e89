//! What a device with memory of its own leaves in the memory of the host.

/// `[memory] offload` of a job. It changes where things are kept and updated, and no bit of any result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Offload {
    /// Everything that a step uses is in the device's memory.
    #[default]
    None,
    /// The optimizer's state, and weights of which the device reads a half-precision copy alone, are in the host's memory and
    /// updated there.
    Optimizer,
    /// So are all large weights, in the precision that the device computes with: each comes to the device shortly before it is used, and
    /// is gone when it was.
    Weights,
}

impl Offload {
    pub const ALL: [Offload; 3] = [Offload::None, Offload::Optimizer, Offload::Weights];
    pub const NAMES: [&'static str; 3] = ["none", "optimizer", "weights"];

    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }
}
