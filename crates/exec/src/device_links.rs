//! What a device with memory of its own offers to exchange with the devices of other ranks directly, without the host's memory.
//!
//! Who exchanges what is not its matter: whoever runs the collectives makes groups of ranks, checks that they agree, and watches
//! over them. A group's work is queued on the device, in the order in which it was started.

use crate::exchange::{Exchange, ExchangeError};
use std::fmt::Debug;
use std::sync::Arc;

/// Whether devices are to exchange directly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkPreference {
    /// If all ranks can.
    #[default]
    Auto,
    /// It is an error if they cannot.
    Always,
    /// Through the memory of the host.
    Never,
}

/// A device's links, or why it has none.
pub type FoundLinks = Result<Arc<dyn DeviceLinks>, ExchangeError>;

/// Looks whether a wait may go on; an error ends it.
pub type Look = Arc<dyn Fn() -> Result<(), ExchangeError> + Send + Sync>;

/// A rank's place in a group: its number, and how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupPlace {
    pub rank: usize,
    pub size: usize,
}

/// Makes groups of devices.
pub trait DeviceLinks: Debug + Send + Sync {
    /// As `--transport` has it.
    fn transport(&self) -> &'static str;

    /// Which device it is: no other on any host has the same. Two ranks of one device cannot exchange directly.
    fn identity(&self) -> Result<Vec<u8>, ExchangeError>;

    /// What the other members of a group need to find the member that called this.
    fn invite(&self) -> Result<Vec<u8>, ExchangeError>;

    /// Joins the group of an invitation, with all its members. `look` is asked again and again while it waits.
    fn join(&self, invitation: &[u8], place: GroupPlace, look: Look) -> Result<Box<dyn DeviceGroup>, ExchangeError>;
}

/// A group of devices that exchange directly, as one of them sees it. Ranks in exchanges are those of the group.
pub trait DeviceGroup: Debug + Send + Sync {
    /// Makes ready for an exchange of memory of the device; its ticket. If `reproducible`, sums have the promised bits.
    fn prepare(&self, exchange: &Exchange, reproducible: bool) -> Result<usize, ExchangeError>;

    /// Queues a prepared exchange behind all that the device was given to compute.
    fn start(&self, ticket: usize) -> Result<(), ExchangeError>;

    /// What the device is given to compute from here on comes after the exchange.
    fn order(&self, ticket: usize) -> Result<(), ExchangeError>;

    /// Whether a started exchange is done, or the group failed.
    fn is_done(&self, ticket: usize) -> Result<bool, ExchangeError>;

    /// Breaks off whatever is under way, so that nothing on the device waits for other ranks any more.
    fn abort(&self);
}
