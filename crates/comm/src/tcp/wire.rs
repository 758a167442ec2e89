//! The wire over the streams of a mesh.

use super::TcpOptions;
use super::frame::FrameKind;
use super::mesh::{self, MeshRank};
use super::peer::{PeerStream, StreamState, TcpPeer};
use super::poll;
use super::reader::StreamStop;
use crate::call::{CallKind, Fingerprint};
use crate::failure_report;
use crate::fault::{Fault, rank_name};
use crate::transport::Bootstrap;
use crate::watch::Watch;
use crate::wire::Wire;
use std::io::Read;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bits of a number that are the message; the rest is the peer.
const MESSAGE_BITS: u32 = 40;
/// With more streams than this, one look at all of them is cheaper than trying each.
const TRIED_MAX: usize = 2;
/// Looks at the streams before waiting for them: a little longer than waking up takes.
const TURNS: u32 = 200;
/// The same where the ranks of a host have no processor each, and a peer may need this one.
const TURNS_CROWDED: u32 = 2;
/// How long a leaving rank may take to say goodbye to peers that do not read.
const GOODBYE_LIMIT: Duration = Duration::from_millis(500);
/// Turns in which nothing moves, and time at most, before a loss is reported: what arrived before it may be all that the
/// call needs.
const LOSS_GRACE_TURNS: u32 = 2;
const LOSS_GRACE_LIMIT: Duration = Duration::from_millis(10);
/// A rank that waits longer than this says in which call.
const NOTICE_AFTER: Duration = Duration::from_millis(100);
/// How long a failing rank may take to say why.
const FAILURE_REPORT_LIMIT: Duration = Duration::from_millis(100);

/// One rank's end of a mesh of TCP streams.
pub struct TcpWire {
    pub(super) mesh_rank: MeshRank,
    pub(super) options: TcpOptions,
    pub(super) watch: Arc<Watch>,
    /// By rank; this rank's own is empty.
    peers: Vec<TcpPeer>,
    sockets: Vec<libc::pollfd>,
    /// After a fault the wire is of no more use.
    fault: Option<Fault>,
    /// A fault that waits until all that came before it was worked off, and since when.
    pending_fault: Option<(Fault, Instant)>,
    /// Something came at once from what was held, or else how many turns nothing has moved.
    settled: bool,
    still: u32,
    /// Of all peers together.
    streams: usize,
    /// Each rank's host, by number.
    pub(super) hosts: Vec<usize>,
    turns: u32,
    /// The call whose messages came last.
    call: Option<Fingerprint>,
    /// Since when nothing has moved, if anything is awaited.
    idle: Option<Instant>,
    /// The call of which the peers were told.
    told: Option<Fingerprint>,
}

impl std::fmt::Debug for TcpWire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TcpWire of rank {} of {}", self.mesh_rank.rank, self.peers.len())
    }
}

// SAFETY: the pointers in the queues are promised by `send` and `recv` to be valid wherever the wire is used.
unsafe impl Send for TcpWire {}

impl TcpWire {
    pub(super) fn join(
        mesh_rank: MeshRank,
        options: TcpOptions,
        watch: Arc<Watch>,
        bootstrap: &mut dyn Bootstrap,
    ) -> Result<Self, Fault> {
        let joined = mesh::connect_mesh(&options, &mesh_rank, &watch, bootstrap)?;
        let peers: Result<Vec<TcpPeer>, Fault> =
            joined.into_iter().map(|joined| TcpPeer::new(joined, &options, watch.stall())).collect();
        let peers = peers?;
        let streams = peers.iter().map(|peer| peer.streams.len()).sum();
        for (peer, rank) in peers.iter().zip(&mesh_rank.world) {
            peer.streams.iter().for_each(|stream| watch.add_path(*rank, Arc::downgrade(&stream.socket)));
        }
        let names: Vec<String> = mesh_rank.world.iter().map(|rank| watch.host(*rank)).collect();
        let host = |name: &String| names.iter().position(|other| other == name).unwrap_or(0);
        let hosts: Vec<usize> = names.iter().map(host).collect();
        let same_host = hosts.iter().filter(|other| **other == hosts[mesh_rank.rank]).count();
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        let turns = if same_host > processors { TURNS_CROWDED } else { TURNS };
        Ok(Self {
            mesh_rank,
            options,
            watch,
            peers,
            streams,
            hosts,
            turns,
            sockets: Vec::new(),
            fault: None,
            pending_fault: None,
            settled: false,
            still: 0,
            call: None,
            idle: None,
            told: None,
        })
    }

