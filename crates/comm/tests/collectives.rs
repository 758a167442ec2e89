//! Every kind of call, by every algorithm that applies, on every element and reduction, against a plain definition: over
//! threads, and on thousands of simulated networks.

#[path = "collectives/case.rs"]
mod case;
#[path = "support/oracle.rs"]
mod oracle;
#[path = "collectives/sim.rs"]
mod sim;

use case::{Case, agree, as_numbers, fill};
use kolo_comm::algorithms::Algorithm;
use kolo_comm::compress::{self, Feedback};
use kolo_comm::run::Programs;
use kolo_comm::thread::{ThreadWire, wires, world};
use kolo_comm::{CallKind, Communicator, ElementType, Fault, Reduction, Request, Transport, Watch};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
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

fn hosts(size: usize, per_host: usize) -> Vec<usize> {
    (0..size).map(|rank| rank / per_host).collect()
}

/// All cases of one kind on one number of ranks.
fn cases(kind: CallKind, size: usize) -> Vec<Case> {
    let reductions: &[Reduction] = match kind {
        CallKind::Reduce | CallKind::AllReduce | CallKind::ReduceScatter => &Reduction::ALL,
        CallKind::Scan | CallKind::ExclusiveScan => {
            &[Reduction::Sum, Reduction::Min, Reduction::Max, Reduction::Product]
        }
        _ => &[Reduction::Sum],
    };
    let mut cases = Vec::new();
    for count in [0, 1, 7, 1000, SEGMENT_BYTES + 3] {
        for (variant, element) in ElementType::ALL.into_iter().enumerate() {
            for reduction in reductions {
                for in_place in [false, true] {
                    let uneven =
                        |from: usize, to: usize| match (variant + from * usize::from(kind == CallKind::AllToAll) + to)
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

fn check(kind: CallKind, algorithm: Algorithm, hosts: &[usize]) {
    let cases = cases(kind, hosts.len());
    let exact = algorithm.keeps_order(kind, hosts);
    ranks(hosts, Some(algorithm), |transport| {
        for (sequence, case) in cases.iter().enumerate() {
            let mut running = case.begin(transport.rank(), sequence as u64);
            // SAFETY: the buffers have the lengths the kind asks for.
            unsafe { transport.run(&running.task()) }.expect("the call succeeds");
            let ours = running.end();
            let expected = case.after(transport.rank());
            let rank = transport.rank();
            assert!(agree(case, exact, &ours, &expected), "{} on rank {rank}: {case:?}", algorithm.name());
        }
    });
}

#[test]
fn every_kind_by_every_algorithm_is_what_it_means() {
    for size in [1, 2, 3, 4, 5, 8] {
        for kind in CallKind::ALL.into_iter().filter(|kind| !kind.is_message()) {
            for algorithm in Algorithm::ALL.into_iter().filter(|algorithm| algorithm.applies(kind, size)) {
                check(kind, algorithm, &hosts(size, 2));
            }
        }
    }
}

/// One thread per rank with a communicator over the default transport.
fn communicators<R: Send>(size: usize, body: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    communicators_with(true, size, body)
}

fn communicators_with<R: Send>(reproducible: bool, size: usize, body: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let watches: Vec<Arc<Watch>> = (0..size).map(|_| Watch::alone()).collect();
    let body = &body;
    std::thread::scope(|scope| {
        let start = |(transport, watch): (Box<dyn Transport>, &Arc<Watch>)| {
            let watch = Arc::clone(watch);
            scope.spawn(move || body(Communicator::new(transport, watch, reproducible)))
        };
        let threads: Vec<_> = world(&watches).into_iter().zip(&watches).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}

fn numbers(rank: usize, count: usize) -> Vec<f32> {
    as_numbers(ElementType::F32, &fill(ElementType::F32, count, 77 + rank as u64))
        .iter()
        .map(|value| *value as f32)
        .collect()
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
            let mut request = Request::new(CallKind::AllReduce, ElementType::I64).named("bucket");
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
        let mut request =
            Request { count: 1000, ..Request::new(CallKind::AllReduce, ElementType::F32).named("bucket 3") };
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
    // Half of the time after which any wait ends.
    assert!(start.elapsed() < Duration::from_secs(30));
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
fn what_no_transport_could_do_is_refused() {
    communicators(2, |comm| {
        for counts in [[1 << 62, 0], [0, 1 << 62], [usize::MAX, usize::MAX]] {
            let refused = comm.all_gather_v(&[0f32; 0], &mut [], &counts).unwrap_err();
            assert!(matches!(refused, Fault::BadCall(_)), "{refused}");
        }
        let mut memory = vec![1f32; 101];
        let mut request = Request { count: 100, ..Request::new(CallKind::AllReduce, ElementType::F32) };
        (request.input, request.output) = (memory.as_ptr().cast(), memory[1..].as_mut_ptr().cast());
        (request.input_bytes, request.output_bytes) = (400, 400);
        // SAFETY: both lie in the memory.
        let refused = unsafe { comm.call(&request) }.unwrap_err();
        assert!(refused.to_string().contains("overlap"), "{refused}");
        // Nothing has happened: the communicator is as good as before.
        comm.barrier().unwrap();
    });
}

#[test]
fn a_rank_that_ends_is_lost_to_all() {
    let faults = communicators(4, |comm| {
        let outcome = comm.barrier();
        if comm.rank() == 2 {
            return outcome.err();
        }
        // Who is still in the barrier when another already misses rank 2 learns of it there.
        Some(outcome.and_then(|()| comm.all_reduce(&mut [1f32; 10], Reduction::Sum)).expect_err("rank 2 left"))
    });
    assert!(faults[2].is_none(), "{faults:?}");
    let texts: Vec<String> = faults.iter().flatten().map(Fault::to_string).collect();
    assert!(faults.iter().flatten().all(|fault| matches!(fault, Fault::Lost { peer: 2, .. })), "{texts:?}");
    // The first to miss it has left the barrier.
    assert!(texts.iter().any(|text| text.contains("all_reduce(sum) of 10 f32, call 1")), "{texts:?}");
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let wires = wires(vec![0; 3], None);
    let noticed = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for (rank, wire) in wires.into_iter().enumerate() {
            let noticed = &noticed;
            scope.spawn(move || {
                let watch = Watch::new(Vec::new(), Duration::from_millis(30));
                let comm = Communicator::new(Box::new(Programs::new(wire, Arc::clone(&watch))), watch, true);
                if rank == 1 {
                    while noticed.load(Ordering::Relaxed) < 2 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    return;
                }
                let outcome = comm.all_reduce(&mut [1f32; 10], Reduction::Sum);
                noticed.fetch_add(1, Ordering::Relaxed);
                let fault = outcome.unwrap_err();
                assert!(matches!(fault, Fault::Stalled { peer: 1, .. } | Fault::Lost { .. }), "{fault}");
            });
        }
    });
}

#[test]
fn one_may_wait_for_long_while_somebody_gets_on() {
    let wires = wires(vec![0; 2], None);
    std::thread::scope(|scope| {
        for (rank, wire) in wires.into_iter().enumerate() {
            let watch = Watch::new(Vec::new(), Duration::from_millis(30));
            let told = Arc::clone(&watch);
            scope.spawn(move || {
                let comm = Communicator::new(Box::new(Programs::new(wire, Arc::clone(&watch))), watch, true);
                if rank == 1 {
                    std::thread::sleep(Duration::from_millis(2700));
                }
                comm.barrier().unwrap();
            });
            scope.spawn(move || {
                for _ in 0..54 {
                    told.others_moved();
                    std::thread::sleep(Duration::from_millis(50));
                }
            });
        }
    });
}

#[test]
fn measured_costs_are_agreed_and_plausible() {
    for hosts in [&[0, 0, 1, 1, 1][..], &[0, 0, 1], &[0, 1, 1, 2]] {
        let costs = ranks(hosts, None, |transport| transport.measure().unwrap());
        assert!(costs.iter().all(|cost| *cost == costs[0]));
        for link in [costs[0].inside, costs[0].across] {
            assert!(link.latency_s > 0.0 && link.latency_s < 10.0 && link.byte_s < 1e-3, "{link:?}");
        }
        assert!(costs[0].combine_byte_s > 1e-12 && costs[0].combine_byte_s < 1e-4);
    }
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

#[test]
fn what_rounding_takes_comes_back() {
    const STEPS: usize = 300;
    for size in [1, 2, 3] {
        for (count, reduction) in
            [(1001, Reduction::Sum), (64, Reduction::Mean), (2, Reduction::Sum), (0, Reduction::Sum)]
        {
            let results = communicators_with(false, size, |comm| {
                let mut feedback = Feedback::new();
                let mut sum = vec![0f64; count];
                // Gradients too fine for bf16, the same every step: plain rounding would err the same way every time.
                let gradient: Vec<f32> =
                    (0..count).map(|at| 1.0 + 1e-3 * at as f32 + 3e-4 * comm.rank() as f32).collect();
                for _ in 0..STEPS {
                    let mut data = gradient.clone();
                    compress::all_reduce(&comm, &mut data, reduction, &mut feedback).unwrap();
                    sum.iter_mut().zip(&data).for_each(|(sum, value)| *sum += f64::from(*value));
                }
                (sum, gradient)
            });
            let share = if reduction == Reduction::Mean { size as f64 } else { 1.0 };
            for at in 0..count {
                let step: f64 = results.iter().map(|(_, gradient)| f64::from(gradient[at])).sum::<f64>() / share;
                for (sum, _) in &results {
                    assert_eq!(sum[at].to_bits(), results[0].0[at].to_bits());
                    let roundings = (sum[at] - STEPS as f64 * step).abs() / (step / 256.0);
                    assert!(roundings < 4.0, "{size} ranks, element {at}: off by {roundings} roundings");
                }
            }
        }
    }
}

#[test]
fn sixteen_bits_on_the_wire_are_refused_where_bits_are_promised() {
    let refused = communicators(2, |comm| {
        compress::all_reduce(&comm, &mut [1.0], Reduction::Sum, &mut Feedback::new()).unwrap_err()
    });
    assert!(refused[0].to_string().contains("reproducible = false"), "{}", refused[0]);
}

/// What combines elements is tested against definitions that do not call it.
#[test]
fn no_definition_calls_what_it_defines() {
    let tests = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let names = ["collectives", "support", "tcp", "mpi", ""].map(|folder| tests.join(folder));
    let files: Vec<_> = names.iter().flat_map(|folder| std::fs::read_dir(folder).expect("a folder of tests")).collect();
    let production = concat!("kolo_comm::", "combine");
    for file in files.into_iter().map(|file| file.expect("an entry").path()).filter(|file| file.is_file()) {
        let text = std::fs::read_to_string(&file).expect("a text");
        assert!(!text.contains(production), "{} uses the code under test", file.display());
    }
}
