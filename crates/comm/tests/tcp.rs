//! Ranks over real sockets: what they compute, what they reject, and whom they name.

mod tcp {
    pub mod fuzz;
    pub mod killed;
    pub mod support;
    pub mod tampering;
    pub mod unauthenticated;
}

use kolo_comm::tcp::TcpWire;
use kolo_comm::wire::Wire;
use kolo_comm::{Communicator, Fault, Reduction};
use std::time::Duration;
use tcp::support::{call, finish, group, options, wires};

#[global_allocator]
static ALLOCATOR: tcp::fuzz::Counting = tcp::fuzz::Counting;

/// Every kind of call once, against what it should give.
fn all_calls(comm: &Communicator) -> Result<(), Fault> {
    let (rank, size) = (comm.rank(), comm.size());
    let mut data: Vec<i64> = (0..10_007).map(|at| (rank + 1) as i64 * at).collect();
    comm.all_reduce(&mut data, Reduction::Sum)?;
    let ranks = (size * (size + 1) / 2) as i64;
    assert!(data.iter().enumerate().all(|(at, value)| *value == ranks * at as i64));
    let mut data = vec![rank as f32; 3000];
    comm.broadcast(&mut data, size - 1)?;
    assert_eq!(data, vec![(size - 1) as f32; 3000]);
    let mut all = vec![0u8; 5 * size];
    comm.all_gather(&[rank as u8; 5], &mut all)?;
    assert!(all.iter().enumerate().all(|(at, value)| *value as usize == at / 5));
    let mut turned = vec![0i32; 700 * size];
    comm.all_to_all(&vec![rank as i32; 700 * size], &mut turned)?;
    assert!(turned.iter().enumerate().all(|(at, value)| *value as usize == at / 700));
    let mut running = vec![1i32; 9];
    comm.scan(&mut running, Reduction::Sum)?;
    assert_eq!(running, vec![rank as i32 + 1; 9]);
    if size > 1 {
        messages(comm)?;
    }
    comm.barrier()
}

/// Round the circle.
fn messages(comm: &Communicator) -> Result<(), Fault> {
    let (rank, size) = (comm.rank(), comm.size());
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    let (mine, mut got) = (vec![rank as f64; 2500], vec![0f64; 2500]);
    if rank == 0 {
        comm.send(&mine, next)?;
        comm.recv(&mut got, before)?;
    } else {
        comm.recv(&mut got, before)?;
        comm.send(&mine, next)?;
    }
    assert_eq!(got, vec![before as f64; 2500]);
    Ok(())
}

#[test]
fn every_call_on_every_size_with_one_and_more_streams() {
    for (size, streams) in [(1, 1), (2, 1), (2, 4), (3, 2), (4, 1)] {
        let mut options = options();
        // Small segments: messages come in many parts on all streams.
        (options.streams, options.segment_bytes, options.held_bytes_max) = (streams, 1000, 4000);
        group(size, options, |comm| {
            all_calls(&comm).unwrap();
            let half = comm.split((comm.rank() % 2) as i64, -(comm.rank() as i64)).unwrap();
            all_calls(&half).unwrap();
            all_calls(&comm).unwrap();
        });
    }
}

#[test]
fn ranks_that_disagree_all_name_both_calls() {
    let faults = group(3, options(), |comm| {
        let count = if comm.rank() == 1 { 77 } else { 78 };
        // Who is still in the barrier when others already disagree learns of it there.
        let outcome = comm.barrier().and_then(|()| comm.all_reduce(&mut vec![1f32; count], Reduction::Sum));
        outcome.expect_err("the ranks disagree")
    });
    for fault in faults {
        let Fault::Mismatch { rank, mine, peer, theirs, .. } = &fault else { panic!("{fault}") };
        assert!(*rank == 1 || *peer == 1, "{fault}");
        assert_eq!(mine.count + theirs.count, 77 + 78, "{fault}");
    }
}

#[test]
fn ranks_that_wait_for_each_other_in_different_calls_find_out() {
    let faults = group(2, options(), |comm| {
        // Both wait for the other one's data; nobody sends any.
        comm.broadcast(&mut [0f32; 8], 1 - comm.rank()).unwrap_err()
    });
    assert!(faults.iter().all(|fault| matches!(fault, Fault::Mismatch { .. })), "{faults:?}");
}

