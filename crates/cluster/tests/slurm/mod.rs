//! A real Slurm: its controller and two nodes as plain processes on this host, where they are installed.

use super::temporary;
use kolo_cluster::slurm::{Batch, script, submit};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

struct Cluster {
    directory: tempfile::TempDir,
    daemons: Vec<Child>,
}

fn tool(name: &str) -> Option<PathBuf> {
    ["/usr/sbin", "/usr/bin"].iter().map(|directory| Path::new(directory).join(name)).find(|path| path.exists())
}

impl Cluster {
    /// `None` where Slurm is not installed.
    fn start() -> Option<Self> {
        let (controller, node) = (tool("slurmctld")?, tool("slurmd")?);
        let directory = temporary();
        let host = kolo_cluster::host_name().split('.').next().unwrap_or_default().to_string();
        let port = 20_000 + std::process::id() % 10_000 * 4;
        let path = directory.path().display();
        let mut conf = format!(
            "ClusterName=one\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nAuthType=auth/none\nCredType=cred/none\n\
             SlurmctldPort={port}\nSlurmdPort={}\nStateSaveLocation={path}/state\nSlurmdSpoolDir={path}/spool/%n\n\
             SlurmctldPidFile={path}/ctld.pid\nSlurmdPidFile={path}/d-%n.pid\nProctrackType=proctrack/linuxproc\n\
             TaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\nSelectType=select/cons_tres\n\
             AccountingStorageType=accounting_storage/none\nSelectTypeParameters=CR_Core\nMpiDefault=none\n\
             ReturnToService=2\nSlurmdParameters=config_overrides\n",
            port + 1
        );
        for node in [1, 2] {
            let port = port + 1 + node;
            conf +=
                &format!("NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=500\n");
        }
        conf += "PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP\n";
        std::fs::write(directory.path().join("slurm.conf"), conf).unwrap();
        std::fs::create_dir_all(directory.path().join("state")).unwrap();
        std::fs::create_dir_all(directory.path().join("spool")).unwrap();
        let mut cluster = Self { directory, daemons: Vec::new() };
        for (program, arguments) in
            [(&controller, &["-D"][..]), (&node, &["-D", "-N", "n1"]), (&node, &["-D", "-N", "n2"])]
        {
            let mut command = cluster.command(&program.to_string_lossy());
            command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
            cluster.daemons.push(command.spawn().unwrap());
        }
        let deadline = Instant::now() + Duration::from_secs(120);
        let idle = || {
            let output = cluster.command("sinfo").args(["-h", "-o", "%D %t"]).output().unwrap();
            String::from_utf8_lossy(&output.stdout).trim() == "2 idle"
        };
        while !idle() {
            if Instant::now() > deadline {
                println!("  (Slurm does not start here)");
                return None;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Some(cluster)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let home = self.directory.path();
        command.env("SLURM_CONF", home.join("slurm.conf")).env("HOME", home).current_dir(home);
        command
    }

    fn srun(&self, options: &[&str], behaviour: &[&str]) -> Output {
        let mut command = self.command("srun");
        command.args(["-N2", "-n4"]).args(options).arg(std::env::current_exe().unwrap());
        command.arg("worker").args(behaviour).output().unwrap()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for daemon in &mut self.daemons {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// Submits as its own process, whose environment names the cluster: `submit OUT BEHAVIOUR…`.
pub fn submit_here(arguments: &[String]) {
    let mut command = vec![std::env::current_exe().unwrap().to_string_lossy().into_owned(), "worker".into()];
    command.extend_from_slice(&arguments[1..]);
    let batch = Batch {
        name: "two words".into(),
        nodes: 2,
        tasks_per_node: 2,
        time: Some("5".into()),
        partition: Some("all".into()),
        options: vec![format!("--output={}", arguments[0])],
        directory: "/".into(),
        command,
        ..Batch::default()
    };
    println!("{}", submit(&script(&batch).unwrap()).unwrap());
}

pub fn under_slurm() {
    let Some(cluster) = Cluster::start() else { return };
    for options in [&[][..], &["--mpi=pmi2"]] {
        let output = cluster.srun(options, &["train", "20"]);
        assert!(output.status.success(), "{options:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let left: Vec<_> = std::fs::read_dir(cluster.directory.path().join(".kolo/run")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    let output = cluster.srun(&[], &["fail", "2"]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), text.matches("error: rank 2 on ").count()), (Some(1), 1), "{text}");
    assert!(text.contains("failed at step 5") && text.contains("the disk is full"), "{text}");
    let log = cluster.directory.path().join("job.out");
    let mut command = cluster.command(&std::env::current_exe().unwrap().to_string_lossy());
    let output = command.arg("submit").arg(&log).args(["print"]).output().unwrap();
    let number = String::from_utf8_lossy(&output.stdout).trim().to_string();
    assert!(number.parse::<u32>().is_ok(), "{number} {}", String::from_utf8_lossy(&output.stderr));
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let output = cluster.command("scontrol").args(["show", "job", &number]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if text.contains("JobState=COMPLETED") && text.contains("ExitCode=0:0") {
            break;
        }
        assert!(Instant::now() < deadline && !text.contains("JobState=FAILED"), "{text}");
        std::thread::sleep(Duration::from_millis(100));
    }
    let text = std::fs::read_to_string(log).unwrap();
    assert_eq!(text.matches(" line ").count(), 4 * 2 * super::worker::PRINTED, "{text}");
}
