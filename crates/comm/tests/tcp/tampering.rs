//! A proxy between two ranks that flips bits, cuts, repeats and invents: whatever it does, no wrong result comes out.

use super::support::{Meeting, communicator, options};
use kolo_comm::auth::{HELLO_BYTES, PROOF_BYTES};
use kolo_comm::record::TAG_BYTES;
use kolo_comm::tcp::frame::HEADER_BYTES;
use kolo_comm::{Fault, Reduction};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

/// What happens to the bytes that go one way; the place is counted from the start of the first connection.
#[derive(Clone, Copy, Debug)]
enum Trick {
    None,
    Flip(usize),
    Cut(usize),
    /// So many bytes from there on come twice.
    Repeat(usize, usize),
    /// Noise is put in between.
    Invent(usize),
    /// Two neighbouring runs of so many bytes change places.
    Swap(usize, usize),
}

impl Trick {
    fn apply(self, bytes: &mut Vec<u8>, from: usize) -> bool {
        let at = |place: usize| place.checked_sub(from).filter(|at| *at < bytes.len());
        match self {
            Trick::Flip(place) => at(place).into_iter().for_each(|at| bytes[at] ^= 1 << (place % 8)),
            Trick::Cut(place) => {
                if let Some(at) = at(place) {
                    bytes.truncate(at);
                    return false;
                }
            }
            Trick::Repeat(place, count) => {
                if let Some(at) = at(place) {
                    let again = bytes[at..bytes.len().min(at + count)].to_vec();
                    bytes.splice(at..at, again);
                }
            }
            Trick::Invent(place) => {
                if let Some(at) = at(place) {
                    bytes.splice(at..at, [0x5a; 300]);
                }
            }
            Trick::Swap(place, count) => {
                if let Some(at) = at(place).filter(|at| at + 2 * count <= bytes.len()) {
                    bytes[at..at + 2 * count].rotate_left(count);
                }
            }
            Trick::None => {}
        }
        true
    }
}

/// Passes bytes on until the end of either side.
fn pass(mut from: TcpStream, mut to: TcpStream, trick: Trick) {
    let (mut place, mut buffer) = (0, vec![0; 1 << 16]);
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let mut bytes = buffer[..count].to_vec();
        let going = trick.apply(&mut bytes, place);
        place += count;
        if to.write_all(&bytes).is_err() || !going {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// A proxy to `port`; tricks are played on its first connection only.
fn proxy(port: impl FnOnce() -> u16 + Send + 'static, up: Trick, down: Trick) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let port = port();
        for (number, client) in listener.incoming().flatten().enumerate() {
            let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { return };
            let tricks = if number == 0 { (up, down) } else { (Trick::None, Trick::None) };
            let (client_too, server_too) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || pass(client, server, tricks.0));
            std::thread::spawn(move || pass(server_too, client_too, tricks.1));
        }
    });
    own
}

const COUNT: usize = 50_000;

/// Two ranks, the proxy between them, three calls. What each came to; a result that is there is right.
fn run(up: Trick, down: Trick) -> [Result<(), Fault>; 2] {
    let mut options = options();
    (options.segment_bytes, options.connect_timeout) = (10_000, Duration::from_secs(10));
    options.handshake_timeout = Duration::from_secs(2);
    let meeting = Meeting::new(2);
    let known = meeting.clone();
    let meeting = meeting.by(proxy(move || known.port(0), up, down));
    let work = |rank: usize| {
        let comm = communicator(rank, 2, options.clone(), &mut meeting.of(rank))?;
        for turn in 0..3 {
            let mut data: Vec<i32> = (0..COUNT as i32).map(|at| at + turn).collect();
            comm.all_reduce(&mut data, Reduction::Sum)?;
            assert!(data.iter().enumerate().all(|(at, value)| *value == 2 * (at as i32 + turn)), "{up:?} {down:?}");
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| work(0));
        let one = work(1);
        [other.join().unwrap(), one]
    })
}

/// Tampering was noticed as such by one of the two, and neither went on.
fn assert_rejected(outcomes: [Result<(), Fault>; 2], what: &str) {
    assert!(outcomes.iter().all(Result::is_err), "{what}: {outcomes:?}");
    assert!(outcomes.iter().any(|outcome| matches!(outcome, Err(Fault::Rejected { .. }))), "{what}: {outcomes:?}");
}

/// Where the frames begin: behind hello and proof on the way up, behind the reply on the way down.
const UP: usize = HELLO_BYTES + PROOF_BYTES;
const DOWN: usize = HELLO_BYTES;

#[test]
fn an_honest_proxy_is_no_trouble() {
    assert_eq!(run(Trick::None, Trick::None), [Ok(()), Ok(())]);
}

#[test]
fn a_flipped_bit_anywhere_in_a_frame_is_rejected() {
    let classes = [
        ("a header's first byte", 0),
        ("a header's length", 4),
        ("a header's message number", 24),
        ("a header's offset", 41),
        ("a header's call", 60),
        ("a header's authenticator", HEADER_BYTES - 3),
        ("a payload's first byte", HEADER_BYTES),
        ("a payload's middle", HEADER_BYTES + 5000),
        ("a payload's last byte", HEADER_BYTES + 9_999),
        ("a payload's authenticator", HEADER_BYTES + 10_000 + TAG_BYTES - 1),
        ("a later header", HEADER_BYTES + 10_000 + TAG_BYTES + 9),
    ];
    for (what, place) in classes {
        assert_rejected(run(Trick::Flip(UP + place), Trick::None), what);
        assert_rejected(run(Trick::None, Trick::Flip(DOWN + place)), what);
    }
}

#[test]
fn a_flipped_bit_in_the_handshake_lets_nobody_in() {
    // The end that connects tries again, unless it already believes in the link.
    for place in [0, 9, 14, 30, 50, 74, 79, 81, 111] {
        assert_eq!(run(Trick::Flip(place), Trick::None), [Ok(()), Ok(())], "hello byte {place}");
        assert_eq!(run(Trick::None, Trick::Flip(place)), [Ok(()), Ok(())], "reply byte {place}");
    }
    let outcomes = run(Trick::Flip(HELLO_BYTES + 5), Trick::None);
    assert!(outcomes.iter().all(Result::is_err), "a proof: {outcomes:?}");
}

#[test]
fn repeats_inventions_and_swaps_are_rejected() {
    let frame = HEADER_BYTES + 10_000 + TAG_BYTES;
    assert_rejected(run(Trick::Repeat(UP, frame), Trick::None), "a frame twice");
    assert_rejected(run(Trick::Repeat(UP + HEADER_BYTES, 64), Trick::None), "bytes twice");
    assert_rejected(run(Trick::Invent(UP), Trick::None), "noise before the first frame");
    assert_rejected(run(Trick::None, Trick::Invent(DOWN + frame)), "noise between frames");
    assert_rejected(run(Trick::Swap(UP, 64), Trick::None), "swapped pieces");
}

#[test]
fn a_cut_link_is_a_loss_at_once() {
    for place in [0, 70, HEADER_BYTES, HEADER_BYTES + 300, HEADER_BYTES + 10_000] {
        let outcomes = run(Trick::Cut(UP + place), Trick::None);
        for (rank, outcome) in outcomes.iter().enumerate() {
            assert!(matches!(outcome, Err(Fault::Lost { peer, .. }) if *peer == 1 - rank), "{place}: {outcome:?}");
        }
    }
}
