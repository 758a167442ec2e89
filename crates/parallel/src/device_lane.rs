//! The communication lane of devices that exchange directly, each with a rank of its own.
//!
//! The host's links stay what ranks meet and agree over: who is in which group, that all exchange the same in the same order, and who was
//! lost. Groups are as those of [`CommLane`]: one for every axis and lane, and one for each way of messages. An exchange is queued on the
//! device, which also waits for it; a thread watches what is under way, so that a rank that is gone or stuck ends the wait of all others.

use crate::device_calls::{self, Call, Calls, Key, members};
use crate::lane::{CommLane, Way, gather, numbered, request};
use crate::mesh::Mesh;
use kolo_base::{lock, wait};
use kolo_comm::fault::rank_name;
use kolo_comm::watch::STALL_HEARTBEATS;
use kolo_comm::{Communicator, Fault, Reduction, Request, Watch};
use kolo_exec::{
    Collectives, DeviceGroup, DeviceLinks, Exchange, ExchangeError, FoundLinks, GroupPlace, LinkPreference, Look,
    Memory,
};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often what is under way is looked at.
const LOOK_EVERY: Duration = Duration::from_micros(500);
/// How long the host looks without a pause.
const BUSY_WAIT: Duration = Duration::from_millis(5);
/// Waits with a longer break between two looks are two waits.
const BREAK: Duration = Duration::from_millis(500);
/// A failed exchange leaves the job's heartbeats so many of them to tell who is to blame.
const BLAME_HEARTBEATS: u32 = 4;

/// Runs exchanges of memory of devices.
pub struct DeviceLane {
    host: CommLane,
    world: Arc<Communicator>,
    mesh: Mesh,
    links: Arc<dyn DeviceLinks>,
    shared: Arc<Shared>,
    /// The answer of the last [`Collectives::on_device`].
    on_device: AtomicBool,
    watcher: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    watch: Arc<Watch>,
    state: Mutex<LaneState>,
    /// Something was started, or the end.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct LaneState {
    /// In the order of keys, which is the same on all ranks.
    groups: BTreeMap<Key, Arc<dyn DeviceGroup>>,
    entries: Vec<Entry>,
    sent: BTreeMap<String, u64>,
    /// Entries that were started and not seen to be done.
    under_way: Vec<usize>,
    fault: Option<Fault>,
    closed: bool,
}

#[derive(Clone, Debug)]
enum Entry {
    /// Its number there.
    Host(usize),
    Device(DeviceEntry),
}

#[derive(Clone, Debug)]
struct DeviceEntry {
    name: String,
    axis: String,
    sent_bytes: u64,
    group: Arc<dyn DeviceGroup>,
    ticket: usize,
}

impl std::fmt::Debug for DeviceLane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceLane of {:?} over {}", self.world, self.links.transport())
    }
}

/// The links of this rank's device, if all ranks have some and are to use them: devices of their own. All ranks call it together.
pub fn agree(
    world: &Communicator,
    offer: Option<(LinkPreference, FoundLinks)>,
) -> Result<Option<Arc<dyn DeviceLinks>>, Fault> {
    let (own, links, preference) = match offer {
        None => (vec![ABSENT], None, LinkPreference::Never),
        Some((preference, found)) => match found.and_then(|links| Ok((links.identity()?, links))) {
            Ok((identity, links)) => ([&[PRESENT], &identity[..]].concat(), Some(links), preference),
            Err(error) => ([&[FAILED], error.to_string().as_bytes()].concat(), None, preference),
        },
    };
    let all = gather(world, &own)?;
    let name = |rank: usize| rank_name(rank, &world.watch().host(rank));
    let problem = all.iter().enumerate().find_map(|(rank, said)| match said.first() {
        Some(&PRESENT) => {
            let same = all[..rank].iter().position(|other| other == said)?;
            let (one, other) = (name(same), name(rank));
            Some(format!("{one} and {other} are on the same GPU, and NCCL takes one rank per GPU\n  hint: start as many workers as there are GPUs, or leave --transport out: workers that share a GPU exchange through the host's memory"))
        }
        Some(&FAILED) => Some(format!("{}: {}", name(rank), String::from_utf8_lossy(&said[1..]))),
        _ => Some(format!("{} does not compute on a GPU\n  hint: use `--device cuda`, or leave --transport out", name(rank))),
    });
    match problem {
        Some(problem) if preference == LinkPreference::Always => {
            Err(Fault::BadCall(format!("--transport nccl: {problem}")))
        }
        Some(_) => Ok(None),
        None => Ok(links),
    }
}

