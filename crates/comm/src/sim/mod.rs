//! A simulated network: ranks in one thread, virtual time, and everything that happens drawn from a seed.
//!
//! Links keep their order and are otherwise as unkind as they may be: a message takes its bytes from the sender's buffer as
//! late as the sender allows, the buffer of a receive is overwritten as soon as it is posted, and links overtake each other. On
//! top of that one may inject faults. The same seed gives the same run, event by event.

mod network;

pub use network::SimWire;

use crate::execution::PollOutcome;
use crate::fault::Fault;
use kolo_base::lock;
use network::{CloseReason, NetworkEvent, SimNetwork};
use std::sync::{Arc, Mutex};

/// What goes wrong, at a virtual time in nanoseconds.
#[derive(Clone, Debug, PartialEq)]
pub enum NetworkFault {
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

/// Latency and speed of a simulated network.
#[derive(Clone, Copy, Debug)]
pub struct NetworkTiming {
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
pub struct SimRandom(u64);

impl SimRandom {
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

/// What a simulated rank does, turn by turn.
pub trait Actor {
    fn turn(&mut self, wire: &mut SimWire) -> Result<PollOutcome, Fault>;
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
pub struct SimReport {
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
pub fn run<A: Actor>(seed: u64, timing: NetworkTiming, injected: &[NetworkFault], actors: &mut [A]) -> SimReport {
    let size = actors.len();
    let network = Arc::new(Mutex::new(SimNetwork::new(seed, size, timing, injected)));
    let rank = |(rank, actor)| Rank { actor, wire: SimWire::new(&network, rank), idle_since_ns: 0, ending: None };
    let mut ranks: Vec<Rank<'_, A>> = actors.iter_mut().enumerate().map(rank).collect();
    let (mut events, mut digest) = (0, 0u64);
    while ranks.iter().any(|rank| rank.ending.is_none()) {
        let mut guard = lock(&network);
        let Some(((at_ns, _), event)) = guard.events.pop_first() else { panic!("seed {seed}: ranks wait for ever") };
        guard.now_ns = at_ns;
        events += 1;
        let (code, affected) = event.code(size);
        digest = (digest ^ at_ns ^ (code as u64) << 40).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
        let crashed = matches!(event, NetworkEvent::Crash { .. });
        guard.handle(event);
        drop(guard);
        let rank = &mut ranks[affected];
        if crashed {
            rank.ending.get_or_insert(Ending { outcome: None, at_ns });
        } else if rank.ending.is_none() {
            take_turn(rank, &network, affected, at_ns);
        }
    }
    SimReport { endings: ranks.into_iter().filter_map(|rank| rank.ending).collect(), events, digest }
}

/// Lets a rank act at `now_ns`, unless it is paused, and sees to its next turn.
fn take_turn<A: Actor>(rank: &mut Rank<'_, A>, network: &Mutex<SimNetwork>, number: usize, now_ns: u64) {
    let (timing, injected) = {
        let network = lock(network);
        (network.timing, network.injected.clone())
    };
    let mut factor = 1;
    for fault in &injected {
        match fault {
            NetworkFault::Slow { rank, factor: slower } if *rank == number => factor *= slower,
            NetworkFault::Pause { rank: paused, at_ns, until_ns }
                if *paused == number && (*at_ns..*until_ns).contains(&now_ns) =>
            {
                if *until_ns == u64::MAX {
                    rank.ending = Some(Ending { outcome: None, at_ns: now_ns });
                } else {
                    lock(network).schedule(*until_ns, NetworkEvent::Turn { rank: number });
                }
                return;
            }
            _ => {}
        }
    }
    let waited_ns = now_ns - rank.idle_since_ns;
    let outcome = match rank.actor.turn(&mut rank.wire) {
        Ok(PollOutcome::Moved) => {
            rank.idle_since_ns = now_ns;
            let turn_ns = (timing.turn_ns + lock(network).random.below(timing.turn_ns)) * factor;
            return lock(network).schedule(now_ns + turn_ns, NetworkEvent::Turn { rank: number });
        }
        // Who waits when another gives up gives up too, and names whom itself it waits for: so the rank at the end of the
        // chain is named by whoever waits for it.
        Ok(PollOutcome::Idle) if waited_ns < timing.stall_ns && !lock(network).peer_stalled(number) => {
            let deadline_ns = rank.idle_since_ns + timing.stall_ns;
            return lock(network).schedule(deadline_ns, NetworkEvent::Turn { rank: number });
        }
        Ok(PollOutcome::Idle) => {
            let (host, during) = (String::new(), rank.actor.during());
            let peer = rank.actor.waits_for().unwrap_or(number);
            Err(Fault::Stalled { peer, host, during, waited_ms: waited_ns / 1_000_000 })
        }
        Ok(PollOutcome::Done) => Ok(()),
        Err(fault) => Err(fault),
    };
    lock(network).forget(number);
    let reason = match &outcome {
        Ok(()) => CloseReason::Done,
        Err(Fault::Stalled { .. }) => CloseReason::Stalled,
        Err(fault) => CloseReason::Blames(fault.culprit().unwrap_or(number)),
    };
    lock(network).close(number, reason);
    rank.ending = Some(Ending { outcome: Some(outcome), at_ns: now_ns });
}
