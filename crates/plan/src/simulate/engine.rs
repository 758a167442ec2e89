//! The event loop: every unit does its acts one after the other; lanes run exchanges beside them; a heap holds what ends when.
//!
//! An exchange starts when all who take part have handed it to their lane and every earlier exchange of those lanes is done,
//! as the executor and its communicators do. Exchanges of one unit that fill the same level of the network at the same time
//! share its link evenly. Nothing depends on the order of a hash map, so the same scenario has the same outcome, bit by bit.

use super::noise::{Noise, NoiseSource};
use super::outcome::{Outcome, SPANS_MAX, SimulationError, Span, UnitTimes};
use super::script::{Act, ExchangeCost, Scenario, Scope};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

/// Events of a simulation, at most: a few minutes.
const EVENTS_MAX: u64 = 2_000_000_000;
/// Members of an exchange whose links are looked at for others that share them; with more, these stand for all.
const WATCHED_MEMBERS: usize = 8;
const NEVER: u32 = u32::MAX;

/// How to run a scenario.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulationOptions {
    pub noise: Noise,
    /// The number of the step, which draws its own noise.
    pub step: u64,
    pub keep_spans: bool,
}

impl Default for SimulationOptions {
    fn default() -> Self {
        Self { noise: Noise::NONE, step: 0, keep_spans: false }
    }
}

/// Runs a step.
pub fn simulate(scenario: &Scenario, options: &SimulationOptions) -> Result<Outcome, SimulationError> {
    let mut engine = Engine::new(scenario, options);
    for unit in 0..engine.units.len() {
        engine.advance(unit, 0.0);
    }
    while let Some(Reverse(Entry { time, event, .. })) = engine.heap.pop() {
        engine.events += 1;
        if engine.events > EVENTS_MAX {
            return Err(SimulationError::TooLong(EVENTS_MAX));
        }
        match event {
            Event::Computed(unit) => engine.advance(unit as usize, time),
            Event::Flows(running) => engine.enter_links(running as usize, time),
            Event::Ends(running, version) => engine.end(running as usize, version, time),
        }
    }
    engine.finish()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    Computed(u32),
    /// The latency of an exchange is over.
    Flows(u32),
    /// An exchange is done, unless its rate has changed since.
    Ends(u32, u32),
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Entry {
    time: f64,
    /// What was scheduled first comes first.
    number: u64,
    event: Event,
}

impl Eq for Entry {}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.time.total_cmp(&other.time).then(self.number.cmp(&other.number))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Waiting {
    Nothing,
    Exchange(u32),
    Message(u32),
    Done,
}

#[derive(Debug)]
struct UnitState {
    at: usize,
    waiting: Waiting,
    since: f64,
    /// By handle, the exchange that was last started with it.
    handles: Vec<u32>,
    /// Exchanges started so far by lane and scope, among which members find each other.
    started: Vec<[u32; 3]>,
    times: UnitTimes,
}

/// An exchange that somebody has started.
#[derive(Debug)]
struct Running {
    exchange: u32,
    /// Who started it first.
    unit: u32,
    message: u32,
    arrived: u32,
    done: bool,
    begin: f64,
    /// Seconds of bytes that are left if it had the link for itself, as of `updated`.
    left: f64,
    rate: f64,
    updated: f64,
    version: u32,
}

struct Engine<'s> {
    scenario: &'s Scenario,
    noise: NoiseSource,
    keep_spans: bool,
    heap: BinaryHeap<Reverse<Entry>>,
    scheduled: u64,
    events: u64,
    units: Vec<UnitState>,
    running: Vec<Running>,
    /// By unit and lane, what was started and is not done, in order.
    lanes: Vec<VecDeque<u32>>,
    /// Exchanges of several units: (scope, lane, replica or role, number) to their place in `running`.
    shared: HashMap<(Scope, u32, u32, u32), u32>,
    /// By unit and level, the exchanges that fill its link.
    links: Vec<Vec<u32>>,
    /// By replica and message: whether it is there.
    arrived: Vec<bool>,
    /// By replica and message: who waits for it.
    reader: Vec<u32>,
    /// Of each lane, the roles that take part in its exchanges among stages.
    roles_of_lane: Vec<Vec<usize>>,
    spans: Vec<Span>,
}

