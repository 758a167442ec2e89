//! A simulated network: ranks in one thread, virtual time, and everything that happens drawn from a seed.
//!
//! Links keep their order and are otherwise as unkind as they may be: a message takes its bytes from the sender's buffer as
//! late as the sender allows, a place for a message is spoilt as soon as it is named, and links overtake each other. On
//! top of that one may harm a run. The same seed gives the same run, event by event.

use crate::call::Fingerprint;
use crate::execution::Step;
use crate::fault::Fault;
use crate::wire::Wire;
use kolo_base::lock;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

/// What goes wrong, at a virtual time in nanoseconds.
#[derive(Clone, Debug, PartialEq)]
pub enum Harm {
    /// The rank is gone, and its links with it.
    Crash { rank: usize, at_ns: u64 },
    /// The rank does nothing until then; its links stay.
    Pause { rank: usize, at_ns: u64, until_ns: u64 },
    /// Nothing passes between the ranks marked and the others until then; what was sent meanwhile comes late. For
    /// `u64::MAX`, never.
    Partition { side: Vec<bool>, at_ns: u64, until_ns: u64 },
    /// Everything the rank does takes so many times as long.
    Slow { rank: usize, factor: u64 },
    /// Messages from the one to the other take so many times as long.
    SlowLink { from: usize, to: usize, factor: u64 },
}

/// The pace of a simulated network.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// A message takes between one and this many times its latency.
    pub jitter: u64,
    pub latency_ns: u64,
    pub byte_ns: u64,
    /// One turn of a rank.
    pub turn_ns: u64,
    /// How long a rank waits without news.
    pub stall_ns: u64,
}

/// Splitmix: enough for drawing delays.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % limit
    }
}

#[derive(Debug)]
enum Event {
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
        last: LastWord,
    },
    Turn {
        rank: usize,
    },
    Crash {
        rank: usize,
    },
}

#[derive(Clone, Debug)]
enum LastWord {
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
struct Link {
    /// Sends whose bytes are still in their buffer.
    leaving: VecDeque<(Fingerprint, usize, usize)>,
    left: u64,
    /// Named places.
    places: VecDeque<(Fingerprint, usize, usize)>,
    named: u64,
    queued: u64,
    waiting: VecDeque<(Fingerprint, Vec<u8>)>,
    filled: u64,
    free_ns: u64,
    arrives_ns: u64,
    closed: Option<LastWord>,
}

#[derive(Debug)]
struct Network {
    size: usize,
    pace: Pace,
    harms: Vec<Harm>,
    dice: Dice,
    now_ns: u64,
    events: BTreeMap<(u64, u64), Event>,
    scheduled: u64,
    links: Vec<Link>,
    faults: Vec<Option<Fault>>,
    calls: Vec<Option<Fingerprint>>,
    /// Something happened to the rank since its last turn.
    news: Vec<bool>,
}

impl Network {
    fn schedule(&mut self, at_ns: u64, event: Event) {
        self.scheduled += 1;
        self.events.insert((at_ns, self.scheduled), event);
    }

    fn link(&mut self, from: usize, to: usize) -> &mut Link {
        &mut self.links[from * self.size + to]
    }

