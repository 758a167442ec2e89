//! Workers of many characters.

use kolo_cluster::Member;
use kolo_cluster::join::{self, Discovery, JoinOptions};
use kolo_cluster::startup_watch::StartupWatch;
use kolo_comm::call::short_name;
use kolo_comm::{Bootstrap, CallKind, ElementType, Fault, Fingerprint, Reduction};
use std::os::unix::process::CommandExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub const PRINTED: usize = 10;

fn call(sequence: u64) -> Fingerprint {
    Fingerprint {
        communicator: 0,
        kind: CallKind::AllReduce,
        element: ElementType::F32,
        reduction: Reduction::Sum,
        root: 0,
        sequence,
        count: 64,
        name: short_name(""),
    }
}

/// One step: a call that is an exchange.
fn step(member: &mut Member, number: u64) -> Result<(), Fault> {
    member.watch.set_step(number);
    member.watch.enter(&call(number));
    let mine = [member.rank as u8; 9];
    let all = member.all_gather(&mine)?;
    assert!(all.iter().enumerate().all(|(rank, blob)| *blob == [rank as u8; 9]) && all.len() == member.world);
    member.watch.leave();
    std::thread::sleep(Duration::from_millis(1));
    Ok(())
}

fn steps(member: &mut Member, count: u64) -> Result<(), Fault> {
    (0..count).try_for_each(|number| step(member, number))
}

/// The folder in which a rank that nobody supervises says that it is here.
pub const HERE: &str = "KOLO_TEST_HERE";

/// The heartbeat of a job that another launcher started, in milliseconds.
pub const HEARTBEAT: &str = "KOLO_TEST_HEARTBEAT_MS";

fn join() -> Member {
    let lookup = |name: &str| std::env::var(name).ok();
    let Ok(heartbeat) = std::env::var(HEARTBEAT) else {
        return Member::join(&lookup).unwrap().expect("started by a supervisor");
    };
    let rank_info = kolo_cluster::launcher::detect(&lookup).unwrap().expect("started by a launcher");
    let way = Discovery::File(join::default_file(&rank_info, &lookup).unwrap());
    let options = JoinOptions { heartbeat_ms: heartbeat.parse().unwrap(), ..JoinOptions::new(way) };
    // As the command line does: whoever ended the job has said why.
    join::join_rank(&rank_info, options).unwrap_or_else(|fault| {
        if !matches!(fault, Fault::Aborted(_)) {
            eprintln!("error: {fault}");
        }
        std::process::exit(1)
    })
}

pub fn run(arguments: &[String]) {
    let behaviour = arguments[0].as_str();
    if behaviour == "stop_early" && std::env::var("KOLO_RANK").unwrap() == "1" {
        // SAFETY: stops this process.
        unsafe { libc::raise(libc::SIGSTOP) };
    }
    if behaviour == "slow" && std::env::var("RANK").is_ok_and(|rank| rank == arguments[1]) {
        // It reads its data, and has not come to join the others.
        let lookup = |name: &str| std::env::var(name).ok();
        let rank_info = kolo_cluster::launcher::detect(&lookup).unwrap().expect("started by a launcher");
        let _announced = StartupWatch::announce(&rank_info, &lookup, 1000);
        let folder = std::env::var(HERE).unwrap();
        std::fs::write(std::path::Path::new(&folder).join(format!("here-{}", rank_info.rank)), "").unwrap();
        std::thread::sleep(std::time::Duration::from_secs(1000));
    }
    let mut member = join();
    assert_eq!(member.roster.len(), member.world);
    assert_eq!(member.roster[member.rank].pid, std::process::id());
    let keys = member.all_gather(&member.key.clone().expose()[..]).unwrap_or_else(|fault| {
        // It may be stopped as soon as it is here.
        member.fail_with(&fault);
        std::process::exit(1)
    });
    assert!(keys.iter().all(|key| *key == member.key.expose()) && *member.key.expose() != [0; 32]);
    let asked = Arc::new(AtomicBool::new(false));
    if matches!(behaviour, "polite" | "stubborn") {
        for signal in [libc::SIGTERM, libc::SIGINT] {
            signal_hook::flag::register(signal, Arc::clone(&asked)).unwrap();
        }
    }
    member.event(format!("here {}", std::process::id()).as_bytes());
    if let Ok(folder) = std::env::var(HERE) {
        std::fs::write(std::path::Path::new(&folder).join(format!("here-{}", member.rank)), "").unwrap();
    }
    let outcome = behave(&mut member, behaviour, arguments, &asked);
    let outcome = match outcome {
        Ok(()) => member.finish(),
        Err(fault) => {
            member.fail_with(&fault);
            Err(fault)
        }
    };
    std::process::exit(i32::from(outcome.is_err()));
}