    /// The rank of the job that `peer` is.
    pub(super) fn named(&self, peer: usize) -> (usize, String) {
        let rank = self.mesh_rank.world[peer];
        (rank, self.watch.host(rank))
    }

    /// The call in which this rank waits, for that peer if it does.
    fn waits(&self, peer: usize) -> Option<Fingerprint> {
        let waiting = |peer: &TcpPeer| peer.inbox.waiting().or(peer.outbox.waiting()).copied();
        waiting(&self.peers[peer]).or_else(|| self.peers.iter().find_map(waiting))
    }

    fn lost(&self, peer: usize, why: impl Into<String>) -> Fault {
        let (rank, host) = self.named(peer);
        let during = self.waits(peer).map_or_else(|| "a call".into(), |call| call.to_string());
        Fault::Lost { peer: rank, host, during, why: why.into() }
    }

    /// What a stopped stream means for the caller.
    fn explain(&self, peer: usize, stop: StreamStop) -> Fault {
        let (rank, host) = self.named(peer);
        let rejected = |why: String| Fault::Rejected { from: rank_name(rank, &host), why };
        match stop {
            StreamStop::End => self.lost(peer, "its end of the link closed"),
            StreamStop::Goodbye => self.lost(peer, "it left the job"),
            StreamStop::System(error) => self.lost(peer, error.to_string()),
            StreamStop::Malformed(malformed) => rejected(malformed.to_string()),
            StreamStop::Failed(failure) => {
                let (own, call) = (self.mesh_rank.world[self.mesh_rank.rank], self.waits(peer));
                let told = failure_report::decode(&failure, rank, own, call.as_ref(), &self.watch);
                told.unwrap_or_else(|| rejected("its failure report is malformed".into()))
            }
            StreamStop::Mismatch { mine, mine_bytes, theirs, theirs_bytes } => {
                self.mismatch(peer, (*mine, mine_bytes), (*theirs, theirs_bytes))
            }
        }
    }

    fn mismatch(&self, peer: usize, mine: (Fingerprint, usize), theirs: (Fingerprint, usize)) -> Fault {
        let ((rank, host), (peer, peer_host)) = (self.named(self.mesh_rank.rank), self.named(peer));
        // Calls that agree in all but the bytes of a part: the part is what to show.
        let shown = |(call, bytes): (Fingerprint, usize), other: Fingerprint| {
            let part = Fingerprint { count: (bytes / call.element.bytes()) as u64, ..call };
            Box::new(if call == other { part } else { call })
        };
        let (mine, theirs) = (shown(mine, theirs.0), shown(theirs, mine.0));
        Fault::Mismatch { rank, host, mine, peer, peer_host, theirs }
    }

    /// A peer that waits in another call of the same number will wait for ever.
    fn compare_notices(&mut self) -> Result<(), Fault> {
        let Some(mine) = self.call.filter(|call| !call.kind.is_message()) else { return Ok(()) };
        let other = |peer: &TcpPeer| {
            let number = |call: &Fingerprint| (call.communicator, call.kind.is_message(), call.sequence);
            peer.inbox.notice().copied().filter(|theirs| number(theirs) == number(&mine))
        };
        for peer in 0..self.peers.len() {
            if let Some(theirs) = other(&self.peers[peer])
                && theirs != mine
            {
                let fault = self.mismatch(peer, (mine, 0), (theirs, 0));
                return Err(self.fail(fault));
            }
        }
        Ok(())
    }

    /// Tells all peers where this rank waits, once per call.
    fn notify(&mut self) {
        let Some(call) = self.call.filter(|call| self.told != Some(*call)) else { return };
        if self.idle.get_or_insert_with(Instant::now).elapsed() > NOTICE_AFTER {
            self.told = Some(call);
            self.peers.iter_mut().filter(|peer| !peer.gone()).for_each(|peer| peer.outbox.set_notice(call));
        }
    }

