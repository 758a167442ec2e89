//! The proof that the ranks of a pipeline understand each other: their graphs, with every message in them, run in the order of the
//! schedule.
//!
//! [`verify()`](super::verify()) proves a schedule, in which a stage talks to its neighbours. A model may also send from one stage
//! to any other: tied weights, skip connections, what several layers read. So the graphs that the ranks will run are played
//! through: every message must be taken under its name, in its turn, and no rank may wait for ever.

use super::lower::PIPELINE;
use kolo_exec::{Order, Turn};
use kolo_graph::collective::Movement;
use kolo_graph::graph::Phase;
use kolo_graph::{Graph, Node};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;

/// What a rank does with a message.
#[derive(Clone, Debug, PartialEq, Eq)]
enum MessageAct {
    Send { to: usize, message: Arc<str> },
    Receive { from: usize, message: Arc<str> },
}

/// The messages of a rank's graph, and the exchanges of all ranks of the pipeline.
#[derive(Clone, Debug, Default)]
pub(super) struct RankProgram {
    /// In every grain, by segment.
    segments: BTreeMap<u32, Vec<MessageAct>>,
    /// Once in a step: before the grains, then after them.
    per_step: Vec<MessageAct>,
    /// Exchanges that all ranks take part in, by name, in their order.
    together: Vec<String>,
}

impl RankProgram {
    pub fn of(graph: &Graph) -> Self {
        let (mut program, phases) = (Self::default(), graph.phases());
        for per_grain in [Phase::Before, Phase::Grain, Phase::After] {
            let nodes = graph.nodes.iter().zip(&phases).filter(|(_, phase)| **phase == per_grain);
            nodes.for_each(|(node, phase)| program.add(node, *phase));
        }
        program
    }

    fn add(&mut self, node: &Node, phase: Phase) {
        let Some(collective) = node.op.collective().filter(|collective| collective.axis == PIPELINE) else { return };
        let act = match collective.movement {
            Movement::Send { to, message } => MessageAct::Send { to, message: message.into() },
            Movement::Receive { from, message } => MessageAct::Receive { from, message: message.into() },
            _ => return self.together.push(format!("{} {}", node.op.name(), node.scope)),
        };
        match phase {
            Phase::Grain => self.segments.entry(node.segment).or_default().push(act),
            Phase::Before | Phase::After => self.per_step.push(act),
        }
    }

    /// The names of the messages per step between this rank and another, in their order.
    fn per_step_names(&self, of: impl Fn(&MessageAct) -> Option<&Arc<str>>) -> Vec<&str> {
        self.per_step.iter().filter_map(of).map(|name| &**name).collect()
    }
}

/// Why the graphs of a pipeline's ranks cannot run together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ProgramFault {
    /// A rank takes a message for another one.
    Mistaken { rank: usize, from: usize, turn: usize, wanted: String, sent: String },
    /// Messages that are sent and not taken, or awaited and never sent, once per step.
    PerStep { from: usize, to: usize, sent: String, taken: String },
    /// Ranks differ in what all of them exchange.
    Together { rank: usize, other: usize },
    /// A rank has messages in a segment that its order leaves out.
    NoTurn { rank: usize, segment: u32 },
    /// A message that nobody takes.
    Unread { from: usize, to: usize, message: String },
    /// Ranks that wait for each other: each with its turn and what it waits for.
    Deadlock { waits: Vec<(usize, usize, String)> },
}

impl fmt::Display for ProgramFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mistaken { rank, from, turn, wanted, sent } => {
                write!(f, "rank {rank} awaits `{wanted}` of rank {from} in its turn {turn}, but `{sent}` comes first")
            }
            Self::PerStep { from, to, sent, taken } => {
                write!(f, "rank {from} sends rank {to} {sent} once per step, which awaits {taken}")
            }
            Self::Together { rank, other } => write!(f, "ranks {rank} and {other} differ in what all ranks exchange"),
            Self::NoTurn { rank, segment } => {
                write!(f, "rank {rank} has messages in segment {segment}, which has no turn in the schedule")
            }
            Self::Unread { from, to, message } => {
                write!(f, "rank {from} sends `{message}` to rank {to}, which never takes it")
            }
            Self::Deadlock { waits } => {
                let waits: Vec<String> = waits
                    .iter()
                    .map(|(rank, turn, what)| format!("rank {rank} waits in its turn {turn} for {what}"))
                    .collect();
                write!(f, "ranks wait for each other: {}", waits.join("; "))
            }
        }
    }
}

