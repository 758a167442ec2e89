//! Every kind of call, by every algorithm that applies, on every element and reduction, against a plain definition.

use kolo_comm::algorithms::Algorithm;
use kolo_comm::call::NAME_BYTES;
use kolo_comm::combine;
use kolo_comm::run::Programs;
use kolo_comm::task::{Part, Task};
use kolo_comm::thread::{ThreadWire, wires, world};
use kolo_comm::{Communicator, Element, Fault, Fingerprint, Kind, Reduction, Request, Transport, Watch};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Counts what each thread allocates.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator, with a count beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Small, so that small vectors already come in several segments.
const SEGMENT_BYTES: usize = 2048;

/// One call as all ranks make it.
#[derive(Clone, Debug)]
struct Case {
    kind: Kind,
    element: Element,
    reduction: Reduction,
    root: usize,
    count: usize,
    /// Counts of the parts, by rank; for all-to-all, `counts[from][to]`.
    counts: Vec<Vec<usize>>,
    in_place: bool,
    /// Elements between parts.
    gap: usize,
}

/// A rank's buffers before or after a call.
#[derive(Clone, Debug, PartialEq)]
struct Buffers {
    input: Vec<u8>,
    output: Vec<u8>,
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Numbers of moderate size in any element.
fn fill(element: Element, count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(count * element.bytes());
    for _ in 0..count {
        let value = (random(&mut state) % 4001) as f64 / 1000.0 - 2.0;
        match element {
            Element::F32 => bytes.extend((value as f32).to_le_bytes()),
            Element::F64 => bytes.extend(value.to_le_bytes()),
            Element::Bf16 => bytes.extend(half::bf16::from_f64(value).to_le_bytes()),
            Element::F16 => bytes.extend(half::f16::from_f64(value).to_le_bytes()),
            Element::I32 => bytes.extend(((value * 1e6) as i32).to_le_bytes()),
            Element::I64 => bytes.extend(((value * 1e6) as i64).to_le_bytes()),
            Element::U8 => bytes.push((value * 60.0) as i32 as u8),
        }
    }
    bytes
}

fn as_numbers(element: Element, bytes: &[u8]) -> Vec<f64> {
    let number = |chunk: &[u8]| match element {
        Element::F32 => f64::from(f32::from_le_bytes(chunk.try_into().unwrap())),
        Element::F64 => f64::from_le_bytes(chunk.try_into().unwrap()),
        Element::Bf16 => half::bf16::from_le_bytes(chunk.try_into().unwrap()).to_f64(),
        Element::F16 => half::f16::from_le_bytes(chunk.try_into().unwrap()).to_f64(),
        Element::I32 => f64::from(i32::from_le_bytes(chunk.try_into().unwrap())),
        Element::I64 => i64::from_le_bytes(chunk.try_into().unwrap()) as f64,
        Element::U8 => f64::from(chunk[0]),
    };
    bytes.chunks_exact(element.bytes()).map(number).collect()
}

/// The tree over these vectors, pair by pair.
fn tree(element: Element, reduction: Reduction, mut vectors: Vec<Vec<u8>>, mean_over: usize) -> Vec<u8> {
    let count = vectors[0].len() / element.bytes();
    let mut stride = 1;
    while stride < vectors.len() {
        for at in (0..vectors.len() - stride).step_by(2 * stride) {
            let right = vectors[at + stride].clone();
            let left = vectors[at].as_mut_ptr();
            // SAFETY: both have `count` elements.
            unsafe { combine::combine(element, reduction, left, right.as_ptr(), left, count) };
        }
        stride *= 2;
    }
    let mut sum = vectors.swap_remove(0);
    if reduction == Reduction::Mean {
        // SAFETY: it has `count` elements.
        unsafe { combine::divide(element, sum.as_mut_ptr(), mean_over, count) };
    }
    sum
}

impl Case {
    fn size(&self) -> usize {
        self.counts.len()
    }

    fn parts(&self, counts: &[usize]) -> Vec<Part> {
        let mut offset = 0;
        // The last rank's part comes first, so that the order of parts is not that of ranks.
        let mut parts = vec![Part::default(); counts.len()];
        for rank in (0..counts.len()).rev() {
            parts[rank] = Part { offset, count: counts[rank] };
            offset += counts[rank] + self.gap;
        }
        parts
    }

