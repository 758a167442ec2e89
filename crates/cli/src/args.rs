//! The command line as types.

use crate::data_command::DataCommand;
use crate::device::{self, DeviceArg};
use crate::eval::EvalArgs;
use crate::generate::GenerateArgs;
use crate::predict::PredictArgs;
use crate::transports::TransportKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args as ClapArgs, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use kolo_train::timeline::StepRange;
use std::ffi::OsString;
use std::path::PathBuf;

#[derive(Debug, Parser)]
#[command(
    name = "kolo",
    version,
    about = "Plans and trains neural networks: the same weights to the bit, however many workers ran it"
)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

impl Args {
    /// Reads a command line, its first word the program, and remembers which flags stand on it.
    pub fn read(words: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let matches = with_negative_numbers(Self::command()).try_get_matches_from(words)?;
        let mut args = Self::from_arg_matches(&matches)?;
        if let Some(workers) = args.command.workers_mut() {
            workers.given = given(&matches);
        }
        Ok(args)
    }
}

/// A number below 0 is a value, which the command refuses for what it is, and no flag.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let allow = |arg: clap::Arg| match arg.get_action().takes_values() && !arg.is_positional() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    };
    command.mut_args(allow).mut_subcommands(with_negative_numbers)
}

/// The flags of the innermost command that the user wrote.
fn given(matches: &ArgMatches) -> Vec<String> {
    if let Some((_, inner)) = matches.subcommand() {
        return given(inner);
    }
    let written = |id: &&clap::Id| matches.value_source(id.as_str()) == Some(ValueSource::CommandLine);
    matches.ids().filter(written).map(|id| id.as_str().replace('_', "-")).collect()
}