/// Proves that the graphs of all ranks, run in these orders, end and take every message for what it is.
pub(super) fn prove(programs: &[RankProgram], orders: &[Order]) -> Result<(), ProgramFault> {
    check_per_step(programs)?;
    for (rank, (program, order)) in programs.iter().zip(orders).enumerate() {
        let has_turn = |segment: &u32| order.turns.iter().any(|turn| turn.segment == *segment);
        if let Some(segment) = program.segments.keys().copied().find(|segment| !has_turn(segment)) {
            return Err(ProgramFault::NoTurn { rank, segment });
        }
    }
    Play::new(programs, orders).run()
}

fn check_per_step(programs: &[RankProgram]) -> Result<(), ProgramFault> {
    for (rank, program) in programs.iter().enumerate() {
        if program.together != programs[0].together {
            return Err(ProgramFault::Together { rank: 0, other: rank });
        }
    }
    for from in 0..programs.len() {
        for to in 0..programs.len() {
            let sent = programs[from].per_step_names(|act| match act {
                MessageAct::Send { to: other, message } if *other == to => Some(message),
                _ => None,
            });
            let taken = programs[to].per_step_names(|act| match act {
                MessageAct::Receive { from: other, message } if *other == from => Some(message),
                _ => None,
            });
            if let Some(at) = (0..sent.len().max(taken.len())).find(|at| sent.get(*at) != taken.get(*at)) {
                let name = |names: &[&str]| names.get(at).map_or("nothing more".into(), |name| format!("`{name}`"));
                return Err(ProgramFault::PerStep { from, to, sent: name(&sent), taken: name(&taken) });
            }
        }
    }
    Ok(())
}

/// Messages of one slot from one rank to another, which are taken in the order in which they are sent.
type Channel = (usize, usize, usize);

/// The ranks as they go through a step.
struct Play<'p> {
    programs: &'p [RankProgram],
    orders: &'p [Order],
    /// Of each rank: its turn, and the message of the turn that comes next.
    next: Vec<(usize, usize)>,
    /// The grain that each rank has in each slot.
    holds: Vec<Vec<Option<usize>>>,
    /// Messages of each rank's slots that were sent and not taken.
    unread: Vec<Vec<usize>>,
    sent: HashMap<Channel, VecDeque<Arc<str>>>,
}

impl<'p> Play<'p> {
    fn new(programs: &'p [RankProgram], orders: &'p [Order]) -> Self {
        let slots = |empty| orders.iter().map(|order| vec![empty; order.slots]).collect();
        let unread = orders.iter().map(|order| vec![0; order.slots]).collect();
        Self { programs, orders, next: vec![(0, 0); programs.len()], holds: slots(None), unread, sent: HashMap::new() }
    }

    fn turn(&self, rank: usize) -> Option<Turn> {
        self.orders[rank].turns.get(self.next[rank].0).copied()
    }

