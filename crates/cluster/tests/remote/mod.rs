//! Jobs on several hosts: agents through a remote shell, and real hosts as network namespaces.

use super::{SOON, alive, all_gone, go_soon, signal, temporary};
use kolo_cluster::hostlist;
use kolo_cluster::hosts::{self, HostsOptions};
use kolo_cluster::{Notice, Outcome};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const RELAY_PORT: u16 = 4022;

fn exe() -> String {
    std::env::current_exe().unwrap().to_string_lossy().into_owned()
}

/// Agents are plain processes on this host.
fn options(list: &str, out: &Path, behaviour: &[&str]) -> HostsOptions {
    let mut arguments = vec!["worker".to_string()];
    arguments.extend(behaviour.iter().map(|word| word.to_string()));
    let mut options = HostsOptions::new(hostlist::slots(list).unwrap(), &exe(), arguments);
    options.shell = ["sh", "-c", "echo noise of a login; exec sh -c \"$1\""].map(String::from).to_vec();
    options.out = Some(out.into());
    options.echo = None;
    options.address = Some([127, 0, 0, 1].into());
    options
}

fn run_with(options: &HostsOptions, harm: impl Fn(&[i32])) -> (Outcome, Vec<i32>, Duration) {
    let world = options.slots.iter().map(|slots| slots.count).sum();
    let mut pids = vec![0; world];
    let mut since = Instant::now();
    let outcome = hosts::run(options, &mut |notice| {
        let Notice::Event { rank, bytes } = notice else { return };
        let Some(pid) = std::str::from_utf8(bytes).unwrap().strip_prefix("here ") else { return };
        pids[*rank] = pid.parse().unwrap();
        if pids.iter().all(|pid| *pid > 0) {
            harm(&pids);
            since = Instant::now();
        }
    })
    .unwrap();
    (outcome, pids, since.elapsed())
}

fn parent(pid: i32) -> i32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap().trim().parse().unwrap()
}

pub fn hosts_end_well() {
    let out = temporary();
    let (outcome, pids, _) = run_with(&options("a:2,b:1", out.path(), &["print"]), |_| {});
    assert_eq!((outcome.exit_code(), outcome.message()), (0, None));
    all_gone(&pids);
    for rank in 0..3 {
        let log = std::fs::read_to_string(out.path().join(format!("rank-{rank}.log"))).unwrap();
        assert_eq!(log.lines().count(), 2 * super::worker::PRINTED, "{log}");
        assert!(log.contains(&format!("err {rank} line 9")), "{log}");
    }
}

/// What comes when the rank itself is gone already.
pub fn hosts_keep_last_words() {
    let out = temporary();
    // They have a heartbeat to come through.
    let patient = HostsOptions { heartbeat_ms: 30_000, ..options("a:1,b:1", out.path(), &["whisper", "1"]) };
    let (outcome, ..) = run_with(&patient, |_| {});
    assert!(outcome.message().unwrap().contains("rank 1 on "), "{:?}", outcome.message());
    let log = std::fs::read_to_string(out.path().join("rank-1.log")).unwrap();
    assert_eq!(log, "the last word\n");
}

pub fn hosts_lose_a_rank() {
    let out = temporary();
    let (outcome, pids, took) = run_with(&options("a:2,b:2", out.path(), &["train", "100000"]), |p| signal(p[3], 9));
    assert!(took < SOON, "{took:?}");
    let message = outcome.message().unwrap();
    assert!(message.starts_with("rank 3 on ") && message.contains("signal 9"), "{message}");
    all_gone(&pids);
    let (outcome, pids, took) =
        run_with(&options("a:2,b:2", out.path(), &["deaf"]), |pids| signal(pids[1], libc::SIGSTOP));
    assert!(took < SOON, "{took:?}");
    assert!(outcome.message().unwrap().starts_with("rank 1 on "), "{:?}", outcome.message());
    all_gone(&pids);
    let (outcome, ..) = run_with(&options("a:2,b:2", out.path(), &["fail", "2"]), |_| {});
    assert!(outcome.message().unwrap().contains("the disk is full"), "{:?}", outcome.message());
}

pub fn hosts_lose_an_agent() {
    let out = temporary();
    let (outcome, pids, took) = run_with(&options("a:2,b:2", out.path(), &["deaf"]), |pids| signal(parent(pids[2]), 9));
    assert!(took < SOON, "{took:?}");
    let message = outcome.message().unwrap();
    assert!(message.starts_with("rank 2 on ") || message.starts_with("rank 3 on "), "{message}");
    go_soon(&pids);
}

