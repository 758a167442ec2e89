//! The network itself: links, what travels on them and when, and a rank's end of it.

use super::{NetworkFault, NetworkTiming, SimRandom};
use crate::call::Fingerprint;
use crate::fault::Fault;
use crate::wire::Wire;
use kolo_base::lock;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

#[derive(Debug)]
pub(super) enum NetworkEvent {
    /// The bytes of the oldest queued send leave their buffer.
    Leave {
        from: usize,
        to: usize,
    },
    Arrive {
        from: usize,
        to: usize,
        call: Fingerprint,
        data: Vec<u8>,
    },
    /// The other end closed its link; what it said last.
    Close {
        from: usize,
        to: usize,
        reason: CloseReason,
    },
    Turn {
        rank: usize,
    },
    Crash {
        rank: usize,
    },
}

#[derive(Clone, Debug)]
pub(super) enum CloseReason {
    Done,
    Gone,
    /// It failed, and this rank is to blame.
    Blames(usize),
    /// It waited too long.
    Stalled,
    /// The receiver's own call differed.
    Mismatch(Fingerprint),
}

#[derive(Debug, Default)]
struct SimLink {
    /// Sends whose bytes are still in their buffer.
    leaving: VecDeque<(Fingerprint, usize, usize)>,
    left: u64,
    /// Posted receives.
    receives: VecDeque<(Fingerprint, usize, usize)>,
    named: u64,
    queued: u64,
    waiting: VecDeque<(Fingerprint, Vec<u8>)>,
    filled: u64,
    free_ns: u64,
    arrives_ns: u64,
    closed: Option<CloseReason>,
}

#[derive(Debug)]
pub(super) struct SimNetwork {
    size: usize,
    pub timing: NetworkTiming,
    pub injected: Vec<NetworkFault>,
    pub random: SimRandom,
    pub now_ns: u64,
    pub events: BTreeMap<(u64, u64), NetworkEvent>,
    scheduled: u64,
    links: Vec<SimLink>,
    faults: Vec<Option<Fault>>,
    calls: Vec<Option<Fingerprint>>,
    /// Something happened to the rank since its last turn.
    changed: Vec<bool>,
}

impl NetworkEvent {
    /// What a run's digest sees of it, and the rank it concerns.
    pub fn code(&self, size: usize) -> (usize, usize) {
        match self {
            NetworkEvent::Leave { from, to } => (1 + from * size + to, *from),
            NetworkEvent::Arrive { from, to, .. } => (2 + (from * size + to) * 3, *to),
            NetworkEvent::Close { from, to, .. } => (3 + (from * size + to) * 5, *to),
            NetworkEvent::Turn { rank } => (4 + rank * 7, *rank),
            NetworkEvent::Crash { rank } => (5 + rank * 11, *rank),
        }
    }
}

impl SimNetwork {
    /// A quiet network, with a first turn for every rank and the crashes to come.
    pub fn new(seed: u64, size: usize, timing: NetworkTiming, injected: &[NetworkFault]) -> Self {
        let mut network = Self {
            size,
            timing,
            injected: injected.to_vec(),
            random: SimRandom::new(seed),
            now_ns: 0,
            events: BTreeMap::new(),
            scheduled: 0,
            links: (0..size * size).map(|_| SimLink::default()).collect(),
            faults: vec![None; size],
            calls: vec![None; size],
            changed: vec![false; size],
        };
        (0..size).for_each(|rank| network.schedule(0, NetworkEvent::Turn { rank }));
        for fault in injected {
            if let NetworkFault::Crash { rank, at_ns } = fault {
                network.schedule(*at_ns, NetworkEvent::Crash { rank: *rank });
            }
        }
        network
    }

    pub fn schedule(&mut self, at_ns: u64, event: NetworkEvent) {
        self.scheduled += 1;
        self.events.insert((at_ns, self.scheduled), event);
    }

    fn link(&mut self, from: usize, to: usize) -> &mut SimLink {
        &mut self.links[from * self.size + to]
    }

