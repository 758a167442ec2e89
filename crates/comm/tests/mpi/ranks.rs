//! What each rank does.

use half::{bf16, f16};
use kolo_comm::mpi::MpiWorld;
use kolo_comm::{Bootstrap, CallKind, Communicator, ElementType, Fault, Reduction, Request, Scalar, Watch};
use std::fmt::Debug;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// Pieces so small that every path through them is taken.
const PIECE_BYTES: usize = 1000;
/// Longer than what travels behind a header, and not a multiple of anything.
const LONG: usize = 5003;

pub fn run(task: &str, library: Option<&str>) {
    let world = match MpiWorld::init(&|name| std::env::var(name).ok(), library.map(Path::new)) {
        Ok(world) => world,
        Err(fault) => return say(&fault),
    };
    let outcome = match task {
        "collectives" => collectives(world),
        "threads" => threads(world),
        "threads one at a time" => {
            world.serialize();
            threads(world)
        }
        "endless" => endless(world),
        "abort" => {
            let _ = world.transport(Watch::alone());
            if world.rank() == 1 { world.abort(7) } else { endless(world) }
        }
        "nothing" => world.finish(),
        "absent" | "ended" => absent(world, task == "ended"),
        "other message" => other_message(world),
        other => disagree(world, other),
    };
    if let Err(fault) = outcome {
        say(&fault);
    }
}

fn say(fault: &Fault) {
    print(&format!("fault: {}", fault.to_string().replace('\n', " ")));
}

/// A line of its own, written at once, as those of the ranks and of the test harness mix.
fn print(line: &str) {
    let _ = std::io::stdout().write_all(format!("\n{line}\n").as_bytes());
}

fn communicator(world: &MpiWorld, watch: &std::sync::Arc<Watch>, reproducible: bool) -> Result<Communicator, Fault> {
    Ok(Communicator::new(world.transport(watch.clone())?, watch.clone(), reproducible))
}

/// A number of which few are combined exactly in every type, in any order.
trait Number: Scalar + PartialEq + Debug {
    fn of(value: i32) -> Self;
    fn combine(self, other: Self, reduction: Reduction) -> Self;
    fn divide(self, ranks: usize) -> Self;
}

macro_rules! number {
    ($($ty:ty, $wide:ty, $of:expr, $to:expr;)+) => {$(
        impl Number for $ty {
            fn of(value: i32) -> Self {
                ($of)(value as $wide)
            }
            fn combine(self, other: Self, reduction: Reduction) -> Self {
                let (left, right): ($wide, $wide) = (($to)(self), ($to)(other));
                ($of)(match reduction {
                    Reduction::Sum | Reduction::Mean => left + right,
                    Reduction::Min => if left < right { left } else { right },
                    Reduction::Max => if left > right { left } else { right },
                    Reduction::Product => left * right,
                })
            }
            fn divide(self, ranks: usize) -> Self {
                ($of)(($to)(self) / ranks as $wide)
            }
        }
    )+};
}
number! {
    f32, f32, |wide| wide, |own| own;
    f64, f64, |wide| wide, |own| own;
    bf16, f32, bf16::from_f32, bf16::to_f32;
    f16, f32, f16::from_f32, f16::to_f32;
    i32, i32, |wide| wide, |own| own;
    i64, i64, |wide| wide, |own| own;
    u8, u8, |wide| wide, |own| own;
}

fn input<T: Number>(rank: usize, count: usize) -> Vec<T> {
    (0..count).map(|at| T::of(((at * 7 + rank * 3 + at / 5) % 4) as i32)).collect()
}

/// All ranks' inputs up to and without `end`, combined one after the other.
fn combined<T: Number>(end: usize, count: usize, reduction: Reduction) -> Vec<T> {
    let mut all = input::<T>(0, count);
    for rank in 1..end {
        all.iter_mut().zip(input::<T>(rank, count)).for_each(|(left, right)| *left = left.combine(right, reduction));
    }
    if reduction == Reduction::Mean {
        all.iter_mut().for_each(|value| *value = value.divide(end));
    }
    all
}

