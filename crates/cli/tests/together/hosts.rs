//! `--hosts`: two hosts as network namespaces of this machine, and a remote shell that enters them.

use crate::job::{Job, KOLO, LIMIT, kolo, report, tempdir, transport, under, weights};
use crate::process::{harmed, run, skip};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Two namespaces on a bridge, each with an address of its own; gone when dropped.
struct Network {
    name: String,
    /// The first three numbers of all addresses.
    prefix: String,
}

fn ip(arguments: &str) -> bool {
    let done = Command::new("ip").args(arguments.split(' ')).stderr(Stdio::null()).status();
    done.is_ok_and(|status| status.success())
}

impl Network {
    /// `None` where this user may not make one.
    fn new() -> Option<Self> {
        // Tests of one process have one each, at a time.
        static NETWORKS: AtomicU32 = AtomicU32::new(0);
        let (number, network) = (std::process::id(), NETWORKS.fetch_add(1, Ordering::Relaxed) % 10);
        let name = format!("kt{}n{network}", number % 100_000);
        let prefix = format!("10.{}.{}", 128 + number % 100, (number / 100 + 25 * network) % 256);
        if !ip(&format!("link add {name}br type bridge")) {
            skip("no network namespaces");
            return None;
        }
        let network = Self { name, prefix };
        let Self { name, prefix } = &network;
        assert!(ip(&format!("addr add {prefix}.1/24 dev {name}br")) && ip(&format!("link set {name}br up")));
        for host in [2, 3] {
            let steps = [
                format!("netns add {name}h{host}"),
                format!("link add {name}v{host} type veth peer name eth0 netns {name}h{host}"),
                format!("link set {name}v{host} master {name}br up"),
                format!("-n {name}h{host} addr add {prefix}.{host}/24 dev eth0"),
                format!("-n {name}h{host} link set eth0 up"),
                format!("-n {name}h{host} link set lo up"),
            ];
            steps.iter().for_each(|step| assert!(ip(step), "ip {step}"));
        }
        Some(network)
    }

    /// A remote shell as `--ssh` takes it: it is called with a host's address and a command line.
    fn shell(&self, dir: &Path) -> String {
        let path = dir.join("shell");
        let text = format!("#!/bin/sh\nexec ip netns exec {}h\"${{1##*.}}\" sh -c \"$2\"\n", self.name);
        std::fs::write(&path, text).expect("a script");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).expect("a script");
        path.to_string_lossy().into_owned()
    }

    /// From now on neither host reaches the other, but each still reaches everybody else.
    fn cut(name: &str, prefix: &str) {
        for (host, other) in [(2, 3), (3, 2)] {
            // An address that nobody has on the bridge: what is sent there arrives nowhere.
            let nobody = "lladdr 02:00:00:00:00:01 dev eth0 nud permanent";
            let step = format!("-n {name}h{host} neigh replace {prefix}.{other} {nobody}");
            assert!(ip(&step), "ip {step}");
        }
    }

    fn list(&self) -> String {
        format!("{0}.2:2,{0}.3:2", self.prefix)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for thing in ["link del Kbr", "link del Kv2", "link del Kv3", "netns del Kh2", "netns del Kh3"] {
            ip(&thing.replace('K', &self.name));
        }
    }
}

#[test]
fn two_hosts_train_like_one_process() {
    let Some(network) = Network::new() else { return };
    // Started from a third host, and from the first of the two.
    let first = format!("{}h2", network.name);
    for (words, job, way) in [
        (&[KOLO][..], Job::Digits, "tcp"),
        (&["ip", "netns", "exec", &first, KOLO], Job::Addition, "tcp"),
        (&[KOLO], Job::Resnet, "auto"),
    ] {
        let dir = tempdir();
        let mut command = under(words, dir.path());
        command.args(job.quiet()).args(["--threads", "1", "--out", "out", "--transport", way]);
        command.args(["--hosts", &network.list(), "--ssh", &network.shell(dir.path())]);
        let report = job.agrees(&mut command, dir.path());
        assert_eq!(report["workers"].as_u64(), Some(4));
        // Namespaces of one kernel share its memory, whatever their addresses.
        assert_eq!(transport(&report), if way == "tcp" { "tcp" } else { "shm" });
        let logs = (0..4).filter(|rank| dir.path().join(format!("out/rank-{rank}.log")).exists());
        assert_eq!(logs.count(), 4);
    }
}