/// What a worker does between joining and its end.
fn behave(member: &mut Member, behaviour: &str, arguments: &[String], asked: &AtomicBool) -> Result<(), Fault> {
    let number = |at: usize| arguments[at].parse::<u64>().unwrap();
    let chosen = arguments.get(1).is_some_and(|rank| *rank == member.rank.to_string());
    match behaviour {
        "exit" => {
            steps(member, 5)?;
            if chosen {
                std::process::exit(number(2) as i32);
            }
            steps(member, 1)
        }
        "whisper" => {
            steps(member, 5)?;
            if chosen {
                whisper_and_exit();
            }
            step(member, 5)
        }
        "panic" => {
            steps(member, 5)?;
            assert!(!chosen, "this rank panics");
            step(member, 5)
        }
        "fail" => {
            steps(member, 6)?;
            if chosen {
                member.fail("the disk is full", None);
                std::process::exit(1);
            }
            step(member, 6)
        }
        "blame" => blame(member, number(1) as usize),
        "differ" => differ(member, chosen),
        "deaf" | "stubborn" => loop {
            std::hint::spin_loop();
        },
        "idle" => loop {
            std::thread::sleep(Duration::from_secs(1));
        },
        "polite" => {
            while !asked.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(100 * member.rank as u64));
            println!("saved");
            Ok(())
        }
        "parent" | "print" => {
            speak(member, behaviour);
            Ok(())
        }
        "stop_early" => steps(member, 100_000),
        "train" => steps(member, number(1)),
        "compute" => compute(member, Duration::from_secs(number(1))),
        other => panic!("no such behaviour: {other}"),
    }
}

/// Leaves a process behind that prints after this one has ended.
fn whisper_and_exit() -> ! {
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "sleep 0.2; echo the last word"]);
    // SAFETY: a system call, between fork and exec. Out of this process's group, it outlives it.
    unsafe { command.pre_exec(|| if libc::setsid() < 0 { Err(std::io::ErrorKind::Other.into()) } else { Ok(()) }) };
    command.spawn().unwrap();
    std::process::exit(3);
}

fn speak(member: &Member, behaviour: &str) {
    if behaviour == "parent" {
        #[expect(clippy::zombie_processes, reason = "left behind on purpose")]
        let child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        println!("grandchild {}", child.id());
        return;
    }
    for line in 0..PRINTED {
        println!("out {} line {line}", member.rank);
        eprintln!("err {} line {line}", member.rank);
    }
    member.event(b"hello");
}

/// Steps with work in them, until rank 0 says that the time is over.
fn compute(member: &mut Member, time: Duration) -> Result<(), Fault> {
    let start = Instant::now();
    let mut number = 0;
    loop {
        member.watch.set_step(number);
        let work = Instant::now();
        while work.elapsed() < Duration::from_millis(50) {
            std::hint::spin_loop();
        }
        member.watch.enter(&call(number));
        let over = member.all_gather(&[u8::from(start.elapsed() > time)])?[0][0] == 1;
        member.watch.leave();
        number += 1;
        if over {
            return Ok(());
        }
    }
}

/// One rank dies; the others have heard of it from their own links before the coordinator has.
fn blame(member: &mut Member, victim: usize) -> Result<(), Fault> {
    steps(member, 3)?;
    if member.rank == victim {
        std::thread::sleep(Duration::from_millis(20));
        std::process::abort();
    }
    Err(Fault::Lost { peer: victim, host: String::new(), during: "a call".into(), why: "its link closed".into() })
}

fn differ(member: &mut Member, chosen: bool) -> Result<(), Fault> {
    steps(member, 3)?;
    let next = if chosen { Fingerprint { kind: CallKind::Broadcast, count: 8, ..call(3) } } else { call(3) };
    member.watch.enter(&next);
    loop {
        member.watch.check()?;
        std::thread::sleep(Duration::from_millis(1));
    }
}
