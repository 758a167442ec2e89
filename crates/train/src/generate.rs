//! Continues a text with a trained language model.
//!
//! A [`Generator`] keeps the keys and values of what it has read ([`kolo_models::Decoder`]), so each further token costs one
//! pass over the weights. The logits are those of the training graph on the same tokens, to the bit.
//!
//! When the text has grown as long as the model's context, the generator reads the last half of it again as a new beginning,
//! and goes on from there. So a text may be of any length, and every token is chosen with at least half a context in sight.

mod sampling;
mod stream;

pub use sampling::{Sampler, Sampling};
pub use stream::TextStream;

use crate::error::Error;
use crate::step::optimise;
use kolo_exec::{Executor, Options, Program, Session, Store};
use kolo_graph::Graph;
use kolo_models::{Build, Decoder, Model};
use kolo_ops::prelude::*;
use std::sync::Arc;

/// Tokens of a prompt that are read at a time, at most: what is held in memory does not grow with the prompt.
const READ_AT_ONCE_MAX: usize = 256;

/// A language model that reads tokens and says what may follow.
#[derive(Debug)]
pub struct Generator {
    model: Arc<dyn Model>,
    executor: Arc<dyn Executor>,
    threads: usize,
    store: Store,
    /// Reads one token.
    step: Session,
    /// Reads this many, which the last prompt needed.
    prompt: Option<(usize, Session)>,
    /// The tokens that are in sight.
    text: Vec<i32>,
}

fn decoder(model: &dyn Model) -> Result<&dyn Decoder, Error> {
    model.decoder().ok_or_else(|| {
        let message = "the model does not generate text";
        Error::Unfit {
            message: message.into(),
            hint: "generate with a language model, such as `kind = \"gpt\"`".into(),
        }
    })
}

/// The graph of reading `new` tokens of one text.
fn graph_of(decoder: &dyn Decoder, new: usize) -> Result<Graph, Error> {
    let builder = Builder::new();
    let cx = Build { builder: &builder, batch: 1, grains: 1, training: false };
    let [tokens, positions] = ["tokens", "positions"].map(|name| builder.step_input(name, Type::i32([1, new])));
    builder.output("logits", decoder.build(&cx, tokens, positions));
    Ok(optimise(builder.finish()?))
}

impl Generator {
    /// A generator of this model, whose parameters are all zero yet: see [`Generator::store_mut`].
    pub fn new(model: Arc<dyn Model>, executor: &Arc<dyn Executor>, threads: usize) -> Result<Self, Error> {
        let graph = graph_of(decoder(&*model)?, 1)?;
        let params = kolo_exec::Memory::new(Store::params_bytes(&graph));
        let store = Store::in_memory(&graph, params);
        let step = Session::compile(Program::new(executor, graph, Options::single(threads)), &store, None)?;
        Ok(Self { model, executor: Arc::clone(executor), threads, store, step, prompt: None, text: Vec::new() })
    }

    /// The model's parameters, by the names that training gave them. They are zero until somebody fills them.
    pub fn store_mut(&mut self) -> &mut Store {
        &mut self.store
    }

    /// Tokens that it can see at a time.
    pub fn context(&self) -> usize {
        self.model.decoder().map_or(0, Decoder::context)
    }

    /// Tokens that it knows: `0..vocab`.
    pub fn vocab(&self) -> usize {
        self.model.decoder().map_or(0, Decoder::vocab)
    }

    /// Forgets what it has read.
    pub fn clear(&mut self) {
        self.text.clear();
    }

    /// Reads some more tokens, at least one; logits of what follows.
    pub fn read(&mut self, tokens: &[u32]) -> Result<&[f32], Error> {
        let (context, vocab) = (self.context(), self.vocab());
        if let Some(unknown) = tokens.iter().find(|token| **token as usize >= vocab) {
            let message = format!("the prompt has token {unknown}, but the model knows 0 to {}", vocab - 1);
            return Err(Error::Unfit { message, hint: "use the tokenizer that the model was trained with".into() });
        }
        if tokens.is_empty() {
            let message = "nothing to continue: the prompt has no tokens".to_string();
            return Err(Error::Unfit { message, hint: "give a prompt of at least one token".into() });
        }
        let mut whole = std::mem::take(&mut self.text);
        let mut done = whole.len();
        whole.extend(tokens.iter().map(|token| *token as i32));
        if whole.len() > context {
            // Half a context, so that the next time is half a context away.
            whole.drain(..whole.len() - (context / 2).max(1));
            done = 0;
        }
        while done < whole.len() {
            let new = (whole.len() - done).min(READ_AT_ONCE_MAX);
            self.read_at(done, &whole[done..done + new])?;
            done += new;
        }
        self.text = whole;
        let session = match &self.prompt {
            Some((_, session)) => session,
            None => &self.step,
        };
        Ok(session.output("logits").unwrap_or_default())
    }

    /// Reads tokens at these positions, with the session of their number.
    fn read_at(&mut self, first: usize, tokens: &[i32]) -> Result<(), Error> {
        let new = tokens.len();
        if new == 1 {
            self.prompt = None;
        } else if self.prompt.as_ref().is_none_or(|(size, _)| *size != new) {
            let graph = graph_of(decoder(&*self.model)?, new)?;
            let program = Program::new(&self.executor, graph, Options::single(self.threads));
            self.prompt = Some((new, Session::compile(program, &self.store, None)?));
        }
        let session = self.prompt.as_mut().map_or(&mut self.step, |(_, session)| session);
        let feed = |feed: &mut kolo_exec::Feed<'_>| {
            if let Some(place) = feed.i32("tokens") {
                place.copy_from_slice(tokens);
            }
            if let Some(place) = feed.i32("positions") {
                place.iter_mut().zip(first..).for_each(|(place, at)| *place = at as i32);
            }
        };
        session.run(&mut self.store, feed, |_, _| {})?;
        Ok(())
    }

    /// Continues `prompt` by up to `count` tokens, or until `end` comes up, and tells each as it is chosen; `tell` returns
    /// whether to go on. Returns how many tokens were chosen, `end` not among them.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        sampling: &Sampling,
        count: usize,
        end: Option<u32>,
        mut tell: impl FnMut(u32) -> bool,
    ) -> Result<usize, Error> {
        let mut sampler = Sampler::new(sampling)?;
        let mut next = prompt.to_vec();
        for number in 0..count {
            let token = sampler.choose(self.read(&next)?, number as u64)?;
            if end == Some(token) || !tell(token) {
                return Ok(number);
            }
            next = vec![token];
        }
        Ok(count)
    }
}
