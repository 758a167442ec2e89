//! `kolo data tokens`: trains a tokenizer, or turns text into a token file.

use super::convert::check_absent;
use crate::byte_progress::ByteProgress;
use crate::fail::Failure;
use crate::output::println;
use clap::{Args, Subcommand};
use kolo_base::ShownPath;
use kolo_data::ReadError;
use kolo_data::files::{self, DataFile};
use kolo_data::format::OpenError;
use kolo_data::formats::tokens::Description;
use kolo_data::tokenizer::{TextSource, Tokenizer, train_on, write_corpus};
use kolo_graph::settings::Settings;
use kolo_train::machine::format_count;
use std::path::{Path, PathBuf};

#[derive(Debug, Subcommand)]
pub enum TokensCommand {
    /// Train a byte-pair tokenizer on text
    Train(TokensTrain),
    /// Turn text into a token file, with a description beside it
    Apply(TokensApply),
}

#[derive(Debug, Args)]
pub struct TokensTrain {
    /// Text files (UTF-8, also packed as .gz or .zst), or patterns in quotes
    #[arg(required = true)]
    pub files: Vec<String>,
    /// The column with the text, of CSV and JSON Lines; each cell is a text of its own
    #[arg(long, value_name = "NAME")]
    pub column: Option<String>,
    /// Tokens that the tokenizer may have
    #[arg(long, default_value_t = 4096, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(257..=1_000_000))]
    pub vocab: usize,
    /// The tokenizer to write (JSON)
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Replace the file if it is there
    #[arg(long)]
    pub overwrite: bool,
    /// Print only errors
    #[arg(long)]
    pub quiet: bool,
}

#[derive(Debug, Args)]
pub struct TokensApply {
    /// Text files (UTF-8, also packed as .gz or .zst), or patterns in quotes
    #[arg(required = true)]
    pub files: Vec<String>,
    /// The column with the text, of CSV and JSON Lines; each cell is a text of its own
    #[arg(long, value_name = "NAME")]
    pub column: Option<String>,
    /// The tokenizer, as `train` writes it; by default every byte is a token
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// The token file to write; u16, or u32 if the tokenizer has more than 65,536 tokens
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Replace the file, and the description beside it, if they are there
    #[arg(long)]
    pub overwrite: bool,
    /// Print only errors
    #[arg(long)]
    pub quiet: bool,
}

pub fn tokens(command: &TokensCommand) -> Result<(), Failure> {
    match command {
        TokensCommand::Train(args) => train(args),
        TokensCommand::Apply(args) => apply(args),
    }
}

/// The text that the arguments name, and the bytes of its files.
/// The text of the files, of which none is the one to be written.
fn text_of(patterns: &[String], column: Option<&str>, out: &Path) -> Result<(TextSource, u64), Failure> {
    let settings = Settings::new("", "the command line");
    let mut all = Vec::new();
    for pattern in patterns {
        all.extend(files::list(pattern, &settings, "FILES").map_err(not_opened)?.files);
    }
    if let Some(file) = all.iter().find(|file| file.is_directory) {
        return Err(Failure::usage(format!("{} is a directory", file.path.shown()), "name the files in it"));
    }
    let is_out =
        |file: &&DataFile| out.canonicalize().is_ok_and(|out| file.path.canonicalize().is_ok_and(|file| file == out));
    if let Some(file) = all.iter().find(is_out) {
        return Err(Failure::usage(
            format!("--out: {} is one of the inputs", file.path.shown()),
            "choose another name",
        ));
    }
    let bytes = all.iter().map(|file| file.bytes).sum();
    Ok((TextSource::open(all, column, &settings).map_err(not_opened)?, bytes))
}

fn not_opened(error: OpenError) -> Failure {
    match error {
        OpenError::Read(error) => failed(error),
        OpenError::Setting(error) => error.into(),
    }
}

fn failed(error: ReadError) -> Failure {
    let error = error.without_skipping();
    let file = error.file.as_ref().map_or(String::new(), |file| format!("{}: ", file.shown()));
    let place = error.offset.map_or(String::new(), |offset| format!("byte {offset}: "));
    Failure::job(format!("{file}{place}{}", error.message), &error.hint)
}

fn train(args: &TokensTrain) -> Result<(), Failure> {
    check_absent(&args.out, args.overwrite)?;
    let (text, bytes) = text_of(&args.files, args.column.as_deref(), &args.out)?;
    let progress = ByteProgress::new(bytes, "reading", args.quiet);
    let trained = train_on(&text, args.vocab, &args.out, |bytes| progress.add(bytes));
    progress.finish();
    let tokenizer = trained.map_err(failed)?;
    if !args.quiet {
        let (tokens, bytes) = (format_count(tokenizer.vocab() as u64), format_count(progress.done()));
        println!("{}: {tokens} tokens, from {bytes} bytes of text", args.out.shown());
        if tokenizer.vocab() < args.vocab {
            println!("  The text has no more pairs that occur twice: give more text for {} tokens.", args.vocab);
        }
    }
    Ok(())
}

fn apply(args: &TokensApply) -> Result<(), Failure> {
    check_absent(&args.out, args.overwrite)?;
    check_absent(&Description::path(&args.out), args.overwrite)?;
    let (text, bytes) = text_of(&args.files, args.column.as_deref(), &args.out)?;
    let tokenizer = match &args.tokenizer {
        Some(path) => Tokenizer::open(path).map_err(failed)?,
        None => Tokenizer::bytes(),
    };
    let name = args.tokenizer.as_ref().map_or(String::new(), |path| path.display().to_string());
    let progress = ByteProgress::new(bytes, "encoding", args.quiet);
    let written = write_corpus(&text, &tokenizer, &name, &args.out, |bytes| progress.add(bytes));
    progress.finish();
    let written = written.map_err(failed)?;
    if !args.quiet {
        let (count, bytes) = (format_count(written.count), format_count(progress.done()));
        let per_token = progress.done() as f64 / written.count.max(1) as f64;
        println!(
            "{}: {count} tokens of {}, from {bytes} bytes of text ({per_token:.2} a token)",
            args.out.shown(),
            written.dtype
        );
    }
    Ok(())
}
