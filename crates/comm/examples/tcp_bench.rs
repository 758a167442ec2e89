//! Measures collectives between processes over TCP on this host and prints a JSON row per size.
//!
//!     cargo run --release --example tcp_bench -- --ranks 2 --op all_reduce --bytes 4,1024,1048576

#[path = "../tests/support/mod.rs"]
mod support;

use kolo_comm::tcp::{TcpOptions, connect};
use kolo_comm::{Communicator, JobKey, Kind, Watch, bench};
use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Arc;

const DEFAULTS: [(&str, &str); 7] = [
    ("ranks", "2"),
    ("op", "all_reduce"),
    ("bytes", "4,1024,16384,262144,1048576,8388608,67108864"),
    ("iterations", "4000"),
    ("streams", "1"),
    ("segment", "262144"),
    ("socket", "1048576"),
];

fn main() {
    let mut options: BTreeMap<String, String> =
        DEFAULTS.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
    let words: Vec<String> = std::env::args().skip(1).collect();
    options.extend(words.chunks(2).map(|pair| (pair[0].trim_start_matches("--").to_string(), pair[1].clone())));
    match options.get("rank").cloned() {
        Some(rank) => measure(&options, rank.parse().expect("a rank")),
        None => launch(&options),
    }
}

fn measure(options: &BTreeMap<String, String>, rank: usize) {
    let number = |name: &str| options[name].parse::<usize>().expect("a number");
    let key = JobKey::read_from(&mut std::io::stdin()).expect("a key");
    let mut tcp = TcpOptions::local(key, 1);
    (tcp.streams, tcp.segment_bytes, tcp.socket_bytes) = (number("streams"), number("segment"), number("socket"));
    let watch = Watch::alone();
    let size = number("ranks");
    let mut bootstrap = support::Folder::new(options["folder"].as_ref(), rank, size);
    let transport = connect(rank, size, tcp, Arc::clone(&watch), &mut bootstrap).expect("ranks that meet");
    let comm = Communicator::new(transport, watch, true);
    let kind = Kind::ALL.into_iter().find(|kind| kind.name() == options["op"]).expect("a collective's name");
    let sizes: Vec<usize> = options["bytes"].split(',').map(|size| size.parse().expect("bytes")).collect();
    for row in bench::sweep(&comm, kind, &sizes, number("iterations")).expect("the measurement") {
        if rank == 0 {
            println!("{}", row.json());
        }
    }
}

fn launch(options: &BTreeMap<String, String>) {
    let folder = std::env::temp_dir().join(format!("tcp-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    let key = JobKey::fresh().expect("a key");
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(options.iter().flat_map(|(name, value)| [format!("--{name}"), value.clone()]));
        command.args(["--rank", &rank.to_string()]).arg("--folder").arg(&folder).stdin(Stdio::piped());
        let mut child = command.spawn().expect("a process");
        let mut pipe = child.stdin.take().expect("its input");
        key.write_to(&mut pipe).and_then(|()| pipe.flush()).expect("a process that reads");
        child
    };
    let children: Vec<_> = (0..options["ranks"].parse().expect("a number of ranks")).map(start).collect();
    let outcomes: Vec<bool> =
        children.into_iter().map(|mut child| child.wait().is_ok_and(|status| status.success())).collect();
    std::fs::remove_dir_all(&folder).expect("the temporary folder");
    assert!(outcomes.iter().all(|fine| *fine), "a rank failed");
}