pub fn a_host_that_cannot_be_reached() {
    let out = temporary();
    let mut options = options("a:1,b:1", out.path(), &["train", "10"]);
    options.shell =
        ["sh", "-c", "test $0 = a && exec sh -c \"$1\"; echo no route to $0 >&2; exit 255"].map(String::from).to_vec();
    let message = hosts::run(&options, &mut |_| {}).unwrap().message().unwrap();
    assert!(
        message.starts_with("rank 1 on b was lost during its start: host b: its remote shell: it exited"),
        "{message}"
    );
    assert!(message.contains("code 255: no route to b"), "{message}");
    options.shell = vec!["/nowhere/ssh".into()];
    assert!(hosts::run(&options, &mut |_| {}).unwrap_err().to_string().contains("/nowhere/ssh"));
    let options = HostsOptions { directory: "/nowhere".into(), ..self::options("a:1", out.path(), &["train", "10"]) };
    let message = hosts::run(&options, &mut |_| {}).unwrap().message().unwrap();
    assert!(message.contains("host a: starting"), "{message}");
}

/// A launcher as its own process: `launcher OUT LIST ADDRESS SHELL BEHAVIOUR…`.
pub fn launch(arguments: &[String]) {
    let behaviour: Vec<&str> = arguments[4..].iter().map(String::as_str).collect();
    let mut options = options(&arguments[1], Path::new(&arguments[0]), &behaviour);
    options.address = Some(arguments[2].parse().unwrap());
    if arguments[3] != "local" {
        options.shell = vec![exe(), "relay".into()];
    }
    let outcome = hosts::run(&options, &mut |notice| {
        if let Notice::Event { rank, bytes } = notice {
            println!("event {rank} {}", String::from_utf8_lossy(bytes));
        }
        if let Notice::Suspended { .. } = notice {
            println!("suspended");
        }
    })
    .unwrap();
    if let Some(message) = outcome.message() {
        eprintln!("FAULT {message}");
    }
    std::process::exit(outcome.exit_code());
}

fn start_launcher(arguments: &[&str]) -> (std::process::Child, Vec<i32>) {
    let mut command = Command::new(exe());
    command.arg("launcher").args(arguments);
    super::started(command, 4)
}

pub fn hosts_lose_the_launcher() {
    let out = temporary();
    let (mut child, pids) = start_launcher(&[&out.path().to_string_lossy(), "a:2,b:2", "127.0.0.1", "local", "deaf"]);
    signal(child.id() as i32, 9);
    child.wait().unwrap();
    go_soon(&pids);
}

/// The launcher, its agents and their workers, longer than anybody's patience.
pub fn hosts_are_suspended() {
    let out = temporary();
    let words = [&out.path().to_string_lossy(), "a:2,b:2", "127.0.0.1", "local", "compute", "12"];
    let (mut child, mut pids) = start_launcher(&words);
    let agents: BTreeSet<i32> = pids.iter().map(|pid| parent(*pid)).collect();
    assert_eq!(agents.len(), 2);
    pids.extend(agents);
    pids.push(child.id() as i32);
    super::suspend(&pids, Duration::from_secs(3));
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// The agents go on, and know that their launcher is silent for a while.
pub fn a_suspended_launcher_of_hosts() {
    let out = temporary();
    let words = [&out.path().to_string_lossy(), "a:2,b:2", "127.0.0.1", "local", "train", "1500"];
    let (child, pids) = start_launcher(&words);
    super::ctrl_z(child.id() as i32, &pids);
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stderr)), (Some(0), ""));
    all_gone(&pids);
}

/// Nobody is told that it stops, and it is silent for longer than anybody's patience with a host that does not answer.
pub fn a_stopped_launcher_of_hosts_is_awaited() {
    let out = temporary();
    let words = [&out.path().to_string_lossy(), "a:2,b:2", "127.0.0.1", "local", "train", "1500"];
    let (child, pids) = start_launcher(&words);
    super::suspend(&[child.id() as i32], Duration::from_secs(4));
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stderr)), (Some(0), ""));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("suspended"), "{said}");
    all_gone(&pids);
}

/// Two hosts as network namespaces on one bridge; gone when dropped.
struct Network {
    name: String,
    relays: Vec<std::process::Child>,
}

