//! Entries on a link between a worker and a server: their number, then of each its header, its tensor's name and its values.

use crate::entries::{Entry, Role};
use crate::error::Error;
use kolo_comm::{Communicator, Fault};

const ENTRIES_MAX: i64 = 1 << 24;
const NAME_BYTES_MAX: i64 = 1 << 12;
const ELEMENTS_MAX: i64 = 1 << 40;

pub(super) fn send(link: &Communicator, to: usize, entries: &[Entry]) -> Result<(), Error> {
    link.send(&[entries.len() as i64], to)?;
    for Entry { tensor, start, role, values } in entries {
        link.send(&[tensor.len() as i64, *start as i64, *role as i64, values.len() as i64], to)?;
        link.send(tensor.as_bytes(), to)?;
        link.send(values, to)?;
    }
    Ok(())
}

pub(super) fn receive(link: &Communicator, from: usize) -> Result<Vec<Entry>, Error> {
    let mut count = [0i64];
    link.recv(&mut count, from)?;
    (0..below(count[0], ENTRIES_MAX)?).map(|_| receive_one(link, from)).collect()
}

fn receive_one(link: &Communicator, from: usize) -> Result<Entry, Error> {
    let mut header = [0i64; 4];
    link.recv(&mut header, from)?;
    let role = usize::try_from(header[2]).ok().and_then(|at| Role::ALL.get(at).copied()).ok_or_else(garbled)?;
    let mut name = vec![0u8; below(header[0], NAME_BYTES_MAX)?];
    link.recv(&mut name, from)?;
    let mut values = vec![0.0f32; below(header[3], ELEMENTS_MAX)?];
    link.recv(&mut values, from)?;
    let tensor = String::from_utf8(name).map_err(|_| garbled())?;
    Ok(Entry { tensor, start: below(header[1], ELEMENTS_MAX)?, role, values })
}

fn below(number: i64, most: i64) -> Result<usize, Error> {
    usize::try_from(number).ok().filter(|_| number <= most).ok_or_else(garbled)
}

fn garbled() -> Error {
    Error::Together(Fault::BadCall("an entry of a server's state makes no sense".into()))
}
