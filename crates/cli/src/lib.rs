//! kolo: the whole system behind one command line.
//!
//! `kolo::run()` is the `kolo` binary. A program with a model, a source, an op or a strategy of its own registers it and hands
//! over; then all of the command line knows it:
//!
//! ```no_run
//! use kolo::prelude::*;
//!
//! # fn make(_: &Settings, _: Option<&[Field]>) -> Result<Box<dyn Model>, SettingError> { unimplemented!() }
//! fn main() -> std::process::ExitCode {
//!     kolo::App::new().model("mine", "my own model", make).run()
//! }
//! ```

mod args;
mod auto;
mod bench;
mod bench_comm;
mod bench_device;
mod bench_nccl;
mod byte_progress;
mod ckpt;
mod classes;
mod clusters;
mod cores;
mod data_command;
mod described;
mod device;
mod elastic;
mod eval;
mod fail;
mod flags;
mod folds;
mod generate;
mod graph;
mod load;
mod manifest;
mod out;
mod output;
mod plan;
mod planned_step;
mod predict;
mod progress;
mod published;
mod resume;
mod saved;
mod selftest;
mod selftest_nccl;
mod simulate;
mod slurm;
mod train;
mod transports;
mod whole_file;
mod workers;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use kolo_data::SourceKind;
use kolo_graph::OpKind;
use kolo_graph::simd;
use kolo_models::{Make, ModelKind};
use kolo_parallel::StrategyKind;
use load::Kinds;
use std::ffi::OsString;
use std::process::ExitCode;

/// What a program with its own model, source or loop needs.
pub mod prelude {
    pub use kolo_data::{Column, Opened, ReadError, SampleCost, Source, SourceKind};
    pub use kolo_exec::{Feed, Options, Session, StepError, Store, ValueError, Values, View};
    pub use kolo_graph::field::{Field, Kind};
    pub use kolo_graph::settings::{SettingError, Settings};
    pub use kolo_models::{Better, Build, Mean, Model, ModelKind, Outputs, classify, data_classes, data_shape};
    pub use kolo_ops::gradients;
    pub use kolo_ops::optim::{Adagrad, Adam, LambDirection, Lars, Rmsprop, Sgd, SgdPlain};
    pub use kolo_ops::prelude::*;
    pub use kolo_train::optimizer::{Optimizer, OptimizerError};
}

pub use kolo_ckpt as checkpoint;
pub use kolo_cuda as cuda;
pub use kolo_data as data;
pub use kolo_exec as exec;
pub use kolo_graph as graph_ir;
pub use kolo_models as models;
pub use kolo_ops as ops;
pub use kolo_parallel as parallel;
pub use kolo_plan as planner;
pub use kolo_train as training;
pub use kolo_train::gradcheck;

/// The command line, with what a job file can name.
#[derive(Clone, Debug, Default)]
pub struct App {
    kinds: Kinds,
    ops: Vec<OpKind>,
}

/// Time for rank 0 to say something.
const SPEAKING: std::time::Duration = std::time::Duration::from_millis(300);

impl App {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a model; one of the same name is replaced.
    pub fn model(mut self, name: &'static str, doc: &'static str, make: Make) -> Self {
        self.kinds.models.retain(|kind| kind.name != name);
        self.kinds.models.push(ModelKind { name, doc, make });
        self
    }

    /// Adds a source of samples; one of the same name is replaced.
    pub fn source(mut self, source: SourceKind) -> Self {
        self.kinds.sources.retain(|kind| kind.name != source.name);
        self.kinds.sources.push(source);
        self
    }

    /// Adds a strategy; one of the same name is replaced.
    pub fn strategy(mut self, strategy: StrategyKind) -> Self {
        self.kinds.strategies.retain(|kind| kind.name != strategy.name);
        self.kinds.strategies.push(strategy);
        self
    }

    /// Adds an op, for models and strategies to use. Its name must be its own: graphs are read by it.
    pub fn op(mut self, op: OpKind) -> Self {
        self.ops.push(op);
        self
    }