    /// When what leaves now arrives; never if the link is cut for good.
    fn arrival(&mut self, from: usize, to: usize) -> Option<u64> {
        let mut delay_ns = self.pace.latency_ns * (1 + self.dice.below(self.pace.jitter));
        let mut start_ns = self.now_ns;
        for harm in &self.harms {
            match harm {
                Harm::SlowLink { from: slow, to: end, factor } if (*slow, *end) == (from, to) => delay_ns *= factor,
                Harm::Partition { side, at_ns, until_ns }
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

    fn handle(&mut self, event: Event) {
        match event {
            Event::Leave { from, to } => {
                let link = self.link(from, to);
                let Some((call, data, bytes)) = link.leaving.pop_front() else { return };
                link.left += 1;
                // SAFETY: the sender keeps its buffer until this moment or cancels, which empties the queue.
                let data = unsafe { std::slice::from_raw_parts(data as *const u8, bytes) }.to_vec();
                self.news[from] = true;
                if let Some(at_ns) = self.arrival(from, to) {
                    self.schedule(at_ns, Event::Arrive { from, to, call, data });
                }
            }
            Event::Arrive { from, to, call, data } => {
                self.link(from, to).waiting.push_back((call, data));
                self.news[to] = true;
                self.fill(from, to);
            }
            Event::Close { from, to, last } => {
                self.news[to] = true;
                if let (LastWord::Mismatch(theirs), Some(mine)) = (&last, self.calls[to]) {
                    let fault = mismatch(to, mine, from, *theirs);
                    self.faults[to].get_or_insert(fault);
                }
                self.link(from, to).closed = Some(last);
            }
            Event::Turn { .. } => {}
            Event::Crash { rank } => self.close(rank, LastWord::Gone),
        }
    }

    /// Puts what has arrived where it belongs.
    fn fill(&mut self, from: usize, to: usize) {
        let link = self.link(from, to);
        while !link.places.is_empty()
            && let Some((theirs, data)) = link.waiting.pop_front()
            && let Some((mine, place, bytes)) = link.places.pop_front()
        {
            if theirs != mine || data.len() != bytes {
                let fault = mismatch(to, mine, from, theirs);
                self.faults[to].get_or_insert(fault);
                if let Some(at_ns) = self.arrival(to, from) {
                    let last = LastWord::Mismatch(mine);
                    self.schedule(at_ns, Event::Close { from: to, to: from, last });
                }
                return;
            }
            // SAFETY: the receiver keeps its place until it is filled or cancels, which empties the queue.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), place as *mut u8, bytes) };
            link.filled += 1;
        }
    }

    /// A rank's links end with a last word, behind what already left.
    fn close(&mut self, rank: usize, last: LastWord) {
        self.forget(rank);
        for peer in (0..self.size).filter(|peer| *peer != rank) {
            if let Some(at_ns) = self.arrival(rank, peer) {
                self.schedule(at_ns, Event::Close { from: rank, to: peer, last: last.clone() });
            }
        }
    }

    fn forget(&mut self, rank: usize) {
        for peer in 0..self.size {
            self.link(rank, peer).leaving.clear();
            self.link(peer, rank).places.clear();
        }
    }

    /// Whether another rank's patience is at its end.
    fn hopeless(&self, rank: usize) -> bool {
        let stalled = |peer: usize| matches!(self.links[peer * self.size + rank].closed, Some(LastWord::Stalled));
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
                Some(LastWord::Gone) => (peer, "its links closed".into()),
                Some(LastWord::Blames(culprit)) => (*culprit, format!("rank {peer} says so")),
                Some(LastWord::Done) if !link.places.is_empty() && link.waiting.is_empty() => {
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
    network: Arc<Mutex<Network>>,
    rank: usize,
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
        let (now_ns, takes_ns) = (network.now_ns, network.pace.byte_ns * bytes as u64 + 1);
        let link = network.link(self.rank, to);
        link.leaving.push_back((*call, data as usize, bytes));
        link.queued += 1;
        link.free_ns = link.free_ns.max(now_ns) + takes_ns;
        let (number, at_ns) = (link.queued, link.free_ns);
        network.schedule(at_ns, Event::Leave { from: self.rank, to });
        Ok(number * network.size as u64 + to as u64)
    }

    unsafe fn recv(&mut self, from: usize, call: &Fingerprint, data: *mut u8, bytes: usize) -> Result<u64, Fault> {
        let mut network = lock(&self.network);
        network.calls[self.rank] = Some(*call);
        // SAFETY: nobody may look at the place before it is filled; who does shall see it.
        unsafe { std::ptr::write_bytes(data, 0xa5, bytes) };
        let link = network.link(from, self.rank);
        link.places.push_back((*call, data as usize, bytes));
        link.named += 1;
        let number = link.named;
        network.fill(from, self.rank);
        Ok(number * network.size as u64 + from as u64)
    }

    fn progress(&mut self) -> Result<bool, Fault> {
        let mut network = lock(&self.network);
        network.verdict(self.rank)?;
        Ok(std::mem::take(&mut network.news[self.rank]))
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

/// What a simulated rank does, turn by turn.
pub trait Actor {
    fn turn(&mut self, wire: &mut SimWire) -> Result<Step, Fault>;
    /// A rank it waits for.
    fn waits_for(&self) -> Option<usize>;
    /// The call it is in.
    fn during(&self) -> String;
}

/// How a rank ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Ending {
    /// `None` if it crashed or was paused for ever.
    pub outcome: Option<Result<(), Fault>>,
    pub at_ns: u64,
}

/// How a run went.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    pub endings: Vec<Ending>,
    pub events: u64,
    /// Of all events, in order: equal for equal runs.
    pub digest: u64,
}

struct Rank<'a, A> {
    actor: &'a mut A,
    wire: SimWire,
    idle_since_ns: u64,
    ending: Option<Ending>,
}

/// Runs all actors to their end. Panics if a living rank neither ends nor has anything to wait for.
pub fn run<A: Actor>(seed: u64, pace: Pace, harms: &[Harm], actors: &mut [A]) -> Report {
    let size = actors.len();
    let network = Arc::new(Mutex::new(Network {
        size,
        pace,
        harms: harms.to_vec(),
        dice: Dice::new(seed),
        now_ns: 0,
        events: BTreeMap::new(),
        scheduled: 0,
        links: (0..size * size).map(|_| Link::default()).collect(),
        faults: vec![None; size],
        calls: vec![None; size],
        news: vec![false; size],
    }));
    {
        let mut network = lock(&network);
        (0..size).for_each(|rank| network.schedule(0, Event::Turn { rank }));
        for harm in harms {
            if let Harm::Crash { rank, at_ns } = harm {
                network.schedule(*at_ns, Event::Crash { rank: *rank });
            }
        }
    }
    let rank = |(rank, actor)| Rank {
        actor,
        wire: SimWire { network: Arc::clone(&network), rank },
        idle_since_ns: 0,
        ending: None,
    };
    let mut ranks: Vec<Rank<'_, A>> = actors.iter_mut().enumerate().map(rank).collect();
    let (mut events, mut digest) = (0, 0u64);
    while ranks.iter().any(|rank| rank.ending.is_none()) {
        let mut guard = lock(&network);
        let Some(((at_ns, _), event)) = guard.events.pop_first() else { panic!("seed {seed}: ranks wait for ever") };
        guard.now_ns = at_ns;
        events += 1;
        let (code, affected) = match &event {
            Event::Leave { from, to } => (1 + from * size + to, *from),
            Event::Arrive { from, to, .. } => (2 + (from * size + to) * 3, *to),
            Event::Close { from, to, .. } => (3 + (from * size + to) * 5, *to),
            Event::Turn { rank } => (4 + rank * 7, *rank),
            Event::Crash { rank } => (5 + rank * 11, *rank),
        };
        digest = (digest ^ at_ns ^ (code as u64) << 40).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
        let crashed = matches!(event, Event::Crash { .. });
        guard.handle(event);
        drop(guard);
        let rank = &mut ranks[affected];
        if crashed {
            rank.ending.get_or_insert(Ending { outcome: None, at_ns });
        } else if rank.ending.is_none() {
            take_turn(rank, &network, affected, at_ns);
        }
    }
    Report { endings: ranks.into_iter().filter_map(|rank| rank.ending).collect(), events, digest }
}

/// Lets a rank act at `now_ns`, unless it is paused, and sees to its next turn.
fn take_turn<A: Actor>(rank: &mut Rank<'_, A>, network: &Mutex<Network>, number: usize, now_ns: u64) {
    let (pace, harms) = {
        let network = lock(network);
        (network.pace, network.harms.clone())
    };
    let mut factor = 1;
    for harm in &harms {
        match harm {
            Harm::Slow { rank, factor: slower } if *rank == number => factor *= slower,
            Harm::Pause { rank: paused, at_ns, until_ns }
                if *paused == number && (*at_ns..*until_ns).contains(&now_ns) =>
            {
                if *until_ns == u64::MAX {
                    rank.ending = Some(Ending { outcome: None, at_ns: now_ns });
                } else {
                    lock(network).schedule(*until_ns, Event::Turn { rank: number });
                }
                return;
            }
            _ => {}
        }
    }
    let waited_ns = now_ns - rank.idle_since_ns;
    let outcome = match rank.actor.turn(&mut rank.wire) {
        Ok(Step::Moved) => {
            rank.idle_since_ns = now_ns;
            let turn_ns = (pace.turn_ns + lock(network).dice.below(pace.turn_ns)) * factor;
            return lock(network).schedule(now_ns + turn_ns, Event::Turn { rank: number });
        }
        // Who waits when another gives up gives up too, and names whom itself it waits for: so the rank at the end of the
        // chain is named by whoever waits for it.
        Ok(Step::Idle) if waited_ns < pace.stall_ns && !lock(network).hopeless(number) => {
            let deadline_ns = rank.idle_since_ns + pace.stall_ns;
            return lock(network).schedule(deadline_ns, Event::Turn { rank: number });
        }
        Ok(Step::Idle) => {
            let (host, during) = (String::new(), rank.actor.during());
            let peer = rank.actor.waits_for().unwrap_or(number);
            Err(Fault::Stalled { peer, host, during, waited_ms: waited_ns / 1_000_000 })
        }
        Ok(Step::Done) => Ok(()),
        Err(fault) => Err(fault),
    };
    lock(network).forget(number);
    let last = match &outcome {
        Ok(()) => LastWord::Done,
        Err(Fault::Stalled { .. }) => LastWord::Stalled,
        Err(fault) => LastWord::Blames(fault.culprit().unwrap_or(number)),
    };
    lock(network).close(number, last);
    rank.ending = Some(Ending { outcome: Some(outcome), at_ns: now_ns });
}
