//! `kolo generate`: continues a text with a trained language model.

use crate::fail::Failure;
use crate::load::Kinds;
use crate::output::{self, print, println};
use crate::saved::{SavedArgs, Trained};
use clap::Args;
use kolo_base::ShownPath;
use kolo_data::ReadError;
use kolo_data::tokenizer::Tokenizer;
use kolo_exec::store::Entry;
use kolo_train::generate::{Generator, Sampling, TextStream};
use std::path::{Path, PathBuf};
use std::time::Instant;

#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub saved: SavedArgs,
    /// The text to continue
    #[arg(long, conflicts_with_all = ["prompt_file", "prompt_tokens"])]
    pub prompt: Option<String>,
    /// A file with the text to continue, or - for standard input
    #[arg(long, value_name = "FILE", conflicts_with = "prompt_tokens")]
    pub prompt_file: Option<PathBuf>,
    /// Tokens to continue, such as 15496,11; then tokens are printed
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub prompt_tokens: Vec<u32>,
    /// Tokens to add, at most
    #[arg(long, default_value_t = 100)]
    pub tokens: usize,
    /// Divides the logits: below 1 is safer, above is bolder, 0 takes the likeliest token
    #[arg(long, default_value_t = 1.0)]
    pub temperature: f32,
    /// Choose among the likeliest so many only
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Choose among the likeliest that together have this probability
    #[arg(long)]
    pub top_p: Option<f32>,
    /// The same seed gives the same text
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// The tokenizer (tokenizer.json), if the run does not have its own
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Go on after the token that ends a text
    #[arg(long)]
    pub ignore_end: bool,
    /// Print nothing but the text
    #[arg(long)]
    pub quiet: bool,
}

/// The tokenizer that the model was trained with: that of the run, unless it says nothing of one.
fn tokenizer(kinds: &Kinds, args: &GenerateArgs, trained: &Trained) -> Result<Tokenizer, Failure> {
    let used = trained.tokenizer();
    let failed = kolo_train::Error::from;
    if let Some(path) = &args.tokenizer {
        let given = Tokenizer::open(path).map_err(failed)?;
        let wrong = used.and_then(|used| used.check(&given).err());
        return wrong.map_or(Ok(given), |error| {
            let ReadError { message, hint, .. } = error;
            Err(Failure::usage(format!("--tokenizer {}: {message}", path.shown()), &format!("leave it out: {hint}")))
        });
    }
    if let Some(used) = used {
        return Ok(used.open().map_err(failed)?);
    }
    if let Some(path) = trained.named_tokenizer()? {
        return Ok(Tokenizer::open(Path::new(&path)).map_err(failed)?);
    }
    Ok(trained.alphabet(kinds)?.unwrap_or_else(Tokenizer::bytes))
}

/// Refuses a tokenizer that cannot be the model's.
fn check_vocabulary(tokenizer: &Tokenizer, vocab: usize, is_known: bool) -> Result<(), Failure> {
    let hint = "name the one that the model was trained with by --tokenizer, or give --prompt-tokens";
    if tokenizer.vocab() > vocab {
        let message = format!("the tokenizer has {} tokens, and the model {vocab}", tokenizer.vocab());
        return Err(Failure::usage(message, hint));
    }
    match tokenizer.is_bytes() && !is_known && vocab > tokenizer.vocab() {
        true => Err(Failure::usage(
            format!("the model has {vocab} tokens, and the run does not say which tokenizer made them"),
            hint,
        )),
        false => Ok(()),
    }
}