    /// Bytes kept of messages that nobody has asked for.
    pub fn held_bytes(&self) -> usize {
        self.peers.iter().map(|peer| peer.inbox.held_bytes()).sum()
    }

    /// Keeps the first fault: whatever comes after it is a consequence.
    pub(super) fn fail(&mut self, fault: Fault) -> Fault {
        self.fault.get_or_insert(fault).clone()
    }

    /// Asks for what each stream needs, in the order of peers and streams.
    fn look(&mut self, at_most: Duration) -> bool {
        self.sockets.clear();
        for peer in &self.peers {
            let busy = !peer.outbox.is_empty();
            self.sockets.extend(peer.streams.iter().map(|stream| {
                let (write, read) = (busy || stream.writer.pending(), !stream.reader.awaits_buffer());
                match stream.state {
                    StreamState::Open => poll::interest(stream.socket.as_raw_fd(), read, write),
                    StreamState::Ended if write => poll::interest(stream.socket.as_raw_fd(), false, true),
                    _ => poll::interest(-1, false, false),
                }
            }));
        }
        poll::wait(&mut self.sockets, at_most)
    }

    /// Lets every stream of `peer` move.
    fn pump(&mut self, peer: usize, at: usize, looked: bool) -> Result<bool, Fault> {
        let TcpPeer { streams, inbox, outbox } = &mut self.peers[peer];
        let (mut moved, mut stopped) = (false, None);
        for (index, stream) in streams.iter_mut().enumerate() {
            // A stream that waits for a receive may have got it since.
            if looked && self.sockets[at + index].revents == 0 && !stream.reader.awaits_buffer() {
                continue;
            }
            // SAFETY: `send` and `recv` took the promise that the buffers are valid, and `cancel` ends all pumping.
            match unsafe { stream.pump(inbox, outbox) } {
                Ok(some) => moved |= some,
                // Something may have come before the end.
                Err(stop @ (StreamStop::End | StreamStop::System(_) | StreamStop::Failed(_))) => {
                    (moved, stopped) = (true, Some(stop))
                }
                Err(stop) => {
                    let fault = self.explain(peer, stop);
                    return Err(self.fail(fault));
                }
            }
        }
        if stopped.is_none() && moved && self.peers[peer].gone() && self.peers[peer].inbox.waiting().is_some() {
            stopped = Some(StreamStop::Goodbye);
        }
        if let Some(stop) = stopped {
            let fault = self.explain(peer, stop);
            self.pending_fault.get_or_insert_with(|| (fault, Instant::now()));
        }
        Ok(moved)
    }

    /// After a turn: whether a fault is due.
    fn judge(&mut self, moved: bool) -> Result<(), Fault> {
        self.still = if moved { 0 } else { self.still + 1 };
        if let Some((fault, since)) = &self.pending_fault
            && (self.still >= LOSS_GRACE_TURNS || since.elapsed() > LOSS_GRACE_LIMIT)
        {
            let fault = fault.clone();
            return Err(self.fail(fault));
        }
        if moved {
            self.idle = None;
            self.compare_notices()?;
        }
        Ok(())
    }

    fn refuse_broken(&self) -> Result<(), Fault> {
        self.fault.clone().map_or(Ok(()), Err)
    }

    /// Says a last word to all peers, and waits a little until it has left.
    fn leave(&mut self, kind: FrameKind, payload: &[u8], at_most: Duration) {
        let streams = self.peers.iter_mut().flat_map(|peer| &mut peer.streams);
        let mut open: Vec<&mut PeerStream> = streams.filter(|stream| stream.state == StreamState::Open).collect();
        open.iter_mut().for_each(|stream| stream.writer.farewell(kind, payload));
        let start = Instant::now();
        loop {
            open.retain_mut(|stream| !stream.writer.drain(&mut &*stream.socket));
            let left = at_most.saturating_sub(start.elapsed());
            if open.is_empty() || left.is_zero() {
                return;
            }
            let interest = |stream: &&mut PeerStream| poll::interest(stream.socket.as_raw_fd(), false, true);
            let mut sockets: Vec<_> = open.iter().map(interest).collect();
            poll::wait(&mut sockets, left);
            let broken = |socket: &libc::pollfd| socket.revents & (libc::POLLERR | libc::POLLHUP) != 0;
            let mut sockets = sockets.iter();
            open.retain(|_| !sockets.next().is_some_and(broken));
        }
    }
}