fn collectives(mut world: MpiWorld) -> Result<(), Fault> {
    let (rank, size) = (world.rank(), world.size());
    let blobs = world.all_gather(&vec![rank as u8; rank * 100])?;
    assert!(blobs.iter().enumerate().all(|(rank, blob)| *blob == vec![rank as u8; rank * 100]));
    let watch = Watch::alone();
    let mut calls = 0;
    for reproducible in [true, false] {
        for pieces in [false, true] {
            let transport = match pieces {
                true => world.transport_in_pieces(watch.clone(), PIECE_BYTES)?,
                false => world.transport(watch.clone())?,
            };
            let all = Communicator::new(transport, watch.clone(), reproducible);
            let counts = if pieces { &[LONG][..] } else { &[0, 1, 13, LONG][..] };
            calls += every_type(&all, counts)?;
            // Odd and even ranks, the other way round.
            let part = all.split((rank % 2) as i64, -(rank as i64))?;
            assert_eq!((part.size(), part.rank()), (size / 2, (size - 1 - rank) / 2));
            calls += every_type(&part, &[LONG])?;
            tree_order(&part, reproducible)?;
            tree_order(&all, reproducible)?;
        }
    }
    print(&format!("good: rank {rank} of {size}, {calls} calls, {} ({})", world.library(), world.version()));
    world.finish()
}

fn every_type(comm: &Communicator, counts: &[usize]) -> Result<usize, Fault> {
    let mut calls = 0;
    for &count in counts {
        calls += every_kind::<f32>(comm, count)? + every_kind::<f64>(comm, count)?;
        calls += every_kind::<bf16>(comm, count)? + every_kind::<f16>(comm, count)?;
        calls += every_kind::<i32>(comm, count)? + every_kind::<i64>(comm, count)? + every_kind::<u8>(comm, count)?;
    }
    Ok(calls)
}

fn every_kind<T: Number>(comm: &Communicator, count: usize) -> Result<usize, Fault> {
    comm.barrier()?;
    for reduction in Reduction::ALL {
        reductions::<T>(comm, count, reduction)?;
    }
    moves::<T>(comm, count)?;
    parts::<T>(comm, count)?;
    in_place::<T>(comm, count)?;
    messages::<T>(comm, count)?;
    Ok(1 + 5 * 3 + 4 * 2 + 5 + 5 + 4 + 2)
}

fn reductions<T: Number>(comm: &Communicator, count: usize, reduction: Reduction) -> Result<(), Fault> {
    let (rank, size) = (comm.rank(), comm.size());
    let own = input::<T>(rank, count);
    let all = combined::<T>(size, count, reduction);
    let what = format!("{} of {count} {} on rank {rank}", reduction.name(), T::ELEMENT.name());
    let mut data = own.clone();
    comm.all_reduce(&mut data, reduction)?;
    assert_eq!(data, all, "all_reduce {what}");
    let mut data = vec![T::of(9); count];
    comm.reduce(&own, &mut data, reduction, size - 1)?;
    assert_eq!(data, if rank == size - 1 { all.clone() } else { vec![T::of(9); count] }, "reduce {what}");
    let counts: Vec<usize> = (0..size).map(|rank| count / size + usize::from(rank < count % size)).collect();
    let start: usize = counts[..rank].iter().sum();
    let mut data = vec![T::of(9); counts[rank]];
    comm.reduce_scatter(&own, &mut data, reduction)?;
    assert_eq!(data, all[start..][..counts[rank]], "reduce_scatter {what}");
    if reduction != Reduction::Mean {
        let mut data = own.clone();
        comm.scan(&mut data, reduction)?;
        assert_eq!(data, combined::<T>(rank + 1, count, reduction), "scan {what}");
        let mut data = own.clone();
        comm.exclusive_scan(&mut data, reduction)?;
        let before = if rank == 0 { own } else { combined::<T>(rank, count, reduction) };
        assert_eq!(data, before, "exclusive_scan {what}");
    }
    Ok(())
}