/// The lane of a world's ranks on this mesh: over these links if all can and are to, else through the memory of the host. All ranks call it
/// together.
pub fn lane(
    mesh: &Mesh,
    world: &Arc<Communicator>,
    links: Option<(LinkPreference, FoundLinks)>,
) -> Result<Arc<dyn Collectives>, Fault> {
    let host = CommLane::on_mesh(Arc::clone(world), mesh.clone());
    Ok(match agree(world, links)? {
        Some(links) => Arc::new(DeviceLane::new(host, links)?),
        None => Arc::new(host),
    })
}

/// What a rank says of its device.
const ABSENT: u8 = 0;
const PRESENT: u8 = 1;
const FAILED: u8 = 2;

/// Looks whether a wait may go on, and for how long it has lasted.
#[derive(Debug)]
struct Looker {
    watch: Arc<Watch>,
    what: String,
    /// When the wait began, and when it was last looked at.
    times: Mutex<(Instant, Instant)>,
}

impl Looker {
    fn new(watch: &Arc<Watch>, what: String) -> Self {
        let now = Instant::now();
        Self { watch: Arc::clone(watch), what, times: Mutex::new((now, now)) }
    }

    fn look(&self) -> Result<(), Fault> {
        self.watch.check()?;
        let (now, mut times) = (Instant::now(), lock(&self.times));
        if now.saturating_duration_since(times.1) > BREAK {
            times.0 = now;
        }
        times.1 = now;
        match self.watch.is_stalled(times.0) {
            false => Ok(()),
            true => Err(Fault::Aborted(format!(
                "{} did not finish within {} ms, and no rank makes progress\n  hint: a rank is stuck; the logs say where each one is",
                self.what,
                times.0.elapsed().as_millis()
            ))),
        }
    }
}

fn fault_of(error: ExchangeError) -> Fault {
    error.downcast::<Fault>().map_or_else(|error| Fault::BadCall(error.to_string()), |fault| *fault)
}

impl DeviceLane {
    /// All ranks of the lane's world call it together, and their devices have these links.
    pub fn new(host: CommLane, links: Arc<dyn DeviceLinks>) -> Result<Self, Fault> {
        let (world, mesh) = (Arc::clone(host.world()), host.mesh().clone());
        let (state, watch) = (Mutex::default(), Arc::clone(world.watch()));
        let shared = Arc::new(Shared { watch, state, changed: Condvar::new() });
        let theirs = Arc::clone(&shared);
        let watcher = std::thread::Builder::new().name("links".into()).spawn(move || theirs.watch_over());
        let watcher = watcher.map_err(|error| Fault::thread("starting the thread that watches exchanges", &error))?;
        let on_device = AtomicBool::new(false);
        Ok(Self { host, world, mesh, links, shared, on_device, watcher: Some(watcher) })
    }

    /// The group of an exchange.
    fn key(&self, exchange: &Exchange) -> Key {
        Key { line: self.host.line(exchange), group: self.mesh.group(&exchange.axis) }
    }

    /// How many ranks a group has.
    fn size_of(&self, key: &Key) -> usize {
        let (axis, _, way) = &key.line;
        if *way == Way::All { self.mesh.size(axis) } else { 2 }
    }

    /// An exchange as its group numbers the ranks, and as the host's links would call it.
    fn call_of(&self, exchange: &Exchange) -> (Exchange, Request) {
        let place = self.mesh.coordinate(&exchange.axis);
        let kind = numbered(exchange.kind, place);
        let (rank, size) = match Way::of(exchange.kind, place) {
            Way::All => (place, self.mesh.size(&exchange.axis)),
            Way::Message { from, to } => (usize::from(place == from.max(to)), 2),
        };
        let exchange = Exchange { kind, ..exchange.clone() };
        let request = request(&exchange, (rank, size));
        (exchange, request)
    }

    /// Tells all ranks what this one exchanges; what all do, if they agree. All ranks call it together.
    fn tell(&self, exchanges: &[Exchange]) -> Result<Vec<Calls>, Fault> {
        let mut own = Calls::new();
        for exchange in exchanges {
            let call = Call::new(&self.call_of(exchange).1, &exchange.name);
            own.entry(self.key(exchange)).or_default().push(call);
        }
        let all = gather(&self.world, device_calls::encode(&own).as_bytes())?;
        let unreadable = |rank: usize| {
            let why = "it describes its exchanges in another format";
            Fault::BadCall(format!("{}: {why}\n  hint: run one version of kolo everywhere", rank_name(rank, "")))
        };
        let decode = |(rank, text): (usize, &Vec<u8>)| {
            let calls = std::str::from_utf8(text).ok().and_then(device_calls::decode);
            calls.ok_or_else(|| unreadable(rank))
        };
        let all = all.iter().enumerate().map(decode).collect::<Result<Vec<_>, _>>()?;
        device_calls::check(&self.world, &all, |key| self.size_of(key))?;
        Ok(all)
    }

