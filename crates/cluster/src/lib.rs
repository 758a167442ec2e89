#![doc = include_str!("../README.md")]

pub mod agent;
mod agent_message;
mod codec;
pub mod compute;
mod control_link;
pub mod coordinator;
mod coordinator_thread;
pub mod deadlines;
mod driver;
pub mod elastic;
mod ending_mark;
pub mod hostlist;
pub mod hosts;
pub mod interface;
pub mod introduction;
pub mod join;
pub mod launcher;
mod listener;
pub mod local;
pub mod logs;
pub mod member;
pub mod membership;
pub mod message;
mod monitor;
mod pipe;
mod poll;
mod printable;
mod process;
pub mod rank_state;
pub mod rendezvous;
#[cfg(test)]
mod simulation;
pub mod slurm;
mod startup_check;
pub mod startup_watch;
mod timeout;

pub use coordinator::Notice;
pub use introduction::{Introduction, Manifest};
pub use launcher::{Launcher, RankInfo, detect};
pub use local::{LocalOptions, Outcome};
pub use member::Member;
pub use printable::{one_message, printable};

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