    fn send(&self, rank: usize) -> Vec<Part> {
        self.parts(&self.counts[rank])
    }

    fn recv(&self, rank: usize) -> Vec<Part> {
        if self.kind == Kind::AllToAll {
            return self.parts(&self.counts.iter().map(|row| row[rank]).collect::<Vec<_>>());
        }
        self.parts(&self.counts[0])
    }

    fn span(parts: &[Part]) -> usize {
        parts.iter().map(|part| part.offset + part.count).max().unwrap_or(0)
    }

    /// Elements of input and output of a rank.
    fn lengths(&self, rank: usize) -> (usize, usize) {
        let (recv, root) = (self.recv(rank), rank == self.root);
        let (whole, own) = (Self::span(&recv), recv[rank].count);
        match self.kind {
            Kind::Barrier => (0, 0),
            Kind::Broadcast => (0, self.count),
            Kind::Reduce => (self.count, if root { self.count } else { 0 }),
            Kind::AllReduce | Kind::Scan | Kind::ExclusiveScan => (self.count, self.count),
            Kind::ReduceScatter => (whole, own),
            Kind::Gather => (own, if root { whole } else { 0 }),
            Kind::AllGather => (own, whole),
            Kind::Scatter => (if root { whole } else { 0 }, own),
            Kind::AllToAll => (Self::span(&self.send(rank)), whole),
            Kind::Send | Kind::Recv => (0, 0),
        }
    }

    fn before(&self, rank: usize) -> Buffers {
        let (input, output) = self.lengths(rank);
        Buffers {
            input: fill(self.element, input, 1 + rank as u64),
            output: fill(self.element, output, 1001 + rank as u64),
        }
    }

    /// What the call means.
    fn after(&self, rank: usize) -> Vec<u8> {
        let width = self.element.bytes();
        let all: Vec<Buffers> = (0..self.size()).map(|rank| self.before(rank)).collect();
        let mut output = all[rank].output.clone();
        let bytes = |part: Part| part.offset * width..(part.offset + part.count) * width;
        let combined = |from: usize, to: usize, part: Part| {
            let vectors = all[from..to].iter().map(|buffers| buffers.input[bytes(part)].to_vec()).collect();
            tree(self.element, self.reduction, vectors, self.size())
        };
        let whole = Part { offset: 0, count: self.count };
        let recv = self.recv(rank);
        match self.kind {
            Kind::Broadcast => output = all[self.root].output.clone(),
            Kind::Reduce if rank == self.root => output = combined(0, self.size(), whole),
            Kind::AllReduce => output = combined(0, self.size(), whole),
            Kind::Scan => output = combined(0, rank + 1, whole),
            Kind::ExclusiveScan if rank > 0 => output = combined(0, rank, whole),
            Kind::ExclusiveScan if self.in_place => output = all[0].input.clone(),
            Kind::ReduceScatter => output = combined(0, self.size(), recv[rank]),
            Kind::Gather if rank != self.root => {}
            Kind::Gather | Kind::AllGather => {
                for (from, part) in recv.iter().enumerate() {
                    output[bytes(*part)].copy_from_slice(&all[from].input);
                }
            }
            Kind::Scatter => output = all[self.root].input[bytes(recv[rank])].to_vec(),
            Kind::AllToAll => {
                for (from, part) in recv.iter().enumerate() {
                    output[bytes(*part)].copy_from_slice(&all[from].input[bytes(self.send(from)[rank])]);
                }
            }
            _ => {}
        }
        output
    }

    /// In-place calls: where the input and the output lie in their common memory.
    fn shifts(&self, rank: usize) -> (usize, usize) {
        let own = self.recv(rank)[rank].offset;
        match self.kind {
            Kind::Gather | Kind::AllGather => (own, 0),
            Kind::ReduceScatter | Kind::Scatter => (0, own),
            _ => (0, 0),
        }
    }

