//! Walks the programs of all ranks without data: they end under every schedule, and cost what the formulas say.

use super::{Algorithm, AlgorithmCost, CallShape};
use crate::call::CallKind;
use crate::program::{CollectiveAction, CollectiveProgram};
use crate::task::{RankPart, even_parts};

/// What a walk found.
#[derive(Debug, Default)]
struct WalkResult {
    cost: AlgorithmCost,
    /// Instructions that can never run.
    stuck: usize,
}

struct ProgramWalk<'p> {
    programs: &'p [CollectiveProgram],
    /// When each instruction was done: messages on the longest way to it.
    done: Vec<Vec<Option<usize>>>,
    posted: Vec<Vec<bool>>,
    /// The same-numbered message at the other end.
    partner: Vec<Vec<Option<(usize, usize)>>>,
    /// The message before it to or from the same rank.
    previous: Vec<Vec<Option<usize>>>,
}

impl<'p> ProgramWalk<'p> {
    fn new(programs: &'p [CollectiveProgram]) -> Self {
        let mut walk = Self {
            programs,
            done: programs.iter().map(|program| vec![None; program.instructions.len()]).collect(),
            posted: programs.iter().map(|program| vec![false; program.instructions.len()]).collect(),
            partner: programs.iter().map(|program| vec![None; program.instructions.len()]).collect(),
            previous: programs.iter().map(|program| vec![None; program.instructions.len()]).collect(),
        };
        for from in 0..programs.len() {
            for to in 0..programs.len() {
                let sends =
                    walk.chain(from, |action| matches!(action, CollectiveAction::Send { to: peer, .. } if peer == to));
                let recvs = walk
                    .chain(to, |action| matches!(action, CollectiveAction::Recv { from: peer, .. } if peer == from));
                assert_eq!(sends.len(), recvs.len(), "messages from {from} to {to}");
                for (send, recv) in sends.iter().zip(&recvs) {
                    let (sent, received) = (walk.count(from, *send), walk.count(to, *recv));
                    assert_eq!(sent, received, "length of a message from {from} to {to}");
                    walk.partner[from][*send] = Some((to, *recv));
                    walk.partner[to][*recv] = Some((from, *send));
                }
            }
        }
        walk
    }

    fn count(&self, rank: usize, number: usize) -> usize {
        match self.programs[rank].instructions[number].action {
            CollectiveAction::Send { from: range, .. } | CollectiveAction::Recv { into: range, .. } => range.count,
            _ => 0,
        }
    }

    /// Messages of a rank with one end, in order.
    fn chain(&mut self, rank: usize, belongs: impl Fn(CollectiveAction) -> bool) -> Vec<usize> {
        let instructions = &self.programs[rank].instructions;
        let chain: Vec<usize> = (0..instructions.len()).filter(|at| belongs(instructions[*at].action)).collect();
        for pair in chain.windows(2) {
            self.previous[rank][pair[1]] = Some(pair[0]);
        }
        chain
    }

    /// Tries to move one instruction on; whether it did. A message moves only when both ends are named: no wire holds
    /// back more than that.
    fn step(&mut self, rank: usize, number: usize) -> bool {
        let instruction = &self.programs[rank].instructions[number];
        let Some(ready) =
            instruction.after.iter().try_fold(0, |latest, earlier| Some(self.done[rank][*earlier]?.max(latest)))
        else {
            return false;
        };
        if self.done[rank][number].is_some() {
            return false;
        }
        let Some((peer, other)) = self.partner[rank][number] else {
            self.done[rank][number] = Some(ready);
            return true;
        };
        if self.posted[rank][number] || self.previous[rank][number].is_some_and(|earlier| !self.posted[rank][earlier]) {
            return false;
        }
        self.posted[rank][number] = true;
        if self.posted[peer][other] {
            self.pass((rank, number), (peer, other));
        }
        true
    }

    /// A message passes. The receiver has it one round after the sender could send it.
    fn pass(&mut self, one: (usize, usize), other: (usize, usize)) {
        let sends = |end: (usize, usize)| {
            matches!(self.programs[end.0].instructions[end.1].action, CollectiveAction::Send { .. })
        };
        let (send, recv) = if sends(one) { (one, other) } else { (other, one) };
        let ready = |end: (usize, usize)| {
            let instruction = &self.programs[end.0].instructions[end.1];
            instruction.after.iter().filter_map(|earlier| self.done[end.0][*earlier]).max().unwrap_or(0)
        };
        let (leaves, range) = (ready(send), ready(recv));
        self.done[send.0][send.1] = Some(leaves);
        self.done[recv.0][recv.1] = Some(range.max(leaves + 1));
    }

    /// Moves instructions in an order drawn from `seed` until none can move.
    fn run(mut self, seed: u64) -> WalkResult {
        let mut order: Vec<(usize, usize)> = (0..self.programs.len())
            .flat_map(|rank| (0..self.programs[rank].instructions.len()).map(move |number| (rank, number)))
            .collect();
        let mut state = seed | 1;
        for at in (1..order.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            order.swap(at, (state >> 33) as usize % (at + 1));
        }
        while order.iter().fold(false, |moved, (rank, number)| self.step(*rank, *number) || moved) {}
        WalkResult { cost: self.cost(), stuck: self.done.iter().flatten().filter(|done| done.is_none()).count() }
    }