fn moves<T: Number>(comm: &Communicator, count: usize) -> Result<(), Fault> {
    let (rank, size) = (comm.rank(), comm.size());
    let all: Vec<T> = (0..size).flat_map(|rank| input::<T>(rank, count)).collect();
    let root = size / 2;
    let mut data = input::<T>(rank, count);
    comm.broadcast(&mut data, root)?;
    assert_eq!(data, input::<T>(root, count));
    let mut data = vec![T::of(9); size * count];
    comm.all_gather(&input::<T>(rank, count), &mut data)?;
    assert_eq!(data, all);
    let mut data = vec![T::of(9); if rank == root { size * count } else { 0 }];
    comm.gather(&input::<T>(rank, count), &mut data, root)?;
    assert!(rank != root || data == all);
    let mut data = vec![T::of(9); count];
    comm.scatter(if rank == root { &all } else { &[] }, &mut data, root)?;
    assert_eq!(data, input::<T>(rank, count));
    let mut data = vec![T::of(9); size * count];
    comm.all_to_all(&vec![T::of(rank as i32); size * count], &mut data)?;
    assert!(data.iter().enumerate().all(|(at, value)| *value == T::of((at / count) as i32)));
    Ok(())
}

/// With parts of different sizes, one of them empty.
fn parts<T: Number>(comm: &Communicator, count: usize) -> Result<(), Fault> {
    let (rank, size) = (comm.rank(), comm.size());
    let counts: Vec<usize> = (0..size).map(|rank| rank * count).collect();
    let start = |rank: usize| counts[..rank].iter().sum::<usize>();
    let total = start(size);
    let whole = input::<T>(7, total);
    let mine = &whole[start(rank)..][..counts[rank]];
    let mut data = vec![T::of(9); total];
    comm.all_gather_v(mine, &mut data, &counts)?;
    assert_eq!(data, whole);
    let mut data = vec![T::of(9); if rank == 0 { total } else { 0 }];
    comm.gather_v(mine, &mut data, &counts, 0)?;
    assert!(rank != 0 || data == whole);
    let mut data = vec![T::of(9); counts[rank]];
    comm.scatter_v(if rank == 0 { &whole } else { &[] }, &mut data, &counts, 0)?;
    assert_eq!(data, mine);
    let mut data = vec![T::of(9); counts[rank]];
    comm.reduce_scatter_v(&input::<T>(rank, total), &mut data, &counts, Reduction::Sum)?;
    assert_eq!(data, combined::<T>(size, total, Reduction::Sum)[start(rank)..][..counts[rank]]);
    // Rank `a` sends `(a + 2 b) · count` elements to rank `b`.
    let pair = |from: usize, to: usize| (from + 2 * to) * count;
    let send: Vec<usize> = (0..size).map(|to| pair(rank, to)).collect();
    let recv: Vec<usize> = (0..size).map(|from| pair(from, rank)).collect();
    let out: Vec<T> = (0..size).flat_map(|to| vec![T::of((rank * 5 + to) as i32); pair(rank, to)]).collect();
    let expected: Vec<T> = (0..size).flat_map(|from| vec![T::of((from * 5 + rank) as i32); pair(from, rank)]).collect();
    let mut data = vec![T::of(9); expected.len()];
    comm.all_to_all_v(&out, &send, &mut data, &recv)?;
    assert_eq!(data, expected);
    Ok(())
}

