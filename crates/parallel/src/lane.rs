//! The communication lane: runs a session's exchanges on communicators, in order, each on a thread of its own.
//!
//! Every axis of the mesh has its communicator, and every lane of a session has one more of each axis that its grains use: what
//! is started on a communicator is started in one order on all of its ranks.

use crate::mesh::Mesh;
use kolo_comm::task::RankPart;
use kolo_comm::{CallKind, Communicator, ElementType, Fault, Reduction, Request, Ticket};
use kolo_exec::{Collectives, Exchange, ExchangeError, ExchangeKind, Memory};
use kolo_graph::DType;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard};

/// Runs exchanges on communicators.
#[derive(Debug)]
pub struct CommLane {
    world: Arc<Communicator>,
    mesh: Mesh,
    state: Mutex<LaneState>,
}

/// What has a communicator of its own: an axis, the lane whose grains use it, and what goes there.
pub(crate) type Line = (String, Option<usize>, Way);

/// Calls of all ranks of an axis, or messages from one to another. Those have each their own communicator: a message that its
/// receiver takes late must not hold up one that goes elsewhere, or comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    All,
    Message { from: usize, to: usize },
}

impl Way {
    /// The way of an exchange of the rank at this place on the axis.
    pub fn of(kind: ExchangeKind, place: usize) -> Self {
        match kind {
            ExchangeKind::Send(to) => Way::Message { from: place, to },
            ExchangeKind::Receive(from) => Way::Message { from, to: place },
            _ => Way::All,
        }
    }

    fn has(self, place: usize) -> bool {
        match self {
            Way::All => true,
            Way::Message { from, to } => place == from || place == to,
        }
    }

    pub fn encode(self) -> String {
        match self {
            Way::All => "all".into(),
            Way::Message { from, to } => format!("{from}>{to}"),
        }
    }

    pub fn decode(text: &str) -> Option<Self> {
        let Some((from, to)) = text.split_once('>') else { return Some(Way::All) };
        Some(Way::Message { from: from.parse().ok()?, to: to.parse().ok()? })
    }
}

/// An exchange as its communicator numbers the ranks: of two, the one that is first on the axis is 0.
pub(crate) fn numbered(kind: ExchangeKind, place: usize) -> ExchangeKind {
    match kind {
        ExchangeKind::Send(to) => ExchangeKind::Send(usize::from(to > place)),
        ExchangeKind::Receive(from) => ExchangeKind::Receive(usize::from(from > place)),
        kind => kind,
    }
}

#[derive(Debug, Default)]
struct LaneState {
    communicators: BTreeMap<Line, Arc<Communicator>>,
    /// Lines that were made, of other ranks too.
    made: BTreeSet<Line>,
    requests: Vec<(Request, Arc<Communicator>)>,
    /// The axis of each request, by its number among `sent`, and the bytes that this rank sends in it.
    volumes: Vec<(usize, u64)>,
    /// Bytes that this rank has sent along each axis.
    sent: Vec<(String, u64)>,
    tickets: Vec<Option<Result<Ticket, Fault>>>,
}

impl CommLane {
    /// All ranks of `world` lie along the data axis.
    pub fn new(world: Arc<Communicator>) -> Self {
        let mesh = Mesh::data(world.size(), world.rank()).expect("a rank is below the size");
        Self::on_mesh(world, mesh)
    }

    /// The ranks of `world` lie on this mesh.
    pub fn on_mesh(world: Arc<Communicator>, mesh: Mesh) -> Self {
        assert_eq!((mesh.ranks(), mesh.rank()), (world.size(), world.rank()), "the mesh is of another world");
        Self { world, mesh, state: Mutex::default() }
    }

    pub(crate) fn world(&self) -> &Arc<Communicator> {
        &self.world
    }