    /// When what leaves now arrives; never if the link is cut for good.
    fn arrival(&mut self, from: usize, to: usize) -> Option<u64> {
        let mut delay_ns = self.timing.latency_ns * (1 + self.random.below(self.timing.jitter));
        let mut start_ns = self.now_ns;
        for fault in &self.injected {
            match fault {
                NetworkFault::SlowLink { from: slow, to: end, factor } if (*slow, *end) == (from, to) => {
                    delay_ns *= factor
                }
                NetworkFault::Partition { side, at_ns, until_ns }
                    if side[from] != side[to] && (*at_ns..*until_ns).contains(&self.now_ns) =>
                {
                    if *until_ns == u64::MAX {
                        return None;
                    }
                    start_ns = start_ns.max(*until_ns);
                }
                _ => {}
            }
        }
        let link = self.link(from, to);
        link.arrives_ns = link.arrives_ns.max(start_ns + delay_ns);
        Some(link.arrives_ns)
    }

    pub fn handle(&mut self, event: NetworkEvent) {
        match event {
            NetworkEvent::Leave { from, to } => {
                let link = self.link(from, to);
                let Some((call, data, bytes)) = link.leaving.pop_front() else { return };
                link.left += 1;
                // SAFETY: the sender keeps its buffer until this moment or cancels, which empties the queue.
                let data = unsafe { std::slice::from_raw_parts(data as *const u8, bytes) }.to_vec();
                self.changed[from] = true;
                if let Some(at_ns) = self.arrival(from, to) {
                    self.schedule(at_ns, NetworkEvent::Arrive { from, to, call, data });
                }
            }
            NetworkEvent::Arrive { from, to, call, data } => {
                self.link(from, to).waiting.push_back((call, data));
                self.changed[to] = true;
                self.fill(from, to);
            }
            NetworkEvent::Close { from, to, reason } => {
                self.changed[to] = true;
                if let (CloseReason::Mismatch(theirs), Some(mine)) = (&reason, self.calls[to]) {
                    let fault = mismatch(to, mine, from, *theirs);
                    self.faults[to].get_or_insert(fault);
                }
                self.link(from, to).closed = Some(reason);
            }
            NetworkEvent::Turn { .. } => {}
            NetworkEvent::Crash { rank } => self.close(rank, CloseReason::Gone),
        }
    }

    /// Puts what has arrived where it belongs.
    fn fill(&mut self, from: usize, to: usize) {
        let link = self.link(from, to);
        while !link.receives.is_empty()
            && let Some((theirs, data)) = link.waiting.pop_front()
            && let Some((mine, place, bytes)) = link.receives.pop_front()
        {
            if theirs != mine || data.len() != bytes {
                let fault = mismatch(to, mine, from, theirs);
                self.faults[to].get_or_insert(fault);
                if let Some(at_ns) = self.arrival(to, from) {
                    let reason = CloseReason::Mismatch(mine);
                    self.schedule(at_ns, NetworkEvent::Close { from: to, to: from, reason });
                }
                return;
            }
            // SAFETY: the receiver keeps its place until it is filled or cancels, which empties the queue.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), place as *mut u8, bytes) };
            link.filled += 1;
        }
    }

    /// A rank's links end with a last word, behind what already left.
    pub fn close(&mut self, rank: usize, reason: CloseReason) {
        self.forget(rank);
        for peer in (0..self.size).filter(|peer| *peer != rank) {
            if let Some(at_ns) = self.arrival(rank, peer) {
                self.schedule(at_ns, NetworkEvent::Close { from: rank, to: peer, reason: reason.clone() });
            }
        }
    }

    pub fn forget(&mut self, rank: usize) {
        for peer in 0..self.size {
            self.link(rank, peer).leaving.clear();
            self.link(peer, rank).receives.clear();
        }
    }

