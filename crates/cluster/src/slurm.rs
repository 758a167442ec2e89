//! A batch script for Slurm, and its submission.

use crate::hosts::quoted;
use kolo_comm::Fault;
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

/// What to ask of Slurm.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    pub name: String,
    pub nodes: usize,
    pub tasks_per_node: usize,
    pub cpus_per_task: Option<usize>,
    /// As Slurm writes it: `30`, `2:00:00`, `1-12`.
    pub time: Option<String>,
    pub partition: Option<String>,
    /// Further options for `sbatch`, such as `--gres=gpu:4`.
    pub options: Vec<String>,
    /// Where the workers run.
    pub directory: String,
    /// Whether the job goes on when tasks or nodes are lost.
    pub elastic: bool,
    /// Whether the job is queued again when its time is over.
    pub requeue: bool,
    /// A directory for the run, to which the number of the job is added.
    pub run: Option<String>,
    /// The command of every task.
    pub command: Vec<String>,
}

/// Since Slurm 22.05, `srun` does not take the cores of a task from the batch job by itself.
const CPUS_PER_TASK: &str = "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}";

/// The text of the script. The shell takes every word as it is; options of `sbatch` may not span lines.
pub fn script(batch: &Batch) -> Result<String, Fault> {
    if batch.nodes == 0 || batch.tasks_per_node == 0 || batch.command.is_empty() {
        return Err(Fault::BadCall("a batch job needs at least one node, one task and a command".into()));
    }
    let mut text = String::from("#!/bin/bash\n");
    let mut option = |name: &str, value: &str| -> Result<(), Fault> {
        if value.chars().any(|character| character.is_control()) {
            return Err(Fault::BadCall(format!("{name} {value:?} has a control character in it")));
        }
        let _ = writeln!(text, "#SBATCH {name}{value}");
        Ok(())
    };
    option("--job-name=", &quoted(&batch.name))?;
    option("--nodes=", &batch.nodes.to_string())?;
    option("--ntasks-per-node=", &batch.tasks_per_node.to_string())?;
    if let Some(cpus) = batch.cpus_per_task {
        option("--cpus-per-task=", &cpus.to_string())?;
    }
    if let Some(time) = &batch.time {
        option("--time=", &quoted(time))?;
    }
    if let Some(partition) = &batch.partition {
        option("--partition=", &quoted(partition))?;
    }
    // Asked to end, the tasks hear of it before the time is over.
    match batch.requeue {
        true => {
            option("--signal=", "B:TERM@60")?;
            option("--requeue", "")?;
            option("--open-mode=", "append")?;
        }
        false => option("--signal=", "TERM@60")?,
    }
    // Of an option that stands twice, the last counts: the user's.
    for further in &batch.options {
        option("", further)?;
    }
    let mut words: Vec<String> = batch.command.iter().map(|word| quoted(word)).collect();
    words.extend(batch.run.iter().map(|run| format!("--out {}-\"$SLURM_JOB_ID\"", quoted(run))));
    let directory = quoted(&batch.directory);
    // One task that fails ends the step, and the step's code is the job's. An elastic job goes on without it.
    let together = match batch.elastic {
        true => "--no-kill --kill-on-bad-exit=0 --wait=0",
        false => "--kill-on-bad-exit=1 --wait=60",
    };
    let command = format!("srun {together} {CPUS_PER_TASK} {}", words.join(" "));
    let _ = write!(text, "\nset -euo pipefail\ncd {directory}\n");
    if !batch.elastic && !batch.requeue {
        let _ = writeln!(text, "exec {command}");
        return Ok(text);
    }
    let run = if batch.requeue { requeued(&command) } else { format!("code=0\n{command} || code=$?\n") };
    let (before, after) = if batch.elastic { (BEFORE_ELASTIC, AFTER_ELASTIC) } else { ("", "") };
    let crashed = if batch.requeue { requeued_after_a_crash() } else { String::new() };
    let _ = writeln!(text, "{before}{run}{after}{crashed}exit \"$code\"");
    Ok(text)
}

/// The command, which saves its state when the time is over, and the job back in the queue. The tasks are told through Slurm:
/// `srun` itself, told to end, would kill them.
fn requeued(command: &str) -> String {
    format!(
        "requeue=\n{command} &\nstep=$!\ntrap 'requeue=1; scancel --signal=TERM \"$SLURM_JOB_ID\"' TERM\ncode=0\n\
         wait \"$step\" || code=$?\nif [ -n \"$requeue\" ]; then\n    code=0\n    wait \"$step\" || code=$?\n    \
         scontrol requeue \"$SLURM_JOB_ID\"\nfi\n"
    )
}

/// A job that is queued again after a crash was so before at most so many times, for whatever reason.
const RESTARTS_MAX: usize = 10;
/// What a shell adds to a signal for the exit code of a process that it ended.
const EXIT_SIGNALLED: i32 = 128;

/// The codes of a run that was asked to end by SIGINT or SIGTERM, and did so in order: whoever asked wants no other.
const EXIT_ASKED: [i32; 2] = [EXIT_SIGNALLED + libc::SIGINT, EXIT_SIGNALLED + libc::SIGTERM];