impl Command {
    fn workers_mut(&mut self) -> Option<&mut Workers> {
        match self {
            Command::Train(args) => Some(&mut args.job.workers),
            Command::Plan(args) => Some(&mut args.job.workers),
            Command::Graph(args) => Some(&mut args.job.workers),
            Command::Bench { command: Bench::Train(args) } => Some(&mut args.job.workers),
            Command::Bench { command: Bench::Comm(args) } => Some(&mut args.workers),
            Command::Bench { command: Bench::Device(_) | Bench::Published(_) } => None,
            Command::Data { command: DataCommand::Bench(args) } => Some(&mut args.job.workers),
            Command::Simulate(_)
            | Command::Eval(_)
            | Command::Predict(_)
            | Command::Generate(_)
            | Command::Data { .. } => None,
            Command::Devices(_) | Command::Selftest(_) => None,
            Command::Slurm(_) | Command::Ckpt { .. } | Command::Join(_) | Command::Agent | Command::List { .. } => None,
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a job; without a file, the built-in digits job
    Train(Train),
    /// Evaluate a trained model on its held-out samples or on other data
    Eval(EvalArgs),
    /// Run a trained model on new data
    Predict(PredictArgs),
    /// Continue a text with a trained language model
    Generate(GenerateArgs),
    /// Predict what a job will cost: FLOPs, bytes, memory, time, money
    Plan(PlanArgs),
    /// Simulate a job on a cluster that a file describes: a step, how it scales, and weeks with failures
    Simulate(SimulateArgs),
    /// Print a job's graph as text
    Graph(GraphArgs),
    /// Run benchmarks
    Bench {
        #[command(subcommand)]
        command: Bench,
    },
    /// Inspect and prepare data
    Data {
        #[command(subcommand)]
        command: DataCommand,
    },
    /// Write a batch script for Slurm that trains a job
    Slurm(Slurm),
    /// Inspect, compare, export and import checkpoints
    Ckpt {
        #[command(subcommand)]
        command: Ckpt,
    },
    /// Join a running elastic job as another worker
    Join(Join),
    /// Run the workers of one host; `--hosts` starts it there
    #[command(hide = true)]
    Agent,
    /// List the processors, GPUs and GPU libraries of this machine
    Devices(DevicesArgs),
    /// Compare every op on a device with its definition
    Selftest(SelftestArgs),
    /// List what a job file can name
    List {
        /// What to list
        what: Listing,
    },
}

#[derive(Debug, ClapArgs)]
pub struct DevicesArgs {}

#[derive(Debug, ClapArgs)]
pub struct SelftestArgs {
    #[arg(long, default_value = "auto", help = device::tested_help())]
    pub device: DeviceArg,
    /// Only this op; may be repeated
    #[arg(long)]
    pub op: Vec<String>,
    /// Only compile the kernels of an H200, which needs NVRTC and no GPU
    #[arg(long)]
    pub compile_only: bool,
    /// Check exchanges over NCCL in a group of one GPU, instead of ops
    #[arg(long, conflicts_with_all = ["op", "compile_only"])]
    pub nccl: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Listing {
    Models,
    Sources,
    Strategies,
    Ops,
    /// Clusters that `--cluster` knows by name
    Clusters,
}

/// What every command on a job takes.
#[derive(Debug, ClapArgs)]
pub struct JobArgs {
    /// The job file (TOML)
    pub job: Option<PathBuf>,
    /// Override a key of the job file, such as --set train.optimizer.lr=0.01
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Threads; all cores by default
    #[arg(long)]
    pub threads: Option<usize>,
    #[arg(long, default_value = "auto", help = device::help())]
    pub device: DeviceArg,
    #[command(flatten)]
    pub workers: Workers,
}

/// What a plan of a job takes: as [`JobArgs`], with a device that need not be here.
#[derive(Debug, ClapArgs)]
pub struct PlannedJobArgs {
    /// The job file (TOML)
    pub job: Option<PathBuf>,
    /// Override a key of the job file, such as --set train.optimizer.lr=0.01
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Threads; all cores by default
    #[arg(long)]
    pub threads: Option<usize>,
    #[arg(long, default_value = "auto", help = device::planned_help())]
    pub device: String,
    #[command(flatten)]
    pub workers: Workers,
}

impl PlannedJobArgs {
    /// The executor of this machine that is meant.
    fn here(&self) -> Option<DeviceArg> {
        self.device.parse().ok()
    }

    /// Whether the device is not an executor of this machine.
    pub fn names_a_device(&self) -> bool {
        self.here().is_none()
    }

    /// The same for a job that runs here.
    pub fn job_args(&self) -> JobArgs {
        JobArgs {
            job: self.job.clone(),
            set: self.set.clone(),
            threads: self.threads,
            device: self.here().unwrap_or(DeviceArg::Auto),
            workers: self.workers.clone(),
        }
    }
}

/// How workers are started and reach each other.
#[derive(Clone, Debug, ClapArgs)]
pub struct Workers {
    /// Workers on this host; mpirun and srun start their own
    #[arg(short = 'n', long = "workers", default_value_t = 1)]
    pub count: usize,
    /// Start workers on several hosts over ssh, such as a:2,b:2 or node[01-04]:8
    #[arg(long, value_name = "LIST", conflicts_with = "count")]
    pub hosts: Option<String>,
    /// The remote shell of --hosts, with its options
    #[arg(long, value_name = "COMMAND", default_value = "ssh -o BatchMode=yes -o ConnectTimeout=10")]
    pub ssh: String,
    /// This host's address on the network to use; detected by default
    #[arg(long, value_name = "ADDRESS")]
    pub interface: Option<std::net::IpAddr>,
    /// How workers exchange data
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: TransportKind,
    /// TCP streams between two workers, for networks that one stream cannot saturate
    #[arg(long, default_value_t = 1, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=8))]
    pub streams: usize,
    /// The MPI library to load, instead of the launcher's
    #[arg(long, value_name = "FILE")]
    pub mpi_library: Option<PathBuf>,
    /// The number that all deadlines derive from, in milliseconds
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(20..=3_600_000))]
    pub heartbeat_ms: u64,
    /// The flags that stand on the command line, without their dashes.
    #[arg(skip)]
    pub given: Vec<String>,
}

impl Workers {
    /// One, with all defaults.
    pub fn alone() -> Self {
        #[derive(Parser)]
        struct Alone {
            #[command(flatten)]
            workers: Workers,
        }
        Alone::parse_from(["kolo"]).workers
    }
}

#[derive(Debug, ClapArgs)]
pub struct Train {
    #[command(flatten)]
    pub job: JobArgs,
    /// Write checkpoints, metrics.jsonl, report.json, TensorBoard events and pictures into this directory; runs/NAME-NUMBER by default
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Replace the files of an earlier run in --out
    #[arg(long, requires = "out")]
    pub overwrite: bool,
    /// Resume from the newest checkpoint in --out, or of this job's last run; start from the beginning if there is none
    #[arg(long, conflicts_with_all = ["overwrite", "no_out"])]
    pub resume: bool,
    /// Save nothing: make no directory for this run
    #[arg(long, conflicts_with = "out")]
    pub no_out: bool,
    /// The directory that the supervisor has made for this run
    #[arg(long, hide = true, conflicts_with_all = ["out", "no_out"])]
    pub fresh_out: Option<PathBuf>,
    /// The mark of this run in the lock file of its directory, which the supervisor holds
    #[arg(long, hide = true)]
    pub out_mark: Option<String>,
    /// Write the report (JSON) to this file
    #[arg(long)]
    pub report: Option<PathBuf>,
    /// Print only errors
    #[arg(long)]
    pub quiet: bool,
    /// Write a timeline of compute and communication of all ranks, for Perfetto or Chrome's tracing page
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// Steps that the timeline shows, counted from 0, end excluded: 100..120, 100.. or ..20
    #[arg(long, value_name = "FIRST..END", requires = "trace")]
    pub trace_steps: Option<StepRange>,
    /// Find the fastest layout of this machine's workers and train with it; the weights do not change
    #[arg(long)]
    pub auto: bool,
    /// Cross-validation: train this many folds of the data one after the other, each on all others
    #[arg(long, value_name = "COUNT", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(2..=1000))]
    pub folds: Option<usize>,
    /// Train asynchronously with parameter servers
    #[arg(long = "async")]
    pub asynchronous: bool,
    /// Parameter servers, in addition to the workers
    #[arg(long, default_value_t = 1, requires = "asynchronous")]
    pub servers: usize,
    /// Steps that a worker may be ahead of the slowest: 0 is synchronous, `none` is no bound
    #[arg(long, default_value = "4", requires = "asynchronous")]
    pub staleness: String,
    /// Train synchronously first, and compare both
    #[arg(long, requires = "asynchronous")]
    pub compare: bool,
    /// Continue with the remaining workers when some are lost, and accept new ones
    #[arg(long)]
    pub elastic: bool,
    /// Fewest workers with which an elastic job continues; 1 by default
    #[arg(long, value_name = "WORKERS", requires = "elastic")]
    pub min: Option<usize>,
    /// How many restarts of lost workers are allowed, in total
    #[arg(long, default_value_t = 3, requires = "elastic")]
    pub restarts: u32,
}

#[derive(Debug, ClapArgs)]
pub struct Join {
    /// The job's --out directory, or the file `join` in it
    pub path: PathBuf,
    /// Threads of this worker
    #[arg(long)]
    pub threads: Option<usize>,
}

#[derive(Debug, ClapArgs)]
pub struct Slurm {
    /// The job file (TOML)
    pub job: Option<PathBuf>,
    #[arg(long, default_value_t = 1)]
    pub nodes: usize,
    /// Workers per node
    #[arg(long, default_value_t = 1)]
    pub tasks_per_node: usize,
    /// Cores, and threads, of each worker
    #[arg(long)]
    pub cpus_per_task: Option<usize>,
    /// The time limit, such as 2:00:00
    #[arg(long)]
    pub time: Option<String>,
    #[arg(long)]
    pub partition: Option<String>,
    /// Another option for sbatch, such as --sbatch=--gres=gpu:4
    #[arg(long = "sbatch", value_name = "OPTION", allow_hyphen_values = true)]
    pub options: Vec<String>,
    /// When the time limit is near, save and requeue the job; it resumes from its newest checkpoint
    #[arg(long)]
    pub requeue: bool,
    /// Submit the script; without this and --output it is printed
    #[arg(long)]
    pub submit: bool,
    /// Write the script to this file
    #[arg(short, long)]
    pub output: Option<PathBuf>,
    /// Options passed on to `kolo train`
    #[arg(last = true)]
    pub train: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub enum Ckpt {
    /// List the checkpoints of a run
    Ls {
        /// The directory of a run, or of checkpoints
        run: PathBuf,
    },
    /// Show what a checkpoint holds: step, weights, settings, tensors
    Show {
        /// A run, a checkpoint or a safetensors file
        path: PathBuf,
    },
    /// Check every byte against the digests, and list what is damaged
    Verify {
        /// A checkpoint, or a run to check all of its checkpoints
        path: PathBuf,
    },
    /// Show where two checkpoints differ; exit code 1 if they do
    Diff {
        /// A run, a checkpoint or a safetensors file
        first: PathBuf,
        second: PathBuf,
    },
    /// Write the model as one safetensors file
    Export {
        /// A run or a checkpoint
        path: PathBuf,
        /// The file to write
        out: PathBuf,
        /// The library whose names and layouts to use; kolo's own by default
        #[arg(long, value_enum)]
        to: Option<ExportTarget>,
        /// Replace the file, and config.json beside it, if they are there
        #[arg(long)]
        overwrite: bool,
    },
    /// Make a run from weights that transformers, torchvision or PyTorch saved as safetensors
    Import {
        /// The safetensors file, the model.safetensors.index.json of several, or the directory of either
        file: PathBuf,
        /// The directory of the run to make
        out: PathBuf,
        /// The job file whose model the weights are for
        #[arg(long, value_name = "JOB")]
        model: PathBuf,
        /// Override a key of the job file
        #[arg(long = "set", value_name = "KEY=VALUE")]
        set: Vec<String>,
        /// Replace the files of another run in that directory
        #[arg(long)]
        overwrite: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExportTarget {
    /// Hugging Face's transformers: GPT-2, Llama
    Hf,
    /// PyTorch: torchvision's ResNets, AlexNet, VGG and Inception, GPT-2 of nn.Linear layers, other models as they are
    Torch,
}

#[derive(Debug, ClapArgs)]
pub struct PlanArgs {
    #[command(flatten)]
    pub job: PlannedJobArgs,
    /// Search for the best layout on -n devices: data, tensor, pipeline, sequence, ZeRO, recompute, micro-batches, schedule
    #[arg(long)]
    pub search: bool,
    /// Write the layout that --search found into the job file
    #[arg(long)]
    pub write: bool,
    /// Show what limits the step, and which changes would help most
    #[arg(long)]
    pub why: bool,
    /// Plan for the cluster that this file (TOML) describes, or for one of `kolo list clusters`
    #[arg(long, value_name = "FILE|NAME")]
    pub cluster: Option<PathBuf>,
    /// With --search: rank so many layouts, those that differ in their micro-batches alone, too; without it ten of different kinds
    #[arg(long, value_name = "COUNT")]
    pub layouts: Option<usize>,
    /// With --search: the most memory that a worker may use, such as 40GiB
    #[arg(long, value_name = "SIZE")]
    pub max_memory: Option<String>,
    /// With --search: the most that the whole run may cost
    #[arg(long, value_name = "PRICE")]
    pub max_cost: Option<f64>,
    /// With --search: the most hours that the whole run may take
    #[arg(long, value_name = "HOURS")]
    pub deadline: Option<f64>,
    /// Samples per epoch, instead of the number in the data
    #[arg(long)]
    pub samples: Option<f64>,
    /// Epochs, instead of the number in the job
    #[arg(long)]
    pub epochs: Option<f64>,
    /// Devices that share the work
    #[arg(long, default_value_t = 1)]
    pub devices: usize,
    /// Peak TFLOP/s of one device; this machine's measured rate by default
    #[arg(long)]
    pub tflops: Option<f64>,
    /// The fraction of the peak that training reaches
    #[arg(long, default_value_t = 0.4)]
    pub utilisation: f64,
    /// Price of one device for one hour
    #[arg(long)]
    pub price: Option<f64>,
    /// Predict the time from this machine's rates, without timing any of the job's kernels
    #[arg(long)]
    pub by_rates: bool,
    /// For a model that workers share: show where every parameter lies, and every exchange
    #[arg(long)]
    pub explain: bool,
    /// Make a device entry from the report of a run; nothing else is planned
    #[arg(long, value_name = "REPORT")]
    pub calibrate: Option<PathBuf>,
    /// Where --calibrate writes the entry (TOML), instead of printing it
    #[arg(long, value_name = "FILE", requires = "calibrate")]
    pub entry: Option<PathBuf>,
    /// Draw the pipeline's schedule, into an SVG file if one is named
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub schedule: Option<Option<PathBuf>>,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, ClapArgs)]
pub struct SimulateArgs {
    /// The job file (TOML)
    pub job: Option<PathBuf>,
    /// Override a key of the job file, such as --set parallel.tensor=8
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// The cluster file (TOML): device, levels, links, failures; or one of `kolo list clusters`
    #[arg(long, value_name = "FILE|NAME")]
    pub cluster: PathBuf,
    /// A device in place of the one that the cluster file names: its name, or a file such as mine.toml
    #[arg(long)]
    pub device: Option<String>,
    /// Devices; all of the cluster by default
    #[arg(short = 'n', long = "devices")]
    pub devices: Option<usize>,
    /// Simulate this many weeks of training, with the failure rates of the cluster file
    #[arg(long)]
    pub weeks: Option<f64>,
    /// Seed of noise and failures; the same seed gives the same simulation
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// The spread of a rank's compute time, as a fraction: 0.02 is 2 %
    #[arg(long, value_name = "SPREAD", default_value_t = 0.0)]
    pub noise: f64,
    /// A slow rank, and how many times as long it takes; may be repeated
    #[arg(long, value_name = "RANK:FACTOR")]
    pub slow: Vec<String>,
    /// Seconds between checkpoints; the best interval by default
    #[arg(long, value_name = "SECONDS")]
    pub checkpoint_every: Option<f64>,
    /// Continue with fewer devices when some fail, instead of waiting for a repair
    #[arg(long)]
    pub elastic: bool,
    /// Spare devices that replace failed ones
    #[arg(long, value_name = "DEVICES", default_value_t = 0)]
    pub spares: usize,
    /// Write everything to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw the step, the scaling curves and the weeks into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Write the step as a timeline for Perfetto or Chrome's tracing page
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub struct GraphArgs {
    #[command(flatten)]
    pub job: JobArgs,
    /// The graph as built, before any rewrite
    #[arg(long)]
    pub raw: bool,
    /// The evaluation graph instead of the training step
    #[arg(long)]
    pub evaluation: bool,
    /// With several workers, whose graph to print
    #[arg(long, default_value_t = 0)]
    pub rank: usize,
}

#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Time whole training steps
    Train(BenchTrain),
    /// Time every collective on every transport
    Comm(BenchComm),
    /// Measure this machine: matrix products by shape, and memory streams
    Device(BenchDevice),
    /// Predict published results from descriptions of their clusters and jobs
    Published(BenchPublished),
}

#[derive(Debug, ClapArgs)]
pub struct BenchDevice {
    #[arg(long, default_value = "cpu", help = device::measured_help())]
    pub device: DeviceArg,
    /// Threads that together are the device; all cores by default, or a worker's share of them
    #[arg(long)]
    pub threads: Option<usize>,
    /// Workers that compute at the same time: the device is one of them
    #[arg(short = 'n', long, default_value_t = 1)]
    pub workers: usize,
    /// The name of the device in the file
    #[arg(long, default_value = "this-machine")]
    pub name: String,
    /// Write the entry (TOML) for the planner to this file
    #[arg(long, value_name = "FILE")]
    pub write: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub struct BenchPublished {
    /// The folder of `rows.toml` and of the job and cluster files that it names; by default those that kolo carries
    pub folder: Option<PathBuf>,
    /// Only rows whose names contain this; may be repeated
    #[arg(long)]
    pub only: Vec<String>,
    /// Show where the time and the memory of every row go
    #[arg(long)]
    pub explain: bool,
    /// Write the rows (JSON) to this file
    #[arg(long)]
    pub report: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub struct BenchComm {
    #[command(flatten)]
    pub workers: Workers,
    /// Collectives, such as all_reduce,broadcast; all by default
    #[arg(long, value_delimiter = ',')]
    pub op: Vec<String>,
    /// Sizes in bytes, optionally with the suffix K, M or G
    #[arg(long, value_delimiter = ',', default_value = "4,256,2K,16K,128K,1M,8M,64M")]
    pub bytes: Vec<String>,
    /// Calls per size; fewer for large ones
    #[arg(long, default_value_t = 200, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    pub iterations: usize,
    /// Use private buffers instead of memory that the ranks share
    #[arg(long)]
    pub private: bool,
    /// Each worker rewrites its buffer before every call, outside the measured time, as a trainer does
    #[arg(long)]
    pub fresh: bool,
    /// Each call is started and then waited for, as a trainer does: queueing it counts, too
    #[arg(long)]
    pub started: bool,
    /// Write the rows (JSON) to this file
    #[arg(long)]
    pub report: Option<PathBuf>,
    /// Write a cluster file (TOML) of these workers, with the measured link; implies --fresh and --started
    #[arg(long, value_name = "FILE")]
    pub write: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub struct BenchTrain {
    #[command(flatten)]
    pub job: JobArgs,
    #[arg(long, default_value_t = 20)]
    pub steps: usize,
    #[arg(long, default_value_t = 3)]
    pub warmup: usize,
    /// Grains computed at the same time; as many as threads by default
    #[arg(long)]
    pub lanes: Option<usize>,
    /// Train on the first batch over and over, so that making data is not timed
    #[arg(long)]
    pub hold_batch: bool,
    /// Write the result (JSON) to this file
    #[arg(long)]
    pub report: Option<PathBuf>,
    /// Print the time of every kind of op
    #[arg(long)]
    pub profile: bool,
    /// Read `run K` lines from standard input and answer each with a line of JSON
    #[arg(long)]
    pub serve: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// What the sources of all crates, without their tests, have between backticks in their texts, and where.
    fn quoted() -> Vec<(String, String)> {
        fn visit(path: &Path, found: &mut Vec<(String, String)>) {
            for path in std::fs::read_dir(path).into_iter().flatten().map(|entry| entry.expect("an entry").path()) {
                if path.ends_with("tests") || path.ends_with("tests.rs") {
                    continue;
                }
                if path.is_dir() {
                    visit(&path, found);
                }
                let Some(text) =
                    std::fs::read_to_string(&path).ok().filter(|_| path.extension() == Some("rs".as_ref()))
                else {
                    continue;
                };
                // Tests name what is wrong on purpose.
                let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
                for (at, line) in text.lines().enumerate() {
                    let line = line.trim_start();
                    if line.starts_with("//") || !line.contains('`') {
                        continue;
                    }
                    let place = format!("{}:{}", path.display(), at + 1);
                    found.extend(line.split('`').skip(1).step_by(2).map(|words| (place.clone(), words.to_string())));
                }
            }
        }
        let mut found = Vec::new();
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for entry in std::fs::read_dir(crates).expect("the crates") {
            visit(&entry.expect("a crate").path().join("src"), &mut found);
        }
        found
    }

    fn has_flag(command: &clap::Command, flag: &str) -> bool {
        command.get_arguments().any(|one| one.get_long() == Some(flag))
            || command.get_subcommands().any(|inner| has_flag(inner, flag))
    }

    /// What is wrong with a command line that a message names.
    fn wrong_with(line: &str) -> Option<String> {
        let root = Args::command();
        let mut command = &root;
        let mut is_command = true;
        for word in line.split_whitespace().skip(1) {
            if let Some(flag) = word.strip_prefix("--").filter(|flag| !flag.is_empty()) {
                let flag = flag.split('=').next().unwrap_or(flag);
                is_command = false;
                if !flag.contains('{') && flag != "help" && !has_flag(command, flag) {
                    return Some(format!("{} has no --{flag}", command.get_name()));
                }
            } else if is_command && command.has_subcommands() {
                if word.contains('{') {
                    return None;
                }
                match command.find_subcommand(word) {
                    Some(inner) => command = inner,
                    None => return Some(format!("{} has no {word}", command.get_name())),
                }
            } else {
                is_command = false;
            }
        }
        None
    }

    /// Flags of other programs that messages name.
    const OF_OTHERS: &[&str] = &["features", "locked", "long", "mpi", "no-default-features", "release"];

    #[test]
    fn messages_name_commands_and_flags_that_there_are() {
        let all = quoted();
        let lines: Vec<&(String, String)> = all.iter().filter(|(_, words)| words.starts_with("kolo ")).collect();
        assert!(lines.len() > 40, "{} command lines", lines.len());
        let mut wrong: Vec<String> = lines
            .iter()
            .filter_map(|(place, line)| Some(format!("{place}: `{line}`: {}", wrong_with(line)?)))
            .collect();
        let root = Args::command();
        for (place, words) in all.iter().filter(|(_, words)| words.starts_with("--")) {
            let flag = words[2..].split([' ', '=']).next().unwrap_or_default();
            let is_name = !flag.is_empty() && flag.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
            if is_name && !OF_OTHERS.contains(&flag) && !has_flag(&root, flag) {
                wrong.push(format!("{place}: `{words}`: no command has --{flag}"));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(wrong_with("kolo train --epochs 3").is_some() && wrong_with("kolo data eat").is_some());
    }

    /// The documents have every key of a job file.
    #[test]
    fn messages_name_keys_that_the_documents_have() {
        const SECTIONS: [&str; 7] = ["job", "model", "data", "train", "parallel", "memory", "checkpoint"];
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        let text: String = std::fs::read_dir(docs)
            .expect("the documents")
            .filter_map(|entry| std::fs::read_to_string(entry.expect("an entry").path()).ok())
            .collect();
        let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
        let words: std::collections::BTreeSet<&str> = text.split(|letter| !is_part(letter)).collect();
        let mut count = 0;
        let mut wrong = Vec::new();
        for (place, quoted) in quoted() {
            let key: String = quoted.chars().take_while(|letter| is_part(*letter) || *letter == '.').collect();
            let mut parts = key.split('.');
            if !SECTIONS.contains(&parts.next().unwrap_or_default()) || !key.contains('.') || quoted.contains("()") {
                continue;
            }
            count += 1;
            if let Some(unknown) = parts.find(|part| !part.is_empty() && !words.contains(part)) {
                wrong.push(format!("{place}: `{quoted}`: no page has the key {unknown}"));
            }
        }
        assert!(count > 50, "{count} keys");
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}