/// Both ends of a message have one call.
fn common(call: &Fingerprint) -> Fingerprint {
    Fingerprint { kind: if call.kind == CallKind::Recv { CallKind::Send } else { call.kind }, ..*call }
}

impl Wire for TcpWire {
    fn rank(&self) -> usize {
        self.mesh_rank.rank
    }

    fn size(&self) -> usize {
        self.peers.len()
    }

    unsafe fn send(&mut self, to: usize, call: &Fingerprint, data: *const u8, bytes: usize) -> Result<u64, Fault> {
        self.refuse_broken()?;
        if self.peers[to].gone() {
            let fault = self.explain(to, StreamStop::Goodbye);
            return Err(self.fail(fault));
        }
        self.call = Some(common(call));
        let message = self.peers[to].outbox.push(&common(call), data, bytes);
        Ok((to as u64) << MESSAGE_BITS | message)
    }

    unsafe fn recv(&mut self, from: usize, call: &Fingerprint, data: *mut u8, bytes: usize) -> Result<u64, Fault> {
        self.refuse_broken()?;
        let call = common(call);
        self.call = Some(call);
        match self.peers[from].inbox.post(&call, data, bytes) {
            Ok(message) => {
                let done = self.peers[from].inbox.done(message);
                if !done && self.peers[from].gone() {
                    let fault = self.explain(from, StreamStop::Goodbye);
                    return Err(self.fail(fault));
                }
                self.settled |= done;
                Ok((from as u64) << MESSAGE_BITS | message)
            }
            Err(theirs) => {
                let fault = self.mismatch(from, (call, bytes), theirs);
                Err(self.fail(fault))
            }
        }
    }

    fn progress(&mut self) -> Result<bool, Fault> {
        self.refuse_broken()?;
        let looked = self.streams > TRIED_MAX;
        if looked {
            self.look(Duration::ZERO);
        }
        let (mut moved, mut at) = (std::mem::take(&mut self.settled), 0);
        for peer in 0..self.peers.len() {
            moved |= self.pump(peer, at, looked)?;
            at += self.peers[peer].streams.len();
        }
        self.judge(moved)?;
        Ok(moved)
    }

    fn sent(&mut self, number: u64) -> bool {
        self.peers[(number >> MESSAGE_BITS) as usize].outbox.done(number & ((1 << MESSAGE_BITS) - 1))
    }

    fn received(&mut self, number: u64) -> bool {
        self.peers[(number >> MESSAGE_BITS) as usize].inbox.done(number & ((1 << MESSAGE_BITS) - 1))
    }

    fn wait(&mut self, at_most: Duration) {
        self.notify();
        self.look(at_most);
    }

    fn turns(&self) -> u32 {
        self.turns
    }

    /// Tells the others what went wrong, so that all name the same culprit; the wire is of no more use.
    fn cancel(&mut self, fault: &Fault) {
        let fault = self.fail(fault.clone());
        self.leave(FrameKind::Failed, &failure_report::encode(&fault), FAILURE_REPORT_LIMIT);
    }
}

impl Drop for TcpWire {
    /// Unread bytes would make the operating system reset the link, and a reset overtakes our goodbye.
    fn drop(&mut self) {
        if self.fault.is_none() {
            self.leave(FrameKind::Goodbye, &[], GOODBYE_LIMIT);
        }
        let mut rest = [0; 4096];
        for stream in self.peers.iter().flat_map(|peer| &peer.streams) {
            let _ = stream.socket.shutdown(Shutdown::Write);
            while (&*stream.socket).read(&mut rest).is_ok_and(|count| count > 0) {}
        }
    }
}
