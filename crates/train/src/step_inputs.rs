//! What a step is fed beside its samples: the learning rate, its number, the key of its random numbers. Each is an input of
//! its role, whatever it is called.

use kolo_exec::Feed;
use kolo_graph::{Graph, InputRole};

/// The names of a graph's inputs by role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepInputs {
    rates: Vec<String>,
    numbers: Vec<String>,
    rngs: Vec<String>,
}

impl StepInputs {
    pub fn of(graph: &Graph) -> Self {
        let named = |role: InputRole| {
            let inputs = graph.inputs().filter(|(_, input)| input.role == role);
            inputs.map(|(_, input)| input.name.clone()).collect()
        };
        let [rates, numbers, rngs] = [InputRole::LearningRate, InputRole::StepNumber, InputRole::Rng].map(named);
        Self { rates, numbers, rngs }
    }

    /// The rate of a step, and its number as the optimizer counts: from one.
    pub fn feed_step(&self, feed: &mut Feed<'_>, rate: f32, number: usize) {
        for (names, value) in [(&self.rates, rate), (&self.numbers, number as f32)] {
            for name in names {
                if let Some(slot) = feed.f32(name) {
                    slot.fill(value);
                }
            }
        }
    }

    /// The key of the random numbers of a grain whose first sample this is.
    pub fn feed_rng(&self, feed: &mut Feed<'_>, key: u64, step: usize, sample: usize) {
        for name in &self.rngs {
            if let Some(words) = feed.i32(name) {
                words.copy_from_slice(&[key as i32, (key >> 32) as i32, step as i32, sample as i32]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_exec::{Options, Session, Store};
    use kolo_graph::{Builder, Type};

    /// An input called `lr` that is data stays as its owner wrote it, and a rate is fed under any name.
    #[test]
    fn the_role_decides_and_not_the_name() {
        let text = {
            let builder = Builder::new();
            builder.output("data", builder.step_input("lr", Type::f32([])));
            builder.finish().unwrap().to_string()
        };
        let text = text.replace(
            "  output",
            "  %1 = input{name=\"speed\", dtype=f32, shape=[], per_step=true, role=\"learning_rate\"}() : f32[]\n  output \"rate\" = %1\n  output",
        );
        let graph =
            kolo_graph::text::parse(&text, &kolo_ops::registry()).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let inputs = StepInputs::of(&graph);
        let mut store = Store::new(&graph, 1);
        let mut session = Session::new(graph, &store, Options::single(1));
        let feed = |feed: &mut Feed<'_>| {
            feed.f32("lr").unwrap()[0] = 7.0;
            inputs.feed_step(feed, 0.5, 3);
        };
        session.run(&mut store, feed, |_, _| {}).unwrap();
        assert_eq!((session.output("data").unwrap()[0], session.output("rate").unwrap()[0]), (7.0, 0.5));
    }
}
