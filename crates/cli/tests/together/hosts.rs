//! `--hosts`: two hosts as network namespaces of this machine, and a remote shell that enters them.

use crate::job::{Job, KOLO, LIMIT, kolo, tempdir, transport, under};
use crate::process::{run, skip};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

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
        let number = std::process::id();
        let name = format!("kt{}", number % 100_000);
        let prefix = format!("10.{}.{}", 128 + number % 100, number / 100 % 256);
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
}
