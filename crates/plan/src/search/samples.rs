//! A rank's work on a micro-batch of any size, from two sizes: everything grows evenly with the samples.

use crate::anatomy::{Anatomy, Kept, Unit, UnitExchange, UnitPass};
use crate::op_cost::{Body, OpCall};

/// A line through two points.
#[derive(Clone, Copy)]
struct Line {
    /// How far along the way from the first to the second.
    at: f64,
}

impl Line {
    fn number(self, first: f64, second: f64) -> f64 {
        (first + (second - first) * self.at).max(0.0)
    }

    fn kept(self, first: Kept, second: Kept) -> Kept {
        Kept { reals: self.number(first.reals, second.reals), bytes: self.number(first.bytes, second.bytes) }
    }

    fn body(self, first: &Body, second: &Body) -> Option<Body> {
        match (*first, *second) {
            (
                Body::Product { rows, columns, terms, convolution },
                Body::Product { rows: r, columns: c, terms: t, .. },
            ) => Some(Body::Product {
                rows: self.number(rows, r).max(1.0),
                columns: self.number(columns, c).max(1.0),
                terms: self.number(terms, t).max(1.0),
                convolution,
            }),
            (Body::Attention { scores, passes, masked }, Body::Attention { scores: s, .. }) => {
                Some(Body::Attention { scores: self.number(scores, s), passes, masked })
            }
            (Body::ThinProducts, Body::ThinProducts) => Some(Body::ThinProducts),
            (Body::Stream, Body::Stream) => Some(Body::Stream),
            _ => None,
        }
    }

    fn call(self, (first, second): (&OpCall, &OpCall)) -> Option<OpCall> {
        Some(OpCall {
            name: first.name,
            body: self.body(&first.body, &second.body)?,
            flops: self.number(first.flops, second.flops),
            reals: self.number(first.reals, second.reals),
            bytes: self.number(first.bytes, second.bytes),
            weights: self.number(first.weights, second.weights),
            composite: first.composite,
            reread: self.number(first.reread, second.reread),
        })
    }

    fn pass(self, first: &UnitPass, second: &UnitPass) -> Option<UnitPass> {
        let same = first.calls.len() == second.calls.len() && first.exchanges.len() == second.exchanges.len();
        let calls = first.calls.iter().zip(&second.calls).map(|pair| self.call(pair));
        let exchange = |(one, other): (&UnitExchange, &UnitExchange)| {
            let alike = one.axis == other.axis && one.kind == other.kind;
            let reals = self.number(one.reals, other.reals);
            alike.then(|| UnitExchange { reals, ..one.clone() })
        };
        let exchanges = first.exchanges.iter().zip(&second.exchanges).map(exchange);
        same.then_some(UnitPass { calls: calls.collect::<Option<_>>()?, exchanges: exchanges.collect::<Option<_>>()? })
    }

    fn unit(self, first: &Unit, second: &Unit) -> Option<Unit> {
        Some(Unit {
            forward: self.pass(&first.forward, &second.forward)?,
            input: self.pass(&first.input, &second.input)?,
            weight: self.pass(&first.weight, &second.weight)?,
            parameters: first.parameters,
            borrowed: first.borrowed,
            saved: self.kept(first.saved, second.saved),
            transient: self.kept(first.transient, second.transient),
            handed_on: self.kept(first.handed_on, second.handed_on),
            widened: self.number(first.widened, second.widened),
        })
    }
}

impl Anatomy {
    /// The same rank's work on so many samples, on the line through this and another size. `None` if the two are not computed
    /// by the same calls.
    pub fn at_samples(&self, other: &Anatomy, samples: usize) -> Option<Anatomy> {
        let (first, second) = (self.samples as f64, other.samples as f64);
        if first == second || self.order != other.order || self.units.len() != other.units.len() {
            return None;
        }
        let line = Line { at: (samples as f64 - first) / (second - first) };
        let units = self.units.iter().zip(&other.units).map(|(one, other)| line.unit(one, other));
        Some(Anatomy {
            units: units.collect::<Option<_>>()?,
            model_flops: line.number(self.model_flops, other.model_flops),
            layer_flops: line.number(self.layer_flops, other.layer_flops),
            samples,
            ..self.clone()
        })
    }
}
