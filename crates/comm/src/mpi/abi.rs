//! What the three families of MPI libraries write differently in their headers: handles and a few constants.
//!
//! A handle is a machine word here. Open MPI and the standard ABI pass pointers; the MPICH family passes C ints, which
//! on a little-endian 64-bit machine are read from, and written to, the lower half of the word. A word starts as 0
//! before a library writes it, so that the upper half stays 0.

use crate::element::{ElementType, Reduction};
use std::ffi::{c_int, c_void};

#[cfg(not(all(target_endian = "little", target_pointer_width = "64")))]
compile_error!("MPI handles are passed as 64-bit little-endian words");

/// A communicator, group, request, data type, operation or error handler.
pub(super) type Handle = usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MpiFamily {
    OpenMpi,
    Mpich,
    /// MPI 5.0's own binary interface.
    Standard,
}

impl MpiFamily {
    pub fn name(self) -> &'static str {
        match self {
            MpiFamily::OpenMpi => "Open MPI",
            MpiFamily::Mpich => "MPICH",
            MpiFamily::Standard => "the MPI 5 standard interface",
        }
    }
}

/// The constants of one family.
#[derive(Debug)]
pub(super) struct Constants {
    pub family: MpiFamily,
    pub world: Handle,
    pub errors_return: Handle,
    pub in_place: *const c_void,
    pub thread_serialized: c_int,
    pub thread_multiple: c_int,
    /// In the order of `DATATYPES`.
    datatypes: [Handle; 6],
    /// In the order of `OPERATIONS`.
    operations: [Handle; 4],
}

// SAFETY: the pointer is a constant that nobody follows.
unsafe impl Send for Constants {}
// SAFETY: as above.
unsafe impl Sync for Constants {}

/// The data types of which we make use, by the end of Open MPI's symbol.
const DATATYPES: [&str; 6] = ["float", "double", "int32_t", "int64_t", "uint8_t", "uint16_t"];
const OPERATIONS: [&str; 4] = ["sum", "min", "max", "prod"];

impl Constants {
    /// The family of a library, by its symbols. `standard` says whether it claims MPI's own binary interface.
    pub fn of(standard: bool, symbol: &dyn Fn(&str) -> Option<usize>) -> Result<Self, String> {
        if standard {
            return Ok(Self::standard());
        }
        if symbol("ompi_mpi_comm_world").is_some() { Self::open_mpi(symbol) } else { Ok(Self::mpich()) }
    }

    fn standard() -> Self {
        Self {
            family: MpiFamily::Standard,
            world: 0x101,
            errors_return: 0x143,
            in_place: std::ptr::without_provenance(1),
            thread_serialized: 2048,
            thread_multiple: 4096,
            datatypes: [0x210, 0x214, 0x250, 0x258, 0x241, 0x249],
            operations: [0x21, 0x22, 0x23, 0x24],
        }
    }

    fn mpich() -> Self {
        Self {
            family: MpiFamily::Mpich,
            world: 0x4400_0000,
            errors_return: 0x5400_0001,
            in_place: std::ptr::without_provenance(usize::MAX),
            thread_serialized: 2,
            thread_multiple: 3,
            datatypes: [0x4c00_040a, 0x4c00_080b, 0x4c00_0439, 0x4c00_083a, 0x4c00_013b, 0x4c00_023c],
            operations: [0x5800_0003, 0x5800_0002, 0x5800_0001, 0x5800_0004],
        }
    }

    fn open_mpi(symbol: &dyn Fn(&str) -> Option<usize>) -> Result<Self, String> {
        let find = |name: String| symbol(&name).ok_or_else(|| format!("it lacks the symbol {name}"));
        let mut datatypes = [0; DATATYPES.len()];
        for (handle, name) in datatypes.iter_mut().zip(DATATYPES) {
            *handle = find(format!("ompi_mpi_{name}"))?;
        }
        let mut operations = [0; OPERATIONS.len()];
        for (handle, name) in operations.iter_mut().zip(OPERATIONS) {
            *handle = find(format!("ompi_mpi_op_{name}"))?;
        }
        Ok(Self {
            family: MpiFamily::OpenMpi,
            world: find("ompi_mpi_comm_world".into())?,
            errors_return: find("ompi_mpi_errors_return".into())?,
            in_place: std::ptr::without_provenance(1),
            thread_serialized: 2,
            thread_multiple: 3,
            datatypes,
            operations,
        })
    }

    /// The type in which MPI can do arithmetic on an element. There is none for sixteen-bit floats.
    pub fn number(&self, element: ElementType) -> Option<Handle> {
        match element {
            ElementType::F32 => Some(self.datatypes[0]),
            ElementType::F64 => Some(self.datatypes[1]),
            ElementType::I32 => Some(self.datatypes[2]),
            ElementType::I64 => Some(self.datatypes[3]),
            ElementType::U8 => Some(self.datatypes[4]),
            ElementType::Bf16 | ElementType::F16 => None,
        }
    }

    /// A type of the element's width, to move it.
    pub fn bits(&self, element: ElementType) -> Handle {
        match element.bytes() {
            1 => self.byte(),
            2 => self.datatypes[5],
            4 => self.datatypes[2],
            _ => self.long(),
        }
    }

    pub fn byte(&self) -> Handle {
        self.datatypes[4]
    }

    /// A signed 64-bit integer.
    pub fn long(&self) -> Handle {
        self.datatypes[3]
    }

    /// A mean is a sum that is divided afterwards.
    pub fn operation(&self, reduction: Reduction) -> Handle {
        match reduction {
            Reduction::Sum | Reduction::Mean => self.operations[0],
            Reduction::Min => self.operations[1],
            Reduction::Max => self.operations[2],
            Reduction::Product => self.operations[3],
        }
    }
}
