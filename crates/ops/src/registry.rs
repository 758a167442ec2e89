//! All kinds of op: those of this crate, and those that a program brings.

use kolo_base::{read, write};
use kolo_graph::op::{CpuSide, CudaSide};
use kolo_graph::{Cpu, Cuda, Op, OpKind};
use std::collections::HashMap;
use std::sync::{LazyLock, RwLock};

#[derive(Debug)]
struct Kinds {
    /// In the order in which they were registered.
    all: Vec<OpKind>,
    sides: HashMap<&'static str, Sides>,
}

/// What leads from an op of a kind to how each device runs it.
#[derive(Clone, Copy, Debug)]
struct Sides {
    cpu: Option<CpuSide>,
    cuda: Option<CudaSide>,
}

static KINDS: LazyLock<RwLock<Kinds>> = LazyLock::new(|| {
    let mut kinds = Kinds { all: Vec::new(), sides: HashMap::new() };
    kinds.add(&crate::built_in()).expect("every op has a name of its own");
    RwLock::new(kinds)
});

impl Kinds {
    /// Adds all of them, or none.
    fn add(&mut self, kinds: &[OpKind]) -> Result<(), String> {
        for (at, kind) in kinds.iter().enumerate() {
            let name = kind.name;
            if self.sides.contains_key(name) || kinds[..at].iter().any(|other| other.name == name) {
                return Err(format!("an op `{name}` already exists; give yours another name"));
            }
            let allowed = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_';
            if !name.starts_with(|first: char| first.is_ascii_lowercase()) || !name.chars().all(allowed) {
                return Err(format!(
                    "`{name}` cannot be the name of an op; use lower-case letters, digits and `_`, and begin with a letter"
                ));
            }
        }
        let sides = |kind: &OpKind| (kind.name, Sides { cpu: kind.cpu, cuda: kind.cuda });
        self.sides.extend(kinds.iter().map(sides));
        self.all.extend(kinds);
        Ok(())
    }
}

/// Every kind of op: what the parser knows, and what the documentation and the conformance suite go through.
pub fn registry() -> Vec<OpKind> {
    read(&KINDS).all.clone()
}

/// Adds a program's own kinds, before it builds or reads a graph with them. A name that is taken is an error, and then none
/// of them is added.
pub fn register(kinds: &'static [OpKind]) -> Result<(), String> {
    write(&KINDS).add(kinds)
}

/// How the CPU runs an op; `None` if it has no kernel for it, or if the op's kind is not registered.
pub fn cpu_of(op: &dyn Op) -> Option<&dyn Cpu> {
    cpu_side(op)?(op)
}

/// What leads from this op, and any of its kind, to how the CPU runs it. Whoever holds an op for long asks once.
pub fn cpu_side(op: &dyn Op) -> Option<CpuSide> {
    let side = read(&KINDS).sides.get(op.name())?.cpu;
    // A name may be that of another kind, which does not know this op.
    side.filter(|side| side(op).is_some())
}

/// How an NVIDIA GPU runs an op; `None` if it has no kernel for it, or if the op's kind is not registered.
pub fn cuda_of(op: &dyn Op) -> Option<&dyn Cuda> {
    let side = read(&KINDS).sides.get(op.name())?.cuda?;
    side(op)
}