/// Input and output in one place, as the contract allows it.
fn in_place<T: Number>(comm: &Communicator, count: usize) -> Result<(), Fault> {
    let (rank, size) = (comm.rank(), comm.size());
    let even: std::sync::Arc<[_]> = kolo_comm::task::even_parts(count, size).into();
    let own = even[rank];
    let width = T::ELEMENT.bytes();
    let call = |kind, root, data: &mut Vec<T>, input: usize, output: usize| {
        let base = data.as_mut_ptr().cast::<u8>();
        let bytes = data.len() * width;
        let request = Request {
            root,
            count,
            recv: even.clone(),
            input: base.wrapping_add(input * width),
            output: base.wrapping_add(output * width),
            input_bytes: bytes - input * width,
            output_bytes: bytes - output * width,
            ..Request::new(kind, T::ELEMENT)
        };
        // SAFETY: all inside `data`, which is borrowed.
        unsafe { comm.call(&request) }
    };
    let whole = input::<T>(5, count);
    let mut data = input::<T>(rank, count);
    call(CallKind::ReduceScatter, 0, &mut data, 0, own.offset)?;
    let sum = combined::<T>(size, count, Reduction::Sum);
    assert_eq!(data[own.offset..][..own.count], sum[own.offset..][..own.count], "reduce_scatter in place");
    for kind in [CallKind::AllGather, CallKind::Gather] {
        let mut data = vec![T::of(9); count];
        data[own.offset..][..own.count].copy_from_slice(&whole[own.offset..][..own.count]);
        call(kind, 0, &mut data, own.offset, 0)?;
        assert!(data == whole || kind == CallKind::Gather && rank != 0, "{} in place", kind.name());
    }
    let mut data = if rank == 0 { whole.clone() } else { vec![T::of(9); count] };
    call(CallKind::Scatter, 0, &mut data, 0, own.offset)?;
    assert_eq!(data[own.offset..][..own.count], whole[own.offset..][..own.count], "scatter in place");
    Ok(())
}

/// Everybody to its right neighbour, even ranks first.
fn messages<T: Number>(comm: &Communicator, count: usize) -> Result<(), Fault> {
    let (rank, size) = (comm.rank(), comm.size());
    let (left, right) = ((rank + size - 1) % size, (rank + 1) % size);
    let mut data = vec![T::of(9); count];
    if rank % 2 == 0 {
        comm.send(&input::<T>(rank, count), right)?;
        comm.recv(&mut data, left)?;
    } else {
        comm.recv(&mut data, left)?;
        comm.send(&input::<T>(rank, count), right)?;
    }
    assert_eq!(data, input::<T>(left, count));
    Ok(())
}

/// Numbers whose sum depends on the order: to the bit with the promise, about that without.
fn tree_order(comm: &Communicator, reproducible: bool) -> Result<(), Fault> {
    let value = |rank: usize, at: usize| ((at * 7919 + rank * 104_729) % 1_000_003) as f32 * 1.37e-3 - 500.0;
    let inputs: Vec<Vec<f32>> = (0..comm.size()).map(|rank| (0..LONG).map(|at| value(rank, at)).collect()).collect();
    let mut expected = inputs.clone();
    let mut stride = 1;
    while stride < expected.len() {
        for at in (0..expected.len() - stride).step_by(2 * stride) {
            let right = expected[at + stride].clone();
            expected[at].iter_mut().zip(right).for_each(|(left, right)| *left += right);
        }
        stride *= 2;
    }
    let mut data = inputs[comm.rank()].clone();
    comm.all_reduce(&mut data, Reduction::Sum)?;
    for (got, expected) in data.iter().zip(&expected[0]) {
        let same = got.to_bits() == expected.to_bits();
        assert!(same || !reproducible && (got - expected).abs() <= 1e-2, "{got} instead of {expected}");
    }
    Ok(())
}

/// Started calls on one communicator, calls on another, and on a third from a thread of its own.
fn threads(world: MpiWorld) -> Result<(), Fault> {
    let watch = Watch::alone();
    let (one, two) = (communicator(&world, &watch, true)?, communicator(&world, &watch, false)?);
    let three = communicator(&world, &watch, true)?;
    let sum: f32 = (0..world.size()).map(|rank| rank as f32).sum();
    let mine = world.rank() as f32;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| -> Result<(), Fault> {
            for round in 0..100 {
                let mut data = vec![mine; 100 * round];
                three.all_reduce(&mut data, Reduction::Sum)?;
                assert!(data.iter().all(|value| *value == sum));
            }
            Ok(())
        });
        for _ in 0..20 {
            let mut started = vec![mine; LONG];
            let request = Request {
                count: LONG,
                input: started.as_ptr().cast(),
                output: started.as_mut_ptr().cast(),
                input_bytes: LONG * 4,
                output_bytes: LONG * 4,
                ..Request::new(CallKind::AllReduce, ElementType::F32)
            };
            // SAFETY: waited for below.
            let ticket = unsafe { one.start(request)? };
            let mut data = vec![mine; LONG];
            two.all_reduce(&mut data, Reduction::Sum)?;
            one.wait(ticket)?;
            assert!(data.iter().chain(&started).all(|value| *value == sum));
        }
        other.join().unwrap()
    })?;
    print(&format!("good: rank {}", world.rank()));
    world.finish()
}

