//! Ranks as processes, one of which is killed: all others name it, at once.

use super::support::watch;
use kolo_comm::tcp::{TcpOptions, connect};
use kolo_comm::{Bootstrap, Communicator, Fault, JobKey, Reduction};
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZE: usize = 4;
/// Turns this test binary into a rank.
const RANK: &str = "KOLO_TEST_TCP_RANK";

/// Addresses go out by standard output and come in by standard input.
struct Pipes;

impl Bootstrap for Pipes {
    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Fault> {
        println!("blob {}", mine.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        let mut blobs = vec![0; SIZE * mine.len()];
        std::io::stdin().read_exact(&mut blobs).unwrap();
        Ok(blobs.chunks(mine.len()).map(<[u8]>::to_vec).collect())
    }
}

/// One rank: reduces for ever, and says what ended it.
#[test]
fn rank_of_a_test() {
    let Ok(rank) = std::env::var(RANK) else { return };
    let key = JobKey::read_from(&mut std::io::stdin()).unwrap();
    let watch = watch(SIZE);
    let transport =
        connect(rank.parse().unwrap(), SIZE, TcpOptions::local(key, 1), Arc::clone(&watch), &mut Pipes).unwrap();
    let comm = Communicator::new(transport, watch, true);
    let mut data = vec![0f32; 100_000];
    for turn in 0.. {
        if turn == 20 {
            println!("running");
        }
        if let Err(fault) = comm.all_reduce(&mut data, Reduction::Sum) {
            println!("culprit {:?} {}", fault.culprit(), fault.to_string().replace('\n', " "));
            return;
        }
    }
}

struct Rank {
    process: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Rank {
    fn start(rank: usize) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tcp::killed::rank_of_a_test", "--nocapture", "--test-threads=1"])
            .env(RANK, rank.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        Self { process, input, output: BufReader::new(output).lines() }
    }

    /// The rest of the next line that says `word`.
    fn hear(&mut self, word: &str) -> String {
        loop {
            let line = self.output.next().expect("the rank still speaks").unwrap();
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().into();
            }
        }
    }
}

#[test]
fn a_killed_rank_is_named_by_all_others_at_once() {
    let key = JobKey::fresh().unwrap();
    let mut ranks: Vec<Rank> = (0..SIZE).map(Rank::start).collect();
    ranks.iter_mut().for_each(|rank| key.write_to(&mut rank.input).unwrap());
    let blobs: Vec<String> = ranks.iter_mut().map(|rank| rank.hear("blob ")).collect();
    let digits = blobs.concat();
    let bytes: Vec<u8> =
        (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect();
    ranks.iter_mut().for_each(|rank| rank.input.write_all(&bytes).unwrap());
    ranks.iter_mut().for_each(|rank| drop(rank.hear("running")));
    let start = Instant::now();
    ranks[2].process.kill().unwrap();
    for rank in [0, 1, 3] {
        let said = ranks[rank].hear("culprit ");
        assert!(said.starts_with("Some(2)"), "rank {rank} said {said}");
        assert!(said.contains("rank 2 on node2 was lost"), "rank {rank} said {said}");
    }
    let elapsed = start.elapsed();
    println!("all named it after {elapsed:?}");
    assert!(elapsed < Duration::from_secs(30), "{elapsed:?}");
    for rank in &mut ranks {
        rank.process.wait().unwrap();
    }
}