impl<'s> Engine<'s> {
    fn new(scenario: &'s Scenario, options: &SimulationOptions) -> Self {
        let (roles, replicas, lanes) = (scenario.scripts.len(), scenario.replicas.len(), scenario.lanes.len());
        let state = |unit: usize| UnitState {
            at: 0,
            waiting: Waiting::Nothing,
            since: 0.0,
            handles: vec![NEVER; scenario.scripts[unit % roles].handles as usize],
            started: vec![[0; 3]; lanes],
            times: UnitTimes { exposed: vec![0.0; lanes], ..UnitTimes::default() },
        };
        let messages = scenario.messages as usize * replicas;
        let takes_part = |role: &usize, lane: usize| {
            scenario.scripts[*role].acts.iter().any(|act| match act {
                Act::Start { exchange, .. } => {
                    let cost = &scenario.exchanges[*exchange as usize];
                    cost.scope == Scope::Stages && cost.lane as usize == lane
                }
                _ => false,
            })
        };
        Self {
            scenario,
            noise: NoiseSource::new(options.noise, options.step, scenario.ranks_per_unit),
            keep_spans: options.keep_spans,
            heap: BinaryHeap::new(),
            scheduled: 0,
            events: 0,
            units: (0..roles * replicas).map(state).collect(),
            running: Vec::new(),
            lanes: vec![VecDeque::new(); roles * replicas * lanes],
            shared: HashMap::new(),
            links: vec![Vec::new(); roles * replicas * scenario.levels.max(1) as usize],
            arrived: vec![false; messages],
            reader: vec![NEVER; messages],
            roles_of_lane: (0..lanes).map(|lane| (0..roles).filter(|role| takes_part(role, lane)).collect()).collect(),
            spans: Vec::new(),
        }
    }

    fn schedule(&mut self, time: f64, event: Event) {
        self.scheduled += 1;
        self.heap.push(Reverse(Entry { time, number: self.scheduled, event }));
    }

    fn role(&self, unit: usize) -> usize {
        unit % self.scenario.scripts.len()
    }

    fn replica(&self, unit: usize) -> usize {
        unit / self.scenario.scripts.len()
    }

    fn slowness(&self, unit: usize) -> f64 {
        let replica = &self.scenario.replicas[self.replica(unit)];
        replica.slowness.get(self.role(unit)).copied().unwrap_or(1.0)
    }

    /// Does a unit's next acts, up to one that others have a part in. What concerns nobody else is done ahead of the clock: the
    /// unit comes back when the clock has come as far. Spans are kept in the order of the clock, so nothing runs ahead of it then.
    fn advance(&mut self, unit: usize, now: f64) {
        let scenario = self.scenario;
        let acts = &scenario.scripts[self.role(unit)].acts;
        self.units[unit].waiting = Waiting::Nothing;
        let mut time = now;
        while let Some(act) = acts.get(self.units[unit].at) {
            let at = self.units[unit].at;
            let ahead = match *act {
                Act::Compute { seconds, name } => {
                    let seconds = seconds * self.slowness(unit) * self.noise.factor(unit as u64, at as u64);
                    self.units[unit].times.compute += seconds;
                    self.keep(Span { unit: unit as u32, lane: None, name, start: time, end: time + seconds, bytes: 0 });
                    Some((time + seconds, 1))
                }
                Act::Start { exchange, handle } if self.is_undisturbed(unit, exchange, handle, acts.get(at + 1)) => {
                    let ExchangeCost { lane, latency, transfer, .. } = scenario.exchanges[exchange as usize];
                    let end = time + latency + transfer;
                    self.units[unit].times.exposed[lane as usize] += end - time;
                    Some((end, 2))
                }
                Act::Wait { handle } if self.is_done(unit, handle) => Some((time, 1)),
                Act::Receive { message } if self.arrived[self.message_of(unit, message)] => Some((time, 1)),
                _ => None,
            };
            if let Some((end, done)) = ahead {
                (time, self.units[unit].at) = (end, at + done);
                if !self.keep_spans || time == now {
                    continue;
                }
            }
            if time > now {
                return self.schedule(time, Event::Computed(unit as u32));
            }
            if !self.together(unit, *act, now) {
                return;
            }
            self.units[unit].at += 1;
        }
        if time > now {
            return self.schedule(time, Event::Computed(unit as u32));
        }
        self.wait(unit, Waiting::Done, now);
        self.units[unit].times.end = now;
    }

    /// An act that others have a part in, at its time. Whether the unit goes on; if not, it has to wait, and goes on behind it.
    fn together(&mut self, unit: usize, act: Act, now: f64) -> bool {
        match act {
            Act::Start { exchange, handle } => self.start(unit, exchange, handle, now),
            Act::Send { message, exchange } => self.send(unit, exchange, message, now),
            Act::Wait { handle } => {
                let running = self.units[unit].handles[handle as usize];
                self.units[unit].at += 1;
                self.wait(unit, Waiting::Exchange(running), now);
                return false;
            }
            Act::Receive { message } => {
                let message = self.message_of(unit, message);
                self.reader[message] = unit as u32;
                self.units[unit].at += 1;
                self.wait(unit, Waiting::Message(message as u32), now);
                return false;
            }
            Act::Compute { .. } => {}
        }
        true
    }

