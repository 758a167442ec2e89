//! Who is missing when a collective does not move.
//!
//! MPI does not tell whom a collective waits for. So a rank that has waited for half the deadline tells all others where it
//! waits; at the deadline, those that have not said so are the ones that did not come.

use super::abi::Handle;
use super::group::{MpiGroup, Wait};
use super::library::MpiStatus;
use crate::fault::Fault;
use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering;

/// Tag of wait reports, apart from the tags of the wire.
const WAIT_TAG: c_int = 3;
/// Tests until a small message that has arrived is copied out.
const TESTS: u32 = 10_000;

/// What was sent to the others.
pub(super) struct WaitReport {
    /// Freed only once MPI is through with it.
    turn: ManuallyDrop<Box<i64>>,
    requests: Vec<Handle>,
}

impl MpiGroup {
    fn peers(&self) -> impl Iterator<Item = usize> {
        let rank = self.rank();
        (0..self.size()).filter(move |peer| *peer != rank)
    }

    fn turn(&self) -> i64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// Tells all others that this rank waits, and where. The report is kept until the wait is over.
    pub fn report(&self) -> Result<WaitReport, Fault> {
        let mut report = WaitReport { turn: ManuallyDrop::new(Box::new(self.turn())), requests: Vec::new() };
        let long = self.library().constants.long();
        for peer in self.peers() {
            let mut request: Handle = 0;
            let data = (&raw const **report.turn).cast();
            // SAFETY: one integer that stays in its box until the request is done, or for ever.
            self.library().call("Isend", |f| unsafe {
                (f.isend)(data, 1, long, peer as c_int, WAIT_TAG, self.comm, &mut request)
            })?;
            report.requests.push(request);
        }
        Ok(report)
    }

    /// Takes a report back after the wait.
    pub fn retract(&self, mut report: WaitReport) {
        if report.requests.iter_mut().all(|request| self.test(request).unwrap_or(false)) {
            drop(ManuallyDrop::into_inner(report.turn));
        }
    }

    /// Whether `peer` reported that it waits where we do. Reports of earlier waits are thrown away.
    fn is_here(&self, peer: usize) -> Result<bool, Fault> {
        let long = self.library().constants.long();
        loop {
            let (mut arrived, mut status): (c_int, MpiStatus) = (0, MpiStatus::new());
            // SAFETY: looks for a message, and takes nothing.
            self.library().call("Iprobe", |f| unsafe {
                (f.iprobe)(peer as c_int, WAIT_TAG, self.comm, &mut arrived, &mut status)
            })?;
            if arrived == 0 {
                return Ok(false);
            }
            let (mut turn, mut request): (Box<i64>, Handle) = (Box::new(-1), 0);
            let data = (&raw mut *turn).cast();
            // SAFETY: one integer that stays in its box until the request is done, or for ever.
            self.library().call("Irecv", |f| unsafe {
                (f.irecv)(data, 1, long, peer as c_int, WAIT_TAG, self.comm, &mut request)
            })?;
            let mut tests = 0..TESTS;
            while !self.test(&mut request)? {
                if tests.next().is_none() {
                    Box::leak(turn);
                    return Ok(false);
                }
            }
            if *turn == self.turn() {
                return Ok(true);
            }
        }
    }

    /// The fault of a call that did not move for so long.
    pub fn stalled(&self, wait: Wait<'_>, waited_ms: u64) -> Fault {
        let absent = self.peers().find(|peer| !self.is_here(*peer).unwrap_or(false));
        let Some(peer) = absent else {
            let error = format!("all ranks are in it, but nothing moved for {waited_ms} ms");
            return Fault::System { what: format!("MPI during {}", wait.during), error };
        };
        let peer = self.world_rank(peer);
        Fault::Stalled { peer, host: wait.watch.host(peer), during: wait.during.to_string(), waited_ms }
    }
}
