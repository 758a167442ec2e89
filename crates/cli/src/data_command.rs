//! `kolo data`: looking at data, and preparing them.

pub mod tokens;

use crate::fail::Failure;
use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// Train a byte-pair tokenizer, or turn text into token files
    Tokens {
        #[command(subcommand)]
        command: tokens::TokensCommand,
    },
}

pub fn run(command: &DataCommand) -> Result<(), Failure> {
    match command {
        DataCommand::Tokens { command } => tokens::tokens(command),
    }
}