    /// Whether an exchange is waited for at once, has no other members, and meets nothing on the unit's links: only the unit itself
    /// could start something else there.
    fn is_undisturbed(&self, unit: usize, exchange: u32, handle: u32, next: Option<&Act>) -> bool {
        let members = match self.scenario.exchanges[exchange as usize].scope {
            Scope::Unit => 1,
            Scope::Replicas => self.scenario.replicas.len(),
            Scope::Stages => usize::MAX,
        };
        let lanes = self.scenario.lanes.len();
        let waits = matches!(next, Some(Act::Wait { handle: waited }) if *waited == handle);
        let free = self.lanes[unit * lanes..(unit + 1) * lanes].iter().all(VecDeque::is_empty);
        waits && members == 1 && free && !self.keep_spans
    }

    fn is_done(&self, unit: usize, handle: u32) -> bool {
        let running = self.units[unit].handles[handle as usize];
        running != NEVER && self.running[running as usize].done
    }

    /// The number of a message among those of all replicas.
    fn message_of(&self, unit: usize, message: u32) -> usize {
        self.replica(unit) * self.scenario.messages as usize + message as usize
    }

    fn wait(&mut self, unit: usize, what: Waiting, now: f64) {
        (self.units[unit].waiting, self.units[unit].since) = (what, now);
    }

    fn start(&mut self, unit: usize, exchange: u32, handle: u32, now: f64) {
        let ExchangeCost { lane, scope, .. } = self.scenario.exchanges[exchange as usize];
        let number = &mut self.units[unit].started[lane as usize][scope as usize];
        let key = match scope {
            Scope::Unit => None,
            Scope::Replicas => Some((scope, lane, (unit % self.scenario.scripts.len()) as u32, *number)),
            Scope::Stages => Some((scope, lane, (unit / self.scenario.scripts.len()) as u32, *number)),
        };
        *number += 1;
        let known = key.and_then(|key| self.shared.get(&key).copied());
        let running = known.unwrap_or_else(|| self.begin_running(unit, exchange, NEVER));
        if let Some(key) = key {
            self.shared.insert(key, running);
        }
        self.units[unit].handles[handle as usize] = running;
        self.enqueue(unit, lane, running, now);
    }

    fn send(&mut self, unit: usize, exchange: u32, message: u32, now: f64) {
        let message = self.message_of(unit, message) as u32;
        let running = self.begin_running(unit, exchange, message);
        self.enqueue(unit, self.scenario.exchanges[exchange as usize].lane, running, now);
    }

    fn begin_running(&mut self, unit: usize, exchange: u32, message: u32) -> u32 {
        let left = self.scenario.exchanges[exchange as usize].transfer;
        self.running.push(Running {
            exchange,
            unit: unit as u32,
            message,
            arrived: 0,
            done: false,
            begin: 0.0,
            left,
            rate: 0.0,
            updated: 0.0,
            version: 0,
        });
        (self.running.len() - 1) as u32
    }

    fn lane_of(&self, unit: usize, lane: u32) -> usize {
        unit * self.scenario.lanes.len() + lane as usize
    }

    fn enqueue(&mut self, unit: usize, lane: u32, running: u32, now: f64) {
        let lane = self.lane_of(unit, lane);
        self.lanes[lane].push_back(running);
        if self.lanes[lane].len() == 1 {
            self.arrive(running, now);
        }
    }

    /// One more member has nothing else to do on its lane.
    fn arrive(&mut self, running: u32, now: f64) {
        let members = self.member_count(running as usize);
        let one = &mut self.running[running as usize];
        one.arrived += 1;
        if one.arrived as usize == members {
            one.begin = now;
            let latency = self.scenario.exchanges[one.exchange as usize].latency;
            if latency > 0.0 {
                self.schedule(now + latency, Event::Flows(running));
            } else {
                self.enter_links(running as usize, now);
            }
        }
    }