/// If a signal ended a task, such as the coordinator's, the job goes back to the queue, too. An error of the job's own would come
/// again: it ends the job.
fn requeued_after_a_crash() -> String {
    let [by_int, by_term] = EXIT_ASKED;
    format!(
        "if [ -z \"$requeue\" ] && [ \"$code\" -gt {EXIT_SIGNALLED} ] && [ \"$code\" -ne {by_int} ] && \
         [ \"$code\" -ne {by_term} ] && [ \"${{SLURM_RESTART_COUNT:-0}}\" -lt {RESTARTS_MAX} ]; then\n    scontrol requeue \"$SLURM_JOB_ID\"\nfi\n"
    )
}

/// Names a file of the batch script of an elastic job. What is written there says that the job ended well: for `srun`, a task
/// that was lost on the way is a failure.
pub const DONE_FILE: &str = "KOLO_DONE_FILE";
const BEFORE_ELASTIC: &str = "KOLO_DONE_FILE=$(mktemp)\nexport KOLO_DONE_FILE\n";
const AFTER_ELASTIC: &str = "if [ -s \"$KOLO_DONE_FILE\" ]; then code=0; fi\nrm -f \"$KOLO_DONE_FILE\"\n";

/// Tells the batch script, if there is one, that the elastic job is done. On its own host a task finds its file.
pub fn tell_done() {
    let Some(path) = std::env::var_os(DONE_FILE) else { return };
    let opened = std::fs::OpenOptions::new().write(true).open(path);
    // Where it cannot be told, the job counts as `srun` says.
    let _ = opened.and_then(|mut file| file.write_all(b"done\n"));
}

/// Gives a script to `sbatch`; the number of the job.
pub fn submit(script: &str) -> Result<String, Fault> {
    let refused = |error: std::io::Error| Fault::System {
        what: "running sbatch".into(),
        error: format!(
            "{error}\n  hint: submit from a host where Slurm is installed, or write the script and submit it there"
        ),
    };
    let mut command = Command::new("sbatch");
    command.arg("--parsable").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(refused)?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(script.as_bytes()).map_err(refused)?;
    }
    let output = child.wait_with_output().map_err(refused)?;
    let text = String::from_utf8_lossy(&output.stdout);
    // On a federation it is `number;cluster`.
    let number = text.trim().split(';').next().unwrap_or_default();
    if !output.status.success() || number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(Fault::System { what: "sbatch refused the job".into(), error: why.trim().to_string() });
    }
    Ok(number.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch() -> Batch {
        Batch {
            name: "digits".into(),
            nodes: 2,
            tasks_per_node: 4,
            cpus_per_task: Some(2),
            time: Some("2:00:00".into()),
            partition: Some("all".into()),
            options: vec!["--gres=gpu:4".into()],
            directory: "/home/a b".into(),
            elastic: false,
            requeue: false,
            run: None,
            command: ["kolo", "train", "it's.toml"].map(String::from).to_vec(),
        }
    }

    #[test]
    fn the_script_says_what_was_asked() {
        let expected = "#!/bin/bash\n#SBATCH --job-name=digits\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n\
            #SBATCH --cpus-per-task=2\n#SBATCH --time=2:00:00\n#SBATCH --partition=all\n#SBATCH --signal=TERM@60\n\
            #SBATCH --gres=gpu:4\n\nset -euo pipefail\ncd '/home/a b'\n\
            exec srun --kill-on-bad-exit=1 --wait=60 \
            ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} kolo train 'it'\\''s.toml'\n";
        assert_eq!(script(&batch()).unwrap(), expected);
        let elastic = script(&Batch { elastic: true, ..batch() }).unwrap();
        let again = script(&Batch { requeue: true, run: Some("runs/a b".into()), ..batch() }).unwrap();
        for line in [
            "#SBATCH --signal=B:TERM@60",
            "#SBATCH --requeue",
            "trap 'requeue=1; scancel --signal=TERM",
            "    scontrol requeue \"$SLURM_JOB_ID\"\nfi\nif [ -z \"$requeue\" ] && [ \"$code\" -gt 128 ] && [ \"$code\" -ne 130 ] && [ \"$code\" -ne 143 ] && [ \"${SLURM_RESTART_COUNT:-0}\" -lt 10 ]; then\n    \
             scontrol requeue \"$SLURM_JOB_ID\"\nfi\nexit \"$code\"\n",
            " 'it'\\''s.toml' --out 'runs/a b'-\"$SLURM_JOB_ID\" &",
        ] {
            assert!(again.contains(line), "{again}");
        }
        assert!(elastic.contains("\nsrun --no-kill --kill-on-bad-exit=0 --wait=0 "), "{elastic}");
        let both = script(&Batch { elastic: true, requeue: true, ..batch() }).unwrap();
        for text in [&elastic, &both] {
            let parts = ["KOLO_DONE_FILE=$(mktemp)", "srun --no-kill", "-s \"$KOLO_DONE_FILE\"", "exit \"$code\"\n"];
            let places = parts.map(|part| text.find(part).expect(part));
            assert!(places.is_sorted(), "{text}");
        }
        // Whether the job is done is known before it is queued again.
        assert!(both.find("-s \"$KOLO_DONE_FILE\"") < both.find("-gt 128"), "{both}");
    }

    #[test]
    fn nothing_breaks_out_of_its_line() {
        let bad = [
            Batch { name: "a\n#SBATCH --uid=0".into(), ..batch() },
            Batch { options: vec!["--x\nrm -rf".into()], ..batch() },
            Batch { nodes: 0, ..batch() },
            Batch { command: vec![], ..batch() },
        ];
        assert!(bad.iter().all(|batch| script(batch).is_err()));
        assert_eq!(quoted("$(x)"), "'$(x)'");
        assert_eq!(quoted(""), "''");
    }
}