    fn can_be_in_place(&self) -> bool {
        !matches!(self.kind, Kind::Barrier | Kind::Broadcast | Kind::AllToAll)
    }

    fn fingerprint(&self) -> Fingerprint {
        let count = match self.kind {
            Kind::Barrier | Kind::AllToAll => 0,
            Kind::ReduceScatter | Kind::Gather | Kind::AllGather | Kind::Scatter => self.counts[0].iter().sum(),
            _ => self.count,
        };
        Fingerprint {
            communicator: 0,
            kind: self.kind,
            element: self.element,
            reduction: self.reduction,
            root: self.root as u32,
            sequence: 0,
            count: count as u64,
            name: [0; NAME_BYTES],
        }
    }

    /// Runs the call for one rank; its output.
    fn run(&self, transport: &mut Programs<ThreadWire>, sequence: u64) -> Result<Vec<u8>, Fault> {
        let (rank, width) = (transport.rank(), self.element.bytes());
        let Buffers { input, mut output } = self.before(rank);
        let (send, recv) = (self.send(rank), self.recv(rank));
        let (input_bytes, output_bytes) = (input.len(), output.len());
        let (shift_input, shift_output) = self.shifts(rank);
        let mut common = vec![0; (shift_input * width + input_bytes).max(shift_output * width + output_bytes)];
        let both = input_bytes > 0 && output_bytes > 0;
        let in_place = self.in_place && self.can_be_in_place() && both;
        let (from, into) = if in_place {
            common[shift_output * width..][..output_bytes].copy_from_slice(&output);
            common[shift_input * width..][..input_bytes].copy_from_slice(&input);
            let base = common.as_mut_ptr();
            (base.wrapping_add(shift_input * width).cast_const(), base.wrapping_add(shift_output * width))
        } else {
            (input.as_ptr(), output.as_mut_ptr())
        };
        let fingerprint = Fingerprint { sequence, ..self.fingerprint() };
        let reproducible = true;
        let task = Task {
            fingerprint,
            input: from,
            output: into,
            input_bytes,
            output_bytes,
            send: &send,
            recv: &recv,
            peer: 0,
            reproducible,
        };
        // SAFETY: the buffers have the lengths the kind asks for.
        unsafe { transport.run(&task)? };
        if in_place {
            // What an in-place gather does not fill holds what was there.
            return Ok(common[shift_output * width..][..output_bytes].to_vec());
        }
        assert_eq!(input, self.before(rank).input, "the input was changed");
        Ok(output)
    }
}

/// One thread per rank, with its transport.
fn ranks<R: Send>(
    hosts: &[usize],
    algorithm: Option<Algorithm>,
    body: impl Fn(&mut Programs<ThreadWire>) -> R + Sync,
) -> Vec<R> {
    let wires = wires(hosts.to_vec(), None);
    let body = &body;
    std::thread::scope(|scope| {
        let start = |wire| {
            scope.spawn(move || {
                let programs = Programs::new(wire, Watch::alone()).segment_bytes(SEGMENT_BYTES).force(algorithm);
                body(&mut { programs })
            })
        };
        let threads: Vec<_> = wires.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}

/// Exact where the order of additions is the tree's; otherwise near.
fn agree(case: &Case, exact: bool, ours: &[u8], expected: &[u8]) -> bool {
    if exact {
        return ours == expected;
    }
    let tolerance = match case.element {
        Element::F32 => 1e-5,
        Element::F64 => 1e-13,
        Element::Bf16 => 6e-2,
        Element::F16 => 8e-3,
        _ => return ours == expected,
    };
    let close = |a: &f64, b: &f64| (a - b).abs() <= tolerance * (4.0 + b.abs());
    let (ours, expected) = (as_numbers(case.element, ours), as_numbers(case.element, expected));
    ours.len() == expected.len() && ours.iter().zip(&expected).all(|(a, b)| close(a, b))
}

fn hosts(size: usize, per_host: usize) -> Vec<usize> {
    (0..size).map(|rank| rank / per_host).collect()
}

/// All cases of one kind on one number of ranks.
fn cases(kind: Kind, size: usize) -> Vec<Case> {
    let reductions: &[Reduction] = match kind {
        Kind::Reduce | Kind::AllReduce | Kind::ReduceScatter => &Reduction::ALL,
        Kind::Scan | Kind::ExclusiveScan => &[Reduction::Sum, Reduction::Min, Reduction::Max, Reduction::Product],
        _ => &[Reduction::Sum],
    };
    let mut cases = Vec::new();
    for count in [0, 1, 7, 1000, SEGMENT_BYTES + 3] {
        for (variant, element) in Element::ALL.into_iter().enumerate() {
            for reduction in reductions {
                for in_place in [false, true] {
                    let uneven = |from: usize, to: usize| match (variant
                        + from * usize::from(kind == Kind::AllToAll)
                        + to)
                        % 3
                    {
                        0 => 0,
                        1 => count / size,
                        _ => count / size + to,
                    };
                    let counts = (0..size).map(|from| (0..size).map(|to| uneven(from, to)).collect()).collect();
                    let (root, gap) = ((variant + count) % size, variant % 2);
                    cases.push(Case { kind, element, reduction: *reduction, root, count, counts, in_place, gap });
                }
            }
        }
    }
    cases
}

fn check(kind: Kind, algorithm: Algorithm, hosts: &[usize]) {
    let cases = cases(kind, hosts.len());
    let exact = algorithm.keeps_order(kind, hosts);
    ranks(hosts, Some(algorithm), |transport| {
        for (sequence, case) in cases.iter().enumerate() {
            let ours = case.run(transport, sequence as u64).expect("the call succeeds");
            let expected = case.after(transport.rank());
            let rank = transport.rank();
            assert!(agree(case, exact, &ours, &expected), "{} on rank {rank}: {case:?}", algorithm.name());
        }
    });
}

#[test]
fn every_kind_by_every_algorithm_is_what_it_means() {
    for size in [1, 2, 3, 4, 5, 8] {
        for kind in Kind::ALL.into_iter().filter(|kind| !kind.is_message()) {
            for algorithm in Algorithm::ALL.into_iter().filter(|algorithm| algorithm.applies(kind, size)) {
                check(kind, algorithm, &hosts(size, 2));
            }
        }
    }
}

/// One thread per rank with a communicator over the default transport.
fn communicators<R: Send>(size: usize, body: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let watches: Vec<Arc<Watch>> = (0..size).map(|_| Watch::alone()).collect();
    let body = &body;
    std::thread::scope(|scope| {
        let start = |(transport, watch): (Box<dyn Transport>, &Arc<Watch>)| {
            let watch = Arc::clone(watch);
            scope.spawn(move || body(Communicator::new(transport, watch, true)))
        };
        let threads: Vec<_> = world(&watches).into_iter().zip(&watches).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}

fn numbers(rank: usize, count: usize) -> Vec<f32> {
    as_numbers(Element::F32, &fill(Element::F32, count, 77 + rank as u64)).iter().map(|value| *value as f32).collect()
}

#[test]
fn one_tree_whatever_the_collective() {
    for size in [2, 3, 5, 8] {
        for count in [5, 3000, 400_000] {
            let sums = communicators(size, |comm| {
                let (rank, input) = (comm.rank(), numbers(comm.rank(), count));
                let mut all = input.clone();
                comm.all_reduce(&mut all, Reduction::Sum).unwrap();
                let mut one = vec![0.0; count];
                comm.reduce(&input, &mut one, Reduction::Sum, size - 1).unwrap();
                let mut part = vec![0.0; count / size + usize::from(rank < count % size)];
                comm.reduce_scatter(&input, &mut part, Reduction::Sum).unwrap();
                let counts: Vec<usize> = (0..size).map(|r| count / size + usize::from(r < count % size)).collect();
                let mut gathered = vec![0.0; count];
                comm.all_gather_v(&part, &mut gathered, &counts).unwrap();
                let mut scanned = input.clone();
                comm.scan(&mut scanned, Reduction::Sum).unwrap();
                (all, one, gathered, scanned)
            });
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            let expected = bits(&sums[0].0);
            for (all, _, gathered, _) in &sums {
                assert_eq!(bits(all), expected);
                assert_eq!(bits(gathered), expected);
            }
            assert_eq!(bits(&sums[size - 1].1), expected);
            assert_eq!(bits(&sums[size - 1].3), expected);
        }
    }
}

#[test]
fn started_calls_run_in_order() {
    const CALLS: usize = 40;
    communicators(3, |comm| {
        let mut buffers: Vec<Vec<i64>> =
            (0..CALLS).map(|call| vec![(call * 10 + comm.rank()) as i64; 50 * call]).collect();
        let mut tickets = Vec::new();
        for buffer in &mut buffers {
            let mut request = Request::new(Kind::AllReduce, Element::I64).named("bucket");
            request.count = buffer.len();
            (request.input, request.output) = (buffer.as_ptr().cast(), buffer.as_mut_ptr().cast());
            (request.input_bytes, request.output_bytes) = (8 * buffer.len(), 8 * buffer.len());
            // SAFETY: the buffers live until all calls are waited for.
            tickets.push(unsafe { comm.start(request).unwrap() });
        }
        comm.wait(tickets[CALLS / 2]).unwrap();
        assert!(tickets[..=CALLS / 2].iter().all(|ticket| comm.done(*ticket)));
        // A call made now comes after all that were started.
        let mut last = [1i32];
        comm.all_reduce(&mut last, Reduction::Sum).unwrap();
        assert!(tickets.iter().all(|ticket| comm.done(*ticket)));
        assert_eq!(last, [3]);
        for (call, buffer) in buffers.iter().enumerate() {
            assert!(buffer.iter().all(|value| *value == (30 * call + 3) as i64), "call {call}");
        }
    });
}

#[test]
fn halves_and_reversed_order() {
    communicators(6, |comm| {
        let half = comm.split((comm.rank() / 3) as i64, -(comm.rank() as i64)).unwrap();
        assert_eq!((half.size(), half.rank()), (3, 2 - comm.rank() % 3));
        let mut all = vec![0i32; 3];
        half.all_gather(&[comm.rank() as i32], &mut all).unwrap();
        let base = (comm.rank() / 3 * 3) as i32;
        assert_eq!(all, [base + 2, base + 1, base]);
        // Both live on side by side, and a part of a part works too.
        let pair = half.split((half.rank() == 0).into(), 0).unwrap();
        let mut sum = [1i32];
        pair.all_reduce(&mut sum, Reduction::Sum).unwrap();
        assert_eq!(sum[0] as usize, pair.size());
        comm.all_reduce(&mut sum, Reduction::Sum).unwrap();
        assert_eq!(sum, [10]);
        comm.barrier().unwrap();
        let next = [comm.rank() as u8];
        let mut previous = [9u8];
        if comm.rank() % 2 == 0 {
            comm.send(&next, comm.rank() + 1).unwrap();
        } else {
            comm.recv(&mut previous, comm.rank() - 1).unwrap();
            assert_eq!(usize::from(previous[0]), comm.rank() - 1);
        }
    });
}

/// The last rank makes another call than the others: everyone learns who, what and what else, at once.
fn disagree(size: usize, odd: impl Fn(&Communicator) -> Result<(), Fault> + Sync, words: &[&str]) {
    let start = Instant::now();
    let usual = |comm: &Communicator| {
        let mut data = numbers(comm.rank(), 1000);
        let mut request = Request { count: 1000, ..Request::new(Kind::AllReduce, Element::F32).named("bucket 3") };
        (request.input, request.output) = (data.as_ptr().cast(), data.as_mut_ptr().cast());
        (request.input_bytes, request.output_bytes) = (4000, 4000);
        // SAFETY: a thousand numbers that live here.
        unsafe { comm.call(&request) }
    };
    let faults = communicators(size, |comm| {
        // Who is still in the barrier when others already disagree learns of it there.
        let outcome = comm.barrier().and_then(|()| if comm.rank() == size - 1 { odd(&comm) } else { usual(&comm) });
        (comm.rank(), outcome.expect_err("the ranks disagree"))
    });
    assert!(start.elapsed() < Duration::from_secs(1));
    for (rank, fault) in faults {
        let text = fault.to_string();
        let Fault::Mismatch { rank: mine, peer, .. } = fault else { panic!("rank {rank}: {text}") };
        assert!(mine == size - 1 || peer == size - 1, "{text}");
        for word in words.iter().chain(&["all_reduce(sum) of 1000 f32 \"bucket 3\", call 1"]) {
            assert!(text.contains(word), "rank {rank}: {text} lacks {word}");
        }
    }
}

#[test]
fn disagreement_is_named_on_all_ranks() {
    for size in [2, 4] {
        disagree(size, |comm| comm.barrier(), &["barrier", "call 1"]);
        disagree(
            size,
            |comm| comm.all_reduce(&mut [0f32; 1000], Reduction::Sum),
            &["all_reduce(sum) of 1000 f32, call 1"],
        );
        disagree(size, |comm| comm.all_reduce(&mut [0f32; 999], Reduction::Sum), &["of 999 f32"]);
        disagree(size, |comm| comm.all_reduce(&mut [0f64; 1000], Reduction::Sum), &["of 1000 f64"]);
        disagree(size, |comm| comm.all_reduce(&mut [0f32; 1000], Reduction::Max), &["all_reduce(max)"]);
        disagree(size, |comm| comm.broadcast(&mut [0f32; 1000], 0), &["broadcast", "from rank 0"]);
        disagree(size, |comm| comm.recv(&mut [0f32; 1000], 0), &["send of 1000 f32 to rank"]);
    }
}

#[test]
fn a_rank_that_ends_is_lost_to_all() {
    let faults = communicators(4, |comm| {
        comm.barrier().unwrap();
        if comm.rank() == 2 {
            return None;
        }
        Some(comm.all_reduce(&mut [1f32; 10], Reduction::Sum).unwrap_err())
    });
    for fault in faults.into_iter().flatten() {
        assert!(matches!(fault, Fault::Lost { peer: 2, .. }), "{fault}");
        assert!(fault.to_string().contains("all_reduce(sum) of 10 f32, call 1"), "{fault}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let wires = wires(vec![0; 3], None);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (rank, wire) in wires.into_iter().enumerate() {
            scope.spawn(move || {
                let watch = Watch::new(Vec::new(), Duration::from_millis(5));
                let comm = Communicator::new(Box::new(Programs::new(wire, Arc::clone(&watch))), watch, true);
                if rank == 1 {
                    std::thread::sleep(Duration::from_millis(900));
                    return;
                }
                let fault = comm.all_reduce(&mut [1f32; 10], Reduction::Sum).unwrap_err();
                assert!(matches!(fault, Fault::Stalled { peer: 1, .. } | Fault::Lost { .. }), "{fault}");
            });
        }
    });
    assert!(start.elapsed() < Duration::from_secs(2));
}

#[test]
fn measured_costs_are_agreed_and_plausible() {
    let start = Instant::now();
    let costs = ranks(&[0, 0, 1, 1, 1], None, |transport| transport.measure().unwrap());
    assert!(costs.iter().all(|cost| *cost == costs[0]));
    for link in [costs[0].inside, costs[0].across] {
        assert!(link.latency_s > 0.0 && link.latency_s < 0.1 && link.byte_s < 1e-6, "{link:?}");
    }
    assert!(costs[0].combine_byte_s > 1e-12 && costs[0].combine_byte_s < 1e-7);
    assert!(start.elapsed() < Duration::from_secs(2));
}

#[test]
fn a_repeated_call_allocates_nothing() {
    communicators(4, |comm| {
        let (mut small, mut large) = (vec![1f32; 10], vec![1f32; 200_000]);
        let mut step = || {
            comm.all_reduce(&mut small, Reduction::Mean).unwrap();
            comm.all_reduce(&mut large, Reduction::Mean).unwrap();
            comm.broadcast(&mut large, 1).unwrap();
            comm.barrier().unwrap();
        };
        (0..20).for_each(|_| step());
        let before = ALLOCATIONS.with(Cell::get);
        (0..20).for_each(|_| step());
        let allocated = ALLOCATIONS.with(Cell::get) - before;
        assert_eq!(allocated, 0);
    });
}
