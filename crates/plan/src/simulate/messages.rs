//! A collective, message by message: the programs of all ranks, as transports run them, on links with latency and bandwidth.
//!
//! A rank sends one message at a time and receives one at a time, both at once. So a ring takes what its formula says, and so
//! does a tree; what a formula leaves out, such as ranks that wait for each other, is here.

use kolo_comm::program::{CollectiveAction, CollectiveProgram};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// How fast messages and sums are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MessageTiming {
    /// Seconds until the first byte is there.
    pub latency: f64,
    pub seconds_per_element: f64,
    /// Seconds to combine one element with another.
    pub combine_per_element: f64,
}

/// When the last rank is done; `None` if ranks wait for each other for ever. `link` says how fast the way from one rank to another is.
pub fn simulate_programs(programs: &[CollectiveProgram], link: impl Fn(usize, usize) -> MessageTiming) -> Option<f64> {
    let mut run = MessageRun::new(programs);
    for rank in 0..programs.len() {
        for number in 0..programs[rank].instructions.len() {
            if run.open[rank][number] == 0 {
                run.push(0.0, Moment::Ready(rank, number));
            }
        }
    }
    let mut last = 0.0f64;
    while let Some(Reverse((Time(now), _, moment))) = run.heap.pop() {
        match moment {
            Moment::Ready(rank, number) => run.begin(rank, number, now, &link),
            Moment::Arrives(from, to) => {
                run.arrivals.entry((from, to)).or_default().push(now);
                run.receive_next(from, to, now);
            }
            Moment::Done(rank, number) => {
                last = last.max(now);
                run.finish(rank, number, now);
            }
        }
    }
    (run.unfinished == 0).then_some(last)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    Ready(usize, usize),
    Arrives(usize, usize),
    Done(usize, usize),
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Time(f64);

impl Eq for Time {}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

struct MessageRun<'p> {
    programs: &'p [CollectiveProgram],
    heap: BinaryHeap<Reverse<(Time, u64, Moment)>>,
    pushed: u64,
    /// Instructions that each waits for.
    open: Vec<Vec<usize>>,
    readers: Vec<Vec<Vec<usize>>>,
    /// When each rank's link is free to send, and to receive.
    sends_free: Vec<f64>,
    receives_free: Vec<f64>,
    /// Receives that are ready, by (from, to), in order; and when messages came.
    posted: BTreeMap<(usize, usize), Vec<usize>>,
    arrivals: BTreeMap<(usize, usize), Vec<f64>>,
    received: BTreeMap<(usize, usize), usize>,
    unfinished: usize,
}

impl<'p> MessageRun<'p> {
    fn new(programs: &'p [CollectiveProgram]) -> Self {
        let mut readers: Vec<Vec<Vec<usize>>> =
            programs.iter().map(|program| vec![Vec::new(); program.instructions.len()]).collect();
        for (rank, program) in programs.iter().enumerate() {
            for (number, instruction) in program.instructions.iter().enumerate() {
                instruction.after.iter().for_each(|earlier| readers[rank][*earlier].push(number));
            }
        }
        let open = |program: &CollectiveProgram| program.instructions.iter().map(|one| one.after.len()).collect();
        Self {
            programs,
            heap: BinaryHeap::new(),
            pushed: 0,
            open: programs.iter().map(open).collect(),
            readers,
            sends_free: vec![0.0; programs.len()],
            receives_free: vec![0.0; programs.len()],
            posted: BTreeMap::new(),
            arrivals: BTreeMap::new(),
            received: BTreeMap::new(),
            unfinished: programs.iter().map(|program| program.instructions.len()).sum(),
        }
    }

    fn push(&mut self, time: f64, moment: Moment) {
        self.pushed += 1;
        self.heap.push(Reverse((Time(time), self.pushed, moment)));
    }

    fn begin(&mut self, rank: usize, number: usize, now: f64, link: &impl Fn(usize, usize) -> MessageTiming) {
        match self.programs[rank].instructions[number].action {
            CollectiveAction::Send { to, from } => {
                let timing = link(rank, to);
                let transfer = from.count as f64 * timing.seconds_per_element;
                let start = now.max(self.sends_free[rank]);
                self.sends_free[rank] = start + transfer;
                self.push(start + transfer, Moment::Done(rank, number));
                let arrives = (start + timing.latency + transfer).max(self.receives_free[to] + transfer);
                self.receives_free[to] = arrives;
                self.push(arrives, Moment::Arrives(rank, to));
            }
            CollectiveAction::Recv { from, .. } => {
                self.posted.entry((from, rank)).or_default().push(number);
                self.receive_next(from, rank, now);
            }
            CollectiveAction::Combine { into, .. } => {
                let seconds = into.count as f64 * link(rank, rank).combine_per_element;
                self.push(now + seconds, Moment::Done(rank, number));
            }
            CollectiveAction::Copy { .. } | CollectiveAction::Divide { .. } => {
                self.push(now, Moment::Done(rank, number));
            }
        }
    }

    /// Fills the next receive of a pair, if both it and its message are there.
    fn receive_next(&mut self, from: usize, to: usize, now: f64) {
        let next = self.received.entry((from, to)).or_default();
        let posted = self.posted.get(&(from, to)).and_then(|all| all.get(*next)).copied();
        let arrived = self.arrivals.get(&(from, to)).is_some_and(|all| all.len() > *next);
        if let Some(number) = posted.filter(|_| arrived) {
            *next += 1;
            self.push(now, Moment::Done(to, number));
        }
    }

    fn finish(&mut self, rank: usize, number: usize, now: f64) {
        self.unfinished -= 1;
        for at in 0..self.readers[rank][number].len() {
            let reader = self.readers[rank][number][at];
            self.open[rank][reader] -= 1;
            if self.open[rank][reader] == 0 {
                self.push(now, Moment::Ready(rank, reader));
            }
        }
    }
}
