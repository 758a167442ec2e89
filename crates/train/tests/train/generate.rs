//! Generation with a cache says what the training graph says.

use super::trainer;
use kolo_exec::Executor;
use kolo_exec::cpu::Cpu;
use kolo_models::MODELS;
use kolo_train::generate::{Generator, Sampling};
use kolo_train::{Error, Trainer, job_file};
use std::sync::Arc;

const CONTEXT: usize = 40;
const VOCAB: usize = 61;

fn text_of_job() -> String {
    format!(
        "[job]\nseed = 3\n[model]\nkind = \"gpt\"\nlayers = 2\nwidth = 48\nheads = 3\ncontext = {CONTEXT}\nvocab = {VOCAB}\n\
         [data]\nsource = \"synthetic:tokens\"\nsamples = 8\nbatch = 2\ngrains = 1\nholdout = 0\n[train]\nsteps = 2\n"
    )
}

fn generator_of(text: &str, threads: usize) -> Result<Generator, Error> {
    let root = job_file::parse(text, "test.toml").unwrap();
    let model = kolo_models::make(MODELS, &root.table("model").unwrap(), None).unwrap();
    let executor: Arc<dyn Executor> = Arc::new(Cpu);
    Generator::new(model.into(), &executor, threads)
}

/// A trainer after two steps, and a generator with its weights.
fn trained(threads: usize) -> (Trainer, Generator) {
    let mut trainer = trainer(&text_of_job(), 2, 1);
    (0..2).for_each(|_| assert!(trainer.step().unwrap().is_finite()));
    let mut generator = generator_of(&text_of_job(), threads).unwrap();
    let params = trainer.store().entries().iter().filter(|entry| entry.is_param());
    for name in params.map(|entry| &entry.name) {
        let (from, to) = (trainer.store().values(name).unwrap(), generator.store_mut().values_mut(name).unwrap());
        to.copy_from_slice(from);
    }
    (trainer, generator)
}

/// Logits of the training graph after each of these tokens.
fn logits_of_training(trainer: &mut Trainer, tokens: &[u32]) -> Vec<Vec<f32>> {
    let all = trainer
        .predict(1, |feed| {
            let place = feed.i32("x").unwrap();
            place.fill(0);
            place.iter_mut().zip(tokens).for_each(|(place, token)| *place = *token as i32);
        })
        .unwrap();
    all.chunks(VOCAB).take(tokens.len()).map(<[f32]>::to_vec).collect()
}

fn text(count: usize) -> Vec<u32> {
    (0..count as u32).map(|at| (at * 37 + at / 3) % VOCAB as u32).collect()
}

#[test]
fn the_cache_gives_the_logits_of_training_to_the_bit() {
    let (mut trainer, mut generator) = trained(2);
    let tokens = text(CONTEXT);
    let want = logits_of_training(&mut trainer, &tokens);
    // Token by token, and a prompt at once with tokens after it.
    for prompt in [1, 2, 7, 33, CONTEXT] {
        generator.clear();
        assert_eq!(generator.read(&tokens[..prompt]).unwrap(), want[prompt - 1], "a prompt of {prompt}");
        for at in prompt..CONTEXT {
            assert_eq!(generator.read(&tokens[at..=at]).unwrap(), want[at], "a prompt of {prompt}, then token {at}");
        }
    }
    let (_, mut alone) = trained(1);
    assert_eq!(alone.read(&tokens).unwrap(), want[CONTEXT - 1]);
}

#[test]
fn a_full_context_goes_on_from_its_last_half() {
    let (mut trainer, mut generator) = trained(1);
    let tokens = text(CONTEXT + 3);
    generator.read(&tokens[..CONTEXT]).unwrap();
    let want = logits_of_training(&mut trainer, &tokens[CONTEXT + 1 - CONTEXT / 2..]);
    assert_eq!(generator.read(&tokens[CONTEXT..=CONTEXT]).unwrap(), want[CONTEXT / 2 - 1]);
    assert_eq!(generator.read(&tokens[CONTEXT + 1..=CONTEXT + 1]).unwrap(), want[CONTEXT / 2]);
    generator.clear();
    let expected = logits_of_training(&mut trainer, &tokens[CONTEXT + 3 - CONTEXT / 2..]);
    assert_eq!(generator.read(&tokens[..CONTEXT + 3]).unwrap(), { &expected[CONTEXT / 2 - 1] });
}

#[test]
fn a_seed_repeats_a_text_and_an_end_token_ends_it() {
    let (_, mut generator) = trained(2);
    let sampling = Sampling { temperature: 1.0, top_k: Some(20), top_p: Some(0.9), seed: 5 };
    let write = |generator: &mut Generator, end| {
        let mut written = Vec::new();
        generator.clear();
        let tell = |token| {
            written.push(token);
            true
        };
        let count = generator.generate(&[1, 2, 3], &sampling, 3 * CONTEXT, end, tell).unwrap();
        assert_eq!(count, written.len());
        written
    };
    let written = write(&mut generator, None);
    assert_eq!(written.len(), 3 * CONTEXT);
    assert_eq!(write(&mut generator, None), written);
    let at = written.iter().position(|token| *token == written[17]).unwrap();
    assert_eq!(write(&mut generator, Some(written[17])), written[..at]);
}

#[test]
fn wrong_tokens_and_other_models_are_errors() {
    let (_, mut generator) = trained(1);
    let error = generator.read(&[3, VOCAB as u32]).unwrap_err().to_string();
    assert!(error.starts_with("the prompt has token 61, but the model knows 0 to 60\n"), "{error}");
    assert!(generator.read(&[]).unwrap_err().to_string().starts_with("nothing to continue"));
    let error = generator_of("[model]\nkind = \"mlp\"\n", 1).unwrap_err().to_string();
    assert!(error.starts_with("the model does not generate text\n  hint: "), "{error}");
}
