//! Entries on a link between a worker and a server: their number, then of each its header, its tensor's name and shape, and its bytes.

use crate::error::Error;
use kolo_comm::{Communicator, Fault};
use kolo_exec::store::{Role, Saved};
use kolo_graph::DType;
use kolo_graph::types::DIMS_MAX;

const ENTRIES_MAX: i64 = 1 << 24;
const NAME_BYTES_MAX: i64 = 1 << 12;
const BYTES_MAX: i64 = 1 << 42;

pub(super) fn send(link: &Communicator, to: usize, entries: &[Saved]) -> Result<(), Error> {
    link.send(&[entries.len() as i64], to)?;
    for Saved { tensor, whole, dtype, role, start, bytes } in entries {
        let dtype = DType::ALL.iter().position(|other| other == dtype).unwrap_or(0);
        let sizes = [tensor.len(), whole.len(), *start, bytes.len()].map(|size| size as i64);
        link.send(&[sizes[0], sizes[1], sizes[2], sizes[3], dtype as i64, *role as i64], to)?;
        link.send(tensor.as_bytes(), to)?;
        link.send(&whole.iter().map(|size| *size as i64).collect::<Vec<_>>(), to)?;
        link.send(bytes, to)?;
    }
    Ok(())
}

pub(super) fn receive(link: &Communicator, from: usize) -> Result<Vec<Saved>, Error> {
    let mut count = [0i64];
    link.recv(&mut count, from)?;
    (0..below(count[0], ENTRIES_MAX)?).map(|_| receive_one(link, from)).collect()
}

fn receive_one(link: &Communicator, from: usize) -> Result<Saved, Error> {
    let mut header = [0i64; 6];
    link.recv(&mut header, from)?;
    let dtype = usize::try_from(header[4]).ok().and_then(|at| DType::ALL.get(at).copied()).ok_or_else(garbled)?;
    let role = usize::try_from(header[5]).ok().and_then(|at| Role::ALL.get(at).copied()).ok_or_else(garbled)?;
    let mut name = vec![0u8; below(header[0], NAME_BYTES_MAX)?];
    link.recv(&mut name, from)?;
    let mut sizes = vec![0i64; below(header[1], DIMS_MAX as i64)?];
    link.recv(&mut sizes, from)?;
    let mut bytes = vec![0u8; below(header[3], BYTES_MAX)?];
    link.recv(&mut bytes, from)?;
    let tensor = String::from_utf8(name).map_err(|_| garbled())?;
    let whole = sizes.into_iter().map(|size| below(size, BYTES_MAX)).collect::<Result<Vec<usize>, Error>>()?;
    Ok(Saved { tensor, whole: whole.into(), dtype, role, start: below(header[2], BYTES_MAX)?, bytes })
}

fn below(number: i64, most: i64) -> Result<usize, Error> {
    usize::try_from(number).ok().filter(|_| number <= most).ok_or_else(garbled)
}

fn garbled() -> Error {
    Error::Together(Fault::BadCall("an entry of a server's state is malformed".into()))
}