    fn cost(&self, running: usize) -> &'s ExchangeCost {
        &self.scenario.exchanges[self.running[running].exchange as usize]
    }

    fn member_count(&self, running: usize) -> usize {
        let cost = self.cost(running);
        match cost.scope {
            Scope::Unit => 1,
            Scope::Replicas => self.scenario.replicas.len(),
            Scope::Stages => self.roles_of_lane[cost.lane as usize].len(),
        }
    }

    fn member(&self, running: usize, number: usize) -> usize {
        let (cost, unit) = (self.cost(running), self.running[running].unit as usize);
        match cost.scope {
            Scope::Unit => unit,
            Scope::Replicas => number * self.scenario.scripts.len() + self.role(unit),
            Scope::Stages => {
                self.replica(unit) * self.scenario.scripts.len() + self.roles_of_lane[cost.lane as usize][number]
            }
        }
    }

    fn link_of(&self, unit: usize, level: u32) -> usize {
        unit * self.scenario.levels.max(1) as usize + level as usize
    }

    /// Its bytes begin to flow, on the links of all members.
    fn enter_links(&mut self, running: usize, now: f64) {
        let level = self.cost(running).level;
        self.running[running].updated = now;
        for number in 0..self.member_count(running) {
            let link = self.link_of(self.member(running, number), level);
            self.links[link].push(running as u32);
        }
        self.share_links(running, now);
    }

    /// Finds the rates of an exchange, if it still flows, and of all that share its links.
    fn share_links(&mut self, running: usize, now: f64) {
        let level = self.cost(running).level;
        let mut touched: Vec<u32> = Vec::new();
        for number in 0..self.member_count(running).min(WATCHED_MEMBERS) {
            touched.extend(&self.links[self.link_of(self.member(running, number), level)]);
        }
        touched.sort_unstable();
        touched.dedup();
        for other in touched {
            self.set_rate(other as usize, now);
        }
    }

    fn set_rate(&mut self, running: usize, now: f64) {
        let level = self.cost(running).level;
        let busiest = (0..self.member_count(running).min(WATCHED_MEMBERS))
            .map(|number| self.links[self.link_of(self.member(running, number), level)].len())
            .max()
            .unwrap_or(1);
        let rate = 1.0 / busiest.max(1) as f64;
        let one = &mut self.running[running];
        if one.rate == rate {
            return;
        }
        one.left -= (now - one.updated) * one.rate;
        (one.rate, one.updated) = (rate, now);
        one.version += 1;
        let (end, version) = (now + one.left.max(0.0) / rate, one.version);
        self.schedule(end, Event::Ends(running as u32, version));
    }

    fn end(&mut self, running: usize, version: u32, now: f64) {
        if self.running[running].version != version || self.running[running].done {
            return;
        }
        self.running[running].done = true;
        let ExchangeCost { lane, level, name, bytes, .. } = *self.cost(running);
        let begin = self.running[running].begin;
        let members = self.member_count(running);
        for number in 0..members {
            let unit = self.member(running, number);
            let link = self.link_of(unit, level);
            self.links[link].retain(|other| *other as usize != running);
            self.keep(Span { unit: unit as u32, lane: Some(lane), name, start: begin, end: now, bytes });
        }
        self.share_links(running, now);
        for number in 0..members {
            let unit = self.member(running, number);
            let lane_at = self.lane_of(unit, lane);
            self.lanes[lane_at].pop_front();
            if let Some(next) = self.lanes[lane_at].front().copied() {
                self.arrive(next, now);
            }
            if self.units[unit].waiting == Waiting::Exchange(running as u32) {
                let waited = now - self.units[unit].since;
                self.units[unit].times.exposed[lane as usize] += waited;
                self.advance(unit, now);
            }
        }
        self.deliver(self.running[running].message, now);
    }

    /// Wakes whoever waits for a message.
    fn deliver(&mut self, message: u32, now: f64) {
        if message == NEVER {
            return;
        }
        self.arrived[message as usize] = true;
        let reader = self.reader[message as usize];
        if reader != NEVER && self.units[reader as usize].waiting == Waiting::Message(message) {
            let state = &mut self.units[reader as usize];
            state.times.bubble += now - state.since;
            self.advance(reader as usize, now);
        }
    }

    fn keep(&mut self, span: Span) {
        if self.keep_spans && self.spans.len() < SPANS_MAX {
            self.spans.push(span);
        }
    }

    fn finish(self) -> Result<Outcome, SimulationError> {
        let stuck = self.units.iter().position(|state| state.waiting != Waiting::Done);
        if let Some(unit) = stuck {
            let what = match self.units[unit].waiting {
                Waiting::Message(message) => format!("message {}", message % self.scenario.messages.max(1)),
                Waiting::Exchange(NEVER) => "an exchange that it has not started".into(),
                Waiting::Exchange(running) => {
                    let cost = self.cost(running as usize);
                    let (name, lane) = (&self.scenario.names[cost.name as usize], cost.lane as usize);
                    format!("`{name}` along {}", self.scenario.lanes[lane])
                }
                Waiting::Nothing | Waiting::Done => "nothing".into(),
            };
            return Err(SimulationError::Stuck { role: self.role(unit), replica: self.replica(unit), what });
        }
        // A step ends when exchanges that nobody waits for are done, too.
        let (events, spans) = (self.events, self.spans);
        let units: Vec<UnitTimes> = self.units.into_iter().map(|state| state.times).collect();
        let seconds = units.iter().map(|times| times.end).fold(0.0, f64::max);
        Ok(Outcome { seconds, units, spans, events })
    }
}
