//! More than a million frames and records, honest, damaged and invented, through the readers: none is taken for what it is
//! not, and memory stays within its limits.

use super::support::call;
use kolo_comm::record::{HEADER_BYTES, Opener, RECORD_BYTES_MAX, RecordKind, RecordReader, Sealer, seal_record};
use kolo_comm::tcp::frame::{Frame, JobGeneration, PLAIN_BYTES};
use kolo_comm::tcp::inbox::Inbox;
use kolo_comm::tcp::reader::{FrameReader, StreamStop};
use kolo_comm::tcp::writer::{FrameWriter, Outbox};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, with the bytes that this thread holds and has held at most.
pub struct Counting;

thread_local! {
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

fn count(bytes: isize) {
    // A thread that ends has no counter any more.
    let _ = HELD.try_with(|held| {
        let (now, most) = held.get();
        held.set((now + bytes, most.max(now + bytes)));
    });
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, data: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(data, layout) }
    }
}

/// Bytes held at most while `work` ran, beyond what was held before.
fn most_bytes(work: impl FnOnce()) -> usize {
    let before = HELD.with(|held| {
        held.set((held.get().0, held.get().0));
        held.get().0
    });
    work();
    HELD.with(|held| held.get().1 - before) as usize
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// A seed of its own for each run, printed so that a failure can be repeated.
fn seed(name: &str) -> Random {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = std::env::var("KOLO_FUZZ_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(now);
    println!("{name}: KOLO_FUZZ_SEED={seed} repeats it");
    Random(seed)
}

const ERA: JobGeneration = JobGeneration { job: 1, generation: 2 };
const KEY: [u8; 16] = [42; 16];
const MESSAGES: usize = 40;
const HELD_BYTES_MAX: usize = 64 << 10;

/// Damages a stream; the place before which it is as it was.
fn damage(stream: &mut Vec<u8>, random: &mut Random) -> usize {
    let at = random.below(stream.len());
    match random.below(6) {
        0 => stream[at] ^= 1 << random.below(8),
        1 => stream.truncate(at),
        2 => {
            let count = 1 + random.below(200);
            let again = stream[at..stream.len().min(at + count)].to_vec();
            stream.splice(at..at, again);
        }
        3 => drop(stream.drain(at..(at + 1 + random.below(200)).min(stream.len()))),
        4 => drop(stream.splice(at..at, (0..64).map(|_| random.next() as u8).collect::<Vec<_>>())),
        _ => stream[at..].iter_mut().for_each(|byte| *byte = random.next() as u8),
    }
    at
}

/// Streams of small frames, damaged somewhere; `MESSAGES` frames each.
#[test]
fn damaged_frames_are_never_taken_for_whole_ones() {
    let mut random = seed("frames");
    let rounds = 15_000;
    let text: Vec<u8> = (0..200).map(|at| at as u8).collect();
    let most = most_bytes(|| {
        for _ in 0..rounds {
            let mut outbox = Outbox::new(100);
            let mut writer = FrameWriter::new(Sealer::new(KEY), ERA, 100);
            let lengths: Vec<usize> = (0..MESSAGES).map(|_| random.below(60)).collect();
            for (number, length) in lengths.iter().enumerate() {
                outbox.push(&call(number), text.as_ptr(), *length);
            }
            let mut stream = Vec::new();
            // SAFETY: the text outlives the outbox.
            while unsafe { writer.pump(&mut stream, &mut outbox) }.unwrap() {}
            let honest = stream.clone();
            damage(&mut stream, &mut random);
            let whole = stream.iter().zip(&honest).take_while(|(now, then)| now == then).count();
            let taken = swallow(&stream, &lengths, &text);
            let ends = lengths.iter().scan(0, |end, length| {
                *end += 128 + if *length > 0 { length + 16 } else { 0 };
                Some(*end)
            });
            assert!(taken <= ends.filter(|end| *end <= whole).count(), "a damaged frame was taken");
        }
    });
    assert!(most < 1 << 20, "{most} bytes");
}

/// Reads a stream into receives for all messages; how many came.
fn swallow(stream: &[u8], lengths: &[usize], text: &[u8]) -> usize {
    let mut reader = FrameReader::new(Opener::new(KEY), ERA);
    let mut inbox = Inbox::new(HELD_BYTES_MAX);
    let mut places: Vec<Vec<u8>> = lengths.iter().map(|length| vec![0; *length]).collect();
    for (number, place) in places.iter_mut().enumerate() {
        inbox.post(&call(number), place.as_mut_ptr(), place.len()).unwrap();
    }
    let mut source = stream;
    // SAFETY: the places outlive the inbox's work.
    while unsafe { reader.pump(&mut source, &mut inbox) }.is_ok() {}
    let come: Vec<usize> = (0..lengths.len()).filter(|number| inbox.done(*number as u64)).collect();
    assert!(come.iter().all(|number| places[*number] == text[..lengths[*number]]));
    come.len()
}

/// Headers of a peer that holds the key and lies: each is refused or fits what was asked for.
#[test]
fn lying_headers_do_no_harm() {
    let mut random = seed("headers");
    let era_bytes = [ERA.job.to_le_bytes(), ERA.generation.to_le_bytes()].concat();
    let (mut refused, mut frames) = (0, 0);
    let most = most_bytes(|| {
        while frames < 400_000 {
            let mut sealer = Sealer::new(KEY);
            let mut stream = vec![0; 16 * (PLAIN_BYTES + 16)];
            for slot in stream.chunks_exact_mut(PLAIN_BYTES + 16) {
                let mut plain = [0; PLAIN_BYTES];
                plain[4..56]
                    .iter_mut()
                    .for_each(|byte| *byte = if random.below(3) == 0 { random.next() as u8 } else { 0 });
                plain[0] = random.below(5) as u8;
                plain[8..24].copy_from_slice(&era_bytes);
                plain[56..].copy_from_slice(&call(0).encode());
                sealer.seal(&plain, slot);
                frames += 1;
            }
            let mut reader = FrameReader::new(Opener::new(KEY), ERA);
            let mut inbox = Inbox::new(HELD_BYTES_MAX);
            let mut place = vec![0; 300];
            inbox.post(&call(0), place.as_mut_ptr(), place.len()).unwrap();
            let mut source = &stream[..];
            let stop = loop {
                // SAFETY: the place outlives the inbox's work.
                match unsafe { reader.pump(&mut source, &mut inbox) } {
                    Ok(_) if reader.awaits_buffer() => break None,
                    Ok(_) => {}
                    Err(stop) => break Some(stop),
                }
            };
            refused += usize::from(matches!(stop, Some(StreamStop::Malformed(_) | StreamStop::Mismatch { .. })));
            assert!(inbox.held_bytes() <= HELD_BYTES_MAX);
        }
    });
    assert!(refused > 10_000, "{refused}");
    assert!(most < 1 << 20, "{most} bytes");
    let zero = [0; PLAIN_BYTES];
    assert!(Frame::decode(&zero, ERA).is_err());
}

#[test]
fn damaged_records_are_never_taken_for_whole_ones() {
    let mut random = seed("records");
    let most = most_bytes(|| {
        for _ in 0..20_000 {
            let mut sealer = Sealer::new(KEY);
            let (mut stream, mut ends) = (Vec::new(), Vec::new());
            for number in 0..20u8 {
                let payload = vec![number; random.below(80)];
                seal_record(&mut sealer, RecordKind::Data, &payload, &mut stream);
                ends.push(stream.len());
            }
            let honest = stream.clone();
            damage(&mut stream, &mut random);
            let whole = stream.iter().zip(&honest).take_while(|(now, then)| now == then).count();
            let (mut reader, mut record, mut source) = (RecordReader::new(Opener::new(KEY)), Vec::new(), &stream[..]);
            let mut taken = 0;
            while !source.is_empty() {
                let space = reader.space();
                let count = space.len().min(source.len()).min(1 + random.below(50));
                space[..count].copy_from_slice(&source[..count]);
                source = &source[count..];
                match reader.filled(count, &mut record) {
                    Ok(Some(_)) => {
                        assert!(record.iter().all(|byte| *byte == taken));
                        taken += 1;
                    }
                    Ok(None) => {}
                    Err(_) => break,
                }
            }
            assert!(
                usize::from(taken) <= ends.iter().filter(|end| **end <= whole).count(),
                "a damaged record was taken"
            );
        }
    });
    assert!(most < 1 << 20, "{most} bytes");
}

/// Even a peer that holds the key cannot ask for more memory than a record may have.
#[test]
fn the_length_of_a_record_is_limited() {
    for length in [RECORD_BYTES_MAX as u32 + 1, u32::MAX] {
        let mut header = [0; 8];
        header[..4].copy_from_slice(&length.to_le_bytes());
        header[4] = 1;
        let mut stream = [0; HEADER_BYTES];
        Sealer::new(KEY).seal(&header, &mut stream);
        let mut reader = RecordReader::new(Opener::new(KEY));
        reader.space().copy_from_slice(&stream);
        let most = most_bytes(|| assert!(reader.filled(HEADER_BYTES, &mut Vec::new()).is_err()));
        assert!(most < 4096, "{most} bytes");
    }
}