    fn acts(&self, rank: usize, turn: Turn) -> &'p [MessageAct] {
        self.programs[rank].segments.get(&turn.segment).map_or(&[], Vec::as_slice)
    }

    fn run(mut self) -> Result<(), ProgramFault> {
        let mut ready: VecDeque<usize> = (0..self.programs.len()).collect();
        while let Some(rank) = ready.pop_front() {
            while self.advance(rank, &mut ready)? {}
        }
        let waits: Vec<_> =
            (0..self.programs.len()).filter_map(|rank| Some(self.wait(rank, self.turn(rank)?))).collect();
        if !waits.is_empty() {
            return Err(ProgramFault::Deadlock { waits: self.cycle(waits) });
        }
        let unread = self.sent.iter().filter(|(_, names)| !names.is_empty()).min_by_key(|(channel, _)| **channel);
        match unread {
            Some(((from, to, _), names)) => {
                Err(ProgramFault::Unread { from: *from, to: *to, message: names[0].to_string() })
            }
            None => Ok(()),
        }
    }

    /// Takes a rank one message or one turn further. Whoever may go on because of it is ready.
    fn advance(&mut self, rank: usize, ready: &mut VecDeque<usize>) -> Result<bool, ProgramFault> {
        let Some(turn) = self.turn(rank) else { return Ok(false) };
        if self.holds[rank][turn.slot] != Some(turn.grain) {
            // What the slot's last grain sent still uses its memory.
            if self.unread[rank][turn.slot] > 0 {
                return Ok(false);
            }
            self.holds[rank][turn.slot] = Some(turn.grain);
        }
        let (at, done) = self.next[rank];
        let Some(act) = self.acts(rank, turn).get(done) else {
            self.next[rank] = (at + 1, 0);
            return Ok(true);
        };
        match act {
            MessageAct::Send { to, message } => {
                self.sent.entry((rank, *to, turn.slot)).or_default().push_back(Arc::clone(message));
                self.unread[rank][turn.slot] += 1;
                ready.push_back(*to);
            }
            MessageAct::Receive { from, message } => {
                let Some(sent) = self.sent.get_mut(&(*from, rank, turn.slot)).and_then(VecDeque::pop_front) else {
                    return Ok(false);
                };
                if sent != *message {
                    let (wanted, sent) = (message.to_string(), sent.to_string());
                    return Err(ProgramFault::Mistaken { rank, from: *from, turn: at, wanted, sent });
                }
                self.unread[*from][turn.slot] -= 1;
                ready.push_back(*from);
            }
        }
        self.next[rank].1 += 1;
        Ok(true)
    }

    /// What a rank that is stuck waits for.
    fn wait(&self, rank: usize, turn: Turn) -> (usize, usize, String) {
        let (at, done) = self.next[rank];
        let what = match self.acts(rank, turn).get(done) {
            Some(MessageAct::Receive { from, message }) => format!("`{message}` of rank {from}"),
            _ => format!("grain {}'s place: what its last grain sent is not taken", turn.grain),
        };
        (rank, at, what)
    }

    /// Those ranks first that wait for a message of another that waits, from any of them on.
    fn cycle(&self, waits: Vec<(usize, usize, String)>) -> Vec<(usize, usize, String)> {
        let sender = |rank: usize| match self.acts(rank, self.turn(rank)?).get(self.next[rank].1)? {
            MessageAct::Receive { from, .. } => Some(*from),
            MessageAct::Send { .. } => None,
        };
        let (mut path, mut rank) = (Vec::new(), waits[0].0);
        while let Some(from) = sender(rank).filter(|_| !path.contains(&rank)) {
            path.push(rank);
            rank = from;
        }
        let cycle = &path[path.iter().position(|other| *other == rank).unwrap_or(0)..];
        let of = |rank: &usize| waits.iter().find(|(other, ..)| other == rank).cloned();
        if cycle.is_empty() { waits } else { cycle.iter().filter_map(of).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(to: usize, name: &str) -> MessageAct {
        MessageAct::Send { to, message: name.into() }
    }

    fn receive(from: usize, name: &str) -> MessageAct {
        MessageAct::Receive { from, message: name.into() }
    }

    fn program(segments: &[(u32, &[MessageAct])]) -> RankProgram {
        let segments = segments.iter().map(|(segment, acts)| (*segment, acts.to_vec())).collect();
        RankProgram { segments, ..RankProgram::default() }
    }

    fn order(slots: usize, turns: &[(u32, usize, usize)]) -> Order {
        let turn = |&(segment, grain, slot): &(u32, usize, usize)| Turn { segment, grain, slot, term: grain };
        Order { slots, ways: 1, turns: turns.iter().map(turn).collect() }
    }

    const ONE: &[(u32, usize, usize)] = &[(0, 0, 0), (1, 0, 0)];

    fn verdict(programs: &[RankProgram], orders: &[Order]) -> String {
        prove(programs, orders).map_or_else(|fault| fault.to_string(), |()| "sound".into())
    }

    #[test]
    fn messages_are_taken_under_their_names() {
        let first = program(&[(0, &[send(1, "a"), send(1, "b")]), (1, &[receive(1, "c")])]);
        let orders = [order(1, ONE), order(1, ONE)];
        let right = program(&[(0, &[receive(0, "a")]), (1, &[receive(0, "b"), send(0, "c")])]);
        assert_eq!(verdict(&[first.clone(), right], &orders), "sound");
        let swapped = program(&[(0, &[receive(0, "b")]), (1, &[receive(0, "a"), send(0, "c")])]);
        assert_eq!(
            verdict(&[first.clone(), swapped], &orders),
            "rank 1 awaits `b` of rank 0 in its turn 0, but `a` comes first"
        );
        let forgets = program(&[(0, &[receive(0, "a")]), (1, &[send(0, "c")])]);
        assert_eq!(verdict(&[first, forgets], &orders), "rank 0 sends `b` to rank 1, which never takes it");
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_named() {
        let first = program(&[(0, &[receive(1, "b"), send(1, "a")])]);
        let second = program(&[(0, &[receive(0, "a"), send(0, "b")])]);
        assert_eq!(
            verdict(&[first, second], &[order(1, ONE), order(1, ONE)]),
            "ranks wait for each other: rank 0 waits in its turn 0 for `b` of rank 1; rank 1 waits in its turn 0 for `a` of \
             rank 0"
        );
    }

    /// A rank that takes a message late holds up the next grain of the slot it came from, and no other.
    #[test]
    fn a_slot_is_free_when_its_messages_are_taken() {
        let first = program(&[(0, &[send(1, "a")])]);
        let second = program(&[(1, &[receive(0, "a")])]);
        let takes_late = [(1, 1, 0), (1, 0, 1)];
        let two_slots = order(2, &[(0, 0, 1), (0, 1, 0)]);
        assert_eq!(verdict(&[first.clone(), second.clone()], &[two_slots, order(2, &takes_late)]), "sound");
        let one_slot = order(1, &[(0, 0, 0), (0, 1, 0)]);
        let in_turn = order(1, &[(1, 0, 0), (1, 1, 0)]);
        assert_eq!(verdict(&[first.clone(), second], &[one_slot.clone(), in_turn]), "sound");
        let never = program(&[(0, &[])]);
        let stuck = verdict(&[first, never], &[one_slot, order(1, ONE)]);
        assert_eq!(
            stuck,
            "ranks wait for each other: rank 0 waits in its turn 1 for grain 1's place: what its last grain sent is not taken"
        );
    }

    #[test]
    fn what_happens_once_per_step_is_the_same_on_both_sides() {
        let acts = |per_step: Vec<MessageAct>| RankProgram { per_step, ..RankProgram::default() };
        let orders = [order(1, &[]), order(1, &[])];
        let first = acts(vec![send(1, "wte"), send(1, "wpe")]);
        assert_eq!(verdict(&[first.clone(), acts(vec![receive(0, "wte"), receive(0, "wpe")])], &orders), "sound");
        assert_eq!(
            verdict(&[first, acts(vec![receive(0, "wpe"), receive(0, "wte")])], &orders),
            "rank 0 sends rank 1 `wte` once per step, which awaits `wpe`"
        );
    }

    #[test]
    fn every_segment_with_messages_has_its_turn() {
        let first = program(&[(7, &[send(1, "a")])]);
        assert_eq!(
            verdict(&[first, program(&[])], &[order(1, ONE), order(1, ONE)]),
            "rank 0 has messages in segment 7, which has no turn in the schedule"
        );
    }
}