    /// Joins the groups that this rank needs and does not have yet. All ranks call it together.
    fn join_groups(&self, all: &[Calls]) -> Result<(), ExchangeError> {
        let rank = self.world.rank();
        let known: Vec<Key> = lock(&self.shared.state).groups.keys().cloned().collect();
        let fresh: Vec<&Key> = all[rank].keys().filter(|key| !known.contains(key)).collect();
        let mut invitations = String::new();
        for key in fresh.iter().filter(|key| members(key, all).first() == Some(&rank)) {
            let bytes: String = self.links.invite()?.iter().map(|byte| format!("{byte:02x}")).collect();
            invitations += &format!("{bytes} {}\n", key.encode());
        }
        let invitations = gather(&self.world, invitations.as_bytes())?;
        for key in fresh {
            let members = members(key, all);
            let said = String::from_utf8_lossy(&invitations[members[0]]);
            let own = said.lines().filter_map(|line| line.split_once(' ')).find(|(_, of)| *of == key.encode());
            let bytes = own.and_then(|(bytes, _)| from_hex(bytes));
            let missing = || format!("{} sent no invitation to exchanges along {key}", rank_name(members[0], ""));
            let place = members.iter().position(|member| *member == rank).unwrap_or(0);
            let place = GroupPlace { rank: place, size: members.len() };
            let what = format!("the meeting of {} ranks along {key} over {}", place.size, self.links.transport());
            let looker = Looker::new(&self.shared.watch, what);
            let look: Look = Arc::new(move || Ok(looker.look()?));
            self.shared.watch.enter_group();
            let group = self.links.join(&bytes.ok_or_else(missing)?, place, look);
            self.shared.watch.leave_group();
            lock(&self.shared.state).groups.insert(key.clone(), Arc::from(group?));
        }
        Ok(())
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).ok());
    digits.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect()
}

impl Collectives for DeviceLane {
    fn size(&self, axis: &str) -> usize {
        self.mesh.size(axis)
    }

    fn on_device(&self, mine: bool) -> Result<bool, ExchangeError> {
        let mut all = [i32::from(mine)];
        self.world.all_reduce(&mut all, Reduction::Min)?;
        self.on_device.store(all[0] > 0, Ordering::Relaxed);
        Ok(all[0] > 0)
    }

    fn device_transport(&self) -> Option<&'static str> {
        Some(self.links.transport())
    }

    fn memory(&self, bytes: usize) -> Result<Memory, ExchangeError> {
        self.host.memory(bytes)
    }

    fn prepare(&self, exchanges: Vec<Exchange>, lanes: usize) -> Result<usize, ExchangeError> {
        if !self.on_device.load(Ordering::Relaxed) {
            let (count, first) = (exchanges.len(), self.host.prepare(exchanges, lanes)?);
            let mut state = lock(&self.shared.state);
            let own = state.entries.len();
            state.entries.extend((first..first + count).map(Entry::Host));
            return Ok(own);
        }
        let all = self.tell(&exchanges)?;
        self.join_groups(&all)?;
        let mut entries = Vec::with_capacity(exchanges.len());
        for exchange in &exchanges {
            let group = Arc::clone(&lock(&self.shared.state).groups[&self.key(exchange)]);
            let (numbered, request) = self.call_of(exchange);
            let place = self.mesh.coordinate(&exchange.axis);
            let sent_bytes = request.sent_bytes(place, self.mesh.size(&exchange.axis));
            let ticket = group.prepare(&numbered, self.world.reproducible())?;
            let (name, axis) = (exchange.name.clone(), exchange.axis.clone());
            entries.push(Entry::Device(DeviceEntry { name, axis, sent_bytes, group, ticket }));
        }
        let mut state = lock(&self.shared.state);
        let first = state.entries.len();
        state.entries.extend(entries);
        Ok(first)
    }

    fn start(&self, number: usize) {
        let entry = lock(&self.shared.state).entries[number].clone();
        match entry {
            Entry::Host(number) => self.host.start(number),
            Entry::Device(entry) => self.shared.start(number, &entry),
        }
    }

    fn sent_bytes(&self) -> BTreeMap<String, u64> {
        let mut sent = self.host.sent_bytes();
        lock(&self.shared.state).sent.iter().for_each(|(axis, bytes)| *sent.entry(axis.clone()).or_default() += bytes);
        sent
    }

    fn wait(&self, number: usize) -> Result<(), ExchangeError> {
        let entry = lock(&self.shared.state).entries[number].clone();
        match entry {
            Entry::Host(number) => self.host.wait(number),
            Entry::Device(entry) => {
                self.shared.check()?;
                entry.group.order(entry.ticket)
            }
        }
    }

    fn settle(&self) -> Result<(), ExchangeError> {
        let since = Instant::now();
        loop {
            self.shared.check()?;
            // Faster than the thread that watches.
            match self.shared.look_at_all() {
                Ok(0) => return Ok(self.shared.check()?),
                Ok(_) => (),
                Err(error) => self.shared.fail(error),
            }
            if since.elapsed() < BUSY_WAIT { std::thread::yield_now() } else { std::thread::sleep(LOOK_EVERY / 10) }
        }
    }
}

