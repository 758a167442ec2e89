//! The shared-memory transport: every collective on every path against its definition, to the bit; failures between real
//! processes.

#[path = "support/oracle.rs"]
mod oracle;
mod support;

use kolo_comm::call::CallKind;
use kolo_comm::memory::SharedMemory;
use kolo_comm::task::{RankPart, packed_parts};
use kolo_comm::{Communicator, ElementType, Fault, Reduction, Request, Watch, shm};
use std::collections::HashMap;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Runs `work` on `size` threads, each a rank.
fn together<R: Send>(size: usize, work: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let start = |(rank, mut table): (usize, support::Table)| {
            let work = &work;
            scope.spawn(move || {
                let watch = Watch::alone();
                let transport = shm::connect(rank, size, Arc::clone(&watch), &mut table).expect("connects");
                work(Communicator::new(transport, watch, true))
            })
        };
        let threads: Vec<_> = support::Table::for_ranks(size).into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// A rank's values: sums stay exact in no type by accident, and none overflows.
fn values(rank: usize, element: ElementType, count: usize) -> Vec<u8> {
    let number = |at: usize| ((at * 7919 + rank * 104_729) % 1009) as f32 * 0.037 - 17.0;
    let mut bytes = Vec::with_capacity(count * element.bytes());
    for at in 0..count {
        match element {
            ElementType::F32 => bytes.extend(number(at).to_le_bytes()),
            ElementType::F64 => bytes.extend((f64::from(number(at)) / 3.0).to_le_bytes()),
            ElementType::Bf16 => bytes.extend(half::bf16::from_f32(number(at)).to_le_bytes()),
            ElementType::F16 => bytes.extend(half::f16::from_f32(number(at)).to_le_bytes()),
            ElementType::I32 => bytes.extend((number(at) as i32).to_le_bytes()),
            ElementType::I64 => bytes.extend((number(at) as i64 * 1_000_003).to_le_bytes()),
            ElementType::U8 => bytes.push((at * 31 + rank * 7) as u8),
        }
    }
    bytes
}

/// Which reduction it is: of what, of how many elements, over how many ranks of how many.
type ReductionKey = (ElementType, Reduction, usize, [usize; 2]);

/// What reductions must give, each worked out once for all ranks and buffers.
#[derive(Default)]
struct Definitions(Mutex<HashMap<ReductionKey, Arc<Vec<u8>>>>);

impl Definitions {
    fn combined(&self, case: &Case, inputs: &[Vec<u8>]) -> Arc<Vec<u8>> {
        let key = (case.element, case.reduction, case.count, [inputs.len(), case.size]);
        let mut known = self.0.lock().expect("no panic");
        let made = || Arc::new(oracle::tree(case.element, case.reduction, inputs, case.size));
        Arc::clone(known.entry(key).or_insert_with(made))
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    kind: CallKind,
    element: ElementType,
    reduction: Reduction,
    /// Elements of the whole.
    count: usize,
    size: usize,
    root: usize,
    in_place: bool,
}

impl Case {
    /// Uneven parts, some of them empty, not in the order of the ranks.
    fn parts(&self) -> Vec<RankPart> {
        let weights: Vec<usize> = (0..self.size).map(|rank| (rank + 1) % 4).collect();
        let all: usize = weights.iter().sum();
        let mut counts: Vec<usize> = weights.iter().map(|weight| self.count * weight / all).collect();
        counts[0] += self.count - counts.iter().sum::<usize>();
        counts.reverse();
        let mut parts = packed_parts(&counts);
        parts.reverse();
        parts
    }

    /// What rank `from` sends to `to` in all-to-all.
    fn pair(&self, from: usize, to: usize) -> usize {
        self.count * ((from * 3 + to * 5) % 7) / 7 / self.size
    }

    fn send(&self, rank: usize) -> Vec<RankPart> {
        packed_parts(&(0..self.size).map(|to| self.pair(rank, to)).collect::<Vec<_>>())
    }

    fn recv(&self, rank: usize) -> Vec<RankPart> {
        match self.kind {
            CallKind::AllToAll => packed_parts(&(0..self.size).map(|from| self.pair(from, rank)).collect::<Vec<_>>()),
            _ => self.parts(),
        }
    }

    fn input_count(&self, rank: usize) -> usize {
        match self.kind {
            CallKind::AllGather | CallKind::Gather => self.parts()[rank].count,
            CallKind::AllToAll => self.send(rank).iter().map(|part| part.count).sum(),
            _ => self.count,
        }
    }

    fn inputs(&self) -> Vec<Vec<u8>> {
        (0..self.size).map(|rank| values(rank, self.element, self.input_count(rank))).collect()
    }

    fn slice(&self, data: &[u8], part: RankPart) -> Vec<u8> {
        let width = self.element.bytes();
        data[part.offset * width..(part.offset + part.count) * width].to_vec()
    }

    /// What the call leaves in the rank's output; `None` if that is not defined.
    fn expected(&self, rank: usize, definitions: &Definitions) -> Option<Vec<u8>> {
        let inputs = self.inputs();
        let parts = self.parts();
        let combined = |inputs: &[Vec<u8>]| definitions.combined(self, inputs).to_vec();
        let gathered = || {
            let mut all = vec![0; self.count * self.element.bytes()];
            for (part, input) in parts.iter().zip(&inputs) {
                all[part.offset * self.element.bytes()..][..input.len()].copy_from_slice(input);
            }
            all
        };
        match self.kind {
            CallKind::Broadcast => Some(inputs[self.root].clone()),
            CallKind::AllReduce => Some(combined(&inputs)),
            CallKind::Reduce => (rank == self.root).then(|| combined(&inputs)),
            CallKind::ReduceScatter => Some(self.slice(&combined(&inputs), parts[rank])),
            CallKind::AllGather => Some(gathered()),
            CallKind::Gather => (rank == self.root).then(gathered),
            CallKind::Scatter => Some(self.slice(&inputs[self.root], parts[rank])),
            CallKind::Scan => Some(combined(&inputs[..=rank])),
            CallKind::ExclusiveScan => (rank > 0).then(|| combined(&inputs[..rank])),
            CallKind::AllToAll => {
                let to = |from: usize| self.slice(&inputs[from], self.send(from)[rank]);
                Some((0..self.size).flat_map(to).collect())
            }
            CallKind::Barrier | CallKind::Send | CallKind::Recv => None,
        }
    }

    fn output_bytes(&self, rank: usize) -> usize {
        let count = match self.kind {
            CallKind::ReduceScatter | CallKind::Scatter => self.parts()[rank].count,
            CallKind::AllToAll => self.recv(rank).iter().map(|part| part.count).sum(),
            _ => self.count,
        };
        count * self.element.bytes()
    }

    /// Where in one memory input and output begin.
    fn offsets(&self, rank: usize, memory: &SharedMemory) -> (usize, usize) {
        let own = self.parts()[rank].offset * self.element.bytes();
        // Offsets that differ between ranks, and are no multiple of a cache line.
        let start = 8 * rank;
        match self.kind {
            CallKind::Broadcast => (start, start),
            _ if !self.in_place => (start, memory.bytes() / 2 + start),
            CallKind::AllGather | CallKind::Gather => (start + own, start),
            CallKind::ReduceScatter | CallKind::Scatter => (start, start + own),
            _ => (start, start),
        }
    }

    fn run(&self, comm: &Communicator, memory: &SharedMemory, definitions: &Definitions) {
        let rank = comm.rank();
        let (input, output) = self.offsets(rank, memory);
        let data = values(rank, self.element, self.input_count(rank));
        // SAFETY: the memory is large enough for both halves, and no other rank uses it between calls.
        let outcome = unsafe {
            // What an earlier call left there must not pass for a result.
            std::ptr::write_bytes(memory.at(output), 0xA5, self.output_bytes(rank));
            std::ptr::copy_nonoverlapping(data.as_ptr(), memory.at(input), data.len());
            comm.call(&Request {
                reduction: self.reduction,
                root: self.root,
                count: if self.kind == CallKind::AllToAll { 0 } else { self.count },
                input: memory.at(input),
                output: memory.at(output),
                input_bytes: data.len(),
                output_bytes: self.output_bytes(rank),
                send: self.send(rank).into(),
                recv: self.recv(rank).into(),
                ..Request::new(self.kind, self.element)
            })
        };
        outcome.unwrap_or_else(|fault| panic!("{self:?}: {fault}"));
        if let Some(expected) = self.expected(rank, definitions) {
            // SAFETY: as above.
            let got = unsafe { std::slice::from_raw_parts(memory.at(output), expected.len()) };
            assert!(got == expected, "rank {rank}, {self:?}");
        }
    }
}

const KINDS: [CallKind; 10] = [
    CallKind::Broadcast,
    CallKind::Reduce,
    CallKind::AllReduce,
    CallKind::ReduceScatter,
    CallKind::Gather,
    CallKind::AllGather,
    CallKind::Scatter,
    CallKind::AllToAll,
    CallKind::Scan,
    CallKind::ExclusiveScan,
];

/// All kinds on memory of the transport and on private memory, in place and not.
fn sweep(size: usize, counts: &[usize], mixes: &[(ElementType, Reduction)]) {
    sweep_kinds(&KINDS, size, counts, mixes);
}

fn sweep_kinds(kinds: &[CallKind], size: usize, counts: &[usize], mixes: &[(ElementType, Reduction)]) {
    let most = counts.iter().max().expect("counts") * 8 + 4096;
    let definitions = Definitions::default();
    together(size, |comm| {
        let memories = [comm.allocate(2 * most).expect("allocates"), SharedMemory::private(2 * most).expect("maps")];
        for kind in kinds.iter().copied() {
            for (number, count) in counts.iter().enumerate() {
                for (element, reduction) in mixes.iter().copied() {
                    let mean_of_scan =
                        matches!(kind, CallKind::Scan | CallKind::ExclusiveScan) && reduction == Reduction::Mean;
                    for at in (0..4).filter(|_| !mean_of_scan) {
                        let (shared, in_place) = (at % 2 == 0, at / 2 == 0 && kind != CallKind::AllToAll);
                        let (count, root) = (*count, (number + at) % size);
                        let case = Case { kind, element, reduction, count, size, root, in_place };
                        case.run(&comm, &memories[usize::from(!shared)], &definitions);
                    }
                }
            }
        }
    });
}

#[test]
fn every_collective_keeps_to_its_definition() {
    for size in [1, 2, 3, 4, 8] {
        sweep(size, &[0, 1, 12, 13, 250, 1000, 5003], &[(ElementType::F32, Reduction::Sum)]);
    }
}

#[test]
fn large_calls_go_in_many_pieces() {
    for size in [2, 3, 4] {
        sweep(size, &[70_001, 200_003], &[(ElementType::F32, Reduction::Mean), (ElementType::F32, Reduction::Sum)]);
    }
}

#[test]
fn every_element_and_reduction() {
    let mixes: Vec<(ElementType, Reduction)> = ElementType::ALL
        .into_iter()
        .flat_map(|element| Reduction::ALL.into_iter().map(move |reduction| (element, reduction)))
        .collect();
    sweep(3, &[11, 2100], &mixes);
    // Through staging buffers, from the size on where each rank combines its slice; on two ranks in a way of their own.
    for size in [2, 3] {
        sweep_kinds(&[CallKind::AllReduce], size, &[9001, 300_001], &mixes);
    }
}

/// Calls that use the staging buffers in different ways, on any memory, with nothing between them that would keep ranks in step.
#[test]
fn calls_may_follow_each_other_at_once() {
    const CALLS: usize = 30;
    for size in [2, 3] {
        together(size, |comm| {
            let (rank, number) =
                (comm.rank() as i64, |rank: i64, call: usize, at: usize| (rank + 1) * (call + at) as i64);
            let vector = |rank: i64, call: usize| (0..40_003).map(|at| number(rank, call, at)).collect::<Vec<i64>>();
            let short = |rank: i64, call: usize| vec![number(rank, call, 0); 3000];
            let mut sums: Vec<Vec<i64>> = (0..CALLS).map(|call| vector(rank, call)).collect();
            let mut gathered = vec![vec![0; 3000 * size]; CALLS];
            let mut swapped = vec![vec![0; 3000 * size]; CALLS];
            for call in 0..CALLS {
                comm.all_reduce(&mut sums[call], Reduction::Sum).unwrap();
                comm.all_gather(&short(rank, call), &mut gathered[call]).unwrap();
                if call % 3 == 0 {
                    comm.barrier().unwrap();
                }
                comm.all_to_all(&short(rank, call).repeat(size), &mut swapped[call]).unwrap();
            }
            for call in 0..CALLS {
                let factor: i64 = (1..=size as i64).sum();
                let right = |(at, sum): (usize, &i64)| *sum == factor * (call + at) as i64;
                assert!(sums[call].iter().enumerate().all(right), "rank {rank}, call {call}");
                let all: Vec<i64> = (0..size as i64).flat_map(|other| short(other, call)).collect();
                assert!(gathered[call] == all && swapped[call] == all, "rank {rank}, call {call}");
            }
        });
    }
}

#[test]
fn ranks_may_disagree_about_where_their_buffers_are() {
    let definitions = Definitions::default();
    together(3, |comm| {
        let [first, second] = [(); 2].map(|()| comm.allocate(1 << 17).expect("allocates"));
        let private = SharedMemory::private(1 << 17).expect("maps");
        let memory = [&first, &second, &private][comm.rank()];
        for kind in KINDS {
            let (element, reduction) = (ElementType::F32, Reduction::Sum);
            let in_place = kind != CallKind::AllToAll;
            Case { kind, element, reduction, count: 9001, size: 3, root: 1, in_place }.run(&comm, memory, &definitions);
        }
    });
}

/// Resident pages of a memory.
fn resident_pages(memory: &SharedMemory) -> usize {
    let mut pages = vec![0u8; memory.bytes() / 4096];
    // SAFETY: the memory is mapped, and there is a byte for each of its pages.
    assert_eq!(unsafe { libc::mincore(memory.at(0).cast(), memory.bytes(), pages.as_mut_ptr()) }, 0);
    pages.iter().filter(|page| **page & 1 == 1).count()
}

#[test]
fn memory_at_the_first_rank_takes_room_there_alone() {
    const BYTES: usize = 1 << 23;
    together(3, |comm| {
        let memory = comm.allocate_at_first(BYTES).expect("allocates");
        comm.barrier().expect("a barrier");
        if comm.rank() == 0 {
            // SAFETY: nobody else uses it before the next barrier.
            unsafe { memory.at(BYTES - 1).write(7) };
        } else {
            // What the ranks told each other lies in the first page or two.
            assert!(resident_pages(&memory) <= BYTES / 4096 / 4, "{} pages", resident_pages(&memory));
        }
        comm.barrier().expect("a barrier");
        let first = memory.peer(0, 0).expect("mapped");
        // SAFETY: written before the barrier.
        assert_eq!(unsafe { first.add(BYTES - 1).read() }, 7);
        comm.barrier().expect("a barrier");
    });
}

#[test]
fn memory_of_the_parent_serves_its_parts() {
    let definitions = Definitions::default();
    together(4, |comm| {
        let memory = comm.allocate(1 << 17).expect("allocates");
        let color = [7, 3, 7, 3][comm.rank()];
        // The order within a part is turned round.
        let part = comm.split(color, -(comm.rank() as i64)).expect("splits");
        assert_eq!((part.size(), part.rank()), (2, 1 - comm.rank() / 2));
        for kind in KINDS {
            let (element, reduction) = (ElementType::F64, Reduction::Sum);
            let in_place = kind != CallKind::AllToAll;
            Case { kind, element, reduction, count: 5000, size: 2, root: 1, in_place }.run(
                &part,
                &memory,
                &definitions,
            );
        }
        let alone = part.split(comm.rank() as i64, 0).expect("splits again");
        let mut data = [3.0f32];
        alone.all_reduce(&mut data, Reduction::Sum).expect("one rank");
        assert_eq!((alone.size(), data), (1, [3.0]));
        drop((part, alone));
        comm.barrier().expect("the parent lives on");
    });
}

#[test]
fn messages_between_any_two_ranks() {
    together(4, |comm| {
        let rank = comm.rank();
        for count in [0usize, 1, 15, 16, 17, 5000, 100_000] {
            let word = |from: usize, at: usize| (from * 1_000_003 + at) as i64;
            // Ranks 0 and 1 talk while 2 and 3 do.
            let peer = rank ^ 1;
            let data: Vec<i64> = (0..count).map(|at| word(rank, at)).collect();
            let mut got = vec![0i64; count];
            if rank < peer {
                comm.send(&data, peer).expect("sends");
                comm.recv(&mut got, peer).expect("receives");
            } else {
                comm.recv(&mut got, peer).expect("receives");
                comm.send(&data, peer).expect("sends");
            }
            assert!(got.iter().enumerate().all(|(at, got)| *got == word(peer, at)));
        }
        // A short message does not wait for its receiver.
        comm.send(&[rank as i32], (rank + 1) % 4).expect("sends");
        comm.barrier().expect("meets");
        let mut got = [0i32];
        comm.recv(&mut got, (rank + 3) % 4).expect("receives");
        assert_eq!(got, [(rank as i32 + 3) % 4]);
    });
}

#[test]
fn different_calls_are_told_apart_on_every_rank() {
    type Call = fn(&Communicator) -> Result<(), Fault>;
    let differ: [Call; 3] = [
        |comm| comm.all_reduce(&mut [0f32; 4], Reduction::Sum),
        |comm| comm.all_reduce(&mut vec![0f32; 4000], Reduction::Sum),
        |comm| comm.barrier(),
    ];
    for odd in differ {
        let faults = together(3, |comm| {
            let outcome = match comm.rank() {
                1 => odd(&comm),
                _ => comm.broadcast(&mut [0f64; 5], 0),
            };
            let fault = outcome.expect_err("the calls differ");
            assert_eq!(comm.barrier().expect_err("a failed communicator stays failed"), fault);
            fault
        });
        for (rank, fault) in faults.iter().enumerate() {
            let Fault::Mismatch { mine, peer, theirs, .. } = fault else { panic!("rank {rank}: {fault}") };
            assert!(rank == 1 || (*peer, mine.kind) == (1, CallKind::Broadcast), "rank {rank}: {fault}");
            assert!(rank != 1 || theirs.kind == CallKind::Broadcast, "{fault}");
        }
    }
}

#[test]
fn a_message_of_another_size_is_a_mismatch() {
    let faults = together(2, |comm| match comm.rank() {
        0 => comm.send(&[1f32, 2.0], 1).and_then(|()| comm.recv(&mut [0f32], 1)),
        _ => comm.recv(&mut [0f32; 3], 0),
    });
    assert!(
        matches!(&faults[1], Err(Fault::Mismatch { peer: 0, mine, theirs, .. }) if (mine.count, theirs.count) == (3, 2))
    );
    assert!(faults[0].is_err(), "the sender learns of it with its next call");
}

#[test]
fn a_message_is_no_collective() {
    type Call = fn(&Communicator) -> Result<(), Fault>;
    let messages: [Call; 2] = [|comm| comm.recv(&mut [0i32], 0), |comm| comm.send(&vec![0i64; 1 << 20], 0)];
    for message in messages {
        let began = Instant::now();
        let faults = together(3, |comm| {
            // What was sent before is no reason to complain.
            match comm.rank() {
                0 => comm.send(&[5u8], 1).expect("sends"),
                1 => comm.recv(&mut [0u8], 0).expect("receives"),
                _ => {}
            }
            match comm.rank() {
                1 => message(&comm),
                _ => comm.all_reduce(&mut [0f64; 5], Reduction::Sum),
            }
        });
        for (rank, fault) in faults.iter().enumerate() {
            let Err(Fault::Mismatch { mine, peer, theirs, .. }) = fault else { panic!("rank {rank}: {fault:?}") };
            let (own, other) = if rank == 1 { (theirs, mine) } else { (mine, theirs) };
            assert_eq!((own.kind, other.kind), (CallKind::AllReduce, CallKind::Send), "rank {rank}");
            assert!(rank == 1 || *peer == 1, "rank {rank}");
        }
        // Half of the time after which any wait ends.
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}

#[test]
fn parts_of_another_size_are_a_mismatch() {
    let outcomes = together(3, |comm| {
        let sends = [[1, 1, 1], [1, 1, 4], [1, 1, 1]][comm.rank()];
        let total = sends.iter().sum();
        let outcome = comm.all_to_all_v(&vec![0f32; total], &sends, &mut [0f32; 3], &[1, 1, 1]);
        // The others find out when they need it again.
        outcome.and_then(|()| comm.barrier())
    });
    for (rank, outcome) in outcomes.iter().enumerate() {
        assert!(matches!(outcome, Err(Fault::Mismatch { .. })), "rank {rank}: {outcome:?}");
    }
}

#[test]
fn parts_that_are_not_those_of_all_ranks_are_named() {
    for large in [1, 4000] {
        let faults = together(2, |comm| {
            let counts = if comm.rank() == 0 { [large, 3 * large] } else { [3 * large, large] };
            let mut all = vec![0f32; 4 * large];
            comm.all_gather_v(&vec![1f32; counts[comm.rank()]], &mut all, &counts).unwrap_err()
        });
        for (rank, fault) in faults.into_iter().enumerate() {
            let text = fault.to_string();
            assert!(fault.culprit() == Some(1 - rank) && text.contains("its parts in all_gather"), "{text}");
        }
    }
}

#[test]
fn a_group_names_ranks_as_the_job_does() {
    let outcomes = together(4, |comm| {
        let half = comm.split(comm.rank() as i64 / 2, 0).expect("splits");
        match comm.rank() {
            1 => half.all_reduce(&mut [0i32; 2], Reduction::Sum),
            0 => half.all_reduce(&mut [0i32], Reduction::Sum),
            3 => Ok(()),
            _ => half.barrier(),
        }
    });
    assert!(matches!(outcomes[2], Err(Fault::Lost { peer: 3, .. })), "{:?}", outcomes[2]);
    assert!(matches!(outcomes[1], Err(Fault::Mismatch { rank: 1, peer: 0, .. })), "{:?}", outcomes[1]);
}

#[test]
fn whoever_leaves_or_ends_the_job_is_noticed() {
    let outcomes = together(3, |comm| {
        if comm.rank() == 1 {
            return Ok(());
        }
        comm.barrier()
    });
    for rank in [0, 2] {
        assert!(matches!(outcomes[rank], Err(Fault::Lost { peer: 1, .. })), "{:?}", outcomes[rank]);
    }
    let noticed = AtomicBool::new(false);
    together(2, |comm| {
        if comm.rank() == 1 {
            while !noticed.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            return;
        }
        let watch = Arc::clone(comm.watch());
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            watch.abort(Fault::Aborted("the coordinator says so".into()));
        });
        let outcome = comm.barrier();
        noticed.store(true, Ordering::Relaxed);
        assert_eq!(outcome, Err(Fault::Aborted("the coordinator says so".into())));
    });
}

const FOLDER: &str = "KOLO_TEST_SHM_FOLDER";
const RANK: &str = "KOLO_TEST_SHM_RANK";
const PROCESSES: usize = 4;

/// Not a test of its own: a rank of the tests below, in its own process.
#[test]
fn rank_in_a_process() {
    let (Ok(folder), Ok(rank)) = (std::env::var(FOLDER), std::env::var(RANK)) else { return };
    let rank: usize = rank.parse().expect("a rank");
    let watch = Watch::alone();
    let before = descriptors();
    let mut bootstrap = support::Folder::new(folder.as_ref(), rank, PROCESSES);
    let transport = shm::connect(rank, PROCESSES, Arc::clone(&watch), &mut bootstrap).expect("connects");
    let comm = Communicator::new(transport, watch, true);
    let (memory, definitions) = (comm.allocate(1 << 20).expect("allocates"), Definitions::default());
    for kind in KINDS {
        let (element, reduction) = (ElementType::F32, Reduction::Sum);
        let in_place = kind != CallKind::AllToAll;
        for count in [5, 50_000] {
            Case { kind, element, reduction, count, size: PROCESSES, root: 2, in_place }.run(
                &comm,
                &memory,
                &definitions,
            );
        }
    }
    let half = comm.split(rank as i64 % 2, 0).expect("splits");
    half.barrier().expect("meets");
    drop(half);
    assert!(shm::resident_bytes_of_peers() > 0, "others' memory was read");
    println!("ready");
    let fault = if std::env::var("KOLO_TEST_SHM_END").is_ok() {
        comm.barrier().err()
    } else {
        // Until somebody dies.
        let mut data = vec![1f32; 3000];
        std::iter::repeat_with(|| comm.all_reduce(&mut data, Reduction::Max)).find_map(Result::err)
    };
    drop((comm, memory));
    assert_eq!(descriptors(), before, "descriptors stay open");
    let maps = std::fs::read_to_string("/proc/self/maps").expect("readable");
    assert!(!maps.contains("memfd:kolo"), "{maps}");
    assert_eq!(shm::resident_bytes_of_peers(), 0);
    println!("{}", fault.map_or("fine".into(), |fault| fault.to_string()));
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("readable").count()
}

fn start(folder: &std::path::Path, end: bool) -> Vec<Child> {
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "rank_in_a_process", "--nocapture", "--test-threads", "1"]);
        command.env(FOLDER, folder).env(RANK, rank.to_string()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if end {
            command.env("KOLO_TEST_SHM_END", "1");
        }
        command.spawn().expect("starts")
    };
    (0..PROCESSES).map(start).collect()
}