/// The launcher still reaches both hosts. The two workers of the second are lost together, and the others go on without it.
#[test]
fn an_elastic_job_goes_on_with_one_side_of_a_cut() {
    let Some(network) = Network::new() else { return };
    let file = format!("{}/../../examples/playground.toml", env!("CARGO_MANIFEST_DIR"));
    let words = ["train", &file, "--set", "train.epochs=60", "--set", "train.log_every=7", "--threads", "1"];
    let dir = tempdir();
    let mut command = kolo(dir.path());
    let expected = run(command.args(words).args(["--quiet", "--report", "report.json"]), LIMIT).well();
    assert_eq!(expected.stdout, "");
    let expected = report(dir.path());
    let mut command = kolo(dir.path());
    command.args(words).args(["--elastic", "--heartbeat-ms", "400", "--transport", "tcp"]);
    command.args(["--out", "out", "--report", "report.json"]);
    command.args(["--hosts", &network.list(), "--ssh", &network.shell(dir.path())]);
    let rows = dir.path().join("out/metrics.jsonl");
    let (name, prefix) = (network.name.clone(), network.prefix.clone());
    let ended = harmed(&mut command, LIMIT, move |_| {
        let start = Instant::now();
        while std::fs::read_to_string(&rows).map_or(0, |text| text.lines().count()) < 3 {
            assert!(start.elapsed() < LIMIT, "no steps");
            std::thread::sleep(Duration::from_millis(2));
        }
        Network::cut(&name, &prefix);
    });
    let ended = ended.well();
    let report = report(dir.path());
    assert_eq!(weights(&report), weights(&expected), "{ended}");
    let generations = report["generations"].as_array().expect("generations");
    let lost: Vec<Vec<&str>> = generations
        .iter()
        .map(|row| row["lost"].as_array().expect("a list").iter().filter_map(|text| text.as_str()).collect())
        .collect();
    let why =
        format!("the network between its host and {}.2 is cut; nothing is started there any more", network.prefix);
    let [first, second] = &lost[..] else { panic!("not two generations: {lost:?}, {ended}") };
    assert!(
        first.is_empty() && second.len() == 2 && second.iter().all(|text| text.contains(&why)),
        "{lost:?}, {ended}"
    );
}

#[test]
fn a_host_that_cannot_be_reached_is_named() {
    let dir = tempdir();
    let mut command = kolo(dir.path());
    command.args(Job::Digits.quiet()).args(["--hosts", "here:1,there:1", "--interface", "127.0.0.1", "--ssh", "false"]);
    let ended = run(&mut command, LIMIT);
    assert_eq!(ended.code, Some(1), "{ended}");
    let message = ended.only_error();
    assert!(
        message.contains("host here: its remote shell") || message.contains("host there: its remote shell"),
        "{ended}"
    );
    for words in [&["train", "--quiet"][..], &["bench", "train", "--steps", "1"]] {
        let mut command = kolo(dir.path());
        let ended = run(command.args(words).args(["--hosts", "no.such.host.invalid"]), LIMIT);
        assert_eq!(ended.code, Some(1), "{ended}");
        assert!(ended.only_error().contains("no.such.host.invalid"), "{ended}");
    }
}

/// A remote shell for hosts that are this one: `words` run before the command, with the host's name in `$1`.
fn local_shell(dir: &Path, words: &str) -> String {
    let path = dir.join("shell");
    std::fs::write(&path, format!("#!/bin/sh\n{words}\nexec sh -c \"$2\"\n")).expect("a script");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).expect("a script");
    path.to_string_lossy().into_owned()
}