impl Shared {
    /// The fault that ended exchanges, if one did.
    fn check(&self) -> Result<(), Fault> {
        lock(&self.state).fault.clone().map_or(Ok(()), Err)
    }

    fn start(&self, number: usize, entry: &DeviceEntry) {
        if self.check().is_err() {
            return;
        }
        let started = entry.group.start(entry.ticket);
        let mut state = lock(&self.state);
        match started {
            Ok(()) => {
                *state.sent.entry(entry.axis.clone()).or_default() += entry.sent_bytes;
                state.under_way.push(number);
                self.changed.notify_all();
            }
            Err(error) => {
                drop(state);
                self.fail(error);
            }
        }
    }

    /// How many exchanges are under way still.
    fn look_at_all(&self) -> Result<usize, ExchangeError> {
        let (mut left, numbers) = (Vec::new(), lock(&self.state).under_way.clone());
        for number in &numbers {
            let entry = lock(&self.state).entries[*number].clone();
            if let Entry::Device(entry) = entry
                && !entry.group.is_done(entry.ticket)?
            {
                left.push(*number);
            }
        }
        let mut state = lock(&self.state);
        state.under_way.retain(|number| left.contains(number) || !numbers.contains(number));
        Ok(state.under_way.len())
    }

    /// Ends all exchanges. If the job was ended, that is why: whoever ended it knows who is to blame, and may be about to say so.
    fn fail(&self, error: ExchangeError) {
        let mut fault = fault_of(error);
        let until = Instant::now() + self.watch.stall() / STALL_HEARTBEATS * BLAME_HEARTBEATS;
        while Instant::now() < until && lock(&self.state).fault.is_none() {
            if let Err(told) = self.watch.check() {
                fault = told;
                break;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        let mut state = lock(&self.state);
        state.fault.get_or_insert(fault);
        state.under_way.clear();
        // Whoever sees the fault sees that nothing waits on the device any more.
        state.groups.values().for_each(|group| group.abort());
        self.changed.notify_all();
    }

    /// Sees to it that nothing waits for ever, until the lane is closed.
    fn watch_over(&self) {
        let mut state = lock(&self.state);
        loop {
            while state.under_way.is_empty() && !state.closed {
                state = wait(&self.changed, state);
            }
            if state.closed {
                return;
            }
            let names = state.under_way.first().map(|number| match &state.entries[*number] {
                Entry::Device(entry) => entry.name.clone(),
                Entry::Host(_) => String::new(),
            });
            drop(state);
            self.watch.enter_group();
            let outcome = self.watch_one(&names.unwrap_or_default());
            self.watch.leave_group();
            if let Err(error) = outcome {
                self.fail(error);
            }
            state = lock(&self.state);
        }
    }

    /// Looks until something is done.
    fn watch_one(&self, name: &str) -> Result<(), ExchangeError> {
        let looker = Looker::new(&self.watch, format!("the exchange `{name}`"));
        let first = lock(&self.state).under_way.first().copied();
        loop {
            std::thread::sleep(LOOK_EVERY);
            let left = self.look_at_all()?;
            let state = lock(&self.state);
            if left == 0 || state.closed || state.under_way.first().copied() != first {
                return Ok(());
            }
            drop(state);
            looker.look()?;
        }
    }
}

impl Drop for DeviceLane {
    fn drop(&mut self) {
        lock(&self.shared.state).closed = true;
        self.shared.changed.notify_all();
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
        let mut state = lock(&self.shared.state);
        // Nobody comes to the end of a broken group.
        if state.fault.is_some() || self.shared.watch.check().is_err() {
            state.groups.values().for_each(|group| group.abort());
        }
        state.entries.clear();
        state.groups.clear();
    }
}

#[cfg(test)]
mod tests;
