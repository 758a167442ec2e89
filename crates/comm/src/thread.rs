//! Ranks as threads of one process: messages are copied straight from the sender's buffer into the receiver's.
//!
//! A message moves when both ends have named their place; whoever comes second copies. So a send is done exactly when it
//! was received, and two ranks in different calls find out at their first message, or by the list of every rank's
//! current call.

use crate::call::Fingerprint;
use crate::fault::Fault;
use crate::run::Programs;
use crate::transport::Transport;
use crate::watch::Watch;
use crate::wire::{SplitWire, Wire};
use kolo_base::lock;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Transports of ranks that are threads of this process, one watch each.
pub fn world(watches: &[Arc<Watch>]) -> Vec<Box<dyn Transport>> {
    let wires = wires(vec![0; watches.len()], watches.first());
    let boxed = |(wire, watch): (ThreadWire, &Arc<Watch>)| -> Box<dyn Transport> {
        Box::new(Programs::new(wire, Arc::clone(watch)))
    };
    wires.into_iter().zip(watches).map(boxed).collect()
}

/// Wires of as many ranks as there are `hosts`; ranks with the same number pass for ranks of one host. `names` knows
/// what hosts are called.
pub fn wires(hosts: Vec<usize>, names: Option<&Arc<Watch>>) -> Vec<ThreadWire> {
    let ranks = (0..hosts.len()).collect();
    let hub = Hub::new(ranks, hosts, names.cloned());
    (0..hub.size()).map(|rank| ThreadWire::new(Arc::clone(&hub), rank)).collect()
}

/// One end of a message that waits for the other.
#[derive(Debug)]
struct PendingHalf {
    call: Fingerprint,
    data: usize,
    bytes: usize,
}

/// Messages from one rank to another.
#[derive(Debug, Default)]
struct ThreadLink {
    /// Sends and receives that wait; one of the two is empty.
    halves: Mutex<[VecDeque<PendingHalf>; 2]>,
    /// Messages that were copied.
    moved: AtomicU64,
}

const SENDS: usize = 0;
const RECVS: usize = 1;

/// Wakes a rank.
#[derive(Debug, Default)]
struct Wakeup {
    notified: AtomicU64,
    lock: Mutex<()>,
    condition: Condvar,
}

impl Wakeup {
    fn notify(&self) {
        self.notified.fetch_add(1, Ordering::Release);
        drop(lock(&self.lock));
        self.condition.notify_all();
    }
}

/// What ended a communicator, for all its ranks.
#[derive(Clone, Debug)]
enum HubFault {
    Lost(usize),
    Mismatch([(usize, Fingerprint); 2]),
}

#[derive(Debug)]
struct Hub {
    /// Each rank's number in the job.
    ranks: Vec<usize>,
    hosts: Vec<usize>,
    names: Option<Arc<Watch>>,
    /// From rank `a` to rank `b` at `a * size + b`.
    links: Vec<ThreadLink>,
    wakeups: Vec<Wakeup>,
    gone: Vec<AtomicBool>,
    /// The call each rank is in.
    calls: Mutex<Vec<Option<Fingerprint>>>,
    troubled: AtomicBool,
    trouble: Mutex<Option<HubFault>>,
    /// Sub-communicators under construction, by number and members; how many members have yet to come.
    children: Mutex<BTreeMap<(u32, Vec<usize>), Child>>,
}

type Child = (Arc<Hub>, usize);

