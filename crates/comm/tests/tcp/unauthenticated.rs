//! Those who do not belong to the job: they get no answer and hold nobody up.

use super::support::{Meeting, communicator, options};
use kolo_comm::auth::{HELLO_BYTES, Initiator, PROOF_BYTES};
use kolo_comm::{Fault, Identity, JobKey, LinkRole, Reduction};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    stream
}

/// All that comes back within the time limit.
fn answer(mut stream: &TcpStream) -> usize {
    let (mut bytes, mut buffer) = (0, [0; 1024]);
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        bytes += count;
    }
    bytes
}

/// Lets `visit` call on rank 0 while it waits for rank 1; then both must find together and work.
fn visited(options: kolo_comm::tcp::TcpOptions, visit: impl FnOnce(u16, &kolo_comm::tcp::TcpOptions)) {
    let meeting = Meeting::new(2);
    std::thread::scope(|scope| {
        let work = |rank: usize| {
            let comm = communicator(rank, 2, options.clone(), &mut meeting.of(rank)).unwrap();
            let mut data = [1f32; 100];
            comm.all_reduce(&mut data, Reduction::Sum).unwrap();
            assert_eq!(data, [2f32; 100]);
        };
        scope.spawn(move || work(0));
        // Rank 0 goes on to wait for rank 1 at its listener.
        meeting.pretend(1);
        let port = meeting.port(0);
        visit(port, &options);
        let start = Instant::now();
        work(1);
        assert!(start.elapsed() < options.connect_timeout / 2, "strangers held the job up for {:?}", start.elapsed());
        let _ = TcpStream::connect(("127.0.0.1", port)).expect_err("a running job has no open port");
    });
}

#[test]
fn a_port_scan_gets_no_byte() {
    visited(options(), |port, _| {
        let silent = connect(port);
        let probes: [&[u8]; 5] = [
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            &[0; HELLO_BYTES],
            &[7; 1000],
            b"k",
        ];
        for probe in probes {
            let mut stream = connect(port);
            stream.write_all(probe).unwrap();
            assert_eq!(answer(&stream), 0, "{probe:?}");
        }
        assert_eq!(answer(&silent), 0);
    });
}

#[test]
fn slow_strangers_hold_nobody_up() {
    let mut slow = Vec::new();
    visited(options(), |port, _| {
        for _ in 0..200 {
            let mut stream = connect(port);
            let _ = stream.write_all(b"kolo");
            slow.push(stream);
        }
    });
}

#[test]
fn a_recorded_hello_and_an_older_generation_lead_nowhere() {
    let mut options = options();
    options.generation = 5;
    visited(options, |port, options| {
        let initiator = |generation: u64, rank: usize| {
            let me = Identity::new(LinkRole::Data, rank, options.job, generation);
            Initiator::new(&options.key, me, None).unwrap()
        };
        // What a recorder could have: an authentic hello, and a proof of another talk.
        let mut replay = connect(port);
        replay.write_all(initiator(5, 1).hello()).unwrap();
        replay.write_all(&[9; PROOF_BYTES]).unwrap();
        assert_eq!(answer(&replay), HELLO_BYTES, "the reply, and then the end");
        for (generation, rank) in [(4, 1), (6, 1), (5, 0), (5, 2)] {
            let mut late = connect(port);
            late.write_all(initiator(generation, rank).hello()).unwrap();
            assert_eq!(answer(&late), 0, "generation {generation} rank {rank}");
        }
    });
}

#[test]
fn ranks_with_different_keys_do_not_meet() {
    let mut options = options();
    options.connect_timeout = Duration::from_secs(2);
    let other = kolo_comm::tcp::TcpOptions { key: JobKey::fresh().unwrap(), ..options.clone() };
    let meeting = Meeting::new(2);
    std::thread::scope(|scope| {
        let meet = |rank: usize, options| communicator(rank, 2, options, &mut meeting.of(rank)).unwrap_err();
        let zero = scope.spawn(move || meet(0, options));
        assert!(matches!(meet(1, other), Fault::Stalled { peer: 0, .. }));
        assert!(matches!(zero.join().unwrap(), Fault::Stalled { peer: 1, .. }));
    });
}

#[test]
fn all_interfaces_are_refused() {
    let mut options = options();
    options.listen = "0.0.0.0".parse().unwrap();
    assert!(matches!(communicator(0, 1, options, &mut Meeting::new(1)), Err(Fault::BadCall(_))));
}