fn output(child: &mut Child) -> String {
    let mut text = String::new();
    child.stdout.take().expect("piped").read_to_string(&mut text).expect("text");
    child.stderr.take().expect("piped").read_to_string(&mut text).expect("text");
    child.wait().expect("ends");
    text
}

/// Files of shared memory that bear the number of one of these processes; others have their own.
fn named_segments(processes: &[u32]) -> usize {
    let ours = |name: String| {
        let mut numbers = name.split(|letter: char| !letter.is_ascii_digit());
        name.contains("kolo") && numbers.any(|number| processes.iter().any(|process| process.to_string() == number))
    };
    std::fs::read_dir("/dev/shm").map_or(0, |entries| {
        entries.flatten().filter(|entry| ours(entry.file_name().to_string_lossy().into_owned())).count()
    })
}

#[test]
fn processes_agree_and_leave_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let children = start(folder.path(), true);
    let mut processes: Vec<u32> = children.iter().map(Child::id).collect();
    processes.push(std::process::id());
    for mut child in children {
        let text = output(&mut child);
        assert!(text.contains("fine"), "{text}");
    }
    assert_eq!(named_segments(&processes), 0);
}

#[test]
fn a_killed_process_is_noticed_by_all() {
    for victim in [0, 3] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut children = start(folder.path(), false);
        let mut first = [0; 64];
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut said = String::new();
        while !said.contains("ready") && Instant::now() < deadline {
            let read = children[victim].stdout.as_mut().expect("piped").read(&mut first).expect("readable");
            said.push_str(&String::from_utf8_lossy(&first[..read]));
        }
        std::thread::sleep(Duration::from_millis(20));
        children[victim].kill().expect("killed");
        let killed = Instant::now();
        for (rank, child) in children.iter_mut().enumerate().filter(|(rank, _)| *rank != victim) {
            let text = output(child);
            assert!(text.contains(&format!("rank {victim} was lost during all_reduce")), "rank {rank}: {text}");
        }
        let took = killed.elapsed();
        assert!(took < Duration::from_secs(30), "{took:?}");
        children[victim].wait().expect("reaped");
    }
}