impl Hub {
    fn new(ranks: Vec<usize>, hosts: Vec<usize>, names: Option<Arc<Watch>>) -> Arc<Self> {
        let size = ranks.len();
        Arc::new(Self {
            ranks,
            hosts,
            names,
            links: (0..size * size).map(|_| ThreadLink::default()).collect(),
            wakeups: (0..size).map(|_| Wakeup::default()).collect(),
            gone: (0..size).map(|_| AtomicBool::new(false)).collect(),
            calls: Mutex::new(vec![None; size]),
            troubled: AtomicBool::new(false),
            trouble: Mutex::new(None),
            children: Mutex::new(BTreeMap::new()),
        })
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn host(&self, rank: usize) -> String {
        self.names.as_ref().map_or_else(String::new, |names| names.host(self.ranks[rank]))
    }

    fn notify_all_ranks(&self) {
        self.wakeups.iter().for_each(Wakeup::notify);
    }

    /// Ends the communicator for all; the first trouble stays.
    fn end(&self, trouble: HubFault) {
        lock(&self.trouble).get_or_insert(trouble);
        self.troubled.store(true, Ordering::Release);
        self.notify_all_ranks();
    }

    /// The trouble as `rank` sees it.
    fn fault(&self, rank: usize) -> Option<Fault> {
        if !self.troubled.load(Ordering::Acquire) {
            return None;
        }
        match lock(&self.trouble).clone()? {
            HubFault::Lost(peer) => {
                let during = lock(&self.calls)[rank].map_or_else(|| "no call".into(), |call| call.to_string());
                let why = "its thread ended".into();
                Some(Fault::Lost { peer: self.ranks[peer], host: self.host(peer), during, why })
            }
            HubFault::Mismatch([first, second]) => {
                let (mine, theirs) = if second.0 == rank { (second, first) } else { (first, second) };
                Some(Fault::Mismatch {
                    rank: self.ranks[mine.0],
                    host: self.host(mine.0),
                    mine: Box::new(mine.1),
                    peer: self.ranks[theirs.0],
                    peer_host: self.host(theirs.0),
                    theirs: Box::new(theirs.1),
                })
            }
        }
    }

    /// A rank comes to a call. Another at the same place must be in the same one.
    fn enter(&self, rank: usize, call: &Fingerprint) {
        let mut calls = lock(&self.calls);
        calls[rank] = Some(*call);
        let same_place = |other: &Fingerprint| {
            !call.kind.is_message() && !other.kind.is_message() && other.sequence == call.sequence
        };
        let differs = |other: &Option<Fingerprint>| other.is_some_and(|other| same_place(&other) && other != *call);
        let Some(other) = calls.iter().position(differs) else { return };
        let Some(theirs) = calls[other] else { return };
        drop(calls);
        self.end(HubFault::Mismatch([(other, theirs), (rank, *call)]));
    }

    /// Names one end of the next message from `from` to `to`; it moves if the other end is named.
    fn meet(&self, from: usize, to: usize, side: usize, end: PendingHalf) {
        let link = &self.links[from * self.size() + to];
        let mut halves = lock(&link.halves);
        let Some(other) = halves[1 - side].pop_front() else {
            halves[side].push_back(end);
            return;
        };
        let (source, target) = if side == SENDS { (&end, &other) } else { (&other, &end) };
        if source.call != target.call || source.bytes != target.bytes {
            let trouble = HubFault::Mismatch([(from, source.call), (to, target.call)]);
            drop(halves);
            return self.end(trouble);
        }
        // SAFETY: both ends promised their places until the message has moved or they cancel, which takes the lock.
        unsafe { std::ptr::copy_nonoverlapping(source.data as *const u8, target.data as *mut u8, source.bytes) };
        link.moved.fetch_add(1, Ordering::Release);
        drop(halves);
        self.wakeups[if side == SENDS { to } else { from }].notify();
    }

    /// A rank that is gone while `rank` waits for it.
    fn missed_by(&self, rank: usize) -> Option<usize> {
        let size = self.size();
        let waits = |from: usize, to: usize, side: usize| !lock(&self.links[from * size + to].halves)[side].is_empty();
        let gone = |peer: &usize| self.gone[*peer].load(Ordering::Acquire);
        (0..size).filter(gone).find(|peer| waits(rank, *peer, SENDS) || waits(*peer, rank, RECVS))
    }
}

/// One rank's end.
#[derive(Debug)]
pub struct ThreadWire {
    hub: Arc<Hub>,
    rank: usize,
    /// Messages named so far, to and from each rank.
    named: [Vec<u64>; 2],
    call: Option<Fingerprint>,
    heard: u64,
}

impl ThreadWire {
    fn new(hub: Arc<Hub>, rank: usize) -> Self {
        let size = hub.size();
        Self { hub, rank, named: [vec![0; size], vec![0; size]], call: None, heard: 0 }
    }