    pub(crate) fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    fn lock(&self) -> MutexGuard<'_, LaneState> {
        kolo_base::lock(&self.state)
    }

    pub(crate) fn line(&self, exchange: &Exchange) -> Line {
        let way = Way::of(exchange.kind, self.mesh.coordinate(&exchange.axis));
        (exchange.axis.clone(), exchange.lane, way)
    }

    /// Makes the communicators that any rank needs, which all ranks do together, in one order. Ranks whose grains exchange
    /// tensors must run as many of them at a time.
    fn connect(&self, exchanges: &[Exchange], lanes: usize) -> Result<(), ExchangeError> {
        let own: BTreeSet<Line> = exchanges.iter().map(|exchange| self.line(exchange)).collect();
        let all = gather(&self.world, encode(lanes, &own).as_bytes())?;
        let decoded: Vec<(usize, BTreeSet<Line>)> =
            all.iter().map(|text| decode(&String::from_utf8_lossy(text))).collect();
        let in_grains = decoded.iter().flat_map(|(_, lines)| lines).any(|(_, lane, _)| lane.is_some());
        if let Some((rank, (other, _))) =
            decoded.iter().enumerate().find(|(_, (other, _))| *other != lanes && in_grains)
        {
            return Err(Fault::BadCall(format!(
                "rank {} runs {lanes} grains at a time and rank {rank} runs {other}, but grains of this graph exchange \
                 tensors\n  hint: give all ranks the same number of threads (`--threads`)",
                self.world.rank(),
            ))
            .into());
        }
        let wanted: BTreeSet<Line> = decoded.into_iter().flat_map(|(_, lines)| lines).collect();
        for line in wanted {
            if self.lock().made.contains(&line) {
                continue;
            }
            let (axis, lane, way) = &line;
            let place = self.mesh.coordinate(axis);
            let world = self.mesh.size(axis) == self.world.size() && lane.is_none() && *way == Way::All;
            let communicator = match world {
                true => Arc::clone(&self.world),
                false => {
                    // Whoever has no part in it is alone for as long as it takes.
                    let alone = -1 - self.world.rank() as i64;
                    let group = if way.has(place) { self.mesh.group(axis) as i64 } else { alone };
                    Arc::new(self.world.split_labelled(group, place as i64, &label(&line))?)
                }
            };
            let mut state = self.lock();
            if way.has(place) {
                state.communicators.insert(line.clone(), communicator);
            }
            state.made.insert(line);
        }
        Ok(())
    }
}

/// Every rank's bytes, in the order of ranks. All ranks call it together.
pub(crate) fn gather(world: &Communicator, own: &[u8]) -> Result<Vec<Vec<u8>>, Fault> {
    let mut lengths = vec![0i64; world.size()];
    world.all_gather(&[own.len() as i64], &mut lengths)?;
    let counts: Vec<usize> = lengths.iter().map(|length| *length as usize).collect();
    let mut all = vec![0u8; counts.iter().sum()];
    world.all_gather_v(own, &mut all, &counts)?;
    let mut rest = &all[..];
    let part = |count: &usize| {
        let (part, after) = rest.split_at(*count);
        rest = after;
        part.to_vec()
    };
    Ok(counts.iter().map(part).collect())
}

/// What timelines call a line.
pub(crate) fn label((axis, lane, way): &Line) -> String {
    let way = match way {
        Way::All => String::new(),
        Way::Message { from, to } => format!(" from {from} to {to}"),
    };
    match lane {
        Some(lane) => format!("{axis}{way}, lane {lane}"),
        None => format!("{axis}{way}"),
    }
}

/// Lanes and lines as text, a line of text each.
fn encode(lanes: usize, lines: &BTreeSet<Line>) -> String {
    let mut text = format!("{lanes}\n");
    for (axis, lane, way) in lines {
        let lane = lane.map_or("step".into(), |lane| lane.to_string());
        let _ = writeln!(text, "{} {lane} {axis}", way.encode());
    }
    text
}

/// What [`encode`] wrote.
fn decode(text: &str) -> (usize, BTreeSet<Line>) {
    let mut lines = text.lines();
    let lanes = lines.next().and_then(|lanes| lanes.parse().ok()).unwrap_or(0);
    let line = |line: &str| {
        let mut words = line.splitn(3, ' ');
        let (way, lane, axis) = (words.next()?, words.next()?, words.next()?);
        Some((axis.to_string(), lane.parse().ok(), Way::decode(way)?))
    };
    (lanes, lines.filter_map(line).collect())
}

fn element(dtype: DType) -> ElementType {
    match dtype {
        DType::F32 => ElementType::F32,
        DType::BF16 => ElementType::Bf16,
        DType::F16 => ElementType::F16,
        DType::I32 => ElementType::I32,
        DType::I64 => ElementType::I64,
        DType::Bool | DType::U8 => ElementType::U8,
    }
}

/// All of a tensor goes `by` places on in a ring, and nothing to anybody else: what goes to each rank, and what comes from it.
fn ring_parts(count: usize, by: usize, rank: usize, ranks: usize) -> (Arc<[RankPart]>, Arc<[RankPart]>) {
    let only = |other: usize| {
        let part = |at: usize| RankPart { offset: 0, count: if at == other { count } else { 0 } };
        (0..ranks).map(part).collect()
    };
    (only((rank + by) % ranks), only((rank + ranks - by) % ranks))
}