fn ip(arguments: &str) -> bool {
    let done = Command::new("ip").args(arguments.split(' ')).stderr(Stdio::null()).status();
    done.is_ok_and(|status| status.success())
}

impl Network {
    /// `None` where this is not allowed.
    fn new() -> Option<Self> {
        let name = format!("k{}", std::process::id() % 10_000);
        let mut network = Self { name: name.clone(), relays: Vec::new() };
        if !ip(&format!("link add {name}br type bridge")) {
            return None;
        }
        assert!(ip(&format!("addr add 10.77.0.1/24 dev {name}br")) && ip(&format!("link set {name}br up")));
        for host in [2, 3] {
            let space = format!("{name}h{host}");
            let steps = [
                format!("netns add {space}"),
                format!("link add {name}v{host} type veth peer name eth0 netns {space}"),
                format!("link set {name}v{host} master {name}br up"),
                format!("-n {space} addr add 10.77.0.{host}/24 dev eth0"),
                format!("-n {space} link set eth0 up"),
                format!("-n {space} link set lo up"),
            ];
            for step in steps {
                assert!(ip(&step), "ip {step}");
            }
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &space, &exe(), "relay-server"]);
            network.relays.push(command.spawn().unwrap());
        }
        Some(network)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let name = &self.name;
        for relay in &mut self.relays {
            let _ = relay.kill();
            let _ = relay.wait();
        }
        // A namespace may live on in a socket that waits for a peer it cannot reach: its links go first.
        for thing in ["link del Kbr", "link del Kv2", "link del Kv3", "netns del Kh2", "netns del Kh3"] {
            ip(&thing.replace('K', name));
        }
    }
}

/// A remote shell without secrets, for namespaces: runs what it is sent, with the connection as its standard streams.
pub fn relay_server() {
    let listener = TcpListener::bind(("0.0.0.0", RELAY_PORT)).unwrap();
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        let mut length = [0; 4];
        stream.read_exact(&mut length).unwrap();
        let mut command = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut command).unwrap();
        let copy = || Stdio::from(stream.as_fd().try_clone_to_owned().unwrap());
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(String::from_utf8(command).unwrap()).stdin(copy()).stdout(copy());
        std::thread::spawn(move || shell.status());
    }
}

/// The other end: `relay HOST COMMAND`.
pub fn relay(arguments: &[String]) {
    let mut stream = TcpStream::connect((arguments[0].as_str(), RELAY_PORT)).unwrap();
    stream.write_all(&(arguments[1].len() as u32).to_le_bytes()).unwrap();
    stream.write_all(arguments[1].as_bytes()).unwrap();
    let mut back = stream.try_clone().unwrap();
    std::thread::spawn(move || {
        let mut input = std::fs::File::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
        copy(&mut input, &mut stream);
        let _ = stream.shutdown(std::net::Shutdown::Write);
    });
    let mut output = std::fs::File::from(std::io::stdout().as_fd().try_clone_to_owned().unwrap());
    copy(&mut back, &mut output);
}

/// Passes on at once what comes; the library's own copy may hold back what it splices.
fn copy(from: &mut impl Read, to: &mut impl Write) {
    let mut buffer = [0; 4096];
    while let Ok(count) = from.read(&mut buffer) {
        if count == 0 || to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
}

pub fn a_link_goes_down() {
    let Some(network) = Network::new() else {
        println!("  (no network namespaces here)");
        return;
    };
    std::thread::sleep(Duration::from_millis(300));
    let out = temporary();
    let list = "10.77.0.2:2,10.77.0.3:2";
    let (child, pids) = start_launcher(&[&out.path().to_string_lossy(), list, "10.77.0.1", "relay", "deaf"]);
    assert!(ip(&format!("link set {}v3 down", network.name)));
    let since = Instant::now();
    let limit = SOON;
    while (pids.iter().any(|pid| alive(*pid)) || alive(child.id() as i32)) && since.elapsed() < limit {
        std::thread::sleep(Duration::from_millis(5));
    }
    all_gone(&pids);
    let output = child.wait_with_output().unwrap();
    assert!(since.elapsed() < limit, "{:?}", since.elapsed());
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("FAULT rank 2 on ") || text.contains("FAULT rank 3 on "), "{text}");
    assert!(text.contains("no heartbeat for 1500 ms"), "{text}");
}
