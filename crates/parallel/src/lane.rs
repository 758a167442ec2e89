//! The communication lane: runs a session's exchanges on communicators, in order, each on a thread of its own.
//!
//! Every axis of the mesh has its communicator, and every lane of a session has one more of each axis that its grains use: what
//! is started on a communicator is started in one order on all of its ranks.

use crate::mesh::Mesh;
use kolo_comm::task::Part;
use kolo_comm::{Communicator, Element, Fault, Kind, Request, Ticket};
use kolo_exec::{Collectives, Exchange, ExchangeError, ExchangeKind, Memory};
use kolo_graph::DType;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Runs exchanges on communicators.
#[derive(Debug)]
pub struct CommLane {
    world: Arc<Communicator>,
    mesh: Mesh,
    state: Mutex<State>,
}

/// An axis, and the lane whose grains use it.
type Line = (String, Option<usize>);

#[derive(Debug, Default)]
struct State {
    communicators: BTreeMap<Line, Arc<Communicator>>,
    requests: Vec<(Request, Arc<Communicator>)>,
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The communicator of an axis, for a lane or for the step. The first time, all ranks call it together.
    fn communicator(&self, line: Line) -> Result<Arc<Communicator>, Fault> {
        if let Some(known) = self.lock().communicators.get(&line) {
            return Ok(Arc::clone(known));
        }
        let (axis, lane) = &line;
        let all = self.mesh.size(axis) == self.world.size() && lane.is_none();
        let communicator = match all {
            true => Arc::clone(&self.world),
            false => {
                let (group, place) = (self.mesh.group(axis), self.mesh.coordinate(axis));
                Arc::new(self.world.split(group as i64, place as i64)?)
            }
        };
        self.lock().communicators.insert(line, Arc::clone(&communicator));
        Ok(communicator)
    }

    /// Lanes that run exchanges of their own must be as many on every rank.
    fn agree_on_lanes(&self, lanes: usize) -> Result<(), ExchangeError> {
        let mut all = vec![0i64; self.world.size()];
        self.world.all_gather(&[lanes as i64], &mut all)?;
        match all.iter().position(|other| *other != lanes as i64) {
            None => Ok(()),
            Some(rank) => Err(Fault::BadCall(format!(
                "rank {} runs {lanes} grains at a time and rank {rank} runs {}, but grains of this graph exchange tensors\n  \
                 hint: give all ranks the same number of threads (`--threads`)",
                self.world.rank(),
                all[rank]
            ))
            .into()),
        }
    }
}

fn element(dtype: DType) -> Element {
    match dtype {
        DType::F32 => Element::F32,
        DType::BF16 => Element::Bf16,
        DType::F16 => Element::F16,
        DType::I32 => Element::I32,
        DType::I64 => Element::I64,
        DType::Bool => Element::U8,
    }
}

/// The call that an exchange is for this rank of its axis.
pub(crate) fn request(exchange: &Exchange, rank: usize) -> Request {
    let element = element(exchange.dtype);
    let parts: Vec<Part> =
        exchange.parts.iter().map(|(offset, count)| Part { offset: *offset, count: *count }).collect();
    let bytes = exchange.elements * element.bytes();
    let (input, output) = ((exchange.input, bytes), (exchange.output, bytes));
    let in_place = exchange.input == exchange.output;
    // This rank's part: of the exchange's memory, or all of a memory of its own.
    let own = |memory: *mut u8| {
        let Part { offset, count } = parts.get(rank).copied().unwrap_or(Part { offset: 0, count: 0 });
        let offset = if in_place { offset * element.bytes() } else { 0 };
        // SAFETY: a part lies inside the exchange's memory.
        (unsafe { memory.add(offset) }, count * element.bytes())
    };
    let (kind, peer, input, output) = match exchange.kind {
        ExchangeKind::AllReduce => (Kind::AllReduce, 0, input, output),
        ExchangeKind::Barrier => (Kind::Barrier, 0, input, output),
        ExchangeKind::ReduceScatter => (Kind::ReduceScatter, 0, input, own(exchange.output)),
        ExchangeKind::AllGather => (Kind::AllGather, 0, own(exchange.input), output),
        ExchangeKind::AllToAll => (Kind::AllToAll, 0, input, output),
        ExchangeKind::Send(to) => (Kind::Send, to, input, (std::ptr::null_mut(), 0)),
        ExchangeKind::Receive(from) => (Kind::Recv, from, (std::ptr::null_mut(), 0), output),
    };
    let each_to_each = kind == Kind::AllToAll;
    let count = match parts.is_empty() {
        _ if each_to_each => 0,
        true => exchange.elements,
        false => parts.iter().map(|part| part.count).sum(),
    };
    let parts: Arc<[Part]> = parts.into();
    Request {
        count,
        peer,
        input: input.0,
        input_bytes: input.1,
        output: output.0,
        output_bytes: output.1,
        send: if each_to_each { Arc::clone(&parts) } else { Arc::default() },
        recv: parts,
        ..Request::new(kind, element).named(&exchange.name)
    }
}

/// Memory that collectives reach directly. All ranks call it together.
pub(crate) fn shared_memory(world: &Communicator, bytes: usize) -> Result<Memory, ExchangeError> {
    let shared = world.allocate(bytes)?;
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
        if exchanges.iter().any(|exchange| exchange.lane.is_some()) {
            self.agree_on_lanes(lanes)?;
        }
        let first = self.lock().requests.len();
        for exchange in &exchanges {
            let communicator = self.communicator((exchange.axis.clone(), exchange.lane))?;
            let request = request(exchange, communicator.rank());
            self.lock().requests.push((request, communicator));
        }
        let mut state = self.lock();
        let count = state.requests.len();
        state.tickets.resize(count, None);
        Ok(first)
    }

    fn start(&self, number: usize) {
        let (request, communicator) = self.lock().requests[number].clone();
        // SAFETY: the session lends the memory until `wait` on this exchange returns.
        let ticket = unsafe { communicator.start(request) };
        self.lock().tickets[number] = Some(ticket);
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