    /// Reads the command line and does what it says. Exit code 0: done, 1: the job failed, 2: the command was wrong.
    pub fn run(self) -> ExitCode {
        end_with_the_reader();
        // Where the system refuses a handler, limits end the process as they would without one.
        let _ = kolo_train::interrupt::hear_limits();
        let command = match args::Args::read(std::env::args_os()) {
            Ok(args) => args.command,
            Err(error) => {
                let error = with_hint(&self.kinds, error);
                // Of many workers with the same wrong command line one says so, before its launcher sees others end.
                match kolo_cluster::launcher::detect(&|name| std::env::var(name).ok()) {
                    Ok(Some(rank_info)) if rank_info.rank > 0 => std::thread::sleep(SPEAKING),
                    _ => show(&error),
                }
                return match error.use_stderr() {
                    true => ExitCode::from(2),
                    false => output::finish().map_or_else(fail::Failure::report, |()| ExitCode::SUCCESS),
                };
            }
        };
        if let Err(failure) = check_vectors().and_then(|()| register(&self.ops)) {
            return failure.report();
        }
        let outcome = match command {
            args::Command::Train(args) => train::train(&self.kinds, &args),
            args::Command::Plan(args) => {
                flags::check_planned(&args.job.workers, "plan").and_then(|()| plan::plan(&self.kinds, &args))
            }
            args::Command::Simulate(args) => simulate::simulate(&self.kinds, &args),
            args::Command::Graph(args) => {
                flags::check_planned(&args.job.workers, "graph").and_then(|()| graph::graph(&self.kinds, &args))
            }
            args::Command::Bench { command: args::Bench::Train(args) } => bench::train(&self.kinds, &args),
            args::Command::Bench { command: args::Bench::Comm(args) } => bench_comm::comm(&args),
            args::Command::Bench { command: args::Bench::Device(args) } => bench_device::device(&args),
            args::Command::Bench { command: args::Bench::Published(args) } => published::published(&self.kinds, &args),
            args::Command::Eval(args) => eval::eval(&self.kinds, &args),
            args::Command::Predict(args) => predict::predict(&self.kinds, &args),
            args::Command::Generate(args) => generate::generate(&self.kinds, &args),
            args::Command::Data { command } => data_command::run(&self.kinds, &command),
            args::Command::Slurm(args) => slurm::slurm(&self.kinds, &args),
            args::Command::Ckpt { command } => ckpt::ckpt(&self.kinds, &command),
            args::Command::Join(args) => elastic::join(&self.kinds, &args),
            args::Command::Agent => {
                return ExitCode::from(u8::try_from(kolo_cluster::agent::run()).unwrap_or(1));
            }
            args::Command::Devices(args) => device::devices(&args),
            args::Command::Selftest(args) => selftest::selftest(&args),
            args::Command::List { what } => graph::list(&self.kinds, what),
        };
        match outcome.and_then(|()| output::finish()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => failure.report(),
        }
    }
}

/// An unknown flag may be a key of the job file. What clap says instead, to put it behind `--`, helps with `kolo slurm` alone.
fn with_hint(kinds: &Kinds, mut error: clap::Error) -> clap::Error {
    let passes_on = std::env::args_os().nth(1).is_some_and(|command| command == "slurm");
    let flag = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(flag)) if error.kind() == ErrorKind::UnknownArgument && !passes_on => flag.clone(),
        _ => return error,
    };
    error.remove(ContextKind::Suggested);
    let is_flag = flag.starts_with("--") && error.get(ContextKind::SuggestedArg).is_none();
    let name = flag.trim_start_matches('-').split('=').next().unwrap_or_default().replace('-', "_");
    if let Some(key) = Some(name).filter(|_| is_flag).and_then(|name| load::key_named(kinds, &name)) {
        let tip = format!("`{key}` is a key of the job file: write `--set {key}=VALUE`");
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// What clap has to say, in colour unless the words that it quotes hold codes of their own.
fn show(error: &clap::Error) {
    let plain = |word: OsString| kolo_cluster::printable(&word.to_string_lossy()) == word.to_string_lossy();
    match (std::env::args_os().all(plain), error.use_stderr()) {
        (true, true) => _ = error.print(),
        (true, false) => output::keep(error.print()),
        (false, _) => output::print_lines(error.render().to_string().trim_end()),
    }
}

/// A model of somebody's own may print as well. If the reader has enough, as `head` does, that ends the program without a
/// word, as [`output`] does. The signal that would do so stays ignored, as a peer that closes a link must not end a worker.
fn end_with_the_reader() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if info
            .payload_as_str()
            .is_some_and(|text| text.starts_with("failed printing to stdout") && text.contains("Broken pipe"))
        {
            std::process::exit(128 + 13);
        }
        usual(info);
    }));
}

/// Ops are known for the rest of the process, as graphs are read anywhere in it.
fn register(ops: &[OpKind]) -> Result<(), fail::Failure> {
    if ops.is_empty() {
        return Ok(());
    }
    kolo_ops::register(ops.to_vec().leak()).map_err(|message| {
        fail::Failure::usage(format!("an op of this program: {message}"), "rename it where the program declares it")
    })
}

/// A limit that is misspelt would silently be none.
fn check_vectors() -> Result<(), fail::Failure> {
    let Some(name) = std::env::var_os(simd::LIMIT) else { return Ok(()) };
    let name = name.to_string_lossy();
    if simd::Level::named(&name).is_some() {
        return Ok(());
    }
    let names = simd::Level::NAMES.map(|(name, _)| name).join(", ");
    Err(fail::Failure::usage(format!("{}={name} is not a vector width", simd::LIMIT), &format!("write one of {names}")))
}

/// The `kolo` binary.
pub fn run() -> ExitCode {
    App::new().run()
}