/// Calls until somebody ends it.
fn endless(world: MpiWorld) -> Result<(), Fault> {
    let comm = communicator(&world, &Watch::alone(), true)?;
    print(&format!("process: {}", std::process::id()));
    loop {
        comm.all_reduce(&mut [1f32; LONG], Reduction::Sum)?;
    }
}

/// Rank 2 does something else; it and all others learn of it, and soon.
fn disagree(world: MpiWorld, task: &str) -> Result<(), Fault> {
    let watch = Watch::alone();
    let comm = communicator(&world, &watch, true)?;
    let (rank, size) = (world.rank(), world.size());
    let other = rank == 2;
    comm.barrier()?;
    let start = Instant::now();
    let outcome = match task {
        "other size" => comm.all_reduce(&mut vec![0f32; if other { 1001 } else { 1000 }], Reduction::Sum),
        "other kind" if other => comm.barrier(),
        "other kind" => comm.broadcast(&mut [0f32; 8], 0),
        "other parts" => {
            let counts = if other { [1, 2, 3, 2] } else { [2, 2, 2, 2] };
            comm.all_gather_v(&vec![0i32; counts[rank]], &mut [0; 8], &counts)
        }
        "other pairs" => {
            let send = [2, 2, 2, if other { 1 } else { 2 }];
            comm.all_to_all_v(&vec![0u8; send.iter().sum()], &send, &mut vec![0; 2 * size], &vec![2; size])
        }
        _ => panic!("unknown task {task}"),
    };
    // Half of the time after which any wait ends.
    assert!(start.elapsed() < Duration::from_secs(30), "{task} took {:?}", start.elapsed());
    let fault = outcome.unwrap_err();
    say(&fault);
    // A communicator that failed stays so: no rank waits for one that has given up.
    assert_eq!(comm.barrier().unwrap_err().to_string(), fault.to_string());
    // Nothing is under way after a disagreement: the end is an orderly one.
    drop(comm);
    world.finish()
}

fn other_message(world: MpiWorld) -> Result<(), Fault> {
    let comm = communicator(&world, &Watch::alone(), true)?;
    comm.barrier()?;
    match world.rank() {
        0 => comm.send(&[1f32; 10], 1)?,
        1 => say(&comm.recv(&mut [0f32; 9], 0).unwrap_err()),
        _ => {}
    }
    drop(comm);
    world.finish()
}

/// Rank 3 does not come, and the others notice, or are told that the job has ended.
fn absent(world: MpiWorld, ended: bool) -> Result<(), Fault> {
    let watch = Watch::new(Vec::new(), Duration::from_millis(if ended { 1000 } else { 50 }));
    let comm = communicator(&world, &watch, true)?;
    comm.barrier()?;
    // Nobody goes before the other three have spoken: a launcher may end the rest when one is gone.
    let folder = std::env::temp_dir().join(format!("kolo-absent-{}", std::os::unix::process::parent_id()));
    std::fs::create_dir_all(&folder).unwrap();
    let spoken = || (0..3).all(|rank| folder.join(rank.to_string()).exists());
    let await_all = || {
        let start = Instant::now();
        while !spoken() && start.elapsed() < Duration::from_secs(50) {
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    if world.rank() == 3 {
        await_all();
        std::thread::sleep(Duration::from_millis(200));
        std::fs::remove_dir_all(&folder).unwrap();
        return Ok(());
    }
    let outcome = std::thread::scope(|scope| {
        let end = || {
            std::thread::sleep(Duration::from_millis(300));
            watch.abort(Fault::Aborted("ended from outside".into()));
        };
        ended.then(|| scope.spawn(end));
        comm.all_reduce(&mut [0f32; 5], Reduction::Sum)
    });
    say(&outcome.unwrap_err());
    std::fs::write(folder.join(world.rank().to_string()), "").unwrap();
    await_all();
    Ok(())
}
