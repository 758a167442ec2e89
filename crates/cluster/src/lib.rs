#![doc = include_str!("../README.md")]

pub mod agent;
mod codec;
pub mod coordinator;
mod driver;
mod hall;
mod hosting;
pub mod hostlist;
pub mod hosts;
pub mod interface;
pub mod introduction;
pub mod launcher;
mod line;
pub mod local;
pub mod logs;
pub mod meet;
pub mod member;
pub mod membership;
pub mod message;
mod monitor;
mod order;
pub mod pace;
mod pipe;
pub mod presence;
mod printable;
mod process;
pub mod rendezvous;
mod roll;
pub mod seat;
mod silence;
#[cfg(test)]
mod simulation;
pub mod slurm;

pub use coordinator::Notice;
pub use introduction::{Introduction, Manifest};
pub use launcher::{Launcher, Place, detect};
pub use local::{Options, Outcome};
pub use member::Member;
pub use printable::printable;

use kolo_comm::Fault;

/// Random bytes from the operating system.
fn random<const BYTES: usize>() -> Result<[u8; BYTES], Fault> {
    let mut bytes = [0; BYTES];
    let mut filled = 0;
    while filled < BYTES {
        // SAFETY: the rest of our own array.
        let count = unsafe { libc::getrandom(bytes[filled..].as_mut_ptr().cast(), BYTES - filled, 0) };
        if count < 0 {
            let error = std::io::Error::last_os_error();
            if error.kind() != std::io::ErrorKind::Interrupted {
                return Err(Fault::system("asking for random bytes", &error));
            }
        }
        filled += count.max(0) as usize;
    }
    Ok(bytes)
}

/// The name of this host, for messages.
pub fn host_name() -> String {
    const NAME_BYTES: usize = 256;
    let mut bytes = [0u8; NAME_BYTES];
    // SAFETY: our own array, with room for the end mark.
    if unsafe { libc::gethostname(bytes.as_mut_ptr().cast(), NAME_BYTES - 1) } != 0 {
        return "localhost".into();
    }
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}
