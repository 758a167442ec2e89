//! Measures collectives between processes of this host and prints a JSON row per size.
//!
//!     cargo run --release --example shm_bench -- --ranks 2 --op all_reduce --bytes 4,1024,1048576

#[path = "../tests/support/mod.rs"]
mod support;

use kolo_comm::{Communicator, Fault, Kind, Watch, bench, shm};
use std::process::Command;

struct Options {
    ranks: usize,
    rank: Option<usize>,
    folder: std::path::PathBuf,
    op: String,
    bytes: String,
    iterations: usize,
    private: bool,
}

fn options() -> Options {
    let folder = std::env::temp_dir().join(format!("shm-bench-{}", std::process::id()));
    let (op, bytes) =
        ("all_reduce".to_string(), "4,64,512,2048,16384,65536,262144,1048576,4194304,16777216,67108864".into());
    let mut options = Options { ranks: 2, rank: None, folder, op, bytes, iterations: 4000, private: false };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        if word == "--private" {
            options.private = true;
            continue;
        }
        let value = words.next().expect("every option has a value");
        match word.as_str() {
            "--ranks" => options.ranks = value.parse().expect("a number of ranks"),
            "--rank" => options.rank = Some(value.parse().expect("a rank")),
            "--folder" => options.folder = value.into(),
            "--op" => options.op = value,
            "--bytes" => options.bytes = value,
            "--iterations" => options.iterations = value.parse().expect("a number"),
            other => panic!("unknown option {other}"),
        }
    }
    options
}

/// Pins this process to the processor of its rank.
fn pin(rank: usize) {
    let processors = std::thread::available_parallelism().map_or(1, |number| number.get());
    let mask = [1u64 << (rank % processors.min(64))];
    // SAFETY: the mask has this length.
    unsafe { libc::sched_setaffinity(0, 8, mask.as_ptr().cast()) };
}

fn main() {
    let options = options();
    let Some(rank) = options.rank else { return launch(&options) };
    pin(rank);
    let watch = Watch::alone();
    let mut bootstrap = support::Folder::new(&options.folder, rank, options.ranks);
    let transport = shm::connect(rank, options.ranks, watch.clone(), &mut bootstrap).expect("ranks of one host");
    let comm = Communicator::new(transport, watch, true);
    let sizes: Vec<usize> = options.bytes.split(',').map(|size| size.parse().expect("bytes")).collect();
    for row in rows(&comm, &options, &sizes).expect("the measurement") {
        if rank == 0 {
            println!("{}", row.json());
        }
    }
}

fn rows(comm: &Communicator, options: &Options, sizes: &[usize]) -> Result<Vec<bench::Row>, Fault> {
    if options.op == "copy" {
        return bench::copy_limit(comm, sizes, options.iterations);
    }
    let kind = Kind::ALL.into_iter().find(|kind| kind.name() == options.op).expect("a collective's name");
    let sweep = if options.private { bench::sweep_private } else { bench::sweep };
    sweep(comm, kind, sizes, options.iterations)
}

fn launch(options: &Options) {
    std::fs::create_dir_all(&options.folder).expect("a temporary folder");
    let program = std::env::current_exe().expect("this program");
    let start = |rank: usize| {
        let mut command = Command::new(&program);
        command.args(["--ranks", &options.ranks.to_string(), "--rank", &rank.to_string(), "--op", &options.op]);
        command.args(["--bytes", &options.bytes, "--iterations", &options.iterations.to_string()]);
        command.arg("--folder").arg(&options.folder).args(options.private.then_some("--private"));
        command.spawn().expect("a process")
    };
    let children: Vec<_> = (0..options.ranks).map(start).collect();
    let fine = children.into_iter().all(|mut child| child.wait().is_ok_and(|status| status.success()));
    std::fs::remove_dir_all(&options.folder).expect("the temporary folder");
    assert!(fine, "a rank failed");
}