/// The call that an exchange is for this rank of its axis.
pub(crate) fn request(exchange: &Exchange, (rank, ranks): (usize, usize)) -> Request {
    let element = element(exchange.dtype);
    let parts: Vec<RankPart> =
        exchange.parts.iter().map(|(offset, count)| RankPart { offset: *offset, count: *count }).collect();
    let bytes = exchange.elements * element.bytes();
    let (input, output) = ((exchange.input, bytes), (exchange.output, bytes));
    let in_place = exchange.input == exchange.output;
    // This rank's part: of the exchange's memory, or all of a memory of its own.
    let own = |memory: *mut u8| {
        let RankPart { offset, count } = parts.get(rank).copied().unwrap_or(RankPart { offset: 0, count: 0 });
        let offset = if in_place { offset * element.bytes() } else { 0 };
        // SAFETY: a part lies inside the exchange's memory.
        (unsafe { memory.add(offset) }, count * element.bytes())
    };
    let (kind, peer, input, output) = match exchange.kind {
        ExchangeKind::AllReduce => (CallKind::AllReduce, 0, input, output),
        ExchangeKind::Barrier => (CallKind::Barrier, 0, input, output),
        ExchangeKind::ReduceScatter => (CallKind::ReduceScatter, 0, input, own(exchange.output)),
        ExchangeKind::AllGather => (CallKind::AllGather, 0, own(exchange.input), output),
        ExchangeKind::AllToAll | ExchangeKind::Shift(_) | ExchangeKind::EachToEach => {
            (CallKind::AllToAll, 0, input, output)
        }
        ExchangeKind::Send(to) => (CallKind::Send, to, input, (std::ptr::null_mut(), 0)),
        ExchangeKind::Receive(from) => (CallKind::Recv, from, (std::ptr::null_mut(), 0), output),
    };
    let each_to_each = kind == CallKind::AllToAll;
    let count = match parts.is_empty() {
        _ if each_to_each => 0,
        true => exchange.elements,
        false => parts.iter().map(|part| part.count).sum(),
    };
    let parts: Arc<[RankPart]> = parts.into();
    let (send, recv) = match exchange.kind {
        ExchangeKind::Shift(by) => ring_parts(exchange.elements, by, rank, ranks),
        ExchangeKind::EachToEach => (parts[..ranks].into(), parts[ranks..].into()),
        _ => (if each_to_each { Arc::clone(&parts) } else { Arc::default() }, parts),
    };
    Request {
        count,
        peer,
        input: input.0,
        input_bytes: input.1,
        output: output.0,
        output_bytes: output.1,
        send,
        recv,
        ..Request::new(kind, element).named(&exchange.name)
    }
}

/// Memory that collectives reach directly. All ranks call it together.
pub(crate) fn shared_memory(world: &Communicator, bytes: usize) -> Result<Memory, ExchangeError> {
    // Ranks that have other shards need other sizes, and memory is allocated for all alike.
    let mut most = [bytes as i64];
    world.all_reduce(&mut most, Reduction::Max)?;
    if most[0] == 0 {
        return Ok(Memory::new(0));
    }
    let shared = world.allocate(most[0] as usize)?;
    // SAFETY: a page-aligned, zeroed mapping of at least `bytes`, alive as long as its keeper.
    Ok(unsafe { Memory::kept(shared.at(0), shared.bytes(), Box::new(shared)) })
}

impl Collectives for CommLane {
    fn size(&self, axis: &str) -> usize {
        self.mesh.size(axis)
    }

    fn memory(&self, bytes: usize) -> Result<Memory, ExchangeError> {
        shared_memory(&self.world, bytes)
    }

    fn prepare(&self, exchanges: Vec<Exchange>, lanes: usize) -> Result<usize, ExchangeError> {
        self.connect(&exchanges, lanes)?;
        let mut state = self.lock();
        let first = state.requests.len();
        for exchange in &exchanges {
            let communicator = Arc::clone(&state.communicators[&self.line(exchange)]);
            let kind = numbered(exchange.kind, self.mesh.coordinate(&exchange.axis));
            let own = (communicator.rank(), communicator.size());
            let request = request(&Exchange { kind, ..exchange.clone() }, own);
            let axis = state.sent.iter().position(|(axis, _)| *axis == exchange.axis).unwrap_or(state.sent.len());
            if axis == state.sent.len() {
                state.sent.push((exchange.axis.clone(), 0));
            }
            let bytes = request.sent_bytes(own.0, own.1);
            state.volumes.push((axis, bytes));
            state.requests.push((request, communicator));
        }
        let count = state.requests.len();
        state.tickets.resize(count, None);
        Ok(first)
    }

    fn start(&self, number: usize) {
        let (request, communicator) = {
            let mut state = self.lock();
            let (axis, bytes) = state.volumes[number];
            state.sent[axis].1 += bytes;
            state.requests[number].clone()
        };
        // SAFETY: the session lends the memory until `wait` on this exchange returns.
        let ticket = unsafe { communicator.start(request) };
        self.lock().tickets[number] = Some(ticket);
    }

    fn sent_bytes(&self) -> BTreeMap<String, u64> {
        self.lock().sent.iter().cloned().collect()
    }

    fn wait(&self, number: usize) -> Result<(), ExchangeError> {
        let (ticket, communicator) = {
            let mut state = self.lock();
            (state.tickets[number].take(), Arc::clone(&state.requests[number].1))
        };
        match ticket {
            Some(ticket) => Ok(communicator.wait(ticket?)?),
            None => Ok(()),
        }
    }
}