fn prompt(args: &GenerateArgs, tokenizer: &Tokenizer) -> Result<Vec<u32>, Failure> {
    if !args.prompt_tokens.is_empty() {
        return Ok(args.prompt_tokens.clone());
    }
    let text = match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) => read_text(path).map_err(|error| {
            Failure::usage(format!("--prompt-file {}: {error}", path.shown()), "name a file of UTF-8 text")
        })?,
        (None, None) => String::new(),
    };
    if text.is_empty() {
        // What a text begins with, if the tokenizer knows it.
        return tokenizer.end_of_text().map(|end| vec![end]).ok_or_else(|| {
            let message = "there is nothing to continue, and the tokenizer has no token that begins a text";
            Failure::usage(message, "give a text with --prompt, if only a letter or a line's end")
        });
    }
    let mut tokens = Vec::new();
    tokenizer.encode(&text, &mut tokens).map_err(|ReadError { message, hint, .. }| {
        Failure::usage(format!("the prompt cannot be read: {message}"), &hint)
    })?;
    Ok(tokens)
}

/// More than any prompt: a device that is named by mistake may have no end.
const PROMPT_BYTES_MAX: u64 = 64 << 20;

fn read_text(path: &Path) -> std::io::Result<String> {
    let bytes = match path.as_os_str() == "-" {
        true => kolo_base::read_limited(std::io::stdin().lock(), PROMPT_BYTES_MAX)?,
        false if kolo_base::is_open_stream(path) => {
            kolo_base::read_limited(std::fs::File::open(path)?, PROMPT_BYTES_MAX)?
        }
        false => kolo_base::read_regular(path, PROMPT_BYTES_MAX)?,
    };
    String::from_utf8(bytes).map_err(|_| std::io::Error::new(std::io::ErrorKind::InvalidData, "it is not UTF-8 text"))
}

/// Says that the model sees the end of a long prompt alone.
fn tell_of_length(args: &GenerateArgs, prompt: usize, context: usize) {
    if prompt > context && !args.quiet {
        let kept = (context / 2).max(1);
        output::print_error(&format!(
            "note: the prompt has {prompt} tokens and the model's context {context}: it sees the last {kept}"
        ));
    }
}

pub fn generate(kinds: &Kinds, args: &GenerateArgs) -> Result<(), Failure> {
    let trained = Trained::open(kinds, &args.saved)?;
    let with_tokens = !args.prompt_tokens.is_empty();
    let tokenizer = if with_tokens { Tokenizer::bytes() } else { tokenizer(kinds, args, &trained)? };
    let tokens = prompt(args, &tokenizer)?;
    let (executor, threads) = (args.saved.device.executor()?, args.saved.threads()?);
    let mut generator = Generator::new(trained.model(kinds)?, &executor, threads)?;
    if !with_tokens {
        check_vocabulary(&tokenizer, generator.vocab(), trained.tokenizer().is_some())?;
    }
    trained.fill(generator.store_mut(), Entry::is_param)?;
    let GenerateArgs { temperature, top_k, top_p, seed, .. } = *args;
    let sampling = Sampling { temperature, top_k, top_p, seed };
    sampling.check()?;
    tell_of_length(args, tokens.len(), generator.context());
    let end = tokenizer.end_of_text().filter(|_| !args.ignore_end && !with_tokens);
    let decode = |tokens: &[u32]| tokenizer.decode(tokens);
    let (begin, mut first_ms, mut stream) = (Instant::now(), 0.0, TextStream::default());
    if let Some(text) = args.prompt.as_ref().filter(|_| !args.quiet) {
        print!("{text}");
        output::flush();
    }
    let mut number = 0;
    let count = generator.generate(&tokens, &sampling, args.tokens, end, |token| {
        if number == 0 {
            first_ms = begin.elapsed().as_secs_f64() * 1e3;
        }
        number += 1;
        match with_tokens {
            true => print!("{token} "),
            false => print!("{}", stream.push(token, decode)),
        }
        output::flush();
        true
    })?;
    println!("{}", if with_tokens { String::new() } else { stream.finish(decode) });
    if !args.quiet {
        let rest_ms = begin.elapsed().as_secs_f64() * 1e3 - first_ms;
        let rate = count.saturating_sub(1) as f64 / (rest_ms / 1e3).max(1e-9);
        output::print_error(&format!(
            "{} + {count} tokens: first after {first_ms:.0} ms, then {rate:.1} tokens/s",
            tokens.len()
        ));
    }
    Ok(())
}