/// One path, behind which each host has a file of its own.
#[test]
fn hosts_with_different_job_files_are_refused() {
    let dir = tempdir();
    let job = |seed: usize| {
        format!(
            "[job]\nseed = {seed}\n[model]\nkind = \"mlp\"\n[data]\nsource = \"builtin:digits\"\n[train]\nsteps = 3\n"
        )
    };
    for (name, seed) in [("a", 1), ("b", 2)] {
        std::fs::write(dir.path().join(format!("{name}.toml")), job(seed)).expect("a job file");
    }
    let shell = local_shell(dir.path(), "exec 9<\"$1.toml\"");
    for (words, hosts, odd) in [
        (&["train"][..], "a:1,b:1", "`job.seed` is `2` at rank 1 on "),
        (&["train", "--async", "--servers", "1"], "a:2,b:1", "`job.seed` is `2` at rank 2 on "),
        (&["bench", "train", "--steps", "1"], "a:1,b:1", "`job.seed` is `2` at rank 1 on "),
    ] {
        let mut command = under(&["sh", "-c", "exec 9<a.toml; exec \"$@\"", "sh", KOLO], dir.path());
        command.args(words).args(["/dev/fd/9", "--hosts", hosts, "--interface", "127.0.0.1", "--ssh", &shell]);
        let ended = run(&mut command, LIMIT);
        assert_eq!(ended.code, Some(1), "{ended}");
        let message = ended.only_error();
        assert!(message.starts_with("error: the ranks were given different jobs: "), "{ended}");
        assert!(message.contains(odd), "{odd}: {ended}");
        assert_eq!(message.contains("(server 0)"), words.contains(&"--async"), "{ended}");
    }
}

#[test]
fn an_address_of_no_single_host_is_refused() {
    for (address, what) in [
        ("0.0.0.0", "means every interface"),
        ("::", "means every interface"),
        ("224.0.0.1", "is a multicast address"),
        ("255.255.255.255", "is the broadcast address"),
    ] {
        let dir = tempdir();
        let mut command = kolo(dir.path());
        command.args(Job::Digits.quiet()).args(["--hosts", "a:1,b:1", "--ssh", "false", "--interface", address]);
        let ended = run(&mut command, LIMIT);
        assert_eq!(ended.code, Some(2), "{ended}");
        assert!(ended.only_error().contains(&format!("--interface {address} {what}")), "{ended}");
    }
}

/// It says so itself, long before the others have waited for it in vain.
#[test]
fn a_worker_that_cannot_reach_the_others_is_noticed() {
    let dir = tempdir();
    if !Command::new("unshare").args(["-n", "true"]).status().is_ok_and(|status| status.success()) {
        return skip("no network namespaces");
    }
    let shell = local_shell(dir.path(), "[ \"$1\" = a ] || exec unshare -n sh -c \"$2\"");
    let mut command = kolo(dir.path());
    command.args(Job::Digits.quiet()).args(["--hosts", "a:1,b:1", "--interface", "127.0.0.1", "--ssh", &shell]);
    let ended = run(command.args(["--heartbeat-ms", "300"]), LIMIT);
    assert_eq!(ended.code, Some(1), "{ended}");
    let message = ended.only_error_of(2);
    assert!(message.starts_with("error: rank 1 on b was lost during its start: "), "{ended}");
    assert!(message.contains("reaching the coordinator at 127.0.0.1:"), "{ended}");
}