    fn name(&mut self, peer: usize, side: usize, call: &Fingerprint, data: usize, bytes: usize) -> Result<u64, Fault> {
        if self.call.as_ref() != Some(call) {
            self.call = Some(*call);
            self.hub.enter(self.rank, call);
        }
        let (from, to) = if side == SENDS { (self.rank, peer) } else { (peer, self.rank) };
        self.hub.meet(from, to, side, PendingHalf { call: *call, data, bytes });
        if self.hub.gone[peer].load(Ordering::Acquire) && self.hub.missed_by(self.rank).is_some() {
            self.hub.end(HubFault::Lost(peer));
        }
        if let Some(fault) = self.hub.fault(self.rank) {
            return Err(fault);
        }
        let number = self.named[side][peer];
        self.named[side][peer] += 1;
        Ok(number * self.hub.size() as u64 + peer as u64)
    }

    fn moved(&self, number: u64, side: usize) -> bool {
        let size = self.hub.size();
        let peer = number as usize % size;
        let (from, to) = if side == SENDS { (self.rank, peer) } else { (peer, self.rank) };
        self.hub.links[from * size + to].moved.load(Ordering::Acquire) > number / size as u64
    }
}

impl Wire for ThreadWire {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.hub.size()
    }

    unsafe fn send(&mut self, to: usize, call: &Fingerprint, data: *const u8, bytes: usize) -> Result<u64, Fault> {
        self.name(to, SENDS, call, data as usize, bytes)
    }

    unsafe fn recv(&mut self, from: usize, call: &Fingerprint, data: *mut u8, bytes: usize) -> Result<u64, Fault> {
        self.name(from, RECVS, call, data as usize, bytes)
    }

    fn progress(&mut self) -> Result<bool, Fault> {
        if let Some(fault) = self.hub.fault(self.rank) {
            return Err(fault);
        }
        let notified = self.hub.wakeups[self.rank].notified.load(Ordering::Acquire);
        let news = notified != self.heard;
        self.heard = notified;
        if news && let Some(peer) = self.hub.missed_by(self.rank) {
            self.hub.end(HubFault::Lost(peer));
        }
        Ok(news)
    }

    fn sent(&mut self, number: u64) -> bool {
        self.moved(number, SENDS)
    }

    fn received(&mut self, number: u64) -> bool {
        self.moved(number, RECVS)
    }

    fn wait(&mut self, at_most: Duration) {
        let wakeup = &self.hub.wakeups[self.rank];
        let guard = lock(&wakeup.lock);
        if wakeup.notified.load(Ordering::Acquire) == self.heard {
            drop(wakeup.condition.wait_timeout(guard, at_most));
        }
    }

    fn cancel(&mut self, _: &Fault) {
        self.forget();
    }
}

impl ThreadWire {
    fn forget(&mut self) {
        let size = self.hub.size();
        for peer in 0..size {
            lock(&self.hub.links[self.rank * size + peer].halves)[SENDS].clear();
            lock(&self.hub.links[peer * size + self.rank].halves)[RECVS].clear();
        }
    }
}

impl SplitWire for ThreadWire {
    fn name(&self) -> &'static str {
        "thread"
    }

    fn hosts(&self) -> &[usize] {
        &self.hub.hosts
    }

    fn job_rank(&self, rank: usize) -> usize {
        self.hub.ranks[rank]
    }

    fn split(&mut self, members: &[usize], communicator: u32) -> Result<Self, Fault> {
        let Some(rank) = members.iter().position(|member| *member == self.rank) else {
            return Err(Fault::BadCall(format!("rank {} is not among the members {members:?}", self.rank)));
        };
        let mut children = lock(&self.hub.children);
        let key = (communicator, members.to_vec());
        let (hub, missing) = children.entry(key.clone()).or_insert_with(|| {
            let of = |numbers: &[usize]| members.iter().map(|member| numbers[*member]).collect();
            (Hub::new(of(&self.hub.ranks), of(&self.hub.hosts), self.hub.names.clone()), members.len())
        });
        let hub = Arc::clone(hub);
        *missing -= 1;
        if *missing == 0 {
            children.remove(&key);
        }
        Ok(Self::new(hub, rank))
    }
}

impl Drop for ThreadWire {
    fn drop(&mut self) {
        self.forget();
        self.hub.gone[self.rank].store(true, Ordering::Release);
        self.hub.notify_all_ranks();
    }
}