    /// Whether another rank's patience is at its end.
    pub fn peer_stalled(&self, rank: usize) -> bool {
        let stalled = |peer: usize| matches!(self.links[peer * self.size + rank].closed, Some(CloseReason::Stalled));
        (0..self.size).any(stalled)
    }

    /// What the ends of links mean to a rank.
    fn verdict(&self, rank: usize) -> Result<(), Fault> {
        if let Some(fault) = &self.faults[rank] {
            return Err(fault.clone());
        }
        let during = || self.calls[rank].map_or_else(|| "no call".into(), |call| call.to_string());
        for peer in 0..self.size {
            let link = &self.links[peer * self.size + rank];
            let (culprit, why) = match &link.closed {
                Some(CloseReason::Gone) => (peer, "its links closed".into()),
                Some(CloseReason::Blames(culprit)) => (*culprit, format!("rank {peer} says so")),
                Some(CloseReason::Done) if !link.receives.is_empty() && link.waiting.is_empty() => {
                    (peer, "it made all its calls and ended".into())
                }
                _ => continue,
            };
            return Err(Fault::Lost { peer: culprit, host: String::new(), during: during(), why });
        }
        Ok(())
    }
}

fn mismatch(rank: usize, mine: Fingerprint, peer: usize, theirs: Fingerprint) -> Fault {
    let (host, peer_host) = (String::new(), String::new());
    Fault::Mismatch { rank, host, mine: Box::new(mine), peer, peer_host, theirs: Box::new(theirs) }
}

/// One rank's end of a simulated network.
#[derive(Debug)]
pub struct SimWire {
    network: Arc<Mutex<SimNetwork>>,
    rank: usize,
}

impl SimWire {
    pub(super) fn new(network: &Arc<Mutex<SimNetwork>>, rank: usize) -> Self {
        Self { network: Arc::clone(network), rank }
    }
}

impl Wire for SimWire {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        lock(&self.network).size
    }

    unsafe fn send(&mut self, to: usize, call: &Fingerprint, data: *const u8, bytes: usize) -> Result<u64, Fault> {
        let mut network = lock(&self.network);
        network.calls[self.rank] = Some(*call);
        let (now_ns, takes_ns) = (network.now_ns, network.timing.byte_ns * bytes as u64 + 1);
        let link = network.link(self.rank, to);
        link.leaving.push_back((*call, data as usize, bytes));
        link.queued += 1;
        link.free_ns = link.free_ns.max(now_ns) + takes_ns;
        let (number, at_ns) = (link.queued, link.free_ns);
        network.schedule(at_ns, NetworkEvent::Leave { from: self.rank, to });
        Ok(number * network.size as u64 + to as u64)
    }

    unsafe fn recv(&mut self, from: usize, call: &Fingerprint, data: *mut u8, bytes: usize) -> Result<u64, Fault> {
        let mut network = lock(&self.network);
        network.calls[self.rank] = Some(*call);
        // SAFETY: nobody may look at the place before it is filled; who does shall see it.
        unsafe { std::ptr::write_bytes(data, 0xa5, bytes) };
        let link = network.link(from, self.rank);
        link.receives.push_back((*call, data as usize, bytes));
        link.named += 1;
        let number = link.named;
        network.fill(from, self.rank);
        Ok(number * network.size as u64 + from as u64)
    }

    fn progress(&mut self) -> Result<bool, Fault> {
        let mut network = lock(&self.network);
        network.verdict(self.rank)?;
        Ok(std::mem::take(&mut network.changed[self.rank]))
    }

    fn sent(&mut self, number: u64) -> bool {
        let mut network = lock(&self.network);
        let size = network.size as u64;
        network.link(self.rank, (number % size) as usize).left >= number / size
    }

    fn received(&mut self, number: u64) -> bool {
        let mut network = lock(&self.network);
        let size = network.size as u64;
        network.link((number % size) as usize, self.rank).filled >= number / size
    }

    fn cancel(&mut self, _: &Fault) {
        lock(&self.network).forget(self.rank);
    }
}
