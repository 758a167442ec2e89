//! Ranks as threads with real sockets between them.

use kolo_comm::call::{CallKind, Fingerprint, short_name};
use kolo_comm::run::Programs;
use kolo_comm::tcp::{TcpOptions, TcpWire, join};
use kolo_comm::wire::Wire;
use kolo_comm::{Bootstrap, Communicator, ElementType, Fault, JobKey, Reduction, Watch};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

pub fn options() -> TcpOptions {
    TcpOptions { connect_timeout: Duration::from_secs(60), ..TcpOptions::local(JobKey::fresh().unwrap(), 7) }
}

type Blobs = Vec<Option<Vec<u8>>>;

/// How threads find each other. Each rank may be shown another address than the others give.
#[derive(Clone)]
pub struct Meeting {
    blobs: Arc<(Mutex<Blobs>, Condvar)>,
    /// The port shown instead of rank 0's.
    detour: Option<u16>,
    rank: usize,
}

impl Meeting {
    pub fn new(size: usize) -> Self {
        Self { blobs: Arc::new((Mutex::new(vec![None; size]), Condvar::new())), detour: None, rank: 0 }
    }

    pub fn of(&self, rank: usize) -> Self {
        Self { rank, ..self.clone() }
    }

    /// Everyone goes to rank 0 by this port.
    pub fn by(&self, port: u16) -> Self {
        Self { detour: Some(port), ..self.clone() }
    }

    /// What a rank gave, as soon as it did: its port is at bytes 2 and 3.
    pub fn port(&self, rank: usize) -> u16 {
        let (blobs, given) = &*self.blobs;
        let mut blobs = blobs.lock().unwrap();
        loop {
            if let Some(blob) = &blobs[rank] {
                return u16::from_le_bytes([blob[2], blob[3]]);
            }
            blobs = given.wait(blobs).unwrap();
        }
    }

    /// Gives a blob in the name of a rank that is not there.
    pub fn pretend(&self, rank: usize) {
        let (blobs, given) = &*self.blobs;
        blobs.lock().unwrap()[rank] = Some(vec![1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 127, 0, 0, 1]);
        given.notify_all();
    }
}

impl Bootstrap for Meeting {
    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Fault> {
        let (blobs, given) = &*self.blobs;
        let mut blobs = blobs.lock().unwrap();
        blobs[self.rank] = Some(mine.to_vec());
        given.notify_all();
        while blobs.iter().any(Option::is_none) {
            blobs = given.wait(blobs).unwrap();
        }
        let mut all: Vec<Vec<u8>> = blobs.iter().flatten().cloned().collect();
        if let (Some(port), true) = (self.detour, self.rank > 0) {
            all[0][2..4].copy_from_slice(&port.to_le_bytes());
        }
        Ok(all)
    }
}

/// A watch that knows hosts and loses patience after six seconds.
pub fn watch(size: usize) -> Arc<Watch> {
    Watch::new((0..size).map(|rank| format!("node{rank}")).collect(), Duration::from_millis(100))
}

/// Runs `work` on as many ranks, one thread each.
pub fn group<T: Send>(size: usize, options: TcpOptions, work: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    let meeting = Meeting::new(size);
    std::thread::scope(|scope| {
        let start = |rank: usize| {
            let (mut meeting, options, work) = (meeting.of(rank), options.clone(), &work);
            scope.spawn(move || work(communicator(rank, size, options, &mut meeting).unwrap()))
        };
        let ranks: Vec<_> = (0..size).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

pub fn communicator(
    rank: usize,
    size: usize,
    options: TcpOptions,
    meeting: &mut dyn Bootstrap,
) -> Result<Communicator, Fault> {
    let watch = watch(size);
    // Not `connect`: a rank that still measures the links may hear there that others' first calls differ.
    let wire = join(rank, size, options, Arc::clone(&watch), meeting)?;
    let transport = Box::new(Programs::new(wire, Arc::clone(&watch)));
    Ok(Communicator::new(transport, watch, true))
}

/// Bare wires of as many ranks, all in this thread's hands.
pub fn wires(size: usize, options: TcpOptions) -> Vec<TcpWire> {
    let meeting = Meeting::new(size);
    std::thread::scope(|scope| {
        let start = |rank: usize| {
            let (mut meeting, options) = (meeting.of(rank), options.clone());
            scope.spawn(move || join(rank, size, options, watch(size), &mut meeting).unwrap())
        };
        let ranks: Vec<_> = (0..size).map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A message's call.
pub fn call(sequence: usize) -> Fingerprint {
    Fingerprint {
        communicator: 0,
        kind: CallKind::Send,
        element: ElementType::U8,
        reduction: Reduction::Sum,
        root: 0,
        sequence: sequence as u64,
        count: 1,
        name: short_name("test"),
    }
}

/// Lets the wires work until `done`.
pub fn finish(wires: &mut [&mut TcpWire], mut done: impl FnMut(&mut [&mut TcpWire]) -> bool) {
    let start = Instant::now();
    while !done(wires) {
        for wire in wires.iter_mut() {
            wire.progress().unwrap();
        }
        assert!(start.elapsed() < Duration::from_secs(60), "nothing moves any more");
    }
}