    fn cost(&self) -> AlgorithmCost {
        let most = |measure: &dyn Fn(CollectiveAction) -> usize| {
            let of =
                |program: &CollectiveProgram| program.instructions.iter().map(|i| measure(i.action)).sum::<usize>();
            self.programs.iter().map(of).max().unwrap_or(0) as f64
        };
        AlgorithmCost {
            rounds: self.done.iter().flatten().flatten().max().copied().unwrap_or(0) as f64,
            messages: most(&|action| usize::from(matches!(action, CollectiveAction::Send { .. }))),
            sent: self.programs.iter().map(CollectiveProgram::sent).max().unwrap_or(0) as f64,
            combined: most(&|action| if let CollectiveAction::Combine { into, .. } = action { into.count } else { 0 }),
            leaving: 0.0,
        }
    }
}

/// What crosses between hosts, by the host that sends most.
fn leaving(programs: &[CollectiveProgram], hosts: &[usize]) -> f64 {
    let crossing = |rank: usize, action: CollectiveAction| match action {
        CollectiveAction::Send { to, from } if hosts[to] != hosts[rank] => from.count,
        _ => 0,
    };
    let of_rank = |rank: usize| programs[rank].instructions.iter().map(|i| crossing(rank, i.action)).sum::<usize>();
    let of_host = |host: &usize| (0..hosts.len()).filter(|rank| hosts[*rank] == *host).map(of_rank).sum::<usize>();
    hosts.iter().map(of_host).max().unwrap_or(0) as f64
}

fn shape<'a>(kind: CallKind, hosts: &'a [usize], count: usize, parts: &'a [RankPart], segment: usize) -> CallShape<'a> {
    let size = hosts.len();
    let root = size / 2;
    let parts = if matches!(kind, CallKind::Reduce | CallKind::AllReduce | CallKind::Broadcast) { &[] } else { parts };
    let in_place = matches!(kind, CallKind::Reduce | CallKind::AllReduce | CallKind::Scan);
    CallShape {
        kind,
        rank: 0,
        size,
        root,
        count,
        mean: true,
        in_place,
        send: parts,
        recv: parts,
        peer: 0,
        hosts,
        segment,
    }
}

fn programs(algorithm: Algorithm, shape: &CallShape<'_>) -> Vec<CollectiveProgram> {
    let program = |rank: usize| {
        // Every rank sends a part of this rank's size to it.
        let incoming = vec![shape.recv.get(rank).copied().unwrap_or_default(); shape.size];
        let recv = if shape.kind == CallKind::AllToAll { &incoming } else { shape.recv };
        algorithm.program(&CallShape { rank, recv, ..*shape })
    };
    (0..shape.size).map(program).collect()
}

const SIZES: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16];

fn each(mut body: impl FnMut(Algorithm, CallKind, usize)) {
    for size in SIZES {
        for kind in CallKind::ALL.into_iter().filter(|kind| !kind.is_message()) {
            let mut applying = Algorithm::ALL.into_iter().filter(|algorithm| algorithm.applies(kind, size)).peekable();
            assert!(applying.peek().is_some(), "nothing does {kind:?} on {size} ranks");
            applying.for_each(|algorithm| body(algorithm, kind, size));
        }
    }
}

#[test]
fn nobody_waits_for_ever() {
    each(|algorithm, kind, size| {
        for per_host in [1, 2, 3] {
            let hosts: Vec<usize> = (0..size).map(|rank| rank / per_host).collect();
            for count in [0, 1, size - 1, 7 * size + 3] {
                let parts = even_parts(count, size);
                let programs = programs(algorithm, &shape(kind, &hosts, count, &parts, 2));
                for seed in 0..4 {
                    let found = ProgramWalk::new(&programs).run(seed);
                    assert_eq!(found.stuck, 0, "{algorithm:?} {kind:?} of {count} on {size} ranks, seed {seed}");
                }
            }
            if algorithm != Algorithm::Hierarchical {
                break;
            }
        }
    });
}

/// Divisible by all sizes and by the pieces they are cut to.
const COUNT: usize = 16 * 9 * 5 * 7;

#[test]
fn costs_are_the_formulas() {
    each(|algorithm, kind, size| {
        for per_host in [1, 2, 4] {
            let hosts: Vec<usize> = (0..size).map(|rank| rank / per_host).collect();
            let parts = even_parts(COUNT, size);
            let shape = shape(kind, &hosts, COUNT, &parts, COUNT);
            let programs = programs(algorithm, &shape);
            let (found, formula) = (ProgramWalk::new(&programs).run(1).cost, algorithm.cost(&shape));
            let even = size % per_host == 0;
            let bound = match algorithm {
                Algorithm::Doubling => {
                    !size.is_power_of_two() || matches!(kind, CallKind::Scan | CallKind::ExclusiveScan)
                }
                Algorithm::Hierarchical => kind == CallKind::Broadcast || !even,
                _ => false,
            };
            // Where a tree is not full, its longest branch may be one shorter.
            let full = algorithm != Algorithm::Binomial || size.is_power_of_two();
            let pairs = [
                (found.rounds, formula.rounds, bound || !full),
                (found.messages, formula.messages, bound),
                (found.sent, formula.sent, bound),
                (found.combined, formula.combined, bound || !full && kind == CallKind::Reduce),
            ];
            for (found_one, formula_one, bound) in pairs {
                let fits = if bound { found_one <= formula_one } else { found_one == formula_one };
                assert!(
                    fits,
                    "{algorithm:?} {kind:?} on {size} ranks of {per_host}: {found:?}, by formula {formula:?}"
                );
            }
            let direct = matches!(algorithm, Algorithm::Exchange | Algorithm::Direct | Algorithm::Hierarchical);
            if direct && kind == CallKind::AllReduce && even {
                assert_eq!(leaving(&programs, &hosts), formula.leaving, "{algorithm:?} on {size} ranks of {per_host}");
            }
        }
    });
}
