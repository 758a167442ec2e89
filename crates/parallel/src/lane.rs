//! The communication lane: runs a session's exchanges on a communicator, in order, on a thread of their own.

use kolo_comm::{Communicator, Element, Fault, Kind, Request, Ticket};
use kolo_exec::{Collectives, Exchange, ExchangeError, ExchangeKind, Memory};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Runs exchanges on a communicator.
#[derive(Debug)]
pub struct CommLane {
    communicator: Arc<Communicator>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    requests: Vec<Request>,
    tickets: Vec<Option<Result<Ticket, Fault>>>,
}

impl CommLane {
    pub fn new(communicator: Arc<Communicator>) -> Self {
        Self { communicator, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The call that an exchange is for this rank.
pub(crate) fn request(exchange: &Exchange, rank: usize) -> Request {
    let parts: Vec<kolo_comm::task::Part> =
        exchange.parts.iter().map(|(offset, count)| kolo_comm::task::Part { offset: *offset, count: *count }).collect();
    let kind = match exchange.kind {
        ExchangeKind::AllReduce => Kind::AllReduce,
        ExchangeKind::ReduceScatter => Kind::ReduceScatter,
        ExchangeKind::AllGather => Kind::AllGather,
        ExchangeKind::Barrier => Kind::Barrier,
    };
    let whole = (exchange.data.cast::<u8>(), exchange.elements * 4);
    let own = parts.get(rank).map_or((whole.0, 0), |part| {
        // SAFETY: a part lies inside the exchange's memory.
        (unsafe { exchange.data.add(part.offset) }.cast::<u8>(), part.count * 4)
    });
    let (input, output) = match exchange.kind {
        ExchangeKind::AllReduce | ExchangeKind::Barrier => (whole, whole),
        ExchangeKind::ReduceScatter => (whole, own),
        ExchangeKind::AllGather => (own, whole),
    };
    let count = if parts.is_empty() { exchange.elements } else { parts.iter().map(|part| part.count).sum() };
    Request {
        count,
        input: input.0,
        input_bytes: input.1,
        output: output.0,
        output_bytes: output.1,
        recv: parts.into(),
        ..Request::new(kind, Element::F32).named(&exchange.name)
    }
}

/// Memory that collectives reach directly. All ranks call it together.
pub(crate) fn shared_memory(world: &Communicator, bytes: usize) -> Result<Memory, ExchangeError> {
    let shared = world.allocate(bytes)?;
    // SAFETY: a page-aligned, zeroed mapping of at least `bytes`, alive as long as its keeper.
    Ok(unsafe { Memory::kept(shared.at(0), shared.bytes(), Box::new(shared)) })
}

impl Collectives for CommLane {
    fn size(&self) -> usize {
        self.communicator.size()
    }

    fn memory(&self, bytes: usize) -> Result<Memory, ExchangeError> {
        shared_memory(&self.communicator, bytes)
    }

    fn prepare(&self, exchanges: Vec<Exchange>) -> usize {
        let mut state = self.lock();
        let first = state.requests.len();
        state.requests.extend(exchanges.iter().map(|exchange| request(exchange, self.communicator.rank())));
        let count = state.requests.len();
        state.tickets.resize(count, None);
        first
    }

    fn start(&self, number: usize) {
        let request = self.lock().requests[number].clone();
        // SAFETY: the session lends the memory until `wait` on this exchange returns.
        let ticket = unsafe { self.communicator.start(request) };
        self.lock().tickets[number] = Some(ticket);
    }

    fn wait(&self, number: usize) -> Result<(), ExchangeError> {
        let ticket = self.lock().tickets[number].take();
        match ticket {
            Some(ticket) => Ok(self.communicator.wait(ticket?)?),
            None => Ok(()),
        }
    }
}
