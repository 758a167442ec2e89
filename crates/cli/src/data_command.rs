//! `kolo data`: looking at data, and preparing them.

pub mod bench;
pub mod convert;
pub mod inspect;
mod open;
pub mod tokens;

use crate::fail::Failure;
use crate::load::Kinds;
use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// Show what files hold: records, columns, ranges, a few samples, pictures
    Inspect(inspect::InspectArgs),
    /// Write the records of files in another format
    Convert(convert::ConvertArgs),
    /// Say whether the data of a job come fast enough for its model, and which stage takes longest
    Bench(Box<bench::DataBenchArgs>),
    /// Train a byte-pair tokenizer, or turn text into token files
    Tokens {
        #[command(subcommand)]
        command: tokens::TokensCommand,
    },
}

pub fn run(kinds: &Kinds, command: &DataCommand) -> Result<(), Failure> {
    match command {
        DataCommand::Inspect(args) => inspect::inspect(args),
        DataCommand::Convert(args) => convert::convert(args),
        DataCommand::Bench(args) => bench::bench(kinds, args),
        DataCommand::Tokens { command } => tokens::tokens(command),
    }
}
