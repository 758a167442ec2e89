//! Training a byte-pair tokenizer with the library `tokenizers`.

use super::END_OF_TEXT;
use crate::error::ReadError;
use kolo_base::lock;
use std::sync::Mutex;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, DecoderWrapper, ModelWrapper, PreTokenizerWrapper, Tokenizer};

/// 256 bytes and the token between documents.
const VOCAB_MIN: usize = 257;

pub fn train(
    vocab: usize,
    pieces: impl Iterator<Item = Result<String, ReadError>> + Send,
) -> Result<String, ReadError> {
    if vocab < VOCAB_MIN {
        let message = format!("a vocabulary of {vocab} tokens is too small for all byte values");
        return Err(ReadError::new(message, format!("choose {VOCAB_MIN} tokens or more")));
    }
    let failed = |error: tokenizers::Error| {
        ReadError::new(format!("the tokenizer cannot be trained: {error}"), "give other text")
    };
    // Every byte is in the alphabet, so that any text can be encoded.
    let trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(vocab)
        .min_frequency(2)
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let mut trainer = TrainerWrapper::from(trainer);
    let mut tokenizer = Tokenizer::new(ModelWrapper::BPE(BPE::default()));
    let bytes = ByteLevel::new(false, true, true);
    tokenizer.with_pre_tokenizer(Some(PreTokenizerWrapper::ByteLevel(bytes)));
    tokenizer.with_decoder(Some(DecoderWrapper::ByteLevel(bytes)));
    // The library asks for text only: an error ends it, and is told after.
    let error = Mutex::new(None);
    let texts = pieces.map_while(|piece| piece.map_err(|failure| *lock(&error) = Some(failure)).ok());
    tokenizer.train(&mut trainer, texts).map_err(failed)?;
    if let Some(error) = lock(&error).take() {
        return Err(error);
    }
    tokenizer.to_string(true).map_err(failed)
}