#[test]
fn who_sent_what_the_other_did_not_expect_learns_why() {
    let faults = group(3, options(), |comm| match comm.rank() {
        0 => comm.send(&[1i32; 4], 1).and_then(|()| comm.barrier()).unwrap_err(),
        1 => comm.recv(&mut [0i64; 4], 0).unwrap_err(),
        _ => comm.barrier().unwrap_err(),
    });
    assert!(faults.iter().all(|fault| matches!(fault, Fault::Mismatch { .. })), "{faults:?}");
    assert!(matches!(&faults[0], Fault::Mismatch { rank: 0, peer: 1, .. }), "{}", faults[0]);
}

#[test]
fn what_nobody_asked_for_stays_within_its_limit() {
    let mut options = options();
    options.held_bytes_max = 100_000;
    let mut wires = wires(2, options);
    let (mut receiver, mut sender) = (wires.remove(0), wires.remove(0));
    let messages: Vec<Vec<u8>> = (0..300usize).map(|at| vec![at as u8; at * 100]).collect();
    let post = |wire: &mut TcpWire, message: &Vec<u8>, number: usize| {
        // SAFETY: the messages outlive the wires' work.
        unsafe { wire.send(0, &call(number), message.as_ptr(), message.len()) }.unwrap()
    };
    let sent: Vec<u64> = messages.iter().enumerate().map(|(at, message)| post(&mut sender, message, at)).collect();
    let mut held_bytes_max = 0;
    for _ in 0..2000 {
        sender.progress().unwrap();
        receiver.progress().unwrap();
        held_bytes_max = held_bytes_max.max(receiver.held_bytes());
    }
    assert!(held_bytes_max > 50_000 && held_bytes_max <= 100_000, "{held_bytes_max}");
    let mut places: Vec<Vec<u8>> = messages.iter().map(|message| vec![255; message.len()]).collect();
    let place = |(at, place): (usize, &mut Vec<u8>)| {
        // SAFETY: as above.
        unsafe { receiver.recv(1, &call(at), place.as_mut_ptr(), place.len()) }.unwrap()
    };
    let received: Vec<u64> = places.iter_mut().enumerate().map(place).collect();
    finish(&mut [&mut receiver, &mut sender], |wires| {
        received.iter().all(|number| wires[0].received(*number)) && sent.iter().all(|number| wires[1].sent(*number))
    });
    assert_eq!(places, messages);
    assert_eq!(receiver.held_bytes(), 0);
}

#[test]
fn who_leaves_in_order_is_no_loss_until_needed() {
    let faults = group(3, options(), |comm| {
        comm.barrier().unwrap();
        if comm.rank() == 2 {
            return None;
        }
        // The two that stay can still talk; only the last word may be overtaken by the failure after it.
        let mut value = [comm.rank() as f32];
        for turn in 0..20 {
            let talk = match comm.rank() {
                0 => comm.send(&value, 1).and_then(|()| comm.recv(&mut value, 1)),
                _ => comm.recv(&mut value, 0).and_then(|()| comm.send(&value, 0)),
            };
            assert!(talk.is_ok() || turn == 19, "{talk:?}");
        }
        Some(comm.barrier().unwrap_err())
    });
    for fault in faults.into_iter().flatten() {
        assert!(matches!(fault, Fault::Lost { peer: 2, .. }), "{fault}");
    }
}

#[test]
fn nothing_is_awaited_from_one_who_left() {
    group(2, options(), |comm| {
        comm.barrier().unwrap();
        if comm.rank() == 1 {
            // Its goodbye comes in the next call of the other.
            comm.send(&[1u8], 0).unwrap();
            return;
        }
        comm.recv(&mut [0u8], 1).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        // Whether the goodbye is read before the place is named or after.
        for _ in 0..2 {
            let fault = comm.recv(&mut [0u8], 1).unwrap_err();
            assert!(matches!(fault, Fault::Lost { peer: 1, .. }), "{fault}");
        }
    });
}

#[test]
fn all_blame_the_one_who_does_not_come() {
    let mut options = options();
    options.segment_bytes = 1000;
    let faults = group(4, options, |comm| {
        if comm.rank() == 1 {
            // Longer than the others' patience.
            std::thread::sleep(Duration::from_secs(8));
            return None;
        }
        Some(comm.all_reduce(&mut [1f32; 3000], Reduction::Sum).unwrap_err())
    });
    for fault in faults.into_iter().flatten() {
        assert_eq!(fault.culprit(), Some(1), "{fault}");
    }
}