/// It is reached over the remote shell too, and is not mistaken for this one.
#[test]
fn a_single_place_is_on_its_host() {
    let dir = tempdir();
    let path = dir.path().join("shell");
    std::fs::write(&path, "#!/bin/sh\necho $1 >> called\nexec sh -c \"$2\"\n").expect("a script");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).expect("a script");
    let mut command = kolo(dir.path());
    command.args(Job::Digits.quiet()).args(["--threads", "1", "--hosts", "there", "--interface", "127.0.0.1"]);
    let report = Job::Digits.agrees(command.arg("--ssh").arg(&path), dir.path());
    assert_eq!(report["workers"].as_u64(), Some(1));
    assert_eq!(std::fs::read_to_string(dir.path().join("called")).expect("a call"), "there\n");
}

/// An SSH daemon of our own for two addresses of this machine; gone when dropped.
struct Daemon {
    process: Child,
    port: u16,
}

impl Daemon {
    /// `None` where there is none.
    fn new(dir: &Path) -> Option<Self> {
        if !Path::new("/usr/sbin/sshd").exists() {
            skip("no sshd");
            return None;
        }
        // Of its own accord the daemon makes this only as a service.
        let _ = std::fs::create_dir("/run/sshd");
        for key in ["key", "host-key"] {
            let made =
                Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(dir.join(key)).status();
            assert!(made.is_ok_and(|status| status.success()), "no key");
        }
        std::fs::copy(dir.join("key.pub"), dir.join("authorized")).expect("a copy");
        let port = TcpListener::bind("127.0.0.2:0").and_then(|socket| socket.local_addr()).expect("a port").port();
        let text = format!(
            "Port {port}\nListenAddress 127.0.0.2\nListenAddress 127.0.0.3\nHostKey {0}/host-key\nAuthorizedKeysFile {0}/authorized\n\
             StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\nPidFile none\n",
            dir.display()
        );
        std::fs::write(dir.join("config"), text).expect("a file");
        let mut daemon = Command::new("/usr/sbin/sshd");
        daemon.args(["-D", "-e", "-f"]).arg(dir.join("config")).stderr(Stdio::null());
        let daemon = Self { process: daemon.spawn().expect("a daemon"), port };
        let start = Instant::now();
        while TcpStream::connect(("127.0.0.3", port)).is_err() {
            assert!(start.elapsed() < LIMIT, "the daemon does not answer");
            std::thread::sleep(Duration::from_millis(20));
        }
        // An account without a shell, or a locked one, lets nobody in.
        let shell = daemon.shell(dir);
        let mut words = shell.split(' ').chain(["127.0.0.2", "true"]);
        let ended = run(Command::new(words.next()?).args(words), LIMIT);
        if ended.code != Some(0) {
            skip(&format!("sshd lets this account not in: {}", ended.stderr.trim()));
            return None;
        }
        Some(daemon)
    }

    fn shell(&self, dir: &Path) -> String {
        let known = "-o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no -o LogLevel=ERROR";
        format!("ssh -p {} -i {}/key -o BatchMode=yes {known}", self.port, dir.display())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn workers_start_over_ssh() {
    let keys = tempdir();
    let Some(daemon) = Daemon::new(keys.path()) else { return };
    let dir = tempdir();
    let hosts = ["--hosts", "127.0.0.2:1,127.0.0.3:3", "--ssh", &daemon.shell(keys.path())];
    let mut command = kolo(dir.path());
    // A name that a remote shell would tear apart.
    command.args(Job::Digits.quiet()).args(["--threads", "1", "--out", "it's $HOME"]).args(hosts);
    let report = Job::Digits.agrees(&mut command, dir.path());
    assert_eq!(report["workers"].as_u64(), Some(4));
    // A host that does not let us in.
    let refused = daemon.shell(keys.path()).replace("/key", "/host-key");
    let mut command = kolo(dir.path());
    command.args(Job::Digits.quiet()).args(["--hosts", "127.0.0.2:1,127.0.0.3:3", "--ssh", &refused]);
    let ended = run(&mut command, LIMIT);
    assert_eq!(ended.code, Some(1), "{ended}");
    let message = ended.only_error();
    assert!(message.contains("host 127.0.0.") && message.contains("Permission denied"), "{ended}");
}
