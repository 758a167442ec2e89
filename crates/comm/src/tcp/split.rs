//! Fewer ranks under another number: a mesh of its own, met through the one that is there.

use super::mesh::MeshRank;
use super::wire::TcpWire;
use crate::call::{CallKind, Fingerprint, short_name};
use crate::element::{ElementType, Reduction};
use crate::fault::Fault;
use crate::transport::Bootstrap;
use crate::watch::{Backoff, Pause};
use crate::wire::{SplitWire, Wire};
use std::sync::Arc;

/// Members find each other through the wire they already share.
struct Through<'a> {
    wire: &'a mut TcpWire,
    members: &'a [usize],
    communicator: u32,
}

impl Bootstrap for Through<'_> {
    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Fault> {
        let me = self.wire.mesh_rank.rank;
        let call = Fingerprint {
            communicator: self.wire.mesh_rank.communicator,
            // A message's number means nothing to ranks outside the split.
            kind: CallKind::Send,
            element: ElementType::U8,
            reduction: Reduction::Sum,
            root: 0,
            sequence: u64::from(self.communicator),
            count: mine.len() as u64,
            name: short_name("split"),
        };
        let mut all: Vec<Vec<u8>> = self.members.iter().map(|_| mine.to_vec()).collect();
        let mut pending = Vec::new();
        for (member, theirs) in self.members.iter().zip(&mut all).filter(|(member, _)| **member != me) {
            // SAFETY: `mine` and `all` outlive the waiting below; on a fault the wire moves nothing any more.
            let sent = unsafe { self.wire.send(*member, &call, mine.as_ptr(), mine.len()) }?;
            // SAFETY: as above.
            let received = unsafe { self.wire.recv(*member, &call, theirs.as_mut_ptr(), theirs.len()) }?;
            pending.push((*member, sent, received));
        }
        let watch = Arc::clone(&self.wire.watch);
        let mut backoff = Backoff::new(&watch);
        while let Some((member, ..)) = {
            pending.retain(|(_, sent, received)| !self.wire.sent(*sent) || !self.wire.received(*received));
            pending.first()
        } {
            if self.wire.progress()? {
                backoff.reset();
                continue;
            }
            let (peer, host) = self.wire.named(*member);
            let stalled = |waited_ms| Fault::Stalled { peer, host, during: "a split".into(), waited_ms };
            backoff.sleep_after(self.wire.turns());
            match backoff.turn(stalled) {
                Ok(Pause::Sleep(at_most)) => self.wire.wait(at_most),
                Ok(_) => {}
                Err(fault) => {
                    self.wire.cancel(&fault);
                    return Err(self.wire.fail(fault));
                }
            }
        }
        Ok(all)
    }
}

impl SplitWire for TcpWire {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn hosts(&self) -> &[usize] {
        &self.hosts
    }

    fn job_rank(&self, rank: usize) -> usize {
        self.mesh_rank.world[rank]
    }

    /// A mesh of its own for these members, met through this one.
    fn split(&mut self, members: &[usize], communicator: u32) -> Result<Self, Fault> {
        let rank = members.iter().position(|member| *member == self.mesh_rank.rank);
        let rank = rank.ok_or_else(|| Fault::BadCall("a split without the rank that calls it".into()))?;
        let world = members.iter().map(|member| self.mesh_rank.world[*member]).collect();
        let mesh_rank = MeshRank { rank, communicator, world };
        let (options, watch) = (self.options.clone(), Arc::clone(&self.watch));
        Self::join(mesh_rank, options, watch, &mut Through { wire: self, members, communicator })
    }
}
